"""Looking into a trained model: stability, gradient, convergence, failures, memory and time of a training step."""

import copy
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise._errors import require_count
from equipoise._fixed_point import solve
from equipoise._module import DEQ, Plan, deqs_in, override, solutions_of
from equipoise._solution import EquilibriumWarning, Solution, Status
from equipoise._stop import Stop
from equipoise._tree import Tree, tree_tensors
from equipoise.adjoints import Implicit
from equipoise.diagnostics import audit_gradient, memory_report, spectral_radius
from equipoise.diagnostics.resolutions import resolution_curves
from equipoise.penalties import jacobian_penalty
from equipoise.solvers import Ladder, Solver, as_solver, named_solver
from equipoise.solvers._hyper_file import PREFIX
from equipoise.tasks.base import forward_of
from equipoise.train.checkpoint import check_writable
from equipoise.train.load import TrainedRun, open_run, require_equilibrium
from equipoise.train.pareto import LEARNED
from equipoise.train.recipe import Recipe
from equipoise.train.tracking import environment, write_json

DEPTHS = (1, 2, 4, 8, 16, 30)
SOLVERS = ("picard", "anderson", "broyden")
REPEATS = 3
FILE = "inspect.json"
_SYSTEMS = 32  # of each batch, whose spectral radius is taken: it needs many products with the Jacobian
_MOST_CARRIED = 16  # batches before the one that is measured
_TRACE = (30, 60)  # fewest and most steps of a convergence curve
# Tighter than any plan of training, in float64, and given up in reasonable time where there is nothing to be found.
_TRUTH = Stop(rtol=1e-6, max_steps=60, plateau=20)


def inspect_run(
    run: str | Path,
    *,
    split: str = "valid",
    batches: int = 2,
    depths: Sequence[int] = DEPTHS,
    data_dir: str | None = None,
    which: str = "best",
    solver: str | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure a trained model in the precision of its training; what does not apply to it is None or empty.

    Solves and stability are looked at on held-out data, the gradient on a training batch, all without dropout; memory
    and time are those of a training step.

    Args:
        run: Folder of a run or of a checkpoint.
        split: A held-out split.
        batches: How many of its batches to solve.
        depths: Layers of the explicit twins whose memory and time are measured beside the model's.
        data_dir: Where data files are.
        which: Of a run: "best" or "latest" checkpoint.
        solver: Name of a solver for the solves on held-out data, instead of the model's; `hyper:PATH` is a learned one.
            Its residuals are followed too, beside those of the usual three. A training step stays as it was.
        force: Take a learned solver of another model too.
        say: Told what is being measured.

    Returns:
        Plain values, as `write_inspection` writes them.
    """
    require_count("inspect", "batches", batches)
    for depth in depths:
        require_count("inspect", "depths", depth)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else ()
    notes: list[str] = []
    with torch.random.fork_rng(devices=devices), _noted(notes):
        torch.manual_seed(0)
        say("loading model and data")
        opened = open_run(run, split, data_dir, which=which)
        by = None if solver is None else _chosen(opened, solver, force)
        measured = _equilibrium(opened, split, batches, by, notes, say) | _training_step(opened, depths, notes, say)
    return {
        "run": str(run),
        "checkpoint": str(opened.folder),
        "split": split,
        "batches": batches,
        "solver": solver,
        "model": opened.config["model"]["name"],
        "parameters": sum(p.numel() for p in opened.model.parameters()),
        "precision": opened.config.get("train", {}).get("precision", "no"),
        "environment": environment(),
        **measured,
        "notes": notes,
    }


def write_inspection(folder: str | Path, record: dict[str, Any]) -> Path:
    """Write a record as `inspect.json` into a folder, whole or not at all; an older one is replaced.

    Args:
        folder: Of the run or of the checkpoint.
        record: What `inspect_run` gave.
    """
    check_writable(folder)
    write_json(Path(folder) / FILE, record)
    return Path(folder) / FILE


@contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Warnings of solves, once each, among the notes of the record."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EquilibriumWarning)
        yield
    for warning in caught:
        if not issubclass(warning.category, EquilibriumWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif str(warning.message) not in notes:
            notes.append(str(warning.message))


class _Chosen(NamedTuple):
    """A solver that was asked for, and what its curve is called."""

    name: str
    solver: Solver


def _chosen(opened: TrainedRun, name: str, force: bool) -> _Chosen:
    require_equilibrium(opened.model, opened.folder, "so there is no solver to set")
    found = named_solver(name, opened.model, force=force)
    return _Chosen(LEARNED if name.startswith(PREFIX) else name, found)


class _Solved(NamedTuple):
    """A solve on held-out data: from where, by what plan, to what."""

    start: Tree
    plan: Plan
    solution: Solution


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[_Solved]]:
    """The solves that a model makes meanwhile, with the states they begin from."""
    found: list[_Solved] = []

    def note(deq: nn.Module, inputs: Any, options: dict[str, Any], solution: Solution) -> None:
        assert isinstance(deq, DEQ)
        given = options.get("z0")
        found.append(_Solved(deq.start(*inputs) if given is None else given, deq.current_plan, solution))

    hooks = [deq.register_forward_hook(note, with_kwargs=True) for deq in deqs_in(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _equilibrium(
    opened: TrainedRun,
    split: str,
    batches: int,
    chosen: _Chosen | None,
    notes: list[str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """What concerns the equilibrium, or nothing and a note."""
    nothing: dict[str, Any] = {"spectral_radius": None, "gradient": None, "convergence": {}, "resolutions": {}}
    nothing["steps"] = None
    if not deqs_in(opened.model):
        notes.append("The model has no equilibrium: only memory and time of a training step were measured.")
        return nothing
    say(f"solving {batches} batches of {split}")
    with nullcontext() if chosen is None else override(opened.model, solver=chosen.solver):
        solved = _solve_batches(opened, split, batches)
    say("spectral radius at the equilibrium")
    radius = torch.cat([_radius(item.solution) for item in solved]).tolist()
    say("gradient against a tight solve")
    gradient = _gradient(opened, notes)
    convergence = {}
    followed = {name: as_solver(name) for name in SOLVERS}
    if chosen is not None:
        followed[chosen.name] = chosen.solver
    for name, solver in followed.items():
        say(f"convergence of {name}")
        convergence[name] = _convergence(solved, solver)
    return {
        "spectral_radius": {"values": radius, "median": statistics.median(radius), "max": max(radius)},
        "gradient": gradient,
        "convergence": convergence,
        "resolutions": _resolutions(solved[0], notes),
        "steps": _steps(solved),
    }


def _radius(solution: Solution) -> Tensor:
    """(at most 32,) spectral radii of the first systems."""
    problem = solution.problem
    assert problem is not None
    if problem.num_systems <= _SYSTEMS or not problem.can_slice:
        return spectral_radius(solution)
    leaves = problem.start(solution.value)
    part = problem.rows(torch.arange(_SYSTEMS, device=leaves[0].device))
    return spectral_radius(part, part.spec.unflatten([leaf[:_SYSTEMS] for leaf in leaves]))


@torch.no_grad()
def _solve_batches(opened: TrainedRun, split: str, batches: int) -> list[_Solved]:
    """The first solves of a split, memory carried from batch to batch."""
    carry, forward = None, forward_of(opened.task, opened.device)
    with opened.autocast(), _watched(opened.model) as solved:
        for batch in islice(opened.splits.held_out[split](), batches):
            carry = forward(opened.model, batch, carry)
    return solved


class _Objective(nn.Module):
    """A model with its training loss on top, and a Jacobian penalty of some weight: what is measured."""

    def __init__(self, model: nn.Module, opened: TrainedRun, penalty: float = 0.0) -> None:
        super().__init__()
        self.model, self.penalty = model, penalty
        # A closure, so that a copy of this module copies the model but not the task and its data.
        self.loss = lambda model, batch, carry: opened.task.training_step(model, batch, carry, 0)[0]["loss"]

    def forward(self, batch: Any, carry: Any) -> Tensor:
        with solutions_of(self.model) as solutions:
            loss: Tensor = self.loss(self.model, batch, carry)
        if self.penalty:
            loss = loss + self.penalty * torch.stack([jacobian_penalty(found) for found, _ in solutions]).mean()
        return loss


def _gradient(opened: TrainedRun, notes: list[str]) -> dict[str, Any]:
    """The gradient by the plan of training, on a training batch, without dropout."""
    model = copy.deepcopy(opened.model)
    for deq in deqs_in(model):
        deq.eval_plan = None
    with opened.autocast():
        audit = audit_gradient(_Objective(model, opened), _training_batch(opened), lambda loss: loss, stop=_TRUTH)
    if not audit.truth_residual <= 10 * _TRUTH.rtol:
        notes.append(
            f"The tight solve of the gradient audit ended at a residual of {audit.truth_residual:.1e}, so the audit "
            "says little; the model may have no equilibrium near by."
        )
    return {**dataclasses.asdict(audit), "text": str(audit)}


@torch.no_grad()
def _convergence(solved: Iterable[_Solved], solver: Solver) -> dict[str, list[float]]:
    """Quantiles over all systems of the residual at each step; the lists end where one is not finite any more."""
    traces = []
    for start, plan, solution in solved:
        assert solution.problem is not None
        steps = min(max(plan.stop.max_steps, _TRACE[0]), _TRACE[1])
        found = solve(
            solution.problem, start, solver, Implicit(), Stop(rtol=0, max_steps=steps, norm=plan.stop.norm), trace=True
        )
        assert found.stats.trace is not None
        traces.append(found.stats.trace[:, :steps].nan_to_num(nan=torch.inf, posinf=torch.inf))  # (N, steps)
    table = torch.cat(traces).double().cpu()
    curves = {}
    for name, q in (("median", 0.5), ("p95", 0.95)):
        curve = torch.quantile(table, q, dim=0, interpolation="nearest")
        finite = int(curve.isfinite().long().cumprod(0).sum())
        curves[name] = curve[:finite].tolist()
    return curves


def _resolutions(first: _Solved, notes: list[str]) -> dict[str, dict[str, list[float]]]:
    """The same for each resolution of an image model, by the solver of the plan, on the first batch."""
    problem = first.solution.problem
    assert problem is not None
    if len(problem.spec.shapes) < 2:
        return {}
    if isinstance(first.plan.solver, Ladder):
        notes.append("A Ladder keeps no iterates, so residuals of each resolution were not followed.")
        return {}
    steps = min(max(first.plan.stop.max_steps, _TRACE[0]), _TRACE[1])
    return resolution_curves(problem, first.start, first.plan.solver, steps)


def _steps(solved: Sequence[_Solved]) -> dict[str, Any]:
    """Steps that each system needed by the plan of evaluations, and how the solves ended."""
    stop = solved[0].plan.stop
    status = torch.cat([item.solution.stats.status.reshape(-1).cpu() for item in solved])
    residual = torch.cat([item.solution.stats.residual.reshape(-1).double().cpu() for item in solved])
    counts = {kind: int((status == kind).sum()) for kind in Status}
    present = {kind.name.lower(): count for kind, count in counts.items() if count}
    return {
        "rtol": stop.rtol,
        "max_steps": stop.max_steps,
        "solver": type(solved[0].plan.solver).__name__,
        "values": torch.cat([item.solution.stats.steps.reshape(-1).cpu() for item in solved]).tolist(),
        "statuses": present,
        "sentences": {name: Status[name.upper()].message for name in present},
        "residual": {"median": float(residual.median()), "max": float(residual.max())},
    }


def _training_step(
    opened: TrainedRun, depths: Sequence[int], notes: list[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Memory and time of a training step of the model, and of its explicit twins."""
    model, equilibrium = opened.model, bool(deqs_in(opened.model))
    if equilibrium and not hasattr(model, "explicit"):
        notes.append(f"{type(model).__name__} has no explicit twin (explicit(depth)) to compare memory and time with.")
    cases: dict[str, tuple[int | None, float]] = {"DEQ" if equilibrium else opened.config["model"]["name"]: (None, 0.0)}
    weight = _penalty_weight(opened) if equilibrium else 0.0
    if weight:
        cases["DEQ, penalty"] = (None, weight)  # a step on which it is drawn keeps what second derivatives need too
    if equilibrium and hasattr(model, "explicit"):
        cases |= {f"{depth} layer{'s' if depth > 1 else ''}": (depth, 0.0) for depth in depths}
    batch, carry = _training_batch(opened)
    memory, times = [], []
    for name, (depth, penalty) in cases.items():
        say(f"memory and time of a training step: {name}")
        network: Any = model if depth is None else model.explicit(depth)  # type: ignore[operator]
        objective = _Objective(network, opened, penalty).train()
        try:
            with opened.autocast():
                report = memory_report(objective, (batch, carry), lambda loss: loss)
            seconds = _time(objective, batch, carry, opened)
        except torch.OutOfMemoryError:
            notes.append(f"A training step of {name} does not fit into the memory of the device.")
            continue
        parts = {part: getattr(report, part) for part in ("graph", "history", "parameters", "gradients", "peak")}
        memory.append({"name": name, "depth": depth, **parts})
        times.append({"name": name, "depth": depth, **seconds})
    model.eval()
    return {"memory": memory, "time": times}


def _penalty_weight(opened: TrainedRun) -> float:
    """The weight of the Jacobian penalty at the end of training; 0 if there was none."""
    recipe = Recipe.from_data(opened.config, str(opened.folder / "config.json"))
    sure = dataclasses.replace(recipe.penalty, probability=1.0, stop=None)
    return sure.weight_at(recipe.train.seed, max(recipe.train.steps - 1, recipe.warmup.steps), recipe.warmup.steps)


@torch.no_grad()
def _training_batch(opened: TrainedRun) -> tuple[Any, Any]:
    """A training batch, with what is carried over from those before it: enough of them to fill the memory."""
    # With accumulation a step goes share by share, so that memory is that of one.
    shares = opened.config.get("train", {}).get("accumulation", 1)
    splits = opened.splits if shares == 1 else opened.task.share(0, shares).data()
    carry: Any = None
    sizes: list[torch.Size] = []
    for position in range(_MOST_CARRIED):
        with opened.autocast():
            carry = opened.task.training_step(opened.model, splits.train(position).to(opened.device), carry, 0)[1]
        before, sizes = sizes, [tensor.shape for tensor in tree_tensors(carry)]
        if sizes == before:
            break
    return splits.train(position + 1).to(opened.device), carry


def _time(objective: nn.Module, batch: Any, carry: Any, opened: TrainedRun) -> dict[str, float]:
    """Median seconds of the forward and of the backward pass; the measurement of memory was the warm-up."""

    def clock() -> float:
        if opened.device.type == "cuda":
            torch.cuda.synchronize(opened.device)
        return time.perf_counter()

    forward, backward = [], []
    for _ in range(REPEATS):
        started = clock()
        with opened.autocast():
            loss = objective(batch, carry)
        middle = clock()
        loss.backward()
        forward.append(middle - started)
        backward.append(clock() - middle)
        objective.zero_grad(set_to_none=True)
    return {"forward": statistics.median(forward), "backward": statistics.median(backward)}
