"""One step of a learned solver that adds a matrix over channels times the residual to f(z), in one kernel launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.ops._backend import use_kernel
from equipoise.ops.channels import naive
from equipoise.ops.hyper import _obstacle_of_form
from equipoise.ops.standing import Rules, Standing
from equipoise.solvers._hyper_config import HyperConfig
from equipoise.solvers._hyper_nets import ImageCorrection

if TYPE_CHECKING:
    from equipoise._problem import StateSpec
    from equipoise.solvers.hyper_anderson import HyperAnderson


def obstacle(config: HyperConfig, spec: "StateSpec | None" = None) -> str | None:
    """Why `channels_follow` does not do for a learned solver, if it does not.

    Args:
        config: Of the solver.
        spec: Of the states, if it is known already; they must be of the form that the solver was made for, and stored
            channels last.
    """
    if config.kind != "images" or config.rank == 0:
        return f"it is for maps of channels, not for states of kind {config.kind!r} and rank {config.rank}"
    if config.weights != "newest" or config.mixing:
        return (
            f"weights={config.weights!r} and mixing={config.mixing}; it is for plain steps, with nothing but that map"
        )
    if spec is None:
        return None
    if any(order is None for order in spec.orders):
        return "channels are not stored last"
    return _obstacle_of_form(config, spec)


def supports(config: HyperConfig, spec: "StateSpec | None" = None) -> bool:
    """Whether `channels_follow` does for a learned solver; see `obstacle`."""
    return obstacle(config, spec) is None


@dataclass(frozen=True)
class ChannelsParts:
    """What a step needs of a learned solver.

    Attributes:
        matrices: By leaf (C, C), the solver's parameters themselves.
    """

    matrices: tuple[Tensor, ...]

    @classmethod
    def of(cls, solver: "HyperAnderson", spec: "StateSpec") -> "ChannelsParts":
        """The parts of a solver for states of some form; an error if there is an `obstacle`."""
        reason = obstacle(solver.config, spec)
        if reason is not None:
            raise ValueError(f"ChannelsParts: no fused step for this solver: {reason}. Use HyperAnderson.propose.")
        assert isinstance(solver.correction, ImageCorrection)
        return cls(tuple(weight.detach().flatten(1) for weight in solver.correction.parameters()))

    def refresh(self) -> None:
        """Nothing is a copy, so there is nothing to follow."""


@torch.no_grad()
def channels_follow(
    z: Leaves,
    fz: Sequence[Tensor],
    before: Leaves,
    standing: Standing,
    parts: ChannelsParts,
    *,
    stop: Stop,
    floor: float = 0.0,
    backend: str = "auto",
) -> Leaves:
    """Measure the iterates z with images f(z), and return the next ones, f(z) + A·(f(z) − z) at every pixel.

    The formula is that of `HyperAnderson` with weights on the newest iterate alone. As in `picard_follow` the budget is
    fixed, nothing is moved, and what is passed must stay as it is for two more steps; `picard_settle` must come after
    the last one. There is no gradient.

    Bytes moved per unknown, with dtypes of sizes z and f: z + f read, z written. In float32 12 bytes, with bfloat16 for
    f 10. On top come the matrices, and maps of more than 64 channels, which are read from the cache once for every 64.

    Args:
        z: Iterates, leaf by leaf (N, D_i), channels last.
        fz: Their images, same shapes; a narrower dtype is welcome.
        before: What z was two steps ago; in the first two steps anything of its shape.
        standing: Progress, from `Standing.start`.
        parts: Of the solver, from `ChannelsParts.of`.
        stop: Of a fixed budget.
        floor: As in `picard_step`.
        backend: "auto", "naive" or "triton".
    """
    if not stop.fixed_budget:
        raise ValueError(f"channels_follow: systems that end do not go on; expected a fixed budget, got {stop!r}.")
    rules = Rules.of(stop, floor, sum(leaf.shape[1] for leaf in z), standing.residual.dtype)
    implementation: ModuleType = naive
    if use_kernel("channels_follow", backend, (*z, *fz, *before, *standing.best, *parts.matrices)):
        from equipoise.ops.channels import triton

        implementation = triton
    followed: Leaves = implementation.follow(z, list(fz), before, standing, parts, rules)
    return followed
