"""Several solvers, one after the other, on what the one before left unsolved."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.solvers.anderson import Anderson
from equipoise.solvers.base import Solver, State, register_solver
from equipoise.solvers.broyden import Broyden
from equipoise.solvers.newton_krylov import NewtonKrylov
from equipoise.solvers.picard import Picard

if TYPE_CHECKING:
    from equipoise._iterate import Outcome
    from equipoise._problem import Problem
    from equipoise._solution import Stats


@register_solver("ladder")
@dataclass(frozen=True)
class Ladder(Solver):
    """Cheap solvers first, robust ones for the systems that need them.

    Each stage starts from the best iterates of the one before, takes only the systems that are not yet solved, and
    has a budget of `Stop.max_steps` of its own. Steps and evaluations of all stages add up. Where a stage has a start
    of its own and leaves a system worse than it was given, the system is put back to what was given: whatever a learned
    solver does, `Ladder((learned, Anderson()))` returns nothing worse than it began with.

    Attributes:
        stages: Solvers, from cheap to robust.
    """

    capturable: ClassVar[bool] = False

    stages: tuple[Solver, ...] = (Anderson(), Picard(damping=0.5), Broyden(), NewtonKrylov())

    def __post_init__(self) -> None:
        if not isinstance(self.stages, tuple) or not self.stages:
            raise ValueError(f"Ladder: stages must be a non-empty tuple of solvers, got {self.stages!r}.")
        for stage in self.stages:
            if not isinstance(stage, Solver) or isinstance(stage, Ladder):
                raise TypeError(f"Ladder: every stage must be a solver that is no Ladder, got {stage!r}.")

    def propose(self, problem: "Problem", z: Leaves, fz: Leaves, state: State) -> tuple[Leaves, State]:
        raise TypeError("a Ladder has no step of its own; it runs its stages. Call solver.run(problem, z, stop).")

    def run(self, problem: "Problem", z: Leaves, stop: Stop, **options: Any) -> "Outcome":
        first_nfe = problem.nfe
        outcome = _climb(self.stages[0], problem, z, stop, options)
        for stage in self.stages[1:]:
            unsolved = (~outcome.stats.ok).nonzero()[:, 0]
            if len(unsolved) == 0:
                break
            start = _leaves.take_rows(outcome.value, unsolved)
            climbed = _climb(stage, problem.rows(unsolved), start, stop, options)
            outcome.value = _leaves.put_rows(outcome.value, unsolved, climbed.value)
            outcome.stats = _merge(outcome.stats, unsolved, climbed.stats)
            outcome.state, outcome.collected = None, None  # stages differ in what they keep and for which systems
        outcome.stats = dataclasses.replace(outcome.stats, nfe=problem.nfe - first_nfe)
        return outcome


def _climb(stage: Solver, problem: "Problem", z: Leaves, stop: Stop, options: dict[str, Any]) -> "Outcome":
    """A stage; what it leaves worse than it was given is put back, where it does not begin with what is given."""
    outcome = stage.run(problem, z, stop, **options)
    if stage.replaces_start:
        _put_back(outcome, problem, z, stop)
    return outcome


def _put_back(outcome: "Outcome", problem: "Problem", z: Leaves, stop: Stop) -> None:
    """Unsolved systems where they were given, if that is better than where they are; one evaluation of f for these."""
    unsolved = (~outcome.stats.ok).nonzero()[:, 0]
    if len(unsolved) == 0:
        return
    given, part = _leaves.take_rows(z, unsolved), problem.rows(unsolved)
    once = Stop(stop.rtol, stop.atol, max_steps=1, norm=stop.norm)
    with torch.no_grad():
        there = Picard().run(part, given, once).stats
    stats = outcome.stats
    worse = ~(stats.residual.index_select(0, unsolved) <= there.residual)  # also where it is not a number
    rows = unsolved[worse]
    outcome.value = _leaves.put_rows(outcome.value, rows, _leaves.take_rows(z, rows))
    status = torch.where(there.ok, there.status, stats.status.index_select(0, unsolved))  # it may be an equilibrium
    outcome.stats = dataclasses.replace(
        stats,
        status=stats.status.index_copy(0, rows, status[worse]),
        residual=stats.residual.index_copy(0, rows, there.residual[worse]),
    )


def _merge(stats: "Stats", index: Tensor, later: "Stats") -> "Stats":
    trace = stats.trace
    if trace is not None and later.trace is not None:
        # Each system's second trace follows its first one, wherever that ended.
        width = int((stats.steps.index_select(0, index) + later.steps).max()) + 2
        wide = torch.full((len(trace), max(width, trace.shape[1])), torch.nan, dtype=trace.dtype, device=trace.device)
        wide[:, : trace.shape[1]] = trace
        for row, values in zip(index.tolist(), later.trace, strict=True):
            measured = values[~values.isnan()]
            first = int((~wide[row].isnan()).sum())
            wide[row, first : first + len(measured)] = measured[: wide.shape[1] - first]
        trace = wide
    # A stage that meets no finite value of f leaves systems where they were.
    residual = torch.where(later.residual.isfinite(), later.residual, stats.residual.index_select(0, index))
    return dataclasses.replace(
        stats,
        status=stats.status.index_copy(0, index, later.status),
        residual=stats.residual.index_copy(0, index, residual),
        steps=stats.steps.index_add(0, index, later.steps),
        trace=trace,
        solver_bytes=max(stats.solver_bytes, later.solver_bytes),
    )
