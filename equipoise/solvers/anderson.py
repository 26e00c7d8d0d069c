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
    gram: Tensor  # (N, m, m), by slot, in float64 and with the ridge
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
            it is added. An absolute ridge turns the weights uniform once residuals are small, and one relative to the
            mean slows larger memories.
        bound: A system whose Σ|α_i| would exceed it takes the plain step; None for no bound. Long transients, as of
            layers that are causal in time early in training, make weights so large that the iteration may never
            settle where the plain one converges; 2 helps there. Where the plain iteration diverges it can harm.

    Reference: D. G. Anderson, Iterative procedures for nonlinear integral equations, J. ACM 12 (1965).
    """

    memory: int = 6
    mixing: float = 1.0
    ridge: float = 1e-8
    bound: float | None = None

    def __post_init__(self) -> None:
        require_count("Anderson", "memory", self.memory)
        require_number("Anderson", "mixing", self.mixing, low=0.0, high=2.0, open_low=True)
        require_number("Anderson", "ridge", self.ridge, low=0.0)
        if self.bound is not None:
            require_number("Anderson", "bound", self.bound, low=1.0)

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
        ridge = max(self.ridge, torch.finfo(z[0].dtype).eps)
        gram = self._with_row(state.gram, state.residuals.dots(g).squeeze(1), slot, ridge)
        known = gram if filled == self.memory else gram[:, :filled, :filled]
        if torch.is_grad_enabled():
            # Weights for residuals that are rounding of f(z) are constants: their derivatives are without bound.
            rounding = _leaves.norm(g).detach() <= problem.floor * _leaves.norm(fz).detach()
            known = torch.where(rounding[:, None, None], known.detach(), known)
        weights = residual_weights(known, z[0].dtype, slot, self.bound)
        proposal = state.images.combine(weights)
        if self.mixing != 1.0:
            proposal = _leaves.axpy(proposal, self.mixing - 1.0, state.residuals.combine(weights))
        return proposal, AndersonState(state.images, state.residuals, gram, weights)

    def _with_row(self, gram: Tensor, row: Tensor, slot: int, ridge: float) -> Tensor:
        """The Gram matrix with the inner products (N, filled) of the newest residual, its square raised by the ridge.

        (A + λ·diag A) w = 1 is the ridge on the matrix scaled to unit diagonal, with the scaling worked in.
        """
        row = row * _constants(self.memory, ridge, row.dtype, row.device)[slot][: row.shape[1]]
        if torch.is_grad_enabled():
            gram = gram.clone()  # autograd may have saved it
        known = gram if row.shape[1] == self.memory else gram[:, : row.shape[1], : row.shape[1]]
        known.select(1, slot).copy_(row)
        known.select(2, slot).copy_(row)
        return gram


def residual_weights(gram: Tensor, work: torch.dtype, newest: int, bound: float | None = None) -> Tensor:
    """argmin_α αᵀAα with Σα = 1 for Gram matrices A (N, k, k), ridge included, in the dtype `work`.

    A system whose matrix cannot be factorised, or with Σ|α| above `bound`, gets a plain step: all weight on the newest.
    """
    factor, info = torch.linalg.cholesky_ex(gram)
    grad = torch.is_grad_enabled()
    if grad:  # the gradient of a failed factorisation is NaN, even where it is masked out
        identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        factor = torch.linalg.cholesky_ex(torch.where((info == 0)[:, None, None], gram, identity))[0]
    solved = torch.cholesky_solve(gram.new_ones((len(gram), gram.shape[1], 1)), factor).squeeze(2)
    weights = (solved / solved.sum(dim=1, keepdim=True)).to(work)
    unfit = info if bound is None else (info != 0) | (weights.abs().sum(dim=1) > bound)
    if not grad and info.is_cpu and not torch.compiler.is_compiling() and unfit.nonzero().shape[0] == 0:
        return weights  # the usual case, for the price of one look
    plain = torch.zeros_like(weights)
    plain[:, newest] = 1.0
    return torch.where((unfit == 0)[:, None], weights, plain)


def _constants(k: int, ridge: float, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The rows of 1 + ridge·I; kept, because a step consists of small operations like making them."""
    key = (k, ridge, dtype, device)
    if torch.compiler.is_compiling() or key not in _kept:
        with torch.inference_mode(False):  # else they could not be used where autograd is on
            made = list((1 + ridge * torch.eye(k, dtype=torch.float64, device=device)).unbind())
        if torch.compiler.is_compiling():
            return made
        _kept[key] = made
    return _kept[key]


_kept: dict[tuple[int, float, torch.dtype, torch.device], list[Tensor]] = {}
