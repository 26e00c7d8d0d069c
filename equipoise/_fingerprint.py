"""What a recording holds for, besides the values of its inputs, parameters and buffers.

A key says all of it and takes a while. So the next solves are compared with what was seen when the key was made: a
glance at inputs and settings, and a watch over the cell that compares identities. Where either differs there is a new
key, which may still be an old one.
"""

import enum
import types
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import call, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise._compat import autocast_dtype
from equipoise._problem import Problem
from equipoise._recording import CannotCapture
from equipoise._tree import Tree, tree_flatten, tree_tensors

if TYPE_CHECKING:
    from equipoise._module import DEQ, Plan

# Values that are compared: a recording holds for one value of them.
PLAIN_VALUES = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
HOOKS = ("_forward_pre_hooks", "_backward_pre_hooks", "_forward_hooks", "_backward_hooks")
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
# What every module has, and what is looked at otherwise; `training` matters.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
# What every module has and a recording does not depend on.
UNWATCHED = OF_EVERY_MODULE - {"_parameters", "_buffers", "_modules"} - set(HOOKS)


# Keys


def key_of(deq: "DEQ", plan: "Plan", problem: Problem, grad: bool) -> Any:
    """What a recording depends on besides the values of its inputs, parameters and buffers."""
    spec = problem.spec
    leaves, tree = tree_flatten(problem.inputs)
    return (
        (plan if grad else (plan.solver, plan.stop), grad),
        (spec.shapes, spec.dtypes, spec.orders, spec.batch_dims, str(spec.treedef), problem.in_dims),
        (tuple(_form(leaf, spec.device, grad) for leaf in leaves), str(tree)),
        (tuple(module_form(module, spec.device) for module in deq.cell.modules()), deq._compiled),
        (problem.autocast, *_settings()),
    )


def _settings() -> tuple[Any, ...]:
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()


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
    if isinstance(value, Tensor):
        return _checked_place(value, device)
    return value if isinstance(value, FUNCTIONS) else _plain(value)


def module_form(module: nn.Module, device: torch.device) -> Any:
    """A module as far as a recording depends on it: its kind, plain attributes, and where its tensors are."""
    if any(_hooks(module)):
        raise CannotCapture("the cell has hooks, which a replay would not call")
    attributes = [(name, _seen(value, device)) for name, value in vars(module).items() if name not in OF_EVERY_MODULE]
    own = [_checked_place(tensor, device) for tensor in (*module._parameters.values(), *module._buffers.values())]
    if "_is_fsdp_managed_module" in vars(module):
        raise CannotCapture("the cell is sharded")
    return type(module), tuple(attributes), tuple(own)


def _hooks(module: nn.Module) -> list[Any]:
    return [vars(module)[name] for name in HOOKS]


def _checked_place(tensor: Tensor | None, device: torch.device) -> Any:
    if tensor is None:
        return None
    if hasattr(tensor, "placements"):
        raise CannotCapture("the cell is sharded")
    if tensor.device != device:
        raise CannotCapture(f"the cell has a tensor on {tensor.device}, the state is on {device}")
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


# Glances


def glance(
    deq: "DEQ", plan: "Plan", inputs: tuple[Any, ...], start: Tree, grad: bool
) -> tuple[Any, list[Tensor], list[Tensor]]:
    """What is equal only for solves with equal keys, as long as the cell is the same; the tensors of inputs and start.

    Returns:
        None and those tensors if there is something that a glance does not understand.
    """
    tensors: list[Tensor] = []
    started: list[Tensor] = []
    form, beginning = _outline(inputs, tensors, grad), _outline(start, started, False)
    if form is None or beginning is None or not started:
        return None, tree_tensors(inputs), tree_tensors(start)
    in_dims = tuple(deq.in_dims) if isinstance(deq.in_dims, list) else deq.in_dims
    given = plan, deq.cell, deq._compiled, grad, deq.batch_dims, in_dims
    return (given, form, beginning, autocast_dtype(started[0].device.type), *_settings()), tensors, started


def _outline(value: Any, tensors: list[Tensor], grad: bool) -> Any:
    """A tree of tensors and plain values as far as a recording depends on it; None if it is another kind of tree."""
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return kind, value.shape, value.stride(), value.dtype, value.device, grad and value.requires_grad
    if kind is tuple or kind is list:
        return _outlines(kind, value, tensors, grad)
    if kind is dict:
        return _outlines(tuple(value), value.values(), tensors, grad)
    return (kind, repr(value) if kind is float else value) if kind in PLAIN_VALUES else None


def _outlines(kind: Any, values: Iterable[Any], tensors: list[Tensor], grad: bool) -> Any:
    parts = [_outline(value, tensors, grad) for value in values]
    return None if None in parts else (kind, *parts)


# Watches


class Watch:
    """Whether a cell is still what it was, by the identities of its parts; they are kept, so none is mistaken.

    Made of a few long lists, because it is asked in every solve.

    Attributes:
        parameters: Those that want a gradient.
        only_parameters: Whether no module has any other tensor, which an evaluation might write to.
    """

    def __init__(self, cell: nn.Module) -> None:
        self._modules = list(cell.modules())
        self._kinds = [type(module) for module in self._modules]
        self._attributes = [vars(module) for module in self._modules]
        inner: list[dict[str, Any]] = [d for m in self._modules for d in (m._parameters, m._buffers, m._modules)]
        hooks = [d for module in self._modules for d in _hooks(module)]
        self._empty = [d for d in (*inner, *hooks) if not d]
        self._filled: list[dict[str, Any]] = [d for d in inner if d]
        self._names = [name for d in self._filled for name in d]
        self._sizes = list(map(len, self._attributes))
        self._watched = [itemgetter(*(name for name in d if name not in UNWATCHED)) for d in self._attributes]
        self._values = list(self._read())
        # By identity: a tensor must not be compared.
        tensors = {id(value): value for value in self._values if isinstance(value, Tensor)}
        self._tensors = list(tensors.values())
        self._places = _places(self._tensors)
        self.parameters = [p for p in cell.parameters() if p.requires_grad]
        self.only_parameters = all(isinstance(tensor, nn.Parameter) for tensor in self._tensors)

    def unchanged(self) -> bool:
        """Whether every module has the same attributes, children and tensors, in the same places, and no hooks."""
        try:
            return (
                not any(self._empty)
                and list(map(type, self._modules)) == self._kinds
                and all(map(is_, map(vars, self._modules), self._attributes))
                and list(map(len, self._attributes)) == self._sizes
                and list(chain.from_iterable(self._filled)) == self._names
                and all(map(is_, self._read(), self._values))
                and _places(self._tensors) == self._places
            )
        except KeyError:  # an attribute has another name
            return False

    def _read(self) -> Iterator[Any]:
        attributes = chain.from_iterable(map(call, self._watched, self._attributes))
        return chain(attributes, chain.from_iterable(map(dict.values, self._filled)))


def _places(tensors: list[Tensor]) -> Any:
    return (
        list(map(Tensor.data_ptr, tensors)),
        list(map(Tensor.size, tensors)),
        list(map(Tensor.stride, tensors)),
        [tensor.dtype for tensor in tensors],
        [tensor.requires_grad for tensor in tensors],
    )
