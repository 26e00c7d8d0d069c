"""`attend`, kernels and twin: values and gradients against scores looked up by distance, in float64."""

import math

import pytest
import torch

from equipoise.nn.attention import RelativeAttention
from equipoise.ops import attend
from equipoise.ops.attention import takes_kernel
from tests.gradients import relative_error
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter

DEVICE = kernel_device()
pytestmark = quiet_interpreter
# Of float32, relative to norms; on a GPU its products are made of several less exact ones.
EXACT = 1e-6 if DEVICE == "cpu" else 1e-5

# batch, heads, queries, memory, features of a head, local size, columns before those of distances
SIZES = [
    (2, 2, 19, 0, 8, None, 1),
    (1, 2, 17, 6, 20, None, 4),
    (1, 1, 33, 0, 8, 5, 1),
    (2, 1, 9, 24, 8, 7, 2),
    (1, 1, 7, 20, 64, 1, 1),
    (1, 1, 1, 0, 16, None, 1),
    (1, 1, 1, 30, 72, None, 3),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several blocks in small problems; those of queries and keys differ, and neither divides the sizes."""
    if DEVICE == "cpu":
        from equipoise.ops.attention import triton as kernels

        for name, tiles in (("FORWARD", (8, 16)), ("QUERIES", (16, 8)), ("KEYS", (8, 16))):
            monkeypatch.setattr(kernels, name, (kernels.Tiles(*tiles, 4, 2),) * 2)


def definition(query, key, value, by_distance, bias, scale, local_size):
    """Every pair's score by distance is looked up; nothing is shifted."""
    length, keys = query.shape[2], key.shape[2]
    delta = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
    column = (by_distance.shape[3] - 1 - delta).clamp(max=by_distance.shape[3] - 1)
    looked_up = by_distance.gather(3, column.expand(*query.shape[:2], -1, -1))
    scores = scale * ((query + bias[:, None]) @ key.mT + looked_up)
    hidden = (delta < 0) | (delta >= (keys if local_size is None else local_size))
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ value).transpose(1, 2)


def arguments(batch, heads, length, past, features, local_size, ahead, dtype=torch.float32):
    """Queries, keys and values as parts of one product, scores by distance with heads first in memory, as in use."""
    keys = past + length
    joint = torch.randn(batch, keys, 3, heads, features).to(DEVICE, dtype)
    query, key, value = (part.transpose(1, 2) for part in joint.unbind(2))
    by_distance = torch.randn(heads, batch, length, ahead + keys).to(DEVICE, dtype).transpose(0, 1)
    bias = torch.randn(heads, features).to(DEVICE, dtype)
    return [part.requires_grad_() for part in (query[:, :, past:], key, value, by_distance, bias)]


def in_double(tensors):
    return [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]


def assert_close(found, expected, tolerance):
    assert relative_error(found.detach().double().cpu(), expected.detach()) <= tolerance


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(backend, size):
    given, scale, local_size = arguments(*size), size[4] ** -0.5, size[5]
    out = attend(*given, scale=scale, local_size=local_size, backend=backend)
    assert out.shape == (size[0], size[2], size[1], size[4])
    assert out.is_contiguous()
    exact = in_double(given)
    expected = definition(*exact, scale, local_size)
    assert_close(out, expected, EXACT)
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, given, cotangent)
    for ours, theirs in zip(found, torch.autograd.grad(expected, exact, cotangent.double().cpu()), strict=True):
        # With one key in sight some gradients are exactly zero.
        assert (ours.double().cpu() - theirs).norm() <= 2 * EXACT * max(theirs.norm(), cotangent.norm())


@pytest.mark.parametrize("size", SIZES[2:4])
def test_scores_that_no_pair_has_are_neither_read_nor_given_a_gradient(size):
    given = arguments(*size)
    length, keys, columns = size[2], size[2] + size[3], given[3].shape[3]
    delta = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
    pairs = torch.nonzero((delta >= 0) & (delta < size[5]), as_tuple=True)
    used = torch.zeros(length, columns, dtype=torch.bool)
    used[pairs[0], columns - 1 - delta[pairs]] = True
    exact = in_double(given)
    with torch.no_grad():
        given[3].masked_fill_(~used.to(DEVICE), torch.nan)
    out = attend(*given, scale=0.3, local_size=size[5], backend="triton")
    expected = definition(*exact, 0.3, size[5])
    assert_close(out, expected, EXACT)
    found = torch.autograd.grad(out.square().sum(), given[3])[0].cpu()
    assert_close(found, torch.autograd.grad(expected.square().sum(), exact[3])[0], 5 * EXACT)
    assert float(found[..., ~used].abs().max()) == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision(backend, half):
    """Relative to norms: 2 units of the dtype for values, 4 for gradients, since the map is rounded for products."""
    size = (1, 2, 21, 5, 20, None, 2)
    given = arguments(*size, half)
    out = attend(*given, scale=0.2, backend=backend)
    assert out.dtype == half
    exact = in_double(given)
    expected = definition(*exact, 0.2, None)
    eps = torch.finfo(half).eps
    assert_close(out, expected, 2 * eps)
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, given, cotangent)
    for ours, theirs in zip(found, torch.autograd.grad(expected, exact, cotangent.double().cpu()), strict=True):
        assert ours.dtype == half
        assert_close(ours, theirs, 4 * eps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_decides_about_the_products(backend):
    """Arguments in float32, products in bfloat16; gradients come in the dtypes of the arguments."""
    given = arguments(1, 2, 13, 3, 8, None, 1)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = attend(*given, scale=0.3, backend=backend)
    assert out.dtype == torch.bfloat16
    exact = in_double(given)
    expected = definition(*exact, 0.3, None)
    eps = torch.finfo(torch.bfloat16).eps
    assert_close(out, expected, 2 * eps)
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, given, cotangent, retain_graph=True)
    truth = torch.autograd.grad(expected, exact, cotangent.double().cpu())
    again = torch.autograd.grad(out, given, cotangent, create_graph=True)  # by the twin, and still in bfloat16
    for ours, other, theirs in zip(found, again, truth, strict=True):
        assert ours.dtype == other.dtype == torch.float32
        assert_close(ours, theirs, 4 * eps)
        assert_close(other, theirs, 4 * eps)


def test_large_scores_do_not_overflow():
    given = arguments(1, 1, 18, 0, 8, None, 1)
    huge = [(1e2 * tensor.detach()).requires_grad_() for tensor in given]
    out = attend(*huge, scale=0.3, backend="triton")
    exact = in_double(huge)
    expected = definition(*exact, 0.3, None)
    assert_close(out, expected, 1e-3)  # scores of 1e4 are known to 1e-3 in float32
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum(), huge))


def test_what_is_not_finite_stays_so_in_its_rows():
    query, *others = (tensor.detach() for tensor in arguments(2, 1, 20, 0, 8, None, 1))
    query[1, :, 5] = torch.nan
    out = attend(query, *others, scale=0.3, backend="triton")
    assert torch.isnan(out[1, 5]).all()
    assert int(torch.isnan(out).any(-1).sum()) == 1


def test_a_graph_can_be_walked_again_and_second_derivatives_are_right():
    given = arguments(1, 2, 9, 2, 8, 6, 1)
    exact = in_double(given)

    def second(function, given):
        first = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), given)

    out = attend(*given, scale=0.3, local_size=6, backend="triton")
    once, twice = (torch.autograd.grad(out, given, torch.ones_like(out), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    found = second(lambda *args: attend(*args, scale=0.3, local_size=6, backend="triton"), given)
    for ours, theirs in zip(found, second(lambda *args: definition(*args, 0.3, 6), exact), strict=True):
        assert_close(ours, theirs, 1e-5)


def test_only_what_needs_a_gradient_gets_one():
    query, *rest = arguments(1, 1, 9, 0, 8, None, 1)
    rest = [tensor.detach() for tensor in rest]
    results = [attend(query, *rest, scale=0.3, backend=backend) for backend in BACKENDS]
    plain, fused = (torch.autograd.grad(out.sum(), query, create_graph=True)[0] for out in results)
    assert_close(fused, plain.double().cpu(), 1e-5)
    assert not attend(query.detach(), *rest, scale=0.3, backend="triton").requires_grad


def test_without_bias_and_with_any_strides():
    query, key, value, by_distance, _ = arguments(2, 2, 9, 4, 12, None, 5)
    plain = attend(query, key, value, by_distance, scale=0.3, backend="triton")
    layouts = [tensor.detach().contiguous().requires_grad_() for tensor in (query, key, value, by_distance[..., 4:])]
    other = attend(*layouts, scale=0.3, backend="triton")
    assert_close(plain, other.double().cpu(), EXACT)
    cotangent = torch.ones(1, device=DEVICE).expand_as(plain)
    found = torch.autograd.grad(plain, (query, key, value, by_distance), cotangent)
    expected = torch.autograd.grad(other, layouts, cotangent)
    for ours, theirs in zip((*found[:3], found[3][..., 4:]), expected, strict=True):
        assert_close(ours, theirs.double().cpu(), 2 * EXACT)
    assert float(found[3][..., :4].abs().max()) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend):
    assert attend(*arguments(0, 2, 5, 0, 8, None, 1), scale=1.0, backend=backend).shape == (0, 5, 2, 8)


def test_forward_mode_and_torch_func_get_the_twin():
    given = [tensor.detach() for tensor in arguments(1, 1, 5, 0, 8, None, 1)]
    taken = []

    def function(query):
        taken.append(takes_kernel(query, *given[1:]))
        return attend(query, *given[1:], scale=0.3)

    tangent = torch.randn_like(given[0])
    _, pushed = torch.func.jvp(function, (given[0],), (tangent,))
    exact = in_double(given)
    _, truth = torch.func.jvp(
        lambda query: definition(query, *exact[1:], 0.3, None), (exact[0].detach(),), (tangent.double().cpu(),)
    )
    assert_close(pushed, truth, 1e-5)
    assert taken == [False]


# The layer


def layers(**options):
    """The same layer by the kernels and without them."""
    torch.manual_seed(1)
    fused = RelativeAttention(24, 3, init_std=0.3, backend="triton", **options).to(DEVICE)
    plain = RelativeAttention(24, 3, init_std=0.3, backend="naive", **options).to(DEVICE)
    plain.load_state_dict(fused.state_dict())
    return fused, plain


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("options", [{}, {"local_size": 4, "weight_norm": True}], ids=str)
def test_the_layer_by_kernels_equals_the_plain_one(past, options):
    z, u = torch.randn(2, 11, 24, device=DEVICE), torch.randn(2, 11, 72, device=DEVICE)
    memory = torch.randn(2, past, 24, device=DEVICE), torch.randn(2, past, 72, device=DEVICE)
    results = []
    for layer in layers(**options):
        given = [z.clone().requires_grad_(), u.clone().requires_grad_(), *layer.parameters()]
        positions = layer.positions(11, past)
        assert positions[0].shape[-1] == (12 + past if layer.backend == "naive" else 16 if past == 0 else 24)
        out = layer(*given[:2], positions, layer.past(*memory) if past else None)
        results.append((out, *torch.autograd.grad(out.sin().sum(), given)))
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * max(1.0, theirs.norm())


def test_the_layer_with_dropout_on_its_map_draws_a_map():
    layer, _ = layers(dropout=0.5)
    z, u = torch.randn(2, 6, 24, device=DEVICE), torch.randn(2, 6, 72, device=DEVICE)
    dropped = [layer(z, u, layer.positions(6)) for _ in range(2)]
    assert not torch.equal(*dropped)
    layer.eval()
    kept = layer(z, u, layer.positions(6))
    layer.backend = "naive"
    assert relative_error(kept, layer(z, u, layer.positions(6))) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_layer_under_autocast(backend):
    """As in a model: the injection is in half precision, parameters and states are in float32.

    In float16: the interpreter truncates to bfloat16, and sums over many positions show it.
    """
    layer = layers()[backend == "naive"]
    z, u = torch.randn(2, 9, 24, device=DEVICE), torch.randn(2, 9, 72, device=DEVICE)
    truth = layers()[1]
    exact = truth(z, u, truth.positions(9))
    with torch.autocast(DEVICE, torch.float16):
        out = layer(z.requires_grad_(), u.half(), layer.positions(9))
    assert out.dtype == torch.float16
    assert relative_error(out.float(), exact) <= 2e-3
    grads = torch.autograd.grad(out.float().square().sum(), [z, *layer.parameters()])
    wide = torch.autograd.grad(truth(z, u, truth.positions(9)).square().sum(), [z, *truth.parameters()])
    for ours, theirs in zip(grads, wide, strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, theirs) <= 1e-2


def test_errors_say_what_was_expected():
    given = arguments(1, 2, 5, 1, 8, None, 1)
    with pytest.raises(ValueError, match=r"W > L and bias \(heads, d\); got \(1, 2, 5, 8\).*\(1, 2, 5, 6\)"):
        attend(*given[:3], given[3][..., 1:], scale=1.0)
    with pytest.raises(ValueError, match="local_size must be an integer of at least 1, got 0"):
        attend(*given, scale=1.0, local_size=0)
    with pytest.raises(ValueError, match="at most 128 features and, without autocast, one dtype; got 130"):
        attend(*arguments(1, 1, 2, 0, 130, None, 1), scale=1.0, backend="triton")
    with pytest.raises(ValueError, match="unknown backend 'tritn'; did you mean 'triton'"):
        RelativeAttention(8, 2, backend="tritn")
