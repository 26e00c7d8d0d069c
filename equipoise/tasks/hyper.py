"""Fitting a learned solver to a trained model, whose weights stay as they are.

The equilibria of some inputs are found by a classic solver; the learned one is unrolled for a few steps on the same
inputs and moved towards them. No labels are needed.
"""

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise._errors import require_count, require_number, unknown_name
from equipoise._modes import held
from equipoise._module import own_parameters
from equipoise.solvers._hyper_choice import hyper_solver_for
from equipoise.solvers._hyper_config import COMPRESSIONS, WARM, WEIGHTS
from equipoise.solvers._hyper_file import FILE, load_solver, save_solver
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks._hyper_losses import (
    PUBLISHED,
    Balance,
    FitSettings,
    Forward,
    Losses,
    LossWeights,
    NoEquilibriaError,
    NotFittedError,
    Target,
    find_targets,
    unrolled_losses,
)
from equipoise.tasks._hyper_pool import Pool
from equipoise.tasks._hyper_steps import Learner, apply_if_finite, gradients

if TYPE_CHECKING:
    from equipoise.tasks.base import Task
    from equipoise.train.load import TrainedRun
    from equipoise.train.tracking import MetricsWriter

LOG, UNFINISHED_LOG = "fit.jsonl", "fit.partial.jsonl"
POOL_SHARE = 0.5  # of the seconds of a fit, to find equilibria in

__all__ = [
    "PUBLISHED",
    "Balance",
    "Fit",
    "FitSettings",
    "Follower",
    "Forward",
    "HyperRecipe",
    "LossWeights",
    "Losses",
    "Networks",
    "NoEquilibriaError",
    "NotFittedError",
    "Pool",
    "Target",
    "Unread",
    "find_targets",
    "fit_hyper_solver",
    "fit_opened",
    "fit_run",
    "forward_of",
    "hyper_step",
    "pool_of",
    "unrolled_losses",
]


@dataclass
class Fit:
    """A fitted solver and how the fitting went.

    Attributes:
        solver: The solver, in the device and dtype it was fitted in.
        record: Settings, first and last values of the log, seconds, and parameters beside those of the model.
    """

    solver: HyperAnderson
    record: dict[str, Any]


def hyper_step(
    model: nn.Module,
    batch: Any,
    solver: HyperAnderson,
    optimiser: torch.optim.Optimizer,
    *,
    settings: FitSettings = FitSettings(),
    forward: Forward | None = None,
    carry: Any = None,
    balance: Balance | None = None,
    progress: float = 1.0,
) -> tuple[dict[str, Tensor], Any]:
    """One optimiser step of a learned solver on a model as it is now; the model itself is not touched.

    Args:
        model: A DEQ, or a module that contains some.
        batch: Inputs; labels are not looked at.
        solver: To be improved.
        optimiser: Of the solver's parameters.
        settings: How equilibria are found and the solver is unrolled.
        forward: How to run the model on the batch; by default it is called with it.
        carry: What the batch before left.
        balance: Kept from step to step; by default this step is compared with itself.
        progress: Share of the fitting done, for the weights of losses.

    Returns:
        What to log, as scalar tensors, and what the next batch needs.
    """
    _require_gradients()
    balance = balance or Balance(settings.losses)
    targets, carry = find_targets(model, batch, settings, forward, carry)
    if not targets:
        raise ValueError(f"{type(model).__name__} solved for no equilibrium on this batch: is it a DEQ?")
    usable = _usable(targets, settings)
    accepted = {"accepted": torch.tensor(sum(target.accepted for target in usable) / len(targets))}
    if not usable:
        return accepted, carry
    optimiser.zero_grad(set_to_none=True)
    with held(model, apart_from=solver), settings.mode(model):
        record = gradients(solver, usable, settings, balance, progress=progress)
    return {**accepted, **record, "skipped": apply_if_finite(optimiser, record["gradient"])}, carry


class Follower:
    """Keeps a fitted solver up with a model that changes: one optimiser step after another, at a constant rate.

    It is `hyper_step` with a memory: its optimiser goes on, and on a GPU a step is recorded once and replayed.

    Args:
        solver: To be improved.
        settings: How equilibria are found and the solver is unrolled.
        rate: Share of `settings.learning_rate`. A fit ends at a rate of zero; steps at its first one, which are as long
            as the rate while Adam knows nothing of gradients yet, would undo it.
    """

    def __init__(self, solver: HyperAnderson, settings: FitSettings, rate: float = 0.1) -> None:
        require_number("Follower", "rate", rate, low=0.0, open_low=True)
        self.solver, self.settings = solver, settings
        slower = dataclasses.replace(settings, learning_rate=rate * settings.learning_rate)
        self._learner = Learner(solver, slower, changing=True)

    def step(self, model: nn.Module, batch: Any, forward: Forward | None = None) -> bool:
        """Learn from the equilibria of a batch of the model as it is now; returns whether there were any.

        Args:
            model: A DEQ, or a module that contains some; it is not touched.
            batch: Inputs; labels are not looked at.
            forward: How to run the model on the batch; by default it is called with it.
        """
        _require_gradients()
        usable = _usable(find_targets(model, batch, self.settings, forward)[0], self.settings)
        if usable:
            with held(model, apart_from=self.solver), self.settings.mode(model):
                self._learner.step(usable, share=0.0, progress=1.0)
        return bool(usable)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue."""
        return self._learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._learner.load_state_dict(state)


def fit_hyper_solver(
    model: nn.Module,
    batches: Iterable[Any] | Callable[[int], Any],
    settings: FitSettings = FitSettings(),
    *,
    solver: HyperAnderson | None = None,
    forward: Forward | None = None,
    pool: Pool | None = None,
    seconds: float | None = None,
    until: Callable[[], bool] | None = None,
    log: str | Path | None = None,
    log_every: int = 50,
    progress: bool = False,
    **sizes: Any,
) -> Fit:
    """Fit a learned solver to a trained model, which stays as it is.

    Args:
        model: A DEQ, or a module that contains some.
        batches: Inputs, gone through again and again, or a function from a step to them; unlabelled or random ones do.
        settings: How.
        solver: Go on with this one; by default one is made by `hyper_solver_for`.
        forward: How to run the model on a batch; by default it is called with it.
        pool: Equilibria found before, e.g. for another fit; `settings.pool` has them found here.
        seconds: End after so many, if there are steps left then; schedules are shortened. A pool found here takes half
            of them at most.
        until: Asked after each step, and after each batch whose equilibria are found for a pool; end once it says yes,
            however little has been learned.
        log: A file of JSON lines to write.
        log_every: Steps between them.
        progress: Whether to show a progress bar to a person at a terminal.
        **sizes: Of `hyper_solver_for`, where `solver` is not given.
    """
    require_count("fit_hyper_solver", "log_every", log_every)
    if seconds is not None:
        require_number("fit_hyper_solver", "seconds", seconds, low=0.0, open_low=True)
    _require_gradients()
    started, fresh, stream = time.perf_counter(), solver is None, _stream(batches)
    if pool is None and settings.pool is not None:
        count = min(settings.pool, settings.steps)
        with _bar("equilibria", count, progress, itertools.islice(stream, count)) as first:
            pool = Pool(model, first, settings, forward, seconds and POOL_SHARE * seconds, until)
    solver, targets = _begun(model, stream, settings, solver, forward, pool, sizes)
    learning = time.perf_counter()
    left = math.inf if seconds is None else max(seconds - (learning - started), sys.float_info.min)
    learner, kept, shares, learned_from, refused, step = Learner(solver, settings), [], 0.0, 0, torch.zeros(()), 0
    with (
        _writer(log) as writer,
        _bar("fitting a solver", settings.steps, progress) as bar,
        held(model, apart_from=solver),
        settings.mode(model),
    ):
        for step, (found, accepted) in zip(range(settings.steps), targets, strict=False):
            over = (time.perf_counter() - learning) / left
            share = max(step / settings.steps, over) if step else 0.0  # it learns, however little time there is
            values = {"accepted": accepted, **_learn(learner, found, min(share, 1.0), fresh)}
            shares, learned_from = shares + accepted, learned_from + bool(found)
            refused = refused + values.get("skipped", 0.0)
            last = step == settings.steps - 1 or share >= 1 or (not step and time.perf_counter() - learning >= left)
            last = last or (until is not None and until())
            bar.update()
            if step % log_every == 0 or last:
                kept.append({name: float(value) for name, value in values.items()})
                bar.set_postfix(residual=f"{kept[-1].get('end_residual', math.nan):.1e}", refresh=False)
                if writer is not None:
                    writer.write(step, {"seconds": time.perf_counter() - started, "fit": kept[-1]})
            if last:
                break
    learner.release()
    skipped = int(refused)
    _require_learned(model, settings, learned_from, skipped)
    record: dict[str, Any] = {"first": kept[0], "last": kept[-1], "seconds": time.perf_counter() - started}
    record |= {"steps": step + 1, "pool": None if pool is None else len(pool), "accepted": shares / (step + 1)}
    record |= {"skipped": skipped, "replayed": learner.replayed, "not_recorded": learner.obstacle}
    own, base = solver.num_parameters, sum(parameter.numel() for parameter in own_parameters(model))
    return Fit(solver, {**record, "parameters": own, "model_parameters": base, "share": own / max(1, base)})


def _require_learned(model: nn.Module, settings: FitSettings, steps: int, skipped: int) -> None:
    """Raise if there was nothing to learn from in any step, or no step could be made."""
    if not steps:
        raise NoEquilibriaError(model, settings, solved=True)
    if skipped == steps:
        raise NotFittedError(
            f"none of {steps:,} steps of the fit could be made: the gradient of {settings.unroll} unrolled steps was "
            "never finite. Unroll fewer (fit.unroll); if that does not help, f has no finite derivative."
        )


def _begun(
    model: nn.Module,
    stream: Iterator[Any],
    settings: FitSettings,
    solver: HyperAnderson | None,
    forward: Forward | None,
    pool: Pool | None,
    sizes: dict[str, Any],
) -> tuple[HyperAnderson, Iterator[tuple[list[Target], float]]]:
    """The solver of a fit, and the equilibria that it learns from; those of the pool if there is one."""
    if pool is not None and not pool.serves(settings):
        raise ValueError("the pool was found with another solver, stop, accept or pool than the fit's settings say.")
    if pool is not None and not pool.is_of(model):
        raise ValueError("the pool has equilibria of another model, or of this one with other weights: find them anew.")
    if solver is not None and sizes:
        raise ValueError(f"{', '.join(sizes)} cannot be set: the solver is given.")
    if solver is None and pool is not None:
        solver = _made_for(model, pool.at(0), settings, sizes)
    elif solver is None:
        batch = next(stream)
        solver = _made_for(model, find_targets(model, batch, settings, forward)[0], settings, sizes)
        stream = itertools.chain((batch,), stream)
    if not solver.num_parameters:
        raise ValueError("this solver has nothing to learn: give it an initialiser, weights, a step length or a rank.")
    return solver, _targets(model, stream, settings, forward) if pool is None else _kept_targets(pool)


def _require_gradients() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a fit needs gradients, which torch.inference_mode() cannot give: call it outside of that.")


def _usable(targets: Iterable[Target], settings: FitSettings) -> list[Target]:
    """What can be learned from: equilibria that are good enough."""
    return [found for target in targets if (found := target.usable(settings.accept)) is not None]


def _learn(learner: Learner, targets: Sequence[Target], share: float, fresh: bool) -> dict[str, Any]:
    """A step on the equilibria of a batch."""
    # What makes weights Anderson's at first is not for fitted ones.
    return learner.step(targets, share, share if fresh else 1.0) if targets else {}


def _targets(
    model: nn.Module, batches: Iterable[Any], settings: FitSettings, forward: Forward | None
) -> Iterator[tuple[list[Target], float]]:
    """The equilibria of batch after batch, those that are good enough, and their share of all."""
    carry = None
    for batch in batches:
        targets, carry = find_targets(model, batch, settings, forward, carry)
        usable = _usable(targets, settings)
        yield usable, sum(target.accepted for target in usable) / max(1, len(targets))


def _kept_targets(pool: Pool) -> Iterator[tuple[list[Target], float]]:
    """Likewise from a pool; what it left out is no part of its batches, so the share is that of all of them."""
    for step in itertools.count():
        yield pool.at(step), pool.accepted


def _made_for(
    model: nn.Module, targets: Sequence[Target], settings: FitSettings, sizes: dict[str, Any]
) -> HyperAnderson:
    """A solver for the states that the model has on a batch."""
    if not targets:
        raise ValueError(f"{type(model).__name__} solved for no equilibrium on the first batch: is it a DEQ?")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)  # not those of devices, whose numbers others draw
        first = targets[0]
        z0 = first.problem.spec.unflatten(first.start) if first.given else None
        solver = hyper_solver_for(first.deq, *first.inputs, context=first.problem.context, z0=z0, base=model, **sizes)
    for target in targets[1:]:
        try:
            solver.check_state(target.problem.spec)
        except ValueError as error:
            raise ValueError(
                f"{type(model).__name__} solves for states of different forms, {_shapes(first)} and {_shapes(target)}: "
                "fit a solver to one of its DEQs, and set that one's plan."
            ) from error
    return solver


def _shapes(target: Target) -> str:
    return " and ".join(str(tuple(shape)) for shape in target.problem.spec.shapes)


def _stream(batches: Iterable[Any] | Callable[[int], Any]) -> Iterator[Any]:
    """Batches without end."""
    if isinstance(batches, Tensor):
        raise TypeError(
            f"batches is a tensor of shape {tuple(batches.shape)}: give a list of batches, [x] for one, or a function "
            "from a step to a batch."
        )
    if callable(batches):
        step = 0
        while True:
            yield batches(step)
            step += 1
    while True:
        seen = False
        for batch in batches:
            seen = True
            yield batch
        if not seen:
            raise ValueError("the batches are used up: give a list, or a function from a step to a batch.")


@contextlib.contextmanager
def _writer(path: str | Path | None) -> "Iterator[MetricsWriter | None]":
    if path is None:
        yield None
        return
    from equipoise.train.tracking import MetricsWriter

    with MetricsWriter(path) as writer:
        yield writer


def _bar(words: str, total: int, shown: bool, items: Iterable[Any] | None = None) -> Any:
    from tqdm import tqdm

    unit = "step" if items is None else "batch"
    hidden = None if shown else True
    # Below the bar of a training it goes when it is full, which is what leave=None says.
    return tqdm(items, words, total, leave=None, disable=hidden, unit=unit, dynamic_ncols=True)


# Of a run


@dataclass(frozen=True)
class Networks:
    """What a new solver consists of; sizes that are None follow from the budget.

    Attributes:
        initialiser: Whether the start is learned.
        weights: See `HyperConfig`; likewise the next ones.
        mixing: Whether the step length is learned.
        plain_sum: Whether residuals are summed without weights.
        products: Whether the step network sees inner products of residuals.
        local: Whether positions of a sequence have weights of their own; None for wherever there are positions.
        memory: Iterates combined.
        compression: How a residual becomes a few numbers; None for what suits the state.
        hidden: Inner size of the initialiser.
        compressed: Numbers that a residual becomes.
        width: Inner size of the step network.
        rank: Inner size of the linear map of residuals that is added to images; 0 for none.
        reach: Of sequences: positions that it looks at.
        warm: What becomes of a start that is not zero: "keep" it, for which each solve looks, or "replace" it; None for
            what suits the model.
        budget: Largest share of the model's parameters.
    """

    initialiser: bool = True
    weights: str = "shift"
    mixing: bool = True
    plain_sum: bool = False
    products: bool = True
    local: bool | None = None
    memory: int = 6
    compression: str | None = None
    hidden: int | None = None
    compressed: int | None = None
    width: int | None = None
    rank: int = 0
    reach: int = 3
    warm: str | None = None
    budget: float = 0.04

    def __post_init__(self) -> None:
        compressions = sorted({name for names in COMPRESSIONS.values() for name in names})
        if self.weights not in WEIGHTS:
            raise unknown_name("kind of weights", self.weights, WEIGHTS)
        if self.compression is not None and self.compression not in compressions:
            raise unknown_name("compression", self.compression, compressions)
        if self.warm is not None and self.warm not in WARM:
            raise unknown_name("way with a start", self.warm, WARM)
        for name in ("memory", "hidden", "compressed", "width", "rank", "reach"):
            if getattr(self, name) is not None:
                require_count("solver", name, getattr(self, name), low=0 if name == "rank" else 1)
        require_number("solver", "budget", self.budget, low=0.0, open_low=True)

    def settings(self) -> dict[str, Any]:
        """As arguments of `hyper_solver_for`."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return values if values.pop("initialiser") else {**values, "source": None}

    def require_of(self, solver: HyperAnderson) -> None:
        """Raise if a solver that is gone on with does not consist of what is asked for; defaults ask for nothing."""
        has = {
            **dataclasses.asdict(solver.config),
            "initialiser": solver.initialiser is not None,
            "budget": self.budget,
        }
        asked, usual = dataclasses.asdict(self), dataclasses.asdict(Networks())
        for name, value in asked.items():
            cut = name == "rank" and 0 < has[name] <= value  # to the budget
            if value != usual[name] and value != has[name] and not cut:
                raise ValueError(
                    f"solver.{name} = {value} cannot be had: the solver that is gone on with has {has[name]}."
                )


@dataclass(frozen=True)
class HyperRecipe:
    """A fit in one file: `[solver]` and `[fit]`, and what is known of its like.

    Attributes:
        solver: What the solver consists of.
        fit: How it is fitted.
        published: What was found of this variant elsewhere, in words.
        worse_than: Names of the variants that were found better, "anderson" among them.
        better_than: Names of those that were found worse.
    """

    solver: Networks = Networks()
    fit: FitSettings = FitSettings()
    published: str = ""
    worse_than: tuple[str, ...] = ()
    better_than: tuple[str, ...] = ()


class Unread(dict[str, Any]):
    """Metrics that nobody reads: a model is run for its equilibria alone."""

    def __missing__(self, name: str) -> "Unread":
        return self

    def update(self, *values: Any, **named: Any) -> None:
        """Take nothing in."""


def forward_of(task: "Task", device: torch.device) -> Forward:
    """How a model is run on a batch of its task."""

    def forward(model: nn.Module, batch: Any, carry: Any) -> Any:
        return task.evaluation_step(model, batch.to(device), carry, Unread())  # type: ignore[arg-type]

    return forward


def pool_of(opened: "TrainedRun", settings: FitSettings, count: int, seconds: float | None = None) -> Pool:
    """Equilibria of a run's model on its training inputs, for several fits.

    Args:
        opened: The run.
        settings: How they are found.
        count: Batches.
        seconds: See `Pool`.
    """
    batches = map(opened.splits.train, range(count))
    with opened.autocast():
        return Pool(opened.model, batches, settings, forward_of(opened.task, opened.device), seconds)


def fit_opened(
    opened: "TrainedRun", recipe: HyperRecipe, folder: Path, *, solver: HyperAnderson | None = None, **options: Any
) -> dict[str, Any]:
    """Fit a learned solver to the model of a run on its training inputs; writes solver.safetensors and fit.jsonl.

    Args:
        opened: The run.
        recipe: What and how.
        folder: Of the files.
        solver: Go on with this one.
        **options: Of `fit_hyper_solver`.
    """
    from equipoise.train.checkpoint import check_writable
    from equipoise.train.config import to_data

    check_writable(folder)
    # An older log goes when the solver goes that it is of.
    log, unfinished = folder / LOG, folder / UNFINISHED_LOG
    unfinished.unlink(missing_ok=True)
    options |= {} if solver is not None else recipe.solver.settings()
    with opened.autocast():
        fit = fit_hyper_solver(
            opened.model,
            opened.splits.train,
            recipe.fit,
            solver=solver,
            forward=forward_of(opened.task, opened.device),
            log=unfinished,
            **options,
        )
    notes = {"checkpoint": str(opened.folder), "recipe": to_data(recipe), **fit.record}
    if "inputs" in opened.splits.info:  # not those of the training
        notes["inputs"] = opened.splits.info
    path = save_solver(fit.solver, folder / FILE, opened.model, notes)
    unfinished.replace(log)
    return {"file": str(path), "log": str(log), **notes}


def fit_run(
    run: str | Path,
    recipe: HyperRecipe = HyperRecipe(),
    *,
    out: str | Path | None = None,
    finetune: str | Path | None = None,
    force: bool = False,
    data_dir: str | None = None,
    which: str = "best",
    changes: Sequence[str] = (),
    inputs: str | Path | None = None,
    seconds: float | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Fit a learned solver to the model of a run; see `fit_opened`.

    Args:
        run: Folder of a run or of a checkpoint.
        recipe: What and how.
        out: Folder of the files; RUN/hyper by default.
        finetune: A learned solver to go on with, e.g. of an earlier checkpoint; its file or the folder of that.
        force: Overwrite a solver that is there.
        data_dir: Where data files are.
        which: Of a run: "best" or "latest" checkpoint.
        changes: Of the task's settings, e.g. `task.batch_size=8`.
        inputs: Unlabelled inputs to find equilibria on, a folder of pictures or a text file; those of the run's
            training by default.
        seconds: End after so many.
        progress: Whether to show a progress bar to a person at a terminal.

    Returns:
        A record: files, settings, seconds, parameters, and first and last values of the log.
    """
    from equipoise.train.load import open_run, require_equilibrium

    folder = Path(out) if out is not None else Path(run) / "hyper"
    if (folder / FILE).exists() and not force:
        raise FileExistsError(f"{folder / FILE} is there already; choose another --out, or overwrite it with --force.")
    opened = open_run(run, "valid", data_dir, which=which, changes=changes, inputs=inputs)
    require_equilibrium(opened.model, opened.folder, "so there is no solver to fit")
    solver = load_solver(finetune, device=opened.device) if finetune is not None else None
    if solver is not None:
        recipe.solver.require_of(solver)
    record = fit_opened(opened, recipe, folder, solver=solver, seconds=seconds, progress=progress)
    return {"run": str(run), "finetuned": finetune and str(finetune), **record}
