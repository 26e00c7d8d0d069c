"""`nll` and `add_nll`, kernels and twins, against a row at a time in float64; the head of a language model by them."""

import functools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.models import _sequence
from equipoise.nn import embedding as nn_embedding
from equipoise.nn.embedding import AdaptiveEmbedding, AdaptiveSoftmax
from equipoise.ops import add_nll, lookup, nll
from equipoise.ops.likelihood import naive
from tests.gradients import normal, relative_error
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter

DEVICE = kernel_device()
pytestmark = quiet_interpreter

# Rows and words; blocks of the kernels are 256 words.
SIZES = [(7, 1), (1, 3), (7, 127), (3, 1000), (2, 2003), (5, 256)]
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    from equipoise.ops.likelihood import triton as kernels

    for name in ("BLOCK", "VJP_BLOCK"):
        monkeypatch.setattr(kernels, name, 256)


def drawn(rows, width, dtype=torch.float32, scale=3.0):
    return (scale * torch.randn(rows, width)).to(DEVICE, dtype).requires_grad_()


def drawn_targets(rows, size, low=0):
    return torch.randint(low, low + size, (rows,), device=DEVICE)


def by_row(scores, entries):
    """The definition, one row at a time; a row without an entry has no loss."""
    exact = scores.detach().double().cpu().requires_grad_()
    losses = [
        exact[0, 0] * 0 if entry is None else torch.logsumexp(row, 0) - row[entry]
        for row, entry in zip(exact, entries, strict=True)
    ]
    return exact, torch.stack(losses)


def assert_close(found, expected, tolerance):
    torch.testing.assert_close(
        found.detach().double().cpu(), expected.detach().double().cpu(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
def test_losses_and_gradients(backend, size):
    scores, targets = drawn(*size), drawn_targets(*size)
    losses = nll(scores, targets, backend=backend)
    exact, expected = by_row(scores, targets.tolist())
    assert losses.dtype == torch.float32
    assert_close(losses, expected, 2e-6)
    cotangent = torch.randn(size[0], device=DEVICE)
    (found,) = torch.autograd.grad(losses, scores, cotangent)
    assert_close(found, torch.autograd.grad(expected, exact, cotangent.double().cpu())[0], 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALF)
def test_scores_of_low_precision(backend, dtype):
    """Losses are those of the scores as given, in float32; gradients are rounded once, to the scores' dtype."""
    scores, targets = drawn(4, 300, dtype), drawn_targets(4, 300)
    losses = nll(scores, targets, backend=backend)
    exact, expected = by_row(scores, targets.tolist())
    assert losses.dtype == torch.float32
    assert_close(losses, expected, 2e-6)
    (found,) = torch.autograd.grad(losses.sum(), scores)
    assert found.dtype == dtype
    assert_close(found, torch.autograd.grad(expected.sum(), exact)[0], torch.finfo(dtype).eps)


def test_float64_goes_to_the_twin_and_is_exact():
    scores = normal(3, 7).requires_grad_()
    targets, far = torch.tensor([0, 6, 3]), torch.tensor([1, 9, 30])
    assert nll(scores, targets).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda s: nll(s, targets), scores)
    assert torch.autograd.gradgradcheck(lambda s: nll(s, targets), scores)
    assert torch.autograd.gradcheck(lambda s: nll(s, far, bounds=(5, 8, 31)), scores)
    before = normal(3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda b, s: add_nll(b, s, far, first=4), (before, scores))
    assert torch.autograd.gradgradcheck(lambda b, s: add_nll(b, s, far, first=4), (before, scores))
    with pytest.raises(ValueError, match="float64, kernels take"):
        nll(scores, targets, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_scores(backend):
    """To float32's rounding of the losses: scores of 1e4 do not cost their digits, -inf is a word that never comes."""
    scores = torch.randn(6, 600, device=DEVICE)
    scores[0, 0], scores[0, 599] = 1e4, -1e4
    scores[1] += 1e4
    scores[2] -= 1e4
    scores[3, :300] = -math.inf  # a whole block
    scores[4, ::2] = -math.inf
    scores[5] = 1e4
    scores.requires_grad_()
    targets = torch.tensor([599, 7, 7, 400, 1, 599], device=DEVICE)
    losses = nll(scores, targets, backend=backend)
    exact, expected = by_row(scores, targets.tolist())
    assert_close(losses, expected, 2e-6)
    (found,) = torch.autograd.grad(losses.sum(), scores)
    assert_close(found, torch.autograd.grad(expected.sum(), exact)[0], 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_number_stays_none(backend):
    scores = torch.randn(4, 300, device=DEVICE)
    scores[0, 280] = math.nan
    scores[1] = -math.inf
    scores[2, 5] = -math.inf
    scores.requires_grad_()
    losses = nll(scores, torch.tensor([3, 3, 5, 3], device=DEVICE), backend=backend)
    assert losses.isnan().tolist() == [True, True, False, False]
    assert losses[2] == math.inf
    (found,) = torch.autograd.grad(losses.sum(), scores)
    assert found.isnan().all(1).tolist() == [True, True, False, False]
    assert found[2:].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_lie_apart_and_targets_be_int32(backend):
    whole = torch.randn(6, 400, device=DEVICE)
    scores, targets = whole[::2, 5:290].requires_grad_(), drawn_targets(3, 285)
    exact, expected = by_row(scores, targets.tolist())
    losses = nll(scores, targets.int(), backend=backend)
    assert_close(losses, expected, 2e-6)
    (found,) = torch.autograd.grad(losses.mean(), scores)  # its cotangent is one number, spread over all rows
    assert_close(found, torch.autograd.grad(expected.mean(), exact)[0], 2e-6)


def test_columns_that_lie_apart_are_left_to_the_twin():
    scores, targets = torch.randn(5, 3, device=DEVICE).T, drawn_targets(3, 5)
    assert_close(nll(scores, targets), by_row(scores, targets.tolist())[1], 2e-6)
    with pytest.raises(ValueError, match="not contiguous"):
        nll(scores, targets, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "size"), [(272, 260), (256, 250), (512, 256), (16, 1)])
def test_scores_that_only_fill_up_do_not_count(backend, width, size):
    scores = drawn(4, width)
    with torch.no_grad():
        scores[:, size:] = math.nan
    targets = drawn_targets(4, size)
    exact, expected = by_row(scores[:, :size], targets.tolist())
    for losses in (
        nll(scores, targets, size=size, backend=backend),
        add_nll(torch.zeros(4, device=DEVICE), scores, targets + 9, first=9, size=size, backend=backend),
    ):
        assert_close(losses, expected, 2e-6)
        (found,) = torch.autograd.grad(losses.sum(), scores)
        assert_close(found[:, :size], torch.autograd.grad(expected.sum(), exact, retain_graph=True)[0], 2e-6)
        assert not found[:, size:].any()


# Clusters

BOUNDS = (5, 8, 20, 31)


def entry_of(target):
    """Where the head has a target: five words, then clusters from 5, 8 and 20 on."""
    return target if target < 5 else 5 + (target >= 8) + (target >= 20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_head_of_an_adaptive_softmax(backend):
    targets = torch.arange(31, device=DEVICE)
    scores = drawn(31, 8)
    exact, expected = by_row(scores, [entry_of(target) for target in range(31)])
    losses = nll(scores, targets, bounds=BOUNDS, backend=backend)
    assert_close(losses, expected, 2e-6)
    cotangent = torch.randn(31, device=DEVICE)
    (found,) = torch.autograd.grad(losses, scores, cotangent)
    assert_close(found, torch.autograd.grad(expected, exact, cotangent.double().cpu())[0], 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cluster_adds_to_its_own_targets_only(backend):
    before = torch.randn(31, device=DEVICE).requires_grad_()
    scores, targets = drawn(31, 12), torch.arange(31, device=DEVICE)
    exact, expected = by_row(scores, [target - 8 if 8 <= target < 20 else None for target in range(31)])
    losses = add_nll(before, scores, targets, first=8, backend=backend)
    assert_close(losses, before.double().cpu() + expected, 2e-6)
    cotangent = torch.randn(31, device=DEVICE)
    found = torch.autograd.grad(losses, (before, scores), cotangent)
    assert torch.equal(found[0], cotangent)
    assert_close(found[1], torch.autograd.grad(expected, exact, cotangent.double().cpu())[0], 2e-6)
    assert not found[1][:8].any()
    assert not found[1][20:].any()


def test_rows_of_other_clusters_are_not_read():
    scores = drawn(3, 12)
    with torch.no_grad():
        scores[[0, 2]] = math.nan
    targets = torch.tensor([2, 9, 25], device=DEVICE)
    losses = add_nll(torch.ones(3, device=DEVICE), scores, targets, first=8, backend="triton")
    assert losses[0] == losses[2] == 1
    (found,) = torch.autograd.grad(losses.sum(), scores)
    assert found.isfinite().all()


@pytest.mark.parametrize("target", [-1, 31, 2**40])
def test_a_target_outside_the_vocabulary_is_not_dropped(target):
    """The kernel makes NaN of it and the twin raises."""
    scores = drawn(2, 8)
    targets = torch.tensor([30, target], device=DEVICE)
    losses = nll(scores, targets, bounds=BOUNDS, backend="triton")
    assert losses.isnan().tolist() == [False, True]
    (found,) = torch.autograd.grad(losses.sum(), scores)
    assert found.isnan().all(1).tolist() == [False, True]
    plain = nll(scores, targets.clamp(max=8) if target > 0 else targets - 23, backend="triton")
    assert bool(plain[1].isnan())
    losses = add_nll(losses, scores, targets, first=20, backend="triton")
    assert bool(losses[1].isnan())
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match="out of bounds"):
            nll(scores, targets, bounds=BOUNDS, backend="naive")


# Derivatives of derivatives, other modes


def test_second_derivatives_are_those_of_the_twin():
    targets = torch.tensor([30, 4, 9], device=DEVICE)
    scores, before = drawn(3, 8), torch.randn(3, device=DEVICE).requires_grad_()
    found = []
    for backend in BACKENDS:
        losses = nll(scores, targets, bounds=BOUNDS, backend=backend)
        losses = add_nll(losses + before, scores.sin(), targets, first=7, backend=backend).square()
        first = torch.autograd.grad(losses.sum(), (scores, before), create_graph=True)
        found.append(torch.autograd.grad(first[0].square().sum() + first[1].sum(), (scores, before)))
    for mine, true in zip(*found, strict=True):
        assert_close(mine, true, 1e-4)


def test_functional_transforms_get_the_twin():
    scores, targets = torch.randn(4, 6, device=DEVICE), drawn_targets(4, 6)
    grad = torch.func.grad(lambda s: nll(s, targets).sum())(scores)
    each = torch.func.vmap(lambda s, t: nll(s[None], t[None])[0])(scores, targets)
    _, slope = torch.func.jvp(lambda s: nll(s, targets), (scores,), (scores,))
    assert_close(each, nll(scores, targets), 1e-6)
    assert_close(slope, (grad * scores).sum(1), 1e-5)


def test_without_gradients_nothing_is_remembered():
    scores, targets = drawn(2, 9), drawn_targets(2, 9)
    with torch.no_grad():
        assert nll(scores, targets, backend="triton").grad_fn is None
    assert nll(scores.detach(), targets, backend="triton").grad_fn is None


def test_no_rows():
    assert nll(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_errors_say_what_was_expected():
    scores, targets = torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"targets \(N,\), got \(2, 8\) and \(3,\)"):
        nll(scores, torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeError, match=r"int64 or int32, got torch\.float32"):
        nll(scores, torch.zeros(2))
    with pytest.raises(ValueError, match=r"the number of scores, 8; got \(5, 8\)"):
        nll(scores, targets, bounds=(5, 8))
    with pytest.raises(ValueError, match=r"bounds must rise.*got \(6, 6, 9\)"):
        nll(scores, targets, bounds=(6, 6, 9))
    with pytest.raises(ValueError, match="size must be from 1 to the width of scores, 8; got 9"):
        nll(scores, targets, size=9)
    with pytest.raises(ValueError, match=r"torch.float32 of shape \(2,\), got torch.float64 of shape \(2,\)"):
        add_nll(torch.zeros(2, dtype=torch.float64), scores, targets, first=0)
    with pytest.raises(ValueError, match="scores are on cpu, targets on meta"):
        nll(scores, targets.to("meta"))


# The head of a language model

VOCAB, WIDTH, CUTOFFS = 61, 16, (9, 30)


@pytest.fixture
def as_on_a_device(monkeypatch):
    """The path of a device, with kernels."""
    monkeypatch.setattr(nn_embedding, "_host_runs_ahead", lambda tensor: True)
    for operation in (nll, add_nll, lookup):
        monkeypatch.setattr(nn_embedding, operation.__name__, functools.partial(operation, backend="triton"))


def language_model(**options):
    torch.manual_seed(3)
    embedding = AdaptiveEmbedding(VOCAB, WIDTH, cutoffs=CUTOFFS, div_val=2)
    model = torch.nn.ModuleList([embedding, AdaptiveSoftmax(embedding, **options)]).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def losses_and_gradients(model, tokens, targets, autocast):
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        features = model[0](tokens)
        losses = model[1](features, targets)
    assert losses.dtype == torch.promote_types(features.dtype, torch.float32)
    assert losses.shape == targets.shape
    weights = torch.arange(1.0, 1 + losses.numel(), device=DEVICE).view(losses.shape).to(losses.dtype)
    return features, losses, torch.autograd.grad(losses, list(model.parameters()), weights)


@pytest.mark.parametrize("options", [{}, {"tie_weights": False, "tie_projections": False}])
@pytest.mark.parametrize("autocast", [False, True])
def test_losses_of_a_model_by_kernels(autocast, options, monkeypatch, request):
    """Float32 to 1e-5; with autocast to twice what bfloat16 costs the plain path. The interpreter truncates: to 3 %."""
    tokens, targets = (torch.randint(VOCAB, (4, 5), device=DEVICE) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(nn_embedding, "_host_runs_ahead", lambda tensor: False)
        truth = losses_and_gradients(language_model(**options).double(), tokens, targets, False)
        plain = losses_and_gradients(language_model(**options), tokens, targets, autocast)
    request.getfixturevalue("as_on_a_device")
    model = language_model(**options)
    ours = losses_and_gradients(model, tokens, targets, autocast)
    assert ours[0].dtype == plain[0].dtype
    for mine, theirs, true in zip((*ours[:2], *ours[2]), (*plain[:2], *plain[2]), (*truth[:2], *truth[2]), strict=True):
        rounding = 3e-2 if DEVICE == "cpu" else 2 * relative_error(theirs, true) + 1e-3
        assert relative_error(mine, true) <= (rounding if autocast else 1e-5)


def test_second_derivatives_through_the_head(as_on_a_device, monkeypatch):
    model = language_model()
    targets = torch.tensor([1, 20, 50], device=DEVICE)
    hidden = torch.randn(3, WIDTH, device=DEVICE).requires_grad_()
    found = []
    for device_path in (True, False):
        monkeypatch.setattr(nn_embedding, "_host_runs_ahead", lambda tensor, ahead=device_path: ahead)
        (first,) = torch.autograd.grad(model[1](hidden, targets).sum(), hidden, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [hidden, *model[1].parameters()]))
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_words_outside_the_vocabulary_become_nan(as_on_a_device, token):
    model = language_model()
    words = torch.tensor([3, token], device=DEVICE)
    assert model[0](words).isnan().all(1).tolist() == [False, True]
    hidden = torch.randn(2, WIDTH, device=DEVICE)
    assert model[1](hidden, words).isnan().tolist() == [False, True]


VIEWS = {"view", "_unsafe_view", "t", "transpose", "slice", "unsqueeze", "squeeze", "split", "split_with_sizes"}
NOTHING = {"detach", "alias", "empty", "new_empty", "empty_like", "_reshape_alias", "promote_types"}


class Launches(TorchDispatchMode):
    """Operations that take a launch on a device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in VIEWS | NOTHING:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_forward_pass_takes_few_launches(as_on_a_device, monkeypatch):
    """Ten for the softmax and four for the embedding, with three clusters and under autocast."""
    from equipoise.ops.likelihood import triton as likelihood_kernels
    from equipoise.ops.words import triton as lookup_kernels

    kernels = []

    def counted(module, name, result):
        monkeypatch.setattr(module, name, lambda *given: kernels.append(name) or result(*given))

    counted(likelihood_kernels, "forward", lambda scores, *_: (torch.empty(len(scores)),))
    counted(
        lookup_kernels, "forward", lambda tokens, tables, _, scale, dtype: torch.empty(len(tokens), 28, dtype=dtype)
    )
    model, tokens = language_model().cpu(), torch.randint(VOCAB, (2, 8))
    hidden = torch.randn(2, 8, WIDTH)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        with Launches() as embedding:
            model[0](tokens)
        assert (len(embedding.seen), len(kernels)) == (3, 1), embedding.seen
        with Launches() as softmax:
            model[1](hidden, tokens)
        assert (len(softmax.seen), len(kernels)) == (7, 1 + 3), softmax.seen


def test_losses_of_a_plain_softmax():
    """As models take them on a CPU, and as on a CUDA device."""
    logits = torch.randn(2, 3, 11, device=DEVICE).requires_grad_()
    targets = torch.randint(11, (2, 3), device=DEVICE)
    found = nll(logits.flatten(0, 1), targets.flatten(), backend="triton").view(2, 3)
    assert_close(found, _sequence.token_losses(logits.cpu(), targets.cpu()), 2e-6)
    assert_close(_sequence.token_losses(logits, targets), found, 2e-6)
    assert naive.wide(torch.bfloat16) == torch.float32
