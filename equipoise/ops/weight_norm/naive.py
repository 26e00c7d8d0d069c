"""Weight normalisation in plain PyTorch: what the kernel computes."""

import torch
from torch import Tensor

from equipoise._compat import inside_functorch_transform


def normalised_rows(v: Tensor, g: Tensor, floor: float, dtype: torch.dtype) -> Tensor:
    """See `normalised_rows` of the package; differentiable any number of times."""
    norm = torch.linalg.vector_norm(v, dim=1, keepdim=True)
    scale = g / (norm.clamp_min(floor) if floor > 0 else norm)
    if torch.is_grad_enabled() or inside_functorch_transform() or torch.compiler.is_compiling():
        return (v * scale).to(dtype)
    return torch.mul(v, scale, out=torch.empty_like(v, dtype=dtype))  # rounded as it is written: half the bytes
