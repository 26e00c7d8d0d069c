# mypy: disable-error-code="no-untyped-def"
"""The kernels of `anderson_step`: measure (a block of one system, the last of them solves), mix (a block)."""

import math

import triton
import triton.language as tl
from torch import Tensor

from equipoise._tree import Leaves
from equipoise.ops import _blocks, _kernels
from equipoise.ops.standing import Rules, Standing

# Unknowns per program: 8 per thread and slot of the tile, all loads of a program in flight together.
BLOCK = 1024
WARPS = 4
# Partial sums read at once by the small solve.
MOST_CHUNK = 128
# What caches are told about the rings, which are read once a step.
EVICT = ""


@triton.jit
def _solve(products, gram_ptr, weights_ptr, count, ridge, bound, MEMORY: tl.constexpr, SLOTS: tl.constexpr):
    """Give the Gram matrix of one system its new row, and solve for the weights."""
    slot = count % MEMORY
    index = tl.arange(0, SLOTS)
    used = index < tl.minimum(count + 1, MEMORY)
    products = tl.where(index == slot, products + ridge * products, products)
    both = used[:, None] & used[None, :]
    gram = tl.load(gram_ptr + index[:, None] * MEMORY + index[None, :], mask=both, other=0.0)
    gram = tl.where(index[:, None] == slot, products[None, :], gram)
    gram = tl.where(index[None, :] == slot, products[:, None], gram)
    tl.store(gram_ptr + slot * MEMORY + index, products, mask=used)
    tl.store(gram_ptr + index * MEMORY + slot, products, mask=used)

    # Gauss–Jordan on A w = 1. The pivots are those of a Cholesky factorisation, so one that is not positive means the
    # same; slots not in use have the identity's rows and weight zero.
    gram = tl.where(both, gram, tl.where(index[:, None] == index[None, :], 1.0, 0.0))
    w = tl.where(used, 1.0, 0.0).to(tl.float64)
    sound = True
    for k in tl.static_range(MEMORY):
        column = tl.sum(tl.where(index[None, :] == k, gram, 0.0), axis=1)
        pivot_row = tl.sum(tl.where(index[:, None] == k, gram, 0.0), axis=0)
        pivot = tl.sum(tl.where(index == k, column, 0.0), axis=0)
        sound = sound & (pivot > 0.0)
        factor = tl.where(index == k, 0.0, column / pivot)
        w -= factor * tl.sum(tl.where(index == k, w, 0.0), axis=0)
        gram -= factor[:, None] * pivot_row[None, :]
    w = w / tl.sum(tl.where(index[:, None] == index[None, :], gram, 0.0), axis=1)
    total = tl.sum(tl.where(used, w, 0.0), axis=0)
    sound = sound & _kernels.is_finite(total) & (total > 0.0)
    w = w / total
    sound = sound & (tl.sum(tl.where(used, tl.abs(w), 0.0), axis=0) <= bound)
    plain = tl.where(index == slot, 1.0, 0.0)
    tl.store(weights_ptr + index, tl.where(sound, w, plain), mask=index < MEMORY)


@triton.jit
def _measure_block(
    z_ptr,
    fz_ptr,
    kept_ptr,
    images_ptr,
    residuals_ptr,
    images_slot,
    residuals_slot,
    sums_ptr,
    count,
    start,
    size,
    MEMORY: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
    OTHER: tl.constexpr,
):
    slot = (count % MEMORY).to(tl.int64)
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    index = tl.arange(0, SLOTS)
    # Slots never written may hold anything; the oldest one is replaced by the newest residual below.
    known = (index < tl.minimum(count + 1, MEMORY)) & (index != slot)
    place = residuals_ptr + index.to(tl.int64)[:, None] * residuals_slot + at[None, :]
    wanted = known[:, None] & inside[None, :]
    ring = tl.load(place, mask=wanted, other=0.0, eviction_policy=EVICT).to(tl.float32)  # (SLOTS, BLOCK)
    z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
    fz = tl.load(fz_ptr + at, mask=inside, other=0.0)
    image = fz.to(tl.float32)
    g = image - z
    stored = g.to(residuals_ptr.dtype.element_ty)
    kept = tl.load(kept_ptr + at, mask=inside, other=0.0) if OTHER else fz
    tl.store(images_ptr + slot * images_slot + at, kept, mask=inside)
    tl.store(residuals_ptr + slot * residuals_slot + at, stored, mask=inside)
    # Products with the residual as it is stored: the Gram matrix stays positive whatever its dtype.
    newest = stored.to(tl.float32)[None, :]
    ring = tl.where((index == slot)[:, None], newest, ring)
    tl.store(sums_ptr + index, tl.sum(ring * newest, axis=1))
    tl.store(sums_ptr + SLOTS, tl.sum(g * g, axis=0))
    tl.store(sums_ptr + SLOTS + 1, tl.sum(image * image, axis=0))


@triton.jit
def _measure(
    z_ptrs,
    fz_ptrs,
    kept_ptrs,
    images_ptrs,
    residuals_ptrs,
    z_rows,
    fz_rows,
    kept_rows,
    images_rows,
    images_slots,
    residuals_rows,
    residuals_slots,
    sizes,
    firsts,
    num_rows,
    partial_ptr,
    gram_ptr,
    weights_ptr,
    action_ptr,
    arrived_ptr,
    owed_ptr,
    count_ptr,
    residual_ptr,
    latest_ptr,
    status_ptr,
    steps_ptr,
    stalled_ptr,
    limit_ptr,
    num_blocks,
    ridge,
    bound,
    rtol,
    atol,
    diverge,
    floor,
    tiny,
    eps,
    MEMORY: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EVICT: tl.constexpr,
    OTHER: tl.constexpr,
    APART: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Store the newest image, or what is kept in its place, and residual; partial sums of ⟨g_i, g⟩ for every slot i,
    ‖g‖² and ‖f‖².

    `partial` is (N, num_blocks, SLOTS + 2). When those of a system are complete it is judged, its Gram matrix gets the
    new row, and the weights are solved for.
    """
    here = firsts[len(z_ptrs)] - firsts[0]
    row = (tl.program_id(0) // here).to(tl.int64)
    block = firsts[0] + tl.program_id(0) % here
    if _kernels.is_frozen(status_ptr, row, FIXED):
        tl.store(action_ptr + row, 0, mask=block == 0)
        return
    count = tl.load(count_ptr)
    partial_ptr += row * num_blocks * (SLOTS + 2)
    for i in tl.static_range(len(z_ptrs)):
        if (block >= firsts[i]) & (block < firsts[i + 1]):
            _measure_block(
                z_ptrs[i] + row * z_rows[i],
                fz_ptrs[i] + row * fz_rows[i],
                kept_ptrs[i] + row * kept_rows[i],
                images_ptrs[i] + row * images_rows[i],
                residuals_ptrs[i] + row * residuals_rows[i],
                images_slots[i],
                residuals_slots[i],
                partial_ptr + block * (SLOTS + 2),
                count,
                (block - firsts[i]) * BLOCK,
                sizes[i],
                MEMORY,
                SLOTS,
                BLOCK,
                EVICT,
                OTHER,
            )
    if _blocks.arrives_last(arrived_ptr, row, num_blocks):
        action = _kernels.judge(
            row,
            _kernels.norm_of_blocks(partial_ptr, SLOTS, num_blocks, SLOTS + 2, CHUNK),
            _kernels.norm_of_blocks(partial_ptr, SLOTS + 1, num_blocks, SLOTS + 2, CHUNK),
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
        if APART:
            action = _kernels.postponed(action, owed_ptr, row)
        tl.store(action_ptr + row, action)
        used = tl.arange(0, SLOTS) < tl.minimum(count + 1, MEMORY)
        products = _kernels.sum_of_blocks(partial_ptr, tl.arange(0, SLOTS), used, num_blocks, SLOTS + 2, CHUNK)
        gram_ptr += row * MEMORY * MEMORY
        _solve(products, gram_ptr, weights_ptr + row * MEMORY, count, ridge, bound, MEMORY, SLOTS)


@triton.jit
def _mix_block(
    z_ptr,
    best_ptr,
    images_ptr,
    residuals_ptr,
    images_slot,
    residuals_slot,
    weights_ptr,
    action,
    start,
    size,
    MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
    MIXING: tl.constexpr,
):
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    z = tl.load(z_ptr + at, mask=inside & _kernels.spread((action & _kernels.KEEP) != 0, BLOCK), other=0.0)
    proposal = tl.zeros([BLOCK], dtype=tl.float32)
    image_place = images_ptr + at
    residual_place = residuals_ptr + at
    for i in tl.static_range(MEMORY):
        weight = tl.load(weights_ptr + i)
        needed = inside & _kernels.spread(weight != 0.0, BLOCK)  # a slot not in use may hold anything
        proposal += weight * tl.load(image_place, mask=needed, other=0.0, eviction_policy=EVICT).to(tl.float32)
        if MIXING != 1.0:
            g = tl.load(residual_place, mask=needed, other=0.0, eviction_policy=EVICT).to(tl.float32)
            proposal += (weight * (MIXING - 1.0)) * g
        image_place += images_slot
        residual_place += residuals_slot
    _kernels.settle(z_ptr + at, best_ptr + at, z, proposal, action, inside, BLOCK)


@triton.jit
def _mix(
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
    num_rows,
    weights_ptr,
    action_ptr,
    count_ptr,
    MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
    MIXING: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Keep what stands at z if it is the best, then write the weighted sum over it; the last launch counts the step."""
    here = firsts[len(z_ptrs)] - firsts[0]
    # Backwards: what was measured last is still in the cache, and what f reads first will be.
    row = (num_rows - 1 - tl.program_id(0) // here).to(tl.int64)
    block = firsts[0] + tl.program_id(0) % here
    if COUNTS:
        tl.store(count_ptr, tl.load(count_ptr) + 1, mask=tl.program_id(0) == 0)
    action = tl.load(action_ptr + row)
    if action == 0:
        return
    for i in tl.static_range(len(z_ptrs)):
        if (block >= firsts[i]) & (block < firsts[i + 1]):
            _mix_block(
                z_ptrs[i] + row * z_rows[i],
                best_ptrs[i] + row * best_rows[i],
                images_ptrs[i] + row * images_rows[i],
                residuals_ptrs[i] + row * residuals_rows[i],
                images_slots[i],
                residuals_slots[i],
                weights_ptr + row * MEMORY,
                action,
                (block - firsts[i]) * BLOCK,
                sizes[i],
                MEMORY,
                BLOCK,
                EVICT,
                MIXING,
            )


def step(
    z: Leaves,
    fz: Leaves,
    ring: Leaves,
    residuals: Leaves,
    gram: Tensor,
    weights: Tensor,
    standing: Standing,
    rules: Rules,
    ridge: float,
    mixing: float,
    bound: float | None,
    out: Leaves | None,
    images: Leaves | None,
) -> None:
    """See `anderson_step`."""
    memory, blocks = gram.shape[1], _blocks.Blocks.of(z, BLOCK)
    if blocks.systems == 0:
        standing.count.add_(1)
        return
    slots = triton.next_power_of_2(memory)
    partial = weights.new_empty((blocks.systems, blocks.total, slots + 2))
    action = standing.status.new_empty(blocks.systems)
    for grid, leaves in blocks.launches(z=z, fz=fz, kept=images or fz, images=ring, residuals=residuals):
        _measure[grid](
            **leaves,
            partial_ptr=partial,
            gram_ptr=gram,
            weights_ptr=weights,
            action_ptr=action,
            arrived_ptr=standing.arrived,
            owed_ptr=standing.owed,
            num_blocks=blocks.total,
            ridge=ridge,
            bound=math.inf if bound is None else bound,
            MEMORY=memory,
            SLOTS=slots,
            BLOCK=BLOCK,
            CHUNK=min(triton.next_power_of_2(blocks.total), MOST_CHUNK),
            EVICT=EVICT,
            OTHER=images is not None,
            APART=out is not None,
            **_kernels.judging(standing, rules),
            num_warps=WARPS,
        )
    for grid, leaves in blocks.launches(z=out or z, best=standing.best, images=ring, residuals=residuals):
        _mix[grid](
            **leaves,
            weights_ptr=weights,
            action_ptr=action,
            count_ptr=standing.count,
            MEMORY=memory,
            BLOCK=BLOCK,
            EVICT=EVICT,
            MIXING=mixing,
            COUNTS=leaves["firsts"][-1] == blocks.total,
            num_warps=WARPS,
        )
