"""The command `evaluate`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.options import AsJson, DataDir, Force, Guard, RunFolder, Split, Which, refuse
from equipoise.cli.output import plots_or_exit, show, table, warn

IOU = "iou_"

Solvers = Annotated[
    str | None,
    typer.Option(
        help="Solve by this one instead of the model's; hyper:PATH is a learned one. Several, with commas "
        "between, with --pareto; learned ones of equal settings count as seeds of one kind."
    ),
]
Pareto = Annotated[
    bool,
    typer.Option(
        "--pareto",
        help="Metric and time per batch of several solvers: RUN/pareto.json. An older one by other settings is "
        "kept under a name with its time.",
    ),
]
Pictures = Annotated[
    int | None,
    typer.Option(min=1, help="Also draw so many images with what the model says of them, into RUN/figures."),
]


def evaluate(
    run: RunFolder,
    split: Split = "valid",
    steps: Annotated[
        list[int] | None, typer.Option("--steps", help="Step budget of the solver; repeat to compare budgets.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Values of a setting to score at: stop.max_steps=1:20, 1:20:3 or 2,5,10; also solver.memory."
        ),
    ] = None,
    solver: Solvers = None,
    guard: Guard = False,
    pareto: Pareto = False,
    pictures: Pictures = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="With --pareto: another run on the same data, e.g. of an explicit network, as one point."),
    ] = None,
    most: Annotated[int | None, typer.Option(min=1, help="With --pareto: batches to score on; all by default.")] = None,
    force: Force = False,
    which: Which = "best",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change the task, e.g. --set task.eval_batch_size=1.")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Score a trained model on held-out data.

    The results are also written to RUN/eval/. Each has the metrics, the residuals and evaluations of f they were
    obtained with, and seconds. A metric that changes with the step budget, or was obtained at a large residual, is not
    that of an equilibrium: a warning says so.
    """
    given: dict[str, Any] = {"which": which, "changes": changes or ()}
    if pareto:
        refuse({"--sweep": sweep, "--pictures": pictures}, "--pareto scores after --steps, 1 to 12 by default")
        refuse({"--guard": guard or None}, "--pareto counts the steps of one solver, and a guard takes more of them")
        options = {"split": split, "data_dir": data_dir, "beside": beside or (), "most": most, "force": force}
        _pareto(run, solver, steps, as_json, **given, **options)
        return
    refuse({"--beside": beside}, "it is a point of --pareto")
    refuse({"--most": most}, "scores are of all batches; --pareto may do with fewer")
    if solver and "," in solver:
        raise ValueError(f"--solver {solver} names several, which --pareto compares; give one, or --pareto.")
    if pictures:
        plots_or_exit()  # before the work, not after it
        from equipoise.plots.pictures import write_pictures

        refuse({"--solver": solver, "--guard": guard or None}, "pictures are of the model with its own solver")
    from equipoise.train.evaluate import Sweep, score_run, write_scores
    from equipoise.train.load import open_run

    points = None if sweep is None else Sweep.parse(sweep)
    opened = open_run(run, split, data_dir, **given) if pictures else None
    drawn = [str(file) for file in write_pictures(run, count=pictures, split=split, opened=opened)] if pictures else []
    by: dict[str, Any] = {"solver": solver, "force": force, "guard": guard}
    record = score_run(run, split, steps, data_dir, sweep=points, opened=opened, **by, **given)
    path = None
    try:
        path = write_scores(run, record)
    except OSError as error:  # the numbers are there, whatever becomes of the file
        warn(f"the results were not written to {run / 'eval'}: {error.strerror or error}.")
    if as_json:
        show({**record, "file": str(path) if path else None, **({"pictures": drawn} if pictures else {})}, True)
    else:
        _show_scores(record)
        print(f"written: {path}" if path else "not written")
        for file in drawn:
            print(f"written: {file}")
    for text in record["warnings"]:
        warn(text)


def _show_scores(record: dict[str, Any]) -> None:
    """A line on what was scored, and a row per result."""
    from equipoise.solvers._hyper_file import PREFIX

    results, sweep = record["results"], record["sweep"]
    learned = f" ({record['asked']})" if (record["asked"] or "").startswith(PREFIX) else ""
    solver = f", solver {record['solver']}{learned}" if record["solver"] else ""
    key = "steps" if sweep in (None, "stop.max_steps") else sweep
    left_out = {"steps", "solve", "seconds", key}
    metrics = [name for name in results[0] if name not in left_out and not name.startswith(IOU)]
    solved = {"residual_p50": "residual", "residual_p95": "residual p95", "nfe": "nfe", "failures": "failures"}
    solved = solved if results[0]["solve"] else {}
    columns = [*([key] if sweep else []), *metrics, *solved.values(), "seconds"]
    rows = [
        [
            *([result[key]] if sweep else []),
            *(result[name] for name in metrics),
            *(_short(result["solve"].get(name)) for name in solved),
            f"{result['seconds']:.2f}",
        ]
        for result in results
    ]
    table(columns, rows, f"{record['checkpoint']}, {record['split']}{solver}")
    classes = list(dict.fromkeys(name for result in results for name in result if name.startswith(IOU)))
    if classes:
        heads = [f"{key} {result[key]}" if sweep else "IoU" for result in results]
        rows = [
            [name.removeprefix(IOU), *(f"{result.get(name, float('nan')):.4f}" for result in results)]
            for name in classes
        ]
        table(("class", *heads), rows, "intersection over union by class")


def _pareto(run: Path, solvers: str | None, steps: list[int] | None, as_json: bool, **options: Any) -> None:
    from equipoise.solvers._hyper_file import check_solver
    from equipoise.train.pareto import FILE, pareto_run

    names = ["anderson", f"hyper:{run}"] if solvers is None else [name.strip() for name in solvers.split(",")]
    if not all(names):
        raise ValueError(
            f"--solver {solvers!r} has an empty name; give names with commas between: anderson,hyper:{run}."
        )
    for name in names if solvers is not None else ():  # before data and model are read
        check_solver(name)
    if not as_json:
        options["say"] = partial(typer.echo, err=True)
    file = run / FILE
    before = file.stat().st_mtime_ns if file.exists() else None
    try:
        measured = pareto_run(run, names, steps or range(1, 13), **options)
    except KeyboardInterrupt as error:
        written = file.exists() and file.stat().st_mtime_ns != before
        raise KeyboardInterrupt(f"{file} has what was measured" if written else "nothing was measured") from error
    show(measured, True) if as_json else _show_pareto(measured)
    if measured["noise"]:
        warn(f"{measured['noise']}; measure again when nothing else runs.")


def _show_pareto(record: dict[str, Any]) -> None:
    """A row per point, and the speed-ups."""
    from equipoise.train.pareto_curves import UNKNOWN, times_faster, why_bounded

    columns = ("solver", "seed", "steps", "metric", "ms", "residual")
    # Of the metric half a percent counts.
    rows = [[p[name] if name == "metric" else _short(p[name]) for name in columns] for p in record["points"]]
    table(columns, rows, f"{record['checkpoint']}, {record['split']}, {record['metric']}")
    for name, found in record["speedup"].items():
        if name == record["reference"]:
            continue
        times, beyond = times_faster(found), f"{record['reference']} at {found['target']:.6g}"
        why = why_bounded(found, name, record["reference"], "--steps")
        if times is None:
            print(_not_reached(record, name, found))
        elif found["bound"] == UNKNOWN:
            print(f"{name}: how much faster than {beyond} is not known ({why})")
        else:
            print(f"{name}: {times} times as fast as {beyond}{why and f' ({why})'}")
    print(f"written: {Path(record['run']) / 'pareto.json'}")


def _not_reached(record: dict[str, Any], name: str, found: dict[str, Any]) -> str:
    """That a solver, or some of its seeds, have no speed-up."""
    seeds, lacking = len(found["values"]), found["values"].count(None)
    who = f"{name}: " if seeds == 1 else f"{name}: {lacking} of {seeds} seeds "
    does = "does not" if 1 in (seeds, lacking) else "do not"
    most = max(point["steps"] for point in record["points"] if point["solver"] == name and point["steps"] is not None)
    target = f"{record['metric']} {found['target']:.6g}"
    after = f"{record['reference']} after {_steps(record['at'])}, within half a percent"
    return f"{who}{does} reach {target} ({after}) in {_steps(most)}"


def _steps(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''}"


def _short(value: Any) -> Any:
    """Residuals and counts need no six digits."""
    return f"{value:.3g}" if isinstance(value, float) else value
