"""Optimiser steps of a learned solver: made from Python, or recorded once per shape and replayed.

Unrolled steps of a small model are thousands of kernels, and on a fast device the host is what they wait for. All of a
step, the optimiser's part included, asks the host for nothing, so it can be one CUDA graph.
"""

import dataclasses
import gc
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._fingerprint import PLAIN_VALUES
from equipoise._recording import Aliases
from equipoise._tape import copy_all, recording_now, tape_for
from equipoise._tree import tree_flatten, tree_tensors
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks._hyper_losses import Balance, FitSettings, Losses, Target, unrolled_losses
from equipoise.tasks._hyper_pool import constant_scope, rebuilt

# Steps on a shape before it is recorded: optimisers and libraries have set themselves up by then.
REHEARSED = 2


def gradients(
    solver: HyperAnderson,
    targets: Iterable[Target],
    settings: FitSettings,
    balance: Balance,
    weights: Sequence[float | Tensor] | None = None,
    progress: float = 1.0,
) -> dict[str, Tensor]:
    """Leave the clipped gradient of the losses in the solver's parameters; returns what to log.

    Args:
        solver: To be improved.
        targets: To learn from.
        settings: How the solver is unrolled.
        balance: Of the losses.
        weights: Of the losses; by default those of `progress`.
        progress: Share of the fitting done.
    """
    records = []
    with torch.enable_grad():
        for target in targets:
            losses = unrolled_losses(solver, target, settings)
            total = balance.total(losses, progress) if weights is None else balance.weighted(losses, weights)
            total.backward()
            records.append(_record(losses, total, target))
    keys = list(dict.fromkeys(key for record in records for key in record))
    means = {key: torch.stack([record[key].mean() for record in records]).mean() for key in keys}
    used = [parameter for parameter in solver.parameters() if parameter.grad is not None]
    most = math.inf if settings.clip is None else settings.clip
    return {**means, "gradient": nn.utils.clip_grad_norm_(used, most)}


def _record(losses: Losses, total: Tensor, target: Target) -> dict[str, Tensor]:
    logged = {"loss": total, **{name: getattr(losses, name) for name in ("convergence", "initial", "residual")}}
    logged |= {"start_residual": losses.first, "end_residual": losses.last, "truth_residual": target.residual}
    return {name: value.detach().median() for name, value in logged.items()}


class Learner:
    """Improves a solver step by step.

    Args:
        solver: To be improved.
        settings: How.
        record: Whether steps are recorded and replayed; None for wherever that is faster.
        changing: Whether the model's weights change between steps; what follows from them is then computed in each.

    Attributes:
        replayed: Steps that were replays.
        obstacle: Why steps cannot be recorded, if that was found out.
    """

    def __init__(
        self, solver: HyperAnderson, settings: FitSettings, *, record: bool | None = None, changing: bool = False
    ) -> None:
        self.solver, self.settings, self.balance = solver, settings, Balance(settings.losses)
        self.changing = changing
        self.device = next(solver.parameters()).device
        on_cuda = self.device.type == "cuda"
        # A recording reads the rate where it was when it was made.
        rate = torch.tensor(settings.learning_rate, device=self.device) if on_cuda else settings.learning_rate
        self.optimiser = torch.optim.Adam(solver.parameters(), rate, fused=True)  # one that can refuse a step by itself
        self.record = on_cuda if record is None else record
        self.obstacle = "what is evaluated again in the backward pass is not recorded" if settings.checkpoint else None
        self.replayed = 0
        self._seen: Counter[Any] = Counter()
        self._replays: dict[Any, _Replay] = {}

    def step(self, targets: Sequence[Target], share: float, progress: float) -> dict[str, Tensor]:
        """Make a step; returns what to log, scalar tensors that the next step may write over.

        Args:
            targets: The equilibria of a batch, those that are good enough.
            share: Of the fitting that is done, for the learning rate.
            progress: The same, for the weights of losses.
        """
        self._set_rate(self.settings.learning_rate * 0.5 * (1 + math.cos(math.pi * share)))
        replay = self._replay(targets)
        if replay is None:
            return self._step(targets, progress)
        self.replayed += 1
        return replay(targets, self.settings.losses.at(progress))

    def release(self) -> None:
        """Give up recordings, which hold memory of the device."""
        self._replays.clear()

    def state_dict(self) -> dict[str, Any]:
        """What another one needs to go on with the same steps."""
        return {"optimiser": self.optimiser.state_dict(), "sizes": self.balance.sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        rates = [group["lr"] for group in self.optimiser.param_groups]
        self.optimiser.load_state_dict(state["optimiser"])
        for group, rate in zip(self.optimiser.param_groups, rates, strict=True):
            group["lr"] = rate  # set anew at each step, where recordings look for it
        sizes = state["sizes"]
        self.balance.sizes = None if sizes is None else [size.to(self.device) for size in sizes]

    def _set_rate(self, rate: float) -> None:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _step(self, targets: Sequence[Target], progress: float) -> dict[str, Tensor]:
        self.optimiser.zero_grad(set_to_none=True)
        record = gradients(self.solver, targets, self.settings, self.balance, progress=progress)
        return {**record, "skipped": _apply_or_refuse(self.optimiser, record["gradient"])}

    def _replay(self, targets: Sequence[Target]) -> "_Replay | None":
        """What replays a step on these, once the shape has come often enough."""
        key = _key(targets) if self.record and self.obstacle is None else None
        if key is None or key in self._replays:
            return self._replays.get(key)
        self._seen[key] += 1
        # Losses are divided by what they were at first; a recording would keep dividing by what is not finite.
        if self._seen[key] <= REHEARSED or not self.balance.settled:
            return None
        state = [*self.solver.parameters(), *_tensors_of(self.optimiser)]
        before = [tensor.detach().clone() for tensor in state]
        try:
            self._replays[key] = _Replay(self, targets)
        except RuntimeError as error:  # something in f may be what a graph cannot hold
            self.obstacle = str(error).partition("\n")[0]
        with torch.no_grad():  # rehearsals were steps
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
        return self._replays.get(key)


def apply_if_finite(optimiser: torch.optim.Optimizer, size: Tensor) -> Tensor:
    """Make the optimiser's step unless the gradient is not finite; returns 1 if it was left out, else 0."""
    finite = bool(torch.isfinite(size))
    if finite:
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)  # else those who clip the gradients of the whole model would meet these
    return torch.tensor(float(not finite))


def _apply_or_refuse(optimiser: torch.optim.Optimizer, size: Tensor) -> Tensor:
    """The same with a fused optimiser, without a look at any number."""
    refused = (~size.isfinite()).float()
    optimiser.found_inf = refused  # type: ignore[attr-defined]
    optimiser.step()
    optimiser.found_inf = None  # type: ignore[attr-defined]
    optimiser.zero_grad(set_to_none=True)
    return refused


class _Replay:
    """Steps on targets of one shape: the first is recorded, on buffers of its own.

    Args:
        learner: Whose steps they are; all its tensors exist already.
        targets: Of this shape.
    """

    def __init__(self, learner: Learner, targets: Sequence[Target]) -> None:
        self.learner = learner
        self.targets = [_copied(target) for target in targets]
        self.places = _tensors(self.targets)
        self.weights = torch.ones(3, device=learner.device)
        self.aliases = Aliases(learner.solver, grad=True)
        self.record: dict[str, Tensor] = {}
        tape, groups = tape_for(learner.device), learner.optimiser.param_groups
        tape.rehearse(self._run)
        gc.collect()  # graphs of rehearsals would tie the gradients of aliases to another stream
        try:
            for group in groups:
                group["capturable"] = learner.device.type == "cuda"
            with recording_now, tape.together():
                self.replay = tape.record(self._run)
        finally:
            for group in groups:
                group["capturable"] = False

    def _run(self) -> None:
        """One step, on leaves of its own."""
        learner, parameters = self.learner, list(self.learner.solver.parameters())
        if learner.changing:
            for target in self.targets:
                target.problem.scope._derived.clear()
        with self.aliases:
            record = gradients(learner.solver, self.targets, learner.settings, learner.balance, self.weights.unbind())
        for parameter, alias in zip(parameters, self.aliases.of(parameters), strict=True):
            parameter.grad, alias.grad = alias.grad, None
        self.record = {**record, "skipped": _apply_or_refuse(learner.optimiser, record["gradient"])}

    def __call__(self, targets: Sequence[Target], weights: Sequence[float]) -> dict[str, Tensor]:
        copy_all(self.places, _tensors(targets))
        for place, weight in zip(self.weights.unbind(), weights, strict=True):
            place.fill_(weight)
        self.replay()
        return self.record


def _copied(target: Target) -> Target:
    """The same target on tensors of its own."""
    start, root = ([leaf.clone() for leaf in part] for part in (target.start, target.root))
    copied = dataclasses.replace(target, start=start, root=root, residual=target.residual.clone())
    return rebuilt(copied, constant_scope(), _clone)


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _tensors(targets: Iterable[Target]) -> list[Tensor]:
    found: list[Tensor] = []
    for target in targets:
        found += tree_tensors((target.problem.inputs, target.problem.context, _drawn(target)))
        found += [*target.start, *target.root, target.residual]
    return found


def _drawn(target: Target) -> list[Any]:
    """What was drawn for this solve and what follows from it, by module; nothing without draws: all have it then."""
    scope = target.problem.scope
    held = {**scope._drawn, **scope._derived} if scope._drawn else {}
    return [held[module] for module in target.deq.cell.modules() if module in held]


def _tensors_of(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimiser.state.values() for value in state.values() if isinstance(value, Tensor)]


def _key(targets: Sequence[Target]) -> Any:
    """What targets of one recording have in common; None where they cannot be copied into those of another."""
    key: list[Any] = []
    for target in targets:
        problem = target.problem
        leaves, structure = tree_flatten((problem.inputs, problem.context))
        plain = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
        if problem.num_systems != problem.spec.num_systems or any(type(leaf) not in PLAIN_VALUES for leaf in plain):
            return None
        key += [id(target.deq), problem.spec, str(structure), plain]
    return (*key, *((tensor.shape, tensor.dtype) for tensor in _tensors(targets)))
