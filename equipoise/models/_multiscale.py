"""The layer f of a multiscale DEQ: a residual block per resolution, fusion of all resolutions, and a last mixing.

On z = (z_1, …, z_m), the finest resolution first, with injections x_i (zero where there is none):

    t = relu(GN(conv3×3(z_i))),   t = GN(D conv3×3(t) + x_i) + z_i,   r_i = GN(relu(t))        residual block
    s_i = Σ_j fuse_ij(r_j)                                                                     fusion
    z'_i = GN'(conv1×1(relu(s_i)))                                                             mixing

Normalisation is that of groups of channels of one sample, so samples do not depend on each other. Dropout masks D and
normalised weights are constant during a solve. With one resolution f is the residual block alone.

Each resolution has half the pixels of the one before, rounded up; maps that are up-sampled from it are cropped, so any
image size will do.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.nn.dropout import ChannelDropout2d
from equipoise.nn.norm import weight_norm as normalised

States = tuple[Tensor, ...]
"""One map (N, C_i, H_i, W_i) per resolution, the finest first."""


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the size of maps, or halves it, rounded up, with a stride of 2."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)


def halved(size: int) -> int:
    """Half a number of pixels, rounded up: what a stride of 2 leaves."""
    return (size + 1) // 2


def enlarged(x: Tensor, factor: int, size: Sequence[int]) -> Tensor:
    """Every pixel `factor` times in both directions, cropped to `size`."""
    larger = F.interpolate(x, scale_factor=factor, mode="nearest")
    return larger if larger.shape[2:] == torch.Size(size) else larger[..., : size[0], : size[1]]


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

    def forward(self, z: Tensor, x: Tensor | None) -> Tensor:
        t = self.dropout(self.narrow(F.relu(self.norm_hidden(self.widen(z)))))
        if x is not None:
            t = t + x
        return self.norm_out(F.relu(self.norm_sum(t) + z))


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
    """r ↦ Σ_j fuse_ij(r_j) for each resolution i.

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

    def forward(self, r: Sequence[Tensor]) -> list[Tensor]:
        sums = []
        for i, total in enumerate(r):
            size = total.shape[2:]
            for j, other in enumerate(r):
                if j != i:
                    part = self.paths[_path(j, i)](other)
                    total = total + (part if j < i else enlarged(part, 2 ** (j - i), size))
            sums.append(total)
        return sums


def _path(source: int, target: int) -> str:
    return f"{source}_to_{target}"


class Mixing(nn.Sequential):
    """s ↦ GN'(conv1×1(relu(s))): what follows fusion; half as many groups as elsewhere."""

    def __init__(self, channels: int, groups: int, affine: bool, weight_norm: bool) -> None:
        mix = conv(channels, channels, 1)
        if weight_norm:
            normalised(mix)
        super().__init__(nn.ReLU(), mix, nn.GroupNorm(max(1, groups // 2), channels, affine=affine))


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
        """Zeros in x's memory format and the dtype of the parameters: under autocast the injection's is a lower one."""
        finest = x[0]
        height, width = finest.shape[2:]
        dtype = next(self.parameters()).dtype
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
        r = [block(state, injected) for block, state, injected in zip(self.blocks, z, given, strict=False)]
        if len(r) == 1:
            return tuple(r)
        return tuple(mix(total) for mix, total in zip(self.mixings, self.fusion(r), strict=True))
