"""What a run writes down: metrics as JSON lines, its environment, statistics of its solves."""

import itertools
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise._solution import Stats, Status
from equipoise._stop import Stop

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_PACKAGES = ("torch", "numpy", "safetensors", "accelerate", "torchmetrics")


class Mirror(Protocol):
    """A second place for metrics, e.g. tensorboard; the JSON lines are the truth."""

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Take in one record."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class MetricsWriter:
    """Appends records to a JSONL file, one line each, so that a crash loses at most the line being written.

    A number that JSON does not know is written as the string "nan", "inf" or "-inf"; `read_metrics` turns it back.

    Args:
        path: The file; its folder is made if need be.
        resume_step: Continue a file: lines of later steps, and a line a crash cut short, are removed. None for a new
            run, whose file must not exist or be empty.
        mirrors: Get every record too.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None, mirrors: Iterable[Mirror] = ()) -> None:
        self.path = Path(path)
        self.mirrors = tuple(mirrors)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            _keep_until(self.path, resume_step)
        elif self.path.exists() and self.path.stat().st_size > 0:
            raise FileExistsError(f"{self.path} holds the metrics of another run; resume it, or choose another folder.")
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append a record; values are numbers, strings, scalar tensors, or tables and lists of these."""
        kept = {"step": step, **{key: plain(value, key) for key, value in record.items()}}
        if kept["step"] != step:
            raise ValueError(f"a record of step {step} has a field 'step' of its own: {kept['step']!r}.")
        line = json.dumps(kept, allow_nan=False, ensure_ascii=False) + "\n"
        self._append(line.encode())
        for mirror in self.mirrors:
            mirror.write(step, kept)

    def _append(self, line: bytes) -> None:
        """Write a line as a whole: if the disk is full, no part of it stays to spoil the next one."""
        start = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            os.ftruncate(self._file.fileno(), start)
            raise

    def close(self) -> None:
        """Flush to the disk and close."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()
            for mirror in self.mirrors:
                mirror.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def written_scores(folder: str | Path, split: str = "*") -> list[Path]:
    """What `equipoise evaluate` wrote into eval/ of a run, the newest first.

    Args:
        folder: Of the run.
        split: Of which data; of any by default.
    """
    found = (Path(folder) / "eval").glob(f"{split}-*.json")
    return sorted(found, key=lambda path: path.stem.partition("-")[2], reverse=True)


def put_aside(path: Path, part: str = "") -> Path:
    """Give a file or folder that is in the way a name of its own, with the time of its writing; returns the new place.

    What it holds may have taken hours.

    Args:
        path: The file or folder.
        part: Of a folder: the file whose time counts.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime((path / part).stat().st_mtime))
    names = itertools.chain([stamp], (f"{stamp}-{number}" for number in itertools.count(2)))
    places = (path.with_name(f"{path.stem}-{name}{path.suffix}") for name in names)
    older = next(place for place in places if not place.exists())
    path.rename(older)
    return older


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line cut short by a crash is left out."""
    return [_restored(record) for _, record in _records(Path(path))]


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Whole lines with what they say; a line cut short by a crash can be followed by those of a resumed run."""
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            continue
        if line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = b"".join(line for line, record in _records(path) if record["step"] <= step)
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def plain(value: Any, key: str = "") -> Any:
    """A value as JSON holds it: numbers it does not know become strings; `key` names it in an error."""
    if hasattr(value, "tolist"):  # tensors, NumPy scalars and arrays
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, key) for item in value]
    raise TypeError(f"metric {key!r} is a {type(value).__name__}, which has no place in a JSON line.")


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record as a whole or not at all; numbers that JSON does not know become strings, as in metrics.jsonl."""
    partial = path.with_name(f".partial-{os.getpid()}-{path.name}")
    try:
        partial.write_text(json.dumps(plain(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value


class TensorboardMirror:
    """Shows numbers of the records in tensorboard, tables as `table/key`.

    Args:
        folder: Of the event files.
        resume_step: Points of later steps are hidden.
    """

    def __init__(self, folder: str | Path, *, resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "the tensorboard mirror needs the tensorboard package: pip install tensorboard"
            ) from error
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Take in one record; what is no number is left out."""
        for name, value in _numbers(record):
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish."""
        self._writer.close()


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)
        elif isinstance(value, str) and value in _NONFINITE:
            yield f"{prefix}{key}", _NONFINITE[value]


class Pace:
    """How fast training goes since the last record; call `restart` after anything else, an evaluation for example.

    Attributes:
        steps: Made since then.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin to count anew."""
        self._since = time.perf_counter()
        self.steps, self._items, self._unit = 0, 0, ""

    def add_items(self, count: int, unit: str) -> None:
        """Take in what a batch held."""
        self._items, self._unit = self._items + count, unit

    def rates(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Seconds per step, and things per second in all processes together; counts anew.

        Args:
            gather: Gives the value of every process for that of this one.
        """
        seconds = max(time.perf_counter() - self._since, 1e-9)
        rates = {"seconds_per_step": seconds / max(1, self.steps)}
        for count, unit in gather((self._items, self._unit)):
            if unit:
                rates[f"{unit}_per_second"] = rates.get(f"{unit}_per_second", 0.0) + count / seconds
        self.restart()
        return rates


class StatsWindow:
    """Gathers statistics of solves between two log lines, and reads them on the host once, when asked.

    Args:
        quantiles: Of steps and residuals.
    """

    def __init__(self, quantiles: tuple[float, ...] = (0.5, 0.95)) -> None:
        self.quantiles = quantiles
        self._items: list[tuple[Stats, bool]] = []

    def add(self, stats: Stats | None, stop: Stop | None = None) -> None:
        """Take in a solve; None, the backward solve of a stack for example, is nothing.

        Args:
            stats: Of the solve.
            stop: Its stop rule, if known: with a fixed budget, using it up is no failure.
        """
        if stats is not None:
            self._items.append((stats, stop is not None and stop.fixed_budget))

    def state_dict(self) -> list[dict[str, Any]]:
        """What was added since the last summary, as plain values: a resumed run reports as an uninterrupted one."""
        return [
            {"status": s.status.cpu(), "residual": s.residual.cpu(), "steps": s.steps.cpu(), "nfe": s.nfe}
            | {"fixed_budget": fixed}
            for s, fixed in self._items
        ]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Continue from a saved state."""
        self._items = [(Stats(s["status"], s["residual"], s["steps"], s["nfe"]), s["fixed_budget"]) for s in state]

    def summary(self, gather: Callable[[Any], list[Any]] | None = None) -> dict[str, Any]:
        """Solves, systems, mean nfe per solve, quantiles, failures by kind; empty without solves. Starts anew.

        Args:
            gather: Gives the value of every process for that of this one, so that the summary is of all of them.
        """
        items, self._items = self._items, []
        parts = [(_read(items), [stats.nfe for stats, _ in items])]
        if gather is not None:
            parts = gather(parts[0])
        packed, nfe = torch.cat([part for part, _ in parts], dim=1), [n for _, part in parts for n in part]
        if not nfe:
            return {}
        steps, residual, status, excused = packed  # (systems,) each
        summary: dict[str, Any] = {"solves": len(nfe), "systems": packed.shape[1], "nfe": sum(nfe) / len(nfe)}
        if packed.shape[1] == 0:
            return {**summary, "failures": 0}
        for name, values in (("steps", steps), ("residual", residual)):
            for q in self.quantiles:
                summary[f"{name}_p{100 * q:g}"] = float(torch.quantile(values, q, interpolation="nearest"))
        failed = {kind: int(((status == kind) & (excused == 0)).sum()) for kind in Status if not kind.ok}
        summary["failures"] = sum(failed.values())
        summary["failed"] = {kind.name.lower(): count for kind, count in failed.items() if count}
        return summary


def headline(record: Mapping[str, Any]) -> dict[str, str]:
    """What a progress bar shows of a training record."""
    shown = {"loss": f"{record['loss']:.4g}"}
    shown |= {f"{key.split('_')[0]}/s": f"{value:,.0f}" for key, value in record.items() if key.endswith("_per_second")}
    if forward := record["forward"]:
        shown |= {"nfe": f"{forward['nfe']:.0f}", "residual": f"{forward['residual_p95']:.0e}"}
    return shown


def summarise_stats(stats: Stats, stop: Stop | None = None) -> dict[str, Any]:
    """The summary of one solve; see `StatsWindow.summary`."""
    window = StatsWindow()
    window.add(stats, stop)
    return window.summary()


def _read(items: list[tuple[Stats, bool]]) -> Tensor:
    """(4, systems) on the host, by one copy from the device; items of a resumed run are on the host already."""
    parts = [_packed(stats, fixed) for stats, fixed in items]
    here = [torch.empty(4, 0), *(part for part in parts if part.device.type == "cpu")]
    there = [part for part in parts if part.device.type != "cpu"]
    return torch.cat([*here, torch.cat(there, dim=1).cpu()] if there else here, dim=1)


def _packed(stats: Stats, fixed_budget: bool) -> Tensor:
    """(4, N): steps, residuals, statuses, and whether running out of steps is excused, in one tensor to read."""
    wide = torch.promote_types(stats.residual.dtype, torch.float32)
    status = stats.status.detach().reshape(-1)
    residual = stats.residual.detach().reshape(-1).to(wide)
    # A residual that is not a number is as bad as can be, and must not hide from the quantiles.
    residual = torch.where(residual.isnan(), math.inf, residual)
    excused = (status == Status.MAX_STEPS) & fixed_budget
    steps = stats.steps.detach().reshape(-1)
    return torch.stack([steps.to(wide), residual, status.to(wide), excused.to(wide)])


def environment() -> dict[str, Any]:
    """What the numbers of a run depend on besides its settings: versions, device, threads, commit."""
    import equipoise

    record: dict[str, Any] = {
        "equipoise": equipoise.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
        "cuda": torch.version.cuda,
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    root = Path(equipoise.__file__).resolve().parent.parent
    if (root / ".git").exists():  # an installed package may lie inside somebody else's repository
        record["commit"] = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        record["modified"] = None if changes is None else bool(changes)
    return record


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)  # says which build, unlike the package's own
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
