"""Augmentation of whole batches on their device, drawn by row: any split of a batch, and a resumed run, sees the same.

A rule says how many numbers it needs for a row; `row_draws` makes them from a key and the number of the row in the
whole batch, so nothing depends on a generator's state.
"""

import abc
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from equipoise._draws import Rows
from equipoise._errors import require_count, require_number
from equipoise.data._draws import keyed_bits

CUTMIX_DRAWS = 4
"""Numbers that `cutmix_windows` needs for a row."""

_BITS = 24  # of a drawn number: what float32 holds exactly, so that none is rounded up to 1


def row_draws(rows: Rows, count: int, *keys: int | str) -> Tensor:
    """Uniform numbers in [0, 1) for the rows of a share.

    Args:
        rows: Which rows of the whole batch.
        count: Numbers for each row.
        *keys: What else they depend on, e.g. a seed and the number of the batch.

    Returns:
        A float32 tensor of shape (rows, count), on the CPU.
    """
    numbers = torch.arange(rows.start, rows.stop)[:, None]
    bits = keyed_bits(*keys, numbers, torch.arange(count))
    return ((bits >> (64 - _BITS)) & (2**_BITS - 1)).float() / 2**_BITS


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Images of values 0 to 255 as float32 of mean 0 and deviation 1, by channel.

    Args:
        images: (N, C, H, W) uint8 or floating.
        mean: Of each channel, on the scale 0 to 1.
        std: Likewise.
    """
    shift, scale = constants(tuple(mean), images.device), constants(tuple(std), images.device)
    return (images.float() / 255 - shift.view(-1, 1, 1)) / scale.view(-1, 1, 1)


@functools.cache
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers on a device, brought there once: doing so waits for it. Kept for good, since graphs may read them."""
    return torch.tensor(values, device=device)


@dataclass(frozen=True)
class Augment(abc.ABC):
    """A random change of images, and of their masks if they have any."""

    draws: ClassVar[int]
    """Numbers needed for a row."""
    whole: ClassVar[bool] = False
    """Whether it cuts whole pictures where a set has them, squeezed to one size: `pixels` then follows the draws, (N,)
    what the width of a pixel is over its height."""

    @abc.abstractmethod
    def __call__(self, images: Tensor, targets: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Changed images and targets.

        Args:
            images: (N, C, H, W) of values 0 to 255.
            targets: (N,) classes, left alone, or (N, H, W) masks, changed with the images.
            draws: (N, `draws`) uniform numbers, on the device of the images.
        """


@dataclass(frozen=True)
class CropFlip(Augment):
    """A crop of the image's own size out of the image with a black frame, mirrored half of the time.

    Attributes:
        padding: Width of the frame.
        flip: Whether to mirror.
        erase: Side of a square that is blackened, its centre anywhere in the crop; 0 for none.
    """

    padding: int = 4
    flip: bool = True
    erase: int = 0
    draws: ClassVar[int] = 5

    def __post_init__(self) -> None:
        require_count("CropFlip", "padding", self.padding, low=0)
        require_count("CropFlip", "erase", self.erase, low=0)

    def __call__(self, images: Tensor, targets: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        if targets.dim() > 1:
            raise ValueError("CropFlip is for classification; masks are changed by ScaleCrop.")
        height, width = images.shape[-2:]
        top, left = (_integers(draws[:, k], 2 * self.padding + 1) for k in (0, 1))
        down = top[:, None] + torch.arange(height, device=images.device)  # (N, H)
        across = torch.arange(width, device=images.device).expand(len(images), -1)
        if self.flip:
            across = torch.where(draws[:, 2, None] < 0.5, across, width - 1 - across)
        crops = _pick(pad(images, (self.padding,) * 4), down, left[:, None] + across)
        if self.erase:
            rows, columns = (_window(draws[:, k], size, self.erase) for k, size in ((3, height), (4, width)))
            crops = crops.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)
        return crops, targets


@dataclass(frozen=True)
class CentreCrop(Augment):
    """The middle of each image: nothing random, for evaluation.

    Attributes:
        size: Side of the result.
    """

    size: int = 224
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        require_count("CentreCrop", "size", self.size)

    def __call__(self, images: Tensor, targets: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        height, width = images.shape[-2:]
        if self.size > min(height, width):
            raise ValueError(f"CentreCrop: images of {height} × {width} have no crop of {self.size}; lower the size.")
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return images[:, :, top : top + self.size, left : left + self.size], targets


@dataclass(frozen=True)
class ResizedCrop(Augment):
    """A window of random size and shape, scaled to a square, mirrored half of the time.

    The first of ten windows that fits is taken; if none does, the largest one in the middle. Of pictures that were
    squeezed to one size, windows are those of the pictures as they were: what they show is not squeezed.

    Attributes:
        size: Side of the result.
        area: Least and greatest share of the image's area.
        aspect: Least and greatest width over height.
    """

    size: int = 224
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    draws: ClassVar[int] = 23
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count("ResizedCrop", "size", self.size)
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(f"ResizedCrop: area must be shares of the image in order, (0.08, 1.0); got {self.area}.")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError(f"ResizedCrop: aspect must be positive and in order, (0.75, 1.33); got {self.aspect}.")

    def __call__(
        self, images: Tensor, targets: Tensor, draws: Tensor, pixels: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if targets.dim() > 1:
            raise ValueError("ResizedCrop is for classification; masks are changed by ScaleCrop.")
        height, width = images.shape[-2:]
        pixels = draws.new_ones(len(images)) if pixels is None else pixels
        area = height * width * (self.area[0] + (self.area[1] - self.area[0]) * draws[:, :10])
        low, high = (math.log(value) for value in self.aspect)
        # Shapes are drawn as they are seen: the wider pixels are, the fewer of them lie side by side in a window.
        aspect = torch.exp(low + (high - low) * draws[:, 10:20]) / pixels[:, None]
        wide, tall = (area * aspect).sqrt(), (area / aspect).sqrt()  # (N, 10)
        fits = (wide <= width) & (tall <= height)
        first = fits.long().argmax(1, keepdim=True)
        most = (
            (height * self.aspect[1] / pixels).clamp(max=width),
            (width / self.aspect[0] * pixels).clamp(max=height),
        )
        w, h = (
            torch.where(fits.any(1), side.gather(1, first)[:, 0], whole)
            for side, whole in zip((wide, tall), most, strict=True)
        )
        # Without a window that fits, the free room is shared evenly: the middle.
        u, v = (torch.where(fits.any(1), draws[:, k], 0.5) for k in (20, 21))
        flip = draws[:, 22] < 0.5
        down = _centres((height - h) * v, h / self.size, self.size)
        across = _centres((width - w) * u, w / self.size, self.size, flip)
        return _bilinear(images, down, across), targets


@dataclass(frozen=True)
class ScaleCrop(Augment):
    """Scale, crop and mirror images with their masks; what lies outside is black, and ignored in the mask.

    Attributes:
        size: Height and width of the result; None for those of the image.
        scales: Least and greatest factor.
        step: Factors are the least one plus multiples of this.
        flip: Whether to mirror half of the time.
        ignore: Label of what lies outside.
        colour: How far brightness and contrast are changed at most, as a share, and the balance of channels by half of
            it; 0 for not.
    """

    size: tuple[int, int] | None = None
    scales: tuple[float, float] = (0.5, 2.0)
    step: float = 0.1
    flip: bool = True
    ignore: int = 255
    colour: float = 0.0
    draws: ClassVar[int] = 9

    def __post_init__(self) -> None:
        if not 0 < self.scales[0] <= self.scales[1]:
            raise ValueError(f"ScaleCrop: scales must be positive and in order, got {self.scales}.")
        require_number("ScaleCrop", "step", self.step, low=0.0, open_low=True)
        require_number("ScaleCrop", "colour", self.colour, low=0.0, high=1.0)
        if self.size is not None and not isinstance(self.size, tuple | list):
            raise TypeError(f"ScaleCrop: size must be a height and a width, (360, 480), or None; got {self.size!r}.")
        for side in self.size or ():
            require_count("ScaleCrop", "size", side)

    def __call__(self, images: Tensor, targets: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        if targets.dim() != 3:
            raise ValueError("ScaleCrop is for segmentation: it needs masks; classification has CropFlip.")
        size = self.size or (images.shape[-2], images.shape[-1])
        # None above the greatest, which 1.5 / 0.1 may miss by rounding.
        count = 1 + math.floor((self.scales[1] - self.scales[0]) / self.step + 1e-6)
        scale = self.scales[0] + self.step * _integers(draws[:, 0], count)
        flip = (draws[:, 3] < 0.5) & self.flip
        mirror = (None, flip)
        down, across = (
            # Whole pixels of the scaled image, so that a factor of 1 moves pixels without mixing them.
            _centres(torch.round((scale * full - part) * draws[:, k]) / scale, 1 / scale, part, mirror[k - 1])
            for k, full, part in zip((1, 2), images.shape[-2:], size, strict=True)
        )
        inside = _within(down, images.shape[-2])[:, :, None] & _within(across, images.shape[-1])[:, None, :]
        nearest = _pick(targets[:, None], down.long(), across.long())[:, 0]
        ignored = torch.full_like(nearest, self.ignore)
        scaled = _bilinear(images, down, across)
        if self.colour:
            scaled = _recoloured(scaled, self.colour * (2 * draws[:, 4:] - 1))
        return scaled * inside[:, None], torch.where(inside, nearest, ignored)


def cutmix_windows(images: Tensor, draws: Tensor, share: float) -> Tensor:
    """(N, H, W) which pixels of images are to come from others.

    Windows have any share of the area, evenly drawn, and their centre anywhere; what lies outside is cut off.

    Args:
        images: (N, C, H, W).
        draws: (N, `CUTMIX_DRAWS`) uniform numbers, on the device of the images.
        share: Of the images that get a window.
    """
    height, width = images.shape[-2:]
    side = draws[:, 1, None].sqrt()
    rows, columns = (
        _window(draws[:, k], size, torch.round(side * size).long()) for k, size in ((2, height), (3, width))
    )
    return (draws[:, 0] < share)[:, None, None] & rows[:, :, None] & columns[:, None, :]


def _recoloured(images: Tensor, change: Tensor) -> Tensor:
    """Images (N, C, H, W) of values 0 to 255 with other brightness, contrast and balance of up to three channels.

    Args:
        images: The images.
        change: (N, 5) by how much, 0 for nothing; the balance by half of it.
    """
    brightness, contrast = 1 + change[:, 0, None], 1 + change[:, 1, None, None, None]
    balance = 1 + change[:, 2 : 2 + images.shape[1]] / 2
    # About the mean of the image, and by factors: what is dark stays visible.
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return ((mean + (images - mean) * contrast) * (brightness * balance)[:, :, None, None]).clamp(0, 255)


def _integers(draws: Tensor, limit: int) -> Tensor:
    """Whole numbers in [0, limit) from uniform ones."""
    return (draws * limit).long().clamp(max=limit - 1)


def _window(draws: Tensor, size: int, length: int | Tensor) -> Tensor:
    """(N, size) which of `size` places lie in a window about a place drawn evenly; its ends may be cut.

    Args:
        draws: (N,) uniform numbers.
        size: Places.
        length: Of all windows, or (N, 1) of each.
    """
    first = _integers(draws, size)[:, None] - length // 2
    places = torch.arange(size, device=draws.device)
    return (places >= first) & (places < first + length)


def _centres(start: Tensor, step: Tensor, count: int, flip: Tensor | None = None) -> Tensor:
    """(N, count) places, in pixels of the source, of the centres of `count` pixels of size `step` from `start` on."""
    index = torch.arange(count, device=start.device) + 0.5
    if flip is not None:
        index = torch.where(flip[:, None], count - index, index)
    return start[:, None] + step[:, None] * index


def _within(places: Tensor, size: int) -> Tensor:
    return (places >= 0) & (places < size)


def _pick(images: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Pixels in given rows (N, h) and columns (N, w) of each image; those outside are moved to the border."""
    height, width = images.shape[-2:]
    batch = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    down, across = down.clamp(0, height - 1), across.clamp(0, width - 1)
    return images[batch, channels, down[:, None, :, None], across[:, None, None, :]]


def _bilinear(images: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Values between pixels, at places (N, h) and (N, w) as `_centres` counts them."""
    height, width = images.shape[-2:]
    size = len(images), down.shape[1], across.shape[1]
    grid = torch.stack(
        [(2 * across / width - 1)[:, None, :].expand(size), (2 * down / height - 1)[:, :, None].expand(size)], dim=-1
    )
    return grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
