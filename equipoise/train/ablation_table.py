"""What an ablation found: means and spreads of its variants, and whether its claims hold."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise._errors import unknown_name
from equipoise.train.ablation import Ablation, Claim, Job
from equipoise.train.tracking import environment, write_json

FILE, TABLE = "ablation.json", "ablation.md"
CONFIRMED, CONTRADICTED, UNDECIDED = "confirmed", "contradicted", "undecided"
DECISIVE = 2.0  # standard errors that a gap must be clear of what is claimed

Measures = dict[str, float]


def summarise(ablation: Ablation, jobs: Sequence[Job], failed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the runs of an ablation that are done have shown, as plain values.

    Args:
        ablation: What was compared.
        jobs: All its runs.
        failed: Why runs failed, by their labels.

    Returns:
        `variants` with the measures of each run, their mean and spread (standard deviation over seeds); `claims` with
        the gap, its standard error and a verdict; `missing` runs with the reason.
    """
    results = {job: job.result() for job in jobs}
    names = list(dict.fromkeys(job.variant for job in jobs))
    variants = {}
    for name in names:
        runs = [(job, found) for job, found in results.items() if job.variant == name and found is not None]
        variants[name] = _variant(ablation, name, runs)
    known = {measure for variant in variants.values() for measure in variant["mean"]}
    claims = [claim for claim in ablation.claims if claim.higher in names and claim.than in names]
    return {
        "title": ablation.title,
        "metric": ablation.metric,
        "percent": ablation.percent,
        "split": ablation.split,
        "rtol": None if ablation.converge is None else ablation.converge.rtol,
        "variants": variants,
        "claims": [_judged(claim, ablation, variants, known) for claim in claims],
        "missing": {
            job.label: (failed or {}).get(job.label, "not done") for job, found in results.items() if found is None
        },
        "environment": environment(),
    }


def _variant(ablation: Ablation, name: str, runs: Sequence[tuple[Job, dict[str, Any]]]) -> dict[str, Any]:
    variant = ablation.variants[name]
    measured = [measures(found, ablation.metric) for _, found in runs]
    keys = list(dict.fromkeys(key for one in measured for key in one))
    columns = {key: [one[key] for one in measured if key in one] for key in keys}
    return {
        "what": variant.what,
        "settings": list(variant.settings),
        "budgets": list(ablation.budgets_of(name)),
        "published": variant.published,
        "runs": [
            {"seed": job.seed, "complete": found["complete"], "step": found["step"], **one}
            for (job, found), one in zip(runs, measured, strict=True)
        ],
        "mean": {key: statistics.fmean(column) for key, column in columns.items()},
        "spread": {key: statistics.stdev(column) for key, column in columns.items() if len(column) > 1},
    }


def measures(result: Mapping[str, Any], metric: str) -> Measures:
    """The numbers of a run: its metrics at the first budget, and

    - METRIC_second, at the second budget;
    - residual and residual_second: 95th percentiles of relative residuals at these;
    - steps, steps_p95, unconverged: steps to the tolerance, median and 95th percentile, and the share of systems that
      did not reach it;
    - parameters, minutes.
    """
    scores = result["scores"]
    if metric not in scores[0]:
        raise unknown_name("metric", metric, [key for key in scores[0] if key not in ("steps", "solve", "seconds")])
    found = {key: float(value) for key, value in scores[0].items() if key not in ("steps", "solve", "seconds")}
    for number, one in enumerate(scores[:2]):
        suffix = "_second" if number else ""
        found[f"{metric}{suffix}"] = float(one[metric])
        if one["solve"]:
            found[f"residual{suffix}"] = float(one["solve"]["residual_p95"])
    converged = (result["converged"] or {}).get("solve")
    if converged:
        found |= {"steps": float(converged["steps_p50"]), "steps_p95": float(converged["steps_p95"])}
        found["unconverged"] = converged["failures"] / converged["systems"]
    return {**found, "parameters": float(result["parameters"]), "minutes": float(result["minutes"])}


def _judged(claim: Claim, ablation: Ablation, variants: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    of = claim.of or ablation.metric
    if known and of not in known:
        raise unknown_name(f"measure in the claim {claim.text!r}", of, known)
    sides = [[run[of] for run in variants[name]["runs"] if of in run] for name in (claim.higher, claim.than)]
    gap, error = gap_of(*sides)
    return {
        "text": claim.text,
        "published": claim.published,
        "of": of,
        "higher": claim.higher,
        "than": claim.than,
        "by": claim.by,
        "within": claim.within,
        "gap": gap,
        "error": error,
        "verdict": verdict(claim, gap, error),
    }


def gap_of(left: Sequence[float], right: Sequence[float]) -> tuple[float | None, float | None]:
    """The difference of two means and its standard error, both None where there are too few numbers."""
    if not (left and right):
        return None, None
    gap = statistics.fmean(left) - statistics.fmean(right)
    if min(len(left), len(right)) < 2:
        return gap, None
    return gap, math.sqrt(sum(statistics.variance(side) / len(side) for side in (left, right)))


def verdict(claim: Claim, gap: float | None, error: float | None) -> str:
    """Whether a gap is as claimed by more than twice its standard error, or is not by as much; else it is undecided."""
    if gap is None or error is None:
        return UNDECIDED
    clear = gap - claim.by if claim.within is None else claim.within - abs(gap)
    if clear == 0 and claim.within is None:  # equal to the last digit, e.g. two budgets that were used up
        return UNDECIDED
    if clear >= DECISIVE * error:
        return CONFIRMED
    return CONTRADICTED if clear <= -DECISIVE * error else UNDECIDED


# As text


def markdown(record: Mapping[str, Any]) -> str:
    """The tables of a record of `summarise`."""
    parts = [f"# {record['title']}\n", _how_to_read(record), *_table(*variant_table(record))]
    if record["claims"]:
        parts += ["\n## Claims\n", *_table(*claim_table(record))]
    if record["missing"]:
        parts += ["\n## Missing\n", *(f"- {label}: {why}" for label, why in record["missing"].items())]
    return "\n".join(parts) + "\n"


def _how_to_read(record: Mapping[str, Any]) -> str:
    text = (
        f"Scores of the {record['split']} split at the end of training: mean ± standard deviation over seeds, at the "
        "first and the second step budget. Residuals are the 95th percentile of relative residuals at these budgets."
    )
    if record["rtol"] is not None:
        text += (
            f" Steps are the median that a solve takes to a relative residual of {record['rtol']:g}; in brackets the "
            "share of systems that take more than were allowed."
        )
    return (
        f"{text} A claim is confirmed, or contradicted, by a gap that is clear of it by twice its standard error. "
        "* marks variants with a run that a time limit cut short.\n"
    )


def variant_table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row per variant."""
    metric, percent = record["metric"], record["percent"]
    said = f"{metric}, %" if percent else metric
    columns = ["variant", "what", "parameters", "seeds", "budgets", said, "second", "residual", "second", "steps"]
    rows = []
    for name, variant in record["variants"].items():
        mean, spread = variant["mean"], variant["spread"]
        cut = any(not run["complete"] for run in variant["runs"])

        def cell(key: str, scale: float = 1.0, digits: int = 4, mean: Any = mean, spread: Any = spread) -> str:
            if key not in mean:
                return ""
            around = f" ± {scale * spread[key]:.2g}" if key in spread else ""
            return f"{scale * mean[key]:.{digits}g}{around}"

        scale = 100.0 if percent else 1.0
        published = variant["published"]
        rows.append(
            [
                f"{name}{'*' if cut else ''}",
                variant["what"],
                f"{mean['parameters']:,.0f}" if mean else "",
                str(len(variant["runs"])),
                ", ".join(map(str, variant["budgets"])),
                cell(metric, scale),
                cell(f"{metric}_second", scale),
                cell("residual", digits=2),
                cell("residual_second", digits=2),
                cell("steps", digits=3) + _unsolved(mean.get("unconverged", 0.0)),
                f"{mean['minutes']:.1f}" if mean else "",
                "" if published is None else f"{scale * published:.4g}",
            ]
        )
    return [*columns, "minutes", "published"], rows


def _unsolved(share: float) -> str:
    return f" ({share:.0%} more)" if share >= 0.005 else ""


def claim_table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row per claim."""
    rows = []
    for claim in record["claims"]:
        percent = record["percent"] and claim["of"].startswith(record["metric"])
        scale, unit = (100.0, " points") if percent else (1.0, "")
        gap, error = claim["gap"], claim["error"]
        ours = "" if gap is None else f"{scale * gap:+.3g}{'' if error is None else f' ± {scale * error:.2g}'}{unit}"
        bound = claim["within"] if claim["within"] is not None else claim["by"]
        asked = f"{'within ' if claim['within'] is not None else 'at least '}{scale * bound:g}"
        what = f"{claim['of']}: {claim['higher']} − {claim['than']}"
        rows.append([claim["text"], claim["published"], what, asked, ours, claim["verdict"]])
    return ["claim", "published", "gap", "claimed", "ours", "verdict"], rows


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def write_summary(out: str | Path, record: dict[str, Any]) -> list[Path]:
    """Write a record of `summarise` as ablation.json and ablation.md."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / FILE, record)
    (out / TABLE).write_text(markdown(record), encoding="utf-8")
    return [out / FILE, out / TABLE]
