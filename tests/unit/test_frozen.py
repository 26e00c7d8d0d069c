"""`frozen`: the same results in eval mode with constants made once, and a model that stays as it was."""

import copy

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.models import create_model
from equipoise.nn import frozen, remove_norm, spectral_norm, weight_norm
from equipoise.nn.norm import WeightNormLinear
from tests.gradients import relative_error

IMAGES = {
    "mdeq_digits": (1, 16),
    "mdeq_shapes": (3, 16),
    "mdeq_cifar_tiny": (3, 16),
    "single_stream_digits": (1, 16),
    "resnet_cifar_tiny": (3, 16),
    "unet_small": (3, 16),
}
WORDS = ["deq_transformer_small", "deq_trellisnet_small", "transformer_xl_ptb_small", "lstm_ptb_small", "tcn_ptb_small"]


def lived_in(model):
    """In eval mode, with statistics that BatchNorm would have after some training."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.track_running_stats:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias)
    return model.eval()


def count(model, *kinds):
    return sum(isinstance(module, kinds) for module in model.modules())


@pytest.mark.parametrize("name", IMAGES)
def test_image_models_do_the_same_without_batch_norm(name):
    torch.manual_seed(0)
    channels, size = IMAGES[name]
    model, images = lived_in(create_model(name)), torch.randn(2, channels, size, size)
    twin = frozen(model)
    assert count(model, nn.BatchNorm2d) > 0
    assert count(twin, nn.BatchNorm2d) == 0
    assert not any(name.endswith(("weight_g", "weight_v")) for name in twin.state_dict())
    with torch.no_grad():
        assert relative_error(twin(images).logits, model(images).logits) <= 1e-4
    assert not twin.training
    assert not any(parameter.requires_grad for parameter in twin.parameters())


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("narrow", [False, True])
def test_language_models_do_exactly_the_same(name, narrow):
    torch.manual_seed(0)
    model, tokens = create_model(name, vocab_size=50).eval(), torch.randint(0, 50, (2, 7))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        twin = frozen(model)
        found, expected = (each(tokens, targets=tokens).loss for each in (twin, model))
    torch.testing.assert_close(found, expected, rtol=1e-5 if not narrow else 1e-3, atol=0)


def test_under_autocast_weights_are_rounded_and_states_are_not():
    torch.manual_seed(0)
    model, images = lived_in(create_model("mdeq_digits")), torch.randn(2, 1, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        twin = frozen(model)
        found, expected = twin(images), model(images)
    for module in twin.modules():
        dtype = torch.bfloat16 if isinstance(module, nn.Conv2d | nn.Linear) else torch.float32
        assert all(parameter.dtype == dtype for parameter in module.parameters(recurse=False))
    assert all(state.dtype == torch.float32 for state in found.solution.value)
    assert relative_error(found.logits.float(), expected.logits.float()) <= 0.05


def test_the_model_stays_as_it_was():
    torch.manual_seed(0)
    model = create_model("mdeq_digits").train()
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        frozen(model)
    assert model.training
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())


def test_what_is_shared_or_derived_is_left_alone():
    """A convolution used twice, a tied weight, BatchNorm without statistics, and a class of the user's."""

    class Odd(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x) + 1

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Conv2d(4, 4, 1)
            self.both = nn.ModuleList([nn.Sequential(self.shared, nn.BatchNorm2d(4)), nn.Sequential(self.shared)])
            self.bare = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
            self.odd = nn.Sequential(nn.Conv2d(4, 4, 1), Odd(4))
            self.words = nn.Embedding(6, 4)
            self.tied = nn.Linear(4, 6)
            self.tied.weight = self.words.weight

        def forward(self, x):
            y = self.odd(self.bare(self.both[1](self.both[0](x))))
            return self.tied(y.mean((2, 3)) + self.words.weight[0])

    torch.manual_seed(0)
    net, x = lived_in(Net()), torch.randn(2, 4, 3, 3)
    with torch.no_grad():
        twin = frozen(net)
        assert count(twin, nn.BatchNorm2d) == 3
        assert relative_error(twin(x), net(x)) <= 1e-6
        with torch.autocast("cpu", torch.bfloat16):
            twin = frozen(net)
            assert twin.words.weight is twin.tied.weight
            assert twin.words.weight.dtype == torch.float32
            assert twin.shared.weight.dtype == torch.bfloat16
            assert relative_error(twin(x).float(), net(x).float()) <= 0.05


def test_a_sequence_with_a_forward_of_its_own_is_left_alone():
    class Skipped(nn.Sequential):
        def forward(self, x):
            y = self[0](x)
            return y + self[1](y)

    torch.manual_seed(0)
    net, x = lived_in(Skipped(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))), torch.randn(2, 4, 3, 3)
    with torch.no_grad():
        assert relative_error(frozen(net)(x), net(x)) <= 1e-6


@pytest.mark.parametrize("make", [weight_norm, lambda layer: spectral_norm(layer, bound=0.5)])
@pytest.mark.parametrize("layer", [nn.Linear(6, 4), nn.Conv1d(6, 4, 3), nn.Conv2d(6, 4, 3)], ids=lambda m: str(type(m)))
def test_a_norm_that_is_removed_leaves_its_weight(make, layer):
    plain = type(layer)
    normalised = make(copy.deepcopy(layer)).eval()
    with torch.no_grad():
        normalised.weight_v.mul_(3)
        weight = normalised.weight.clone()
    assert remove_norm(normalised) is normalised
    assert type(normalised) is plain
    assert set(normalised.state_dict()) == {"weight", "bias"}
    assert torch.equal(normalised.weight, weight)
    assert remove_norm(normalised) is normalised  # nothing left to do


def test_a_class_derived_from_a_normalised_one_keeps_its_norm():
    class Doubled(WeightNormLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer = weight_norm(nn.Linear(3, 2))
    layer.__class__ = Doubled
    assert type(remove_norm(layer)) is Doubled
    x = torch.randn(4, 3)
    with torch.no_grad():
        assert torch.equal(frozen(nn.Sequential(layer))(x), layer(x))


def test_a_frozen_model_takes_solvers_and_solves_as_before():
    torch.manual_seed(0)
    model, images = lived_in(create_model("mdeq_digits")), torch.randn(2, 1, 16, 16)
    twin = frozen(model)
    with torch.no_grad():
        for each in (model, twin):
            with eq.override(each, solver=eq.Picard(), stop=eq.Stop(rtol=0.0, max_steps=3)):
                assert each(images).solution.stats.nfe == 3


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("outputs", [8, 11])
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_of_single_pixels_are_products_of_matrices(last, outputs, bias):
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    pointwise = nn.Conv2d(5, outputs, 1, bias=bias)
    layers = nn.Sequential(pointwise, nn.ReLU(), nn.Conv2d(outputs, 3, 1, stride=2), nn.Conv2d(3, 3, 3, padding=1))
    layers = layers.to(memory_format=layout)
    x = torch.randn(2, 5, 9, 6).contiguous(memory_format=layout)
    with torch.no_grad():
        found, expected = (model(x) for model in (frozen(layers), layers))
        alone, pixels = frozen(layers)[0](x[0]), frozen(layers)[0](x)
    assert relative_error(found, expected) <= 1e-6
    assert relative_error(alone, pixels[0]) <= 1e-6  # a single image, without a batch
    assert pixels.shape == (2, outputs, 9, 6)
    assert type(layers[0]) is nn.Conv2d  # the model stays as it was
    assert [type(layer) is nn.Conv2d for layer in frozen(layers)] == [False, False, True, True]
    frozen(layers).load_state_dict(layers.state_dict())  # shapes are as before: others may have read them
