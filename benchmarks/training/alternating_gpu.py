"""How much time a learned solver saves in training: runs with and without one, in turns on one device.

    python -m benchmarks.training.alternating_gpu --data-dir DATA --out benchmarks/results/<date>_alternating

Each seed trains twice by recipes/ptb_trellisnet_alternating.toml, as it is (`on`) and with `alternate.start=none`
(`off`); which comes first changes from seed to seed. A short run compiles the kernels before. Runs whose logs are in
the folder already are not made again, so that a call that was cut off is continued by the same call. Beside each log
its settings and device are kept: one that was made otherwise is refused.

Seconds are counted from the log line of step 100 on, or the first one after that: steps are recorded by then.
`training` has all fits in it and no evaluations, `with evaluations` both. `equal work` is what both sides do before
there is a learned solver: if it differs as much as the sides do, the device was busy. The perplexity is that of the
validation text.
"""

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from equipoise.train.loop import train
from equipoise.train.recipe import Recipe
from equipoise.train.tracking import plain, write_json

RECIPE = Path("recipes/ptb_trellisnet_alternating.toml")
FIRST, EQUAL = 100, 1_200  # steps: counting begins; there is no learned solver yet
SIDES = {"on": (), "off": ("alternate.start=none",)}
COMPILING = ("train.steps=160", "opening.steps=50", "alternate.start=100", "train.evaluate_every=160")

Row = dict[str, Any]


def summary(lines: list[Row]) -> Row:
    """What a log says of a run."""
    steps = {line["step"]: line for line in lines if "train" in line}

    def seconds(step: int) -> float:
        return float(steps[max(known for known in steps if known <= step)]["seconds"])

    first, end = min(step for step in steps if step >= FIRST), max(steps)
    last, valid = steps[end], [line for line in lines if "valid" in line]
    evaluating = sum(line["seconds"] - seconds(line["step"]) for line in valid if line["step"] >= first)
    whole = valid[-1]["seconds"] - seconds(first)
    late = [line["train"]["seconds_per_step"] for step, line in steps.items() if step > EQUAL + FIRST]
    return {
        "training": whole - evaluating,
        "with evaluations": whole,
        "equal work": seconds(EQUAL) - seconds(first) if first < EQUAL <= end else None,
        "ms per step": 1e3 * statistics.median(late) if late else None,
        "first fit": next((fit["seconds"] for line in lines if "seconds" in (fit := line.get("hyper", {}))), None),
        "learned to the end": last["train"].get("learned_solver", False),
        "solver steps": last["train"]["forward"]["steps_p50"],
        "residual_p50": last["train"]["forward"]["residual_p50"],
        "residual_p95": last["train"]["forward"]["residual_p95"],
        "perplexity": valid[-1]["valid"]["perplexity"],
        "evaluation residual_p95": valid[-1]["valid"]["solve_residual_p95"],
        "fewer steps": {steps: found["perplexity"] for steps, found in valid[-1].get("valid_at", {}).items()},
    }


def saved(rows: dict[str, Row]) -> Row:
    """By which part each seed's run with a learned solver has less of something; of seeds that have run both ways."""
    seeds = [name.removeprefix("on_") for name in rows if name.startswith("on_") and f"off_{name[3:]}" in rows]
    found: Row = {}
    for what in ("training", "with evaluations", "ms per step", "equal work", "perplexity"):
        parts = {seed: _less(rows[f"on_{seed}"][what], rows[f"off_{seed}"][what]) for seed in seeds}
        known = [part for part in parts.values() if part is not None]
        if known:
            spread = statistics.stdev(known) if len(known) > 1 else None
            found[what] = {"mean": statistics.mean(known), "std": spread, "seeds": parts}
    return found


def _less(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else 1 - ours / theirs


def recipe_of(side: str, seed: int, overrides: list[str]) -> Recipe:
    """The settings of a run."""
    return Recipe.read(RECIPE, [*overrides, f"train.seed={seed}", *SIDES[side]])


def require_summable(recipe: Recipe) -> None:
    """Raise if the log of a run would not say enough."""
    settings = recipe.train
    every, evaluated = settings.log_every, settings.evaluate_every
    if evaluated % every:
        raise ValueError(
            f"train.evaluate_every={evaluated} is no multiple of train.log_every={every}, so that steps of training "
            f"would count as evaluation; give {max(1, round(evaluated / every)) * every}."
        )
    first = -(-FIRST // every) * every
    if settings.steps <= first:
        raise ValueError(
            f"train.steps={settings.steps} leaves nothing to count: the first line of the log that counts is that of "
            f"step {first}; give more steps."
        )


def made_by(recipe: Recipe, device: str) -> Row:
    """What a log depends on, to be kept beside it."""
    return dict(plain({"device": device, "torch": str(torch.__version__), **recipe.to_data()}))


def require_made_by(log: Path, wanted: Row) -> None:
    """Raise if a log was made otherwise."""
    record = log.with_suffix(".json")
    if not record.is_file():
        raise ValueError(f"{log} may be of other settings: there is no {record.name} beside it. Give another --out.")
    before, now = _flat(json.loads(record.read_text(encoding="utf-8"))), _flat(wanted)
    differing = [
        f"{name} was {before.get(name)!r}, now {now.get(name)!r}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise ValueError(f"{log} was made otherwise: {'; '.join(differing)}. Give another --out.")


def _flat(values: Mapping[str, Any], above: str = "") -> Row:
    """Values by their whole names, `train.steps`."""
    found: Row = {}
    for name, value in values.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found


def run(recipe: Recipe, log: Path, data_dir: str | None, made: Row) -> None:
    """Train once; the log is kept only if the run came to its end."""
    with tempfile.TemporaryDirectory() as temporary:
        outcome = train(recipe, Path(temporary) / "run", data_dir=data_dir)
        if outcome.step == recipe.train.steps:
            write_json(log.with_suffix(".json"), made)
            partial = log.with_suffix(".partial")
            shutil.copy(Path(temporary) / "run" / "metrics.jsonl", partial)
            partial.replace(log)
    gc.collect()  # a run and its recordings refer to each other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the logs and alternating.json")
    parser.add_argument("--data-dir", help="where data files are")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (3)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes for all runs")
    parser.add_argument("--seconds", type=float, help="begin no run that would end after so many")
    arguments = parser.parse_args()
    started = time.perf_counter()
    machine = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "cpu"
    header = {"device": machine, "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M")}
    print({**header, "set": arguments.set})
    turns = [tuple(SIDES), tuple(reversed(SIDES))]
    sides = [(side, seed) for seed in range(arguments.seeds) for side in turns[seed % 2]]
    try:
        recipes = {arguments.out / f"{side}_{seed}.jsonl": recipe_of(side, seed, arguments.set) for side, seed in sides}
        for log, recipe in recipes.items():
            require_summable(recipe)
            if log.exists():
                require_made_by(log, made_by(recipe, machine))
    except ValueError as error:
        raise SystemExit(f"alternating_gpu: {error}") from error
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not all(log.exists() for log in recipes):
        with tempfile.TemporaryDirectory() as temporary:
            compiling = recipe_of("on", 0, [*arguments.set, *COMPILING])
            run(compiling, Path(temporary) / "compiling.jsonl", arguments.data_dir, {})
        print(f"compiled after {time.perf_counter() - started:.0f} s", flush=True)
    rows: dict[str, Row] = {}
    longest = 0.0
    for log, recipe in recipes.items():
        begun = time.perf_counter()
        if not log.exists():
            if arguments.seconds is not None and begun - started + longest > arguments.seconds:
                print(f"{log.stem}: no time left")
                continue
            run(recipe, log, arguments.data_dir, made_by(recipe, machine))
            longest = max(longest, time.perf_counter() - begun)
        if log.exists():
            rows[log.stem] = row = summary([json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()])
            print(log.stem, json.dumps(row), flush=True)
            result = {**header, "set": arguments.set, "saved": saved(rows), "rows": rows}
            (arguments.out / "alternating.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for what, found in saved(rows).items():
        spread = "" if found["std"] is None else f" ± {100 * found['std']:.1f}"
        print(f"{what}: {100 * found['mean']:.1f}{spread} % less with a learned solver, {len(found['seeds'])} seeds")


if __name__ == "__main__":
    main()
