"""Checks and times of `equipoise.ops.attend` and of what uses it, on one CUDA device, in under a minute.

    python -m benchmarks.kernels.attention_gpu --out benchmarks/results/<date>_attention

At the shapes of the solver benchmark: the kernels are compared with their plain twin in float64, values and gradients;
then times from CUDA graphs, medians of replays in microseconds:

- `kernel`: the kernels alone; `product`: the scores by distance that they take;
- `sdpa`: torch's fused attention, given the shifted and masked scores by distance ready made as its mask;
- `layer` and `f`: the attention layer and the whole f of the DEQ-Transformer, by kernels and by the plain path.

`forward` is one evaluation, `both` an evaluation and the VJP to its arguments (for a layer and f: to the state). A time
without a passed check is not reported. Tiles beside the defaults are tried last, until the time for it is up.
"""

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.ops_gpu import DEVICE, Row, error_of, replayed, settings
from equipoise.bench.cells import SHAPES, Bench, Shape
from equipoise.ops import attend
from equipoise.ops.attention.naive import out_of_sight, relative_shift

REPEATS = 10  # calls in a graph
# Allowed ‖found − truth‖ / ‖truth‖ of values and of gradients.
BARS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 3.2e-2)}
# Queries, keys, warps and stages tried beside the defaults, for one kernel at a time.
TILES = [(64, 64, 4, 2), (32, 32, 4, 2), (32, 64, 4, 2), (64, 32, 4, 1), (64, 32, 4, 3), (64, 64, 8, 2)]
KERNELS = ("FORWARD", "QUERIES", "KEYS")
CELLS = ("copy", "small", "medium", "wide", "wide56")
SWEPT = CELLS[:4]  # the last has the kernels of the one before


def arguments(shape: Shape) -> list[Tensor]:
    """Queries, keys and values as parts of one product in float32, scores by distance in the dtype of products."""
    torch.manual_seed(0)
    features = shape.width // shape.heads
    joint = torch.randn(shape.batch, shape.length, 3, shape.heads, features, device=DEVICE)
    query, key, value = (part.transpose(1, 2) for part in joint.unbind(2))
    columns = shape.length + 1 + -(shape.length + 1) % 8
    by_distance = torch.randn(shape.heads, shape.batch, shape.length, columns, device=DEVICE)
    return [query, key, value, by_distance.to(dtype_of(shape)).transpose(0, 1)]


def dtype_of(shape: Shape) -> torch.dtype:
    return torch.bfloat16 if shape.half else torch.float32


def autocast(shape: Shape) -> Any:
    return torch.autocast(DEVICE, torch.bfloat16) if shape.half else nullcontext()


def scale_of(shape: Shape) -> float:
    return (shape.width // shape.heads) ** -0.5


# Checks


def check(shape: Shape) -> Row:
    """Value and gradients of the kernels, and whether a replay gives the same bits, against the twin in float64."""
    given = [tensor.detach().requires_grad_() for tensor in arguments(shape)]
    bias = torch.randn(shape.heads, shape.width // shape.heads, device=DEVICE, requires_grad=True)
    given.append(bias)
    with autocast(shape):
        out = attend(*given, scale=scale_of(shape), backend="triton")
    cotangent = torch.randn_like(out)
    found = out.detach(), *torch.autograd.grad(out, given, cotangent, retain_graph=True)
    again = torch.autograd.grad(out, given, cotangent)
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    truth = attend(*wide, scale=scale_of(shape), backend="naive")
    expected = truth.detach(), *torch.autograd.grad(truth, wide, cotangent.double())
    names = ("result", "query", "key", "value", "by_distance", "bias")
    errors = {name: error_of(a, b) for name, a, b in zip(names, found, expected, strict=True)}
    bars = BARS[dtype_of(shape)]
    passed = all(error < bars[name != "result"] for name, error in errors.items())
    same = all(torch.equal(a, b) for a, b in zip(found[1:], again, strict=True))
    return {"errors": errors, "same_twice": same, "check": passed and same}


# Times


def times(shape: Shape, bench: Bench) -> Row:
    row: Row = kernel_times(shape) | product_times(shape) | sdpa_times(shape)
    attention = bench.model.deq.cell.attention
    injection, positions, past = bench.inputs
    for name, backend in (("plain", "naive"), ("fused", "auto")):
        attention.backend = backend
        layer = both_ways(lambda z: attention(z, injection, positions, past), bench)
        f = both_ways(bench.f, bench)
        row |= {f"layer_{name}_{key}_us": value for key, value in layer.items()}
        row |= {f"f_{name}_{key}_us": value for key, value in f.items()}
    attention.backend = "auto"
    return row


def kernel_times(shape: Shape) -> Row:
    forward, backward = kernel_work(shape)
    return {"kernel_forward_us": replayed(forward, REPEATS)[0], "kernel_vjp_us": replayed(backward, REPEATS)[0]}


def kernel_work(shape: Shape) -> tuple[Callable[[], None], Callable[[], None]]:
    """Calls of the kernels forward and of those of the VJP."""
    from equipoise.ops.attention import triton as kernels

    given, scale = arguments(shape), scale_of(shape)
    bias = torch.randn(shape.heads, 1, shape.width // shape.heads, device=DEVICE).expand_as(given[0])
    out, lse = kernels.forward(*given, bias, scale, None, dtype_of(shape))
    dout = torch.randn_like(out)

    def forward() -> None:
        for _ in range(REPEATS):
            kernels.forward(*given, bias, scale, None, dtype_of(shape))

    def backward() -> None:
        for _ in range(REPEATS):
            kernels.backward(*given, bias, out, lse, dout, scale, None)

    return forward, backward


def product_times(shape: Shape) -> Row:
    """The product with the keys of distances, rows in multiples of 16 bytes and not."""
    features, rows = shape.width // shape.heads, shape.batch * shape.length
    query = torch.randn(rows, shape.heads, features, device=DEVICE).to(dtype_of(shape)).transpose(0, 1)
    found: Row = {}
    columns = shape.length + 1
    for name, width in (("product", columns + -columns % 8), ("product_unaligned", columns)):
        distances = torch.randn(shape.heads, features, width, device=DEVICE).to(dtype_of(shape))
        work = [lambda distances=distances: torch.bmm(query, distances)] * REPEATS
        found[f"{name}_us"] = replayed(lambda work=work: _each(work), REPEATS)[0]
    return found


def sdpa_times(shape: Shape) -> Row:
    query, key, value, by_distance = (tensor.to(dtype_of(shape)) for tensor in arguments(shape))
    blocked = out_of_sight(shape.length, 0, None, query.device)
    mask = relative_shift(by_distance[..., -shape.length - 1 :].contiguous()).masked_fill(blocked, -math.inf)
    given = [tensor.requires_grad_() for tensor in (query, key, value, mask.contiguous())]

    def evaluate() -> Tensor:
        return scaled_dot_product_attention(*given, scale=scale_of(shape))

    cotangent = torch.randn_like(evaluate())
    with torch.no_grad():
        forward = replayed(lambda: _each([evaluate] * REPEATS), REPEATS)[0]
    both = replayed(lambda: _each([lambda: torch.autograd.grad(evaluate(), given, cotangent)] * REPEATS), REPEATS)[0]
    return {"sdpa_forward_us": forward, "sdpa_both_us": both}


def both_ways(function: Callable[[Tensor], Tensor], bench: Bench) -> Row:
    """An evaluation, and one with the VJP to the state, as a solve and its adjoint have them."""
    z = torch.randn_like(bench.start()).requires_grad_()
    with bench.autocast():
        cotangent = torch.randn_like(function(z))

    def evaluate() -> None:
        with bench.autocast(), torch.no_grad():
            function(z)

    def pull_back() -> None:
        with bench.autocast():
            out = function(z)
        torch.autograd.grad(out, z, cotangent)

    repeats = 2 if bench.shape.inner > 10_000 else REPEATS
    pairs = {"forward": evaluate, "both": pull_back}
    return {name: replayed(lambda work=work: _each([work] * repeats), repeats)[0] for name, work in pairs.items()}


def _each(work: list[Callable[[], Any]]) -> None:
    for call in work:
        call()


# Tiles


def sweep(shape: Shape, deadline: float) -> Row:
    """Microseconds of the forward kernel, or of the VJP, with other tiles for one kernel at a time."""
    from equipoise.ops.attention import triton as kernels

    found: Row = {}
    forward, backward = kernel_work(shape)
    for kernel in KERNELS:
        work = forward if kernel == "FORWARD" else backward
        default = getattr(kernels, kernel)[shape.width // shape.heads * dtype_of(shape).itemsize > 128]
        for tiles in (tuple(default), *(each for each in TILES if each != tuple(default))):
            if time.monotonic() > deadline:
                return found
            try:
                with settings(kernels, **{kernel: (kernels.Tiles(*tiles),) * 2}):
                    found[f"{kernel} {tiles}"] = round(replayed(work, REPEATS)[0], 2)
            except Exception as error:
                found[f"{kernel} {tiles}"] = f"{type(error).__name__}: {error}"[:120]
    if not shape.half:
        with settings(kernels, PRECISION="ieee"):
            found["ieee"] = [round(replayed(work, REPEATS)[0], 2) for work in (forward, backward)]
    return found


# The report


def case(shape: Shape) -> Row:
    row = check(shape)
    torch.cuda.empty_cache()
    if row["check"]:
        row |= times(shape, Bench(shape, torch.device(DEVICE)))
    return row


def line(name: str, row: Row) -> str:
    if "error" in row:
        return f"{name:8} FAILED  {row['error']}"
    if not row["check"]:
        return f"{name:8} CHECK RED  same twice: {row['same_twice']}  {row['errors']}"
    pairs = ", ".join(f"{key[:-3]} {value:.1f}" for key, value in row.items() if key.endswith("_us"))
    return f"{name:8} error {max(row['errors'].values()):.1e}   us: {pairs}"


def guarded(work: Callable[[], Row]) -> Row:
    try:
        return work()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300], "traceback": traceback.format_exc()}
    finally:
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for attention.json")
    parser.add_argument("--only", default="", help="run the shapes whose names contain this")
    parser.add_argument("--seconds", type=float, default=45, help="no more tiles are tried after so long")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("attention_gpu: needs a CUDA device; tests/unit/test_ops_attention.py checks on the CPU.")
    import triton

    deadline = time.monotonic() + arguments.seconds
    header = {
        "device": torch.cuda.get_device_properties(0).name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }
    print(header)
    names = [name for name in CELLS if arguments.only in name]
    rows: dict[str, Row] = {}
    for name in names:
        rows[name] = guarded(lambda name=name: case(SHAPES[name]))
        print(line(name, rows[name]), flush=True)
        if "traceback" in rows[name]:
            print(rows[name]["traceback"][-1500:])
    for name in (name for name in SWEPT if name in rows and rows[name].get("check")):
        rows[name]["tiles_us"] = guarded(lambda name=name: sweep(SHAPES[name], deadline))
        print(f"{name:8} tiles: " + ", ".join(f"{key}: {value}" for key, value in rows[name]["tiles_us"].items()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "attention.json").write_text(json.dumps({"header": header, "cases": rows}, indent=1))
    red = [name for name, row in rows.items() if not row.get("check")]
    print(f"{len(rows) - len(red)} of {len(rows)} shapes passed" + (f"; not: {', '.join(red)}" if red else ""))
    raise SystemExit(bool(red))


if __name__ == "__main__":
    main()
