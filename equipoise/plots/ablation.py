"""Variants of a recipe side by side."""

import json
from collections.abc import Sequence
from typing import Any

from matplotlib.lines import Line2D

from equipoise.plots import style
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import Chart, register_figure

FILE = "ablation.json"
_SHIFT = 0.25  # of seeds below their mean, over the distance of variants


@register_figure("ablation")
def ablation(runs: Sequence[Run]) -> Chart:
    """Metric of each variant of an ablation: mean and spread, seeds, what was published; below it, steps of solves."""
    title = "Ablation"
    records = {run: _read(run) for run in runs}
    drawn = [(run, key) for run, record in records.items() for key in _shown(record)]
    figure, panels = style.panels(title, [0.55 + 0.3 * len(records[run]["variants"]) for run, _ in drawn])
    for axes, (run, key) in zip(panels, drawn, strict=True):
        record = records[run]
        scale = 100.0 if record["percent"] and key == record["metric"] else 1.0
        _panel(axes, run, record["variants"], key, scale)
        what = f"to a residual of {record['rtol']:g}" if key == "steps" else record["split"]
        axes.set_xlabel(f"{key}{', %' if scale == 100 else ''}, {what}")
        axes.set_title(style.shorten(record["title"] if key == record["metric"] else "Steps of a solve", 60))
    style.legend(figure, _samples(records.values()))
    return Chart(title, figure, _COLUMNS, [row for run, record in records.items() for row in _rows(run, record)])


_KEYS = ("second", "residual", "residual_second", "steps", "unconverged", "minutes")
_COLUMNS = ("run", "variant", "seed", "complete", "metric", "value", *_KEYS, "parameters", "published")


def _shown(record: dict[str, Any]) -> list[str]:
    """The metric, and steps where they were counted."""
    counted = any("steps" in variant["mean"] for variant in record["variants"].values())
    return [record["metric"], *(["steps"] if counted else [])]


def _panel(axes: Any, run: Run, variants: dict[str, Any], key: str, scale: float) -> None:
    for place, variant in enumerate(variants.values()):
        seeds = [scale * run.number(one[key]) for one in variant["runs"] if key in one]
        axes.plot(seeds, [place + _SHIFT] * len(seeds), **_SEED)
        if key in variant["mean"]:
            mean, spread = (scale * run.number(variant[part].get(key, 0.0)) for part in ("mean", "spread"))
            axes.errorbar([mean], [place], xerr=[spread], capsize=3, elinewidth=1.4, **_MEAN)
        if key != "steps" and variant["published"] is not None:
            axes.plot([scale * variant["published"]], [place - _SHIFT], **_PUBLISHED)
    axes.set_yticks(range(len(variants)), [style.shorten(name, 20) for name in variants])
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


_MEAN: dict[str, Any] = {"color": style.COLORS[0], "marker": "o", "linestyle": "none", "markersize": 6}
_SEED: dict[str, Any] = {**_MEAN, "markersize": 3.5, "markerfacecolor": "white", "markeredgewidth": 0.9}
_PUBLISHED: dict[str, Any] = {"color": style.COLORS[1], "marker": "D", "linestyle": "none", "markersize": 5}


def _samples(records: Any) -> list[Line2D]:
    entries = {"mean ± standard deviation": _MEAN, "a seed": _SEED}
    if any(variant["published"] is not None for record in records for variant in record["variants"].values()):
        entries["published"] = _PUBLISHED
    return [Line2D([], [], label=label, **drawn) for label, drawn in entries.items()]


def _rows(run: Run, record: dict[str, Any]) -> list[tuple[Any, ...]]:
    """A row for each run."""
    metric = record["metric"]
    keys = [metric, *(f"{metric}_second" if key == "second" else key for key in _KEYS), "parameters"]
    return [
        (run.label, name, one["seed"], one["complete"], metric, *map(one.get, keys), variant["published"])
        for name, variant in record["variants"].items()
        for one in variant["runs"]
    ]


def _read(run: Run) -> dict[str, Any]:
    path, how = run.folder / FILE, f"`equipoise ablate FILE --out {run.path}` writes it"
    if not path.is_file():
        raise LogError(run, f"{path} is missing; {how}.", foreign=True)
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LogError(run, f"{path} is not JSON ({error}); {how} anew.") from error
    if not any(variant["runs"] for variant in record.get("variants", {}).values()):
        raise LogError(run, f"{path} has no runs that are done; {how} anew.")
    return record
