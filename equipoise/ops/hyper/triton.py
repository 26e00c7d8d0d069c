"""The kernels of `hyper_step`: measure (a tile of one system, the last of them weighs and judges), then move (a tile).

All programs of the first kernel stream through the state; what needs all of a position, or all of a system, is done by
whichever comes last, from parts that are added up in a fixed order.
"""

import math
from typing import TYPE_CHECKING, Any

import triton

from equipoise._tree import Leaves
from equipoise.ops import _kernels
from equipoise.ops.hyper import LEAST
from equipoise.ops.hyper._move import move
from equipoise.ops.hyper._positions import measure_positions
from equipoise.ops.hyper._systems import measure_systems
from equipoise.ops.standing import Rules, Standing

if TYPE_CHECKING:
    from equipoise.ops.hyper import HyperMemory, HyperParts

# Unknowns per program of passes over blocks, and the most features of a position among them.
BLOCK = 1024
WIDE = 128
WARPS = 4
# Positions whose weights one program finds, and features of them that one reads at once; it reads several times as many
# one after another where there would be more than so many programs.
POSITIONS = 16
FEATURES = 64
PROGRAMS = 528
MOST_SPAN = 4
# Of the product that compresses them: weights change by less than their own rounding would in bfloat16.
PRECISION = "tf32"
# Columns of its tiles from which on it has twice as many threads, and up to which the inner layer fits into so many
# registers of each: a processor holds several programs then. The network would take more, but few programs run it.
LARGE = 64
REGISTERS = 128
# Sums over a residual that one program makes at the least, terms that it reads at once, and numbers in all.
CHANNELS = 16
TERMS = 64
POOLED = 1024
# Parts of sums read at once.
MOST_CHUNK = 128
MOST_PARTS = 16


def step(
    z: Leaves,
    fz: Leaves,
    memory: "HyperMemory",
    standing: Standing,
    parts: "HyperParts",
    rules: Rules,
    out: Leaves | None,
) -> None:
    """See `hyper_step`."""
    n = z[0].shape[0]
    if n == 0:
        standing.count.add_(1)
        return
    rings = {**_leaves("images", memory.images), **_leaves("residuals", memory.residuals)}
    found: dict[str, Any] = {
        "weights_ptr": memory.weights,
        "mixing_ptr": memory.mixing,
        "action_ptr": standing.status.new_empty(1 + n),
        "MEMORY": parts.memory,
        "MIXING": parts.mixing,
    }
    network: dict[str, Any] = {
        "gram_ptr": memory.gram,
        "shares_ptr": memory.shares,
        "compression_ptr": parts.compression,
        "taps_ptr": parts.taps,
        "bias_ptr": parts.bias,
        "out_ptr": parts.out,
        "last_ptr": parts.last,
        "num_features": parts.compression.shape[1],
        "root": math.sqrt(sum(leaf.shape[1] for leaf in z) // parts.positions),
        "arrived_ptr": standing.arrived,
        "owed_ptr": standing.owed,
        "COMPRESSED": parts.compressed,
        "WIDTH": parts.width,
        "KIND": parts.weights,
        "FEW": max(_power(parts.compressed), LEAST),
        "INNER": max(_power(parts.width), LEAST),
        "SLOTS": _power(parts.memory),
        "COLUMNS": _power(parts.memory + 2),
        "TOLD": max(_power(parts.memory + 1), LEAST // 4),
        "APART": out is not None,
        **_kernels.judging(standing, rules),
    }
    leaves = {**_leaves("z", z), **_leaves("fz", fz), **rings}
    measure = _measure_positions if parts.local else _measure_systems
    measure(z, fz, memory, parts, {**leaves, **found, **network})
    _move(out or z, standing, parts, {**rings, **found})


def _measure_positions(
    z: Leaves, fz: Leaves, memory: "HyperMemory", parts: "HyperParts", arguments: dict[str, Any]
) -> None:
    """The first pass where positions have weights of their own."""
    n, down = z[0].shape[0], triton.cdiv(parts.positions, POSITIONS)
    sizes = tuple(leaf.shape[1] // parts.positions for leaf in z)
    chunk, span = _tiles(n * down, sizes)
    firsts = _firsts(triton.cdiv(size, chunk * span) for size in sizes)
    sums = memory.weights.new_empty((n, down, firsts[-1], POSITIONS, arguments["COLUMNS"]))
    measure_positions[(n * down * firsts[-1],)](
        **arguments,
        sizes=sizes,
        firsts=firsts,
        sums_ptr=sums,
        few_ptr=sums.new_empty((n, down, firsts[-1], POSITIONS, arguments["FEW"])),
        norms_ptr=sums.new_empty((n, down, 2)),
        gathered_ptr=memory.arrived,
        num_positions=parts.positions,
        num_down=down,
        ROWS=POSITIONS,
        CHUNK=chunk,
        SPAN=span,
        PARTS=min(_power(firsts[-1]), MOST_PARTS),
        NORMS=min(_power(down), MOST_CHUNK),
        UNIT=_unit(sizes, z, fz, memory),
        PRECISION=PRECISION,
        maxnreg=REGISTERS if arguments["INNER"] <= LARGE else None,
        num_warps=2 * WARPS if max(chunk, arguments["INNER"]) >= LARGE else WARPS,
        num_stages=1,
    )


def _tiles(strips: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Features that a program reads at once, and how many times, for so many strips of positions."""
    chunk = min(max(_power(max(sizes)), LEAST), FEATURES)
    programs = strips * sum(triton.cdiv(size, chunk) for size in sizes)
    return chunk, max(1, min(programs // PROGRAMS, triton.cdiv(max(sizes), chunk), MOST_SPAN))


def _measure_systems(
    z: Leaves, fz: Leaves, memory: "HyperMemory", parts: "HyperParts", arguments: dict[str, Any]
) -> None:
    """The first pass where all of a system has the same weights."""
    n, sizes = z[0].shape[0], tuple(leaf.shape[1] for leaf in z)
    looked_at = [i for i, pool in enumerate(parts.pools) if pool.channels > 0]
    pools = [parts.pools[i] for i in looked_at]
    terms = min(_power(max(pool.count for pool in pools)), TERMS)
    channels = min(max(POOLED // terms, CHANNELS), max(_power(max(pool.channels for pool in pools)), CHANNELS))
    firsts = _firsts(triton.cdiv(size, BLOCK) for size in sizes)
    pool_firsts = _firsts(triton.cdiv(pool.channels, channels) for pool in pools)
    sums = memory.weights.new_empty((n, firsts[-1], arguments["COLUMNS"]))
    measure_systems[(n * (firsts[-1] + pool_firsts[-1]),)](
        **arguments,
        **_leaves("pool_z", [z[i] for i in looked_at]),
        **_leaves("pool_fz", [fz[i] for i in looked_at]),
        sizes=sizes,
        firsts=firsts,
        pool_sizes=tuple(sizes[i] for i in looked_at),
        pool_firsts=pool_firsts,
        pools=tuple((pool.channels, pool.stride, pool.count, pool.pace, pool.offset) for pool in pools),
        scales=tuple(pool.scale for pool in pools),
        sums_ptr=sums,
        few_ptr=sums.new_empty((n, pool_firsts[-1], arguments["FEW"])),
        ROWS=max(1, LEAST // arguments["SLOTS"]),
        BLOCK=BLOCK,
        CHANNELS=channels,
        TERMS=terms,
        CHUNK=min(_power(firsts[-1]), MOST_CHUNK),
        POOL_CHUNK=min(_power(pool_firsts[-1]), MOST_PARTS),
        SIGNED=any(pool.signed for pool in pools),
        UNIT=_unit((), z, fz, memory),
        num_warps=WARPS,
    )


def _move(z: Leaves, standing: Standing, parts: "HyperParts", arguments: dict[str, Any]) -> None:
    """The second pass."""
    n, sizes = z[0].shape[0], tuple(leaf.shape[1] // parts.positions for leaf in z)
    wide = min(_power(max(sizes)), WIDE) if parts.local else BLOCK
    rows = max(1, BLOCK // wide)
    firsts = _firsts(triton.cdiv(parts.positions, rows) * triton.cdiv(size, wide) for size in sizes)
    strides = [stride for name, values in arguments.items() if name.endswith(("_rows", "_slots")) for stride in values]
    own = [leaf.stride(0) for leaf in (*z, *standing.best)]
    move[(n * firsts[-1],)](
        **_leaves("z", z),
        **_leaves("best", standing.best),
        **arguments,
        sizes=sizes,
        firsts=firsts,
        count_ptr=standing.count,
        num_rows=n,
        num_positions=parts.positions,
        ROWS=rows,
        WIDE=wide,
        UNIT=_common(*sizes, *strides, *own),
        num_warps=WARPS,
    )


def _leaves(name: str, leaves: Leaves) -> dict[str, Any]:
    """Tensors by leaf, (N, D_i) or rings (N, m, D_i), as kernels take them."""
    found: dict[str, Any] = {f"{name}_ptrs": tuple(leaves), f"{name}_rows": tuple(leaf.stride(0) for leaf in leaves)}
    if leaves[0].dim() == 3:
        found[f"{name}_slots"] = tuple(leaf.stride(1) for leaf in leaves)
    return found


def _unit(sizes: tuple[int, ...], z: Leaves, fz: Leaves, memory: "HyperMemory") -> int:
    """What all offsets of the first pass are a multiple of."""
    rings = (*memory.images, *memory.residuals)
    return _common(*sizes, *(stride for leaf in (*z, *fz, *rings) for stride in leaf.stride()[:-1]))


def _common(*numbers: int) -> int:
    """The greatest power of two, up to 8, that divides all numbers."""
    return math.gcd(8, *numbers)


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return int(triton.next_power_of_2(max(1, number)))


def _firsts(counts: Any) -> tuple[int, ...]:
    """Where each of several ranges begins that follow one another, and where the last one ends."""
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count)
    return tuple(firsts)
