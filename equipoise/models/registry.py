"""Models by name: a preset is a function, a family is one file."""

import fnmatch
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from equipoise._errors import unknown_name

MODELS: dict[str, Callable[..., nn.Module]] = {}

Preset = TypeVar("Preset", bound=Callable[..., nn.Module])


def register_model(preset: Preset) -> Preset:
    """Make a preset, a function that builds a model from overrides of its settings, known by its own name."""
    name = preset.__name__
    if name in MODELS:
        raise ValueError(f"model name {name!r} is already taken by {MODELS[name].__module__}.")
    MODELS[name] = preset
    return preset


def create_model(name: str, **overrides: Any) -> nn.Module:
    """Build a registered model.

    Args:
        name: Name of a preset; `list_models()` has them all.
        **overrides: Settings to change.
    """
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name](**overrides)


def list_models(pattern: str = "*") -> list[str]:
    """Names of registered models that match a shell pattern, sorted."""
    return sorted(fnmatch.filter(MODELS, pattern))
