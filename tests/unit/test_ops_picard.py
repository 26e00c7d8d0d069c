"""`picard_step`, kernel and twin, against the formula in float64, and against the driver."""

import dataclasses

import pytest
import torch

import equipoise as eq
from equipoise._stop import precision_floor
from equipoise.ops import Standing, picard_follow, picard_settle, picard_step
from tests.kernels import (
    BACKENDS,
    FIXED,
    SCRIPTS,
    assert_same_standing,
    contraction,
    kernel_device,
    quiet_interpreter,
)

DEVICE = kernel_device()
pytestmark = quiet_interpreter

HALF = (torch.bfloat16, torch.float16)


def start(n, d, dtype=torch.float32):
    z = [torch.randn(n, d).to(DEVICE, dtype)]
    return z, Standing.start(z)


def image(z, dtype=None):
    return torch.randn(z[0].shape).to(DEVICE, dtype or z[0].dtype)


def copy_of(z, standing):
    kept = {name: value.clone() for name, value in vars(standing).items() if torch.is_tensor(value)}
    return [leaf.clone() for leaf in z], dataclasses.replace(standing, best=[x.clone() for x in standing.best], **kept)


def snapshot(z, standing):
    fields = [value for value in vars(standing).values() if torch.is_tensor(value) and value.dim() > 0]
    return [tensor.clone() for tensor in (*z, *standing.best, *fields)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks per system at test sizes."""
    from equipoise.ops.picard import triton as kernels

    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "MOST_CHUNK", 2)


# Values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "d", "damping"), [(2, 21, 1.0), (1, 97, 0.3), (3, 1, 1.7)])
def test_follows_the_formula(small_blocks, backend, n, d, damping):
    """97 unknowns are seven blocks, more than are summed at once."""
    z, standing = start(n, d)
    zs, relative = [], []
    for _ in range(3):
        fz, before = image(z), z[0].clone()
        picard_step(z, [fz], standing, stop=FIXED, damping=damping, backend=backend)
        expected = (1 - damping) * before.double() + damping * fz.double()
        torch.testing.assert_close(z[0].double(), expected, rtol=1e-5, atol=1e-6)
        zs.append(before)
        relative.append((fz.double() - before.double()).norm(dim=1) / fz.double().norm(dim=1))
        torch.testing.assert_close(standing.latest.double(), relative[-1], rtol=1e-5, atol=0)
        torch.testing.assert_close(standing.residual.double(), torch.stack(relative).amin(dim=0), rtol=1e-5, atol=0)
        best = torch.stack(relative).argmin(dim=0)
        assert torch.equal(standing.best[0], torch.stack(zs)[best, torch.arange(n)])
    assert int(standing.count) == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("whole", [False, True])
def test_half_precision_rounds_what_is_stored_and_nothing_else(backend, half, whole):
    z, standing = start(2, 21, half if whole else torch.float32)
    for _ in range(2):
        fz, before = image(z, half), z[0].clone()
        picard_step(z, [fz], standing, stop=FIXED, damping=0.6, backend=backend)
        expected = 0.4 * before.float() + 0.6 * fz.float()
        tolerance = torch.finfo(half).eps if whole else 1e-6
        torch.testing.assert_close(z[0].float(), expected, rtol=tolerance, atol=tolerance)
        exact = (fz.float() - before.float()).norm(dim=1) / fz.float().norm(dim=1)
        torch.testing.assert_close(standing.latest, exact, rtol=1e-5, atol=0)
    assert standing.residual.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaves_are_one_state(backend):
    z, standing = start(2, 11)
    parts = [x.contiguous() for x in z[0].split((4, 7), dim=1)]
    apart = Standing.start(parts)
    for _ in range(3):
        fz = image(z)
        pieces = [x.contiguous() for x in fz.split((4, 7), dim=1)]
        picard_step(z, [fz], standing, stop=FIXED, damping=0.5, backend=backend)
        picard_step(parts, pieces, apart, stop=FIXED, damping=0.5, backend=backend)
        torch.testing.assert_close(torch.cat(parts, dim=1), z[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(apart.residual, standing.residual, rtol=1e-6, atol=0)
        torch.testing.assert_close(torch.cat(apart.best, dim=1), standing.best[0], rtol=0, atol=0)
    assert int(apart.count) == 3


@pytest.mark.parametrize("stop", [FIXED, eq.Stop(rtol=0.3)])
def test_many_leaves_of_odd_sizes_take_few_launches(small_blocks, monkeypatch, stop):
    """Six leaves of one to three blocks in two launches a pass, images of one in bfloat16; kernel against twin."""
    from equipoise.ops import _blocks

    sizes, seen = (5, 16, 33, 1, 40, 17), []
    launches = _blocks.Blocks.launches
    monkeypatch.setattr(_blocks.Blocks, "launches", lambda *a, **k: seen.append(list(launches(*a, **k))) or seen[-1])
    kernel = [torch.randn(3, size, device=DEVICE) for size in sizes]
    twin = [leaf.clone() for leaf in kernel]
    standings = Standing.start(kernel), Standing.start(twin)
    for k in range(4):
        fz = [torch.randn_like(leaf) * torch.tensor([1.0, 0.6**k, 0.1**k], device=DEVICE)[:, None] for leaf in kernel]
        fz = [leaf + image for leaf, image in zip(kernel, fz, strict=True)]
        fz[2] = fz[2].bfloat16()
        picard_step(kernel, fz, standings[0], stop=stop, backend="triton")
        picard_step(twin, fz, standings[1], stop=stop, backend="naive")
        assert_same_standing(*standings)
        for ours, theirs in zip(kernel, twin, strict=True):
            assert torch.equal(ours, theirs)
    assert {len(pieces) for pieces in seen} == {2}
    assert len(seen) == 8
    assert stop.fixed_budget or (standings[0].status >= 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_with_strides(backend):
    wide = torch.randn(3, 20, device=DEVICE)
    z, fz = [wide[:, 2:9]], torch.randn(3, 30, device=DEVICE)[:, 5:12]
    standing, before = Standing.start(z), wide.clone()
    picard_step(z, [fz], standing, stop=FIXED, backend=backend)
    assert torch.equal(z[0], fz)
    assert torch.equal(wide[:, :2], before[:, :2])
    assert torch.equal(wide[:, 9:], before[:, 9:])


# Images as next iterates


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(21,), (5, 33, 1, 40, 17)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_following_finds_the_best_iterate(small_blocks, backend, sizes, steps):
    """Three systems whose residuals fall, rise, and fall every other time; nothing but `best` is written."""
    scales = torch.tensor([[1.0, 0.5, 0.3, 0.2, 0.1], [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 0.5, 0.9, 0.3, 0.8]])
    iterates = [[torch.randn(3, size, device=DEVICE) for size in sizes]]
    for k in range(steps):
        change = [torch.randn_like(leaf) * scales[:, k : k + 1].to(DEVICE) for leaf in iterates[-1]]
        iterates.append([leaf + step for leaf, step in zip(iterates[-1], change, strict=True)])
    kept = [[leaf.clone() for leaf in z] for z in iterates]
    standing = Standing.start([torch.zeros_like(leaf) for leaf in iterates[0]])
    for k in range(steps):
        picard_follow(iterates[k], iterates[k + 1], iterates[max(0, k - 2)], standing, stop=FIXED, backend=backend)
    picard_settle(iterates[steps - 1], iterates[max(0, steps - 2)], standing, backend=backend)
    flat = torch.stack([torch.cat(z, dim=1) for z in kept]).double()
    relative = (flat[1:] - flat[:-1]).norm(dim=2) / flat[1:].norm(dim=2)
    torch.testing.assert_close(standing.residual.double(), relative.amin(dim=0), rtol=1e-5, atol=0)
    torch.testing.assert_close(standing.latest.double(), relative[-1], rtol=1e-5, atol=0)
    best = flat[relative.argmin(dim=0), torch.arange(3)]
    assert torch.equal(torch.cat(standing.best, dim=1).double(), best)
    assert int(standing.count) == steps
    assert not standing.owed.any()
    assert not standing.arrived.any()
    assert all(same(now, before) for now, before in zip(iterates, kept, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_following_past_values_that_are_not_finite(backend):
    z, standing = start(2, 9)
    images = [image(z) for _ in range(4)]
    images[1][0, 2] = torch.nan
    iterates = [z[0], *images]
    for k in range(4):
        older = [iterates[max(0, k - 2)]]
        picard_follow([iterates[k]], [iterates[k + 1]], older, standing, stop=FIXED, backend=backend)
    picard_settle([iterates[3]], [iterates[2]], standing, backend=backend)
    assert standing.status.tolist() == [int(eq.Status.NONFINITE), -1]
    assert torch.isfinite(standing.best[0]).all()
    assert torch.isfinite(standing.residual).all()


# Systems


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_system_that_has_ended_is_not_touched(backend):
    z, standing = start(3, 9)
    stop = eq.Stop(rtol=1e-9)
    picard_step(z, [image(z)], standing, stop=stop, backend=backend)
    standing.status[1] = int(eq.Status.CONVERGED)
    before = snapshot(z, standing)
    bad = image(z)
    bad[1] = torch.nan
    picard_step(z, [bad], standing, stop=stop, backend=backend)
    after = snapshot(z, standing)
    assert same([tensor[1] for tensor in after], [tensor[1] for tensor in before])
    assert not same([tensor[0] for tensor in after], [tensor[0] for tensor in before])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_is_not_finite_ends_one_system(backend):
    z, standing = start(2, 6)
    stop = eq.Stop(rtol=1e-9)
    picard_step(z, [image(z)], standing, stop=stop, backend=backend)
    best, clean = standing.best[0].clone(), copy_of(z, standing)
    fz = image(z)
    bad = fz.clone()
    bad[0, 3] = torch.inf
    picard_step(z, [bad], standing, stop=stop, backend=backend)
    picard_step(clean[0], [fz], clean[1], stop=stop, backend=backend)
    assert standing.status.tolist() == [int(eq.Status.NONFINITE), -1]
    assert standing.steps.tolist() == [1, 0]
    assert torch.equal(z[0][0], best[0])
    assert torch.equal(z[0][1], clean[0][0][1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_root_is_recognised(backend):
    z, standing = start(2, 6)
    root, fz = z[0][0].clone(), image(z)
    fz[0] = root
    picard_step(z, [fz], standing, stop=eq.Stop(rtol=1e-6), damping=0.5, backend=backend)
    assert standing.status.tolist() == [int(eq.Status.CONVERGED), -1]
    assert torch.equal(z[0][0], root)
    assert torch.equal(standing.best[0][0], root)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_systems(backend):
    z, standing = start(0, 4)
    picard_step(z, [image(z)], standing, stop=eq.Stop(), backend=backend)
    assert z[0].shape == (0, 4)
    assert int(standing.count) == 1


# The rules


@pytest.mark.parametrize("name", SCRIPTS)
def test_kernel_and_twin_judge_alike(name):
    """Residuals of scripted sizes; the second system sees the first one's script in half the size."""
    stop, sizes = SCRIPTS[name]
    kernel = start(2, 3)
    twin = copy_of(*kernel)
    direction = torch.randn(2, 3, device=DEVICE)
    for size in sizes:
        for (z, standing), backend in ((kernel, "triton"), (twin, "naive")):
            fz = z[0] + direction * (size * torch.tensor([[1.0], [0.5]], device=DEVICE))
            picard_step(z, [fz], standing, stop=stop, floor=2e-6, damping=0.5, backend=backend)
        assert_same_standing(kernel[1], twin[1])
        torch.testing.assert_close(kernel[0], twin[0], rtol=1e-6, atol=1e-7, equal_nan=True)
    if name != "fixed":
        assert (kernel[1].status >= 0).any()


# The driver


def iterate(f, z, solver, stop, steps, backend):
    z = [z.clone()]
    standing = Standing.start(z)
    for _ in range(steps):
        floor = precision_floor(z[0].dtype)
        picard_step(z, [f(z[0])], standing, stop=stop, floor=floor, damping=solver.damping, backend=backend)
    return z[0], standing


@pytest.mark.parametrize(
    ("solver", "stop"),
    [
        (eq.Picard(), eq.Stop(rtol=0, max_steps=20)),
        (eq.Picard(0.7), eq.Stop(rtol=1e-8, max_steps=80)),
        (eq.Picard(), eq.Stop(rtol=1e-6, max_steps=60, select="last")),
        (eq.Picard(), eq.Stop(rtol=1e-18, max_steps=120, plateau=4)),
        (eq.Picard(1.2), eq.Stop(rtol=1e-8, max_steps=9)),
    ],
)
def test_twin_equals_the_driver(solver, stop):
    """In float64: values to 1e-12, status and step counts exactly."""
    f, z0 = contraction(4, 7, torch.float64, DEVICE, 0.6), torch.zeros(4, 7, dtype=torch.float64, device=DEVICE)
    solution = eq.fixed_point(f, z0, solver=solver, stop=stop)
    z, standing = iterate(f, z0, solver, stop, stop.max_steps, "naive")
    value = z if stop.select == "last" else standing.best[0]
    torch.testing.assert_close(value, solution.value, rtol=1e-12, atol=1e-12)
    if not stop.fixed_budget:
        status = torch.where(standing.status < 0, int(eq.Status.MAX_STEPS), standing.status)
        steps = torch.where(standing.status < 0, stop.max_steps, standing.steps)
        assert torch.equal(status.long(), solution.stats.status.long())
        assert torch.equal(steps.long(), solution.stats.steps)


@pytest.mark.parametrize("damping", [1.0, 0.8])
def test_kernel_ends_where_the_driver_does(damping):
    f, z0 = contraction(2, 7, torch.float32, DEVICE, 0.6), torch.zeros(2, 7, device=DEVICE)
    solver, stop = eq.Picard(damping), eq.Stop(rtol=1e-3, max_steps=30)
    solution = eq.fixed_point(f, z0, solver=solver, stop=stop)
    _, standing = iterate(f, z0, solver, stop, int(solution.stats.steps.max()) + 2, "triton")
    torch.testing.assert_close(standing.best[0], solution.value, rtol=0, atol=1e-5)
    assert torch.equal(standing.status.long(), solution.stats.status)
    assert torch.equal(standing.steps.long(), solution.stats.steps)


def test_errors_say_what_to_do():
    z, standing = start(1, 3)
    with pytest.raises(ValueError, match="unknown backend 'trition'; did you mean 'triton'"):
        picard_step(z, [image(z)], standing, stop=FIXED, backend="trition")
    with pytest.raises(ValueError, match="damping must be a number"):
        picard_step(z, [image(z)], standing, stop=FIXED, damping=0.0)
    with pytest.raises(ValueError, match="expected a fixed budget"):
        picard_follow(z, [image(z)], z, standing, stop=eq.Stop())
    wide = start(1, 3, torch.float64)
    with pytest.raises(ValueError, match="kernels take float32, float16 and bfloat16"):
        picard_step(wide[0], [image(wide[0])], wide[1], stop=FIXED, backend="triton")
