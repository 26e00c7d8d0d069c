"""Variational dropout: one mask per solve."""

import torch
from torch import Tensor, nn

from equipoise._draws import rand_rows
from equipoise._errors import require_number
from equipoise._scope import solve_constant


class VariationalDropout(nn.Module):
    """Dropout whose mask is drawn once per solve and reused in every evaluation of f and in the backward pass.

    Outside a solve a mask is drawn at every call.

    Args:
        p: Probability of dropping.
        shared: Axes over which one draw is shared. For sequences (B, T, d) share axis 1, for channels of (B, C, T) axis
            2, of (B, C, H, W) axes (2, 3); an empty tuple draws each entry, as for attention maps (B, heads, q, k).
        shared_by_systems: Whether inputs belong to all samples alike, so that their first axis is not one of samples.
    """

    draws_by_shape = True  # begin_solve looks at no value of its argument

    def __init__(self, p: float, shared: int | tuple[int, ...] = (), *, shared_by_systems: bool = False) -> None:
        super().__init__()
        require_number("VariationalDropout", "p", p, low=0.0, high=1.0)
        self.p = p
        self.shared = (shared,) if isinstance(shared, int) else tuple(shared)
        self.shared_by_systems = shared_by_systems

    def begin_solve(self, x: Tensor) -> Tensor:
        """The mask for inputs shaped like x."""
        shape = list(x.shape)
        for axis in self.shared:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"VariationalDropout: shared axis {axis} does not exist in an input of shape {tuple(x.shape)}."
                )
            shape[axis] = 1
        # Drawn in float32 whatever the dtype, so that one seed gives one mask in every precision.
        if self.shared_by_systems or any(axis in (0, -len(shape)) for axis in self.shared):
            drawn = torch.rand(shape, device=x.device, dtype=torch.float32)
        else:
            drawn = rand_rows(shape, x.device)
        kept = drawn >= self.p
        return kept.to(x.dtype).div_(1 - self.p)

    def mask(self, x: Tensor) -> Tensor | None:
        """What an input shaped like x is multiplied by, for those who do it themselves; None if nothing is dropped."""
        if not (self.training and self.p > 0):
            return None
        mask: Tensor = solve_constant(self, x)
        shared = {axis % x.dim() for axis in self.shared}
        if mask.shape != tuple(1 if axis in shared else size for axis, size in enumerate(x.shape)):
            raise ValueError(
                f"VariationalDropout: its mask in this solve, of its first use, has shape {tuple(mask.shape)}, and "
                f"the input has {tuple(x.shape)}: give each place in the cell a dropout of its own."
            )
        return mask

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        return x if mask is None else x * mask.to(x.dtype)

    def extra_repr(self) -> str:
        systems = ", shared_by_systems=True" if self.shared_by_systems else ""
        return f"p={self.p}, shared={self.shared}{systems}"


class SequenceDropout(VariationalDropout):
    """Variational dropout for (B, T, d): one mask per sample and feature, the same at every position."""

    def __init__(self, p: float) -> None:
        super().__init__(p, shared=1)


class AttentionDropout(VariationalDropout):
    """Variational dropout for attention maps (B, heads, queries, keys): every entry has its own draw."""

    def __init__(self, p: float) -> None:
        super().__init__(p)


class ChannelDropout1d(VariationalDropout):
    """Variational dropout for (B, C, T): whole channels."""

    def __init__(self, p: float) -> None:
        super().__init__(p, shared=2)


class ChannelDropout2d(VariationalDropout):
    """Variational dropout for (B, C, H, W): whole channels."""

    def __init__(self, p: float) -> None:
        super().__init__(p, shared=(2, 3))
