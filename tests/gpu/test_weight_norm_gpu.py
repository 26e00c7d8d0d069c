"""`normalised_rows` on a CUDA device at sizes of language models: values, graphs, layers, models, times.

    python -m tests.gpu.test_weight_norm_gpu

prints microseconds beside those of the plain formula, and of a whole forward pass beside its solve.
"""

import itertools

import pytest
import torch
from torch import nn

from equipoise import CapturedForward, Picard, Plan, Stop
from equipoise.adjoints import Implicit
from equipoise.models import create_model
from equipoise.nn import attention, norm
from equipoise.ops import normalised_rows
from tests.gpu.devices import waiting_is_an_error
from tests.gpu.test_hyper_step_gpu import microseconds, replayable

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The recurrent weight and the injection of a TrellisNet, weights of Transformers, a row longer than is kept, odd ones.
SIZES = [(5600, 2800), (5600, 800), (768, 256), (2100, 700), (700, 48000), (7, 1), (1, 127), (33, 4097)]


def drawn(shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype), torch.rand(shape[0], 1, device="cuda").to(dtype)


def plain(v, g, dtype):
    """What the operation replaces, with the cast of autocast."""
    return (v * (g / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(1e-12))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values(size, dtype):
    """To one rounding, and the same bits every time."""
    v, g = drawn(size)
    found = normalised_rows(v, g, floor=1e-12, dtype=dtype)
    exact = g.double() * v.double() / v.double().norm(dim=1, keepdim=True)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=0)
    assert torch.equal(normalised_rows(v, g, floor=1e-12, dtype=dtype), found)


def test_rows_that_have_no_norm_are_as_in_the_twin():
    v, g = drawn((7, 300))
    for row, value in enumerate((0.0, 1e-30, 1e30, torch.inf, torch.nan, 1e-14)):
        v[row] = value
    for floor in (0.0, 1e-12):
        kernel, twin = (normalised_rows(v, g, floor=floor, backend=backend) for backend in ("triton", "naive"))
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=0, equal_nan=True)


def test_a_layer_in_a_graph():
    """One launch, and weights that were changed in place count."""
    layer = norm.weight_norm(nn.Linear(700, 300, device="cuda"))
    kept = {}

    @torch.no_grad()
    def work():
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            kept["weight"] = layer.weight

    work()  # compiles
    with waiting_is_an_error():
        work()
    graph = replayable(work)
    recorded = kept["weight"]
    with torch.no_grad():
        layer.weight_v.normal_()
        layer.weight_g.uniform_(1, 2)
    graph.replay()
    torch.cuda.synchronize()
    assert recorded.dtype == torch.bfloat16
    expected = plain(layer.weight_v, layer.weight_g, torch.float32)
    torch.testing.assert_close(recorded.float(), expected, rtol=4e-3, atol=0)


# Models

MODELS = {
    "trellisnet": ("deq_trellisnet_small", {"vocab_size": 500}),
    "transformer": (
        "deq_transformer_wt103",
        {"vocab_size": 500, "d_model": 64, "heads": 4, "d_inner": 96, "cutoffs": (), "memory_length": 20},
    ),
}


def built(name, steps=6):
    torch.manual_seed(0)
    preset, options = MODELS[name]
    model = create_model(preset, **options).cuda().eval()
    model.deq.plan, model.deq.eval_plan = Plan(Picard(), Implicit(), Stop(rtol=0, max_steps=steps)), None
    return model


def tokens_of(batch, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(500, (batch, length), generator=generator).cuda()


def assert_near(found, expected, tolerance):
    found, expected = found.double(), expected.double()
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_gradients_is_the_one_with_them(name, monkeypatch):
    """Losses and memory over segments of several lengths, step by step."""
    monkeypatch.setattr(attention, "_kept", {})
    model, memories = built(name), [None, None]
    model.deq.engine = "eager"
    for seed, length in enumerate((9, 30, 1, 9)):
        tokens = tokens_of(3, length, seed)
        with torch.no_grad():
            ours = model(tokens, tokens, memories[0])
        theirs = model(tokens, tokens, memories[1])
        assert_near(ours.losses, theirs.losses.detach(), 1e-4)
        memories = [ours.memory, theirs.memory]
        pairs = (memory.values() if isinstance(memory, dict) else memory for memory in memories)
        for mine, other in zip(*pairs, strict=True):
            assert not mine.requires_grad
            assert_near(mine, other, 1e-4)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_forward_pass_outlives_what_it_was_made_with(name, autocast, monkeypatch):
    """Other lengths between recording and replay, and memory that is handed out anew: tables are still there."""
    monkeypatch.setattr(attention, "_kept", {})
    model = built(name)
    fast = CapturedForward(model, warn=False)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        memory = model(tokens_of(3, 30, 0), None).memory
        for seed in range(3):
            fast(tokens_of(3, 12, seed), tokens_of(3, 12, seed), memory)
        assert fast.recorded == 1, fast.fallbacks
        for length in (1, 2, 5, 40):
            model(tokens_of(3, length, 1), None, memory)
        taken = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(8)]
        tokens = tokens_of(3, 12, 7)
        found, expected = fast(tokens, tokens, memory), model(tokens, tokens, memory)
        assert fast.replayed >= 2
    assert_near(found.losses, expected.losses, 2e-2 if autocast else 1e-4)
    assert all(tensor.isnan().all() for tensor in taken)


# Times


def cost(operation, size):
    """Weights in turn, so that they are not in the cache."""
    turns = itertools.cycle([drawn(size) for _ in range(4)])
    return microseconds(lambda: operation(*next(turns), torch.bfloat16))


def ours(v, g, dtype):
    return normalised_rows(v, g, floor=1e-12, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES[:4], ids=str)
def test_it_is_faster_than_what_it_replaces(size):
    assert cost(ours, size) < cost(plain, size)


@torch.no_grad()
def cost_of_a_model(name, steps):
    """A whole forward pass in a graph, in microseconds."""
    model, tokens = built(name, steps), tokens_of(12, 70, 0)
    with torch.autocast("cuda", torch.bfloat16):
        memory = model(tokens, tokens).memory
        fast = CapturedForward(model, warn=False)
        for _ in range(3):
            fast(tokens, tokens, memory)
        assert fast.recorded == 1, fast.fallbacks
        times = []
        for _ in range(33):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # so that the host is ahead
            first.record()
            fast(tokens, tokens, memory)
            last.record()
            torch.cuda.synchronize()
            times.append(1e3 * first.elapsed_time(last))
    return sorted(times[3:])[15]


def _table():
    from equipoise.ops.weight_norm import triton as kernels

    share, several = kernels.SHARE, kernels.SEVERAL
    for size in SIZES[:5]:
        best = size[0] * size[1] * 6 / 4.8e6  # at 4.8 TB/s
        print(f"{size[0]:5} x {size[1]:<6} plain {cost(plain, size):7.1f}   bytes alone {best:6.1f}", end="")
        for kernels.SHARE, kernels.SEVERAL in itertools.product((8, 16, 32), (1024, 2048)):
            print(f"   {kernels.SHARE}/{kernels.SEVERAL}: {cost(ours, size):6.1f}", end="", flush=True)
        print(" µs")
    kernels.SHARE, kernels.SEVERAL = share, several
    for name in MODELS:
        few, many = (cost_of_a_model(name, steps) for steps in (2, 12))
        step = (many - few) / 10
        print(f"{name}: a step {step:.1f}, all else {few - 2 * step:.1f} µs")


if __name__ == "__main__":
    _table()
