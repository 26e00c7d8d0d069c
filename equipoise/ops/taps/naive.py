"""Rows of taps and DropConnect in plain PyTorch: what the kernels compute."""

import torch
from torch import Tensor


def rows(h: Tensor, before: Tensor, mask: Tensor | None, kernel_size: int, dilation: int, dtype: torch.dtype) -> Tensor:
    """See `gather_taps`; differentiable any number of times."""
    x = torch.cat([before, h], dim=1) if before.shape[1] else h
    if mask is not None:
        x = x * mask.to(x.dtype)
    if kernel_size > 1:
        x = torch.cat([x[:, j * dilation :][:, : h.shape[1]] for j in range(kernel_size)], dim=-1)
    return x.to(dtype)  # last, so that cotangents of taps are added up in the dtype of h


def dropped(weight: Tensor, kept: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """See `drop_taps`; differentiable any number of times."""
    past = kept.shape[1]
    return torch.cat([weight[:, :past] * kept.to(weight.dtype).mul_(scale), weight[:, past:]], dim=1).to(dtype)
