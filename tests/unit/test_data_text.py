"""Corpora: known ones on toy files, folders of text, the embedded one, and the real ones where they are at hand."""

import dataclasses
import json
import lzma
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from equipoise.data import DamagedDataError, MissingDataError, list_data, load_data, load_text
from equipoise.data.files import TextFile, checksum
from equipoise.data.images import IMAGES
from equipoise.data.readers import read_embedded
from equipoise.data.text import CORPORA, Corpus

SPLITS = {"train": " a b <unk> \n b c b \n", "valid": " a <unk> \n", "test": " c c\n"}
NAMES = ["novels", "ptb", "tinyshakespeare", "wiki20k", "wikitext103", "wikitext2"]


@pytest.fixture(autouse=True)
def _no_data_directory(monkeypatch):
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)


@pytest.fixture
def toy(monkeypatch):
    """A corpus in the manner of the known ones."""
    files = tuple(TextFile(f"toy.{s}.txt", checksum(t.encode()), len(t.encode())) for s, t in SPLITS.items())
    expected = {"train": 8, "valid": 3, "test": 3, "vocabulary": 5}
    corpus = Corpus("toy", files, "Get it: from the toy shop.", expected=expected)
    monkeypatch.setitem(CORPORA, "toy", corpus)
    return corpus


def write(folder, splits=SPLITS, pattern="toy.{}.txt"):
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in splits.items():
        (folder / pattern.format(split)).write_text(text, encoding="utf-8", newline="\n")
    return folder


@pytest.mark.parametrize("inside", [True, False])
def test_words_of_a_known_corpus_from_either_directory(toy, tmp_path, inside):
    folder = write(tmp_path / "toy")
    corpus = load_text("toy", tmp_path if inside else folder)
    assert corpus.vocabulary.tokens == ("<eos>", "b", "a", "<unk>", "c")
    assert corpus.train.tolist() == [2, 1, 3, 0, 1, 4, 1, 0]
    assert corpus.valid.tolist() == [2, 3, 0]
    assert corpus.test.tolist() == [4, 4, 0]
    assert {corpus.train.dtype, corpus.valid.dtype, corpus.test.dtype} == {torch.int64}
    assert torch.equal(corpus.split("valid"), corpus.valid)


def test_info_is_plain_and_has_the_counts(toy, tmp_path):
    info = load_text("toy", write(tmp_path)).info
    assert json.loads(json.dumps(info)) == info
    expected = {
        "corpus": "toy",
        "tokens": "word",
        "vocabulary": 5,
        "train_tokens": 8,
        "valid_tokens": 3,
        "test_tokens": 3,
        "train_unknown": 1,
        "valid_unknown": 1,
        "test_unknown": 0,
        "train_characters": 16,  # of stripped lines, newlines included
    }
    assert {key: info[key] for key in expected} == expected
    assert info["md5"]["train"] == checksum(SPLITS["train"].encode())
    assert info["sources"]["test"].endswith("toy.test.txt")


def test_characters_of_a_known_corpus_are_those_of_stripped_lines(toy, tmp_path):
    corpus = load_text("toy", write(tmp_path), "character")
    assert corpus.vocabulary.decode(corpus.train) == "a b <unk>\nb c b\n"
    assert corpus.vocabulary.tokens[0] == "\n"
    assert corpus.vocabulary.unknown is None
    assert load_text("toy", tmp_path, "byte").valid.tolist() == list(b"a <unk>\n")


def test_a_whole_corpus_in_one_archive(toy, tmp_path):
    with zipfile.ZipFile(tmp_path / "toy.zip", "w") as archive:
        for split, text in SPLITS.items():
            archive.writestr(f"toy/toy.{split}.txt", text)
    assert load_text("toy", tmp_path).train.tolist() == [2, 1, 3, 0, 1, 4, 1, 0]


def test_missing_and_damaged_files_of_a_known_corpus(toy, tmp_path):
    write(tmp_path)
    (tmp_path / "toy.test.txt").unlink()
    with pytest.raises(MissingDataError, match=r"toy\.test\.txt .*Sought in: .*Get it: from the toy shop\."):
        load_text("toy", tmp_path)
    (tmp_path / "toy.test.txt").write_text(" c d\n", encoding="utf-8")
    with pytest.raises(DamagedDataError, match=r"toy\.test\.txt: its md5 is .* Get it: from the toy shop\."):
        load_text("toy", tmp_path)


def test_unexpected_counts_are_an_error_unless_options_change_them(toy, tmp_path, monkeypatch):
    strict = dataclasses.replace(toy, expected={"train": 9})
    monkeypatch.setitem(CORPORA, "toy", strict)
    write(tmp_path)
    with pytest.raises(DamagedDataError, match="toy: train has 8 entries instead of 9"):
        load_text("toy", tmp_path)
    assert len(load_text("toy", tmp_path, "character").train) == 16
    assert len(load_text("toy", tmp_path, train_fraction=0.5).train) == 4


def test_options_reach_the_vocabulary(toy, tmp_path):
    write(tmp_path)
    assert load_text("toy", tmp_path, min_count=2).vocabulary.tokens == ("<eos>", "b", "<unk>")
    assert len(load_text("toy", tmp_path, size=4).vocabulary) == 4
    half = load_text("toy", tmp_path, train_fraction=0.5)
    assert half.vocabulary.decode(half.train) == "a b <unk>\n"
    assert half.info["train_fraction"] == 0.5
    assert half.vocabulary.decode(half.test) == "<unk> <unk>\n"


@pytest.mark.parametrize("pattern", ["{}.txt", "some.{}.tokens", "{}.raw.xz"])
def test_a_folder_with_files_for_splits(tmp_path, pattern):
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, text in SPLITS.items():
        data = text.encode()
        (folder / pattern.format(split)).write_bytes(lzma.compress(data) if pattern.endswith("xz") else data)
    (folder / "notes.md").write_text("no text of the corpus", encoding="utf-8")
    for corpus in (load_text(folder), load_text("mine", tmp_path)):
        assert corpus.name == "mine"
        assert corpus.train.tolist() == [2, 1, 3, 0, 1, 4, 1, 0]
    # Text of one's own is taken as it is.
    raw = load_text(folder, tokens="character")
    assert raw.vocabulary.decode(raw.train) == SPLITS["train"]


def test_a_folder_may_lack_test_but_not_train_or_valid(tmp_path):
    write(tmp_path, {"train": "a b\n", "val": "a z"}, "{}.txt")
    corpus = load_text(tmp_path)
    assert corpus.vocabulary.decode(corpus.valid) == "a <unk>\n"
    assert corpus.vocabulary.tokens == ("<eos>", "a", "b", "<unk>")
    with pytest.raises(MissingDataError, match="has no test text; it has: train, valid"):
        corpus.split("test")
    with pytest.raises(ValueError, match="unknown split 'val'"):
        corpus.split("val")
    (tmp_path / "val.txt").unlink()
    with pytest.raises(MissingDataError, match=r"valid\.txt or validation\.txt .*Sought in: .*holds: train\.txt"):
        load_text(tmp_path)
    write(tmp_path, {"valid": "a\n", "dev": "a\n"}, "{}.txt")
    with pytest.raises(DamagedDataError, match=r"2 files for the split 'valid': dev\.txt, valid\.txt"):
        load_text(tmp_path)


def test_any_folder_of_text_is_joined_and_cut_at_lines(tmp_path):
    lines = [f"line {number}" for number in range(200)]
    write(tmp_path, {"one": "\n".join(lines[:120]), "two": "\n".join(lines[120:])}, "{}.txt")
    corpus = load_text(tmp_path)
    texts = [corpus.vocabulary.decode(corpus.split(split)) for split in ("train", "valid", "test")]
    decoded = "".join(texts).split()
    # Numbers never seen in the training text are unknown; places and counts remain.
    assert len(decoded) == 400
    assert texts[0].split("\n")[:-1] == lines[: texts[0].count("\n")]
    assert [0.88 < len(corpus.train) / 600 < 0.92, 0.03 < len(corpus.valid) / 600 < 0.07] == [True, True]
    assert set(corpus.info["md5"]) == {"one.txt", "two.txt"}


@pytest.mark.parametrize("tokens", ["word", "character", "byte"])
@pytest.mark.parametrize("lines", [[4_000], [3_800, 200]], ids=["one", "two"])
def test_a_text_of_long_lines_is_cut_between_words(tmp_path, tokens, lines):
    write(tmp_path / "all", {"all": "\n".join(" ".join(["word"] * count) for count in lines)}, "{}.txt")
    corpus = load_text(tmp_path / "all", tokens=tokens)
    shares = [len(corpus.split(split)) for split in ("train", "valid", "test")]
    assert [round(share / sum(shares), 2) for share in shares] == [0.9, 0.05, 0.05]
    assert set("".join(corpus.vocabulary.decode(corpus.valid)).split()) == {"word"}
    tenth = load_text(tmp_path / "all", tokens=tokens, train_fraction=0.1)
    assert len(tenth.train) == pytest.approx(shares[0] / 10, rel=0.02)


def test_a_text_without_blanks_is_cut_where_the_shares_are(tmp_path):
    write(tmp_path, {"all": "ab" * 500}, "{}.txt")
    corpus = load_text(tmp_path, tokens="character")
    assert [len(corpus.split(split)) for split in ("train", "valid", "test")] == [900, 50, 50]
    assert len(load_text(tmp_path, tokens="character", train_fraction=0.5).train) == 450


def test_unknown_names_say_what_is_known_and_where_a_folder_was_sought(tmp_path):
    with pytest.raises(ValueError, match="unknown corpus 'wikitext_2'; did you mean 'wikitext2'") as raised:
        load_text("wikitext_2", tmp_path)
    assert f"there is none at wikitext_2 or {tmp_path / 'wikitext_2'}" in str(raised.value)
    with pytest.raises(MissingDataError, match=r"holds no text\. Sought: train\.txt"):
        load_text(tmp_path)
    with pytest.raises(ValueError, match="unknown kind of tokens 'char'; did you mean"):
        load_text("embedded", tokens="char")
    for fraction in (0, 1.5):
        with pytest.raises(ValueError, match=rf"train_fraction must be a number in \(0, 1\], got {fraction}"):
            load_text("embedded", train_fraction=fraction)
    with pytest.raises(ValueError, match="min_count=2 has no meaning for tokens='byte'"):
        load_text("embedded", tokens="byte", min_count=2)
    with pytest.raises(ValueError, match="size=300 has no meaning"):
        load_text("embedded", tokens="byte", size=300)


@pytest.mark.parametrize("name", NAMES)
def test_every_known_corpus_says_how_to_get_it(name, tmp_path):
    with pytest.raises(MissingDataError, match=r"was not found\. Sought in: .*Get it: ") as raised:
        load_text(name, tmp_path)
    assert str(tmp_path / name) in str(raised.value)
    with pytest.raises(MissingDataError, match="EQUIPOISE_DATA"):
        load_text(name)


def test_registry_lists_corpora_and_tasks():
    assert list_data() == sorted([*NAMES, *IMAGES, "embedded", "copy_memory"])
    assert list_data("wiki*") == ["wiki20k", "wikitext103", "wikitext2"]
    assert load_data("embedded", tokens="byte").name == "embedded"
    with pytest.raises(ValueError, match="unknown data set 'embeded'; did you mean 'embedded'"):
        load_data("embeded")


@pytest.mark.parametrize(("tokens", "least"), [("word", 50_000), ("character", 200_000), ("byte", 200_000)])
def test_the_embedded_corpus_needs_nothing(tokens, least):
    corpus = load_text("embedded", tokens=tokens)
    assert len(corpus.train) > least
    assert 0.02 < len(corpus.valid) / len(corpus.train) < 0.1
    assert 0.02 < len(corpus.test) / len(corpus.train) < 0.1
    assert int(corpus.train.max()) < len(corpus.vocabulary)
    assert corpus.info["sources"]["all"].startswith("pydoc_data of Python 3.")
    assert torch.equal(corpus.train, load_text("embedded", tokens=tokens).train)


def test_the_embedded_corpus_repeats_no_paragraph():
    splits = read_embedded().splits
    paragraphs = [" ".join(p.split()) for text in splits.values() for p in text.split("\n\n") if p.strip()]
    assert len(paragraphs) > 1000
    assert len(paragraphs) - len(set(paragraphs)) <= 4  # a cut may leave half a paragraph that reads like another


def test_a_python_without_its_texts_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(MissingDataError, match=r"pydoc_data/topics\.py was not found"):
        load_text("embedded")


def test_import_needs_only_torch():
    script = (
        "import sys, torch\nbefore = set(sys.modules)\nimport equipoise.data\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new & {'tokenizers', 'transformers', 'datasets', 'pydoc_data', 'PIL'}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Read on import, because tests clear the variable.
ROOTS = [
    *([Path(os.environ["EQUIPOISE_DATA"])] if os.environ.get("EQUIPOISE_DATA") else []),
    Path(__file__).parents[3] / "shared" / "data",
]


def real(name):
    """The data directory that holds a real corpus; without one the test is skipped."""
    for root in ROOTS:
        if (root / name).is_dir():
            return root
    return pytest.skip(f"the corpus {name} is not at hand: no such folder in {', '.join(map(str, ROOTS))}")


def test_real_ptb_words():
    corpus = load_text("ptb", real("ptb"))
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (929_589, 73_760, 82_430)
    assert len(corpus.vocabulary) == 10_000
    assert corpus.vocabulary.tokens[:3] == ("<eos>", "the", "<unk>")
    assert torch.bincount(corpus.train).tolist() == list(corpus.vocabulary.counts)
    assert torch.equal(load_text("ptb", real("ptb") / "ptb").train, corpus.train)


def test_real_ptb_characters():
    corpus = load_text("ptb", real("ptb"), "character")
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (5_017_482, 393_042, 442_423)
    assert (len(corpus.vocabulary), corpus.vocabulary.unknown) == (50, None)


def test_real_tiny_shakespeare_characters():
    corpus = load_text("tinyshakespeare", real("tinyshakespeare"), "character")
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (1_003_854, 111_540, 0)
    assert len(corpus.vocabulary) == 65


@pytest.mark.slow
def test_real_wikitext2_words():
    corpus = load_text("wikitext2", real("wikitext2"))
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (2_088_628, 217_646, 245_569)
    assert len(corpus.vocabulary) == 33_278
    with pytest.raises(DamagedDataError, match="damaged or another version"):
        load_text("wikitext2", real("wiki20k") / "wiki20k")
