"""Broyden's method on the inverse Jacobian of g(z) = f(z) − z, with one stored vector per step."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from equipoise import _leaves
from equipoise._errors import require_count, require_number
from equipoise._history import GROWTH, History
from equipoise._tree import Leaves
from equipoise.solvers.base import Solver, State, register_solver
from equipoise.solvers.line_search import Trial

if TYPE_CHECKING:
    from equipoise._problem import Problem


@dataclass
class BroydenState(State):
    """The operator H = −(I + Sᵀ M S), where the rows of S are the steps taken so far.

    The update for a step s adds u·(sᵀH), with u = ahead·s_next + behind·s. It stays pending until the next step is known,
    and so nothing but the steps has to be stored (docs/maths/broyden.md has the derivation).
    """

    steps: History  # S
    small: Tensor  # (N, slots, slots) M
    point: Leaves  # the iterate before; empty before the first step
    pending: Tensor  # (N, slots) sᵀH = −pending·S of the update to complete; zero for none
    ahead: Tensor  # (N,) times the length of the next step
    behind: Tensor  # (N,)
    slot: Tensor  # (N,) where that s is stored
    trial: Trial | None = None

    def apply(self, x: Leaves, transposed: bool = False) -> Leaves:
        """H x or Hᵀx, with the pending update left out."""
        k = len(self.steps)
        if k == 0:
            return [-leaf for leaf in x]
        small = self.small[:, :k, :k]
        weights = torch.bmm(self.steps.dots(x), small if transposed else small.mT)[:, 0]
        return [-leaf - part for leaf, part in zip(x, self.steps.combine(weights), strict=True)]


@register_solver("broyden")
@dataclass(frozen=True)
class Broyden(Solver):
    """Broyden's "good" method: a secant approximation of the inverse Jacobian, improved by rank one per step.

    Finds roots that repel the plain iteration. Cost per step: one f, one row of inner products and one weighted sum over
    the steps stored. Storage: one state per step taken (half of the usual pair form), or `memory` states.

    Attributes:
        memory: Steps kept; when full, the method restarts from the current point (overwriting a single one would break
            every later secant equation). None keeps all.
        step: Share of the quasi-Newton step to take.
        line_search: Shorten steps, per system, until ‖g‖ decreases; each trial costs one f.

    Reference: C. G. Broyden, Math. Comp. 19 (1965); the one-vector form is in C. T. Kelley, Iterative Methods for Linear
    and Nonlinear Equations, SIAM (1995), chapter 7.
    """

    memory: int | None = None
    step: float = 1.0
    line_search: bool = False

    def __post_init__(self) -> None:
        if self.memory is not None:
            require_count("Broyden", "memory", self.memory)
        require_number("Broyden", "step", self.step, low=0.0, high=2.0, open_low=True)
        if not isinstance(self.line_search, bool):
            raise ValueError(f"Broyden: line_search must be True or False, got {self.line_search!r}.")

    def init(self, problem: "Problem", z: Leaves) -> tuple[Leaves, BroydenState]:
        n, slots = z[0].shape[0], self.memory or GROWTH
        zero = z[0].new_zeros(n)
        return z, BroydenState(
            steps=History(z, self.memory, differentiable=torch.is_grad_enabled()),
            small=z[0].new_zeros((n, slots, slots)),
            point=[],
            pending=z[0].new_zeros((n, slots)),
            ahead=zero,
            behind=zero,
            slot=torch.zeros_like(zero, dtype=torch.int64),
        )

    def propose(self, problem: "Problem", z: Leaves, fz: Leaves, state: State) -> tuple[Leaves, BroydenState]:
        assert isinstance(state, BroydenState)
        g = problem.residual(z, fz)
        if not state.point or len(state.steps) == self.memory:
            return self._restart(problem, z, g, state)
        if state.trial is None:
            direction = self._update(g, _leaves.subtract(z, state.point), state)
            state.point = z
            return _leaves.axpy(z, self.step, direction), state
        merit = _leaves.dot(g, g)
        accepted = state.trial.accepts(merit)
        # A rejected trial stores a zero step, which changes nothing in H.
        nowhere = [torch.zeros_like(leaf) for leaf in z]
        s = _leaves.choose(accepted, _leaves.subtract(z, state.trial.point), nowhere)
        direction = self._update(g, s, state, state.trial.length, accepted)
        state.trial = state.trial.follow(accepted, z, direction, merit, self.step)
        state.point = state.trial.point
        return state.trial.target, state

    def _restart(self, problem: "Problem", z: Leaves, g: Leaves, state: BroydenState) -> tuple[Leaves, BroydenState]:
        """H = −I: a plain step."""
        fresh = self.init(problem, z)[1]
        fresh.steps, fresh.point = state.steps, z
        fresh.steps.clear()
        if self.line_search:
            fresh.trial = Trial.start(z, g, _leaves.dot(g, g), self.step)
        return _leaves.axpy(z, self.step, g), fresh

    def _update(
        self, g: Leaves, s: Leaves, state: BroydenState, length: Tensor | None = None, accepted: Tensor | None = None
    ) -> Leaves:
        """Take in the step s that led to residual g; return the direction −H g of the improved H.

        `length` is the share of the direction that s is, if it varies; systems not `accepted` keep their H.
        """
        k = state.steps.push(s)
        small = self._complete(state, k, length, accepted)[:, : k + 1, : k + 1]
        share = self.step if length is None else length
        products = state.steps.dots(g, s)  # (N, 2, k + 1)
        c, q = products[:, 0], products[:, 1]
        left = torch.bmm(q[:, None], small)[:, 0]
        left[:, k] += 1  # sᵀH = −left·S
        weights = torch.bmm(small, c[:, :, None])[:, :, 0]  # −H g = g + Sᵀ weights, before the update
        overlap, square = (left * c).sum(dim=1), q[:, k]
        reach = square / share
        pivot = reach - overlap  # sᵀH Δg
        # A vanishing pivot (no step, or one that would make H singular) is no ground for an update.
        safe = (pivot.abs() > math.sqrt(torch.finfo(square.dtype).eps) * reach) & (square > 0)
        pivot, square = torch.where(safe, pivot, 1.0), torch.where(safe, square, 1.0)
        along = torch.where(safe, reach / pivot, 1.0)
        weights = weights * along[:, None]
        if self._uneven:
            weights[:, k] += torch.where(safe, (1 - 1 / share) * overlap / pivot, 0.0)
        pending = pad(torch.where(safe[:, None], left, 0.0), (0, state.small.shape[2] - k - 1))
        slot = torch.full_like(state.slot, k)
        if accepted is None:
            state.pending, state.slot, state.ahead = pending, slot, share / square
        else:
            state.pending = torch.where(accepted[:, None], pending, state.pending)
            state.slot = torch.where(accepted, slot, state.slot)
            state.ahead = torch.where(accepted, share / square, state.ahead)
        if self._uneven:
            behind = (share - 1) / square
            state.behind = behind if accepted is None else torch.where(accepted, behind, state.behind)
        return _leaves.axpy(state.steps.combine(weights), along, g)

    @property
    def _uneven(self) -> bool:
        """Whether steps are anything but full quasi-Newton steps."""
        return self.step != 1.0 or self.line_search

    def _complete(self, state: BroydenState, k: int, length: Tensor | None, accepted: Tensor | None) -> Tensor:
        """Write the pending update into M now that its next step sits in slot k."""
        if k == state.small.shape[1]:
            state.small, state.pending = pad(state.small, (0, GROWTH, 0, GROWTH)), pad(state.pending, (0, GROWTH))
        small = state.small.clone() if torch.is_grad_enabled() else state.small
        ahead, behind = state.ahead / (self.step if length is None else length), state.behind
        if accepted is not None:
            ahead, behind = torch.where(accepted, ahead, 0.0), torch.where(accepted, behind, 0.0)
        small[:, k] = ahead[:, None] * state.pending
        if self._uneven:
            index = state.slot[:, None, None].expand(-1, 1, small.shape[2])
            small = small.scatter_add(1, index, (behind[:, None] * state.pending)[:, None])
        state.small = small
        return small
