"""`gather_taps` and `drop_taps`, kernels and twins: values and derivatives against indexing one entry at a time."""

import pytest
import torch

from equipoise.ops import drop_taps, gather_taps
from equipoise.ops.taps import product_dtype
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter

DEVICE = kernel_device()
pytestmark = quiet_interpreter

# batch, time, features, taps, dilation; blocks of the kernel are 4 steps by 4 features
SIZES = [(2, 6, 5, 2, 1), (1, 9, 3, 3, 2), (1, 3, 6, 2, 4), (1, 5, 4, 1, 1), (1, 1, 1, 3, 1)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    from equipoise.ops.taps import triton as kernels

    for name in ("STEPS", "WIDTH", "BLOCK"):
        monkeypatch.setattr(kernels, name, 4)


def arguments(batch, time, features, taps, dilation, masked=True, dtype=torch.float32):
    shapes = [(batch, time, features), (batch, (taps - 1) * dilation, features), (batch, 1, features)]
    tensors = [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for shape in shapes]
    return tensors if masked else [*tensors[:2], None]


def by_index(h, before, mask, taps, dilation):
    """The definition, one entry at a time."""
    x = [*before.unbind(1), *h.unbind(1)]
    mask = 1 if mask is None else mask[:, 0]
    rows = [torch.cat([mask * x[t + j * dilation] for j in range(taps)], dim=1) for t in range(h.shape[1])]
    return torch.stack(rows, dim=1)


def in_double(*tensors):
    return [None if tensor is None else tensor.detach().double().cpu().requires_grad_() for tensor in tensors]


def assert_close(found, expected, tolerance):
    torch.testing.assert_close(found.detach().double().cpu(), expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(backend, size, masked):
    h, before, mask = ours = arguments(*size, masked=masked)
    exact = in_double(*ours)
    if masked:
        mask = mask.detach()  # as in a solve
    rows = gather_taps(h, before, mask, kernel_size=size[3], dilation=size[4], backend=backend)
    expected = by_index(*exact, *size[3:])
    assert rows.shape == expected.shape == (size[0], size[1], size[2] * size[3])
    assert_close(rows, expected, 1e-6)
    cotangent = torch.randn_like(rows)
    truth = torch.autograd.grad(
        expected, exact[:2], cotangent.double().cpu(), materialize_grads=True, allow_unused=True
    )
    found = torch.autograd.grad(rows, ours[:2], cotangent, materialize_grads=True, allow_unused=True)
    for mine, true in zip(found, truth, strict=True):
        assert_close(mine, true, 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", ["h", "before", "mask", "h before mask"])
def test_gradients_of_some_arguments(backend, wanted):
    ours = [tensor.detach() for tensor in arguments(1, 5, 3, 2, 2)]
    exact = [tensor.detach() for tensor in in_double(*ours)]
    sources = []
    for tensors in (ours, exact):
        names = dict(zip(("h", "before", "mask"), tensors, strict=True))
        sources.append([names[name].requires_grad_() for name in wanted.split()])
    rows = gather_taps(*ours, kernel_size=2, dilation=2, backend=backend)
    cotangent = torch.randn_like(rows)
    truth = torch.autograd.grad(by_index(*exact, 2, 2), sources[1], cotangent.double().cpu())
    for mine, true in zip(torch.autograd.grad(rows, sources[0], cotangent), truth, strict=True):
        assert_close(mine, true, 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_rows_in_lower_precision(backend, half):
    """Rounded once on writing; the cotangent of h has the dtype of h, its sum over taps is one of float32."""
    ours = [*arguments(2, 6, 5, 2, 1)[:2], 2 * torch.ones(2, 1, 5, device=DEVICE)]
    rows = gather_taps(*ours, kernel_size=2, dtype=half, backend=backend)
    assert rows.dtype == half
    exact = in_double(*ours)
    expected = by_index(*exact, 2, 1)
    assert_close(rows, expected, 2 * torch.finfo(half).eps)
    cotangent = torch.randn_like(rows)
    found = torch.autograd.grad(rows, ours[:2], cotangent)
    for mine, true in zip(found, torch.autograd.grad(expected, exact[:2], cotangent.double().cpu()), strict=True):
        assert mine.dtype == torch.float32
        assert_close(mine, true, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_arguments(backend):
    ours = arguments(1, 5, 3, 2, 1, dtype=torch.bfloat16)
    rows = gather_taps(*ours, kernel_size=2, backend=backend)
    exact = in_double(*ours)
    eps = torch.finfo(torch.bfloat16).eps
    assert rows.dtype == torch.bfloat16
    assert_close(rows, by_index(*exact, 2, 1), 2 * eps)
    assert torch.autograd.grad(rows.sum(), ours[0])[0].dtype == torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives(backend):
    ours = arguments(1, 5, 2, 2, 1)
    exact = in_double(*ours)

    def second(rows, tensors):
        first = torch.autograd.grad(rows.pow(3).sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    found = second(gather_taps(*ours, kernel_size=2, backend=backend), ours)
    for mine, true in zip(found, second(by_index(*exact, 2, 1), exact), strict=True):
        assert_close(mine, true, 1e-5)


def test_forward_mode_and_vmap_go_through_the_twin():
    h, before, mask = (tensor.detach() for tensor in arguments(1, 4, 3, 2, 1))
    move = torch.randn_like(h)

    def rows(h):
        return gather_taps(h, before, mask, kernel_size=2)

    value, tangent = torch.func.jvp(rows, (h,), (move,))
    torch.testing.assert_close(value, rows(h))
    torch.testing.assert_close(tangent, rows(h + move) - value, rtol=1e-5, atol=1e-5)
    many = torch.stack([h, move])
    torch.testing.assert_close(torch.vmap(rows)(many), torch.stack([rows(h), rows(move)]))


def test_autocast_decides_about_the_dtype():
    h, before, mask = arguments(1, 4, 3, 2, 1)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert gather_taps(h, before, mask, kernel_size=2).dtype == torch.bfloat16
        assert product_dtype(h.double()) == torch.float64
    assert gather_taps(h, before, mask, kernel_size=2).dtype == product_dtype(h) == torch.float32


def test_arguments_that_are_not_contiguous():
    h, before, mask = arguments(2, 5, 3, 2, 2)
    strided = [tensor.detach().transpose(0, 1).contiguous().transpose(0, 1) for tensor in (h, before, mask)]
    assert not strided[0].is_contiguous()
    strided[0].requires_grad_()
    ours, theirs = (
        gather_taps(*t, kernel_size=2, dilation=2, backend="triton") for t in (strided, (h, before, mask.detach()))
    )
    assert torch.equal(ours, theirs)
    cotangent = torch.ones(1, device=DEVICE).expand_as(ours)
    found, expected = (torch.autograd.grad(r, x, cotangent)[0] for r, x in ((ours, strided[0]), (theirs, h)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_gather(backend):
    assert gather_taps(*arguments(0, 4, 3, 2, 1), kernel_size=2, backend=backend).shape == (0, 4, 6)
    h, before, _ = arguments(2, 4, 3, 1, 1)
    assert gather_taps(h, before, kernel_size=1, backend=backend) is h


def test_errors_of_gather_say_what_was_expected():
    h, before = torch.zeros(2, 5, 3), torch.zeros(2, 1, 3)
    with pytest.raises(ValueError, match=r"before \(B, 2, H\) for 2 taps 2 apart, got \(2, 5, 3\) and \(2, 1, 3\)"):
        gather_taps(h, before, kernel_size=2, dilation=2)
    with pytest.raises(ValueError, match=r"mask must be \(B, 1, H\), here \(2, 1, 3\); got \(1, 1, 3\)"):
        gather_taps(h, before, torch.ones(1, 1, 3), kernel_size=2)
    with pytest.raises(ValueError, match=r"kernel_size must be an integer of at least 1, got 0"):
        gather_taps(h, before, kernel_size=0)


# DropConnect


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("out", "columns", "past"), [(3, 10, 5), (2, 7, 0), (4, 6, 6), (1, 9, 3)])
def test_dropped_weights_and_their_gradients(backend, out, columns, past):
    weight = torch.randn(out, columns).to(DEVICE).requires_grad_()
    kept = torch.rand(out, past, device=DEVICE) >= 0.4
    factor = torch.cat([kept.double() * 2.5, torch.ones(out, columns - past, device=DEVICE)], dim=1).cpu()
    got = drop_taps(weight, kept, 2.5, backend=backend)
    assert_close(got, weight.double().cpu() * factor, 1e-6)
    cotangent = torch.randn_like(got)
    (first,) = torch.autograd.grad(got, weight, cotangent, retain_graph=True)
    assert_close(first, cotangent.double().cpu() * factor, 1e-6)
    (once,) = torch.autograd.grad(got.square().sum(), weight, create_graph=True)
    (twice,) = torch.autograd.grad(once.sum(), weight)
    assert_close(twice, 2 * factor.square(), 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropped_weights_in_lower_precision(backend):
    weight = torch.randn(3, 8).to(DEVICE).requires_grad_()
    kept = torch.rand(3, 4, device=DEVICE) >= 0.5
    got = drop_taps(weight, kept, 2.0, dtype=torch.bfloat16, backend=backend)
    assert got.dtype == torch.bfloat16
    assert_close(got, drop_taps(weight, kept, 2.0, backend="naive").double().cpu(), 2 * torch.finfo(got.dtype).eps)
    (found,) = torch.autograd.grad(got, weight, torch.ones_like(got))
    assert found.dtype == torch.float32
    assert torch.equal(found[:, :4] != 0, kept)


def test_errors_of_drop_say_what_was_expected():
    with pytest.raises(ValueError, match=r"past at most k·in, got \(2, 3\) and \(2, 4\)"):
        drop_taps(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool), 2.0)
    with pytest.raises(TypeError, match=r"truth values, got torch.float32"):
        drop_taps(torch.zeros(2, 3), torch.ones(2, 2), 2.0)
