"""One step of a learned solver, with the stopping rules and the best iterate, in two kernel launches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise._stop import Stop
from equipoise._tree import Leaves
from equipoise.ops._backend import use_kernel
from equipoise.ops.hyper import naive
from equipoise.ops.standing import Rules, Standing, require_fixed_budget
from equipoise.solvers._hyper_config import HyperConfig
from equipoise.solvers._hyper_nets import TAPS

if TYPE_CHECKING:
    from equipoise._problem import StateSpec
    from equipoise.solvers.hyper_anderson import HyperAnderson

# What a program of the kernels holds in registers. Loops over remembered steps are unrolled.
MOST_MEMORY = 8
MOST_WIDTH = 128
# The least that a product of matrices takes.
LEAST = 16


def obstacle(config: HyperConfig, spec: "StateSpec | None" = None) -> str | None:
    """Why `hyper_step` does not do for a learned solver, if it does not.

    Args:
        config: Of the solver.
        spec: Of the states, if it is known already; they must be of the form that the solver was made for, and stored
            in the order of their axes, unless only averages of maps are asked for.
    """
    if config.rank > 0:
        return f"it has no correction, and this one is of rank {config.rank}"
    if config.weights not in ("shift", "softmax", "free"):
        return f"weights={config.weights!r} are not those of the network alone"
    if config.plain_sum or not config.products:
        return "it is for weighted sums of residuals, and networks that see inner products"
    if config.local and config.compression != "last":
        return f"compression={config.compression!r} of single positions"
    if config.memory > MOST_MEMORY:
        return f"it holds {MOST_MEMORY} steps, not {config.memory}"
    if max(config.compressed, config.width) > MOST_WIDTH:
        return f"inner sizes above {MOST_WIDTH}"
    return None if spec is None else _obstacle_of_form(config, spec)


def _obstacle_of_form(config: HyperConfig, spec: "StateSpec") -> str | None:
    """A kernel takes sizes for granted, and would read beyond the end of the weights."""
    stored_otherwise = any(order is not None for order in spec.orders)
    if stored_otherwise and (config.compression != "lowest" or spec.batch_dims != 1):
        return "the state is not stored in the order of its axes"
    events = [tuple(shape[spec.batch_dims :]) for shape in spec.shapes]
    fits = len(events) == len(config.state)
    if config.compression != "sketch":  # which is for any size
        axes, features = (2, 1) if config.kind == "sequence" else (3, 0)
        fits = fits and all(len(event) == axes for event in events)
        fits = fits and tuple(event[features] for event in events) == config.state
    if config.local:
        fits = fits and len({event[0] for event in events}) == 1
    return None if fits else f"it was made for {config.kind} of sizes {config.state}, not for systems {events}"


def supports(config: HyperConfig, spec: "StateSpec | None" = None) -> bool:
    """Whether `hyper_step` does for a learned solver; see `obstacle`."""
    return obstacle(config, spec) is None


@dataclass(frozen=True)
class Pool:
    """Sums over a leaf's residual g (N, D) that a compression takes: `scale`·Σ_s g[:, offset + i·stride + s·pace].

    Attributes:
        channels: How many sums i; none of a leaf that is not looked at.
        stride: Distance from one sum to the next.
        count: Terms s of a sum; those beyond the end of the leaf are left out.
        pace: Distance from one term to the next.
        offset: Of the first term of the first sum.
        scale: Factor of all sums.
        signed: Whether terms have the signs of `Sketch`.
    """

    channels: int = 0
    stride: int = 1
    count: int = 1
    pace: int = 1
    offset: int = 0
    scale: float = 1.0
    signed: bool = False


@dataclass(frozen=True)
class HyperParts:
    """What a step needs of a learned solver.

    Its tensors are the solver's parameters themselves, but for `taps`: call `refresh` at the beginning of each solve.

    Attributes:
        compression: (c, features) the linear map of a residual's sums, or of a position's residual.
        inner: (w, 3·(c + memory + 1)) of the step network, as `bias`, `out` and `last`.
        taps: (3, c + memory + 1, w) a copy of `inner` in the order in which kernels read it.
        bias: (w,).
        out: (2, 3·w).
        last: (2,).
        weights: "shift", "softmax" or "free", as in `HyperConfig`.
        mixing: Whether the step length is learned.
        memory: Iterates combined, m.
        positions: Rows of a system that have weights of their own, T; 1 if all of it has the same.
        pools: By leaf, what is compressed of a system; none where positions have weights of their own.
    """

    compression: Tensor
    inner: Tensor
    taps: Tensor
    bias: Tensor
    out: Tensor
    last: Tensor
    weights: str
    mixing: bool
    memory: int
    positions: int
    pools: tuple[Pool, ...]

    @classmethod
    def of(cls, solver: "HyperAnderson", spec: "StateSpec") -> "HyperParts":
        """The parts of a solver for states of some form; an error if there is an `obstacle`."""
        config, reason = solver.config, obstacle(solver.config, spec)
        if reason is not None:
            raise ValueError(f"HyperParts: no fused step for this solver: {reason}. Use HyperAnderson.propose.")
        assert solver.step is not None
        assert solver.compression is not None
        events = [shape[spec.batch_dims :] for shape in spec.shapes]
        inner, out = solver.step.inner, solver.step.out
        (compression,) = solver.compression.parameters()
        return cls(
            compression=compression,
            inner=inner.weight,
            taps=_by_tap(inner.weight).contiguous(),
            bias=inner.bias,
            out=out.weight,
            last=out.bias,
            weights=config.weights,
            mixing=config.mixing,
            memory=config.memory,
            positions=events[0][0] if config.local else 1,
            pools=() if config.local else tuple(_pool(config, spec, i, event) for i, event in enumerate(events)),
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow changes of the parameters since this was made; one small copy."""
        self.taps.copy_(_by_tap(self.inner))

    @property
    def local(self) -> bool:
        return not self.pools

    @property
    def compressed(self) -> int:
        return self.compression.shape[0]

    @property
    def width(self) -> int:
        return self.inner.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.compression, self.taps, self.bias, self.out, self.last


def _by_tap(inner: Tensor) -> Tensor:
    return inner.detach().unflatten(1, (TAPS, -1)).permute(1, 2, 0)


def _pool(config: HyperConfig, spec: "StateSpec", leaf: int, event: torch.Size) -> Pool:
    if config.compression == "sketch":
        stretches = 64  # as `Sketch` has it by default, and nothing else is ever asked of it
        width = math.ceil(event.numel() / stretches)
        return Pool(stretches, stride=width, count=width, scale=1 / math.sqrt(width), signed=True)
    if config.compression == "lowest":
        if leaf < len(spec.shapes) - 1:
            return Pool()
        channels, pixels = event[0], event[1:].numel()
        stride, pace = (pixels, 1) if spec.orders[leaf] is None else (1, channels)  # else channels are the last axis
        return Pool(channels, stride=stride, count=pixels, pace=pace, scale=1 / pixels)
    positions, features = event
    if config.compression == "mean":
        return Pool(features, count=positions, pace=features, scale=1 / positions)
    return Pool(features, offset=(positions - 1) * features)


@dataclass
class HyperMemory:
    """The storage of a solve, for N systems of T positions with weights of their own, or of one.

    Attributes:
        images: Per leaf, (N, m, D_i) a ring of past f(z); any strides as long as the last axis is contiguous.
        residuals: Per leaf, (N, m, D_i) a ring of past f(z) − z.
        gram: (N, T, m, m) inner products of residuals, by slot.
        shares: (N, T, m, 3, w) by slot: what the few numbers of a residual add to the inner layer, by tap. They are
            relative to its size, so they stay as they are while the residual is remembered.
        weights: (N, T, m) of the newest step, the newest iterate last.
        mixing: (N, T) step length of the newest step.
        arrived: (N, T) int32, programs of a kernel that are done with some positions; zero between kernels.
    """

    images: Leaves
    residuals: Leaves
    gram: Tensor
    shares: Tensor
    weights: Tensor
    mixing: Tensor
    arrived: Tensor

    @classmethod
    def empty(
        cls,
        z: Leaves,
        parts: HyperParts,
        residual_dtype: torch.dtype | None = None,
        image_dtype: torch.dtype | None = None,
    ) -> "HyperMemory":
        """Storage for states like z.

        Args:
            z: A state.
            parts: Of the solver.
            residual_dtype: Of the ring of residuals; the state's if None. Rounding is relative to a residual, so
                half the bytes cost no accuracy at the equilibrium.
            image_dtype: Of the ring of images; the state's if None. Nothing is lost in the dtype that f returns.
        """
        n, m, t = z[0].shape[0], parts.memory, parts.positions

        def ring(dtype: torch.dtype | None) -> Leaves:
            # Slot-major: a slot is one contiguous piece, as in `equipoise._history`.
            return [leaf.new_empty((m, *leaf.shape), dtype=dtype).transpose(0, 1) for leaf in z]

        work = torch.float64 if z[0].dtype == torch.float64 else torch.float32
        return cls(
            images=ring(image_dtype),
            residuals=ring(residual_dtype),
            gram=z[0].new_zeros((n, t, m, m), dtype=work),
            shares=z[0].new_zeros((n, t, m, TAPS, parts.width), dtype=parts.inner.dtype),
            weights=z[0].new_zeros((n, t, m), dtype=work),
            mixing=z[0].new_ones((n, t), dtype=work),
            arrived=z[0].new_zeros((n, t), dtype=torch.int32),
        )


@torch.no_grad()
def hyper_step(
    z: Leaves,
    fz: Sequence[Tensor],
    memory: HyperMemory,
    standing: Standing,
    parts: HyperParts,
    *,
    stop: Stop,
    floor: float = 0.0,
    out: Leaves | None = None,
    backend: str = "auto",
) -> None:
    """Measure the iterates z with images f(z), and replace them by the proposals of a learned solver. All in place.

    The formula is that of `HyperAnderson`, the rules are those of the driver; see `anderson_step` for what the steps
    promise. There is no gradient.

    Bytes moved per unknown, with m slots in use and dtypes of sizes z, f (fz), F (images) and G (residuals): first pass
    z + f + (m − 1)·G read, F + G written; second pass m·F + m·G read (no G if the step length is not learned), z
    written, and z read and written once more where the iterate is the best so far. For m = 6 and float32 throughout 96
    bytes, with bfloat16 residuals 72, with bfloat16 for f and both rings 56. On top come what the network reads, and,
    where positions have weights of their own, parts of their sums: some hundredths of that.

    Args:
        z: Iterates, leaf by leaf (N, D_i); replaced.
        fz: Their images, same shapes; a narrower dtype is welcome.
        memory: Storage, from `HyperMemory.empty`.
        standing: Progress, from `Standing.start`.
        parts: Of the solver, from `HyperParts.of`.
        stop: When systems end. `check_every` and `max_steps` are the caller's business.
        floor: The relative residual at which rounding in f decides (`equipoise._stop.precision_floor`).
        out: With a fixed budget, where to write the proposals instead, as in `anderson_step`; saves 8 bytes.
        backend: "auto", "naive" or "triton".
    """
    require_fixed_budget("hyper_step", out, stop)
    rules = Rules.of(stop, floor, sum(leaf.shape[1] for leaf in z), standing.residual.dtype)
    rings = (*memory.images, *memory.residuals)
    implementation: ModuleType = naive
    tensors = (*z, *fz, *rings, *standing.best, *(out or ()), memory.shares, *parts.tensors)
    if use_kernel("hyper_step", backend, tensors):
        from equipoise.ops.hyper import triton

        implementation = triton
    implementation.step(z, list(fz), memory, standing, parts, rules, out)
