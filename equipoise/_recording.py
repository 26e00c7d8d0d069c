"""One recording: the steps of a solve, and of its adjoint, on buffers of their own."""

import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise._compat import keep_backward_buffers, leaves_reached
from equipoise._loop import Buffers, Iteration, Level, Loop, Part, shrunk
from equipoise._method import Method
from equipoise._problem import HALF, Problem, pullback
from equipoise._scope import SolveScope
from equipoise._solution import Stats
from equipoise._tape import Work, copy_all, recording_now, tape_for
from equipoise._tree import Leaves, tree_flatten, tree_map, tree_tensors, tree_unflatten
from equipoise.adjoints.base import sever
from equipoise.adjoints.implicit import Implicit

if TYPE_CHECKING:
    from equipoise._capture import Lease
    from equipoise._module import DEQ, Plan


class CannotCapture(RuntimeError):
    """Why a solve is left to the eager engine."""


# What a recording reads


def _image(problem: Problem, z: Leaves) -> Leaves:
    """f(z), half-precision leaves as they are: steps read them so, and to widen them first takes a pass over each."""
    spec = problem.spec
    with problem.active():
        value = problem.f(spec.unflatten(z), *problem.inputs)
    if not problem._checked:  # f may be made for one size of batch
        spec.check(value, problem.autocast)
        problem._checked = True
    return [leaf if leaf.dtype in HALF else leaf.to(spec.work_dtype) for leaf in spec.flatten(value)]


@dataclass
class _Constants:
    """What a solve holds constant besides its inputs: values of scoped modules.

    Attributes:
        modules: Those modules, in the order they were asked.
        examples: What each was first applied to: a parameter itself, or a tensor of the right shape.
        nested: Whether a module was asked by another one, and so follows when that one is asked.
        narrow: The half-precision dtype of all that f returns, if it is one.
    """

    modules: list[nn.Module] = field(default_factory=list)
    examples: list[Tensor] = field(default_factory=list)
    nested: list[bool] = field(default_factory=list)
    narrow: torch.dtype | None = None

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
                problem._calls[0] += 1
                dtypes = {leaf.dtype for leaf in _image(problem, z0)}
        finally:
            del scope.value
        if len(modules) != len({**scope._drawn, **scope._derived}):
            raise CannotCapture("a solve inside the cell holds values constant")
        narrow = dtypes.pop() if len(dtypes) == 1 else None
        return cls(modules, examples, nested, narrow if narrow in HALF else None)

    def follow(self, scope: SolveScope) -> bool:
        """Whether all of them follow from parameters, so that they can be computed where these are read."""
        by_shape = all(getattr(module, "draws_by_shape", False) for module in self.modules)
        return by_shape and not any(self.nested) and all(module in scope._derived for module in self.modules)

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


class Aliases:
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
        self.aliases = Aliases(deq.cell, grad)
        self.problem = Problem(problem.f, problem.spec, self.inputs, in_dims=problem.in_dims, plain=problem.plain)
        self.problem.scope, self.problem.autocast = constants.fixed(problem.scope, self.held), problem.autocast
        self.wanted: list[Tensor] = []
        if grad:
            parameters = self.aliases.of(p for p in deq.cell.parameters() if p.requires_grad)
            self.wanted = [*parameters, *(t for t in tree_tensors((self.inputs, self.held)) if t.requires_grad)]

    def evaluate(self, z: Leaves) -> Leaves:
        with self.aliases:
            return self.problem.evaluate(z)

    def image(self, z: Leaves) -> Leaves:
        """As `evaluate`, for steps that read half precision."""
        with self.aliases:
            return _image(self.problem, z)

    def derive(self, constants: _Constants) -> None:
        """Compute anew what the solve holds constant, all of it from parameters; later pieces read it where it is."""
        with self.aliases, self.problem.active():
            pairs = zip(constants.modules, constants.examples, strict=True)
            # By the class: while something is recorded, modules refuse to be asked.
            values = [type(module).begin_solve(module, example.detach()) for module, example in pairs]  # type: ignore[attr-defined]
        # Leaves that want a gradient, as in `Aliases`.
        values = tree_map(lambda x: x.requires_grad_(_may_want_gradient(x)) if isinstance(x, Tensor) else x, values)
        self.problem.scope._derived.update(zip(constants.modules, values, strict=True))
        self.held = []

    @property
    def can_shrink(self) -> bool:
        """Whether f on fewer systems costs less, and is the same f."""
        some = torch.zeros(1, dtype=torch.int64, device=self.problem.spec.device)
        return self.problem.can_slice and self.problem.scope.rows(some, self.problem.num_systems) is not None

    def part(self, size: int, narrow: bool) -> Part:
        """f on so many systems, on buffers that follow from the ones here; `narrow` as in `image`."""
        whole = self.problem
        fewer = whole.rows(torch.arange(size, device=whole.spec.device))
        fewer._checked = False  # f may be made for one size of batch
        trees = [*zip(fewer.inputs, whole.inputs, whole.in_dims, strict=True)]
        trees += [(drawn, whole.scope._drawn[module], 0) for module, drawn in fewer.scope._drawn.items()]
        copies = []
        for ours, theirs, axis in trees:
            for place, source in zip(tree_tensors(ours), tree_tensors(theirs), strict=True):
                if axis is not None and place is not source:  # else all systems share it
                    copies.append((place.requires_grad_(source.requires_grad), source, axis))  # as in `Aliases`

        def evaluate(z: Leaves) -> Leaves:
            with self.aliases:
                return _image(fewer, z) if narrow else fewer.evaluate(z)

        return Part(size, evaluate, copies)

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
            copy.requires_grad_(leaf.requires_grad if grad else _may_want_gradient(copy))  # as in `Aliases`
    return tree_unflatten(copies, form)


class _Adjoint:
    """The graph of f at z*, and products with it."""

    def __init__(self, static: _Static, root: Leaves) -> None:
        self.static, self.root = static, root
        self.point, self.cotangent = ([torch.zeros_like(leaf) for leaf in root] for _ in range(2))
        self.start: Leaves = []
        self.image: Leaves = []
        self.grads: tuple[Tensor | None, ...] = ()

    def attach(self) -> None:
        copy_all(self.point, self.root)
        with torch.enable_grad():
            self.start = sever(self.point)
            self.image = self.static.evaluate(self.start)

    def pull(self, u: Leaves) -> Leaves:
        with self.static.active():
            pulled = pullback(self.image, self.start, u)
        return [a + g for a, g in zip(pulled, self.cotangent, strict=True)]

    def deliver(self, u: Leaves) -> None:
        pairs = [(f, cotangent) for f, cotangent in zip(self.image, u, strict=True) if f.requires_grad]
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
        self.turn, self.draws = 0, False
        self.tape = tape_for(problem.spec.device)
        self.cell, self.compiled = deq.cell, deq._compiled is not None
        self.constants = constants = _Constants.of(problem, z0)
        self.backward: Iteration | None = None
        # Without gradients what follows from parameters is computed by the recording: all it takes is one replay.
        derives = bool(constants.modules) and not grad and constants.follow(problem.scope)
        with self._recording():
            self.static = static = _Static(deq, problem, constants, z0, grad)
            half = problem.autocast in HALF
            self.method = Method(plan.solver, plan.stop, problem.floor, static.problem, constants.narrow, half)
            self._record(plan, [leaf.clone() for leaf in z0], grad, constants if derives else None)
        if derives:
            self.constants = _Constants()
        given = static.inputs if derives else (static.inputs, static.held)
        # The start is taken in as it is: it has the shapes of the state, perhaps another dtype.
        work = dataclasses.replace(problem.spec, dtypes=(problem.spec.work_dtype,) * len(z0))
        self.places = [*tree_tensors(given), *tree_tensors(work.unflatten(self.forward.loop.buffers.z))]

    @property
    def may_run_in_vain(self) -> bool:
        """Whether a solve of it that turns out to be of no use leaves no trace, given that f writes to no tensor."""
        plain = self.backward is None and not self.constants.modules and not self.draws
        return plain and bool(self.forward.loop.sequence) and not self.tape.runs_python

    @contextmanager
    def _recording(self) -> Iterator[None]:
        before = Snapshot(self.cell, self.tape.device)
        with recording_now, _restored(before), torch.inference_mode(False), torch.no_grad():
            try:
                with nullcontext() if self.compiled else _no_draws(self.cell):
                    yield
                self.draws = self.draws or before.drawn()
            finally:
                self.tape.tidy()

    def _record(self, plan: "Plan", z: Leaves, grad: bool, derived: _Constants | None) -> None:
        tape, static, forward = self.tape, self.static, Buffers(z, self.method)
        evaluate = static.image if self.method.takes_half else static.evaluate
        begin = None if derived is None else _begin_derived(static, derived, self.method, forward)
        self.forward = Iteration(Loop(tape, evaluate, forward, self.method, begin), static.can_shrink)
        if not grad:
            return
        assert isinstance(plan.adjoint, Implicit)
        self.adjoint = adjoint = _Adjoint(self.static, forward.value)
        tape.rehearse(adjoint.attach)
        if not adjoint.has_gradient():
            return
        with tape.together():
            self.attach = tape.record(adjoint.attach)
        self.attach()  # what follows is rehearsed on this graph, where a saved index must not be arbitrary
        method = Method(plan.adjoint.solver, plan.adjoint.stop, self.method.floor, half=self.method.half)
        backward = Buffers([torch.zeros_like(leaf) for leaf in z], method)
        self.backward = Iteration(Loop(tape, adjoint.pull, backward, method, _begin(adjoint, backward)), shrinks=False)
        tape.rehearse(partial(adjoint.deliver, backward.value))
        with tape.together():
            self.deliver = tape.record(partial(adjoint.deliver, backward.value))

    @torch.no_grad()
    def load(self, inputs: Sequence[Tensor], start: Sequence[Tensor], problem: Problem | None) -> list[Tensor]:
        """Take in the tensors of a problem and its start.

        Args:
            inputs: The tensors among its inputs.
            start: Those of the state it is solved from.
            problem: The problem itself; needed if it holds anything constant that is not computed by the recording.

        Returns:
            The tensors besides parameters that gradients go to.
        """
        self.tape.take_turn()
        values: list[Tensor] = []
        if self.constants.modules:
            assert problem is not None
            z0 = [leaf.detach().to(problem.spec.work_dtype).contiguous() for leaf in problem.spec.flatten(list(start))]
            values = tree_tensors(self.constants.values(problem, z0))
        copy_all(self.places, [*inputs, *values, *start])
        return [tensor for tensor in (*inputs, *values) if tensor.requires_grad]

    @torch.no_grad()
    def solve(self) -> tuple[Leaves, Stats]:
        """The equilibrium of what was loaded, in buffers; if there is an adjoint, f is evaluated there for it."""
        nfe = self.forward.run(self._shrunk)
        if self.backward is not None:
            self.attach()
        buffers = self.forward.loop.buffers
        return buffers.value, buffers.stats(self.method.stop, nfe + (self.backward is not None))

    def let_go(self) -> None:
        """Drop the graph at z*: for recordings run from Python, whose next solve makes it anew."""
        if self.backward is not None:
            self.adjoint.start, self.adjoint.image, self.adjoint.grads = [], [], ()

    def _shrunk(self, size: int) -> Level | None:
        """A loop for so many of the systems; None if that cannot be recorded."""
        try:
            with self._recording():
                part = self.static.part(size, self.method.takes_half)
                return shrunk(self.tape, self.forward.loop.buffers, part, self.method)
        except (RuntimeError, ValueError):  # f may be made for one size of batch; it goes on with that
            return None

    @torch.no_grad()
    def pull_back(self, grads: Iterable[Tensor | None]) -> tuple[list[Tensor | None], Stats]:
        """The gradients of what wants one for a cotangent of the equilibrium; statistics of the adjoint solve."""
        iteration, adjoint = self.backward, self.adjoint
        assert iteration is not None
        self.tape.take_turn()
        for place, grad in zip(adjoint.cotangent, grads, strict=True):
            place.zero_() if grad is None else place.copy_(grad)
        nfe = iteration.run(lambda size: None)
        self.deliver()
        found = [grad for grad in adjoint.grads if grad is not None]
        copies = [torch.empty_like(grad) for grad in found]
        copy_all(copies, found)
        rest = iter(copies)
        loop = iteration.loop
        return [grad if grad is None else next(rest) for grad in adjoint.grads], loop.buffers.stats(loop.stop, nfe + 1)


def _begin(adjoint: _Adjoint, buffers: Buffers) -> Work:
    def begin() -> None:
        copy_all(buffers.z, adjoint.cotangent)
        buffers.restart()

    return begin


def _begin_derived(static: _Static, constants: _Constants, method: Method, buffers: Buffers) -> Work:
    def begin() -> None:
        static.derive(constants)
        method.begin(buffers)

    return begin


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

    def drawn(self) -> bool:
        """Whether a random number has been drawn since."""
        if self.on_device is not None and not torch.equal(torch.cuda.get_rng_state(self.device), self.on_device):
            return True
        return not torch.equal(torch.get_rng_state(), self.random)

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
def _restored(before: Snapshot) -> Iterator[None]:
    """Undo what evaluations made for a recording do to buffers and random generators."""
    try:
        yield
    finally:
        before.restore()
