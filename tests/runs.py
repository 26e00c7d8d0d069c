"""Runs that take a second: tiny models, tiny data, a few steps."""

import copy
import random
from pathlib import Path
from typing import Any

from equipoise.train.evaluate import score_run
from equipoise.train.recipe import Recipe

# A fixed budget backward: tiny untrained models do not converge to a tolerance, and it is not the point here.
_SOLVE: dict[str, Any] = {
    "stop": {"rtol": 1e-3, "max_steps": 6},
    "adjoint": {"name": "implicit", "stop": {"rtol": 0.0, "max_steps": 5}},
}
_TRAIN: dict[str, Any] = {
    "steps": 6,
    "log_every": 2,
    "evaluate_every": 4,
    "save_every": 2,
    "threads": 1,
    "learning_rate": {"name": "constant", "warmup": 3},
}
COPY: dict[str, Any] = {
    "task": {"name": "copy_memory", "length": 5, "train_size": 64, "test_size": 16, "batch_size": 8},
    "model": {"name": "deq_transformer_copy_memory", "d_model": 16, "heads": 2, "d_inner": 24, "init_std": 0.05},
    **_SOLVE,
    "train": _TRAIN,
}
"""The copy-memory task with a DEQ-Transformer of width 16."""

TEXT: dict[str, Any] = {
    "task": {
        "name": "language_model",
        "corpus": "",
        "tokens": "character",
        "batch_size": 4,
        "length": 8,
        "eval_batch_size": 4,
        "eval_length": 16,
    },
    "model": {"name": "deq_transformer_small", "d_model": 16, "heads": 2, "d_inner": 24, "memory_length": 8},
    **_SOLVE,
    "train": _TRAIN,
}
"""A character language model; `corpus` is to be set to a folder, see `write_corpus`."""


def recipe(values: dict[str, Any], *overrides: str) -> Recipe:
    """A recipe from settings and overrides `a.b=c`."""
    return Recipe.from_data(copy.deepcopy(values), "the test", overrides)


def text_recipe(folder: Path, *overrides: str) -> Recipe:
    """A recipe for the corpus that `write_corpus` puts into `folder`, with overrides."""
    return recipe(TEXT, f"task.corpus={write_corpus(folder)}", *overrides)


def evaluate_run(run: Path, *given: Any, **options: Any) -> list[dict[str, Any]]:
    """The results of `score_run`."""
    return list(score_run(run, *given, **options)["results"])


def write_corpus(folder: Path) -> Path:
    """A corpus of 13 characters and 8 words, the same every time."""
    words, random_ = ("a", "bad", "cab", "deed", "face", "hi", "jig", "kid"), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in (("train", 40), ("valid", 8), ("test", 8)):
        text = "".join(" ".join(random_.choices(words, k=5)) + "\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")
    return folder
