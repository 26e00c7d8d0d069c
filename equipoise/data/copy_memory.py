"""The copy-memory task: remember ten digits over a long gap."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise._draws import Rows
from equipoise._errors import require_count, unknown_name
from equipoise.data._draws import keyed_bits, keyed_order
from equipoise.data.registry import register_data

DIGITS = 10
SYMBOLS = 8
DELIMITER = 9
CLASSES = 10


@dataclass(frozen=True)
class CopyBatch:
    """Samples of the task.

    Attributes:
        inputs: (B, T + 20) symbols 0..9.
        targets: (B, T + 20) zeros, then the digits in the last ten places.
        indices: (B,) numbers of the samples in their split.
        epoch: Number of passes finished before this one.
        position: What to pass to `CopyMemory.batches` to go on after this batch.
        rows: Which rows of the whole batch these are.
    """

    inputs: Tensor
    targets: Tensor
    indices: Tensor
    epoch: int
    position: int
    rows: Rows

    def to(self, device: torch.device | str) -> "CopyBatch":
        """The batch on a device."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("inputs", "targets", "indices")}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class CopyMemory:
    """Ten digits, a gap, a delimiter, and ten places to recall them.

    With T = `length`, counting places from 1: inputs 1..10 are digits in 1..8, input T + 10 is the delimiter 9, the
    others are 0; targets T + 11 .. T + 20 are the digits, the others 0. Sample i of a split is a pure function of
    (seed, split, i), and its digits do not depend on the length, so that ranks, resumed runs and curricula agree.

    Attributes:
        length: The gap T; sequences have T + 20 places.
        placeholders: Whether all of the last eleven inputs are 9, as in the TCN experiments, not the delimiter alone.
        seed: Key of the digits and of the order of training samples.
        train_size: Number of training samples.
        valid_size: Number of validation samples.
        test_size: Number of test samples.
    """

    length: int = 400
    placeholders: bool = False
    seed: int = 0
    train_size: int = 20_000
    valid_size: int = 2_000
    test_size: int = 2_000

    def __post_init__(self) -> None:
        for name in ("length", "train_size", "valid_size", "test_size"):
            require_count("CopyMemory", name, getattr(self, name))

    @property
    def total_length(self) -> int:
        """Places in a sequence, T + 20."""
        return self.length + 2 * DIGITS

    @property
    def memoryless_loss(self) -> float:
        """Mean cross-entropy of the best predictor without memory: 10·ln 8/(T + 20)."""
        return DIGITS * math.log(SYMBOLS) / self.total_length

    @property
    def info(self) -> dict[str, Any]:
        """Plain values to log with every number."""
        return {
            "task": "copy_memory",
            "variant": "placeholders" if self.placeholders else "delimiter",
            "length": self.length,
            "classes": CLASSES,
            "memoryless_loss": self.memoryless_loss,
            "seed": self.seed,
            **{f"{split}_samples": self.size(split) for split in _SPLITS},
        }

    def size(self, split: str) -> int:
        """Number of samples in a split."""
        if split not in _SPLITS:
            raise unknown_name("split", split, _SPLITS)
        return int(getattr(self, f"{split}_size"))

    def samples(self, split: str, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some samples.

        Args:
            split: `"train"`, `"valid"` or `"test"`.
            indices: (B,) numbers of the samples.

        Returns:
            Two int64 tensors of shape (B, T + 20).
        """
        size = self.size(split)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
            raise ValueError(
                f"CopyMemory: the split {split!r} has samples 0 to {size - 1}, got indices {int(indices.min())} to "
                f"{int(indices.max())}."
            )
        # Eight symbols are three bits: ten digits take thirty of the sixty-four, without bias.
        bits = keyed_bits(self.seed, "copy_memory", split, indices.long())
        digits = 1 + ((bits[:, None] >> (3 * torch.arange(DIGITS))) & (SYMBOLS - 1))
        inputs = torch.zeros(len(indices), self.total_length, dtype=torch.int64)
        targets = torch.zeros_like(inputs)
        inputs[:, :DIGITS] = digits
        inputs[:, -DIGITS - 1 :] = DELIMITER if self.placeholders else 0
        inputs[:, -DIGITS - 1] = DELIMITER
        targets[:, -DIGITS:] = digits
        return inputs, targets

    def batches_per_epoch(self, batch_size: int, split: str = "train") -> int:
        """Batches in a pass: whole ones for training, all samples otherwise."""
        size = self.size(split)
        return size // batch_size if split == "train" else -(-size // batch_size)

    def batch(
        self, position: int, batch_size: int, split: str = "train", *, rank: int = 0, world_size: int = 1
    ) -> CopyBatch:
        """The batch at a position, or the share of it that a rank has.

        Training samples come in an order drawn by (seed, epoch), and what does not fill a batch is left out of the
        pass; the samples of other splits come in order, all of them.

        Args:
            position: Number of the batch; passes follow one another.
            batch_size: Samples in a batch, of all ranks together.
            split: `"train"`, `"valid"` or `"test"`.
            rank: Which share of the rows to take.
            world_size: Number of shares; together they are the rows of one process.
        """
        require_count("CopyMemory", "position", position, low=0)
        self._check_batch(batch_size, split, rank, world_size)
        epoch, index = divmod(position, self.batches_per_epoch(batch_size, split))
        chosen = self._order(split, epoch)[index * batch_size : (index + 1) * batch_size]
        rows = Rows.share(len(chosen), rank, world_size)
        indices = chosen[rows.start : rows.stop]
        return CopyBatch(*self.samples(split, indices), indices, epoch, position + 1, rows)

    def _order(self, split: str, epoch: int) -> Tensor:
        if split == "train":
            return _train_order(self.train_size, self.seed, epoch)
        return torch.arange(self.size(split))

    def _check_batch(self, batch_size: int, split: str, rank: int, world_size: int) -> None:
        require_count("CopyMemory", "batch_size", batch_size)
        require_count("CopyMemory", "world_size", world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"CopyMemory: rank {rank} does not exist among {world_size}; ranks begin at 0.")
        if split == "train" and batch_size > self.train_size:
            raise ValueError(
                f"CopyMemory: batch_size={batch_size} exceeds train_size={self.train_size}; lower it to that at most."
            )
        if split == "train" and batch_size % world_size:
            raise ValueError(
                f"CopyMemory: batch_size={batch_size} (of all ranks together) is not a multiple of "
                f"world_size={world_size}; take {world_size * max(1, batch_size // world_size)}."
            )

    def batches(
        self,
        batch_size: int,
        split: str = "train",
        *,
        position: int = 0,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> Iterator[CopyBatch]:
        """Batches from a position on; `epochs` passes counted from the very beginning, None goes on forever."""
        while epochs is None or position < epochs * self.batches_per_epoch(batch_size, split):
            batch = self.batch(position, batch_size, split, rank=rank, world_size=world_size)
            yield batch
            position = batch.position


_SPLITS = ("train", "valid", "test")


@functools.lru_cache(maxsize=2)  # one pass is read batch by batch
def _train_order(size: int, seed: int, epoch: int) -> Tensor:
    return keyed_order(size, seed, "copy_memory order", epoch)


def recall(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """How well the ten digits were recalled.

    Args:
        scores: (B, T + 20, classes) scores of the classes.
        targets: (B, T + 20) targets of the task.

    Returns:
        For each sample, of shape (B,): the share of its ten digits that are right, and whether all of them are.
    """
    right = scores[:, -DIGITS:].argmax(-1) == targets[:, -DIGITS:]
    return right.double().mean(1), right.all(1)


@register_data("copy_memory")
def copy_memory(**settings: Any) -> CopyMemory:
    """The copy-memory task; `settings` are the fields of `CopyMemory`."""
    return CopyMemory(**settings)
