"""Metric against time per batch."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from equipoise.plots import style
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import Chart, register_figure

FILE = "pareto.json"


@register_figure("pareto")
def pareto(runs: Sequence[Run]) -> Chart:
    """Metric against milliseconds per batch, one point per number of steps: means over seeds, one panel per run."""
    title = "Metric against time"
    logged = {run: _read(run) for run in runs}
    names = list(dict.fromkeys(point["solver"] for record in logged.values() for point in record["points"]))
    figure, panels = style.panels(title, [2.6 if len(runs) > 1 else 3.2] * len(runs))
    for axes, run, label in zip(panels, runs, style.short_labels([run.label for run in runs]), strict=True):
        record = logged[run]
        if style.spans_decades([run.number(point["metric"]) for point in record["points"]]):
            axes.set_yscale("log")
        missing = 0
        for name in names:
            seeds = _curves(run, record, name)
            if len(seeds) > 1:
                for seed in seeds:
                    missing += style.curve(axes, seed, names.index(name), thin=True)
            missing += style.curve(axes, _mean(seeds), names.index(name))
        axes.set_title(f"{label}\n{_conclusion(record)}" if _conclusion(record) else label)
        axes.set_ylabel(f"{record['metric']} ({record['better']} is better)")
        axes.set_xlabel("milliseconds per batch")
        style.say_not_shown(axes, missing)
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
    said = [
        f"{name} {value['mean']:.2f}×"
        for name, value in (record.get("speedup") or {}).items()
        if name != record.get("reference") and isinstance(value.get("mean"), int | float)
    ]
    return f"faster than {record['reference']} at equal {record['metric']}:\n{', '.join(said)}" if said else ""
