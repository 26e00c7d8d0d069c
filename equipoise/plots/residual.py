"""Residuals over training."""

from collections.abc import Sequence

from equipoise.plots import style
from equipoise.plots.logs import Run
from equipoise.plots.registry import Chart, register_figure
from equipoise.plots.solves import DIRECTIONS, solve_points


@register_figure("residual")
def residual(runs: Sequence[Run]) -> Chart:
    """Relative residual of the forward and backward solves over training: median and 95th percentile of systems.

    A direction in which no run solved anything (an adjoint without a solve) has no panel.
    """
    title = "Relative residuals over training"
    curves = {
        (run, direction, key): solve_points(run, direction, f"residual_{key}")
        for direction in DIRECTIONS
        for run in runs
        for key in ("p50", "p95")
    }
    shown = [d for d in DIRECTIONS if any(curves[run, d, "p50"] for run in runs)] or [DIRECTIONS[0]]
    figure, panels = style.panels(title, [2.0] * len(shown), sharex=True)
    for axes, direction in zip(panels, shown, strict=True):
        axes.set_yscale("log")
        axes.set_ylabel(f"{direction} residual")
        missing = 0
        for series, run in enumerate(runs):
            missing += style.curve(axes, curves[run, direction, "p50"], series)
            missing += style.curve(axes, curves[run, direction, "p95"], series, thin=True)
        if axes is panels[-1]:
            style.step_axis(axes, "training step")
        style.say_not_shown(axes, missing)
    labels = style.short_labels([run.label for run in runs])
    style.name_series(figure, panels[0], labels, {"median": {}, "95th percentile": {"thin": True}})
    rows = [
        (run.label, direction, step, value, dict(curves[run, direction, "p95"]).get(step))
        for (run, direction, key), points in curves.items()
        if key == "p50"
        for step, value in points
    ]
    return Chart(title, figure, ("run", "solve", "step", "residual_p50", "residual_p95"), rows)
