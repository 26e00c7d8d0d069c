"""The solver interface and its registry.

A solver maps the newest pair (z, f(z)) to the next z. Everything else (counting, stopping, freezing, the best iterate,
refusing non-finite values, traces) belongs to the driver.
"""

import abc
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from equipoise._history import History
from equipoise._registry import Registry
from equipoise._tree import Leaves

if TYPE_CHECKING:
    from equipoise._iterate import Outcome
    from equipoise._problem import Problem
    from equipoise._stop import Stop


@dataclass
class State:
    """What a solver remembers between steps: tensors whose first axis is N, leaves, histories."""

    def rows(self, index: Tensor) -> "State":
        """The state of a subset of systems."""
        return dataclasses.replace(
            self, **{f.name: _take(getattr(self, f.name), index) for f in dataclasses.fields(self) if f.init}
        )

    @property
    def nbytes(self) -> int:
        """Storage held."""
        return sum(_nbytes(getattr(self, f.name)) for f in dataclasses.fields(self))


def _take(item: Any, index: Tensor) -> Any:
    if isinstance(item, Tensor):
        return item.index_select(0, index)
    if isinstance(item, list):
        return [_take(part, index) for part in item]
    return item.rows(index) if isinstance(item, History | State) else item


def _nbytes(item: Any) -> int:
    if isinstance(item, list):
        return sum(_nbytes(part) for part in item)
    return item.nbytes if isinstance(item, Tensor | History | State) else 0


class Solver(abc.ABC):
    """A method for z = f(z). Classic ones are frozen dataclasses: hashable, comparable, `repr` is the configuration."""

    capturable: ClassVar[bool] = True
    """Whether a step reads nothing on the host, so that it may be recorded in a CUDA graph."""

    @property
    def replaces_start(self) -> bool:
        """Whether a solve may begin elsewhere than where it is told to, so that what was given is never measured."""
        return False

    def init(self, problem: "Problem", z: Leaves) -> tuple[Leaves, State]:
        """Prepare a solve from z; may replace the start."""
        return z, State()

    @abc.abstractmethod
    def propose(self, problem: "Problem", z: Leaves, fz: Leaves, state: State) -> tuple[Leaves, State]:
        """The next iterate, given the newest one and its image."""

    def run(self, problem: "Problem", z: Leaves, stop: "Stop", **options: Any) -> "Outcome":
        """Solve, by the driver; solvers made of other solvers replace this."""
        from equipoise._iterate import iterate

        return iterate(problem, self, z, stop, **options)


SOLVERS = Registry("solver")
register_solver = SOLVERS.register


def as_solver(solver: "Solver | str") -> Solver:
    """A solver, given one or its registered name."""
    if isinstance(solver, str) and solver.startswith("hyper:"):
        raise ValueError(
            f"{solver!r} is a learned solver, which belongs to a model: load_solver(PATH, model) gives it."
        )
    return SOLVERS.instance(solver, Solver)
