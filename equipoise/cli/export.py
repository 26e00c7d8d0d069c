"""The command `export`."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.options import AsJson, RunFolder, Which
from equipoise.cli.output import show


def export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(help="The new folder, e.g. pretrained/ptb_small.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="Round weights to bf16, fp16 or fp32.")] = "bf16",
    which: Which = "best",
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier export, and all that was put into its folder.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Keep the weights of a run in one small folder, with settings, vocabulary and a card of its scores.

    `equipoise.load` and every command that takes a run take the folder as well.
    """
    from equipoise.train.export import export as write

    folder = write(run, out, which=which, dtype=dtype, force=force)
    files = [path for path in folder.rglob("*") if path.is_file()]
    show({"out": str(folder), "bytes": sum(file.stat().st_size for file in files)}, as_json)
