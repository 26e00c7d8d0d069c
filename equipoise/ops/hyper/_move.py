# mypy: disable-error-code="no-untyped-def"
"""The second pass of `hyper_step`: move systems, as the first one has found."""

import triton
import triton.language as tl

from equipoise.ops import _kernels
from equipoise.ops.hyper import _conclude, _network


@triton.jit
def _move_tile(
    z_ptr,
    best_ptr,
    images_ptr,
    residuals_ptr,
    images_slot,
    residuals_slot,
    weights_ptr,
    mixing_ptr,
    action,
    count,
    tile,
    num_positions,
    size,
    MEMORY: tl.constexpr,
    MIXING: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Keep z if it is the best, then write the weighted sum over it; ROWS positions, WIDE features of each."""
    across = tl.cdiv(size, WIDE)
    position = (tile // across) * ROWS + tl.arange(0, ROWS)
    feature = (tile % across) * WIDE + tl.arange(0, WIDE)
    real = position < num_positions
    inside = real[:, None] & (feature < size)[None, :]
    at = position[:, None] * size + feature[None, :]
    none = 0 * position  # the interpreter cannot broadcast a truth value
    keeps = inside & ((none + (action & _kernels.KEEP)) != 0)[:, None]
    z = tl.load(z_ptr + at, mask=keeps, other=0.0)
    longer = tl.zeros([ROWS], dtype=tl.float32)
    if MIXING:
        longer = tl.load(mixing_ptr + position, mask=real, other=1.0) - 1.0
    proposal = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for i in tl.static_range(MEMORY):
        slot = _network.slot_of(i, count, MEMORY).to(tl.int64)
        # A slot not in use may hold anything. Its weight says so too, but that would have to be waited for.
        needed = inside & _network.is_filled(none + i, count, MEMORY)[:, None]
        weight = tl.load(weights_ptr + position * MEMORY + i, mask=real, other=0.0)
        image = tl.load(images_ptr + slot * images_slot + at, mask=needed, other=0.0).to(tl.float32)
        proposal += weight[:, None] * image
        if MIXING:
            g = tl.load(residuals_ptr + slot * residuals_slot + at, mask=needed, other=0.0).to(tl.float32)
            proposal += (weight * longer)[:, None] * g
    tl.store(best_ptr + at, z, mask=keeps)
    if (action & _kernels.RETREAT) != 0:
        proposal = tl.load(best_ptr + at, mask=inside, other=0.0).to(tl.float32)
    moves = inside & ((none + (action & (_kernels.ADVANCE | _kernels.RETREAT))) != 0)[:, None]
    tl.store(z_ptr + at, proposal, mask=moves)


@triton.jit
def move(
    z_ptrs,
    best_ptrs,
    images_ptrs,
    residuals_ptrs,
    z_rows,
    best_rows,
    images_rows,
    images_slots,
    residuals_rows,
    residuals_slots,
    sizes,
    firsts,
    weights_ptr,
    mixing_ptr,
    action_ptr,
    count_ptr,
    num_rows,
    num_positions,
    MEMORY: tl.constexpr,
    MIXING: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Move a tile of one system; the first program counts the step. `firsts` says where each leaf's tiles begin."""
    here = firsts[len(z_ptrs)]
    # Backwards: what was measured last is still in the cache, and what f reads first will be.
    row, tile = (num_rows - 1 - tl.program_id(0) // here).to(tl.int64), tl.program_id(0) % here
    count = tl.load(action_ptr)
    tl.store(count_ptr, count + 1, mask=tl.program_id(0) == 0)
    action = tl.load(action_ptr + 1 + row)
    if action == 0:
        return
    for i in tl.static_range(len(z_ptrs)):
        if (tile >= firsts[i]) & (tile < firsts[i + 1]):
            _move_tile(
                z_ptrs[i] + row * _conclude.multiple(z_rows[i], UNIT),
                best_ptrs[i] + row * _conclude.multiple(best_rows[i], UNIT),
                images_ptrs[i] + row * _conclude.multiple(images_rows[i], UNIT),
                residuals_ptrs[i] + row * _conclude.multiple(residuals_rows[i], UNIT),
                _conclude.multiple(images_slots[i], UNIT),
                _conclude.multiple(residuals_slots[i], UNIT),
                weights_ptr + row * num_positions * MEMORY,
                mixing_ptr + row * num_positions,
                action,
                count,
                tile - firsts[i],
                num_positions,
                _conclude.multiple(sizes[i], UNIT),
                MEMORY,
                MIXING,
                ROWS,
                WIDE,
            )
