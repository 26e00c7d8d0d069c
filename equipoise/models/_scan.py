"""A linear recurrence over time that can be differentiated any number of times."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def linear_scan(decay: Tensor, drive: Tensor, start: Tensor) -> Tensor:
    """c_t = decay_t · c_{t−s} + drive_t along axis −2, elementwise in the others; s is the length of `start`.

    Differentiable any number of times, in reverse and forward mode, and under torch.func. Half-precision arguments are
    accumulated, and returned, in float32.

    Args:
        decay: (..., T, d).
        drive: (..., T, d).
        start: (..., s, d), the s values before the first step.

    Returns:
        (..., T, d), all the values.
    """
    if drive.dtype in HALF:
        decay, drive, start = decay.float(), drive.float(), start.float()
    if torch.compiler.is_compiling():  # plain operations, which a compiler fuses; it knows nothing of the rules below
        return _recur_by_doubling(decay, drive, start, False)
    return _LinearScan.apply(decay, drive, start.to(drive.dtype), False)


def neighbour(values: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """What each step of the recurrence looks at: values s steps before it, or after it in reverse."""
    length, stride = values.shape[-2], start.shape[-2]
    if reverse:
        return torch.cat([values, start], dim=-2)[..., stride:, :]
    return torch.cat([start, values], dim=-2)[..., :length, :]


def _recur(decay: Tensor, drive: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """One pass with T small steps where steps are cheap, log₂ T passes with large ones where launches cost."""
    step_by_step = decay.device.type == "cpu"
    return (_recur_by_steps if step_by_step else _recur_by_doubling)(decay, drive, start, reverse)


def _recur_by_steps(decay: Tensor, drive: Tensor, start: Tensor, reverse: bool) -> Tensor:
    length, stride = drive.shape[-2], start.shape[-2]
    out = torch.empty_like(drive)
    before = start
    for first in range(0, length, stride):
        count = min(stride, length - first)
        at = length - first - count if reverse else first
        block = out.narrow(-2, at, count)
        known = before.narrow(-2, before.shape[-2] - count if reverse else 0, count)
        torch.addcmul(drive.narrow(-2, at, count), decay.narrow(-2, at, count), known, out=block)
        before = block
    return out


def _recur_by_doubling(decay: Tensor, drive: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """Compose neighbouring steps, then neighbouring pairs, and so on; decays are composed along with the drives."""
    length, stride = drive.shape[-2], start.shape[-2]

    def split(values: Tensor, reach: int) -> tuple[Tensor, Tensor, Tensor]:
        """Steps with nothing `reach` before them, the other steps, and what is `reach` before those."""
        rest = length - reach
        if reverse:
            return values.narrow(-2, rest, reach), values.narrow(-2, 0, rest), values.narrow(-2, reach, rest)
        return values.narrow(-2, 0, reach), values.narrow(-2, reach, rest), values.narrow(-2, 0, rest)

    def join(edge: Tensor, rest: Tensor) -> Tensor:
        return torch.cat([rest, edge] if reverse else [edge, rest], dim=-2)

    reach = min(stride, length)
    known = start.narrow(-2, stride - reach if reverse else 0, reach)
    edge, rest, _ = split(drive, reach)
    out = join(torch.addcmul(edge, split(decay, reach)[0], known), rest)
    reach = stride
    while reach < length:
        edge, rest, before = split(out, reach)
        decay_edge, decay_rest, decay_before = split(decay, reach)
        out = join(edge, torch.addcmul(rest, decay_rest, before))
        reach *= 2
        if reach < length:
            decay = join(decay_edge, decay_rest * decay_before)
    return out


class _LinearScan(torch.autograd.Function):
    """The recurrence; its adjoint is the same one in the other direction, its tangent the same one again."""

    @staticmethod
    def forward(decay: Tensor, drive: Tensor, start: Tensor, reverse: bool) -> Tensor:
        return _recur(decay, drive, start, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        decay, _, start, ctx.reverse = inputs
        ctx.save_for_backward(decay, start, output)
        ctx.save_for_forward(decay, start, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        decay, start, out = ctx.saved_tensors
        nothing = torch.zeros_like(start)
        shifted = neighbour(decay, nothing, not ctx.reverse)
        gamma = _LinearScan.apply(shifted, grads[0], nothing, not ctx.reverse)
        to_decay = gamma * neighbour(out, start, ctx.reverse) if ctx.needs_input_grad[0] else None
        to_start = _to_start(decay, gamma, start.shape[-2], ctx.reverse) if ctx.needs_input_grad[2] else None
        return to_decay, gamma, to_start, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        decay, start, out = ctx.saved_tensors
        moves = [
            torch.zeros_like(like) if move is None else move
            for move, like in zip(tangents[:3], (decay, out, start), strict=True)
        ]
        drive = torch.addcmul(moves[1], moves[0], neighbour(out, start, ctx.reverse))
        return _LinearScan.apply(decay, drive, moves[2], ctx.reverse)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        front = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(arguments[:3], in_dims[:3], strict=True)
        ]
        return _LinearScan.apply(*front, arguments[3]), 0


def _to_start(decay: Tensor, gamma: Tensor, stride: int, reverse: bool) -> Tensor:
    length = gamma.shape[-2]
    count = min(stride, length)
    at = length - count if reverse else 0
    edge = decay.narrow(-2, at, count) * gamma.narrow(-2, at, count)
    unused = (0, 0, stride - count, 0) if reverse else (0, 0, 0, stride - count)
    return F.pad(edge, unused)
