"""What recordings do beside steps: weights that follow from parameters, images in half precision or left in place."""

import copy

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import _loop, _recording
from tests.captured import FIXED, Emulated, Scoped, Tanh, assert_close, deq_of, inputs_of, recordings_of

SOLVERS = [eq.Picard(0.8), eq.Anderson(memory=3), eq.Broyden()]


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(_recording, "tape_for", Emulated)


def pair_of(cell, **options):
    """The same DEQ with each engine: eager, captured."""
    deq = deq_of(cell, **options)
    eager = copy.deepcopy(deq)
    eager.engine = "eager"
    return eager, deq


class Normed(nn.Module):
    """Weight norm and spectral norm."""

    def __init__(self, n=6):
        super().__init__()
        self.mix = eq.nn.weight_norm(nn.Linear(n, n)).double()
        self.bound = eq.nn.spectral_norm(nn.Linear(n, n), bound=0.5).double()

    def forward(self, z, x):
        return torch.tanh(0.5 * self.mix(z) + self.bound(z) + x)


# Weights


def test_normalised_weights_are_part_of_the_recording(emulated, monkeypatch):
    """Replays ask no module for a weight, and see parameters that were changed in place."""
    torch.manual_seed(0)
    eager, deq = pair_of(Normed().eval(), stop=FIXED)
    with torch.no_grad():
        deq(inputs_of())
        for cls in {type(deq.cell.mix), type(deq.cell.bound)}:
            monkeypatch.setattr(cls, "begin_solve", None)  # whoever calls it fails
        found = []
        for seed in range(3):
            found.append(deq(inputs_of(seed=seed)).value)
            deq.cell.mix.weight_g.mul_(0.7)
            deq.cell.bound.weight_v.add_(0.05)
        monkeypatch.undo()
        for seed, value in enumerate(found):
            assert_close(value, eager(inputs_of(seed=seed)).value, 1e-10)
            eager.cell.mix.weight_g.mul_(0.7)
            eager.cell.bound.weight_v.add_(0.05)
    assert deq.capture.recorded == 1
    assert deq.capture.replayed == 4


def test_weights_of_a_solve_in_pieces_and_with_fewer_systems(monkeypatch):
    """Only the first piece computes them; a tolerance ends the solve, and easy systems leave it."""
    monkeypatch.setattr(_loop, "WORTH_SHRINKING", 1)
    torch.manual_seed(0)
    eager, deq = pair_of(Normed().eval(), stop=eq.Stop(rtol=1e-9, max_steps=60), solver=eq.Anderson())
    for seed in range(3):
        x = inputs_of(batch=16, seed=seed)
        x[1:] *= 6.0  # saturated: converges at once
        with torch.no_grad():
            ours, theirs = deq(x), eager(x)
            deq.cell.mix.weight_v.add_(0.1)
            eager.cell.mix.weight_v.add_(0.1)
        assert_close(ours.value, theirs.value, 1e-8)
        assert torch.equal(ours.stats.status, theirs.stats.status)
    assert recordings_of(deq)[0].forward.levels


def test_what_is_drawn_is_drawn_outside():
    """Dropout masks, and spectral norm in training mode, which improves its vectors once per solve."""
    torch.manual_seed(0)
    eager, deq = pair_of(Scoped().double(), stop=FIXED)
    for seed in range(3):
        values = []
        for model in (eager, deq):
            torch.manual_seed(seed)
            with torch.no_grad():
                values.append(model(inputs_of(seed=seed)).value)
        assert_close(values[1], values[0], 1e-10)
    assert recordings_of(deq)[0].constants.modules


def test_with_gradients_weights_keep_their_graph():
    torch.manual_seed(0)
    eager, deq = pair_of(Normed().eval(), stop=FIXED)
    for model in (eager, deq):
        model(inputs_of()).value.sum().backward()
    for ours, theirs in zip(deq.parameters(), eager.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, 1e-8)
    assert recordings_of(deq)[0].constants.modules


# Images


class Narrow(Tanh):
    """Returns bfloat16 under autocast, as layers that end in a product do; two leaves if asked."""

    def __init__(self, leaves=1):
        super().__init__(dtype=torch.float32)
        self.leaves = leaves

    def forward(self, z, x):
        if self.leaves == 1:
            return nn.functional.linear(torch.tanh(z), 0.5 * self.weight, x.mean() * self.bias) + 0.1
        a, b = z
        return nn.functional.linear(torch.tanh(b), 0.5 * self.weight) + x.to(torch.bfloat16), torch.tanh(a + x)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("grad", [False, True])
def test_images_in_half_precision_are_taken_as_they_are(solver, grad):
    eager, deq = pair_of(Narrow(), solver=solver, stop=eq.Stop(rtol=0, max_steps=9), adjoint=eq.Implicit(stop=FIXED))
    dtypes = []
    step = _loop.Method.step

    def spy(self, buffers, fz, *places):
        dtypes.extend(leaf.dtype for leaf in fz)
        step(self, buffers, fz, *places)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_loop.Method, "step", spy)
        for model in (eager, deq):
            x = inputs_of(dtype=torch.float32)
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
                solution = model(x)
            if grad:
                solution.value.sum().backward()
            found.append((solution.value.detach(), *(p.grad for p in model.parameters() if grad)))
    assert found[0][0].dtype == torch.float32
    assert_close(found[1], found[0], 1e-3 if isinstance(solver, eq.Anderson) else 1e-5)  # which rounds residuals too
    assert torch.bfloat16 in dtypes
    memory = recordings_of(deq)[0].forward.loop.buffers.memory
    if isinstance(solver, eq.Anderson):
        assert [ring.dtype for ring in memory.images] == [torch.bfloat16]
        assert [ring.dtype for ring in memory.residuals] == [torch.bfloat16]


def test_residuals_are_remembered_in_half_precision_only_where_f_is_computed_in_it():
    """In both directions; the root is the one that wide rings find, as far as f is known."""
    options = {"solver": eq.Anderson(memory=3), "stop": eq.Stop(rtol=0, max_steps=20)}
    deq = pair_of(Narrow(), adjoint=eq.Implicit(solver=eq.Anderson(), stop=FIXED), **options)[1]
    for narrow in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            solution = deq(inputs_of(dtype=torch.float32))
        solution.value.sum().backward()
    wide, narrow = recordings_of(deq)
    for recording, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        for direction in (recording.forward, recording.backward):
            assert [ring.dtype for ring in direction.loop.buffers.memory.residuals] == [dtype]
    assert solution.stats.residual.max() <= 5e-3


def test_leaves_of_different_precision():
    """One leaf comes in bfloat16, the other in float32: images are remembered in the wider one."""
    eager, deq = pair_of(Narrow(2), solver=eq.Anderson(memory=3), stop=eq.Stop(rtol=0, max_steps=9))
    z0 = (torch.zeros(5, 6), torch.zeros(5, 6))
    for seed in range(2):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            ours, theirs = (model(inputs_of(seed=seed, dtype=torch.float32), z0=z0).value for model in (deq, eager))
        assert_close(ours, theirs, 1e-5)
    memory = recordings_of(deq)[0].forward.loop.buffers.memory
    assert {ring.dtype for ring in memory.images} == {torch.float32}


# Fixed budgets: iterates are not written over at once


class Restless(nn.Module):
    """A rotation that shrinks or grows from time to time, so that the best iterate is anywhere; two leaves."""

    def forward(self, z, x):
        a, b = z
        size = (a.square().sum(dim=1) + b.square().sum(dim=1)).sqrt()[:, None]
        factor = torch.where((7 * size).sin() > 0.3 * x[:, :1], 1.3, 0.6)
        return factor * b + 0.01 * x, -factor * a


class Passing(nn.Module):
    """Returns its argument for one leaf, its input for another, and both halves of one tensor for the rest."""

    def forward(self, z, x):
        a, _, c, d = z
        halves = torch.tanh(torch.cat([c, d], dim=1) * 0.5 + 0.1)
        return a, x, halves[:, :6], halves[:, 6:]


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(memory=3), eq.Anderson(memory=1)])
@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("longest", [4, 32])
def test_best_iterates_are_found_wherever_they_are(monkeypatch, solver, select, steps, longest):
    """In pieces of four steps or in one; every system has its best iterate at another step."""
    monkeypatch.setattr(_loop, "LONGEST", longest)
    if isinstance(solver, eq.Picard):  # the twin of the other reads its count on the host
        monkeypatch.setattr(_recording, "tape_for", Emulated)
    stop = eq.Stop(rtol=0, max_steps=steps, select=select)
    eager, deq = pair_of(Restless(), stop=stop, solver=solver)
    for seed in range(2):
        x = inputs_of(batch=12, seed=seed)
        z0 = (inputs_of(batch=12, seed=seed + 5), inputs_of(batch=12, seed=seed + 9))
        with torch.no_grad():
            ours, theirs = deq(x, z0=z0), eager(x, z0=z0)
        assert_close(ours.value, theirs.value, 1e-8)
        assert_close(ours.stats.residual, theirs.stats.residual, 1e-8)
        assert torch.equal(ours.stats.status, theirs.stats.status)
        assert torch.equal(ours.stats.steps, theirs.stats.steps)
    assert deq.capture.replayed == 2


def test_a_value_that_is_not_finite_leaves_the_best_iterate(emulated):
    class Failing(nn.Module):
        def forward(self, z, x):
            return torch.where(z > 3.0, torch.nan, 0.5 * z + x)

    eager, deq = pair_of(Failing(), stop=eq.Stop(rtol=0, max_steps=9))
    x = torch.tensor([[0.5], [1.9], [torch.nan]], dtype=torch.float64)
    z0 = torch.ones_like(x)
    with torch.no_grad():
        ours, theirs = deq(x, z0=z0), eager(x, z0=z0)
    assert_close(ours.value, theirs.value, 1e-12)
    assert torch.isfinite(ours.value).all()
    assert torch.equal(ours.stats.status, theirs.stats.status)


def test_images_may_be_arguments_inputs_and_parts_of_one_tensor(emulated):
    eager, deq = pair_of(Passing(), stop=eq.Stop(rtol=0, max_steps=7))
    for seed in range(2):
        x, z0 = inputs_of(seed=seed), tuple(inputs_of(seed=seed + k) for k in range(2, 6))
        with torch.no_grad():
            assert_close(deq(x, z0=z0).value, eager(x, z0=z0).value, 1e-12)


def test_plain_adjoints_of_a_fixed_budget(emulated):
    stop = eq.Stop(rtol=0, max_steps=12)
    eager, deq = pair_of(Tanh(), stop=stop, adjoint=eq.Implicit(solver=eq.Picard(), stop=stop))
    for model in (eager, deq):
        model(inputs_of()).value.square().sum().backward()
    for ours, theirs in zip(deq.parameters(), eager.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, 1e-10)


class Mixing(nn.Module):
    """Two maps of channels, each a product over channels of the other, in whatever layout that comes out."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(0.3 * torch.randn(4, 4, generator=generator))

    def forward(self, z, x):
        a, b = z
        mixed = torch.einsum("oc,nchw->nohw", self.weight, torch.tanh(b))
        return mixed + x, torch.tanh(nn.functional.avg_pool2d(a, 1) * 0.5)


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(memory=3), eq.Broyden()])
@pytest.mark.parametrize("stop", [eq.Stop(rtol=0, max_steps=7), eq.Stop(rtol=1e-4, max_steps=40)])
def test_channels_last_leaves(solver, stop):
    eager, deq = pair_of(Mixing(), solver=solver, stop=stop)
    for seed in range(2):
        x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(seed))
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            ours, theirs = (model(x, z0=(torch.zeros_like(x), torch.zeros_like(x))) for model in (deq, eager))
        assert_close(ours.value, theirs.value, 1e-5)
        assert torch.equal(ours.stats.steps, theirs.stats.steps)
        assert all(leaf.is_contiguous(memory_format=torch.channels_last) for leaf in ours.value)
    assert deq.capture.replayed == 2
