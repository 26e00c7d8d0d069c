# mypy: disable-error-code="no-untyped-def"
"""The kernels of `picard_step`: measure (a block of one system), judge (a system), move (a block of one system)."""

import triton
import triton.language as tl
from torch import Tensor

from equipoise._tree import Leaves
from equipoise.ops import _kernels
from equipoise.ops.standing import Rules, Standing

BLOCK = 2048
WARPS = 4
# Partial sums read at once.
MOST_CHUNK = 128


@triton.jit
def _measure(
    z_ptr,
    fz_ptr,
    partial_ptr,
    status_ptr,
    size,
    z_row,
    fz_row,
    first_block,
    num_blocks,
    BLOCK: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Partial sums of ‖g‖² and ‖f‖², as (N, num_blocks, 2)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _kernels.is_frozen(status_ptr, row, FIXED):
        return
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    z = tl.load(z_ptr + row * z_row + at, mask=inside, other=0.0).to(tl.float32)
    image = tl.load(fz_ptr + row * fz_row + at, mask=inside, other=0.0).to(tl.float32)
    g = image - z
    sums = partial_ptr + (row * num_blocks + first_block + block) * 2
    tl.store(sums, tl.sum(g * g, axis=0))
    tl.store(sums + 1, tl.sum(image * image, axis=0))


@triton.jit
def _judge(
    partial_ptr,
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
    CHUNK: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if _kernels.is_frozen(status_ptr, row, FIXED):
        tl.store(action_ptr + row, 0)
        return
    partial_ptr += row * num_blocks * 2
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
def _move(
    z_ptr,
    fz_ptr,
    best_ptr,
    action_ptr,
    count_ptr,
    size,
    z_row,
    fz_row,
    best_row,
    BLOCK: tl.constexpr,
    DAMPING: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Keep z if it is the best, then write the proposal over it; the kernel of the last leaf counts the step."""
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
    proposal = tl.load(fz_ptr + row * fz_row + at, mask=inside, other=0.0).to(tl.float32)
    if DAMPING != 1.0:
        proposal += (DAMPING - 1.0) * (proposal - z.to(tl.float32))
    _kernels.settle(z_place, best_ptr + row * best_row + at, z, proposal, action, inside, BLOCK)


def step(z: Leaves, fz: Leaves, standing: Standing, rules: Rules, damping: float) -> None:
    """See `picard_step`."""
    move(z, fz, measure(z, fz, standing, rules), standing, damping)


def measure(z: Leaves, fz: Leaves, standing: Standing, rules: Rules) -> Tensor:
    """Take the newest iterates and their images into account; return the actions (N,)."""
    n, action = z[0].shape[0], standing.status.new_empty(z[0].shape[0])
    if n == 0:
        return action
    blocks = [triton.cdiv(leaf.shape[1], BLOCK) for leaf in z]
    total, first = sum(blocks), 0
    partial = standing.residual.new_empty((n, total, 2))
    for leaf, image, count in zip(z, fz, blocks, strict=True):
        _measure[(n, count)](
            leaf,
            image,
            partial,
            standing.status,
            leaf.shape[1],
            leaf.stride(0),
            image.stride(0),
            first,
            total,
            BLOCK=BLOCK,
            FIXED=rules.fixed,
            num_warps=WARPS,
        )
        first += count
    _judge[(n,)](
        partial,
        action,
        num_blocks=total,
        CHUNK=min(triton.next_power_of_2(total), MOST_CHUNK),
        **_kernels.judging(standing, rules),
        num_warps=1,
    )
    return action


def move(z: Leaves, proposal: Leaves, action: Tensor, standing: Standing, damping: float = 1.0) -> None:
    """Carry out the actions, with so much of the way to the proposals, and count the step."""
    n = z[0].shape[0]
    if n == 0:
        standing.count.add_(1)
        return
    for i, (leaf, new, best) in enumerate(zip(z, proposal, standing.best, strict=True)):
        _move[(n, triton.cdiv(leaf.shape[1], BLOCK))](
            leaf,
            new,
            best,
            action,
            standing.count,
            leaf.shape[1],
            leaf.stride(0),
            new.stride(0),
            best.stride(0),
            BLOCK=BLOCK,
            DAMPING=damping,
            COUNTS=i == len(z) - 1,
            num_warps=WARPS,
        )
