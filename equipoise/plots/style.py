"""How every figure looks: told apart without colour, readable at the width of a phone, the same bytes every time."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

try:
    import matplotlib
except ImportError as error:
    raise ImportError("figures need the extra [plots]: pip install 'equipoise[plots]'") from error

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from equipoise._errors import unknown_name

Points = Sequence[tuple[float, float]]

# Okabe and Ito's palette, which the colour-blind can tell apart. Lines take those of contrast 3:1 and more on white;
# areas, which have a dark edge, the light ones.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")
FILLS = ("#56B4E9", "#E69F00")
# Neither cycle divides the other, so 35 series differ in colour or marker.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "////")
INK = "#222222"
WIDTH = 4.8  # inches: letters of 10 points are 11 pixels tall or more when a phone shows this 390 pixels wide
LONGEST_LABEL = 28
_LEGEND_LETTERS = 56

_SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.dpi": 100,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
    "font.size": 10,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.8,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "savefig.dpi": 200,
    "svg.fonttype": "path",
    "svg.hashsalt": "equipoise",  # else identifiers in the file are random
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextmanager
def applied() -> Iterator[None]:
    """The house style inside the block, whatever the user's own settings are; these are as before afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def render(figure: Figure, kind: str, title: str) -> bytes:
    """The file of a figure, "png" or "svg", without dates, versions or random names."""
    files: dict[str, dict[str, Any]] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None, "Title": title},
    }
    if kind not in files:
        raise unknown_name("kind of file", kind, files)
    file = io.BytesIO()
    with applied():
        if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
            # Laid out once, for good: done at each rendering, a file would depend on those written before.
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        figure.savefig(file, format=kind, metadata=files[kind])
    return file.getvalue()


def panels(
    title: str, heights: Sequence[float], *, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure with panels below each other, their heights in inches.

    Args:
        title: Above all panels.
        heights: Of each panel; titles and legends come on top.
        sharex: Whether panels have one x axis; only the last one has numbers along it.
        sharey: Whether panels have one scale of y.
    """
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left")
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=list(heights), sharex=sharex, sharey=sharey)
    return figure, list(axes[:, 0])


def shorten(label: str, most: int = LONGEST_LABEL) -> str:
    """A label of at most `most` characters: its middle, where names of runs differ least, gives way."""
    if len(label) > most:
        tail = (most - 1) // 2
        label = f"{label[: most - 1 - tail]}…{label[-tail:]}"
    # A dollar would begin a formula, and a leading underscore hides an entry from legends.
    return re.sub("^_", " _", label.replace("$", r"\$"))


def short_labels(labels: Sequence[str]) -> list[str]:
    """Shortened labels; those that would become equal get a number."""
    short = [shorten(label) for label in labels]
    if len(set(short)) == len(short):
        return short
    return [f"{i}: {shorten(label, LONGEST_LABEL - 4)}" for i, label in enumerate(labels, start=1)]


def spans_decades(values: Sequence[float]) -> bool:
    """Whether positive values differ so much that a linear axis would show the large ones only."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= 30


def curve(axes: Axes, points: Points, series: int = 0, *, thin: bool = False, dashed: bool = False) -> int:
    """Draw a line through points, with gaps where a value cannot be shown on the axes.

    Args:
        axes: Where; their scale must be set already.
        points: (x, y), by x.
        series: Number of the series, which has a colour and a marker.
        thin: For what goes with another line, e.g. a quantile.
        dashed: For the second of two kinds of line.

    Returns:
        How many points could not be shown.
    """
    least = 0.0 if axes.get_yscale() == "log" else -math.inf
    shown = [y if math.isfinite(y) and y > least else math.nan for _, y in points]
    every = max(1, len(points) // 10)
    axes.plot(
        [x for x, _ in points],
        shown,
        **_line(COLORS[series % len(COLORS)], MARKERS[series % len(MARKERS)], thin, dashed),
        markevery=(series % every, every),  # staggered, so that curves on top of each other show both markers
    )
    return sum(math.isnan(y) for y in shown)


def band(axes: Axes, low: Sequence[float], high: Sequence[float], series: int = 0) -> None:
    """Shade what lies between two lines, in the colour of a series.

    Args:
        axes: Where.
        low: The lower line, a point for each whole number from 0 on.
        high: The upper line.
        series: Number of the series.
    """
    axes.fill_between(range(len(low)), low, high, color=COLORS[series % len(COLORS)], alpha=0.12, linewidth=0)


def sample(label: str, series: int | None = None, *, thin: bool = False, dashed: bool = False) -> Line2D:
    """The entry of a legend for lines as `curve` draws them; without a series, for what lines of any series mean."""
    color = INK if series is None else COLORS[series % len(COLORS)]
    marker = None if series is None else MARKERS[series % len(MARKERS)]
    return Line2D([], [], label=label, **_line(color, marker, thin, dashed))


def _line(color: str, marker: str | None, thin: bool, dashed: bool) -> dict[str, Any]:
    """Thin lines have small hollow markers: without colour, too, it is seen whose they are."""
    return {
        "color": color,
        "linestyle": (0, (4, 1.5)) if dashed else "-",
        "linewidth": 0.9 if thin else 1.9,
        "marker": marker,
        "markersize": 3.5 if thin else 5,
        "markeredgewidth": 0.9,
        "markerfacecolor": "white" if thin else color,
    }


def legend(figure: Figure, *groups: Sequence[Artist]) -> None:
    """A legend below the panels, where it covers nothing; the figure grows by its height.

    Args:
        figure: Gets the legend.
        *groups: Entries; one group fills rows, and of two each has columns of its own, if they fit.
    """
    widths = [7 + max(len(str(entry.get_label())) for entry in group) for group in groups]  # in letters, with the line
    if len(groups) == 1:
        columns = max(1, min(len(groups[0]), _LEGEND_LETTERS // widths[0]))
        rows = math.ceil(len(groups[0]) / columns)
        entries = [entry for column in range(columns) for entry in groups[0][column::columns]]
    else:
        names, roles = map(list, groups)
        columns = max(0, min(len(names), (_LEGEND_LETTERS - widths[1]) // widths[0])) + 1
        rows = max(math.ceil(len(names) / (columns - 1)), len(roles)) if columns > 1 else len(names) + len(roles)
        blanks = [Line2D([], [], label=" ", linestyle="none") for _ in range(columns * rows - len(names) - len(roles))]
        cut = max(0, (columns - 1) * rows - len(names))
        entries = [*names, *blanks[:cut], *roles, *blanks[cut:]]
    figure.set_figheight(figure.get_figheight() + 0.2 * rows + 0.1)
    figure.legend(handles=entries, loc="outside lower center", ncols=columns, columnspacing=1.2)


def name_series(figure: Figure, axes: Axes, labels: Sequence[str], roles: dict[str, dict[str, bool]]) -> None:
    """Say which series is which, and what kinds of line mean.

    Args:
        figure: Gets the legend.
        axes: The first panel; the name of a single series is its title, and needs no place in the legend.
        labels: Of the series.
        roles: Of the kinds of line: label, and how `curve` draws it.
    """
    if len(labels) == 1:
        axes.set_title(labels[0])
        legend(figure, [sample(role, 0, **drawn) for role, drawn in roles.items()])
    else:
        named = [sample(label, series) for series, label in enumerate(labels)]
        legend(figure, named, [sample(role, **drawn) for role, drawn in roles.items()])


def whole_numbers(most: int) -> MaxNLocator:
    """Ticks at whole numbers that are easy to count in."""
    return MaxNLocator(most, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)


def step_axis(axes: Axes, label: str) -> None:
    """Whole numbers along x."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(whole_numbers(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k" if abs(x) >= 10_000 else f"{x:g}"))


def say_not_shown(axes: Axes, count: int) -> None:
    """Say under the axes how many values could not be drawn: what is left out is not hidden."""
    if count:
        why = "not finite, or not positive" if axes.get_yscale() == "log" else "not finite"
        said = f"{count} {'value' if count == 1 else 'values'} not drawn: {why}"
        axes.set_xlabel(f"{axes.get_xlabel()}\n{said}".strip())


def stacked_bars(axes: Axes, names: Sequence[str], parts: dict[str, list[float]], unit: str) -> int:
    """Horizontal bars, one per name, made of parts, with their totals beside them.

    Args:
        axes: Where.
        names: Of the bars, from the top.
        parts: Label and lengths of each part.
        unit: Of the lengths.

    Returns:
        How many lengths were not finite, and are missing from their bars.
    """
    places, left = list(range(len(names))), [0.0] * len(names)
    missing = [0] * len(names)
    for part, (label, lengths) in enumerate(parts.items()):
        shown = [length if math.isfinite(length) else 0.0 for length in lengths]
        missing = [count + (not math.isfinite(length)) for count, length in zip(missing, lengths, strict=True)]
        axes.barh(places, shown, 0.7, left, edgecolor=INK, linewidth=0.8, **_fill(part), label=label)
        left = [a + b for a, b in zip(left, shown, strict=True)]
    for place, total in zip(places, left, strict=True):
        said = "unknown" if missing[place] else f"{total:.3g} {unit}"
        axes.annotate(f" {said}", (total, place), va="center")
    axes.set_yticks(places, [shorten(name, 16) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.3 * max(left, default=0.0) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    return sum(missing)


def part_samples(labels: Sequence[str]) -> list[Patch]:
    """The entries of a legend for the parts of `stacked_bars`."""
    return [Patch(label=label, edgecolor=INK, linewidth=0.8, **_fill(part)) for part, label in enumerate(labels)]


def _fill(part: int) -> dict[str, Any]:
    return {"facecolor": FILLS[part % len(FILLS)], "hatch": HATCHES[part % len(HATCHES)]}
