"""Backpropagation through the iteration."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils.checkpoint import checkpoint

from equipoise._problem import Problem
from equipoise._solution import Solution
from equipoise._tree import Leaves, Tree
from equipoise.adjoints.base import Adjoint, Run, finish, register_adjoint


@register_adjoint("unroll")
@dataclass(frozen=True)
class Unroll(Adjoint):
    """Exact for the iteration as it ran: warm-up stacks, explicit twins, learned solvers. Any order.

    With `Picard()` and `Stop(max_steps=L, rtol=0, select="last")` it is the weight-tied network of depth L. Memory: one f
    graph per step.

    Attributes:
        checkpoint: Keep each step's input only (but the first step whole), and evaluate f again in the backward pass.
    """

    exact: ClassVar[bool] = True

    checkpoint: bool = False

    def solve(self, problem: Problem, z0: Leaves, run: Run) -> Solution:
        if self.checkpoint and torch.is_grad_enabled():
            f, first = problem.f, problem.nfe

            def recomputed(z: Tree, *inputs: object) -> Tree:
                # The first evaluation fills the scope, whose values are computed once only: it cannot be repeated.
                if problem.nfe == first + 1:
                    return f(z, *inputs)
                return checkpoint(_within, problem, f, z, *inputs, use_reentrant=False)

            problem.f = recomputed
        return finish(problem, run(problem, z0))


def _within(problem: Problem, f: object, z: Tree, *inputs: object) -> Tree:
    """f in the scope of its solve, also when the backward pass recomputes it."""
    with problem.active():
        return f(z, *inputs)  # type: ignore[operator]
