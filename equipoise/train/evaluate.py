"""Scoring a finished run, at one or several settings of its solver."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from equipoise._errors import require_count, unknown_name
from equipoise._module import Plan, deqs_in, override
from equipoise.solvers import Anderson, Ladder, Solver, named_solver
from equipoise.solvers._hyper_file import check_solver
from equipoise.train.load import TrainedRun, open_run, require_equilibrium
from equipoise.train.loop import evaluate
from equipoise.train.tracking import StatsWindow, environment, write_json

SOLVED = 5e-2  # 95th percentile of relative residuals up to which a number is called an equilibrium's
AGREEMENT = 1e-2  # relative difference of the metric up to which two solves are said to give the same
PARTS = ("stop", "solver")
BUDGET = "stop.max_steps"


@dataclass(frozen=True)
class Sweep:
    """A setting of the solve, and the values to score at.

    Attributes:
        part: "stop" or "solver".
        name: A field of it.
        values: In the order of scoring.
    """

    part: str
    name: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise unknown_name("part of a sweep", self.part, PARTS)
        if not self.values:
            raise ValueError(f"sweep: {self.key} has no values.")
        if self.key == BUDGET:
            for value in self.values:
                require_count("sweep", BUDGET, value)

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """A sweep from `stop.max_steps=1:20`, `stop.max_steps=1:20:3` (ends included) or `stop.rtol=1e-1,1e-2`."""
        key, equals, values = text.partition("=")
        part, dot, name = key.strip().partition(".")
        if not (equals and dot and name):
            raise ValueError(f"sweep {text!r} is not of the form part.setting=values, e.g. {BUDGET}=1:20.")
        return cls(part, name, tuple(_values(values, text)))

    @property
    def key(self) -> str:
        """Its name with the part it belongs to."""
        return f"{self.part}.{self.name}"

    def change(self, plan: Plan, value: Any) -> dict[str, Any]:
        """The changed part of a plan."""
        own = getattr(plan, self.part)
        if isinstance(own, nn.Module):
            raise ValueError(f"sweep: {self.key} cannot be varied: a {type(own).__name__} is fitted as it is.")
        known = [field.name for field in dataclasses.fields(own) if field.init]
        if self.name not in known:
            raise unknown_name(f"setting of {type(own).__name__}", self.name, known)
        changed = own.with_budget(value) if self.key == BUDGET else dataclasses.replace(own, **{self.name: value})
        return {self.part: changed}


def _values(text: str, whole: str) -> Iterator[int | float]:
    """Numbers of a list of numbers and ranges."""
    for item in text.split(","):
        bounds = item.split(":")
        try:
            if len(bounds) == 1:
                yield _number(item)
                continue
            first, last, step = (int(bound) for bound in (*bounds, "1")[:3])
        except ValueError as error:
            raise ValueError(
                f"sweep {whole!r}: {item!r} is neither a number nor a range; write 5, 1:20, 1:20:3 or 2,5,10."
            ) from error
        if len(bounds) > 3 or step < 1:
            raise ValueError(f"sweep {whole!r}: {item!r} is not a range first:last or first:last:step with step > 0.")
        if last < first:
            raise ValueError(f"sweep {whole!r}: {item!r} ends before it begins; write {last}:{first}.")
        yield from range(first, last + 1, step)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def score_run(
    run: str | Path,
    split: str = "valid",
    steps: Sequence[int] | None = None,
    data_dir: str | None = None,
    *,
    sweep: Sweep | None = None,
    solver: str | None = None,
    force: bool = False,
    guard: bool = False,
    which: str = "best",
    changes: Sequence[str] = (),
    opened: TrainedRun | None = None,
) -> dict[str, Any]:
    """Score a trained model on a split, in the precision of its training, and say whether it is an equilibrium's score.

    Args:
        run: Folder of a run or of a checkpoint.
        split: Name of a held-out split.
        steps: Step budgets of the solver; None for the model's own stop rule.
        data_dir: Where data files are.
        sweep: Another setting to vary, instead of `steps`.
        solver: Name of a solver to use instead of the model's; `hyper:PATH` is a learned one.
        force: Take a learned solver of another model too.
        guard: Hand systems that the solver leaves unsolved to Anderson.
        which: Of a run: "best" or "latest" checkpoint.
        changes: Of the task's settings, e.g. `task.eval_batch_size=1`.
        opened: The run, if it has been loaded already.

    Returns:
        A record: what was scored (`run`, `checkpoint`, `split`, `metric`, `solver`, the name by which it was `asked`
        for and whether it is the model's own, `own_solver`, `guard`, `sweep`, `changes`), `results` with for each point
        the metrics, the residuals and evaluations (`solve`) and `seconds`, `warnings`, and the environment.
    """
    if steps and sweep:
        raise ValueError(f"steps are a sweep of {BUDGET}; give either them or the sweep of {sweep.key}.")
    if steps:
        sweep = Sweep("stop", "max_steps", tuple(steps))
    if solver is not None:  # before data and model are read
        check_solver(solver)
    opened = opened or open_run(run, split, data_dir, which=which, changes=changes)
    if sweep or solver or guard:
        require_equilibrium(opened.model, opened.folder, "so there is no step budget or solver to set")
    if sweep and sweep.part == "solver" and guard:
        raise ValueError(
            f"sweep: {sweep.key} cannot be varied with a guard, which is a solver of two stages; leave out one of them."
        )
    opened.task.metrics()  # imports what the first score would else be charged for
    by = chosen_solver(opened.model, solver, force=force, guard=guard)
    own = by is None or by == plan_of(opened.model).solver
    with override(opened.model, solver=by) if by is not None else contextlib.nullcontext():
        results = [_point(opened, split, sweep, value) for value in _shown(sweep.values if sweep else (None,))]
        used = _solver_used(opened.model)
    return {
        "run": str(run),
        "checkpoint": str(opened.folder),
        "split": split,
        "metric": opened.task.score,
        "solver": used,
        "asked": solver,
        "own_solver": own,
        "guard": guard,
        "sweep": sweep.key if sweep else None,
        "changes": list(changes),
        "results": results,
        "warnings": doubts(results, opened.task.score, sweep.key if sweep else None),
        "data": opened.splits.info,
        "environment": environment(),
    }


def scored_as_it_is(record: Mapping[str, Any], model: nn.Module) -> bool:
    """Whether a record of `score_run` is of a model's own solver and settings; budgets of steps may be others.

    Args:
        record: What was written.
        model: The one that was scored.
    """
    return by_own_solver(record) and record.get("solver") == _solver_used(model)


def by_own_solver(record: Mapping[str, Any]) -> bool:
    """The same, as far as can be told without the model: older records tell kinds of solvers apart, no more."""
    as_set = record.get("sweep") in (None, BUDGET) and not record.get("changes")
    return as_set and bool(record.get("own_solver", not record.get("guard")))


def chosen_solver(model: nn.Module, name: str | None, *, force: bool = False, guard: bool = False) -> Solver | None:
    """The solver that options ask for; None to leave the model its own.

    Args:
        model: What it is to solve for; it has equilibria.
        name: A registered name or `hyper:PATH`; None for the model's own solver in evaluations.
        force: Take a learned solver of another model too.
        guard: Hand systems that it leaves unsolved to Anderson.
    """
    found = None if name is None else named_solver(name, model, force=force)
    if not guard:
        return found
    first = plan_of(model).solver if found is None else found
    if isinstance(first, Ladder):
        raise ValueError(
            "guard: a Ladder hands on what it leaves unsolved already; leave out --guard, or give another solver, e.g. "
            "--solver hyper:RUN."
        )
    if found is None and isinstance(first, Anderson):
        raise ValueError(
            "guard: the model's own solver is Anderson already, and would hand on to itself; leave out --guard, or "
            "give the solver to be guarded, e.g. --solver hyper:RUN."
        )
    return Ladder((first, Anderson()))


def _solver_used(model: nn.Module) -> str | None:
    """The kind of solver in evaluations of a model, of a guarded one with its stages; None without equilibria."""
    if not deqs_in(model):
        return None
    solver = plan_of(model).solver
    stages = solver.stages if isinstance(solver, Ladder) else ()
    name = type(solver).__name__
    return f"{name} ({', '.join(type(stage).__name__ for stage in stages)})" if stages else name


def _shown(values: Sequence[Any]) -> Sequence[Any]:
    """The values, with a progress bar for a person at a terminal if there are several."""
    from tqdm import tqdm

    return values if len(values) < 2 else tqdm(values, disable=None, unit="score", leave=False)  # type: ignore[return-value]


def plan_of(model: nn.Module) -> Plan:
    """The plan of evaluations of a model with equilibria."""
    deq = next(iter(deqs_in(model)))
    return deq.eval_plan or deq.plan


def _point(opened: TrainedRun, split: str, sweep: Sweep | None, value: Any) -> dict[str, Any]:
    budget = value if sweep is not None and sweep.key == BUDGET else None
    point = {"steps": budget} if sweep is None or budget is not None else {"steps": None, sweep.key: value}
    return {**point, **score(opened, split, **(sweep.change(plan_of(opened.model), value) if sweep else {}))}


def score(opened: TrainedRun, split: str, **changes: Any) -> dict[str, Any]:
    """Metrics of a loaded run on a split, with the residuals and evaluations (`solve`) and `seconds` they took.

    Args:
        opened: The run.
        split: Name of a held-out split.
        **changes: Of the plan of evaluations, e.g. `stop=Stop(...)`.
    """
    window, started = StatsWindow(), time.perf_counter()
    with override(opened.model, **changes) if changes else contextlib.nullcontext(), opened.autocast():
        metrics = evaluate(opened.task, opened.model, opened.splits, split, opened.device, window, progress=True)
    return {**metrics, "solve": window.summary(), "seconds": time.perf_counter() - started}


def doubts(results: Sequence[dict[str, Any]], metric: str, key: str | None = None) -> list[str]:
    """Sentences on results that are not an equilibrium's.

    Such a one has residuals above 5e-2 (95th percentile), or a metric more than 1 % off that of the best solve. Of an
    error, the share of what is wrong, 1 % of everything is meant: the same few images weigh more in a small error.

    Args:
        results: Of `score_run`.
        metric: By which results are compared.
        key: The setting that was varied.
    """
    solved = [result for result in results if result["solve"]]
    said = []
    rough = [result for result in solved if not result["solve"]["residual_p95"] <= SOLVED]
    if rough:
        worst = max(result["solve"]["residual_p95"] for result in rough)
        said.append(
            f"{_at(rough, key)}the relative residual (95th percentile) is up to {worst:.1e}, above {SOLVED:g}: this is "
            "the number of a network of so many steps, not an equilibrium's."
        )
    best = min(solved, key=lambda result: result["solve"]["residual_p95"], default=None)
    if best is None or len(solved) < 2:
        return said
    share = metric.endswith("error")
    most = AGREEMENT * (1.0 if share else abs(best[metric]))
    off = [result for result in solved if not abs(result[metric] - best[metric]) <= most]
    if off:
        farthest = max(off, key=lambda result: abs(result[metric] - best[metric]))
        said.append(
            f"{_at(off, key)}{metric} is up to {_apart(farthest[metric], best[metric], share)} off that of the best "
            f"solve ({farthest[metric]:.6g} beside {best[metric]:.6g}): a number that changes with the solve is not an "
            "equilibrium's."
        )
    return said


def _apart(value: float, best: float, share: bool) -> str:
    """How far two values of a metric are apart: shares in points, others relative to the best, if that is not 0."""
    if share:
        return f"{100 * abs(value - best):.3g} points"
    return f"{abs(value / best - 1):.1%}" if best else f"{abs(value - best):.3g}"


def _at(results: Sequence[dict[str, Any]], key: str | None) -> str:
    if key is None:
        return ""
    name = "steps" if key == BUDGET else key
    return f"at {key} = {', '.join(f'{result[name]:g}' for result in results)} "


def write_scores(folder: str | Path, record: dict[str, Any]) -> Path:
    """Write a record of `score_run` as a new file `eval/<split>-<time>.json` in a folder; nothing is overwritten.

    Args:
        folder: Of the run.
        record: What to write.
    """
    place = Path(folder) / "eval"
    place.mkdir(exist_ok=True)
    stem = f"{record['split']}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    path = next(path for path in (place / f"{name}.json" for name in names) if not path.exists())
    write_json(path, record)
    return path
