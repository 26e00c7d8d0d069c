"""`low_rank_step`: the twin against `HyperAnderson` and the driver, the kernels against the twin, both in solves."""

import dataclasses

import pytest
import torch

import equipoise as eq
from equipoise import _method
from equipoise._problem import Problem, StateSpec
from equipoise._stop import precision_floor
from equipoise.ops import LowRankMemory, LowRankParts, Standing, low_rank_step, picard_settle
from equipoise.ops.low_rank import obstacle, supports
from equipoise.solvers import HyperAnderson, HyperConfig
from tests.captured import assert_close, recordings_of
from tests.kernels import BACKENDS, FIXED, SCRIPTS, assert_same_standing, kernel_device, quiet_interpreter
from tests.problems import gaussian
from tests.unit.test_hyper_anderson import shaken
from tests.unit.test_hyper_capture import LAST, TOLERANCE, assert_agree, both, others, prepared
from tests.unit.test_hyper_capture_fused import Scaled

DEVICE = kernel_device()
pytestmark = quiet_interpreter

# Shapes of a system's leaves, rank, reach; sizes fill no tile.
CASES = {
    "plain": ([(17, 11)], 5, 3),
    "narrow reach": ([(17, 9)], 3, 1),
    "wide": ([(3, 40)], 18, 3),
    "one position": ([(1, 4)], 2, 3),
    "leaves": ([(17, 5), (17, 20)], 7, 2),
    "aligned": ([(16, 32)], 16, 3),
}
SOME = ("plain", "leaves")


class Case:
    """A solver with weights as after some fitting, a start, and images that have nothing to do with it.

    Kernels read copies of the weights in float16, so these have no more digits than that.
    """

    def __init__(self, name, n=2, dtype=torch.float32):
        torch.manual_seed(0)
        shapes, rank, reach = CASES[name]
        sizes = tuple(features for _, features in shapes)
        config = HyperConfig("sequence", sizes, weights="newest", mixing=False, rank=rank, reach=reach)
        self.solver = HyperAnderson(config).to(DEVICE, dtype).requires_grad_(False)
        for parameter in self.solver.parameters():
            parameter.copy_((parameter + 0.2 * torch.randn_like(parameter)).half())
        state = tuple(torch.randn(n, *shape).to(DEVICE, dtype) for shape in shapes)
        spec = StateSpec.of(state)
        self.problem = Problem(lambda z: z, spec)
        self.z = self.problem.start(state)
        self.parts = LowRankParts.of(self.solver, spec)

    def images(self):
        return [0.3 * leaf + 0.5 * torch.randn_like(leaf) for leaf in self.z]

    def fresh(self):
        """Iterates, memory and standing; what was never written may be anything."""
        z = [leaf.clone() for leaf in self.z]
        memory = LowRankMemory.empty(z, self.parts)
        memory.few.fill_(torch.nan)
        return z, memory, Standing.start(z)


def copy_of(z, memory, standing):
    fields = {k: v.clone() for k, v in vars(standing).items() if torch.is_tensor(v)}
    return (
        [x.clone() for x in z],
        dataclasses.replace(memory, few=memory.few.clone(), arrived=memory.arrived.clone()),
        dataclasses.replace(standing, best=[x.clone() for x in standing.best], **fields),
    )


def assert_near(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several tiles, and several of what a program does at once, at test sizes."""
    from equipoise.ops.low_rank import triton as kernels

    settings = {"FEATURES": 16, "WIDE": 16, "FEWEST": 1, "MOVED": 32, "MOST_CHUNK": 2, "MOST_PARTS": 2}
    for name, value in settings.items():
        monkeypatch.setattr(kernels, name, value)


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """On a GPU rounding must not hide what else may be wrong; tests/gpu has products as they are."""
    from equipoise.ops.low_rank import triton as kernels

    monkeypatch.setattr(kernels, "PRECISION", "tf32x3")


# The twin


@pytest.mark.parametrize("name", CASES)
def test_twin_is_the_solver(name):
    """In float64: proposals of each step to 1e-12."""
    case = Case(name, dtype=torch.float64)
    z, memory, standing = case.fresh()
    expected, state = case.solver.init(case.problem, case.z)
    for _ in range(3):
        images = case.images()
        expected, state = case.solver.propose(case.problem, expected, images, state)
        low_rank_step(z, images, memory, standing, case.parts, stop=FIXED)
        assert_near(z, expected, 1e-12)
    assert int(standing.count) == 3


def contraction(case):
    shifts = [0.5 * torch.randn_like(leaf) for leaf in case.z]

    def f(z):
        return [0.6 * torch.tanh(leaf.roll(1, 1)) + shift for leaf, shift in zip(z, shifts, strict=True)]

    return f


@pytest.mark.parametrize(
    "stop", [eq.Stop(rtol=0, max_steps=12), eq.Stop(rtol=1e-7, max_steps=80), eq.Stop(rtol=1e-5, select="last")]
)
def test_twin_ends_where_the_driver_does(stop):
    """In float64: values to 1e-10, status and step counts exactly."""
    case = Case("leaves", dtype=torch.float64)
    case.parts.up.mul_(0.02)  # near the plain iteration, which converges
    f, spec = contraction(case), case.problem.spec
    solution = eq.fixed_point(
        lambda z: spec.unflatten(f(spec.flatten(z))), spec.unflatten(case.z), solver=case.solver, stop=stop
    )
    z, memory, standing = case.fresh()
    for _ in range(stop.max_steps):
        floor = precision_floor(torch.float64)
        low_rank_step(z, f(z), memory, standing, case.parts, stop=stop, floor=floor, backend="naive")
    assert_near(z if stop.select == "last" else standing.best, spec.flatten(solution.value), 1e-10)
    if not stop.fixed_budget:
        assert torch.equal(standing.status.long(), solution.stats.status.long())
        assert torch.equal(standing.steps.long(), solution.stats.steps)
        assert (standing.status == int(eq.Status.CONVERGED)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_before_any_fitting_it_is_the_plain_iteration(backend):
    case = Case("plain", n=1)
    case.parts.up.zero_()
    case.parts.refresh()
    z, memory, standing = case.fresh()
    images = case.images()
    low_rank_step(z, images, memory, standing, case.parts, stop=FIXED, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(z, images, strict=True))


# The kernels


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_twin(small_blocks, name):
    case = Case(name)
    kernel, twin = case.fresh(), case.fresh()
    for _ in range(2 if name in SOME else 1):
        images = case.images()
        for (z, memory, standing), backend in ((kernel, "triton"), (twin, "naive")):
            low_rank_step(z, images, memory, standing, case.parts, stop=FIXED, backend=backend)
        assert_near(kernel[0], twin[0], 1e-5)
        assert_near(kernel[2].best, twin[2].best, 1e-5)
        assert_same_standing(kernel[2], dataclasses.replace(twin[2], best=kernel[2].best))
        few = [memory.few[:, :, : case.parts.rank] for _, memory, _ in (kernel, twin)]
        assert_near(few[:1], few[1:], 1e-5)
        assert not kernel[1].arrived.any()
        assert all(torch.isfinite(leaf).all() for leaf in kernel[0])
        twin = copy_of(*kernel)  # so that rounding does not add up


@pytest.mark.parametrize("name", SOME)
def test_kernels_at_their_own_block_sizes(name):
    case = Case(name)
    kernel, twin, images = case.fresh(), case.fresh(), case.images()
    for (z, memory, standing), backend in ((kernel, "triton"), (twin, "naive")):
        low_rank_step(z, images, memory, standing, case.parts, stop=FIXED, backend=backend)
    assert_near(kernel[0], twin[0], 1e-5)


@pytest.mark.parametrize(("most", "tiles"), [(1, (16, 1)), (2, (32, 1)), (99, (16, 3))])
def test_features_in_several_turns(small_blocks, monkeypatch, most, tiles):
    """Programs that read more at once, or tile by tile, the last one not full; parts added up in two rounds."""
    from equipoise.ops.low_rank import triton as kernels

    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    monkeypatch.setattr(kernels, "MOST_SPAN", most)
    case = Case("wide", n=1)
    assert kernels._tiles(1, (40,)) == tiles
    kernel, twin, images = case.fresh(), case.fresh(), case.images()
    for (z, memory, standing), backend in ((kernel, "triton"), (twin, "naive")):
        low_rank_step(z, images, memory, standing, case.parts, stop=FIXED, backend=backend)
    assert_near(kernel[0], twin[0], 1e-5)


def test_tiles_keep_a_device_busy():
    """DEQ-TrellisNet, DEQ-Transformers of 256 and 704 features, one short sequence."""
    from equipoise.ops.low_rank import triton as kernels

    given = ((60, 1400), (60, 256), (150, 704), (1, 50))
    assert [kernels._tiles(strips, (size,)) for strips, size in given] == [(128, 1), (64, 1), (64, 3), (64, 1)]
    assert [kernels._rows(*given) for given in ((840, 22), (840, 4), (2250, 11), (7, 1))] == [32, 16, 64, 16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SOME)
def test_images_in_half_precision(small_blocks, name, backend):
    """The same as with these images in float32: nothing else is rounded."""
    case = Case(name, n=1)
    half, whole = case.fresh(), case.fresh()
    images = [leaf.bfloat16() for leaf in case.images()]
    low_rank_step(half[0], images, *half[1:], case.parts, stop=FIXED, backend=backend)
    low_rank_step(whole[0], [leaf.float() for leaf in images], *whole[1:], case.parts, stop=FIXED, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(half[0], whole[0], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SOME)
def test_iterates_that_are_written_elsewhere(small_blocks, name, backend):
    """The same iterates and the same best ones, copied later."""
    case = Case(name, n=1)
    z, kept, standing = case.fresh()
    here, memory, progress = case.fresh()
    there = [torch.full_like(leaf, torch.nan) for leaf in here]
    directions = [torch.randn_like(leaf) for leaf in z]
    for size in (1.0, 0.5, 0.7, 0.2):  # better, better, worse, better
        fz = [leaf + size * direction for leaf, direction in zip(z, directions, strict=True)]
        low_rank_step(z, fz, kept, standing, case.parts, stop=FIXED, backend=backend)
        low_rank_step(here, fz, memory, progress, case.parts, stop=FIXED, out=there, backend=backend)
        here, there = there, here
        assert all(torch.equal(a, b) for a, b in zip(z, here, strict=True))
        assert torch.equal(standing.residual, progress.residual)
    assert progress.owed.any()
    picard_settle(there, here, progress, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(standing.best, progress.best, strict=True))


def test_rows_with_strides(small_blocks):
    """Leaves that are parts of wider ones."""
    case = Case("plain")
    plain, other = case.fresh(), case.fresh()
    size = case.z[0].shape[1]
    wide = torch.randn(2, size + 12, device=DEVICE)
    wide[:, 9 : 9 + size] = case.z[0]
    images = case.images()
    low_rank_step(plain[0], images, *plain[1:], case.parts, stop=FIXED, backend="triton")
    low_rank_step([wide[:, 9 : 9 + size]], images, *other[1:], case.parts, stop=FIXED, backend="triton")
    assert torch.equal(wide[:, 9 : 9 + size], plain[0][0])


# Systems


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_system_that_has_ended_is_not_touched(small_blocks, backend):
    """It shares tiles with others, and would spoil them."""
    case, stop = Case("plain", n=3), eq.Stop(rtol=1e-9)
    z, memory, standing = case.fresh()
    low_rank_step(z, case.images(), memory, standing, case.parts, stop=stop, backend=backend)
    standing.status[1] = int(eq.Status.CONVERGED)
    before, kept = copy_of(z, memory, standing), [leaf.clone() for leaf in standing.best]
    bad = case.images()
    bad[0][1] = torch.nan
    low_rank_step(z, bad, memory, standing, case.parts, stop=stop, backend=backend)
    assert torch.equal(z[0][1], before[0][0][1])
    assert torch.equal(standing.best[0][1], kept[0][1])
    assert all(not torch.equal(z[0][i], before[0][0][i]) for i in (0, 2))
    assert torch.isfinite(z[0]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_moves_once_all_have_ended(small_blocks, backend):
    case, stop = Case("plain"), eq.Stop(rtol=1e-9)
    z, memory, standing = case.fresh()
    standing.status.fill_(int(eq.Status.CONVERGED))
    low_rank_step(z, case.images(), memory, standing, case.parts, stop=stop, backend=backend)
    assert torch.equal(z[0], case.z[0])
    assert int(standing.count) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_kernels_and_twin_judge_alike(small_blocks, name):
    """Residuals of scripted sizes; the second system sees the first one's script in half the size."""
    stop, sizes = SCRIPTS[name]
    case = Case("narrow reach", n=2)  # two strips to judge for each system
    kernel, twin = case.fresh(), case.fresh()
    direction, scale = torch.randn_like(case.z[0]), torch.tensor([[1.0], [0.5]], device=DEVICE)
    for size in sizes:
        fz = kernel[0][0] + direction * (size * scale)
        for (z, memory, standing), backend in ((kernel, "triton"), (twin, "naive")):
            low_rank_step(z, [fz], memory, standing, case.parts, stop=stop, floor=2e-6, backend=backend)
        assert_same_standing(kernel[2], dataclasses.replace(twin[2], best=kernel[2].best))
        assert_near(kernel[2].best, twin[2].best, 1e-5)
        assert_near(kernel[0], twin[0], 1e-5)
        running = (kernel[2].status < 0)[:, None]
        kernel[0][0].copy_(torch.where(running, case.z[0], kernel[0][0]))  # else steps would add up
        twin = copy_of(*kernel)
    if name != "fixed":
        assert (kernel[2].status >= 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_systems(backend):
    case = Case("plain", n=0)
    z, memory, standing = case.fresh()
    low_rank_step(z, case.images(), memory, standing, case.parts, stop=eq.Stop(), backend=backend)
    assert z[0].shape[0] == 0
    assert int(standing.count) == 1


def test_elsewhere_is_for_fixed_budgets():
    case = Case("plain")
    z, memory, standing = case.fresh()
    with pytest.raises(ValueError, match="out is for fixed budgets"):
        low_rank_step(z, case.images(), memory, standing, case.parts, stop=eq.Stop(), out=z)


# Parameters


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_are_followed_after_a_refresh(backend):
    case = Case("plain", n=1)
    for parameter in case.solver.parameters():
        parameter.mul_(-0.7)
    case.parts.refresh()
    again = LowRankParts.of(case.solver, case.problem.spec)
    old, new, images = case.fresh(), case.fresh(), case.images()
    low_rank_step(old[0], images, *old[1:], case.parts, stop=FIXED, backend=backend)
    low_rank_step(new[0], images, *new[1:], again, stop=FIXED, backend=backend)
    assert torch.equal(old[0][0], new[0][0])
    assert case.parts.down.data_ptr() == case.solver.correction.down.weight.data_ptr()


def test_copies_have_the_digits_of_the_products():
    """Rounded to float16, as to tf32: half a unit in the eleventh binary digit."""
    case = Case("plain")
    torch.nn.init.normal_(case.solver.correction.up.weight)
    case.parts.refresh()
    exact = case.parts.up.unflatten(1, (case.parts.reach, case.parts.rank))
    copied = case.parts.up_copy[:, :, : case.parts.rank].float()
    assert ((copied - exact).abs() <= 2.0**-11 * exact.abs() + 2.0**-25).all()
    assert not case.parts.up_copy[:, :, case.parts.rank :].any()


def test_what_it_does_not_do_for():
    base = HyperConfig("sequence", (4,), weights="newest", mixing=False, rank=3)
    assert supports(base)
    assert supports(dataclasses.replace(base, compression="sketch", local=True))
    refused = {
        "rank=0": {"rank": 0},
        "weights='shift'": {"weights": "shift"},
        "mixing=True": {"mixing": True},
        "kind 'any'": {"kind": "any", "compression": None},
        "above 128": {"rank": 200},
        "reach 9": {"reach": 9},
    }
    for reason, settings in refused.items():
        assert reason in obstacle(dataclasses.replace(base, **settings))
    with pytest.raises(ValueError, match="no fused step for this solver: it was made for sequence"):
        LowRankParts.of(HyperAnderson(base), StateSpec.of(torch.zeros(2, 3, 5)))


@pytest.mark.parametrize("shapes", [[(2, 3, 5)], [(2, 12)], [(2, 3, 4), (2, 3, 4)], [(2, 4, 3)]])
def test_states_of_another_form_are_refused(shapes):
    config = HyperConfig("sequence", (4,), weights="newest", mixing=False, rank=3, compression="sketch")
    assert not supports(config, StateSpec.of(tuple(torch.zeros(shape) for shape in shapes)))
    assert supports(config, StateSpec.of((torch.zeros(2, 3, 4),)))


# The captured engine

LOW_RANK = {"weights": "newest", "mixing": False, "rank": 4}


@pytest.fixture
def fused(monkeypatch):
    """Fused steps where they are of no use."""
    monkeypatch.setattr(_method, "_is_fused", lambda solver, stop, spec: supports(solver.config, spec))


def assert_fused(deq):
    for recording in recordings_of(deq):
        assert isinstance(recording.forward.loop.buffers.memory, LowRankMemory)


@pytest.mark.parametrize("stop", [LAST, eq.Stop(rtol=0, max_steps=8), TOLERANCE], ids=["last", "best", "tolerance"])
@pytest.mark.parametrize("reach", [1, 3])
def test_results_of_the_eager_engine(fused, reach, stop):
    """After one another: other inputs, NaN, weights of cell and solver updated in place."""
    deq, x, _ = prepared("sequence", stop, **LOW_RANK, reach=reach)
    broken = x.clone()
    broken[0] = torch.nan
    for inputs in (x, broken, *others(x, 1)):
        assert_agree(deq, inputs, 1e-5)
        with torch.no_grad():
            for parameter in deq.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    assert_fused(deq)
    assert deq.capture.recorded == 1


def test_pieces_follow_one_another(fused):
    deq, x, _ = prepared("sequence", eq.Stop(rtol=0, max_steps=70, select="last"), **LOW_RANK)
    captured, eager = both(deq, x)
    assert_close(captured.value, eager.value, 1e-5)
    assert_fused(deq)


def test_the_last_systems_are_solved_alone(fused):
    """One hard system of 16 goes on in a batch of its own."""
    torch.manual_seed(0)
    config = HyperConfig("sequence", (6,), rank=4, weights="newest", mixing=False)
    solver = shaken(HyperAnderson(config), 0.03)
    deq = eq.DEQ(Scaled(), solver=solver, stop=eq.Stop(rtol=1e-5, max_steps=80), engine="eager")
    x, scale = 0.3 * gaussian(16, 3, 6, seed=2).float(), torch.full((16, 1, 1), 0.1)
    scale[5] = 0.93
    with torch.no_grad():
        eager = deq(x, scale)
        deq.engine = "captured"
        for _ in range(3):
            captured = deq(x, scale)
    assert 1 in recordings_of(deq)[0].forward.levels
    assert_close(captured.value, eager.value, 1e-4)
    assert torch.equal(captured.stats.status, eager.stats.status)
    assert (captured.stats.steps - eager.stats.steps).abs().max() <= 1
    assert_fused(deq)


def test_images_are_taken_in_half_precision(fused):
    deq, x, solver = prepared("sequence", **LOW_RANK)
    method = _method.Method(solver, LAST, 0.0, deq.problem(x))
    assert isinstance(method.parts, LowRankParts)
    assert method.takes_half


def test_where_there_is_a_fused_step():
    deq, x, solver = prepared("sequence", **LOW_RANK)
    spec = deq.problem(x).spec
    there = dataclasses.replace(spec, device=torch.device("cuda", 0))  # as if; nothing is computed
    assert not _method._is_fused(solver, FIXED, spec)
    assert _method._is_fused(solver, FIXED, there)
    both_kinds = prepared("sequence", rank=4)[2]  # weights and a map: neither step does all of it
    assert not _method._is_fused(both_kinds, FIXED, there)
