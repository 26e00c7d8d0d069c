"""What a model says of some held-out images, kept with the images: the figures `masks` and `predictions` show it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy
import torch
from torch import Tensor

from equipoise._draws import Rows
from equipoise._errors import require_count
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import draw

if TYPE_CHECKING:
    from equipoise.train.load import TrainedRun

PICTURES = "pictures.npz"
_PALETTE = ("#222222", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#F0E442", "#56B4E9", "#E69F00", "#999999")

Array: TypeAlias = "numpy.ndarray[Any, Any]"


@dataclass(frozen=True)
class Pictures:
    """Images, truth and predictions, as in pictures.npz.

    Attributes:
        split: Where the images are from.
        numbers: (N,) of the samples in it.
        images: (N, H, W, 3) uint8.
        truth: (N,) classes, or (N, H, W) uint8 masks.
        prediction: Likewise.
        probability: (N,) that the model gives to what it says, for masks the mean over pixels.
        classes: Names of the labels.
        colours: (classes, 3) uint8.
    """

    split: str
    numbers: Array
    images: Array
    truth: Array
    prediction: Array
    probability: Array
    classes: tuple[str, ...]
    colours: Array

    @property
    def masks(self) -> bool:
        """Whether pixels were named, and not whole images."""
        return self.truth.ndim == 3

    def save(self, path: Path) -> Path:
        """Write it."""
        fields = {field.name: numpy.asarray(getattr(self, field.name)) for field in dataclasses.fields(self)}
        with path.open("wb") as file:
            numpy.savez_compressed(file, **fields)  # type: ignore[arg-type]
        return path

    @classmethod
    def read(cls, run: Run, masks: bool) -> "Pictures":
        """Those of a run.

        Args:
            run: The run.
            masks: Whether they must be of masks, or of classes.
        """
        path, how = run.folder / PICTURES, f"`equipoise evaluate {run.path} --split test --pictures 6` writes it"
        if not path.is_file():
            raise LogError(run, f"{path} is missing; {how}, for tasks on images.")
        try:
            with numpy.load(path, allow_pickle=False) as packed:
                fields = {name: packed[name] for name in packed.files}
            fields |= {"split": str(fields["split"]), "classes": tuple(map(str, fields["classes"]))}
            found = cls(**fields)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LogError(run, f"{path} cannot be read ({error}); {how} anew.") from error
        if found.masks != masks:
            has, figure = ("masks", "masks") if found.masks else ("classes", "predictions")
            raise LogError(run, f"{path} has {has}; the figure {figure!r} shows them.")
        return found


def write_pictures(
    run: str | Path,
    out: str | Path | None = None,
    count: int = 6,
    *,
    split: str = "test",
    data_dir: str | None = None,
    which: str = "best",
    opened: "TrainedRun | None" = None,
) -> list[Path]:
    """Let a model name some samples, spread evenly over a split, or their pixels, and draw that.

    Args:
        run: Folder of a run of the task "classification" or "segmentation".
        out: Folder of the figure; by default RUN/figures.
        count: Samples.
        split: Where they are from.
        data_dir: Where data files are.
        which: "best" or "latest" checkpoint.
        opened: The run, if it has been loaded already.

    Returns:
        pictures.npz in the folder of the run, and the files of the figure.
    """
    from equipoise.train.load import open_run

    require_count("write_pictures", "count", count)
    folder = Path(run)
    found = predict(opened or open_run(folder, split, data_dir, which=which), split, count)
    path = found.save(folder / PICTURES)
    figure = "masks" if found.masks else "predictions"
    return [path, *draw(figure, [folder], folder / "figures" if out is None else out)]


def check_pictures(opened: "TrainedRun") -> None:
    """Raise if a run is not about images."""
    if not hasattr(opened.task, "masks"):
        raise ValueError(
            f"{opened.folder}: pictures are for the tasks 'classification' and 'segmentation'; this run is of "
            f"{opened.task.name!r}."
        )


@torch.no_grad()
def predict(opened: "TrainedRun", split: str, count: int) -> Pictures:
    """Predictions of a loaded run for `count` samples spread evenly over a split."""
    check_pictures(opened)
    data: Any = opened.task.images  # type: ignore[attr-defined]
    pending = [batch for batch in opened.splits.held_out[split]() if batch.rows.count]
    places = [(batch, row) for batch in pending for row in range(batch.rows.count)]
    chosen = [places[k * len(places) // min(count, len(places))] for k in range(min(count, len(places)))]
    found: list[tuple[Array, Array, Array, float, int]] = []
    for batch, row in chosen:
        one = dataclasses.replace(batch, indices=batch.indices[row : row + 1], rows=Rows(0, 1, 1)).to(opened.device)
        with opened.autocast():
            logits = opened.task.views(opened.model, one)  # type: ignore[attr-defined]
        probability, named = logits[0].float().softmax(0).max(0)
        seen = _as_seen(one.images[0], data.mean, data.std)
        found.append((seen, _labels(one.targets[0]), _labels(named), float(probability.mean()), int(one.indices[0])))
    images, truth, prediction, probability, numbers = (numpy.stack(parts) for parts in zip(*found, strict=True))
    return Pictures(split, numbers, images, truth, prediction, probability, data.classes, _colours(data))


def _labels(tensor: Tensor) -> Array:
    """A class, or a mask, whose labels are bytes."""
    return tensor.to(torch.uint8 if tensor.dim() else torch.int64).cpu().numpy()


def _as_seen(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Array:
    """A normalised image (C, H, W) as (H, W, 3) bytes."""
    shift, scale = (torch.tensor(values, device=image.device).view(-1, 1, 1) for values in (mean, std))
    seen = (255 * (image * scale + shift)).round().clamp(0, 255).to(torch.uint8)
    return seen.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()


def _colours(data: Any) -> Array:
    if data.colours:
        return numpy.array(data.colours, dtype=numpy.uint8)
    chosen = [_PALETTE[k % len(_PALETTE)] for k in range(len(data.classes))]
    return numpy.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in chosen], dtype=numpy.uint8)
