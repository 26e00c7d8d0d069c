"""What solves of MDEQ cost on one CUDA device: over bare evaluations of f, as training steps, and in memory.

    python -m benchmarks.kernels.mdeq_gpu --out benchmarks/results/<date>_mdeq

Budgets are fixed, so both engines do the same work. The bare f is as many evaluations, one on the result of the other,
replayed from one CUDA graph. Candidates of a row are timed in turns, medians are reported, and only for an engine whose
results agree with the other's over a few steps (f is not a contraction before training: over many steps rounding
grows). A row that fails is listed with its error, and those that the time limit does not leave room for by name.
"""

import argparse
import json
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import equipoise as eq
from equipoise._scope import SolveScope
from equipoise._tape import tape_for
from equipoise.models.mdeq import MDEQ
from equipoise.models.registry import create_model

STEPS = 18
BACKWARD = 20
AGREEING = 4  # steps over which both engines are compared
SOLVERS: dict[str, eq.Solver] = {"picard": eq.Picard(), "anderson": eq.Anderson(), "broyden": eq.Broyden()}
BUDGETS = (10, 40)

Row = dict[str, Any]
Work = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A preset at a batch size, and the overhead over the bare f aimed at."""

    preset: str
    batch: int
    goal: float


CASES = {"tiny": Case("mdeq_cifar_tiny", 128, 0.25), "large": Case("mdeq_cifar_large", 96, 0.10)}


# What is measured


class Bench:
    """A model with a batch on a device, in a layout and a precision."""

    def __init__(self, case: Case, device: torch.device, last: bool, half: bool) -> None:
        torch.manual_seed(0)
        layout = torch.channels_last if last else torch.contiguous_format
        model = create_model(case.preset)
        assert isinstance(model, MDEQ)
        self.model, self.device, self.half = model.to(device, memory_format=layout), device, half
        self.images = torch.randn(case.batch, 3, 32, 32, device=device).contiguous(memory_format=layout)
        self.labels = torch.randint(10, (case.batch,), device=device)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    def injection(self) -> tuple[Tensor, ...]:
        # By the statistics of the batch: with those of an untrained model hardly anything is injected.
        with torch.no_grad(), self.autocast():
            return self.model.train().inject(self.images)

    def bare(self, steps: int) -> Work:
        """Evaluations of f in eval mode, recorded once and replayed."""
        deq, x = self.model.eval().deq, self.injection()
        cell = deq._compiled or deq.cell
        self.model.eval()
        z, scope = deq.start(x), SolveScope()
        with torch.no_grad(), scope, self.autocast():
            deq.cell(z, x)
        # Leaves that want a gradient: those autocast casts once, as recordings do.
        scope._derived.update({k: v.detach().requires_grad_() for k, v in scope._derived.items()})

        def run() -> None:
            value = z
            with torch.no_grad(), scope, self.autocast():
                for _ in range(steps):
                    value = tuple(new.to(old.dtype) for new, old in zip(cell(value, x), z, strict=True))

        tape: Any = tape_for(self.device)
        tape.rehearse(run)
        return tape.record(run)  # type: ignore[no-any-return]

    def solve(self, solver: eq.Solver, engine: str, steps: int) -> Work:
        """A solve without gradients, in eval mode."""
        x, plan = self.injection(), eq.Plan(solver, stop=eq.Stop(rtol=0, max_steps=steps))
        self.model.eval()

        def work() -> Any:
            deq = self.model.deq
            deq.plan, deq.engine = plan, engine
            with torch.no_grad(), self.autocast():
                return list(deq(x).value)

        return work

    def train(self, solver: eq.Solver, engine: str, steps: int, backward: int) -> Work:
        """Forward pass, loss and gradients of all parameters."""
        stop, adjoint = eq.Stop(rtol=0, max_steps=steps), eq.Stop(rtol=0, max_steps=backward)
        plan = eq.Plan(solver, eq.Implicit(solver=solver, stop=adjoint), stop)
        model = self.model.train()

        def work() -> Any:
            model.deq.plan, model.deq.engine = plan, engine
            model.zero_grad(set_to_none=True)
            with self.autocast():
                logits = model(self.images).logits
            loss = F.cross_entropy(logits.float(), self.labels)
            loss.backward()
            return [p.grad for p in model.deq.parameters()]

        return work

    def fallbacks(self) -> dict[str, int]:
        return dict(self.model.deq.capture.fallbacks)


def milliseconds(works: dict[str, Work], device: torch.device, rounds: int, units: int = 1) -> dict[str, float]:
    """Median time of each, from an idle device to an idle device, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
        work()  # what the first one recorded is replayed
    for _ in range(rounds):
        for name, work in works.items():
            _wait(device)
            started = time.perf_counter()
            work()
            _wait(device)
            times[name].append(1e3 * (time.perf_counter() - started) / units)
    return {name: statistics.median(values) for name, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def distance(found: list[Tensor], truth: list[Tensor]) -> float:
    """‖found − truth‖ / ‖truth‖ over all tensors."""
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, truth, strict=True))
    return (error / sum(float(b.double().square().sum()) for b in truth)) ** 0.5


def agreement(bench: Bench, make: Callable[[str], Work], bar: float) -> Row:
    """Whether both engines find the same from the same seed: to `bar`, or to the error that bfloat16 itself makes."""

    def found(engine: str) -> list[Tensor]:
        work = make(engine)
        for _ in range(2):  # the captured engine records, then replays
            torch.manual_seed(1)
            value = [tensor.clone() for tensor in work()]
        return value

    eager = found("eager")
    error, rounding, half = distance(found("captured"), eager), 0.0, bench.half
    if half:
        bench.half = False
        rounding = distance(eager, found("eager"))
        bench.half = True
    return {"error": error, "rounding": rounding, "check": error <= max(bar, 1.5 * rounding)}


def forward_row(case: Case, device: torch.device, last: bool, half: bool, rounds: int, compiled: bool = False) -> Row:
    """Milliseconds per step of each solver, and their overhead over the bare f."""
    bench = Bench(case, device, last, half)
    if compiled:
        bench.model.deq.compile_cell(dynamic=False)
    row = agreement(bench, lambda engine: bench.solve(eq.Anderson(), engine, AGREEING), 1e-3)
    works = {"bare f": bench.bare(STEPS), "anderson, eager": bench.solve(eq.Anderson(), "eager", STEPS)}
    works |= {f"{name}, captured": bench.solve(solver, "captured", STEPS) for name, solver in SOLVERS.items()}
    times = milliseconds(works, device, rounds, STEPS)
    overheads = {name: value / times["bare f"] - 1 for name, value in times.items() if name != "bare f"}
    row |= {"unit": "ms per step", "ms": times, "overhead": overheads, "goal": case.goal}
    return row | {"fallbacks": bench.fallbacks()}


def train_row(case: Case, device: torch.device, last: bool, half: bool, rounds: int, compiled: bool = False) -> Row:
    """Milliseconds per training step, both engines; Broyden too where the model is small."""
    bench = Bench(case, device, last, half)
    if compiled:
        bench.model.deq.compile_cell(dynamic=False)
    row = agreement(bench, lambda engine: bench.train(eq.Anderson(), engine, AGREEING, AGREEING), 1e-2)
    works = {engine: bench.train(eq.Anderson(), engine, STEPS, BACKWARD) for engine in ("eager", "captured")}
    if not last:
        works["captured, broyden"] = bench.train(eq.Broyden(), "captured", STEPS, BACKWARD)
    row |= {"unit": "ms per training step", "ms": milliseconds(works, device, rounds)}
    return row | {"fallbacks": bench.fallbacks()}


def memory_row(case: Case, device: torch.device, engine: str) -> Row:
    """Peak memory of a training step at two budgets; captured graphs hold theirs, so there reserved memory counts."""
    peaks: dict[str, dict[str, float]] = {}
    for steps in BUDGETS:
        bench = Bench(case, device, last=False, half=False)
        work = bench.train(eq.Anderson(), engine, steps, steps)
        work()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        peaks[str(steps)] = {"allocated_mib": allocated / 2**20, "reserved_mib": reserved / 2**20}
        del bench, work
        torch.cuda.empty_cache()
    key = "reserved_mib" if engine == "captured" else "allocated_mib"
    few, many = (peaks[str(steps)][key] for steps in BUDGETS)
    return {"unit": key, "peaks": peaks, "growth": many / few - 1, "check": many <= 1.05 * few}


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the midst of what takes longer."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# The report


def rows_of(cases: dict[str, Case], device: torch.device, rounds: int) -> dict[str, Callable[[], Row]]:
    """All rows by name, the most wanted first."""
    found: dict[str, Callable[[], Row]] = {}
    kinds = {"fp32": (False, False), "bf16": (False, True), "fp32 last": (True, False), "bf16 last": (True, True)}
    for make, title in ((forward_row, "forward"), (train_row, "train")):
        for name, case in cases.items():
            for kind, (last, half) in kinds.items():
                found[f"{title} {name} {kind}"] = lambda m=make, c=case, k=(last, half): m(c, device, *k, rounds)
    if device.type == "cuda":
        for name, case in cases.items():
            for engine in ("eager", "captured"):
                found[f"memory {name} {engine}"] = lambda c=case, e=engine: memory_row(c, device, e)
    for make, title in ((forward_row, "forward"), (train_row, "train")):
        for kind in ("fp32", "bf16"):
            options = kinds[kind]
            found[f"{title} tiny {kind} compiled"] = lambda m=make, k=options: m(
                cases["tiny"], device, *k, rounds, compiled=True
            )
    return found


def line(name: str, row: Row) -> str:
    if "failed" in row:
        return f"{name:28} FAILED  {row['failed']}"
    if not row["check"]:
        reason = (
            f"grows by {100 * row['growth']:.0f} %"
            if "growth" in row
            else f"error {row['error']:.1e}, rounding {row['rounding']:.1e}"
        )
        return f"{name:28} CHECK RED  {reason} {row.get('peaks', '')}"
    if "peaks" in row:
        parts = [f"{steps} steps {peak[row['unit']]:.0f} MiB" for steps, peak in row["peaks"].items()]
        return f"{name:28} {', '.join(parts)}   {row['unit']}, growth {100 * row['growth']:+.1f} %"
    parts = []
    for candidate, value in row["ms"].items():
        extra = row.get("overhead", {}).get(candidate)
        met = "" if extra is None or "captured" not in candidate else (" ok" if extra <= row["goal"] else " OVER")
        parts.append(f"{candidate} {value:.3f}" + ("" if extra is None else f" ({100 * extra:+.0f} %{met})"))
    left = f"   fallbacks {row['fallbacks']}" if row["fallbacks"] else ""
    return f"{name:28} {row['unit']}: {', '.join(parts)}   error {row['error']:.0e}{left}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for mdeq.json")
    parser.add_argument("--only", default="", help="the rows whose names contain this")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each candidate")
    parser.add_argument("--seconds", type=float, default=80.0, help="no row begins later than this")
    parser.add_argument("--compile-seconds", type=float, default=40.0, help="limit of a row with a compiled cell")
    parser.add_argument("--autotune", action="store_true", help="let cudnn choose convolutions by measuring")
    parser.add_argument("--device", default="cuda", help="'cpu' tries the script itself")
    parser.add_argument("--batch", type=int, default=None, help="another batch size for all cases")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("mdeq_gpu: needs a CUDA device; --device cpu --batch 2 tries the script itself.")
    torch.backends.cudnn.benchmark = arguments.autotune
    header = {
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tf32_convolutions": torch.backends.cudnn.allow_tf32,
        "autotune": arguments.autotune,
        "steps": [STEPS, BACKWARD],
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }
    print(header)
    cases = {k: Case(c.preset, arguments.batch or c.batch, c.goal) for k, c in CASES.items()}
    rows: dict[str, Row] = {}
    skipped: list[str] = []
    started = time.monotonic()
    for name, measure in rows_of(cases, device, arguments.rounds).items():
        if arguments.only not in name:
            continue
        if time.monotonic() - started > arguments.seconds:
            skipped.append(name)
            continue
        limited = "compiled" in name
        try:
            with time_limit(arguments.compile_seconds) if limited else nullcontext():
                rows[name] = measure()
        except Exception as error:
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:300], "traceback": traceback.format_exc()}
        print(line(name, rows[name]), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        arguments.out.mkdir(parents=True, exist_ok=True)
        record = {"header": header, "rows": rows, "skipped": skipped}
        (arguments.out / "mdeq.json").write_text(json.dumps(record, indent=1))
    for name, row in rows.items():
        if "traceback" in row:
            print(f"\n{name}\n{row['traceback'][-1500:]}")
    if skipped:
        print(f"no time left for: {', '.join(skipped)}")
    print(f"{time.monotonic() - started:.0f} s")
    red = [name for name, row in rows.items() if "failed" in row or not row["check"]]
    raise SystemExit(f"not measured: {', '.join(red)}" if red else 0)


if __name__ == "__main__":
    main()
