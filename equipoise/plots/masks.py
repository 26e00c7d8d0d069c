"""Images, true masks and predicted masks side by side."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from matplotlib.patches import Patch
from torch import Tensor

from equipoise._draws import Rows
from equipoise._errors import require_count
from equipoise.data.images import IGNORE
from equipoise.plots import style
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import Chart, draw, register_figure

if TYPE_CHECKING:
    from equipoise.train.load import TrainedRun

PICTURES = "pictures.npz"
_GAP = 0.03  # between image and masks, over their width
_PALETTE = ("#222222", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#F0E442", "#56B4E9", "#E69F00", "#999999")


@dataclass(frozen=True)
class Pictures:
    """What the figure shows, as in pictures.npz.

    Attributes:
        split: Where the images are from.
        numbers: (N,) of the samples in it.
        images: (N, H, W, 3) uint8.
        truth: (N, H, W) uint8 labels.
        prediction: (N, H, W) uint8 labels.
        classes: Names of the labels.
        colours: (classes, 3) uint8.
    """

    split: str
    numbers: "numpy.ndarray[Any, Any]"
    images: "numpy.ndarray[Any, Any]"
    truth: "numpy.ndarray[Any, Any]"
    prediction: "numpy.ndarray[Any, Any]"
    classes: tuple[str, ...]
    colours: "numpy.ndarray[Any, Any]"

    def save(self, path: Path) -> Path:
        """Write it."""
        fields = {field.name: numpy.asarray(getattr(self, field.name)) for field in dataclasses.fields(self)}
        with path.open("wb") as file:
            numpy.savez_compressed(file, **fields)  # type: ignore[arg-type]
        return path

    @classmethod
    def read(cls, run: Run) -> "Pictures":
        """Those of a run."""
        path = run.folder / PICTURES
        if not path.is_file():
            raise LogError(
                run, f"{path} is missing; equipoise.plots.masks.write_pictures({str(run.path)!r}) writes it."
            )
        try:
            with numpy.load(path, allow_pickle=False) as packed:
                fields = {name: packed[name] for name in packed.files}
            fields |= {"split": str(fields["split"]), "classes": tuple(map(str, fields["classes"]))}
            return cls(**fields)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LogError(run, f"{path} cannot be read ({error}); write it anew.") from error

    def scores(self, index: int) -> tuple[float, float]:
        """Pixel accuracy and mean IoU of one picture, over the labelled pixels and the classes that occur."""
        labelled = self.truth[index] != IGNORE
        truth, found = self.truth[index][labelled], self.prediction[index][labelled]
        present = numpy.union1d(truth, found)
        both = [((truth == k) & (found == k)).sum() / ((truth == k) | (found == k)).sum() for k in present]
        return float((truth == found).mean()), float(numpy.mean(both))


@register_figure("masks")
def masks(runs: Sequence[Run]) -> Chart:
    """Image, true mask and predicted mask of some samples; pixels without a label are white."""
    title = "Image, truth, prediction"
    shown = {run: Pictures.read(run) for run in runs}
    panels_of = [(run, k) for run, pictures in shown.items() for k in range(len(pictures.images))]
    shapes = [shown[run].images[k].shape for run, k in panels_of]
    heights = [style.WIDTH * height / (width * (3 + 2 * _GAP)) + 0.25 for height, width, _ in shapes]
    figure, panels = style.panels(title, heights)
    rows = []
    for axes, (run, k) in zip(panels, panels_of, strict=True):
        pictures = shown[run]
        accuracy, miou = pictures.scores(k)
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


def _beside(pictures: Pictures, index: int) -> "numpy.ndarray[Any, Any]":
    """Image, truth and prediction in one row, with white gaps."""
    image = pictures.images[index]
    colours = numpy.full((256, 3), 255, dtype=numpy.uint8)
    colours[: len(pictures.colours)] = pictures.colours
    gap = numpy.full((image.shape[0], max(1, round(_GAP * image.shape[1])), 3), 255, dtype=numpy.uint8)
    return numpy.concatenate(
        [image, gap, colours[pictures.truth[index]], gap, colours[pictures.prediction[index]]], axis=1
    )


def write_pictures(
    run: str | Path,
    out: str | Path | None = None,
    count: int = 6,
    *,
    split: str = "test",
    data_dir: str | None = None,
    which: str = "best",
) -> list[Path]:
    """Predict the masks of some samples, spread evenly over a split, and draw them.

    Args:
        run: Folder of a run of the task "segmentation".
        out: Folder of the figure; by default RUN/figures.
        count: Samples.
        split: Where they are from.
        data_dir: Where data files are.
        which: "best" or "latest" checkpoint.

    Returns:
        pictures.npz in the folder of the run, and the files of the figure.
    """
    from equipoise.train.load import open_run

    require_count("write_pictures", "count", count)
    folder = Path(run)
    path = predict(open_run(folder, split, data_dir, which=which), split, count).save(folder / PICTURES)
    return [path, *draw("masks", [folder], folder / "figures" if out is None else out)]


@torch.no_grad()
def predict(opened: "TrainedRun", split: str, count: int) -> Pictures:
    """Predictions of a loaded run for `count` samples spread evenly over a split."""
    task: Any = opened.task
    if not getattr(task, "masks", False):
        raise ValueError(f"{opened.folder}: the task {task.name!r} has no masks; pictures are for 'segmentation'.")
    pending = [batch for batch in opened.splits.held_out[split]() if batch.rows.count]
    places = [(batch, row) for batch in pending for row in range(batch.rows.count)]
    chosen = [places[k * len(places) // min(count, len(places))] for k in range(min(count, len(places)))]
    images, truth, prediction, numbers = [], [], [], []
    for batch, row in chosen:
        one = dataclasses.replace(batch, indices=batch.indices[row : row + 1], rows=Rows(0, 1, 1)).to(opened.device)
        with opened.autocast():
            logits = opened.model(one.images).logits
        images.append(_as_seen(one.images[0], task.images.mean, task.images.std))
        truth.append(one.targets[0].to(torch.uint8).cpu().numpy())
        prediction.append(logits[0].argmax(0).to(torch.uint8).cpu().numpy())
        numbers.append(int(one.indices[0]))
    seen, true, found = (numpy.stack(parts) for parts in (images, truth, prediction))
    return Pictures(split, numpy.array(numbers), seen, true, found, task.images.classes, _colours(task.images))


def _as_seen(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> "numpy.ndarray[Any, Any]":
    """A normalised image (C, H, W) as (H, W, 3) bytes."""
    shift, scale = (torch.tensor(values, device=image.device).view(-1, 1, 1) for values in (mean, std))
    seen = (255 * (image * scale + shift)).round().clamp(0, 255).to(torch.uint8)
    return seen.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()


def _colours(data: Any) -> "numpy.ndarray[Any, Any]":
    if data.colours:
        return numpy.array(data.colours, dtype=numpy.uint8)
    chosen = [_PALETTE[k % len(_PALETTE)] for k in range(len(data.classes))]
    return numpy.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in chosen], dtype=numpy.uint8)
