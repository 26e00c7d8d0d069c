"""Vectors of words where clusters of the vocabulary have tables of different widths: one kernel."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from equipoise.ops._backend import use_differentiable_kernel
from equipoise.ops.words import naive

# A kernel has the code of a look-up for each table.
MOST_TABLES = 8


def lookup(
    tokens: Tensor,
    tables: Sequence[Tensor],
    bounds: Sequence[int],
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Rows with a part for each cluster: the vector of the token in the part of its own cluster, zeros in the others.

    One matrix product with the clusters' projections side by side then is the projection of every vector. Scaled in
    float32 and rounded once. Gradients of the tables are made by plain operations, the same bits every time; a second
    derivative goes through the plain twin. Forward mode and torch.func get the twin, and inside torch.compile it is
    traced.

    A kernel cannot raise: the row of a token outside the vocabulary is NaN. The twin refuses it as indexing does, with
    an error on the CPU and an assertion on a device.

    Args:
        tokens: (N,), int64 or int32.
        tables: (bounds[i + 1] − bounds[i], w_i) each, of one dtype.
        bounds: Where clusters begin, the first at 0, and where the last one ends.
        scale: Factor of all vectors.
        dtype: Of the result; that of the tables if None.
        backend: "auto", "naive" or "triton".

    Returns:
        (N, Σ w_i).
    """
    sizes = [high - low for low, high in pairwise(bounds)]
    if tokens.dim() != 1 or [len(table) for table in tables] != sizes or not tables or bounds[0] != 0:
        raise ValueError(
            f"lookup: tokens must be (N,) and tables have the sizes of clusters between bounds from 0 on, {sizes}; got "
            f"{tuple(tokens.shape)}, {[tuple(table.shape) for table in tables]} and {tuple(bounds)}."
        )
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"lookup: tokens must be int64 or int32, got {tokens.dtype}.")
    dtype = dtype or tables[0].dtype
    too_many = len(tables) > MOST_TABLES
    if tokens.numel() == 0 or too_many or not use_differentiable_kernel("lookup", backend, tables):
        return naive.lookup(tokens, tables, bounds, scale, dtype)
    from equipoise.ops.words import triton as kernels

    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        return kernels.Lookup.apply(tokens, tuple(bounds), scale, dtype, *tables)  # type: ignore[no-untyped-call,no-any-return]
    return kernels.forward(tokens, tables, tuple(bounds), scale, dtype)
