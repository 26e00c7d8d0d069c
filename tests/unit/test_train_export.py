"""An exported model is the model of its run, rounded, with what it reads and a card that says what it scored."""

import json
import shutil

import pytest
import torch

import equipoise
from equipoise import HyperAnderson
from equipoise._module import solutions_of
from equipoise.generate import sample_text
from equipoise.solvers import load_solver, save_solver
from equipoise.train.checkpoint import CheckpointError
from equipoise.train.evaluate import evaluate_run, write_scores
from equipoise.train.export import export
from equipoise.train.loop import train
from tests.runs import COPY, TEXT, recipe, write_corpus


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    corpus = f"task.corpus={write_corpus(folder / 'text')}"
    train(recipe(TEXT, corpus, "train.steps=2", "evaluation.budgets=[3,6]"), folder / "run")
    return folder / "run"


def test_the_model_is_that_of_the_run_rounded(run, tmp_path):
    folder = export(run, tmp_path / "small")
    exact, rounded = equipoise.load(run).state_dict(), equipoise.load(folder).state_dict()
    assert exact.keys() == rounded.keys()
    for name, value in exact.items():
        assert rounded[name].dtype == value.dtype
        if value.is_floating_point():
            value = value.bfloat16().to(value.dtype)
        assert torch.equal(rounded[name], value)
    whole = equipoise.load(export(run, tmp_path / "whole", dtype="fp32")).state_dict()
    assert all(torch.equal(whole[name], value) for name, value in exact.items())


def test_it_can_be_scored_sampled_and_exported_again(run, tmp_path):
    folder = export(run, tmp_path / "small", dtype="fp32")
    scores = [evaluate_run(place, split="valid")[0]["loss"] for place in (run, folder)]
    assert scores[1] == pytest.approx(scores[0], rel=1e-6)
    assert "".join(sample_text(folder, "", 5)) == "".join(sample_text(run, "", 5))
    again = export(folder, tmp_path / "again")
    assert (again / "vocabulary.json").read_bytes() == (run / "vocabulary.json").read_bytes()


def test_other_data_than_those_of_its_training_are_refused(run, tmp_path):
    folder = export(run, tmp_path / "small")
    vocabulary = json.loads((folder / "vocabulary.json").read_text())
    (folder / "vocabulary.json").write_text(json.dumps({**vocabulary, "changed": 1}))
    with pytest.raises(ValueError, match=r"another vocabulary\.json"):
        evaluate_run(folder, split="valid")


def test_the_card_says_what_was_measured(run, tmp_path):
    write_scores(run, {"split": "test", "results": evaluate_run(run, split="test", steps=[4])})
    card = (export(run, tmp_path / "small") / "README.md").read_text()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"perplexity {last['valid']['perplexity']:.4g}" in card
    for split, budget in (("valid", "3"), ("valid", "6"), ("test", "4")):
        assert f"| {split} | {budget} | " in card
    assert "for 2 steps" in card
    assert 'equipoise.load("pretrained/small")' in card


def test_classes_have_a_line_of_their_own(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    write_scores(copied, {"split": "test", "results": [{"steps": 4, "miou": 0.1}]})  # the newest counts
    scores = {"miou": 0.5, "miou_error": 0.5, "iou_sky": 0.25, "iou_road": 0.75, "loss": 1.0}
    write_scores(copied, {"split": "test", "results": [{"steps": 4, **scores}]})
    card = (export(copied, tmp_path / "small") / "README.md").read_text()
    assert "| test | 4 | miou 0.5 | – |" in card
    assert "IoU by class, test, steps 4: road 0.75, sky 0.25." in card


def test_a_learned_solver_goes_along_if_it_is_one_of_these_weights(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    model = equipoise.load(copied)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    with solutions_of(model) as solutions:
        model(tokens)
    ((solution, _),) = solutions
    solver = HyperAnderson.for_sequence(solution.value.shape[-1], None)
    with torch.no_grad():
        for parameter in solver.parameters():
            parameter.normal_()
    save_solver(solver, copied / "hyper" / "solver.safetensors", model)
    folder = export(copied, tmp_path / "small")
    handed_on = load_solver(folder, equipoise.load(folder))
    assert handed_on.config == solver.config
    for kept, own in zip(handed_on.parameters(), solver.parameters(), strict=True):
        assert kept.dtype == own.dtype  # rounded in the file alone
        assert torch.equal(kept, own.bfloat16().float())
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    save_solver(solver, copied / "hyper" / "solver.safetensors", model)
    with pytest.warns(UserWarning, match="is of other weights than these, and stays behind"):
        assert not (export(copied, tmp_path / "other") / "hyper").exists()
    (copied / "hyper" / "solver.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match="cannot be read as a learned solver"):
        export(copied, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_what_stands_in_the_way_is_left_alone(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is not an exported model"):
        export(run, tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    first = export(run, tmp_path / "small")
    assert export(run, first) == first


def test_a_run_without_weights_and_an_unknown_dtype_are_named(tmp_path, run):
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        export(tmp_path, tmp_path / "small")
    with pytest.raises(ValueError, match="bf16"):
        export(run, tmp_path / "small", dtype="bf61")
    assert not (tmp_path / "small").exists()


def test_a_checkpoint_without_a_log_has_a_card_without_scores(tmp_path):
    train(recipe(COPY, "train.steps=1"), tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    card = (export(tmp_path / "run", tmp_path / "small") / "README.md").read_text()
    assert "| split |" not in card
    assert "for the task `copy_memory`." in card
