"""The cells and shapes that solves are measured on: those of the DEQ-Transformer, from tiny to the published sizes.

What makes f a contraction is the injection, not small weights: f normalises its results, so weights near zero leave an
identity, while a strong injection into the values of the attention makes the old state a small part of the sum that is
normalised. The spectral radius of the Jacobian is 0.5 to 0.8 at all shapes, and 20 steps of Anderson reach the rounding
of bfloat16 forward and backward; nothing else about the cost of f changes.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise._module import DEQ, Plan
from equipoise._solution import Solution
from equipoise._stop import Stop
from equipoise.adjoints import Implicit
from equipoise.bench.harness import TINY
from equipoise.diagnostics import spectral_radius
from equipoise.models.deq_transformer import DEQTransformer, DEQTransformerConfig
from equipoise.solvers import Anderson

# Sizes of the injection: of queries and keys, and of values; half as much of the latter differs from position to
# position.
QUERIES, VALUES = 1.0, 2.5
# What a result is compared with: a solve in float32 far beyond the rounding of bfloat16.
TRUTH = Stop(rtol=1e-6, max_steps=80)


@dataclass(frozen=True)
class Shape:
    """A cell and its batch.

    Attributes:
        batch: Systems.
        length: Positions in each.
        width: Features of a position.
        inner: Features of the feed-forward part.
        heads: Of the attention.
        half: Whether f is computed in bfloat16, by autocast.
        overheads: Ratios to a bare f aimed at, by solver.
        forward: Speed-up of a forward solve by Anderson over torchdeq aimed at.
        step: Speed-up of a training step over torchdeq aimed at.
    """

    batch: int
    length: int
    width: int
    inner: int
    heads: int = 4
    half: bool = False
    overheads: tuple[tuple[str, float], ...] = ()
    forward: float | None = None
    step: float | None = None

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.length}x{self.width}, {self.inner}, {'bf16' if self.half else 'fp32'}"

    def replace(self, **changes: Any) -> "Shape":
        """A shape with some settings changed."""
        return dataclasses.replace(self, **changes)


def _overheads(anderson: float, picard: float) -> tuple[tuple[str, float], ...]:
    return (("picard", picard), ("anderson", anderson), ("broyden", 1.5 * anderson))


SHAPES = {
    "copy": Shape(32, 420, 32, 64, overheads=_overheads(1.25, 1.08), forward=7, step=10),
    "small": Shape(32, 128, 256, 1024, half=True, overheads=_overheads(1.3, 1.08), forward=10, step=10),
    "medium": Shape(15, 150, 416, 1600, heads=8, half=True, overheads=_overheads(1.3, 1.08), forward=9, step=10),
    "wide": Shape(15, 150, 704, 48_000, heads=8, half=True, overheads=_overheads(1.08, 1.03), forward=2.4, step=2.5),
    "wide56": Shape(56, 150, 704, 48_000, heads=8, half=True, overheads=_overheads(1.05, 1.03), forward=1.4),
    TINY: Shape(4, 12, 16, 32, heads=2),
}


class Bench:
    """A cell with its inputs on a device, ready to be evaluated and solved.

    Args:
        shape: Of the cell and the batch.
        device: Where.
        strength: (B,) factors of the injection into values: 1 is easy to solve, less is harder.
    """

    def __init__(self, shape: Shape, device: torch.device, strength: Tensor | None = None) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        config = DEQTransformerConfig(
            16, d_model=shape.width, heads=shape.heads, d_inner=shape.inner, weight_norm=False, init_std=0.05
        )
        self.model = DEQTransformer(config).to(device)
        with torch.no_grad():
            _, *rest = self.model.inputs(torch.zeros(shape.batch, shape.length, dtype=torch.int64, device=device))
        injection = _injection(shape, torch.ones(shape.batch) if strength is None else strength)
        self.inputs: Any = (injection.to(device), *rest)

    @property
    def deq(self) -> DEQ:
        return self.model.deq

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.shape.half else nullcontext()

    def start(self) -> Tensor:
        return self.deq.start(*self.inputs)  # type: ignore[return-value]

    def f(self, z: Tensor) -> Tensor:
        """One evaluation on a state in the precision of the shape, wherever it is asked for."""
        with self.autocast():
            return self.deq.cell(z, *self.inputs).to(z.dtype)

    @contextmanager
    def planned(self, plan: Plan, engine: str) -> Iterator[DEQ]:
        """The DEQ with a plan and an engine for a while."""
        deq, before = self.deq, (self.deq.plan, self.deq.engine)
        deq.plan, deq.engine = plan, engine
        try:
            yield deq
        finally:
            deq.plan, deq.engine = before

    def truth(self) -> Solution:
        """The equilibrium in float32; with gradients if they are enabled."""
        with self.planned(Plan(Anderson(), Implicit(Anderson(), TRUTH), TRUTH), "eager") as deq:
            return deq(*self.inputs)  # type: ignore[no-any-return]

    @torch.no_grad()
    def radius(self, solution: Solution) -> float:
        """The largest spectral radius of the Jacobian of a system."""
        return float(spectral_radius(solution, steps=30, window=10).max())


def _injection(shape: Shape, strength: Tensor) -> Tensor:
    """Random queries, keys and values (B, T, 3d), made on the host: the same on every device."""
    generator = torch.Generator().manual_seed(1)

    def normal(length: int, size: int) -> Tensor:
        return torch.randn(shape.batch, length, size, generator=generator)

    values = normal(1, shape.width) + 0.5 * normal(shape.length, shape.width)
    factors = VALUES * strength[:, None, None]
    return torch.cat([QUERIES * normal(shape.length, 2 * shape.width), factors * values], dim=-1)
