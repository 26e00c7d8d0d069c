"""The kernels of `hyper_step`: measure (some positions, or a block of one system), then move (a block of one system).

Where positions have weights of their own, the first kernel finds them; else every program of the second finds those of
its system for itself. Systems are judged in the same way: by each of their blocks, on copies of what the first kernel
found, because blocks cannot wait for one another. The first block's judgement is the one that is written down.
"""

import math
from typing import TYPE_CHECKING, Any

import triton

from equipoise._tree import Leaves
from equipoise.ops import _kernels
from equipoise.ops.hyper._measure import measure_positions, measure_systems
from equipoise.ops.hyper._move import move
from equipoise.ops.standing import Rules, Standing

if TYPE_CHECKING:
    from equipoise.ops.hyper import HyperMemory, HyperParts

# Unknowns per program of passes over blocks.
BLOCK = 1024
WARPS = 4
# Positions whose weights one program finds, and features that it reads at once.
POSITIONS = 16
FEATURES = 64
# Registers of its threads, so that a processor holds several programs; up to so many numbers of the inner layer fit.
REGISTERS = 128
ROOMY = 384
# Columns of its tiles from which on it has twice as many threads.
LARGE = 64
# Sums over a residual that one program makes, and terms that it reads at once.
CHANNELS = 32
TERMS = 32
# Programs that keep a device busy, and the most blocks one of them moves if there are more.
PROGRAMS = 512
MOST_TILES = 16
# Partial sums read at once.
MOST_CHUNK = 128
# The least that a product of matrices takes.
LEAST = 16


def step(z: Leaves, fz: Leaves, memory: "HyperMemory", standing: Standing, parts: "HyperParts", rules: Rules) -> None:
    """See `hyper_step`."""
    n = z[0].shape[0]
    if n == 0:
        standing.count.add_(1)
        return
    sizes = tuple(leaf.shape[1] // parts.positions for leaf in z)
    wide = min(_power(max(sizes)), FEATURES) if parts.local else BLOCK
    rows = max(1, BLOCK // wide) if parts.local else 1
    firsts = _firsts(triton.cdiv(parts.positions, rows) * triton.cdiv(size, wide) for size in sizes)
    # Weights of a whole system are found by each of its programs, so there are no more of them than the device needs.
    tiles = 1 if parts.local else max(1, min(n * firsts[-1] // PROGRAMS, MOST_TILES))
    copies = triton.cdiv(firsts[-1], tiles)
    leaves: dict[str, Any] = {
        "z_ptrs": tuple(z),
        "images_ptrs": tuple(memory.images),
        "residuals_ptrs": tuple(memory.residuals),
        "sizes": sizes,
        "z_rows": tuple(leaf.stride(0) for leaf in z),
        "images_strides": tuple(ring.stride()[:2] for ring in memory.images),
        "residuals_strides": tuple(ring.stride()[:2] for ring in memory.residuals),
    }
    judging = _kernels.judging(standing, rules)
    standings = {name: value for name, value in judging.items() if name.endswith("_ptr")}
    common: dict[str, Any] = {
        "taps_ptr": parts.taps,
        "numbers_ptr": standing.residual.new_empty((3, n, copies)),
        "codes_ptr": standing.status.new_empty(1 + 3 * n * copies),
        "copies_stride": n * copies,
        "COMPRESSED": parts.compressed,
        "WIDTH": parts.width,
        "MEMORY": parts.memory,
        "INNER": max(_power(parts.width), LEAST),
    }
    network: dict[str, Any] = {
        "gram_ptr": memory.gram,
        "shares_ptr": memory.shares,
        "weights_ptr": memory.weights,
        "mixing_ptr": memory.mixing,
        "bias_ptr": parts.bias,
        "out_ptr": parts.out,
        "last_ptr": parts.last,
        "num_positions": parts.positions,
        "root": math.sqrt(sum(sizes)),
        "MIXING": parts.mixing,
        "KIND": parts.weights,
    }
    first_pass = {
        "fz_ptrs": tuple(fz),
        "fz_rows": tuple(leaf.stride(0) for leaf in fz),
        "compression_ptr": parts.compression,
        "num_features": parts.compression.shape[1],
        "num_copies": copies,
        "COPIES": _power(copies),
        "FEW": max(_power(parts.compressed), LEAST),
        "FIXED": rules.fixed,
    }
    if parts.local:
        sums = _measure_positions(n, parts, {**leaves, **first_pass, **common, **network, **standings})
    else:
        sums = _measure_systems(n, parts, {**leaves, **first_pass, **common, **standings})
    move[(n, copies)](
        best_ptrs=tuple(standing.best),
        best_rows=tuple(leaf.stride(0) for leaf in standing.best),
        firsts=firsts,
        num_tiles=tiles,
        LOCAL=parts.local,
        SLOTS=_power(parts.memory),
        ROWS=rows,
        WIDE=wide,
        CHUNK=min(_power(sums["num_blocks"]), MOST_CHUNK),
        POOL_CHUNK=min(_power(sums["num_pools"]), LEAST),
        **sums,
        **leaves,
        **common,
        **network,
        **judging,
        num_warps=WARPS,
    )


def _measure_positions(n: int, parts: "HyperParts", arguments: dict[str, Any]) -> dict[str, Any]:
    """The first pass where positions have weights of their own; what the second one takes from it."""
    blocks = triton.cdiv(parts.positions, POSITIONS)
    partial = arguments["numbers_ptr"].new_empty((n, blocks, 2))
    chunk = min(max(_power(max(arguments["sizes"])), LEAST), FEATURES)
    measure_positions[(n, blocks)](
        partial_ptr=partial,
        ROWS=POSITIONS,
        CHUNK=chunk,
        **arguments,
        maxnreg=REGISTERS if parts.memory * arguments["INNER"] <= ROOMY else None,
        num_warps=2 * WARPS if max(chunk, arguments["INNER"]) >= LARGE else WARPS,
    )
    return {"partial_ptr": partial, "pooled_ptr": partial, "num_blocks": blocks, "num_pools": 1}


def _measure_systems(n: int, parts: "HyperParts", arguments: dict[str, Any]) -> dict[str, Any]:
    """The first pass where all of a system has the same weights; what the second one takes from it."""
    firsts = _firsts(triton.cdiv(size, BLOCK) for size in arguments["sizes"])
    pool_firsts = _firsts(triton.cdiv(pool.channels, CHANNELS) for pool in parts.pools)
    blocks, pools = firsts[-1], pool_firsts[-1]
    slots = _power(parts.memory)
    partial = arguments["numbers_ptr"].new_empty((n, blocks, slots + 2))
    pooled = partial.new_empty((n, pools, 3, parts.width))
    measure_systems[(n, blocks + pools)](
        firsts=firsts,
        pool_firsts=pool_firsts,
        pools=tuple((pool.channels, pool.stride, pool.count, pool.pace, pool.offset) for pool in parts.pools),
        scales=tuple(pool.scale for pool in parts.pools),
        partial_ptr=partial,
        pooled_ptr=pooled,
        num_blocks=blocks,
        num_pools=pools,
        SLOTS=slots,
        BLOCK=BLOCK,
        CHANNELS=CHANNELS,
        TERMS=TERMS,
        SIGNED=any(pool.signed for pool in parts.pools),
        **arguments,
        num_warps=WARPS,
    )
    return {"partial_ptr": partial, "pooled_ptr": pooled, "num_blocks": blocks, "num_pools": pools}


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return int(triton.next_power_of_2(max(1, number)))


def _firsts(counts: Any) -> tuple[int, ...]:
    """Where each of several ranges begins that follow one another, and where the last one ends."""
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count)
    return tuple(firsts)
