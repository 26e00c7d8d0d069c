"""The spectral radius of the Jacobian at a state."""

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._errors import require_count
from equipoise._problem import Problem
from equipoise._solution import Solution
from equipoise._tree import Tree
from equipoise.penalties import problem_and_state


@torch.no_grad()
def spectral_radius(problem: Problem | Solution, z: Tree = None, *, steps: int = 150, window: int = 50) -> Tensor:
    """ρ(∂f/∂z) per system, by the growth rate of repeated vector-Jacobian products.

    The geometric mean of ‖Jᵀv‖/‖v‖ over the last `window` products; unlike a Rayleigh quotient it is right for complex
    leading pairs. Below 1, the plain iteration is stable at z.

    Args:
        problem: A problem, or a solution to look at.
        z: State at which to take the Jacobian; a solution's own value by default.
        steps: Products.
        window: Products that enter the mean.

    Returns:
        (N,) estimates; 0 where J is nilpotent.
    """
    require_count("spectral_radius", "steps", steps)
    require_count("spectral_radius", "window", window)
    problem, z = problem_and_state(problem, z, "spectral_radius")
    leaves = problem.start(z)
    pull = problem.vjp(leaves)[1]
    generator = torch.Generator(device=leaves[0].device).manual_seed(0)
    vector = [torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator) for x in leaves]
    logs = []
    for _ in range(steps):
        size = _leaves.norm(vector)
        vector = [leaf / torch.where(size > 0, size, 1.0)[:, None] for leaf in vector]
        vector = pull(vector)
        logs.append(_leaves.norm(vector).log())
    return torch.stack(logs[-window:]).mean(dim=0).exp()
