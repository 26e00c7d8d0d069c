"""Fitting a learned solver to the model of a run: on its training inputs or on others, into a folder of the run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equipoise.solvers._hyper_file import FILE, load_solver, save_solver, solver_notes
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks.base import forward_of
from equipoise.tasks.hyper import FitSettings, HyperRecipe, Pool, fit_hyper_solver
from equipoise.train.checkpoint import check_writable
from equipoise.train.config import ConfigError, from_data, to_data
from equipoise.train.load import TrainedRun, open_run, require_equilibrium

LOG, UNFINISHED_LOG = "fit.jsonl", "fit.partial.jsonl"


def pool_of(opened: TrainedRun, settings: FitSettings, count: int, seconds: float | None = None) -> Pool:
    """Equilibria of a run's model on its training inputs, for several fits.

    Args:
        opened: The run.
        settings: How they are found.
        count: Batches.
        seconds: See `Pool`.
    """
    batches = map(opened.splits.train, range(count))
    with opened.autocast():
        return Pool(opened.model, batches, settings, forward_of(opened.task, opened.device), seconds)


def fit_opened(
    opened: TrainedRun, recipe: HyperRecipe, folder: Path, *, solver: HyperAnderson | None = None, **options: Any
) -> dict[str, Any]:
    """Fit a learned solver to the model of a run on its training inputs; writes solver.safetensors and fit.jsonl.

    Args:
        opened: The run.
        recipe: What and how.
        folder: Of the files.
        solver: Go on with this one.
        **options: Of `fit_hyper_solver`.
    """
    check_writable(folder)
    # An older log goes when the solver goes that it is of.
    log, unfinished = folder / LOG, folder / UNFINISHED_LOG
    unfinished.unlink(missing_ok=True)
    options |= {} if solver is not None else recipe.solver.settings()
    try:
        with opened.autocast():
            fit = fit_hyper_solver(
                opened.model,
                opened.splits.train,
                recipe.fit,
                solver=solver,
                forward=forward_of(opened.task, opened.device),
                log=unfinished,
                **options,
            )
    except Exception:
        if unfinished.exists() and not unfinished.stat().st_size:  # refused, before anything was learned
            unfinished.unlink()
        raise
    notes = {"checkpoint": str(opened.folder), "recipe": to_data(recipe), **fit.record}
    if "inputs" in opened.splits.info:  # not those of the training
        notes["inputs"] = opened.splits.info
    path = save_solver(fit.solver, folder / FILE, opened.model, notes)
    unfinished.replace(log)
    return {"file": str(path), "log": str(log), **notes}


def settings_of(path: str | Path) -> FitSettings | None:
    """The settings by which a learned solver was fitted; None if its file has none that this version knows.

    Args:
        path: See `load_solver`.
    """
    recipe = solver_notes(path).get("recipe")
    if not isinstance(recipe, dict) or "fit" not in recipe:
        return None
    try:
        return from_data(FitSettings, recipe["fit"], str(path))
    except (ConfigError, ValueError, TypeError):
        return None


def fit_run(
    run: str | Path,
    recipe: HyperRecipe = HyperRecipe(),
    *,
    out: str | Path | None = None,
    finetune: str | Path | None = None,
    force: bool = False,
    data_dir: str | None = None,
    which: str = "best",
    changes: Sequence[str] = (),
    inputs: str | Path | None = None,
    seconds: float | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Fit a learned solver to the model of a run; see `fit_opened`.

    Args:
        run: Folder of a run or of a checkpoint.
        recipe: What and how.
        out: Folder of the files; RUN/hyper by default.
        finetune: A learned solver to go on with, e.g. of an earlier checkpoint; its file or the folder of that.
        force: Overwrite a solver that is there.
        data_dir: Where data files are.
        which: Of a run: "best" or "latest" checkpoint.
        changes: Of the task's settings, e.g. `task.batch_size=8`.
        inputs: Unlabelled inputs to find equilibria on, a folder of pictures or a text file; those of the run's
            training by default.
        seconds: End after so many.
        progress: Whether to show a progress bar to a person at a terminal.

    Returns:
        A record: files, settings, seconds, parameters, and first and last values of the log.
    """
    folder = Path(out) if out is not None else Path(run) / "hyper"
    if (folder / FILE).exists() and not force:
        raise FileExistsError(f"{folder / FILE} is there already; choose another --out, or overwrite it with --force.")
    opened = open_run(run, "valid", data_dir, which=which, changes=changes, inputs=inputs)
    require_equilibrium(opened.model, opened.folder, "so there is no solver to fit")
    solver = load_solver(finetune, device=opened.device) if finetune is not None else None
    if solver is not None:
        recipe.solver.require_of(solver)
    record = fit_opened(opened, recipe, folder, solver=solver, seconds=seconds, progress=progress)
    return {"run": str(run), "finetuned": finetune and str(finetune), **record}
