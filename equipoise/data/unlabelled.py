"""Inputs without labels: a folder of pictures, or a text, brought into the form of the data a model was trained on.

What is known of the usual sets is written down here, so that their files are not needed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.data.files import DamagedDataError, MissingDataError, Source, read_text
from equipoise.data.image_files import PICTURES, DataDir, covering, opened, pictures_in
from equipoise.data.image_sets import CIFAR10_MEAN, CIFAR10_STD, IMAGENET_MEAN, IMAGENET_STD, MNIST_MEAN, MNIST_STD
from equipoise.data.images import IGNORE, IMAGES, Decoded, ImageData, hold, load_images
from equipoise.data.text import CORPORA, TextCorpus
from equipoise.data.vocabulary import UnknownTokenError, Vocabulary

SUFFIXES = (*PICTURES, ".ppm")
MOST_UNKNOWN = 0.9  # of the tokens of a text: beyond that it is another language, or no text
_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Look:
    """What images of a set have in common.

    Attributes:
        mean: Of each channel, on the scale 0 to 1.
        std: Likewise.
        size: Height and width.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int]


KNOWN = {
    "cifar10": Look(CIFAR10_MEAN, CIFAR10_STD, (32, 32)),
    "mnist": Look(MNIST_MEAN, MNIST_STD, (28, 28)),
    "tiny_imagenet": Look(IMAGENET_MEAN, IMAGENET_STD, (64, 64)),
    "camvid": Look(IMAGENET_MEAN, IMAGENET_STD, (360, 480)),
    "cityscapes": Look(IMAGENET_MEAN, IMAGENET_STD, (1024, 2048)),
}
"""Sets that are read from files, as their loaders have them; a test compares."""


def look_of(name: str, data_dir: DataDir = None, options: Mapping[str, Any] | None = None) -> Look:
    """What the images of a set look like; the set is loaded only if it is neither a usual one nor a path.

    Args:
        name: A known set, or a folder, as in a recipe.
        data_dir: Where data files are.
        options: Of the set's loader.
    """
    options = dict(options or {})
    if name in KNOWN:
        look, smaller = KNOWN[name], options.get("downsample", 1)
        return Look(look.mean, look.std, (look.size[0] // smaller, look.size[1] // smaller))
    # A bare name may be a set that a program registers, so it is looked up.
    if name == "imagenet" or (name not in IMAGES and (os.sep in name or "/" in name)):
        side = options.get("size", 256)
        return Look(IMAGENET_MEAN, IMAGENET_STD, (side, side))
    try:
        data = load_images(name, data_dir, **options)
    except (MissingDataError, ValueError) as error:
        raise MissingDataError(
            f"mean, deviation and size of the images of {name!r} are known only from the set itself: {error}"
        ) from error
    image, _ = data.splits["train"].fetch(torch.tensor([0]), "cpu")
    return Look(data.mean, data.std, (image.shape[2], image.shape[3]))


def unlabelled_images(folder: str | os.PathLike[str], look: Look, classes: int, masks: bool) -> ImageData:
    """Pictures of a folder, at any depth, as a set of training images; the labels are empty ones.

    A picture is scaled until it covers the size of the look, and its middle is kept. What is hidden is no picture.

    Args:
        folder: Where the pictures are.
        look: Of the images the model knows.
        classes: How many the model knows.
        masks: Whether it names the class of every pixel.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        there = "is a file; give the folder that holds it" if folder.exists() else "is not there"
        raise MissingDataError(f"inputs: expected a folder of pictures, but {folder} {there}.")
    paths = [path for path in pictures_in(folder, SUFFIXES) if path.is_file()]
    if not paths:
        raise MissingDataError(f"inputs: {folder} has no pictures in it; sought at any depth: {', '.join(SUFFIXES)}.")
    if len(look.mean) not in _MODES:
        raise ValueError(f"inputs: pictures have 1 or 3 channels, but the model's images have {len(look.mean)}.")
    mode = _MODES[len(look.mean)]
    label = torch.full(look.size, IGNORE, dtype=torch.uint8) if masks else torch.tensor(0)
    split = hold(Decoded(len(paths), lambda i: (_covering(paths[i], look.size, mode), label)))
    names = tuple(str(number) for number in range(classes))
    return ImageData(str(folder), {"train": split}, names, look.mean, look.std, masks)


def _covering(path: Path, size: tuple[int, int], mode: str) -> Tensor:
    """The middle (C, H, W) of a picture, scaled to cover H × W."""
    with opened(path) as picture:
        return covering(picture, size, mode).view(-1, *size)


def unlabelled_text(path: str | os.PathLike[str], vocabulary: Vocabulary, corpus: str = "") -> TextCorpus:
    """A text file, plain or packed, as a corpus of training text.

    Args:
        path: The file, in UTF-8.
        vocabulary: Of the model.
        corpus: Name of the corpus the model knows; its rule for blanks at the ends of lines holds here, too.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        there = "is a folder; give a file in it" if path.is_dir() else "is not there"
        raise MissingDataError(f"inputs: expected a text file, but {path} {there}.")
    text, _ = read_text(Source.of(path))
    if corpus in CORPORA and CORPORA[corpus].strip:
        text = "\n".join(line.strip() for line in text.split("\n"))
    try:
        tokens = vocabulary.encode(text)
    except UnknownTokenError as error:
        known = str(error).removesuffix("use with_unknown().")
        raise DamagedDataError(f"inputs: {path}: {known}take it out of the text.") from error
    none = tokens[:0]
    unknown = 0 if vocabulary.unknown is None else int((tokens == vocabulary.unknown).sum())
    if len(tokens) and unknown > MOST_UNKNOWN * len(tokens):
        raise DamagedDataError(
            f"inputs: the model knows {1 - unknown / len(tokens):.0%} of the {len(tokens):,} tokens of {path}, so that "
            "these say little of what it meets in use: give text like that of its training."
        )
    return TextCorpus(str(path), tokens, none, none, vocabulary, {"tokens": len(tokens), "unknown": unknown})
