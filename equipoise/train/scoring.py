"""Scoring a run's model again and again, with other solvers and numbers of steps."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from equipoise._forward import CapturedForward
from equipoise._module import deqs_in, solutions_of
from equipoise._tape import inline
from equipoise.train.load import TrainedRun
from equipoise.train.loop import evaluate
from equipoise.train.tracking import StatsWindow

# Forward passes of a kind after which one is recorded: a recording takes as long as dozens of them.
WORTH_A_GRAPH = 16
# Kinds of batches that are remembered: the first ones of a pass, those in its midst, its last one.
MOST_KINDS = 4


class _Metric:
    """Notes what a metric is to take in: a graph does not do that again."""

    def __init__(self, name: str, told: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.name, self.told = name, told

    def update(self, *values: Any, **named: Any) -> None:
        self.told.append((self.name, values, named))


class Scoring:
    """Metrics of models on a split of a run's data.

    A forward pass that comes often is one CUDA graph from some time on, where it can be.

    Args:
        opened: The run.
        split: Held-out data.
        most: Batches to score on; None for all.
    """

    def __init__(self, opened: TrainedRun, split: str, most: int | None = None) -> None:
        self.opened, self.split, self.most = opened, split, most
        self._latest: CapturedForward | None = None

    def __call__(self, model: nn.Module, batches: Sequence[Any] = ()) -> dict[str, float]:
        """Metrics of a model in eval mode; batches are those of the split."""
        return self.measured(model)[0]

    @torch.no_grad()
    def measured(self, model: nn.Module) -> tuple[dict[str, float], dict[str, Any]]:
        """Metrics of a model in eval mode, and a summary of its solves."""
        opened, window, forward = self.opened, StatsWindow(), self.forward(model)

        def step(batch: Any, carry: Any, metrics: Any) -> Any:
            told, carry, solves = forward(batch, carry)
            for name, values, named in told:
                metrics[name].update(*values, **named)
            return carry, solves

        found = evaluate(opened.task, model, opened.splits, self.split, opened.device, window, self.most, step)
        return found, window.summary()

    def forward(self, model: nn.Module) -> CapturedForward:
        """A model's forward pass on a batch, given what the one before left."""
        if self._latest is None or self._latest.model is not model:
            names = [str(name) for name in self.opened.task.metrics()]
            function = partial(self._step, model, names)
            self._latest = CapturedForward(model, function, after=WORTH_A_GRAPH, most=MOST_KINDS, warn=False)
        return self._latest

    def _step(self, model: nn.Module, names: Sequence[str], batch: Any, carry: Any) -> Any:
        """What metrics are to take in, what the next batch needs, and statistics of the solves."""
        told: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        metrics: Any = {name: _Metric(name, told) for name in names}
        with solutions_of(model) as solutions, engine_of(model, "auto") if inline() else contextlib.nullcontext():
            carry = self.opened.task.evaluation_step(model, batch, carry, metrics)
        return told, carry, [(solution.stats, plan.stop) for solution, plan in solutions]


@contextlib.contextmanager
def engine_of(model: nn.Module, engine: str) -> Iterator[None]:
    """Meanwhile the DEQs of a model have this engine."""
    deqs = deqs_in(model)
    before = [deq.engine for deq in deqs]
    try:
        for deq in deqs:
            deq.engine = engine
        yield
    finally:
        for deq, own in zip(deqs, before, strict=True):
            deq.engine = own
