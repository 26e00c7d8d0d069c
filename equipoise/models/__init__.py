"""The zoo: one file per family, presets by name."""

from equipoise.models import baselines, deq_transformer, deq_trellisnet, mdeq, vision_baselines
from equipoise.models.outputs import LMOutput, VisionOutput
from equipoise.models.registry import MODELS, create_model, list_models, register_model

__all__ = [
    "MODELS",
    "LMOutput",
    "VisionOutput",
    "baselines",
    "create_model",
    "deq_transformer",
    "deq_trellisnet",
    "list_models",
    "mdeq",
    "register_model",
    "vision_baselines",
]
