"""A resumed run is an uninterrupted one, bit for bit on one CPU; what cannot be resumed is refused."""

import json
import os
import shutil
import signal

import pytest

from equipoise.tasks import CopyMemoryTask
from equipoise.train.checkpoint import CheckpointError, latest_checkpoint, read_best
from equipoise.train.loop import train
from tests.runs import COPY, TEXT, recipe, text_recipe
from tests.training import lines, same, saved, train_records, with_model

PHASES = (
    "warmup.steps=2",
    "penalty.weight=0.1",
    "penalty.probability=0.5",
    "jitter.low=-2",
    "jitter.high=2",
    "model.dropout=0.1",
    "train.clip.max_norm=0.5",
)
EMA = 'train.averaging={kind="ema", decay=0.5, start=2}'
PLATEAU = "train.plateau={patience=1, threshold=0.9}"  # lowers at the second evaluation, before the interruption
ASGD = 'train.averaging={kind="uniform", start="none"}'
TRELLIS = {"embedding_size": 6, "hidden_size": 8, "dropconnect": 0.2, "dropout_words": 0.1}
XL = {"embedding_size": 8, "heads": 2, "inner_size": 8, "layers": 2, "memory_length": 8}
RESUMED = {
    "copy memory, all phases": (None, PHASES),
    "accumulation, plateau, penalty": ({}, (*PHASES, "train.accumulation=2", PLATEAU, EMA)),
    "a penalty that keeps a residual": (None, (*PHASES, "penalty.keep=1e-3", "train.log_every=1")),
    "average from a plateau on": ({}, (PLATEAU, ASGD)),
    "language model, dropout, memory, EMA": ({}, ("model.dropout=0.1", "model.attention_dropout=0.1", EMA)),
    "trellisnet": ({"name": "deq_trellisnet_small", **TRELLIS}, ("task.activation=1.0", "task.smoothness=1.0")),
    "lstm, SGD": ({"name": "lstm_ptb_small", "widths": [6, 6], "embedding_size": 6}, ("train.optimiser=sgd",)),
    "tcn": ({"name": "tcn_ptb_small", "channels": 6, "embedding_size": 6, "levels": 2, "history": 4}, ()),
    "transformer-xl": ({"name": "transformer_xl_ptb_small", **XL}, ()),
}
"""Model (None: copy memory; empty: the one of `TEXT`) and other settings."""


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, interrupt, case):
    """Weights, optimiser, averages, memory and log, bit for bit; stopped between two evaluations, after five steps."""
    model, overrides = RESUMED[case]
    overrides = (*overrides, "train.steps=6", "train.evaluate_every=2", "train.save_every=3")
    if model is None:
        given = recipe(COPY, *overrides)
    else:
        given = text_recipe(tmp_path / "text", *overrides)
        given = with_model(given, **model) if model else given
    train(given, tmp_path / "whole")
    interrupt(5)
    outcome = train(given, tmp_path / "parts")
    assert (outcome.step, outcome.interrupted) == (5, "a test")
    interrupt.never()
    assert train(given, tmp_path / "parts", resume=True).step == 6
    assert same(saved(tmp_path / "parts"), saved(tmp_path / "whole"))
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert read_best(tmp_path / "parts" / "checkpoints") == read_best(tmp_path / "whole" / "checkpoints")


def test_a_run_stopped_between_two_log_lines_reports_the_same_statistics(tmp_path, interrupt):
    given = recipe(COPY, "train.log_every=4", "train.steps=4")
    train(given, tmp_path / "whole")
    interrupt(3)
    train(given, tmp_path / "parts")
    interrupt.never()
    train(given, tmp_path / "parts", resume=True)
    assert train_records(tmp_path / "whole")[4]["forward"]["solves"] == 4
    assert train_records(tmp_path / "parts") == train_records(tmp_path / "whole")


def test_a_crashed_run_goes_on_from_its_last_checkpoint(tmp_path, monkeypatch):
    """Lines of steps that the checkpoint does not know are taken back."""
    given = recipe(COPY, "train.log_every=1", "train.save_every=2", "train.evaluate_every=6")
    train(given, tmp_path / "whole")
    step = CopyMemoryTask.training_step

    def crash(self, model, batch, carry, number):
        if number == 5:
            raise RuntimeError("the power went")
        return step(self, model, batch, carry, number)

    monkeypatch.setattr(CopyMemoryTask, "training_step", crash)
    with pytest.raises(RuntimeError, match="the power went"):
        train(given, tmp_path / "parts")
    assert max(train_records(tmp_path / "parts")) == 5
    monkeypatch.setattr(CopyMemoryTask, "training_step", step)
    train(given, tmp_path / "parts", resume=True)
    assert same(saved(tmp_path / "parts"), saved(tmp_path / "whole"))
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_a_signal_saves_and_ends_the_run(tmp_path, monkeypatch, capsys):
    step = CopyMemoryTask.training_step
    before = signal.getsignal(signal.SIGINT)

    def signalled(self, model, batch, carry, number):
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, model, batch, carry, number)

    monkeypatch.setattr(CopyMemoryTask, "training_step", signalled)
    outcome = train(recipe(COPY, "train.save_every=100"), tmp_path)
    assert (outcome.step, outcome.interrupted) == (3, "SIGINT")
    assert latest_checkpoint(tmp_path / "checkpoints").name == "step-000003"
    assert capsys.readouterr().err == "SIGINT: saving step 3, then ending.\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_stopped_before_its_first_step_can_be_resumed(tmp_path, interrupt):
    given = recipe(COPY, "train.steps=2")
    interrupt(0)
    assert train(given, tmp_path / "parts").step == 0
    interrupt.never()
    train(given, tmp_path / "parts", resume=True)
    train(given, tmp_path / "whole")
    assert same(saved(tmp_path / "parts"), saved(tmp_path / "whole"))
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_a_finished_run_can_be_made_longer(tmp_path):
    short = recipe(COPY, "train.steps=4")
    train(short, tmp_path / "parts")
    train(recipe(COPY), tmp_path / "parts", resume=True)
    train(recipe(COPY), tmp_path / "whole")
    assert same(saved(tmp_path / "parts"), saved(tmp_path / "whole"))
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "run")
    before = lines(out, timed=True)
    outcome = train(recipe(COPY), out, resume=True)
    assert outcome.step == 6
    assert outcome.best == finished[1].best
    assert lines(out, timed=True) == before


def test_a_checkpoint_that_a_crash_had_set_aside_is_found(finished, tmp_path):
    """Replacing a checkpoint renames the old one first; see `recover_checkpoints`."""
    out = shutil.copytree(finished[0], tmp_path / "run")
    checkpoints = out / "checkpoints"
    shutil.rmtree(checkpoints / "step-000004")
    (checkpoints / "step-000006").rename(checkpoints / ".replaced-step-000006")
    (checkpoints / ".partial-step-000006-x").mkdir()
    assert train(recipe(COPY), out, resume=True).step == 6
    assert latest_checkpoint(checkpoints).name == "step-000006"
    assert not list(checkpoints.glob(".*"))


# What is refused


def test_resuming_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from"):
        train(recipe(COPY), tmp_path, resume=True)


def test_a_refused_resumption_leaves_the_settings_of_the_run(finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "run")
    before = (out / "config.json").read_text()
    with pytest.raises((ValueError, CheckpointError)):
        train(recipe(COPY, "model.d_model=24", "train.steps=8"), out, resume=True)
    assert (out / "config.json").read_text() == before


def test_a_run_does_not_go_on_with_another_vocabulary_of_the_same_size(tmp_path, interrupt):
    given = text_recipe(tmp_path / "text")
    interrupt(3)
    train(given, tmp_path / "run")
    interrupt.never()
    vocabulary = (tmp_path / "run" / "vocabulary.json").read_text()
    text = tmp_path / "text" / "train.txt"
    text.write_text(text.read_text().translate(str.maketrans("abcdefghijk", "bcdefghijka")))
    with pytest.raises(ValueError, match=r"another vocabulary\.json than .*give the data of its training"):
        train(given, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "vocabulary.json").read_text() == vocabulary


def test_a_recipe_may_say_what_is_the_default(finished, tmp_path, capsys):
    out = shutil.copytree(finished[0], tmp_path / "run")
    train(recipe(COPY, "model.dropout=0.0"), out, resume=True)
    assert "going on with" not in capsys.readouterr().err


def test_a_run_does_not_go_on_with_another_task_or_model(finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "run")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    others = ("task.length=7", "task.placeholders=true", "model.d_inner=20", "model.dropout=0.1", "train.steps=8")
    with pytest.raises(ValueError, match="the run was trained with") as error:
        train(recipe(COPY, *others), out, resume=True)
    assert "step-000006: the run was trained with task.length = 5, task.placeholders = false, " in str(error.value)
    assert "model.d_inner = 24, model.dropout = its default, this recipe says 7, true, 20, 0.1; " in str(error.value)
    assert "repeat --set task.length=5 --set task.placeholders=false --set model.d_inner=24 and " in str(error.value)
    assert "leave model.dropout out, or choose another folder (--out)" in str(error.value)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_setting_that_was_left_out_is_at_its_default(finished, tmp_path):
    """The recipe says what an older file did not know yet."""
    out = shutil.copytree(finished[0], tmp_path / "run")
    file = latest_checkpoint(out / "checkpoints") / "config.json"
    config = json.loads(file.read_text())
    assert config["task"].pop("placeholders") is False
    file.write_text(json.dumps(config))
    assert train(recipe(COPY), out, resume=True).step == 6
    with pytest.raises(ValueError, match=r"task\.placeholders = false, this recipe says true"):
        train(recipe(COPY, "task.placeholders=true"), out, resume=True)


def test_a_resumed_run_says_what_has_changed(finished, tmp_path, capsys):
    out = shutil.copytree(finished[0], tmp_path / "run")
    train(recipe(COPY), out, resume=True)
    assert capsys.readouterr().err == ""
    train(recipe(COPY, "train.steps=7", "stop.max_steps=8"), out, resume=True)
    said = "going on with stop.max_steps = 8 instead of 6, train.steps = 7 instead of 6\n"
    assert capsys.readouterr().err == said


def test_data_may_have_moved(tmp_path, capsys):
    train(text_recipe(tmp_path / "text", "train.steps=2"), tmp_path / "run")
    (tmp_path / "text").rename(tmp_path / "moved")
    assert train(text_recipe(tmp_path / "moved", "train.steps=2"), tmp_path / "run", resume=True).step == 2
    assert f"task.corpus = {tmp_path / 'moved'} instead of {tmp_path / 'text'}\n" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"task\.corpus = .*this recipe says embedded"):
        train(recipe(TEXT, "task.corpus=embedded"), tmp_path / "run", resume=True)


def test_weights_alone_are_nothing_to_resume_from(finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "run")
    (latest_checkpoint(out / "checkpoints") / "trainer.pt").unlink()
    with pytest.raises(CheckpointError, match="weights only"):
        train(recipe(COPY), out, resume=True)
