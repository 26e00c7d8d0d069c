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

from equipoise._errors import require_count, require_gradients, require_number
from equipoise._modes import held
from equipoise._module import own_parameters
from equipoise.solvers._hyper_choice import hyper_solver_for
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks._hyper_losses import (
    PUBLISHED,
    Balance,
    FitSettings,
    Losses,
    LossWeights,
    NoEquilibriaError,
    NotFittedError,
    Target,
    find_targets,
    unrolled_losses,
)
from equipoise.tasks._hyper_pool import Pool
from equipoise.tasks._hyper_recipe import HyperRecipe, Networks
from equipoise.tasks._hyper_steps import Learner, apply_if_finite, gradients
from equipoise.tasks.base import Forward

if TYPE_CHECKING:
    from equipoise.train.tracking import MetricsWriter

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
    "find_targets",
    "fit_hyper_solver",
    "hyper_step",
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
    require_gradients("a fit")
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
        require_gradients("a fit")
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
    if not isinstance(settings, FitSettings):
        raise TypeError(f"fit_hyper_solver: settings must be FitSettings(...), got {type(settings).__name__}.")
    if seconds is not None:
        require_number("fit_hyper_solver", "seconds", seconds, low=0.0, open_low=True)
    require_gradients("a fit")
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
