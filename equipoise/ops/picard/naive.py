"""One step of plain iteration in PyTorch: what the kernels compute."""

import torch

from equipoise import _leaves
from equipoise._tree import Leaves
from equipoise.ops.standing import KEEP, Rules, Standing, judge
from equipoise.ops.standing import settle as carry_out


def step(z: Leaves, fz: Leaves, standing: Standing, rules: Rules, damping: float) -> None:
    """See `picard_step`; everything is written in place."""
    work = standing.residual.dtype
    fz = [leaf.to(work) for leaf in fz]
    g = _leaves.subtract(fz, [leaf.to(work) for leaf in z])
    actions = judge(_leaves.norm(g), _leaves.norm(fz), standing, rules)
    carry_out(z, fz if damping == 1.0 else _leaves.axpy(fz, damping - 1.0, g), actions, standing)


def follow(z: Leaves, fz: Leaves, before: Leaves, standing: Standing, rules: Rules) -> None:
    """See `picard_follow`."""
    due = (standing.owed == 2)[:, None]
    for best, leaf in zip(standing.best, before, strict=True):
        best.copy_(torch.where(due, leaf, best))
    better = judge(_leaves.norm(_leaves.subtract(fz, z)), _leaves.norm(fz), standing, rules) & KEEP != 0
    standing.owed.copy_(torch.where(better, 1, torch.where(standing.owed == 1, 2, 0)))
    standing.count.add_(1)


def settle(z: Leaves, before: Leaves, standing: Standing) -> None:
    """See `picard_settle`."""
    owed = standing.owed[:, None]
    for best, leaf, old in zip(standing.best, z, before, strict=True):
        best.copy_(torch.where(owed == 1, leaf, torch.where(owed == 2, old, best)))
    standing.owed.zero_()
