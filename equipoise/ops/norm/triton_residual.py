# mypy: disable-error-code="no-untyped-def"
"""The kernels of `residual_norm`: y = GN(relu(v)), v = GN(u) + z, u = mask·t + x."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.ops._backend import apart, through_twin
from equipoise.ops.norm import naive, triton_residual_large
from equipoise.ops.norm.triton_pieces import (
    activation,
    added,
    again,
    is_last,
    laid_out,
    moments_of_lanes,
    over_groups,
    place_of,
    programs,
    read_channels,
    read_moments,
    rows_of,
    sizes,
    through_norm,
    total_cotangent,
    update,
    write_cotangents,
    write_moments,
)

# The most numbers that stay in registers, forward and in the VJP.
BLOCK, VJP_BLOCK = 8192, 8192
MOST_COTANGENTS = 4  # that the kernel of the VJP adds up


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
    eps_in,
    eps_out,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_X: tl.constexpr,
    AFFINE_IN: tl.constexpr,
    AFFINE_OUT: tl.constexpr,
):
    BLOCKS: tl.constexpr = (PIXELS + COLUMNS - 1) // COLUMNS
    sample, channel, exists = rows_of(CHANNELS, WIDTH, TOGETHER, ROWS)
    t_ptr += sample * (CHANNELS * PIXELS)
    x_ptr += sample * (CHANNELS * PIXELS)
    z_ptr += sample * (CHANNELS * PIXELS)
    y_ptr += sample * (CHANNELS * PIXELS)
    factor = read_channels(mask_ptr + sample * CHANNELS, channel, exists, 1.0, HAS_MASK)
    column = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (column < PIXELS)[None, :]
    at = place_of(channel, column, CHANNELS, PIXELS, LAST)
    zeros = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)

    u = added(t_ptr, x_ptr, factor, at, inside, HAS_X)
    means, spreads = u, zeros
    for block in range(1, BLOCKS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        later = added(t_ptr, x_ptr, factor, place_of(channel, pixel, CHANNELS, PIXELS, LAST), there, HAS_X)
        means, spreads = update(later, there, means, spreads, block)
    mean_in, rstd = moments_of_lanes(means, spreads, channel, exists, eps_in, PIXELS, WIDTH, TOGETHER, COLUMNS)
    write_moments(mean_in_ptr, rstd_in_ptr, sample, channel, exists, mean_in, rstd, CHANNELS, WIDTH)
    scale_in = rstd * read_channels(weight_in_ptr, channel, exists, 1.0, AFFINE_IN)
    bias_in = read_channels(bias_in_ptr, channel, exists, 0.0, AFFINE_IN)

    v = activation(u, mean_in, scale_in, bias_in, z_ptr, at, inside)
    means, spreads = v, zeros
    for block in range(1, BLOCKS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        place = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
        later = added(t_ptr, x_ptr, factor, place, there, HAS_X)
        later = activation(later, mean_in, scale_in, bias_in, z_ptr, place, there)
        means, spreads = update(later, there, means, spreads, block)
    mean, rstd = moments_of_lanes(means, spreads, channel, exists, eps_out, PIXELS, WIDTH, TOGETHER, COLUMNS)
    write_moments(mean_out_ptr, rstd_out_ptr, sample, channel, exists, mean, rstd, CHANNELS, WIDTH)
    scale = rstd * read_channels(weight_out_ptr, channel, exists, 1.0, AFFINE_OUT)
    bias = read_channels(bias_out_ptr, channel, exists, 0.0, AFFINE_OUT)

    tl.store(y_ptr + at, (v - mean[:, None]) * scale[:, None] + bias[:, None], mask=inside)
    for block in range(1, BLOCKS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        place = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
        later = added(t_ptr, x_ptr, factor, place, there, HAS_X)
        later = activation(later, mean_in, scale_in, bias_in, z_ptr, place, there)
        tl.store(y_ptr + place, (later - mean[:, None]) * scale[:, None] + bias[:, None], mask=there)


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
    dweight_in_ptr,
    dbias_in_ptr,
    dweight_out_ptr,
    dbias_out_ptr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_X: tl.constexpr,
    AFFINE_IN: tl.constexpr,
    AFFINE_OUT: tl.constexpr,
    COTANGENTS: tl.constexpr,
    WRITES_X: tl.constexpr,
    WRITES_AFFINE: tl.constexpr,
):
    """Through the outer normalisation to dv, which is dz, then through the inner one to du."""
    SIZE: tl.constexpr = WIDTH * PIXELS
    BLOCKS: tl.constexpr = (PIXELS + COLUMNS - 1) // COLUMNS
    sample, channel, exists = rows_of(CHANNELS, WIDTH, TOGETHER, ROWS)
    origin = sample * (CHANNELS * PIXELS)
    t_ptr, z_ptr, x_ptr = t_ptr + origin, z_ptr + origin, x_ptr + origin
    dy_ptr, dy2_ptr, dy3_ptr, dy4_ptr = dy_ptr + origin, dy2_ptr + origin, dy3_ptr + origin, dy4_ptr + origin
    dt_ptr, dz_ptr, dx_ptr = dt_ptr + origin, dz_ptr + origin, dx_ptr + origin
    factor = read_channels(mask_ptr + sample * CHANNELS, channel, exists, 1.0, HAS_MASK)
    mean_in, rstd_in = read_moments(mean_in_ptr, rstd_in_ptr, sample, channel, exists, CHANNELS, WIDTH)
    mean_out, rstd_out = read_moments(mean_out_ptr, rstd_out_ptr, sample, channel, exists, CHANNELS, WIDTH)
    weight_in = read_channels(weight_in_ptr, channel, exists, 1.0, AFFINE_IN)
    bias_in = read_channels(bias_in_ptr, channel, exists, 0.0, AFFINE_IN)
    weight_out = read_channels(weight_out_ptr, channel, exists, 1.0, AFFINE_OUT)
    column = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (column < PIXELS)[None, :]
    at = place_of(channel, column, CHANNELS, PIXELS, LAST)

    u, flat, w = again(
        t_ptr, x_ptr, z_ptr, factor, mean_in, rstd_in, weight_in, bias_in, mean_out, rstd_out, at, inside, HAS_X
    )
    dy = total_cotangent(dy_ptr, dy2_ptr, dy3_ptr, dy4_ptr, at, inside, COTANGENTS)
    plain, product = dy, dy * w
    for block in range(1, BLOCKS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        place = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
        _, _, w_later = again(
            t_ptr, x_ptr, z_ptr, factor, mean_in, rstd_in, weight_in, bias_in, mean_out, rstd_out, place, there, HAS_X
        )
        dlater = total_cotangent(dy_ptr, dy2_ptr, dy3_ptr, dy4_ptr, place, there, COTANGENTS)
        plain += dlater
        product += dlater * w_later
    dbias, dweight = tl.sum(plain, axis=1), tl.sum(product, axis=1)
    if WRITES_AFFINE:
        tl.store(dweight_out_ptr + sample * CHANNELS + channel, dweight, mask=exists)
        tl.store(dbias_out_ptr + sample * CHANNELS + channel, dbias, mask=exists)
    level_out = over_groups(weight_out * dbias, channel, WIDTH, TOGETHER) / SIZE
    slope_out = over_groups(weight_out * dweight, channel, WIDTH, TOGETHER) / SIZE

    dv = tl.where(flat, 0.0, through_norm(dy, w, weight_out, level_out, slope_out, rstd_out))
    plain, product = dv, dv * u
    for block in range(1, BLOCKS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        place = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
        u_later, flat_later, w_later = again(
            t_ptr, x_ptr, z_ptr, factor, mean_in, rstd_in, weight_in, bias_in, mean_out, rstd_out, place, there, HAS_X
        )
        dlater = total_cotangent(dy_ptr, dy2_ptr, dy3_ptr, dy4_ptr, place, there, COTANGENTS)
        dlater = through_norm(dlater, w_later, weight_out, level_out, slope_out, rstd_out)
        dlater = tl.where(flat_later, 0.0, dlater)
        plain += dlater
        product += dlater * u_later
    dbias, dweight = tl.sum(plain, axis=1), tl.sum(product, axis=1)
    if WRITES_AFFINE:
        tl.store(dweight_in_ptr + sample * CHANNELS + channel, dweight, mask=exists)
        tl.store(dbias_in_ptr + sample * CHANNELS + channel, dbias, mask=exists)
    level_in = over_groups(weight_in * dbias, channel, WIDTH, TOGETHER) / SIZE
    slope_in = over_groups(weight_in * dweight, channel, WIDTH, TOGETHER) / SIZE

    du = through_norm(dv, u, weight_in, level_in, slope_in, rstd_in)
    write_cotangents(du, dv, factor, dt_ptr, dz_ptr, dx_ptr, at, inside, WRITES_X)
    for block in range(1, BLOCKS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        place = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
        u_later, flat_later, w_later = again(
            t_ptr, x_ptr, z_ptr, factor, mean_in, rstd_in, weight_in, bias_in, mean_out, rstd_out, place, there, HAS_X
        )
        dlater = total_cotangent(dy_ptr, dy2_ptr, dy3_ptr, dy4_ptr, place, there, COTANGENTS)
        dlater = through_norm(dlater, w_later, weight_out, level_out, slope_out, rstd_out)
        dlater = tl.where(flat_later, 0.0, dlater)
        du = through_norm(dlater, u_later, weight_in, level_in, slope_in, rstd_in)
        write_cotangents(du, dlater, factor, dt_ptr, dz_ptr, dx_ptr, place, there, WRITES_X)


def residual(
    t: Tensor,
    z: Tensor,
    mask: Tensor | None,
    x: Tensor | None,
    weights: Sequence[Tensor | None],
    groups: int,
    eps: tuple[float, float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `residual_norm`; also mean and 1/deviation of both normalisations, (4, N, groups)."""
    last = is_last(t)
    t, z = laid_out(t, last), laid_out(z, last)
    y = torch.empty_like(t, dtype=dtype)
    saved = t.new_empty((4, len(t), groups), dtype=torch.float32)
    cut, chunks = sizes(t.shape, groups, last, t.element_size(), BLOCK)
    given, flags = (t, z, *_given(t, mask, x, weights, last)), _flags(mask, x, weights)
    if chunks is not None:
        triton_residual_large.residual(given, y, saved, eps, flags, cut, chunks)
    else:
        _forward[programs(t.shape, cut)](*given, y, *saved, *eps, **flags, **cut)
    return y, saved


def residual_vjp(
    t: Tensor,
    z: Tensor,
    mask: Tensor | None,
    x: Tensor | None,
    weights: Sequence[Tensor | None],
    saved: Tensor,
    cotangents: Sequence[Tensor],
    affine: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Cotangents of t, z and x, and those of the weights for each sample, (4, N, C), if they are wanted.

    That of the result is the sum of those given.
    """
    last = is_last(t)
    t, z = laid_out(t, last), laid_out(z, last)
    dy = [laid_out(cotangent, last) for cotangent in cotangents]
    while len(dy) > MOST_COTANGENTS:
        dy.append(dy.pop() + dy.pop())
    dt, dz = torch.empty_like(t), torch.empty_like(z)
    shared = x is not None and mask is None and x.dtype == t.dtype
    dx = dt if shared else None if x is None else torch.empty_like(t, dtype=x.dtype)
    cut, chunks = sizes(t.shape, saved.shape[2], last, t.element_size(), VJP_BLOCK)
    given = (t, z, *_given(t, mask, x, weights, last), *saved, *dy, *dy[:1] * (MOST_COTANGENTS - len(dy)))
    written = (dt, dz, dt if dx is None else dx)  # dx only if it has a place of its own
    flags = _flags(mask, x, weights) | {"COTANGENTS": len(dy), "WRITES_AFFINE": affine}
    flags["WRITES_X"] = x is not None and not shared
    if chunks is not None:
        dweights = triton_residual_large.residual_vjp(given, written, flags, cut, chunks)
    else:
        dweights = saved.new_empty((4, *t.shape[:2])) if affine else None
        places = saved if dweights is None else dweights  # not written if not wanted
        _backward[programs(t.shape, cut)](*given, *written, *places, **flags, **cut)
    return dt, dz, dx, dweights


def _given(
    t: Tensor, mask: Tensor | None, x: Tensor | None, weights: Sequence[Tensor | None], last: bool
) -> list[Tensor]:
    """Mask, injection and weights as kernels take them; what is None is not read."""
    mask, x = t if mask is None else mask.contiguous(), t if x is None else laid_out(x, last)
    return [mask, x, *(t if weight is None else weight for weight in weights)]


def _flags(mask: Tensor | None, x: Tensor | None, weights: Sequence[Tensor | None]) -> dict[str, int]:
    given = {"HAS_MASK": mask, "HAS_X": x, "AFFINE_IN": weights[0], "AFFINE_OUT": weights[2]}
    return {name: tensor is not None for name, tensor in given.items()}


class Residual(torch.autograd.Function):
    """`residual_norm` by kernels; derivatives of derivatives, and that of the mask, are taken by the plain twin.

    Scales and offsets come spread over samples, (N, C), but the same for all of them.
    """

    @staticmethod
    def forward(
        t: Tensor,
        z: Tensor,
        mask: Tensor | None,
        x: Tensor | None,
        weight_in: Tensor | None,
        bias_in: Tensor | None,
        weight_out: Tensor | None,
        bias_out: Tensor | None,
        groups: int,
        eps: tuple[float, float],
        dtype: torch.dtype,
        uses: int,
    ) -> Any:
        y, saved = residual(t, z, mask, x, (weight_in, bias_in, weight_out, bias_out), groups, eps, dtype)
        return saved, y, *(y.view_as(y) for _ in range(uses - 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.groups, ctx.eps, ctx.dtype, _ = inputs
        ctx.save_for_backward(*tensors, output[0])
        ctx.mark_non_differentiable(output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *inputs, saved = ctx.saved_tensors
        dy, needed, rest = [grad for grad in grads[1:] if grad is not None], ctx.needs_input_grad[:8], (None,) * 4
        if not dy:
            return *(None,) * 8, *rest
        if torch.is_grad_enabled() or needed[2]:
            create_graph = torch.is_grad_enabled()
            with torch.enable_grad():
                t, z, mask, x, *weights = inputs = apart(inputs)
                twin = naive.residual_norm(t, z, ctx.groups, weights, mask, x, eps=ctx.eps, dtype=ctx.dtype)
            return *through_twin([twin] * len(dy), dy, inputs, needed, create_graph), *rest
        t, z, mask, x, *weights = inputs
        dt, dz, dx, dweights = residual_vjp(t, z, mask, x, weights, saved, dy, any(needed[4:]))
        if dweights is None:
            return dt, dz, None, dx, *(None,) * 4, *rest
        found = (None if weight is None else d.to(weight.dtype) for d, weight in zip(dweights, weights, strict=True))
        return dt, dz, None, dx, *found, *rest
