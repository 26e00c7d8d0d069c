"""Exact implicit differentiation."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from equipoise._compat import inside_functorch_transform
from equipoise._problem import Problem
from equipoise._solution import BackwardRecord, Solution
from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.adjoints.base import Adjoint, Run, attach, finish, linear_solver, register_adjoint, run_adjoint
from equipoise.solvers.anderson import Anderson
from equipoise.solvers.base import Solver


@register_adjoint("implicit")
@dataclass(frozen=True)
class Implicit(Adjoint):
    """The gradient of the equilibrium itself, by the implicit function theorem.

    The forward solve records nothing. One evaluation of f at z* is kept; the backward pass solves u = Jᵀu + g with VJPs
    on it and sends u through it once. Memory: one f graph, whatever the number of steps.

    Attributes:
        solver: Solver of the adjoint equation.
        stop: Stop rule of the adjoint equation.
        any_order: Keep no graph, re-evaluate f in the backward pass, and allow derivatives of any order, forward mode
            and torch.func. The tensors f uses are made explicit arguments, so each evaluation of f costs more.
        throw: Raise `EquilibriumError` when an adjoint solve fails, instead of warning once.

    Reference: S. Bai, J. Z. Kolter, V. Koltun, Deep equilibrium models, NeurIPS 2019.
    """

    exact: ClassVar[bool] = True

    solver: Solver = Anderson()
    stop: Stop = Stop(rtol=1e-4)
    any_order: bool = False
    throw: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "solver", linear_solver("Implicit", self.solver))
        if not isinstance(self.stop, Stop):
            raise TypeError(f"Implicit: stop must be a Stop(...), got {type(self.stop).__name__}.")

    def solve(self, problem: Problem, z0: Leaves, run: Run) -> Solution:
        if self.any_order and (torch.is_grad_enabled() or inside_functorch_transform()):
            from equipoise.adjoints.any_order import solve_any_order

            return solve_any_order(problem, z0, run, self.solver, self.stop, self.throw)
        if inside_functorch_transform():
            raise RuntimeError(
                "a torch.func transform (grad, vmap, jvp, ...) around a solve needs adjoint=Implicit(any_order=True)."
            )
        with torch.no_grad():
            outcome = run(problem, [leaf.detach() for leaf in z0])
        if not torch.is_grad_enabled():
            return finish(problem, outcome)
        record = BackwardRecord()
        solve = run_adjoint(self.solver, self.stop, self.throw)
        value = attach("Implicit", problem, outcome.value, solve, record)
        return finish(problem, outcome, value, record=record)
