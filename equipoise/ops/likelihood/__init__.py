"""Negative log-likelihood of targets given scores of words: one kernel forward, one for its VJP."""

from itertools import pairwise

import torch
from torch import Tensor

from equipoise.ops._backend import use_differentiable_kernel
from equipoise.ops.likelihood import naive


def nll(
    scores: Tensor,
    targets: Tensor,
    *,
    size: int | None = None,
    bounds: tuple[int, ...] = (),
    backend: str = "auto",
) -> Tensor:
    """−log softmax(scores) at the target of each row, without writing the other logarithms.

    With `bounds` this is the head of an adaptive softmax. Its first entries are words, and one more stands for each
    further cluster of the vocabulary: a target of cluster j ≥ 1, bounds[j − 1] ≤ target < bounds[j], has the entry
    bounds[0] + j − 1. What its loss is within the cluster adds `add_nll`.

    Computed in float32, scores are read once. The kernel saves two numbers per row; a second derivative goes through
    the plain twin. Forward mode and torch.func get the twin, and inside torch.compile it is traced.

    A target outside the vocabulary is not dropped: a kernel cannot raise, so its loss is NaN, and so is the gradient
    of its row. The twin refuses it as indexing does, with an error on the CPU and an assertion on a device.

    Bytes moved per score of size s: s read; VJP s read and s written.

    Args:
        scores: (N, W), W ≥ V; any stride between rows.
        targets: (N,), int64 or int32, of [0, V); with `bounds` of [0, bounds[-1]).
        size: V, how many scores of a row count, the first ones; W if None. The others have zero gradients: a matrix
            product is faster where its rows are multiples of 16 bytes.
        bounds: Where further clusters begin and, last, where the vocabulary ends; V is bounds[0] + len(bounds) − 1.
        backend: "auto", "naive" or "triton".

    Returns:
        (N,) in nats, in float32; of float64 scores in float64.
    """
    size = _check("nll", scores, targets, size)
    if bounds and (bounds[0] + len(bounds) - 1 != size or any(low >= high for low, high in pairwise(bounds))):
        raise ValueError(
            f"nll: bounds must rise, and the first plus the number of the others must be the number of scores, {size}; "
            f"got {bounds!r}."
        )
    if not _use_kernel("nll", backend, scores):
        return naive.nll(scores, targets, size, bounds)
    from equipoise.ops.likelihood import triton as kernels

    if torch.is_grad_enabled() and scores.requires_grad:
        return kernels.Nll.apply(scores, None, targets, size, 0, bounds)[0]  # type: ignore[no-untyped-call,no-any-return]
    return kernels.forward(scores, None, targets, size, 0, bounds)[0]


def add_nll(
    losses: Tensor,
    scores: Tensor,
    targets: Tensor,
    *,
    first: int,
    size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Losses, plus the negative log-likelihood within a cluster where the target of a row belongs to it.

    The cluster has the words [first, first + V). Rows of other targets are not read: they add nothing, their scores
    have zero gradients, and whether the target exists at all is for `nll` to say. For the rest see there.

    Args:
        losses: (N,), in float32, or in float64 with float64 scores.
        scores: (N, W), W ≥ V; any stride between rows.
        targets: (N,), int64 or int32.
        first: The first word of the cluster.
        size: V, how many scores of a row count; W if None.
        backend: "auto", "naive" or "triton".

    Returns:
        (N,), like `losses`, which are not changed.
    """
    size = _check("add_nll", scores, targets, size)
    if losses.shape != targets.shape or losses.dtype != naive.wide(scores.dtype):
        raise ValueError(
            f"add_nll: losses must be {naive.wide(scores.dtype)} of shape {tuple(targets.shape)}, got {losses.dtype} "
            f"of shape {tuple(losses.shape)}."
        )
    if not _use_kernel("add_nll", backend, scores):
        return naive.add_nll(losses, scores, targets, size, first)
    from equipoise.ops.likelihood import triton as kernels

    if torch.is_grad_enabled() and (scores.requires_grad or losses.requires_grad):
        return kernels.Nll.apply(scores, losses, targets, size, first, ())[0]  # type: ignore[no-untyped-call,no-any-return]
    return kernels.forward(scores, losses, targets, size, first, ())[0]


def _use_kernel(operation: str, backend: str, scores: Tensor) -> bool:
    return scores.numel() > 0 and use_differentiable_kernel(operation, backend, (scores,))


def _check(owner: str, scores: Tensor, targets: Tensor, size: int | None) -> int:
    """How many scores of a row count."""
    if scores.dim() != 2 or targets.shape != scores.shape[:1]:
        raise ValueError(
            f"{owner}: scores must be (N, V) and targets (N,), got {tuple(scores.shape)} and {tuple(targets.shape)}."
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{owner}: targets must be int64 or int32, got {targets.dtype}.")
    if targets.device != scores.device:
        raise ValueError(f"{owner}: scores are on {scores.device}, targets on {targets.device}; move one of them.")
    if size is None:
        return scores.shape[1]
    if not 0 < size <= scores.shape[1]:
        raise ValueError(f"{owner}: size must be from 1 to the width of scores, {scores.shape[1]}; got {size!r}.")
    return size
