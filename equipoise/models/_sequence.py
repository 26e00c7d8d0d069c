"""What sequence models share: settings from overrides, checks of tokens, the output layer, solves in a row."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise._errors import unknown_name
from equipoise._solution import Stats
from equipoise.ops.likelihood import nll

Settings = TypeVar("Settings")


def settings(cls: type[Settings], defaults: dict[str, Any], overrides: dict[str, Any]) -> Settings:
    """A settings dataclass from a preset's values and a caller's, which win; unknown names raise with a suggestion."""
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in overrides:
        if name not in known:
            raise unknown_name(f"setting of {cls.__name__}", name, known)
    return cls(**{**defaults, **overrides})


def check_tokens(owner: str, tokens: Tensor, targets: Tensor | None) -> None:
    """Raise unless tokens, and targets if any, are (B, T) integers with at least one step.

    Values are not looked at: on a device that would make the host wait.
    """
    if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{owner}: tokens must be integers of shape (B, T), T at least 1; got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}."
        )
    if targets is not None and targets.shape != tokens.shape:
        raise ValueError(
            f"{owner}: targets must have the shape of tokens, {tuple(tokens.shape)}; got {tuple(targets.shape)}."
        )


def check_memory(owner: str, batch: int, *memory: Tensor) -> None:
    """Raise unless every tensor of a memory, batch axis first, belongs to `batch` streams."""
    for tensor in memory:
        if tensor.shape[0] != batch:
            raise ValueError(
                f"{owner}: memory holds {tensor.shape[0]} streams, tokens hold {batch}; pass memory=None to start anew."
            )


def read_out(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The output layer: (logits, None) without targets, (None, losses of shape (B, T)) with them."""
    logits = F.linear(hidden, weight, bias)
    return (logits, None) if targets is None else (None, token_losses(logits, targets))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target in nats, (B, T), computed in float32 at least.

    A target outside the vocabulary is refused; on a device, where nothing can be raised, its loss may be NaN instead.
    """
    if logits.is_cuda:
        return nll(logits.flatten(0, 1), targets.flatten()).view(targets.shape)
    work = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    # Nothing is to be ignored: by default -100, a target outside the vocabulary, would have a loss of zero.
    losses = F.cross_entropy(
        work.flatten(0, 1), targets.flatten().long(), reduction="none", ignore_index=torch.iinfo(torch.int64).min
    )
    return losses.view(targets.shape)


def stats_in_a_row(parts: Sequence[Stats]) -> Stats:
    """Statistics of chunks solved one after another: work adds up, the worst residual and the first failure count."""
    return functools.reduce(_worse, parts)


def _worse(a: Stats, b: Stats) -> Stats:
    return dataclasses.replace(
        a,
        status=torch.where(a.ok, b.status, a.status),
        residual=torch.maximum(a.residual, b.residual),
        steps=a.steps + b.steps,
        nfe=a.nfe + b.nfe,
        trace=None,
        solver_bytes=max(a.solver_bytes, b.solver_bytes),
    )
