"""One step of plain iteration in PyTorch: what the kernels compute."""

from equipoise import _leaves
from equipoise._tree import Leaves
from equipoise.ops.standing import Rules, Standing, judge, settle


def step(z: Leaves, fz: Leaves, standing: Standing, rules: Rules, damping: float) -> None:
    """See `picard_step`; everything is written in place."""
    work = standing.residual.dtype
    fz = [leaf.to(work) for leaf in fz]
    g = _leaves.subtract(fz, [leaf.to(work) for leaf in z])
    actions = judge(_leaves.norm(g), _leaves.norm(fz), standing, rules)
    settle(z, fz if damping == 1.0 else _leaves.axpy(fz, damping - 1.0, g), actions, standing)
