"""One step with a linear map of low rank in plain PyTorch: what the kernels compute."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from equipoise import _leaves
from equipoise._tree import Leaves
from equipoise.ops.standing import Rules, Standing, judge, postponed, settle

if TYPE_CHECKING:
    from equipoise.ops.low_rank import LowRankMemory, LowRankParts


def step(
    z: Leaves,
    fz: Leaves,
    memory: "LowRankMemory",
    standing: Standing,
    parts: "LowRankParts",
    rules: Rules,
    out: Leaves | None,
) -> None:
    """See `low_rank_step`; everything is written in place."""
    work = standing.residual.dtype
    fz = [leaf.to(work) for leaf in fz]
    g = _leaves.subtract(fz, [leaf.to(work) for leaf in z])
    running = torch.ones_like(standing.status, dtype=torch.bool) if rules.fixed else standing.status < 0
    actions = judge(_leaves.norm(g), _leaves.norm(fz), standing, rules)
    by_position = [leaf.unflatten(1, (parts.positions, leaf.shape[1] // parts.positions)) for leaf in g]
    few = torch.cat(by_position, dim=2).to(parts.down.dtype) @ parts.down.mT
    memory.few[running, :, : parts.rank] = few[running].to(memory.few.dtype)
    added = _raised(few, parts).to(work).split([leaf.shape[2] for leaf in by_position], dim=2)
    proposal = [image + more.flatten(1) for image, more in zip(fz, added, strict=True)]
    if out is not None:
        actions = postponed(actions, standing)
    settle(out or z, proposal, actions, standing)


def _raised(few: Tensor, parts: "LowRankParts") -> Tensor:
    """(N, T, D) what few numbers (N, T, rank) of a position and of those before it add to its proposal."""
    blocks = parts.up.split(parts.rank, dim=1)
    earlier = [pad(few, (0, 0, back, 0))[:, : parts.positions] for back in range(parts.reach)]
    return _leaves.sum_of([moved @ block.mT for moved, block in zip(earlier, blocks, strict=True)])
