"""torchdeq, where it is installed: its solvers and its training step, doing the work that ours does, and counted.

Its Anderson and its plain iteration make `max_iter` evaluations, its Broyden one more. Its implicit gradient evaluates
f twice more, once with a graph in the forward pass and once in the backward pass, makes `b_max_iter` products with the
Jacobian and one for the parameters; ours does one evaluation less.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

SKIPPED = "not installed (pip install torchdeq==0.1.0)"

Map = Callable[[Tensor], Tensor]


def torchdeq_solvers() -> dict[str, Callable[..., Any]]:
    """torchdeq's solvers by our names; empty if it is not installed."""
    try:
        with _its_own_warnings():
            from torchdeq.solver import anderson_solver, broyden_solver, fixed_point_iter
    except ImportError:
        return {}
    return {"picard": fixed_point_iter, "anderson": anderson_solver, "broyden": broyden_solver}


def solvers_by_evaluations(evaluations: int) -> dict[str, Callable[..., Any]]:
    """The same, each limited to so many evaluations of f."""
    limits = {"broyden": evaluations - 1}
    return {
        name: partial(solver, max_iter=limits.get(name, evaluations)) for name, solver in torchdeq_solvers().items()
    }


def implicit_layer(steps: int, tolerance: float = 1e-30) -> Callable[..., Any] | None:
    """Its equilibrium layer with Anderson forward and backward, as many steps in each; None if it is not installed.

    Args:
        steps: Of both solves, at most.
        tolerance: Relative; one that is never met fixes the number of steps.
    """
    try:
        with _its_own_warnings():
            from torchdeq import get_deq
    except ImportError:
        return None
    options = {"f_max_iter": steps, "b_max_iter": steps, "f_tol": tolerance, "b_tol": tolerance}
    modes = {"f_stop_mode": "rel", "b_stop_mode": "rel"}
    return get_deq(f_solver="anderson", b_solver="anderson", ift=True, **options, **modes)  # type: ignore[no-any-return]


@contextmanager
def _its_own_warnings() -> Iterator[None]:
    """Where it is read for the first time: Python warns of escapes in its strings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        yield


class Counted:
    """A map that counts how often it is evaluated, and how often its result is differentiated."""

    def __init__(self, f: Map) -> None:
        self.f, self.calls, self.products = f, 0, 0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return _CountProducts.apply(self.f(z), self)  # type: ignore[no-any-return]


class _CountProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, counted: Counted) -> Tensor:
        ctx.counted = counted
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.counted.products += 1
        return grad, None
