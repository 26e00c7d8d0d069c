"""`broyden_step` and `low_rank_apply`, kernel and twin, against the dense method in float64, and against the driver."""

import pytest
import torch

import equipoise as eq
from equipoise._problem import Problem, StateSpec
from equipoise.ops import BroydenMemory, Standing, broyden_step, low_rank_apply
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter

DEVICE = kernel_device()
pytestmark = quiet_interpreter

FIXED = eq.Stop(rtol=0, max_steps=100)


def problem(n, d, dtype):
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(d, d, generator=generator, dtype=torch.float64)
    w *= 0.9 / torch.linalg.matrix_norm(w, 2)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return w, x, lambda z: torch.tanh(z.double().cpu() @ w.T + x).to(DEVICE, dtype)


class Dense:
    """Broyden's good method with a dense H per system, in float64."""

    def __init__(self, n, d, share):
        self.h = -torch.eye(d, dtype=torch.float64).repeat(n, 1, 1)
        self.share, self.last = share, None

    def propose(self, z, g):
        if self.last is not None:
            s, y = z - self.last[0], g - self.last[1]
            left = torch.einsum("ni,nij->nj", s, self.h)
            pivot = (left * y).sum(dim=1)
            u = s - torch.einsum("nij,nj->ni", self.h, y)
            self.h = self.h + u[:, :, None] * (left / pivot[:, None])[:, None]
        self.last = (z, g)
        return z - self.share * torch.einsum("nij,nj->ni", self.h, g)


def start(z, memory):
    z = [z.clone()]
    kept = BroydenMemory.empty(z, memory)
    for storage in (*kept.steps, *kept.point):
        storage.fill_(torch.nan)  # what was never written may hold anything
    return z, kept, Standing.start(z)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks per system and several groups of slots at test sizes."""
    from equipoise.ops.broyden import triton as kernels

    monkeypatch.setattr(kernels, "BLOCK", 8)
    monkeypatch.setattr(kernels, "SLOTS", 2)
    monkeypatch.setattr(kernels, "MOST_CHUNK", 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "d", "share"), [(2, 11, 1.0), (1, 18, 0.7)])
def test_follows_the_dense_method(small_blocks, backend, n, d, share):
    """float32 against float64: iterates to 1e-4, after 6 steps of a method that amplifies rounding."""
    _, _, f = problem(n, d, torch.float32)
    z, kept, standing = start(torch.zeros(n, d, device=DEVICE), 6)
    dense = Dense(n, d, share)
    for k in range(6):
        fz = f(z[0])
        before = z[0].clone()
        expected = dense.propose(before.double().cpu(), (fz - before).double().cpu())
        broyden_step(z, [fz], kept, standing, stop=FIXED, step=share, backend=backend)
        torch.testing.assert_close(z[0].double().cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(standing.latest, (fz - before).norm(dim=1) / fz.norm(dim=1), rtol=1e-5, atol=0)
        assert torch.equal(kept.point[0], before)
        assert int(standing.count) == k + 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_starts_anew_when_the_memory_is_full(backend):
    """memory 2: two steps are stored, then H is −I again; the second cycle must not see the first one's M."""
    _, _, f = problem(1, 5, torch.float32)
    z, kept, standing = start(torch.zeros(1, 5, device=DEVICE), 2)
    for k in range(6):
        if k % 3 == 0:
            dense = Dense(1, 5, 0.8)
        fz = f(z[0])
        expected = dense.propose(z[0].double().cpu(), (fz - z[0]).double().cpu())
        broyden_step(z, [fz], kept, standing, stop=FIXED, step=0.8, backend=backend)
        torch.testing.assert_close(z[0].double().cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_images_in_half_precision(backend, half):
    """The image is read as it is; everything else stays in float32."""
    _, _, f = problem(1, 7, half)
    z, kept, standing = start(torch.zeros(1, 7, device=DEVICE), 4)
    dense = Dense(1, 7, 1.0)
    for _ in range(3):
        fz = f(z[0])
        expected = dense.propose(z[0].double().cpu(), (fz.float() - z[0]).double().cpu())
        broyden_step(z, [fz], kept, standing, stop=FIXED, backend=backend)
        torch.testing.assert_close(z[0].double().cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_step_is_no_ground_for_an_update(backend):
    """An iterate that did not move leaves H alone: the next step is that of H as it was."""
    z, kept, standing = start(torch.randn(1, 5, device=DEVICE), 4)
    g = torch.randn(1, 5, device=DEVICE)
    broyden_step(z, [z[0] + g], kept, standing, stop=FIXED, backend=backend)
    z[0].copy_(kept.point[0])  # s = 0
    before = z[0].clone()
    broyden_step(z, [z[0] + 2 * g], kept, standing, stop=FIXED, backend=backend)
    torch.testing.assert_close(z[0], before + 2 * g)
    assert torch.equal(kept.small, torch.zeros_like(kept.small))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ended_systems_are_not_touched_and_nan_is_refused(backend):
    _, _, f = problem(3, 5, torch.float32)
    stop = eq.Stop(rtol=1e-9)
    z, kept, standing = start(torch.zeros(3, 5, device=DEVICE), 4)
    free, free_kept, free_standing = start(torch.zeros(3, 5, device=DEVICE), 4)
    broyden_step(z, [f(z[0])], kept, standing, stop=stop, backend=backend)
    broyden_step(free, [f(free[0])], free_kept, free_standing, stop=stop, backend=backend)
    standing.status[0] = int(eq.Status.PLATEAU)
    tensors = (z[0], kept.steps[0], kept.small, kept.point[0], standing.best[0], standing.residual, standing.stalled)
    before = [tensor[0].clone() for tensor in tensors]
    fz = f(z[0])
    bad = fz.clone()
    bad[1, 2] = torch.inf
    broyden_step(z, [bad], kept, standing, stop=stop, backend=backend)
    broyden_step(free, [fz], free_kept, free_standing, stop=stop, backend=backend)
    for old, tensor in zip(before, tensors, strict=True):
        assert torch.equal(torch.nan_to_num(old), torch.nan_to_num(tensor[0]))
    assert standing.status.tolist() == [int(eq.Status.PLATEAU), int(eq.Status.NONFINITE), -1]
    assert torch.equal(z[0][1], torch.zeros(5, device=DEVICE))
    assert torch.equal(z[0][2], free[0][2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "d"), [(0, 4), (2, 1)])
def test_edges(backend, n, d):
    z, kept, standing = start(torch.zeros(n, d, device=DEVICE), 1)
    for _ in range(2):
        broyden_step(z, [0.5 * z[0] + 1], kept, standing, stop=FIXED, backend=backend)
    assert int(standing.count) == 2
    # One secant step solves an affine equation in one unknown.
    torch.testing.assert_close(z[0], torch.full((n, d), 2.0, device=DEVICE))


@pytest.mark.parametrize(
    ("solver", "stop"),
    [
        (eq.Broyden(), eq.Stop(rtol=0, max_steps=12)),
        (eq.Broyden(memory=4), eq.Stop(rtol=1e-8, max_steps=40)),
        (eq.Broyden(memory=5, step=0.8), eq.Stop(rtol=1e-8, max_steps=60)),
        (eq.Broyden(), eq.Stop(rtol=1e-6, max_steps=40, select="last")),
    ],
)
def test_twin_equals_the_driver(solver, stop):
    """In float64: values to 1e-9, status and step counts exactly."""
    w, x, _ = problem(4, 7, torch.float64)
    w, x = w.to(DEVICE), x.to(DEVICE)
    z0 = torch.zeros(4, 7, dtype=torch.float64, device=DEVICE)
    solution = eq.fixed_point(lambda z: torch.tanh(z @ w.T + x), z0, solver=solver, stop=stop)
    z, kept, standing = start(z0, solver.memory or stop.max_steps)
    for _ in range(stop.max_steps):
        broyden_step(z, [torch.tanh(z[0] @ w.T + x)], kept, standing, stop=stop, step=solver.step, backend="naive")
    value = z[0] if stop.select == "last" else standing.best[0]
    torch.testing.assert_close(value, solution.value, rtol=1e-9, atol=1e-9)
    if not stop.fixed_budget:
        assert torch.equal(standing.status.long(), solution.stats.status)
        assert torch.equal(standing.steps.long(), solution.stats.steps)


def test_kernel_equals_the_driver():
    """In float32, memory 4 with restarts: every iterate to 1e-5."""
    w, x, _ = problem(1, 6, torch.float32)
    w, x = w.to(DEVICE, torch.float32), x.to(DEVICE, torch.float32)
    z0 = torch.zeros(1, 6, device=DEVICE)
    stop = eq.Stop(rtol=0, max_steps=8)
    driver = eq.fixed_point(
        lambda z: torch.tanh(z @ w.T + x), z0, solver=eq.Broyden(memory=4), stop=stop, collect="iterates"
    )
    z, kept, standing = start(z0, 4)
    for expected in driver.collected["iterates"][1:]:
        broyden_step(z, [torch.tanh(z[0] @ w.T + x)], kept, standing, stop=stop, backend="triton")
        torch.testing.assert_close(z[0], expected, rtol=0, atol=1e-5)


SIZES = [(5, 17), (1, 9, 3, 8, 2)]  # more leaves than there are in one launch, too


def leaves_of(sizes, dtype=torch.float32):
    """Leaves, storage full of NaN, and a contraction that couples the leaves."""
    total = sum(sizes)
    w, x, _ = problem(2, total, torch.float32)

    def f(z):
        whole = torch.tanh(torch.cat([leaf.double().cpu() for leaf in z], dim=1) @ w.T + x)
        return [part.contiguous().to(DEVICE, dtype) for part in whole.split(list(sizes), dim=1)]

    z = [torch.zeros(2, size, device=DEVICE) for size in sizes]
    kept = BroydenMemory.empty(z, 3)
    for storage in (*kept.steps, *kept.point):
        storage.fill_(torch.nan)
    return z, kept, Standing.start(z), f


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.8), (torch.bfloat16, 1.0)])
@pytest.mark.parametrize("sizes", SIZES, ids=len)
def test_leaves_of_odd_sizes(small_blocks, sizes, dtype, share):
    """Kernel and twin step by step, through a restart; each begins where the twin ended, so rounding stays small."""
    z, kept, standing, f = leaves_of(sizes, dtype)
    twin, twin_kept, twin_standing, _ = leaves_of(sizes, dtype)
    stop = eq.Stop(rtol=3e-2, max_steps=100)
    for k in range(6):
        fz = f(twin)
        broyden_step(z, fz, kept, standing, stop=stop, step=share, backend="triton")
        broyden_step(twin, fz, twin_kept, twin_standing, stop=stop, step=share, backend="naive")
        for ours, theirs in zip((*z, *kept.point), (*twin, *twin_kept.point), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            ours.copy_(theirs)
        assert torch.equal(standing.status, twin_standing.status)
        torch.testing.assert_close(standing.residual, twin_standing.residual, rtol=1e-4, atol=0)
        assert not standing.arrived.any()
        assert int(standing.count) == k + 1
    assert (standing.status >= 0).any()


@pytest.mark.parametrize(("sizes", "share"), [((5, 17), 1.0), ((5, 17), 0.8)])
def test_the_small_matrix_may_have_a_kernel_of_its_own(small_blocks, monkeypatch, sizes, share):
    """Which of them updates M makes no difference to a single bit."""
    from equipoise.ops.broyden import triton as kernels

    found = []
    for most in (32, 1):
        monkeypatch.setattr(kernels, "MOST_ASIDE", most)
        z, kept, standing, f = leaves_of(sizes)
        for _ in range(4):
            broyden_step(z, f(z), kept, standing, stop=eq.Stop(rtol=5e-2), step=share, backend="triton")
        found.append([*z, *kept.point, kept.small, *standing.best, standing.status, standing.residual, standing.steps])
    assert all(map(torch.equal, *found))


# The operator on its own


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "d", "slots", "filled"), [(2, 19, 5, 3), (1, 3, 1, 0)])
def test_low_rank_apply_is_the_dense_product(small_blocks, backend, transposed, n, d, slots, filled):
    steps, small = torch.randn(n, slots, d), torch.randn(n, slots + 1, slots + 1)
    steps[:, filled:] = torch.nan  # slots not in use may hold anything
    x = [torch.randn(n, d)]
    s, m = steps[:, :filled].double(), small[:, :filled, :filled].double()
    dense = -torch.eye(d, dtype=torch.float64) - s.mT @ m @ s
    expected = torch.einsum("nji,nj->ni" if transposed else "nij,nj->ni", dense, x[0].double())
    for count in (filled, torch.tensor(filled, dtype=torch.int32, device=DEVICE)):
        found = low_rank_apply(
            [x[0].to(DEVICE)], [steps.to(DEVICE)], small.to(DEVICE), count, transposed=transposed, backend=backend
        )
        torch.testing.assert_close(found[0].double().cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_low_rank_apply_is_the_operator_of_the_solver(share):
    """Of the state that `Broyden` itself builds, and of the step's own memory."""
    _, _, f = problem(2, 9, torch.float64)
    z0 = torch.zeros(2, 9, dtype=torch.float64, device=DEVICE)
    z, kept, standing = start(z0, 6)
    for _ in range(6):
        broyden_step(z, [f(z[0])], kept, standing, stop=FIXED, step=share, backend="naive")
    solver, stop = eq.Broyden(step=share), eq.Stop(rtol=0, max_steps=6)
    outcome = solver.run(Problem(f, StateSpec.of(z0)), [z0], stop, keep_state=True)
    probe = [torch.randn(2, 9, dtype=torch.float64, device=DEVICE)]
    ours = low_rank_apply(probe, kept.steps, kept.small, len(outcome.state.steps), backend="naive")
    torch.testing.assert_close(ours[0], outcome.state.apply(probe)[0], rtol=1e-8, atol=1e-8)


def test_errors_say_what_to_do():
    z, kept, standing = start(torch.zeros(1, 3, device=DEVICE), 128)
    with pytest.raises(ValueError, match="memory of at most 127, got 128"):
        broyden_step(z, [z[0] + 1], kept, standing, stop=FIXED, backend="triton")
    with pytest.raises(ValueError, match="step must be a number"):
        broyden_step(z, [z[0] + 1], kept, standing, stop=FIXED, step=0.0)
