"""Images, true masks and predicted masks side by side."""

from collections.abc import Sequence

import numpy
from matplotlib.patches import Patch

from equipoise.data.images import IGNORE
from equipoise.plots import style
from equipoise.plots.logs import Run
from equipoise.plots.pictures import Array, Pictures
from equipoise.plots.registry import Chart, register_figure

_GAP = 0.03  # between image and masks, over their width


@register_figure("masks")
def masks(runs: Sequence[Run]) -> Chart:
    """Image, true mask and predicted mask of some samples; pixels without a label are white."""
    title = "Image, truth, prediction"
    shown = {run: Pictures.read(run, masks=True) for run in runs}
    panels_of = [(run, k) for run, pictures in shown.items() for k in range(len(pictures.images))]
    shapes = [shown[run].images[k].shape for run, k in panels_of]
    heights = [style.WIDTH * height / (width * (3 + 2 * _GAP)) + 0.25 for height, width, _ in shapes]
    figure, panels = style.panels(title, heights)
    rows = []
    for axes, (run, k) in zip(panels, panels_of, strict=True):
        pictures = shown[run]
        accuracy, miou = scores(pictures, k)
        axes.imshow(_beside(pictures, k), interpolation="nearest")
        axes.set_axis_off()
        label = f"{style.shorten(run.label)}, " if len(runs) > 1 else ""
        axes.set_title(f"{label}{pictures.split} {pictures.numbers[k]}: IoU {miou:.2f}, pixels {accuracy:.1%}")
        rows.append((run.label, pictures.split, int(pictures.numbers[k]), accuracy, miou))
    named = {name: colour for p in shown.values() for name, colour in zip(p.classes, p.colours, strict=True)}
    style.legend(
        figure,
        [Patch(label=name, facecolor=tuple(c / 255), edgecolor=style.INK, linewidth=0.8) for name, c in named.items()],
    )
    return Chart(title, figure, ("run", "split", "sample", "pixel_accuracy", "miou"), rows)


def scores(pictures: Pictures, index: int) -> tuple[float, float]:
    """Pixel accuracy and mean IoU of one picture, over the labelled pixels and the classes that occur."""
    labelled = pictures.truth[index] != IGNORE
    truth, found = pictures.truth[index][labelled], pictures.prediction[index][labelled]
    if not truth.size:
        return float("nan"), float("nan")
    present = numpy.union1d(truth, found)
    both = [((truth == k) & (found == k)).sum() / ((truth == k) | (found == k)).sum() for k in present]
    return float((truth == found).mean()), float(numpy.mean(both))


def _beside(pictures: Pictures, index: int) -> Array:
    """Image, truth and prediction in one row, with white gaps."""
    image = pictures.images[index]
    colours = numpy.full((256, 3), 255, dtype=numpy.uint8)
    colours[: len(pictures.colours)] = pictures.colours
    gap = numpy.full((image.shape[0], max(1, round(_GAP * image.shape[1])), 3), 255, dtype=numpy.uint8)
    return numpy.concatenate(
        [image, gap, colours[pictures.truth[index]], gap, colours[pictures.prediction[index]]], axis=1
    )
