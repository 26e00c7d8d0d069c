"""Normalised layers and dropout as layers of their own, outside and inside of a solve."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from equipoise import DEQ
from equipoise.nn import (
    AttentionDropout,
    ChannelDropout1d,
    ChannelDropout2d,
    SequenceDropout,
    VariationalDropout,
    spectral_norm,
    weight_norm,
)
from tests.gradients import EXACT, TIGHT, normal, relative_error

LAYERS = {
    "linear": (lambda: nn.Linear(5, 7), (3, 5)),
    "linear_without_bias": (lambda: nn.Linear(5, 7, bias=False), (3, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 5)),
    "conv2d_grouped": (lambda: nn.Conv2d(4, 6, (3, 1), stride=2, groups=2, dilation=1), (2, 4, 5, 5)),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    make, shape = LAYERS[request.param]
    torch.manual_seed(1)
    return make().double(), normal(*shape)


def top_singular_value(weight):
    return float(torch.linalg.matrix_norm(weight.detach().flatten(1), 2))


# Weight normalisation


def test_weight_norm_preserves_the_layer(layer):
    module, x = layer
    before, weight = module(x), module.weight.detach().clone()
    assert weight_norm(module) is module
    assert relative_error(module.weight, weight) <= 1e-15
    assert relative_error(module(x), before) <= 1e-14
    names = {"weight_g", "weight_v"} | ({"bias"} if module.bias is not None else set())
    assert set(dict(module.named_parameters())) == names
    assert module.weight_g.shape == (len(weight), *[1] * (weight.dim() - 1))


def test_weight_norm_gradients_equal_those_of_torch(layer):
    module, x = layer
    twin = parametrizations.weight_norm(copy.deepcopy(module))
    weight_norm(module)
    with torch.no_grad():
        module.weight_g.mul_(1.3)
        twin.parametrizations.weight.original0.mul_(1.3)
    a = normal(*module(x).shape, seed=3)
    got = torch.autograd.grad(module(x), (module.weight_g, module.weight_v), a)
    originals = twin.parametrizations.weight
    want = torch.autograd.grad(twin(x), (originals.original0, originals.original1), a)
    for mine, true in zip(got, want, strict=True):
        assert mine.shape == true.shape
        assert relative_error(mine, true) <= 1e-13


def test_weight_norm_does_not_depend_on_the_length_of_v(layer):
    module, x = layer
    weight_norm(module)
    before = module(x)
    with torch.no_grad():
        module.weight_v.mul_(7)
    assert relative_error(module(x), before) <= 1e-14
    gradient = torch.autograd.grad(module(x).square().sum(), module.weight_v)[0]
    along = (gradient * module.weight_v.detach()).flatten(1).sum(dim=1)  # the gradient is tangent to the sphere
    assert float(along.abs().max()) <= 1e-12 * float(gradient.norm() * module.weight_v.detach().norm())


@pytest.mark.parametrize("normalise", [weight_norm, lambda m: spectral_norm(m, bound=1e3)], ids=["weight", "spectral"])
def test_the_weight_can_be_set(layer, normalise):
    module, _ = layer
    normalise(module)
    wanted = normal(*module.weight.shape, seed=5)
    module.weight = wanted
    assert relative_error(module.weight, wanted) <= 1e-14
    assert "weight" not in dict(module.named_parameters())
    assert module.weight.requires_grad


@pytest.mark.parametrize("normalise", [weight_norm, lambda m: spectral_norm(m, bound=1e3)], ids=["weight", "spectral"])
def test_reset_parameters_initialises_the_effective_weight_as_torch_does(layer, normalise):
    module, _ = layer
    twin = copy.deepcopy(module)
    normalise(module)
    torch.manual_seed(11)
    module.reset_parameters()
    torch.manual_seed(11)
    twin.reset_parameters()
    assert relative_error(module.weight, twin.weight) <= 1e-14
    if twin.bias is not None:
        assert relative_error(module.bias, twin.bias) <= 1e-14


@pytest.mark.parametrize("second", [weight_norm, spectral_norm])
@pytest.mark.parametrize("first", [weight_norm, spectral_norm])
def test_normalising_twice_is_refused(first, second):
    module = first(nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"Linear is normalised already"):
        second(module)
    assert module(torch.zeros(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("normalise", [weight_norm, spectral_norm])
@pytest.mark.parametrize(
    "make", [lambda: nn.ConvTranspose1d(2, 2, 3), lambda: nn.LayerNorm(3), lambda: nn.Sequential(nn.Linear(2, 2))]
)
def test_other_modules_are_refused(normalise, make):
    module = make()
    with pytest.raises(TypeError, match=rf"takes an nn.Linear, nn.Conv1d, nn.Conv2d; got {type(module).__name__}"):
        normalise(module)


def test_dtype_and_device_moves_take_the_parameters_along():
    for module in (weight_norm(nn.Linear(3, 4)), spectral_norm(nn.Linear(3, 4))):
        before = module.weight.detach().clone()
        module.double()
        assert module.weight.dtype == torch.float64
        assert relative_error(module.weight, before) <= 1e-6
        assert all(t.dtype == torch.float64 for t in module.state_dict().values())


# Spectral normalisation


def with_spectrum(module, values):
    """Give the layer a weight with known singular values."""
    weight = module.weight
    rows, columns = weight.flatten(1).shape
    left = torch.linalg.qr(normal(rows, len(values), seed=1))[0]
    right = torch.linalg.qr(normal(columns, len(values), seed=2))[0]
    with torch.no_grad():
        weight.copy_((left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.mT).view(weight.shape))
    return module


def test_spectral_norm_bounds_the_largest_singular_value(layer):
    module, _ = layer
    spectral_norm(with_spectrum(module, [3.0, 2.0, 1.0]), bound=0.9)
    assert top_singular_value(module.weight) == pytest.approx(0.9, rel=1e-10)
    assert relative_error(module.weight, 0.3 * module.weight_v) <= 1e-10


def test_the_estimate_is_the_exact_norm_of_a_random_weight(layer):
    module, _ = layer
    sigma = top_singular_value(module.weight)
    spectral_norm(module, bound=sigma / 2, iterations=5)
    for _ in range(40):  # each use in training mode improves the estimate
        weight = module.weight
    assert float((weight / module.weight_v).detach().flatten()[0]) == pytest.approx(0.5, rel=1e-8)
    assert top_singular_value(weight) == pytest.approx(sigma / 2, rel=1e-8)


def test_a_weight_inside_the_bound_is_untouched(layer):
    module, x = layer
    before, weight = module(x), module.weight.detach().clone()
    spectral_norm(module, bound=1.5 * top_singular_value(weight))
    assert torch.equal(module.weight, weight)
    assert torch.equal(module(x), before)
    a = normal(*before.shape, seed=3)
    got = torch.autograd.grad(module(x), module.weight_v, a)
    plain = weight.clone().requires_grad_()
    module.bound = 1e9
    want = torch.autograd.grad(torch.func.functional_call(module, {"weight_v": plain}, (x,)), plain, a)
    assert relative_error(got, want) <= 1e-15


def test_spectral_norm_gradients_equal_those_of_the_exact_norm(layer):
    module, x = layer
    spectral_norm(with_spectrum(module, [3.0, 1.0, 0.5]), bound=0.9)
    a = normal(*module(x).shape, seed=3)
    got = torch.autograd.grad(module(x), module.weight_v, a)
    v = module.weight_v.detach().clone().requires_grad_()
    weight = v * (0.9 / torch.linalg.matrix_norm(v.flatten(1), 2))
    if isinstance(module, nn.Linear):
        out = nn.functional.linear(x, weight, module.bias)
    else:
        out = module._conv_forward(x, weight, module.bias)
    assert relative_error(got, torch.autograd.grad(out, v, a)) <= 1e-10


def test_setting_a_weight_beyond_the_bound_scales_it_down():
    module = spectral_norm(nn.Linear(4, 4).double(), bound=0.5)
    wanted = torch.diag(torch.tensor([2.0, 1.0, 0.5, 0.1], dtype=torch.float64))
    module.weight = wanted
    assert relative_error(module.weight, wanted / 4) <= 1e-10


def test_power_iterations_happen_in_training_mode_only():
    module = spectral_norm(nn.Linear(6, 6).double(), bound=0.1)
    with torch.no_grad():
        module.weight_v.copy_(normal(6, 6, seed=4))
    module.eval()
    before = module.vectors.left.clone()
    assert torch.equal(module.weight, module.weight)
    assert torch.equal(module.vectors.left, before)
    module.train()
    module.weight  # noqa: B018 - reading it is the point
    assert not torch.equal(module.vectors.left, before)


def test_one_power_iteration_per_solve():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = spectral_norm(nn.Linear(4, 4).double(), bound=0.5)
            with torch.no_grad():
                self.linear.weight_v.copy_(normal(4, 4, seed=4))

        def forward(self, z, x):
            return torch.tanh(self.linear(z) + x)

    cell = Cell()
    left, right = cell.linear.vectors.improved(cell.linear.weight_v, 1)
    solution = DEQ(cell, adjoint=EXACT, stop=TIGHT)(normal(3, 4))
    solution.value.sum().backward()
    assert solution.stats.nfe > 5
    assert relative_error(cell.linear.vectors.left, left) <= 1e-15
    assert relative_error(cell.linear.vectors.right, right) <= 1e-15


def test_a_bounded_cell_contracts():
    """With ‖W‖₂ ≤ 0.9 and tanh every system converges, whatever the weights."""
    torch.manual_seed(0)
    linear = spectral_norm(nn.Linear(16, 16).double(), bound=0.9, iterations=3)
    with torch.no_grad():
        linear.weight_v.mul_(20)

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, z, x):
            return torch.tanh(self.linear(z) + x)

    for _ in range(30):
        linear.weight  # noqa: B018 - lets the estimate settle
    assert top_singular_value(linear.weight) == pytest.approx(0.9, rel=1e-3)
    solution = DEQ(Cell(), solver="picard", stop=TIGHT)(normal(5, 16))
    assert bool(solution.stats.ok.all())


@pytest.mark.parametrize("arguments", [{"bound": 0.0}, {"bound": -1.0}, {"iterations": 0}, {"iterations": 1.5}])
def test_wrong_settings_of_spectral_norm_are_refused(arguments):
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="spectral_norm"):
        spectral_norm(module, **arguments)
    assert type(module) is nn.Linear
    assert "weight" in dict(module.named_parameters())


def test_a_zero_weight_stays_zero():
    module = nn.Linear(3, 3, bias=False).double()
    nn.init.zeros_(module.weight)
    spectral_norm(module, bound=0.5)
    assert torch.equal(module.weight, torch.zeros(3, 3, dtype=torch.float64))
    gradient = torch.autograd.grad(module(normal(2, 3)).sum(), module.weight_v)[0]
    assert relative_error(gradient, normal(2, 3).sum(dim=0).expand(3, 3)) <= 1e-14


def test_a_weight_that_was_zero_is_bounded_when_it_grows():
    """Zero has no leading vectors; the estimate must come alive again after the first update."""
    module = nn.Linear(3, 3, bias=False).double()
    nn.init.zeros_(module.weight)
    spectral_norm(module, bound=0.5, iterations=5)
    with torch.no_grad():
        module.weight_v.copy_(torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)))
    for _ in range(20):
        weight = module.weight
    assert top_singular_value(weight) == pytest.approx(0.5, rel=1e-8)


@pytest.mark.parametrize("rows", [[[3.0, -3.0], [-3.0, 3.0]], [[1.0, -2.0, 1.0]], [[5.0, -5.0], [0.1, 0.1]]], ids=str)
def test_leading_vectors_orthogonal_to_a_constant_are_found(rows):
    """Difference kernels: a power iteration that starts from a constant vector never sees them."""
    weight = torch.tensor(rows, dtype=torch.float64)
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False).double()
    with torch.no_grad():
        module.weight.copy_(weight)
    spectral_norm(module, bound=0.5)
    assert top_singular_value(module.weight) == pytest.approx(0.5, rel=1e-8)


# Dropout

SHAPES = [
    (VariationalDropout(0.5), (64, 50), (64, 50)),
    (SequenceDropout(0.5), (64, 9, 50), (64, 1, 50)),
    (AttentionDropout(0.5), (16, 4, 9, 11), (16, 4, 9, 11)),
    (ChannelDropout1d(0.5), (64, 50, 9), (64, 50, 1)),
    (ChannelDropout2d(0.5), (64, 50, 5, 7), (64, 50, 1, 1)),
    (VariationalDropout(0.5, shared=-1), (64, 50, 5), (64, 50, 1)),
]


@pytest.mark.parametrize(("drop", "shape", "mask_shape"), SHAPES, ids=lambda item: getattr(type(item), "__name__", ""))
def test_mask_shapes(drop, shape, mask_shape):
    x = torch.ones(shape)
    assert drop.begin_solve(x).shape == mask_shape
    out = drop(x)
    assert out.unique().tolist() == [0.0, 2.0]
    kept = (out != 0).double()
    for axis, (size, shared) in enumerate(zip(shape, mask_shape, strict=True)):
        if size != shared:  # one draw along this axis
            assert torch.equal(kept.amax(axis), kept.amin(axis))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale(p):
    torch.manual_seed(0)
    out = VariationalDropout(p)(torch.ones(200, 500, dtype=torch.float64))
    n = out.numel()
    dropped = float((out == 0).double().mean())
    assert abs(dropped - p) <= 4 * (p * (1 - p) / n) ** 0.5
    assert out.max() == pytest.approx(1 / (1 - p), rel=1e-14)
    assert float(out.mean()) == pytest.approx(1, abs=4 * (p / (1 - p) / n) ** 0.5)


def test_one_seed_is_one_mask_in_every_precision():
    masks = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.manual_seed(3)
        masks.append(VariationalDropout(0.4)(torch.ones(20, 30, dtype=dtype)))
    assert [mask.dtype for mask in masks] == [torch.float32, torch.float64, torch.bfloat16]
    assert torch.equal(masks[0] != 0, masks[1] != 0)
    assert torch.equal(masks[0] != 0, masks[2] != 0)


def test_dropout_leaves_the_dtype_alone_under_autocast():
    x = torch.ones(4, 6, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert VariationalDropout(0.5)(x).dtype == torch.bfloat16
        assert VariationalDropout(0.5)(x.float()).dtype == torch.float32


def test_off_in_eval_mode_and_at_rate_zero():
    x = normal(3, 4)
    assert VariationalDropout(0.5).eval()(x) is x
    assert VariationalDropout(0.0)(x) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, "half", float("nan")])
def test_a_wrong_rate_is_refused(p):
    with pytest.raises(ValueError, match=r"VariationalDropout: p must be a number in \[0, 1\)"):
        VariationalDropout(p)


def test_a_shared_axis_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"shared axis 2 does not exist in an input of shape \(3, 4\)"):
        ChannelDropout1d(0.5)(torch.ones(3, 4))


def test_repr_tells_the_settings():
    assert repr(SequenceDropout(0.25)) == "SequenceDropout(p=0.25, shared=(1,))"
