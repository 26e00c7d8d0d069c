"""How good are the gradients that a model is trained with?"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._module import DEQ, deqs_in, override, own_parameters, solutions_of
from equipoise._solution import Solution, Stats
from equipoise._stop import Stop
from equipoise._tree import tree_map, tree_tensors
from equipoise.adjoints import Implicit
from equipoise.solvers import Anderson, Broyden, Ladder, NewtonKrylov

TIGHT = Stop(rtol=1e-10, max_steps=400, plateau=60)
ROBUST = Ladder((Anderson(memory=10), Broyden(), NewtonKrylov()))


@dataclass(frozen=True)
class GradientAudit:
    """A model's gradient beside a tight solve's.

    Attributes:
        cosine: Cosine of the angle between the two gradients, over all parameters.
        norm_error: |‖g‖ − ‖truth‖| / ‖truth‖.
        relative_error: ‖g − truth‖ / ‖truth‖.
        residual: Largest relative residual of the model's own forward solves.
        truth_residual: Largest relative residual of the tight forward and backward solves: how far to trust the truth.
    """

    cosine: float
    norm_error: float
    relative_error: float
    residual: float
    truth_residual: float

    def __str__(self) -> str:
        return (
            f"gradient against a tight solve: cosine {self.cosine:.6f}, relative error {self.relative_error:.1e}, "
            f"norm error {self.norm_error:.1e} "
            f"(forward residual {self.residual:.1e}; truth at {self.truth_residual:.1e})"
        )


def audit_gradient(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None, *, stop: Stop = TIGHT
) -> GradientAudit:
    """Compare the parameter gradient of `model` as configured with that of a tight solve in float64.

    The model is not changed: both gradients are taken on copies, with the same random draws.

    Args:
        model: A module that contains at least one DEQ.
        batch: Its input, or a tuple of its inputs.
        loss: Scalar loss of the model's output; by default a fixed random linear function of all its tensors.
        stop: Stop rule of the tight solves.

    Returns:
        The comparison.
    """
    inputs = batch if isinstance(batch, tuple) else (batch,)
    evaluate = loss or _random_functional
    devices = {tensor.device for tensor in (*model.parameters(), *tree_tensors(inputs)) if tensor.is_cuda}
    with torch.random.fork_rng(devices):  # so that both gradients see the same dropout masks
        gradient, records = _gradient(_eager_copy(model), inputs, evaluate)
    exact = _eager_copy(model).double()
    wide = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)
    with override(exact, solver=ROBUST, stop=stop, adjoint=Implicit(solver=ROBUST, stop=stop)):
        truth, tight = _gradient(exact, wide, evaluate)
    size = truth.norm()
    return GradientAudit(
        cosine=float(torch.dot(gradient, truth) / (gradient.norm() * size)),
        norm_error=float((gradient.norm() - size).abs() / size),
        relative_error=float((gradient - truth).norm() / size),
        residual=_worst([solution.stats for solution in records]),
        truth_residual=_worst([s for solution in tight for s in (solution.stats, solution.backward) if s is not None]),
    )


def _eager_copy(model: nn.Module) -> nn.Module:
    """A copy whose equilibria are found by the eager engine: nothing comes again, so nothing is worth recording."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, DEQ):
            module.engine = "eager"
    return twin


def _gradient(
    model: nn.Module, inputs: tuple[Any, ...], loss: Callable[[Any], Tensor]
) -> tuple[Tensor, list[Solution]]:
    """The parameter gradient as one float64 vector, and the solutions met on the way."""
    if not deqs_in(model):
        raise ValueError(f"audit_gradient: {type(model).__name__} contains no DEQ.")
    parameters = [p for p in own_parameters(model) if p.requires_grad]  # not those of a learned solver
    if not parameters:
        raise ValueError(f"audit_gradient: {type(model).__name__} has no parameter that requires a gradient.")
    with torch.enable_grad(), solutions_of(model) as found:
        value = loss(model(*inputs))
    grads = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([g.reshape(-1).double() for g in grads]), [solution for solution, _ in found]


def _random_functional(output: Any) -> Tensor:
    tensors = [t for t in tree_tensors(output) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise ValueError("audit_gradient: the model's output carries no gradient; pass a loss.")
    generator = torch.Generator().manual_seed(0)
    products = []
    for tensor in tensors:
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        products.append((tensor.double() * weights.to(tensor.device)).sum())
    return torch.stack(products).sum()


def _worst(stats: list[Stats]) -> float:
    return max((float(s.residual.max()) for s in stats if s.residual.numel()), default=0.0)
