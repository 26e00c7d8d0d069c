"""Steps that systems take."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from equipoise.plots import style
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import Chart, register_figure


@register_figure("steps")
def steps(runs: Sequence[Run]) -> Chart:
    """How many systems took how many steps to the tolerance, one panel per run."""
    title = "Solver steps per system"
    logged = {run: run.inspection("steps", dict) for run in runs}
    counts = {run: _counts(run, values) for run, values in logged.items()}
    figure, panels = style.panels(title, [2.1 if len(runs) > 1 else 2.6] * len(runs), sharex=True)
    labels = style.short_labels([run.label for run in runs])
    for axes, run, label in zip(panels, runs, labels, strict=True):
        taken = counts[run]
        axes.bar(list(taken), list(taken.values()), 0.8, color=style.FILLS[0], edgecolor=style.INK, linewidth=0.8)
        axes.set_title(f"{label}\n{_settings(logged[run])}")
        axes.set_ylabel("systems")
        axes.yaxis.set_major_locator(style.whole_numbers(5))
        axes.grid(visible=False, axis="x")
        if axes is panels[-1]:
            style.step_axis(axes, "solver steps")
        style.say_not_shown(axes, len(logged[run]["values"]) - sum(taken.values()))
    _widen(panels[-1], [step for taken in counts.values() for step in taken])
    rows = [(run.label, step, count) for run, taken in counts.items() for step, count in taken.items()]
    return Chart(title, figure, ("run", "steps", "systems"), rows)


def _counts(run: Run, section: dict[str, Any]) -> dict[int | float, int]:
    values = section.get("values")
    if not values:
        raise LogError(run, f"{run.path} has no steps per system; `equipoise inspect {run.path}` writes them.")
    taken = Counter(number for value in values if math.isfinite(number := run.number(value)))
    return dict(sorted(taken.items()))


def _widen(axes: Axes, steps: list[int | float]) -> None:
    """Room for a dozen bars at least: a single one would fill the panel."""
    if steps:
        room = max(0.0, 12 - (max(steps) - min(steps))) / 2 + 0.7
        axes.set_xlim(max(-0.7, min(steps) - room), max(steps) + room)


def _settings(section: dict[str, Any]) -> str:
    said = []
    if section.get("rtol") is not None:
        said.append(f"rtol {section['rtol']:g}")
    if section.get("max_steps") is not None:
        said.append(f"budget {section['max_steps']}")
    statuses = section.get("statuses") or {}
    if statuses:
        said.append(f"{statuses.get('converged', 0)} of {sum(statuses.values())} converged")
    return ", ".join(said)
