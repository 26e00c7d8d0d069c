# mypy: disable-error-code="no-untyped-def"
"""The kernels of `attend`: one program per head and block of queries (or keys) walks over blocks of keys (or queries).

Nothing of size T × L is written but the cotangent of the scores by distance. The forward kernel keeps a running maximum
and sum per query and saves the logarithm of the sum of exponentials; both kernels of the VJP compute the map again from
it. Exponents are to base 2, which the hardware has.

Columns of scores by distance end with distance 0, so query i and key j meet in row i at column W − 1 − (M + i − j):
along a row of the map addresses follow each other, and from row to row they are one less than a row's stride apart.
"""

import itertools
import math
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise._compat import reenter_autocast
from equipoise.ops._backend import apart, through_twin
from equipoise.ops.attention import naive


class Tiles(NamedTuple):
    """Queries and keys per block, warps per program, and loads of how many blocks are under way at once."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel, for rows of a head of up to 128 bytes, as they are multiplied, and for wider ones. Larger tiles do not fit
# into registers.
FORWARD = Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 2)
QUERIES = Tiles(64, 32, 4, 3), Tiles(32, 32, 4, 2)
KEYS = Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 2)
# Products of float32: three of tensor cores for each, which leaves a relative error of about 1e-6.
PRECISION = "tf32x3"
# Strides are handed over in units of up to so many elements, a constant of the kernel: so the compiler knows that rows
# begin where wide loads may. What it finds out by itself, multiples of 16, the heads of a joint product are not.
UNIT = 8

LOG2E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)  # below every score, and finite: a block in which a query sees nothing gives no NaN
# The interpreter multiplies bfloat16 as if its bits were integers. In float32 the products are the same.
WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _rows(ptr, stride, row, feature, inside, HEAD: tl.constexpr):
    """Rows of a matrix with HEAD columns; zeros outside of it."""
    mask = inside[:, None] & (feature < HEAD)[None, :]
    return tl.load((ptr + row.to(tl.int64) * stride)[:, None] + feature[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(ptr, stride, row, feature, inside, x, HEAD: tl.constexpr):
    mask = inside[:, None] & (feature < HEAD)[None, :]
    tl.store((ptr + row.to(tl.int64) * stride)[:, None] + feature[None, :], x, mask=mask)


@triton.jit
def _biased_queries(
    ptr, stride, bias_ptr, row, feature, inside, dtype: tl.constexpr, HAS_BIAS: tl.constexpr, HEAD: tl.constexpr
):
    q = _rows(ptr, stride, row, feature, inside, HEAD)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=feature < HEAD, other=0.0)
        q = q.to(tl.float32) + bias.to(tl.float32)[None, :]
    return q.to(dtype)


@triton.jit
def _in_sight(delta, LOCAL: tl.constexpr):
    if LOCAL > 0:
        return (delta >= 0) & (delta < LOCAL)
    else:
        return delta >= 0


@triton.jit
def _first_key(query, past, LOCAL: tl.constexpr):
    """The first key that a query sees; never falls from query to query."""
    if LOCAL > 0:
        return tl.maximum(query + past - LOCAL + 1, 0)
    else:
        return query * 0


@triton.jit
def _forward(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    distance_ptr,
    out_ptr,
    lse_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    bias_head,
    distance_batch,
    distance_head,
    distance_row,
    columns,
    length,
    past,
    heads,
    scale,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    LOCAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    batch, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES  # those that see most begin first
    dtype = out_ptr.dtype.element_ty
    i, feature = start + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    inside = i < length
    q_ptr += (batch * q_batch + head * q_head) * UNIT
    k_ptr += (batch * k_batch + head * k_head) * UNIT
    v_ptr += (batch * v_batch + head * v_head) * UNIT
    bias_ptr += head * bias_head * UNIT
    distance_ptr += batch * distance_batch + head * distance_head + columns - 1 - past
    distance_place = distance_ptr + i.to(tl.int64) * (distance_row - 1)
    q = _biased_queries(q_ptr, q_row * UNIT, bias_ptr, i, feature, inside, dtype, HAS_BIAS, HEAD)
    peak = tl.full([QUERIES], LOWEST, dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], dtype=tl.float32)
    end = past + tl.minimum(start + QUERIES, length)
    for first in range(_first_key(start, past, LOCAL) // KEYS * KEYS, end, KEYS):
        j = first + tl.arange(0, KEYS)
        seen = _in_sight(past + i[:, None] - j[None, :], LOCAL) & inside[:, None]
        distance = tl.load(distance_place[:, None] + j[None, :], mask=seen, other=0.0).to(tl.float32)
        k = _rows(k_ptr, k_row * UNIT, j, feature, j < end, HEAD).to(dtype)
        v = _rows(v_ptr, v_row * UNIT, j, feature, j < end, HEAD).to(dtype)
        s = tl.where(seen, (_dot(q, tl.trans(k), PRECISION) + distance) * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(s, axis=1))
        shrink = tl.exp2(peak - higher)
        p = tl.exp2(s - higher[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        mixed = mixed * shrink[:, None] + _dot(p.to(dtype), v, PRECISION)
        peak = higher
    total = tl.where(inside, total, 1.0)
    out_ptr += (batch * length * heads + head) * HEAD
    _store_rows(out_ptr, heads * HEAD, i, feature, inside, mixed / total[:, None], HEAD)
    tl.store(lse_ptr + tl.program_id(0).to(tl.int64) * length + i, peak + tl.log2(total), mask=inside)


@triton.jit
def _backward_queries(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    distance_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    inner_ptr,
    dq_ptr,
    ddistance_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    bias_head,
    distance_batch,
    distance_head,
    distance_row,
    ddistance_batch,
    ddistance_head,
    ddistance_row,
    columns,
    length,
    past,
    heads,
    scale,
    factor,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    LOCAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Cotangents of queries and of scores by distance; for the other kernel ⟨cotangent, result⟩ of each query."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    dtype = out_ptr.dtype.element_ty
    i, feature = start + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    inside = i < length
    q_ptr += (batch * q_batch + head * q_head) * UNIT
    k_ptr += (batch * k_batch + head * k_head) * UNIT
    v_ptr += (batch * v_batch + head * v_head) * UNIT
    bias_ptr += head * bias_head * UNIT
    distance_ptr += batch * distance_batch + head * distance_head + columns - 1 - past
    distance_place = distance_ptr + i.to(tl.int64) * (distance_row - 1)
    ddistance_ptr += batch * ddistance_batch + head * ddistance_head
    ddistance_place = ddistance_ptr + columns - 1 - past + i.to(tl.int64) * (ddistance_row - 1)
    result = (batch * length * heads + head) * HEAD  # where results and their like begin
    per_query = tl.program_id(0).to(tl.int64) * length + i
    q = _biased_queries(q_ptr, q_row * UNIT, bias_ptr, i, feature, inside, dtype, HAS_BIAS, HEAD)
    dout = _rows(dout_ptr + result, heads * HEAD, i, feature, inside, HEAD)
    out = _rows(out_ptr + result, heads * HEAD, i, feature, inside, HEAD)
    inner = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    tl.store(inner_ptr + per_query, inner, mask=inside)
    lse = tl.load(lse_ptr + per_query, mask=inside, other=0.0)
    dq = tl.zeros([QUERIES, WIDTH], dtype=tl.float32)
    end = past + tl.minimum(start + QUERIES, length)
    for first in range(_first_key(start, past, LOCAL) // KEYS * KEYS, end, KEYS):
        j = first + tl.arange(0, KEYS)
        seen = _in_sight(past + i[:, None] - j[None, :], LOCAL) & inside[:, None]
        distance = tl.load(distance_place[:, None] + j[None, :], mask=seen, other=0.0).to(tl.float32)
        k = _rows(k_ptr, k_row * UNIT, j, feature, j < end, HEAD).to(dtype)
        v = _rows(v_ptr, v_row * UNIT, j, feature, j < end, HEAD).to(dtype)
        s = (_dot(q, tl.trans(k), PRECISION) + distance) * scale
        p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
        ds = p * (_dot(dout, tl.trans(v), PRECISION) - inner[:, None]) * factor
        tl.store(ddistance_place[:, None] + j[None, :], ds, mask=seen)
        dq += _dot(ds.to(dtype), k, PRECISION)
    _store_rows(dq_ptr + result, heads * HEAD, i, feature, inside, dq, HEAD)
    # Columns that no key in sight belongs to come before the others.
    ddistance_place = ddistance_ptr + i.to(tl.int64) * ddistance_row
    unused = columns - 1 - past - i + _first_key(i, past, LOCAL)
    zero = tl.zeros([QUERIES, KEYS], dtype=tl.float32)
    for first in range(0, columns - 1 - past - start + _first_key(start, past, LOCAL), KEYS):
        column = first + tl.arange(0, KEYS)
        mask = (column[None, :] < unused[:, None]) & inside[:, None]
        tl.store(ddistance_place[:, None] + column[None, :], zero, mask=mask)


@triton.jit
def _backward_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    distance_ptr,
    dout_ptr,
    lse_ptr,
    inner_ptr,
    dk_ptr,
    dv_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    bias_head,
    distance_batch,
    distance_head,
    distance_row,
    columns,
    length,
    past,
    heads,
    scale,
    factor,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    LOCAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Cotangents of keys and values. Blocks of the map are computed transposed, (KEYS, QUERIES), as they are used."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    start = tl.program_id(1) * KEYS
    dtype = dout_ptr.dtype.element_ty
    j, feature = start + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    inside = j < past + length
    q_ptr += (batch * q_batch + head * q_head) * UNIT
    k_ptr += (batch * k_batch + head * k_head) * UNIT
    v_ptr += (batch * v_batch + head * v_head) * UNIT
    bias_ptr += head * bias_head * UNIT
    distance_ptr += batch * distance_batch + head * distance_head + columns - 1 - past
    dout_ptr += (batch * length * heads + head) * HEAD
    lse_ptr += tl.program_id(0).to(tl.int64) * length
    inner_ptr += tl.program_id(0).to(tl.int64) * length
    k = _rows(k_ptr, k_row * UNIT, j, feature, inside, HEAD).to(dtype)
    v = _rows(v_ptr, v_row * UNIT, j, feature, inside, HEAD).to(dtype)
    dk = tl.zeros([KEYS, WIDTH], dtype=tl.float32)
    dv = tl.zeros([KEYS, WIDTH], dtype=tl.float32)
    end = start * 0 + length
    if LOCAL > 0:
        end = tl.minimum(end, start + KEYS - 1 - past + LOCAL)
    for first in range(tl.maximum(start - past, 0) // QUERIES * QUERIES, end, QUERIES):
        i = first + tl.arange(0, QUERIES)
        there = i < length
        seen = _in_sight(past + i[None, :] - j[:, None], LOCAL) & there[None, :]
        place = distance_ptr + i.to(tl.int64) * (distance_row - 1)
        distance = tl.load(place[None, :] + j[:, None], mask=seen, other=0.0).to(tl.float32)
        q = _biased_queries(q_ptr, q_row * UNIT, bias_ptr, i, feature, there, dtype, HAS_BIAS, HEAD)
        dout = _rows(dout_ptr, heads * HEAD, i, feature, there, HEAD)
        lse = tl.load(lse_ptr + i, mask=there, other=0.0)
        inner = tl.load(inner_ptr + i, mask=there, other=0.0)
        s = (_dot(k, tl.trans(q), PRECISION) + distance) * scale
        p = tl.where(seen, tl.exp2(s - lse[None, :]), 0.0)
        dv += _dot(p.to(dtype), dout, PRECISION)
        ds = p * (_dot(v, tl.trans(dout), PRECISION) - inner[None, :]) * factor
        dk += _dot(ds.to(dtype), q, PRECISION)
    out = (batch * (past + length) * heads + head) * HEAD
    _store_rows(dk_ptr + out, heads * HEAD, j, feature, inside, dk, HEAD)
    _store_rows(dv_ptr + out, heads * HEAD, j, feature, inside, dv, HEAD)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor,
    bias: Tensor | None,
    scale: float,
    local_size: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The result, (B, T, heads, d_head), and log₂ Σ 2^(s·log₂e) of each query, (B, heads, T).

    `bias` is as large as `query`, and the same at all positions of all sequences.
    """
    batch, heads, length, features = query.shape
    out = torch.empty((batch, length, heads, features), dtype=dtype, device=query.device)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=query.device)
    tiles = FORWARD[features * dtype.itemsize > 128]
    _forward[(batch * heads, triton.cdiv(length, tiles.queries))](
        query,
        key,
        value,
        query if bias is None else bias,
        by_distance,
        out,
        lse,
        scale=scale * LOG2E,
        **_layout(query, key, value, by_distance, bias, local_size, tiles),
    )
    return out, lse


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    local_size: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of queries, keys, values and scores by distance; `dout` contiguous.

    Those of queries, keys and values lie in memory as (B, T or L, heads, d_head), as they do where one product made all
    three of them: joining them again is one copy.
    """
    batch, heads, length, features = query.shape
    dq, dk, dv = (
        torch.empty((batch, x.shape[2], heads, features), dtype=x.dtype, device=x.device).transpose(1, 2)
        for x in (query, key, value)
    )
    ddistance, inner = torch.empty_like(by_distance), torch.empty_like(lse)
    given = query, key, value, query if bias is None else bias, by_distance
    wide = features * out.dtype.itemsize > 128
    tiles = QUERIES[wide]
    _backward_queries[(batch * heads, triton.cdiv(length, tiles.queries))](
        *given,
        out,
        dout,
        lse,
        inner,
        dq,
        ddistance,
        scale=scale * LOG2E,
        factor=scale,
        **_strides("ddistance", ddistance),
        **_layout(query, key, value, by_distance, bias, local_size, tiles),
    )
    tiles = KEYS[wide]
    _backward_keys[(batch * heads, triton.cdiv(key.shape[2], tiles.keys))](
        *given,
        dout,
        lse,
        inner,
        dk,
        dv,
        scale=scale * LOG2E,
        factor=scale,
        **_layout(query, key, value, by_distance, bias, local_size, tiles),
    )
    return dq, dk, dv, ddistance


def _layout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor,
    bias: Tensor | None,
    local_size: int | None,
    tiles: Tiles,
) -> dict[str, Any]:
    """What all kernels take beside addresses: sizes, strides and tiles."""
    heads, length, features = query.shape[1:]
    rows = [tensor.stride()[:3] for tensor in (query, key, value, query if bias is None else bias)]
    unit = math.gcd(UNIT, *itertools.chain(*rows))
    return {
        **_strides("q", query, unit),
        **_strides("k", key, unit),
        **_strides("v", value, unit),
        **_strides("distance", by_distance),
        "bias_head": 0 if bias is None else bias.stride(1) // unit,
        "columns": by_distance.shape[3],
        "length": length,
        "past": key.shape[2] - length,
        "heads": heads,
        "HEAD": features,
        "WIDTH": max(16, triton.next_power_of_2(features)),  # the least that a product of tiles takes
        "UNIT": unit,
        "LOCAL": local_size or 0,
        "HAS_BIAS": bias is not None,
        "QUERIES": tiles.queries,
        "KEYS": tiles.keys,
        "PRECISION": PRECISION,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _strides(name: str, tensor: Tensor, unit: int = 1) -> dict[str, int]:
    return {f"{name}_{axis}": tensor.stride(n) // unit for n, axis in enumerate(("batch", "head", "row"))}


class Attend(torch.autograd.Function):
    """`attend` by kernels; where derivatives of derivatives are taken the plain twin stands in."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        by_distance: Tensor,
        bias: Tensor | None,
        scale: float,
        local_size: int | None,
        autocast: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        return forward(query, key, value, by_distance, bias, scale, local_size, autocast or query.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:5], *output)
        ctx.scale, ctx.local_size, ctx.autocast = inputs[5:]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *inputs, out, lse = ctx.saved_tensors
        dout = grads[0]
        if dout is None:
            return (None,) * 8
        if torch.is_grad_enabled():
            query, key, value, by_distance, bias = inputs = apart(inputs)
            with reenter_autocast(query.device.type, ctx.autocast):
                biased = query if bias is None else query + bias
                twin = naive.attend(biased, key, value, by_distance, scale=ctx.scale, local_size=ctx.local_size)
            return *through_twin([twin], [dout], inputs, ctx.needs_input_grad[:5]), None, None, None
        query, key, value, by_distance, bias = inputs
        given = query, key, value, by_distance, bias, out, lse, dout.contiguous()
        dq, dk, dv, ddistance = backward(*given, ctx.scale, ctx.local_size)
        return dq, dk, dv, ddistance, None if bias is None else dq, None, None, None
