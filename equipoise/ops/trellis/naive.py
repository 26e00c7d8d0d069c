"""Gates and recurrence of the TrellisNet cell in plain PyTorch: what the kernels compute."""

import torch
from torch import Tensor


def cell(pre: Tensor, start: Tensor, plus: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `trellis_cell`; differentiable any number of times."""
    # Here, because models use the operations and the operations would otherwise import models.
    from equipoise.models._scan import HALF, linear_scan

    wide = torch.float32 if pre.dtype in HALF else pre.dtype
    total = pre.to(wide) if plus is None else pre.to(wide) + plus
    i, o, g, phi = total.chunk(4, dim=-1)
    c = linear_scan(phi.sigmoid(), i.sigmoid() * g.tanh(), start.to(wide))
    h = o.sigmoid() * c.tanh()
    return h.to(dtype), c.to(pre.dtype)
