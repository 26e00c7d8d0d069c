"""Weight normalisation where no gradient is wanted: one kernel, in the dtype that products take."""

import torch
from torch import Tensor, nn

from equipoise.ops._backend import KERNEL_DTYPES, use_differentiable_kernel
from equipoise.ops.weight_norm import naive


def takes_kernel(v: Tensor, g: Tensor, dtype: torch.dtype | None = None, backend: str = "auto") -> bool:
    """Whether `normalised_rows` is one launch here; with gradients it is the plain twin."""
    if v.numel() == 0 or (torch.is_grad_enabled() and (v.requires_grad or g.requires_grad)):
        return False
    plain = type(v) in (Tensor, nn.Parameter) and type(g) in (Tensor, nn.Parameter)  # not parts of sharded ones
    if not plain or (dtype or v.dtype) not in KERNEL_DTYPES:
        return False
    return use_differentiable_kernel("normalised_rows", backend, (v, g))


def normalised_rows(
    v: Tensor, g: Tensor, *, floor: float = 0.0, dtype: torch.dtype | None = None, backend: str = "auto"
) -> Tensor:
    """Rows of given lengths: w = g·v / max(‖v‖, floor), row by row.

    The kernel reads v once and writes w once, rounded as it is written; norms are sums in float32. It has no VJP: where
    a gradient is wanted, in forward mode and under torch.func the plain twin stands in, and inside torch.compile it is
    traced.

    Args:
        v: (rows, columns).
        g: (rows, 1).
        floor: Least norm to divide by. With 0 a row of zeros becomes NaN.
        dtype: Of the result; that of v if None.
        backend: "auto", "naive" or "triton".

    Returns:
        (rows, columns).
    """
    if v.dim() != 2 or g.shape != (len(v), 1):
        raise ValueError(
            f"normalised_rows: v must be (rows, columns) and g (rows, 1), got {tuple(v.shape)} and {tuple(g.shape)}."
        )
    dtype = dtype or v.dtype
    if not takes_kernel(v, g, dtype, backend):
        return naive.normalised_rows(v, g, floor, dtype)
    from equipoise.ops.weight_norm import triton as kernels

    return kernels.normalised_rows(v, g, floor, dtype)
