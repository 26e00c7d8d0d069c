"""Residual of each resolution over the steps of a solve."""

from collections.abc import Sequence

from equipoise.plots import style
from equipoise.plots.logs import Run
from equipoise.plots.registry import Chart, register_figure


@register_figure("resolutions")
def resolutions(runs: Sequence[Run]) -> Chart:
    """Relative residual of each part of the state after each step: median and 95th percentile, one panel per run."""
    title = "Convergence by resolution"
    logged = {run: run.inspection("resolutions", dict) for run in runs}
    figure, panels = style.panels(title, [2.4 if len(runs) > 1 else 3.0] * len(runs), sharex=True, sharey=True)
    names: list[str] = list(dict.fromkeys(name for curves in logged.values() for name in curves))
    rows = []
    for axes, label, run in zip(panels, style.short_labels([run.label for run in runs]), runs, strict=True):
        axes.set_yscale("log")
        axes.set_title(label)
        axes.set_ylabel("relative residual")
        missing = 0
        for name, curve in logged[run].items():
            median, p95 = ([run.number(x) for x in curve.get(key, ())] for key in ("median", "p95"))
            missing += style.curve(axes, list(enumerate(median)), names.index(name))
            missing += style.curve(axes, list(enumerate(p95)), names.index(name), thin=True)
            rows += [(run.label, name, step, *both) for step, both in enumerate(zip(median, p95, strict=True))]
        if axes is panels[-1]:
            style.step_axis(axes, "solver step")
        style.say_not_shown(axes, missing)
    named = [style.sample(name, series) for series, name in enumerate(names)]
    style.legend(figure, named, [style.sample("median"), style.sample("95th percentile", thin=True)])
    return Chart(title, figure, ("run", "resolution", "step", "median", "p95"), rows)
