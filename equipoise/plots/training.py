"""Loss over training."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from equipoise.plots import style
from equipoise.plots.logs import LogError, Run
from equipoise.plots.registry import Chart, register_figure

_MOST_NATS = 30.0  # of a language model that has not diverged


@register_figure("training")
def training(runs: Sequence[Run]) -> Chart:
    """Training and validation loss over the steps of runs, as logged: nothing is smoothed.

    Where all runs are language models, the loss is in nats, and a second scale shows it as perplexity.
    """
    title = "Training and validation loss"
    curves = {run: (_training_loss(run), run.points("valid", "loss")) for run in runs}
    perplexities = {run: dict(run.points("valid", "perplexity")) for run in runs}
    in_nats = all(perplexities.values())
    if not in_nats:
        perplexities = {run: {} for run in runs}
    figure, (axes,) = style.panels(title, [3.0])
    values = [y for pair in curves.values() for points in pair for _, y in points]
    tame = in_nats and all(value < _MOST_NATS for value in values if math.isfinite(value))
    if not tame and style.spans_decades(values):
        axes.set_yscale("log")
    not_shown = 0
    for series, pair in enumerate(curves.values()):
        not_shown += sum(style.curve(axes, points, series, thin=part == 0) for part, points in enumerate(pair))
    axes.set_ylabel("loss (nats per token)" if in_nats else "loss")
    style.step_axis(axes, "training step")
    style.say_not_shown(axes, not_shown)
    if tame:
        _perplexity_axis(axes)
    labels = style.short_labels([run.label for run in runs])
    labels = [f"{label}{_best(curves[run][1], perplexities[run])}" for label, run in zip(labels, runs, strict=True)]
    style.name_series(figure, axes, labels, {"validation": {}, "training": {"thin": True}})
    rows = [
        (run.label, split, step, value, perplexities[run].get(step) if split == "valid" else None)
        for run, pair in curves.items()
        for split, points in zip(("train", "valid"), pair, strict=True)
        for step, value in points
    ]
    return Chart(title, figure, ("run", "split", "step", "loss", "perplexity"), rows)


def _training_loss(run: Run) -> list[tuple[int, float]]:
    """The loss without penalties where the run logs it apart, for that is what validation measures."""
    points = run.points("train", "nats") or run.points("train", "loss")
    if not points:
        raise LogError(run, f"{run.path} has no training record yet; `equipoise train RECIPE --out RUN` writes them.")
    return points


def _best(valid: list[tuple[int, float]], perplexity: dict[int, float]) -> str:
    """The best validation, to stand after the name of a run."""
    finite = [(value, step) for step, value in valid if math.isfinite(value)]
    if not finite:
        return ""
    value, step = min(finite)
    return f": best {perplexity.get(step, value):.4g}"


def _perplexity_axis(axes: Axes) -> None:
    """The same heights in another unit, on the right."""
    low, high = axes.get_ylim()
    right = axes.twinx()
    right.set_ylim(low, high)
    if high - low > math.log(5):
        decades = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
        steps = (1, 2, 3, 5, 7) if high - low < math.log(20) else (1, 2, 5) if high - low < math.log(300) else (1,)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
    else:
        ticks = list(MaxNLocator(5).tick_values(math.exp(low), math.exp(high)))
    ticks = [tick for tick in ticks if tick > 0 and low <= math.log(tick) <= high]
    right.set_yticks([math.log(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    right.set_ylabel("perplexity")
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
