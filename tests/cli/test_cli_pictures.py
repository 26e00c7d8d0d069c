"""`equipoise evaluate --pictures`, tables of classes, and `equipoise report`."""

import json
import re
import shutil
import sys

import pytest

from tests.cli.program import DIGITS, SHAPES, invoke, one_line, trained_images

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    return trained_images(tmp_path_factory.mktemp("classes") / "run", **DIGITS)


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    return trained_images(tmp_path_factory.mktemp("masks") / "run", **SHAPES)


def test_pictures_are_drawn_beside_the_scores(masks):
    record = json.loads(invoke("evaluate", masks, "--split", "test", "--pictures", 3, "--json").stdout)
    assert record["pictures"] == [
        str(masks / "pictures.npz"),
        *(str(masks / "figures" / f"masks.{kind}") for kind in ("png", "svg", "csv")),
    ]
    table = (masks / "figures" / "masks.csv").read_text().splitlines()
    assert [line.split(",")[1:3] for line in table[1:]] == [["test", "0"], ["test", "3"], ["test", "6"]]
    assert record["results"][0]["miou"] >= 0
    assert "pictures" not in json.loads(invoke("evaluate", masks, "--json").stdout)


def test_pictures_of_classes(classes):
    shown = invoke("evaluate", classes, "--pictures", 2).stdout
    assert f"written: {classes / 'figures' / 'predictions.png'}\n" in shown
    table = (classes / "figures" / "predictions.csv").read_text().splitlines()
    assert table[0] == "run,split,sample,class,prediction,probability"
    assert [line.split(",")[1:3] for line in table[1:]] == [["valid", "0"], ["valid", "5"]]


def test_classes_have_a_table_of_their_own(masks):
    record = json.loads(invoke("evaluate", masks, "--steps", 2, "--steps", 4, "--json").stdout)
    shown = invoke("evaluate", masks, "--steps", 2, "--steps", 4).stdout
    head, *rows = shown[shown.index("intersection over union by class\n") :].splitlines()[1:]
    assert re.split(r"\s{2,}", head.strip()) == ["class", "steps 2", "steps 4"]
    named = {row.split()[0]: row.split()[1:] for row in rows if not row.startswith("written")}
    expected = {key[4:] for result in record["results"] for key in result if key.startswith("iou_")}
    assert set(named) == expected
    for name, values in named.items():
        for value, result in zip(values, record["results"], strict=True):
            assert float(value) == pytest.approx(result[f"iou_{name}"], abs=5e-5)
    assert " iou_" not in shown


@pytest.mark.parametrize(("count", "words"), [("0", "--pictures"), ("2", "pictures are for the tasks")])
def test_pictures_that_cannot_be(copy_run, run_main, count, words):
    code, _, error = run_main("evaluate", copy_run, "--pictures", count)
    assert code == 2
    assert words in error


@pytest.mark.parametrize("option", [("--solver", "picard"), ("--guard",)])
def test_pictures_by_another_solver_are_refused(masks, run_main, option):
    code, _, error = run_main("evaluate", masks, "--pictures", 2, *option)
    assert code == 2
    words = f"{option[0]} cannot be used here: pictures are of the model with its own solver"
    assert words in one_line(error)


def test_pictures_need_matplotlib(classes, run_main, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("equipoise.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, error = run_main("evaluate", classes, "--pictures", "2")
    assert (code, out) == (2, "")
    assert "pip install 'equipoise[plots]'" in one_line(error)


@pytest.fixture
def few_figures(monkeypatch):
    """Each takes some tenths of a second."""
    from equipoise.plots import FIGURES

    few = {name: FIGURES[name] for name in ("ablation", "convergence", "iou", "masks", "memory", "predictions")}
    monkeypatch.setattr("equipoise.plots.run_report.FIGURES", few)


def test_the_report_shows_scores_and_pictures(masks, tmp_path, few_figures):
    run = shutil.copytree(masks, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    scored = json.loads(invoke("evaluate", run, "--split", "test", "--pictures", 2, "--json").stdout)
    record = json.loads(invoke("report", run, "--json").stdout)
    assert record == {"run": str(run), "file": str(run / "report.html")}
    page = (run / "report.html").read_text()
    for title in ("Image, truth, prediction", "Intersection over union by class"):
        assert f'<img alt="{title}"' in page
    (result,) = scored["results"]
    assert f"<td>miou</td><td>{result['miou']:.5g}</td>" in page
    assert f"<td>IoU: ground</td><td>{result['iou_ground']:.5g}</td>" in page
    assert "<td>model</td><td>mdeq_shapes</td>" in page
    assert "Not shown: convergence, memory." in page
    assert "ablat" not in page  # a run has none, and nothing would write one there
    assert re.search(r"Not shown: predictions\. \S+pictures\.npz has masks", page)


def test_the_newest_scores_come_first(masks, tmp_path, few_figures):
    run = shutil.copytree(masks, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    (run / "eval").mkdir()
    for name in ("valid-20260101T000000Z", "test-20260102T000000Z", "test-20260102T000000Z-2"):
        split = name.split("-")[0]
        (run / "eval" / f"{name}.json").write_text(
            json.dumps({"split": split, "sweep": None, "results": [{"miou": 1}]})
        )
    invoke("report", run, "--out", tmp_path / "page.html")
    found = re.findall(r"<h2>Scores: (.*?)</h2>", (tmp_path / "page.html").read_text())
    days = ("2026-01-02", "2026-01-02", "2026-01-01")
    splits = ("test", "test", "valid")
    assert found == [f"{split}, {day} 00:00:00 UTC" for split, day in zip(splits, days, strict=True)]


def test_scores_in_the_report_say_by_what(copy_run, tmp_path, few_figures):
    """A plain file, one by another solver and settings, and one under a name of somebody's own."""
    run = shutil.copytree(copy_run, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    invoke("evaluate", run, "--solver", "picard", "--guard", "--set", "task.batch_size=4")
    (file,) = (run / "eval").iterdir()
    learned = {**json.loads(file.read_text()), "solver": "HyperAnderson", "asked": "hyper:runs/it", "guard": False}
    file.with_name("valid-mine.json").write_text(json.dumps({**learned, "changes": []}))
    invoke("report", run)
    page = (run / "report.html").read_text()
    checkpoint = "By checkpoint <code>step-000004</code>, solver "
    by = f"{checkpoint}Ladder (Picard, Anderson) with a guard, <code>--set task.batch_size=4</code>."
    assert f"<p>{by}</p>" in page
    assert f"<p>{checkpoint}HyperAnderson (<code>hyper:runs/it</code>).</p>" in page
    assert "<h2>Scores: valid, mine</h2>" in page


def test_a_report_that_cannot_be_written_names_the_file_that_was_asked_for(copy_run, tmp_path, run_main, few_figures):
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").write_text("")
    cases = {
        tmp_path / "runs": f"{tmp_path}/runs is a folder; give a file, e.g. {tmp_path}/runs/report.html.",
        tmp_path / "file" / "x.html": f"{tmp_path}/file/x.html cannot be written (Not a directory); give another file",
    }
    for out, words in cases.items():
        code, _, error = run_main("report", copy_run, "--out", out)
        assert code == 2
        assert words in one_line(error)
        assert ".partial" not in error
    assert list((tmp_path / "runs").iterdir()) == []


def test_no_report_without_a_run(tmp_path, run_main):
    for given, words in ((tmp_path / "nowhere", "no run at"), (tmp_path, "metrics.jsonl is missing")):
        code, _, error = run_main("report", given)
        assert code == 2
        assert words in one_line(error)
