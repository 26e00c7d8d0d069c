# mypy: disable-error-code="no-untyped-def"
"""Pieces that all kernels of `hyper_step` share: alignment, and what becomes of a system once its sums are complete."""

import triton
import triton.language as tl

from equipoise.ops import _kernels


@triton.jit
def multiple(number, UNIT: tl.constexpr):
    """The same number, known to the compiler as a multiple of UNIT: what it addresses is read in pieces of that size.

    Of itself it recognises multiples of 16 only, and reads rows of 1400 numbers one by one.
    """
    return number // UNIT * UNIT


@triton.jit
def root_of(squares, which):
    """The root of one of several numbers."""
    return tl.sqrt(tl.sum(tl.where(which, squares, 0.0), axis=0)).to(tl.float32)


@triton.jit
def begins(action_ptr, row, block, count, status_ptr, FIXED: tl.constexpr):
    """Whether a system is to be measured; leaves word for the second pass that it is not.

    `action` is (1 + N): the count of steps, which the second pass raises while its programs look at it, then actions.
    """
    tl.store(action_ptr, count, mask=(row == 0) & (block == 0))
    if FIXED:
        return True
    else:
        frozen = tl.load(status_ptr + row) >= 0
        tl.store(action_ptr + 1 + row, 0, mask=frozen & (block == 0))
        return frozen == 0


@triton.jit
def conclude(
    row,
    size_g,
    size_f,
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
    APART: tl.constexpr,
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Judge a system by the sizes of its residual and its image; leave word of what becomes of it."""
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
    if APART:
        action = _kernels.postponed(action, owed_ptr, row)
    tl.store(action_ptr + 1 + row, action)
