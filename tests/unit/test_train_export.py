"""An exported model is the model of its run, rounded, with what it reads and a card that says what it scored."""

import json
import math
import re
import shutil

import pytest
import torch

import equipoise
from equipoise import HyperAnderson
from equipoise._module import solutions_of
from equipoise.generate import sample_text
from equipoise.solvers import load_solver, save_solver
from equipoise.train.checkpoint import CheckpointError
from equipoise.train.evaluate import Sweep, score_run, write_scores
from equipoise.train.export import export
from equipoise.train.loop import LOG, train
from equipoise.train.tracking import read_metrics
from tests.runs import COPY, TEXT, evaluate_run, recipe, text_recipe, write_corpus


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
    copied = shutil.copytree(run, tmp_path / "run")
    write_scores(copied, score_run(run, split="test", steps=[4]))
    card = (export(copied, tmp_path / "small") / "README.md").read_text()
    last = json.loads((run / LOG).read_text().splitlines()[-1])
    assert f"perplexity {last['valid']['perplexity']:.4g}" in card
    for split, budget in (("valid", "3"), ("valid", "6"), ("test", "4")):
        assert f"| {split} | {budget} | " in card
    assert "for 2 steps" in card
    assert f'equipoise.load("{tmp_path.as_posix()}/small")' in card
    assert "learned solver" not in card


def test_the_card_has_what_models_of_the_task_are_compared_by(finished, tmp_path):
    """Of copy memory that is the loss, beside which recall may be zero for long."""
    last = json.loads((finished[0] / LOG).read_text().splitlines()[-1])["valid"]
    card = (export(finished[0], tmp_path / "small", which="latest") / "README.md").read_text()
    assert f"| valid | as set | loss {last['loss']:.4g}, " in card


def card_of(run, folder, **options):
    return (export(run, folder, force=True, **options) / "README.md").read_text()


def rows_of(card, split):
    """Budget, score and residual of each row of a split."""
    rows = [line.strip("| ").split(" | ") for line in card.splitlines()]
    return [row[1:] for row in rows if row[0] == split]


@pytest.fixture
def long_run(tmp_path):
    """Six steps: evaluated after 4, which is noted as the best, and after 6; saved after 2, too."""
    settings = ("evaluation.budgets=[3]", "train.keep=3")
    train(text_recipe(tmp_path / "text", *settings), tmp_path / "run")
    best = tmp_path / "run" / "checkpoints" / "best.json"
    best.write_text(json.dumps({**json.loads(best.read_text()), "checkpoint": "step-000004"}))
    return tmp_path / "run"


def test_the_card_is_about_the_checkpoint_that_is_exported(long_run, tmp_path):
    """And not about the end of the run; of one that was never evaluated no score is known."""
    logged = {record["step"]: record for record in read_metrics(long_run / LOG) if "valid" in record}
    best, latest = (card_of(long_run, tmp_path / which, which=which) for which in ("best", "latest"))
    perplexity = {step: f"perplexity {record['valid']['perplexity']:.4g}" for step, record in logged.items()}
    assert perplexity[4] != perplexity[6]
    assert [row[:2] for row in rows_of(best, "valid")] == [["as set", perplexity[4]]]
    at_three = f"perplexity {logged[6]['valid_at']['3']['perplexity']:.4g}"
    assert [row[:2] for row in rows_of(latest, "valid")] == [["as set", perplexity[6]], ["3", at_three]]
    assert "for 4 steps in " in best
    assert "for 6 steps in " in latest
    early = card_of(long_run / "checkpoints" / "step-000002", tmp_path / "early")
    assert "for 2 steps in " in early
    assert "perplexity" not in early
    assert "No scores of these weights were found: `equipoise evaluate` writes them." in early


def test_minutes_are_those_of_the_checkpoint(long_run, tmp_path):
    records = read_metrics(long_run / LOG)
    for record in records:
        record["seconds"] = 60.0 * record["step"]
    later = {"step": 4, "seconds": 900.0, "hyper": {}}  # a fit before the next step
    (long_run / LOG).write_text("".join(json.dumps(record) + "\n" for record in [*records, later]))
    assert "for 4 steps in 4.0 minutes" in card_of(long_run, tmp_path / "best")
    kept = [record for record in records if record["step"] != 4]
    (long_run / LOG).write_text("".join(json.dumps(record) + "\n" for record in kept))
    assert "for 4 steps on one " in card_of(long_run, tmp_path / "without")


@pytest.mark.parametrize("phase", ["warmup", "opening"])
def test_scores_of_a_first_phase_are_not_those_of_the_model(tmp_path, phase):
    """A warm-up is evaluated as the stack it is, and an opening with its solver; what is loaded is neither."""
    train(text_recipe(tmp_path / "text", f"{phase}.steps=5", "train.keep=3"), tmp_path / "run")
    early = card_of(tmp_path / "run" / "checkpoints" / "step-000004", tmp_path / "early")
    assert rows_of(early, "valid") == []
    assert len(rows_of(card_of(tmp_path / "run", tmp_path / "small", which="latest"), "valid")) == 1


def test_scores_on_the_card_are_of_the_model_as_it_is(long_run, tmp_path):
    """Newer ones of another checkpoint, another solver, other settings or another sweep do not take their place."""
    config = long_run / "checkpoints" / "step-000004" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "solver": {"name": "anderson", "memory": 2}}))
    own = score_run(long_run, split="test", steps=[1, 4])
    write_scores(long_run, own)
    expected = [[str(result["steps"]), f"perplexity {result['perplexity']:.4g}"] for result in own["results"]]
    others = (
        {"which": "latest"},
        {"solver": "picard"},
        {"solver": "anderson", "steps": [2]},  # of the same kind, but not as it is set
        {"guard": True, "solver": "broyden"},
        {"changes": ["task.eval_length=5"]},
        {"sweep": Sweep.parse("stop.rtol=0.5")},
    )
    for number, options in enumerate(others):
        path = write_scores(long_run, score_run(long_run, split="test", **options))
        path.rename(path.with_name(f"test-9-{number}.json"))  # the newest
        card = card_of(long_run, tmp_path / "small")
        assert [row[:2] for row in rows_of(card, "test")] == expected, options
    budgets = score_run(long_run, split="test", sweep=Sweep.parse("stop.max_steps=2"))
    write_scores(long_run, budgets).rename(long_run / "eval" / "test-99.json")
    assert [row[0] for row in rows_of(card_of(long_run, tmp_path / "small"), "test")] == ["2"]


@pytest.mark.parametrize("text", ["cut off", "[1]"])
def test_scores_that_are_damaged_are_named(run, tmp_path, text):
    run = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    (run / "eval").mkdir()
    path = run / "eval" / "test-20990101T000000Z.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is damaged \(.*\); remove it"):
        export(run, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_scores_of_a_run_that_was_moved_stay_on_its_card(long_run, tmp_path):
    write_scores(long_run, score_run(long_run, split="test"))
    moved = long_run.rename(tmp_path / "moved")
    small = export(moved, tmp_path / "small")
    (row,) = rows_of((small / "README.md").read_text(), "test")
    assert row[0] == "as set"
    write_scores(small, score_run(small, split="test", steps=[3]))
    renamed = small.rename(tmp_path / "renamed")
    assert [row[0] for row in rows_of(card_of(renamed, tmp_path / "again"), "test")] == ["3"]


def test_classes_have_a_line_of_their_own(run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    record = score_run(run, split="test")
    write_scores(copied, {**record, "results": [{"steps": 4, "miou": 0.1}]})  # the newest counts
    scores = {"miou": 0.5, "miou_error": 0.5, "iou_sky": 0.25, "iou_road": 0.75, "loss": 1.0}
    lost = {"steps": 2, "miou": 0.25, "solve": {"residual_p95": math.inf}}
    write_scores(copied, {**record, "results": [lost, {"steps": 4, **scores}]})
    card = (export(copied, tmp_path / "small") / "README.md").read_text()
    assert "| test | 2 | miou 0.25 | inf |" in card
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
    card = (folder / "README.md").read_text()
    assert f"(`hyper/solver.safetensors`, {solver.num_parameters:,} parameters): `--solver hyper:{folder}`." in card
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
    with pytest.raises(FileExistsError, match="is not an exported model"):
        export(run, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_an_earlier_export_is_replaced_only_if_asked_for(run, tmp_path):
    (tmp_path / "small").mkdir()
    small = export(run, tmp_path / "small")  # an empty folder is as good as none
    (small / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match=r"small is there and not empty; .*\(--force\) replaces"):
        export(run, small, dtype="fp32")
    assert (small / "notes.txt").read_text() == "keep"
    assert "in bf16" in (small / "README.md").read_text()
    assert export(run, small, dtype="fp32", force=True) == small
    assert "in fp32" in (small / "README.md").read_text()
    assert not (small / "notes.txt").exists()


def test_neither_a_checkpoint_nor_what_is_exported_is_replaced(run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    (trained,) = (copied / "checkpoints").glob("step-*")
    with pytest.raises(FileExistsError, match="is not an exported model"):
        export(run, trained, force=True)
    assert (trained / "trainer.pt").is_file()
    small = export(run, tmp_path / "small")
    with pytest.raises(FileExistsError, match="is what is to be exported"):
        export(small, small, force=True)
    assert (small / "vocabulary.json").is_file()


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
