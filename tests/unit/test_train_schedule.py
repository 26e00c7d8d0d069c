"""Schedules against closed forms; everything keyed by (seed, step)."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equipoise import DEQ, Anderson, Broyden, Implicit, Picard, Plan, Stop, Unroll
from equipoise.train import (
    Constant,
    Cosine,
    Horizon,
    Jitter,
    Opening,
    Penalty,
    PlanSchedule,
    Plateau,
    StepDecay,
    Warmup,
)
from equipoise.train.schedule import keyed_uniform

RUN = Horizon(steps=300_000, epoch=1000)


def test_linear_warmup_then_cosine_as_published():
    """lr·(t+1)/16000 for 16000 steps, then lr·½(1 + cos(πt/300000)), t from the start of the run."""
    rate = Cosine(warmup=16_000, steps=300_000)
    assert rate.factor(0, RUN) == 1 / 16_000
    assert rate.factor(15_999, RUN) == 1.0
    for step in (16_000, 100_000, 299_999):
        assert rate.factor(step, RUN) == pytest.approx(0.5 * (1 + math.cos(math.pi * step / 300_000)), abs=1e-15)
    assert rate.factor(300_000, RUN) == rate.factor(400_000, RUN) == 0.0
    assert Cosine(warmup=16_000).factor(123_456, RUN) == rate.factor(123_456, RUN)
    assert Cosine(floor=0.1).factor(300_000, RUN) == pytest.approx(0.1)
    assert Cosine(floor=0.1).factor(0, RUN) == 1.0


def test_constant_and_step_decay():
    assert [Constant(warmup=4).factor(step, RUN) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    steps = StepDecay(at=(3, 5))
    assert [steps.factor(step, RUN) for step in range(7)] == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    epochs = StepDecay(at=(15, 20, 23), unit="epoch")
    assert epochs.factor(14_999, RUN) == 1.0
    assert epochs.factor(15_000, RUN) == pytest.approx(0.1)
    assert epochs.factor(23_000, RUN) == pytest.approx(0.001)
    with pytest.raises(ValueError, match="the data has no epochs"):
        epochs.factor(0, Horizon(10))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(warmup=-1),
        lambda: Cosine(steps=0),
        lambda: Cosine(floor=1.0),
        lambda: StepDecay(at=(5, 3)),
        lambda: StepDecay(gamma=0.0),
        lambda: Plateau(gamma=1.0),
        lambda: Plateau(patience=0),
        lambda: Penalty(probability=1.5),
        lambda: Penalty(weight=-1.0),
        lambda: Penalty(every=0),
        lambda: Penalty(weight=1.0, keep=0.0),
        lambda: Jitter(low=1, high=0),
        lambda: Warmup(steps=-1),
        lambda: Warmup(layers=0),
        lambda: Opening(steps=-1),
        lambda: PlanSchedule(plan=Plan(stop=Stop(max_steps=2)), jitter=Jitter(low=-2)),
    ],
)
def test_contradictions_are_refused(make):
    with pytest.raises(ValueError, match=r"must|leaves"):
        make()


def test_plateau_lowers_after_patience_and_counts_again():
    monitor = Plateau(gamma=0.25, patience=2).start()
    lowered = [monitor.update(metric) for metric in (5.0, 4.0, 4.0, 4.1, 4.0, 3.9, 4.0, 4.0)]
    #                                            best best  bad  bad→  bad  best  bad  bad→
    assert lowered == [False, False, False, True, False, False, False, True]
    assert monitor.scale == 0.0625
    assert monitor.best == 3.9


def test_plateau_threshold_floor_and_nan():
    monitor = Plateau(gamma=0.5, patience=1, threshold=0.1, floor=0.3).start()
    assert not monitor.update(1.0)
    assert monitor.update(0.95)  # better, but by less than a tenth
    assert monitor.update(math.nan)
    assert monitor.scale == 0.3
    assert not monitor.update(math.nan)  # the floor was reached: nothing is lowered any more
    assert (monitor.scale, monitor.best) == (0.3, 1.0)


def test_plateau_resumes_where_it_was():
    metrics = [3.0, 3.1, 2.9, 3.0, 3.0, 3.0, 2.0, 2.1]
    straight = Plateau(patience=2).start()
    for metric in metrics:
        straight.update(metric)
    first = Plateau(patience=2).start()
    for metric in metrics[:4]:
        first.update(metric)
    second = Plateau(patience=2).start()
    second.load_state_dict(first.state_dict())
    for metric in metrics[4:]:
        second.update(metric)
    assert second.state_dict() == straight.state_dict()


def test_keyed_draws_are_pinned_and_uniform():
    """The draws are part of what a run is: a change of the function would change every recipe."""
    assert keyed_uniform(0, "jitter", 0) == pytest.approx(0.25529180785500427, abs=1e-15)
    assert keyed_uniform(1, "penalty", 7) == keyed_uniform(1, "penalty", 7)
    draws = torch.tensor([keyed_uniform(3, "x", step) for step in range(4000)], dtype=torch.float64)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert draws.mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / 4000))
    other = torch.tensor([keyed_uniform(4, "x", step) for step in range(4000)], dtype=torch.float64)
    assert abs(torch.corrcoef(torch.stack([draws, other]))[0, 1]) < 4 / math.sqrt(4000)


def test_warmup_plan_is_a_stack_of_plain_layers():
    torch.manual_seed(0)
    cell = _Cell().double()
    deq, x = DEQ(cell), torch.randn(3, 4, dtype=torch.float64)
    schedule = PlanSchedule(warmup=Warmup(steps=10, layers=5))
    schedule.at(9).apply(deq)
    z = torch.zeros_like(x)
    for _ in range(5):
        z = cell(z, x)
    expected = torch.autograd.grad(z.square().sum(), list(cell.parameters()))
    value = deq(x).value
    torch.testing.assert_close(value, z, rtol=0, atol=1e-14)
    gradient = torch.autograd.grad(value.square().sum(), list(cell.parameters()))
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    deq.eval()
    torch.testing.assert_close(deq(x).value, z, rtol=0, atol=1e-14)  # validation uses the stack too


class _Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.linear(z) + x)


def test_phases_switch_at_the_exact_step_and_evaluation_follows():
    plan, evaluation = Plan(stop=Stop(max_steps=12)), Plan(stop=Stop(max_steps=40))
    schedule = PlanSchedule(plan=plan, eval_plan=evaluation, warmup=Warmup(steps=3, layers=2, checkpoint=True))
    stack = Plan(Picard(), Unroll(checkpoint=True), Stop(rtol=0.0, atol=0.0, max_steps=2, select="last"))
    assert [schedule.at(step).phase for step in range(5)] == ["warmup"] * 3 + ["equilibrium"] * 2
    assert schedule.at(2).plan == schedule.at(2).eval_plan == stack
    assert (schedule.at(3).plan, schedule.at(3).eval_plan) == (plan, evaluation)
    assert (schedule.final().plan, schedule.final().eval_plan) == (plan, evaluation)
    assert PlanSchedule(plan=plan).at(0).eval_plan == plan


def test_another_solver_opens_the_run_and_evaluations_of_that_time():
    plan, evaluation = Plan(Broyden(), stop=Stop(max_steps=12)), Plan(Broyden(), stop=Stop(max_steps=40))
    opening = Opening(steps=4, solver=Anderson(memory=2))
    schedule = PlanSchedule(plan, evaluation, Warmup(steps=2), opening, Jitter(low=-1, high=-1))
    assert [schedule.at(step).plan.solver for step in (1, 2, 3, 4)] == [
        Picard(),
        opening.solver,
        opening.solver,
        Broyden(),
    ]
    first = schedule.at(2)
    assert (first.phase, first.plan.stop.max_steps) == ("equilibrium", 11)
    assert first.eval_plan == evaluation.replace(solver=opening.solver)
    assert (schedule.at(4).eval_plan, schedule.final().eval_plan) == (evaluation, evaluation)


def test_jitter_covers_its_range_evenly_and_spares_evaluation():
    plan = Plan(Anderson(), Implicit(), Stop(max_steps=12, check_every=11))
    schedule = PlanSchedule(plan=plan, jitter=Jitter(low=-2, high=0), seed=3)
    budgets = Counter(schedule.at(step).plan.stop.max_steps for step in range(3000))
    assert set(budgets) == {10, 11, 12}
    assert all(abs(count - 1000) < 4 * math.sqrt(3000 * (1 / 3) * (2 / 3)) for count in budgets.values())
    assert all(schedule.at(step).eval_plan == plan for step in range(50))
    assert {schedule.at(step).plan.stop.check_every for step in range(50)} == {10, 11}


def test_jitter_only_on_penalised_steps():
    schedule = PlanSchedule(
        plan=Plan(stop=Stop(max_steps=12)),
        jitter=Jitter(low=-2, high=1, when="penalty"),
        penalty=Penalty(weight=0.5, probability=0.4),
    )
    steps = [schedule.at(step) for step in range(400)]
    assert all(s.plan.stop.max_steps == 12 for s in steps if s.penalty_weight == 0)
    assert {s.plan.stop.max_steps for s in steps if s.penalty_weight > 0} == {10, 11, 12, 13}


def test_penalty_weight_grows_by_equilibrium_steps_and_stops():
    penalty = Penalty(weight=1.9, every=100, stop=450)
    schedule = PlanSchedule(warmup=Warmup(steps=50), penalty=penalty)
    weights = {step: schedule.at(step).penalty_weight for step in (0, 49, 50, 149, 150, 250, 449, 450, 900)}
    expected = {0: 0.0, 49: 0.0, 50: 1.9, 149: 1.9, 150: 2.0, 250: 2.1, 449: 2.2, 450: 0.0, 900: 0.0}
    assert weights == pytest.approx(expected)
    assert PlanSchedule(penalty=Penalty(weight=1.9)).at(10**6).penalty_weight == 1.9
    assert PlanSchedule(penalty=Penalty(every=10)).at(20).penalty_weight == pytest.approx(0.2)
    stack = PlanSchedule(warmup=Warmup(steps=5), penalty=Penalty(weight=1.0, warmup_weight=0.3, probes=2))
    assert [stack.at(step).penalty_weight for step in (4, 5)] == [0.3, 1.0]
    assert stack.at(4).penalty.probes == 2


@pytest.mark.parametrize("probability", [0.0, 0.35, 1.0])
def test_penalty_is_drawn_with_its_probability(probability):
    schedule = PlanSchedule(penalty=Penalty(weight=1.0, probability=probability), seed=11)
    share = sum(schedule.at(step).penalty_weight > 0 for step in range(4000)) / 4000
    assert share == pytest.approx(probability, abs=4 * math.sqrt(probability * (1 - probability) / 4000) + 1e-12)


def test_a_penalty_that_keeps_a_residual_follows_it():
    control = Penalty(weight=0.4, probability=0.05, keep=0.1).start()
    assert control.strength == 0.05
    for residual, strength in (
        (0.03, 0.05),
        (0.05, 0.125),  # the cube of how near it is
        (0.1, 1.0),
        (0.15, 2.25),  # the strength so far, times the square
        (0.9, 9.0),  # four times at most
        (math.nan, 10.0),
        (math.inf, 10.0),
        (0.05, 2.5),
        (0.001, 0.625),
        (0.08, 0.512),
        (0.0, 0.128),
        (0.0, 0.05),  # never less than it would be without
    ):
        control.update(residual)
        assert control.strength == pytest.approx(strength)


def test_a_stronger_penalty_comes_more_often_then_with_more_weight():
    schedule = PlanSchedule(warmup=Warmup(steps=10), penalty=Penalty(weight=0.4, probability=0.05, warmup_weight=0.1))
    weights = {
        strength: [schedule.at(step, strength).penalty_weight for step in range(10, 4010)]
        for strength in (None, 0.5, 1.0, 2.5)
    }
    shares = {strength: sum(w > 0 for w in found) / 4000 for strength, found in weights.items()}
    assert shares == pytest.approx({None: 0.05, 0.5: 0.5, 1.0: 1.0, 2.5: 1.0}, abs=0.03)
    assert [max(found) for found in weights.values()] == pytest.approx([0.4, 0.4, 0.4, 1.0])
    shallow = [[schedule.at(step, strength) for step in range(10)] for strength in (None, 2.5)]
    assert shallow[0] == shallow[1]  # the stack is trained as without


def test_a_residual_cannot_be_kept_without_a_penalty():
    assert Penalty(weight=0.4).start() is None
    with pytest.raises(ValueError, match=r"keep=0.1 needs a penalty.*weight=0.0"):
        Penalty(keep=0.1)


def test_a_kept_residual_resumes_where_it_was():
    first, second = (Penalty(weight=0.4, probability=0.05, keep=0.1).start() for _ in range(2))
    first.update(0.17)
    second.load_state_dict(first.state_dict())
    first.update(0.13)
    second.update(0.13)
    assert second.strength == first.strength > 0.05


@given(step=st.integers(0, 10**7), seed=st.integers(0, 2**31))
def test_a_step_depends_on_seed_and_number_alone(step, seed):
    def make():
        return PlanSchedule(
            plan=Plan(stop=Stop(max_steps=12)),
            warmup=Warmup(steps=1000),
            jitter=Jitter(low=-2, high=1),
            penalty=Penalty(weight=1.0, probability=0.5, every=100),
            seed=seed,
        )

    one, other = make(), make()
    one.at(step + 1)  # asked in another order
    assert one.at(step) == other.at(step)
    assert 10 <= other.at(max(step, 1000)).plan.stop.max_steps <= 13


def test_apply_reaches_every_equilibrium_layer():
    model = nn.Sequential(DEQ(_Cell()), nn.ModuleDict({"inner": DEQ(_Cell())}))
    schedule = PlanSchedule(plan=Plan(stop=Stop(max_steps=9)), jitter=Jitter(low=-1, high=-1))
    schedule.at(0).apply(model)
    deqs = [module for module in model.modules() if isinstance(module, DEQ)]
    assert [deq.plan.stop.max_steps for deq in deqs] == [8, 8]
    assert [deq.eval_plan.stop.max_steps for deq in deqs] == [9, 9]


def test_a_budget_changes_evaluations_alone():
    schedule = PlanSchedule(plan=Plan(stop=Stop(max_steps=9)), eval_plan=Plan(stop=Stop(max_steps=20, check_every=8)))
    step = schedule.at(0).with_budget(3)
    assert step.plan == schedule.plan
    assert step.eval_plan == schedule.eval_plan.replace(stop=Stop(max_steps=3, check_every=3))
    assert schedule.at(0).with_budget(40).eval_plan.stop == Stop(max_steps=40, check_every=8)
