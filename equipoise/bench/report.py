"""Rows as text for people: a table of ratios, a table of what else is known, and lines on goals against rivals."""

from collections.abc import Sequence
from typing import Any

from equipoise.bench.harness import Goal, Row


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Headings and lines: one line per row, ratios over the base, goals beside them."""
    bases = list(dict.fromkeys(row.base for row in rows))
    others = [name for name in dict.fromkeys(n for row in rows for n in row.values) if name not in bases]
    lines = [["shape", " or ".join(bases), *others]]
    for row in rows:
        base = measure(row.values[row.base].median, row.quantity) if row.base in row.values else "-"
        lines.append([row.name, base, *(_cell(row, name) for name in others)])
    return lines


def measure(value: float, quantity: str) -> str:
    """A measured value with its unit."""
    units = (
        {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}
        if quantity == "bytes"
        else {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    )
    name, scale = next(((n, s) for n, s in units.items() if abs(value) >= s), list(units.items())[-1])
    return f"{value / scale:.3g} {name}"


def _cell(row: Row, name: str) -> str:
    if name not in row.values:
        return "-"
    wrong = row.wrong(name)
    if wrong is not None:
        return f"wrong (error {wrong.error:.0e})"
    ratio = row.ratio(name)
    if ratio is None:
        return "-"
    goal = next((g for g in row.goals if g.candidate == name and g.over == row.base and not g.faster), None)
    return f"{ratio:.2f}" if goal is None else f"{ratio:.2f} ({_stands(goal, ratio)})"


def _stands(goal: Goal, ratio: float) -> str:
    met, missed = ("≥", "<") if goal.faster else ("≤", ">")
    return f"{met if goal.met(ratio) else missed} {goal.bound:g}"


def details(rows: Sequence[Row]) -> list[list[str]]:
    """Headings and lines of what else is known: one line per row and candidate; only headings if that is nothing."""
    known = list(dict.fromkeys(key for row in rows for parts in row.details.values() for key in parts))
    lines = [["shape", "candidate", "measured", *known]]
    for row in rows:
        for candidate, parts in row.details.items():
            values = [_word(parts[key], row.quantity) if key in parts else "" for key in known]
            measured = measure(row.values[candidate].median, row.quantity) if candidate in row.values else ""
            lines.append([row.name, candidate, measured, *values])
    return lines


def remarks(rows: Sequence[Row]) -> list[str]:
    """Lines below the tables: goals against others than the base, checks that failed, what is missing, notes."""
    lines: list[str] = []
    for row in rows:
        said = [_against(row, goal) for goal in row.goals if goal.faster or goal.over != row.base]
        for candidate in row.values:
            wrong = row.wrong(candidate)
            if wrong is not None:
                said.append(f"{candidate} is wrong: {wrong.error:.1e} > {wrong.tolerance:g} against {wrong.against}")
        said += [f"{candidate} skipped: {why}" for candidate, why in row.skipped.items()]
        lines += [f"{row.name}: {text}" for text in (*said, *row.notes)]
    return lines


def _against(row: Row, goal: Goal) -> str:
    ratio = row.outcome(goal)
    if ratio is None:
        return f"{goal.candidate} against {goal.over}: no ratio, goal {goal}"
    met = "met" if goal.met(ratio) else "missed"
    if goal.faster:
        return f"{goal.candidate} is {ratio:.2f} times as fast as {goal.over}, goal {goal}: {met}"
    return f"{goal.candidate} is {ratio:.3f} of {goal.over}, goal {goal}: {met}"


def _word(value: Any, quantity: str) -> str:
    if quantity == "bytes" and isinstance(value, int):
        return measure(value, quantity)
    return f"{value:.2g}" if isinstance(value, float) else str(value)
