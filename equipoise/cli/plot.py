"""The command `plot`."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.options import AsJson
from equipoise.cli.output import plots_or_exit, show

ALL = "all"


def plot(
    figure: Annotated[
        str,
        typer.Argument(
            help="training, residual, nfe (from metrics.jsonl); iou (from test scores in eval/, else metrics.jsonl); "
            "convergence, steps, memory, time, resolutions (from inspect.json); benchmark (benchmark.json), pareto "
            "(pareto.json), ablation (ablation.json), masks, predictions (pictures.npz); or all that the runs have "
            "logs for.",
            show_default=False,
        ),
    ],
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or metrics files.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the figures; by default RUN/figures of the first run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw figures from the logs of runs: PNG, SVG, and CSV with the plotted numbers."""
    plots_or_exit()
    from equipoise._errors import unknown_name
    from equipoise.plots import FIGURES, Drawn, draw, draw_all, open_runs

    if figure != ALL and figure not in FIGURES:
        raise unknown_name("figure", figure, [*FIGURES, ALL])
    folder = out or open_runs(runs)[0].folder / "figures"
    try:
        drawn = draw_all(runs, folder) if figure == ALL else Drawn(draw(figure, runs, folder))
    except OSError as error:
        if not (error.filename and Path(error.filename).is_relative_to(folder)):
            raise
        why = f"{error.filename} cannot be written ({error.strerror})"
        raise type(error)(f"{why}; give another folder for the figures (--out).") from error
    if not drawn.files:
        reasons = dict.fromkeys(reason for reasons in drawn.left_out.values() for reason in reasons)
        raise ValueError(f"nothing to draw: {' '.join(reasons)}")
    record = {"figure": figure, "out": str(folder), "files": [str(file) for file in drawn.files]}
    show(record | {"left_out": drawn.left_out} if drawn.left_out or as_json else record, as_json)
