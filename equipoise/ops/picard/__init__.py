"""One step of plain iteration, with the stopping rules and the best iterate."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from equipoise._errors import require_number
from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.ops._backend import use_kernel
from equipoise.ops.picard import naive
from equipoise.ops.standing import Rules, Standing


@torch.no_grad()
def picard_step(
    z: Leaves,
    fz: Sequence[Tensor],
    standing: Standing,
    *,
    stop: Stop,
    floor: float = 0.0,
    damping: float = 1.0,
    backend: str = "auto",
) -> None:
    """Measure the iterates z with images f(z), and replace them by (1 − damping)·z + damping·f(z). All in place.

    The formula is that of `equipoise.Picard`, the rules are those of the driver; see `anderson_step` for what the steps
    promise. Bytes moved per unknown, with dtypes of sizes z and f: z + f read twice, z written, and z written once more
    where the iterate is the best so far; in float32 20 to 24.

    Args:
        z: Iterates, leaf by leaf (N, D_i); replaced.
        fz: Their images, same shapes; a narrower dtype is welcome.
        standing: Progress, from `Standing.start`.
        stop: When systems end. `check_every` and `max_steps` are the caller's business.
        floor: The relative residual at which rounding in f decides (`equipoise._stop.precision_floor`).
        damping: As in `equipoise.Picard`.
        backend: "auto", "naive" or "triton".
    """
    require_number("picard_step", "damping", damping, low=0.0, high=2.0, open_low=True)
    rules = Rules.of(stop, floor, sum(leaf.shape[1] for leaf in z), standing.residual.dtype)
    implementation: ModuleType = naive
    if use_kernel("picard_step", backend, (*z, *fz, *standing.best)):
        from equipoise.ops.picard import triton

        implementation = triton
    implementation.step(z, list(fz), standing, rules, float(damping))
