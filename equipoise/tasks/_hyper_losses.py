"""What a learned solver is fitted to: equilibria found by a classic solver, and losses of its own unrolled steps."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise import _leaves
from equipoise._compat import reenter_autocast
from equipoise._errors import require_count, require_number, unknown_name
from equipoise._modes import evaluating, training
from equipoise._module import DEQ, outermost_deqs, planned
from equipoise._problem import Problem
from equipoise._solution import Solution
from equipoise._stop import Stop, tiny_norm
from equipoise._tree import Leaves, tree_map
from equipoise.solvers import Broyden, Solver
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks.base import Forward, call_model

# Relative distance to the equilibrium below which logarithms do not reward a step.
CLOSE = 1e-3
# How far iterates may go from the equilibrium, in sizes of it and of the distance of the start: those that run away, as
# plain steps of some models do, would overflow and spoil the gradient of all systems.
FAR = 1e6

EMPHASES = ("increasing", "quadratic", "uniform", "last")


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three losses.

    Attributes:
        convergence: Of the distances of the iterates to the equilibrium.
        initial: Of the distance of the start to it; alone trains the initialiser.
        residual: Of the combined residuals, at the first step: makes the weights Anderson's at first.
        residual_end: What the weight of the combined residuals falls to.
        fade: Share of the steps over which it falls.
        relative: Divide each loss by its value at the first step, so that all begin at their weights; norms grow with
            the size of a state, so weights do not carry over from one model to another otherwise.
    """

    convergence: float = 1.0
    initial: float = 1.0
    residual: float = 1.0
    residual_end: float = 5e-8
    fade: float = 0.4
    relative: bool = True

    def __post_init__(self) -> None:
        for name in ("convergence", "initial", "residual", "residual_end", "fade"):
            require_number("LossWeights", name, getattr(self, name), low=0.0)

    def at(self, progress: float) -> tuple[float, float, float]:
        """The three weights when this share of the steps has been made."""
        left = max(0.0, 1.0 - progress / self.fade) if self.fade > 0 else 0.0
        end = min(self.residual, self.residual_end)
        return self.convergence, self.initial, end + left * (self.residual - end)


@dataclass(frozen=True)
class FitSettings:
    """How a learned solver is fitted.

    Attributes:
        steps: Optimiser steps.
        unroll: Solver steps that are unrolled; the solver may be run for more afterwards.
        learning_rate: Of Adam at the beginning; half a cosine leads to zero.
        clip: Largest norm of the gradient; None for any.
        losses: Weights of the three losses.
        emphasis: How the distances after each solver step are weighted: "increasing" with the step, "quadratic", by
            its square, "uniform", or the "last" alone.
        logarithm: Whether logarithms of relative distances are minimised, to which every solver step matters alike,
            instead of distances, as published, to which late steps, being close already, hardly matter.
        plain: Whether unrolled steps are plain ones. Weights of least squares, which are not learned, are left to use
            then, and a step of the fit costs less.
        joint: Whether the initialiser is also trained by the distances of later iterates.
        checkpoint: Evaluate f again in the backward pass instead of keeping its graphs.
        solver: The classic solver that finds the equilibria.
        stop: When it ends.
        accept: Largest relative residual of an equilibrium to learn from; systems above it are left out.
        pool: Batches whose equilibria are kept, and learned from again and again; None for a new one at every step.
        training: Whether the model is as in training, for a solver that is used there, with dropout that is held
            constant during a solve. Modules that keep statistics are in eval mode all the same: the model stays.
        seed: Of the initial weights.
    """

    steps: int = 1000
    unroll: int = 10
    learning_rate: float = 3e-3
    clip: float | None = 1.0
    losses: LossWeights = LossWeights()
    emphasis: Literal["increasing", "quadratic", "uniform", "last"] = "increasing"
    logarithm: bool = True
    plain: bool = False
    joint: bool = False
    checkpoint: bool = False
    solver: Solver = Broyden()
    stop: Stop = Stop(rtol=1e-4, max_steps=60)
    accept: float = 0.05
    pool: int | None = None
    training: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        require_count("FitSettings", "steps", self.steps)
        require_count("FitSettings", "unroll", self.unroll)
        require_number("FitSettings", "learning_rate", self.learning_rate, low=0.0, open_low=True)
        if self.clip is not None:
            require_number("FitSettings", "clip", self.clip, low=0.0, open_low=True)
        require_number("FitSettings", "accept", self.accept, low=0.0, open_low=True)
        if self.pool is not None:
            require_count("FitSettings", "pool", self.pool)
        if self.emphasis not in EMPHASES:
            raise unknown_name("emphasis", self.emphasis, EMPHASES)

    def mode(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Where a model is looked at: in training mode or in eval mode."""
        return training(model) if self.training else evaluating(model)

    def emphases(self) -> list[float]:
        """The weight of each solver step; they sum to one."""
        k = self.unroll
        if self.emphasis == "last":
            return [0.0] * (k - 1) + [1.0]
        power = {"uniform": 0, "increasing": 1, "quadratic": 2}[self.emphasis]
        raw = [float(i**power) for i in range(1, k + 1)]
        return [value / sum(raw) for value in raw]


def _published(steps: int, unroll: int, initial: float, residual: float, fade: float = 0.4) -> FitSettings:
    losses = LossWeights(0.1, initial, residual, fade=fade, relative=False)
    return FitSettings(steps, unroll, 1e-3, None, losses, logarithm=False, stop=Stop(rtol=1e-6, max_steps=60))


PUBLISHED = {
    "wikitext103": _published(5000, 10, 0.05, 1e-4),
    "imagenet": _published(4000, 10, 0.02, 1e-5),
    "cityscapes": _published(3000, 12, 0.02, 1e-5, fade=0.5),
}
"""Settings of the published fits, whose third loss fades over the first 1,500 to 2,000 steps;
their weights of losses are for models of those sizes."""


# Equilibria to learn from


class NotFittedError(ValueError):
    """A fit has learned nothing."""


class NoEquilibriaError(NotFittedError):
    """There is nothing to learn from."""

    def __init__(self, model: nn.Module, settings: FitSettings, solved: bool) -> None:
        kind = type(model).__name__
        super().__init__(
            f"{kind} has no equilibrium on these batches that {settings.solver!r} finds to a residual of "
            f"{settings.accept:g} in {settings.stop.max_steps} steps: allow more (fit.stop.max_steps), or accept worse "
            "ones (fit.accept)."
            if solved
            else f"{kind} solved for no equilibrium: is it a DEQ?"
        )


@dataclass(frozen=True)
class Target:
    """One solve of a model, to be repeated by the learned solver.

    Attributes:
        problem: What was solved.
        start: Where a solve begins.
        root: Where it ended.
        residual: (N,) the relative residual there.
        deq: Whose solve it was.
        inputs: Of the DEQ.
        accepted: Share of the systems whose equilibrium was found; these are the ones that are left.
        given: Whether the model said where the solve begins, instead of the DEQ.
    """

    problem: Problem
    start: Leaves
    root: Leaves
    residual: Tensor
    deq: DEQ
    inputs: tuple[Any, ...]
    accepted: float = 1.0
    given: bool = False

    def rows(self, index: Tensor) -> "Target":
        """Some of its systems."""
        start, root = (_leaves.take_rows(part, index) for part in (self.start, self.root))
        problem, residual = self.problem.rows(index), self.residual.index_select(0, index)
        return dataclasses.replace(self, problem=problem, start=start, root=root, residual=residual)

    def usable(self, accept: float) -> "Target | None":
        """The systems with an equilibrium of at most this residual, None if there are none.

        They also take the places of the others, where f can be evaluated on any of them: one shape serves all batches.
        """
        kept, count = (self.residual <= accept).nonzero()[:, 0], self.problem.num_systems
        if len(kept) in (0, count):
            return self if len(kept) else None
        accepted = len(kept) / count
        if self.problem.can_slice:
            kept = kept.repeat(math.ceil(1 / accepted))[:count]
        return dataclasses.replace(self.rows(kept), accepted=accepted)


def find_targets(
    model: nn.Module, batch: Any, settings: FitSettings, forward: Forward | None = None, carry: Any = None
) -> tuple[list[Target], Any]:
    """The equilibria of a model on a batch, by a classic solver, and what the next batch needs.

    Of a DEQ in the cell of another one, the solves are not taken down, and are made as always: those are parts of f.

    Args:
        model: A DEQ, or a module that contains some.
        batch: Inputs.
        settings: Which solver, to what tolerance, in which mode.
        forward: How to run the model on the batch; by default it is called with the batch (a tuple: with its items).
        carry: What the batch before left.
    """
    targets: list[Target] = []

    def note(deq: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], solution: Solution) -> None:
        assert isinstance(deq, DEQ)
        z0, inputs = tree_map(_detached, (options.get("z0"), inputs))
        problem: Problem = solution.problem  # type: ignore[assignment]
        # What made the batch may be about to be trained: it is not learned here, and its graph is left whole.
        problem.inputs, problem.context = tree_map(_detached, (problem.inputs, problem.context))
        start, root = (problem.start(tree) for tree in (deq.start(*inputs) if z0 is None else z0, solution.value))
        root, residual = [leaf.clone() for leaf in root], solution.stats.residual
        targets.append(Target(problem, start, root, residual, deq, inputs, given=z0 is not None))

    deqs = outermost_deqs(model)
    if not deqs:
        raise ValueError(f"{type(model).__name__} contains no DEQ, so there are no equilibria to find.")
    with planned(deqs, solver=settings.solver, stop=settings.stop), torch.no_grad(), settings.mode(model):
        hooks = [deq.register_forward_hook(note, with_kwargs=True) for deq in deqs]
        try:
            carry = (forward or call_model)(model, batch, carry)
        finally:
            for hook in hooks:
                hook.remove()
    return targets, carry


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.clone() if leaf.is_inference() else leaf.detach()  # of the former autograd saves nothing


# Losses


@dataclass
class Losses:
    """The three losses, means over systems, and residuals on the way.

    Attributes:
        convergence: Weighted distances of the iterates to the equilibrium.
        initial: Distance of the start to it.
        residual: Sum of the norms of combined residuals.
        first: (N,) relative residual of the start.
        last: (N,) relative residual of the last iterate but one.
    """

    convergence: Tensor
    initial: Tensor
    residual: Tensor
    first: Tensor
    last: Tensor

    @property
    def parts(self) -> list[Tensor]:
        """The three."""
        return [self.convergence, self.initial, self.residual]


def unrolled_losses(solver: HyperAnderson, target: Target, settings: FitSettings) -> Losses:
    """Run the solver for some steps, recorded by autograd, and measure how it does.

    The start is trained by its own distance alone, the steps by the others, unless `settings.joint`.
    """
    # f enters autocast by itself, as in any solve.
    with reenter_autocast(target.problem.device_type, None), torch.enable_grad():
        return _unrolled(solver, target, settings)


def _unrolled(solver: HyperAnderson, target: Target, settings: FitSettings) -> Losses:
    problem, root = target.problem, target.root
    if settings.plain:
        solver = solver.plainly()
    z, state = solver.guess(problem, target.start), solver.empty_state(target.start)
    # Weights of least squares are where corrections begin; near the root their derivatives are huge.
    state.through = False
    initial, size = _distance(z, root), _leaves.norm(root).clamp_min(tiny_norm(root[0].dtype))
    limit = FAR * (size + initial.detach())
    if not settings.joint:
        z = [leaf.detach() for leaf in z]
    convergence = residual = torch.zeros_like(initial)
    relative: list[Tensor] = []
    for k, emphasis in enumerate(settings.emphases()):
        fz = _evaluate(problem, z, settings.checkpoint and k > 0)
        with torch.no_grad():
            relative.append(_distance(fz, z) / _leaves.norm(fz).clamp_min(tiny_norm(fz[0].dtype)))
        # Not `problem.residual`, which would keep the last ones, with all that autograd knows of them.
        z, state = solver.advance(problem.spec, z, fz, state, _leaves.subtract(fz, z))
        z = _near(z, root, limit)
        distance = _distance(z, root)
        if settings.logarithm:
            distance = (1 + distance / (CLOSE * size)).log()
        convergence = convergence + emphasis * distance
        if state.mixed is not None:
            residual = residual + torch.linalg.vector_norm(_leaves.norm(state.mixed).view(len(initial), -1), dim=1)
    return Losses(convergence.mean(), initial.mean(), residual.mean(), relative[0], relative[-1])


def _evaluate(problem: Problem, z: Leaves, again: bool) -> Leaves:
    return checkpoint(problem.evaluate, z, use_reentrant=False) if again else problem.evaluate(z)


def _near(z: Leaves, root: Leaves, limit: Tensor) -> Leaves:
    """z with systems farther off than their limit brought back to it, and their gradients made as much smaller."""
    with torch.no_grad():
        share = (limit / _distance(z, root)).clamp(max=1.0)[:, None]
        away = share < 1.0
    return [torch.where(away, end + share * (leaf - end), leaf) for leaf, end in zip(z, root, strict=True)]


def _distance(a: Leaves, b: Leaves) -> Tensor:
    return _leaves.norm(_leaves.subtract(a, b))


class Balance:
    """What the losses are divided by: their values at the first step, if weights are relative.

    A loss that is zero there counts for nothing, and sizes are taken anew at the next one, as they are after a loss
    that is not finite.
    """

    def __init__(self, weights: LossWeights) -> None:
        self.weights = weights
        self.sizes: list[Tensor] | None = None

    @property
    def settled(self) -> bool:
        """Whether there are values to divide by, all finite; waits for the device."""
        return self.sizes is not None and bool(torch.stack(self.sizes).isfinite().all())

    def total(self, losses: Losses, progress: float) -> Tensor:
        """The sum that is minimised when this share of the steps has been made."""
        if not self.settled:
            self.sizes = [self._size(part) for part in losses.parts]
        return self.weighted(losses, self.weights.at(progress))

    def _size(self, part: Tensor) -> Tensor:
        if not self.weights.relative or not part.requires_grad:
            return torch.ones_like(part)
        size = part.detach()
        return torch.where(size > 0, size, torch.inf)

    def weighted(self, losses: Losses, weights: Iterable[float | Tensor]) -> Tensor:
        """The sum with given weights; nothing is read on the host."""
        assert self.sizes is not None
        terms = zip(losses.parts, self.sizes, weights, strict=True)
        return torch.stack([weight * part / size for part, size, weight in terms if part.requires_grad]).sum()
