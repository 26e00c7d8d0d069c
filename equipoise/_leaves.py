"""Arithmetic on states stored leaf by leaf, each leaf one (N, D_i) matrix."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise._tree import Leaves


def subtract(a: Leaves, b: Leaves) -> Leaves:
    return [x - y for x, y in zip(a, b, strict=True)]


def add(a: Leaves, b: Leaves) -> Leaves:
    return [x + y for x, y in zip(a, b, strict=True)]


def axpy(a: Leaves, scale: float | Tensor, b: Leaves) -> Leaves:
    """a + scale·b; a tensor scale is per system, (N,)."""
    if isinstance(scale, Tensor):
        return [x + scale[:, None] * y for x, y in zip(a, b, strict=True)]
    return [torch.add(x, y, alpha=scale) for x, y in zip(a, b, strict=True)]


def dot(a: Leaves, b: Leaves) -> Tensor:
    """Inner product of each system with itself, (N,)."""
    return sum_of([torch.linalg.vecdot(x, y) for x, y in zip(a, b, strict=True)])


def norm(a: Leaves, kind: str = "l2") -> Tensor:
    """Norm of each system over all its leaves, (N,)."""
    parts = [torch.linalg.vector_norm(x, dim=1) for x in a]
    total = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), dim=0)
    if kind == "rms":
        total = total / math.sqrt(max(1, sum(x.shape[1] for x in a)))
    return total


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def choose(mask: Tensor, a: Leaves, b: Leaves) -> Leaves:
    """Systems of `a` where the mask (N,) is set, of `b` elsewhere; new tensors or one of the two given."""
    if a[0].is_cpu and not torch.compiler.is_compiling() and not any(x.requires_grad for x in (*a, *b)):
        # A broadcast `where` is several times slower than copying rows here, and the row count is free on the CPU.
        rows = mask.nonzero()
        if rows.shape[0] == mask.shape[0]:
            return a
        if rows.shape[0] == 0:
            return b
        rows = rows.view(-1)
        return [y.index_copy(0, rows, x.index_select(0, rows)) for x, y in zip(a, b, strict=True)]
    return [torch.where(mask[:, None], x, y) for x, y in zip(a, b, strict=True)]


def take_rows(a: Leaves, index: Tensor) -> Leaves:
    return [x.index_select(0, index) for x in a]


def put_rows(a: Leaves, index: Tensor, values: Leaves) -> Leaves:
    """A copy of `a` with the systems in `index` replaced."""
    return [x.index_copy(0, index, y) for x, y in zip(a, values, strict=True)]


def all_finite(a: Leaves) -> Tensor:
    """Whether every entry of each system is finite, (N,)."""
    return torch.stack([torch.isfinite(x).all(dim=1) for x in a]).all(dim=0)
