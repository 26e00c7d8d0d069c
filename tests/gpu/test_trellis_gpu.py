"""The kernels around the TrellisNet layer on a CUDA device: at full width, in a graph, and in the model."""

import copy

import pytest
import torch

import equipoise as eq
from equipoise.models.deq_trellisnet import DEQTrellisNet, DEQTrellisNetConfig
from equipoise.ops import drop_taps, gather_taps, trellis_cell

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BARS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# batch, time, features, dilation
SIZES = [(4, 70, 1400, 1), (3, 33, 129, 2), (2, 5, 24, 7)]


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


def wide(*tensors):
    return [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]


def relative(found, truth):
    truth = truth.detach().double()
    return float((found.detach().double() - truth).norm() / truth.norm().clamp_min(1e-30))


# Kernels


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_cell_against_its_twin_in_float64(size, dtype):
    batch, time, features, stride = size
    pre = normal(batch, time, 4 * features, dtype=dtype).requires_grad_()
    plus = normal(batch, time, 4 * features, dtype=dtype).requires_grad_()
    start = normal(batch, stride, features).requires_grad_()
    exact = wide(pre, start, plus)
    h, c = trellis_cell(pre, start, plus, dtype=torch.float32, backend="triton")
    truth = trellis_cell(*exact, backend="naive")
    assert relative(h, truth[0]) <= 5e-6
    assert relative(c, truth[1]) <= BARS[dtype]
    cotangent = normal(batch, time, features)
    found = torch.autograd.grad(h, (pre, start, plus), cotangent)
    for ours, theirs in zip(found, torch.autograd.grad(truth[0], exact, cotangent.double()), strict=True):
        assert relative(ours, theirs) <= BARS[dtype]
    with torch.no_grad():
        alone, _ = trellis_cell(pre, start, plus, dtype=torch.float32, need_c=False, backend="triton")
    assert torch.equal(alone, h)


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_taps_against_their_twin_in_float64(size, taps, dtype):
    batch, time, features, dilation = size
    h = normal(batch, time, features).requires_grad_()
    before = normal(batch, (taps - 1) * dilation, features).requires_grad_()
    mask = (torch.rand(batch, 1, features, device="cuda") > 0.3) / 0.7
    options = {"kernel_size": taps, "dilation": dilation}
    exact = wide(h, before, mask)
    rows = gather_taps(h, before, mask, **options, dtype=dtype, backend="triton")
    truth = gather_taps(*exact, **options, backend="naive")
    assert rows.dtype == dtype
    assert relative(rows, truth) <= BARS[dtype]
    cotangent = normal(*rows.shape, dtype=dtype)
    found = torch.autograd.grad(rows, (h, before), cotangent, materialize_grads=True)
    expected = torch.autograd.grad(truth, exact[:2], cotangent.double(), materialize_grads=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(ours, theirs) <= 2e-6 or theirs.numel() == 0


@pytest.mark.parametrize(("out", "columns", "past"), [(56, 2800, 1400), (7, 33, 11)])
def test_dropped_weights_against_their_twin(out, columns, past):
    weight, kept = normal(out, columns).requires_grad_(), torch.rand(out, past, device="cuda") > 0.5
    for dtype in BARS:
        ours, theirs = (drop_taps(weight, kept, 2.0, dtype=dtype, backend=backend) for backend in ("triton", "naive"))
        assert torch.equal(ours, theirs)
        cotangent = torch.randn_like(ours)
        grads = [torch.autograd.grad(output, weight, cotangent)[0] for output in (ours, theirs)]
        assert torch.equal(*grads)


def test_a_graph_can_hold_them_and_sees_new_values():
    h, before, mask = normal(2, 9, 40), normal(2, 1, 40), normal(2, 1, 40)
    weight, u, c0 = 0.1 * normal(160, 80), normal(2, 9, 160), normal(2, 1, 40)
    u.requires_grad_()

    def f(h):
        rows = gather_taps(h, before, mask, kernel_size=2, dtype=torch.bfloat16)
        return trellis_cell(rows @ weight.bfloat16().mT, c0, u, dtype=torch.float32)[0]

    def forward_and_product():
        point = h.detach().requires_grad_()
        with torch.enable_grad():
            value = f(point)
        return value.detach(), torch.autograd.grad(value, point, torch.ones_like(value))[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        forward_and_product()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward_and_product()
    for _ in range(2):
        h.copy_(normal(2, 9, 40))
        mask.copy_(normal(2, 1, 40))
        graph.replay()
        for ours, theirs in zip(found, forward_and_product(), strict=True):
            assert torch.equal(ours, theirs)


# The model


def model_of(engine="eager", **changes):
    adjoint = eq.Implicit(solver=eq.Anderson(memory=5), stop=eq.Stop(rtol=0, max_steps=12))
    plan = eq.Plan(eq.Anderson(memory=5), adjoint, eq.Stop(rtol=0, max_steps=16))
    drops = {"dropout": 0.4, "dropout_in": 0.4, "dropout_hidden": 0.3, "dropout_words": 0.1, "dropconnect": 0.5}
    sizes = {"vocab_size": 97, "embedding_size": 40, "hidden_size": 64, "init_std": 0.1}
    torch.manual_seed(0)
    model = DEQTrellisNet(DEQTrellisNetConfig(**{**sizes, **drops, "weight_norm": False, "plan": plan, **changes}))
    model.deq.engine = engine
    return model.cuda()


def train(model, dtype=None, steps=3, scale=1.0):
    """Losses, and the gradients of the last of some steps of gradient descent with memory carried on."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(97, (6, 20 * steps + 1), generator=generator).cuda()
    losses, memory = [], None
    for k in range(steps):
        torch.manual_seed(k)
        part = tokens[:, 20 * k : 20 * k + 21]
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            output = model(part[:, :-1], part[:, 1:], memory)
        memory = output.memory
        model.zero_grad(set_to_none=True)
        (scale * output.loss).backward()
        losses.append(output.losses.detach())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 / scale * p.grad
    return torch.stack(losses), [p.grad / scale for p in model.parameters()]


@pytest.fixture
def twins_only(monkeypatch):
    def only():
        for module in ("trellis", "taps"):
            monkeypatch.setattr(f"equipoise.ops.{module}.use_differentiable_kernel", lambda *args: False)

    return only


@pytest.mark.parametrize("changes", [{}, {"form": "full"}, {"kernel_size": 3, "dilation": 2}, {"chunk_size": 7}])
def test_training_with_kernels_equals_training_with_twins(twins_only, changes):
    """float32: losses to 1e-5, gradients to 1e-3 of their norms after 3 updates and some 16 Anderson steps each."""
    ours = train(model_of(**changes))
    twins_only()
    theirs = train(model_of(**changes))
    assert relative(ours[0], theirs[0]) <= 1e-5
    for mine, true in zip(ours[1], theirs[1], strict=True):
        assert relative(mine, true) <= 1e-3


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 4096.0)], ids=str)
@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_training_under_autocast(dtype, scale, engine):
    """Losses to 1 %, gradients to 10 % of those in float32; the engine is the one asked for."""
    exact = train(model_of())
    model = model_of(engine)
    losses, grads = train(model, dtype, scale=scale)
    assert relative(losses, exact[0]) <= 1e-2
    for mine, true in zip(grads, exact[1], strict=True):
        assert mine.dtype == torch.float32
        assert relative(mine, true) <= 0.1
    assert engine == "eager" or (model.deq.capture.replayed == 3 and not model.deq.capture.fallbacks)


def test_both_engines_draw_the_same_masks():
    """Losses in float32, to rounding; another draw would change them by percents."""
    eager = model_of()
    captured = copy.deepcopy(eager)
    captured.deq.engine = "captured"
    ours, theirs = train(captured), train(eager)
    assert relative(ours[0], theirs[0]) <= 1e-4
