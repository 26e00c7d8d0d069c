"""One step of Anderson acceleration in plain PyTorch: what the kernels compute."""

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._tree import Leaves
from equipoise.ops.standing import Rules, Standing, judge, postponed, settle
from equipoise.solvers.anderson import residual_weights


def step(
    z: Leaves,
    fz: Leaves,
    ring: Leaves,
    residuals: Leaves,
    gram: Tensor,
    weights: Tensor,
    standing: Standing,
    rules: Rules,
    ridge: float,
    mixing: float,
    bound: float | None,
    out: Leaves | None,
    images: Leaves | None,
) -> None:
    """See `anderson_step`; everything is written in place."""
    work = standing.residual.dtype
    fz = [leaf.to(work) for leaf in fz]
    g = _leaves.subtract(fz, [leaf.to(work) for leaf in z])
    running = torch.ones_like(standing.status, dtype=torch.bool) if rules.fixed else standing.status < 0
    count, memory = int(standing.count), gram.shape[1]
    slot, filled = count % memory, min(count + 1, memory)
    actions = judge(_leaves.norm(g), _leaves.norm(fz), standing, rules)
    rows = running.nonzero()[:, 0]
    for kept, leaf in zip((*ring, *residuals), (*(images or fz), *g), strict=True):
        kept[rows, slot] = leaf[rows].to(kept.dtype)
    # The Gram matrix is that of the residuals as stored, so that it stays positive whatever their dtype.
    stored = [kept[:, :filled].to(work) for kept in residuals]
    row = _leaves.sum_of([torch.einsum("nmd,nd->nm", kept, kept[:, slot]) for kept in stored]).to(gram.dtype)
    row[:, slot] *= 1 + ridge
    gram[rows, slot, :filled] = row[rows]
    gram[rows, :filled, slot] = row[rows]
    weights[rows, :filled] = residual_weights(gram[:, :filled, :filled], weights.dtype, slot, bound)[rows]
    weights[rows, filled:] = 0
    alpha = weights[:, :filled].to(work)
    proposal = [torch.einsum("nm,nmd->nd", alpha, kept[:, :filled].to(work)) for kept in ring]
    if mixing != 1.0:
        back = [torch.einsum("nm,nmd->nd", alpha, kept) for kept in stored]
        proposal = _leaves.axpy(proposal, mixing - 1.0, back)
    if out is not None:
        actions = postponed(actions, standing)
    settle(out or z, proposal, actions, standing)
