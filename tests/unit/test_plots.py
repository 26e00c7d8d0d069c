"""Figures: the numbers in them are those of the logs, the files are sound and always the same, and errors help."""

import base64
import csv
import io
import json
import math
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import matplotlib
import pytest

from equipoise.plots import (
    FIGURES,
    Chart,
    LogError,
    draw,
    draw_all,
    make_chart,
    open_runs,
    register_figure,
    style,
    svg_text,
    to_base64,
)
from equipoise.train.loop import train
from equipoise.train.tracking import MetricsWriter, read_metrics
from tests.runs import text_recipe

NAMES = ["convergence", "memory", "nfe", "residual", "steps", "time", "training"]
# Tested where what they show is made.
FOREIGN = ("ablation", "benchmark")  # of folders of their own: nothing would write them into a run
OTHERS = ["ablation", "benchmark", "iou", "masks", "pareto", "predictions", "resolutions"]
INSPECTION = {
    "convergence": {
        "picard": {"median": [1.0, 0.5, 0.25], "p95": [1.5, 0.8, 0.5]},
        "anderson": {"median": [1.0, 0.1, 1e-4], "p95": [1.5, 0.2, 1e-3]},
    },
    "steps": {"rtol": 1e-3, "max_steps": 9, "values": [4, 4, 5, 9, 4], "statuses": {"converged": 4, "max_steps": 1}},
    "memory": [
        {"name": "DEQ", "depth": None, "graph": 3_000_000, "history": 1_000_000, "parameters": 5, "gradients": 5},
        {"name": "30 layers", "depth": 30, "graph": 60_000_000, "history": 0, "parameters": 5, "gradients": 5},
    ],
    "time": [
        {"name": "DEQ", "depth": None, "forward": 0.02, "backward": 0.03},
        {"name": "16 layers", "depth": 16, "forward": 0.01, "backward": 0.025},
    ],
}


def solves(step, backward=True):
    one = {"solves": 2, "systems": 8, "nfe": 10.0 - step, "residual_p50": 0.1 / step, "residual_p95": 0.3 / step}
    return {"forward": one, "backward": {**one, "nfe": 20.5 - step} if backward else {}}


def train_line(step, **fields):
    return step, {"train": {"loss": 5.0 - 0.1 * step, "nats": 4.5 - 0.1 * step, **solves(step), **fields}}


def valid_line(step):
    return step, {"valid": {"loss": 4.0 - 0.1 * step, "perplexity": math.exp(4.0 - 0.1 * step)}}


LINES = [(0, {"data": {}, "parameters": 7}), *map(train_line, (1, 2, 3)), valid_line(3), train_line(4), valid_line(4)]


def write_run(folder: Path, lines=LINES, inspection=INSPECTION) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if lines is not None:
        with MetricsWriter(folder / "metrics.jsonl") as log:
            for step, record in lines:
                log.write(step, record)
    if inspection is not None:
        (folder / "inspect.json").write_text(json.dumps(inspection), encoding="utf-8")
    return folder


def table(chart: Chart) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(chart.render("csv").decode())))


def read_table(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def column(rows, name, **where):
    return [float(row[name]) for row in rows if all(row[key] == value for key, value in where.items())]


def texts(chart: Chart) -> str:
    found = [axes.get_title(loc="left") + axes.get_xlabel() + axes.get_ylabel() for axes in chart.figure.axes]
    return "\n".join([*found, *(text.get_text() for legend in chart.figure.legends for text in legend.get_texts())])


@pytest.fixture
def without_pictures(monkeypatch):
    """Tables only, where the pictures are not the point: each takes some tenths of a second."""
    monkeypatch.setattr(style, "render", lambda *_: b"")


# The numbers


def test_training_shows_what_was_logged(tmp_path):
    chart = make_chart("training", [write_run(tmp_path / "run")])
    rows = table(chart)
    assert column(rows, "loss", split="train") == [4.5 - 0.1 * step for step in (1, 2, 3, 4)]  # without penalties
    assert column(rows, "loss", split="valid") == [4.0 - 0.1 * step for step in (3, 4)]
    assert column(rows, "perplexity", split="valid") == [math.exp(4.0 - 0.1 * step) for step in (3, 4)]
    assert {row["perplexity"] for row in rows if row["split"] == "train"} == {""}
    left, right = chart.figure.axes
    drawn = [list(zip(*line.get_data(), strict=True)) for line in left.get_lines()]
    assert drawn == [
        [(int(row["step"]), float(row["loss"])) for row in rows if row["split"] == split]
        for split in ("train", "valid")
    ]
    assert right.get_ylabel() == "perplexity"
    for place, label in zip(right.get_yticks(), right.get_yticklabels(), strict=True):
        assert math.exp(place) == pytest.approx(float(label.get_text()), rel=1e-5)
    assert f"best {math.exp(3.6):.4g}" in texts(chart)


def test_training_without_perplexity_or_penalty(tmp_path):
    lines = [(step, {"train": {"loss": 10.0**-step}}) for step in (1, 2, 3)] + [(3, {"valid": {"loss": 0.002}})]
    chart = make_chart("training", [write_run(tmp_path / "run", lines)])
    (axes,) = chart.figure.axes
    assert axes.get_yscale() == "log"
    assert column(table(chart), "loss") == [0.1, 0.01, 0.001, 0.002]
    assert "best 0.002" in texts(chart)


def test_runs_of_other_tasks_are_compared_by_loss(tmp_path):
    runs = [write_run(tmp_path / "text"), write_run(tmp_path / "copy", [(1, {"train": {"loss": 3.0}})])]
    chart = make_chart("training", runs)
    assert len(chart.figure.axes) == 1
    assert chart.figure.axes[0].get_ylabel() == "loss"
    assert {row["perplexity"] for row in table(chart)} == {""}


def test_residual_and_nfe_show_what_was_logged(tmp_path):
    run = write_run(tmp_path / "run")
    rows = table(make_chart("residual", [run]))
    for direction in ("forward", "backward"):
        assert column(rows, "residual_p50", solve=direction) == [0.1 / step for step in (1, 2, 3, 4)]
        assert column(rows, "residual_p95", solve=direction) == [0.3 / step for step in (1, 2, 3, 4)]
    rows = table(make_chart("nfe", [run]))
    assert column(rows, "nfe", solve="forward") == [10.0 - step for step in (1, 2, 3, 4)]
    assert column(rows, "nfe", solve="backward") == [20.5 - step for step in (1, 2, 3, 4)]
    assert column(rows, "step", solve="forward") == [1, 2, 3, 4]


def test_an_adjoint_without_a_solve_has_no_panel(tmp_path):
    lines = [train_line(step, **solves(step, backward=False)) for step in (1, 2)]
    run = write_run(tmp_path / "run", lines)
    chart = make_chart("residual", [run])
    assert [axes.get_ylabel() for axes in chart.figure.axes] == ["forward residual"]
    assert {row["solve"] for row in table(make_chart("nfe", [run]))} == {"forward"}


def test_convergence_shows_what_was_measured(tmp_path):
    chart = make_chart("convergence", [write_run(tmp_path / "run")])
    rows = table(chart)
    for solver, curves in INSPECTION["convergence"].items():
        assert column(rows, "step", solver=solver) == [0, 1, 2]
        assert column(rows, "median", solver=solver) == curves["median"]
        assert column(rows, "p95", solver=solver) == curves["p95"]
    median, quantile = chart.figure.axes[0].get_lines()[:2]
    assert list(median.get_ydata()) == [1.0, 0.5, 0.25]
    assert list(quantile.get_ydata()) == [1.5, 0.8, 0.5]
    assert quantile.get_linewidth() < median.get_linewidth()
    assert quantile.get_color() == median.get_color()


def test_steps_counts_systems_and_says_the_settings(tmp_path):
    chart = make_chart("steps", [write_run(tmp_path / "run")])
    expected = Counter(INSPECTION["steps"]["values"])
    assert {int(row["steps"]): int(row["systems"]) for row in table(chart)} == expected
    bars = chart.figure.axes[0].patches
    assert {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in bars} == expected
    assert "rtol 0.001, budget 9, 4 of 5 converged" in texts(chart)


def test_steps_of_one_length_do_not_fill_the_panel(tmp_path):
    inspection = {"steps": {"rtol": 0.1, "max_steps": 6, "values": [6] * 8, "statuses": {"max_steps": 8}}}
    chart = make_chart("steps", [write_run(tmp_path / "run", None, inspection)])
    (axes,) = chart.figure.axes
    low, high = axes.get_xlim()
    assert high - low > 10
    assert all(tick == round(tick) for tick in axes.get_xticks())
    assert "budget 6, 0 of 8 converged" in texts(chart)


def test_bars_stack_what_was_measured(tmp_path):
    run = write_run(tmp_path / "run")
    for figure, unit, scale, parts in (
        ("memory", "bytes", 2**20, ("graph", "history")),
        ("time", "seconds", 1e-3, ("forward", "backward")),
    ):
        chart = make_chart(figure, [run])
        rows = table(chart)
        assert [row["name"] for row in rows] == [row["name"] for row in INSPECTION[figure]]
        assert [row["depth"] for row in rows] == ["", str(INSPECTION[figure][1]["depth"])]
        for part in parts:
            assert column(rows, f"{part}_{unit}") == [row[part] for row in INSPECTION[figure]]
        first, second = chart.figure.axes[0].containers
        widths = [[bar.get_width() for bar in container] for container in (first, second)]
        assert widths == [pytest.approx([row[part] / scale for row in INSPECTION[figure]]) for part in parts]
        assert [bar.get_x() for bar in second] == pytest.approx(widths[0])  # on top of the first, not over it
    assert "MiB" in texts(make_chart("memory", [run]))
    assert "ms" in texts(make_chart("time", [run]))


def test_several_runs_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("one", "two", "three")]
    for figure, panels in {"nfe": 1, "residual": 2, "convergence": 3, "steps": 3, "memory": 3, "time": 3}.items():
        chart = make_chart(figure, runs)
        assert len(chart.figure.axes) == panels
        assert all(name in texts(chart) for name in ("one", "two", "three"))
        assert list(dict.fromkeys(row["run"] for row in table(chart))) == ["one", "two", "three"]
    limits = {axes.get_xlim() for axes in make_chart("memory", runs).figure.axes}
    assert len(limits) == 1  # bars of equal length are equal


def test_a_run_resumed_twice_is_one_curve(tmp_path):
    """A log that was not cut back: two resumptions, the first from step 2, the second from step 3."""
    lines = [*map(train_line, (1, 2, 3, 4)), valid_line(4)]
    lines += [train_line(3, nats=1.0), train_line(4, nats=1.0), train_line(5, nats=1.0)]
    lines += [train_line(4, nats=0.5), train_line(6, nats=0.5)]  # step 5 was not logged this time
    rows = table(make_chart("training", [write_run(tmp_path / "run", lines)]))
    points = [(int(row["step"]), float(row["loss"])) for row in rows]
    assert points == [(1, 4.4), (2, 4.3), (3, 1.0), (4, 0.5), (6, 0.5)]


def test_a_real_run(tmp_path, without_pictures):
    run = tmp_path / "run"
    train(text_recipe(tmp_path / "corpus", "train.steps=4"), run)
    train(text_recipe(tmp_path / "corpus", "train.steps=6"), run, resume=True)
    drawn = draw_all([run], tmp_path / "figures")
    assert {file.stem for file in drawn.files} == {"training", "residual", "nfe"}
    records = read_metrics(run / "metrics.jsonl")
    rows = read_table(tmp_path / "figures" / "training.csv")
    assert column(rows, "loss", split="train") == [r["train"]["nats"] for r in records if "train" in r]
    assert column(rows, "loss", split="valid") == [r["valid"]["loss"] for r in records if "valid" in r]
    rows = read_table(tmp_path / "figures" / "nfe.csv")
    assert column(rows, "nfe", solve="backward") == [r["train"]["backward"]["nfe"] for r in records if "train" in r]
    assert column(rows, "step", solve="forward") == [2, 4, 6]


# What cannot be drawn


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", None])
def test_values_that_are_not_finite(tmp_path, value):
    number = math.nan if value is None else float(value)
    bad = {"nats": number, "forward": {**solves(1)["forward"], "residual_p50": number, "nfe": number}}
    inspection = json.loads(json.dumps(INSPECTION))
    inspection["convergence"]["picard"]["median"][1] = value
    inspection["steps"]["values"][0] = value
    inspection["memory"][0]["graph"] = value
    inspection["time"][1]["backward"] = value
    run = write_run(tmp_path / "run", [train_line(1), train_line(2, **bad), train_line(3)], inspection)
    for name in NAMES:
        chart = make_chart(name, [run])
        assert "1 value not drawn: not finite" in texts(chart), name
        if value == "inf":
            assert chart.render("png")
    loss = column(table(make_chart("training", [run])), "loss")
    assert repr(loss) == repr([4.4, number, 4.2])  # the table hides nothing


def test_a_series_without_any_finite_value(tmp_path):
    lines = [train_line(step, nats=math.nan, forward={**solves(1)["forward"], "residual_p50": 0.0}) for step in (1, 2)]
    inspection = {**INSPECTION, "convergence": {"picard": {"median": [], "p95": []}, "broyden": {"median": [None]}}}
    run = write_run(tmp_path / "run", lines, inspection)
    for name in ("training", "residual", "convergence"):
        chart = make_chart(name, [run])
        assert "not drawn" in texts(chart)
        assert chart.render("svg")


def test_missing_logs_say_what_writes_them(tmp_path):
    bare = write_run(tmp_path / "bare", lines=None, inspection=None)
    with pytest.raises(LogError, match=r"bare/metrics.jsonl is missing; `equipoise train RECIPE --out .*bare` writes"):
        make_chart("training", [bare])
    with pytest.raises(LogError, match=r"bare/inspect.json is missing; `equipoise inspect .*bare` writes it"):
        make_chart("memory", [bare])
    young = write_run(tmp_path / "young", LINES[:1], {"memory": [], "time": None, "steps": {}, "convergence": 3})
    with pytest.raises(LogError, match="has no training record yet"):
        make_chart("training", [young])
    for section in ("memory", "time", "steps", "convergence"):
        with pytest.raises(
            LogError, match=f"inspect.json has no '{section}': .*; `equipoise inspect .*` writes it anew"
        ):
            make_chart(section, [young])
    (young / "inspect.json").write_text("{")
    with pytest.raises(LogError, match=r"inspect.json is not JSON"):
        make_chart("memory", [young])


def test_other_errors(tmp_path):
    run = write_run(tmp_path / "run", [(1, {"train": {"loss": 1.0, "forward": {}, "backward": {}}})])
    with pytest.raises(LogError, match="solves for no equilibrium"):
        make_chart("nfe", [run])
    with pytest.raises(FileNotFoundError, match=r"no run at .*nowhere; expected the folder of a run"):
        make_chart("training", [run, tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="unknown figure 'residuals'; did you mean 'residual'"):
        make_chart("residuals", [run])
    with pytest.raises(LogError, match="expected a number in the logs, got 'many'"):
        make_chart("training", [write_run(tmp_path / "word", [(1, {"train": {"loss": "many"}})])])
    with pytest.raises(ValueError, match="unknown kind of file 'pdf'"):
        to_base64(make_chart("training", [run]), "pdf")
    with pytest.raises(ValueError, match="a row has 1 values for the 2 columns"):
        Chart("x", make_chart("training", [run]).figure, ("a", "b"), [(1,)])


def test_all_draws_what_there_is_and_says_what_is_missing(tmp_path, without_pictures):
    whole, part = write_run(tmp_path / "whole"), write_run(tmp_path / "part", inspection=None)
    drawn = draw_all([part, whole], tmp_path / "out")
    assert sorted(file.name for file in drawn.files) == sorted(f"{n}.{k}" for n in NAMES for k in ("png", "svg", "csv"))
    inspected = ["convergence", "memory", "steps", "time"]
    assert sorted(drawn.left_out) == sorted(inspected + [name for name in OTHERS if name not in FOREIGN])
    assert all("part/inspect.json is missing" in reason for name in inspected for reason in drawn.left_out[name])
    assert "whole" in (tmp_path / "out" / "memory.csv").read_text()
    assert draw_all([write_run(tmp_path / "none", None, None)], tmp_path / "nothing").files == []
    assert not (tmp_path / "nothing").exists()


# Files


def test_the_registry_is_what_the_tests_cover():
    assert sorted(FIGURES) == sorted(NAMES + OTHERS)


@pytest.mark.parametrize("name", NAMES)
def test_files_are_sound_and_always_the_same(tmp_path, name):
    run = write_run(tmp_path / "run")
    files = draw(name, [run], tmp_path / "a")
    assert [file.name for file in files] == [f"{name}.{kind}" for kind in ("png", "svg", "csv")]
    png, svg, _ = (file.read_bytes() for file in files)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width == 960
    assert 300 < height < 1600
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert b"dc:date" not in svg
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "savefig.dpi": 10}):  # a user's own taste
        again = draw(name, [run], tmp_path / "b")
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]
    assert make_chart(name, [run]).render("svg") == svg  # whatever was rendered before


@pytest.mark.slow
def test_another_process_draws_the_same_without_pyplot(tmp_path):
    run = write_run(tmp_path / "run")
    files = draw("convergence", [run], tmp_path / "a")
    code = "import sys; from equipoise.plots import draw; draw('convergence', [sys.argv[1]], sys.argv[2])"
    code += "; sys.exit('matplotlib.pyplot' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(run), str(tmp_path / "b")], check=True)
    assert [file.read_bytes() for file in files] == [(tmp_path / "b" / file.name).read_bytes() for file in files]


def test_tables_have_plain_line_ends_and_exact_numbers(tmp_path):
    lines = [(1, {"train": {"loss": 0.1 + 0.2}}), (2, {"train": {"loss": 5e-324}})]
    chart = make_chart("training", [write_run(tmp_path / "a,b", lines)])
    expected = 'run,split,step,loss,perplexity\n"a,b",train,1,0.30000000000000004,\n"a,b",train,2,5e-324,\n'
    assert chart.render("csv") == expected.encode()


def test_inlined_charts(tmp_path):
    chart = make_chart("time", [write_run(tmp_path / "run")])
    assert base64.b64decode(to_base64(chart)) == chart.render("png")
    assert base64.b64decode(to_base64(chart, "svg")) == chart.render("svg")
    text = svg_text(chart)
    root = ElementTree.fromstring(text)
    assert text.startswith("<svg")
    assert "width" not in root.attrib
    assert root.attrib["viewBox"]
    assert not [element for element in root.iter() if element.tag.endswith(("}metadata", "}style"))]


# Style


def luminance(color: str) -> float:
    """Relative luminance as in the WCAG."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert all(contrast(color, "#FFFFFF") >= 3 for color in style.COLORS)  # WCAG: graphical objects
    assert contrast(style.INK, "#FFFFFF") >= 7  # enhanced, for text
    assert all(contrast(style.INK, fill) >= 3 for fill in style.FILLS)  # edges and hatches


def test_series_differ_without_colour_and_parts_by_hatch():
    samples = [style.sample("x", series) for series in range(35)]
    assert len({(line.get_color(), line.get_marker()) for line in samples}) == 35
    assert len({line.get_marker() for line in samples[:7]}) == 7
    assert len({patch.get_hatch() for patch in style.part_samples(["a", "b"])}) == 2


def test_long_and_odd_names(tmp_path):
    base = "a_long_name_of_a_run_with_settings_"
    assert style.shorten("x" * 28) == "x" * 28
    assert len(style.shorten(base * 2)) == style.LONGEST_LABEL
    assert style.short_labels([base + "1", base + "2"]) == [f"{base[:14]}…{base[-12:]}{end}" for end in "12"]
    numbered = style.short_labels([base + "a" + base, base + "b" + base])
    assert [label[:2] for label in numbered] == ["1:", "2:"]
    assert max(map(len, numbered)) <= style.LONGEST_LABEL
    runs = [write_run(tmp_path / name) for name in ("_hidden", "$x_{$", "50%", base * 3)]
    chart = make_chart("nfe", runs)
    assert chart.render("png")
    assert [row["run"] for row in table(chart)][::8] == ["_hidden", "$x_{$", "50%", base * 3]
    assert "_hidden" in texts(chart)


def test_labels_tell_runs_apart(tmp_path, monkeypatch):
    paths = [write_run(tmp_path / name, LINES) for name in ("a/run", "b/run", "c")]
    assert [run.label for run in open_runs(paths)] == ["a/run", "b/run", "c"]
    assert len(open_runs([paths[0], tmp_path / "b" / ".." / "a" / "run"])) == 1
    monkeypatch.chdir(paths[2])
    assert [run.label for run in open_runs(["."])] == ["c"]


def test_a_metrics_file_is_a_run(tmp_path):
    file = write_run(tmp_path / "run") / "metrics.jsonl"
    kept = file.rename(tmp_path / "lstm.jsonl")
    (run,) = open_runs([kept])
    assert (run.label, run.folder) == ("lstm", tmp_path)
    assert len(table(make_chart("nfe", [kept]))) == 8
    with pytest.raises(LogError, match=r"is a metrics file; 'time' is drawn from inspect.json of a run folder"):
        make_chart("time", [kept])


def test_settings_of_the_user_stay(tmp_path):
    before = dict(matplotlib.rcParams)
    draw("memory", [write_run(tmp_path / "run")], tmp_path / "out")
    assert dict(matplotlib.rcParams) == before


def test_a_new_figure_is_one_function(tmp_path):
    @register_figure("parameters")
    def parameters(runs):
        """How many."""
        figure, (axes,) = style.panels("Parameters", [2.0])
        rows = [(run.label, run.records[0]["parameters"]) for run in runs]
        axes.bar([label for label, _ in rows], [count for _, count in rows])
        return Chart("Parameters", figure, ("run", "parameters"), rows)

    try:
        files = draw("parameters", [write_run(tmp_path / "run")], tmp_path / "out")
        assert files[2].read_text() == "run,parameters\nrun,7\n"
        with pytest.raises(ValueError, match="already taken by parameters"):
            register_figure("parameters")(parameters)
    finally:
        del FIGURES["parameters"]
