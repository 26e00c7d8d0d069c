"""The kernels of `low_rank_step`: measure (a tile of one system, the last of them judges), then move (a tile of all).

All programs of the first kernel stream through the state; what needs all of a position, or all of a system, is done by
whichever comes last, from parts that are added up in a fixed order.
"""

from typing import TYPE_CHECKING, Any

import triton

from equipoise._tree import Leaves
from equipoise.ops import _kernels
from equipoise.ops.hyper import LEAST
from equipoise.ops.hyper.triton import _common, _firsts, _leaves, _power
from equipoise.ops.low_rank._measure import measure
from equipoise.ops.low_rank._move import move
from equipoise.ops.standing import Rules, Standing

if TYPE_CHECKING:
    from equipoise.ops.low_rank import LowRankMemory, LowRankParts

# Positions that a program of the first pass measures, and features of them that it reads at once; where there would be
# more programs than a device holds it reads twice as many, or several times, the next on their way meanwhile.
POSITIONS = 16
FEATURES = 64
PROGRAMS = 720
MOST_SPAN = 4
MEASURE_WARPS = 4
# Positions of any systems that a program of the second pass moves at the most, and features of them; fewer where there
# would be less than so many programs. The matrix is read once for each such tile.
MOVED = 64
WIDE = 64
FEWEST = 350
MOVE_WARPS = 8
# Tiles that are read ahead; what waits in shared memory takes no registers.
STAGES = 3
# Of products: they change a residual by less than rounding to bfloat16 would.
PRECISION = "tf32"
# Parts of sums read at once.
MOST_CHUNK = 128
MOST_PARTS = 8


def step(
    z: Leaves,
    fz: Leaves,
    memory: "LowRankMemory",
    standing: Standing,
    parts: "LowRankParts",
    rules: Rules,
    out: Leaves | None,
) -> None:
    """See `low_rank_step`."""
    n = z[0].shape[0]
    if n == 0:
        standing.count.add_(1)
        return
    sizes = tuple(leaf.shape[1] // parts.positions for leaf in z)
    shared: dict[str, Any] = {
        **_leaves("fz", fz),
        "sizes": sizes,
        "few_ptr": memory.few,
        "action_ptr": standing.status.new_empty(1 + n),
        "num_positions": parts.positions,
        "FEW": parts.width,
        "PRECISION": PRECISION,
    }
    _measure(z, fz, memory, standing, parts, rules, {**shared, "APART": out is not None})
    _move(out or z, fz, standing, parts, {**shared, "FIXED": rules.fixed})


def _measure(
    z: Leaves,
    fz: Leaves,
    memory: "LowRankMemory",
    standing: Standing,
    parts: "LowRankParts",
    rules: Rules,
    arguments: dict[str, Any],
) -> None:
    """The first pass."""
    n, sizes, down = z[0].shape[0], arguments["sizes"], triton.cdiv(parts.positions, POSITIONS)
    chunk, span = _tiles(n * down, sizes)
    firsts = _firsts(triton.cdiv(size, chunk * span) for size in sizes)
    measure[(n * down * firsts[-1],)](
        **_leaves("z", z),
        **arguments,
        **_kernels.judging(standing, rules),
        firsts=firsts,
        down_ptr=parts.down_copy,
        parts_ptr=memory.few.new_empty((n, down, firsts[-1], parts.width, POSITIONS)),
        norms_ptr=memory.few.new_empty((n, down, firsts[-1], 2)),
        gathered_ptr=memory.arrived,
        arrived_ptr=standing.arrived,
        owed_ptr=standing.owed,
        num_down=down,
        ROWS=POSITIONS,
        CHUNK=chunk,
        SPAN=span,
        PARTS=min(_power(firsts[-1]), MOST_PARTS),
        NORMS=min(_power(down * firsts[-1]), MOST_CHUNK),
        UNIT=_common(*sizes, *(leaf.stride(0) for leaf in (*z, *fz))),
        num_warps=MEASURE_WARPS,
        num_stages=STAGES,
    )


def _tiles(strips: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Features that a program reads at once, and how many times, for so many strips of positions."""
    chunk = min(max(_power(max(sizes)), LEAST), FEATURES)
    programs = strips * sum(triton.cdiv(size, chunk) for size in sizes)
    span = max(1, min(triton.cdiv(programs, PROGRAMS), triton.cdiv(max(sizes), chunk), MOST_SPAN))
    return (2 * chunk, 1) if span == 2 else (chunk, span)


def _move(z: Leaves, fz: Leaves, standing: Standing, parts: "LowRankParts", arguments: dict[str, Any]) -> None:
    """The second pass."""
    lines, sizes = z[0].shape[0] * parts.positions, arguments["sizes"]
    wide = min(max(_power(max(sizes)), LEAST), WIDE)
    firsts = _firsts(triton.cdiv(size, wide) for size in sizes)
    rows = _rows(lines, firsts[-1])
    strips = triton.cdiv(lines, rows)
    move[(strips * firsts[-1],)](
        **_leaves("z", z),
        **_leaves("best", standing.best),
        **arguments,
        firsts=firsts,
        up_ptr=parts.up_copy,
        count_ptr=standing.count,
        num_lines=lines,
        num_strips=strips,
        REACH=parts.reach,
        ROWS=rows,
        WIDE=wide,
        UNIT=_common(*sizes, *(leaf.stride(0) for leaf in (*z, *fz, *standing.best))),
        num_warps=MOVE_WARPS if rows > LEAST else MOVE_WARPS // 2,
        num_stages=STAGES,
    )


def _rows(lines: int, across: int) -> int:
    """Positions of a tile of the second pass, of so many in all, with so many tiles beside one another."""
    rows = MOVED
    while rows > LEAST and triton.cdiv(lines, rows) * across < FEWEST:
        rows //= 2
    return rows
