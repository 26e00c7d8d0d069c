"""Shares of a batch: some rows of it, with a memory of their own, done by one process one after another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise._draws import Rows
from equipoise._tree import tree_flatten, tree_map, tree_unflatten
from equipoise.tasks import Splits, Task
from equipoise.train.checkpoint import CheckpointError

Carry = Any
"""What the next batch of the same streams needs: a tree of tensors, rows first, or None."""


@dataclass
class Share:
    """One share of each batch.

    Attributes:
        splits: Its view of the data.
        rows: Of the batch done last; None before the first.
        carry: What that batch left for the next.
    """

    splits: Splits
    rows: Rows | None = None
    carry: Carry = None


def make_shares(task: Task, accumulation: int) -> list[Share]:
    """The shares of a process: `accumulation` of as many times the number of processes.

    Args:
        task: The part of this process.
        accumulation: Shares of each process.
    """
    processes, count = task.world_size, task.world_size * accumulation
    size = getattr(task.config, "batch_size", None)
    if size is not None and size % count:
        near = count * max(1, round(size / count))
        raise ValueError(
            f"task.batch_size={size} cannot be split into {count} equal shares ({processes} processes, "
            f"train.accumulation={accumulation}); take {near}."
        )
    task.data()  # loads what they all use
    return [Share(task.share(task.rank * accumulation + k, count).data()) for k in range(accumulation)]


def joined(parts: Sequence[tuple[Rows | None, Carry]]) -> dict[str, Any] | None:
    """The carry of the whole batch from those of all its shares, in order, to be saved; None if there is none.

    Args:
        parts: Rows and carry of each share; one without rows has no part in it.
    """
    held = [(rows, carry) for rows, carry in parts if rows is not None and rows.count and carry is not None]
    if not held:
        return None
    flat = [tree_flatten(carry) for _, carry in held]
    counts = [rows.count for rows, _ in held]
    leaves = [_join(values, counts) for values in zip(*(leaves for leaves, _ in flat), strict=True)]
    return {"rows": held[0][0].total, "value": tree_unflatten(leaves, flat[0][1])}


def _join(values: Sequence[Any], counts: Sequence[int]) -> Any:
    by_row = all(_has_rows(value, count) for value, count in zip(values, counts, strict=True))
    return torch.cat([value.cpu() for value in values]) if by_row else values[0]


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == count


def part_of(saved: dict[str, Any] | None, rows: Rows, device: torch.device) -> Carry:
    """The carry of a share, out of what `joined` gave; the split may be another one now.

    Args:
        saved: Of the whole batch.
        rows: Of the share.
        device: Where it goes.
    """
    if saved is None or not rows.count:
        return None
    if saved["rows"] != rows.total:
        raise CheckpointError(
            f"the checkpoint holds the memory of {saved['rows']} streams, but batches have {rows.total} rows now; "
            f"resume with task.batch_size={saved['rows']}, over any number of processes that divides it."
        )

    def take(value: Any) -> Any:
        if _has_rows(value, rows.total):
            value = value[rows.start : rows.stop].clone()
        return value.to(device) if isinstance(value, Tensor) else value

    return tree_map(take, saved["value"])


def on_cpu(tree: Any) -> Any:
    """A tree with its tensors on the CPU, to be sent or saved."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, tree)
