"""The command `hyper`."""

import dataclasses
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise._errors import by_name, unknown_name
from equipoise.cli.names import learned_recipes
from equipoise.cli.options import AsJson, DataDir, RunFolder, Which, refuse
from equipoise.cli.output import show, table, warn

MOST_SKIPPED = 0.1  # of the steps of a fit
LEAST_ACCEPTED = 0.5  # of the equilibria, below which a solver learns from the easy ones
SEEDS = 3  # of a recipe, in a report
FULL = "full"  # the recipe that others are compared with, and the default

Finetune = Annotated[
    Path | None,
    typer.Option(
        help="A learned solver to go on with, e.g. of an earlier checkpoint: by the settings that it was fitted by, "
        "or those of a --recipe."
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(
        help="Unlabelled inputs to fit on instead of the training data: a folder of pictures, or a text file for a "
        "language model."
    ),
]
Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        help="Settings in a file, [solver] and [fit], or a name (`equipoise list hyper`). With --report it may be "
        "repeated, and may be a folder of files; the first one is timed, of a folder `full` if it is there.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Change a setting of fit, solver or task, e.g. --set fit.learning_rate=1e-3. May be repeated."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(help="Fit several solvers, measure them, and write tables and figures into this folder."),
]
Beside = Annotated[
    list[Path] | None, typer.Option(help="Of a report: another run on the same data, e.g. of an explicit network.")
]
Budgets = Annotated[
    list[int] | None,
    typer.Option(
        help="Of a report: number of solver steps to measure at, 1 to 12 by default; repeat for several. What "
        "Anderson has after the most of them is to be reached.",
        min=1,
    ),
]


def hyper(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="Folder of the solver; RUN/hyper by default.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps; by default the recipe's (full: 1000).")] = None,
    unroll: Annotated[
        int | None, typer.Option(help="Solver steps that are unrolled; by default the recipe's (full: 10).")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="End after so many, above 0, all fits of a report together.")
    ] = None,
    finetune: Finetune = None,
    inputs: Inputs = None,
    recipes: Recipes = None,
    changes: Changes = None,
    seed: Annotated[int | None, typer.Option(help="Of the initial weights.")] = None,
    report: Report = None,
    seeds: Annotated[
        int | None, typer.Option(help="Of a report: solvers fitted by each recipe; 3 by default.", min=1)
    ] = None,
    beside: Beside = None,
    most: Annotated[int | None, typer.Option(help="Of a report: batches to score on; all by default.", min=1)] = None,
    at: Budgets = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a solver that is there.")] = False,
    which: Which = "best",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Fit a learned solver to a trained model: RUN/hyper/solver.safetensors.

    The model stays as it is. Its equilibria on training inputs are found by a classic solver, without a look at labels;
    a small network learns to reach them in fewer steps. Use the result with --solver hyper:RUN wherever a solver can be
    named. The log is fit.jsonl beside it.

    With --inputs PATH the equilibria are those of other inputs, e.g. of what comes up in use: pictures are scaled, cut
    and normalised as the run's images are, text is read with the run's vocabulary. The data of the training are needed
    only where the run's images are a set of your own, known by a name.

    With --report DIR: several seeds of one recipe or more, metric against time beside Anderson, overhead, residuals
    beyond the unrolled steps, and a table of the variants. Solvers and measurements are kept in RUN/hyper, so that the
    same command goes on where it was ended.
    """
    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {minutes:g}.")
    named = {"steps": steps, "unroll": unroll, "seed": seed}
    own, of_task = _split(changes or [])
    tell = partial(typer.echo, err=as_json)
    gone_on_with = None if finetune is None or recipes or report is not None else _fit_of(finetune, tell)
    found = _read(recipes or [], own, gone_on_with)
    chosen = {name: _changed(recipe, named) for name, recipe in found.items()}
    options: dict[str, Any] = {"data_dir": data_dir, "which": which, "changes": of_task}
    options["seconds"] = None if minutes is None else 60 * minutes
    if report is not None:
        refuse({"--inputs": inputs}, "a report scores, and needs labels; fit to these inputs without --report")
        fitted = {"--out": out, "--finetune": finetune, "--seed": seed, "--force": force or None}
        refuse(fitted, "a report has fits of its own (RUN/hyper), which stay while nothing they depend on changes")
        measured = {"most": most} if at is None else {"most": most, "budgets": tuple(sorted(set(at))), "at": max(at)}
        _report(run, chosen, report, as_json, measured, seeds=seeds or SEEDS, beside=beside or [], **options)
        return
    of_reports = {"--beside": beside, "--most": most, "--at": at, "--seeds": seeds}
    refuse(of_reports, "this belongs to a report; give --report DIR")
    if len(chosen) > 1:
        raise ValueError(f"{len(chosen)} recipes ({', '.join(chosen)}) are fitted for a report; give --report DIR.")
    from equipoise.train.hyper_fit import fit_run

    (recipe,) = chosen.values()
    try:
        record = fit_run(run, recipe, out=out, finetune=finetune, inputs=inputs, force=force, progress=True, **options)
    except KeyboardInterrupt as error:
        kept = "no solver was written; --minutes or --steps end a fit earlier, and keep it"
        raise KeyboardInterrupt(kept) from error
    show(record, True) if as_json else _print(record)
    _warn_of(record, recipe)


# Recipes


def _split(changes: list[str]) -> tuple[list[str], list[str]]:
    """Changes of the recipes, and those of the task."""
    of_task = [change for change in changes if change.startswith("task.")]
    return [change for change in changes if change not in of_task], of_task


def _fit_of(solver: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """The settings by which a learned solver was fitted, to go on with it; those in full where its file has none."""
    from equipoise.train.config import to_data
    from equipoise.train.hyper_fit import settings_of

    settings = settings_of(solver)
    if settings is None:
        tell(f"settings of the fit: those of `{FULL}`, {solver} has none that can be read; --recipe names others")
        return {}
    tell(f"settings of the fit: those by which {solver} was fitted; --recipe names others")
    return {"fit": to_data(settings)}


def _read(given: list[str], changes: list[str], usual: dict[str, Any] | None = None) -> dict[str, Any]:
    """Recipes by name, changed, as they were given; nothing is added to them.

    Args:
        given: Names, files, folders.
        changes: Of all of them.
        usual: The settings without any; those in full by default.
    """
    from equipoise.tasks.hyper import HyperRecipe
    from equipoise.train.config import Source, Table, load_config, with_overrides

    paths = by_name("recipes", [path for one in given for path in _paths(one)], lambda path: path.stem)
    found = {name: load_config(HyperRecipe, path, changes) for name, path in paths.items()}
    return found or {FULL: with_overrides(Table(usual or {}, Source("the settings")), changes).build(HyperRecipe)}


def _paths(given: str) -> list[Path]:
    """The files that a path or a name means; of a folder the recipe in full comes first."""
    path, known = Path(given), learned_recipes()
    if given in known:  # a folder of that name is ./NAME
        return [known[given]]
    if path.is_dir():
        files = sorted(path.glob("*.toml"), key=lambda file: (file.stem != FULL, file))
        if not files:
            raise ValueError(f"{path} holds no recipes (*.toml).")
        return files
    if path.suffix == ".toml" or path.is_file():
        return [path]
    raise unknown_name("recipe", given, known)


def _changed(recipe: Any, named: dict[str, Any]) -> Any:
    values = {name: value for name, value in named.items() if value is not None}
    return dataclasses.replace(recipe, fit=dataclasses.replace(recipe.fit, **values))


# Reports


def _report(
    run: Path, recipes: dict[str, Any], out: Path, as_json: bool, measured: dict[str, Any], **options: Any
) -> None:
    from equipoise.train.hyper_study import Measuring, study_run

    command = shlex.join(["equipoise", *sys.argv[1:]])
    say = typer.echo if not as_json else lambda text: typer.echo(text, err=True)
    try:
        record = study_run(run, recipes, out, measuring=Measuring(**measured), command=command, say=say, **options)
    except KeyboardInterrupt as error:
        kept = "the same command goes on after the last fit or measurement that came to its end"
        raise KeyboardInterrupt(kept) from error
    if as_json:
        show(record, True)
        return
    print()
    print((out / "README.md").read_text(encoding="utf-8").rstrip())
    print(f"\nwritten: {out}")


# One fit


def _print(record: dict[str, Any]) -> None:
    print(f"checkpoint: {record['checkpoint']}")
    if "inputs" in record:
        facts = dict(record["inputs"])
        print(f"inputs: {facts.pop('inputs')} ({', '.join(f'{count:,} {name}' for name, count in facts.items())})")
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
    title = f"fitted in {record['seconds']:.1f} s, to {record['accepted']:.0%} of the equilibria"
    if rows:
        table(("", "first step", "last step"), rows, title)
    else:
        print(f"{title}, none of them in the first or the last step")
    print(f"written: {record['file']}")


def _warn_of(record: dict[str, Any], recipe: Any) -> None:
    """Say what is doubtful about a fit."""
    before, after = (record[key].get("end_residual") for key in ("first", "last"))
    if before is not None and after is not None and not after < before:
        rate = recipe.fit.learning_rate / 10
        warn(
            f"the last unrolled step ends at a residual of {after:.2g}, no lower than the {before:.2g} of the first "
            f"step of the fit: lower its rate (--set fit.learning_rate={rate:g}), or give more --steps."
        )
    if record["accepted"] < LEAST_ACCEPTED:
        warn(
            f"only {record['accepted']:.0%} of the equilibria were found well enough to learn from (fit.accept = "
            f"{recipe.fit.accept:g}): train the model longer or with a penalty, allow more steps "
            "(fit.stop.max_steps), or accept more."
        )
    if record["skipped"] > MOST_SKIPPED * record["steps"]:
        warn(
            f"{record['skipped']:,} of {record['steps']:,} steps of the fit were left out, their gradients not being "
            f"finite: unroll fewer solver steps than {recipe.fit.unroll} (--unroll), or check f."
        )
    if record["share"] > recipe.solver.budget:
        warn(
            f"the solver has {record['parameters']:,} parameters, {record['share']:.1%} of the model's, more "
            f"than solver.budget = {recipe.solver.budget:g}: its inner sizes were given, or are as small as they get."
        )
