"""The learned solver: what it is before it is fitted, what it contains as special cases, what it may not do."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import Anderson, EquilibriumWarning, HyperAnderson, Ladder, Picard, Stop
from equipoise._problem import Problem, StateSpec
from equipoise.solvers import (
    HyperConfig,
    WrongModelError,
    fingerprint,
    hyper_solver_for,
    load_solver,
    named_solver,
    save_solver,
)
from equipoise.solvers.hyper_anderson import least_squares
from equipoise.tasks.hyper import FitSettings, HyperRecipe, Networks, fit_hyper_solver
from equipoise.train.config import load_config
from tests.problems import gaussian, scaled_weight

FIXED = Stop(rtol=0.0, max_steps=9, select="last")
TIGHT = Stop(rtol=1e-6, max_steps=200)
NEXT_TO_EXACT = Stop(rtol=1e-12, max_steps=300)


class Sequence(nn.Module):
    """z_t = tanh(A z_t + B z_{t-1} + x_t): causal, (N, T, d)."""

    def __init__(self, d: int = 6, norm: float = 0.5) -> None:
        super().__init__()
        self.here = nn.Parameter(scaled_weight(d, norm, 1).float())
        self.before = nn.Parameter(scaled_weight(d, norm, 2).float())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        before = nn.functional.pad(z[:, :-1], (0, 0, 1, 0))
        return torch.tanh(z @ self.here.T + before @ self.before.T + x)


class Images(nn.Module):
    """Two resolutions that look at each other: (N, 3, H, W) and (N, 5, H/2, W/2)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Conv2d(3, 5, 2, stride=2), nn.ConvTranspose2d(5, 3, 2, stride=2)

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), x.new_zeros(len(x), 5, x.shape[2] // 2, x.shape[3] // 2)

    def forward(self, z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x + 0.5 * self.up(z[1])), torch.tanh(self.down(z[0]))


class Flat(nn.Module):
    """(N, 10) from inputs of 4 numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Parameter(scaled_weight(10, 0.9, 3).float()), nn.Linear(4, 10)

    def initial_state(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 10)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.inner.T + self.outer(x))


CELLS = {
    "sequence": (Sequence(), gaussian(5, 7, 6, seed=4).float(), {"local": False}),
    "local": (Sequence(), gaussian(5, 7, 6, seed=4).float(), {"local": True}),
    "images": (Images(), gaussian(3, 3, 8, 6, seed=5).float(), {}),
    "any": (Flat(), gaussian(6, 4, seed=6).float(), {}),
}


def made(name: str, **settings) -> tuple[eq.DEQ, Tensor, HyperAnderson]:
    cell, x, own = CELLS[name]
    deq = eq.DEQ(copy.deepcopy(cell), engine="eager")
    settings = {"hidden": 8, "compressed": 6, "width": 7, **own, **settings}
    return deq, x, hyper_solver_for(deq, x, budget=None, **settings)


def shaken(solver: HyperAnderson, size: float = 0.1) -> HyperAnderson:
    """The solver with weights as after some fitting."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in solver.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return solver


def solved(deq: eq.DEQ, x: Tensor, solver: eq.Solver, stop: Stop = FIXED, **options) -> eq.Solution:
    with torch.no_grad(), eq.override(deq, solver=solver, stop=stop):
        return deq(x, **options)


def leaves(tree) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


def same(a, b, tolerance: float = 0.0) -> bool:
    return all((x - y).abs().max() <= tolerance for x, y in zip(leaves(a), leaves(b), strict=True))


# Special cases


@pytest.mark.parametrize("weights", ["shift", "free", "newest"])
@pytest.mark.parametrize("name", CELLS)
def test_unfitted_it_is_the_plain_iteration(name, weights):
    deq, x, solver = made(name, weights=weights)
    assert same(solved(deq, x, solver).value, solved(deq, x, Picard()).value)
    stop = Stop(rtol=1e-4, max_steps=60)
    ours, plain = (solved(deq, x, s, stop, trace=True).stats for s in (solver, Picard()))
    assert torch.equal(ours.steps, plain.steps)
    assert torch.equal(ours.status, plain.status)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize("memory", [1, 3, 6])
def test_with_weights_of_least_squares_it_is_anderson(dtype, tolerance, memory):
    deq, x, _ = made("any")
    deq, x = deq.to(dtype), x.to(dtype)
    solver = HyperAnderson.for_any(10, weights="least_squares", mixing=False, memory=memory)
    assert solver.num_parameters == 0
    expected = solved(deq, x, Anderson(memory=memory))
    assert same(solved(deq, x, solver).value, expected.value, tolerance)
    unfitted = HyperAnderson.for_any(10, weights="corrected", memory=memory).to(dtype)
    assert same(solved(deq, x, unfitted).value, expected.value, tolerance)


@pytest.mark.parametrize(
    ("weights", "classic"), [("least_squares", Anderson(memory=3)), ("newest", Picard())], ids=["anderson", "picard"]
)
def test_steps_that_are_fitted_are_those_that_are_made(weights, classic):
    """A solver that learns its start alone steps by the classic solver; a fit looks at its own formula."""
    deq, x, _ = made("any")
    solver = HyperAnderson.for_any(10, weights=weights, mixing=False, memory=3)
    problem = deq.problem(x)
    z = theirs = problem.start(deq.start(x))
    ours, kept = solver.empty_state(z), solver.init(problem, z)[1]
    assert type(kept) is type(classic.init(problem, z)[1])
    with torch.no_grad():
        for _ in range(7):
            z, ours = solver.advance(problem.spec, z, problem.evaluate(z), ours)
            theirs, kept = solver.propose(problem, theirs, problem.evaluate(theirs), kept)
            assert same(z, theirs, 1e-5)


def test_anderson_with_another_step_length():
    deq, x, solver = made("any", weights="least_squares", source=None, products=False)
    with torch.no_grad():
        solver.step.out.bias[1] = -0.4
    assert same(solved(deq, x, solver).value, solved(deq, x, Anderson(mixing=0.6)).value, 1e-5)


def test_least_squares_solves_the_bordered_system():
    G = gaussian(4, 5, 9, seed=1)  # 4 systems, 5 residuals of 9 numbers
    weights = least_squares(G @ G.mT, torch.float64)
    ones = torch.ones(4, 5, 1, dtype=torch.float64)
    border = torch.cat([torch.cat([G @ G.mT, ones], 2), torch.cat([ones.mT, torch.zeros(4, 1, 1)], 2)], 1)
    right = torch.tensor([0.0] * 5 + [1.0], dtype=torch.float64).expand(4, 6)
    assert torch.allclose(weights, torch.linalg.solve(border, right)[:, :5], rtol=1e-6, atol=1e-6)
    broken = (G @ G.mT).clone()
    broken[1] = torch.nan
    assert least_squares(broken, torch.float64)[1].tolist() == [0, 0, 0, 0, 1]


# A fitted solver


def reference_step(solver: HyperAnderson, zs, gs, weights, mixing) -> Tensor:
    """Σ α_i z_i + β Σ α_i g_i, term by term; weights (N, k), the newest last."""
    total = torch.zeros_like(zs[-1])
    for i in range(weights.shape[1]):
        share = weights[:, i, None]
        z, g = zs[len(zs) - weights.shape[1] + i], gs[len(gs) - weights.shape[1] + i]
        residual = g if solver.config.plain_sum else share * g
        total = total + share * z + mixing[:, None] * residual
    return total


@pytest.mark.parametrize("plain_sum", [False, True])
@pytest.mark.parametrize("weights", ["shift", "softmax", "free", "corrected"])
def test_the_update_is_the_published_one(weights, plain_sum):
    deq, x, solver = made("any", weights=weights, plain_sum=plain_sum, memory=3, source=None)
    shaken(solver)
    problem = deq.problem(x)
    z, state = solver.init(problem, problem.start(deq.start(x)))
    zs, gs = [], []
    with torch.no_grad():
        for _ in range(7):
            fz = problem.evaluate(z)
            zs.append(z[0])
            gs.append(fz[0] - z[0])
            z, state = solver.propose(problem, z, fz, state)
            assert state.weights.shape[1] == min(len(zs), 3)
            if weights != "free":
                assert (state.weights.sum(dim=1) - 1).abs().max() < 1e-5
            expected = reference_step(solver, zs, gs, state.weights, state.mixing)
            assert torch.allclose(z[0], expected, rtol=1e-4, atol=1e-5)
    assert state.weights.std(dim=0).max() > 1e-4  # each system has its own
    if weights == "softmax":
        assert state.weights.min() >= 0


@pytest.mark.parametrize("name", CELLS)
def test_what_a_system_gets_does_not_depend_on_others(name):
    deq, x, solver = made(name)
    shaken(solver)
    whole, part = solved(deq, x, solver).value, solved(deq, x[1:3], solver).value
    assert same([leaf[1:3] for leaf in leaves(whole)], part, 1e-6)


@pytest.mark.parametrize("name", CELLS)
def test_finished_systems_are_dropped_without_a_trace(name):
    deq, x, solver = made(name)
    x = torch.cat([x * scale for scale in (0.1, 1.0, 30.0, 100.0)])
    shaken(solver, 0.03)
    stop = Stop(rtol=1e-4, max_steps=40)
    seen = []
    deq.cell.register_forward_hook(lambda module, inputs, output: seen.append(len(leaves(output)[0])))
    dropped = solved(deq, x, solver, stop)
    assert min(seen) < len(x)
    deq.in_dims = None  # nothing can be dropped then
    assert same(dropped.value, solved(deq, x, solver, stop).value, 1e-5)


def test_positions_do_not_look_ahead():
    deq, x, solver = made("local")
    shaken(solver)
    changed = x.clone()
    changed[:, 4:] += 1.0
    before, after = (solved(deq, item, solver).value for item in (x, changed))
    assert (before[:, :4] - after[:, :4]).abs().max() < 1e-6
    assert (before[:, 4:] - after[:, 4:]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["sequence", "local"])
def test_the_first_guess_sees_a_position_and_two_before(kind):
    deq, x, solver = made(kind)
    shaken(solver, 0.3)
    changed = x.clone()
    changed[:, 3] += 1.0
    problems = [deq.problem(item) for item in (x, changed)]
    guesses = [solver.init(p, p.start(torch.zeros_like(x)))[0][0].view(x.shape) for p in problems]
    differs = (guesses[0] - guesses[1]).abs().amax(dim=(0, 2)) > 1e-6
    assert differs.tolist() == [False, False, False, True, True, True, False]


def test_sizes_of_inputs_are_free():
    deq, _, solver = made("sequence")
    for length in (1, 2, 11):
        assert solved(deq, torch.randn(2, length, 6), solver).value.shape == (2, length, 6)
    deq, _, solver = made("images")
    for height, width in ((2, 2), (12, 10)):
        z = solved(deq, torch.randn(1, 3, height, width), shaken(solver)).value
        assert z[1].shape == (1, 5, height // 2, width // 2)
    solver = HyperAnderson.for_any(10, source=None, compressed=4, width=4)
    assert solved(eq.DEQ(Sequence(3)), torch.randn(2, 5, 3), solver).value.shape == (2, 5, 3)


@pytest.mark.parametrize(
    ("solver", "deq", "x", "words"),
    [
        ("sequence", Sequence(3), (2, 5, 3), r"leaves \(N, T, features\), 6 by leaf, .* of shape \(2, 5, 3\); fit one"),
        ("images", Sequence(6), (2, 5, 6), r"maps \(N, channels, H, W\), 3, 5 by leaf, .* \(2, 5, 6\)"),
        ("any", Sequence(6), (2, 5, 6), "systems of so many numbers"),
    ],
)
def test_states_of_another_form_are_refused(solver, deq, x, words):
    with pytest.raises(ValueError, match=words):
        solved(eq.DEQ(deq), torch.randn(x), made(solver)[2])


def test_channels_last_states_are_the_same_problem():
    deq, x, solver = made("images")
    shaken(solver)
    expected = solved(deq, x, solver).value
    z0 = tuple(leaf.to(memory_format=torch.channels_last) for leaf in deq.start(x))
    assert same(solved(deq, x, solver, z0=z0).value, expected, 1e-5)


def test_half_precision_states_and_double_ones():
    deq, x, solver = made("sequence")
    shaken(solver)
    expected = solved(deq, x, solver).value
    double = copy.deepcopy(deq).double()
    assert same(solved(double, x.double(), solver).value.float(), expected, 1e-4)
    half = copy.deepcopy(deq).bfloat16()
    assert same(solved(half, x.bfloat16(), solver).value.float(), expected, 0.1)


def test_more_steps_than_remembered_go_on_falling():
    deq, x, solver = made("any", memory=3)
    trace = solved(deq, x, shaken(solver, 0.02), Stop(rtol=1e-6, max_steps=40), trace=True).stats
    assert trace.ok.all()
    assert trace.steps.min() > 2 * solver.config.memory


def test_collected_weights_and_step_lengths():
    deq, x, solver = made("any")
    shaken(solver)
    collected = solved(deq, x, solver, collect=("iterates", "weights", "mixing")).collected
    assert len(collected["iterates"]) == FIXED.max_steps + 1
    assert [w.shape[1] for w in collected["weights"]] == [1, 2, 3, 4, 5, 6, 6, 6, 6]
    assert collected["mixing"][0].shape == (len(x),)


# Starts


def test_a_start_of_ones_own_is_kept():
    deq, x, solver = made("any")
    shaken(solver)
    root = solved(deq, x, Anderson(), Stop(rtol=1e-6)).value
    z0 = root.clone()
    z0[0] = 0.0
    problem = deq.problem(x)
    start = solver.init(problem, problem.start(z0))[0][0]
    assert torch.equal(start[1:], root[1:])
    assert start[0].abs().max() > 0
    replacing = HyperAnderson(dataclasses.replace(solver.config, warm="replace"))
    replacing.load_state_dict(solver.state_dict())
    assert not torch.equal(replacing.init(problem, problem.start(z0))[0][0][1:], root[1:])


def test_a_cell_with_another_start_has_it_replaced():
    deq = eq.DEQ(Flat(), initial_state=lambda x: x.new_ones(len(x), 10))
    assert hyper_solver_for(deq, torch.randn(2, 4), budget=None).config.warm == "replace"


def test_what_becomes_of_a_start_is_left_to_the_model_or_set():
    deq = eq.DEQ(Flat())
    for warm, expected in ((None, "keep"), ("keep", "keep"), ("replace", "replace")):
        settings = Networks(warm=warm, budget=10.0).settings()
        assert hyper_solver_for(deq, torch.randn(2, 4), **settings).config.warm == expected


def test_context_is_read_instead_of_the_inputs():
    deq, x, _ = made("any")
    solver = shaken(HyperAnderson.for_any(10, source=2, hidden=5))
    a, b = (solved(deq, x, solver, context=torch.full((len(x), 2), value)).value for value in (0.0, 3.0))
    assert not torch.equal(a, b)
    with pytest.raises(ValueError, match=r"reads an input of 2 numbers, but the first one, of shape \(6, 4\), has 4"):
        solved(deq, x, solver)


def test_nothing_to_read():
    z0 = torch.zeros(2, 10)
    with pytest.raises(ValueError, match="has nothing to read"):
        eq.fixed_point(lambda z: 0.5 * z + 1, z0, solver=HyperAnderson.for_any(z0, source=3))
    deq, x, solver = made("any")
    for adjoint in (eq.Implicit, eq.Shine):
        with pytest.raises(ValueError, match=f"{adjoint.__name__}: HyperAnderson has a learned start, and"):
            adjoint(solver=solver)
    without = shaken(made("any", source=None)[2], 0.01)
    found = []
    for adjoint in (eq.Implicit(stop=TIGHT), eq.Implicit(solver=without, stop=TIGHT)):
        total = eq.fixed_point(deq.cell, z0, x[:2], adjoint=adjoint, stop=TIGHT).value.sum()
        found.append(torch.autograd.grad(total, deq.cell.inner))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


# Safety


class Rotation(nn.Module):
    """Plain iteration turns and grows; the root is x / 1.25 or so."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 1.5 * torch.stack([-z[:, 1], z[:, 0]], dim=1) + x


def test_the_best_iterate_stands_when_steps_are_bad():
    deq, x = eq.DEQ(Rotation()), torch.randn(6, 2)
    solver = shaken(HyperAnderson.for_any(2, source=2, hidden=4, compressed=4, width=4), 2.0)
    solution = solved(deq, x, solver, Stop(rtol=1e-6, max_steps=8), trace=True)
    measured = solution.stats.trace.nan_to_num(torch.inf)
    assert not solution.stats.ok.any()
    assert torch.allclose(solution.stats.residual, measured.min(dim=1).values)
    assert (solution.stats.residual <= measured[:, 0]).all()  # never worse than where it began
    z = solution.value
    relative = (deq.cell(z, x) - z).norm(dim=1) / deq.cell(z, x).norm(dim=1)
    assert torch.allclose(relative, solution.stats.residual, rtol=1e-4)


def test_stalled_systems_are_handed_to_a_classic_solver():
    deq, x = eq.DEQ(Rotation()), torch.randn(6, 2)
    solver = shaken(HyperAnderson.for_any(2, source=2, hidden=4, compressed=4, width=4), 2.0)
    stop = Stop(rtol=1e-4, max_steps=8)
    assert not solved(deq, x, solver, stop).stats.ok.any()
    guarded = solved(deq, x, Ladder((solver, Anderson())), stop)
    assert guarded.stats.ok.all()
    assert guarded.stats.nfe > 8


@pytest.mark.parametrize("stages", [1, 2])
def test_a_ladder_returns_nothing_worse_than_it_was_given(stages):
    deq, x, solver = made("any")
    ladder = Ladder((shaken(solver, 20.0), Anderson())[:stages])
    given = solved(deq, x, Picard(), Stop(rtol=0.0, max_steps=1)).stats.residual  # of the start itself
    stop = Stop(rtol=1e-5, max_steps=3)
    assert (solved(deq, x, solver, stop).stats.residual > given).all()
    found = solved(deq, x, ladder, stop)
    assert (found.stats.residual <= given).all()
    with torch.no_grad():
        image = deq.cell(found.value, x)
    measured = (image - found.value).norm(dim=1) / image.norm(dim=1)
    torch.testing.assert_close(measured, found.stats.residual, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("first", [Picard(), None])
def test_nor_does_a_later_stage_of_a_ladder(first):
    deq, x, solver = made("any", warm="replace")
    shaken(solver, 20.0)
    stop = Stop(rtol=1e-9, max_steps=3)
    before = solved(deq, x, first or solver, stop)
    found = solved(deq, x, Ladder((first or solver, solver)), stop)
    assert not before.stats.ok.any()
    assert (found.stats.residual <= before.stats.residual).all()


@pytest.mark.parametrize("name", ["sequence", "images", "any"])
def test_a_batch_of_none(name):
    deq, x, solver = made(name)
    value = solved(deq, x[:0], shaken(solver), Stop(rtol=1e-3, max_steps=4)).value
    assert all(len(leaf) == 0 for leaf in (value if isinstance(value, tuple) else (value,)))


def test_sizes_can_be_told_by_a_batch_of_none():
    example, source = (torch.zeros(0, 3, 2), torch.zeros(0, 5)), torch.zeros(0, 7)
    assert HyperAnderson.for_any(example, source).config == HyperAnderson.for_any((6, 5), 7).config


def test_it_can_be_the_second_stage_and_keeps_what_the_first_found():
    deq, x, solver = made("any")
    ladder = Ladder((Anderson(), shaken(solver, 0.02)))
    one = solved(deq, x, Anderson(), Stop(rtol=1e-5, max_steps=4))
    two = solved(deq, x, ladder, Stop(rtol=1e-5, max_steps=4), trace=True)
    assert not one.stats.ok.all()
    assert (two.stats.residual <= one.stats.residual).all()
    closure = eq.fixed_point(
        lambda z: deq.cell(z, x), deq.start(x), solver=Ladder((Anderson(), HyperAnderson.for_any(10)))
    )
    assert closure.stats.ok.all()


def test_a_system_that_is_not_finite_harms_no_other():
    deq, x, solver = made("any")
    shaken(solver)
    bad = x.clone()
    bad[2] = torch.nan
    clean, spoiled = (solved(deq, item, solver, Stop(rtol=1e-3)) for item in (x, bad))
    others = [0, 1, 3, 4, 5]
    assert torch.allclose(clean.value[others], spoiled.value[others], atol=1e-6)
    assert spoiled.stats.status[2] == eq.Status.NONFINITE


# A module


def test_it_belongs_to_its_deq_but_is_saved_apart():
    deq, _, solver = made("any")
    names = set(deq.state_dict())
    deq.plan = deq.plan.replace(solver=solver)
    assert {id(p) for p in solver.parameters()} <= {id(p) for p in deq.parameters()}
    assert set(deq.state_dict()) == names
    deq.double()
    assert next(solver.parameters()).dtype == torch.float64
    twin = copy.deepcopy(deq)
    assert twin.plan.solver is not solver
    assert "HyperAnderson(HyperConfig(kind='any'" in repr(deq)


def test_gradients_of_a_model_with_a_learned_forward_solver():
    deq, x, solver = made("any")
    shaken(solver, 0.02)
    grads = []
    for forward in (Anderson(), solver):
        deq.plan = eq.Plan(forward, eq.Implicit(stop=Stop(rtol=1e-6)), Stop(rtol=1e-6))
        deq.zero_grad()
        deq(x).value.square().sum().backward()
        grads.append([p.grad.clone() for p in deq.cell.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*grads, strict=True))
    assert all(p.grad is None for p in solver.parameters())


@pytest.mark.parametrize("settings", [{}, {"source": None}])
@pytest.mark.parametrize("name", ["sequence", "local", "images", "any"])
def test_derivatives_of_any_order_do_not_depend_on_the_forward_solver(name, settings):
    deq, x, solver = made(name, **settings)
    deq.double()
    shaken(solver.double(), 0.02)
    any_order, x = eq.Implicit(any_order=True, stop=NEXT_TO_EXACT), x.double()

    def size(given: Tensor) -> Tensor:
        return sum(leaf.square().sum() for leaf in leaves(deq(given).value))

    def of_gradient(given: Tensor) -> Tensor:
        return torch.func.grad(size)(given).square().sum()

    found = []
    for forward in (Anderson(), solver, Ladder((solver, Anderson()))):
        with eq.override(deq, solver=forward, adjoint=any_order, stop=NEXT_TO_EXACT):
            found.append((torch.func.grad(size)(x), torch.func.grad(of_gradient)(x)))
            moved = torch.func.jvp(size, (x,), (torch.ones_like(x),))[1]
            torch.testing.assert_close(moved, found[0][0].sum(), rtol=1e-7, atol=1e-9)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-7, atol=1e-9)


def test_vmapped_systems_have_no_inputs_that_a_learned_start_could_read():
    for settings in ({"source": None}, {}):
        deq, x, solver = made("sequence", **settings)
        with eq.override(deq, solver=solver, adjoint=eq.Implicit(any_order=True), stop=TIGHT):
            one_by_one = torch.func.vmap(lambda row, deq=deq: deq(row[None]).value[0])
            if settings:
                torch.testing.assert_close(one_by_one(x), deq(x).value, rtol=1e-4, atol=1e-5)
            else:
                with pytest.raises(ValueError, match="has nothing to read"):
                    one_by_one(x)


def test_an_audit_is_of_the_parameters_of_the_model():
    deq, x, solver = made("any")
    deq.plan = eq.Plan(shaken(solver, 0.02), eq.Implicit(stop=TIGHT), TIGHT)
    assert eq.audit_gradient(deq, x).relative_error < 1e-3


class Numbers(nn.Module):
    """A number for each system, and two more in a leaf of their own."""

    def initial_state(self, x: Tensor) -> dict[str, Tensor]:
        return {"one": x.new_zeros(len(x)), "two": x.new_zeros(len(x), 2)}

    def forward(self, z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return {"one": torch.tanh(0.4 * z["two"].sum(1) + x[:, 0]), "two": torch.tanh(0.4 * z["one"][:, None] + x)}


@pytest.mark.parametrize("settings", [{}, {"rank": 2, "weights": "newest", "mixing": False}])
def test_leaves_of_one_number(settings):
    deq, x = eq.DEQ(Numbers(), engine="eager"), torch.randn(5, 2)
    fit = fit_hyper_solver(deq, [x], FitSettings(steps=2, unroll=2), budget=None, hidden=4, width=4, **settings)
    found = solved(deq, x, fit.solver, TIGHT)
    assert found.stats.ok.all()
    assert same(found.value, solved(deq, x, Anderson(), TIGHT).value, 1e-4)
    assert len(solved(deq, x[:0], fit.solver, TIGHT).value["one"]) == 0
    alone = eq.fixed_point(lambda z: torch.cos(z), torch.zeros(4), solver=HyperAnderson.for_any(torch.zeros(4)))
    torch.testing.assert_close(alone.value, torch.full((4,), 0.739085), rtol=1e-2, atol=1e-2)


class WithContext(nn.Module):
    """Anything that is told more about its inputs than they are."""

    def __init__(self) -> None:
        super().__init__()
        self.deq = eq.DEQ(copy.deepcopy(CELLS["any"][0]), engine="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.deq(x, context=torch.cat([x, x * x], dim=1)).value


def test_a_fit_reads_the_context_that_a_model_gives():
    model = WithContext()
    fit = fit_hyper_solver(model, [CELLS["any"][1]], FitSettings(steps=2, unroll=2), budget=None, hidden=4)
    assert fit.solver.config.source == 8
    with eq.override(model, solver=fit.solver):
        assert model(CELLS["any"][1][:2]).shape == (2, 10)


def test_nothing_is_read_on_the_host():
    """Tensors without values stand for a device: any look at one raises."""
    assert HyperAnderson.capturable
    for weights in ("shift", "softmax", "corrected"):
        config = HyperConfig("sequence", (6,), 6, 8, compressed=4, width=4, weights=weights, local=True)
        with torch.device("meta"):
            solver, x = HyperAnderson(config), torch.zeros(3, 5, 6)
            problem = Problem(lambda z, x: z + x, StateSpec.of(x), (x,), in_dims=0)
        with torch.no_grad():
            z, state = solver.init(problem, problem.start(x))
            for _ in range(8):
                z, state = solver.propose(problem, z, problem.evaluate(z), state)
        assert z[0].shape == (3, 30)


# Sizes


def test_the_kind_is_seen_from_the_shapes():
    for name, kind in (("sequence", "sequence"), ("images", "images"), ("any", "any")):
        solver = made(name)[2]
        assert solver.config.kind == kind
        assert solver.config.source == {"sequence": 6, "images": 3, "any": 4}[name]
    cell, x, _ = CELLS["sequence"]
    free = hyper_solver_for(eq.DEQ(cell), x, source=None, budget=None)
    assert free.initialiser is None
    assert free.config.local
    assert not hyper_solver_for(eq.DEQ(cell), x, compression="mean", budget=None).config.local
    of_none, of_some = (hyper_solver_for(eq.DEQ(cell), some, budget=None).config for some in (x[:0], x))
    assert of_none == of_some


def test_a_learned_start_alone_is_followed_by_anderson_for_sequences_too():
    recipe = load_config(HyperRecipe, "recipes/hyper/initialiser_only.toml", [])
    cell, x, _ = CELLS["sequence"]
    deq = eq.DEQ(cell, engine="eager")
    solver = hyper_solver_for(deq, x, **{**recipe.solver.settings(), "budget": None})
    assert solver.classic == Anderson()
    with torch.no_grad():
        solver.initialiser.out.weight.zero_()
        solver.initialiser.out.bias.zero_()
    ours, theirs = (solved(deq, x, one) for one in (solver, Anderson()))
    assert torch.equal(ours.value, theirs.value)


@pytest.mark.parametrize("weights", ["shift", "softmax", "free", "corrected", "least_squares", "newest"])
def test_systems_that_are_solved_exactly_stay_so(weights):
    cell = Flat()
    with torch.no_grad():
        cell.outer.bias.zero_()
    deq, x = eq.DEQ(cell, engine="eager"), gaussian(3, 4, seed=2).float()
    x[0] = 0.0  # the root is zero, and so is every residual on the way
    solver = shaken(hyper_solver_for(deq, x, weights=weights, source=None, budget=None))
    stats = solved(deq, x, solver, Stop(rtol=0.0, max_steps=30)).stats
    assert stats.residual[0] == 0
    assert (stats.residual[1:] < 0.5).all()
    settings = FitSettings(steps=3, unroll=4)
    assert fit_hyper_solver(deq, [x], settings, weights=weights, source=None, budget=None).record["skipped"] == 0


def test_the_budget_is_kept():
    cell, x = Sequence(64), torch.randn(2, 3, 64)
    deq, base = eq.DEQ(cell), nn.Linear(500, 500)
    solver = hyper_solver_for(deq, x, base=base)
    most = 0.04 * sum(p.numel() for p in base.parameters())
    assert 0.6 * most < solver.num_parameters <= most
    start = sum(p.numel() for p in solver.initialiser.parameters())
    assert 1 / 3 < start / (solver.num_parameters - start) < 3
    assert hyper_solver_for(deq, x, base=base, budget=None).num_parameters > most
    assert hyper_solver_for(deq, x, base=base, width=32).config.width == 32
    smallest = hyper_solver_for(deq, x, budget=1e-9).config
    assert (smallest.hidden, smallest.compressed, smallest.width) == (4, 4, 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "sequense"}, "did you mean 'sequence'"),
        ({"weights": "shfit"}, "did you mean 'shift'"),
        ({"compression": "lowest"}, "unknown compression of sequence 'lowest'"),
        ({"memory": 0}, "memory must be an integer of at least 1"),
        ({"state": ()}, "at least one leaf"),
        ({"warm": "no"}, "unknown way with a start"),
        ({"kind": "any", "local": True}, "local concerns positions of sequences"),
        ({"local": True, "compression": "mean"}, "a mean over positions"),
    ],
)
def test_wrong_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        HyperConfig(**{"kind": "sequence", "state": (4,), **settings})


def test_a_setting_that_does_not_exist():
    deq, x, _ = made("any")
    with pytest.raises(ValueError, match="unknown setting of a learned solver 'widht'; did you mean 'width'"):
        hyper_solver_for(deq, x, widht=3)


# Files


def test_by_name_it_needs_its_model():
    with pytest.raises(
        ValueError, match=r"'hyper:runs/x' is a learned solver, .*: load_solver\(PATH, model\) gives it"
    ):
        eq.DEQ(Sequence(), solver="hyper:runs/x")
    with pytest.raises(ValueError, match=r"unknown solver 'hypre'.* hyper:PATH is a learned one"):
        named_solver("hypre")


def test_saved_and_loaded(tmp_path):
    deq, x, solver = made("sequence", weights="softmax")
    shaken(solver)
    path = save_solver(solver, tmp_path / "hyper" / "solver.safetensors", deq, {"steps": 3})
    for place in (path, path.parent, tmp_path):
        loaded = load_solver(place, deq)
        assert loaded.config == solver.config
        assert same(solved(deq, x, loaded).value, solved(deq, x, solver).value)
    assert isinstance(named_solver(f"hyper:{tmp_path}", deq), HyperAnderson)
    assert named_solver("anderson") == Anderson()
    assert [p.name for p in path.parent.iterdir()] == ["solver.safetensors"]


def test_what_was_fitted_in_double_precision_stays_so(tmp_path):
    solver = shaken(made("any")[2].double())
    loaded = load_solver(save_solver(solver, tmp_path / "solver.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(solver.parameters(), loaded.parameters(), strict=True))


def test_a_compiled_model_is_the_same_model():
    deq = made("any")[0]
    assert fingerprint(torch.compile(nn.Sequential(deq))) == fingerprint(nn.Sequential(deq))


def test_another_model_is_refused(tmp_path):
    deq, _, solver = made("any")
    path = save_solver(solver, tmp_path / "solver.safetensors", deq)
    other = copy.deepcopy(deq)
    assert fingerprint(other) == fingerprint(deq)
    other.plan = other.plan.replace(solver=solver)
    assert fingerprint(other) == fingerprint(deq)  # a learned solver is no part of the model
    with torch.no_grad():
        other.cell.outer.bias[0] += 1e-6
    with pytest.raises(WrongModelError, match="was fitted to another model than this DEQ"):
        load_solver(path, other)
    with pytest.warns(EquilibriumWarning, match=r"was fitted to another model .* Look at the residuals"):
        assert load_solver(path, other, force=True).config == solver.config
    assert load_solver(path).config == solver.config


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="`equipoise hyper RUN` writes one"):
        load_solver(tmp_path)
    (tmp_path / "solver.safetensors").write_text("no")
    with pytest.raises(ValueError, match="cannot be read as a learned solver"):
        load_solver(tmp_path)
