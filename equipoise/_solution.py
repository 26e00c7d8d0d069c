"""What a solve returns: the value, per-system statistics, and words for a person."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise._tree import Tree, register_record

if TYPE_CHECKING:
    from equipoise._problem import Problem


class Status(enum.IntEnum):
    """How the solve of one system ended."""

    CONVERGED = 0
    MAX_STEPS = 1
    PLATEAU = 2
    DIVERGED = 3
    NONFINITE = 4
    PRECISION_FLOOR = 5

    @property
    def message(self) -> str:
        """What happened and what to change, in one sentence."""
        return _MESSAGES[self]

    @property
    def ok(self) -> bool:
        """Whether the value is as accurate as was asked for, or as the dtype allows."""
        return self in (Status.CONVERGED, Status.PRECISION_FLOOR)


_MESSAGES = {
    Status.CONVERGED: "converged to the tolerance",
    Status.MAX_STEPS: "stopped at max_steps before the tolerance was met; raise Stop(max_steps=...) or Stop(rtol=...)",
    Status.PLATEAU: (
        "made no progress for Stop.plateau steps; try another solver (Broyden(), Ladder()), a Jacobian penalty in "
        "training, or Stop(atol=...) if the root is near zero"
    ),
    Status.DIVERGED: "diverged; try Anderson() or Broyden(), or a smaller step with Picard(damping=0.5)",
    Status.NONFINITE: "met a non-finite value in f; the best finite iterate is returned; try Picard(damping=0.5)",
    Status.PRECISION_FLOOR: (
        "reached the rounding level of its dtype, above the tolerance asked for; use a higher precision or a larger "
        "rtol"
    ),
}


class EquilibriumError(RuntimeError):
    """Some systems have no acceptable solution."""


class EquilibriumWarning(UserWarning):
    """A solve inside a backward pass failed for some systems."""


@dataclass
class Stats:
    """Per-system statistics, kept on the device: reading them is up to the caller.

    Attributes:
        status: (N,) values of `Status`.
        residual: (N,) relative residual ‖f(z) − z‖ / ‖f(z)‖ of the returned value, or of its predecessor when
            `lagged`.
        steps: (N,) steps each system took; 0 if the start already solved it.
        nfe: Evaluations of f on the batch, the one that carries the gradient and every jvp included; in
            `Solution.backward`, vector-Jacobian products.
        trace: (N, most steps + 1) relative residuals, NaN where not measured; only when asked for.
        lagged: Whether `residual` belongs to the iterate before the returned one (`Stop.select == "last"`).
        solver_bytes: Storage the solver held (histories, low-rank pairs).
    """

    status: Tensor
    residual: Tensor
    steps: Tensor
    nfe: int = 0
    trace: Tensor | None = None
    lagged: bool = False
    solver_bytes: int = 0

    @property
    def ok(self) -> Tensor:
        """(N,) whether each system converged or reached the precision of its dtype."""
        return (self.status == Status.CONVERGED) | (self.status == Status.PRECISION_FLOOR)

    def summary(self, limit: int = 8) -> str:
        """Which systems failed and why, grouped by status; empty if none did."""
        status = self.status.detach().reshape(-1).cpu()
        residual = self.residual.detach().reshape(-1).cpu()
        steps = self.steps.detach().reshape(-1).cpu()
        parts = []
        for kind in Status:
            rows = (status == kind).nonzero().reshape(-1)
            if kind.ok or len(rows) == 0:
                continue
            named = ", ".join(str(int(row)) for row in rows[:limit]) + (", ..." if len(rows) > limit else "")
            parts.append(
                f"{len(rows)} of {len(status)} systems (row{'s' if len(rows) > 1 else ''} {named}) {kind.message} "
                f"[{kind.name}, after {int(steps[rows].max())} steps, best relative residual "
                f"{float(residual[rows].min()):.1e} to {float(residual[rows].max()):.1e}]"
            )
        return "; ".join(parts)


@dataclass
class BackwardRecord:
    """Filled by the backward pass; apart from `Solution`, so that the graph holds no reference to it."""

    stats: Stats | None = None


@dataclass
class Solution:
    """The result of a solve.

    Attributes:
        value: State of the structure, shapes and dtypes of `z0`.
        stats: Statistics of the forward solve.
        collected: What `collect` asked for, by name.
        state: The solver's final state, if it was asked for.
        problem: The problem solved, for penalties and diagnostics.
    """

    value: Tree
    stats: Stats
    collected: dict[str, Any] | None = None
    state: Any = None
    problem: "Problem | None" = field(default=None, repr=False)
    record: BackwardRecord | None = field(default=None, repr=False)

    @property
    def backward(self) -> Stats | None:
        """Statistics of the last backward pass through this solution, or None before one."""
        return self.record.stats if self.record else None

    def require(self) -> "Solution":
        """Return self if every system is solved; raise `EquilibriumError` naming those that are not."""
        failures = self.stats.summary()
        if failures:
            raise EquilibriumError(f"{failures}. Pass throw=False (the default) to accept the best finite iterates.")
        return self

    def explain(self) -> str:
        """The outcome in words."""
        from equipoise.diagnostics.explain import explain

        return explain(self)


def fresh_stats(num_systems: int, device: torch.device, dtype: torch.dtype) -> Stats:
    """Statistics of systems on which nothing has been done: converged in zero steps."""
    return Stats(
        status=torch.zeros(num_systems, dtype=torch.int64, device=device),
        residual=torch.zeros(num_systems, dtype=dtype, device=device),
        steps=torch.zeros(num_systems, dtype=torch.int64, device=device),
    )


register_record(Stats, ("status", "residual", "steps", "trace"), ("nfe", "lagged", "solver_bytes"))
register_record(Solution, ("value", "stats", "collected"), ("state", "problem", "record"))
