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

    The update for a step s adds u·(sᵀH), and u lies in the span of s and the step that follows it. So its row of M is
    written ahead of that step, and nothing but the steps has to be stored (docs/maths/broyden.md has the derivation).
    """

    steps: History  # S
    small: Tensor  # (N, slots + 1, slots + 1) M; the row after the newest slot awaits the next step
    point: Leaves  # the iterate before; empty before the first step
    # Where steps are not full ones, the awaited update also has a row at the slot of its own step.
    late: Tensor | None = None  # (N, slots + 1)
    slot: Tensor | None = None  # (N,)
    trial: Trial | None = None

    def apply(self, x: Leaves, transposed: bool = False) -> Leaves:
        """H x or Hᵀx, as far as its updates are complete: without the one that awaits the next step."""
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

    Finds roots that repel the plain iteration. Cost per step: one f, one row of inner products and one weighted sum
    over the steps stored. Storage: one state per step taken (half of the usual pair form), or `memory` states.

    Attributes:
        memory: Steps kept; when full, the method restarts from the current point (overwriting a single one would break
            every later secant equation). None keeps all.
        step: Share of the quasi-Newton step to take.
        line_search: Shorten steps, per system, until ‖g‖ decreases; each trial costs one f.

    Reference: C. G. Broyden, Math. Comp. 19 (1965); the one-vector form is in C. T. Kelley, Iterative Methods for
    Linear and Nonlinear Equations, SIAM (1995), chapter 7.
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
        slots = (self.memory or GROWTH) + 1
        return z, BroydenState(
            steps=History(z, self.memory, differentiable=torch.is_grad_enabled()),
            small=z[0].new_zeros((z[0].shape[0], slots, slots)),
            point=[],
        )

    def propose(self, problem: "Problem", z: Leaves, fz: Leaves, state: State) -> tuple[Leaves, BroydenState]:
        assert isinstance(state, BroydenState)
        g = problem.residual(z, fz)
        if not state.point or len(state.steps) == self.memory:
            return self._restart(problem, z, g, state)
        if state.trial is None:
            along, weights = self._update(g, *state.steps.push_difference(z, state.point), state)
            state.point = z
            along = along.unsqueeze(1)
            ahead = [torch.addcmul(x, along, y, value=self.step) for x, y in zip(z, g, strict=True)]
            return state.steps.combine(weights, onto=ahead, scale=self.step), state
        merit = _leaves.dot(g, g)
        accepted = state.trial.accepts(merit)
        # A rejected trial stores a zero step, which changes nothing in H.
        nowhere = [torch.zeros_like(leaf) for leaf in z]
        s = _leaves.choose(accepted, _leaves.subtract(z, state.trial.point), nowhere)
        along, weights = self._update(g, state.steps.push(s), s, state, state.trial.length, accepted)
        direction = state.steps.combine(weights, onto=[along[:, None] * leaf for leaf in g])
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
        self,
        g: Leaves,
        k: int,
        s: Leaves,
        state: BroydenState,
        length: Tensor | None = None,
        accepted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take in the step s, stored in slot k, that led to residual g; return −H g as along·g + Sᵀ·weights.

        `length` is the share of its direction that s is, where that varies; systems not `accepted` have s = 0.
        """
        small = self._writable(state, k)
        uneven = self.step != 1.0 or length is not None
        waiting = self._complete(state, small, k, length, accepted) if uneven else None
        operator = small[:, : k + 1, : k + 1]
        if torch.is_grad_enabled():
            operator = operator.clone()  # autograd saves it, and more is written into M below
        products = state.steps.dots(g, s)  # (N, 2, k + 1)
        c, q = products.unbind(1)
        weights = torch.bmm(operator, c.unsqueeze(2)).squeeze(2)  # −H g = g + Sᵀ weights, before the update
        left = torch.bmm(q.unsqueeze(1), operator).squeeze(1)
        left.select(1, k).add_(1)  # sᵀH = −left·S
        overlap = torch.linalg.vecdot(left, c)
        square = q.select(1, k)
        share = self.step if length is None else length
        reach = square if self.step == 1.0 and length is None else square / share
        pivot = reach - overlap  # sᵀH Δg
        along = reach / pivot
        # No step, or one that would make H singular, is no ground for an update. NaN counts as unsafe.
        unsafe = torch.logical_not(along.abs() < 1 / math.sqrt(torch.finfo(square.dtype).eps))
        if torch.is_grad_enabled():  # the gradient of a NaN is NaN, even where it is masked out
            square, reach, pivot = (term.masked_fill(unsafe, 1.0) for term in (square, reach, pivot))
            along = reach / pivot
        along = along.masked_fill(unsafe, 1.0)
        row = (left / square.unsqueeze(1)).masked_fill_(unsafe.unsqueeze(1), 0.0)
        weights = weights * along.unsqueeze(1)
        if uneven:
            weights[:, k] += (overlap * (share - 1) / square * along).masked_fill(unsafe, 0.0)
            self._postpone(state, row, k, length, accepted)
        small.select(1, k + 1).narrow(1, 0, k + 1).copy_(row if length is None else row * length[:, None])
        if accepted is not None and waiting is not None:
            small[:, k + 1] += torch.where(accepted[:, None], 0.0, waiting)
        return along, weights

    def _complete(
        self, state: BroydenState, small: Tensor, k: int, length: Tensor | None, accepted: Tensor | None
    ) -> Tensor | None:
        """Finish the awaited update now that its next step sits in slot k; return its row if it may wait on."""
        late, waiting = state.late, None
        if length is not None and accepted is not None:
            waiting = small[:, k].clone()
            small[:, k] = torch.where(accepted[:, None], waiting / length[:, None], 0.0)
            late = None if late is None else torch.where(accepted[:, None], late, 0.0)
        if late is not None and state.slot is not None:
            index = state.slot[:, None, None].expand(-1, 1, late.shape[1])
            small[:, :, : late.shape[1]].scatter_add_(1, index, late[:, None])
        return waiting

    def _postpone(
        self, state: BroydenState, row: Tensor, k: int, length: Tensor | None, accepted: Tensor | None
    ) -> None:
        """Note the part of the new update that belongs to its own step."""
        late = pad((self.step - 1) * row if length is None else (length - 1)[:, None] * row, (0, 1))
        slot = torch.full((len(row),), k, device=row.device)
        if accepted is not None and state.late is not None and state.slot is not None:
            late = torch.where(accepted[:, None], late, pad(state.late, (0, late.shape[1] - state.late.shape[1])))
            slot = torch.where(accepted, slot, state.slot)
        state.late, state.slot = late, slot

    @staticmethod
    def _writable(state: BroydenState, k: int) -> Tensor:
        """M with room for row k + 1; a copy if autograd may have saved it."""
        if k + 2 > state.small.shape[1]:
            state.small = pad(state.small, (0, GROWTH, 0, GROWTH))
        elif torch.is_grad_enabled():
            state.small = state.small.clone()
        return state.small
