"""Training models that name the class of every pixel."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from equipoise._errors import require_count, require_number
from equipoise.data.augment import Augment, ScaleCrop, constants
from equipoise.data.images import IGNORE, ImageBatch
from equipoise.tasks._vision import VisionConfig, VisionTask, mean_of_rows
from equipoise.tasks.base import mean_metrics, register_task

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


@dataclass(frozen=True)
class SegmentationConfig(VisionConfig):
    """Settings of the task.

    Attributes:
        data: A known set of images with masks.
        options: Of its loader.
        batch_size: Images in a batch, of all processes together.
        eval_batch_size: Images in a batch of evaluation, at full size.
        train_size: Training images used; None for all.
        hold_out: Training images set aside for validation.
        transfer: Folder of a run, e.g. of a classifier, whose stem and f the model begins with; None to begin afresh.
        cutmix: Share of the training images that get a window of another one, in the same place, with its mask.
        augment: "none", or "scale_crop": scaled, cropped, mirrored.
        crop: Height and width of crops; None for those of the images.
        scales: Least and greatest factor, in steps of 0.1.
        colour: How far brightness and contrast are changed at most, as a share, and the balance of channels by half of
            it; 0 for not.
        class_weights: "none", or "data" for the usual ones of the data set.
        overlap: Weight of a second term of the loss, 1 − IoU of probabilities and truth, for what is thin or rare.
        mining: Loss is that of hard pixels only, those whose class has at most this probability; None for all pixels.
        mining_keep: Hard pixels of an image are at least so many.
        eval_scales: Sizes, as factors, at which images are looked at in evaluation; probabilities are averaged.
        eval_flip: Whether their mirror images are looked at, too.
    """

    data: str = "shapes"
    batch_size: int = 16
    eval_batch_size: int = 16
    augment: Literal["none", "scale_crop"] = "none"
    crop: tuple[int, int] | None = None
    scales: tuple[float, float] = (0.5, 2.0)
    colour: float = 0.0
    class_weights: Literal["none", "data"] = "none"
    overlap: float = 0.0
    mining: float | None = None
    mining_keep: int = 10_000
    eval_scales: tuple[float, ...] = (1.0,)
    eval_flip: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop is not None and self.augment == "none":
            raise ValueError("task: crop needs augment = 'scale_crop'; with scales = [1.0, 1.0] crops are not scaled.")
        if self.colour and self.augment == "none":
            raise ValueError(
                "task: colour needs augment = 'scale_crop'; with scales = [1.0, 1.0] sizes stay as they are."
            )
        for side in self.crop or ():
            require_count("task", "crop", side)
        require_number("task", "overlap", self.overlap, low=0.0)
        if self.mining is not None:
            require_number("task", "mining", self.mining, low=0.0, high=1.0)
        require_count("task", "mining_keep", self.mining_keep)
        if not self.eval_scales:
            raise ValueError("task: eval_scales must name a size, e.g. [1.0], or [1.0, 1.25].")
        for factor in self.eval_scales:
            require_number("task", "eval_scales", factor, low=0.0, open_low=True)


@register_task("segmentation")
class SegmentationTask(VisionTask):
    """Name the class of every pixel; loss is the mean over images of the mean cross-entropy of labelled pixels."""

    name = "segmentation"
    Config = SegmentationConfig
    score: ClassVar[str] = "miou_error"
    shown: ClassVar[str | None] = "miou"
    masks: ClassVar[bool] = True
    config: SegmentationConfig

    def augment(self, training: bool) -> Augment | None:
        c = self.config
        return ScaleCrop(c.crop, c.scales, colour=c.colour) if training and c.augment == "scale_crop" else None

    def class_weights(self, device: torch.device) -> Tensor:
        """(classes,) weights in the loss."""
        if self.config.class_weights == "none":
            return torch.ones(len(self.images.classes), device=device)
        if not self.images.class_weights:
            raise ValueError(f"task.class_weights: the data set {self.images.name!r} has none of its own; use 'none'.")
        return constants(tuple(self.images.class_weights), device)

    def metrics(self) -> "MetricCollection":
        metrics = mean_metrics("loss")
        metrics.add_metrics({"pixels": _pixel_scores(self.images.classes)})
        return metrics

    def training_step(
        self, model: nn.Module, batch: ImageBatch, carry: Any, step: int
    ) -> tuple[dict[str, Tensor], Any]:
        c, logits = self.config, self.scores(model, batch)
        weights = self.class_weights(logits.device)
        losses, counted = _pixel_losses(logits, batch.targets), _weights_of(batch.targets, weights)
        if c.mining is not None:
            counted = counted * hard_pixels(losses.detach(), batch.targets, c.mining, c.mining_keep)
        loss = mean_of_rows(losses, counted).mean()
        if c.overlap:
            loss = loss + c.overlap * (1 - soft_overlap(logits, batch.targets)).mean()
        return {"loss": loss}, None

    def evaluation_step(self, model: nn.Module, batch: ImageBatch, carry: Any, metrics: "MetricCollection") -> Any:
        logits = self.views(model, batch)
        labelled = (batch.targets != IGNORE).to(logits.dtype)
        losses = mean_of_rows(_pixel_losses(logits, batch.targets), labelled)
        metrics["loss"].update(losses, labelled.flatten(1).amax(1))  # an image without labels has no loss to count
        metrics["pixels"].update(logits.argmax(1), batch.targets)
        return None

    def views(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """(N, classes, H, W) scores of pixels, by all views of the images that evaluation looks at."""
        c = self.config
        if c.eval_scales == (1.0,) and not c.eval_flip:
            return super().views(model, batch)
        flips = (False, True) if c.eval_flip else (False,)
        seen = [self._seen(model, batch.images, factor, flip) for factor in c.eval_scales for flip in flips]
        likely = torch.stack(seen).mean(0) if len(seen) > 1 else seen[0]
        return likely.clamp_min(torch.finfo(likely.dtype).tiny).log()

    def _seen(self, model: nn.Module, images: Tensor, factor: float, flip: bool) -> Tensor:
        """Probabilities of pixels, from the images at another size or mirrored."""
        size, view = images.shape[2:], images.flip(3) if flip else images
        if factor != 1.0:
            other = [max(1, round(side * factor)) for side in size]
            view = interpolate(view, other, mode="bilinear", antialias=True)
        scores = model(view).logits
        likely = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(1)
        likely = likely.flip(3) if flip else likely
        return likely if likely.shape[2:] == size else interpolate(likely, size, mode="bilinear")

    def report(self, values: dict[str, float]) -> dict[str, float]:
        return {**values, "miou_error": 1 - values["miou"]}


def _pixel_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """(N, H, W) cross-entropy of each pixel; 0 where there is no label."""
    return cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


def _weights_of(targets: Tensor, class_weights: Tensor) -> Tensor:
    """(N, H, W) weight of each pixel; 0 where there is no label."""
    labelled = targets != IGNORE
    return class_weights[torch.where(labelled, targets, 0)] * labelled


def soft_overlap(logits: Tensor, targets: Tensor) -> Tensor:
    """(N,) intersection over union of probabilities and truth, the mean over the classes that an image has.

    A class counts as much as any other, however few of the pixels are its own; pixels without a label do not count.
    """
    labelled = (targets != IGNORE)[:, None]
    likely = logits.float().softmax(1) * labelled
    true = torch.zeros_like(likely).scatter_(1, torch.where(labelled, targets[:, None], 0), 1.0) * labelled
    here, both = true.sum((2, 3)), (likely * true).sum((2, 3))
    share = both / (here + likely.sum((2, 3)) - both).clamp(min=1.0)
    present = here > 0
    return (share * present).sum(1) / present.sum(1).clamp(min=1)


def hard_pixels(losses: Tensor, targets: Tensor, probability: float, keep: int) -> Tensor:
    """Which pixels are hard: those whose class has at most a probability, and the `keep` hardest of each image.

    Args:
        losses: (N, H, W) cross-entropy, unweighted.
        targets: (N, H, W); pixels without a label are not hard.
        probability: Of the class of the pixel.
        keep: Of each image, at least so many.
    """
    found = torch.where(targets == IGNORE, 2.0, torch.exp(-losses)).flatten(1)  # probabilities; 2 is easier than any
    last = found.kthvalue(min(keep, found.shape[1]), dim=1, keepdim=True).values
    return ((found <= last.clamp_min(probability)) & (found <= 1)).view_as(targets)


def _pixel_scores(classes: tuple[str, ...]) -> "Metric":
    """Scores from the confusion matrix of all pixels; right also when evaluation is spread over processes."""
    from torchmetrics.classification import MulticlassConfusionMatrix

    class PixelScores(MulticlassConfusionMatrix):
        def compute(self) -> dict[str, Tensor]:  # type: ignore[override]
            confusion = super().compute().double()  # truth in rows
            hits = confusion.diagonal()
            union = confusion.sum(0) + confusion.sum(1) - hits
            # A class that neither truth nor prediction has says nothing of the model.
            present = [k for k in range(len(classes)) if union[k] > 0]
            iou = hits / union
            named = {f"iou_{classes[k]}": iou[k] for k in present}
            return {"miou": iou[present].mean(), "pixel_accuracy": hits.sum() / confusion.sum(), **named}

    return PixelScores(len(classes), ignore_index=IGNORE, validate_args=False)
