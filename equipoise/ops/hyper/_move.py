# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""The second pass of `hyper_step`: judge a system and move it."""

import triton
import triton.language as tl

from equipoise.ops import _kernels
from equipoise.ops.hyper import _network


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
    found,
    action,
    count,
    tile,
    num_positions,
    size,
    MEMORY: tl.constexpr,
    LOCAL: tl.constexpr,
    MIXING: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Keep z if it is the best, then write the weighted sum over it; ROWS positions, WIDE features of each.

    With `LOCAL` weights are read, else `found` has them, as `weigh` left it.
    """
    across = tl.cdiv(size, WIDE)
    position = (tile // across) * ROWS + tl.arange(0, ROWS)
    feature = (tile % across) * WIDE + tl.arange(0, WIDE)
    real = position < num_positions
    inside = real[:, None] & (feature < size)[None, :]
    at = position.to(tl.int64)[:, None] * size + feature[None, :]
    z = tl.load(z_ptr + at, mask=inside, other=0.0)
    longer = tl.zeros([ROWS], dtype=tl.float32)
    if MIXING:
        if LOCAL:
            longer = tl.load(mixing_ptr + position, mask=real, other=1.0) - 1.0
        else:
            longer += found[MEMORY]
    proposal = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for i in tl.static_range(MEMORY):
        slot = _network.slot_of(i, count, MEMORY).to(tl.int64)
        weight = tl.zeros([ROWS], dtype=tl.float32)
        if LOCAL:
            weight = tl.load(weights_ptr + position * MEMORY + i, mask=real, other=0.0)
        else:
            weight += found[i]
        needed = inside & (weight != 0.0)[:, None]  # a slot not in use may hold anything
        image = tl.load(images_ptr + slot * images_slot + at, mask=needed, other=0.0).to(tl.float32)
        proposal += weight[:, None] * image
        if MIXING:
            g = tl.load(residuals_ptr + slot * residuals_slot + at, mask=needed, other=0.0).to(tl.float32)
            proposal += (weight * longer)[:, None] * g
    best_place = best_ptr + at
    if (action & _kernels.KEEP) != 0:
        tl.store(best_place, z, mask=inside)
    if (action & _kernels.RETREAT) != 0:
        proposal = tl.load(best_place, mask=inside, other=0.0).to(tl.float32)
    if (action & (_kernels.ADVANCE | _kernels.RETREAT)) != 0:
        tl.store(z_ptr + at, proposal, mask=inside)


@triton.jit
def move(
    z_ptrs,
    best_ptrs,
    images_ptrs,
    residuals_ptrs,
    sizes,
    z_rows,
    best_rows,
    images_strides,
    residuals_strides,
    firsts,
    gram_ptr,
    shares_ptr,
    weights_ptr,
    mixing_ptr,
    partial_ptr,
    pooled_ptr,
    taps_ptr,
    bias_ptr,
    out_ptr,
    last_ptr,
    numbers_ptr,
    codes_ptr,
    copies_stride,
    count_ptr,
    residual_ptr,
    latest_ptr,
    status_ptr,
    steps_ptr,
    stalled_ptr,
    limit_ptr,
    num_blocks,
    num_pools,
    num_tiles,
    num_positions,
    root,
    rtol,
    atol,
    diverge,
    floor,
    tiny,
    eps,
    COMPRESSED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    LOCAL: tl.constexpr,
    MIXING: tl.constexpr,
    KIND: tl.constexpr,
    SLOTS: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    POOL_CHUNK: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Judge a system, weigh its steps if that is not done yet, and move some of it; program (0, 0) counts the step.

    Tiles of several leaves follow one another; `firsts` says where each leaf's begin. `partial` is (N, num_blocks, 2)
    with `LOCAL`, else as `measure_systems` leaves it.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cell = row * tl.num_programs(1) + block
    count = tl.load(codes_ptr)
    codes_ptr += 1
    if (row == 0) & (block == 0):
        tl.store(count_ptr, count + 1)
    if _kernels.is_frozen(codes_ptr, cell, FIXED):
        return
    COLUMNS: tl.constexpr = 2 if LOCAL else SLOTS + 2
    partial_ptr += row * num_blocks * COLUMNS
    size_g = _kernels.norm_of_blocks(partial_ptr, COLUMNS - 2, num_blocks, COLUMNS, CHUNK)
    size_f = _kernels.norm_of_blocks(partial_ptr, COLUMNS - 1, num_blocks, COLUMNS, CHUNK)
    if block == 0:
        action = _kernels.judge(
            row,
            size_g,
            size_f,
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
    else:
        action = _kernels.judge(
            cell,
            size_g,
            size_f,
            count,
            numbers_ptr,
            numbers_ptr + copies_stride,
            codes_ptr,
            codes_ptr + copies_stride,
            codes_ptr + 2 * copies_stride,
            numbers_ptr + 2 * copies_stride,
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
    found = ()
    if not LOCAL:
        place, unit = tl.arange(0, SLOTS), tl.arange(0, INNER)
        used = _network.is_filled(place, count, MEMORY) & (place < MEMORY)
        sums = _kernels.sum_of_blocks(partial_ptr, place, used, num_blocks, COLUMNS, CHUNK).to(tl.float32)
        rows = row + tl.arange(0, 1)
        products = ()
        for s in tl.static_range(MEMORY):
            products = products + (tl.sum(tl.where(place == s, sums, 0.0), axis=0) + 0.0 * rows,)
        scale = (_network.inverse_size(products[MEMORY - 1]) * root)[:, None]
        pooled_ptr += row * num_pools * (3 * WIDTH)
        shares = ()
        for tap in tl.static_range(3):
            part = pooled_ptr + tap * WIDTH
            sums = _kernels.sum_of_blocks(part, unit, unit < WIDTH, num_pools, 3 * WIDTH, POOL_CHUNK).to(tl.float32)
            shares = shares + (sums[None, :] * scale,)
        found = _network.weigh(
            gram_ptr,
            shares_ptr,
            taps_ptr,
            bias_ptr,
            out_ptr,
            last_ptr,
            rows,
            rows >= 0,
            products,
            shares,
            count,
            COMPRESSED,
            WIDTH,
            MEMORY,
            INNER,
            KIND,
        )
        if block == 0:
            _network.remember_products(gram_ptr, rows, rows >= 0, products, count, MEMORY, INNER)
            _network.remember_shares(shares_ptr, rows, rows >= 0, shares, count, WIDTH, MEMORY, INNER)
            _network.remember_weights(weights_ptr, mixing_ptr, rows, rows >= 0, found, MEMORY, INNER, MIXING)
    for turn in range(num_tiles):
        tile = block * num_tiles + turn
        first, size = 0 * block, sizes[0] + 0 * block
        z_ptr, best_ptr = z_ptrs[0] + row * z_rows[0], best_ptrs[0] + row * best_rows[0]
        images_ptr = images_ptrs[0] + row * images_strides[0][0]
        residuals_ptr = residuals_ptrs[0] + row * residuals_strides[0][0]
        images_slot, residuals_slot = images_strides[0][1] + 0 * row, residuals_strides[0][1] + 0 * row
        for i in tl.static_range(1, len(z_ptrs)):
            if tile >= firsts[i]:
                first, size = firsts[i] + 0 * block, sizes[i] + 0 * block
                z_ptr, best_ptr = z_ptrs[i] + row * z_rows[i], best_ptrs[i] + row * best_rows[i]
                images_ptr = images_ptrs[i] + row * images_strides[i][0]
                residuals_ptr = residuals_ptrs[i] + row * residuals_strides[i][0]
                images_slot, residuals_slot = images_strides[i][1] + 0 * row, residuals_strides[i][1] + 0 * row
        if tile < firsts[len(z_ptrs)]:
            _move_tile(
                z_ptr,
                best_ptr,
                images_ptr,
                residuals_ptr,
                images_slot,
                residuals_slot,
                weights_ptr + row * num_positions * MEMORY,
                mixing_ptr + row * num_positions,
                found,
                action,
                count,
                tile - first,
                num_positions,
                size,
                MEMORY,
                LOCAL,
                MIXING,
                ROWS,
                WIDE,
            )
