"""Sampling: which tokens can be chosen and how often, and that memory gives what recomputation gives."""

import json
import shutil

import pytest
import torch

from equipoise import Plan, Stop, generate, override
from equipoise.data.vocabulary import UnknownTokenError
from equipoise.generate import Sampling, sample, sample_text, sample_texts
from equipoise.models.baselines import (
    TCN,
    RecurrentConfig,
    RecurrentLM,
    TCNConfig,
    TransformerXL,
    TransformerXLConfig,
)
from equipoise.models.deq_transformer import DEQTransformer, DEQTransformerConfig
from equipoise.models.deq_trellisnet import DEQTrellisNet, DEQTrellisNetConfig
from equipoise.models.outputs import LMOutput
from equipoise.train.checkpoint import CheckpointError
from equipoise.train.load import find_checkpoint
from equipoise.train.loop import train
from tests.gradients import relative_error
from tests.runs import COPY, recipe, text_recipe

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])  # by falling probability: 1, 3, 4, 2, 0


def drawn(sampling, probabilities=PROBABILITIES, count=4000):
    """Shares of the tokens in many draws."""
    logits = probabilities.log().expand(count, -1)
    tokens = sampling.choose(logits, torch.rand(count, generator=torch.Generator().manual_seed(1)))
    assert tokens.shape == (count,)
    return torch.bincount(tokens, minlength=len(probabilities)) / count


def chosen(sampling, probabilities=PROBABILITIES):
    return set(drawn(sampling, probabilities).nonzero().flatten().tolist())


# Choosing a token


def test_plain_sampling_follows_the_probabilities():
    assert torch.allclose(drawn(Sampling()), PROBABILITIES, atol=0.03)


def test_temperature_sharpens_the_probabilities():
    sharp = PROBABILITIES.square() / PROBABILITIES.square().sum()
    assert torch.allclose(drawn(Sampling(temperature=0.5)), sharp, atol=0.03)


def test_temperature_zero_takes_the_likeliest_whatever_else_is_set():
    assert chosen(Sampling(temperature=0)) == {1}
    assert chosen(Sampling(temperature=0, top_k=3, top_p=0.9)) == {1}


def test_a_small_temperature_does_not_overflow():
    assert chosen(Sampling(temperature=1e-6)) == {1}


@pytest.mark.parametrize(
    ("k", "expected"), [(1, {1}), (2, {1, 3}), (4, {1, 2, 3, 4}), (5, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})]
)
def test_top_k_keeps_the_k_likeliest(k, expected):
    assert chosen(Sampling(top_k=k)) == expected


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.01, {1}), (0.39, {1}), (0.5, {1, 3}), (0.69, {1, 3}), (0.75, {1, 3, 4}), (0.9, {1, 2, 3, 4}), (1.0, None)],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(p, expected):
    assert chosen(Sampling(top_p=p)) == (expected or {0, 1, 2, 3, 4})


@pytest.mark.parametrize(("k", "expected"), [(1, {1}), (2, {1, 2}), (3, {0, 1, 2}), (4, {0, 1, 2, 3})])
def test_top_k_keeps_no_more_than_k_where_some_are_equally_likely(k, expected):
    """Equal ones in the order of their numbers."""
    assert chosen(Sampling(top_k=k), torch.tensor([0.2, 0.3, 0.3, 0.2])) == expected


def test_a_draw_is_a_place_in_the_cumulative_distribution():
    """Tokens by falling probability: 1 up to 0.4, 3 up to 0.7, 4 up to 0.85, 2 up to 0.95, 0 up to 1."""
    draws = torch.tensor([0.0, 0.39, 0.41, 0.69, 0.71, 0.84, 0.86, 0.94, 0.96, 1 - 2**-53], dtype=torch.float64)
    tokens = Sampling().choose(PROBABILITIES.log().expand(10, -1), draws)
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4, 2, 2, 0, 0]


def test_the_largest_draw_finds_a_possible_token():
    draws = torch.full((1,), 1 - 2**-53, dtype=torch.float64)
    for seed in range(50):
        logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed))
        logits[:, 30:] = -torch.inf
        token = int(Sampling(top_p=0.7).choose(logits, draws))
        assert token == int(logits.argsort(descending=True)[0, len(chosen_by_sum(logits[0], 0.7)) - 1])


def chosen_by_sum(logits, p):
    """The likeliest tokens, one by one until their sum is p."""
    kept, total = [], 0.0
    for probability in logits.double().softmax(dim=0).sort(descending=True).values.tolist():
        if total >= p:
            break
        kept.append(probability)
        total += probability
    return kept


def test_draws_depend_on_seed_row_and_position_alone():
    draws = Sampling(seed=3).draws(400, 0)
    assert torch.equal(Sampling(seed=3, top_k=2).draws(5, 0), draws[:5])
    others = [Sampling(seed=4).draws(400, 0), Sampling(seed=3).draws(400, 1)]
    assert all(float((other - draws).abs().min()) > 0 for other in others)
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.05)
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1


def test_what_is_kept_keeps_its_proportions():
    kept = torch.tensor([0.0, 0.4, 0.0, 0.3, 0.0]) / 0.7
    assert torch.allclose(drawn(Sampling(top_k=2)), kept, atol=0.03)
    assert torch.allclose(drawn(Sampling(top_p=0.6)), kept, atol=0.03)


def test_a_share_above_one_is_refused_and_one_is_not():
    with pytest.raises(ValueError, match=r"top_p must be a number in \(0, 1\], got 1.5"):
        Sampling(top_p=1.5)
    assert Sampling(top_p=1.0).top_p == 1


def test_top_p_counts_after_temperature_and_top_k():
    # Squared and normalised: 0.561, 0.316, 0.079, ...; of the two likeliest: 0.571, 0.429.
    assert chosen(Sampling(temperature=0.5, top_p=0.55)) == {1}
    assert chosen(Sampling(top_k=2, top_p=0.55)) == {1}
    assert chosen(Sampling(top_k=2, top_p=0.6)) == {1, 3}


def test_rows_are_cut_one_by_one():
    logits = torch.stack([PROBABILITIES, PROBABILITIES.flip(0)]).log()
    tokens = Sampling(top_k=1).choose(logits, torch.tensor([0.9, 0.1]))
    assert tokens.tolist() == [1, 3]


def test_impossible_tokens_are_never_chosen():
    probabilities = torch.tensor([0.0, 0.5, 0.5])
    for sampling in (Sampling(), Sampling(top_k=2), Sampling(top_p=1.0)):
        assert chosen(sampling, probabilities) == {1, 2}


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"top_k": 0}, {"top_k": 1.5}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampling(**settings)


# Going on from a prompt


TIGHT = Plan(stop=Stop(rtol=1e-12, max_steps=200))


def deq_transformer(plan=TIGHT, **changes):
    """A strong bias keeps normalised sums away from 0."""
    sizes = {"d_model": 8, "heads": 2, "d_inner": 12, "init_std": 0.2, **changes}
    model = DEQTransformer(DEQTransformerConfig(11, **sizes, plan=plan))
    with torch.no_grad():
        model.embedding.tables[0].mul_(60)
        model.deq.cell.attention.output.bias.normal_(std=3.0)
    return model


# Memory in its several meanings: past equilibria, states of a recurrence, words, inputs of layers; or none.
MODELS = {
    "post_norm": lambda: deq_transformer(memory_length=64),
    "post_norm_without_memory": deq_transformer,
    "pre_norm_without_memory": lambda: deq_transformer(pre_norm=True),
    "trellis": lambda: DEQTrellisNet(DEQTrellisNetConfig(11, 6, 4, init_std=0.4, init_embedding=2.0, plan=TIGHT)),
    "trellis_dilated": lambda: DEQTrellisNet(
        DEQTrellisNetConfig(11, 6, 4, 3, 2, form="full", init_std=0.3, init_embedding=2.0, plan=TIGHT)
    ),
    "lstm": lambda: RecurrentLM(RecurrentConfig(11, "lstm", (7, 6), 5)),
    "gru": lambda: RecurrentLM(RecurrentConfig(11, "gru", (7, 6), 5)),
    "tcn": lambda: TCN(TCNConfig(11, 6, 2, 3, 5, history=64, init_std=0.5)),
    "tcn_without_memory": lambda: TCN(TCNConfig(11, 6, 2, 3, 5, init_std=0.5)),
    "transformer_xl": lambda: TransformerXL(TransformerXLConfig(11, 8, 2, 12, 2, memory_length=64, init_std=0.5)),
    "transformer_xl_without_memory": lambda: TransformerXL(
        TransformerXLConfig(11, 8, 2, 12, 2, memory_length=0, init_std=0.5)
    ),
}


def make(name):
    torch.manual_seed(3)
    return MODELS[name]().double().eval()


class Watched(torch.nn.Module):
    """A model that notes what it is given and what it answers."""

    def __init__(self, model):
        super().__init__()
        self.model, self.lengths, self.scores = model, [], []

    memory_length = property(
        lambda self: getattr(self.model, "memory_length", None),
        lambda self, value: setattr(self.model, "memory_length", value),
    )

    def forward(self, tokens, memory=None):
        output = self.model(tokens, memory=memory)
        self.lengths.append(tokens.shape[1])
        self.scores.append(output.logits[:, -1])
        return output


PROMPT = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize("name", MODELS)
def test_sampling_from_memory_equals_recomputation(name):
    """The scores of every token, and so the tokens: cached against the whole text read again."""
    model = make(name)
    before = getattr(model, "memory_length", None)
    watched, sampling = Watched(model), Sampling(top_k=8, top_p=0.95, seed=5)
    tokens = torch.stack(list(sample(watched, PROMPT, 12, sampling)), dim=1)
    assert tokens.shape == (2, 12)
    assert watched.lengths == [4] + [1] * 11  # the last token is not read: nothing follows it
    assert getattr(model, "memory_length", None) == before
    text = torch.cat([PROMPT, tokens], dim=1)
    with torch.no_grad():
        for position, scores in enumerate(watched.scores):
            again = model(text[:, : 4 + position]).logits[:, -1]
            assert relative_error(scores, again) <= 1e-9
            draws = sampling.draws(2, position)
            assert torch.equal(sampling.choose(again, draws), tokens[:, position])
        # Not by indifference: with a past cut off, scores are others.
        assert relative_error(model(text[:, 13:15]).logits[:, -1], watched.scores[-1]) > 1e-4


def test_memory_that_a_model_was_trained_with_is_kept_to():
    model = make("post_norm")
    model.memory_length = 3
    watched = Watched(model)
    tokens = torch.stack(list(sample(watched, PROMPT, 4, Sampling())), dim=1)
    assert model.memory_length == 3
    with torch.no_grad():
        memory, expected = None, []
        for part in (PROMPT, *tokens[:, :3].split(1, dim=1)):
            output = model(part, memory=memory)
            memory = output.memory
            assert memory[0].shape[1] == 3
            expected.append(output.logits[:, -1])
    assert torch.equal(torch.stack(watched.scores), torch.stack(expected))


def test_a_model_that_forgets_does_so_again_between_and_after_tokens():
    model = make("post_norm_without_memory")
    stream = sample(model, PROMPT, 3)
    next(stream)
    assert model.memory_length == 0
    assert model(PROMPT).memory is None
    stream.close()
    with pytest.raises(ValueError, match="tokens must be integers"):
        next(sample(model, PROMPT.double(), 3))
    assert model.memory_length == 0


def test_a_model_without_any_memory_reads_the_whole_text_again():
    class Sums(torch.nn.Module):
        """Scores that depend on every token so far."""

        def forward(self, tokens, memory=None):
            assert memory is None
            place = tokens.sum(dim=1, keepdim=True) % 11
            return LMOutput(torch.nn.functional.one_hot(place, 11).double())

    tokens = torch.stack(list(sample(Sums(), torch.tensor([[1, 2]]), 4, Sampling(temperature=0))), dim=1)
    assert tokens.tolist() == [[3, 6, 1, 2]]  # 1 + 2; 1 + 2 + 3; 12 and 13 modulo 11


@pytest.mark.parametrize("name", ["post_norm_without_memory", "trellis"])
def test_streams_do_not_depend_on_each_other(name):
    """Solved loosely, so that some streams stop before others: each by its own residual."""
    model, loose = make(name), Stop(rtol=2e-3, max_steps=50)
    prompts = torch.randint(11, (9, 5), generator=torch.Generator().manual_seed(2))
    together, likeliest = Watched(model), Sampling(temperature=0)
    with override(model, stop=loose):
        tokens = torch.stack(list(sample(together, prompts, 5, likeliest)), dim=1)
        for row in range(9):
            alone = Watched(model)
            only = torch.stack(list(sample(alone, prompts[row : row + 1], 5, likeliest)), dim=1)
            assert torch.equal(only[0], tokens[row])
            for mine, ours in zip(alone.scores, together.scores, strict=True):
                assert relative_error(mine[0], ours[row]) <= 1e-12
        assert len(set(model(prompts).solution.stats.steps.tolist())) > 1


def test_memory_is_what_later_tokens_depend_on():
    """With another past, and with none, the same last token is followed by others."""
    model = make("post_norm")
    with torch.no_grad():
        outputs = [model(torch.tensor([past])).logits[0, -1] for past in ([1, 2, 3, 4], [5, 6, 7, 4], [4])]
        step = model(torch.tensor([[4]]), memory=model(torch.tensor([[1, 2, 3]])).memory).logits[0, -1]
    assert (step - outputs[0]).abs().max() <= 1e-9
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2
    assert (outputs[0] - outputs[2]).abs().max() > 1e-2


def test_seeds_decide_the_draws():
    model, prompt = make("post_norm"), torch.tensor([[1, 2]])
    first, again, other = (torch.cat(list(sample(model, prompt, 16, Sampling(seed=s)))) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sampling_leaves_the_global_generator_alone_and_records_no_graph():
    class Recorder(torch.nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.scores = torch.nn.Parameter(torch.zeros(4))

        def forward(self, tokens, memory=None):
            self.calls += 1
            assert not torch.is_grad_enabled()
            return LMOutput(self.scores.expand(*tokens.shape, -1), memory=tokens)

    model, state = Recorder(), torch.get_rng_state()
    stream = sample(model, torch.tensor([[0, 1]]), 3)
    next(stream)
    assert torch.is_grad_enabled()  # not even between two tokens
    assert model.calls == 1
    assert len(list(stream)) == 2
    assert model.calls == 3
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_drawn_or_read_for_length_zero():
    watched = Watched(make("lstm"))
    assert list(sample(watched, PROMPT, 0)) == []
    assert watched.lengths == []


# Text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a character model whose memory reaches 64 characters; not to be changed."""
    folder = tmp_path_factory.mktemp("generate")
    train(text_recipe(folder / "text", "model.memory_length=64", "train.steps=2"), folder / "run")
    return folder / "run"


def test_text_comes_piece_by_piece_after_the_prompt(run):
    pieces = list(sample_text(run, "a bad ", 10, Sampling(seed=3)))
    assert pieces[0] == "a bad "
    assert [len(piece) for piece in pieces[1:]] == [1] * 10
    assert pieces == list(sample_text(run, "a bad ", 10, Sampling(seed=3)))
    assert pieces != list(sample_text(run, "a bad ", 10, Sampling(seed=4)))


def test_text_may_begin_from_nothing(run):
    pieces = list(sample_text(run, "", 5))
    assert pieces[0] == ""
    assert len("".join(pieces)) == 5


def test_a_checkpoint_of_a_run_finds_the_vocabulary_of_the_run(run):
    assert list(sample_text(find_checkpoint(run), "a", 4)) == list(sample_text(run, "a", 4))


def test_what_cannot_be_sampled_from_says_why(run, tmp_path):
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        list(sample_text(tmp_path, "a", 1))
    lonely = shutil.copytree(find_checkpoint(run), tmp_path / "lonely")
    with pytest.raises(FileNotFoundError, match=r"no vocabulary\.json"):
        list(sample_text(lonely, "a", 1))
    train(recipe(COPY, "train.steps=1"), tmp_path / "copy")
    with pytest.raises(FileNotFoundError, match="not the run of a language model"):
        list(sample_text(tmp_path / "copy", "a", 1))
    with pytest.raises(UnknownTokenError, match="'Z'"):
        list(sample_text(run, "Z", 1))


def test_a_prompt_without_tokens_is_refused_or_treated_as_none(tmp_path):
    """Blanks are no words: there is nothing to go on from, which must not end in a shape error deep inside."""
    train(text_recipe(tmp_path / "text", "task.tokens=word", "train.steps=1"), tmp_path / "run")
    try:
        pieces = list(sample_text(tmp_path / "run", "  ", 3))
    except ValueError as error:
        assert "prompt" in str(error)  # noqa: PT017
    else:
        assert "".join(pieces).strip()


def test_words_of_the_prompt_that_are_unknown_are_named(tmp_path):
    given = ("task.tokens=word", "task.vocabulary_size=6", "train.steps=1")
    train(text_recipe(tmp_path / "text", *given), tmp_path / "run")
    known = json.loads((tmp_path / "run" / "vocabulary.json").read_text())["tokens"]
    (first, second), said = [word for word in known if word.isalpha()][:2], "of the prompt are not in the vocabulary"
    list(sample_text(tmp_path / "run", f"{first} {second}\n<unk>", 1))  # a warning would be an error
    with pytest.warns(UserWarning, match=said) as caught:
        list(sample_text(tmp_path / "run", f"{first.upper()} {second} xyzzy {first.upper()}", 1))
    assert str(caught[0].message) == (
        f"3 of 4 words {said}, and are read as <unk>: {first.upper()}, xyzzy; in lower case it has {first}."
    )


def texts_of(pieces):
    return ["".join(parts) for parts in zip(*pieces, strict=True)]


def test_several_texts_come_side_by_side_the_first_as_if_alone(run):
    pieces = list(sample_texts(run, "a bad ", 10, Sampling(seed=3), samples=4))
    assert pieces[0] == ("a bad ",) * 4
    assert [len(p) for p in texts_of(pieces)] == [16] * 4
    assert len(set(texts_of(pieces))) == 4
    assert texts_of(pieces)[0] == "".join(sample_text(run, "a bad ", 10, Sampling(seed=3)))
    assert texts_of(pieces)[:2] == texts_of(sample_texts(run, "a bad ", 10, Sampling(seed=3), samples=2))
    with pytest.raises(ValueError, match="samples must be an integer of at least 1, got 0"):
        next(sample_texts(run, "a", 1, samples=0))


def test_texts_end_before_the_stop_each_by_itself(run):
    sampling = Sampling(seed=3)
    plain = texts_of(sample_texts(run, "a bad ", 60, sampling, samples=4))
    pieces = list(sample_texts(run, "a bad ", 60, sampling, samples=4, stop="d"))
    assert len(pieces) < 61
    assert texts_of(pieces) == ["a bad " + text[6:].split("d")[0] for text in plain]  # the prompt's own do not count
    assert len({len(text) for text in texts_of(pieces)}) > 1
    assert texts_of(sample_texts(run, "a", 9, sampling, stop="never drawn")) == texts_of(
        sample_texts(run, "a", 9, sampling)
    )
    with pytest.raises(ValueError, match="stop must be some text"):
        next(sample_texts(run, "a", 1, stop=""))


def test_text_is_sampled_in_the_precision_of_training(tmp_path, monkeypatch):
    train(text_recipe(tmp_path / "text", "train.precision=bf16", "train.steps=1"), tmp_path / "run")
    seen = []

    def watching(*arguments):
        for token in sample(*arguments):
            seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
            yield token

    monkeypatch.setattr(generate, "sample", watching)
    for piece in sample_text(tmp_path / "run", "a", 3):
        assert isinstance(piece, str)
        assert not torch.is_autocast_enabled("cpu")  # not the caller's
    assert seen == [torch.bfloat16] * 3


@pytest.mark.parametrize("prompt", ["", "na"])
def test_characters_of_several_tokens_are_shown_whole(run, tmp_path, monkeypatch, prompt):
    """With bytes as tokens half a character is not text yet."""
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "vocabulary.json").write_text(json.dumps({"kind": "byte"}))
    text = "ïve – ∑x"
    tokens = [torch.tensor([byte]) for byte in text.encode()]
    monkeypatch.setattr(generate, "sample", lambda *arguments: iter(tokens))
    pieces = list(sample_text(folder, prompt, len(tokens)))
    assert "".join(pieces) == prompt + text
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) == 1 + len(tokens)
    monkeypatch.setattr(generate, "sample", lambda *arguments: iter(tokens[:1]))
    assert list(sample_text(folder, prompt, 1)) == [prompt, "", "\ufffd"]  # cut within a character


def test_words_are_separated_when_joined(run, tmp_path, monkeypatch):
    folder = shutil.copytree(run, tmp_path / "run")
    words = {"kind": "word", "tokens": ["<eos>", "hi", "kid"], "counts": [1, 1, 1], "punctuation": False}
    (folder / "vocabulary.json").write_text(json.dumps(words))
    monkeypatch.setattr(generate, "sample", lambda *arguments: iter(torch.tensor([[2], [0], [1], [2]])))
    assert list(sample_text(folder, "hi", 4)) == ["hi", " kid", "\n", "hi", " kid"]
