"""Optimisers, the gradient guard, and averages of weights, against plain references."""

import math

import pytest
import torch
from torch import nn

from equipoise.nn import weight_norm
from equipoise.train import (
    SGD,
    Adam,
    AdamW,
    Averaging,
    Clip,
    NonFiniteGradientError,
    Stepper,
    WeightAverage,
    optim,
    set_learning_rate,
)
from equipoise.train.optim import OPTIMISERS, parameter_groups


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 2).double()


def set_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        (
            Adam(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
        ),
        (AdamW(lr=0.1, weight_decay=0.2), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2)),
        (
            SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
        ),
        (SGD(lr=20.0, weight_decay=1.2e-6), lambda p: torch.optim.SGD(p, lr=20.0, weight_decay=1.2e-6)),
    ],
)
def test_optimisers_are_the_torch_ones_with_these_settings(settings, reference):
    mine, other = linear(), linear()
    optimizer, expected = settings.build(mine), reference(other.parameters())
    for step in range(4):
        for model, one in ((mine, optimizer), (other, expected)):
            set_gradients(model, step)
            one.step()
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_names():
    assert sorted(OPTIMISERS) == ["adam", "adamw", "sgd"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Adam(lr=0.0), "Adam: lr must be a number"),
        (lambda: AdamW(weight_decay=-1.0), "AdamW: weight_decay"),
        (lambda: Adam(betas=(0.9, 1.0)), "Adam: betas"),
        (lambda: SGD(nesterov=True), "nesterov needs momentum"),
        (lambda: Adam(no_decay=("biases",)), "unknown kind of parameter in no_decay 'biases'; did you mean 'bias'"),
        (lambda: Clip(max_norm=0.0), "Clip: max_norm"),
        (lambda: Clip(give_up=0), "Clip: give_up"),
        (lambda: Averaging(decay=1.0), "Averaging: decay"),
        (lambda: Averaging(start=-1), "Averaging: start"),
    ],
)
def test_contradictions_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


class Mixed(nn.Module):
    """One of each kind; the output layer is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.tables = nn.ParameterList([nn.Parameter(torch.ones(3, 4))])
        self.norm = nn.LayerNorm(4)
        self.batch = nn.BatchNorm1d(4)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.biases = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.content_bias = nn.Parameter(torch.zeros(4))
        self.output = nn.Linear(4, 5)
        self.output.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


def names_of(model, group):
    wanted = {id(p) for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in wanted}


@pytest.mark.parametrize(
    ("no_decay", "exempt"),
    [
        ((), set()),
        (
            ("bias",),
            {"norm.bias", "batch.bias", "normed.bias", "biases.0", "content_bias", "output.bias"},
        ),
        (("norm",), {"norm.weight", "norm.bias", "batch.weight", "batch.bias", "normed.weight_g"}),
        (("embedding",), {"embedding.weight", "tables.0"}),
    ],
)
def test_groups_without_decay(no_decay, exempt):
    model = Mixed()
    groups = parameter_groups(model, 0.1, 0.5, no_decay)
    found = names_of(model, groups[1]) if len(groups) == 2 else set()
    assert found == exempt
    everything = [p for group in groups for p in group["params"]]
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert sorted(map(id, everything)) == sorted(map(id, trainable))  # each once, the tied one too
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0][: len(groups)]


def test_nothing_to_train_is_said():
    model = linear().requires_grad_(False)
    with pytest.raises(ValueError, match="Linear has no parameter that wants a gradient"):
        Adam().build(model)


def test_learning_rate_is_a_factor_of_the_base_rate_and_survives_a_reload():
    model = linear()
    optimizer = Adam(lr=0.1, no_decay=("bias",)).build(model)
    assert set_learning_rate(optimizer, 0.5) == pytest.approx(0.05)
    again = Adam(lr=0.1, no_decay=("bias",)).build(model)
    again.load_state_dict(optimizer.state_dict())
    assert set_learning_rate(again, 0.25) == pytest.approx(0.025)
    assert [group["lr"] for group in again.param_groups] == pytest.approx([0.025, 0.025])


@pytest.mark.parametrize("max_norm", [None, 0.25, 1e6])
def test_clipping_scales_the_whole_gradient(max_norm):
    model = linear()
    set_gradients(model, 0)
    flat = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
    guard = Clip(max_norm=max_norm).start()
    assert guard.check(model)
    norm = flat.norm().item()
    assert guard.norm == pytest.approx(norm, rel=1e-12)
    scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(clipped, flat * scale, rtol=1e-12, atol=0)


def test_steps_with_non_finite_gradients_are_refused_and_counted():
    model, guard = linear(), Clip(max_norm=1.0, give_up=3).start()
    for bad in (math.nan, math.inf):
        set_gradients(model, 0)
        model.bias.grad[0] = bad
        assert not guard.check(model)
    assert guard.metrics() == {"grad_norm": math.inf, "skipped": 2, "skipped_in_a_row": 2}
    set_gradients(model, 0)
    assert guard.check(model)
    assert (guard.skipped, guard.skipped_in_a_row) == (2, 0)


def test_a_run_whose_every_step_is_refused_ends():
    model, guard = linear(), Clip(give_up=3).start()
    set_gradients(model, 0)
    model.weight.grad.fill_(math.nan)
    assert [guard.check(model), guard.check(model)] == [False, False]
    with pytest.raises(NonFiniteGradientError, match=r"3 steps in a row .*first in weight; 1 of 2 tensors"):
        guard.check(model)


def test_the_count_survives_a_resume():
    model, guard = linear(), Clip(give_up=2).start()
    set_gradients(model, 0)
    model.weight.grad.fill_(math.inf)
    assert not guard.check(model)
    resumed = Clip(give_up=2).start()
    resumed.load_state_dict(guard.state_dict())
    with pytest.raises(NonFiniteGradientError, match="2 steps in a row"):
        resumed.check(model)


def test_gradients_that_overflow_only_together():
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    with pytest.raises(NonFiniteGradientError, match="each is finite, their norm overflows"):
        Clip(give_up=1).start().check(model)


def test_no_gradient_at_all_is_an_error():
    with pytest.raises(RuntimeError, match=r"no parameter of Linear has a gradient; was backward\(\) called"):
        Clip().start().check(linear())


def walk(model, average, steps, first=0):
    """Change the weights at random and average them; returns all weights seen."""
    seen = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            model.weight.copy_(torch.randn(model.weight.shape, generator=generator, dtype=model.weight.dtype))
        average.update(model, step)
        seen.append(model.weight.detach().clone())
    return seen


def averaged(model, average):
    with average.applied(model):
        return model.weight.detach().clone()


def test_exponential_average_against_its_sum():
    model, average = linear(), WeightAverage(Averaging(decay=0.9, start=2))
    seen = walk(model, average, 8)
    expected = seen[2]
    for weight in seen[3:]:
        expected = 0.9 * expected + 0.1 * weight
    torch.testing.assert_close(averaged(model, average), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.weight, seen[-1])  # the live weights are back


def test_uniform_average_is_the_mean():
    model, average = linear(), WeightAverage(Averaging(kind="uniform", start=None))
    walk(model, average, 3)
    assert not average.active
    assert torch.equal(averaged(model, average), model.weight)
    average.begin()
    seen = walk(model, average, 5, first=3)
    torch.testing.assert_close(averaged(model, average), torch.stack(seen).mean(0), rtol=1e-12, atol=1e-12)


def test_averaged_weights_are_taken_back_after_an_error():
    model, average = linear(), WeightAverage(Averaging(decay=0.5))
    live = walk(model, average, 4)[-1]

    def evaluate():
        with average.applied(model):
            assert not torch.equal(model.weight, live)
            raise KeyError("in evaluation")

    with pytest.raises(KeyError, match="in evaluation"):
        evaluate()
    assert torch.equal(model.weight, live)


def test_average_of_half_weights_is_kept_in_single_precision():
    model, average = nn.Linear(3, 2).bfloat16(), WeightAverage(Averaging(decay=0.999))
    walk(model, average, 2)
    assert {mean.dtype for mean in average.state_dict()["mean"].values()} == {torch.float32}
    with average.applied(model):
        assert model.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("kind", ["ema", "uniform"])
def test_average_resumes_bit_for_bit(kind):
    model, straight = linear(), WeightAverage(Averaging(kind, decay=0.9))
    walk(model, straight, 8)
    first = WeightAverage(Averaging(kind, decay=0.9))
    walk(model, first, 4)
    second = WeightAverage(Averaging(kind, decay=0.9))
    second.load_state_dict(first.state_dict(), model)
    walk(model, second, 4, first=4)
    assert torch.equal(averaged(model, second), averaged(model, straight))
    assert second.count == straight.count == 8


def test_average_of_another_model_is_refused():
    average = WeightAverage(Averaging())
    average.update(linear(), 0)
    with pytest.raises(ValueError, match="the saved average is of another model"):
        WeightAverage(Averaging()).load_state_dict(average.state_dict(), Mixed())


def test_average_of_tied_weights():
    model, average = Mixed(), WeightAverage(Averaging(decay=0.5))
    average.update(model, 0)
    before = model.embedding.weight.detach().clone()
    with torch.no_grad():
        model.embedding.weight.add_(2.0)
    average.update(model, 1)
    with average.applied(model):
        torch.testing.assert_close(model.output.weight, before + 1.0)
        assert model.output.weight is model.embedding.weight


def scaled_stepper(model, **settings):
    """Plain descent with loss scaling, on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return Stepper(
        torch.optim.SGD([{"params": model.parameters(), "initial_lr": 1.0}]), Clip(**settings).start(), scaler
    )


def test_gradients_are_unscaled_before_they_are_clipped():
    model = nn.Linear(3, 1)
    before, x = model.weight.detach().clone(), torch.randn(5, 3)
    stepper = scaled_stepper(model, max_norm=0.01)
    stepper.backward(model(x).sum())
    assert torch.allclose(model.weight.grad, 1024 * x.sum(0)[None])
    stepper.step(model, factor=0.5)
    norm = (x.sum(0).square().sum() + 25).sqrt()  # the bias counts 5
    assert stepper.metrics() == {
        "lr": 0.5,
        "grad_norm": pytest.approx(float(norm), rel=1e-6),
        "skipped": 0,
        "skipped_in_a_row": 0,
        "loss_scale": 1024.0,
    }
    assert torch.allclose(model.weight, before - 0.5 * 0.01 * x.sum(0) / norm, atol=1e-7)
    assert model.weight.grad is None


def test_an_overflow_is_skipped_counted_and_lowers_the_scale():
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    stepper = scaled_stepper(model)
    for expected in (512.0, 256.0):
        stepper.backward(model(torch.full((1, 3), math.inf)).sum())
        stepper.step(model, 1.0)
        assert stepper.metrics()["loss_scale"] == expected
    assert torch.equal(model.weight, before)
    assert stepper.metrics()["skipped"] == stepper.metrics()["skipped_in_a_row"] == 2
    stepper.backward(model(torch.ones(1, 3)).sum())
    stepper.step(model, 1.0)
    assert torch.allclose(model.weight, before - 1)
    assert stepper.metrics()["skipped"] == 2


def test_the_state_of_the_scale_is_saved():
    model = nn.Linear(3, 1)
    stepper, twin = scaled_stepper(model), scaled_stepper(model)
    stepper.backward(model(torch.ones(1, 3)).sum())
    stepper.step(model, 1.0)
    twin.load_state_dict(stepper.state_dict())
    for both in (stepper, twin):
        both.backward(model(torch.ones(1, 3)).sum())
        both.step(model, 0.0)
        assert both.metrics()["loss_scale"] == 2048.0  # the second step in a row without overflow


def test_without_scaling_a_stepper_is_its_optimiser():
    model, twin = nn.Linear(3, 1), nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    stepper = Stepper(Adam(lr=0.1).build(model), Clip().start())
    stepper.backward(model(torch.ones(2, 3)).square().sum())
    stepper.step(model, 1.0)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.1)
    twin(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, twin.weight)
    assert "loss_scale" not in stepper.metrics()
    assert stepper.state_dict()["scaler"] is None


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimiser_leaves_out_the_same_steps(kind):
    """As on a CUDA device: it is told by a tensor, and the norm is read one step late."""
    plain, fused = nn.Linear(3, 1), nn.Linear(3, 1)
    fused.load_state_dict(plain.state_dict())
    steppers = []
    for model, one_kernel in ((plain, False), (fused, True)):
        groups = [{"params": model.parameters(), "initial_lr": 0.1}]
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        steppers.append(Stepper(kind(groups, lr=0.1, fused=one_kernel, **options), Clip(max_norm=0.5).start()))
    for x in (1.0, math.inf, 2.0, math.nan, math.nan, 3.0):
        for model, stepper in zip((plain, fused), steppers, strict=True):
            stepper.backward(model(torch.full((2, 3), x)).square().sum())
            stepper.step(model, 1.0)
        torch.testing.assert_close(fused.weight, plain.weight, rtol=1e-6, atol=1e-7)
    assert len(steppers[1].guard._unread) == 1
    assert steppers[0].metrics() == pytest.approx(steppers[1].metrics(), rel=1e-6)
    assert steppers[1].metrics()["skipped"] == 3
    assert steppers[1].state_dict()["guard"] == {"skipped": 3, "skipped_in_a_row": 0}


def test_a_refused_first_step_leaves_no_momentum(monkeypatch):
    """Fused kernels make its memory when they make a step, and leave it arbitrary when they do not."""
    monkeypatch.setattr(optim, "_fused", lambda groups: True)
    plain, fused = linear().float(), linear().float()
    steppers = [
        Stepper(torch.optim.SGD([{"params": plain.parameters(), "initial_lr": 0.5}], momentum=0.5), Clip().start()),
        Stepper(SGD(lr=0.5, momentum=0.5).build(fused), Clip().start()),
    ]
    for x in (math.nan, 1.0, 2.0):
        for model, stepper in zip((plain, fused), steppers, strict=True):
            stepper.backward(model(torch.full((2, 3), x)).sum())
            stepper.step(model, 1.0)
        torch.testing.assert_close(fused.weight, plain.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "settings", [Adam(lr=0.25), AdamW(lr=0.25, weight_decay=0.5, no_decay=("bias",)), SGD(lr=0.25)]
)
def test_rates_are_read_from_tensors_for_a_while(monkeypatch, settings):
    monkeypatch.setattr(optim, "_fused", lambda groups: True)
    plain, other = linear().float(), linear().float()
    steppers = [Stepper(settings.build(model), Clip().start()) for model in (plain, other)]
    rates = [torch.tensor(0.0) for _ in steppers[1].optimizer.param_groups]
    before = [dict(group) for group in steppers[1].optimizer.param_groups]
    for k, factor in enumerate((1.0, 0.5, 0.125)):
        for model in (plain, other):
            set_gradients(model, k)
        steppers[0].step(plain, factor)
        for rate in rates:
            rate.fill_(0.25 * factor)
        with steppers[1].rates_in(rates, recorded=True):
            steppers[1].apply(steppers[1].guard.clip(other))
        torch.testing.assert_close(other.weight, plain.weight, rtol=1e-6, atol=1e-7)
    assert steppers[1].optimizer.param_groups == before
    assert steppers[1].optimizer.found_inf is None


def test_norms_are_counted_in_order_and_later():
    guard = Clip(give_up=3).start()
    for k, norm in enumerate((math.nan, math.inf, 1.0, math.nan)):
        guard.note(torch.tensor(norm))
        guard.catch_up(beyond=3)
        assert len(guard._unread) == (0 if k == 3 else k + 1)
    assert (guard.skipped, guard.skipped_in_a_row) == (3, 1)
    assert math.isnan(guard.norm)
    for _ in range(2):
        guard.note(torch.tensor(math.nan))
    with pytest.raises(
        NonFiniteGradientError, match=r"3 steps in a row had non-finite gradients; 5 steps were skipped"
    ):
        guard.state_dict()


def test_a_steady_average_is_a_blend_that_is_not_counted():
    model = linear()
    whole, blended = (WeightAverage(Averaging(decay=0.9, start=1)) for _ in range(2))
    for step in range(5):
        with torch.no_grad():
            model.weight.add_(step)
        whole.update(model, step)
        assert blended.steady(step) == (step >= 2)
        if blended.steady(step):
            blended.blend(model)
        else:
            blended.update(model, step)
    assert torch.equal(averaged(model, blended), averaged(model, whole))
    assert (whole.count, blended.count) == (4, 1)
    uniform = WeightAverage(Averaging(kind="uniform"))
    uniform.update(model, 0)
    assert not uniform.steady(1)


def test_a_fused_optimiser_gives_up_one_step_late():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "initial_lr": 0.1}], fused=True)
    stepper = Stepper(optimizer, Clip(give_up=2).start())

    def step():
        stepper.backward(model(torch.full((1, 3), math.nan)).sum())
        stepper.step(model, 1.0)

    step()
    step()
    with pytest.raises(NonFiniteGradientError, match="2 steps in a row had non-finite gradients"):
        step()
