"""The functional entry point."""

from collections.abc import Callable
from typing import Any

from equipoise._iterate import Outcome
from equipoise._problem import Problem, StateSpec
from equipoise._solution import Solution
from equipoise._stop import Stop
from equipoise._tree import Leaves, Tree
from equipoise.adjoints import Adjoint, Implicit, as_adjoint
from equipoise.solvers import Anderson, Solver, as_solver


def fixed_point(
    f: Callable[..., Tree],
    z0: Tree,
    *inputs: Any,
    solver: Solver | str = Anderson(),
    adjoint: Adjoint | str = Implicit(),
    stop: Stop = Stop(),
    batch_dims: int = 1,
    in_dims: int | tuple[int | None, ...] | None = None,
    context: Tree = None,
    trace: bool = False,
    collect: str | tuple[str, ...] | None = None,
    throw: bool = False,
) -> Solution:
    """Solve z = f(z, *inputs) and make the solution differentiable.

    Args:
        f: Map from a state tree to a tree of the same structure, shapes and dtypes.
        z0: Initial state; the leading `batch_dims` axes index independent systems.
        *inputs: Further arguments of f.
        solver: How to find the root, or the registered name of a solver.
        adjoint: How gradients flow, or the registered name of an adjoint.
        stop: When to end.
        batch_dims: Leading axes of the state that index systems; 0 for one coupled system.
        in_dims: Which axis of each input indexes systems, as in vmap; None for inputs that all systems share.
        context: Something the solver may look at but f does not take.
        trace: Keep the residual of every step in `stats.trace`.
        collect: Keep quantities of every step: "iterates", or the name of a tensor of the solver's state.
        throw: Raise `EquilibriumError` if any system is not solved.

    Returns:
        The solution; `value` has the structure of `z0`, `stats.residual` is of shape (N,).

    Raises:
        EquilibriumError: If `throw` is set and any system failed.
    """
    if not callable(f):
        raise TypeError(f"f must be callable as f(z, *inputs), got {type(f).__name__}.")
    problem = Problem(f, StateSpec.of(z0, batch_dims), inputs, in_dims=in_dims, context=context)
    solution = solve(problem, z0, solver, adjoint, stop, trace=trace, collect=collect)
    return solution.require() if throw else solution


def solve(
    problem: Problem,
    z0: Tree,
    solver: Solver | str,
    adjoint: Adjoint | str,
    stop: Stop,
    *,
    trace: bool = False,
    collect: str | tuple[str, ...] | None = None,
) -> Solution:
    """Solve a problem that is already put together."""
    chosen = as_solver(solver)
    if not isinstance(stop, Stop):
        raise TypeError(f"stop must be a Stop(...), got {type(stop).__name__}.")
    names = (collect,) if isinstance(collect, str) else collect or ()
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"collect must be a name or a tuple of names, such as 'iterates'; got {collect!r}.")

    def run(
        target: Problem,
        z: Leaves,
        *,
        solver: Solver = chosen,
        change_stop: Callable[[Stop], Stop] | None = None,
        keep_state: bool = False,
    ) -> Outcome:
        rule = change_stop(stop) if change_stop else stop
        return solver.run(target, z, rule, trace=trace, collect=tuple(names), keep_state=keep_state)

    return as_adjoint(adjoint).solve(problem, problem.start(z0), run)
