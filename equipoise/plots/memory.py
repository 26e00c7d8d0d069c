"""Memory of a training step."""

from collections.abc import Sequence

from equipoise.plots.bars import bar_chart
from equipoise.plots.logs import Run
from equipoise.plots.registry import Chart, register_figure


@register_figure("memory")
def memory(runs: Sequence[Run]) -> Chart:
    """What a training step keeps because of depth, autograd's graph and solver history, beside explicit depths."""
    parts = {"graph": "graph", "history": "solver history"}
    units = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
    return bar_chart("Memory of a training step", runs, "memory", parts, units, "bytes")
