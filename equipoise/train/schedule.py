"""What changes over a run, as data: plans, step-budget jitter, penalty weights and learning rates.

Everything but the plateau rule and a penalty that keeps a residual is a pure function of the step (and of a seed), and
these two are saved, so a resumed run equals one that was never interrupted. Steps count optimiser steps from 0; warm-up
does not restart any of the counts.
"""

import abc
import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from equipoise._errors import require_count, require_number
from equipoise._module import Plan, deqs_in
from equipoise._registry import Registry
from equipoise._solution import Solution
from equipoise._stop import Stop
from equipoise.adjoints import Unroll
from equipoise.penalties import check_direction, jacobian_penalty
from equipoise.solvers import Picard, Solver
from equipoise.train.config import register_family


def keyed_uniform(seed: int, purpose: str, step: int) -> float:
    """A number in [0, 1) that depends on its arguments alone, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def step_seed(seed: int, step: int) -> int:
    """The seed of all draws of a step, the same for all rows of its batch: see `equipoise._draws`."""
    return (seed * 1_000_003 + step) * 4_099


@dataclass(frozen=True)
class Warmup:
    """Train a shallow weight-tied stack first, by ordinary backpropagation.

    Attributes:
        steps: Optimiser steps in this phase; 0 for none.
        layers: Applications of the cell.
        checkpoint: Recompute layers in the backward pass instead of keeping their graphs.
    """

    steps: int = 0
    layers: int = 2
    checkpoint: bool = False

    def __post_init__(self) -> None:
        require_count("Warmup", "steps", self.steps, low=0)
        require_count("Warmup", "layers", self.layers)

    @property
    def plan(self) -> Plan:
        """The stack as a plan: `layers` plain evaluations, the last one returned, the loop recorded."""
        stop = Stop(rtol=0.0, atol=0.0, max_steps=self.layers, select="last")
        return Plan(solver=Picard(), adjoint=Unroll(checkpoint=self.checkpoint), stop=stop)


@dataclass(frozen=True)
class Opening:
    """Solve by another solver at first.

    The Jacobian of a fresh model may be nearly nilpotent. Plain iteration then converges in a few steps, where the
    least-squares weights of Anderson are large and throw it out; some epochs later it is the other way round.

    Attributes:
        steps: Optimiser steps from the start of the run, a warm-up included; 0 for none.
        solver: Of forward solves and of evaluations in this phase.
    """

    steps: int = 0
    solver: Solver = Picard()

    def __post_init__(self) -> None:
        require_count("Opening", "steps", self.steps, low=0)


@dataclass(frozen=True)
class Jitter:
    """Vary the step budget of the forward solve, so that the model does not grow used to one number.

    Attributes:
        low: The least that is added to `Stop.max_steps`, often negative.
        high: The most that is added.
        when: "always", or "penalty" for steps on which the Jacobian penalty is drawn.
    """

    low: int = 0
    high: int = 0
    when: Literal["always", "penalty"] = "always"

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"Jitter: low must not exceed high, got low={self.low}, high={self.high}.")

    def offset(self, seed: int, step: int, penalised: bool) -> int:
        """Uniform on {low, ..., high}; 0 on steps that are left alone."""
        if self.when == "penalty" and not penalised:
            return 0
        return self.low + math.floor(keyed_uniform(seed, "jitter", step) * (self.high - self.low + 1))


@dataclass(frozen=True)
class Penalty:
    """When and how strongly the Jacobian is penalised. The term is added as it is, not divided by the probability.

    Attributes:
        weight: Its weight γ at the first equilibrium step; 0, with `every` unset, for no penalty.
        probability: Share of steps on which it is added.
        growth: Added to the weight every `every` equilibrium steps.
        every: Steps between two increases; None for a constant weight.
        stop: Step from which it is off; None for never.
        probes: Random vectors of the estimate.
        along: Direction in which the Jacobian is penalised: "random", or that of the "residual", as in
            `jacobian_penalty`.
        share: Of the rows of a batch, rounded up, whose Jacobians are looked at: the first ones, of every process. With
            less of them it costs less, and may come more often.
        warmup_weight: The weight while the shallow stack is trained.
        keep: The median relative residual that solves of training steps are to keep. As they come near it the penalty
            comes more often, on every step from there on; while they are above it, with more and more weight; below it
            less, but not less often than `probability`. Looked at whenever the run logs; None to leave the penalty as
            it is.
    """

    weight: float = 0.0
    probability: float = 1.0
    growth: float = 0.1
    every: int | None = None
    stop: int | None = None
    probes: int = 1
    along: Literal["random", "residual"] = "random"
    share: float = 1.0
    warmup_weight: float = 0.0
    keep: float | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "growth", "warmup_weight"):
            require_number("Penalty", name, getattr(self, name), low=0.0)
        require_number("Penalty", "probability", self.probability, low=0.0, high=1.0, closed_high=True)
        require_number("Penalty", "share", self.share, low=0.0, high=1.0, open_low=True, closed_high=True)
        if self.every is not None:
            require_count("Penalty", "every", self.every)
        if self.stop is not None:
            require_count("Penalty", "stop", self.stop, low=0)
        require_count("Penalty", "probes", self.probes)
        check_direction("Penalty", self.along, self.probes)
        if self.keep is not None:
            require_number("Penalty", "keep", self.keep, low=0.0, high=1.0, open_low=True)
            if not (self.weight > 0 and self.probability > 0):
                raise ValueError(
                    f"Penalty: keep={self.keep} needs a penalty to make stronger, but weight={self.weight} and "
                    f"probability={self.probability}; give both above 0."
                )

    def weight_at(self, seed: int, step: int, warmup_steps: int = 0, strength: float | None = None) -> float:
        """The weight on this step; 0 if it is not drawn, or over.

        Args:
            seed: Key of the draw.
            step: Number of the step.
            warmup_steps: Steps of the shallow stack.
            strength: Share of steps on which it is added after those, `probability` by default; what is above 1
                multiplies the weight.
        """
        shallow = step < warmup_steps
        strength = self.probability if strength is None or shallow else strength
        over = self.stop is not None and step >= self.stop
        if over or keyed_uniform(seed, "penalty", step) >= strength:
            return 0.0
        if shallow:
            return self.warmup_weight
        increases = 0 if self.every is None else (step - warmup_steps) // self.every
        return (self.weight + self.growth * increases) * max(strength, 1.0)

    def of(self, solution: Solution) -> Tensor:
        """The term of a solve, without its weight."""
        systems = math.ceil(self.share * solution.stats.residual.numel())
        return jacobian_penalty(solution, probes=self.probes, along=self.along, systems=systems)

    def start(self) -> "PenaltyControl | None":
        """The state of a run that begins, if there is a residual to keep."""
        return None if self.keep is None else PenaltyControl(self)


class PenaltyControl:
    """A penalty that depends on residuals: saved and restored with the trainer.

    Attributes:
        strength: Share of steps with the penalty; what is above 1 multiplies its weight.
    """

    # Most that the weight is multiplied by, and most that counts of how far a residual is off: strengths at most four
    # times, or a quarter, of the one before.
    MOST = 10.0
    FARTHEST = 2.0

    def __init__(self, settings: Penalty) -> None:
        self.settings, self.strength = settings, settings.probability

    def update(self, residual: float) -> None:
        """Take in the median residual of some steps; one that is not finite counts as large."""
        assert self.settings.keep is not None
        far = residual / self.settings.keep if math.isfinite(residual) else math.inf
        change = min(max(far, 1 / self.FARTHEST), self.FARTHEST) ** 2
        # An equilibrium can be lost between a few looks: how near the residual is counts by itself as well.
        least = max(self.settings.probability, min(far, 1.0) ** 3)
        self.strength = min(max(self.strength * change, least), self.MOST)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue."""
        return {"strength": self.strength}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.strength = float(state["strength"])


@dataclass(frozen=True)
class StepPlan:
    """What one step does.

    Attributes:
        phase: "warmup" or "equilibrium".
        plan: How to solve and differentiate on this step.
        eval_plan: How to solve in an evaluation made at this step; never jittered.
        penalty_weight: Weight of the Jacobian penalty; 0 for none.
        penalty: What it looks at.
    """

    phase: str
    plan: Plan
    eval_plan: Plan
    penalty_weight: float = 0.0
    penalty: Penalty = Penalty()

    def with_budget(self, steps: int) -> "StepPlan":
        """The same, evaluations ending after so many steps."""
        plan = self.eval_plan
        return dataclasses.replace(self, eval_plan=plan.replace(stop=plan.stop.with_budget(steps)))

    def apply(self, model: nn.Module) -> None:
        """Set the plans of every DEQ in `model`."""
        for deq in deqs_in(model):
            if deq.plan != self.plan:
                deq.plan = self.plan
            if deq.eval_plan != self.eval_plan:
                deq.eval_plan = self.eval_plan


@dataclass(frozen=True)
class PlanSchedule:
    """Plans over a run: a shallow stack for some steps, then the equilibrium, at first by another solver.

    Attributes:
        plan: The equilibrium plan.
        eval_plan: The plan of evaluations; `plan` if None. In warm-up they use the stack.
        warmup: The shallow phase.
        opening: Another solver at first.
        jitter: Of the forward step budget in the equilibrium phase.
        penalty: Of the Jacobian.
        seed: Key of the draws.
    """

    plan: Plan = Plan()
    eval_plan: Plan | None = None
    warmup: Warmup = Warmup()
    opening: Opening = Opening()
    jitter: Jitter = Jitter()
    penalty: Penalty = Penalty()
    seed: int = 0

    def __post_init__(self) -> None:
        least = self.plan.stop.max_steps + self.jitter.low
        if least < 1:
            raise ValueError(
                f"PlanSchedule: jitter.low={self.jitter.low} leaves {least} of {self.plan.stop.max_steps} steps; "
                "at least 1 must remain."
            )

    def at(self, step: int, strength: float | None = None) -> StepPlan:
        """What step number `step` does, with a penalty of some strength if it is not the usual one."""
        weight = self.penalty.weight_at(self.seed, step, self.warmup.steps, strength)
        if step < self.warmup.steps:
            stack = self.warmup.plan
            return StepPlan("warmup", stack, stack, weight, self.penalty)
        offset = self.jitter.offset(self.seed, step, penalised=weight > 0)
        stop, plan, eval_plan = self.plan.stop, self.plan, self.eval_plan or self.plan
        if offset:
            plan = plan.replace(stop=stop.with_budget(stop.max_steps + offset))
        if step < self.opening.steps:
            plan, eval_plan = (p.replace(solver=self.opening.solver) for p in (plan, eval_plan))
        return StepPlan("equilibrium", plan, eval_plan, weight, self.penalty)

    def final(self) -> StepPlan:
        """The equilibrium without jitter or penalty, for evaluation of a finished model."""
        return StepPlan("equilibrium", self.plan, self.eval_plan or self.plan)


@dataclass(frozen=True)
class Horizon:
    """How long a run is.

    Attributes:
        steps: Optimiser steps in all.
        epoch: Optimiser steps in one pass over the data; None where there is no such thing.
    """

    steps: int
    epoch: int | None = None


@dataclass(frozen=True)
class LearningRate(abc.ABC):
    """A factor of the learning rate: linear from 0 over `warmup` steps, then `shape`.

    Attributes:
        warmup: Steps of the linear start; the first step has factor 1/warmup.
    """

    warmup: int = 0

    def __post_init__(self) -> None:
        require_count(type(self).__name__, "warmup", self.warmup, low=0)

    @abc.abstractmethod
    def shape(self, step: int, horizon: Horizon) -> float:
        """The factor after the linear start; `step` counts from the beginning of the run."""

    def factor(self, step: int, horizon: Horizon) -> float:
        """What the base learning rate is multiplied by on this step."""
        return (step + 1) / self.warmup if step < self.warmup else self.shape(step, horizon)


LEARNING_RATES = Registry("schedule")
register_family(LearningRate, LEARNING_RATES)
register_learning_rate = LEARNING_RATES.register


@register_learning_rate("constant")
@dataclass(frozen=True)
class Constant(LearningRate):
    """The base learning rate throughout."""

    def shape(self, step: int, horizon: Horizon) -> float:
        return 1.0


@register_learning_rate("cosine")
@dataclass(frozen=True)
class Cosine(LearningRate):
    """Half a cosine, ½(1 + cos(π·step/steps)), down to `floor`.

    Attributes:
        warmup: Steps of the linear start; the cosine is counted from step 0 all the same.
        steps: Where it ends; the length of the run if None.
        floor: The factor at the end.
    """

    steps: int | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None:
            require_count("Cosine", "steps", self.steps)
        require_number("Cosine", "floor", self.floor, low=0.0, high=1.0)

    def shape(self, step: int, horizon: Horizon) -> float:
        end = self.steps or horizon.steps
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(step, end) / end))


@register_learning_rate("step")
@dataclass(frozen=True)
class StepDecay(LearningRate):
    """Multiplied by `gamma` at given times.

    Attributes:
        warmup: Steps of the linear start.
        at: When, in increasing order; the first step with the lower rate.
        gamma: By how much.
        unit: What `at` counts, "step" or "epoch".
    """

    at: tuple[int, ...] = ()
    gamma: float = 0.1
    unit: Literal["step", "epoch"] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("StepDecay", "gamma", self.gamma, low=0.0, open_low=True)
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"StepDecay: at must be increasing, got {self.at}.")

    def shape(self, step: int, horizon: Horizon) -> float:
        if self.unit == "epoch":
            if horizon.epoch is None:
                raise ValueError('StepDecay: the data has no epochs; give `at` in steps, with unit = "step".')
            step //= horizon.epoch
        return self.gamma ** sum(step >= time for time in self.at)


@dataclass(frozen=True)
class Plateau:
    """Lower the learning rate when a metric stops falling; multiplies whatever schedule is in use.

    Attributes:
        gamma: What the rate is multiplied by.
        patience: Evaluations in a row without a new best after which it is lowered.
        threshold: Relative improvement that counts as one.
        floor: The scale is not lowered below this.
    """

    gamma: float = 0.25
    patience: int = 10
    threshold: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        require_number("Plateau", "gamma", self.gamma, low=0.0, high=1.0, open_low=True)
        require_count("Plateau", "patience", self.patience)
        require_number("Plateau", "threshold", self.threshold, low=0.0, high=1.0)
        require_number("Plateau", "floor", self.floor, low=0.0, high=1.0)

    def start(self) -> "PlateauMonitor":
        """The state of a run that begins."""
        return PlateauMonitor(self)


class PlateauMonitor:
    """The part of a schedule that depends on results: saved and restored with the trainer."""

    def __init__(self, settings: Plateau) -> None:
        self.settings = settings
        self.scale, self.best, self.bad = 1.0, math.inf, 0

    def update(self, metric: float) -> bool:
        """Take in an evaluation, lower is better; True if the rate has been lowered. NaN is no improvement."""
        margin = self.settings.threshold * abs(self.best) if math.isfinite(self.best) else 0.0
        if metric < self.best - margin:
            self.best, self.bad = float(metric), 0
            return False
        self.bad += 1
        if self.bad < self.settings.patience:
            return False
        before, self.bad = self.scale, 0
        self.scale = max(self.scale * self.settings.gamma, self.settings.floor)
        return self.scale < before

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue."""
        return {"scale": self.scale, "best": self.best, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.scale, self.best, self.bad = float(state["scale"]), float(state["best"]), int(state["bad"])
