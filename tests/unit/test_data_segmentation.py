"""Images with masks: layouts, labels that are left out, sizes, and damaged files."""

import io
import zipfile

import numpy
import pytest
import torch
from PIL import Image

from equipoise.data import images as module
from equipoise.data import load_images
from equipoise.data.files import DamagedDataError, MissingDataError
from equipoise.data.images import IGNORE, Decoded
from equipoise.data.segmentation import CITYSCAPES_IDS, CITYSCAPES_WEIGHTS

RANDOM = numpy.random.default_rng(0)


def encoded(array, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def scene(height=12, width=16):
    """An image, and a mask with every label of CamVid."""
    image = RANDOM.integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    mask = (numpy.arange(height * width) % 12).astype(numpy.uint8).reshape(height, width)
    return image, mask


def write_camvid(folder, layout):
    scenes = {split: [scene() for _ in range(count)] for split, count in (("train", 3), ("val", 2), ("test", 1))}
    folder.mkdir(parents=True)
    if layout == "packed":
        with zipfile.ZipFile(folder / "camvid.zip", "w") as archive:
            for split, parts in scenes.items():
                for k, (image, mask) in enumerate(parts):
                    archive.writestr(f"{split}/{k}.jpg", encoded(image))  # the content is what counts
                    archive.writestr(f"{split}/{k}.png", encoded(mask))
        return scenes
    (folder / "train.txt").write_text("")
    for split, parts in scenes.items():
        for kind in ("", "annot"):
            (folder / f"{split}{kind}").mkdir()
        for k, (image, mask) in enumerate(parts):
            (folder / split / f"{k}.png").write_bytes(encoded(image))
            (folder / f"{split}annot" / f"{k}.png").write_bytes(encoded(mask))
    return scenes


@pytest.mark.parametrize(("layout", "folder"), [("packed", "camvid"), ("folders", "CamVid")])
def test_camvid_is_read_from_every_layout(layout, folder, tmp_path):
    scenes = write_camvid(tmp_path / folder, layout)
    found = load_images("camvid", tmp_path, verify=False)
    assert found.masks
    assert len(found.classes) == len(found.colours) == len(found.class_weights) == 11
    assert {split: len(part) for split, part in found.splits.items()} == {"train": 3, "valid": 2, "test": 1}
    for split, ours in (("train", "train"), ("val", "valid"), ("test", "test")):
        for k, (image, mask) in enumerate(scenes[split]):
            assert torch.equal(found.splits[ours].images[k], torch.from_numpy(image).permute(2, 0, 1))
            expected = torch.from_numpy(numpy.where(mask == 11, IGNORE, mask))
            assert torch.equal(found.splits[ours].targets[k], expected)


def test_camvid_can_be_made_smaller(tmp_path):
    scenes = write_camvid(tmp_path / "camvid", "packed")
    found = load_images("camvid", tmp_path, verify=False, downsample=4)
    assert found.splits["train"].images.shape == (3, 3, 3, 4)
    mask = scenes["train"][0][1][2::4, 2::4]
    assert torch.equal(found.splits["train"].targets[0], torch.from_numpy(numpy.where(mask == 11, IGNORE, mask)))
    block = scenes["train"][0][0].astype(float)
    assert found.splits["train"].images[0].double().mean() == pytest.approx(block.mean(), rel=0.05)


def test_rare_classes_weigh_more():
    """Weights are the square roots of median frequency weights, so the median class weighs 1."""
    from equipoise.data.segmentation import _CAMVID_SHARES

    data_weights = [(sorted(_CAMVID_SHARES)[5] / share) ** 0.5 for share in _CAMVID_SHARES]
    assert sorted(data_weights)[5] == 1
    assert data_weights.index(max(data_weights)) == 10
    assert sum(_CAMVID_SHARES) == pytest.approx(1 - 0.0395, abs=1e-3)


def test_faults_of_camvid_are_named(tmp_path):
    with pytest.raises(MissingDataError, match="Get it: the folder CamVid"):
        load_images("camvid", tmp_path)
    write_camvid(tmp_path / "camvid", "packed")
    with pytest.raises(DamagedDataError, match="md5"):
        load_images("camvid", tmp_path)
    with zipfile.ZipFile(tmp_path / "camvid" / "camvid.zip", "w") as archive:
        archive.writestr("train/0.jpg", encoded(scene()[0]))
    with pytest.raises(DamagedDataError, match=r"camvid\.zip cannot be read .*train/0\.png"):
        load_images("camvid", tmp_path, verify=False)
    with zipfile.ZipFile(tmp_path / "camvid" / "camvid.zip", "a") as archive:
        archive.writestr("train/0.png", encoded(scene()[1]))
    with pytest.raises(MissingDataError, match=r"camvid\.zip has no val/\*\.jpg"):
        load_images("camvid", tmp_path, verify=False)


@pytest.mark.parametrize("downsample", [1, 2])
def test_a_mask_of_another_size_is_refused(downsample, tmp_path):
    write_camvid(tmp_path / "CamVid", "folders")
    for place in (tmp_path / "CamVid" / "trainannot").iterdir():
        place.write_bytes(encoded(scene(6, 8)[1]))
    with pytest.raises(DamagedDataError, match=r"0\.png .*height and width are \(12, 16\), those of its mask \(6, 8\)"):
        load_images("camvid", tmp_path, downsample=downsample)


def test_scenes_of_several_sizes_are_refused(tmp_path):
    write_camvid(tmp_path / "CamVid", "folders")
    image, mask = scene(6, 8)
    (tmp_path / "CamVid" / "train" / "0.png").write_bytes(encoded(image))
    (tmp_path / "CamVid" / "trainannot" / "0.png").write_bytes(encoded(mask))
    with pytest.raises(DamagedDataError, match=r"must have one size; found shapes \(6, 8\) and \(12, 16\)"):
        load_images("camvid", tmp_path)
    write_cityscapes(tmp_path)
    for folder, pixels in (("leftImg8bit", image), ("gtFine", mask)):
        place = next((tmp_path / folder / "val" / "ulm").iterdir())
        place.write_bytes(encoded(pixels))
    with pytest.raises(DamagedDataError, match=r"must have one size; found shapes \(3, 6, 8\) and \(3, 8, 16\)"):
        load_images("cityscapes", tmp_path)


def test_masks_in_colours_are_refused_but_grey_ones_are_labels(tmp_path):
    """Brightness of a colour would pass for the number of a class."""
    scenes = write_camvid(tmp_path / "CamVid", "folders")
    mask = scenes["train"][0][1]
    place = tmp_path / "CamVid" / "trainannot" / "0.png"
    place.write_bytes(encoded(numpy.repeat(mask[:, :, None], 3, axis=2)))
    labels = load_images("camvid", tmp_path).splits["train"].targets[0]
    assert torch.equal(labels, torch.from_numpy(numpy.where(mask == 11, IGNORE, mask)))
    place.write_bytes(encoded(numpy.stack([mask, 0 * mask, mask], axis=2)))
    with pytest.raises(DamagedDataError, match=r"trainannot.0\.png .*colours where the number of a class"):
        load_images("camvid", tmp_path)


# Cityscapes


def write_cityscapes(root, size=(8, 16)):
    ids = RANDOM.integers(0, 34, size, dtype=numpy.uint8)
    for split in ("train", "val"):
        for city in ("aachen", "ulm"):
            image, mask = root / "leftImg8bit" / split / city, root / "gtFine" / split / city
            image.mkdir(parents=True)
            mask.mkdir(parents=True)
            (image / f"{city}_0_leftImg8bit.png").write_bytes(encoded(scene(*size)[0]))
            (mask / f"{city}_0_gtFine_labelIds.png").write_bytes(encoded(ids))
    return ids


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("folder", ["cityscapes", "."])
def test_cityscapes_labels_are_renumbered(folder, in_memory, tmp_path, monkeypatch):
    if not in_memory:
        monkeypatch.setattr(module, "IN_MEMORY", 0)
    ids = write_cityscapes(tmp_path / folder)
    found = load_images("cityscapes", tmp_path)
    assert isinstance(found.splits["train"], Decoded) != in_memory
    images, masks = found.splits["train"].fetch(torch.arange(2), "cpu")
    assert images.shape == (2, 3, 8, 16)
    for raw, label in zip(ids.ravel(), masks[1].flatten().tolist(), strict=True):
        assert label == (CITYSCAPES_IDS.index(raw) if raw in CITYSCAPES_IDS else IGNORE)


def test_cityscapes_has_the_published_classes_and_weights(tmp_path):
    write_cityscapes(tmp_path)
    found = load_images("cityscapes", tmp_path)
    assert len(found.classes) == len(found.colours) == len(CITYSCAPES_IDS) == 19
    assert found.class_weights == CITYSCAPES_WEIGHTS
    assert (found.class_weights[0], found.class_weights[17], found.class_weights[18]) == (0.8373, 1.1529, 1.0507)
    assert set(found.splits) == {"train", "valid"}


def test_faults_of_cityscapes_are_named(tmp_path):
    with pytest.raises(MissingDataError, match="leftImg8bit_trainvaltest"):
        load_images("cityscapes", tmp_path)
    write_cityscapes(tmp_path)
    path = tmp_path / "gtFine" / "val" / "ulm" / "ulm_0_gtFine_labelIds.png"
    path.write_bytes(encoded(numpy.zeros((4, 4), numpy.uint8)))
    with pytest.raises(DamagedDataError, match="differ in size"):
        load_images("cityscapes", tmp_path)
    path.unlink()
    with pytest.raises(MissingDataError, match=r"labelIds\.png is missing, though its image is there"):
        load_images("cityscapes", tmp_path)
