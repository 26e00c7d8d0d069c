"""Presets of MDEQ: parameters, plans, equal sizes; and what settings refuse."""

import dataclasses

import pytest
import torch

from equipoise import Broyden
from equipoise.models.mdeq import MDEQ, MDEQConfig
from equipoise.models.registry import create_model, list_models

SMALL = MDEQConfig(channels=(8, 4), head_channels=(2, 3), final_channels=6, expansion=2, groups=2)

PARAMETERS = {
    "mdeq_cifar_tiny": 158_890,
    "mdeq_cifar_large": 11_097_438,
    "mdeq_cifar_large_reg": 11_097_438,
    "mdeq_imagenet_small": 16_808_936,
    "mdeq_imagenet_small_reg": 18_613_496,
    "mdeq_imagenet_large": 67_063_624,
    "mdeq_imagenet_large_reg": 67_061_224,
    "mdeq_imagenet_xl": 90_463_280,
    "mdeq_imagenet_xl_reg": 90_460_640,
    "mdeq_cityscapes_small": 8_968_467,
    "mdeq_cityscapes_large": 55_955_859,
    "mdeq_cityscapes_xl": 79_551_755,
    "mdeq_camvid_small": 7_396_459,
    "mdeq_tiny_imagenet_small": 12_607_272,
    "mdeq_digits": 33_866,
    "mdeq_shapes": 58_836,
}
# Published, to the digits given.
PUBLISHED = {
    "mdeq_cifar_tiny": "158.9K",
    "mdeq_cifar_large": "11.10M",
    "mdeq_imagenet_small": "16.81M",
    "mdeq_imagenet_small_reg": "18.61M",
    "mdeq_imagenet_large": "67.06M",
    "mdeq_imagenet_xl": "90.46M",
    "mdeq_cityscapes_small": "8.97M",
    "mdeq_cityscapes_large": "55.96M",
    "mdeq_cityscapes_xl": "79.55M",
}
EQUAL = {
    "single_stream_cifar_tiny": "mdeq_cifar_tiny",
    "single_stream_cifar_large": "mdeq_cifar_large",
    "single_stream_digits": "mdeq_digits",
}


def on_meta(name):
    with torch.device("meta"):
        return create_model(name)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_presets(name):
    total = count(on_meta(name))
    assert total == PARAMETERS[name]
    if name in PUBLISHED:
        unit = PUBLISHED[name][-1]
        text = f"{total / 1e6:.2f}M" if unit == "M" else f"{total / 1e3:.1f}K"
        assert text == PUBLISHED[name]


def test_every_preset_is_counted():
    assert set(list_models("mdeq*")) == set(PARAMETERS)
    assert set(list_models("single_stream*")) == set(EQUAL)


@pytest.mark.parametrize("name", EQUAL)
def test_one_resolution_has_the_parameters_of_several(name):
    single, several = on_meta(name), on_meta(EQUAL[name])
    assert abs(count(single) / count(several) - 1) <= 0.005
    assert len(single.cell.channels) == 1
    assert not list(single.cell.fusion.parameters())
    assert not single.cell.mixings


@pytest.mark.parametrize(
    ("name", "forward", "backward", "dropout"),
    [
        ("mdeq_cifar_tiny", 18, 20, 0.25),
        ("mdeq_cifar_large", 18, 20, 0.3),
        ("mdeq_cifar_large_reg", 8, 7, 0.22),
        ("mdeq_imagenet_small", 26, 27, 0.0),
        ("mdeq_imagenet_small_reg", 14, 14, 0.02),
        ("mdeq_cityscapes_xl", 27, 30, 0.04),
    ],
)
def test_plans_of_presets(name, forward, backward, dropout):
    model = on_meta(name)
    plan = model.deq.plan
    assert (plan.stop.max_steps, plan.adjoint.stop.max_steps) == (forward, backward)
    assert (type(plan.solver), type(plan.adjoint.solver)) == (Broyden, Broyden)
    assert {block.dropout.p for block in model.cell.blocks} == {dropout}
    absolute = "cifar" not in name
    assert (plan.stop.rtol, plan.stop.atol) == ((0.0, 1e-3) if absolute else (1e-3, 0.0))
    # An absolute tolerance would end the adjoint solve at once: gradients are smaller.
    assert (plan.adjoint.stop.rtol, plan.adjoint.stop.atol) == (1e-3, 0.0)
    affine = model.cell.mixings[0][2].affine
    assert affine == (absolute and not name.endswith("_reg"))


def test_presets_of_a_family_share_their_layer():
    with torch.device("meta"):
        pairs = [("mdeq_cityscapes_small", "mdeq_imagenet_small"), ("mdeq_camvid_small", "mdeq_tiny_imagenet_small")]
        models = [[create_model(name) for name in pair] for pair in pairs]
    for ours, theirs in models:
        assert ours.transfer_from(theirs)


@pytest.mark.filterwarnings("ignore:the backward solve:equipoise.EquilibriumWarning")
@pytest.mark.parametrize(
    ("name", "size", "shape"),
    [
        ("mdeq_digits", (1, 8, 8), (2, 10)),
        ("single_stream_digits", (1, 9, 8), (2, 10)),
        ("mdeq_shapes", (3, 17, 16), (2, 4, 17, 16)),
    ],
)
def test_small_presets_train(name, size, shape):
    torch.manual_seed(0)
    model = create_model(name)
    output = model(torch.randn(2, *size))
    assert output.logits.shape == shape
    output.logits.square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "detection"}, "unknown task of an MDEQ 'detection'"),
        ({"inject": "al"}, "did you mean 'all'"),
        ({"channels": ()}, "at least one resolution"),
        ({"channels": (8, 7)}, "multiples of groups=2; got 7, nearest is 8"),
        ({"channels": (8, -8)}, "must be an integer of at least 1, got -8"),
        ({"head_channels": (8,)}, r"one entry per resolution, 2; got \(8,\)"),
        ({"final_channels": None}, "must be given for classification"),
        ({"downsamplings": 4}, "must be 0 to 3, got 4"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\)"),
        ({"expansion": 0}, "expansion must be a number"),
        ({"groups": 0}, "groups must be an integer"),
        ({"groups": 5, "channels": (5, 5)}, "half as many groups, 2, .* even number of groups, e.g. 4"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_settings_from_lists_and_by_name():
    assert MDEQConfig(channels=[8, 8], head_channels=[2, 2]).channels == (8, 8)
    with pytest.raises(ValueError, match="did you mean 'dropout'"):
        create_model("mdeq_digits", dropuot=0.1)
    with pytest.raises(TypeError, match=r"plan must be a Plan\(...\), got str"):
        MDEQConfig(plan="broyden")


@pytest.mark.parametrize(
    "images",
    [torch.zeros(3, 8, 8), torch.zeros(2, 1, 8, 8), torch.zeros(2, 3, 8, 8).byte(), torch.zeros(2, 3, 0, 8)],
)
def test_images_are_checked(images):
    with pytest.raises(ValueError, match=r"images must be floating point of shape \(N, 3, H, W\), got"):
        MDEQ(SMALL)(images)
