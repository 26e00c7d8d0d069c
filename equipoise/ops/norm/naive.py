"""Normalisation of groups of channels, with what surrounds it in a multiscale layer, in plain PyTorch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def enlarged(x: Tensor, factor: int, size: Sequence[int]) -> Tensor:
    """Every pixel `factor` times in both directions, cropped to `size`."""
    larger = F.interpolate(x, scale_factor=factor, mode="nearest") if factor > 1 else x
    return larger if larger.shape[2:] == torch.Size(size) else larger[..., : size[0], : size[1]]


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    plus: Tensor | None,
    *,
    eps: float,
    enlarge: int,
    relu: bool,
    dtype: torch.dtype,
) -> Tensor:
    """See `group_norm` of the package; differentiable any number of times."""
    y = _normed(_wide(x), groups, weight, bias, eps)
    if plus is not None:
        y = plus + enlarged(y, enlarge, plus.shape[2:])
    return (F.relu(y) if relu else y).to(dtype)


def residual_norm(
    t: Tensor,
    z: Tensor,
    groups: int,
    weights: Sequence[Tensor | None],
    mask: Tensor | None,
    x: Tensor | None,
    *,
    eps: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """See `residual_norm` of the package; differentiable any number of times."""
    u = _wide(t)
    if mask is not None:
        u = u * mask.to(u.dtype)
    if x is not None:
        u = u + x
    v = _normed(u, groups, weights[0], weights[1], eps[0]) + z
    return _normed(F.relu(v), groups, weights[2], weights[3], eps[1]).to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _normed(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Scale and offset are (C,), or (N, C) where each sample has its own, as in the VJP of the kernels."""
    if weight is None or bias is None:
        return F.group_norm(x, groups, eps=eps)
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)  # those of a model in half precision are narrower
    if weight.dim() == 1:
        return F.group_norm(x, groups, weight, bias, eps)
    return F.group_norm(x, groups, eps=eps) * weight[:, :, None, None] + bias[:, :, None, None]
