"""`equipoise ablate`: runs, tables, files, and how it ends. Jobs are done in this process, without one of their own."""

import json

import pytest

from equipoise.train import ablation, ablation_run
from tests.cli.program import COPY, invoke, one_line

ABLATION = """
# A small one.
title = "Copies"
recipe = "copy.toml"
metric = "loss"
seeds = 2
budgets = [3, 6]
settings = ["train.steps=1", "train.save_every=1"]

[variants.base]
what = "as it is"

[variants.wide]
settings = ["model.d_inner=32"]

[[claims]]
text = "wide is worse"
higher = "wide"
than = "base"
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "copy.toml").write_text(COPY)
    (tmp_path / "ablation.toml").write_text(ABLATION)

    class Process:
        def __init__(self, job):
            result = ablation_run.run_job(job.folder)
            self.returncode = 0 if result else 130
            self.stdin = type("Pipe", (), {"close": lambda self: None})()

        def poll(self):
            return self.returncode

    monkeypatch.setattr(ablation, "_start", lambda job, at_once, data_dir: Process(job))
    monkeypatch.setattr(ablation, "_POLL", 0)
    return tmp_path / "ablation.toml"


def test_variants_are_trained_scored_and_compared(file, tmp_path):
    out = tmp_path / "out"
    result = invoke("ablate", file, "--out", out, "--jobs", 2)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == "4 runs, 0 of them done"
    assert result.stdout.splitlines()[0] == "Copies"
    assert f"written: {out / 'ablation.md'}\n" in result.stdout
    record = json.loads((out / "ablation.json").read_text())
    assert list(record["variants"]) == ["base", "wide"]
    assert [run["seed"] for run in record["variants"]["wide"]["runs"]] == [0, 1]
    assert record["claims"][0]["verdict"] in ("confirmed", "contradicted", "undecided")
    again = json.loads(invoke("ablate", file, "--out", out, "--jobs", 0, "--json").stdout)
    assert again["variants"] == record["variants"]
    assert again["interrupted"] is None
    assert str(out / "ablation.json") in again["files"]


def test_some_variants_and_seeds(file, tmp_path):
    options = ("--out", tmp_path / "out", "--variant", "wide", "--seeds", 1, "--minutes", 5, "--json")
    record = json.loads(invoke("ablate", file, *options).stdout)
    assert list(record["variants"]) == ["wide"]
    assert len(record["variants"]["wide"]["runs"]) == 1
    job = json.loads((tmp_path / "out" / "wide" / "seed-0" / "job.json").read_text())
    assert job["recipe"]["train"]["minutes"] == 5.0


def test_what_is_missing_is_said(file, tmp_path):
    result = invoke("ablate", file, "--out", tmp_path / "out", "--jobs", 0)
    assert result.exit_code == 0
    assert "missing: base, seed 0: not done\n" in result.stdout
    assert not (tmp_path / "out" / "ablation.png").exists()


def test_a_failed_run_makes_the_command_fail(file, tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "_start", lambda job, at_once, data_dir: Failed(job))
    result = invoke("ablate", file, "--out", tmp_path / "out", "--seeds", 1)
    assert result.exit_code == 1
    assert "warning: base, seed 0 failed: it broke (" in result.stderr
    assert "missing: base, seed 0: it broke" in result.stdout


class Failed:
    """A process that ended badly."""

    returncode, stdin = 1, type("Pipe", (), {"close": lambda self: None})()

    def __init__(self, job):
        job.folder.with_suffix(".log").write_text("Traceback ...\nit broke\n")

    def poll(self):
        return self.returncode


def test_missing_data_end_it_before_any_job(file, tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(ablation, "_start", lambda *_: pytest.fail("nothing should be begun"))
    task = 'task={name="classification", data="cifar10"}'
    (tmp_path / "data").mkdir()
    options = ("--out", tmp_path / "out", "--data-dir", tmp_path / "data", "--set", task)
    code, shown, error = run_main("ablate", file, *options)
    assert (code, shown) == (2, "")
    assert str(tmp_path / "data") in one_line(error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ABLATION.replace("metric", "metrik"), "unknown key or section 'metrik'"),
        (ABLATION.replace('than = "base"', 'than = "bass"'), "unknown variant 'bass'; did you mean 'base'"),
        (ABLATION.replace("copy.toml", "cpy.toml"), "did you mean"),
        (ABLATION.replace("d_inner=32", "d_inner"), "not of the form section.key=value"),
    ],
)
def test_a_file_that_cannot_be_used_ends_with_one_line(file, tmp_path, run_main, text, words):
    file.write_text(text)
    code, _, error = run_main("ablate", file, "--out", tmp_path / "out")
    assert code == 2
    assert words in one_line(error)
    assert not (tmp_path / "out").exists()
