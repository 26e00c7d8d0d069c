"""Equilibria that are kept, and steps of a fit that are recorded: the same as without either."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import Stop
from equipoise.models import create_model
from equipoise.nn import weight_norm
from equipoise.solvers import hyper_solver_for
from equipoise.tasks import _hyper_steps, hyper
from equipoise.tasks._hyper_steps import REHEARSED, Learner, gradients
from equipoise.tasks.hyper import FitSettings, Pool, find_targets, fit_hyper_solver
from tests.unit.test_hyper_fit import SIZES, Cell, batch

ROUGH = Stop(rtol=0.0, max_steps=12)
QUICK = FitSettings(steps=6, unroll=2, learning_rate=1e-2, stop=Stop(rtol=2e-2, max_steps=30))


@pytest.fixture
def deq():
    return eq.DEQ(Cell(), engine="eager")


def weights(fit):
    return [parameter.detach() for parameter in fit.solver.parameters()]


# The pool


def test_what_is_kept_is_what_is_found(deq):
    deq.eval()
    settings = FitSettings(pool=2)
    pool = Pool(deq, [batch(0), batch(1)], settings)
    assert (len(pool), pool.accepted) == (2, 1.0)
    assert pool.at(3) is pool.at(1)
    for number in (0, 1):
        (kept,), ((found,), _) = pool.at(number), find_targets(deq, batch(number), settings)
        assert torch.equal(kept.root[0], found.root[0])
        assert torch.equal(kept.residual, found.residual)
        z = [torch.full_like(found.root[0], 0.1)]
        with torch.no_grad():
            assert torch.equal(kept.problem.evaluate(z)[0], deq.cell(z[0], batch(number)))


def test_good_systems_take_the_places_of_others(deq):
    deq.eval()
    (target,), _ = find_targets(deq, batch(0), FitSettings(stop=ROUGH))
    accept = float(target.residual.quantile(0.7))
    good = (target.residual <= accept).nonzero()[:, 0]
    usable = target.usable(accept)
    assert usable.accepted == pytest.approx(len(good) / 64)
    assert usable.problem.num_systems == 64
    index = torch.cat([good, good])[:64]
    assert torch.equal(usable.root[0], target.root[0][index])
    with torch.no_grad():
        found = usable.problem.evaluate(usable.root)[0]
        assert torch.allclose(found, deq.cell(target.root[0], batch(0))[index], atol=1e-6)
    assert target.usable(1.0) is target
    assert target.usable(1e-12) is None


def test_systems_that_cannot_be_taken_apart_are_left_out():
    deq = eq.DEQ(Cell(), engine="eager", in_dims=None).eval()
    (target,), _ = find_targets(deq, batch(0), FitSettings(stop=ROUGH))
    usable = target.usable(float(target.residual.median()))
    assert usable.problem.num_systems == usable.root[0].shape[0] == 32


def test_time_is_a_limit_of_finding_too(deq):
    assert len(Pool(deq, map(batch, range(6)), QUICK, seconds=1e-9)) == 1
    assert len(Pool(deq, map(batch, range(6)), QUICK, seconds=3600.0)) == 6


def test_what_is_fitted_in_no_time_has_learned_from_one_batch(deq):
    settings = dataclasses.replace(QUICK, pool=6, steps=100)
    fit = fit_hyper_solver(deq, batch, settings, seconds=1e-9, **SIZES)
    assert (fit.record["steps"], fit.record["pool"]) == (1, 1)
    assert fit.solver.step.out.weight.any()  # zero before any fitting


def test_a_pool_without_equilibria(deq):
    with pytest.raises(ValueError, match=r"residual of 1e-09 in 12 steps: allow more \(fit.stop.max_steps\)"):
        Pool(deq, [batch(0)], FitSettings(stop=ROUGH, accept=1e-9))
    with pytest.raises(ValueError, match="is it a DEQ"):
        Pool(deq, [batch(0)], FitSettings(), forward=lambda model, batch, carry: None)


class Normed(nn.Module):
    """A cell whose weight is computed once per solve."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight_norm(nn.Linear(6, 6))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.inner(z) + x)


def test_what_follows_from_weights_is_kept_once():
    deq = eq.DEQ(Normed(), engine="eager")
    pool = Pool(deq, list(torch.randn(3, 4, 6)), FitSettings())
    kept = [pool.at(number)[0].problem.scope._derived for number in range(3)]
    assert kept[0] is kept[1] is kept[2]
    assert not kept[0]  # nothing is held until it is used
    for number in range(2):
        pool.at(number)[0].problem.evaluate([torch.zeros(4, 6)])
    assert list(kept[0]) == [deq.cell.inner]


def test_memory_is_carried_from_batch_to_batch():
    model = create_model("deq_transformer_small", vocab_size=11, d_model=8, heads=2, d_inner=12, memory_length=6)
    seen = []

    def forward(model, batch, carry):
        seen.append(None if carry is None else carry[0].shape[1])
        return model(batch, memory=carry).memory

    pool = Pool(model, list(torch.randint(11, (3, 4, 6))), FitSettings(accept=1.0), forward)
    assert seen == [None, 6, 6]
    assert len(pool) == 3


# Fits from a pool


def test_a_fit_from_a_pool_is_the_fit_on_those_batches(deq):
    settings = dataclasses.replace(QUICK, pool=2)
    fits = [
        fit_hyper_solver(deq, batch, settings, **SIZES),
        fit_hyper_solver(deq, [batch(0), batch(1)], QUICK, **SIZES),
        fit_hyper_solver(deq, batch, settings, pool=Pool(deq, [batch(0), batch(1)], settings), **SIZES),
    ]
    for pair in zip(*map(weights, fits), strict=True):
        assert torch.equal(pair[0], pair[1])
        assert torch.equal(pair[0], pair[2])
    assert [fit.record["pool"] for fit in fits] == [2, None, 2]


def test_a_pool_found_otherwise_is_refused(deq):
    pool = Pool(deq, [batch(0)], FitSettings(pool=1))
    with pytest.raises(ValueError, match="another solver, stop, accept or pool"):
        fit_hyper_solver(deq, batch, FitSettings(pool=1, accept=0.5), pool=pool, **SIZES)


def test_a_pool_of_other_weights_is_refused(deq):
    settings = dataclasses.replace(QUICK, pool=1)
    pool = Pool(deq, [batch(0)], settings)
    solver = fit_hyper_solver(deq, batch, settings, pool=pool, **SIZES).solver
    with eq.override(deq, solver=solver):  # a learned solver is no part of the model
        assert pool.is_of(deq)
    with torch.no_grad():
        deq.cell.outer.mul_(1.1)
    with pytest.raises(ValueError, match="with other weights"):
        fit_hyper_solver(deq, batch, settings, pool=pool, **SIZES)


def test_the_share_of_what_was_found_counts_what_was_left_out(deq):
    (target,), _ = find_targets(deq, batch(0), FitSettings(stop=ROUGH))
    accept = float(target.residual.quantile(0.7))
    settings = dataclasses.replace(QUICK, stop=ROUGH, accept=accept, steps=2)
    share = float((target.residual <= accept).double().mean())
    for pool in (None, 1):
        fit = fit_hyper_solver(deq, [batch(0)], dataclasses.replace(settings, pool=pool), **SIZES)
        assert fit.record["accepted"] == pytest.approx(share)
        assert fit.record["last"]["accepted"] == pytest.approx(share)


def test_nothing_is_recorded_before_losses_are_finite(deq):
    solver = hyper_solver_for(deq, batch(0), **SIZES)
    learner, (target,) = Learner(solver, FitSettings(unroll=2), record=True), find_targets(deq, batch(0), QUICK)[0]
    broken = dataclasses.replace(target, root=[torch.full_like(leaf, math.inf) for leaf in target.root])
    for _ in range(REHEARSED + 2):
        learner.step([broken], 0.0, 0.0)
    assert learner.replayed == 0
    learner.step([target], 0.0, 0.0)
    learner.step([target], 0.0, 0.0)
    assert learner.replayed == 1


def test_time_is_a_limit_and_schedules_follow(deq, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(hyper.time, "perf_counter", lambda: float(next(clock)))
    rates = []
    set_rate = Learner._set_rate
    monkeypatch.setattr(Learner, "_set_rate", lambda self, rate: (rates.append(rate), set_rate(self, rate)))
    settings = dataclasses.replace(QUICK, steps=100, learning_rate=1.0)
    fit = fit_hyper_solver(deq, batch, settings, seconds=10.0, log_every=1000, **SIZES)
    assert fit.record["steps"] < 15
    assert len(rates) == fit.record["steps"]
    assert rates[0] > 0.9
    assert rates[-1] == pytest.approx(0.0)
    assert rates == sorted(rates, reverse=True)


# Recorded steps; on the CPU a recording is run again from Python


def both(deq, monkeypatch, batches=batch, **settings):
    settings = dataclasses.replace(QUICK, **{"steps": 8, "pool": 3, **settings})
    plain = fit_hyper_solver(deq, batches, settings, **SIZES)
    learners = []

    def recording(solver, settings):
        learners.append(Learner(solver, settings, record=True))
        return learners[-1]

    monkeypatch.setattr(hyper, "Learner", recording)
    return plain, fit_hyper_solver(deq, batches, settings, **SIZES), learners[0]


def test_replayed_steps_are_the_same(deq, monkeypatch):
    plain, replayed, learner = both(deq, monkeypatch)
    assert (plain.record["replayed"], replayed.record["replayed"]) == (0, 8 - REHEARSED)
    assert learner.obstacle is None
    for a, b in zip(weights(plain), weights(replayed), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    keys = {"loss", "convergence", "end_residual", "gradient", "skipped", "accepted"}
    assert keys <= plain.record["last"].keys() == replayed.record["last"].keys()
    assert replayed.record["last"]["loss"] == pytest.approx(plain.record["last"]["loss"], rel=1e-5)


def test_batches_of_two_shapes_have_a_recording_each(deq, monkeypatch):
    def uneven(number):
        return batch(number)[: 64 - 7 * (number % 2)]

    plain, replayed, learner = both(deq, monkeypatch, uneven, pool=None)
    assert replayed.record["replayed"] == 8 - 2 * REHEARSED
    assert len(learner._seen) == 2
    assert not learner._replays  # what they held is given back
    for a, b in zip(weights(plain), weights(replayed), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_gradient_that_is_not_finite_is_taken_as_zero(deq, monkeypatch):
    calls = []

    def broken(solver, *arguments, **options):
        calls.append(1)
        record = gradients(solver, *arguments, **options)
        if len(calls) < 10:
            return record
        for parameter in solver.parameters():
            parameter.grad.fill_(math.nan)
        return {**record, "gradient": torch.tensor(math.nan)}

    solver = hyper_solver_for(deq, batch(0), **SIZES)
    learner, (target,) = Learner(solver, FitSettings(unroll=2), record=True), find_targets(deq, batch(0), QUICK)[0]
    monkeypatch.setattr(_hyper_steps, "gradients", broken)
    skipped = [float(learner.step([target], 0.0, 0.0)["skipped"]) for _ in range(10)]
    assert learner.replayed == 10 - REHEARSED
    # The rehearsal and the recording are calls, too.
    assert skipped == [0.0] * 7 + [1.0] * 3
    assert all(parameter.isfinite().all() for parameter in solver.parameters())


def test_what_cannot_be_recorded_is_done_from_python(deq, monkeypatch):
    _, fit, learner = both(deq, monkeypatch, checkpoint=True)
    assert (fit.record["replayed"], learner.obstacle) == (
        0,
        "what is evaluated again in the backward pass is not recorded",
    )


def test_a_recording_that_fails_leaves_the_fit_as_it_is(deq, monkeypatch):
    class Failing:
        def rehearse(self, run):
            run()
            raise RuntimeError("cannot be recorded\nmore")

    monkeypatch.setattr(_hyper_steps, "tape_for", lambda device: Failing())
    plain, fit, learner = both(deq, monkeypatch)
    assert (fit.record["replayed"], learner.obstacle) == (0, "cannot be recorded")
    for a, b in zip(weights(plain), weights(fit), strict=True):
        assert torch.equal(a, b)
