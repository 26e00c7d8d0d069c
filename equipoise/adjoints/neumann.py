"""A truncated Neumann series for the adjoint."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from equipoise._errors import require_count
from equipoise._problem import Problem
from equipoise._solution import BackwardRecord, Solution
from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.adjoints.base import Adjoint, Run, attach, finish, register_adjoint, run_adjoint
from equipoise.solvers.picard import Picard


@register_adjoint("neumann")
@dataclass(frozen=True)
class Neumann(Adjoint):
    """Approximate: u = Σ_{i ≤ terms} (Jᵀ)ⁱ g, that is `terms` plain steps of the adjoint equation.

    The error falls like ρ(J)^terms and does not fall at all when ρ(J) ≥ 1. Memory: one f graph.

    Attributes:
        terms: Vector-Jacobian products.
    """

    exact: ClassVar[bool] = False

    terms: int = 5

    def __post_init__(self) -> None:
        require_count("Neumann", "terms", self.terms)

    def solve(self, problem: Problem, z0: Leaves, run: Run) -> Solution:
        with torch.no_grad():
            outcome = run(problem, [leaf.detach() for leaf in z0])
        if not torch.is_grad_enabled():
            return finish(problem, outcome)
        record = BackwardRecord()
        solve = run_adjoint(Picard(), Stop(rtol=0, max_steps=self.terms, select="last"), throw=False)
        return finish(problem, outcome, attach("Neumann", problem, outcome.value, solve, record), record=record)
