"""Every shipped recipe: strict settings, the model it names, and a step of training and evaluation at a tiny size."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from equipoise import Stop
from equipoise.adjoints import Implicit
from equipoise.data.images import IMAGES
from equipoise.data.text import CORPORA, EMBEDDED
from equipoise.models import MODELS, create_model
from equipoise.tasks import TASKS
from equipoise.train.loop import train
from equipoise.train.recipe import Recipe
from tests.runs import write_corpus

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}

# All parameters of models of published sizes.
SIZES = {
    "cifar10_large": 11_097_438,
    "cifar10_large_reg": 11_097_438,
    "cifar10_tiny": 158_890,
    "cityscapes_large": 55_955_859,
    "cityscapes_small": 8_968_467,
    "cityscapes_xl": 79_551_755,
    "copy_memory": 14_006,
    "copy_memory_400": 14_006,
    "imagenet_large": 67_063_624,
    "imagenet_small": 16_808_936,
    "imagenet_small_reg": 18_613_496,
    "imagenet_xl": 90_463_280,
    "ptb_trellisnet": 24_181_200,
    "wikitext103_transformer": 97_691_888,
    "wikitext103_trellisnet": 181_716_951,
}

# Recipes to compare, whose models have as many parameters, give or take one in twenty.
TWINS = [
    ("ptb_trellisnet_small", "ptb_lstm_small"),
    ("ptb_transformer_small", "ptb_transformer_xl_small"),
    ("wikitext2_trellisnet_small", "wikitext2_lstm_small"),
]

TINY_TASKS = {
    "copy_memory": {"length": 5, "train_size": 32, "test_size": 8, "batch_size": 8},
    "language_model": {
        "tokens": "word",
        "vocabulary_size": None,
        "train_fraction": 1.0,
        "batch_size": 2,
        "length": 7,
        "eval_batch_size": 2,
        "eval_length": 50,
    },
    "classification": {"options": {"size": 8, "train_size": 24, "test_size": 8}, "batch_size": 8, "eval_batch_size": 8},
    "segmentation": {
        "data": "shapes",
        "options": {"size": 8, "train_size": 24, "test_size": 8},
        "batch_size": 8,
        "eval_batch_size": 8,
        "class_weights": "none",
        "transfer": None,
    },
}
TINY_MODEL = {
    "d_model": 16,
    "heads": 2,
    "d_inner": 12,
    "ffn_chunks": 1,
    "memory_length": 4,
    "embedding_size": 6,
    "hidden_size": 4,
    "inner_size": 12,
    "layers": 2,
    "widths": [5, 6],
    "channels": 6,
    "levels": 2,
}
TINY_TRAIN = {"steps": 2, "log_every": 1, "evaluate_every": 2, "save_every": 2, "threads": 1, "capture": False}


@pytest.fixture(params=RECIPES)
def name(request):
    return request.param


def read(name, *overrides):
    return Recipe.read(RECIPES[name], overrides)


def full_size(recipe):
    """The model of a recipe, without storage; the vocabulary is that of its corpus."""
    settings = dict(recipe.model)
    if recipe.task["name"] == "language_model":
        corpus = CORPORA.get(recipe.task_config().corpus)
        words = corpus.expected.get("vocabulary") if corpus else None
        settings = {"vocab_size": words or 300, **settings}
    with torch.device("meta"):
        return create_model(settings.pop("name"), **settings)


def count(name):
    return sum(parameter.numel() for parameter in full_size(read(name)).parameters())


def tiny(name, folder):
    """Overrides that make a run of a recipe a matter of a second; what it is about stays."""
    recipe = read(name)
    config = full_size(recipe).config
    fields = {field.name for field in dataclasses.fields(config)}
    model = {key: value for key, value in TINY_MODEL.items() if key in fields}
    if getattr(config, "cutoffs", ()):
        model["cutoffs"] = [3, 6]
    if getattr(config, "chunk_size", None):
        model["chunk_size"] = 3
    if "head_channels" in fields:  # an MDEQ: as many resolutions, all narrow
        model |= {"channels": [config.groups] * len(config.channels), "expansion": 1, "final_channels": 8}
        model["head_channels"] = [2] * len(config.head_channels)
        # On maps of one pixel in the other layout, torch's strided bf16 convolutions on a CPU leave part of the
        # gradient of their weights unset.
        model["channels_last"] = False
    task = dict(TINY_TASKS[recipe.task["name"]])
    if recipe.task["name"] == "classification":
        task["data"] = "digits" if getattr(config, "in_channels", 3) == 1 else "shapes"
        task["options"] = {**task["options"], **({"labels": "classes"} if task["data"] == "shapes" else {})}
        task["size"] = 6 if recipe.task_config().augment == "resized_crop" else None
    if recipe.task["name"] == "segmentation" and recipe.task_config().crop:
        task["crop"] = [6, 8]
    if "tokens" in task:
        task["corpus"] = str(write_corpus(folder))
    sections = {"task": task, "model": model, "train": TINY_TRAIN, "stop": {"max_steps": 5}}
    if recipe.warmup.steps:
        sections["warmup"] = {"steps": 1, "layers": 2}  # one step of either kind
    if recipe.adjoint is None or isinstance(recipe.adjoint, Implicit):
        # A fixed budget: untrained models need not converge, and a failed adjoint solve warns.
        sections["adjoint"] = {"name": "implicit", "stop": {"rtol": 0.0, "max_steps": 4}}
    if recipe.evaluation.stop is not None:
        sections["evaluation"] = {"stop": {"max_steps": 5}}
    return [f"{section}.{key}={toml(value)}" for section, values in sections.items() for key, value in flat(values)]


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return "none" if value is None else json.dumps(value)


def flat(values):
    for key, value in values.items():
        if isinstance(value, dict) and key != "options":
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def test_there_are_recipes():
    assert set(SIZES) <= set(RECIPES)
    assert {name for pair in TWINS for name in pair} <= set(RECIPES)


def test_it_is_read_strictly_and_names_what_exists(name):
    recipe = read(name)
    assert recipe.model["name"] in MODELS
    assert recipe.task["name"] in TASKS
    if recipe.task["name"] == "language_model":
        assert recipe.task_config().corpus in (EMBEDDED, *CORPORA)
    if recipe.task["name"] in ("classification", "segmentation"):
        assert recipe.task_config().data in IMAGES
    again = Recipe.from_data(recipe.to_data(), "a copy")
    assert again.to_data() == recipe.to_data()


def test_it_says_what_it_is(name):
    lines = RECIPES[name].read_text(encoding="utf-8").splitlines()
    head = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    assert 1 <= len(head) <= 3
    assert all(len(line) <= 120 for line in lines)
    assert all(line.endswith(".") for line in head[-1:])


def test_its_model_has_the_size_that_was_published(name):
    model = full_size(read(name))
    if name in SIZES:
        assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name]
    schedule = read(name).schedule(model)
    assert schedule is None or isinstance(schedule.final().plan.stop, Stop)


@pytest.mark.parametrize(("one", "other"), TWINS)
def test_models_to_compare_are_of_one_size(one, other):
    assert count(other) == pytest.approx(count(one), rel=0.05)


@pytest.mark.parametrize("name", ["wikitext103_transformer", "wikitext103_trellisnet"])
def test_the_stand_in_for_wikitext103_fits(name):
    """With the overrides that the recipe's first lines give."""
    head = RECIPES[name].read_text(encoding="utf-8").split("[task]")[0]
    overrides = [part.split()[0].rstrip(".") for part in head.split("--set ")[1:]]
    recipe = read(name, *overrides)
    assert recipe.task_config().corpus == "wiki20k"
    assert full_size(recipe).config.vocab_size == 175_645


def test_it_trains_and_evaluates_at_a_tiny_size(name, tmp_path):
    recipe = read(name, *tiny(name, tmp_path / "text"))
    outcome = train(recipe, tmp_path / "run")
    assert outcome.step == 2
    score = TASKS.find(recipe.task["name"]).score
    assert math.isfinite(outcome.metrics[score])
    assert outcome.best["score"] == outcome.metrics[score]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record["train"] for record in map(json.loads, lines) if "train" in record]
    assert len(steps) == 2
    assert all(math.isfinite(step["loss"]) and step["skipped"] == 0 for step in steps)
    has_equilibrium = recipe.schedule(full_size(recipe)) is not None
    assert all(bool(step["forward"]) == has_equilibrium for step in steps)
