"""What stays constant during a solve: dropout masks, normalised weights.

Values live in the scope that a solve opens, never in the module, so two forwards before one backward, nested solves,
deepcopy and pickle need no care from anyone, and nothing has to be reset by hand.
"""

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from equipoise._compat import backward_pass, inside_a_transform, saves_tensors_elsewhere
from equipoise._tree import tree_map, tree_tensors


@runtime_checkable
class SolveScoped(Protocol):
    """A module that computes something once per solve.

    A module with parameters of its own computes it from them, for all systems alike. One without draws it; the first
    axis of a draw indexes systems (or has size 1), unless the module says `shared_by_systems = True`.
    """

    def begin_solve(self, x: Tensor) -> Any:
        """Compute the value to hold constant, given (detached) what the module is first applied to."""
        ...


class _Active(threading.local):
    def __init__(self) -> None:
        self.scopes: list[SolveScope] = []
        self.passed: tuple[int | None, weakref.ref[SolveScope] | None] = (None, None)


_active = _Active()


class SolveScope:
    """The constants of one solve, drawn lazily at first use, when inner shapes are known.

    A scope opened inside another one shares its values: what must not change during the outer solve must not change
    between the inner solves either.
    """

    def __init__(self) -> None:
        outer = current_scope()
        self._drawn: dict[nn.Module, Any] = outer._drawn if outer else {}
        self._derived: dict[nn.Module, Any] = outer._derived if outer else {}
        # A value first touched inside a no-grad loop must still carry the graph to its parameters.
        self._grad: bool = outer._grad if outer else torch.is_grad_enabled()

    def value(self, module: nn.Module, x: Tensor) -> Any:
        """The constant of `module` in this solve."""
        owns_parameters = next(module.parameters(recurse=False), None) is not None
        store = self._derived if owns_parameters else self._drawn
        if module not in store:
            # Where f is evaluated again in the backward pass it is found here: it is no part of what is computed again.
            with torch.set_grad_enabled(self._grad), _kept_as_it_is():
                store[module] = module.begin_solve(x.detach())  # type: ignore[operator]
        return store[module]

    def with_fresh_parameters(self) -> "SolveScope":
        """The same random draws; whatever depends on parameters is computed anew (they have been replaced)."""
        return self._copy(self._drawn, {})

    def rows(self, index: Tensor, num_systems: int) -> "SolveScope | None":
        """The scope on a subset of systems, or None if a random draw cannot be told apart by system."""

        def take(leaf: Any) -> Any:
            per_system = isinstance(leaf, Tensor) and leaf.shape[0] == num_systems
            return leaf.index_select(0, index) if per_system else leaf

        drawn = dict(self._drawn)
        for module, value in self._drawn.items():
            if getattr(module, "shared_by_systems", False):
                continue
            if any(t.dim() == 0 or t.shape[0] not in (1, num_systems) for t in tree_tensors(value)):
                return None
            drawn[module] = tree_map(take, value)
        return self._copy(drawn, self._derived)

    def _copy(self, drawn: dict[nn.Module, Any], derived: dict[nn.Module, Any]) -> "SolveScope":
        scope = SolveScope.__new__(SolveScope)
        scope._drawn, scope._derived, scope._grad = drawn, derived, self._grad
        return scope

    def __enter__(self) -> "SolveScope":
        """Make this the scope that `solve_constant` looks into; per thread, because CUDA runs backward in another."""
        _active.scopes.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _active.scopes.pop()


def _kept_as_it_is() -> AbstractContextManager[Any]:
    """Out of reach of `torch.utils.checkpoint`, which counts what autograd saves."""
    if not saves_tensors_elsewhere():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class _Reopen(torch.autograd.Function):
    """A copy; a backward pass that comes through it is from here on inside the solve of a scope."""

    @staticmethod
    def forward(ctx: Any, scope: SolveScope, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.scope = scope
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # Nodes run in the reverse of the order they were made in, so the solve passed last is the one under way.
        _active.passed = (backward_pass(), weakref.ref(ctx.scope))
        return (None, *grads)


def reopened(scope: SolveScope, tensors: list[Tensor]) -> list[Tensor]:
    """The results of a solve, so marked that what f recomputes in a backward pass (checkpoints) finds its scope.

    Copies: they may be the start of the solve, or what f returned, and whoever gets them may write into them.
    """
    if torch.compiler.is_compiling() or inside_a_transform() or not any(t.requires_grad for t in tensors):
        return [tensor.clone() for tensor in tensors]
    return list(_Reopen.apply(scope, *tensors))


def _scope_of_backward() -> SolveScope | None:
    number, scope = _active.passed
    if scope is None or number is None or number != backward_pass():
        return None
    return scope()


def current_scope() -> SolveScope | None:
    """The innermost scope open in this thread."""
    return _active.scopes[-1] if _active.scopes else None


@torch.compiler.disable
def solve_constant(module: nn.Module, x: Tensor) -> Any:
    """The value `module.begin_solve(x)` has during the current solve; outside a solve, a new one.

    Inside a compiled cell this is a graph break: the value belongs to the solve, not to the compiled code.
    """
    scope = current_scope() or _scope_of_backward()
    return scope.value(module, x) if scope else module.begin_solve(x.detach())  # type: ignore[operator]
