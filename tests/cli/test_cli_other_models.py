"""Commands on images: models with several resolutions, without an equilibrium, and runs that do not go together."""

import json

import pytest

from tests.cli.program import DIGITS, IMAGES, SHAPES, invoke, one_line, trained_images

RESNET = {**DIGITS, "model": "resnet_cifar_tiny", "settings": ""}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs by name; not to be changed, but for what commands write."""
    words = {"mdeq": DIGITS, "resnet": RESNET, "shapes": SHAPES}
    return {name: trained_images(tmp_path_factory.mktemp(name) / name, **words[name]) for name in words}


def test_resolutions_by_another_solver(runs):
    def curves(*options):
        shown = invoke("inspect", runs["mdeq"], "--depths", "1", "--batches", 1, *options, "--json").stdout
        return json.loads(shown)

    own, other = curves(), curves("--solver", "picard")
    assert (own["steps"]["solver"], other["steps"]["solver"]) == ("Anderson", "Picard")
    assert list(own["resolutions"]) == list(other["resolutions"])
    for name, curve in other["resolutions"].items():
        assert curve["median"][0] == pytest.approx(own["resolutions"][name]["median"][0])  # they start alike
        assert curve["median"][5] != pytest.approx(own["resolutions"][name]["median"][5])
    ladder = curves("--solver", "ladder")
    assert ladder["resolutions"] == {}
    assert any("A Ladder keeps no iterates" in note for note in ladder["notes"])


@pytest.mark.parametrize(
    "arguments", [("evaluate", "--pareto"), ("evaluate", "--guard"), ("hyper",), ("hyper", "--report", "out")]
)
def test_a_model_without_an_equilibrium_is_said_to_be_one(runs, run_main, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, _, error = run_main(arguments[0], runs["resnet"], *arguments[1:])
    assert code == 2
    assert "has no equilibrium" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_other_data_is_refused(runs, run_main, tmp_path, monkeypatch):
    monkeypatch.setattr("equipoise.train.pareto.load", lambda *_: pytest.fail("nothing should be loaded"))
    for command in (("evaluate", "--pareto", "--solver", "anderson"), ("hyper", "--report", tmp_path / "out")):
        code, _, error = run_main(command[0], runs["mdeq"], *command[1:], "--beside", runs["shapes"])
        assert code == 2
        assert f"{runs['shapes']} cannot be put beside {runs['mdeq']}" in one_line(error)
        assert "task.name is 'classification' here and 'segmentation' there" in error
        assert "task.data is 'digits' here and 'shapes' there" in error
        assert "model.num_classes is 10 here and " in error
    assert not (runs["mdeq"] / "pareto.json").exists()


def test_a_run_on_the_same_data_is_taken(runs):
    options = ("--pareto", "--solver", "anderson", "--steps", 1, "--beside", runs["resnet"], "--json")
    record = json.loads(invoke("evaluate", runs["mdeq"], *options).stdout)
    assert [point["solver"] for point in record["points"]] == ["anderson", "resnet"]
    assert all(point["ms_mean"] > 0 for point in record["points"])


def test_settings_of_another_model_come_with_a_hint(tmp_path, run_main):
    (tmp_path / "recipe.toml").write_text(IMAGES.format(**{**DIGITS, "settings": "channels_last = true"}))
    options = ("--set", "model.name=resnet_cifar_tiny", "--out", tmp_path / "run")
    code, _, error = run_main("train", tmp_path / "recipe.toml", *options)
    assert code == 2
    assert "unknown setting of ResNetConfig 'channels_last'" in one_line(error)
    assert """set the model as a whole: --set 'model={name="resnet_cifar_tiny"}'.""" in error
