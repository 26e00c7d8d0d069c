"""Things known by name: solvers, adjoints, models, data sets, ..."""

import fnmatch
from collections.abc import Callable
from typing import Any, TypeVar

from equipoise._errors import unknown_name

Item = TypeVar("Item")


class Registry(dict[str, Any]):
    """A dictionary from names to classes or functions, filled by a decorator.

    Args:
        kind: What the items are, for messages.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(self, name: str) -> Callable[[Item], Item]:
        """Decorator that makes an item known by `name`; a name can be taken once."""

        def add(item: Item) -> Item:
            if name in self:
                raise ValueError(f"{self.kind} name {name!r} is already taken by {self[name].__name__}.")
            self[name] = item
            return item

        return add

    def find(self, name: str) -> Any:
        """The item of this name; an unknown one raises with the nearest and all valid names."""
        if name not in self:
            raise unknown_name(self.kind, name, self)
        return self[name]

    def matching(self, pattern: str = "*") -> list[str]:
        """Names that match a shell pattern, sorted."""
        return sorted(fnmatch.filter(self, pattern))

    def instance(self, given: Any, base: type) -> Any:
        """An instance of `base`, given one or the name of a registered class with default settings."""
        if isinstance(given, base):
            return given
        if isinstance(given, str):
            return self.find(given)()
        if isinstance(given, type) and issubclass(given, base):
            raise TypeError(f"{self.kind} is the class {given.__name__}; pass an instance, {given.__name__}().")
        names = ", ".join(sorted(self))
        article = "an" if base.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{self.kind} must be {article} {base.__name__} or one of {names}; got {type(given).__name__}.")
