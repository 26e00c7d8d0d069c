"""Vocabularies: order, counts, unknown tokens, and text that survives the way there and back."""

import builtins
import json
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.data.vocabulary import (
    BPEVocabulary,
    ByteVocabulary,
    CharacterVocabulary,
    UnknownTokenError,
    WordVocabulary,
    vocabulary_from_state,
)

TEXT = " the cat sat on the mat \n the <unk> sat \n\n a cat\n"


def test_words_are_sorted_by_frequency_behind_the_end_of_line():
    words = WordVocabulary.fit(TEXT)
    # Ties in order of appearance.
    assert words.tokens == ("<eos>", "the", "cat", "sat", "on", "mat", "<unk>", "a")
    assert words.counts == (4, 3, 2, 2, 1, 1, 1, 1)
    assert (words.eos, words.unknown, len(words)) == (0, 6, 8)
    assert words.encode(TEXT).tolist() == [1, 2, 3, 4, 1, 5, 0, 1, 6, 3, 0, 0, 7, 2, 0]
    assert words.encode(TEXT).dtype == torch.int64


def test_a_text_without_newline_gets_no_end_of_line():
    words = WordVocabulary.fit(TEXT)
    assert words.encode("the cat").tolist() == [1, 2]
    assert words.encode("").tolist() == []
    assert words.decode([1, 2]) == "the cat"
    assert words.decode(words.encode(TEXT)) == "the cat sat on the mat\nthe <unk> sat\n\na cat\n"


def test_case_is_kept():
    assert WordVocabulary.fit("The the\n").tokens == ("<eos>", "The", "the")


def test_rare_words_become_unknown_and_are_counted_so():
    words = WordVocabulary.fit(TEXT, min_count=2)
    assert words.tokens == ("<eos>", "<unk>", "the", "cat", "sat")
    assert words.counts == (4, 4, 3, 2, 2)
    assert words.decode(words.encode("the dog sat")) == "the <unk> sat"


@pytest.mark.parametrize(("size", "kept"), [(8, 8), (7, 7), (5, 5), (3, 3), (100, 8)])
def test_size_bounds_the_vocabulary(size, kept):
    words = WordVocabulary.fit(TEXT, size=size)
    assert len(words) == kept
    assert sum(words.counts) == sum(WordVocabulary.fit(TEXT).counts)


def test_size_without_natural_unknown_makes_room_for_it():
    assert WordVocabulary.fit("a a a b b c\n", size=3).tokens == ("<eos>", "a", "<unk>")
    assert WordVocabulary.fit("a a a b b c\n", size=4).tokens == ("<eos>", "a", "b", "c")


def test_what_of_a_text_is_unknown():
    words = WordVocabulary.fit("a b, c\n", punctuation=True)
    assert words.strange("b; X\na X") == ([";", "X", "X"], 5)
    assert WordVocabulary.fit("a b, c\n").strange("b, <eos>\nb") == (["b"], 3)
    assert CharacterVocabulary.fit("abc\n").strange("ax\nb") == (["x"], 3)
    assert ByteVocabulary().strange("anything") == ([], 0)


def test_unknown_words_are_refused_or_mapped():
    words = WordVocabulary.fit("a b\n")
    with pytest.raises(UnknownTokenError, match="'c' is not among the 3"):
        words.encode("a c")
    wider = words.with_unknown()
    assert wider.tokens == ("<eos>", "a", "b", "<unk>")
    assert wider.counts[-1] == 0
    assert wider.encode("a c\n").tolist() == [1, 3, 0]
    assert wider.with_unknown() is wider


def test_punctuation_can_be_words():
    words = WordVocabulary.fit("f(x), <unk> it's\n", punctuation=True)
    assert words.decode(words.encode("f(x), <unk> it's")) == "f ( x ) , <unk> it ' s"
    assert WordVocabulary.fit("f(x), it's\n").tokens == ("<eos>", "f(x),", "it's")


def test_characters_have_the_newline_first_then_frequency_then_code_point():
    characters = CharacterVocabulary.fit("abba\ncb\n")
    assert characters.tokens == ("\n", "b", "a", "c")
    assert characters.counts == (2, 3, 2, 1)
    assert characters.encode("cab\n").tolist() == [3, 2, 1, 0]
    with pytest.raises(UnknownTokenError, match="character 'é'"):
        characters.encode("é")
    wider = characters.with_unknown()
    assert wider.encode("aé😀").tolist() == [2, 4, 4]
    assert wider.decode([2, 4]) == "a\ufffd"
    rare = CharacterVocabulary.fit("abba\ncb\n", min_count=2)
    assert rare.decode(rare.encode("cab")) == "\ufffdab"


def test_text_without_newline_still_has_it_at_zero():
    assert CharacterVocabulary.fit("aab").tokens == ("\n", "a", "b")


@given(st.lists(st.sampled_from(["a", "b", "cc", "<unk>", "d"]), max_size=30), st.integers(1, 3))
def test_word_counts_equal_those_of_a_plain_counter(words, min_count):
    text = " ".join(words) + "\n"
    fitted = WordVocabulary.fit(text, min_count=min_count)
    plain = Counter(words)
    expected = {word: n for word, n in plain.items() if word != "<unk>" and n >= min_count}
    found = dict(zip(fitted.tokens, fitted.counts, strict=True))
    unknown = found.pop("<unk>", 0)
    assert found.pop("<eos>") == 1
    assert found == expected
    assert unknown == len(words) - sum(expected.values())
    assert torch.bincount(fitted.encode(text), minlength=len(fitted)).tolist() == list(fitted.counts)


@given(st.text(max_size=60))
def test_characters_and_bytes_survive_the_round_trip(text):
    text = text.encode(errors="ignore").decode()
    characters = CharacterVocabulary.fit(text)
    assert characters.decode(characters.encode(text)) == text
    assert torch.bincount(characters.encode(text), minlength=len(characters)).tolist() == list(characters.counts)
    assert ByteVocabulary().decode(ByteVocabulary().encode(text)) == text
    assert ByteVocabulary().encode(text).tolist() == list(text.encode())


def test_bytes_are_their_own_ids():
    assert (len(ByteVocabulary()), ByteVocabulary().eos, ByteVocabulary().unknown) == (256, 10, None)
    assert ByteVocabulary().with_unknown() == ByteVocabulary()


@pytest.mark.parametrize(
    "vocabulary",
    [WordVocabulary.fit(TEXT, punctuation=True), CharacterVocabulary.fit(TEXT), ByteVocabulary()],
    ids=lambda v: v.kind,
)
def test_state_is_plain_json_and_comes_back_equal(vocabulary):
    state = json.loads(json.dumps(vocabulary.state()))
    twin = vocabulary_from_state(state)
    assert twin == vocabulary
    assert twin.encode(TEXT).tolist() == vocabulary.encode(TEXT).tolist()
    assert pickle.loads(pickle.dumps(vocabulary)) == vocabulary


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="unknown kind of vocabulary 'words'; did you mean 'word'"):
        vocabulary_from_state({"kind": "words"})
    with pytest.raises(ValueError, match="distinct tokens"):
        WordVocabulary(("a", "a"), (1, 1))
    with pytest.raises(ValueError, match="min_count must be an integer of at least 1"):
        WordVocabulary.fit(TEXT, min_count=0)
    with pytest.raises(ValueError, match="size must be an integer of at least 3"):
        CharacterVocabulary.fit(TEXT, size=2)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.startswith("tokenizers"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"equipoise\[hf\]"):
        BPEVocabulary.fit(TEXT)


def test_bpe_learns_merges_and_keeps_the_text():
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    text = "low lower lowest\n\n  new newer – newest\n" * 20
    bpe = BPEVocabulary.fit(text, size=300)
    ids = bpe.encode(text)
    assert len(ids) < len(text.encode()) // 2
    assert bpe.decode(ids) == text
    assert bpe.encode("low\n").tolist()[-1] == 0
    assert bpe.encode("").tolist() == []
    assert bpe.decode(bpe.encode("never seen: ξ😀")) == "never seen: ξ😀"
    assert torch.bincount(ids, minlength=len(bpe)).tolist() == list(bpe.counts)
    assert list(bpe.counts[1:]) == sorted(bpe.counts[1:], reverse=True)
    twin = vocabulary_from_state(json.loads(json.dumps(bpe.state())))
    assert twin == bpe
    assert pickle.loads(pickle.dumps(bpe)).encode(text).tolist() == ids.tolist()
