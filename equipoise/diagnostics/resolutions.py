"""How fast each part of a state converges: the resolutions of an MDEQ, or the leaves of any other tree."""

import torch
from torch import Tensor

from equipoise import _leaves
from equipoise._fixed_point import solve
from equipoise._problem import Problem
from equipoise._solution import Solution
from equipoise._stop import Stop
from equipoise._tree import Tree
from equipoise.adjoints import Implicit
from equipoise.solvers import Solver


@torch.no_grad()
def leaf_residuals(solution: Solution) -> list[Tensor]:
    """Relative residuals ‖f(z)ᵢ − zᵢ‖ / ‖f(z)ᵢ‖ of each leaf i, at every iterate of a solve.

    One more evaluation of f for each iterate: a solve measures all leaves together.

    Args:
        solution: Of a solve with `collect="iterates"`.

    Returns:
        For each leaf an (N, iterates) tensor.
    """
    if solution.problem is None or not solution.collected or "iterates" not in solution.collected:
        raise ValueError('leaf_residuals needs the iterates: solve with collect="iterates".')
    problem, rows = solution.problem, []
    for iterate in solution.collected["iterates"]:
        z = problem.start(iterate)
        fz = problem.evaluate_plain(z)
        rows.append([_leaves.norm([a - b]) / _leaves.norm([a]).clamp_min(1e-30) for a, b in zip(fz, z, strict=True)])
    return [torch.stack(column, dim=1) for column in zip(*rows, strict=True)]


@torch.no_grad()
def resolution_curves(
    problem: Problem, start: Tree, solver: Solver | str, steps: int
) -> dict[str, dict[str, list[float]]]:
    """Residuals of each leaf over the steps of a solve, as `inspect.json` keeps curves.

    Args:
        problem: To solve.
        start: Where the solve begins.
        solver: By which.
        steps: How many, of all systems.

    Returns:
        For each leaf, named by its number and its size without the axis of systems ("1: 24×16×16"), the median and the
        95th percentile over systems at each step.
    """
    found = solve(problem, start, solver, Implicit(), Stop(rtol=0.0, max_steps=steps), collect="iterates")
    shapes = [shape[problem.spec.batch_dims :] for shape in problem.spec.shapes]
    curves = {}
    for number, (shape, residuals) in enumerate(zip(shapes, leaf_residuals(found), strict=True), start=1):
        table = residuals[:, :steps].double().nan_to_num(nan=torch.inf)
        quantiles = {
            name: torch.quantile(table, q, dim=0, interpolation="nearest").tolist()
            for name, q in (("median", 0.5), ("p95", 0.95))
        }
        curves[f"{number}: {'×'.join(map(str, shape))}"] = quantiles
    return curves
