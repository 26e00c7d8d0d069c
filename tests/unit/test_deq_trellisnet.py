"""DEQ-TrellisNet: the layer in both forms, the scan inside it, regularisers, memory, chunks, the explicit twin."""

import copy
import dataclasses
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise import Anderson, Broyden, Implicit, NewtonKrylov, Picard, Plan, Stop
from equipoise.models import _scan
from equipoise.models._scan import linear_scan
from equipoise.models.deq_trellisnet import (
    CausalConv,
    DEQTrellisNet,
    DEQTrellisNetConfig,
    TrellisOutput,
    activation_penalty,
    deq_trellisnet_ptb,
    deq_trellisnet_small,
    deq_trellisnet_wt103,
)
from equipoise.models.outputs import LMOutput
from equipoise.models.registry import create_model
from equipoise.nn import weight_norm
from equipoise.penalties import jacobian_penalty
from tests.gradients import ROBUST, TIGHT, all_converged, normal, relative_error

EXACT_PLAN = Plan(ROBUST, Implicit(solver=ROBUST, stop=TIGHT), TIGHT)
SMALL = DEQTrellisNetConfig(vocab_size=11, embedding_size=3, hidden_size=2, init_std=0.4, init_embedding=1.0)


def model_of(plan=EXACT_PLAN, seed=0, **changes):
    torch.manual_seed(seed)
    return DEQTrellisNet(dataclasses.replace(SMALL, plan=plan, **changes)).double()


def text(batch=2, length=7, seed=0, vocabulary=11):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, length + 1), generator=generator).split([length, 1], dim=1)[0]


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


# The scan


def naive_scan(decay, drive, start):
    stride, values = start.shape[-2], list(start.unbind(-2))
    for t in range(drive.shape[-2]):
        values.append(decay[..., t, :] * values[-stride] + drive[..., t, :])
    return torch.stack(values[stride:], dim=-2)


def scan_arguments(length, stride, batch=2, size=3):
    decay = normal(batch, length, size).sigmoid()
    arguments = decay, normal(batch, length, size, seed=1), normal(batch, stride, size, seed=2)
    return [a.requires_grad_() for a in arguments]


@pytest.mark.parametrize("method", ["_recur_by_steps", "_recur_by_doubling"])
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (7, 1), (8, 1), (9, 2), (5, 3), (2, 3), (6, 6)])
def test_scan_equals_the_loop_in_values_and_gradients(monkeypatch, method, length, stride):
    monkeypatch.setattr(_scan, "_recur", getattr(_scan, method))
    arguments = scan_arguments(length, stride)
    a = normal(2, length, 3, seed=3)
    got, want = linear_scan(*arguments), naive_scan(*arguments)
    assert relative_error(got, want) <= 1e-15
    for mine, true in zip(torch.autograd.grad(got, arguments, a), torch.autograd.grad(want, arguments, a), strict=True):
        assert torch.allclose(mine, true, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("stride", [1, 2])
def test_scan_has_second_derivatives_and_forward_mode(stride):
    arguments = scan_arguments(5, stride, batch=1, size=2)
    assert torch.autograd.gradcheck(linear_scan, arguments, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(linear_scan, arguments)


def test_scan_under_vmap_with_a_shared_argument():
    decay, drive, start = (a.detach() for a in scan_arguments(6, 2))
    many = torch.stack([drive, 2 * drive, -drive], dim=1)
    got = torch.vmap(linear_scan, in_dims=(None, 1, None))(decay, many, start)
    want = torch.stack([naive_scan(decay, many[:, k], start) for k in range(3)])
    assert relative_error(got, want) <= 1e-15


def test_scan_accumulates_half_precision_in_float32():
    decay, drive, start = (a.detach().bfloat16() for a in scan_arguments(40, 1))
    got = linear_scan(decay, drive, start)
    assert got.dtype == torch.float32
    assert relative_error(got, naive_scan(decay.double(), drive.double(), start.double())) <= 1e-6


# The convolution


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_causal_conv_is_a_normalised_convolution(kernel, dilation):
    mine = CausalConv(4, 6, kernel, dilation=dilation).double()
    with torch.no_grad():
        mine.weight_g.mul_(1.5)
    x = normal(2, 5 + mine.reach, 4)
    direction = mine.weight_v.detach().unflatten(1, (kernel, 4)).transpose(1, 2)
    conv = weight_norm(nn.Conv1d(4, 6, kernel, dilation=dilation).double())
    with torch.no_grad():
        conv.weight_v.copy_(direction)
        conv.weight_g.copy_(mine.weight_g[..., None])
        conv.bias.copy_(mine.bias)
    before, inside = x.split([mine.reach, 5], dim=1)
    for mask in (None, normal(2, 1, 4, seed=1)):
        assert relative_error(mine(inside, before, mask), conv((x if mask is None else x * mask).mT).mT) <= 1e-14


@pytest.mark.parametrize("normalised", [True, False])
def test_dropconnect_spares_the_current_tap_and_acts_before_the_norm(normalised):
    p = 0.4
    conv = CausalConv(50, 8, 2, dropconnect=p, weight_norm=normalised).double()
    torch.manual_seed(5)
    weight = conv.begin_solve(conv.weight_v)
    torch.manual_seed(5)
    mask = (torch.rand(8, 50) >= p).double() / (1 - p)
    v = torch.cat([conv.weight_v[:, :50] * mask, conv.weight_v[:, 50:]], dim=1)
    want = v * conv.weight_g / v.norm(dim=1, keepdim=True) if normalised else v
    assert relative_error(weight, want) <= 1e-14
    assert bool((weight[:, 50:] != 0).all())
    assert 0.3 < float((weight[:, :50] == 0).double().mean()) < 0.5
    conv.eval()
    assert bool((conv.begin_solve(conv.weight_v) != 0).all())


# The layer


def hand_written(model, tokens, depth, memory=None):
    """A TrellisNet of `depth` layers, one time step and one tap at a time."""
    config = model.config
    k, s, size = config.kernel_size, config.dilation, config.state_size
    x = model.embedding.weight[tokens]
    batch, length = tokens.shape

    def effective(conv):
        v = conv.weight_v
        weight = v if conv.weight_g is None else v / v.norm(dim=1, keepdim=True) * conv.weight_g
        return weight.chunk(k, dim=1), conv.bias  # the oldest tap first

    def at(values, t, past):
        """values[:, t], from the history for t < 0, else zero."""
        if t >= 0:
            return values[:, t]
        if past is None or -t > past.shape[1]:
            return values.new_zeros(batch, values.shape[2])
        return past[:, t]

    def convolve(conv, values, t, dilation, past):
        taps, bias = effective(conv)
        return bias + sum(at(values, t - (k - 1 - j) * dilation, past) @ taps[j].mT for j in range(k))

    past = memory or {"h": None, "c": None, "inputs": None}
    h = c = x.new_zeros(batch, length, size)
    for _ in range(depth):
        new_h, new_c = [], []
        for t in range(length):
            pre = convolve(model.injection, x, t, 1, past.get("inputs"))
            pre = pre + convolve(model.cell.recurrent, h, t, s, past["h"])
            i, o, g, phi = pre.split(size, dim=1)
            new_c.append(phi.sigmoid() * at(c, t - s, past["c"]) + i.sigmoid() * g.tanh())
            new_h.append(o.sigmoid() * new_c[-1].tanh())
        h, c = torch.stack(new_h, dim=1), torch.stack(new_c, dim=1)
    return h, c


@pytest.mark.parametrize(("kernel", "dilation"), [(2, 1), (2, 3), (3, 2), (1, 1)])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_explicit_twin_of_the_full_form_is_a_trellisnet(kernel, dilation, normalised):
    model = model_of(form="full", kernel_size=kernel, dilation=dilation, weight_norm=normalised)
    tokens = text()
    output = model.explicit(4)(tokens)
    h, c = hand_written(model, tokens, 4)
    assert relative_error(output.features, h[..., 2:]) <= 1e-13
    assert relative_error(output.memory["c"], c[:, -dilation:]) <= 1e-13
    logits = h[..., 2:] @ model.embedding.weight.mT + model.output_bias
    assert relative_error(output.logits, logits) <= 1e-13
    again = model.explicit(3)(text(seed=1), memory=output.memory)
    want, _ = hand_written(model, text(seed=1), 3, output.memory)
    assert relative_error(again.features, want[..., 2:]) <= 1e-13


@pytest.mark.parametrize(("kernel", "dilation", "batch", "length"), [(2, 1, 2, 7), (3, 2, 1, 6), (2, 3, 2, 2)])
def test_both_forms_have_the_same_root_and_gradients(kernel, dilation, batch, length):
    shape = {"kernel_size": kernel, "dilation": dilation}
    full, eliminated = model_of(form="full", **shape), model_of(form="eliminated", **shape)
    tokens, targets = text(batch, length), text(batch, length, seed=1)
    first = [model(tokens, targets) for model in (full, eliminated)]
    second = [m(targets, tokens, o.memory) for m, o in zip((full, eliminated), first, strict=True)]
    for a, b in (first, second):
        assert all_converged(a.solution.stats)
        assert relative_error(b.losses, a.losses) <= 1e-10
        assert relative_error(b.solution.value, a.solution.value[0]) <= 1e-10
        assert relative_error(list(b.memory.values()), list(a.memory.values())) <= 1e-10
    losses = [a.loss + b.losses.square().mean() for a, b in zip(first, second, strict=True)]
    want, got = (gradients(m, loss) for m, loss in zip((full, eliminated), losses, strict=True))
    for mine, true in zip(got, want, strict=True):
        assert relative_error(mine, true) <= 1e-8


@pytest.mark.parametrize("form", ["full", "eliminated"])
def test_implicit_gradient_equals_that_of_a_deep_twin(form):
    model = model_of(form=form, dilation=2)
    tokens, targets = text(), text(seed=1)
    twin = model.explicit(150)
    want, got = twin(tokens, targets), model(tokens, targets)
    assert relative_error(got.losses, want.losses) <= 1e-10
    for mine, true in zip(gradients(model, got.loss), gradients(model, want.loss), strict=True):
        assert relative_error(mine, true) <= 1e-8


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), NewtonKrylov()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("form", ["full", "eliminated"])
def test_every_solver_finds_the_same_features(form, solver):
    tokens = text()
    want = model_of(form=form)(tokens).features
    stop = Stop(rtol=1e-11, max_steps=300, plateau=100)
    output = model_of(Plan(solver, Implicit(), stop), form=form)(tokens)
    assert all_converged(output.solution.stats)
    assert relative_error(output.features, want) <= 1e-9


@pytest.mark.parametrize("form", ["full", "eliminated"])
def test_causality(form):
    model = model_of(form=form)
    tokens = text(1, 8)
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 11
    before, after = (model(t).features.detach() for t in (tokens, changed))
    assert torch.allclose(before[:, :5], after[:, :5], rtol=0, atol=1e-11)
    assert float((before[:, 5:] - after[:, 5:]).abs().amax(dim=(0, 2)).min()) > 1e-8


@pytest.mark.parametrize("form", ["full", "eliminated"])
def test_without_recurrence_one_step_is_enough_but_for_the_path_of_c(form):
    plan = Plan(Picard(), Implicit(), Stop(rtol=1e-12))
    model = model_of(plan, form=form, kernel_size=1)
    with torch.no_grad():
        model.cell.recurrent.weight_g.zero_()
    output = model(text(3, 6))
    # In the full form c travels one position per evaluation.
    assert output.solution.stats.steps.tolist() == [1 if form == "eliminated" else 6] * 3
    h, _ = hand_written(model, text(3, 6), 8)
    assert relative_error(output.features, h[..., 2:]) <= 1e-14


# Memory and chunks


@pytest.mark.parametrize("form", ["full", "eliminated"])
@pytest.mark.parametrize(
    ("kernel", "dilation", "cuts"),
    [(2, 1, (4, 5)), (2, 1, (1, 1, 7)), (3, 2, (3, 1, 5)), (2, 3, (2, 7)), (1, 1, (4, 5))],
)
def test_segments_with_memory_equal_one_long_segment(form, kernel, dilation, cuts):
    model = model_of(form=form, kernel_size=kernel, dilation=dilation).eval()
    tokens, targets = text(2, 9), text(2, 9, seed=1)
    whole = model(tokens, targets)
    memory, losses = None, []
    for part, aim in zip(tokens.split(cuts, dim=1), targets.split(cuts, dim=1), strict=True):
        output = model(part, aim, memory)
        memory = output.memory
        losses.append(output.losses)
        assert not any(tensor.requires_grad for tensor in memory.values())
    assert relative_error(torch.cat(losses, dim=1), whole.losses) <= 1e-10
    for name, tensor in whole.memory.items():
        assert tensor.shape == memory[name].shape
        assert torch.allclose(tensor, memory[name], rtol=1e-10, atol=1e-11)


def test_without_carried_inputs_a_segment_begins_with_zeros():
    model = model_of(carry_inputs=False)
    first = model(text())
    assert set(first.memory) == {"h", "c"}
    second = model(text(seed=1), memory=first.memory).solution.value
    want, _ = hand_written(model, text(seed=1), 150, first.memory)
    assert relative_error(second, want) <= 1e-10


@pytest.mark.parametrize("form", ["full", "eliminated"])
@pytest.mark.parametrize("changes", [{"chunk_size": 3}, {"chunk_size": 1}, {"chunk_size": 2, "dilation": 3}])
def test_chunks_equal_the_one_shot_solve_in_value_and_gradient(form, changes):
    tokens, targets = text(2, 7), text(2, 7, seed=1)
    chunked = model_of(form=form, dropout_hidden=0.3, dropconnect=0.3, **changes)
    whole = model_of(form=form, dropout_hidden=0.3, dropconnect=0.3, **{**changes, "chunk_size": None})
    outputs = []
    for model in (whole, chunked):
        torch.manual_seed(3)  # the masks are drawn in the same order, with the same shapes
        outputs.append(model(tokens, targets))
    one, many = outputs
    assert relative_error(many.losses, one.losses) <= 1e-10
    assert relative_error(many.memory["c"], one.memory["c"]) <= 1e-10
    assert many.solution.stats.nfe > one.solution.stats.nfe
    assert many.solution.stats.residual.shape == (2,)
    assert all_converged(many.solution.stats)
    assert many.memory["h"].shape == one.memory["h"].shape
    for mine, true in zip(gradients(chunked, many.loss), gradients(whole, one.loss), strict=True):
        assert relative_error(mine, true) <= 1e-8


def test_chunks_report_the_worst_status():
    plan = Plan(Picard(), Implicit(), Stop(rtol=1e-12, max_steps=2))
    stats = model_of(plan, chunk_size=3)(text()).solution.stats
    assert not bool(stats.ok.any())
    assert float(stats.residual.min()) > 1e-12


def test_memory_of_another_batch_size_is_refused():
    model = model_of()
    memory = model(text(3)).memory
    with pytest.raises(ValueError, match=r"memory holds 3 streams, tokens hold 2"):
        model(text(2), memory=memory)


# Regularisers


def noisy(**changes):
    rates = {"dropout": 0.3, "dropout_in": 0.3, "dropout_hidden": 0.3, "dropconnect": 0.5, "dropout_words": 0.3}
    return model_of(hidden_size=8, **{**rates, **changes})


def test_draws_are_constant_in_a_forward_and_new_in_the_next():
    model = noisy()
    tokens = text()
    first, second = model(tokens), model(tokens)
    assert relative_error(second.features, first.features) > 1e-3
    # A solve that converges to rounding can only have seen one draw.
    assert all_converged(first.solution.stats)
    assert float(first.solution.stats.residual.max()) <= 1e-13
    problem = first.solution.problem
    z = problem.start(first.solution.value)
    assert torch.equal(problem.evaluate(z)[0], problem.evaluate(z)[0])
    model.eval()
    assert torch.equal(model(tokens).features, model(tokens).features)


@pytest.mark.parametrize("form", ["full", "eliminated"])
def test_gradients_with_all_draws_equal_those_of_a_deep_twin_with_the_same_draws(form):
    model = noisy(form=form)
    tokens, targets = text(), text(seed=1)
    outputs = []
    for module in (model, model.explicit(200)):
        torch.manual_seed(7)
        outputs.append(module(tokens, targets))
    got, want = outputs
    assert relative_error(got.losses, want.losses) <= 1e-10
    for mine, true in zip(gradients(model, got.loss), gradients(model, want.loss), strict=True):
        assert relative_error(mine, true) <= 1e-8


def test_two_forwards_before_one_backward():
    model = noisy()
    tokens, targets = text(), text(seed=1)
    torch.manual_seed(1)
    losses = [model(tokens, targets).loss, model(targets, tokens).loss]
    got = gradients(model, losses[0] + losses[1])
    torch.manual_seed(1)
    apart = []
    for pair in ((tokens, targets), (targets, tokens)):
        apart.append(gradients(model, model(*pair).loss))
    for mine, a, b in zip(got, *apart, strict=True):
        assert relative_error(mine, a + b) <= 1e-9


def test_word_dropout_takes_all_occurrences_of_a_word():
    model = model_of(dropout_words=0.5)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    got = model._embed(tokens)
    ratio = got / model.embedding(tokens)
    assert set(ratio.detach().round(decimals=6).unique().tolist()) == {0.0, 2.0}
    assert torch.allclose(ratio[0], ratio[1].flip(0))


def test_activation_penalty():
    hidden, features = normal(2, 5, 3), normal(2, 5, 3, seed=1)
    output = TrellisOutput(hidden=hidden, features=features)
    change = sum((features[:, t] - features[:, t - 1]).square().sum() for t in range(1, 5)) / (2 * 4 * 3)
    want = 2 * hidden.square().sum() / 30 + change
    assert torch.allclose(activation_penalty(output), want, rtol=1e-13)
    plain = activation_penalty(LMOutput(hidden=hidden[:, :1]), alpha=3, beta=5)  # one step does not change
    assert torch.allclose(plain, 3 * hidden[:, :1].square().mean(), rtol=1e-13)
    with pytest.raises(ValueError, match=r"no hidden features"):
        activation_penalty(LMOutput())


def test_hidden_is_dropped_out_features_with_one_mask_per_stream():
    output = model_of(dropout=0.5)(text())
    ratio = (output.hidden / output.features).detach()
    assert set(ratio.round(decimals=6).unique().tolist()) == {0.0, 2.0}
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio))


# Higher derivatives


@pytest.mark.parametrize("form", ["full", "eliminated"])
def test_jacobian_penalty_has_a_gradient(form):
    model = model_of(form=form)
    solution = model(text(1, 4)).solution
    torch.manual_seed(2)
    penalty = jacobian_penalty(solution.problem, solution.value)
    got = torch.autograd.grad(penalty, model.cell.recurrent.weight_g)[0]
    h = 1e-5
    values = []
    for sign in (1, -1):
        shifted = copy.deepcopy(model)
        with torch.no_grad():
            shifted.cell.recurrent.weight_g[3] += sign * h
        u, h0, c0, _ = shifted.prepare(text(1, 4), None, None)
        problem = shifted.deq.problem(u, h0, c0)
        torch.manual_seed(2)
        values.append(float(jacobian_penalty(problem, solution.value).detach()))
    assert abs(float(got[3]) - (values[0] - values[1]) / (2 * h)) <= 1e-7 * max(1.0, float(got.norm()))


def test_any_order_gives_the_same_gradient_with_draws():
    tokens, targets = text(), text(seed=1)
    exact = Implicit(solver=ROBUST, stop=TIGHT, any_order=True)
    results = []
    for adjoint in (exact, EXACT_PLAN.adjoint):
        model = noisy(dropout_hidden=0.3)
        model.deq.plan = EXACT_PLAN.replace(adjoint=adjoint)
        torch.manual_seed(4)
        results.append(gradients(model, model(tokens, targets).loss))
    for mine, true in zip(*results, strict=True):
        assert relative_error(mine, true) <= 1e-8


# The twin


def test_the_twin_shares_parameters():
    model = model_of()
    twin = model.explicit(3)
    assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}
    assert "depth=3" in repr(twin)


@pytest.mark.parametrize("form", ["full", "eliminated"])
@pytest.mark.parametrize("checkpoint", [True, 3])
def test_recomputation_changes_no_gradient(form, checkpoint):
    model = noisy(form=form)
    tokens, targets = text(), text(seed=1)
    results = []
    for option in (False, checkpoint):
        torch.manual_seed(9)
        output = model.explicit(8, checkpoint=option, auxiliary_every=4)(tokens, targets)
        results.append((output.losses, *gradients(model, output.loss + output.auxiliary.mean())))
    for mine, true in zip(*results, strict=True):
        assert relative_error(mine, true) <= 1e-13


def test_auxiliary_losses_are_those_of_shallower_twins():
    model = model_of()
    tokens, targets = text(), text(seed=1)
    output = model.explicit(9, auxiliary_every=3)(tokens, targets)
    assert output.auxiliary.shape == (2, 2, 7)
    for losses, depth in zip(output.auxiliary, (3, 6), strict=True):
        assert relative_error(losses, model.explicit(depth)(tokens, targets).losses) <= 1e-13
    assert model.explicit(9, auxiliary_every=3)(tokens).auxiliary is None
    assert model.explicit(9)(tokens, targets).auxiliary is None


# Settings, precision, storage


@pytest.mark.parametrize("form", ["full", "eliminated"])
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_half_precision(form, how):
    plan = Plan(Anderson(), Implicit(stop=Stop(rtol=1e-2)), Stop(rtol=1e-2, max_steps=60))
    want = model_of(form=form)(text(), text(seed=1))
    model = model_of(plan, form=form).to(torch.bfloat16 if how == "bfloat16" else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        output = model(text(), text(seed=1))
        output = model(text(), text(seed=1), {name: 0 * tensor for name, tensor in output.memory.items()})
    output.loss.backward()
    assert output.losses.dtype == torch.float32
    assert relative_error(output.losses, want.losses) <= 0.03
    assert float(model.cell.recurrent.weight_v.grad.norm()) > 0


def test_under_autocast_a_solve_rounds_its_weight_once():
    model = model_of(Plan(Picard(), Implicit(), Stop(rtol=0, max_steps=3)), dropconnect=0.4).float()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(text())
    with output.solution.problem.active():
        assert model.cell.recurrent.weight.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in (*output.memory.values(), output.solution.value)} == {torch.float32}


# torch silences this warning about tensors it looks at while compiling; pytest turns it into an error before that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_cell_gives_the_same_losses():
    model = model_of()
    want = model(text(), text(seed=1)).losses.detach()
    model.deq.compile_cell(backend="aot_eager")
    assert relative_error(model(text(), text(seed=1)).losses, want) <= 1e-12


def test_state_dict_and_memory_survive_a_file():
    model, other = model_of(), model_of(seed=1)
    output = model(text())
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "memory": output.memory}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    other.load_state_dict(stored["model"])
    got = other(text(seed=1), memory=stored["memory"]).features
    assert relative_error(got, model(text(seed=1), memory=output.memory).features) <= 1e-12


@pytest.mark.parametrize(
    ("preset", "total", "beside"),
    [
        (deq_trellisnet_ptb, 24_192_400, 20_182_400),
        (deq_trellisnet_wt103, 181_716_951, 44_368_896),
        (deq_trellisnet_small, 1_046_288, 396_288),
    ],
)
def test_parameter_counts(preset, total, beside):
    with torch.device("meta"):
        model = create_model(preset.__name__)
    config = model.config
    count = sum(p.numel() for p in model.parameters())
    H, e = config.state_size, config.embedding_size
    assert beside == 8 * H * H + 8 * H * e + 8 * H + 8 * H  # weights, biases, g
    assert count == total == beside + config.vocab_size * (e + 1)


def test_initial_values():
    model = create_model("deq_trellisnet_small", vocab_size=500).requires_grad_(False)
    assert abs(float(model.cell.recurrent.weight_v.std()) - 0.05) < 2e-3
    assert abs(float(model.injection.bias.std()) - 0.05) < 5e-3
    norms = model.cell.recurrent.weight_v.norm(dim=1, keepdim=True)
    assert relative_error(model.cell.recurrent.weight_g, norms) <= 1e-6
    assert 0.099 < float(model.embedding.weight.abs().max()) <= 0.1
    assert float(model.output_bias.abs().max()) == 0


def test_the_small_preset_learns():
    model = create_model("deq_trellisnet_small", vocab_size=8, embedding_size=16, hidden_size=16)
    tokens = torch.arange(64).remainder(8).view(4, 16)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(12):
        output = model(tokens[:, :-1], tokens[:, 1:])
        (output.loss + activation_penalty(output, 0.1, 0.1)).backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(output.loss.detach()))
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "eliminate"}, r"did you mean 'eliminated'"),
        ({"kernel_size": 0}, r"kernel_size must be an integer of at least 1, got 0"),
        ({"chunk_size": 0}, r"chunk_size must be an integer"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"droput": 0.1}, r"unknown setting of DEQTrellisNetConfig 'droput'; did you mean 'dropout'"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        create_model("deq_trellisnet_small", **changes)


def test_bad_calls_are_refused():
    model = model_of()
    with pytest.raises(
        ValueError, match=r"tokens must be integers of shape \(B, T\).*got torch.float64 of shape \(2, 3\)"
    ):
        model(normal(2, 3))
    with pytest.raises(ValueError, match=r"targets must have the shape of tokens, \(2, 7\); got \(2, 6\)"):
        model(text(), text(length=6))
    with pytest.raises(ValueError, match=r"depth must be an integer of at least 1, got 0"):
        model.explicit(0)
    with pytest.raises(ValueError, match=r"called without targets"):
        _ = model(text()).loss


def test_losses_are_cross_entropies_of_the_logits():
    model = model_of()
    tokens, targets = text(), text(seed=1)
    logits = model(tokens).logits
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 7)
    output = model(tokens, targets)
    assert output.logits is None
    assert relative_error(output.losses, want) <= 1e-12
