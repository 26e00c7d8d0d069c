"""What a training step costs on one CUDA device, and on the host, with and without `train.capture`.

    python -m benchmarks.kernels.step_gpu --out benchmarks/results/<date>_step

Steps are those of the training loop, fetching of batches included, of a run without evaluations: the sizes of
recipes/ptb_trellisnet.toml with 16 + 12 fixed steps on random words, and of recipes/ptb_trellisnet_alternating.toml
with a learned solver and without; MDEQ TINY with 12 + 12, LARGE and that of CamVid by their recipes, on images of
shapes. With `--profile` the kernels of a replayed step follow, most time first.
`ms` is wall time of many steps in a row; `host ms` is how long a step keeps the host, from an idle device on, median.
Both ways start from one seed and see the same batches; a time is reported beside whether the losses of an early step,
one that is replayed, agree (later ones need not: before training f of MDEQ is no contraction, and rounding grows).
"""

import argparse
import gc
import json
import math
import random
import statistics
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.steps_gpu import profiled, ranked
from equipoise.train.loop import _Run, setup
from equipoise.train.recipe import Recipe

PREPARED = 12  # steps before the first measurement
IN_A_ROW = 60
ALONE = 20
SPLITS = {"train": 260_000, "valid": 4_000, "test": 4_000}
WORDS = 10_000
COMPARED = 6  # the step whose losses are compared, by then replayed
LISTED = 40  # kernels of a profile
AGREE = {"no": 1e-2, "bf16": 5e-2}

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A recipe, and what is made of it: overrides, and smaller ones for a dry run."""

    recipe: str
    overrides: tuple[str, ...]
    small: tuple[str, ...]


FIXED_TRELLIS = ("stop.rtol=0.0", "stop.max_steps=16", "adjoint.stop.rtol=0.0", "adjoint.stop.max_steps=12")
FIXED_MDEQ = ("stop.rtol=0.0", "stop.max_steps=12", "adjoint.stop.rtol=0.0", "adjoint.stop.max_steps=12")
CLASSES = (
    'task.data="shapes"',
    'task.options={size=32, train_size=1024, test_size=64, labels="classes"}',
    "warmup.steps=0",
)
MASKS = ('task.data="shapes"', "task.options={size=480, train_size=64, test_size=8}", "warmup.steps=0")
IMAGES = (
    *CLASSES,
    "solver={name='anderson', memory=5}",
    "adjoint.solver={name='anderson', memory=5}",
)
SMALL_TRELLIS = ("model.embedding_size=16", "model.hidden_size=16", "task.batch_size=4", "task.length=8")
ALTERNATING = (
    "opening.steps=1",
    "alternate.start=2",
    "alternate.first=5",
    "alternate.fit.pool=5",
    "alternate.follow=none",
)
UNDER_ANDERSON = (
    "alternate.solver.weights=least_squares",
    "alternate.solver.local=false",
    "alternate.solver.memory=3",
    "alternate.fit.plain=true",
)
SMALL_MDEQ = ("task.batch_size=4", "stop.max_steps=2", "adjoint.stop.max_steps=2")
NARROW = ("model.channels=[8,8,8,8]", "train.precision=no")
CASES = {
    "ptb_trellisnet bf16": Case(
        "ptb_trellisnet",
        FIXED_TRELLIS,
        SMALL_TRELLIS,
    ),
    "ptb_trellisnet classic": Case(
        "ptb_trellisnet_alternating", ("opening.steps=1", "alternate.start=none"), SMALL_TRELLIS
    ),
    "ptb_trellisnet learned": Case("ptb_trellisnet_alternating", ALTERNATING, SMALL_TRELLIS),
    "ptb_trellisnet accelerated": Case("ptb_trellisnet_alternating", (*ALTERNATING, *UNDER_ANDERSON), SMALL_TRELLIS),
    "mdeq_cifar_large bf16": Case(
        "cifar10_large_short", CLASSES, (*SMALL_MDEQ, *NARROW, "model.head_channels=[2,2,2,2]")
    ),
    "mdeq_camvid_small bf16": Case(
        "camvid_small", MASKS, (*SMALL_MDEQ, *NARROW, "task.crop=[32, 48]", "task.options.size=32")
    ),
    "mdeq_cifar_tiny fp32": Case("cifar10_tiny", (*IMAGES, *FIXED_MDEQ), SMALL_MDEQ),
    "mdeq_cifar_tiny bf16": Case("cifar10_tiny", (*IMAGES, *FIXED_MDEQ, "train.precision=bf16"), SMALL_MDEQ),
}


def write_words(folder: Path, small: bool) -> Path:
    """A corpus of random words, each of them at least once in the training text."""
    draw, words = random.Random(0), [f"w{number}" for number in range(WORDS)]
    folder.mkdir(parents=True)
    for split, count in SPLITS.items():
        drawn = [*(words if split == "train" else []), *draw.choices(words, k=count // (50 if small else 1))]
        lines = (" ".join(drawn[start : start + 20]) for start in range(0, len(drawn), 20))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def run_of(case: Case, corpus: Path, out: Path, capture: bool, small: bool) -> _Run:
    """The objects of a run, before its first step."""
    overrides = [*case.overrides, "train.steps=100000", f"train.capture={str(capture).lower()}"]
    if "trellisnet" in case.recipe:
        overrides.append(f"task.corpus={json.dumps(str(corpus))}")
    given = Recipe.read(Path("recipes") / f"{case.recipe}.toml", [*overrides, *(case.small if small else ())])
    accelerator = setup(given, out, resume=False)
    return _Run(given, given.make_task(None), out, accelerator, resume=False)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(run: _Run, small: bool, profile: bool) -> Row:
    """Times of steps, the loss of an early one, and perhaps the kernels of a late one."""

    def step() -> torch.Tensor:
        run._fit_solver(None)
        found = run._train_step()
        run.state.step += 1
        return found["loss"]

    losses = [step() for _ in range(PREPARED)]
    in_a_row, alone = (3, 3) if small else (IN_A_ROW, ALONE)
    wait()
    started = time.perf_counter()
    for _ in range(in_a_row):
        step()
    wait()
    whole = 1e3 * (time.perf_counter() - started) / in_a_row
    host = []
    for _ in range(alone):
        started = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - started))
        wait()
    guard = run.state.stepper.metrics()
    row: Row = {
        "ms": whole,
        "host ms": statistics.median(host),
        "loss": float(losses[COMPARED]),
        "skipped": guard["skipped"],
    }
    if run.captured is not None:
        row |= {"replayed": run.captured.replayed, "fallbacks": dict(run.captured.fallbacks)}
    if profile:
        found = profiled(step, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        row["kernels"] = [
            {"kernel": name[:100], "count": count, "ms": us / 1e3} for name, count, us in ranked(found, LISTED)
        ]
    return row


def rows_of(name: str, case: Case, folder: Path, small: bool, profile: bool) -> dict[str, Row]:
    """A case both ways, and whether they agree."""
    rows: dict[str, Row] = {}
    for capture in (False, True):
        run = run_of(case, folder / "words", folder / f"{name} {capture}", capture, small)
        rows["captured" if capture else "ordinary"] = row = measure(run, small, profile and capture)
        row["precision"] = run.recipe.train.precision
        del run
        gc.collect()  # a run and its recordings refer to each other
    ordinary, captured = rows["ordinary"], rows["captured"]
    close = math.isclose(ordinary["loss"], captured["loss"], rel_tol=AGREE[captured["precision"]])
    captured["check"] = close and (small or captured.get("replayed", 0) > IN_A_ROW)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for step.json")
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a replayed step too")
    parser.add_argument("--dry", action="store_true", help="small sizes and few steps, on any device")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("step_gpu: needs a CUDA device; with --dry it is a dry run.")
    machine = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "cpu"
    header = {"device": machine, "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M")}
    print(header)
    print(f"{'step':24} {'way':10} {'ms':>8} {'host ms':>8} {'loss':>9}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        write_words(Path(temporary) / "words", arguments.dry)
        for name, case in CASES.items():
            if arguments.only not in name:
                continue
            try:
                results[name] = rows_of(name, case, Path(temporary), arguments.dry, arguments.profile)
            except Exception as error:  # the others are still wanted
                traceback.print_exc()
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
                continue
            for way, row in results[name].items():
                mark = "" if row.get("check", True) else f"  CHECK RED {row.get('fallbacks', '')}"
                print(f"{name:24} {way:10} {row['ms']:8.3f} {row['host ms']:8.3f} {row['loss']:9.4f}{mark}")
                for kernel in row.get("kernels", ()):
                    print(f"    {kernel['ms']:8.3f} ms {kernel['count']:5} × {kernel['kernel']}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "step.json").write_text(json.dumps({**header, "rows": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
