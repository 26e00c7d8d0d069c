"""When a solve ends: tolerances, limits, and what each dtype can resolve."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from equipoise._errors import require_count, require_number, unknown_name

NORMS = ("l2", "rms")
SELECTIONS = ("best", "last")

# Steps without a better iterate after which a residual at the rounding level is called final.
FLOOR_PATIENCE = 5


@dataclass(frozen=True)
class Stop:
    """Rules for ending a solve, applied to each system on its own.

    A system has converged when ‖f(z) − z‖ ≤ atol + rtol·‖f(z)‖. With `rtol = atol = 0` the budget is fixed: all
    `max_steps` evaluations are made, no early exit of any kind, and nothing is read on the host.

    Attributes:
        rtol: Relative tolerance.
        atol: Absolute tolerance, in the chosen norm.
        max_steps: The most evaluations of f.
        norm: "l2", or "rms" (l2 divided by the root of the number of unknowns; matters for `atol` only).
        select: "best" returns the measured iterate of lowest residual; "last" returns the final proposal, so that K
            plain evaluations are a K-layer network. The residual reported with "last" is its predecessor's.
        check_every: The host asks every so many steps whether all systems are done.
        plateau: Steps without a better iterate after which a system is given up; None for never.
        diverge: Growth of ‖f(z) − z‖ over its first value at which a system is given up.
    """

    rtol: float = 1e-5
    atol: float = 0.0
    max_steps: int = 100
    norm: str = "l2"
    select: str = "best"
    check_every: int = 1
    plateau: int | None = 20
    diverge: float = 1e6

    def __post_init__(self) -> None:
        # A relative tolerance of 1 or more accepts any start, z = 0 included.
        require_number("Stop", "rtol", self.rtol, low=0.0, high=1.0)
        require_number("Stop", "atol", self.atol, low=0.0)
        require_count("Stop", "max_steps", self.max_steps)
        require_count("Stop", "check_every", self.check_every)
        if self.plateau is not None:
            require_count("Stop", "plateau", self.plateau)
        if not isinstance(self.diverge, int | float) or not self.diverge > 1:
            raise ValueError(f"Stop: diverge must be a growth factor above 1 (inf for never), got {self.diverge!r}.")
        if self.norm not in NORMS:
            raise unknown_name("norm", self.norm, NORMS)
        if self.select not in SELECTIONS:
            raise unknown_name("select", self.select, SELECTIONS)
        if self.check_every > self.max_steps:
            raise ValueError(
                f"Stop: check_every={self.check_every} exceeds max_steps={self.max_steps}, so no check would ever "
                "happen. For a fixed budget without checks set rtol=0 and atol=0."
            )

    def with_budget(self, max_steps: int) -> "Stop":
        """The same rule with another limit of steps; the host asks at least once within it."""
        return dataclasses.replace(self, max_steps=max_steps, check_every=min(self.check_every, max(1, max_steps)))

    @property
    def fixed_budget(self) -> bool:
        """Whether every system makes exactly `max_steps` evaluations."""
        return self.rtol == 0 and self.atol == 0


def precision_floor(dtype: torch.dtype) -> float:
    """The relative residual below which rounding in f, computed in `dtype`, decides."""
    eps = torch.finfo(dtype).eps
    return (4 if dtype in (torch.bfloat16, torch.float16) else 16) * eps


def tiny_norm(dtype: torch.dtype) -> float:
    """Keeps 0/0 away in relative residuals without being felt anywhere else."""
    return math.sqrt(torch.finfo(dtype).tiny)
