"""The command `benchmark`."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.options import AsJson
from equipoise.cli.output import plots_missing, show, table, warn


def benchmark(
    case: Annotated[
        str,
        typer.Argument(
            help="solver, train-step, memory, rivals, runtime-ratio or skewed; see `equipoise list benchmarks`."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of benchmark.json and the figure.", show_default=False)],
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="solver and train-step: copy, small, medium, wide, wide56; skewed: small, medium; memory and "
            "runtime-ratio: ptb, wt103; rivals: dense; all: tiny. May be repeated; all but tiny by default.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one, by default.")] = None,
    rounds: Annotated[int, typer.Option(help="Times that each candidate is timed, at most.", min=1)] = 15,
    as_json: AsJson = False,
) -> None:
    """Measure solves: what they cost beyond f, beside rivals and explicit networks, in time and in memory.

    Candidates are timed in turns in one run; a ratio is reported only for results that were found right.
    """
    from equipoise.bench import details, remarks, run_case
    from equipoise.bench import table as ratios

    rows = run_case(case, out, shapes=shapes, device=device, rounds=rounds)
    figure = _draw(case, out)
    if as_json:
        show({"case": case, "out": str(out), "figure": figure, "rows": [row.record() for row in rows]}, True)
        return
    head, *lines = ratios(rows)
    table(head, lines, title="ratios")
    head, *lines = details(rows)
    if lines:
        table(head, lines, title="details")
    for line in remarks(rows):
        print(line)


def _draw(case: str, out: Path) -> list[str]:
    """The files of the figure of this case; none where matplotlib is missing."""
    missing = plots_missing()
    if missing:
        warn(missing)
        return []
    from equipoise.plots import save
    from equipoise.plots.benchmark import case_chart
    from equipoise.plots.logs import open_runs

    return [str(file) for file in save(case_chart(open_runs([out])[0], case), f"benchmark-{case}", out)]
