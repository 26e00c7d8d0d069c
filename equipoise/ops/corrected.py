"""One step of Anderson acceleration on images that a learned map has corrected: steps of others, put together."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.ops import channels, low_rank
from equipoise.ops.anderson import MOST_MEMORY, AndersonMemory, anderson_step
from equipoise.ops.channels import ChannelsParts, channels_follow
from equipoise.ops.low_rank import LowRankMemory, LowRankParts, low_rank_step
from equipoise.ops.standing import Standing
from equipoise.solvers._hyper_config import HyperConfig

if TYPE_CHECKING:
    from equipoise._problem import StateSpec
    from equipoise.solvers.hyper_anderson import HyperAnderson

# What is measured on the way to corrected images is not looked at: nothing ends by it.
ALWAYS = Stop(rtol=0.0, atol=0.0)


def obstacle(config: HyperConfig, spec: "StateSpec | None" = None) -> str | None:
    """Why `corrected_step` does not do for a learned solver, if it does not.

    Args:
        config: Of the solver.
        spec: Of the states, if it is known already.
    """
    if config.weights != "least_squares" or config.mixing or config.local:
        return (
            f"weights={config.weights!r}, mixing={config.mixing} and local={config.local}; it is for weights of least "
            "squares, one set for a system, and steps of length one"
        )
    if config.memory > MOST_MEMORY:
        return f"it holds {MOST_MEMORY} steps, not {config.memory}"
    correction = channels if config.kind == "images" else low_rank
    return correction.obstacle(dataclasses.replace(config, weights="newest"), spec)


def supports(config: HyperConfig, spec: "StateSpec | None" = None) -> bool:
    """Whether `corrected_step` does for a learned solver; see `obstacle`."""
    return obstacle(config, spec) is None


@dataclass(frozen=True)
class CorrectedParts:
    """What a step needs of a learned solver.

    Attributes:
        correction: Of its map.
        memory: Iterates combined.
    """

    correction: LowRankParts | ChannelsParts
    memory: int

    @classmethod
    def of(cls, solver: "HyperAnderson", spec: "StateSpec") -> "CorrectedParts":
        """The parts of a solver for states of some form; an error if there is an `obstacle`."""
        reason = obstacle(solver.config, spec)
        if reason is not None:
            raise ValueError(f"CorrectedParts: no fused step for this solver: {reason}. Use HyperAnderson.propose.")
        kind = ChannelsParts if solver.config.kind == "images" else LowRankParts
        return cls(kind.of(solver.plainly(), spec), solver.config.memory)

    def refresh(self) -> None:
        """Follow changes of the parameters since this was made."""
        self.correction.refresh()


class Workspace:
    """What steps write on the way to corrected images; none of it matters to the next step."""

    def __init__(self, z: Leaves, correction: LowRankParts | ChannelsParts) -> None:
        self.standing = dataclasses.replace(Standing.start(z), best=[])
        self.memory = LowRankMemory.empty(z, correction) if isinstance(correction, LowRankParts) else None


@dataclass
class CorrectedMemory(AndersonMemory):
    """The storage of a solve: Anderson's, with corrected images, and room for what is on the way to them.

    Attributes:
        workspace: That room.
    """

    workspace: Workspace

    @classmethod
    def of(cls, z: Leaves, parts: CorrectedParts, residual_dtype: torch.dtype | None = None) -> "CorrectedMemory":
        """Storage for states like z; corrections have more digits than half precision, so images are kept whole."""
        made = AndersonMemory.empty(z, parts.memory, residual_dtype=residual_dtype)
        return cls(**vars(made), workspace=Workspace(z, parts.correction))


@torch.no_grad()
def corrected_step(
    z: Leaves,
    fz: Leaves,
    memory: CorrectedMemory,
    standing: Standing,
    parts: CorrectedParts,
    *,
    stop: Stop,
    floor: float = 0.0,
    out: Leaves | None = None,
    backend: str = "auto",
) -> None:
    """Measure the iterates z with images f(z), and replace them by Anderson's proposals on corrected images.

    That is Σ α_i (f(z_i) + C(f(z_i) − z_i)), with the α of Anderson, by residuals as they are. The formula is that of
    `HyperAnderson` with weights of least squares and a rank; see `anderson_step` for what the steps promise. All in
    place, no gradient. Bytes moved are those of `low_rank_step` or `channels_follow` and of `anderson_step`, and 4 more
    per unknown, in which the latter reads what the former has written.

    Args:
        z: Iterates, leaf by leaf (N, D_i); replaced.
        fz: Their images, same shapes; a narrower dtype is welcome.
        memory: Storage, from `CorrectedMemory.of`.
        standing: Progress, from `Standing.start`.
        parts: Of the solver, from `CorrectedParts.of`.
        stop: When systems end. `check_every` and `max_steps` are the caller's business.
        floor: The relative residual at which rounding in f decides (`equipoise._stop.precision_floor`).
        out: With a fixed budget, where to write the proposals instead, as in `anderson_step`.
        backend: "auto", "naive" or "triton".
    """
    images = _corrected(z, fz, memory.workspace, parts.correction, backend)
    anderson_step(z, fz, memory, standing, stop=stop, floor=floor, out=out, images=images, backend=backend)


def _corrected(
    z: Leaves, fz: Leaves, workspace: Workspace, correction: LowRankParts | ChannelsParts, backend: str
) -> Leaves:
    """f(z) + C(f(z) − z), by plain steps whose standing nobody looks at."""
    if isinstance(correction, ChannelsParts):
        standing = dataclasses.replace(workspace.standing, best=z)  # copied onto itself, if at all
        return channels_follow(z, fz, z, standing, correction, stop=ALWAYS, backend=backend)
    assert workspace.memory is not None
    images = [torch.empty_like(leaf) for leaf in z]
    standing = dataclasses.replace(workspace.standing, best=images)  # likewise
    low_rank_step(z, fz, workspace.memory, standing, correction, stop=ALWAYS, out=images, backend=backend)
    return images
