"""Sampling: which tokens can be chosen and how often, and that memory gives what recomputation gives."""

import json
import shutil

import pytest
import torch

from equipoise import generate
from equipoise._module import Plan
from equipoise._stop import Stop
from equipoise.data.vocabulary import UnknownTokenError
from equipoise.generate import Sampling, sample, sample_text
from equipoise.models.deq_transformer import DEQTransformer, DEQTransformerConfig
from equipoise.models.outputs import LMOutput
from equipoise.train.checkpoint import CheckpointError
from equipoise.train.load import find_checkpoint
from equipoise.train.loop import train
from tests.runs import COPY, recipe, text_recipe

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])  # by falling probability: 1, 3, 4, 2, 0


def drawn(sampling, probabilities=PROBABILITIES, count=4000):
    """Shares of the tokens in many draws."""
    logits = probabilities.log().expand(count, -1)
    tokens = sampling.choose(logits, torch.Generator().manual_seed(1))
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


def test_what_is_kept_keeps_its_proportions():
    kept = torch.tensor([0.0, 0.4, 0.0, 0.3, 0.0]) / 0.7
    assert torch.allclose(drawn(Sampling(top_k=2)), kept, atol=0.03)
    assert torch.allclose(drawn(Sampling(top_p=0.6)), kept, atol=0.03)


def test_top_p_counts_after_temperature_and_top_k():
    # Squared and normalised: 0.561, 0.316, 0.079, ...; of the two likeliest: 0.571, 0.429.
    assert chosen(Sampling(temperature=0.5, top_p=0.55)) == {1}
    assert chosen(Sampling(top_k=2, top_p=0.55)) == {1}
    assert chosen(Sampling(top_k=2, top_p=0.6)) == {1, 3}


def test_rows_are_cut_one_by_one():
    logits = torch.stack([PROBABILITIES, PROBABILITIES.flip(0)]).log()
    tokens = Sampling(top_k=1).choose(logits, torch.Generator().manual_seed(0))
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


def contractive_model(memory_length):
    """In float64, solved tightly: a strong bias keeps normalised sums away from 0."""
    torch.manual_seed(3)
    plan = Plan(stop=Stop(rtol=1e-12, max_steps=200))
    sizes = {"d_model": 8, "heads": 2, "d_inner": 12, "init_std": 0.2, "memory_length": memory_length}
    model = DEQTransformer(DEQTransformerConfig(11, **sizes, plan=plan)).double()
    with torch.no_grad():
        model.embedding.tables[0].mul_(60)
        model.deq.cell.attention.output.bias.normal_(std=3.0)
    return model.eval()


def by_recomputation(model, prompt, length, sampling):
    """The same draws, the whole sequence solved anew for every token."""
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = prompt
    for _ in range(length):
        with torch.no_grad():
            logits = model(tokens).logits[:, -1]
        tokens = torch.cat([tokens, sampling.choose(logits, generator)[:, None]], dim=1)
    return tokens[:, prompt.shape[1] :]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(), Sampling(top_k=4, top_p=0.9, seed=5)])
def test_sampling_from_memory_equals_recomputation(sampling):
    model = contractive_model(memory_length=64)
    prompt = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    cached = torch.stack(list(sample(model, prompt, 12, sampling)), dim=1)
    assert cached.shape == (2, 12)
    assert torch.equal(cached, by_recomputation(model, prompt, 12, sampling))


def test_memory_is_what_later_tokens_depend_on():
    """With another past, and with none, the same last token is followed by others."""
    model = contractive_model(memory_length=64)
    with torch.no_grad():
        outputs = [model(torch.tensor([past])).logits[0, -1] for past in ([1, 2, 3, 4], [5, 6, 7, 4], [4])]
        step = model(torch.tensor([[4]]), memory=model(torch.tensor([[1, 2, 3]])).memory).logits[0, -1]
    assert (step - outputs[0]).abs().max() <= 1e-9
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2
    assert (outputs[0] - outputs[2]).abs().max() > 1e-2


def test_seeds_decide_the_draws():
    model, prompt = contractive_model(memory_length=64), torch.tensor([[1, 2]])
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
            return LMOutput(self.scores.expand(*tokens.shape, -1), memory=memory)

    model, state = Recorder(), torch.get_rng_state()
    stream = sample(model, torch.tensor([[0, 1]]), 3)
    next(stream)
    assert torch.is_grad_enabled()  # not even between two tokens
    assert model.calls == 1
    assert len(list(stream)) == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_drawn_for_length_zero():
    assert list(sample(contractive_model(8), torch.tensor([[1]]), 0)) == []


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


@pytest.mark.parametrize("prompt", ["", "na"])
def test_characters_of_several_tokens_are_shown_whole(run, tmp_path, monkeypatch, prompt):
    """With bytes as tokens half a character is not text yet."""
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "vocabulary.json").write_text(json.dumps({"kind": "byte"}))
    text = "ïve – ∑x"
    tokens = [torch.tensor([byte]) for byte in text.encode()]
    monkeypatch.setattr(generate, "sample", lambda *arguments: iter(tokens))
    assert "".join(sample_text(folder, prompt, len(tokens))) == prompt + text


def test_words_are_separated_when_joined(run, tmp_path, monkeypatch):
    folder = shutil.copytree(run, tmp_path / "run")
    words = {"kind": "word", "tokens": ["<eos>", "hi", "kid"], "counts": [1, 1, 1], "punctuation": False}
    (folder / "vocabulary.json").write_text(json.dumps(words))
    monkeypatch.setattr(generate, "sample", lambda *arguments: iter(torch.tensor([[2], [0], [1], [2]])))
    assert list(sample_text(folder, "hi", 4)) == ["hi", " kid", "\n", "hi", " kid"]
