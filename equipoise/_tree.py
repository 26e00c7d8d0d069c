"""Trees of tensors. With `_compat` and `_sharding`, all that touches torch's private modules."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils import _pytree

Tree: TypeAlias = Any  # a tensor, or a tuple, list, dict or nested mixture of them
Leaves: TypeAlias = list[Tensor]  # a state inside a solve: one contiguous (N, D_i) matrix per leaf
TreeDef: TypeAlias = _pytree.TreeSpec


def tree_flatten(tree: Tree) -> tuple[list[Any], TreeDef]:
    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], treedef: TreeDef) -> Tree:
    return _pytree.tree_unflatten(leaves, treedef)


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    return _pytree.tree_map(function, tree, *others)


def tree_tensors(tree: Tree) -> list[Tensor]:
    """The tensors of a tree; other leaves (None, numbers, strings) are passed over."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def register_record(cls: type, children: tuple[str, ...], rest: tuple[str, ...]) -> None:
    """Make a class a tree node: `children` hold tensors or trees, `rest` travels as it is."""

    def flatten(record: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(record, name) for name in children], tuple(getattr(record, name) for name in rest)

    def unflatten(values: Any, context: Any) -> Any:
        return cls(**dict(zip(children, values, strict=True)), **dict(zip(rest, context, strict=True)))

    _pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"equipoise.{cls.__name__}")
