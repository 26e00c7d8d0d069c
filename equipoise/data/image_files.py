"""Reading what images are kept in: picture files, packed arrays, archives. Pillow and numpy are imported where used."""

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.data.files import (
    DamagedDataError,
    MissingDataError,
    Source,
    TextFile,
    checksum,
    data_root,
    find_text,
    read_bytes,
)

Picture = bytes | Path
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def pillow() -> Any:
    """Pillow's `Image`, or an error that says what to install."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ModuleNotFoundError("image files need Pillow: pip install pillow", name="PIL") from error
    return Image


@contextmanager
def readable(what: object) -> Iterator[None]:
    """Say which file it was when reading fails."""
    try:
        yield
    except (DamagedDataError, MissingDataError, ImportError):
        raise
    except Exception as error:  # zlib, pickle, struct and Pillow have their own, with no base in common
        raise DamagedDataError(
            f"{what} cannot be read ({type(error).__name__}: {error}); if it is cut off or damaged, fetch it again."
        ) from error


DataDir = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Place:
    """Where a set of images may lie, so that it can be found without being read.

    Attributes:
        how_to_get: A sentence for those who lack it.
        files: One of them shows that the set is there; each stands for a layout.
        folders: Of the data directory, where they are sought besides the directory itself.
        inside: For sets that are a folder: one that must lie in the first of `folders`, or in the directory itself.
    """

    how_to_get: str
    files: tuple[TextFile, ...] = ()
    folders: tuple[str, ...] = ()
    inside: str = ""

    def find(self, data_dir: DataDir) -> Path:
        """The file or folder that was found.

        Raises:
            MissingDataError: If it is nowhere; the message says where it was sought.
        """
        return self.source(data_dir)[1].path if self.files else self.folder(data_dir)

    def source(self, data_dir: DataDir) -> tuple[int, Source]:
        """The number of the layout, and the file that shows it."""
        return find_first(self.files, data_dir, self.folders, self.how_to_get)

    def folder(self, data_dir: DataDir) -> Path:
        """The folder in which `inside` lies."""
        root = data_root(data_dir)
        if root is None:
            raise self.missing("no data directory is known: pass --data-dir or set EQUIPOISE_DATA.")
        for place in (*(root / folder for folder in self.folders), root):
            if (place / self.inside).is_dir():
                return place
        raise self.missing(f"{root} has no folder {self.inside}.")

    def missing(self, problem: str) -> MissingDataError:
        """An error that says how to get what is missing."""
        return MissingDataError(f"{problem} {self.how_to_get}")


def find_first(
    files: Sequence[TextFile], data_dir: DataDir, folders: Iterable[str], how_to_get: str
) -> tuple[int, Source]:
    """The first of several files that is there, and its number: sets come in several layouts."""
    folders, root = tuple(folders), data_root(data_dir)
    missing: MissingDataError | None = None
    for number, file in enumerate(files):
        for place in () if root is None else (*(root / folder for folder in folders), root):
            if (place / file.name).is_file():  # an archive is meant as a whole
                return number, Source(place / file.name)
        try:
            return number, find_text(file, data_dir=data_dir, folders=folders, how_to_get=how_to_get)
        except MissingDataError as error:
            missing = missing or error
    assert missing is not None
    raise missing


def read_known(source: Source, file: TextFile, verify: bool) -> bytes:
    """The bytes of a file as it lies there, unpacked only from .gz; the checksum is that of the packed file.

    Args:
        source: Where it is.
        file: What is known about it.
        verify: Whether it must be the known version.
    """
    data = read_bytes(source)
    if verify and file.md5 and checksum(data) != file.md5:
        raise DamagedDataError(
            f"{source} is damaged or another version of {file.name}: its md5 is {checksum(data)} instead of "
            f"{file.md5}. Fetch it again, or accept it with task.options.verify=false (verify=False)."
        )
    return data


def to_tensor(picture: Any, mode: str = "RGB") -> Tensor:
    """A picture of Pillow as (C, H, W) uint8, or (H, W) for the mode "L" or "P"."""
    import numpy

    array = torch.from_numpy(numpy.array(picture if picture.mode == mode else picture.convert(mode)))
    return array.permute(2, 0, 1).contiguous() if array.dim() == 3 else array


@contextmanager
def opened(data: Picture, labels: bool = False) -> Iterator[Any]:
    """A picture of Pillow, from a file or from its bytes; only of labels may numbers have more than 8 bits."""
    source, name = (data, str(data)) if isinstance(data, Path) else (io.BytesIO(data), "a picture inside an archive")
    with readable(name), pillow().open(source) as picture:
        if not labels and picture.mode[0] in "IF":  # conversion would cut off what is bright
            raise DamagedDataError(f"{name} has more than 8 bits a channel ({picture.mode}); save it with 8.")
        yield picture


def decode(data: Picture, mode: str = "RGB") -> Tensor:
    """A picture as (C, H, W) uint8, or (H, W) labels for the mode "L"."""
    labels = mode == "L"
    with opened(data, labels) as picture:
        # A palette's colours are for the eye: labels are the numbers behind them.
        if labels and picture.mode == "P":
            return to_tensor(picture, "P")
        if labels and len(picture.getbands()) > 2:
            colours = to_tensor(picture)
            if (colours != colours[0]).any():
                raise ValueError("it has colours where the number of a class is needed in every pixel")
        return to_tensor(picture, mode)


def decode_square(path: Path, size: int) -> Tensor:
    """A picture as (3, size, size): the shorter side scaled to `size`, the middle of the longer one kept."""
    with opened(path) as picture:
        return covering(picture, (size, size))


def decode_squeezed(path: Path, size: int) -> tuple[Tensor, float]:
    """A whole picture as (3, size, size), and its width over its height, which is that of its pixels then."""
    with opened(path) as picture:
        squeezed = picture.convert("RGB").resize((size, size), pillow().Resampling.BILINEAR)
        return to_tensor(squeezed), picture.width / picture.height


def covering(picture: Any, size: tuple[int, int], mode: str = "RGB") -> Tensor:
    """The middle of an open picture, scaled until it covers a height and width."""
    height, width = size
    scale = max(width / picture.width, height / picture.height)
    wide, tall = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
    whole = picture.convert(mode).resize((wide, tall), pillow().Resampling.BILINEAR)
    left, top = (wide - width) // 2, (tall - height) // 2
    return to_tensor(whole.crop((left, top, left + width, top + height)), mode)


def tiles(sheet: Tensor, size: int) -> Tensor:
    """The tiles (N, C, size, size) of a sheet (C, H, W), row by row."""
    channels, height, width = sheet.shape
    if height % size or width % size:
        raise DamagedDataError(f"a sheet of {height} × {width} pixels cannot be cut into tiles of {size}.")
    cut = sheet.view(channels, height // size, size, width // size, size)
    return cut.permute(1, 3, 0, 2, 4).reshape(-1, channels, size, size)


def arrays(data: bytes, what: object) -> dict[str, Any]:
    """The arrays of an .npz file."""
    import numpy

    with readable(what), numpy.load(io.BytesIO(data), allow_pickle=False) as packed:
        return {name: packed[name] for name in packed.files}


def pictures_in(folder: Path, suffixes: Sequence[str] = PICTURES) -> list[Path]:
    """Pictures of a folder at any depth, sorted; what is hidden, as programs leave it behind (._0.jpg), is none."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in suffixes and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def class_folders(root: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """Names of the classes in a folder of class folders, sorted, and each picture with the number of its class.

    What is hidden, as programs leave it behind (.ipynb_checkpoints), is no class.
    """
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
    names = [folder.name for folder in folders if not folder.name.startswith(".")]
    found = [(path, number) for number, name in enumerate(names) for path in pictures_in(root / name)]
    if not found:
        raise MissingDataError(f"{root} has no class folders with pictures in them (CLASS/*.jpg).")
    return names, found
