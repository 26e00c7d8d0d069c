"""`equipoise plot`: what it prints, what it writes, how it ends."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from equipoise.cli import main as cli
from equipoise.plots import FIGURES, style
from tests.unit.test_plots import write_run


def plot(*arguments):
    return CliRunner().invoke(cli.app, ["plot", *map(str, arguments)])


def end(monkeypatch, capsys, *arguments):
    """Exit code and what stands on the error stream, as a shell would see them."""
    monkeypatch.setattr(sys, "argv", ["equipoise", "plot", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capsys.readouterr().err


def test_one_figure_goes_beside_the_first_run(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    result = plot("nfe", *runs)
    assert result.exit_code == 0
    files = [runs[0] / "figures" / f"nfe.{kind}" for kind in ("png", "svg", "csv")]
    assert all(file.stat().st_size for file in files)
    assert all(str(file) in result.stdout for file in files)
    assert "left_out" not in result.stdout
    assert not (runs[1] / "figures").exists()


def test_all_as_json(tmp_path):
    run, out = write_run(tmp_path / "run", inspection=None), tmp_path / "out"
    result = plot("all", run, "--out", out, "--json")
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert set(record) == {"figure", "out", "files", "left_out"}
    assert record["out"] == str(out)
    assert sorted(record["files"]) == sorted(map(str, out.iterdir()))
    assert len(record["files"]) == 9
    assert set(record["left_out"]) == set(FIGURES) - {"training", "residual", "nfe", "ablation", "benchmark"}
    assert record["left_out"]["memory"] == [f"{run}/inspect.json is missing; `equipoise inspect {run}` writes it."]


def test_one_figure_as_json(tmp_path):
    record = json.loads(plot("memory", write_run(tmp_path / "run"), "--json").stdout)
    assert record["left_out"] == {}
    assert [name.rsplit(".", 1)[1] for name in record["files"]] == ["png", "svg", "csv"]


def test_all_says_what_was_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "render", lambda *_: b"")  # the words matter here
    result = plot("all", write_run(tmp_path / "run", inspection=None))
    assert result.exit_code == 0
    assert re.search(r"left_out:\n(.*\n)*  convergence:\n    \S+inspect.json is missing", result.stdout)


def test_errors_end_with_one_line_and_code_2(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", inspection=None)
    bare = write_run(tmp_path / "bare", None, None)
    (tmp_path / "file").write_text("")
    cases = {
        ("trainning", run): "unknown figure 'trainning'; did you mean 'training'?",
        ("memory", run): f"{run}/inspect.json is missing; `equipoise inspect {run}` writes it.",
        ("training", run, bare): f"{bare}/metrics.jsonl is missing; `equipoise train RECIPE --out {bare}` writes it.",
        ("all", bare): "nothing to draw: ",
        ("all", tmp_path / "nowhere"): "no run at ",
        ("nfe", run, "--out", tmp_path / "file" / "x"): (
            f"{tmp_path}/file/x cannot be written (Not a directory); give another folder for the figures (--out)."
        ),
    }
    for arguments, message in cases.items():
        code, said = end(monkeypatch, capsys, *arguments)
        assert code == 2, arguments
        assert said.startswith("equipoise: ")
        assert message in said
        assert said.count("\n") == 1
    assert not (run / "figures").exists()
    assert end(monkeypatch, capsys, "nfe")[0] == 2  # no run


def test_success_ends_with_code_0(tmp_path, monkeypatch, capsys):
    assert end(monkeypatch, capsys, "steps", write_run(tmp_path / "run"), "--json") == (0, "")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    for name in [name for name in sys.modules if name.startswith("equipoise.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = plot("nfe", run)
    assert result.exit_code == 2
    assert "figures need the extra [plots]: pip install 'equipoise[plots]'" in result.output


def test_help_names_every_figure():
    text = CliRunner().invoke(cli.app, ["plot", "--help"]).stdout
    assert all(re.search(rf"\b{name}\b", text) for name in [*FIGURES, "all"])
