"""Training classifiers of images."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from equipoise._errors import require_count, require_number
from equipoise.data.augment import Augment, CentreCrop, CropFlip, ResizedCrop
from equipoise.data.images import ImageBatch
from equipoise.tasks._vision import VisionConfig, VisionTask
from equipoise.tasks.base import Splits, mean_metrics, register_task

if TYPE_CHECKING:
    from torchmetrics import MetricCollection


@dataclass(frozen=True)
class ClassificationConfig(VisionConfig):
    """Settings of the task.

    Attributes:
        data: A known set of images with classes, or a folder with train/CLASS/*.jpg and val/CLASS/*.jpg.
        options: Of its loader.
        batch_size: Images in a batch, of all processes together.
        eval_batch_size: Images in a batch of evaluation.
        train_size: Training images used; None for all.
        hold_out: Training images set aside for validation.
        transfer: Folder of a run whose stem and f the model begins with; None to begin afresh.
        cutmix: Share of the training images that get a window of another one; both classes count by their areas.
        augment: "none"; "crop_flip", crops out of a black frame, mirrored; "resized_crop", windows of any size and
            shape, mirrored.
        padding: Width of the frame of "crop_flip".
        erase: Side of the square that "crop_flip" blackens somewhere in each training image; 0 for none.
        size: Side of resized crops, and of the middle part that is evaluated; with augment = "none", of the middle part
            that is trained on as well. None for the images as they are, which "crop_flip" is for.
        least_area: Share of an image that a resized crop shows at least.
        label_smoothing: Share of the target that is spread over all classes.
    """

    augment: Literal["none", "crop_flip", "resized_crop"] = "none"
    padding: int = 4
    erase: int = 0
    size: int | None = None
    least_area: float = 0.08
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("task", "padding", self.padding, low=0)
        require_count("task", "erase", self.erase, low=0)
        if self.erase and self.augment != "crop_flip":
            raise ValueError(f"task: erase = {self.erase} is part of augment = 'crop_flip'; got {self.augment!r}.")
        require_number("task", "label_smoothing", self.label_smoothing, low=0.0, high=1.0)
        require_number("task", "least_area", self.least_area, low=0.0, high=1.0, open_low=True, closed_high=True)
        if self.size is not None:
            require_count("task", "size", self.size)
            if self.augment == "crop_flip":
                raise ValueError(
                    f"task: augment = 'crop_flip' keeps the size of images, so size = {self.size} would be evaluated "
                    "on other sizes than were trained on; leave size out, or use 'resized_crop'."
                )
        elif self.augment == "resized_crop":
            raise ValueError("task: augment = 'resized_crop' needs a size, the side of the crops, e.g. 224.")


@register_task("classification")
class ClassificationTask(VisionTask):
    """Name the class of an image; loss is the mean cross-entropy."""

    name = "classification"
    Config = ClassificationConfig
    score: ClassVar[str] = "error"
    shown: ClassVar[str | None] = "accuracy"
    masks: ClassVar[bool] = False
    config: ClassificationConfig

    def augment(self, training: bool) -> Augment | None:
        c = self.config
        if training and c.augment == "crop_flip":
            return CropFlip(c.padding, erase=c.erase)
        if training and c.augment == "resized_crop":
            assert c.size is not None
            return ResizedCrop(c.size, area=(c.least_area, 1.0))
        return None if c.size is None else CentreCrop(c.size)

    def data(self) -> Splits:
        middle = self.augment(False)
        if middle is not None:  # what is too large for images is refused now, not at the first evaluation
            for part in self.images.splits.values():
                images, targets, *_ = part.fetch(torch.tensor([0]), "cpu")
                middle(images, targets, torch.empty(1, middle.draws))
        return super().data()

    def metrics(self) -> "MetricCollection":
        return mean_metrics("loss", "accuracy", *(["top5"] if len(self.images.classes) > 5 else []))

    def training_step(
        self, model: nn.Module, batch: ImageBatch, carry: Any, step: int
    ) -> tuple[dict[str, Tensor], Any]:
        logits = self.scores(model, batch)
        loss = cross_entropy(logits, batch.targets, label_smoothing=self.config.label_smoothing)
        return {"loss": loss, "accuracy": _hits(logits.detach(), batch.targets, 1).float().mean()}, None

    def evaluation_step(self, model: nn.Module, batch: ImageBatch, carry: Any, metrics: "MetricCollection") -> Any:
        logits = self.scores(model, batch)
        metrics["loss"].update(cross_entropy(logits, batch.targets, reduction="none"))
        metrics["accuracy"].update(_hits(logits, batch.targets, 1).double())
        if "top5" in metrics:
            metrics["top5"].update(_hits(logits, batch.targets, 5).double())
        return None

    def report(self, values: dict[str, float]) -> dict[str, float]:
        return {**values, "error": 1 - values["accuracy"]}


def _hits(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    """(N,) whether the target, or the larger part of a mixture of classes, is among the `count` highest scores."""
    if targets.dim() > 1:
        targets = targets.argmax(1)
    if count == 1:
        return logits.argmax(1) == targets
    return (logits.topk(count, dim=1).indices == targets[:, None]).any(1)
