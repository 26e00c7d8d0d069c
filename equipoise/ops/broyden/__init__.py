"""One step of Broyden's method, with the stopping rules and the best iterate, and its operator on its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from equipoise._errors import require_count, require_number
from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.ops._backend import use_kernel
from equipoise.ops.broyden import naive
from equipoise.ops.standing import Rules, Standing

# The small matrix is held in registers.
MOST_MEMORY = 127


@dataclass
class BroydenMemory:
    """The storage of a solve: H = −(I + Sᵀ M S), where the rows of S are the steps taken.

    Attributes:
        steps: S per leaf, (N, m, D_i); any strides as long as the last axis is contiguous.
        small: M, (N, m + 1, m + 1) float32 (float64 for such states); the row after the newest slot awaits the next
            step.
        point: The iterates before, per leaf (N, D_i).
    """

    steps: Leaves
    small: Tensor
    point: Leaves

    @classmethod
    def empty(cls, z: Leaves, memory: int) -> "BroydenMemory":
        """Storage for states like z and so many steps; when they are used up the method starts anew.

        Args:
            z: A state.
            memory: Steps kept, m; as many as the solve may take if it is never to restart.
        """
        require_count("BroydenMemory", "memory", memory)
        n, wide = z[0].shape[0], z[0].dtype == torch.float64
        return cls(
            # Slot-major: a slot is one contiguous piece, as in `equipoise._history`.
            steps=[leaf.new_empty((memory, *leaf.shape)).transpose(0, 1) for leaf in z],
            small=z[0].new_zeros((n, memory + 1, memory + 1), dtype=torch.float64 if wide else torch.float32),
            point=[torch.empty_like(leaf) for leaf in z],
        )


@torch.no_grad()
def broyden_step(
    z: Leaves,
    fz: Sequence[Tensor],
    memory: BroydenMemory,
    standing: Standing,
    *,
    stop: Stop,
    floor: float = 0.0,
    step: float = 1.0,
    backend: str = "auto",
) -> None:
    """Measure the iterates z with images f(z), and replace them by Broyden's proposals. All in place.

    The formula is that of `equipoise.Broyden` without line search, the rules are those of the driver; see
    `anderson_step` for what both steps promise.

    Bytes moved per unknown, at the k-th step since the start and with dtypes of sizes z and f: first pass
    2·z + f + (k − 1)·z read, z written; second pass z + f + k·z read, 2·z written, and z once more where the iterate is
    the best so far. At k = 10 and float32 104 bytes.

    Args:
        z: Iterates, leaf by leaf (N, D_i); replaced.
        fz: Their images, same shapes; a narrower dtype is welcome.
        memory: Storage, from `BroydenMemory.empty`.
        standing: Progress, from `Standing.start`.
        stop: When systems end. `check_every` and `max_steps` are the caller's business.
        floor: The relative residual at which rounding in f decides (`equipoise._stop.precision_floor`).
        step: Share of the quasi-Newton step to take.
        backend: "auto", "naive" or "triton".
    """
    require_number("broyden_step", "step", step, low=0.0, high=2.0, open_low=True)
    tensors = (*z, *fz, *memory.steps, *memory.point, *standing.best)
    rules = Rules.of(stop, floor, sum(leaf.shape[1] for leaf in z), standing.residual.dtype)
    implementation: ModuleType = naive
    if _use_kernel("broyden_step", backend, tensors, memory.small):
        from equipoise.ops.broyden import triton

        implementation = triton
    implementation.step(z, list(fz), memory.steps, memory.small, memory.point, standing, rules, float(step))


@torch.no_grad()
def low_rank_apply(
    x: Leaves,
    steps: Leaves,
    small: Tensor,
    filled: Tensor | int,
    *,
    transposed: bool = False,
    backend: str = "auto",
) -> Leaves:
    """H x or Hᵀx for Broyden's H = −(I + Sᵀ M S), as far as its updates are complete.

    Bytes moved per unknown with k slots in use: twice k slots and twice x read, x written.

    Args:
        x: Leaf by leaf (N, D_i).
        steps: S per leaf, (N, m, D_i).
        small: M, (N, at least k, at least k), contiguous.
        filled: Slots in use, k; a () int32 tensor on the device is not read on the host.
        transposed: Apply Hᵀ.
        backend: "auto", "naive" or "triton".
    """
    if not isinstance(filled, Tensor):
        filled = torch.full((), filled, dtype=torch.int32, device=small.device)
    implementation: ModuleType = naive
    if _use_kernel("low_rank_apply", backend, (*x, *steps), small):
        from equipoise.ops.broyden import triton

        implementation = triton
    applied: Leaves = implementation.apply(x, steps, small, filled, transposed)
    return applied


def _use_kernel(operation: str, backend: str, tensors: Sequence[Tensor], small: Tensor) -> bool:
    kernel = use_kernel(operation, backend, tensors)
    slots = small.shape[1] - 1
    if kernel and slots > MOST_MEMORY:
        if backend == "triton":
            raise ValueError(f"{operation}: the kernel takes a memory of at most {MOST_MEMORY}, got {slots}.")
        return False
    return kernel
