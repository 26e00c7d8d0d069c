"""What figures are drawn from: metrics.jsonl, written by training, and inspect.json, written by inspection."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise.train.tracking import read_metrics

METRICS = "metrics.jsonl"
INSPECTION = "inspect.json"


class LogError(ValueError):
    """A run lacks a log, or what a figure needs of it.

    Args:
        run: Whose log it is.
        message: What is missing, and the command that writes it.
        foreign: Whether that is nothing a run has: ablations and benchmarks have folders of their own.
    """

    def __init__(self, run: "Run", message: str, *, foreign: bool = False) -> None:
        super().__init__(message)
        self.run, self.foreign = run, foreign


@dataclass(frozen=True)
class Run:
    """A run and its logs, read when asked for.

    Attributes:
        path: Folder of the run, or a metrics file (*.jsonl) that was kept without one.
        label: Its name in figures; no two runs of a figure share one.
    """

    path: Path
    label: str

    @property
    def folder(self) -> Path:
        """Where the run's files lie."""
        return self.path.parent if self.path.suffix == ".jsonl" else self.path

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl as one history: what a resumed run did again replaces the first attempt."""
        path = self.path if self.path.suffix == ".jsonl" else self.path / METRICS
        if not path.is_file():
            raise LogError(self, f"{path} is missing; `equipoise train RECIPE --out {self.path}` writes it.")
        kept: list[dict[str, Any]] = []
        for record in read_metrics(path):
            while kept and kept[-1]["step"] > record["step"]:
                kept.pop()
            kept.append(record)
        return kept

    def points(self, *keys: str) -> list[tuple[int, int | float]]:
        """(step, value) of the records that have the value, e.g. of `points("train", "forward", "nfe")`, by step."""
        found = {}
        for record in self.records:
            value: Any = record
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                found[record["step"]] = self.number(value)
        return sorted(found.items())

    def inspection(self, section: str, kind: type) -> Any:
        """A section of inspect.json, of the kind `list` or `dict`; one that is missing or empty raises."""
        path = self.path / INSPECTION
        if self.path.is_file():
            raise LogError(
                self, f"{self.path} is a metrics file; {section!r} is drawn from {INSPECTION} of a run folder."
            )
        if not path.is_file():
            raise LogError(self, f"{path} is missing; `equipoise inspect {self.path}` writes it.")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LogError(
                self, f"{path} is not JSON ({error}); `equipoise inspect {self.path}` writes it anew."
            ) from error
        found = values.get(section) if isinstance(values, dict) else None
        if not found or not isinstance(found, kind):
            why = "the model has none to measure, or the file is old"
            raise LogError(self, f"{path} has no {section!r}: {why}; `equipoise inspect {self.path}` writes it anew.")
        return found

    def number(self, value: Any) -> int | float:
        """A logged number; what is missing is NaN, and a string is "nan", "inf" or "-inf"."""
        if value is None:
            return float("nan")
        try:
            return value if isinstance(value, int) else float(value)
        except (TypeError, ValueError) as error:
            raise LogError(self, f"{self.path}: expected a number in the logs, got {value!r}.") from error


def open_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Runs with labels that tell them apart: the folder's name, with as many parents as that takes."""
    unique = {Path(path).resolve(): Path(path) for path in paths}
    for path in unique.values():
        if not path.exists():
            raise FileNotFoundError(f"no run at {path}; expected the folder of a run, or a metrics file (*.jsonl).")
    whole = [_parts(path) for path in unique]
    labels = []
    for parts in whole:
        size = 1
        while size < len(parts) and sum(other[-size:] == parts[-size:] for other in whole) > 1:
            size += 1
        labels.append("/".join(parts[-size:]))
    return [Run(path, label) for path, label in zip(unique.values(), labels, strict=True)]


def _parts(path: Path) -> tuple[str, ...]:
    named = path.with_suffix("") if path.suffix == ".jsonl" else path
    return named.parts[1:] or (named.anchor,)
