"""Data: text as token streams, the copy-memory task, and images with classes or masks."""

from equipoise.data import corpora as corpora  # registers the corpora known by name
from equipoise.data import image_sets as image_sets  # and these, the sets of images
from equipoise.data import segmentation as segmentation
from equipoise.data import synthetic as synthetic
from equipoise.data.augment import CropFlip, ResizedCrop, ScaleCrop
from equipoise.data.copy_memory import CopyBatch, CopyMemory, recall
from equipoise.data.files import DamagedDataError, DataError, MissingDataError
from equipoise.data.images import ImageBatch, ImageData, ImageStream, load_images, register_images
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
    "CropFlip",
    "DamagedDataError",
    "DataError",
    "ImageBatch",
    "ImageData",
    "ImageStream",
    "MissingDataError",
    "ResizedCrop",
    "ScaleCrop",
    "Segment",
    "StreamScore",
    "TextCorpus",
    "TokenStream",
    "Vocabulary",
    "WordVocabulary",
    "list_data",
    "load_data",
    "load_images",
    "load_text",
    "recall",
    "register_corpus",
    "register_data",
    "register_images",
    "score_stream",
    "vocabulary_from_state",
]
