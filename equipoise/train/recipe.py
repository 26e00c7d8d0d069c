"""A run in one file: task, model, plan, schedules, training."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from equipoise._errors import require_count, require_number
from equipoise._module import Plan, deqs_in
from equipoise._stop import Stop
from equipoise.adjoints import Adjoint
from equipoise.solvers import Solver
from equipoise.tasks import TASKS, Task
from equipoise.train.alternate import Alternate
from equipoise.train.config import ConfigError, Source, Table, read_toml, to_data, with_overrides
from equipoise.train.optim import AdamW, Averaging, Clip, Optimiser
from equipoise.train.schedule import Cosine, Jitter, LearningRate, Opening, Penalty, PlanSchedule, Plateau, Warmup


@dataclass(frozen=True)
class Evaluation:
    """The plan of evaluations, where it differs from that of training.

    Attributes:
        solver: Forward solver.
        stop: When it ends.
        budgets: Step budgets at which the last evaluation is repeated: a metric that changes with them is not that of
            an equilibrium.
    """

    solver: Solver | None = None
    stop: Stop | None = None
    budgets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for budget in self.budgets:
            require_count("evaluation", "budgets", budget)


@dataclass(frozen=True)
class Training:
    """How long and by what rule to train.

    Attributes:
        weights: Folder of a run, a checkpoint or an export whose weights the model begins with; None to begin afresh.
        steps: Optimiser steps.
        minutes: Wall time after which the run ends as after its last step, resumed parts counted; None for no limit.
        anneal_by: "steps" for a learning rate that is planned for `steps`, whatever `minutes` says; "minutes" to have
            it where the clock is after its linear start, if that is further on: a run that ends early has annealed, but
            cannot be repeated bit by bit.
        accumulation: Shares into which a process splits its part of each batch, done one after another to save memory.
        seed: Key of everything random.
        log_every: Steps between lines of the log.
        evaluate_every: Steps between evaluations on the validation split.
        save_every: Steps between checkpoints.
        keep: Checkpoints kept, the best one apart.
        precision: "no" for float32, "bf16" or "fp16" for autocast.
        threads: CPU threads; None for torch's own choice. Bit-equal resumption needs the same number.
        optimiser: The update rule.
        learning_rate: Its factor over the run.
        clip: What is done to gradients first.
        plateau: Lowers the learning rate when the validation score stops falling, and starts an average that waits for
            that; None for neither.
        averaging: Average of the weights for evaluation; None for none.
        tensorboard: Whether to write the log for tensorboard too.
        capture: Whether to record whole steps as CUDA graphs and replay them, where that is possible.
    """

    weights: str | None = None
    steps: int = 1000
    minutes: float | None = None
    anneal_by: Literal["steps", "minutes"] = "steps"
    accumulation: int = 1
    seed: int = 0
    log_every: int = 50
    evaluate_every: int = 500
    save_every: int = 500
    keep: int = 2
    precision: Literal["no", "bf16", "fp16"] = "no"
    threads: int | None = None
    optimiser: Optimiser = AdamW()
    learning_rate: LearningRate = Cosine()
    clip: Clip = Clip()
    plateau: Plateau | None = None
    averaging: Averaging | None = None
    tensorboard: bool = False
    capture: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "accumulation", "log_every", "evaluate_every", "save_every", "keep"):
            require_count("train", name, getattr(self, name))
        if self.minutes is not None:
            require_number("train", "minutes", self.minutes, low=0.0, open_low=True)
        elif self.anneal_by == "minutes":
            raise ValueError('train: anneal_by = "minutes" needs minutes; give train.minutes, or anneal_by = "steps".')
        if self.averaging is not None and self.averaging.start is None and self.plateau is None:
            raise ValueError("train: averaging without a start begins on a plateau; give train.plateau, or a start.")
        if self.threads is not None:
            require_count("train", "threads", self.threads)


@dataclass(frozen=True)
class Recipe:
    """Everything a run depends on but data and code.

    Attributes:
        task: Name of the task and its settings.
        model: Name of the model and overrides of its settings.
        solver: Forward solver; the model's own if None.
        adjoint: How gradients flow; the model's own if None.
        stop: When the forward solve ends; the model's own if None.
        evaluation: The plan of evaluations.
        warmup: The shallow phase at the start.
        opening: Another solver at first.
        jitter: Of the forward step budget.
        penalty: Of the Jacobian.
        alternate: When a learned solver is fitted and used.
        train: The training itself.
    """

    task: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    solver: Solver | None = None
    adjoint: Adjoint | None = None
    stop: Stop | None = None
    evaluation: Evaluation = Evaluation()
    warmup: Warmup = Warmup()
    opening: Opening = Opening()
    jitter: Jitter = Jitter()
    penalty: Penalty = Penalty()
    alternate: Alternate = Alternate()
    train: Training = Training()
    source: Source = field(default=Source(), compare=False)

    @classmethod
    def read(cls, path: str | Path, overrides: Iterable[str] = ()) -> "Recipe":
        """A recipe from a TOML file with overrides `a.b=c`."""
        table = read_toml(path, overrides)
        recipe = cls.build(table)
        _check_alternate(recipe, table)
        return recipe

    @classmethod
    def from_data(cls, values: Mapping[str, Any], source: str, overrides: Iterable[str] = ()) -> "Recipe":
        """A recipe from what `to_data` gave."""
        return cls.build(with_overrides(Table(values, Source(source)), overrides))

    @classmethod
    def build(cls, table: Table) -> "Recipe":
        """A recipe from plain settings."""
        if "source" in table.values:
            raise ConfigError(f"{table.source.name}: unknown key 'source'.")
        recipe = table.build(cls)
        # Settings of a model have no declared types here; "none" means the same as in typed sections.
        model = {key: None if value == "none" else value for key, value in recipe.model.items()}
        recipe = dataclasses.replace(recipe, model=model, source=table.source)
        for section, known in (("task", TASKS), ("model", None)):
            name = getattr(recipe, section).get("name")
            if not isinstance(name, str):
                raise ConfigError(f"{table.source.name}: {section}.name is missing; give the name of a {section}.")
            if known is not None and name not in known:
                try:
                    known.find(name)
                except ValueError as error:
                    raise ConfigError(f"{table.source.name}: {error}") from error
        if getattr(recipe.task_config(), "transfer", None) is not None and recipe.train.weights is not None:
            raise ConfigError(
                f"{table.source.name}: task.transfer and train.weights both say what the model begins with, parts of "
                "another model and all of it; leave one of them out."
            )
        return recipe

    def to_data(self) -> dict[str, Any]:
        """Plain values, resolved: enough to build the recipe again."""
        values = {f.name: to_data(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "source"}
        values["task"] = {"name": self.task["name"], **to_data(self.task_config())}
        return {key: value for key, value in values.items() if value is not None}

    def task_config(self) -> Any:
        """Settings of the task."""
        settings = {key: value for key, value in self.task.items() if key != "name"}
        return Table(settings, self.source, ("task",)).build(TASKS.find(self.task["name"]).Config)

    def make_task(self, data_dir: str | None = None, rank: int = 0, world_size: int = 1) -> Task:
        """The task of this recipe."""
        task: type[Task] = TASKS.find(self.task["name"])
        share = {"rank": rank, "world_size": world_size}
        return task(self.task_config(), self.model, data_dir=data_dir, seed=self.train.seed, **share)

    def schedule(self, model: nn.Module) -> PlanSchedule | None:
        """Plans over the run, or None for a model without equilibria."""
        deq = next(iter(deqs_in(model)), None)
        if deq is None:
            return None
        own, solver, stop = deq.plan, self.evaluation.solver, self.evaluation.stop
        plan = Plan(self.solver or own.solver, self.adjoint or own.adjoint, self.stop or own.stop)
        base = deq.eval_plan or plan
        evaluation = Plan(solver or base.solver, plan.adjoint, stop or base.stop)
        return PlanSchedule(plan, evaluation, self.warmup, self.opening, self.jitter, self.penalty, self.train.seed)


def _check_alternate(recipe: Recipe, table: Table) -> None:
    """Refuse settings of `[alternate]` without effect; a start of none, given as such, puts the section aside."""
    section, source = table.section("alternate"), table.source
    start, steps = ("alternate", "start"), ("train", "steps")
    default = Alternate()  # what a file has that names every setting
    changed = [key for key in section.values if getattr(recipe.alternate, key) != getattr(default, key)]
    if changed and "start" not in section.values:
        key = changed[0]
        raise ConfigError(
            f"{source.of(('alternate', key))}: alternate.{key} has no effect without alternate.start, the step before "
            "which a solver is fitted first; give that too, or alternate.start=none to put the section aside."
        )
    if recipe.alternate.fit.steps != default.fit.steps:
        raise ConfigError(
            f"{source.of(('alternate', 'fit', 'steps'))}: alternate.fit.steps has no effect; alternate.first is the "
            "number of steps of the first fit, alternate.refresh that of each later one."
        )
    first, last = recipe.alternate.start, recipe.train.steps
    tried = source.of(steps) != source.name == source.of(start)  # a recipe that is made shorter stays one
    if first is not None and first >= last and not tried:
        raise ConfigError(
            f"{source.of(start)}: alternate.start = {first} is not below train.steps = {last}, so that no solver would "
            "be fitted; give an earlier step, or alternate.start=none."
        )
