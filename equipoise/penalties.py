"""Terms to add to a loss so that equilibria stay easy to find."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._draws import randn_rows
from equipoise._errors import require_count, require_gradients, require_number, unknown_name
from equipoise._problem import Problem
from equipoise._solution import Solution
from equipoise._tree import Leaves, Tree, tree_tensors

DIRECTIONS = ("random", "residual")


def jacobian_penalty(
    problem: Problem | Solution,
    z: Tree = None,
    probes: int = 1,
    along: Literal["random", "residual"] = "random",
    systems: int | None = None,
) -> Tensor:
    """The size of the Jacobian J = ∂f/∂z at z, in all directions or in the one that is hardest to solve for.

    Along random vectors this is the Hutchinson estimate of ‖J‖²_F per unknown: mean over draws v of Σ ‖vᵀJ‖² / (N·D).
    A few directions in which f does not contract are lost in it among thousands. Along the residual it is the mean over
    systems of ‖vᵀJ‖² / ‖v‖², v = f(z) − z: what a solver has left over lies mainly in such directions.

    The gradient flows to parameters and inputs through second derivatives of f; z is taken as a constant, so it is the
    gradient of the penalty at a fixed state, not along the moving equilibrium. Uses the solve's own dropout masks, and
    the uncompiled cell.

    Args:
        problem: A problem (`DEQ.problem(...)`, `Solution.problem`), or a solution to penalise at its value.
        z: State at which to take the Jacobian; a solution's own value by default.
        probes: Random vectors; each costs one VJP and its double backward.
        along: "random" or "residual".
        systems: Look at the first so many systems only, at so much less cost; None for all. All of them too where
            systems cannot be taken apart (`Problem.can_slice`).

    Returns:
        A scalar.

    Reference: S. Bai, V. Koltun, J. Z. Kolter, Stabilizing equilibrium models by Jacobian regularization, ICML 2021.
    """
    require_count("jacobian_penalty", "probes", probes)
    check_direction("jacobian_penalty", along, probes)
    require_gradients("jacobian_penalty")
    problem, z = problem_and_state(problem, z, "jacobian_penalty")
    start = problem.start(z)
    if systems is not None:
        require_count("jacobian_penalty", "systems", systems)
        problem, start = _first(problem, start, systems)
    leaves = [leaf.detach().requires_grad_() for leaf in start]
    unknowns, count = sum(leaf.numel() for leaf in leaves), len(leaves[0])
    with torch.enable_grad():
        fz = problem.evaluate_plain(leaves)
        total = fz[0].new_zeros(())
        for _ in range(probes):
            probe = [randn_rows(leaf) for leaf in fz] if along == "random" else _unit_residual(leaves, fz)
            pulled = torch.autograd.grad(
                fz, leaves, probe, create_graph=True, allow_unused=True, materialize_grads=True
            )
            total = total + sum(leaf.square().sum() for leaf in pulled)
    return total / (probes * max(1, unknowns if along == "random" else count))


def _first(problem: Problem, z: Leaves, systems: int) -> tuple[Problem, Leaves]:
    """The first so many systems and their states; all, if there are no more or f cannot do with less."""
    if systems >= problem.num_systems:
        return problem, z
    index = torch.arange(systems, device=z[0].device)
    some = problem.rows(index)
    return (some, _leaves.take_rows(z, index)) if some.can_slice else (problem, z)


def check_direction(owner: str, along: str, probes: int) -> None:
    """Refuse a direction of the penalty that does not exist, or several vectors along the only residual."""
    if along not in DIRECTIONS:
        raise unknown_name("direction of the penalty", along, DIRECTIONS)
    if along == "residual" and probes != 1:
        raise ValueError(f"{owner}: there is one residual, got probes={probes}; use 1, or along='random'.")


@torch.no_grad()
def _unit_residual(z: Leaves, fz: Leaves) -> Leaves:
    """f(z) − z of length 1 in each system; zero where it is zero, or not finite."""
    residual = _leaves.subtract(fz, z)
    size = _leaves.norm(residual)
    sound = torch.isfinite(size) & (size > 0)
    factor = torch.where(sound, 1 / size, 0.0)
    return [torch.where(sound[:, None], leaf * factor[:, None], 0.0) for leaf in residual]


def fixed_point_correction(
    trajectory: Solution | Sequence[Tree], loss: Callable[[Tree], Tensor], *, states: int = 3, decay: float = 0.8
) -> Tensor:
    """A loss on states along the way to the equilibrium, so that the path itself gets better.

    Args:
        trajectory: A solution computed with `collect="iterates"`: each chosen iterate gets the gradient of one
        evaluation
            of f. Or states that already carry gradients.
        loss: The loss of a state.
        states: How many states to take, spread evenly over the trajectory, its end left out.
        decay: Weight of each state relative to the one after it.

    Returns:
        The weighted mean of the losses.
    """
    require_count("fixed_point_correction", "states", states)
    require_number("fixed_point_correction", "decay", decay, low=0.0, open_low=True)
    chosen: list[Tree]
    if isinstance(trajectory, Solution):
        if not trajectory.collected or "iterates" not in trajectory.collected or trajectory.problem is None:
            raise ValueError('fixed_point_correction needs the iterates: solve with collect="iterates".')
        problem = trajectory.problem
        iterates = _spread(trajectory.collected["iterates"][:-1] or trajectory.collected["iterates"], states)
        chosen = []
        for iterate in iterates:
            leaves = [leaf.detach() for leaf in problem.start(iterate)]
            chosen.append(problem.spec.unflatten(problem.evaluate(leaves)))
    else:
        if not trajectory:
            raise ValueError("fixed_point_correction: the trajectory is empty.")
        chosen = _spread(list(trajectory), states)
    weights = [decay ** (len(chosen) - 1 - i) for i in range(len(chosen))]
    losses = [weight * loss(state) for weight, state in zip(weights, chosen, strict=True)]
    return torch.stack(losses).sum() / sum(weights)


def _spread(items: list[Any], count: int) -> list[Any]:
    """At most `count` items, evenly spread and ending with the last."""
    count = min(count, len(items))
    return [items[round((i + 1) * len(items) / count) - 1] for i in range(count)]


def problem_and_state(problem: Problem | Solution, z: Tree, name: str) -> tuple[Problem, Tree]:
    """The problem and the (detached) state to look at, from a problem or a solution."""
    if isinstance(problem, Solution):
        z = problem.value if z is None else z
        if problem.problem is None:
            raise ValueError(f"{name}: this solution does not know its problem; pass the problem itself.")
        problem = problem.problem
    if not isinstance(problem, Problem):
        raise TypeError(
            f"{name} takes a Problem or a Solution, got {type(problem).__name__}; see DEQ.problem(*inputs)."
        )
    if z is None or not tree_tensors(z):
        raise ValueError(f"{name}: pass the state z at which to look.")
    return problem, z
