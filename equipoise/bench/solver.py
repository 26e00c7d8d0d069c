"""What a solve costs beyond its evaluations of f: fixed budgets, no gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise._module import Plan
from equipoise._stop import Stop
from equipoise._tape import tape_for
from equipoise.bench.cells import SHAPES, Bench
from equipoise.bench.harness import Row, Work, compared, in_turns, register_case
from equipoise.bench.rivals import torchdeq_solvers
from equipoise.solvers import Anderson, Broyden, Picard, Solver

STEPS = 24
SOLVERS: dict[str, Solver] = {"picard": Picard(), "anderson": Anderson(), "broyden": Broyden()}
BASE = "bare f"


@register_case("solver")
def solver(shapes: Sequence[str], device: torch.device, rounds: int) -> list[Row]:
    """24 steps of each solver, by both engines and by torchdeq, over 24 bare evaluations of f from a CUDA graph."""
    return [_row(shape, device, rounds) for shape in shapes]


@torch.no_grad()
def _row(shape: str, device: torch.device, rounds: int) -> Row:
    bench = Bench(SHAPES[shape], device)
    row = Row(bench.shape.name, "step", BASE, {}, goals={f"{k}, captured": v for k, v in bench.shape.goals})
    works: dict[str, Work] = {BASE: bare(bench, STEPS)}
    works[BASE]()
    # Kernels sum in another order; under bfloat16 f itself amplifies that to its rounding.
    tolerance = 5e-2 if bench.shape.half else 1e-3
    for name, solve in SOLVERS.items():
        values = []
        for engine in ("eager", "captured"):
            work = _solve(bench, solve, engine)
            work()  # records; after that it replays
            values.append(work().value)
            works[f"{name}, {engine}"] = work
        row.checks[f"{name}, captured"] = compared(values[1:], values[:1], tolerance, "the eager engine")
        reasons = dict(bench.deq.capture.fallbacks)
        if reasons:
            row.notes.append(f"{name} was left to the eager engine: {reasons}")
    for name, rival in torchdeq_solvers().items():
        works[f"{name}, torchdeq"] = _rival(bench, rival)
        works[f"{name}, torchdeq"]()
    row.times = in_turns(works, device, rounds, units=STEPS)
    return row


def bare(bench: Bench, steps: int) -> Work:
    """As many evaluations of f, one on the result of the other, recorded once and replayed."""
    z = bench.start()

    def run() -> None:
        value = z
        with bench.autocast():
            for _ in range(steps):
                value = bench.f(value).to(z.dtype)

    tape: Any = tape_for(bench.device)
    tape.rehearse(run)
    return tape.record(run)  # type: ignore[no-any-return]


def _solve(bench: Bench, solver: Solver, engine: str) -> Callable[[], Any]:
    plan = Plan(solver, stop=Stop(rtol=0, max_steps=STEPS))

    def work() -> Any:
        with bench.planned(plan, engine) as deq, bench.autocast():
            return deq(*bench.inputs)

    return work


def _rival(bench: Bench, rival: Callable[..., Any]) -> Work:
    z0 = bench.start()

    def f(z: Tensor) -> Tensor:
        return bench.f(z).to(z.dtype)

    def work() -> Any:
        with bench.autocast():
            # A tolerance that is never met, so that it makes as many steps.
            return rival(f, z0, max_iter=STEPS, tol=1e-30, stop_mode="rel")

    return work
