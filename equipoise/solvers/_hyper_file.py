"""Learned solvers in files, each with its settings and the fingerprint of the model it was fitted to."""

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise._errors import unknown_name
from equipoise._solution import EquilibriumWarning
from equipoise._tensor_file import digest_of, write_tensors
from equipoise.solvers._hyper_config import HyperConfig
from equipoise.solvers.base import SOLVERS, Solver, as_solver
from equipoise.solvers.hyper_anderson import HyperAnderson

FILE = "solver.safetensors"
PREFIX = "hyper:"


class WrongModelError(ValueError):
    """A learned solver was fitted to another model."""


def fingerprint(model: nn.Module) -> str:
    """A digest of a model's parameters and buffers, their names and shapes; learned solvers in it do not count."""
    state = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}  # of torch.compile
    return digest_of(sorted(state.items()))


def save_solver(
    solver: HyperAnderson,
    path: str | Path,
    model: nn.Module | None = None,
    notes: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a learned solver as a whole or not at all.

    Args:
        solver: What to write.
        path: The file, by custom solver.safetensors, whose folder is made if need be; or a folder that is there.
        model: What it was fitted to; None if that is not to be checked when it is loaded.
        notes: Plain values to keep with it, e.g. how it was fitted.
        dtype: What weights are rounded to, for small files; None to keep them as they are.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "format": "pt",
        "config": json.dumps(dataclasses.asdict(solver.config)),
        "model": "" if model is None else fingerprint(model),
        "notes": json.dumps(notes or {}),
    }
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in solver.state_dict().items()}
    partial = path.with_name(f".partial-{os.getpid()}-{path.name}")
    try:
        write_tensors(partial, tensors, metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load_solver(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    device: torch.device | str | None = None,
    force: bool = False,
) -> HyperAnderson:
    """A learned solver from its file.

    Args:
        path: The file, or the folder of a run or of the file; `hyper:` before it is left out.
        model: What it is to solve for.
        device: Where it goes; to the model by default.
        force: Take it though it was fitted to another model; its sizes must fit all the same.

    Raises:
        WrongModelError: If it was fitted to another model, and `force` is not set.
    """
    from safetensors import SafetensorError, safe_open

    path = _file(path)
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a learned solver: {error}") from error
    if "config" not in metadata:
        raise ValueError(f"{path} holds no learned solver: `equipoise hyper RUN` writes one.")
    try:
        config = HyperConfig(**json.loads(metadata["config"]))
        with torch.device("meta"):  # shapes before memory: settings may ask for any amount of it
            shapes = {name: value.shape for name, value in HyperAnderson(config).state_dict().items()}
        if shapes != {name: value.shape for name, value in state.items()}:
            raise ValueError("names or shapes of its tensors differ")
        solver = HyperAnderson(config)
        for value in state.values():  # at least what it is made in
            solver.to(torch.promote_types(value.dtype, torch.float32))
        solver.load_state_dict(state)
    except (RuntimeError, TypeError, ValueError) as error:  # names, shapes or settings differ
        raise ValueError(
            f"{path} was written by another version of equipoise, whose learned solvers have other networks: fit it "
            "again with `equipoise hyper RUN`."
        ) from error
    if model is not None and metadata.get("model") not in ("", fingerprint(model)):
        wrong = (
            f"{path} was fitted to another model than this {type(model).__name__}, or before its weights changed: it "
            "may not converge."
        )
        if not force:
            raise WrongModelError(
                f"{wrong} Fit one with `equipoise hyper RUN`, or --finetune this one; force=True (--force) takes it as "
                "it is."
            )
        warnings.warn(f"{wrong} Look at the residuals.", EquilibriumWarning, stacklevel=2)
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    place = device or next((tensor.device for tensor in tensors), torch.device("cpu"))
    return solver.to(place)


def solver_notes(path: str | Path) -> dict[str, Any]:
    """What was kept with a learned solver, e.g. the recipe that it was fitted by; nothing if that cannot be read.

    Args:
        path: See `load_solver`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_file(path), framework="pt") as file:
            notes = json.loads((file.metadata() or {}).get("notes", "{}"))
    except (SafetensorError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _file(given: str | Path) -> Path:
    """The file that a path means."""
    if str(given).strip() == PREFIX:  # else it would be sought in the working folder
        raise ValueError(
            f"there is no path after {PREFIX}; give the file or the folder of a run, e.g. {PREFIX}runs/ptb."
        )
    path = Path(str(given).removeprefix(PREFIX))
    tried = [path] if not path.is_dir() else [path / FILE, path / "hyper" / FILE]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    reported = sorted(path.glob(f"hyper/*/seed-*/{FILE}")) if path.is_dir() else []
    there = f" Those of reports are by themselves: {PREFIX}{reported[0].parent}" if reported else ""
    raise FileNotFoundError(
        f"no learned solver at {' or '.join(map(str, tried))}; `equipoise hyper RUN` writes one.{there}"
    )


def named_solver(name: str, model: nn.Module | None = None, *, force: bool = False) -> Solver:
    """A solver by its registered name, or a learned one by `hyper:PATH`.

    Args:
        name: "anderson", "hyper:runs/ptb", ...
        model: What a learned one is to solve for.
        force: See `load_solver`.
    """
    check_solver(name)
    return load_solver(name, model, force=force) if name.startswith(PREFIX) else as_solver(name)


def check_solver(name: str) -> None:
    """Raise unless `named_solver` knows a name, or finds a file by it; nothing is read."""
    if name.startswith(PREFIX):
        _file(name)
    elif name not in SOLVERS:
        raise ValueError(f"{unknown_name('solver', name, SOLVERS)} {PREFIX}PATH is a learned one.")
