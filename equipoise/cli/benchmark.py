"""The command `benchmark`."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.options import AsJson
from equipoise.cli.output import show, table


def benchmark(
    case: Annotated[str, typer.Argument(help="solver or train-step; see `equipoise list benchmarks`.")],
    out: Annotated[Path, typer.Option(help="Folder of benchmark.json.", show_default=False)],
    shapes: Annotated[
        list[str] | None, typer.Option("--shape", help="copy, small, medium, wide, wide56 or tiny; may be repeated.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one, by default.")] = None,
    rounds: Annotated[int, typer.Option(help="Times that each candidate is timed.", min=1)] = 15,
    as_json: AsJson = False,
) -> None:
    """Measure what solves cost beyond their evaluations of f.

    Candidates are timed in turns in one run; a ratio is reported only for results that were found right.
    """
    from equipoise.bench import run_case
    from equipoise.bench import table as ratios

    rows = run_case(case, out, shapes=shapes, device=device, rounds=rounds)
    if as_json:
        show({"case": case, "out": str(out), "rows": [row.record() for row in rows]}, True)
        return
    head, *lines = ratios(rows)
    table(head, lines)
    for row in rows:
        for note in row.notes:
            print(f"{row.name}: {note}")
