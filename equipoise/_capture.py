"""The captured engine: a solve as replays of recorded steps.

On a GPU the Python of a step costs more than its kernels. So steps of cell, solver and stop rule are recorded once per
shape, in place on buffers that belong to the recording, and replayed; all that comes back to the host is how many
systems are running, where that matters. Under the implicit adjoint the evaluation at z*, the adjoint's steps
and the last product, which carries the gradient to parameters and inputs, are recorded too.

A recording is leased for a solve. In training the lease lasts until the backward pass has run or the solution is
dropped, so that two forwards before one backward use two recordings; beyond `MOST_LEASES` of them the eager engine
takes over. Parameters are read where they are: updated in place, they stay valid.

The same code runs on the CPU, where a recording is simply run again: slower than the eager engine, and a way to test.
docs/maths/engines.md says what is recorded and what is not.
"""

import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise._compat import inside_functorch_transform, saves_tensors_elsewhere
from equipoise._errors import first_line
from equipoise._fingerprint import Watch, glance, key_of, module_form
from equipoise._method import step_obstacle
from equipoise._problem import Problem, StateSpec
from equipoise._recording import CannotCapture, Recording, Snapshot
from equipoise._scope import current_scope
from equipoise._solution import BackwardRecord, EquilibriumWarning, Solution, Stats
from equipoise._tape import being_recorded, inline, recording_now, used_inline
from equipoise._tree import Leaves, Tree
from equipoise.adjoints.base import refuse_double_backward, report_failure
from equipoise.adjoints.implicit import Implicit
from equipoise.adjoints.neumann import Neumann
from equipoise.adjoints.phantom import OneStep, Phantom
from equipoise.adjoints.unroll import Unroll
from equipoise.solvers import HyperAnderson, Solver

if TYPE_CHECKING:
    from equipoise._module import DEQ, Plan

ENGINES = ("auto", "eager", "captured")

# Recordings of one shape that may be in use at once, shapes with recordings, shapes remembered without, and solves that
# are known at a glance.
MOST_LEASES = 2
MOST_SHAPES = 16
MOST_REMEMBERED = 256
MOST_KNOWN = 64
# Calls with a shape after which "auto" records it: a shape seen once may never come again.
WORTH_RECORDING = 2

# Adjoints that leave a solve without gradients to the solver and the stop rule of the plan.
PLAIN_WITHOUT_GRAD = (Implicit, Neumann, OneStep, Phantom, Unroll)
RESTLESS = "the cell changes its own attributes when it is evaluated"


# Leases


class Lease:
    """The right to a recording's buffers; ends when the backward pass has run, or with the solution."""

    def __init__(self, recording: Recording) -> None:
        recording.turn += 1
        self.recording, self.turn = recording, recording.turn
        recording.lease = weakref.ref(self)

    @property
    def valid(self) -> bool:
        return self.recording.turn == self.turn

    def release(self) -> None:
        if self.valid:
            self.recording.lease = None


class _Captured(torch.autograd.Function):
    """z* from a recording; the backward pass replays the adjoint."""

    @staticmethod
    def forward(ctx: Any, lease: Lease, record: BackwardRecord, report: Any, value: Leaves, *wanted: Tensor) -> Any:
        ctx.lease, ctx.record, ctx.report = lease, record, report
        ctx.versions = [(tensor, tensor._version) for tensor in wanted if isinstance(tensor, nn.Parameter)]
        ctx.set_materialize_grads(False)
        return tuple(leaf.clone() for leaf in value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        refuse_double_backward("Implicit")
        lease: Lease = ctx.lease
        if not lease.valid:
            raise RuntimeError(
                "a second backward pass through a captured solve, after its buffers were used again: "
                'use engine="eager" on the DEQ to go backward more than once.'
            )
        if any(parameter._version != version for parameter, version in ctx.versions):
            raise RuntimeError(
                "a parameter of the cell was modified by an inplace operation between a captured solve and its "
                "backward pass, which reads it: go backward before the optimiser's step."
            )
        delivered, stats = lease.recording.pull_back(grads)
        lease.release()
        ctx.record.stats = stats
        ctx.report(stats)
        return (None, None, None, None, *delivered)


# The engine of a DEQ


@dataclass
class _Shape:
    """The recordings of one key.

    Attributes:
        recordings: Empty once they have been dropped for others.
        used: When one of them was taken last, by the engine's count.
    """

    recordings: list[Recording] = field(default_factory=list)
    used: int = 0

    def free(self) -> Recording | None:
        """A recording that nobody holds a lease of."""
        for recording in self.recordings:
            if recording.lease is None or recording.lease() is None:
                return recording
        return None


@dataclass
class _Known:
    """What was found out about solves that look alike at a glance.

    Attributes:
        shape: Their recordings.
        watch: Over the cell.
        solver: Over the solver, if it is learned.
        like: A problem of theirs, less its inputs.
        goes_ahead: Whether a recording of theirs that does not hold any more may be replayed, as far as it concerns the
            cell and the solver.
    """

    shape: _Shape
    watch: Watch
    solver: Watch | None
    like: Problem
    goes_ahead: bool = field(init=False)

    def __post_init__(self) -> None:
        self.goes_ahead = self.watch.only_parameters and self.solver is None and not inline()

    def unchanged(self) -> bool:
        """Whether cell and solver are what they were."""
        return self.watch.unchanged() and (self.solver is None or self.solver.unchanged())

    def problem(self, inputs: tuple[Any, ...]) -> Problem:
        like = self.like
        return Problem(like.f, like.spec, inputs, in_dims=like.in_dims, plain=like.plain)


class CaptureEngine:
    """Recordings of one DEQ, and what kept others from being made.

    Attributes:
        fallbacks: Solves left to the eager engine, counted by reason.
        recorded: Recordings made.
        replayed: Solves made by replaying.
    """

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()
        self.recorded = self.replayed = 0
        self._shapes: dict[Any, _Shape] = {}
        self._known: OrderedDict[Any, _Known] = OrderedDict()
        self._seen: OrderedDict[Any, int] = OrderedDict()
        self._hopeless: OrderedDict[Any, str] = OrderedDict()
        self._restless = False
        self._clock = 0

    def solve(self, deq: "DEQ", plan: "Plan", inputs: tuple[Any, ...], z0: Tree) -> Solution | None:
        """The solution, or None if the eager engine is to do it; `fallbacks` says why."""
        if torch.compiler.is_compiling():  # without an exception, which tracing might stumble over
            self.fallbacks["a compiled region is around the solve"] += 1
            return None
        try:
            return self._solve(deq, plan, inputs, z0)
        except CannotCapture as reason:
            if not self.fallbacks[str(reason)] and deq.engine == "captured":
                message = f'engine="captured": {reason}; the eager engine is used instead.'
                warnings.warn(message, EquilibriumWarning, stacklevel=4)
            self.fallbacks[str(reason)] += 1
            return None

    def _solve(self, deq: "DEQ", plan: "Plan", inputs: tuple[Any, ...], z0: Tree) -> Solution:
        grad = torch.is_grad_enabled()
        _check_surroundings()
        _check_adjoint(plan, grad)
        start = deq.start(*inputs) if z0 is None else z0
        look, tensors, started = glance(deq, plan, inputs, start, grad)
        look = None if look is None else (inline(), look)
        problem = None
        with recording_now:
            known = self._known.get(look)
            recording = None if known is None else known.shape.free()
            # A look at a large cell takes a while. If nothing is lost by a solve in vain, it waits until the device has
            # something to do; parameters that have been replaced live as long as the recording.
            ahead = known is not None and recording is not None and known.goes_ahead and recording.may_run_in_vain
            if known is None or recording is None or not (ahead or known.unchanged()):
                problem = deq.problem(*inputs, z0=start)
                recording, known = self._study(look, deq, plan, problem, start, grad)
            self._clock += 1
            known.shape.used = self._clock
            used_inline(recording)
            lease = Lease(recording)
        if problem is None and recording.constants.modules:  # else it can wait until the device is at work
            problem = known.problem(inputs)
        sources = recording.load(tensors, started, problem)
        value, stats = recording.solve()
        if ahead and not self._still_holds(look, known):
            lease.release()
            return self._solve(deq, plan, inputs, start)
        self.replayed += 1
        problem = problem or known.problem(inputs)
        if inline() and not grad:  # what follows in the same recording need not derive it from parameters once more
            problem.scope._derived.update(recording.static.problem.scope._derived)
        problem._calls[0] += stats.nfe
        stats.nfe = problem.nfe
        record = BackwardRecord() if grad else None
        if recording.backward is None:
            # Out of the buffers, and at once in the dtypes of the state.
            value = [leaf.to(dtype, copy=True) for leaf, dtype in zip(value, problem.spec.dtypes, strict=True)]
            lease.release()
        else:
            report = _reporter(plan.adjoint, problem)
            value = list(_Captured.apply(lease, record, report, value, *known.watch.parameters, *sources))
        return Solution(value=problem.spec.unflatten(value), stats=stats, problem=problem, record=record)

    def _still_holds(self, look: Any, known: _Known) -> bool:
        """Whether what was launched is what is wanted; if not, it is forgotten."""
        with recording_now:  # which puts other parameters into the cell for a while
            if not known.unchanged():
                self._known.pop(look, None)
                return False
        return True

    def _study(
        self, look: Any, deq: "DEQ", plan: "Plan", problem: Problem, start: Tree, grad: bool
    ) -> tuple[Recording, _Known]:
        """A recording that nobody holds a lease of, made if need be, and what the next solve may rely on."""
        _check_steps(plan, problem.spec, grad)
        if self._restless:
            raise CannotCapture(RESTLESS)
        key = inline(), key_of(deq, plan, problem, grad), _learned_form(plan.solver, problem.spec.device)
        shape, recording = self._recording(key, deq, plan, problem, start, grad)
        like = Problem(problem.f, problem.spec, (), plain=problem.plain)
        like.in_dims = problem.in_dims
        solver = Watch(plan.solver) if isinstance(plan.solver, nn.Module) else None
        known = _Known(shape, Watch(deq.cell), solver, like)
        if look is not None:
            remember(self._known, look, known, MOST_KNOWN)
        return recording, known

    def _recording(
        self, key: Any, deq: "DEQ", plan: "Plan", problem: Problem, start: Tree, grad: bool
    ) -> tuple[_Shape, Recording]:
        if key in self._hopeless:
            raise CannotCapture(self._hopeless[key])
        remember(self._seen, key, self._seen.get(key, 0) + 1, MOST_REMEMBERED)
        if deq.engine == "auto" and not inline() and self._seen[key] < WORTH_RECORDING:
            raise CannotCapture("the shape is new")
        shape = self._shapes.get(key, _Shape())
        free = shape.free()
        if free is not None:
            return shape, free
        if len(shape.recordings) >= MOST_LEASES:
            raise CannotCapture(f"{MOST_LEASES} solves of this shape wait for their backward pass")
        if being_recorded():
            raise CannotCapture("what the solve is part of is being recorded, and nothing was prepared for it")
        made = self._record(key, deq, plan, problem, _detached(problem, start), grad)
        self.recorded += 1
        shape.recordings.append(made)
        self._shapes[key] = shape
        while len(self._shapes) > MOST_SHAPES:
            oldest = min((other for other in self._shapes if other != key), key=lambda other: self._shapes[other].used)
            self._shapes.pop(oldest).recordings.clear()
        return shape, made

    def _record(self, key: Any, deq: "DEQ", plan: "Plan", problem: Problem, z0: Leaves, grad: bool) -> Recording:
        before = Snapshot(deq.cell, problem.spec.device)
        try:
            made = Recording(deq, plan, problem, z0, grad)
            self._restless = key_of(deq, plan, problem, grad) != key[1]
            if self._restless:
                raise CannotCapture(RESTLESS)
            return made
        except Exception as error:  # a cell may do what a graph cannot hold, e.g. read a value on the host
            before.restore()  # the eager engine draws what it would have drawn
            if not isinstance(error, CannotCapture) and not _may_do_without(error, problem.spec.device):
                raise
            said = first_line(error)
            reason = said if isinstance(error, CannotCapture) else f"the cell cannot be recorded ({said})"
            remember(self._hopeless, key, reason, MOST_REMEMBERED)
            raise CannotCapture(reason) from error


def _may_do_without(error: Exception, device: torch.device) -> bool:
    """Whether the eager engine may do what could not be recorded: it launches other kernels, and may wait."""
    from equipoise.ops._backend import is_compiler_error

    return is_compiler_error(error) or (isinstance(error, RuntimeError) and device.type == "cuda")


def _learned_form(solver: Solver, device: torch.device) -> Any:
    """A learned solver as far as a recording depends on it; None for others, which are values."""
    if not isinstance(solver, HyperAnderson):
        return None
    return solver.config, tuple(module_form(module, device) for module in solver.modules())


def _detached(problem: Problem, start: Tree) -> Leaves:
    return [leaf.detach() for leaf in problem.start(start)]


def remember(table: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put a value into a table that keeps so many, those used last."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > most:
        table.popitem(last=False)


def _reporter(adjoint: Any, problem: Problem) -> Callable[[Stats], None]:
    plain = problem.plain

    def report(stats: Stats) -> None:
        if not adjoint.stop.fixed_budget:
            report_failure(stats, plain, adjoint.throw)

    return report


# What can be recorded


def _check_surroundings() -> None:
    """Raise unless a solve can be recorded, or replayed, here and now."""
    if inside_functorch_transform():
        raise CannotCapture("a torch.func transform is around the solve")
    if current_scope() is not None:
        raise CannotCapture("the solve is inside another one")
    if being_recorded() and not inline():
        raise CannotCapture("another recording is under way")
    if torch.is_anomaly_enabled():
        raise CannotCapture("anomaly detection looks at every gradient")
    if torch.is_grad_enabled() and saves_tensors_elsewhere():
        raise CannotCapture("hooks on saved tensors are in effect")


def _check_adjoint(plan: "Plan", grad: bool) -> None:
    adjoint = plan.adjoint
    if grad and (type(adjoint) is not Implicit or adjoint.any_order):
        raise CannotCapture(f"{adjoint!r} is not recorded, only Implicit() of first order is")
    if not grad and type(adjoint) not in PLAIN_WITHOUT_GRAD:
        raise CannotCapture(f"{type(adjoint).__name__} solves in its own way")


def _check_steps(plan: "Plan", spec: StateSpec, grad: bool) -> None:
    if spec.num_systems == 0 or 0 in [size for _, size in spec.flat_shapes]:
        raise CannotCapture("there is nothing to solve for")
    solves = [(plan.solver, plan.stop)]
    if grad and isinstance(plan.adjoint, Implicit):
        solves.append((plan.adjoint.solver, plan.adjoint.stop))
        if isinstance(plan.adjoint.solver, HyperAnderson):
            raise CannotCapture("HyperAnderson is recorded as a forward solver, not in the adjoint")
    for solver, stop in solves:
        obstacle = step_obstacle(solver, stop, spec)
        if inline() and not stop.fixed_budget:
            obstacle = "the host asks when a tolerance is met, which it cannot do inside of a larger recording"
        if obstacle:
            raise CannotCapture(obstacle)
