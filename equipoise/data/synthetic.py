"""Images that need no files: distorted digits, and shapes with masks. A sample is a function of key and number."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, interpolate

from equipoise._errors import require_count, unknown_name
from equipoise.data._draws import keyed_bits
from equipoise.data.image_files import DataDir
from equipoise.data.images import Decoded, ImageData, Stored, register_images

# Five by seven dots, a row after the other.
_GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
SHAPES = ("circle", "rectangle", "triangle")
_COLOURS = ((40, 40, 40), (0, 114, 178), (213, 94, 0), (0, 158, 115))


def _uniform(numbers: Tensor, count: int, *keys: int | str) -> Tensor:
    """(N, count) uniform numbers in [0, 1), a function of the keys and of each sample's number."""
    bits = keyed_bits(*keys, numbers[:, None], torch.arange(count))
    return ((bits >> 40) & 0xFFFFFF).float() / 2**24


def _noise(numbers: Tensor, count: int, *keys: int | str) -> Tensor:
    """(N, count) numbers of mean 0 and deviation 1, nearly normal."""
    one, two = (_uniform(numbers, count, *keys, name) for name in ("one", "two"))
    return (-2 * torch.log(1 - one)).sqrt() * torch.cos(2 * math.pi * two)


def _between(draws: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * draws


def _bytes(images: Tensor) -> Tensor:
    return (255 * images.clamp(0, 1)).round().to(torch.uint8)


@register_images("digits")
def digits(
    data_dir: DataDir = None, size: int = 16, train_size: int = 4000, test_size: int = 1000, seed: int = 0
) -> ImageData:
    """Grey digits of a dotted font, turned, slanted, bent, thick or thin, faint, with noise. Needs no files.

    Args:
        data_dir: Not used.
        size: Height and width.
        train_size: Training images.
        test_size: Validation images, and as many test images.
        seed: Key of all of it.
    """
    for name, value in (("size", size), ("train_size", train_size), ("test_size", test_size)):
        require_count("digits", name, value)
    sizes = {"train": train_size, "valid": test_size, "test": test_size}
    splits: dict[str, Stored | Decoded] = {k: _draw_digits(torch.arange(n), size, seed, k) for k, n in sizes.items()}
    classes = tuple(str(digit) for digit in range(10))
    return ImageData("digits", splits, classes, (0.35,), (0.25,), info={"size": size, "key": seed})


def _draw_digits(numbers: Tensor, size: int, seed: int, split: str) -> Stored:
    labels = keyed_bits(seed, "digits class", split, numbers) % 10
    u = _uniform(numbers, 13, seed, "digits", split)
    angle = _between(u[:, 0], -0.35, 0.35)
    slant, narrow, short = _between(u[:, 1], -0.3, 0.3), _between(u[:, 2], 1.0, 1.5), _between(u[:, 3], 0.95, 1.3)
    place = torch.arange(size) + 0.5
    y, x = torch.meshgrid(2 * place / size - 1, 2 * place / size - 1, indexing="ij")
    x = x + _between(u[:, 4], -0.18, 0.18)[:, None, None]  # (N, H, W)
    y = y + _between(u[:, 5], -0.14, 0.14)[:, None, None]
    c, s = angle.cos()[:, None, None], angle.sin()[:, None, None]
    x, y = c * x + s * y, c * y - s * x
    waves = [
        0.12 * u[:, 6 + k, None, None] * torch.sin(3 * v + 6.3 * u[:, 8 + k, None, None]) for k, v in ((0, y), (1, x))
    ]
    x, y = x + slant[:, None, None] * y + waves[0], y + waves[1]
    grid = torch.stack([narrow[:, None, None] * x, short[:, None, None] * y], dim=-1)
    ink = grid_sample(_templates()[labels], grid, mode="bilinear", padding_mode="zeros", align_corners=False)[:, 0]
    thin = _between(u[:, 10], 0.3, 0.6)[:, None, None]
    stroke = torch.sigmoid((ink - thin) / 0.1)
    paper, contrast = _between(u[:, 11], 0.1, 0.4)[:, None, None], _between(u[:, 12], 0.35, 0.6)[:, None, None]
    noise = 0.06 * _noise(numbers, size * size, seed, "digits noise", split).view(-1, size, size)
    return Stored(_bytes(paper + contrast * stroke + noise)[:, None].contiguous(), labels)


def _templates() -> Tensor:
    """(10, 1, 36, 36) glyphs, smoothed, with an empty frame."""
    dots = torch.tensor([[[float(dot) for dot in row] for row in glyph.split()] for glyph in _GLYPHS])
    framed = torch.zeros(10, 1, 9, 9)
    framed[:, 0, 1:8, 2:7] = dots
    return interpolate(framed, scale_factor=4, mode="bicubic", align_corners=False).clamp(0, 1)


@register_images("shapes")
def shapes(
    data_dir: DataDir = None,
    size: int = 32,
    train_size: int = 1500,
    test_size: int = 300,
    labels: Literal["masks", "classes"] = "masks",
    seed: int = 0,
) -> ImageData:
    """Coloured circles, rectangles and triangles on a shaded ground, with noise. Needs no files.

    Colours say nothing of the shape. With masks an image has two or three shapes, which hardly overlap; with classes it
    has one.

    Args:
        data_dir: Not used.
        size: Height and width.
        train_size: Training images.
        test_size: Validation images, and as many test images.
        labels: "masks", the class of each pixel (0 is the ground), or "classes", that of the only shape.
        seed: Key of all of it.
    """
    for name, value in (("size", size), ("train_size", train_size), ("test_size", test_size)):
        require_count("shapes", name, value)
    if labels not in ("masks", "classes"):
        raise unknown_name("kind of labels", labels, ("masks", "classes"))
    sizes = {"train": train_size, "valid": test_size, "test": test_size}
    masks = labels == "masks"
    splits: dict[str, Stored | Decoded] = {
        split: _draw_shapes(torch.arange(count), size, seed, split, masks) for split, count in sizes.items()
    }
    classes = ("ground", *SHAPES) if masks else SHAPES
    colours = _COLOURS if masks else ()
    info = {"size": size, "labels": labels, "key": seed}
    return ImageData("shapes", splits, classes, (0.5,) * 3, (0.25,) * 3, masks, (), colours, info)


def _draw_shapes(numbers: Tensor, size: int, seed: int, split: str, masks: bool) -> Stored:
    count = len(numbers)
    place = (torch.arange(size) + 0.5) / size
    y, x = torch.meshgrid(place, place, indexing="ij")
    u = _uniform(numbers, 6, seed, "shapes", split)
    tilt = _between(u[:, 3:5], -0.2, 0.2)
    shade = tilt[:, 0, None, None] * (x - 0.5) + tilt[:, 1, None, None] * (y - 0.5)
    ground = _between(u[:, :3], 0.2, 0.8)[:, :, None, None]
    images, mask = ground + shade[:, None], torch.zeros(count, size, size, dtype=torch.uint8)
    kinds = torch.zeros(count, dtype=torch.int64)
    # Each shape has a quarter of the image to itself, but for its edges.
    quarters = keyed_bits(seed, "quarter", split, numbers[:, None], torch.arange(4)).argsort(1)
    for layer in range(3 if masks else 1):
        v = _uniform(numbers, 8, seed, "shape", split, layer)
        kinds = (3 * v[:, 0]).long()
        middle = torch.stack([quarters[:, layer] % 2, quarters[:, layer] // 2], dim=1) * 0.44 + 0.28
        inside = _shape(kinds, x, y, middle, v)
        if layer == 2:
            inside &= (u[:, 5] < 0.5)[:, None, None]
        # Apart from the ground by 0.25 to 0.5 in every channel, up or down.
        away = torch.where(v[:, 5:8] < 0.5, v[:, 5:8] / 2 - 0.5, v[:, 5:8] / 2)[:, :, None, None]
        colour = torch.where((ground + away - 0.5).abs() > 0.5, ground - away, ground + away)
        images = torch.where(inside[:, None], colour + shade[:, None], images)
        mask = torch.where(inside, (kinds + 1).to(torch.uint8)[:, None, None], mask)
    noise = 0.04 * _noise(numbers, 3 * size * size, seed, "shapes noise", split).view_as(images)
    return Stored(_bytes(images + noise), mask if masks else kinds)


def _shape(kinds: Tensor, x: Tensor, y: Tensor, middle: Tensor, draws: Tensor) -> Tensor:
    """(N, H, W) whether a pixel lies in the shape of each sample, near its middle (N, 2)."""
    radius = _between(draws[:, 1], 0.18, 0.24)[:, None, None]
    across = x - (middle[:, 0] + _between(draws[:, 2], -0.04, 0.04))[:, None, None]
    down = y - (middle[:, 1] + _between(draws[:, 3], -0.04, 0.04))[:, None, None]
    angle = 2 * math.pi * draws[:, 4]
    c, s = angle.cos()[:, None, None], angle.sin()[:, None, None]
    along, beside = c * across + s * down, c * down - s * across
    circle = along**2 + beside**2 < radius**2
    rectangle = (along.abs() < 1.05 * radius) & (beside.abs() < 0.65 * radius)
    # Three half-planes at distance `inner` from the middle make an equilateral triangle.
    inner = 0.62 * radius
    sides = [
        math.cos(turn) * along + math.sin(turn) * beside < inner for turn in (0, 2 * math.pi / 3, -2 * math.pi / 3)
    ]
    triangle = sides[0] & sides[1] & sides[2]
    kinds = kinds[:, None, None]
    return torch.where(kinds == 0, circle, torch.where(kinds == 1, rectangle, triangle))
