"""A solution in words."""

import torch

from equipoise._solution import Solution, Stats, Status


def explain(solution: Solution) -> str:
    """What a solve did, how well, and what to change if it failed; a few lines of text."""
    lines = [_describe(solution.stats, "forward", "evaluations of f")]
    if solution.stats.lagged:
        lines.append("The value is the last proposal; the residual is that of the iterate before it.")
    if solution.backward is not None:
        lines.append(_describe(solution.backward, "backward", "vector-Jacobian products"))
    return "\n".join(lines)


def _describe(stats: Stats, which: str, unit: str) -> str:
    status = stats.status.detach().reshape(-1).cpu()
    total = len(status)
    if total == 0:
        return f"{which}: no systems (empty batch)."
    steps = stats.steps.detach().reshape(-1).cpu().double()
    residual = stats.residual.detach().reshape(-1).cpu().double()
    solved = int(torch.isin(status, torch.tensor([kind for kind in Status if kind.ok])).sum())
    head = (
        f"{which}: {solved} of {total} systems solved in {int(steps.median())} steps (median; most "
        f"{int(steps.max())}), {stats.nfe} {unit}; relative residual {float(residual.median()):.1e} (median), "
        f"{float(residual.max()):.1e} (worst)."
    )
    at_floor = int((status == Status.PRECISION_FLOOR).sum())
    if at_floor:
        head += f" {at_floor} of them {Status.PRECISION_FLOOR.message}."
    failures = stats.summary()
    return f"{head}\n  {failures}." if failures else head
