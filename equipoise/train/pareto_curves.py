"""What measured curves of metric against time amount to: how much sooner an equal metric, and who is ahead where."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

TOLERANCE = 5e-3  # a metric so much worse still counts as equal
LEAST, MOST, UNKNOWN = "at least", "at most", "unknown"  # what a speed-up is that measured times do not tell
UNSTEADY = 1.5  # upper over lower quartile of the times of a batch, above which something else ran
FALLS = 1.05  # likewise a time over that after more steps

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
        "noise": noise(record),
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

    Who has the metric after the fewest steps that were measured may have it after fewer: then `bound` says what the
    mean is, "at least" where that is the solver, "at most" the reference, "unknown" both; it is None for a number that
    is known, and `over_budget` is of the solver alone, and at least as large. Nobody takes less than one step.
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

    def early(curve: Curve) -> bool:
        return curve[0]["steps"] > 1 and reached(curve[:1]) is not None

    needed = reached(reference)
    said: dict[str, dict[str, Any]] = {}
    for name, seeds in found.items():
        times = [reached(seed) for seed in seeds]
        values = [None if time is None or needed is None else needed / time for time in times]
        over = [None if time is None else end["ms"] / time for time in times]
        bound = _BOUNDS[any(map(early, seeds)), early(reference)] if name != record["reference"] else None
        means = {"mean": _mean(values), "bound": bound, "over_budget": _mean(over)}
        said[name] = {"target": target, "values": values, **means}
    return said


# By whether the solver, and whether the reference, may have the metric earlier than was measured.
_BOUNDS = {(False, False): None, (True, False): LEAST, (False, True): MOST, (True, True): UNKNOWN}


def times_faster(speedup: Mapping[str, Any]) -> str | None:
    """The mean of a speed-up, of one solver, with its bound; None if there is none."""
    mean, bound = speedup.get("mean"), speedup.get("bound")
    if not isinstance(mean, int | float):
        return None
    return "not known" if bound == UNKNOWN else f"{bound} {mean:.2f}" if bound else f"{mean:.2f}"


def times_over_budget(speedup: Mapping[str, Any]) -> str | None:
    """The same over the time that the reference takes for all of its steps."""
    bound = LEAST if speedup.get("bound") in (LEAST, UNKNOWN) else None
    return times_faster({"mean": speedup.get("over_budget"), "bound": bound})


def why_bounded(speedup: Mapping[str, Any], solver: str, reference: str, option: str) -> str:
    """Why a speed-up is a bound, and what to do; nothing where it is none.

    Args:
        speedup: Of `speedups`, of one solver.
        solver: What that is called.
        reference: Likewise.
        option: By which numbers of steps are given.
    """
    who = {LEAST: f"{solver} has", MOST: f"{reference} has", UNKNOWN: "both have"}.get(speedup.get("bound") or "")
    return f"{who} it after the fewest steps that were measured: give fewer {option}" if who else ""


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def noise(record: Mapping[str, Any]) -> str | None:
    """What tells that times are not those of the solvers alone, in words; None if nothing does."""
    spreads = [(p["ms_high"] / p["ms_low"], p) for p in record["points"] if p.get("ms_low", 0) > 0]
    pairs = [pair for own in curves(record).values() for seed in own for pair in itertools.combinations(seed, 2)]
    falls = [(before["ms"] / after["ms"], before, after) for before, after in pairs if after["ms"] > 0]
    said = []
    if spreads and (worst := max(spreads, key=lambda found: found[0]))[0] > UNSTEADY:
        spread, point = worst
        steps = "" if point["steps"] is None else f" after {_steps(point['steps'])}"
        said.append(f"vary by {100 * (spread - 1):.0f} % from call to call ({point['solver']}{steps})")
    if falls and (most := max(falls, key=lambda found: found[0]))[0] > FALLS:
        fall, before, after = most
        where = f"{before['solver']}, after {before['steps']} and {_steps(after['steps'])}"
        said.append(f"fall by {100 * (1 - 1 / fall):.0f} % with more steps ({where})")
    return f"times {' and '.join(said)}: other work probably ran on this machine" if said else None


def _steps(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''}"


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
