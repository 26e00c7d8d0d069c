"""Reuse of the forward quasi-Newton matrix in the backward pass."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from equipoise._compat import reenter_autocast
from equipoise._errors import require_count
from equipoise._iterate import Outcome
from equipoise._problem import Problem
from equipoise._solution import BackwardRecord, Solution, Stats, Status
from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.adjoints.base import (
    Adjoint,
    AdjointProblem,
    AdjointSolve,
    Run,
    attach,
    finish,
    linear_solver,
    register_adjoint,
    run_adjoint,
)
from equipoise.solvers.anderson import Anderson
from equipoise.solvers.base import Solver
from equipoise.solvers.broyden import BroydenState


@register_adjoint("shine")
@dataclass(frozen=True)
class Shine(Adjoint):
    """Approximate: the adjoint from Broyden's forward approximation of the inverse Jacobian, then refined.

    Needs `solver=Broyden()` in the forward solve. Memory: one f graph and Broyden's steps.

    Attributes:
        refine: Steps of the adjoint equation taken from that start; 0 costs no VJP but the last and measures no
        residual.
        solver: Solver of those steps.

    Reference: Z. Ramzi et al., SHINE: sharing the inverse estimate, ICLR 2022.
    """

    exact: ClassVar[bool] = False

    refine: int = 0
    solver: Solver = Anderson()

    def __post_init__(self) -> None:
        require_count("Shine", "refine", self.refine, low=0)
        object.__setattr__(self, "solver", linear_solver("Shine", self.solver))

    def solve(self, problem: Problem, z0: Leaves, run: Run) -> Solution:
        with torch.no_grad():
            outcome = run(problem, [leaf.detach() for leaf in z0], keep_state=True)
        state, outcome.state = outcome.state, None
        if not isinstance(state, BroydenState):
            raise ValueError("adjoint=Shine(...) reuses Broyden's matrix: pass solver=Broyden() for the forward solve.")
        if not torch.is_grad_enabled():
            return finish(problem, outcome)
        record = BackwardRecord()
        value = attach("Shine", problem, outcome.value, self._adjoint(state), record)
        return finish(problem, outcome, value, record=record)

    def _adjoint(self, state: BroydenState) -> AdjointSolve:
        def start(cotangent: Leaves) -> Leaves:  # (I − J)⁻ᵀ g ≈ −Hᵀ g
            with reenter_autocast(cotangent[0].device.type, None):  # autocast is for f
                return [-leaf for leaf in state.apply(cotangent, transposed=True)]

        if self.refine > 0:
            stop = Stop(rtol=0, max_steps=self.refine, select="last")
            return run_adjoint(self.solver, stop, throw=False, start=start)

        def unrefined(problem: AdjointProblem) -> Outcome:
            u = start(problem.cotangent)
            unknown = torch.full_like(u[0][:, 0], torch.nan)
            status = torch.full_like(unknown, Status.MAX_STEPS, dtype=torch.int64)
            return Outcome(u, Stats(status, unknown, torch.zeros_like(status)))

        return unrefined
