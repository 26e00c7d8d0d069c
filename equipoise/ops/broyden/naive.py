"""Broyden's method in plain PyTorch: what the kernels compute. docs/maths/broyden.md has the derivation."""

import math

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._tree import Leaves
from equipoise.ops.standing import Rules, Standing, judge, settle


def step(
    z: Leaves,
    fz: Leaves,
    steps: Leaves,
    small: Tensor,
    point: Leaves,
    standing: Standing,
    rules: Rules,
    share: float,
) -> None:
    """See `broyden_step`; everything is written in place."""
    work = standing.residual.dtype
    fz = [leaf.to(work) for leaf in fz]
    wide = [leaf.to(work) for leaf in z]
    g = _leaves.subtract(fz, wide)
    running = torch.ones_like(standing.status, dtype=torch.bool) if rules.fixed else standing.status < 0
    rows = running.nonzero()[:, 0]
    k = int(standing.count) % small.shape[1] - 1  # the slot of the newest step; −1 at the start and after a restart
    actions = judge(_leaves.norm(g), _leaves.norm(fz), standing, rules)
    for slots, leaf, before in zip(steps, wide, point, strict=True):
        if k >= 0:
            slots[rows, k] = (leaf - before)[rows].to(slots.dtype)
        before[rows] = leaf[rows].to(before.dtype)
    if k < 0:
        small[rows] = 0
        settle(z, _leaves.axpy(wide, share, g), actions, standing)
        return
    stored = [slots[:, : k + 1].to(work) for slots in steps]
    along, weights = _update(stored, g, small, rows, k, share)
    proposal = []
    for leaf, residual, slots in zip(wide, g, stored, strict=True):
        proposal.append(leaf + share * (along[:, None] * residual + torch.einsum("nk,nkd->nd", weights, slots)))
    settle(z, proposal, actions, standing)


def _update(steps: Leaves, g: Leaves, small: Tensor, rows: Tensor, k: int, share: float) -> tuple[Tensor, Tensor]:
    """Take in the step in slot k that led to residual g; −H g is then along·g + Sᵀ·weights."""
    if k > 0:  # the update before is complete now: where steps are not full ones it has a row at its own slot too
        small[rows, k - 1] += (share - 1) * small[rows, k]
    operator = small[:, : k + 1, : k + 1]
    c = _leaves.sum_of([torch.einsum("nkd,nd->nk", slots, leaf) for slots, leaf in zip(steps, g, strict=True)])
    q = _leaves.sum_of([torch.einsum("nkd,nd->nk", slots, slots[:, k]) for slots in steps])
    weights = torch.einsum("nij,nj->ni", operator, c)
    left = torch.einsum("ni,nij->nj", q, operator)
    left[:, k] += 1
    overlap = (left * c).sum(dim=1)
    square = q[:, k]
    reach = square / share
    along = reach / (reach - overlap)
    unsafe = ~(along.abs() < 1 / math.sqrt(torch.finfo(square.dtype).eps))
    along = along.masked_fill(unsafe, 1.0)
    weights = weights * along[:, None]
    weights[:, k] += (overlap * (share - 1) / square * along).masked_fill(unsafe, 0.0)
    small[rows, k + 1, : k + 1] = (left / square[:, None]).masked_fill(unsafe[:, None], 0.0)[rows]
    return along, weights


def apply(x: Leaves, steps: Leaves, small: Tensor, filled: Tensor, transposed: bool) -> Leaves:
    """See `low_rank_apply`."""
    k = int(filled)
    work = small.dtype
    stored = [slots[:, :k].to(work) for slots in steps]
    wide = [leaf.to(work) for leaf in x]
    operator = small[:, :k, :k].mT if transposed else small[:, :k, :k]
    c = _leaves.sum_of([torch.einsum("nkd,nd->nk", slots, leaf) for slots, leaf in zip(stored, wide, strict=True)])
    weights = torch.einsum("nij,nj->ni", operator, c)
    return [
        (-leaf - torch.einsum("nk,nkd->nd", weights, slots)).to(given.dtype)
        for leaf, slots, given in zip(wide, stored, x, strict=True)
    ]
