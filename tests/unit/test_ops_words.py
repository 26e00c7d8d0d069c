"""`lookup`, kernel and twin: values and derivatives against one token at a time in float64."""

import pytest
import torch

from equipoise.ops import lookup
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter

DEVICE = kernel_device()
pytestmark = quiet_interpreter

# Sizes and widths of tables; the kernel takes 4 features at a time.
TABLES = [((5, 4, 7), (6, 3, 1)), ((3, 9), (4, 4)), ((6,), (5,)), ((1, 1, 1, 2), (9, 2, 4, 1))]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    from equipoise.ops.words import triton as kernels

    monkeypatch.setattr(kernels, "BLOCK", 4)


def drawn(sizes, widths, dtype=torch.float32):
    tables = [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for shape in zip(sizes, widths, strict=True)]
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    tokens = torch.randint(bounds[-1], (11,), device=DEVICE)
    return tokens, tables, bounds


def by_token(tokens, tables, bounds, scale):
    """The definition, one token at a time."""
    rows = []
    for token in tokens.tolist():
        parts = [
            scale * table[token - low] if low <= token < low + len(table) else 0 * table[0]
            for table, low in zip(tables, bounds, strict=False)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def in_double(tables):
    return [table.detach().double().cpu().requires_grad_() for table in tables]


def assert_close(found, expected, tolerance):
    torch.testing.assert_close(found.detach().double().cpu(), expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("sizes", "widths"), TABLES)
def test_vectors_and_gradients(backend, sizes, widths):
    tokens, tables, bounds = drawn(sizes, widths)
    exact = in_double(tables)
    expected = by_token(tokens, exact, bounds, 2.5)
    got = lookup(tokens, tables, bounds, scale=2.5, backend=backend)
    assert got.shape == (11, sum(widths))
    assert_close(got, expected, 1e-6)
    cotangent = torch.randn_like(got)
    truth = torch.autograd.grad(expected, exact, cotangent.double().cpu())
    for mine, true in zip(torch.autograd.grad(got, tables, cotangent), truth, strict=True):
        assert_close(mine, true, 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_dtype_and_int32(backend):
    """Scaled before it is rounded; gradients of tables are sums in their dtype."""
    tokens, tables, bounds = drawn(*TABLES[0])
    exact = in_double(tables)
    got = lookup(tokens.int(), tables, bounds, scale=0.3, dtype=torch.bfloat16, backend=backend)
    assert got.dtype == torch.bfloat16
    expected = by_token(tokens, exact, bounds, 0.3)
    assert_close(got, expected, 2 * torch.finfo(torch.bfloat16).eps)
    cotangent = torch.randn_like(got)
    truth = torch.autograd.grad(expected, exact, cotangent.double().cpu())
    for mine, true in zip(torch.autograd.grad(got, tables, cotangent), truth, strict=True):
        assert mine.dtype == torch.float32
        assert_close(mine, true, 1e-5 if backend == "triton" else 1e-2)  # the twin rounds before it scales


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_some_tables(backend):
    tokens, tables, bounds = drawn(*TABLES[0])
    tables = [tables[0].detach(), tables[1], tables[2].detach()]
    (found,) = torch.autograd.grad(lookup(tokens, tables, bounds, backend=backend).sum(), tables[1:2])
    counts = torch.stack([(tokens == token).sum() for token in range(5, 9)])
    assert torch.equal(found, counts.to(found.dtype).unsqueeze(1).expand(4, 3))


def test_second_derivatives_are_those_of_the_twin():
    tokens, tables, bounds = drawn(*TABLES[0])
    found = []
    for backend in BACKENDS:
        got = lookup(tokens, tables, bounds, scale=1.5, backend=backend)
        first = torch.autograd.grad(got.pow(3).sum(), tables, create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), tables))
    for mine, true in zip(*found, strict=True):
        assert_close(mine, true.double().cpu(), 1e-4)


@pytest.mark.parametrize("token", [-1, 16, -(2**40)])
def test_a_token_outside_the_vocabulary_is_not_dropped(token):
    """The kernel makes NaN of it, and its cotangent is written nowhere; the twin raises."""
    _, tables, bounds = drawn(*TABLES[0])
    tokens = torch.tensor([3, token, 15], device=DEVICE)
    got = lookup(tokens, tables, bounds, backend="triton")
    assert got.isnan().all(1).tolist() == [False, True, False]
    found = torch.autograd.grad(got, tables, torch.ones_like(got))
    assert [int(grad.count_nonzero()) for grad in found] == [6, 0, 1]
    if DEVICE == "cpu":
        with pytest.raises(IndexError):
            lookup(tokens, tables, bounds, backend="naive")


def test_no_tokens_and_functional_transforms():
    tokens, tables, bounds = drawn(*TABLES[0])
    assert lookup(tokens[:0], tables, bounds).shape == (0, 10)
    grad = torch.func.grad(lambda table: lookup(tokens, [table, *tables[1:]], bounds).sum())(tables[0].detach())
    assert float(grad.sum()) == 6 * int((tokens < 5).sum())


def test_errors_say_what_was_expected():
    table = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"\[5\]; got \(3,\), \[\(4, 2\)\] and \(0, 5\)"):
        lookup(torch.zeros(3, dtype=torch.long), [table], (0, 5))
    with pytest.raises(ValueError, match=r"from 0 on"):
        lookup(torch.zeros(3, dtype=torch.long), [table], (1, 5))
    with pytest.raises(TypeError, match=r"int64 or int32, got torch\.float32"):
        lookup(torch.zeros(3), [table], (0, 4))
