"""Results for a person, or for a program."""

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

_NUMERIC = "-0123456789"  # what a number begins with


def show(record: dict[str, Any], as_json: bool) -> None:
    """A record for a person, or for a program."""
    if as_json:
        from equipoise.train.tracking import plain

        print(json.dumps(plain(record), allow_nan=False))
        return
    for line in _lines(record):
        print(line)


def warn(text: str) -> None:
    """A warning; it does not mix with results that a program reads."""
    print(f"warning: {text}", file=sys.stderr)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> None:
    """Rows under headings: drawn by rich at a terminal, plain aligned text elsewhere.

    Args:
        columns: Headings.
        rows: Of as many values each; columns of numbers go to the right.
        title: A line above.
    """
    words = [["" if value is None else word(value) for value in row] for row in rows]
    numbers = [all(not row[k] or row[k][0] in _NUMERIC for row in words) for k in range(len(columns))]
    widths = [max(len(heading), *(len(row[k]) for row in words), 0) for k, heading in enumerate(columns)]
    # Text can be folded into a narrow column, numbers cannot.
    least = sum(2 + (width if right else min(width, 20)) for width, right in zip(widths, numbers, strict=True))
    fits = least <= shutil.get_terminal_size().columns
    if sys.stdout.isatty() and fits and _rich_table(columns, words, numbers, title):
        return
    if title:
        print(title)
    for row in (columns, *words):
        cells = [w.rjust(n) if right else w.ljust(n) for w, n, right in zip(row, widths, numbers, strict=True)]
        print("  " + "  ".join(cells).rstrip())


def _rich_table(columns: Sequence[str], rows: list[list[str]], numbers: list[bool], title: str) -> bool:
    """Draw a table; False if rich is not installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    drawn = Table(title=Text(title) if title else None, box=box.SIMPLE_HEAD, title_justify="left")
    for heading, right in zip(columns, numbers, strict=True):
        drawn.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))  # brackets in a cell are not markup
    Console(width=shutil.get_terminal_size().columns).print(drawn)
    return True


def plots_missing() -> str | None:
    """What to install for figures; None if everything is there."""
    try:
        import equipoise.plots  # noqa: F401
    except ImportError as error:
        if "equipoise[plots]" not in str(error):
            raise
        return str(error)
    return None


def plots_or_exit() -> None:
    """End the program with a line that says what to install, unless figures can be drawn."""
    import typer

    missing = plots_missing()
    if missing:
        typer.echo(f"equipoise: {missing}", err=True)
        raise typer.Exit(2)


def size(count: int | None) -> str:
    """Bytes for a person."""
    if count is None:
        return ""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"


def _lines(value: Any, indent: int = 0) -> list[str]:
    space = "  " * indent
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            nested = isinstance(item, dict | list) and bool(item)
            lines += [f"{space}{key}:", *_lines(item, indent + 1)] if nested else [f"{space}{key}: {word(item)}"]
        return lines
    if isinstance(value, list):
        return [line for item in value for line in _lines(item, indent)]
    return [f"{space}{word(value)}"]


def word(value: Any) -> str:
    """A value as it is shown: six digits of a number are enough."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
