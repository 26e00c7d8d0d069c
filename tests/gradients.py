"""Small systems with a known root, and dense float64 truths for their gradients."""

from dataclasses import dataclass

import torch
from torch import nn

from equipoise import Anderson, Broyden, Implicit, Ladder, NewtonKrylov, Stop
from equipoise._solution import Status

# Tight enough that the gradient is right to 1e-10 even at a spectral radius of 0.99.
TIGHT = Stop(rtol=2e-14, max_steps=2000, plateau=100)
ROBUST = Ladder((Anderson(memory=10), Broyden(), NewtonKrylov()))
EXACT = Implicit(solver=ROBUST, stop=TIGHT)


def layer(z, W, x):
    """f(z) = tanh(W z + x), row by row."""
    return torch.tanh(z @ W.mT + x)


@dataclass
class TanhSystem:
    """A tanh map with its root chosen first, so that both root and spectral radius are known exactly."""

    W: torch.Tensor
    x: torch.Tensor
    root: torch.Tensor
    cotangent: torch.Tensor

    def f(self, z, W, x):
        return layer(z, W, x)

    @property
    def z0(self):
        return torch.zeros_like(self.root)

    def near(self, distance=1e-2):
        """A start close to the root, for systems with several of them."""
        generator = torch.Generator().manual_seed(99)
        step = torch.randn(self.root.shape, dtype=torch.float64, generator=generator).to(self.root.dtype)
        return self.root + distance * step

    def truth(self):
        """The gradient of ⟨cotangent, z*⟩ with respect to W and x, by dense linear algebra written out for this map."""
        W, z, a = self.W.detach().double(), self.root.double(), self.cotangent.double()
        slope = 1 - z.square()  # (N, n)
        jacobian = slope[:, :, None] * W  # (N, n, n)
        identity = torch.eye(W.shape[0], dtype=torch.float64)
        u = torch.linalg.solve((identity - jacobian).mT, a[:, :, None])[:, :, 0]
        inner = u * slope
        return inner.mT @ z, inner

    def to(self, dtype):
        return TanhSystem(*(t.detach().to(dtype) for t in (self.W, self.x, self.root, self.cotangent)))

    def trainable(self):
        self.W.requires_grad_()
        self.x.requires_grad_()
        return self


def tanh_system(n=8, batch=3, radius=0.9, seed=0, dtype=torch.float64, size=0.6):
    """A `TanhSystem` with root entries up to `size` and, as its largest spectral radius there, `radius`."""
    generator = torch.Generator().manual_seed(seed)
    root = size * (2 * torch.rand((batch, n), dtype=torch.float64, generator=generator) - 1)
    W = torch.randn((n, n), dtype=torch.float64, generator=generator)
    jacobian = (1 - root.square())[:, :, None] * W
    W = W * (radius / torch.linalg.eigvals(jacobian).abs().max())
    x = torch.atanh(root) - root @ W.mT
    cotangent = torch.randn((batch, n), dtype=torch.float64, generator=generator)
    return TanhSystem(W, x, root, cotangent).to(dtype).trainable()


def gradients(solution, system):
    """Gradients of ⟨cotangent, value⟩ with respect to W and x."""
    return torch.autograd.grad(solution.value, (system.W, system.x), system.cotangent)


def relative_error(got, want):
    """‖got − want‖ / ‖want‖ over all tensors given."""
    got, want = _flat(got), _flat(want)
    return float((got - want).norm() / want.norm())


def cosine(got, want):
    got, want = _flat(got), _flat(want)
    return float(torch.dot(got, want) / (got.norm() * want.norm()))


def _flat(tensors):
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def all_converged(stats):
    return bool(((stats.status == Status.CONVERGED) | (stats.status == Status.PRECISION_FLOOR)).all())


class TanhCell(nn.Module):
    """z ↦ tanh(W z + x) as a module, W scaled to a given spectral norm."""

    def __init__(self, n=6, norm=0.8, seed=0, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        W = torch.randn((n, n), dtype=torch.float64, generator=generator)
        self.W = nn.Parameter((W * (norm / torch.linalg.matrix_norm(W, 2))).to(dtype))

    def forward(self, z, x):
        return torch.tanh(z @ self.W.mT + x)


def normal(*shape, seed=0, dtype=torch.float64):
    """Standard normal numbers that do not touch the global generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
