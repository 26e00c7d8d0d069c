"""One recording: the steps of a solve, and of its adjoint, on buffers of their own."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise import _leaves
from equipoise._compat import keep_backward_buffers, leaves_reached
from equipoise._problem import Problem, StateSpec, pullback
from equipoise._scope import SolveScope
from equipoise._solution import Stats, Status
from equipoise._stop import Stop
from equipoise._tape import Graphs, Reruns, tape_for
from equipoise._tree import Leaves, tree_flatten, tree_tensors, tree_unflatten
from equipoise.adjoints.base import sever
from equipoise.adjoints.implicit import Implicit
from equipoise.solvers import Anderson, Broyden, Picard, Solver

if TYPE_CHECKING:
    from equipoise._capture import Lease
    from equipoise._module import DEQ, Plan
    from equipoise.ops import Standing

# Steps between two questions to the device; also what a solve may do in vain after its last system has finished.
CHUNK = 4
# Steps of a fixed budget recorded in one piece.
LONGEST = 32


class CannotCapture(RuntimeError):
    """Why a solve is left to the eager engine."""


# Steps


def _stepper(solver: Solver, z: Leaves, stop: Stop, floor: float) -> tuple[Callable[[Leaves], None], "Standing", int]:
    """A step in place on z, given f(z); the standing it keeps; and the bytes its memory takes."""
    from equipoise.ops import AndersonMemory, BroydenMemory, Standing, anderson_step, broyden_step, picard_step

    standing = Standing.start(z)
    memory: Any = None
    if isinstance(solver, Anderson):
        memory = AndersonMemory.empty(z, solver.memory)

        def step(fz: Leaves) -> None:
            anderson_step(z, fz, memory, standing, stop=stop, floor=floor, ridge=solver.ridge, mixing=solver.mixing)
    elif isinstance(solver, Broyden):
        memory = BroydenMemory.empty(z, solver.memory or stop.max_steps)

        def step(fz: Leaves) -> None:
            broyden_step(z, fz, memory, standing, stop=stop, floor=floor, step=solver.step)
    else:
        assert isinstance(solver, Picard)

        def step(fz: Leaves) -> None:
            picard_step(z, fz, standing, stop=stop, floor=floor, damping=solver.damping)

    return step, standing, sum(tensor.nbytes for tensor in tree_tensors(vars(memory) if memory else ()))


def step_obstacle(solver: Solver, stop: Stop, spec: StateSpec) -> str | None:
    """Why steps of this solver cannot be recorded, if they cannot."""
    from equipoise.ops import anderson, broyden
    from equipoise.ops._backend import KERNEL_DTYPES, _has_triton

    if type(solver) not in (Anderson, Broyden, Picard):
        return f"{type(solver).__name__} has no recorded step"
    if isinstance(solver, Broyden) and solver.line_search:
        return "Broyden's line search reads results on the host"
    if spec.device.type != "cuda":
        return None
    if spec.work_dtype not in KERNEL_DTYPES or not _has_triton():
        return f"there is no kernel for {spec.work_dtype} states, or Triton is not installed"
    most = {Anderson: anderson.MOST_MEMORY, Broyden: broyden.MOST_MEMORY}.get(type(solver))
    slots = getattr(solver, "memory", None) or stop.max_steps
    if most is not None and slots > most:
        return f"the kernel of {type(solver).__name__} holds {most} steps, not {slots}"
    return None


class _Loop:
    """The recorded iteration of one map: z ← step(z, f(z)) until every system has met the stop rule."""

    def __init__(
        self,
        tape: Graphs | Reruns,
        evaluate: Callable[[Leaves], Leaves],
        z: Leaves,
        solver: Solver,
        stop: Stop,
        floor: float,
        casts: bool,
    ) -> None:
        self.z, self.stop = z, stop
        step, self.standing, self.bytes = _stepper(solver, z, stop, floor)
        self._step = step  # a graph knows addresses only: the memory of the solver lives as long as this does
        own = {leaf.untyped_storage().data_ptr() for leaf in z}

        def advance(steps: int) -> None:
            for _ in range(steps):
                # f may return its argument, in part or in another order, and z is about to be written over.
                step([leaf.clone() if _address(leaf) in own else leaf.contiguous() for leaf in evaluate(z)])

        self.whole = min(stop.max_steps, LONGEST if stop.fixed_budget else CHUNK)
        tape.rehearse(partial(advance, 1))
        with tape.together():
            self.first = tape.record(partial(advance, self.whole))
            left = stop.max_steps - self.whole
            lengths = {min(self.whole, left), left % self.whole} - {0}
            # If the first piece casts weights, the same number of steps is recorded once more without that.
            self.pieces = {} if casts else {self.whole: self.first}
            for length in sorted(lengths - self.pieces.keys()):
                self.pieces[length] = tape.record(partial(advance, length))

    def run(self) -> int:
        """Iterate from what `z` holds; return the number of evaluations made."""
        self.standing.restart(self.z)
        self.first()
        done, most = self.whole, self.stop.max_steps
        while done < most:
            # Waiting for the answer costs less than a chunk made in vain.
            if not self.stop.fixed_budget and not bool((self.standing.status < 0).any()):
                break
            length = min(self.whole, most - done)
            self.pieces[length]()
            done += length
        return done

    def finish(self, nfe: int) -> tuple[Leaves, Stats]:
        """The chosen iterates, in buffers that the next run overwrites, and statistics of their own."""
        stop, standing = self.stop, self.standing
        status, steps, residual = standing.status.long(), standing.steps.long(), standing.residual.clone()
        unfinished = status < 0
        steps = torch.where(unfinished | stop.fixed_budget, stop.max_steps, steps)
        status = torch.where(unfinished, int(Status.MAX_STEPS), status)
        if stop.fixed_budget:
            status = torch.where(unfinished & (residual == 0), int(Status.CONVERGED), status)
        value = standing.best
        if stop.select == "last":
            usable = _leaves.all_finite(self.z) & (status != Status.NONFINITE)
            status = torch.where(usable, status, int(Status.NONFINITE))
            value = [torch.where(usable[:, None], z, best) for z, best in zip(self.z, value, strict=True)]
            residual = torch.where(usable, standing.latest, residual)
        stats = Stats(status, residual, steps, nfe, lagged=stop.select == "last", solver_bytes=self.bytes)
        return value, stats


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# What a recording reads


@dataclass
class _Constants:
    """What a solve holds constant besides its inputs: values of scoped modules.

    Attributes:
        modules: Those modules, in the order they were asked.
        examples: What each was first applied to: a parameter itself, or a tensor of the right shape.
        nested: Whether a module was asked by another one, and so follows when that one is asked.
    """

    modules: list[nn.Module]
    examples: list[Tensor]
    nested: list[bool]

    @classmethod
    def of(cls, problem: Problem, z0: Leaves) -> "_Constants":
        """Evaluate f once and note what it holds constant."""
        modules: list[nn.Module] = []
        examples: list[Tensor] = []
        nested: list[bool] = []
        scope, depth, original = problem.scope, [0], problem.scope.value

        def value(module: nn.Module, x: Tensor) -> Any:
            if not any(module is known for known in modules):
                modules.append(module)
                examples.append(x if isinstance(x, nn.Parameter) else torch.empty_like(x))
                nested.append(depth[0] > 0)
            depth[0] += 1
            try:
                return original(module, x)
            finally:
                depth[0] -= 1

        scope.value = value  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                problem.evaluate(z0)
        finally:
            del scope.value
        if len(modules) != len({**scope._drawn, **scope._derived}):
            raise CannotCapture("a solve inside the cell holds values constant")
        return cls(modules, examples, nested)

    def values(self, problem: Problem, z0: Leaves) -> list[Any]:
        """Their values in the scope of a problem, drawn as the first evaluation of f would."""
        scope = problem.scope
        if any(module not in scope._drawn and module not in scope._derived for module in self.modules):
            outer = zip(self.modules, self.examples, self.nested, strict=True)
            if all(getattr(module, "draws_by_shape", False) for module, _, inside in outer if not inside):
                with problem.active():
                    for module, example in zip(self.modules, self.examples, strict=True):
                        scope.value(module, example)
            else:
                problem.evaluate(z0)
        return [scope.value(module, example) for module, example in zip(self.modules, self.examples, strict=True)]

    def fixed(self, scope: SolveScope, values: Iterable[Any]) -> SolveScope:
        """A scope that holds these values, whether they were drawn or derived."""
        held = dict(zip(self.modules, values, strict=True))
        drawn = {module: value for module, value in held.items() if module in scope._drawn}
        return scope._copy(drawn, {module: value for module, value in held.items() if module not in drawn})


class _Aliases:
    """The parameters of a cell as other leaves in the same storage, in effect while this context is open.

    So the graph of a recording ends in leaves of its own: what accumulates gradients in the parameters themselves
    belongs to the stream on which it was first needed, perhaps not that of the recording, and to hooks of others.
    """

    def __init__(self, cell: nn.Module, grad: bool) -> None:
        self.made: dict[int, nn.Parameter] = {}
        self.places: list[tuple[dict[str, Any], str]] = []
        for module in cell.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in self.made:
                    # Without gradients it wants one nevertheless: autocast keeps casts of such leaves only.
                    wants = parameter.requires_grad if grad else _may_want_gradient(parameter)
                    self.made[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=wants)
                self.places.append((module._parameters, name))
        self.originals: list[nn.Parameter] = []

    def of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [self.made[id(parameter)] for parameter in parameters]

    def __enter__(self) -> None:
        self.originals = [place[name] for place, name in self.places]
        for (place, name), original in zip(self.places, self.originals, strict=True):
            place[name] = self.made[id(original)]

    def __exit__(self, *error: object) -> None:
        for (place, name), original in zip(self.places, self.originals, strict=True):
            place[name] = original


def _may_want_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_inference()


class _Static:
    """f on buffers that belong to a recording: inputs, constants of the solve, aliases of parameters."""

    def __init__(self, deq: "DEQ", problem: Problem, constants: _Constants, z0: Leaves, grad: bool) -> None:
        self.inputs = _buffers(problem.inputs, grad)
        self.held = _buffers(constants.values(problem, z0), grad)
        self.aliases = _Aliases(deq.cell, grad)
        self.problem = Problem(problem.f, problem.spec, self.inputs, in_dims=problem.in_dims, plain=problem.plain)
        self.problem.scope, self.problem.autocast = constants.fixed(problem.scope, self.held), problem.autocast
        parameters = self.aliases.of(p for p in deq.cell.parameters() if p.requires_grad) if grad else []
        self.wanted = [*parameters, *(t for t in tree_tensors((self.inputs, self.held)) if t.requires_grad)]

    def evaluate(self, z: Leaves) -> Leaves:
        with self.aliases:
            return self.problem.evaluate(z)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Where parts of f are evaluated again by a vector-Jacobian product, they find what f finds."""
        compiled = self.problem.plain is not self.problem.f
        with self.aliases, self.problem.active(), keep_backward_buffers() if compiled else nullcontext():
            yield


def _buffers(tree: Any, grad: bool) -> Any:
    """A copy of a tree in buffers of its own."""
    leaves, form = tree_flatten(tree)
    copies = [leaf if not isinstance(leaf, Tensor) else torch.empty_like(leaf).copy_(leaf) for leaf in leaves]
    for copy, leaf in zip(copies, leaves, strict=True):
        if isinstance(leaf, Tensor):
            copy.requires_grad_(leaf.requires_grad if grad else _may_want_gradient(copy))  # as in `_Aliases`
    return tree_unflatten(copies, form)


def _copy(places: Any, values: Any) -> None:
    for place, value in zip(tree_tensors(places), tree_tensors(values), strict=True):
        place.copy_(value)


class _Adjoint:
    """The graph of f at z*, and products with it."""

    def __init__(self, static: _Static, like: Leaves) -> None:
        self.static = static
        self.point, self.cotangent, self.found = ([torch.zeros_like(leaf) for leaf in like] for _ in range(3))
        self.start: Leaves = []
        self.image: Leaves = []
        self.grads: tuple[Tensor | None, ...] = ()

    def attach(self) -> None:
        with torch.enable_grad():
            self.start = sever(self.point)
            self.image = self.static.evaluate(self.start)

    def pull(self, u: Leaves) -> Leaves:
        with self.static.active():
            pulled = pullback(self.image, self.start, u)
        return [a + g for a, g in zip(pulled, self.cotangent, strict=True)]

    def deliver(self) -> None:
        pairs = [(f, u) for f, u in zip(self.image, self.found, strict=True) if f.requires_grad]
        images, cotangents = zip(*pairs, strict=True)
        with self.static.active():
            self.grads = torch.autograd.grad(
                images, self.static.wanted, cotangents, retain_graph=True, allow_unused=True
            )

    def has_gradient(self) -> bool:
        """Whether the graph reaches anything that wants a gradient; an error if some of it would be lost."""
        ends = [tensor for tensor in self.image if tensor.requires_grad and tensor.grad_fn is None]  # f returns a leaf
        ends += leaves_reached(self.image, except_for=self.start)
        if any(all(end is not wanted for wanted in self.static.wanted) for end in ends):
            raise CannotCapture("the cell uses a tensor that wants a gradient and is neither a parameter nor an input")
        return bool(ends)


# One recording


class Recording:
    """Buffers and graphs for one shape of one DEQ under one plan."""

    def __init__(self, deq: "DEQ", plan: "Plan", problem: Problem, z0: Leaves, grad: bool) -> None:
        self.lease: weakref.ref[Lease] | None = None
        self.turn = 0
        self.tape = tape_for(problem.spec.device)
        self.constants = _Constants.of(problem, z0)
        with _untouched(deq.cell, problem.spec.device), torch.inference_mode(False), torch.no_grad():
            self.static = _Static(deq, problem, self.constants, z0, grad)
            self.backward: _Loop | None = None
            try:
                with nullcontext() if deq._compiled else _no_draws(deq.cell):
                    self._record(plan, [leaf.clone() for leaf in z0], problem.floor, grad)
            finally:
                self.tape.tidy()

    def _record(self, plan: "Plan", z: Leaves, floor: float, grad: bool) -> None:
        tape, casts = self.tape, self.static.problem.autocast is not None
        self.forward = _Loop(tape, self.static.evaluate, z, plan.solver, plan.stop, floor, casts)
        if not grad:
            return
        assert isinstance(plan.adjoint, Implicit)
        self.adjoint = adjoint = _Adjoint(self.static, z)
        tape.rehearse(adjoint.attach)
        if not adjoint.has_gradient():
            return
        with tape.together():
            self.attach = tape.record(adjoint.attach)
        self.attach()  # what follows is rehearsed on this graph, where a saved index must not be arbitrary
        u = [torch.zeros_like(leaf) for leaf in z]
        self.backward = _Loop(tape, adjoint.pull, u, plan.adjoint.solver, plan.adjoint.stop, floor, casts)
        tape.rehearse(adjoint.deliver)
        with tape.together():
            self.deliver = tape.record(adjoint.deliver)

    @torch.no_grad()
    def load(self, problem: Problem, z0: Leaves) -> list[Tensor]:
        """Take in a problem and its start; return the tensors besides parameters that gradients go to."""
        self.tape.take_turn()
        values = self.constants.values(problem, z0)
        _copy(self.static.inputs, problem.inputs)
        _copy(self.static.held, values)
        _copy(self.forward.z, z0)
        return [tensor for tensor in tree_tensors((problem.inputs, values)) if tensor.requires_grad]

    @torch.no_grad()
    def solve(self) -> tuple[Leaves, Stats]:
        """The equilibrium of what was loaded, in buffers; if there is an adjoint, f is evaluated there for it."""
        nfe = self.forward.run()
        value, stats = self.forward.finish(nfe + (self.backward is not None))
        if self.backward is not None:
            _copy(self.adjoint.point, value)
            self.attach()
        return value, stats

    @torch.no_grad()
    def pull_back(self, grads: Iterable[Tensor | None]) -> tuple[list[Tensor | None], Stats]:
        """The gradients of what wants one for a cotangent of the equilibrium; statistics of the adjoint solve."""
        loop, adjoint = self.backward, self.adjoint
        assert loop is not None
        self.tape.take_turn()
        for place, u, grad in zip(adjoint.cotangent, loop.z, grads, strict=True):
            place.zero_() if grad is None else place.copy_(grad)
            u.copy_(place)
        nfe = loop.run()
        value, stats = loop.finish(nfe + 1)
        _copy(adjoint.found, value)
        self.deliver()
        return [None if grad is None else grad.clone() for grad in adjoint.grads], stats


@contextmanager
def _no_draws(cell: nn.Module) -> Iterator[None]:
    """Make it an error to ask for a constant that the recording does not hold: it would be the same in all solves."""

    def refuse(x: Tensor) -> Any:
        raise CannotCapture("a constant of the solve is asked for outside of it, or with gradients only")

    scoped = [module for module in cell.modules() if hasattr(module, "begin_solve")]
    for module in scoped:
        module.__dict__["begin_solve"] = refuse
    try:
        yield
    finally:
        for module in scoped:
            del module.__dict__["begin_solve"]


class Snapshot:
    """Buffers of a cell and states of random generators, to go back to."""

    def __init__(self, cell: nn.Module, device: torch.device) -> None:
        self.device = device
        self.buffers = [(buffer, _version(buffer), buffer.detach().clone()) for buffer in cell.buffers()]
        self.random = torch.get_rng_state()
        self.on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, version, value in self.buffers:
            if version is None or _version(buffer) != version:  # else a graph may need it as it is
                buffer.copy_(value)
        torch.set_rng_state(self.random)
        if self.on_device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@contextmanager
def _untouched(cell: nn.Module, device: torch.device) -> Iterator[None]:
    """Undo what evaluations made for a recording do to buffers and random generators."""
    before = Snapshot(cell, device)
    try:
        yield
    finally:
        before.restore()
