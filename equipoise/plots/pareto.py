"""Metric against time per batch."""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from equipoise.plots import style
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import Chart, register_figure
from equipoise.train.pareto import FILE, LEARNED
from equipoise.train.pareto_curves import TOLERANCE, Curve, curves, mean_curve, times_faster, times_over_budget

Curves = Mapping[str, Sequence[Curve]]
"""Points by solver and seed."""

LINE, LETTERS = 0.17, 52  # of a title: inches of a line, and how much of it fits above the axes
EQUAL: dict[str, Any] = {"color": "0.5", "linewidth": 0.8, "linestyle": ":"}  # the line of what counts as equal
LEAST = 1e-4  # below this share, what metrics lack of the best one is not told apart
MOST = 1e30  # beyond it a metric is as good as infinite, and axes overflow


@register_figure("pareto")
def pareto(runs: Sequence[Run]) -> Chart:
    """Metric against milliseconds per batch, and what it lacks of the best; a point per number of steps, two panels per
    run, means over seeds."""
    title = "Metric against time"
    logged = {run: _read(run) for run in runs}
    names = list(dict.fromkeys(point["solver"] for record in logged.values() for point in record["points"]))
    called = _called(names, list(logged.values()))
    figure, panels = style.panels(title, [2.2 if len(runs) > 1 else 2.6] * 2 * len(runs))
    labels = style.short_labels([_run_name(run, record) for run, record in logged.items()])
    for axes, below, run, label in zip(panels[::2], panels[1::2], runs, labels, strict=True):
        record = logged[run]
        found = _curves(run, record)
        drawn = {name: found.get(name, []) for name in names}  # each solver in one colour in all panels
        if style.spans_decades([p["metric"] for seeds in drawn.values() for seed in seeds for p in seed]):
            axes.set_yscale("log")
        style.say_not_shown(axes, _draw(axes, drawn))
        own = called | (_called([LEARNED], [record]) if called.get(LEARNED) == "learned" else {})  # of other recipes
        said = [part for line in _conclusion(record, own) for part in textwrap.wrap(line, LETTERS)]
        figure.set_figheight(figure.get_figheight() + LINE * len(said))
        axes.set_title("\n".join([label, *said]))
        axes.set_ylabel(f"{record['metric']} ({record['better']} is better)")
        below.set_yscale("log")
        _draw(below, _lacking(drawn, record["better"]))
        below.axhline(100 * TOLERANCE, **EQUAL)
        below.set_ylabel(f"% worse than the best,\n{100 * LEAST:g} or less at the bottom")
        below.set_xlabel("milliseconds per batch")
    roles = [Line2D([], [], label=f"{100 * TOLERANCE:g} % worse: counts as equal", **EQUAL)]
    if any(point["seed"] for record in logged.values() for point in record["points"]):
        roles += [style.sample("mean of seeds"), style.sample("a seed", thin=True)]
    style.legend(figure, [style.sample(name, i) for i, name in enumerate(called.values())], roles)
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
                missing += style.curve(axes, _points(seed), series, thin=True)
        missing += style.curve(axes, _points(mean_curve(seeds)), series)
    return missing


def _points(curve: Curve) -> list[tuple[float, float]]:
    return [(point["ms"], point["metric"]) for point in curve]


def _lacking(curves: Curves, better: str) -> Curves:
    """By how many percent metrics are worse than the best of all."""
    sign = 1.0 if better == "lower" else -1.0
    values = [sign * point["metric"] for seeds in curves.values() for seed in seeds for point in seed]
    best = min(filter(math.isfinite, values), default=math.nan)
    size = abs(best) or 1.0

    def lacking(point: Mapping[str, Any]) -> dict[str, Any]:
        return {**point, "metric": 100 * max((sign * point["metric"] - best) / size, LEAST)}

    return {name: [list(map(lacking, seed)) for seed in seeds] for name, seeds in curves.items()}


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


def _curves(run: Run, record: dict[str, Any]) -> Curves:
    """What can be drawn of each solver by seed, and of each other model, by number of steps."""

    def drawable(point: dict[str, Any]) -> dict[str, Any]:
        numbers = {"ms": run.number(point["ms"]), "metric": _drawable(run.number(point["metric"]))}
        return {**point, **numbers, "steps": point["steps"] or 0}

    return curves({"points": list(map(drawable, record["points"]))})


def _called(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """How solvers are called; learned ones of a report by their recipe, if all have the same."""
    recipes = {record.get("recipe") for record in records}
    recipe = recipes.pop() if len(recipes) == 1 else None
    learned = f"learned ({recipe})" if recipe else "learned"
    return dict(zip(names, style.short_labels([learned if name == LEARNED else name for name in names]), strict=True))


def _drawable(value: float) -> float:
    """A metric, or NaN if it is too large for axes."""
    return value if abs(value) <= MOST else math.nan


def _run_name(run: Run, record: Mapping[str, Any]) -> str:
    """Of the run that was measured, which is not the folder of a report on it."""
    name = Path(record.get("run") or "").name
    return name if name and name != run.folder.name else run.label


def _conclusion(record: Mapping[str, Any], called: Mapping[str, str]) -> list[str]:
    """What the points amount to: a line for each solver, under one of their own."""
    found = {name: value for name, value in (record.get("speedup") or {}).items() if name != record.get("reference")}
    said = [
        f"{called.get(name, name)} {times}{_over_budget(value, record)}"
        for name, value in found.items()
        if (times := _times(times_faster(value)))
    ]
    reference = record["reference"]
    return [f"speed at equal {record['metric']}, {called.get(reference, reference)} = 1:", *said] if said else []


def _over_budget(speedup: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The speed-up over all steps of the reference, where it could have stopped earlier."""
    times, steps = _times(times_over_budget(speedup)), record.get("at")
    return f" (over its {steps} steps {times})" if times and steps else ""


def _times(number: str | None) -> str:
    """How many times, if that is known."""
    return f"{number}×" if number and number[-1].isdigit() else number or ""
