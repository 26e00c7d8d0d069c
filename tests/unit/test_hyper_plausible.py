"""Plausible uses of learned solvers that once failed: starts that are not finite, frozen parts, inner equilibria."""

import dataclasses
import functools
import json
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from equipoise import DEQ, Anderson, Implicit, Ladder, Status, Stop, override
from equipoise.solvers import hyper_solver_for, load_solver, save_solver
from equipoise.tasks import hyper
from equipoise.tasks.hyper import FitSettings, find_targets, fit_hyper_solver

QUICK = FitSettings(steps=2, unroll=2)


class Cell(nn.Module):
    def __init__(self, d=12, source=5):
        super().__init__()
        self.d, self.mix, self.inject = d, nn.Linear(d, d), nn.Linear(source, d)

    def initial_state(self, x):
        return x.new_zeros(len(x), self.d)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.mix(z) + self.inject(x))


class Outer(nn.Module):
    """A cell with an equilibrium of another size in it."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = DEQ(Cell(7, 12), stop=Stop(rtol=1e-4)), nn.Linear(7, 12)

    def forward(self, z, x):
        return torch.tanh(self.out(self.inner(0.3 * z + x).value))


@pytest.fixture
def deq():
    torch.manual_seed(0)
    return DEQ(Cell()).eval()


@pytest.fixture
def x():
    return torch.randn(16, 5, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def solver(deq, x):
    return hyper_solver_for(deq, x, budget=None)


# What is returned


@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("stop", [Stop(), Stop(rtol=0, max_steps=3), Stop(rtol=0, max_steps=3, select="last")])
def test_a_start_that_is_not_finite_gives_way_to_what_was_given(deq, x, solver, engine, stop):
    with torch.no_grad():
        solver.initialiser.out.bias.fill_(torch.inf)
        deq.engine = engine
        with override(deq, solver=solver, stop=stop):
            solution = deq(x)
            warm = deq(x, z0=torch.full((16, 12), 0.1))  # is kept, and asks for no start
    assert (solution.stats.status == Status.NONFINITE).all()
    assert torch.equal(solution.value, torch.zeros(16, 12))
    assert warm.stats.residual.isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"source": None}, {"source": None, "local": False}, {"weights": "newest"}])
def test_sequences_without_positions(settings):
    class Map(nn.Module):
        def forward(self, z, x):
            return 0.5 * z + x

    deq, some, none = DEQ(Map()), torch.randn(2, 5, 8), torch.randn(2, 0, 8)
    solver = hyper_solver_for(deq, some, budget=None, **settings)
    with torch.no_grad(), override(deq, solver=solver, stop=Stop(max_steps=4)):
        assert deq(none).value.shape == (2, 0, 8)


# What is fitted


@pytest.mark.parametrize("record", [False, True])
def test_parts_that_are_frozen_stay(deq, x, solver, record, monkeypatch):
    monkeypatch.setattr(hyper, "Learner", functools.partial(hyper.Learner, record=record))
    solver.initialiser.requires_grad_(False)
    before = {name: value.clone() for name, value in solver.state_dict().items()}
    fit = fit_hyper_solver(deq, [x], FitSettings(steps=8, unroll=2, pool=1), solver=solver)
    assert fit.record["replayed"] == (6 if record else 0)
    after = solver.state_dict()
    learned = {name.partition(".")[0] for name, value in after.items() if not torch.equal(value, before[name])}
    assert "initialiser" not in learned
    assert "step" in learned
    assert not any(parameter.requires_grad for parameter in solver.initialiser.parameters())
    solver.requires_grad_(False)  # as part of a model that is frozen as a whole, it learns all the same
    fit_hyper_solver(deq, [x], QUICK, solver=solver)
    assert not torch.equal(solver.initialiser.out.weight, before["initialiser.out.weight"])
    assert not any(parameter.requires_grad for parameter in solver.parameters())


def test_inputs_of_inference_mode(deq, x):
    with torch.inference_mode():
        given = x + 0.0
    fits = [fit_hyper_solver(deq, [batch], QUICK, budget=None).solver for batch in (given, x)]
    for one, other in zip(*(fit.state_dict().values() for fit in fits), strict=True):
        assert torch.equal(one, other)


def test_equilibria_in_a_cell_are_solved_as_always():
    torch.manual_seed(0)
    deq, x = DEQ(Outer()), torch.randn(4, 12)
    (target,), _ = find_targets(deq, x, QUICK)
    with torch.no_grad():
        z = deq.cell(target.problem.spec.unflatten(target.root), x)
    error = (z - target.problem.spec.unflatten(target.root)).norm(dim=1) / z.norm(dim=1)
    torch.testing.assert_close(target.residual, error, rtol=0.5, atol=1e-4)  # of f as the model has it
    assert deq.cell.inner.plan.stop == Stop(rtol=1e-4)
    fit = fit_hyper_solver(deq, [x], FitSettings(steps=3, unroll=3), budget=None)
    deq.plan = deq.plan.replace(solver=fit.solver)
    with torch.no_grad():
        assert deq(x).stats.ok.all()


# Errors


def test_settings_of_a_fit_are_fit_settings(deq, x):
    with pytest.raises(TypeError, match=r"settings must be FitSettings\(...\), got dict"):
        fit_hyper_solver(deq, [x], {"steps": 2})


def test_a_learned_start_at_any_place_of_a_ladder_is_none_for_adjoints(solver):
    for place in (solver, Ladder((solver, Anderson())), Ladder((Anderson(), solver))):
        with pytest.raises(ValueError, match="HyperAnderson has a learned start, and adjoint equations have no"):
            Implicit(solver=place)


def test_a_file_is_refused_by_its_shapes_before_memory_is_taken(deq, solver, tmp_path):
    path = save_solver(solver, tmp_path / "solver.safetensors", deq)
    with safe_open(path, framework="pt") as file:
        tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    config = {**dataclasses.asdict(solver.config), "hidden": 10**12}
    save_file(tensors, path, {**notes, "config": json.dumps(config)})
    started = time.perf_counter()
    with pytest.raises(ValueError, match="was written by another version of equipoise"):
        load_solver(path, deq)
    assert time.perf_counter() - started < 5
