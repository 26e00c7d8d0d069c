# mypy: disable-error-code="no-untyped-def"
"""Pieces of kernels that several operations share: the stopping rules, and what becomes of an iterate."""

from typing import Any

import triton
import triton.language as tl

from equipoise import _iterate, _stop
from equipoise._solution import Status
from equipoise.ops import standing as _standing

# A kernel sees a module's constants only in this wrapping.
ADVANCE = tl.constexpr(_standing.ADVANCE)
KEEP = tl.constexpr(_standing.KEEP)
RETREAT = tl.constexpr(_standing.RETREAT)
RUNNING = tl.constexpr(_iterate.RUNNING)
DIVERGING = tl.constexpr(_iterate.DIVERGING)
FLOOR_PATIENCE = tl.constexpr(_stop.FLOOR_PATIENCE)
CONVERGED = tl.constexpr(int(Status.CONVERGED))
PLATEAU = tl.constexpr(int(Status.PLATEAU))
DIVERGED = tl.constexpr(int(Status.DIVERGED))
NONFINITE = tl.constexpr(int(Status.NONFINITE))
PRECISION_FLOOR = tl.constexpr(int(Status.PRECISION_FLOOR))


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def is_frozen(status_ptr, row, FIXED: tl.constexpr):
    """Whether nothing of this system may change any more."""
    if FIXED:
        return False
    else:
        return tl.load(status_ptr + row) >= 0


@triton.jit
def sum_of_blocks(partial_ptr, columns, inside, num_blocks, width, CHUNK: tl.constexpr):
    """Column sums of one system's partial sums (num_blocks, width), in float64 and in a fixed order."""
    block = tl.arange(0, CHUNK)
    total = tl.zeros([columns.shape[0]], dtype=tl.float64)
    for first in range(0, num_blocks, CHUNK):
        place = partial_ptr + (first + block)[:, None] * width + columns[None, :]
        part = tl.load(place, mask=(first + block < num_blocks)[:, None] & inside[None, :], other=0.0)
        total += tl.sum(part.to(tl.float64), axis=0)
    return total


@triton.jit
def norm_of_blocks(partial_ptr, column, num_blocks, width, CHUNK: tl.constexpr):
    """The root of one column's sum."""
    block = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], dtype=tl.float64)
    for first in range(0, num_blocks, CHUNK):
        inside = first + block < num_blocks
        total += tl.load(partial_ptr + (first + block) * width + column, mask=inside, other=0.0).to(tl.float64)
    return tl.sqrt(tl.sum(total, axis=0)).to(tl.float32)


@triton.jit
def judge(
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
    PATIENCE: tl.constexpr,
    FIXED: tl.constexpr,
    LAST: tl.constexpr,
):
    """`standing.judge` for one running system; returns its action, the same to every thread."""
    relative = size / (image + tiny)
    residual = tl.load(residual_ptr + row)
    limit, stalled = residual, 0 * count
    if not FIXED:
        limit, stalled = tl.load(limit_ptr + row), tl.load(stalled_ptr + row)
    # Every thread loads these for itself: one that is late must not find what another has written.
    tl.debug_barrier()
    better = relative < residual
    tl.store(latest_ptr + row, relative)
    if FIXED:
        tl.store(residual_ptr + row, tl.where(better, relative, residual))
        tl.store(status_ptr + row, NONFINITE, mask=is_finite(relative) == 0)
        return ADVANCE + tl.where(better, KEEP, 0)
    else:
        limit = tl.where(count == 0, diverge * (size + eps * image), limit)
        tl.store(limit_ptr + row, limit)
        converged = (size <= rtol * image + atol) & is_finite(size)
        better = better | converged
        residual = tl.where(better, relative, residual)
        stalled = tl.where(better, 0, stalled + 1)
        tl.store(residual_ptr + row, residual)
        tl.store(stalled_ptr + row, stalled)

        code = tl.where((stalled >= PATIENCE) & (PATIENCE > 0), PLATEAU, RUNNING)  # later lines take precedence
        code = tl.where((code == PLATEAU) & (size * diverge > DIVERGING * limit), DIVERGED, code)
        code = tl.where((stalled >= FLOOR_PATIENCE) & (residual <= floor), PRECISION_FLOOR, code)
        code = tl.where(size > limit, DIVERGED, code)
        code = tl.where(is_finite(relative), code, NONFINITE)
        code = tl.where(converged, CONVERGED, code)
        tl.store(status_ptr + row, code)
        ended = code >= 0
        kept = tl.where(better, KEEP, 0)
        if LAST:
            tl.store(steps_ptr + row, count + 1, mask=ended)
            return ADVANCE + kept
        else:
            tl.store(steps_ptr + row, count, mask=ended)
            return kept + tl.where(ended, tl.where(better, 0, RETREAT), ADVANCE)


@triton.jit
def postponed(action, owed_ptr, row):
    """The action where proposals are written elsewhere, over the iterate before, which is kept if it was the best.

    Whether the newest one is to be kept is known only when the next step has been judged: until then it is owed.
    """
    owed = tl.load(owed_ptr + row)
    tl.debug_barrier()  # every thread has loaded it
    better = (action & KEEP) != 0
    tl.store(owed_ptr + row, tl.where(better, 1, 0))
    return tl.where((owed == 1) & (better == 0), ADVANCE | KEEP, ADVANCE)


def judging(standing: _standing.Standing, rules: _standing.Rules) -> dict[str, Any]:
    """What a kernel that calls `judge` takes for it, by the names that `judge` has for them, and `count_ptr`."""
    tensors = {name: getattr(standing, name) for name in ("residual", "latest", "status", "steps", "stalled", "limit")}
    numbers = {name: getattr(rules, name) for name in ("rtol", "atol", "diverge", "floor", "tiny", "eps")}
    # With a fixed budget there is one kernel: patience and the last iterate have no say in it.
    patience, last = (0, False) if rules.fixed else (rules.plateau, rules.last)
    constants = {"PATIENCE": patience, "FIXED": rules.fixed, "LAST": last}
    return {"count_ptr": standing.count, **{f"{k}_ptr": v for k, v in tensors.items()}, **numbers, **constants}


@triton.jit
def spread(flag, BLOCK: tl.constexpr):
    """One truth value as a mask; as integers, because the interpreter cannot broadcast a truth value."""
    return tl.broadcast_to(flag.to(tl.int32), [BLOCK]) != 0


@triton.jit
def settle(z_place, best_place, z, proposal, action, inside, BLOCK: tl.constexpr):
    """Carry out an action on one block; `z` is what stands at `z_place`."""
    tl.store(best_place, z, mask=inside & spread((action & KEEP) != 0, BLOCK))
    if (action & RETREAT) != 0:
        proposal = tl.load(best_place, mask=inside, other=0.0).to(tl.float32)
    tl.store(z_place, proposal, mask=inside & spread((action & (ADVANCE | RETREAT)) != 0, BLOCK))
