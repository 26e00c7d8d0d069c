"""Where each system of a solve stands, kept on the device, and the rules that move it.

The same rules as the driver's (`equipoise/_iterate.py`), on tensors that are written in place and never read on the
host, so that a step can be recorded in a CUDA graph.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise._iterate import DIVERGING, RUNNING
from equipoise._solution import Status
from equipoise._stop import FLOOR_PATIENCE, Stop, tiny_norm
from equipoise._tree import Leaves

# What becomes of a system in a step, as bits; 0 leaves it alone.
ADVANCE = 1  # the proposal becomes its iterate
KEEP = 2  # its iterate is the best so far
RETREAT = 4  # it has ended on an iterate that is not its best, and goes back to that one


@dataclass
class Standing:
    """The progress of N systems; a step updates all of it in place.

    Attributes:
        best: The best iterate of each system, leaf by leaf (N, D_i).
        residual: (N,) relative residual of `best`, inf before the first finite one.
        latest: (N,) relative residual of the newest iterate measured.
        status: (N,) −1 while running, else a `Status`. With a fixed budget only NONFINITE is ever set.
        steps: (N,) steps taken by systems that have ended.
        stalled: (N,) steps since `best` last changed.
        limit: (N,) ‖f(z) − z‖ above which a system has diverged; set by the first step.
        count: () int32, iterates measured since the start. It decides the slot of a ring, so it lives on the device.
        arrived: (N,) int32, programs of a kernel that are done with a system; zero between kernels.
        owed: (N,) int32, what `best` lacks where nothing is copied before it must be: 0 nothing, 1 the iterate measured
            last, 2 the one before it. `picard_settle` copies it.
    """

    best: Leaves
    residual: Tensor
    latest: Tensor
    status: Tensor
    steps: Tensor
    stalled: Tensor
    limit: Tensor
    count: Tensor
    arrived: Tensor
    owed: Tensor

    @classmethod
    def start(cls, z: Leaves) -> "Standing":
        """The standing before the first step of a solve from z."""
        n, device = z[0].shape[0], z[0].device
        real = torch.float64 if z[0].dtype == torch.float64 else torch.float32

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((n,), value, dtype=dtype, device=device)

        return cls(
            best=[leaf.clone() for leaf in z],
            residual=full(torch.inf, real),
            latest=full(torch.inf, real),
            status=full(RUNNING, torch.int32),
            steps=full(0, torch.int32),
            stalled=full(0, torch.int32),
            limit=full(torch.inf, real),
            count=torch.zeros((), dtype=torch.int32, device=device),
            arrived=full(0, torch.int32),
            owed=full(0, torch.int32),
        )

    @torch.no_grad()
    def restart(self, z: Leaves) -> None:
        """Begin another solve from z in the same storage."""
        for best, leaf in zip(self.best, z, strict=True):
            best.copy_(leaf)
        for tensor in (self.residual, self.latest, self.limit):
            tensor.fill_(torch.inf)
        self.status.fill_(RUNNING)
        for tensor in (self.steps, self.stalled, self.count, self.arrived, self.owed):
            tensor.zero_()


@dataclass(frozen=True)
class Rules:
    """The numbers of a `Stop` as a step needs them.

    Attributes:
        fixed: Whether the budget is fixed, so that nothing ever ends.
        last: Whether a system that ends takes its last proposal along (`select="last"`).
        rtol: Relative tolerance.
        atol: Absolute tolerance for the l2 norm.
        diverge: Growth of ‖f(z) − z‖ at which a system is given up.
        plateau: Steps without a better iterate after which a system is given up; 0 for never.
        floor: Relative residual at the rounding level of f; 0 where the tolerance is above it.
        tiny: Keeps 0/0 away from relative residuals.
        eps: Rounding unit of the norms.
    """

    fixed: bool
    last: bool
    rtol: float
    atol: float
    diverge: float
    plateau: int
    floor: float
    tiny: float
    eps: float

    @classmethod
    def of(cls, stop: Stop, floor: float, unknowns: int, work: torch.dtype) -> "Rules":
        """Rules for systems of so many unknowns, measured in the dtype `work`; `floor` is that of f."""
        return cls(
            fixed=stop.fixed_budget,
            last=stop.select == "last",
            rtol=float(stop.rtol),
            # The norm matters for the absolute tolerance only: ‖g‖/√D ≤ atol is ‖g‖ ≤ atol·√D.
            atol=float(stop.atol) * (math.sqrt(max(1, unknowns)) if stop.norm == "rms" else 1.0),
            diverge=float(stop.diverge),
            plateau=stop.plateau or 0,
            floor=floor if stop.rtol < floor else 0.0,
            tiny=tiny_norm(work),
            eps=torch.finfo(work).eps,
        )


def judge(size: Tensor, image: Tensor, standing: Standing, rules: Rules) -> Tensor:
    """Take the norms ‖f(z) − z‖ and ‖f(z)‖ (N,) of the newest iterates into account; return the actions (N,)."""
    relative = size / (image + rules.tiny)
    running = standing.status < 0
    if rules.fixed:
        better = relative < standing.residual
        standing.status.masked_fill_(~torch.isfinite(relative), Status.NONFINITE)
        standing.residual.copy_(torch.fmin(relative, standing.residual))
        standing.latest.copy_(relative)
        return ADVANCE + KEEP * better.int()
    if int(standing.count) == 0:
        standing.limit.copy_(rules.diverge * (size + rules.eps * image))
    converged = (size <= rules.rtol * image + rules.atol) & torch.isfinite(size)
    better = running & ((relative < standing.residual) | converged)
    standing.latest.copy_(torch.where(running, relative, standing.latest))
    standing.residual.copy_(torch.where(better, relative, standing.residual))
    standing.stalled.copy_(torch.where(better, 0, torch.where(running, standing.stalled + 1, standing.stalled)))
    code = torch.full_like(standing.status, RUNNING)  # later lines take precedence
    if rules.plateau:
        stuck = standing.stalled >= rules.plateau
        code.masked_fill_(stuck, Status.PLATEAU)
        code.masked_fill_(stuck & (size * rules.diverge > DIVERGING * standing.limit), Status.DIVERGED)
    code.masked_fill_((standing.stalled >= FLOOR_PATIENCE) & (standing.residual <= rules.floor), Status.PRECISION_FLOOR)
    code.masked_fill_(size > standing.limit, Status.DIVERGED)
    code.masked_fill_(~torch.isfinite(relative), Status.NONFINITE)
    code.masked_fill_(converged, Status.CONVERGED)
    standing.status.copy_(torch.where(running, code, standing.status))
    ended = running & (code >= 0)
    taken = standing.count + 1 if rules.last else standing.count
    standing.steps.copy_(torch.where(ended, taken, standing.steps))
    advance = running if rules.last else running & ~ended
    retreat = ended & ~better & (not rules.last)
    return ADVANCE * advance.int() + KEEP * better.int() + RETREAT * retreat.int()


def require_fixed_budget(operation: str, out: Leaves | None, stop: Stop) -> None:
    """Refuse a place of its own for proposals where systems may end."""
    if out is not None and not stop.fixed_budget:
        raise ValueError(f"{operation}: out is for fixed budgets, where no system ends; got {stop!r}.")


def postponed(actions: Tensor, standing: Standing) -> Tensor:
    """The actions of a fixed budget where proposals are written elsewhere: a best iterate is copied one step later.

    That is, if the next one turns out to be no better; `standing.owed` says which are waiting.
    """
    better = (actions & KEEP) != 0
    due = (standing.owed == 1) & ~better
    standing.owed.copy_(better)
    return ADVANCE + KEEP * due.int()


def settle(z: Leaves, proposal: Leaves, actions: Tensor, standing: Standing) -> None:
    """Carry out the actions on the iterates and the best ones, and count the step."""
    keep, advance, retreat = ((actions & bit).bool()[:, None] for bit in (KEEP, ADVANCE, RETREAT))
    for leaf, new, best in zip(z, proposal, standing.best, strict=True):
        best.copy_(torch.where(keep, leaf, best))
        leaf.copy_(torch.where(advance, new.to(leaf.dtype), torch.where(retreat, best, leaf)))
    standing.count.add_(1)
