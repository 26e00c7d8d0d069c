"""f with every tensor it uses as an explicit argument.

Derivatives of any order, torch.func transforms and reversible backward passes need f as a pure function. Parameters,
inputs and whatever a closure has caught are found by watching one evaluation, and replaced by identity in later ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise._problem import Problem
from equipoise._tree import Leaves, Tree, tree_map, tree_tensors


class _Watch(TorchFunctionMode):
    """Notes the tensors that enter a computation from outside."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.seen = {id(tensor): tensor for tensor in known}  # holds them, so that no id is used twice
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_tensors((args, kwargs)):
            if id(tensor) not in self.seen:
                self.seen[id(tensor)] = tensor
                self.found.append(tensor)
        result = func(*args, **(kwargs or {}))
        self.seen.update((id(tensor), tensor) for tensor in tree_tensors(result))
        return result


class _Replace(TorchFunctionMode):
    """Computes with other tensors in place of given ones."""

    def __init__(self, replacements: dict[int, Tensor]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def swap(leaf: Any) -> Any:
            return self.replacements.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        return func(*tree_map(swap, args), **tree_map(swap, kwargs or {}))


class Lifted:
    """The f of a problem as a pure function `(leaves, tensors) -> leaves`.

    Attributes:
        tensors: The tensors f uses: its inputs, then others in the order it meets them.
    """

    def __init__(self, problem: Problem, z: Leaves) -> None:
        self.problem = problem
        self.own = own_tensors(problem.plain)
        z = [leaf.detach() for leaf in z]
        inputs = tree_tensors(problem.inputs)
        with torch.no_grad(), problem.active(), problem.scope.with_fresh_parameters(), _Watch([*z, *inputs]) as watch:
            problem.apply(problem.plain, z)
        self.tensors = list({id(tensor): tensor for tensor in (*inputs, *watch.found)}.values())
        self._refuse_hidden(z)

    def __call__(self, z: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        replacements = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}

        def swap(leaf: Any) -> Any:
            return replacements.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        def explicit(state: Tree, *inputs: Any) -> Tree:
            # Inputs and a module's own tensors are handed over, and only what a closure has caught is found by looking.
            own = {name: swap(tensor) for name, tensor in self.own.items()}
            return call_with(self.problem.plain, own, state, *tree_map(swap, inputs))

        problem = self.problem
        with problem.active(), problem.scope.with_fresh_parameters(), _Replace(replacements):
            return tuple(problem.apply(explicit, list(z)))

    def _refuse_hidden(self, z: Leaves) -> None:
        """Raise if f depends on a tensor that could not be replaced, since its gradient would be lost."""
        with torch.enable_grad():
            value = self(z, [tensor.detach() for tensor in self.tensors])
        if any(leaf.requires_grad for leaf in value):
            raise RuntimeError(
                "f uses a tensor that requires a gradient in a way that cannot be made explicit (for instance inside a "
                "custom autograd.Function); pass it to the solve as an input, or use the default Implicit()."
            )


def own_tensors(f: Any) -> dict[str, Tensor]:
    """Parameters and buffers of a module as they are now: `functional_call` puts others back before a backward pass."""
    return {**dict(f.named_parameters()), **dict(f.named_buffers())} if isinstance(f, nn.Module) else {}


def call_with(f: Any, own: dict[str, Tensor], *arguments: Any) -> Any:
    """f(*arguments), a module with `own` in place of its parameters and buffers."""
    return torch.func.functional_call(f, own, arguments) if own else f(*arguments)


def pinned(f: Any) -> Any:
    """f with the parameters and buffers that it has now, whenever it is called."""
    own = own_tensors(f)
    return (lambda *arguments: call_with(f, own, *arguments)) if own else f
