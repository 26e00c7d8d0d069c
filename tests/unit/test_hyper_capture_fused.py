"""The fused step of a learned solver in the captured engine, by its twin: all that surrounds the kernels on a GPU."""

import copy
import dataclasses
import types

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import _capture, _method
from equipoise._draws import Rows
from equipoise._problem import StateSpec
from equipoise.ops import HyperMemory
from equipoise.ops.hyper import supports
from equipoise.solvers import HyperConfig
from equipoise.train.alternate import Alternate, Alternation
from equipoise.train.captured_step import CapturedSteps
from equipoise.train.optim import Clip, Stepper
from tests.captured import assert_close, assert_falls_back, loss_of, recordings_of
from tests.problems import gaussian, scaled_weight
from tests.unit.test_hyper_anderson import CELLS, shaken
from tests.unit.test_hyper_capture import FIXED, LAST, TOLERANCE, assert_agree, both, others, prepared

VARIANTS = {
    "shift": {},
    "softmax": {"weights": "softmax"},
    "free": {"weights": "free"},
    "weights_alone": {"mixing": False},
    "no_start": {"source": None},
    "replace": {"warm": "replace"},
}
LONG = eq.Stop(rtol=0, max_steps=70, select="last")  # three pieces of a recording


@pytest.fixture
def fused(monkeypatch):
    """Fused steps where they are of no use."""
    monkeypatch.setattr(_method, "_is_fused", lambda solver, stop, spec: supports(solver.config, spec))


def assert_fused(deq):
    for recording in recordings_of(deq):
        assert isinstance(recording.forward.loop.buffers.memory, HyperMemory)


# Results


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CELLS)
def test_results_of_the_eager_engine(fused, name, variant):
    """After one another: other inputs, NaN, weights of cell and solver updated in place."""
    deq, x, _ = prepared(name, LAST, **VARIANTS[variant])
    broken = x.clone()
    broken[0] = torch.nan
    for inputs in (x, broken, *others(x, 1)):
        assert_agree(deq, inputs, 1e-5)
        with torch.no_grad():
            for parameter in deq.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    assert_fused(deq)
    assert (deq.capture.recorded, deq.capture.replayed) == (1, 3)


@pytest.mark.parametrize("stop", [LONG, TOLERANCE], ids=["long", "tolerance"])
@pytest.mark.parametrize("memory", [1, 5])
@pytest.mark.parametrize("name", ["local", "images"])
def test_pieces_follow_one_another(fused, name, memory, stop):
    """The device counts steps, so a piece does for any place in the rings."""
    deq, x, _ = prepared(name, stop, memory=memory)
    captured, eager = both(deq, x)
    assert_close(captured.value, eager.value, 1e-4)
    assert (captured.stats.steps - eager.stats.steps).abs().max() <= 1
    assert len(recordings_of(deq)[0].forward.loop._pieces) <= 3
    assert_fused(deq)


@pytest.mark.parametrize("name", ["local", "images"])
def test_one_system(fused, name):
    deq, x, _ = prepared(name, TOLERANCE)
    assert_agree(deq, x[:1], 1e-5)
    assert_fused(deq)


@pytest.mark.parametrize("name", ["local", "any"])
def test_a_model_in_half_precision(fused, name):
    """Parameters of the solver too; two ways to round the network, whose weights have three digits."""
    deq, x, _ = prepared(name, FIXED)
    deq, x = deq.bfloat16(), x.bfloat16()
    captured, eager = both(deq, x)
    assert captured.value.dtype == torch.bfloat16
    assert (captured.value - eager.value).abs().max() < 3e-2
    assert_fused(deq)


def test_training(fused):
    deq, x, solver = prepared("local")
    deq.plan = deq.plan.replace(adjoint=eq.Implicit(solver=eq.Picard(), stop=eq.Stop(rtol=0, max_steps=10)))
    grads = []
    for engine in ("captured", "eager"):
        deq.engine = engine
        deq.zero_grad()
        loss_of(deq(x).value).backward()
        grads.append([parameter.grad.clone() for parameter in deq.cell.parameters()])
    assert_close(*grads, 1e-5)
    assert all(parameter.grad is None for parameter in solver.parameters())
    assert_fused(deq)


def test_one_solver_in_two_models(fused):
    """Each has storage and copies of weights of its own."""
    first, x, solver = prepared("any")
    second, _, _ = prepared("any")
    second.plan = first.plan
    with torch.no_grad():
        second.cell.inner.mul_(-0.5)
    for inputs in (x, *others(x)):
        for deq in (first, second):
            assert_agree(deq, inputs, 1e-5)
            with torch.no_grad():
                solver.step.inner.weight.mul_(1.1)
    memories = [recordings_of(deq)[0].forward.loop.buffers.memory for deq in (first, second)]
    assert memories[0] is not memories[1]
    assert_fused(first)


# Smaller batches


class Scaled(nn.Module):
    """z ↦ tanh(a·W z + x), system by system, or position by position; notes how many systems it was asked for."""

    def __init__(self):
        super().__init__()
        self.inner, self.batches = nn.Parameter(scaled_weight(6, 1.0, 3).float()), []

    def forward(self, z, x, a):
        self.batches.append(len(z))
        return torch.tanh(a * (z @ self.inner.T) + x)


def skewed(local):
    """A DEQ with a learned solver whose batch has one hard system of 16."""
    torch.manual_seed(0)
    cell, shape = Scaled(), (16, 3, 6) if local else (16, 6)
    config = HyperConfig("sequence" if local else "any", (6,), 6, 8, compressed=5, width=7, memory=3, local=local)
    solver = shaken(eq.HyperAnderson(config), 0.03)
    deq = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=1e-5, max_steps=80), engine="captured")
    scale = torch.full((16, *[1] * (len(shape) - 1)), 0.1)
    scale[5] = 0.93
    return deq, solver, 0.3 * gaussian(*shape, seed=2).float(), scale


@pytest.mark.parametrize("local", [True, False])
def test_the_last_systems_are_solved_alone(fused, monkeypatch, local):
    """With all that is remembered of them, and without another guess."""
    deq, solver, x, scale = skewed(local)
    guesses, guess = [], solver.guess
    monkeypatch.setattr(type(solver), "guess", lambda self, *given: guesses.append(1) or guess(*given))
    with torch.no_grad():
        deq.engine = "eager"
        eager = deq(x, scale)
        deq.engine = "captured"
        for _ in range(3):
            deq.cell.batches.clear()
            guesses.clear()
            captured = deq(x, scale)
    assert len(guesses) == 1
    assert deq.cell.batches[0] == 16
    assert deq.cell.batches[-1] == 1
    assert 1 in recordings_of(deq)[0].forward.levels
    assert_close(captured.value, eager.value, 1e-4)
    assert torch.equal(captured.stats.status, eager.stats.status)
    assert (captured.stats.steps - eager.stats.steps).abs().max() <= 1
    assert int(eager.stats.steps.max()) > 3 * int(eager.stats.steps.median())
    assert_fused(deq)


# Where there is a fused step


def on_cuda(spec):
    """As if the states were there; nothing is computed."""
    return dataclasses.replace(spec, device=torch.device("cuda", 0))


def test_where_there_is_a_fused_step():
    deq, x, solver = prepared("any")
    spec = deq.problem(x).spec
    assert not _method._is_fused(solver, FIXED, spec)
    assert _method._is_fused(solver, FIXED, on_cuda(spec))
    assert _method._is_fused(copy.deepcopy(solver).bfloat16(), FIXED, on_cuda(spec))
    assert not _method._is_fused(copy.deepcopy(solver).double(), FIXED, on_cuda(spec))  # no kernel, but other steps
    assert not _method._is_fused(prepared("any", weights="corrected")[2], FIXED, on_cuda(spec))
    two = StateSpec.of((torch.zeros(2, 10), torch.zeros(2, 3)))
    assert not _method._is_fused(solver, FIXED, on_cuda(two))


def test_a_state_of_another_form_is_the_same_error_in_both_engines(fused):
    """Kernels take sizes for granted, so it is not left to them."""
    solver = eq.HyperAnderson.for_sequence(8, local=True, width=7, compressed=6)
    deq, x, _ = prepared("local", source=None)
    deq.plan = deq.plan.replace(solver=solver)
    for engine in ("captured", "eager"):
        deq.engine = engine
        with (
            pytest.raises(ValueError, match=r"made for leaves .*, 8 by leaf, but this state has leaves of shape"),
            torch.no_grad(),
        ):
            deq(x)


def test_kernels_that_cannot_be_compiled_are_left_to_the_eager_engine(monkeypatch):
    errors = pytest.importorskip("triton.errors")

    def fails(*_):
        raise errors.TritonError("out of resource: shared memory")

    deq, x, _ = prepared("any")
    deq.requires_grad_(False)
    monkeypatch.setattr(_capture, "Recording", fails)
    assert_falls_back(deq, x, reason="cannot be recorded .out of resource", grad=False)


def test_a_learned_solver_is_known_by_its_tensors():
    """A recorded step reads them where they were; it also keeps the number of steps."""
    model, solver = nn.Linear(2, 2), eq.HyperAnderson.for_any(3)
    learned = Alternation(Alternate(max_steps=2, most_steps=3), solver)
    stepper = Stepper(torch.optim.SGD(model.parameters(), 0.1), Clip().start())
    steps = CapturedSteps(None, model, stepper, None, torch.device("cpu"))

    def key():
        batch = types.SimpleNamespace(rows=Rows(0, 4, 4), x=torch.zeros(4))
        return steps._key(batch, None, None, False, learned)

    before = key()
    with torch.no_grad():
        solver.step.out.bias.add_(1.0)
    assert key() == before
    learned.grown = 1
    assert key() != before
    learned.grown = 0
    assert key() == before
    solver.step.out.bias = nn.Parameter(solver.step.out.bias.detach().clone())
    assert key() != before
