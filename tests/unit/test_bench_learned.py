"""The table of learned solvers for all kept models: one command, which goes on where it was ended."""

import json
import shlex
import shutil
import sys
from itertools import pairwise

import pytest

from benchmarks.training import learned_solvers
from benchmarks.training.learned_solvers import CASES, COLUMNS, MODELS, RECIPES, Case, main, row
from equipoise.train.load import read_config
from equipoise.train.recipe import Recipe
from tests.cli.program import COPY, train

ARGUMENTS = (
    "--recipe full --steps 3 --unroll 2 --most 1 --at 1 --at 2 --at 4 --set fit.pool=2 --set fit.accept=0.9 "
    "--set solver.hidden=4 --set solver.width=4 --set solver.compressed=4 --set 'fit.stop={rtol=1e-2,max_steps=20}'"
)
TRAINING = (
    "--set task.length=5 --set task.train_size=64 --set task.test_size=16 --set task.batch_size=8 "
    "--set model.d_model=16 "
    "--set model.heads=2 --set model.d_inner=24 --set train.steps=4 --set train.log_every=2 --set train.save_every=2 "
    "--set train.evaluate_every=4 --set train.threads=1"
)


def settings_in(arguments):
    """What follows each --set."""
    words = shlex.split(arguments)
    return [value for option, value in pairwise(words) if option == "--set"]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A copy-memory run, kept and to be trained; what is called with arguments."""
    model = train(tmp_path, COPY)
    monkeypatch.setattr(learned_solvers, "MODELS", model.parent)
    cases = {"first": Case(model.name, ARGUMENTS), "second": Case("copy_memory", ARGUMENTS, TRAINING)}
    monkeypatch.setattr(learned_solvers, "CASES", cases)

    def called(*arguments):
        places = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        monkeypatch.setattr(sys, "argv", ["learned_solvers", *places, *arguments])
        main()
        return (tmp_path / "out" / "README.md").read_text(encoding="utf-8")

    return called, tmp_path / "out"


def test_models_and_recipes_of_all_cases_are_there():
    for case in CASES.values():
        if case.training is None:
            assert (MODELS / case.model / "model.safetensors").is_file()
        else:
            Recipe.read(RECIPES / f"{case.model}.toml", settings_in(case.training))


def test_cases_become_rows_and_are_not_made_again(small, monkeypatch):
    called, out = small
    assert row("first", out / "first") is None
    text = called("--only", "first", "--seeds", "1")
    (line,) = [line for line in text.splitlines() if line.startswith("| [first]")]
    assert line.count("|") == len(COLUMNS) + 1
    assert "unfinished" not in line

    def refused(*_, **__):
        raise AssertionError("it was made before")

    monkeypatch.setattr(learned_solvers.Bench, "measure", refused)
    assert called("--only", "first", "--seeds", "1").splitlines()[-3:] == text.splitlines()[-3:]
    for others in (("--seeds", "2"), ("--seeds", "1", "--add", "--most 2")):
        with pytest.raises(AssertionError, match="made before"):
            called("--only", "first", *others)
    record = json.loads((out / "first" / "report.json").read_text(encoding="utf-8"))
    (out / "first" / "report.json").write_text(json.dumps({**record, "complete": False}), encoding="utf-8")
    with pytest.raises(AssertionError, match="made before"):
        called("--only", "first", "--seeds", "1")


def test_a_case_that_fails_keeps_no_other_from_being_measured(small, monkeypatch):
    called, out = small
    broken = {"broken": Case("copy_memory", "--recipe no_such_recipe", TRAINING), **learned_solvers.CASES}
    monkeypatch.setattr(learned_solvers, "CASES", broken)
    with pytest.raises(SystemExit, match="failed: broken"):
        called("--only", "broken", "--only", "first", "--seeds", "1")
    assert "| [first]" in (out / "README.md").read_text(encoding="utf-8")


def test_a_model_that_is_not_kept_is_trained_once(small, tmp_path):
    called, out = small
    assert "| [second]" in called("--only", "second", "--seeds", "1")
    trained = tmp_path / "work" / "second"
    log = (trained / "metrics.jsonl").read_bytes()
    assert read_config(trained)["task"]["length"] == 5
    shutil.rmtree(out)
    assert "| [second]" in called("--only", "second", "--seeds", "1")
    assert (trained / "metrics.jsonl").read_bytes() == log


def test_what_time_does_not_allow_is_left(small):
    called, out = small
    text = called("--seconds", "0.01", "--seeds", "1")
    assert "| [" not in text
    assert not (out / "second").exists()
