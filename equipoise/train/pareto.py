"""Metric against time per batch, for several solvers and numbers of steps: how it is measured."""

import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise._errors import by_name, require_count, unknown_name
from equipoise._forward import CapturedForward
from equipoise._modes import evaluating
from equipoise._module import deqs_in, override
from equipoise._solution import Solution
from equipoise._stop import Stop
from equipoise.bench.harness import Sample, in_turns
from equipoise.nn.frozen import frozen
from equipoise.solvers import Solver, as_solver, named_solver
from equipoise.solvers._hyper_file import PREFIX
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks.base import Forward, call_model, forward_of
from equipoise.train.config import to_data
from equipoise.train.load import (
    TrainedRun,
    find_checkpoint,
    home_of,
    load,
    open_run,
    read_config,
    require_equilibrium,
)
from equipoise.train.pareto_curves import conclusions, curves, mean_curve
from equipoise.train.scoring import Scoring
from equipoise.train.tracking import StatsWindow, environment, plain, put_aside, write_json

FILE = "pareto.json"
LEARNED = "hyper"
FEWEST_CALLS = 2  # before the timing: a shape is recorded when it comes again
MOST_RECORDINGS = 8  # calls after those, until one records nothing
OF_DATA = ("name", "data", "corpus", "tokens")  # settings of a task by which runs have the same data
OF_SIZE = ("num_classes", "in_channels", "vocab_size")  # likewise of a model
IN_A_ROW = 8  # batches that a device is given at once, as they come in use: the host prepares the next one meanwhile

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
    rounds: int = 40,
    each: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure how good a model is, and how long a batch takes, with each solver after each number of steps.

    All is done in eval mode. Every candidate is scored first, so that all has been run many times before it is timed.
    Then candidates are timed in turns, each by its median and its mean, the device idle before and after: the whole of
    `forward` as one CUDA graph where that can be (`CapturedForward`), elsewhere with solves by the engine the model
    has. A device gets several batches in a row, so that its time counts and not the host's; that of a batch alone is
    taken too.
    Learned solvers that differ in nothing but weights take turns in one recording, and share its time: they do the
    same work.

    Args:
        model: A DEQ, or a module that contains some.
        batches: Held-out data, on the model's device; the metric is that of all of them, the time that of the second.
        solvers: By name; several solvers under one name are seeds of one kind.
        budgets: Numbers of steps.
        score: Metrics of the model on the batches; a `Scoring` takes the residuals down itself.
        metric: Which of them counts.
        better: Whether a "lower" or a "higher" one is better.
        reference: The solver that speed-ups are over; the first by default.
        at: The number of steps after which its metric is the one to reach; the most by default. It is measured first.
        forward: How to run the model on a batch; by default it is called with it. This is what is timed.
        others: Models to put beside it as single points, e.g. an explicit network, scored and timed alike.
        select: Which iterate is taken: the "last", after exactly so many evaluations, or the "best" one measured.
        warmup: Calls before the timing, besides those of the scoring.
        rounds: Times that each is timed, at most.
        each: Gets the record after each number of steps, as far as it goes, e.g. to write it.

    Returns:
        Plain values: `points` with solver, seed, steps, metric, loss, milliseconds per batch (`ms`, the median;
        `ms_mean`; `ms_alone`), the residual, the `engine` that was timed ("graph", "captured", "eager" or "mixed") and
        why it was not one graph (`no_graph`); `missing`, the numbers of steps that are still to be measured; `speedup`
        by solver; `noise`, why times are doubtful, if they are.
    """
    kinds = [kind for name, given in solvers.items() for kind in _kinds(name, given, model)]
    reference, at = reference or next(iter(solvers)), max(budgets) if at is None else at
    _check(model, solvers, budgets, reference, at, better, others or ())
    bench = _Bench(list(batches), score, metric, forward, warmup, rounds)
    head = {"metric": metric, "better": better, "reference": reference, "at": at, "select": select}
    where = environment()
    beside = [bench.beside(name, other) for name, other in (others or {}).items()]
    found: dict[int, list[dict[str, Any]]] = {}
    record: dict[str, Any] = {}
    for steps in dict.fromkeys((at, *sorted(budgets))):
        stop = Stop(rtol=0.0, atol=0.0, max_steps=steps, select=select)  # type: ignore[arg-type]
        found[steps] = [{"steps": steps, **point} for point in bench.points(model, kinds, stop)]
        points = [point for done in sorted(found) for point in found[done]]
        record = {**head, "missing": sorted({*budgets} - {*found}), "points": [*points, *beside]}
        record |= {**conclusions(record), "environment": where}
        if each is not None:
            each(record)
    return record


def _check(
    model: nn.Module,
    solvers: Mapping[str, Any],
    budgets: Sequence[int],
    reference: str,
    at: int,
    better: str,
    others: Iterable[str],
) -> None:
    if better not in ("lower", "higher"):
        raise unknown_name("kind of metric", better, ("lower", "higher"))
    if reference not in solvers:
        raise unknown_name("reference", reference, solvers)
    for steps in budgets:
        require_count("pareto", "budgets", steps)
    if at not in budgets:
        raise ValueError(f"pareto: at={at} is not among the budgets {', '.join(map(str, budgets))}.")
    for name in others:
        if name in solvers:
            raise ValueError(f"pareto: a run beside it is called {name!r}, as a solver that is measured is; rename it.")
    if not deqs_in(model):
        raise ValueError(f"pareto: {type(model).__name__} contains no DEQ, so there is no solver to vary.")


# Measuring


@dataclass(frozen=True)
class _Kind:
    """Solvers of one name that differ in nothing but weights, so that one recording serves them all.

    Attributes:
        name: Of the solvers.
        seeds: The solvers, by number.
        worn: The one that is used; it takes over the weights of the others.
    """

    name: str
    seeds: dict[int, Solver]
    worn: Solver

    def wear(self, seed: int) -> None:
        """Have the weights of a solver, where the old ones were."""
        if isinstance(self.worn, nn.Module):
            self.worn.load_state_dict(self.seeds[seed].state_dict())  # type: ignore[attr-defined]


def _kinds(name: str, given: Solver | str | Sequence[Solver | str], model: nn.Module) -> list[_Kind]:
    several = [given] if isinstance(given, Solver | str) else given
    solvers = [named_solver(one, model) if isinstance(one, str) else as_solver(one) for one in several]
    groups: dict[Any, dict[int, Solver]] = {}
    for seed, solver in enumerate(solvers):
        like = (solver.config, _form(solver)) if isinstance(solver, HyperAnderson) else seed
        groups.setdefault(like, {})[seed] = solver
    made = []
    for seeds in groups.values():
        first = next(iter(seeds.values()))
        made.append(_Kind(name, seeds, _worn(first) if isinstance(first, HyperAnderson) else first))
    return made


def _worn(solver: HyperAnderson) -> HyperAnderson:
    """A copy to be used; its first guess is as little work as the frozen model's."""
    twin = copy.deepcopy(solver)
    if twin.initialiser is not None:
        twin.initialiser = frozen(twin.initialiser)
    return twin


def _form(solver: HyperAnderson) -> tuple[Any, ...]:
    return tuple((name, value.shape, value.dtype, value.device) for name, value in solver.state_dict().items())


Entered = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Bench:
    """Scores and times; see `pareto` for what it consists of."""

    batches: list[Any]
    score: Score
    metric: str
    forward: Forward | None
    warmup: int
    rounds: int

    def points(self, model: nn.Module, kinds: Sequence[_Kind], stop: Stop) -> list[dict[str, Any]]:
        """A point for each solver at one number of steps."""
        entered = {place: partial(override, model, solver=kind.worn, stop=stop) for place, kind in enumerate(kinds)}
        found = []
        with evaluating(model), torch.no_grad():
            for place, kind in enumerate(kinds):
                for seed in kind.seeds:
                    kind.wear(seed)
                    with entered[place]():
                        found.append((place, seed, self._scored(model)))
            times = self._times(model, entered)
        order = list(dict.fromkeys(kind.name for kind in kinds))
        found.sort(key=lambda item: (order.index(kinds[item[0]].name), item[1]))
        return [{"solver": kinds[place].name, "seed": seed, **scored, **times[place]} for place, seed, scored in found]

    def beside(self, name: str, model: nn.Module) -> dict[str, Any]:
        """The point of another model."""
        with evaluating(model), torch.no_grad():
            scored, times = self._scored(model), self._times(model, {0: contextlib.nullcontext})
        return {"solver": name, "seed": 0, "steps": None, **scored, **times[0]}

    def _scored(self, model: nn.Module) -> dict[str, Any]:
        metrics, solves = self._metrics(model)
        if self.metric not in metrics:
            raise unknown_name("metric", self.metric, metrics)
        loss = float(metrics["loss"]) if "loss" in metrics else math.nan
        return {"metric": float(metrics[self.metric]), "loss": loss, "residual": solves.get("residual_p50")}

    def _metrics(self, model: nn.Module) -> tuple[dict[str, float], dict[str, Any]]:
        """Metrics, and a summary of the solves."""
        if isinstance(self.score, Scoring):
            return self.score.measured(model)
        window = StatsWindow()

        # Of the statistics alone: solutions of a whole split may be more than the device holds.
        def note(deq: nn.Module, inputs: Any, solution: Solution) -> None:
            window.add(solution.stats)

        hooks = [deq.register_forward_hook(note) for deq in deqs_in(model)]
        try:
            return dict(self.score(model, self.batches)), window.summary()
        finally:
            for hook in hooks:
                hook.remove()

    def _times(self, model: nn.Module, entered: Mapping[int, Entered]) -> dict[int, dict[str, Any]]:
        """Milliseconds of a batch in each of some contexts, in turns; entering one is not timed."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        graphs = CapturedForward(model, partial(self.forward or call_model, model), most=2 * len(entered), warn=False)
        works: dict[int, Callable[[], Any]] = {}
        obstacles: dict[int, str | None] = {}
        for place, enter in entered.items():
            with enter():
                works[place], obstacles[place] = self._work(model, graphs)
        replays, others = dict.fromkeys(entered, 0), dict.fromkeys(entered, 0)

        @contextlib.contextmanager
        def around(place: int) -> Iterator[None]:
            with entered[place]():
                before = _engine_counts(model)
                yield
                after = _engine_counts(model)
            replays[place] += after[0] - before[0]
            others[place] += after[1] - before[1]

        alone = in_turns(works, device, self.rounds, around=around)
        samples = alone
        if device.type == "cuda":
            rows = {place: partial(_repeat, work, IN_A_ROW) for place, work in works.items()}
            samples = in_turns(rows, device, self.rounds, IN_A_ROW, around=around)
        graphs.release()
        found = {}
        for place, sample in samples.items():
            engine = "graph" if obstacles[place] is None else _engine(replays[place], others[place])
            times = {**_milliseconds(sample), "ms_alone": 1e3 * alone[place].median}
            found[place] = {**times, "engine": engine, "no_graph": obstacles[place]}
        return found

    def _work(self, model: nn.Module, graphs: CapturedForward) -> tuple[Callable[[], Any], str | None]:
        """One batch, the second if there are two, since it has a past, if batches have; and why it is not one graph."""
        run = self.forward or call_model
        carry = run(model, self.batches[0], None) if len(self.batches) > 1 else None
        batch = self.batches[min(1, len(self.batches) - 1)]
        work = partial(graphs, batch, carry)
        self._warm_up(model, graphs, work)
        replayed, before = graphs.replayed, graphs.fallbacks.copy()
        work()
        if graphs.replayed > replayed:
            return work, None
        return partial(run, model, batch, carry), next(iter(graphs.fallbacks - before))

    def _warm_up(self, model: nn.Module, graphs: CapturedForward, work: Callable[[], Any]) -> None:
        """Run it some times, and until nothing is recorded any more."""
        for done in range(1, max(self.warmup, FEWEST_CALLS) + MOST_RECORDINGS):
            before = _recorded(model) + graphs.recorded
            work()
            if done >= max(self.warmup, FEWEST_CALLS) and _recorded(model) + graphs.recorded == before:
                return


def _recorded(model: nn.Module) -> int:
    return sum(deq.capture.recorded for deq in deqs_in(model))


def _engine_counts(model: nn.Module) -> tuple[int, int]:
    """Solves that were replays, and those that could not be."""
    engines = [deq.capture for deq in deqs_in(model)]
    return sum(engine.replayed for engine in engines), sum(engine.fallbacks.total() for engine in engines)


def _engine(replays: int, others: int) -> str:
    """What solved: "captured", "eager", or some of each."""
    return "eager" if not replays else "mixed" if others else "captured"


def _repeat(work: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        work()


def _milliseconds(sample: Sample) -> dict[str, float]:
    parts = {"ms": sample.median, "ms_mean": sample.mean, "ms_low": sample.low, "ms_high": sample.high}
    return {name: 1e3 * seconds for name, seconds in parts.items()}


# Of a run


def pareto_run(
    run: str | Path,
    solvers: Sequence[str],
    budgets: Sequence[int],
    *,
    split: str = "valid",
    data_dir: str | None = None,
    which: str = "best",
    changes: Sequence[str] = (),
    at: int | None = None,
    explicit: int | None = None,
    beside: Sequence[str | Path] = (),
    most: int | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure a run's model by the protocol of `pareto`, and write RUN/pareto.json, anew after each number of steps.

    An older one by other settings, or on another device, is kept beside it as pareto-<time of its writing>.json.

    Args:
        run: Folder of a run or of a checkpoint.
        solvers: Names; `hyper:PATH` of equal settings are seeds of one kind, and several kinds are called by the ends
            of their paths. The first is the reference.
        budgets: Numbers of steps.
        split: Held-out data.
        data_dir: Where data files are.
        which: Of a run: "best" or "latest" checkpoint.
        changes: Of the task's settings, e.g. `task.eval_batch_size=12` for the batch that is timed.
        at: See `pareto`.
        explicit: Depth of the weight-tied explicit network to put beside it; None for none.
        beside: Runs on the same data, e.g. of an explicit network, to be single points beside the curves.
        most: Batches to score on; None for all.
        force: Take learned solvers of other models too.
        say: Takes a line after each number of steps.
        **options: Of `pareto`.
    """
    opened = open_run(run, split, data_dir, which=which, changes=changes)
    require_equilibrium(opened.model, opened.folder, "so there are no solvers to compare")
    chosen = by_kind({name: named_solver(name, opened.model, force=force) for name in solvers})
    others = {} if explicit is None else {f"{explicit} layers": opened.model.explicit(explicit)}  # type: ignore[operator]
    others |= loaded_beside(opened, beside, data_dir)
    path, head = Path(run) / FILE, {"run": str(run), "changes": list(changes), "solvers": list(solvers)}

    def keep(record: dict[str, Any]) -> None:
        if len(record["missing"]) == len({*budgets}) - 1:  # the first one
            _keep_older(path, {**record, **head}, say)
        write_json(path, {**record, **head})

    options |= {"others": others, "at": at, "each": told(keep, budgets, say)}
    return {**pareto_opened(opened, chosen, budgets, split=split, most=most, **options), **head}


def by_kind(solvers: Mapping[str, Solver]) -> dict[str, list[Solver]]:
    """Solvers by the name of their kind: learned ones of equal settings are seeds of one.

    Args:
        solvers: By the names that were given. Learned ones are called `hyper` if they are of one kind, otherwise by as
            much of the end of a path as tells kinds apart.
    """
    paths: dict[Any, list[Path]] = {}
    for name, solver in solvers.items():
        if isinstance(solver, HyperAnderson):
            paths.setdefault(solver.config, []).append(Path(name.removeprefix(PREFIX)))
    kinds: dict[str, list[Solver]] = {}
    for name, solver in solvers.items():
        if isinstance(solver, HyperAnderson):
            others = [path for config, own in paths.items() if config != solver.config for path in own]
            name = f"{PREFIX}{_tail(paths[solver.config][0], others)}" if others else LEARNED
        kinds.setdefault(name, []).append(solver)
    return kinds


def _tail(path: Path, others: Sequence[Path]) -> Path:
    """The shortest end of a path that none of the others has."""
    for size in range(1, len(path.parts)):
        if all(other.parts[-size:] != path.parts[-size:] for other in others):
            return Path(*path.parts[-size:])
    return path


def told(
    each: Callable[[dict[str, Any]], None], budgets: Iterable[int], say: Callable[[str], None]
) -> Callable[[dict[str, Any]], None]:
    """What `pareto` calls after each number of steps, made to say a line then.

    Args:
        each: What else is to be done, before that.
        budgets: All numbers of steps.
        say: Takes the lines.
    """
    left, total = {*budgets}, len({*budgets})

    def tell(record: dict[str, Any]) -> None:
        each(record)
        (steps,) = left - {*record["missing"]}
        left.remove(steps)
        say(f"{_measured(record, steps)} ({total - len(left)} of {total})")

    return tell


def _measured(record: Mapping[str, Any], steps: int) -> str:
    """A line on the metric of each solver after a number of steps, the mean over seeds."""
    means = {name: mean_curve(seeds) for name, seeds in curves(record).items()}
    said = [f"{name} {p['metric']:.6g}" for name, points in means.items() for p in points if p["steps"] == steps]
    return f"after {steps} {'step' if steps == 1 else 'steps'}: {', '.join(said)}"


def _keep_older(path: Path, record: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Put an older measurement by other settings aside."""
    if not path.is_file():
        return
    try:
        if _settings(json.loads(path.read_text(encoding="utf-8"))) == _settings(plain(record)):
            return
    except (ValueError, KeyError, TypeError):  # damaged, or of another version
        pass
    say(f"what was measured by other settings before stays in {put_aside(path)}")


def _settings(record: Mapping[str, Any]) -> list[Any]:
    """What a measurement depends on, of its record."""
    names = ("changes", "solvers", "checkpoint", "split", "most", "metric", "reference", "at", "select")
    steps = {point["steps"] for point in record["points"]} - {None} | {*record["missing"]}
    beside = [point["solver"] for point in record["points"] if point["steps"] is None]
    return [*(record[name] for name in names), steps, beside, record["environment"]["devices"]]


def loaded_beside(
    opened: TrainedRun, beside: Sequence[str | Path], data_dir: str | None = None
) -> dict[str, nn.Module]:
    """The models of other runs on the same data, by the names of their folders.

    Args:
        opened: The run they are to be put beside.
        beside: Folders of the others.
        data_dir: Where data files are.
    """
    folders = by_name("runs", beside, lambda path: path.name)
    require_same_data(opened, beside, data_dir)
    return {name: load(folder, opened.device) for name, folder in folders.items()}


def require_same_data(opened: TrainedRun, beside: Sequence[str | Path], data_dir: str | None = None) -> None:
    """Raise if other runs have another task, other data or other classes, so that no metric can be compared.

    Args:
        opened: The run they are to be put beside.
        beside: Folders of the others.
        data_dir: Where data files are.
    """
    task, model = {"name": opened.task.name, **to_data(opened.task.config)}, opened.config["model"]
    for other in beside:
        config = read_config(find_checkpoint(other))
        tasks, models = (task, config.get("task", {})), (model, config["model"])
        differ = [(f"task.{key}", *(one.get(key) for one in tasks)) for key in OF_DATA]
        differ = [(key, ours, theirs) for key, ours, theirs in differ if not _same_data(ours, theirs, data_dir)]
        for key in OF_SIZE:
            sizes = [one[key] for one in models if key in one]
            if len(set(sizes)) > 1:
                differ.append((f"model.{key}", *sizes))
        if differ:
            said = ", ".join(f"{key} is {here!r} here and {there!r} there" for key, here, there in differ)
            raise ValueError(
                f"{other} cannot be put beside {opened.folder}: {said}; give a run on the same task and data."
            )


def _same_data(ours: Any, theirs: Any, data_dir: str | None) -> bool:
    """Whether two names of data are the same, or of the same folder."""
    if ours == theirs:
        return True
    if not (isinstance(ours, str) and isinstance(theirs, str)):
        return False
    root = Path(data_dir or ".")
    places = [{path.resolve() for path in (Path(name), root / name) if path.is_dir()} for name in (ours, theirs)]
    return bool(places[0] & places[1])


def pareto_opened(
    opened: TrainedRun,
    solvers: Mapping[str, Solver | str | Sequence[Solver]],
    budgets: Sequence[int],
    *,
    split: str = "valid",
    most: int | None = None,
    each: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure a run's model, as it would be used, `frozen`, by the protocol of `pareto`.

    Args:
        opened: The run.
        solvers: By name; see `pareto`.
        budgets: Numbers of steps.
        split: Held-out data.
        most: Batches to score on; None for all.
        each: See `pareto`.
        **options: Of `pareto`.
    """
    task, device = opened.task, opened.device
    head = {"run": str(home_of(opened.folder)), "checkpoint": str(opened.folder), "split": split, "most": most}
    passes = iter(opened.splits.held_out[split]())
    batches = [batch.to(device) for _, batch in zip(range(2), passes, strict=False)]
    metric, better = task.drawn
    options = {
        "metric": metric,
        "better": better,
        "score": Scoring(opened, split, most),
        "forward": forward_of(opened.task, opened.device),
        **options,
    }
    if each is not None:
        options["each"] = lambda record: each({**head, **record})
    with opened.autocast():
        options["others"] = {name: frozen(other) for name, other in (options.get("others") or {}).items()}
        return {**head, **pareto(frozen(opened.model), batches, solvers, budgets, **options)}
