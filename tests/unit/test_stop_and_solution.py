"""Stop, Status, Stats, Solution: values, words and tree structure."""

import dataclasses
import pickle

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import equipoise as eq
from equipoise import Solution, Stats, Status, Stop
from equipoise._problem import Problem, StateSpec
from equipoise._stop import precision_floor, tiny_norm
from tests import problems
from tests.problems import tanh_map

# --- Stop ------------------------------------------------------------------------------------------------------------


def test_stop_defaults_are_the_documented_ones():
    stop = Stop()
    assert dataclasses.asdict(stop) == {
        "rtol": 1e-5,
        "atol": 0.0,
        "max_steps": 100,
        "norm": "l2",
        "select": "best",
        "check_every": 1,
        "plateau": 20,
        "diverge": 1e6,
    }


def test_stop_is_a_value():
    assert Stop(rtol=1e-3) == Stop(rtol=1e-3) != Stop(rtol=1e-4)
    assert hash(Stop()) == hash(Stop())
    assert pickle.loads(pickle.dumps(Stop(max_steps=7))) == Stop(max_steps=7)
    assert eval(repr(Stop(plateau=None))) == Stop(plateau=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Stop().rtol = 0.1


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"rtol": 0}, True), ({"rtol": 0.0, "atol": 0.0}, True), ({"rtol": 0, "atol": 1e-9}, False), ({}, False)],
)
def test_fixed_budget(options, expected):
    assert Stop(**options).fixed_budget is expected


def test_never_diverging_is_allowed():
    assert Stop(diverge=float("inf")).diverge == float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_floor_of_each_dtype(dtype):
    """A few units of rounding, and never so large that a useful tolerance would fall below it."""
    eps = torch.finfo(dtype).eps
    assert eps <= precision_floor(dtype) <= 16 * eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_keeps_zero_away_from_zero_is_not_felt(dtype):
    assert 0 < tiny_norm(dtype) < torch.finfo(dtype).eps ** 2


def test_the_floor_of_a_problem_is_that_of_its_coarsest_part():
    z0 = (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.bfloat16))
    problem = Problem(lambda z: z, StateSpec.of(z0))
    assert problem.floor == precision_floor(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        problem = Problem(lambda z: z, StateSpec.of(torch.zeros(2, 3)))
    assert problem.floor == precision_floor(torch.bfloat16)


# --- Status ----------------------------------------------------------------------------------------------------------


def test_status_codes_are_stable():
    assert {status.name: int(status) for status in Status} == {
        "CONVERGED": 0,
        "MAX_STEPS": 1,
        "PLATEAU": 2,
        "DIVERGED": 3,
        "NONFINITE": 4,
        "PRECISION_FLOOR": 5,
    }


@pytest.mark.parametrize("status", Status)
def test_every_status_has_a_sentence(status):
    assert len(status.message.split()) >= 4
    assert status.ok == (status in (Status.CONVERGED, Status.PRECISION_FLOOR))
    if not status.ok:  # and says what to change
        assert any(word in status.message for word in ("Stop(", "try", "use"))


# --- Stats -----------------------------------------------------------------------------------------------------------


def stats_of(*codes, residual=None, steps=None):
    status = torch.tensor(codes)
    residual = torch.full((len(codes),), 0.5) if residual is None else torch.tensor(residual)
    return Stats(status, residual, torch.full_like(status, 7) if steps is None else torch.tensor(steps))


def test_ok_is_per_system():
    stats = stats_of(*Status)
    assert stats.ok.tolist() == [status.ok for status in Status]


def test_summary_is_empty_if_all_is_well():
    assert stats_of(Status.CONVERGED, Status.PRECISION_FLOOR).summary() == ""


def test_summary_groups_systems_by_status():
    stats = stats_of(1, 0, 3, 1, residual=[0.25, 0.0, 2.0, 0.125], steps=[50, 3, 9, 50])
    first, second = stats.summary().split("; 1 of")
    assert first.startswith("2 of 4 systems (rows 0, 3) stopped at max_steps")
    assert "[MAX_STEPS, after 50 steps, best relative residual 1.2e-01 to 2.5e-01]" in first
    assert second.startswith(" 4 systems (row 2) diverged")
    assert "[DIVERGED, after 9 steps, best relative residual 2.0e+00 to 2.0e+00]" in second


def test_summary_names_a_limited_number_of_systems():
    text = stats_of(*[Status.PLATEAU] * 20).summary(limit=3)
    assert "20 of 20 systems (rows 0, 1, 2, ...)" in text


# --- Solution --------------------------------------------------------------------------------------------------------


def test_require_returns_the_solution_or_raises():
    good = tanh_map().solve(stop=Stop(rtol=1e-8))
    assert good.require() is good
    bad = tanh_map().solve(stop=Stop(rtol=1e-8, max_steps=2))
    with pytest.raises(eq.EquilibriumError, match=r"4 of 4 systems \(rows 0, 1, 2, 3\) stopped at max_steps"):
        bad.require()
    with pytest.raises(eq.EquilibriumError):
        tanh_map().solve(stop=Stop(rtol=1e-8, max_steps=2), throw=True)
    assert issubclass(eq.EquilibriumError, RuntimeError)
    assert issubclass(eq.EquilibriumWarning, UserWarning)


def test_explain_in_words():
    case = tanh_map()
    case.x.requires_grad_()
    solution = case.solve(stop=Stop(rtol=1e-8))
    assert solution.backward is None
    text = solution.explain()
    assert text.startswith("forward: 4 of 4 systems solved in ")
    assert f"{solution.stats.nfe} evaluations of f" in text
    assert "backward" not in text
    solution.value.sum().backward()
    assert "backward: 4 of 4 systems solved" in solution.explain()
    assert f"{solution.backward.nfe} vector-Jacobian products" in solution.explain()


def test_explain_failures_and_special_cases():
    with torch.no_grad():
        failed = tanh_map().solve(stop=Stop(rtol=1e-8, max_steps=2)).explain()
        assert "0 of 4 systems solved" in failed
        assert "raise Stop(max_steps=...)" in failed
        lagged = tanh_map().solve("picard", stop=Stop(rtol=0, max_steps=2, select="last")).explain()
        assert "the residual is that of the iterate before it" in lagged
        empty = eq.fixed_point(lambda z: 0.5 * z, torch.zeros(0, 3)).explain()
        assert "no systems (empty batch)" in empty
        floor = tanh_map(n=100, dtype=torch.float32).solve(stop=Stop(rtol=1e-12)).explain()
        assert "4 of them reached the rounding level" in floor


def test_solutions_and_stats_are_trees():
    with torch.no_grad():
        solution = tanh_map().solve(stop=Stop(rtol=1e-8), trace=True, collect="iterates")
    leaves, treedef = tree_flatten(solution)
    assert any(leaf is solution.value for leaf in leaves)
    assert any(leaf is solution.stats.trace for leaf in leaves)
    again = tree_unflatten(leaves, treedef)
    assert isinstance(again, Solution)
    assert again.stats.nfe == solution.stats.nfe
    assert again.problem is solution.problem
    doubled = tree_map(lambda leaf: 2 * leaf if isinstance(leaf, torch.Tensor) else leaf, solution)
    assert torch.equal(doubled.value, 2 * solution.value)
    assert torch.equal(doubled.stats.residual, 2 * solution.stats.residual)
    assert torch.equal(doubled.collected["iterates"][1], 2 * solution.collected["iterates"][1])


def test_statistics_carry_no_gradient():
    case = tanh_map()
    case.x.requires_grad_()
    for adjoint in (eq.Implicit(), eq.Unroll()):
        solution = case.solve("anderson", adjoint=adjoint, stop=Stop(rtol=1e-8), trace=True)
        assert solution.value.requires_grad
        assert not solution.stats.residual.requires_grad
        assert not solution.stats.trace.requires_grad


def test_the_solution_knows_its_problem():
    case = tanh_map()
    with torch.no_grad():
        solution = case.solve(stop=Stop(rtol=1e-10))
    problem = solution.problem
    z = problem.start(solution.value)
    size = (problem.evaluate(z)[0] - z[0]).norm(dim=1) / z[0].norm(dim=1)
    assert bool((size <= 1.01e-10).all())
    assert problem.num_systems == 4


def test_solver_storage_is_reported():
    case = tanh_map(n=50, batch=4)
    with torch.no_grad():
        picard, anderson = (case.solve(name, stop=Stop(rtol=1e-8)) for name in ("picard", "anderson"))
    assert picard.stats.solver_bytes == 0
    # two rings of six states, and small matrices
    assert 12 * case.z0.nbytes <= anderson.stats.solver_bytes <= 14 * case.z0.nbytes


def test_a_start_far_away_is_no_convergence():
    """A residual that is small against a huge state is judged by ‖f(z)‖, and the scale is the system's own."""
    z0 = torch.tensor([[1e6], [0.0]], dtype=torch.float64)
    with torch.no_grad():
        solution = eq.fixed_point(lambda z: 0.5 * z + 1, z0, solver="picard", stop=Stop(rtol=1e-9, max_steps=80))
    assert solution.stats.status.tolist() == [Status.CONVERGED] * 2
    assert torch.allclose(solution.value, torch.full_like(z0, 2.0), rtol=1e-8)
    assert solution.stats.steps[0] > solution.stats.steps[1]


def test_problems_have_the_radius_they_promise():
    for radius in (0.3, 0.9, 0.99):
        case = problems.tanh_map_with_radius(n=8, batch=3, radius=radius, seed=1)
        assert problems.spectral_radius_of_tanh(case.W, case.x) == pytest.approx(radius, rel=1e-7)
        assert case.error(case.f(case.root, case.W, case.x)) < 1e-12
