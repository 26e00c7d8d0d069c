# mypy: disable-error-code="no-untyped-def"
"""The kernels of `trellis_cell`: one program walks over time for one sequence and a block of features.

A block of time steps is loaded while the one before it is computed, and its recurrence is an associative scan inside
the program; only the last value goes from block to block. With dilation s a sequence is s interleaved chains, each of
them a program's own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.ops._backend import apart, through_twin
from equipoise.ops.trellis import naive

# Time steps and features per block, and warps per program, of the cell and of its VJP. With one warp nothing waits at
# a barrier; many small programs keep the memory busy.
TIME, WIDTH, WARPS = 8, 32, 1
VJP_TIME, VJP_WIDTH, VJP_WARPS = 8, 16, 1

LOG2_E = tl.constexpr(1.4426950408889634)
# σ and tanh have their limits beyond this in float32; larger exponentials would overflow in products.
SATURATED = tl.constexpr(-30.0)


# Gates. Next to memory they are bounded by special functions, so reciprocals are shared: 1/a and 1/b come from 1/(ab).


@triton.jit
def _one_plus_exp(x):
    """1 + exp(−x), bounded; 1/σ(x). NaN stays NaN."""
    return 1.0 + tl.exp2(tl.maximum(x, SATURATED, propagate_nan=tl.PropagateNan.ALL) * -LOG2_E)


@triton.jit
def _reciprocal(x):
    """1/x of a positive number, in two instructions instead of a division's eight."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _sigmoid(x):
    return _reciprocal(1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def _gated(x, y):
    """σ(x) tanh(y)."""
    a, b = 1.0 + tl.exp2(x * -LOG2_E), _one_plus_exp(2.0 * y)  # a may be infinite, and the result is zero
    return (2.0 - b) * _reciprocal(a * b)


@triton.jit
def _compose(decay_a, drive_a, decay_b, drive_b):
    """c ↦ decay·c + drive, first a and then b."""
    return decay_a * decay_b, drive_a * decay_b + drive_b


@triton.jit
def _load_parts(place, inside, FEATURES: tl.constexpr):
    """The four parts of pre-activations, as they are stored."""
    i = tl.load(place, mask=inside, other=0.0)
    o = tl.load(place + FEATURES, mask=inside, other=0.0)
    g = tl.load(place + 2 * FEATURES, mask=inside, other=0.0)
    phi = tl.load(place + 3 * FEATURES, mask=inside, other=0.0)
    return i, o, g, phi


@triton.jit
def _store_parts(place, i, o, g, phi, inside, FEATURES: tl.constexpr):
    tl.store(place, i, mask=inside)
    tl.store(place + FEATURES, o, mask=inside)
    tl.store(place + 2 * FEATURES, g, mask=inside)
    tl.store(place + 3 * FEATURES, phi, mask=inside)


@triton.jit
def _forward(
    pre_ptr,
    plus_ptr,
    start_ptr,
    h_ptr,
    c_ptr,
    sum_ptr,
    length,
    STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_PLUS: tl.constexpr,
    WRITES_C: tl.constexpr,
    WRITES_SUM: tl.constexpr,
):
    chain = tl.program_id(0) // BLOCKS
    feature = (tl.program_id(0) % BLOCKS) * WIDTH + tl.arange(0, WIDTH)
    valid = feature < FEATURES
    offset = chain % STRIDE
    origin = (chain // STRIDE).to(tl.int64) * length + offset
    pre_ptr += origin * (4 * FEATURES)
    plus_ptr += origin * (4 * FEATURES)
    sum_ptr += origin * (4 * FEATURES)
    h_ptr += origin * FEATURES
    c_ptr += origin * FEATURES
    carry = tl.load(start_ptr + chain.to(tl.int64) * FEATURES + feature, mask=valid, other=0.0).to(tl.float32)
    steps = tl.cdiv(length - offset, STRIDE)
    step = tl.arange(0, TIME)
    inside = (step < steps)[:, None] & valid[None, :]
    place = step[:, None] * (4 * STRIDE * FEATURES) + feature[None, :]
    at = step[:, None] * (STRIDE * FEATURES) + feature[None, :]
    i, o, g, phi = _load_parts(pre_ptr + place, inside, FEATURES)
    if HAS_PLUS:
        i_plus, o_plus, g_plus, phi_plus = _load_parts(plus_ptr + place, inside, FEATURES)
    for first in range(0, steps, TIME):
        inside_next = (first + TIME + step < steps)[:, None] & valid[None, :]
        place_next = place + 4 * TIME * STRIDE * FEATURES
        i_next, o_next, g_next, phi_next = _load_parts(pre_ptr + place_next, inside_next, FEATURES)
        x_i, x_o, x_g, x_phi = i.to(tl.float32), o.to(tl.float32), g.to(tl.float32), phi.to(tl.float32)
        if HAS_PLUS:
            x_i += i_plus.to(tl.float32)
            x_o += o_plus.to(tl.float32)
            x_g += g_plus.to(tl.float32)
            x_phi += phi_plus.to(tl.float32)
            i_plus, o_plus, g_plus, phi_plus = _load_parts(plus_ptr + place_next, inside_next, FEATURES)
        if WRITES_SUM:
            _store_parts(sum_ptr + place, x_i, x_o, x_g, x_phi, inside, FEATURES)

        decay, drive = tl.associative_scan((_sigmoid(x_phi), _gated(x_i, x_g)), 0, _compose)
        c = decay * carry[None, :] + drive
        if WRITES_C:
            tl.store(c_ptr + at, c, mask=inside)
        tl.store(h_ptr + at, _gated(x_o, c), mask=inside)
        carry = tl.sum(tl.where((step == TIME - 1)[:, None], c, 0.0), axis=0)
        i, o, g, phi = i_next, o_next, g_next, phi_next
        inside, place = inside_next, place_next
        at += TIME * STRIDE * FEATURES


@triton.jit
def _backward(
    pre_ptr,
    start_ptr,
    c_ptr,
    dh_ptr,
    dc_ptr,
    dpre_ptr,
    dstart_ptr,
    length,
    STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_DC: tl.constexpr,
):
    """With γ_t = ∂/∂c_t and β_t = φ_t γ_t: β_t = φ_t (e_t + β_{t+s}), scanned backwards; γ_t = β_t / φ_t.

    Every term of β_t has the factor φ_t, so the division loses nothing, and 1/φ = 1 + exp(−x) is at hand.
    """
    chain = tl.program_id(0) // BLOCKS
    feature = (tl.program_id(0) % BLOCKS) * WIDTH + tl.arange(0, WIDTH)
    valid = feature < FEATURES
    offset = chain % STRIDE
    origin = (chain // STRIDE).to(tl.int64) * length + offset
    pre_ptr += origin * (4 * FEATURES)
    dpre_ptr += origin * (4 * FEATURES)
    c_ptr += origin * FEATURES - STRIDE * FEATURES  # c of the step before
    dh_ptr += origin * FEATURES
    dc_ptr += origin * FEATURES
    edge = chain.to(tl.int64) * FEATURES + feature
    start = tl.load(start_ptr + edge, mask=valid, other=0.0).to(tl.float32)
    steps = tl.cdiv(length - offset, STRIDE)
    step = tl.arange(0, TIME)
    index = (tl.cdiv(steps, TIME) - 1) * TIME + step
    inside = ((index >= 0) & (index < steps))[:, None] & valid[None, :]
    place = index[:, None] * (4 * STRIDE * FEATURES) + feature[None, :]
    at = index[:, None] * (STRIDE * FEATURES) + feature[None, :]
    i, o, g, phi = _load_parts(pre_ptr + place, inside, FEATURES)
    c = tl.load(c_ptr + at, mask=inside & (index > 0)[:, None], other=0.0)
    dh = tl.load(dh_ptr + at, mask=inside, other=0.0)
    carry = tl.zeros([WIDTH], dtype=tl.float32)
    for _ in range(0, steps, TIME):
        inside_next = (index >= TIME)[:, None] & valid[None, :]
        place_next = place - 4 * TIME * STRIDE * FEATURES
        at_next = at - TIME * STRIDE * FEATURES
        i_next, o_next, g_next, phi_next = _load_parts(pre_ptr + place_next, inside_next, FEATURES)
        c_next = tl.load(c_ptr + at_next, mask=(index > TIME)[:, None] & valid[None, :], other=0.0)
        dh_next = tl.load(dh_ptr + at_next, mask=inside_next, other=0.0)

        a, b = _one_plus_exp(i.to(tl.float32)), _one_plus_exp(2.0 * g.to(tl.float32))
        shared = _reciprocal(a * b)
        gate_i, value_g = shared * b, shared * a * (2.0 - b)
        a, b = _one_plus_exp(o.to(tl.float32)), _one_plus_exp(phi.to(tl.float32))
        shared = _reciprocal(a * b)
        gate_o, gate_phi = shared * b, shared * a
        before = tl.where((index == 0)[:, None], start[None, :], c.to(tl.float32))
        squashed = _tanh(gate_phi * before + gate_i * value_g)  # tanh(c_t), from what is loaded anyway
        opened = dh.to(tl.float32) * gate_o
        e = opened * (1.0 - squashed * squashed)
        if HAS_DC:
            e += tl.load(dc_ptr + at, mask=inside, other=0.0).to(tl.float32)
        # Steps behind the end have e = 0, and nothing comes in from behind them.
        decay, drive = tl.associative_scan((gate_phi, gate_phi * e), 0, _compose, reverse=True)
        beta = decay * carry[None, :] + drive
        carry = tl.sum(tl.where((step == 0)[:, None], beta, 0.0), axis=0)
        driven = beta * b * gate_i
        _store_parts(
            dpre_ptr + place,
            driven * value_g * (1.0 - gate_i),
            opened * squashed * (1.0 - gate_o),
            driven * (1.0 - value_g * value_g),
            beta * before * (1.0 - gate_phi),
            inside,
            FEATURES,
        )
        i, o, g, phi, c, dh = i_next, o_next, g_next, phi_next, c_next, dh_next
        inside, place, at = inside_next, place_next, at_next
        index -= TIME
    tl.store(dstart_ptr + edge, carry, mask=valid)


def forward(
    pre: Tensor,
    start: Tensor,
    plus: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    with_c: bool = True,
    with_sum: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """h, and if wanted c and pre + plus; arguments contiguous."""
    batch, length, features, stride = *pre.shape[:2], *start.shape[:0:-1]
    h = pre.new_empty((batch, length, features), dtype=dtype or pre.dtype)
    c = pre.new_empty(h.shape) if with_c else None
    total = torch.empty_like(pre) if with_sum else None
    blocks = triton.cdiv(features, WIDTH)
    _forward[(batch * stride * blocks,)](
        pre,
        pre if plus is None else plus,  # what is None is neither read nor written
        start,
        h,
        h if c is None else c,
        pre if total is None else total,
        length,
        STRIDE=stride,
        FEATURES=features,
        TIME=TIME,
        WIDTH=WIDTH,
        BLOCKS=blocks,
        HAS_PLUS=plus is not None,
        WRITES_C=c is not None,
        WRITES_SUM=total is not None,
        num_warps=WARPS,
    )
    return h, c, total


def backward(pre: Tensor, start: Tensor, c: Tensor, dh: Tensor | None, dc: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cotangents of `pre`, with what was added to it, and `start`, given those of h and c."""
    batch, length, features, stride = *pre.shape[:2], *start.shape[:0:-1]
    dpre, dstart = torch.empty_like(pre), torch.empty_like(start)
    blocks = triton.cdiv(features, VJP_WIDTH)
    _backward[(batch * stride * blocks,)](
        pre,
        start,
        c,
        torch.zeros_like(c) if dh is None else dh.contiguous(),
        c if dc is None else dc.contiguous(),  # one that is None is not read
        dpre,
        dstart,
        length,
        STRIDE=stride,
        FEATURES=features,
        TIME=VJP_TIME,
        WIDTH=VJP_WIDTH,
        BLOCKS=blocks,
        HAS_DC=dc is not None,
        num_warps=VJP_WARPS,
    )
    return dpre, dstart


class Cell(torch.autograd.Function):
    """`trellis_cell` by kernels; where derivatives of derivatives are taken the plain twin stands in."""

    @staticmethod
    def forward(pre: Tensor, start: Tensor, plus: Tensor | None, dtype: torch.dtype) -> Any:
        if plus is None:
            return forward(pre.contiguous(), start.contiguous(), None, dtype)
        return forward(pre.contiguous(), start.contiguous(), plus.contiguous(), dtype, with_sum=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pre, start, plus, ctx.dtype = inputs
        _, c, total = output
        ctx.save_for_backward(pre, start, plus, c, total)
        ctx.set_materialize_grads(False)
        if total is not None:
            ctx.mark_non_differentiable(total)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pre, start, plus, c, total = ctx.saved_tensors
        dh, dc = grads[:2]
        if dh is None and dc is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            pre, start, plus = inputs = apart((pre, start, plus))
            both = naive.cell(pre, start, plus, ctx.dtype)
            return *through_twin(both, (dh, dc), inputs, ctx.needs_input_grad[:3]), None
        dpre, dstart = backward(pre.contiguous() if total is None else total, start.contiguous(), c, dh, dc)
        return dpre, dstart, None if plus is None else dpre.to(plus.dtype), None
