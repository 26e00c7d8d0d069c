"""What measured curves of metric against time amount to: how much sooner an equal metric, and who is ahead where."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

TOLERANCE = 5e-3  # a metric so much worse still counts as equal

Curve = Sequence[Mapping[str, Any]]
"""Points of a solver, by number of steps, each with `steps`, `metric` and `ms`."""


def conclusions(record: Mapping[str, Any]) -> dict[str, Any]:
    """All that follows from the points of a measurement.

    Args:
        record: With `points`, `reference`, `at`, `better`, and `missing`, the numbers of steps still to be measured.
    """
    return {
        "speedup": speedups(record),
        "ahead": steps_ahead(record),
        "behind": most_behind(record),
        "ahead_in_time": ahead_in_time(record),
    }


def curves(record: Mapping[str, Any]) -> dict[str, list[list[dict[str, Any]]]]:
    """The points of each solver by seed, by number of steps; single points of other models are left out."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for point in record["points"]:
        if point["steps"] is not None:
            found.setdefault(point["solver"], {}).setdefault(point["seed"], []).append(point)
    return {
        name: [sorted(seeds[seed], key=lambda point: point["steps"]) for seed in sorted(seeds)]
        for name, seeds in found.items()
    }


def mean_curve(seeds: Sequence[Curve]) -> list[dict[str, Any]]:
    """Means over seeds, of metric and time; the metric is NaN where that of a seed is not finite."""
    grouped: dict[int, list[Mapping[str, Any]]] = {}
    for point in (point for seed in seeds for point in seed):
        grouped.setdefault(point["steps"], []).append(point)
    return [
        {"steps": steps, **{name: _finite_mean([point[name] for point in grouped[steps]]) for name in ("metric", "ms")}}
        for steps in sorted(grouped)
    ]


def _finite_mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def time_to_reach(curve: Curve, target: float, better: str = "lower") -> float | None:
    """Milliseconds at which a curve first reaches a metric, by linear interpolation; None if it does not.

    Nothing is extrapolated: where the first point is good enough, it is the time of that point; likewise where the
    point before has no finite metric.

    Args:
        curve: Points by number of steps.
        target: The metric to reach.
        better: Whether "lower" or "higher" is better.
    """
    sign = 1.0 if better == "lower" else -1.0
    before: Mapping[str, Any] | None = None
    for point in curve:
        if sign * point["metric"] <= sign * target:
            if before is None or not math.isfinite(before["metric"]):
                return float(point["ms"])
            share = (before["metric"] - target) / (before["metric"] - point["metric"])
            return float(before["ms"] + share * (point["ms"] - before["ms"]))
        before = point
    return None


def speedups(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """How much sooner each solver reaches the metric that the reference has after `at` steps, within half a percent.

    `values` has a ratio for each seed, None where the metric is not reached: the time the reference needs for that
    metric, over the seed's. It may need fewer than `at` steps; `over_budget` is over its time for all of them, and
    `alone` the mean for batches one at a time. Where numbers of steps are missing still, curves count up to the first
    of them. A reference of several seeds counts by its mean.
    """
    said = _speedups(record)
    if all("ms_alone" in point for point in record["points"]):
        points = [{**point, "ms": point["ms_alone"]} for point in record["points"]]
        for name, found in _speedups({**record, "points": points}).items():
            said[name]["alone"] = found["mean"]
    return said


def _speedups(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found, better, missing = curves(record), record["better"], record.get("missing", ())
    reference = mean_curve(found[record["reference"]])
    end = next(point for point in reference if point["steps"] == record["at"])
    slack = TOLERANCE * abs(end["metric"])
    target = end["metric"] + (slack if better == "lower" else -slack)

    def reached(curve: Curve) -> float | None:
        # Not across a gap, where the curve is unknown.
        return time_to_reach([p for p in curve if not missing or p["steps"] < min(missing)], target, better)

    needed = reached(reference)
    said: dict[str, dict[str, Any]] = {}
    for name, seeds in found.items():
        times = [reached(seed) for seed in seeds]
        values = [None if time is None or needed is None else needed / time for time in times]
        over = [None if time is None else end["ms"] / time for time in times]
        said[name] = {"target": target, "values": values, "mean": _mean(values), "over_budget": _mean(over)}
    return said


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def steps_ahead(record: Mapping[str, Any]) -> dict[str, list[int]]:
    """The numbers of steps after which the mean metric of each solver is no worse than the reference's."""
    return {name: [steps for steps, lag in lags.items() if lag <= 0] for name, lags in _lags(record).items()}


def most_behind(record: Mapping[str, Any]) -> dict[str, float]:
    """By which part the mean metric of each solver is worse than the reference's, at most; 0 where it never is."""
    return {name: max([0.0, *lags.values()]) for name, lags in _lags(record).items()}


def ahead_in_time(record: Mapping[str, Any]) -> dict[str, list[int]]:
    """The numbers of steps of each solver after which its mean metric is no worse than the reference's at that time.

    In between its points the reference is taken to be on a line; before the first it has nothing, and after the last
    measured one it stays as it is.
    """
    found = _mean_costs(record)
    own = [(ms, cost) for ms, cost in found.pop(record["reference"]).values()]
    return {
        name: [steps for steps, (ms, cost) in points.items() if math.isfinite(cost) and cost <= _at_time(own, ms)]
        for name, points in found.items()
    }


def _at_time(curve: Sequence[tuple[float, float]], ms: float) -> float:
    """The best that a curve of times and metrics, lower being better, has had by then; infinite before its first."""
    best, before = math.inf, None
    for time, metric in sorted(curve):
        if time > ms:
            if before is None or not math.isfinite(before[1] + metric):
                return best
            return min(best, before[1] + (ms - before[0]) / (time - before[0]) * (metric - before[1]))
        best, before = min(best, metric), (time, metric)
    return best


def _mean_costs(record: Mapping[str, Any]) -> dict[str, dict[int, tuple[float, float]]]:
    """Mean milliseconds and metrics of each solver by number of steps; metrics so that lower is better, infinite where
    one of a seed is not finite."""
    sign = 1.0 if record["better"] == "lower" else -1.0
    return {
        name: {
            point["steps"]: (point["ms"], math.inf if math.isnan(point["metric"]) else sign * point["metric"])
            for point in mean_curve(seeds)
        }
        for name, seeds in curves(record).items()
    }


def _lags(record: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """By which part the mean metric of each solver is worse than the reference's after each number of steps."""
    found = _mean_costs(record)
    own = found.pop(record["reference"])
    return {
        name: {steps: _lag(cost, own[steps][1]) for steps, (_, cost) in points.items()}
        for name, points in found.items()
    }


def _lag(value: float, reference: float) -> float:
    if value == math.inf:  # worse, whatever the other is
        return math.inf
    difference = value - reference
    if 0 < abs(reference) < math.inf:
        return difference / abs(reference)
    return math.copysign(math.inf, difference) if difference else 0.0
