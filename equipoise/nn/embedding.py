"""Adaptive embedding and softmax: frequent words get wide vectors, rare ones narrow vectors; both share the tables.

Words are numbered by falling frequency. Cutoffs split the vocabulary in clusters; cluster i has vectors of width
d_embed / div_valⁱ and a projection to the width of the model.
"""

import math
from itertools import chain, pairwise, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, log_softmax

from equipoise._compat import inside_a_transform
from equipoise._errors import require_count
from equipoise.ops.likelihood import add_nll, nll
from equipoise.ops.taps import product_dtype
from equipoise.ops.words import lookup
from equipoise.ops.words.naive import vectors

INIT_STD = 0.01
# On a device, tables are filled up to multiples of this: matrix products are slow with rows of odd sizes.
FILLED = 16
# Scores of a cluster, of all targets together, up to which a device computes them for targets in other clusters too.
MOST_SCORES = 2**26

Product = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""What scores are made of: rows, their projection or None, weight and bias."""


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
        """(...,) tokens to (..., d_model).

        A token outside the vocabulary is refused; on a device, where nothing can be raised, it may become NaN.
        """
        scale = math.sqrt(self.d_model)
        if len(self.tables) == 1:
            found = embedding(tokens, self.tables[0])
            return (linear(found, self.projections[0]) if len(self.projections) else found) * scale
        if _host_runs_ahead(tokens):
            bounds = (*(low for low, _ in self.clusters), self.vocab_size)
            dtype = product_dtype(self.tables[0])
            side_by_side = lookup(tokens.reshape(-1), list(self.tables), bounds, scale=scale, dtype=dtype)
            return linear(side_by_side, torch.cat(list(self.projections), dim=1)).view(*tokens.shape, self.d_model)
        parts = [
            linear(vectors(tokens, table, *cluster, self.vocab_size), projection)
            for table, cluster, projection in zip(self.tables, self.clusters, self.projections, strict=True)
        ]
        return torch.stack(parts).sum(dim=0) * scale

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
        A target outside the vocabulary is refused; on a device, where nothing can be raised, its loss may be NaN
        instead.

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
        losses = self._without_waiting(rows, flat) if _host_runs_ahead(rows) else self._by_selection(rows, flat)
        return losses.view(targets.shape)

    def _by_selection(self, rows: Tensor, targets: Tensor) -> Tensor:
        entry = targets
        for i, (low, _) in enumerate(self.clusters[1:]):
            entry = torch.where(targets >= low, self.clusters[0][1] + i, entry)
        losses = -self._log_softmax(*self._head(rows)).gather(1, entry.unsqueeze(1)).squeeze(1)
        for i in range(1, len(self.clusters)):
            losses = self._add_selected(losses, i, rows, targets)
        return losses

    def _add_selected(self, losses: Tensor, i: int, rows: Tensor, targets: Tensor) -> Tensor:
        """Losses plus those within cluster i, whose scores are computed for its own targets only."""
        low, high = self.clusters[i]
        # The last cluster takes whatever lies above, so that a target outside the vocabulary is refused.
        inside = (targets >= low) & (targets < high) if high < self.vocab_size else targets >= low
        index = inside.nonzero().squeeze(1)
        within = self._log_softmax(*self._tail(i, rows.index_select(0, index)))
        chosen = within.gather(1, (targets.index_select(0, index) - low).unsqueeze(1)).squeeze(1)
        return losses.index_add(0, index, chosen, alpha=-1)

    def _without_waiting(self, rows: Tensor, targets: Tensor) -> Tensor:
        clusters = self.clusters
        sizes = [high - low for low, high in clusters]
        whole = [i for i in range(1, len(clusters)) if len(rows) * sizes[i] <= MOST_SCORES]
        tails = [self._tail(i, rows) for i in whole]
        weights, biases = self._head_parts()
        head, *others = _scores(
            rows,
            [self.projection(0), *(projection for _, projection, _, _ in tails)],
            [weights, *([weight] for _, _, weight, _ in tails)],
            [biases, *([bias] for _, _, _, bias in tails)],
        )
        bounds = (*(low for low, _ in clusters[1:]), self.vocab_size) if len(clusters) > 1 else ()
        losses = nll(head, targets, size=sizes[0] + len(clusters) - 1, bounds=bounds)
        for i, scores in zip(whole, others, strict=True):
            losses = add_nll(losses, scores, targets, first=clusters[i][0], size=sizes[i])
        for i in sorted(set(range(1, len(clusters))).difference(whole)):
            losses = self._add_selected(losses, i, rows, targets)
        return losses

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """(..., d_model) to the logarithms of all probabilities, (..., vocab_size), in float32 at least."""
        head = self._log_softmax(*self._head(hidden))
        first = self.clusters[0][1]
        tails = [
            self._log_softmax(*self._tail(i, hidden)) + head[..., first + i - 1, None]
            for i in range(1, len(self.clusters))
        ]
        return torch.cat([head[..., :first], *tails], dim=-1) if tails else head

    def _head(self, hidden: Tensor) -> Product:
        weights, biases = self._head_parts()
        weight, bias = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (weights, biases))
        return hidden, self.projection(0), weight, bias

    def _head_parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases of the first cluster's words and, if there are any, of the further clusters."""
        if len(self.clusters) == 1:
            return [self.table(0)], [self.biases[0]]
        return [self.table(0), self.cluster_weight], [self.biases[0], self.cluster_bias]

    def _tail(self, i: int, hidden: Tensor) -> Product:
        return hidden, self.projection(i), self.table(i), self.biases[i]

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


def _scores(
    rows: Tensor, projections: list[Tensor | None], weights: list[list[Tensor]], biases: list[list[Tensor]]
) -> list[Tensor]:
    """Scores of the same rows by several products in few launches; the parts of a weight stand one above the other.

    One launch makes all weights as products take them, one projects for all. There may be more scores than weights: see
    `FILLED`.
    """
    dtype = product_dtype(rows)
    given = [projection for projection in projections if projection is not None]
    joined = weights + biases
    sizes = [-(-sum(len(part) for part in parts) // FILLED) * FILLED for parts in joined]
    if given:
        joined = [*joined, [given[0] if len(given) == 1 else torch.cat(given, dim=1)]]
        sizes.append(len(given[0]))
    ready = _joined(joined, sizes, dtype)
    hidden, count = rows.to(dtype), len(weights)
    projected = [hidden] * count
    if given:
        projected = list((hidden @ ready[-1]).split([projection.shape[1] for projection in given], dim=1))
    return [linear(*product) for product in zip(projected, ready[:count], ready[count : 2 * count], strict=True)]


def _joined(groups: list[list[Tensor]], sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """The tensors of each group one after another, as one of this dtype; if that takes a copy, of these sizes."""
    if groups[0][0].dtype == dtype or torch.compiler.is_compiling() or inside_a_transform():
        return [(parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype) for parts in groups]
    tensors = [tensor for parts in groups for tensor in parts]
    return list(_Joined.apply(dtype, sizes, [len(parts) for parts in groups], *tensors))  # type: ignore[no-untyped-call]


class _Joined(torch.autograd.Function):
    """Casts and concatenations of all weights in one launch, and in one more for their gradients."""

    @staticmethod
    def forward(dtype: torch.dtype, sizes: list[int], counts: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        rest, places, sources, results = iter(tensors), [], [], []
        for size, count in zip(sizes, counts, strict=True):
            parts = [next(rest) for _ in range(count)]
            result = parts[0].new_empty((size, *parts[0].shape[1:]), dtype=dtype)
            results.append(result)
            filled = 0
            for part in chain(parts, repeat(parts[0])):  # filled up by anything finite that costs no launch
                places.append(result[filled : filled + len(part)])
                sources.append(part[: size - filled])
                filled += len(sources[-1])
                if filled == size:
                    break
        torch._foreach_copy_(places, sources)
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, ctx.counts, *tensors = inputs
        ctx.sizes, ctx.dtype = [len(tensor) for tensor in tensors], tensors[0].dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sizes, found = iter(ctx.sizes), []
        for grad, count in zip(grads, ctx.counts, strict=True):
            start = 0
            for size in (next(sizes) for _ in range(count)):
                found.append(None if grad is None else grad[start : start + size])
                start += size
        if torch.is_grad_enabled():
            return None, None, None, *(None if grad is None else grad.to(ctx.dtype) for grad in found)
        wide = [None if grad is None else torch.empty_like(grad, dtype=ctx.dtype) for grad in found]
        torch._foreach_copy_([grad for grad in wide if grad is not None], [grad for grad in found if grad is not None])
        return None, None, None, *wide


def _clusters(vocab_size: int, cutoffs: tuple[int, ...]) -> list[tuple[int, int]]:
    bounds = (0, *cutoffs, vocab_size)
    if any(not isinstance(bound, int) or low >= bound for low, bound in pairwise(bounds)):
        raise ValueError(
            f"AdaptiveEmbedding: cutoffs must rise strictly between 0 and vocab_size={vocab_size}, got {cutoffs!r}."
        )
    return list(pairwise(bounds))


def _normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=INIT_STD))
