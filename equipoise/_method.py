"""One step of each solver on the buffers of a recording, and several of them in a row."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise._problem import Problem, StateSpec
from equipoise._stop import Stop
from equipoise._tape import copy_all
from equipoise._tree import Leaves
from equipoise.solvers import Anderson, Broyden, HyperAnderson, Picard, Solver
from equipoise.solvers._hyper_step import LearnedMemory, learned_step

if TYPE_CHECKING:
    from equipoise._loop import Buffers
    from equipoise.ops import ChannelsParts, CorrectedParts, HyperParts, LowRankParts

Evaluate = Callable[[Leaves], Leaves]


def step_obstacle(solver: Solver, stop: Stop, spec: StateSpec) -> str | None:
    """Why steps of this solver cannot be recorded, if they cannot."""
    from equipoise.ops import anderson, broyden
    from equipoise.ops._backend import KERNEL_DTYPES, _has_triton

    if type(solver) not in (Anderson, Broyden, HyperAnderson, Picard):
        return f"{type(solver).__name__} has no recorded step"
    if isinstance(solver, Broyden) and solver.line_search:
        return "Broyden's line search reads results on the host"
    if spec.device.type != "cuda":
        return None
    if spec.work_dtype not in KERNEL_DTYPES or not _has_triton():
        return f"there is no kernel for {spec.work_dtype} states, or Triton is not installed"
    most = {Anderson: anderson.MOST_MEMORY, Broyden: broyden.MOST_MEMORY}.get(type(solver))
    slots = getattr(solver, "memory", None) or stop.max_steps
    if most is not None and slots > most:
        return f"the kernel of {type(solver).__name__} holds {most} steps, not {slots}"
    return None


def _stepping(solver: Solver) -> Solver:
    """The solver that makes the steps: where a learned one has learned the start alone, a classic one."""
    from equipoise.ops import anderson

    classic = solver.classic if isinstance(solver, HyperAnderson) else None
    fits = getattr(classic, "memory", 0) <= anderson.MOST_MEMORY
    return classic if classic is not None and fits else solver


def _is_fused(solver: HyperAnderson, stop: Stop, spec: StateSpec) -> bool:
    """Whether a learned solver has a fused step here; without kernels there is nothing to gain by it."""
    from equipoise.ops import channels, corrected, hyper, low_rank
    from equipoise.ops._backend import KERNEL_DTYPES

    known = all(parameter.dtype in KERNEL_DTYPES for parameter in solver.parameters())
    served = [hyper, low_rank, corrected, *([channels] if stop.fixed_budget else [])]
    return spec.device.type == "cuda" and known and any(one.supports(solver.config, spec) for one in served)


def _parts_of(solver: HyperAnderson, spec: StateSpec) -> "ChannelsParts | CorrectedParts | HyperParts | LowRankParts":
    """What the fused step of a learned solver needs of it."""
    from equipoise.ops import ChannelsParts, CorrectedParts, HyperParts, LowRankParts

    if solver.config.solves:
        return CorrectedParts.of(solver, spec)
    if solver.config.rank == 0:
        return HyperParts.of(solver, spec)
    return ChannelsParts.of(solver, spec) if solver.config.kind == "images" else LowRankParts.of(solver, spec)


@dataclass(frozen=True)
class Method:
    """How a loop steps and when its systems end.

    Attributes:
        solver: Of a kind that has a recorded step.
        stop: When systems end.
        floor: The relative residual at which rounding in f decides.
        problem: What is solved, its inputs in buffers of the recording; only a learned solver looks at it.
        image_dtype: What all images are in, if that is half precision: they are remembered in it, and nothing is lost.
        half: Whether f multiplies in half precision: residuals are no better than that, and may be remembered in it.
        stepping: The solver, or the classic one that makes its steps.
        parts: Of a learned solver, where it has a fused step.
    """

    solver: Solver
    stop: Stop
    floor: float
    problem: Problem | None = None
    image_dtype: torch.dtype | None = None
    half: bool = False
    stepping: Solver = field(init=False)
    parts: "ChannelsParts | CorrectedParts | HyperParts | LowRankParts | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stepping", _stepping(self.solver))
        solver, problem = self.stepping, self.problem
        if isinstance(solver, HyperAnderson) and problem is not None and _is_fused(solver, self.stop, problem.spec):
            object.__setattr__(self, "parts", _parts_of(solver, problem.spec))

    @property
    def takes_half(self) -> bool:
        """Whether images may come in half precision, whatever the dtype of the state."""
        return (self.parts is not None or not isinstance(self.stepping, HyperAnderson)) and not self.follows

    @property
    def follows(self) -> bool:
        """Whether the next iterates are the images, whatever is found about them: then nothing needs to be moved."""
        return isinstance(self.stepping, Picard) and self.stepping.damping == 1.0 and self.stop.fixed_budget

    def memory(self, z: Leaves) -> Any:
        """What the solver remembers of states like z; None for nothing."""
        from equipoise.ops import (
            AndersonMemory,
            BroydenMemory,
            CorrectedMemory,
            CorrectedParts,
            HyperMemory,
            HyperParts,
            LowRankMemory,
            LowRankParts,
        )

        # Rounding is relative to a residual, whatever its size, and bfloat16 has room for all of them.
        narrow = torch.bfloat16 if self.half and z[0].dtype == torch.float32 else None
        if isinstance(self.parts, CorrectedParts):
            return CorrectedMemory.of(z, self.parts, narrow)
        if isinstance(self.stepping, Anderson):
            return AndersonMemory.empty(z, self.stepping.memory, self.image_dtype, narrow)
        if isinstance(self.stepping, Broyden):
            return BroydenMemory.empty(z, self.stepping.memory or self.stop.max_steps)
        if isinstance(self.parts, LowRankParts):
            return LowRankMemory.empty(z, self.parts)
        if isinstance(self.parts, HyperParts):
            # Rounding is relative to a residual: half the bytes, the same equilibrium. Free weights do not end there.
            whole = z[0].dtype != torch.float32 or self.parts.weights == "free"
            return HyperMemory.empty(z, self.parts, None if whole else torch.bfloat16, self.image_dtype)
        if isinstance(self.stepping, HyperAnderson) and self.parts is None:
            assert self.problem is not None
            return LearnedMemory(self.stepping, self.problem.spec, z)
        return None

    def begin(self, buffers: "Buffers") -> None:
        """Begin a solve from z, or from what is learned to be a better start."""
        if isinstance(self.solver, HyperAnderson):
            assert self.problem is not None
            start = self.solver.guess(self.problem, buffers.z)
        else:
            start = buffers.z
        if self.parts is not None:
            self.parts.refresh()
        buffers.restart()  # the best so far is what was given: a learned start need not be finite
        if start is not buffers.z:
            copy_all(buffers.z, start)

    def step(self, buffers: "Buffers", fz: Leaves, z: Leaves | None = None, out: Leaves | None = None) -> None:
        """One step given f(z), in place; Anderson's and a fused one may be from elsewhere to elsewhere."""
        from equipoise.ops import (
            CorrectedParts,
            HyperParts,
            LowRankParts,
            anderson_step,
            broyden_step,
            corrected_step,
            hyper_step,
            low_rank_step,
            picard_step,
        )

        z, standing, memory, solver = z or buffers.z, buffers.standing, buffers.memory, self.stepping
        rules: dict[str, Any] = {"stop": self.stop, "floor": self.floor}
        if isinstance(solver, Anderson):
            settings: dict[str, Any] = {"ridge": solver.ridge, "mixing": solver.mixing, "bound": solver.bound}
            anderson_step(z, fz, memory, standing, **rules, **settings, out=out)
        elif isinstance(solver, Broyden):
            broyden_step(z, fz, memory, standing, **rules, step=solver.step)
        elif isinstance(self.parts, CorrectedParts):
            corrected_step(z, fz, memory, standing, self.parts, **rules, out=out)
        elif isinstance(self.parts, LowRankParts):
            low_rank_step(z, fz, memory, standing, self.parts, **rules, out=out)
        elif isinstance(self.parts, HyperParts):
            hyper_step(z, fz, memory, standing, self.parts, **rules, out=out)
        elif isinstance(solver, HyperAnderson):
            learned_step(z, fz, memory, standing, **rules)
        else:
            assert isinstance(solver, Picard)
            picard_step(z, fz, standing, **rules, damping=solver.damping)

    def run(
        self, buffers: "Buffers", evaluate: Evaluate, steps: int, ends: bool, trail: list[Leaves] | None = None
    ) -> None:
        """So many steps from z, the last of the solve or not.

        With a trail the iterates need not be brought to z between two runs: the first leaves them there for the second.
        """
        apart = isinstance(self.stepping, Anderson) or self.parts is not None
        if self.follows or (apart and self.stop.fixed_budget):
            self._run_apart(buffers, evaluate, steps, ends, trail)
            return
        for _ in range(steps):
            self.step(buffers, _apart(evaluate(buffers.z), buffers.z))

    def _run_apart(
        self, buffers: "Buffers", evaluate: Evaluate, steps: int, ends: bool, trail: list[Leaves] | None
    ) -> None:
        """As `run` where nothing ends: iterates are not written over at once, so that few best ones must be copied."""
        from equipoise.ops import ChannelsParts, channels_follow, picard_follow, picard_settle

        rules: dict[str, Any] = {"stop": self.stop, "floor": self.floor}
        z = before = older = buffers.z
        spare: Leaves = []
        if trail:
            z, before, older, spare = trail
        elif not (self.follows or isinstance(self.parts, ChannelsParts)):
            spare = [torch.empty_like(leaf) for leaf in z]
        for _ in range(steps):
            image = _apart(evaluate(z), [*z, *buffers.z, *spare])
            if self.follows:
                picard_follow(z, image, older, buffers.standing, **rules)
                z, before, older = image, z, before
            elif isinstance(self.parts, ChannelsParts):
                following = channels_follow(z, image, older, buffers.standing, self.parts, **rules)
                z, before, older = following, z, before
            else:
                self.step(buffers, image, z, spare)
                z, before, spare = spare, z, z
        if trail is not None and not ends:
            trail[:] = z, before, older, spare
            return
        picard_settle(before, older, buffers.standing)
        if z is not buffers.z and (not ends or self.stop.select == "last"):
            copy_all(buffers.z, z)


def _apart(image: Leaves, z: Leaves) -> Leaves:
    """f(z) as contiguous tensors apart from z: f may return its argument, in part or in another order."""
    own = {_address(leaf) for leaf in z}
    return [leaf.clone() if _address(leaf) in own else leaf.contiguous() for leaf in image]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
