"""Learned solvers beside classic ones: residuals beyond the unrolled steps, and variants beside each other."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import MaxNLocator

from equipoise.plots import style
from equipoise.plots.registry import Chart


def beyond_chart(record: Mapping[str, Any]) -> Chart:
    """Mean relative residual over the steps of a solve: each classic solver, the learned ones, and their mean.

    Args:
        record: Of a study, report.json.
    """
    title = "Residual, step by step"
    learned = [curve["residual"]["mean"] for curve in record["variants"][record["reported"]]["curves"]]
    means = [statistics.fmean(map(float, values)) for values in zip(*learned, strict=True)]
    lines = {name: list(map(float, curve["residual"]["mean"])) for name, curve in record["classic"].items()}
    lines["learned"] = means
    with style.applied():
        figure, (axes,) = style.panels(title, [3.2])
        axes.set_yscale("log")
        missing = 0
        for seed in learned if len(learned) > 1 else ():
            missing += style.curve(axes, list(enumerate(map(float, seed))), len(lines) - 1, thin=True)
        for series, values in enumerate(lines.values()):
            missing += style.curve(axes, list(enumerate(values)), series)
        axes.axvline(record["unroll"], color=style.INK, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.set_title(f"dotted: the {record['unroll']} steps that were unrolled")
        axes.set_ylabel("relative residual, mean")
        style.step_axis(axes, "solver step")
        style.say_not_shown(axes, missing)
        named = [style.sample(name, series) for series, name in enumerate(lines)]
        roles = [style.sample("mean of seeds"), style.sample("a seed", thin=True)]
        style.legend(figure, named, *([roles] if len(learned) > 1 else []))
    rows = [(name, step, value) for name, values in lines.items() for step, value in enumerate(values)]
    return Chart(title, figure, ("solver", "step", "residual_mean"), rows)


def ablation_chart(record: Mapping[str, Any]) -> Chart:
    """The excess loss of each solver, the best first, with its spread over seeds.

    Args:
        record: Of a study, report.json.
    """
    title = "Variants of the learned solver"
    rows = [(row["name"], float(row["area"]["mean"]), float(row["area"]["std"])) for row in record["table"]]
    with style.applied():
        figure, (axes,) = style.panels(title, [0.5 + 0.26 * len(rows)])
        if style.spans_decades([mean for _, mean, _ in rows]):
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(4))
        shown = [(place, *row[1:]) for place, row in enumerate(rows) if all(map(math.isfinite, row[1:]))]
        for place, mean, spread in shown:
            axes.plot([mean - spread, mean + spread], [place, place], color=style.INK, linewidth=1.4)
            axes.plot([mean], [place], color=style.COLORS[0], marker="o", markersize=6)
        axes.set_yticks(range(len(rows)), [name.replace("_", " ") for name, *_ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(f"loss above the equilibrium's, mean of steps 1 to {record['unroll']}")
        style.say_not_shown(axes, len(rows) - len(shown))
    return Chart(title, figure, ("solver", "excess_loss", "std"), rows)
