"""`hyper_step`: the twin against `HyperAnderson` and the driver, the kernels against the twin."""

import dataclasses

import pytest
import torch

import equipoise as eq
from equipoise._problem import Problem, StateSpec
from equipoise._stop import precision_floor
from equipoise.ops import HyperMemory, HyperParts, Standing, hyper_step, picard_settle
from equipoise.ops.hyper import obstacle, supports
from equipoise.solvers import HyperAnderson
from equipoise.solvers._hyper_config import HyperConfig
from tests.kernels import BACKENDS, FIXED, SCRIPTS, assert_same_standing, kernel_device, quiet_interpreter

DEVICE = kernel_device()
pytestmark = quiet_interpreter

SIZES = {"compressed": 5, "width": 7, "memory": 3}
LAST = torch.channels_last

# kind, shapes of a system's leaves, settings; sizes fill no block, and steps go past the end of the ring
CASES = {
    "local": ("sequence", [(17, 11)], {"local": True}),
    "local, short": ("sequence", [(3, 20)], {"local": True}),
    "local, wide": ("sequence", [(2, 72)], {"local": True}),
    "local, one position": ("sequence", [(1, 4)], {"local": True}),
    "local, leaves": ("sequence", [(5, 11), (5, 3)], {"local": True, "mixing": False}),
    "local, softmax": ("sequence", [(4, 6)], {"local": True, "weights": "softmax"}),
    "local, memory of one": ("sequence", [(4, 6)], {"local": True, "memory": 1}),
    "last": ("sequence", [(7, 11)], {"weights": "free"}),
    "last, leaves": ("sequence", [(5, 11), (5, 3)], {}),
    "mean, leaves": ("sequence", [(5, 11), (5, 3)], {"compression": "mean", "mixing": False}),
    "images": ("images", [(3, 6, 4), (5, 3, 2)], {}),
    "images, one": ("images", [(7, 3, 5)], {"weights": "softmax", "memory": 2}),
    "any": ("any", [(77,)], {}),
    "any, leaves": ("any", [(5, 3), (130,)], {"memory": 5}),
}
# One for each way through the kernels, for tests of something else.
SOME = ("local, short", "images")


def sizes_of(kind, shapes):
    if kind == "any":
        return tuple(torch.Size(shape).numel() for shape in shapes)
    return tuple(shape[-1 if kind == "sequence" else 0] for shape in shapes)


class Case:
    """A solver with weights as after some fitting, a start, and images that have nothing to do with it."""

    def __init__(self, name, n=2, dtype=torch.float32, memory_format=None, memory=None):
        torch.manual_seed(0)
        kind, shapes, settings = CASES[name]
        settings = {**SIZES, **settings, **({} if memory is None else {"memory": memory})}
        config = HyperConfig(kind, sizes_of(kind, shapes), **settings)
        self.solver = HyperAnderson(config).to(DEVICE, dtype).requires_grad_(False)
        for parameter in self.solver.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        state = [torch.randn(n, *shape).to(DEVICE, dtype) for shape in shapes]
        if memory_format is not None:
            state = [leaf.to(memory_format=memory_format) for leaf in state]
        spec = StateSpec.of(tuple(state))
        self.problem = Problem(lambda z: z, spec)
        self.z = self.problem.start(tuple(state))
        self.parts = HyperParts.of(self.solver, spec)

    def images(self):
        return [0.3 * leaf + 0.5 * torch.randn_like(leaf) for leaf in self.z]

    def fresh(self, residual_dtype=None, image_dtype=None):
        """Iterates, memory and standing; slots never written may hold anything."""
        z = [leaf.clone() for leaf in self.z]
        memory = HyperMemory.empty(z, self.parts, residual_dtype, image_dtype)
        for ring in (*memory.images, *memory.residuals, memory.gram, memory.shares):
            ring.fill_(torch.nan)
        return z, memory, Standing.start(z)


def copy_of(z, memory, standing):
    fields = [{k: v.clone() for k, v in vars(x).items() if torch.is_tensor(v)} for x in (memory, standing)]
    rings = {name: [x.clone() for x in getattr(memory, name)] for name in ("images", "residuals")}
    best = [x.clone() for x in standing.best]
    return (
        [x.clone() for x in z],
        dataclasses.replace(memory, **fields[0], **rings),
        dataclasses.replace(standing, best=best, **fields[1]),
    )


def tensors_of(z, memory, standing):
    fields = [value for value in (*vars(memory).values(), *vars(standing).values()) if torch.is_tensor(value)]
    rows = [tensor for tensor in fields if tensor.dim() > 0]
    return [tensor.clone() for tensor in (*z, *memory.images, *memory.residuals, *standing.best, *rows)]


def assert_near(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks, and several of what a program does at once, at test sizes."""
    from equipoise.ops.hyper import triton as kernels

    settings = {"BLOCK": 64, "WIDE": 16, "FEATURES": 16, "TERMS": 8, "POOLED": 128, "MOST_CHUNK": 2, "MOST_PARTS": 2}
    for name, value in settings.items():
        monkeypatch.setattr(kernels, name, value)


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """On a GPU rounding must not hide what else may be wrong; tests/gpu has products as they are."""
    from equipoise.ops.hyper import triton as kernels

    monkeypatch.setattr(kernels, "PRECISION", "tf32x3")


# The twin


@pytest.mark.parametrize(
    ("name", "memory_format"), [*((name, None) for name in CASES), ("images", LAST), ("images, one", LAST)]
)
def test_twin_is_the_solver(name, memory_format):
    """In float64: proposals, weights and step lengths of each step to 1e-10; sketches have a factor in float32."""
    tolerance = 1e-7 if name.startswith("any") else 1e-10
    case = Case(name, dtype=torch.float64, memory_format=memory_format)
    assert memory_format is None or case.problem.spec.orders[0] is not None
    z, memory, standing = case.fresh()
    with torch.no_grad():
        expected, state = case.solver.init(case.problem, case.z)
    steps = case.parts.memory + 4
    for k in range(steps):
        images = case.images()
        expected, state = case.solver.propose(case.problem, expected, images, state)
        hyper_step(z, images, memory, standing, case.parts, stop=FIXED)
        assert_near(z, expected, tolerance)
        filled = min(k + 1, case.parts.memory)
        assert_near([memory.weights.flatten(0, 1)[:, -filled:]], [state.weights], tolerance)
        assert_near([memory.mixing.flatten()], [state.mixing], tolerance)
    assert int(standing.count) == steps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SOME)
def test_before_any_fitting_it_is_the_plain_iteration(name, backend):
    case = Case(name, n=1, memory=2)
    case.parts.out.zero_()
    case.parts.last.zero_()
    z, memory, standing = case.fresh()
    for _ in range(2):
        images = case.images()
        hyper_step(z, images, memory, standing, case.parts, stop=FIXED, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(z, images, strict=True))


# The kernels


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_twin(small_blocks, name):
    """Past the end of the ring, all that is remembered included; steps are the interpreter's time, so few of them."""
    memory = {"local, memory of one": 1, "local, softmax": 3}.get(name, 2)
    case = Case(name, n=2 if name in ("local, short", "images") else 1, memory=memory)
    kernel = case.fresh()
    twin = copy_of(*kernel)
    for _ in range(memory + 1):
        images = case.images()
        for (z, memory, standing), backend in ((kernel, "triton"), (twin, "naive")):
            hyper_step(z, images, memory, standing, case.parts, stop=FIXED, backend=backend)
        assert_same_standing(kernel[2], dataclasses.replace(twin[2], best=kernel[2].best))
        assert_near(tensors_of(*kernel), tensors_of(*twin), 1e-4)
        assert all(torch.isfinite(leaf).all() for leaf in kernel[0])
        twin = copy_of(*kernel)  # so that rounding does not add up


@pytest.mark.parametrize("name", SOME)
def test_kernels_at_their_own_block_sizes(name):
    case = Case(name, n=1, memory=2)
    kernel, twin = case.fresh(), case.fresh()
    for _ in range(2):
        images = case.images()
        for (z, memory, standing), backend in ((kernel, "triton"), (twin, "naive")):
            hyper_step(z, images, memory, standing, case.parts, stop=FIXED, backend=backend)
    assert_near(kernel[0], twin[0], 1e-4)


@pytest.mark.parametrize("most", [2, 3, 99])
def test_features_in_several_turns(small_blocks, monkeypatch, most):
    """Programs that go through several tiles, the last one of which is not full, and parts added up in two rounds."""
    from equipoise.ops.hyper import triton as kernels

    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    monkeypatch.setattr(kernels, "MOST_SPAN", most)
    case = Case("local, wide", n=1, memory=2)
    assert kernels._tiles(1, (72,)) == (16, min(most, 5))
    kernel, twin = case.fresh(), case.fresh()
    for _ in range(3):
        images = case.images()
        for (z, memory, standing), backend in ((kernel, "triton"), (twin, "naive")):
            hyper_step(z, images, memory, standing, case.parts, stop=FIXED, backend=backend)
    assert_near(tensors_of(*kernel), tensors_of(*twin), 1e-4)


def test_tiles_keep_a_device_busy_and_parts_few():
    """DEQ-TrellisNet, DEQ-Transformers of 256 and 704 features with few sequences, and 704 with many; narrow states."""
    from equipoise.ops.hyper import triton as kernels

    given = [(12 * 5, 1400), (12 * 5, 256), (15 * 10, 704), (56 * 10, 704), (32 * 27, 32), (2, 3)]
    assert [kernels._tiles(strips, (size,)) for strips, size in given] == [
        (64, 2),
        (64, 1),
        (64, 3),
        (64, 4),
        (32, 1),
        (16, 1),
    ]


def test_kernels_know_what_offsets_are_multiples_of():
    from equipoise.ops.hyper import triton as kernels

    assert [kernels._common(*numbers) for numbers in ((1400, 98_000), (12, 48), (96,), (7, 8))] == [8, 4, 8, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SOME)
def test_iterates_that_are_written_elsewhere(name, backend):
    """The same iterates and the same best ones, copied later."""
    case = Case(name, n=1, memory=1)
    z, kept, standing = case.fresh()
    here, memory, progress = case.fresh()
    there = [torch.full_like(leaf, torch.nan) for leaf in here]
    directions = [torch.randn_like(leaf) for leaf in z]
    for size in (1.0, 0.5, 0.7, 0.2):  # better, better, worse, better
        fz = [leaf + size * direction for leaf, direction in zip(z, directions, strict=True)]
        hyper_step(z, fz, kept, standing, case.parts, stop=FIXED, backend=backend)
        hyper_step(here, fz, memory, progress, case.parts, stop=FIXED, out=there, backend=backend)
        here, there = there, here
        assert all(torch.equal(a, b) for a, b in zip(z, here, strict=True))
        assert torch.equal(standing.residual, progress.residual)
    assert progress.owed.any()
    picard_settle(there, here, progress, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(standing.best, progress.best, strict=True))
    assert not progress.owed.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SOME)
def test_images_remembered_as_f_returns_them(name, backend):
    """In bfloat16: nothing is lost, and half the bytes."""
    case = Case(name, n=1, memory=2)
    half, whole = case.fresh(image_dtype=torch.bfloat16), case.fresh()
    assert half[1].images[0].dtype == torch.bfloat16
    for _ in range(3):
        images = [leaf.to(torch.bfloat16) for leaf in case.images()]
        for z, memory, standing in (half, whole):
            hyper_step(z, images, memory, standing, case.parts, stop=FIXED, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(half[0], whole[0], strict=True))


def test_maps_with_channels_last(small_blocks):
    case = Case("images", n=1, memory_format=LAST, memory=2)
    kernel, twin = case.fresh(), case.fresh()
    for _ in range(2):
        images = case.images()
        for (z, memory, standing), backend in ((kernel, "triton"), (twin, "naive")):
            hyper_step(z, images, memory, standing, case.parts, stop=FIXED, backend=backend)
    assert_near(kernel[0], twin[0], 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SOME)
def test_half_precision_rounds_what_is_stored_and_nothing_else(name, backend):
    """Images and the ring of residuals in bfloat16, beside a solve of the same images that rounds nothing."""
    case = Case(name, n=1, memory=2)
    half, whole = case.fresh(torch.bfloat16), case.fresh()
    for _ in range(2):
        images = [leaf.to(torch.bfloat16) for leaf in case.images()]
        hyper_step(half[0], images, *half[1:], case.parts, stop=FIXED, backend=backend)
        exact = [leaf.float() for leaf in images]
        hyper_step(whole[0], exact, *whole[1:], case.parts, stop=FIXED, backend="naive")
        # One unit, not half of one: the interpreter truncates where a GPU rounds. Weights differ by what products do.
        assert_near([x.float() for x in half[1].residuals], whole[1].residuals, 8e-3)
        assert_near(half[1].images, whole[1].images, 0.0)
        assert_near(half[0], whole[0], 3e-2)
        assert_near([half[2].latest], [whole[2].latest], 1e-5)
        half = (copy_of(*whole)[0], *half[1:])


@pytest.mark.parametrize("name", SOME)
def test_a_solver_in_half_precision(name):
    """Its parameters in bfloat16; kernels compute with them in float32, the twin rounds in between."""
    case = Case(name, n=1, memory=2)
    case.solver.bfloat16()
    parts = HyperParts.of(case.solver, case.problem.spec)
    z = [[leaf.clone() for leaf in case.z] for _ in BACKENDS]
    kept = [(HyperMemory.empty(leaves, parts), Standing.start(leaves)) for leaves in z]
    assert kept[0][0].shares.dtype == torch.bfloat16
    for _ in range(3):
        images = case.images()
        for leaves, (memory, standing), backend in zip(z, kept, BACKENDS, strict=True):
            hyper_step(leaves, images, memory, standing, parts, stop=FIXED, backend=backend)
    assert_near(z[0], z[1], 3e-2)
    assert_near([kept[0][0].weights], [kept[1][0].weights], 3e-2)


def test_rows_with_strides():
    """Leaves that are parts of wider ones, rings in another order."""
    case = Case("local, softmax", memory=1)
    plain, other = case.fresh(), case.fresh()
    wide = torch.randn(2, 40, device=DEVICE)
    wide[:, 9:33] = case.z[0]
    other[1].images = [ring.contiguous() for ring in other[1].images]
    for _ in range(2):
        images = case.images()
        hyper_step(plain[0], images, *plain[1:], case.parts, stop=FIXED, backend="triton")
        hyper_step([wide[:, 9:33]], images, *other[1:], case.parts, stop=FIXED, backend="triton")
        assert torch.equal(wide[:, 9:33], plain[0][0])


# Systems


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SOME)
def test_a_system_that_has_ended_is_not_touched(small_blocks, name, backend):
    case, stop = Case(name, memory=2), eq.Stop(rtol=1e-9)
    solve = case.fresh()
    hyper_step(solve[0], case.images(), *solve[1:], case.parts, stop=stop, backend=backend)
    solve[2].status[1] = int(eq.Status.CONVERGED)
    before = tensors_of(*solve)
    bad = case.images()
    bad[0][1] = torch.nan
    hyper_step(solve[0], bad, *solve[1:], case.parts, stop=stop, backend=backend)
    after = tensors_of(*solve)
    assert all(torch.equal(a[1].nan_to_num(), b[1].nan_to_num()) for a, b in zip(after, before, strict=True))
    assert not torch.equal(after[0][0], before[0][0])
    assert torch.isfinite(after[0]).all()


@pytest.mark.parametrize("name", SCRIPTS)
def test_kernels_and_twin_judge_alike(small_blocks, name):
    """Residuals of scripted sizes; the second system sees the first one's script in half the size."""
    stop, sizes = SCRIPTS[name]
    case = Case("local, short", memory=1)  # two blocks to judge for each system, and hardly a network
    kernel, twin = case.fresh(), case.fresh()
    direction, scale = torch.randn_like(case.z[0]), torch.tensor([[1.0], [0.5]], device=DEVICE)
    for size in sizes:
        fz = kernel[0][0] + direction * (size * scale)
        for (z, memory, standing), backend in ((kernel, "triton"), (twin, "naive")):
            hyper_step(z, [fz], memory, standing, case.parts, stop=stop, floor=2e-6, backend=backend)
        assert_same_standing(kernel[2], dataclasses.replace(twin[2], best=kernel[2].best))
        assert_near(kernel[2].best, twin[2].best, 1e-4)
        assert_near(kernel[0], twin[0], 1e-4)
        running = (kernel[2].status < 0)[:, None]
        kernel[0][0].copy_(torch.where(running, case.z[0], kernel[0][0]))  # else steps would add up
        twin = copy_of(*kernel)
    if name != "fixed":
        assert (kernel[2].status >= 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SOME)
def test_no_systems(name, backend):
    case = Case(name, n=0)
    z, memory, standing = case.fresh()
    hyper_step(z, case.images(), memory, standing, case.parts, stop=eq.Stop(), backend=backend)
    assert z[0].shape[0] == 0
    assert int(standing.count) == 1


def test_all_that_is_remembered_is_by_system():
    """So that solves go on with some of them."""
    for name in CASES:
        memory = Case(name, n=3).fresh()[1]
        tables = [value for value in vars(memory).values() if torch.is_tensor(value)]
        tensors = [*memory.images, *memory.residuals, *tables]
        assert {tensor.shape[0] for tensor in tensors} == {3}


# The driver


def contraction(case):
    shifts = [0.5 * torch.randn_like(leaf) for leaf in case.z]

    def f(z):
        return [0.6 * torch.tanh(leaf.roll(1, 1)) + shift for leaf, shift in zip(z, shifts, strict=True)]

    return f


@pytest.mark.parametrize(
    "stop", [eq.Stop(rtol=0, max_steps=12), eq.Stop(rtol=1e-7, max_steps=60), eq.Stop(rtol=1e-5, select="last")]
)
@pytest.mark.parametrize("name", SOME)
def test_twin_ends_where_the_driver_does(name, stop):
    """In float64: values to 1e-10, status and step counts exactly."""
    case = Case(name, n=3, dtype=torch.float64)
    for parameter in case.solver.step.out.parameters():
        parameter.mul_(0.05)  # near the plain iteration, which converges
    f, spec = contraction(case), case.problem.spec
    flat = Problem(lambda z: spec.unflatten(f(spec.flatten(z))), spec)
    solution = eq.fixed_point(flat.f, spec.unflatten(case.z), solver=case.solver, stop=stop)
    z, memory, standing = case.fresh()
    for _ in range(stop.max_steps):
        floor = precision_floor(torch.float64)
        hyper_step(z, f(z), memory, standing, case.parts, stop=stop, floor=floor, backend="naive")
    assert_near(z if stop.select == "last" else standing.best, spec.flatten(solution.value), 1e-10)
    if not stop.fixed_budget:
        assert torch.equal(standing.status.long(), solution.stats.status.long())
        assert torch.equal(standing.steps.long(), solution.stats.steps)
        assert (standing.status == int(eq.Status.CONVERGED)).all()


# Parameters


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_are_followed_after_a_refresh(backend):
    case = Case("local, softmax", n=1, memory=2)
    for parameter in case.solver.parameters():
        parameter.mul_(-0.7)
    case.parts.refresh()
    again = HyperParts.of(case.solver, case.problem.spec)
    old, new = case.fresh(), case.fresh()
    for _ in range(2):
        images = case.images()
        hyper_step(old[0], images, *old[1:], case.parts, stop=FIXED, backend=backend)
        hyper_step(new[0], images, *new[1:], again, stop=FIXED, backend=backend)
    assert torch.equal(old[0][0], new[0][0])


def test_what_it_does_not_do_for():
    base = HyperConfig("sequence", (4,), local=True)
    assert supports(base)
    refused = {
        "weights='corrected'": {"weights": "corrected"},
        "weights='newest'": {"weights": "newest"},
        "weighted sums of residuals": {"plain_sum": True},
        "inner products": {"products": False},
        "compression='sketch'": {"compression": "sketch"},
        "8 steps, not 9": {"memory": 9},
        "above 128": {"width": 200},
    }
    for reason, settings in refused.items():
        assert reason in obstacle(dataclasses.replace(base, **settings))
    maps = StateSpec.of(torch.zeros(2, 3, 4, 4).to(memory_format=LAST))
    images = HyperConfig("images", (3,))
    assert supports(images, maps)
    assert "not stored in the order" in obstacle(dataclasses.replace(images, compression="sketch"), maps)


@pytest.mark.parametrize(
    ("config", "shapes", "batch_dims"),
    [
        (HyperConfig("sequence", (4,), local=True), [(2, 3, 5)], 1),  # features
        (HyperConfig("sequence", (4,)), [(2, 3, 5)], 1),
        (HyperConfig("sequence", (4,)), [(2, 3, 3, 4)], 1),  # axes
        (HyperConfig("sequence", (4, 4), local=True), [(2, 3, 4), (2, 5, 4)], 1),  # positions
        (HyperConfig("sequence", (4,)), [(2, 3, 4), (2, 3, 4)], 1),  # leaves
        (HyperConfig("sequence", (4,)), [(2, 3, 4)], 0),
        (HyperConfig("images", (3, 5)), [(2, 3, 4, 4), (2, 4, 2, 2)], 1),
        (HyperConfig("any", (6,)), [(2, 3), (2, 3)], 1),
    ],
)
def test_states_of_another_form(config, shapes, batch_dims):
    """Kernels would read beyond the end of the weights."""
    spec = StateSpec.of(tuple(torch.zeros(shape) for shape in shapes), batch_dims)
    assert "it was made for" in obstacle(config, spec)
    with pytest.raises(ValueError, match="no fused step for this solver: it was made for"):
        HyperParts.of(HyperAnderson(config), spec)


def test_sketches_are_for_states_of_any_size():
    assert supports(HyperConfig("any", (6,)), StateSpec.of(torch.zeros(2, 3, 7)))
    assert supports(HyperConfig("any", (6,)), StateSpec.of(torch.zeros(2, 3, 7), 2))


def test_errors_say_what_to_do():
    case = Case("local, softmax")
    z, memory, standing = case.fresh()
    with pytest.raises(ValueError, match="unknown backend 'trition'; did you mean 'triton'"):
        hyper_step(z, case.images(), memory, standing, case.parts, stop=FIXED, backend="trition")
    with pytest.raises(ValueError, match="hyper_step: out is for fixed budgets"):
        hyper_step(z, case.images(), memory, standing, case.parts, stop=eq.Stop(), out=case.images())
    solver = HyperAnderson(HyperConfig("sequence", (6,), weights="newest"))
    with pytest.raises(ValueError, match="no fused step for this solver: weights='newest'"):
        HyperParts.of(solver, case.problem.spec)
    wide = Case("local, softmax", dtype=torch.float64)
    z, memory, standing = wide.fresh()
    with pytest.raises(ValueError, match="kernels take float32, float16 and bfloat16"):
        hyper_step(z, wide.images(), memory, standing, wide.parts, stop=FIXED, backend="triton")
