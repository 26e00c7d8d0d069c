"""Text corpora as token streams: known ones by name, an embedded one, or any folder of text."""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise._errors import require_number, unknown_name
from equipoise.data.files import DamagedDataError, MissingDataError, TextFile, data_root, find_text, read_text
from equipoise.data.readers import SPLITS, Texts, cut, line_end, read_embedded, read_folder
from equipoise.data.registry import register_data
from equipoise.data.vocabulary import (
    VOCABULARIES,
    BPEVocabulary,
    ByteVocabulary,
    CharacterVocabulary,
    UnknownTokenError,
    Vocabulary,
    WordVocabulary,
)

EMBEDDED = "embedded"


@dataclass(frozen=True)
class TextCorpus:
    """A text as three token streams.

    Attributes:
        name: Name of the corpus, or of its folder.
        train: (N,) int64 token ids of the training text.
        valid: Those of the validation text.
        test: Those of the test text; empty if the corpus has none.
        vocabulary: What the ids mean.
        info: Plain values to log with every number: counts of tokens, types and unknown tokens, checksums, options.
    """

    name: str
    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: Vocabulary
    info: dict[str, Any] = field(default_factory=dict)

    def split(self, name: str) -> Tensor:
        """The stream of one split.

        Raises:
            MissingDataError: If the corpus has no text for it.
        """
        if name not in SPLITS:
            raise unknown_name("split", name, SPLITS)
        stream: Tensor = getattr(self, name)
        if not len(stream):
            present = ", ".join(split for split in SPLITS if len(getattr(self, split)))
            raise MissingDataError(f"the corpus {self.name!r} has no {name} text; it has: {present}.")
        return stream


@dataclass(frozen=True)
class Corpus:
    """What is known about a corpus.

    Attributes:
        name: Its name, also that of its folder in the data directory.
        files: A file for each split, or one for all.
        how_to_get: A sentence for those who have not got it.
        folders: Other folder names in use.
        archives: Archives in which it is passed around.
        tokenised: Whether words are already separated by blanks; otherwise punctuation marks become words.
        strip: Whether blanks at the ends of lines are dropped; they would count as characters.
        min_count: Words seen less often in the training text become `<unk>`.
        cuts: For one file: the shares of its characters at which training and validation text end.
        expected: Counts of word tokens by split and of word types, checked after loading.
    """

    name: str
    files: tuple[TextFile, ...]
    how_to_get: str
    folders: tuple[str, ...] = ()
    archives: tuple[str, ...] = ()
    tokenised: bool = True
    strip: bool = True
    min_count: int = 1
    cuts: tuple[float, float] = (0.9, 0.95)
    expected: dict[str, int] = field(default_factory=dict)

    def read(self, data_dir: str | os.PathLike[str] | None) -> Texts:
        """Find and read the files."""
        read = partial(self._read_file, data_dir=data_dir)
        if len(self.files) == 1:
            text, source, md5 = read(self.files[0])
            return Texts(cut(text, self.cuts), {"all": source}, {"all": md5})
        found = {split: read(file) for split, file in zip(SPLITS, self.files, strict=True)}
        texts, sources, md5s = ({split: parts[k] for split, parts in found.items()} for k in range(3))
        return Texts(texts, sources, md5s)

    def _read_file(self, file: TextFile, data_dir: str | os.PathLike[str] | None) -> tuple[str, str, str]:
        source = find_text(
            file,
            data_dir=data_dir,
            folders=(self.name, *self.folders),
            archives=(f"{self.name}.zip", *self.archives),
            how_to_get=self.how_to_get,
        )
        text, md5 = read_text(source, file, self.how_to_get)
        return text, str(source), md5


CORPORA: dict[str, Corpus] = {}


def register_corpus(corpus: Corpus) -> Corpus:
    """Make a corpus known by its name, to `load_text` and to the registry of data sets."""
    register_data(corpus.name)(partial(load_text, corpus.name))
    CORPORA[corpus.name] = corpus
    return corpus


def load_text(
    name: str | os.PathLike[str],
    data_dir: str | os.PathLike[str] | None = None,
    tokens: str = "word",
    *,
    min_count: int | None = None,
    size: int | None = None,
    train_fraction: float = 1.0,
) -> TextCorpus:
    """Load a corpus as token streams.

    Args:
        name: A known corpus, `"embedded"` (needs no files), or a folder: one with files for train, valid and test, or
            any text files, which are then joined and cut 90 : 5 : 5.
        data_dir: Where the files are; by default the environment variable EQUIPOISE_DATA says it.
        tokens: `"word"`, `"character"`, `"byte"` or `"bpe"`.
        min_count: Words or characters seen less often in the training text become `<unk>`; by default the rule of the
            corpus.
        size: Most entries of the vocabulary; for `"bpe"` their number, by default 8192.
        train_fraction: Leading share of the training text to use, up to the end of a line, or of a word where lines
            are long; the vocabulary is counted on it.

    Raises:
        MissingDataError: If a file is not there; the message says where it was sought and how to get it.
        DamagedDataError: If a file cannot be read or is another than expected.
    """
    if tokens not in VOCABULARIES:
        raise unknown_name("kind of tokens", tokens, VOCABULARIES)
    require_number("load_text", "train_fraction", train_fraction, low=0, high=1, open_low=True, closed_high=True)
    corpus = CORPORA.get(str(name))
    if str(name) == EMBEDDED:
        corpus, texts = Corpus(EMBEDDED, (), "", tokenised=False, strip=False), read_embedded()
    elif corpus is not None:
        texts = corpus.read(data_dir)
    else:
        folder = _folder(name, data_dir)
        corpus, texts = Corpus(folder.name, (), "", strip=False), read_folder(folder)
    by_line = tokens in ("word", "bpe")
    splits = _prepare(texts.splits, strip=corpus.strip, by_line=by_line, fraction=train_fraction)
    vocabulary = _fit(splits["train"], tokens, corpus, min_count, size)
    streams, vocabulary = _encode(splits, vocabulary)
    plain = min_count is None and size is None and train_fraction == 1
    if plain and tokens == "word":
        _check_counts(corpus, streams, vocabulary, texts)
    info = _describe(corpus, splits, streams, vocabulary, texts)
    info |= {"min_count": min_count, "size": size, "train_fraction": train_fraction}
    return TextCorpus(corpus.name, **streams, vocabulary=vocabulary, info=info)


def _prepare(splits: dict[str, str], strip: bool, by_line: bool, fraction: float) -> dict[str, str]:
    """The texts with lines stripped, the last line ended and training text shortened, each if asked for."""
    ready = {}
    for split in SPLITS:
        text = splits.get(split, "")
        if split == "train" and fraction < 1:
            place = int(fraction * len(text))
            text = text[: line_end(text, place, 1 + place // 10)]  # in a text of long lines the next end may be far
        if strip:
            text = "\n".join(line.strip() for line in text.split("\n"))
        ready[split] = text + "\n" if by_line and text and not text.endswith("\n") else text
    return ready


def _fit(text: str, tokens: str, corpus: Corpus, min_count: int | None, size: int | None) -> Vocabulary:
    if tokens in ("bpe", "byte") and min_count is not None:
        raise ValueError(f"load_text: min_count={min_count} has no meaning for tokens={tokens!r}; leave it out.")
    if tokens == "byte":
        if size is not None:
            raise ValueError(f"load_text: size={size} has no meaning for tokens='byte', which are 256; leave it out.")
        return ByteVocabulary()
    if tokens == "bpe":
        return BPEVocabulary.fit(text, size=8192 if size is None else size)
    if tokens == "character":
        return CharacterVocabulary.fit(text, min_count=min_count or 1, size=size)
    least = corpus.min_count if min_count is None else min_count
    return WordVocabulary.fit(text, min_count=least, size=size, punctuation=not corpus.tokenised)


def _encode(splits: dict[str, str], vocabulary: Vocabulary) -> tuple[dict[str, Tensor], Vocabulary]:
    """Streams of all splits; `<unk>` joins the vocabulary if validation or test text holds what training lacks."""
    streams = {}
    for split, text in splits.items():
        try:
            streams[split] = vocabulary.encode(text)
        except UnknownTokenError:
            vocabulary = vocabulary.with_unknown()  # comes last, so ids given before stay
            streams[split] = vocabulary.encode(text)
    return streams, vocabulary


def _check_counts(corpus: Corpus, streams: dict[str, Tensor], vocabulary: Vocabulary, texts: Texts) -> None:
    found = {split: len(stream) for split, stream in streams.items()} | {"vocabulary": len(vocabulary)}
    for what, count in corpus.expected.items():
        if found[what] != count:
            place = texts.sources.get(what, "; ".join(texts.sources.values()))
            raise DamagedDataError(
                f"{corpus.name}: {what} has {found[what]:,} entries instead of {count:,}, so the files are damaged or "
                f"of another version: {place}. {corpus.how_to_get}"
            )


def _describe(
    corpus: Corpus, splits: dict[str, str], streams: dict[str, Tensor], vocabulary: Vocabulary, texts: Texts
) -> dict[str, Any]:
    unknown = vocabulary.unknown
    return {
        "corpus": corpus.name,
        "tokens": vocabulary.kind,
        "vocabulary": len(vocabulary),
        **{f"{split}_tokens": len(stream) for split, stream in streams.items()},
        **{f"{split}_characters": len(text) for split, text in splits.items()},
        **{
            f"{split}_unknown": 0 if unknown is None else int((stream == unknown).sum())
            for split, stream in streams.items()
        },
        "sources": dict(texts.sources),
        "md5": dict(texts.md5),
    }


def _folder(name: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder meant by a name that is no known corpus."""
    root = data_root(data_dir)
    candidates = [Path(name).expanduser(), *([] if root is None else [root / name])]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    error = unknown_name("corpus", str(name), [*CORPORA, EMBEDDED])
    places = " or ".join(str(candidate) for candidate in candidates)
    raise ValueError(f"{error} A folder of text may be given too, but there is none at {places}.")


register_data(EMBEDDED)(partial(load_text, EMBEDDED))
