"""One run of an ablation, in a process of its own: train or go on, score, and write down what came of it.

    python -m equipoise.train.ablation_run FOLDER [DATA_DIR]

The folder has the job. The process saves and ends when its input is closed: when who started it asks for that, or is no
more.
"""

import dataclasses
import json
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from equipoise._module import deqs_in
from equipoise._stop import Stop
from equipoise.train.ablation import INTERRUPTED, JOB, RESULT
from equipoise.train.checkpoint import list_checkpoints
from equipoise.train.config import from_data
from equipoise.train.evaluate import plan_of, score
from equipoise.train.load import CHECKPOINTS, TrainedRun, open_run
from equipoise.train.loop import LOG, train
from equipoise.train.recipe import Recipe
from equipoise.train.tracking import environment, read_metrics, write_json


def run_job(folder: str | Path, data_dir: str | None = None) -> dict[str, Any] | None:
    """Do the job of a folder.

    Args:
        folder: Of the run; has job.json, gets result.json.
        data_dir: Where data files are.

    Returns:
        The result; None if the training was interrupted.
    """
    folder = Path(folder)
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    recipe = Recipe.from_data(job["recipe"], str(folder / JOB))
    resume = bool(list_checkpoints(folder / CHECKPOINTS))
    outcome = train(recipe, folder, data_dir=data_dir, resume=resume)
    if outcome.interrupted:
        return None
    scoring = job["scoring"]
    opened = open_run(folder, scoring["split"], data_dir, which="latest")
    record = {
        "variant": job["variant"],
        "seed": job["seed"],
        "parameters": sum(p.numel() for p in opened.model.parameters()),
        "step": outcome.step,
        "complete": outcome.step >= recipe.train.steps,
        "limit": recipe.train.minutes,
        "minutes": read_metrics(folder / LOG)[-1]["seconds"] / 60,
        "scoring": scoring,
        **_scores(opened, scoring),
        "data": opened.splits.info,
        "environment": environment(),
    }
    write_json(folder / RESULT, record)
    return record


def _scores(opened: TrainedRun, scoring: dict[str, Any]) -> dict[str, Any]:
    """Scores at each budget, and of the solve to a tolerance; a model without equilibria has one score."""
    split = scoring["split"]
    if not deqs_in(opened.model):
        return {"scores": [{"steps": None, **score(opened, split)}], "converged": None}
    own = plan_of(opened.model).stop
    stops = [own.with_budget(budget) for budget in scoring["budgets"]] or [own]
    scores = [{"steps": stop.max_steps, **score(opened, split, stop=stop)} for stop in stops]
    if scoring["converge"] is None:
        return {"scores": scores, "converged": None}
    # Systems that will not get there count with all steps, not with those after which they would be given up.
    tight = dataclasses.replace(from_data(Stop, scoring["converge"]), plateau=None, diverge=math.inf)
    return {"scores": scores, "converged": {"rtol": tight.rtol, **score(opened, split, stop=tight)}}


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # while there is something to save, training has a handler for it


def main() -> None:
    """Do the job that the arguments name."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    sys.exit(INTERRUPTED if run_job(*sys.argv[1:3]) is None else 0)


if __name__ == "__main__":
    main()
