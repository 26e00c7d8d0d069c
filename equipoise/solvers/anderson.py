"""Anderson acceleration."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._errors import require_count, require_number
from equipoise._history import History
from equipoise._tree import Leaves
from equipoise.solvers.base import Solver, State, register_solver

if TYPE_CHECKING:
    from equipoise._problem import Problem


@dataclass
class AndersonState(State):
    """Past images and residuals, the residuals' Gram matrix, and the weights used last."""

    images: History
    residuals: History
    gram: Tensor  # (N, m, m), by slot
    weights: Tensor  # (N, m), by slot


@register_solver("anderson")
@dataclass(frozen=True)
class Anderson(Solver):
    """The combination of recent iterates whose residuals cancel best, as the next iterate.

    With residuals g_i = f(z_i) − z_i of the last `memory` iterates, α minimises ‖Σ α_i g_i‖ under Σ α_i = 1, and the
    next iterate is Σ α_i (z_i + mixing·g_i). Cost per step: one f, one row of inner products, one weighted sum.
    Storage: 2·memory states.

    Attributes:
        memory: Iterates combined.
        mixing: Step along the combined residual.
        ridge: Regularisation, relative to each residual's own size: the Gram matrix is scaled to unit diagonal before
        it
            is added. An absolute ridge turns the weights uniform once residuals are small, and one relative to the mean
            slows larger memories.

    Reference: D. G. Anderson, Iterative procedures for nonlinear integral equations, J. ACM 12 (1965).
    """

    memory: int = 6
    mixing: float = 1.0
    ridge: float = 1e-8

    def __post_init__(self) -> None:
        require_count("Anderson", "memory", self.memory)
        require_number("Anderson", "mixing", self.mixing, low=0.0, high=2.0, open_low=True)
        require_number("Anderson", "ridge", self.ridge, low=0.0)

    def init(self, problem: "Problem", z: Leaves) -> tuple[Leaves, AndersonState]:
        differentiable = torch.is_grad_enabled()
        n, m = z[0].shape[0], self.memory
        return z, AndersonState(
            images=History(z, m, differentiable),
            residuals=History(z, m, differentiable),
            gram=z[0].new_zeros((n, m, m), dtype=torch.float64),
            weights=z[0].new_zeros((n, m)),
        )

    def propose(self, problem: "Problem", z: Leaves, fz: Leaves, state: State) -> tuple[Leaves, AndersonState]:
        assert isinstance(state, AndersonState)
        g = problem.residual(z, fz)
        slot = state.residuals.push(g)
        state.images.push(fz)
        filled = len(state.residuals)
        row = state.residuals.dots(g)[:, 0]  # (N, filled)
        gram = state.gram.clone() if torch.is_grad_enabled() else state.gram
        gram[:, slot, :filled] = row
        gram[:, :filled, slot] = row
        weights = residual_weights(gram[:, :filled, :filled], self.ridge, z[0].dtype, newest=slot)
        proposal = state.images.combine(weights)
        if self.mixing != 1.0:
            proposal = _leaves.axpy(proposal, self.mixing - 1.0, state.residuals.combine(weights))
        return proposal, AndersonState(state.images, state.residuals, gram, weights)


def residual_weights(gram: Tensor, ridge: float, work: torch.dtype, newest: int) -> Tensor:
    """argmin_α αᵀAα with Σα = 1 for Gram matrices A (N, k, k) whose entries carry rounding errors of `work`.

    A system whose matrix cannot be factorised, even with a ridge above the rounding level, gets a plain step: all
    weight on the newest slot.
    """
    lift, ones, units = _constants(gram.shape[1], max(ridge, torch.finfo(work).eps), work, gram.device)
    # (A + λ·diag A) w = 1 is the ridge on the matrix scaled to unit diagonal, with the scaling worked in.
    factor, info = torch.linalg.cholesky_ex(gram * lift)
    if torch.is_grad_enabled():  # the gradient of a failed factorisation is NaN, even where it is masked out
        usable = torch.where((info == 0)[:, None, None], gram * lift, torch.diag_embed(ones[:, 0]))
        factor = torch.linalg.cholesky_ex(usable)[0]
    solved = torch.cholesky_solve(ones.expand(len(gram), -1, 1), factor)[:, :, 0]
    weights = (solved / solved.sum(dim=1, keepdim=True)).to(work)
    return torch.where((info == 0)[:, None], weights, units[newest])


def _constants(k: int, ridge: float, work: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, list[Tensor]]:
    """1 + ridge·I and a column of ones in float64, and the unit vectors; kept, as a step is many small operations."""
    key = (k, ridge, work, device)
    if torch.compiler.is_compiling() or key not in _kept:
        with torch.inference_mode(False):  # else they could not be used where autograd is on
            identity = torch.eye(k, dtype=torch.float64, device=device)
            made = (1 + ridge * identity, identity.new_ones((k, 1)), list(identity.to(work).unbind()))
        if torch.compiler.is_compiling():
            return made
        _kept[key] = made
    return _kept[key]


_kept: dict[tuple[int, float, torch.dtype, torch.device], tuple[Tensor, Tensor, list[Tensor]]] = {}
