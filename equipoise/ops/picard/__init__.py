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
    implementation = _implementation("picard_step", backend, (*z, *fz, *standing.best))
    implementation.step(z, list(fz), standing, rules, float(damping))


@torch.no_grad()
def picard_follow(
    z: Leaves, fz: Leaves, before: Leaves, standing: Standing, *, stop: Stop, floor: float = 0.0, backend: str = "auto"
) -> None:
    """Measure the iterates z with images f(z), which are the next iterates as they are: undamped, of a fixed budget.

    Nothing is moved, and a best iterate is copied when the next one turns out to be no better, one step later. So what
    is passed must stay as it is for two more steps, and `picard_settle` must come after the last one. Bytes moved per
    unknown: z and f(z) read; in float32 8, beside 20 to 24 of `picard_step`.

    Args:
        z: Iterates, leaf by leaf (N, D_i).
        fz: Their images, in the same dtype.
        before: What z was two steps ago; in the first two steps anything of its shape.
        standing: Progress, from `Standing.start`.
        stop: Of a fixed budget.
        floor: As in `picard_step`.
        backend: "auto", "naive" or "triton".
    """
    if not stop.fixed_budget:
        raise ValueError(f"picard_follow: systems that end do not follow f; expected a fixed budget, got {stop!r}.")
    rules = Rules.of(stop, floor, sum(leaf.shape[1] for leaf in z), standing.residual.dtype)
    implementation = _implementation("picard_follow", backend, (*z, *fz, *before, *standing.best))
    implementation.follow(z, fz, before, standing, rules)


@torch.no_grad()
def picard_settle(z: Leaves, before: Leaves, standing: Standing, *, backend: str = "auto") -> None:
    """Copy the best iterates that `picard_follow` has not.

    Args:
        z: The iterates measured last, leaf by leaf (N, D_i).
        before: Those measured before them; if there are none, anything of that shape.
        standing: Progress.
        backend: "auto", "naive" or "triton".
    """
    _implementation("picard_settle", backend, (*z, *before, *standing.best)).settle(z, before, standing)


def _implementation(operation: str, backend: str, tensors: Sequence[Tensor]) -> ModuleType:
    if not use_kernel(operation, backend, tensors):
        return naive
    from equipoise.ops.picard import triton

    return triton
