"""The command `report`."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.options import AsJson
from equipoise.cli.output import plots_or_exit, show


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="The file; RUN/report.html by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put a run on one page: settings, scores, figures and pictures, in an HTML file that needs no other.

    Nothing is computed: what `train`, `evaluate` and `inspect` have written is shown, and what is missing is named.
    """
    plots_or_exit()
    from equipoise.plots.run_report import write_report

    show({"run": str(run), "file": str(write_report(run, out))}, as_json)
