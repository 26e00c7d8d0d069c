"""`corrected_step`: the twin against `HyperAnderson` and the driver, the kernels against the twin, both in solves."""

import dataclasses

import pytest
import torch

import equipoise as eq
from equipoise import _method
from equipoise._stop import precision_floor
from equipoise.ops import AndersonMemory, CorrectedMemory, CorrectedParts, Standing, anderson_step, corrected_step
from equipoise.ops.corrected import obstacle, supports
from equipoise.solvers import HyperAnderson, HyperConfig
from tests.captured import assert_close, recordings_of
from tests.kernels import BACKENDS, FIXED, assert_same_standing, kernel_device, quiet_interpreter
from tests.unit import test_ops_channels, test_ops_low_rank
from tests.unit.test_hyper_anderson import CELLS, shaken
from tests.unit.test_hyper_capture import LAST, TOLERANCE, assert_agree, both, others, prepared

DEVICE = kernel_device()
pytestmark = quiet_interpreter

FORM = {"weights": "least_squares", "mixing": False, "memory": 3}
SEQUENCES, IMAGES = ("plain", "leaves"), ("two", "aligned")


class Case:
    """A solver with a map as after some fitting, a start, and how its states are stored."""

    def __init__(self, name, dtype=torch.float32):
        case = (test_ops_low_rank if name in SEQUENCES else test_ops_channels).Case(name, dtype=dtype)
        self.spec = case.spec if name in IMAGES else case.problem.spec
        self.solver = HyperAnderson(dataclasses.replace(case.solver.config, **FORM))
        self.solver = self.solver.to(DEVICE, dtype).requires_grad_(False)
        self.solver.load_state_dict(case.solver.state_dict())
        self.start = case.start if name in IMAGES else case.z
        self.parts = CorrectedParts.of(self.solver, self.spec)

    def image(self, z, step):
        """Half of z and something of its own: what contracts, and steps that tell themselves apart."""
        generator = torch.Generator().manual_seed(step)
        return [0.5 * leaf + torch.randn(leaf.shape, generator=generator).to(leaf) for leaf in z]

    def fresh(self):
        z = [leaf.clone() for leaf in self.start]
        return z, CorrectedMemory.of(z, self.parts), Standing.start(z)


every_case = pytest.mark.parametrize("name", [*SEQUENCES, *IMAGES])


def assert_near(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_case
def test_twin_is_the_solver(name):
    """In float64, through the first turn of the ring and into the second."""
    case = Case(name, torch.float64)
    z, memory, standing = case.fresh()
    expected, state = case.start, case.solver.empty_state(case.start)
    for step in range(5):
        fz = case.image(z, step)
        expected, state = case.solver.advance(case.spec, expected, fz, state)
        corrected_step(z, fz, memory, standing, case.parts, stop=FIXED)
        assert_near(z, expected, 1e-7)  # the ridge is added to another row of the matrix
        expected = [leaf.clone() for leaf in z]
    assert int(standing.count) == 5


@every_case
@pytest.mark.parametrize("image_dtype", [None, torch.bfloat16])
def test_kernels_are_the_twin(name, image_dtype):
    case = Case(name)
    kernel, twin = case.fresh(), case.fresh()
    for step in range(4):
        fz = [leaf.to(image_dtype or leaf.dtype) for leaf in case.image(kernel[0], step)]
        for place, leaf in zip(twin[0], kernel[0], strict=True):  # so that rounding does not add up
            place.copy_(leaf)
        for (z, memory, standing), backend in ((kernel, "triton"), (twin, "naive")):
            corrected_step(z, fz, memory, standing, case.parts, stop=FIXED, backend=backend)
        assert_near(kernel[0], twin[0], 2e-3)
        assert_near([kernel[2].residual, kernel[2].latest], [twin[2].residual, twin[2].latest], 1e-5)


@every_case
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_map_it_is_andersons(name, backend):
    case = Case(name)
    for parameter in case.solver.correction.parameters():
        parameter.zero_()
    case.parts.refresh()
    z, memory, standing = case.fresh()
    there = [leaf.clone() for leaf in z]
    kept, progress = AndersonMemory.empty(there, 3), Standing.start(there)
    for step in range(4):
        fz = case.image(z, step)
        corrected_step(z, fz, memory, standing, case.parts, stop=FIXED, backend=backend)
        anderson_step(there, fz, kept, progress, stop=FIXED, backend=backend)
        assert_near(z, there, 0.0)
    assert_same_standing(standing, progress)


@pytest.mark.parametrize(
    "stop", [eq.Stop(rtol=0, max_steps=12), eq.Stop(rtol=1e-7, max_steps=80), eq.Stop(rtol=1e-5, select="last")]
)
def test_ends_where_the_driver_does(stop):
    """Residuals, by which systems end, are those of f, not of what the map makes of it."""
    case = Case("leaves", torch.float64)
    case.parts.correction.up.mul_(0.02)
    shifts = [0.5 * torch.randn_like(leaf) for leaf in case.start]

    def f(z):
        return [0.6 * torch.tanh(leaf.roll(1, 1)) + shift for leaf, shift in zip(z, shifts, strict=True)]

    solution = eq.fixed_point(
        lambda z: case.spec.unflatten(f(case.spec.flatten(z))),
        case.spec.unflatten(case.start),
        solver=case.solver,
        stop=stop,
    )
    z, memory, standing = case.fresh()
    for _ in range(stop.max_steps):
        corrected_step(z, f(z), memory, standing, case.parts, stop=stop, floor=precision_floor(torch.float64))
    assert_near(z if stop.select == "last" else standing.best, case.spec.flatten(solution.value), 1e-6)
    if not stop.fixed_budget:
        assert torch.equal(standing.status.long(), solution.stats.status.long())
        assert (standing.steps.long() - solution.stats.steps).abs().max() <= 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_iterates_that_are_written_elsewhere(backend):
    case = Case("leaves")
    z, kept, standing = case.fresh()
    here, memory, progress = case.fresh()
    there = [torch.full_like(leaf, torch.nan) for leaf in here]
    for step in range(4):
        fz = case.image(z, step)
        corrected_step(z, fz, kept, standing, case.parts, stop=FIXED, backend=backend)
        corrected_step(here, fz, memory, progress, case.parts, stop=FIXED, out=there, backend=backend)
        here, there = there, here
        assert_near(z, here, 0.0)


def test_what_it_does_not_do_for():
    base = HyperConfig("sequence", (4,), rank=3, **FORM)
    assert supports(base)
    assert supports(dataclasses.replace(base, kind="images", compression=None))
    refused = {
        "weights='newest'": {"weights": "newest"},
        "mixing=True": {"mixing": True},
        "local=True": {"local": True},
        "holds 16 steps": {"memory": 17},
        "rank=0": {"rank": 0},
        "kind 'any'": {"kind": "any", "compression": None},
    }
    for reason, settings in refused.items():
        assert reason in obstacle(dataclasses.replace(base, **settings))
    with pytest.raises(ValueError, match="no fused step for this solver: weights='newest'"):
        CorrectedParts.of(HyperAnderson(dataclasses.replace(base, weights="newest")), Case("plain").spec)


# In recordings


@pytest.fixture
def fused(monkeypatch):
    """Fused steps where they are of no use."""
    monkeypatch.setattr(_method, "_is_fused", lambda solver, stop, spec: supports(solver.config, spec))


@pytest.mark.parametrize("stop", [LAST, eq.Stop(rtol=0, max_steps=8), TOLERANCE], ids=["last", "best", "tolerance"])
def test_sequences_by_both_engines(fused, stop):
    """After one another: other inputs, NaN, weights of cell and solver updated in place."""
    deq, x, _ = prepared("sequence", stop, **FORM, rank=4)
    broken = x.clone()
    broken[0] = torch.nan
    for inputs in (x, broken, *others(x, 1)):
        captured, eager = both(deq, inputs)
        assert_close(captured.value, eager.value, 1e-3)
        assert torch.equal(captured.stats.status, eager.stats.status)
        with torch.no_grad():
            for parameter in deq.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    for recording in recordings_of(deq):
        assert isinstance(recording.forward.loop.buffers.memory, CorrectedMemory)
    assert deq.capture.recorded == 1


def test_images_by_both_engines(fused):
    layout = torch.channels_last
    deq, x = eq.DEQ(test_ops_channels.Last(layout), engine="captured"), CELLS["images"][1]
    x = x.contiguous(memory_format=layout)
    solver = shaken(eq.solvers.hyper_solver_for(deq, x, budget=None, hidden=8, rank=1, **FORM), 0.03)
    deq.plan = deq.plan.replace(solver=solver, stop=LAST)
    for inputs in (x, *others(x, 2)):
        assert_agree(deq, inputs.contiguous(memory_format=layout), 1e-4)
    for recording in recordings_of(deq):
        assert isinstance(recording.forward.loop.buffers.memory, CorrectedMemory)


def test_the_last_systems_are_solved_alone(fused):
    """What is remembered of them comes along, and what is on the way to their images has its own size."""
    deq, x, _ = prepared("sequence", eq.Stop(rtol=1e-5, max_steps=60), **FORM, rank=4)
    many = torch.cat([x] * 8) * torch.linspace(0.1, 3.0, 8 * len(x))[:, None, None]
    captured, eager = both(deq, many)
    assert captured.stats.ok.all()
    assert (captured.stats.steps - eager.stats.steps).abs().max() <= 1
    assert_close(captured.value, eager.value, 1e-4)
