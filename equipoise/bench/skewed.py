"""A batch in which one system is much harder than the others: what a solve pays for systems that are done.

The least that it can cost is Σ_k t_f(live_k): the bare f on those systems that are unfinished at step k, each step's
batch as large as that. It is measured as one CUDA graph of these evaluations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise._module import Plan
from equipoise._stop import Stop
from equipoise.bench.cells import SHAPES, TINY, Bench, Shape
from equipoise.bench.harness import Check, Goal, Row, Work, in_turns, recorded, register_case, replayed, tidy
from equipoise.bench.torchdeq import SKIPPED, Counted, torchdeq_solvers
from equipoise.solvers import Anderson

WARM_UP = 10  # solves: the captured engine records one smaller batch at a time, each the second time it is wanted
BASE = "Σ f(live)"
BATCH = 64
HARD = 0.2  # strength of the injection into the last system: its spectral radius is 0.96
MOST_STEPS = 100
AIM = 1.1


@register_case("skewed", ["small", "medium"])
def skewed(shapes: Sequence[str], device: torch.device, rounds: int) -> list[Row]:
    """63 easy systems and a hard one, to a tolerance, over the evaluations of f that unfinished systems need."""
    return [_row(SHAPES[shape], device, rounds) for shape in shapes]


@torch.no_grad()
def _row(shape: Shape, device: torch.device, rounds: int) -> Row:
    tidy(device)
    shape = shape.replace(batch=16 if shape is SHAPES[TINY] else BATCH)
    strength = torch.ones(shape.batch)
    strength[-1] = HARD
    bench = Bench(shape, device, strength)
    # In bfloat16 above 1.6e-2, four roundings: below that, the eager engine takes what does not get better.
    stop = Stop(rtol=2e-2 if shape.half else 1e-3, max_steps=MOST_STEPS)
    row = Row(f"{shape.name}, {shape.batch - 1} easy and 1 hard", "solve", BASE)
    row.goals = [Goal(f"anderson, {engine}", BASE, AIM) for engine in ("eager", "captured")]
    works: dict[str, Work] = {}
    for engine in ("eager", "captured"):
        works[f"anderson, {engine}"] = work = _solve(bench, stop, engine)
        for _ in range(WARM_UP):
            solution = work()
        _judge(row, f"anderson, {engine}", bench, solution.value, stop.rtol)
        steps = solution.stats.steps
        row.details[f"anderson, {engine}"] |= {
            "evaluations": int(solution.stats.nfe),
            "steps": f"{int(steps[:-1].max())} easy, {int(steps[-1])} hard",
        }
        if engine == "eager":
            works[BASE] = _least(bench, steps)
    row.check("anderson, captured", replayed(bench.deq))
    _add_torchdeq(row, bench, works, stop.rtol)
    row.values = in_turns(works, device, rounds)
    return row


def _solve(bench: Bench, stop: Stop, engine: str) -> Callable[[], Any]:
    def work() -> Any:
        with bench.planned(Plan(Anderson(), stop=stop), engine) as deq, bench.autocast():
            return deq(*bench.inputs)

    return work


def live(steps: Tensor) -> list[int]:
    """How many systems are evaluated at each step, if each takes so many: a system ends with its last evaluation."""
    evaluations = steps + 1  # the iterate that is found good enough is evaluated, too
    return [int((evaluations > k).sum()) for k in range(int(evaluations.max()))]


def _least(bench: Bench, steps: Tensor) -> Work:
    """The evaluations of f that unfinished systems need, recorded once and replayed."""
    injection, positions, past = bench.inputs
    z, counts = bench.start(), live(steps)

    def run() -> None:
        value = z
        with bench.autocast():
            for count in counts:
                value = bench.deq.cell(value[:count], injection[:count], positions, past).to(z.dtype)

    return recorded(run, bench.device)


def _judge(row: Row, candidate: str, bench: Bench, value: Tensor, rtol: float) -> None:
    """The residual of the worst system, measured by f in the precision of the solve."""
    fz = bench.f(value)
    worst = float(((fz - value).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1)).max())
    row.check(candidate, Check(worst, 1.1 * rtol, "the tolerance, in every system"))
    row.details[candidate] = {"worst residual": worst}


def _add_torchdeq(row: Row, bench: Bench, works: dict[str, Work], rtol: float) -> None:
    solver = torchdeq_solvers().get("anderson")
    if solver is None:
        row.skipped["torchdeq"] = SKIPPED
        return
    z0, counted = bench.start(), Counted(bench.f)

    def solve(f: Callable[[Tensor], Tensor]) -> Tensor:
        with bench.autocast():
            return solver(f, z0, max_iter=MOST_STEPS, tol=rtol, stop_mode="rel")[0]  # type: ignore[no-any-return]

    _judge(row, "anderson, torchdeq", bench, solve(counted), rtol)
    row.details["anderson, torchdeq"]["evaluations"] = counted.calls
    works["anderson, torchdeq"] = lambda: solve(bench.f)
