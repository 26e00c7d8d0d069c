"""Measuring: times in turns, checks before ratios, goals beside them.

Candidates of a row do the same work and are timed in turns in one run, so that a busy machine disturbs them alike. What
is reported is a ratio of medians, and only for a candidate whose results have been found right.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise._registry import Registry
from equipoise._tape import tape_for

Work = Callable[[], Any]
Key = TypeVar("Key", bound=Hashable)
CaseFunction = Callable[[Sequence[str], torch.device, int], "list[Row]"]

TINY = "tiny"  # the shape that every case has, and that no case measures unless it is asked for
# What one candidate may take in all, and the rounds it gets even so.
MOST_SECONDS = 3.0
FEWEST_ROUNDS = 3

CASES = Registry("benchmark")
SHAPES_OF: dict[str, tuple[str, ...]] = {}


def register_case(name: str, shapes: Sequence[str]) -> Callable[[CaseFunction], CaseFunction]:
    """Decorator that makes a benchmark, a function from names of shapes to rows, known by name.

    Args:
        name: Of the benchmark.
        shapes: Those it can be run at besides "tiny", which is for tests.
    """

    def add(function: CaseFunction) -> CaseFunction:
        registered = CASES.register(name)(function)
        SHAPES_OF[name] = (*shapes, TINY)
        return registered

    return add


# What a row consists of


@dataclass(frozen=True)
class Sample:
    """What was measured of one candidate.

    Attributes:
        median: Over the rounds.
        low: The lower quartile.
        high: The upper quartile.
        rounds: How many there were.
        mean: Over the rounds; not a number where it was not taken.
    """

    median: float
    low: float
    high: float
    rounds: int
    mean: float = math.nan

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
        return cls(median, low, high, len(values), statistics.fmean(values))


@dataclass(frozen=True)
class Check:
    """Whether a candidate computes what it should.

    Attributes:
        error: How far off it is, e.g. relative to the size of the truth; infinite where it failed.
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


@dataclass(frozen=True)
class Goal:
    """A ratio aimed at: of a candidate to another of at most `bound`, or of the other to it of at least `bound`.

    Attributes:
        candidate: Whose goal it is.
        over: What it is compared with.
        bound: The ratio.
        faster: Whether the ratio is the speed-up, the other's measure over the candidate's.
    """

    candidate: str
    over: str
    bound: float
    faster: bool = False

    def met(self, ratio: float) -> bool:
        """Whether a ratio of the candidate to the other one, or the speed-up, is good enough."""
        return ratio >= self.bound if self.faster else ratio <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.faster else '≤'} {self.bound:g}"


@dataclass
class Row:
    """What was measured of one shape.

    Attributes:
        name: Of the shape.
        unit: The work that is measured, e.g. "step".
        base: The candidate that ratios are taken over.
        values: By candidate, of one unit.
        quantity: What values are, "seconds" or "bytes".
        checks: By candidate; all must hold. The base has none.
        goals: What is aimed at.
        details: By candidate, what else is known of it: residuals, evaluations, ...
        skipped: Candidates that are missing, and why.
        notes: What else to know.
    """

    name: str
    unit: str
    base: str
    values: dict[str, Sample] = field(default_factory=dict)
    quantity: str = "seconds"
    checks: dict[str, list[Check]] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def check(self, candidate: str, *checks: Check) -> None:
        """Add checks of a candidate."""
        self.checks.setdefault(candidate, []).extend(checks)

    def wrong(self, candidate: str) -> Check | None:
        """The first of its checks that does not hold."""
        return next((check for check in self.checks.get(candidate, ()) if not check.ok), None)

    def ratio(self, candidate: str, over: str | None = None) -> float | None:
        """Its measure over that of the base or of another one; None if one of both is wrong, or missing."""
        over = self.base if over is None else over
        if not {candidate, over} <= self.values.keys() or self.wrong(candidate) or self.wrong(over):
            return None
        return self.values[candidate].median / self.values[over].median

    def outcome(self, goal: Goal) -> float | None:
        """The ratio that a goal is about."""
        return self.ratio(goal.over, goal.candidate) if goal.faster else self.ratio(goal.candidate, goal.over)

    def record(self) -> dict[str, Any]:
        """Plain values."""
        checks = {name: [{**asdict(check), "ok": check.ok} for check in checks] for name, checks in self.checks.items()}
        goals = [
            {**asdict(goal), "ratio": ratio, "met": None if ratio is None else goal.met(ratio)}
            for goal in self.goals
            for ratio in [self.outcome(goal)]
        ]
        ratios = {name: self.ratio(name) for name in self.values}
        return {**asdict(self), "checks": checks, "goals": goals, "ratios": ratios}


# Timing


def in_turns(
    works: Mapping[Key, Work],
    device: torch.device,
    rounds: int = 15,
    units: int = 1,
    most_seconds: float = MOST_SECONDS,
    around: Callable[[Key], AbstractContextManager[Any]] = lambda name: nullcontext(),
) -> dict[Key, Sample]:
    """Time pieces of work, one after another in each of several rounds.

    Args:
        works: By name; each has been run before, so that nothing is compiled or recorded now.
        device: Where the work is done.
        rounds: How often, at most.
        units: What a piece of work consists of; times are divided by it.
        most_seconds: There are no more rounds once a candidate has taken so long on average, and had a few.
        around: What a piece of work is done in; entering and leaving it is not timed.
    """
    clock: Callable[[Work], float] = _on_cuda if device.type == "cuda" else _on_host
    seconds: dict[Key, list[float]] = {name: [] for name in works}
    for done in range(1, rounds + 1):
        for name, work in works.items():
            with around(name):
                seconds[name].append(clock(work) / units)
        taken = units * sum(map(sum, seconds.values())) / len(works)
        if done >= FEWEST_ROUNDS and taken * (done + 1) / done > most_seconds:
            break
    return {name: Sample.of(values) for name, values in seconds.items()}


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


def tidy(device: torch.device) -> None:
    """Give back what the row before held: recordings own memory of the device until they are collected."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


# Checking


def distance(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The error of several tensors together, relative to their size; infinite if anything is not finite."""
    size = math.hypot(*(float(b.double().norm()) for b in truth)) or 1.0
    error = math.hypot(*(float((a.double() - b.double()).norm()) for a, b in zip(found, truth, strict=True))) / size
    return error if math.isfinite(error) else math.inf


def recorded(run: Callable[[], None], device: torch.device) -> Work:
    """The same work, recorded once and replayed; what it refers to lives as long as the recording."""
    tape = tape_for(device)
    tape.rehearse(run)
    return partial(_replay, tape.record(run), run)


def _replay(replay: Work, kept: Work) -> None:
    replay()


def compared(found: Sequence[Tensor], truth: Sequence[Tensor], tolerance: float, against: str) -> Check:
    """The error of several tensors together."""
    return Check(distance(found, truth), tolerance, against)


def compared_each(found: Sequence[Tensor], truth: Sequence[Tensor], tolerance: float, against: str) -> Check:
    """The largest error of a tensor relative to its own size: a small tensor that is wrong is not lost among large."""
    worst = max(distance([a], [b]) for a, b in zip(found, truth, strict=True))
    return Check(worst, tolerance, f"{against}, tensor by tensor")


def replayed(deq: Any) -> Check:
    """That the captured engine did the work itself: every solve left to the eager one counts as an error."""
    reasons = dict(deq.capture.fallbacks)
    said = f" ({'; '.join(reasons)})" if reasons else ""
    return Check(float(sum(reasons.values())), 0.0, f"no solve left to the eager engine{said}")
