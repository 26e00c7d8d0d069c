"""One step of Anderson acceleration, with the stopping rules and the best iterate, in two kernel launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from equipoise._errors import require_count, require_number
from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.ops._backend import use_kernel
from equipoise.ops.anderson import naive
from equipoise.ops.standing import Rules, Standing, require_fixed_budget

# The small solve holds its matrix in registers.
MOST_MEMORY = 16


@dataclass
class AndersonMemory:
    """The storage of a solve: rings of past images and residuals, their Gram matrix, the weights used last.

    Attributes:
        images: Per leaf, (N, m, D_i); any strides as long as the last axis is contiguous.
        residuals: Per leaf, (N, m, D_i).
        gram: (N, m, m) float64, by slot, its diagonal raised by the ridge.
        weights: (N, m) float32 (float64 for such states), by slot.
    """

    images: Leaves
    residuals: Leaves
    gram: Tensor
    weights: Tensor

    @classmethod
    def empty(
        cls,
        z: Leaves,
        memory: int,
        image_dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
    ) -> "AndersonMemory":
        """Storage for states like z.

        Args:
            z: A state.
            memory: Iterates combined, m.
            image_dtype: Of the ring of images; the state's if None. Nothing is lost in the dtype that f returns.
            residual_dtype: Of the ring of residuals; the state's if None.
        """
        require_count("AndersonMemory", "memory", memory)
        n, wide = z[0].shape[0], z[0].dtype == torch.float64

        def ring(dtype: torch.dtype | None) -> Leaves:
            # Slot-major: a slot is one contiguous piece, as in `equipoise._history`.
            return [leaf.new_empty((memory, *leaf.shape), dtype=dtype).transpose(0, 1) for leaf in z]

        return cls(
            images=ring(image_dtype),
            residuals=ring(residual_dtype),
            gram=z[0].new_zeros((n, memory, memory), dtype=torch.float64),
            weights=z[0].new_zeros((n, memory), dtype=torch.float64 if wide else torch.float32),
        )


@torch.no_grad()
def anderson_step(
    z: Leaves,
    fz: Sequence[Tensor],
    memory: AndersonMemory,
    standing: Standing,
    *,
    stop: Stop,
    floor: float = 0.0,
    ridge: float = 1e-8,
    mixing: float = 1.0,
    bound: float | None = None,
    out: Leaves | None = None,
    images: Leaves | None = None,
    backend: str = "auto",
) -> None:
    """Measure the iterates z with images f(z), and replace them by Anderson's proposals. All in place.

    The formula is that of `equipoise.Anderson`, the rules are those of the driver: a system that has ended is not
    touched any more, neither its iterate nor its memory. Nothing is read on the host and the slot follows from
    `standing.count`, so a recorded step can be replayed. Sums are made in a fixed order: results do not vary.

    Bytes moved per unknown, with m slots in use and dtypes of sizes z, f (fz), F (images) and G (residuals): first pass
    z + f + (m − 1)·G read, F + G written; second pass m·F read (and m·G unless mixing is 1), z written, and z read and
    written once more where the iterate is the best so far. For m = 6 and float32 throughout 72 bytes, with bfloat16
    for f and its ring 56, for both rings 44.

    Args:
        z: Iterates, leaf by leaf (N, D_i); replaced.
        fz: Their images, same shapes; a narrower dtype is welcome.
        memory: Storage, from `AndersonMemory.empty`.
        standing: Progress, from `Standing.start`.
        stop: When systems end. `check_every` and `max_steps` are the caller's business.
        floor: The relative residual at which rounding in f decides (`equipoise._stop.precision_floor`).
        ridge: As in `equipoise.Anderson`; at least the machine epsilon is used.
        mixing: As in `equipoise.Anderson`.
        bound: As in `equipoise.Anderson`.
        out: With a fixed budget, where to write the proposals instead: over the iterates before z, in the first step
            over anything. Then a best iterate is copied only when the next one turns out to be no better, which saves
            8 bytes per unknown; `picard_settle` must come after the last step.
        images: What is remembered and combined in place of f(z), e.g. what a learned map makes of it; residuals, and
            so the weights, stay those of f.
        backend: "auto", "naive" or "triton".
    """
    require_number("anderson_step", "mixing", mixing, low=0.0, high=2.0, open_low=True)
    require_number("anderson_step", "ridge", ridge, low=0.0)
    require_fixed_budget("anderson_step", out, stop)
    slots = memory.gram.shape[1]
    work = standing.residual.dtype
    ridge = max(ridge, torch.finfo(work).eps)
    rules = Rules.of(stop, floor, sum(leaf.shape[1] for leaf in z), work)
    rings = (*memory.images, *memory.residuals)
    kernel = use_kernel("anderson_step", backend, (*z, *fz, *rings, *standing.best, *(out or ()), *(images or ())))
    if kernel and slots > MOST_MEMORY:
        if backend == "triton":
            raise ValueError(f"anderson_step: the kernel takes a memory of at most {MOST_MEMORY}, got {slots}.")
        kernel = False
    implementation: ModuleType = naive
    if kernel:
        from equipoise.ops.anderson import triton

        implementation = triton
    implementation.step(
        z,
        list(fz),
        memory.images,
        memory.residuals,
        memory.gram,
        memory.weights,
        standing,
        rules,
        ridge,
        mixing,
        bound,
        out,
        images,
    )
