"""Solves that are launched before the cell is looked at, solves in two graphs, and Broyden's steps for all leaves."""

import copy

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.ops import BroydenMemory, Standing, broyden_step
from tests.captured import recordings_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SOLVERS = [eq.Picard(), eq.Picard(0.7), eq.Anderson(), eq.Broyden(), eq.Broyden(memory=5, step=0.8)]
FIXED = eq.Stop(rtol=0, max_steps=10)


class Leaves(nn.Module):
    """Three leaves that see each other; weight norm, and dropout in every evaluation if asked for."""

    def __init__(self, sizes=(40, 17, 300), dropout=0.0):
        super().__init__()
        self.sizes, self.dropout = sizes, dropout
        self.mix = eq.nn.weight_norm(nn.Linear(sum(sizes), sum(sizes)))

    def initial_state(self, x):
        return tuple(x.new_zeros(x.shape[0], size, dtype=torch.float32) for size in self.sizes)

    def forward(self, z, x):
        whole = nn.functional.dropout(torch.cat(z, dim=1), self.dropout, self.training)
        return torch.tanh(0.4 * self.mix(whole) + x).float().split(self.sizes, dim=1)


def deq_of(cell, solver=eq.Picard(), stop=FIXED):
    return eq.DEQ(cell, solver=solver, stop=stop, engine="captured").cuda().eval()


def inputs_of(seed=0):
    return torch.randn(9, 357, generator=torch.Generator().manual_seed(seed)).cuda()


def relative(ours, theirs):
    a, b = (torch.cat([leaf.double() for leaf in value], dim=1) for value in (ours, theirs))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("steps", [3, 4, 10, 32, 40])
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@torch.no_grad()
def test_solves_in_two_graphs(solver, steps):
    """The eager engine's values, and the same bits every time."""
    torch.manual_seed(0)
    deq = deq_of(Leaves(), solver, eq.Stop(rtol=0, max_steps=steps))
    eager = copy.deepcopy(deq)
    eager.engine = "eager"
    for seed in range(3):
        x = inputs_of(seed)
        found, again = deq(x), deq(x)
        expected = eager(x)
        assert relative(found.value, expected.value) < 1e-3
        assert all(map(torch.equal, found.value, again.value))
        assert torch.equal(found.stats.steps, expected.stats.steps)
        deq.cell.mix.weight_g.mul_(0.9)
        eager.cell.mix.weight_g.mul_(0.9)
    assert not deq.capture.fallbacks
    assert deq.capture.recorded == 1
    loop = recordings_of(deq)[0].forward.loop
    assert len(loop.sequence) == (2 if steps >= 4 else 1)


@torch.no_grad()
def test_half_precision_in_two_graphs():
    """Casts of the normalised weights are made by the first graph; the second one uses them."""
    torch.manual_seed(0)
    deq = deq_of(Leaves())
    eager = copy.deepcopy(deq)
    eager.engine = "eager"
    for seed in range(4):
        with torch.autocast("cuda", torch.bfloat16):
            ours, theirs = deq(inputs_of(seed)).value, eager(inputs_of(seed)).value
        assert relative(ours, theirs) < 2e-2
        for model in (deq, eager):
            model.cell.mix.weight_v.add_(0.01)
    assert deq.capture.recorded == 1


CHANGES = {
    "replaced storage": lambda cell: setattr(cell.mix.weight_v, "data", cell.mix.weight_v.data * 0.5 + 0.01),
    "another parameter": lambda cell: setattr(cell.mix, "bias", nn.Parameter(cell.mix.bias.detach() + 1)),
    "another module": lambda cell: setattr(cell, "mix", eq.nn.weight_norm(nn.Linear(357, 357)).cuda()),
    "another mode": lambda cell: cell.train(),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_changed_is_seen_after_the_launch(change):
    """Memory that was let go is written over at once: the replay in vain must not have relied on it."""
    torch.manual_seed(0)
    deq, x = deq_of(Leaves()), inputs_of()
    for _ in range(2):
        deq(x)
    assert recordings_of(deq)[0].may_run_in_vain
    CHANGES[change](deq.cell)
    torch.cuda.empty_cache()
    rubbish = [torch.full((357, 357), torch.nan, device="cuda") for _ in range(8)]
    for _ in range(3):
        found = deq(x).value
        deq.engine = "eager"
        expected = deq(x).value
        deq.engine = "captured"
        assert relative(found, expected) < 1e-4
    assert deq.capture.replayed == 5
    assert deq.capture.recorded == 2
    assert len(rubbish) == 8


@torch.no_grad()
def test_a_cell_that_draws_is_looked_at_before():
    torch.manual_seed(0)
    deq, x = deq_of(Leaves(dropout=0.2)).train(), inputs_of()
    for _ in range(2):
        deq(x)
    assert not recordings_of(deq)[0].may_run_in_vain
    deq.eval()
    before = torch.cuda.get_rng_state()
    deq(x)
    deq(x)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert recordings_of(deq)[-1].may_run_in_vain


@pytest.mark.parametrize("share", [1.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", [3, 24, 40])
@pytest.mark.parametrize("sizes", [(24576, 6144), (1000, 37, 5, 2048, 3), (62401,)], ids=len)
def test_broyden_steps_of_several_leaves(sizes, memory, dtype, share):
    """Kernel and twin, each step from the twin's iterates, to 1e-3; two runs of the kernel to the last bit."""
    generator = torch.Generator().manual_seed(0)
    target = [torch.randn(17, size, generator=generator).cuda() for size in sizes]
    rate = [torch.rand(17, size, generator=generator).cuda() * 0.9 for size in sizes]
    stop = eq.Stop(rtol=1e-4, max_steps=30)

    def begin():
        z = [torch.zeros_like(leaf) for leaf in target]
        return z, BroydenMemory.empty(z, memory), Standing.start(z)

    runs = [begin() for _ in range(3)]
    for _ in range(9):
        twin = runs[2]
        fz = [torch.lerp(*leaves).to(dtype) for leaves in zip(twin[0], target, rate, strict=True)]
        for (z, kept, standing), backend in zip(runs, ("triton", "triton", "naive"), strict=True):
            broyden_step(z, fz, kept, standing, stop=stop, step=share, backend=backend)
        for first, second, expected in zip(runs[0][0], runs[1][0], twin[0], strict=True):
            assert torch.equal(first, second)
            torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-3)
            for place in (first, second):
                place.copy_(expected)
        for (_, kept, _), place in ((run, "point") for run in runs[:2]):
            for ours, theirs in zip(getattr(kept, place), twin[1].point, strict=True):
                ours.copy_(theirs)
        for standing in (runs[0][2], runs[1][2]):
            assert not standing.arrived.any()
            torch.testing.assert_close(standing.latest, twin[2].latest, rtol=1e-3, atol=1e-6)
