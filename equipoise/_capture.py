"""The captured engine: a solve as replays of recorded steps.

On a GPU the Python of a step costs more than its kernels. So steps of cell, solver and stop rule are recorded once per
shape, in place on buffers that belong to the recording, and replayed; only the question whether all systems are done
comes back to the host, once per chunk of steps. Under the implicit adjoint the evaluation at z*, the adjoint's steps
and the last product, which carries the gradient to parameters and inputs, are recorded too.

A recording is leased for a solve. In training the lease lasts until the backward pass has run or the solution is
dropped, so that two forwards before one backward use two recordings; beyond `MOST_LEASES` of them the eager engine
takes over. Parameters are read where they are: updated in place, they stay valid.

The same code runs on the CPU, where a recording is simply run again: slower than the eager engine, and a way to test.
docs/maths/engines.md says what is recorded and what is not.
"""

import enum
import threading
import types
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise._compat import inside_functorch_transform, saves_tensors_elsewhere
from equipoise._problem import Problem, StateSpec
from equipoise._recording import CannotCapture, Recording, Snapshot, step_obstacle
from equipoise._scope import current_scope
from equipoise._solution import BackwardRecord, EquilibriumWarning, Solution, Stats
from equipoise._tree import Leaves, Tree, tree_flatten, tree_tensors
from equipoise.adjoints.base import refuse_double_backward, report_failure
from equipoise.adjoints.implicit import Implicit
from equipoise.adjoints.neumann import Neumann
from equipoise.adjoints.phantom import OneStep, Phantom
from equipoise.adjoints.unroll import Unroll

if TYPE_CHECKING:
    from equipoise._module import DEQ, Plan

ENGINES = ("auto", "eager", "captured")

# Recordings of one shape that may be in use at once, shapes with recordings, and shapes remembered without.
MOST_LEASES = 2
MOST_SHAPES = 16
MOST_REMEMBERED = 256
# Calls with a shape after which "auto" records it: a shape seen once may never come again.
WORTH_RECORDING = 2

# Adjoints that leave a solve without gradients to the solver and the stop rule of the plan.
PLAIN_WITHOUT_GRAD = (Implicit, Neumann, OneStep, Phantom, Unroll)
# Values that are compared: a recording holds for one value of them.
PLAIN_VALUES = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
# What every module has, and what is looked at otherwise; `training` matters.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
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


_recording_now = threading.RLock()  # one recording at a time in a process


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
        self._shapes: OrderedDict[Any, list[Recording]] = OrderedDict()
        self._seen: OrderedDict[Any, int] = OrderedDict()
        self._hopeless: OrderedDict[Any, str] = OrderedDict()
        self._restless = False

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
        _check_surroundings(deq, inputs)
        _check_adjoint(plan, grad)
        start = deq.start(*inputs) if z0 is None else z0
        problem = deq.problem(*inputs, z0=start)
        _check_steps(plan, problem.spec, grad)
        leaves = [leaf.detach() for leaf in problem.start(start)]
        with _recording_now:
            lease = Lease(self._recording(deq, plan, problem, leaves, grad))
        recording = lease.recording
        sources = recording.load(problem, leaves)
        value, stats = recording.solve()
        self.replayed += 1
        problem._calls[0] += stats.nfe
        stats.nfe = problem.nfe
        record = BackwardRecord() if grad else None
        if recording.backward is None:
            value = [leaf.clone() for leaf in value]
            lease.release()
        else:
            parameters = [p for p in deq.cell.parameters() if p.requires_grad]
            report = _reporter(plan.adjoint, problem)
            value = list(_Captured.apply(lease, record, report, value, *parameters, *sources))
        return Solution(value=problem.spec.unflatten(value), stats=stats, problem=problem, record=record)

    def _recording(self, deq: "DEQ", plan: "Plan", problem: Problem, z0: Leaves, grad: bool) -> Recording:
        """A recording that nobody holds a lease of, made if need be."""
        if self._restless:
            raise CannotCapture(RESTLESS)
        key = _key(deq, plan, problem, grad)
        if key in self._hopeless:
            raise CannotCapture(self._hopeless[key])
        _remember(self._seen, key, self._seen.get(key, 0) + 1, MOST_REMEMBERED)
        if deq.engine == "auto" and self._seen[key] < WORTH_RECORDING:
            raise CannotCapture("the shape is new")
        known = self._shapes.get(key, [])
        for recording in known:
            if recording.lease is None or recording.lease() is None:
                self._shapes.move_to_end(key)
                return recording
        if len(known) >= MOST_LEASES:
            raise CannotCapture(f"{MOST_LEASES} solves of this shape wait for their backward pass")
        made = self._record(key, deq, plan, problem, z0, grad)
        self.recorded += 1
        _remember(self._shapes, key, [*known, made], MOST_SHAPES)
        return made

    def _record(self, key: Any, deq: "DEQ", plan: "Plan", problem: Problem, z0: Leaves, grad: bool) -> Recording:
        before = Snapshot(deq.cell, problem.spec.device)
        try:
            made = Recording(deq, plan, problem, z0, grad)
            self._restless = _key(deq, plan, problem, grad) != key
            if self._restless:
                raise CannotCapture(RESTLESS)
            return made
        except RuntimeError as error:  # a cell may do what a graph cannot hold, e.g. read a value on the host
            before.restore()  # the eager engine draws what it would have drawn
            if not isinstance(error, CannotCapture) and problem.spec.device.type != "cuda":
                raise
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            reason = first_line if isinstance(error, CannotCapture) else f"the cell cannot be recorded ({first_line})"
            _remember(self._hopeless, key, reason, MOST_REMEMBERED)
            raise CannotCapture(reason) from error


def _remember(table: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
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


# What can be recorded, and what a recording holds for


def _check_surroundings(deq: "DEQ", inputs: tuple[Any, ...]) -> None:
    """Raise unless a solve can be recorded, or replayed, here and now."""
    on_cuda = any(tensor.is_cuda for tensor in tree_tensors(inputs))
    if deq.engine == "auto" and not on_cuda:
        raise CannotCapture("there is no CUDA device in use")
    if inside_functorch_transform():
        raise CannotCapture("a torch.func transform is around the solve")
    if current_scope() is not None:
        raise CannotCapture("the solve is inside another one")
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
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
    for solver, stop in solves:
        obstacle = step_obstacle(solver, stop, spec)
        if obstacle:
            raise CannotCapture(obstacle)


def _key(deq: "DEQ", plan: "Plan", problem: Problem, grad: bool) -> Any:
    """What a recording depends on besides the values of its inputs, parameters and buffers."""
    spec = problem.spec
    leaves, tree = tree_flatten(problem.inputs)
    return (
        (plan if grad else (plan.solver, plan.stop), grad),
        (spec.shapes, spec.dtypes, spec.orders, spec.batch_dims, str(spec.treedef)),
        (tuple(_form(leaf, spec.device, grad) for leaf in leaves), str(tree)),
        (tuple(_module_form(module, spec.device) for module in deq.cell.modules()), deq._compiled),
        (problem.autocast, torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
    )


def _form(leaf: Any, device: torch.device, grad: bool) -> Any:
    """An input as far as a recording depends on it: a tensor is copied, anything else is part of the recording."""
    if isinstance(leaf, Tensor):
        if leaf.device != device:
            raise CannotCapture(f"an input is on {leaf.device}, the state on {device}")
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad and grad
    value = _plain(leaf)
    if value is None:
        raise CannotCapture(f"an input is of type {type(leaf).__name__}, which can neither be copied nor compared")
    return value


def _plain(value: Any) -> Any:
    """Something that compares as a plain value does, NaN included; None for what is not a plain value."""
    kind = type(value)
    if kind in PLAIN_VALUES:
        return kind, repr(value) if kind is float else value
    if kind is tuple:
        parts = [_plain(part) for part in value]
        return None if None in parts else tuple(parts)
    return (kind, value) if isinstance(value, enum.Enum) else None


def _seen(value: Any, device: torch.device) -> Any:
    """An attribute of a module as far as a recording depends on it and a change of it can be seen."""
    if type(value) in PLAIN_VALUES:
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return _place(value, device)
    return value if isinstance(value, FUNCTIONS) else _plain(value)


def _module_form(module: nn.Module, device: torch.device) -> Any:
    """A module as far as a recording depends on it: its kind, plain attributes, and where its tensors are."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise CannotCapture("the cell has hooks, which a replay would not call")
    # Looked at in every solve, so the plain attributes of every module are passed over quickly.
    attributes = [(name, _seen(value, device)) for name, value in vars(module).items() if name not in OF_EVERY_MODULE]
    own = [_place(tensor, device) for tensor in (*module._parameters.values(), *module._buffers.values())]
    if "_is_fsdp_managed_module" in vars(module):
        raise CannotCapture("the cell is sharded")
    return type(module), tuple(attributes), tuple(own)


def _place(tensor: Tensor | None, device: torch.device) -> Any:
    if tensor is None:
        return None
    if hasattr(tensor, "placements"):
        raise CannotCapture("the cell is sharded")
    if tensor.device != device:
        raise CannotCapture(f"the cell has a tensor on {tensor.device}, the state is on {device}")
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
