# mypy: disable-error-code="no-untyped-def"
"""The kernel of `normalised_rows`: a program for one row, or for a few short ones."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The most columns that a program keeps in registers, and the elements that make it take more than one row.
BLOCK, SEVERAL = 4096, 1024
# Elements per thread, or fewer.
SHARE = 16


@triton.jit
def _normalise(v_ptr, g_ptr, w_ptr, num_rows, floor, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Columns beyond the first block are read again, from the cache."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists, column = (row < num_rows)[:, None], tl.arange(0, BLOCK)[None, :]
    at = row[:, None] * COLUMNS + column
    inside = exists & (column < COLUMNS)
    v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
    squares = v * v
    for start in range(BLOCK, COLUMNS, BLOCK):
        later = tl.load(v_ptr + at + start, mask=exists & (start + column < COLUMNS), other=0.0).to(tl.float32)
        squares += later * later
    norm = tl.sqrt_rn(tl.sum(squares, axis=1))
    norm = tl.where(norm < floor, floor, norm)  # unlike a maximum, NaN stays
    g = tl.load(g_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)
    scale = tl.div_rn(g, norm)[:, None]
    tl.store(w_ptr + at, v * scale, mask=inside)
    for start in range(BLOCK, COLUMNS, BLOCK):
        there = exists & (start + column < COLUMNS)
        later = tl.load(v_ptr + at + start, mask=there, other=0.0).to(tl.float32)
        tl.store(w_ptr + at + start, later * scale, mask=there)


def normalised_rows(v: Tensor, g: Tensor, floor: float, dtype: torch.dtype) -> Tensor:
    """See `normalised_rows` of the package."""
    v, (num_rows, columns) = v.contiguous(), v.shape
    w = v.new_empty(v.shape, dtype=dtype)
    block = min(triton.next_power_of_2(columns), BLOCK)
    rows = max(SEVERAL // block, 1)
    _normalise[(triton.cdiv(num_rows, rows),)](
        v,
        g.contiguous(),
        w,
        num_rows,
        floor,
        COLUMNS=columns,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(max(rows * block // (32 * SHARE), 1), 8),
    )
    return w
