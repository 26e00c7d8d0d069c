"""The TrellisNet layer on one CUDA device: its kernels, and a training step of the Penn Treebank model around them.

    python -m benchmarks.kernels.trellis_gpu --out benchmarks/results/<date>_trellis

Kernels are compared with their plain twins in float64 on fresh random data, then timed inside a CUDA graph, with other
cuts into blocks beside the default. The training step (fixed budgets, memory carried, clipping, fused AdamW) is first
compared with the same step in float32; its row says what a step takes on the device and on the host, and which kernels
it consists of. A time without a passed check is not reported; a case that fails is listed with its error.
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
from torch import Tensor, nn

import equipoise as eq
from benchmarks.kernels.ops_gpu import BF16, DEVICE, F16, F32, Row, copy_ceiling, error_of, replayed, settings
from equipoise.models.deq_trellisnet import activation_penalty
from equipoise.models.registry import create_model
from equipoise.ops import drop_taps, gather_taps, trellis_cell
from equipoise.ops.taps import triton as taps_kernels
from equipoise.ops.trellis import triton as cell_kernels

BATCH, LENGTH, FEATURES = 32, 70, 1400
VOCABULARY = 10_000
FORWARD_STEPS, ADJOINT_STEPS = 16, 12
CALLS = 10
# TIME, WIDTH, WARPS of the cell and of its VJP; STEPS, WIDTH, WARPS of the taps
CELL_TILES = [(8, 32, 1), (8, 16, 1), (16, 16, 1), (16, 32, 1), (4, 64, 1), (8, 64, 1), (8, 64, 2), (16, 64, 4)]
TAPS_TILES = [(8, 256, 4), (4, 256, 4), (4, 512, 4), (8, 512, 8), (16, 128, 4), (2, 512, 2)]
BARS = {F32: 1e-5, F16: 2e-3, BF16: 1.5e-2}
# Of the gradient of the recurrent weight in a whole step against that in float32
STEP_BARS = {F16: 5e-2, BF16: 2e-1}


def timed(work: Callable[[], Any], moved: float) -> Row:
    """Microseconds of one call in a graph of some, and GB/s for the bytes it moves."""

    def several() -> None:
        for _ in range(CALLS):
            work()

    middle, noise = replayed(several, CALLS)
    return {"us": round(middle, 2), "spread_us": round(noise, 2), "gb_s": round(moved / middle / 1e3)}


def sweep(tiles: list[tuple[int, int, int]], names: tuple[str, str, str], kernels: Any, work: Callable[[], Any]) -> Row:
    """Microseconds of a call with other constants of a module of kernels."""
    found: Row = {}
    for tile in tiles:
        try:
            with settings(kernels, **dict(zip(names, tile, strict=True))):
                found[" x ".join(map(str, tile))] = timed(work, 0.0)["us"]
        except Exception as error:
            found[" x ".join(map(str, tile))] = f"{type(error).__name__}: {error}"[:160]
    return found


# Kernels


def normal(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def in_double(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def checked(errors: dict[str, float], bar: float) -> Row:
    return {"errors": errors, "check": all(error < bar for error in errors.values())}


def cell_case(dtype: torch.dtype) -> Row:
    """As in a solve: pre-activations in `dtype`, h and its cotangent in float32."""
    shape = (BATCH, LENGTH, 4 * FEATURES)
    pre, plus = (normal(*shape, dtype=dtype).requires_grad_() for _ in range(2))
    start, dh = normal(BATCH, 1, FEATURES).requires_grad_(), normal(BATCH, LENGTH, FEATURES)
    exact = in_double(pre, start, plus)
    h, c = trellis_cell(pre, start, plus, dtype=F32, backend="triton")
    truth = trellis_cell(*exact, backend="naive")
    assert c is not None
    found = (h, c, *torch.autograd.grad(h, (pre, start, plus), dh))
    expected = (*truth, *torch.autograd.grad(truth[0], exact, dh.double()))
    names = ("h", "c", "dpre", "dstart", "dplus")
    row = checked({name: error_of(a, b) for name, a, b in zip(names, found, expected, strict=True)}, BARS[dtype])
    if not row["check"]:
        return row
    pre, plus, start, kept = pre.detach(), plus.detach(), start.detach(), c.detach()
    size, e = dh.numel(), dtype.itemsize

    def forward() -> None:
        cell_kernels.forward(pre, start, plus, F32, with_c=False)

    def product() -> None:
        cell_kernels.backward(pre, start, kept, dh, None)

    row["forward"] = timed(forward, size * (8 * e + 4))
    row["forward, without plus"] = timed(
        lambda: cell_kernels.forward(pre, start, None, F32, with_c=False), size * (4 * e + 4)
    )
    row["forward, for a gradient"] = timed(
        lambda: cell_kernels.forward(pre, start, plus, F32, with_sum=True), size * (13 * e + 4)
    )
    row["vjp"] = timed(product, size * (9 * e + 4))
    if dtype == BF16:
        row["forward by TIME x WIDTH x WARPS"] = sweep(CELL_TILES, ("TIME", "WIDTH", "WARPS"), cell_kernels, forward)
        constants = ("VJP_TIME", "VJP_WIDTH", "VJP_WARPS")
        row["vjp by TIME x WIDTH x WARPS"] = sweep(CELL_TILES, constants, cell_kernels, product)
    return row


def taps_case(dtype: torch.dtype) -> Row:
    h, before = normal(BATCH, LENGTH, FEATURES).requires_grad_(), normal(BATCH, 1, FEATURES).requires_grad_()
    mask = (torch.rand(BATCH, 1, FEATURES, device=DEVICE) > 0.28) / 0.72
    exact = in_double(h, before, mask)
    rows = gather_taps(h, before, mask, kernel_size=2, dtype=dtype, backend="triton")
    truth = gather_taps(*exact, kernel_size=2, backend="naive")
    drows = normal(*rows.shape, dtype=dtype)
    found = (rows, *torch.autograd.grad(rows, (h, before), drows))
    expected = (truth, *torch.autograd.grad(truth, exact[:2], drows.double()))
    errors = {name: error_of(a, b) for name, a, b in zip(("rows", "dh", "dbefore"), found, expected, strict=True)}
    row = checked(errors, BARS[dtype])
    if not row["check"]:
        return row
    h, before = h.detach(), before.detach()
    moved = h.numel() * (4 + 2 * dtype.itemsize)

    def gather() -> None:
        taps_kernels.gather(h, before, mask, 2, 1, dtype)

    def scatter() -> None:
        taps_kernels.scatter(drows, h, before, mask, 1, False)

    row |= {"forward": timed(gather, moved), "vjp": timed(scatter, moved)}
    if dtype == BF16:
        names = ("STEPS", "WIDTH", "WARPS")
        row["forward by STEPS x WIDTH x WARPS"] = sweep(TAPS_TILES, names, taps_kernels, gather)
        row["vjp by STEPS x WIDTH x WARPS"] = sweep(TAPS_TILES, names, taps_kernels, scatter)
    return row


def drop_case(dtype: torch.dtype) -> Row:
    weight, kept = normal(4 * FEATURES, 2 * FEATURES), torch.rand(4 * FEATURES, FEATURES, device=DEVICE) > 0.5
    found, truth = (drop_taps(weight, kept, 2.0, dtype=dtype, backend=backend) for backend in ("triton", "naive"))
    row = checked({"weight": error_of(found, truth)}, BARS[dtype])
    if row["check"]:
        moved = weight.numel() * (4 + dtype.itemsize) + kept.numel()
        row["forward"] = timed(lambda: drop_taps(weight, kept, 2.0, dtype=dtype), moved)
    return row


# The training step


def model_of() -> Any:
    adjoint = eq.Implicit(solver=eq.Anderson(memory=5), stop=eq.Stop(rtol=0, max_steps=ADJOINT_STEPS))
    plan = eq.Plan(eq.Anderson(memory=5), adjoint, eq.Stop(rtol=0, max_steps=FORWARD_STEPS))
    torch.manual_seed(0)
    model = create_model("deq_trellisnet_ptb", vocab_size=VOCABULARY, form="eliminated", weight_norm=False, plan=plan)
    model.deq.engine = "captured"
    return model.to(DEVICE)


class Training:
    """A model, its optimiser, and steps on random words.

    Args:
        dtype: Of autocast; none for float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.model, self.dtype, self.memory = model_of(), dtype, None
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1.5e-3, betas=(0.9, 0.99), weight_decay=0.05, fused=True)
        self.scale = 4.0 * BATCH * LENGTH if dtype == F16 else 1.0
        generator = torch.Generator().manual_seed(1)
        words = torch.randint(VOCABULARY, (64, BATCH, LENGTH + 1), generator=generator)
        self.words, self.count = words.to(DEVICE), 0

    def gradients(self) -> Tensor:
        """Fill the gradients; return the loss."""
        words = self.words[self.count % len(self.words)]
        self.count += 1
        with torch.autocast(DEVICE, self.dtype, enabled=self.dtype != F32):
            output = self.model(words[:, :-1], words[:, 1:], self.memory)
            loss = output.loss + activation_penalty(output)
        self.memory = output.memory
        self.optimizer.zero_grad(set_to_none=True)
        (loss * self.scale if self.scale != 1 else loss).backward()
        if self.scale != 1:
            torch._foreach_mul_([parameter.grad for parameter in self.parameters], 1 / self.scale)
        return loss

    def step(self) -> None:
        self.gradients()
        nn.utils.clip_grad_norm_(self.parameters, 0.25, foreach=True)
        self.optimizer.step()


def step_errors(dtype: torch.dtype) -> dict[str, float]:
    """Loss and gradients of the first step against those in float32, with the same draws."""
    results = []
    for each in (F32, dtype):
        training = Training(each)
        torch.manual_seed(7)
        loss = training.gradients()
        weights = training.model.cell.recurrent.weight_v, training.model.injection.weight_v
        results.append([loss.detach(), *(weight.grad.clone() for weight in weights)])
    names = ("loss", "recurrent weight", "injection weight")
    return {name: error_of(a, b) for name, a, b in zip(names, results[1], results[0], strict=True)}


def step_case(dtype: torch.dtype) -> Row:
    torch.set_float32_matmul_precision("highest")
    row = checked(step_errors(dtype), STEP_BARS[dtype])
    if not row["check"]:
        return row
    training = Training(dtype)
    for _ in range(8):
        training.step()
    engine = training.model.deq.capture
    row["engine"] = {"recorded": engine.recorded, "replayed": engine.replayed, "fallbacks": dict(engine.fallbacks)}
    torch.cuda.reset_peak_memory_stats()
    row["ms"] = in_a_row(training.step, 60)
    row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    row["host_ms"] = on_the_host(training.step)
    row["kernels"] = by_kernel(training.step)
    row["busy_ms"] = round(sum(kernel["us"] for kernel in row["kernels"]) / 1e3, 2)
    row["kernels"] = row["kernels"][:30]
    return row


def in_a_row(step: Callable[[], None], count: int) -> float:
    """Milliseconds per step of steps one after another."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(count):
        step()
    last.record()
    torch.cuda.synchronize()
    return round(first.elapsed_time(last) / count, 3)


def on_the_host(step: Callable[[], None]) -> float:
    """Milliseconds until a step is submitted; the device is idle before it, so nothing waits for it."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        before = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - before))
    torch.cuda.synchronize()
    return round(statistics.median(times), 3)


def by_kernel(step: Callable[[], None], count: int = 3) -> list[Row]:
    """Kernels of a step by name, the costliest first: microseconds and calls per step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return [
        {
            "us": round(event.self_device_time_total / count, 1),
            "calls": round(event.count / count, 1),
            "name": event.key[:110],
        }
        for event in events
    ]


# The report


def cases() -> dict[str, Callable[[], Row]]:
    """All cases by name."""
    found: dict[str, Callable[[], Row]] = {}
    for name, dtype in (("bf16", BF16), ("fp16", F16), ("fp32", F32)):
        found[f"cell {name}"] = lambda d=dtype: cell_case(d)
        found[f"taps {name}"] = lambda d=dtype: taps_case(d)
    found["drop bf16"] = lambda: drop_case(BF16)
    found["step bf16"] = lambda: step_case(BF16)
    found["step fp16"] = lambda: step_case(F16)
    return found


def show(name: str, row: Row) -> None:
    if "error" in row:
        print(f"{name:10} FAILED  {row['error']}")
        return
    verdict = "checked" if row["check"] else "CHECK RED"
    print(f"{name:10} {verdict}  " + ", ".join(f"{key} {value:.1e}" for key, value in row["errors"].items()))
    for key, value in row.items():
        if isinstance(value, dict) and "us" in value:
            print(f"    {key:26} {value['us']:8.1f} ± {value['spread_us']:.1f} us {value['gb_s']:6d} GB/s")
        elif key == "kernels":
            for kernel in value:
                print(f"    {kernel['us']:9.1f} us {kernel['calls']:6.1f} x  {kernel['name']}")
        elif key not in ("errors", "check"):
            print(f"    {key:26} {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for trellis.json")
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("trellis_gpu: needs a CUDA device; tests/unit/test_ops_t*.py check the kernels on the CPU.")
    import triton

    device = torch.cuda.get_device_properties(0).name
    header = {"device": device, "torch": torch.__version__, "triton": triton.__version__, "copy_gb_s": copy_ceiling()}
    header["shape"] = f"B {BATCH}, T {LENGTH}, H {FEATURES}; {FORWARD_STEPS} + {ADJOINT_STEPS} steps"
    print(header)
    rows: dict[str, Row] = {}
    for name, case in cases().items():
        if arguments.only not in name:
            continue
        before = time.perf_counter()
        try:
            torch.manual_seed(0)
            rows[name] = case()
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:300], "check": False}
            traceback.print_exc()
        rows[name]["seconds"] = round(time.perf_counter() - before, 1)
        show(name, rows[name])
        torch.cuda.empty_cache()
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "trellis.json").write_text(json.dumps({"header": header, "cases": rows}, indent=1))
    red = [name for name, row in rows.items() if not row["check"]]
    print(f"\n{len(rows) - len(red)} of {len(rows)} cases passed" + (f"; not: {', '.join(red)}" if red else ""))
    raise SystemExit(bool(red))


if __name__ == "__main__":
    main()
