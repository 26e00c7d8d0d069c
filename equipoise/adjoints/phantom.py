"""Gradients of a few steps at the equilibrium."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from equipoise import _leaves
from equipoise._errors import require_count, require_number
from equipoise._problem import Problem
from equipoise._solution import Solution
from equipoise._tree import Leaves
from equipoise.adjoints.base import Adjoint, Run, finish, graft, register_adjoint, sever


@register_adjoint("phantom")
@dataclass(frozen=True)
class Phantom(Adjoint):
    """Approximate: backpropagation through `steps` damped steps z ← (1 − damping)·z + damping·f(z) from z*.

    The value is z*; only its gradient is that of the steps. Memory: `steps` f graphs. Backward cost: `steps` VJPs.

    Attributes:
        steps: Steps to differentiate.
        damping: Share of f(z) in each.

    Reference: Z. Geng et al., On training implicit models, NeurIPS 2021.
    """

    exact: ClassVar[bool] = False

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        require_count("Phantom", "steps", self.steps)
        require_number("Phantom", "damping", self.damping, low=0.0, high=2.0, open_low=True)

    def solve(self, problem: Problem, z0: Leaves, run: Run) -> Solution:
        return _solve(problem, z0, run, "Phantom", self.steps, self.damping)


@register_adjoint("one_step")
@dataclass(frozen=True)
class OneStep(Adjoint):
    """Approximate: the gradient of f at z* with the dependence of z* on everything left out (Jacobian-free).

    The cheapest backward there is: one VJP. A descent direction where f contracts enough. Memory: one f graph.

    Reference: S. Wu Fung et al., JFB: Jacobian-free backpropagation, AAAI 2022.
    """

    exact: ClassVar[bool] = False

    def solve(self, problem: Problem, z0: Leaves, run: Run) -> Solution:
        return _solve(problem, z0, run, "OneStep", steps=1, damping=1.0)


def _solve(problem: Problem, z0: Leaves, run: Run, name: str, steps: int, damping: float) -> Solution:
    with torch.no_grad():
        outcome = run(problem, [leaf.detach() for leaf in z0])
    if not torch.is_grad_enabled():
        return finish(problem, outcome)
    z = outcome.value if steps == 1 and damping == 1.0 else sever(outcome.value)
    for _ in range(steps):
        fz = problem.evaluate(z)
        z = fz if damping == 1.0 else _leaves.axpy(z, damping, _leaves.subtract(fz, z))
    return finish(problem, outcome, graft(name, outcome.value, z))
