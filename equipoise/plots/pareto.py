"""Metric against time per batch."""

import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from equipoise.plots import style
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import Chart, register_figure
from equipoise.train.pareto import FILE, LEARNED
from equipoise.train.pareto_curves import TOLERANCE

Curves = dict[str, list[list[tuple[float, float]]]]
"""Points (ms, metric) by solver and seed."""

LINE, LETTERS = 0.17, 52  # of a title: inches of a line, and how much of it fits above the axes
LEAST = 1e-4  # below this share, what metrics lack of the best one is not told apart
MOST = 1e30  # beyond it a metric is as good as infinite, and axes overflow


@register_figure("pareto")
def pareto(runs: Sequence[Run]) -> Chart:
    """Metric against milliseconds per batch, and what it lacks of the best; a point per number of steps, two panels per
    run, means over seeds."""
    title = "Metric against time"
    logged = {run: _read(run) for run in runs}
    names = list(dict.fromkeys(point["solver"] for record in logged.values() for point in record["points"]))
    called = dict(zip(names, style.short_labels(["learned" if n == LEARNED else n for n in names]), strict=True))
    figure, panels = style.panels(title, [2.2 if len(runs) > 1 else 2.6] * 2 * len(runs))
    labels = style.short_labels([_run_name(run, record) for run, record in logged.items()])
    for axes, below, run, label in zip(panels[::2], panels[1::2], runs, labels, strict=True):
        record = logged[run]
        curves = {name: _curves(run, record, name) for name in names}
        if style.spans_decades([y for seeds in curves.values() for seed in seeds for _, y in seed]):
            axes.set_yscale("log")
        style.say_not_shown(axes, _draw(axes, curves))
        said = [part for line in _conclusion(record, called) for part in textwrap.wrap(line, LETTERS)]
        figure.set_figheight(figure.get_figheight() + LINE * len(said))
        axes.set_title("\n".join([label, *said]))
        axes.set_ylabel(f"{record['metric']} ({record['better']} is better)")
        below.set_yscale("log")
        _draw(below, _lacking(curves, record["better"]))
        below.axhline(100 * TOLERANCE, color="0.5", linewidth=0.8, linestyle=":")
        below.set_ylabel("% worse than the best")
        below.set_xlabel("milliseconds per batch")
    roles = [style.sample("mean of seeds"), style.sample("a seed", thin=True)]
    several = any(point["seed"] for record in logged.values() for point in record["points"])
    style.legend(
        figure, [style.sample(name, i) for i, name in enumerate(called.values())], *([roles] if several else [])
    )
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
            (run.number(point["ms"]), _drawable(run.number(point["metric"])))
            for point in sorted(own, key=lambda point: point["steps"] or 0)
            if point["seed"] == seed
        ]
        for seed in sorted({point["seed"] for point in own})
    ]


def _drawable(value: float) -> float:
    """A metric, or NaN if it is too large for axes."""
    return value if abs(value) <= MOST else math.nan


def _run_name(run: Run, record: Mapping[str, Any]) -> str:
    """Of the run that was measured, which is not the folder of a report on it."""
    name = Path(record.get("run") or "").name
    return name if name and name != run.folder.name else run.label


def _mean(seeds: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    columns = zip(*seeds, strict=True)
    return [(statistics.fmean(x for x, _ in column), statistics.fmean(y for _, y in column)) for column in columns]


def _conclusion(record: Mapping[str, Any], called: Mapping[str, str]) -> list[str]:
    """What the points amount to: a line for each solver, under one of their own."""
    found = {name: value for name, value in (record.get("speedup") or {}).items() if name != record.get("reference")}
    said = [
        f"{called.get(name, name)} {value['mean']:.2f}×" + _over_budget(value, record)
        for name, value in found.items()
        if isinstance(value.get("mean"), int | float)
    ]
    reference = record["reference"]
    return [f"speed at equal {record['metric']}, {called.get(reference, reference)} = 1:", *said] if said else []


def _over_budget(speedup: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The speed-up over all steps of the reference, where it could have stopped earlier."""
    value, steps = speedup.get("over_budget"), record.get("at")
    return f" (over its {steps} steps {value:.2f}×)" if isinstance(value, int | float) and steps else ""
