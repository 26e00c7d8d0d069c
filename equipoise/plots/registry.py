"""Figures by name, the charts they make, and the files a chart is kept in."""

import csv
import functools
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from equipoise._registry import Registry
from equipoise.plots import style
from equipoise.plots.logs import LogError, Run, open_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = Registry("figure")


@dataclass(frozen=True)
class Chart:
    """A figure and the numbers in it.

    Attributes:
        title: What is shown; also the title of the SVG, and a text for who cannot see the picture.
        figure: The drawing.
        columns: Names of the columns of the table, with units where they have one.
        rows: The plotted numbers as they were logged, one row per point or bar.
    """

    title: str
    figure: "Figure"
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} values for the {len(self.columns)} columns {self.columns}.")

    def render(self, kind: str) -> bytes:
        """The file of this kind, "png", "svg" or "csv"; equal charts give equal bytes."""
        return self._csv() if kind == "csv" else style.render(self.figure, kind, self.title)

    def _csv(self) -> bytes:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([self.columns, *self.rows])
        return text.getvalue().encode()


FigureFunction: TypeAlias = Callable[[Sequence[Run]], Chart]


def register_figure(name: str) -> Callable[[FigureFunction], FigureFunction]:
    """Decorator that makes a function from runs to a chart known by `name`, and lets it draw in the house style."""

    def add(function: FigureFunction) -> FigureFunction:
        @functools.wraps(function)
        def styled(runs: Sequence[Run]) -> Chart:
            with style.applied():
                return function(runs)

        return FIGURES.register(name)(styled)

    return add


def make_chart(name: str, runs: Iterable[str | Path]) -> Chart:
    """The chart of a figure, not yet saved; see `draw`."""
    return FIGURES.find(name)(open_runs(runs))


def save(chart: Chart, name: str, out: str | Path) -> list[Path]:
    """Write a chart as name.png, name.svg and name.csv into the folder `out`, which is made if need be."""
    out = Path(out)
    files = [out / f"{name}.{kind}" for kind in ("png", "svg", "csv")]
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        file.write_bytes(chart.render(file.suffix[1:]))
    return files


def draw(name: str, runs: Iterable[str | Path], out: str | Path) -> list[Path]:
    """Draw a figure.

    Args:
        name: Of the figure.
        runs: Folders of runs, or metrics files (*.jsonl).
        out: Folder of the files.

    Returns:
        The files: png, svg, and csv with the plotted numbers.

    Raises:
        LogError: If a run lacks a log the figure needs; the message says which command writes it.
    """
    return save(make_chart(name, runs), name, out)


@dataclass
class Drawn:
    """What `draw_all` did.

    Attributes:
        files: Written, in order.
        left_out: For each figure of runs, why it, or a run in it, is missing.
    """

    files: list[Path] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)


def draw_all(runs: Iterable[str | Path], out: str | Path) -> Drawn:
    """Draw each figure from those runs that have the logs for it; see `draw`."""
    opened, drawn = open_runs(runs), Drawn()
    for name, function in FIGURES.items():
        usable = list(opened)
        while usable:
            try:
                chart = function(usable)
            except LogError as error:
                usable.remove(error.run)
                if not error.foreign:
                    drawn.left_out.setdefault(name, []).append(str(error))
            else:
                drawn.files += save(chart, name, out)
                break
    return drawn
