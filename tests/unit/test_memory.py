"""What a training step keeps in memory: flat in depth where it should be, linear where it must be."""

import pytest
import torch
from torch import nn

from equipoise import DEQ, Anderson, Broyden, Implicit, Neumann, OneStep, Picard, Plan, Stop, Unroll, memory_report
from tests.gradients import TanhCell, normal

N, BATCH = 16, 4
STATE = N * BATCH * 8  # bytes of one state


def report(max_steps, *, rtol=0.0, x=None, **options):
    deq = DEQ(TanhCell(N, norm=0.9), stop=Stop(rtol=rtol, max_steps=max_steps), **options)
    return memory_report(deq, normal(BATCH, N) if x is None else x)


@pytest.mark.parametrize("solver", [Anderson(), Anderson(memory=3), Broyden(memory=5), Picard()], ids=repr)
def test_flat_in_depth(solver):
    """Twenty steps or two hundred: the same graph and the same history."""
    adjoint = Implicit(solver=solver, stop=Stop(rtol=0, max_steps=8))
    few, many = (report(steps, solver=solver, adjoint=adjoint) for steps in (20, 200))
    assert few.graph == many.graph > 0
    assert few.history == many.history
    assert few.activations == few.graph + few.history


def test_anderson_holds_twice_its_memory():
    for memory in (3, 6):
        adjoint = Implicit(solver=Picard())
        history = report(40, solver=Anderson(memory=memory), adjoint=adjoint).history
        assert 2 * memory * STATE <= history <= 2 * memory * STATE + 4096


def test_full_broyden_grows_with_the_steps_taken_and_not_with_the_limit():
    adjoint = OneStep()
    short, long = (report(steps, solver=Broyden(), adjoint=adjoint).history for steps in (20, 80))
    assert short < 0.5 * long
    assert long >= 70 * STATE
    limits = [report(limit, rtol=1e-3, solver=Broyden(), adjoint=adjoint).history for limit in (50, 500)]
    assert limits[0] == limits[1] < short


def test_the_graph_is_one_evaluation_whatever_the_adjoint():
    single = report(30, adjoint=OneStep()).graph
    assert single <= 8 * STATE
    assert report(30, adjoint=Implicit()).graph <= 2 * single
    assert report(30, adjoint=Neumann(20)).graph <= 2 * single
    assert report(30, adjoint=Implicit(any_order=True)).graph <= 2 * single


def test_unroll_grows_linearly():
    graphs = [report(steps, solver=Picard(), adjoint=Unroll()).graph for steps in (20, 40, 60)]
    assert graphs[2] - graphs[1] == graphs[1] - graphs[0]
    assert graphs[1] - graphs[0] >= 20 * STATE


def test_a_deep_model_costs_what_one_layer_costs():
    implicit = [report(steps, adjoint=Implicit(solver=Picard())).activations for steps in (10, 100)]
    unrolled = [report(steps, solver=Picard(), adjoint=Unroll()).activations for steps in (10, 100)]
    assert implicit[1] == implicit[0]
    assert unrolled[1] > 5 * unrolled[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inject = nn.Linear(N, N)
        self.deq = DEQ(TanhCell(N, dtype=torch.float32))
        self.norm = nn.BatchNorm1d(N)

    def forward(self, x):
        return self.norm(self.deq(self.inject(x)).value)


def test_parameters_gradients_and_optimiser_are_counted():
    model, x = Model(), normal(BATCH, N, dtype=torch.float32)
    optimiser = torch.optim.Adam(model.parameters())
    fresh = memory_report(model, x, optimizer=optimiser)
    trainable = sum(p.nbytes for p in model.parameters())
    assert fresh.parameters == trainable + sum(b.nbytes for b in model.buffers())
    assert fresh.gradients == trainable
    assert fresh.optimizer == 0
    model(x).sum().backward()
    optimiser.step()
    assert 2 * trainable <= memory_report(model, x, optimizer=optimiser).optimizer <= 2 * trainable + 64
    assert (fresh.peak, fresh.reserve) == (None, None)  # the CPU has no such counter


def test_gradients_and_hooks_are_left_as_they_were():
    model, x = Model(), normal(BATCH, N, dtype=torch.float32)
    memory_report(model, x)
    assert all(p.grad is None for p in model.parameters())
    model(x).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    memory_report(model, x)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_and_gradients_survive_a_failure():
    model, x = Model(), normal(BATCH, N, dtype=torch.float32)
    model(x).sum().backward()
    before = [p.grad for p in model.parameters()]

    def broken(output):
        raise ArithmeticError("broken")

    with pytest.raises(ArithmeticError):
        memory_report(model, x, broken)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_loss_of_ones_own_and_the_words():
    model, x = Model(), normal(BATCH, N, dtype=torch.float32)
    text = str(memory_report(model, x, lambda output: output.sum()))
    for part in ("f graph", "solver history", "parameters", "gradients", "optimiser"):
        assert part in text
    assert "peak" not in text
    with pytest.raises(ValueError, match="carries no gradient"):
        memory_report(DEQ(TanhCell().requires_grad_(False), eval_plan=Plan(adjoint=Unroll())).eval(), normal(2, 6))
