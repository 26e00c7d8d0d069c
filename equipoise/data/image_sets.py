"""Sets of images with classes: CIFAR-10, MNIST, Tiny-ImageNet, and folders in the manner of ImageNet."""

import functools
import io
import os
import pickle
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise._errors import require_count
from equipoise.data.files import DamagedDataError, Source, TextFile, find_text
from equipoise.data.image_files import (
    PICTURES,
    DataDir,
    Place,
    arrays,
    class_folders,
    decode,
    decode_square,
    decode_squeezed,
    read_known,
    readable,
    tiles,
)
from equipoise.data.images import Decoded, ImageData, Stored, hold, register_images, stacked

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR10_BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR10 = Place(
    "Get it: cifar-10-python.tar.gz or cifar-10-binary.tar.gz from www.cs.toronto.edu/~kriz/cifar.html, unpacked in "
    "DIR or DIR/cifar10 (cifar-10-batches-py/data_batch_1 or cifar-10-batches-bin/data_batch_1.bin, ...); or "
    "the packed file cifar10.npz in DIR/cifar10.",
    (
        TextFile("cifar10.npz", "4e7397e48554aecafb03893f12c5740b"),
        TextFile("data_batch_1"),
        TextFile("data_batch_1.bin"),
    ),
    (
        "cifar10",
        *(
            f"{folder}{name}"
            for folder in ("cifar10/", "cifar-10/", "")
            for name in ("cifar-10-batches-py", "cifar-10-batches-bin")
        ),
    ),
)


@register_images("cifar10")
def cifar10(data_dir: DataDir = None, verify: bool = True) -> ImageData:
    """CIFAR-10: 50,000 and 10,000 colour images of 32×32 in 10 classes.

    Args:
        data_dir: Where the files are: python batches, binary batches, or the packed file.
        verify: Whether files must be the known versions.
    """
    layout, source = CIFAR10.source(data_dir)
    read = (_cifar10_packed, _cifar10_python, _cifar10_binary)[layout]
    train, test = read(source, verify)
    return ImageData(
        "cifar10",
        {"train": train, "test": test},
        CIFAR10_CLASSES,
        CIFAR10_MEAN,
        CIFAR10_STD,
        info={"source": str(source), "layout": ("packed", "python", "binary")[layout]},
    )


def _cifar10_packed(source: Source, verify: bool) -> tuple[Stored, Stored]:
    packed = arrays(read_known(source, CIFAR10.files[0], verify), source)
    sheets = sorted(name for name in packed if name.startswith("train_"))
    with readable(source):
        parts = [tiles(decode(packed[name].tobytes()), 32) for name in (*sheets, "test")]
        labels = [torch.from_numpy(packed[name]).long() for name in ("y_train", "y_test")]
        images = torch.cat(parts[:-1])
        return Stored(images[: len(labels[0])], labels[0]), Stored(parts[-1][: len(labels[1])], labels[1])


def _cifar10_python(source: Source, verify: bool) -> tuple[Stored, Stored]:
    def read(name: str) -> tuple[Tensor, Tensor]:
        path = _beside(source, name)
        data = read_known(Source(path), TextFile(name, _CIFAR10_BATCHES[name]), verify)
        with readable(path):
            batch = _Arrays(io.BytesIO(data), encoding="bytes").load()
            return torch.from_numpy(batch[b"data"].copy()).view(-1, 3, 32, 32), torch.tensor(batch[b"labels"])

    return _joined([read(name) for name in _CIFAR10_BATCHES])


def _cifar10_binary(source: Source, verify: bool) -> tuple[Stored, Stored]:
    def read(name: str) -> tuple[Tensor, Tensor]:
        path = _beside(source, f"{name}.bin")
        data = read_known(Source(path), TextFile(path.name), verify)
        if len(data) % (1 + 3 * 32 * 32):
            raise DamagedDataError(f"{path} has {len(data):,} bytes, which is no multiple of 3073; fetch it again.")
        records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 1 + 3 * 32 * 32)
        return records[:, 1:].reshape(-1, 3, 32, 32).clone(), records[:, 0].long()

    return _joined([read(name) for name in _CIFAR10_BATCHES])


def _beside(source: Source, name: str) -> Path:
    path = source.path.parent / name
    if not path.is_file():
        raise CIFAR10.missing(f"{path} is missing, though {source.path.name} is there.")
    return path


def _joined(batches: list[tuple[Tensor, Tensor]]) -> tuple[Stored, Stored]:
    """Training batches joined, and the test batch, which comes last."""
    images, labels = zip(*batches[:-1], strict=True)
    return Stored(torch.cat(images), torch.cat(labels)), Stored(*batches[-1])


class _Arrays(pickle.Unpickler):
    """Reads pickles of plain values and numpy arrays, and nothing that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise ValueError(f"a pickle of a data set must hold arrays only, this one asks for {module}.{name}")


MNIST = Place(
    "Get it: the four files train-images-idx3-ubyte(.gz), train-labels-idx1-ubyte(.gz), t10k-images-idx3-ubyte(.gz) "
    "and t10k-labels-idx1-ubyte(.gz) of LeCun, Cortes and Burges in DIR/mnist, or the packed mnist.npz.xz.",
    (
        TextFile("mnist.npz", "4425081b03c7b2b5a9d48b22f9402f2d"),
        TextFile("train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb"),
    ),
    ("mnist", "MNIST/raw", "MNIST"),
)
_MNIST_FILES = (
    MNIST.files[1],
    TextFile("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624"),
    TextFile("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea"),
    TextFile("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637"),
)


@register_images("mnist")
def mnist(data_dir: DataDir = None, verify: bool = True) -> ImageData:
    """MNIST: 60,000 and 10,000 grey images of 28×28 of handwritten digits.

    Args:
        data_dir: Where the files are: the four idx files, or the packed file.
        verify: Whether files must be the known versions.
    """
    layout, source = MNIST.source(data_dir)
    if layout == 0:
        packed = arrays(read_known(source, MNIST.files[0], verify), source)
        with readable(source):
            found = [torch.from_numpy(packed[name]) for name in ("x_train", "y_train", "x_test", "y_test")]
    else:
        where: dict[str, Any] = {"data_dir": data_dir, "folders": MNIST.folders, "how_to_get": MNIST.how_to_get}
        sources = [find_text(file, **where) for file in _MNIST_FILES]
        found = [_idx(read_known(s, f, verify), s) for s, f in zip(sources, _MNIST_FILES, strict=True)]
    train, test = (Stored(found[k][:, None].contiguous(), found[k + 1].long()) for k in (0, 2))
    names = tuple(str(digit) for digit in range(10))
    info = {"source": str(source), "layout": ("packed", "idx")[layout]}
    return ImageData("mnist", {"train": train, "test": test}, names, MNIST_MEAN, MNIST_STD, info=info)


def _idx(data: bytes, source: Source) -> Tensor:
    """The array of an idx file of bytes: two zeros, the type 8, the number of axes, their lengths, the values."""
    with readable(source):
        if data[:3] != b"\0\0\x08":
            raise ValueError("it does not begin as an idx file of bytes does")
        sizes = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
        return torch.frombuffer(bytearray(data[4 + 4 * data[3] :]), dtype=torch.uint8).view(sizes).clone()


TINY_IMAGENET = Place(
    "Get it: tiny-imagenet-200.zip of the Stanford course CS231n, unpacked in DIR (tiny-imagenet-200/wnids.txt, ...), "
    "or the packed subset of 50 classes, tiny_imagenet50.zip with classes.txt, in DIR/tiny_imagenet50.",
    (TextFile("tiny_imagenet50.zip", "1ce0691b7e4cb5c28fac8ab916be001e"), TextFile("wnids.txt")),
    ("tiny_imagenet50", "tiny_imagenet", "tiny-imagenet-200", "tiny_imagenet/tiny-imagenet-200"),
)


@register_images("tiny_imagenet")
def tiny_imagenet(data_dir: DataDir = None, verify: bool = True) -> ImageData:
    """Tiny-ImageNet: 500 training and 50 validation images of 64×64 a class; 200 classes, or a packed subset of 50.

    Args:
        data_dir: Where the files are.
        verify: Whether the packed file must be the known version.
    """
    layout, source = TINY_IMAGENET.source(data_dir)
    classes, train, valid = (_tiny_packed, _tiny_folders)[layout](source, verify)
    info = {"source": str(source), "layout": ("packed", "folders")[layout]}
    splits: dict[str, Stored | Decoded] = {"train": train, "valid": valid}
    return ImageData("tiny_imagenet", splits, tuple(classes), IMAGENET_MEAN, IMAGENET_STD, info=info)


def _tiny_packed(source: Source, verify: bool) -> tuple[list[str], Stored, Stored]:
    data = read_known(Source(source.path), TINY_IMAGENET.files[0], verify)
    listed = source.path.with_name("classes.txt")
    if not listed.is_file():
        raise TINY_IMAGENET.missing(f"{listed} is missing, which names the classes in {source.path.name}.")
    rows = [line.split("\t") for line in listed.read_text(encoding="utf-8").splitlines() if line]
    with readable(source.path), zipfile.ZipFile(io.BytesIO(data)) as archive:

        def sheets(split: str) -> Stored:
            parts = [tiles(decode(archive.read(f"{split}/{row[1]}.jpg")), 64) for row in rows]
            counts = torch.tensor([len(part) for part in parts])
            return Stored(torch.cat(parts), torch.arange(len(rows)).repeat_interleave(counts))

        return [row[2].split(",")[0] for row in rows], sheets("train"), sheets("val")


def _tiny_folders(source: Source, verify: bool) -> tuple[list[str], Stored, Stored]:
    root = source.path.parent
    ids = source.path.read_text(encoding="utf-8").split()
    numbers = {wnid: number for number, wnid in enumerate(sorted(ids))}
    train = [(path, numbers[w]) for w in sorted(ids) for path in sorted((root / "train" / w / "images").glob("*.JPEG"))]
    listed = root / "val" / "val_annotations.txt"
    with readable(listed):
        rows = [line.split("\t") for line in listed.read_text(encoding="utf-8").splitlines() if line]
        valid = [(root / "val" / "images" / row[0], numbers[row[1]]) for row in rows]
    if not train or not valid:
        raise TINY_IMAGENET.missing(f"{root} lacks train/WNID/images/*.JPEG or val/images/*.JPEG.")
    words = root / "words.txt"
    lines = words.read_text(encoding="utf-8").splitlines() if words.is_file() else []
    names = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return [names.get(w, w).split(",")[0] for w in sorted(ids)], _all(train), _all(valid)


def _all(found: list[tuple[Path, int]]) -> Stored:
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        images = stacked(list(pool.map(lambda item: decode(item[0]), found)))
    return Stored(images, torch.tensor([number for _, number in found]))


IMAGENET = Place(
    "Expected DIR/imagenet/train/CLASS/*.JPEG and DIR/imagenet/val/CLASS/*.JPEG (or that folder as DIR).",
    folders=("imagenet",),
    inside="train",
)


@register_images("imagenet")
def imagenet(data_dir: DataDir = None, size: int = 256) -> ImageData:
    """Folders of pictures, one for each class, in train/ and val/ (and perhaps test/), as ImageNet is often kept.

    Pictures are scaled to a shorter side of `size` and cut to a square when they are read; small sets are read at once.
    `ResizedCrop` cuts whole pictures instead, squeezed to squares of the same size, which a small set then holds, too.

    Args:
        data_dir: The folder, or the one in which imagenet/ lies.
        size: Side of the squares.
    """
    require_count("imagenet", "size", size)
    root = IMAGENET.folder(data_dir)
    names, train = class_folders(root / "train")
    empty = sorted(set(range(len(names))) - {number for _, number in train})
    if empty:
        raise DamagedDataError(
            f"{root / 'train' / names[empty[0]]} has no pictures ({', '.join(PICTURES)}), so its class cannot be "
            "learned; put some there, or take the folder away."
        )
    splits = {"train": hold(_decoded(train, size))}
    for split, folders in (("valid", ("val", "valid")), ("test", ("test",))):
        place = next((root / folder for folder in folders if (root / folder).is_dir()), None)
        if place is None:
            continue
        others, found = class_folders(place)
        if others != names:
            odd = sorted(set(others) ^ set(names))
            raise DamagedDataError(f"{place} and {root / 'train'} have different classes, e.g. {odd[0]}.")
        splits[split] = hold(_decoded(found, size))
    name = "imagenet" if root.name == "imagenet" else root.name
    return ImageData(name, splits, tuple(names), IMAGENET_MEAN, IMAGENET_STD, info={"source": str(root), "size": size})


def _decoded(found: list[tuple[Path, int]], size: int) -> Decoded:
    def squeezed(index: int) -> tuple[Tensor, Tensor, Tensor]:
        image, pixels = decode_squeezed(found[index][0], size)
        return image, torch.tensor(found[index][1]), torch.tensor(pixels, dtype=torch.float32)

    return Decoded(
        len(found),
        lambda i: (decode_square(found[i][0], size), torch.tensor(found[i][1])),
        whole=functools.cache(lambda: hold(Decoded(len(found), squeezed))),
    )
