"""BatchNorm beside averaged weights: statistics are those of the weights that are shown, and training keeps its own."""

import pytest
import torch
from torch import nn

from equipoise.train.load import open_run
from equipoise.train.loop import LOG, train
from equipoise.train.statistics import copy_statistics, restated, running_statistics
from equipoise.train.tracking import read_metrics
from tests.problems import gaussian
from tests.runs import recipe
from tests.training import same, saved
from tests.unit.test_tasks_vision import DIGITS

EMA = ('train.averaging={kind="ema", decay=0.9, batches=3}', "train.optimiser.lr=3e-2")


def network() -> nn.Module:
    torch.manual_seed(0)
    kept = nn.BatchNorm2d(4, momentum=0.3)
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), kept, nn.Dropout(0.5), nn.BatchNorm2d(4, track_running_stats=False)
    ).double()


def test_they_are_the_means_over_batches():
    """Of batch means, and of unbiased variances of batches, against sums written out; in float64."""
    model = network()
    batches = [gaussian(5, 3, 4, 4, seed=k) + k for k in range(3)]
    hidden = [model[0](batch).transpose(0, 1).flatten(1) for batch in batches]
    with restated(model, lambda: [model(batch) for batch in batches]) as found:
        assert set(found) == {"1.running_mean", "1.running_var"}
        mean = torch.stack([h.mean(1) for h in hidden]).mean(0)
        variance = torch.stack([h.var(1) for h in hidden]).mean(0)
        torch.testing.assert_close(found["1.running_mean"], mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["1.running_var"], variance, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(fails):
    model = network().train()
    model(gaussian(5, 3, 4, 4, seed=0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()

    def run():
        model(gaussian(5, 3, 4, 4, seed=1))
        if fails:
            raise RuntimeError("on the way")

    try:
        with restated(model, run) as found:
            assert not torch.equal(found["1.running_mean"], before["1.running_mean"])
    except RuntimeError:
        assert fails
    assert same(dict(model.state_dict()), before)
    assert model[1].momentum == 0.3
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), drawn)  # dropout was off


def test_a_run_shows_averaged_weights_with_their_own_statistics(tmp_path):
    """What is saved is what batches of training images say of the saved weights, not of those in training."""
    train(recipe(DIGITS, "train.steps=4", *EMA), tmp_path / "run")
    opened = open_run(tmp_path / "run", "valid", which="latest")
    kept = {name: value.clone() for name, value in running_statistics(opened.model).items()}
    assert kept

    def run():
        for step in range(4, 7):
            opened.task.training_step(opened.model, opened.splits.train(step).to("cpu"), None, step)

    with restated(opened.model, run) as found:
        again = {name: value.clone() for name, value in found.items()}
    for name, value in kept.items():
        torch.testing.assert_close(again[name], value, rtol=1e-4, atol=1e-5)
    live = saved(tmp_path / "run")["trainer"]["live"]
    assert any(not torch.allclose(live[name], kept[name], rtol=1e-2) for name in kept)


def test_a_resumed_run_goes_on_from_the_statistics_of_training(tmp_path, interrupt):
    settings = ("train.steps=6", "train.evaluate_every=2", "train.save_every=3", *EMA)
    given = recipe(DIGITS, *settings)
    train(given, tmp_path / "whole")
    interrupt(5)
    train(given, tmp_path / "parts")
    interrupt.never()
    train(given, tmp_path / "parts", resume=True)
    assert same(saved(tmp_path / "parts"), saved(tmp_path / "whole"))
    scores = [
        [record["valid"] for record in read_metrics(tmp_path / name / LOG) if "valid" in record]
        for name in ("parts", "whole")
    ]
    assert scores[0] == scores[1]


def test_training_is_the_same_whether_it_was_looked_at_or_not(tmp_path):
    for name, every in (("often", 1), ("once", 4)):
        train(recipe(DIGITS, "train.steps=4", f"train.evaluate_every={every}", *EMA), tmp_path / name)
    often, once = (saved(tmp_path / name) for name in ("often", "once"))
    assert same(often["trainer"]["live"], once["trainer"]["live"])
    assert same(often["model"], once["model"])


def test_statistics_of_another_time():
    model = network()
    copy_statistics(model, {"1.running_mean": torch.full((4,), 2.0), "1.running_var": torch.full((4,), 3.0)})
    assert running_statistics(model)["1.running_mean"].tolist() == [2.0] * 4
