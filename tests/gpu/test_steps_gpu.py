"""Steps of plain iteration and of Anderson on states of many blocks: programs run at once, and their sums meet."""

import copy

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.ops import AndersonMemory, Standing, anderson_step, picard_follow, picard_settle, picard_step
from tests.captured import recordings_of
from tests.gpu.devices import waiting_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"two leaves": (24 * 32 * 32, 24 * 16 * 16), "odd": (4099, 1, 777, 5, 2048, 3), "one": (150 * 416,)}
STOPS = [eq.Stop(rtol=0, max_steps=100), eq.Stop(rtol=2e-2, max_steps=100)]


class Contraction:
    """z ↦ z + rate·(target − z), a rate per unknown; some systems begin close to the target."""

    def __init__(self, sizes, dtype, systems=37):
        torch.manual_seed(0)
        self.target, self.rate = ([torch.rand(systems, size).cuda() for size in sizes] for _ in range(2))
        near = torch.linspace(1e-3, 1, systems).cuda()[:, None]
        self.start = [t + near * torch.randn_like(t) for t in self.target]
        self.dtype = dtype

    def __call__(self, z):
        triples = zip(z, self.target, self.rate, strict=True)
        return [(leaf + (0.2 + 0.6 * rate) * (t - leaf)).to(self.dtype) for leaf, t, rate in triples]


def run(f, stop, steps, backend, memory=None):
    """Iterates and standing after so many steps; with a memory, Anderson's."""
    z = [leaf.clone() for leaf in f.start]
    standing = Standing.start(z)
    kept = AndersonMemory.empty(z, memory, image_dtype=f.dtype) if memory else None
    for _ in range(steps):
        if kept is None:
            picard_step(z, f(z), standing, stop=stop, floor=1e-6, backend=backend)
        else:
            anderson_step(z, f(z), kept, standing, stop=stop, floor=1e-6, backend=backend)
    return z, standing


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("stop", STOPS, ids=["fixed", "tolerance"])
@pytest.mark.parametrize("memory", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_follow_their_twins(sizes, stop, memory, dtype):
    f = Contraction(sizes, dtype)
    (ours, standing), (theirs, twin) = (run(f, stop, 7, backend, memory) for backend in ("triton", "naive"))
    assert not standing.arrived.any()
    assert int(standing.count) == 7
    # Sums are rounded differently, and a step of Anderson amplifies that.
    rtol, atol = (1e-5, 1e-6) if memory is None else (5e-2, 1e-3)
    torch.testing.assert_close(standing.residual, twin.residual, rtol=rtol, atol=atol)
    for a, b in zip((*ours, *standing.best), (*theirs, *twin.best), strict=True):
        assert float((a - b).norm() / b.norm()) < (1e-5 if memory is None else 5e-3)
    if memory is None:
        assert torch.equal(standing.status, twin.status)
        assert torch.equal(standing.steps, twin.steps)
    if not stop.fixed_budget:
        assert int((standing.status >= 0).sum()) > 0


@pytest.mark.parametrize("memory", [None, 6])
def test_results_do_not_vary(memory):
    """Whoever comes last adds up in the same order."""
    f = Contraction(SIZES["two leaves"], torch.float32, systems=128)
    first = run(f, STOPS[0], 8, "triton", memory)
    for _ in range(5):
        again = run(f, STOPS[0], 8, "triton", memory)
        assert all(torch.equal(a, b) for a, b in zip(first[0], again[0], strict=True))
        assert torch.equal(first[1].residual, again[1].residual)


class Cell(nn.Module):
    """Weight norm, spectral norm, and a result in bfloat16 under autocast."""

    def __init__(self, n=96):
        super().__init__()
        self.mix, self.bound = eq.nn.weight_norm(nn.Linear(n, n)), eq.nn.spectral_norm(nn.Linear(n, n), bound=0.4)

    def forward(self, z, x):
        return self.bound(torch.tanh(0.5 * self.mix(z) + x))


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()])
@pytest.mark.parametrize("stop", [eq.Stop(rtol=0, max_steps=10), eq.Stop(rtol=3e-2, max_steps=40)])
def test_weights_are_computed_and_images_read_within_the_graph(solver, stop):
    """Parameters change between solves; replays wait for nothing if the budget is fixed."""
    torch.manual_seed(0)
    deq = eq.DEQ(Cell().eval(), solver=solver, stop=stop, engine="captured").cuda()
    eager = copy.deepcopy(deq)
    eager.engine = "eager"
    for seed in range(3):
        x = torch.randn(24, 96, generator=torch.Generator().manual_seed(seed)).cuda()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            if seed and stop.fixed_budget:
                with waiting_is_an_error():
                    ours = deq(x).value
            else:
                ours = deq(x).value
            theirs = eager(x).value
            for model in (deq, eager):
                model.cell.mix.weight_g.mul_(0.8)
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
    (recording,) = recordings_of(deq)
    assert not recording.constants.modules
    if isinstance(solver, eq.Anderson):
        assert recording.forward.loop.buffers.memory.images[0].dtype == torch.bfloat16
    assert not deq.capture.fallbacks


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_following_copies_the_best_iterates(sizes):
    """Residuals fall and rise, at other steps for every system; kernels, their twins and the truth."""
    torch.manual_seed(0)
    systems, steps = 37, 9
    iterates = [[torch.randn(systems, size).cuda() for size in sizes]]
    for _ in range(steps):
        scale = torch.rand(systems, 1).cuda()
        iterates.append([leaf + scale * torch.randn_like(leaf) for leaf in iterates[-1]])
    found = []
    for backend in ("triton", "naive"):
        standing = Standing.start([torch.zeros_like(leaf) for leaf in iterates[0]])
        for k in range(steps):
            older = iterates[max(0, k - 2)]
            picard_follow(iterates[k], iterates[k + 1], older, standing, stop=STOPS[0], backend=backend)
        picard_settle(iterates[steps - 1], iterates[steps - 2], standing, backend=backend)
        found.append(standing)
    ours, theirs = found
    flat = torch.stack([torch.cat(z, dim=1) for z in iterates]).double()
    relative = (flat[1:] - flat[:-1]).norm(dim=2) / flat[1:].norm(dim=2)
    torch.testing.assert_close(ours.residual.double(), relative.amin(dim=0), rtol=1e-5, atol=0)
    best = flat[relative.argmin(dim=0), torch.arange(systems, device="cuda")]
    for standing in found:
        assert torch.equal(torch.cat(standing.best, dim=1).double(), best)
        assert int(standing.count) == steps
    assert not ours.owed.any()
    assert not ours.arrived.any()
    torch.testing.assert_close(ours.latest, theirs.latest, rtol=1e-5, atol=0)


@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("steps", [1, 7, 40])
def test_plain_iteration_of_a_fixed_budget(select, steps):
    """Also longer than a piece of a recording."""
    torch.manual_seed(0)
    stop = eq.Stop(rtol=0, max_steps=steps, select=select)
    deq = eq.DEQ(Cell().eval(), solver=eq.Picard(), stop=stop, engine="captured").cuda()
    eager = copy.deepcopy(deq)
    eager.engine = "eager"
    for seed in range(3):
        x = torch.randn(24, 96, generator=torch.Generator().manual_seed(seed)).cuda()
        with torch.no_grad():
            ours, theirs = deq(x), eager(x)
        torch.testing.assert_close(ours.value, theirs.value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.stats.residual, theirs.stats.residual, rtol=1e-2, atol=1e-6)
    assert deq.capture.replayed == 3
    assert not deq.capture.fallbacks
