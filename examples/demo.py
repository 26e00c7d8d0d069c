"""Train a small DEQ-Transformer and its explicit twin, measure both, and write a report.

    python -m examples.demo --out runs/demo

The text is the Python language reference, which every Python carries in `pydoc_data`; both models predict its next
character. They are trained side by side by `recipes/demo.toml`, from the same weights on the same batches: one as an
equilibrium, the other as a stack of layers with the same weights in each. Then a solver is fitted to the equilibrium.
The folder gets both runs, figures, results.json and report.html.

Exit codes: 0 all that must hold holds; 1 something does not, or failed; 2 the folder cannot be used; 130 interrupted.
"""

import argparse
import math
import shlex
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import equipoise as eq
from equipoise._module import solutions_of
from equipoise.generate import Sampling, sample_text
from equipoise.plots import Chart, make_chart, save
from equipoise.solvers import named_solver
from equipoise.tasks.base import forward_of
from equipoise.train.evaluate import AGREEMENT, SOLVED
from equipoise.train.inspection import inspect_run, write_inspection
from equipoise.train.load import TrainedRun, find_checkpoint, open_run
from equipoise.train.loop import LOG, train
from equipoise.train.pareto import pareto_run
from equipoise.train.recipe import Recipe
from equipoise.train.tracking import read_metrics, write_json
from examples.demo_page import page, size, summary

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "demo.toml"
DEPTH = 8  # layers of the twin: what fits the time
DEEPEST = 30  # layers of the stack that memory is compared with
SHARE = 1 / 5  # of its memory that the DEQ may take
MARK = "demo.json"  # says that a folder is a demo's, to be written anew
OURS = ("deq", "twin", "twin.log", "hyper.log", "figures", "results.json", "report.html")
FIGURES = ("training", "nfe", "residual", "convergence", "steps", "memory", "time", "pareto")
PROMPT, CHARACTERS, SAMPLING = "The ", 400, Sampling(temperature=0.7, seed=1)
QUICK_STEPS, QUICK_CHARACTERS = 12, 20
LEARNING = (
    "solver.budget=0.16",
    "solver.memory=4",
    "solver.reach=1",
    "fit.steps=1000",
    "fit.unroll=4",
    "fit.learning_rate=1e-2",
    "fit.pool=120",
    "fit.stop={rtol = 2e-3, max_steps = 30}",
    "task.batch_size=4",
)
"""How the learned solver is fitted, besides its recipe: in half a minute at most. The usual 4 % of a model's parameters
are too few where the model itself has a hundred thousand."""
REACHED = 1e-2  # relative residual that the learned solver is to reach in fewer steps than Anderson
FEWER = 0.8  # of Anderson's steps, at most
BUDGETS = (1, 2, 3, 4, 6, 8, 10)  # numbers of steps that metric and time are measured after
SCORED = 6  # batches of the validation text for that
QUICK = (
    "task.train_fraction=0.05",
    "task.batch_size=4",
    "task.length=16",
    "task.eval_batch_size=64",
    "task.eval_length=32",
    "model.d_model=16",
    "model.heads=2",
    "model.d_inner=24",
    "model.memory_length=16",
    "evaluation={stop = {rtol = 1e-2, max_steps = 8}, budgets = [12]}",
    "train.log_every=4",
    "train.evaluate_every=1000",
)
"""A run of seconds, to see that all parts work."""
QUICK_LEARNING = ("fit.steps=30", "fit.unroll=4", "fit.pool=6", "fit.accept=0.5", "solver.budget=1.0")


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; what was trained so far is saved."""


class Refused(Exception):
    """The folder cannot be used."""


@dataclass(frozen=True)
class Part:
    """One of the two models.

    Attributes:
        name: For people.
        out: Folder of its run.
        changes: To the recipe.
    """

    name: str
    out: Path
    changes: tuple[str, ...]

    @property
    def recipe(self) -> Recipe:
        """What it is trained by."""
        return Recipe.read(RECIPE, self.changes)

    @property
    def command(self) -> str:
        """What trains it from a shell."""
        words = [f"equipoise train recipes/demo.toml --out {shlex.quote(str(self.out))}"]
        return " ".join([*words, *(f"--set {shlex.quote(change)}" for change in self.changes)])


def parts_of(out: Path, steps: int | None, quick: bool) -> tuple[Part, Part]:
    """The two models; the twin is plain iteration of fixed depth, differentiated by backpropagation."""
    changes = (*_scaled(QUICK_STEPS if quick and steps is None else steps), *(QUICK if quick else ()))
    stack = f'{{rtol = 0.0, max_steps = {DEPTH}, select = "last"}}'
    budgets = list(Recipe.read(RECIPE, changes).evaluation.budgets)
    plan = ("solver=picard", "adjoint=unroll", f"stop={stack}", f"evaluation={{stop = {stack}, budgets = {budgets}}}")
    twin = Part(f"{DEPTH}-layer twin", out / "twin", (*changes, *plan, "penalty.weight=0.0"))
    return Part("DEQ", out / "deq", changes), twin


def _scaled(steps: int | None) -> tuple[str, ...]:
    """Changes to the recipe for another number of steps: what counts in steps goes with it."""
    if steps is None:
        return ()
    planned = Recipe.read(RECIPE)
    counts = {
        "warmup.steps": planned.warmup.steps,
        "train.learning_rate.warmup": planned.train.learning_rate.warmup,
        "train.log_every": planned.train.log_every,
        "train.evaluate_every": planned.train.evaluate_every,
        "train.save_every": planned.train.save_every,
    }
    scale = steps / planned.train.steps
    return (f"train.steps={steps}", *(f"{key}={max(1, round(scale * count))}" for key, count in counts.items()))


def claim(out: Path) -> None:
    """Make the folder ready: a new or empty one, or one with an earlier demo, of which only that is deleted."""
    try:
        if out.exists() and not out.is_dir():
            raise Refused(f"{out} is a file; give a folder with --out.")
        if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file():
            raise Refused(f"{out} holds something else than a demo (no {MARK} is there); give another with --out.")
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).write_text('{"written_by": "examples/demo.py"}\n', encoding="utf-8")
        for path in (out / name for name in OURS):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        raise Refused(f"{out} cannot be written: {error.strerror or error}.") from error


# Training


class Narrator(threading.Thread):
    """Reads the log of a run while it grows, and says what is in it."""

    def __init__(self, part: Part) -> None:
        super().__init__(daemon=True)
        self.part, self.steps = part, part.recipe.train.steps
        self.told, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            self.tell()

    def tell(self) -> None:
        """Say the records that have not been said."""
        from tqdm import tqdm

        log = self.part.out / LOG
        records = read_metrics(log) if log.is_file() else []
        for record in records[self.told :]:
            line = f"  {self.part.name:<14} step {record['step']:>4} of {self.steps}, {record['seconds']:3.0f} s: "
            if "train" in record:
                tqdm.write(line + _described(record["train"]))  # gets on with the bar that a terminal shows
            elif "valid" in record:
                tqdm.write(line + f"validation loss {record['valid']['loss']:.3f}")
        self.told = len(records)

    def __enter__(self) -> "Narrator":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.join()
        self.tell()


def _described(record: dict[str, Any]) -> str:
    forward, backward = record["forward"], record["backward"]
    if not backward:
        return f"loss {record['nats']:.3f}, a stack of {record['max_steps']} layers"
    work = f"f {forward['nfe']:.0f} times forward, {backward['nfe']:.0f} backward"
    return f"loss {record['nats']:.3f}, {work}, residual {forward['residual_p50']:.0e}"


def fit(part: Part) -> None:
    """Train a model here, telling how it goes."""
    with warnings.catch_warnings(), Narrator(part):
        warnings.simplefilter("ignore", eq.EquilibriumWarning)  # the report has their count
        outcome = train(part.recipe, part.out)
    if outcome.interrupted:
        raise Interrupted(f"{outcome.interrupted}, at step {outcome.step}; to go on: {part.command} --resume")


@contextmanager
def fitting(part: Part) -> Iterator[None]:
    """Train a model in a process of its own, beside what is done in the block; waits for it at the end.

    Models of this size gain little from a second thread, but two of them gain all of a second core.
    """
    arguments = ["train", str(RECIPE), "--out", str(part.out.resolve()), *_sets(part.changes)]
    with Narrator(part), beside(arguments, part.out.with_suffix(".log"), f"training of the {part.name}"):
        yield


def _sets(changes: Sequence[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


@contextmanager
def beside(arguments: Sequence[str], said: Path, what: str) -> Iterator[None]:
    """Run the command in a process of its own, beside what is done in the block; waits for it at the end.

    Args:
        arguments: After the name of the program.
        said: Takes what it prints.
        what: It does, for the error if it fails.
    """
    command = [sys.executable, "-m", "equipoise", *arguments]
    with said.open("w", encoding="utf-8") as file:
        # A session of its own: Ctrl-C comes here only, and is handed on as one signal.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=RECIPE.parents[1], start_new_session=True
        )
        try:
            yield
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()  # it saves, and ends
                process.wait()
    if process.returncode:
        raise RuntimeError(f"{what} ended with exit code {process.returncode}; see {said}.")


def learning_command(run: Path, quick: bool) -> list[str]:
    """What fits a learned solver to a run, after the name of the program."""
    changes = (*LEARNING, *(QUICK_LEARNING if quick else ()))
    return ["hyper", str(run), "--which", "latest", "--recipe", "accelerated", *_sets(changes)]


# Measuring


def inspect(out: Path) -> dict[str, Any]:
    """What `equipoise inspect` measures."""
    record = inspect_run(out, which="latest", say=lambda text: say(f"  {text}"))
    write_inspection(out, record)
    return record


def model_results(part: Part) -> dict[str, Any]:
    """What the log of a run says about its end, and about solves on the way."""
    records = read_metrics(part.out / LOG)
    trained = [record["train"] for record in records if "train" in record]
    last = next(record for record in reversed(records) if "valid_at" in record)
    ways = ("forward", "backward")
    solves = [record for record in trained if record["phase"] == "equilibrium"]
    return {
        "parameters": records[0]["parameters"],
        "steps": last["step"],
        "seconds": last["seconds"],
        "scores": {str(last["valid"]["solve_max_steps"]): last["valid"], **last["valid_at"]},
        "train_loss": trained[-1]["nats"],
        **{way: trained[-1][way] for way in ways},
        "failed": {way: sum(record[way].get("failures", 0) for record in solves) for way in ways},
        "solved": {way: sum(record[way].get("systems", 0) for record in solves) for way in ways},
    }


def learned_results(part: Part) -> dict[str, Any]:
    """The learned solver of a run beside Anderson: steps to one residual, metric and time, what it took to fit."""
    names = {"anderson": "anderson", "learned": f"hyper:{part.out}"}
    fitted = read_metrics(part.out / "hyper" / "fit.jsonl")
    timed = pareto_run(
        part.out, list(names.values()), BUDGETS, which="latest", most=SCORED, warmup=1, rounds=5, explicit=DEPTH
    )
    opened = open_run(part.out, "valid", which="latest")
    solvers = {name: named_solver(given, opened.model) for name, given in names.items()}
    return {
        "steps": {name: mean_steps(opened, solver) for name, solver in solvers.items()},
        "residual": REACHED,
        "parameters": solvers["learned"].num_parameters,  # type: ignore[attr-defined]
        "seconds": fitted[-1]["seconds"],
        "fit_steps": fitted[-1]["step"] + 1,
        "speedup": timed["speedup"]["hyper"]["mean"],
        "at": timed["at"],
    }


def mean_steps(opened: TrainedRun, solver: eq.Solver) -> float:
    """Steps that a solver needs on held-out text, the mean over sequences."""
    forward, stop = forward_of(opened.task, opened.device), eq.Stop(rtol=REACHED, max_steps=60)
    steps, carry = [], None
    with torch.no_grad(), eq.override(opened.model, solver=solver, stop=stop):
        for batch in islice(opened.splits.held_out["valid"](), SCORED):
            with solutions_of(opened.model) as solutions:
                carry = forward(opened.model, batch, carry)
            steps += [solution.stats.steps.double() for solution, _ in solutions]
    return float(torch.cat(steps).mean())


def verdicts(deq: dict[str, Any], memory: Sequence[dict[str, Any]], learned: dict[str, Any]) -> list[tuple[bool, str]]:
    """What must hold, with its numbers.

    Args:
        deq: Results of the DEQ.
        memory: Rows of the inspection.
        learned: Results of the learned solver.
    """
    needed, classic = learned["steps"]["learned"], learned["steps"]["anderson"]
    kept = {row["name"]: row["graph"] + row["history"] for row in memory}
    most, stack = max(kept["DEQ"], kept["DEQ, penalty"]), kept[f"{DEEPEST} layers"]
    scores, losses = deq["scores"], [score["loss"] for score in deq["scores"].values()]
    residuals = [score["solve_residual_p95"] for score in scores.values()]
    gap = max(abs(loss / losses[-1] - 1) for loss in losses) if all(map(math.isfinite, losses)) else math.inf
    reached = " and ".join(f"{x:.1e} within {steps} solver steps" for steps, x in zip(scores, residuals, strict=True))
    scored = " and ".join(f"{x:.4f} within {steps} solver steps" for steps, x in zip(scores, losses, strict=True))
    return [
        (
            most <= SHARE * stack,
            f"Peak memory of a training step, activations and solver history: the DEQ takes {size(most)} "
            f"({size(kept['DEQ'])} without the Jacobian penalty), its tied twin of {DEEPEST} layers {size(stack)}. "
            f"That is 1/{stack / most:.1f} of it; at most 1/{1 / SHARE:.0f} is wanted.",
        ),
        (
            all(residual <= SOLVED for residual in residuals),
            f"The equilibrium is found on held-out text: the relative residual (95th percentile) is {reached}; at most "
            f"{SOLVED:g} is wanted.",
        ),
        (
            gap <= AGREEMENT,
            f"The loss is that of an equilibrium, not of a number of steps: {scored}, {100 * gap:.2f} % apart; at most "
            f"{100 * AGREEMENT:g} % is wanted.",
        ),
        (
            needed <= FEWER * classic,
            f"The learned solver needs fewer steps on held-out text: {needed:.1f} to a relative residual of "
            f"{learned['residual']:g} (the mean of sequences), Anderson {classic:.1f}. That is "
            f"{100 * needed / classic:.0f} % of them; at most {100 * FEWER:.0f} % is wanted.",
        ),
    ]


def sample(part: Part, characters: int) -> str:
    """Text that a trained model goes on with."""
    return "".join(sample_text(find_checkpoint(part.out, "latest"), PROMPT, characters, SAMPLING))


def draw(out: Path, deq: Part, twin: Part) -> dict[str, Chart]:
    """The figures, as files too."""
    charts = {name: make_chart(name, [deq.out, *([twin.out] if name == "training" else [])]) for name in FIGURES}
    for name, chart in charts.items():
        save(chart, name, out / "figures")
    return charts


# The whole


def say(text: str) -> None:
    """A line on the terminal."""
    print(text, flush=True)


def show(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on the terminal, numbers to the right."""
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    for first, *rest in (columns, *rows):
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        say("  ".join(["", first.ljust(widths[0]), *cells]))


def demo(out: Path, steps: int | None = None, quick: bool = False) -> int:
    """Train, measure, report; returns the exit code."""
    started = time.perf_counter()
    claim(out)
    deq, twin = parts_of(out, steps, quick)
    say(f"training a DEQ-Transformer, and its {twin.name} beside it, by recipes/demo.toml")
    with fitting(twin):
        fit(deq)
    say("measuring the DEQ, and fitting a solver to it beside that")
    learning = learning_command(deq.out.resolve(), quick)
    with beside(learning, out / "hyper.log", "the fit of a learned solver"):
        inspection = inspect(deq.out)
        say("sampling text from both")
        texts = {part.name: sample(part, QUICK_CHARACTERS if quick else CHARACTERS) for part in (deq, twin)}
    say("the learned solver beside Anderson")
    learned = learned_results(deq)
    models = {part.name: model_results(part) for part in (deq, twin)}
    results = {
        "data": read_metrics(deq.out / LOG)[0]["data"],
        "models": models,
        "inspection": inspection,
        "texts": texts,
        "prompt": PROMPT,
        "temperature": SAMPLING.temperature,
        "recipe": deq.recipe.to_data(),
        "commands": {part.name: part.command for part in (deq, twin)},
        "learned": learned,
        "learning": shlex.join(["equipoise", *learning_command(deq.out, quick)]),
        "verdicts": verdicts(models[deq.name], inspection["memory"], learned),
    }
    say("drawing")
    charts = draw(out, deq, twin)
    results["seconds"] = time.perf_counter() - started
    write_json(out / "results.json", results)
    report = page(results, charts, out).write(out / "report.html")
    return _conclude(results, report)


def _conclude(results: dict[str, Any], report: Path) -> int:
    say("")
    show(*summary(results))
    say("")
    for holds, sentence in results["verdicts"]:
        say(f"{'holds' if holds else 'DOES NOT HOLD'}: {sentence}")
    say(f"\nreport: {report} ({results['seconds']:.0f} s in all)")
    failed = sum(not holds for holds, _ in results["verdicts"])
    if failed:
        say(f"demo: {failed} of {len(results['verdicts'])} things that must hold do not; see above, or the report.")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder (default: runs/demo)")
    parser.add_argument("--steps", type=int, help="training steps of each model (default: the recipe's)")
    parser.add_argument("--quick", action="store_true", help="a run of seconds at a tiny size, to see that it works")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 4:
        parser.error(f"--steps must be 4 or more, got {options.steps}.")
    try:
        return demo(options.out, options.steps, options.quick)
    except Refused as error:
        say(f"demo: {error}")
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        say(f"demo: interrupted{f' ({error})' if str(error) else ''}. There is no report; another demo begins anew.")
        return 130
    except RuntimeError as error:
        say(f"demo: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
