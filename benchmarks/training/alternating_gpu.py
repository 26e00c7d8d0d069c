"""How much time a learned solver saves in training: runs with and without one, in turns on one device.

    python -m benchmarks.training.alternating_gpu --data-dir DATA --out benchmarks/results/<date>_alternating

Each seed trains twice by recipes/ptb_trellisnet_alternating.toml, as it is (`on`) and with `alternate.start=none`
(`off`); which comes first changes from seed to seed. A short run compiles the kernels before. Runs whose logs are in
the folder already are not made again, so that a call that was cut off is continued by the same call.

Seconds are counted from the log line of step 100 on, when steps are recorded. `training` has all fits in it and no
evaluations, `with evaluations` both. `equal work` is what both sides do before there is a learned solver: if it differs
as much as the sides do, the device was busy. The perplexity is that of the validation text.
"""

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from equipoise.train.loop import train
from equipoise.train.recipe import Recipe

RECIPE = Path("recipes/ptb_trellisnet_alternating.toml")
FIRST, EQUAL = 100, 1_200  # steps: counting begins; there is no learned solver yet
SIDES = {"on": (), "off": ("alternate.start=none",)}
COMPILING = ("train.steps=160", "opening.steps=50", "alternate.start=100", "train.evaluate_every=160")

Row = dict[str, Any]


def summary(lines: list[Row]) -> Row:
    """What a log says of a run."""
    steps = {line["step"]: line for line in lines if "train" in line}
    valid = [line for line in lines if "valid" in line]
    evaluating = sum(line["seconds"] - steps[line["step"]]["seconds"] for line in valid)
    last = steps[max(steps)]
    whole = valid[-1]["seconds"] - steps[FIRST]["seconds"]
    late = [line["train"]["seconds_per_step"] for step, line in steps.items() if step > EQUAL + FIRST]
    return {
        "training": whole - evaluating,
        "with evaluations": whole,
        "equal work": steps[EQUAL]["seconds"] - steps[FIRST]["seconds"] if EQUAL in steps else None,
        "ms per step": 1e3 * statistics.median(late) if late else None,
        "first fit": next((line["hyper"]["seconds"] for line in lines if "hyper" in line), None),
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


def run(side: str, seed: int, log: Path, data_dir: str | None, overrides: list[str]) -> None:
    """Train once; the log is kept only if the run came to its end."""
    recipe = Recipe.read(RECIPE, [f"train.seed={seed}", *overrides, *SIDES[side]])
    with tempfile.TemporaryDirectory() as temporary:
        outcome = train(recipe, Path(temporary) / "run", data_dir=data_dir)
        if outcome.step == recipe.train.steps:
            shutil.copy(Path(temporary) / "run" / "metrics.jsonl", log)
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
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "cpu"
    header = {"device": machine, "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M")}
    print({**header, "set": arguments.set})
    turns = [tuple(SIDES), tuple(reversed(SIDES))]
    sides = [(side, seed) for seed in range(arguments.seeds) for side in turns[seed % 2]]
    if any(not (arguments.out / f"{side}_{seed}.jsonl").exists() for side, seed in sides):
        with tempfile.TemporaryDirectory() as temporary:
            run("on", 0, Path(temporary) / "compiling.jsonl", arguments.data_dir, [*arguments.set, *COMPILING])
        print(f"compiled after {time.perf_counter() - started:.0f} s", flush=True)
    rows: dict[str, Row] = {}
    longest = 0.0
    for side, seed in sides:
        log, begun = arguments.out / f"{side}_{seed}.jsonl", time.perf_counter()
        if not log.exists():
            if arguments.seconds is not None and begun - started + longest > arguments.seconds:
                print(f"{side}_{seed}: no time left")
                continue
            run(side, seed, log, arguments.data_dir, arguments.set)
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
