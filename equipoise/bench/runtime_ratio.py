"""Run time of a DEQ over that of the same layer applied so many times, as published, in training and in inference.

The tied network is a CUDA graph: else it would pay for launches that the captured engine does not. One wide DEQ layer
costs about as much as a whole untied network of equal parameters, which is measured beside it without a goal.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._errors import first_line
from equipoise.bench.harness import Check, Goal, Row, Work, compared, in_turns, recorded, register_case, replayed, tidy
from equipoise.bench.models import SUBJECTS, TINY, Budget, Subject, Trainer
from equipoise.solvers import Anderson, Broyden, Solver

GOALS = {"training": 1.5, "inference": 1.0}  # at the regularised budget
ENGINES = ("eager", "captured")
CONVERGED = 5e-2
# Both engines round to bfloat16 in their own order, and each is off by up to 1e-2 from a gradient in float32.
AGREEMENT = {True: 5e-2, False: 1e-3}


@register_case("runtime-ratio", ["wt103", "ptb"])
def runtime_ratio(shapes: Sequence[str], device: torch.device, rounds: int) -> list[Row]:
    """A DEQ over its tied twin of 18 (Transformer) or 70 layers (TrellisNet): training, inference, two budgets."""
    return [
        row
        for shape in shapes
        for subject in SUBJECTS[shape]
        for row in _rows(subject, device, rounds, half=shape != TINY)
    ]


def _rows(subject: Subject, device: torch.device, rounds: int, half: bool) -> list[Row]:
    tidy(device)
    trainer = Trainer(subject, device, half)
    rows = []
    for kind, ratio in zip(("training", "inference"), subject.ratios, strict=True):
        for which, budget in (("published", subject.published), ("regularised", subject.regularised)):
            row = _Measurement(trainer, kind, which, budget).row(rounds)
            row.notes.append(f"published ratio {ratio:g}")
            rows.append(row)
    return rows


class _Measurement:
    """One kind of work, at one budget."""

    def __init__(self, trainer: Trainer, kind: str, which: str, budget: Budget) -> None:
        self.trainer, self.kind, self.budget, self.subject = trainer, kind, budget, trainer.subject
        steps = f"{budget[0]}/{budget[1]}" if kind == "training" else str(budget[0])
        self.base = f"{self.subject.depth} tied layers"
        self.result = Row(f"{self.subject.name}, {kind}, {which} budget {steps}", "batch", self.base)
        if which == "regularised":
            self.result.goals.append(Goal("DEQ, captured", self.base, GOALS[kind]))
        solvers: tuple[Solver, Solver] = (Anderson(), Broyden())  # as published
        if "trellisnet" in self.subject.model:
            solvers = (trainer.model.config.plan.solver, trainer.model.config.plan.adjoint.solver)
        trainer.deq.plan = trainer.plan(*solvers, budget)

    def row(self, rounds: int) -> Row:
        trainer, row = self.trainer, self.result
        tidy(trainer.device)
        works: dict[str, Work] = {}
        self._add_explicit(works)
        grads: list[list[Tensor]] = []
        deq = self._work(trainer.model)
        for engine in ENGINES:
            works[f"DEQ, {engine}"] = work = self._by(engine, deq)
            work()
            grads.append(self._judge(f"DEQ, {engine}", work))
        tolerance = AGREEMENT[trainer.half]
        row.check("DEQ, captured", compared(grads[1], grads[0], tolerance, "the eager engine"))
        row.check("DEQ, captured", replayed(trainer.deq))
        row.values = in_turns(works, trainer.device, rounds)
        trainer.deq._capture = None  # recordings hold memory
        return row

    def _work(self, network: nn.Module) -> Callable[[], Any]:
        self.trainer.deq.engine = "eager"
        batch = self.trainer.batch(network)
        network.train(self.kind == "training")
        make = self.trainer.step if self.kind == "training" else self.trainer.inference
        return make(network, batch)

    def _by(self, engine: str, solve: Callable[[], Any]) -> Callable[[], Any]:
        deq = self.trainer.deq

        def work() -> Any:
            deq.engine = engine
            return solve()

        return work

    def _add_explicit(self, works: dict[str, Work]) -> None:
        trainer, row = self.trainer, self.result
        trainer.deq.engine = "eager"  # the twin's, too
        tied = self._work(trainer.model.explicit(self.subject.depth))
        works[self.base] = self._graph(self.base, tied)
        works[f"{self.base}, no graph"] = tied
        untied = self.subject.untied[0]
        try:
            works[untied] = self._graph(untied, self._work(trainer.untied()))
            works[untied]()
        except RuntimeError as error:  # it is there for comparison only
            works.pop(untied, None)
            row.skipped[untied] = first_line(error)

    def _graph(self, name: str, work: Callable[[], Any]) -> Work:
        """The work as a CUDA graph, or as it is where it cannot be recorded."""
        try:
            return recorded(partial(_done, work), self.trainer.device)
        except RuntimeError as error:
            self.result.notes.append(f"{name} goes without a CUDA graph: {first_line(error)}")
            work()
            return work

    def _judge(self, candidate: str, work: Callable[[], Any]) -> list[Tensor]:
        """The gradients, or the result of inference, with the same dropout for all; residuals are noted."""
        parameters = [p for p in self.trainer.model.parameters() if p.requires_grad]
        for p in parameters:
            if p.grad is not None:
                p.grad.zero_()  # in place: a recorded step goes on adding to this very tensor
        torch.manual_seed(0)
        output = work()
        solution = output.solution
        self.result.details[candidate] = known = {
            "evaluations": solution.stats.nfe,
            "forward residual": float(solution.stats.residual.max()),
        }
        if self.kind == "inference":
            found = [solution.value]
        else:
            known |= {"products": solution.backward.nfe, "adjoint residual": float(solution.backward.residual.max())}
            found = [p.grad.clone() for p in parameters if p.grad is not None]
        worst = max(value for name, value in known.items() if name.endswith("residual"))
        self.result.check(candidate, Check(worst, CONVERGED, "zero, as residual of the solves"))
        return found


def _done(work: Callable[[], Any]) -> None:
    work()
