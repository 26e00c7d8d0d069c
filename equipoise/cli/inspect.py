"""The command `inspect`."""

import sys
from typing import Annotated, Any

import typer

from equipoise.cli.options import AsJson, DataDir, Force, RunFolder, Split, Which
from equipoise.cli.output import show, size, table

_MARKS = (1, 2, 5, 10, 15, 20, 30, 40, 50)  # steps at which residuals are printed


def inspect(
    run: RunFolder,
    split: Split = "valid",
    batches: Annotated[int, typer.Option(help="Batches of the split to solve.")] = 2,
    depths: Annotated[str, typer.Option(help="Layers of the explicit twins to compare with.")] = "1,2,4,8,16,30",
    solver: Annotated[
        str | None,
        typer.Option(help="Solve held-out data by this one instead of the model's; hyper:PATH is a learned one."),
    ] = None,
    force: Force = False,
    which: Which = "best",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Look into a trained model: RUN/inspect.json.

    The file is what `equipoise plot` draws from. On held-out data: the spectral radius at the equilibrium, residuals
    against steps for three solvers and that of --solver, steps needed and failures. For a training step: the gradient
    against a tight solve, memory (graph, solver history, parameters, gradients) and time, beside explicit twins of
    several depths. Models without an equilibrium are measured for memory and time.
    """
    from equipoise.train.checkpoint import check_writable
    from equipoise.train.inspection import inspect_run, write_inspection
    from equipoise.train.load import find_checkpoint

    layers = _depths(depths)
    find_checkpoint(run, which)
    check_writable(run)  # before the work, not after it
    options: dict[str, Any] = {"data_dir": data_dir, "which": which, "solver": solver, "force": force, "say": _say}
    record = inspect_run(run, split=split, batches=batches, depths=layers, **options)
    path = write_inspection(run, record)
    if as_json:
        show(record, True)
        return
    _print(record)
    print(f"written: {path}")


def _depths(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",") if item.strip()]
    except ValueError as error:
        raise ValueError(f"--depths must be whole numbers with commas between, e.g. 1,8,30; got {text!r}.") from error


def _say(text: str) -> None:
    """Progress, for a person at a terminal."""
    if sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr)


def _print(record: dict[str, Any]) -> None:
    print(f"checkpoint: {record['checkpoint']}")
    print(f"model: {record['model']}, {record['parameters']:,} parameters, precision {record['precision']}")
    if record["steps"]:
        _print_equilibrium(record)
    rows = [
        [row["name"], *(size(row[part]) for part in ("graph", "history", "parameters", "gradients"))]
        for row in record["memory"]
    ]
    table(("", "graph", "solver history", "parameters", "gradients"), rows, "memory of a training step")
    kept = {row["name"]: row["graph"] + row["history"] for row in record["memory"]}
    if len(kept) > 1 and "DEQ" in kept:
        deepest = list(kept)[-1]
        ratio = kept["DEQ"] / kept[deepest]
        print(f"graph and solver history of the DEQ: {size(kept['DEQ'])}, {ratio:.2f} of those of {deepest}")
    times = [[row["name"], f"{1e3 * row['forward']:.4g}", f"{1e3 * row['backward']:.4g}"] for row in record["time"]]
    table(("", "forward ms", "backward ms"), times, "time of a training step (median)")
    for note in record["notes"]:
        print(f"note: {note}")


def _print_equilibrium(record: dict[str, Any]) -> None:
    radius, steps = record["spectral_radius"], record["steps"]
    stable = "the plain iteration is stable" if radius["max"] < 1 else "the plain iteration is not stable everywhere"
    print(f"spectral radius: {radius['median']:.3f} (median), {radius['max']:.3f} (largest); {stable}")
    if record["gradient"]:
        print(record["gradient"]["text"])
    needed = sorted(steps["values"])
    print(
        f"solves on {record['split']}: {len(needed)} systems by {steps['solver']}, rtol {steps['rtol']:g}, at most "
        f"{steps['max_steps']} steps; needed {needed[len(needed) // 2]} (median), {needed[-1]} (most); relative "
        f"residual {steps['residual']['median']:.1e} (median), {steps['residual']['max']:.1e} (largest)"
    )
    ends = [[name, count, steps["sentences"][name]] for name, count in steps["statuses"].items()]
    table(("ended", "systems", "which means that the solve"), ends)
    curves = record["convergence"]
    longest = max(len(curve["median"]) for curve in curves.values())
    marks = [mark for mark in _MARKS if mark < longest]
    rows = [
        [f"{name}, {part}", *(f"{curve[part][m]:.1e}" if m < len(curve[part]) else "-" for m in marks)]
        for name, curve in curves.items()
        for part in ("median", "p95")
    ]
    table(("steps", *map(str, marks)), rows, "relative residual after so many steps")
