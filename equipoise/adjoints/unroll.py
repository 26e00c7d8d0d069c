"""Backpropagation through the iteration."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils.checkpoint import checkpoint

from equipoise._compat import reenter_autocast
from equipoise._lift import pinned
from equipoise._problem import Problem
from equipoise._solution import Solution
from equipoise._tree import Leaves, Tree
from equipoise.adjoints.base import Adjoint, Run, finish, register_adjoint


@register_adjoint("unroll")
@dataclass(frozen=True)
class Unroll(Adjoint):
    """Exact for the iteration as it ran: warm-up stacks, explicit twins, learned solvers. Any order.

    With `Picard()` and `Stop(max_steps=L, rtol=0, select="last")` it is the weight-tied network of depth L. Memory:
    one f graph per step.

    Attributes:
        checkpoint: Keep each step's input only (but the first step whole), and evaluate f again in the backward pass.
    """

    exact: ClassVar[bool] = True

    checkpoint: bool = False

    def solve(self, problem: Problem, z0: Leaves, run: Run) -> Solution:
        if self.checkpoint and torch.is_grad_enabled():
            problem.f = _Recomputed(problem)
        outcome = run(problem, z0)
        if problem.num_systems == 0 and torch.is_grad_enabled():  # no step was taken: take one, for the graph
            outcome.value = problem.evaluate(z0)
        return finish(problem, outcome)


class _Recomputed:
    """f, recomputed in the backward pass: in the scope of its solve, with the tensors that it had then."""

    def __init__(self, problem: Problem) -> None:
        self.f = pinned(problem.f)
        self.scope, self.autocast, self.device = problem.scope, problem.autocast, problem.spec.device.type
        self.first = True

    def __call__(self, z: Tree, *inputs: object) -> Tree:
        if self.first:  # it fills the scope, whose values are computed once only, so it cannot be repeated
            self.first = False
            return self.f(z, *inputs)
        return checkpoint(self._within, z, *inputs, use_reentrant=False)

    def _within(self, z: Tree, *inputs: object) -> Tree:
        with self.scope, reenter_autocast(self.device, self.autocast):
            return self.f(z, *inputs)
