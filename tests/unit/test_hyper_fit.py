"""Fitting a learned solver: what is learned from, what is learned, and what stays as it is."""

import contextlib
import copy
import dataclasses
import functools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import Anderson, HyperAnderson, Stop
from equipoise.models import create_model
from equipoise.solvers import hyper_solver_for
from equipoise.tasks import hyper
from equipoise.tasks._hyper_pool import constant_scope, rebuilt
from equipoise.tasks._hyper_steps import Learner
from equipoise.tasks.hyper import (
    PUBLISHED,
    Balance,
    FitSettings,
    Follower,
    HyperRecipe,
    LossWeights,
    Networks,
    NoEquilibriaError,
    NotFittedError,
    find_targets,
    fit_hyper_solver,
    hyper_step,
    unrolled_losses,
)
from equipoise.train.config import load_config
from equipoise.train.tracking import read_metrics

SIZES = {"hidden": 6, "compressed": 4, "width": 5, "budget": None}
SHORT = FitSettings(steps=3, unroll=4)


class Cell(nn.Module):
    """(N, 24) from two numbers; the slowest part of the plain iteration shrinks by 0.98 per step near zero."""

    def __init__(self, d: int = 24, top: float = 0.98) -> None:
        super().__init__()
        torch.manual_seed(5)
        turn = torch.linalg.qr(torch.randn(d, d))[0]
        self.inner = nn.Parameter((turn * torch.linspace(-0.9, top, d)) @ turn.T)
        self.outer = nn.Parameter(torch.randn(d, 2) / math.sqrt(2))
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(2)

    def initial_state(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), len(self.inner))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.dropout(z @ self.inner.T) + self.norm(x) @ self.outer.T)


def batch(number: int) -> Tensor:
    return torch.randn(64, 2, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def deq():
    return eq.DEQ(Cell(), engine="eager")


def small(deq: eq.DEQ, **settings) -> HyperAnderson:
    return hyper_solver_for(deq, batch(0), **{**SIZES, **settings})


def shaken(solver: HyperAnderson) -> HyperAnderson:
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in solver.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return solver


def test_a_tensor_is_no_list_of_batches(deq):
    with pytest.raises(
        TypeError, match=r"batches is a tensor of shape \(64, 2\): give a list of batches, \[x\] for one"
    ):
        fit_hyper_solver(deq, batch(0), SHORT)


def test_single_steps_need_gradients_too(deq):
    solver, optimiser = small(deq), None
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="a fit needs gradients"):
            hyper_step(deq, batch(0), solver, optimiser)
        with pytest.raises(RuntimeError, match="a fit needs gradients"):
            Follower(solver, SHORT).step(deq, batch(0))


# What it is for


def mean_steps(deq: eq.DEQ, solver: eq.Solver, rtol: float) -> float:
    with torch.no_grad(), eq.override(deq, solver=solver, stop=Stop(rtol=rtol, max_steps=60)):
        solution = deq.eval()(batch(10**6))
    assert solution.stats.ok.all()
    return float(solution.stats.steps.double().mean())


def test_a_fitted_solver_needs_at_most_three_fifths_of_andersons_steps(deq):
    settings = FitSettings(steps=100, unroll=8, learning_rate=2e-2)
    fit = fit_hyper_solver(deq, batch, settings, budget=None, hidden=64, compressed=8, width=32)
    assert fit.record["seconds"] < 60
    assert mean_steps(deq, fit.solver, 1e-2) <= 0.6 * mean_steps(deq, Anderson(), 1e-2)
    # Beyond the steps that were unrolled it goes on as fast.
    assert mean_steps(deq, fit.solver, 1e-4) <= mean_steps(deq, Anderson(), 1e-4)
    assert fit.record["last"]["end_residual"] < 0.3 * fit.record["first"]["end_residual"]


# What stays


def test_the_model_is_not_touched(deq):
    deq.train()
    deq.cell.norm.eval()
    deq.cell.inner.requires_grad_(False)
    deq.cell.outer.grad = torch.ones_like(deq.cell.outer)
    plan, state = deq.plan, copy.deepcopy(deq.state_dict())
    fit_hyper_solver(deq, batch, SHORT, **SIZES)
    assert all(torch.equal(value, state[name]) for name, value in deq.state_dict().items())
    assert deq.plan is plan
    assert [m.training for m in (deq, deq.cell, deq.cell.dropout, deq.cell.norm)] == [True, True, True, False]
    assert (deq.cell.inner.requires_grad, deq.cell.outer.requires_grad) == (False, True)
    assert torch.equal(deq.cell.outer.grad, torch.ones_like(deq.cell.outer))
    assert deq.cell.inner.grad is None
    assert not any(module._forward_hooks for module in deq.modules())


def test_random_numbers_of_others_are_not_drawn(deq):
    before = torch.random.get_rng_state()
    fit_hyper_solver(deq, batch, SHORT, **SIZES)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_random_numbers_of_devices_are_left_alone(deq, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)  # what torch.manual_seed calls
    assert fit_hyper_solver(deq, batch, SHORT, **SIZES).record["steps"] == SHORT.steps


def test_a_fit_without_any_equilibrium_is_an_error(deq):
    solver = fit_hyper_solver(deq, batch, SHORT, **SIZES).solver
    hopeless = FitSettings(steps=2, unroll=2, accept=1e-9, stop=Stop(rtol=0.0, max_steps=1))
    with pytest.raises(NoEquilibriaError, match=r"finds to a residual of 1e-09 in 1 steps: allow more"):
        fit_hyper_solver(deq, batch, hopeless, solver=solver)


class Slopes(nn.Module):
    """f(z, a) = a z + 1 for each system its own a: plain steps run away where it is below -1, the root is there."""

    def forward(self, z: Tensor, a: Tensor) -> Tensor:
        return a * z + 1


def slopes(*values: float) -> Tensor:
    return torch.tensor(values)[:, None].expand(-1, 4).contiguous()


def test_systems_that_run_away_do_not_spoil_the_fit_of_others():
    torch.manual_seed(0)
    deq = eq.DEQ(Slopes(), engine="eager")
    solver = hyper_solver_for(deq, slopes(0.5, 0.5), **SIZES)
    settings = FitSettings(steps=2, unroll=16, accept=1e-3, solver=eq.NewtonKrylov())
    (target,), _ = find_targets(deq, slopes(0.5, -1e3), settings)
    assert target.usable(1e-3) is target  # both have roots
    losses = unrolled_losses(solver, target, settings)
    assert losses.last.isfinite().all()
    sum(losses.parts).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in solver.parameters())
    fit = fit_hyper_solver(deq, [slopes(0.5, -1e3)], settings, solver=solver)
    assert fit.record["skipped"] == 0
    # What stays near is as it would be alone.
    alone, beside = (
        unrolled_losses(solver, find_targets(deq, slopes(*a), settings)[0][0], settings)
        for a in ((0.5, 0.5), (0.5, -1e3))
    )
    assert torch.equal(alone.last[0], beside.last[0])


class Kink(nn.Module):
    """A contraction whose derivative is not a number anywhere."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z + x + (z - z.detach()).abs().sqrt()


def test_a_fit_that_makes_no_step_is_an_error():
    deq = eq.DEQ(Kink(), engine="eager")
    with pytest.raises(NotFittedError, match=r"none of 3 steps.*gradient of 4 unrolled steps.*\(fit\.unroll\)"):
        fit_hyper_solver(deq, lambda step: torch.randn(2, 4), SHORT, **SIZES)


def test_a_solver_in_a_frozen_model_learns_on(deq):
    deq.plan = deq.plan.replace(solver=shaken(small(deq)))
    deq.requires_grad_(False)
    solver, before = deq.plan.solver, weights_of(deq.plan.solver)
    fit_hyper_solver(deq, batch, SHORT, solver=solver)
    assert not all(torch.equal(a, b) for a, b in zip(before, weights_of(solver), strict=True))
    assert not any(parameter.requires_grad for parameter in deq.parameters())


def weights_of(solver: HyperAnderson) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in solver.parameters()]


def test_inference_mode_is_refused(deq):
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"needs gradients.*inference_mode"):
        fit_hyper_solver(deq, batch, SHORT, **SIZES)


def test_as_many_batches_as_steps_are_enough(deq):
    fit = fit_hyper_solver(deq, (batch(k) for k in range(SHORT.steps)), SHORT, **SIZES)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(fit.solver), weights_of(like(deq)), strict=True))
    with pytest.raises(ValueError, match="the batches are used up"):
        fit_hyper_solver(deq, (batch(k) for k in range(SHORT.steps - 1)), SHORT, **SIZES)


def like(deq: eq.DEQ) -> HyperAnderson:
    return fit_hyper_solver(deq, batch, SHORT, **SIZES).solver


def test_a_solver_in_use_is_no_part_of_the_model(deq):
    first = fit_hyper_solver(deq, batch, SHORT, **{**SIZES, "budget": 0.5})
    deq.plan = deq.plan.replace(solver=first.solver)
    second = fit_hyper_solver(deq, batch, SHORT, **{**SIZES, "budget": 0.5})
    for name in ("parameters", "model_parameters", "share"):
        assert second.record[name] == first.record[name]


def test_no_time_is_no_limit_of_time(deq):
    with pytest.raises(ValueError, match="seconds"):
        fit_hyper_solver(deq, batch, SHORT, seconds=0.0, **SIZES)


@pytest.mark.parametrize(("pool", "steps", "found"), [(None, 3, None), (9, 1, 3), (2, 1, 2)])
def test_a_fit_ends_when_it_is_told_to(deq, pool, steps, found):
    asked = []
    settings = FitSettings(steps=9, unroll=2, pool=pool)
    fit = fit_hyper_solver(deq, batch, settings, until=lambda: asked.append(None) or len(asked) >= 3, **SIZES)
    assert (fit.record["steps"], fit.record["pool"]) == (steps, found)
    assert len(asked) == 3 + (found == 3)  # of a pool that was told to end, once more after a step


def test_a_seed_is_a_fit(deq):
    fits = [fit_hyper_solver(deq, batch, FitSettings(steps=2, unroll=2, seed=s), **SIZES).solver for s in (0, 0, 1)]
    weights = [fit.step.inner.weight for fit in fits]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# What is learned from


def test_targets_are_equilibria_in_eval_mode(deq):
    deq.train()
    (target,), carry = find_targets(deq, batch(3), FitSettings(stop=Stop(rtol=1e-6)))
    assert carry is None
    with torch.no_grad(), eq.override(deq, solver=Anderson(), stop=Stop(rtol=1e-6)):
        expected = deq.eval()(batch(3)).value
    assert torch.allclose(target.root[0], expected, atol=1e-4)
    assert target.start[0].abs().max() == 0
    assert target.residual.max() < 1e-6
    assert not target.root[0].requires_grad


def test_systems_without_an_equilibrium_are_left_out(deq):
    deq.eval()
    solver, optimiser = small(deq), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    (target,), _ = find_targets(deq, batch(0), FitSettings(stop=Stop(rtol=0.0, max_steps=12)))
    accept = float(target.residual.median())
    settings = FitSettings(unroll=3, stop=Stop(rtol=0.0, max_steps=12), accept=accept)
    record, _ = hyper_step(deq, batch(0), solver, optimiser, settings=settings)
    kept = (target.residual <= accept).nonzero()[:, 0]
    assert float(record["accepted"]) == pytest.approx(len(kept) / 64)
    alone = unrolled_losses(solver, find_targets(deq, batch(0)[kept], settings)[0][0], settings)
    assert float(record["convergence"]) == pytest.approx(float(alone.convergence.detach()), rel=1e-4)
    record, _ = hyper_step(deq, batch(0), solver, optimiser, settings=FitSettings(accept=1e-9))
    assert float(record["accepted"]) == 0
    assert "loss" not in record


# Losses


@pytest.mark.parametrize("emphasis", ["increasing", "quadratic", "uniform", "last"])
@pytest.mark.parametrize("logarithm", [False, True])
def test_losses_are_those_of_a_plain_loop(deq, emphasis, logarithm):
    solver, settings = shaken(small(deq)), FitSettings(unroll=5, emphasis=emphasis, logarithm=logarithm)
    deq.eval()
    (target,), _ = find_targets(deq, batch(1), settings)
    losses = unrolled_losses(solver, target, settings)
    root = target.root[0]
    stop = Stop(rtol=0.0, max_steps=5, select="last")
    with torch.no_grad(), eq.override(deq, solver=solver, stop=stop):
        collected = deq(batch(1), collect=("iterates", "weights")).collected
    z = collected["iterates"]
    with torch.no_grad():
        g = [deq.cell(one, batch(1)) - one for one in z]
    distances = torch.stack([(one - root).norm(dim=1) for one in z])  # (6, N)
    emphases = {
        "increasing": [k / 15 for k in range(1, 6)],
        "quadratic": [k**2 / 55 for k in range(1, 6)],
        "uniform": [1 / 5] * 5,
        "last": [0.0, 0.0, 0.0, 0.0, 1.0],
    }
    assert settings.emphases() == pytest.approx(emphases[emphasis])
    measured = torch.log(1 + distances[1:] / (1e-3 * root.norm(dim=1))) if logarithm else distances[1:]
    assert float(losses.initial.detach()) == pytest.approx(float(distances[0].mean()), rel=1e-4)
    expected = sum(w * m.mean() for w, m in zip(emphases[emphasis], measured, strict=True))
    assert float(losses.convergence.detach()) == pytest.approx(float(expected), rel=1e-4)
    combined = [
        sum(weights[:, i, None] * g[k + 1 - weights.shape[1] + i] for i in range(weights.shape[1])).norm(dim=1).mean()
        for k, weights in enumerate(collected["weights"])
    ]
    assert float(losses.residual.detach()) == pytest.approx(float(sum(combined)), rel=1e-4)
    relative = g[0].norm(dim=1) / (g[0] + z[0]).norm(dim=1)
    assert torch.allclose(losses.first, relative, rtol=1e-4)


def gradients(deq: eq.DEQ, solver: HyperAnderson, settings: FitSettings) -> dict[str, float]:
    (target,), _ = find_targets(deq, batch(1), settings)
    solver.zero_grad()
    losses = unrolled_losses(solver, target, settings)
    sizes = {}
    for name in ("convergence", "initial", "residual"):
        wanted = {part: list(getattr(solver, part).parameters()) for part in ("initialiser", "step", "compression")}
        for part, parameters in wanted.items():
            grads = torch.autograd.grad(getattr(losses, name), parameters, retain_graph=True, allow_unused=True)
            sizes[f"{name}/{part}"] = sum(float(g.abs().sum()) for g in grads if g is not None)
    return sizes


def test_each_loss_trains_its_own_part(deq):
    deq.eval()
    sizes = gradients(deq, shaken(small(deq)), FitSettings(unroll=3))
    trained = {name for name, size in sizes.items() if size > 0}
    assert trained == {
        "initial/initialiser",
        *(f"{loss}/{part}" for loss in ("convergence", "residual") for part in ("step", "compression")),
    }
    joint = gradients(deq, shaken(small(deq)), FitSettings(unroll=3, joint=True))
    assert joint["convergence/initialiser"] > 0
    assert joint["initial/step"] == 0


def test_recomputing_gives_the_same_gradient(deq):
    deq.eval()
    solver = shaken(small(deq))
    plain, again = (gradients(deq, solver, FitSettings(unroll=4, checkpoint=flag)) for flag in (False, True))
    assert plain == pytest.approx(again, rel=1e-5)


def test_gradients_are_those_of_finite_differences(deq):
    deq = deq.double().eval()
    solver, settings = shaken(small(deq, memory=3)).double(), FitSettings(unroll=4)
    targets, _ = find_targets(deq, batch(1).double(), settings)
    weight = solver.step.out.weight

    def loss() -> Tensor:
        losses = unrolled_losses(solver, targets[0], settings)
        return losses.convergence + losses.residual

    (grad,) = torch.autograd.grad(loss(), weight)
    move = torch.randn_like(weight)
    values = []
    for sign in (1, -1):
        weight.data.add_(sign * 1e-5 * move)
        values.append(float(loss().detach()))
        weight.data.sub_(sign * 1e-5 * move)
    assert float((grad * move).sum()) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_weights_of_losses_over_the_fit():
    weights = LossWeights(1.0, 2.0, 3.0, residual_end=0.5, fade=0.4)
    assert weights.at(0.0) == (1.0, 2.0, 3.0)
    assert weights.at(0.2) == pytest.approx((1.0, 2.0, 1.75))
    assert weights.at(0.4) == weights.at(1.0) == (1.0, 2.0, 0.5)
    assert LossWeights(residual=0.0).at(0.3)[2] == 0.0
    assert PUBLISHED["wikitext103"].losses.at(1.0) == (0.1, 0.05, 5e-8)


def test_relative_weights_begin_at_their_values(deq):
    deq.eval()
    solver, settings = shaken(small(deq)), FitSettings(unroll=3)
    losses = unrolled_losses(solver, find_targets(deq, batch(1), settings)[0][0], settings)
    balance = Balance(LossWeights(1.0, 2.0, 4.0))
    assert float(balance.total(losses, 0.0).detach()) == pytest.approx(7.0)
    losses.convergence = 3 * losses.convergence
    assert float(balance.total(losses, 1.0).detach()) == pytest.approx(5.0, abs=1e-4)
    absolute = Balance(PUBLISHED["imagenet"].losses).total(losses, 0.0)
    expected = 0.1 * losses.convergence + 0.02 * losses.initial + 1e-5 * losses.residual
    assert float(absolute.detach()) == pytest.approx(float(expected.detach()))


def test_sizes_are_taken_anew_after_losses_that_have_none(deq):
    deq.eval()
    solver, settings = shaken(small(deq)), FitSettings(unroll=3)
    losses = unrolled_losses(solver, find_targets(deq, batch(1), settings)[0][0], settings)
    for value, total in ((0.0, 2.0), (math.nan, math.nan)):
        balance = Balance(LossWeights(1.0, 1.0, 1.0))
        first = dataclasses.replace(losses, initial=value * losses.initial)
        assert float(balance.total(first, 0.0).detach()) == pytest.approx(total, nan_ok=True)
        assert not balance.settled
        assert float(balance.total(losses, 0.0).detach()) == pytest.approx(3.0)
        assert balance.settled


# Fits


ABLATIONS = {
    "softmax": {"weights": "softmax"},
    "free": {"weights": "free"},
    "corrected": {"weights": "corrected"},
    "no initialiser": {"source": None},
    "initialiser on Anderson": {"weights": "least_squares", "mixing": False},
    "weights alone": {"mixing": False},
    "step length alone": {"weights": "newest"},
    "plain sum": {"plain_sum": True},
    "no products": {"products": False},
    "no loss on residuals": {"losses": LossWeights(residual=0.0)},
    "no loss on the start": {"losses": LossWeights(initial=0.0), "joint": True},
    "last": {"emphasis": "last"},
    "uniform": {"emphasis": "uniform"},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_learns(deq, name):
    options = dict(ABLATIONS[name])
    own = {key: options.pop(key) for key in ("losses", "joint", "emphasis") if key in options}
    settings = FitSettings(steps=10, unroll=4, learning_rate=1e-2, **own)
    fit = fit_hyper_solver(deq, lambda step: batch(0), settings, log_every=1, **{**SIZES, **options})
    assert fit.record["last"]["loss"] < fit.record["first"]["loss"]
    assert fit.record["last"]["skipped"] == 0


def test_a_solver_without_parameters_cannot_be_fitted(deq):
    with pytest.raises(ValueError, match="nothing to learn"):
        fit_hyper_solver(deq, batch, SHORT, **SIZES, weights="least_squares", mixing=False, source=None)


def test_batches_may_be_a_list_and_are_gone_through_again(deq):
    fit = fit_hyper_solver(deq, [batch(0), (batch(1),)], FitSettings(steps=5, unroll=2), **SIZES)
    assert fit.record["last"]["accepted"] == 1
    with pytest.raises(ValueError, match="the batches are used up"):
        fit_hyper_solver(deq, iter([batch(0), batch(1)]), FitSettings(steps=5, unroll=2), **SIZES)


def test_the_log(deq, tmp_path):
    path = tmp_path / "fit.jsonl"
    fit = fit_hyper_solver(deq, batch, FitSettings(steps=5, unroll=2), log=path, log_every=2, **SIZES)
    records = read_metrics(path)
    assert [record["step"] for record in records] == [0, 2, 4]
    assert records[-1]["fit"] == fit.record["last"]
    assert set(records[0]["fit"]) >= {"loss", "convergence", "initial", "residual", "truth_residual", "gradient"}
    assert fit.record["share"] == fit.solver.num_parameters / sum(p.numel() for p in deq.parameters())


def test_going_on_with_a_solver(deq):
    settings = FitSettings(steps=25, unroll=4, learning_rate=1e-2)
    first = fit_hyper_solver(deq, batch, settings, **SIZES)
    with torch.no_grad():
        deq.cell.inner.mul_(0.95)
    deq.plan = deq.plan.replace(solver=first.solver)  # as in training: the solver is in use meanwhile
    second = fit_hyper_solver(deq, batch, settings, solver=first.solver)
    assert second.solver is first.solver
    assert deq.plan.solver is first.solver
    assert second.record["first"]["end_residual"] < first.record["first"]["end_residual"]
    assert second.record["model_parameters"] == first.record["model_parameters"]
    with pytest.raises(ValueError, match="hidden cannot be set: the solver is given"):
        fit_hyper_solver(deq, batch, settings, solver=first.solver, hidden=3)


def test_a_language_model_with_memory_in_low_precision():
    torch.manual_seed(0)
    model = create_model("deq_transformer_small", vocab_size=11, d_model=8, heads=2, d_inner=12, memory_length=6)
    tokens = torch.randint(11, (3, 4, 6))
    seen = []

    def forward(model, batch, carry):
        seen.append(None if carry is None else carry[0].shape[1])
        return model(batch, memory=carry).memory

    settings = FitSettings(steps=3, unroll=3, accept=1.0, stop=Stop(rtol=1e-3, max_steps=20))
    for context in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        seen.clear()
        with context:
            fit = fit_hyper_solver(model, list(tokens), settings, forward=forward, **SIZES)
        assert seen == [None, None, 6, 6]  # the first is a look at the sizes
        assert (fit.solver.config.kind, fit.solver.config.local) == ("sequence", True)
        assert next(fit.solver.parameters()).dtype == torch.float32
        assert math.isfinite(fit.record["last"]["loss"])


def test_a_model_without_an_equilibrium():
    with pytest.raises(ValueError, match="contains no DEQ"):
        fit_hyper_solver(nn.Linear(2, 2), batch, SHORT)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"emphasis": "increasin"}, "did you mean 'increasing'"),
        ({"learning_rate": 0.0}, "learning_rate must be a number"),
        ({"clip": -1.0}, "clip must be a number"),
    ],
)
def test_wrong_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        FitSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights": "softmx"}, "did you mean 'softmax'"),
        ({"compression": "first"}, "unknown compression 'first'. Known: last, lowest, mean, sketch"),
        ({"warm": "keeps"}, "unknown way with a start 'keeps'; did you mean 'keep'"),
        ({"memory": 0}, "memory must be an integer of at least 1"),
        ({"width": 0}, "width must be an integer of at least 1"),
        ({"budget": 0.0}, "budget must be a number"),
    ],
)
def test_wrong_networks(settings, words):
    """Said at once: a run may get to them after hours of training."""
    with pytest.raises(ValueError, match=words):
        Networks(**settings)


class Noisy(nn.Module):
    """z ↦ tanh(W · dropped(z) + x), W after a draw per solve, with a module that keeps statistics of x."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = eq.nn.weight_norm(nn.Linear(d, d))
        self.dropout, self.norm = eq.nn.VariationalDropout(0.5), nn.BatchNorm1d(d)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.linear(self.dropout(z)) + self.norm(x))


@pytest.mark.parametrize("pool", [None, 2])
@pytest.mark.parametrize("record", [False, True])
def test_in_training_mode_draws_belong_to_each_solve(pool, record):
    """Learned from as they were drawn, whether steps are recorded or not, and nothing of the model changes."""
    deq = eq.DEQ(Noisy(), engine="eager")
    before = copy.deepcopy(deq.state_dict())
    settings = FitSettings(steps=6, unroll=2, pool=pool, training=True)
    targets, _ = find_targets(deq, torch.randn(5, 6), settings)
    (target,) = targets
    assert len(target.problem.scope._drawn) == 1
    again = rebuilt(target, constant_scope(), lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf)
    for part in (target, again):  # the equilibrium of these draws, and of no others
        with settings.mode(deq), torch.no_grad():
            change = (part.problem.evaluate(target.root)[0] - target.root[0]).norm() / target.root[0].norm()
        assert change < 1e-3
    torch.manual_seed(1)
    (other,), _ = find_targets(deq, torch.randn(5, 6), settings)
    assert not torch.allclose(*(next(iter(part.problem.scope._drawn.values())) for part in (target, other)))
    learner = Learner(hyper_solver_for(deq, torch.randn(5, 6), budget=None), settings, record=record)
    with settings.mode(deq):
        values = [learner.step([part], 0.0, 0.0) for part in (target, other) * 3]
        own = [float(unrolled_losses(learner.solver, part, settings).convergence.detach()) for part in (target, other)]
    assert learner.obstacle is None
    assert learner.replayed == (4 if record else 0)
    assert float(values[-2]["convergence"]) != float(values[-1]["convergence"])
    assert own[0] != own[1]
    fit = fit_hyper_solver(deq, [torch.randn(5, 6) for _ in range(3)], settings, budget=None)
    assert fit.record["last"]["end_residual"] < fit.record["first"]["start_residual"]
    assert all(torch.equal(value, before[name]) for name, value in deq.state_dict().items())
    assert deq.training


def test_a_recorded_step_in_training_mode_is_an_ordinary_one():
    deq, settings = eq.DEQ(Noisy(), engine="eager"), FitSettings(steps=6, unroll=2, training=True)
    torch.manual_seed(0)
    targets = [find_targets(deq, torch.randn(5, 6), settings)[0] for _ in range(6)]
    made = [hyper_solver_for(deq, torch.randn(5, 6), budget=None) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    learners = [Learner(solver, settings, record=record) for solver, record in zip(made, (False, True), strict=True)]
    with settings.mode(deq):
        for part in targets:
            values = [learner.step(part, 0.1, 0.1)["convergence"] for learner in learners]
            assert float(values[0]) == pytest.approx(float(values[1]), rel=1e-5)
    assert learners[1].replayed == 4
    for ours, theirs in zip(*(solver.parameters() for solver in made), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_recorded_steps_follow_a_model_that_changes(training, monkeypatch):
    """What is computed from its weights is computed in each step, with draws and without."""
    deq, settings = eq.DEQ(Noisy(), engine="eager"), FitSettings(unroll=2, training=training)
    torch.manual_seed(0)
    made = [hyper_solver_for(deq, torch.randn(5, 6), budget=None) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    followers = []
    for solver, record in zip(made, (False, True), strict=True):
        monkeypatch.setattr(hyper, "Learner", functools.partial(Learner, record=record))
        followers.append(Follower(solver, settings))
    for step in range(8):
        x = torch.randn(5, 6)
        for follower in followers:
            torch.manual_seed(step)  # the same draws
            assert follower.step(deq, x)
        with torch.no_grad():
            for parameter in deq.parameters():
                parameter.mul_(1.1)
    assert followers[1]._learner.replayed == 6
    for ours, theirs in zip(*(solver.parameters() for solver in made), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_follower_without_equilibria_leaves_the_solver_alone():
    deq = eq.DEQ(Cell(), engine="eager")
    solver = hyper_solver_for(deq, torch.randn(5, 2), budget=None)
    before = copy.deepcopy(solver.state_dict())
    hopeless = FitSettings(unroll=2, accept=1e-9, stop=Stop(rtol=0.0, max_steps=1))
    assert not Follower(solver, hopeless).step(deq, torch.randn(5, 2))
    assert all(torch.equal(value, before[name]) for name, value in solver.state_dict().items())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_are_recipes_too(name):
    root = Path(__file__).resolve().parents[2]
    recipe = load_config(HyperRecipe, root / "recipes" / "hyper" / "more" / f"published_{name}.toml")
    assert recipe.fit == PUBLISHED[name]
    assert not recipe.solver.products
