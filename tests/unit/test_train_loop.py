"""The training loop: what a run writes, that a resumed run is an uninterrupted one, and how runs end."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from equipoise import jacobian_penalty
from equipoise._module import DEQ, Plan
from equipoise._stop import Stop
from equipoise.models import create_model
from equipoise.solvers import Anderson
from equipoise.tasks import CopyMemoryTask, Task
from equipoise.train import loop
from equipoise.train.checkpoint import (
    CheckpointError,
    GracefulStop,
    check_writable,
    checkpoint_folder,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_best,
)
from equipoise.train.evaluate import evaluate_run
from equipoise.train.load import find_checkpoint, load
from equipoise.train.loop import solutions_of, train
from equipoise.train.recipe import Recipe
from equipoise.train.tracking import read_metrics
from tests.runs import COPY, TEXT, recipe, text_recipe, write_corpus

LSTM = {"name": "lstm_copy_memory", "widths": [8]}


def with_model(given: Recipe, **model) -> Recipe:
    return dataclasses.replace(given, model=model)


def lines(out, timed=False):
    """The records of a run, without what a clock says unless it is wanted."""
    records = read_metrics(out / "metrics.jsonl")
    for record in records:
        if not timed and "train" in record:
            del record["train"]["seconds_per_step"]
    return records


def train_records(out):
    return {record["step"]: record["train"] for record in lines(out) if "train" in record}


def saved(out):
    """Everything in the newest checkpoint."""
    checkpoint = load_checkpoint(latest_checkpoint(out / "checkpoints"))
    return {"model": checkpoint.model, "trainer": checkpoint.trainer, "config": checkpoint.config}


def same(a, b):
    """Equality bit for bit, all the way down."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture
def interrupt(monkeypatch):
    """A function that makes the next run end as by a signal after some steps."""

    def after(steps):
        class Interrupted(GracefulStop):
            reads = 0

            @property
            def requested(self):
                self.reads += 1  # read once before each step
                if self.reads > steps:
                    self.request("a test")
                return self.reason is not None

        monkeypatch.setattr(loop, "GracefulStop", Interrupted)

    def never():
        monkeypatch.setattr(loop, "GracefulStop", GracefulStop)

    after.never = never
    return after


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of six steps, evaluated at 4 and 6; not to be changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, train(recipe(COPY), out)


# What a run writes


def test_a_run_leaves_its_files(finished):
    out, outcome = finished
    assert {path.name for path in out.iterdir()} == {"config.json", "env.json", "metrics.jsonl", "checkpoints"}
    assert [path.name for path in list_checkpoints(out / "checkpoints")] == ["step-000004", "step-000006"]
    for folder in list_checkpoints(out / "checkpoints"):
        assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", "trainer.pt"}
        assert json.loads((folder / "config.json").read_text()) == json.loads((out / "config.json").read_text())
    assert json.loads((out / "env.json").read_text())["packages"]["torch"] == torch.__version__
    assert (outcome.step, outcome.interrupted) == (6, None)
    assert outcome.best == read_best(out / "checkpoints")


def test_config_json_is_the_resolved_recipe(finished):
    out, _ = finished
    config = json.loads((out / "config.json").read_text())
    assert config["task"]["placeholders"] is False
    assert config["train"]["optimiser"] == {**config["train"]["optimiser"], "name": "adamw", "lr": 1e-3}
    again = Recipe.from_data(config, "config.json")
    assert again.to_data() == recipe(COPY).to_data()


def test_the_best_checkpoint_is_the_one_of_lowest_validation_loss(finished):
    out, _ = finished
    scores = {record["step"]: record["valid"]["loss"] for record in lines(out) if "valid" in record}
    assert set(scores) == {4, 6}
    best = read_best(out / "checkpoints")
    step = min(scores, key=scores.get)
    expected = {"checkpoint": f"step-{step:06d}", "step": step, "metric": "loss", "score": scores[step]}
    assert best == expected


def test_the_first_record_says_what_was_trained_on_what(finished):
    out, _ = finished
    first = lines(out)[0]
    model = recipe(COPY).make_task().model()
    assert (first["step"], first["parameters"]) == (0, sum(p.numel() for p in model.parameters()))
    assert (first["data"]["task"], first["data"]["length"], first["data"]["train_samples"]) == ("copy_memory", 5, 64)


def test_records_hold_losses_rates_and_solver_statistics(finished):
    out, _ = finished
    records = train_records(out)
    assert list(records) == [2, 4, 6]
    for record in records.values():
        assert {"loss", "lr", "grad_norm", "skipped", "forward", "backward"} <= set(record)
        forward, backward = record["forward"], record["backward"]
        # Two steps of eight sequences since the record before; 6 steps and the evaluation that carries the gradient.
        assert (forward["solves"], forward["systems"], backward["systems"]) == (2, 16, 16)
        assert forward["nfe"] <= 7
        assert backward["steps_p95"] == 5
        assert 0 < forward["residual_p50"] <= forward["residual_p95"] < 1
        assert forward["failures"] == sum(forward["failed"].values())
    assert records[2]["lr"] == pytest.approx(1e-3 * 2 / 3)
    assert records[4]["lr"] == pytest.approx(1e-3)
    valid = [record["valid"] for record in lines(out) if "valid" in record]
    assert all({"loss", "recall", "exact", "solve_nfe", "solve_residual_p95"} <= set(values) for values in valid)
    assert all(record["train"]["seconds_per_step"] > 0 for record in lines(out, timed=True) if "train" in record)


def test_a_language_model_leaves_its_vocabulary(tmp_path):
    out = tmp_path / "run"
    train(text_recipe(tmp_path / "text", "train.steps=1"), out)
    assert json.loads((out / "vocabulary.json").read_text())["kind"] == "character"
    assert json.loads((out / "config.json").read_text())["model"]["vocab_size"] == 13
    assert {"loss", "perplexity", "bits_per_token"} <= set(lines(out)[-1]["valid"])
    assert {"loss", "nats"} <= set(lines(out)[1]["train"])
    assert read_best(out / "checkpoints")["metric"] == "perplexity"


def test_only_some_checkpoints_are_kept(tmp_path, monkeypatch):
    """The newest, and the best one however old."""
    scores = iter([5.0, 1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(CopyMemoryTask, "report", lambda self, values: {**values, "loss": next(scores)})
    settings = ("train.keep=1", "train.steps=4", "train.evaluate_every=1", "train.log_every=9")
    train(with_model(recipe(COPY, *settings), **LSTM), tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000001", "step-000004"]
    assert read_best(tmp_path / "checkpoints")["step"] == 1


def test_a_score_that_is_not_a_number_is_never_the_best(tmp_path, monkeypatch):
    scores = iter([1.0, float("nan"), 2.0])
    monkeypatch.setattr(CopyMemoryTask, "report", lambda self, values: {**values, "loss": next(scores)})
    train(with_model(recipe(COPY, "train.steps=2", "train.evaluate_every=1"), **LSTM), tmp_path)
    assert read_best(tmp_path / "checkpoints")["step"] == 2
    assert lines(tmp_path)[-1]["valid"]["loss"] == 2.0


# One step, and its draws


def test_a_step_is_gradient_descent_on_loss_and_penalty(tmp_path):
    """Against the step written out by hand, bit for bit."""
    given = recipe(
        COPY,
        "model.dropout=0.2",
        "penalty.weight=0.5",
        "penalty.probes=2",
        "train.steps=1",
        'train.optimiser={name="sgd", lr=0.3}',
        "train.learning_rate.warmup=0",
        "train.clip.max_norm=0.05",
    )
    train(given, tmp_path)
    task = given.make_task()
    torch.manual_seed(0)
    model = task.model()
    model.deq.plan = Plan(Anderson(), given.adjoint, given.stop)
    torch.manual_seed(0)  # the key of seed 0, step 0
    with solutions_of(model) as solutions:
        losses, _ = task.training_step(model, task.data().train(0), None, 0)
    penalty = jacobian_penalty(solutions[0][0], probes=2)
    (losses["loss"] + 0.5 * penalty).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    torch.optim.SGD(model.parameters(), lr=0.3).step()
    record = train_records(tmp_path)[1]
    assert record["penalty"] == float(penalty.detach())
    assert record["loss"] == float(losses["loss"].detach())
    assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    assert float(norm) > 0.05
    for name, value in saved(tmp_path)["model"].items():
        assert torch.allclose(value, model.state_dict()[name], rtol=1e-6, atol=1e-8), name


def test_runs_of_one_seed_are_equal_and_of_two_are_not(tmp_path):
    given = recipe(COPY, "model.dropout=0.2", "train.steps=2")
    for name, changed in (("a", given), ("b", given), ("c", recipe(COPY, "train.steps=2", "train.seed=1"))):
        train(changed, tmp_path / name)
    a, b, c = (saved(tmp_path / name) for name in "abc")
    assert same(a, b)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert not same(a["model"], c["model"])


@pytest.mark.parametrize("name", ["lstm_copy_memory", "gru_copy_memory", "tcn_copy_memory"])
def test_explicit_models_train_by_the_same_loop(tmp_path, name):
    sizes = {"channels": 6, "levels": 3, "kernel_size": 3} if name.startswith("tcn") else {"widths": [8]}
    settings = ("train.steps=30", "train.log_every=10", "train.evaluate_every=30", "train.save_every=30")
    out = tmp_path / "run"
    outcome = train(with_model(recipe(COPY, "train.optimiser.lr=0.03", *settings), name=name, **sizes), out)
    records = train_records(out)
    assert records[30]["loss"] < 0.8 * records[10]["loss"] < 2.5
    assert records[30]["forward"] == records[30]["backward"] == {}
    assert not any(key.startswith("solve") for key in outcome.metrics)
    result = evaluate_run(out)[0]
    assert result["loss"] == pytest.approx(outcome.metrics["loss"], rel=1e-6)
    assert result["solve"] == {}
    with pytest.raises(ValueError, match="no equilibrium"):
        evaluate_run(out, steps=[3])


def test_an_equilibrium_model_learns(tmp_path):
    settings = ("train.steps=20", "train.log_every=20", "train.evaluate_every=20", "train.optimiser.lr=0.01")
    train(recipe(COPY, *settings), tmp_path)
    start, end = 2.3026, train_records(tmp_path)[20]["loss"]  # ln 10 at the beginning
    assert end < 0.75 * start


# Phases


def test_warmup_trains_the_stack_and_then_the_equilibrium(tmp_path):
    train(recipe(COPY, "warmup.steps=3", "warmup.layers=2", "train.log_every=1", "train.steps=5"), tmp_path)
    records = train_records(tmp_path)
    for step in (1, 2, 3):
        assert records[step]["forward"]["steps_p50"] == 2
        assert records[step]["forward"]["failures"] == 0
        assert records[step]["backward"] == {}
    for step in (4, 5):
        assert records[step]["forward"]["steps_p95"] > 2
        assert records[step]["backward"]["systems"] == 8


def test_the_stack_of_the_warmup_is_evaluated_as_what_it_is(tmp_path):
    """Using up a fixed number of layers is no failure of a solver."""
    train(recipe(COPY, "warmup.steps=9", "train.evaluate_every=2", "train.steps=3"), tmp_path)
    valid = next(record["valid"] for record in lines(tmp_path) if "valid" in record)
    assert valid["solve_steps_p95"] == 2
    assert valid["solve_failures"] == 0


def test_the_penalty_is_logged_on_its_steps_only(tmp_path):
    settings = ("penalty.weight=0.1", "penalty.stop=2", "train.log_every=1", "train.steps=4")
    train(recipe(COPY, *settings), tmp_path)
    records = train_records(tmp_path)
    assert [step for step, record in records.items() if "penalty" in record] == [1, 2]
    assert records[1]["penalty"] > 0


def test_jitter_changes_the_budget_from_step_to_step(tmp_path):
    given = recipe(COPY, "stop.rtol=0.0", "jitter.low=-3", "jitter.high=3", "train.log_every=1")
    train(given, tmp_path)
    schedule = given.schedule(given.make_task().model())
    expected = [schedule.at(step).plan.stop.max_steps for step in range(6)]
    assert len(set(expected)) > 2
    assert [record["forward"]["steps_p50"] for record in train_records(tmp_path).values()] == expected
    valid = next(record["valid"] for record in lines(tmp_path) if "valid" in record)
    assert valid["solve_steps_p95"] == 6


@pytest.mark.filterwarnings("ignore::equipoise.EquilibriumWarning")
def test_failures_of_the_backward_solve_are_counted_by_its_own_rule(tmp_path):
    """A fixed forward budget excuses the forward solve alone."""
    settings = ("stop.rtol=0.0", "adjoint.stop.rtol=1e-7", "adjoint.stop.max_steps=1")
    train(recipe(COPY, *settings, "train.steps=1"), tmp_path)
    record = train_records(tmp_path)[1]
    assert record["forward"]["failures"] == 0
    assert record["backward"]["failures"] == 8


# Resuming


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
TRELLIS = {"embedding_size": 6, "hidden_size": 8, "dropconnect": 0.2, "dropout_words": 0.1}
XL = {"embedding_size": 8, "heads": 2, "inner_size": 8, "layers": 2, "memory_length": 8}
RESUMED = {
    "copy memory, all phases": (None, PHASES),
    "language model, dropout, memory, EMA": ({}, ("model.dropout=0.1", "model.attention_dropout=0.1", EMA)),
    "trellisnet": ({"name": "deq_trellisnet_small", **TRELLIS}, ("task.activation=1.0", "task.smoothness=1.0")),
    "lstm, SGD": ({"name": "lstm_ptb_small", "widths": [6, 6], "embedding_size": 6}, ("train.optimiser=sgd",)),
    "tcn": ({"name": "tcn_ptb_small", "channels": 6, "embedding_size": 6, "levels": 2, "history": 4}, ()),
    "transformer-xl": ({"name": "transformer_xl_ptb_small", **XL}, ()),
}
"""Model (None: copy memory; empty: the one of `TEXT`) and other settings."""


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, interrupt, case):
    """Weights, optimiser, averages, memory and log, bit for bit; stopped between two evaluations, after six steps."""
    model, overrides = RESUMED[case]
    overrides = (*overrides, "train.steps=9", "train.evaluate_every=5", "train.save_every=4")
    if model is None:
        given = recipe(COPY, *overrides)
    else:
        given = text_recipe(tmp_path / "text", *overrides)
        given = with_model(given, **model) if model else given
    train(given, tmp_path / "whole")
    interrupt(6)
    outcome = train(given, tmp_path / "parts")
    assert (outcome.step, outcome.interrupted) == (6, "a test")
    interrupt.never()
    assert train(given, tmp_path / "parts", resume=True).step == 9
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


def test_a_signal_saves_and_ends_the_run(tmp_path, monkeypatch):
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


def test_a_second_run_into_a_folder_is_refused(finished):
    out, _ = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match="holds another run"):
        train(recipe(COPY, "train.seed=1"), out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_resuming_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from"):
        train(recipe(COPY), tmp_path, resume=True)


def test_a_run_that_failed_before_its_first_checkpoint_can_be_started_again(tmp_path):
    """Else the folder could neither be resumed nor used anew."""
    with pytest.raises(ValueError, match="batch_size=128 exceeds train_size=64"):
        train(recipe(COPY, "task.batch_size=128", "train.steps=1"), tmp_path)
    assert train(recipe(COPY, "train.steps=1"), tmp_path).step == 1
    assert [record["step"] for record in lines(tmp_path)] == [0, 1, 1]


def test_a_refused_resumption_leaves_the_settings_of_the_run(finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "run")
    before = (out / "config.json").read_text()
    with pytest.raises((ValueError, CheckpointError)):
        train(recipe(COPY, "model.d_model=24", "train.steps=8"), out, resume=True)
    assert (out / "config.json").read_text() == before


def test_weights_alone_are_nothing_to_resume_from(finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "run")
    (latest_checkpoint(out / "checkpoints") / "trainer.pt").unlink()
    with pytest.raises(CheckpointError, match="weights only"):
        train(recipe(COPY), out, resume=True)


def test_a_folder_that_cannot_be_written_is_reported_first(tmp_path, monkeypatch):
    def never(self):
        raise AssertionError("no data should be loaded")

    monkeypatch.setattr(CopyMemoryTask, "data", never)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        train(recipe(COPY), tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        train(recipe(COPY), tmp_path / "file")


def test_too_little_space_is_reported_before_the_first_step(tmp_path, monkeypatch):
    def small(folder, needed=0):
        check_writable(folder, 2**62 if needed else 0)

    monkeypatch.setattr(loop, "check_writable", small)
    with pytest.raises(CheckpointError, match="too little space"):
        train(recipe(COPY), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_broken_evaluation_is_found_before_the_first_step(tmp_path, monkeypatch):
    def broken(self, model, batch, carry, metrics):
        raise ValueError("a broken evaluation")

    def never(self, *arguments):
        raise AssertionError("no step should be made")

    monkeypatch.setattr(CopyMemoryTask, "evaluation_step", broken)
    monkeypatch.setattr(CopyMemoryTask, "training_step", never)
    with pytest.raises(ValueError, match="a broken evaluation"):
        train(recipe(COPY), tmp_path)


def test_precision_may_differ_from_run_to_run_of_one_process(tmp_path):
    train(with_model(recipe(COPY, "train.steps=1"), **LSTM), tmp_path / "float32")
    half = recipe(COPY, "train.steps=1", "train.precision=bf16")
    train(half, tmp_path / "bf16")
    assert all(value.dtype == torch.float32 for value in saved(tmp_path / "bf16")["model"].values())


# Loading


def test_a_loaded_model_is_the_one_in_memory(tmp_path, monkeypatch):
    built, make = [], Task.model
    monkeypatch.setattr(Task, "model", lambda self: built.append(make(self)) or built[-1])
    given = recipe(COPY, "evaluation.stop.max_steps=9", "evaluation.stop.rtol=1e-4", "model.dropout=0.1")
    out = tmp_path / "run"
    train(given, out)
    tokens = torch.randint(10, (3, 25))
    with torch.no_grad():
        expected = built[0].eval()(tokens).logits
        loaded = load(out, which="latest")
        assert not loaded.training
        assert torch.equal(loaded(tokens).logits, expected)
    assert loaded.deq.plan == Plan(Anderson(), given.adjoint, given.stop)
    assert loaded.deq.eval_plan.stop == Stop(rtol=1e-4, max_steps=9)


def test_a_checkpoint_needs_nothing_but_its_folder(tmp_path):
    out = tmp_path / "run"
    train(text_recipe(tmp_path / "text", "train.steps=2"), out)
    tokens = torch.randint(13, (2, 5))
    expected = load(out)(tokens).logits
    moved = shutil.move(find_checkpoint(out), tmp_path / "elsewhere")
    shutil.rmtree(out)
    shutil.rmtree(tmp_path / "text")
    assert torch.equal(load(moved)(tokens).logits, expected)


def test_averaged_weights_are_what_is_loaded(tmp_path):
    """They are what the scores in the log, and the choice of the best checkpoint, belong to."""
    out = tmp_path / "run"
    settings = ("train.optimiser.lr=0.1", 'train.averaging={kind="ema", decay=0.9}')
    outcome = train(recipe(COPY, *settings), out)
    trainer = load_checkpoint(out / "checkpoints" / "step-000006").trainer
    state = load(out, which="latest").state_dict()
    assert all(torch.equal(state[name], mean) for name, mean in trainer["average"]["mean"].items())
    assert evaluate_run(out / "checkpoints" / "step-000006")[0]["loss"] == pytest.approx(outcome.metrics["loss"])


def test_a_checkpoint_of_the_warmup_is_loaded_as_an_equilibrium_model(tmp_path):
    train(recipe(COPY, "warmup.steps=9", "train.steps=1"), tmp_path)
    deq = next(module for module in load(tmp_path).modules() if isinstance(module, DEQ))
    assert deq.plan.stop == recipe(COPY).stop
    assert deq.eval_plan == deq.plan


def test_the_best_or_the_newest_checkpoint_is_found(finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "run")
    root = out / "checkpoints"
    record = json.loads((root / "best.json").read_text())
    (root / "best.json").write_text(json.dumps({**record, "checkpoint": "step-000004", "step": 4}))
    assert find_checkpoint(out) == root / "step-000004"
    assert find_checkpoint(out, "latest") == root / "step-000006"
    assert find_checkpoint(root / "step-000006") == root / "step-000006"
    (root / "best.json").unlink()
    assert find_checkpoint(out) == root / "step-000006"
    assert find_checkpoint(out) == checkpoint_folder(root, 6)


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_folder_without_checkpoints_is_refused(tmp_path, name):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        load(tmp_path / name)


# Evaluation


def test_a_run_is_scored_as_it_was_while_training(finished):
    out, outcome = finished
    result = evaluate_run(out / "checkpoints" / "step-000006")[0]
    for name in ("loss", "recall", "exact"):
        assert result[name] == pytest.approx(outcome.metrics[name], rel=1e-6)
    assert result["steps"] is None
    assert result["seconds"] > 0
    assert result["solve"]["systems"] == 16


def test_budgets_change_how_far_the_solver_goes(finished):
    out, _ = finished
    few, many = evaluate_run(out, steps=[1, 40])
    assert (few["steps"], many["steps"]) == (1, 40)
    assert few["solve"]["steps_p95"] == 1
    assert many["solve"]["steps_p95"] > 1
    assert many["solve"]["residual_p95"] < few["solve"]["residual_p95"]
    assert few["loss"] != many["loss"]
    with pytest.raises(ValueError, match="max_steps must be an integer of at least 1"):
        evaluate_run(out, steps=[0])


def test_splits_differ_and_unknown_ones_are_named(finished):
    out, _ = finished
    assert evaluate_run(out, "test")[0]["loss"] != evaluate_run(out, "valid")[0]["loss"]
    with pytest.raises(ValueError, match=r"unknown split 'vlaid'.*valid"):
        evaluate_run(out, "vlaid")


def test_a_run_can_be_scored_where_the_data_lie_now(tmp_path):
    write_corpus(tmp_path / "here" / "mine")
    out = tmp_path / "run"
    outcome = train(recipe(TEXT, "task.corpus=mine", "train.steps=1"), out, data_dir=str(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    result = evaluate_run(out, data_dir=str(tmp_path / "there"))[0]
    assert result["perplexity"] == pytest.approx(outcome.metrics["perplexity"], rel=1e-5)


def test_solutions_are_gathered_only_meanwhile():
    model = create_model(COPY["model"]["name"], d_model=8, heads=2, d_inner=8)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad(), solutions_of(model) as found:
        model(tokens)
        model(tokens)
    with torch.no_grad():
        model(tokens)
    assert len(found) == 2


# Several processes


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tmp_path):
    """Float32 sums in another order: equal to 1e-5. Plain iterations, since Anderson's would magnify rounding."""
    solve = ("solver=picard", "adjoint.solver=picard", "stop.rtol=0.0", "train.optimiser=sgd", "train.optimiser.lr=0.1")
    settings = (*solve, "task.test_size=10", "train.log_every=1", "train.evaluate_every=3")
    given = recipe(COPY, *settings)
    (tmp_path / "recipe.json").write_text(json.dumps(given.to_data()))
    (tmp_path / "run.py").write_text(
        "import json, sys, pathlib; from equipoise.train.loop import train; from equipoise.train.recipe import Recipe\n"
        "values = json.loads(pathlib.Path(sys.argv[1]).read_text())\n"
        "train(Recipe.from_data(values, 'the test'), sys.argv[2])\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, str(tmp_path / "run.py"), str(tmp_path / "recipe.json"), str(tmp_path / "two")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    train(given, tmp_path / "one")
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [record["step"] for record in two] == [record["step"] for record in one]
    for a, b in zip(one[1:], two[1:], strict=True):
        kind = "train" if "train" in a else "valid"
        assert b[kind]["loss"] == pytest.approx(a[kind]["loss"], rel=1e-5)
    for name, value in saved(tmp_path / "one")["model"].items():
        assert torch.allclose(saved(tmp_path / "two")["model"][name], value, rtol=1e-5, atol=1e-6), name
