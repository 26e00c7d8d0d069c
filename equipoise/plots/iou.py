"""Intersection over union of each class."""

import json
import math
from collections.abc import Sequence
from typing import Any

from equipoise.plots import style
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import Chart, register_figure
from equipoise.train.evaluate import by_own_solver
from equipoise.train.tracking import written_scores

PREFIX = "iou_"


@register_figure("iou")
def iou(runs: Sequence[Run]) -> Chart:
    """IoU of each class and their mean: of the newest test scores in eval/, else of the last validation."""
    title = "Intersection over union by class"
    scores = {run: _scores(run) for run in runs}
    figure, panels = style.panels(title, [0.5 + 0.22 * (1 + len(values)) for _, values in scores.values()])
    labels = style.short_labels([run.label for run in runs])
    for axes, label, run in zip(panels, labels, runs, strict=True):
        split, values = scores[run]
        missing = style.stacked_bars(axes, list(values), {"IoU": list(values.values())}, "")
        axes.set_title(f"{label}, {split}")
        axes.set_xlabel("IoU")
        axes.set_xlim(0, 1.15)
        style.say_not_shown(axes, missing)
    rows = [(run.label, split, name, x) for run, (split, values) in scores.items() for name, x in values.items()]
    return Chart(title, figure, ("run", "split", "class", "iou"), rows)


def _scores(run: Run) -> tuple[str, dict[str, float]]:
    """The split, and IoU by class after their mean."""
    split, found = _evaluated(run) or _validated(run)
    classes = {key.removeprefix(PREFIX): run.number(x) for key, x in found.items() if key.startswith(PREFIX)}
    return split, {"mean": run.number(found.get("miou")), **classes}


def _evaluated(run: Run) -> tuple[str, dict[str, Any]] | None:
    """The newest test scores that have IoU, by the model's own solver: as it is set, or else with most steps."""
    for path in written_scores(run.folder, "test"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            results = [result for result in record["results"] if "miou" in result] if by_own_solver(record) else []
            if results:
                return "test", max(results, key=lambda result: result.get("steps") or math.inf)
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise LogError(run, f"{path} cannot be read ({error}); `equipoise evaluate` writes it anew.") from error
    return None


def _validated(run: Run) -> tuple[str, dict[str, Any]]:
    for record in reversed(run.records):
        if "miou" in record.get("valid", {}):
            return "valid", record["valid"]
    raise LogError(run, f"{run.path} has no IoU in its log; runs of the task 'segmentation' write it.")
