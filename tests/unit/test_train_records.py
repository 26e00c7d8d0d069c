"""What a run says of itself, how long it goes on, and in which precision."""

import math

import pytest
import torch

from equipoise.tasks import CopyMemoryTask
from equipoise.train import loop
from equipoise.train.checkpoint import list_checkpoints, load_checkpoint
from equipoise.train.config import ConfigError
from equipoise.train.loop import solutions_of, train
from tests.runs import COPY, evaluate_run, recipe, text_recipe
from tests.training import LSTM, PLAIN, lines, same, saved, train_records, valid_records, with_model

# Records


def test_every_record_says_when_and_how_fast(finished):
    out, _ = finished
    records = lines(out, timed=True)
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0
    for record in train_records(out, timed=True).values():
        # Eight sequences of 25 places a step.
        assert record["tokens_per_second"] * record["seconds_per_step"] == pytest.approx(200, rel=1e-6)
        assert (record["phase"], record["max_steps"]) == ("equilibrium", 6)
        assert "penalty_weight" not in record
        assert "peak_memory" not in record
    assert (records[0]["processes"], records[0]["accumulation"]) == (1, 1)


def test_records_tell_the_plan_of_their_step(tmp_path):
    """Phase, step budget, and the weight of the penalty where it was drawn, as the schedule has them."""
    settings = ("warmup.steps=2", "jitter.low=-3", "jitter.high=3", "penalty.weight=0.2", "penalty.probability=0.6")
    growing = ("penalty.every=1", "penalty.growth=0.3", "train.log_every=1")
    given = recipe(COPY, *settings, *growing)
    train(given, tmp_path)
    schedule = given.schedule(given.make_task().model())
    drawn = 0
    for step, record in train_records(tmp_path).items():
        plan = schedule.at(step - 1)
        assert (record["phase"], record["max_steps"]) == (plan.phase, plan.plan.stop.max_steps)
        assert record.get("penalty_weight", 0.0) == plan.penalty_weight
        drawn += plan.penalty_weight > 0
    assert 0 < drawn < 6


def test_evaluations_tell_the_budget_and_the_residual_they_were_made_at(tmp_path):
    budgets = "evaluation.budgets=[1, 40]"
    train(recipe(COPY, "evaluation.stop={max_steps=5, rtol=1e-4}", budgets, "train.evaluate_every=3"), tmp_path)
    records = valid_records(tmp_path)
    assert list(records) == [3, 6]
    assert "valid_at" not in records[3]  # the last evaluation only
    last = records[6]
    assert (last["valid"]["solve_max_steps"], last["valid"]["solve_rtol"]) == (5, 1e-4)
    assert list(last["valid_at"]) == ["1", "40"]
    few, many = last["valid_at"].values()
    assert (few["solve_max_steps"], few["solve_steps_p95"], few["solve_rtol"]) == (1, 1, 1e-4)
    residuals = [record["solve_residual_p95"] for record in (few, last["valid"], many)]
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[0] > residuals[-1] > 0
    again = evaluate_run(tmp_path, steps=[1, 40], which="latest")
    assert [few["loss"], many["loss"]] == pytest.approx([result["loss"] for result in again], rel=1e-6)


def test_budgets_mean_nothing_to_explicit_models(tmp_path):
    train(with_model(recipe(COPY, "evaluation.budgets=[3]", "train.steps=1"), **LSTM), tmp_path)
    assert "valid_at" not in lines(tmp_path)[-1]


def test_tensorboard_shows_the_log(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = ("train.tensorboard=true", "train.log_every=1")
    train(recipe(COPY, *settings, "train.steps=2"), tmp_path)
    train(recipe(COPY, *settings, "train.steps=3"), tmp_path, resume=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = {point.step: point.value for point in events.Scalars("train/loss")}
    assert points == pytest.approx({step: record["loss"] for step, record in train_records(tmp_path).items()})
    assert {"seconds", "train/forward/nfe", "train/tokens_per_second", "valid/loss"} <= set(events.Tags()["scalars"])


# How long, and how fast a rate


def test_a_run_ends_when_its_time_is_up(tmp_path, monkeypatch):
    """As after its last step: evaluated and saved, not interrupted; the rate is planned for all steps."""
    monkeypatch.setattr(loop._Run, "_clock", lambda self: 10.0 * self.state.step)
    settings = ('train.learning_rate={name="cosine"}', "train.log_every=1", "train.evaluate_every=5")
    train(recipe(COPY, *settings), tmp_path / "whole")
    short = recipe(COPY, *settings, "train.minutes=0.5")
    outcome = train(short, tmp_path / "parts")
    assert (outcome.step, outcome.interrupted) == (3, None)
    assert outcome.metrics == lines(tmp_path / "parts")[-1]["valid"]
    whole, parts = train_records(tmp_path / "whole"), train_records(tmp_path / "parts")
    assert parts == {step: whole[step] for step in (1, 2, 3)}
    # The time of the first part counts: nothing is left. With more of it, the run goes on as if never stopped.
    assert train(short, tmp_path / "parts", resume=True).step == 3
    assert train(recipe(COPY, *settings, "train.minutes=5"), tmp_path / "parts", resume=True).step == 6
    assert same(saved(tmp_path / "parts")["model"], saved(tmp_path / "whole")["model"])


def test_a_rate_that_follows_the_clock_is_annealed_when_time_is_up(tmp_path, monkeypatch):
    """Six steps are planned, time is up after three: the rate takes two steps at a time."""
    monkeypatch.setattr(loop._Run, "_clock", lambda self: 10.0 * self.state.step)
    settings = ('train.learning_rate={name="cosine"}', "train.log_every=1", "train.minutes=0.5")
    train(recipe(COPY, *settings, "train.anneal_by=minutes"), tmp_path)
    base = recipe(COPY).train.optimiser.lr
    rates = [record["lr"] / base for record in train_records(tmp_path).values()]
    assert rates == pytest.approx([0.5 * (1 + math.cos(math.pi * share)) for share in (0, 1 / 3, 2 / 3)])


def test_the_linear_start_of_a_rate_is_counted_in_steps_whatever_the_clock_says(tmp_path, monkeypatch):
    """Half of the time is up after the first step, as where kernels are compiled for long."""
    monkeypatch.setattr(loop._Run, "_clock", lambda self: 15.0 if self.state.step else 0.0)
    settings = ('train.learning_rate={name="cosine", warmup=3}', "train.log_every=1", "train.minutes=0.5")
    train(recipe(COPY, *settings, "train.anneal_by=minutes", "train.steps=5"), tmp_path)
    base = recipe(COPY).train.optimiser.lr
    rates = [record["lr"] / base for record in train_records(tmp_path).values()]
    cosine = [0.5 * (1 + math.cos(math.pi * share)) for share in (3 / 5, 4 / 5)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, *cosine])


def test_a_rate_cannot_follow_a_clock_without_a_limit():
    with pytest.raises(ConfigError, match=r"anneal_by.*needs minutes.*train\.minutes"):
        recipe(COPY, "train.anneal_by=minutes")


def test_time_goes_on_where_a_run_was_left(tmp_path):
    train(recipe(COPY, "train.steps=2"), tmp_path)
    before = lines(tmp_path, timed=True)[-1]["seconds"]
    train(recipe(COPY, "train.steps=4"), tmp_path, resume=True)
    seconds = [record["seconds"] for record in lines(tmp_path, timed=True)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > before > 0


def scores(monkeypatch, *values):
    """Make evaluations give these losses; the first is that of the trial before the first step."""
    given = iter([9.0, *values])
    monkeypatch.setattr(CopyMemoryTask, "report", lambda self, metrics: {**metrics, "loss": next(given)})


def test_a_plateau_lowers_the_rate(tmp_path, monkeypatch):
    scores(monkeypatch, 3.0, 4.0, 2.0, 2.5, 2.4, 2.3)
    settings = ("train.evaluate_every=1", "train.log_every=1", "train.plateau={patience=1, gamma=0.5, floor=0.2}")
    train(with_model(recipe(COPY, *settings, "train.learning_rate.warmup=0"), **LSTM), tmp_path)
    rates = [record["lr"] for record in train_records(tmp_path).values()]
    assert rates == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4, 2e-4])  # on the step after each


def test_an_average_may_wait_for_a_plateau(tmp_path, monkeypatch):
    scores(monkeypatch, 3.0, 4.0, 2.0, 1.0)
    waiting = ('train.averaging={kind="uniform", start="none"}', "train.plateau={patience=1}")
    settings = ("train.evaluate_every=1", "train.steps=4", "train.keep=9")
    train(with_model(recipe(COPY, *waiting, *settings), **LSTM), tmp_path)
    counts = [
        load_checkpoint(folder).trainer["average"]["count"] for folder in list_checkpoints(tmp_path / "checkpoints")
    ]
    assert counts == [0, 0, 1, 2]


# Precision


def test_losses_states_and_weights_are_float32_under_bf16(tmp_path, monkeypatch):
    seen = []
    usual = CopyMemoryTask.training_step

    def spy(self, model, batch, carry, number):
        with solutions_of(model) as solutions:
            losses, carry = usual(self, model, batch, carry, number)
        seen.append((losses["loss"].dtype, solutions[0][0].value.dtype, solutions[0][0].problem.autocast))
        return losses, carry

    monkeypatch.setattr(CopyMemoryTask, "training_step", spy)
    train(recipe(COPY, "train.steps=2", "train.precision=bf16", "penalty.weight=0.1", "train.accumulation=2"), tmp_path)
    assert seen == [(torch.float32, torch.float32, torch.bfloat16)] * 4
    whole = saved(tmp_path)
    moments = whole["trainer"]["stepper"]["optimizer"]["state"].values()
    assert all(value.dtype == torch.float32 for value in whole["model"].values())
    assert all(state["exp_avg"].dtype == torch.float32 for state in moments)


def test_a_scaled_loss_trains_as_an_unscaled_one(tmp_path, monkeypatch):
    """Float16 needs a GPU, its loss scaling does not: a scale that is a power of two changes no bit."""
    settings = ("train.steps=4", "train.clip.max_norm=0.05", "penalty.weight=0.1", "train.log_every=1")
    train(recipe(COPY, *PLAIN, *settings), tmp_path / "plain")
    usual = loop.setup

    def scaled(*arguments):
        accelerator = usual(*arguments)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        return accelerator

    monkeypatch.setattr(loop, "setup", scaled)
    train(recipe(COPY, *PLAIN, *settings, "train.steps=2"), tmp_path / "scaled")
    train(recipe(COPY, *PLAIN, *settings), tmp_path / "scaled", resume=True)
    plain, found = train_records(tmp_path / "plain"), train_records(tmp_path / "scaled")
    # The third step in a row without overflow doubles the scale, also if a run is resumed in between.
    assert [record.pop("loss_scale") for record in found.values()] == [2.0**14, 2.0**14, 2.0**15, 2.0**15]
    assert found == plain
    assert same(saved(tmp_path / "scaled")["model"], saved(tmp_path / "plain")["model"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_half_precision_on_a_device(tmp_path, interrupt):
    """Scaled losses, memory on the device, statistics of a resumed run that lie on both sides."""
    given = text_recipe(tmp_path / "text", "train.precision=fp16", "train.log_every=4", "model.dropout=0.1")
    interrupt(3)
    train(given, tmp_path / "run")
    interrupt.never()
    train(given, tmp_path / "run", resume=True)
    records = train_records(tmp_path / "run")
    assert records[4]["forward"]["solves"] == 4
    assert all(record["loss_scale"] > 0 and record["peak_memory"] > 0 for record in records.values())
    assert records[6]["nats"] < 3  # ln 13 = 2.6 at the beginning
    assert all(value.dtype == torch.float32 for value in saved(tmp_path / "run")["model"].values())
