"""Gates and recurrence of the TrellisNet cell with c eliminated: one kernel forward, one for its VJP."""

import torch
from torch import Tensor

from equipoise.ops._backend import use_differentiable_kernel
from equipoise.ops.trellis import naive


def trellis_cell(
    pre: Tensor,
    start: Tensor,
    plus: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    need_c: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The state h and the memory c of a TrellisNet layer from its pre-activations, over a whole segment.

        i, o, g, φ = σ, σ, tanh, σ of the four parts of pre + plus
        c_t = φ_t c_{t−s} + i_t g_t,   h_t = o_t tanh(c_t),   s the length of `start`

    Computed in float32 and rounded once, on writing. For its VJP the kernel writes c and pre + plus, where gradients
    are wanted; a second derivative goes through the plain twin. Forward mode and torch.func get the twin, and inside
    torch.compile it is traced.

    Bytes moved per element of h, with e of `pre` and `plus` and d of h: forward 4e read (8e with plus), d written, and
    e (5e) more with gradients; VJP 5e + d read (e more where c has a cotangent), 4e written.

    Args:
        pre: (B, T, 4H).
        start: (B, s, H), the s values of c before the segment; s is the dilation.
        plus: (B, T, 4H), added to `pre`: as part of a matrix product it would cost a copy of its own.
        dtype: Of h; that of `pre` if None.
        need_c: Whether c is wanted; without gradients it is not even written then.
        backend: "auto", "naive" or "triton".

    Returns:
        h and c, (B, T, H); c in the dtype of `pre`, None if it is not wanted.
    """
    _check(pre, start, plus)
    dtype = dtype or pre.dtype
    tensors = (pre, start) if plus is None else (pre, start, plus)
    if pre.numel() == 0 or not use_differentiable_kernel("trellis_cell", backend, tensors):
        h, c = naive.cell(pre, start, plus, dtype)
        return h, c if need_c else None
    from equipoise.ops.trellis import triton as kernels

    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        h, c, _ = kernels.Cell.apply(pre, start, plus, dtype)  # type: ignore[no-untyped-call]
        return h, c if need_c else None
    plus = None if plus is None else plus.contiguous()
    return kernels.forward(pre.contiguous(), start.contiguous(), plus, dtype, with_c=need_c)[:2]


def _check(pre: Tensor, start: Tensor, plus: Tensor | None) -> None:
    if pre.dim() != 3 or start.dim() != 3 or pre.shape[2] != 4 * start.shape[2] or len(pre) != len(start):
        raise ValueError(
            "trellis_cell: pre must be (B, T, 4H) and start (B, s, H), "
            f"got {tuple(pre.shape)} and {tuple(start.shape)}."
        )
    if start.shape[1] == 0:
        raise ValueError("trellis_cell: start must hold at least one step, got (B, 0, H).")
    if plus is not None and plus.shape != pre.shape:
        raise ValueError(f"trellis_cell: plus must have the shape of pre, {tuple(pre.shape)}; got {tuple(plus.shape)}.")
