"""Relative attention in plain PyTorch: what the kernels compute."""

import math

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float,
    local_size: int | None = None,
) -> Tensor:
    """See `equipoise.ops.attend`; differentiable any number of times."""
    length, keys = query.shape[2], key.shape[2]
    blocked = out_of_sight(length, keys - length, local_size, query.device)
    biased = query if bias is None else query + bias[:, None]
    weights = attention_map(biased, key, by_distance[..., -keys - 1 :], blocked, scale)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()


def attention_map(query: Tensor, key: Tensor, by_distance: Tensor, blocked: Tensor, scale: float = 1.0) -> Tensor:
    """softmax(scale·(q·k + by distance)) over keys, (B, heads, T, L), 0 where `blocked` (T, L)."""
    products = query.flatten(0, 1), key.mT.flatten(0, 1)
    scores = torch.baddbmm(relative_shift(by_distance).flatten(0, 1), *products, beta=scale, alpha=scale)
    return scores.unflatten(0, query.shape[:2]).masked_fill_(blocked, -math.inf).softmax(dim=-1)


def out_of_sight(length: int, past: int, local_size: int | None, device: torch.device) -> Tensor:
    """Which of `past` + `length` keys a query may not see, (T, L): later ones, and those `local_size` back or more."""
    keys = past + length
    delta = torch.arange(past, keys, device=device)[:, None] - torch.arange(keys, device=device)
    blocked = delta < 0
    if local_size is not None:
        blocked = blocked | (delta >= local_size)
    return blocked


def relative_shift(scores: Tensor) -> Tensor:
    """Scores by distance to scores by key, as a view: (..., T, L + 1) to (..., T, L), L = M + T.

    Column c ≥ 1 of the argument belongs to distance L − c, so the score of query i and key j is at c = j + T − i, that
    is, at T + i·L + j of the row-major flat matrix, whatever i and j: dropping the first T entries and reading rows of
    length L does it. Entries with j > M + i, where the distance is negative, are of other rows, and must be masked.
    """
    length, columns = scores.shape[-2:]
    return scores.flatten(-2)[..., length:].unflatten(-1, (length, columns - 1))
