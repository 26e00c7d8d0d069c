"""MDEQ: the layer against its formulas, gradients, constants of a solve, the explicit twin, transfer, presets."""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise import Anderson, Broyden, Implicit, Picard, Plan, Stop, Unroll, memory_report
from equipoise._scope import SolveScope
from equipoise._tree import tree_tensors
from equipoise.models.mdeq import MDEQ, MDEQConfig, published_plan
from equipoise.models.outputs import VisionOutput
from equipoise.models.registry import create_model
from equipoise.models.vision_heads import SegmentationHead, resized, resized_by_products
from equipoise.penalties import jacobian_penalty
from tests.captured import assert_engines_agree
from tests.gradients import ROBUST, TIGHT, all_converged, normal, relative_error

EXACT_PLAN = Plan(ROBUST, Implicit(solver=ROBUST, stop=TIGHT), TIGHT)
SMALL = MDEQConfig(
    num_classes=3,
    channels=(8, 4),
    head_channels=(2, 3),
    final_channels=6,
    expansion=2,
    init_std=0.3,
    groups=2,
    plan=EXACT_PLAN,
)
SEGMENT = {"task": "segmentation", "final_channels": None}


def settled(model):
    """The model with noise in its parameters, and offsets that make its layer a contraction.

    They are far apart within each group, so that normalisation divides by more than what the state contributes.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            if name.endswith("norm_sum.bias"):
                parameter.copy_(0.1 * noise + 8 * (torch.arange(len(parameter)) % 2))
            elif parameter.dim() == 1:
                parameter.add_(0.1 * noise)
    return model


def model_of(seed=0, **changes):
    torch.manual_seed(seed)
    return settled(MDEQ(dataclasses.replace(SMALL, **changes)).double())


def images_of(*size, batch=3, channels=3, seed=0, dtype=torch.float64):
    return normal(batch, channels, *(size or (6, 6)), seed=seed, dtype=dtype)


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def loss_of(output):
    logits = output.logits
    return (logits.sin() * torch.arange(logits.numel()).view(logits.shape).cos()).sum()


# The formulas, written out


def group_norm(x, groups, weight=None, bias=None):
    n, c, h, w = x.shape
    grouped = x.reshape(n, groups, -1)
    centred = grouped - grouped.mean(dim=2, keepdim=True)
    scaled = centred / (centred.square().mean(dim=2, keepdim=True) + 1e-5).sqrt()
    y = scaled.reshape(n, c, h, w)
    return y if weight is None else y * weight[:, None, None] + bias[:, None, None]


def batch_norm(x, p, name, training):
    mean, var = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), unbiased=False)
    if not training:
        mean, var = p[f"{name}.running_mean"], p[f"{name}.running_var"]
    y = (x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
    if f"{name}.weight" not in p:
        return y
    return y * p[f"{name}.weight"][:, None, None] + p[f"{name}.bias"][:, None, None]


def weight_of(p, name):
    if f"{name}.weight" in p:
        return p[f"{name}.weight"]
    v, g = p[f"{name}.weight_v"], p[f"{name}.weight_g"]
    return torch.stack([g[o] * v[o] / v[o].norm() for o in range(len(v))])


def layer(p, z, x, groups, masks=None):
    """f by the formulas of the paper; `p` is the cell's state_dict, `masks` one dropout mask per resolution."""

    def norm(y, name, count=groups):
        return group_norm(y, count, p.get(f"{name}.weight"), p.get(f"{name}.bias"))

    def conv(y, name, stride=1):
        weight = weight_of(p, name)
        return F.conv2d(y, weight, stride=stride, padding=weight.shape[-1] // 2)

    r = []
    for i, state in enumerate(z):
        block = f"blocks.{i}"
        t = norm(conv(state, f"{block}.widen"), f"{block}.norm_hidden").clamp(min=0)
        t = conv(t, f"{block}.narrow")
        t = t if masks is None else t * masks[i]
        t = t + x[i] if i < len(x) else t
        t = norm(t, f"{block}.norm_sum") + state
        r.append(norm(t.clamp(min=0), f"{block}.norm_out"))
    if len(z) == 1:
        return tuple(r)
    result = []
    for i in range(len(z)):
        total = r[i]
        for j in range(len(z)):
            path, y = f"fusion.paths.{j}_to_{i}", r[j]
            if j > i:
                y = norm(conv(y, f"{path}.0"), f"{path}.1")
                y = y.repeat_interleave(2 ** (j - i), dim=2).repeat_interleave(2 ** (j - i), dim=3)
                total = total + y[:, :, : total.shape[2], : total.shape[3]]
            elif j < i:
                for level in range(i - j):
                    y = y.clamp(min=0) if level else y
                    y = norm(conv(y, f"{path}.{3 * level}", stride=2), f"{path}.{3 * level + 1}")
                total = total + y
        mixed = conv(total.clamp(min=0), f"mixings.{i}.1")
        result.append(norm(mixed, f"mixings.{i}.2", groups // 2))
    return tuple(result)


def states_of(model, x, seed=5):
    return tuple(normal(*state.shape, seed=seed + k) for k, state in enumerate(model.cell.initial_state(x)))


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (9, 2)], ids=str)
@pytest.mark.parametrize(
    ("channels", "options"),
    [
        ((8,), {}),
        ((8, 4), {}),
        ((4, 8, 8), {"post_affine": True}),
        ((8, 4, 4, 8), {"weight_norm": False}),
        ((8, 4, 4), {"inject": "all", "expansion": 3}),
    ],
    ids=["single", "two", "affine", "four", "all"],
)
def test_the_layer_is_that_of_the_formulas(channels, options, size):
    """float64, rounding only; odd sizes included."""
    model = model_of(channels=channels, head_channels=channels, **options).eval()
    x = model.injections(model.stem(images_of(*size)))  # as they are: `inject` rounds sizes up
    assert len(x) == (len(channels) if options.get("inject") == "all" else 1)
    z = states_of(model, x)
    want = layer(model.cell.state_dict(), z, x, groups=2)
    for mine, true in zip(model.cell(z, x), want, strict=True):
        assert relative_error(mine, true) <= 1e-13


def test_coarser_states_have_half_the_pixels():
    model = model_of(channels=(8, 4, 4), head_channels=(1, 1, 1))
    shapes = [tuple(s.shape[1:]) for s in model.cell.initial_state(model.inject(images_of(7, 10)))]
    assert shapes == [(8, 8, 12), (4, 4, 6), (4, 2, 3)]
    one = model_of(channels=(8, 4, 4), head_channels=(1, 1, 1), downsamplings=2)
    shapes = [tuple(s.shape[1:]) for s in one.cell.initial_state(one.inject(images_of(9, 10)))]
    assert shapes == [(8, 4, 4), (4, 2, 2), (4, 1, 1)]
    shapes = [tuple(s.shape[1:]) for s in model.cell.initial_state((images_of(7, 10),))]  # of the layer alone
    assert shapes == [(8, 7, 10), (4, 4, 5), (4, 2, 3)]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"details": 4, "downsamplings": 1}])
def test_images_of_any_size_are_continued_by_their_last_rows_and_columns(options):
    """A border of odd maps is one that a model has not met; it spreads through all of an equilibrium."""
    model = model_of(**SEGMENT, **options).eval()
    images, unit = images_of(7, 10), 2 ** (len(model.config.channels) - 1 + model.config.downsamplings)
    rows, columns = (-(-size // unit) * unit for size in (7, 10))
    larger = F.pad(images, (0, columns - 10, 0, rows - 7), mode="replicate")
    ours, theirs = model(images), model(larger)
    assert ours.logits.shape[2:] == (7, 10)
    assert torch.equal(ours.logits, theirs.logits[..., :7, :10])
    assert torch.equal(model.explicit(3)(images).logits, model.explicit(3)(larger).logits[..., :7, :10])


@pytest.mark.parametrize("downsamplings", [0, 1, 2, 3])
@pytest.mark.parametrize("resolutions", [1, 2, 3])
def test_the_stem(downsamplings, resolutions):
    """Strides come first; the 1×1 convolution is left out without downsampling and at most two resolutions."""
    channels = (4,) * resolutions
    model = model_of(channels=channels, head_channels=channels, downsamplings=downsamplings).train()
    images = images_of(17, 16, batch=2)
    p, y = model.stem.state_dict(), images
    mixed = downsamplings > 0 or resolutions > 2
    layers = max(2, downsamplings)
    assert sum(isinstance(part, nn.Conv2d) for part in model.stem) == layers + mixed
    for k in range(layers + mixed):
        stride = 2 if k < downsamplings else 1
        weight = p[f"{3 * k}.weight"]
        assert weight.shape[-1] == (1 if k == layers else 3)
        y = F.conv2d(y, weight, stride=stride, padding=weight.shape[-1] // 2)
        y = batch_norm(y, p, str(3 * k + 1), True).clamp(min=0)
    assert relative_error(model.stem(images), y) <= 1e-13


def classify(p, z, training):
    def normed(y, name, stride=1, bias=None):
        weight = p[f"{name[0]}.weight"]
        y = F.conv2d(y, weight, bias, stride=stride, padding=weight.shape[-1] // 2)
        return batch_norm(y, p, name[1], training)

    y = None
    for i, state in enumerate(z):
        body, side = f"bottlenecks.{i}.body", f"bottlenecks.{i}.shortcut"
        t = normed(state, (f"{body}.0", f"{body}.1")).clamp(min=0)
        t = normed(t, (f"{body}.3", f"{body}.4")).clamp(min=0)
        t = normed(t, (f"{body}.6", f"{body}.7"))
        short = normed(state, (f"{side}.0", f"{side}.1")) if f"{side}.0.weight" in p else state
        t = (t + short).clamp(min=0)
        if y is not None:
            down = f"downs.{i - 1}"
            t = t + normed(y, (f"{down}.0", f"{down}.1"), 2, p[f"{down}.0.bias"]).clamp(min=0)
        y = t
    y = normed(y, ("final.0", "final.1"), 1, p["final.0.bias"]).clamp(min=0)
    return y.mean(dim=(2, 3)) @ p["classifier.weight"].T + p["classifier.bias"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(8, 8), (5, 7)], ids=str)
def test_the_classification_head_is_that_of_the_formulas(size, training):
    # The first bottleneck has no shortcut convolution: 8 channels in, 4 · 2 out.
    model = model_of(channels=(8, 4, 4), head_channels=(2, 3, 2)).train(training)
    images = images_of(*size)
    z = states_of(model, model.inject(images))
    want = classify(model.head.state_dict(), z, training)
    assert relative_error(model.head(z, images), want) <= 1e-13


def bilinear(x, size):
    """Corners on corners, by interpolation matrices."""

    def matrix(inputs, outputs):
        points = torch.linspace(0, inputs - 1, outputs, dtype=torch.float64)
        return (1 - (points[:, None] - torch.arange(inputs)).abs()).clamp(min=0)

    return matrix(x.shape[2], size[0]) @ x @ matrix(x.shape[3], size[1]).T


@pytest.mark.parametrize("details", [0, 6])
@pytest.mark.parametrize("training", [True, False])
def test_the_segmentation_head_is_that_of_the_formulas(training, details):
    model = model_of(channels=(8, 4, 4), downsamplings=2, details=details, **SEGMENT).train(training)
    size = (14, 11)
    images = images_of(*size)
    z = states_of(model, model.inject(images))
    p = model.head.state_dict()
    if details:
        assert not p["details.classifier.weight"].any()
        p["details.classifier.weight"].normal_()
    y = torch.cat([bilinear(state, z[0].shape[2:]) for state in z], dim=1)
    y = F.conv2d(y, p["final.0.weight"], p["final.0.bias"])
    y = batch_norm(y, p, "final.1", training).clamp(min=0)
    scores = F.conv2d(y, p["classifier.weight"], p["classifier.bias"])
    if details:
        fine = F.conv2d(images, p["details.image.0.weight"], stride=2, padding=1)
        fine = batch_norm(fine, p, "details.image.1", training).clamp(min=0)
        assert fine.shape[2:] == (7, 6)
        few = F.conv2d(y, p["details.narrow.0.weight"])
        few = batch_norm(few, p, "details.narrow.1", training).clamp(min=0)
        y = torch.cat([bilinear(few, (7, 6)), fine], dim=1)
        y = batch_norm(F.conv2d(y, p["details.join.0.weight"], padding=1), p, "details.join.1", training).clamp(min=0)
        scores = bilinear(scores, (7, 6)) + F.conv2d(y, p["details.classifier.weight"])
    assert relative_error(model.head(z, images), bilinear(scores, size)) <= 1e-12


@pytest.mark.parametrize("details", [0, 8])
def test_in_inference_maps_for_convolutions_are_as_narrow_as_these(details):
    torch.manual_seed(0)
    head = SegmentationHead((4, 6, 8), 12, 5, details=details, init_std=0.3).eval()
    states, images = [torch.randn(2, c, 16 >> k, 12 >> k) for k, c in enumerate((4, 6, 8))], torch.randn(2, 3, 32, 24)
    wide = head(states, images).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained = head(states, images).detach()
        with torch.no_grad():
            used = head(states, images)
    assert relative_error(trained, wide) <= 2e-2
    assert relative_error(used, wide) <= 2e-2
    with torch.no_grad():  # nothing is rounded without autocast
        assert torch.equal(head(states, images), wide)


@pytest.mark.parametrize("size", [(12, 16), (24, 31), (5, 4), (6, 8)])
def test_interpolation_by_products_of_matrices_is_the_same(size):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    found = resized_by_products(x, size)
    assert relative_error(found, resized(x, size)) <= 1e-14
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_injection_at_every_resolution():
    """Coarser ones get the finest one's map averaged over pixels, whatever is left at the border, and mixed."""
    model = model_of(channels=(8, 4, 4), head_channels=(2, 2, 2), inject="all").eval()
    finest = model.stem(images_of(5, 6))
    x = model.injections(finest)
    rows = [finest[:, :, k : k + 2].mean(dim=2) for k in (0, 2, 4)]
    averaged = torch.stack([torch.stack([row[..., k : k + 2].mean(dim=-1) for k in (0, 2, 4)], -1) for row in rows], 2)
    p = model.injections.state_dict()
    want = F.conv2d(averaged, p["mixes.0.0.weight"])
    assert relative_error(x[1], batch_norm(want, p, "mixes.0.1", False).clamp(min=0)) <= 1e-13
    assert [tuple(map_.shape[1:]) for map_ in x] == [(8, 5, 6), (4, 3, 3), (4, 2, 2)]


# Equilibrium and gradient


@pytest.mark.parametrize("changes", [{}, SEGMENT, {"inject": "all"}], ids=["classification", "segmentation", "all"])
def test_gradients_are_those_of_the_unrolled_truth(changes):
    """60 plain steps of a contraction with ordinary backpropagation, float64; every parameter gets a gradient."""
    model = model_of(**changes)
    images = images_of(6, 5, batch=2)
    output = model(images)
    assert all_converged(output.solution.stats)
    truth = model.explicit(60)(images)
    assert relative_error(output.logits, truth.logits) <= 1e-10
    mine, true = gradients(model, loss_of(output)), gradients(model, loss_of(truth))
    assert relative_error(mine, true) <= 1e-8
    for name, grad in zip(dict(model.named_parameters()), mine, strict=True):
        before_batch_norm = name.endswith(("downs.0.0.bias", "final.0.bias"))  # which takes every offset away
        assert before_batch_norm or grad.abs().max() > 0, name


def test_a_loss_on_one_resolution_reaches_the_parameters_of_the_others():
    model = model_of()
    states = model(images_of()).states
    block = list(model.cell.blocks[0].parameters())
    assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(states[1].square().sum(), block))


def test_two_forwards_before_one_backward():
    model = model_of(dropout=0.3)
    images = images_of(batch=2), images_of(batch=2, seed=1)

    def total(together):
        torch.manual_seed(2)
        grads = [0.0] * len(list(model.parameters()))
        losses = []
        for each in images:
            losses.append(loss_of(model(each)))
            if not together:
                grads = [a + b for a, b in zip(grads, gradients(model, losses.pop()), strict=True)]
        return gradients(model, sum(losses)) if together else grads

    assert relative_error(total(True), total(False)) <= 1e-12


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_batch_mates_do_not_matter(task):
    """In eval mode, where BatchNorm does not look at the batch: rounding only, though solves stop by sample."""
    plan = Plan(Anderson(), stop=Stop(rtol=1e-6, max_steps=60))
    changes = SEGMENT if task == "segmentation" else {}
    model = model_of(plan=plan, **changes).eval()
    images = images_of(batch=5)
    images[0] *= 30
    whole = model(images)
    for k in range(5):
        alone = model(images[k : k + 1])
        assert relative_error(alone.logits, whole.logits[k : k + 1]) <= 1e-9
        assert int(alone.solution.stats.steps) == int(whole.solution.stats.steps[k])


def test_a_start_and_what_a_solve_tells():
    model = model_of(plan=Plan(Anderson(), stop=Stop(rtol=1e-8, max_steps=100))).eval()
    images = images_of()
    first = model(images, trace=True, collect="iterates")
    assert first.solution.stats.trace.shape[1] == int(first.solution.stats.steps.max()) + 1
    assert len(first.solution.collected["iterates"]) > 1
    again = model(images, z0=tuple(state.detach() for state in first.states))
    assert again.solution.stats.steps.tolist() == [0, 0, 0]
    assert [tuple(s.shape) for s in again.states] == [(3, 8, 6, 6), (3, 4, 3, 3)]


def test_jacobian_penalty_of_a_tuple_state():
    """The mean over probes against ‖J‖²/n from the dense Jacobian, within 5 standard errors."""
    model = model_of().eval()
    solution = model(images_of(2, 2, batch=1)).solution
    x = model.inject(images_of(2, 2, batch=1))
    n = sum(state.numel() for state in solution.value)

    def flat(vector):
        sizes = [state.numel() for state in solution.value]
        parts = [part.view(s.shape) for part, s in zip(vector.split(sizes), solution.value, strict=True)]
        return torch.cat([leaf.reshape(-1) for leaf in model.cell(tuple(parts), x)])

    jacobian = torch.autograd.functional.jacobian(flat, torch.cat([s.detach().reshape(-1) for s in solution.value]))
    draws = torch.stack([jacobian_penalty(solution).detach() for _ in range(60)])
    error = (draws.mean() - jacobian.square().sum() / n).abs()
    assert error <= 5 * draws.std() / 60**0.5
    grads = torch.autograd.grad(jacobian_penalty(solution), list(model.cell.parameters()), allow_unused=True)
    assert sum(float(grad.abs().max()) for grad in grads if grad is not None) > 0


# Constants of a solve


def test_dropout_masks_are_constant_in_a_solve_and_new_in_the_next():
    model = model_of(dropout=0.4)
    x = model.inject(images_of())
    z = states_of(model, x)
    with SolveScope() as scope:
        first, second = model.cell(z, x), model.cell(z, x)
        masks = [scope.value(block.dropout, z[0]) for block in model.cell.blocks]
    with SolveScope():
        other = model.cell(z, x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])
    assert [tuple(mask.shape) for mask in masks] == [(3, 8, 1, 1), (3, 4, 1, 1)]
    assert {0.0} < {float(v) for v in masks[0].unique()} <= {0.0, 1 / 0.6}
    for mine, true in zip(first, layer(model.cell.state_dict(), z, x, 2, masks), strict=True):
        assert relative_error(mine, true) <= 1e-13
    model.eval()
    assert all(torch.equal(a, b) for a, b in zip(model.cell(z, x), layer_again(model, z, x), strict=True))


def layer_again(model, z, x):
    with SolveScope():
        return model.cell(z, x)


def test_normalised_weights_are_computed_once_per_solve(monkeypatch):
    model = model_of()
    conv = model.cell.blocks[0].widen
    calls = []
    original = type(conv).begin_solve
    monkeypatch.setattr(type(conv), "begin_solve", lambda self, x: calls.append(self) or original(self, x))
    output = model(images_of())
    loss_of(output).backward()
    assert output.solution.stats.nfe > 5
    assert len(calls) == len({id(module) for module in calls}) == 6  # two blocks with two each, two mixings


@torch.no_grad()
def test_initial_weights():
    """The scale that was meant arrives at the weights in use: normalised layers too."""
    torch.manual_seed(0)
    model = create_model("mdeq_cifar_tiny")
    for block in model.cell.blocks:
        for conv in (block.widen, block.narrow):
            bound = conv.weight[0].numel() ** -0.5
            assert float(conv.weight.abs().max()) <= bound
            assert abs(float(conv.weight.std()) - bound / 3**0.5) <= 0.05 * bound
            assert torch.allclose(conv.weight_g.flatten(), conv.weight_v.flatten(1).norm(dim=1))
    for conv in (model.cell.fusion.paths["0_to_1"][0], model.stem[3], model.head.downs[0][0]):
        assert abs(float(conv.weight.std()) - 0.01) <= 5e-4


# The explicit twin


@pytest.mark.parametrize("depth", [1, 4])
def test_the_twin_is_as_many_plain_steps(depth):
    model = model_of(dropout=0.3)
    images = images_of()
    twin = model.explicit(depth)
    assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}
    stop = Stop(rtol=0, max_steps=depth, select="last")
    model.deq.plan = Plan(Picard(), Unroll(), stop)
    torch.manual_seed(3)
    unrolled = model(images)
    torch.manual_seed(3)
    output = twin(images)
    assert torch.equal(output.logits, unrolled.logits)
    assert output.solution is None
    assert relative_error(gradients(model, loss_of(output)), gradients(model, loss_of(unrolled))) <= 1e-13


@pytest.mark.parametrize("checkpoint", [True, 2, 9])
@pytest.mark.parametrize("autocast", [False, True])
def test_recomputed_layers_give_the_same_gradients(checkpoint, autocast):
    model = model_of(dropout=0.3).float()
    images = images_of(dtype=torch.float32)
    found = []
    for twin in (model.explicit(6), model.explicit(6, checkpoint)):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = twin(images)
        found.append([output.logits, *gradients(model, loss_of(output).float())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    full, less = (memory_report(model.explicit(6, each), images).graph for each in (False, checkpoint))
    assert less < 0.7 * full if checkpoint != 9 else less < full


def test_the_twin_refuses_nonsense():
    with pytest.raises(ValueError, match="depth must be an integer of at least 1"):
        model_of().explicit(0)


# Transfer


def test_a_classifier_hands_its_layer_to_segmentation():
    classifier, segmenter = model_of(seed=1), model_of(seed=2, num_classes=5, downsamplings=0, **SEGMENT)
    images = images_of(9, 7)
    classifier.train()
    classifier(images)  # moves the statistics of BatchNorm, which are taken over as well
    head = copy.deepcopy(segmenter.head.state_dict())
    taken = segmenter.transfer_from(classifier)
    state = segmenter.state_dict()
    assert set(taken) == {name for name in state if not name.startswith("head.")}
    assert all(torch.equal(state[name], classifier.state_dict()[name]) for name in taken)
    assert all(torch.equal(state[f"head.{name}"], value) for name, value in head.items())
    classifier.eval(), segmenter.eval()
    mine, theirs = segmenter(images), classifier(images)
    assert mine.logits.shape == (3, 5, 9, 7)
    for a, b in zip(mine.states, theirs.states, strict=True):
        assert relative_error(a, b) <= 1e-10
    assert segmenter.stem[0].weight.data_ptr() != classifier.stem[0].weight.data_ptr()


def test_transfer_names_what_differs():
    model = model_of()
    with pytest.raises(ValueError, match=r"the settings of the other: channels=\(8, 8\), expansion=3"):
        model.transfer_from(model_of(channels=(8, 8), expansion=3))
    with pytest.raises(ValueError, match=r"mixings.0.2.bias: absent here, \(8,\) there"):
        model.transfer_from(model_of(post_affine=True))
    with pytest.raises(ValueError, match=r"2 groups here, 4 there\. Build this model with groups=4"):
        model.transfer_from(model_of(groups=4))  # weights of the same shapes, another f
    with pytest.raises(TypeError, match="takes an MDEQ, got Linear"):
        model.transfer_from(nn.Linear(2, 2))


# Sizes, precision, memory, engines


@pytest.mark.parametrize("size", [(5, 9), (8, 8), (1, 3)], ids=str)
@pytest.mark.parametrize("downsamplings", [0, 1])
def test_scores_have_the_size_of_the_images(size, downsamplings):
    segmenter = model_of(downsamplings=downsamplings, **SEGMENT)
    assert segmenter(images_of(*size)).logits.shape == (3, 3, *size)
    assert model_of(downsamplings=downsamplings)(images_of(*size)).logits.shape == (3, 3)


def test_bfloat16_cells_keep_a_float32_state():
    plan = Plan(Anderson(), Implicit(stop=Stop(rtol=1e-2, max_steps=20)), Stop(rtol=1e-2, max_steps=20))
    model = model_of(plan=plan).float()
    images = images_of(dtype=torch.float32)
    exact = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images)
    assert [state.dtype for state in output.states] == [torch.float32] * 2
    assert output.solution.problem.spec.work_dtype == torch.float32
    assert output.solution.stats.residual.dtype == torch.float32
    assert relative_error(output.states, exact.states) <= 5e-2
    output.logits.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_does_the_same_without_autocast(dtype):
    model = settled(MDEQ(dataclasses.replace(SMALL, plan=Plan(Anderson(), Implicit(), Stop(rtol=0.0, max_steps=4)))))
    twin = copy.deepcopy(model.eval()).to(dtype)
    images = torch.randn(2, 3, 8, 8, dtype=next(model.parameters()).dtype)
    for narrow, wide in ((twin, model), (twin.explicit(3), model.explicit(3))):
        found = narrow(images.to(dtype)).logits
        assert found.dtype == dtype
        assert relative_error(found.to(images.dtype), wide(images).logits) <= 0.05
        found.sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in twin.parameters())


def test_channels_last_gives_the_same():
    model = model_of(plan=Plan(Anderson(), stop=Stop(rtol=0, max_steps=6))).eval()
    images = images_of()
    want = model(images)
    got = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    assert got.solution.problem.spec.orders == ((0, 2, 3, 1),) * 2
    assert relative_error(got.logits, want.logits) <= 1e-11


def test_memory_of_a_training_step_is_flat_in_the_budget():
    def report(steps):
        stop = Stop(rtol=0, max_steps=steps)
        model = model_of(plan=Plan(Anderson(), Implicit(solver=Anderson(), stop=stop), stop))
        return memory_report(model, images_of())

    few, many = report(10), report(40)
    assert few.graph == many.graph
    assert few.history == many.history
    deep = model_of().explicit(10)
    assert memory_report(deep, images_of()).graph > 3 * few.graph


def test_the_captured_engine_gives_what_the_eager_one_gives():
    stop = Stop(rtol=0, max_steps=8)
    plan = Plan(Anderson(), Implicit(solver=Broyden(), stop=stop), stop)
    model = model_of(plan=plan, dropout=0.3, inject="all")
    x = tuple(leaf.detach().requires_grad_() for leaf in model.inject(images_of()))
    assert_engines_agree(model.deq, x, tolerance=1e-9)


def test_the_layer_reads_no_value_on_the_host():
    """On the meta device there are no values to read."""
    with torch.device("meta"):
        model = MDEQ(dataclasses.replace(SMALL, channels=(8, 4, 4), head_channels=(1, 1, 1), dropout=0.2))
        x = model.inject(torch.empty(2, 3, 9, 7))
        shapes = [tuple(leaf.shape) for leaf in model.cell(model.cell.initial_state(x), x)]
    assert shapes == [(2, 8, 12, 8), (2, 4, 6, 4), (2, 4, 3, 2)]


def test_batch_statistics_belong_to_what_is_outside_the_layer():
    model = model_of()
    assert not [m for m in model.cell.modules() if isinstance(m, nn.BatchNorm2d)]
    assert not list(model.cell.buffers())
    assert {m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {0.1}
    segmenter = model_of(**SEGMENT)
    assert {m.momentum for m in segmenter.modules() if isinstance(m, nn.BatchNorm2d)} == {0.01}


def test_copies_and_output_are_whole():
    model = model_of(plan=published_plan(5, 5)).eval()
    images = images_of()
    want = model(images)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images).logits, want.logits)
    other = model_of(seed=9, plan=published_plan(5, 5)).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images).logits, want.logits)
    assert isinstance(want, VisionOutput)
    assert any(tensor is want.states[1] for tensor in tree_tensors(want))
