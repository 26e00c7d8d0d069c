"""Images: every layout is read as it was written, damaged files are named, and batches do not depend on their split."""

import gzip
import io
import lzma
import pickle
import struct
import zipfile
import zlib

import numpy
import pytest
import torch
from PIL import Image

from equipoise.data import images as module
from equipoise.data import load_data, load_images
from equipoise.data.augment import CentreCrop, CropFlip, ResizedCrop, normalise
from equipoise.data.files import DamagedDataError, DataError, MissingDataError
from equipoise.data.image_files import decode_square, decode_squeezed
from equipoise.data.images import IMAGES, Decoded, ImageData, ImageStream, Stored, hold

RANDOM = numpy.random.default_rng(0)


def pictures(count, size, channels=3):
    """(N, H, W, C) bytes that compress without loss in tests: each is one colour."""
    shape = (count, 1, 1, channels)
    return numpy.broadcast_to(RANDOM.integers(0, 256, shape, dtype=numpy.uint8), (count, size, size, channels)).copy()


def encoded(array, kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind, **options)
    return file.getvalue()


def sheet(tiles, columns):
    """Tiles (N, H, W, C) in one picture, row by row."""
    count, size, _, channels = tiles.shape
    rows = tiles.reshape(count // columns, columns, size, size, channels).swapaxes(1, 2)
    return rows.reshape(count // columns * size, columns * size, channels)


def planes(array):
    """(N, H, W, C) as (N, C, H, W)."""
    return torch.from_numpy(array).permute(0, 3, 1, 2)


# Registry


def test_all_sets_are_known_by_name():
    known = {"cifar10", "mnist", "tiny_imagenet", "imagenet", "camvid", "cityscapes", "digits", "shapes"}
    assert known <= set(IMAGES)
    assert load_data("digits", size=8, train_size=20, test_size=10).name == "digits"


def test_wrong_names_and_options_are_answered_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"did you mean 'cifar10'\? .*there is none at"):
        load_images("cifar01", tmp_path)
    with pytest.raises(ValueError, match="did you mean 'size'"):
        load_images("digits", sise=8)


@pytest.mark.parametrize("name", ["cifar10", "mnist", "tiny_imagenet", "imagenet"])
def test_a_missing_set_says_how_to_get_it(name, tmp_path, monkeypatch):
    with pytest.raises(MissingDataError, match=r"Get it|Expected DIR"):
        load_images(name, tmp_path)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    with pytest.raises(MissingDataError, match="no data directory is known"):
        load_images(name)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=str(tmp_path)):
        load_images(name)


# CIFAR-10


def cifar10_arrays():
    return pictures(10, 32), RANDOM.integers(0, 10, 10, dtype=numpy.uint8)


def write_cifar10_python(folder):
    folder.mkdir(parents=True)
    images, labels = cifar10_arrays()
    flat = numpy.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(10, -1)
    parts = numpy.split(numpy.arange(10), 5)
    for name, chosen in zip([f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"], [*parts, parts[0]], strict=True):
        batch = {b"data": flat[chosen], b"labels": labels[chosen].tolist(), b"batch_label": b"made up"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return images, labels


def write_cifar10_binary(folder):
    folder.mkdir(parents=True)
    images, labels = cifar10_arrays()
    records = numpy.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(10, -1)], axis=1)
    for k in range(5):
        (folder / f"data_batch_{k + 1}.bin").write_bytes(records[2 * k : 2 * k + 2].tobytes())
    (folder / "test_batch.bin").write_bytes(records[:2].tobytes())
    return images, labels


def write_cifar10_packed(folder, kind="PNG"):
    folder.mkdir(parents=True)
    images, labels = cifar10_arrays()
    packed = {
        name: numpy.frombuffer(encoded(sheet(part, 2), kind), numpy.uint8)
        for name, part in (("train_0", images[:4]), ("train_1", images[4:]), ("test", images[:2]))
    }
    numpy.savez(folder / "cifar10.npz", **packed, y_train=labels, y_test=labels[:2])
    return images, labels


@pytest.mark.parametrize(
    ("write", "folder"),
    [
        (write_cifar10_python, "cifar-10-batches-py"),
        (write_cifar10_python, "cifar10/cifar-10-batches-py"),
        (write_cifar10_binary, "cifar-10-batches-bin"),
        (write_cifar10_packed, "cifar10"),
    ],
)
def test_cifar10_is_read_from_every_layout(write, folder, tmp_path):
    images, labels = write(tmp_path / folder)
    found = load_images("cifar10", tmp_path, verify=False)
    assert torch.equal(found.splits["train"].images, planes(images))
    assert torch.equal(found.splits["train"].targets, torch.from_numpy(labels).long())
    assert torch.equal(found.splits["test"].images, planes(images[:2]))
    assert found.facts["train_images"] == 10
    assert len(found.classes) == 10
    assert not found.masks


def test_lossless_webp_sheets_are_read(tmp_path):
    pytest.importorskip("PIL._webp")
    images = pictures(4, 32)
    data = encoded(sheet(images, 2), "WEBP", lossless=True)
    from equipoise.data.image_files import decode, tiles

    assert torch.equal(tiles(decode(data), 32), planes(images))


def test_a_file_of_another_version_is_refused_unless_asked(tmp_path):
    write_cifar10_packed(tmp_path / "cifar10")
    with pytest.raises(DamagedDataError, match=r"md5 is [0-9a-f]{32} instead of .*verify"):
        load_images("cifar10", tmp_path)


def test_a_batch_that_is_missing_or_cut_off_is_named(tmp_path):
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin")
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedDataError, match=r"data_batch_3\.bin has 6,145 bytes"):
        load_images("cifar10", tmp_path, verify=False)
    path.unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_3\.bin is missing"):
        load_images("cifar10", tmp_path, verify=False)


def test_labels_of_classes_that_do_not_exist_are_refused(tmp_path):
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin")
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(bytes([77]) + path.read_bytes()[1:])
    with pytest.raises(DamagedDataError, match=r"labels from \d to 77 in 'train', but 10 classes \(0 to 9\)"):
        load_images("cifar10", tmp_path, verify=False)


class _Harmful:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_pickle_that_would_run_code_is_refused(tmp_path, capsys):
    write_cifar10_python(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps({b"data": _Harmful()}))
    with pytest.raises(DamagedDataError, match="arrays only"):
        load_images("cifar10", tmp_path, verify=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"PK\3\4 not an archive", b"text"])
def test_a_packed_file_that_cannot_be_read_is_named(content, tmp_path):
    (tmp_path / "cifar10.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"cifar10\.npz"):
        load_images("cifar10", tmp_path, verify=False)


# MNIST


def idx(array):
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.mark.parametrize("layout", ["idx", "idx.gz", "packed"])
def test_mnist_is_read_from_every_layout(layout, tmp_path):
    x, y = RANDOM.integers(0, 256, (6, 28, 28), dtype=numpy.uint8), numpy.arange(6, dtype=numpy.uint8)
    names = ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"]
    if layout == "packed":
        file = io.BytesIO()
        numpy.savez(file, x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
        (tmp_path / "mnist.npz.xz").write_bytes(lzma.compress(file.getvalue()))
    for name, array in zip(names, (x, y, x[:2], y[:2]), strict=True):
        if layout == "idx":
            (tmp_path / f"{name}-ubyte").write_bytes(idx(array))
        elif layout == "idx.gz":
            (tmp_path / f"{name}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
    found = load_images("mnist", tmp_path, verify=False)
    assert torch.equal(found.splits["train"].images[:, 0], torch.from_numpy(x))
    assert torch.equal(found.splits["test"].targets, torch.arange(2))
    assert found.channels == 1


@pytest.mark.parametrize("kept", [6, 100])
def test_an_idx_file_that_is_cut_off_is_named(kept, tmp_path):
    for part, shape in {"train": (4, 28, 28), "t10k": (2, 28, 28)}.items():
        for kind, sizes in (("images-idx3", shape), ("labels-idx1", shape[:1])):
            head = bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)
            (tmp_path / f"{part}-{kind}-ubyte").write_bytes(head + bytes(torch.Size(sizes).numel()))
    assert len(load_images("mnist", tmp_path, verify=False).splits["test"]) == 2
    place = tmp_path / "t10k-images-idx3-ubyte"
    place.write_bytes(place.read_bytes()[:kept])
    with pytest.raises(DamagedDataError, match="t10k-images-idx3-ubyte cannot be read"):
        load_images("mnist", tmp_path, verify=False)


def test_an_idx_file_of_another_kind_is_named(tmp_path):
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"):
        (tmp_path / name).write_bytes(idx(numpy.zeros((2, 3), numpy.uint8)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x0d\1\0\0\0\0")
    with pytest.raises(DamagedDataError, match=r"t10k-labels.*does not begin as an idx file"):
        load_images("mnist", tmp_path, verify=False)


# Tiny-ImageNet


def test_packed_tiny_imagenet_is_cut_into_tiles(tmp_path):
    folder = tmp_path / "tiny_imagenet50"
    folder.mkdir()
    ids = ["n001", "n002", "n003"]
    (folder / "classes.txt").write_text("".join(f"{k}\t{w}\tname {k}, other\n" for k, w in enumerate(ids)))
    train = pictures(3 * 6, 64).reshape(3, 6, 64, 64, 3)
    with zipfile.ZipFile(folder / "tiny_imagenet50.zip", "w") as archive:
        for wnid, images in zip(ids, train, strict=True):
            archive.writestr(f"train/{wnid}.jpg", encoded(sheet(images, 3)))
            archive.writestr(f"val/{wnid}.jpg", encoded(sheet(images[:2], 2)))
    found = load_images("tiny_imagenet", tmp_path, verify=False)
    assert torch.equal(found.splits["train"].images, planes(train.reshape(18, 64, 64, 3)))
    assert found.splits["valid"].targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.classes == ("name 0", "name 1", "name 2")
    (folder / "classes.txt").unlink()
    with pytest.raises(MissingDataError, match=r"classes\.txt is missing"):
        load_images("tiny_imagenet", tmp_path, verify=False)


def test_tiny_imagenet_200_is_read_from_its_folders(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    ids = ["n009", "n002"]
    images = pictures(4, 64)
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(ids))
    (root / "words.txt").write_text("n002\tdog, hound\nn777\tcat\n")
    for k, wnid in enumerate(sorted(ids)):
        (root / "train" / wnid / "images").mkdir(parents=True)
        for j in range(2):
            (root / "train" / wnid / "images" / f"{wnid}_{j}.JPEG").write_bytes(encoded(images[2 * k + j]))
    (root / "val" / "images" / "val_0.JPEG").write_bytes(encoded(images[3]))
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn009\t0\t0\t63\t63\n")
    found = load_images("tiny_imagenet", tmp_path)
    assert torch.equal(found.splits["train"].images, planes(images))
    assert found.splits["train"].targets.tolist() == [0, 0, 1, 1]
    assert found.splits["valid"].targets.tolist() == [1]
    assert found.classes == ("dog", "n009")


# Folders


def write_folders(root, size=(12, 10)):
    colours = {"ant": (250, 0, 0), "bee": (0, 250, 0)}
    for split, count in (("train", 3), ("val", 2)):
        for name, colour in colours.items():
            (root / split / name).mkdir(parents=True)
            for k in range(count):
                picture = numpy.full((*size, 3), colour, numpy.uint8)
                (root / split / name / f"{k}.png").write_bytes(encoded(picture))
    return colours


@pytest.mark.parametrize("in_memory", [True, False])
def test_folders_of_classes_are_read_at_once_or_as_needed(in_memory, tmp_path, monkeypatch):
    if not in_memory:
        monkeypatch.setattr(module, "IN_MEMORY", 0)
    colours = write_folders(tmp_path / "insects")
    found = load_images(str(tmp_path / "insects"), size=8)
    assert found.name == "insects"
    assert found.classes == ("ant", "bee")
    assert isinstance(found.splits["train"], Stored if in_memory else Decoded)
    images, targets = found.splits["train"].fetch(torch.tensor([4, 0]), "cpu")
    assert targets.tolist() == [1, 0]
    assert images.shape == (2, 3, 8, 8)
    for image, name in zip(images, ("bee", "ant"), strict=True):
        assert torch.equal(image, torch.tensor(colours[name], dtype=torch.uint8)[:, None, None].expand(3, 8, 8))


def test_pictures_are_scaled_by_their_shorter_side_and_cut_in_the_middle(tmp_path):
    wide = numpy.zeros((8, 24, 3), numpy.uint8)
    wide[:, 8:16] = 200  # the middle third is what remains
    (tmp_path / "wide.png").write_bytes(encoded(wide))
    found = decode_square(tmp_path / "wide.png", 4)
    assert found.shape == (3, 4, 4)
    assert (found[:, :, 1:3] == 200).all()


def test_squeezed_pictures_are_whole_and_square_ones_as_they_were(tmp_path):
    thirds = numpy.repeat(numpy.array([10, 120, 240], numpy.uint8), 8)
    wide = numpy.broadcast_to(thirds[:, None], (12, 24, 3)).copy()
    square = RANDOM.integers(0, 256, (12, 12, 3), dtype=numpy.uint8)
    for name, picture in (("wide", wide), ("high", wide.swapaxes(0, 1)), ("square", square)):
        (tmp_path / f"{name}.png").write_bytes(encoded(picture))
    image, pixels = decode_squeezed(tmp_path / "wide.png", 6)
    assert image.shape == (3, 6, 6)
    assert image[0, 0, [0, -1]].tolist() == [10, 240]
    assert (pixels, decode_squeezed(tmp_path / "high.png", 6)[1]) == (2.0, 0.5)
    for size in (6, 12, 20):
        image, pixels = decode_squeezed(tmp_path / "square.png", size)
        assert torch.equal(image, decode_square(tmp_path / "square.png", size))
        assert pixels == 1


RED, GREY, BLUE = (250, 0, 0), (90, 90, 90), (0, 0, 250)


def write_wide(root, upright=False):
    """Pictures four times as wide as high, or as high as wide: red, then grey in the middle half, then blue."""
    picture = numpy.empty((24, 96, 3), numpy.uint8)
    picture[:, :24], picture[:, 24:72], picture[:, 72:] = RED, GREY, BLUE
    for split, count in (("train", 6), ("val", 2)):
        for name in ("ant", "bee"):
            (root / split / name).mkdir(parents=True)
            for k in range(count):
                turned = picture.swapaxes(0, 1) if upright else picture
                (root / split / name / f"{k}.png").write_bytes(encoded(turned))


def crops(data, split="train", batches=8, augment=None, **options):
    """Batches of resized crops, on the scale of bytes."""
    rule = augment or ResizedCrop(8)
    stream = ImageStream(data, data.splits[split], 6, shuffle=split == "train", augment=rule, seed=1, **options)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    return torch.cat([(stream.batch(k).to("cpu").images * std + mean) * 255 for k in range(batches)])


def shows(images, colour):
    """(N,) whether images have a pixel of a colour, or one nearly so: borders are blurred by scaling."""
    return ((images - torch.tensor(colour).view(3, 1, 1)).abs().amax(1) < 40).flatten(1).any(1)


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("in_memory", [True, False])
def test_resized_crops_come_from_the_whole_picture(in_memory, upright, tmp_path, monkeypatch):
    write_wide(tmp_path, upright)
    data = load_images(str(tmp_path), size=16)
    central = shows(data.splits["train"].images.float(), RED)
    assert not central.any()  # of the square in the middle, which is grey
    expected = crops(data, batches=60)
    if not in_memory:
        monkeypatch.setattr(module, "IN_MEMORY", 0)
        data = load_images(str(tmp_path), size=16)
        assert isinstance(data.splits["train"].whole(), Decoded)
        assert torch.equal(crops(data, batches=60), expected)
    red, blue = (shows(expected, colour) for colour in (RED, BLUE))
    # Windows begin anywhere in some 80 % of the length, so 30 % of them show the first quarter of the picture, but for
    # one in eight that fits in none of ten trials and is the middle. The standard error over 360 crops is 2.3 %.
    for seen in (red, blue):
        assert seen.double().mean() == pytest.approx(0.25, abs=0.08)
    assert not (red & blue).any()  # a window is at most a third of the picture long, 4/3 : 4
    stream = ImageStream(data, data.splits["train"], 6, shuffle=True, augment=ResizedCrop(8), seed=1)
    assert stream.shown is data.splits["train"].whole() is data.splits["train"].whole()  # read once


@pytest.mark.parametrize("cutmix", [0.0, 0.5])
def test_crops_of_whole_pictures_do_not_depend_on_the_split_of_a_batch(cutmix, tmp_path):
    write_wide(tmp_path)
    data = load_images(str(tmp_path), size=16)
    whole = crops(data, batches=3, cutmix=cutmix)
    parts = [crops(data, batches=3, cutmix=cutmix, rank=k, world_size=2) for k in range(2)]
    assert torch.equal(torch.cat([part.view(3, 3, 3, 8, 8) for part in parts], dim=1).flatten(0, 1), whole)
    later = ImageStream(data, data.splits["train"], 6, shuffle=True, augment=ResizedCrop(8), seed=1, cutmix=cutmix)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    assert torch.equal((later.batch(2).to("cpu").images * std + mean) * 255, whole[12:])  # a run that goes on there


@pytest.mark.parametrize("in_memory", [True, False])
def test_evaluation_sees_the_middle_of_the_central_square(in_memory, tmp_path, monkeypatch):
    if not in_memory:
        monkeypatch.setattr(module, "IN_MEMORY", 0)
    write_wide(tmp_path)
    data = load_images(str(tmp_path), size=16)
    for split, folder in (("valid", "val"), ("train", "train")):  # images may be set aside from training ones
        part = data.splits[split]
        stream = ImageStream(data, part, 4, augment=CentreCrop(12))
        found = stream.batch(0).to("cpu").images
        square = decode_square(tmp_path / folder / "ant" / "0.png", 16)
        assert torch.equal(found[0], normalise(square[None, :, 2:14, 2:14], data.mean, data.std)[0])
        assert stream.shown is part
        assert part.whole.cache_info().currsize == 0  # nothing was read in vain


def test_crops_of_square_pictures_are_those_of_the_squares(tmp_path):
    noise = RANDOM.integers(0, 256, (14, 20, 20, 3), dtype=numpy.uint8)
    for k, picture in enumerate(noise):
        folder = tmp_path / ("train" if k < 12 else "val") / "ant"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{k:02}.png").write_bytes(encoded(picture))
    data = load_images(str(tmp_path), size=16)
    squares = data.splits["train"]
    plain = ImageData("plain", {"train": Stored(squares.images, squares.targets)}, ("ant",), data.mean, data.std)
    assert torch.equal(crops(data, batches=5), crops(plain, batches=5))


def test_classes_of_splits_must_agree(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "val" / "wasp").mkdir()
    (tmp_path / "val" / "wasp" / "0.png").write_bytes(encoded(pictures(1, 4)[0]))
    with pytest.raises(DamagedDataError, match=r"different classes, e\.g\. wasp"):
        load_images("imagenet", tmp_path)


def test_a_class_without_training_pictures_is_refused(tmp_path):
    write_folders(tmp_path)
    for split in ("train", "val"):
        (tmp_path / split / "wasp").mkdir()
    (tmp_path / "train" / "wasp" / "notes.txt").write_text("none yet")
    with pytest.raises(DamagedDataError, match=r"train.wasp has no pictures \(\.jpg, .*put some there"):
        load_images("imagenet", tmp_path)
    (tmp_path / "train" / "wasp" / "0.png").write_bytes(encoded(pictures(1, 4)[0]))
    assert load_images("imagenet", tmp_path).classes == ("ant", "bee", "wasp")


def test_what_is_hidden_is_neither_a_class_nor_a_picture(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "train" / "ant" / "._0.png").write_bytes(b"of a file system")
    for place in (tmp_path / "train", tmp_path / "train" / "bee"):
        (place / ".ipynb_checkpoints").mkdir()
        (place / ".ipynb_checkpoints" / "0.png").write_bytes(encoded(pictures(1, 4)[0]))
    found = load_images("imagenet", tmp_path)
    assert found.classes == ("ant", "bee")
    assert len(found.splits["train"]) == 6


def test_a_damaged_picture_is_named(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "train" / "ant" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(DamagedDataError, match=r"1\.png cannot be read"):
        load_images("imagenet", tmp_path)


def test_a_picture_with_a_broken_part_and_one_that_claims_to_be_huge_are_named(tmp_path):
    """Pillow says so by errors that are not those of files."""
    write_folders(tmp_path)
    place = tmp_path / "train" / "ant" / "1.png"
    head, body = encoded(RANDOM.integers(0, 256, (12, 12, 3), dtype=numpy.uint8)).split(b"IDAT", 1)
    part = b"IDAT" + body[:40]  # of the pixels, and then a chunk whose name is none
    place.write_bytes(head[:-4] + struct.pack(">I", 40) + part + struct.pack(">2I", zlib.crc32(part), 4) + bytes(16))
    with pytest.raises(DamagedDataError, match=r"1\.png cannot be read \(SyntaxError"):
        load_images("imagenet", tmp_path)
    bitmap = bytearray(encoded(pictures(1, 12)[0], "BMP"))
    bitmap[18:26] = struct.pack("<2i", 2**17, 2**17)
    place.write_bytes(bitmap)
    with pytest.raises(DamagedDataError, match=r"1\.png cannot be read \(DecompressionBombError"):
        load_images("imagenet", tmp_path)


def test_a_picture_of_more_than_8_bits_is_refused_rather_than_turned_white(tmp_path):
    write_folders(tmp_path)
    deep = numpy.linspace(0, 65535, 64, dtype=numpy.uint16).reshape(8, 8)
    Image.fromarray(deep).save(tmp_path / "train" / "ant" / "deep.png")
    with pytest.raises(DamagedDataError, match=r"deep\.png has more than 8 bits a channel \(I;16\); save it with 8"):
        load_images("imagenet", tmp_path, size=8)


def test_decoding_ahead_gives_what_decoding_now_gives(tmp_path):
    seen = []

    def decode(index):
        seen.append(index)
        return torch.full((1, 2, 2), index, dtype=torch.uint8), torch.tensor(index)

    split = Decoded(9, decode)
    split.announce(torch.tensor([3, 5]))
    images, targets = split.fetch(torch.tensor([3, 5]), "cpu")
    assert targets.tolist() == [3, 5]
    assert images[:, 0, 0, 0].tolist() == [3, 5]
    assert sorted(seen) == [3, 5]
    assert torch.equal(split.stored().targets, torch.arange(9))
    with pytest.raises(MissingDataError, match="without images"):
        hold(Decoded(0, decode))


# Batches


def numbered(count=23):
    """Images whose value is their number."""
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4).clone()
    return ImageData("numbers", {"train": Stored(images, torch.arange(count))}, ("a",) * count, (0.0,), (1.0,))


def stream(**options):
    data = numbered()
    return ImageStream(data, data.splits["train"], 5, **options)


def test_a_pass_has_every_sample_once_in_a_new_order():
    training = stream(shuffle=True, seed=3)
    passes = [torch.cat([training.batch(4 * e + k).indices for k in range(4)]) for e in range(2)]
    assert training.batches_per_epoch == 4
    for seen in passes:
        assert len(set(seen.tolist())) == 20
    assert not torch.equal(*passes)
    again = stream(shuffle=True, seed=3)
    assert torch.equal(again.batch(6).indices, training.batch(6).indices)
    assert training.batch(6).epoch == 1
    assert not torch.equal(stream(shuffle=True, seed=4).batch(6).indices, training.batch(6).indices)


def test_evaluation_has_all_samples_in_order():
    batches = list(stream().batches())
    assert torch.equal(torch.cat([batch.indices for batch in batches]), torch.arange(23))
    assert [batch.rows.count for batch in batches] == [5, 5, 5, 5, 3]


@pytest.mark.parametrize("position", [0, 9])
@pytest.mark.parametrize("cutmix", [0.0, 0.8])
def test_shares_of_a_batch_are_the_whole_batch_augmented_alike(position, cutmix):
    options = {"shuffle": True, "augment": CropFlip(2), "seed": 1, "cutmix": cutmix}
    whole = stream(**options).batch(position).to("cpu")
    parts = [stream(**options, rank=k, world_size=5).batch(position).to("cpu") for k in range(5)]
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert [part.rows.start for part in parts] == list(range(5))
    again = stream(**options).batch(position).to("cpu")
    assert torch.equal(again.images, whole.images)


def test_batches_are_normalised_and_know_their_samples():
    batch = stream(samples=torch.tensor([7, 2, 20])).batch(0).to("cpu")
    assert batch.targets.tolist() == [7, 2, 20]
    assert batch.images[:, 0, 0, 0] == pytest.approx(torch.tensor([7, 2, 20]) / 255)
    assert batch.images.dtype == torch.float32
    assert torch.equal(batch.to("cpu").images, batch.images)


def test_mixed_images_have_the_share_of_each_class_in_their_target():
    """Images show their number in all pixels, and the number is the class."""
    batch = stream(shuffle=True, cutmix=1.0, seed=2).batch(3).to("cpu")
    assert batch.targets.shape == (5, 23)
    shown = (batch.images[:, 0] * 255).round().long()
    counts = torch.stack([(shown == number).float().mean((1, 2)) for number in range(23)], dim=1)
    assert torch.allclose(batch.targets, counts, atol=1e-6)
    assert (counts > 0).sum(1).max() == 2
    plain = stream(shuffle=True, seed=2).batch(3)
    assert torch.equal(plain.indices, batch.indices)  # what is mixed in changes no order


def test_mixed_images_have_the_masks_of_both():
    """Images show the number of their class in all pixels."""
    numbers = torch.arange(12, dtype=torch.uint8)
    part = Stored(numbers.view(-1, 1, 1, 1).repeat(1, 1, 6, 8), numbers.view(-1, 1, 1).repeat(1, 6, 8))
    lanes = ImageData("lanes", {"train": part}, tuple("abcdefghijkl"), (0.0,), (1.0,), masks=True)
    batch = ImageStream(lanes, part, 6, shuffle=True, cutmix=1.0, seed=2).batch(1).to("cpu")
    assert torch.equal((batch.images[:, 0] * 255).round().long(), batch.targets)
    assert max(len(mask.unique()) for mask in batch.targets) == 2


def test_streams_refuse_what_cannot_be():
    data = numbered()
    with pytest.raises(ValueError, match=r"cutmix must be a number in \[0, 1\], got 1.5"):
        stream(cutmix=1.5)
    with pytest.raises(ValueError, match="rank 2 does not exist"):
        stream(rank=2, world_size=2)
    with pytest.raises(ValueError, match="exceeds the 23 training images"):
        ImageStream(data, data.splits["train"], 24, shuffle=True)
    with pytest.raises(ValueError, match="uint8 images with N targets"):
        Stored(torch.zeros(2, 1, 4, 4), torch.zeros(2))
    with pytest.raises(ValueError, match=r"expected pixels of shape \(2,\), .* got \(3,\); leave them out"):
        Stored(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2), torch.ones(3))


# What needs no files


@pytest.mark.parametrize("name", ["digits", "shapes"])
def test_made_images_are_functions_of_their_number(name):
    few = load_images(name, size=12, train_size=30, test_size=10)
    more = load_images(name, size=12, train_size=60, test_size=10)
    other = load_images(name, size=12, train_size=30, test_size=10, seed=1)
    assert torch.equal(few.splits["train"].images, more.splits["train"].images[:30])
    assert torch.equal(few.splits["train"].targets, more.splits["train"].targets[:30])
    assert not torch.equal(few.splits["train"].images, other.splits["train"].images)
    assert not torch.equal(few.splits["valid"].images, few.splits["test"].images)
    assert few.splits["train"].images.dtype == torch.uint8


def test_digits_can_be_told_apart_but_not_by_their_mean():
    """Nearest class mean is far from chance, and far from solving it."""
    data = load_images("digits", train_size=2000, test_size=500)
    train, test = data.splits["train"], data.splits["test"]
    assert torch.bincount(train.targets, minlength=10).min() > 150
    flat = train.images.float().flatten(1)
    means = torch.stack([flat[train.targets == k].mean(0) for k in range(10)])
    guess = torch.cdist(test.images.float().flatten(1), means).argmin(1)
    accuracy = (guess == test.targets).double().mean()
    assert 0.3 < accuracy < 0.9


def test_the_mask_of_a_shape_is_where_the_image_changes():
    data = load_images("shapes", size=32, train_size=40, test_size=10)
    train = data.splits["train"]
    assert train.targets.unique().tolist() == [0, 1, 2, 3]
    for image, mask in zip(train.images.float(), train.targets, strict=True):
        ground = image[:, mask == 0].mean(1)
        inside, outside = (
            (image - ground[:, None, None]).abs().sum(0)[where].mean() for where in (mask > 0, mask == 0)
        )
        assert inside > 2 * outside


def test_areas_of_shapes_are_those_of_geometry():
    """A circle of radius r has π r² pixels, the rectangle 2.73 r², the triangle 2.0 r²: 3√3·0.62²."""
    data = load_images("shapes", size=12, train_size=60, test_size=10, labels="classes")
    assert data.classes == ("circle", "rectangle", "triangle")
    assert data.splits["train"].targets.unique().tolist() == [0, 1, 2]
    masks = load_images("shapes", size=48, train_size=150, test_size=10)
    share = [(masks.splits["train"].targets == k).double().sum() for k in (1, 2, 3)]
    ratio = [float(s / share[0]) for s in share]
    assert ratio == pytest.approx([1, 2.73 / 3.14, 2.0 / 3.14], rel=0.2)
    with pytest.raises(ValueError, match="did you mean 'masks'"):
        load_images("shapes", labels="mask")
