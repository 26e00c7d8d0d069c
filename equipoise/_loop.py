"""The recorded iteration of a map: pieces of it, when to ask how many systems are running, and smaller batches.

A loop works in place on buffers of its own. Its first piece begins a solve, the following ones go on with it, and the
last one settles what is returned, so that nothing is left to do outside of recordings. When most systems have finished,
those that run may be moved to a smaller loop, which goes on where they were.
"""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise._iterate import COMPACT_MIN_SYSTEMS
from equipoise._method import Evaluate, Method
from equipoise._solution import Stats, Status
from equipoise._stop import Stop
from equipoise._tape import Graphs, Reruns, Work, copy_all
from equipoise._tree import Leaves, tree_tensors
from equipoise.solvers._hyper_step import LearnedMemory

if TYPE_CHECKING:
    from equipoise.ops import Standing

# Steps between two questions to the device; also what a solve may do in vain after its last system has finished.
CHUNK = 4
# Steps of a fixed budget recorded in one piece.
LONGEST = 32
# Of these, steps in a piece of their own: the launch of a large graph takes its time, and delays its first kernel. So a
# small one goes first, and keeps the device busy meanwhile.
FIRST = 2
# Solves whose lengths are remembered, to ask the next ones when there may be something to hear.
REMEMBERED = 8
# Solves that could have used a smaller loop after which it is recorded: one of them may have been an exception.
WORTH_SHRINKING = 2
# Elements to which vectors of a standing are padded, so that each begins at a multiple of 128 bytes.
PADDING = 32


# Buffers


class Packed:
    """The vectors of a standing as rows of one matrix per dtype: set, gathered and read with few launches."""

    def __init__(self, standing: "Standing") -> None:
        vectors = {f.name: getattr(standing, f.name) for f in dataclasses.fields(standing) if f.name != "best"}
        self.size = standing.status.shape[0]
        width = -(-self.size // PADDING) * PADDING
        self.matrices: dict[torch.dtype, Tensor] = {}
        self.rows: dict[str, int] = {}
        self.scalars: list[str] = []
        self.views: dict[str, Any] = {}
        for dtype in dict.fromkeys(vector.dtype for vector in vectors.values()):
            names = [name for name, vector in vectors.items() if vector.dtype == dtype]
            matrix = standing.status.new_zeros((len(names), width), dtype=dtype)
            for row, name in enumerate(names):
                vector = vectors[name]
                self.rows[name] = row
                self.scalars += [name] * (vector.dim() == 0)
                self.views[name] = matrix[row, 0] if vector.dim() == 0 else matrix[row, : self.size]
                self.views[name].copy_(vector)
            self.matrices[dtype] = matrix
        self.fresh = {dtype: matrix.clone() for dtype, matrix in self.matrices.items()}

    def reset(self) -> None:
        for dtype, matrix in self.matrices.items():
            matrix.copy_(self.fresh[dtype])

    def take(self, whole: "Packed", index: Tensor) -> None:
        """Become the standing of the systems in `index`."""
        for dtype, matrix in self.matrices.items():
            matrix[:, : self.size].copy_(whole.matrices[dtype].index_select(1, index))
        for name in self.scalars:
            self.views[name].copy_(whole.views[name])

    def put(self, part: "Packed", index: Tensor) -> None:
        """Take over the standing of the systems in `index`."""
        for dtype, matrix in self.matrices.items():
            matrix.index_copy_(1, index, part.matrices[dtype][:, : part.size])
        for name in self.scalars:  # which lie in a row of that matrix
            self.views[name].copy_(part.views[name])


class Buffers:
    """What a loop works on, all of it written in place.

    Attributes:
        z: Iterates, leaf by leaf (N, D_i).
        standing: Where each system stands.
        memory: What the solver remembers, if anything.
        remembered: The tensors of that memory.
        led: That memory, if Python leads it through the pieces of a solve; these are told apart by its phase then, and
            the systems stay together.
        value: The states to return, settled at the end of a solve.
        residual: (N,) theirs.
        ended: (2, N) int64, statuses and steps to return.
    """

    def __init__(self, z: Leaves, method: Method) -> None:
        from equipoise.ops import Standing

        self.z = z
        standing = Standing.start(z)
        self.packed = Packed(standing)
        self.standing = dataclasses.replace(standing, **self.packed.views)
        self.memory = method.memory(z)
        self.remembered = tree_tensors(vars(self.memory)) if self.memory is not None else []
        self.led = self.memory if isinstance(self.memory, LearnedMemory) else None
        self.ended = torch.full_like(standing.status, method.stop.max_steps, dtype=torch.int64).repeat(2, 1)
        self.value, self.residual = self.standing.best, self.standing.residual
        if method.stop.select == "last":
            self.value, self.residual = [torch.empty_like(leaf) for leaf in z], torch.empty_like(self.residual)

    @property
    def size(self) -> int:
        return self.z[0].shape[0]

    def restart(self) -> None:
        """Begin a solve from z."""
        if self.led is not None:
            self.led.begin()
        self.packed.reset()
        copy_all(self.standing.best, self.z)

    def conclude(self, stop: Stop) -> None:
        """Settle what is returned; the iteration may go on all the same."""
        from equipoise.ops import take_last

        standing, (status, steps) = self.standing, self.ended
        if stop.fixed_budget:  # the steps stay what they are, and systems end in one way only
            torch.ne(standing.residual, 0, out=status)  # MAX_STEPS, or CONVERGED without a residual
            status.masked_fill_(standing.status >= 0, int(Status.NONFINITE))
        else:
            unfinished = standing.status < 0
            status.copy_(standing.status)
            status.masked_fill_(unfinished, int(Status.MAX_STEPS))
            steps.copy_(standing.steps)
            steps.masked_fill_(unfinished, stop.max_steps)
        if stop.select == "last":
            take_last(self.z, self.value, self.residual, status, standing)

    def stats(self, stop: Stop, nfe: int) -> Stats:
        """The statistics of the solve, in tensors of their own."""
        status, steps = self.ended.clone().unbind()
        held = sum(tensor.nbytes for tensor in self.remembered) if self.led is None else self.led.nbytes
        return Stats(status, self.residual.clone(), steps, nfe, lagged=stop.select == "last", solver_bytes=held)

    def take(self, whole: "Buffers", index: Tensor) -> None:
        """Go on where the systems in `index` are."""
        self.packed.take(whole.packed, index)
        for ours, theirs in zip(self._leaves(), whole._leaves(), strict=True):
            ours.copy_(theirs.index_select(0, index))
        for ours, theirs in zip(self.remembered, whole.remembered, strict=True):
            ours.copy_(theirs.index_select(0, index))

    def put(self, part: "Buffers", index: Tensor) -> None:
        """Take over where the systems in `index` have got to."""
        self.packed.put(part.packed, index)
        for ours, theirs in zip(self._leaves(), part._leaves(), strict=True):
            ours.index_copy_(0, index, theirs)

    def put_memory(self, part: "Buffers", index: Tensor) -> None:
        """Take over what the solver remembers of the systems in `index`."""
        for ours, theirs in zip(self.remembered, part.remembered, strict=True):
            ours.index_copy_(0, index, theirs)

    def _leaves(self) -> Leaves:
        return [*self.z, *self.standing.best]


# Loops


class Loop:
    """Pieces of z ← step(z, f(z)) on buffers.

    Args:
        tape: What records them.
        evaluate: f.
        buffers: What they work on.
        method: How to step.
        begin: What comes before the first step; by default a solve is begun from what z holds.
    """

    def __init__(
        self, tape: Graphs | Reruns, evaluate: Evaluate, buffers: Buffers, method: Method, begin: Work | None = None
    ) -> None:
        self.tape, self.buffers, self.stop = tape, buffers, method.stop
        self.host = tape.host(buffers.packed.matrices[torch.int32])
        self._paces: dict[int, deque[int]] = {}
        self._pieces: dict[tuple[int, bool, bool, int], Work] = {}
        # Pieces refer to addresses only. What they work on lives as long as this does: buffers and what these refer to.
        self._alive: tuple[Any, ...] = (evaluate, begin, method)
        most = self.stop.max_steps
        self.whole = min(most, LONGEST if self.stop.fixed_budget else CHUNK)
        led = buffers.led
        splits = self.stop.fixed_budget and led is None and 2 * FIRST <= most <= LONGEST
        trail: list[Leaves] | None = [] if splits else None
        self._alive += (trail,)
        forgets = tape.runs_python  # the next run makes it anew

        def run(steps: int, begins: bool, ends: bool, phase: int) -> None:  # refers to no loop: so there are no cycles
            if begins:
                if trail:
                    trail.clear()
                (begin or partial(method.begin, buffers))()
            if led is not None:
                led.resume(phase)
            method.run(buffers, evaluate, steps, ends, trail)
            if trail and ends and forgets:
                trail.clear()
            if led is not None:
                led.pause(ends)
            if ends:
                buffers.conclude(method.stop)

        lengths = [self.whole] * (most // self.whole) + [most % self.whole] * (most % self.whole > 0)
        if splits:
            lengths = [FIRST, most - FIRST]
        last = len(lengths) - 1
        # A budget that is fixed, or no longer than a chunk, is one sequence; else its end comes when it comes.
        in_one_go = self.stop.fixed_budget or last == 0
        wanted = [
            (steps, i == 0, in_one_go and i == last, self._phase(i * self.whole)) for i, steps in enumerate(lengths)
        ]
        tape.rehearse(partial(run, 1 if led is None else min(led.rehearsal, most), True, True, 0))
        with tape.together():
            for piece in dict.fromkeys(wanted):
                self._pieces[piece] = tape.record(partial(run, *piece))
            self.end: Work | None = None if in_one_go else tape.record(partial(run, 0, False, True, 0))
        self.sequence = [self._pieces[piece] for piece in wanted] if in_one_go else []

    @property
    def size(self) -> int:
        return self.buffers.size

    def advance(self, done: int, few: int, begins: bool) -> tuple[int, int]:
        """Iterate until at most `few` systems are running, or the budget is spent.

        Args:
            done: Evaluations made before.
            few: Of this loop's systems.
            begins: Whether this is the first piece.

        Returns:
            Evaluations made in all, and systems running; as many as there are if nobody asked.
        """
        most, pace = self.stop.max_steps, self._paces.setdefault(few, deque(maxlen=REMEMBERED))
        quiet, asked = min(pace, default=0), False
        while done < most:
            steps = min(self.whole, most - done)
            self._pieces[steps, begins, False, self._phase(done)]()
            begins, done = False, done + steps
            if quiet <= done < most:
                running, asked = self._ask(), True
                if running <= few:
                    pace.append(self._needed(few))
                    return done, running
        # If nobody asked, nobody knows: ask earlier next time, or solves that have become shorter would go unnoticed.
        pace.append(most if asked else quiet - self.whole)
        return done, self.size

    def _phase(self, done: int) -> int:
        """What tells the same number of steps after `done` evaluations apart; 0 if the device counts them."""
        return 0 if self.buffers.led is None else self.buffers.led.phase(done)

    def _ask(self) -> int:
        """How many systems are running; waits for the device."""
        self.tape.read(self.buffers.packed.matrices[torch.int32], self.host)
        return int((self._answer("status") < 0).sum())

    def _needed(self, few: int) -> int:
        """After how many evaluations no more than `few` were running, by the last answer."""
        evaluations = self._answer("steps") + int(self.stop.select == "best")
        evaluations = evaluations.masked_fill(self._answer("status") < 0, self.stop.max_steps)
        return int(evaluations.kthvalue(self.size - few).values)

    def _answer(self, name: str) -> Tensor:
        return self.host[self.buffers.packed.rows[name], : self.size]


# Fewer systems


@dataclass
class Level:
    """A loop for some of the systems of another one.

    Attributes:
        loop: Its first piece fetches the running systems.
        put: Brings their results back.
        put_memory: Brings back what the solver remembers of them.
    """

    loop: Loop
    put: Work
    put_memory: Work


@dataclass(frozen=True)
class Part:
    """f on so many of the systems of another map.

    Attributes:
        size: How many.
        evaluate: f on buffers of that many.
        copies: What these are taken from: (buffer, that of the whole batch, axis of systems).
    """

    size: int
    evaluate: Evaluate
    copies: Sequence[tuple[Tensor, Tensor, int]]


def shrunk(tape: Graphs | Reruns, whole: Buffers, part: Part, method: Method) -> Level:
    """A loop for `part.size` systems of those on `whole`, which stay as they are meanwhile."""
    buffers = Buffers([leaf[: part.size].clone() for leaf in whole.z], method)
    index = torch.zeros(part.size, dtype=torch.int64, device=whole.z[0].device)

    def fetch() -> None:
        ended = (whole.standing.status >= 0).to(torch.int32)
        index.copy_(torch.argsort(ended, stable=True)[: part.size])  # running systems first
        for place, source, axis in part.copies:
            place.copy_(source.index_select(axis, index))
        buffers.take(whole, index)

    def put() -> None:
        whole.put(buffers, index)

    def put_memory() -> None:
        whole.put_memory(buffers, index)

    # A solve is under way on the whole: what has just been fetched may be put back, that changes nothing.
    def there_and_back() -> None:
        fetch()
        put()
        put_memory()

    tape.rehearse(there_and_back)
    fetch()
    put_back = tape.record(put)  # before the loop, whose rehearsals go on from what was fetched
    # Some methods have no memory, and torch takes a graph of nothing for an accident.
    put_memory_back = tape.record(put_memory) if whole.memory is not None else put_memory
    return Level(Loop(tape, part.evaluate, buffers, method, fetch), put_back, put_memory_back)


class Iteration:
    """A loop, and smaller ones for when most of its systems have finished.

    Args:
        loop: For all systems.
        shrinks: Whether smaller ones can be made at all.
    """

    def __init__(self, loop: Loop, shrinks: bool) -> None:
        self.loop = loop
        self.levels: dict[int, Level] = {}
        self._wanted: Counter[int] = Counter()
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        shrinks = shrinks and loop.size >= COMPACT_MIN_SYSTEMS and not loop.sequence and loop.buffers.led is None
        self._sizes = _halvings(loop.size) if shrinks else []

    def run(self, make: Callable[[int], Level | None]) -> int:
        """Iterate from what z holds; return the number of evaluations made.

        Args:
            make: Makes a loop for so many systems, or says that it cannot.
        """
        if self.loop.sequence:
            for piece in self.loop.sequence:
                piece()
            return self.loop.stop.max_steps
        done = self._run_levels(make)
        assert self.loop.end is not None
        self.loop.end()
        return done

    def _run_levels(self, make: Callable[[int], Level | None]) -> int:
        most, level, loop = self.loop.stop.max_steps, None, self.loop
        done, running = 0, loop.size
        while done < most and running > 0:
            few = loop.size // 2 if self._sizes and loop.size > 1 else 0
            done, running = loop.advance(done, few, begins=True)
            if done == most or running == 0:
                break
            smaller = self._smaller(running, loop.size, done, make)
            if smaller is None:
                done, running = loop.advance(done, 0, begins=False)
                break
            if level is not None:
                level.put()
                level.put_memory()
            level, loop = smaller, smaller.loop
        if level is not None:
            level.put()
        self._lengths.append(done)
        return done

    def _smaller(self, running: int, size: int, done: int, make: Callable[[int], Level | None]) -> Level | None:
        """A level for the systems that are running, if it pays to go there."""
        expected = sorted(self._lengths)[len(self._lengths) // 2] if self._lengths else self.loop.stop.max_steps
        if expected - done < 2 * CHUNK:
            return None
        best = min(candidate for candidate in self._sizes if candidate >= running)
        self._wanted[best] += 1
        if best not in self.levels and self._wanted[best] >= WORTH_SHRINKING:
            made = make(best)
            if made is None:
                self._sizes = []  # there is something about f
                return None
            self.levels[best] = made
        fitting = [candidate for candidate in self.levels if running <= candidate < size]
        return self.levels[min(fitting)] if fitting else None


def _halvings(size: int) -> list[int]:
    """Half of the size, half of that, and so on to 1: few sizes, so that few loops are recorded."""
    sizes = []
    while size > 1:
        size = (size + 1) // 2
        sizes.append(size)
    return sizes
