"""Data by name: a loader is a function, a data set is one file."""

from typing import Any

from equipoise._registry import Registry

DATA = Registry("data set")
register_data = DATA.register


def load_data(name: str, **options: Any) -> Any:
    """Load a registered data set.

    Args:
        name: Name of a loader; `list_data()` has them all.
        **options: Passed to the loader.
    """
    return DATA.find(name)(**options)


def list_data(pattern: str = "*") -> list[str]:
    """Names of registered data sets that match a shell pattern, sorted."""
    return DATA.matching(pattern)
