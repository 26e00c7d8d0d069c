# mypy: disable-error-code="no-untyped-def"
"""The kernels of plain iteration: measure (a block of one system, the last of them judges it), move (a block).

Where images are the next iterates as they are, there is one kernel per step, which measures, and one at the end.
"""

import triton
import triton.language as tl
from torch import Tensor

from equipoise._tree import Leaves
from equipoise.ops import _blocks, _kernels
from equipoise.ops.standing import Rules, Standing

BLOCK = 2048
WARPS = 4
# Partial sums read at once.
MOST_CHUNK = 128


@triton.jit
def _measure_block(z_ptr, fz_ptr, sums_ptr, start, size, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
    image = tl.load(fz_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = image - z
    tl.store(sums_ptr, tl.sum(g * g, axis=0))
    tl.store(sums_ptr + 1, tl.sum(image * image, axis=0))


@triton.jit
def _measure(
    z_ptrs,
    fz_ptrs,
    z_rows,
    fz_rows,
    sizes,
    firsts,
    num_rows,
    partial_ptr,
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
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Partial sums of ‖g‖² and ‖f‖², as (N, num_blocks, 2); judge a system when they are complete."""
    here = firsts[len(z_ptrs)] - firsts[0]
    row = (tl.program_id(0) // here).to(tl.int64)
    block = firsts[0] + tl.program_id(0) % here
    if _kernels.is_frozen(status_ptr, row, FIXED):
        tl.store(action_ptr + row, 0, mask=block == 0)
        return
    partial_ptr += row * num_blocks * 2
    for i in tl.static_range(len(z_ptrs)):
        if (block >= firsts[i]) & (block < firsts[i + 1]):
            start = (block - firsts[i]) * BLOCK
            z_ptr, fz_ptr = z_ptrs[i] + row * z_rows[i], fz_ptrs[i] + row * fz_rows[i]
            _measure_block(z_ptr, fz_ptr, partial_ptr + block * 2, start, sizes[i], BLOCK)
    if _blocks.arrives_last(arrived_ptr, row, num_blocks):
        action = _kernels.judge(
            row,
            _kernels.norm_of_blocks(partial_ptr, 0, num_blocks, 2, CHUNK),
            _kernels.norm_of_blocks(partial_ptr, 1, num_blocks, 2, CHUNK),
            tl.load(count_ptr),
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


@triton.jit
def _move_block(z_ptr, fz_ptr, best_ptr, action, start, size, BLOCK: tl.constexpr, DAMPING: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    z = tl.load(z_ptr + at, mask=inside, other=0.0)
    proposal = tl.load(fz_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if DAMPING != 1.0:
        proposal += (DAMPING - 1.0) * (proposal - z.to(tl.float32))
    _kernels.settle(z_ptr + at, best_ptr + at, z, proposal, action, inside, BLOCK)


@triton.jit
def _move(
    z_ptrs,
    fz_ptrs,
    best_ptrs,
    z_rows,
    fz_rows,
    best_rows,
    sizes,
    firsts,
    num_rows,
    action_ptr,
    count_ptr,
    BLOCK: tl.constexpr,
    DAMPING: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Keep z if it is the best, then write the proposal over it; the last launch counts the step."""
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
            start = (block - firsts[i]) * BLOCK
            z_ptr, fz_ptr = z_ptrs[i] + row * z_rows[i], fz_ptrs[i] + row * fz_rows[i]
            _move_block(z_ptr, fz_ptr, best_ptrs[i] + row * best_rows[i], action, start, sizes[i], BLOCK, DAMPING)


@triton.jit
def _follow(
    z_ptrs,
    fz_ptrs,
    before_ptrs,
    best_ptrs,
    z_rows,
    fz_rows,
    before_rows,
    best_rows,
    sizes,
    firsts,
    num_rows,
    partial_ptr,
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
    rtol,
    atol,
    diverge,
    floor,
    tiny,
    eps,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """As `_measure`, with a fixed budget; what is owed from before the last step is copied, and the rest noted."""
    here = firsts[len(z_ptrs)] - firsts[0]
    row = (tl.program_id(0) // here).to(tl.int64)
    block = firsts[0] + tl.program_id(0) % here
    partial_ptr += row * num_blocks * 2
    owed = tl.load(owed_ptr + row)
    for i in tl.static_range(len(z_ptrs)):
        if (block >= firsts[i]) & (block < firsts[i + 1]):
            start = (block - firsts[i]) * BLOCK
            z_ptr, fz_ptr = z_ptrs[i] + row * z_rows[i], fz_ptrs[i] + row * fz_rows[i]
            _measure_block(z_ptr, fz_ptr, partial_ptr + block * 2, start, sizes[i], BLOCK)
            if owed == 2:
                before_ptr, best_ptr = before_ptrs[i] + row * before_rows[i], best_ptrs[i] + row * best_rows[i]
                _blocks.copy_block(before_ptr, best_ptr, start, sizes[i], BLOCK)
    if _blocks.arrives_last(arrived_ptr, row, num_blocks):
        count = tl.load(count_ptr)
        action = _kernels.judge(
            row,
            _kernels.norm_of_blocks(partial_ptr, 0, num_blocks, 2, CHUNK),
            _kernels.norm_of_blocks(partial_ptr, 1, num_blocks, 2, CHUNK),
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
        tl.store(owed_ptr + row, tl.where((action & _kernels.KEEP) != 0, 1, tl.where(owed == 1, 2, 0)))
        tl.store(count_ptr, count + 1, mask=row == 0)  # which no other system looks at where the budget is fixed


@triton.jit
def _settle(
    z_ptrs,
    before_ptrs,
    best_ptrs,
    z_rows,
    before_rows,
    best_rows,
    sizes,
    firsts,
    num_rows,
    owed_ptr,
    arrived_ptr,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Copy what is owed; the last program of a system notes that nothing is."""
    here = firsts[len(z_ptrs)] - firsts[0]
    row = (tl.program_id(0) // here).to(tl.int64)
    block = firsts[0] + tl.program_id(0) % here
    owed = tl.load(owed_ptr + row)
    if owed == 0:
        return
    for i in tl.static_range(len(z_ptrs)):
        if (block >= firsts[i]) & (block < firsts[i + 1]):
            start = (block - firsts[i]) * BLOCK
            best_ptr = best_ptrs[i] + row * best_rows[i]
            if owed == 1:
                _blocks.copy_block(z_ptrs[i] + row * z_rows[i], best_ptr, start, sizes[i], BLOCK)
            else:
                _blocks.copy_block(before_ptrs[i] + row * before_rows[i], best_ptr, start, sizes[i], BLOCK)
    if _blocks.arrives_last(arrived_ptr, row, num_blocks):
        tl.store(owed_ptr + row, 0)


def step(z: Leaves, fz: Leaves, standing: Standing, rules: Rules, damping: float) -> None:
    """See `picard_step`."""
    move(z, fz, measure(z, fz, standing, rules), standing, damping)


def measure(z: Leaves, fz: Leaves, standing: Standing, rules: Rules) -> Tensor:
    """Take the newest iterates and their images into account; return the actions (N,)."""
    blocks = _blocks.Blocks.of(z, BLOCK)
    action = standing.status.new_empty(blocks.systems)
    if blocks.systems == 0:
        return action
    partial = standing.residual.new_empty((blocks.systems, blocks.total, 2))
    for grid, leaves in blocks.launches(z=z, fz=fz):
        _measure[grid](
            **leaves,
            partial_ptr=partial,
            action_ptr=action,
            arrived_ptr=standing.arrived,
            num_blocks=blocks.total,
            BLOCK=BLOCK,
            CHUNK=min(triton.next_power_of_2(blocks.total), MOST_CHUNK),
            **_kernels.judging(standing, rules),
            num_warps=WARPS,
        )
    return action


def move(z: Leaves, proposal: Leaves, action: Tensor, standing: Standing, damping: float = 1.0) -> None:
    """Carry out the actions, with so much of the way to the proposals, and count the step."""
    blocks = _blocks.Blocks.of(z, BLOCK)
    if blocks.systems == 0:
        standing.count.add_(1)
        return
    for grid, leaves in blocks.launches(z=z, fz=proposal, best=standing.best):
        _move[grid](
            **leaves,
            action_ptr=action,
            count_ptr=standing.count,
            BLOCK=BLOCK,
            DAMPING=damping,
            COUNTS=leaves["firsts"][-1] == blocks.total,
            num_warps=WARPS,
        )


def follow(z: Leaves, fz: Leaves, before: Leaves, standing: Standing, rules: Rules) -> None:
    """See `picard_follow`."""
    blocks = _blocks.Blocks.of(z, BLOCK)
    if blocks.systems == 0:
        standing.count.add_(1)
        return
    partial = standing.residual.new_empty((blocks.systems, blocks.total, 2))
    for grid, leaves in blocks.launches(z=z, fz=fz, before=before, best=standing.best):
        _follow[grid](
            **leaves,
            partial_ptr=partial,
            arrived_ptr=standing.arrived,
            owed_ptr=standing.owed,
            num_blocks=blocks.total,
            BLOCK=BLOCK,
            CHUNK=min(triton.next_power_of_2(blocks.total), MOST_CHUNK),
            **_kernels.judging(standing, rules),
            num_warps=WARPS,
        )


def settle(z: Leaves, before: Leaves, standing: Standing) -> None:
    """See `picard_settle`."""
    blocks = _blocks.Blocks.of(z, BLOCK)
    if blocks.systems == 0:
        return
    for grid, leaves in blocks.launches(z=z, before=before, best=standing.best):
        _settle[grid](
            **leaves,
            owed_ptr=standing.owed,
            arrived_ptr=standing.arrived,
            num_blocks=blocks.total,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
