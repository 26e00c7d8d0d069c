# mypy: disable-error-code="no-untyped-def"
"""The kernels of `residual_norm` for few large groups: three passes over chunks, each a program's, both ways."""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.ops.norm.triton_pieces import (
    activation,
    added,
    again,
    in_chunks,
    measure_chunk,
    moments_of_parts,
    place_of,
    programs,
    read_channels,
    read_moments,
    rows_of,
    through_norm,
    total_cotangent,
    total_of_parts,
    write_cotangents,
    write_sums,
)


@triton.jit
def _forward(
    t_ptr,
    z_ptr,
    mask_ptr,
    x_ptr,
    weight_in_ptr,
    bias_in_ptr,
    weight_out_ptr,
    bias_out_ptr,
    y_ptr,
    mean_in_ptr,
    rstd_in_ptr,
    mean_out_ptr,
    rstd_out_ptr,
    means_in_ptr,
    spreads_in_ptr,
    means_out_ptr,
    spreads_out_ptr,
    eps_in,
    eps_out,
    PASS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_X: tl.constexpr,
    AFFINE_IN: tl.constexpr,
    AFFINE_OUT: tl.constexpr,
):
    """A chunk: 0, the moments of u; 1, those of relu(v); 2, the result."""
    chunk = tl.program_id(1)
    sample, channel, exists = rows_of(CHANNELS, WIDTH, TOGETHER, ROWS)
    origin = sample * (CHANNELS * PIXELS)
    factor = read_channels(mask_ptr + sample * CHANNELS, channel, exists, 1.0, HAS_MASK)
    pixel = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = exists[:, None] & (pixel < PIXELS)[None, :]
    at = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
    u = added(t_ptr + origin, x_ptr + origin, factor, at, inside, HAS_X)
    if PASS == 0:
        measure_chunk(
            u, inside, means_in_ptr, spreads_in_ptr, sample, channel, exists, chunk,
            CHANNELS, PIXELS, WIDTH, TOGETHER, COLUMNS, CHUNKS,
        )  # fmt: skip
    else:
        if PASS == 1:
            mean, rstd = moments_of_parts(
                means_in_ptr, spreads_in_ptr, mean_in_ptr, rstd_in_ptr, sample, channel, exists, chunk, eps_in,
                CHANNELS, PIXELS, WIDTH, TOGETHER, COLUMNS, CHUNKS, LANES,
            )  # fmt: skip
        else:
            mean, rstd = read_moments(mean_in_ptr, rstd_in_ptr, sample, channel, exists, CHANNELS, WIDTH)
        scale = rstd * read_channels(weight_in_ptr, channel, exists, 1.0, AFFINE_IN)
        bias = read_channels(bias_in_ptr, channel, exists, 0.0, AFFINE_IN)
        v = activation(u, mean, scale, bias, z_ptr + origin, at, inside)
        if PASS == 1:
            measure_chunk(
                v, inside, means_out_ptr, spreads_out_ptr, sample, channel, exists, chunk,
                CHANNELS, PIXELS, WIDTH, TOGETHER, COLUMNS, CHUNKS,
            )  # fmt: skip
        else:
            mean, rstd = moments_of_parts(
                means_out_ptr, spreads_out_ptr, mean_out_ptr, rstd_out_ptr, sample, channel, exists, chunk, eps_out,
                CHANNELS, PIXELS, WIDTH, TOGETHER, COLUMNS, CHUNKS, LANES,
            )  # fmt: skip
            scale = rstd * read_channels(weight_out_ptr, channel, exists, 1.0, AFFINE_OUT)
            bias = read_channels(bias_out_ptr, channel, exists, 0.0, AFFINE_OUT)
            tl.store(y_ptr + origin + at, (v - mean[:, None]) * scale[:, None] + bias[:, None], mask=inside)


@triton.jit
def _backward(
    t_ptr,
    z_ptr,
    mask_ptr,
    x_ptr,
    weight_in_ptr,
    bias_in_ptr,
    weight_out_ptr,
    bias_out_ptr,
    mean_in_ptr,
    rstd_in_ptr,
    mean_out_ptr,
    rstd_out_ptr,
    dy_ptr,
    dy2_ptr,
    dy3_ptr,
    dy4_ptr,
    dt_ptr,
    dz_ptr,
    dx_ptr,
    levels_in_ptr,
    slopes_in_ptr,
    levels_out_ptr,
    slopes_out_ptr,
    dweight_in_ptr,
    dbias_in_ptr,
    dweight_out_ptr,
    dbias_out_ptr,
    PASS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_X: tl.constexpr,
    AFFINE_IN: tl.constexpr,
    AFFINE_OUT: tl.constexpr,
    COTANGENTS: tl.constexpr,
    WRITES_X: tl.constexpr,
    WRITES_AFFINE: tl.constexpr,
):
    """A chunk: 0, the sums that the outer normalisation needs; 1, those of the inner one; 2, the cotangents."""
    SIZE: tl.constexpr = WIDTH * PIXELS
    chunk = tl.program_id(1)
    sample, channel, exists = rows_of(CHANNELS, WIDTH, TOGETHER, ROWS)
    origin = sample * (CHANNELS * PIXELS)
    dy_ptr, dy2_ptr, dy3_ptr, dy4_ptr = dy_ptr + origin, dy2_ptr + origin, dy3_ptr + origin, dy4_ptr + origin
    factor = read_channels(mask_ptr + sample * CHANNELS, channel, exists, 1.0, HAS_MASK)
    mean_in, rstd_in = read_moments(mean_in_ptr, rstd_in_ptr, sample, channel, exists, CHANNELS, WIDTH)
    mean_out, rstd_out = read_moments(mean_out_ptr, rstd_out_ptr, sample, channel, exists, CHANNELS, WIDTH)
    weight_in = read_channels(weight_in_ptr, channel, exists, 1.0, AFFINE_IN)
    bias_in = read_channels(bias_in_ptr, channel, exists, 0.0, AFFINE_IN)
    weight_out = read_channels(weight_out_ptr, channel, exists, 1.0, AFFINE_OUT)
    pixel = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = exists[:, None] & (pixel < PIXELS)[None, :]
    at = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
    u, flat, w = again(
        t_ptr + origin, x_ptr + origin, z_ptr + origin, factor,
        mean_in, rstd_in, weight_in, bias_in, mean_out, rstd_out, at, inside, HAS_X,
    )  # fmt: skip
    dy = total_cotangent(dy_ptr, dy2_ptr, dy3_ptr, dy4_ptr, at, inside, COTANGENTS)
    if PASS == 0:
        write_sums(
            dy, w, weight_out, levels_out_ptr, slopes_out_ptr, dweight_out_ptr, dbias_out_ptr,
            sample, channel, exists, chunk, CHANNELS, WIDTH, TOGETHER, CHUNKS, WRITES_AFFINE,
        )  # fmt: skip
    else:
        level = total_of_parts(levels_out_ptr, sample, channel, CHANNELS, WIDTH, TOGETHER, CHUNKS, LANES)
        slope = total_of_parts(slopes_out_ptr, sample, channel, CHANNELS, WIDTH, TOGETHER, CHUNKS, LANES)
        dv = tl.where(flat, 0.0, through_norm(dy, w, weight_out, level / SIZE, slope / SIZE, rstd_out))
        if PASS == 1:
            write_sums(
                dv, u, weight_in, levels_in_ptr, slopes_in_ptr, dweight_in_ptr, dbias_in_ptr,
                sample, channel, exists, chunk, CHANNELS, WIDTH, TOGETHER, CHUNKS, WRITES_AFFINE,
            )  # fmt: skip
        else:
            level = total_of_parts(levels_in_ptr, sample, channel, CHANNELS, WIDTH, TOGETHER, CHUNKS, LANES)
            slope = total_of_parts(slopes_in_ptr, sample, channel, CHANNELS, WIDTH, TOGETHER, CHUNKS, LANES)
            du = through_norm(dv, u, weight_in, level / SIZE, slope / SIZE, rstd_in)
            write_cotangents(du, dv, factor, dt_ptr + origin, dz_ptr + origin, dx_ptr + origin, at, inside, WRITES_X)


def residual(
    given: Sequence[Tensor],
    y: Tensor,
    saved: Tensor,
    eps: tuple[float, float],
    flags: Mapping[str, int],
    cut: Mapping[str, int],
    chunks: int,
) -> None:
    """Write y and what is saved; arguments are those of the kernel for whole groups."""
    parts = saved.new_empty((*saved.shape, chunks))
    cut = in_chunks(cut, chunks)
    for number in range(3):
        _forward[*programs(y.shape, cut), chunks](*given, y, *saved, *parts, *eps, PASS=number, **flags, **cut)


def residual_vjp(
    given: Sequence[Tensor],
    written: Sequence[Tensor],
    flags: Mapping[str, int],
    cut: Mapping[str, int],
    chunks: int,
) -> Tensor | None:
    """Write the cotangents of t, z and x; those of the weights for each sample, (4, N, C), if they are wanted."""
    shape, saved, wanted = written[0].shape, given[8], flags["WRITES_AFFINE"]
    parts = saved.new_empty((4, *saved.shape, chunks))
    sums = saved.new_empty((4, shape[0], chunks, shape[1])) if wanted else parts
    cut = in_chunks(cut, chunks)
    for number in range(3):
        _backward[*programs(shape, cut), chunks](*given, *written, *parts, *sums, PASS=number, **flags, **cut)
    return torch.sum(sums, dim=2) if wanted else None
