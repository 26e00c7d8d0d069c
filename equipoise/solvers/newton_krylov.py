"""Newton's method with matrix-free linear solves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._errors import require_count, require_number
from equipoise._history import History
from equipoise._tree import Leaves
from equipoise.solvers.base import Solver, State, register_solver
from equipoise.solvers.line_search import Trial

if TYPE_CHECKING:
    from equipoise._problem import Problem


@dataclass(frozen=True)
class GMRES:
    """Settings of the linear solve (I − J)·p = f(z) − z: at most `max_steps` Jacobian-vector products, to `rtol`."""

    max_steps: int = 30
    rtol: float = 1e-3

    def __post_init__(self) -> None:
        require_count("GMRES", "max_steps", self.max_steps)
        require_number("GMRES", "rtol", self.rtol, low=0.0, high=1.0)

    def solve(self, problem: "Problem", z: Leaves, g: Leaves) -> Leaves:
        """p with (I − J(z))·p ≈ g, per system.

        Gram–Schmidt runs twice, so the basis stays orthogonal in float32. A system that is done, or that breaks down
        luckily, continues with zero vectors, which add nothing.
        """
        n, device = g[0].shape[0], g[0].device
        start = _leaves.norm(g)
        basis = History(g, capacity=None)
        vector = _scaled(g, start)
        hessenberg = torch.zeros((n, self.max_steps + 1, self.max_steps), dtype=torch.float64, device=device)
        for k in range(self.max_steps):
            basis.push(vector)
            image = _leaves.subtract(vector, problem.jvp(z, vector))
            column = torch.zeros((n, k + 1), dtype=g[0].dtype, device=device)
            for _ in range(2):
                overlaps = basis.dots(image)[:, 0]
                image = _leaves.subtract(image, basis.combine(overlaps))
                column = column + overlaps
            size = _leaves.norm(image)
            size = torch.where(size > torch.finfo(size.dtype).eps * column.abs().amax(dim=1), size, 0.0)
            hessenberg[:, : k + 1, k], hessenberg[:, k + 1, k] = column.double(), size.double()
            weights, remaining = _least_squares(hessenberg[:, : k + 2, : k + 1], start.double())
            unmet = remaining > self.rtol * start
            if not bool(unmet.any()):
                break
            # A system that is done gets a zero vector, so that its result does not depend on its batch mates.
            vector = _scaled(image, torch.where(unmet, size, 0.0))
        return basis.combine(weights.to(g[0].dtype))


def _scaled(a: Leaves, size: Tensor) -> Leaves:
    inverse = torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 0.0)
    return [leaf * inverse[:, None] for leaf in a]


def _least_squares(hessenberg: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """argmin ‖start·e₁ − H y‖ and that minimum, for H (N, k + 1, k) with possibly zero columns."""
    target = torch.zeros_like(hessenberg[:, :, 0])
    target[:, 0] = start
    q, r = torch.linalg.qr(hessenberg)
    diagonal = r.diagonal(dim1=1, dim2=2)
    scale = diagonal.abs().amax(dim=1, keepdim=True)
    dead = diagonal.abs() <= 1e-14 * scale  # zero vectors after a breakdown
    r = r + torch.diag_embed(torch.where(dead, torch.where(scale > 0, scale, 1.0), 0.0))
    right = torch.where(dead, 0.0, torch.bmm(q.mT, target[:, :, None])[:, :, 0])
    y = torch.linalg.solve_triangular(r, right[:, :, None], upper=True)
    left_over = target - torch.bmm(hessenberg, y)[:, :, 0]
    return y[:, :, 0], torch.linalg.vector_norm(left_over, dim=1)


@dataclass
class NewtonState(State):
    trial: Trial | None = None


@register_solver("newton")
@dataclass(frozen=True)
class NewtonKrylov(Solver):
    """Newton's method on f(z) − z, each step solved by GMRES on Jacobian-vector products, with backtracking.

    Quadratic near the root and indifferent to ρ(J) > 1; the last resort of a `Ladder`. Cost per step: one f and up to
    `linear.max_steps` products, all counted. Storage: as many states, during the step only.

    Attributes:
        linear: The linear solver.

    Reference: D. A. Knoll and D. E. Keyes, Jacobian-free Newton–Krylov methods, J. Comput. Phys. 193 (2004).
    """

    capturable: ClassVar[bool] = False  # the linear solve ends on the host's word

    linear: GMRES = GMRES()

    def __post_init__(self) -> None:
        if not isinstance(self.linear, GMRES):
            raise TypeError(f"NewtonKrylov: linear must be a GMRES(...), got {type(self.linear).__name__}.")

    def init(self, problem: "Problem", z: Leaves) -> tuple[Leaves, NewtonState]:
        return z, NewtonState()

    def propose(self, problem: "Problem", z: Leaves, fz: Leaves, state: State) -> tuple[Leaves, NewtonState]:
        assert isinstance(state, NewtonState)
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in fz):
            raise ValueError(
                "NewtonKrylov cannot be unrolled: its linear solves are not differentiated. Implicit() gives the "
                "gradient of the equilibrium; Unroll() takes Picard, Anderson or Broyden."
            )
        g = problem.residual(z, fz)
        merit = _leaves.dot(g, g)
        if state.trial is None:
            trial = Trial.start(z, self.linear.solve(problem, z, g), merit, 1.0)
        else:
            accepted = state.trial.accepts(merit)
            direction = self.linear.solve(problem, z, g) if bool(accepted.any()) else state.trial.direction
            trial = state.trial.follow(accepted, z, direction, merit, 1.0)
        return trial.target, NewtonState(trial)
