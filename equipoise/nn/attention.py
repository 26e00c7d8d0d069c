"""Causal self-attention with relative positions, input injection and memory."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from equipoise._compat import inside_a_transform
from equipoise._errors import require_count, require_number, unknown_name
from equipoise._tape import being_recorded
from equipoise.nn.dropout import AttentionDropout, VariationalDropout
from equipoise.nn.norm import weight_norm as normalised
from equipoise.ops._backend import BACKENDS
from equipoise.ops.attention import attend, takes_kernel
from equipoise.ops.attention.naive import attention_map, out_of_sight
from equipoise.ops.taps import product_dtype

BIAS_STD = 0.01
ALIGNED = 8  # elements: rows of products that begin at multiples of 16 bytes are what matrix units are quick with
# Keys up to which tables of distances are kept. They come in powers of two, for all lengths up to that: 20 MB at most
# for a width of 700.
MOST_KEPT = 2048

Past = tuple[Tensor, Tensor]
"""Keys and values of positions before the segment, each (B, heads, M, d_head)."""

Positions = tuple[Tensor, Tensor]
"""Keys of distances, (heads, d_head, M + T + 1 or more), and which pairs may not meet, (T, M + T)."""


class RelativeAttention(nn.Module):
    """Multi-head attention of T positions to themselves and to M positions before, by content and by distance.

    With distance δ = M + i − j of query i and key j (memory first), per head:

        [Q; K; V] = W_qkv [z₀, z] + [u₀, u]
        s_ij = ((q_i + r_w)·k_j + (q_i + r_r)·(W_R R_δ)) / √d_head
        result = W_o (dropout(softmax(s)) V) + b_o

    where R_δ holds the sines, then the cosines, of δ·10000^(−2k/d). What does not depend on z is computed once for a
    whole solve, by `positions` and `past`, and handed to `forward`. Where the map needs no dropout and the device has
    kernels for it, it is not written out: see `equipoise.ops.attend`.

    Args:
        d_model: Width, even, a multiple of `heads`.
        heads: Number of heads.
        local_size: Positions that a query sees, itself included: distances of `local_size` and more are masked. None
            is no limit (the models first published as DEQ-Transformers wrote 0 and meant 1000).
        dropout: On the attention map.
        position_dropout: On R: one mask over features, shared by distances and by the batch.
        weight_norm: Normalise W_qkv, W_R and W_o.
        init_std: Standard deviation of initial weights, at most 1/√fan-in.
        backend: Of `attend`: "auto", "naive" or "triton".

    Reference: Z. Dai et al., Transformer-XL: attentive language models beyond a fixed-length context, ACL 2019.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        local_size: int | None = None,
        dropout: float = 0.0,
        position_dropout: float = 0.0,
        weight_norm: bool = False,
        init_std: float = 0.05,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        require_count("RelativeAttention", "d_model", d_model, low=2)
        require_count("RelativeAttention", "heads", heads)
        if d_model % heads or d_model % 2:
            raise ValueError(
                f"RelativeAttention: d_model must be even and a multiple of heads, got d_model={d_model}, "
                f"heads={heads}; the next one up is {d_model + -d_model % math.lcm(2, heads)}."
            )
        if local_size is not None:
            require_count("RelativeAttention", "local_size", local_size)
        if backend not in BACKENDS:
            raise unknown_name("backend", backend, BACKENDS)
        self.d_model, self.heads, self.d_head, self.local_size = d_model, heads, d_model // heads, local_size
        self.backend = backend
        self.qkv = initialised(nn.Linear(d_model, 3 * d_model, bias=False), init_std, weight_norm)
        self.position = initialised(nn.Linear(d_model, d_model, bias=False), init_std, weight_norm)
        self.output = initialised(nn.Linear(d_model, d_model), init_std, weight_norm)
        self.content_bias = nn.Parameter(torch.empty(heads, self.d_head).normal_(std=BIAS_STD))  # r_w
        self.position_bias = nn.Parameter(torch.empty(heads, self.d_head).normal_(std=BIAS_STD))  # r_r
        self.map_dropout = AttentionDropout(dropout)
        self.position_dropout = VariationalDropout(position_dropout, shared=0)

    def positions(self, length: int, past: int = 0) -> Positions:
        """What `forward` needs to know of distances, for `length` queries after `past` positions of memory.

        The keys of distances begin with a column of zeros, or several for kernels, and then fall from M + T − 1 to 0:
        see `relative_shift`. Columns before the distances meet masked pairs only, so that without gradients kernels get
        larger distances there, which take no launch of their own.
        """
        keys, like = past + length, self.content_bias
        for_kernels = self.backend == "triton" or (self.backend == "auto" and like.is_cuda)
        ahead = 1 + -(keys + 1) % ALIGNED if for_kernels else 1
        filled = for_kernels and not torch.is_grad_enabled()
        drops = self.position_dropout.training and self.position_dropout.p > 0
        dtype = like.dtype if drops else product_dtype(like)
        rows = keys + ahead if filled else keys
        table, blocked = _of_distances(rows, length, past, self.d_model, self.local_size, dtype, like)
        table = self.position_dropout(table)
        if filled:
            return (self.position.weight @ table.mT).view(self.heads, self.d_head, rows), blocked
        encoded = self.position(table).view(keys, self.heads, self.d_head).permute(1, 2, 0)
        return pad(encoded, (ahead, 0)), blocked

    def past(self, z: Tensor, injection: Tensor) -> Past:
        """Keys and values of memory: states (B, M, d) and their injections (B, M, 3d)."""
        d = self.d_model
        keys_values = linear(z, self.qkv.weight[d:]) + injection[..., d:]
        keys, values = self._split(keys_values, 2)
        return keys, values

    def forward(self, z: Tensor, injection: Tensor, positions: Positions, past: Past | None = None) -> Tensor:
        """The result for states z (B, T, d) with injection (B, T, 3d)."""
        query, key, value = self._split(self.qkv(z) + injection, 3)  # each (B, heads, T, d_head)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        distances, blocked = positions
        drops = self.map_dropout.training and self.map_dropout.p > 0
        if not drops and takes_kernel(query, key, value, backend=self.backend):
            mixed = self._fused(query, key, value, distances)
        else:
            # Passes over (B, heads, T, M + T) are most of the cost on a CPU: so queries are scaled, not scores.
            scale = self.d_head**-0.5
            by_distance = ((query + self.position_bias[:, None]) * scale) @ distances[..., -key.shape[2] - 1 :]
            weights = attention_map((query + self.content_bias[:, None]) * scale, key, by_distance, blocked)
            mixed = (self.map_dropout(weights).to(value.dtype) @ value).transpose(1, 2)
        return self.output(mixed.flatten(2))

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, distances: Tensor) -> Tensor:
        """Values mixed by kernels, (B, T, heads, d_head)."""
        positioned = query + self.position_bias.to(query.dtype)[:, None]
        # Heads are the batch of this product: all sequences share the keys of distances.
        by_distance = torch.bmm(positioned.transpose(0, 1).flatten(1, 2), distances)
        by_distance = by_distance.unflatten(1, positioned.shape[::2]).transpose(0, 1)
        scale, local = self.d_head**-0.5, self.local_size
        bias, backend = self.content_bias, self.backend
        return attend(query, key, value, by_distance, bias, scale=scale, local_size=local, backend=backend)

    def _split(self, joint: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, T, parts·d) to `parts` tensors (B, heads, T, d_head)."""
        split = joint.unflatten(-1, (parts, self.heads, self.d_head)).unbind(-3)
        return tuple(part.transpose(1, 2) for part in split)

    def extra_repr(self) -> str:
        return f"{self.d_model}, heads={self.heads}, local_size={self.local_size}"


def sinusoids(distance: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """R_δ, (len(distance), d_model): sin(δ ω_k) for all k, then cos(δ ω_k), ω_k = 10000^(−2k/d_model)."""
    wide = torch.promote_types(dtype, torch.float32)
    k = torch.arange(0, d_model, 2, device=distance.device, dtype=wide)
    angle = distance.to(wide)[:, None] * torch.exp(k * (-math.log(10000.0) / d_model))
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(dtype)


_kept: dict[Any, tuple[Tensor, Tensor]] = {}


def _of_distances(
    rows: int, length: int, past: int, d_model: int, local_size: int | None, dtype: torch.dtype, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The sinusoids of distances from rows − 1 down to 0, and what is out of sight: constants, so made once and kept.

    For good, since graphs that read them may have been recorded; and for each stream, which need not wait for another.
    """
    device = like.device
    anew = torch.compiler.is_compiling() or type(like) not in (Tensor, nn.Parameter)  # traced in one way or another
    if not anew:
        size = 1 << (max(rows, past + length) - 1).bit_length()
        stream = torch.cuda.current_stream(device).cuda_stream if like.is_cuda else None
        key = size, d_model, local_size, dtype, device, stream
        # A tensor made in a recording has no values before a replay, one made in a transform belongs to it.
        anew = size > MOST_KEPT or (key not in _kept and (being_recorded() or inside_a_transform()))
    if anew:
        return _falling(rows, d_model, dtype, device), out_of_sight(length, past, local_size, device)
    if key not in _kept:
        with torch.inference_mode(False), torch.no_grad():
            _kept[key] = _falling(size, d_model, dtype, device), out_of_sight(size, 0, local_size, device)
    table, blocked = _kept[key]
    return table[size - rows :], blocked[past : past + length, : past + length]


def _falling(rows: int, d_model: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return sinusoids(torch.arange(rows - 1, -1, -1, device=device), d_model, dtype)


def initialised(layer: nn.Linear, init_std: float, weight_norm: bool) -> nn.Linear:
    """A linear layer with weights N(0, std²), std = min(init_std, 1/√fan-in), bias 0, weight-normalised if asked for.

    A layer of large fan-in would otherwise start with a large operator norm. The initial values are those of v, and g
    is ‖v‖: the effective weight is what was drawn.
    """
    require_number("initialised", "init_std", init_std, low=0.0, open_low=True)
    nn.init.normal_(layer.weight, std=min(init_std, layer.in_features**-0.5))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    if weight_norm:
        normalised(layer)
    return layer
