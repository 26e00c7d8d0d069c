"""A whole training step: forward solve, implicit backward, gradients of parameters; equal numbers of steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise._module import Plan
from equipoise._stop import Stop
from equipoise.adjoints import Implicit
from equipoise.bench.cells import SHAPES, TINY, Bench, Shape
from equipoise.bench.harness import (
    Check,
    Goal,
    Row,
    Work,
    compared,
    compared_each,
    in_turns,
    register_case,
    replayed,
    tidy,
)
from equipoise.bench.torchdeq import SKIPPED, Counted, implicit_layer
from equipoise.solvers import Anderson

STEPS = 20
BASE = "eager"
ENGINES = ("eager", "captured")
REFERENCE = "the gradient in float32"
TRAINED = {name: shape if name == TINY else shape.replace(half=True) for name, shape in SHAPES.items()}


@register_case("train-step", [name for name in SHAPES if name != TINY])
def train_step(shapes: Sequence[str], device: torch.device, rounds: int) -> list[Row]:
    """20 forward and 20 adjoint steps of Anderson and all gradients, in bfloat16, by both engines and torchdeq."""
    return [_row(TRAINED[shape], device, rounds) for shape in shapes]


def _row(shape: Shape, device: torch.device, rounds: int) -> Row:
    tidy(device)
    bench = Bench(shape, device)
    row = Row(shape.name, "training step", BASE)
    if shape.step is not None:
        row.goals.append(Goal("captured", "torchdeq", shape.step, faster=True))
    truth = bench.truth()
    row.notes.append(f"spectral radius {bench.radius(truth):.2f}")
    backward(bench, truth.value)
    exact = gradients(bench)
    works: dict[str, Work] = {engine: step(bench, engine) for engine in ENGINES}
    for engine, work in works.items():
        work()
        solution = work()  # what the first one recorded is replayed
        row.check(engine, *judged(gradients(bench), exact, shape))
        row.details[engine] = {
            "forward residual": float(solution.stats.residual.max()),
            "adjoint residual": float(solution.backward.residual.max()),
            "error": row.checks[engine][0].error,
            "evaluations": solution.stats.nfe,
            "products": solution.backward.nfe,
        }
    row.check("captured", replayed(bench.deq))
    _add_torchdeq(row, bench, works, exact)
    row.values = in_turns(works, device, rounds)
    return row


def judged(found: Sequence[Tensor], exact: Sequence[Tensor], shape: Shape) -> list[Check]:
    """All gradients together, and each on its own, against the exact ones."""
    # In bfloat16 roundings of 2⁻⁸ in f and in its products give 5e-3 to 8e-3 in all gradients together, and up to 4e-2
    # in the smallest of them, the biases of attention, which are small differences. A gradient of another kind, or of a
    # solve that has not converged, is off by tenths: a single step instead of the adjoint solve by 0.5 and more.
    whole, each = (3e-2, 1.5e-1) if shape.half else (1e-3, 1e-2)
    return [compared(found, exact, whole, REFERENCE), compared_each(found, exact, each, REFERENCE)]


def gradients(bench: Bench) -> list[Tensor]:
    """Of the cell's parameters, copied; zeros where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in bench.deq.cell.parameters()]


def backward(bench: Bench, value: Tensor) -> None:
    """The gradients of a loss of the equilibrium."""
    bench.deq.cell.zero_grad()
    # Of half the features: normalised, all of them have a constant sum of squares. A sum and not a mean: the ridge of
    # torchdeq's Anderson is absolute, and spoils the adjoint solve of cotangents much smaller than 1.
    value[..., ::2].float().square().sum().backward()


def step(bench: Bench, engine: str, adjoint: Any = None) -> Callable[[], Any]:
    """A training step by an engine, with the implicit gradient unless another one is given; returns the solution."""
    stop = Stop(rtol=0, max_steps=STEPS)
    plan = Plan(Anderson(), adjoint or Implicit(Anderson(), stop), stop)

    def work() -> Any:
        with bench.planned(plan, engine) as deq:
            with bench.autocast():
                solution = deq(*bench.inputs)
            backward(bench, solution.value)
            return solution

    return work


def _add_torchdeq(row: Row, bench: Bench, works: dict[str, Work], exact: list[Tensor]) -> None:
    layer = implicit_layer(STEPS)
    if layer is None:
        row.skipped["torchdeq"] = SKIPPED
        return
    counted = Counted(bench.f)
    _torchdeq_step(bench, layer, counted)()
    row.check("torchdeq", *judged(gradients(bench), exact, bench.shape))
    row.details["torchdeq"] = {
        "error": row.checks["torchdeq"][0].error,
        "evaluations": counted.calls,
        "products": counted.products,
    }
    works["torchdeq"] = _torchdeq_step(bench, layer, bench.f)


def _torchdeq_step(bench: Bench, layer: Callable[..., Any], f: Callable[[Tensor], Tensor]) -> Work:
    def evaluate(z: Tensor) -> Tensor:
        # Weights cast while no gradient was wanted must not serve where one is. In its backward pass, where no autocast
        # is around, f enters it by itself: else torchdeq would go backward in float32.
        if torch.is_grad_enabled():
            torch.clear_autocast_cache()
        return f(z)

    def work() -> Any:
        z0 = bench.start()
        with bench.autocast():  # around the solve: weights are cast once
            outputs, _ = layer(evaluate, z0)
        backward(bench, outputs[-1])

    return work
