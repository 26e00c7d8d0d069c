"""Which known sets of images are there; none of them is read."""

from typing import Any

from equipoise.data import image_sets, segmentation
from equipoise.data.files import DamagedDataError, MissingDataError
from equipoise.data.image_files import DataDir, Place
from equipoise.data.images import IMAGES

PLACES: dict[str, Place] = {
    "cifar10": image_sets.CIFAR10,
    "mnist": image_sets.MNIST,
    "tiny_imagenet": image_sets.TINY_IMAGENET,
    "imagenet": image_sets.IMAGENET,
    "camvid": segmentation.CAMVID,
    "cityscapes": segmentation.CITYSCAPES,
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
