"""The table of learned solvers for all kept models: one command, which goes on where it was ended."""

import json
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.training import learned_solvers
from benchmarks.training.learned_solvers import CASES, COLUMNS, MODELS, RECIPES, Bench, Case, main, row
from equipoise.train.hyper_report import REPORT
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


class Kept:
    """A kept model of a few bytes, and a bench on which reports take no time.

    Attributes:
        case: Of the model.
        bench: Where it is measured.
        seen: The weights that each report was made of.
        failing: Whether the next report fails.
    """

    def __init__(self, folder):
        self.model, self.case = folder / "models" / "mine", Case("mine", "--most 1")
        self.bench, self.seen, self.failing = Bench(folder / "out", folder / "work"), [], False
        (self.model / "hyper").mkdir(parents=True)
        (self.model / "vocabulary.json").write_text("[]", encoding="utf-8")
        self.put(b"first")

    def put(self, weights, config="{}"):
        """Replace the model."""
        (self.model / "model.safetensors").write_bytes(weights)
        (self.model / "config.json").write_text(config, encoding="utf-8")

    def report(self, whole, **_):
        """What `equipoise hyper` does."""
        _, _, _, _, run, _, out = whole[:7]
        self.seen.append((Path(run) / "model.safetensors").read_bytes())
        if self.failing:
            raise subprocess.CalledProcessError(1, whole)
        Path(out).mkdir(parents=True, exist_ok=True)
        record = {"complete": True, "command": shlex.join(["equipoise", *whole[3:]])}
        (Path(out) / REPORT).write_text(json.dumps(record), encoding="utf-8")

    def measure(self):
        """Measure the case; whether its report is complete then."""
        self.bench.measure("mine", self.case, None)
        return self.complete

    @property
    def complete(self):
        return self.bench.complete("mine", self.case)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    kept = Kept(tmp_path)
    monkeypatch.setattr(learned_solvers, "MODELS", kept.model.parent)
    monkeypatch.setattr(learned_solvers.subprocess, "run", kept.report)
    return kept


def test_a_model_that_was_replaced_is_measured_again(kept):
    copied = kept.bench.work / "mine"
    assert kept.measure()
    (copied / "hyper" / "fit.json").write_text("{}", encoding="utf-8")
    assert kept.measure()
    assert (copied / "hyper" / "fit.json").is_file()  # what was fitted to the same model stays
    kept.put(b"second")
    assert not kept.complete
    assert kept.measure()
    assert kept.seen == [b"first", b"first", b"second"]
    assert not (copied / "hyper" / "fit.json").exists()
    assert [path.name for path in kept.bench.work.iterdir()] == ["mine"]
    kept.put(b"second", config='{"solver": {}}')
    assert not kept.complete
    assert kept.measure()


def test_a_report_is_complete_for_the_model_that_it_was_made_of(kept):
    assert kept.measure()
    kept.put(b"second")
    kept.failing = True
    assert not kept.measure()
    kept.put(b"first")  # the report may be of either
    assert not kept.complete
    kept.failing = False
    assert kept.measure()
    (kept.bench.out / "mine" / learned_solvers.DIGEST).unlink()  # as of an older report
    assert not kept.complete
    assert kept.measure()
    for path in (kept.model, kept.bench.work):
        shutil.rmtree(path)
    assert kept.complete  # nothing there says otherwise


def test_a_copy_that_is_cut_off_is_made_again(kept, monkeypatch):
    def cut_off(source, target):
        Path(target).mkdir(parents=True)
        shutil.copy(Path(source) / "model.safetensors", target)
        raise KeyboardInterrupt

    with monkeypatch.context() as change:
        change.setattr(shutil, "copytree", cut_off)
        with pytest.raises(KeyboardInterrupt):
            kept.measure()
        assert not (kept.bench.work / "mine").exists()
        assert kept.seen == []
    assert kept.measure()
    assert (kept.bench.work / "mine" / "vocabulary.json").is_file()
    (kept.bench.work / "mine" / "vocabulary.json").unlink()  # as a copy of former times that was cut off
    assert kept.measure()
    assert (kept.bench.work / "mine" / "vocabulary.json").is_file()


def test_a_model_that_is_trained_anew_is_measured_again(kept):
    case, run = Case("copy_memory", "--most 1", ""), kept.bench.work / "mine"
    kept.case = case
    shutil.copytree(kept.model, run)
    assert kept.measure()
    (run / "model.safetensors").write_bytes(b"trained anew")
    assert not kept.complete
    assert kept.measure()
