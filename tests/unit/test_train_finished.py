"""What a finished run is good for: loading its model, scoring it again."""

import json
import shutil

import pytest
import torch

from equipoise._module import DEQ, Plan
from equipoise._solution import EquilibriumWarning
from equipoise._stop import Stop
from equipoise.models import create_model
from equipoise.solvers import Anderson
from equipoise.tasks import Task
from equipoise.train.checkpoint import CheckpointError, checkpoint_folder, load_checkpoint
from equipoise.train.load import find_checkpoint, load
from equipoise.train.loop import solutions_of, train
from tests.runs import COPY, TEXT, evaluate_run, recipe, text_recipe, write_corpus

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
    with pytest.warns(EquilibriumWarning, match="never a DEQ"):
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
