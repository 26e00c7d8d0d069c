"""Memory of a training step: a DEQ beside explicit networks of some depths, checkpointed ones and an untied one.

Two accountings, a row each. *Kept*: tensors that autograd saves between forward and backward pass (each storage once,
parameters not counted) and what the solver stores, the larger of its two solves; for a checkpointed network also the
layers that the backward pass evaluates again at a time. The same on every device. *Peak*, on CUDA only: the most that
the allocator hands out during a step over what there was before it, with all temporary tensors, and with the buffers
and the private memory of recordings for the captured engine.

Parameters, gradients, optimiser, embedding, softmax and what the allocator keeps in reserve are in neither; a third row
adds parameters and gradients to the peak (to what is kept where there is no peak). Computed in float32. Weights are not
normalised: normalised copies, as large as the parameters and the same on all sides, would blur the shares. The
feed-forward part of the Transformer is recomputed piece by piece, in the DEQ and in its tied twins alike.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from equipoise._errors import first_line
from equipoise._solution import EquilibriumWarning
from equipoise.bench.harness import Check, Goal, Row, Sample, register_case, tidy
from equipoise.bench.models import SUBJECTS, TINY, Subject, Trainer, mean_loss
from equipoise.diagnostics.memory import MemoryReport, memory_report
from equipoise.diagnostics.memory_peak import PeakMemory, peak_of_step
from equipoise.solvers import Anderson

FLAT = 1.02  # a few bytes of statistics grow with the number of steps
CONVERGED = 5e-2  # residual of both solves, for the step to be one of an equilibrium

KEPT, PEAK, TRAINED = "kept", "peak", "with parameters and gradients"
ACCOUNTING = {
    KEPT: "tensors that autograd saves, without parameters; the solver's history; layers recomputed at a time",
    PEAK: "peak of allocated memory in a step over what was allocated before, recordings of the engine included",
    TRAINED: "parameters and their gradients added; no optimiser, no embedding, no reserve of the allocator",
}


@register_case("memory", [name for name in SUBJECTS if name != TINY])
def memory(shapes: Sequence[str], device: torch.device, rounds: int) -> list[Row]:
    """Memory of a training step: a DEQ by both engines at several budgets, beside explicit depths and an untied net."""
    rows = []
    for shape in shapes:
        for subject in SUBJECTS[shape]:
            rows += _Profile(subject, device).rows()
    return rows


class _Profile:
    """The measurements of one subject."""

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self.subject, self.device = subject, device
        self.trainer = Trainer(subject, device, False, **dict(subject.lean))
        self.kept: dict[str, MemoryReport] = {}
        self.peaks: dict[str, PeakMemory] = {}
        self.residuals: dict[str, Check] = {}
        self.skipped: dict[str, str] = {}

    def rows(self) -> list[Row]:
        base = _layers(self.subject.bar)
        self._measure_deq()
        for depth in self.subject.layers:
            self._measure(_layers(depth), partial(self.trainer.model.explicit, depth))
        for depth, every in self.subject.checkpoints:
            name = f"{depth} layers, checkpointed"
            self._measure(name, partial(self.trainer.model.explicit, depth, every))
        self._measure(self.subject.untied[0], self.trainer.untied)
        kept = {name: report.activations + self._recomputed(name) for name, report in self.kept.items()}
        rows = [self._row(KEPT, base, kept)]
        if self.peaks:
            rows.append(self._row(PEAK, base, {name: peak.activations for name, peak in self.peaks.items()}))
            rows.append(self._row(TRAINED, base, {name: peak.trained for name, peak in self.peaks.items()}))
        else:
            whole = {name: kept[name] + r.parameters + r.gradients for name, r in self.kept.items()}
            rows.append(self._row(TRAINED, base, whole))
        return rows

    def _recomputed(self, name: str) -> int:
        """Bytes of the layers between two checkpoints: the growth of the graph per layer, measured without any."""
        every = {f"{depth} layers, checkpointed": every for depth, every in self.subject.checkpoints}.get(name, 0)
        few, many = self.subject.layers[-2:]
        graphs = [self.kept[_layers(n)].graph for n in (few, many) if _layers(n) in self.kept]
        return every * (graphs[1] - graphs[0]) // (many - few) if len(graphs) == 2 else 0

    # Measuring

    def _measure_deq(self) -> None:
        engines = ("eager", "captured") if self.device.type == "cuda" else ("eager",)
        for steps in self.subject.budgets:
            name = "DEQ" if steps == self.subject.budgets[0] else f"DEQ, {steps} steps"
            for engine in engines:
                self._measure(f"{name}, {engine}", lambda: self.trainer.model, engine, steps)

    def _measure(
        self, name: str, make: Callable[[], nn.Module], engine: str = "eager", steps: int | None = None
    ) -> None:
        tidy(self.device)
        deq, trainer = self.trainer.deq, self.trainer
        steps = steps or self.subject.budgets[0]
        deq.plan, deq.engine = trainer.plan(Anderson(), Anderson(), (steps, steps)), "eager"
        network = make()
        batch = trainer.batch(network)
        for p in network.parameters():
            p.grad = None
        deq.engine = engine
        try:
            if engine == "eager":
                self.kept[name] = memory_report(network, batch, mean_loss)
            if self.device.type == "cuda":
                self._measure_peak(name, network, batch)
            if name.startswith("DEQ"):
                self.residuals[name] = _residual(trainer.step(network, batch)())
        except torch.OutOfMemoryError as error:
            self.skipped[name] = first_line(error)
            self.kept.pop(name, None)
        finally:
            deq._capture = None  # recordings hold memory

    def _measure_peak(self, name: str, network: nn.Module, batch: tuple[Any, ...]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", EquilibriumWarning)  # a solve left to the other engine
            try:
                step = self.trainer.step(network, batch)
                self.peaks[name] = peak_of_step(step, network.parameters(), self.device)
            except EquilibriumWarning as reason:
                self.skipped[name] = str(reason)

    # Reporting

    def _row(self, accounting: str, base: str, values: dict[str, int]) -> Row:
        subject = self.subject
        row = Row(f"{subject.name}, {accounting}", "training step", base, quantity="bytes", skipped=dict(self.skipped))
        row.values = {name: Sample.of([float(value)]) for name, value in values.items()}
        row.checks = {name: [check] for name, check in self.residuals.items() if name in values}
        row.goals = [goal for goal in self._goals(accounting, base) if goal.candidate in values]
        row.details = {name: self._parts(name) for name in values}
        row.notes.append(f"{accounting} is: {ACCOUNTING[accounting]}")
        return row

    def _goals(self, accounting: str, base: str) -> list[Goal]:
        layers, trained, untied = self.subject.shares
        share = trained if accounting == TRAINED else layers
        _, few, many = self.subject.budgets
        goals = []
        for engine in ("eager", "captured"):
            deq = f"DEQ, {engine}"
            if share is not None:
                goals.append(Goal(deq, base, share))
            if accounting == TRAINED:
                continue
            goals += [Goal(deq, f"{depth} layers, checkpointed", 1.0) for depth, _ in self.subject.checkpoints]
            if untied is not None:
                goals.append(Goal(deq, self.subject.untied[0], untied))
            goals.append(Goal(f"DEQ, {many} steps, {engine}", f"DEQ, {few} steps, {engine}", FLAT))
        return goals

    def _parts(self, name: str) -> dict[str, int]:
        """Bytes by what they are for."""
        kept, peak = self.kept.get(name), self.peaks.get(name)
        parts: dict[str, int] = {}
        if kept is not None:
            parts |= {"graph": kept.graph, "history": kept.history, "recomputed": self._recomputed(name)}
        if peak is not None:
            parts |= {"step": peak.step, "held": peak.held, "reserved": peak.reserved}
        either: Any = kept or peak
        return parts | {"parameters": either.parameters, "gradients": either.gradients}


def _layers(depth: int) -> str:
    return "1 layer" if depth == 1 else f"{depth} layers"


def _residual(output: Any) -> Check:
    solution = output.solution
    worst = max(float(stats.residual.max()) for stats in (solution.stats, solution.backward))
    return Check(worst, CONVERGED, "zero, as residual of both solves")
