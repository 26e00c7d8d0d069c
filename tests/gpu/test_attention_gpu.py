"""Relative attention by its kernels on a CUDA device, at the shapes that are measured, and in captured solves."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch

import equipoise as eq
from equipoise.bench.cells import SHAPES
from equipoise.models.deq_transformer import DEQTransformer, DEQTransformerConfig
from equipoise.nn.attention import RelativeAttention
from equipoise.ops import attend
from tests.gpu.devices import losses_in_training
from tests.gradients import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MEASURED = ("copy", "small", "medium")
# batch, heads, queries, memory, features of a head, local size, columns ahead of those of distances
ODD = [
    (3, 5, 71, 0, 8, None, 1),
    (2, 3, 130, 65, 20, None, 6),
    (2, 2, 150, 300, 70, 50, 1),
    (1, 2, 33, 100, 128, 7, 2),
    (2, 1, 1, 40, 64, None, 1),
    (1, 1, 1, 0, 1, None, 1),
    (1, 1, 200, 1, 3, 1, 1),
]


def arguments(batch, heads, length, past, features, ahead, dtype=torch.float32):
    """Queries, keys, values, scores by distance and bias, laid out as a layer does."""
    keys = past + length
    joint = torch.randn(batch, keys, 3, heads, features, device="cuda").to(dtype)
    query, key, value = (part.transpose(1, 2) for part in joint.unbind(2))
    by_distance = torch.randn(heads, batch, length, ahead + keys, device="cuda").to(dtype).transpose(0, 1)
    bias = torch.randn(heads, features, device="cuda").to(dtype)
    return [tensor.requires_grad_() for tensor in (query[:, :, past:], key, value, by_distance, bias)]


def measured_arguments(shape):
    length = shape.length
    ahead = 1 + -(length + 1) % 8
    return arguments(shape.batch, shape.heads, length, 0, shape.width // shape.heads, ahead)


def assert_like_the_twin(given, bars, half=None, local_size=None):
    """Values and all gradients against the plain twin in float64, relative to norms."""
    scale = given[0].shape[-1] ** -0.5
    with nullcontext() if half is None else torch.autocast("cuda", half):
        out = attend(*given, scale=scale, local_size=local_size, backend="triton")
    assert out.dtype == (half or given[0].dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    truth = attend(*exact, scale=scale, local_size=local_size, backend="naive")
    assert relative_error(out.detach().double(), truth.detach()) <= bars[0]
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, given, cotangent, retain_graph=True)
    expected = torch.autograd.grad(truth, exact, cotangent.double())
    for source, ours, theirs in zip(given, found, expected, strict=True):
        assert ours.dtype == source.dtype
        # Where one key is in sight, gradients of scores are exactly zero.
        assert (ours.double() - theirs).norm() <= bars[1] * max(theirs.norm(), 0.1 * cotangent.double().norm())
    again = torch.autograd.grad(out, given, cotangent)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("name", MEASURED)
def test_float32_at_the_measured_shapes(name):
    assert_like_the_twin(measured_arguments(SHAPES[name]), (1e-5, 1e-5))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MEASURED)
def test_autocast_at_the_measured_shapes(name, half):
    eps = torch.finfo(half).eps
    assert_like_the_twin(measured_arguments(SHAPES[name]), (2 * eps, 4 * eps), half)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", ODD)
def test_odd_sizes(size, dtype):
    *sizes, local_size, ahead = size
    eps = torch.finfo(dtype).eps
    bars = (1e-5, 1e-5) if dtype == torch.float32 else (2 * eps, 4 * eps)
    assert_like_the_twin(arguments(*sizes, ahead, dtype), bars, local_size=local_size)


def test_scores_that_no_pair_has_get_a_gradient_of_zero():
    """Memory that is handed out again after being filled with NaN."""
    given = arguments(2, 2, 100, 30, 16, 4)
    filled = [torch.full_like(given[3], torch.nan) for _ in range(4)]
    del filled
    out = attend(*given, scale=0.25, local_size=20, backend="triton")
    (found,) = torch.autograd.grad(out.sin().sum(), given[3])
    delta = torch.arange(given[3].shape[3] - 1, -1, -1, device="cuda")  # of columns
    used = (delta < 20) & (delta <= torch.arange(30, 130, device="cuda")[:, None])
    assert float(found[..., ~used].abs().max()) == 0
    assert float((found[..., used] != 0).float().mean()) > 0.9


def test_no_waiting_for_the_device():
    given = arguments(2, 2, 40, 0, 16, 1)
    for attempt in range(2):
        if attempt:  # the first call compiles
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that this mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
        try:
            out = attend(*given, scale=0.25)
            grads = torch.autograd.grad(out, given, torch.ones_like(out))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_a_replay_sees_new_values():
    given = arguments(2, 4, 70, 10, 24, 3)
    cotangent = torch.randn(2, 70, 4, 24, device="cuda")

    def work():
        out = attend(*given, scale=0.2)
        return out.detach(), *torch.autograd.grad(out, given, cotangent)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    with torch.no_grad():
        for tensor in (*given[1:], cotangent):
            tensor.mul_(0.7)
    graph.replay()
    for ours, theirs in zip(recorded, work(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("past", [0, 37])
@pytest.mark.parametrize("name", MEASURED)
def test_the_layer_in_float32(name, past):
    shape = SHAPES[name]
    z, u, memory = layer_inputs(shape, past)
    weights, results = torch.randn_like(z), []
    for layer in layers(shape):
        kept = layer.past(*memory) if past else None
        out = layer(z, u, layer.positions(shape.length, past), kept)
        results.append((out.detach(), *torch.autograd.grad(out, [z, u, *layer.parameters()], weights)))
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) <= 5e-5


@pytest.mark.parametrize("injection", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MEASURED)
def test_the_layer_under_autocast_is_as_exact_as_the_plain_one(name, injection):
    shape = SHAPES[name]
    z, u, _ = layer_inputs(shape, 0)
    weights, errors = torch.randn_like(z), []
    for layer in layers(shape):
        wide = copy.deepcopy(layer).double()
        exact = wide(z.double(), u.double(), wide.positions(shape.length))
        truth = [exact.detach(), *torch.autograd.grad(exact, [z, *wide.parameters()], weights.double())]
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(z, u.to(injection), layer.positions(shape.length))
            assert out.dtype == torch.bfloat16
        found = [out.detach(), *torch.autograd.grad(out.float(), [z, *layer.parameters()], weights)]
        errors.append([relative_error(a, b) for a, b in zip(found, truth, strict=True)])
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 1.5 * theirs + 5e-3


def layer_inputs(shape, past):
    z = torch.randn(shape.batch, shape.length, shape.width, device="cuda", requires_grad=True)
    u = torch.randn(shape.batch, shape.length, 3 * shape.width, device="cuda", requires_grad=True)
    memory = torch.randn(shape.batch, past, shape.width), torch.randn(shape.batch, past, 3 * shape.width)
    return z, u, tuple(part.cuda() for part in memory)


def layers(shape):
    """The same layer with kernels, which must be what "auto" means here, and without."""
    fused = RelativeAttention(shape.width, shape.heads).cuda()
    plain = RelativeAttention(shape.width, shape.heads, backend="naive").cuda()
    plain.load_state_dict(fused.state_dict())
    return fused, plain


@pytest.fixture
def launches(monkeypatch):
    """How often the forward kernel was launched."""
    from equipoise.ops.attention import triton as kernels

    made, launch = [], kernels.forward

    def counted(*args):
        made.append(args[0].shape)
        return launch(*args)

    monkeypatch.setattr(kernels, "forward", counted)
    return made


@pytest.mark.parametrize("memory_length", [0, 24])
@pytest.mark.parametrize("autocast", [False, True])
def test_captured_training_equals_eager_training(autocast, memory_length, launches):
    """Three segments, a step of AdamW after each, budgets fixed: losses to 1e-3 (bfloat16: 3e-2)."""
    torch.manual_seed(0)
    stop = eq.Stop(rtol=0, max_steps=8)
    plan = eq.Plan(eq.Anderson(), eq.Implicit(solver=eq.Broyden(), stop=stop), stop)
    options = {"memory_length": memory_length, "local_size": 30, "dropout": 0.1, "plan": plan}
    captured = DEQTransformer(DEQTransformerConfig(50, d_model=64, heads=4, d_inner=128, **options)).cuda()
    eager = copy.deepcopy(captured)
    tokens = torch.randint(50, (4, 3, 41), device="cuda")
    losses = []
    for model, engine in ((eager, "eager"), (captured, "captured")):
        model.deq.engine = engine
        losses.append(losses_in_training(model, tokens, autocast))
        assert launches
        launches.clear()
    assert relative_error(losses[1], losses[0]) <= (3e-2 if autocast else 1e-3)
    assert captured.deq.capture.replayed == 3
    assert not captured.deq.capture.fallbacks


def test_a_captured_solve_by_kernels_equals_the_eager_one_without():
    """To a tolerance, in inference; the plain path and the eager engine are the reference."""
    torch.manual_seed(0)
    stop = eq.Stop(rtol=1e-5, max_steps=60)
    plan = eq.Plan(eq.Anderson(), eq.Implicit(stop=stop), stop)
    config = DEQTransformerConfig(50, d_model=64, heads=4, d_inner=128, plan=plan)
    captured = DEQTransformer(config).cuda().eval()
    with torch.no_grad():
        captured.injection.weight.mul_(50)  # an injection as strong as a trained one: f contracts
    plain = copy.deepcopy(captured)
    captured.deq.engine, plain.deq.engine = "captured", "eager"
    plain.deq.cell.attention.backend = "naive"
    tokens = torch.randint(50, (5, 77), device="cuda")
    with torch.no_grad():
        ours, theirs = captured(tokens).solution, plain(tokens).solution
    assert captured.deq.capture.replayed == 1
    assert bool(ours.stats.ok.all())
    assert relative_error(ours.value, theirs.value) <= 1e-4
