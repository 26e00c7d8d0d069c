"""Residual over the steps of a solve."""

from collections.abc import Sequence

from equipoise.plots import style
from equipoise.plots.logs import Run
from equipoise.plots.registry import Chart, register_figure


@register_figure("convergence")
def convergence(runs: Sequence[Run]) -> Chart:
    """Relative residual after each step of each solver: median and 95th percentile of systems, one panel per run."""
    title = "Convergence of the solvers"
    logged = {run: _curves(run) for run in runs}
    solvers = list(dict.fromkeys(solver for curves in logged.values() for solver in curves))
    figure, panels = style.panels(title, [2.4 if len(runs) > 1 else 3.0] * len(runs), sharex=True, sharey=True)
    labels = style.short_labels([run.label for run in runs])
    for axes, label, curves in zip(panels, labels, logged.values(), strict=True):
        axes.set_yscale("log")
        axes.set_title(label)
        axes.set_ylabel("relative residual")
        missing = 0
        for solver, (median, p95) in curves.items():
            series = solvers.index(solver)
            missing += style.curve(axes, list(enumerate(median)), series)
            missing += style.curve(axes, list(enumerate(p95)), series, thin=True)
        if axes is panels[-1]:
            style.step_axis(axes, "solver step")
        style.say_not_shown(axes, missing)
    named = [style.sample(solver, i) for i, solver in enumerate(solvers)]
    style.legend(figure, named, [style.sample("median"), style.sample("95th percentile", thin=True)])
    rows = [
        (run.label, solver, step, value, p95[step] if step < len(p95) else None)
        for run, curves in logged.items()
        for solver, (median, p95) in curves.items()
        for step, value in enumerate(median)
    ]
    return Chart(title, figure, ("run", "solver", "step", "median", "p95"), rows)


def _curves(run: Run) -> dict[str, tuple[list[float], list[float]]]:
    return {
        solver: ([run.number(x) for x in curve.get("median", ())], [run.number(x) for x in curve.get("p95", ())])
        for solver, curve in run.inspection("convergence", dict).items()
    }
