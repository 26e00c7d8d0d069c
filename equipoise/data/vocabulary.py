"""Vocabularies: text to token ids and back, most frequent tokens first, the end of a line at index 0."""

import abc
import dataclasses
import functools
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise._errors import require_count, unknown_name

EOS = "<eos>"
UNKNOWN = "<unk>"
_CODE_POINTS = 0x110000
_PIECE = re.compile(rf"{EOS}|{UNKNOWN}|\w+|[^\w\s]")


class UnknownTokenError(ValueError):
    """A token is not in a vocabulary that has no `<unk>`."""


class Vocabulary(abc.ABC):
    """A fixed set of tokens with ids 0 .. len − 1."""

    kind: ClassVar[str]

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    @abc.abstractmethod
    def eos(self) -> int:
        """Id of the token that ends a line."""

    @property
    def unknown(self) -> int | None:
        """Id of `<unk>`, or None if each text can be, or must be, spelled without it."""
        return None

    @abc.abstractmethod
    def encode(self, text: str) -> Tensor:
        """Ids of a text, a 1-D int64 tensor; each newline becomes one end-of-line token."""

    @abc.abstractmethod
    def decode(self, ids: Tensor | Iterable[int]) -> str:
        """The text of ids."""

    def strange(self, text: str) -> tuple[list[str], int]:
        """Tokens of a text that become `<unk>`, in their order, and how many tokens were looked at."""
        return [], 0

    def with_unknown(self) -> "Vocabulary":
        """This vocabulary with `<unk>` as its last token, if it needs one and has none."""
        return self

    def state(self) -> dict[str, Any]:
        """All of it as plain values, for a checkpoint; `vocabulary_from_state` reads it."""
        return {"kind": self.kind, **dataclasses.asdict(self)}  # type: ignore[call-overload]


def _as_list(ids: Tensor | Iterable[int]) -> list[int]:
    return ids.flatten().tolist() if isinstance(ids, Tensor) else list(ids)


@dataclass(frozen=True)
class _Table(Vocabulary):
    """Tokens sorted by how often they occur in the training text.

    Attributes:
        tokens: The tokens by id.
        counts: How often each occurs in the training text, replaced rare tokens counted under `<unk>`.
    """

    tokens: tuple[str, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))
        object.__setattr__(self, "counts", tuple(self.counts))
        if len(self.tokens) != len(self.counts) or len(set(self.tokens)) != len(self.tokens):
            raise ValueError(
                f"{type(self).__name__}: needs distinct tokens and a count for each, got {len(self.tokens)} tokens "
                f"({len(set(self.tokens))} distinct) and {len(self.counts)} counts."
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def eos(self) -> int:
        return 0

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Id of each token."""
        return {token: number for number, token in enumerate(self.tokens)}

    @property
    def unknown(self) -> int | None:
        return self.index.get(UNKNOWN)

    def strange(self, text: str) -> tuple[list[str], int]:
        tokens = self._split(text)
        return [token for token in tokens if token not in self.index], len(tokens)

    @abc.abstractmethod
    def _split(self, text: str) -> list[str]:
        """A text as tokens, known or not, without ends of lines."""

    def with_unknown(self) -> "_Table":
        if self.unknown is not None:
            return self
        return dataclasses.replace(self, tokens=(*self.tokens, UNKNOWN), counts=(*self.counts, 0))

    def _refuse(self, token: str) -> UnknownTokenError:
        return UnknownTokenError(
            f"the {self.kind} {token!r} is not among the {len(self):,} of this vocabulary, which has no {UNKNOWN}; "
            "use with_unknown()."
        )


def _ranked(counts: Counter[str], end: str, min_count: int, size: int | None) -> tuple[list[str], list[int]]:
    """Tokens to keep with their counts, `end` first, then by falling count, ties in the order given."""
    require_count("vocabulary", "min_count", min_count)
    if size is not None:
        require_count("vocabulary", "size", size, low=3)
    ends = counts.pop(end, 0)
    known = [token for token, count in counts.most_common() if count >= min_count and token != UNKNOWN]
    needs_unknown = UNKNOWN in counts or len(known) < len(counts)
    if size is not None and 1 + len(known) + needs_unknown > size:
        known = known[: size - 2]
    chosen = {*known, UNKNOWN}
    kept = Counter({token: count for token, count in counts.items() if token in chosen})
    rare = counts.total() - kept.total()
    if rare:
        kept[UNKNOWN] += rare
    ranked = kept.most_common()
    return [end, *(token for token, _ in ranked)], [ends, *(count for _, count in ranked)]


class _Default(dict[str, int]):
    """A dictionary that answers with the id of `<unk>` for what it does not hold, at the speed of a plain one."""

    def __init__(self, index: dict[str, int], default: int) -> None:
        super().__init__(index)
        self.default = default

    def __missing__(self, key: str) -> int:
        return self.default


@dataclass(frozen=True)
class WordVocabulary(_Table):
    """Words of a text, case kept; `<eos>` is at index 0, the rest by frequency, ties in order of appearance.

    Attributes:
        tokens: The words by id.
        counts: How often each occurs in the training text.
        punctuation: Whether punctuation marks are words of their own; otherwise words are what blanks separate.
    """

    kind: ClassVar[str] = "word"
    punctuation: bool = False

    @classmethod
    def fit(
        cls, text: str, *, min_count: int = 1, size: int | None = None, punctuation: bool = False
    ) -> "WordVocabulary":
        """The vocabulary of a training text.

        Args:
            text: The text; each newline counts as one `<eos>`.
            min_count: Words seen less often become `<unk>`.
            size: Most entries to keep, `<eos>` and `<unk>` included; None for all.
            punctuation: Whether punctuation marks are words of their own.
        """
        counts: Counter[str] = Counter()
        split = _splitter(punctuation)
        for line in text.split("\n"):
            counts.update(split(line))
        counts[EOS] += text.count("\n")
        tokens, numbers = _ranked(counts, EOS, min_count, size)
        return cls(tuple(tokens), tuple(numbers), punctuation)

    @functools.cached_property
    def _lookup(self) -> dict[str, int]:
        return self.index if self.unknown is None else _Default(self.index, self.unknown)

    def _split(self, text: str) -> list[str]:
        return _splitter(self.punctuation)(text)

    def encode(self, text: str) -> Tensor:
        split = _splitter(self.punctuation)
        index = self._lookup
        ids = array("q")  # 8 bytes a token; a list of the words of a large corpus takes gigabytes
        lines = text.split("\n")
        try:
            for line in lines[:-1]:
                ids.extend(map(index.__getitem__, split(line)))
                ids.append(0)
            ids.extend(map(index.__getitem__, split(lines[-1])))
        except KeyError as error:
            raise self._refuse(error.args[0]) from None
        return torch.frombuffer(ids, dtype=torch.int64) if ids else torch.empty(0, dtype=torch.int64)

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        lines: list[list[str]] = [[]]
        for number in _as_list(ids):
            if number == 0:
                lines.append([])
            else:
                lines[-1].append(self.tokens[number])
        return "\n".join(" ".join(line) for line in lines)


def _splitter(punctuation: bool) -> Callable[[str], list[str]]:
    return _PIECE.findall if punctuation else str.split


@dataclass(frozen=True)
class CharacterVocabulary(_Table):
    """Characters of a text; the newline is at index 0, the rest by frequency, ties by code point.

    Attributes:
        tokens: The characters by id.
        counts: How often each occurs in the training text.
    """

    kind: ClassVar[str] = "character"

    @classmethod
    def fit(cls, text: str, *, min_count: int = 1, size: int | None = None) -> "CharacterVocabulary":
        """The vocabulary of a training text.

        Args:
            text: The text.
            min_count: Characters seen less often become `<unk>`.
            size: Most entries to keep, newline and `<unk>` included; None for all.
        """
        bins = torch.bincount(_code_points(text))
        seen = bins.nonzero().flatten().tolist()
        counts = Counter({chr(point): int(bins[point]) for point in seen})
        tokens, numbers = _ranked(counts, "\n", min_count, size)
        return cls(tuple(tokens), tuple(numbers))

    @functools.cached_property
    def _lookup(self) -> Tensor:
        missing = -1 if self.unknown is None else self.unknown
        lookup = torch.full((_CODE_POINTS,), missing, dtype=torch.int64)
        for number, token in enumerate(self.tokens):
            if token != UNKNOWN:
                lookup[ord(token)] = number
        return lookup

    def _split(self, text: str) -> list[str]:
        return [character for character in text if character != "\n"]

    def encode(self, text: str) -> Tensor:
        points = _code_points(text)
        ids = self._lookup[points]
        if self.unknown is None and bool((ids < 0).any()):
            raise self._refuse(chr(int(points[ids < 0][0])))
        return ids

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        unknown = self.unknown
        return "".join("\ufffd" if number == unknown else self.tokens[number] for number in _as_list(ids))


def _code_points(text: str) -> Tensor:
    data = bytearray(text.encode("utf-32-le"))
    return torch.frombuffer(data, dtype=torch.int32) if data else torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True)
class ByteVocabulary(Vocabulary):
    """The 256 bytes of UTF-8 text; an id is the byte itself, so the end of a line is at 10, not at 0."""

    kind: ClassVar[str] = "byte"

    def __len__(self) -> int:
        return 256

    @property
    def eos(self) -> int:
        return ord("\n")

    def encode(self, text: str) -> Tensor:
        data = bytearray(text.encode())
        return torch.frombuffer(data, dtype=torch.uint8).long() if data else torch.empty(0, dtype=torch.int64)

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        return bytes(_as_list(ids)).decode(errors="replace")


@dataclass(frozen=True)
class BPEVocabulary(Vocabulary):
    """Byte-pair encoding within lines; `<eos>` ends a line and is at index 0, the rest by frequency.

    Any text can be encoded, because single bytes are tokens. Needs the package `tokenizers`.

    Attributes:
        model: The trained tokenizer as JSON.
        order: The tokenizer's own id of each token, by ours.
        counts: How often each token occurs in the training text.
    """

    kind: ClassVar[str] = "bpe"
    model: str
    order: tuple[int, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(self.order))
        object.__setattr__(self, "counts", tuple(self.counts))

    @classmethod
    def fit(cls, text: str, *, size: int = 8192) -> "BPEVocabulary":
        """Learn merges from a training text.

        Args:
            text: The text.
            size: Number of tokens, at least 257: `<eos>` and the single bytes.
        """
        require_count("BPEVocabulary", "size", size, low=257)
        tokenizers = _tokenizers()
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[EOS],
            show_progress=False,
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        )
        lines = text.split("\n")
        model.train_from_iterator(lines, trainer)
        plain = cls(model.to_str(), tuple(range(model.get_vocab_size())), (0,) * model.get_vocab_size())
        counts = torch.bincount(plain.encode(text), minlength=len(plain)).tolist()
        order = [0, *sorted(range(1, len(plain)), key=lambda number: -counts[number])]
        return cls(plain.model, tuple(order), tuple(counts[number] for number in order))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def eos(self) -> int:
        return 0

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return _tokenizers().Tokenizer.from_str(self.model)

    @functools.cached_property
    def _rank(self) -> Tensor:
        return torch.argsort(torch.tensor(self.order))

    def encode(self, text: str) -> Tensor:
        ids = array("q")
        lines = text.split("\n")
        for start in range(0, len(lines), 4096):  # in parts: the encodings of a whole corpus are large
            for encoding in self._tokenizer.encode_batch(lines[start : start + 4096]):
                ids.extend(encoding.ids)
                ids.append(0)
        ids.pop()  # after the last newline there is no further line
        return self._rank[torch.frombuffer(ids, dtype=torch.int64)] if ids else torch.empty(0, dtype=torch.int64)

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        lines: list[list[int]] = [[]]
        for number in _as_list(ids):
            if number == 0:
                lines.append([])
            else:
                lines[-1].append(self.order[number])
        return "\n".join(self._tokenizer.decode_batch(lines))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError(
            "tokens='bpe' needs the package 'tokenizers', which comes with the extra [hf]: pip install "
            "'equipoise[hf]'. Without it use tokens='word', 'character' or 'byte'."
        ) from error
    return tokenizers


VOCABULARIES: dict[str, type[Vocabulary]] = {
    cls.kind: cls for cls in (WordVocabulary, CharacterVocabulary, ByteVocabulary, BPEVocabulary)
}


def vocabulary_from_state(state: dict[str, Any]) -> Vocabulary:
    """The vocabulary that `Vocabulary.state` wrote."""
    values = dict(state)
    kind = values.pop("kind", None)
    if kind not in VOCABULARIES:
        raise unknown_name("kind of vocabulary", kind, VOCABULARIES)
    return VOCABULARIES[kind](**values)
