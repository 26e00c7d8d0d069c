"""The command `ablate`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.options import AsJson, DataDir, Set
from equipoise.cli.output import plots_missing, show, table, warn


def ablate(
    file: Annotated[
        Path, typer.Argument(help="An ablation, e.g. recipes/ablations/mdeq_tiny.toml.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder of all runs and of the report.", show_default=False)],
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each variant; the file says it by default.")] = None,
    variants: Annotated[
        list[str] | None, typer.Option("--variant", help="One of the variants; repeat for several; all by default.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Runs side by side; 0 only reports what is done.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(help="Wall time of a run at most; the file says it by default.")
    ] = None,
    changes: Set = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Train the variants of a recipe with several seeds, score each, and hold what is claimed of them against that.

    The folder gets a run for every variant and seed, ablation.json, ablation.md and a figure. The same command goes on
    after Ctrl-C, SIGTERM or a crash: what is done is not done again.
    """
    from equipoise.train.ablation import Ablation, make_jobs, run_jobs
    from equipoise.train.ablation_table import summarise, write_summary

    ablation = Ablation.read(file)
    given: dict[str, Any] = {"variants": variants or (), "changes": changes or (), "minutes": minutes}
    planned = make_jobs(ablation, file.parent, out, seeds=seeds, **given)
    failed, reason = run_jobs(planned, at_once=jobs, data_dir=data_dir, say=_say) if jobs else ({}, None)
    record = summarise(ablation, planned, failed)
    files = write_summary(out, record)
    if any(variant["runs"] for variant in record["variants"].values()):
        files += _draw(out)
    if as_json:
        show({**record, "interrupted": reason, "files": [str(path) for path in files]}, True)
    else:
        _print(record)
        for path in files:
            print(f"written: {path}")
    for label, why in failed.items():
        warn(f"{label} failed: {why}")
    if failed or reason:
        raise typer.Exit(130 if reason else 1)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(record: dict[str, Any]) -> None:
    from equipoise.train.ablation_table import claim_table, variant_table

    table(*variant_table(record), record["title"])
    if record["claims"]:
        table(*claim_table(record), "claims")
    for label, why in record["missing"].items():
        print(f"missing: {label}: {why}")


def _draw(out: Path) -> list[Path]:
    """The files of the figure; none where matplotlib is missing."""
    missing = plots_missing()
    if missing:
        warn(missing)
        return []
    from equipoise.plots import draw

    return draw("ablation", [out], out)
