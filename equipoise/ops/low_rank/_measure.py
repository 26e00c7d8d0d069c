# mypy: disable-error-code="no-untyped-def"
"""The first pass of `low_rank_step`: the residual of each position in few numbers, and what becomes of systems.

A program measures some features of some positions, and leaves its part of their products. The last one to do so for
these positions adds the parts up; the last one to do that for a system judges it.
"""

import triton
import triton.language as tl

from equipoise.ops import _blocks, _kernels
from equipoise.ops.hyper import _conclude
from equipoise.ops.hyper._positions import _added_up


@triton.jit
def _measure_tile(
    z_ptr,
    fz_ptr,
    down_ptr,
    parts_ptr,
    norms_ptr,
    position,
    real,
    start,
    size,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The part of SPAN times CHUNK features, from `start` on, in the few numbers of ROWS positions and in norms.

    Few numbers are found as columns: residuals then are the factor that is read from shared memory. As the other one
    each warp would have to hold all of them, and would compute them once more.
    """
    numbers = tl.arange(0, FEW)
    squares = tl.zeros([ROWS, CHUNK], dtype=tl.float32)
    image_squares = tl.zeros([ROWS, CHUNK], dtype=tl.float32)
    few = tl.zeros([FEW, ROWS], dtype=tl.float32)
    for turn in range(SPAN):
        feature = start + turn * CHUNK + tl.arange(0, CHUNK)
        at = position[:, None] * size + feature[None, :]
        inside = real[:, None] & (feature < size)[None, :]
        z = tl.load(z_ptr + at, mask=inside, other=0.0)
        fz = tl.load(fz_ptr + at, mask=inside, other=0.0)
        read = down_ptr + feature[None, :] * FEW + numbers[:, None]
        weight = tl.load(read, mask=(feature < size)[None, :], other=0.0).to(tl.float32)  # (FEW, CHUNK)
        image = fz.to(tl.float32)
        g = image - z.to(tl.float32)
        few = tl.dot(weight, tl.trans(g), few, input_precision=PRECISION)
        squares += g * g
        image_squares += image * image
    line = tl.arange(0, ROWS)
    tl.store(parts_ptr + numbers[:, None] * ROWS + line[None, :], few)
    tl.store(norms_ptr, tl.sum(squares))
    tl.store(norms_ptr + 1, tl.sum(image_squares))


@triton.jit
def measure(
    z_ptrs,
    fz_ptrs,
    z_rows,
    fz_rows,
    sizes,
    firsts,
    down_ptr,
    parts_ptr,
    norms_ptr,
    few_ptr,
    action_ptr,
    gathered_ptr,
    arrived_ptr,
    owed_ptr,
    count_ptr,
    residual_ptr,
    latest_ptr,
    status_ptr,
    steps_ptr,
    stalled_ptr,
    limit_ptr,
    num_positions,
    num_down,
    rtol,
    atol,
    diverge,
    floor,
    tiny,
    eps,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    NORMS: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    APART: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """A tile of one system: ROWS of its positions, SPAN times CHUNK features of each.

    With K tiles across and `num_down` down, `parts` is (N, num_down, K, FEW, ROWS), `norms` (N, num_down, K, 2), `few`
    (N, T, FEW). `firsts` has the first tile across of each leaf, and K.
    """
    num_across = firsts[len(z_ptrs)]
    cell, block = tl.program_id(0) // num_across, tl.program_id(0) % num_across
    row, down = (cell // num_down).to(tl.int64), cell % num_down
    count = tl.load(count_ptr)
    running = True
    if not FIXED:
        running = _conclude.begins(action_ptr, row, down + block, count, status_ptr, FIXED)
    if running:
        position = down * ROWS + tl.arange(0, ROWS)
        real = position < num_positions
        part = cell.to(tl.int64) * num_across
        first = 0
        for i in tl.static_range(len(z_ptrs)):
            if (block >= firsts[i]) & (block < firsts[i + 1]):
                _measure_tile(
                    z_ptrs[i] + row * _conclude.multiple(z_rows[i], UNIT),
                    fz_ptrs[i] + row * _conclude.multiple(fz_rows[i], UNIT),
                    down_ptr + first * FEW,
                    parts_ptr + (part + block) * (ROWS * FEW),
                    norms_ptr + (part + block) * 2,
                    position,
                    real,
                    (block - firsts[i]) * (SPAN * CHUNK),
                    _conclude.multiple(sizes[i], UNIT),
                    ROWS,
                    FEW,
                    CHUNK,
                    SPAN,
                    PRECISION,
                )
            first += sizes[i]
        if FIXED:  # after all loads: this must wait for the count
            _conclude.begins(action_ptr, row, down + block, count, status_ptr, FIXED)
        if _blocks.arrives_last(gathered_ptr, cell, num_across):
            numbers = tl.arange(0, FEW)
            few = _added_up(parts_ptr + part * (ROWS * FEW), num_across, FEW, ROWS, PARTS)
            at = (row * num_positions + position)[:, None] * FEW + numbers[None, :]
            tl.store(few_ptr + at, tl.trans(few), mask=real[:, None])
            if _blocks.arrives_last(arrived_ptr, row, num_down):
                column = tl.arange(0, 2)
                norms_ptr += row * (num_down * num_across) * 2
                squares = _kernels.sum_of_blocks(norms_ptr, column, column >= 0, num_down * num_across, 2, NORMS)
                _conclude.conclude(
                    row,
                    _conclude.root_of(squares, column == 0),
                    _conclude.root_of(squares, column == 1),
                    count,
                    action_ptr,
                    owed_ptr,
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
                    APART,
                    PATIENCE,
                    FIXED,
                    LAST,
                )
