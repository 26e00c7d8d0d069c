"""The table of learned solvers for all kept models: one command, which goes on where it was ended."""

import sys

import pytest

from benchmarks.training import learned_solvers
from benchmarks.training.learned_solvers import CASES, COLUMNS, MODELS, Case, complete, main, row
from tests.cli.program import COPY, train

ARGUMENTS = (
    "--recipe full --steps 3 --unroll 2 --most 1 --at 1 --at 2 --at 4 --set fit.pool=2 --set fit.accept=0.9 "
    "--set solver.hidden=4 --set solver.width=4 --set solver.compressed=4 --set 'fit.stop={rtol=1e-2,max_steps=20}'"
)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Two cases of a copy-memory run; what is called with arguments."""
    model = train(tmp_path, COPY)
    monkeypatch.setattr(learned_solvers, "MODELS", model.parent)
    cases = {name: Case(model.name, ARGUMENTS) for name in ("first", "second")}
    monkeypatch.setattr(learned_solvers, "CASES", cases)

    def called(*arguments):
        places = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        monkeypatch.setattr(sys, "argv", ["learned_solvers", *places, *arguments])
        main()
        return (tmp_path / "out" / "README.md").read_text(encoding="utf-8")

    return called, tmp_path / "out"


def test_models_of_all_cases_are_there():
    assert all((MODELS / case.model / "model.safetensors").is_file() for case in CASES.values())


def test_cases_become_rows_and_are_not_made_again(small, monkeypatch):
    called, out = small
    assert row("first", out / "first") is None
    text = called("--only", "first", "--seeds", "1")
    (line,) = [line for line in text.splitlines() if line.startswith("| [first]")]
    assert line.count("|") == len(COLUMNS) + 1
    assert complete(out / "first")
    assert not complete(out / "second")

    def refused(*_, **__):
        raise AssertionError("it was made before")

    monkeypatch.setattr(learned_solvers, "measure", refused)
    assert called("--only", "first", "--seeds", "1").splitlines()[-3:] == text.splitlines()[-3:]


def test_what_time_does_not_allow_is_left(small):
    called, out = small
    text = called("--seconds", "0.01", "--seeds", "1")
    assert "| [" not in text
    assert not (out / "second").exists()
