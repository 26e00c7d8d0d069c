"""Fitting a learned solver to unlabelled inputs: pictures of a folder, a text; and what is refused."""

import json
import shutil

import numpy
import pytest
import torch

from equipoise.cli import main as cli
from equipoise.data import unlabelled
from equipoise.data.files import DataError
from equipoise.data.images import IGNORE, IMAGES, load_images
from equipoise.data.unlabelled import KNOWN, look_of, unlabelled_images
from equipoise.solvers import load_solver
from equipoise.tasks.language_model import VOCABULARY
from equipoise.train.load import find_checkpoint, load, open_run
from equipoise.train.loop import train
from tests.cli.program import invoke
from tests.runs import COPY, recipe, text_recipe
from tests.unit.test_data_images import idx, write_cifar10_binary
from tests.unit.test_data_segmentation import write_camvid
from tests.unit.test_tasks_vision import DIGITS, SHAPES

pil = pytest.importorskip("PIL.Image")
QUICK = ("--steps", 2, "--set", "fit.unroll=2", "--set", "fit.accept=0.99", "--set", "solver.hidden=4")
RANDOM = numpy.random.default_rng(0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of one step, by kind; not to be changed."""
    root = tmp_path_factory.mktemp("runs")
    train(recipe(DIGITS, "train.steps=1"), root / "digits")
    train(recipe(SHAPES, "train.steps=1"), root / "shapes")
    train(text_recipe(root / "corpus", "train.steps=1"), root / "text")
    train(recipe(COPY, "train.steps=1"), root / "copy")
    shutil.rmtree(root / "corpus")  # the data of the training are not needed
    return root


@pytest.fixture
def pictures(tmp_path):
    """Eight colour pictures of several sizes and kinds, at several depths."""
    folder = tmp_path / "pictures"
    (folder / "more" / "deep").mkdir(parents=True)
    for k, kind in enumerate(("png", "jpg", "bmp", "webp", "ppm", "JPEG", "png", "png")):
        height, width = 8 + 3 * (k % 3), 8 + 5 * (k % 2)
        image = pil.fromarray(RANDOM.integers(0, 256, (height, width, 3), dtype=numpy.uint8))
        image.save(folder / ("", "more", "more/deep")[k % 3] / f"{k}.{kind}")
    (folder / "notes.txt").write_text("not a picture, and not named as one")
    return folder


def fitted(run, inputs, out, *options):
    result = invoke("hyper", run, "--inputs", inputs, "--out", out, *QUICK, *options, "--json")
    return json.loads(result.stdout)


def refused(run, inputs, out, *options, monkeypatch, capsys):
    arguments = ["equipoise", "hyper", run, "--inputs", inputs, *(["--out", out] if out else []), *options]
    monkeypatch.setattr("sys.argv", [str(argument) for argument in arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


# Pictures


@pytest.mark.parametrize("kind", ["digits", "shapes"])
def test_a_solver_is_fitted_and_goes_on_with_pictures(runs, pictures, tmp_path, kind):
    run = runs / kind
    weights = find_checkpoint(run) / "model.safetensors"
    before = weights.read_bytes()
    first = fitted(run, pictures, tmp_path / "one")
    assert first["inputs"] == {"inputs": str(pictures), "pictures": 8}
    again = fitted(run, pictures, tmp_path / "two", "--finetune", tmp_path / "one", "--set", "task.batch_size=3")
    assert again["finetuned"] == str(tmp_path / "one")
    assert again["parameters"] == first["parameters"]
    one, two = (load_solver(tmp_path / name, load(run)).state_dict() for name in ("one", "two"))
    assert any(not torch.equal(one[name], two[name]) for name in one)
    assert weights.read_bytes() == before


def test_pictures_are_seen_as_the_images_of_the_run_are(runs, tmp_path):
    """The run's own images, written as files, give the run's own inputs."""
    own = open_run(runs / "digits", "valid").splits.train(0).to("cpu")
    images = recipe(DIGITS).make_task().images.splits["train"].images  # (24, 1, 8, 8)
    for number, image in enumerate(images):
        pil.fromarray(image[0].numpy()).save(tmp_path / f"{number:03}.png")
    opened = open_run(runs / "digits", "valid", inputs=tmp_path)
    batch = opened.splits.train(0).to("cpu")
    assert torch.equal(batch.images, own.images)  # the same order too: both are drawn by the seed
    assert not batch.targets.any()
    assert (opened.splits.epoch, opened.splits.held_out) == (4, {})


def test_colour_becomes_grey_and_grey_becomes_colour(tmp_path):
    colour, grey = (RANDOM.integers(0, 256, shape, dtype=numpy.uint8) for shape in ((8, 8, 3), (8, 8)))
    pil.fromarray(colour).save(tmp_path / "a.png")
    pil.fromarray(grey).save(tmp_path / "b.png")
    pil.fromarray(colour).quantize(16).save(tmp_path / "c.png")  # a palette
    as_grey = unlabelled_images(tmp_path, look_of("digits", options={"size": 8}), 10, masks=False).splits["train"]
    assert as_grey.images.shape == (3, 1, 8, 8)
    assert torch.equal(as_grey.images[0, 0], torch.from_numpy(numpy.array(pil.fromarray(colour).convert("L"))))
    assert torch.equal(as_grey.images[1, 0], torch.from_numpy(grey))
    assert float((as_grey.images[2].float() - as_grey.images[0].float()).abs().mean()) < 40  # not numbers of colours
    as_colour = unlabelled_images(tmp_path, look_of("shapes", options={"size": 8}), 4, masks=True).splits["train"]
    assert torch.equal(as_colour.images[1], torch.from_numpy(grey).expand(3, 8, 8))
    assert bool((as_colour.targets == IGNORE).all())


def test_the_middle_of_a_picture_is_kept(tmp_path):
    wide = RANDOM.integers(0, 256, (6, 14, 3), dtype=numpy.uint8)
    pil.fromarray(wide).save(tmp_path / "a.png")
    look = unlabelled.Look((0.5,) * 3, (0.25,) * 3, (6, 8))
    found = unlabelled_images(tmp_path, look, 2, masks=False).splits["train"].images[0]
    assert torch.equal(found, torch.from_numpy(wide[:, 3:11]).permute(2, 0, 1))


def test_what_is_hidden_is_no_picture(tmp_path):
    """As programs leave it beside pictures; a folder of pictures may be hidden itself."""
    folder = tmp_path / ".mine" / "pictures"
    image = pil.fromarray(RANDOM.integers(0, 256, (8, 8, 3), dtype=numpy.uint8))
    for name in ("a.png", "more/b.png", ".ipynb_checkpoints/a-checkpoint.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / name)
    (folder / "._a.png").write_bytes(b"attributes")
    look = look_of("shapes", options={"size": 8})
    assert len(unlabelled_images(folder, look, 4, masks=False).splits["train"]) == 2
    (folder / "a.png").unlink()
    (folder / "more" / "b.png").unlink()
    with pytest.raises(DataError, match="has no pictures in it"):
        unlabelled_images(folder, look, 4, masks=False)


def test_crops_are_those_of_the_training_but_not_scaled(runs, tmp_path):
    image = RANDOM.integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
    pil.fromarray(image).save(tmp_path / "a.png")
    changes = ["task.augment=scale_crop", "task.crop=[5, 4]", "task.batch_size=1"]
    opened = open_run(runs / "shapes", "valid", changes=changes, inputs=tmp_path)
    seen = opened.splits.train(0).to("cpu").images[0] * 0.25 + 0.5
    pixels = torch.from_numpy(image).permute(2, 0, 1) / 255
    windows = pixels.unfold(1, 5, 1).unfold(2, 4, 1)  # (3, 4, 5, 5, 4)
    assert (windows - seen[:, None, None]).abs().amax((0, 3, 4)).min() < 1e-4


def test_what_is_known_of_sets_is_what_their_loaders_say(tmp_path, monkeypatch):
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin")
    write_camvid(tmp_path / "camvid", "packed")
    x, y = numpy.zeros((2, 28, 28), numpy.uint8), numpy.zeros(2, numpy.uint8)
    for name, array in (("train-images-idx3", x), ("train-labels-idx1", y), ("t10k-images-idx3", x)):
        (tmp_path / f"{name}-ubyte").write_bytes(idx(array))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(y))
    assert set(KNOWN) <= set(IMAGES)
    known = {name: look_of(name) for name in KNOWN}
    assert look_of("camvid", options={"downsample": 4}).size == (90, 120)
    monkeypatch.setattr(unlabelled, "KNOWN", {})
    for name in ("cifar10", "mnist"):
        assert look_of(name, tmp_path, {"verify": False}) == known[name]
    camvid = load_images("camvid", tmp_path, verify=False)
    for name in ("camvid", "cityscapes", "tiny_imagenet"):
        assert (known[name].mean, known[name].std) == (camvid.mean, camvid.std)


def test_a_folder_of_the_training_need_not_be_there(tmp_path):
    gone = str(tmp_path / "flowers")
    assert look_of(gone, options={"size": 96}) == unlabelled.Look(KNOWN["camvid"].mean, KNOWN["camvid"].std, (96, 96))
    with pytest.raises(DataError, match="known only from the set itself: unknown image data set 'flowers'"):
        look_of("flowers")  # it may be a set that somebody registers, with another mean


# Text


def test_a_solver_is_fitted_to_a_text(runs, tmp_path):
    path = tmp_path / "new.txt"
    path.write_text("bad kid\n" * 12)
    record = fitted(runs / "text", path, tmp_path / "one")
    assert record["inputs"] == {"inputs": str(path), "tokens": 96, "unknown": 0}
    again = fitted(runs / "text", path, tmp_path / "two", "--finetune", tmp_path / "one", "--set", "task.batch_size=2")
    assert again["parameters"] == record["parameters"]
    opened = open_run(runs / "text", "valid", inputs=path, changes=["task.rotate=false"])
    assert opened.task.corpus.vocabulary.decode(opened.splits.train(0).inputs[0]) == "bad kid\n"


def test_words_that_are_not_known(runs, tmp_path, monkeypatch, capsys):
    path, copied = tmp_path / "new.txt", tmp_path / "run"
    path.write_text("bad quiz\n" * 12)
    said = refused(runs / "text", path, tmp_path / "one", monkeypatch=monkeypatch, capsys=capsys)
    assert "the character 'q' is not among the" in said
    assert "which has no <unk>; take it out of the text" in said
    shutil.copytree(runs / "text", copied)
    state = json.loads((copied / "vocabulary.json").read_text())
    last = state["tokens"].index("k")
    state["tokens"][last] = "<unk>"  # as if k had been rare
    (copied / "vocabulary.json").write_text(json.dumps(state))
    opened = open_run(copied, "valid", inputs=path)
    assert opened.splits.info["unknown"] == 12 * 3  # q, u, z
    assert int((opened.task.corpus.train == last).sum()) == 36
    other = tmp_path / "other.txt"
    other.write_text("XYZ" * 50)
    with pytest.raises(DataError, match=r"the model knows 0% of the 150 tokens of .*other.txt"):
        open_run(copied, "valid", inputs=other)
    (copied / VOCABULARY).unlink()
    said = refused(copied, path, tmp_path / "one", monkeypatch=monkeypatch, capsys=capsys)
    assert "vocabulary.json is missing, which says what tokens the model knows" in said


# What is refused


def test_wrong_inputs_end_with_one_line(runs, pictures, tmp_path, monkeypatch, capsys):
    def said(kind, inputs, *options, out=tmp_path / "out"):
        found = refused(runs / kind, inputs, out, *options, monkeypatch=monkeypatch, capsys=capsys)
        assert found.count("\n") == 1
        return found

    (tmp_path / "empty").mkdir()
    (tmp_path / "deep").mkdir()
    (tmp_path / "short.txt").write_text("bad")
    pil.fromarray(RANDOM.integers(0, 60000, (8, 8), dtype=numpy.uint16)).save(tmp_path / "deep" / "a.png")
    assert "has no pictures in it; sought at any depth: .jpg" in said("digits", tmp_path / "empty")
    assert "nowhere is not there" in said("digits", tmp_path / "nowhere")
    assert "notes.txt is a file; give the folder that holds it" in said("digits", pictures / "notes.txt")
    assert "a.png has more than 8 bits a channel (I;16); save it with 8" in said("digits", tmp_path / "deep")
    few = said("digits", pictures, "--set", "task.batch_size=9")
    assert "has 8 pictures, fewer than a batch (9); give more of them, or --set task.batch_size=8." in few
    assert "expected a text file, but" in said("text", pictures)
    assert "short.txt is shorter than one segment" in said("text", tmp_path / "short.txt")
    assert "the task 'copy_memory' takes neither pictures nor text" in said("copy", pictures)
    assert "--inputs cannot be used here: a report scores, and needs labels" in said(
        "digits", pictures, "--report", tmp_path / "report", out=None
    )
    (pictures / "more" / "broken.png").write_text("not a picture")
    assert "broken.png cannot be read (UnidentifiedImageError" in said("digits", pictures)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "report").exists()
