"""Fits of learned solvers on a CUDA device: recorded steps are the ordinary ones, and reports are written."""

import dataclasses
import json
import shutil

import pytest
import torch

import equipoise as eq
from equipoise import Stop
from equipoise.tasks import hyper
from equipoise.tasks._hyper_steps import REHEARSED, Learner
from equipoise.tasks.hyper import FitSettings, HyperRecipe, Networks, Pool, fit_hyper_solver
from equipoise.train.hyper_study import Measuring, study_run
from tests.cli.program import COPY, train
from tests.gpu.test_hyper_gpu import CASES, SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QUICK = FitSettings(steps=8, unroll=3, learning_rate=1e-2, accept=1.0, pool=3, stop=Stop(rtol=1e-3, max_steps=30))


def batches(shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).cuda() for _ in range(3)]


def fitted(deq, inputs, record, monkeypatch, **sizes):
    learners = []

    def made(solver, settings):
        learners.append(Learner(solver, settings, record=record))
        return learners[-1]

    monkeypatch.setattr(hyper, "Learner", made)
    fit = fit_hyper_solver(deq, inputs, QUICK, **sizes)
    return fit, learners[0]


@pytest.mark.parametrize("name", CASES)
def test_recorded_steps_are_the_ordinary_ones(name, monkeypatch):
    torch.manual_seed(0)
    cell, shape, settings = CASES[name]
    deq, inputs = eq.DEQ(cell()).cuda(), batches(shape)
    plain, _ = fitted(deq, inputs, False, monkeypatch, **SIZES, **settings)
    replayed, learner = fitted(deq, inputs, True, monkeypatch, **SIZES, **settings)
    assert learner.obstacle is None
    assert (plain.record["replayed"], replayed.record["replayed"]) == (0, QUICK.steps - REHEARSED)
    truths = dict(plain.solver.named_parameters())
    for key, ours in replayed.solver.named_parameters():
        # What is added to all weights alike cancels: the gradient of their shift is rounding, which Adam scales up.
        part = slice(1, None) if key == "step.out.bias" else slice(None)
        assert torch.allclose(ours[part], truths[key][part], rtol=1e-2, atol=1e-3), key
    assert replayed.record["last"]["loss"] == pytest.approx(plain.record["last"]["loss"], rel=1e-2)
    assert replayed.record["last"]["skipped"] == 0


def test_low_precision_and_several_fits_from_one_pool():
    torch.manual_seed(0)
    cell, shape, settings = CASES["local"]
    deq, inputs = eq.DEQ(cell()).cuda(), batches(shape)
    with torch.autocast("cuda", torch.bfloat16):
        pool = Pool(deq, inputs, QUICK)
        fits = [
            fit_hyper_solver(deq, inputs, dataclasses.replace(QUICK, seed=seed), pool=pool, **SIZES, **settings)
            for seed in (0, 0, 1)
        ]
    assert [fit.record["replayed"] for fit in fits] == [QUICK.steps - REHEARSED] * 3
    losses = [fit.record["last"]["loss"] for fit in fits]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] != losses[2]
    assert all(parameter.isfinite().all() for fit in fits for parameter in fit.solver.parameters())


def test_a_report(tmp_path):
    run = train(tmp_path, COPY)
    sizes = {"hidden": 4, "width": 4, "compressed": 4}
    recipes = {
        "full": HyperRecipe(Networks(**sizes), QUICK),
        "softmax": HyperRecipe(Networks(**sizes, weights="softmax"), QUICK, worse_than=("full",)),
    }
    measuring = Measuring(budgets=(1, 2, 4), at=4, most=1, rounds=3, warmup=2)
    record = study_run(run, recipes, tmp_path / "report", seeds=2, measuring=measuring)
    assert all(fit["replayed"] > 0 for variant in record["variants"].values() for fit in variant["fits"])
    assert "cuda" not in json.dumps(record["skipped"])
    assert record["missing"] == []
    assert record["engines"] == {"anderson": ["graph"], "hyper": ["graph"]}
    assert record["no_graph"] == []
    each = record["overhead"]["ms_per_step"]["hyper"]  # of a tiny model, so that noise may hide it
    assert (each is None and record["overhead"]["step_doubt"]) or each > 0
    assert (tmp_path / "report" / "README.md").is_file()
    shutil.rmtree(tmp_path / "report")
