"""Data: text as token streams, and the copy-memory task."""

from equipoise.data import corpora as corpora  # registers the corpora known by name
from equipoise.data.copy_memory import CopyBatch, CopyMemory, recall
from equipoise.data.files import DamagedDataError, DataError, MissingDataError
from equipoise.data.registry import list_data, load_data, register_data
from equipoise.data.stream import Segment, StreamScore, TokenStream, score_stream
from equipoise.data.text import Corpus, TextCorpus, load_text, register_corpus
from equipoise.data.vocabulary import (
    BPEVocabulary,
    ByteVocabulary,
    CharacterVocabulary,
    Vocabulary,
    WordVocabulary,
    vocabulary_from_state,
)

__all__ = [
    "BPEVocabulary",
    "ByteVocabulary",
    "CharacterVocabulary",
    "CopyBatch",
    "CopyMemory",
    "Corpus",
    "DamagedDataError",
    "DataError",
    "MissingDataError",
    "Segment",
    "StreamScore",
    "TextCorpus",
    "TokenStream",
    "Vocabulary",
    "WordVocabulary",
    "list_data",
    "load_data",
    "load_text",
    "recall",
    "register_corpus",
    "register_data",
    "score_stream",
    "vocabulary_from_state",
]
