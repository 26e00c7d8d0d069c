"""`trellis_cell`, kernel and twin: values and gradients against a plain loop over time in float64."""

import pytest
import torch

from equipoise.ops import trellis_cell
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter

DEVICE = kernel_device()
pytestmark = quiet_interpreter

# batch, time, features, dilation; blocks of the kernel are 4 steps by 4 features
SIZES = [(2, 7, 5, 1), (1, 9, 3, 2), (1, 2, 3, 4), (1, 1, 1, 1)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    from equipoise.ops.trellis import triton as kernels

    for name in ("TIME", "WIDTH", "VJP_TIME", "VJP_WIDTH"):
        monkeypatch.setattr(kernels, name, 4)


def loop(pre, start):
    """The definition, one step at a time."""
    stride, c, h = start.shape[1], list(start.unbind(1)), []
    for t in range(pre.shape[1]):
        i, o, g, phi = pre[:, t].chunk(4, dim=1)
        c.append(phi.sigmoid() * c[t] + i.sigmoid() * g.tanh())
        h.append(o.sigmoid() * c[-1].tanh())
    return torch.stack(h, dim=1), torch.stack(c[stride:], dim=1)


def arguments(batch, time, features, stride, dtype=torch.float32):
    pre = torch.randn(batch, time, 4 * features).to(DEVICE, dtype).requires_grad_()
    start = torch.randn(batch, stride, features).to(DEVICE, dtype).requires_grad_()
    return pre, start


def in_double(*tensors):
    return [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]


def assert_close(found, expected, tolerance):
    torch.testing.assert_close(found.detach().double().cpu(), expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(backend, size):
    pre, start = arguments(*size)
    h, c = trellis_cell(pre, start, backend=backend)
    assert h.shape == c.shape == (size[0], size[1], size[2])
    exact = in_double(pre, start)
    expected = loop(*exact)
    assert_close(h, expected[0], 1e-6)
    assert_close(c, expected[1], 1e-6)
    cotangents = [torch.randn_like(h), torch.randn_like(c)]
    found = torch.autograd.grad((h, c), (pre, start), cotangents)
    wide = [tensor.double().cpu() for tensor in cotangents]
    for ours, theirs in zip(found, torch.autograd.grad(expected, exact, wide), strict=True):
        assert_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["h", "c"])
def test_a_cotangent_for_one_output_only(backend, which):
    """As in a solve, where c is not used; and the graph can be walked again, as an adjoint solve does."""
    pre, start = arguments(1, 5, 3, 1)
    outputs = dict(zip("hc", trellis_cell(pre, start, backend=backend), strict=True))
    exact = in_double(pre, start)
    expected = dict(zip("hc", loop(*exact), strict=True))
    for _ in range(2):
        cotangent = torch.randn_like(outputs[which])
        found = torch.autograd.grad(outputs[which], (pre, start), cotangent, retain_graph=True)
        truth = torch.autograd.grad(expected[which], exact, cotangent.double().cpu(), retain_graph=True)
        for ours, theirs in zip(found, truth, strict=True):
            assert_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_on_writing_only(backend, half):
    """Values to 2 units of the dtype; gradients to 4, since the VJP starts from a rounded c."""
    pre, start = arguments(1, 6, 5, 1, half)
    h, c = trellis_cell(pre, start, backend=backend)
    assert h.dtype == c.dtype == half
    exact = in_double(pre, start)
    expected = loop(*exact)
    eps = torch.finfo(half).eps
    assert_close(h, expected[0], 2 * eps)
    assert_close(c, expected[1], 2 * eps)
    cotangent = torch.randn_like(h)
    found = torch.autograd.grad(h, (pre, start), cotangent)
    for ours, theirs in zip(found, torch.autograd.grad(expected[0], exact, cotangent.double().cpu()), strict=True):
        assert ours.dtype == half
        assert_close(ours, theirs, 4 * eps)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_added_belongs_to_the_pre_activations(backend, size):
    pre, start = arguments(*size)
    plus = torch.randn_like(pre).requires_grad_()
    exact = in_double(pre, start, plus)
    expected = loop(exact[0] + exact[2], exact[1])
    outputs = trellis_cell(pre, start, plus, backend=backend)
    cotangents = [torch.randn_like(output) for output in outputs]
    for ours, theirs in zip(outputs, expected, strict=True):
        assert_close(ours, theirs, 1e-6)
    found = torch.autograd.grad(outputs, (pre, start, plus), cotangents)
    wide = [tensor.double().cpu() for tensor in cotangents]
    for ours, theirs in zip(found, torch.autograd.grad(expected, exact, wide), strict=True):
        assert_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_in_higher_precision_than_the_pre_activations(backend):
    """h is not rounded; the VJP takes a cotangent in the dtype of h and starts from a rounded sum and a rounded c."""
    half, eps = torch.bfloat16, torch.finfo(torch.bfloat16).eps
    pre, start = arguments(1, 6, 5, 1, half)
    plus = torch.randn_like(pre).requires_grad_()
    exact = in_double(pre, start, plus)
    expected = loop(exact[0] + exact[2], exact[1])
    h, c = trellis_cell(pre, start, plus, dtype=torch.float32, backend=backend)
    assert (h.dtype, c.dtype) == (torch.float32, half)
    assert_close(h, expected[0], 1e-6)
    assert_close(c, expected[1], 2 * eps)
    cotangent = torch.randn_like(h)
    found = torch.autograd.grad(h, (pre, start, plus), cotangent)
    for ours, theirs in zip(found, torch.autograd.grad(expected[0], exact, cotangent.double().cpu()), strict=True):
        assert ours.dtype == half
        assert_close(ours, theirs, 6 * eps)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("added", [True, False])
def test_without_gradients_and_without_c(backend, added):
    pre, start = arguments(1, 6, 5, 2)
    plus = torch.randn_like(pre) if added else None
    h, c = trellis_cell(pre, start, plus, backend=backend)
    with torch.no_grad():
        assert all(map(torch.equal, trellis_cell(pre, start, plus, backend=backend), (h, c)))
        alone, nothing = trellis_cell(pre, start, plus, need_c=False, backend=backend)
    assert torch.equal(alone, h)
    assert nothing is None
    with_graph, nothing = trellis_cell(pre, start, plus, need_c=False, backend=backend)
    assert nothing is None
    cotangent = torch.randn_like(h)
    found, expected = (torch.autograd.grad(x, (pre, start), cotangent) for x in (with_graph, h))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("part", range(4))
def test_nan_is_passed_on(part):
    """A solver must see it."""
    pre, start = arguments(1, 5, 3, 1)
    with torch.no_grad():
        pre[0, 2, 3 * part] = torch.nan
    h, _ = trellis_cell(pre, start, backend="triton")
    assert torch.equal(h.isnan(), trellis_cell(pre, start, backend="naive")[0].isnan())
    assert bool(h.isnan().any())


def test_large_gates_saturate_without_overflow():
    pre, start = arguments(1, 5, 3, 1)
    huge = (1e3 * pre.detach()).requires_grad_()
    h, c = trellis_cell(huge, start, backend="triton")
    expected = loop(*in_double(huge, start))
    assert_close(h, expected[0], 1e-6)
    assert_close(c, expected[1], 1e-6)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(h.sum(), (huge, start)))


def test_second_derivatives_of_the_kernel_go_through_the_twin():
    pre, start = arguments(1, 5, 2, 1)
    plus = torch.randn_like(pre).requires_grad_()
    exact = in_double(pre, start, plus)

    def second(cell, *tensors):
        h, c = cell(*tensors)
        first = torch.autograd.grad(h.square().sum() + c.sum(), tensors, create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[1].sum() + first[2].pow(3).sum(), tensors)

    found = second(lambda *args: trellis_cell(*args, backend="triton"), pre, start, plus)
    for ours, theirs in zip(found, second(lambda a, b, c: loop(a + c, b), *exact), strict=True):
        assert_close(ours, theirs, 1e-5)


def test_only_what_needs_a_gradient_gets_one():
    pre, start = arguments(1, 4, 2, 1)
    h, _ = trellis_cell(pre, start.detach(), backend="triton")
    (first,) = torch.autograd.grad(h.sum(), pre, create_graph=True)
    plain, _ = trellis_cell(pre, start.detach(), backend="naive")
    torch.testing.assert_close(first, torch.autograd.grad(plain.sum(), pre)[0], rtol=1e-5, atol=1e-6)
    assert not trellis_cell(pre.detach(), start.detach(), backend="triton")[0].requires_grad


def test_arguments_that_are_not_contiguous():
    pre, start = arguments(2, 5, 3, 1)
    strided = pre.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not strided.is_contiguous()
    ours, theirs = (trellis_cell(x, start, backend="triton") for x in (strided, pre))
    assert torch.equal(ours[0], theirs[0])
    cotangent = torch.ones(1, device=DEVICE).expand_as(ours[0])
    found, expected = (torch.autograd.grad(h, x, cotangent)[0] for h, x in ((ours[0], strided), (theirs[0], pre)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend):
    h, c = trellis_cell(*arguments(0, 5, 3, 1), backend=backend)
    assert h.shape == c.shape == (0, 5, 3)


def test_the_cell_of_the_model_is_this_one():
    from equipoise.models.deq_trellisnet import DEQTrellisNetConfig, TrellisCell

    config = DEQTrellisNetConfig(vocab_size=5, embedding_size=2, hidden_size=3, weight_norm=False)
    cell = TrellisCell(config).to(DEVICE)
    u, h = torch.randn(2, 6, 20, device=DEVICE), torch.randn(2, 6, 5, device=DEVICE)
    h0 = torch.randn(2, cell.recurrent.reach, 5, device=DEVICE)
    c0 = torch.randn(2, config.dilation, 5, device=DEVICE)
    expected = cell.step(h, u, h0, c0)
    padded = torch.cat([h0, h], dim=1)
    pre = u + torch.cat([padded[:, :-1], padded[:, 1:]], dim=2) @ cell.recurrent.weight_v.mT
    for ours, theirs in zip(trellis_cell(pre, c0, backend="triton"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(cell(h, u, h0, c0), expected[0])


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match=r"pre must be \(B, T, 4H\) and start \(B, s, H\), got \(2, 3, 8\)"):
        trellis_cell(torch.zeros(2, 3, 8), torch.zeros(2, 1, 3))
    with pytest.raises(ValueError, match="at least one step"):
        trellis_cell(torch.zeros(2, 3, 8), torch.zeros(2, 0, 2))
    with pytest.raises(ValueError, match=r"plus must have the shape of pre, \(2, 3, 8\); got \(2, 3, 2\)"):
        trellis_cell(torch.zeros(2, 3, 8), torch.zeros(2, 1, 2), torch.zeros(2, 3, 2))
