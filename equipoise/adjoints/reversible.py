"""Backpropagation through an iteration that can be run backwards."""

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._errors import require_number
from equipoise._lift import Lifted
from equipoise._problem import Problem, pullback
from equipoise._solution import BackwardRecord, EquilibriumWarning, Solution, Stats, Status
from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.adjoints.base import Adjoint, Run, finish, refuse_double_backward, register_adjoint
from equipoise.solvers.base import Solver, State

# Relative error of the reconstructed start above which the gradient is called inexact.
RECONSTRUCTION_TOLERANCE = 1e-3


@dataclass
class _Pair(State):
    """Two successive iterates, in float64: running backwards multiplies rounding errors."""

    newest: Leaves
    previous: Leaves


@dataclass(frozen=True)
class _TwoTerm(Solver):
    """x_{k+1} = (1 − beta)·x_{k−1} + beta·f(x_k), which determines x_{k−1} from the two after it."""

    beta: float

    def init(self, problem: Problem, z: Leaves) -> tuple[Leaves, _Pair]:
        return z, _Pair(_double(z), _double(z))

    def propose(self, problem: Problem, z: Leaves, fz: Leaves, state: State) -> tuple[Leaves, _Pair]:
        assert isinstance(state, _Pair)
        following = [(1 - self.beta) * x + self.beta * y for x, y in zip(state.previous, _double(fz), strict=True)]
        return [x.to(leaf.dtype) for x, leaf in zip(following, z, strict=True)], _Pair(following, state.newest)


def _double(leaves: Leaves) -> Leaves:
    return [leaf.double() for leaf in leaves]


@register_adjoint("reversible")
@dataclass(frozen=True)
class Reversible(Adjoint):
    """Exact for its own iteration, with memory for two states: the backward pass reconstructs every iterate.

    Replaces the solver by x_{k+1} = (1 − beta)·x_{k−1} + beta·f(x_k), run for all of `Stop.max_steps`. Each backward
    step evaluates f once and takes one VJP. Rounding errors grow by 1/(1 − beta) every two steps backwards; the error
    of the reconstructed start is reported as the residual of `Solution.backward`, and a large one warns.

    Attributes:
        beta: Weight of f(x_k).

    Reference: S. McCallum, K. Arora, J. Foster, Reversible deep equilibrium models, 2025.
    """

    exact: ClassVar[bool] = True

    beta: float = 0.5

    def __post_init__(self) -> None:
        require_number("Reversible", "beta", self.beta, low=0.0, high=1.0, open_low=True)

    def solve(self, problem: Problem, z0: Leaves, run: Run) -> Solution:
        def fixed(stop: Stop) -> Stop:
            return dataclasses.replace(stop, rtol=0.0, atol=0.0, select="last")

        z0 = [leaf.detach() for leaf in z0]
        with torch.no_grad():
            outcome = run(problem, z0, solver=_TwoTerm(self.beta), change_stop=fixed, keep_state=True)
        pair, outcome.state = outcome.state, None
        if not torch.is_grad_enabled():
            return finish(problem, outcome)
        record = BackwardRecord()
        steps = int(outcome.stats.steps.max()) if outcome.stats.steps.numel() else 0
        lifted = Lifted(problem, z0)
        backward = _Backward(self.beta, steps, lifted, pair, z0, record)
        views = [tensor.view_as(tensor) for tensor in lifted.tensors]  # seen by an enclosing solve
        value = list(_Reverse.apply(backward, *outcome.value, *views))
        return finish(problem, outcome, value, record=record)


@dataclass
class _Backward:
    beta: float
    steps: int
    lifted: Lifted
    pair: _Pair
    start: Leaves
    record: BackwardRecord

    def run(self, cotangent: Leaves, tensors: list[Tensor]) -> list[Tensor | None]:
        """Gradients for `tensors`, by the chain rule along the reconstructed iterates."""
        beta = self.beta
        following, current = self.pair.newest, self.pair.previous  # x_{k+1}, x_k
        ahead = _double(cotangent)  # ∂ℓ/∂x_{k+1}
        here = [torch.zeros_like(leaf) for leaf in ahead]  # ∂ℓ/∂x_k so far
        total = [torch.zeros_like(tensor) if tensor.requires_grad else None for tensor in tensors]
        wanted = [i for i, gradient in enumerate(total) if gradient is not None]
        work = self.start[0].dtype
        for k in range(self.steps - 1, -1, -1):
            with torch.enable_grad():
                x = [leaf.to(work).requires_grad_() for leaf in current]
                parameters = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
                fx = list(self.lifted(x, parameters))
            cotangents = [(beta * leaf).to(work) for leaf in ahead]
            grads = pullback(fx, [*x, *(parameters[i] for i in wanted)], cotangents)
            for i, grad in zip(wanted, grads[len(x) :], strict=True):
                total[i] = total[i] + grad  # type: ignore[operator]
            ahead, here = _leaves.add(here, _double(grads[: len(x)])), [(1 - beta) * leaf for leaf in ahead]
            if k > 0:
                image = _double([y.detach() for y in fx])
                earlier = [(x1 - beta * y) / (1 - beta) for x1, y in zip(following, image, strict=True)]
                following, current = current, earlier
        self._report(current)
        return total

    def _report(self, reconstructed: Leaves) -> None:
        start = _double(self.start)
        size = _leaves.norm(_double(self.pair.newest))
        error = _leaves.norm(_leaves.subtract(reconstructed, start)) / size.clamp_min(1e-300)
        good = error <= RECONSTRUCTION_TOLERANCE
        status = torch.where(good, Status.CONVERGED, Status.DIVERGED)
        steps = torch.full_like(status, self.steps)
        self.record.stats = Stats(status, error.to(self.start[0].dtype), steps, nfe=2 * self.steps)
        if not bool(good.all()):
            warnings.warn(
                f"Reversible: the start was reconstructed with relative error {float(error.max()):.1e}, so gradients "
                f"are inexact; lower beta={self.beta} or max_steps={self.steps}, or use float64.",
                EquilibriumWarning,
                stacklevel=2,
            )


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: _Backward, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = backward
        ctx.leaves = len(backward.start)
        ctx.save_for_backward(*tensors[ctx.leaves :])
        return tuple(leaf.clone() for leaf in tensors[: ctx.leaves])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_double_backward("Reversible")
        cotangent = [
            torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, ctx.run.start, strict=True)
        ]
        with ctx.run.lifted.problem.active():
            total = ctx.run.run(cotangent, list(ctx.saved_tensors))
        return (None, *([None] * ctx.leaves), *total)
