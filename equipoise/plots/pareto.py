"""Metric against time per batch."""

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from equipoise.plots import style
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import Chart, register_figure
from equipoise.train.pareto import FILE
from equipoise.train.pareto_curves import TOLERANCE

Curves = dict[str, list[list[tuple[float, float]]]]
"""Points (ms, metric) by solver and seed."""

LEAST = 1e-4  # below this share, what metrics lack of the best one is not told apart


@register_figure("pareto")
def pareto(runs: Sequence[Run]) -> Chart:
    """Metric against milliseconds per batch, and what it lacks of the best; a point per number of steps, two panels per
    run, means over seeds."""
    title = "Metric against time"
    logged = {run: _read(run) for run in runs}
    names = list(dict.fromkeys(point["solver"] for record in logged.values() for point in record["points"]))
    figure, panels = style.panels(title, [2.2 if len(runs) > 1 else 2.6] * 2 * len(runs))
    labels = style.short_labels([run.label for run in runs])
    for axes, below, run, label in zip(panels[::2], panels[1::2], runs, labels, strict=True):
        record = logged[run]
        if style.spans_decades([run.number(point["metric"]) for point in record["points"]]):
            axes.set_yscale("log")
        curves = {name: _curves(run, record, name) for name in names}
        style.say_not_shown(axes, _draw(axes, curves))
        axes.set_title(f"{label}\n{_conclusion(record)}" if _conclusion(record) else label)
        axes.set_ylabel(f"{record['metric']} ({record['better']} is better)")
        below.set_yscale("log")
        _draw(below, _lacking(curves, record["better"]))
        below.axhline(100 * TOLERANCE, color="0.5", linewidth=0.8, linestyle=":")
        below.set_ylabel("% worse than the best")
        below.set_xlabel("milliseconds per batch")
    roles = [style.sample("mean of seeds"), style.sample("a seed", thin=True)]
    several = any(point["seed"] for record in logged.values() for point in record["points"])
    style.legend(figure, [style.sample(name, i) for i, name in enumerate(names)], *([roles] if several else []))
    columns = ("run", "solver", "seed", "steps", "metric", "ms", "residual")
    rows = [
        (run.label, *(point.get(column) for column in columns[1:]))
        for run, record in logged.items()
        for point in record["points"]
    ]
    return Chart(title, figure, columns, rows)


def _draw(axes: Axes, curves: Curves) -> int:
    """Seeds and their means by solver; returns how many points could not be shown."""
    missing = 0
    for series, seeds in enumerate(curves.values()):
        if len(seeds) > 1:
            for seed in seeds:
                missing += style.curve(axes, seed, series, thin=True)
        missing += style.curve(axes, _mean(seeds), series)
    return missing


def _lacking(curves: Curves, better: str) -> Curves:
    """By how many percent metrics are worse than the best of all."""
    sign = 1.0 if better == "lower" else -1.0
    known = [sign * y for seeds in curves.values() for seed in seeds for _, y in seed if math.isfinite(y)]
    best = min(known, default=math.nan)
    size = abs(best) or 1.0
    return {
        name: [[(x, 100 * max((sign * y - best) / size, LEAST)) for x, y in seed] for seed in seeds]
        for name, seeds in curves.items()
    }


def _read(run: Run) -> dict[str, Any]:
    path = run.folder / FILE
    how = f"`equipoise evaluate {run.path} --pareto` writes it"
    if not path.is_file():
        raise LogError(run, f"{path} is missing; {how}.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LogError(run, f"{path} is not JSON ({error}); {how} anew.") from error
    if not isinstance(record, dict) or not record.get("points"):
        raise LogError(run, f"{path} has no points; {how} anew.")
    return record


def _curves(run: Run, record: dict[str, Any], name: str) -> list[list[tuple[float, float]]]:
    """The points (ms, metric) of each seed of a solver, by number of steps."""
    own = [point for point in record["points"] if point["solver"] == name]
    return [
        [
            (run.number(point["ms"]), run.number(point["metric"]))
            for point in sorted(own, key=lambda point: point["steps"] or 0)
            if point["seed"] == seed
        ]
        for seed in sorted({point["seed"] for point in own})
    ]


def _mean(seeds: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    columns = zip(*seeds, strict=True)
    return [(statistics.fmean(x for x, _ in column), statistics.fmean(y for _, y in column)) for column in columns]


def _conclusion(record: dict[str, Any]) -> str:
    """What the points amount to."""
    found = {name: value for name, value in (record.get("speedup") or {}).items() if name != record.get("reference")}
    said = [
        f"{name} {value['mean']:.2f}×" + _over_budget(value, record)
        for name, value in found.items()
        if isinstance(value.get("mean"), int | float)
    ]
    return f"speed at equal {record['metric']}, {record['reference']} = 1:\n{', '.join(said)}" if said else ""


def _over_budget(speedup: dict[str, Any], record: dict[str, Any]) -> str:
    """The speed-up over all steps of the reference, where it could have stopped earlier."""
    value, steps = speedup.get("over_budget"), record.get("at")
    return f" (over its {steps} steps {value:.2f}×)" if isinstance(value, int | float) and steps else ""
