"""Derivatives of any order: an autograd function whose backward and jvp call itself.

The root of an equation z = F(z; tensors) is differentiable in the tensors, and both its adjoint and its tangent are
roots of (linear) equations of the same kind, in more tensors. So one function is enough for every order, for forward
mode, and, with a rule that turns a vmapped equation into a larger batch, for torch.func.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise._iterate import Outcome
from equipoise._lift import Lifted
from equipoise._problem import Problem, StateSpec
from equipoise._solution import BackwardRecord, Solution
from equipoise._stop import Stop
from equipoise._tree import Leaves, tree_tensors
from equipoise.adjoints.base import Run, finish, report_failure
from equipoise.solvers.base import Solver

Tensors = Sequence[Tensor]
Pure = Callable[[Tensors, Tensors], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Equation:
    """z = call(z, tensors), and how to solve it.

    Attributes:
        call: The map, a pure function.
        solve: Runs the solve, given the map, the start and what a solver may look at.
        leaves: Number of leaves of z.
        linear: The solver and stop rule of adjoint and tangent equations, and whether their failure raises.
        problem: The problem it all began with.
        record: Where to put the statistics of the adjoint solve.
        bind: The map for given tensors, with whatever can be computed once done; `call` if None.
        looks: Places of the tensors that a solver may look at.
    """

    call: Pure
    solve: Callable[[Callable[[Leaves], Leaves], Leaves, Tensors], Outcome]
    leaves: int
    linear: tuple[Solver, Stop, bool]
    problem: Problem
    record: BackwardRecord | None = None
    bind: Callable[[Tensors], Callable[[Leaves], Leaves]] | None = None
    looks: tuple[int, ...] = ()

    def solved(self, start: Leaves, tensors: Tensors) -> Outcome:
        return self.solve(self.bound(tensors), start, [tensors[place] for place in self.looks])

    def bound(self, tensors: Tensors) -> Callable[[Leaves], Leaves]:
        return self.bind(tensors) if self.bind else lambda z: list(self.call(z, tensors))

    def adjoint(self, count: int) -> "Equation":
        """u = Jᵀu + g, with tensors (z, tensors, g)."""
        n = self.leaves

        def bind(tensors: Tensors) -> Callable[[Leaves], Leaves]:
            z, inner, g = tensors[:n], tensors[n : n + count], tensors[n + count :]
            pull = torch.func.vjp(lambda *leaves: self.call(leaves, inner), *z)[1]
            return lambda u: [pulled + leaf for pulled, leaf in zip(pull(tuple(u)), g, strict=True)]

        return self._linear(bind)

    def tangent(self, count: int) -> "Equation":
        """w = J w + ∂F/∂tensors · t, with tensors (z, tensors, t)."""
        n = self.leaves

        def bind(tensors: Tensors) -> Callable[[Leaves], Leaves]:
            z, inner, t = tensors[:n], tensors[n : n + count], tensors[n + count :]
            moving = [i for i, tensor in enumerate(inner) if tensor.is_floating_point()]

            def along(*arguments: Tensor) -> tuple[Tensor, ...]:
                moved = list(inner)
                for i, tensor in zip(moving, arguments[n:], strict=True):
                    moved[i] = tensor
                return self.call(arguments[:n], moved)

            # The transpose of a VJP is a JVP: asks nothing of f that the adjoint does not, and evaluates f once.
            fz, pull, *_ = torch.func.vjp(along, *z, *(inner[i] for i in moving))
            push = torch.func.vjp(pull, tuple(torch.zeros_like(leaf) for leaf in fz))[1]
            moves = tuple(t[i] for i in moving)
            return lambda w: list(push((*w, *moves))[0])

        return self._linear(bind)

    def _linear(self, bind: Callable[[Tensors], Callable[[Leaves], Leaves]]) -> "Equation":
        solver, stop, throw = self.linear

        def solve(evaluate: Callable[[Leaves], Leaves], start: Leaves, seen: Tensors) -> Outcome:
            outcome = solver.run(_Bound(evaluate, StateSpec.of(start), self.problem), start, stop)
            if not stop.fixed_budget:
                report_failure(outcome.stats, self.problem.plain, throw)
            if self.record is not None:
                self.record.stats = outcome.stats
            return outcome

        call = lambda z, tensors: tuple(bind(tensors)(list(z)))  # noqa: E731
        return Equation(call, solve, self.leaves, self.linear, self.problem, bind=bind)

    def vmapped(self, size: int, batched: Sequence[bool]) -> "Equation":
        """`size` copies of the equation as one larger batch of systems; `batched` tensors have a leading axis."""
        in_dims = (0, [0 if flag else None for flag in batched])

        def call(z: Tensors, tensors: Tensors) -> tuple[Tensor, ...]:
            apart = [leaf.unflatten(0, (size, -1)) for leaf in z]
            out = torch.vmap(lambda a, b: self.call(a, b), in_dims=in_dims, randomness="same")(apart, list(tensors))
            return tuple(leaf.flatten(0, 1) for leaf in out)

        return dataclasses.replace(self, call=call, bind=None, looks=())  # these have rows of other systems


class _Bound(Problem):
    """A map on leaves as a problem, with the precision of the one it comes from."""

    def __init__(
        self, evaluate: Callable[[Leaves], Leaves], spec: StateSpec, origin: Problem, seen: Tensors = ()
    ) -> None:
        super().__init__(evaluate, spec, context=origin.context if origin.context is not None else tuple(seen) or None)
        self.origin = origin

    @property
    def floor(self) -> float:
        return self.origin.floor

    def apply(self, f: Any, z: Leaves) -> Leaves:
        return self.f(z)


class _Root(torch.autograd.Function):
    """The root of an equation, with the status, residual and steps of each system behind it."""

    @staticmethod
    def forward(equation: Equation, *arguments: Tensor) -> Any:
        start, tensors = list(arguments[: equation.leaves]), arguments[equation.leaves :]
        outcome = equation.solved(start, tensors)
        stats = outcome.stats
        return (*(leaf.clone() for leaf in outcome.value), stats.status, stats.residual, stats.steps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        equation, *arguments = inputs
        ctx.equation = equation
        ctx.mark_non_differentiable(*output[equation.leaves :])
        saved = (*output[: equation.leaves], *arguments[equation.leaves :])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        equation: Equation = ctx.equation
        n = equation.leaves
        saved = ctx.saved_tensors  # once: a checkpoint hands each out a single time
        z, tensors = saved[:n], saved[n:]
        g = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, z, strict=False)]
        u = _Root.apply(equation.adjoint(len(tensors)), *[leaf.detach() for leaf in g], *z, *tensors, *g)[:n]
        wanted = [
            i for i, tensor in enumerate(tensors) if tensor.is_floating_point() and ctx.needs_input_grad[1 + n + i]
        ]

        def with_tensors(*chosen: Tensor) -> tuple[Tensor, ...]:
            replaced = list(tensors)
            for i, tensor in zip(wanted, chosen, strict=True):
                replaced[i] = tensor
            return equation.call(z, replaced)

        result: list[Tensor | None] = [None] * len(tensors)
        if wanted:
            pulled = torch.func.vjp(with_tensors, *(tensors[i] for i in wanted))[1](tuple(u))
            for i, grad in zip(wanted, pulled, strict=True):
                result[i] = grad
        return (None, *([None] * n), *result)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        equation: Equation = ctx.equation
        n = equation.leaves
        saved = ctx.saved_tensors
        z, tensors = saved[:n], saved[n:]
        moving = tangents[1 + n :]
        t = [torch.zeros_like(tensor) if move is None else move for move, tensor in zip(moving, tensors, strict=True)]
        w = _Root.apply(equation.tangent(len(tensors)), *[torch.zeros_like(leaf) for leaf in z], *z, *tensors, *t)
        return (*w[:n], None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, equation: Equation, *arguments: Tensor) -> Any:
        n, size = equation.leaves, info.batch_size
        front = [a if dim is None else a.movedim(dim, 0) for a, dim in zip(arguments, in_dims[1:], strict=True)]
        start = []
        for leaf, dim in zip(front[:n], in_dims[1 : 1 + n], strict=True):
            leaf = leaf.expand(size, *leaf.shape) if dim is None else leaf
            start.append(leaf.flatten(0, 1))
        batched = [dim is not None for dim in in_dims[1 + n :]]
        out = _Root.apply(equation.vmapped(size, batched), *start, *front[n:])
        return tuple(item.unflatten(0, (size, -1)) for item in out), (0,) * len(out)


def solve_any_order(problem: Problem, z0: Leaves, run: Run, solver: Solver, stop: Stop, throw: bool) -> Solution:
    """Solve with a value that may be differentiated any number of times, in any mode."""
    lifted = Lifted(problem, z0)
    record = BackwardRecord()
    last: list[Outcome] = []

    def solve(evaluate: Callable[[Leaves], Leaves], start: Leaves, seen: Tensors) -> Outcome:
        # Solvers may go by the form of states; of a larger batch it is known if systems are rows.
        rows = problem.spec.batch_dims == 1
        bound = _Bound(evaluate, problem.spec.rows(len(start[0])) if rows else StateSpec.of(start), problem, seen)
        bound._calls = problem._calls
        last[:] = [run(bound, start)]
        return last[0]

    shown = {id(tensor) for tensor in tree_tensors(problem.shown)}
    looks = tuple(place for place, tensor in enumerate(lifted.tensors) if id(tensor) in shown)
    equation = Equation(lifted, solve, len(z0), (solver, stop, throw), problem, record, looks=looks)
    start = [leaf.detach() for leaf in z0]
    # An autograd function is not seen by an enclosing solve that replaces tensors; a view of each is.
    views = [tensor.view_as(tensor) for tensor in lifted.tensors]
    *value, status, residual, steps = _Root.apply(equation, *start, *views)
    outcome = dataclasses.replace(last[0])
    outcome.stats = dataclasses.replace(outcome.stats, status=status, residual=residual, steps=steps)
    return finish(problem, outcome, list(value), record=record)
