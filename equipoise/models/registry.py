"""Models by name: a preset is a function, a family is one file."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from equipoise._registry import Registry

MODELS = Registry("model")

Preset = TypeVar("Preset", bound=Callable[..., nn.Module])


def register_model(preset: Preset) -> Preset:
    """Make a preset, a function that builds a model from overrides of its settings, known by its own name."""
    return MODELS.register(preset.__name__)(preset)


def create_model(name: str, **overrides: Any) -> nn.Module:
    """Build a registered model.

    Args:
        name: Name of a preset; `list_models()` has them all.
        **overrides: Settings to change.
    """
    return MODELS.find(name)(**overrides)


def list_models(pattern: str = "*") -> list[str]:
    """Names of registered models that match a shell pattern, sorted."""
    return MODELS.matching(pattern)
