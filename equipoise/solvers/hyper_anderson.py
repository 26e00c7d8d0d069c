"""Anderson's update with learned weights and step length, from a learned start."""

import copy
import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise import _leaves
from equipoise._history import History
from equipoise._problem import Embedding, StateSpec
from equipoise._stop import precision_floor
from equipoise._tree import Leaves, tree_tensors
from equipoise.solvers import _hyper_nets as nets
from equipoise.solvers._hyper_config import HyperConfig
from equipoise.solvers.anderson import Anderson
from equipoise.solvers.base import Solver, State
from equipoise.solvers.picard import Picard

if TYPE_CHECKING:
    from equipoise._problem import Problem

# Logit of the newest step in the softmax before any fitting: nearly all weight is there, yet others get a gradient.
NEWEST_LOGIT = 4.0
# Sizes of logarithms of relative norms that the step network sees.
MOST_DECADES = 8.0


@dataclass
class HyperState(State):
    """What is remembered between steps, for N systems, or as many rows as they have positions if weights are local.

    Attributes:
        images: Past f(z), with what the correction adds to them; None where only the newest counts.
        residuals: Past f(z) − z.
        series: (N, memory, c) past residuals in few numbers, the newest last.
        gram: (N, memory, memory) inner products of past residuals, the newest last; None if they are not looked at.
        weights: (N, k) of the newest step, the newest iterate last.
        lengthening: (N,) step length of the newest step, less one.
        positions: Rows of each system.
        count: Steps so far.
        through: Whether autograd goes through weights of least squares.
        mixed: The combined residual of the newest step; kept where autograd is on, for fitting.
    """

    images: History | None
    residuals: History | None
    series: Tensor
    gram: Tensor | None
    weights: Tensor
    lengthening: Tensor
    positions: int = 1
    count: int = 0
    through: bool = True
    mixed: Leaves | None = None

    @property
    def mixing(self) -> Tensor:
        """(N,) step length of the newest step."""
        return 1.0 + self.lengthening

    def rows(self, index: Tensor) -> "HyperState":
        own = torch.arange(self.positions, device=index.device)
        chosen = super().rows((index[:, None] * self.positions + own).flatten())
        assert isinstance(chosen, HyperState)
        return dataclasses.replace(chosen, mixed=None)


class HyperAnderson(Solver, nn.Module):
    """Anderson's update with learned weights and step length, from a learned start.

    With residuals g_i = f(z_i) − z_i of the last `memory` iterates, a small network reads a few numbers of each and
    gives weights α that sum to one and a step length β; the next iterate is Σ α_i z_i + β Σ α_i g_i, plus, if asked
    for, Σ α_i C g_i with a learned linear map C, of low rank or over channels. Another network guesses the start from
    the input. Cost per step: one f, two weighted sums, and products of matrices of some dozens of rows; nothing is
    factorised and nothing read on the host. Storage: 2·memory states.

    Before it is fitted, it is the plain iteration z ← f(z). It does not change what the equilibrium is: residuals are
    measured, and the best iterate is chosen, by the driver, as for any solver. The same weights serve any number of
    steps, systems, positions or pixels.

    Args:
        config: What it consists of; see `for_sequence`, `for_images`, `for_any` and `hyper_solver_for`.

    Attributes:
        classic: The solver whose steps these are, where nothing of a step is learned: then only the start is.

    Reference: S. Bai, V. Koltun, J. Z. Kolter, Neural deep equilibrium solvers, ICLR 2022.
    """

    def __init__(self, config: HyperConfig) -> None:
        super().__init__()
        self.config = config
        self.initialiser = _initialiser(config)
        self.compression = _compression(config) if config.learns_steps else None
        extra = 1 + (config.memory if config.products else 0)
        self.step = nets.StepNet(config.compressed + extra, config.width) if config.learns_steps else None
        self.correction = _correction(config)
        self.classic = _classic(config)

    @classmethod
    def for_sequence(
        cls, features: int | tuple[int, ...], source: int | None = None, **settings: Any
    ) -> "HyperAnderson":
        """A solver for states (N, T, features).

        Args:
            features: Of a position; of each leaf, if there are several.
            source: Features of a position of the first input, or of `context`; None for no initialiser.
            **settings: Of `HyperConfig`.
        """
        return cls(HyperConfig("sequence", _sizes(features), source, **settings))

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
            source = source.shape[1:].numel()
        if tree_tensors(example):
            example = tuple(leaf.shape[1:].numel() for leaf in tree_tensors(example))
        return cls(HyperConfig("any", _sizes(example), source, **settings))

    def plainly(self) -> "HyperAnderson":
        """This solver, its start and its correction, with all weight on the newest iterate."""
        if self.config.learns_steps:
            raise ValueError(
                f"HyperAnderson: weights={self.config.weights!r} with mixing={self.config.mixing} are learned, and "
                "plain steps would not teach them: weights of least squares without mixing can be left out."
            )
        plain = copy.copy(self)  # on the same networks
        plain.config = dataclasses.replace(self.config, weights="newest", mixing=False, plain_sum=False)
        return plain

    @property
    def num_parameters(self) -> int:
        """Learned numbers."""
        return sum(parameter.numel() for parameter in self.parameters())

    # The start

    @property
    def replaces_start(self) -> bool:
        return self.initialiser is not None

    def init(self, problem: "Problem", z: Leaves) -> tuple[Leaves, State]:
        start = self.guess(problem, z)
        return start, self.empty_state(z) if self.classic is None else self.classic.init(problem, start)[1]

    def empty_state(self, z: Leaves) -> HyperState:
        """What there is to remember of states like z before the first step."""
        config, differentiable = self.config, torch.is_grad_enabled()
        rows = self.rows(z)
        n, m = rows[0].shape[0], config.memory
        remembers, looks = config.weights != "newest", self._sees_products or config.solves
        # A step length of 1 takes images alone; residuals are for other ones, for products, and for the loss on them.
        residuals = looks or (remembers and (config.mixing or config.plain_sum or differentiable))
        return HyperState(
            images=History(rows, m, differentiable) if remembers else None,
            residuals=History(rows, m, differentiable) if residuals else None,
            series=z[0].new_zeros((n, m, config.compressed)),
            gram=z[0].new_zeros((n, m, m), dtype=torch.float64 if config.solves else None) if looks else None,
            weights=z[0].new_ones((n, 1)),
            lengthening=z[0].new_zeros((n,)),
            positions=n // max(1, z[0].shape[0]),
        )

    def guess(self, problem: "Problem", z: Leaves) -> Leaves:
        """Where a solve begins that was to begin at z; z itself without an initialiser."""
        self.check_state(problem.spec)
        if self.initialiser is None or not any(leaf.numel() for leaf in z):
            return z
        if isinstance(problem, Embedding):  # some systems of a whole, whose inputs are those of all
            return _leaves.take_rows(self.guess(problem.whole, problem.widened(z)), problem.index)
        from equipoise.ops.start import image_start, kept

        x, like, keep = _checked_source(problem, self.config), _shaped(problem.spec, z), self.config.warm == "keep"
        if isinstance(self.initialiser, nets.ImageInitialiser):
            return _flat(problem.spec, image_start(self.initialiser, x, like, keep=keep))
        flat = _flat(problem.spec, [leaf.to(z[0].dtype) for leaf in self.initialiser(x, like)])
        return kept(z, flat) if keep else flat

    def check_state(self, spec: StateSpec) -> None:
        """Raise if the networks are for states of another form: sizes of one leaf, or their number, would not fit."""
        config = self.config
        learned = config.local or any(part is not None for part in (self.initialiser, self.step, self.correction))
        sizes, sketched = _state_sizes(spec, config.kind), config.compression == "sketch" and not config.local
        sized = self.initialiser is not None or self.correction is not None
        rigid = sized or config.local  # leaf by leaf, position by position
        free = not rigid and (sketched or not config.learns_steps)
        if learned and (len(sizes) != len(config.state) if free else sizes != config.state):
            raise ValueError(
                f"HyperAnderson: made for {_FORMS[config.kind]}, {_listed(config.state)} by leaf, but this state has "
                f"leaves of shape {', '.join(str(tuple(shape)) for shape in spec.shapes)}; fit one to this model "
                "(fit_hyper_solver, `equipoise hyper RUN`)."
            )
        lengths = {shape[spec.batch_dims] for shape in spec.shapes} if rigid and config.kind == "sequence" else set()
        if len(lengths) > 1:
            raise ValueError(
                f"HyperAnderson: made for sequences of one length, but the leaves of this state have "
                f"{_listed(sorted(lengths))} positions; take it as flat (HyperAnderson.for_any, hyper_solver_for)."
            )

    # A step

    def propose(self, problem: "Problem", z: Leaves, fz: Leaves, state: State) -> tuple[Leaves, State]:
        if not isinstance(state, HyperState):
            assert self.classic is not None
            return self.classic.propose(problem, z, fz, state)
        if not any(leaf.numel() for leaf in z):
            return fz, state
        return self.advance(problem.spec, z, fz, state, problem.residual(z, fz))

    def advance(
        self, spec: StateSpec, z: Leaves, fz: Leaves, state: HyperState, g: Leaves | None = None
    ) -> tuple[Leaves, HyperState]:
        """The next iterate, and what is remembered then; both engines get it here, and nothing is read on the host.

        Args:
            spec: Structure of the states.
            z: The newest iterate, leaf by leaf (N, D_i).
            fz: Its image.
            state: What is remembered; its histories take the new pair in, its tensors are not written.
            g: f(z) − z, if it is known already.
        """
        state = dataclasses.replace(state, count=state.count + 1)
        images, older, residuals = self.rows(fz), self.rows(z), state.residuals
        if g is None and residuals is not None:
            change = residuals.push_difference(images, older)[1]
        else:
            change = _leaves.subtract(images, older) if g is None else self.rows(g)
            if residuals is not None:
                residuals.push(change)
        shaped = _shaped(spec, [row.view(leaf.shape) for row, leaf in zip(change, z, strict=True)])
        if self.correction is not None:
            # f(z) + C(f(z) − z) has the roots of f, and goes there in fewer steps: what follows works on its images.
            dtype = next(self.correction.parameters()).dtype
            added = _flat(spec, self.correction([leaf.to(dtype) for leaf in shaped]))
            images = [row + more.to(row.dtype).view_as(row) for row, more in zip(images, added, strict=True)]
        if state.images is not None:
            state.images.push(images)
        next_rows = self._next(images, change, shaped, state)
        return [row.reshape(leaf.shape) for row, leaf in zip(next_rows, z, strict=True)], state

    def rows(self, z: Leaves) -> Leaves:
        """What gets weights of its own: systems, or their positions."""
        if not self.config.local:
            return z
        return [leaf.reshape(-1, size) for leaf, size in zip(z, self.config.state, strict=True)]

    def _next(self, fz: Leaves, g: Leaves, shaped: Leaves, state: HyperState) -> Leaves:
        """The next iterate by rows, once the newest pair is remembered; what is learned goes into the state."""
        config = self.config
        if state.gram is not None and state.residuals is not None:
            state.gram = self._with_products(state.gram, state.residuals.dots(g).squeeze(1), state.count)
        scores = None
        if self.step is not None:
            scores, lengthening = (part.to(fz[0].dtype) for part in self.step(self._seen(shaped, state, fz)))
            if config.mixing:
                state.lengthening = lengthening
        if config.weights == "newest":
            state.mixed = g
            return _leaves.axpy(fz, state.lengthening, g) if config.mixing else fz
        state.weights = self._weights(scores, state)
        return self._combined(state)

    def _with_products(self, gram: Tensor, row: Tensor, count: int) -> Tensor:
        """Inner products of residuals by age, a new row (N, k), given by slot, taken in."""
        places = _places_by_age(self.config.memory, count, gram.device)
        return torch.cat([gram.flatten(1), row.to(gram.dtype)], dim=1).index_select(1, places).view_as(gram)

    def _seen(self, g: Leaves, state: HyperState, fz: Leaves) -> Tensor:
        """(N, k, features) what the step network is told of each remembered step; takes the newest one in.

        All of it is relative: the few numbers of a residual to its size, products to sizes, sizes to the newest one.
        Of residuals that are rounding it is constant: derivatives of relative numbers grow without bound there.
        """
        assert self.compression is not None
        first = max(0, self.config.memory - state.count)
        few = self.compression([leaf.flatten(0, 1)[:, None] for leaf in g] if self.config.local else g)
        state.series = torch.cat([state.series[:, 1:], few[:, None].to(state.series.dtype)], dim=1)
        series, known = state.series[:, first:], None
        if self._sees_products:
            assert state.gram is not None
            known = state.gram[:, first:, first:]
        if torch.is_grad_enabled():
            series, known = _constant_in_rounding(series, known, fz)
        squares, unknowns = _squares(series, known), series.shape[2]
        # Squares may be float64, what is made of their roots is not: the root of the least of those is infinite.
        inverse = _inverse_roots(squares, series.dtype)
        products: list[Tensor] = []
        if known is not None and state.gram is not None:
            unknowns = sum(leaf[0].numel() for leaf in g) // state.positions
            # Where nothing is remembered yet, products are zero: so is that part of the table.
            products = [state.gram[:, first:, :first], known * inverse[:, :, None] * inverse[:, None]]
        relative = series * (inverse * math.sqrt(unknowns))[:, :, None].to(series.dtype)
        sizes = inverse.log10()
        decades = (sizes[:, -1:] - sizes).clamp(-MOST_DECADES, MOST_DECADES)[:, :, None]
        features = [part.to(series.dtype) for part in (relative, *products, decades)]
        assert self.step is not None
        return torch.cat(features, dim=2).to(self.step.inner.weight.dtype)

    def _weights(self, scores: Tensor | None, state: HyperState) -> Tensor:
        """(N, k) weights of iterates, the newest last."""
        if not self.config.solves:
            assert scores is not None
            return self._normalised(scores)
        assert state.gram is not None
        first = max(0, self.config.memory - state.count)
        gram = state.gram[:, first:, first:]
        best = least_squares(gram if state.through else gram.detach(), state.weights.dtype)
        if scores is None or not self.config.learns_weights:
            return best
        return best + (scores - scores.mean(dim=1, keepdim=True))

    def _normalised(self, scores: Tensor) -> Tensor:
        """Weights (N, k) of iterates, the newest last: scores with one more for the newest, made to sum to one."""
        kind = self.config.weights
        if kind == "softmax":
            return _raised(scores + 0.0, NEWEST_LOGIT).softmax(dim=1)
        return _raised(scores + 0.0 if kind == "free" else scores - scores.mean(dim=1, keepdim=True), 1.0)

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
        shares = state.mixing[:, None] - weights if config.plain_sum else state.lengthening[:, None] * weights
        return state.residuals.combine(shares, onto=proposal)

    @property
    def _sees_products(self) -> bool:
        return self.config.products and self.config.learns_steps

    def __repr__(self) -> str:
        return f"HyperAnderson({self.config}, {self.num_parameters:,} parameters)"


def _squares(series: Tensor, products: Tensor | None) -> Tensor:
    """(N, k) sizes of remembered residuals, squared: by their products (N, k, k), or else by their few numbers."""
    return series.square().sum(dim=2) if products is None else products.diagonal(dim1=1, dim2=2)


def _constant_in_rounding(series: Tensor, products: Tensor | None, fz: Leaves) -> tuple[Tensor, Tensor | None]:
    """Few numbers and products of residuals, as constants where these are rounding of images f(z)."""
    least = (precision_floor(fz[0].dtype) * _leaves.norm(fz).detach()).square()  # (N,)
    rounding = _squares(series, products) <= least[:, None]
    series = torch.where(rounding[:, :, None], series.detach(), series)
    if products is not None:
        products = torch.where(rounding[:, :, None] | rounding[:, None], products.detach(), products)
    return series, products


def _inverse_roots(squares: Tensor, dtype: torch.dtype) -> Tensor:
    """One over the roots of these, which this dtype can hold."""
    return squares.clamp_min(torch.finfo(dtype).tiny).rsqrt()


def _places_by_age(memory: int, count: int, device: torch.device) -> Tensor:
    """Where a table by age, the newest last, after so many steps finds its entries.

    In the table of the step before, followed by the newest row by slot. An entry of which nothing is known yet finds
    the first one of that table, of which nothing was known. Kept, because a step consists of few operations.
    """
    key = (memory, count if count <= memory else memory + count % memory, device)
    if torch.compiler.is_compiling() or key not in _kept:
        first, last = max(0, memory - count), memory - 1
        row = [memory * memory + (count + age) % memory if age >= first else 0 for age in range(memory)]
        older = [[(i + 1) * memory + j + 1 for j in range(last)] + [row[i]] for i in range(last)]
        with torch.inference_mode(False):  # else it could not be used where autograd is on
            made = torch.tensor([place for line in (*older, row) for place in line], device=device)
        if torch.compiler.is_compiling():
            return made
        _kept[key] = made
    return _kept[key]


_kept: dict[tuple[int, int, torch.device], Tensor] = {}


def _raised(scores: Tensor, by: float) -> Tensor:
    """Scores (N, k), a tensor of one's own, with the newest raised."""
    scores[:, -1].add_(by)
    return scores


def least_squares(gram: Tensor, dtype: torch.dtype) -> Tensor:
    """Anderson's weights: argmin_α αᵀAα with Σα = 1 for Gram matrices A (N, k, k), the newest residual last.

    By elimination, row by row, without a look at any number: a matrix has a handful of rows, and this can be recorded
    in a graph. A system for which it fails gets a plain step.
    """
    k = gram.shape[1]
    ridge = max(Anderson.ridge, torch.finfo(dtype).eps)
    size = _inverse_roots(gram.diagonal(dim1=1, dim2=2), gram.dtype)  # (N, k)
    # The right-hand side 1 is scaled likewise.
    table = torch.cat([gram * size[:, :, None] * size[:, None], size[:, :, None]], dim=2)
    table.diagonal(dim1=1, dim2=2).add_(ridge)
    for j in range(k):
        row = table[:, j] / table[:, j, j, None]
        table = torch.addcmul(table, table[:, :, j, None], row[:, None], value=-1.0)
        table[:, j] = row
    solved = table[:, :, k] * size
    weights = solved / solved.sum(dim=1, keepdim=True)
    plain = torch.zeros_like(weights)
    plain[:, -1] = 1.0
    return torch.where(weights.isfinite().all(dim=1, keepdim=True), weights, plain).to(dtype)


def _sizes(given: Any) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _initialiser(config: HyperConfig) -> nn.Module | None:
    if config.source is None:
        return None
    made = {"sequence": nets.SequenceInitialiser, "images": nets.ImageInitialiser, "any": nets.FlatInitialiser}
    return made[config.kind](config.source, config.hidden, config.state)


def _classic(config: HyperConfig) -> Solver | None:
    if config.learns_steps or config.rank > 0 or config.plain_sum:
        return None
    if config.weights == "newest":
        return Picard()
    return None if config.local else Anderson(memory=config.memory)


def _correction(config: HyperConfig) -> nn.Module | None:
    if config.rank == 0:
        return None
    if config.kind == "sequence":
        return nets.SequenceCorrection(config.state, config.rank, config.reach)
    if config.kind == "images":
        return nets.ImageCorrection(config.state)
    return nets.FlatCorrection(config.state, config.rank)


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
            shaped.append(leaf.view(leaf.shape[0], *event))
            continue
        stored = leaf.view(leaf.shape[0], *(shape[axis] for axis in order[1:]))
        shaped.append(stored.permute([order.index(axis) for axis in range(len(order))]))
    return shaped


def _flat(spec: StateSpec, leaves: Leaves) -> Leaves:
    """The inverse of `_shaped`."""
    flat = []
    for leaf, order in zip(leaves, spec.orders, strict=True):
        stored = leaf if order is None or spec.batch_dims != 1 else leaf.permute(order)
        flat.append(stored.reshape(len(stored), stored.shape[1:].numel()).contiguous())  # a number each, too
    return flat


_FORMS = {
    "sequence": "leaves (N, T, features)",
    "images": "maps (N, channels, H, W)",
    "any": "systems of so many numbers",
}


def _state_sizes(spec: StateSpec, kind: str) -> tuple[int | None, ...]:
    """What the networks know of each leaf: features, channels, or all numbers of a system; None for another form."""
    events = [shape[spec.batch_dims :] for shape in spec.shapes]
    rank, axis = {"sequence": (2, 1), "images": (3, 0), "any": (None, 0)}[kind]
    return tuple(
        event.numel() if rank is None else int(event[axis]) if len(event) == rank else None for event in events
    )


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))


def source_of(problem: "Problem") -> Tensor | None:
    """What an initialiser reads: the first tensor with a row per system, of the context or else of the inputs."""
    n = problem.spec.num_systems
    found = (t for t in tree_tensors(problem.shown) if t.is_floating_point() and t.dim() > 1 and t.shape[0] == n)
    return next(found, None)


def _checked_source(problem: "Problem", config: HyperConfig) -> Tensor:
    x = source_of(problem)
    if x is None:
        raise ValueError(
            "HyperAnderson: the initialiser has nothing to read: no input of the problem, and no context, is a tensor "
            "with a row per system. Use a solver without one (source=None) here."
        )
    axis, things = {"sequence": (-1, "features"), "images": (1, "channels")}.get(config.kind, (None, "numbers"))
    form = {"sequence": (None, *problem.spec.shapes[0][1:2], None), "images": (None,) * 4}.get(config.kind)
    if form is not None and not (
        x.dim() == len(form) and all(n in (None, m) for n, m in zip(form, x.shape, strict=True))
    ):
        raise ValueError(
            f"HyperAnderson: the initialiser reads an input as its state, {_FORMS[config.kind]}, and the state has "
            f"shape {tuple(problem.spec.shapes[0])}; the first input has {tuple(x.shape)}. Pass one as context."
        )
    size = x.shape[1:].numel() if axis is None else x.shape[axis]
    if size != config.source:
        raise ValueError(
            f"HyperAnderson: the initialiser reads an input of {config.source} {things}, but the first one, of shape "
            f"{tuple(x.shape)}, has {size}; fit a solver for this model, or pass what it was fitted with as context."
        )
    return x
