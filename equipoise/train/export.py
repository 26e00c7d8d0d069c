"""A trained model as one small folder to keep or to hand on: rounded weights, settings, what it reads, and a card."""

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.solvers import HyperAnderson, WrongModelError, load_solver, save_solver
from equipoise.solvers._hyper_file import FILE as SOLVER
from equipoise.train.checkpoint import CONFIG, MODEL, SAVE_DTYPES, save_checkpoint
from equipoise.train.evaluate import SOLVED
from equipoise.train.load import find_checkpoint, home_of, load, read_config
from equipoise.train.tracking import read_metrics, written_scores

CARD, METRICS, ENVIRONMENT = "README.md", "metrics.jsonl", "env.json"
_NOT_SCORES = ("loss", "bits_per_token", "error", "miou_error")
_BY_CLASS = "iou_"


def export(run: str | Path, out: str | Path, *, which: str = "best", dtype: str = "bf16") -> Path:
    """Write the weights of a run with all that is needed to use them; `load` and every command take the folder.

    A learned solver of these weights, RUN/hyper/solver.safetensors, goes along, rounded likewise, as one of new ones.
    One of other weights does not: a warning says so.

    Args:
        run: Folder of a run or of a checkpoint.
        out: The new folder; one that holds an older export is replaced.
        which: Of a run: "best" or "latest" checkpoint.
        dtype: What weights are rounded to: "bf16", "fp16" or "fp32".

    Raises:
        FileExistsError: If `out` holds something that is not an export.
        ValueError: If there is a learned solver that cannot be read.
    """
    folder, out = find_checkpoint(run, which), Path(out)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MODEL).is_file())):
        raise FileExistsError(f"export: {out} is there and is not an exported model; give a new folder.")
    home, model, config = home_of(folder), load(folder), read_config(folder)
    solver = _own_solver(home, model)  # before anything is written
    card = _card(out.name, home, config, sum(p.numel() for p in model.parameters()), dtype)
    save_checkpoint(out, model, config, save_dtype=dtype)
    for name in ("vocabulary.json", "classes.json"):
        if (home / name).is_file():
            shutil.copy(home / name, out / name)
    if solver is not None:  # of the new weights: rounding moves equilibria a little
        save_solver(solver, out / "hyper" / SOLVER, load(out), {"exported_from": str(home)}, SAVE_DTYPES[dtype])
    (out / CARD).write_text(card, encoding="utf-8")
    return out


def _own_solver(home: Path, model: nn.Module) -> HyperAnderson | None:
    """The learned solver of a run's weights, if there is one."""
    try:
        return load_solver(home, model)
    except FileNotFoundError:
        return None
    except WrongModelError:
        warnings.warn(
            f"the learned solver in {home / 'hyper'} is of other weights than these, and stays behind; fit one to the "
            "new folder by `equipoise hyper`.",
            stacklevel=3,
        )
        return None


def _card(name: str, home: Path, config: Mapping[str, Any], parameters: int, dtype: str) -> str:
    records = read_metrics(home / METRICS) if (home / METRICS).is_file() else []
    results = [*_validated(records), *_evaluated(home)]
    rows = [[split, budget, _scores(values), _residual(residual)] for split, budget, values, residual in results]
    task, made_for = config["task"]["name"], config["model"]["name"]
    lines = [
        f"# {name}",
        "",
        f"`{made_for}` with {parameters:,} parameters, in {dtype}, for the task `{task}`{_trained(records, home)}.",
        f"All settings: `{CONFIG}`.",
        "",
        "```python",
        "import equipoise",
        "",
        f'model = equipoise.load("pretrained/{name}")',
        "```",
        "",
        *_table(rows),
        *(_by_class(*results[-1][:3]) if results else []),
        "Scores are those of the weights before rounding. The residual is ‖f(z) − z‖ / ‖f(z)‖, 95th percentile;",
        f"above {SOLVED:g} the number is that of a network of so many steps, not of an equilibrium.",
    ]
    return "\n".join(lines) + "\n"


def _trained(records: list[dict[str, Any]], home: Path) -> str:
    if not records:
        return ""
    data = records[0].get("data", {})
    source = data.get("corpus") or data.get("data")
    devices = json.loads((home / ENVIRONMENT).read_text())["devices"] if (home / ENVIRONMENT).is_file() else []
    what = f" on {source}" if source else ""
    where = f" on one {devices[0].replace('cpu', 'CPU')}" if devices else ""
    return f", trained{what} for {records[-1]['step']:,} steps in {records[-1]['seconds'] / 60:.1f} minutes{where}"


_Result = tuple[str, str, Mapping[str, Any], float | None]  # split, budget, values, residual


def _validated(records: list[dict[str, Any]]) -> Iterator[_Result]:
    """Of the last evaluation in training."""
    last: dict[str, Any] = next((record for record in reversed(records) if "valid" in record), {})
    for budget, values in ({"as set": last["valid"], **last.get("valid_at", {})} if last else {}).items():
        yield "valid", budget, values, values.get("solve_residual_p95")


def _evaluated(home: Path) -> Iterator[_Result]:
    """Of what `evaluate` wrote last for the test data."""
    newest = next(iter(written_scores(home, "test")), None)
    for result in json.loads(newest.read_text())["results"] if newest else ():
        budget = "as set" if result.get("steps") is None else str(result["steps"])
        yield "test", budget, result, result.get("solve", {}).get("residual_p95")


def _scores(values: Mapping[str, Any]) -> str:
    known = {k: v for k, v in values.items() if isinstance(v, float) and not k.startswith("solve") and k != "seconds"}
    chosen = {k: v for k, v in known.items() if k not in _NOT_SCORES and not k.startswith(_BY_CLASS)} or known
    return ", ".join(f"{name} {value:.4g}" for name, value in chosen.items())


def _by_class(split: str, budget: str, values: Mapping[str, Any]) -> list[str]:
    """Of segmentation: a line with the score of each class."""
    found = {name.removeprefix(_BY_CLASS): value for name, value in values.items() if name.startswith(_BY_CLASS)}
    if not found:
        return []
    listed = ", ".join(f"{name} {value:.2f}" for name, value in sorted(found.items(), key=lambda pair: -pair[1]))
    return [f"IoU by class, {split}, steps {budget}: {listed}.", ""]


def _residual(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _table(rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    head = ["split", "solver steps at most", "score", "residual"]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * 4, *rows)] + [""]
