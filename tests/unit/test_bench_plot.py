"""The figure of benchmarks, and the command that writes it."""

import csv
import io
import json
import struct

import pytest

from equipoise.bench.harness import Check, Goal, Row, Sample
from equipoise.plots import FIGURES, LogError, draw, make_chart, open_runs
from equipoise.plots.benchmark import case_chart
from tests.cli.program import invoke


def row(name="32x420x32, 64, fp32", factor=1.0):
    made = Row(name, "step", "bare f")
    seconds = {"bare f": 2.0, "anderson, captured": 2.5, "anderson, eager": 6.0, "broyden, captured": 9.0}
    made.values = {k: Sample(v * factor, v * factor, v * factor, 3) for k, v in {**seconds, "torchdeq": 20.0}.items()}
    made.goals = [
        Goal("anderson, captured", "bare f", 1.3),
        Goal("anderson, captured", "torchdeq", 10, faster=True),
        Goal("broyden, captured", "bare f", 2),
    ]
    made.check("broyden, captured", Check(1.0, 1e-3, "the truth"))
    return made.record()


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    record = {"environment": {"threads": 1}, "solver": [row(), row("other", 2.0)], "skewed": [row("third")]}
    (folder / "benchmark.json").write_text(json.dumps(record))
    return folder


def table(chart):
    return list(csv.DictReader(io.StringIO(chart.render("csv").decode())))


def test_bars_are_ratios_and_ticks_are_goals(run):
    chart = case_chart(open_runs([run])[0], "solver")
    axes, _ = chart.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "anderson, captured",
        "anderson, eager",
        "broyden, captured",
        "torchdeq",
    ]
    assert [bar.get_width() for bar in axes.patches] == [1.25, 3.0, 0.0, 10.0]  # nothing for what is wrong
    ticks = [(line.get_xdata()[0], sum(line.get_ydata()) / 2) for line in axes.get_lines()[:-1]]
    # 1.3 over the base; ten times as fast as 10; and that of the candidate that has no ratio.
    assert ticks == [(1.3, 0), (1.0, 0), (2.0, 2)]
    said = [text.get_text().strip() for text in axes.texts]
    assert said == ["1.25, goal missed", "3", "wrong: no ratio", "10"]
    assert axes.get_xlabel() == "time per step, bare f = 1"
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in axes.patches}
    assert len({hatch for _, hatch in looks}) == 2  # told apart without colour


def test_the_table_has_all_numbers(run):
    rows = table(make_chart("benchmark", [run]))
    assert {line["benchmark"] for line in rows} == {"solver", "skewed"}
    first = [line for line in rows if line["shape"] == "32x420x32, 64, fp32"]
    assert [line["ratio"] for line in first] == ["1.0", "1.25", "1.25", "3.0", "", "10.0"]
    assert [(line["goal"], line["goal_over"], line["met"]) for line in first[1:3]] == [
        ("<= 1.3", "bare f", "True"),
        (">= 10", "torchdeq", "False"),
    ]
    assert [line["checked"] for line in first] == ["True", "True", "True", "True", "False", "True"]
    assert {line["measured"] for line in first if line["candidate"] == "torchdeq"} == {"20.0"}


def test_files_are_sound_and_always_the_same(run, tmp_path):
    files = draw("benchmark", [run], tmp_path / "a")
    png = files[0].read_bytes()
    assert struct.unpack(">II", png[16:24])[0] == 960
    assert [file.read_bytes() for file in files] == [f.read_bytes() for f in draw("benchmark", [run], tmp_path / "b")]
    assert "benchmark" in FIGURES


def test_long_names_are_broken(run):
    name = "a very long name of a row, which does not fit in one line of the figure"
    (run / "benchmark.json").write_text(json.dumps({"memory": [row(name)]}))
    (axes,) = make_chart("benchmark", [run]).figure.axes
    title = axes.get_title(loc="left")
    assert title.replace("\n", " ") == name
    assert max(map(len, title.split("\n"))) <= 40


def test_what_is_missing_is_said(run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        LogError, match=r"benchmark.json is missing; `equipoise benchmark CASE --out .*empty` writes it"
    ):
        make_chart("benchmark", [tmp_path / "empty"])
    with pytest.raises(LogError, match="has no 'memory'; `equipoise benchmark memory"):
        case_chart(open_runs([run])[0], "memory")
    (run / "benchmark.json").write_text("[1]")
    with pytest.raises(LogError, match="is not the log of benchmarks"):
        make_chart("benchmark", [run])


def test_the_command_writes_json_and_figure(tmp_path):
    options = ("--out", str(tmp_path), "--shape", "tiny", "--device", "cpu", "--rounds", "1")
    result = invoke("benchmark", "rivals", *options)
    assert result.exit_code == 0, result.output
    assert {f.name for f in tmp_path.iterdir()} == {
        "benchmark.json",
        *(f"benchmark-rivals.{kind}" for kind in ("png", "svg", "csv")),
    }
    assert "torchdiffeq" in result.output
    assert "worst residual" in result.output
    record = json.loads(invoke("benchmark", "rivals", *options, "--json").stdout)
    assert record["case"] == "rivals"
    assert record["rows"][0]["ratios"]["anderson, captured"] == 1.0
