"""One step of a learned solver that adds a linear map of low rank of the residual to f(z), in two kernel launches."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.ops._backend import use_kernel
from equipoise.ops.hyper import LEAST, _obstacle_of_form
from equipoise.ops.low_rank import naive
from equipoise.ops.standing import Rules, Standing, require_fixed_budget
from equipoise.solvers._hyper_config import HyperConfig
from equipoise.solvers._hyper_nets import SequenceCorrection

if TYPE_CHECKING:
    from equipoise._problem import StateSpec
    from equipoise.solvers.hyper_anderson import HyperAnderson

# What a program of the kernels holds; loops over positions that are looked at are unrolled.
MOST_RANK = 128
MOST_REACH = 8


def obstacle(config: HyperConfig, spec: "StateSpec | None" = None) -> str | None:
    """Why `low_rank_step` does not do for a learned solver, if it does not.

    Args:
        config: Of the solver.
        spec: Of the states, if it is known already; they must be of the form that the solver was made for, and stored
            in the order of their axes.
    """
    if config.rank == 0:
        return "rank=0: there is no map of the residual"
    if config.weights != "newest" or config.mixing:
        return (
            f"weights={config.weights!r} and mixing={config.mixing}; it is for plain steps, with nothing but that map"
        )
    if config.kind != "sequence":
        return f"it is for maps of the residuals of positions, not of states of kind {config.kind!r}"
    if config.rank > MOST_RANK or config.reach > MOST_REACH:
        return f"rank {config.rank} or reach {config.reach}, above {MOST_RANK} or {MOST_REACH}"
    # Nothing is compressed, so what is said of that does not matter; positions of all leaves go together.
    return (
        None if spec is None else _obstacle_of_form(dataclasses.replace(config, compression="last", local=True), spec)
    )


def supports(config: HyperConfig, spec: "StateSpec | None" = None) -> bool:
    """Whether `low_rank_step` does for a learned solver; see `obstacle`."""
    return obstacle(config, spec) is None


@dataclass(frozen=True)
class LowRankParts:
    """What a step needs of a learned solver.

    Its tensors are the solver's parameters themselves, and copies of them: call `refresh` at the beginning of each
    solve. Copies are in float16, which has the digits of the products that they go into (tf32) in half the bytes:
    programs read little else. Their inner size is the least power of two, so that it need not be looked at.

    Attributes:
        down: (rank, D) from the residual of a position to few numbers.
        up: (D, reach·rank) back, from those of a position and the ones before it, the newest first.
        down_copy: (D, width) `down` in the order in which kernels read it.
        up_copy: (D, reach, width) likewise.
        reach: Positions that are looked at.
        rank: Of the map.
        positions: Of a system, T.
    """

    down: Tensor
    up: Tensor
    down_copy: Tensor
    up_copy: Tensor
    reach: int
    rank: int
    positions: int

    @classmethod
    def of(cls, solver: "HyperAnderson", spec: "StateSpec") -> "LowRankParts":
        """The parts of a solver for states of some form; an error if there is an `obstacle`."""
        config, reason = solver.config, obstacle(solver.config, spec)
        if reason is not None:
            raise ValueError(f"LowRankParts: no fused step for this solver: {reason}. Use HyperAnderson.propose.")
        assert isinstance(solver.correction, SequenceCorrection)
        down, up = solver.correction.down.weight, solver.correction.up.weight
        features, width = sum(config.state), max(LEAST, 1 << (config.rank - 1).bit_length())
        made = cls(
            down=down,
            up=up,
            down_copy=down.new_zeros((features, width), dtype=torch.float16, requires_grad=False),
            up_copy=up.new_zeros((features, config.reach, width), dtype=torch.float16, requires_grad=False),
            reach=config.reach,
            rank=config.rank,
            positions=spec.shapes[0][spec.batch_dims],
        )
        made.refresh()
        return made

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow changes of the parameters since this was made; two small copies."""
        self.down_copy[:, : self.rank].copy_(self.down.mT)
        self.up_copy[:, :, : self.rank].copy_(self.up.unflatten(1, (self.reach, self.rank)))

    @property
    def width(self) -> int:
        """Numbers per position as kernels store them, those beyond `rank` zero."""
        return self.down_copy.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.down, self.up, self.down_copy, self.up_copy


@dataclass
class LowRankMemory:
    """The storage of a solve, for N systems of T positions. A step needs nothing of the one before.

    Attributes:
        few: (N, T, width) the residual in few numbers.
        arrived: (N, T) int32, programs of a kernel that are done with some positions; zero between kernels.
    """

    few: Tensor
    arrived: Tensor

    @classmethod
    def empty(cls, z: Leaves, parts: LowRankParts) -> "LowRankMemory":
        """Storage for states like z."""
        n, work = z[0].shape[0], torch.float64 if z[0].dtype == torch.float64 else torch.float32
        return cls(
            few=z[0].new_zeros((n, parts.positions, parts.width), dtype=work),
            arrived=z[0].new_zeros((n, parts.positions), dtype=torch.int32),
        )


@torch.no_grad()
def low_rank_step(
    z: Leaves,
    fz: Sequence[Tensor],
    memory: LowRankMemory,
    standing: Standing,
    parts: LowRankParts,
    *,
    stop: Stop,
    floor: float = 0.0,
    out: Leaves | None = None,
    backend: str = "auto",
) -> None:
    """Measure the iterates z with images f(z), and replace them by f(z) + U·(V·(f(z) − z)). All in place.

    The formula is that of `HyperAnderson` with weights on the newest iterate alone, the rules are those of the driver;
    see `anderson_step` for what the steps promise. There is no gradient.

    Bytes moved per unknown, with dtypes of sizes z and f (fz): first pass z + f read; second pass f read, z written,
    and z read and written once more where the iterate is the best so far. In float32 16 bytes, with bfloat16 for f 12.
    On top come U and V, which are read from the cache once for every 16 to 64 positions.

    Args:
        z: Iterates, leaf by leaf (N, D_i); replaced.
        fz: Their images, same shapes; a narrower dtype is welcome.
        memory: Storage, from `LowRankMemory.empty`.
        standing: Progress, from `Standing.start`.
        parts: Of the solver, from `LowRankParts.of`.
        stop: When systems end. `check_every` and `max_steps` are the caller's business.
        floor: The relative residual at which rounding in f decides (`equipoise._stop.precision_floor`).
        out: With a fixed budget, where to write the proposals instead, as in `anderson_step`; saves 8 bytes.
        backend: "auto", "naive" or "triton".
    """
    require_fixed_budget("low_rank_step", out, stop)
    rules = Rules.of(stop, floor, sum(leaf.shape[1] for leaf in z), standing.residual.dtype)
    implementation: ModuleType = naive
    if use_kernel("low_rank_step", backend, (*z, *fz, *standing.best, *(out or ()), memory.few, *parts.tensors)):
        from equipoise.ops.low_rank import triton

        implementation = triton
    implementation.step(z, list(fz), memory, standing, parts, rules, out)
