"""Other libraries, where they are installed."""

from collections.abc import Callable
from typing import Any


def torchdeq_solvers() -> dict[str, Callable[..., Any]]:
    """torchdeq's solvers by our names; empty if it is not installed (pip install torchdeq==0.1.0)."""
    try:
        from torchdeq.solver import anderson_solver, broyden_solver, fixed_point_iter
    except ImportError:
        return {}
    return {"picard": fixed_point_iter, "anderson": anderson_solver, "broyden": broyden_solver}
