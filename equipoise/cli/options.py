"""Options that several commands share, and the end of every command's help."""

from pathlib import Path
from typing import Annotated, Any

import typer

DataDir = Annotated[
    str | None, typer.Option("--data-dir", envvar="EQUIPOISE_DATA", help="Where data files are.", show_default=False)
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting, e.g. --set train.steps=200. May be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a run, or of a checkpoint.", show_default=False)]
Force = Annotated[
    bool,
    typer.Option("--force", help="Take a learned solver even if it was fitted to another model, or to other weights."),
]
Guard = Annotated[
    bool,
    typer.Option(
        "--guard",
        help="Hand systems that the solver leaves unsolved to Anderson. A number of steps is that of each of the two: "
        "--steps 2 --guard takes 4 at most.",
    ),
]
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


def refuse(options: dict[str, Any], why: str) -> None:
    """Raise if options were given that would not be looked at.

    Args:
        options: By name.
        why: What they belong to.
    """
    given = [name for name, value in options.items() if value is not None and value != []]
    if given:
        raise ValueError(f"{', '.join(given)} cannot be used here: {why}.")
