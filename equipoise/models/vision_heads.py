"""What reads the states of a multiscale equilibrium, and what makes its injection: outside of f, so with BatchNorm."""

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise._compat import reenter_autocast
from equipoise.models._multiscale import conv, conv_dtype


def normed(layer: nn.Module, channels: int, momentum: float, affine: bool = True) -> list[nn.Module]:
    """A convolution, BatchNorm and ReLU."""
    return [layer, nn.BatchNorm2d(channels, momentum=momentum, affine=affine), nn.ReLU()]


class Stem(nn.Sequential):
    """Images to the map that is injected: two convolutions, more for more than two downsamplings, a 1×1 convolution.

    Args:
        in_channels: Of images.
        channels: Of the map.
        downsamplings: How many times the size is halved, 0 to 3.
        mix: Whether the 1×1 convolution is there.
        momentum: Of BatchNorm.
    """

    def __init__(self, in_channels: int, channels: int, downsamplings: int, mix: bool, momentum: float) -> None:
        layers: list[nn.Module] = []
        for k in range(max(2, downsamplings)):
            stride = 2 if k < downsamplings else 1
            layers += normed(conv(channels if k else in_channels, channels, 3, stride), channels, momentum)
        if mix:
            layers += normed(conv(channels, channels, 1), channels, momentum)
        super().__init__(*layers)


class Injections(nn.Module):
    """The stem's map for every resolution: averaged over pixels, then a 1×1 convolution for the coarser ones.

    Args:
        channels: Per resolution, the finest first.
        momentum: Of BatchNorm.
    """

    def __init__(self, channels: Sequence[int], momentum: float) -> None:
        super().__init__()
        finest, *coarser = channels
        self.mixes = nn.ModuleList(nn.Sequential(*normed(conv(finest, width, 1), width, momentum)) for width in coarser)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        injections = [x]
        for mix in self.mixes:
            # Pixels that do not come in pairs are averaged over what there is.
            x = F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)
            injections.append(mix(x))
        return tuple(injections)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut, to four times `hidden` channels."""

    def __init__(self, channels: int, hidden: int, momentum: float) -> None:
        super().__init__()
        outputs = 4 * hidden
        layers = normed(conv(channels, hidden, 1), hidden, momentum, affine=False)
        layers += normed(conv(hidden, hidden, 3), hidden, momentum, affine=False)
        layers += normed(conv(hidden, outputs, 1), outputs, momentum, affine=False)[:-1]
        self.body = nn.Sequential(*layers)
        same = channels == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*normed(conv(channels, outputs, 1), outputs, momentum)[:-1])
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ClassificationHead(nn.Module):
    """States to scores of classes: a bottleneck each, then y ← bottleneck(z_{i+1}) + down(y), mean over pixels, linear.

    Args:
        channels: Of the states, the finest first.
        head_channels: Of the bottlenecks; they give four times as many.
        final_channels: Before the mean.
        num_classes: Scores.
        momentum: Of BatchNorm.
        init_std: Standard deviation of the initial weights of convolutions.
    """

    def __init__(
        self,
        channels: Sequence[int],
        head_channels: Sequence[int],
        final_channels: int,
        num_classes: int,
        *,
        momentum: float = 0.1,
        init_std: float = 0.01,
    ) -> None:
        super().__init__()
        pairs = zip(channels, head_channels, strict=True)
        self.bottlenecks = nn.ModuleList(Bottleneck(width, hidden, momentum) for width, hidden in pairs)
        widths = [4 * hidden for hidden in head_channels]
        self.downs = nn.ModuleList(
            nn.Sequential(*normed(conv(fine, coarse, 3, stride=2, bias=True), coarse, momentum))
            for fine, coarse in itertools.pairwise(widths)
        )
        self.final = nn.Sequential(*normed(conv(widths[-1], final_channels, 1, bias=True), final_channels, momentum))
        self.classifier = nn.Linear(final_channels, num_classes)
        initialise(self, init_std)

    def forward(self, states: Sequence[Tensor], images: Tensor) -> Tensor:
        """Scores (N, classes); the images are not looked at again."""
        y = self.bottlenecks[0](states[0])
        for bottleneck, down, state in zip(self.bottlenecks[1:], self.downs, states[1:], strict=True):  # type: ignore[index,arg-type]
            y = bottleneck(state) + down(y)
        return self.classifier(self.final(y).mean(dim=(2, 3)))


class SegmentationHead(nn.Module):
    """States to scores of classes for each pixel: all states at the finest resolution, then two 1×1 convolutions.

    With details, what is thinner than a pixel of the states is seen too: at half the size of the image, features of the
    image and of the states add to the scores, nothing to begin with.

    Args:
        channels: Of the states, the finest first.
        final_channels: Between the convolutions.
        num_classes: Scores.
        in_channels: Of images.
        details: Channels at half the size of the image; 0 for no details.
        momentum: Of BatchNorm.
        init_std: Standard deviation of the initial weights of convolutions.
    """

    def __init__(
        self,
        channels: Sequence[int],
        final_channels: int,
        num_classes: int,
        *,
        in_channels: int = 3,
        details: int = 0,
        momentum: float = 0.01,
        init_std: float = 0.01,
    ) -> None:
        super().__init__()
        self.final = nn.Sequential(*normed(conv(sum(channels), final_channels, 1, bias=True), final_channels, momentum))
        self.classifier = conv(final_channels, num_classes, 1, bias=True)
        initialise(self, init_std)
        self.details = _Details(in_channels, final_channels, details, num_classes, momentum) if details else None

    def forward(self, states: Sequence[Tensor], images: Tensor) -> Tensor:
        """Scores (N, classes, H, W) of images (N, C, H, W)."""
        finest = states[0].shape[2:]
        y = self.final(torch.cat([_for_a_convolution(state, finest) for state in states], dim=1))
        scores = self.classifier(y)
        if self.details is not None:
            scores = self.details(scores, y, images)
        return resized(scores, images.shape[2:])


class _Details(nn.Module):
    """Scores and maps of few pixels, and an image, to scores at half the size of the image."""

    def __init__(self, in_channels: int, inputs: int, channels: int, num_classes: int, momentum: float) -> None:
        super().__init__()
        self.image = nn.Sequential(*normed(conv(in_channels, channels, 3, stride=2), channels, momentum))
        self.narrow = nn.Sequential(*normed(conv(inputs, channels, 1), channels, momentum))
        self.join = nn.Sequential(*normed(conv(2 * channels, channels, 3), channels, momentum))
        self.classifier = conv(channels, num_classes, 1)
        nn.init.zeros_(self.classifier.weight)

    def forward(self, scores: Tensor, y: Tensor, images: Tensor) -> Tensor:
        fine = self.image(images)
        size = fine.shape[2:]
        wide = _for_a_convolution(self.narrow(y), size)
        return resized(scores, size) + self.classifier(self.join(torch.cat([wide, fine], 1)))


def resized(x: Tensor, size: Sequence[int]) -> Tensor:
    """A map at another size, by bilinear interpolation between corners."""
    return x if x.shape[2:] == torch.Size(size) else F.interpolate(x, tuple(size), mode="bilinear", align_corners=True)


def _for_a_convolution(x: Tensor, size: Sequence[int]) -> Tensor:
    """The same for a convolution, in inference in the dtype that it computes in.

    Autocast interpolates in float32, and the convolution rounds that: twice the traffic for nothing. Gradients are
    summed up by interpolation, so they stay wide.
    """
    if torch.is_grad_enabled():
        return resized(x, size)
    narrow = conv_dtype(x)
    with reenter_autocast(x.device.type, None):
        x = x.to(narrow)
        if x.is_cuda and x.is_contiguous(memory_format=torch.channels_last):
            return resized_by_products(x, size)
        return resized(x, size)


def resized_by_products(x: Tensor, size: Sequence[int]) -> Tensor:
    """As `resized`, as products of matrices: a fraction of the time on a GPU where channels lie side by side."""
    if x.shape[2:] == torch.Size(size):
        return x
    down, across = (_between_corners(*sides, x.dtype, x.device) for sides in zip(x.shape[2:], size, strict=True))
    wide = across @ x.permute(0, 2, 3, 1)  # (N, h, W, C)
    tall = (down @ wide.flatten(2)).unflatten(2, wide.shape[2:])  # (N, H, W, C)
    return tall.permute(0, 3, 1, 2)


@functools.cache
def _between_corners(old: int, new: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(new, old) weights of bilinear interpolation along one axis; kept for good, since graphs may read them."""
    basis = torch.eye(old, dtype=torch.float64)[None]
    return F.interpolate(basis, new, mode="linear", align_corners=True)[0].T.to(device, dtype)


def initialise(module: nn.Module, std: float) -> None:
    """Convolutions from N(0, std), without bias to begin with."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.normal_(part.weight, std=std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
