# mypy: disable-error-code="no-untyped-def"
"""The kernels of `broyden_step`: measure (a block of one system, the last of them updates M), advance (a block).

And those of `low_rank_apply`: blocks of a system, the small matrix, blocks of a system.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise._tree import Leaves
from equipoise.ops import _blocks, _kernels
from equipoise.ops.standing import Rules, Standing

# Unknowns per program, and slots loaded together.
BLOCK = 1024
SLOTS = 8
WARPS = 4
# Partial sums read at once by the small kernels.
MOST_CHUNK = 32
# The largest M that the last block of a system updates: a larger one takes registers, and all blocks would have to have
# them.
MOST_ASIDE = 32
# |along| from which an update would make H singular, in float32.
UNSAFE = tl.constexpr(1 / math.sqrt(torch.finfo(torch.float32).eps))


@triton.jit
def _weighted_sum(weights_ptr, place, slot_stride, filled, inside, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """Σ w_i S_i over the slots in use; `place` is that of slot 0."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    index = tl.arange(0, SLOTS)
    for first in range(0, filled, SLOTS):
        used = first + index < filled
        weights = tl.load(weights_ptr + first + index, mask=used, other=0.0)
        at = place[None, :] + (first + index).to(tl.int64)[:, None] * slot_stride
        slots = tl.load(at, mask=used[:, None] & inside[None, :], other=0.0)
        total += tl.sum(weights[:, None] * slots.to(tl.float32), axis=0)
    return total


@triton.jit
def _measure_block(
    z_ptr,
    fz_ptr,
    point_ptr,
    slots_ptr,
    slots_slot,
    sums_ptr,
    k,
    start,
    size,
    MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    moved = inside & _kernels.spread(k >= 0, BLOCK)
    z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
    image = tl.load(fz_ptr + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(point_ptr + at, mask=moved, other=0.0).to(tl.float32)
    g = image - z
    place = slots_ptr + at
    stored = tl.where(moved, z - before, 0.0).to(slots_ptr.dtype.element_ty)
    tl.store(place + k.to(tl.int64) * slots_slot, stored, mask=moved)
    s = stored.to(tl.float32)
    index = tl.arange(0, SLOTS)
    for first in range(0, k, SLOTS):
        used = first + index < k
        slots_at = place[None, :] + (first + index).to(tl.int64)[:, None] * slots_slot
        slots = tl.load(slots_at, mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)
        tl.store(sums_ptr + first + index, tl.sum(slots * g[None, :], axis=1), mask=used)
        tl.store(sums_ptr + MEMORY + first + index, tl.sum(slots * s[None, :], axis=1), mask=used)
    # After the loop: a sum over a block makes its threads wait for each other, while more loads could be under way.
    tl.store(sums_ptr + k, tl.sum(s * g, axis=0), mask=k >= 0)
    tl.store(sums_ptr + MEMORY + k, tl.sum(s * s, axis=0), mask=k >= 0)
    tl.store(sums_ptr + 2 * MEMORY, tl.sum(g * g, axis=0))
    tl.store(sums_ptr + 2 * MEMORY + 1, tl.sum(image * image, axis=0))


@triton.jit
def _take_in(
    row,
    k,
    partial_ptr,
    small_ptr,
    weights_ptr,
    along_ptr,
    num_blocks,
    MEMORY: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Take the newest step of one system into M, and find −H g = along·g + Sᵀ·weights."""
    index = tl.arange(0, SIZE)
    used = index <= k
    c = _kernels.sum_of_blocks(partial_ptr, index, used, num_blocks, 2 * MEMORY + 2, CHUNK).to(tl.float32)
    q = _kernels.sum_of_blocks(partial_ptr + MEMORY, index, used, num_blocks, 2 * MEMORY + 2, CHUNK).to(tl.float32)
    small_ptr += row * (MEMORY + 1) * (MEMORY + 1)
    place = small_ptr + index[:, None] * (MEMORY + 1) + index[None, :]
    if k < 0:
        every = (index[:, None] <= MEMORY) & (index[None, :] <= MEMORY)
        tl.store(place, tl.zeros([SIZE, SIZE], dtype=tl.float32), mask=every)
    small = tl.load(place, mask=used[:, None] & used[None, :], other=0.0)
    # A small matrix is held by several threads, each of which has loaded it for itself before any of them writes.
    tl.debug_barrier()
    if SHARE != 1.0:
        # The update before is complete now: where steps are not full ones it has a row at its own slot too.
        awaited = tl.sum(tl.where(index[:, None] == k, small, 0.0), axis=0)
        late = tl.where(index[:, None] == k - 1, (SHARE - 1.0) * awaited[None, :], 0.0)
        small += late
        tl.store(place, small, mask=(index[:, None] == k - 1) & used[None, :])

    weights = tl.sum(small * c[None, :], axis=1)
    left = tl.sum(small * q[:, None], axis=0) + tl.where(index == k, 1.0, 0.0)  # sᵀH = −left·S
    overlap = tl.sum(left * c, axis=0)
    square = tl.sum(tl.where(index == k, q, 0.0), axis=0)
    reach = square / SHARE
    along = reach / (reach - overlap)
    # No step, or one that would make H singular, is no ground for an update. NaN counts as unsafe.
    safe = tl.abs(along) < UNSAFE
    along = tl.where(safe, along, 1.0)
    weights *= along
    if SHARE != 1.0:
        own = tl.where(safe, overlap * (SHARE - 1.0) / square * along, 0.0)
        weights += tl.where(index == k, own, 0.0)
    tl.store(small_ptr + (k + 1) * (MEMORY + 1) + index, tl.where(safe, left / square, 0.0), mask=used)
    tl.store(weights_ptr + row * MEMORY + index, weights, mask=used)
    tl.store(along_ptr + row, along)


@triton.jit
def _measure(
    z_ptrs,
    fz_ptrs,
    point_ptrs,
    slots_ptrs,
    z_rows,
    fz_rows,
    point_rows,
    slots_rows,
    slots_slots,
    sizes,
    firsts,
    num_rows,
    partial_ptr,
    small_ptr,
    weights_ptr,
    along_ptr,
    filled_ptr,
    action_ptr,
    arrived_ptr,
    count_ptr,
    residual_ptr,
    latest_ptr,
    status_ptr,
    steps_ptr,
    stalled_ptr,
    limit_ptr,
    num_blocks,
    rtol,
    atol,
    diverge,
    floor,
    tiny,
    eps,
    MEMORY: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    APART: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Store the newest step s; partial sums of ⟨S_i, g⟩, ⟨S_i, s⟩, ‖g‖² and ‖f‖².

    `partial` is (N, num_blocks, 2·MEMORY + 2). When those of a system are complete it is judged and its M updated,
    unless this is left to a kernel of its own.
    """
    here = firsts[len(z_ptrs)] - firsts[0]
    row = (tl.program_id(0) // here).to(tl.int64)
    block = firsts[0] + tl.program_id(0) % here
    if _kernels.is_frozen(status_ptr, row, FIXED):
        tl.store(action_ptr + row, 0, mask=block == 0)
        return
    count = tl.load(count_ptr)
    k = count % (MEMORY + 1) - 1  # −1 at the start and after a restart: there is no step yet
    partial_ptr += row * num_blocks * (2 * MEMORY + 2)
    for i in tl.static_range(len(z_ptrs)):
        if (block >= firsts[i]) & (block < firsts[i + 1]):
            _measure_block(
                z_ptrs[i] + row * z_rows[i],
                fz_ptrs[i] + row * fz_rows[i],
                point_ptrs[i] + row * point_rows[i],
                slots_ptrs[i] + row * slots_rows[i],
                slots_slots[i],
                partial_ptr + block * (2 * MEMORY + 2),
                k,
                (block - firsts[i]) * BLOCK,
                sizes[i],
                MEMORY,
                BLOCK,
                SLOTS,
            )
    if not APART:  # noqa: SIM102 -- decided when the kernel is compiled
        if _blocks.arrives_last(arrived_ptr, row, num_blocks):
            action = _kernels.judge(
                row,
                _kernels.norm_of_blocks(partial_ptr, 2 * MEMORY, num_blocks, 2 * MEMORY + 2, CHUNK),
                _kernels.norm_of_blocks(partial_ptr, 2 * MEMORY + 1, num_blocks, 2 * MEMORY + 2, CHUNK),
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
            tl.store(action_ptr + row, action)
            tl.store(filled_ptr + row, k + 1)
            _take_in(row, k, partial_ptr, small_ptr, weights_ptr, along_ptr, num_blocks, MEMORY, SIZE, CHUNK, SHARE)


@triton.jit
def _update(
    partial_ptr,
    small_ptr,
    weights_ptr,
    along_ptr,
    filled_ptr,
    action_ptr,
    count_ptr,
    residual_ptr,
    latest_ptr,
    status_ptr,
    steps_ptr,
    stalled_ptr,
    limit_ptr,
    num_blocks,
    rtol,
    atol,
    diverge,
    floor,
    tiny,
    eps,
    MEMORY: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Judge one system and update its M, with as many threads as a large one needs."""
    row = tl.program_id(0).to(tl.int64)
    if _kernels.is_frozen(status_ptr, row, FIXED):
        return
    count = tl.load(count_ptr)
    k = count % (MEMORY + 1) - 1
    partial_ptr += row * num_blocks * (2 * MEMORY + 2)
    action = _kernels.judge(
        row,
        _kernels.norm_of_blocks(partial_ptr, 2 * MEMORY, num_blocks, 2 * MEMORY + 2, CHUNK),
        _kernels.norm_of_blocks(partial_ptr, 2 * MEMORY + 1, num_blocks, 2 * MEMORY + 2, CHUNK),
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
    tl.store(action_ptr + row, action)
    tl.store(filled_ptr + row, k + 1)
    _take_in(row, k, partial_ptr, small_ptr, weights_ptr, along_ptr, num_blocks, MEMORY, SIZE, CHUNK, SHARE)


@triton.jit
def _advance_block(
    z_ptr,
    fz_ptr,
    point_ptr,
    best_ptr,
    slots_ptr,
    slots_slot,
    weights_ptr,
    along,
    filled,
    action,
    start,
    size,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SHARE: tl.constexpr,
):
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    z = tl.load(z_ptr + at, mask=inside, other=0.0)
    image = tl.load(fz_ptr + at, mask=inside, other=0.0).to(tl.float32)
    wide = z.to(tl.float32)
    direction = along * (image - wide)
    direction += _weighted_sum(weights_ptr, slots_ptr + at, slots_slot, filled, inside, BLOCK, SLOTS)
    tl.store(point_ptr + at, z, mask=inside)
    _kernels.settle(z_ptr + at, best_ptr + at, z, wide + SHARE * direction, action, inside, BLOCK)


@triton.jit
def _advance(
    z_ptrs,
    fz_ptrs,
    point_ptrs,
    best_ptrs,
    slots_ptrs,
    z_rows,
    fz_rows,
    point_rows,
    best_rows,
    slots_rows,
    slots_slots,
    sizes,
    firsts,
    num_rows,
    weights_ptr,
    along_ptr,
    filled_ptr,
    action_ptr,
    count_ptr,
    MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SHARE: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """z + share·(along·g + Σ w_i S_i), after z was kept as the point before and, if so, as the best."""
    here = firsts[len(z_ptrs)] - firsts[0]
    # Backwards: what was measured last is still in the cache, and what f reads first will be.
    row = (num_rows - 1 - tl.program_id(0) // here).to(tl.int64)
    block = firsts[0] + tl.program_id(0) % here
    if COUNTS:
        tl.store(count_ptr, tl.load(count_ptr) + 1, mask=tl.program_id(0) == 0)
    action = tl.load(action_ptr + row)
    if action == 0:
        return
    along, filled = tl.load(along_ptr + row), tl.load(filled_ptr + row)
    for i in tl.static_range(len(z_ptrs)):
        if (block >= firsts[i]) & (block < firsts[i + 1]):
            _advance_block(
                z_ptrs[i] + row * z_rows[i],
                fz_ptrs[i] + row * fz_rows[i],
                point_ptrs[i] + row * point_rows[i],
                best_ptrs[i] + row * best_rows[i],
                slots_ptrs[i] + row * slots_rows[i],
                slots_slots[i],
                weights_ptr + row * MEMORY,
                along,
                filled,
                action,
                (block - firsts[i]) * BLOCK,
                sizes[i],
                BLOCK,
                SLOTS,
                SHARE,
            )


@triton.jit
def _dots(
    x_ptr,
    steps_ptr,
    partial_ptr,
    filled_ptr,
    size,
    x_row,
    steps_row,
    steps_slot,
    first_block,
    num_blocks,
    MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Partial sums of ⟨S_i, x⟩."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    filled = tl.load(filled_ptr)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    sums = partial_ptr + (row * num_blocks + first_block + block) * MEMORY
    index = tl.arange(0, SLOTS)
    for first in range(0, filled, SLOTS):
        used = first + index < filled
        place = steps_ptr + row * steps_row + (first + index).to(tl.int64)[:, None] * steps_slot + at[None, :]
        slots = tl.load(place, mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)
        tl.store(sums + first + index, tl.sum(slots * x[None, :], axis=1), mask=used)


@triton.jit
def _weigh(
    partial_ptr,
    small_ptr,
    weights_ptr,
    filled_ptr,
    num_blocks,
    small_row,
    small_line,
    MEMORY: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """M c or Mᵀc for one system."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    used = index < tl.load(filled_ptr)
    c = _kernels.sum_of_blocks(partial_ptr + row * num_blocks * MEMORY, index, used, num_blocks, MEMORY, CHUNK)
    place = small_ptr + row * small_row + index[:, None] * small_line + index[None, :]
    small = tl.load(place, mask=used[:, None] & used[None, :], other=0.0)
    c = c.to(tl.float32)
    weights = tl.sum(small * c[:, None], axis=0) if TRANSPOSED else tl.sum(small * c[None, :], axis=1)
    tl.store(weights_ptr + row * MEMORY + index, weights, mask=used)


@triton.jit
def _combine(
    x_ptr,
    out_ptr,
    steps_ptr,
    weights_ptr,
    filled_ptr,
    size,
    x_row,
    out_row,
    steps_row,
    steps_slot,
    MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """−x − Σ w_i S_i."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    filled = tl.load(filled_ptr)
    x = tl.load(x_ptr + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    place = steps_ptr + row * steps_row + at
    moved = _weighted_sum(weights_ptr + row * MEMORY, place, steps_slot, filled, inside, BLOCK, SLOTS)
    tl.store(out_ptr + row * out_row + at, -x - moved, mask=inside)


def step(
    z: Leaves,
    fz: Leaves,
    steps: Leaves,
    small: Tensor,
    point: Leaves,
    standing: Standing,
    rules: Rules,
    share: float,
) -> None:
    """See `broyden_step`."""
    memory, blocks = small.shape[1] - 1, _blocks.Blocks.of(z, BLOCK)
    n = blocks.systems
    if n == 0:
        standing.count.add_(1)
        return
    partial = small.new_empty((n, blocks.total, 2 * memory + 2))
    sizes = {"MEMORY": memory, "BLOCK": BLOCK, "SLOTS": SLOTS, "SHARE": share}
    found = {
        "weights_ptr": small.new_empty((n, memory)),
        "along_ptr": small.new_empty(n),
        "filled_ptr": standing.status.new_empty(n),
        "action_ptr": standing.status.new_empty(n),
    }
    size = triton.next_power_of_2(memory + 1)
    updating = {
        "partial_ptr": partial,
        "small_ptr": small,
        "num_blocks": blocks.total,
        "SIZE": size,
        "CHUNK": min(triton.next_power_of_2(blocks.total), MOST_CHUNK),
        **_kernels.judging(standing, rules),
    }
    apart = size > MOST_ASIDE
    for grid, leaves in blocks.launches(z=z, fz=fz, point=point, slots=steps):
        _measure[grid](
            **leaves, **found, **updating, **sizes, arrived_ptr=standing.arrived, APART=apart, num_warps=WARPS
        )
    if apart:
        _update[(n,)](**found, **updating, MEMORY=memory, SHARE=share, num_warps=_small_warps(size))
    for grid, leaves in blocks.launches(z=z, fz=fz, point=point, best=standing.best, slots=steps):
        counts = leaves["firsts"][-1] == blocks.total
        _advance[grid](**leaves, **found, **sizes, count_ptr=standing.count, COUNTS=counts, num_warps=WARPS)


def apply(x: Leaves, steps: Leaves, small: Tensor, filled: Tensor, transposed: bool) -> Leaves:
    """See `low_rank_apply`."""
    n, memory = x[0].shape[0], steps[0].shape[1]
    out = [torch.empty_like(leaf) for leaf in x]
    if n == 0:
        return out
    blocks = [triton.cdiv(leaf.shape[1], BLOCK) for leaf in x]
    total, first = sum(blocks), 0
    partial, weights = small.new_empty((n, total, memory)), small.new_empty((n, memory))
    shared = {"MEMORY": memory, "BLOCK": BLOCK, "SLOTS": SLOTS, "num_warps": WARPS}
    for leaf, slots, count in zip(x, steps, blocks, strict=True):
        strides = (leaf.stride(0), *slots.stride()[:2])
        _dots[(n, count)](leaf, slots, partial, filled, leaf.shape[1], *strides, first, total, **shared)
        first += count
    size = triton.next_power_of_2(memory)
    _weigh[(n,)](
        partial,
        small,
        weights,
        filled,
        total,
        *small.stride()[:2],
        MEMORY=memory,
        SIZE=size,
        CHUNK=min(triton.next_power_of_2(total), MOST_CHUNK),
        TRANSPOSED=transposed,
        num_warps=_small_warps(size),
    )
    for leaf, new, slots, count in zip(x, out, steps, blocks, strict=True):
        strides = (leaf.stride(0), new.stride(0), *slots.stride()[:2])
        _combine[(n, count)](leaf, new, slots, weights, filled, leaf.shape[1], *strides, **shared)
    return out


def _small_warps(size: int) -> int:
    """Warps that hold a (size, size) matrix at up to 64 numbers per thread."""
    return min(8, max(1, size * size // 2048))
