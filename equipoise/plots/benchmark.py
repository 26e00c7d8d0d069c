"""Results of benchmarks: ratios as bars, goals as ticks."""

import json
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from equipoise.plots import style
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import Chart, register_figure

FILE = "benchmark.json"
ENVIRONMENT = "environment"
LONGEST_NAME = 30
LONGEST_TITLE = 40
# Part of a candidate's name that tells another library or an explicit network from ours.
OURS = ("eager", "captured", "DEQ")

_COLUMNS = (
    "run",
    "benchmark",
    "shape",
    "candidate",
    "measured",
    "quantity",
    "over",
    "ratio",
    "checked",
    "goal",
    "goal_over",
    "met",
)


@register_figure("benchmark")
def benchmark(runs: Sequence[Run]) -> Chart:
    """Measured ratios beside what is aimed at, of every benchmark of a folder."""
    found = [(run, name, row) for run in runs for name, rows in _logged(run).items() for row in rows]
    return _chart("Benchmarks", found)


def case_chart(run: Run, case: str) -> Chart:
    """The chart of one benchmark of a folder."""
    logged = _logged(run)
    if case not in logged:
        raise LogError(
            run, f"{run.folder / FILE} has no {case!r}; `equipoise benchmark {case} --out {run.path}` adds it."
        )
    with style.applied():
        return _chart(f"Benchmark {case}", [(run, case, row) for row in logged[case]])


def _logged(run: Run) -> dict[str, list[dict[str, Any]]]:
    path = run.folder / FILE
    if not path.is_file():
        how = f"`equipoise benchmark CASE --out {run.path}` writes it"
        raise LogError(run, f"{path} is missing; {how}.", foreign=True)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {name: rows for name, rows in values.items() if name != ENVIRONMENT and rows and "values" in rows[0]}
    except (ValueError, AttributeError, TypeError) as error:
        raise LogError(run, f"{path} is not the log of benchmarks: {error}.") from error


def _chart(title: str, found: Sequence[tuple[Run, str, dict[str, Any]]]) -> Chart:
    several = len({run for run, _, _ in found}) > 1
    titles = [_wrapped(f"{run.label}: {row['name']}" if several else row["name"]) for run, _, row in found]
    heights = [
        0.6 + 0.17 * (1 + name.count("\n")) + 0.24 * len(_shown(row))
        for name, (_, _, row) in zip(titles, found, strict=True)
    ]
    figure, panels = style.panels(title, heights)
    for axes, name, (_, _, row) in zip(panels, titles, found, strict=True):
        _bars(axes, row)
        axes.set_title(name)
    handles = [
        Patch(label="equipoise", facecolor=style.FILLS[0], edgecolor=style.INK, linewidth=0.8),
        Patch(label="other", facecolor=style.FILLS[1], edgecolor=style.INK, linewidth=0.8, hatch=style.HATCHES[1]),
        Line2D([], [], label="goal", color=style.INK, linewidth=2.5, linestyle="none", marker="|", markersize=11),
    ]
    style.legend(figure, handles)
    table = [line for run, name, row in found for line in _table(run, name, row)]
    return Chart(title, figure, _COLUMNS, table)


def _wrapped(name: str) -> str:
    """A name in lines that fit beside the longest labels of bars; it is broken where words or parts of it end."""
    lines = [""]
    for word in name.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) + 1 > LONGEST_TITLE:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _shown(row: dict[str, Any]) -> list[str]:
    return [name for name in row["values"] if name != row["base"]]


def _bars(axes: Axes, row: dict[str, Any]) -> None:
    names = _shown(row)
    widest = max([*(ratio for ratio in row["ratios"].values() if ratio), 1.0])
    for place, name in enumerate(names):
        ratio = row["ratios"].get(name)
        ours = any(part in name for part in OURS)
        look: dict[str, Any] = {"facecolor": style.FILLS[0 if ours else 1], "hatch": style.HATCHES[0 if ours else 1]}
        axes.barh(place, ratio or 0.0, 0.7, edgecolor=style.INK, linewidth=0.8, **look)
        said = f"{ratio:.3g}" if ratio else "wrong: no ratio"
        if any(goal["candidate"] == name and goal["met"] is False for goal in row["goals"]):
            said += ", goal missed"
        ticks = [tick for goal in row["goals"] if (tick := _tick(row, goal, name)) is not None]
        for tick in ticks:
            axes.plot([tick, tick], [place - 0.42, place + 0.42], color=style.INK, linewidth=2.5, solid_capstyle="butt")
        axes.annotate(f" {said}", (max([ratio or 0.0, *ticks]), place), va="center")
    axes.axvline(1.0, color=style.INK, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_yticks(range(len(names)), [style.shorten(name, LONGEST_NAME) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(names) - 0.5, -0.5)
    room = 1.7 if any(goal["met"] is False for goal in row["goals"]) else 1.25  # for what is written beside bars
    axes.set_xlim(0, room * max(widest, *(_ticks(row) or [0.0])))
    quantity = "memory" if row["quantity"] == "bytes" else f"time per {row['unit']}"
    axes.set_xlabel(f"{quantity}, {row['base']} = 1")


def _ticks(row: dict[str, Any]) -> list[float]:
    found = (_tick(row, goal, goal["candidate"]) for goal in row["goals"])
    return [tick for tick in found if tick is not None]


def _tick(row: dict[str, Any], goal: dict[str, Any], name: str) -> float | None:
    """Where the goal of a candidate lies on its bar, whatever it is compared with; None if that is not known."""
    other = row["ratios"].get(goal["over"])
    if goal["candidate"] != name or not other or not math.isfinite(other):
        return None
    bound: float = goal["bound"]
    return other / bound if goal["faster"] else other * bound


def _table(run: Run, case: str, row: dict[str, Any]) -> list[tuple[Any, ...]]:
    lines = []
    for name, value in row["values"].items():
        checked = all(check["ok"] for check in row["checks"].get(name, ()))
        head = (run.label, case, row["name"], name, run.number(value["median"]), row["quantity"], row["base"])
        goals = [goal for goal in row["goals"] if goal["candidate"] == name] or [None]
        for goal in goals:
            aim = ("", "", "") if goal is None else (_bound(goal), goal["over"], goal["met"])
            lines.append((*head, row["ratios"].get(name), checked, *aim))
    return lines


def _bound(goal: dict[str, Any]) -> str:
    return f"{'>=' if goal['faster'] else '<='} {goal['bound']:g}"
