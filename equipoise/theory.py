"""The theorems on deep equilibrium models as constructions.

One equilibrium is as good as several stacked ones, every deep network is a weight-tied one, long sequences may be
solved chunk by chunk, and the implicit gradient is a dense linear solve on small problems.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._fixed_point import fixed_point
from equipoise._solution import Solution
from equipoise._tree import Tree


class StackedCell(nn.Module):
    """Two equilibrium layers, the second on top of the first, as one cell on the pair of their states.

    (w₁, w₂) ↦ (first(w₁, *inputs), second(w₂, w₁)). Its root is (z₁*, z₂*) with z₁* the root of `first` and z₂* that of
    `second` given z₁*. The Jacobian is block lower triangular, so its spectral radius is the larger of the two.

    Args:
        first: Cell of the lower layer, `first(w1, *inputs)`.
        second: Cell of the upper layer, `second(w2, w1)`.
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, state: tuple[Tree, Tree], *inputs: Any) -> tuple[Tree, Tree]:
        lower, upper = state
        return self.first(lower, *inputs), self.second(upper, lower)


class DeepNetCell(nn.Module):
    """A deep feed-forward network as a weight-tied, input-injected cell on the concatenation of its hidden layers.

    Layer i reads block i − 1 of the state, the first one reads the input. The Jacobian is nilpotent: after as many
    plain steps as there are layers, from any start, block i holds the output of layer i, and that state is the only
    root.

    Args:
        layers: The network, one module per layer.
        widths: Output width of each layer.
    """

    def __init__(self, layers: Sequence[nn.Module], widths: Sequence[int]) -> None:
        super().__init__()
        if len(layers) != len(widths) or not layers:
            raise ValueError(f"DeepNetCell: {len(layers)} layers and {len(widths)} widths; give one width per layer.")
        self.layers = nn.ModuleList(layers)
        self.widths = list(widths)

    def initial_state(self, x: Tensor) -> Tensor:
        """Zeros of shape (N, sum of the widths)."""
        return x.new_zeros((x.shape[0], sum(self.widths)))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        blocks = [x, *z.split(self.widths, dim=1)[:-1]]
        return torch.cat([layer(block) for layer, block in zip(self.layers, blocks, strict=True)], dim=1)

    def output(self, z: Tensor) -> Tensor:
        """The last layer's block of a state."""
        return z.split(self.widths, dim=1)[-1]


def solve_in_chunks(
    f: Callable[..., Tree],
    starts: Sequence[Tree],
    inputs: Sequence[tuple[Any, ...]],
    *,
    history: Tree,
    carry: Callable[[Tree, Tree], Tree],
    **options: Any,
) -> list[Solution]:
    """Solve a causal system chunk by chunk, each chunk seeing the equilibria of those before it.

    Equal to solving the whole at once, in value and gradient, provided that `history` holds everything f can see: the
    big root is block triangular, and the backward pass of the chain is its block back-substitution.

    Args:
        f: `f(z, *inputs, history)` for one chunk.
        starts: Initial state of each chunk.
        inputs: Inputs of each chunk.
        history: What the first chunk sees of the past.
        carry: The next history from the last one and a chunk's equilibrium; do not detach it.
        **options: For `fixed_point`.

    Returns:
        One solution per chunk.
    """
    if len(starts) != len(inputs) or not starts:
        raise ValueError(f"solve_in_chunks: {len(starts)} starts and {len(inputs)} inputs; give one of each per chunk.")
    solutions = []
    for start, arguments in zip(starts, inputs, strict=True):
        solution = fixed_point(f, start, *arguments, history, **options)
        history = carry(history, solution.value)
        solutions.append(solution)
    return solutions


def dense_jacobian(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """∂f/∂z of each system of a (N, ...) state, (N, D, D), for systems that do not interact."""
    n = z.shape[0]
    point = z.detach().requires_grad_()
    with torch.enable_grad():
        flat = f(point).reshape(n, -1)
        rows = [
            torch.autograd.grad(flat[:, i].sum(), point, retain_graph=True)[0].reshape(n, -1)
            for i in range(flat.shape[1])
        ]
    return torch.stack(rows, dim=1)


def dense_gradient(
    f: Callable[[Tensor], Tensor], z: Tensor, cotangent: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradient of ⟨cotangent, z*⟩ with respect to `tensors`, by a dense solve: Theorem 1 taken literally.

    dℓ/dθ = aᵀ (I − J)⁻¹ ∂f/∂θ at z*. For tests and small problems; the truth that adjoints are compared with.

    Args:
        f: The map, closing over `tensors`.
        z: The root, (N, ...).
        cotangent: ∂ℓ/∂z*.
        tensors: What to differentiate with respect to.
    """
    jacobian = dense_jacobian(f, z)
    identity = torch.eye(jacobian.shape[1], dtype=z.dtype, device=z.device)
    adjoint = torch.linalg.solve((identity - jacobian).mT, cotangent.reshape(z.shape[0], -1, 1))
    with torch.enable_grad():
        fz = f(z.detach())
    return torch.autograd.grad(fz, tuple(tensors), adjoint.reshape(z.shape), allow_unused=True, materialize_grads=True)
