"""The end of a solve that returns its last proposals: those that are finite, and the best iterates elsewhere."""

import torch
from torch import Tensor

from equipoise._tree import Leaves
from equipoise.ops._backend import use_kernel
from equipoise.ops.last import naive
from equipoise.ops.standing import Standing


@torch.no_grad()
def take_last(
    z: Leaves, value: Leaves, residual: Tensor, status: Tensor, standing: Standing, *, backend: str = "auto"
) -> None:
    """Write what is returned of each system: its last proposal, or its best iterate if that is not finite.

    The latter is `NONFINITE`, as are systems that were found so before. Two launches, where a proposal is read once to
    look at it and once to copy it.

    Args:
        z: The last proposals, leaf by leaf (N, D_i).
        value: Where to write states.
        residual: (N,) where to write the residuals that were measured before these proposals, or the best ones.
        status: (N,) int64 statuses so far; replaced.
        standing: Progress.
        backend: "auto", "naive" or "triton".
    """
    if use_kernel("take_last", backend, (*z, *value, *standing.best, residual)):
        from equipoise.ops.last import triton

        triton.take_last(z, value, residual, status, standing)
    else:
        naive.take_last(z, value, residual, status, standing)
