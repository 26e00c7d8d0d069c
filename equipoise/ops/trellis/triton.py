# mypy: disable-error-code="no-untyped-def"
"""The kernels of `trellis_cell`: one program walks over time for one sequence and a block of features.

A block of time steps is loaded whole before anything is computed, and its recurrence is an associative scan inside the
program; only the last value of c goes from block to block. With dilation s a sequence is s interleaved chains, each of
them a program's own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.ops import _kernels
from equipoise.ops.trellis import naive

# Time steps and features per block, and warps per program: many small programs keep the memory busy, since a program
# waits for its own loads at every block.
TIME = 16
WIDTH = 64
WARPS = 4


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _compose(decay_a, drive_a, decay_b, drive_b):
    """c ↦ decay·c + drive, first a and then b."""
    return decay_a * decay_b, drive_a * decay_b + drive_b


@triton.jit
def _forward(
    pre_ptr,
    start_ptr,
    h_ptr,
    c_ptr,
    length,
    stride,
    FEATURES: tl.constexpr,
    TIME: tl.constexpr,
    WIDTH: tl.constexpr,
):
    chain = tl.program_id(0)
    batch, offset = (chain // stride).to(tl.int64), chain % stride
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    valid = feature < FEATURES
    pre_ptr += batch * length * (4 * FEATURES)
    h_ptr += batch * length * FEATURES
    c_ptr += batch * length * FEATURES
    carry = tl.load(start_ptr + (batch * stride + offset) * FEATURES + feature, mask=valid, other=0.0).to(tl.float32)
    steps = tl.cdiv(length - offset, stride)
    step = tl.arange(0, TIME)
    for first in range(0, steps, TIME):
        t = offset + (first + step) * stride
        inside = (first + step < steps)[:, None] & valid[None, :]
        place = pre_ptr + t[:, None] * (4 * FEATURES) + feature[None, :]
        i = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        o = tl.load(place + FEATURES, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(place + 2 * FEATURES, mask=inside, other=0.0).to(tl.float32)
        phi = tl.load(place + 3 * FEATURES, mask=inside, other=0.0).to(tl.float32)
        decay, drive = tl.associative_scan((tl.sigmoid(phi), tl.sigmoid(i) * _tanh(g)), 0, _compose)
        c = decay * carry[None, :] + drive
        place = t[:, None] * FEATURES + feature[None, :]
        tl.store(c_ptr + place, c, mask=inside)
        tl.store(h_ptr + place, tl.sigmoid(o) * _tanh(c), mask=inside)
        carry = tl.sum(tl.where((step == TIME - 1)[:, None], c, 0.0), axis=0)


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
    stride,
    FEATURES: tl.constexpr,
    TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_DH: tl.constexpr,
    HAS_DC: tl.constexpr,
):
    """γ_t = ∂/∂c_t by the recurrence backwards, γ_t = e_t + φ_{t+s} γ_{t+s}; the rest is elementwise."""
    chain = tl.program_id(0)
    batch, offset = (chain // stride).to(tl.int64), chain % stride
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    valid = feature < FEATURES
    pre_ptr += batch * length * (4 * FEATURES)
    dpre_ptr += batch * length * (4 * FEATURES)
    c_ptr += batch * length * FEATURES
    dh_ptr += batch * length * FEATURES
    dc_ptr += batch * length * FEATURES
    edge = (batch * stride + offset) * FEATURES + feature
    before_first = tl.load(start_ptr + edge, mask=valid, other=0.0).to(tl.float32)
    steps = tl.cdiv(length - offset, stride)
    step = tl.arange(0, TIME)
    carry = tl.zeros([WIDTH], dtype=tl.float32)
    num_blocks = tl.cdiv(steps, TIME)
    for block in range(num_blocks):
        index = (num_blocks - 1 - block) * TIME + step
        t = offset + index * stride
        inside = (index < steps)[:, None] & valid[None, :]
        place = pre_ptr + t[:, None] * (4 * FEATURES) + feature[None, :]
        i = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        o = tl.load(place + FEATURES, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(place + 2 * FEATURES, mask=inside, other=0.0).to(tl.float32)
        phi = tl.load(place + 3 * FEATURES, mask=inside, other=0.0).to(tl.float32)
        later = (index + 1 < steps)[:, None] & valid[None, :]
        phi_next = tl.load(place + (stride * 4 + 3) * FEATURES, mask=later, other=0.0).to(tl.float32)
        at = t[:, None] * FEATURES + feature[None, :]
        earlier = inside & (index > 0)[:, None]
        c_before = tl.load(c_ptr + at - stride * FEATURES, mask=earlier, other=0.0).to(tl.float32)
        e = tl.zeros([TIME, WIDTH], dtype=tl.float32)
        dh = tl.zeros([TIME, WIDTH], dtype=tl.float32)
        if HAS_DC:
            e += tl.load(dc_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_DH:
            dh = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)

        i, o, g, phi = tl.sigmoid(i), tl.sigmoid(o), _tanh(g), tl.sigmoid(phi)
        c_before = tl.where((index == 0)[:, None], before_first[None, :], c_before)
        squashed = _tanh(phi * c_before + i * g)  # tanh(c_t), from what is loaded anyway
        e += dh * o * (1.0 - squashed * squashed)
        # Steps behind the end have e = 0, and nothing comes in from behind them.
        decay, drive = tl.associative_scan((tl.sigmoid(phi_next), e), 0, _compose, reverse=True)
        gamma = decay * carry[None, :] + drive
        carry = tl.sum(tl.where((step == 0)[:, None], gamma, 0.0), axis=0)

        place = dpre_ptr + t[:, None] * (4 * FEATURES) + feature[None, :]
        tl.store(place, gamma * g * i * (1.0 - i), mask=inside)
        tl.store(place + FEATURES, dh * squashed * o * (1.0 - o), mask=inside)
        tl.store(place + 2 * FEATURES, gamma * i * (1.0 - g * g), mask=inside)
        tl.store(place + 3 * FEATURES, gamma * c_before * phi * (1.0 - phi), mask=inside)
    reached = valid & _kernels.spread(offset < length, WIDTH)
    phi_first = tl.load(pre_ptr + (offset * 4 + 3) * FEATURES + feature, mask=reached, other=0.0).to(tl.float32)
    tl.store(dstart_ptr + edge, carry * tl.sigmoid(phi_first), mask=valid)


def forward(pre: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """h and c; both arguments contiguous."""
    batch, length, features, stride = *pre.shape[:2], *start.shape[:0:-1]
    h, c = (pre.new_empty(batch, length, features) for _ in range(2))
    grid = (batch * stride, triton.cdiv(features, WIDTH))
    _forward[grid](pre, start, h, c, length, stride, FEATURES=features, TIME=TIME, WIDTH=WIDTH, num_warps=WARPS)
    return h, c


def backward(pre: Tensor, start: Tensor, c: Tensor, dh: Tensor | None, dc: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cotangents of `pre` and `start`, given those of h and c."""
    batch, length, features, stride = *pre.shape[:2], *start.shape[:0:-1]
    dpre, dstart = torch.empty_like(pre), torch.empty_like(start)
    grid = (batch * stride, triton.cdiv(features, WIDTH))
    _backward[grid](
        pre,
        start,
        c,
        c if dh is None else dh.contiguous(),  # one that is None is not read
        c if dc is None else dc.contiguous(),
        dpre,
        dstart,
        length,
        stride,
        FEATURES=features,
        TIME=TIME,
        WIDTH=WIDTH,
        HAS_DH=dh is not None,
        HAS_DC=dc is not None,
        num_warps=WARPS,
    )
    return dpre, dstart


class Cell(torch.autograd.Function):
    """`trellis_cell` by kernels; where derivatives of derivatives are taken the plain twin stands in."""

    @staticmethod
    def forward(pre: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        return forward(pre.contiguous(), start.contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pre, start, c = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_backward(pre, start, grads, ctx.needs_input_grad)
        if grads[0] is None and grads[1] is None:
            return None, None
        return backward(pre.contiguous(), start.contiguous(), c, *grads)


def _differentiable_backward(pre: Tensor, start: Tensor, grads: Any, needed: Any) -> tuple[Tensor | None, ...]:
    """The cotangents through the plain twin, as functions of all they depend on."""
    sources = [tensor for tensor, need in zip((pre, start), needed, strict=True) if need]
    outputs = [(out, grad) for out, grad in zip(naive.cell(pre, start), grads, strict=True) if grad is not None]
    if not outputs:
        return None, None
    values, cotangents = zip(*outputs, strict=True)
    found = iter(torch.autograd.grad(values, sources, cotangents, create_graph=True, allow_unused=True))
    return tuple(next(found) if need else None for need in needed)
