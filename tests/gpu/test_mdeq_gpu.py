"""MDEQ on a CUDA device: both engines find the same, nothing waits, memory is flat in the budget."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F

import equipoise as eq
from equipoise.models.registry import create_model
from tests.gpu.devices import waiting_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FIXED = eq.Stop(rtol=0, max_steps=6)


def plan_of(solver=eq.Anderson(), stop=FIXED):
    return eq.Plan(solver, eq.Implicit(solver=solver, stop=stop), stop)


def settled(model):
    """The model with offsets that make its layer a contraction: rounding does not grow, and solves converge."""
    with torch.no_grad():
        for block in model.cell.blocks:
            block.norm_sum.bias.copy_(8.0 * (torch.arange(block.norm_sum.num_channels) % 2))
    return model


def twins(name, last=False, **overrides):
    """The same model with each engine: eager, captured."""
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    captured = settled(create_model(name, **overrides)).to("cuda", memory_format=layout)
    eager = copy.deepcopy(captured)
    eager.deq.engine, captured.deq.engine = "eager", "captured"
    return eager, captured


def images_of(*shape, last=False):
    layout = torch.channels_last if last else torch.contiguous_format
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator).cuda().contiguous(memory_format=layout)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12))


def train(model, images, autocast=False, steps=3):
    """Scores and gradients of some steps of gradient descent."""
    results = []
    for k in range(steps):
        torch.manual_seed(k)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            output = model(images)
        assert [state.dtype for state in output.states] == [torch.float32] * len(output.states)
        labels = torch.arange(output.logits[:, 0].numel(), device="cuda").view(output.logits[:, 0].shape)
        model.zero_grad(set_to_none=True)
        F.cross_entropy(output.logits.float(), labels % output.logits.shape[1]).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((output.logits.detach().float(), gradient))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
    return results


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Broyden()], ids=["anderson", "broyden"])
def test_engines_agree_in_training(solver, last):
    """float32, dropout, three steps: scores to 1e-3, gradients to 1e-2 of their norms."""
    eager, captured = twins("mdeq_digits", last, dropout=0.25, plan=plan_of(solver))
    images = images_of(16, 1, 9, 8, last=last)
    for (a, da), (b, db) in zip(train(captured, images), train(eager, images), strict=True):
        assert relative(a, b) <= 1e-3
        assert relative(da, db) <= 1e-2
    assert not captured.deq.capture.fallbacks
    assert captured.deq.capture.replayed == 3


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_engines_agree_in_bfloat16(last):
    """The state is float32; scores to 5e-2, and gradients no further apart than twice what bfloat16 itself costs."""
    eager, captured = twins("mdeq_digits", last, plan=plan_of())
    exact = copy.deepcopy(eager)
    images = images_of(16, 1, 8, 8, last=last)
    ours, theirs = train(captured, images, True, steps=1)[0], train(eager, images, True, steps=1)[0]
    truth = train(exact, images, False, steps=1)[0]
    assert relative(ours[0], theirs[0]) <= 5e-2
    assert relative(ours[1], theirs[1]) <= max(5e-2, 2 * relative(theirs[1], truth[1]))
    assert not captured.deq.capture.fallbacks


def test_engines_agree_on_segmentation_with_odd_sizes():
    eager, captured = twins("mdeq_shapes", inject="all", dropout=0.1, plan=plan_of())
    images = images_of(4, 3, 33, 27)
    for (a, da), (b, db) in zip(train(captured, images, steps=2), train(eager, images, steps=2), strict=True):
        assert a.shape == (4, 4, 33, 27)
        assert relative(a, b) <= 1e-3
        assert relative(da, db) <= 1e-2
    assert not captured.deq.capture.fallbacks


@pytest.mark.parametrize("autocast", [False, True])
def test_engines_agree_in_inference(autocast):
    eager, captured = twins("mdeq_cifar_tiny", plan=plan_of(stop=eq.Stop(rtol=1e-3, max_steps=40)))
    images = images_of(8, 3, 32, 32)
    for model in (eager, captured):
        model.train()
        with torch.no_grad():
            model.inject(images)  # gives BatchNorm some statistics
        model.eval()
    for _ in range(2):
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            ours, theirs = captured(images), eager(images)
        assert relative(ours.logits, theirs.logits) <= (5e-2 if autocast else 1e-2)
        assert (ours.solution.stats.steps - theirs.solution.stats.steps).abs().max() <= (10 if autocast else 1)
    assert captured.deq.capture.recorded == 1
    assert captured.deq.capture.replayed == 2


def test_a_fixed_budget_never_waits_for_the_device():
    model, images = twins("mdeq_digits", dropout=0.2, plan=plan_of())[1], images_of(8, 1, 8, 8)
    for _ in range(2):
        model(images).logits.square().mean().backward()
    with waiting_is_an_error():
        model(images).logits.square().mean().backward()
    assert model.deq.capture.replayed == 3


def test_memory_of_a_training_step_is_flat_in_the_budget():
    """Peak of allocated memory at 10 and at 40 steps, both ways: within 2 %; a stack of 10 layers takes more."""
    images = images_of(16, 3, 32, 32)

    def peak(model):
        model.cuda().train()
        for _ in range(2):
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            model(images).logits.square().mean().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    peaks = []
    for steps in (10, 40):
        model = twins("mdeq_cifar_tiny", plan=plan_of(stop=eq.Stop(rtol=0, max_steps=steps)))[0]
        peaks.append(peak(model))
        if steps == 10:
            peaks.append(peak(model.explicit(10)))
        del model
    assert peaks[2] <= 1.02 * peaks[0]
    assert peaks[1] > 1.25 * peaks[0]


@pytest.mark.filterwarnings("ignore:the backward solve:equipoise.EquilibriumWarning")
@pytest.mark.parametrize(
    ("name", "shape", "scores"),
    [
        ("mdeq_cifar_large_reg", (8, 3, 32, 32), (8, 10)),
        ("mdeq_imagenet_small", (2, 3, 224, 224), (2, 1000)),
        ("mdeq_camvid_small", (2, 3, 360, 480), (2, 11, 360, 480)),
        ("mdeq_cityscapes_small", (1, 3, 512, 1024), (1, 19, 512, 1024)),
    ],
)
def test_large_presets_take_a_step(name, shape, scores):
    """bfloat16 f, float32 state; finite gradients of every parameter."""
    torch.manual_seed(0)
    model = create_model(name).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(images_of(*shape))
    assert output.logits.shape == scores
    assert {state.dtype for state in output.states} == {torch.float32}
    output.logits.float().square().mean().backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
