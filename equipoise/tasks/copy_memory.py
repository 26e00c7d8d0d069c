"""Training on the copy-memory task."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from equipoise._errors import require_count
from equipoise.data.copy_memory import CopyBatch, CopyMemory, recall
from equipoise.tasks.base import Splits, Task, mean_metrics, register_task

if TYPE_CHECKING:
    from torchmetrics import MetricCollection


@dataclass(frozen=True)
class CopyMemoryConfig:
    """Settings of the task.

    Attributes:
        length: The gap T; sequences have T + 20 places.
        placeholders: Whether all of the last eleven inputs are the delimiter, not one of them.
        train_size: Training samples.
        test_size: Validation samples, and as many test samples.
        batch_size: Samples in a batch, of all processes together.
    """

    length: int = 400
    placeholders: bool = False
    train_size: int = 20_000
    test_size: int = 2_000
    batch_size: int = 32

    def __post_init__(self) -> None:
        require_count("task", "batch_size", self.batch_size)


@register_task("copy_memory")
class CopyMemoryTask(Task):
    """Recall ten digits after a gap; loss is the mean cross-entropy over all places."""

    name = "copy_memory"
    Config = CopyMemoryConfig
    score: ClassVar[str] = "loss"
    config: CopyMemoryConfig

    def data(self) -> Splits:
        c = self.config
        sizes = {"train_size": c.train_size, "valid_size": c.test_size, "test_size": c.test_size}
        source = CopyMemory(c.length, c.placeholders, self.seed, **sizes)
        rank, world = self.rank, self.world_size

        def held_out(split: str) -> Callable[[], Iterable[CopyBatch]]:
            return lambda: source.batches(4 * c.batch_size, split, epochs=1, rank=rank, world_size=world)

        return Splits(
            train=lambda position: source.batch(position, c.batch_size, rank=rank, world_size=world),
            epoch=source.batches_per_epoch(c.batch_size),
            held_out={split: held_out(split) for split in ("valid", "test")},
            info=source.info,
        )

    def items(self, batch: CopyBatch) -> tuple[int, str]:
        return batch.inputs.numel(), "tokens"

    def metrics(self) -> "MetricCollection":
        return mean_metrics("loss", "recall", "exact")

    def training_step(self, model: nn.Module, batch: CopyBatch, carry: Any, step: int) -> tuple[dict[str, Tensor], Any]:
        logits = model(batch.inputs).logits
        return {"loss": _losses(logits, batch.targets).mean()}, None

    def evaluation_step(self, model: nn.Module, batch: CopyBatch, carry: Any, metrics: "MetricCollection") -> Any:
        logits = model(batch.inputs).logits
        digits, whole = recall(logits, batch.targets)
        metrics["loss"].update(_losses(logits, batch.targets))
        metrics["recall"].update(digits)
        metrics["exact"].update(whole.double())
        return None


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """(B,) mean cross-entropy of each sample."""
    return cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none").mean(dim=1)
