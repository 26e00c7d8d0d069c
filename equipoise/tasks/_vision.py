"""What tasks on images share: loading, batches, and stem and f of a model trained before."""

import functools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise._errors import require_count, require_number
from equipoise.data._draws import keyed_order
from equipoise.data.augment import Augment
from equipoise.data.images import ImageBatch, ImageData, ImageStream, load_images
from equipoise.tasks.base import Splits, Task


@dataclass(frozen=True)
class VisionConfig:
    """Settings that tasks on images share.

    Attributes:
        data: A known set of images, or a folder.
        options: Of its loader, e.g. `{size = 24}`.
        batch_size: Images in a batch, of all processes together.
        eval_batch_size: Images in a batch of evaluation.
        train_size: Training images used, drawn once for all; None for all.
        hold_out: Training images set aside for validation. With 0, a set without a validation split is validated on its
            test split, as published runs do, and the log says so.
        transfer: Folder of a run whose stem and f the model begins with; None to begin afresh.
        cutmix: Share of the training images that get a window of another one.
    """

    data: str = "digits"
    options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 64
    eval_batch_size: int = 250
    train_size: int | None = None
    hold_out: int = 0
    transfer: str | None = None
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch_size", "eval_batch_size"):
            require_count("task", name, getattr(self, name))
        require_count("task", "hold_out", self.hold_out, low=0)
        if self.train_size is not None:
            require_count("task", "train_size", self.train_size)
        require_number("task", "cutmix", self.cutmix, low=0.0, high=1.0, closed_high=True)


class VisionTask(Task):
    """A task on images; subclasses say how they are changed, and how a batch becomes a loss."""

    masks: ClassVar[bool]
    """Whether targets are masks."""
    config: VisionConfig

    @cached_property
    def images(self) -> ImageData:
        """The images."""
        c = self.config
        found = load_images(c.data, self.data_dir, **c.options)
        if found.masks != self.masks:
            has, other = ("masks", "segmentation") if found.masks else ("classes", "classification")
            raise ValueError(f"task {self.name!r}: the images of {c.data!r} have {has}; use task.name = {other!r}.")
        return found

    def augment(self, training: bool) -> Augment | None:
        """How images are changed."""
        return None

    def data(self) -> Splits:
        c, data = self.config, self.images
        stream = functools.partial(ImageStream, data, seed=self.seed, rank=self.rank, world_size=self.world_size)
        used, held = self._samples()
        train = stream(
            data.splits["train"],
            c.batch_size,
            samples=used,
            shuffle=True,
            augment=self.augment(True),
            cutmix=c.cutmix,
        )
        held_out = {}
        for split in ("valid", "test"):
            part, samples = data.splits.get(split), None
            if split == "valid" and held is not None:
                part, samples = data.splits["train"], held
            elif split == "valid" and part is None:
                part = data.splits.get("test")
            if part is not None:
                held_out[split] = stream(part, c.eval_batch_size, samples=samples, augment=self.augment(False))
        if "valid" not in held_out:
            raise ValueError(f"{data.name!r} has training images only; set some aside with task.hold_out.")
        return Splits(
            train=train.batch,
            epoch=train.batches_per_epoch,
            held_out={split: stream.batches for split, stream in held_out.items()},
            info={**data.facts, "trained_on": len(train), "valid_is_test": self._valid_is_test()},
        )

    def _valid_is_test(self) -> bool:
        return not self.config.hold_out and "valid" not in self.images.splits

    def _samples(self) -> tuple[Tensor | None, Tensor | None]:
        """Numbers of the training images to train on, and of those set aside; None for all, and for none."""
        c, count = self.config, len(self.images.splits["train"])
        if not c.hold_out and c.train_size is None:
            return None, None
        wanted = c.hold_out + (c.train_size or 1)
        if wanted > count:
            raise ValueError(
                f"task: hold_out={c.hold_out} and train_size={c.train_size or 1} exceed the {count} training images of "
                f"{self.images.name!r}."
            )
        # The same for every seed of a run: runs that differ in nothing else are validated on the same images.
        order = keyed_order(count, "held-out images")
        used = order[c.hold_out :][: c.train_size].sort().values
        return used, order[: c.hold_out].sort().values if c.hold_out else None

    def model_defaults(self) -> dict[str, Any]:
        return {"num_classes": len(self.images.classes), "in_channels": self.images.channels}

    def begin(self, model: nn.Module) -> None:
        if self.config.transfer is None:
            return
        from equipoise.train.load import load

        if not hasattr(model, "transfer_from"):
            raise ValueError(
                f"task.transfer: {type(model).__name__} cannot take over parts of another model (transfer_from)."
            )
        model.transfer_from(load(self.config.transfer))  # type: ignore[operator]

    def views(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Scores as in `scores`, by all that evaluation looks at."""
        return self.scores(model, batch)

    def scores(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """(N, classes) scores of images, or (N, classes, H, W) of pixels, in float32 at least."""
        logits: Tensor = model(batch.images).logits
        classes, size = len(self.images.classes), batch.targets.shape[1:] if self.masks else ()
        expected = (len(batch.targets), classes, *size)
        if logits.shape != expected:
            raise ValueError(
                f"task {self.name!r}: {type(model).__name__} gives scores of shape {tuple(logits.shape)} where "
                f"{expected} are needed: {_remedy(logits, classes, self.masks)}."
            )
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def artifacts(self) -> dict[str, Any]:
        return {"classes.json": list(self.images.classes)}


def _remedy(logits: Tensor, classes: int, masks: bool) -> str:
    """What to change about a model whose scores do not fit."""
    if masks != (logits.dim() == 4):
        wanted, kind = ("segmentation", "pixel") if masks else ("classification", "image")
        return f'the task scores each {kind}; choose a model that does, or model.task = "{wanted}" for an MDEQ'
    if logits.shape[1] != classes:
        return f"the data have {classes} classes; leave model.num_classes out, and it follows from them"
    return "a model must score every pixel of an image, at the size of its mask"


def mean_of_rows(losses: Tensor, weights: Tensor) -> Tensor:
    """(N,) weighted means over all axes but the first; 0 for a row without weight.

    Each image has its own mean, so that the loss of a batch does not depend on how it is split.
    """
    return (losses * weights).flatten(1).sum(1) / weights.flatten(1).sum(1).clamp_min(torch.finfo(losses.dtype).tiny)
