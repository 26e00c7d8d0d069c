"""Training with a learned solver that is kept up with the model: some steps of the one, some steps of the other."""

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._errors import require_count, require_number
from equipoise._module import outermost_deqs, planned
from equipoise._solution import EquilibriumWarning
from equipoise._tree import tree_map
from equipoise.solvers._hyper_config import HyperConfig
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks.base import Forward
from equipoise.tasks.hyper import Fit, FitSettings, Follower, Networks, NotFittedError, fit_hyper_solver

LATE, REFRESHED, RESTING = 1, 2, 3


class FitStoppedError(Exception):
    """A fit was asked to end; the learned solver is as it was before, so that the whole fit can be made later."""


@dataclass(frozen=True)
class Alternate:
    """When a learned solver is fitted during training.

    Until `start` the model is trained with its own solver. Then one is fitted from scratch, used as the forward solver
    of the following steps, and fitted a little more every `every` steps, or by single steps in between. Backward solves
    are as they were. A model may change faster than that, and its equilibria become harder to find: where solves end
    above `limit` they get a step more, up to `most_steps`; if they have them already the learned solver is fitted a
    little more at once, and where that does not help the model's own solver takes over until the next regular fit.

    Attributes:
        start: Step before which it is fitted first; None for never.
        first: Fitting steps there.
        every: Training steps between two later fits.
        refresh: Fitting steps of each of those.
        follow: Training steps between two single fitting steps besides; None for none. The solver then follows the
            model, instead of falling behind and catching up.
        follow_rate: The learning rate of those, as a share of `fit.learning_rate`.
        max_steps: Most steps of a forward solve by the learned solver; None for those of the plan.
        most_steps: What `max_steps` may grow to during training; None for no growth.
        limit: Median residual of the training solves between two log lines that is too large.
        solver: What the solver consists of.
        fit: How it is fitted; its number of steps is not looked at, and the model is as in training.
    """

    start: int | None = None
    first: int = 1000
    every: int = 5000
    refresh: int = 200
    follow: int | None = None
    follow_rate: float = 0.1
    max_steps: int | None = None
    most_steps: int | None = None
    limit: float = 0.05
    solver: Networks = Networks()
    fit: FitSettings = FitSettings()

    def __post_init__(self) -> None:
        if self.start is not None:
            require_count("alternate", "start", self.start, low=0)
        for name in ("first", "every", "refresh"):
            require_count("alternate", name, getattr(self, name))
        for name in ("follow", "max_steps", "most_steps"):
            if getattr(self, name) is not None:
                require_count("alternate", name, getattr(self, name))
        if self.most_steps is not None and (self.max_steps is None or self.most_steps < self.max_steps):
            raise ValueError(
                f"alternate: most_steps={self.most_steps} is what max_steps={self.max_steps} may grow to; expected a "
                "max_steps of at most that."
            )
        for name in ("follow_rate", "limit"):
            require_number("alternate", name, getattr(self, name), low=0.0, open_low=True)

    def due(self, step: int, fitted: bool) -> int:
        """How many fitting steps come before training step number `step`, by the clock."""
        if self.start is None or step < self.start:
            return 0
        if not fitted:
            return self.first
        return self.refresh if step > self.start and (step - self.start) % self.every == 0 else 0


@dataclass
class Alternation:
    """A learned solver in a training run.

    Attributes:
        settings: When and how.
        solver: The solver, once there is one.
        seconds: Time spent on fitting it.
        grown: Steps of a solve beyond `settings.max_steps`.
        behind: Whether the model has changed too much for it: 0 for no, 1 where it is to be fitted a little more, 2
            where it was, 3 where that did not help, and it rests until a regular fit learns something.
        retry: Step before which there is no other first fit, after one that learned nothing.
        seed: Of the run: first weights and draws of fits are others with another one.
    """

    settings: Alternate
    solver: HyperAnderson | None = field(default=None)
    seconds: float = 0.0
    grown: int = 0
    behind: int = 0
    retry: int = 0
    seed: int = 0
    _follower: Follower | None = field(default=None, repr=False)

    @property
    def in_use(self) -> bool:
        """Whether forward solves are left to it."""
        return self.solver is not None and self.behind != RESTING

    @property
    def max_steps(self) -> int | None:
        """Most steps of a solve by it, for now; None for those of the plan."""
        return None if self.settings.max_steps is None else self.settings.max_steps + self.grown

    @property
    def _may_grow(self) -> bool:
        most, now = self.settings.most_steps, self.max_steps
        return most is not None and now is not None and now < most

    def note(self, residual: float) -> None:
        """Take in how its solves have ended since the last log line: their median residual."""
        if residual <= self.settings.limit:
            self.behind = 0
        elif self.behind == 0 and math.isfinite(residual) and self._may_grow:
            self.grown += 1
        else:  # also where it is not a number
            self.behind = LATE if self.behind == 0 else RESTING

    def before(
        self,
        step: int,
        model: nn.Module,
        batches: Callable[[int], Any],
        forward: Forward | None = None,
        *,
        until: Callable[[], bool] = lambda: False,
        progress: bool = False,
    ) -> dict[str, Any] | None:
        """Fit the solver if it is time to; returns what to log, or None.

        Args:
            step: The training step that comes next.
            model: As it is now; it is not touched.
            batches: From a step to a batch; those of the coming steps are used, without labels.
            forward: How to run the model on a batch.
            until: Asked during a fit; `FitStoppedError` once it says yes.
            progress: Whether to show a fit to a person at a terminal.
        """
        if self.solver is None and step < self.retry:
            return None
        regular, late = self.settings.due(step, self.solver is not None), self.behind == LATE
        count = regular or (self.settings.refresh if late else 0)
        if not count:
            self._follow(step, model, batches, forward)
            return None
        kept = self.state_dict()  # a fit that is stopped leaves no trace, so that a resumed run makes it as a whole
        if late:
            self.behind = REFRESHED  # also where nothing is learned: it would be tried before each step
        made = self.settings.solver.settings() if self.solver is None else {}
        made |= {"solver": self.solver, "forward": forward, "log_every": count, "until": until, "progress": progress}
        fitted: Fit | str
        with self._drawing(model, step):
            try:
                fitted = fit_hyper_solver(model, lambda i: batches(step + i), self._settings(count), **made)
            except NotFittedError as error:
                fitted = str(error)
            if until():
                self.load_state_dict(kept, next(model.parameters()).device)
                raise FitStoppedError(f"the fit before step {step} was asked to end.")
        if isinstance(fitted, str):  # the solver that there is goes on, learned or the model's own
            if self.solver is None:
                self.retry = step + self.settings.every
                warnings.warn(
                    f"step {step}: no learned solver yet, the model's own goes on until step {self.retry}. {fitted} "
                    "What is fit.KEY there is alternate.fit.KEY here.",
                    EquilibriumWarning,
                    stacklevel=3,
                )
            return {"steps": 0, "not_fitted": fitted}
        if regular:
            self.behind = 0
        self.solver = fitted.solver
        self.seconds += fitted.record["seconds"]
        return {"steps": count, **fitted.record}

    def _follow(self, step: int, model: nn.Module, batches: Callable[[int], Any], forward: Forward | None) -> None:
        """A single fitting step, if it is time for one."""
        follow = self.settings.follow
        if follow is None or step % follow or not self.in_use:
            return
        assert self.solver is not None
        started = time.perf_counter()
        if self._follower is None:
            self._follower = self._made_follower(self.solver)
        with self._drawing(model, step):
            self._follower.step(model, batches(step), forward)
        self.seconds += time.perf_counter() - started

    def _made_follower(self, solver: HyperAnderson) -> Follower:
        return Follower(solver, self._settings(1), self.settings.follow_rate)

    def _settings(self, steps: int) -> FitSettings:
        fit = self.settings.fit
        return dataclasses.replace(fit, steps=steps, training=True, seed=fit.seed + self.seed)

    @contextlib.contextmanager
    def _drawing(self, model: nn.Module, step: int) -> Iterator[None]:
        """Draws that are those of a step, whatever was drawn before; afterwards generators are as they were."""
        devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(devices=[device.index for device in devices]):
            torch.manual_seed(self.seed * 1_000_003 + step)  # no step of a run has that of another run's
            yield

    @contextlib.contextmanager
    def used(self, model: nn.Module) -> Iterator[None]:
        """The learned solver as the forward solver of all equilibria of the model, for a while.

        Outside of this the model has its own: averages, checkpoints and optimisers see its own parameters alone.
        """
        if not self.in_use:
            yield
            return
        most = self.max_steps
        with contextlib.ExitStack() as changed:
            for deq in outermost_deqs(model):
                stop = {} if most is None else {"stop": deq.plan.stop.with_budget(most)}
                changed.enter_context(planned([deq], solver=self.solver, **stop))
            yield

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue, plain enough for a checkpoint."""
        known: dict[str, Any] = {"config": None, "solver": None, "seconds": self.seconds}
        known |= {"grown": self.grown, "behind": self.behind, "retry": self.retry}
        if self.solver is not None:
            known["config"] = dataclasses.asdict(self.solver.config)
            known["solver"] = tree_map(_kept, dict(self.solver.state_dict()))
        follower = None if self._follower is None else self._follower.state_dict()
        return {**known, "follower": tree_map(_kept, follower)}

    def load_state_dict(self, state: dict[str, Any], device: Any = "cpu") -> None:
        """Continue from a saved state."""
        self.seconds, self.solver, self._follower = float(state["seconds"]), None, None
        self.grown, self.behind, self.retry = (int(state.get(name, 0)) for name in ("grown", "behind", "retry"))
        if state["config"] is not None:
            self.solver = HyperAnderson(HyperConfig(**state["config"])).to(device)
            self.solver.load_state_dict(state["solver"])
            if state.get("follower") is not None:
                self._follower = self._made_follower(self.solver)
                self._follower.load_state_dict(state["follower"])


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
