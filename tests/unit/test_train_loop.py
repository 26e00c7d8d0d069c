"""The training loop: what a run writes, what a step does, how runs begin and end."""

import json

import pytest
import torch

from equipoise import EquilibriumWarning, jacobian_penalty
from equipoise._module import Plan
from equipoise.solvers import Anderson
from equipoise.tasks import CopyMemoryTask
from equipoise.train import loop
from equipoise.train.checkpoint import (
    CheckpointError,
    check_writable,
    list_checkpoints,
    read_best,
)
from equipoise.train.loop import solutions_of, train
from equipoise.train.recipe import Recipe
from tests.runs import COPY, evaluate_run, recipe, text_recipe
from tests.training import LSTM, lines, same, saved, train_records, with_model

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
    """Using up a fixed number of layers is no failure of a solver; the run says once that it is nothing else."""
    with pytest.warns(EquilibriumWarning, match=r"warmup\.steps = 9 leaves none of .*never a DEQ") as said:
        outcome = train(recipe(COPY, "warmup.steps=9", "train.evaluate_every=2", "train.steps=3"), tmp_path)
    assert len(said) == 1
    assert outcome.best is None
    assert "up to warmup.steps = 9 the model is a stack" in outcome.no_best
    valid = next(record["valid"] for record in lines(tmp_path) if "valid" in record)
    assert valid["solve_steps_p95"] == 2
    assert valid["solve_failures"] == 0


def test_a_penalty_that_keeps_a_residual_becomes_stronger_while_it_is_above(tmp_path):
    settings = ("penalty.weight=0.1", "penalty.probability=0.1", "penalty.keep=1e-3", "train.log_every=1")
    train(recipe(COPY, *settings, "warmup.steps=2", "train.steps=6"), tmp_path)
    records = train_records(tmp_path)
    assert all("penalty_strength" not in records[step] for step in (1, 2))
    assert all(records[step]["forward"]["residual_p50"] > 2e-3 for step in range(3, 7))
    assert [records[step]["penalty_strength"] for step in range(3, 7)] == pytest.approx([1.0, 4.0, 10.0, 10.0])
    assert records[5]["penalty_weight"] == pytest.approx(0.4)


def test_an_equilibrium_that_is_being_lost_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "FAR", 1e-6)
    with pytest.warns(EquilibriumWarning, match=r"step 5: .*for 3 log lines, now .*being lost.*penalty\.keep") as said:
        train(recipe(COPY, "warmup.steps=2", "train.log_every=1", "train.steps=7"), tmp_path)
    assert len(said) == 1


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


# What is refused


def test_a_second_run_into_a_folder_is_refused(finished):
    out, _ = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match="holds another run"):
        train(recipe(COPY, "train.seed=1"), out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_run_that_failed_before_its_first_checkpoint_can_be_started_again(tmp_path):
    """Else the folder could neither be resumed nor used anew."""
    with pytest.raises(ValueError, match="batch_size=128 exceeds train_size=64"):
        train(recipe(COPY, "task.batch_size=128", "train.steps=1"), tmp_path)
    assert train(recipe(COPY, "train.steps=1"), tmp_path).step == 1
    assert [record["step"] for record in lines(tmp_path)] == [0, 1, 1]


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
