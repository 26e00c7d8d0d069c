"""Scoring a finished run."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from equipoise._module import DEQ, override
from equipoise.train.load import find_checkpoint, load
from equipoise.train.loop import evaluate
from equipoise.train.recipe import Recipe
from equipoise.train.tracking import StatsWindow


def evaluate_run(
    run: str | Path, split: str = "valid", steps: Sequence[int] | None = None, data_dir: str | None = None
) -> list[dict[str, Any]]:
    """Metrics of a trained model on a split, at one or several step budgets of its solver.

    Args:
        run: Folder of a run or of a checkpoint.
        split: Name of a held-out split.
        steps: Budgets; None for the model's own stop rule.
        data_dir: Where data files are.

    Returns:
        For each budget the metrics, the residuals they were obtained at, and seconds.
    """
    folder = find_checkpoint(run)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    task = Recipe.from_data(config, str(folder / "config.json")).make_task(data_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, splits = load(folder, device), task.data()
    deqs = [module for module in model.modules() if isinstance(module, DEQ)]
    if steps and not deqs:
        raise ValueError(f"{folder}: the model has no equilibrium, so there is no step budget to set.")
    results = []
    budgets: Sequence[int | None] = steps or [None]
    for budget in budgets:
        window, started = StatsWindow(), time.perf_counter()
        if budget is None:
            values = evaluate(task, model, splits, split, device, window)
        else:
            own = (deqs[0].eval_plan or deqs[0].plan).stop
            stop = dataclasses.replace(own, max_steps=budget, check_every=min(own.check_every, budget))
            with override(model, stop=stop):
                values = evaluate(task, model, splits, split, device, window)
        results.append({"steps": budget, **values, "solve": window.summary(), "seconds": time.perf_counter() - started})
    return results
