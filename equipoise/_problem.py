"""A fixed-point problem as solvers see it: f on a batch of independent systems stored leaf by leaf."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import _leaves
from equipoise._compat import autocast_dtype, inside_functorch_transform, reenter_autocast
from equipoise._errors import require_gradients
from equipoise._scope import SolveScope
from equipoise._stop import precision_floor
from equipoise._tree import Leaves, Tree, TreeDef, tree_flatten, tree_map, tree_tensors, tree_unflatten

HALF = (torch.bfloat16, torch.float16)
# Axis orders that put channels last in storage, by number of axes.
CHANNELS_LAST = {4: ((0, 2, 3, 1), torch.channels_last), 5: ((0, 2, 3, 4, 1), torch.channels_last_3d)}


@dataclass(frozen=True)
class StateSpec:
    """Structure of a state tree, and how it becomes one (N, D_i) matrix per leaf and back, without copies.

    Attributes:
        treedef: Structure of the tree.
        shapes: Shape of each leaf.
        dtypes: Dtype of each leaf.
        orders: Storage order of each leaf's axes: channels_last leaves are flattened in their own order.
        batch_dims: Leading axes that index independent systems; 0 makes the whole state one coupled system.
        device: Where the state lives.
        work_dtype: What solvers compute in: float32 for half-precision states, else the states' own.
        flat_shapes: Shape (N, D_i) of each leaf inside a solve.
    """

    treedef: TreeDef
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    batch_dims: int
    device: torch.device

    def __post_init__(self) -> None:
        # Read at every evaluation, so computed once.
        work = torch.float32
        for dtype in self.dtypes:
            if dtype not in HALF:
                work = torch.promote_types(work, dtype)
        flat = tuple((shape[: self.batch_dims].numel(), shape[self.batch_dims :].numel()) for shape in self.shapes)
        object.__setattr__(self, "work_dtype", work)
        object.__setattr__(self, "flat_shapes", flat)

    work_dtype: torch.dtype = field(init=False, compare=False)
    flat_shapes: tuple[tuple[int, int], ...] = field(init=False, compare=False)

    @classmethod
    def of(cls, z0: Tree, batch_dims: int = 1) -> "StateSpec":
        """Read the structure off an initial state, refusing what cannot be one."""
        if not isinstance(batch_dims, int) or isinstance(batch_dims, bool) or batch_dims < 0:
            raise ValueError(f"batch_dims must be a non-negative integer, got {batch_dims!r}.")
        leaves, treedef = tree_flatten(z0)
        if not leaves:
            raise ValueError(f"z0 holds no tensors: got {z0!r}. Expected a tensor or a tuple, list or dict of tensors.")
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"z0: leaf {i} is {type(leaf).__name__} ({leaf!r}); every leaf must be a tensor.")
            if not leaf.is_floating_point():
                raise TypeError(f"z0: leaf {i} has dtype {leaf.dtype}; a state must be real floating point.")
            if leaf.dim() < batch_dims:
                raise ValueError(
                    f"z0: leaf {i} of shape {tuple(leaf.shape)} has fewer than batch_dims={batch_dims} axes."
                )
            if leaf.device != leaves[0].device:
                raise ValueError(f"z0: leaf {i} is on {leaf.device}, leaf 0 on {leaves[0].device}; use one device.")
            if leaf.shape[:batch_dims] != leaves[0].shape[:batch_dims]:
                raise ValueError(
                    f"z0: leaf {i} has batch shape {tuple(leaf.shape[:batch_dims])}, leaf 0 has "
                    f"{tuple(leaves[0].shape[:batch_dims])}; the leading {batch_dims} axes index the systems."
                )
        return cls(
            treedef,
            tuple(leaf.shape for leaf in leaves),
            tuple(leaf.dtype for leaf in leaves),
            tuple(_storage_order(leaf) if batch_dims <= 1 else None for leaf in leaves),
            batch_dims,
            leaves[0].device,
        )

    @property
    def num_systems(self) -> int:
        return self.flat_shapes[0][0]

    @property
    def is_flat(self) -> bool:
        """Whether a state is one (N, D) tensor in the work dtype, its own only leaf."""
        one = len(self.shapes) == 1 and self.treedef.is_leaf() and self.orders[0] is None
        return one and self.shapes[0] == self.flat_shapes[0] and self.dtypes[0] == self.work_dtype

    def flatten(self, tree: Tree) -> Leaves:
        """Tree to (N, D_i) leaves, in the tree's own dtypes."""
        tensors = [tree] if isinstance(tree, Tensor) else tree_flatten(tree)[0]
        flat = []
        for tensor, order, shape in zip(tensors, self.orders, self.flat_shapes, strict=True):
            stored = tensor if order is None else tensor.permute(order)
            flat.append(stored if stored.shape == shape else stored.reshape(shape))
        return flat

    def unflatten(self, leaves: Leaves) -> Tree:
        """Inverse of `flatten`; leaves are cast to the state's dtypes."""
        tensors = []
        for leaf, order, shape, dtype in zip(leaves, self.orders, self.shapes, self.dtypes, strict=True):
            leaf = leaf.to(dtype)
            if order is not None:
                stored = leaf.view([shape[axis] for axis in order])
                leaf = stored.permute([order.index(axis) for axis in range(len(order))])
            tensors.append(leaf if leaf.shape == shape else leaf.view(shape))
        return tensors[0] if len(tensors) == 1 and self.treedef.is_leaf() else tree_unflatten(tensors, self.treedef)

    def rows(self, num_systems: int) -> "StateSpec":
        """The spec of a batch of another size (`batch_dims` must be 1)."""
        shapes = tuple(torch.Size((num_systems, *shape[1:])) for shape in self.shapes)
        return StateSpec(self.treedef, shapes, self.dtypes, self.orders, self.batch_dims, self.device)

    def check(self, value: Tree, autocast: torch.dtype | None) -> None:
        """Raise unless `value`, returned by f, is a state of this structure."""
        leaves, treedef = tree_flatten(value)
        if treedef != self.treedef:
            raise ValueError(
                f"f(z) has structure {treedef}, but the state z0 has {self.treedef}; f must map z to its like."
            )
        for i, (leaf, shape, dtype) in enumerate(zip(leaves, self.shapes, self.dtypes, strict=True)):
            where = "f(z)" if len(leaves) == 1 else f"f(z), leaf {i},"
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{where} is {type(leaf).__name__}; expected a tensor of shape {tuple(shape)}.")
            if leaf.shape != shape:
                raise ValueError(
                    f"{where} has shape {tuple(leaf.shape)}, but z0 has {tuple(shape)}; shapes must be equal."
                )
            if leaf.dtype != dtype and (autocast is None or not leaf.is_floating_point()):
                raise TypeError(f"{where} has dtype {leaf.dtype}, but z0 has {dtype}; cast one of them.")
            if leaf.device != self.device:
                raise ValueError(f"{where} is on {leaf.device}, but z0 is on {self.device}; move one of them.")


def _storage_order(leaf: Tensor) -> tuple[int, ...] | None:
    order, memory_format = CHANNELS_LAST.get(leaf.dim(), (None, None))
    if order and leaf.is_contiguous(memory_format=memory_format) and not leaf.is_contiguous():  # type: ignore[arg-type]
        return order
    return None


class Problem:
    """f bound to its inputs, with one `SolveScope`, on N independent systems.

    Args:
        f: Map from (state tree, *inputs) to a state tree.
        spec: Structure of the state.
        inputs: Arguments of f after the state; trees of tensors or anything else.
        in_dims: For each input the axis that indexes systems, or None if it is shared; None for all shared.
        context: Something a solver may look at but f does not take; sliced like a per-system input.
        plain: f without compilation, for second derivatives; f itself if not given.
    """

    def __init__(
        self,
        f: Callable[..., Tree],
        spec: StateSpec,
        inputs: tuple[Any, ...] = (),
        *,
        in_dims: int | tuple[int | None, ...] | None = None,
        context: Tree = None,
        plain: Callable[..., Tree] | None = None,
    ) -> None:
        self.f, self.spec, self.inputs, self.context = f, spec, inputs, context
        self.plain = f if plain is None else plain
        self.in_dims = _normalise_in_dims(in_dims, inputs, spec)
        self.scope = SolveScope()
        self._calls = [0]  # shared with every subset of this problem
        self.device_type = spec.device.type
        self.autocast = autocast_dtype(self.device_type)
        # States that are one (N, D) tensor in the work dtype go in and out as they are.
        self._direct = spec.is_flat
        self._checked = False
        self._residual: tuple[Leaves, Leaves, Leaves] | None = None

    @property
    def num_systems(self) -> int:
        return self.spec.num_systems

    @property
    def nfe(self) -> int:
        """Evaluations so far: calls of f, vector-Jacobian and Jacobian-vector products, each on the batch."""
        return self._calls[0]

    @property
    def shown(self) -> Tree:
        """What a solver may look at: the context, or else the inputs that have a row per system."""
        if self.context is not None:
            return self.context
        if all(dim is None for dim in self.in_dims):
            return self.inputs  # a closure does not say what belongs to systems
        pairs = zip(self.inputs, self.in_dims, strict=True)
        return [_systems_first(item, dim) for item, dim in pairs if dim is not None]

    @property
    def floor(self) -> float:
        """The relative residual at which rounding in f takes over."""
        dtypes = set(self.spec.dtypes) | ({self.autocast} if self.autocast else set())
        return max(precision_floor(dtype) for dtype in dtypes)

    def start(self, z0: Tree) -> Leaves:
        """A state tree as leaves in the work dtype."""
        return [leaf.to(self.spec.work_dtype).contiguous() for leaf in self.spec.flatten(z0)]

    def evaluate(self, z: Leaves) -> Leaves:
        """f(z), counted; the structure of the result is checked the first time."""
        self._calls[0] += 1
        if torch.compiler.is_compiling():
            return self.apply(self.f, z)
        if autocast_dtype(self.device_type) == self.autocast:  # as `active`, at half the cost
            with self.scope:
                return self.apply(self.f, z)
        with self.active():
            return self.apply(self.f, z)

    def evaluate_plain(self, z: Leaves) -> Leaves:
        """f(z) by the uncompiled f: for double backward and forward-mode derivatives."""
        self._calls[0] += 1
        with self.active():
            return self.apply(self.plain, z)

    def residual(self, z: Leaves, fz: Leaves) -> Leaves:
        """f(z) − z; the driver and the solver ask for the same one, so the last is kept."""
        kept = self._residual
        if kept is None or kept[0] is not z or kept[1] is not fz:
            self._residual = kept = (z, fz, _leaves.subtract(fz, z))
        return kept[2]

    def vjp(self, z: Leaves) -> tuple[Leaves, Callable[[Leaves], Leaves]]:
        """f(z), and the map u ↦ uᵀJ; each call of the map counts as an evaluation."""
        require_gradients("a vector-Jacobian product of f")
        leaves = [leaf.detach().requires_grad_() for leaf in z]
        with torch.enable_grad():
            fz = self.evaluate(leaves)
        return [leaf.detach() for leaf in fz], lambda u: self._pull(fz, leaves, u)

    def _pull(self, fz: Leaves, z: Leaves, u: Leaves) -> Leaves:
        self._calls[0] += 1
        return pullback(fz, z, u)

    def jvp(self, z: Leaves, v: Leaves) -> Leaves:
        """J v, by forward-mode differentiation, or by a double VJP where f does not support it."""
        self._calls[0] += 1
        with self.active(), torch.no_grad():
            try:
                return list(
                    torch.func.jvp(lambda *leaves: tuple(self.apply(self.plain, list(leaves))), tuple(z), tuple(v))[1]
                )
            except (NotImplementedError, RuntimeError) as error:
                if "forward" not in str(error) and "jvp" not in str(error):
                    raise
        return self._jvp_by_double_vjp(z, v)

    def _jvp_by_double_vjp(self, z: Leaves, v: Leaves) -> Leaves:
        require_gradients("a Jacobian-vector product of f")
        with torch.enable_grad(), self.active():
            leaves = [leaf.detach().requires_grad_() for leaf in z]
            fz = self.apply(self.plain, leaves)
            u = [torch.zeros_like(leaf).requires_grad_() for leaf in fz]
            pulled = torch.autograd.grad(fz, leaves, u, create_graph=True, allow_unused=True, materialize_grads=True)
            return pullback(list(pulled), u, v)

    def rows(self, index: Tensor) -> "Problem":
        """The same problem on a subset of systems."""
        scope = self.scope.rows(index, self.num_systems) if self.can_slice else None
        return _Slice(self, index, scope) if scope else Embedding(self, index)

    @property
    def can_slice(self) -> bool:
        """Whether inputs can be taken apart by system, so that fewer systems cost less."""
        has_tensors = bool(tree_tensors(self.inputs))
        shared = [dim is None for dim, item in zip(self.in_dims, self.inputs, strict=True) if tree_tensors(item)]
        return self.spec.batch_dims == 1 and has_tensors and not all(shared) and not mixes_systems(self.plain)

    def active(self) -> AbstractContextManager[Any]:
        """Enter the scope and the autocast state of the solve; a backward pass starts outside of both."""
        if torch.compiler.is_compiling():
            return nullcontext()
        return _Entered(self)

    def apply(self, f: Callable[..., Tree], z: Leaves) -> Leaves:
        """A map on trees, f or something in its place, on leaves; not counted, not within the scope."""
        before = _versions(z) if not self._checked else None
        value = f(z[0] if self._direct else self.spec.unflatten(z), *self.inputs)
        if not self._checked:
            self.spec.check(value, self.autocast)
            if _versions(z) != before:
                raise ValueError("f has written into its state, which the solver goes on with: return a new tensor.")
            self._checked = True
        work = self.spec.work_dtype
        if self._direct:
            return [value if value.dtype == work else value.to(work)]
        return [leaf.to(work) for leaf in self.spec.flatten(value)]


class _Entered:
    """The context of `Problem.active`, written out because it is entered at every evaluation."""

    def __init__(self, problem: Problem) -> None:
        self.scope = problem.scope
        self.autocast = reenter_autocast(problem.device_type, problem.autocast)

    def __enter__(self) -> None:
        self.scope.__enter__()
        self.autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.autocast.__exit__(*error)
        self.scope.__exit__(*error)


class _Slice(Problem):
    """A problem whose inputs, context and random draws were taken apart by system."""

    def __init__(self, whole: Problem, index: Tensor, scope: SolveScope) -> None:
        def take(item: Any, dim: int | None) -> Any:
            if dim is None:
                return item
            return tree_map(lambda leaf: leaf.index_select(dim, index) if isinstance(leaf, Tensor) else leaf, item)

        def take_known(leaf: Any) -> Any:
            rowed = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == whole.num_systems
            return leaf.index_select(0, index) if rowed else leaf

        inputs = tuple(take(item, dim) for item, dim in zip(whole.inputs, whole.in_dims, strict=True))
        context = tree_map(take_known, whole.context)  # nobody said what in it belongs to systems
        spec = whole.spec.rows(len(index))
        super().__init__(whole.f, spec, inputs, in_dims=whole.in_dims, context=context, plain=whole.plain)
        self.scope, self.autocast, self._checked, self._calls = scope, whole.autocast, whole._checked, whole._calls


class Embedding(Problem):
    """Some systems of a problem that cannot be taken apart: f is evaluated on all of them.

    The other systems hold the state they were last evaluated at, or zero.
    """

    def __init__(self, whole: Problem, index: Tensor) -> None:
        self.whole, self.index = whole, index
        super().__init__(whole.f, whole.spec, whole.inputs, in_dims=None, context=whole.context, plain=whole.plain)
        self.scope, self.autocast, self._calls = whole.scope, whole.autocast, whole._calls

    @property
    def num_systems(self) -> int:
        return len(self.index)

    def widened(self, z: Leaves) -> Leaves:
        """These systems among all."""
        wide = [leaf.new_zeros((self.whole.num_systems, leaf.shape[1])) for leaf in z]
        return _leaves.put_rows(wide, self.index, z)

    def evaluate(self, z: Leaves) -> Leaves:
        return _leaves.take_rows(self.whole.evaluate(self.widened(z)), self.index)

    def jvp(self, z: Leaves, v: Leaves) -> Leaves:
        return _leaves.take_rows(self.whole.jvp(self.widened(z), self.widened(v)), self.index)

    def rows(self, index: Tensor) -> Problem:
        return Embedding(self.whole, self.index.index_select(0, index))

    @property
    def can_slice(self) -> bool:
        return False


def mixes_systems(f: Callable[..., Tree]) -> bool:
    """Whether f is a module that normalises by its batch: a result then depends on all systems, finished ones too."""
    if not isinstance(f, nn.Module):
        return False
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
        for module in f.modules()
    )


def _versions(z: Leaves) -> list[int] | None:
    """How often each was written to; None where nobody counts."""
    if torch.compiler.is_compiling() or inside_functorch_transform() or any(leaf.is_inference() for leaf in z):
        return None
    return [leaf._version for leaf in z]


def _systems_first(item: Any, dim: int) -> Any:
    """An input whose axis `dim` indexes systems, with that axis in front; as it is where it is there."""
    return item if dim == 0 else tree_map(lambda leaf: leaf.movedim(dim, 0) if isinstance(leaf, Tensor) else leaf, item)


def pullback(fz: Leaves, z: Leaves, u: Leaves) -> Leaves:
    """uᵀ ∂fz/∂z on a graph that is kept; zero where fz does not depend on z."""
    pairs = [(leaf, cotangent) for leaf, cotangent in zip(fz, u, strict=True) if leaf.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in z]
    outputs, cotangents = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, z, cotangents, retain_graph=True, allow_unused=True, materialize_grads=True)
    return [grad.to(leaf.dtype) for grad, leaf in zip(grads, z, strict=True)]


def _normalise_in_dims(in_dims: Any, inputs: tuple[Any, ...], spec: StateSpec) -> tuple[int | None, ...]:
    """One axis or None per input, checked against the number of systems."""
    if in_dims is None or isinstance(in_dims, int):
        in_dims = (in_dims,) * len(inputs)
    elif not isinstance(in_dims, tuple | list) or len(in_dims) != len(inputs):
        raise ValueError(
            f"in_dims={in_dims!r} does not fit {len(inputs)} inputs; give an int, None, or one of these per input."
        )
    if spec.batch_dims != 1:
        return (None,) * len(inputs)  # rows of the state do not correspond to rows of the inputs
    for i, (dim, item) in enumerate(zip(in_dims, inputs, strict=True)):
        if dim is None:
            continue
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise ValueError(
                f"in_dims[{i}] is {dim!r}; expected an axis number, or None for an input all systems share."
            )
        for tensor in tree_tensors(item):
            if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != spec.num_systems:
                raise ValueError(
                    f"input {i} has shape {tuple(tensor.shape)}, but in_dims says its axis {dim} indexes the "
                    f"{spec.num_systems} systems of the state; pass in_dims with None for an input all systems share."
                )
    return tuple(in_dims)
