"""Bars of a DEQ beside explicit networks, which several figures show."""

import math
from collections.abc import Mapping, Sequence

from equipoise.plots import style
from equipoise.plots.logs import Run
from equipoise.plots.registry import Chart


def bar_chart(
    title: str,
    runs: Sequence[Run],
    section: str,
    parts: Mapping[str, str],
    units: Mapping[str, float],
    logged_in: str,
) -> Chart:
    """Stacked bars, one per row of a section of inspect.json, one panel per run.

    Args:
        title: Of the figure.
        runs: To show.
        section: Of inspect.json: a list of tables with a name, a depth, and the parts.
        parts: Keys of the parts that make a bar, and their labels.
        units: By name, ascending; the largest that leaves the longest bar at 1 or more is shown.
        logged_in: The unit of the log, and of the table.
    """
    tables = {run: run.inspection(section, list) for run in runs}
    lengths = {run: {key: [run.number(row.get(key)) for row in rows] for key in parts} for run, rows in tables.items()}
    unit, scale = _unit([x for values in lengths.values() for column in values.values() for x in column], units)
    figure, panels = style.panels(title, [0.5 + 0.36 * len(rows) for rows in tables.values()])
    labels = style.short_labels([run.label for run in runs])
    for axes, label, run in zip(panels, labels, runs, strict=True):
        names = [str(row.get("name", "")) for row in tables[run]]
        missing = style.stacked_bars(
            axes, names, {parts[key]: [x / scale for x in column] for key, column in lengths[run].items()}, unit
        )
        axes.set_title(label)
        axes.set_xlabel(unit)
        style.say_not_shown(axes, missing)
    widest = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        axes.set_xlim(0, widest)
    style.legend(figure, style.part_samples(list(parts.values())))
    rows = [
        (run.label, row.get("name"), row.get("depth"), *(lengths[run][key][i] for key in parts))
        for run, table in tables.items()
        for i, row in enumerate(table)
    ]
    return Chart(title, figure, ("run", "name", "depth", *(f"{key}_{logged_in}" for key in parts)), rows)


def _unit(values: Sequence[float], units: Mapping[str, float]) -> tuple[str, float]:
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    fitting = [(name, scale) for name, scale in units.items() if scale <= largest]
    return fitting[-1] if fitting else next(iter(units.items()))
