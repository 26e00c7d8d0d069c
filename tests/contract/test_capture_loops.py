"""How the captured engine iterates: when it asks the device, smaller batches for what is left, and what stays alive."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import equipoise as eq
from equipoise import _loop, _recording
from equipoise._tape import Reruns
from tests.captured import (
    FIXED,
    SOLVERS,
    Emulated,
    Scoped,
    Tanh,
    assert_close,
    assert_engines_agree,
    deq_of,
    inputs_of,
    loss_of,
    recordings_of,
    same_statistics,
    tensors,
)

STOP = eq.Stop(rtol=1e-8, max_steps=80)


@pytest.fixture
def questions(monkeypatch):
    """The steps after which the device was asked, as counted by the loop that asked."""
    asked = []

    def read(self, source, host):
        host.copy_(source)
        asked.append(int(source[3, 0]))

    monkeypatch.setattr(Reruns, "read", read)
    return asked


class Scaled(nn.Module):
    """tanh(a·z + x): a is how slowly a system converges. Notes the batches it is evaluated on."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.batches = []

    def forward(self, z, x, a):
        self.batches.append(z.shape[0])
        return torch.tanh(self.gain * a * z + x)


def skewed(easy=15, hard=1, n=6):
    """Inputs of systems in mixed order: the easy ones take about a dozen steps, the hard ones about forty."""
    x = inputs_of(n, easy + hard)
    a = torch.full((easy + hard, 1), 0.2, dtype=torch.float64)
    a[torch.arange(1, 1 + 3 * hard, 3) % (easy + hard)] = 0.95
    return 0.2 * x, a


def both(deq, *inputs, solves=4, **options):
    """The eager solution, and the last of some captured ones."""
    with torch.no_grad():
        deq.engine = "eager"
        eager = deq(*inputs, **options)
        deq.engine = "captured"
        for _ in range(solves):
            torch.manual_seed(0)
            captured = deq(*inputs, **options)
    return captured, eager


# When to ask


def test_a_solve_that_is_like_the_ones_before_asks_once(questions):
    deq, x = deq_of(Tanh(), stop=STOP), inputs_of(batch=4)
    captured, eager = both(deq, x, solves=1)
    needed = int(eager.stats.steps.max()) + 1
    chunks = -(-needed // _loop.CHUNK)
    assert questions == [_loop.CHUNK * (k + 1) for k in range(chunks)]
    del questions[:]
    again, _ = both(deq, x, solves=1)
    assert questions == [_loop.CHUNK * chunks]
    assert captured.stats.nfe == _loop.CHUNK * chunks + 1  # f was evaluated once more to see what it holds constant
    assert again.stats.nfe == _loop.CHUNK * chunks
    assert torch.equal(captured.value, again.value)
    same_statistics(again.stats, eager.stats, 1e-15)


@pytest.mark.parametrize("select", ["best", "last"])
def test_a_shorter_solve_makes_steps_in_vain_and_they_change_nothing(questions, select):
    """After solves of one length comes a shorter one: it is asked too late once, and in time from then on."""
    deq = deq_of(Scaled(), stop=eq.Stop(rtol=1e-8, max_steps=80, select=select))
    x, slow, quick = inputs_of(batch=4), *(torch.full((4, 1), a, dtype=torch.float64) for a in (0.9, 0.1))
    long, _ = both(deq, x, slow, solves=3)
    short, eager = both(deq, x, quick, solves=1)
    assert short.stats.nfe == long.stats.nfe > eager.stats.nfe + _loop.CHUNK
    assert torch.equal(short.value, eager.value)
    same_statistics(short.stats, eager.stats, 1e-15)
    deq.cell.batches.clear()
    short, eager = both(deq, x, quick, solves=1)
    assert short.stats.nfe == len(deq.cell.batches) - eager.stats.nfe <= eager.stats.nfe + _loop.CHUNK
    del questions[:]
    both(deq, x, slow, solves=1)
    assert questions[0] == short.stats.nfe
    assert questions[-1] == long.stats.nfe


def test_old_solves_are_forgotten(questions):
    deq, x = deq_of(Scaled(), stop=STOP), inputs_of(batch=4)
    quick, slow = (torch.full((4, 1), a, dtype=torch.float64) for a in (0.1, 0.8))
    both(deq, x, quick, solves=1)
    both(deq, x, slow, solves=_loop.REMEMBERED)
    del questions[:]
    both(deq, x, slow, solves=1)
    assert len(questions) == 1


def test_a_budget_that_is_spent_is_not_asked_about(questions):
    deq = deq_of(Tanh(), stop=eq.Stop(rtol=1e-12, max_steps=10))
    captured, eager = both(deq, inputs_of(), solves=2)
    assert questions == [4, 8]  # nothing of what comes after the last step, and nothing at all the second time
    assert captured.stats.nfe == 10
    same_statistics(captured.stats, eager.stats, 1e-15)
    both(deq_of(Tanh(), stop=FIXED), inputs_of())
    both(deq_of(Tanh(), stop=eq.Stop(rtol=1e-3, max_steps=4)), inputs_of())
    assert questions == [4, 8]


def test_solves_that_become_short_after_spending_the_budget_are_noticed():
    """Nobody asks when all solves so far took all of the budget; but not forever."""
    deq = deq_of(Scaled(), stop=eq.Stop(rtol=1e-8, max_steps=40))
    x, endless, quick = inputs_of(batch=4), *(torch.full((4, 1), a, dtype=torch.float64) for a in (0.999, 0.1))
    both(deq, x, endless, solves=_loop.REMEMBERED)
    captured, eager = both(deq, x, quick, solves=4)
    assert captured.stats.nfe <= eager.stats.nfe + 2 * _loop.CHUNK
    same_statistics(captured.stats, eager.stats, 1e-15)


# Smaller batches


@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("name", SOLVERS)
def test_the_last_systems_are_solved_alone(name, select):
    """One hard system of 16: from its second solve on it is evaluated alone, with the eager engine's results."""
    deq = deq_of(Scaled(), SOLVERS[name], eq.Stop(rtol=1e-8, max_steps=80, select=select))
    x, a = skewed()
    captured, eager = both(deq, x, a)
    deq.cell.batches.clear()
    with torch.no_grad():
        captured = deq(x, a)
    batches = deq.cell.batches
    assert batches == sorted(batches, reverse=True)
    running = [int((eager.stats.steps >= k).sum()) for k in range(len(batches))]
    for k in range(2 * _loop.CHUNK, len(batches)):
        assert batches[k] <= max(1, 2 * running[k - 2 * _loop.CHUNK])
    assert batches[0] == 16
    assert batches[-1] == 1
    assert captured.stats.nfe == len(batches) <= eager.stats.nfe + 2 * _loop.CHUNK
    assert_close(captured.value, eager.value, 1e-10)
    assert torch.equal(captured.stats.status, eager.stats.status)
    assert (captured.stats.steps - eager.stats.steps).abs().max() <= 1  # a product of one row is rounded otherwise
    assert deq.capture.recorded == 1


def test_several_sizes_one_after_another():
    """Systems finish in groups; each time at most half of a batch runs, the smallest halving that holds it goes on."""
    a = torch.tensor([0.1] * 9 + [0.75] * 4 + [0.9] * 2 + [0.95], dtype=torch.float64)[torch.randperm(16)][:, None]
    deq, x = deq_of(Scaled(), stop=eq.Stop(rtol=1e-8, max_steps=200)), 0.1 * inputs_of(batch=16)
    both(deq, x, a, solves=6)
    deq.cell.batches.clear()
    captured, eager = both(deq, x, a, solves=1)
    batches = deq.cell.batches[-captured.stats.nfe :]
    assert set(batches) >= {16, 8, 4, 1}
    assert batches == sorted(batches, reverse=True)
    assert_close(captured.value, eager.value, 1e-12)
    same_statistics(captured.stats, eager.stats, 1e-12)


def test_the_first_time_is_an_exception():
    """A smaller loop is recorded when it could have been used before."""
    deq, (x, a) = deq_of(Scaled(), stop=STOP), skewed()
    with torch.no_grad():
        deq(x, a)
        assert set(deq.cell.batches) == {16}
        assert not recordings_of(deq)[0].forward.levels
        deq(x, a)
        assert set(recordings_of(deq)[0].forward.levels) == {1}


def test_it_does_not_pay_at_the_end_of_a_solve():
    """Systems that finish within a few steps of each other stay together."""
    deq = deq_of(Scaled(), stop=STOP)
    a = torch.linspace(0.5, 0.58, 16, dtype=torch.float64)[:, None]
    captured, eager = both(deq, 0.2 * inputs_of(batch=16), a, solves=5)
    spread = eager.stats.steps.sort().values
    assert spread[7] < spread[-1] < spread[7] + 2 * _loop.CHUNK
    assert set(deq.cell.batches[-captured.stats.nfe :]) == {16}
    assert not recordings_of(deq)[0].forward.levels
    assert_close(captured.value, eager.value, 1e-10)


def test_training_solves_forward_on_smaller_batches():
    """The forward iteration only: the graph at z*, and the adjoint on it, are of the whole batch."""
    deq, (x, a) = deq_of(Scaled(), eq.Anderson(), STOP), skewed()
    assert_engines_agree(deq, x.requires_grad_(), a, tolerance=1e-7, solves=4)
    assert set(recordings_of(deq)[0].forward.levels) == {1}


def test_masks_are_taken_along_and_shared_inputs_are_not():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scoped = Scoped().double()

        def forward(self, z, options, table, a):
            return a * self.scoped(z, options["x"]) + 0.1 * table.sum(0)

    torch.manual_seed(0)
    x, a = skewed()
    table = inputs_of(batch=16, seed=5)  # as many rows as systems, but not theirs
    deq = deq_of(Mixed(), stop=STOP, in_dims=(0, None, 0), initial_state=lambda *given: torch.zeros_like(x))
    given = ({"x": x, "plain": 3}, table, a)
    torch.manual_seed(0)
    captured, _ = both(deq, *given)
    torch.manual_seed(0)
    deq.engine = "eager"
    assert_close(captured.value, deq(*given).value, 1e-7)
    assert 1 in recordings_of(deq)[0].forward.levels


def test_inputs_that_cannot_be_taken_apart_keep_systems_together():
    deq, (x, a) = deq_of(Scaled(), stop=STOP, in_dims=None), skewed()
    captured, eager = both(deq, x, a)
    assert_close(captured.value, eager.value, 1e-12)
    assert set(deq.cell.batches) == {16}


def test_a_cell_made_for_one_size_of_batch_goes_on_with_it():
    class Fixed(nn.Module):
        def __init__(self, wrong):
            super().__init__()
            self.shift, self.wrong = nn.Parameter(torch.zeros(16, 6, dtype=torch.float64)), wrong

        def forward(self, z, x, a):
            z = torch.tanh(a * z + x)
            return z + self.shift if self.wrong == "shape" else z.view(16, 6)

    for wrong in ("shape", "error"):
        deq, (x, a) = deq_of(Fixed(wrong), stop=STOP), skewed()
        with torch.no_grad():
            solutions = [deq(x, a) for _ in range(5)]
        truth = deq_of(Scaled(), stop=STOP, engine="eager")(x, a)
        for solution in solutions:
            assert_close(solution.value, truth.value, 1e-7)
        assert not recordings_of(deq)[0].forward.levels
        assert deq.capture.replayed == 5


def test_recording_a_smaller_loop_leaves_no_trace():
    """Buffers of the cell and random generators are as they would be without it."""

    class Counting(Scaled):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, z, x, a):
            self.calls.add_(1)
            return super().forward(z, x, a)

    deq, (x, a) = deq_of(Counting(), stop=STOP), skewed()
    for _ in range(3):
        calls, state = deq.cell.calls.clone(), torch.get_rng_state()
        with torch.no_grad():
            solution = deq(x, a)
        assert deq.cell.calls - calls == solution.stats.nfe
        assert torch.equal(state, torch.get_rng_state())
    assert recordings_of(deq)[0].forward.levels


def capturable_step(method, buffers, fz):
    """Plain iteration to a relative tolerance without a look at any value."""
    (z,), (fz,), standing = buffers.z, fz, buffers.standing
    size, image = (fz - z).norm(dim=1), fz.norm(dim=1)
    running = standing.status < 0
    ends = running & (size <= method.stop.rtol * image)
    standing.best[0].copy_(torch.where(running[:, None], z, standing.best[0]))
    standing.residual.copy_(torch.where(running, size / image, standing.residual))
    standing.steps.copy_(torch.where(ends, standing.count, standing.steps))
    z.copy_(torch.where((running & ~ends)[:, None], fz, z))
    standing.status.masked_fill_(ends, int(eq.Status.CONVERGED))
    standing.count.add_(1)


def test_smaller_batches_as_a_graph_would_replay_them(monkeypatch):
    """Nothing is read inside of a piece, and pieces work on the tensors they were recorded on."""
    monkeypatch.setattr(_recording, "tape_for", Emulated)
    monkeypatch.setattr(_loop.Method, "step", capturable_step)
    deq = deq_of(Scaled(), stop=STOP)
    for seed in range(5):
        x, a = skewed(13, 3)
        order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
        captured, eager = both(deq, x[order], a[order], solves=1)
        assert_close(captured.value, eager.value, 1e-12)
        assert torch.equal(captured.stats.steps, eager.stats.steps)
    assert 4 in recordings_of(deq)[0].forward.levels
    assert deq.capture.recorded == 1


# What stays alive


class _Given(TorchDispatchMode):
    """Notes, without keeping them, the tensors that operations are given and have not made."""

    def __init__(self):
        super().__init__()
        self.made, self.given = set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tensors((args, kwargs or {})):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.made and storage.nbytes() > 8:  # not a number in the guise of a tensor
                self.given.setdefault(storage._cdata, StorageWeakRef(storage))
        result = func(*args, **(kwargs or {}))
        self.made |= {t.untyped_storage()._cdata for t in tensors(result)} - self.given.keys()
        return result


class Forgetful(Reruns):
    """As a graph, a recording knows where tensors were, and keeps none of them; a replay finds out who does."""

    runs_python = False
    replays = 0

    def record(self, run):
        with _Given() as noted:
            run()
        given = list(noted.given.values())
        assert given

        def replay():
            gone = [reference for reference in given if reference.expired()]
            assert not gone, f"{len(gone)} of {len(given)} tensors of a recording are gone"
            Forgetful.replays += 1

        return replay


@pytest.mark.parametrize("stop", [FIXED, eq.Stop(rtol=1e-12, max_steps=10)], ids=["fixed", "tolerance"])
@pytest.mark.parametrize("name", ["picard", "anderson", "broyden"])
def test_what_a_recording_refers_to_lives_as_long_as_it(monkeypatch, name, stop):
    monkeypatch.setattr(_recording, "tape_for", Forgetful)
    Forgetful.replays = 0
    solver = SOLVERS[name]
    deq = deq_of(Scoped().double(), solver, stop, eq.Implicit(solver=solver, stop=FIXED))
    for _ in range(2):
        gc.collect()
        x = inputs_of().requires_grad_()
        loss_of(deq(x).value).backward()
        with torch.no_grad():
            deq(inputs_of())
    assert Forgetful.replays >= 4 * 2
    assert deq.capture.recorded == 2


def test_a_recording_that_loses_its_memory_is_found_out(monkeypatch):
    """The test of the tests above."""
    monkeypatch.setattr(_recording, "tape_for", Forgetful)
    deq, x = deq_of(Tanh(), eq.Anderson(), FIXED), inputs_of()
    with torch.no_grad():
        deq(x)
        buffers = recordings_of(deq)[0].forward.loop.buffers
        buffers.memory, buffers.remembered = None, []
        with pytest.raises(AssertionError, match="tensors of a recording are gone"):
            deq(x)


def test_what_a_smaller_loop_refers_to_lives_as_long_as_it(monkeypatch):
    monkeypatch.setattr(_recording, "tape_for", Forgetful)
    deq, (x, a) = deq_of(Scaled(), eq.Anderson(), STOP), skewed()
    with torch.no_grad():
        deq(x, a)
        recording = recordings_of(deq)[0]
        level = recording._shrunk(4)
        gc.collect()
        pieces = (*level.loop._pieces.values(), level.put, level.put_memory)
        assert len(pieces) > 2
        for piece in pieces:
            piece()  # the tape raises if something is gone
