"""What MDEQ costs on one CUDA device: the layer f and its products, solves over bare evaluations of f, training steps.

    python -m benchmarks.kernels.mdeq_gpu --out benchmarks/results/<date>_mdeq

Rows "f" compare the layer by plain operations ("twin") with that by fused ones, in both memory formats, in training
mode: milliseconds of an evaluation and of a vector-Jacobian product, each one on the result of the other, replayed from
a CUDA graph. Rows "kernels" say what these launch. Rows "solve" are the overhead of solvers over as many evaluations of
f, rows "train" whole training steps. Budgets are fixed, so that all candidates do the same work; they are timed in
turns and medians are reported, if results agree with those of plain operations, or of the other engine, over a few
steps (f is not a contraction before training: over many steps rounding grows). A row that fails is listed with its
error, and those that the time limit does not leave room for by name.

More rows: `--float32`, `--memory`, `--compile`; `--tune` times single operations at other sizes of blocks.
"""

import argparse
import json
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import equipoise as eq
from equipoise._compat import keep_backward_buffers
from equipoise._scope import SolveScope
from equipoise._tape import tape_for
from equipoise.models.mdeq import MDEQ
from equipoise.models.registry import create_model

STEPS = 18
BACKWARD = 20
AGREEING = 4  # steps over which both engines are compared
PRODUCTS = (2, 12)
SOLVERS: dict[str, eq.Solver] = {
    "picard": eq.Picard(),
    "anderson": eq.Anderson(),
    "anderson 3": eq.Anderson(memory=3),  # as many steps where f is a contraction, and five eighths of the bytes
    "broyden": eq.Broyden(),
}
BUDGETS = (10, 40)
LISTED = 14  # kernels that a row names
KERNELS = "equipoise.ops.norm._use_kernel"

Row = dict[str, Any]
Work = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A preset at a batch size and a size of images, and the overhead over the bare f aimed at."""

    preset: str
    batch: int
    goal: float
    size: tuple[int, int] = (32, 32)


CASES = {
    "tiny": Case("mdeq_cifar_tiny", 128, 0.25),
    "large": Case("mdeq_cifar_large", 96, 0.10),
    "camvid": Case("mdeq_camvid_small", 8, 0.10, (352, 480)),
}


# What is measured


class Bench:
    """A model with a batch on a device, in a layout and a precision, by fused or by plain operations."""

    def __init__(
        self, case: Case, device: torch.device, last: bool, half: bool, fused: bool = True, compiled: bool = False
    ) -> None:
        torch.manual_seed(0)
        layout = torch.channels_last if last else torch.contiguous_format
        model = create_model(case.preset)
        assert isinstance(model, MDEQ)
        self.model, self.device, self.half = model.to(device, memory_format=layout), device, half
        self.fused, self.compiled = fused, compiled
        if compiled:
            self.model.deq.compile_cell(dynamic=False)
        images = torch.randn(case.batch, 3, *case.size).to(device)
        self.images = images.contiguous(memory_format=layout)
        pixels = case.size if model.config.task == "segmentation" else ()
        self.labels = torch.randint(10, (case.batch, *pixels), device=device)

    @contextmanager
    def settings(self) -> Iterator[None]:
        narrow = torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)
        with narrow, nullcontext() if self.fused else mock.patch(KERNELS, return_value=False):
            yield

    def injection(self) -> tuple[Tensor, ...]:
        # By the statistics of the batch: with those of an untrained model hardly anything is injected.
        with torch.no_grad(), self.settings():
            return self.model.train().inject(self.images)

    def layer(self, training: bool) -> tuple[Work, tuple[Tensor, ...], Callable[[], AbstractContextManager[Any]]]:
        """f as a function of the state, a state, and a context with the constants of a solve."""
        x = self.injection()
        deq = self.model.train(training).deq
        cell, scope, z = deq._compiled or deq.cell, SolveScope(), deq.start(x)
        torch.manual_seed(2)
        with torch.no_grad(), scope, self.settings():
            deq.cell(z, x)
        # Leaves that want a gradient: those autocast casts once, as recordings do.
        scope._derived.update({k: v.detach().requires_grad_() for k, v in scope._derived.items()})
        z = tuple(torch.randn(leaf.shape).to(leaf).contiguous(memory_format=_layout(leaf)) for leaf in z)

        @contextmanager
        def entered() -> Iterator[None]:
            with scope, self.settings(), keep_backward_buffers() if self.compiled else nullcontext():
                yield

        return lambda value: cell(value, x), z, entered

    def bare(self, steps: int, training: bool = False) -> Work:
        """Evaluations of f, recorded once and replayed."""
        f, z, entered = self.layer(training)

        def run() -> None:
            value = z
            with torch.no_grad(), entered():
                for _ in range(steps):
                    value = tuple(new.to(old.dtype) for new, old in zip(f(value), z, strict=True))

        return self._recorded(run)

    def products(self, steps: int) -> Work:
        """One evaluation of f with its graph, and as many products with its Jacobian; recorded."""
        f, z, entered = self.layer(training=True)

        def run() -> None:
            with torch.enable_grad(), entered():
                leaves = [leaf.detach().requires_grad_() for leaf in z]
                image = f(tuple(leaves))
                u: Any = [leaf.detach() for leaf in image]
                for _ in range(steps):
                    u = torch.autograd.grad(image, leaves, u, retain_graph=True)

        return self._recorded(run)

    def value_and_products(self) -> list[Tensor]:
        """f(z) and uᵀJ for one z and u, which are the same for every bench of a case."""
        f, z, entered = self.layer(training=True)
        torch.manual_seed(3)
        u = [torch.randn(leaf.shape).to(leaf) for leaf in z]
        with torch.enable_grad(), entered():
            leaves = [leaf.detach().requires_grad_() for leaf in z]
            image = f(tuple(leaves))
            pulled = torch.autograd.grad(image, leaves, u)
        return [*(leaf.detach() for leaf in image), *pulled]

    def _recorded(self, run: Work) -> Work:
        tape: Any = tape_for(self.device)
        tape.rehearse(run)
        replay = tape.record(run)

        def again(alive: Work = run) -> None:  # and with it what the recording reads
            replay()

        return again

    def solve(self, solver: eq.Solver, engine: str, steps: int) -> Work:
        """A solve without gradients, in eval mode."""
        x, plan = self.injection(), eq.Plan(solver, stop=eq.Stop(rtol=0, max_steps=steps))
        self.model.eval()

        def work() -> Any:
            deq = self.model.deq
            deq.plan, deq.engine = plan, engine
            with torch.no_grad(), self.settings():
                return list(deq(x).value)

        return work

    def in_a_graph(self, solver: eq.Solver, steps: int) -> Work:
        """The same as part of a graph, as whole forward passes and training steps are recorded: no host's work."""
        x, plan = self.injection(), eq.Plan(solver, stop=eq.Stop(rtol=0, max_steps=steps))
        deq = self.model.eval().deq
        graphs = eq.CapturedForward(deq, lambda *x: list(deq(x).value), warn=False)

        def work() -> Any:
            deq.plan, deq.engine = plan, "auto"
            with self.settings():
                return graphs(*x)

        return work

    def train(self, solver: eq.Solver, engine: str, steps: int, backward: int) -> Work:
        """Forward pass, loss and gradients of all parameters."""
        stop, adjoint = eq.Stop(rtol=0, max_steps=steps), eq.Stop(rtol=0, max_steps=backward)
        plan = eq.Plan(solver, eq.Implicit(solver=solver, stop=adjoint), stop)
        model = self.model.train()

        def work() -> Any:
            model.deq.plan, model.deq.engine = plan, engine
            model.zero_grad(set_to_none=True)
            with self.settings():
                logits = model(self.images).logits
            loss = F.cross_entropy(logits.float(), self.labels)
            loss.backward()
            return [p.grad for p in model.deq.parameters()]

        return work

    def fallbacks(self) -> dict[str, int]:
        return dict(self.model.deq.capture.fallbacks)


def _layout(tensor: Tensor) -> torch.memory_format:
    last = not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def milliseconds(works: dict[str, Work], device: torch.device, rounds: int, units: int = 1) -> dict[str, float]:
    """Median time of each, from an idle device to an idle device, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        for _ in range(3):  # what one of the first ones recorded is replayed
            work()
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


def layer_row(
    case: Case, device: torch.device, last: bool, half: bool, rounds: int, fused: bool, compiled: bool = False
) -> Row:
    """Milliseconds of an evaluation of f and of a product with its Jacobian."""
    bench = Bench(case, device, last, half, fused, compiled)
    truth = Bench(case, device, last, False, fused=False).value_and_products()
    error, rounding = distance(bench.value_and_products(), truth), 0.0
    if half:
        rounding = distance(Bench(case, device, last, True, fused=False).value_and_products(), truth)
    works = {"f": bench.bare(STEPS, training=True)} | {f"{k} products": bench.products(k) for k in PRODUCTS}
    times = milliseconds(works, device, rounds)
    few, many = PRODUCTS
    product = (times[f"{many} products"] - times[f"{few} products"]) / (many - few)
    row = {"unit": "ms", "ms": {"f": times["f"] / STEPS, "product": product}, "fallbacks": {}}
    return row | {"error": error, "rounding": rounding, "check": error <= max(1e-3, 1.5 * rounding)}


def kernels_row(case: Case, device: torch.device, last: bool, half: bool, fused: bool) -> Row:
    """What one evaluation of f and one product launch, by time."""
    f, z, entered = Bench(case, device, last, half, fused).layer(training=True)
    found: dict[str, dict[str, list[float]]] = {"f": {}, "product": {}}
    with torch.enable_grad(), entered():
        for attempt in range(3):
            leaves = [leaf.detach().requires_grad_() for leaf in z]
            with _profile(found["f"]) if attempt == 2 else nullcontext():
                image = f(tuple(leaves))
            with _profile(found["product"]) if attempt == 2 else nullcontext():
                torch.autograd.grad(image, leaves, [leaf.detach() for leaf in image])
    lists = {}
    for name, kernels in found.items():
        ranked = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:LISTED]
        count, total = sum(map(len, kernels.values())), sum(map(sum, kernels.values()))
        lists[name] = {
            "count": count,
            "us": total,
            "most": [[kernel[:90], len(times), sum(times)] for kernel, times in ranked],
        }
    return {"unit": "us", "kernels": lists, "check": True, "error": 0.0}


@contextmanager
def _profile(kernels: dict[str, list[float]]) -> Iterator[None]:
    """Note the microseconds of every kernel that is launched."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield
        torch.cuda.synchronize()
    for event in profiler.events() or ():
        if str(event.device_type).endswith("CUDA"):
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())


def solve_row(case: Case, device: torch.device, last: bool, half: bool, rounds: int, compiled: bool = False) -> Row:
    """Milliseconds per step of each solver, and their overhead over the bare f."""
    bench = Bench(case, device, last, half, compiled=compiled)
    row = agreement(bench, lambda engine: bench.solve(eq.Anderson(), engine, AGREEING), 1e-3)
    works = {"bare f": bench.bare(STEPS)}
    works |= {name: bench.solve(solver, "captured", STEPS) for name, solver in SOLVERS.items()}
    works |= {f"{name} in a graph": bench.in_a_graph(SOLVERS[name], STEPS) for name in ("picard", "anderson")}
    times = milliseconds(works, device, rounds, STEPS)
    overheads = {name: value / times["bare f"] - 1 for name, value in times.items() if name != "bare f"}
    row |= {"unit": "ms per step", "ms": times, "overhead": overheads, "goal": case.goal}
    return row | {"fallbacks": bench.fallbacks()}


def train_row(case: Case, device: torch.device, last: bool, half: bool, rounds: int, compiled: bool = False) -> Row:
    """Milliseconds per training step: Anderson by both engines, and Broyden."""
    bench = Bench(case, device, last, half, compiled=compiled)
    row = agreement(bench, lambda engine: bench.train(eq.Anderson(), engine, AGREEING, AGREEING), 1e-2)
    works = {
        "anderson": bench.train(eq.Anderson(), "captured", STEPS, BACKWARD),
        "anderson 12 + 12": bench.train(eq.Anderson(), "captured", 12, 12),
        "broyden": bench.train(eq.Broyden(), "captured", STEPS, BACKWARD),
        "anderson, eager": bench.train(eq.Anderson(), "eager", STEPS, BACKWARD),
    }
    row |= {"unit": "ms per training step", "ms": milliseconds(works, device, max(1, rounds // 2))}
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


def rows_of(cases: dict[str, Case], device: torch.device, options: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """All rows by name, the most wanted first."""
    found: dict[str, Callable[[], Row]] = {}
    rounds, layouts = options.rounds, {"": False, " last": True}
    kinds = {"bf16": True} | ({"fp32": False} if options.float32 else {})
    for name, case in cases.items():
        for kind, half in kinds.items():
            for ops, fused in (("fused", True), ("twin", False)):
                for layout, last in layouts.items():
                    key = (case, device, last, half)
                    found[f"f {name} {kind} {ops}{layout}"] = lambda k=key, o=fused: layer_row(*k, rounds, o)
            if device.type == "cuda" and half:
                for layout, last in layouts.items():
                    key = (case, device, last, half)
                    found[f"kernels {name} {kind}{layout}"] = lambda k=key: kernels_row(*k, fused=True)
    for make, title in ((solve_row, "solve"), (train_row, "train")):
        for name, case in cases.items():
            for kind, half in kinds.items():
                for layout, last in layouts.items():
                    key = (case, device, last, half)
                    found[f"{title} {name} {kind}{layout}"] = lambda m=make, k=key: m(*k, rounds)
    if options.memory and device.type == "cuda":
        for name, case in cases.items():
            for engine in ("eager", "captured"):
                found[f"memory {name} {engine}"] = lambda c=case, e=engine: memory_row(c, device, e)
    if options.compile:
        for name, case in cases.items():
            key = (case, device, False, True)
            found[f"f {name} bf16 compiled"] = lambda k=key: layer_row(*k, rounds, fused=True, compiled=True)
            found[f"train {name} bf16 compiled"] = lambda k=key: train_row(*k, rounds, compiled=True)
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
        return f"{name:28} CHECK RED  {reason} {row.get('peaks', row.get('ms', ''))}"
    if "peaks" in row:
        parts = [f"{steps} steps {peak[row['unit']]:.0f} MiB" for steps, peak in row["peaks"].items()]
        return f"{name:28} {', '.join(parts)}   {row['unit']}, growth {100 * row['growth']:+.1f} %"
    if "kernels" in row:
        lines = []
        for part, kernels in row["kernels"].items():
            lines.append(f"{name:28} {part}: {kernels['count']} kernels, {kernels['us']:.0f} us")
            lines += [f"    {times:3} × {us / times:7.1f} us  {kernel}" for kernel, times, us in kernels["most"]]
        return "\n".join(lines)
    parts = []
    for candidate, value in row["ms"].items():
        extra = row.get("overhead", {}).get(candidate)
        met = "" if extra is None else " ok" if extra <= row["goal"] else " OVER"
        parts.append(f"{candidate} {value:.3f}" + ("" if extra is None else f" ({100 * extra:+.0f} %{met})"))
    left = f"   fallbacks {row['fallbacks']}" if row["fallbacks"] else ""
    return f"{name:28} {row['unit']}: {', '.join(parts)}   error {row['error']:.0e}{left}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for mdeq.json")
    parser.add_argument("--only", default="", help="the rows whose names contain this, or one of several by commas")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each candidate")
    parser.add_argument("--seconds", type=float, default=75.0, help="no row begins later than this")
    parser.add_argument("--float32", action="store_true", help="float32 as well")
    parser.add_argument("--memory", action="store_true", help="memory of training steps")
    parser.add_argument("--compile", action="store_true", help="compiled cells")
    parser.add_argument("--compile-seconds", type=float, default=60.0, help="limit of a row with a compiled cell")
    parser.add_argument(
        "--tune", action="store_true", help="single operations at several sizes of blocks, nothing else"
    )
    parser.add_argument("--autotune", action="store_true", help="let cudnn choose convolutions by measuring")
    parser.add_argument("--device", default="cuda", help="'cpu' tries the script itself")
    parser.add_argument("--batch", type=int, default=None, help="another batch size for all cases")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("mdeq_gpu: needs a CUDA device; --device cpu --batch 2 tries the script itself.")
    torch.backends.cudnn.benchmark = options.autotune
    header = {
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tf32_convolutions": torch.backends.cudnn.allow_tf32,
        "autotune": options.autotune,
        "steps": [STEPS, BACKWARD],
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }
    print(header)
    cases = {k: replace(c, batch=options.batch or c.batch) for k, c in CASES.items()}
    wanted = rows_of(cases, device, options)
    if options.tune:
        from benchmarks.kernels.group_norm_gpu import tuning_rows  # needs Triton

        wanted = tuning_rows(device)
    rows: dict[str, Row] = {}
    skipped: list[str] = []
    started = time.monotonic()
    for name, measure in wanted.items():
        if not any(part in name for part in options.only.split(",")):
            continue
        if time.monotonic() - started > options.seconds:
            skipped.append(name)
            continue
        try:
            with time_limit(options.compile_seconds) if "compiled" in name else nullcontext():
                rows[name] = measure()
        except Exception as error:
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:300], "traceback": traceback.format_exc()}
        print(line(name, rows[name]), f"  [{time.monotonic() - started:.0f} s]", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"header": header, "rows": rows, "skipped": skipped}
        (options.out / "mdeq.json").write_text(json.dumps(record, indent=1))
    for name, row in rows.items():
        if "traceback" in row:
            print(f"\n{name}\n{row['traceback'][-1500:]}")
    if skipped:
        print(f"no time left for: {', '.join(skipped)}")
    red = [name for name, row in rows.items() if "failed" in row or not row["check"]]
    raise SystemExit(f"not measured: {', '.join(red)}" if red else 0)


if __name__ == "__main__":
    main()
