"""What a solve costs beyond its evaluations of f: fixed budgets, no gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise._module import Plan
from equipoise._stop import Stop
from equipoise.bench.cells import SHAPES, TINY, Bench, Shape
from equipoise.bench.harness import (
    Goal,
    Row,
    Work,
    compared,
    distance,
    in_turns,
    recorded,
    register_case,
    replayed,
    tidy,
)
from equipoise.bench.torchdeq import SKIPPED, Counted, solvers_by_evaluations
from equipoise.solvers import Anderson, Broyden, Picard, Solver

STEPS = 24
SOLVERS: dict[str, Solver] = {"picard": Picard(), "anderson": Anderson(), "broyden": Broyden()}
BASE = "bare f"
REFERENCE = "the equilibrium in float32"


@register_case("solver", [name for name in SHAPES if name != TINY])
def solver(shapes: Sequence[str], device: torch.device, rounds: int) -> list[Row]:
    """24 steps of each solver, by both engines and by torchdeq, over 24 bare evaluations of f from a CUDA graph."""
    return [_row(SHAPES[shape], device, rounds) for shape in shapes]


@torch.no_grad()
def _row(shape: Shape, device: torch.device, rounds: int) -> Row:
    tidy(device)
    bench = Bench(shape, device)
    truth = bench.truth()
    row = Row(shape.name, "step", BASE, goals=_goals(shape))
    row.notes.append(f"spectral radius {bench.radius(truth):.2f}")
    works: dict[str, Work] = {BASE: bare(bench, STEPS)}
    works[BASE]()
    for name, solve in SOLVERS.items():
        for engine in ("eager", "captured"):
            work = works[f"{name}, {engine}"] = _solve(bench, solve, engine)
            work()  # records; after that it replays
            found = work()
            _judge(row, f"{name}, {engine}", bench, found.value, truth.value, int(found.stats.nfe))
        row.check(f"{name}, captured", replayed(bench.deq))
    for name, rival in solvers_by_evaluations(STEPS).items():
        f = Counted(bench.f)
        value = _rival(bench, rival, f)()
        _judge(row, f"{name}, torchdeq", bench, value, truth.value, f.calls)
        works[f"{name}, torchdeq"] = _rival(bench, rival, bench.f)
    if len(works) == 1 + 2 * len(SOLVERS):
        row.skipped["torchdeq"] = SKIPPED
    row.values = in_turns(works, device, rounds, units=STEPS)
    return row


def _goals(shape: Shape) -> list[Goal]:
    goals = [Goal(f"{name}, captured", BASE, bound) for name, bound in shape.overheads]
    if shape.forward is not None:
        goals.append(Goal("anderson, captured", "anderson, torchdeq", shape.forward, faster=True))
    return goals


def _judge(row: Row, candidate: str, bench: Bench, value: Tensor, truth: Tensor, evaluations: int) -> None:
    """Compare a result with the equilibrium, and note its residual and what it took."""
    row.check(candidate, compared([value], [truth], _tolerance(bench.shape, candidate), REFERENCE))
    row.details[candidate] = {
        "residual": distance([bench.f(value)], [value]),
        "error": row.checks[candidate][0].error,
        "evaluations": evaluations,
    }


def _tolerance(shape: Shape, candidate: str) -> float:
    # In bfloat16 a rounding of 2⁻⁸ in f moves the equilibrium by 3e-3 at these spectral radii; in float32 what is left
    # is the error of a solve cut short, 0.8²⁴ = 5e-3 for plain iteration at the worst.
    return 1e-2 if shape.half or candidate.startswith("picard") else 1e-3


def bare(bench: Bench, steps: int) -> Work:
    """As many evaluations of f, one on the result of the other, recorded once and replayed."""
    z = bench.start()

    def run() -> None:
        value = z
        with bench.autocast():  # around all of them: weights are cast once
            for _ in range(steps):
                value = bench.f(value)

    return recorded(run, bench.device)


def _solve(bench: Bench, solver: Solver, engine: str) -> Callable[[], Any]:
    plan = Plan(solver, stop=Stop(rtol=0, max_steps=STEPS))

    def work() -> Any:
        with bench.planned(plan, engine) as deq, bench.autocast():
            return deq(*bench.inputs)

    return work


def _rival(bench: Bench, rival: Callable[..., Any], f: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    z0 = bench.start()

    def work() -> Tensor:
        with bench.autocast():
            # A tolerance that is never met, so that it makes as many steps.
            return rival(f, z0, tol=1e-30, stop_mode="rel")[0]  # type: ignore[no-any-return]

    return work
