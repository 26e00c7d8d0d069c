"""Learned solvers beside classic ones: residuals beyond the unrolled steps, and variants beside each other."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from equipoise.plots import style
from equipoise.plots.registry import Chart
from equipoise.train.hyper_summary import counted_steps, ranges


def beyond_chart(record: Mapping[str, Any]) -> Chart:
    """Mean relative residual over the steps of a solve, with the spread over systems: classic solvers and learned ones.

    Args:
        record: Of a study, report.json.
    """
    title = "Residual, step by step"
    seeds = [_followed(curve) for curve in record["variants"][record["reported"]]["curves"]]
    lines = {name: _followed(curve) for name, curve in record["classic"].items()}
    first = next(iter(lines))
    learned = style.shorten(f"learned ({record['reported']})")
    lines = {first: lines.pop(first), learned: _mean(seeds), **lines}  # in colours of metric against time
    with style.applied():
        figure, (axes,) = style.panels(title, [3.2])
        axes.set_yscale("log")
        missing = 0
        for mean, _ in seeds if len(seeds) > 1 else ():
            missing += style.curve(axes, list(enumerate(mean)), list(lines).index(learned), thin=True)
        for series, (mean, spread) in enumerate(lines.values()):
            missing += style.curve(axes, list(enumerate(mean)), series)
            style.band(axes, mean, [one + more for one, more in zip(mean, spread, strict=True)], series)
        axes.axvline(record["unroll"], color=style.INK, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.set_title(
            f"dotted: the {record['unroll']} steps that were unrolled\nshaded: up to a standard deviation over systems"
        )
        axes.set_ylabel("relative residual, mean")
        style.step_axis(axes, "solver step")
        style.say_not_shown(axes, missing)
        named = [style.sample(name, series) for series, name in enumerate(lines)]
        roles = [style.sample("mean of seeds"), style.sample("a seed", thin=True)]
        style.legend(figure, named, *([roles] if len(seeds) > 1 else []))
    rows = [
        (name, step, *values) for name, line in lines.items() for step, values in enumerate(zip(*line, strict=True))
    ]
    return Chart(title, figure, ("solver", "step", "residual_mean", "residual_std"), rows)


Line = tuple[list[float], list[float]]
"""Means over systems, and standard deviations, step by step."""


def _followed(curve: Mapping[str, Any]) -> Line:
    mean, spread = (list(map(float, curve["residual"][name])) for name in ("mean", "std"))
    return mean, spread


def _mean(lines: Sequence[Line]) -> Line:
    """Over seeds."""
    means, spreads = ([statistics.fmean(at) for at in zip(*part, strict=True)] for part in zip(*lines, strict=True))
    return means, spreads


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
        axes.set_xlabel(f"loss above the equilibrium's, mean over steps {ranges(counted_steps(record))}")
        style.say_not_shown(axes, len(rows) - len(shown))
    return Chart(title, figure, ("solver", "excess_loss", "std"), rows)
