"""A run on one page: what was trained, its scores, and every figure there are logs for."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from equipoise.plots.iou import PREFIX
from equipoise.plots.logs import LogError, Run, open_runs
from equipoise.plots.registry import FIGURES, Chart
from equipoise.plots.report import Page
from equipoise.solvers._hyper_file import PREFIX as LEARNED
from equipoise.train.tracking import written_scores

REPORT = "report.html"
_SCORES = 6  # files of scores that are shown, the newest first


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run, from its logs alone.

    Args:
        run: Folder of the run.
        out: The file; by default RUN/report.html.
    """
    (opened,) = open_runs([run])
    page = Page(f"Run {opened.label}")
    _facts(page, opened)
    for path in written_scores(opened.folder)[:_SCORES]:
        _scores(page, opened, path)
    _figures(page, opened)
    path = opened.folder / REPORT if out is None else Path(out)
    if path.is_dir():
        raise IsADirectoryError(f"the report is a file, and {path} is a folder; give a file, e.g. {path / REPORT}.")
    try:
        return page.write(path)
    except OSError as error:
        raise type(error)(f"{path} cannot be written ({error.strerror}); give another file (--out).") from error


def _facts(page: Page, run: Run) -> None:
    """What was trained on what, and how far."""
    config, environment = (_read(run, name) for name in ("config.json", "env.json"))
    first, last = run.records[0], run.records[-1]
    facts = {
        "task": config.get("task", {}).get("name"),
        "model": config.get("model", {}).get("name"),
        "parameters": f"{first['parameters']:,}" if "parameters" in first else None,
        **{f"data: {key}": value for key, value in first.get("data", {}).items() if not isinstance(value, dict)},
        "steps": f"{last['step']:,} of {config.get('train', {}).get('steps', last['step']):,}",
        "minutes": f"{last.get('seconds', 0.0) / 60:.1f}",
        "device": ", ".join(environment.get("devices", [])),
        "commit": environment.get("commit"),
    }
    page.table(("what", ""), [[key, _cell(value)] for key, value in facts.items() if value is not None])
    valid: dict[str, Any] = next((record["valid"] for record in reversed(run.records) if "valid" in record), {})
    if valid:
        page.heading("Last validation")
        shown = {key: value for key, value in valid.items() if not key.startswith(PREFIX)}
        page.table(("metric", ""), [[key, _cell(value)] for key, value in shown.items()])


def _scores(page: Page, run: Run, path: Path) -> None:
    """A file of `equipoise evaluate`: a column for each result."""
    record = _read(run, f"eval/{path.name}")
    results = record.get("results") or []
    if not results:
        return
    key = "steps" if record.get("sweep") in (None, "stop.max_steps") else record["sweep"]
    page.heading(f"Scores: {record['split']}, {_when(path)}")
    if said := _how(record):
        page.text(said)
    columns = ["", *(f"{key} {result[key]}" if result.get(key) is not None else "own stop rule" for result in results)]
    solves = {f"solve: {name}": name for name in ("residual_p50", "residual_p95", "nfe", "failures")}
    names = [name for name in results[0] if name not in ("steps", "solve", "seconds", key)]
    ordered = sorted(names, key=lambda name: name.startswith(PREFIX))  # classes last
    rows = [[name.replace(PREFIX, "IoU: "), *(_cell(result.get(name)) for result in results)] for name in ordered]
    rows += [
        [said, *(_cell(result["solve"].get(name)) for result in results)]
        for said, name in solves.items()
        if results[0].get("solve")
    ]
    page.table(columns, rows)
    for text in record.get("warnings", []):
        page.note(f"Warning: {text}")


def _when(path: Path) -> str:
    """The time in the name of a file of scores."""
    stamp = path.stem.partition("-")[2]
    try:
        return f"{datetime.strptime(stamp[:16], '%Y%m%dT%H%M%SZ'):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:  # a name that somebody gave
        return stamp


def _how(record: dict[str, Any]) -> str:
    """The checkpoint, the solver and the settings of scores."""
    parts = [f"checkpoint `{Path(record['checkpoint']).name}`"] if record.get("checkpoint") else []
    if record.get("solver"):
        asked = record.get("asked") or ""
        learned = f" (`{asked}`)" if asked.startswith(LEARNED) else ""
        parts.append(f"solver {record['solver']}{learned}{' with a guard' if record.get('guard') else ''}")
    if record.get("changes"):
        parts.append(" ".join(f"`--set {change}`" for change in record["changes"]))
    return f"By {', '.join(parts)}." if parts else ""


def _figures(page: Page, run: Run) -> None:
    charts: dict[str, Chart] = {}
    missing: dict[str, list[str]] = {}
    for name, function in FIGURES.items():
        try:
            charts[name] = function([run])
        except LogError as error:
            if error.foreign:
                continue
            missing.setdefault(str(error), []).append(name)
    if charts:
        page.heading("Figures")
        page.charts(*charts.values())
    for why, names in missing.items():
        page.note(f"Not shown: {', '.join(names)}. {why}")


def _read(run: Run, name: str) -> dict[str, Any]:
    """A JSON file of the run; empty if it is not there."""
    path = run.folder / name
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LogError(run, f"{path} is not JSON ({error}); remove it, or write it anew.") from error
    return values if isinstance(values, dict) else {}


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)
