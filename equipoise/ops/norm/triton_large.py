# mypy: disable-error-code="no-untyped-def"
"""The kernels of `group_norm` for few large groups: every chunk of a group is a program's.

Moments of chunks are written by one kernel and put together, by every program for itself, in the next one. Large maps
of few samples then take the whole device, not as many programs as they have groups.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.ops.norm.triton_pieces import (
    finish,
    hat_and_cotangent,
    in_chunks,
    measure_chunk,
    moments_of_parts,
    place_of,
    programs,
    read,
    read_channels,
    read_moments,
    rows_of,
    source_of,
    through_norm,
    total_of_parts,
    warps,
    write_sums,
)


@triton.jit
def _measure(
    x_ptr,
    means_ptr,
    spreads_ptr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Mean and squared deviations of each chunk."""
    chunk = tl.program_id(1)
    sample, channel, exists = rows_of(CHANNELS, WIDTH, TOGETHER, ROWS)
    pixel = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = exists[:, None] & (pixel < PIXELS)[None, :]
    place = x_ptr + sample * (CHANNELS * PIXELS) + place_of(channel, pixel, CHANNELS, PIXELS, LAST)
    measure_chunk(
        read(place, inside), inside, means_ptr, spreads_ptr, sample, channel, exists, chunk,
        CHANNELS, PIXELS, WIDTH, TOGETHER, COLUMNS, CHUNKS,
    )  # fmt: skip


@triton.jit
def _apply(
    x_ptr,
    weight_ptr,
    bias_ptr,
    plus_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    means_ptr,
    spreads_ptr,
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
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """A chunk of the result."""
    chunk = tl.program_id(1)
    sample, channel, exists = rows_of(CHANNELS, WIDTH, TOGETHER, ROWS)
    mean, rstd = moments_of_parts(
        means_ptr, spreads_ptr, mean_ptr, rstd_ptr, sample, channel, exists, chunk, eps,
        CHANNELS, PIXELS, WIDTH, TOGETHER, COLUMNS, CHUNKS, LANES,
    )  # fmt: skip
    scale = rstd * read_channels(weight_ptr, channel, exists, 1.0, AFFINE)
    bias = read_channels(bias_ptr, channel, exists, 0.0, AFFINE)
    large = chunk * LARGE_COLUMNS + tl.arange(0, LARGE_COLUMNS)
    inside = exists[:, None] & (large < LARGE_PIXELS)[None, :]
    at = sample * (CHANNELS * LARGE_PIXELS) + place_of(channel, large, CHANNELS, LARGE_PIXELS, LAST)
    source = source_of(large, ACROSS, LARGE_ACROSS, FACTOR) if FACTOR > 1 else large
    place = x_ptr + sample * (CHANNELS * PIXELS) + place_of(channel, source, CHANNELS, PIXELS, LAST)
    finish(read(place, inside), mean, scale, bias, plus_ptr + at, y_ptr + at, inside, HAS_PLUS, RELU)


@triton.jit
def _measure_vjp(
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dplus_ptr,
    levels_ptr,
    slopes_ptr,
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
    CHUNKS: tl.constexpr,
):
    """The sums of w·dy and w·dy·x̂ over each chunk, those of dy and dy·x̂ over its pixels, and what was added."""
    chunk = tl.program_id(1)
    sample, channel, exists = rows_of(CHANNELS, WIDTH, TOGETHER, ROWS)
    mean, rstd = read_moments(mean_ptr, rstd_ptr, sample, channel, exists, CHANNELS, WIDTH)
    weight = read_channels(weight_ptr, channel, exists, 1.0, AFFINE)
    bias = read_channels(bias_ptr, channel, exists, 0.0, AFFINE)
    pixel = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = exists[:, None] & (pixel < PIXELS)[None, :]
    xhat, dy = hat_and_cotangent(
        x_ptr, y_ptr, mean, rstd, weight, bias, dy_ptr, dplus_ptr, sample, channel, pixel, inside,
        CHANNELS, PIXELS, ACROSS, LARGE_PIXELS, LARGE_ACROSS, FACTOR, COPIES, LAST, RELU, BY_RESULT, WRITES_PLUS,
    )  # fmt: skip
    write_sums(
        dy, xhat, weight, levels_ptr, slopes_ptr, dweight_ptr, dbias_ptr,
        sample, channel, exists, chunk, CHANNELS, WIDTH, TOGETHER, CHUNKS, WRITES_AFFINE,
    )  # fmt: skip


@triton.jit
def _apply_vjp(
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    levels_ptr,
    slopes_ptr,
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
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """A chunk of the cotangent of x."""
    SIZE: tl.constexpr = WIDTH * PIXELS
    sample, channel, exists = rows_of(CHANNELS, WIDTH, TOGETHER, ROWS)
    mean, rstd = read_moments(mean_ptr, rstd_ptr, sample, channel, exists, CHANNELS, WIDTH)
    weight = read_channels(weight_ptr, channel, exists, 1.0, AFFINE)
    bias = read_channels(bias_ptr, channel, exists, 0.0, AFFINE)
    pixel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = exists[:, None] & (pixel < PIXELS)[None, :]
    xhat, dy = hat_and_cotangent(
        x_ptr, y_ptr, mean, rstd, weight, bias, dy_ptr, dy_ptr, sample, channel, pixel, inside,
        CHANNELS, PIXELS, ACROSS, LARGE_PIXELS, LARGE_ACROSS, FACTOR, COPIES, LAST, RELU, BY_RESULT, False,
    )  # fmt: skip
    level = total_of_parts(levels_ptr, sample, channel, CHANNELS, WIDTH, TOGETHER, CHUNKS, LANES) / SIZE
    slope = total_of_parts(slopes_ptr, sample, channel, CHANNELS, WIDTH, TOGETHER, CHUNKS, LANES) / SIZE
    dx = through_norm(dy, xhat, weight, level, slope, rstd)
    place = sample * (CHANNELS * PIXELS) + place_of(channel, pixel, CHANNELS, PIXELS, LAST)
    tl.store(dx_ptr + place, dx, mask=inside)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    plus: Tensor,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    flags: Mapping[str, int],
    cut: Mapping[str, int],
    chunks: int,
    columns: int,
) -> None:
    """Write y, so many pixels per program, mean and 1/deviation; arguments are those of the kernel for whole groups."""
    parts = mean.new_empty((2, *mean.shape, chunks))
    (count,) = programs(x.shape, cut)
    _measure[count, chunks](x, *parts, **cut, CHUNKS=chunks)
    cut = in_chunks(cut, chunks) | {"LARGE_COLUMNS": columns, "num_warps": warps(cut["ROWS"] * columns)}
    grid = count, triton.cdiv(flags["LARGE_PIXELS"], columns)
    _apply[grid](x, weight, bias, plus, y, mean, rstd, *parts, eps, **flags, **cut)


def norm_vjp(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dy: Tensor,
    dx: Tensor,
    dplus: Tensor,
    flags: Mapping[str, int],
    cut: Mapping[str, int],
    chunks: int,
) -> Tensor | None:
    """Write dx and dplus; the cotangents of weight and bias for each sample, (2, N, C), if they are wanted."""
    parts = mean.new_empty((2, *mean.shape, chunks))
    wanted = flags["WRITES_AFFINE"]
    sums = mean.new_empty((2, len(x), chunks, x.shape[1])) if wanted else parts
    grid, given = (*programs(x.shape, cut), chunks), (x, y, weight, bias, mean, rstd, dy)
    _measure_vjp[grid](*given, dplus, *parts, *sums, **flags, **cut, CHUNKS=chunks)
    others = {name: flag for name, flag in flags.items() if not name.startswith("WRITES")}
    _apply_vjp[grid](*given, dx, *parts, **others, **in_chunks(cut, chunks))
    return torch.sum(sums, dim=2) if wanted else None
