"""Time of a training step."""

from collections.abc import Sequence

from equipoise.plots.bars import bar_chart
from equipoise.plots.logs import Run
from equipoise.plots.registry import Chart, register_figure


@register_figure("time")
def timing(runs: Sequence[Run]) -> Chart:
    """Seconds of the forward and backward pass, beside explicit depths."""
    parts = {"forward": "forward", "backward": "backward"}
    return bar_chart("Time of a training step", runs, "time", parts, {"µs": 1e-6, "ms": 1e-3, "s": 1.0}, "seconds")
