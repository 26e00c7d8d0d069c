"""Training that begins with the weights of another run."""

import json

import pytest

from equipoise.train.checkpoint import CheckpointError
from equipoise.train.export import export
from equipoise.train.load import load
from equipoise.train.loop import train
from tests.runs import COPY, TEXT, recipe, text_recipe, write_corpus
from tests.training import lines, same

STILL = ("train.steps=1", "train.optimiser.lr=1e-30", "train.seed=5")


def same_weights(folder, other):
    return same(dict(load(folder).state_dict()), dict(load(other).state_dict()))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    train(text_recipe(folder / "text"), folder / "run")
    return folder / "run"


def test_a_run_begins_with_the_best_weights_of_another(base, tmp_path):
    fresh, begun = (
        text_recipe(tmp_path / "text", *STILL),
        text_recipe(tmp_path / "text", *STILL, f"train.weights={base}"),
    )
    train(fresh, tmp_path / "fresh")
    train(begun, tmp_path / "begun")
    assert same_weights(tmp_path / "begun", base)
    assert not same_weights(tmp_path / "fresh", base)
    assert json.loads((tmp_path / "begun" / "config.json").read_text())["train"]["weights"] == str(base)


def test_an_export_serves_as_well_as_a_run(base, tmp_path):
    export(base, tmp_path / "export")
    train(text_recipe(tmp_path / "text", *STILL, f"train.weights={tmp_path / 'export'}"), tmp_path / "begun")
    assert same_weights(tmp_path / "begun", tmp_path / "export")


def test_a_resumed_run_has_weights_of_its_own(base, tmp_path):
    given = text_recipe(tmp_path / "text", f"train.weights={base}", "train.steps=4")
    train(given, tmp_path / "run")
    longer = text_recipe(tmp_path / "text", f"train.weights={tmp_path / 'gone'}", "train.steps=6")
    train(longer, tmp_path / "run", resume=True)
    assert [record["step"] for record in lines(tmp_path / "run") if "train" in record] == [2, 4, 6]


def test_other_shapes_are_refused_with_the_settings_that_differ(base, tmp_path):
    given = text_recipe(tmp_path / "text", f"train.weights={base}", "model.d_model=32", "model.pre_norm=true")
    with pytest.raises(
        CheckpointError,
        match=r"tensors differ, the\s+first .* here, .* there\); there d_model = 16, no pre_norm",
    ):
        train(given, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_another_kind_of_model_is_refused(base, tmp_path):
    with pytest.raises(CheckpointError, match="there name = 'deq_transformer_small'"):
        train(recipe(COPY, f"train.weights={base}"), tmp_path / "run")


def test_another_vocabulary_is_refused(base, tmp_path):
    corpus = write_corpus(tmp_path / "text")
    for split in ("train", "valid", "test"):  # as many characters, one of them another
        path = corpus / f"{split}.txt"
        path.write_text(path.read_text().replace("j", "z"))
    with pytest.raises(ValueError, match=r"another vocabulary\.json than .*with which the model was trained"):
        train(recipe(TEXT, f"task.corpus={corpus}", f"train.weights={base}"), tmp_path / "run")


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        train(text_recipe(tmp_path / "text", f"train.weights={tmp_path / 'nothing'}"), tmp_path / "run")


def test_weights_and_a_transfer_exclude_each_other():
    with pytest.raises(ValueError, match=r"task\.transfer and train\.weights"):
        recipe(
            {
                "task": {"name": "classification", "data": "digits", "transfer": "runs/x"},
                "model": {"name": "mdeq_digits"},
            },
            "train.weights=runs/y",
        )
