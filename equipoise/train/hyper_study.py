"""Several learned solvers for one run: fitted, measured beside classic ones, and put into one folder.

What takes long is kept in the run, RUN/hyper/NAME/seed-K, so that the same command goes on where it was ended.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._errors import require_count, require_number
from equipoise._fixed_point import solve
from equipoise._module import override
from equipoise._stop import Stop
from equipoise._tensor_file import digest_of
from equipoise.adjoints import Implicit
from equipoise.nn.frozen import frozen
from equipoise.solvers import Anderson, Solver, as_solver, fingerprint
from equipoise.solvers._hyper_file import FILE as SOLVER
from equipoise.solvers._hyper_file import load_solver
from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks._hyper_pool import found_by
from equipoise.tasks.base import forward_of
from equipoise.tasks.hyper import POOL_SHARE, FitSettings, HyperRecipe, NoEquilibriaError, NotFittedError, Pool
from equipoise.train.checkpoint import check_writable
from equipoise.train.config import ConfigError, from_data, to_data
from equipoise.train.hyper_fit import fit_opened, pool_of
from equipoise.train.hyper_report import REPORT, Fitted, Report, Say
from equipoise.train.load import TrainedRun, home_of, open_run, require_equilibrium
from equipoise.train.loop import LOG as METRICS
from equipoise.train.pareto import LEARNED, loaded_beside, pareto_opened, told
from equipoise.train.pareto_curves import curves
from equipoise.train.scoring import Scoring, engine_of
from equipoise.train.tracking import environment, plain, put_aside, read_metrics, write_json

CLASSIC = ("anderson", "broyden")
FITTED, MEASURED = "fit.json", "measured.json"
POOL = 128  # batches whose equilibria all fits share
FAR = 3  # times the unrolled steps, to which residuals are followed
FEW_SYSTEMS = 128  # whose residuals are followed for a variant
MANY_SYSTEMS = 1000  # likewise for the solver that is reported
LEAST_SECONDS = 1.0  # that a fit gets, however little time is left
ANY = 1e30  # residual up to which held-out systems count: none is left out
HELD_OUT = Stop(rtol=1e-3, max_steps=30)  # to what they are solved, for what a batch leaves to the next
HASHED = 3  # batches by which data are told apart

Points = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Measuring:
    """What is measured.

    Attributes:
        split: Held-out data.
        budgets: Numbers of steps at which metrics are taken.
        at: The number of steps of Anderson whose metric is to be reached.
        most: Batches to score on; None for all.
        rounds: Timed calls of each candidate, at most.
        warmup: Calls before those, besides the scoring.
    """

    split: str = "valid"
    budgets: tuple[int, ...] = tuple(range(1, 13))
    at: int = 12
    most: int | None = None
    rounds: int = 40
    warmup: int = 20

    def __post_init__(self) -> None:
        for steps in self.budgets:
            require_count("hyper", "budgets", steps)
        if self.at not in self.budgets:
            raise ValueError(f"hyper: at={self.at} is not among the budgets {', '.join(map(str, self.budgets))}.")


def study_run(
    run: str | Path,
    recipes: Mapping[str, HyperRecipe],
    out: str | Path,
    *,
    seeds: int = 3,
    seconds: float | None = None,
    measuring: Measuring = Measuring(),
    beside: Sequence[str | Path] = (),
    data_dir: str | None = None,
    which: str = "best",
    changes: Sequence[str] = (),
    command: str = "",
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Fit solvers by recipes, several seeds each, measure them, and write a folder of small files.

    The first recipe is the one that is timed, and followed beyond its unrolled steps. The folder gets report.json,
    pareto.json, README.md, the logs of the fits, and figures where matplotlib is installed. It is written again
    whenever something was measured: if the work is ended early, it has what was found until then, and says what is
    missing. A complete report that was made otherwise before is put aside.

    Args:
        run: Folder of a run or of a checkpoint.
        recipes: By name.
        out: The folder.
        seeds: Solvers fitted by each recipe.
        seconds: For all fits together, and their equilibria; those that are there already take none.
        measuring: What is measured.
        beside: Runs on the same data, e.g. of an explicit network, to be single points beside the curves.
        data_dir: Where data files are.
        which: Of a run: "best" or "latest" checkpoint.
        changes: Of the task's settings, e.g. `task.eval_batch_size=12`.
        command: What was typed, for the README.
        say: Told what is being done.
    """
    require_count("hyper", "seeds", seeds)
    if seconds is not None:
        require_number("hyper", "seconds", seconds, low=0.0, open_low=True)
    opened = open_run(run, measuring.split, data_dir, which=which, changes=changes)
    # Wrong ones are refused before any work.
    require_equilibrium(opened.model, opened.folder, "so there is no solver to fit")
    others = loaded_beside(opened, beside, data_dir)
    _require_free("recipe", recipes, CLASSIC)
    _require_free("run beside this one", others, (*CLASSIC, LEARNED))
    check_writable(out)
    _require_own(Path(out), run)
    if opened.device.type != "cuda":
        say("there is no GPU: times per batch will be those of this processor")
    study = _Study(opened, Path(run) / "hyper", recipes, measuring, tuple(changes), say)
    fits = study.fits(seeds, seconds)
    if not fits:
        raise ValueError(f"none of the recipes suits this model: {'; '.join(study.skipped.values())}")
    first = next(iter(fits))
    study.far = FAR * recipes[first].fit.unroll
    facts = {**_facts(opened, run, measuring, command), "reported": first, "unroll": recipes[first].fit.unroll}
    facts["settings"] = study.settings(seeds, beside)
    _keep_older(Path(out), facts["settings"], say)  # now that there is something to put in its place
    report = Report(Path(out), {**facts, "skipped": study.skipped}, fits, recipes, _training_seconds(opened), say)
    _measure(study, report, others, recipes[first].fit)
    return report.write(complete=True)


def _require_free(what: str, names: Iterable[str], taken: Sequence[str]) -> None:
    """Raise if something is called as a solver is that it is compared with, whose numbers it would replace."""
    for name in names:
        if name in taken:
            raise ValueError(f"a {what} cannot be called {name!r}, as a solver is that is measured, too; rename it.")


def _require_own(out: Path, run: str | Path) -> None:
    """Raise if a folder has the report of another run, or something else, which would be lost."""
    there = (_read(out / REPORT) or {}).get("run")
    if there is None and out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty, and has no report to go on with ({REPORT}); give a new folder.")
    if there is not None and Path(there).resolve() != Path(run).resolve():
        raise FileExistsError(f"{out} has the report of {there}; give another folder, or remove that one.")


def _keep_older(out: Path, settings: Mapping[str, Any], say: Say) -> None:
    """Put a complete report that was made otherwise aside: its times are nowhere else."""
    there = _read(out / REPORT)
    if there is not None and there.get("complete") and there.get("settings") != settings:
        if Path.cwd().is_relative_to(out.resolve()):
            raise FileExistsError(
                f"{out} has a report that was made otherwise, and cannot be put aside, being the working folder or "
                "around it; give another folder."
            )
        say(f"the report that was made otherwise stays in {put_aside(out, REPORT)}")


def _facts(opened: TrainedRun, run: str | Path, measuring: Measuring, command: str) -> dict[str, Any]:
    """What was looked at, and how."""
    return {
        "run": str(run),
        "command": command,
        "checkpoint": str(opened.folder),
        "model": opened.config["model"]["name"],
        "split": measuring.split,
        "metric": opened.task.drawn[0],
        "at": measuring.at,
        "environment": environment(),
    }


def _measure(study: "_Study", report: Report, others: Mapping[str, nn.Module], settings: FitSettings) -> None:
    """Metric against time first, then residuals step by step; the report is written after each."""
    fits, first = report.fits, report.record["reported"]
    study.say(f"metric against time, {first}")
    scored = curves(study.pareto([fit.solver for fit in fits[first]], others, report.timed))
    report.record["equilibrium"] = study.equilibrium(settings)
    unscored = () if len(fits) > 1 else None  # metrics of other classic solvers are for comparisons of variants alone
    report.record["classic"] = {
        name: study.kept_curve(
            as_solver(name), study.folder / "classic" / name, MANY_SYSTEMS, *scored.get(name, [unscored])
        )
        for name in CLASSIC
    }
    for name, own in fits.items():
        known = [(curve,) for curve in scored[LEARNED]] if name == first else [()] * len(own)
        systems = MANY_SYSTEMS if name == first else FEW_SYSTEMS
        found = [study.kept_curve(fit.solver, fit.folder, systems, *k) for fit, k in zip(own, known, strict=True)]
        report.measured(name, found)


def _training_seconds(opened: TrainedRun) -> float | None:
    """What training took, by the run's log; None if there is none."""
    log = home_of(opened.folder) / METRICS
    records = read_metrics(log) if log.is_file() else []
    return float(records[-1]["seconds"]) if records and "seconds" in records[-1] else None


class _Study:
    """Fits and measurements of one run."""

    def __init__(
        self,
        opened: TrainedRun,
        folder: Path,
        recipes: Mapping[str, HyperRecipe],
        measuring: Measuring,
        changes: tuple[str, ...],
        say: Say,
    ) -> None:
        self.opened, self.folder, self.measuring, self.say = opened, folder, measuring, say
        self.far = 0  # steps that residuals are followed for
        self.recipes, self.changes, self.model_hash = recipes, changes, fingerprint(opened.model)
        self.train_hash = _digest(opened.splits.train(step) for step in range(HASHED))
        self.held_out_hash = _digest(islice(opened.splits.held_out[measuring.split](), HASHED))
        self.score = Scoring(opened, measuring.split, measuring.most)
        self.skipped: dict[str, str] = {}
        self._pools: list[Pool] = []
        self._held: Pool | None = None

    def settings(self, seeds: int, beside: Sequence[str | Path]) -> dict[str, Any]:
        """All that a report depends on, as JSON holds it."""
        recipes = [[name, to_data(recipe)] for name, recipe in self.recipes.items()]  # in order: the first is timed
        own = {"recipes": recipes, "seeds": seeds, "measuring": to_data(self.measuring), "changes": self.changes}
        data = {"model": self.model_hash, "train": self.train_hash, "held_out": self.held_out_hash}
        return plain({**own, **data, "beside": list(map(str, beside)), "devices": environment()["devices"]})

    @functools.cached_property
    def model(self) -> nn.Module:
        """The model as it is timed, so that all metrics are of one."""
        with self.opened.autocast():
            return frozen(self.opened.model)

    # Fits

    def fits(self, seeds: int, seconds: float | None) -> dict[str, list[Fitted]]:
        """All solvers; those that the run has are loaded."""
        wanted = [(name, seed) for name in self.recipes for seed in range(seeds)]
        kept = {(name, seed): self._kept(name, self.recipes[name], seed) for name, seed in wanted}
        until = None if seconds is None else time.perf_counter() + seconds
        new = [key for key, fitted in kept.items() if fitted is None]
        for done, (name, seed) in enumerate(new):
            if name not in self.skipped:
                kept[name, seed] = self._fit(name, self.recipes[name], seed, until, len(new) - done)
        found: dict[str, list[Fitted]] = {}
        for (name, _), fitted in kept.items():
            if fitted is not None:
                found.setdefault(name, []).append(fitted)
        return found

    def _recipe(self, recipe: HyperRecipe, seed: int) -> HyperRecipe:
        fit = dataclasses.replace(recipe.fit, seed=seed, pool=recipe.fit.pool or POOL)
        return dataclasses.replace(recipe, fit=fit)

    def _place(self, name: str, seed: int) -> Path:
        return self.folder / name / f"seed-{seed}"

    def _kept(self, name: str, recipe: HyperRecipe, seed: int) -> Fitted | None:
        """A solver that was fitted before, by the same recipe to the same weights, on the same task."""
        folder = self._place(name, seed)
        record = _read(folder / FITTED)
        wanted = plain(to_data(self._recipe(recipe, seed))), plain(self.changes), self.train_hash
        if record is None or (_completed(record.get("recipe")), record.get("changes"), record.get("data")) != wanted:
            return None
        try:
            return Fitted(load_solver(folder / SOLVER, self.opened.model), record, folder)
        except (ValueError, FileNotFoundError):  # of another model or version, cut off, or gone: it is fitted anew
            return None

    def _fit(self, name: str, recipe: HyperRecipe, seed: int, until: float | None, more: int) -> Fitted | None:
        """A new solver; by a time that is to do for so many fits, this one among them."""
        folder, recipe = self._place(name, seed), self._recipe(recipe, seed)
        if (folder / FITTED).is_file():  # of other settings, data or weights
            self.say(f"{name}, seed {seed}: the one that was fitted otherwise stays in {put_aside(folder)}")
        (folder / MEASURED).unlink(missing_ok=True)  # of a solver whose record is gone

        def left() -> float | None:
            return None if until is None else max(until - time.perf_counter(), LEAST_SECONDS)

        try:
            pool = self._pool(recipe.fit, left())
            seconds = left()
            own = None if seconds is None else max(seconds / more, LEAST_SECONDS)
            record = fit_opened(self.opened, recipe, folder, pool=pool, seconds=own, progress=True)
        except ValueError as error:
            # What does not suit, e.g. a mean over positions for a state that has none, suits no other seed either.
            unlucky = isinstance(error, NotFittedError) and not isinstance(error, NoEquilibriaError)
            what = f"{name}, seed {seed}" if unlucky else name
            self.skipped[what] = str(error)
            self.say(f"{what}: left out, {error}")
            return None
        record |= {"finding_seconds": pool.seconds, "changes": self.changes, "data": self.train_hash}
        write_json(folder / FITTED, record)
        start, end = (record[key].get("end_residual", math.nan) for key in ("first", "last"))
        self.say(f"{name}, seed {seed}: {record['seconds']:.1f} s, residual {start:.1e} to {end:.1e}")
        return Fitted(load_solver(folder / SOLVER, self.opened.model), record, folder)

    def _pool(self, settings: FitSettings, seconds: float | None) -> Pool:
        for pool in self._pools:
            if pool.serves(settings):
                return pool
        # As many as any of the recipes learns from, whichever comes first, and whichever is there already.
        alike = (r.fit for r in (self._recipe(recipe, settings.seed) for recipe in self.recipes.values()))
        count = max(
            min(fit.pool or POOL, fit.steps) for fit in (settings, *alike) if found_by(fit) == found_by(settings)
        )
        self.say(f"equilibria of {count} batches by {type(settings.solver).__name__}")
        pool = pool_of(self.opened, settings, count, seconds and POOL_SHARE * seconds)
        self._pools.append(pool)
        return pool

    # Measurements

    def kept_curve(self, solver: Solver, folder: Path, systems: int, scored: Points | None = ()) -> dict[str, Any]:
        """The curve of a solver, measured before or now.

        Args:
            solver: To be measured.
            folder: Where the curve is kept.
            systems: Whose residuals are followed.
            scored: Points that were scored already; None for no metrics at all.
        """
        m, path = self.measuring, folder / MEASURED
        settings = plain({"split": m.split, "budgets": m.budgets, "most": m.most, "changes": self.changes})
        settings |= {"systems": systems, "steps": self.far, "model": self.model_hash, "data": self.held_out_hash}
        settings |= {"metric": self.opened.task.drawn[0]}
        kept = _read(path)
        if kept is not None and kept.get("settings") == settings and (scored is None or kept["curve"]["points"]):
            return dict(kept["curve"])
        self.say(f"measuring {folder.parent.name}, {folder.name}")
        curve = self.curve(solver, systems, scored)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"settings": settings, "curve": curve})
        return curve

    def curve(self, solver: Solver, systems: int, scored: Points | None = ()) -> dict[str, Any]:
        """Metrics after each number of steps, from none on, and relative residuals step by step."""
        known = {point["steps"]: {name: point[name] for name in ("metric", "loss")} for point in scored or ()}
        points = []
        # Recording each solver for each number of steps takes longer than some solves; for many, `Scoring` does it.
        with engine_of(self.model, "eager"), torch.no_grad(), self.opened.autocast():
            for steps in () if scored is None else (0, *self.measuring.budgets):
                if steps in known:
                    points.append({"steps": steps, **known[steps]})
                    continue
                # One step of which the measured iterate is returned is the start itself.
                select = "last" if steps else "best"
                stop = Stop(rtol=0.0, atol=0.0, max_steps=max(1, steps), select=select)
                with override(self.model, solver=solver, stop=stop):
                    points.append({"steps": steps, **self._metrics()})
            residuals = self._residuals(solver, systems)
        return {"points": points, "residual": residuals}

    def equilibrium(self, settings: FitSettings) -> dict[str, float]:
        """Metrics where the classic solver of the fits ends."""
        plan = {"solver": settings.solver, "stop": settings.stop}
        with torch.no_grad(), self.opened.autocast(), override(self.model, **plan):
            return self._metrics()

    def _metrics(self) -> dict[str, float]:
        found = self.score(self.model)
        return {"metric": found[self.opened.task.drawn[0]], "loss": found.get("loss", math.nan)}

    def _residuals(self, solver: Solver, systems: int) -> dict[str, Any]:
        """Mean, spread and median over systems of the residual at the start and after each step."""
        traces: list[Tensor] = []
        held, steps = self._held_out(), self.far + 1
        stop = Stop(rtol=0.0, max_steps=steps)
        for place in range(len(held)):
            for target in held.at(place):
                start = target.problem.spec.unflatten(target.start)
                found = solve(target.problem, start, solver, Implicit(), stop, trace=True)
                assert found.stats.trace is not None
                traces.append(found.stats.trace[:, :steps].double().cpu())
            if sum(map(len, traces)) >= systems:
                break
        table = torch.cat(traces)  # (systems, steps)
        spread = table.std(0) if len(table) > 1 else torch.zeros_like(table[0])
        lines = {"mean": table.mean(0), "std": spread, "median": table.median(0).values}
        return {"systems": len(table), **{name: line.tolist() for name, line in lines.items()}}

    def _held_out(self) -> Pool:
        if self._held is None:
            opened, settings = self.opened, FitSettings(solver=Anderson(), stop=HELD_OUT, accept=ANY)
            batches = opened.splits.held_out[self.measuring.split]()
            with opened.autocast():
                self._held = Pool(
                    opened.model, _until(batches, MANY_SYSTEMS), settings, forward_of(opened.task, opened.device)
                )
        return self._held

    def pareto(
        self, solvers: list[HyperAnderson], others: Mapping[str, nn.Module], each: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """Metric and time of each solver after each number of steps, and of other models."""
        m = self.measuring
        chosen: dict[str, Any] = {"anderson": "anderson", LEARNED: solvers}
        options: dict[str, Any] = {"at": m.at, "rounds": m.rounds, "warmup": m.warmup, "others": others}
        options["each"] = told(each, m.budgets, self.say)
        return pareto_opened(self.opened, chosen, m.budgets, split=m.split, most=m.most, **options)


def _digest(batches: Iterable[Any]) -> str:
    """What tells data apart: a digest of some batches."""
    return digest_of(item for batch in batches for item in sorted(vars(batch.to("cpu")).items()))


def _until(batches: Any, systems: int) -> Iterator[Any]:
    """Batches until there are so many rows."""
    count = 0
    for batch in batches:
        if count >= systems:
            return
        count += batch.rows.count
        yield batch


def _completed(recipe: Any) -> Any:
    """A recipe as it was kept; settings that did not exist then have their defaults."""
    try:
        return plain(to_data(from_data(HyperRecipe, recipe)))
    except (ConfigError, TypeError):
        return None


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON file that was written before; None if it is not there, or is no JSON."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
