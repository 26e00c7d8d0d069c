"""Options that several commands share, and the end of every command's help."""

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    str | None, typer.Option("--data-dir", envvar="EQUIPOISE_DATA", help="Where data files are.", show_default=False)
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting, e.g. --set train.steps=200. May be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a run, or of a checkpoint.", show_default=False)]
Which = Annotated[str, typer.Option("--which", help="Checkpoint of the run: best or latest.")]
Split = Annotated[str, typer.Option("--split", help="Held-out data: valid or test.")]

EXIT_CODES = (
    "Exit codes: 0 done; 1 an unexpected failure, with its traceback; 2 something you can put right, said in one line; "
    "130 interrupted."
)


def epilog(*examples: str) -> str:
    """The end of a command's help: examples of its use, and exit codes.

    Args:
        *examples: Arguments after the name of the program, without it.
    """
    lines = "\n".join(f"  equipoise {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\n{EXIT_CODES}"
