"""One training loop for every task: set up, put the objects together, fit."""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise._draws import Rows, rows_of
from equipoise._errors import unknown_name
from equipoise._module import solutions_of
from equipoise._solution import EquilibriumWarning, Stats
from equipoise._stop import Stop
from equipoise.tasks import Splits, Task
from equipoise.tasks.base import forward_of
from equipoise.train.alternate import Alternation, FitStoppedError
from equipoise.train.captured_step import CapturedSteps, Pass, obstacle
from equipoise.train.checkpoint import (
    GracefulStop,
    check_writable,
    checkpoint_bytes,
    latest_checkpoint,
    list_checkpoints,
    read_best,
    recover_checkpoints,
)
from equipoise.train.load import CHECKPOINTS, begin_with
from equipoise.train.optim import Stepper, WeightAverage
from equipoise.train.processes import Processes
from equipoise.train.recipe import Recipe
from equipoise.train.resumed import check_resumed
from equipoise.train.schedule import Horizon, StepPlan, step_seed
from equipoise.train.shares import Share, make_shares
from equipoise.train.state import RunState, note_best
from equipoise.train.statistics import restated, running_statistics
from equipoise.train.tracking import (
    MetricsWriter,
    Pace,
    StatsWindow,
    TensorboardMirror,
    environment,
    headline,
    write_json,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

LOG = "metrics.jsonl"
TIME_IS_UP = "time is up"
# A median residual of training solves that is far from an equilibrium, and log lines in a row after which that is said;
# of solves of fewer steps nothing is.
FAR, FAR_LINES, FAR_STEPS = 0.5, 3, 4


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        step: Optimiser steps made.
        metrics: Of the last evaluation.
        best: The best evaluation, as in best.json.
        interrupted: The signal that ended the run early, if any.
        no_best: Why there is no best evaluation, if there is none.
    """

    step: int
    metrics: dict[str, float]
    best: dict[str, Any] | None
    interrupted: str | None = None
    no_best: str | None = None


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
    # Without this, processes on a machine with CPUs only would not look for each other.
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available()
    accelerator = Accelerator(mixed_precision=recipe.train.precision, cpu=together)
    processes = Processes(accelerator)
    _claim(out, resume, processes)
    if processes.main:
        write_json(out / "env.json", environment())
    return accelerator


def _claim(out: Path, resume: bool, processes: Processes) -> None:
    """Make the folder ready, or refuse it; one process tidies up, all see the same."""
    if processes.main:
        recover_checkpoints(out / CHECKPOINTS)
    processes.wait()
    if not resume and list_checkpoints(out / CHECKPOINTS):
        raise FileExistsError(
            f"{out} holds another run; resume=True (--resume) goes on with it, else choose another folder (--out)."
        )
    if processes.main and not resume and (out / LOG).exists():
        (out / LOG).replace(out / "metrics.failed.jsonl")  # of a run that came to nothing
    processes.wait()


class _Run:
    """The objects of a run, and the loop over them."""

    def __init__(self, recipe: Recipe, task: Task, out: Path, accelerator: "Accelerator", resume: bool) -> None:
        self.recipe, self.task, self.out, self.accelerator, self.resumed = recipe, task, out, accelerator, resume
        self.processes = Processes(accelerator)
        settings = recipe.train
        shares = make_shares(task, settings.accumulation)
        self.splits: Splits = task.data()
        torch.manual_seed(settings.seed)
        self.model = task.model()
        # Settings that follow from the data are part of the model: it must load without them.
        self.config = {**recipe.to_data(), "model": {**task.model_defaults(), **recipe.model}}
        changed = None
        if resume and (newest := latest_checkpoint(out / CHECKPOINTS)):  # where there is none, restoring says so
            changed = check_resumed(newest, recipe, task)
        if not resume:
            task.begin(self.model)
            if settings.weights is not None:
                begin_with(self.model, self.config["model"], settings.weights, task)
        self.model = self.model.to(self.processes.device)
        check_writable(out, checkpoint_bytes(self.model))
        self.schedule = recipe.schedule(self.model)
        stepper = Stepper(settings.optimiser.build(self.model), settings.clip.start(), accelerator.scaler)
        plateau = settings.plateau.start() if settings.plateau else None
        average = WeightAverage(settings.averaging) if settings.averaging else None
        if recipe.alternate.start is not None and self.processes.count > 1:
            raise ValueError(
                f"alternate: a learned solver is fitted in one process, and these are {self.processes.count}, each "
                "with rows of its own; train in one, or leave alternate.start out."
            )
        alternation = Alternation(recipe.alternate, seed=settings.seed) if recipe.alternate.start is not None else None
        self.state = RunState(self.model, stepper, shares, plateau, recipe.penalty.start(), average, alternation)
        self.horizon = Horizon(settings.steps, self.splits.epoch)
        if resume:
            self.state.restore(out / CHECKPOINTS, self.processes)
        self.captured = self._captured_steps() if settings.capture else None
        self.started = time.perf_counter() - self.state.seconds
        self.pace = Pace()
        self.far = 0  # log lines in a row that were far from an equilibrium
        if self.processes.main:  # after all else that can be refused, so that a refusal changes nothing
            if changed:
                print(changed, file=sys.stderr)
            write_json(out / "config.json", self.config)
            for name, values in task.artifacts().items():
                write_json(out / name, values)

    def fit(self) -> Outcome:
        settings, state = self.recipe.train, self.state
        metrics: dict[str, float] = {}
        self._warn_of_warmup()
        with self._open_log() as log, self._progress_bar() as bar, GracefulStop() as stop:
            if not self.resumed:
                self._write(log, self._facts())
                self.evaluate("valid", most=2)  # a broken set-up dies here, not at the first evaluation
            ending = self._ending(stop)
            self.pace.restart()
            while state.step < settings.steps and not ending:
                if not self._fit_solver(log, stop):
                    ending = self._ending(stop)
                    break
                losses = self._train_step()
                state.step += 1
                self.pace.steps += 1
                bar.update()
                ending = self._ending(stop)
                last = state.step == settings.steps or ending == TIME_IS_UP
                if state.step % settings.log_every == 0 or last:
                    record = self._train_record(losses)
                    self._write(log, {"train": record})
                    bar.set_postfix(headline(record), refresh=False)
                if state.step % settings.evaluate_every == 0 or last:
                    metrics = self._validate(log, last)
                    self.pace.restart()
                elif state.step % settings.save_every == 0:
                    self._save()
            interrupted = None if ending == TIME_IS_UP else ending
            if ending and state.saved != state.step:
                self._save()
            if interrupted and self.processes.main:
                bar.write(f"{interrupted}: saving step {state.step}, then ending.", file=sys.stderr)
        best = read_best(self.out / CHECKPOINTS)
        return Outcome(state.step, metrics, best, interrupted, None if best else self._why_no_best(metrics))

    def _why_no_best(self, metrics: dict[str, float]) -> str:
        if self._is_stack():
            warmup = self.recipe.warmup.steps
            return f"up to warmup.steps = {warmup} the model is a stack of layers, not an equilibrium"
        return f"{self.task.score} was not finite" if metrics else "nothing was evaluated yet"

    def _is_stack(self) -> bool:
        """Whether the model is the stack of the warm-up at this step."""
        return self.schedule is not None and self.schedule.at(self.state.step).phase == "warmup"

    def _ending(self, stop: GracefulStop) -> str | None:
        """Why the run should end now, the same in all processes: one asks, all do."""
        minutes = self.recipe.train.minutes
        late = self.processes.main and minutes is not None and self._clock() >= 60 * minutes
        if not self.processes.any(stop.requested or late):
            return None
        return next((reason for reason in self.processes.gather(stop.reason) if reason), TIME_IS_UP)

    def _captured_steps(self) -> CapturedSteps | None:
        state, device = self.state, next(self.model.parameters()).device  # with a number, which "cuda" may lack
        reason = obstacle(device, state.stepper, state.shares, self.processes.count)
        if reason is None:
            return CapturedSteps(self._pass, self.model, state.stepper, state.average, device)
        warnings.warn(f"train.capture: {reason}; no step is recorded.", EquilibriumWarning, stacklevel=4)
        return None

    def _fit_solver(self, log: Any, stop: GracefulStop) -> bool:
        """Fit the learned solver to the model as it is, if it is time to; False where a stop came before the end."""
        alternation, device = self.state.alternation, self.processes.device
        if alternation is None or self.schedule is None or self._is_stack():
            return True

        step, forward = self.state.step, forward_of(self.task, device)
        self.schedule.at(step).apply(self.model)
        try:
            with self.accelerator.autocast():
                fitted = alternation.before(
                    step, self.model, self.splits.train, forward, until=lambda: stop.requested, progress=True
                )
        except FitStoppedError:
            return False
        if fitted is not None:
            self._write(log, {"hyper": fitted})
            self.pace.restart()
        return True

    @property
    def _learned(self) -> Alternation | None:
        """The learned solver, where the plan of this step leaves the solve to it."""
        alternation = self.state.alternation
        ready = alternation is not None and alternation.in_use
        return alternation if ready and self.plan is not None and self.plan.phase == "equilibrium" else None

    def _train_step(self) -> dict[str, Tensor]:
        """One optimiser step; every draw in it is keyed by the seed, the step and the row."""
        state = self.state
        strength = state.control.strength if state.control is not None else None
        self.plan = None if self.schedule is None else self.schedule.at(state.step, strength)
        factor = self.recipe.train.learning_rate.factor(self._annealed(), self.horizon)
        factor *= state.plateau.scale if state.plateau else 1.0
        batch = self._batch(state.shares[0])
        losses = None if self.captured is None else self._captured_step(batch, factor)
        return self._ordinary_step(batch, factor) if losses is None else losses

    def _annealed(self) -> int:
        """The step whose learning rate is due: this one, or where the clock of the main process is."""
        settings, step = self.recipe.train, self.state.step
        if settings.anneal_by == "steps" or settings.minutes is None:
            return step
        if step < settings.learning_rate.warmup:  # else it would be over before kernels are compiled
            return step
        share = self.processes.gather(self._clock() / (60 * settings.minutes))[0]
        return max(step, int(min(share, 1.0) * settings.steps))

    def _captured_step(self, batch: Any, factor: float) -> dict[str, Tensor] | None:
        assert self.captured is not None
        state, (share,) = self.state, self.state.shares
        seed = step_seed(self.recipe.train.seed, state.step)
        made = self.captured.step(
            batch, share.carry, self.plan, factor=factor, seed=seed, step=state.step, learned=self._learned
        )
        return None if made is None else self._note(share, batch, made)

    def _ordinary_step(self, batch: Any, factor: float) -> dict[str, Tensor]:
        state = self.state
        if self.plan is not None:
            self.plan.apply(self.model)
        self.model.train()
        sums: dict[str, Tensor] = {}
        for number, share in enumerate(state.shares):
            batch = self._batch(share) if number else batch
            if not batch.rows.count:
                continue
            torch.manual_seed(step_seed(self.recipe.train.seed, state.step))
            weight = self.plan.penalty_weight if self.plan is not None else 0.0
            made = self._pass(batch, batch.rows, share.carry, weight, state.step)
            for name, loss in self._note(share, batch, made).items():
                sums[name] = sums[name] + loss if name in sums else loss
        self.processes.add_gradients(self.model)
        state.stepper.step(self.model, factor)
        if state.average is not None:
            state.average.update(self.model, state.step)
        return sums

    def _batch(self, share: Share) -> Any:
        batch = share.splits.train(self.state.step).to(self.processes.device)
        share.rows = batch.rows
        return batch

    def _pass(self, batch: Any, rows: Rows, carry: Any, penalty_weight: float | Tensor, step: int) -> Pass:
        """Add the gradient of a share of the batch; its losses are its part of those of the whole.

        Args:
            batch: The share.
            rows: Which rows it holds.
            carry: What its last batch left.
            penalty_weight: That of the plan, or a tensor that holds it.
            step: Number of the step.
        """
        plan = self.plan
        learned = self._learned
        with (
            rows_of(rows),
            self.accelerator.autocast(),
            learned.used(self.model) if learned is not None else nullcontext(),
            solutions_of(self.model) as solutions,
        ):
            losses, carry = self.task.training_step(self.model, batch, carry, step)
            total = losses["loss"]
            if plan is not None and plan.penalty_weight > 0:
                losses["penalty"] = torch.stack([plan.penalty.of(solution) for solution, _ in solutions]).mean()
                total = total + penalty_weight * losses["penalty"]
        self.state.stepper.backward(total * rows.weight)
        return Pass(
            losses={name: loss.detach() * rows.weight for name, loss in losses.items()},
            carry=carry,
            forward=[(solution.stats, used.stop) for solution, used in solutions],
            backward=[(solution.backward, getattr(used.adjoint, "stop", None)) for solution, used in solutions],
        )

    def _note(self, share: Share, batch: Any, made: Pass) -> dict[str, Tensor]:
        """Take in what a pass made; returns its losses."""
        share.carry = made.carry
        for window, solves in ((self.state.forward, made.forward), (self.state.backward, made.backward)):
            for stats, stop in solves:
                window.add(stats, stop)
        self.pace.add_items(*self.task.items(batch))
        return made.losses

    def _apply_plan(self, budget: int | None = None) -> StepPlan | None:
        """Set the plans of this step, with another step budget for evaluations if one is given."""
        if self.schedule is None:
            return None
        plan = self.schedule.at(self.state.step)
        plan = plan if budget is None else plan.with_budget(budget)
        plan.apply(self.model)
        return plan

    def _validate(self, log: Any, last: bool) -> dict[str, float]:
        """Evaluate, write it down, tell the schedule, and save."""
        metrics = self.evaluate("valid")
        record: dict[str, Any] = {"valid": metrics}
        if last and self.schedule is not None and self.recipe.evaluation.budgets:
            budgets = self.recipe.evaluation.budgets
            record["valid_at"] = {str(budget): self.evaluate("valid", budget=budget) for budget in budgets}
        plateau, average = self.state.plateau, self.state.average
        lowered = plateau is not None and plateau.update(metrics[self.task.score])
        if lowered and average is not None and average.settings.start is None:
            average.begin()
        self._write(log, record)
        self._save(metrics)
        return metrics

    @torch.no_grad()
    def evaluate(self, split: str, most: int | None = None, budget: int | None = None) -> dict[str, float]:
        """Metrics on a split, with averaged weights if there are any, and the residuals they were obtained at.

        Args:
            split: Name of a held-out split.
            most: Batches to look at; None for all.
            budget: Steps of the solver; None for what the schedule says.
        """
        plan, window = self._apply_plan(budget), StatsWindow()
        self._settle_statistics()
        self.model.eval()
        with self.state.averaged(), self.accelerator.autocast():
            values = evaluate(self.task, self.model, self.splits, split, self.processes.device, window, most)
        self.model.train()
        self._apply_plan()
        solve = window.summary(self.processes.gather)
        if plan is not None:
            solve |= {"max_steps": plan.eval_plan.stop.max_steps, "rtol": plan.eval_plan.stop.rtol}
        return {**values, **{f"solve_{key}": value for key, value in solve.items() if key != "failed"}}

    def _settle_statistics(self) -> None:
        """Give all processes the same statistics of BatchNorm, and averaged weights those that go with them."""
        state = self.state
        self.processes.average_statistics(self.model)  # a resumed run begins with these everywhere
        known = state.statistics is not None and state.statistics[0] == state.step
        if state.average is None or not state.average.active or known or not running_statistics(self.model):
            return
        with state.average.applied(self.model), restated(self.model, self._show_training_batches) as found:
            self.processes.average_statistics(self.model)
            state.statistics = state.step, {name: value.clone() for name, value in found.items()}

    def _show_training_batches(self) -> None:
        """Run the model on the coming batches, without learning from them."""
        assert self.state.average is not None
        first = self.state.step
        with self.accelerator.autocast():
            for step in range(first, first + self.state.average.settings.batches):
                for share in self.state.shares:
                    batch = share.splits.train(step).to(self.processes.device)
                    if batch.rows.count:
                        self.task.training_step(self.model, batch, None, step)

    def _save(self, metrics: dict[str, float] | None = None) -> None:
        root = self.out / CHECKPOINTS
        self.state.seconds = self._clock()
        self._settle_statistics()
        folder = self.state.save(root, self.config, self.processes)
        if self.processes.main:
            # The score of a warm-up stack is not that of the equilibrium its weights will be loaded as.
            score = None if self._is_stack() else (metrics or {}).get(self.task.score)
            note_best(root, folder, self.state.step, self.task.score, score, self.recipe.train.keep)

    # What a run says

    def _clock(self) -> float:
        """Seconds of the run up to now, resumed parts included."""
        return time.perf_counter() - self.started

    def _facts(self) -> dict[str, Any]:
        """What was trained on what."""
        parameters = sum(p.numel() for p in self.model.parameters())
        split = {"processes": self.processes.count, "accumulation": self.recipe.train.accumulation}
        return {"data": self.splits.info, "parameters": parameters, **split}

    def _train_record(self, losses: dict[str, Tensor]) -> dict[str, Any]:
        """The losses of the newest step, and what the steps since the last record were like."""
        state, plan, gather = self.state, self.plan, self.processes.gather
        record: dict[str, Any] = {}
        for part in gather({name: float(loss) for name, loss in losses.items()}):
            for name, loss in part.items():
                record[name] = record.get(name, 0.0) + loss
        record |= state.stepper.metrics() | self.pace.rates(gather)
        if plan is not None:
            most = self._learned.max_steps if self._learned is not None else None
            record |= {"phase": plan.phase, "max_steps": most or plan.plan.stop.max_steps}
            record |= {"penalty_weight": plan.penalty_weight} if plan.penalty_weight > 0 else {}
        if self.processes.device.type == "cuda":
            replayed = self.captured.peak_memory if self.captured is not None else 0
            record["peak_memory"] = max(gather(max(replayed, torch.cuda.max_memory_allocated())))
            torch.cuda.reset_peak_memory_stats()
        forward, backward = state.forward.summary(gather), state.backward.summary(gather)
        if plan is not None and plan.phase == "equilibrium" and "residual_p50" in forward:
            if plan.plan.stop.max_steps >= FAR_STEPS:
                self._warn_of_loss(forward["residual_p50"])
            if state.control is not None:
                state.control.update(forward["residual_p50"])
                record["penalty_strength"] = state.control.strength
            if self._learned is not None:
                self._follow_solver(self._learned, forward["residual_p50"])
        if state.alternation is not None:
            record["learned_solver"] = state.alternation.in_use
        return {**record, "forward": forward, "backward": backward}

    def _follow_solver(self, alternation: Alternation, residual: float) -> None:
        """Tell the learned solver how it does, and say so where it is put aside."""
        alternation.note(residual)
        if not alternation.in_use and self.processes.main:
            settings = alternation.settings
            warnings.warn(
                f"step {self.state.step}: with the learned solver half of the training solves ended above a relative "
                f"residual of {settings.limit:g}, now {residual:.2g}, even after a fit: until the next one the model's "
                f"own solver is used. Try alternate.every below {settings.every}, alternate.refresh above "
                f"{settings.refresh}, or a larger alternate.max_steps.",
                EquilibriumWarning,
                stacklevel=5,
            )

    def _warn_of_loss(self, residual: float) -> None:
        """Say once that solves have ended far from an equilibrium for some log lines: what is trained then is none."""
        self.far = 0 if residual <= FAR else self.far + 1  # NaN is far
        if self.far == FAR_LINES and self.processes.main:
            warnings.warn(
                f"step {self.state.step}: half of the training solves have ended above a relative residual of {FAR} "
                f"for {FAR_LINES} log lines, now {residual:.2g}: the equilibrium is being lost, and gradients are not "
                "those of one. Try penalty.keep = 0.1, penalty.along = 'residual', a longer warm-up or more steps.",
                EquilibriumWarning,
                stacklevel=4,
            )

    def _warn_of_warmup(self) -> None:
        """Say that a run will come to its end as a stack, never as an equilibrium."""
        warmup, steps = self.recipe.warmup, self.recipe.train.steps
        if self.schedule is not None and warmup.steps >= steps > self.state.step and self.processes.main:
            warnings.warn(
                f"warmup.steps = {warmup.steps} leaves none of train.steps = {steps} for the equilibrium: what is "
                f"trained is a stack of {warmup.layers} layers, never a DEQ; give fewer warmup.steps, or more "
                "train.steps.",
                EquilibriumWarning,
                stacklevel=4,
            )

    def _open_log(self) -> Any:
        if not self.processes.main:
            return nullcontext()
        resumed = self.state.step if self.resumed else None
        mirrors = []
        if self.recipe.train.tensorboard:
            mirrors.append(TensorboardMirror(self.out / "tensorboard", resume_step=resumed))
        return MetricsWriter(self.out / LOG, resume_step=resumed, mirrors=mirrors)

    def _write(self, log: MetricsWriter | None, record: dict[str, Any]) -> None:
        if log is not None:  # the first process has one
            log.write(self.state.step, {"seconds": self._clock(), **record})

    def _progress_bar(self) -> Any:
        from tqdm import tqdm

        # Shown to a person at a terminal only; the log is metrics.jsonl.
        hidden = None if self.processes.main else True
        steps = self.recipe.train.steps
        return tqdm(total=steps, initial=self.state.step, disable=hidden, unit="step", dynamic_ncols=True)


def _shown(batches: Iterable[Any]) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(batches, disable=None, unit="batch", leave=False, dynamic_ncols=True)


EvaluationStep = Callable[[Any, Any, Any], tuple[Any, list[tuple[Stats, Stop]]]]
"""From a batch, what the one before left, and metrics that take it in, to what is left and statistics of the solves."""


def _evaluation_step(
    task: Task, model: nn.Module, batch: Any, carry: Any, metrics: Any
) -> tuple[Any, list[tuple[Stats, Stop]]]:
    with solutions_of(model) as solutions:
        carry = task.evaluation_step(model, batch, carry, metrics)
    return carry, [(solution.stats, used.stop) for solution, used in solutions]


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    splits: Splits,
    split: str,
    device: torch.device | str = "cpu",
    window: StatsWindow | None = None,
    most: int | None = None,
    step: EvaluationStep | None = None,
    progress: bool = False,
) -> dict[str, float]:
    """Metrics of a model on a split; of all processes together, if there are several.

    Args:
        task: What to measure.
        model: In eval mode.
        splits: The data.
        split: Name of a held-out split.
        device: Where batches go.
        window: Takes the statistics of the solves.
        most: Batches to look at; None for all.
        step: How a batch is put into the metrics; the task's own step on the model by default.
        progress: Whether to show a progress bar to a person at a terminal.
    """
    if split not in splits.held_out:
        raise unknown_name("split", split, splits.held_out)
    metrics, carry, step = task.metrics().to(device), None, step or partial(_evaluation_step, task, model)
    batches = splits.held_out[split]()
    for index, batch in enumerate(_shown(batches) if progress else batches):
        if most is not None and index >= most:
            break
        if not batch.rows.count:  # a small batch may leave nothing for some processes
            continue
        carry, solves = step(batch.to(device), carry, metrics)
        for stats, stop in solves:
            if window is not None:
                window.add(stats, stop)
    return task.report({name: float(value) for name, value in metrics.compute().items()})
