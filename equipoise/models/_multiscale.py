"""The layer f of a multiscale DEQ: a residual block per resolution, fusion of all resolutions, and a last mixing.

On z = (z_1, …, z_m), the finest resolution first, with injections x_i (zero where there is none):

    t = relu(GN(conv3×3(z_i))),   t = GN(D conv3×3(t) + x_i) + z_i,   r_i = GN(relu(t))        residual block
    s_i = Σ_j fuse_ij(r_j)                                                                     fusion
    z'_i = GN'(conv1×1(relu(s_i)))                                                             mixing

Normalisation is that of groups of channels of one sample, so samples do not depend on each other. Dropout masks D and
normalised weights are constant during a solve. With one resolution f is the residual block alone.

Each resolution has half the pixels of the one before, rounded up; maps that are up-sampled from it are cropped, so any
image size will do.

What is between two convolutions is one operation, and on a GPU one kernel: see `equipoise.ops.norm`. A map that
goes to a convolution is written in the dtype that it computes in, and so is the result, which is rounded to it in the
next evaluation anyway; states stay as wide as they are.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._compat import inside_a_transform
from equipoise.nn.dropout import ChannelDropout2d
from equipoise.nn.norm import weight_norm as normalised
from equipoise.ops.norm import group_norm, residual_norm
from equipoise.ops.taps import product_dtype

States = tuple[Tensor, ...]
"""One map (N, C_i, H_i, W_i) per resolution, the finest first."""


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the size of maps, or halves it, rounded up, with a stride of 2."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)


def halved(size: int) -> int:
    """Half a number of pixels, rounded up: what a stride of 2 leaves."""
    return (size + 1) // 2


def _normed(norm: nn.Module, x: Tensor, plus: Tensor | None = None, **options: Any) -> Tensor:
    """`group_norm` by the settings and parameters of a module."""
    assert isinstance(norm, nn.GroupNorm)
    return group_norm(x, norm.num_groups, norm.weight, norm.bias, plus, eps=norm.eps, **options)


def conv_dtype(z: Tensor) -> torch.dtype:
    """What maps are written in for a convolution: the dtype of autocast, but not where vmap may keep it from acting."""
    return z.dtype if not torch.compiler.is_compiling() and inside_a_transform() else product_dtype(z)


class _Both(torch.autograd.Function):
    """A map as it is and in another dtype, for those who use it twice: one pass adds up both cotangents."""

    @staticmethod
    def forward(z: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return z.view_as(z), z.to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + grads[1], None  # in the wider dtype, which is that of the map


class ResidualBlock(nn.Module):
    """(z, x) ↦ GN(relu(GN(D conv(relu(GN(conv(z)))) + x) + z)) at one resolution.

    Args:
        channels: Of the state.
        hidden: Channels between the two convolutions.
        groups: Of normalisation.
        dropout: Probability of dropping a channel.
        weight_norm: Normalise the weights of both convolutions.
    """

    def __init__(self, channels: int, hidden: int, groups: int, dropout: float, weight_norm: bool) -> None:
        super().__init__()
        self.widen, self.narrow = conv(channels, hidden, 3), conv(hidden, channels, 3)
        if weight_norm:
            normalised(self.widen)
            normalised(self.narrow)
        self.norm_hidden = nn.GroupNorm(groups, hidden)
        self.norm_sum, self.norm_out = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)
        self.dropout = ChannelDropout2d(dropout)

    def forward(self, z: Tensor, x: Tensor | None, dtype: torch.dtype, uses: int) -> States:
        """The result in a dtype of choice, once for every place that uses it."""
        narrow = conv_dtype(z)
        narrowed = z
        if narrow != z.dtype and not torch.compiler.is_compiling():
            z, narrowed = _Both.apply(z, narrow)  # type: ignore[no-untyped-call]
        t = self.narrow(_normed(self.norm_hidden, self.widen(narrowed), relu=True, dtype=narrow))
        inner, outer = self.norm_sum, self.norm_out
        return residual_norm(
            t,
            z,
            inner.num_groups,
            (inner.weight, inner.bias),
            (outer.weight, outer.bias),
            mask=self.dropout.mask(t),
            x=x,
            eps=(inner.eps, outer.eps),
            dtype=dtype,
            uses=uses,
        )


def _down(inputs: int, outputs: int, levels: int, groups: int) -> nn.Sequential:
    """From a finer resolution: a strided convolution per level, rectified in between."""
    layers: list[nn.Module] = []
    for level in range(levels):
        last = level == levels - 1
        width = outputs if last else inputs
        layers += [conv(inputs, width, 3, stride=2), nn.GroupNorm(groups, width)]
        layers += [] if last else [nn.ReLU()]
    return nn.Sequential(*layers)


class Fusion(nn.Module):
    """r ↦ relu(Σ_j fuse_ij(r_j)) for each resolution i.

    Args:
        channels: Per resolution.
        groups: Of normalisation.
    """

    def __init__(self, channels: Sequence[int], groups: int) -> None:
        super().__init__()
        self.paths = nn.ModuleDict()
        for (i, to), (j, of) in itertools.product(enumerate(channels), repeat=2):
            if j > i:
                self.paths[_path(j, i)] = nn.Sequential(conv(of, to, 1), nn.GroupNorm(groups, to))
            elif j < i:
                self.paths[_path(j, i)] = _down(of, to, i - j, groups)

    def forward(self, r: Sequence[States]) -> Iterator[Tensor]:
        """From each resolution's map, given as often as there are resolutions."""
        for i, maps in enumerate(r):
            total, others = maps[i], [j for j in range(len(r)) if j != i]
            for j in others:
                total = self._added(total, r[j][i], i, j, relu=j == others[-1])
            yield total

    def _added(self, total: Tensor, y: Tensor, i: int, j: int, relu: bool) -> Tensor:
        """What comes from resolution j to resolution i, added to what is there."""
        layers, dtype = list(self.paths[_path(j, i)]), total.dtype  # type: ignore[call-overload]
        for level in range(0, len(layers) - 2, 3):  # convolution, normalisation, rectifier
            y = _normed(layers[level + 1], layers[level](y), relu=True, dtype=dtype)
        return _normed(layers[-1], layers[-2](y), total, enlarge=2 ** max(0, j - i), relu=relu, dtype=dtype)


def _path(source: int, target: int) -> str:
    return f"{source}_to_{target}"


class Mixing(nn.Sequential):
    """s ↦ GN'(conv1×1(relu(s))): what follows fusion; half as many groups as elsewhere."""

    def __init__(self, channels: int, groups: int, affine: bool, weight_norm: bool) -> None:
        mix = conv(channels, channels, 1)
        if weight_norm:
            normalised(mix)
        super().__init__(nn.ReLU(), mix, nn.GroupNorm(max(1, groups // 2), channels, affine=affine))

    def forward(self, s: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """From sums that are rectified already, the result in a dtype of choice."""
        return _normed(self[2], self[1](s), dtype=dtype)


class MultiscaleCell(nn.Module):
    """The layer f on a tuple of maps; the formulas are at the top of this file.

    Args:
        channels: Per resolution, the finest first.
        expansion: Hidden channels of a block over its channels, rounded to a multiple of `groups`.
        groups: Of normalisation; half as many after fusion.
        dropout: Probability of dropping a channel in a block.
        weight_norm: Normalise the weights of blocks and of the last mixing; those of fusion are plain.
        post_affine: Scale and shift in the last normalisation.
        init_std: Standard deviation of the initial weights of fusion; others are uniform within ±1/√fan-in.
    """

    def __init__(
        self,
        channels: Sequence[int],
        *,
        expansion: float = 5,
        groups: int = 8,
        dropout: float = 0.0,
        weight_norm: bool = True,
        post_affine: bool = False,
        init_std: float = 0.01,
    ) -> None:
        super().__init__()
        self.channels = tuple(channels)
        hidden = [max(1, round(expansion * width / groups)) * groups for width in channels]
        self.blocks = nn.ModuleList(
            ResidualBlock(width, inner, groups, dropout, weight_norm)
            for width, inner in zip(channels, hidden, strict=True)
        )
        several = self.channels if len(self.channels) > 1 else ()
        self.fusion = Fusion(several, groups)
        self.mixings = nn.ModuleList(Mixing(width, groups, post_affine, weight_norm) for width in several)
        for module in self.fusion.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=init_std)

    def initial_state(self, x: States) -> States:
        """Zeros in x's memory format and the dtype of the norms: under autocast the injection's is a lower one."""
        finest, block = x[0], self.blocks[0]
        assert isinstance(block, ResidualBlock)
        height, width = finest.shape[2:]
        dtype = block.norm_out.weight.dtype
        last = finest.is_contiguous(memory_format=torch.channels_last) and not finest.is_contiguous()
        layout = torch.channels_last if last else torch.contiguous_format
        states = []
        for channels in self.channels:
            shape = (finest.shape[0], channels, height, width)
            states.append(torch.empty(shape, dtype=dtype, device=finest.device, memory_format=layout).zero_())
            height, width = halved(height), halved(width)
        return tuple(states)

    def forward(self, z: States, x: States) -> States:
        """f(z) with injections x at the finest resolutions, as many as there are."""
        given = itertools.chain(x, itertools.repeat(None))
        several = len(self.blocks) > 1
        # Under autocast what goes to a convolution is as narrow as it would make it.
        r = [
            block(state, injected, conv_dtype(state), len(z))
            for block, state, injected in zip(self.blocks, z, given, strict=False)
        ]
        if not several:
            return tuple(r[0])
        sums = zip(self.mixings, self.fusion(r), z, strict=True)
        return tuple(mix(total, conv_dtype(state)) for mix, total, state in sums)
