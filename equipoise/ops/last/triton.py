# mypy: disable-error-code="no-untyped-def"
"""The kernels of `take_last`: look (a block says whether it is finite), take (a block of what is returned)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise._tree import Leaves
from equipoise.ops._blocks import Blocks, copy_block
from equipoise.ops._kernels import NONFINITE, is_finite
from equipoise.ops.standing import Standing

BLOCK = 2048
WARPS = 4
# Blocks whose findings are read at once.
MOST_CHUNK = 128


def take_last(z: Leaves, value: Leaves, residual: Tensor, status: Tensor, standing: Standing) -> None:
    """See `equipoise.ops.take_last`."""
    if z[0].shape[0] == 0:
        return
    blocks = Blocks.of(z, BLOCK)
    wrong = torch.empty((blocks.systems, blocks.total), dtype=torch.int32, device=z[0].device)
    for grid, given in blocks.launches(z=z):
        _look[grid](**given, wrong_ptr=wrong, num_blocks=blocks.total, BLOCK=BLOCK, num_warps=WARPS)
    chunk = min(triton.next_power_of_2(blocks.total), MOST_CHUNK)
    for grid, given in blocks.launches(z=z, best=standing.best, value=value):
        _take[grid](
            **given,
            wrong_ptr=wrong,
            status_ptr=status,
            latest_ptr=standing.latest,
            least_ptr=standing.residual,
            residual_ptr=residual,
            num_blocks=blocks.total,
            BLOCK=BLOCK,
            CHUNK=chunk,
            num_warps=WARPS,
        )


@triton.jit
def _look(z_ptrs, z_rows, sizes, firsts, num_rows, wrong_ptr, num_blocks, BLOCK: tl.constexpr):
    """1 for a block of a system with something that is not finite, else 0."""
    here = firsts[len(z_ptrs)] - firsts[0]
    row = (tl.program_id(0) // here).to(tl.int64)
    block = firsts[0] + tl.program_id(0) % here
    for i in tl.static_range(len(z_ptrs)):
        if (block >= firsts[i]) & (block < firsts[i + 1]):
            at = (block - firsts[i]) * BLOCK + tl.arange(0, BLOCK)
            z = tl.load(z_ptrs[i] + row * z_rows[i] + at, mask=at < sizes[i], other=0.0).to(tl.float32)
            tl.store(wrong_ptr + row * num_blocks + block, tl.max(tl.where(is_finite(z), 0, 1), axis=0))


@triton.jit
def _take(
    z_ptrs,
    best_ptrs,
    value_ptrs,
    z_rows,
    best_rows,
    value_rows,
    sizes,
    firsts,
    num_rows,
    wrong_ptr,
    status_ptr,
    latest_ptr,
    least_ptr,
    residual_ptr,
    num_blocks,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy one of both; the first block of a system also says which. Whoever reads that already comes to the same."""
    here = firsts[len(z_ptrs)] - firsts[0]
    row = (tl.program_id(0) // here).to(tl.int64)
    block = firsts[0] + tl.program_id(0) % here
    each = tl.arange(0, CHUNK)
    wrong = tl.zeros([CHUNK], dtype=tl.int32)
    for first in range(0, num_blocks, CHUNK):
        inside = first + each < num_blocks
        wrong = tl.maximum(wrong, tl.load(wrong_ptr + row * num_blocks + first + each, mask=inside, other=0))
    status = tl.load(status_ptr + row)
    usable = (tl.max(wrong, axis=0) == 0) & (status != NONFINITE)
    tl.store(status_ptr + row, tl.where(usable, status, NONFINITE), mask=block == 0)
    residual = tl.where(usable, tl.load(latest_ptr + row), tl.load(least_ptr + row))
    tl.store(residual_ptr + row, residual, mask=block == 0)
    for i in tl.static_range(len(z_ptrs)):
        if (block >= firsts[i]) & (block < firsts[i + 1]):
            start = (block - firsts[i]) * BLOCK
            value_ptr = value_ptrs[i] + row * value_rows[i]
            if usable:
                copy_block(z_ptrs[i] + row * z_rows[i], value_ptr, start, sizes[i], BLOCK)
            else:
                copy_block(best_ptrs[i] + row * best_rows[i], value_ptr, start, sizes[i], BLOCK)
