# mypy: disable-error-code="no-untyped-def"
"""The kernels of `anderson_step`: measure (a block of one system), solve (a system), mix (a block of one system)."""

import math

import triton
import triton.language as tl
from torch import Tensor

from equipoise._tree import Leaves
from equipoise.ops import _kernels
from equipoise.ops.standing import Rules, Standing

# Unknowns per program: 8 per thread and slot of the tile, all loads of a program in flight together.
BLOCK = 1024
WARPS = 4
# Partial sums read at once by the small solve.
MOST_CHUNK = 128


@triton.jit
def _measure(
    z_ptr,
    fz_ptr,
    images_ptr,
    residuals_ptr,
    partial_ptr,
    status_ptr,
    count_ptr,
    size,
    z_row,
    fz_row,
    images_row,
    images_slot,
    residuals_row,
    residuals_slot,
    first_block,
    num_blocks,
    MEMORY: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Store the newest image and residual; partial sums of ⟨g_i, g⟩ for every slot i, ‖g‖² and ‖f‖².

    `partial` is (N, num_blocks, SLOTS + 2). Blocks of several leaves follow one another from `first_block` on.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(count_ptr)
    if _kernels.is_frozen(status_ptr, row, FIXED):
        return
    slot = (count % MEMORY).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    index = tl.arange(0, SLOTS)
    # Slots never written may hold anything; the oldest one is replaced by the newest residual below.
    known = (index < tl.minimum(count + 1, MEMORY)) & (index != slot)
    place = residuals_ptr + row * residuals_row + index.to(tl.int64)[:, None] * residuals_slot + at[None, :]
    ring = tl.load(place, mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)  # (SLOTS, BLOCK)
    z = tl.load(z_ptr + row * z_row + at, mask=inside, other=0.0).to(tl.float32)
    fz = tl.load(fz_ptr + row * fz_row + at, mask=inside, other=0.0)
    image = fz.to(tl.float32)
    g = image - z
    stored = g.to(residuals_ptr.dtype.element_ty)
    tl.store(images_ptr + row * images_row + slot * images_slot + at, fz, mask=inside)
    tl.store(residuals_ptr + row * residuals_row + slot * residuals_slot + at, stored, mask=inside)
    # Products with the residual as it is stored: the Gram matrix stays positive whatever its dtype.
    newest = stored.to(tl.float32)[None, :]
    ring = tl.where((index == slot)[:, None], newest, ring)
    sums = partial_ptr + (row * num_blocks + first_block + block) * (SLOTS + 2)
    tl.store(sums + index, tl.sum(ring * newest, axis=1))
    tl.store(sums + SLOTS, tl.sum(g * g, axis=0))
    tl.store(sums + SLOTS + 1, tl.sum(image * image, axis=0))


@triton.jit
def _solve(
    partial_ptr,
    gram_ptr,
    weights_ptr,
    action_ptr,
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
    CHUNK: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Judge one system, give its Gram matrix the new row, and solve for the weights."""
    row = tl.program_id(0).to(tl.int64)
    if _kernels.is_frozen(status_ptr, row, FIXED):
        tl.store(action_ptr + row, 0)
        return
    count = tl.load(count_ptr)
    slot = count % MEMORY
    filled = tl.minimum(count + 1, MEMORY)
    partial_ptr += row * num_blocks * (SLOTS + 2)
    size = _kernels.norm_of_blocks(partial_ptr, SLOTS, num_blocks, SLOTS + 2, CHUNK)
    image = _kernels.norm_of_blocks(partial_ptr, SLOTS + 1, num_blocks, SLOTS + 2, CHUNK)
    action = _kernels.judge(
        row,
        size,
        image,
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

    index = tl.arange(0, SLOTS)
    used = index < filled
    products = _kernels.sum_of_blocks(partial_ptr, index, used, num_blocks, SLOTS + 2, CHUNK)
    products = tl.where(index == slot, products + ridge * products, products)
    gram_ptr += row * MEMORY * MEMORY
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
    tl.store(weights_ptr + row * MEMORY + index, tl.where(sound, w, plain), mask=index < MEMORY)


@triton.jit
def _mix(
    z_ptr,
    best_ptr,
    images_ptr,
    residuals_ptr,
    weights_ptr,
    action_ptr,
    count_ptr,
    size,
    z_row,
    best_row,
    images_row,
    images_slot,
    residuals_row,
    residuals_slot,
    MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
    MIXING: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Keep z if it is the best, then write the weighted sum over it; the kernel of the last leaf counts the step."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if COUNTS:
        tl.store(count_ptr, tl.load(count_ptr) + 1, mask=(row == 0) & (block == 0))
    action = tl.load(action_ptr + row)
    if action == 0:
        return
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    z_place = z_ptr + row * z_row + at
    z = tl.load(z_place, mask=inside, other=0.0)
    proposal = tl.zeros([BLOCK], dtype=tl.float32)
    image_place = images_ptr + row * images_row + at
    residual_place = residuals_ptr + row * residuals_row + at
    for i in tl.static_range(MEMORY):
        weight = tl.load(weights_ptr + row * MEMORY + i)
        needed = inside & _kernels.spread(weight != 0.0, BLOCK)  # a slot not in use may hold anything
        proposal += weight * tl.load(image_place, mask=needed, other=0.0).to(tl.float32)
        if MIXING != 1.0:
            g = tl.load(residual_place, mask=needed, other=0.0).to(tl.float32)
            proposal += (weight * (MIXING - 1.0)) * g
        image_place += images_slot
        residual_place += residuals_slot
    _kernels.settle(z_place, best_ptr + row * best_row + at, z, proposal, action, inside, BLOCK)


def step(
    z: Leaves,
    fz: Leaves,
    images: Leaves,
    residuals: Leaves,
    gram: Tensor,
    weights: Tensor,
    standing: Standing,
    rules: Rules,
    ridge: float,
    mixing: float,
    bound: float | None,
) -> None:
    """See `anderson_step`."""
    n, memory = gram.shape[:2]
    if n == 0:
        standing.count.add_(1)
        return
    slots = triton.next_power_of_2(memory)
    blocks = [triton.cdiv(leaf.shape[1], BLOCK) for leaf in z]
    total = sum(blocks)
    partial = weights.new_empty((n, total, slots + 2))
    action = standing.status.new_empty(n)
    first = 0
    for leaf, image, f_ring, g_ring, count in zip(z, fz, images, residuals, blocks, strict=True):
        _measure[(n, count)](
            leaf,
            image,
            f_ring,
            g_ring,
            partial,
            standing.status,
            standing.count,
            leaf.shape[1],
            leaf.stride(0),
            image.stride(0),
            *f_ring.stride()[:2],
            *g_ring.stride()[:2],
            first,
            total,
            MEMORY=memory,
            SLOTS=slots,
            BLOCK=BLOCK,
            FIXED=rules.fixed,
            num_warps=WARPS,
        )
        first += count
    _solve[(n,)](
        partial,
        gram,
        weights,
        action,
        num_blocks=total,
        ridge=ridge,
        bound=math.inf if bound is None else bound,
        MEMORY=memory,
        SLOTS=slots,
        CHUNK=min(triton.next_power_of_2(total), MOST_CHUNK),
        **_kernels.judging(standing, rules),
        num_warps=1,
    )
    for i, (leaf, best, f_ring, g_ring, count) in enumerate(
        zip(z, standing.best, images, residuals, blocks, strict=True)
    ):
        _mix[(n, count)](
            leaf,
            best,
            f_ring,
            g_ring,
            weights,
            action,
            standing.count,
            leaf.shape[1],
            leaf.stride(0),
            best.stride(0),
            *f_ring.stride()[:2],
            *g_ring.stride()[:2],
            MEMORY=memory,
            BLOCK=BLOCK,
            MIXING=mixing,
            COUNTS=i == len(z) - 1,
            num_warps=WARPS,
        )
