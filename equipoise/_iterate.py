"""The driver: one loop for every solver, written once.

It evaluates f once per step and owns counting, per-system stopping and freezing, the best finite iterate, refusal of
non-finite values, plateau and divergence, traces and compaction. A solver only proposes the next iterate.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._compat import reenter_autocast
from equipoise._errors import unknown_name
from equipoise._problem import Problem
from equipoise._solution import Stats, Status, fresh_stats
from equipoise._stop import FLOOR_PATIENCE, Stop, tiny_norm
from equipoise._tree import Leaves

if TYPE_CHECKING:
    from equipoise.solvers.base import Solver, State

RUNNING = -1

# Growth of ‖f(z) − z‖ over its first value at which a system without progress is diverging rather than stuck.
DIVERGING = 10.0

# Compaction: fewer systems than this, or a larger live share, cost more to move than they save.
COMPACT_MIN_SYSTEMS = 8
COMPACT_SHARE = 0.5


@dataclass
class Outcome:
    """What the driver returns: leaves in the work dtype."""

    value: Leaves
    stats: Stats
    state: Any = None
    collected: dict[str, list[Any]] | None = None


@dataclass
class _Progress:
    """Where each system stands; the first axis of every tensor is N."""

    best: Leaves
    residual: Tensor  # relative residual of `best`, inf before the first finite one
    latest: Tensor  # relative residual of the newest measured iterate
    status: Tensor
    steps: Tensor
    stalled: Tensor  # steps since `best` last changed
    limit: Tensor  # ‖f(z) − z‖ above which a system has diverged

    @classmethod
    def start(cls, z: Leaves) -> "_Progress":
        real = z[0].new_full((z[0].shape[0],), torch.inf)
        whole = torch.zeros_like(real, dtype=torch.int64)
        return cls(z, real, real, whole + RUNNING, whole, whole, real)

    def rows(self, index: Tensor) -> "_Progress":
        taken = {name: value.index_select(0, index) for name, value in self._tensors().items()}
        return _Progress(best=_leaves.take_rows(self.best, index), **taken)

    def put(self, index: Tensor, part: "_Progress") -> "_Progress":
        """This progress with the systems in `index` replaced by those of `part`."""
        merged = {name: value.index_copy(0, index, part._tensors()[name]) for name, value in self._tensors().items()}
        return _Progress(best=_leaves.put_rows(self.best, index, part.best), **merged)

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "best"}


def iterate(
    problem: Problem,
    solver: "Solver",
    z: Leaves,
    stop: Stop,
    *,
    trace: bool = False,
    collect: tuple[str, ...] = (),
    keep_state: bool = False,
) -> Outcome:
    """Run `solver` on `problem` from z until every system has met `stop`."""
    # Autocast is for f, which enters it by itself, and not for the solver's inner products.
    with reenter_autocast(problem.device_type, None):
        return _Run(problem, solver, stop, trace, collect, keep_state).loop(z)


class _Run:
    """One solve. Problem, z, the solver's state and the progress shrink together when finished systems are dropped."""

    def __init__(
        self, problem: Problem, solver: "Solver", stop: Stop, trace: bool, collect: tuple[str, ...], keep_state: bool
    ) -> None:
        self.problem, self.solver, self.stop, self.keep_state = problem, solver, stop, keep_state
        self.whole = problem
        self.index: Tensor | None = None  # the systems that are left, by their number in the whole problem
        self.done: _Progress | None = None
        self.trace: list[tuple[Tensor | None, Tensor]] | None = [] if trace else None
        self.collected: dict[str, list[Any]] = {name: [] for name in collect}
        self.on_host = problem.spec.device.type == "cpu" and not torch.compiler.is_compiling()
        self.live = _LiveCount(self.on_host)
        plain = stop.select == "best" and not (stop.fixed_budget or collect or keep_state or torch.is_grad_enabled())
        self.may_compact = plain
        self.grad = torch.is_grad_enabled()
        self.tiny = tiny_norm(problem.spec.work_dtype)
        self.all_running = self.on_host  # the host knows that no system has finished
        self.checksum: Tensor | None = None  # sum of residuals: not finite once one of them was not
        self.state_bytes = 0

    def loop(self, z: Leaves) -> Outcome:
        stop, first_nfe, given = self.stop, self.problem.nfe, z
        z, state = self.solver.init(self.problem, z)
        if self.problem.num_systems == 0:
            self.problem.evaluate(z)  # for the check of f's result
            empty = dataclasses.replace(fresh_stats(0, z[0].device, z[0].dtype), nfe=1)
            if self.trace is not None:
                empty.trace = z[0].new_zeros((0, 1))
            return Outcome(z, empty, state, self.collected or None)
        self.progress = _Progress.start(given)  # a learned start need not be finite
        self.zeros = self.progress.stalled
        self._collect(z, state, proposals=False)
        for k in range(stop.max_steps):
            fz = self.problem.evaluate(z)
            before = self.progress.status
            live = self._measure(k, z, fz)
            if live == 0 and stop.select == "best" and not self.keep_state:  # a kept state takes in the last pair
                break
            proposal, state = self.solver.propose(self.problem, z, fz, state)
            z = self._advance(z, proposal, before, live)
            self._collect(z, state)
            if live == 0:
                break
            if self.may_compact and live is not None:
                z, state = self._compact(z, state, live)
        self.state_bytes = max(self.state_bytes, state.nbytes)
        return self._finish(z, state if self.keep_state else None, self.whole.nfe - first_nfe)

    def _measure(self, k: int, z: Leaves, fz: Leaves) -> int | None:
        """Take one iterate into account; return the number of systems still running, if the host knows it."""
        g = self.problem.residual(z, fz)
        if not self.grad:
            return self._judge(k, z, _leaves.norm(g, self.stop.norm), _leaves.norm(fz, self.stop.norm))
        with torch.no_grad():
            return self._judge(k, z, _leaves.norm(g, self.stop.norm), _leaves.norm(fz, self.stop.norm))

    def _judge(self, k: int, z: Leaves, size: Tensor, image: Tensor) -> int | None:
        stop, progress = self.stop, self.progress
        relative = size / (image + self.tiny)
        if stop.fixed_budget:
            self._measure_fixed(z, relative)
            return None
        if k == 0:
            eps = torch.finfo(size.dtype).eps
            progress.limit = stop.diverge * (size + eps * image)
        reading = (k + 1) % stop.check_every == 0
        tolerance = image * stop.rtol if stop.atol == 0 else torch.add(image * stop.rtol, stop.atol)
        if self.all_running and reading:
            calm = (relative < progress.residual) & (size > tolerance) & (size <= progress.limit)
            if bool(calm.all()):  # the usual step: all systems run and all improve
                progress.best, progress.residual, progress.latest = z, relative, relative
                progress.stalled = self.zeros
                self._note(relative)
                return len(calm)
        self._measure_each(k, z, size, relative, (size <= tolerance) & torch.isfinite(size))
        live = self.live.read(progress.status) if reading else None
        self.all_running = self.on_host and live == self.problem.num_systems
        return live

    def _measure_fixed(self, z: Leaves, relative: Tensor) -> None:
        progress = self.progress
        self._keep_best(relative < progress.residual, z)
        progress.residual = torch.fmin(relative, progress.residual)
        progress.latest = relative
        self.checksum = relative if self.checksum is None else self.checksum + relative
        self._note(relative)

    def _advance(self, z: Leaves, proposal: Leaves, before: Tensor, live: int | None) -> Leaves:
        """The proposal where systems are running; the others stay where they finished."""
        if self.stop.fixed_budget or live == self.problem.num_systems:
            return proposal
        if self.stop.select == "best":
            return _leaves.choose(self.progress.status < 0, proposal, self.progress.best)
        return _leaves.choose(before < 0, proposal, z)  # one that has just finished takes its last proposal along

    def _note(self, relative: Tensor) -> None:
        if self.trace is not None:
            self.trace.append((self.index, relative))

    def _keep_best(self, better: Tensor, z: Leaves) -> None:
        if not self.grad:
            self.progress.best = _leaves.choose(better, z, self.progress.best)
            return
        with torch.enable_grad():  # the iterates themselves may be differentiated, the statistics not
            self.progress.best = _leaves.choose(better, z, self.progress.best)

    def _measure_each(self, k: int, z: Leaves, size: Tensor, relative: Tensor, converged: Tensor) -> None:
        stop, progress = self.stop, self.progress
        running = progress.status < 0
        if self.trace is not None:
            self._note(torch.where(running, relative, torch.nan))
        if stop.select == "last":
            progress.latest = torch.where(running, relative, progress.latest)
        better = running & ((relative < progress.residual) | converged)
        self._keep_best(better, z)
        progress.residual = torch.where(better, relative, progress.residual)
        progress.stalled = torch.where(better, 0, progress.stalled + 1)
        code = torch.full_like(progress.status, RUNNING)  # later lines take precedence
        if stop.plateau is not None:
            stuck = progress.stalled >= stop.plateau
            code = code.masked_fill(stuck, Status.PLATEAU)
            # On its way to the limit, if slower than the plateau's patience.
            code = code.masked_fill(stuck & (size * stop.diverge > DIVERGING * progress.limit), Status.DIVERGED)
        if stop.rtol < self.problem.floor:
            at_floor = (progress.stalled >= FLOOR_PATIENCE) & (progress.residual <= self.problem.floor)
            code = code.masked_fill(at_floor, Status.PRECISION_FLOOR)
        code = code.masked_fill(size > progress.limit, Status.DIVERGED)
        code = code.masked_fill(~torch.isfinite(relative), Status.NONFINITE)
        code = code.masked_fill(converged, Status.CONVERGED)
        progress.status = torch.where(running, code, progress.status)
        taken = k if stop.select == "best" else k + 1
        progress.steps = torch.where(running & (code >= 0), taken, progress.steps)

    def _compact(self, z: Leaves, state: "State", live: int) -> tuple[Leaves, "State"]:
        """Drop finished systems once few enough are left; sizes are halvings, so compiled cells see few shapes."""
        systems = self.problem.num_systems
        bucket = systems
        while bucket >= COMPACT_MIN_SYSTEMS and live <= bucket * COMPACT_SHARE:
            bucket = (bucket + 1) // 2
        if bucket == systems:
            return z, state
        if not self.problem.can_slice:  # asked when it counts: f may have many modules to look at
            self.may_compact = False
            return z, state
        self.state_bytes = max(self.state_bytes, state.nbytes)
        kept = torch.argsort(self.progress.status >= 0, stable=True)[:bucket]  # running systems first
        self.done = (
            self.progress if self.index is None or self.done is None else self.done.put(self.index, self.progress)
        )
        self.index = kept if self.index is None else self.index.index_select(0, kept)
        self.problem = self.problem.rows(kept)
        self.progress = self.progress.rows(kept)
        self.all_running, self.zeros = False, self.zeros[:bucket]
        return _leaves.take_rows(z, kept), state.rows(kept)

    def _collect(self, z: Leaves, state: "State", proposals: bool = True) -> None:
        for name, kept in self.collected.items():
            if name == "iterates":
                kept.append(self.problem.spec.unflatten(z))
                continue
            if not isinstance(getattr(state, name, None), Tensor):
                fields = [f.name for f in dataclasses.fields(state) if isinstance(getattr(state, f.name), Tensor)]
                raise unknown_name("quantity to collect", name, ["iterates", *fields])
            if proposals:
                kept.append(getattr(state, name).clone())  # a solver may write into its own tensors

    def _finish(self, z: Leaves, state: Any, nfe: int) -> Outcome:
        stop, progress = self.stop, self.progress
        value = progress.best
        unfinished = progress.status < 0
        progress.steps = torch.where(unfinished | stop.fixed_budget, stop.max_steps, progress.steps)
        progress.status = torch.where(unfinished, Status.MAX_STEPS, progress.status)
        if self.checksum is not None:
            progress.status = progress.status.masked_fill(progress.residual == 0, Status.CONVERGED)
            progress.status = progress.status.masked_fill(~torch.isfinite(self.checksum), Status.NONFINITE)
        residual = progress.residual
        if stop.select == "last":
            usable = _leaves.all_finite([leaf.detach() for leaf in z]) & (progress.status != Status.NONFINITE)
            progress.status = torch.where(usable, progress.status, Status.NONFINITE)
            value = _leaves.choose(usable, z, progress.best)
            residual = torch.where(usable, progress.latest, progress.residual)
        if self.index is not None and self.done is not None:
            progress.best, progress.residual = value, residual
            progress = self.done.put(self.index, progress)
            value, residual = progress.best, progress.residual
        stats = Stats(
            status=progress.status,
            residual=residual,
            steps=progress.steps,
            nfe=nfe,
            trace=self._assemble_trace(progress.steps) if self.trace is not None else None,
            lagged=stop.select == "last",
            solver_bytes=self.state_bytes,
        )
        return Outcome(value, stats, state, self.collected or None)

    def _assemble_trace(self, steps: Tensor) -> Tensor:
        """(N, most steps + 1), NaN where nothing was measured."""
        assert self.trace is not None
        width = self.stop.max_steps if self.stop.fixed_budget else int(steps.max())
        table = torch.full((width + 1, len(steps)), torch.nan, dtype=self.trace[0][1].dtype, device=steps.device)
        for k, (index, residual) in enumerate(self.trace[: width + 1]):
            table[k] = residual if index is None else table[k].index_copy(0, index, residual)
        return table.T


class _LiveCount:
    """The number of systems still running, as the host sees it: at once on the CPU, one check late on a device."""

    def __init__(self, on_host: bool) -> None:
        self.on_host = on_host
        self.pending: tuple[Tensor, torch.cuda.Event] | None = None

    def read(self, status: Tensor) -> int | None:
        count = (status < 0).sum()
        if self.on_host:
            return int(count)
        previous = self.pending
        buffer = torch.empty((), dtype=count.dtype, pin_memory=True)
        buffer.copy_(count, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.pending = (buffer, event)
        if previous is None:
            return None
        previous[1].synchronize()  # recorded one check ago: the device has work queued behind it
        return int(previous[0])
