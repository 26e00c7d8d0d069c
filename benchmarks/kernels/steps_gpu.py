"""Where the time of a captured solve goes beyond f: steps of solvers alone, solves of two lengths, and a profile.

    python -m benchmarks.kernels.steps_gpu --out benchmarks/results/<date>_steps

Rows "step" are one step of a solver on the state of an MDEQ preset or a DEQ-Transformer, replayed from a CUDA graph
after a cheap f, whose time is taken off: microseconds, launches, and the bandwidth that the least traffic of the step
(each array that it must see read or written once) would amount to; `--blocks`, `--warps` and `--evict` ask for other
kernels. Rows "learned" are likewise steps of learned solvers of the sizes that `hyper_solver_for` gives them, beside
Anderson's on the same states, from one iterate to another: "hyper" in float32 throughout, "half" with residuals
remembered in bfloat16, "bf16" with images in it too, "place" in float32 with iterates written over, as in solves to a
tolerance; of sequences also "low_rank" and "low_rank bf16", plain steps with a linear map of the residual. Rows "parts"
time bare evaluations of f and solves at two budgets, so that a line through both tells the cost per step from the cost
per solve, and how long the host is kept before a solve returns. Rows "profile" list the kernels of one replayed solve
beside those of as many bare evaluations of f: what is in one list and not in the other is the solver's, and what is in
both and takes longer in one is f's. Rows "timeline" tell when, in one solve of a cell of the DEQ-Transformer, the host
called the driver and where the device had nothing to do.
"""

import argparse
import importlib
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import equipoise as eq
from benchmarks.kernels.mdeq_gpu import CASES, SOLVERS, Bench, Case, _wait
from equipoise._method import Method
from equipoise._problem import StateSpec
from equipoise._tape import tape_for
from equipoise.bench.cells import SHAPES
from equipoise.bench.cells import Bench as SequenceBench
from equipoise.bench.solver import bare as sequence_bare
from equipoise.ops import (
    AndersonMemory,
    HyperMemory,
    HyperParts,
    LowRankMemory,
    LowRankParts,
    Standing,
    anderson_step,
    hyper_step,
    low_rank_step,
    picard_settle,
)
from equipoise.solvers import HyperAnderson
from equipoise.solvers._hyper_config import HyperConfig

Row = dict[str, Any]
Work = Callable[[], Any]
Makers = dict[str, Callable[[int], Work]]

BUDGETS = (8, 24)
PROFILED = 12  # steps of a profiled solve
ALONE = 20  # steps in a graph
LISTED = 26
SHORTEST_GAP = 2.0  # microseconds of an idle device that are listed
STATES = {
    "tiny": (128, (24 * 32 * 32, 24 * 16 * 16)),
    "large": (96, (32 * 32 * 32, 64 * 16 * 16, 128 * 8 * 8, 256 * 4 * 4)),
    "small": (32, (128 * 256,)),
    "medium": (15, (150 * 416,)),
}
ALL: dict[str, eq.Solver] = {**SOLVERS, "damped": eq.Picard(0.9)}
# Bytes that a step moves per unknown at the least, float32 throughout: z and f(z) read once, what follows written once;
# the older residuals and images of Anderson read once, the newest written.
IDEAL = {"picard": 4 * 2, "damped": 4 * 4, "anderson": 4 * (2 + 5 + 2 + 5 + 2), "broyden": 4 * 4}


# Systems, leaves of each, inner sizes of the networks: DEQ-TrellisNet, two DEQ-Transformers, MDEQ.
LEARNED: dict[str, tuple[int, list[tuple[int, ...]], int]] = {
    "trellisnet": (12, [(70, 1400)], 64),
    "small": (12, [(70, 256)], 64),
    "wide": (15, [(150, 704)], 64),
    "tiny16": (16, [(24, 32, 32), (24, 16, 16)], 20),
    "tiny128": (128, [(24, 32, 32), (24, 16, 16)], 20),
    "large48": (48, [(32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4)], 64),
}
WAYS = ("anderson", "half", "low_rank", "hyper", "anderson bf16", "bf16", "low_rank bf16", "place")


# Steps alone


class Buffers:
    """What `Method.step` works on, with a cheap contraction for f: every step improves, as in a solve."""

    def __init__(self, name: str, solver: eq.Solver, device: torch.device, shrink: int) -> None:
        n, sizes = STATES[name]
        n = max(1, n // shrink)
        torch.manual_seed(0)
        self.method = Method(solver, eq.Stop(rtol=0, max_steps=ALONE), 1e-3)
        self.z, self.target, self.rate = ([torch.rand(n, size).to(device) for size in sizes] for _ in range(3))
        self.start = [leaf.clone() for leaf in self.z]
        self.standing = Standing.start(self.z)
        self.memory = self.method.memory(self.z)
        self.unknowns = n * sum(sizes)

    def run(self, steps: bool) -> None:
        """Evaluations of f, with steps or without."""
        self.standing.restart(self.start)
        for leaf, start in zip(self.z, self.start, strict=True):
            leaf.copy_(start)
        if steps:
            self.method.run(self, self.f, ALONE, ends=True)  # type: ignore[arg-type]
            return
        for _ in range(ALONE):
            self.f(self.z)

    def f(self, z: list[Tensor]) -> list[Tensor]:
        """Some way to the target, another share of it for every unknown."""
        return [torch.lerp(*leaves) for leaves in zip(z, self.target, self.rate, strict=True)]


def step_row(name: str, solver: str, device: torch.device, rounds: int, shrink: int, given: dict[str, Any]) -> Row:
    """One step of a solver, the time of f taken off."""
    buffers = Buffers(name, ALL[solver], device, shrink)
    with cut(solver, given):
        return timed(buffers, IDEAL[solver] * buffers.unknowns, device, rounds)


def timed(buffers: Any, ideal: int, device: torch.device, rounds: int) -> Row:
    """Steps with f less f alone, both replayed."""
    tape: Any = tape_for(device)
    works = []
    for steps in (True, False):
        tape.rehearse(partial(buffers.run, steps))
        works.append(tape.record(partial(buffers.run, steps)))
    whole, bare = (milliseconds(work, device, rounds) for work in works)
    us = 1e3 * (whole - bare) / ALONE
    kernels, others = (profiled(work, device) for work in works)
    own = {kernel: times for kernel, times in kernels.items() if kernel not in others}
    return {
        "us": us,
        "launches": sum(map(len, own.values())) / ALONE,
        "ideal MB": ideal / 1e6,
        "GB/s": ideal / us / 1e3,
        "kernels": {f"{len(times) / ALONE:g} {kernel[:40]}": sum(times) / ALONE for kernel, times in own.items()},
    }


class Learned:
    """A learned solver's steps, or Anderson's, on one of the states of `LEARNED`, with the same cheap f."""

    def __init__(self, name: str, way: str, device: torch.device, shrink: int) -> None:
        n, shapes, inner = LEARNED[name]
        torch.manual_seed(0)
        state = tuple(torch.rand(max(1, n // shrink), *shape, device=device) for shape in shapes)
        spec = StateSpec.of(state)
        self.start = spec.flatten(state)
        self.z, self.spare = ([torch.empty_like(leaf) for leaf in self.start] for _ in range(2))
        self.target, self.rate = ([torch.rand_like(leaf) for leaf in self.start] for _ in range(2))
        self.half = torch.bfloat16 if way.endswith("bf16") else None
        if self.half is not None:
            self.target = [leaf.to(self.half) for leaf in self.target]
        self.way, self.standing = way, Standing.start(self.start)
        self.unknowns = sum(leaf.numel() for leaf in self.start)
        kind = "images" if len(shapes[0]) == 3 else "sequence"
        sizes = tuple(shape[0] if kind == "images" else shape[1] for shape in shapes)
        self.low_rank = way.startswith("low_rank")
        config = HyperConfig(kind, sizes, compressed=inner, width=inner, local=kind == "sequence")
        if self.low_rank:
            config = HyperConfig(kind, sizes, weights="newest", mixing=False, rank=inner)
        solver = HyperAnderson(config).to(device)
        with torch.no_grad():
            for parameter in solver.parameters():
                parameter.add_(0.003 * torch.randn_like(parameter))
        self.memory: Any
        if self.low_rank:
            self.parts: Any = LowRankParts.of(solver, spec)
            self.memory = LowRankMemory.empty(self.z, self.parts)
            return
        self.parts = HyperParts.of(solver, spec)
        residual = torch.bfloat16 if way in ("half", "bf16") else None
        self.memory = (
            AndersonMemory.empty(self.z, self.parts.memory, self.half)
            if way.startswith("anderson")
            else HyperMemory.empty(self.z, self.parts, residual, self.half)
        )

    def run(self, steps: bool) -> None:
        """Evaluations of f, with steps or without."""
        stop = eq.Stop(rtol=0, max_steps=ALONE)
        self.standing.restart(self.start)
        z, spare = self.z, self.spare
        for leaf, start in zip(z, self.start, strict=True):
            leaf.copy_(start)
        before = z
        for _ in range(ALONE):
            fz = self.f(z)
            if not steps:
                continue
            if self.way == "place":
                hyper_step(z, fz, self.memory, self.standing, self.parts, stop=stop)
                continue
            if self.way.startswith("anderson"):
                anderson_step(z, fz, self.memory, self.standing, stop=stop, out=spare)
            else:
                step = low_rank_step if self.low_rank else hyper_step
                step(z, fz, self.memory, self.standing, self.parts, stop=stop, out=spare)
            before, z, spare = z, spare, z
        if steps and self.way != "place":
            picard_settle(before, z, self.standing)

    def f(self, z: list[Tensor]) -> list[Tensor]:
        """Some way to the target, in the dtype that f has."""
        if self.half is None:
            return [torch.lerp(*leaves) for leaves in zip(z, self.target, self.rate, strict=True)]
        return [torch.add(b, a, alpha=0.5).to(self.half) for a, b in zip(z, self.target, strict=True)]

    @property
    def ideal(self) -> int:
        """Bytes that a step moves at the least, as in `IDEAL`; a learned step length needs the residuals once more."""
        if self.low_rank:
            return self.unknowns * (2 * 4 + (4 if self.half is None else 2))
        size = {name: getattr(self.memory, name)[0].element_size() for name in ("images", "residuals")}
        image, residual, m = size["images"], size["residuals"], self.parts.memory
        again = 0 if self.way.startswith("anderson") else (m - 1) * residual
        return self.unknowns * (2 * 4 + (m - 1) * (image + residual) + 2 * image + residual + again)


def learned_row(name: str, way: str, device: torch.device, rounds: int, shrink: int) -> Row:
    """One step of a learned solver, or of Anderson beside it."""
    buffers = Learned(name, way, device, shrink)
    row = timed(buffers, buffers.ideal, device, rounds)
    return row | {"residual": float(buffers.standing.residual.max())}


@contextmanager
def cut(solver: str, given: dict[str, Any]) -> Iterator[None]:
    """Other constants in the kernels of a solver."""
    operation = solver.replace("damped", "picard")
    module = importlib.import_module(f"equipoise.ops.{operation}.triton") if given else None
    before = {name: getattr(module, name) for name in given}
    vars(module).update(given) if module else None
    try:
        yield
    finally:
        vars(module).update(before) if module else None


# Solves


def mdeq_works(case: Case, device: torch.device, last: bool) -> Makers:
    """Bare evaluations and solves of MDEQ, by number of steps."""
    bench = Bench(case, device, last, half=True)
    solves: Makers = {name: partial(bench.solve, solver, "captured") for name, solver in SOLVERS.items()}
    return {"bare f": bench.bare} | solves


def sequence_works(name: str, device: torch.device) -> Makers:
    """Bare evaluations and solves of a cell of the DEQ-Transformer, by number of steps."""
    bench = SequenceBench(SHAPES[name], device)

    def solve(solver: eq.Solver, steps: int) -> Work:
        plan = eq.Plan(solver, stop=eq.Stop(rtol=0, max_steps=steps))

        def work() -> Any:
            with torch.no_grad(), bench.planned(plan, "captured") as deq, bench.autocast():
                return deq(*bench.inputs)

        return work

    def bare(steps: int) -> Work:
        with torch.no_grad():
            return sequence_bare(bench, steps)

    solves: Makers = {name: partial(solve, solver) for name, solver in SOLVERS.items()}
    return {"bare f": bare} | solves


def sequence_row(name: str, device: torch.device, rounds: int) -> Row:
    """`parts_row` of such a cell."""
    return parts_row(sequence_works(name, device), device, rounds)


def timeline_row(name: str, solver: str, device: torch.device) -> Row:
    """When the host calls the driver, and when the device has nothing to do, in a solve from an idle device on."""
    work = sequence_works(name, device)[solver](BUDGETS[1])
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("solve"):
            work()
        torch.cuda.synchronize()
    events = sorted(profiler.events() or (), key=lambda event: event.time_range.start)
    whole = next(event for event in events if event.name == "solve").time_range
    device_side = [event for event in events if str(event.device_type).endswith("CUDA") and event.name != "solve"]
    calls = [event for event in events if event.name.startswith(("cuda", "cuLaunch")) and event not in device_side]
    gaps, reached, last = [], whole.start, "begin of the solve"
    for event in device_side:
        if event.time_range.start - reached >= SHORTEST_GAP:
            gaps.append((reached - whole.start, event.time_range.start - reached, last[:40], event.name[:40]))
        reached, last = max(reached, event.time_range.end), event.name
    return {
        "calls": [(call.name, call.time_range.start - whole.start, call.time_range.elapsed_us()) for call in calls],
        "gaps": gaps,
        "host us": whole.elapsed_us(),
        "device us": reached - whole.start,
    }


def parts_row(makers: Makers, device: torch.device, rounds: int) -> Row:
    """Cost per step and per solve of each, by a line through two budgets."""
    few, many = BUDGETS
    found: Row = {}
    for name, make in makers.items():
        times, host = {}, {}
        for steps in BUDGETS:
            work = make(steps)
            work()
            work()
            times[steps] = milliseconds(work, device, rounds)
            host[steps] = milliseconds(work, device, rounds, until_idle=False)
        slope = (times[many] - times[few]) / (many - few)
        found[name] = {
            "us per step": 1e3 * slope,
            "us per solve": 1e3 * (times[few] - few * slope),
            "host us": 1e3 * host[many],
            "ms": times,
        }
    base = found["bare f"]
    for row in found.values():
        row["over f"] = row["us per step"] / base["us per step"] - 1
        row["over f, whole"] = row["ms"][many] / base["ms"][many] - 1
    return found


def profile_row(makers: Makers, solver: str, device: torch.device) -> Row:
    """Kernels of a replayed solve beside those of bare evaluations."""
    lists: dict[str, dict[str, list[float]]] = {}
    spans: dict[str, dict[str, float]] = {}
    for name in ("bare f", solver):
        work = makers[name](PROFILED)
        for _ in range(3):
            work()
        _wait(device)
        spans[name] = {}
        lists[name] = profiled(work, device, spans[name])
    names = sorted(set().union(*lists.values()), key=lambda kernel: -sum(lists[solver].get(kernel, [])))
    table = [
        [kernel[:100], *(value for way in (solver, "bare f") for value in _sums(lists[way].get(kernel, [])))]
        for kernel in names
    ]
    return {"table": table, "spans": spans}


def _sums(times: list[float]) -> tuple[int, float]:
    return len(times), sum(times)


# Measuring


def milliseconds(work: Work, device: torch.device, rounds: int, until_idle: bool = True) -> float:
    """Median time from an idle device on, to an idle device or until the host is free."""
    times = []
    for _ in range(rounds + 1):
        _wait(device)
        started = time.perf_counter()
        work()
        if until_idle:
            _wait(device)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def profiled(work: Work, device: torch.device, span: dict[str, float] | None = None) -> dict[str, list[float]]:
    """Microseconds of every kernel and copy of the work; in `span` from the first to the last, and the sum of gaps."""
    if device.type != "cuda":
        work()
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if str(event.device_type).endswith("CUDA")]
    kernels: dict[str, list[float]] = {}
    for event in events:
        kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    if span is not None and events:
        ranges = sorted((event.time_range.start, event.time_range.end) for event in events)
        busy, reached = 0.0, ranges[0][0]
        for start, end in ranges:
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        span |= {"us": reached - ranges[0][0], "busy us": busy, "kernels": len(events)}
    return kernels


def ranked(kernels: dict[str, list[float]], most: int) -> list[tuple[str, int, float]]:
    """Those of the kernels that take most time: name, launches and microseconds."""
    found = [(name, *_sums(times)) for name, times in kernels.items()]
    return sorted(found, key=lambda kernel: -kernel[2])[:most]


# The report


def rows_of(device: torch.device, options: argparse.Namespace) -> dict[str, Work]:
    rounds, shrink = options.rounds, 1 if device.type == "cuda" else 32
    found: dict[str, Work] = {}
    cases = {k: replace(c, batch=max(1, c.batch // shrink)) for k, c in CASES.items()}
    made: dict[str, Any] = {}

    def mdeq(name: str, last: bool) -> Any:
        key = f"{name} {last}"
        if key not in made:
            made[key] = mdeq_works(cases[name], device, last)
        return made[key]

    def parts(name: str, last: bool) -> Row:
        return parts_row(mdeq(name, last), device, rounds)

    def profile(name: str, solver: str) -> Row:
        return profile_row(mdeq(name, False), solver, device)

    def step(name: str, solver: str, **given: Any) -> None:
        title = " ".join(["step", name, solver, *(f"{what.lower()} {value}" for what, value in given.items())])
        found[title] = partial(step_row, name, solver, device, rounds, shrink, given)

    for solver in ("picard", "anderson"):
        found[f"profile tiny {solver}"] = partial(profile, "tiny", solver)
    for name, solver in itertools.product(("tiny", "large"), ALL):
        step(name, solver)
    for way, name in itertools.product(WAYS, LEARNED):
        if way.startswith("low_rank") and len(LEARNED[name][1][0]) == 3:
            continue  # of positions only
        found[f"learned {name} {way}"] = partial(learned_row, name, way, device, rounds, shrink)
    for name in cases:
        found[f"parts {name}"] = partial(parts, name, False)
    if device.type == "cuda":
        for solver in SOLVERS:
            found[f"timeline small {solver}"] = partial(timeline_row, "small", solver, device)
        for name in ("small", "medium"):
            found[f"parts {name}"] = partial(sequence_row, name, device, rounds)
    found["profile large picard"] = partial(profile, "large", "picard")
    for name, solver in itertools.product(("small", "medium"), ALL):
        step(name, solver)
    for name in cases:
        found[f"parts {name} last"] = partial(parts, name, True)
    for name, solver in itertools.product(("tiny", "large"), ("picard", "anderson")):
        for block, warps in itertools.product(options.blocks, options.warps):
            step(name, solver, BLOCK=block, WARPS=warps)
    if options.evict:
        for name in STATES:
            step(name, "anderson", EVICT="evict_first")
    return found


def lines(name: str, row: Row) -> list[str]:
    if "failed" in row:
        return [f"{name:34} FAILED {row['failed']}"]
    if name.startswith(("step", "learned")):
        parts = ", ".join(f"{kernel} {us:.1f}" for kernel, us in row["kernels"].items())
        return [
            f"{name:34} {row['us']:7.1f} us, {row['launches']:4.1f} launches, ideal {row['ideal MB']:6.1f} MB "
            f"at {row['GB/s']:6.0f} GB/s   {parts}"
        ]
    if name.startswith("parts"):
        return [
            f"{name:20} {way:9} {part['us per step']:7.1f} us a step ({100 * part['over f']:+5.1f} %), "
            f"{part['us per solve']:7.1f} us a solve, host {part['host us']:7.1f} us, "
            f"{BUDGETS[1]} steps {part['ms'][BUDGETS[1]]:.3f} ms ({100 * part['over f, whole']:+5.1f} %)"
            for way, part in row.items()
        ]
    if name.startswith("timeline"):
        return [
            f"{name:28} host {row['host us']:.0f} us, device until {row['device us']:.0f} us",
            *(f"    {start:8.1f} us: {call} for {us:.1f} us" for call, start, us in row["calls"]),
            *(f"    {start:8.1f} us: idle for {us:.1f} us, {last} to {then}" for start, us, last, then in row["gaps"]),
        ]
    head = [f"{name:28} {way}: {span}" for way, span in row["spans"].items()]
    shown = row["table"][:LISTED]
    return head + [
        f"    {count:5} x {us / max(1, count):8.2f} us = {us:9.1f} us   bare {others:5} = {bare:9.1f} us   {kernel}"
        for kernel, count, us, others, bare in shown
    ]


def numbers(text: str) -> Sequence[int]:
    return tuple(int(part) for part in text.split(",") if part)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for steps.json")
    parser.add_argument("--only", default="", help="the rows whose names contain this, or one of several by commas")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each candidate")
    parser.add_argument("--seconds", type=float, default=40.0, help="no row begins later than this")
    parser.add_argument("--blocks", type=numbers, default=(), help="more sizes of blocks, by commas")
    parser.add_argument("--warps", type=numbers, default=(4, 8), help="warps for each of them, by commas")
    parser.add_argument("--evict", action="store_true", help="also with the rings of Anderson read past the caches")
    parser.add_argument("--device", default="cuda", help="'cpu' tries the script itself")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("steps_gpu: needs a CUDA device; --device cpu tries the script itself.")
    header = {
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }
    print(header)
    rows: dict[str, Row] = {}
    started = time.monotonic()
    for name, measure in rows_of(device, options).items():
        if not any(part in name for part in options.only.split(",")):
            continue
        if time.monotonic() - started > options.seconds:
            print(f"{name:34} no time left")
            continue
        try:
            rows[name] = measure()
        except Exception as error:  # the others are still wanted
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            traceback.print_exc()
        print("\n".join(lines(name, rows[name])), f"  [{time.monotonic() - started:.0f} s]", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "steps.json").write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    raise SystemExit(1 if any("failed" in row for row in rows.values()) else 0)


if __name__ == "__main__":
    main()
