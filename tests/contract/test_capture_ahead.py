"""Solves that are launched before the cell is looked at, copies by size, and the small piece that goes first."""

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import _capture, _loop, _recording, _tape
from tests.captured import (
    FIXED,
    SOLVERS,
    Emulated,
    Launches,
    Silent,
    Tanh,
    assert_close,
    deq_of,
    inputs_of,
    recordings_of,
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(_recording, "tape_for", Emulated)


class Plain(nn.Module):
    """Parameters and nothing else that can be written to."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6).double()
        self.scale = 1

    def forward(self, z, x):
        return torch.tanh(0.3 * self.mix(z) + x) * self.scale


class Dropping(Plain):
    """Draws in every evaluation, in training mode."""

    def forward(self, z, x):
        return super().forward(nn.functional.dropout(z, 0.2, self.training), x)


class Buffered(Plain):
    """Writes to a buffer in training mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, z, x):
        if self.training:
            self.seen += 1
        return super().forward(z, x)


CHANGES = {
    "nothing": lambda cell: None,
    "values in place": lambda cell: cell.mix.weight.data.mul_(0.5),
    "replaced storage": lambda cell: setattr(cell.mix.weight, "data", cell.mix.weight.data * 0.5),
    "another parameter": lambda cell: setattr(cell.mix, "bias", nn.Parameter(cell.mix.bias.detach() + 1)),
    "another module": lambda cell: setattr(cell, "mix", nn.Linear(6, 6).double()),
    "another number": lambda cell: setattr(cell, "scale", 0.5),
    "another mode": lambda cell: cell.eval(),
}
SAME = {"nothing", "values in place"}


def order_of(monkeypatch):
    """What is done in a solve, in this order."""
    done = []
    for owner, name in ((_recording.Recording, "solve"), (_capture._Known, "unchanged")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, f=original, n=name: (done.append(n), f(self))[1])
    return done


@pytest.mark.parametrize("change", CHANGES)
def test_a_cell_is_looked_at_after_the_launch(monkeypatch, change):
    done = order_of(monkeypatch)
    torch.manual_seed(0)
    cell, x = Plain(), inputs_of()
    deq = deq_of(cell, stop=FIXED)
    with torch.no_grad():
        deq(x)
        del done[:]
        deq(x)
        assert done == ["solve", "unchanged"]
        CHANGES[change](cell)
        deq.engine = "eager"
        expected = deq(x)
        deq.engine = "captured"
        for seen in (["solve", "unchanged"] + ["solve"] * (change not in SAME), ["solve", "unchanged"]):
            del done[:]
            found = deq(x)
            assert done == seen
            assert_close(found.value, expected.value, 1e-12)
            assert torch.equal(found.stats.status, expected.stats.status)
    assert found.stats.nfe == expected.stats.nfe
    assert deq.capture.recorded == 1 + (change not in SAME)
    assert deq.capture.replayed == 4  # a solve in vain is not one of them
    assert not deq.capture.fallbacks
    assert all(recording.lease is None for recording in recordings_of(deq))


def test_a_hook_is_seen_after_the_launch():
    cell, x = Plain(), inputs_of()
    deq = deq_of(cell, stop=FIXED)
    with torch.no_grad():
        for _ in range(2):
            expected = deq(x).value
        calls = []
        handle = cell.register_forward_hook(lambda *args: calls.append(1))
        with pytest.warns(eq.EquilibriumWarning, match="hooks, which a replay would not call"):
            assert_close(deq(x).value, expected, 1e-12)
        assert len(calls) == FIXED.max_steps
        handle.remove()
        assert_close(deq(x).value, expected, 1e-12)
    assert deq.capture.recorded == 1
    assert deq.capture.replayed == 3


@pytest.mark.parametrize("kind", [Dropping, Buffered])
def test_what_draws_or_writes_is_looked_at_before(monkeypatch, kind):
    """From training to evaluation: an evaluation in vain would move the generator, or the buffer."""
    done = order_of(monkeypatch)
    torch.manual_seed(0)
    cell, x = kind(), inputs_of()
    deq = deq_of(cell, stop=FIXED)
    with torch.no_grad():
        deq(x)
        deq(x)
        cell.eval()
        del done[:]
        before = torch.get_rng_state(), [buffer.clone() for buffer in cell.buffers()]
        deq(x)
        assert done[0] == "unchanged"
        assert torch.equal(torch.get_rng_state(), before[0])
        assert all(map(torch.equal, cell.buffers(), before[1]))


@pytest.mark.parametrize("case", ["gradients", "a tolerance"])
def test_solves_that_cannot_be_in_vain(monkeypatch, case):
    """A lease that lasts, or a host that waits and may record smaller batches."""
    done = order_of(monkeypatch)
    monkeypatch.setattr(_recording, "tape_for", Silent)
    stop = eq.Stop(rtol=1e-2, max_steps=12) if case == "a tolerance" else FIXED
    deq = deq_of(Tanh(), stop=stop, adjoint=eq.Implicit(solver=eq.Picard(), stop=FIXED))
    with torch.set_grad_enabled(case == "gradients"):
        for _ in range(2):
            del done[:]
            deq(inputs_of())
    assert done == ["unchanged", "solve"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_starts_in_any_dtype_and_layout(monkeypatch, dtype):
    """A start is taken in as it is given: half precision is widened on the way, channels may be last."""
    monkeypatch.setattr(_tape, "LARGE", 16)

    class Cell(nn.Module):
        def forward(self, z, x):
            return tuple((0.5 * torch.tanh(leaf) + x.mean()).to(leaf.dtype) for leaf in z)

    deq, x = deq_of(Cell(), stop=FIXED), inputs_of(batch=3).to(dtype)
    images = torch.randn(3, 4, 5, 2).to(dtype)
    z0 = (images, images[:, :2].contiguous(memory_format=torch.channels_last), images[:, :, 0])
    for start in (z0, tuple(leaf + 1 for leaf in z0)):
        values = []
        for engine in ("eager", "captured", "captured"):
            deq.engine = engine
            with torch.no_grad():
                values.append(deq(x, z0=start).value)
        assert_close(values[1:], [values[0]] * 2, 2e-2 if dtype == torch.bfloat16 else 1e-6)
        assert values[1][1].is_contiguous(memory_format=torch.channels_last)
    assert not deq.capture.fallbacks


# Copies


@pytest.mark.parametrize(
    ("sizes", "alone"),
    [([3, 5, 7], 0), ([3, _tape.LARGE + 1, 7], 1), ([_tape.LARGE + 1] * (_tape.MANY + 1), 0), ([_tape.AMPLE + 1], 0)],
    ids=["small", "one large", "many large", "very large"],
)
def test_large_tensors_are_copied_alone(sizes, alone):
    sources = [torch.arange(size, dtype=torch.float32) for size in sizes]
    places = [torch.zeros_like(source) for source in sources]
    with Launches() as launched:
        _tape.copy_all(places, sources)
    assert launched.names == ["copy_"] * alone + ["_foreach_copy_"] * (len(sizes) > alone)
    assert all(map(torch.equal, places, sources))


def test_copies_by_dtype():
    sources = [torch.rand(3, 4), torch.rand(4, 3).T.bfloat16(), torch.tensor([True, False]), torch.rand(2)]
    places = [torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(2, dtype=torch.bool), torch.zeros(2)]
    _tape.copy_all(places, sources)
    assert all(torch.equal(place, source.to(place.dtype)) for place, source in zip(places, sources, strict=True))


# The first piece


@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("steps", [3, 4, 5, 9])
@pytest.mark.parametrize("name", ["picard", "picard_damped", "anderson", "anderson_mixed", "broyden"])
def test_a_small_piece_goes_first_and_changes_nothing(monkeypatch, name, steps, select):
    """The same bits as in one piece; forward, and in the adjoint."""
    monkeypatch.setattr(_recording, "tape_for", _tape.Reruns)  # twins of some steps read on the host
    stop, found = eq.Stop(rtol=0, max_steps=steps, select=select), []
    for first in (_loop.FIRST, 100):
        monkeypatch.setattr(_loop, "FIRST", first)
        deq = deq_of(Tanh(), SOLVERS[name], stop, eq.Implicit(solver=SOLVERS[name], stop=eq.Stop(rtol=0, max_steps=6)))
        for seed in range(2):
            x = inputs_of(seed=seed).requires_grad_()
            solution = deq(x)
            grads = torch.autograd.grad(solution.value.sin().sum(), [x, *deq.parameters()])
            found.append([solution.value, solution.stats.residual, solution.stats.status, *grads])
        assert len(recordings_of(deq)[0].forward.loop.sequence) == 1 + (steps >= 4 and first < 100)
    for split, whole in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, split, whole))


@pytest.mark.parametrize("name", ["picard", "picard_damped"])
def test_iterates_are_handed_on_between_replayed_pieces(name):
    deq = deq_of(Tanh(), SOLVERS[name], eq.Stop(rtol=0, max_steps=9))
    for seed in range(3):
        x = inputs_of(seed=seed)
        with torch.no_grad():
            found = deq(x)
            deq.engine = "eager"
            expected = deq(x)
            deq.engine = "captured"
        assert_close(found.value, expected.value, 1e-12)
        assert torch.equal(found.stats.steps, expected.stats.steps)
    assert len(recordings_of(deq)[0].forward.loop.sequence) == 2
    assert deq.capture.replayed == 3
