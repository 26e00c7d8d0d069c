"""Steps of any learned solver as they are recorded: on storage that stays where it is, with the stopping rules.

A recorded step belongs to places in the rings of past states, and Python decides which: recordings of steps are told
apart by `phase`. In return a step looks at what is remembered and no more, and rings need not be wiped for a new solve.
"""

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._history import History
from equipoise._problem import StateSpec
from equipoise._stop import Stop
from equipoise._tape import copy_all
from equipoise._tree import Leaves
from equipoise.solvers.hyper_anderson import HyperAnderson, HyperState

if TYPE_CHECKING:
    from equipoise.ops.standing import Standing


class LearnedMemory:
    """What a learned solver remembers in solves for states of one form.

    Args:
        solver: Whose memory it is.
        spec: Structure of the states.
        z: A state.
    """

    def __init__(self, solver: HyperAnderson, spec: StateSpec, z: Leaves) -> None:
        solver.check_state(spec)
        self.solver, self.spec = solver, spec
        self._kept = solver.empty_state(z)
        for history in self._histories:  # whose storage is made with the first state
            history.push(solver.rows(z))
        self._state: HyperState | None = None

    @property
    def nbytes(self) -> int:
        """Storage held."""
        return self._kept.nbytes

    @property
    def _histories(self) -> list[History]:
        return [history for history in (self._kept.images, self._kept.residuals) if history is not None]

    def begin(self) -> None:
        """Begin a solve."""
        if self._kept.gram is not None:
            self._kept.gram.zero_()

    @property
    def rehearsal(self) -> int:
        """Steps after which there has been each kind of step."""
        return 2 * self.solver.config.memory

    def phase(self, count: int) -> int:
        """The least number of steps after which the next ones are those after `count` steps."""
        memory = self.solver.config.memory
        return count if count < memory else memory + count % memory

    def resume(self, phase: int) -> None:
        """Take up what is remembered after a number of steps that has this phase."""
        self._state = dataclasses.replace(self._kept, count=phase)
        for history in self._histories:
            history.count = phase

    def advance(self, z: Leaves, fz: Leaves, g: Leaves | None = None) -> Leaves:
        """The next iterate, see `HyperAnderson.advance`; the pair is remembered."""
        assert self._state is not None
        proposal, self._state = self.solver.advance(self.spec, z, fz, self._state, g)
        return proposal

    def pause(self, ends: bool) -> None:
        """Put what is remembered where `resume` finds it, unless the solve ends."""
        assert self._state is not None
        if not ends:
            copy_all(_carried(self._kept), _carried(self._state))
        self._state = None  # it refers to tensors of the piece, whose memory others may get


def _carried(state: HyperState) -> list[Tensor]:
    """What a step takes from the one before, besides histories."""
    return [state.series] if state.gram is None else [state.series, state.gram]


@torch.no_grad()
def learned_step(
    z: Leaves,
    fz: Leaves,
    memory: LearnedMemory,
    standing: "Standing",
    *,
    stop: Stop,
    floor: float = 0.0,
    backend: str = "auto",
) -> None:
    """Measure the iterates z with images f(z), and replace them by the learned solver's proposals. All in place.

    The rules are those of the driver: a system that has ended is not moved any more. On a device nothing is read on the
    host.

    Args:
        z: Iterates, leaf by leaf (N, D_i); replaced.
        fz: Their images, in the same dtype.
        memory: Of the solver, resumed.
        standing: Progress, from `Standing.start`.
        stop: When systems end. `check_every` and `max_steps` are the caller's business.
        floor: The relative residual at which rounding in f decides (`equipoise._stop.precision_floor`).
        backend: Of the rules: "auto", "naive" or "triton".
    """
    from equipoise.ops._backend import use_kernel
    from equipoise.ops.standing import Rules, judge, settle

    rules = Rules.of(stop, floor, sum(leaf.shape[1] for leaf in z), standing.residual.dtype)
    if use_kernel("learned_step", backend, (*z, *fz, *standing.best)):
        from equipoise.ops.picard import triton  # the rules are those of plain iteration, and so are the kernels

        actions = triton.measure(z, fz, standing, rules)
        triton.move(z, [leaf.contiguous() for leaf in memory.advance(z, fz)], actions, standing)
        return
    g = _leaves.subtract(fz, z)
    actions = judge(_leaves.norm(g), _leaves.norm(fz), standing, rules)
    settle(z, memory.advance(z, fz, g), actions, standing)
