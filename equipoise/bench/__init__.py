"""Benchmarks by name: ratios in one run, refused where the results are not right."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from equipoise._errors import unknown_name
from equipoise.bench import memory, rivals, runtime_ratio, skewed, solver, train_step
from equipoise.bench.harness import CASES, SHAPES_OF, TINY, Check, Goal, Row, Sample, in_turns, register_case
from equipoise.bench.report import details, remarks, table

__all__ = [
    "CASES",
    "SHAPES_OF",
    "Check",
    "Goal",
    "Row",
    "Sample",
    "details",
    "in_turns",
    "memory",
    "register_case",
    "remarks",
    "rivals",
    "run_case",
    "runtime_ratio",
    "skewed",
    "solver",
    "table",
    "train_step",
]

FILE = "benchmark.json"


def run_case(
    name: str, out: str | Path, *, shapes: Sequence[str] | None = None, device: str | None = None, rounds: int = 15
) -> list[Row]:
    """Run a benchmark and write OUT/benchmark.json.

    Args:
        name: Of the benchmark.
        out: Folder of the results; what is in benchmark.json of another benchmark stays.
        shapes: Names of shapes; all but "tiny" if None.
        device: Where to run; a GPU if there is one, by default.
        rounds: Times that each candidate is timed, at most.
    """
    from equipoise.train.tracking import environment, write_json

    case = CASES.find(name)
    chosen = [shape for shape in SHAPES_OF[name] if shape != TINY] if shapes is None else list(shapes)
    for shape in chosen:
        if shape not in SHAPES_OF[name]:
            raise unknown_name(f"shape of {name!r}", shape, SHAPES_OF[name])
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    rows: list[Row] = case(chosen, place, rounds)
    path = Path(out) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known["environment"] = environment()
    known[name] = [row.record() for row in rows]
    write_json(path, known)
    return rows
