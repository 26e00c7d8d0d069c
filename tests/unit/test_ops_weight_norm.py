"""`normalised_rows`, kernel and twin, against float64; and the layers that take it."""

import functools

import pytest
import torch
from torch import nn

from equipoise._scope import SolveScope
from equipoise.models import deq_trellisnet
from equipoise.models.deq_trellisnet import CausalConv
from equipoise.nn import norm
from equipoise.ops import normalised_rows
from equipoise.ops.weight_norm import takes_kernel
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter

DEVICE = kernel_device()
pytestmark = quiet_interpreter
HALF = (torch.bfloat16, torch.float16)

# Rows and columns; the kernel keeps 16 columns, and takes rows together up to 8 elements.
SHAPES = [(5, 3), (3, 16), (4, 17), (2, 50), (1, 1), (7, 1), (9, 5)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    from equipoise.ops.weight_norm import triton as kernels

    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "SEVERAL", 8)


def drawn(shape, dtype=torch.float32, scale=1.0):
    v, g = scale * torch.randn(shape, dtype=torch.float64), 3 * torch.randn(shape[0], 1, dtype=torch.float64)
    return v.to(DEVICE, dtype), g.to(DEVICE, dtype)


def exact(v, g, floor=0.0):
    v, g = v.detach().double().cpu(), g.detach().double().cpu()
    return g * v / v.square().sum(1, keepdim=True).sqrt().clamp_min(floor)


def assert_close(found, expected, tolerance):
    torch.testing.assert_close(found.detach().double().cpu(), expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(backend, shape):
    v, g = drawn(shape)
    got = normalised_rows(v, g, backend=backend)
    assert (got.shape, got.dtype) == (v.shape, v.dtype)
    assert_close(got, exact(v, g), 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [torch.float32, *HALF])
@pytest.mark.parametrize("wanted", [torch.float32, *HALF])
def test_dtypes(backend, given, wanted):
    """Rounded once by the kernel; a few times, in the dtype of v, by the twin."""
    v, g = drawn((4, 21), given)
    got = normalised_rows(v, g, dtype=wanted, backend=backend)
    assert got.dtype == wanted
    eps = torch.finfo(wanted).eps if backend == "triton" else max(torch.finfo(dtype).eps for dtype in (given, wanted))
    assert_close(got, exact(v, g), 3 * eps)


def test_what_kernels_do_not_take_is_left_to_the_twin():
    v, g = drawn((4, 5), torch.float64)
    torch.testing.assert_close(normalised_rows(v, g).cpu(), exact(v, g), rtol=1e-14, atol=0)
    v, g = drawn((4, 5))
    assert normalised_rows(v, g, dtype=torch.float64, backend="triton").dtype == torch.float64
    assert normalised_rows(v[:, :0], g).shape == (4, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_small_and_large_values(backend, scale):
    v, g = drawn((5, 19), scale=scale)
    assert_close(normalised_rows(v, g, backend=backend), exact(v, g), 1e-6)


def test_rows_that_have_no_norm_are_as_in_the_twin():
    """Zeros, squares that vanish or overflow, infinities and NaN, with a floor and without."""
    v, g = drawn((7, 37))
    for row, value in enumerate((0.0, 1e-30, 1e30, torch.inf, torch.nan, 1e-14)):
        v[row] = value
    for floor in (0.0, 1e-12):
        twin, kernel = (normalised_rows(v, g, floor=floor, backend=backend) for backend in BACKENDS)
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=0, equal_nan=True)
        assert twin[0].isnan().all() == (floor == 0)
        assert kernel[4].isnan().all()
    assert_close(kernel[5:6], exact(v[5:6], g[5:6], 1e-12), 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_larger_matrix(backend):
    v, g = drawn((6, 30))
    assert_close(normalised_rows(v[1:4, 3:21], g[1:4], backend=backend), exact(v[1:4, 3:21], g[1:4]), 1e-6)


def test_gradients_are_those_of_the_formula():
    v, g = (tensor.requires_grad_() for tensor in drawn((4, 5), torch.float64))
    assert torch.autograd.gradcheck(lambda v, g: normalised_rows(v, g, floor=1e-12), (v, g))
    v, g = drawn((4, 5))
    v.requires_grad_()
    assert normalised_rows(v, g, backend="triton").requires_grad
    with torch.no_grad():
        assert not normalised_rows(v, g, backend="triton").requires_grad
    plain = torch.func.grad(lambda v: (g * v / v.norm(dim=1, keepdim=True)).pow(3).sum())(v.detach())
    found = torch.func.grad(lambda v: normalised_rows(v, g).pow(3).sum())(v.detach())
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match=r"g \(rows, 1\), got \(3, 4\) and \(3,\)"):
        normalised_rows(torch.zeros(3, 4), torch.zeros(3))
    with pytest.raises(ValueError, match=r"got \(3, 4, 1\)"):
        normalised_rows(torch.zeros(3, 4, 1), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        normalised_rows(torch.zeros(3, 4), torch.zeros(3, 1), backend="cuda")


# Layers


@pytest.fixture
def by_kernels(monkeypatch):
    """Layers take the kernel wherever they would on a device; returns the dtypes that they asked for."""
    asked = []

    def noted(v, g, *, floor=0.0, dtype=None):
        if takes_kernel(v, g, dtype, "triton"):
            asked.append(dtype)
        return normalised_rows(v, g, floor=floor, dtype=dtype, backend="triton")

    monkeypatch.setattr(norm, "takes_kernel", functools.partial(takes_kernel, backend="triton"))
    for module in (norm, deq_trellisnet):
        monkeypatch.setattr(module, "normalised_rows", noted)
    return asked


LAYERS = {
    "linear": (lambda: norm.weight_norm(nn.Linear(20, 6)), (3, 20)),
    "convolution": (lambda: norm.weight_norm(nn.Conv2d(3, 4, 3)), (2, 3, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("narrow", [False, True])
def test_a_layer_in_a_solve(name, narrow, by_kernels):
    """Its weight is made once, in the dtype of products; with gradients it is what it was."""
    make, shape = LAYERS[name]
    layer, x = make().to(DEVICE), torch.randn(shape, device=DEVICE)
    with torch.no_grad():
        layer.weight_v.mul_(2)
    expected = layer(x)
    assert expected.requires_grad
    assert layer.weight.dtype == torch.float32
    assert not by_kernels
    dtype = torch.bfloat16 if narrow else torch.float32
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=narrow), SolveScope():
        found = [layer(x) for _ in range(2)]
        assert layer.weight.dtype == dtype
    assert by_kernels == [dtype]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].float(), expected, rtol=0, atol=3e-2 if narrow else 1e-6)


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_weight_keeps_its_layout(kernel, by_kernels):
    layer = norm.weight_norm(nn.Conv2d(3, 4, kernel)).to(DEVICE, memory_format=torch.channels_last)
    with torch.no_grad():
        layer.weight_g.uniform_(1, 2)
        weight = layer.weight
    assert by_kernels == [torch.float32]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(weight, layer.weight, rtol=1e-6, atol=1e-6)  # with gradients, by the formula


def test_a_weight_in_any_other_order_is_left_to_the_formula(by_kernels):
    layer = norm.weight_norm(nn.Linear(20, 6)).to(DEVICE)
    layer.weight_v = nn.Parameter(layer.weight_v.detach().mT.contiguous().mT)
    with torch.no_grad():
        weight = layer.weight
    assert not by_kernels
    torch.testing.assert_close(weight, layer.weight, rtol=1e-6, atol=1e-6)


def test_a_weight_used_where_autocast_is_off_is_not_rounded(by_kernels):
    layer, x = norm.weight_norm(nn.Linear(20, 6)).to(DEVICE), torch.randn(3, 20, device=DEVICE)
    expected = layer(x)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16), SolveScope():
        assert layer(x).dtype == torch.bfloat16
        with torch.autocast(DEVICE, enabled=False):
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("narrow", [False, True])
def test_a_causal_convolution_in_a_solve(narrow, by_kernels):
    layer, dtype = CausalConv(6, 10, 2).to(DEVICE), torch.bfloat16 if narrow else torch.float32
    expected = layer.weight
    assert not by_kernels
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=narrow), SolveScope():
        weight = layer.weight
    assert by_kernels == [dtype]
    assert weight.dtype == dtype
    torch.testing.assert_close(weight.float(), expected, rtol=8e-3 if narrow else 1e-6, atol=0)


def test_a_row_that_is_dropped_as_a_whole_is_zero(by_kernels):
    layer = CausalConv(6, 10, 2).to(DEVICE)
    with torch.no_grad():
        layer.weight_v[3] = 0
        assert not layer.weight[3].any()
        assert layer.weight.isfinite().all()
