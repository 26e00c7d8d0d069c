# mypy: disable-error-code="no-untyped-def"
"""The kernel of `lookup`: a program per token."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.ops._backend import apart, through_twin
from equipoise.ops.words import naive

# The most features that a program takes at a time, and its warps.
BLOCK, WARPS = 512, 2


@triton.jit
def _lookup(
    tokens_ptr,
    table_ptrs,
    x_ptr,
    scale,
    BOUNDS: tl.constexpr,
    WIDTHS: tl.constexpr,
    FIRSTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    x_ptr += row * FIRSTS[len(WIDTHS)]
    factor = tl.where((token >= 0) & (token < BOUNDS[len(WIDTHS)]), scale, float("nan"))
    for i in tl.static_range(len(WIDTHS)):
        reach = tl.where((token >= BOUNDS[i]) & (token < BOUNDS[i + 1]), WIDTHS[i], 0)
        for start in range(0, WIDTHS[i], BLOCK):
            at = start + tl.arange(0, BLOCK)
            vector = tl.load(table_ptrs[i] + (token - BOUNDS[i]) * WIDTHS[i] + at, mask=at < reach, other=0.0)
            tl.store(x_ptr + FIRSTS[i] + at, vector.to(tl.float32) * factor, mask=at < WIDTHS[i])


def forward(
    tokens: Tensor, tables: Sequence[Tensor], bounds: tuple[int, ...], scale: float, dtype: torch.dtype
) -> Tensor:
    """See `lookup`."""
    widths = tuple(table.shape[1] for table in tables)
    x = tables[0].new_empty((len(tokens), sum(widths)), dtype=dtype)
    _lookup[(len(tokens),)](
        tokens.contiguous(),
        tuple(table.contiguous() for table in tables),
        x,
        scale,
        BOUNDS=bounds,
        WIDTHS=widths,
        FIRSTS=tuple(accumulate(widths, initial=0)),
        BLOCK=min(triton.next_power_of_2(max(widths)), BLOCK),
        num_warps=WARPS,
    )
    return x


class Lookup(torch.autograd.Function):
    """`lookup` by a kernel; where derivatives of derivatives are taken the plain twin stands in."""

    @staticmethod
    def forward(tokens: Tensor, bounds: tuple[int, ...], scale: float, dtype: torch.dtype, *tables: Tensor) -> Tensor:
        return forward(tokens, tables, bounds, scale, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tokens, *ctx.options = inputs[:4]
        ctx.save_for_backward(tokens, *inputs[4:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tokens, *tables = ctx.saved_tensors
        bounds, scale, dtype = ctx.options
        needed = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            inputs = apart(tables)
            x = naive.lookup(tokens, inputs, bounds, scale, dtype)
            return None, None, None, None, *through_twin([x], grads, inputs, needed)
        parts = (grads[0].to(tables[0].dtype) * scale).split([table.shape[1] for table in tables], dim=1)
        found = [
            _into_table(part, tokens - low, len(table)) if need else None
            for part, low, table, need in zip(parts, bounds[:-1], tables, needed, strict=True)
        ]
        return None, None, None, None, *found


def _into_table(part: Tensor, row: Tensor, size: int) -> Tensor:
    """The cotangent of a table from those of vectors; one of a token in another cluster adds zero to some row."""
    near = row.clamp(0, size - 1)
    vectors = torch.where((row == near).unsqueeze(1), part, 0.0)
    return torch.ops.aten.embedding_dense_backward(vectors, near, size, -1, False)  # type: ignore[no-any-return]
