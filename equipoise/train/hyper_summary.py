"""What the measurements of learned solvers amount to: overhead, orderings, tables."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.tasks.hyper import HyperRecipe
from equipoise.train.pareto import LEARNED
from equipoise.train.pareto_curves import curves, times_faster, times_over_budget, why_bounded

# Of the base model: parameters, and time of fitting; WikiText-103, ImageNet, Cityscapes.
PUBLISHED_SIZES = "0.63, 3.87, 2.68 %"
PUBLISHED_TIMES = "0.91, 0.76, 1.18 %"
SHOWN = (1, 2, 4, 6, 8, 10, 12)  # numbers of steps in tables


# Numbers


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of a line through points (x, y): the median slope between two of them, which a few bad ones do not move.

    NaN for fewer than two points, or for one that is not finite.
    """
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in itertools.combinations(points, 2) if a != c]
    return statistics.median(slopes) if slopes and all(map(math.isfinite, slopes)) else math.nan


def concluded(
    record: Mapping[str, Any], timed: Mapping[str, Any], training: float | None, recipes: Mapping[str, HyperRecipe]
) -> dict[str, Any]:
    """The record of a study with all that follows from it; it may lack curves, and numbers of steps, still.

    Args:
        record: Fits and curves.
        timed: Record of the timing.
        training: Seconds of training the model; None if unknown.
        recipes: Of the variants, which say what was published.
    """
    engines: dict[str, set[str]] = {}
    for point in timed["points"]:
        engines.setdefault(point["solver"], set()).add(point["engine"])
    obstacles = sorted({point["no_graph"] for point in timed["points"] if point.get("no_graph")})
    found = {
        **record,
        **{name: timed.get(name) for name in ("speedup", "ahead", "behind", "ahead_in_time", "missing", "noise")},
        "engines": {name: sorted(used) for name, used in engines.items()},
        "no_graph": obstacles,
        "overhead": overhead(record["variants"][record["reported"]]["fits"], timed, training),
    }
    if "classic" not in record or "curves" not in record["variants"][record["reported"]]:
        return found
    return {
        **found,
        "initialiser": initialiser_alone(record),
        "table": variants(record),
        "orderings": orderings(record, recipes),
    }


def overhead(fits: Sequence[Mapping[str, Any]], timed: Mapping[str, Any], training: float | None) -> dict[str, Any]:
    """What a learned solver costs: parameters, time of fitting, time of a step.

    Args:
        fits: Records of the fits.
        timed: Record of the timing.
        training: Seconds of training the model; None if unknown.
    """
    # Equilibria are found once for all fits; one fit would need them all the same.
    seconds, finding = (statistics.fmean(fit[name] for fit in fits) for name in ("seconds", "finding_seconds"))
    found = {
        name: statistics.fmean(slope([(point["steps"], point["ms"]) for point in seed]) for seed in seeds)
        for name, seeds in curves(timed).items()
    }
    doubt = _doubt({name: found[name] for name in (LEARNED, "anderson")})
    return {
        "parameters": fits[0]["parameters"],
        "model_parameters": fits[0]["model_parameters"],
        "share": fits[0]["share"],
        "fit_seconds": seconds,
        "finding_seconds": finding,
        "training_seconds": training,
        "time_share": None if not training else (seconds + finding) / training,
        "ms_per_step": {name: each if each > 0 else None for name, each in found.items()},
        "step_ratio": None if doubt else found[LEARNED] / found["anderson"],
        "step_doubt": doubt,
    }


def _doubt(slopes: Mapping[str, float]) -> str | None:
    """Why times per step are not compared, if they are not."""
    if any(map(math.isnan, slopes.values())):
        return "times of two numbers of steps are needed"
    lost = [f"{name} {each:+.2g} ms" for name, each in slopes.items() if not each > 0]
    return f"times do not grow with the number of steps ({', '.join(lost)} a step)" if lost else None


def initialiser_alone(record: Mapping[str, Any]) -> dict[str, Any]:
    """The learned start as a model: the metric without a step, and after one, beside that of the equilibrium."""
    own = record["variants"][record["reported"]]["curves"]
    at = {steps: _over([_metric(curve, steps) for curve in own]) for steps in (0, 1)}
    return {
        "none": at[0],
        "one": at[1],
        "zeros": _metric(record["classic"]["anderson"], 0),
        "equilibrium": record["equilibrium"]["metric"],
    }


def _metric(curve: Mapping[str, Any], steps: int, name: str = "metric") -> float:
    return next((float(point[name]) for point in curve["points"] if point["steps"] == steps), math.nan)


def area(curve: Mapping[str, Any], equilibrium: float, unroll: int) -> float:
    """Mean excess of the loss over that of the equilibrium after 1 to `unroll` steps; infinite if one is not finite.

    Not a number where none of these numbers of steps was measured.
    """
    losses = [float(point["loss"]) - equilibrium for point in curve["points"] if 1 <= point["steps"] <= unroll]
    if not losses:
        return math.nan
    return statistics.fmean(losses) if all(map(math.isfinite, losses)) else math.inf


def residual_area(curve: Mapping[str, Any], unroll: int) -> float:
    """Mean decimal logarithm of the median residual after 1 to `unroll` steps."""
    medians = [float(value) for value in curve["residual"]["median"][1 : unroll + 1]]
    usable = all(math.isfinite(value) for value in medians)
    return statistics.fmean(math.log10(max(value, 1e-30)) for value in medians) if usable else math.inf


def counted_steps(record: Mapping[str, Any]) -> list[int]:
    """The numbers of steps whose losses areas are means of."""
    points = next(iter(record["classic"].values()))["points"]
    return [point["steps"] for point in points if 1 <= point["steps"] <= record["unroll"]]


def _areas(record: Mapping[str, Any]) -> dict[str, list[float]]:
    found = {name: [curve] for name, curve in record["classic"].items()}
    found |= {name: variant["curves"] for name, variant in record["variants"].items()}
    loss = float(record["equilibrium"]["loss"])
    return {name: [area(curve, loss, record["unroll"]) for curve in own] for name, own in found.items()}


def variants(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each solver, the best first: areas, and metric and residual after some numbers of steps."""
    rows = []
    for name, areas in _areas(record).items():
        learned = record["variants"].get(name)
        own = [record["classic"][name]] if learned is None else learned["curves"]
        shown = [point["steps"] for point in own[0]["points"] if point["steps"] in SHOWN]
        row = {"name": name, "published": "" if learned is None else learned["published"], "area": _over(areas)}
        row["residual_area"] = _over([residual_area(curve, record["unroll"]) for curve in own])
        row["metric"] = {steps: _over([_metric(curve, steps) for curve in own]) for steps in shown}
        row["residual"] = {
            steps: _over([float(curve["residual"]["median"][steps]) for curve in own])
            for steps in shown
            if steps < len(own[0]["residual"]["median"])
        }
        rows.append(row)
    return sorted(rows, key=lambda row: (math.isnan(row["area"]["mean"]), row["area"]["mean"]))  # unknown ones last


def _over(seeds: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation over seeds."""
    finite = all(map(math.isfinite, seeds))
    spread = statistics.stdev(seeds) if finite and len(seeds) > 1 else 0.0 if finite else math.nan
    return {"mean": statistics.fmean(seeds), "std": spread}


def orderings(record: Mapping[str, Any], recipes: Mapping[str, HyperRecipe]) -> list[dict[str, Any]]:
    """What was published on which of two is better, and whether our areas say so."""
    areas = _areas(record)
    pairs = [(other, name) for name, recipe in recipes.items() for other in recipe.worse_than]
    pairs += [(name, other) for name, recipe in recipes.items() for other in recipe.better_than]
    found = []
    for better, worse in pairs:
        if better in areas and worse in areas:
            verdict, gap, error = _compared(areas[better], areas[worse])
            found.append({"better": better, "worse": worse, "gap": gap, "error": error, "ours": verdict})
    return found


def _compared(better: Sequence[float], worse: Sequence[float]) -> tuple[str, float, float]:
    """Whether the first are smaller, by how much, and the standard error of that, NaN for one seed of each."""
    gap = statistics.fmean(worse) - statistics.fmean(better)
    if not math.isfinite(gap):
        return ("holds" if gap > 0 else "contradicted" if gap < 0 else "unknown"), gap, math.nan
    spreads = [statistics.variance(part) / len(part) for part in (better, worse) if len(part) > 1]
    error = math.sqrt(sum(spreads)) if spreads else math.nan
    if gap == 0 or abs(gap) <= error:
        return "within the spread", gap, error
    return ("holds" if gap > 0 else "contradicted"), gap, error


# Words


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: Any, digits: int = 4) -> str:
    return "–" if value is None or math.isnan(float(value)) else f"{float(value):.{digits}g}"


def _spread(value: Mapping[str, Any], digits: int = 4) -> str:
    mean, spread = float(value["mean"]), float(value["std"])
    return _number(mean, digits) + (f" ± {spread:.2g}" if math.isfinite(spread) and spread > 0 else "")


def markdown(record: Mapping[str, Any], figures: Sequence[str], behind: bool = False) -> str:
    """The README of a folder of results.

    Args:
        record: Of `concluded`.
        figures: Names of those that there are.
        behind: Whether they may lack what the record has.
    """
    device = ", ".join(record["environment"]["devices"])
    fits = record["variants"][record["reported"]]["fits"]
    steps = sorted({fit["steps"] for fit in fits})
    made = f"{steps[0]:,}" + (f" to {steps[-1]:,}" if len(steps) > 1 else "")
    parts = [
        f"# Learned solvers for {record['model']}",
        f"`{record['command']}`" if record["command"] else "",
        f"Checkpoint `{record['checkpoint']}`, {record['split']} split, {device}, "
        f"torch {record['environment']['packages'].get('torch', '')}; timed and followed is `{record['reported']}`; "
        f"seeds of each solver: {len(fits)}, fitted with {record['unroll']} unrolled steps and {made} steps of the "
        f"optimiser, to the {100 * min(fit['accepted'] for fit in fits):.1f} % of the systems whose equilibrium was "
        "found. ± is the standard deviation over seeds.",
        "Figures were drawn before the newest numbers came in, and lack these." if behind else "",
        *(f"![{name}]({name}.png)" for name in figures if name == "pareto"),
        *(f"Left out: {name}: {why}" for name, why in record["skipped"].items()),
        "## Faster at an equal metric",
        _speed(record),
        "## Overhead",
        _overhead(record["overhead"], _learned(record)),
        *(_of_curves(record, figures) if "table" in record else ["Residuals have not been followed yet."]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _learned(record: Mapping[str, Any]) -> str:
    """What is timed, by the name of its recipe."""
    return f"learned (`{record['reported']}`)"


def _of_curves(record: Mapping[str, Any], figures: Sequence[str]) -> list[str]:
    return [
        "## Beyond the unrolled steps",
        *(f"![{name}]({name}.png)" for name in figures if name == "beyond"),
        _beyond(record),
        "## The initialiser alone as a model",
        _alone(record),
        *(_ablations(record, figures) if len(record["variants"]) > 1 else ()),
    ]


def _speed(record: Mapping[str, Any]) -> str:
    found = record["speedup"][LEARNED]
    open_yet = "not known yet" if record["missing"] else "not reached"
    # A bound of some seeds, or of the mean, is one of all.
    seeds = [times_faster({**found, "mean": value}) or open_yet for value in found["values"]]
    unsure = open_yet if record["missing"] else "not reached by all seeds"
    mean, over_budget = times_faster(found) or unsure, times_over_budget(found)
    over = "" if over_budget is None else f" (over Anderson's time for all of them: {over_budget})"
    why = why_bounded(found, f"`{record['reported']}`", "Anderson", "steps (`--at`)") if found["mean"] else ""
    alone = found.get("alone")  # on a CPU the same
    apart = None if alone == found["mean"] else times_faster({**found, "mean": alone})
    aside = "" if apart is None else f"; batches one at a time, host included, {apart}"
    ahead, behind = ranges(record["ahead"][LEARNED]), float(record["behind"][LEARNED])
    worst = f" (elsewhere at most {100 * behind:.2g} % worse)" if behind > 0 else ""
    in_time = ranges(record["ahead_in_time"][LEARNED])
    missing = f" Not measured yet: {', '.join(map(str, record['missing']))} steps." if record["missing"] else ""
    engines = "; ".join(f"{name} {' and '.join(used)}" for name, used in record["engines"].items())
    kinds = {kind for used in record["engines"].values() for kind in used}
    if record["no_graph"]:
        engines += f" (not the whole forward pass as one graph: {'; '.join(record['no_graph'])})"
    unlike = " Times of different engines are not comparable." if len(kinds) > 1 else ""
    bounded, doubt = f" {why[0].upper()}{why[1:]}." if why else "", record.get("noise")
    return (
        f"Times that the learned solver (`{record['reported']}`) is faster than Anderson at the {record['metric']} "
        f"that Anderson has after {record['at']} steps, within half a percent ({_number(found['target'], 6)}): "
        f"**{mean}**{over}; by seed {', '.join(seeds)}{aside}.{bounded} No worse than Anderson after these numbers of "
        f"steps: {ahead}{worst}. No worse than Anderson in the same time after these: {in_time}.{missing} Engine of "
        f"what is timed: {engines}.{unlike}" + (f"\n\nT{doubt[1:]}." if doubt else "")
    )


def _overhead(found: Mapping[str, Any], learned: str) -> str:
    share = "–" if found["time_share"] is None else f"{100 * found['time_share']:.2f} %"
    steps = found["ms_per_step"]
    rows = [
        ["parameters", f"{found['parameters']:,}", f"{found['model_parameters']:,}", f"{100 * found['share']:.2f} %"],
        [
            "seconds, fit and its equilibria against training",
            f"{found['fit_seconds']:.1f} + {found['finding_seconds']:.1f}",
            _number(found["training_seconds"]),
            share,
        ],
        [
            "ms per step, against Anderson",
            _number(steps[LEARNED], 3),
            _number(steps["anderson"], 3),
            "–" if found["step_ratio"] is None else f"{100 * float(found['step_ratio']):.0f} %",
        ],
    ]
    published = [PUBLISHED_SIZES, PUBLISHED_TIMES, "less than 100 %"]
    rows = [[*row, said] for row, said in zip(rows, published, strict=True)]
    doubt = f"\n\nWhat a step costs is not known: {found['step_doubt']}." if found["step_doubt"] else ""
    return table(("", learned, "base", "share", "published"), rows) + doubt


def _beyond(record: Mapping[str, Any]) -> str:
    own = [curve["residual"]["mean"] for curve in record["variants"][record["reported"]]["curves"]]
    classic = record["classic"]["anderson"]["residual"]["mean"]
    means = [statistics.fmean(map(float, values)) for values in zip(*own, strict=True)]
    below = [step for step, (a, b) in enumerate(zip(means, classic, strict=True)) if step and a < float(b)]
    unroll, far = record["unroll"], len(means) - 1
    rows = [
        [str(step), f"{means[step]:.2e}", f"{float(classic[step]):.2e}"]
        for step in dict.fromkeys((0, 1, 2, unroll // 2, unroll, 2 * unroll, far))
        if step <= far
    ]
    systems = record["classic"]["anderson"]["residual"]["systems"]
    said = f"Mean relative residual of {systems} systems. Below Anderson's at steps {ranges(below)} of 1 to {far}."
    return table(("step", _learned(record), "Anderson"), rows) + "\n\n" + said


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers, those in a row as a range."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts) or "none"


def _alone(record: Mapping[str, Any]) -> str:
    found, metric = record["initialiser"], record["metric"]
    rows = [
        ["state of zeros", _number(found["zeros"])],
        ["the initialiser's state, no step", _spread(found["none"])],
        ["after one step", _spread(found["one"])],
        ["equilibrium", _number(found["equilibrium"])],
    ]
    return table(("", metric), rows)


def _ablations(record: Mapping[str, Any], figures: Sequence[str]) -> list[str]:
    steps = list(record["table"][0]["metric"])
    columns = ("solver", "excess loss", "log10 residual", *(f"{record['metric']} at {k}" for k in steps), "published")
    rows = [
        [
            row["name"],
            _spread(row["area"], 3),
            _spread(row["residual_area"], 3),
            *(_number(row["metric"][k]["mean"]) for k in steps),
            row["published"],
        ]
        for row in record["table"]
    ]
    claims = [
        [
            f"{row['better']} better than {row['worse']}",
            f"{_number(row['gap'], 2)} ± {_number(row['error'], 1)}",
            row["ours"],
        ]
        for row in record["orderings"]
    ]
    return [
        "## Ablations",
        *(f"![{name}]({name}.png)" for name in figures if name == "ablations"),
        f"The best first, by the mean excess of the loss over the equilibrium's after these numbers of steps: "
        f"{ranges(counted_steps(record))}; beside it the mean logarithm of the median residual after 1 to "
        f"{record['unroll']}.",
        table(columns, rows),
        *(
            (
                "What was published, and the difference of our excess losses with its standard error:",
                table(("published", "ours", ""), claims),
            )
            if claims
            else ()
        ),
    ]
