"""Figures of runs, drawn from their logs: one figure per file, known by name through the registry."""

from equipoise.plots import (  # noqa: F401
    ablation,
    benchmark,
    convergence,
    iou,
    masks,
    memory,
    nfe,
    pareto,
    predictions,
    residual,
    resolutions,
    steps,
    style,
    timing,
    training,
)
from equipoise.plots.inline import svg_text, to_base64
from equipoise.plots.logs import LogError, Run, open_runs
from equipoise.plots.registry import FIGURES, Chart, Drawn, draw, draw_all, make_chart, register_figure, save

__all__ = [
    "FIGURES",
    "Chart",
    "Drawn",
    "LogError",
    "Run",
    "draw",
    "draw_all",
    "make_chart",
    "open_runs",
    "register_figure",
    "save",
    "style",
    "svg_text",
    "to_base64",
]
