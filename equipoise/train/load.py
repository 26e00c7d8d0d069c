"""A trained model from its folder."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise._errors import unknown_name
from equipoise.models import create_model
from equipoise.train.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint, read_best
from equipoise.train.recipe import Recipe

CHECKPOINTS = "checkpoints"


def find_checkpoint(path: str | Path, which: str = "best") -> Path:
    """The checkpoint folder that a path means: itself, or the best or newest one of a run.

    Args:
        path: Folder of a run or of a checkpoint.
        which: "best" (the newest, if nothing was evaluated yet) or "latest".
    """
    if which not in ("best", "latest"):
        raise unknown_name("checkpoint", which, ("best", "latest"))
    path = Path(path)
    if (path / "model.safetensors").is_file():
        return path
    root = path / CHECKPOINTS
    best = read_best(root) if which == "best" and root.is_dir() else None
    folder = root / best["checkpoint"] if best else (latest_checkpoint(root) if root.is_dir() else None)
    if folder is None:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run with checkpoints.")
    return folder


def load(path: str | Path, device: torch.device | str = "cpu", which: str = "best") -> nn.Module:
    """A trained model, in eval mode, from the folder of a run or of a checkpoint; no other file is needed.

    Args:
        path: Folder of a run or of a checkpoint.
        device: Where the model goes.
        which: Of a run: "best" or "latest" checkpoint.
    """
    folder = find_checkpoint(path, which)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = dict(config["model"])
    model = create_model(settings.pop("name"), **settings)
    load_checkpoint(folder, model)
    schedule = Recipe.from_data(config, str(folder / "config.json")).schedule(model)
    if schedule is not None:
        schedule.final().apply(model)
    return model.to(device).eval()
