"""Images with their classes, and what a classifier says of them."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equipoise.plots import style
from equipoise.plots.logs import Run
from equipoise.plots.pictures import Pictures
from equipoise.plots.registry import Chart, register_figure

_COLUMNS = 4
_LETTERS = 13  # of a class, above an image


@register_figure("predictions")
def predictions(runs: Sequence[Run]) -> Chart:
    """Images with their class; where a classifier says another, that one under it, and a frame around the image."""
    title = "Classes and predictions"
    shown = {run: Pictures.read(run, masks=False) for run in runs}
    cells = [(run, k) for run, pictures in shown.items() for k in range(len(pictures.images))]
    figure, places = _grid(title, [shown[run].images[k].shape[0] / shown[run].images[k].shape[1] for run, k in cells])
    rows = []
    for axes, (run, k) in zip(places, cells, strict=False):
        pictures = shown[run]
        truth, found = (pictures.classes[int(labels[k])] for labels in (pictures.truth, pictures.prediction))
        probability = float(pictures.probability[k])
        axes.imshow(pictures.images[k], interpolation="nearest")
        said = f"{style.shorten(found, _LETTERS)} {probability:.0%}"
        wrong = truth != found
        axes.set_title(f"{style.shorten(truth, _LETTERS)}\n✗ {said}" if wrong else f"{said}\n", fontsize=8)
        axes.set_xticks([], [])
        axes.set_yticks([], [])
        for side in axes.spines.values():
            side.set(visible=wrong, linewidth=2.5, color=style.COLORS[1])
        rows.append((run.label, pictures.split, int(pictures.numbers[k]), truth, found, probability))
    for axes in places[len(cells) :]:
        axes.set_axis_off()
    return Chart(title, figure, ("run", "split", "sample", "class", "prediction", "probability"), rows)


def _grid(title: str, shapes: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Places for pictures of these heights over widths, in rows."""
    lines = -(-len(shapes) // _COLUMNS)
    height = max(shapes) * style.WIDTH / _COLUMNS + 0.35
    figure = Figure(figsize=(style.WIDTH, lines * height + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left")
    return figure, list(figure.subplots(lines, _COLUMNS, squeeze=False).flat)
