"""Backtracking along a direction, per system, on the driver's own evaluations of f.

The merit is φ(t) = ‖g(z + t·p)‖² with the model slope φ'(0) = −φ(0), exact for a Newton direction. A trial point that
does not bring enough decrease is replaced by a shorter step from the same point; each trial is one ordinary driver
step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._tree import Leaves
from equipoise.solvers.base import State

ENOUGH = 1e-4  # share of the predicted decrease that a step must deliver
SHORTEST = 1e-2  # below this length the search gives up and takes the full step


@dataclass
class Trial(State):
    """The step under trial: from `point` along `direction`."""

    point: Leaves
    direction: Leaves
    length: Tensor  # (N,)
    merit: Tensor  # (N,) ‖g‖² at `point`
    forced: Tensor  # (N,) the search gave up: accept the full step whatever it brings

    @classmethod
    def start(cls, z: Leaves, direction: Leaves, merit: Tensor, length: float) -> "Trial":
        forced = torch.zeros_like(merit, dtype=torch.bool)
        return cls(z, direction, torch.full_like(merit, length), merit, forced)

    def accepts(self, merit: Tensor) -> Tensor:
        """Which systems keep the trial point, given ‖g‖² there."""
        return (merit <= (1 - ENOUGH * self.length) * self.merit) | self.forced

    def follow(self, accepted: Tensor, z: Leaves, direction: Leaves, merit: Tensor, length: float) -> "Trial":
        """A new direction from z for accepted systems, a shorter step along the old one for the others."""
        model = self.length * self.merit / (2 * merit.clamp_min(torch.finfo(merit.dtype).tiny))
        model = torch.where(torch.isfinite(model), model, 0.0)
        shorter = torch.clamp(model, 0.1 * self.length, 0.5 * self.length)
        failed = ~accepted & (shorter < SHORTEST)
        return Trial(
            point=_leaves.choose(accepted, z, self.point),
            direction=_leaves.choose(accepted, direction, self.direction),
            length=torch.where(accepted | failed, length, shorter),
            merit=torch.where(accepted, merit, self.merit),
            forced=failed,
        )

    @property
    def target(self) -> Leaves:
        """The point to try."""
        return _leaves.axpy(self.point, self.length, self.direction)
