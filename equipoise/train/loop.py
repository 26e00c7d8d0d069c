"""One training loop for every task: set up, put the objects together, fit."""

import json
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise._module import solutions_of
from equipoise._tree import tree_map
from equipoise.penalties import jacobian_penalty
from equipoise.tasks import Splits, Task
from equipoise.train.checkpoint import (
    CheckpointError,
    GracefulStop,
    check_writable,
    checkpoint_bytes,
    checkpoint_folder,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    read_best,
    recover_checkpoints,
    save_checkpoint,
    write_best,
)
from equipoise.train.load import CHECKPOINTS
from equipoise.train.optim import WeightAverage, set_learning_rate
from equipoise.train.recipe import Recipe
from equipoise.train.schedule import Horizon, PlanSchedule, StepPlan
from equipoise.train.tracking import MetricsWriter, StatsWindow, environment

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        step: Optimiser steps made.
        metrics: Of the last evaluation.
        best: The best evaluation, as in best.json.
        interrupted: The signal that ended the run early, if any.
    """

    step: int
    metrics: dict[str, float]
    best: dict[str, Any] | None
    interrupted: str | None = None


def train(recipe: Recipe, out: str | Path, *, data_dir: str | None = None, resume: bool = False) -> Outcome:
    """Train by a recipe; everything the run writes lies under `out`.

    Args:
        recipe: What to do.
        out: Folder of the run: config.json, env.json, metrics.jsonl, checkpoints/.
        data_dir: Where data files are.
        resume: Continue from the newest checkpoint in `out`.
    """
    out = Path(out)
    accelerator = setup(recipe, out, resume)
    task = recipe.make_task(data_dir, accelerator.process_index, accelerator.num_processes)
    return _Run(recipe, task, out, accelerator, resume).fit()


def setup(recipe: Recipe, out: Path, resume: bool) -> "Accelerator":
    """Check the folder, write the settings down, and start the devices."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    check_writable(out)
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    AcceleratorState._reset_state()  # else the precision of an earlier run in this process would stay
    accelerator = Accelerator(mixed_precision=recipe.train.precision)
    _claim(out, resume, accelerator)
    if accelerator.is_main_process:
        _write_json(out / "env.json", environment())
    return accelerator


def _claim(out: Path, resume: bool, accelerator: "Accelerator") -> None:
    """Make the folder ready, or refuse it; one process tidies up, all see the same."""
    log = out / "metrics.jsonl"
    if accelerator.is_main_process:
        recover_checkpoints(out / CHECKPOINTS)
    accelerator.wait_for_everyone()
    if not resume and list_checkpoints(out / CHECKPOINTS):
        raise FileExistsError(f"{out} holds another run; continue it with resume, or choose another folder.")
    if accelerator.is_main_process and not resume and log.exists():
        log.replace(out / "metrics.failed.jsonl")  # of a run that came to nothing
    accelerator.wait_for_everyone()


class _Run:
    """The objects of a run, and the loop over them."""

    def __init__(self, recipe: Recipe, task: Task, out: Path, accelerator: "Accelerator", resume: bool) -> None:
        self.recipe, self.task, self.out, self.accelerator = recipe, task, out, accelerator
        settings = recipe.train
        self.splits: Splits = task.data()
        torch.manual_seed(settings.seed)
        self.plain = task.model()
        # Settings that follow from the data are part of the model: it must load without them.
        self.config = {**recipe.to_data(), "model": {**task.model_defaults(), **recipe.model}}
        check_writable(out, checkpoint_bytes(self.plain))
        self.schedule: PlanSchedule | None = recipe.schedule(self.plain)
        optimizer = settings.optimiser.build(self.plain)
        self.model, self.optimizer = accelerator.prepare(self.plain, optimizer)
        self.guard = settings.clip.start()
        self.average = WeightAverage(settings.averaging) if settings.averaging else None
        self.horizon = Horizon(settings.steps, self.splits.epoch)
        self.step, self.carry = 0, None
        self.forward, self.backward = StatsWindow(), StatsWindow()
        self.resumed = resume
        if resume:
            self._restore()
        if accelerator.is_main_process:  # after all that can be refused, so that a refusal changes nothing
            _write_json(out / "config.json", self.config)
            for name, values in task.artifacts().items():
                _write_json(out / name, values)

    def fit(self) -> Outcome:
        settings = self.recipe.train
        resumed = self.step if self.resumed else None
        metrics: dict[str, float] = {}
        main, path = self.accelerator.is_main_process, self.out / "metrics.jsonl"
        writer: Any = MetricsWriter(path, resume_step=resumed) if main else nullcontext(_Silent())
        with writer as log, GracefulStop() as stop:
            if not self.resumed:
                log.write(0, {"data": self.splits.info, "parameters": sum(p.numel() for p in self.plain.parameters())})
                self.evaluate("valid", most=2)  # a broken set-up dies here, not at the first evaluation
            since, seen = time.perf_counter(), self.step
            bar = self._progress_bar()
            while self.step < settings.steps and not stop.requested:
                losses = self._train_step()
                self.step += 1
                bar.update()
                last = self.step == settings.steps
                if self.step % settings.log_every == 0 or last:
                    seconds = (time.perf_counter() - since) / max(1, self.step - seen)
                    record = self._train_record(losses, seconds)
                    log.write(self.step, {"train": record})
                    bar.set_postfix(_headline(record), refresh=False)
                    since, seen = time.perf_counter(), self.step
                if self.step % settings.evaluate_every == 0 or last:
                    metrics = self.evaluate("valid")
                    log.write(self.step, {"valid": metrics})
                    self._save(metrics)
                    since, seen = time.perf_counter(), self.step
                elif self.step % settings.save_every == 0:
                    self._save()
            bar.close()
            if stop.requested:
                self._save()
            return Outcome(self.step, metrics, read_best(self.out / CHECKPOINTS), stop.reason)

    def _progress_bar(self) -> Any:
        from tqdm import tqdm

        # Shown to a person at a terminal only; the log is metrics.jsonl.
        hidden = None if self.accelerator.is_main_process else True
        return tqdm(total=self.recipe.train.steps, initial=self.step, disable=hidden, unit="step", dynamic_ncols=True)

    def _train_step(self) -> dict[str, Tensor]:
        """One optimiser step; every draw in it is keyed by the seed and the step."""
        plan = self._plan()
        self.model.train()
        torch.manual_seed(_key(self.recipe.train.seed, self.step, self.accelerator.process_index))
        batch = self.splits.train(self.step).to(self.accelerator.device)
        with self.accelerator.autocast(), solutions_of(self.plain) as solutions:
            losses, self.carry = self.task.training_step(self.model, batch, self.carry, self.step)
            total = losses["loss"]
            if plan is not None and plan.penalty_weight > 0:
                penalties = [jacobian_penalty(solution, probes=plan.penalty_probes) for solution, _ in solutions]
                losses["penalty"] = torch.stack(penalties).mean()
                total = total + plan.penalty_weight * losses["penalty"]
        self.accelerator.backward(total)
        factor = self.recipe.train.learning_rate.factor(self.step, self.horizon)
        self.rate = set_learning_rate(self.optimizer, factor)
        if self.guard.check(self.plain):
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.plain, self.step)
        for solution, used in solutions:
            self.forward.add(solution.stats, used.stop)
            self.backward.add(solution.backward, getattr(used.adjoint, "stop", None))
        return {name: self.accelerator.reduce(loss.detach(), "mean") for name, loss in losses.items()}

    def _plan(self) -> StepPlan | None:
        if self.schedule is None:
            return None
        plan = self.schedule.at(self.step)
        plan.apply(self.plain)
        return plan

    @torch.no_grad()
    def evaluate(self, split: str, most: int | None = None) -> dict[str, float]:
        """Metrics on a split, with averaged weights if there are any, and the residuals they were obtained at."""
        self._plan()
        self.model.eval()
        window = StatsWindow()
        weights = self.average.applied(self.plain) if self.average else nullcontext()
        with weights, self.accelerator.autocast():
            values = evaluate(self.task, self.model, self.splits, split, self.accelerator.device, window, most)
        self.model.train()
        return {**values, **{f"solve_{key}": value for key, value in window.summary().items() if key != "failed"}}

    def _train_record(self, losses: dict[str, Tensor], seconds: float) -> dict[str, Any]:
        record = {name: float(loss) for name, loss in losses.items()}
        record |= {"lr": self.rate, "seconds_per_step": seconds, **self.guard.metrics()}
        return {**record, "forward": self.forward.summary(), "backward": self.backward.summary()}

    def _save(self, metrics: dict[str, float] | None = None) -> None:
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        root = self.out / CHECKPOINTS
        folder = checkpoint_folder(root, self.step)
        trainer = {
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "guard": self.guard.state_dict(),
            "average": self.average.state_dict() if self.average else None,
            "carry": self.carry,
            "statistics": [self.forward.state_dict(), self.backward.state_dict()],
            # The model that is saved is the one that was evaluated; training goes on from the weights it had.
            "live": {name: p.detach().clone() for name, p in self.plain.named_parameters()} if self.average else None,
        }
        with self.average.applied(self.plain) if self.average else nullcontext():
            save_checkpoint(folder, self.plain, self.config, trainer)
        score = (metrics or {}).get(self.task.score)
        best = read_best(root)
        if score is not None and math.isfinite(score) and (best is None or score < best["score"]):
            write_best(root, folder, step=self.step, metric=self.task.score, score=score)
        prune_checkpoints(root, self.recipe.train.keep)

    def _restore(self) -> None:
        folder = latest_checkpoint(self.out / CHECKPOINTS)
        if folder is None:
            raise FileNotFoundError(f"{self.out} has no checkpoint to resume from; start it without resume.")
        try:
            trainer = load_checkpoint(folder, self.plain, self.accelerator.device).trainer
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{folder} does not fit the model of this recipe, so it cannot be resumed."
            ) from error
        if trainer is None:
            raise CheckpointError(f"{folder} holds weights only, so a run cannot be resumed from it.")
        if trainer["live"] is not None:
            with torch.no_grad():
                for name, parameter in self.plain.named_parameters():
                    parameter.copy_(trainer["live"][name])
        for window, state in zip((self.forward, self.backward), trainer["statistics"], strict=True):
            window.load_state_dict(state)
        self.step = int(trainer["step"])
        self.optimizer.load_state_dict(trainer["optimizer"])
        self.guard.load_state_dict(trainer["guard"])
        if self.average is not None and trainer["average"] is not None:
            self.average.load_state_dict(trainer["average"], self.plain)
        self.carry = tree_map(lambda x: x.to(self.accelerator.device) if isinstance(x, Tensor) else x, trainer["carry"])


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    splits: Splits,
    split: str,
    device: torch.device | str = "cpu",
    window: StatsWindow | None = None,
    most: int | None = None,
) -> dict[str, float]:
    """Metrics of a model on a split.

    Args:
        task: What to measure.
        model: In eval mode.
        splits: The data.
        split: Name of a held-out split.
        device: Where batches go.
        window: Takes the statistics of the solves.
        most: Batches to look at; None for all.
    """
    if split not in splits.held_out:
        raise ValueError(f"unknown split {split!r}. Known: {', '.join(sorted(splits.held_out))}.")
    metrics, carry = task.metrics().to(device), None
    for index, batch in enumerate(splits.held_out[split]()):
        if most is not None and index >= most:
            break
        with solutions_of(model) as solutions:
            carry = task.evaluation_step(model, batch.to(device), carry, metrics)
        for solution, used in solutions:
            if window is not None:
                window.add(solution.stats, used.stop)
    return task.report({name: float(value) for name, value in metrics.compute().items()})


class _Silent:
    """The log of a process that is not the first."""

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Leave it to the first process."""


def _headline(record: dict[str, Any]) -> dict[str, str]:
    """What a progress bar shows of a training record."""
    forward = record["forward"]
    shown = {"loss": f"{record['loss']:.4g}"}
    if forward:
        shown |= {"nfe": f"{forward['nfe']:.0f}", "residual": f"{forward['residual_p95']:.0e}"}
    return shown


def _key(seed: int, step: int, rank: int) -> int:
    """A seed of its own for every step and process."""
    return (seed * 1_000_003 + step) * 4_099 + rank


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
