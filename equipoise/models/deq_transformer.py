"""DEQ-Transformer: a language model whose only block, a Transformer layer with relative attention, is an equilibrium.

Reference: S. Bai, J. Z. Kolter, V. Koltun, Deep equilibrium models, NeurIPS 2019; the regularised variants are of
S. Bai, V. Koltun, J. Z. Kolter, Stabilizing equilibrium models by Jacobian regularization, ICML 2021.
"""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, relu
from torch.utils.checkpoint import checkpoint

from equipoise._errors import require_count, require_number, unknown_name
from equipoise._module import DEQ, Plan
from equipoise._scope import SolveScope, solve_constant
from equipoise._solution import Solution
from equipoise._stop import Stop
from equipoise.adjoints import Implicit, Unroll
from equipoise.models._sequence import stats_in_a_row
from equipoise.models.outputs import LMOutput
from equipoise.models.registry import register_model
from equipoise.nn.attention import Past, Positions, RelativeAttention, initialised
from equipoise.nn.dropout import AttentionDropout, SequenceDropout
from equipoise.nn.embedding import AdaptiveEmbedding, AdaptiveSoftmax
from equipoise.solvers import Anderson, Broyden, Picard

LAYER_NORM_EPS = 1e-5

Memory = tuple[Tensor, Tensor]
"""Equilibria (B, M, d) of the last positions of the streams, and their injections (B, M, 3d)."""

Inputs = tuple[Tensor, Positions, Past | None]
"""What the cell takes besides the state: injection, distances, keys and values of memory."""


def published_plan(forward: int, backward: int) -> Plan:
    """Anderson forward, Broyden backward, both to a relative residual of 1e-3 or so many steps."""
    adjoint = Implicit(solver=Broyden(), stop=Stop(rtol=1e-3, max_steps=backward))
    return Plan(Anderson(), adjoint, Stop(rtol=1e-3, max_steps=forward))


@dataclass(frozen=True)
class DEQTransformerConfig:
    """Settings of a DEQ-Transformer.

    Attributes:
        vocab_size: Number of words.
        d_model: Width of a position; even, a multiple of `heads`.
        heads: Attention heads.
        d_inner: Width of the feed-forward part.
        d_embed: Width of word vectors; `d_model` if None.
        cutoffs: Where clusters of the adaptive softmax begin; none for a full softmax.
        div_val: Factor by which word vectors get narrower from cluster to cluster.
        tie_weights: The softmax uses the word vectors of the embedding.
        dropout: On embeddings, outputs, positions, and twice in the feed-forward part; masks are shared over time.
        attention_dropout: On attention maps.
        memory_length: Positions of earlier segments to remember; 0 for none. A model's attribute of this name may be
            changed at any time.
        local_size: Positions that a query sees, itself included; None for all.
        pre_norm: Layer normalisation before attention and feed-forward part, instead of after them.
        standard_residual: With `pre_norm`, add the feed-forward part to its input before normalisation, as is usual;
            the published model adds it to the normalised one.
        weight_norm: Weight normalisation of all matrices of the block but the injection.
        init_std: Standard deviation of the block's initial weights (of v, with g = ‖v‖), at most 1/√fan-in. Word
            vectors and their projections have 0.01.
        ffn_chunks: Pieces of the feed-forward width; if more than one, each is recomputed in the backward pass, so
            that the graph holds none of the `d_inner` activations.
        chunk_size: Solve a segment in chunks of so many positions, one after the other, with gradients across them;
            None for all at once. Equilibria, gradients and dropout masks are those of the segment as a whole.
        plan: How to solve and differentiate.
    """

    vocab_size: int
    d_model: int = 128
    heads: int = 4
    d_inner: int = 512
    d_embed: int | None = None
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    tie_weights: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    memory_length: int = 0
    local_size: int | None = None
    pre_norm: bool = False
    standard_residual: bool = False
    weight_norm: bool = True
    init_std: float = 0.05
    ffn_chunks: int = 1
    chunk_size: int | None = None
    plan: Plan = published_plan(30, 35)

    def __post_init__(self) -> None:
        # Embedding, attention and dropout check what is theirs.
        require_count("DEQTransformerConfig", "d_inner", self.d_inner)
        require_count("DEQTransformerConfig", "memory_length", self.memory_length, low=0)
        require_count("DEQTransformerConfig", "ffn_chunks", self.ffn_chunks)
        if self.chunk_size is not None:
            require_count("DEQTransformerConfig", "chunk_size", self.chunk_size)
        require_number("DEQTransformerConfig", "dropout", self.dropout, low=0.0, high=1.0)
        require_number("DEQTransformerConfig", "attention_dropout", self.attention_dropout, low=0.0, high=1.0)
        if self.ffn_chunks > self.d_inner:
            raise ValueError(
                f"DEQTransformerConfig: ffn_chunks={self.ffn_chunks} exceeds d_inner={self.d_inner}; use fewer chunks."
            )
        if self.standard_residual and not self.pre_norm:
            raise ValueError("DEQTransformerConfig: standard_residual concerns pre_norm=True only; set that as well.")
        if not isinstance(self.plan, Plan):
            raise TypeError(f"DEQTransformerConfig: plan must be a Plan(...), got {type(self.plan).__name__}.")

    def replace(self, **changes: Any) -> "DEQTransformerConfig":
        """A config with some settings changed."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise unknown_name("setting of a DEQ-Transformer", name, known)
        return dataclasses.replace(self, **changes)


class FeedForward(nn.Module):
    """a ↦ D2(W_2 D1(relu(W_1 a + b_1)) + b_2), with variational dropout."""

    def __init__(self, config: DEQTransformerConfig) -> None:
        super().__init__()
        settings = config.init_std, config.weight_norm
        self.widen = initialised(nn.Linear(config.d_model, config.d_inner), *settings)
        self.narrow = initialised(nn.Linear(config.d_inner, config.d_model), *settings)
        self.inner_dropout, self.dropout = SequenceDropout(config.dropout), SequenceDropout(config.dropout)
        self.chunks = config.ffn_chunks

    def forward(self, a: Tensor) -> Tensor:
        if self.chunks > 1 and torch.is_grad_enabled():
            return self.dropout(self._recomputed(a))
        return self.dropout(self.narrow(self.inner_dropout(relu(self.widen(a)))))

    def _recomputed(self, a: Tensor) -> Tensor:
        """Piece by piece over the inner width, each evaluated again in the backward pass."""
        # Weights and mask are taken here: the backward pass may come when the scope of the solve is closed.
        widen, narrow = self.widen.weight.chunk(self.chunks), self.narrow.weight.chunk(self.chunks, dim=1)
        mask = self._mask(a)
        masks = [None] * len(widen) if mask is None else mask.chunk(self.chunks, dim=-1)
        total = self.narrow.bias
        for piece in zip(widen, self.widen.bias.chunk(self.chunks), narrow, masks, strict=True):
            total = total + checkpoint(_piece, a, *piece, use_reentrant=False, preserve_rng_state=False)
        return total

    def _mask(self, a: Tensor) -> Tensor | None:
        """The dropout mask of the inner layer, (B, 1, d_inner); None if nothing is dropped."""
        dropout = self.inner_dropout
        if not dropout.training or dropout.p == 0:
            return None
        return solve_constant(dropout, a.new_empty(()).expand(a.shape[0], 1, self.widen.out_features))


def _piece(a: Tensor, widen: Tensor, bias: Tensor, narrow: Tensor, mask: Tensor | None) -> Tensor:
    inner = relu(linear(a, widen, bias))
    return linear(inner if mask is None else inner * mask.to(inner.dtype), narrow)


class _MapDropout(AttentionDropout):
    """Dropout of attention maps whose mask may be that of a longer segment, of which the map is some rows.

    A mask (B, heads, T, M + T) serves queries that end at any position: the number of keys tells which rows are theirs.
    """

    def reserve(self, weights: Tensor) -> None:
        """Draw, in the scope of a solve, the mask of a map shaped like `weights`."""
        if self.training and self.p > 0:
            solve_constant(self, weights)

    def forward(self, weights: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return weights
        mask = solve_constant(self, weights)
        keys = weights.shape[-1]
        end = keys - (mask.shape[-1] - mask.shape[-2])
        return weights * mask[..., end - weights.shape[-2] : end, :keys].to(weights.dtype)


class TransformerCell(nn.Module):
    """The layer f(z; u, z₀, u₀): relative attention and a feed-forward part, normalised without scale and shift.

    After normalisation of each sum (default), with A the attention and F the feed-forward part:

        a = LN(z + A(z)),    f = LN(a + F(a))

    or before:

        a = z + A(LN(z)),    f = LN(a) + F(LN(a))        (with `standard_residual`, f = a + F(LN(a)))
    """

    def __init__(self, config: DEQTransformerConfig) -> None:
        super().__init__()
        self.attention = RelativeAttention(
            config.d_model,
            config.heads,
            local_size=config.local_size,
            dropout=config.attention_dropout,
            position_dropout=config.dropout,
            weight_norm=config.weight_norm,
            init_std=config.init_std,
        )
        self.attention.map_dropout = _MapDropout(config.attention_dropout)
        self.dropout = SequenceDropout(config.dropout)
        self.feed_forward = FeedForward(config)
        self.pre_norm, self.standard_residual = config.pre_norm, config.standard_residual

    def initial_state(self, injection: Tensor, positions: Positions, past: Past | None) -> Tensor:
        """Zeros in the dtype of the parameters: under autocast the injection's is a lower one."""
        bias = self.attention.content_bias
        return torch.zeros((*injection.shape[:2], self.attention.d_model), dtype=bias.dtype, device=injection.device)

    def past(self, memory: Memory | None) -> Past | None:
        """Keys and values of memory: constant during a solve, so computed before it."""
        if memory is None:
            return None
        states, injections = memory
        return self.attention.past(_norm(states) if self.pre_norm else states, injections)

    def forward(self, z: Tensor, injection: Tensor, positions: Positions, past: Past | None) -> Tensor:
        """f(z), (B, T, d), for an injection (B, T, 3d)."""
        attended = self.attention(_norm(z) if self.pre_norm else z, injection, positions, past)
        a = z + self.dropout(attended)
        if not self.pre_norm:
            a = _norm(a)
            return _norm(a + self.feed_forward(a))
        normed = _norm(a)
        return (a if self.standard_residual else normed) + self.feed_forward(normed)


def _norm(x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS)


class DEQTransformer(nn.Module):
    """A language model: embedding, an equilibrium of one Transformer layer, adaptive softmax.

    Since f is causal, a position's equilibrium depends on earlier ones only. So segments can be processed one after
    another, or token by token (`step`), with the equilibria of earlier positions as memory, and give what one long
    segment would, as long as `memory_length` (and `local_size`) reach.

    To shard with FSDP2, apply `fully_shard` to the model, not to its cell: memory is projected outside of the solve.

    Args:
        config: Settings.
    """

    def __init__(self, config: DEQTransformerConfig) -> None:
        super().__init__()
        self.config, self.memory_length = config, config.memory_length
        self.embedding = AdaptiveEmbedding(
            config.vocab_size, config.d_model, config.d_embed, config.cutoffs, config.div_val
        )
        self.embedding_dropout = SequenceDropout(config.dropout)
        self.injection = initialised(nn.Linear(config.d_model, 3 * config.d_model), config.init_std, False)
        self.deq = _equilibrium(TransformerCell(config), config.plan)
        self.output_dropout = SequenceDropout(config.dropout)
        self.softmax = AdaptiveSoftmax(self.embedding, tie_weights=config.tie_weights)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, memory: Memory | None = None, **options: Any
    ) -> LMOutput:
        """Losses of the targets, or log-probabilities of all words if there are none.

        Args:
            tokens: (B, T).
            targets: (B, T), the tokens to predict.
            memory: From the previous segment of the same streams; None at their start.
            **options: Of the solve: `z0`, `context`, `trace`, `collect`; not with chunks.
        """
        inputs = self.inputs(tokens, memory)
        solution = self._solve(*inputs, options)
        hidden, logits, losses = self.readout(solution.value, targets)
        return LMOutput(logits, losses, self.remember(memory, solution.value, inputs[0]), hidden, solution)

    def inputs(self, tokens: Tensor, memory: Memory | None = None) -> Inputs:
        """What the cell takes besides the state; each call draws dropout masks of its own."""
        self._check(tokens, memory)
        injection = self.injection(self.embedding_dropout(self.embedding(tokens)))
        remembered = 0 if memory is None else memory[0].shape[1]
        cell: Any = self.deq.cell
        return injection, cell.attention.positions(tokens.shape[1], remembered), cell.past(memory)

    def _solve(self, injection: Tensor, positions: Positions, past: Past | None, options: dict[str, Any]) -> Solution:
        chunk, (batch, length) = self.config.chunk_size, injection.shape[:2]
        if chunk is None or length <= chunk:
            return self.deq(injection, positions, past, **options)
        if options:
            raise ValueError(f"DEQTransformer: {', '.join(sorted(options))} cannot be used with chunk_size={chunk}.")
        cell: Any = self.deq.cell
        distances, blocked = positions
        before, solutions, end = blocked.shape[1] - length, [], 0
        with SolveScope():  # the same masks and weights in all chunks
            like = cell.attention.content_bias.new_empty(())
            cell.attention.map_dropout.reserve(like.expand(batch, self.config.heads, *blocked.shape))
            for piece in injection.split(chunk, dim=1):
                start, end = end, end + piece.shape[1]
                keys = before + end
                # The nearest `keys` distances; the column before them meets masked pairs only.
                near = distances[..., distances.shape[-1] - keys - 1 :], blocked[start:end, :keys]
                solutions.append(self.deq(piece, near, past))
                if end < length:
                    past = _extended(past, cell.past((solutions[-1].value, piece)))
        return _joined(solutions)

    def readout(self, z: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Features, and log-probabilities or losses, of a state (B, T, d): the equilibrium or any other."""
        hidden = self.output_dropout(z)
        if targets is None:
            return hidden, self.softmax.log_probabilities(hidden), None
        return hidden, None, self.softmax(hidden, targets)

    def remember(self, memory: Memory | None, z: Tensor, injection: Tensor) -> Memory | None:
        """The memory for the next segment: the last `memory_length` positions, detached."""
        if self.memory_length == 0:
            return None
        kept = []
        for old, new in zip(memory or (None, None), (z, injection), strict=True):
            latest, count = new.detach()[:, -self.memory_length :], self.memory_length - new.shape[1]
            if old is None or count <= 0 or old.shape[1] == 0:
                dtype = new.dtype if old is None else torch.promote_types(old.dtype, new.dtype)
                kept.append(latest.to(dtype, copy=True))
            else:
                kept.append(torch.cat([old.detach()[:, -count:], latest], dim=1))
        return kept[0], kept[1]

    @torch.no_grad()
    def step(self, tokens: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory | None]:
        """Read one token per stream and predict the next: only the new position is solved for.

        Args:
            tokens: (B,).
            memory: From the step, or the segment, before.

        Returns:
            Log-probabilities (B, vocab_size), and the memory for the next step.
        """
        if tokens.dim() != 1:
            raise ValueError(
                f"DEQTransformer.step: tokens must be (B,), one per stream; got shape {tuple(tokens.shape)}. "
                "Segments are for forward()."
            )
        output = self(tokens[:, None], memory=memory)
        return output.logits[:, 0], output.memory

    def explicit(self, depth: int, checkpoint: bool = False) -> "DEQTransformer":
        """The weight-tied network of `depth` such layers, from z = 0, with ordinary backpropagation.

        It has this model's parameters, the same tensors, but train and eval mode of its own, and takes a segment as a
        whole. Its memory is the output of the last layer, seen by all of them: not what one long segment would give,
        unless it is deep enough to be at the equilibrium.

        Args:
            depth: Number of layers.
            checkpoint: Recompute each layer in the backward pass.
        """
        require_count("DEQTransformer.explicit", "depth", depth)
        kept: dict[int, Any] = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        twin = copy.deepcopy(self, kept)
        twin.config = self.config.replace(chunk_size=None)
        stop = Stop(rtol=0, max_steps=depth, select="last")
        twin.deq.plan, twin.deq.eval_plan = Plan(Picard(), Unroll(checkpoint=checkpoint), stop), None
        return twin

    def _check(self, tokens: Tensor, memory: Memory | None) -> None:
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"DEQTransformer: tokens must be integers of shape (B, T), got {tokens.dtype} of shape "
                f"{tuple(tokens.shape)}."
            )
        if memory is None:
            return
        d = self.config.d_model
        shapes = [tuple(part.shape) for part in memory]
        batch, length = tokens.shape[0], shapes[0][1] if len(shapes[0]) == 3 else 0
        if shapes != [(batch, length, d), (batch, length, 3 * d)]:
            raise ValueError(
                f"DEQTransformer: memory has shapes {shapes}; expected (B, M, {d}) and (B, M, {3 * d}), B = {batch}, "
                "as returned for the segment before. Pass memory=None at the start of streams."
            )


def _extended(past: Past | None, new: Past) -> Past:
    """Keys and values of the past followed by new ones."""
    if past is None:
        return new
    return torch.cat([past[0], new[0]], dim=2), torch.cat([past[1], new[1]], dim=2)


def _joined(solutions: list[Solution]) -> Solution:
    """One solution from those of chunks; it has no problem, and no statistics of the backward pass."""
    stats = stats_in_a_row([solution.stats for solution in solutions])
    return Solution(torch.cat([solution.value for solution in solutions], dim=1), stats)


def _equilibrium(cell: TransformerCell, plan: Plan) -> DEQ:
    # The injection and the memory belong to streams, distances to none.
    return DEQ(cell, solver=plan.solver, adjoint=plan.adjoint, stop=plan.stop, in_dims=(0, None, 0))


WT103_VOCABULARY = 267_735

_WT103 = DEQTransformerConfig(
    WT103_VOCABULARY,
    d_model=700,
    heads=10,
    d_inner=48_000,
    cutoffs=(20_000, 40_000, 200_000),
    div_val=4,
    dropout=0.05,
    memory_length=150,
    plan=published_plan(30, 35),
)


@register_model
def deq_transformer_wt103(**overrides: Any) -> DEQTransformer:
    """The WikiText-103 model with adaptive embedding: 97.7 M parameters."""
    return DEQTransformer(_WT103.replace(**overrides))


_WT103_REG = _WT103.replace(dropout=0.06, attention_dropout=0.01, memory_length=300, plan=published_plan(12, 13))


@register_model
def deq_transformer_wt103_reg(**overrides: Any) -> DEQTransformer:
    """The WikiText-103 model for training with a Jacobian penalty: few solver steps, longer memory."""
    return DEQTransformer(_WT103_REG.replace(**overrides))


_WT103_PRELN_REG = _WT103_REG.replace(pre_norm=True, plan=published_plan(14, 14))


@register_model
def deq_transformer_wt103_preln_reg(**overrides: Any) -> DEQTransformer:
    """The regularised WikiText-103 model with normalisation before attention and feed-forward part."""
    return DEQTransformer(_WT103_PRELN_REG.replace(**overrides))


_SMALL = _WT103.replace(d_model=500, d_inner=2500, cutoffs=(), div_val=1)


@register_model
def deq_transformer_small(**overrides: Any) -> DEQTransformer:
    """4.5 M parameters beside a full embedding; width and inner width were solved from published parameter counts."""
    return DEQTransformer(_SMALL.replace(**overrides))


_MEDIUM = _WT103.replace(d_model=480, d_inner=42_800, cutoffs=(), div_val=1)


@register_model
def deq_transformer_medium(**overrides: Any) -> DEQTransformer:
    """43 M parameters beside a full embedding; width and inner width were solved from published parameter counts."""
    return DEQTransformer(_MEDIUM.replace(**overrides))


_COPY_MEMORY = DEQTransformerConfig(
    10,
    d_model=32,
    heads=4,
    d_inner=76,
    tie_weights=False,
    weight_norm=False,
    init_std=0.2,  # with smaller initial weights the loss never leaves its plateau
    plan=Plan(Anderson(), Implicit(stop=Stop(rtol=1e-4, max_steps=30)), Stop(rtol=1e-4, max_steps=30)),
)


@register_model
def deq_transformer_copy_memory(**overrides: Any) -> DEQTransformer:
    """The model of the copy-memory task: 14,006 parameters."""
    return DEQTransformer(_COPY_MEMORY.replace(**overrides))
