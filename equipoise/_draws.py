"""Random draws that do not depend on how a batch is split.

A batch may be worked on in shares: by several processes, or one after another. If every share starts from the same
seed, and draws the random numbers of a row for all rows of the whole batch to keep those of its own, then all shares
together see what one process with the whole batch would have seen, and every generator is left in the same state.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Which rows of a whole batch a share of it holds.

    Attributes:
        start: Number of the first one.
        stop: Number of the one after the last.
        total: Rows of the whole batch.
    """

    start: int
    stop: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.total:
            raise ValueError(f"Rows: {self.start} to {self.stop} are not among 0 to {self.total}.")

    @classmethod
    def share(cls, total: int, rank: int, count: int) -> "Rows":
        """Share number `rank` of `count`: as even as can be, the first ones are not empty."""
        start, stop = (-(-total * k // count) for k in (rank, rank + 1))
        return cls(start, stop, total)

    @property
    def count(self) -> int:
        """Rows in the share."""
        return self.stop - self.start

    @property
    def weight(self) -> float:
        """Their part of the whole batch: what means over the share are multiplied by."""
        return self.count / self.total if self.total else 0.0


class _Active(threading.local):
    def __init__(self) -> None:
        self.rows: Rows | None = None


_active = _Active()


@contextmanager
def rows_of(rows: Rows) -> Iterator[None]:
    """Draws by row, meanwhile, are those of these rows."""
    before, _active.rows = _active.rows, rows
    try:
        yield
    finally:
        _active.rows = before


def rand_rows(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Uniform float32 numbers of a shape whose first axis indexes rows, or rows with something else inside them."""
    whole, begin = _whole(shape)
    drawn = torch.rand(whole, device=device, dtype=torch.float32)
    return drawn if begin is None else drawn.narrow(0, begin, shape[0]).clone()  # a view would keep all of it alive


def randn_rows(like: Tensor) -> Tensor:
    """Normal numbers shaped like a tensor whose first axis indexes rows, or rows with something else inside them."""
    whole, begin = _whole(like.shape)
    if begin is None:
        return torch.randn_like(like)
    return torch.randn(whole, device=like.device, dtype=like.dtype).narrow(0, begin, like.shape[0]).clone()


def _whole(shape: Sequence[int]) -> tuple[list[int], int | None]:
    """The shape to draw for the whole batch, and where a share begins in it; None if it is the whole."""
    rows, shape = _active.rows, list(shape)
    if rows is None or rows.count == rows.total or rows.count == 0:
        return shape, None
    if not shape or shape[0] % rows.count:
        raise ValueError(
            f"a draw of shape {tuple(shape)} cannot be told apart by row: its first axis must be a multiple of the "
            f"{rows.count} rows of this share. If all rows share it, say so: VariationalDropout(..., "
            "shared_by_systems=True)."
        )
    inside = shape[0] // rows.count
    return [inside * rows.total, *shape[1:]], inside * rows.start
