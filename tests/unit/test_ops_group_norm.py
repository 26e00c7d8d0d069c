"""`group_norm` and `residual_norm`, kernels and twins: values and derivatives against formulas in float64."""

import importlib

import pytest
import torch

from equipoise._scope import SolveScope
from equipoise.models._multiscale import MultiscaleCell
from equipoise.ops import norm as ops
from equipoise.ops.norm import group_norm, residual_norm
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter

DEVICE = kernel_device()
kernels = importlib.import_module("equipoise.ops.norm.triton")
pieces = importlib.import_module("equipoise.ops.norm.triton_pieces")
triton_residual = importlib.import_module("equipoise.ops.norm.triton_residual")
pytestmark = quiet_interpreter

LAYOUTS = {"contiguous": torch.contiguous_format, "last": torch.channels_last}
# batch, channels, groups, height, width; a block of the kernels holds 32 numbers
SIZES = [(2, 6, 2, 5, 3), (1, 4, 2, 1, 1), (1, 5, 1, 2, 2), (1, 12, 4, 3, 3)]


@pytest.fixture(autouse=True, params=["whole groups", "chunks"])
def _small_blocks(monkeypatch, request):
    for module in (kernels, triton_residual):
        monkeypatch.setattr(module, "BLOCK", 32)
        monkeypatch.setattr(module, "VJP_BLOCK", 32)
    monkeypatch.setattr(pieces, "CHUNK", 32)
    monkeypatch.setattr(pieces, "TOGETHER_BYTES", 16)
    monkeypatch.setattr(pieces, "FEW_PROGRAMS", 0 if request.param == "whole groups" else 512)


def normal(*shape, dtype=torch.float32, layout="contiguous", scale=1.0, offset=0.0):
    drawn = (offset + scale * torch.randn(shape)).to(DEVICE, dtype)
    return (drawn.contiguous(memory_format=LAYOUTS[layout]) if len(shape) == 4 else drawn).requires_grad_()


def in_double(*tensors):
    return [None if tensor is None else tensor.detach().double().cpu().requires_grad_() for tensor in tensors]


def assert_close(found, expected, tolerance):
    torch.testing.assert_close(found.detach().double().cpu(), expected.detach(), rtol=tolerance, atol=tolerance)


def by_formula(x, groups, weight, bias, eps=1e-5):
    grouped = x.reshape(len(x), groups, -1)
    centred = grouped - grouped.mean(dim=2, keepdim=True)
    y = (centred / (centred.square().mean(dim=2, keepdim=True) + eps).sqrt()).reshape(x.shape)
    return y if weight is None else y * weight[:, None, None] + bias[:, None, None]


def norm_by_formula(x, weight, bias, plus, groups, enlarge, relu):
    y = by_formula(x, groups, weight, bias)
    if plus is not None:
        y = y.repeat_interleave(enlarge, dim=2).repeat_interleave(enlarge, dim=3)
        y = plus + y[:, :, : plus.shape[2], : plus.shape[3]]
    return y.clamp(min=0) if relu else y


def residual_by_formula(t, z, mask, x, weights, groups):
    u = t if mask is None else t * mask
    u = u if x is None else u + x
    v = (by_formula(u, groups, *weights[:2]) + z).clamp(min=0)
    return by_formula(v, groups, *weights[2:])


def assert_same_gradients(found, expected, ours, exact, tolerance, dtypes=None):
    cotangent = torch.randn_like(found)
    sources = [[t for t in tensors if t is not None and t.requires_grad] for tensors in (ours, exact)]
    truth = torch.autograd.grad(expected, sources[1], cotangent.double().cpu())
    for mine, true, source in zip(torch.autograd.grad(found, sources[0], cotangent), truth, sources[0], strict=True):
        assert mine.dtype == source.dtype
        assert_close(mine, true, tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients(size, relu, layout, backend):
    n, c, groups, *pixels = size
    ours = [normal(n, c, *pixels, layout=layout), normal(c), normal(c), None]
    exact = in_double(*ours)
    y = group_norm(*ours[:1], groups, *ours[1:], relu=relu, backend=backend)
    expected = norm_by_formula(*exact, groups, 1, relu)
    assert y.shape == expected.shape
    assert y.stride() == ours[0].stride()
    assert_close(y, expected, 3e-6)
    assert_same_gradients(y, expected, ours, exact, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("small", "large", "enlarge"),
    [((3, 5), (3, 5), 1), ((3, 5), (5, 10), 2), ((2, 3), (7, 9), 4)],
    ids=["same", "twice", "four times"],
)
def test_enlarged_and_added(small, large, enlarge, relu, layout, backend):
    """Odd sizes of the larger map: the last row or column of pixels is cropped."""
    ours = [normal(1, 6, *small, layout=layout), normal(6), normal(6), normal(1, 6, *large, layout=layout)]
    exact = in_double(*ours)
    y = group_norm(*ours[:1], 2, *ours[1:], enlarge=enlarge, relu=relu, backend=backend)
    expected = norm_by_formula(*exact, 2, enlarge, relu)
    assert y.stride() == ours[3].stride()
    assert_close(y, expected, 3e-6)
    assert_same_gradients(y, expected, ours, exact, 3e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("size", "given"),
    [(SIZES[0], "mask x affine"), (SIZES[3], "mask"), (SIZES[3], "x"), (SIZES[3], "affine"), (SIZES[2], "")],
    ids=str,
)
def test_the_end_of_a_residual_block(size, given, layout, backend):
    n, c, groups, *pixels = size
    t, z, x = (normal(n, c, *pixels, layout=layout) for _ in range(3))
    x = x if "x" in given.split() else None
    mask = (torch.rand(n, c, 1, 1, device=DEVICE) >= 0.3) / 0.7 if "mask" in given else None
    weights = [normal(c) if "affine" in given else None for _ in range(4)]
    ours = [t, z, mask, x, *weights]
    exact = in_double(*ours)
    (y,) = residual_norm(t, z, groups, tuple(weights[:2]), tuple(weights[2:]), mask=mask, x=x, backend=backend)
    expected = residual_by_formula(*exact[:4], exact[4:], groups)
    assert y.stride() == t.stride()
    assert_close(y, expected, 2e-5)
    exact[2] = None  # the mask wants no gradient
    assert_same_gradients(y, expected, ours, exact, 2e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_as_under_autocast(half, layout, backend):
    """Half-precision maps, float32 states and parameters: rounded once, on writing; cotangents in arguments' dtypes."""
    eps = torch.finfo(half).eps
    t, x, plus = (normal(1, 6, 3, 5, dtype=half, layout=layout) for _ in range(3))
    z, mask = normal(1, 6, 3, 5, layout=layout), 2 * torch.ones(1, 6, 1, 1, dtype=half, device=DEVICE)
    weights = [normal(6) for _ in range(4)]
    ours = [t, z, mask, x, *weights]
    exact = in_double(*ours)
    expected = residual_by_formula(*exact[:4], exact[4:], 2)
    exact[2] = None
    for dtype in (half, torch.float32):
        (y,) = residual_norm(
            t, z, 2, tuple(weights[:2]), tuple(weights[2:]), mask=mask, x=x, dtype=dtype, backend=backend
        )
        assert y.dtype == dtype
        assert_close(y, expected, 2 * eps if dtype == half else 2e-5)
    assert_same_gradients(y, expected, ours, exact, 4 * eps)

    ours = [t, weights[0], weights[1], plus]
    exact = in_double(*ours)
    y = group_norm(t, 2, *ours[1:], relu=True, dtype=torch.float32, backend=backend)
    expected = norm_by_formula(*exact, 2, 1, True)
    assert y.dtype == torch.float32
    assert_close(y, expected, 1e-5)
    assert_same_gradients(y, expected, ours, exact, 4 * eps)
    assert group_norm(t, 2, backend=backend).dtype == half


@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_far_from_zero_cost_no_precision(layout):
    """Deviations are those from the mean, in several blocks too: errors of rounding x, 1e2 · 6e-8."""
    x = normal(2, 6, 7, 5, layout=layout, offset=100.0)
    expected = by_formula(*in_double(x), 2, None, None)
    assert_close(group_norm(x, 2, backend="triton"), expected, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nothing_hides_numbers_that_are_not_finite(number, backend):
    """A solver has to see them: one makes a group NaN, rectified or not, and leaves others alone."""
    x, other = normal(2, 4, 3, 3).detach(), normal(2, 4, 3, 3).detach()
    x[1, 0, 1, 1] = number
    for y in (
        group_norm(x, 2, relu=True, backend=backend),
        *residual_norm(x, other, 2, backend=backend),
        *residual_norm(other, x, 2, backend=backend),
    ):
        assert bool(y[1, :2].isnan().all())
        assert bool(y[0].isfinite().all())
        assert bool(y[1, 2:].isfinite().all())


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "plus"])
def test_gradients_of_some_arguments(wanted):
    tensors = {"x": normal(1, 6, 2, 3), "weight": normal(6), "bias": normal(6), "plus": normal(1, 6, 3, 5)}
    ours = {name: tensor.detach().requires_grad_(name == wanted) for name, tensor in tensors.items()}
    exact = in_double(*ours.values())
    y = group_norm(ours["x"], 2, *list(ours.values())[1:], enlarge=2, relu=True, backend="triton")
    cotangent = torch.randn_like(y)
    source = exact[list(ours).index(wanted)]
    (true,) = torch.autograd.grad(norm_by_formula(*exact, 2, 2, True), source, cotangent.double().cpu())
    assert_close(torch.autograd.grad(y, ours[wanted], cotangent)[0], true, 2e-5)


@pytest.mark.parametrize("wanted", ["t", "z", "mask", "x", "weight_in", "bias_in", "weight_out", "bias_out"])
def test_gradients_of_some_arguments_of_a_residual_block(wanted):
    tensors = {name: normal(1, 6, 3, 3) for name in ("t", "z", "mask", "x")}
    tensors["mask"] = normal(1, 6, 1, 1)
    tensors |= {name: normal(6) for name in ("weight_in", "bias_in", "weight_out", "bias_out")}
    ours = {name: tensor.detach().requires_grad_(name == wanted) for name, tensor in tensors.items()}
    t, z, mask, x, *weights = ours.values()
    exact = in_double(*ours.values())
    (y,) = residual_norm(t, z, 2, tuple(weights[:2]), tuple(weights[2:]), mask=mask, x=x, backend="triton")
    cotangent = torch.randn_like(y)
    expected = residual_by_formula(*exact[:4], exact[4:], 2)
    (true,) = torch.autograd.grad(expected, exact[list(ours).index(wanted)], cotangent.double().cpu())
    assert_close(torch.autograd.grad(y, ours[wanted], cotangent)[0], true, 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("uses", [2, 4, 6])
def test_cotangents_of_several_uses_are_added_up(uses, backend):
    """One of the uses is not part of the loss."""
    t, z, weight, bias = normal(1, 6, 3, 3), normal(1, 6, 3, 3), normal(6), normal(6)
    given = residual_norm(t, z, 2, (weight, bias), (weight, bias), uses=uses, backend=backend)
    assert len(given) == uses
    cotangents = [torch.randn_like(y) for y in given]
    found = torch.autograd.grad(given[1:], (t, z, weight, bias), cotangents[1:])
    exact = in_double(t, z, weight, bias)
    expected = residual_by_formula(exact[0], exact[1], None, None, exact[2:] * 2, 2)
    total = sum(cotangents[1:]).double().cpu()
    for mine, true in zip(found, torch.autograd.grad(expected, exact, total), strict=True):
        assert_close(mine, true, 2e-4)


def test_a_product_for_the_state_alone_leaves_parameters_alone():
    """As in an adjoint solve: gradients of parameters are summed over samples only where they are asked for."""
    x, weight, bias = normal(2, 6, 3, 3), normal(6), normal(6)
    y = group_norm(x, 2, weight, bias, backend="triton")
    summed = []
    for _, (node, _) in zip("xwb", y.grad_fn.next_functions, strict=False):
        node.register_hook(lambda *grads, name=node.name(): summed.append(name)) if "Expand" in node.name() else None
    torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert summed == []
    torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert summed == ["ExpandBackward0"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives(backend):
    """One operation on the result of the other: what both use must not be counted twice."""
    t, z, x = (normal(1, 4, 3, 3) for _ in range(3))
    mask, weights = normal(1, 4, 1, 1), [normal(4) for _ in range(4)]
    ours = [t, z, mask, x, *weights]
    exact = in_double(*ours)

    def second(y, tensors):
        first = torch.autograd.grad(y.pow(3).sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    options = {"mask": mask, "x": x, "uses": 2, "backend": backend}
    y, plus = residual_norm(t, z, 2, tuple(weights[:2]), tuple(weights[2:]), **options)
    y = group_norm(y, 2, weights[0], weights[1], x + plus, relu=True, backend=backend)
    expected = residual_by_formula(*exact[:4], exact[4:], 2)
    expected = norm_by_formula(expected, exact[4], exact[5], exact[3] + expected, 2, 1, True)
    for mine, true in zip(second(y, ours), second(expected, exact), strict=True):
        assert float((mine.double().cpu() - true).norm() / true.norm()) <= 1e-3


def test_forward_mode_and_vmap_go_through_the_twin():
    x, move, plus = (normal(2, 4, 3, 3).detach() for _ in range(3))

    def f(x):
        return residual_norm(x, group_norm(x, 2, plus=plus, relu=True), 2)[0]

    value, tangent = torch.func.jvp(f, (x,), (move,))
    torch.testing.assert_close(value, f(x))
    step = 1e-3
    torch.testing.assert_close(tangent, (f(x + step * move) - f(x - step * move)) / (2 * step), rtol=2e-2, atol=2e-2)
    many = torch.stack([x, move])
    torch.testing.assert_close(torch.vmap(f)(many), torch.stack([f(x), f(move)]))


def test_layouts_may_differ():
    """The result has the layout of the first argument."""
    x, plus = normal(2, 6, 3, 5, layout="last"), normal(2, 6, 3, 5)
    y = group_norm(x, 2, plus=plus, relu=True, backend="triton")
    assert y.stride() == x.stride()
    assert_close(y, norm_by_formula(*in_double(x, None, None, plus), 2, 1, True), 3e-6)
    (dx, dplus) = torch.autograd.grad(y, (x, plus), torch.ones(1, device=DEVICE).expand_as(y))
    exact = in_double(x, plus)
    truth = torch.autograd.grad(norm_by_formula(exact[0], None, None, exact[1], 2, 1, True).sum(), exact)
    assert_close(dx, truth[0], 2e-5)
    assert_close(dplus, truth[1], 2e-5)
    sliced = normal(2, 8, 3, 5)[:, 1:7]
    assert_close(group_norm(sliced, 2, backend="triton"), by_formula(*in_double(sliced), 2, None, None), 3e-6)


def test_the_twin_keeps_a_layout_that_torch_forgets(monkeypatch):
    """On CUDA the result of torch's own normalisation is contiguous wherever channels were; here on any device."""
    forgetful = torch.nn.functional.group_norm
    monkeypatch.setattr(torch.nn.functional, "group_norm", lambda x, *given, **named: forgetful(x.contiguous(), *given))
    x = normal(2, 6, 3, 5, layout="last")
    for y in (
        group_norm(x, 2, relu=True, backend="naive"),
        group_norm(x, 2, plus=normal(2, 6, 3, 5), backend="naive"),
        *residual_norm(x, x, 2, backend="naive"),
    ):
        assert y.stride() == x.stride()


@pytest.mark.parametrize(("layout", "autocast"), [("contiguous", False), ("last", True)])
def test_a_multiscale_layer_by_kernels_is_that_by_twins(layout, autocast, monkeypatch):
    """Three resolutions of odd sizes with dropout: f, its products and gradients of parameters."""
    for module in (kernels, triton_residual):
        monkeypatch.setattr(module, "BLOCK", 256)
        monkeypatch.setattr(module, "VJP_BLOCK", 256)
    torch.manual_seed(0)
    cell = MultiscaleCell((4, 4, 8), expansion=2, groups=2, dropout=0.3, init_std=0.3, post_affine=True)
    cell.to(DEVICE, memory_format=LAYOUTS[layout])
    shapes = [(2, 4, 5, 6), (2, 4, 3, 3), (2, 8, 2, 2)]
    z = [normal(*shape, layout=layout) for shape in shapes]
    x = normal(*shapes[0], layout=layout, dtype=torch.bfloat16 if autocast else torch.float32)
    sources, cotangents = [*z, x, *cell.parameters()], [torch.randn(shape, device=DEVICE) for shape in shapes]
    found, scope = [], SolveScope()
    for uses in (False, True):
        monkeypatch.setattr(ops, "_use_kernel", lambda *given, uses=uses: uses)
        with scope, torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            value = cell(tuple(z), (x,))
        assert [leaf.dtype for leaf in value] == [torch.bfloat16 if autocast else torch.float32] * 3
        assert [leaf.stride() for leaf in value] == [leaf.stride() for leaf in z]
        given = [leaf.to(value[0].dtype) for leaf in cotangents]
        grads = torch.autograd.grad(value, sources, given, retain_graph=True)  # weights are made once
        found.append([torch.cat([t.detach().double().flatten() for t in ts]) for ts in (value, grads)])
    # bfloat16 rounds differently in the interpreter, and rectifiers may then decide otherwise
    for mine, true in zip(*found, strict=True):
        assert float((mine - true).norm() / true.norm()) <= (5e-2 if autocast else 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_normalise(backend):
    assert group_norm(normal(0, 4, 3, 3), 2, backend=backend).shape == (0, 4, 3, 3)


def test_errors_say_what_was_expected():
    x = torch.zeros(2, 6, 3, 3)
    with pytest.raises(ValueError, match=r"a multiple of groups=4; got 6, nearest is 8"):
        group_norm(x, 4)
    with pytest.raises(ValueError, match=r"maps must be \(N, C, H, W\), got \(2, 6\)"):
        group_norm(x[..., 0, 0], 2)
    with pytest.raises(ValueError, match=r"both scale and offset or none; only weight"):
        group_norm(x, 2, torch.ones(6))
    with pytest.raises(ValueError, match=r"must be \(6,\), got \(3,\)"):
        group_norm(x, 2, torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"enlarge=2 needs `plus`"):
        group_norm(x, 2, enlarge=2)
    with pytest.raises(ValueError, match=r"over enlarge=2, rounded up, .* got \(2, 6, 7, 6\)"):
        group_norm(x, 2, plus=torch.zeros(2, 6, 7, 6), enlarge=2)
    with pytest.raises(ValueError, match=r"z must have the shape of t, \(2, 6, 3, 3\); got \(2, 6, 3, 2\)"):
        residual_norm(x, x[..., :2], 2)
    with pytest.raises(ValueError, match=r"mask must be \(N, C, 1, 1\), here \(2, 6, 1, 1\); got \(6, 1, 1\)"):
        residual_norm(x, x, 2, mask=torch.ones(6, 1, 1))
