"""Gates and recurrence of the TrellisNet cell with c eliminated: one kernel forward, one for its VJP."""

import torch
from torch import Tensor

from equipoise._compat import inside_a_transform
from equipoise.ops._backend import use_kernel
from equipoise.ops.trellis import naive


def trellis_cell(pre: Tensor, start: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The state h and the memory c of a TrellisNet layer from its pre-activations, over a whole segment.

        i, o, g, φ = σ, σ, tanh, σ of the four parts of pre
        c_t = φ_t c_{t−s} + i_t g_t,   h_t = o_t tanh(c_t),   s the length of `start`

    Computed in float32 and rounded once, on writing. The kernel saves `pre` and c for its VJP; a second derivative goes
    through the plain twin. Forward mode and torch.func get the twin, and inside torch.compile it is traced.

    Bytes moved per element of h, with a dtype of e bytes: forward 4e read, 2e written; VJP 6e read (7e where c has a
    cotangent), 4e written; the next step's φ comes out of the cache.

    Args:
        pre: (B, T, 4H).
        start: (B, s, H), the s values of c before the segment; s is the dilation.
        backend: "auto", "naive" or "triton".

    Returns:
        h and c, (B, T, H) in the dtype of `pre`.
    """
    if pre.dim() != 3 or start.dim() != 3 or pre.shape[2] != 4 * start.shape[2] or len(pre) != len(start):
        raise ValueError(
            "trellis_cell: pre must be (B, T, 4H) and start (B, s, H), "
            f"got {tuple(pre.shape)} and {tuple(start.shape)}."
        )
    if start.shape[1] == 0:
        raise ValueError("trellis_cell: start must hold at least one step, got (B, 0, H).")
    transformed = torch.compiler.is_compiling() or (backend == "auto" and inside_a_transform())
    if pre.numel() == 0 or transformed or not use_kernel("trellis_cell", backend, (pre, start)):
        return naive.cell(pre, start)
    from equipoise.ops.trellis import triton as kernels

    return kernels.Cell.apply(pre, start)  # type: ignore[no-untyped-call,no-any-return]
