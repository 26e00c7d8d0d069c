"""Texts of a corpus before they become tokens: from a folder, or from the library of Python itself."""

import os
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from equipoise.data.files import DamagedDataError, MissingDataError, Source, checksum, read_text

SPLITS = ("train", "valid", "test")
_SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
_TEXT_NAME = re.compile(r"\.(txt|tokens|raw|text)(\.(xz|gz|zip))?$")
_BLANK = re.compile(r"\s")


@dataclass(frozen=True)
class Texts:
    """The texts of a corpus before they become tokens.

    Attributes:
        splits: The text of each split.
        sources: Where each came from.
        md5: Checksum of each source.
    """

    splits: dict[str, str]
    sources: dict[str, str]
    md5: dict[str, str]


def cut(text: str, cuts: tuple[float, float]) -> dict[str, str]:
    """Cut a text at shares of its length."""
    first, second = (int(share * len(text)) for share in cuts)
    return {"train": text[:first], "valid": text[first:second], "test": text[second:]}


def read_folder(folder: Path) -> Texts:
    """The texts of a folder: by split if files are named so, else all of them joined and cut."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and _TEXT_NAME.search(path.name))
    if not paths:
        raise MissingDataError(
            f"{folder} holds no text. Sought: train.txt, valid.txt and test.txt, or any files named *.txt, *.tokens, "
            "*.text or *.raw, plain or with .xz, .gz, .zip."
        )
    chosen = {split: _one(folder, split, paths) for split in SPLITS}
    if all(path is None for path in chosen.values()):
        found = [_read_path(path) for path in paths]
        joined = "\n".join(text for text, _ in found)
        whole = {path.name: md5 for path, (_, md5) in zip(paths, found, strict=True)}
        return Texts(cut_lines(joined), {path.name: str(path) for path in paths}, whole)
    for split in ("train", "valid"):
        if chosen[split] is None:
            names = " or ".join(f"{name}.txt" for name in _SPLIT_NAMES[split])
            raise MissingDataError(
                f"{names} (or with .xz, .gz, .zip) was not found. Sought in: {folder} (holds: "
                f"{', '.join(path.name for path in paths)}). Add it, or rename the files to have all text joined and "
                "cut 90 : 5 : 5."
            )
    present = {split: path for split, path in chosen.items() if path is not None}
    texts = {split: _read_path(path) for split, path in present.items()}
    return Texts(
        {split: text for split, (text, _) in texts.items()},
        {split: str(path) for split, path in present.items()},
        {split: md5 for split, (_, md5) in texts.items()},
    )


def _read_path(path: Path) -> tuple[str, str]:
    return read_text(Source.of(path))


def _one(folder: Path, split: str, paths: list[Path]) -> Path | None:
    """The file of a split: its name without suffixes is, or has between dots, the name of the split."""
    matches = [path for path in paths if set(path.name.lower().split(".")[:-1]) & set(_SPLIT_NAMES[split])]
    if len(matches) > 1:
        names = ", ".join(path.name for path in matches)
        raise DamagedDataError(f"{folder} holds {len(matches)} files for the split {split!r}: {names}; keep one.")
    return matches[0] if matches else None


def cut_lines(text: str, cuts: tuple[float, float] = (0.9, 0.95)) -> dict[str, str]:
    """Cut a text at the ends of lines near shares of its length, or of words where lines are long."""
    # Half of the smallest part at most: a text may be one line, and no part may take in the next one.
    most = int(min(cuts[1] - cuts[0], 1 - cuts[1]) * len(text) / 2)
    first, second = (line_end(text, int(share * len(text)), most) for share in cuts)
    return {"train": text[:first], "valid": text[first:second], "test": text[second:]}


def line_end(text: str, place: int, most: int) -> int:
    """Where the line at `place` ends; if that is more than `most` characters on, where the word does, or `place`."""
    found = text.find("\n", place, place + most)
    if found < 0:
        blank = _BLANK.search(text, place, place + most)
        found = blank.start() if blank else place - 1
    return found + 1


def read_embedded() -> Texts:
    """The language reference that comes with Python, without its repetitions.

    Long topics repeat the paragraphs of short ones; each paragraph is kept once, so that training text does not contain
    the test text. Topics are put in an order that scatters the alphabet over the splits.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise MissingDataError(
            "pydoc_data/topics.py was not found in the library of this Python "
            f"({Path(os.__file__).parent}); install the full standard library, or use a corpus of files."
        ) from error
    seen: set[str] = set()
    paragraphs = []
    for name in sorted(topics, key=lambda name: (zlib.crc32(name.encode()), name)):
        for paragraph in re.split(r"\n[ \t]*\n", topics[name].strip("\n")):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                paragraphs.append(paragraph)
    text = "\n\n".join(paragraphs)
    version = ".".join(map(str, sys.version_info[:3]))
    return Texts(cut_lines(text), {"all": f"pydoc_data of Python {version}"}, {"all": checksum(text.encode())})
