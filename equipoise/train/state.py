"""What changes over a run besides the weights, how it is saved, and how a run goes on from it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.train.alternate import Alternation
from equipoise.train.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    read_best,
    save_checkpoint,
    write_best,
)
from equipoise.train.optim import Stepper, WeightAverage
from equipoise.train.processes import Processes
from equipoise.train.schedule import PenaltyControl, PlateauMonitor
from equipoise.train.shares import Share, joined, on_cpu, part_of
from equipoise.train.statistics import copy_statistics, running_statistics
from equipoise.train.tracking import StatsWindow


@dataclass
class RunState:
    """Where a run is.

    Attributes:
        model: The weights in training.
        stepper: The optimiser and its guards.
        shares: Those of this process, with what they carry.
        plateau: The learning rate's view of the results, if it has one.
        control: The penalty's view of the residuals, if it has one.
        average: Of the weights, if one is kept.
        alternation: The learned solver, if there is to be one.
        step: Optimiser steps made.
        seconds: Wall time of the run up to here, resumed parts included.
        forward: Statistics of solves since the last log line.
        backward: Likewise, of the backward solves.
        saved: Step of the newest checkpoint.
        statistics: Of BatchNorm, those of the averaged weights after this step; None where they are not known yet.
    """

    model: nn.Module
    stepper: Stepper
    shares: list[Share]
    plateau: PlateauMonitor | None = None
    control: PenaltyControl | None = None
    average: WeightAverage | None = None
    alternation: Alternation | None = None
    step: int = 0
    seconds: float = 0.0
    forward: StatsWindow = field(default_factory=StatsWindow)
    backward: StatsWindow = field(default_factory=StatsWindow)
    saved: int | None = None
    statistics: tuple[int, dict[str, Tensor]] | None = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with its averaged weights, if there are any, and with their statistics, if these are known."""
        with self.average.applied(self.model) if self.average else nullcontext():
            if self.statistics is None or self.statistics[0] != self.step:
                yield
                return
            live = {name: value.clone() for name, value in running_statistics(self.model).items()}
            copy_statistics(self.model, self.statistics[1])
            try:
                yield
            finally:
                copy_statistics(self.model, live)

    def save(self, root: Path, config: dict[str, Any], processes: Processes) -> Path:
        """Write a checkpoint of this step; all processes take part, the first one writes.

        The model that is saved is the one that was evaluated; training goes on from the weights it had.
        """
        folder = checkpoint_folder(root, self.step)
        trainer = self._trainer(processes)
        if processes.main:
            with self.averaged():
                save_checkpoint(folder, self.model, config, trainer)
        self.saved = self.step
        return folder

    def _trainer(self, processes: Processes) -> dict[str, Any]:
        live = {name: value.detach().clone() for name, value in _trained(self.model).items()} if self.average else None
        local = (
            [(s.rows, on_cpu(s.carry)) for s in self.shares],
            self.forward.state_dict(),
            self.backward.state_dict(),
        )
        carries, forward, backward = (
            [item for part in parts for item in part] for parts in zip(*processes.gather(local), strict=True)
        )
        return {
            "step": self.step,
            "seconds": self.seconds,
            "stepper": self.stepper.state_dict(),
            "plateau": self.plateau.state_dict() if self.plateau else None,
            "control": self.control.state_dict() if self.control else None,
            "average": self.average.state_dict() if self.average else None,
            "alternation": self.alternation.state_dict() if self.alternation else None,
            "carry": joined(carries),
            "statistics": [forward, backward],
            "live": live,
        }

    def restore(self, root: Path, processes: Processes) -> None:
        """Go on from the newest checkpoint."""
        folder = latest_checkpoint(root)
        if folder is None:
            raise FileNotFoundError(f"{root.parent} has no checkpoint to resume from; start it without --resume.")
        try:
            trainer = load_checkpoint(folder, self.model, processes.device).trainer
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{folder} does not fit the model of this recipe, so it cannot be resumed."
            ) from error
        if trainer is None:
            raise CheckpointError(f"{folder} holds weights only, so a run cannot be resumed from it.")
        self._take(trainer, processes)

    def _take(self, trainer: Mapping[str, Any], processes: Processes) -> None:
        if trainer["live"] is not None:
            live = {**running_statistics(self.model), **trainer["live"]}  # older checkpoints have parameters alone
            with torch.no_grad():
                for name, tensor in _trained(self.model).items():
                    tensor.copy_(live[name])
        self.step, self.seconds = int(trainer["step"]), float(trainer["seconds"])
        self.saved = self.step
        self.stepper.load_state_dict(trainer["stepper"])
        if self.plateau is not None and trainer["plateau"] is not None:
            self.plateau.load_state_dict(trainer["plateau"])
        if self.control is not None and trainer.get("control") is not None:  # older checkpoints have none
            self.control.load_state_dict(trainer["control"])
        if self.average is not None and trainer["average"] is not None:
            self.average.load_state_dict(trainer["average"], self.model)
        if self.alternation is not None and trainer.get("alternation") is not None:
            self.alternation.load_state_dict(trainer["alternation"], processes.device)
        for share in self.shares:
            share.rows = share.splits.train(self.step).rows
            share.carry = part_of(trainer["carry"], share.rows, processes.device)
        if processes.main:  # the statistics of all processes are in there
            for window, state in zip((self.forward, self.backward), trainer["statistics"], strict=True):
                window.load_state_dict(state)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """What training goes on from: parameters, and the statistics that go with them."""
    return {**dict(model.named_parameters()), **running_statistics(model)}


def note_best(root: Path, folder: Path, step: int, metric: str, score: float | None, keep: int) -> None:
    """Point best.json to a checkpoint if its score is the best yet, and delete old checkpoints."""
    best = read_best(root)
    if score is not None and math.isfinite(score) and (best is None or score < best["score"]):
        write_best(root, folder, step=step, metric=metric, score=score)
    prune_checkpoints(root, keep)
