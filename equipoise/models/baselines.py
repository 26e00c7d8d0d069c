"""Explicit sequence models to compare with: LSTM and GRU, temporal convolutions, Transformer-XL.

All are called as `model(tokens, targets=None, memory=None)` and return an `LMOutput`.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise._errors import require_count, require_number, unknown_name
from equipoise.models._sequence import check_memory, check_tokens, read_out, settings
from equipoise.models.outputs import LMOutput
from equipoise.models.registry import register_model
from equipoise.nn.dropout import SequenceDropout, VariationalDropout
from equipoise.nn.norm import weight_norm

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}

RecurrentMemory = tuple[Tensor, ...]
"""For each layer h (B, width), then, for an LSTM, for each layer c."""


class _WordsIn(nn.Module):
    """Token numbers to features: an embedding, or the number itself as one feature."""

    def __init__(self, vocab_size: int, size: int | None) -> None:
        super().__init__()
        self.table = None if size is None else nn.Embedding(vocab_size, size)
        self.out_size = size or 1
        if self.table is not None:
            nn.init.uniform_(self.table.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return tokens[..., None].to(dtype) if self.table is None else self.table(tokens)


class _WordsOut(nn.Module):
    """Features to scores of words, with a weight of its own or that of an embedding."""

    def __init__(self, in_size: int, vocab_size: int, tied: nn.Embedding | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, in_size)) if tied is None else tied.weight
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        if tied is None:
            nn.init.uniform_(self.weight, -1 / math.sqrt(in_size), 1 / math.sqrt(in_size))

    def forward(self, hidden: Tensor, targets: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return read_out(hidden, self.weight, self.bias, targets)


def _check_words(config: Any, top: int) -> None:
    """The settings of input and output that all baselines have; `top` is the width of the last features."""
    name = type(config).__name__
    require_count(name, "vocab_size", config.vocab_size)
    if config.embedding_size is not None:
        require_count(name, "embedding_size", config.embedding_size)
    if config.tied and config.embedding_size != top:
        raise ValueError(
            f"{name}: tied=True needs embedding_size equal to the width of the last layer, {top}; got "
            f"{config.embedding_size}."
        )


# Recurrent networks


@dataclass(frozen=True)
class RecurrentConfig:
    """Settings of `RecurrentLM`.

    Attributes:
        vocab_size: Number of words.
        cell: "lstm" or "gru".
        widths: Width of each layer, the lowest first.
        embedding_size: Width of the embedding; None feeds the word's number itself, as one feature.
        tied: The output layer uses the embedding.
        dropout: Variational dropout of the output.
        dropout_in: Variational dropout of the embedded inputs.
        dropout_hidden: Variational dropout between layers.
        weight_drop: DropConnect on the hidden-to-hidden matrices, one draw per forward.
    """

    vocab_size: int = 10_000
    cell: str = "lstm"
    widths: tuple[int, ...] = (200, 200)
    embedding_size: int | None = 200
    tied: bool = False
    dropout: float = 0.0
    dropout_in: float = 0.0
    dropout_hidden: float = 0.0
    weight_drop: float = 0.0

    def __post_init__(self) -> None:
        if self.cell not in CELLS:
            raise unknown_name("recurrent cell", self.cell, CELLS)
        if not self.widths:
            raise ValueError("RecurrentConfig: widths must name at least one layer, got ().")
        for width in self.widths:
            require_count("RecurrentConfig", "widths", width)
        for field in ("dropout", "dropout_in", "dropout_hidden", "weight_drop"):
            require_number("RecurrentConfig", field, getattr(self, field), low=0.0, high=1.0)
        _check_words(self, self.widths[-1])


class RecurrentLM(nn.Module):
    """A stack of LSTM or GRU layers.

    Args:
        config: Settings.

    Reference for dropped weights: S. Merity, N. S. Keskar, R. Socher, Regularizing and optimizing LSTM language models,
    ICLR 2018.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.words_in = _WordsIn(config.vocab_size, config.embedding_size)
        sizes = (self.words_in.out_size, *config.widths)
        make = CELLS[config.cell]
        self.layers = nn.ModuleList(make(a, b, batch_first=True) for a, b in itertools.pairwise(sizes))
        self.words_out = _WordsOut(sizes[-1], config.vocab_size, self.words_in.table if config.tied else None)
        self.drop_in, self.drop_out = SequenceDropout(config.dropout_in), SequenceDropout(config.dropout)
        self.drop_hidden = SequenceDropout(config.dropout_hidden)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, memory: RecurrentMemory | None = None) -> LMOutput:
        """Scores or losses of a segment; `memory` is what the previous segment returned, None at the start."""
        check_tokens("RecurrentLM", tokens, targets)
        check_memory("RecurrentLM", tokens.shape[0], *(memory or ()))
        x = self.drop_in(self.words_in(tokens, self.words_out.bias.dtype))
        states = []
        for index, layer in enumerate(self.layers):
            x, state = self._read(layer, self.drop_hidden(x) if index else x, self._state(memory, index))
            states.append(state if isinstance(state, tuple) else (state,))
        hidden = self.drop_out(x)
        logits, losses = self.words_out(hidden, targets)
        kept = tuple(part[0].detach() for kind in zip(*states, strict=True) for part in kind)
        return LMOutput(logits, losses, kept, hidden)

    def _read(self, layer: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """A layer's outputs and last state."""
        if not self.training or self.config.weight_drop == 0:
            return layer(x, state)
        weights = [layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0]
        weights[1] = F.dropout(weights[1], self.config.weight_drop)
        # In one block of memory: cuDNN would otherwise warn, and gather them itself.
        block = torch.cat([weight.flatten() for weight in weights]).split([weight.numel() for weight in weights])
        parts = [piece.view_as(weight) for piece, weight in zip(block, weights, strict=True)]
        zeros = x.new_zeros(1, x.shape[0], layer.hidden_size)
        if self.config.cell == "gru":
            return torch.gru(x, zeros if state is None else state, parts, True, 1, 0.0, True, False, True)
        out, h, c = torch.lstm(x, state or (zeros, zeros), parts, True, 1, 0.0, True, False, True)
        return out, (h, c)

    def _state(self, memory: RecurrentMemory | None, layer: int) -> Any:
        if memory is None:
            return None
        parts = tuple(part[None].contiguous() for part in memory[layer :: len(self.layers)])
        return parts if self.config.cell == "lstm" else parts[0]


_COPY_MEMORY: dict[str, Any] = {"vocab_size": 10, "embedding_size": None}
_PTB_SMALL: dict[str, Any] = {"tied": True, "dropout": 0.2, "dropout_in": 0.2, "dropout_hidden": 0.2}


@register_model
def lstm_copy_memory(**overrides: Any) -> RecurrentLM:
    """LSTM of the copy-memory task, on scalar inputs: 14,260 parameters."""
    return RecurrentLM(settings(RecurrentConfig, {**_COPY_MEMORY, "cell": "lstm", "widths": (57,)}, overrides))


@register_model
def gru_copy_memory(**overrides: Any) -> RecurrentLM:
    """GRU of the copy-memory task, on scalar inputs: 13,920 parameters."""
    return RecurrentLM(settings(RecurrentConfig, {**_COPY_MEMORY, "cell": "gru", "widths": (65,)}, overrides))


@register_model
def lstm_ptb_small(**overrides: Any) -> RecurrentLM:
    """Two LSTM layers of 200, tied: 2.65 M parameters."""
    return RecurrentLM(settings(RecurrentConfig, _PTB_SMALL, overrides))


@register_model
def gru_ptb_small(**overrides: Any) -> RecurrentLM:
    """Two GRU layers of 200, tied: 2.49 M parameters."""
    return RecurrentLM(settings(RecurrentConfig, {**_PTB_SMALL, "cell": "gru"}, overrides))


@register_model
def lstm_ptb(**overrides: Any) -> RecurrentLM:
    """LSTM layers of 1150, 1150 and 400, tied, weights dropped: 24.2 M parameters, as many as DEQ-TrellisNet there."""
    rates = {"dropout": 0.4, "dropout_in": 0.4, "dropout_hidden": 0.25, "weight_drop": 0.5}
    sizes = {"widths": (1150, 1150, 400), "embedding_size": 400, "tied": True}
    return RecurrentLM(settings(RecurrentConfig, {**sizes, **rates}, overrides))


# Temporal convolutions


@dataclass(frozen=True)
class TCNConfig:
    """Settings of `TCN`.

    Attributes:
        vocab_size: Number of words.
        channels: Features of every level.
        levels: Number of levels; the dilation doubles from one to the next.
        kernel_size: Taps of every convolution.
        embedding_size: Width of the embedding; None feeds the word's number itself, as one feature.
        tied: The output layer uses the embedding.
        dropout: Dropout after every convolution, whole channels of a stream.
        dropout_in: Variational dropout of the embedded inputs.
        history: Words of earlier segments that are kept and seen again; 0 for none. A model's attribute
            `memory_length`, which begins as this, may be changed at any time.
        init_std: Standard deviation of initial weights.
    """

    vocab_size: int = 10_000
    channels: int = 10
    levels: int = 9
    kernel_size: int = 8
    embedding_size: int | None = None
    tied: bool = False
    dropout: float = 0.0
    dropout_in: float = 0.0
    history: int = 0
    init_std: float = 0.01

    def __post_init__(self) -> None:
        for field in ("channels", "levels", "kernel_size"):
            require_count("TCNConfig", field, getattr(self, field))
        require_count("TCNConfig", "history", self.history, low=0)
        for field in ("dropout", "dropout_in"):
            require_number("TCNConfig", field, getattr(self, field), low=0.0, high=1.0)
        require_number("TCNConfig", "init_std", self.init_std, low=0.0, open_low=True)
        _check_words(self, self.channels)

    @property
    def receptive_field(self) -> int:
        """Words that a prediction depends on: two convolutions per level."""
        return 1 + 2 * (self.kernel_size - 1) * (2**self.levels - 1)


class _Level(nn.Module):
    """Two dilated causal convolutions and a residual connection."""

    def __init__(self, in_size: int, config: TCNConfig, dilation: int) -> None:
        super().__init__()
        size = config.channels
        self.reach = (config.kernel_size - 1) * dilation
        convolutions = [nn.Conv1d(a, size, config.kernel_size, dilation=dilation) for a in (in_size, size)]
        self.skip = nn.Conv1d(in_size, size, 1) if in_size != size else None
        for conv in (*convolutions, *([self.skip] if self.skip else [])):
            nn.init.normal_(conv.weight, 0, config.init_std)
        self.convolutions = nn.ModuleList(weight_norm(conv) for conv in convolutions)
        self.drop = SequenceDropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = x  # (B, C, T)
        for conv in self.convolutions:
            out = F.relu(conv(F.pad(out, (self.reach, 0))))
            out = self.drop(out.mT).mT
        return F.relu(out + (x if self.skip is None else self.skip(x)))


class TCN(nn.Module):
    """A temporal convolutional network: dilated causal convolutions with residual connections.

    Args:
        config: Settings.

    Reference: S. Bai, J. Z. Kolter, V. Koltun, An empirical evaluation of generic convolutional and recurrent networks
    for sequence modeling, 2018.
    """

    def __init__(self, config: TCNConfig) -> None:
        super().__init__()
        self.config, self.memory_length = config, config.history
        self.words_in = _WordsIn(config.vocab_size, config.embedding_size)
        self.drop_in = SequenceDropout(config.dropout_in)
        sizes = [self.words_in.out_size] + [config.channels] * (config.levels - 1)
        self.levels = nn.ModuleList(_Level(size, config, 2**index) for index, size in enumerate(sizes))
        self.words_out = _WordsOut(config.channels, config.vocab_size, self.words_in.table if config.tied else None)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, memory: Tensor | None = None) -> LMOutput:
        """Scores or losses of a segment; `memory` is the words kept of earlier ones, (B, at most `memory_length`)."""
        check_tokens("TCN", tokens, targets)
        length = tokens.shape[1]
        if memory is not None:
            check_memory("TCN", tokens.shape[0], memory)
            tokens = torch.cat([memory, tokens], dim=1)
        x = self.drop_in(self.words_in(tokens, self.words_out.bias.dtype)).mT  # (B, C, T)
        for level in self.levels:
            x = level(x)
        hidden = x[..., x.shape[2] - length :].mT
        logits, losses = self.words_out(hidden, targets)
        kept = tokens[:, max(0, tokens.shape[1] - self.memory_length) :] if self.memory_length else None
        return LMOutput(logits, losses, kept, hidden)


@register_model
def tcn_copy_memory(**overrides: Any) -> TCN:
    """TCN of the copy-memory task, on scalar inputs: 14,170 parameters."""
    return TCN(settings(TCNConfig, {"vocab_size": 10}, overrides))


@register_model
def tcn_ptb_small(**overrides: Any) -> TCN:
    """Four levels of 200 channels, tied: 2.97 M parameters."""
    sizes = {"channels": 200, "levels": 4, "kernel_size": 3, "embedding_size": 200, "tied": True, "history": 60}
    return TCN(settings(TCNConfig, {**sizes, "dropout": 0.2, "dropout_in": 0.2, "init_std": 0.05}, overrides))


# Transformer-XL


@dataclass(frozen=True)
class TransformerXLConfig:
    """Settings of `TransformerXL`.

    Attributes:
        vocab_size: Number of words.
        embedding_size: Width of the embedding and of every position.
        heads: Attention heads; they divide the width.
        inner_size: Width of the feed-forward part.
        layers: Number of layers, each with weights of its own.
        memory_length: Positions of earlier segments that every layer remembers; 0 for none. A model's attribute of this
            name may be changed at any time.
        tied: The output layer uses the embedding.
        dropout: Dropout of embeddings, positions, both parts of a layer and the output.
        attention_dropout: Dropout of attention maps.
        init_std: Standard deviation of initial weights.
    """

    vocab_size: int = 10_000
    embedding_size: int = 128
    heads: int = 4
    inner_size: int = 512
    layers: int = 4
    memory_length: int = 64
    tied: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        name = "TransformerXLConfig"
        for field in ("heads", "inner_size", "layers"):
            require_count(name, field, getattr(self, field))
        require_count(name, "memory_length", self.memory_length, low=0)
        for field in ("dropout", "attention_dropout"):
            require_number(name, field, getattr(self, field), low=0.0, high=1.0)
        _check_words(self, self.embedding_size)
        if self.embedding_size % self.heads or self.embedding_size % 2:
            raise ValueError(
                f"{name}: embedding_size must be even and a multiple of heads={self.heads}, got {self.embedding_size}."
            )


class _RelativeLayer(nn.Module):
    """Attention with scores by content and by distance, then a feed-forward part; both normalised after the sum."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        d = config.embedding_size
        self.heads = config.heads
        self.query = nn.Linear(d, d, bias=False)
        self.keys_values = nn.Linear(d, 2 * d, bias=False)
        self.distance = nn.Linear(d, d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.content_bias = nn.Parameter(torch.empty(config.heads, d // config.heads))
        self.distance_bias = nn.Parameter(torch.empty(config.heads, d // config.heads))
        self.widen, self.narrow = nn.Linear(d, config.inner_size), nn.Linear(config.inner_size, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.drop, self.drop_map = VariationalDropout(config.dropout), VariationalDropout(config.attention_dropout)

    def forward(self, x: Tensor, past: Tensor, distances: Tensor) -> Tensor:
        """Map x (B, T, d), given what is before it (B, M, d) and the codes of distances 0 … M + T − 1."""
        a = self.norms[0](x + self.drop(self._attend(x, past, distances)))
        return self.norms[1](a + self.drop(self.narrow(self.drop(F.relu(self.widen(a))))))

    def _attend(self, x: Tensor, past: Tensor, distances: Tensor) -> Tensor:
        length, before = x.shape[1], past.shape[1]
        query = self._split(self.query(x))  # (B, heads, T, d_head)
        key, value = (self._split(part) for part in self.keys_values(torch.cat([past, x], dim=1)).chunk(2, dim=-1))
        code = self._split(self.distance(distances)[None])  # (1, heads, M + T, d_head)
        by_content = (query + self.content_bias[:, None]) @ key.mT
        by_distance = (query + self.distance_bias[:, None]) @ code.mT
        steps = torch.arange(length, device=x.device)[:, None] + before
        apart = steps - torch.arange(before + length, device=x.device)  # (T, M + T), query minus key
        by_distance = by_distance.gather(-1, apart.clamp_min(0).expand_as(by_content))
        scores = (by_content + by_distance) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(apart < 0, -math.inf).softmax(dim=-1)
        return self.out((self.drop_map(weights) @ value).transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TransformerXL(nn.Module):
    """Transformer-XL: relative positions, and every layer sees what it saw of earlier segments.

    Args:
        config: Settings.

    Reference: Z. Dai et al., Transformer-XL: attentive language models beyond a fixed-length context, ACL 2019.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config, self.memory_length = config, config.memory_length
        self.words_in = _WordsIn(config.vocab_size, config.embedding_size)
        self.layers = nn.ModuleList(_RelativeLayer(config) for _ in range(config.layers))
        self.words_out = _WordsOut(
            config.embedding_size, config.vocab_size, self.words_in.table if config.tied else None
        )
        self.drop = VariationalDropout(config.dropout)
        self.drop_distances = VariationalDropout(config.dropout, shared_by_systems=True)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, config.init_std)
            elif "norms" not in name:
                nn.init.zeros_(parameter)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, memory: Sequence[Tensor] | None = None
    ) -> LMOutput:
        """Scores or losses of a segment; `memory` holds the inputs of each layer, (B, at most `memory_length`, d)."""
        check_tokens("TransformerXL", tokens, targets)
        check_memory("TransformerXL", tokens.shape[0], *(memory or ()))
        config = self.config
        x = self.drop(self.words_in(tokens, self.words_out.bias.dtype) * math.sqrt(config.embedding_size))
        pasts = memory or [x.detach()[:, :0]] * config.layers
        distances = self.drop_distances(_codes(pasts[0].shape[1] + tokens.shape[1], config.embedding_size, x))
        kept = []
        for layer, past in zip(self.layers, pasts, strict=True):
            seen = torch.cat([past, x.detach()], dim=1)
            kept.append(seen[:, max(0, seen.shape[1] - self.memory_length) :].clone())
            x = layer(x, past, distances)
        hidden = self.drop(x)
        logits, losses = self.words_out(hidden, targets)
        return LMOutput(logits, losses, tuple(kept) if self.memory_length else None, hidden)


def _codes(count: int, size: int, like: Tensor) -> Tensor:
    """Sines, then cosines, of the distances 0 … count − 1: (count, size)."""
    frequency = 10_000 ** (-torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size)
    angle = torch.arange(count, device=like.device, dtype=torch.float32)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(like.dtype)


@register_model
def transformer_xl_ptb_small(**overrides: Any) -> TransformerXL:
    """Four layers of width 128, tied: 2.15 M parameters."""
    return TransformerXL(settings(TransformerXLConfig, {}, overrides))


@register_model
def transformer_xl_wt103(**overrides: Any) -> TransformerXL:
    """Sixteen layers of width 410, with a full softmax: 151.1 M parameters, 41.1 M of them not in the embedding."""
    sizes = {"vocab_size": 267_735, "embedding_size": 410, "heads": 10, "inner_size": 2100, "layers": 16}
    return TransformerXL(settings(TransformerXLConfig, {**sizes, "memory_length": 150, "init_std": 0.01}, overrides))
