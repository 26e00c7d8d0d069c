"""Metric against time per batch, for several solvers and numbers of steps, and the speed-up at an equal metric."""

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from equipoise._errors import require_count, unknown_name
from equipoise._module import DEQ, override, solutions_of
from equipoise._stop import Stop
from equipoise.bench.harness import in_turns
from equipoise.solvers import Solver, as_solver, named_solver
from equipoise.solvers._hyper_file import PREFIX
from equipoise.tasks._hyper_losses import Forward, call_model, evaluating
from equipoise.tasks.hyper import forward_of
from equipoise.train.load import TrainedRun, open_run
from equipoise.train.loop import evaluate
from equipoise.train.tracking import StatsWindow, environment, write_json

if TYPE_CHECKING:
    from equipoise.bench.harness import Sample

FILE = "pareto.json"
LEARNED = "hyper"
TOLERANCE = 5e-3  # a metric so much worse still counts as equal

Score = Callable[[nn.Module, Sequence[Any]], Mapping[str, float]]
"""Metrics of a model on batches."""


def pareto(
    model: nn.Module,
    batches: Iterable[Any],
    solvers: Mapping[str, Solver | str | Sequence[Solver]],
    budgets: Sequence[int],
    *,
    score: Score,
    metric: str,
    better: str = "lower",
    reference: str | None = None,
    at: int | None = None,
    forward: Forward | None = None,
    others: Mapping[str, nn.Module] | None = None,
    select: str = "last",
    warmup: int = 20,
    rounds: int = 30,
) -> dict[str, Any]:
    """Measure how good a model is, and how long a batch takes, with each solver after each number of steps.

    All is done in eval mode by the engine the model has. Candidates are timed in turns, each by its median, the device
    idle before and after.

    Args:
        model: A DEQ, or a module that contains some.
        batches: Held-out data, on the model's device; the metric is that of all of them, the time that of the second.
        solvers: By name; several solvers under one name are seeds of one kind.
        budgets: Numbers of steps.
        score: Metrics of the model on the batches.
        metric: Which of them counts.
        better: Whether a "lower" or a "higher" one is better.
        reference: The solver that speed-ups are over; the first by default.
        at: The number of steps after which its metric is the one to reach; the most by default.
        forward: How to run the model on a batch; by default it is called with it.
        others: Models to put beside it as single points, e.g. an explicit network, scored and timed alike.
        select: Which iterate is taken: the "last", after exactly so many evaluations, or the "best" one measured.
        warmup: Calls before the timing.
        rounds: Timed calls.

    Returns:
        Plain values: `points` with solver, seed, steps, metric, milliseconds and residual; `speedup` by solver.
    """
    chosen = {name: _as_seeds(given) for name, given in solvers.items()}
    reference, at = reference or next(iter(chosen)), at or max(budgets)
    _check(model, chosen, budgets, reference, at, better)
    batches = list(batches)
    points: list[dict[str, Any]] = []
    with _evaluating(model):
        for steps in budgets:
            stop = Stop(rtol=0.0, atol=0.0, max_steps=steps, select=select)
            entries = [(name, seed, solver) for name, seeds in chosen.items() for seed, solver in enumerate(seeds)]
            works = {f"{n}/{i}": _work(model, batches, forward, solver=s, stop=stop) for n, i, s in entries}
            times = _times(works, model, warmup, rounds)
            for name, seed, solver in entries:
                with override(model, solver=solver, stop=stop):
                    measured = _measured(model, batches, score, metric, times[f"{name}/{seed}"])
                points.append({"solver": name, "seed": seed, "steps": steps, **measured})
    for name, other in (others or {}).items():
        with _evaluating(other):
            times = _times({name: _work(other, batches, forward)}, other, warmup, rounds)
            measured = _measured(other, batches, score, metric, times[name])
        points.append({"solver": name, "seed": 0, "steps": None, **measured})
    record = {"metric": metric, "better": better, "reference": reference, "at": at, "select": select, "points": points}
    return {**record, "speedup": speedups(record), "ahead": steps_ahead(record), "environment": environment()}


def _as_seeds(given: Solver | str | Sequence[Solver]) -> list[Solver]:
    return [as_solver(given)] if isinstance(given, Solver | str) else [as_solver(one) for one in given]


def _check(
    model: nn.Module, solvers: Mapping[str, Any], budgets: Sequence[int], reference: str, at: int, better: str
) -> None:
    if better not in ("lower", "higher"):
        raise unknown_name("kind of metric", better, ("lower", "higher"))
    if reference not in solvers:
        raise unknown_name("reference", reference, solvers)
    for steps in budgets:
        require_count("pareto", "budgets", steps)
    if at not in budgets:
        raise ValueError(f"pareto: at={at} is not among the budgets {', '.join(map(str, budgets))}.")
    if not any(isinstance(module, DEQ) for module in model.modules()):
        raise ValueError(f"pareto: {type(model).__name__} contains no DEQ, so there is no solver to vary.")


# Measuring


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    with evaluating(model), torch.no_grad():
        yield


def _work(model: nn.Module, batches: list[Any], forward: Forward | None, **changes: Any) -> Callable[[], Any]:
    """One batch, the second if there are two: it has a past, if batches have."""
    run = forward or call_model

    def changed() -> contextlib.AbstractContextManager[Any]:
        return override(model, **changes) if changes else contextlib.nullcontext()

    with changed():
        carry = run(model, batches[0], None) if len(batches) > 1 else None
    batch = batches[min(1, len(batches) - 1)]

    def work() -> Any:
        with changed():
            return run(model, batch, carry)

    return work


def _times(works: Mapping[str, Callable[[], Any]], model: nn.Module, warmup: int, rounds: int) -> "dict[str, Sample]":
    for work in works.values():
        for _ in range(warmup):
            work()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return in_turns(works, device, rounds)


def _measured(model: nn.Module, batches: list[Any], score: Score, metric: str, time: "Sample") -> dict[str, Any]:
    window = StatsWindow()
    with solutions_of(model) as solutions:
        metrics = dict(score(model, batches))
    if metric not in metrics:
        raise unknown_name("metric", metric, metrics)
    for solution, used in solutions:
        window.add(solution.stats, used.stop)
    residual = window.summary().get("residual_p50")
    quartiles = {"ms_low": 1e3 * time.low, "ms_high": 1e3 * time.high}
    return {"metric": float(metrics[metric]), "ms": 1e3 * time.median, **quartiles, "residual": residual}


# Conclusions


def curves(record: Mapping[str, Any]) -> dict[str, list[list[dict[str, Any]]]]:
    """The points of each solver by seed, by number of steps; single points of other models are left out."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for point in record["points"]:
        if point["steps"] is not None:
            found.setdefault(point["solver"], {}).setdefault(point["seed"], []).append(point)
    return {
        name: [sorted(seeds[seed], key=lambda point: point["steps"]) for seed in sorted(seeds)]
        for name, seeds in found.items()
    }


def time_to_reach(curve: Sequence[Mapping[str, Any]], target: float, better: str = "lower") -> float | None:
    """Milliseconds at which a curve first reaches a metric, by linear interpolation; None if it does not.

    Args:
        curve: Points by number of steps, with `metric` and `ms`.
        target: The metric to reach.
        better: Whether "lower" or "higher" is better.
    """
    sign = 1.0 if better == "lower" else -1.0
    before: Mapping[str, Any] | None = None
    for point in curve:
        if sign * point["metric"] <= sign * target:
            if before is None:
                return float(point["ms"])
            share = (before["metric"] - target) / (before["metric"] - point["metric"])
            return float(before["ms"] + share * (point["ms"] - before["ms"]))
        before = point
    return None


def speedups(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """How much sooner each solver reaches the metric that the reference has after `at` steps, within half a percent.

    `values` has a ratio for each seed, None where the metric is not reached: the time the reference needs for that
    metric, over the seed's. It may need fewer than `at` steps; `over_budget` is over its time for all of them.
    """
    found, better = curves(record), record["better"]
    own = found[record["reference"]][0]
    end = next(point for point in own if point["steps"] == record["at"])
    slack = TOLERANCE * abs(end["metric"])
    target = end["metric"] + (slack if better == "lower" else -slack)
    needed = time_to_reach(own, target, better)
    said: dict[str, dict[str, Any]] = {}
    for name, seeds in found.items():
        times = [time_to_reach(seed, target, better) for seed in seeds]
        values = [None if time is None or needed is None else needed / time for time in times]
        over = [None if time is None else end["ms"] / time for time in times]
        said[name] = {"target": target, "values": values, "mean": _mean(values), "over_budget": _mean(over)}
    return said


def steps_ahead(record: Mapping[str, Any]) -> dict[str, list[int]]:
    """The numbers of steps after which the mean metric of each solver is no worse than the reference's."""
    sign = 1.0 if record["better"] == "lower" else -1.0
    means = {name: _by_steps(seeds) for name, seeds in curves(record).items()}
    own = means[record["reference"]]
    return {
        name: [steps for steps, value in values.items() if sign * value <= sign * own[steps]]
        for name, values in means.items()
        if name != record["reference"]
    }


def _by_steps(seeds: Sequence[Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    grouped: dict[int, list[float]] = {}
    for point in (point for seed in seeds for point in seed):
        grouped.setdefault(point["steps"], []).append(point["metric"])
    return {steps: statistics.fmean(values) for steps, values in grouped.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


# Of a run


def pareto_run(
    run: str | Path,
    solvers: Sequence[str],
    budgets: Sequence[int],
    *,
    split: str = "valid",
    data_dir: str | None = None,
    which: str = "best",
    at: int | None = None,
    explicit: int | None = None,
    most: int | None = None,
    force: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Measure a run's model by the protocol of `pareto`, and write RUN/pareto.json.

    Args:
        run: Folder of a run or of a checkpoint.
        solvers: Names; all `hyper:PATH` among them are seeds of one kind. The first is the reference.
        budgets: Numbers of steps.
        split: Held-out data.
        data_dir: Where data files are.
        which: Of a run: "best" or "latest" checkpoint.
        at: See `pareto`.
        explicit: Depth of the weight-tied explicit network to put beside it; None for none.
        most: Batches to score on; None for all.
        force: Take learned solvers of other models too.
        **options: Of `pareto`.
    """
    opened = open_run(run, split, data_dir, which=which)
    chosen: dict[str, Any] = {}
    for name in solvers:
        made = named_solver(name, opened.model, force=force)
        chosen.setdefault(LEARNED if name.startswith(PREFIX) else name, []).append(made)
    others = {} if explicit is None else {f"{explicit} layers": opened.model.explicit(explicit)}  # type: ignore[operator]
    measured = pareto_opened(opened, chosen, budgets, split=split, most=most, others=others, at=at, **options)
    record = {"run": str(run), **measured}
    write_json(Path(run) / FILE, record)
    return record


def pareto_opened(
    opened: TrainedRun,
    solvers: Mapping[str, Solver | str | Sequence[Solver]],
    budgets: Sequence[int],
    *,
    split: str = "valid",
    most: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure a run's model by the protocol of `pareto`.

    Args:
        opened: The run.
        solvers: By name; see `pareto`.
        budgets: Numbers of steps.
        split: Held-out data.
        most: Batches to score on; None for all.
        **options: Of `pareto`.
    """
    task, device = opened.task, opened.device

    def score(model: nn.Module, batches: Sequence[Any]) -> dict[str, float]:
        return evaluate(task, model, opened.splits, split, device, most=most)

    passes = iter(opened.splits.held_out[split]())
    batches = [batch.to(device) for _, batch in zip(range(2), passes, strict=False)]
    options = {"metric": task.score, "score": score, "forward": forward_of(opened), **options}
    with opened.autocast():
        record = pareto(opened.model, batches, solvers, budgets, **options)
    return {"checkpoint": str(opened.folder), "split": split, **record}
