"""`channels_follow`: the twin against `HyperAnderson` and the driver, the kernel against the twin, both in solves."""

import dataclasses

import pytest
import torch

import equipoise as eq
from equipoise import _method
from equipoise._problem import Problem, StateSpec
from equipoise.ops import ChannelsParts, Standing, channels_follow, picard_settle
from equipoise.ops.channels import obstacle, supports
from equipoise.solvers import HyperAnderson, HyperConfig
from tests.captured import assert_close, recordings_of
from tests.kernels import BACKENDS, FIXED, kernel_device, quiet_interpreter
from tests.unit.test_hyper_anderson import CELLS, Images, shaken
from tests.unit.test_hyper_capture import LAST, assert_agree, both, others

DEVICE = kernel_device()
pytestmark = quiet_interpreter

FORM = {"weights": "newest", "mixing": False, "rank": 1}
# Channels, height and width of each resolution; few fill a tile.
CASES = {
    "two": [(3, 7, 5), (5, 3, 2)],
    "one": [(16, 8, 8)],
    "more channels than a tile": [(24, 4, 4), (70, 2, 2)],
    "aligned": [(32, 8, 8), (64, 4, 4)],
    "a pixel": [(2, 1, 1)],
}
STEPS = 5


class Case:
    """A solver with matrices as after some fitting, and a start."""

    def __init__(self, name, dtype=torch.float32):
        torch.manual_seed(0)
        shapes = CASES[name]
        self.solver = HyperAnderson.for_images(tuple(shape[0] for shape in shapes), **FORM)
        self.solver = self.solver.to(DEVICE, dtype).requires_grad_(False)
        for parameter in self.solver.parameters():
            parameter.copy_(0.4 / len(parameter) ** 0.5 * torch.randn_like(parameter))
        state = tuple(torch.randn(3, *shape).to(DEVICE, dtype) for shape in shapes)
        state = tuple(leaf.contiguous(memory_format=torch.channels_last) for leaf in state)
        self.spec = _stored_last(StateSpec.of(state))
        self.start = Problem(lambda z: z, self.spec).start(state)
        self.parts = ChannelsParts.of(self.solver, self.spec)

    def image(self, z, step):
        """Such that residuals shrink, grow, and shrink again: the best iterate is neither the first nor the last."""
        generator = torch.Generator().manual_seed(step)
        size = (0.5, 0.05, 0.9, 0.4, 0.3)[step]
        return [leaf + size * torch.randn(leaf.shape, generator=generator).to(leaf) for leaf in z]


def _stored_last(spec):
    """Maps of one pixel, or one channel, are in any order at once."""
    return dataclasses.replace(spec, orders=tuple((0, 2, 3, 1) for _ in spec.orders))


def followed(case, backend, image_dtype=None):
    """Iterates, and where systems stand after some steps."""
    z = before = older = case.start
    standing, iterates = Standing.start(z), []
    for step in range(STEPS):
        fz = [leaf.to(image_dtype or leaf.dtype) for leaf in case.image(z, step)]
        following = channels_follow(z, fz, older, standing, case.parts, stop=FIXED, backend=backend)
        z, before, older = following, z, before
        iterates.append(z)
    picard_settle(before, older, standing, backend=backend)
    return iterates, standing


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_are_those_of_the_solver(name, backend):
    case = Case(name)
    z, state = case.start, case.solver.empty_state(case.start)
    for step, found in enumerate(followed(case, backend)[0]):
        with torch.no_grad():
            z, state = case.solver.advance(case.spec, z, case.image(z, step), state)
        for ours, theirs in zip(found, z, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_formula_in_float64(name):
    case = Case(name, torch.float64)
    image = case.spec.unflatten(case.image(case.start, 0))
    state, found = case.spec.unflatten(case.start), case.spec.unflatten(followed(case, "naive")[0][0])
    for f, z, matrix, ours in zip(image, state, case.parts.matrices, found, strict=True):
        truth = f + torch.einsum("oc,nchw->nohw", matrix, f - z)
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("image_dtype", [None, torch.bfloat16])
def test_the_kernel_is_its_twin(name, image_dtype):
    case = Case(name)
    ours, theirs = followed(case, "triton", image_dtype), followed(case, "naive", image_dtype)
    for a, b in zip(ours[0], theirs[0], strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 if image_dtype is None else 2e-2)
    for field in dataclasses.fields(Standing):
        pair = getattr(ours[1], field.name), getattr(theirs[1], field.name)
        tolerance = 1e-4 if image_dtype is None else 2e-2
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance, msg=field.name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_iterate_is_kept_and_systems_do_not_see_each_other(backend):
    case = Case("two")
    whole, standing = followed(case, backend)
    for best, leaf in zip(standing.best, whole[0], strict=True):  # of the second residual, the smallest
        torch.testing.assert_close(best, leaf)
    case.start = [leaf.clone() for leaf in case.start]
    case.start[0][1] = torch.nan
    spoiled, standing = followed(case, backend)
    for a, b in zip(whole[-1], spoiled[-1], strict=True):
        torch.testing.assert_close(a[[0, 2]], b[[0, 2]])
    assert standing.status.tolist()[1] == int(eq.Status.NONFINITE)


def test_what_it_does_not_do_is_said():
    config = HyperConfig("images", (3,), **FORM)
    assert supports(config)
    assert "kind 'sequence'" in obstacle(HyperConfig("sequence", (3,), **FORM))
    assert "rank 0" in obstacle(dataclasses.replace(config, rank=0))
    assert "mixing=True" in obstacle(dataclasses.replace(config, mixing=True))
    spec = StateSpec.of((torch.zeros(2, 4, 5, 5),))
    assert obstacle(config, spec) == "channels are not stored last"
    assert "sizes (3,)" in obstacle(config, _stored_last(spec))
    with pytest.raises(ValueError, match="channels are not stored last"):
        ChannelsParts.of(HyperAnderson(config), spec)
    case = Case("two")
    with pytest.raises(ValueError, match="fixed budget"):
        channels_follow(case.start, case.start, case.start, Standing.start(case.start), case.parts, stop=eq.Stop())


# In recordings


@pytest.fixture
def fused(monkeypatch):
    """Fused steps where they are of no use."""
    monkeypatch.setattr(
        _method, "_is_fused", lambda solver, stop, spec: stop.fixed_budget and supports(solver.config, spec)
    )


class Last(Images):
    """With states in the layout of the input, or channels last."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def initial_state(self, x):
        return tuple(leaf.contiguous(memory_format=self.layout) for leaf in super().initial_state(x))


def prepared(stop, layout=torch.channels_last):
    """A DEQ with the captured engine, its inputs, and a solver with weights as after some fitting."""
    deq, x = eq.DEQ(Last(layout), engine="captured"), CELLS["images"][1].contiguous(memory_format=layout)
    solver = shaken(eq.solvers.hyper_solver_for(deq, x, budget=None, hidden=8, **FORM), 0.03)
    deq.plan = deq.plan.replace(solver=solver, stop=stop)
    return deq, x, solver


def is_fused(deq):
    return all(recording.forward.loop.buffers.memory is None for recording in recordings_of(deq))


@pytest.mark.parametrize(
    "stop",
    [LAST, eq.Stop(rtol=0, max_steps=8), eq.Stop(rtol=0, max_steps=3), eq.Stop(rtol=0, max_steps=70)],
    ids=["last", "best", "one piece", "long"],
)
def test_results_of_the_eager_engine(fused, stop):
    """After one another: other inputs, NaN, weights of cell and solver updated in place."""
    deq, x, _ = prepared(stop)
    broken = x.clone()
    broken[0] = torch.nan
    for inputs in (x, broken, *others(x, 1)):
        assert_agree(deq, inputs.contiguous(memory_format=torch.channels_last), 1e-5)
        with torch.no_grad():
            for parameter in deq.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    assert is_fused(deq)
    assert (deq.capture.recorded, deq.capture.replayed) == (1, 3)


def test_tolerances_and_channels_first_have_the_steps_of_any_learned_solver(fused):
    for stop, layout in ((eq.Stop(rtol=1e-3, max_steps=14), torch.channels_last), (LAST, torch.contiguous_format)):
        deq, x, _ = prepared(stop, layout)
        captured, eager = both(deq, x)
        assert_close(captured.value, eager.value, 1e-5)
        assert not is_fused(deq)


def test_where_there_is_a_fused_step(fused):
    deq, x, solver = prepared(LAST)
    method = _method.Method(solver, LAST, 0.0, deq.problem(x))
    assert isinstance(method.parts, ChannelsParts)
    assert method.takes_half
    assert not method.follows


def test_only_on_a_device_and_with_a_fixed_budget():
    deq, x, solver = prepared(LAST)
    spec = deq.problem(x).spec
    there = dataclasses.replace(spec, device=torch.device("cuda", 0))  # as if; nothing is computed
    assert not _method._is_fused(solver, LAST, spec)
    assert _method._is_fused(solver, LAST, there)
    assert not _method._is_fused(solver, eq.Stop(rtol=1e-3), there)
