"""Negative log-likelihood of targets in plain PyTorch: what the kernels compute."""

import torch
from torch import Tensor
from torch.nn.functional import log_softmax


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of losses from scores of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def nll(scores: Tensor, targets: Tensor, size: int, bounds: tuple[int, ...]) -> Tensor:
    """See `nll` of the package; differentiable any number of times."""
    entry = targets
    for j, bound in enumerate(bounds):  # past the last bound there is no entry, and so no loss
        entry = torch.where(targets >= bound, bounds[0] + j, entry)
    return -_chosen(scores[:, :size], entry)


def add_nll(losses: Tensor, scores: Tensor, targets: Tensor, size: int, first: int) -> Tensor:
    """See `add_nll` of the package; differentiable any number of times."""
    entry = targets - first
    inside = (entry >= 0) & (entry < size)
    return losses - torch.where(inside, _chosen(scores[:, :size], torch.where(inside, entry, 0)), 0.0)


def _chosen(scores: Tensor, entry: Tensor) -> Tensor:
    logs = log_softmax(scores, dim=1, dtype=wide(scores.dtype))
    return logs.gather(1, entry.long().unsqueeze(1)).squeeze(1)
