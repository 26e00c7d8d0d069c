"""A trained model from its folder, and what it needs to be scored or measured: settings, task, data, precision."""

import contextlib
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise._errors import unknown_name
from equipoise._module import deqs_in
from equipoise.models import create_model
from equipoise.tasks import Splits, Task
from equipoise.train.checkpoint import CONFIG, MODEL, CheckpointError, latest_checkpoint, load_checkpoint, read_best
from equipoise.train.config import parse_override
from equipoise.train.recipe import Recipe

CHECKPOINTS = "checkpoints"
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(config: Mapping[str, Any], device: torch.device | str) -> contextlib.AbstractContextManager[None]:
    """The precision that a run was trained in, as a context to evaluate, sample and measure it in.

    Args:
        config: Settings of the run, as in its config.json.
        device: Where the model is.
    """
    precision = config.get("train", {}).get("precision", "no")
    if precision == "no":
        return contextlib.nullcontext()
    if precision not in _AUTOCAST:
        raise unknown_name("precision", precision, ("no", *_AUTOCAST))
    return torch.autocast(torch.device(device).type, _AUTOCAST[precision])


def find_checkpoint(path: str | Path, which: str = "best") -> Path:
    """The checkpoint folder that a path means: itself, or the best or newest one of a run.

    Args:
        path: Folder of a run or of a checkpoint.
        which: "best" (the newest, if nothing was evaluated yet) or "latest".
    """
    if which not in ("best", "latest"):
        raise unknown_name("checkpoint", which, ("best", "latest"))
    path = Path(path)
    if (path / MODEL).is_file():
        return path
    root = path / CHECKPOINTS
    best = _read_best(root) if which == "best" else None
    if best is not None and best.is_dir():
        return best
    folder = latest_checkpoint(root)
    if folder is None:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run with checkpoints{_hint(path)}")
    if best is not None:
        raise CheckpointError(
            f"{root / 'best.json'} points to {best.name}, which is not there; the newest checkpoint is {folder}."
        )
    return folder


def home_of(checkpoint: Path) -> Path:
    """Where what belongs to a checkpoint lies, e.g. a vocabulary: the folder of its run, or of the export itself."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint


def _read_best(root: Path) -> Path | None:
    try:
        best = read_best(root)
        return None if best is None else root / best["checkpoint"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{root / 'best.json'} cannot be read ({error}); delete it, or give a checkpoint's own folder."
        ) from error


def _hint(path: Path) -> str:
    """What a person may have meant."""
    if path.is_file():
        return f": it is a file; give the folder of the run, e.g. {path.parent}."
    if path.is_dir():
        runs = sorted(entry.name for entry in path.iterdir() if (entry / CHECKPOINTS).is_dir())
        return f"; runs in it: {', '.join(runs[:6])}." if runs else "; give the folder that train had as --out."
    near = path.parent.is_dir() and difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    return f": there is no such folder; did you mean {path.parent / near[0]}?" if near else ": there is no such folder."


def read_config(folder: str | Path) -> dict[str, Any]:
    """The settings that a checkpoint, or a run, was made with.

    Args:
        folder: Of the checkpoint or of the run.
    """
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {CONFIG}, which says what model it holds.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); take it from another checkpoint.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict) or "name" not in config["model"]:
        raise CheckpointError(f"{path} does not name a model (model.name), so it is not the file of a run.")
    return config


def load(path: str | Path, device: torch.device | str = "cpu", which: str = "best") -> nn.Module:
    """A trained model, in eval mode, from the folder of a run or of a checkpoint; no other file is needed.

    Args:
        path: Folder of a run or of a checkpoint.
        device: Where the model goes.
        which: Of a run: "best" or "latest" checkpoint.
    """
    folder = find_checkpoint(path, which)
    config = read_config(folder)
    settings = dict(config["model"])
    model = create_model(settings.pop("name"), **settings)
    try:
        load_checkpoint(folder, model)
    except RuntimeError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the weights in {folder} do not fit the model of its {CONFIG}.") from error
    schedule = Recipe.from_data(config, str(folder / CONFIG)).schedule(model)
    if schedule is not None:
        schedule.final().apply(model)
    return model.to(device).eval()


def begin_with(model: nn.Module, settings: Mapping[str, Any], path: str | Path, task: Task) -> None:
    """Put the weights of a trained model into one of the same kind, for training to go on in another way.

    Args:
        model: Takes the weights.
        settings: Of `model`, as in a recipe.
        path: Folder of a run, of a checkpoint or of an export.
        task: What `model` is to be trained on; the same tokens, or classes, as the other one.
    """
    folder = find_checkpoint(path)
    config = read_config(folder)
    checkpoint = load_checkpoint(folder)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in checkpoint.model.items()}
    unlike = sorted(name for name in {**wanted, **given} if wanted.get(name) != given.get(name))
    if unlike:
        here, there = (shapes.get(unlike[0], "nothing") for shapes in (wanted, given))
        raise CheckpointError(
            f"train.weights: the weights in {folder} are not those of this model ({len(unlike)} tensors differ, the "
            f"first {unlike[0]}: {here} here, {there} there); {_other_settings(settings, config['model'])}."
        )
    check_artifacts(folder, config, task)
    checkpoint.put_into(model)


def _other_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not names:
        return "it may be of another version"
    return "there " + ", ".join(f"{name} = {theirs[name]!r}" if name in theirs else f"no {name}" for name in names)


@dataclass(frozen=True)
class TrainedRun:
    """A trained model with its data.

    Attributes:
        folder: The checkpoint.
        config: Its settings.
        task: What it was trained on.
        splits: The data.
        model: In eval mode.
        device: Where the model is.
    """

    folder: Path
    config: dict[str, Any]
    task: Task
    splits: Splits
    model: nn.Module
    device: torch.device

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The precision the model was trained in."""
        return autocast_of(self.config, self.device)


def open_run(
    run: str | Path,
    split: str,
    data_dir: str | None = None,
    *,
    which: str = "best",
    device: torch.device | str | None = None,
    changes: Sequence[str] = (),
    inputs: str | Path | None = None,
) -> TrainedRun:
    """Load a trained model and its data.

    Args:
        run: Folder of a run or of a checkpoint.
        split: A held-out split that must be there.
        data_dir: Where data files are.
        which: Of a run: "best" or "latest" checkpoint.
        device: Where the model goes; a GPU, if there is one, by default.
        changes: Of the task's settings, e.g. `task.eval_batch_size=1`.
        inputs: Unlabelled inputs instead of the run's data, as its training batches: a folder of pictures, or a text
            file. There are no held-out splits then, and `split` is not looked at.
    """
    for change in changes:
        if parse_override(change)[0][0] != "task":
            raise ValueError(
                f"--set {change}: of a trained model the task may be changed, e.g. task.eval_batch_size=1."
            )
    folder = find_checkpoint(run, which)
    config = read_config(folder)
    task = Recipe.from_data(config, str(folder / CONFIG), changes).make_task(data_dir)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if inputs is not None:
        from equipoise.train.unlabelled import unlabelled_splits

        splits = unlabelled_splits(task, Path(inputs), home_of(folder), config)
        return TrainedRun(folder, config, task, splits, load(folder, place), place)
    model, splits = load(folder, place), task.data()
    if split not in splits.held_out:
        raise unknown_name("split", split, splits.held_out)
    check_artifacts(folder, config, task)
    return TrainedRun(folder, config, task, splits, model, place)


def require_equilibrium(model: nn.Module, folder: Path, so: str) -> None:
    """Raise if a model has no equilibrium.

    Args:
        model: Of a run.
        folder: Where it lies, for the message.
        so: What follows, likewise.
    """
    if not deqs_in(model):
        raise ValueError(f"{folder}: the model has no equilibrium, {so}; give the run of a DEQ.")


def check_artifacts(folder: Path, config: Mapping[str, Any], task: Task) -> None:
    """Raise if the data are not those the model was trained on: a token's number would mean another token."""
    given, known = task.model_defaults().get("vocab_size", 0), config["model"].get("vocab_size")
    if known is not None and given > known:
        raise ValueError(f"the data have {given:,} kinds of tokens, the model in {folder} knows {known:,}; {_SAME}")
    for name, values in task.artifacts().items():
        path = home_of(folder) / name
        if path.is_file() and json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(values)):
            raise ValueError(f"the data give another {name} than {path}, with which the model was trained; {_SAME}")


_SAME = "give the data of its training (--data-dir)."
