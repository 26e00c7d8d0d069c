"""Error helpers: what was given, what was expected, the nearest valid choice."""

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


class UnknownNameError(ValueError):
    """A name that is not in a registry or a list of choices; `kind` says of what."""

    kind: str = ""


def unknown_name(kind: str, given: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not in a registry or a list of choices."""
    choices = sorted(known)
    near = difflib.get_close_matches(str(given), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    error = UnknownNameError(f"unknown {kind} {given!r}{hint} Known: {', '.join(choices)}.")
    error.kind = kind
    return error


def require_number(
    owner: str,
    name: str,
    value: Any,
    *,
    low: float,
    high: float = float("inf"),
    open_low: bool = False,
    closed_high: bool = False,
) -> None:
    """Raise unless `value` is a real number in [low, high); `open_low` and `closed_high` are about the two ends."""
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if valid:
        valid = (low < value if open_low else low <= value) and (value <= high if closed_high else value < high)
    if not valid:
        left, right = "(" if open_low else "[", "]" if closed_high else ")"
        raise ValueError(f"{owner}: {name} must be a number in {left}{low:g}, {high:g}{right}, got {value!r}.")


def require_gradients(owner: str) -> None:
    """Raise inside torch.inference_mode(), where derivatives would be zeros, or errors that do not say why."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{owner} needs gradients, which torch.inference_mode() cannot give: call it outside of that."
        )


def require_count(owner: str, name: str, value: Any, *, low: int = 1) -> None:
    """Raise unless `value` is an integer of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{owner}: {name} must be an integer of at least {low}, got {value!r}.")


def by_name(kind: str, paths: Iterable[str | Path], name: Callable[[Path], str]) -> dict[str, Path]:
    """Paths by a name that each has; raises if two of them have the same one.

    Args:
        kind: Of thing, in the plural.
        paths: The same one may be there twice.
        name: Of a path.
    """
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        own = name(path)
        if own in found and found[own].resolve() != path.resolve():
            raise ValueError(f"the {kind} {found[own]} and {path} are both called {own!r}: rename one of them.")
        found[own] = path
    return found


def first_line(error: BaseException) -> str:
    """What an error says, in a line; its name if it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
