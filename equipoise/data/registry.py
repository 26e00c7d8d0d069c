"""Data by name: a loader is a function, a data set is one file."""

import fnmatch
from collections.abc import Callable
from typing import Any

from equipoise._errors import unknown_name

DATA: dict[str, Callable[..., Any]] = {}


def register_data(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a loader, a function from options to a data set, known by a name."""

    def register(loader: Callable[..., Any]) -> Callable[..., Any]:
        if name in DATA:
            raise ValueError(f"data name {name!r} is already taken by {DATA[name].__module__}.")
        DATA[name] = loader
        return loader

    return register


def load_data(name: str, **options: Any) -> Any:
    """Load a registered data set.

    Args:
        name: Name of a loader; `list_data()` has them all.
        **options: Passed to the loader.
    """
    if name not in DATA:
        raise unknown_name("data set", name, DATA)
    return DATA[name](**options)


def list_data(pattern: str = "*") -> list[str]:
    """Names of registered data sets that match a shell pattern, sorted."""
    return sorted(fnmatch.filter(DATA, pattern))
