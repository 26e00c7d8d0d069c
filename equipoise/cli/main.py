"""Commands and their options; the work is done elsewhere."""

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
    from typer.core import TyperGroup
except ImportError:
    sys.exit("the command needs the extra [train]: pip install 'equipoise[train]'")

from equipoise.cli.ablate import ablate
from equipoise.cli.benchmark import benchmark
from equipoise.cli.data import data
from equipoise.cli.evaluate import evaluate
from equipoise.cli.export import export
from equipoise.cli.hyper import hyper
from equipoise.cli.inspect import inspect
from equipoise.cli.options import EXIT_CODES, AsJson, DataDir, Force, Guard, RunFolder, Set, epilog
from equipoise.cli.output import show, table, warn
from equipoise.cli.plot import plot
from equipoise.cli.report import report

_KEPT = {
    "evaluate": "no scores were written",
    "inspect": "nothing was written",
    "benchmark": "nothing was written",
    "ablate": "the same command goes on with what is not done",
}


class _Commands(TyperGroup):
    """The commands; one that Ctrl-C ends says so, and what is kept where that is known."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            kept = str(error) or _KEPT.get(ctx.invoked_subcommand)
            begin = "\n" if sys.stderr.isatty() else ""  # what stands there is ^C
            print(f"{begin}interrupted: {kept}" if kept else f"{begin}interrupted", file=sys.stderr)
            raise typer.Exit(130) from error


app = typer.Typer(
    cls=_Commands,
    help="Deep equilibrium models: train, resume, evaluate, sample, inspect.",
    epilog="\b\nA first run, with nothing downloaded:\n"
    "  equipoise train recipes/copy_memory.toml --out runs/copy --set train.steps=100\n"
    "  equipoise evaluate runs/copy --steps 10 --steps 40\n"
    "  equipoise inspect runs/copy\n"
    "  equipoise plot all runs/copy\n\n" + EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command(
    epilog=epilog(
        "train recipes/copy_memory.toml --out runs/copy",
        "train recipes/copy_memory.toml --out runs/copy --resume",
        "train recipes/ptb_trellisnet_small.toml --out runs/ptb --data-dir DIR --set train.steps=200",
        "list recipes",
    )
)
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/copy_memory.toml.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the run.", show_default=False)],
    changes: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Train by a recipe. Ctrl-C saves a checkpoint and ends; --resume goes on from it.

    The folder gets config.json (settings, resolved), env.json, metrics.jsonl and checkpoints.
    """
    from equipoise.train.checkpoint import list_checkpoints
    from equipoise.train.load import CHECKPOINTS
    from equipoise.train.loop import train as run
    from equipoise.train.processes import part
    from equipoise.train.recipe import Recipe

    try:
        outcome = run(Recipe.read(recipe, changes or ()), out, data_dir=data_dir, resume=resume)
    except KeyboardInterrupt as error:  # before the first step, or for the second time
        saved = bool(list_checkpoints(out / CHECKPOINTS))
        kept = "--resume goes on from the newest checkpoint" if saved else "no checkpoint was written"
        raise KeyboardInterrupt(kept) from error
    part()
    record = {"step": outcome.step, "metrics": outcome.metrics, "best": outcome.best, "out": str(out)}
    record["interrupted"] = outcome.interrupted
    if outcome.best is None and not as_json:
        record["best"] = f"none: {outcome.no_best}"
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        show(record, as_json)
    if outcome.interrupted:
        raise typer.Exit(130)


app.command(
    epilog=epilog(
        "evaluate runs/ptb --split test --data-dir DIR",
        "evaluate runs/ptb --steps 10 --steps 40",
        "evaluate runs/ptb --sweep stop.max_steps=1:20",
        "evaluate runs/ptb --sweep stop.rtol=1e-1,1e-2,1e-3 --solver broyden",
        "evaluate runs/camvid --split test --pictures 6 --data-dir DIR",
    )
)(evaluate)


@app.command(
    epilog=epilog(
        'generate runs/ptb --prompt "the company" --length 40 --top-k 20',
        "generate runs/text --temperature 0.8 --samples 3 --seed 1",
        "generate runs/ptb --solver hyper:runs/ptb",
    )
)
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    length: Annotated[int, typer.Option(min=0, help="Tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest tokens of this total.")] = None,
    seed: Annotated[int, typer.Option(help="Key of the draws.")] = 0,
    samples: Annotated[
        int, typer.Option(min=1, help="Texts to draw; several are shown one after another, when done.")
    ] = 1,
    stop: Annotated[str | None, typer.Option(help="End a text before this.")] = None,
    solver: Annotated[
        str | None, typer.Option(help="Solve by this one instead of the model's; hyper:PATH is a learned one.")
    ] = None,
    guard: Guard = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Sample text from a language model.

    Token by token, each from the memory of past equilibria, and shown as it comes.
    """
    from equipoise.generate import Sampling, sample_texts

    texts = [""] * samples
    sampling = Sampling(temperature, top_k, top_p, seed)
    options: dict[str, Any] = {"stop": stop, "solver": solver, "force": force, "guard": guard}
    for pieces in sample_texts(run, prompt, length, sampling, samples=samples, **options):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        if samples == 1 and not as_json:
            print(pieces[0], end="", flush=True)
    if as_json:
        show({"run": str(run), "prompt": prompt, "text": texts[0], "texts": texts}, True)
    elif samples == 1:
        print()
    else:
        print("\n---\n".join(texts))


app.command(
    epilog=epilog("inspect runs/ptb --data-dir DIR", "inspect runs/ptb/checkpoints/step-000800 --depths 1,12 --json")
)(inspect)
app.command(epilog=epilog("benchmark solver --out runs/bench", "benchmark train-step --out runs/bench --shape small"))(
    benchmark
)
app.command(
    epilog=epilog(
        "hyper runs/ptb --recipe quick --data-dir DIR",
        "hyper runs/ptb --finetune runs/ptb/hyper --steps 200 --out hyper2",
        "hyper runs/ptb --report figures --recipe quick --minutes 1",
        "list hyper",
    )
)(hyper)
app.command(
    short_help="Draw figures from the logs of runs.",
    epilog=epilog("plot all runs/ptb", "plot training runs/ptb runs/lstm --out figures", "list figures"),
)(plot)
app.command(
    epilog=epilog(
        "ablate recipes/ablations/digits.toml --out runs/digits --jobs 2",
        "ablate recipes/ablations/mdeq_tiny.toml --out runs/tiny --data-dir DIR --seeds 3 --minutes 10",
        "ablate recipes/ablations/mdeq_tiny.toml --out runs/tiny --jobs 0",
    )
)(ablate)
app.command(epilog=epilog("export runs/ptb pretrained/ptb_small", "export runs/ptb weights --dtype fp32"))(export)
app.command(epilog=epilog("report runs/ptb", "report runs/camvid --out camvid.html"))(report)
app.command(epilog=epilog("data --data-dir DIR", "data digits", "data ptb --data-dir DIR --tokens character"))(data)


@app.command("list", epilog=epilog("list", "list models 'deq_*'", "list recipes"))
def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            help="models, tasks, solvers, adjoints, corpora, images, recipes, ablations, hyper (recipes for learned "
            "solvers), figures, benchmarks, or all."
        ),
    ] = "all",
    pattern: Annotated[str, typer.Argument(help="Shell pattern, e.g. 'deq_*'.")] = "*",
    as_json: AsJson = False,
) -> None:
    """What can be named in recipes and options.

    Each with a line on what it is.
    """
    import fnmatch

    from equipoise._errors import unknown_name
    from equipoise.cli.names import known_names

    names = known_names()
    if kind != "all" and kind not in names:
        raise unknown_name("kind", kind, [*names, "all"])
    chosen = {key: names[key] for key in (names if kind == "all" else [kind])}
    found = {key: {name: chosen[key][name] for name in fnmatch.filter(chosen[key], pattern)} for key in chosen}
    if as_json:
        show(found, True)
        return
    for key, described in found.items():
        if described:
            table(("name", "what it is"), list(described.items()), key)
    if not any(found.values()):
        raise ValueError(f"nothing among {', '.join(found)} matches {pattern!r}; `equipoise list` shows all.")


def main() -> NoReturn:
    """Run the command; what a user can put right ends with one line and exit code 2, not with a traceback."""
    from equipoise.data.files import DataError
    from equipoise.train.checkpoint import CheckpointError
    from equipoise.train.optim import NonFiniteGradientError

    try:
        with warnings.catch_warnings():
            # As the command's own: where in the program one arose is not for its users.
            warnings.showwarning = lambda message, *_, **__: warn(" ".join(str(message).split()))
            app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OPTIONAL:
            _refuse(str(error))
        if package not in _EXTRAS:
            raise
        _refuse(f"this needs the package {error.name}: pip install 'equipoise[{_EXTRAS[package]}]'")
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (ValueError, TypeError, DataError, CheckpointError, NonFiniteGradientError) as error:
        _refuse(str(error))
    sys.exit(0)


_OPTIONAL = ("timm", "torchdiffeq", "PIL")  # where they are used, it is said what for
_EXTRAS = {"accelerate": "train", "torchmetrics": "train", "tqdm": "train", "matplotlib": "plots", "tokenizers": "hf"}


def _refuse(text: str) -> NoReturn:
    print(f"equipoise: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(2)
