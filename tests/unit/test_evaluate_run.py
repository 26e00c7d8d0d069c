"""Scoring finished runs: sweeps, solvers, precision, and when a number is not an equilibrium's."""

import io
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

from equipoise import Anderson, Broyden, Plan, Stop, override
from equipoise.models import create_model
from equipoise.train.checkpoint import CheckpointError
from equipoise.train.evaluate import Sweep, doubts, score_run, scored_as_it_is, write_scores
from equipoise.train.load import autocast_of, find_checkpoint, load, open_run, read_config
from equipoise.train.loop import evaluate, setup, train
from tests.runs import COPY, evaluate_run, recipe, text_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run; not to be changed."""
    out = tmp_path_factory.mktemp("evaluate") / "run"
    train(recipe(COPY), out)
    return out


# Sweeps


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("stop.max_steps=1:4", "stop.max_steps", (1, 2, 3, 4)),
        ("stop.max_steps=1:20:6", "stop.max_steps", (1, 7, 13, 19)),
        ("stop.max_steps=2,5,10", "stop.max_steps", (2, 5, 10)),
        ("stop.max_steps=1:3,8", "stop.max_steps", (1, 2, 3, 8)),
        ("stop.max_steps=7", "stop.max_steps", (7,)),
        (" stop.rtol = 1e-1,1e-2", "stop.rtol ", (0.1, 0.01)),
        ("solver.memory=2:4:2", "solver.memory", (2, 4)),
    ],
)
def test_sweeps_are_read(text, key, values):
    sweep = Sweep.parse(text)
    assert sweep.key == key.strip()
    assert sweep.values == values
    assert [type(value) for value in sweep.values] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_steps=1:3", r"not of the form part.setting=values, e.g. stop.max_steps=1:20"),
        ("stop.max_steps", "not of the form"),
        ("stop.=3", "not of the form"),
        ("stp.max_steps=3", "unknown part of a sweep 'stp'; did you mean 'stop'"),
        ("stop.max_steps=", "'' is neither a number nor a range"),
        ("stop.max_steps=1:x", "'1:x' is neither a number nor a range"),
        ("stop.max_steps=9:1", "'9:1' ends before it begins; write 1:9"),
        ("stop.max_steps=0,4", "stop.max_steps must be an integer of at least 1, got 0"),
        ("stop.max_steps=1:9:0", "'1:9:0' is not a range"),
        ("stop.max_steps=1:9:2:2", "'1:9:2:2' is not a range"),
    ],
)
def test_sweeps_that_cannot_be_read(text, words):
    with pytest.raises(ValueError, match=words):
        Sweep.parse(text)


def test_a_sweep_changes_one_setting():
    plan = Plan(stop=Stop(rtol=1e-3, max_steps=30, check_every=4))
    assert Sweep.parse("stop.max_steps=2").change(plan, 2) == {"stop": Stop(rtol=1e-3, max_steps=2, check_every=2)}
    assert Sweep.parse("stop.rtol=0.1").change(plan, 0.1)["stop"].rtol == 0.1
    assert Sweep.parse("solver.memory=3").change(plan, 3)["solver"].memory == 3
    with pytest.raises(ValueError, match=r"unknown setting of Anderson 'memry'; did you mean 'memory'"):
        Sweep.parse("solver.memry=3").change(plan, 3)


# Scores


def test_points_of_a_sweep_are_what_an_override_gives(run):
    opened = open_run(run, "valid")
    expected = []
    for steps in (1, 3, 5):
        with override(opened.model, solver=Broyden(), stop=Stop(rtol=1e-3, max_steps=steps)):
            expected.append(evaluate(opened.task, opened.model, opened.splits, "valid")["loss"])
    record = score_run(run, sweep=Sweep.parse("stop.max_steps=1:5:2"), solver="broyden")
    assert [result["loss"] for result in record["results"]] == pytest.approx(expected, rel=1e-6)
    assert [result["steps"] for result in record["results"]] == [1, 3, 5]
    assert [result["solve"]["nfe"] for result in record["results"]] == [1, 3, 5]
    assert (record["solver"], record["sweep"], record["metric"]) == ("Broyden", "stop.max_steps", "loss")
    assert all(result["seconds"] > 0 for result in record["results"])


@pytest.mark.parametrize("terminal", [True, False])
def test_batches_of_a_single_score_are_counted_to_a_person(run, monkeypatch, terminal):
    shown = io.StringIO()
    shown.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", shown)
    score_run(run)
    assert ("0batch" in shown.getvalue()) == terminal
    assert bool(shown.getvalue()) == terminal


def test_another_setting_is_swept(run):
    loose, tight = evaluate_run(run, sweep=Sweep.parse("stop.rtol=0.5,1e-6"))
    assert (loose["stop.rtol"], tight["stop.rtol"]) == (0.5, 1e-6)
    assert loose["steps"] is tight["steps"] is None
    assert loose["solve"]["steps_p95"] < tight["solve"]["steps_p95"] == 6


def test_a_record_says_what_was_scored(run):
    record = score_run(run)
    assert (record["run"], record["checkpoint"]) == (str(run), str(find_checkpoint(run)))
    assert (record["split"], record["solver"], record["sweep"]) == ("valid", "Anderson", None)
    assert record["data"]["length"] == 5
    assert record["environment"]["packages"]["torch"] == str(torch.__version__)


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({}, True),
        ({"steps": [2]}, True),
        ({"solver": "anderson"}, True),  # as it is set
        ({"solver": "picard"}, False),
        ({"guard": True, "solver": "picard"}, False),
    ],
)
def test_a_record_says_whether_the_solver_is_the_models_own(run, options, own):
    assert score_run(run, **options)["own_solver"] is own


def test_another_solver_of_the_same_kind_is_not_the_models_own(run):
    opened = open_run(run, "valid")
    with override(opened.model, solver=Anderson(memory=2)):
        record = score_run(run, solver="anderson", opened=opened)
    assert (record["solver"], record["own_solver"]) == ("Anderson", False)


def test_of_older_records_kinds_of_solvers_are_known(run):
    """They do not say whose solver it was."""
    kinds = ({}, {"solver": "picard"}, {"guard": True, "solver": "picard"}, {"changes": ["task.length=8"]})
    records = [score_run(run, **options) for options in kinds]
    for record in records:
        del record["own_solver"]
    assert [scored_as_it_is(record, load(run)) for record in records] == [True, False, False, False]


def test_the_task_may_be_changed(run):
    record = score_run(run, changes=["task.length=8"])
    assert (record["data"]["length"], record["changes"]) == (8, ["task.length=8"])


def test_the_best_or_the_newest_checkpoint_is_scored(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "run")
    best = json.loads((out / "checkpoints" / "best.json").read_text())
    (out / "checkpoints" / "best.json").write_text(json.dumps({**best, "checkpoint": "step-000004"}))
    records = {which: score_run(out, which=which) for which in ("best", "latest")}
    assert records["best"]["checkpoint"].endswith("step-000004")
    assert records["latest"]["checkpoint"].endswith("step-000006")
    assert records["best"]["results"][0]["loss"] != records["latest"]["results"][0]["loss"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split": "tset"}, "unknown split 'tset'; did you mean 'test'"),
        ({"solver": "andersn"}, "unknown solver 'andersn'; did you mean 'anderson'"),
        ({"changes": ["model.heads=2"]}, "--set model.heads=2: of a trained model the task may be changed"),
        ({"changes": ["task.lenght=8"]}, "did you mean 'length'"),
        ({"which": "newest"}, "unknown checkpoint 'newest'"),
        ({"steps": [1], "sweep": Sweep.parse("stop.rtol=0.1")}, "give either them or the sweep of stop.rtol"),
    ],
)
def test_wrong_settings_are_refused(run, settings, words):
    with pytest.raises(ValueError, match=words):
        score_run(run, **settings)


def test_an_explicit_model_has_nothing_to_sweep(tmp_path):
    train(recipe(COPY, "model={name='lstm_copy_memory', widths=[8]}", "train.steps=1"), tmp_path)
    record = score_run(tmp_path)
    assert (record["solver"], record["warnings"], record["results"][0]["solve"]) == (None, [], {})
    for settings in ({"solver": "picard"}, {"sweep": Sweep.parse("stop.rtol=0.1")}):
        with pytest.raises(ValueError, match="no equilibrium"):
            score_run(tmp_path, **settings)


# Precision


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_run_is_scored_in_the_precision_of_its_training(tmp_path, precision):
    """Equal to the evaluation in training; the other precision gives another number."""
    outcome = train(recipe(COPY, f"train.precision='{precision}'", "train.steps=4"), tmp_path)
    other = {"bf16": "no", "no": "bf16"}[precision]
    assert evaluate_run(tmp_path)[0]["loss"] == pytest.approx(outcome.metrics["loss"], rel=1e-6)
    opened = open_run(tmp_path, "valid")
    with autocast_of({"train": {"precision": other}}, "cpu"):
        changed = evaluate(opened.task, opened.model, opened.splits, "valid")["loss"]
    assert abs(changed / outcome.metrics["loss"] - 1) > 1e-6


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)]
)
def test_autocast_of_a_configuration(precision, dtype):
    with autocast_of({"train": {"precision": precision}}, torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_without_a_setting_and_with_an_unknown_one():
    with autocast_of({}, "cpu"):
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ValueError, match="unknown precision 'bf61'; did you mean 'bf16'"):
        autocast_of({"train": {"precision": "bf61"}}, "cpu")


# Not an equilibrium


def result(steps, loss, residual):
    return {"steps": steps, "loss": loss, "solve": {"residual_p95": residual}}


def test_agreeing_and_solved_results_are_not_doubted():
    assert doubts([result(10, 1.0, 1e-2), result(20, 1.0099, 1e-4)], "loss", "stop.max_steps") == []
    assert doubts([result(None, 1.0, 5e-2)], "loss") == []
    assert doubts([{"steps": None, "loss": 1.0, "solve": {}}], "loss") == []


def test_large_residuals_are_doubted():
    (text,) = doubts([result(1, 1.0, 0.5), result(2, 1.0, 0.06), result(3, 1.0, 0.04)], "loss", "stop.max_steps")
    assert text.startswith("at stop.max_steps = 1, 2 the relative residual (95th percentile) is up to 5.0e-01")
    assert "not an equilibrium's" in text
    (text,) = doubts([result(None, 1.0, math.nan)], "loss")
    assert text.startswith("the relative residual")


def test_a_metric_that_changes_with_the_budget_is_doubted():
    """Against the best solve: 2.2 is 10 % off, 2.01 is not 1 % off."""
    (text,) = doubts([result(5, 2.2, 2e-2), result(9, 2.01, 1e-3), result(20, 2.0, 1e-4)], "loss", "stop.max_steps")
    assert text.startswith("at stop.max_steps = 5 loss is up to 10.0% off that of the best solve (2.2 beside 2)")
    assert len(doubts([result(1, math.nan, 1e-2), result(2, 1.0, 1e-3)], "loss", "stop.max_steps")) == 1


def test_of_errors_a_hundredth_of_everything_counts():
    few = [{"steps": k, "error": e, "solve": {"residual_p95": r}} for k, e, r in ((12, 0.006, 1e-2), (30, 0.008, 1e-3))]
    assert doubts(few, "error", "stop.max_steps") == []
    few[0]["error"] = 0.02
    (text,) = doubts(few, "error", "stop.max_steps")
    assert "error is up to 1.2 points off that of the best solve (0.02 beside 0.008)" in text


@pytest.mark.parametrize(
    ("metric", "words"), [("miou_error", "2 points off"), ("loss", "0.02 off"), ("perplexity", "0.02 off")]
)
def test_the_best_solve_may_have_no_error_at_all(metric, words):
    """Nothing can be said as a share of nothing."""
    found = [{"steps": k, metric: value, "solve": {"residual_p95": 1 / k}} for k, value in ((100, 0.02), (1000, 0.0))]
    assert f"{metric} is up to {words} that of the best solve (0.02 beside 0)" in doubts(found, metric)[0]


def test_doubts_are_part_of_the_record(run):
    residual, metric = score_run(run, steps=[1, 30])["warnings"]
    assert residual.startswith("at stop.max_steps = 1 the relative residual")
    assert metric.startswith("at stop.max_steps = 1 loss is up to")


# Files


def test_each_scoring_has_a_file_of_its_own(run, tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    record = {**score_run(run), "odd": math.inf}
    paths = [write_scores(tmp_path, record) for _ in range(3)]
    assert [path.name for path in paths] == ["valid-now.json", "valid-now-2.json", "valid-now-3.json"]
    assert sorted(tmp_path.rglob("*.*")) == sorted(paths)
    written = json.loads(paths[0].read_text())
    assert written["odd"] == "inf"
    assert written["results"] == record["results"]


def test_files_of_a_run_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A disk that is full must not leave half of a file in the place of a whole one."""

    def cut_short(path, text, **options):
        write(path, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    (tmp_path / "env.json").write_text('{"threads": 1}')
    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(OSError, match="No space left"):
        setup(recipe(COPY), tmp_path, resume=False)
    assert json.loads((tmp_path / "env.json").read_text()) == {"threads": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["env.json"]


# Folders that are not what they should be


def test_other_data_than_those_of_the_training_are_refused(tmp_path):
    """A token's number would mean another token."""
    train(text_recipe(tmp_path / "mine", "train.steps=1"), tmp_path / "run")
    assert evaluate_run(tmp_path / "run")[0]["perplexity"] > 1
    for path in (tmp_path / "mine").iterdir():
        path.write_text(path.read_text().replace("k", "K"))
    with pytest.raises(ValueError, match=r"another vocabulary.json than \S+run/vocabulary.json"):
        evaluate_run(tmp_path / "run")
    with open(tmp_path / "mine" / "train.txt", "a") as file:
        file.write("xyz\n")
    lonely = shutil.copytree(find_checkpoint(tmp_path / "run"), tmp_path / "lonely")
    with pytest.raises(ValueError, match=r"have 16 kinds of tokens, the model in \S+lonely knows 13"):
        evaluate_run(lonely)


def test_folders_that_are_no_runs_get_a_hint(run, tmp_path):
    shutil.copytree(run, tmp_path / "runs" / "copy")
    for path, words in (
        (tmp_path / "runs" / "copi", r"no such folder; did you mean \S+runs/copy\?"),
        (tmp_path / "nowhere" / "copy", "there is no such folder"),
        (tmp_path / "runs", "runs in it: copy"),
        (tmp_path / "runs" / "copy" / "config.json", r"it is a file; give the folder of the run, e.g. \S+runs/copy\."),
        (tmp_path / "runs" / "copy" / "checkpoints", "neither a checkpoint nor a run"),
    ):
        with pytest.raises(CheckpointError, match=words):
            find_checkpoint(path)


def test_damaged_files_of_a_run_are_named(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "run")
    best = out / "checkpoints" / "best.json"
    best.write_text(json.dumps({"checkpoint": "step-000099"}))
    with pytest.raises(CheckpointError, match=r"points to step-000099, which is not there; the newest .*step-000006"):
        find_checkpoint(out)
    for text in ("{", "[]", '{"step": 3}'):
        best.write_text(text)
        with pytest.raises(CheckpointError, match=r"best.json cannot be read"):
            find_checkpoint(out)
    folder = find_checkpoint(out, "latest")
    for text, words in (
        ("{", r"config.json cannot be read as JSON"),
        ("[]", "does not name a model"),
        ('{"model": {}}', "does not name a model"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        read_config(folder)


def test_weights_of_another_model_are_refused(run, tmp_path):
    folder = shutil.copytree(find_checkpoint(run), tmp_path / "step")
    config = read_config(folder)
    config["model"]["d_inner"] = 20
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"the weights in \S+step do not fit the model of its config.json"):
        load(folder)


def test_an_opened_run_is_ready_to_be_scored(run):
    opened = open_run(run, "test")
    assert not opened.model.training
    assert opened.folder == find_checkpoint(run)
    assert set(opened.splits.held_out) == {"valid", "test"}
    settings = dict(opened.config["model"])
    assert type(create_model(settings.pop("name"), **settings)) is type(opened.model)
