"""The adjoint interface, and the tools that attach a gradient to a value found without one."""

import abc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from equipoise._compat import hides_leaves, keep_backward_buffers, leaves_reached
from equipoise._iterate import Outcome
from equipoise._problem import Problem, pullback
from equipoise._registry import Registry
from equipoise._scope import reopened
from equipoise._solution import BackwardRecord, EquilibriumError, EquilibriumWarning, Solution, Stats
from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.solvers.base import Solver, as_solver

Run = Callable[..., Outcome]
"""Runs the forward solve: `run(problem, z0, **options)`; the options may replace `solver` and `stop`."""


class Adjoint(abc.ABC):
    """How gradients flow through a solve. Frozen dataclasses, like solvers."""

    exact: ClassVar[bool]
    """Whether the gradient is that of the equilibrium (or of the iteration itself), up to tolerances."""

    @abc.abstractmethod
    def solve(self, problem: Problem, z0: Leaves, run: Run) -> Solution:
        """Run the forward solve in the right grad mode and return a solution whose value carries the gradient."""


ADJOINTS = Registry("adjoint")
register_adjoint = ADJOINTS.register


def as_adjoint(adjoint: Adjoint | str) -> Adjoint:
    """An adjoint, given one or its registered name."""
    return ADJOINTS.instance(adjoint, Adjoint)


def linear_solver(where: str, solver: Solver | str) -> Solver:
    """A solver of adjoint equations, given one or its name; it has to begin where it is told to.

    Args:
        where: Who asks, for the message.
        solver: The solver.
    """
    solver = as_solver(solver)
    learned = [stage for stage in getattr(solver, "stages", (solver,)) if stage.replaces_start]
    if learned:
        raise ValueError(
            f"{where}: {type(learned[0]).__name__} has a learned start, and adjoint equations have no input to read it "
            "from: use a classic solver here, or one without a start (source=None)."
        )
    return solver


def finish(problem: Problem, outcome: Outcome, value: Leaves | None = None, **fields: Any) -> Solution:
    """A solution from what the driver returned, its value replaced by one that carries a gradient."""
    outcome.stats.nfe = problem.nfe
    return Solution(
        value=problem.spec.unflatten(reopened(problem.scope, outcome.value if value is None else value)),
        stats=outcome.stats,
        collected=outcome.collected,
        state=outcome.state,
        problem=problem,
        **fields,
    )


class _Sever(torch.autograd.Function):
    """Identity at which autograd ends: VJPs to its output can be asked for, nothing flows or accumulates beyond."""

    @staticmethod
    def forward(ctx: FunctionCtx, z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        return None


def sever(z: Leaves) -> Leaves:
    """The same values as the start of a new graph."""
    return [_Sever.apply(leaf.detach().requires_grad_()) for leaf in z]


class _Graft(torch.autograd.Function):
    """The first half of the tensors as values, with the gradient of the second half."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(value.view_as(value) for value in tensors[: len(tensors) // 2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        refuse_double_backward(ctx.name)
        return (None, *([None] * len(grads)), *grads)


def graft(name: str, value: Leaves, carrier: Leaves) -> Leaves:
    """`value`, differentiated as if it were `carrier`."""
    return list(_Graft.apply(name, *value, *carrier))


def refuse_double_backward(name: str) -> None:
    """Raise if this backward pass is itself being differentiated, which would be silently wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"create_graph=True through the {name} adjoint: its second derivatives would be wrong. "
            "Use adjoint=Implicit(any_order=True)."
        )


class AdjointProblem(Problem):
    """u = Jᵀu + g on the kept graph of one evaluation of f: a fixed-point problem like any other."""

    def __init__(self, problem: Problem, fz: Leaves, z: Leaves, cotangent: Leaves) -> None:
        super().__init__(problem.f, problem.spec, plain=problem.plain)
        self.fz, self.z, self.cotangent = fz, z, cotangent
        self.autocast = problem.autocast

    def evaluate(self, z: Leaves) -> Leaves:
        return [pulled + g for pulled, g in zip(self.jvp(z, z), self.cotangent, strict=True)]

    def jvp(self, z: Leaves, v: Leaves) -> Leaves:
        """The map is linear, so its derivative is one more vector-Jacobian product."""
        self._calls[0] += 1
        return pullback(self.fz, self.z, v)


AdjointSolve = Callable[[AdjointProblem], Outcome]


class _Attach(torch.autograd.Function):
    """z*, whose cotangent g becomes the solution u of u = Jᵀu + g on its way into the graph of f(z*).

    f(z*) is an input of this function: saving it as an attribute would make a reference cycle, and a tensor hook would
    fire again on each VJP.
    """

    @staticmethod
    def forward(
        ctx: Any, name: str, problem: Problem, solve: AdjointSolve, record: BackwardRecord, *tensors: Tensor
    ) -> Any:
        ctx.name, ctx.problem, ctx.solve, ctx.record = name, problem, solve, record
        ctx.save_for_backward(*tensors)
        return tuple(leaf.view_as(leaf) for leaf in tensors[len(tensors) // 2 :])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        refuse_double_backward(ctx.name)
        tensors = ctx.saved_tensors
        fz, z = list(tensors[: len(grads)]), list(tensors[len(grads) :])
        cotangent = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, z, strict=True)]
        problem = AdjointProblem(ctx.problem, fz, z, cotangent)
        compiled = ctx.problem.plain is not ctx.problem.f
        with ctx.problem.active(), keep_backward_buffers() if compiled else nullcontext():
            outcome = ctx.solve(problem)
        # One more product carries u to the parameters and inputs (and, unasked, to z).
        outcome.stats.nfe = problem.nfe + 1
        ctx.record.stats = outcome.stats
        return (None, None, None, None, *outcome.value, *([None] * len(grads)))


def attach(name: str, problem: Problem, z: Leaves, solve: AdjointSolve, record: BackwardRecord) -> Leaves:
    """z with a gradient: one evaluation of f at z is recorded, and `solve` finds the adjoint in the backward pass."""
    start = sever(z)
    fz = problem.evaluate(start)
    if next(leaves_reached(fz, except_for=start), None) is None:
        if hides_leaves(fz):
            raise RuntimeError(
                f"{name}: f uses torch.utils.checkpoint with use_reentrant=True, which hides what wants a gradient; "
                "pass use_reentrant=False."
            )
        return z  # nothing that f uses wants a gradient
    return list(_Attach.apply(name, problem, solve, record, *fz, *start))


def run_adjoint(
    solver: Solver, stop: Stop, throw: bool, start: Callable[[Leaves], Leaves] | None = None
) -> AdjointSolve:
    """The adjoint solve by a solver and a stop rule; a failure warns once per f, or raises."""

    def solve(problem: AdjointProblem) -> Outcome:
        u0 = problem.cotangent if start is None else start(problem.cotangent)
        outcome = solver.run(problem, u0, stop)
        if not stop.fixed_budget:
            report_failure(outcome.stats, problem.plain, throw)
        return outcome

    return solve


_warned: "weakref.WeakSet[Any]" = weakref.WeakSet()


def report_failure(stats: Stats, f: Callable[..., Any], throw: bool) -> None:
    """Say once per f, in words, that adjoint solves failed, or raise."""
    f = getattr(f, "__wrapped__", f)  # the wrapper of a sharded cell is a new one at each solve
    key = getattr(f, "__code__", f)  # a lambda is a new function at each call, its code is not
    if key in _warned and not throw:
        return
    failures = stats.summary()
    if not failures:
        return
    message = f"the backward solve left gradients inexact: {failures}."
    if throw:
        raise EquilibriumError(message)
    _warned.add(key)
    hint = " Said once; see Solution.backward, or Implicit(throw=True) to raise."
    warnings.warn(message + hint, EquilibriumWarning, stacklevel=2)
