# mypy: disable-error-code="no-untyped-def"
"""The second pass of `low_rank_step`: move systems, as the first one has found."""

import triton
import triton.language as tl

from equipoise.ops import _kernels
from equipoise.ops.hyper import _conclude


@triton.jit
def _move_tile(
    z_ptr,
    fz_ptr,
    best_ptr,
    z_row,
    fz_row,
    best_row,
    few_ptr,
    up_ptr,
    action,
    system,
    position,
    real,
    line,
    start,
    size,
    REACH: tl.constexpr,
    FEW: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    FIXED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keep z if it is the best, then write f(z) and what few numbers add over it; ROWS positions, WIDE features."""
    feature, numbers = start + tl.arange(0, WIDE), tl.arange(0, FEW)
    own = position[:, None] * size + feature[None, :]
    known = (feature < size)[None, :]
    inside = real[:, None] & known
    image = tl.load(fz_ptr + (system * fz_row)[:, None] + own, mask=inside, other=0.0)
    added = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for back in range(REACH):
        wanted = real & (position >= back)
        read = few_ptr + ((line - back).to(tl.int64) * FEW)[:, None] + numbers[None, :]
        earlier = tl.load(read, mask=wanted[:, None], other=0.0)  # (ROWS, FEW)
        read = up_ptr + feature[:, None] * (REACH * FEW) + back * FEW + numbers[None, :]
        weight = tl.load(read, mask=(feature < size)[:, None], other=0.0)  # (WIDE, FEW)
        added = tl.dot(earlier, tl.trans(weight.to(tl.float32)), added, input_precision=PRECISION)
    proposal = image.to(tl.float32) + added
    z_ptr += (system * z_row)[:, None] + own
    best_ptr += (system * best_row)[:, None] + own
    keeps = (real & ((action & _kernels.KEEP) != 0))[:, None] & known  # late: actions must be waited for
    tl.store(best_ptr, tl.load(z_ptr, mask=keeps, other=0.0), mask=keeps)
    if FIXED:
        tl.store(z_ptr, proposal, mask=inside)
    else:
        retreats = (real & ((action & _kernels.RETREAT) != 0))[:, None] & known
        proposal = tl.where(retreats, tl.load(best_ptr, mask=retreats, other=0.0).to(tl.float32), proposal)
        moves = (real & ((action & (_kernels.ADVANCE | _kernels.RETREAT)) != 0))[:, None] & known
        tl.store(z_ptr, proposal, mask=moves)


@triton.jit
def move(
    z_ptrs,
    fz_ptrs,
    best_ptrs,
    z_rows,
    fz_rows,
    best_rows,
    sizes,
    firsts,
    few_ptr,
    up_ptr,
    action_ptr,
    count_ptr,
    num_lines,
    num_strips,
    num_positions,
    REACH: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    FIXED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Move a tile: ROWS positions of any systems, one after another, and WIDE features of a leaf of each.

    `firsts` says where each leaf's tiles begin. The first program counts the step.
    """
    across = firsts[len(z_ptrs)]
    # Backwards: what was measured last is still in the cache, and what f reads first will be.
    strip, tile = num_strips - 1 - tl.program_id(0) // across, tl.program_id(0) % across
    line = strip * ROWS + tl.arange(0, ROWS)
    real = line < num_lines
    system, position = (line // num_positions).to(tl.int64), line % num_positions
    action = tl.load(action_ptr + 1 + system, mask=real, other=0)
    if not FIXED:
        tile = tl.where(tl.max(action, axis=0) == 0, across, tile)  # none
    first = 0
    for i in tl.static_range(len(z_ptrs)):
        if (tile >= firsts[i]) & (tile < firsts[i + 1]):
            _move_tile(
                z_ptrs[i],
                fz_ptrs[i],
                best_ptrs[i],
                _conclude.multiple(z_rows[i], UNIT),
                _conclude.multiple(fz_rows[i], UNIT),
                _conclude.multiple(best_rows[i], UNIT),
                few_ptr,
                up_ptr + first * (REACH * FEW),
                action,
                system,
                position,
                real,
                line,
                (tile - firsts[i]) * WIDE,
                _conclude.multiple(sizes[i], UNIT),
                REACH,
                FEW,
                WIDE,
                ROWS,
                FIXED,
                PRECISION,
            )
        first += sizes[i]
    # Last, because it must be waited for.
    tl.store(count_ptr, tl.load(action_ptr) + 1, mask=tl.program_id(0) == 0)
