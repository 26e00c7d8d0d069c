"""`equipoise list`, and how tables are shown."""

import json
import re
import sys
from pathlib import Path

import pytest

from equipoise.adjoints import ADJOINTS
from equipoise.cli import output
from equipoise.data.images import IMAGES
from equipoise.models import MODELS
from equipoise.plots import FIGURES
from equipoise.solvers import SOLVERS
from equipoise.tasks import TASKS
from tests.cli.program import invoke, one_line

ROOT = Path(__file__).parents[2]


def test_everything_that_can_be_named_is_listed():
    record = json.loads(invoke("list", "--json").stdout)
    kinds = {"models", "tasks", "solvers", "adjoints", "corpora", "images", "recipes", "ablations", "hyper"}
    assert set(record) == kinds | {"figures", "benchmarks"}
    assert list(record["models"]) == sorted(MODELS)
    assert list(record["tasks"]) == sorted(TASKS)
    assert (list(record["solvers"]), list(record["adjoints"])) == (sorted(SOLVERS), sorted(ADJOINTS))
    assert {"embedded", "ptb"} <= set(record["corpora"])
    assert list(record["images"]) == sorted(IMAGES)
    assert {Path(path).name for path in record["ablations"]} >= {"digits.toml", "mdeq_tiny.toml"}
    assert set(record["figures"]) == set(FIGURES)
    assert all(text for described in record.values() for text in described.values())


def test_descriptions_are_first_lines(monkeypatch):
    monkeypatch.chdir(ROOT)
    record = json.loads(invoke("list", "--json").stdout)
    assert record["models"]["lstm_ptb"] == MODELS["lstm_ptb"].__doc__.splitlines()[0]
    first = (ROOT / "recipes" / "copy_memory.toml").read_text().splitlines()[0]
    assert f"# {record['recipes']['recipes/copy_memory.toml']}" == first


def test_recipes_of_the_working_folder_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = json.loads(invoke("list", "recipes", "--json").stdout)["recipes"]
    assert str(ROOT / "recipes" / "copy_memory.toml") in shipped
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.toml").write_text("\n# Of my own.\n[task]\n")
    assert json.loads(invoke("list", "recipes", "--json").stdout) == {"recipes": {"recipes/mine.toml": "Of my own."}}


def test_one_kind_and_a_pattern(run_main):
    record = json.loads(invoke("list", "models", "deq_trellisnet*", "--json").stdout)
    assert list(record["models"]) == [name for name in sorted(MODELS) if name.startswith("deq_trellisnet")]
    code, out, _ = run_main("list", "tasks")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["tasks", "name", *sorted(TASKS)]
    for arguments, words in (
        (("modles",), "did you mean 'models'"),
        (("models", "nothing*"), "nothing among models matches 'nothing*'"),
    ):
        code, _, error = run_main("list", *arguments)
        assert code == 2
        assert words in one_line(error)


def test_tables_are_drawn_at_a_terminal(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    output.table(("name", "count"), [["[a]", 1], ["b", None]], "things")
    drawn = capsys.readouterr().out
    assert "\u2500" in drawn  # a line under the headings
    assert re.search(r"\[a\]\s+1\b", drawn)
    monkeypatch.setitem(sys.modules, "rich", None)
    output.table(("name", "count"), [["[a]", 1], ["b", None]], "things")
    assert capsys.readouterr().out == "things\n  name  count\n  [a]       1\n  b\n"


def test_numbers_are_not_folded(monkeypatch, capsys):
    """A table of numbers that is wider than the terminal is left plain."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "34")
    output.table(("first", "second", "third", "fourth"), [[1234.56] * 4] * 2)
    row = "1234.56  1234.56  1234.56  1234.56"
    assert capsys.readouterr().out.splitlines()[1:] == [f"  {row}"] * 2
    output.table(("name", "what it is"), [["a", "word " * 20]])
    drawn = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    assert drawn.count("word") == 20
    assert max(len(line) for line in drawn.splitlines()) <= 34


def test_sizes_are_rounded_for_a_person():
    assert [output.size(count) for count in (None, 5, 2048, 3 * 2**20 // 2, 2**31)] == [
        "",
        "5 B",
        "2.00 KiB",
        "1.50 MiB",
        "2.00 GiB",
    ]
