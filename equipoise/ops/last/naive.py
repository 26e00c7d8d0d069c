"""The last proposals in PyTorch: what the kernels compute."""

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._solution import Status
from equipoise._tree import Leaves
from equipoise.ops.standing import Standing


def take_last(z: Leaves, value: Leaves, residual: Tensor, status: Tensor, standing: Standing) -> None:
    """See `equipoise.ops.take_last`."""
    usable = _leaves.all_finite(z) & (status != int(Status.NONFINITE))
    status.masked_fill_(~usable, int(Status.NONFINITE))
    residual.copy_(torch.where(usable, standing.latest, standing.residual))
    for place, last, best in zip(value, z, standing.best, strict=True):
        place.copy_(torch.where(usable[:, None], last, best))
