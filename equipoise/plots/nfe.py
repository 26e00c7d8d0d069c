"""Evaluations over training."""

import math
from collections.abc import Sequence

from equipoise.plots import style
from equipoise.plots.logs import Run
from equipoise.plots.registry import Chart, register_figure
from equipoise.plots.solves import DIRECTIONS, solve_points


@register_figure("nfe")
def nfe(runs: Sequence[Run]) -> Chart:
    """Evaluations of f per forward solve, and products with its Jacobian per backward solve, over training."""
    title = "Evaluations of f over training"
    curves = {(run, direction): solve_points(run, direction, "nfe") for run in runs for direction in DIRECTIONS}
    figure, (axes,) = style.panels(title, [2.8])
    missing = 0
    for (run, direction), points in curves.items():
        missing += style.curve(axes, points, list(runs).index(run), dashed=direction == "backward")
    highest = max((y for points in curves.values() for _, y in points if math.isfinite(y)), default=1.0)
    axes.set_ylim(0, 1.08 * highest or 1.0)  # from zero, so that heights compare
    axes.yaxis.set_major_locator(style.whole_numbers(6))
    axes.set_ylabel("evaluations per solve")
    style.step_axis(axes, "training step")
    style.say_not_shown(axes, missing)
    labels = style.short_labels([run.label for run in runs])
    style.name_series(figure, axes, labels, {"forward": {}, "backward": {"dashed": True}})
    rows = [
        (run.label, direction, step, value) for (run, direction), points in curves.items() for step, value in points
    ]
    return Chart(title, figure, ("run", "solve", "step", "nfe"), rows)
