# mypy: disable-error-code="no-untyped-def"
"""The kernels of `gather_taps` and `drop_taps`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.ops._backend import apart, through_twin
from equipoise.ops.taps import naive

# Steps and features per program of `gather_taps`, and its warps.
STEPS, WIDTH, WARPS = 8, 256, 4
# Weights per program of `drop_taps`, and its warps.
BLOCK, BLOCK_WARPS = 1024, 4


@triton.jit
def _gather(
    h_ptr,
    before_ptr,
    mask_ptr,
    rows_ptr,
    length,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    FEATURES: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Each value of x is read once and written to every row that it is a tap of."""
    REACH: tl.constexpr = (TAPS - 1) * DILATION
    batch, first = tl.program_id(2).to(tl.int64), tl.program_id(1) * STEPS
    step = first + tl.arange(0, STEPS)  # of x
    feature = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    valid = feature < FEATURES
    here = ((step >= REACH) & (step < REACH + length))[:, None] & valid[None, :]
    at = step[:, None] * FEATURES + feature[None, :]
    x = tl.load(h_ptr + batch * length * FEATURES + at - REACH * FEATURES, mask=here, other=0.0).to(tl.float32)
    if first < REACH:
        older = (step < REACH)[:, None]
        past = tl.load(before_ptr + batch * REACH * FEATURES + at, mask=older & valid[None, :], other=0.0)
        x = tl.where(older, past.to(tl.float32), x)
    if HAS_MASK:
        x *= tl.load(mask_ptr + batch * FEATURES + feature, mask=valid, other=0.0).to(tl.float32)[None, :]
    rows_ptr += batch * length * (TAPS * FEATURES)
    for j in tl.static_range(TAPS):
        row = step - j * DILATION
        inside = ((row >= 0) & (row < length))[:, None] & valid[None, :]
        tl.store(rows_ptr + row[:, None] * (TAPS * FEATURES) + j * FEATURES + feature[None, :], x, mask=inside)


@triton.jit
def _scatter(
    drows_ptr,
    mask_ptr,
    dh_ptr,
    dbefore_ptr,
    length,
    FIRST: tl.constexpr,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    FEATURES: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """The VJP: each step of x, from FIRST on, sums over the rows that it is a tap of."""
    REACH: tl.constexpr = (TAPS - 1) * DILATION
    batch = tl.program_id(2).to(tl.int64)
    step = FIRST + tl.program_id(1) * STEPS + tl.arange(0, STEPS)  # of x
    feature = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    valid = feature < FEATURES
    drows_ptr += batch * length * (TAPS * FEATURES)
    dx = tl.zeros([STEPS, WIDTH], dtype=tl.float32)
    for j in tl.static_range(TAPS):
        row = step - j * DILATION
        inside = ((row >= 0) & (row < length))[:, None] & valid[None, :]
        place = drows_ptr + row[:, None] * (TAPS * FEATURES) + j * FEATURES + feature[None, :]
        dx += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_MASK:
        dx *= tl.load(mask_ptr + batch * FEATURES + feature, mask=valid, other=0.0).to(tl.float32)[None, :]
    here = ((step >= REACH) & (step < REACH + length))[:, None] & valid[None, :]
    at = step[:, None] * FEATURES + feature[None, :]
    tl.store(dh_ptr + batch * length * FEATURES + at - REACH * FEATURES, dx, mask=here)
    if FIRST < REACH:
        tl.store(dbefore_ptr + batch * REACH * FEATURES + at, dx, mask=(step < REACH)[:, None] & valid[None, :])


@triton.jit
def _drop(weight_ptr, kept_ptr, out_ptr, scale, COLUMNS: tl.constexpr, PAST: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weight_ptr + row * COLUMNS + at, mask=at < COLUMNS, other=0.0).to(tl.float32)
    kept = tl.load(kept_ptr + row * PAST + at, mask=at < PAST, other=1)
    w = tl.where(kept != 0, tl.where(at < PAST, w * scale, w), 0.0)
    tl.store(out_ptr + row * COLUMNS + at, w, mask=at < COLUMNS)


def gather(
    h: Tensor, before: Tensor, mask: Tensor | None, kernel_size: int, dilation: int, dtype: torch.dtype
) -> Tensor:
    """See `gather_taps`; arguments contiguous."""
    batch, length, features = h.shape
    rows = h.new_empty((batch, length, kernel_size * features), dtype=dtype)
    grid = (triton.cdiv(features, WIDTH), triton.cdiv(length + before.shape[1], STEPS), batch)
    _gather[grid](
        h,
        before,
        h if mask is None else mask,  # not read
        rows,
        length,
        TAPS=kernel_size,
        DILATION=dilation,
        FEATURES=features,
        STEPS=STEPS,
        WIDTH=WIDTH,
        HAS_MASK=mask is not None,
        num_warps=WARPS,
    )
    return rows


def scatter(
    drows: Tensor, h: Tensor, before: Tensor, mask: Tensor | None, dilation: int, needs_before: bool
) -> tuple[Tensor, Tensor | None]:
    """Cotangents of h and, if wanted, `before`; of those only form and dtype are looked at."""
    batch, length, features = h.shape
    dh = h.new_empty(h.shape)
    dbefore = before.new_empty(before.shape) if needs_before else None
    first = 0 if needs_before else before.shape[1]
    grid = (triton.cdiv(features, WIDTH), triton.cdiv(length + before.shape[1] - first, STEPS), batch)
    _scatter[grid](
        drows,
        drows if mask is None else mask,  # not read
        dh,
        dh if dbefore is None else dbefore,  # not written
        length,
        FIRST=first,
        TAPS=drows.shape[2] // features,
        DILATION=dilation,
        FEATURES=features,
        STEPS=STEPS,
        WIDTH=WIDTH,
        HAS_MASK=mask is not None,
        num_warps=WARPS,
    )
    return dh, dbefore


class Rows(torch.autograd.Function):
    """`gather_taps` by kernels; where derivatives of derivatives are taken the plain twin stands in."""

    @staticmethod
    def forward(
        h: Tensor, before: Tensor, mask: Tensor | None, kernel_size: int, dilation: int, dtype: torch.dtype
    ) -> Tensor:
        mask = None if mask is None else mask.contiguous()
        return gather(h.contiguous(), before.contiguous(), mask, kernel_size, dilation, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        h, before, mask, *ctx.options = inputs
        ctx.save_for_backward(h, before, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        h, before, mask = ctx.saved_tensors
        needs_h, needs_before, needs_mask = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or needs_mask:
            create_graph = torch.is_grad_enabled()
            with torch.enable_grad():
                inputs = apart((h, before, mask))
                rows = naive.rows(*inputs, *ctx.options)
            found = through_twin([rows], grads, inputs, ctx.needs_input_grad[:3], create_graph)
            return *found, None, None, None
        mask = None if mask is None else mask.contiguous()
        dh, dbefore = scatter(grads[0].contiguous(), h, before, mask, ctx.options[1], needs_before)
        return dh if needs_h else None, dbefore, None, None, None, None


class Dropped(torch.autograd.Function):
    """`drop_taps` by a kernel; it is its own VJP."""

    @staticmethod
    def forward(weight: Tensor, kept: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        weight, kept = weight.contiguous(), kept.contiguous()
        out = torch.empty_like(weight, dtype=dtype)
        columns, past = weight.shape[1], kept.shape[1]
        grid = (weight.shape[0], triton.cdiv(columns, BLOCK))
        sizes = {"COLUMNS": columns, "PAST": past, "BLOCK": BLOCK}
        _drop[grid](weight, kept.view(torch.uint8), out, scale, **sizes, num_warps=BLOCK_WARPS)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, kept, ctx.scale, _ = inputs
        ctx.dtype = weight.dtype
        ctx.save_for_backward(kept)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (kept,) = ctx.saved_tensors
        return Dropped.apply(grads[0], kept, ctx.scale, ctx.dtype), None, None, None  # type: ignore[no-untyped-call]
