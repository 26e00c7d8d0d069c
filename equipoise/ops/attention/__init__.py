"""Causal attention by content and by distance: one kernel forward, two for its VJP."""

from torch import Tensor

from equipoise._compat import autocast_dtype
from equipoise._errors import require_count
from equipoise.ops._backend import use_differentiable_kernel
from equipoise.ops.attention import naive

LARGEST_HEAD = 128


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float,
    local_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Values mixed by the softmax of scores by content and by distance, without the map of all pairs.

        s_ij = scale·((q_i + bias)·k_j + by_distance_i(δ)),   δ = M + i − j,   0 ≤ δ < local_size
        result_i = Σ_j softmax_j(s_ij) v_j

    Queries are the last T of L = M + T positions. Scores by distance come as a product with the keys of distances gives
    them: the last column belongs to δ = 0, the one before to δ = 1, and so on to δ = L − 1; columns before these are
    ignored, and there must be one or more. The kernel finds the entry of a pair by its address.

    Under autocast products are taken in its dtype, whatever the arguments' dtypes, else in theirs, which must agree;
    sums and softmax are in float32. The kernel saves its arguments, the result and one number per query and head; a
    second derivative goes through the plain twin. Forward mode and torch.func get the twin, and inside torch.compile it
    is traced.

    Args:
        query: (B, heads, T, d_head); any strides, here and below, but a contiguous last axis.
        key: (B, heads, L, d_head).
        value: (B, heads, L, d_head).
        by_distance: (B, heads, T, W), W > L.
        bias: Added to all queries, (heads, d_head).
        scale: Factor of all scores.
        local_size: Positions that a query sees, itself included; None for no limit.
        backend: "auto", "naive" or "triton".

    Returns:
        (B, T, heads, d_head), contiguous.
    """
    _check(query, key, value, by_distance, bias)
    if local_size is not None:
        require_count("attend", "local_size", local_size)
    extra = (by_distance,) if bias is None else (by_distance, bias)
    if not takes_kernel(query, key, value, *extra, backend=backend):
        return naive.attend(query, key, value, by_distance, bias, scale=scale, local_size=local_size)
    from equipoise.ops.attention import triton as kernels

    # Spread over all queries, the bias has their gradient, and summing that is autograd's affair: it does so only where
    # the bias's gradient is asked for, which the products of an adjoint solve do not.
    spread = None if bias is None else bias.to(query.dtype)[:, None].expand_as(query)
    result, _ = kernels.Attend.apply(  # type: ignore[no-untyped-call]
        query, key, value, by_distance, spread, scale, local_size, autocast_dtype(query.device.type)
    )
    return result  # type: ignore[no-any-return]


def takes_kernel(query: Tensor, *others: Tensor, backend: str = "auto") -> bool:
    """Whether `attend` would use its kernels for these arguments, here and now; an error if asked for in vain."""
    if query.numel() == 0 or not use_differentiable_kernel("attend", backend, (query, *others)):
        return False
    mixed = any(other.dtype != query.dtype for other in others) and autocast_dtype(query.device.type) is None
    if query.shape[-1] <= LARGEST_HEAD and not mixed:
        return True
    if backend == "triton":
        raise ValueError(
            f"attend: backend='triton' takes heads of at most {LARGEST_HEAD} features and, without autocast, one "
            f"dtype; got {query.shape[-1]} features and {', '.join(str(x.dtype) for x in (query, *others))}. "
            "Use backend='auto' or 'naive'."
        )
    return False


def _check(query: Tensor, key: Tensor, value: Tensor, by_distance: Tensor, bias: Tensor | None) -> None:
    given = query, key, value, by_distance
    if all(tensor.dim() == 4 for tensor in given):
        batch, heads, length, features = query.shape
        keys, columns = key.shape[2], by_distance.shape[3]
        expected = [(batch, heads, keys, features)] * 2 + [(batch, heads, length, columns)]
        shapes_agree = [tuple(tensor.shape) for tensor in given[1:]] == expected and length <= keys < columns
        if shapes_agree and (bias is None or bias.shape == (heads, features)):
            return
    raise ValueError(
        "attend: query must be (B, heads, T, d), key and value (B, heads, L, d) with L >= T, by_distance (B, heads, T, "
        f"W) with W > L and bias (heads, d); got {', '.join(str(tuple(tensor.shape)) for tensor in given)} and "
        f"{None if bias is None else tuple(bias.shape)}."
    )
