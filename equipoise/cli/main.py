"""Commands and their options; the work is done elsewhere."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
except ImportError:
    sys.exit("the command needs the extra [train]: pip install 'equipoise[train]'")

app = typer.Typer(
    help="Deep equilibrium models: train, resume, evaluate, sample, inspect.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

DataDir = Annotated[
    str | None, typer.Option("--data-dir", envvar="EQUIPOISE_DATA", help="Where data files are.", show_default=False)
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting, e.g. --set train.steps=200. May be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a run, or of a checkpoint.", show_default=False)]


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/copy_memory.toml.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the run.", show_default=False)],
    changes: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Train by a recipe. Ctrl-C saves a checkpoint and ends; --resume goes on from it."""
    from equipoise.train.loop import train as run
    from equipoise.train.recipe import Recipe

    outcome = run(Recipe.read(recipe, changes or ()), out, data_dir=data_dir, resume=resume)
    record = {"step": outcome.step, "metrics": outcome.metrics, "best": outcome.best, "out": str(out)}
    record["interrupted"] = outcome.interrupted
    show(record, as_json)
    if outcome.interrupted:
        raise typer.Exit(130)


@app.command()
def evaluate(
    run: RunFolder,
    split: Annotated[str, typer.Option(help="Which data to score: valid or test.")] = "valid",
    steps: Annotated[
        list[int] | None, typer.Option("--steps", help="Step budget of the solver; repeat to compare budgets.")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Score a trained model. A metric that changes with --steps is not that of an equilibrium."""
    from equipoise.train.evaluate import evaluate_run

    show({"run": str(run), "split": split, "results": evaluate_run(run, split, steps, data_dir)}, as_json)


@app.command()
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    length: Annotated[int, typer.Option(help="Tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest tokens of this total.")] = None,
    seed: Annotated[int, typer.Option(help="Key of the draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Sample text from a language model, token by token, from the memory of past equilibria."""
    from equipoise.generate import Sampling, sample_text

    sampling = Sampling(temperature, top_k, top_p, seed)
    pieces = []
    for piece in sample_text(run, prompt, length, sampling):
        pieces.append(piece)
        if not as_json:
            print(piece, end="", flush=True)
    if as_json:
        show({"run": str(run), "prompt": prompt, "text": "".join(pieces)}, True)
    else:
        print()


@app.command("list")
def list_names(
    kind: Annotated[str, typer.Argument(help="models, tasks, solvers, adjoints, corpora, or all.")] = "all",
    pattern: Annotated[str, typer.Argument(help="Shell pattern, e.g. 'deq_*'.")] = "*",
    as_json: AsJson = False,
) -> None:
    """What can be named in recipes and options."""
    import fnmatch

    from equipoise._errors import unknown_name
    from equipoise.adjoints import ADJOINTS
    from equipoise.data.text import CORPORA, EMBEDDED
    from equipoise.models import MODELS
    from equipoise.solvers import SOLVERS
    from equipoise.tasks import TASKS

    kinds = {"models": MODELS, "tasks": TASKS, "solvers": SOLVERS, "adjoints": ADJOINTS}
    names = {key: sorted(registry) for key, registry in kinds.items()}
    names["corpora"] = sorted([EMBEDDED, *CORPORA])
    if kind != "all" and kind not in names:
        raise unknown_name("kind", kind, [*names, "all"])
    chosen = names if kind == "all" else {kind: names[kind]}
    show({key: fnmatch.filter(values, pattern) for key, values in chosen.items()}, as_json)


def show(record: dict[str, Any], as_json: bool) -> None:
    """A record for a person, or for a program."""
    if as_json:
        print(json.dumps(record))
        return
    for line in _lines(record):
        print(line)


def _lines(value: Any, indent: int = 0) -> list[str]:
    space = "  " * indent
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            nested = isinstance(item, dict | list) and bool(item)
            lines += [f"{space}{key}:", *_lines(item, indent + 1)] if nested else [f"{space}{key}: {_word(item)}"]
        return lines
    if isinstance(value, list):
        return [line for item in value for line in _lines(item, indent)]
    return [f"{space}{_word(value)}"]


def _word(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def main() -> NoReturn:
    """Run the command; what a user can put right ends with one line and exit code 2, not with a traceback."""
    from equipoise.data.files import DataError
    from equipoise.train.checkpoint import CheckpointError
    from equipoise.train.optim import NonFiniteGradientError

    try:
        app()
    except (ValueError, TypeError, OSError, DataError, CheckpointError, NonFiniteGradientError) as error:
        print(f"equipoise: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
