"""Equilibria that are found once and learned from again and again."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from equipoise._module import own_buffers, own_parameters
from equipoise._scope import SolveScope
from equipoise._tree import tree_map
from equipoise.tasks._hyper_losses import FitSettings, NoEquilibriaError, Target, find_targets
from equipoise.tasks.base import Forward


class Pool:
    """The equilibria of some batches, kept where the model is; any number of fits of that model may share them.

    Args:
        model: A DEQ, or a module that contains some.
        batches: Inputs, as many batches as are to be kept.
        settings: How equilibria are found, and which are good enough.
        forward: How to run the model on a batch; by default it is called with it.
        seconds: Find no more of them after so many; those of one batch are found in any case.
        until: Asked after each batch; find no more of them once it says yes.

    Attributes:
        seconds: Time that finding them took.
        accepted: Share of the systems whose equilibrium was found.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        settings: FitSettings,
        forward: Forward | None = None,
        seconds: float | None = None,
        until: Callable[[], bool] | None = None,
    ) -> None:
        self.found_by = found_by(settings)
        started, carry, shares = time.perf_counter(), None, []
        scope = constant_scope()
        self._batches: list[list[Target]] = []
        for batch in batches:
            targets, carry = find_targets(model, batch, settings, forward, carry)
            usable = [target.usable(settings.accept) for target in targets]
            shares += [0.0 if target is None else target.accepted for target in usable]
            if any(usable):
                self._batches.append([rebuilt(target, scope) for target in usable if target is not None])
                if time.perf_counter() - started >= (seconds or math.inf):
                    break
            if until is not None and until():
                break
        if not self._batches:
            raise NoEquilibriaError(model, settings, solved=bool(shares))
        self._weights = _versions(model)
        self.seconds, self.accepted = time.perf_counter() - started, sum(shares) / len(shares)

    def __len__(self) -> int:
        return len(self._batches)

    def at(self, step: int) -> list[Target]:
        """What is learned from at a step."""
        return self._batches[step % len(self._batches)]

    def serves(self, settings: FitSettings) -> bool:
        """Whether a fit with these settings would look for the same equilibria."""
        return self.found_by == found_by(settings)

    def is_of(self, model: nn.Module) -> bool:
        """Whether these are equilibria of this model with the weights it has now."""
        return self._weights == _versions(model)


def _versions(model: nn.Module) -> list[tuple[int, int, int]]:
    """Which parameters and buffers there are, and how often each was written to; learned solvers are no part of it."""
    found = {}
    for tensor in (*own_parameters(model), *own_buffers(model)):
        version = 0 if tensor.is_inference() else tensor._version
        found[id(tensor)] = (id(tensor), tensor.data_ptr(), version)
    return list(found.values())


def found_by(settings: FitSettings) -> tuple[Any, ...]:
    """What equilibria depend on."""
    return settings.solver, settings.stop, settings.accept, settings.pool, settings.training


def constant_scope() -> SolveScope:
    """A scope for solves between which no weight changes: what is computed from weights is computed once."""
    with torch.no_grad():
        return SolveScope()


def rebuilt(target: Target, scope: SolveScope, own: Callable[[Any], Any] = lambda leaf: leaf) -> Target:
    """The same target, its problem holding only what f needs.

    Args:
        target: To be built again.
        scope: Has the constants of its solves, unless some were drawn for this one.
        own: Maps the leaves of inputs, context and draws to those it is to have.
    """
    problem = target.problem
    if problem.num_systems != problem.spec.num_systems:  # some systems of a whole that cannot be taken apart
        return target
    inputs, context = tree_map(own, (problem.inputs, problem.context))
    if problem.scope._drawn:  # and what follows from parameters may also follow from draws
        drawn, derived = (
            {module: tree_map(own, value) for module, value in values.items()}
            for values in (problem.scope._drawn, problem.scope._derived)
        )
        scope = problem.scope._copy(drawn, derived)
    with scope, torch.no_grad():
        made = target.deq.problem(*inputs, z0=problem.spec.unflatten(target.start), context=context)
    made.autocast = problem.autocast
    return dataclasses.replace(target, problem=made)
