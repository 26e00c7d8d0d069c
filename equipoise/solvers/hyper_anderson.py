"""Anderson's update with learned weights and step length, from a learned start."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from equipoise import _leaves
from equipoise._errors import require_count, require_number, unknown_name
from equipoise._history import History
from equipoise._problem import StateSpec
from equipoise._stop import tiny_norm
from equipoise._tree import Leaves, tree_tensors
from equipoise.solvers import _hyper_nets as nets
from equipoise.solvers.anderson import Anderson
from equipoise.solvers.base import Solver, State

if TYPE_CHECKING:
    from equipoise._module import DEQ
    from equipoise._problem import Problem

COMPRESSIONS = {"sequence": ("last", "mean", "sketch"), "images": ("lowest", "sketch"), "any": ("sketch",)}
"""Kinds of states, and how their residuals can be put into few numbers; the first is the default."""

WEIGHTS = ("shift", "softmax", "free", "corrected", "least_squares", "newest")
# Logit of the newest step in the softmax before any fitting: nearly all weight is there, yet others get a gradient.
NEWEST_LOGIT = 4.0
# Inner size below which a network is not made smaller to fit a budget.
SMALLEST = 4
# Sizes of logarithms of relative norms that the step network sees.
MOST_DECADES = 8.0


@dataclass(frozen=True)
class HyperConfig:
    """All that a learned solver is but its weights.

    Attributes:
        kind: "sequence" for leaves (N, T, d), "images" for leaves (N, C, H, W) from the highest resolution to the
            lowest, "any" for anything else.
        state: Features, channels, or all numbers of a system, by leaf.
        source: Features, channels or numbers of the input that the initialiser reads; None for no initialiser.
        hidden: Inner size of the initialiser.
        compression: How a residual becomes a few numbers: "last" or "mean" (over positions), "lowest" (resolution),
            "sketch" (any state); None for the first that suits the kind.
        compressed: How many numbers.
        width: Inner size of the step network.
        memory: Iterates combined, as in `Anderson`.
        weights: "shift" (learned, moved so that they sum to one), "softmax" (learned, between 0 and 1), "free"
            (learned, any sum), "corrected" (Anderson's, plus learned ones that sum to zero), "least_squares"
            (Anderson's), "newest" (all on the newest iterate).
        mixing: Whether the step length is learned; it is 1 otherwise.
        plain_sum: Add the sum of all residuals times the step length, instead of their weighted sum.
        products: Whether the step network also sees inner products of residuals.
        local: Of sequences: weights and a step length for each position, from its own residuals, instead of one set
            for all. What a position gets does not depend on later ones.
        warm: What becomes of a start that is not zero: "keep" it, or "replace" it by the learned one.
    """

    kind: str
    state: tuple[int, ...]
    source: int | None = None
    hidden: int = 100
    compression: str | None = None
    compressed: int = 64
    width: int = 64
    memory: int = 6
    weights: str = "shift"
    mixing: bool = True
    plain_sum: bool = False
    products: bool = True
    local: bool = False
    warm: str = "keep"

    def __post_init__(self) -> None:
        if self.kind not in COMPRESSIONS:
            raise unknown_name("kind of state", self.kind, COMPRESSIONS)
        object.__setattr__(self, "state", tuple(self.state))
        for name in ("hidden", "compressed", "width", "memory"):
            require_count("HyperAnderson", name, getattr(self, name))
        for size in (*self.state, *([] if self.source is None else [self.source])):
            require_count("HyperAnderson", "sizes of state and source", size)
        if not self.state:
            raise ValueError("HyperAnderson: state must name the size of at least one leaf.")
        if self.compression is None:
            object.__setattr__(self, "compression", COMPRESSIONS[self.kind][0])
        if self.compression not in COMPRESSIONS[self.kind]:
            raise unknown_name(f"compression of {self.kind}", self.compression, COMPRESSIONS[self.kind])
        if self.weights not in WEIGHTS:
            raise unknown_name("kind of weights", self.weights, WEIGHTS)
        if self.local and self.kind != "sequence":
            raise ValueError(
                f"HyperAnderson: local concerns positions of sequences; the state is of kind {self.kind!r}."
            )
        if self.local and self.compression == "mean":
            raise ValueError('HyperAnderson: a mean over positions has no place where each is by itself; use "last".')
        if self.warm not in ("keep", "replace"):
            raise unknown_name("way with a start", self.warm, ("keep", "replace"))

    @property
    def learns_weights(self) -> bool:
        """Whether the weights of iterates are learned."""
        return self.weights in ("shift", "softmax", "free", "corrected")

    @property
    def solves(self) -> bool:
        """Whether weights begin with those of least squares."""
        return self.weights in ("corrected", "least_squares")

    @property
    def learns_steps(self) -> bool:
        """Whether there is a step network at all."""
        return self.learns_weights or self.mixing


@dataclass
class HyperState(State):
    """What is remembered between steps, for N systems, or as many rows as they have positions if weights are local.

    Attributes:
        images: Past f(z); None where only the newest counts.
        residuals: Past f(z) − z.
        series: (N, memory, c) past residuals in few numbers, the newest last.
        gram: (N, memory, memory) inner products of past residuals, the newest last; None if they are not looked at.
        weights: (N, k) of the newest step, the newest iterate last.
        mixing: (N,) step length of the newest step.
        positions: Rows of each system.
        count: Steps so far.
        mixed: The combined residual of the newest step; kept where autograd is on, for fitting.
    """

    images: History | None
    residuals: History | None
    series: Tensor
    gram: Tensor | None
    weights: Tensor
    mixing: Tensor
    positions: int = 1
    count: int = 0
    mixed: Leaves | None = None

    def rows(self, index: Tensor) -> "HyperState":
        own = torch.arange(self.positions, device=index.device)
        chosen = super().rows((index[:, None] * self.positions + own).flatten())
        assert isinstance(chosen, HyperState)
        return dataclasses.replace(chosen, mixed=None)


class HyperAnderson(Solver, nn.Module):
    """Anderson's update with learned weights and step length, from a learned start.

    With residuals g_i = f(z_i) − z_i of the last `memory` iterates, a small network reads a few numbers of each and
    gives weights α that sum to one and a step length β; the next iterate is Σ α_i z_i + β Σ α_i g_i. Another network
    guesses the start from the input. Cost per step: one f, two weighted sums, and products of matrices of some dozens
    of rows; nothing is factorised and nothing read on the host. Storage: 2·memory states.

    Before it is fitted, it is the plain iteration z ← f(z). It does not change what the equilibrium is: residuals are
    measured, and the best iterate is chosen, by the driver, as for any solver. The same weights serve any number of
    steps, systems, positions or pixels.

    Args:
        config: What it consists of; see `for_sequence`, `for_images`, `for_any` and `hyper_solver_for`.

    Reference: S. Bai, V. Koltun, J. Z. Kolter, Neural deep equilibrium solvers, ICLR 2022.
    """

    def __init__(self, config: HyperConfig) -> None:
        super().__init__()
        self.config = config
        self.initialiser = _initialiser(config)
        self.compression = _compression(config) if config.learns_steps else None
        extra = 1 + (config.memory if config.products else 0)
        self.step = nets.StepNet(config.compressed + extra, config.width) if config.learns_steps else None

    @classmethod
    def for_sequence(cls, width: int | tuple[int, ...], source: int | None = None, **settings: Any) -> "HyperAnderson":
        """A solver for states (N, T, width).

        Args:
            width: Features of a position; of each leaf, if there are several.
            source: Features of a position of the first input, or of `context`; None for no initialiser.
            **settings: Of `HyperConfig`.
        """
        return cls(HyperConfig("sequence", _sizes(width), source, **settings))

    @classmethod
    def for_images(cls, channels: int | tuple[int, ...], source: int | None = None, **settings: Any) -> "HyperAnderson":
        """A solver for maps (N, C, H, W) of one or several resolutions.

        Args:
            channels: Of each resolution, from the highest to the lowest.
            source: Channels of the first input, or of `context`; None for no initialiser.
            **settings: Of `HyperConfig`.
        """
        return cls(HyperConfig("images", _sizes(channels), source, **settings))

    @classmethod
    def for_any(cls, example: Any, source: Any = None, **settings: Any) -> "HyperAnderson":
        """A solver for states of any form.

        Args:
            example: A state, its first axis indexing systems, or the numbers of a system by leaf.
            source: An input whose first axis indexes systems, or its numbers per system; None for no initialiser.
            **settings: Of `HyperConfig`.
        """
        if isinstance(source, Tensor):
            source = source[0].numel()
        if tree_tensors(example):
            example = tuple(leaf[0].numel() for leaf in tree_tensors(example))
        return cls(HyperConfig("any", _sizes(example), source, **settings))

    @property
    def num_parameters(self) -> int:
        """Learned numbers."""
        return sum(parameter.numel() for parameter in self.parameters())

    # The start

    def init(self, problem: "Problem", z: Leaves) -> tuple[Leaves, HyperState]:
        config, differentiable = self.config, torch.is_grad_enabled()
        start = z if self.initialiser is None else self._guess(problem, z)
        rows = self._rows(z)
        n, m = rows[0].shape[0], config.memory
        remembers, looks = config.weights != "newest", self._sees_products or config.solves
        # A step length of 1 takes images alone; residuals are for other ones, for products, and for the loss on them.
        residuals = looks or (remembers and (config.mixing or config.plain_sum or differentiable))
        return start, HyperState(
            images=History(rows, m, differentiable) if remembers else None,
            residuals=History(rows, m, differentiable) if residuals else None,
            series=z[0].new_zeros((n, m, config.compressed)),
            gram=z[0].new_zeros((n, m, m), dtype=torch.float64) if looks else None,
            weights=z[0].new_ones((n, 1)),
            mixing=z[0].new_ones((n,)),
            positions=n // max(1, z[0].shape[0]),
        )

    def _guess(self, problem: "Problem", z: Leaves) -> Leaves:
        assert self.initialiser is not None
        if z[0].shape[0] != problem.spec.num_systems:  # some systems of a whole, which come with a start of their own
            return z
        x = _source(problem, self.config)
        like = _shaped(problem.spec, z)
        dtype = next(self.initialiser.parameters()).dtype
        guess = [leaf.to(z[0].dtype) for leaf in self.initialiser(x.to(dtype), like)]
        flat = _flat(problem.spec, guess)
        if self.config.warm == "replace":
            return flat
        cold = torch.stack([(leaf == 0).all(dim=1) for leaf in z]).all(dim=0)
        return [torch.where(cold[:, None], new, old) for new, old in zip(flat, z, strict=True)]

    # A step

    def propose(self, problem: "Problem", z: Leaves, fz: Leaves, state: State) -> tuple[Leaves, HyperState]:
        assert isinstance(state, HyperState)
        g = problem.residual(z, fz)
        state = dataclasses.replace(state, count=state.count + 1)
        next_rows = self._next(self._rows(z), self._rows(fz), self._rows(g), _shaped(problem.spec, g), state)
        return [row.reshape(leaf.shape) for row, leaf in zip(next_rows, z, strict=True)], state

    def _rows(self, z: Leaves) -> Leaves:
        """What gets weights of its own: systems, or their positions."""
        if not self.config.local:
            return z
        return [leaf.reshape(-1, size) for leaf, size in zip(z, self.config.state, strict=True)]

    def _next(self, z: Leaves, fz: Leaves, g: Leaves, shaped: Leaves, state: HyperState) -> Leaves:
        """The next iterate by rows; what was learned on the way goes into the state."""
        config = self.config
        for history, newest in ((state.images, fz), (state.residuals, g)):
            if history is not None:
                history.push(newest)
        if state.gram is not None and state.residuals is not None:
            state.gram = self._with_products(state.gram, state.residuals.dots(g).squeeze(1), state.count)
        scores: Tensor | None = None
        if self.step is not None:
            scores, lengthening = self.step(self._seen(shaped, state))
            if config.mixing:
                state.mixing = 1.0 + lengthening.to(z[0].dtype)
        if config.weights == "newest":
            state.mixed = g
            return _leaves.axpy(z, state.mixing, g) if config.mixing else fz
        state.weights = self._weights(None if scores is None else scores.to(z[0].dtype), state)
        return self._combined(state)

    def _with_products(self, gram: Tensor, row: Tensor, count: int) -> Tensor:
        """Inner products of residuals by age, a new row (N, k), given by slot, taken in."""
        m = self.config.memory
        row = (torch.roll(row, -count, 1) if count >= m else pad(row, (m - count, 0))).to(gram.dtype)
        older = torch.cat([gram[:, 1:, 1:], row[:, :-1, None]], dim=2)
        return torch.cat([older, row[:, None]], dim=1)

    def _seen(self, g: Leaves, state: HyperState) -> Tensor:
        """(N, k, features) what the step network is told of each remembered step; takes the newest one in."""
        assert self.compression is not None
        first = max(0, self.config.memory - state.count)
        few = self.compression([leaf.flatten(0, 1)[:, None] for leaf in g] if self.config.local else g)
        few = few.to(state.series.dtype)
        state.series = torch.cat([state.series[:, 1:], few[:, None]], dim=1)
        series = state.series[:, first:]
        sizes = torch.linalg.vector_norm(series, dim=2)
        tiny = tiny_norm(series.dtype)
        features = [series / (sizes.amax(dim=1) + tiny)[:, None, None]]
        if self._sees_products:
            assert state.gram is not None
            sizes = state.gram.diagonal(dim1=1, dim2=2).clamp_min(tiny_norm(torch.float64)).sqrt()
            features.append((state.gram / (sizes[:, :, None] * sizes[:, None, :]))[:, first:].to(series.dtype))
            sizes = sizes[:, first:].to(series.dtype)
        decades = torch.log10((sizes + tiny) / (sizes[:, -1:] + tiny))
        features.append(decades.clamp(-MOST_DECADES, MOST_DECADES)[:, :, None])
        return torch.cat(features, dim=2).to(next(self.parameters()).dtype)

    def _weights(self, scores: Tensor | None, state: HyperState) -> Tensor:
        """(N, k) weights of iterates, the newest last."""
        if not self.config.solves:
            assert scores is not None
            return self._normalised(scores)
        assert state.gram is not None
        first = max(0, self.config.memory - state.count)
        # They are where corrections begin, and are not learned through: near the root their derivatives are huge.
        best = least_squares(state.gram[:, first:, first:].detach(), state.weights.dtype)
        if not self.config.learns_weights or scores is None:
            return best
        return best + (scores - scores.mean(dim=1, keepdim=True))

    def _normalised(self, scores: Tensor) -> Tensor:
        """Weights (N, k) of iterates, the newest last."""
        k, kind = scores.shape[1], self.config.weights
        newest = torch.zeros_like(scores[:1])
        newest[:, -1] = NEWEST_LOGIT if kind == "softmax" else 1.0
        scores = scores + newest
        if kind == "softmax":
            return scores.softmax(dim=1)
        return scores if kind == "free" else scores + (1.0 - scores.sum(dim=1, keepdim=True)) / k

    def _combined(self, state: HyperState) -> Leaves:
        """Σ α_i z_i + β Σ α_i g_i, as Σ α_i f(z_i) + Σ (β − 1) α_i g_i."""
        assert state.images is not None
        config = self.config
        turn = state.count % config.memory if state.count > config.memory else 0
        weights = torch.roll(state.weights, turn, 1) if turn else state.weights  # by slot
        proposal = state.images.combine(weights)
        if torch.is_grad_enabled() and state.residuals is not None:
            state.mixed = state.residuals.combine(weights)
        if not (config.mixing or config.plain_sum):
            return proposal
        assert state.residuals is not None
        length = state.mixing[:, None]
        shares = length - weights if config.plain_sum else (length - 1.0) * weights
        return state.residuals.combine(shares, onto=proposal)

    @property
    def _sees_products(self) -> bool:
        return self.config.products and self.config.learns_steps

    def __repr__(self) -> str:
        return f"HyperAnderson({self.config}, {self.num_parameters:,} parameters)"


def least_squares(gram: Tensor, dtype: torch.dtype) -> Tensor:
    """Anderson's weights: argmin_α αᵀAα with Σα = 1 for Gram matrices A (N, k, k), the newest residual last.

    By elimination, row by row, without a look at any number: a matrix has a handful of rows, and this can be recorded
    in a graph. A system for which it fails gets a plain step.
    """
    k = gram.shape[1]
    ridge = max(Anderson.ridge, torch.finfo(dtype).eps)
    size = gram.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()  # (N, k)
    table = gram * size[:, :, None] * size[:, None, :] + ridge * torch.eye(k, dtype=gram.dtype, device=gram.device)
    table = torch.cat([table, size[:, :, None]], dim=2)  # the right-hand side 1, scaled likewise
    for j in range(k):
        row = table[:, j] / table[:, j, j, None]
        table = table - table[:, :, j, None] * row[:, None]
        table[:, j] = row
    solved = table[:, :, k] * size
    weights = solved / solved.sum(dim=1, keepdim=True)
    plain = torch.zeros_like(weights)
    plain[:, -1] = 1.0
    return torch.where(weights.isfinite().all(dim=1, keepdim=True), weights, plain).to(dtype)


def hyper_solver_for(
    deq: "DEQ", *inputs: Any, base: nn.Module | None = None, budget: float | None = 0.04, **settings: Any
) -> HyperAnderson:
    """A learned solver, not yet fitted, that suits the states and inputs of a DEQ.

    States (N, T, d) with a first input (N, T, ...) are sequences, whose positions get weights of their own, unless
    `local=False`; states of maps (N, C, H, W) are images, and all others are taken as flat. Its inner sizes are halved until it has at most `budget` times the parameters of the model, or they
    cannot be: see `num_parameters`.

    Args:
        deq: What to solve for.
        *inputs: Of the DEQ.
        base: The model whose parameters count; the DEQ's cell if None.
        budget: Largest share of the model's parameters; None for any.
        **settings: Of `HyperConfig`; `source=None` for no initialiser.
    """
    start = deq.start(*inputs)
    spec = StateSpec.of(start, deq.batch_dims)
    found = _detected(spec, inputs)
    # Weights by position reach the equilibrium sooner than weights by sequence; see docs/hyper.md.
    found["local"] = found["kind"] == "sequence" and settings.get("compression") != "mean"
    config = HyperConfig(**{**found, **settings})
    if any(bool(leaf.any()) for leaf in tree_tensors(start)) and "warm" not in settings:
        config = dataclasses.replace(config, warm="replace")  # else the initialiser would never be asked
    if budget is not None:
        require_number("hyper_solver_for", "budget", budget, low=0.0, open_low=True)
        most = budget * sum(parameter.numel() for parameter in (base or deq.cell).parameters())
        config = _within(config, most, fixed=set(settings))
    return HyperAnderson(config).to(spec.device)


def _detected(spec: StateSpec, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Kind, sizes of the state and size of the source."""
    shapes = [shape[spec.batch_dims :] for shape in spec.shapes]
    candidates = [t for t in tree_tensors(inputs) if t.is_floating_point() and t.dim() and len(t) == spec.num_systems]
    x = candidates[0] if candidates else None
    ranks = {len(shape) for shape in shapes}
    if spec.batch_dims == 1 and ranks == {2} and (x is None or (x.dim() == 3 and x.shape[1] == shapes[0][0])):
        return {"kind": "sequence", "state": [s[1] for s in shapes], "source": None if x is None else x.shape[2]}
    if spec.batch_dims == 1 and ranks == {3} and (x is None or x.dim() == 4):
        return {"kind": "images", "state": [s[0] for s in shapes], "source": None if x is None else x.shape[1]}
    source = None if x is None or spec.batch_dims != 1 else x[0].numel()
    return {"kind": "any", "state": [shape.numel() for shape in shapes], "source": source}


def _within(config: HyperConfig, most: float, fixed: set[str]) -> HyperConfig:
    """The settings with inner sizes small enough for so many parameters, or as small as they get."""
    sizes = [name for name in ("hidden", "compressed", "width") if name not in fixed]
    while sizes and _count(config) > most:
        smaller = {name: max(SMALLEST, getattr(config, name) // 2) for name in sizes}
        if all(value == getattr(config, name) for name, value in smaller.items()):
            break
        config = dataclasses.replace(config, **smaller)
    return config


def _count(config: HyperConfig) -> int:
    with torch.device("meta"):
        return HyperAnderson(config).num_parameters


def _sizes(given: Any) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _initialiser(config: HyperConfig) -> nn.Module | None:
    if config.source is None:
        return None
    made = {"sequence": nets.SequenceInitialiser, "images": nets.ImageInitialiser, "any": nets.FlatInitialiser}
    return made[config.kind](config.source, config.hidden, config.state)


def _compression(config: HyperConfig) -> nn.Module:
    if config.compression == "sketch":
        return nets.Sketch(len(config.state), config.compressed)
    if config.compression == "lowest":
        return nets.LowestResolution(config.state, config.compressed)
    return nets.TokenCompression(config.state, config.compressed, config.compression == "mean")


def _shaped(spec: StateSpec, z: Leaves) -> Leaves:
    """Leaves (N, D_i) in the shapes the cell gives them, for however many systems there are; views."""
    shaped = []
    for leaf, shape, order in zip(z, spec.shapes, spec.orders, strict=True):
        event = list(shape[spec.batch_dims :])
        if order is None or spec.batch_dims != 1:
            shaped.append(leaf.view(-1, *event))
            continue
        stored = leaf.view(-1, *(shape[axis] for axis in order[1:]))
        shaped.append(stored.permute([order.index(axis) for axis in range(len(order))]))
    return shaped


def _flat(spec: StateSpec, leaves: Leaves) -> Leaves:
    """The inverse of `_shaped`."""
    flat = []
    for leaf, order in zip(leaves, spec.orders, strict=True):
        stored = leaf if order is None or spec.batch_dims != 1 else leaf.permute(order)
        flat.append(stored.reshape(leaf.shape[0], -1).contiguous())
    return flat


def _source(problem: "Problem", config: HyperConfig) -> Tensor:
    """What the initialiser reads: the first tensor with a row per system, of the context or else of the inputs."""
    n = problem.spec.num_systems
    axis = {"sequence": -1, "images": 1}.get(config.kind)
    for tensor in tree_tensors(problem.inputs if problem.context is None else problem.context):
        if not tensor.is_floating_point() or tensor.dim() == 0 or tensor.shape[0] != n:
            continue
        size = tensor[:1].numel() if axis is None else tensor.shape[axis] if tensor.dim() > 1 else 0
        if size != config.source:
            raise ValueError(
                f"HyperAnderson: the initialiser reads an input of {config.source} "
                f"{'features' if config.kind == 'sequence' else 'channels' if config.kind == 'images' else 'numbers'}, "
                f"but the first one, of shape {tuple(tensor.shape)}, has {size}; fit a solver for this model, or pass "
                "what it was fitted with as context."
            )
        return tensor
    raise ValueError(
        "HyperAnderson: the initialiser has nothing to read: no input of the problem, and no context, is a tensor with "
        "a row per system. Use a solver without one (source=None) here."
    )
