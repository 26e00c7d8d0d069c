"""`group_norm` and `residual_norm` on a CUDA device at sizes of MDEQ: kernels against twins, graphs, the layer f."""

import pytest
import torch

from equipoise import ops
from equipoise._scope import SolveScope
from equipoise.models._multiscale import MultiscaleCell
from equipoise.ops.norm import group_norm, residual_norm
from tests.gpu.devices import waiting_is_an_error

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUTS = {"contiguous": torch.contiguous_format, "last": torch.channels_last}
# batch, channels, groups, height, width: hidden maps and states of TINY and LARGE, an ImageNet map, odd ones
SIZES = [
    (16, 120, 8, 32, 32),
    (16, 24, 8, 32, 32),
    (8, 160, 8, 32, 32),
    (8, 640, 8, 8, 8),
    (4, 1280, 8, 4, 4),
    (2, 32, 4, 56, 56),
    (2, 40, 8, 90, 61),
    (66, 160, 8, 32, 32),  # groups that do not fit in registers, but many
    (3, 6, 2, 7, 1),
]


def normal(*shape, dtype=torch.float32, layout="contiguous"):
    drawn = torch.randn(shape, device="cuda").to(dtype)
    return (drawn.contiguous(memory_format=LAYOUTS[layout]) if len(shape) == 4 else drawn).requires_grad_()


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def assert_same_by_both(operation, sources, tolerance):
    """Values by kernels and by twins to a relative error; gradients to 2e-3 at least: some rectifiers are undecided."""
    ours, theirs = (operation(backend) for backend in ("auto", "naive"))
    assert "Norm" in type(ours.grad_fn).__name__ or "Residual" in type(ours.grad_fn).__name__
    assert ours.stride() == theirs.stride()
    assert relative(ours, theirs) <= tolerance
    cotangent = torch.randn_like(theirs)
    found, expected = (torch.autograd.grad(y, sources, cotangent) for y in (ours, theirs))
    for mine, true in zip(found, expected, strict=True):
        assert mine.dtype == true.dtype
        assert relative(mine, true) <= max(2e-3, tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_normalised_and_rectified(size, dtype, layout):
    n, c, groups, *pixels = size
    x, weight, bias = normal(n, c, *pixels, dtype=dtype, layout=layout), normal(c), normal(c)
    assert_same_by_both(
        lambda backend: group_norm(x, groups, weight, bias, relu=True, backend=backend),
        (x, weight, bias),
        1e-5 if dtype == torch.float32 else 1e-2,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("small", "large", "enlarge"),
    [((16, 16), (32, 32), 2), ((4, 4), (32, 32), 8), ((14, 9), (55, 33), 4), ((8, 8), (8, 8), 1)],
)
def test_enlarged_and_added(small, large, enlarge, dtype, layout):
    x, plus = normal(8, 32, *small, dtype=dtype, layout=layout), normal(8, 32, *large, dtype=dtype, layout=layout)
    weight, bias = normal(32), normal(32)
    assert_same_by_both(
        lambda backend: group_norm(x, 8, weight, bias, plus, enlarge=enlarge, relu=True, backend=backend),
        (x, weight, bias, plus),
        1e-5 if dtype == torch.float32 else 1e-2,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_end_of_a_residual_block(size, dtype, layout):
    n, c, groups, *pixels = size
    t, x = (normal(n, c, *pixels, dtype=dtype, layout=layout) for _ in range(2))
    z, weights = normal(n, c, *pixels, layout=layout), [normal(c) for _ in range(4)]
    mask = ((torch.rand(n, c, 1, 1, device="cuda") >= 0.3) / 0.7).to(dtype)
    assert_same_by_both(
        lambda backend: residual_norm(
            t, z, groups, tuple(weights[:2]), tuple(weights[2:]), mask=mask, x=x, backend=backend
        )[0],
        (t, z, x, *weights),
        1e-5 if dtype == torch.float32 else 1e-2,
    )


def layer(layout, autocast):
    torch.manual_seed(0)
    cell = MultiscaleCell((24, 24, 48), dropout=0.25, init_std=0.05)
    cell.cuda().to(memory_format=LAYOUTS[layout])
    shapes = [(8, 24, 31, 32), (8, 24, 16, 16), (8, 48, 8, 8)]
    z = [normal(*shape, layout=layout) for shape in shapes]
    x = normal(*shapes[0], layout=layout, dtype=torch.bfloat16 if autocast else torch.float32)
    return cell, z, x


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_layer_by_kernels_is_that_by_twins(layout, autocast, monkeypatch):
    """f and gradients of everything: to 1e-4 and 3e-3 in float32, and to twice what bfloat16 costs."""
    cell, z, x = layer(layout, autocast)
    sources, scope = [*z, x, *cell.parameters()], SolveScope()
    cotangents = [torch.randn_like(leaf) for leaf in z]

    def found(kernels, narrow):
        with monkeypatch.context() as patch, scope, torch.autocast("cuda", torch.bfloat16, enabled=narrow):
            if not kernels:
                patch.setattr(ops.norm, "_use_kernel", lambda *given: False)
            value = cell(tuple(z), (x if narrow else x.to(z[0].dtype),))
        assert [leaf.dtype for leaf in value] == [torch.bfloat16 if narrow else torch.float32] * 3
        assert [leaf.stride() for leaf in value] == [leaf.stride() for leaf in z]
        given = [leaf.to(value[0].dtype) for leaf in cotangents]
        grads = torch.autograd.grad(value, sources, given, retain_graph=True)  # weights are made once
        return [torch.cat([t.detach().double().flatten() for t in ts]) for ts in (value, grads)]

    truth = found(False, False)
    ours, theirs = found(True, autocast), found(False, autocast)
    for mine, plain, true, bar in zip(ours, theirs, truth, (1e-4, 3e-3), strict=True):
        assert relative(mine, true) <= (2 * relative(plain, true) if autocast else bar)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_in_a_graph(layout):
    """Recorded on one state and replayed on another: what an ordinary evaluation gives; nothing waits."""
    cell, z, x = layer(layout, True)
    scope, other = SolveScope(), [torch.randn_like(leaf) for leaf in z]
    for leaf in z:
        leaf.requires_grad_(False)

    def f():
        with torch.no_grad(), scope, torch.autocast("cuda", torch.bfloat16):
            return cell(tuple(z), (x.detach(),))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f()
        with waiting_is_an_error():
            f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = f()
    for leaf, value in zip(z, other, strict=True):
        leaf.copy_(value)
    graph.replay()
    for mine, true in zip(recorded, f(), strict=True):
        assert relative(mine, true) <= 1e-3
