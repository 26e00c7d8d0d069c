"""Vectors of words from the tables of several clusters in plain PyTorch: what the kernel computes."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import embedding


def vectors(tokens: Tensor, table: Tensor, low: int, high: int, vocab_size: int) -> Tensor:
    """Those of tokens in the cluster [low, high), zero for others: a selection would make the host wait for its size.

    A token outside the vocabulary is left out of range, so that the table refuses it.
    """
    if (low, high) == (0, vocab_size):
        return embedding(tokens, table)
    row = (tokens - low).clamp(min=0 if low else None, max=high - low - 1 if high < vocab_size else None)
    inside = (tokens >= low) & (tokens < high)
    return embedding(row, table) * inside.unsqueeze(-1)


def lookup(tokens: Tensor, tables: Sequence[Tensor], bounds: Sequence[int], scale: float, dtype: torch.dtype) -> Tensor:
    """See `lookup` of the package; differentiable any number of times."""
    clusters = zip(tables, pairwise(bounds), strict=True)
    parts = [vectors(tokens, table, low, high, bounds[-1]) for table, (low, high) in clusters]
    return (torch.cat(parts, dim=1) * scale).to(dtype)
