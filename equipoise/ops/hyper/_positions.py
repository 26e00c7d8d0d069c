# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""The first pass of `hyper_step` where positions have weights of their own.

A program measures some features of some positions, and leaves its part of their sums. The last one to do so for these
positions adds the parts up and runs the network; the last one to do that for a system judges it.
"""

import triton
import triton.language as tl

from equipoise.ops import _blocks, _kernels
from equipoise.ops.hyper import _conclude, _network


@triton.jit
def _measure_tile(
    z_ptr,
    fz_ptr,
    images_ptr,
    residuals_ptr,
    residuals_slot,
    compression_ptr,
    sums_ptr,
    few_ptr,
    position,
    real,
    count,
    start,
    size,
    num_features,
    COMPRESSED: tl.constexpr,
    MEMORY: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store the newest images and residuals of a tile; its part of what positions are summed up to.

    That is (ROWS, COLUMNS) the products with all residuals by place, ‖g‖² and ‖f‖², and (ROWS, FEW) the few numbers.
    """
    newest = (count % MEMORY).to(tl.int64)
    numbers = tl.arange(0, FEW)
    products = ()  # elementwise until the end, so that threads need not talk to each other
    for _ in tl.static_range(MEMORY + 2):
        products = products + (tl.zeros([ROWS, CHUNK], dtype=tl.float32),)
    few = tl.zeros([ROWS, FEW], dtype=tl.float32)
    for turn in range(SPAN):
        feature = start + turn * CHUNK + tl.arange(0, CHUNK)
        at = position[:, None] * size + feature[None, :]
        inside = real[:, None] & (feature < size)[None, :]
        z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
        fz = tl.load(fz_ptr + at, mask=inside, other=0.0)
        older = ()
        for s in tl.static_range(MEMORY - 1):
            slot = _network.slot_of(s, count, MEMORY).to(tl.int64)
            known = inside & _network.is_filled(0 * position + s, count, MEMORY)[:, None]
            ring = tl.load(residuals_ptr + slot * residuals_slot + at, mask=known, other=0.0)
            older = older + (ring.to(tl.float32),)
        read = compression_ptr + numbers[None, :] * num_features + feature[:, None]
        wanted = (numbers < COMPRESSED)[None, :] & (feature < size)[:, None]
        weight = tl.load(read, mask=wanted, other=0.0).to(tl.float32)  # (CHUNK, FEW)
        image = fz.to(tl.float32)
        g = image - z
        stored = g.to(residuals_ptr.dtype.element_ty)
        tl.store(images_ptr + at, fz, mask=inside)
        tl.store(residuals_ptr + newest * residuals_slot + at, stored, mask=inside)
        few = tl.dot(g, weight, few, input_precision=PRECISION)
        stored = stored.to(tl.float32)
        updated = ()
        for s in tl.static_range(MEMORY - 1):
            updated = updated + (products[s] + older[s] * stored,)
        updated = updated + (products[MEMORY - 1] + stored * stored,)
        products = updated + (products[MEMORY] + g * g, products[MEMORY + 1] + image * image)
    line, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    table = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)  # what is stored together changes threads together
    for s in tl.static_range(MEMORY + 2):
        table = tl.where((column == s)[None, :], tl.sum(products[s], axis=1)[:, None], table)
    tl.store(sums_ptr + line[:, None] * COLUMNS + column[None, :], table)
    tl.store(few_ptr + line[:, None] * FEW + numbers[None, :], few)


@triton.jit
def _added_up(parts_ptr, num_parts, ROWS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    """(ROWS, WIDE) the sum of so many parts, in a fixed order; PARTS of them are on their way at once."""
    line = tl.arange(0, ROWS)
    at = parts_ptr + line[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    total = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for first in range(0, num_parts, PARTS):
        for i in tl.static_range(PARTS):
            inside = (0 * line + first + i < num_parts)[:, None]
            total += tl.load(at + (first + i) * (ROWS * WIDE), mask=inside, other=0.0)
    return total


@triton.jit
def _weigh_positions(
    sums_ptr,
    few_ptr,
    norms_ptr,
    gram_ptr,
    shares_ptr,
    weights_ptr,
    mixing_ptr,
    taps_ptr,
    bias_ptr,
    out_ptr,
    last_ptr,
    first,
    num_real,
    count,
    num_parts,
    root,
    COMPRESSED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    MIXING: tl.constexpr,
    KIND: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOLD: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    INNER: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Find the weights of the positions from `first` on, from all parts of their sums; leave their ‖g‖² and ‖f‖²."""
    line, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    numbers, unit = tl.arange(0, FEW), tl.arange(0, INNER)
    taps = ()  # on their way while parts are added up
    for tap in tl.static_range(3):
        read = taps_ptr + (tap * (COMPRESSED + MEMORY + 1) + numbers)[:, None] * WIDTH + unit[None, :]
        wanted = (numbers < COMPRESSED)[:, None] & (unit < WIDTH)[None, :]
        taps = taps + (tl.load(read, mask=wanted, other=0.0).to(tl.float32),)  # (FEW, INNER)
    table = _added_up(sums_ptr, num_parts, ROWS, COLUMNS, PARTS)
    few = _added_up(few_ptr, num_parts, ROWS, FEW, PARTS)
    squares = tl.sum(table, axis=0)
    tl.store(norms_ptr + column - MEMORY, squares, mask=(column >= MEMORY) & (column < MEMORY + 2))
    square = tl.sum(tl.where((column == MEMORY - 1)[None, :], table, 0.0), axis=1)
    few = few * (_network.inverse_size(square) * root)[:, None]
    real = (line < num_real)[:, None]
    newest, slot = count % MEMORY, _network.slot_of(column, count, MEMORY)
    gram_at = gram_ptr + ((first + line) * (MEMORY * MEMORY))[:, None]
    known = real & _network.is_step(column, count, MEMORY)[None, :]
    tl.store(gram_at + (newest * MEMORY + slot)[None, :], table, mask=known)
    tl.store(gram_at + (slot * MEMORY + newest)[None, :], table, mask=known)
    shares_at = shares_ptr + (((first + line) * MEMORY + newest) * (3 * WIDTH))[:, None] + unit[None, :]
    for tap in tl.static_range(3):
        share = tl.dot(few, taps[tap], input_precision="tf32x3")
        tl.store(shares_at + tap * WIDTH, share, mask=real & (unit < WIDTH)[None, :])
    _network.weigh(
        gram_ptr,
        shares_ptr,
        weights_ptr,
        mixing_ptr,
        taps_ptr,
        bias_ptr,
        out_ptr,
        last_ptr,
        first,
        num_real,
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
def measure_positions(
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
    sums_ptr,
    few_ptr,
    norms_ptr,
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
    num_features,
    num_down,
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
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    INNER: tl.constexpr,
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

    With K tiles across and `num_down` down, `sums` is (N, num_down, K, ROWS, COLUMNS), `few` likewise with FEW columns,
    `norms` (N, num_down, 2). `firsts` has the first tile across of each leaf, and K.
    """
    num_across = firsts[len(z_ptrs)]
    cell, block = tl.program_id(0) // num_across, tl.program_id(0) % num_across
    row, down = (cell // num_down).to(tl.int64), cell % num_down
    count = tl.load(count_ptr)
    if _conclude.begins(action_ptr, row, down + block, count, status_ptr, FIXED):
        position = down * ROWS + tl.arange(0, ROWS)
        real = position < num_positions
        part = cell.to(tl.int64) * num_across
        first = 0
        for i in tl.static_range(len(z_ptrs)):
            if (block >= firsts[i]) & (block < firsts[i + 1]):
                slot = (count % MEMORY).to(tl.int64) * _conclude.multiple(images_slots[i], UNIT)
                _measure_tile(
                    z_ptrs[i] + row * _conclude.multiple(z_rows[i], UNIT),
                    fz_ptrs[i] + row * _conclude.multiple(fz_rows[i], UNIT),
                    images_ptrs[i] + row * _conclude.multiple(images_rows[i], UNIT) + slot,
                    residuals_ptrs[i] + row * _conclude.multiple(residuals_rows[i], UNIT),
                    _conclude.multiple(residuals_slots[i], UNIT),
                    compression_ptr + first,
                    sums_ptr + (part + block) * (ROWS * COLUMNS),
                    few_ptr + (part + block) * (ROWS * FEW),
                    position,
                    real,
                    count,
                    (block - firsts[i]) * (SPAN * CHUNK),
                    _conclude.multiple(sizes[i], UNIT),
                    _conclude.multiple(num_features, UNIT),
                    COMPRESSED,
                    MEMORY,
                    COLUMNS,
                    ROWS,
                    FEW,
                    CHUNK,
                    SPAN,
                    PRECISION,
                )
            first += _conclude.multiple(sizes[i], UNIT)
        if _blocks.arrives_last(gathered_ptr, cell, num_across):
            _weigh_positions(
                sums_ptr + part * (ROWS * COLUMNS),
                few_ptr + part * (ROWS * FEW),
                norms_ptr + cell * 2,
                gram_ptr,
                shares_ptr,
                weights_ptr,
                mixing_ptr,
                taps_ptr,
                bias_ptr,
                out_ptr,
                last_ptr,
                row * num_positions + down * ROWS,
                num_positions - down * ROWS,
                count,
                num_across,
                root,
                COMPRESSED,
                WIDTH,
                MEMORY,
                MIXING,
                KIND,
                COLUMNS,
                SLOTS,
                TOLD,
                ROWS,
                FEW,
                INNER,
                PARTS,
            )
            if _blocks.arrives_last(arrived_ptr, row, num_down):
                column = tl.arange(0, 2)
                norms_ptr += row * num_down * 2
                squares = _kernels.sum_of_blocks(norms_ptr, column, column >= 0, num_down, 2, NORMS)
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
