# mypy: disable-error-code="no-untyped-def"
"""The kernels of `image_start`: which systems have a start, then a tile of a level's pixels and of its channels."""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise._tree import Leaves
from equipoise.ops._blocks import Blocks

if TYPE_CHECKING:
    from equipoise.solvers._hyper_nets import ImageInitialiser

# The least size of a factor in a product of matrices.
LEAST = 16
# Pixels of a tile at the most, fewer where there would be less than so many programs, and channels of it.
MOST_PIXELS = 64
FEWEST_PROGRAMS = 256
MOST_CHANNELS = 64
WARPS = 4
# Unknowns of a state that a program looks at.
BLOCK = 2048


def start(network: "ImageInitialiser", x: Tensor, like: Leaves, keep: bool) -> Leaves:
    """See `image_start`."""
    starts: Leaves = []
    told, warm = None, _warm(like) if keep else None
    for level in reversed(range(len(like))):
        z, source = torch.empty_like(like[level]), network.resized(x, like[level].shape[-2:])
        told = _level(network, level, source, told, z, like[level], warm)
        starts.append(z)
    return starts[::-1]


def _warm(like: Leaves) -> Tensor:
    """(N,) 1 for systems whose maps are not all zero."""
    # In the order in which numbers lie in memory, so that nothing is copied.
    flat = [leaf.permute(0, *sorted((1, 2, 3), key=leaf.stride, reverse=True)).flatten(1) for leaf in like]
    warm = torch.zeros(flat[0].shape[0], dtype=torch.int32, device=flat[0].device)
    for grid, given in Blocks.of(flat, BLOCK).launches(z=flat):
        if grid[0]:
            _look[grid](**given, warm_ptr=warm, BLOCK=BLOCK, num_warps=WARPS)
    return warm


def _level(
    network: "ImageInitialiser",
    level: int,
    x: Tensor,
    coarser: Tensor | None,
    z: Tensor,
    old: Tensor,
    warm: Tensor | None,
) -> Tensor | None:
    """Write the maps of a level; what the next finer one is told of it: (N, H, W, hidden)."""
    (n, _, height, width), channels = z.shape, z.shape[1]
    pixels, wide = n * height * width, min(max(LEAST, triton.next_power_of_2(channels)), MOST_CHANNELS)
    if pixels == 0:
        return None
    told = None if level == 0 else x.new_empty((n, height, width, network.hidden), dtype=torch.float32)
    rows, across = MOST_PIXELS, triton.cdiv(channels, wide)
    while rows > LEAST and triton.cdiv(pixels, rows) * across < FEWEST_PROGRAMS:
        rows //= 2
    inner: Any = network.inner[level]
    out: Any = network.out[level]
    past: Any = network.past[level]
    upward: Any = network.coarser[level - 1].weight if told is not None else inner.weight
    _start_level[triton.cdiv(pixels, rows), across](
        x, z, old, x if warm is None else warm, x if coarser is None else coarser, x if told is None else told,
        inner.weight, inner.bias, out.weight, out.bias, past.weight, upward,
        *x.stride(), *z.stride(), *old.stride(), *inner.weight.stride(), *out.weight.stride()[:2],
        *past.weight.stride()[:2], *upward.stride()[:2], pixels, height, width,
        *((1, 1) if coarser is None else coarser.shape[1:3]),
        SOURCE=network.source, HIDDEN=network.hidden, CHANNELS=channels,
        SOURCE_BLOCK=max(LEAST, triton.next_power_of_2(network.source)),
        HIDDEN_BLOCK=max(LEAST, triton.next_power_of_2(network.hidden)),
        PIXELS=rows, WIDE=wide, KEEPS=warm is not None, IS_TOLD=coarser is not None, TELLS=told is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=WARPS,
    )  # fmt: skip
    return told


@triton.jit
def _look(z_ptrs, z_rows, sizes, firsts, num_rows, warm_ptr, BLOCK: tl.constexpr):
    """Note of a block's system that something of it is not zero."""
    here = firsts[len(z_ptrs)] - firsts[0]
    row = (tl.program_id(0) // here).to(tl.int64)
    block = firsts[0] + tl.program_id(0) % here
    for i in tl.static_range(len(z_ptrs)):
        if (block >= firsts[i]) & (block < firsts[i + 1]):
            at = (block - firsts[i]) * BLOCK + tl.arange(0, BLOCK)
            z = tl.load(z_ptrs[i] + row * z_rows[i] + at, mask=at < sizes[i], other=0.0).to(tl.float32)
            found = tl.max(tl.where(z != 0.0, 1, 0), axis=0)  # NaN is not zero
            tl.store(warm_ptr + row, 1, mask=found != 0)  # all that is ever written there


@triton.jit
def _start_level(
    x_ptr,
    z_ptr,
    old_ptr,
    warm_ptr,
    coarser_ptr,
    told_ptr,
    inner_ptr,
    inner_bias_ptr,
    out_ptr,
    out_bias_ptr,
    past_ptr,
    upward_ptr,
    x_n,
    x_c,
    x_h,
    x_w,
    z_n,
    z_c,
    z_h,
    z_w,
    old_n,
    old_c,
    old_h,
    old_w,
    inner_to,
    inner_from,
    inner_h,
    inner_w,
    out_to,
    out_from,
    past_to,
    past_from,
    upward_to,
    upward_from,
    num_pixels,
    height,
    width,
    coarser_height,
    coarser_width,
    SOURCE: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    SOURCE_BLOCK: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
    PIXELS: tl.constexpr,
    WIDE: tl.constexpr,
    KEEPS: tl.constexpr,
    IS_TOLD: tl.constexpr,
    TELLS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < num_pixels
    sample, row, column = pixel // (height * width), pixel // width % height, pixel % width
    c, h = tl.arange(0, SOURCE_BLOCK), tl.arange(0, HIDDEN_BLOCK)
    of_x = (x_ptr + sample.to(tl.int64) * x_n)[:, None] + (c * x_c)[None, :]
    of_inner = inner_ptr + c[:, None] * inner_from + h[None, :] * inner_to
    weighs = (c < SOURCE)[:, None] & (h < HIDDEN)[None, :]

    # A 3 × 3 convolution, one product for each of its taps.
    features = tl.zeros([PIXELS, HIDDEN_BLOCK], dtype=tl.float32)
    for down in tl.static_range(3):
        for right in tl.static_range(3):
            up, left = row + down - 1, column + right - 1
            inside = exists & (up >= 0) & (up < height) & (left >= 0) & (left < width)
            place = of_x + (up * x_h + left * x_w)[:, None]
            seen = tl.load(place, mask=inside[:, None] & (c < SOURCE)[None, :], other=0.0)
            weight = tl.load(of_inner + (down * inner_h + right * inner_w), mask=weighs, other=0.0)
            features = tl.dot(seen, weight.to(seen.dtype), features, input_precision=PRECISION)
    features += tl.load(inner_bias_ptr + h, mask=h < HIDDEN, other=0.0).to(tl.float32)[None, :]
    known = exists[:, None] & (h < HIDDEN)[None, :]
    if IS_TOLD:
        nearest = row * coarser_height // height * coarser_width + column * coarser_width // width
        at = (sample.to(tl.int64) * (coarser_height * coarser_width) + nearest)[:, None] * HIDDEN + h[None, :]
        features += tl.load(coarser_ptr + at, mask=known, other=0.0)

    own = tl.load(of_x + (row * x_h + column * x_w)[:, None], mask=exists[:, None] & (c < SOURCE)[None, :], other=0.0)
    few = tl.maximum(features, 0.0).to(own.dtype)
    if TELLS:
        of_upward = upward_ptr + h[:, None] * upward_from + h[None, :] * upward_to
        upward = tl.load(of_upward, mask=(h < HIDDEN)[:, None] & (h < HIDDEN)[None, :], other=0.0)
        told = tl.dot(few, upward.to(few.dtype), input_precision=PRECISION)
        to = told_ptr + pixel.to(tl.int64)[:, None] * HIDDEN + h[None, :]
        first = (tl.program_id(1) * HIDDEN_BLOCK + h < HIDDEN)[None, :]  # of the programs of a tile, one is enough
        tl.store(to, told, mask=known & first)

    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    named = (channel < CHANNELS)[None, :]
    of_out = out_ptr + h[:, None] * out_from + channel[None, :] * out_to
    out = tl.load(of_out, mask=(h < HIDDEN)[:, None] & named, other=0.0)
    start = tl.dot(few, out.to(few.dtype), input_precision=PRECISION)
    of_past = past_ptr + c[:, None] * past_from + channel[None, :] * past_to
    past = tl.load(of_past, mask=(c < SOURCE)[:, None] & named, other=0.0)
    start = tl.dot(own, past.to(own.dtype), start, input_precision=PRECISION)
    start += tl.load(out_bias_ptr + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    if KEEPS:
        warm = exists & (tl.load(warm_ptr + sample, mask=exists, other=0) != 0)
        of_old = (old_ptr + sample.to(tl.int64) * old_n + row * old_h + column * old_w)[:, None]
        old = tl.load(of_old + (channel * old_c)[None, :], mask=warm[:, None] & named, other=0.0)
        start = tl.where(warm[:, None], old.to(tl.float32), start)
    to_z = (z_ptr + sample.to(tl.int64) * z_n + row * z_h + column * z_w)[:, None] + (channel * z_c)[None, :]
    tl.store(to_z, start.to(z_ptr.dtype.element_ty), mask=exists[:, None] & named)
