"""f with every tensor it uses as an explicit argument.

Derivatives of any order, torch.func transforms and reversible backward passes need f as a pure function. Parameters, inputs
and whatever a closure has caught are found by watching one evaluation, and replaced by identity in later ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from equipoise._problem import Problem
from equipoise._tree import Leaves, tree_map, tree_tensors


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
        tensors: The tensors f uses, in the order it meets them.
    """

    def __init__(self, problem: Problem, z: Leaves) -> None:
        self.problem = problem
        z = [leaf.detach() for leaf in z]
        with torch.no_grad(), problem.active(), problem.scope.with_fresh_parameters(), _Watch(z) as watch:
            problem._apply(problem.plain, z)
        # What came out of a view of another found tensor is found with it; replacing the first is enough.
        self.tensors = watch.found
        problem._calls[0] += 1
        self._refuse_hidden(z)

    def __call__(self, z: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        replacements = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}
        problem = self.problem
        with problem.active(), problem.scope.with_fresh_parameters(), _Replace(replacements):
            return tuple(problem._apply(problem.plain, list(z)))

    def _refuse_hidden(self, z: Leaves) -> None:
        """Raise if f depends on a tensor that could not be replaced, since its gradient would be lost."""
        with torch.enable_grad():
            value = self(z, [tensor.detach() for tensor in self.tensors])
        self.problem._calls[0] += 1
        if any(leaf.requires_grad for leaf in value):
            raise RuntimeError(
                "f uses a tensor that requires a gradient in a way that cannot be made explicit (for instance inside a "
                "custom autograd.Function); pass it to the solve as an input, or use the default Implicit()."
            )
