"""Plain iteration."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise import _leaves
from equipoise._errors import require_number
from equipoise._tree import Leaves
from equipoise.solvers.base import Solver, State, register_solver

if TYPE_CHECKING:
    from equipoise._problem import Problem


@register_solver("picard")
@dataclass(frozen=True)
class Picard(Solver):
    """z ← (1 − damping)·z + damping·f(z).

    Converges where the damped map contracts; K undamped evaluations are the weight-tied network of depth K. Cost per
    step: one f. Storage: none.

    Attributes:
        damping: Share of f(z) in the next iterate; 1 is the plain iteration.
    """

    damping: float = 1.0

    def __post_init__(self) -> None:
        require_number("Picard", "damping", self.damping, low=0.0, high=2.0, open_low=True)

    def propose(self, problem: "Problem", z: Leaves, fz: Leaves, state: State) -> tuple[Leaves, State]:
        if self.damping == 1.0:
            return fz, state
        return _leaves.axpy(z, self.damping, problem.residual(z, fz)), state
