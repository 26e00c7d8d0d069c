"""Single operations of `equipoise.ops.norm` at several sizes of blocks; rows for `mdeq_gpu --tune`."""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise._tape import tape_for
from equipoise.ops.norm import triton as kernels
from equipoise.ops.norm import triton_pieces as pieces
from equipoise.ops.norm import triton_residual

REPEATS, ROUNDS = 20, 5
# Name, shape, groups and operation: of the finest resolution of TINY at batch 128, of LARGE at
# batch 96 and of CamVid at batch 8, whose groups do not fit in registers.
SHAPES: dict[str, tuple[tuple[int, ...], int, str]] = {
    "tiny hidden": ((128, 120, 32, 32), 8, "relu"),
    "tiny residual": ((128, 24, 32, 32), 8, "residual"),
    "tiny fusion": ((128, 24, 16, 16), 8, "enlarge"),
    "tiny last": ((128, 24, 32, 32), 4, "plain"),
    "large hidden": ((96, 160, 32, 32), 8, "relu"),
    "large hidden 8x8": ((96, 640, 8, 8), 8, "relu"),
    "large residual": ((96, 32, 32, 32), 8, "residual"),
    "camvid hidden": ((8, 128, 88, 120), 8, "relu"),
    "camvid residual": ((8, 32, 88, 120), 8, "residual"),
    "camvid fusion": ((8, 32, 44, 60), 8, "enlarge"),
}
# The most numbers in registers, in a chunk beyond that, per thread, and bytes of a pixel with channels last, for which
# groups in chunks have 32 at least.
SETTINGS = [
    (16384, 4096, 16, 12),
    (4096, 4096, 16, 12),
    (32768, 4096, 32, 12),
    (16384, 4096, 32, 12),
    (8192, 2048, 8, 12),
    (16384, 4096, 16, 24),
    (16384, 4096, 16, 48),
    (4096, 2048, 16, 240),
]
# For large maps, those of CamVid.
LARGE_SETTINGS = [
    (16384, 4096, 16, 12),
    *(
        (16384, chunk, per_thread, together)
        for chunk in (4096, 8192, 16384)
        for per_thread in (16, 32)
        for together in (64, 128, 256)
    ),
    (16384, 8192, 16, 12),
    (16384, 16384, 32, 12),
]


def tuning_rows(device: torch.device) -> dict[str, Callable[[], dict[str, Any]]]:
    """For each operation and layout: microseconds and GB/s, forward and of the VJP, for each setting."""
    return {
        f"{name}{' last' if last else ''}": functools.partial(
            _row, device, *of, last, LARGE_SETTINGS if name.startswith("camvid") else SETTINGS
        )
        for last in (False, True)
        for name, of in SHAPES.items()
    }


def _row(
    device: torch.device,
    shape: tuple[int, ...],
    groups: int,
    operation: str,
    last: bool,
    settings: list[tuple[int, ...]],
) -> dict[str, Any]:
    layout = torch.channels_last if last else torch.contiguous_format

    def drawn(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype).contiguous(memory_format=layout)

    x, (weight, bias) = drawn(*shape), torch.rand(2, shape[1], device=device)
    forward, backward = _operation(x, weight, bias, drawn, groups, operation)
    times: dict[str, float] = {}
    for block, chunk, per_thread, together in settings:
        if not last and together != settings[0][3]:
            continue
        for module in (kernels, triton_residual):
            module.BLOCK = module.VJP_BLOCK = block
        pieces.CHUNK, pieces.PER_THREAD, pieces.TOGETHER_BYTES = chunk, per_thread, together
        pieces.CHUNK_BYTES = max(32, together)
        for name, work in (("forward", forward), ("vjp", backward)):
            key = f"{name} {block} {chunk} {per_thread}" + (f" {together} B" if last else "")
            try:
                times[key] = _milliseconds(work, device)
            except Exception as error:
                times[key] = float("nan")
                print(f"    {key}: {type(error).__name__}: {str(error)[:120]}")
    ranked = dict(sorted(times.items(), key=lambda item: (item[0].split()[0], item[1])))
    return {"unit": "ms", "ms": ranked, "error": 0.0, "check": True, "fallbacks": {}}


def _operation(
    x: Tensor, weight: Tensor, bias: Tensor, drawn: Callable[..., Tensor], groups: int, operation: str
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and VJP, as the model calls them under autocast."""
    n, c, h, w = x.shape
    if operation == "residual":
        z, added, mask = drawn(n, c, h, w, dtype=torch.float32), drawn(n, c, h, w), torch.ones_like(x[:, :, :1, :1])
        weights, dtype = [weight, bias, weight, bias], x.dtype
        _, saved = triton_residual.residual(x, z, mask, added, weights, groups, (1e-5, 1e-5), dtype)
        dy = drawn(n, c, h, w)
        return (
            lambda: triton_residual.residual(x, z, mask, added, weights, groups, (1e-5, 1e-5), dtype),
            lambda: triton_residual.residual_vjp(x, z, mask, added, weights, saved, [dy, dy], True),
        )
    enlarge, relu = (2 if operation == "enlarge" else 1), operation != "plain"
    plus = drawn(n, c, h * enlarge, w * enlarge) if operation == "enlarge" else None
    affine = (None, None) if operation == "plain" else (weight, bias)
    dtype = torch.float32 if operation == "plain" else x.dtype
    y, mean, rstd = kernels.norm(x, *affine, plus, groups, 1e-5, enlarge, relu, dtype)
    dy, written = torch.randn_like(y), None if plus is None else plus.dtype
    result = None if plus is None else y
    return (
        lambda: kernels.norm(x, *affine, plus, groups, 1e-5, enlarge, relu, dtype),
        lambda: kernels.norm_vjp(x, *affine, result, mean, rstd, dy, written, enlarge, relu, affine[0] is not None),
    )


def _milliseconds(work: Callable[[], Any], device: torch.device) -> float:
    """Median over rounds of a graph with many calls."""

    def run() -> None:
        for _ in range(REPEATS):
            work()

    tape: Any = tape_for(device)
    tape.rehearse(run)
    replay, times = tape.record(run), []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / REPEATS)
    return statistics.median(times)
