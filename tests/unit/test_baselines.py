"""The explicit baselines: sizes, causality, memory, and each network against one written out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

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


def test_dropout_acts_in_training_only():
    for make in MODELS.values():
        model = make(dropout=0.5).double()
        assert relative_error(model(text()).logits, model(text()).logits) > 1e-6
        model.eval()
        assert torch.equal(model(text()).logits, model(text()).logits)


def test_a_memory_of_another_batch_size_is_refused(model):
    memory = model(text(3)).memory
    with pytest.raises(ValueError, match=r"memory holds 3 streams, tokens hold 2"):
        model(text(2), memory=memory)


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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lstm_ptb_small", {"cell": "lsmt"}, r"unknown recurrent cell 'lsmt'; did you mean 'lstm'"),
        ("lstm_ptb_small", {"widths": ()}, r"widths must name at least one layer"),
        ("lstm_ptb_small", {"widths": (100,)}, r"tied=True needs embedding_size equal to .* 100; got 200"),
        ("lstm_ptb_small", {"drop": 0.1}, r"unknown setting of RecurrentConfig 'drop'; did you mean 'dropout'"),
        ("tcn_copy_memory", {"levels": 0}, r"levels must be an integer of at least 1, got 0"),
        ("transformer_xl_ptb_small", {"heads": 3}, r"a multiple of heads=3, got 128"),
    ],
)
def test_bad_settings_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **changes)
