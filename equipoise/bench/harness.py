"""Measuring: times in turns, checks before ratios, results as JSON and as a table.

Candidates of a row do the same work and are timed in turns in one run, so that a busy machine disturbs them alike. What
is reported is a ratio of medians, and only for a candidate whose results have been found right.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise._registry import Registry

Work = Callable[[], Any]

CASES = Registry("benchmark")
register_case = CASES.register


@dataclass(frozen=True)
class Timing:
    """Seconds of one piece of work.

    Attributes:
        median: Over the rounds.
        low: The lower quartile.
        high: The upper quartile.
        rounds: How many there were.
    """

    median: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class Check:
    """Whether a candidate computes what it should.

    Attributes:
        error: Its largest error, relative to the size of the truth; NaN where it failed to run.
        tolerance: What is accepted.
        against: What it was compared with.
    """

    error: float
    tolerance: float
    against: str

    @property
    def ok(self) -> bool:
        """Whether the error is small enough."""
        return self.error <= self.tolerance


@dataclass
class Row:
    """What was measured of one shape.

    Attributes:
        name: Of the shape.
        unit: The work that times are divided by, e.g. "step".
        base: The candidate that ratios are taken over.
        times: By candidate, of one unit.
        checks: By candidate; one without a check is a rival or the base itself.
        goals: Ratios aimed at, by candidate.
        notes: What else to know, e.g. why a candidate is missing.
    """

    name: str
    unit: str
    base: str
    times: dict[str, Timing]
    checks: dict[str, Check] = field(default_factory=dict)
    goals: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def ratio(self, candidate: str) -> float | None:
        """Its time over the base's; None if its check is red."""
        check = self.checks.get(candidate)
        if check is not None and not check.ok:
            return None
        return self.times[candidate].median / self.times[self.base].median

    def record(self) -> dict[str, Any]:
        """Plain values."""
        checks = {name: {**asdict(check), "ok": check.ok} for name, check in self.checks.items()}
        return {**asdict(self), "checks": checks, "ratios": {name: self.ratio(name) for name in self.times}}


def in_turns(works: Mapping[str, Work], device: torch.device, rounds: int = 15, units: int = 1) -> dict[str, Timing]:
    """Time pieces of work, one after another in each of several rounds.

    Args:
        works: By name; each has been run before, so that nothing is compiled or recorded now.
        device: Where the work is done.
        rounds: How often.
        units: What a piece of work consists of; times are divided by it.
    """
    clock: Callable[[Work], float] = _on_cuda if device.type == "cuda" else _on_host
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            seconds[name].append(clock(work) / units)
    return {name: _timing(values) for name, values in seconds.items()}


def _timing(values: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return Timing(median, low, high, len(values))


def _on_host(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _on_cuda(work: Work) -> float:
    """Seconds from an idle device to an idle device, the host's part included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def compared(found: Sequence[Tensor], truth: Sequence[Tensor], tolerance: float, against: str) -> Check:
    """The largest relative error over several tensors; anything not finite is infinitely wrong."""
    worst = 0.0
    for a, b in zip(found, truth, strict=True):
        scale = float(b.double().norm()) or 1.0
        error = float((a.double() - b.double()).norm()) / scale
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return Check(worst, tolerance, against)


def table(rows: Sequence[Row]) -> list[list[str]]:
    """A table for people: one line per shape, ratios over the base, goals beside them."""
    names = list(dict.fromkeys(name for row in rows for name in row.times))
    lines = [["shape", f"{rows[0].base} (ms)", *(name for name in names if name != rows[0].base)]]
    for row in rows:
        cells = [row.name, f"{1e3 * row.times[row.base].median:.3f}"]
        cells += [_cell(row, name) for name in names if name != row.base]
        lines.append(cells)
    return lines


def _cell(row: Row, name: str) -> str:
    if name not in row.times:
        return "-"
    ratio = row.ratio(name)
    if ratio is None:
        return f"wrong (error {row.checks[name].error:.0e})"
    goal = row.goals.get(name)
    return f"{ratio:.2f}" if goal is None else f"{ratio:.2f} ({'≤' if ratio <= goal else '>'} {goal:g})"
