"""`equipoise data`: which corpora and sets of images are there, and what is in one."""

import functools
import json
import zipfile

import pytest
from typer.testing import CliRunner

from equipoise.cli import main as cli
from equipoise.data.files import MissingDataError, TextFile
from equipoise.data.image_places import PLACES
from equipoise.data.images import IMAGES, load_images
from equipoise.data.text import CORPORA, Corpus
from tests.runs import write_corpus


@pytest.fixture
def corpus(monkeypatch, tmp_path):
    """A known corpus of eight words, its files in `tmp_path`/toy."""
    folder = write_corpus(tmp_path / "toy")
    files = tuple(TextFile(f"{split}.txt") for split in ("train", "valid", "test"))
    counts = {split: len((folder / f"{split}.txt").read_text().replace("\n", " <eos> ").split()) for split in SPLITS}
    known = Corpus("toy", files, "Get it: from the test; put it into DIR/toy.", expected={**counts, "vocabulary": 9})
    monkeypatch.setitem(CORPORA, "toy", known)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    return counts


SPLITS = ("train", "valid", "test")


def invoke(*arguments):
    result = CliRunner().invoke(cli.app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def entries(*arguments):
    record = json.loads(invoke(*arguments, "--json"))
    return {entry["name"]: entry for entry in record["corpora"]}


def test_every_corpus_is_listed_with_its_place_or_its_remedy(corpus, tmp_path):
    found = entries("--data-dir", tmp_path)
    assert set(found) == {*CORPORA, "embedded"}
    assert found["toy"]["status"] == found["embedded"]["status"] == "found"
    assert found["toy"]["where"] == str(tmp_path / "toy")
    assert (found["ptb"]["status"], found["ptb"]["missing"]) == ("missing", "ptb.train.txt")
    assert found["ptb"]["problem"] == CORPORA["ptb"].how_to_get


def test_a_corpus_with_a_file_missing_is_missing(corpus, tmp_path):
    (tmp_path / "toy" / "valid.txt").unlink()
    found = entries("--data-dir", tmp_path)["toy"]
    assert (found["status"], found["missing"], found["where"]) == ("missing", "valid.txt", None)


def test_a_corpus_in_a_damaged_archive_is_damaged(corpus, tmp_path):
    for split in SPLITS:
        (tmp_path / "toy" / f"{split}.txt").unlink()
    (tmp_path / "toy" / "toy.zip").write_bytes(b"no archive")
    found = entries("--data-dir", tmp_path)["toy"]
    assert found["status"] == "damaged"
    assert "toy.zip cannot be read as a zip archive" in found["problem"]


def test_a_corpus_in_an_archive_is_found(corpus, tmp_path):
    with zipfile.ZipFile(tmp_path / "toy.zip", "w") as archive:
        for split in SPLITS:
            path = tmp_path / "toy" / f"{split}.txt"
            archive.writestr(f"toy/{split}.txt", path.read_text())
            path.unlink()
    assert entries("--data-dir", tmp_path)["toy"]["where"] == str(tmp_path)


def test_the_list_in_words(corpus, tmp_path):
    shown = invoke("--data-dir", tmp_path)
    assert f"data directory: {tmp_path}\n" in shown
    assert f"  toy              found    {tmp_path / 'toy'}\n" in shown
    assert "  ptb              missing  no ptb.train.txt\n" in shown
    assert f"ptb: {CORPORA['ptb'].how_to_get}\n" in shown
    assert "data directory: none; pass --data-dir or set EQUIPOISE_DATA\n" in invoke()


def test_what_is_in_a_corpus(corpus, tmp_path):
    record = json.loads(invoke("toy", "--data-dir", tmp_path, "--json"))
    assert (record["corpus"], record["tokens"], record["vocabulary"]) == ("toy", "word", 9)
    assert {split: one["tokens"] for split, one in record["splits"].items()} == corpus
    assert {split: one["scored_tokens"] for split, one in record["splits"].items()} == {
        split: count - 1 for split, count in corpus.items()
    }
    assert {check["what"]: check["found"] for check in record["checks"]} == {**corpus, "vocabulary": 9}
    assert record["sample"] == (tmp_path / "toy" / "train.txt").read_text().splitlines()[:3]
    assert record["sources"]["test"] == str(tmp_path / "toy" / "test.txt")


def test_what_is_in_a_corpus_in_words(corpus, tmp_path):
    shown = invoke("toy", "--data-dir", tmp_path)
    assert shown.startswith("toy: 9 kinds of word tokens\n")
    assert f"check: train has {corpus['train']:,} entries, as published\n" in shown
    first = (tmp_path / "toy" / "train.txt").read_text().splitlines()[0]
    assert f"first lines of the training text:\n  {first}\n" in shown


def test_other_tokens_and_a_folder(corpus, tmp_path):
    record = json.loads(invoke(tmp_path / "toy", "--tokens", "character", "--json"))
    text = (tmp_path / "toy" / "train.txt").read_text()
    assert (record["splits"]["train"]["tokens"], record["vocabulary"]) == (len(text), len(set(text)))
    assert record["checks"] == []


def test_the_embedded_corpus_needs_no_files(monkeypatch):
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    record = json.loads(invoke("embedded", "--tokens", "byte", "--json"))
    assert record["vocabulary"] == 256
    assert len(record["sample"]) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("toi",), "unknown data set 'toi'; did you mean 'toy'"),
        (("ptb",), "ptb.train.txt (or with .xz, .gz, .zip) was not found"),
        (("toy", "--tokens", "words"), "unknown kind of tokens 'words'; did you mean 'word'"),
    ],
)
def test_a_corpus_that_is_not_there_ends_with_one_line(corpus, tmp_path, run_main, arguments, words):
    code, out, error = run_main("data", *arguments, "--data-dir", tmp_path)
    assert (code, out) == (2, "")
    assert error.startswith("equipoise: ")
    assert error.count("\n") == 1
    assert words in error


def test_a_damaged_corpus_ends_with_one_line(corpus, tmp_path, run_main):
    with open(tmp_path / "toy" / "valid.txt", "a") as file:
        file.write("a\n")
    code, _, error = run_main("data", "toy", "--data-dir", tmp_path)
    assert code == 2
    assert f"valid has {corpus['valid'] + 2} entries instead of {corpus['valid']}" in error


def test_no_data_directory_ends_with_one_line(corpus, run_main):
    code, _, error = run_main("data", "toy")
    assert code == 2
    assert "pass --data-dir (data_dir=...) or set EQUIPOISE_DATA" in error


# Images


def images(*arguments):
    return {entry["name"]: entry for entry in json.loads(invoke(*arguments, "--json"))["images"]}


def test_every_set_of_images_is_listed_with_its_place_or_its_remedy(tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"found, not read")
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    found = images("list", "--data-dir", tmp_path)
    assert set(found) == set(IMAGES)
    assert {name for name, entry in found.items() if entry["status"] == "found"} == {
        "digits",
        "shapes",
        "mnist",
        "imagenet",
    }
    assert found["mnist"]["where"] == str(tmp_path / "mnist" / "train-images-idx3-ubyte.gz")
    assert found["imagenet"]["where"] == str(tmp_path / "imagenet")
    assert found["cifar10"]["problem"] == PLACES["cifar10"].how_to_get
    shown = invoke("--data-dir", tmp_path)
    assert "  cifar10        missing  no data\n" in shown
    assert "  digits         found    made, not read\n" in shown
    assert f"camvid: {PLACES['camvid'].how_to_get}\n" in shown


@pytest.mark.parametrize("name", sorted(PLACES))
def test_sets_are_sought_where_they_are_read(name, tmp_path):
    """The loader's own error names the places; a folder that is there in part is another one."""
    with pytest.raises(MissingDataError) as loading:
        load_images(name, tmp_path)
    with pytest.raises(MissingDataError) as locating:
        PLACES[name].find(tmp_path)
    if PLACES[name].files:
        assert str(locating.value) == str(loading.value)
    else:
        place = tmp_path / PLACES[name].folders[0] / PLACES[name].inside
        place.mkdir(parents=True)
        assert PLACES[name].find(tmp_path) == place.parent
        with pytest.raises(MissingDataError, match=str(place)):
            load_images(name, tmp_path)
    with pytest.raises(MissingDataError, match="no data directory is known: pass --data-dir"):
        PLACES[name].find(None)
    assert PLACES[name].how_to_get in str(locating.value)


@pytest.mark.parametrize("name", [name for name in sorted(PLACES) if PLACES[name].files])
def test_a_set_in_any_folder_is_found(name, tmp_path):
    place = PLACES[name]
    for number, folder in enumerate((*place.folders, ".")):
        root = tmp_path / str(number)
        (root / folder).mkdir(parents=True)
        (root / folder / place.files[0].name).write_bytes(b"x")
        assert place.find(root) == root / folder / place.files[0].name


def test_what_is_in_a_set_of_images():
    record = json.loads(invoke("digits", "--json"))
    assert (record["images"], record["masks"], record["channels"]) == ("digits", False, 1)
    assert record["classes"] == [str(digit) for digit in range(10)]
    train = record["splits"]["train"]
    assert (train["images"], train["width"], train["height"]) == (4000, 16, 16)
    targets = load_images("digits").splits["train"].targets
    assert train["shares"] == pytest.approx([float((targets == k).double().mean()) for k in range(10)])
    shown = invoke("digits")
    assert shown.startswith("digits: 10 classes of images, 1 channels\n")
    assert "  train   4,000  16×16\n" in shown


def test_what_is_in_a_set_with_masks(monkeypatch):
    monkeypatch.setitem(IMAGES, "shapes", functools.partial(IMAGES["shapes"], size=8, train_size=20, test_size=10))
    record = json.loads(invoke("shapes", "--json"))
    assert record["masks"]
    masks = load_images("shapes").splits["test"].targets
    shares = record["splits"]["test"]["shares"]
    assert shares == pytest.approx([float((masks == k).double().mean()) for k in range(4)])
    assert "share of the pixels, %\n" in invoke("shapes")


def test_a_folder_of_images_is_told_from_one_of_text(tmp_path, run_main):
    (tmp_path / "mine" / "train").mkdir(parents=True)
    code, _, error = run_main("data", "mine", "--data-dir", tmp_path)
    assert code == 2
    assert str(tmp_path / "mine" / "train") in error


def test_a_missing_set_ends_with_one_line(tmp_path, run_main):
    for name in ("cifar10", "cityscapes"):
        code, out, error = run_main("data", name, "--data-dir", tmp_path)
        assert (code, out) == (2, "")
        assert error.count("\n") == 1
        assert PLACES[name].how_to_get in error
    code, _, error = run_main("data", "cifar1O", "--data-dir", tmp_path)
    assert code == 2
    assert "unknown data set 'cifar1O'; did you mean 'cifar10'?" in error
