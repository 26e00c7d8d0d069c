"""Ablations: a recipe, variants that are a few settings away from it, and claims about them; every run with seeds.

A file names them; see recipes/ablations. Each variant is trained once per seed in a folder OUT/VARIANT/seed-N, as any
run is, then scored at several step budgets. What is done is not done again, what was interrupted is resumed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equipoise
from equipoise._errors import require_count, require_number, unknown_name
from equipoise._stop import Stop
from equipoise.train.checkpoint import GracefulStop
from equipoise.train.config import ConfigError, load_config, to_data
from equipoise.train.recipe import Recipe
from equipoise.train.tracking import write_json

JOB, RESULT = "job.json", "result.json"
INTERRUPTED = 130  # exit code of a run that was asked to end
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_POLL = 0.1  # seconds between looks at the processes


@dataclass(frozen=True)
class Variant:
    """One side of comparisons.

    Attributes:
        what: In a few words.
        recipe: File of another recipe to begin with, from the folder of the ablation; that of the ablation if None.
        settings: Changes, e.g. `model.inject=all`.
        budgets: Step budgets to score at, where they differ from those of the ablation.
        published: The metric that was published for it, on the scale of the log; None for none.
    """

    what: str = ""
    recipe: str | None = None
    settings: tuple[str, ...] = ()
    budgets: tuple[int, ...] | None = None
    published: float | None = None


@dataclass(frozen=True)
class Claim:
    """A sentence on two variants that numbers confirm or contradict.

    Attributes:
        text: The sentence.
        higher: The variant whose number is higher by it.
        than: The other one.
        by: By how much at least; below zero, how much less is still as claimed.
        within: Instead: the two differ by at most so much.
        of: The number: the metric of the ablation if None; or another metric, or `steps`, `residual`, `minutes`, ...
        published: What was published on it, in words.
    """

    text: str
    higher: str
    than: str
    by: float = 0.0
    within: float | None = None
    of: str | None = None
    published: str = ""

    def __post_init__(self) -> None:
        if self.within is not None:
            require_number("claim", "within", self.within, low=0.0)
            if self.by:
                raise ValueError(f"claim {self.text!r}: give by, for an order, or within, for no difference; not both.")


@dataclass(frozen=True)
class Ablation:
    """Variants of a recipe, and what is claimed of them.

    Attributes:
        title: Of the report.
        recipe: File of the recipe, from the folder of the ablation.
        metric: By which variants are compared, as `evaluate` names it.
        variants: By name; the first is what others are beside.
        claims: On pairs of them.
        split: What is scored.
        percent: Whether the metric is shown times 100.
        seeds: Runs of each variant.
        minutes: Wall time of a run at most; the report marks those that it cut short.
        settings: Changes that all variants have.
        budgets: Step budgets to score at; the first gives the number that counts, the others show that it is that of an
            equilibrium. Without any, the recipe's own stop rule.
        converge: Stop rule of one more scoring, which tells how many `steps` an equilibrium takes; none if None.
    """

    title: str
    recipe: str
    metric: str
    variants: dict[str, Variant]
    claims: tuple[Claim, ...] = ()
    split: str = "test"
    percent: bool = False
    seeds: int = 3
    minutes: float | None = None
    settings: tuple[str, ...] = ()
    budgets: tuple[int, ...] = ()
    converge: Stop | None = None

    def __post_init__(self) -> None:
        require_count("ablation", "seeds", self.seeds)
        if not self.variants:
            raise ValueError("ablation: variants must name at least one, e.g. [variants.base].")
        for name, variant in self.variants.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"ablation: {name!r} names a folder; use letters, digits, _, - and dots.")
            for budget in (*self.budgets, *(variant.budgets or ())):
                require_count("ablation", "budgets", budget)
        for claim in self.claims:
            for name in (claim.higher, claim.than):
                if name not in self.variants:
                    raise unknown_name("variant", name, self.variants)

    @classmethod
    def read(cls, path: str | Path) -> "Ablation":
        """An ablation from a TOML file."""
        return load_config(cls, path)

    def budgets_of(self, name: str) -> tuple[int, ...]:
        """The step budgets that a variant is scored at."""
        own = self.variants[name].budgets
        return self.budgets if own is None else own


@dataclass(frozen=True, eq=False)
class Job:
    """A variant with a seed.

    Attributes:
        variant: Name of the variant.
        seed: Number of the seed.
        recipe: What to train by.
        scoring: What to score: `split`, `budgets`, `converge`.
        folder: Of the run.
    """

    variant: str
    seed: int
    recipe: Recipe
    scoring: dict[str, Any]
    folder: Path

    @property
    def label(self) -> str:
        """In words."""
        return f"{self.variant}, seed {self.seed}"

    def to_data(self) -> dict[str, Any]:
        """Plain values."""
        record = {"variant": self.variant, "seed": self.seed, "recipe": self.recipe.to_data(), "scoring": self.scoring}
        return json.loads(json.dumps(record))  # type: ignore[no-any-return]  # as it will be read

    def result(self) -> dict[str, Any] | None:
        """What came of it, if it is done: to the end, or to the time limit, and scored as is asked."""
        path = self.folder / RESULT
        if not path.is_file():
            return None
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        scored = record["scoring"] == self.to_data()["scoring"]
        ended = record["complete"] or record["limit"] == self.recipe.train.minutes
        return record if scored and ended else None

    def claim(self) -> None:
        """Write down what is to be done; a folder with a run by other settings is refused."""
        path, record = self.folder / JOB, self.to_data()
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            odd = sorted(_differences(before["recipe"], record["recipe"]) - {"train.minutes"})
            if odd:
                raise ValueError(
                    f"{self.folder} holds a run by other settings ({', '.join(odd[:4])} differ); give another folder "
                    "(--out), or remove it."
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, record)


def _differences(a: Any, b: Any, at: str = "") -> set[str]:
    """Names of the settings that differ."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return set() if a == b else {at}
    return {
        odd for key in a.keys() | b.keys() for odd in _differences(a.get(key), b.get(key), f"{at}.{key}" if at else key)
    }


def make_jobs(
    ablation: Ablation,
    place: str | Path,
    out: str | Path,
    *,
    seeds: int | None = None,
    variants: Sequence[str] = (),
    changes: Iterable[str] = (),
    minutes: float | None = None,
) -> list[Job]:
    """The runs of an ablation, the first seed of all variants first.

    Args:
        ablation: What to compare.
        place: Folder from which its recipes are named.
        out: Folder of all runs.
        seeds: How many, if not as the ablation says.
        variants: Names of some, if not all.
        changes: Of settings, for all variants, after their own.
        minutes: Wall time of a run, if not as the ablation says.
    """
    for name in variants:
        if name not in ablation.variants:
            raise unknown_name("variant", name, ablation.variants)
    chosen = [name for name in ablation.variants if name in variants or not variants]
    limit = ablation.minutes if minutes is None else minutes
    extra = [*changes, *([] if limit is None else [f"train.minutes={float(limit)}"])]
    jobs = []
    for seed in range(ablation.seeds if seeds is None else seeds):
        for name in chosen:
            variant = ablation.variants[name]
            settings = [*ablation.settings, *variant.settings, *extra, f"train.seed={seed}"]
            try:
                recipe = Recipe.read(Path(place) / (variant.recipe or ablation.recipe), settings)
            except ConfigError as error:
                raise ConfigError(f"variant {name!r}: {error}") from error
            scoring = {
                "split": ablation.split,
                "budgets": list(ablation.budgets_of(name)),
                "converge": to_data(ablation.converge),
            }
            jobs.append(Job(name, seed, recipe, scoring, Path(out) / name / f"seed-{seed}"))
    return jobs


def run_jobs(
    jobs: Sequence[Job],
    *,
    at_once: int = 1,
    data_dir: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, str], str | None]:
    """Train and score those that are not done, each in a process of its own.

    Their data are looked for first: what is missing raises here, before anything is begun or written. A signal to this
    process, or its end, lets them save and end.

    Args:
        jobs: Of `make_jobs`.
        at_once: Processes side by side.
        data_dir: Where data files are.
        say: Takes a line about every beginning and end.

    Returns:
        Why jobs failed, by their labels, and the signal that ended it all, if one did.
    """
    require_count("run_jobs", "at_once", at_once)
    waiting = deque(job for job in jobs if job.result() is None)
    _check_data(waiting, data_dir)
    for job in waiting:
        job.claim()
    say(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them done")
    running: dict[Job, subprocess.Popen[bytes]] = {}
    failed: dict[str, str] = {}
    with GracefulStop() as stop:
        try:
            while running or (waiting and not stop.requested):
                while waiting and len(running) < at_once and not stop.requested:
                    job = waiting.popleft()
                    running[job] = _start(job, at_once, data_dir)
                    say(f"begun: {job.label}")
                if stop.requested:
                    for process in running.values():
                        _end(process)
                for job in [job for job, process in running.items() if process.poll() is not None]:
                    process = running.pop(job)
                    _end(process)
                    _conclude(job, process.returncode, failed, say)
                time.sleep(_POLL)
        finally:
            for process in running.values():  # after a second signal
                process.kill()
                process.wait()
    return failed, stop.reason


def _check_data(jobs: Iterable[Job], data_dir: str | None) -> None:
    """Load the data of each task once, so that missing ones are said in one line and not by every job."""
    tasks = {json.dumps(job.to_data()["recipe"]["task"], sort_keys=True): job for job in jobs}
    for job in tasks.values():
        job.recipe.make_task(data_dir).data()


def _start(job: Job, at_once: int, data_dir: str | None) -> "subprocess.Popen[bytes]":
    root = str(Path(equipoise.__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = str(max(1, (os.cpu_count() or 1) // at_once))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "equipoise.train.ablation_run", str(job.folder)]
    with _log(job).open("ab") as log:
        # In a session of its own, so that Ctrl-C reaches it once, through the pipe.
        return subprocess.Popen(
            [*command, *([data_dir] if data_dir is not None else [])],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a run to save and end: it does so when nobody is at the other end of the pipe."""
    assert process.stdin is not None
    process.stdin.close()


def _log(job: Job) -> Path:
    return job.folder.with_suffix(".log")


def _conclude(job: Job, code: int, failed: dict[str, str], say: Callable[[str], None]) -> None:
    if code == 0:
        say(f"done: {job.label}")
    elif code in (INTERRUPTED, -signal.SIGTERM):
        say(f"interrupted: {job.label}")
    else:
        said = _log(job).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        failed[job.label] = f"{said[-1] if said else f'exit code {code}'} ({_log(job)})"
        say(f"failed: {job.label}: {failed[job.label]}")
