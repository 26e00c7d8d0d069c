"""The folder of a report on learned solvers: numbers, text, logs and figures, written anew whenever there is more."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.solvers.hyper_anderson import HyperAnderson
from equipoise.tasks.hyper import HyperRecipe
from equipoise.train.hyper_fit import LOG
from equipoise.train.hyper_summary import concluded, markdown
from equipoise.train.pareto import FILE as PARETO
from equipoise.train.tracking import plain, write_json

REPORT = "report.json"
FIGURES = {"pareto", "beyond", "ablations"}
REDRAWN = 8.0  # seconds between figures of a report that is not complete yet

Say = Callable[[str], None]


@dataclass(frozen=True)
class Fitted:
    """A learned solver, the record of its fit, and the folder that both are in."""

    solver: HyperAnderson
    record: dict[str, Any]
    folder: Path


class Report:
    """The folder of results, written again whenever there is more.

    Args:
        out: The folder.
        record: What is known before anything was measured.
        fits: The solvers.
        recipes: Of the variants.
        training: Seconds of training the model; None if unknown.
        say: Told what is missing.
    """

    def __init__(
        self,
        out: Path,
        record: dict[str, Any],
        fits: Mapping[str, Sequence[Fitted]],
        recipes: Mapping[str, HyperRecipe],
        training: float | None,
        say: Say,
    ) -> None:
        self.out, self.record, self.fits, self.recipes = out, record, fits, recipes
        self.training, self.say = training, say
        self.timing: dict[str, Any] = {}
        self.figures: list[str] = []
        self._drawn = -math.inf
        if not (out / REPORT).is_file():  # the folder is this run's from now on
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / REPORT, {"run": record["run"], "complete": False})
        self.record["variants"] = {record["reported"]: self._variant(record["reported"])}
        self._copy_logs()

    def timed(self, timing: dict[str, Any]) -> None:
        """Take in times and metrics, as far as they go."""
        self.timing = {**timing, "recipe": self.record["reported"]}
        self.write()

    def measured(self, name: str, found: list[dict[str, Any]]) -> None:
        """Take in the curves of a variant."""
        self.record["variants"][name] = {**self._variant(name), "curves": found}
        self.write()

    def write(self, complete: bool = False) -> dict[str, Any]:
        """Write all files; figures not each time, unless this is the last one, and then the text says so."""
        record = plain(concluded(self.record, self.timing, self.training, self.recipes)) | {"complete": complete}
        self._write_text(record, behind=True)  # first: the work may be ended at any time
        write_json(self.out / PARETO, self.timing)
        write_json(self.out / REPORT, record)
        if complete or time.perf_counter() - self._drawn > REDRAWN:
            self.figures, self._drawn = _draw(self.out, record, self.say), time.perf_counter()
            self._write_text(record, behind=False)
        if complete:
            for name in FIGURES - {*self.figures}:  # of a report with more variants
                for path in self.out.glob(f"{name}.*"):
                    if path.name != PARETO:
                        path.unlink()
        files = [path for path in sorted(self.out.rglob("*")) if path.is_file()]
        return {**record, "files": [str(path) for path in files]}

    def _write_text(self, record: dict[str, Any], behind: bool) -> None:
        """The README; `behind` if figures may lack what the numbers have."""
        text = markdown(record, self.figures, behind=behind and bool(self.figures))
        (self.out / "README.md").write_text(text, encoding="utf-8")

    def _variant(self, name: str) -> dict[str, Any]:
        return {"published": self.recipes[name].published, "fits": [fit.record for fit in self.fits[name]]}

    def _copy_logs(self) -> None:
        (self.out / "fits").mkdir(parents=True, exist_ok=True)
        for path in (self.out / "fits").glob("*.jsonl"):
            path.unlink()
        for name, seeds in self.fits.items():
            for seed, fit in enumerate(seeds):
                (self.out / "fits" / f"{name}-{seed}.jsonl").write_bytes((fit.folder / LOG).read_bytes())


def _draw(out: Path, record: dict[str, Any], say: Say) -> list[str]:
    """Names of the figures; none where matplotlib is missing."""
    try:
        from equipoise.plots import make_chart, save
        from equipoise.plots.hyper import ablation_chart, beyond_chart
    except ImportError as error:
        if "equipoise[plots]" not in str(error):
            raise
        say(str(error))
        return []
    charts = {"pareto": make_chart("pareto", [out])}
    if "table" in record:  # residuals were followed
        charts["beyond"] = beyond_chart(record)
    if len(record["variants"]) > 1:
        charts["ablations"] = ablation_chart(record)
    for name, chart in charts.items():
        save(chart, name, out)
    return list(charts)
