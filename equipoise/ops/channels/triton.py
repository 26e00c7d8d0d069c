# mypy: disable-error-code="no-untyped-def"
"""The kernel of `channels_follow`: a program measures and moves some channels of some pixels; the last one judges."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from equipoise._tree import Leaves
from equipoise.ops import _blocks, _kernels
from equipoise.ops.hyper import LEAST
from equipoise.ops.hyper.triton import _firsts, _leaves, _power
from equipoise.ops.standing import Rules, Standing

if TYPE_CHECKING:
    from equipoise.ops.channels import ChannelsParts

# Pixels of a program, and the most channels: those that it moves, and those that it reads at once.
PIXELS = 32
WIDE = 64
WARPS = 4
# Of products: they change a residual by less than rounding to bfloat16 would.
PRECISION = "tf32"
# Partial sums read at once.
MOST_CHUNK = 128


@triton.jit
def _follow(
    z_ptrs,
    fz_ptrs,
    next_ptrs,
    before_ptrs,
    best_ptrs,
    z_rows,
    fz_rows,
    next_rows,
    before_rows,
    best_rows,
    matrix_ptrs,
    channels,
    pixels,
    firsts,
    partial_ptr,
    arrived_ptr,
    owed_ptr,
    count_ptr,
    residual_ptr,
    latest_ptr,
    status_ptr,
    steps_ptr,
    stalled_ptr,
    limit_ptr,
    rtol,
    atol,
    diverge,
    floor,
    tiny,
    eps,
    PIXELS: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """All of a step; what is owed from before the last one is copied, and the rest noted, as plain iteration does it.

    `firsts` says where each leaf's tiles begin, WIDE channels of PIXELS pixels each; `partial` is (N, tiles, 2).
    """
    num_tiles = firsts[len(z_ptrs)]
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    partial_ptr += row * num_tiles * 2
    owed = tl.load(owed_ptr + row)
    for i in tl.static_range(len(z_ptrs)):
        if (tile >= firsts[i]) & (tile < firsts[i + 1]):
            size, across = channels[i], tl.cdiv(channels[i], WIDE)
            pixel = ((tile - firsts[i]) // across) * PIXELS + tl.arange(0, PIXELS)
            channel = ((tile - firsts[i]) % across) * WIDE + tl.arange(0, WIDE)
            real, known = pixel < pixels[i], channel < size
            z_ptr, fz_ptr = z_ptrs[i] + row * z_rows[i], fz_ptrs[i] + row * fz_rows[i]
            added = tl.zeros([PIXELS, WIDE], dtype=tl.float32)
            for first in range(0, size, WIDE):
                source = first + tl.arange(0, WIDE)
                at = pixel[:, None] * size + source[None, :]
                inside = real[:, None] & (source < size)[None, :]
                z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
                image = tl.load(fz_ptr + at, mask=inside, other=0.0).to(tl.float32)
                # The matrix transposed, (source, channel).
                read = matrix_ptrs[i] + channel[None, :] * size + source[:, None]
                weight = tl.load(read, mask=known[None, :] & (source < size)[:, None], other=0.0).to(tl.float32)
                added = tl.dot(image - z, weight, added, input_precision=PRECISION)
            at = pixel[:, None] * size + channel[None, :]
            inside = real[:, None] & known[None, :]
            z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
            image = tl.load(fz_ptr + at, mask=inside, other=0.0).to(tl.float32)
            g = image - z
            tl.store(partial_ptr + tile * 2, tl.sum(g * g))
            tl.store(partial_ptr + tile * 2 + 1, tl.sum(image * image))
            tl.store(next_ptrs[i] + row * next_rows[i] + at, image + added, mask=inside)
            if owed == 2:
                older = tl.load(before_ptrs[i] + row * before_rows[i] + at, mask=inside, other=0.0)
                tl.store(best_ptrs[i] + row * best_rows[i] + at, older, mask=inside)
    if _blocks.arrives_last(arrived_ptr, row, num_tiles):
        count = tl.load(count_ptr)
        action = _kernels.judge(
            row,
            _kernels.norm_of_blocks(partial_ptr, 0, num_tiles, 2, CHUNK),
            _kernels.norm_of_blocks(partial_ptr, 1, num_tiles, 2, CHUNK),
            count,
            residual_ptr,
            latest_ptr,
            status_ptr,
            steps_ptr,
            stalled_ptr,
            limit_ptr,
            rtol,
            atol,
            diverge,
            floor,
            tiny,
            eps,
            PATIENCE,
            FIXED,
            LAST,
        )
        tl.store(owed_ptr + row, tl.where((action & _kernels.KEEP) != 0, 1, tl.where(owed == 1, 2, 0)))
        tl.store(count_ptr, count + 1, mask=row == 0)  # which no other system looks at where the budget is fixed


def follow(z: Leaves, fz: Leaves, before: Leaves, standing: Standing, parts: "ChannelsParts", rules: Rules) -> Leaves:
    """See `channels_follow`."""
    proposal, n = [torch.empty_like(leaf) for leaf in z], z[0].shape[0]
    if n == 0:
        standing.count.add_(1)
        return proposal
    channels = tuple(len(matrix) for matrix in parts.matrices)
    pixels = tuple(leaf.shape[1] // size for leaf, size in zip(z, channels, strict=True))
    wide = min(max(_power(max(channels)), LEAST), WIDE)
    firsts = _firsts(
        triton.cdiv(many, PIXELS) * triton.cdiv(size, wide) for many, size in zip(pixels, channels, strict=True)
    )
    leaves = {"z": z, "fz": fz, "next": proposal, "before": before, "best": standing.best}
    _follow[(n * firsts[-1],)](
        **{name: value for key, tensors in leaves.items() for name, value in _leaves(key, tensors).items()},
        matrix_ptrs=parts.matrices,
        channels=channels,
        pixels=pixels,
        firsts=firsts,
        partial_ptr=standing.residual.new_empty((n, firsts[-1], 2)),
        arrived_ptr=standing.arrived,
        owed_ptr=standing.owed,
        PIXELS=PIXELS,
        WIDE=wide,
        CHUNK=min(_power(firsts[-1]), MOST_CHUNK),
        PRECISION=PRECISION,
        **_kernels.judging(standing, rules),
        num_warps=WARPS,
    )
    return proposal
