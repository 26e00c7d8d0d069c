"""Whether a run goes on as what it was: the settings of its checkpoint beside those of a recipe."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from equipoise.data.images import IMAGES
from equipoise.data.text import CORPORA, EMBEDDED
from equipoise.models import create_model
from equipoise.tasks import Task
from equipoise.train.checkpoint import CONFIG
from equipoise.train.config import ConfigError, to_data
from equipoise.train.load import check_artifacts, read_config
from equipoise.train.recipe import Recipe

# What a run begins with: one that goes on has weights of its own.
_BEGINNINGS = ("task.transfer", "train.weights")
# How data are cut into batches, or scored, not what is learned; a memory that no longer fits is refused by itself.
_BATCHES = (
    "task.batch_size",
    "task.eval_batch_size",
    "task.eval_length",
    "task.eval_scales",
    "task.eval_flip",
    "task.test_size",
)
_PLACES = ("task.corpus", "task.data")
_MOST = 8  # differences that are named
_ABSENT = object()

Differences = dict[str, tuple[Any, Any]]
"""By name of the setting: what it was, and what it is to be."""


def check_resumed(folder: Path, recipe: Recipe, task: Task) -> str | None:
    """Raise if a recipe, or its data, would make another task or another model of a run.

    Args:
        folder: The checkpoint to go on from.
        recipe: To go on by.
        task: Of the recipe, with its data.

    Returns:
        A line on the settings that are others now; None if there are none.
    """
    config = read_config(folder)
    found = _differences(Recipe.from_data(config, str(folder / CONFIG)), recipe, task)
    wrong = {name: values for name, values in found.items() if _is_another(name, *values)}
    if wrong:
        raise ConfigError(_refusal(folder, wrong))
    check_artifacts(folder, config, task)
    return _said(found) if found else None


def _differences(before: Recipe, now: Recipe, task: Task) -> Differences:
    # Through recipes, so that settings an older file does not have are at their defaults.
    were, are = (_flat({**recipe.to_data(), "model": to_data(recipe.model)}) for recipe in (before, now))
    of_data = {f"model.{name}" for name in task.model_defaults() if name not in now.model}
    found = {
        name: (were.get(name, _ABSENT), are.get(name, _ABSENT))
        for name in {**were, **are}
        if name not in _BEGINNINGS and name not in of_data and were.get(name, _ABSENT) != are.get(name, _ABSENT)
    }
    of_model = {name for name in found if name.startswith("model.")}
    if of_model and _same_model(before, now, task):  # one of them says what is the default
        found = {name: values for name, values in found.items() if name not in of_model}
    return found


def _same_model(before: Recipe, now: Recipe, task: Task) -> bool:
    """Whether the settings of both come to the same model."""
    configs = []
    for recipe in (before, now):
        settings = {**task.model_defaults(), **recipe.model}
        try:
            with torch.device("meta"):
                configs.append(getattr(create_model(settings.pop("name"), **settings), "config", None))
        except (RuntimeError, TypeError, ValueError):  # it says why where it is built for good
            return False
    return configs[0] is not None and configs[0] == configs[1]


def _flat(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Settings by their names with dots."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{at}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def _is_another(name: str, before: Any, now: Any) -> bool:
    """Whether a difference makes another task or model."""
    if name in _PLACES:  # folders are moved; whether they hold the same is looked at in the data
        return any(value in (*CORPORA, EMBEDDED, *IMAGES) for value in (before, now))
    return name.startswith(("task.", "model.")) and name not in _BATCHES


def _refusal(folder: Path, wrong: Differences) -> str:
    listed = list(wrong.items())
    were = ", ".join(f"{name} = {_word(before)}" for name, (before, _) in listed[:_MOST])
    are = ", ".join(_word(now) for _, (_, now) in listed[:_MOST])
    more = f" ({len(listed) - _MOST} more differ)" if len(listed) > _MOST else ""
    repeated = [shlex.quote(f"{name}={_word(before)}") for name, (before, _) in listed if before is not _ABSENT]
    added = [name for name, (before, _) in listed if before is _ABSENT]
    advice = [f"repeat {' '.join(f'--set {text}' for text in repeated)}"] if repeated else []
    advice += [f"leave {', '.join(added)} out"] if added else []
    return (
        f"{folder}: the run was trained with {were}, this recipe says {are}{more}; {' and '.join(advice)}, or choose "
        "another folder (--out)."
    )


def _said(found: Differences) -> str:
    listed = [f"{name} = {_word(now)} instead of {_word(before)}" for name, (before, now) in found.items()]
    more = f", and {len(listed) - _MOST} more" if len(listed) > _MOST else ""
    return f"going on with {', '.join(listed[:_MOST])}{more}"


def _word(value: Any) -> str:
    """A value as an override has it."""
    if value is _ABSENT:
        return "its default"
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
