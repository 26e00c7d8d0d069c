"""The command `hyper`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.options import AsJson, DataDir, RunFolder, Set, Which
from equipoise.cli.output import show, table, warn

MOST_SHARE = 0.04  # of the model's parameters


def hyper(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="Folder of the solver; RUN/hyper by default.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    unroll: Annotated[int | None, typer.Option(help="Solver steps that are unrolled.")] = None,
    finetune: Annotated[
        Path | None, typer.Option(help="A learned solver to go on with, e.g. of an earlier checkpoint.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Settings in a file, [solver] and [fit].")] = None,
    changes: Set = None,
    seed: Annotated[int | None, typer.Option(help="Of the initial weights.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a solver that is there.")] = False,
    which: Which = "best",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Fit a learned solver to a trained model: RUN/hyper/solver.safetensors.

    The model stays as it is. Its equilibria on training inputs are found by a classic solver, without a look at labels;
    a small network learns to reach them in fewer steps. Use the result with --solver hyper:RUN wherever a solver can be
    named. The log is fit.jsonl beside it.
    """
    from equipoise.tasks.hyper import fit_run

    settings = _settings(recipe, changes or [])
    named = {"steps": steps, "unroll": unroll, "seed": seed}
    fit = dataclasses.replace(settings.fit, **{name: value for name, value in named.items() if value is not None})
    settings = dataclasses.replace(settings, fit=fit)
    options: dict[str, Any] = {"finetune": finetune, "force": force, "data_dir": data_dir, "which": which}
    record = fit_run(run, settings, out=out, progress=True, **options)
    show(record, True) if as_json else _print(record)
    if record["share"] > MOST_SHARE:
        warn(
            f"the solver has {record['parameters']:,} parameters, {record['share']:.1%} of the model's: more than the "
            f"{MOST_SHARE:.0%} that a solver for a large model needs."
        )


def _settings(path: Path | None, changes: list[str]) -> Any:
    from equipoise.tasks.hyper import HyperRecipe
    from equipoise.train.config import Source, Table, load_config, with_overrides

    if path is not None:
        return load_config(HyperRecipe, path, changes)
    return with_overrides(Table({}, Source("the settings")), changes).build(HyperRecipe)


def _print(record: dict[str, Any]) -> None:
    print(f"checkpoint: {record['checkpoint']}")
    print(f"solver: {record['parameters']:,} parameters, {record['share']:.2%} of the model's")
    names = {
        "convergence": "distance on the way",
        "initial": "distance of the start",
        "residual": "combined residuals",
        "start_residual": "relative residual at the start",
        "end_residual": "relative residual at the end",
        "truth_residual": "relative residual of the truth",
    }
    first, last = record["first"], record["last"]
    rows = [
        [said, f"{first[name]:.3g}", f"{last[name]:.3g}"]
        for name, said in names.items()
        if name in first and name in last
    ]
    table(("", "first step", "last step"), rows, f"fitted in {record['seconds']:.1f} s")
    print(f"written: {record['file']}")
