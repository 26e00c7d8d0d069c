"""Adaptive embedding and softmax: frequent words get wide vectors, rare ones narrow vectors; both share the tables.

Words are numbered by falling frequency. Cutoffs split the vocabulary in clusters; cluster i has vectors of width
d_embed / div_valⁱ and a projection to the width of the model.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, log_softmax

from equipoise._errors import require_count

INIT_STD = 0.01
# Scores of a cluster, of all targets together, up to which a device computes them for targets in other clusters too.
MOST_SCORES = 2**26


class AdaptiveEmbedding(nn.Module):
    """Vectors of tokens, scaled by √d_model.

    Args:
        vocab_size: Number of words.
        d_model: Width of the result.
        d_embed: Width of the vectors of the first cluster; `d_model` if None.
        cutoffs: Where clusters begin, ascending: `(20000, 40000)` makes three clusters. They matter here only with
            `div_val > 1`, and always to an `AdaptiveSoftmax` on this embedding.
        div_val: Each cluster's vectors are narrower than those of the cluster before by this factor. With 1 there is
            one table, projected only if `d_embed` differs from `d_model`.

    Reference: A. Baevski, M. Auli, Adaptive input representations for neural language modeling, ICLR 2019.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        d_embed: int | None = None,
        cutoffs: tuple[int, ...] = (),
        div_val: int = 1,
    ) -> None:
        super().__init__()
        require_count("AdaptiveEmbedding", "vocab_size", vocab_size)
        require_count("AdaptiveEmbedding", "d_model", d_model)
        require_count("AdaptiveEmbedding", "div_val", div_val)
        self.vocab_size, self.d_model = vocab_size, d_model
        self.d_embed, self.div_val = d_model if d_embed is None else d_embed, div_val
        require_count("AdaptiveEmbedding", "d_embed", self.d_embed)
        self.clusters = _clusters(vocab_size, tuple(cutoffs))
        tables = self.clusters if div_val > 1 else [(0, vocab_size)]
        widths = [self.d_embed // div_val**i for i in range(len(tables))]
        if widths[-1] == 0:
            raise ValueError(
                f"AdaptiveEmbedding: d_embed={self.d_embed} divided by div_val={div_val} leaves no width for cluster "
                f"{widths.index(0)} of {len(widths)}; use fewer cutoffs or a smaller div_val."
            )
        projected = div_val > 1 or self.d_embed != d_model
        self.tables = nn.ParameterList(
            _normal(high - low, width) for (low, high), width in zip(tables, widths, strict=True)
        )
        self.projections = nn.ParameterList(_normal(d_model, width) for width in widths if projected)

    def forward(self, tokens: Tensor) -> Tensor:
        """(...,) tokens to (..., d_model)."""
        if len(self.tables) == 1:
            vectors = embedding(tokens, self.tables[0])
            total = linear(vectors, self.projections[0]) if len(self.projections) else vectors
        else:
            total = torch.stack([self._cluster(i, tokens) for i in range(len(self.tables))]).sum(dim=0)
        return total * math.sqrt(self.d_model)

    def _cluster(self, i: int, tokens: Tensor) -> Tensor:
        """The vectors of tokens in cluster i, zero for others: a selection would make the host wait for its size."""
        low, high = self.clusters[i]
        # A token outside the vocabulary is left out of range, so that the table refuses it.
        first, last = i == 0, i == len(self.clusters) - 1
        row = (tokens - low).clamp(min=None if first else 0, max=None if last else high - low - 1)
        inside = (tokens >= low) & (tokens < high)
        return linear(embedding(row, self.tables[i]) * inside.unsqueeze(-1), self.projections[i])

    def extra_repr(self) -> str:
        cutoffs = tuple(low for low, _ in self.clusters[1:])
        return f"{self.vocab_size}, {self.d_model}, d_embed={self.d_embed}, cutoffs={cutoffs}, div_val={self.div_val}"


class AdaptiveSoftmax(nn.Module):
    """The distribution of the next token, with the vectors of an embedding as weights.

    The head holds the words of the first cluster and one entry for each further cluster; a word of cluster i has the
    probability of that entry times its probability within the cluster. Scores of cluster i are (h P_i) E_iᵀ + b_i. E_i
    and P_i are read from the embedding, which keeps owning them, so they are one parameter with one gradient; P_0 is a
    parameter of its own if there are several clusters. Without cutoffs this is a plain softmax.

    Args:
        embedding: The embedding to share vectors with; it must be part of the same model.
        tie_weights: Take E_i from the embedding; otherwise the softmax has its own.
        tie_projections: Take P_i from the embedding (but P_0 of several); otherwise the softmax has its own.

    Reference: E. Grave et al., Efficient softmax approximation for GPUs, ICML 2017.
    """

    def __init__(self, embedding: AdaptiveEmbedding, *, tie_weights: bool = True, tie_projections: bool = True) -> None:
        super().__init__()
        self._shared = (embedding,)  # in a tuple: a submodule would be saved twice
        self.vocab_size, self.clusters = embedding.vocab_size, embedding.clusters
        self.tie_weights, self.tie_projections = tie_weights, tie_projections
        tail = len(self.clusters) - 1
        widths = [embedding.d_embed // embedding.div_val**i for i in range(tail + 1)]
        if not tie_weights:
            self.tables = nn.ParameterList(
                _normal(high - low, width) for (low, high), width in zip(self.clusters, widths, strict=True)
            )
        if not len(embedding.projections):
            free = 0
        elif not tie_projections:
            free = tail + 1
        else:
            free = 1 if tail else 0
        self.projections = nn.ParameterList(_normal(embedding.d_model, width) for width in widths[:free])
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(high - low)) for low, high in self.clusters)
        if tail:
            self.cluster_weight = _normal(tail, embedding.d_embed)
            self.cluster_bias = nn.Parameter(torch.zeros(tail))

    def table(self, i: int) -> Tensor:
        """E_i: the vectors of cluster i, (size, width)."""
        if not self.tie_weights:
            return self.tables[i]
        tables = self._shared[0].tables
        if len(tables) == len(self.clusters):
            return tables[i]
        low, high = self.clusters[i]
        return tables[0][low:high]

    def projection(self, i: int) -> Tensor | None:
        """P_i, (d_model, width); None for the identity."""
        if i < len(self.projections):
            return self.projections[i]
        shared = self._shared[0].projections
        return shared[min(i, len(shared) - 1)] if len(shared) else None

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The negative log-likelihood of each target in nats, in the order of the targets, in float32 at least.

        Scores of a further cluster are computed for the targets in that cluster only, where that saves time: on a
        device the host would have to wait to learn how many there are, so that up to `MOST_SCORES` all are computed.

        Args:
            hidden: (..., d_model).
            targets: (...,).
        """
        if hidden.shape[:-1] != targets.shape:
            raise ValueError(
                f"AdaptiveSoftmax: targets of shape {tuple(targets.shape)} do not fit hidden of shape "
                f"{tuple(hidden.shape)}; expected {tuple(hidden.shape[:-1])}."
            )
        rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        entry = flat
        for i, (low, _) in enumerate(self.clusters[1:]):
            entry = torch.where(flat >= low, self.clusters[0][1] + i, entry)
        head = self._head(rows)
        losses = -head.gather(1, entry.unsqueeze(1)).squeeze(1)
        for i, (low, high) in enumerate(self.clusters[1:], start=1):
            # The last cluster takes whatever lies above, so that a target outside the vocabulary is refused.
            inside = (flat >= low) & (flat < high) if high < self.vocab_size else flat >= low
            if _host_runs_ahead(rows) and len(rows) * (high - low) <= MOST_SCORES:
                chosen = self._tail(i, rows).gather(1, torch.where(inside, flat - low, 0).unsqueeze(1)).squeeze(1)
                losses = losses - torch.where(inside, chosen, 0.0)
                continue
            index = inside.nonzero().squeeze(1)
            within = self._tail(i, rows.index_select(0, index))
            chosen = within.gather(1, (flat.index_select(0, index) - low).unsqueeze(1)).squeeze(1)
            losses = losses.index_add(0, index, chosen, alpha=-1)
        return losses.view(targets.shape)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """(..., d_model) to the logarithms of all probabilities, (..., vocab_size), in float32 at least."""
        head = self._head(hidden)
        first = self.clusters[0][1]
        tails = [self._tail(i, hidden) + head[..., first + i - 1, None] for i in range(1, len(self.clusters))]
        return torch.cat([head[..., :first], *tails], dim=-1) if tails else head

    def _head(self, hidden: Tensor) -> Tensor:
        weight, bias = self.table(0), self.biases[0]
        if len(self.clusters) > 1:
            weight = torch.cat([weight, self.cluster_weight])
            bias = torch.cat([bias, self.cluster_bias])
        return self._log_softmax(hidden, self.projection(0), weight, bias)

    def _tail(self, i: int, hidden: Tensor) -> Tensor:
        return self._log_softmax(hidden, self.projection(i), self.table(i), self.biases[i])

    @staticmethod
    def _log_softmax(hidden: Tensor, projection: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
        if projection is not None:
            hidden = linear(hidden, projection.mT)
        scores = linear(hidden, weight, bias)
        return log_softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, tie_weights={self.tie_weights}, tie_projections={self.tie_projections}"


def _host_runs_ahead(tensor: Tensor) -> bool:
    """Whether asking for a number would make the host wait."""
    return tensor.device.type != "cpu"


def _clusters(vocab_size: int, cutoffs: tuple[int, ...]) -> list[tuple[int, int]]:
    bounds = (0, *cutoffs, vocab_size)
    if any(not isinstance(bound, int) or low >= bound for low, bound in pairwise(bounds)):
        raise ValueError(
            f"AdaptiveEmbedding: cutoffs must rise strictly between 0 and vocab_size={vocab_size}, got {cutoffs!r}."
        )
    return list(pairwise(bounds))


def _normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=INIT_STD))
