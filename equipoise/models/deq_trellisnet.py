"""DEQ-TrellisNet: a gated temporal convolution iterated to its equilibrium.

The layer, on a segment of T steps with inputs x, kernel size k and dilation s:

    u   = conv_k(x)                                   injection, computed once
    pre = u + conv_{k, dilation s}(D·h)               D: hidden dropout, one mask per solve
    i, o, g, φ = split(pre) → σ, σ, tanh, σ
    c'_t = φ_t c_{t−s} + i_t g_t,   h'_t = o_t tanh(c'_t)

`form="full"` is the published state [h; c]. At its root c is a linear recurrence in t, so `form="eliminated"` runs
that recurrence inside f and leaves h as the only unknown: same root, same gradients, half the state, and memory crosses
the whole segment in one evaluation instead of s steps.

Reference: S. Bai, J. Z. Kolter, V. Koltun, Trellis networks for sequence modeling, ICLR 2019; Deep equilibrium models,
NeurIPS 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from equipoise._errors import require_count, require_number, unknown_name
from equipoise._module import DEQ, Plan
from equipoise._scope import SolveScope, solve_constant
from equipoise._solution import Solution
from equipoise._stop import Stop
from equipoise._tree import register_record
from equipoise.adjoints import Implicit
from equipoise.models._scan import neighbour
from equipoise.models._sequence import (
    check_memory,
    check_tokens,
    read_out,
    settings,
    stats_in_a_row,
    token_losses,
)
from equipoise.models.outputs import LMOutput
from equipoise.models.registry import register_model
from equipoise.nn.dropout import SequenceDropout
from equipoise.ops import drop_taps, gather_taps, normalised_rows, trellis_cell
from equipoise.ops.taps import product_dtype
from equipoise.solvers import Anderson

FORMS = ("eliminated", "full")

Memory = dict[str, Tensor]

# Plain iteration diverges after a few epochs of training; Anderson holds.
PLAN = Plan(
    solver=Anderson(memory=5),
    adjoint=Implicit(solver=Anderson(memory=5), stop=Stop(rtol=1e-3, max_steps=40)),
    stop=Stop(rtol=1e-3, max_steps=40),
)


# The layer


class _PastTaps(nn.Module):
    """DropConnect on the taps of a causal convolution that look back: one draw per solve, for all systems alike."""

    shared_by_systems = True
    draws_by_shape = True  # begin_solve looks at no value of its argument

    def __init__(self, p: float, past: int) -> None:
        super().__init__()
        self.p, self.past = p, past

    def begin_solve(self, x: Tensor) -> Tensor:
        return torch.rand((x.shape[0], self.past), device=x.device, dtype=torch.float32) >= self.p

    def forward(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.training or self.p == 0 or self.past == 0:
            return weight.to(dtype)
        return drop_taps(weight, solve_constant(self, weight), 1 / (1 - self.p), dtype=dtype)


class CausalConv(nn.Module):
    """A causal convolution over (B, T, d) as one matrix product, with DropConnect and weight normalisation.

    The weight is that of `nn.Conv1d` with its last two axes exchanged and joined: (out, k · in), the oldest tap first.
    With normalisation it is g · v / ‖v‖ row by row, v after DropConnect; it is computed, and under autocast rounded,
    once per solve.

    Args:
        in_size: Features of the input.
        out_size: Features of the output.
        kernel_size: Taps, k.
        dilation: Steps between taps.
        dropconnect: Probability of dropping a weight of a tap other than the current one.
        weight_norm: Whether length and direction of a row are parameters of their own.
    """

    weight_g: nn.Parameter | None
    draws_by_shape = True  # begin_solve looks at no value of its argument

    def __init__(
        self,
        in_size: int,
        out_size: int,
        kernel_size: int,
        *,
        dilation: int = 1,
        dropconnect: float = 0.0,
        weight_norm: bool = True,
    ) -> None:
        super().__init__()
        self.kernel_size, self.dilation = kernel_size, dilation
        self.weight_v = nn.Parameter(torch.empty(out_size, kernel_size * in_size))
        self.register_parameter("weight_g", nn.Parameter(torch.empty(out_size, 1)) if weight_norm else None)
        self.bias = nn.Parameter(torch.empty(out_size))
        self.drop = _PastTaps(dropconnect, (kernel_size - 1) * in_size)
        self.reset_parameters()

    @property
    def reach(self) -> int:
        """Steps of history that a segment needs before it."""
        return (self.kernel_size - 1) * self.dilation

    @property
    def weight(self) -> Tensor:
        """The effective weight, that of the solve under way if there is one."""
        if torch.compiler.is_compiling():  # as good, and no graph break unless there is DropConnect
            return self.begin_solve(self.weight_v)
        return solve_constant(self, self.weight_v)

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.01) -> None:
        """Weight and bias from N(0, std); the effective weight, so g = ‖v‖."""
        self.weight_v.normal_(0, std)
        self.bias.normal_(0, std)
        if self.weight_g is not None:
            self.weight_g.copy_(torch.linalg.vector_norm(self.weight_v, dim=1, keepdim=True))

    def begin_solve(self, x: Tensor) -> Tensor:
        """The effective weight, in the dtype that products with it are computed in."""
        dtype = product_dtype(self.weight_v)
        if self.weight_g is None:
            return self.drop(self.weight_v, dtype)
        v = self.drop(self.weight_v, self.weight_v.dtype)
        # The bound matters only for a row whose kept entries are all zero.
        return normalised_rows(v, self.weight_g, floor=1e-12, dtype=dtype)

    def product(self, x: Tensor, before: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """The convolution of x (B, T, in), `before` (B, reach, in) it, with another bias (out,) than its own, or none.

        A mask (B, 1, in) is multiplied with both.
        """
        rows = gather_taps(x, before, mask, kernel_size=self.kernel_size, dilation=self.dilation)
        return F.linear(rows, self.weight, bias)

    def forward(self, x: Tensor, before: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `product`."""
        return self.product(x, before, mask, self.bias)


class TrellisCell(nn.Module):
    """The layer f: on h of shape (B, T, H) in the eliminated form, on the pair (h, c) in the full one.

    Its inputs are the injection u (B, T, 4H), with the layer's bias in it, and the history of both parts: h0
    (B, (k − 1)s, H) and c0 (B, s, H). It takes any derivatives, and torch.func (`Implicit(any_order=True)`).
    """

    def __init__(self, config: "DEQTrellisNetConfig") -> None:
        super().__init__()
        size = config.state_size
        self.form = config.form
        self.recurrent = CausalConv(
            size,
            4 * size,
            config.kernel_size,
            dilation=config.dilation,
            dropconnect=config.dropconnect,
            weight_norm=config.weight_norm,
        )
        self.drop = SequenceDropout(config.dropout_hidden)

    def initial_state(self, u: Tensor, h0: Tensor, c0: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Zeros."""
        zeros = h0.new_zeros((*u.shape[:2], u.shape[2] // 4))
        return zeros if self.form == "eliminated" else (zeros, torch.zeros_like(zeros))

    def step(self, state: Any, u: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor]:
        """The new h and c, in either form; an eliminated c in the dtype of products."""
        if self.form == "eliminated":
            new_h, new_c = trellis_cell(self._products(state, h0), c0, u, dtype=state.dtype)
            assert new_c is not None
            return new_h, new_c
        h, c = state
        i, o, g, phi = (self._products(h, h0) + u).chunk(4, dim=-1)
        drive = i.sigmoid() * g.tanh()
        new_c = torch.addcmul(drive, phi.sigmoid(), neighbour(c, c0, False).to(drive.dtype))
        new_h = o.sigmoid() * new_c.tanh()
        return new_h.to(h.dtype), new_c.to(h.dtype)

    def forward(self, state: Any, u: Tensor, h0: Tensor, c0: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.form == "eliminated":
            return trellis_cell(self._products(state, h0), c0, u, dtype=state.dtype, need_c=False)[0]
        return self.step(state, u, h0, c0)

    def _products(self, h: Tensor, h0: Tensor) -> Tensor:
        return self.recurrent.product(h, h0, self.drop.mask(h))


# The model


@dataclass(frozen=True)
class DEQTrellisNetConfig:
    """Settings of `DEQTrellisNet`; dropouts are probabilities.

    Attributes:
        vocab_size: Number of words.
        embedding_size: Width of the embedding, and of the part of h that is read out (the two are tied).
        hidden_size: Width of the rest of h; the state has embedding_size + hidden_size features.
        kernel_size: Taps of both convolutions.
        dilation: Steps between taps of the recurrent convolution.
        form: "eliminated" (state h) or "full" (state (h, c)); same root, same gradients.
        weight_norm: Normalise the weights of both convolutions.
        dropout: Variational dropout of the output.
        dropout_in: Variational dropout of the embedded inputs.
        dropout_hidden: Variational dropout of h inside the layer, one mask per solve.
        dropout_words: Dropout of whole words: all their occurrences in a segment.
        dropconnect: DropConnect on the past taps of both convolutions, one draw per forward.
        carry_inputs: Begin a segment's injection with the last inputs of the previous one instead of zeros.
        chunk_size: Solve a segment in chunks of so many steps, one after the other, with gradients across them.
        init_std: Standard deviation of initial weights and biases of both convolutions.
        init_embedding: Initial embeddings are uniform within ± this.
        plan: How to solve and differentiate.
        eval_plan: The plan in eval mode; that of training if None.
    """

    vocab_size: int = 10_000
    embedding_size: int = 400
    hidden_size: int = 1000
    kernel_size: int = 2
    dilation: int = 1
    form: str = "eliminated"
    weight_norm: bool = True
    dropout: float = 0.0
    dropout_in: float = 0.0
    dropout_hidden: float = 0.0
    dropout_words: float = 0.0
    dropconnect: float = 0.0
    carry_inputs: bool = True
    chunk_size: int | None = None
    init_std: float = 0.01
    init_embedding: float = 0.1
    plan: Plan = PLAN
    eval_plan: Plan | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in ("vocab_size", "embedding_size", "kernel_size", "dilation"):
            require_count(name, field, getattr(self, field))
        require_count(name, "hidden_size", self.hidden_size, low=0)
        if self.chunk_size is not None:
            require_count(name, "chunk_size", self.chunk_size)
        for field in ("dropout", "dropout_in", "dropout_hidden", "dropout_words", "dropconnect"):
            require_number(name, field, getattr(self, field), low=0.0, high=1.0)
        for field in ("init_std", "init_embedding"):
            require_number(name, field, getattr(self, field), low=0.0)
        if self.form not in FORMS:
            raise unknown_name("form of the TrellisNet layer", self.form, FORMS)
        if not isinstance(self.plan, Plan):
            raise TypeError(f"{name}: plan must be a Plan(...), got {type(self.plan).__name__}.")

    @property
    def state_size(self) -> int:
        """H, the features of h and of c."""
        return self.embedding_size + self.hidden_size


@dataclass
class TrellisOutput(LMOutput):
    """`LMOutput` with what the regularisers of TrellisNet need.

    Attributes:
        features: (B, T, embedding_size), `hidden` before dropout.
        auxiliary: (A, B, T) losses read off intermediate layers of an explicit twin; None if not asked for.
    """

    features: Tensor | None = None
    auxiliary: Tensor | None = None


register_record(TrellisOutput, ("logits", "losses", "memory", "hidden", "solution", "features", "auxiliary"), ())


class DEQTrellisNet(nn.Module):
    """A language model whose features are the equilibrium of a TrellisNet layer.

    Args:
        config: Settings.
    """

    def __init__(self, config: DEQTrellisNetConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.injection = CausalConv(
            config.embedding_size,
            4 * config.state_size,
            config.kernel_size,
            dropconnect=config.dropconnect,
            weight_norm=config.weight_norm,
        )
        self.deq = DEQ(
            TrellisCell(config),
            solver=config.plan.solver,
            adjoint=config.plan.adjoint,
            stop=config.plan.stop,
            eval_plan=config.eval_plan,
        )
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.drop_in, self.drop_out = SequenceDropout(config.dropout_in), SequenceDropout(config.dropout)
        self.reset_parameters()

    @property
    def cell(self) -> TrellisCell:
        """The layer f."""
        return self.deq.cell  # type: ignore[return-value]

    def reset_parameters(self) -> None:
        """Initialise as the settings say."""
        nn.init.uniform_(self.embedding.weight, -self.config.init_embedding, self.config.init_embedding)
        nn.init.zeros_(self.output_bias)
        self.injection.reset_parameters(self.config.init_std)
        self.cell.recurrent.reset_parameters(self.config.init_std)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, memory: Memory | None = None, **options: Any
    ) -> TrellisOutput:
        """Features, and logits or losses, of a segment.

        Args:
            tokens: (B, T) word numbers.
            targets: (B, T) words to predict.
            memory: What the previous segment of the same streams returned; None at their start.
            **options: Of the solve: `z0`, `context`, `trace`, `collect`; not with chunks.
        """
        u, h0, c0, inputs = self.prepare(tokens, targets, memory)
        h, c, solution = self._solve(u, h0, c0, options)
        return self.answer(h, targets, self.remember(h0, h, c0, c, inputs), solution)

    def prepare(
        self, tokens: Tensor, targets: Tensor | None, memory: Memory | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inputs of the layer: injection, history of h and of c; and the last embedded inputs, to carry on."""
        check_tokens("DEQTrellisNet", tokens, targets)
        batch, config = tokens.shape[0], self.config
        embedded = self._embed(tokens)
        if memory is None:
            memory = self.empty_memory(batch, embedded)
        check_memory("DEQTrellisNet", batch, *memory.values())
        before = (
            memory["inputs"]
            if config.carry_inputs
            else embedded.new_zeros(batch, config.kernel_size - 1, config.embedding_size)
        )
        bias = self.injection.bias + self.cell.recurrent.bias  # here once, in f at every step
        u = self.injection.product(embedded, before, self.drop_in.mask(embedded), bias)
        return u, memory["h"], memory["c"], _last(before, embedded)

    def empty_memory(self, batch: int, like: Tensor) -> Memory:
        """The memory at the start of streams: zeros.

        Args:
            batch: Number of streams.
            like: A tensor of the device and dtype wanted.
        """
        config = self.config
        memory = {
            "h": like.new_zeros(batch, self.cell.recurrent.reach, config.state_size),
            "c": like.new_zeros(batch, config.dilation, config.state_size),
        }
        if config.carry_inputs:
            memory["inputs"] = like.new_zeros(batch, config.kernel_size - 1, config.embedding_size)
        return memory

    def remember(self, h0: Tensor, h: Tensor, c0: Tensor, c: Tensor, inputs: Tensor) -> Memory:
        """The memory after a segment: the last steps of h and c, and of the inputs if wanted; detached."""
        kept = {"h": _last(h0.detach(), h.detach(), copy=True), "c": _last(c0.detach(), c.detach(), copy=True)}
        if self.config.carry_inputs:
            kept["inputs"] = inputs.detach().clone()
        return kept

    def answer(
        self, h: Tensor, targets: Tensor | None, memory: Memory, solution: Solution | None = None
    ) -> TrellisOutput:
        """The output from the states of a segment."""
        features = self.read(h)
        hidden = self.drop_out(features)
        logits, losses = read_out(hidden, self.embedding.weight, self.output_bias, targets)
        return TrellisOutput(logits, losses, memory, hidden, solution, features)

    def read(self, h: Tensor) -> Tensor:
        """The part of h that the output layer sees."""
        return h[..., self.config.hidden_size :]

    def explicit(
        self, depth: int, checkpoint: bool | int = False, auxiliary_every: int | None = None
    ) -> "ExplicitTrellisNet":
        """The weight-tied TrellisNet of `depth` layers, with this model's parameters.

        Args:
            depth: Number of layers.
            checkpoint: Recompute activations in the backward pass, layer by layer (True) or so many layers at a time.
            auxiliary_every: Read losses off every so many layers, the last one excepted.
        """
        return ExplicitTrellisNet(self, depth, checkpoint, auxiliary_every)

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        p = self.config.dropout_words
        if not self.training or p == 0:
            return embedded
        kept = torch.rand(self.config.vocab_size, device=tokens.device, dtype=torch.float32) >= p
        return embedded * (kept.to(embedded.dtype) / (1 - p))[tokens][..., None]

    def _solve(self, u: Tensor, h0: Tensor, c0: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Solution]:
        chunk = self.config.chunk_size
        if chunk is None or u.shape[1] <= chunk:
            return self._equilibrium(u, h0, c0, False, options)
        if options:
            raise ValueError(f"DEQTrellisNet: {', '.join(sorted(options))} cannot be used with chunk_size={chunk}.")
        parts: list[tuple[Tensor, Tensor, Solution]] = []
        with SolveScope():  # the same masks and weights in all chunks
            for piece in u.split(chunk, dim=1):
                if parts:
                    h0, c0 = _last(h0, parts[-1][0]), _last(c0, parts[-1][1])
                parts.append(self._equilibrium(piece, h0, c0, True, {}))
        h, c, solutions = zip(*parts, strict=True)
        return torch.cat(h, dim=1), _last(c0, c[-1]), self._joined(solutions)

    def _equilibrium(
        self, u: Tensor, h0: Tensor, c0: Tensor, engaged: bool, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Solution]:
        """h at the equilibrium, and c; c carries a gradient if `engaged`."""
        solution = self.deq(u, h0, c0, **options)
        if self.config.form == "full":
            h, c = solution.value
            return h, c, solution
        # One more evaluation: the solve knows h only.
        with solution.problem.active(), torch.set_grad_enabled(engaged and torch.is_grad_enabled()):
            c = self.cell.step(solution.value, u, h0, c0)[1]
            return solution.value, c, solution

    def _joined(self, solutions: Sequence[Solution]) -> Solution:
        """One solution from those of chunks; it has no problem, and no statistics of the backward pass."""
        if self.config.form == "full":
            value: Any = tuple(torch.cat(parts, dim=1) for parts in zip(*(s.value for s in solutions), strict=True))
        else:
            value = torch.cat([s.value for s in solutions], dim=1)
        return Solution(value, stats_in_a_row([solution.stats for solution in solutions]))


def _last(before: Tensor, values: Tensor, copy: bool = False) -> Tensor:
    """The last steps of `before` followed by `values`, as many as `before` has and in its dtype; copied if wanted."""
    count, length = before.shape[1], values.shape[1]
    if length >= count:
        return values[:, length - count :].to(before.dtype, copy=copy)
    return torch.cat([before[:, length:], values.to(before.dtype)], dim=1)


class ExplicitTrellisNet(nn.Module):
    """A weight-tied TrellisNet: the layer of a `DEQTrellisNet` iterated from zero, with ordinary backpropagation.

    Made by `DEQTrellisNet.explicit`; all parameters are those of `model`.
    """

    def __init__(
        self, model: DEQTrellisNet, depth: int, checkpoint: bool | int = False, auxiliary_every: int | None = None
    ) -> None:
        super().__init__()
        require_count("explicit", "depth", depth)
        require_count("explicit", "checkpoint", int(checkpoint), low=0)
        if auxiliary_every is not None:
            require_count("explicit", "auxiliary_every", auxiliary_every)
        self.model = model
        self.depth, self.checkpoint, self.auxiliary_every = depth, int(checkpoint), auxiliary_every

    def forward(self, tokens: Tensor, targets: Tensor | None = None, memory: Memory | None = None) -> TrellisOutput:
        """As `DEQTrellisNet.forward`; with auxiliary losses if they were asked for and there are targets."""
        model, cell = self.model, self.model.cell
        u, h0, c0, inputs = model.prepare(tokens, targets, memory)
        scope = SolveScope()

        def advance(h: Tensor, c: Tensor, layers: int) -> tuple[Tensor, Tensor]:
            with scope:  # entered here, so that layers recomputed in the backward pass see the same constants
                for _ in range(layers):
                    h, c = cell.step(h if cell.form == "eliminated" else (h, c), u, h0, c0)
            return h, c

        h = c = h0.new_zeros(*tokens.shape, model.config.state_size)
        done, read = 0, []
        for stop in self._stops():
            # The first layer makes the constants of the scope; what a recomputation must not make again is not in one.
            if self.checkpoint and done and torch.is_grad_enabled():
                h, c = recompute(advance, h, c, stop - done, use_reentrant=False, preserve_rng_state=False)
            else:
                h, c = advance(h, c, stop - done)
            done = stop
            if self.auxiliary_every and stop % self.auxiliary_every == 0 and stop < self.depth:
                read.append(h)
        output = model.answer(h, targets, model.remember(h0, h, c0, c, inputs))
        if read and targets is not None:
            output.auxiliary = torch.stack([self._losses(states, targets) for states in read])
        return output

    def _stops(self) -> list[int]:
        """Layers at which something is done: a segment of recomputation ends, losses are read."""
        stops = {1, self.depth}
        for every in (self.checkpoint, self.auxiliary_every or 0):
            stops.update(range(every, self.depth, every) if every else ())
        return sorted(stops)

    def _losses(self, h: Tensor, targets: Tensor) -> Tensor:
        model = self.model
        logits = F.linear(model.drop_out(model.read(h)), model.embedding.weight, model.output_bias)
        return token_losses(logits, targets)

    def extra_repr(self) -> str:
        return f"depth={self.depth}, checkpoint={self.checkpoint}, auxiliary_every={self.auxiliary_every}"


def activation_penalty(output: LMOutput, alpha: float = 2.0, beta: float = 1.0) -> Tensor:
    """α · mean(y²) of the features after dropout, plus β · mean((y_t − y_{t−1})²) of those before it.

    Args:
        output: What a model returned; one without `features` (not a TrellisNet) is taken as without dropout.
        alpha: Weight of the size of activations.
        beta: Weight of their change from step to step.
    """
    if output.hidden is None:
        raise ValueError("activation_penalty: the output has no hidden features.")
    raw = output.features if isinstance(output, TrellisOutput) else None
    raw = output.hidden if raw is None else raw
    penalty = alpha * output.hidden.square().mean()
    if raw.shape[1] > 1:
        penalty = penalty + beta * (raw[:, 1:] - raw[:, :-1]).square().mean()
    return penalty


# Presets


@register_model
def deq_trellisnet_ptb(**overrides: Any) -> DEQTrellisNet:
    """Penn Treebank: 24.19 M parameters, 20.18 M of them not in the embedding."""
    defaults = {
        "vocab_size": 10_000,
        "embedding_size": 400,
        "hidden_size": 1000,
        "dropout": 0.45,
        "dropout_in": 0.45,
        "dropout_hidden": 0.28,
        "dropout_words": 0.1,
        "dropconnect": 0.5,
        "init_std": 0.02,
    }
    return DEQTrellisNet(settings(DEQTrellisNetConfig, defaults, overrides))


@register_model
def deq_trellisnet_wt103(**overrides: Any) -> DEQTrellisNet:
    """WikiText-103 with a full softmax: 181.7 M parameters, 44.4 M of them not in the embedding."""
    defaults = {
        "vocab_size": 267_735,
        "embedding_size": 512,
        "hidden_size": 1600,
        "dropout": 0.1,
        "dropout_in": 0.1,
        "dropout_hidden": 0.1,
    }
    return DEQTrellisNet(settings(DEQTrellisNetConfig, defaults, overrides))


@register_model
def deq_trellisnet_small(**overrides: Any) -> DEQTrellisNet:
    """For runs on a CPU: 64/128/64, 0.40 M parameters beside the embedding."""
    defaults = {
        "vocab_size": 10_000,
        "embedding_size": 64,
        "hidden_size": 128,
        "dropout": 0.1,
        "dropout_in": 0.1,
        "dropout_hidden": 0.1,
        "init_std": 0.05,
    }
    return DEQTrellisNet(settings(DEQTrellisNetConfig, defaults, overrides))
