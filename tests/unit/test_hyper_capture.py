"""The learned solver in the captured engine: the results of the eager one, whatever it consists of."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import _loop, _method, _recording
from equipoise._tape import solves_inline
from equipoise.solvers import HyperConfig
from tests.captured import (
    Emulated,
    Launches,
    Silent,
    assert_close,
    assert_falls_back,
    loss_of,
    recordings_of,
    same_statistics,
    tensors,
)
from tests.unit.test_hyper_anderson import CELLS, made, shaken

MEMORY = 3
FIXED = eq.Stop(rtol=0, max_steps=8)
LAST = eq.Stop(rtol=0, max_steps=8, select="last")
TOLERANCE = eq.Stop(rtol=1e-3, max_steps=14)

VARIANTS = {
    "shift": {},
    "softmax": {"weights": "softmax"},
    "free": {"weights": "free"},
    "corrected": {"weights": "corrected"},
    "least_squares": {"weights": "least_squares"},
    "anderson": {"weights": "least_squares", "mixing": False},
    "newest": {"weights": "newest"},
    "plain": {"weights": "newest", "mixing": False},
    "no_products": {"products": False},
    "newest_no_products": {"weights": "newest", "products": False},
    "weights_alone": {"mixing": False},
    "plain_sum": {"plain_sum": True},
    "no_start": {"source": None},
    "replace": {"warm": "replace"},
}


def prepared(name, stop=FIXED, size=0.03, **settings):
    """A DEQ with the captured engine, its inputs, and a solver with weights as after some fitting."""
    deq, x, solver = made(name, **{"memory": MEMORY, **settings})
    deq.engine, deq.plan = "captured", deq.plan.replace(solver=shaken(solver, size), stop=stop)
    return deq, x, solver


def both(deq, x, **options):
    """Solutions without gradients, by both engines."""
    with torch.no_grad():
        captured = deq(x, **options)
        deq.engine = "eager"
        eager = deq(x, **options)
        deq.engine = "captured"
    return captured, eager


def assert_agree(deq, x, tolerance=0.0, **options):
    captured, eager = both(deq, x, **options)
    assert_close(captured.value, eager.value, tolerance)
    same_statistics(captured.stats, eager.stats, 1e-6)
    return captured


def others(x, count=2):
    """Inputs of the same form."""
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(x.shape, generator=generator) for _ in range(count)]


@pytest.fixture
def emulated(monkeypatch):
    """As a CUDA graph would: operations on fixed tensors, nothing read; a budget in pieces of four steps."""
    monkeypatch.setattr(_recording, "tape_for", Emulated)
    monkeypatch.setattr(_loop, "LONGEST", 4)


# Results


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CELLS)
def test_every_variant_gives_what_the_eager_engine_gives(name, variant):
    """New inputs each time, more steps than are remembered, fixed budgets and a tolerance."""
    for stop in (LAST, TOLERANCE):
        deq, x, _ = prepared(name, stop, **VARIANTS[variant])
        for inputs in (x, *others(x, 1)):
            assert_agree(deq, inputs, 1e-6)
        assert (deq.capture.recorded, deq.capture.replayed) == (1, 2)
        assert not deq.capture.fallbacks


@pytest.mark.parametrize("memory", [1, 2, 5, 6])
@pytest.mark.parametrize(
    "stop", [eq.Stop(rtol=0, max_steps=70), eq.Stop(rtol=1e-6, max_steps=90)], ids=["fixed", "tol"]
)
def test_pieces_follow_one_another_in_the_rings(memory, stop):
    deq, x, _ = prepared("any", stop, memory=memory)
    captured = assert_agree(deq, x, 1e-6)
    loop = recordings_of(deq)[0].forward.loop
    assert len(loop._pieces) <= 2 * memory + 2  # one for each place in the rings, not one for each number of steps
    assert captured.stats.steps.max() > 2 * memory + 2


@pytest.mark.parametrize(
    ("name", "variant"),
    [("local", "shift"), ("local", "corrected"), ("sequence", "shift"), ("images", "shift"), ("any", "newest")],
)
def test_as_a_graph_would_replay_it(emulated, name, variant):
    """Pieces of 4, 4 and 3 steps; weights of cell and solver updated in place; nothing left of the solve before."""
    deq, x, solver = prepared(name, eq.Stop(rtol=0, max_steps=11), **VARIANTS[variant])
    broken = x.clone()
    broken[0] = torch.nan
    for inputs in (x, *others(x, 1), broken, x):
        assert_agree(deq, inputs, 1e-6)
        with torch.no_grad():
            for parameter in deq.parameters():  # those of the solver are among them
                parameter.add_(0.01 * torch.randn_like(parameter))
    assert {id(p) for p in solver.parameters()} <= {id(p) for p in deq.parameters()}
    assert (deq.capture.recorded, deq.capture.replayed) == (1, 4)


def test_systems_of_different_kinds_in_one_batch():
    """Converged at the start, ordinary, and one where f is NaN: rows do not disturb each other."""
    for stop in (TOLERANCE, dataclasses.replace(TOLERANCE, select="last")):
        deq, x, _ = prepared("any", stop)
        mixed = x * torch.tensor([1.0, 0.01, 1.0, 1.0, 30.0, 1.0])[:, None]
        mixed[2] = torch.nan
        captured = assert_agree(deq, mixed, 1e-6)
        assert captured.stats.status[2] == eq.Status.NONFINITE
        assert captured.stats.ok.sum() >= 4
        assert len(set(captured.stats.steps.tolist())) > 1


@pytest.mark.parametrize("variant", ["shift", "corrected"])
@pytest.mark.parametrize("name", ["local", "images"])
def test_half_precision_of_the_cell_is_not_that_of_the_solver(name, variant):
    deq, x, solver = prepared(name, **VARIANTS[variant])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for inputs in (x, *others(x)):
            captured = assert_agree(deq, inputs, 1e-6)
    assert (deq.capture.recorded, deq.capture.replayed) == (1, 3)
    guess = solver.guess(deq.problem(inputs), deq.problem(inputs).start(deq.start(inputs)))  # without autocast
    deq.plan = deq.plan.replace(stop=eq.Stop(rtol=0, max_steps=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        start = both(deq, inputs)[0].value
    assert_close([leaf.flatten(1) for leaf in tensors(start)], guess, 1e-6)
    assert captured.stats.residual.max() < 0.1


def test_channels_last_states(emulated):
    deq, x, _ = prepared("images")
    z0 = tuple(leaf.to(memory_format=torch.channels_last) for leaf in deq.start(x))
    assert_agree(deq, x, 1e-6, z0=z0)
    assert deq.capture.replayed == 1


@pytest.mark.parametrize(
    ("settings", "classic"),
    [
        ({"weights": "newest", "mixing": False}, eq.Picard()),
        ({"weights": "least_squares", "mixing": False, "memory": 4}, eq.Anderson(memory=4)),
        ({"weights": "least_squares", "mixing": False, "local": True}, None),  # of each position by itself
        ({"weights": "newest", "mixing": False, "rank": 2}, None),
        ({"weights": "newest"}, None),
        ({}, None),
    ],
)
def test_steps_of_which_nothing_is_learned_are_those_of_a_classic_solver(settings, classic):
    deq, x, solver = prepared("sequence", **settings)
    assert solver.classic == classic
    method = _method.Method(solver, FIXED, 0.0, deq.problem(x))
    assert method.stepping == (classic or solver)
    assert method.follows == (classic == eq.Picard())


def test_a_memory_beyond_the_kernels_is_left_to_the_learned_solver():
    deq, x, solver = prepared("sequence", weights="least_squares", mixing=False, memory=40)
    assert solver.classic == eq.Anderson(memory=40)
    assert _method.Method(solver, FIXED, 0.0, deq.problem(x)).stepping is solver


def test_starts(emulated):
    """A start of one's own is kept where it is not zero, in each solve anew."""
    deq, x, solver = prepared("any", eq.Stop(rtol=0, max_steps=1))
    given = 0.1 * torch.randn(len(x), 10)
    given[0] = 0.0
    for z0 in (given, torch.zeros_like(given), given):
        captured = assert_agree(deq, x, 1e-6, z0=z0)
        assert torch.equal(captured.value[1:] == z0[1:], torch.full_like(z0[1:], bool(z0.any()), dtype=torch.bool))
    assert deq.capture.recorded == 1
    for item in (x, *others(x)):  # and the guess is that of the inputs at hand
        guess = solver.guess(deq.problem(item), deq.problem(item).start(torch.zeros_like(given)))[0]
        assert_close(both(deq, item)[0].value, guess, 1e-6)


# Training


@pytest.mark.parametrize(("name", "variant"), [("local", "shift"), ("images", "shift"), ("any", "corrected")])
def test_training_with_a_learned_forward_solver(emulated, name, variant):
    adjoint = eq.Implicit(solver=eq.Picard(), stop=eq.Stop(rtol=0, max_steps=10))
    deq, x, solver = prepared(name, **VARIANTS[variant])
    deq.plan = deq.plan.replace(adjoint=adjoint)
    twin = copy.deepcopy(deq)
    twin.engine = "eager"
    for inputs in (x, *others(x)):
        for model in (deq, twin):
            model.zero_grad()
            loss_of(model(inputs).value).backward()
        pairs = [[p.grad for p in model.cell.parameters()] for model in (deq, twin)]
        assert_close(*pairs, 1e-5)
        for model in (deq, twin):
            with torch.no_grad():
                for parameter in model.cell.parameters():
                    parameter -= 0.01 * parameter.grad
    assert all(p.grad is None for p in solver.parameters())
    assert (deq.capture.recorded, deq.capture.replayed) == (1, 3)


def test_as_an_adjoint_solver_it_is_left_to_the_eager_engine():
    deq, x, solver = prepared("any", source=None)
    deq.plan = deq.plan.replace(adjoint=eq.Implicit(solver=solver, stop=FIXED))
    assert_falls_back(deq, x, reason="recorded as a forward solver, not in the adjoint")
    assert not both(deq, x)[0].value.requires_grad
    assert deq.capture.replayed == 1  # without gradients there is no adjoint


def test_as_part_of_something_larger_that_is_recorded():
    deq, x, _ = prepared("local")
    expected = both(deq, x)[1].value
    used = []
    with solves_inline(used), torch.no_grad():
        assert_close(deq(x).value, expected, 1e-6)
    assert len(used) == 1


def test_fitting_is_unchanged_by_recordings():
    """The same solver is unrolled with gradients after it was recorded, and recorded solves see the update."""
    deq, x, solver = prepared("local", size=0.1)
    before = both(deq, x)[0].value
    problem = deq.problem(x)
    z, state = solver.init(problem, problem.start(deq.start(x)))
    for _ in range(5):
        z, state = solver.propose(problem, z, problem.evaluate(z), state)
    grads = torch.autograd.grad(loss_of(z), list(solver.parameters()))
    assert all(grad.abs().max() > 0 for grad in grads)
    with torch.no_grad():
        for parameter, grad in zip(solver.parameters(), grads, strict=True):
            parameter -= 0.1 * grad / grad.norm()
    assert not torch.equal(assert_agree(deq, x, 1e-6).value, before)
    assert deq.capture.recorded == 1


# What a recording depends on


def test_changes_of_the_solver_are_noticed(emulated):
    deq, x, solver = prepared("any")
    assert_agree(deq, x, 1e-6)
    solver.step.out.weight = nn.Parameter(torch.randn_like(solver.step.out.weight))
    assert_agree(deq, x, 1e-6)
    assert deq.capture.recorded == 2
    solver.config = dataclasses.replace(solver.config, weights="softmax")
    assert_agree(deq, x, 1e-6)
    assert deq.capture.recorded == 3
    solver.load_state_dict({name: value * 1.1 for name, value in solver.state_dict().items()})  # in place
    assert_agree(deq, x, 1e-6)
    assert deq.capture.recorded == 3
    deq.plan = deq.plan.replace(solver=copy.deepcopy(solver))
    assert_agree(deq, x, 1e-6)
    assert deq.capture.recorded == 4
    deq.plan = deq.plan.replace(solver=solver)
    assert_agree(deq, x, 1e-6)
    assert deq.capture.recorded == 4  # the first one is still there
    assert deq.capture.replayed == 6


def test_hooks_on_a_solver_are_not_passed_over():
    deq, x, solver = prepared("any")
    seen = []
    solver.step.register_forward_hook(lambda *args: seen.append(1))
    with pytest.warns(eq.EquilibriumWarning, match="hooks"), torch.no_grad():
        deq(x)
    assert len(seen) == FIXED.max_steps


def test_an_input_of_the_wrong_size_is_the_same_error():
    deq, x, _ = prepared("any")
    wrong = eq.HyperAnderson(HyperConfig("any", (10,), 3))
    deq.plan = deq.plan.replace(solver=wrong)
    with pytest.raises(ValueError, match="reads an input of 3 numbers"), torch.no_grad():
        deq(x)


@pytest.mark.parametrize("stop", [FIXED, TOLERANCE], ids=["fixed", "tolerance"])
def test_launches_besides_replays(monkeypatch, stop):
    """As for other solvers: the start, a copy, three tensors to return; with a tolerance, four operations to ask."""
    monkeypatch.setattr(_recording, "tape_for", Silent)
    deq, x, _ = prepared("local", stop)
    with torch.no_grad():
        for _ in range(2):
            deq(x)
        with Launches() as launched:
            deq(x)
    questions = 0 if stop.fixed_budget else -(-stop.max_steps // _loop.CHUNK) - 1
    assert len(launched.names) <= 6 + 4 * questions, launched.names


def test_storage_is_counted():
    deq, x, _ = prepared("local")
    captured, eager = both(deq, x)
    states = 2 * MEMORY * sum(leaf.nbytes for leaf in tensors(captured.value))
    assert states < captured.stats.solver_bytes <= 1.1 * eager.stats.solver_bytes
