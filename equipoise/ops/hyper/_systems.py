# mypy: disable-error-code="no-untyped-def,assignment"
"""The first pass of `hyper_step` where all of a system has the same weights.

A program measures a block of a system, or makes some of the sums over it that are compressed. The last one to leave its
part adds all parts up, runs the network and judges the system.
"""

import triton
import triton.language as tl

from equipoise.ops import _blocks, _kernels
from equipoise.ops.hyper import _conclude, _network


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
    tl.store(sums + place, tl.sum(ring * stored, axis=1), mask=place < MEMORY)
    tl.store(sums + MEMORY, tl.sum(g * g, axis=0))
    tl.store(sums + MEMORY + 1, tl.sum(image * image, axis=0))


@triton.jit
def _pool_block(
    z_ptr,
    fz_ptr,
    compression_ptr,
    few_ptr,
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
    FEW: tl.constexpr,
    CHANNELS: tl.constexpr,
    TERMS: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """What some of a leaf's sums add to the few numbers, (FEW,)."""
    channel = first + tl.arange(0, CHANNELS)
    sums = tl.zeros([CHANNELS, TERMS], dtype=tl.float32)
    for start in range(0, count, TERMS):
        term = start + tl.arange(0, TERMS)
        at = offset + channel.to(tl.int64)[:, None] * stride + term[None, :] * pace
        inside = (channel < channels)[:, None] & (term < count)[None, :] & (at < size)
        z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(fz_ptr + at, mask=inside, other=0.0).to(tl.float32) - z
        if SIGNED:
            g = tl.where((at * 40503) % 65536 < 32768, g, -g)  # as in `Sketch`
        sums += g
    numbers = tl.arange(0, FEW)
    read = compression_ptr + numbers[:, None] * num_features + channel[None, :]
    wanted = (numbers < COMPRESSED)[:, None] & (channel < channels)[None, :]
    weight = tl.load(read, mask=wanted, other=0.0).to(tl.float32)  # (FEW, CHANNELS)
    tl.store(few_ptr + numbers, tl.sum(weight * (tl.sum(sums, axis=1) * scale)[None, :], axis=1))


@triton.jit
def _weigh_system(
    sums,
    few_ptr,
    gram_ptr,
    shares_ptr,
    weights_ptr,
    mixing_ptr,
    taps_ptr,
    bias_ptr,
    out_ptr,
    last_ptr,
    row,
    place,
    count,
    num_pools,
    root,
    COMPRESSED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    MIXING: tl.constexpr,
    KIND: tl.constexpr,
    SLOTS: tl.constexpr,
    TOLD: tl.constexpr,
    FEW: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    POOL_CHUNK: tl.constexpr,
):
    """Find the weights of a system from its products by place, and from all parts of its few numbers."""
    unit, numbers = tl.arange(0, INNER), tl.arange(0, FEW)
    used = _network.is_step(place, count, MEMORY)
    few = _kernels.sum_of_blocks(few_ptr, numbers, numbers < COMPRESSED, num_pools, FEW, POOL_CHUNK).to(tl.float32)
    newest, slot = count % MEMORY, _network.slot_of(place, count, MEMORY)
    gram_at = gram_ptr + row * (MEMORY * MEMORY)
    tl.store(gram_at + newest * MEMORY + slot, sums, mask=used)
    tl.store(gram_at + slot * MEMORY + newest, sums, mask=used)
    square = tl.sum(tl.where(place == MEMORY - 1, sums, 0.0), axis=0)
    few = few * (_network.inverse_size(square) * root)
    shares_at = shares_ptr + (row * MEMORY + newest) * (3 * WIDTH) + unit
    for tap in tl.static_range(3):
        read = taps_ptr + (tap * (COMPRESSED + MEMORY + 1) + numbers)[:, None] * WIDTH + unit[None, :]
        wanted = (numbers < COMPRESSED)[:, None] & (unit < WIDTH)[None, :]
        weight = tl.load(read, mask=wanted, other=0.0).to(tl.float32)  # (FEW, INNER)
        tl.store(shares_at + tap * WIDTH, tl.sum(weight * few[:, None], axis=0), mask=unit < WIDTH)
    _network.weigh(
        gram_ptr,
        shares_ptr,
        weights_ptr,
        mixing_ptr,
        taps_ptr,
        bias_ptr,
        out_ptr,
        last_ptr,
        row,
        1,
        count,
        COMPRESSED,
        WIDTH,
        MEMORY,
        MIXING,
        KIND,
        SLOTS,
        TOLD,
        INNER,
        ROWS,
    )


@triton.jit
def measure_systems(
    z_ptrs,
    fz_ptrs,
    images_ptrs,
    residuals_ptrs,
    z_rows,
    fz_rows,
    images_rows,
    images_slots,
    residuals_rows,
    residuals_slots,
    sizes,
    firsts,
    pool_z_ptrs,
    pool_fz_ptrs,
    pool_z_rows,
    pool_fz_rows,
    pool_sizes,
    pool_firsts,
    pools,
    scales,
    sums_ptr,
    few_ptr,
    gram_ptr,
    shares_ptr,
    weights_ptr,
    mixing_ptr,
    compression_ptr,
    taps_ptr,
    bias_ptr,
    out_ptr,
    last_ptr,
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
    num_features,
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
    MIXING: tl.constexpr,
    KIND: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOLD: tl.constexpr,
    FEW: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    TERMS: tl.constexpr,
    CHUNK: tl.constexpr,
    POOL_CHUNK: tl.constexpr,
    SIGNED: tl.constexpr,
    UNIT: tl.constexpr,
    APART: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Some of the sums over one system that are compressed, which take longest and come first, or a block of it.

    `sums` is (N, blocks, COLUMNS), `few` (N, sums' programs, FEW).
    """
    num_blocks, num_pools = firsts[len(z_ptrs)], pool_firsts[len(pool_z_ptrs)]
    here = num_blocks + num_pools
    row, turn = (tl.program_id(0) // here).to(tl.int64), tl.program_id(0) % here
    count = tl.load(count_ptr)
    if _conclude.begins(action_ptr, row, turn, count, status_ptr, FIXED):
        sums_ptr += row * num_blocks * COLUMNS
        few_ptr += row * num_pools * FEW
        columns = 0
        for i in tl.static_range(len(pool_z_ptrs)):
            if (turn >= pool_firsts[i]) & (turn < pool_firsts[i + 1]):
                _pool_block(
                    pool_z_ptrs[i] + row * pool_z_rows[i],
                    pool_fz_ptrs[i] + row * pool_fz_rows[i],
                    compression_ptr + columns,
                    few_ptr + turn * FEW,
                    (turn - pool_firsts[i]) * CHANNELS,
                    pool_sizes[i],
                    pools[i][0],
                    pools[i][1],
                    pools[i][2],
                    pools[i][3],
                    pools[i][4],
                    scales[i],
                    num_features,
                    COMPRESSED,
                    FEW,
                    CHANNELS,
                    TERMS,
                    SIGNED,
                )
            columns += pools[i][0]
        block = turn - num_pools
        for i in tl.static_range(len(z_ptrs)):
            if (block >= firsts[i]) & (block < firsts[i + 1]):
                _measure_block(
                    z_ptrs[i] + row * _conclude.multiple(z_rows[i], UNIT),
                    fz_ptrs[i] + row * _conclude.multiple(fz_rows[i], UNIT),
                    images_ptrs[i] + row * _conclude.multiple(images_rows[i], UNIT),
                    residuals_ptrs[i] + row * _conclude.multiple(residuals_rows[i], UNIT),
                    _conclude.multiple(images_slots[i], UNIT),
                    _conclude.multiple(residuals_slots[i], UNIT),
                    sums_ptr + block * COLUMNS,
                    count,
                    (block - firsts[i]) * BLOCK,
                    sizes[i],
                    MEMORY,
                    SLOTS,
                    BLOCK,
                )
        if _blocks.arrives_last(arrived_ptr, row, here):
            place = tl.arange(0, COLUMNS)
            sums = _kernels.sum_of_blocks(sums_ptr, place, place < MEMORY + 2, num_blocks, COLUMNS, CHUNK)
            _weigh_system(
                sums.to(tl.float32),
                few_ptr,
                gram_ptr,
                shares_ptr,
                weights_ptr,
                mixing_ptr,
                taps_ptr,
                bias_ptr,
                out_ptr,
                last_ptr,
                row,
                place,
                count,
                num_pools,
                root,
                COMPRESSED,
                WIDTH,
                MEMORY,
                MIXING,
                KIND,
                SLOTS,
                TOLD,
                FEW,
                INNER,
                ROWS,
                POOL_CHUNK,
            )
            _conclude.conclude(
                row,
                _conclude.root_of(sums, place == MEMORY),
                _conclude.root_of(sums, place == MEMORY + 1),
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
