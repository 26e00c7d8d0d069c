"""`anderson_step`, kernel and twin, against a dense reference in float64, and against the driver."""

import dataclasses

import pytest
import torch

import equipoise as eq
from equipoise._stop import precision_floor
from equipoise.ops import AndersonMemory, Standing, anderson_step, picard_settle
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
RIDGE = 1e-6


def dense_proposal(zs, fzs, memory, mixing, ridge):
    """Anderson's next iterate from all pairs so far, oldest first, by a dense solve in float64; one leaf."""
    z, f = (torch.stack([x.double().cpu() for x in xs[-memory:]], dim=1) for xs in (zs, fzs))
    g = f - z
    gram = g @ g.mT
    gram = gram + ridge * torch.diag_embed(gram.diagonal(dim1=1, dim2=2))
    w = torch.linalg.solve(gram, torch.ones_like(gram[:, :, :1]))
    alpha = w / w.sum(dim=1, keepdim=True)
    return (alpha * (z + mixing * g)).sum(dim=1), alpha[:, :, 0]


def start(n, d, memory, dtype=torch.float32, **dtypes):
    z = [torch.randn(n, d).to(DEVICE, dtype)]
    kept = AndersonMemory.empty(z, memory, **dtypes)
    for ring in (*kept.images, *kept.residuals):
        ring.fill_(torch.nan)  # slots never written may hold anything
    return z, kept, Standing.start(z)


def image(z, dtype=None):
    """A random image; with nothing in common between steps the small systems are well conditioned."""
    return torch.randn(z[0].shape).to(DEVICE, dtype or z[0].dtype)


def snapshot(z, memory, standing):
    fields = [value for value in vars(standing).values() if torch.is_tensor(value) and value.dim() > 0]
    tensors = (*z, *memory.images, *memory.residuals, memory.gram, memory.weights, *standing.best, *fields)
    return [tensor.clone() for tensor in tensors]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def copy_of(z, memory, standing):
    z = [leaf.clone() for leaf in z]
    memory = dataclasses.replace(
        memory,
        images=[x.clone() for x in memory.images],
        residuals=[x.clone() for x in memory.residuals],
        gram=memory.gram.clone(),
        weights=memory.weights.clone(),
    )
    kept = {name: value.clone() for name, value in vars(standing).items() if torch.is_tensor(value)}
    return z, memory, dataclasses.replace(standing, best=[x.clone() for x in standing.best], **kept)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks per system at test sizes."""
    from equipoise.ops.anderson import triton as kernels

    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "MOST_CHUNK", 2)


# Values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "d", "memory", "mixing"), [(2, 21, 3, 1.0), (1, 37, 2, 0.6), (3, 1, 1, 1.0)])
def test_follows_the_formula_past_the_end_of_the_ring(small_blocks, backend, n, d, memory, mixing):
    z, kept, standing = start(n, d, memory)
    zs, fzs = [], []
    for k in range(memory + 2):
        fz = image(z)
        zs.append(z[0].clone())
        fzs.append(fz)
        anderson_step(z, [fz], kept, standing, stop=FIXED, ridge=RIDGE, mixing=mixing, backend=backend)
        expected, alpha = dense_proposal(zs, fzs, memory, mixing, RIDGE)
        torch.testing.assert_close(z[0].double().cpu(), expected, rtol=1e-4, atol=1e-4)
        slots = [j % memory for j in range(k + 1)][-memory:]  # oldest first
        torch.testing.assert_close(kept.weights[:, slots].double().cpu(), alpha, rtol=1e-4, atol=1e-4)
        relative = [(f - x).norm(dim=1) / f.norm(dim=1) for x, f in zip(zs, fzs, strict=True)]
        torch.testing.assert_close(standing.latest, relative[-1], rtol=1e-5, atol=0)
        torch.testing.assert_close(standing.residual, torch.stack(relative).amin(dim=0), rtol=1e-5, atol=0)
        best = torch.stack(relative).argmin(dim=0)
        assert torch.equal(standing.best[0], torch.stack(zs)[best, torch.arange(n)])
    assert int(standing.count) == memory + 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_beyond_their_bound_give_a_plain_step(backend):
    """Residuals that grow along one direction ask for extrapolation: the more so, the less they grow."""
    (z, kept, standing), growth = start(3, 21, 3), torch.tensor([[1.3], [1.6], [2.5]], device=DEVICE)
    first = image(z)
    residual = first - z[0]
    anderson_step(z, [first], kept, standing, stop=FIXED, ridge=RIDGE, backend=backend)
    second = z[0] + growth * residual + 0.01 * image(z)
    before = copy_of(z, kept, standing)
    anderson_step(z, [second], kept, standing, stop=FIXED, ridge=RIDGE, backend=backend)
    sizes = kept.weights.abs().sum(dim=1)
    bound = float(sizes.median() + sizes.max()) / 2
    again, memory, progress = before
    anderson_step(again, [second], memory, progress, stop=FIXED, ridge=RIDGE, bound=bound, backend=backend)
    plain = sizes > bound
    assert int(plain.sum()) == 1
    assert torch.equal(again[0][~plain], z[0][~plain])
    torch.testing.assert_close(again[0][plain], second[plain], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_memory_of_sixteen(backend):
    z, kept, standing = start(1, 40, 16)
    zs, fzs = [], []
    for _ in range(3):
        fz = image(z)
        zs.append(z[0].clone())
        fzs.append(fz)
        anderson_step(z, [fz], kept, standing, stop=FIXED, ridge=RIDGE, backend=backend)
    torch.testing.assert_close(z[0].double().cpu(), dense_proposal(zs, fzs, 16, 1.0, RIDGE)[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(kept.weights[:, 3:], torch.zeros_like(kept.weights[:, 3:]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("whole", [False, True])
def test_half_precision_rounds_what_is_stored_and_nothing_else(backend, half, whole):
    """Images and rings in half precision, with `whole` the iterates too; sums stay in float32."""
    z, kept, standing = start(2, 21, 3, half if whole else torch.float32, image_dtype=half, residual_dtype=half)
    zs, fzs = [], []
    for k in range(4):
        fz = image(z, half)
        g = fz.float() - z[0].float()
        anderson_step(z, [fz], kept, standing, stop=FIXED, ridge=RIDGE, backend=backend)
        stored = kept.residuals[0][:, k % 3].float()
        # One unit, not half of one: the interpreter truncates where a GPU rounds.
        torch.testing.assert_close(stored, g, rtol=torch.finfo(half).eps, atol=0)
        zs.append(fz.float() - stored)
        fzs.append(fz.float())
        expected = dense_proposal(zs, fzs, 3, 1.0, RIDGE)[0]
        tolerance = 4 * torch.finfo(half).eps if whole else 1e-4
        torch.testing.assert_close(z[0].double().cpu(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(standing.latest, g.norm(dim=1) / fz.float().norm(dim=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaves_are_one_state(backend):
    whole = start(2, 11, 2)
    leaves = [x.contiguous() for x in whole[0][0].split((4, 7), dim=1)]
    parts = (leaves, AndersonMemory.empty(leaves, 2), Standing.start(leaves))
    for _ in range(3):
        fz = image(whole[0])
        for state, images in ((whole, [fz]), (parts, list(fz.split((4, 7), dim=1)))):
            anderson_step(state[0], images, state[1], state[2], stop=FIXED, mixing=0.5, backend=backend)
        torch.testing.assert_close(torch.cat(parts[0], dim=1), whole[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(parts[2].residual, whole[2].residual, rtol=1e-6, atol=0)
    assert int(parts[2].count) == 3


@pytest.mark.parametrize("stop", [FIXED, eq.Stop(rtol=0.3)])
def test_many_leaves_of_odd_sizes(small_blocks, stop):
    """Five leaves of one to three blocks, images in bfloat16 and kept so; kernel against twin, past the ring's end."""
    kernel = [torch.randn(2, size, device=DEVICE) for size in (5, 16, 33, 1, 17)]
    twin = [leaf.clone() for leaf in kernel]
    kept = [AndersonMemory.empty(z, 2, image_dtype=torch.bfloat16) for z in (kernel, twin)]
    standings = [Standing.start(z) for z in (kernel, twin)]
    scales = torch.tensor([1.0, 0.2], device=DEVICE)[:, None]
    for k in range(3):
        fz = [(leaf + torch.randn_like(leaf) * scales**k).bfloat16() for leaf in twin]
        for z, memory, standing, backend in zip((kernel, twin), kept, standings, ("triton", "naive"), strict=True):
            anderson_step(z, fz, memory, standing, stop=stop, ridge=RIDGE, mixing=0.9, backend=backend)
        assert torch.equal(standings[0].status, standings[1].status)
        torch.testing.assert_close(standings[0].residual, standings[1].residual, rtol=1e-5, atol=0)
        torch.testing.assert_close(kept[0].weights, kept[1].weights, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(kernel, twin, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for leaf, source in zip(kernel, twin, strict=True):
            leaf.copy_(source)  # so that rounding does not add up
    assert not standings[0].arrived.any()
    assert stop.fixed_budget or (standings[0].status >= 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mixing", [1.0, 0.7])
def test_two_buffers_in_turns_are_as_good_as_one(small_blocks, backend, mixing):
    """Residuals that fall and rise: the same iterates, and after settling the same best ones."""
    z, kept, standing = start(3, 21, 2)
    twin, memory, progress = copy_of(z, kept, standing)
    here, there = twin, [torch.full_like(twin[0], torch.nan)]
    scales = torch.tensor([[1.0, 0.3, 0.9, 0.1, 0.5], [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 0.5, 0.4, 0.3, 0.2]])
    for k in range(5):
        fz = z[0] + scales[:, k : k + 1].to(DEVICE) * image(z)
        if k == 3:
            fz[2, 0] = torch.nan
        before = here[0].clone()
        anderson_step(z, [fz], kept, standing, stop=FIXED, mixing=mixing, backend=backend)
        anderson_step(here, [fz], memory, progress, stop=FIXED, mixing=mixing, out=there, backend=backend)
        torch.testing.assert_close(here[0], before, rtol=0, atol=0, equal_nan=True)
        here, there = there, here
        torch.testing.assert_close(here[0], z[0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(progress.residual, standing.residual, rtol=0, atol=0)
    picard_settle(there, there, progress, backend=backend)
    assert torch.equal(progress.best[0], standing.best[0])
    assert not progress.owed.any()


def test_kernel_takes_rings_of_either_layout():
    z, slot_major, standing = start(2, 5, 2)
    row_major = dataclasses.replace(
        slot_major,
        images=[x.contiguous() for x in slot_major.images],
        residuals=[x.contiguous() for x in slot_major.residuals],
        gram=slot_major.gram.clone(),
        weights=slot_major.weights.clone(),
    )
    assert slot_major.images[0].stride() != row_major.images[0].stride()
    other = copy_of(z, slot_major, standing)
    for _ in range(3):
        fz = image(z)
        anderson_step(z, [fz], slot_major, standing, stop=FIXED, backend="triton")
        anderson_step(other[0], [fz], row_major, other[2], stop=FIXED, backend="triton")
    assert torch.equal(z[0], other[0][0])


# Rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ended", [(0, 1, 2), (1,)])
def test_ended_systems_are_not_touched(backend, ended):
    """And what the others do does not depend on them."""
    z, kept, standing = start(3, 6, 2)
    stop = eq.Stop(rtol=1e-9)
    anderson_step(z, [image(z)], kept, standing, stop=stop, backend=backend)
    free = copy_of(z, kept, standing)
    rows = list(ended)
    standing.status[rows] = int(eq.Status.CONVERGED)
    before = snapshot(z, kept, standing)
    fz = image(z)
    anderson_step(z, [fz], kept, standing, stop=stop, backend=backend)
    anderson_step(free[0], [fz], free[1], free[2], stop=stop, backend=backend)
    running = [row for row in range(3) if row not in ended]
    for old, new, reference in zip(before, snapshot(z, kept, standing), snapshot(*free), strict=True):
        assert torch.equal(torch.nan_to_num(old[rows]), torch.nan_to_num(new[rows]))
        assert torch.equal(torch.nan_to_num(new[running]), torch.nan_to_num(reference[running]))
    assert int(standing.count) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_nan_is_refused_and_disturbs_no_other(backend):
    z, kept, standing = start(2, 6, 2)
    stop = eq.Stop(rtol=1e-9)
    anderson_step(z, [image(z)], kept, standing, stop=stop, backend=backend)
    best = standing.best[0].clone()
    clean = copy_of(z, kept, standing)
    fz = image(z)
    bad = fz.clone()
    bad[0, 3] = torch.nan
    anderson_step(z, [bad], kept, standing, stop=stop, backend=backend)
    anderson_step(clean[0], [fz], clean[1], clean[2], stop=stop, backend=backend)
    assert standing.status.tolist() == [int(eq.Status.NONFINITE), -1]
    assert standing.steps.tolist() == [1, 0]
    assert torch.equal(z[0][0], best[0])
    assert torch.equal(standing.best[0][0], best[0])
    assert torch.equal(z[0][1], clean[0][0][1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_root_is_recognised_and_a_zero_residual_gives_a_plain_step(backend):
    z, kept, standing = start(2, 6, 2)
    root = z[0][0].clone()
    fz = image(z)
    fz[0] = root
    fixed = copy_of(z, kept, standing)
    anderson_step(z, [fz], kept, standing, stop=eq.Stop(rtol=1e-6), backend=backend)
    assert standing.status.tolist() == [int(eq.Status.CONVERGED), -1]
    assert torch.equal(z[0][0], root)
    assert torch.equal(standing.best[0][0], root)
    anderson_step(fixed[0], [fz], fixed[1], fixed[2], stop=FIXED, backend=backend)
    assert torch.equal(fixed[0][0], fz)
    assert fixed[2].residual[0] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_parallel_residuals_stay_harmless(backend):
    """Three residuals that differ in the last digits: weights sum to one, and the proposal's residual is no larger."""
    z, kept, standing = start(2, 12, 3)
    g = torch.randn_like(z[0])
    for k in range(3):
        pushed = g * (1 + 1e-7 * k)
        anderson_step(z, [z[0] + pushed], kept, standing, stop=FIXED, backend=backend)
    alpha = kept.weights
    torch.testing.assert_close(alpha.sum(dim=1), torch.ones(2, device=DEVICE), rtol=1e-5, atol=0)
    combined = (alpha[:, :, None] * kept.residuals[0]).sum(dim=1)
    assert (combined.norm(dim=1) <= g.norm(dim=1) * (1 + 1e-4)).all()
    assert torch.isfinite(z[0]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_systems(backend):
    z, kept, standing = start(0, 4, 3)
    anderson_step(z, [image(z)], kept, standing, stop=eq.Stop(), backend=backend)
    assert z[0].shape == (0, 4)
    assert int(standing.count) == 1


# The rules


@pytest.mark.parametrize("name", SCRIPTS)
def test_kernel_and_twin_judge_alike(name):
    """Residuals of scripted sizes; the second system sees the first one's script in half the size."""
    stop, sizes = SCRIPTS[name]
    kernel = start(2, 3, 1)
    twin = copy_of(*kernel)
    direction, first = torch.randn(2, 3, device=DEVICE), kernel[0][0].clone()
    for size in sizes:
        for state, backend in ((kernel, "triton"), (twin, "naive")):
            fz = state[0][0] + direction * (size * torch.tensor([[1.0], [0.5]], device=DEVICE))
            anderson_step(state[0], [fz], state[1], state[2], stop=stop, floor=2e-6, backend=backend)
        assert_same_standing(kernel[2], twin[2])
        torch.testing.assert_close(kernel[0], twin[0], rtol=1e-6, atol=1e-7, equal_nan=True)
        for z, _, standing in (kernel, twin):  # else steps would add up, and change what residuals are relative to
            z[0].copy_(torch.where((standing.status < 0)[:, None], first, z[0]))
    if name != "fixed":
        assert (kernel[2].status >= 0).any()


# The driver


def iterate(f, z, solver, stop, steps, backend):
    z = [z.clone()]
    kept, standing = AndersonMemory.empty(z, solver.memory), Standing.start(z)
    for _ in range(steps):
        options = {"ridge": solver.ridge, "mixing": solver.mixing, "bound": solver.bound}
        options["floor"] = precision_floor(z[0].dtype)
        anderson_step(z, [f(z[0])], kept, standing, stop=stop, backend=backend, **options)
    return z[0], standing


@pytest.mark.parametrize(
    ("solver", "stop"),
    [
        (eq.Anderson(memory=4), eq.Stop(rtol=0, max_steps=20)),
        (eq.Anderson(memory=4, mixing=0.5), eq.Stop(rtol=1e-8, max_steps=40)),
        (eq.Anderson(memory=3), eq.Stop(rtol=1e-6, max_steps=40, select="last")),
        (eq.Anderson(memory=2), eq.Stop(rtol=1e-18, max_steps=60, plateau=4)),
        (eq.Anderson(memory=2, ridge=0.1), eq.Stop(rtol=1e-8, max_steps=9)),
        (eq.Anderson(memory=4, bound=1.5), eq.Stop(rtol=1e-8, max_steps=40)),
    ],
)
def test_twin_equals_the_driver(solver, stop):
    """In float64: values to 1e-9, status and step counts exactly."""
    f, z0 = contraction(4, 7, torch.float64, DEVICE, 0.8), torch.zeros(4, 7, dtype=torch.float64, device=DEVICE)
    solution = eq.fixed_point(f, z0, solver=solver, stop=stop)
    z, standing = iterate(f, z0, solver, stop, stop.max_steps, "naive")
    value = z if stop.select == "last" else standing.best[0]
    torch.testing.assert_close(value, solution.value, rtol=1e-9, atol=1e-9)
    if not stop.fixed_budget:
        status = torch.where(standing.status < 0, int(eq.Status.MAX_STEPS), standing.status)
        steps = torch.where(standing.status < 0, stop.max_steps, standing.steps)
        assert torch.equal(status.long(), solution.stats.status.long())
        assert torch.equal(steps.long(), solution.stats.steps)


def test_twenty_steps_of_the_kernel_equal_the_driver():
    """In float32: every iterate to 1e-5, though rounding differs; then the same root, status and (±1) step count."""
    f, z0 = contraction(1, 7, torch.float32, DEVICE, 0.8), torch.zeros(1, 7, device=DEVICE)
    solver = eq.Anderson(memory=3)
    driver = eq.fixed_point(f, z0, solver=solver, stop=eq.Stop(rtol=0, max_steps=20), collect="iterates")
    z = [z0.clone()]
    kept, standing = AndersonMemory.empty(z, 3), Standing.start(z)
    for expected in driver.collected["iterates"][1:]:
        anderson_step(z, [f(z[0])], kept, standing, stop=FIXED, ridge=solver.ridge, backend="triton")
        torch.testing.assert_close(z[0], expected, rtol=0, atol=1e-5)
    assert int(standing.count) == 20
    assert standing.residual <= 1e-6


def test_kernel_ends_where_the_driver_does():
    f, z0 = contraction(2, 7, torch.float32, DEVICE, 0.8), torch.zeros(2, 7, device=DEVICE)
    solver, stop = eq.Anderson(memory=3), eq.Stop(rtol=1e-3, max_steps=12)
    solution = eq.fixed_point(f, z0, solver=solver, stop=stop)
    _, standing = iterate(f, z0, solver, stop, int(solution.stats.steps.max()) + 2, "triton")
    torch.testing.assert_close(standing.best[0], solution.value, rtol=0, atol=1e-5)
    assert torch.equal(standing.status.long(), solution.stats.status)
    assert torch.equal(standing.steps.long(), solution.stats.steps)


def test_restart_begins_anew():
    f, z0 = contraction(2, 7, torch.float64, DEVICE, 0.8), torch.zeros(2, 7, dtype=torch.float64, device=DEVICE)
    z = [z0.clone()]
    kept, standing = AndersonMemory.empty(z, 3), Standing.start(z)
    results = []
    for _ in range(2):
        z[0].copy_(z0)
        standing.restart(z)
        for _ in range(6):
            anderson_step(z, [f(z[0])], kept, standing, stop=FIXED)
        results.append(snapshot(z, kept, standing))
    assert same(*results)


# Errors


def test_errors_say_what_to_do():
    z, kept, standing = start(1, 3, 2)
    with pytest.raises(ValueError, match="unknown backend 'trition'; did you mean 'triton'"):
        anderson_step(z, [image(z)], kept, standing, stop=FIXED, backend="trition")
    with pytest.raises(ValueError, match="mixing must be a number"):
        anderson_step(z, [image(z)], kept, standing, stop=FIXED, mixing=0.0)
    with pytest.raises(ValueError, match="out is for fixed budgets"):
        anderson_step(z, [image(z)], kept, standing, stop=eq.Stop(), out=[torch.empty_like(z[0])])
    wide = start(1, 3, 2, torch.float64)
    with pytest.raises(ValueError, match="kernels take float32, float16 and bfloat16"):
        anderson_step(wide[0], [image(wide[0])], wide[1], wide[2], stop=FIXED, backend="triton")
    long = start(1, 3, 17)
    with pytest.raises(ValueError, match="memory of at most 16, got 17"):
        anderson_step(long[0], [image(long[0])], long[1], long[2], stop=FIXED, backend="triton")
