"""Normalisation of groups of channels with what surrounds it in a multiscale layer: one kernel, and one for its VJP."""

import torch
from torch import Tensor

from equipoise._compat import inside_a_transform
from equipoise._errors import require_count
from equipoise.ops._backend import use_differentiable_kernel
from equipoise.ops.norm import naive

Affine = tuple[Tensor | None, Tensor | None]
"""Scale and offset of channels, (C,) each; both None for none."""


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    plus: Tensor | None = None,
    *,
    eps: float = 1e-5,
    enlarge: int = 1,
    relu: bool = False,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """x normalised over groups of channels of each sample, then enlarged and added to another map, then rectified.

        y = relu(plus + enlarged(weight·(x − mean)/√(var + eps) + bias))

    `enlarged` repeats every pixel in both directions and crops the result to the size of `plus`. Computed in float32
    (float64 for such maps) and rounded once, on writing, whatever autocast says. The kernel has one program per sample
    and group, keeps a group in registers if it fits, and saves x, mean and deviation for its VJP, with `plus` and
    `relu` the result too; few large groups are cut into chunks, each a program's, by two kernels. A second derivative
    goes through the plain twin. Forward mode and torch.func get the twin, and inside torch.compile it is traced.

    Bytes moved per element, with sizes x, p, y of the dtypes: x (and p) read and y written; VJP x and y (and y once
    more for `relu` with `plus`) read and x (and p) written. A group that does not fit is read twice, mostly from cache.

    Args:
        x: (N, C, h, w), contiguous or channels_last; other layouts are copied, or left to the twin.
        groups: How many, a divisor of C.
        weight: Scale of channels, (C,); None for none.
        bias: Offset of channels, (C,), given if and only if `weight` is.
        plus: (N, C, H, W) with H ≤ h·enlarge and W ≤ w·enlarge; None to add nothing.
        eps: Added to the variance.
        enlarge: How many times each pixel is repeated; needs `plus` if it is not 1.
        relu: Whether the result is rectified.
        dtype: Of the result; that of x if None.
        backend: "auto", "naive" or "triton".

    Returns:
        The shape of x, or of `plus`, in the layout of x; inside torch.func and torch.compile in that of plain PyTorch.
    """
    _check("group_norm", x, groups, [(weight, bias)])
    require_count("group_norm", "enlarge", enlarge)
    _check_plus(x, plus, enlarge)
    dtype = dtype or x.dtype
    tensors = [tensor for tensor in (x, weight, bias, plus) if tensor is not None]
    if not _use_kernel("group_norm", backend, tensors):
        y = naive.group_norm(x, groups, weight, bias, plus, eps=eps, enlarge=enlarge, relu=relu, dtype=dtype)
        return _laid_out(y, x)
    from equipoise.ops.norm import triton as kernels

    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        weight, bias = _spread(weight, x), _spread(bias, x)
        result = kernels.Norm.apply(x, weight, bias, plus, groups, eps, enlarge, relu, dtype)  # type: ignore[no-untyped-call]
        return result[0]  # type: ignore[no-any-return]
    return kernels.norm(x, weight, bias, plus, groups, eps, enlarge, relu, dtype)[0]


def residual_norm(
    t: Tensor,
    z: Tensor,
    groups: int,
    inner: Affine = (None, None),
    outer: Affine = (None, None),
    *,
    mask: Tensor | None = None,
    x: Tensor | None = None,
    eps: tuple[float, float] = (1e-5, 1e-5),
    dtype: torch.dtype | None = None,
    uses: int = 1,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """What ends a residual block: GN_outer(relu(GN_inner(mask·t + x) + z)), both over the same groups of channels.

    One kernel forward and one for the VJP, as in `group_norm`, three for few large groups; saved are the arguments and
    four numbers per group. Who uses the result in several places asks for as many: the kernel of the VJP then adds up
    their cotangents on reading.

    Bytes moved per element, with sizes t, x, z, y of the dtypes: t + x + z read, y written; VJP t + x + z + y read,
    t + z (and x) written.

    Args:
        t: (N, C, H, W), contiguous or channels_last; other layouts are copied, or left to the twin.
        z: Its like.
        groups: How many, a divisor of C.
        inner: Scale and offset of the first normalisation.
        outer: Those of the second one.
        mask: Factor of each channel, (N, C, 1, 1); its gradient is taken by the twin. None for none.
        x: Like t; None to add nothing.
        eps: Added to the variances, of the inner and of the outer one.
        dtype: Of the result; that of t if None.
        uses: In how many places the result is used.
        backend: "auto", "naive" or "triton".

    Returns:
        (N, C, H, W), as many times as it is used, in the layout of t; inside torch.func and torch.compile in that of
        plain PyTorch.
    """
    _check("residual_norm", t, groups, [inner, outer])
    require_count("residual_norm", "uses", uses)
    for name, other in (("z", z), ("x", x)):
        if other is not None and other.shape != t.shape:
            raise ValueError(
                f"residual_norm: {name} must have the shape of t, {tuple(t.shape)}; got {tuple(other.shape)}."
            )
    if mask is not None and mask.shape != (*t.shape[:2], 1, 1):
        raise ValueError(
            f"residual_norm: mask must be (N, C, 1, 1), here {(*t.shape[:2], 1, 1)}; got {tuple(mask.shape)}."
        )
    dtype, weights = dtype or t.dtype, (*inner, *outer)
    tensors = [tensor for tensor in (t, z, mask, x, *weights) if tensor is not None]
    if not _use_kernel("residual_norm", backend, tensors):
        y = naive.residual_norm(t, z, groups, weights, mask, x, eps=eps, dtype=dtype)
        return (_laid_out(y, t),) * uses
    from equipoise.ops.norm import triton_residual as kernels

    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        spread = [_spread(tensor, t) for tensor in weights]
        return kernels.Residual.apply(t, z, mask, x, *spread, groups, eps, dtype, uses)[1:]  # type: ignore[no-untyped-call,no-any-return]
    return (kernels.residual(t, z, mask, x, weights, groups, eps, dtype)[0],) * uses


def _use_kernel(operation: str, backend: str, tensors: list[Tensor]) -> bool:
    # As they lie in memory: channels_last is no obstacle.
    stored = [
        tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 and tensor.stride(-1) != 1 else tensor for tensor in tensors
    ]
    return tensors[0].numel() > 0 and use_differentiable_kernel(operation, backend, stored)


def _laid_out(y: Tensor, x: Tensor) -> Tensor:
    """What the twin gives in the layout of x: on CUDA, normalisation by PyTorch forgets that channels are last."""
    if torch.compiler.is_compiling() or inside_a_transform():  # vmap cannot say how its tensors are laid out
        return y
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return y.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _spread(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """A channel's number as one of every sample: (N, C), without copies.

    The kernel's VJP has a gradient for each sample. Adding them up is autograd's affair: it does so only where the
    parameter's gradient is asked for, which the products of an adjoint solve do not.
    """
    return None if parameter is None else parameter.expand(len(x), -1)


def _check(owner: str, x: Tensor, groups: int, affine: list[Affine]) -> None:
    require_count(owner, "groups", groups)
    if x.dim() != 4:
        raise ValueError(f"{owner}: maps must be (N, C, H, W), got {tuple(x.shape)}.")
    channels = x.shape[1]
    if channels % groups:
        near = max(1, round(channels / groups)) * groups
        raise ValueError(f"{owner}: channels must be a multiple of groups={groups}; got {channels}, nearest is {near}.")
    for weight, bias in affine:
        if (weight is None) != (bias is None):
            raise ValueError(
                f"{owner}: give both scale and offset or none; only {'bias' if weight is None else 'weight'}."
            )
        for tensor in (weight, bias):
            if tensor is not None and tensor.shape != (channels,):
                raise ValueError(f"{owner}: scale and offset must be ({channels},), got {tuple(tensor.shape)}.")


def _check_plus(x: Tensor, plus: Tensor | None, enlarge: int) -> None:
    if plus is None:
        if enlarge != 1:
            raise ValueError(
                f"group_norm: enlarge={enlarge} needs `plus`, the map to add to, whose size it is cropped to."
            )
        return
    fits = plus.dim() == 4 and plus.shape[:2] == x.shape[:2]
    fits = fits and all((b - 1) // enlarge + 1 == a for a, b in zip(x.shape[2:], plus.shape[2:], strict=True))
    if not fits:
        raise ValueError(
            f"group_norm: plus must be (N, C, H, W) with H and W over enlarge={enlarge}, rounded up, those of x, "
            f"{tuple(x.shape)}; got {tuple(plus.shape)}."
        )
