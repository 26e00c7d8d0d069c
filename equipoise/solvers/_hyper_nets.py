"""The small networks of a learned solver: a first guess, a residual in few numbers, and the next step from those."""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, interpolate, linear, pad

from equipoise._problem import HALF
from equipoise._tree import Leaves

Module = TypeVar("Module", bound=nn.Module)

TAPS = 3  # of every convolution over time or space


# First guesses


class SequenceInitialiser(nn.Module):
    """A linear map to few features, a causal convolution of these over three positions with ReLU, a linear map of both.

    From (N, T, source) to (N, T, d) for each leaf. An input, which may have thousands of features, is read once, and
    multiplied in half precision if it is in it: this is only a start.

    Args:
        source: Features of a position of the input.
        hidden: Features between.
        state: Features of a position of each leaf.
    """

    def __init__(self, source: int, hidden: int, state: Sequence[int]) -> None:
        super().__init__()
        self.state = list(state)
        self.few = nn.Linear(source, hidden, bias=False)
        self.conv = nn.Conv1d(hidden, hidden, TAPS)
        self.out = _silent(nn.Linear(2 * hidden, sum(state)))

    def forward(self, x: Tensor, like: Leaves) -> Leaves:
        own = self.out.weight.dtype
        x = x if x.dtype in HALF else x.to(own)
        few = _preceded(linear(x, self.few.weight.to(x.dtype)), TAPS - 1, own)
        convolved = linear(few.unfold(1, TAPS, 1).flatten(2), self.conv.weight.flatten(1), self.conv.bias)
        return list(self.out(torch.cat([few[:, TAPS - 1 :], convolved.relu()], dim=-1)).split(self.state, dim=-1))


class ImageInitialiser(nn.Module):
    """For each resolution, from the input averaged to its size: a 3×3 convolution, ReLU, a 1×1 convolution.

    Before its ReLU a resolution also gets the coarser one's features, through a 1×1 convolution, so that the finest
    knows the whole image; and a 1×1 convolution of its input goes past the few features between.

    Args:
        source: Channels of the input (N, C, H, W).
        hidden: Channels between.
        state: Channels of each resolution, from the highest to the lowest.
    """

    def __init__(self, source: int, hidden: int, state: Sequence[int]) -> None:
        super().__init__()
        self.source, self.hidden = source, hidden
        self.inner = nn.ModuleList(nn.Conv2d(source, hidden, TAPS, padding=TAPS // 2) for _ in state)
        self.inner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.coarser = nn.ModuleList(nn.Conv2d(hidden, hidden, 1, bias=False) for _ in state[1:])
        self.out = nn.ModuleList(_silent(nn.Conv2d(hidden, channels, 1)) for channels in state)
        self.past = nn.ModuleList(_silent(nn.Conv2d(source, channels, 1, bias=False)) for channels in state)

    def forward(self, x: Tensor, like: Leaves) -> Leaves:
        x, starts, features = x.to(next(self.parameters()).dtype), [], None
        for level in reversed(range(len(like))):
            source = self.resized(x, like[level].shape[-2:])
            told = self.inner[level](source)
            if features is not None:
                told = told + interpolate(self.coarser[level](features), size=source.shape[-2:])
            features = told.relu()
            starts.append(self.out[level](features) + self.past[level](source))
        return starts[::-1]

    @staticmethod
    def resized(x: Tensor, size: Sequence[int]) -> Tensor:
        """The input (N, C, H, W) averaged to another size."""
        height, width = (int(side) for side in size)
        if x.shape[-2:] == (height, width):
            return x
        if x.shape[-2] % height == 0 and x.shape[-1] % width == 0:  # the same averages, by a simpler kernel
            return avg_pool2d(x, (x.shape[-2] // height, x.shape[-1] // width))
        return adaptive_avg_pool2d(x, (height, width))


class FlatInitialiser(nn.Module):
    """Two linear maps with ReLU between, from all numbers of the input to all of the state.

    Args:
        source: Numbers of a system's input.
        hidden: Numbers between.
        state: Numbers of a system's state, by leaf.
    """

    def __init__(self, source: int, hidden: int, state: Sequence[int]) -> None:
        super().__init__()
        self.state = list(state)
        self.inner, self.out = nn.Linear(source, hidden), _silent(nn.Linear(hidden, sum(state)))

    def forward(self, x: Tensor, like: Leaves) -> Leaves:
        x = x.flatten(1).to(self.out.weight.dtype)
        parts = self.out(self.inner(x).relu()).split(self.state, dim=-1)
        return [part.reshape(leaf.shape) for part, leaf in zip(parts, like, strict=True)]


# Residuals in few numbers


class TokenCompression(nn.Module):
    """A linear map of the last position's residual, or of the mean over positions.

    Linear, without a shift: a residual half as large has half the numbers.

    Args:
        state: Features of a position of each leaf (N, T, d).
        size: Numbers to keep.
        mean: Average over positions instead of taking the last one, which has seen all others.
    """

    def __init__(self, state: Sequence[int], size: int, mean: bool = False) -> None:
        super().__init__()
        self.mean, self.out = mean, nn.Linear(sum(state), size, bias=False)

    def forward(self, g: Leaves) -> Tensor:
        picked = [leaf.mean(dim=1) if self.mean else leaf[:, -1] for leaf in g]
        whole = picked[0] if len(picked) == 1 else torch.cat(picked, dim=-1)
        return self.out(whole.to(self.out.weight.dtype))


class LowestResolution(nn.Module):
    """The averages over space of the channels of the smallest map, and a linear map of them.

    Args:
        state: Channels of each resolution (N, C, H, W), from the highest to the lowest.
        size: Numbers to keep.
    """

    def __init__(self, state: Sequence[int], size: int) -> None:
        super().__init__()
        self.out = nn.Linear(state[-1], size, bias=False)

    def forward(self, g: Leaves) -> Tensor:
        return self.out(g[-1].mean(dim=(2, 3)).to(self.out.weight.dtype))


class Sketch(nn.Module):
    """Sums over stretches of a system's residual, with signs: a random projection for a state of any size.

    Signs follow an irregular pattern that depends on the place alone, so that inner products of residuals survive on
    average. A learned linear map follows.

    Args:
        leaves: Leaves of the state.
        size: Numbers to keep.
        stretches: Sums in each leaf.
    """

    def __init__(self, leaves: int, size: int, stretches: int = 64) -> None:
        super().__init__()
        self.stretches, self.out = stretches, nn.Linear(leaves * stretches, size, bias=False)

    def forward(self, g: Leaves) -> Tensor:
        sums = [self._sums(_numbers(leaf)) for leaf in g]
        return self.out(torch.cat(sums, dim=-1).to(self.out.weight.dtype))

    def _sums(self, leaf: Tensor) -> Tensor:
        n = leaf.shape[1]
        width = math.ceil(n / self.stretches)
        signed = pad(leaf * _signs(n, leaf.dtype, leaf.device), (0, width * self.stretches - n))
        return signed.unflatten(1, (self.stretches, width)).sum(2) / math.sqrt(width)  # as large as what is summed


def _signs(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The first signs of the pattern; kept, because a step consists of few operations, by powers of two, for good."""
    size = 1 << max(0, count - 1).bit_length()
    key = (size, dtype, device)
    if torch.compiler.is_compiling() or key not in _kept_signs:
        with torch.inference_mode(False):
            # Multiples of the golden ratio are spread evenly over an interval: no pattern that a state follows.
            made = torch.where((torch.arange(size, device=device) * 40_503) % 65_536 < 32_768, 1.0, -1.0).to(dtype)
        if torch.compiler.is_compiling():
            return made[:count]
        _kept_signs[key] = made
    return _kept_signs[key][:count]


_kept_signs: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


# The next step


class StepNet(nn.Module):
    """Two convolutions over the remembered steps: a score for each, and one step length.

    Args:
        features: Numbers that describe a remembered step.
        width: Numbers between the two.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(TAPS * features, width), _silent(nn.Linear(TAPS * width, 2))

    def forward(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """From (N, k, features), the newest last, to (N, k) and (N,); zeros before any fitting."""
        told = self.out(_neighbours(self.inner(_neighbours(steps)).relu()))
        return told[:, :, 0], told[:, -1, 1]


class SequenceCorrection(nn.Module):
    """A linear map of low rank of a position's residual and those before it: (N, T, d) by leaf, to the same.

    Being linear, it is as small as residuals are, and the same for all steps.

    Args:
        state: Features of a position of each leaf.
        rank: Features between.
        reach: Positions that are looked at.
    """

    def __init__(self, state: Sequence[int], rank: int, reach: int) -> None:
        super().__init__()
        self.state, self.reach = list(state), reach
        self.down = nn.Linear(sum(state), rank, bias=False)
        self.up = _silent(nn.Linear(reach * rank, sum(state), bias=False))

    def forward(self, g: Leaves) -> Leaves:
        few = self.down(torch.cat(g, dim=-1) if len(g) > 1 else g[0])  # (N, T, rank)
        if self.reach > 1:  # the position itself first, then the one before it, and so on
            few = _past(few, self.reach).flip(-1).mT.flatten(2)
        return list(self.up(few).split(self.state, dim=-1))


class ImageCorrection(nn.Module):
    """A linear map of the channels of a pixel's residual at each resolution: (N, C, H, W) by leaf, to the same.

    Channels are few, so the matrix is whole.

    Args:
        state: Channels of each resolution.
    """

    def __init__(self, state: Sequence[int]) -> None:
        super().__init__()
        self.maps = nn.ModuleList(_silent(nn.Conv2d(channels, channels, 1, bias=False)) for channels in state)

    def forward(self, g: Leaves) -> Leaves:
        return [mapped(leaf) for mapped, leaf in zip(self.maps, g, strict=True)]


class FlatCorrection(nn.Module):
    """A linear map of low rank of all numbers of a system: (N, ...) by leaf, to the same.

    Args:
        state: Numbers of a system by leaf.
        rank: Numbers between.
    """

    def __init__(self, state: Sequence[int], rank: int) -> None:
        super().__init__()
        self.state = list(state)
        self.down, self.up = nn.Linear(sum(state), rank, bias=False), _silent(nn.Linear(rank, sum(state), bias=False))

    def forward(self, g: Leaves) -> Leaves:
        added = self.up(self.down(torch.cat(list(map(_numbers, g)), dim=1))).split(self.state, dim=1)
        return [more.view_as(leaf) for more, leaf in zip(added, g, strict=True)]


def _numbers(leaf: Tensor) -> Tensor:
    """All numbers of each system, (N, D); one for systems (N,)."""
    return leaf.reshape(len(leaf), leaf.shape[1:].numel())


def _past(x: Tensor, count: int) -> Tensor:
    """(N, T, d, count) each position of (N, T, d) after the ones before it; none sees a later one."""
    return _preceded(x, count - 1, x.dtype).unfold(1, count, 1)


def _preceded(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(N, count + T, d) positions (N, T, d) after as many of zeros, in a dtype at least as wide: one launch for all."""
    return torch.cat([_nothing(x, count, dtype), x], dim=1)


def _neighbours(steps: Tensor) -> Tensor:
    """Each step between the ones before and after it, (N, k, 3·features); a convolution is a linear map of these."""
    nothing = _nothing(steps, TAPS // 2, steps.dtype)
    return torch.cat([nothing, steps, nothing], dim=1).unfold(1, TAPS, 1).mT.flatten(2).contiguous()


def _nothing(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(N, count, d) zeros to be put beside (N, T, d): one launch in all, where `pad` takes two."""
    return _zero(dtype, x.device).expand(x.shape[0], count, x.shape[2])


def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    """0; kept, because a step consists of few operations."""
    if torch.compiler.is_compiling() or (dtype, device) not in _zeros:
        with torch.inference_mode(False):  # else it could not be used where autograd is on
            made = torch.zeros((1, 1, 1), dtype=dtype, device=device)
        if torch.compiler.is_compiling():
            return made
        _zeros[dtype, device] = made
    return _zeros[dtype, device]


_zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _silent(module: Module) -> Module:
    """The module with an output of zero until it is fitted."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module
