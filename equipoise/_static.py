"""Arguments and results of something recorded: what it depends on, and the buffers it reads and writes."""

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from equipoise._draws import Rows
from equipoise._errors import first_line
from equipoise._fingerprint import PLAIN_VALUES
from equipoise._recording import CannotCapture
from equipoise._solution import Solution
from equipoise._tape import copy_all
from equipoise._tree import tree_tensors

Read = dict[str, None]
"""Names of plain values, in the order they were read."""


def comparable(value: Any, what: str) -> Any:
    """A plain value; an error for anything else."""
    if type(value) in PLAIN_VALUES or isinstance(value, Rows | enum.Enum):
        return value
    raise CannotCapture(f"{what} is of type {type(value).__name__}, which can neither be copied nor compared")


def buffer_like(leaf: Any) -> Any:
    """A tensor of its own for a tensor; anything else as it is."""
    return torch.empty_like(leaf, requires_grad=False) if isinstance(leaf, Tensor) else leaf


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Whatever goes wrong is a reason not to record something; made in the ordinary way it shows if it is more."""
    try:
        yield
    except CannotCapture:
        raise
    except Exception as error:
        raise CannotCapture(f"{what} cannot be recorded ({first_line(error)})") from error


class Noted:
    """A batch that notes which of its plain values are read: a recording holds for these values.

    Args:
        batch: Its tensors are those of a recording.
        device: Where they are.
        read: Takes the names.
    """

    def __init__(self, batch: Any, device: torch.device, read: Read) -> None:
        self._batch, self._device, self._read = batch, device, read

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._batch)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._batch, name)
        tensors = tree_tensors(value)
        if any(tensor.device.type != self._device.type for tensor in tensors):
            raise CannotCapture(f"{name!r} of a batch on the host is read")
        if not tensors:
            comparable(value, f"{name!r} of a batch")
            self._read[name] = None
        return value

    def to(self, device: torch.device | str) -> "Noted":
        """Itself: it is where the recording reads it."""
        if torch.device(device).type != self._device.type:
            raise CannotCapture(f"a batch is moved to {device}")
        return self


# Arguments


def _is_record(value: Any) -> bool:
    return hasattr(type(value), "__dataclass_fields__") and hasattr(value, "__dict__")


def _is_value(value: Any) -> bool:
    """Whether something is compared as a whole: a plain value, or a frozen dataclass without tensors."""
    kind = type(value)
    if kind in PLAIN_VALUES or isinstance(value, Rows | enum.Enum):
        return True
    return _is_record(value) and kind.__dataclass_params__.frozen and not tree_tensors(list(vars(value).values()))


class Arguments:
    """What one call is given, as far as a recording depends on it.

    Tensors, plain values, and tuples, lists, dictionaries and dataclasses of them. Of a dataclass those tensors count
    that are on the device, and those plain values that were read so far.

    Args:
        device: Where tensors must be.
        read: Names of the plain values that were read, by type of dataclass.

    Attributes:
        tensors: Those that are copied, in a fixed order.
    """

    def __init__(self, device: torch.device, read: dict[type, Read]) -> None:
        self.device, self.read = device, read
        self.tensors: list[Tensor] = []

    def look(self, value: Any) -> Any:
        """What compares equal for arguments that the same recording serves; takes in the tensors."""
        kind = type(value)
        if isinstance(value, Tensor):
            if value.device != self.device:
                raise CannotCapture(f"an argument is on {value.device}, the model on {self.device}")
            self.tensors.append(value)
            return kind, value.shape, value.stride(), value.dtype
        if kind in PLAIN_VALUES:
            return kind, repr(value) if kind is float else value
        if isinstance(value, tuple | list):
            return kind, *map(self.look, value)
        if isinstance(value, dict):
            return kind, tuple(value), *map(self.look, value.values())
        if _is_record(value):
            return self._record(kind, value)
        if isinstance(value, enum.Enum):
            return kind, value
        raise CannotCapture(f"an argument is of type {kind.__name__}, which can neither be copied nor compared")

    def _record(self, kind: type, record: Any) -> Any:
        parts = [(name, self.look(value)) for name, value in vars(record).items() if self._copied(value)]
        if not parts and _is_value(record):
            return kind, record
        return kind, *parts, *((name, getattr(record, name)) for name in self.read.get(kind, ()))

    def _copied(self, value: Any) -> bool:
        """Whether something in a dataclass has tensors, and all of them are on the device."""
        if isinstance(value, Tensor):
            return value.device == self.device
        tensors = () if type(value) in PLAIN_VALUES or isinstance(value, Rows) else tree_tensors(value)
        return bool(tensors) and all(tensor.device == self.device for tensor in tensors)

    def static(self, value: Any, places: list[Tensor]) -> Any:
        """The same in buffers, which `places` takes in the order of `tensors`."""
        if isinstance(value, Tensor):
            places.append(torch.empty_like(value, requires_grad=False))
            return places[-1]
        if isinstance(value, tuple | list) and type(value) is not torch.Size:
            parts = [self.static(part, places) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict):
            twin = copy.copy(value)
            twin.update({name: self.static(part, places) for name, part in value.items()})
            return twin
        if not _is_record(value) or _is_value(value):
            return value
        twin = copy.copy(value)
        copied = {name: part for name, part in vars(value).items() if self._copied(part)}
        vars(twin).update({name: self.static(part, places) for name, part in copied.items()})
        return Noted(twin, self.device, self.read.setdefault(type(value), {}))


# Results


class Results:
    """What a recording leaves behind: tensors that each replay writes over, and the tree they are part of.

    Args:
        tree: Tensors and plain values, and tuples, lists, dictionaries and dataclasses of them.
        device: Where the tensors must be.
    """

    def __init__(self, tree: Any, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self._make = self._maker(tree)

    def take(self) -> Any:
        """What was written last, in tensors of its own, with one launch for each dtype."""
        copies = [torch.empty_like(tensor, requires_grad=False) for tensor in self.tensors]
        copy_all(copies, self.tensors)
        return self._make(copies)

    def _maker(self, value: Any) -> Callable[[Sequence[Tensor]], Any]:
        """Makes something like a value from the copies of the tensors."""
        kind = type(value)
        if isinstance(value, Tensor):
            return itemgetter(self._place(value))
        if _is_value(value):
            return lambda made: value
        if isinstance(value, tuple | list):
            parts = [self._maker(part) for part in value]
            if hasattr(value, "_fields"):
                return lambda made: kind(*[part(made) for part in parts])
            return lambda made: kind([part(made) for part in parts])
        if isinstance(value, dict):
            return self._mapping(kind, value)
        if _is_record(value):
            return self._record(kind, value)
        raise CannotCapture(f"something returned is of type {kind.__name__}, which cannot be copied")

    def _place(self, tensor: Tensor) -> int:
        if tensor.device != self.device:
            raise CannotCapture(f"something returned is on {tensor.device}, the model on {self.device}")
        for place, known in enumerate(self.tensors):
            if known is tensor:
                return place
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _mapping(self, kind: type, value: dict[Any, Any]) -> Callable[[Sequence[Tensor]], Any]:
        parts = {name: self._maker(part) for name, part in value.items()}
        if hasattr(kind, "__dataclass_fields__"):  # one that is made by names
            return lambda made: kind(**{name: part(made) for name, part in parts.items()})
        return lambda made: kind((name, part(made)) for name, part in parts.items())

    def _record(self, kind: type, value: Any) -> Callable[[Sequence[Tensor]], Any]:
        if isinstance(value, Solution):  # its problem would be that of the buffers
            value = dataclasses.replace(value, problem=None, record=None)
        parts = {name: self._maker(part) for name, part in vars(value).items()}

        def make(made: Sequence[Tensor]) -> Any:
            twin: Any = object.__new__(kind)
            vars(twin).update({name: part(made) for name, part in parts.items()})  # also of frozen ones
            return twin

        return make
