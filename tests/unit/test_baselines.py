"""The explicit baselines: sizes, causality, memory, and each network against one written out by hand."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from equipoise._draws import Rows, rows_of
from equipoise.models.baselines import (
    TCN,
    RecurrentConfig,
    RecurrentLM,
    TCNConfig,
    TransformerXL,
    TransformerXLConfig,
)
from equipoise.models.registry import create_model, list_models
from tests.gradients import relative_error

VOCABULARY = 9

MODELS = {
    "lstm": lambda **c: RecurrentLM(RecurrentConfig(VOCABULARY, "lstm", (5, 4), 3, **c)),
    "lstm_tied": lambda **c: RecurrentLM(RecurrentConfig(VOCABULARY, "lstm", (5, 3), 3, tied=True, **c)),
    "gru": lambda **c: RecurrentLM(RecurrentConfig(VOCABULARY, "gru", (5, 4), None, **c)),
    "tcn": lambda **c: TCN(TCNConfig(VOCABULARY, 4, 2, 3, history=12, init_std=0.3, **c)),
    "tcn_embedded": lambda **c: TCN(TCNConfig(VOCABULARY, 4, 2, 2, 4, tied=True, history=12, init_std=0.3, **c)),
    "transformer_xl": lambda **c: TransformerXL(
        TransformerXLConfig(VOCABULARY, 8, 2, 12, 2, memory_length=20, init_std=0.3, **c)
    ),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().double().eval()


def text(batch=2, length=10, seed=0):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "total", "beside"),
    [
        ("lstm_copy_memory", 14_260, None),
        ("gru_copy_memory", 13_920, None),
        ("tcn_copy_memory", 14_170, None),
        ("lstm_ptb_small", 2_653_200, 643_200),
        ("gru_ptb_small", 2_492_400, 482_400),
        ("tcn_ptb_small", 2_973_200, 963_200),
        ("transformer_xl_ptb_small", 2_147_600, 857_600),
        ("lstm_ptb", 24_221_600, 20_211_600),
        ("transformer_xl_wt103", 151_118_605, 41_079_520),
    ],
)
def test_parameter_counts(name, total, beside):
    assert name in list_models()
    with torch.device("meta"):
        model = create_model(name)
    assert count(model) == total
    if beside is not None:
        assert total - model.config.vocab_size * (model.config.embedding_size + 1) == beside


def test_counts_of_the_copy_memory_models_by_formula():
    assert 4 * (57 * 57 + 57 + 2 * 57) + 57 * 10 + 10 == 14_260
    assert 3 * (65 * 65 + 65 + 2 * 65) + 65 * 10 + 10 == 13_920
    first, level = 8 * 10 + 20 + 20, 2 * (800 + 20)  # weights, biases and lengths; a 1 × 1 convolution in the first
    assert first + 820 + 8 * level + 10 * 10 + 10 == 14_170


def test_every_parameter_gets_a_gradient(model):
    output = model(text(), text(seed=1))
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_causality(model):
    tokens = text(1)
    changed = tokens.clone()
    changed[:, 6] = (tokens[:, 6] + 4) % VOCABULARY
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    assert torch.allclose(before[:, :6], after[:, :6], rtol=0, atol=1e-13)
    assert bool(((before - after)[:, 6:].abs().amax(dim=(0, 2)) > 1e-9)[0])


@pytest.mark.parametrize("cuts", [(5, 5), (1, 8, 1), (3, 3, 4)])
def test_segments_with_memory_equal_one_long_segment(model, cuts):
    tokens, targets = text(), text(seed=1)
    whole = model(tokens, targets)
    memory, losses = None, []
    for part, aim in zip(tokens.split(cuts, dim=1), targets.split(cuts, dim=1), strict=True):
        output = model(part, aim, memory)
        memory = output.memory
        losses.append(output.losses)
        assert not any(tensor.requires_grad for tensor in memory)
    assert relative_error(torch.cat(losses, dim=1), whole.losses) <= 1e-12


def test_losses_are_cross_entropies_of_the_logits(model):
    tokens, targets = text(), text(seed=1)
    output = model(tokens)
    assert output.losses is None
    want = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 10)
    got = model(tokens, targets)
    assert got.logits is None
    assert got.solution is None
    assert got.hidden.shape == output.hidden.shape
    assert relative_error(got.losses, want) <= 1e-13


@pytest.mark.parametrize("target", [-100, -1, VOCABULARY])
def test_a_target_outside_the_vocabulary_is_refused(model, target):
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        model(tokens, torch.full_like(tokens, target))


def test_dropout_acts_in_training_only():
    for make in MODELS.values():
        model = make(dropout=0.5).double()
        assert relative_error(model(text()).logits, model(text()).logits) > 1e-6
        model.eval()
        assert torch.equal(model(text()).logits, model(text()).logits)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_of_a_row_does_not_depend_on_how_the_batch_is_split(name):
    """As several processes see it: each has some of the rows, all start from one seed."""
    extra = {"attention_dropout": 0.3} if name == "transformer_xl" else {"dropout_in": 0.3}
    extra |= {"weight_drop": 0.3, "dropout_hidden": 0.3} if name in ("lstm", "lstm_tied", "gru") else {}
    model = MODELS[name](dropout=0.3, **extra).double()
    tokens, memory = text(4), model.eval()(text(4, seed=1)).memory
    model.train()
    torch.manual_seed(2)
    whole, state = model(tokens, memory=memory).logits, torch.get_rng_state()
    for rows in (Rows(0, 1, 4), Rows(1, 4, 4)):
        mine = slice(rows.start, rows.stop)
        kept = memory[mine] if isinstance(memory, torch.Tensor) else [part[mine] for part in memory]
        torch.manual_seed(2)
        with rows_of(rows):
            part = model(tokens[mine], memory=kept).logits
        assert relative_error(part, whole[mine]) <= 1e-12
        assert torch.equal(torch.get_rng_state(), state)


def test_a_memory_of_another_batch_size_is_refused(model):
    memory = model(text(3)).memory
    with pytest.raises(ValueError, match=r"memory holds 3 streams, tokens hold 2"):
        model(text(2), memory=memory)


# Dropped weights


def dropped(cell, **changes):
    torch.manual_seed(0)
    sizes = {"widths": (5, 4), "embedding_size": 3, "weight_drop": 0.4, **changes}
    return RecurrentLM(RecurrentConfig(VOCABULARY, cell, **sizes)).double()


ON_CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
def test_dropped_weights_equal_a_plain_network_with_those_weights(cell, carried, device):
    """Value, memory and gradient: the same masks, drawn layer by layer, put into a network that drops nothing."""
    model, plain = dropped(cell).to(device), dropped(cell, weight_drop=0.0).to(device)
    tokens, targets = text().to(device), text(seed=1).to(device)
    memory = model.eval()(targets).memory if carried else None
    torch.manual_seed(5)
    got = model.train()(tokens, targets, memory)
    got.loss.backward()
    torch.manual_seed(5)
    masks = [F.dropout(torch.ones_like(layer.weight_hh_l0), 0.4) for layer in plain.layers]
    with torch.no_grad():
        for layer, mask in zip(plain.layers, masks, strict=True):
            assert 0 < int((mask == 0).sum()) < mask.numel()
            layer.weight_hh_l0.mul_(mask)
    want = plain(tokens, targets, memory)
    want.loss.backward()
    assert relative_error(got.losses, want.losses) <= 1e-13
    for mine, true in zip(got.memory, want.memory, strict=True):
        assert relative_error(mine, true) <= 1e-13
    for layer, mask in zip(plain.layers, masks, strict=True):
        layer.weight_hh_l0.grad.mul_(mask)
    for (name, mine), true in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(mine.grad, true.grad) <= 1e-12, name


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_weights_are_dropped_in_training_only_and_leave_the_model_as_it_was(cell):
    model, plain = dropped(cell), dropped(cell, weight_drop=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = model(text()).logits, model(text()).logits
    assert relative_error(first, second) > 1e-3  # one draw per forward
    assert list(before) == list(plain.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(model.eval()(text()).logits, plain.eval()(text()).logits)
    twin = copy.deepcopy(model.train())
    torch.manual_seed(1)
    want = model(text()).logits
    torch.manual_seed(1)
    assert torch.equal(twin(text()).logits, want)


def test_one_mask_serves_all_steps_of_a_segment():
    """A GRU in which all weights but those of h in the new gate are 0, written out with the mask of the forward."""
    model = dropped("gru", widths=(4,), weight_drop=0.5)
    layer, seen = model.layers[0], []
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.weight_hh_l0[8:].fill_(1.0)  # of the new gate only: n = tanh(r · W h) with r = z = 1/2
    h = torch.full((1, 4), 0.5, dtype=torch.float64)
    torch.manual_seed(9)
    mask = F.dropout(torch.ones(12, 4, dtype=torch.float64), 0.5)[8:]
    torch.manual_seed(9)
    output = model(text(1, 6), memory=(h,))
    for _ in range(6):
        h = 0.5 * torch.tanh(0.5 * h @ mask.mT) + 0.5 * h
        seen.append(h)
    assert relative_error(output.hidden, torch.stack(seen, dim=1)) <= 1e-13


# Each network by hand


def test_lstm_by_hand():
    model = MODELS["lstm"]().double()
    tokens = text()
    values = list(model.words_in.table.weight[tokens].unbind(1))
    for layer in model.layers:
        W, U = layer.weight_ih_l0, layer.weight_hh_l0
        bias = layer.bias_ih_l0 + layer.bias_hh_l0
        h = c = torch.zeros(2, layer.hidden_size, dtype=torch.float64)
        out = []
        for x in values:
            i, f, g, o = (x @ W.mT + h @ U.mT + bias).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        values = out
    want = torch.stack(values, dim=1) @ model.words_out.weight.mT + model.words_out.bias
    output = model(tokens)
    assert relative_error(output.logits, want) <= 1e-13
    assert relative_error(output.memory[1], h) <= 1e-13
    assert relative_error(output.memory[3], c) <= 1e-13


def test_tcn_by_hand():
    model = MODELS["tcn"]().double()
    tokens = text()
    values = tokens[..., None].double()

    def convolve(conv, values, dilation):
        weight = conv.weight  # (out, in, k), the current tap last
        k, out = weight.shape[2], []
        for t in range(values.shape[1]):
            total = conv.bias.expand(2, -1)
            for j in range(k):
                back = (k - 1 - j) * dilation
                total = total + (values[:, t - back] @ weight[:, :, j].mT if t >= back else 0)
            out.append(total)
        return torch.stack(out, dim=1)

    for index, level in enumerate(model.levels):
        first, second = level.convolutions
        inner = convolve(second, convolve(first, values, 2**index).relu(), 2**index).relu()
        values = (inner + (values if level.skip is None else convolve(level.skip, values, 1))).relu()
    want = values @ model.words_out.weight.mT + model.words_out.bias
    assert relative_error(model(tokens).logits, want) <= 1e-13


def test_tcn_sees_its_receptive_field_and_nothing_before():
    config = TCNConfig(VOCABULARY, 3, 2, 2, 5)
    assert config.receptive_field == 7
    model = TCN(config).double().eval()
    with torch.no_grad():
        for level in model.levels:  # positive weights and features: no path can be cut by a ReLU
            for conv in level.convolutions:
                conv.weight = conv.weight.abs() + 0.1
                conv.bias.fill_(0.1)
            if level.skip is not None:
                level.skip.weight.abs_()
        model.words_in.table.weight.abs_()
    embedded = []
    model.words_in.table.register_forward_hook(lambda m, args, out: embedded.append(out) or out)
    hidden = model(text(1, 12)).hidden
    gradient = torch.autograd.grad(hidden[:, -1].sum(), embedded[0])[0].abs().sum(dim=(0, 2))
    assert (gradient > 0).tolist() == [False] * 5 + [True] * 7
    assert model(text(1, 12)).memory is None


def test_transformer_xl_by_hand():
    model = MODELS["transformer_xl"]().double().eval()
    tokens, memory = text(1, 4), model(text(1, 3, seed=1)).memory
    d, heads, size = 8, 2, 4
    x = model.words_in.table.weight[tokens[0]] * math.sqrt(d)
    for layer, past in zip(model.layers, memory, strict=True):
        seen = torch.cat([past[0], x])
        q = layer.query(x)
        k, v = layer.keys_values(seen).chunk(2, dim=1)
        attended = torch.zeros_like(x)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            for t in range(4):
                scores = []
                for j in range(3 + t + 1):
                    delta = 3 + t - j
                    angles = [delta / 10_000 ** (2 * n / d) for n in range(d // 2)]
                    code = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
                    by_content = (q[t, part] + layer.content_bias[head]) @ k[j, part]
                    by_distance = (q[t, part] + layer.distance_bias[head]) @ layer.distance(code)[part]
                    scores.append((by_content + by_distance) / math.sqrt(size))
                weights = torch.stack(scores).softmax(dim=0)
                attended[t, part] = weights @ v[: 3 + t + 1, part]
        a = layer.norms[0](x + layer.out(attended))
        x = layer.norms[1](a + layer.narrow(layer.widen(a).relu()))
    want = x @ model.words_in.table.weight.mT + model.words_out.bias
    # Codes of distances are computed in float32.
    assert relative_error(model(tokens, memory=memory).logits[0], want) <= 1e-6


def test_transformer_xl_memory_is_limited():
    config = TransformerXLConfig(VOCABULARY, 8, 2, 12, 2, memory_length=3)
    model = TransformerXL(config).eval()
    memory = model(text(2, 2)).memory
    assert [tuple(part.shape) for part in memory] == [(2, 2, 8)] * 2
    memory = model(text(2, 5), memory=memory).memory
    assert [tuple(part.shape) for part in memory] == [(2, 3, 8)] * 2
    assert TransformerXL(TransformerXLConfig(VOCABULARY, 8, 2, 12, 1, memory_length=0))(text()).memory is None


@pytest.mark.parametrize("name", ["tcn", "transformer_xl"])
def test_memory_length_may_change(name):
    model = MODELS[name]().double().eval()
    whole = model(text()).logits
    model.memory_length = 0
    assert model(text()).memory is None
    model.memory_length = 4
    memory = model(text()[:, :6]).memory
    parts = [memory] if name == "tcn" else memory
    assert {part.shape[1] for part in parts} == {4}
    model.memory_length = 64
    output = model(text()[:, :6])
    assert relative_error(model(text()[:, 6:], memory=output.memory).logits, whole[:, 6:]) <= 1e-12


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lstm_ptb_small", {"cell": "lsmt"}, r"unknown recurrent cell 'lsmt'; did you mean 'lstm'"),
        ("lstm_ptb_small", {"widths": ()}, r"widths must name at least one layer"),
        ("lstm_ptb_small", {"widths": (100,)}, r"tied=True needs embedding_size equal to .* 100; got 200"),
        ("lstm_ptb_small", {"weight_drop": 1.0}, r"weight_drop must be a number in \[0, 1\), got 1.0"),
        ("lstm_ptb_small", {"drop": 0.1}, r"unknown setting of RecurrentConfig 'drop'; did you mean 'dropout'"),
        ("tcn_copy_memory", {"levels": 0}, r"levels must be an integer of at least 1, got 0"),
        ("transformer_xl_ptb_small", {"heads": 3}, r"a multiple of heads=3, got 128"),
    ],
)
def test_bad_settings_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **changes)
