"""What the captured engine costs besides f on one CUDA device: per solve, on the host, and for systems that are done.

    python -m benchmarks.kernels.engine_gpu --out benchmarks/results/<date>_engine

Rows of a shape: a solve of 24 steps (fixed), and one to a tolerance, each over as many bare evaluations of f, one on
the result of the other, replayed from one CUDA graph. `host` is the time until the call returns, and `launches` what it
launches besides graphs, by the profiler. The skewed batch, 63 easy systems and a hard one, is compared with bare
evaluations of f on those systems that are unfinished at each step. Times are from an idle device to an idle device,
medians, taken in turns; a time is reported only beside a result that agrees with the eager engine's.
"""

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import equipoise as eq
from equipoise._tape import tape_for
from equipoise.bench.cells import SHAPES, Bench

STEPS = 24
ROUNDS = 15
SOLVERS: dict[str, eq.Solver] = {"picard": eq.Picard(), "anderson": eq.Anderson()}
FIXED = eq.Stop(rtol=0, max_steps=STEPS)
BATCH, HARD = 64, 0.2  # systems, and the strength of the injection into the hard one
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")

Row = dict[str, Any]
Work = Callable[[], Any]


# Measuring


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(works: dict[str, Work], device: torch.device, rounds: int) -> dict[str, tuple[float, float]]:
    """Medians of each: until the device is idle again, and until the call returns."""
    whole: dict[str, list[float]] = {name: [] for name in works}
    host: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            _wait(device)
            started = time.perf_counter()
            work()
            host[name].append(1e3 * (time.perf_counter() - started))
            _wait(device)
            whole[name].append(1e3 * (time.perf_counter() - started))
    return {name: (statistics.median(whole[name]), statistics.median(host[name])) for name in works}


def launches(work: Work, device: torch.device) -> dict[str, int]:
    """What a call launches: graphs, and anything else."""
    if device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize(device)
    counts = {event.key: event.count for event in profile.key_averages()}
    others = sum(count for name, count in counts.items() if name.startswith(LAUNCHES))
    return {"graphs": counts.get("cudaGraphLaunch", 0), "others": others}


def bare(bench: Bench, sizes: list[int]) -> Work:
    """Evaluations of f on so many systems each, the first ones of the batch, recorded once and replayed."""
    injection, *rest = bench.inputs
    z = bench.start()

    def run() -> None:
        value = z
        with bench.autocast():
            for size in sizes:
                value = bench.deq.cell(value[:size], injection[:size], *rest).to(z.dtype)

    tape: Any = tape_for(bench.device)
    tape.rehearse(run)
    return tape.record(run)  # type: ignore[no-any-return]


def solve(bench: Bench, solver: eq.Solver, stop: eq.Stop, engine: str = "captured") -> Callable[[], eq.Solution]:
    plan = eq.Plan(solver, stop=stop)

    def work() -> Any:
        with bench.planned(plan, engine) as deq, bench.autocast():
            return deq(*bench.inputs)

    return work


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# Rows


def shape_rows(name: str, device: torch.device, rounds: int) -> dict[str, Row]:
    """Solves by a fixed budget and to a tolerance."""
    bench, rows = Bench(SHAPES[name], device), {}
    half = bench.shape.half
    stops = {"fixed": FIXED, "rtol": eq.Stop(rtol=2e-2 if half else 1e-3, max_steps=100)}
    for solver_name, solver in SOLVERS.items():
        for stop_name, stop in stops.items():
            row: Row = {}
            truth, work = solve(bench, solver, stop, "eager")(), solve(bench, solver, stop)
            found = [work() for _ in range(4)][-1]  # records, replays, and learns how long a solve takes
            row["error"] = distance(found.value, truth.value)
            row["check"] = row["error"] <= (5e-2 if half else 1e-3) and not bench.deq.capture.fallbacks
            row["evaluations"] = found.stats.nfe
            row["eager evaluations"] = truth.stats.nfe
            works = {"solve": work, "bare": bare(bench, [bench.shape.batch] * found.stats.nfe)}
            works["bare"]()
            times = milliseconds(works, device, rounds)
            row["ms"], row["host ms"], row["bare ms"] = *times["solve"], times["bare"][0]
            row["ratio"] = row["ms"] / row["bare ms"]
            row["launches"] = launches(work, device)
            rows[f"{name}, {solver_name}, {stop_name}"] = row
    return rows


def skewed_row(name: str, device: torch.device, rounds: int) -> Row:
    """A batch with one hard system: the captured engine over bare evaluations of what is unfinished."""
    shape = SHAPES[name].replace(batch=BATCH)
    strength = torch.ones(BATCH)
    strength[0] = HARD  # the first, so that the last ones running are a slice of the batch
    bench = Bench(shape, device, strength)
    stop = eq.Stop(rtol=2e-2 if shape.half else 1e-3, max_steps=100)
    truth, work = solve(bench, eq.Anderson(), stop, "eager")(), solve(bench, eq.Anderson(), stop)
    for _ in range(8):  # smaller loops are recorded when they have been missed
        found = work()
    evaluations = truth.stats.steps + 1
    live = [int((evaluations > k).sum()) for k in range(int(evaluations.max()))]
    works = {"solve": work, "bare": bare(bench, live), "all": bare(bench, [BATCH] * len(live))}
    works["eager"] = solve(bench, eq.Anderson(), stop, "eager")
    for other in works.values():
        other()
    times = milliseconds(works, device, rounds)
    fz = bench.f(found.value)
    worst = float(((fz - found.value).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1)).max())
    shapes = [shape for shape in bench.deq.capture._shapes.values() if shape.recordings]
    return {
        "worst residual": worst,
        "check": worst <= 1.1 * stop.rtol and not bench.deq.capture.fallbacks,
        "live": live,
        "levels": [sorted(shape.recordings[0].forward.levels) for shape in shapes],
        "evaluations": found.stats.nfe,
        "ms": times["solve"][0],
        "host ms": times["solve"][1],
        "bare ms": times["bare"][0],
        "ratio": times["solve"][0] / times["bare"][0],
        "whole batch ms": times["all"][0],
        "eager ms": times["eager"][0],
        "launches": launches(work, device),
    }


def line(name: str, row: Row) -> str:
    if "error" in row and "ms" not in row:
        return f"{name:28} {row['error']}"
    counts = row["launches"]
    mark = "" if row["check"] else "  WRONG"
    return (
        f"{name:28} {row['ms']:8.3f} {row['bare ms']:8.3f} {row['ratio']:6.3f} {1e3 * row['host ms']:8.0f} "
        f"{row['evaluations']:5} {counts.get('graphs', 0):6} {counts.get('others', 0):8}{mark}"
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for engine.json")
    parser.add_argument("--shapes", nargs="+", default=["small", "medium"], choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda", help="cpu runs the recordings again, which is slow: a dry run")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_cuda = device.type == "cuda"
    if on_cuda and not torch.cuda.is_available():
        raise SystemExit("engine_gpu: needs a CUDA device; with --device cpu it is a dry run.")
    rounds = ROUNDS if on_cuda else 1
    machine = torch.cuda.get_device_properties(0).name if on_cuda else "cpu"
    header = {"device": machine, "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M")}
    print(header)
    print(f"{'solve':28} {'ms':>8} {'bare ms':>8} {'ratio':>6} {'host µs':>8} {'nfe':>5} {'graphs':>6} {'launches':>8}")
    rows: dict[str, Row] = {}
    for name in arguments.shapes:
        for case in (shape_rows, lambda *args: {f"{args[0]}, anderson, skewed": skewed_row(*args)}):
            try:
                new = case(name, device, rounds)
            except Exception as error:
                new = {f"{name}, failed": {"error": f"{type(error).__name__}: {error}"[:300], "check": False}}
                traceback.print_exc()
            rows |= new
            for key, row in new.items():
                print(line(key, row), flush=True)
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "engine.json").write_text(json.dumps({"header": header, "rows": rows}, indent=1))
    raise SystemExit(not all(row["check"] for row in rows.values()))


if __name__ == "__main__":
    main()
