"""A learned solver during training: when it is fitted, what is used, what is saved."""

import copy
import dataclasses
import io
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import HyperAnderson, Stop
from equipoise.tasks import _hyper_pool, hyper
from equipoise.tasks.hyper import FitSettings, Networks
from equipoise.train import ConfigError, alternate, loop
from equipoise.train.alternate import LATE, RESTING, Alternate, Alternation, FitStoppedError
from equipoise.train.load import load
from equipoise.train.loop import train
from equipoise.train.recipe import Recipe
from equipoise.train.tracking import read_metrics
from tests.runs import COPY, recipe
from tests.training import same, saved
from tests.unit.test_hyper_fit import Cell

SETTINGS = Alternate(
    start=2,
    first=4,
    every=3,
    refresh=2,
    max_steps=5,
    solver=Networks(hidden=4, compressed=4, width=4),
    fit=FitSettings(unroll=3, learning_rate=1e-2),
)


NAMES = ("whole", "again")


def batch(step):
    return torch.randn(8, 2, generator=torch.Generator().manual_seed(step))


def test_when_it_is_fitted():
    assert [SETTINGS.due(step, step >= 3) for step in range(10)] == [0, 0, 4, 0, 0, 2, 0, 0, 2, 0]
    assert SETTINGS.due(7, False) == 4  # a run may go on without one
    assert Alternate().due(10**6, False) == 0


def test_training_alternates():
    torch.manual_seed(0)
    deq = eq.DEQ(Cell(), engine="eager")
    alternation, optimiser = Alternation(SETTINGS), torch.optim.SGD(deq.parameters(), 0.01)
    own, logged, used, seen = deq.plan, [], [], []
    for step in range(6):
        before = copy.deepcopy(deq.state_dict())
        record = alternation.before(step, deq, lambda i: seen.append(i) or batch(i))
        assert all(torch.equal(value, before[name]) for name, value in deq.state_dict().items())
        logged.append(record and record["steps"])
        with alternation.used(deq):
            used.append((type(deq.plan.solver), deq.plan.stop.max_steps))
            assert deq.plan.adjoint == own.adjoint
            deq(batch(step)).value.square().sum().backward()
        assert deq.plan is own
        assert all(parameter.grad is None for parameter in (alternation.solver or nn.Identity()).parameters())
        optimiser.step()
        optimiser.zero_grad()
    assert logged == [None, None, 4, None, None, 2]
    assert seen == [2, 3, 4, 5, 5, 6]
    assert [kind.__name__ for kind, _ in used] == ["Anderson"] * 2 + ["HyperAnderson"] * 4
    assert used[0][1] == own.stop.max_steps
    assert used[-1][1] == 5
    assert alternation.seconds > 0


HOPELESS = dataclasses.replace(SETTINGS, fit=FitSettings(unroll=2, accept=1e-9, stop=Stop(rtol=0.0, max_steps=1)))


def test_a_solver_goes_on_where_nothing_new_can_be_learned():
    deq = eq.DEQ(Cell(), engine="eager")
    none = Alternation(HOPELESS)
    with pytest.warns(
        eq.EquilibriumWarning, match=r"step 2: no learned solver yet.*until step 5.*fit\.accept.*alternate\.fit\.KEY"
    ):
        assert none.before(2, deq, batch)["steps"] == 0
    again = Alternation(SETTINGS)
    again.load_state_dict(none.state_dict())
    assert [again.before(step, deq, batch) for step in (3, 4)] == [None, None]
    assert not again.in_use
    assert again.before(5, deq, batch)["steps"] == SETTINGS.first
    fitted = Alternation(SETTINGS)
    fitted.before(2, deq, batch)
    alternation = Alternation(HOPELESS, fitted.solver)
    record = alternation.before(5, deq, batch)
    assert record["steps"] == 0
    assert "allow more" in record["not_fitted"]
    assert alternation.solver is fitted.solver
    assert alternation.in_use


def test_a_solver_that_rests_goes_on_resting_where_nothing_new_can_be_learned():
    deq, fitted = eq.DEQ(Cell(), engine="eager"), Alternation(SETTINGS)
    fitted.before(2, deq, batch)
    alternation = Alternation(HOPELESS, fitted.solver, behind=RESTING)
    assert "not_fitted" in alternation.before(5, deq, batch)  # a regular fit
    assert not alternation.in_use
    again = Alternation(SETTINGS)
    again.load_state_dict(alternation.state_dict())
    assert again.before(8, deq, batch)["steps"] == SETTINGS.refresh
    assert again.in_use


@pytest.mark.parametrize("step", [3, 5])
def test_a_fit_that_learns_nothing_is_not_tried_before_each_step(step):
    deq, fitted = eq.DEQ(Cell(), engine="eager"), Alternation(SETTINGS)
    fitted.before(2, deq, batch)
    alternation = Alternation(HOPELESS, fitted.solver, behind=LATE)
    assert "not_fitted" in alternation.before(step, deq, batch)
    assert alternation.before(step + 1, deq, batch) is None
    alternation.note(1.0)
    assert not alternation.in_use


def test_a_solver_that_falls_behind_is_fitted_at_once_and_rests_if_that_does_not_help():
    deq, alternation = eq.DEQ(Cell(), engine="eager"), Alternation(dataclasses.replace(SETTINGS, every=30, limit=0.1))
    alternation.before(2, deq, batch)
    alternation.note(0.1)
    assert alternation.before(3, deq, batch) is None
    alternation.note(0.11)
    assert alternation.in_use
    assert alternation.before(4, deq, batch)["steps"] == SETTINGS.refresh
    assert alternation.before(5, deq, batch) is None  # once is enough until the next log line
    alternation.note(0.05)  # it helped
    alternation.note(float("nan"))
    assert alternation.before(6, deq, batch)["steps"] == SETTINGS.refresh
    alternation.note(0.2)  # it did not
    assert not alternation.in_use
    again = Alternation(alternation.settings)
    again.load_state_dict(alternation.state_dict())
    for part in (alternation, again):
        with part.used(deq):
            assert isinstance(deq.plan.solver, eq.Anderson)
        assert part.before(7, deq, batch) is None
        assert part.before(32, deq, batch)["steps"] == SETTINGS.refresh  # the next regular fit
        with part.used(deq):
            assert isinstance(deq.plan.solver, HyperAnderson)


def test_solves_get_more_steps_before_anything_else_is_tried():
    settings = dataclasses.replace(SETTINGS, every=30, limit=0.1, max_steps=5, most_steps=7)
    deq, alternation = eq.DEQ(Cell(), engine="eager"), Alternation(settings)
    alternation.before(2, deq, batch)
    seen = []
    for residual in (0.05, 0.2, 0.1, 0.3, 0.2):
        alternation.note(residual)
        again = Alternation(settings)
        again.load_state_dict(alternation.state_dict())
        with again.used(deq):
            seen.append(deq.plan.stop.max_steps)
    assert seen == [5, 6, 6, 7, 7]
    assert alternation.before(3, deq, batch)["steps"] == SETTINGS.refresh  # there are no more steps to be had
    alternation.note(0.2)
    assert not alternation.in_use


def test_a_residual_that_is_not_a_number_is_no_matter_of_steps():
    alternation = Alternation(dataclasses.replace(SETTINGS, max_steps=5, most_steps=7))
    alternation.note(float("nan"))
    assert (alternation.max_steps, alternation.behind) == (5, 1)


@pytest.mark.parametrize("given", [{"max_steps": None, "most_steps": 7}, {"max_steps": 8, "most_steps": 7}])
def test_steps_grow_from_somewhere(given):
    with pytest.raises(ValueError, match=r"most_steps=7 is what max_steps=(None|8) may grow to"):
        dataclasses.replace(SETTINGS, **given)


def test_training_goes_on_with_its_own_solver_where_a_learned_one_does_not_keep_up(tmp_path):
    learned = {"start": 1, "first": 2, "every": 50, "refresh": 1, "limit": 1e-6, "solver": {"hidden": 4, "width": 4}}
    given = recipe({**COPY, "alternate": {**learned, "fit": {"unroll": 2, "accept": 2.0}}}, "train.log_every=1")
    with pytest.warns(eq.EquilibriumWarning, match=r"even after a fit.*alternate\.every below 50"):
        train(given, tmp_path)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "hyper" in line] == [1, 2]
    used = [line["train"]["learned_solver"] for line in lines if "train" in line]
    assert used == [False, True, False, False, False, False]


def test_single_steps_between_fits_follow_a_model_that_changes():
    """The solver of one alternation follows, that of the other falls behind."""
    torch.manual_seed(0)
    deq = eq.DEQ(Cell(top=0.7), engine="eager")
    drift = [0.006 * torch.randn_like(parameter) for parameter in deq.parameters()]
    fit = dataclasses.replace(SETTINGS.fit, joint=True, solver=eq.Anderson(), stop=Stop(rtol=1e-3, max_steps=30))
    networks, ends = Networks(hidden=16, compressed=4, width=4, budget=10.0), {}
    rare = dataclasses.replace(SETTINGS, first=60, every=10**6, solver=networks, fit=fit)
    for follow in (None, 1):
        model, alternation = copy.deepcopy(deq), Alternation(dataclasses.replace(rare, follow=follow))
        for step in range(2, 42):
            record = alternation.before(step, model, batch)
            assert (record is None) == (step != 2)
            with torch.no_grad():
                for parameter, change in zip(model.parameters(), drift, strict=True):
                    parameter.add_(change)
        last = Stop(rtol=0, max_steps=3, select="last")
        with torch.no_grad(), eq.override(model, solver=alternation.solver, stop=last):
            ends[follow] = float(model(batch(99)).stats.residual.median())
    assert ends[1] < 0.9 * ends[None]


def test_a_solver_that_rests_does_not_follow():
    deq, alternation = eq.DEQ(Cell(), engine="eager"), Alternation(dataclasses.replace(SETTINGS, every=99, follow=1))
    alternation.before(2, deq, batch)
    alternation.behind = 3
    before = copy.deepcopy(alternation.solver.state_dict())
    alternation.before(3, deq, batch)
    assert all(torch.equal(value, before[name]) for name, value in alternation.solver.state_dict().items())
    alternation.behind = 0
    alternation.before(4, deq, batch)
    assert not all(torch.equal(value, before[name]) for name, value in alternation.solver.state_dict().items())


def test_each_equilibrium_keeps_its_own_tolerance():
    first, second = eq.DEQ(Cell(), stop=Stop(rtol=1e-2)), eq.DEQ(Cell(), stop=Stop(rtol=1e-5))
    alternation = Alternation(SETTINGS)
    alternation.before(2, first, batch)
    with alternation.used(nn.ModuleList([first, second])):
        stops = [deq.plan.stop for deq in (first, second)]
        assert {type(deq.plan.solver) for deq in (first, second)} == {HyperAnderson}
    assert [(stop.rtol, stop.max_steps) for stop in stops] == [(1e-2, 5), (1e-5, 5)]
    assert second.plan.stop == Stop(rtol=1e-5)


def test_it_goes_on_from_a_saved_state():
    deq, first, second = eq.DEQ(Cell(), engine="eager"), Alternation(SETTINGS), Alternation(SETTINGS)
    second.load_state_dict(first.state_dict())
    assert second.solver is None
    first.before(2, deq, batch)
    state = first.state_dict()
    second.load_state_dict(state)
    assert isinstance(second.solver, HyperAnderson)
    assert second.solver.config == first.solver.config
    pairs = zip(first.solver.parameters(), second.solver.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    for part in (first, second):
        part.before(5, deq, batch)
    pairs = zip(first.solver.parameters(), second.solver.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_runs_with_other_seeds_begin_with_other_weights_and_draws():
    deq, seen = eq.DEQ(Cell(), engine="eager"), []
    hardly = dataclasses.replace(SETTINGS, fit=FitSettings(unroll=2, learning_rate=1e-12))
    same = dataclasses.replace(hardly, fit=dataclasses.replace(hardly.fit, seed=3))

    def weights(settings, seed):
        alternation = Alternation(settings, seed=seed)
        alternation.before(2, deq, lambda i: seen.append(torch.initial_seed()) or batch(i))
        return torch.cat([parameter.flatten() for parameter in alternation.solver.parameters()])

    first, other, again = weights(hardly, 0), weights(hardly, 3), weights(same, 0)
    assert (first - other).abs().max() > 0.1
    torch.testing.assert_close(again, other, rtol=0.0, atol=1e-9)
    own, of_other = set(seen[:4]), set(seen[4:8])
    assert own == {2}  # what runs without a seed had before
    assert len(of_other) == 1
    assert own != of_other


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("follow", [{}, {"follow": 1}])
def test_a_resumed_run_goes_on_bit_by_bit(follow, seed, tmp_path):
    learned = {"start": 1, "first": 2, "every": 2, "refresh": 1, "solver": {"hidden": 4, "width": 4}, **follow}
    given = recipe({**COPY, "alternate": {**learned, "fit": {"unroll": 2, "accept": 2.0}}}, f"train.seed={seed}")
    train(given, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-000006")
    train(given, tmp_path / "again", resume=True)
    whole, again = (load(tmp_path / name, which="latest").state_dict() for name in NAMES)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    fits = [
        [line["step"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "hyper" in line] for name in NAMES
    ]
    assert fits == [[1, 3, 5]] * 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"start": -1}, "start must be an integer of at least 0"),
        ({"every": 0}, "every must be an integer"),
        ({"max_steps": 0}, "max_steps must be"),
        ({"follow": 0}, "follow must be an integer of at least 1"),
        ({"limit": 0.0}, "limit must be"),
    ],
)
def test_wrong_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        Alternate(**settings)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    """Each would fit a solver of its own."""
    monkeypatch.setattr(loop.Processes, "count", 2)
    monkeypatch.setattr(loop.Processes, "any", lambda self, flag: flag)
    with pytest.raises(ValueError, match=r"fitted in one process, and these are 2.*alternate\.start"):
        train(recipe(COPY, "alternate.start=1"), tmp_path)


def test_a_fit_has_the_seed_of_its_run(tmp_path, monkeypatch):
    seen, fit = [], alternate.fit_hyper_solver
    monkeypatch.setattr(
        alternate, "fit_hyper_solver", lambda *given, **named: seen.append(given[2].seed) or fit(*given, **named)
    )
    learned = {"start": 1, "first": 2, "solver": {"hidden": 4, "width": 4}, "fit": {"unroll": 2, "accept": 2.0}}
    train(recipe({**COPY, "alternate": learned}, "train.seed=3", "train.steps=2"), tmp_path)
    assert seen == [3]


# Ends before the end


@pytest.mark.parametrize("settings", [SETTINGS, HOPELESS])
@pytest.mark.parametrize("step", [3, 5])
def test_a_fit_that_is_stopped_leaves_no_trace(step, settings):
    deq, alternation = eq.DEQ(Cell(), engine="eager"), Alternation(SETTINGS)
    alternation.before(2, deq, batch)
    alternation.settings, alternation.behind = settings, LATE
    before, drawn = alternation.state_dict(), torch.get_rng_state()
    with pytest.raises(FitStoppedError, match=f"before step {step}"):
        alternation.before(step, deq, batch, until=lambda: True)
    assert same(alternation.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    nothing = Alternation(settings)
    with pytest.raises(FitStoppedError):
        nothing.before(step, deq, batch, until=lambda: True)
    assert same(nothing.state_dict(), Alternation(settings).state_dict())


@pytest.mark.parametrize(
    ("module", "name", "call", "step"),
    [
        (hyper, "_learn", 1, 1),
        (hyper, "_learn", 3, 1),  # the last of a fit: it is thrown away all the same
        (hyper, "_learn", 4, 3),
        (_hyper_pool, "find_targets", 1, 1),
        (_hyper_pool, "find_targets", 4, 3),
    ],
)
def test_a_run_that_a_signal_ends_within_a_fit_goes_on_bit_by_bit(module, name, call, step, tmp_path, monkeypatch):
    learned = {"start": 1, "first": 3, "every": 2, "refresh": 2, "follow": 1, "solver": {"hidden": 4, "width": 4}}
    given = recipe({**COPY, "alternate": {**learned, "fit": {"unroll": 2, "accept": 2.0, "pool": 2}}})
    train(given, tmp_path / "whole")
    own, calls = getattr(module, name), []

    def signalled(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return own(*arguments)

    monkeypatch.setattr(module, name, signalled)
    outcome = train(given, tmp_path / "again")
    assert (outcome.step, outcome.interrupted, len(calls)) == (step, "SIGTERM", call)
    monkeypatch.setattr(module, name, own)
    train(given, tmp_path / "again", resume=True)
    states = [saved(tmp_path / folder) for folder in NAMES]
    assert all(state["trainer"]["alternation"].pop("seconds") > 0 for state in states)
    assert same(*states)
    fits = [
        [line["step"] for line in read_metrics(tmp_path / folder / "metrics.jsonl") if "hyper" in line]
        for folder in NAMES
    ]
    assert fits == [[1, 3, 5]] * 2


@pytest.mark.parametrize("terminal", [True, False])
def test_a_person_sees_that_a_solver_is_fitted(terminal, tmp_path, monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", shown)
    learned = {"start": 1, "first": 2, "solver": {"hidden": 4, "width": 4}}
    fit = {"unroll": 2, "accept": 2.0, "pool": 2}
    train(recipe({**COPY, "alternate": {**learned, "fit": fit}}, "train.steps=2"), tmp_path)
    for words in ("equilibria:", "fitting a solver:"):
        assert (words in shown.getvalue()) == terminal


# Settings without effect

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "copy_memory",
            ["alternate.every=5"],
            r"^--set alternate.every=5: alternate.every has no effect without alternate.start.*alternate.start=none",
        ),
        ("copy_memory", ["alternate.fit.unroll=5"], "alternate.fit has no effect without alternate.start"),
        (
            "ptb_trellisnet_alternating",
            ["alternate.start=12400"],
            "^--set alternate.start=12400: alternate.start = 12400 is not below train.steps = 12400.*an earlier step",
        ),
        ("ptb_trellisnet_alternating", ["train.steps=9", "alternate.start=9"], "not below train.steps = 9"),
        (
            "ptb_trellisnet_alternating",
            ["alternate.fit.steps=300"],
            r"^--set alternate.fit.steps=300: .*no effect; alternate.first is .* alternate.refresh",
        ),
    ],
)
def test_settings_without_effect_are_refused(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        Recipe.read(RECIPES / f"{name}.toml", changes)


@pytest.mark.parametrize("changes", [["alternate.start=none"], ["train.steps=9"], ["alternate.start=12399"]])
def test_a_recipe_may_be_tried_without_or_before_its_learned_solver(changes):
    given = Recipe.read(RECIPES / "ptb_trellisnet_alternating.toml", changes)
    assert given.alternate.first == 150
    again = Recipe.from_data(given.to_data(), "config.json")  # as a finished run is read
    assert again.alternate == given.alternate


def test_records_have_the_steps_that_were_made(tmp_path):
    alternate = "alternate={start = 2, first = 2, max_steps = 3, fit = {unroll = 2, accept = 1e9}}"
    train(recipe(COPY, alternate), tmp_path / "run")
    records = [record["train"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "train" in record]
    assert [record["max_steps"] for record in records] == [6, 3, 3]
    assert all(record["forward"]["steps_p50"] <= record["max_steps"] for record in records)
