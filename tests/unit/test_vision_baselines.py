"""Explicit image models: sizes, shapes, gradients; packages that may be missing."""

import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.models.outputs import VisionOutput
from equipoise.models.registry import create_model, list_models
from equipoise.models.vision_baselines import (
    NeuralODEConfig,
    ResNet,
    ResNetConfig,
    TimmSegmenter,
    UNet,
    UNetConfig,
)
from tests.gradients import normal, relative_error


def count(model):
    return sum(p.numel() for p in model.parameters())


def every_parameter_has_a_gradient(model, images):
    output = model(images)
    output.logits.square().mean().backward()
    return all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


# Residual networks


@pytest.mark.parametrize(("name", "parameters"), [("resnet_cifar_tiny", 176_402), ("resnet_cifar_large", 11_173_962)])
def test_parameters_of_residual_networks(name, parameters):
    """11,173,962 is the known size of ResNet-18 with a 3×3 stem and 10 classes."""
    with torch.device("meta"):
        assert count(create_model(name)) == parameters


def test_a_residual_network_is_that_of_the_formulas():
    model = ResNet(ResNetConfig(num_classes=3, width=4, blocks=(1, 2))).double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.uniform_(0.5, 2)
                module.running_mean.normal_()
    images, p = normal(2, 3, 7, 6), model.state_dict()

    def normed(x, conv, norm, stride=1):
        weight = p[f"{conv}.weight"]
        y = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        scale = p[f"{norm}.weight"] / (p[f"{norm}.running_var"] + 1e-5).sqrt()
        return (y - p[f"{norm}.running_mean"][:, None, None]) * scale[:, None, None] + p[f"{norm}.bias"][:, None, None]

    x, maps = normed(images, "stem.0", "stem.1").clamp(min=0), []
    for stage, block, stride in ((0, 0, 1), (1, 0, 2), (1, 1, 1)):
        name = f"stages.{stage}.{block}"
        y = normed(x, f"{name}.body.0", f"{name}.body.1", stride).clamp(min=0)
        y = normed(y, f"{name}.body.3", f"{name}.body.4")
        side = f"{name}.shortcut"
        x = (y + (normed(x, f"{side}.0", f"{side}.1", stride) if stride == 2 else x)).clamp(min=0)
        maps.append(x)
    want = x.mean(dim=(2, 3)) @ p["classifier.weight"].T + p["classifier.bias"]
    output = model(images)
    assert relative_error(output.logits, want) <= 1e-13
    assert relative_error(output.states[0], maps[0]) <= 1e-13
    assert output.solution is None


def test_residual_networks_train():
    model = ResNet(ResNetConfig(width=4))
    assert every_parameter_has_a_gradient(model, torch.randn(4, 3, 16, 16))


# U-Net


@pytest.mark.parametrize("size", [(16, 16), (13, 10), (5, 7)], ids=str)
def test_unet_scores_have_the_size_of_the_images(size):
    model = UNet(UNetConfig(num_classes=4, in_channels=2, width=4, levels=3))
    output = model(torch.randn(2, 2, *size))
    assert isinstance(output, VisionOutput)
    assert output.logits.shape == (2, 4, *size)
    sizes = [tuple(state.shape[2:]) for state in output.states]
    half = tuple((s + 1) // 2 for s in size)
    assert sizes == [size, half, tuple((s + 1) // 2 for s in half)]


def test_unet_sees_fine_and_coarse():
    """Every parameter matters, but for biases that BatchNorm takes away; a far pixel reaches a score."""
    model = UNet(UNetConfig(num_classes=2, in_channels=1, width=4, levels=4)).double()
    images = normal(2, 1, 24, 24).requires_grad_()
    logits = model(images).logits
    grads = torch.autograd.grad(logits.square().mean(), list(model.parameters()), retain_graph=True)
    for name, grad in zip(dict(model.named_parameters()), grads, strict=True):
        assert name.startswith("narrow") or grad.abs().max() > 1e-12, name
    model.eval()
    reach = torch.autograd.grad(model(images).logits[0, 0, 0, 0], images)[0][0, 0]
    assert reach[0, 0] != 0
    assert reach[20, 20] != 0


def test_parameters_of_unet():
    with torch.device("meta"):
        assert count(create_model("unet_small")) == 7_241_131


# Neural ODEs


@pytest.fixture
def diffeq(monkeypatch):
    """torchdiffeq with nothing but classical Runge–Kutta steps; gradients by ordinary backpropagation."""
    calls = []

    def odeint_adjoint(f, y, t, **options):
        calls.append(options)
        h = (t[1] - t[0]) / 4
        start = y
        for k in range(4):
            now = t[0] + k * h
            a = f(now, y)
            b = f(now + h / 2, y + h / 2 * a)
            c = f(now + h / 2, y + h / 2 * b)
            y = y + h / 6 * (a + 2 * b + 2 * c + f(now + h, y + h * c))
        return torch.stack([start, y])

    module = types.ModuleType("torchdiffeq")
    module.odeint_adjoint = odeint_adjoint
    module.calls = calls
    monkeypatch.setitem(sys.modules, "torchdiffeq", module)
    return module


@pytest.mark.parametrize(
    ("name", "parameters", "channels"), [("neural_ode_cifar", 171_352, 3), ("augmented_neural_ode_cifar", 170_108, 13)]
)
def test_neural_odes(diffeq, name, parameters, channels):
    model = create_model(name)
    assert count(model) == parameters
    images = torch.randn(2, 3, 32, 32)
    assert every_parameter_has_a_gradient(model, images)
    assert model.field.nfe == 16
    assert diffeq.calls == [{"rtol": 1e-3, "atol": 1e-3, "method": "dopri5"}]
    output = model(images)
    assert output.logits.shape == (2, 10)
    assert output.states[0].shape == (2, channels, 32, 32)


def test_the_vector_field_knows_the_time(diffeq):
    model = create_model("neural_ode_cifar", filters=3, image_size=4).double()
    x = normal(2, 3, 4, 4)
    p = model.field.state_dict()

    def field(t):
        y = x
        for k, padding in enumerate((0, 1, 0)):
            y = y.clamp(min=0) if k else y
            y = torch.cat([y, torch.full((2, 1, 4, 4), t, dtype=torch.float64)], dim=1)
            y = F.conv2d(y, p[f"convs.{k}.weight"], p[f"convs.{k}.bias"], padding=padding)
        return y

    for t in (0.0, 0.7):
        assert relative_error(model.field(torch.tensor(t, dtype=torch.float64), x), field(t)) <= 1e-13
    assert relative_error(field(0.0), field(0.7)) > 1e-3


def test_a_neural_ode_with_the_package_itself():
    pytest.importorskip("torchdiffeq")
    model = create_model("augmented_neural_ode_cifar", filters=4, image_size=6, augmented=2, rtol=1e-7, atol=1e-7)
    model.double()
    images = normal(2, 3, 6, 6)
    assert every_parameter_has_a_gradient(model, images)
    y = F.pad(images, (0, 0, 0, 0, 0, 2))
    steps = 200
    for k in range(steps):  # the midpoint rule
        t, h = torch.tensor(k / steps, dtype=torch.float64), 1 / steps
        y = y + h * model.field(t + h / 2, y + h / 2 * model.field(t, y))
    assert relative_error(model(images).states[0], y) <= 1e-4


def test_an_ode_takes_images_of_one_size(diffeq):
    model = create_model("neural_ode_cifar")
    with pytest.raises(ValueError, match=r"images must be 32 × 32 \(image_size\), got \(28, 28\)"):
        model(torch.zeros(1, 3, 28, 28))


# Networks of timm


def test_timm_classifiers(monkeypatch):
    class Network(nn.Module):
        def __init__(self, options):
            super().__init__()
            self.options = options
            self.conv, self.head = nn.Conv2d(options["in_chans"], 4, 3), nn.Linear(4, options["num_classes"])

        def forward_features(self, x):
            return self.conv(x)

        def forward_head(self, x):
            return self.head(x.mean(dim=(2, 3)))

    module = types.ModuleType("timm")
    module.create_model = lambda name, **options: Network({"name": name, **options})
    monkeypatch.setitem(sys.modules, "timm", module)
    model = create_model("timm_hrnet_w18_small", num_classes=7, in_channels=1, pretrained=False)
    assert model.network.options == {"name": "hrnet_w18_small", "num_classes": 7, "in_chans": 1, "pretrained": False}
    output = model(torch.randn(2, 1, 9, 9))
    assert output.logits.shape == (2, 7)
    assert output.states[0].shape == (2, 4, 7, 7)
    assert create_model("timm_classifier", architecture="vgg11").network.options["name"] == "vgg11"
    assert create_model("timm_resnet50").network.options["name"] == "resnet50"


def test_real_timm_classifiers():
    pytest.importorskip("timm")
    model = create_model("timm_resnet50").eval()
    assert count(model) == 25_557_032
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(model(images).logits, model.network(images))


class Maps(nn.Module):
    """Maps of a half, a quarter and an eighth of the size; as in HRNet, sizes must be such that they can be added."""

    class Info:
        def __init__(self, indices):
            self.indices = indices

        def channels(self):
            return [(3, 4, 5)[k] for k in self.indices]

        def reduction(self, index):
            return (2, 4, 8)[index]

    def __init__(self, out_indices=(0, 1, 2), **options):
        super().__init__()
        self.options = {"out_indices": out_indices, **options}
        self.feature_info = self.Info(out_indices)
        widths = [options["in_chans"], 3, 4, 5]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(widths))
        self.narrow = nn.Conv2d(5, 3, 1, bias=False)

    def forward(self, x):
        maps = []
        for layer in self.convs:
            x = layer(x).tanh()
            maps.append(x)
        maps[0] = maps[0] + F.interpolate(self.narrow(x), scale_factor=4.0, mode="nearest")
        return [maps[k] for k in self.feature_info.indices]


@pytest.fixture
def timm_maps(monkeypatch):
    """timm with one network, by any name, that gives maps."""
    module = types.ModuleType("timm")
    module.create_model = lambda name, **options: Maps(name=name, **options)
    monkeypatch.setitem(sys.modules, "timm", module)


@pytest.mark.parametrize("size", [(16, 24), (45, 61), (5, 7)], ids=str)
def test_a_segmenter_of_timm_is_that_of_the_formulas(timm_maps, size):
    model = TimmSegmenter("any", num_classes=4, in_channels=2, final_channels=6).double()
    images = normal(2, 2, *size)
    for module in model.head.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2)
            module.running_mean.normal_()
    p = model.eval().head.state_dict()
    height, width = (side + -side % 8 for side in size)
    rows, columns = torch.arange(height).clamp(max=size[0] - 1), torch.arange(width).clamp(max=size[1] - 1)
    states = model.network(images[:, :, rows][:, :, :, columns])

    def enlarged(x, size):
        return F.interpolate(x, size, mode="bilinear", align_corners=True)

    y = torch.cat([enlarged(state, (height // 2, width // 2)) for state in states], dim=1)
    y = F.conv2d(y, p["final.0.weight"], p["final.0.bias"])
    y = F.batch_norm(y, p["final.1.running_mean"], p["final.1.running_var"], p["final.1.weight"], p["final.1.bias"])
    y = F.conv2d(y.clamp(min=0), p["classifier.weight"], p["classifier.bias"])
    want = enlarged(y, (height, width))[:, :, : size[0], : size[1]]
    output = model(images)
    assert isinstance(output, VisionOutput)
    assert output.logits.shape == (2, 4, *size)
    assert relative_error(output.logits, want) <= 1e-13
    assert [tuple(state.shape) for state in output.states] == [
        (2, channels, height // by, width // by) for channels, by in ((3, 2), (4, 4), (5, 8))
    ]


def test_segmenters_of_timm_train(timm_maps):
    """Also when maps are left out that the network adds to those which are read."""
    for options in ({}, {"out_indices": (0,)}):
        model = TimmSegmenter("any", in_channels=1, **options).double()
        assert model.head.final[0].out_channels == (3 if options else 12)
        images = normal(2, 1, 13, 10)
        model(images).logits.square().mean().backward()
        for name, parameter in model.named_parameters():
            if name == "head.final.0.bias":  # BatchNorm takes it away
                continue
            assert parameter.grad.abs().max() > 1e-12, name


def test_presets_of_segmenters_of_timm(timm_maps):
    known = {"in_chans": 1, "features_only": True}
    model = create_model("timm_resnet50_masks", num_classes=7, in_channels=1, out_indices=(0, 1), pretrained=False)
    assert model.network.options == {"name": "resnet50", "out_indices": (0, 1), "pretrained": False, **known}
    assert model.head.final[0].out_channels == 512
    model = create_model("timm_hrnet_w18_small_masks", num_classes=7, in_channels=1, out_indices=(0, 1))
    assert model.network.options == {"name": "hrnet_w18_small", "out_indices": (0, 1), "feature_location": "", **known}
    assert model.head.final[0].out_channels == 7
    assert model(torch.randn(2, 1, 9, 9)).logits.shape == (2, 7, 9, 9)


@pytest.mark.parametrize(
    ("name", "parameters", "options"),
    # ResNets of timm begin with blocks that give nothing, so their first gradients are zero.
    [("timm_resnet50_masks", 25_481_291, {"zero_init_last": False}), ("timm_hrnet_w18_small_masks", 1_538_891, {})],
)
def test_real_segmenters_of_timm(name, parameters, options):
    pytest.importorskip("timm")
    model = create_model(name, **options)
    assert count(model) == parameters
    output = model(torch.randn(2, 3, 45, 61))
    assert output.logits.shape == (2, 11, 45, 61)
    assert [tuple(state.shape[2:]) for state in output.states] == [(16, 16), (8, 8), (4, 4), (2, 2)]
    output.logits.square().mean().backward()
    for key, parameter in model.named_parameters():
        if key != "head.final.0.bias":
            assert parameter.grad is not None, key
            assert parameter.grad.abs().max() > 0, key


# What is refused


@pytest.mark.parametrize(
    ("name", "package"),
    [("neural_ode_cifar", "torchdiffeq"), ("timm_resnet50", "timm"), ("timm_hrnet_w18_small_masks", "timm")],
)
def test_a_missing_package_is_named(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"needs {package}, which is not installed: pip install {package}"):
        create_model(name)


@pytest.mark.parametrize("name", ["resnet_cifar_tiny", "unet_small"])
def test_images_and_settings_are_checked(name):
    model = create_model(name, in_channels=2, width=4)
    with pytest.raises(ValueError, match=r"images must be \(N, 2, H, W\), got shape \(1, 3, 8, 8\)"):
        model(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match="did you mean 'width'"):
        create_model(name, widht=4)
    with pytest.raises(ValueError, match="width must be an integer of at least 1"):
        create_model(name, width=0)


def test_bad_settings():
    with pytest.raises(ValueError, match="at least one stage"):
        ResNetConfig(blocks=())
    with pytest.raises(ValueError, match="rtol must be a number"):
        NeuralODEConfig(rtol=0.0)
    assert {"resnet_cifar_tiny", "unet_small", "timm_classifier"} <= set(list_models())


def test_bad_settings_of_segmenters_of_timm(timm_maps):
    for field in ("num_classes", "in_channels", "final_channels"):
        with pytest.raises(ValueError, match=f"TimmSegmenter: {field} must be an integer of at least 1, got 0"):
            TimmSegmenter("any", **{field: 0})
    with pytest.raises(ValueError, match=r"images must be \(N, 3, H, W\), got shape \(1, 2, 8, 8\)"):
        TimmSegmenter("any")(torch.zeros(1, 2, 8, 8))
    with pytest.raises(ValueError, match="unknown model 'timm_resnet50_mask'; did you mean 'timm_resnet50_masks'"):
        create_model("timm_resnet50_mask")
