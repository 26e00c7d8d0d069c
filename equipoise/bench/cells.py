"""The cells and shapes that solves are measured on: those of the DEQ-Transformer, from tiny to the published sizes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise._module import DEQ, Plan
from equipoise.models.deq_transformer import DEQTransformer, DEQTransformerConfig


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
        goals: Ratios to a bare f aimed at, by solver.
    """

    batch: int
    length: int
    width: int
    inner: int
    heads: int = 4
    half: bool = False
    goals: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.length}x{self.width}, {self.inner}, {'bf16' if self.half else 'fp32'}"


def _goals(anderson: float, picard: float) -> tuple[tuple[str, float], ...]:
    return (("picard", picard), ("anderson", anderson), ("broyden", 1.5 * anderson))


SHAPES = {
    "copy": Shape(32, 420, 32, 64, goals=_goals(1.25, 1.08)),
    "small": Shape(32, 128, 256, 1024, half=True, goals=_goals(1.3, 1.08)),
    "medium": Shape(15, 150, 416, 1600, heads=8, half=True, goals=_goals(1.3, 1.08)),
    "wide": Shape(15, 150, 704, 48_000, heads=8, half=True, goals=_goals(1.08, 1.03)),
    "wide56": Shape(56, 150, 704, 48_000, heads=8, half=True, goals=_goals(1.05, 1.03)),
    "tiny": Shape(4, 12, 16, 32, heads=2),
}


class Bench:
    """A cell with its inputs on a device, ready to be evaluated and solved."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape, self.device = shape, device
        config = DEQTransformerConfig(
            16, d_model=shape.width, heads=shape.heads, d_inner=shape.inner, weight_norm=False, init_std=0.05
        )
        self.model = DEQTransformer(config).to(device)
        tokens = torch.randint(16, (shape.batch, shape.length), device=device)
        with torch.no_grad():
            injection, *rest = self.model.inputs(tokens)
        # As strong as in a trained model: with the tiny initial word vectors there is hardly an equilibrium to find.
        self.inputs: Any = (1e3 * injection, *rest)

    @property
    def deq(self) -> DEQ:
        return self.model.deq

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.shape.half else nullcontext()

    def start(self) -> Tensor:
        return self.deq.start(*self.inputs)  # type: ignore[return-value]

    def f(self, z: Tensor) -> Tensor:
        """One evaluation, under the caller's autocast."""
        return self.deq.cell(z, *self.inputs)

    @contextmanager
    def planned(self, plan: Plan, engine: str) -> Iterator[DEQ]:
        """The DEQ with a plan and an engine for a while."""
        deq, before = self.deq, (self.deq.plan, self.deq.engine)
        deq.plan, deq.engine = plan, engine
        try:
            yield deq
        finally:
            deq.plan, deq.engine = before
