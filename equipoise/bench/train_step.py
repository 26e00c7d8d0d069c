"""A whole training step: forward solve, implicit backward, gradients of parameters; equal numbers of steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise._module import Plan
from equipoise._stop import Stop
from equipoise.adjoints import Implicit
from equipoise.bench.cells import SHAPES, Bench
from equipoise.bench.harness import Row, Work, compared, in_turns, register_case
from equipoise.solvers import Anderson

STEPS = 20
BASE = "eager"


@register_case("train-step")
def train_step(shapes: Sequence[str], device: torch.device, rounds: int) -> list[Row]:
    """20 forward and 20 adjoint steps of Anderson and the gradients of all parameters, by both engines and torchdeq."""
    return [_row(shape, device, rounds) for shape in shapes]


def _row(shape: str, device: torch.device, rounds: int) -> Row:
    bench = Bench(SHAPES[shape], device)
    works: dict[str, Work] = {engine: _step(bench, engine) for engine in ("eager", "captured")}
    row = Row(bench.shape.name, "step", BASE, {})
    grads = {}
    for engine, work in works.items():
        work()
        work()  # what the first one recorded is replayed
        grads[engine] = [p.grad.clone() for p in bench.deq.cell.parameters() if p.grad is not None]
    row.checks["captured"] = compared(
        grads["captured"], grads["eager"], 1e-1 if bench.shape.half else 1e-2, "gradients of the eager engine"
    )
    reasons = dict(bench.deq.capture.fallbacks)
    if reasons:
        row.notes.append(f"left to the eager engine: {reasons}")
    rival = _rival(bench)
    if rival is not None:
        rival()
        works["torchdeq"] = rival
    row.times = in_turns(works, device, rounds)
    return row


def _step(bench: Bench, engine: str) -> Work:
    stop = Stop(rtol=0, max_steps=STEPS)
    plan = Plan(Anderson(), Implicit(Anderson(), stop), stop)

    def work() -> Any:
        bench.deq.cell.zero_grad()
        with bench.planned(plan, engine) as deq:
            with bench.autocast():
                loss = _loss(deq(*bench.inputs).value)
            loss.backward()

    return work


def _loss(z: Tensor) -> Tensor:
    return z[..., ::2].float().square().mean()  # of half the features: normalised, all of them have a constant one


def _rival(bench: Bench) -> Callable[[], Any] | None:
    try:
        from torchdeq import get_deq
    except ImportError:
        return None
    options = {"f_max_iter": STEPS, "b_max_iter": STEPS, "f_tol": 1e-30, "b_tol": 1e-30}
    deq = get_deq(f_solver="anderson", b_solver="anderson", ift=True, **options)

    def work() -> Any:
        bench.deq.cell.zero_grad()
        z0 = bench.start()
        with bench.autocast():
            outputs, _ = deq(lambda z: bench.f(z).to(z.dtype), z0)
            loss = _loss(outputs[-1])
        loss.backward()

    return work
