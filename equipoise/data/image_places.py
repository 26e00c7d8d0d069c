"""Where known sets of images are sought, so that they can be found without being read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.data import image_sets, segmentation
from equipoise.data.files import DamagedDataError, MissingDataError, TextFile, data_root
from equipoise.data.image_files import find_first
from equipoise.data.image_sets import DataDir
from equipoise.data.images import IMAGES


@dataclass(frozen=True)
class Place:
    """Where a set of images may lie.

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
        if self.files:
            return find_first(self.files, data_dir, self.folders, self.how_to_get)[1].path
        root = data_root(data_dir)
        if root is None:
            raise MissingDataError(
                f"no data directory is known: pass --data-dir or set EQUIPOISE_DATA. {self.how_to_get}"
            )
        for place in (*(root / folder for folder in self.folders), root):
            if (place / self.inside).is_dir():
                return place
        raise MissingDataError(f"{root} has no folder {self.inside}. {self.how_to_get}")


PLACES = {
    "cifar10": Place(
        image_sets._CIFAR10_HELP,
        image_sets._CIFAR10,
        (
            "cifar10",
            *(f"{folder}{name}" for folder in ("cifar10/", "cifar-10/", "") for name in image_sets._CIFAR10_FOLDERS),
        ),
    ),
    "mnist": Place(image_sets._MNIST_HELP, image_sets._MNIST[:2], ("mnist", "MNIST/raw", "MNIST")),
    "tiny_imagenet": Place(
        image_sets._TINY_HELP,
        image_sets._TINY,
        ("tiny_imagenet50", "tiny_imagenet", "tiny-imagenet-200", "tiny_imagenet/tiny-imagenet-200"),
    ),
    "imagenet": Place(image_sets._IMAGENET_HELP, folders=("imagenet",), inside="train"),
    "camvid": Place(segmentation._CAMVID_HELP, segmentation._CAMVID, ("camvid", "CamVid", "camvid/CamVid")),
    "cityscapes": Place(segmentation._CITYSCAPES_HELP, folders=("cityscapes",), inside="leftImg8bit"),
}
"""Those of sets that are read; others are made."""


def locate_images(data_dir: DataDir = None) -> list[dict[str, Any]]:
    """For each known set its status ("found", "missing" or "damaged"), place, and remedy; nothing is read."""
    return [_locate(name, data_dir) for name in sorted(IMAGES)]


def _locate(name: str, data_dir: DataDir) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "status": "found", "where": "made, not read", "problem": None}
    if name not in PLACES:
        return entry
    try:
        return {**entry, "where": str(PLACES[name].find(data_dir))}
    except MissingDataError:
        return {**entry, "status": "missing", "where": None, "problem": PLACES[name].how_to_get}
    except DamagedDataError as error:
        return {**entry, "status": "damaged", "where": None, "problem": str(error)}
