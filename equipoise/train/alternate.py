"""Training with a learned solver that is kept up with the model: some steps of the one, some steps of the other."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from equipoise._errors import require_count
from equipoise._module import deqs_in, override
from equipoise.solvers._hyper_config import HyperConfig
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks.hyper import FitSettings, Forward, Networks, NoEquilibriaError, fit_hyper_solver


@dataclass(frozen=True)
class Alternate:
    """When a learned solver is fitted during training.

    Until `start` the model is trained with its own solver. Then one is fitted from scratch, used as the forward solver
    of the following steps, and fitted a little more every `every` steps. Backward solves are as they were.

    Attributes:
        start: Step before which it is fitted first; None for never.
        first: Fitting steps there.
        every: Training steps between two later fits.
        refresh: Fitting steps of each of those.
        max_steps: Most steps of a forward solve by the learned solver; None for those of the plan.
        solver: What the solver consists of.
        fit: How it is fitted; its number of steps is not looked at.
    """

    start: int | None = None
    first: int = 1000
    every: int = 5000
    refresh: int = 200
    max_steps: int | None = None
    solver: Networks = Networks()
    fit: FitSettings = FitSettings()

    def __post_init__(self) -> None:
        if self.start is not None:
            require_count("alternate", "start", self.start, low=0)
        for name in ("first", "every", "refresh"):
            require_count("alternate", name, getattr(self, name))
        if self.max_steps is not None:
            require_count("alternate", "max_steps", self.max_steps)

    def due(self, step: int, fitted: bool) -> int:
        """How many fitting steps come before training step number `step`."""
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
    """

    settings: Alternate
    solver: HyperAnderson | None = field(default=None)
    seconds: float = 0.0

    def before(
        self, step: int, model: nn.Module, batches: Callable[[int], Any], forward: Forward | None = None
    ) -> dict[str, Any] | None:
        """Fit the solver if it is time to; returns what to log, or None.

        Args:
            step: The training step that comes next.
            model: As it is now; it is not touched.
            batches: From a step to a batch; those of the coming steps are used, without labels.
            forward: How to run the model on a batch.
        """
        count = self.settings.due(step, self.solver is not None)
        if not count:
            return None
        made = self.settings.solver.settings() if self.solver is None else {}
        settings = dataclasses.replace(self.settings.fit, steps=count)
        made |= {"solver": self.solver, "forward": forward, "log_every": count}
        try:
            fit = fit_hyper_solver(model, lambda i: batches(step + i), settings, **made)
        except NoEquilibriaError as error:
            if self.solver is None:
                raise
            return {"steps": 0, "not_fitted": str(error)}  # the solver that there is goes on
        self.solver = fit.solver
        self.seconds += fit.record["seconds"]
        return {"steps": count, **fit.record}

    @contextlib.contextmanager
    def used(self, model: nn.Module) -> Iterator[None]:
        """The learned solver as the forward solver of all equilibria of the model, for a while.

        Outside of this the model has its own: averages, checkpoints and optimisers see its own parameters alone.
        """
        if self.solver is None:
            yield
            return
        most, deqs = self.settings.max_steps, deqs_in(model)
        stops = [{} if most is None else {"stop": deq.plan.stop.with_budget(most)} for deq in deqs]
        with contextlib.ExitStack() as changed:
            for deq, stop in zip(deqs, stops, strict=True):
                changed.enter_context(override(deq, solver=self.solver, **stop))
            yield

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue, plain enough for a checkpoint."""
        if self.solver is None:
            return {"config": None, "solver": None, "seconds": self.seconds}
        weights = {name: value.detach().cpu().clone() for name, value in self.solver.state_dict().items()}
        return {"config": dataclasses.asdict(self.solver.config), "solver": weights, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any], device: Any = "cpu") -> None:
        """Continue from a saved state."""
        self.seconds, self.solver = float(state["seconds"]), None
        if state["config"] is not None:
            self.solver = HyperAnderson(HyperConfig(**state["config"])).to(device)
            self.solver.load_state_dict(state["solver"])
