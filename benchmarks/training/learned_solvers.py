"""Learned solvers for every kept model, and for some too large to keep: fitted, timed and followed, as one table.

    python -m benchmarks.training.learned_solvers --data-dir DATA --out benchmarks/results/<date>_learned_solvers

For each case `equipoise hyper MODEL --report OUT/CASE …`, with three seeds, on a copy of the model in --work, or on one
that is trained there first. Models, solvers and measurements stay in --work: a call that was cut off is continued by
the same call, and complete cases are not made again, unless their model is another one by now. `OUT/README.md` has the
table, with what was published beside it, each row its folder with all the rest.
"""

import argparse
import hashlib
import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.train.checkpoint import CheckpointError, list_checkpoints
from equipoise.train.hyper_report import REPORT
from equipoise.train.hyper_summary import ranges, table
from equipoise.train.load import CHECKPOINTS, find_checkpoint
from equipoise.train.pareto import FILE as PARETO
from equipoise.train.pareto import LEARNED

MODELS, RECIPES = Path("pretrained"), Path("recipes")
DIGEST = "model.digest"  # beside a report: of the model that it was made of


@dataclass(frozen=True)
class Case:
    """A model, and how solvers for it are fitted and measured.

    Attributes:
        model: Folder under pretrained/, or a recipe.
        arguments: Of `equipoise hyper MODEL --report DIR`, as one would type them.
        training: Of `equipoise train RECIPE`, likewise, for a model that is not kept; None for one that is.
    """

    model: str
    arguments: str
    training: str | None = None


_WORDS = "--unroll 8 --set fit.learning_rate=2e-3 --set task.eval_batch_size=12 --recipe quick"
_FARTHER = _WORDS.replace("quick", "accelerated")
_TINY = (
    "--unroll 4 --set solver.budget=0.05 --set task.options.verify=false "
    "--set task.batch_size=32 --set task.eval_batch_size=16"
)
_STREETS = (
    "--set task.options.verify=false --set task.transfer=none --set 'task.scales=[1.0,1.0]' --set task.colour=0.0 "
    "--set task.batch_size=4 --set task.eval_batch_size=4 --set fit.pool=16 --set fit.steps=400 --most 25"
)
_ABLATIONS = (
    "--recipe full --recipe recipes/hyper --recipe quick --steps 300 --unroll 8 --set fit.pool=32 "
    "--set 'fit.solver={name=\"anderson\"}' --set 'fit.stop={rtol=1e-3,max_steps=30}' --set task.batch_size=8 "
    "--set task.eval_batch_size=12 --most 8"
)
# Solves of training that end at a third of the recipe's residual: the model is best at its equilibrium.
_TIGHT = "--set stop.rtol=3e-3 --set stop.max_steps=30 --set adjoint.stop.rtol=3e-2"
# Of training on a GPU: fixed budgets, so that whole steps are recorded.
_RECORDED = (
    "--set stop.rtol=0.0 --set stop.max_steps=16 --set adjoint.stop.rtol=0.0 --set adjoint.stop.max_steps=12 "
    "--set train.capture=true --set train.precision=bf16"
)
CASES = {
    "ptb_plain": Case("ptb_transformer_plain", _WORDS),
    "ptb_plain_tight": Case("ptb_transformer_plain", _FARTHER, _TIGHT),
    "ptb_reg": Case("ptb_transformer_reg", _WORDS),
    "wikitext2_plain": Case("wikitext2_transformer_plain", _WORDS),
    "wikitext2_reg": Case("wikitext2_transformer_small", _WORDS),
    "ptb_trellisnet": Case("ptb_trellisnet_small", _WORDS),
    "wikitext2_trellisnet": Case("wikitext2_trellisnet_small", _WORDS, _RECORDED),
    "tiny": Case("mdeq_cifar_tiny", f"--recipe quick {_TINY} --most 625"),
    "camvid": Case("mdeq_camvid_small", f"--recipe quick {_STREETS}"),
    "camvid_accelerated": Case("mdeq_camvid_small", f"--recipe accelerated {_STREETS}"),
    "ablations_plain": Case("ptb_transformer_plain", _ABLATIONS),
    "ablations_reg": Case("ptb_transformer_reg", _ABLATIONS),
}
COLUMNS = {
    "": "published",
    "over Anderson's 12 steps": "–",
    "where both stop": "about 2",
    "a step": "< 100 %",
    "no worse after": "–",
    "in the same time": "all",
    "at most worse by": "–",
    "residual below Anderson's after": "all",
    "parameters": "0.6 to 3.9 %",
    "fit and its equilibria, s": "0.8 to 1.2 % of training",
}


@dataclass(frozen=True)
class Bench:
    """Where cases are measured, and with which arguments besides their own.

    Attributes:
        out: Folder of the reports.
        work: Folder of models, solvers and measurements.
        extra: Arguments of each report.
        data: Arguments of each command that say where data are.
    """

    out: Path
    work: Path
    extra: tuple[str, ...] = ()
    data: tuple[str, ...] = ()

    def command(self, name: str, case: Case) -> list[str]:
        """What makes the report of a case, its model being there."""
        report = ["--report", str(self.out / name)]
        return ["hyper", str(self.work / name), *report, *shlex.split(case.arguments), *self.extra, *self.data]

    def complete(self, name: str, case: Case) -> bool:
        """Whether the report of a case is there, has everything, and was made by the same command of the same model."""
        record, kept = _read(self.out / name / REPORT), self.out / name / DIGEST
        whole = shlex.join(["equipoise", *self.command(name, case)])
        if record is None or record.get("complete") is not True or record["command"] != whole or not kept.is_file():
            return False
        model = _digest(MODELS / case.model if case.training is None else self.work / name)
        return model in (None, kept.read_text(encoding="utf-8").strip())

    def measure(self, name: str, case: Case, seconds: float | None) -> bool:
        """Fit and measure a case; what is there when the seconds are over is kept. False if a command failed."""
        run, made_of = self.work / name, self.out / name / DIGEST
        until = time.perf_counter() + (math.inf if seconds is None else seconds)

        def call(command: list[str]) -> None:
            left = until - time.perf_counter()
            whole = [sys.executable, "-m", "equipoise", *command]
            subprocess.run(whole, check=True, timeout=left if math.isfinite(left) else None)

        try:
            if case.training is None:
                _copy(MODELS / case.model, run)
            elif not run.is_dir():
                unfinished = self.work / f"{name}.training"
                resumed = ["--resume"] if list_checkpoints(unfinished / CHECKPOINTS) else []
                training = ["train", str(RECIPES / f"{case.model}.toml"), "--out", str(unfinished), *resumed]
                call([*training, *shlex.split(case.training or ""), *self.data])
                unfinished.rename(run)
            made_of.unlink(missing_ok=True)  # until all of the report is of this model
            call(self.command(name, case))
            made_of.write_text(f"{_digest(run)}\n", encoding="utf-8")
        except subprocess.TimeoutExpired:
            print(f"{name}: no time left; the same call goes on", flush=True)
        except subprocess.CalledProcessError as error:
            print(f"{name}: a command ended with status {error.returncode}, see above", flush=True)
            return False
        return True


def _copy(model: Path, run: Path) -> None:
    """Copy a model as a whole or not at all, unless it is there; another one goes, with what was fitted to it."""
    if _digest(model) in (None, _digest(run)):  # of none, the copy goes on
        return
    partial = run.with_name(f"{run.name}.copy")
    shutil.rmtree(partial, ignore_errors=True)  # of a call that was cut off
    shutil.copytree(model, partial)
    shutil.rmtree(run, ignore_errors=True)
    partial.rename(run)


def _digest(run: Path) -> str | None:
    """Of what a model is loaded from: settings, words, weights; None if there is none."""
    try:
        folder = find_checkpoint(run)
    except CheckpointError:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            digest.update(f"{path.name}|{path.stat().st_size}|".encode() + path.read_bytes())
    return digest.hexdigest()


def row(name: str, folder: Path) -> list[str] | None:
    """A case in the columns of the table; None if nothing was measured yet."""
    record, timed = _read(folder / REPORT), _read(folder / PARETO)
    if record is None or timed is None:
        return None
    speed, overhead = record["speedup"][LEARNED], record["overhead"]
    ratio, share = overhead["step_ratio"], overhead["share"]
    return [
        f"[{name}]({name}/README.md)" + ("" if record["complete"] else " (unfinished)"),
        _times(speed["over_budget"]),
        _times(speed["mean"]),
        "–" if ratio is None else f"{100 * ratio:.0f} %",
        ranges(record["ahead"][LEARNED]),
        ranges(record["ahead_in_time"][LEARNED]),
        f"{100 * float(record['behind'][LEARNED]):.2g} %",
        _below(record),
        f"{100 * share:.1f} %",
        f"{overhead['fit_seconds']:.1f} + {overhead['finding_seconds']:.1f}",
    ]


def _machine(environment: Mapping[str, Any]) -> str:
    return f"{', '.join(environment['devices'])}, torch {environment['packages'].get('torch', '')}"


def _times(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.2f}"


def _below(record: Mapping[str, Any]) -> str:
    """After which numbers of steps the mean residual of each seed is below Anderson's."""
    curves = record["variants"][record["reported"]].get("curves")
    if "classic" not in record or not curves:
        return "not followed yet"
    classic = record["classic"]["anderson"]["residual"]["mean"]
    own = [curve["residual"]["mean"] for curve in curves]
    return ranges([k for k in range(1, len(classic)) if all(float(seed[k]) < float(classic[k]) for seed in own)])


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write(out: Path, names: list[str], command: str) -> None:
    """The table of all cases that were measured, here or before."""
    rows = [found for name in names if (found := row(name, out / name)) is not None]
    records = [record for name in names if (record := _read(out / name / REPORT)) is not None]
    machines = list(dict.fromkeys(_machine(record["environment"]) for record in records))
    text = (
        f"# Learned solvers beside Anderson\n\n`{command}`\n\n{'; '.join(machines)}. Times faster at the metric that "
        "Anderson has after 12 steps, within half a percent, means over seeds: than all of these steps, and than those "
        "that Anderson needs for as much. After which steps the metric is no worse than Anderson's after as many, and "
        "than what Anderson has in the same time. Residuals are means over held-out systems, below with each seed.\n\n"
    )
    lines = table(list(COLUMNS), [*rows, list(COLUMNS.values())])
    (out / "README.md").write_text(f"{text}{lines}\n", encoding="utf-8")
    print(f"written: {out / 'README.md'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the reports and the table")
    parser.add_argument("--work", type=Path, default=Path("runs/learned_solvers"), help="folder for copies of models")
    parser.add_argument("--data-dir", help="where data files are")
    parser.add_argument("--only", action="append", choices=CASES, help="this case, several times for several")
    parser.add_argument("--seeds", type=int, default=3, help="solvers of each recipe (3)")
    parser.add_argument("--seconds", type=float, help="for all of it; what there is then is kept")
    parser.add_argument("--add", default="", metavar="ARGUMENTS", help="more arguments for each report")
    arguments = parser.parse_args()
    began, names = time.perf_counter(), arguments.only or list(CASES)
    arguments.out.mkdir(parents=True, exist_ok=True)
    extra = (*shlex.split(arguments.add), "--seeds", str(arguments.seeds))
    data = ("--data-dir", arguments.data_dir) if arguments.data_dir else ()
    bench, failed = Bench(arguments.out, arguments.work, extra, data), []
    command = shlex.join(["python", "-m", "benchmarks.training.learned_solvers", *sys.argv[1:]])
    for name in names:
        left = None if arguments.seconds is None else began + arguments.seconds - time.perf_counter()
        if not bench.complete(name, CASES[name]) and (left is None or left > 0):
            failed += [] if bench.measure(name, CASES[name], left) else [name]
            write(arguments.out, list(CASES), command)
    write(arguments.out, list(CASES), command)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the rest was measured")


if __name__ == "__main__":
    main()
