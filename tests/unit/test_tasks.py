"""Tasks and recipes: what a file says is what is built, and a batch becomes the loss it should."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from equipoise._module import Plan
from equipoise._stop import Stop
from equipoise.adjoints import Implicit
from equipoise.data.copy_memory import CopyMemory
from equipoise.data.stream import score_stream
from equipoise.models import MODELS, create_model
from equipoise.models.outputs import LMOutput
from equipoise.solvers import Anderson, Broyden
from equipoise.tasks import TASKS, CopyMemoryTask, LanguageModelTask, Task, register_task
from equipoise.tasks.base import mean_metrics
from equipoise.train.config import ConfigError
from equipoise.train.loop import evaluate
from equipoise.train.recipe import Recipe
from tests.runs import COPY, TEXT, recipe, text_recipe, write_corpus

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


# Recipes that come with the library


def test_there_are_recipes():
    assert {"copy_memory.toml", "copy_memory_400.toml"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_builds_its_task_model_and_schedule(path):
    given = Recipe.read(path)
    task = TASKS.find(given.task["name"])
    assert isinstance(given.task_config(), task.Config)
    words = {"vocab_size": 300_000} if task.name in ("copy_memory", "language_model") else {}
    settings = {**words, **given.model}  # language models get theirs from the corpus
    with torch.device("meta"):
        model = create_model(settings.pop("name"), **settings)
    assert sum(p.numel() for p in model.parameters()) > 1000
    schedule = given.schedule(model)
    if given.model["name"].startswith("deq_"):
        assert schedule.at(given.train.steps).plan.stop == given.stop
    given.train.optimiser.build(model)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_survives_config_json(path):
    given = Recipe.read(path)
    again = Recipe.from_data(json.loads(json.dumps(given.to_data(), allow_nan=False)), "config.json")
    assert again.task_config() == given.task_config()
    # Settings of the task are resolved in the copy; everything else is equal field by field.
    assert dataclasses.replace(again, task={}) == dataclasses.replace(given, task={})


def test_every_model_that_a_comment_recommends_exists():
    text = RECIPES[[path.name for path in RECIPES].index("copy_memory_400.toml")].read_text()
    named = {word.strip(".,").removeprefix("model.name=") for word in text.split() if "_copy_memory" in word}
    found = {name for name in named if name in MODELS}
    assert {"tcn_copy_memory", "lstm_copy_memory", "gru_copy_memory"} <= found


# Reading a recipe


def test_overrides_reach_every_section():
    given = recipe(
        COPY,
        "task.length=7",
        "model.d_model=8",
        "stop.max_steps=9",
        "adjoint.stop.max_steps=3",
        "train.optimiser.lr=0.5",
        "warmup.steps=2",
        "penalty.weight=0.25",
        "jitter.high=4",
    )
    assert (given.task_config().length, given.model["d_model"], given.stop.max_steps) == (7, 8, 9)
    assert given.adjoint == Implicit(stop=Stop(rtol=0.0, max_steps=3))
    assert (given.train.optimiser.lr, given.warmup.steps, given.penalty.weight, given.jitter.high) == (0.5, 2, 0.25, 4)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trian.steps=3", "did you mean 'train'"),
        ("train.step=3", "did you mean 'steps'"),
        ("evaluate_every=3", "did you mean 'train.evaluate_every'"),
        ("task.lenght=3", "did you mean 'length'"),
        ("task.name=copy_memmory", "did you mean 'copy_memory'"),
        ("solver.name=andersen", "did you mean 'anderson'"),
        ("adjoint.name=implict", "did you mean 'implicit'"),
        ("train.optimiser.name=adamm", "did you mean 'adam'"),
        ("train.precision=bf61", "did you mean 'bf16'"),
        ("train.steps=0", "steps must be an integer of at least 1, got 0"),
        ("train.steps=many", "expected an integer, got 'many'"),
        ("train.threads=0", "threads"),
        ("train.accumulation=0", "accumulation must be an integer of at least 1"),
        ("train.minutes=0", "minutes must be a number in (0, inf)"),
        ("train.plateau.patience=0", "patience must be an integer of at least 1"),
        ("train.averaging.start=none", "give train.plateau, or a start"),
        ("evaluation.budgets=[4, 0]", "budgets must be an integer of at least 1, got 0"),
        ("task.batch_size=0", "batch_size must be an integer of at least 1"),
        ("source.name=x", "unknown key 'source'"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(override, words):
    with pytest.raises(ConfigError) as caught:
        recipe(COPY, override)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("section", ["task", "model"])
def test_a_recipe_without_a_name_says_which(section):
    with pytest.raises(ConfigError, match=rf"{section}\.name is missing"):
        recipe({**COPY, section: {}})


def test_unknown_models_and_their_settings_are_suggested():
    with pytest.raises(ValueError, match="did you mean 'lstm_copy_memory'"):
        recipe(COPY, "model.name=lstm_copy_memroy").make_task().model()
    with pytest.raises(ValueError, match="did you mean 'd_model'"):
        recipe(COPY, "model.d_modle=4").make_task().model()


def test_lists_of_a_recipe_become_what_models_take():
    """TOML has lists where settings of models are tuples."""
    given = recipe(COPY)
    model = dataclasses.replace(given, model={"name": "lstm_copy_memory", "widths": [5, 6]}).make_task().model()
    assert model(torch.zeros(2, 3, dtype=torch.int64)).logits.shape == (2, 3, 10)
    settings = {**TEXT["model"], "vocab_size": 30, "cutoffs": [10, 20], "div_val": 2}
    model = create_model(settings.pop("name"), **settings)
    assert model(torch.zeros(2, 3, dtype=torch.int64)).logits.shape == (2, 3, 30)


# Plans of a recipe


def test_the_plan_is_the_models_own_where_the_recipe_is_silent():
    silent = {key: value for key, value in COPY.items() if key not in ("stop", "adjoint")}
    model = recipe(silent).make_task().model()
    own = model.deq.plan
    step = recipe(silent).schedule(model).at(0)
    assert step.plan == own
    assert step.eval_plan == own
    changed = recipe(silent, "solver.name=broyden").schedule(model).at(0).plan
    assert changed == own.replace(solver=Broyden())


def test_the_plan_of_evaluations_replaces_parts_of_that_of_training():
    given = recipe(COPY, "evaluation.stop.max_steps=40", "evaluation.stop.rtol=1e-5")
    step = given.schedule(given.make_task().model()).at(3)
    assert step.plan.stop == given.stop
    assert step.eval_plan == Plan(Anderson(), given.adjoint, Stop(rtol=1e-5, max_steps=40))


def test_a_models_own_plan_of_evaluations_is_kept():
    """Where the recipe says nothing of evaluations, whatever it says of training; what it gives replaces a part."""
    trellis = {"name": "deq_trellisnet_small", "vocab_size": 9, "embedding_size": 4, "hidden_size": 4}
    own = Plan(Broyden(), Implicit(), Stop(max_steps=77))
    given = recipe({**COPY, "model": trellis})
    model = create_model(**{**trellis, "eval_plan": own})
    step = given.schedule(model).at(0)
    assert step.plan.stop == given.stop
    assert (step.eval_plan.solver, step.eval_plan.stop) == (own.solver, own.stop)
    partly = recipe({**COPY, "model": trellis}, "evaluation.stop.max_steps=5").schedule(model).final().eval_plan
    assert (partly.solver, partly.stop.max_steps) == (own.solver, 5)


def test_a_model_without_equilibria_has_no_schedule():
    given = recipe({**COPY, "model": {"name": "lstm_copy_memory"}})
    assert given.schedule(given.make_task().model()) is None


# Copy memory


class _Scores(torch.nn.Module):
    """A model of one number per class: the same scores everywhere."""

    def __init__(self, scores):
        super().__init__()
        self.scores = torch.nn.Parameter(scores)

    def forward(self, tokens, targets=None, memory=None):
        logits = self.scores.expand(*tokens.shape, -1)
        if targets is None:
            return LMOutput(logits)
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        return LMOutput(losses=losses, memory=(memory or 0) + tokens.shape[1])


def test_copy_memory_trains_on_the_mean_over_all_places():
    task = recipe(COPY).make_task()
    splits = task.data()
    assert (splits.epoch, set(splits.held_out)) == (8, {"valid", "test"})
    batch = splits.train(3)
    expected = CopyMemory(5, train_size=64, valid_size=16, test_size=16).batch(3, 8)
    assert torch.equal(batch.inputs, expected.inputs)
    scores = torch.randn(10, dtype=torch.float64)
    losses, carry = task.training_step(_Scores(scores), batch, None, 3)
    reference = -torch.log_softmax(scores, 0)[batch.targets].mean()
    assert torch.allclose(losses["loss"].double(), reference, rtol=1e-6)
    assert carry is None


def test_copy_memory_scores_count_samples_not_batches():
    """48 samples in batches of 32 and 16: a mean of batch means would weigh the second one twice."""
    task = recipe(COPY, "task.test_size=48").make_task()
    splits = task.data()
    scores = torch.randn(10)
    values = evaluate(task, _Scores(scores), splits, "test")
    _, targets = CopyMemory(5, train_size=64, valid_size=48, test_size=48).samples("test", torch.arange(48))
    assert values["loss"] == pytest.approx(float(-torch.log_softmax(scores, 0)[targets].mean()), rel=1e-6)
    guess = int(scores.argmax())
    assert values["recall"] == pytest.approx(float((targets[:, -10:] == guess).double().mean()), rel=1e-6)
    assert values["exact"] == 0.0


def test_an_oracle_recalls_everything():
    task = recipe(COPY).make_task()
    splits = task.data()

    class Oracle(torch.nn.Module):
        def forward(self, tokens):
            logits = torch.zeros(*tokens.shape, 10)
            logits[..., 0] = 5.0
            logits[:, -10:] = 50 * torch.nn.functional.one_hot(tokens[:, :10], 10)
            return LMOutput(logits)

    values = evaluate(task, Oracle(), splits, "valid")
    assert (values["recall"], values["exact"]) == (1.0, 1.0)


def test_two_ranks_share_the_rows_of_one():
    alone = recipe(COPY).make_task().data()
    shares = [recipe(COPY).make_task(rank=rank, world_size=2).data() for rank in (0, 1)]
    for position in (0, 9):
        halves = [share.train(position).inputs for share in shares]
        assert torch.equal(torch.cat(halves), alone.train(position).inputs)
    seen = torch.cat([batch.indices for share in shares for batch in share.held_out["valid"]()])
    assert sorted(seen.tolist()) == list(range(16))


@pytest.mark.parametrize("size", [7, 1])
def test_shares_of_an_evaluation_may_be_uneven_or_empty(tmp_path, size):
    """Three processes evaluate seven samples, or one, or as many streams: all of them, each once."""
    given = recipe(COPY, f"task.test_size={size}")
    shares = [given.make_task(rank=rank, world_size=2).data() for rank in (0, 1)]
    counts = [sum(batch.rows.count for batch in share.held_out["valid"]()) for share in shares]
    assert counts == [size - size // 2, size // 2]
    text = text_recipe(tmp_path, f"task.eval_batch_size={size}", "task.batch_size=3")
    streams = [list(text.make_task(rank=rank, world_size=3).data().held_out["valid"]()) for rank in range(3)]
    alone = list(text.make_task().data().held_out["valid"]())
    for index, batch in enumerate(alone):
        parts = [stream[index] for stream in streams]
        assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)
        assert [part.rows.count for part in parts] == ([3, 2, 2] if size == 7 else [1, 0, 0])


def test_tasks_say_what_their_batches_hold(tmp_path):
    task = recipe(COPY).make_task()
    assert task.items(task.data().train(0)) == (8 * 25, "tokens")
    text = text_recipe(tmp_path).make_task()
    assert text.items(text.data().train(0)) == (4 * 8, "tokens")
    assert Task.items(text, text.data().train(0)) == (4, "samples")


# Language models


def test_a_language_model_gets_its_vocabulary_from_the_corpus(tmp_path):
    task = text_recipe(tmp_path).make_task()
    assert task.model_defaults() == {"vocab_size": len(task.corpus.vocabulary)} == {"vocab_size": 13}
    assert task.model().config.vocab_size == 13
    assert task.artifacts()["vocabulary.json"]["kind"] == "character"
    # One that a recipe gives wins.
    assert text_recipe(tmp_path, "model.vocab_size=20").make_task().model().config.vocab_size == 20


def test_facts_of_the_corpus_come_with_the_splits(tmp_path):
    splits = text_recipe(tmp_path).make_task().data()
    assert splits.info["tokens"] == "character"
    # Four columns of whole length, the first token of each is not scored.
    for split in ("valid", "test"):
        tokens = splits.info[f"{split}_tokens"]
        assert splits.info[f"{split}_scored_tokens"] == 4 * (tokens // 4 - 1)


def test_memory_is_carried_except_over_the_start_of_a_pass(tmp_path):
    task = text_recipe(tmp_path).make_task()
    splits, model = task.data(), _Scores(torch.zeros(13))
    first = splits.train(0)
    assert first.starts
    _, carry = task.training_step(model, first, 1000, 0)
    assert carry == 8
    losses, carry = task.training_step(model, splits.train(1), carry, 1)
    assert carry == 16
    assert float(losses["loss"].detach()) == pytest.approx(math.log(13), rel=1e-6)
    _, carry = task.training_step(model, splits.train(splits.epoch), carry, splits.epoch)
    assert carry == 8


@pytest.mark.parametrize("split", ["valid", "test"])
def test_perplexity_is_that_of_the_scored_stream(tmp_path, split):
    """Against `score_stream`, which knows nothing of tasks, to the rounding of a float32 mean."""
    task = text_recipe(tmp_path).make_task()
    splits, model = task.data(), task.model().eval()
    values = evaluate(task, model, splits, split)

    def score(inputs, targets, memory):
        output = model(inputs, targets=targets, memory=memory)
        return output.losses, output.memory

    reference = score_stream(score, task.corpus.split(split), 16, batch_size=4)
    assert reference.tokens == splits.info[f"{split}_scored_tokens"]
    assert values["loss"] == pytest.approx(reference.loss, rel=1e-5)
    assert values["perplexity"] == pytest.approx(reference.perplexity, rel=1e-4)
    assert values["bits_per_token"] == pytest.approx(reference.bits, rel=1e-5)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_text_too_short_for_evaluation_is_named_with_its_setting(tmp_path, split):
    given = text_recipe(tmp_path)
    (tmp_path / f"{split}.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match=f"the {split} text in task.eval_batch_size columns: .*to at most 2"):
        given.make_task().data()


def test_segments_of_no_length_are_refused_in_evaluation_too(tmp_path):
    with pytest.raises(ConfigError, match="eval_length must be an integer of at least 1, got 0"):
        text_recipe(tmp_path, "task.eval_length=0")


def test_activation_penalties_add_to_the_loss_but_not_to_the_nats(tmp_path):
    given = text_recipe(tmp_path, "task.activation=2.0", "task.smoothness=1.0")
    model = {"name": "deq_trellisnet_small", "embedding_size": 6, "hidden_size": 8, "dropout": 0.0}
    task = dataclasses.replace(given, model=model).make_task()
    batch, network = task.data().train(0), task.model().eval()
    with torch.no_grad():
        losses, _ = task.training_step(network, batch, None, 0)
        y = network(batch.inputs, targets=batch.targets).hidden
    extra = 2 * y.square().mean() + (y[:, 1:] - y[:, :-1]).square().mean()
    assert float(extra) > 0
    assert torch.allclose(losses["loss"], losses["nats"] + extra, rtol=1e-5)


def test_words_and_bytes_work_as_tokens(tmp_path):
    assert text_recipe(tmp_path, "task.tokens=word").make_task().model_defaults() == {"vocab_size": 9}
    assert text_recipe(tmp_path, "task.tokens=byte").make_task().model_defaults() == {"vocab_size": 256}


def test_the_embedded_corpus_needs_no_files():
    task = recipe(TEXT, "task.corpus=embedded", "task.train_fraction=0.02").make_task()
    splits = task.data()
    assert splits.info["corpus"] == "embedded"
    assert splits.train(0).inputs.shape == (4, 8)


def test_a_missing_corpus_says_what_was_sought(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'ptb'"):
        recipe(TEXT, "task.corpus=ptbb").make_task(str(tmp_path)).data()


def test_a_corpus_may_lie_in_the_data_folder(tmp_path):
    write_corpus(tmp_path / "mine")
    task = recipe(TEXT, "task.corpus=mine").make_task(str(tmp_path))
    assert task.data().info["corpus"] == "mine"


# Metrics and registration


def test_a_loss_that_is_not_a_number_stays_one():
    """A mean that leaves NaN out would make a broken model look like a good one."""
    metrics = mean_metrics("loss")
    metrics["loss"].update(torch.tensor([1.0, math.nan]))
    assert math.isnan(float(metrics.compute()["loss"]))


def test_tasks_are_known_by_name_once():
    assert TASKS["copy_memory"] is CopyMemoryTask
    assert TASKS["language_model"] is LanguageModelTask
    assert all(issubclass(task, Task) and task.name == name for name, task in TASKS.items())
    with pytest.raises(ValueError, match="already taken by CopyMemoryTask"):
        register_task("copy_memory")(LanguageModelTask)
