"""What goes into the matrix product of a causal convolution: rows of taps, and a weight with DropConnect on them."""

import torch
from torch import Tensor

from equipoise._compat import autocast_dtype
from equipoise._errors import require_count
from equipoise.ops._backend import use_differentiable_kernel
from equipoise.ops.taps import naive


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that a matrix product with this tensor is computed in: that of autocast where it is on."""
    narrow = autocast_dtype(tensor.device.type)
    return tensor.dtype if narrow is None or tensor.dtype == torch.float64 else narrow


def gather_taps(
    h: Tensor,
    before: Tensor,
    mask: Tensor | None = None,
    *,
    kernel_size: int,
    dilation: int = 1,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Rows [D·x_{t−(k−1)s}, …, D·x_{t−s}, D·x_t] of a causal convolution, where x is `before` followed by h.

    One pass instead of two concatenations, a product and a cast; its VJP is one pass too. A gradient of the mask is
    made by plain operations, and so are second derivatives. Forward mode and torch.func get the plain twin, and
    inside torch.compile it is traced.

    Bytes moved per element of h, with dtypes of sizes h (of h) and r (of the rows): h read, k·r written; VJP the other
    way round.

    Args:
        h: (B, T, H).
        before: (B, (k − 1)s, H), the steps before the segment.
        mask: (B, 1, H), D, the same at every step; None for none.
        kernel_size: Taps, k.
        dilation: Steps between taps, s.
        dtype: Of the rows; if None that of a matrix product with h, see `product_dtype`.
        backend: "auto", "naive" or "triton".

    Returns:
        (B, T, k·H), the oldest tap first.
    """
    _check(h, before, mask, kernel_size, dilation)
    dtype = dtype or product_dtype(h)
    tensors = [tensor for tensor in (h, before, mask) if tensor is not None]
    nothing_to_do = h.numel() == 0 or (kernel_size == 1 and mask is None)
    if nothing_to_do or not use_differentiable_kernel("gather_taps", backend, tensors):
        return naive.rows(h, before, mask, kernel_size, dilation, dtype)
    from equipoise.ops.taps import triton as kernels

    return kernels.Rows.apply(h, before, mask, kernel_size, dilation, dtype)  # type: ignore[no-untyped-call,no-any-return]


def drop_taps(
    weight: Tensor, kept: Tensor, scale: float, *, dtype: torch.dtype | None = None, backend: str = "auto"
) -> Tensor:
    """The weight of a convolution with DropConnect on its first columns, those of the taps that look back.

    Bytes moved per element, with sizes w and d of the dtypes: w and at most 1 read, d written; VJP the other way round.

    Args:
        weight: (out, k·in).
        kept: (out, past) truth values; a weight that is not kept is zero.
        scale: What the kept ones of these columns are multiplied by.
        dtype: Of the result; that of `weight` if None.
        backend: "auto", "naive" or "triton".

    Returns:
        (out, k·in).
    """
    if kept.dim() != 2 or weight.dim() != 2 or len(kept) != len(weight) or kept.shape[1] > weight.shape[1]:
        raise ValueError(
            "drop_taps: weight must be (out, k·in) and kept (out, past) with past at most k·in, "
            f"got {tuple(weight.shape)} and {tuple(kept.shape)}."
        )
    if kept.dtype != torch.bool:
        raise TypeError(f"drop_taps: kept must hold truth values, got {kept.dtype}.")
    dtype = dtype or weight.dtype
    if weight.numel() == 0 or not use_differentiable_kernel("drop_taps", backend, (weight,)):
        return naive.dropped(weight, kept, scale, dtype)
    from equipoise.ops.taps import triton as kernels

    return kernels.Dropped.apply(weight, kept, scale, dtype)  # type: ignore[no-untyped-call,no-any-return]


def _check(h: Tensor, before: Tensor, mask: Tensor | None, kernel_size: int, dilation: int) -> None:
    require_count("gather_taps", "kernel_size", kernel_size)
    require_count("gather_taps", "dilation", dilation)
    reach = (kernel_size - 1) * dilation
    if h.dim() != 3 or before.shape != (len(h), reach, h.shape[-1]):
        raise ValueError(
            f"gather_taps: h must be (B, T, H) and before (B, {reach}, H) for {kernel_size} taps {dilation} apart, "
            f"got {tuple(h.shape)} and {tuple(before.shape)}."
        )
    if mask is not None and mask.shape != (len(h), 1, h.shape[-1]):
        raise ValueError(
            f"gather_taps: mask must be (B, 1, H), here {(len(h), 1, h.shape[-1])}; got {tuple(mask.shape)}."
        )
