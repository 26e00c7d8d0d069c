# mypy: disable-error-code="no-untyped-def"
"""The kernels of `group_norm` whose programs take whole groups, and which kernels a map takes."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.ops._backend import apart, through_twin
from equipoise.ops.norm import naive, triton_large
from equipoise.ops.norm.triton_pieces import (
    columns_of,
    enlarging,
    finish,
    hat_and_cotangent,
    is_last,
    laid_out,
    moments_of_lanes,
    over_groups,
    place_of,
    programs,
    read,
    read_channels,
    read_moments,
    rows_of,
    sizes,
    source_of,
    through_norm,
    update,
    warps,
    write_moments,
)

# The most numbers that stay in registers, forward and in the VJP.
BLOCK, VJP_BLOCK = 16384, 16384


@triton.jit
def _forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    plus_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    eps,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    ACROSS: tl.constexpr,
    LARGE_PIXELS: tl.constexpr,
    LARGE_ACROSS: tl.constexpr,
    LARGE_COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_PLUS: tl.constexpr,
    RELU: tl.constexpr,
):
    sample, channel, exists = rows_of(CHANNELS, WIDTH, TOGETHER, ROWS)
    x_ptr += sample * (CHANNELS * PIXELS)
    plus_ptr += sample * (CHANNELS * LARGE_PIXELS)
    y_ptr += sample * (CHANNELS * LARGE_PIXELS)
    column = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (column < PIXELS)[None, :]
    at = place_of(channel, column, CHANNELS, PIXELS, LAST)
    x = read(x_ptr + at, inside)
    means, spreads = x, tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for block in range(1, (PIXELS + COLUMNS - 1) // COLUMNS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        later = read(x_ptr + place_of(channel, pixel, CHANNELS, PIXELS, LAST), there)
        means, spreads = update(later, there, means, spreads, block)
    mean, rstd = moments_of_lanes(means, spreads, channel, exists, eps, PIXELS, WIDTH, TOGETHER, COLUMNS)
    write_moments(mean_ptr, rstd_ptr, sample, channel, exists, mean, rstd, CHANNELS, WIDTH)
    scale = rstd * read_channels(weight_ptr, channel, exists, 1.0, AFFINE)
    bias = read_channels(bias_ptr, channel, exists, 0.0, AFFINE)
    if FACTOR == 1:
        finish(x, mean, scale, bias, plus_ptr + at, y_ptr + at, inside, HAS_PLUS, RELU)
        for block in range(1, (PIXELS + COLUMNS - 1) // COLUMNS):
            pixel = block * COLUMNS + column
            there = exists[:, None] & (pixel < PIXELS)[None, :]
            at = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
            finish(read(x_ptr + at, there), mean, scale, bias, plus_ptr + at, y_ptr + at, there, HAS_PLUS, RELU)
    else:
        for start in range(0, LARGE_PIXELS, LARGE_COLUMNS):
            large = start + tl.arange(0, LARGE_COLUMNS)
            source = source_of(large, ACROSS, LARGE_ACROSS, FACTOR)
            reached = exists[:, None] & (large < LARGE_PIXELS)[None, :]
            target = place_of(channel, large, CHANNELS, LARGE_PIXELS, LAST)
            copied = read(x_ptr + place_of(channel, source, CHANNELS, PIXELS, LAST), reached)
            finish(copied, mean, scale, bias, plus_ptr + target, y_ptr + target, reached, HAS_PLUS, RELU)


@triton.jit
def _backward(
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dplus_ptr,
    dweight_ptr,
    dbias_ptr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    ACROSS: tl.constexpr,
    LARGE_PIXELS: tl.constexpr,
    LARGE_ACROSS: tl.constexpr,
    FACTOR: tl.constexpr,
    COPIES: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    BY_RESULT: tl.constexpr,
    WRITES_PLUS: tl.constexpr,
    WRITES_AFFINE: tl.constexpr,
):
    """The sums over a group, then the cotangent of x; what of a group is beyond its first block is read again."""
    SIZE: tl.constexpr = WIDTH * PIXELS
    BLOCKS: tl.constexpr = (PIXELS + COLUMNS - 1) // COLUMNS
    sample, channel, exists = rows_of(CHANNELS, WIDTH, TOGETHER, ROWS)
    dx_ptr += sample * (CHANNELS * PIXELS)
    mean, rstd = read_moments(mean_ptr, rstd_ptr, sample, channel, exists, CHANNELS, WIDTH)
    weight = read_channels(weight_ptr, channel, exists, 1.0, AFFINE)
    bias = read_channels(bias_ptr, channel, exists, 0.0, AFFINE)
    column = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (column < PIXELS)[None, :]
    xhat, dy = hat_and_cotangent(
        x_ptr, y_ptr, mean, rstd, weight, bias, dy_ptr, dplus_ptr, sample, channel, column, inside,
        CHANNELS, PIXELS, ACROSS, LARGE_PIXELS, LARGE_ACROSS, FACTOR, COPIES, LAST, RELU, BY_RESULT, WRITES_PLUS,
    )  # fmt: skip
    plain, product = dy, dy * xhat
    for block in range(1, BLOCKS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        later, dlater = hat_and_cotangent(
            x_ptr, y_ptr, mean, rstd, weight, bias, dy_ptr, dplus_ptr, sample, channel, pixel, there,
            CHANNELS, PIXELS, ACROSS, LARGE_PIXELS, LARGE_ACROSS, FACTOR, COPIES, LAST, RELU, BY_RESULT, WRITES_PLUS,
        )  # fmt: skip
        plain += dlater
        product += dlater * later
    dbias, dweight = tl.sum(plain, axis=1), tl.sum(product, axis=1)
    if WRITES_AFFINE:
        tl.store(dweight_ptr + sample * CHANNELS + channel, dweight, mask=exists)
        tl.store(dbias_ptr + sample * CHANNELS + channel, dbias, mask=exists)
    level = over_groups(weight * dbias, channel, WIDTH, TOGETHER) / SIZE
    slope = over_groups(weight * dweight, channel, WIDTH, TOGETHER) / SIZE
    dx = through_norm(dy, xhat, weight, level, slope, rstd)
    tl.store(dx_ptr + place_of(channel, column, CHANNELS, PIXELS, LAST), dx, mask=inside)
    for block in range(1, BLOCKS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        later, dlater = hat_and_cotangent(
            x_ptr, y_ptr, mean, rstd, weight, bias, dy_ptr, dplus_ptr, sample, channel, pixel, there,
            CHANNELS, PIXELS, ACROSS, LARGE_PIXELS, LARGE_ACROSS, FACTOR, COPIES, LAST, RELU, BY_RESULT, False,
        )  # fmt: skip
        dx = through_norm(dlater, later, weight, level, slope, rstd)
        tl.store(dx_ptr + place_of(channel, pixel, CHANNELS, PIXELS, LAST), dx, mask=there)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    plus: Tensor | None,
    groups: int,
    eps: float,
    enlarge: int,
    relu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `group_norm`; also mean and 1/deviation, (N, groups)."""
    last = is_last(x)
    x = laid_out(x, last)
    like = x if plus is None else laid_out(plus, last)
    y = torch.empty_like(like, dtype=dtype)
    mean, rstd = (x.new_empty((len(x), groups), dtype=torch.float32) for _ in range(2))
    larger = y.shape[2] * y.shape[3] if enlarge > 1 else 1
    cut, chunks = sizes(x.shape, groups, last, x.element_size(), BLOCK, large_pixels=larger)
    given = (x, x if weight is None else weight, x if bias is None else bias, like)  # what is None is not read
    flags = enlarging(x, y.shape, enlarge)
    flags |= {"AFFINE": weight is not None, "HAS_PLUS": plus is not None, "RELU": relu}
    columns = columns_of(larger, cut["ROWS"]) if enlarge > 1 else cut["COLUMNS"]
    if chunks is not None:
        triton_large.norm(*given, y, mean, rstd, eps, flags, cut, chunks, columns)
    else:
        cut["num_warps"] = max(cut["num_warps"], warps(cut["ROWS"] * columns))
        _forward[programs(x.shape, cut)](*given, y, mean, rstd, eps, LARGE_COLUMNS=columns, **flags, **cut)
    return y, mean, rstd


def norm_vjp(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dy: Tensor,
    plus: torch.dtype | None,
    enlarge: int,
    relu: bool,
    affine: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Cotangents of x, of weight and bias for each sample, and of what was added.

    Args:
        x: As in `norm`, and so are the others not named here.
        y: The result where it says what was rectified; None if the normalised map does.
        dy: Cotangent of the result.
        plus: Dtype of what was added, if its cotangent is to be written: without `relu` it is `dy`.
        affine: Whether cotangents of weight and bias are wanted.
    """
    last = is_last(x)
    x, dy = laid_out(x, last), laid_out(dy, last)
    dx = torch.empty_like(x)
    dplus = None if plus is None else torch.empty_like(dy, dtype=plus)
    copies = triton.next_power_of_2(enlarge * enlarge)
    cut, chunks = sizes(x.shape, mean.shape[1], last, x.element_size(), VJP_BLOCK, copies)
    # What is None is neither read nor written.
    given = (x, x if y is None else laid_out(y, last), x if weight is None else weight, x if bias is None else bias)
    written = (dx, dx if dplus is None else dplus)
    flags = enlarging(x, dy.shape, enlarge)
    flags |= {
        "COPIES": copies,
        "AFFINE": weight is not None,
        "RELU": relu and y is None,
        "BY_RESULT": relu and y is not None,
        "WRITES_PLUS": plus is not None,
        "WRITES_AFFINE": affine,
    }
    if chunks is not None:
        sums = triton_large.norm_vjp(*given, mean, rstd, dy, *written, flags, cut, chunks)
    else:
        sums = mean.new_empty((2, *x.shape[:2])) if affine else None
        _backward[programs(x.shape, cut)](
            *given, mean, rstd, dy, *written, *((mean, mean) if sums is None else sums), **flags, **cut
        )
    dweight, dbias = (None, None) if sums is None else sums
    return dx, dweight, dbias, dplus


class Norm(torch.autograd.Function):
    """`group_norm` by kernels; where derivatives of derivatives are taken the plain twin stands in.

    Scale and offset come spread over samples, (N, C), but the same for all of them.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        plus: Tensor | None,
        groups: int,
        eps: float,
        enlarge: int,
        relu: bool,
        dtype: torch.dtype,
    ) -> Any:
        return norm(x, weight, bias, plus, groups, eps, enlarge, relu, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.groups, eps, enlarge, relu, dtype = inputs
        ctx.options = {"eps": eps, "enlarge": enlarge, "relu": relu, "dtype": dtype}
        y, mean, rstd = output
        ctx.save_for_backward(*tensors, y if relu and tensors[3] is not None else None, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *inputs, y, mean, rstd = ctx.saved_tensors
        dy, needed, rest = grads[0], ctx.needs_input_grad[:4], (None,) * 5
        if dy is None:
            return None, None, None, None, *rest
        if torch.is_grad_enabled():
            x, *others = inputs = apart(inputs)
            twin = naive.group_norm(x, ctx.groups, *others, **ctx.options)
            return *through_twin([twin], [dy], inputs, needed), *rest
        x, weight, bias, plus = inputs
        relu, enlarge = ctx.options["relu"], ctx.options["enlarge"]
        written = plus.dtype if needed[3] and relu else None
        affine = needed[1] or needed[2]
        found = norm_vjp(x, weight, bias, y, mean, rstd, dy, written, enlarge, relu, affine)
        dx, dweight, dbias, dplus = found
        if dweight is not None and dbias is not None:
            dweight, dbias = dweight.to(weight.dtype), dbias.to(bias.dtype)
        if needed[3] and dplus is None:
            dplus = dy.to(plus.dtype)
        return dx, dweight, dbias, dplus, *rest
