"""A learned solver for the states and inputs that a DEQ has."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from equipoise._errors import require_number, unknown_name
from equipoise._problem import Problem
from equipoise._tree import tree_tensors
from equipoise.solvers._hyper_config import HyperConfig
from equipoise.solvers.hyper_anderson import HyperAnderson, source_of

if TYPE_CHECKING:
    from equipoise._module import DEQ

# Inner size below which a network is not made smaller to fit a budget.
SMALLEST = 4


def hyper_solver_for(
    deq: "DEQ",
    *inputs: Any,
    context: Any = None,
    z0: Any = None,
    base: nn.Module | None = None,
    budget: float | None = 0.04,
    **settings: Any,
) -> HyperAnderson:
    """A learned solver, not yet fitted, that suits the states and inputs of a DEQ.

    States (N, T, d) with a first input (N, T, ...) are sequences, whose positions get weights of their own, unless
    `local=False`; states of maps (N, C, H, W) are images, and all others are taken as flat. Inner sizes are cut
    until the solver has at most `budget` times the parameters of the model, or they cannot be: see `num_parameters`.
    Those that are asked for stay as they are, but for `rank`, which is the most it may be.

    Args:
        deq: What to solve for.
        *inputs: Of the DEQ.
        context: Likewise, where it is called with one: the initialiser reads that.
        z0: Likewise.
        base: The model whose parameters count; the DEQ's cell if None.
        budget: Largest share of the model's parameters; None for any.
        **settings: Of `HyperConfig`; `source=None` for no initialiser.
    """
    from equipoise._module import own_parameters

    known = [field.name for field in dataclasses.fields(HyperConfig)]
    for name in settings:
        if name not in known:
            raise unknown_name("setting of a learned solver", name, known)
    start = deq.start(*inputs) if z0 is None else z0
    problem = deq.problem(*inputs, z0=start, context=context)
    found = _detected(problem)
    # Learned weights by position reach the equilibrium sooner than weights by sequence; see docs/hyper.md.
    found["local"] = found["kind"] == "sequence" and settings.get("compression") != "mean"
    config = HyperConfig(**{**found, **settings})
    if "local" not in settings and config.solves and not config.learns_steps:
        config = dataclasses.replace(config, local=False)  # Anderson's are by sequence
    if z0 is None and "warm" not in settings and any(bool(leaf.any()) for leaf in tree_tensors(start)):
        config = dataclasses.replace(config, warm="replace")  # else the initialiser would never be asked
    if budget is not None:
        require_number("hyper_solver_for", "budget", budget, low=0.0, open_low=True)
        most = budget * sum(parameter.numel() for parameter in own_parameters(base or deq.cell))
        config = _within(config, most, fixed=set(settings) - {"rank"})
    return HyperAnderson(config).to(problem.spec.device)


def _detected(problem: Problem) -> dict[str, Any]:
    """Kind, sizes of the state and size of the source."""
    spec, x = problem.spec, source_of(problem)
    shapes = [shape[spec.batch_dims :] for shape in spec.shapes]
    ranks = {len(shape) for shape in shapes}
    lengths = {shape[0] for shape in shapes if len(shape) == 2}
    if spec.batch_dims == 1 and ranks == {2} and len(lengths) == 1 and (x is None or _of_length(x, *lengths)):
        return {"kind": "sequence", "state": [s[1] for s in shapes], "source": None if x is None else x.shape[2]}
    if spec.batch_dims == 1 and ranks == {3} and (x is None or x.dim() == 4):
        return {"kind": "images", "state": [s[0] for s in shapes], "source": None if x is None else x.shape[1]}
    source = None if x is None or spec.batch_dims != 1 else x.shape[1:].numel()
    return {"kind": "any", "state": [shape.numel() for shape in shapes], "source": source}


def _of_length(x: torch.Tensor, length: int) -> bool:
    """Whether an input is a sequence (N, length, ...)."""
    return x.dim() == 3 and x.shape[1] == length


def _within(config: HyperConfig, most: float, fixed: set[str]) -> HyperConfig:
    """The settings with inner sizes small enough for so many parameters, or as small as they get.

    The larger of the two networks is cut first, so that neither starves for the other.
    """
    while True:
        start, steps = _counts(config)
        if start + steps <= most:
            return config
        order = (("hidden",), ("compressed", "width", "rank"))
        for names in order if start >= steps else reversed(order):
            free = [name for name in names if name not in fixed and getattr(config, name) > SMALLEST]
            if free:
                cut = {name: max(SMALLEST, getattr(config, name) * 3 // 4) for name in free}
                config = dataclasses.replace(config, **cut)
                break
        else:
            return config


def _counts(config: HyperConfig) -> tuple[int, int]:
    """Parameters of the initialiser, and of the rest."""
    with torch.device("meta"):
        solver = HyperAnderson(config)
    start = sum(p.numel() for p in solver.initialiser.parameters()) if solver.initialiser is not None else 0
    return start, solver.num_parameters - start
