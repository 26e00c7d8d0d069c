# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""The first pass of `hyper_step`: residuals, what is remembered of them, and the sums that the second one needs."""

import triton
import triton.language as tl

from equipoise.ops import _kernels
from equipoise.ops.hyper import _network


@triton.jit
def _copy_standing(
    row,
    count,
    residual_ptr,
    latest_ptr,
    status_ptr,
    steps_ptr,
    stalled_ptr,
    limit_ptr,
    numbers_ptr,
    codes_ptr,
    num_copies,
    stride,
    COPIES: tl.constexpr,
):
    """A copy of where a system stands for each block of the second pass; the count goes before them.

    `numbers` is (3, N, num_copies): residual, latest, limit. `codes` is (1 + 3·N·num_copies): status, steps, stalled.
    """
    copy = tl.arange(0, COPIES)
    inside = copy < num_copies
    at = row * num_copies + copy
    whole = tl.zeros([COPIES], dtype=tl.float32)
    tl.store(numbers_ptr + at, whole + tl.load(residual_ptr + row), mask=inside)
    tl.store(numbers_ptr + stride + at, whole + tl.load(latest_ptr + row), mask=inside)
    tl.store(numbers_ptr + 2 * stride + at, whole + tl.load(limit_ptr + row), mask=inside)
    none = tl.zeros([COPIES], dtype=tl.int32)
    tl.store(codes_ptr + 1 + at, none + tl.load(status_ptr + row), mask=inside)
    tl.store(codes_ptr + 1 + stride + at, none + tl.load(steps_ptr + row), mask=inside)
    tl.store(codes_ptr + 1 + 2 * stride + at, none + tl.load(stalled_ptr + row), mask=inside)
    if row == 0:
        tl.store(codes_ptr, count)


@triton.jit
def measure_positions(
    z_ptrs,
    fz_ptrs,
    images_ptrs,
    residuals_ptrs,
    sizes,
    z_rows,
    fz_rows,
    images_strides,
    residuals_strides,
    gram_ptr,
    shares_ptr,
    weights_ptr,
    mixing_ptr,
    partial_ptr,
    compression_ptr,
    taps_ptr,
    bias_ptr,
    out_ptr,
    last_ptr,
    numbers_ptr,
    codes_ptr,
    num_copies,
    copies_stride,
    count_ptr,
    residual_ptr,
    latest_ptr,
    status_ptr,
    steps_ptr,
    stalled_ptr,
    limit_ptr,
    num_positions,
    num_features,
    root,
    COMPRESSED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    MIXING: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    INNER: tl.constexpr,
    CHUNK: tl.constexpr,
    COPIES: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Store the newest images and residuals of some positions and find their weights; partial sums of ‖g‖² and ‖f‖²."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(count_ptr)
    if block == 0:
        _copy_standing(
            row,
            count,
            residual_ptr,
            latest_ptr,
            status_ptr,
            steps_ptr,
            stalled_ptr,
            limit_ptr,
            numbers_ptr,
            codes_ptr,
            num_copies,
            copies_stride,
            COPIES,
        )
    if _kernels.is_frozen(status_ptr, row, FIXED):
        return
    position = block * ROWS + tl.arange(0, ROWS)
    real = position < num_positions
    newest = (count % MEMORY).to(tl.int64)
    numbers = tl.arange(0, FEW)
    products = ()  # elementwise until the end, as are the squares: so threads need not talk to each other
    for _ in tl.static_range(MEMORY):
        products = products + (tl.zeros([ROWS, CHUNK], dtype=tl.float32),)
    few = tl.zeros([ROWS, FEW], dtype=tl.float32)
    squares_g = tl.zeros([ROWS, CHUNK], dtype=tl.float32)
    squares_f = tl.zeros([ROWS, CHUNK], dtype=tl.float32)
    first = 0
    for i in tl.static_range(len(z_ptrs)):
        z_ptr = z_ptrs[i] + row * z_rows[i]
        fz_ptr = fz_ptrs[i] + row * fz_rows[i]
        images_ptr = images_ptrs[i] + row * images_strides[i][0] + newest * images_strides[i][1]
        residuals_ptr = residuals_ptrs[i] + row * residuals_strides[i][0]
        for start in range(0, sizes[i], CHUNK):
            feature = start + tl.arange(0, CHUNK)
            at = position[:, None] * sizes[i] + feature[None, :]
            inside = real[:, None] & (feature < sizes[i])[None, :]
            z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
            fz = tl.load(fz_ptr + at, mask=inside, other=0.0)
            older = ()
            for s in tl.static_range(MEMORY - 1):
                slot = _network.slot_of(s, count, MEMORY).to(tl.int64)
                known = inside & _network.is_filled(0 * position + s, count, MEMORY)[:, None]
                ring = tl.load(residuals_ptr + slot * residuals_strides[i][1] + at, mask=known, other=0.0)
                older = older + (ring.to(tl.float32),)
            read = compression_ptr + numbers[None, :] * num_features + (first + feature)[:, None]
            wanted = (numbers < COMPRESSED)[None, :] & (feature < sizes[i])[:, None]
            weight = tl.load(read, mask=wanted, other=0.0).to(tl.float32)  # (CHUNK, FEW)
            image = fz.to(tl.float32)
            g = image - z
            few = tl.dot(g, weight, few, input_precision="tf32x3")
            stored = g.to(residuals_ptrs[i].dtype.element_ty)
            tl.store(images_ptr + at, fz, mask=inside)
            tl.store(residuals_ptr + newest * residuals_strides[i][1] + at, stored, mask=inside)
            stored = stored.to(tl.float32)
            updated = ()
            for s in tl.static_range(MEMORY - 1):
                updated = updated + (products[s] + older[s] * stored,)
            products = updated + (products[MEMORY - 1] + stored * stored,)
            squares_g += g * g
            squares_f += image * image
        first += sizes[i]
    sums = partial_ptr + (row * tl.num_programs(1) + block) * 2
    tl.store(sums, tl.sum(tl.sum(squares_g, axis=1), axis=0))
    tl.store(sums + 1, tl.sum(tl.sum(squares_f, axis=1), axis=0))

    totals = ()
    for s in tl.static_range(MEMORY):
        totals = totals + (tl.sum(products[s], axis=1),)
    few = few * (_network.inverse_size(totals[MEMORY - 1]) * root)[:, None]
    unit = tl.arange(0, INNER)
    shares = ()
    for tap in tl.static_range(3):
        read = taps_ptr + (tap * (COMPRESSED + MEMORY + 1) + numbers)[:, None] * WIDTH + unit[None, :]
        wanted = (numbers < COMPRESSED)[:, None] & (unit < WIDTH)[None, :]
        weight = tl.load(read, mask=wanted, other=0.0).to(tl.float32)  # (FEW, INNER)
        shares = shares + (tl.dot(few, weight, input_precision="tf32x3"),)
    rows = row * num_positions + position
    _network.remember_products(gram_ptr, rows, real, totals, count, MEMORY, INNER)
    place = _network.remember_shares(shares_ptr, rows, real, shares, count, WIDTH, MEMORY, INNER)
    # A product of matrices has its numbers in other threads than all that follows: they move once, by memory.
    tl.debug_barrier()
    inside = real[:, None] & (unit < WIDTH)[None, :]
    shares = ()
    for tap in tl.static_range(3):
        shares = shares + (tl.load(place + tap * WIDTH, mask=inside, other=0.0),)
    found = _network.weigh(
        gram_ptr,
        shares_ptr,
        taps_ptr,
        bias_ptr,
        out_ptr,
        last_ptr,
        rows,
        real,
        totals,
        shares,
        count,
        COMPRESSED,
        WIDTH,
        MEMORY,
        INNER,
        KIND,
    )
    _network.remember_weights(weights_ptr, mixing_ptr, rows, real, found, MEMORY, INNER, MIXING)


@triton.jit
def _measure_block(
    z_ptr,
    fz_ptr,
    images_ptr,
    residuals_ptr,
    images_slot,
    residuals_slot,
    sums,
    count,
    first,
    size,
    MEMORY: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the newest image and residual of a block; its part of all inner products by place, of ‖g‖² and ‖f‖²."""
    NEWEST: tl.constexpr = MEMORY - 1
    at = first + tl.arange(0, BLOCK)
    inside = at < size
    place = tl.arange(0, SLOTS)
    slot = _network.slot_of(place, count, MEMORY).to(tl.int64)
    older = _network.is_filled(place, count, MEMORY) & (place < NEWEST)
    ring_at = residuals_ptr + slot[:, None] * residuals_slot + at[None, :]
    ring = tl.load(ring_at, mask=older[:, None] & inside[None, :], other=0.0).to(tl.float32)  # (SLOTS, BLOCK)
    z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
    fz = tl.load(fz_ptr + at, mask=inside, other=0.0)
    image = fz.to(tl.float32)
    g = image - z
    stored = g.to(residuals_ptr.dtype.element_ty)
    newest = (count % MEMORY).to(tl.int64)
    tl.store(images_ptr + newest * images_slot + at, fz, mask=inside)
    tl.store(residuals_ptr + newest * residuals_slot + at, stored, mask=inside)
    stored = stored.to(tl.float32)[None, :]
    ring = tl.where((place == NEWEST)[:, None], stored, ring)
    tl.store(sums + place, tl.sum(ring * stored, axis=1))
    tl.store(sums + SLOTS, tl.sum(g * g, axis=0))
    tl.store(sums + SLOTS + 1, tl.sum(image * image, axis=0))


@triton.jit
def _pool_block(
    z_ptr,
    fz_ptr,
    compression_ptr,
    taps_ptr,
    shares_ptr,
    first,
    size,
    channels,
    stride,
    count,
    pace,
    offset,
    scale,
    num_features,
    COMPRESSED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    FEW: tl.constexpr,
    INNER: tl.constexpr,
    CHANNELS: tl.constexpr,
    TERMS: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """What some of a leaf's sums add to the inner layer, by tap, (3, WIDTH): all maps on the way are linear."""
    channel = first + tl.arange(0, CHANNELS)
    sums = tl.zeros([CHANNELS], dtype=tl.float32)
    for start in range(0, count, TERMS):
        term = start + tl.arange(0, TERMS)
        at = offset + channel.to(tl.int64)[:, None] * stride + term[None, :] * pace
        inside = (channel < channels)[:, None] & (term < count)[None, :] & (at < size)
        z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(fz_ptr + at, mask=inside, other=0.0).to(tl.float32) - z
        if SIGNED:
            g = tl.where((at * 40503) % 65536 < 32768, g, -g)  # as in `Sketch`
        sums += tl.sum(g, axis=1)
    numbers = tl.arange(0, FEW)
    read = compression_ptr + numbers[:, None] * num_features + channel[None, :]
    wanted = (numbers < COMPRESSED)[:, None] & (channel < channels)[None, :]
    weight = tl.load(read, mask=wanted, other=0.0).to(tl.float32)  # (FEW, CHANNELS)
    few = tl.sum(weight * (sums * scale)[None, :], axis=1)
    unit = tl.arange(0, INNER)
    wanted = (numbers < COMPRESSED)[:, None] & (unit < WIDTH)[None, :]
    for tap in tl.static_range(3):
        read = taps_ptr + (tap * (COMPRESSED + MEMORY + 1) + numbers)[:, None] * WIDTH + unit[None, :]
        weight = tl.load(read, mask=wanted, other=0.0)  # (FEW, INNER)
        tl.store(shares_ptr + tap * WIDTH + unit, tl.sum(weight * few[:, None], axis=0), mask=unit < WIDTH)


@triton.jit
def measure_systems(
    z_ptrs,
    fz_ptrs,
    images_ptrs,
    residuals_ptrs,
    sizes,
    z_rows,
    fz_rows,
    images_strides,
    residuals_strides,
    firsts,
    pool_firsts,
    pools,
    scales,
    partial_ptr,
    pooled_ptr,
    compression_ptr,
    taps_ptr,
    numbers_ptr,
    codes_ptr,
    num_copies,
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
    num_features,
    COMPRESSED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    TERMS: tl.constexpr,
    COPIES: tl.constexpr,
    SIGNED: tl.constexpr,
    FIXED: tl.constexpr,
):
    """A block of one system, or some of the sums over it that are compressed.

    `partial` is (N, num_blocks, SLOTS + 2), `pooled` (N, num_pools, 3, WIDTH).
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(count_ptr)
    if block == 0:
        _copy_standing(
            row,
            count,
            residual_ptr,
            latest_ptr,
            status_ptr,
            steps_ptr,
            stalled_ptr,
            limit_ptr,
            numbers_ptr,
            codes_ptr,
            num_copies,
            copies_stride,
            COPIES,
        )
    if _kernels.is_frozen(status_ptr, row, FIXED):
        return
    # First all blocks, leaf by leaf, then all sums; the zeros that are added make types of leaves alike.
    pools_it = block >= num_blocks
    turn = tl.where(pools_it, block - num_blocks, block)
    first, size, columns = 0 * block, sizes[0] + 0 * block, 0 * block
    z_ptr, fz_ptr = z_ptrs[0] + row * z_rows[0], fz_ptrs[0] + row * fz_rows[0]
    images_ptr = images_ptrs[0] + row * images_strides[0][0]
    residuals_ptr = residuals_ptrs[0] + row * residuals_strides[0][0]
    images_slot, residuals_slot = images_strides[0][1] + 0 * row, residuals_strides[0][1] + 0 * row
    channels, stride, terms = pools[0][0] + 0 * block, pools[0][1] + 0 * block, pools[0][2] + 0 * block
    pace, offset, scale = pools[0][3] + 0 * block, pools[0][4] + 0 * block, scales[0]
    before = 0 * block
    for i in tl.static_range(1, len(z_ptrs)):
        before += pools[i - 1][0]
        start = tl.where(pools_it, pool_firsts[i], firsts[i])
        if turn >= start:
            first, size, columns = start, sizes[i] + 0 * block, before
            z_ptr, fz_ptr = z_ptrs[i] + row * z_rows[i], fz_ptrs[i] + row * fz_rows[i]
            images_ptr = images_ptrs[i] + row * images_strides[i][0]
            residuals_ptr = residuals_ptrs[i] + row * residuals_strides[i][0]
            images_slot, residuals_slot = images_strides[i][1] + 0 * row, residuals_strides[i][1] + 0 * row
            channels, stride, terms = pools[i][0] + 0 * block, pools[i][1] + 0 * block, pools[i][2] + 0 * block
            pace, offset, scale = pools[i][3] + 0 * block, pools[i][4] + 0 * block, scales[i]
    if pools_it:
        _pool_block(
            z_ptr,
            fz_ptr,
            compression_ptr + columns,
            taps_ptr,
            pooled_ptr + (row * num_pools + turn) * (3 * WIDTH),
            (turn - first) * CHANNELS,
            size,
            channels,
            stride,
            terms,
            pace,
            offset,
            scale,
            num_features,
            COMPRESSED,
            WIDTH,
            MEMORY,
            FEW,
            INNER,
            CHANNELS,
            TERMS,
            SIGNED,
        )
    else:
        _measure_block(
            z_ptr,
            fz_ptr,
            images_ptr,
            residuals_ptr,
            images_slot,
            residuals_slot,
            partial_ptr + (row * num_blocks + block) * (SLOTS + 2),
            count,
            (turn - first) * BLOCK,
            size,
            MEMORY,
            SLOTS,
            BLOCK,
        )
