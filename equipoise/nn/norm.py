"""Weight and spectral normalisation, computed once per solve.

The parameters are replaced by a reparametrised set, and `weight` becomes a property that computes the effective weight,
or takes it from the solve under way. Initial weights are preserved, and modules stay picklable.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._compat import inside_functorch_transform
from equipoise._errors import require_count
from equipoise._scope import solve_constant
from equipoise.ops.taps import product_dtype
from equipoise.ops.weight_norm import normalised_rows, takes_kernel


class _Normalised(nn.Module):
    """Mixin for a layer whose `weight` is a function of other parameters."""

    weight_v: Tensor

    def begin_solve(self, x: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define its weight.")

    def absorb(self, weight: Tensor) -> None:
        """Set the parameters so that the effective weight equals `weight` (as far as the normalisation allows)."""
        raise TypeError(f"{type(self).__name__} does not define its weight.")

    @property
    def weight(self) -> Tensor:
        if torch.compiler.is_compiling():  # as good, and no graph break: the weight is a function of parameters alone
            return self.begin_solve(self.weight_v)
        weight: Tensor = solve_constant(self, self.weight_v)
        if weight.dtype == self.weight_v.dtype or weight.dtype == product_dtype(self.weight_v):
            return weight
        # Rounded where autocast was on, and used where it is off; by the class: a recording refuses other draws.
        return type(self).begin_solve(self, self.weight_v)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        with torch.no_grad():
            self.absorb(value)

    def reset_parameters(self) -> None:
        """The initialisation of linear and convolution layers, taken as the effective weight."""
        fresh = torch.empty_like(self.weight_v)
        nn.init.kaiming_uniform_(fresh, a=math.sqrt(5))
        self.weight = fresh
        bias = self._parameters.get("bias")
        if bias is not None:
            bound = 1 / math.sqrt(fresh[0].numel())
            nn.init.uniform_(bias, -bound, bound)


def _norm_except_first(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v.flatten(1), dim=1).view(-1, *[1] * (v.dim() - 1))


def _directions(weight: Tensor) -> Tensor:
    """The weight with zero rows replaced by something that has a direction, so that they can be trained."""
    return torch.where(_norm_except_first(weight) > 0, weight, 1.0)


def _unit(vector: Tensor, otherwise: Tensor) -> Tensor:
    """The vector at length one, or another one if it vanishes."""
    size = torch.linalg.vector_norm(vector)
    return torch.where(size > 0, vector / torch.where(size > 0, size, 1.0), otherwise)


class _WeightNormalised(_Normalised):
    """weight = g · v / ‖v‖, the norm over all axes but the first.

    On a device, where no gradient is wanted, it is made in the dtype that products with it are computed in.
    """

    draws_by_shape = True  # begin_solve looks at no value of its argument

    weight_g: Tensor
    weight_v: Tensor

    def begin_solve(self, x: Tensor) -> Tensor:
        v, g, dtype = self.weight_v, self.weight_g, product_dtype(self.weight_v)
        last = v.dim() == 4 and v.is_contiguous(memory_format=torch.channels_last)
        rows = v.permute(0, 2, 3, 1) if last else v  # as they lie in memory
        if not (rows.is_contiguous() and takes_kernel(rows, g, dtype)):
            return v * (g / _norm_except_first(v))
        made = normalised_rows(rows.flatten(1), g.flatten(1), dtype=dtype).view(rows.shape)
        return made.permute(0, 3, 1, 2) if last else made

    def absorb(self, weight: Tensor) -> None:
        self.weight_v.copy_(_directions(weight))
        self.weight_g.copy_(_norm_except_first(weight))


class _LeadingVectors(nn.Module):
    """Estimates of a matrix's leading singular vectors, improved once per solve in training mode."""

    shared_by_systems = True

    def __init__(self, matrix: Tensor, iterations: int) -> None:
        super().__init__()
        self.iterations = iterations
        self.register_buffer("left", matrix.new_zeros(matrix.shape[0]))
        self.register_buffer("right", matrix.new_zeros(matrix.shape[1]))
        self.settle(matrix)

    left: Tensor
    right: Tensor

    @torch.no_grad()
    def improved(self, matrix: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        left, right = self.left, self.right
        for _ in range(iterations):
            left = _unit(matrix @ right, left)
            right = _unit(matrix.mT @ left, right)
        return left, right

    def settle(self, matrix: Tensor) -> None:
        """Take the exact vectors: after the matrix has been set as a whole, old ones may be orthogonal to its own."""
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        self.keep(u[:, 0], vh[0])

    def keep(self, left: Tensor, right: Tensor) -> None:
        self.left.copy_(left)
        self.right.copy_(right)

    def begin_solve(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.improved(x, self.iterations)
        if not inside_functorch_transform():  # which may not change buffers
            self.keep(left, right)
        return left, right


class _SpectrallyNormalised(_Normalised):
    """weight = v · min(1, bound / σ(v)), σ the largest singular value of v as a matrix (outputs × the rest)."""

    draws_by_shape = True  # begin_solve looks at no value of its argument

    weight_v: Tensor
    vectors: _LeadingVectors
    bound: float

    def begin_solve(self, x: Tensor) -> Tensor:
        matrix = self.weight_v.flatten(1)
        with torch.autocast(matrix.device.type, enabled=False):
            left, right = self.vectors.left, self.vectors.right
            if self.training:
                left, right = solve_constant(self.vectors, matrix)
            sigma = torch.dot(left, matrix @ right)
        return self.weight_v * (self.bound / torch.clamp(sigma, min=self.bound))

    def absorb(self, weight: Tensor) -> None:
        self.weight_v.copy_(weight)
        self.vectors.settle(weight.flatten(1))


class WeightNormLinear(_WeightNormalised, nn.Linear):
    """`nn.Linear` with weight normalisation."""


class WeightNormConv1d(_WeightNormalised, nn.Conv1d):
    """`nn.Conv1d` with weight normalisation."""


class WeightNormConv2d(_WeightNormalised, nn.Conv2d):
    """`nn.Conv2d` with weight normalisation."""


class SpectralNormLinear(_SpectrallyNormalised, nn.Linear):
    """`nn.Linear` with a bound on its largest singular value."""


class SpectralNormConv1d(_SpectrallyNormalised, nn.Conv1d):
    """`nn.Conv1d` with a bound on the largest singular value of its kernel as a matrix."""


class SpectralNormConv2d(_SpectrallyNormalised, nn.Conv2d):
    """`nn.Conv2d` with a bound on the largest singular value of its kernel as a matrix."""


_WEIGHT: dict[type, type] = {nn.Linear: WeightNormLinear, nn.Conv1d: WeightNormConv1d, nn.Conv2d: WeightNormConv2d}
_SPECTRAL: dict[type, type] = {
    nn.Linear: SpectralNormLinear,
    nn.Conv1d: SpectralNormConv1d,
    nn.Conv2d: SpectralNormConv2d,
}


_PLAIN = {normalised: plain for kinds in (_WEIGHT, _SPECTRAL) for plain, normalised in kinds.items()}


def weight_norm(module: nn.Module) -> nn.Module:
    """Reparametrise a layer's weight as g·v/‖v‖, in place; the effective weight does not change.

    Args:
        module: An `nn.Linear`, `nn.Conv1d` or `nn.Conv2d`.

    Returns:
        The same module, with parameters `weight_g` and `weight_v`.
    """
    weight = _take_weight(module, _WEIGHT, "weight_norm")
    module.weight_g = nn.Parameter(_norm_except_first(weight.detach()))
    module.weight_v = nn.Parameter(_directions(weight.detach()))
    return module


def spectral_norm(module: nn.Module, bound: float = 1.0, iterations: int = 1) -> nn.Module:
    """Keep the largest singular value of a layer's weight (outputs × the rest) at or below `bound`, in place.

    A weight within the bound is left as it is.

    Args:
        module: An `nn.Linear`, `nn.Conv1d` or `nn.Conv2d`.
        bound: Upper bound of the singular value.
        iterations: Power iterations per solve in training mode; in eval mode the last estimate is used.

    Returns:
        The same module, with the parameter `weight_v`.
    """
    require_count("spectral_norm", "iterations", iterations)
    if not bound > 0:
        raise ValueError(f"spectral_norm: bound must be positive, got {bound!r}.")
    weight = _take_weight(module, _SPECTRAL, "spectral_norm")
    module.weight_v = nn.Parameter(weight.detach().clone())
    module.vectors = _LeadingVectors(weight.detach().flatten(1), iterations)
    module.bound = bound  # type: ignore[assignment]
    return module


@torch.no_grad()
def remove_norm(module: nn.Module) -> nn.Module:
    """Make the effective weight of a normalised layer an ordinary parameter again, in place.

    Args:
        module: What `weight_norm` or `spectral_norm` returned. Others stay as they are, classes derived from these too,
            and so do layers inside of it.
    """
    if isinstance(module, _Normalised) and type(module) in _PLAIN:
        with torch.autocast(module.weight_v.device.type, enabled=False):
            weight = module.begin_solve(module.weight_v)
        for name in ("weight_g", "weight_v", "vectors", "bound"):
            if hasattr(module, name):
                delattr(module, name)
        module.__class__ = _PLAIN[type(module)]
        module.weight = nn.Parameter(weight)
    return module


def _take_weight(module: nn.Module, classes: dict[type, type], name: str) -> Tensor:
    if isinstance(module, _Normalised):
        raise TypeError(f"{name}: {type(module).__name__} is normalised already.")
    if type(module) not in classes:
        known = ", ".join(cls.__name__ for cls in classes)
        raise TypeError(f"{name} takes an nn.{known.replace(', ', ', nn.')}; got {type(module).__name__}.")
    weight: Any = module._parameters.pop("weight")
    module.__class__ = classes[type(module)]
    return weight
