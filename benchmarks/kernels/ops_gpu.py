"""Checks and times of the kernels in `equipoise.ops`, on one CUDA device.

    python -m benchmarks.kernels.ops_gpu --out benchmarks/results/<date>_kernels

Each case first compares the kernel with its plain twin in float64 on fresh random data, then times it inside a CUDA
graph: median over replays, per step, with the bytes that the step has to move (the docstrings count them) over that
time. A time without a passed check is not reported. A case that fails is listed with its error; the others go on.
"""

import argparse
import copy
import json
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import equipoise as eq
from equipoise.ops import AndersonMemory, BroydenMemory, Standing, anderson_step, broyden_step, trellis_cell

DEVICE = "cuda"
# batch, time, width of the cells of the solver benchmark; a system is one row of the batch
SHAPES = [(32, 420, 32), (32, 128, 256), (15, 150, 416), (15, 150, 704), (56, 150, 704)]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# dtypes of f(z), the ring of images and the ring of residuals; iterates are float32
MIXES = {"fp32": (F32, F32, F32), "bf16 f, F": (BF16, BF16, F32), "bf16 f, F, G": (BF16, BF16, BF16)}
MEMORY = 6
BROYDEN_MEMORY = 24
TRELLIS = [(32, 70, 1400, F16), (15, 150, 1400, BF16), (15, 150, 1400, F32), (7, 33, 129, F32)]
# BLOCK, WARPS and TIME, WIDTH, WARPS tried beside the defaults
BLOCKS = [(512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8)]
TILES = [(8, 64, 2), (16, 32, 2), (16, 32, 4), (16, 64, 4), (16, 64, 8), (32, 32, 4), (32, 64, 8), (8, 128, 4)]
FIXED = eq.Stop(rtol=0, max_steps=1000)
IMAGES = 8  # images taken in turn: unrelated ones keep all weights of a step away from zero
STEPS = 24
REPLAYS = 30

Row = dict[str, Any]


# Timing


def replayed(work: Callable[[], None], steps: int) -> tuple[float, float]:
    """Microseconds per step of `work`, which makes `steps` of them, replayed from a graph: median and spread."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return spread(graph.replay, steps)


def spread(work: Callable[[], Any], steps: int, repeats: int = REPLAYS) -> tuple[float, float]:
    """Microseconds per step: median, and half the distance between the quartiles."""
    for _ in range(3):
        work()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first, last in events:
        first.record()
        work()
        last.record()
    torch.cuda.synchronize()
    times = [1e3 * first.elapsed_time(last) / steps for first, last in events]
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / 2


def by_kernel(work: Callable[[], None], steps: int) -> dict[str, float]:
    """Microseconds per step of each kernel by name, from the profiler; empty where it does not work."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        return {
            event.key[:60]: round(event.self_device_time_total / steps, 2)
            for event in profile.key_averages()
            if event.self_device_time_total > 0
        }
    except Exception as error:
        return {f"profiler: {error}": 0.0}


def error_of(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖ in float64; NaN never passes a bar."""
    found, truth = found.double(), truth.double()
    return float(torch.linalg.vector_norm(found - truth) / torch.linalg.vector_norm(truth).clamp_min(1e-300))


@contextmanager
def settings(module: Any, **values: int) -> Any:
    """A module's constants replaced for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# The steps of solvers


class Anderson:
    """A solve's storage and its step; what the checks and times below need of it."""

    def __init__(self, n: int, d: int, mix: str) -> None:
        image, ring, residuals = MIXES[mix]
        self.z = [torch.randn(n, d, device=DEVICE)]
        self.images = [torch.randn(n, d, device=DEVICE).to(image) for _ in range(IMAGES)]
        self.memory = AndersonMemory.empty(self.z, MEMORY, ring, residuals)
        self.standing = Standing.start(self.z)
        f, r, g = image.itemsize, ring.itemsize, residuals.itemsize
        per_unknown = 4 + f + (MEMORY - 1) * g + r + g + MEMORY * r + 4 + 4
        # The best iterate is rarely replaced on random data, so its 4 bytes are not counted; a solve pays them.
        self.bytes_per_step, self.steps = n * d * per_unknown, STEPS

    def step(self, k: int, backend: str, fz: Tensor | None = None) -> None:
        fz = self.images[k % IMAGES] if fz is None else fz
        anderson_step(self.z, [fz], self.memory, self.standing, stop=FIXED, ridge=1e-6, backend=backend)

    def widen(self) -> None:
        """Everything in float64, for the twin."""
        self.z = [leaf.double() for leaf in self.z]
        for name in ("images", "residuals"):
            setattr(self.memory, name, [ring.double() for ring in getattr(self.memory, name)])
        self.memory.weights = self.memory.weights.double()
        _widen(self.standing)


class Broyden:
    def __init__(self, n: int, d: int, mix: str) -> None:
        image = MIXES[mix][0]
        self.z = [torch.randn(n, d, device=DEVICE)]
        self.images = [torch.randn(n, d, device=DEVICE).to(image) for _ in range(IMAGES)]
        self.memory = BroydenMemory.empty(self.z, BROYDEN_MEMORY)
        self.standing = Standing.start(self.z)
        self.steps = BROYDEN_MEMORY + 1  # one cycle: a plain step, then 0 … memory − 1 older steps
        older = sum(range(BROYDEN_MEMORY))
        first = self.steps * (4 + image.itemsize) + BROYDEN_MEMORY * (4 + 4) + 4 * older
        second = self.steps * (4 + image.itemsize + 8) + 4 * (older + BROYDEN_MEMORY)
        self.bytes_per_step = n * d * (first + second) / self.steps

    def step(self, k: int, backend: str, fz: Tensor | None = None) -> None:
        fz = self.images[k % IMAGES] if fz is None else fz
        broyden_step(self.z, [fz], self.memory, self.standing, stop=FIXED, backend=backend)

    def widen(self) -> None:
        self.z = [leaf.double() for leaf in self.z]
        self.memory.steps = [leaf.double() for leaf in self.memory.steps]
        self.memory.point = [leaf.double() for leaf in self.memory.point]
        self.memory.small = self.memory.small.double()
        _widen(self.standing)


def _widen(standing: Standing) -> None:
    standing.best = [leaf.double() for leaf in standing.best]
    for name in ("residual", "latest", "limit"):
        setattr(standing, name, getattr(standing, name).double())


def solver_case(make: type, n: int, d: int, mix: str) -> Row:
    """One step after some others against the twin in float64; the same twice; a replay equals calls; then the time."""
    torch.manual_seed(0)
    solve = make(n, d, mix)

    def image() -> Tensor:
        """A contraction, so that the checks see what a solve sees."""
        shift = solve.images[0]
        return (shift.float() + 0.7 * torch.sin(solve.z[0])).to(shift.dtype)

    for k in range(MEMORY + 2):
        solve.step(k, "triton", image())
    truth, again = copy.deepcopy(solve), copy.deepcopy(solve)
    truth.widen()
    fz = image()
    for backend, each in (("triton", solve), ("triton", again), ("naive", truth)):
        each.step(MEMORY + 2, backend, fz if each is not truth else fz.double())
    errors = {
        "z": error_of(solve.z[0], truth.z[0]),
        "latest": error_of(solve.standing.latest, truth.standing.latest),
        "residual": error_of(solve.standing.residual, truth.standing.residual),
        "best": error_of(solve.standing.best[0], truth.standing.best[0]),
    }
    # Residuals stored in half precision differ from the twin's in their last digit, and so do the weights.
    bar = 2e-2 if mix.endswith("G") else 1e-3
    passed = all(error < bar for error in errors.values()) and torch.equal(solve.z[0], again.z[0])
    row: Row = {"errors": errors, "same_twice": torch.equal(solve.z[0], again.z[0]), "check": passed}
    row["replay_equals_calls"] = replay_equals_calls(solve, again)
    row["check"] = passed = passed and row["replay_equals_calls"]
    if not passed:
        return row

    def work() -> None:
        for k in range(solve.steps):
            solve.step(k, "triton")

    time_us, noise = replayed(work, solve.steps)
    naive_us, _ = spread(lambda: [solve.step(k, "naive") for k in range(4)], 4, repeats=5)
    row |= {"us": time_us, "spread_us": noise, "naive_us": naive_us, "bytes": solve.bytes_per_step}
    row |= {"gb_s": solve.bytes_per_step / time_us / 1e3, "kernels_us": by_kernel(work, solve.steps)}
    return row


def replay_equals_calls(solve: Any, again: Any) -> bool:
    """Three steps recorded and replayed twice, against six calls: the slot must move on with every replay."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(3):
            solve.step(k, "triton")
    for _ in range(2):
        graph.replay()
        for k in range(3):
            again.step(k, "triton")
    torch.cuda.synchronize()
    return torch.equal(solve.z[0], again.z[0]) and torch.equal(solve.standing.count, again.standing.count)


def block_sweep(n: int, d: int, mix: str) -> Row:
    from equipoise.ops.anderson import triton as kernels

    found: dict[str, Any] = {}
    for block, warps in BLOCKS:
        try:
            with settings(kernels, BLOCK=block, WARPS=warps):
                solve = Anderson(n, d, mix)

                def work(solve: Anderson = solve) -> None:
                    for k in range(solve.steps):
                        solve.step(k, "triton")

                found[f"BLOCK {block}, WARPS {warps}"] = round(replayed(work, solve.steps)[0], 2)
        except Exception as error:
            found[f"BLOCK {block}, WARPS {warps}"] = f"{type(error).__name__}: {error}"[:200]
    return {"check": True, "sweep_us": found}


# The TrellisNet cell


def trellis_case(batch: int, length: int, features: int, dtype: torch.dtype) -> Row:
    from equipoise.ops.trellis import triton as kernels

    torch.manual_seed(0)
    pre = torch.randn(batch, length, 4 * features, device=DEVICE).to(dtype).requires_grad_()
    start = torch.randn(batch, 1, features, device=DEVICE).to(dtype).requires_grad_()
    dh = torch.randn(batch, length, features, device=DEVICE).to(dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in (pre, start)]
    h, c = trellis_cell(pre, start, backend="triton")
    truth = trellis_cell(*wide, backend="naive")
    found = (h, c, *torch.autograd.grad(h, (pre, start), dh))
    expected = (*truth, *torch.autograd.grad(truth[0], wide, dh.double()))
    names = ("h", "c", "dpre", "dstart")
    errors = {name: error_of(a, b) for name, a, b in zip(names, found, expected, strict=True)}
    bar = {F32: 1e-5, F16: 2e-3, BF16: 1e-2}[dtype]
    row: Row = {"errors": errors, "check": all(error < bar for error in errors.values())}
    if not row["check"]:
        return row
    pre, start, c = pre.detach(), start.detach(), c.detach()
    size = batch * length * features * dtype.itemsize

    def forward() -> None:
        for _ in range(10):
            kernels.forward(pre, start)

    def backward() -> None:
        for _ in range(10):
            kernels.backward(pre, start, c, dh, None)

    for name, work, arrays in (("forward", forward, 6), ("vjp", backward, 10)):
        time_us, noise = replayed(work, 10)
        row |= {f"{name}_us": time_us, f"{name}_spread_us": noise, f"{name}_gb_s": arrays * size / time_us / 1e3}
    row["naive_forward_us"] = spread(lambda: trellis_cell(pre, start, backend="naive"), 1, repeats=5)[0]
    row["sweep_us"] = tile_sweep(kernels, forward, backward) if features == 1400 else {}
    return row


def tile_sweep(kernels: Any, forward: Callable[[], None], backward: Callable[[], None]) -> Row:
    found: Row = {}
    for length, width, warps in TILES:
        name = f"TIME {length}, WIDTH {width}, WARPS {warps}"
        try:
            with settings(kernels, TIME=length, WIDTH=width, WARPS=warps):
                found[name] = [round(replayed(work, 10)[0], 2) for work in (forward, backward)]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


# The report


def copy_ceiling() -> float:
    """GB/s of a large device-to-device copy, bytes read and written."""
    source = torch.randn(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / spread(lambda: target.copy_(source), 1, repeats=10)[0] / 1e3


def cases() -> dict[str, Callable[[], Row]]:
    """All cases by name."""
    found: dict[str, Callable[[], Row]] = {}
    for batch, length, width in SHAPES:
        size = f"{batch}x{length}x{width}"
        for mix in MIXES:
            found[f"anderson {size} {mix}"] = lambda n=batch, d=length * width, m=mix: solver_case(Anderson, n, d, m)
        for mix in ("fp32", "bf16 f, F"):
            found[f"broyden {size} {mix}"] = lambda n=batch, d=length * width, m=mix: solver_case(Broyden, n, d, m)
    for batch, length, features, dtype in TRELLIS:
        name = f"trellis {batch}x{length}x{features} {str(dtype).removeprefix('torch.')}"
        found[name] = lambda b=batch, t=length, f=features, y=dtype: trellis_case(b, t, f, y)
    for batch, length, width in (SHAPES[0], SHAPES[1], SHAPES[-1]):
        name = f"blocks {batch}x{length}x{width}"
        found[name] = lambda n=batch, d=length * width: block_sweep(n, d, "bf16 f, F")
    return found


def line(name: str, row: Row) -> str:
    if "error" in row:
        return f"{name:44} FAILED  {row['error']}"
    if not row["check"]:
        return f"{name:44} CHECK RED  {row.get('errors')}"
    if "us" in row:
        text = f"{row['us']:9.1f} ± {row['spread_us']:.1f} us {row['gb_s']:7.0f} GB/s   twin {row['naive_us']:9.1f} us"
    elif "forward_us" in row:
        text = (
            f"forward {row['forward_us']:7.1f} us {row['forward_gb_s']:6.0f} GB/s   "
            f"vjp {row['vjp_us']:7.1f} us {row['vjp_gb_s']:6.0f} GB/s   twin {row['naive_forward_us']:9.1f} us"
        )
    else:
        text = ", ".join(f"{key}: {value}" for key, value in row["sweep_us"].items())
    worst = f"   error {max(row['errors'].values()):.1e}" if "errors" in row else ""
    return f"{name:44} {text}{worst}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.json")
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("ops_gpu: needs a CUDA device; tests/unit/test_ops_*.py check the kernels on the CPU.")
    import triton

    device = torch.cuda.get_device_properties(0)
    header = {
        "device": device.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_s": copy_ceiling(),
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }
    print(header)
    rows: dict[str, Row] = {}
    for name, case in cases().items():
        if arguments.only not in name:
            continue
        try:
            rows[name] = case()
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:300], "traceback": traceback.format_exc()}
        print(line(name, rows[name]), flush=True)
        torch.cuda.empty_cache()
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "kernels.json").write_text(json.dumps({"header": header, "cases": rows}, indent=1))
    for name, row in rows.items():
        if "traceback" in row:
            print(f"\n{name}\n{row['traceback'][-1500:]}")
    red = [name for name, row in rows.items() if "error" in row or not row["check"]]
    print(f"\n{len(rows) - len(red)} of {len(rows)} cases passed" + (f"; not: {', '.join(red)}" if red else ""))
    raise SystemExit(bool(red))


if __name__ == "__main__":
    main()
