"""Checkpoints: a folder with model.safetensors, config.json and trainer.pt, whole or absent.

A checkpoint is written under a temporary name beside its place, flushed to the disk and renamed, so a crash or a full
disk never harms an older one. Nothing in it runs code when it is read.
"""

import contextlib
import errno
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._errors import unknown_name
from equipoise._tensor_file import write_tensors

MODEL, CONFIG, TRAINER, BEST = "model.safetensors", "config.json", "trainer.pt", "best.json"
SAVE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

REPEATED = 2.0  # seconds
_STEP = re.compile(r"step-(\d{6,})")
_PARTIAL, _REPLACED, _DELETED = ".partial-", ".replaced-", ".deleted-"
_PLAIN = (type(None), bool, int, float, str, bytes, Tensor, nn.Parameter, torch.Size)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


@dataclass
class Checkpoint:
    """What a checkpoint folder holds.

    Attributes:
        folder: Where it is.
        model: The model's state dict; tied entries are one tensor.
        config: The resolved settings, as plain data.
        trainer: Everything else a run needs to continue; None in a checkpoint of weights alone.
        save_dtype: Name of the dtype the weights were rounded to, or None if they are as they were.
        ties: Names of tied entries, each with the name it is stored under.
    """

    folder: Path
    model: dict[str, Tensor]
    config: dict[str, Any]
    trainer: dict[str, Any] | None
    save_dtype: str | None
    ties: dict[str, str]

    def put_into(self, model: nn.Module) -> None:
        """Give `model` these weights (strictly), ties included; build its optimiser afterwards, if they are new."""
        model.load_state_dict(self.model)
        for alias, name in self.ties.items():
            _tie(model, alias, name)


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    config: Mapping[str, Any],
    trainer_state: Mapping[str, Any] | None = None,
    *,
    save_dtype: str | None = None,
) -> Path:
    """Write a checkpoint; until it is whole, whatever stood at `folder` stays as it was.

    Args:
        folder: The checkpoint's own folder, e.g. `checkpoint_folder(root, step)`.
        model: Its state dict is saved; tied parameters once.
        config: Plain data, enough to build the model again.
        trainer_state: Plain data and tensors; None for weights alone.
        save_dtype: "bf16", "fp16" or "fp32": round floating-point weights, for small transfers. Training cannot
            continue bit for bit from rounded weights.

    Raises:
        CheckpointError: If it could not be written, with the reason.
    """
    folder = Path(folder)
    tensors, metadata = _distinct_tensors(model, save_dtype)
    if trainer_state is not None:
        _require_plain(dict(trainer_state), "trainer_state")
    with _reported(f"checkpoint {folder} was not written"):
        text = json.dumps(config, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        folder.parent.mkdir(parents=True, exist_ok=True)
        _bring_back(folder)
        partial = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{folder.name}-", dir=folder.parent))
        try:
            _write_model(partial / MODEL, tensors, metadata)
            _write(partial / CONFIG, lambda file: file.write(text.encode()))
            if trainer_state is not None:
                _write(partial / TRAINER, lambda file: torch.save(dict(trainer_state), file))
            partial.chmod(0o755)  # temporary folders are private
            _sync(partial)
            _put_in_place(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


def load_checkpoint(
    folder: str | Path, model: nn.Module | None = None, device: torch.device | str = "cpu"
) -> Checkpoint:
    """Read a checkpoint and, if a model is given, put the weights into it (strictly), ties included.

    Args:
        folder: The checkpoint's own folder.
        model: Takes the weights; build its optimiser afterwards, unless it is tied by construction.
        device: Where the weights in the result go; the trainer's tensors stay on the CPU.
    """
    from safetensors import safe_open

    folder = Path(folder)
    for name in (MODEL, CONFIG):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {name}.{_nearby(folder)}")
    with _reported(f"checkpoint {folder} cannot be read"):
        place = "cpu" if torch.device(device).type == "cpu" else str(device)  # the format does not know "cpu:0"
        with safe_open(folder / MODEL, framework="pt", device=place) as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        trainer = None
        if (folder / TRAINER).exists():
            trainer = torch.load(folder / TRAINER, map_location="cpu", weights_only=True)
    ties = json.loads(metadata.get("ties", "{}"))
    state.update({alias: state[name] for alias, name in ties.items()})
    checkpoint = Checkpoint(folder, state, config, trainer, metadata.get("save_dtype"), ties)
    if model is not None:
        checkpoint.put_into(model)
    return checkpoint


def _distinct_tensors(model: nn.Module, save_dtype: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict with each tensor once, in the dtype asked for, and the notes that undo this."""
    if save_dtype is not None and save_dtype not in SAVE_DTYPES:
        raise unknown_name("save_dtype", save_dtype, SAVE_DTYPES)
    seen: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"state dict entry {name!r} is a {type(value).__name__}; only tensors are saved.")
        place = (value.device, value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
        if value.numel() and (*place, value.dtype) in seen:
            ties[name] = seen[(*place, value.dtype)]
            continue
        seen[(*place, value.dtype)] = name
        tensors[name] = value
    metadata = {"format": "pt", "ties": json.dumps(ties)}
    if save_dtype is not None:
        metadata["save_dtype"] = save_dtype
    return _stored(tensors, save_dtype), metadata


def _stored(tensors: dict[str, Tensor], save_dtype: str | None) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, each with a storage of its own: the format refuses shared ones."""
    storages: set[int] = set()
    stored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if save_dtype is not None and value.is_floating_point():
            value = value.to(SAVE_DTYPES[save_dtype])
        value = value.detach().cpu().contiguous()
        storage = value.untyped_storage()
        if storage.nbytes() != value.nbytes or storage.data_ptr() in storages:
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        stored[name] = value
    return stored


def _tie(model: nn.Module, alias: str, name: str) -> None:
    """Make two parameters of `model` one, if they are not."""
    try:
        parameter, twin = model.get_parameter(name), model.get_parameter(alias)
    except AttributeError:  # buffers, and entries that are not parameters under this name, have no gradient to share
        return
    if parameter is not twin:
        owner, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(owner), attribute, parameter)


def _require_plain(value: Any, path: str) -> None:
    """Raise unless `torch.load(weights_only=True)` will read the value back."""
    if type(value) in (dict, OrderedDict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(value, dict) and not isinstance(key, str | int | float | bool | tuple):
                raise CheckpointError(f"{path} has a key of type {type(key).__name__}: {key!r}.")
            _require_plain(item, f"{path}[{key!r}]")
    elif type(value) not in _PLAIN:
        raise CheckpointError(
            f"{path} is a {type(value).__name__}; a trainer state holds tensors, numbers, strings, lists, tuples and "
            "dictionaries only, so that reading it runs no code."
        )


def _write(path: Path, fill: Callable[[Any], Any]) -> None:
    with open(path, "wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


def _write_model(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    write_tensors(path, tensors, metadata)
    _sync(path)


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename; an older folder of the same name steps aside first, and back if the rename fails."""
    aside = folder.with_name(f"{_REPLACED}{folder.name}")
    if folder.exists():
        os.replace(folder, aside)
    try:
        os.replace(partial, folder)
    except BaseException:
        if aside.exists():
            aside.rename(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _bring_back(folder: Path) -> None:
    """Undo a replacement that a crash interrupted."""
    aside = folder.with_name(f"{_REPLACED}{folder.name}")
    if aside.exists() and not folder.exists():
        aside.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def recover_checkpoints(root: str | Path) -> None:
    """Tidy up after a crash: bring back what had stepped aside, remove what is partial.

    Only for the process that owns the run: it would take away what another one is writing.
    """
    for entry in list(Path(root).iterdir()) if Path(root).is_dir() else ():
        if entry.name.startswith(_REPLACED):
            _bring_back(entry.with_name(entry.name.removeprefix(_REPLACED)))
        elif entry.name.startswith((_PARTIAL, _DELETED)):
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)


def checkpoint_folder(root: str | Path, step: int) -> Path:
    """The place of the checkpoint of a step."""
    return Path(root) / f"step-{step:06d}"


def list_checkpoints(root: str | Path) -> list[Path]:
    """Whole checkpoints, oldest step first."""
    found = [
        (int(match[1]), entry)
        for entry in (Path(root).iterdir() if Path(root).is_dir() else ())
        if (match := _STEP.fullmatch(entry.name)) and (entry / MODEL).is_file() and (entry / CONFIG).is_file()
    ]
    return [entry for _, entry in sorted(found)]


def latest_checkpoint(root: str | Path) -> Path | None:
    """The whole checkpoint of the highest step, or None."""
    found = list_checkpoints(root)
    return found[-1] if found else None


def _nearby(folder: Path) -> str:
    for root in (folder, folder / "checkpoints", folder.parent):
        found = list_checkpoints(root)
        if found:
            return f" The newest one nearby is {found[-1]}."
    return ""


def write_best(root: str | Path, folder: str | Path, *, step: int, metric: str, score: float) -> None:
    """Point best.json to a checkpoint, atomically."""
    record = {"checkpoint": Path(folder).name, "step": step, "metric": metric, "score": score}
    target = Path(root) / BEST
    partial = target.with_name(f"{_PARTIAL}{BEST}")
    with _reported(f"{target} was not written"):
        text = json.dumps(record, allow_nan=False) + "\n"  # a best score that is not a number is a bug upstream
        _write(partial, lambda file: file.write(text.encode()))
        os.replace(partial, target)
        _sync(target.parent)


def read_best(root: str | Path) -> dict[str, Any] | None:
    """What `write_best` wrote (`checkpoint`, `step`, `metric`, `score`), or None."""
    path = Path(root) / BEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def prune_checkpoints(root: str | Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints and the best one; returns what was deleted."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}; the newest checkpoint is never deleted.")
    best = read_best(root)
    protected = best["checkpoint"] if best else None
    doomed = [folder for folder in list_checkpoints(root)[:-keep] if folder.name != protected]
    for folder in doomed:
        trash = folder.with_name(f"{_DELETED}{folder.name}")  # half a folder must not look like a checkpoint
        os.replace(folder, trash)
        shutil.rmtree(trash, ignore_errors=True)
    return doomed


def checkpoint_bytes(model: nn.Module, copies: int = 3) -> int:
    """About what a checkpoint takes: the weights and `copies` more of them (Adam: 2, an average: 1)."""
    distinct = {id(p): p.nbytes for p in model.parameters()}
    buffers = sum(b.nbytes for b in model.buffers())
    return sum(distinct.values()) * (1 + copies) + buffers + 2**20


def check_writable(folder: str | Path, needed_bytes: int = 0) -> None:
    """Make `folder` if need be, and raise unless files can be written there.

    Args:
        folder: Where a run will write.
        needed_bytes: Free space that must be left.

    Raises:
        CheckpointError: Not a folder, not writable, or too little space.
    """
    folder = Path(folder)
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            raise CheckpointError(f"cannot write to {folder}: {part} is a file, not a folder.")
    with _reported(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=_PARTIAL) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise CheckpointError(
            f"too little space in {folder}: {_size(needed_bytes)} needed, {_size(free)} free. Free some, choose "
            "another folder, or keep fewer checkpoints."
        )


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Failures to write or read, told for a reader."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        full = " The disk is full." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(f"{what}: {reason}.{full}") from error
    except (SafetensorError, json.JSONDecodeError, RuntimeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{what}: {error}") from error


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def rng_state() -> dict[str, Any]:
    """The state of every generator in use (Python, NumPy if imported, torch on CPU and CUDA), as plain data."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put every generator back to a saved state.

    CUDA states are left out where there is no CUDA device: such a run continues, with other draws.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy

        numpy.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        saved, present = len(state["cuda"]), torch.cuda.device_count()
        if saved != present:
            raise CheckpointError(f"random states of {saved} CUDA devices were saved, {present} are visible now.")
        torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])


class GracefulStop:
    """Turns the first Ctrl-C or SIGTERM into a flag, so that a run can save and end; a second one ends it at once.

    Under torchrun, Ctrl-C reaches a process twice, from the terminal and from the launcher: there, one that follows the
    first within `REPEATED` seconds is the same.

    Handlers can only be set in the main thread; elsewhere the flag is there, and only `request` sets it.

    Attributes:
        reason: Name of the signal, or what `request` was told; None as long as nothing asked for a stop.
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self.signals = tuple(signals)
        self.reason: str | None = None
        self._first = -math.inf
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    @property
    def requested(self) -> bool:
        """Whether the run should save and end."""
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask for a stop from within the program."""
        self.reason = self.reason or reason

    def __enter__(self) -> "GracefulStop":
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.signals}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python, and cannot be set again from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a forked worker has inherited this handler, but there is no run to save
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.reason is not None:
            if "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._first < REPEATED:
                return
            raise KeyboardInterrupt(f"{signal.Signals(number).name} after {self.reason}")
        else:
            self._first = time.monotonic()
            self.request(signal.Signals(number).name)
            if os.environ.get("RANK", "0") == "0":  # at once: those who look at the flag may do so late
                with contextlib.suppress(OSError):  # nobody may be listening any more
                    os.write(2, f"\n{self.reason}: will save and end; once more ends at once.\n".encode())
