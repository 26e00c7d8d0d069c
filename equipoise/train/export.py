"""A trained model as one small folder to keep or to hand on: rounded weights, settings, what it reads, and a card."""

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from equipoise._errors import unknown_name
from equipoise.solvers import HyperAnderson, WrongModelError, load_solver, save_solver
from equipoise.solvers._hyper_file import FILE as SOLVER
from equipoise.tasks import TASKS
from equipoise.tasks.language_model import VOCABULARY
from equipoise.train.checkpoint import CONFIG, MODEL, SAVE_DTYPES, TRAINER, save_checkpoint
from equipoise.train.evaluate import SOLVED, scored_as_it_is
from equipoise.train.load import find_checkpoint, home_of, load, read_config
from equipoise.train.loop import LOG
from equipoise.train.recipe import Recipe
from equipoise.train.schedule import PlanSchedule
from equipoise.train.tracking import read_metrics, written_scores

CARD, ENVIRONMENT = "README.md", "env.json"
_NOT_SCORES = ("loss", "bits_per_token", "error", "miou_error")
_BY_CLASS = "iou_"
_UNKNOWN = "No scores of these weights were found: `equipoise evaluate` writes them."


def export(run: str | Path, out: str | Path, *, which: str = "best", dtype: str = "bf16", force: bool = False) -> Path:
    """Write the weights of a run with all that is needed to use them; `load` and every command take the folder.

    A learned solver of these weights, RUN/hyper/solver.safetensors, goes along, rounded likewise, as one of new ones.
    One of other weights does not: a warning says so.

    Args:
        run: Folder of a run or of a checkpoint.
        out: The new folder.
        which: Of a run: "best" or "latest" checkpoint.
        dtype: What weights are rounded to: "bf16", "fp16" or "fp32".
        force: Replace an earlier export, and all that was put into its folder.

    Raises:
        FileExistsError: If `out` holds an export and `force` is not set, or holds something else.
        ValueError: If there is a learned solver that cannot be read.
    """
    folder, out = find_checkpoint(run, which), Path(out)
    if dtype not in SAVE_DTYPES:
        raise unknown_name("dtype (--dtype)", dtype, SAVE_DTYPES)
    _require_free(out, home_of(folder), force)
    home, model, config = home_of(folder), load(folder), read_config(folder)
    solver = _own_solver(home, model)  # before anything is written
    card = _card(out, folder, model, config, dtype, solver)
    save_checkpoint(out, model, config, save_dtype=dtype)
    for name in (VOCABULARY, "classes.json"):
        if (home / name).is_file():
            shutil.copy(home / name, out / name)
    if solver is not None:  # of the new weights: rounding moves equilibria a little
        save_solver(solver, out / "hyper" / SOLVER, load(out), {"exported_from": str(home)}, SAVE_DTYPES[dtype])
    (out / CARD).write_text(card, encoding="utf-8")
    return out


def _require_free(out: Path, home: Path, force: bool) -> None:
    """Raise if something would be lost that is not meant to be."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MODEL).is_file() or (out / TRAINER).exists():  # a checkpoint of a training is none, either
        raise FileExistsError(f"export: {out} is there and is not an exported model; give a new folder.")
    if out.resolve() == home.resolve():  # its vocabulary would be gone before it is copied
        raise FileExistsError(f"export: {out} is what is to be exported; give a new folder.")
    if not force:
        raise FileExistsError(
            f"export: {out} is there and not empty; give a new folder. force=True (--force) replaces the earlier "
            "export in it, and all that was put beside."
        )


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


def _card(
    out: Path, folder: Path, model: nn.Module, config: Mapping[str, Any], dtype: str, solver: HyperAnderson | None
) -> str:
    home, step = home_of(folder), _step_of(folder)
    records = read_metrics(home / LOG) if (home / LOG).is_file() else []
    # The log goes on after this checkpoint, and a fit that it has at this step came before the next one.
    here = [record for record in records if record["step"] == step and "hyper" not in record]
    schedule = Recipe.from_data(config, str(folder / CONFIG)).schedule(model)
    results = [*_validated(here, schedule), *_evaluated(folder, model)]
    of_task = TASKS.find(config["task"]["name"])
    drawn = of_task.shown or of_task.score
    rows = [[split, budget, _scores(values, drawn), _residual(residual)] for split, budget, values, residual in results]
    task, made_for = config["task"]["name"], config["model"]["name"]
    parameters = sum(p.numel() for p in model.parameters())
    trained = _trained(records[0], here, step, home) if records else ""
    lines = [
        f"# {out.name}",
        "",
        f"`{made_for}` with {parameters:,} parameters, in {dtype}, for the task `{task}`{trained}.",
        f"All settings: `{CONFIG}`.",
        "",
        "```python",
        "import equipoise",
        "",
        f'model = equipoise.load("{out.as_posix()}")',
        "```",
        "",
        *(_learned(out, solver) if solver is not None else []),
        *(_scored(rows, _by_class(*results[-1][:3])) if results else [_UNKNOWN]),
    ]
    return "\n".join(lines) + "\n"


def _step_of(folder: Path) -> int | None:
    """The step of a checkpoint of a run; None of a folder by itself."""
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else None


def _trained(first: Mapping[str, Any], here: list[dict[str, Any]], step: int | None, home: Path) -> str:
    """On what, for how long and where.

    Args:
        first: Record of the log, which says what the data are.
        here: Records at the step of the checkpoint.
        step: Of the checkpoint, if known.
        home: Where the run's files lie.
    """
    data = first.get("data", {})
    source = data.get("corpus") or data.get("data")
    devices = json.loads((home / ENVIRONMENT).read_text())["devices"] if (home / ENVIRONMENT).is_file() else []
    what = f" on {source}" if source else ""
    how_long = "" if step is None else f" for {step:,} steps"
    minutes = f" in {here[-1]['seconds'] / 60:.1f} minutes" if here else ""
    where = f" on one {devices[0].replace('cpu', 'CPU')}" if devices else ""
    return f", trained{what}{how_long}{minutes}{where}"


_Result = tuple[str, str, Mapping[str, Any], float | str | None]  # split, budget, values, residual


def _validated(here: list[dict[str, Any]], schedule: PlanSchedule | None) -> Iterator[_Result]:
    """Of the evaluation of these weights in training, unless it was of a warm-up's stack or by an opening's solver."""
    found = next((record for record in reversed(here) if "valid" in record), None)
    if found is None or (schedule and schedule.at(found["step"]).eval_plan != schedule.final().eval_plan):
        return
    for budget, values in {"as set": found["valid"], **found.get("valid_at", {})}.items():
        yield "valid", budget, values, values.get("solve_residual_p95")


def _evaluated(folder: Path, model: nn.Module) -> Iterator[_Result]:
    """Of what `evaluate` wrote last for the test data, this checkpoint and the model as it is."""
    home = home_of(folder)
    records = (_read_scores(path) for path in written_scores(home, "test"))
    # Runs are moved, so names are compared; a folder by itself may have been renamed, and holds one checkpoint.
    same = (r for r in records if home == folder or Path(r.get("checkpoint", "")).name == folder.name)
    found = next((record for record in same if scored_as_it_is(record, model)), None)
    for result in found["results"] if found else ():
        budget = "as set" if result.get("steps") is None else str(result["steps"])
        yield "test", budget, result, result.get("solve", {}).get("residual_p95")


def _read_scores(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, `equipoise evaluate` writes a new one.") from error


def _learned(out: Path, solver: HyperAnderson) -> list[str]:
    file = f"`hyper/{SOLVER}`, {solver.num_parameters:,} parameters"
    return [f"With a learned solver of these weights ({file}): `--solver hyper:{out.as_posix()}`.", ""]


def _scores(values: Mapping[str, Any], drawn: str) -> str:
    """The metric by which models of the task are compared, and others that say something of their own."""
    known = {k: v for k, v in values.items() if isinstance(v, float) and not k.startswith("solve") and k != "seconds"}
    others = {k: v for k, v in known.items() if k not in _NOT_SCORES and not k.startswith(_BY_CLASS)}
    chosen = {**({drawn: known[drawn]} if drawn in known else {}), **others} or known
    return ", ".join(f"{name} {value:.4g}" for name, value in chosen.items())


def _by_class(split: str, budget: str, values: Mapping[str, Any]) -> list[str]:
    """Of segmentation: a line with the score of each class."""
    found = {name.removeprefix(_BY_CLASS): value for name, value in values.items() if name.startswith(_BY_CLASS)}
    if not found:
        return []
    listed = ", ".join(f"{name} {value:.2f}" for name, value in sorted(found.items(), key=lambda pair: -pair[1]))
    return [f"IoU by class, {split}, steps {budget}: {listed}.", ""]


def _residual(value: float | str | None) -> str:
    return "–" if value is None else f"{float(value):.1e}"  # a file has "inf" as text


def _scored(rows: list[list[str]], classes: list[str]) -> list[str]:
    """The table of scores, and what is to be said of them."""
    head = ["split", "solver steps at most", "score", "residual"]
    return [
        *(f"| {' | '.join(row)} |" for row in (head, ["---"] * 4, *rows)),
        "",
        *classes,
        "Scores are those of the weights before rounding. The residual is ‖f(z) − z‖ / ‖f(z)‖, 95th percentile;",
        f"above {SOLVED:g} the number is that of a network of so many steps, not of an equilibrium.",
    ]
