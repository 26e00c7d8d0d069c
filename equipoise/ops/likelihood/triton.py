# mypy: disable-error-code="no-untyped-def"
"""The kernels of `nll` and `add_nll`: forward a program per row, in the VJP one per block of a row."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.ops._backend import apart, through_twin
from equipoise.ops.likelihood import naive

# The most scores that a program takes at a time, forward and in the VJP, and how many of them a thread has.
BLOCK, VJP_BLOCK, PER_THREAD = 2048, 2048, 16


@triton.jit
def _entry_of(target, first, BOUNDS: tl.constexpr):
    """Where the score of a target is; outside of the row if it has none."""
    entry = target - first
    for j in tl.static_range(len(BOUNDS)):
        entry = tl.where(target >= BOUNDS[j], BOUNDS[0] + j, entry)
    return entry


@triton.jit
def _forward(
    scores_ptr,
    losses_ptr,
    targets_ptr,
    out_ptr,
    top_ptr,
    log_ptr,
    stride,
    losses_stride,
    first,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BOUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """The maximum and the logarithm of the sum relative to it: of large scores, their total would lose digits."""
    row = tl.program_id(0).to(tl.int64)
    entry = _entry_of(tl.load(targets_ptr + row), first, BOUNDS)
    inside = (entry >= 0) & (entry < SIZE)
    scores_ptr += row * stride
    top, total = -float("inf"), 0.0
    for start in range(0, tl.where(inside, SIZE, 0), BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(scores_ptr + at, mask=at < WIDTH, other=-float("inf")).to(tl.float32)
        x = tl.where(at < SIZE, x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, axis=0))
        level = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(x - level), axis=0)
        top = higher
    log = tl.log(total)
    loss = log - (tl.load(scores_ptr + entry, mask=inside, other=0.0).to(tl.float32) - top)
    if ADDS:
        loss = tl.load(losses_ptr + row * losses_stride) + tl.where(inside, loss, 0.0)
    else:
        log = tl.where(inside, log, float("nan"))
        loss = tl.where(inside, loss, float("nan"))
    tl.store(out_ptr + row, loss)
    tl.store(top_ptr + row, top)
    tl.store(log_ptr + row, log)


@triton.jit
def _backward(
    scores_ptr,
    targets_ptr,
    top_ptr,
    log_ptr,
    dlosses_ptr,
    dscores_ptr,
    stride,
    dlosses_stride,
    first,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BOUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """(softmax − 1 at the target)·cotangent; with ADDS zero where the target is outside, else NaN by way of `log`."""
    row = tl.program_id(0).to(tl.int64)
    entry = _entry_of(tl.load(targets_ptr + row), first, BOUNDS)
    inside = (entry >= 0) & (entry < SIZE)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = at < WIDTH
    if ADDS:
        read = at < tl.where(inside, WIDTH, 0)  # rows that add nothing are not read
    top, log = tl.load(top_ptr + row), tl.load(log_ptr + row)
    x = tl.load(scores_ptr + row * stride + at, mask=read, other=0.0).to(tl.float32)
    dx = (tl.exp((x - top) - log) - tl.where(at == entry, 1.0, 0.0)) * tl.load(dlosses_ptr + row * dlosses_stride)
    dx = tl.where(read & (at < SIZE), dx, 0.0)
    tl.store(dscores_ptr + row * WIDTH + at, dx, mask=at < WIDTH)


def _cut(width: int, most: int) -> dict[str, int]:
    """How rows are cut, and the warps of a program."""
    block = min(triton.next_power_of_2(width), most)
    return {"WIDTH": width, "BLOCK": block, "num_warps": max(1, min(16, block // (32 * PER_THREAD)))}


def forward(
    scores: Tensor, losses: Tensor | None, targets: Tensor, size: int, first: int, bounds: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `nll` and, with losses, `add_nll`; also the maximum of each row and the logarithm of its sum."""
    out, top, log = (scores.new_empty(len(scores), dtype=torch.float32) for _ in range(3))
    _forward[(len(scores),)](
        scores,
        out if losses is None else losses,  # not read
        targets.contiguous(),
        out,
        top,
        log,
        scores.stride(0),
        1 if losses is None else losses.stride(0),
        first,
        SIZE=size,
        BOUNDS=bounds,
        ADDS=losses is not None,
        **_cut(scores.shape[1], BLOCK),
    )
    return out, top, log


def backward(
    scores: Tensor,
    targets: Tensor,
    top: Tensor,
    log: Tensor,
    dlosses: Tensor,
    size: int,
    first: int,
    bounds: tuple[int, ...],
    adds: bool,
) -> Tensor:
    """The cotangent of the scores, given that of the losses."""
    dscores = scores.new_empty(scores.shape)
    cut = _cut(scores.shape[1], VJP_BLOCK)
    _backward[(len(scores), triton.cdiv(scores.shape[1], cut["BLOCK"]))](
        scores,
        targets.contiguous(),
        top,
        log,
        dlosses,
        dscores,
        scores.stride(0),
        dlosses.stride(0),  # a mean's cotangents are one number, spread over all
        first,
        SIZE=size,
        BOUNDS=bounds,
        ADDS=adds,
        **cut,
    )
    return dscores


class Nll(torch.autograd.Function):
    """`nll` and `add_nll` by kernels; where derivatives of derivatives are taken the plain twin stands in."""

    @staticmethod
    def forward(
        scores: Tensor, losses: Tensor | None, targets: Tensor, size: int, first: int, bounds: tuple[int, ...]
    ) -> Any:
        return forward(scores, losses, targets, size, first, bounds)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        scores, losses, targets, *ctx.options = inputs
        _, top, log = output
        ctx.adds = losses is not None
        ctx.save_for_backward(scores, targets, top, log)
        ctx.mark_non_differentiable(top, log)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scores, targets, top, log = ctx.saved_tensors
        dlosses, (size, first, bounds) = grads[0], ctx.options
        needs_scores, needs_losses = ctx.needs_input_grad[:2]
        if dlosses is None:
            return (None,) * 6
        dscores = None
        if needs_scores and torch.is_grad_enabled():
            (scores,) = inputs = apart((scores,))
            if ctx.adds:
                own = naive.add_nll(torch.zeros_like(dlosses), scores, targets, size, first)
            else:
                own = naive.nll(scores, targets, size, bounds)
            (dscores,) = through_twin([own], [dlosses], inputs, [True])
        elif needs_scores:
            dscores = backward(scores, targets, top, log, dlosses, size, first, bounds, ctx.adds)
        return dscores, dlosses if needs_losses else None, None, None, None, None
