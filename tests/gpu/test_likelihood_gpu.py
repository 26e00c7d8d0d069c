"""`nll`, `add_nll` and `lookup` on a CUDA device at sizes of language models: values, gradients, graphs, times.

    python -m tests.gpu.test_likelihood_gpu

prints microseconds beside those of `log_softmax` and `gather`, of other blocks, and of the whole head of a model.
"""

import functools
import itertools

import pytest
import torch
from torch.nn.functional import log_softmax

from equipoise.models._sequence import token_losses
from equipoise.nn import embedding as nn_embedding
from equipoise.nn.embedding import AdaptiveEmbedding, AdaptiveSoftmax
from equipoise.ops import add_nll, lookup, nll
from tests.gpu.devices import waiting_is_an_error
from tests.gpu.test_hyper_step_gpu import microseconds, replayable

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Rows and words: the clusters of WikiText-2 with cutoffs at 2,000 and 10,000, Penn Treebank, odd ones.
SIZES = [(840, 2002), (840, 8000), (840, 23278), (1800, 10000), (7, 1), (1, 127)]
VOCAB, WIDTH, CUTOFFS = 33278, 256, (2000, 10000)


def drawn(rows, width, dtype):
    return (3 * torch.randn(rows, width, device="cuda")).to(dtype).requires_grad_()


def plain(scores, targets):
    """What the operation replaces."""
    logs = log_softmax(scores, dim=1, dtype=torch.float32)
    return -logs.gather(1, targets.unsqueeze(1)).squeeze(1)


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_losses_and_gradients(size, dtype):
    """Losses to 1e-6 of their size, gradients to what the dtype of the scores holds, and the same bits every time."""
    scores, targets = drawn(*size, dtype), torch.randint(size[1], size[:1], device="cuda")
    exact = scores.detach().double().requires_grad_()
    expected = torch.logsumexp(exact, dim=1) - exact.gather(1, targets.unsqueeze(1)).squeeze(1)
    losses = nll(scores, targets)
    assert type(losses.grad_fn).__name__ == "NllBackward"
    worst = (losses - expected).detach().abs().max().item()
    assert worst <= 1e-6 * expected.detach().abs().max().item() + 1e-6
    cotangent = torch.randn(size[0], device="cuda")
    (found,) = torch.autograd.grad(losses, scores, cotangent, retain_graph=True)
    (truth,) = torch.autograd.grad(expected, exact, cotangent.double())
    assert found.dtype == dtype
    assert relative(found, truth) <= (5e-6 if dtype == torch.float32 else 4e-3)
    assert torch.equal(nll(scores, targets), losses)
    assert torch.equal(torch.autograd.grad(losses, scores, cotangent)[0], found)


@pytest.mark.parametrize("filled", [23280, 23278])
def test_a_cluster_of_a_large_vocabulary(filled):
    scores, targets = drawn(840, filled, torch.bfloat16), torch.randint(VOCAB, (840,), device="cuda")
    with torch.no_grad():
        scores[:, 23278:] = torch.nan
    before = torch.randn(840, device="cuda")
    losses = add_nll(before, scores, targets, first=10000, size=23278)
    expected = add_nll(before, scores, targets, first=10000, size=23278, backend="naive")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=2e-6)
    cotangent = torch.randn(840, device="cuda")
    (found,), (truth,) = (torch.autograd.grad(each, scores, cotangent) for each in (losses, expected))
    assert relative(found[:, :23278], truth[:, :23278]) <= 1e-2
    assert not found[:, 23278:].any()
    assert not found[targets < 10000].any()


def test_targets_outside_the_vocabulary_are_nan():
    scores = drawn(4, 2002, torch.bfloat16)
    losses = nll(scores, torch.tensor([-1, 33277, 33278, 5], device="cuda"), bounds=(*CUTOFFS, VOCAB))
    assert losses.isnan().tolist() == [True, False, True, False]


def test_a_plain_softmax_takes_the_kernel():
    logits = torch.randn(3, 5, 10000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(10000, (3, 5), device="cuda", dtype=torch.int32)
    losses = token_losses(logits, targets)
    torch.testing.assert_close(losses.cpu(), token_losses(logits.cpu().float(), targets.cpu()), rtol=1e-5, atol=1e-5)


class Head(torch.nn.Module):
    """Embedding and softmax of a small model for WikiText-2."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = AdaptiveEmbedding(VOCAB, WIDTH, cutoffs=CUTOFFS, div_val=2)
        self.softmax = AdaptiveSoftmax(self.embedding)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.1)
        self.cuda()

    def forward(self, tokens, targets):
        return self.softmax(self.embedding(tokens), targets)


def without_kernels(setter):
    """Layers take the twins from now on."""
    for operation in (nll, add_nll, lookup):
        setter(nn_embedding, operation.__name__, functools.partial(operation, backend="naive"))


@pytest.mark.parametrize("autocast", [False, True])
def test_the_head_of_a_model(autocast, monkeypatch):
    """Losses and all gradients to 1e-4 without autocast, and to twice what bfloat16 costs the twins."""
    tokens, targets = (torch.randint(VOCAB, (12, 70), device="cuda") for _ in range(2))
    weights = torch.rand(12, 70, device="cuda")

    def found(model, narrow):
        with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
            losses = model(tokens, targets)
        return [losses, *torch.autograd.grad((losses * weights).sum(), list(model.parameters()))]

    model = Head()
    found(model, autocast)  # compiles
    with waiting_is_an_error():
        ours = found(model, autocast)
    assert ours[0].dtype == torch.float32
    without_kernels(monkeypatch.setattr)
    theirs, truth = found(model, autocast), found(Head().double(), False)
    for mine, other, true in zip(ours, theirs, truth, strict=True):
        assert relative(mine, true) <= (2 * relative(other, true) + 1e-3 if autocast else 1e-4)


def test_the_head_in_a_graph():
    """Recorded on some tokens and replayed on others, forward and backward."""
    model = Head()
    tokens, targets = (torch.randint(VOCAB, (4, 30), device="cuda") for _ in range(2))
    kept = {}

    def work():
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            losses = model(tokens, targets)
        kept["losses"] = losses.detach()
        kept["grads"] = torch.autograd.grad(losses.mean(), list(model.parameters()))

    graph = replayable(work)
    recorded = kept["losses"], kept["grads"]
    for tensor in (tokens, targets):
        tensor.copy_(torch.randint(VOCAB, tensor.shape, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    work()
    torch.testing.assert_close(recorded[0], kept["losses"], rtol=1e-3, atol=1e-4)
    for mine, true in zip(recorded[1], kept["grads"], strict=True):
        assert relative(mine, true) <= 2e-2


# Times


def cost(operation, rows, width, backward):
    """Scores in turn, so that they are not in the cache."""
    turns = itertools.cycle([drawn(rows, width, torch.bfloat16) for _ in range(4)])
    targets = torch.randint(width, (rows,), device="cuda")

    def forward():
        with torch.no_grad():
            operation(next(turns), targets)

    def both():
        scores = next(turns)
        torch.autograd.grad(operation(scores, targets).mean(), scores)

    return microseconds(both if backward else forward)


def cost_of_the_head(backward):
    model = Head()
    tokens, targets = (torch.randint(VOCAB, (12, 70), device="cuda") for _ in range(2))

    def work():
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), torch.set_grad_enabled(backward):
            losses = model(tokens, targets)
        if backward:
            torch.autograd.grad(losses.mean(), list(model.parameters()))

    return microseconds(work)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES[:4], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_it_is_faster_than_what_it_replaces(size, backward):
    assert cost(nll, *size, backward) < cost(plain, *size, backward)


def _table():
    from equipoise.ops.likelihood import triton as kernels

    blocks = (kernels.BLOCK, kernels.VJP_BLOCK)
    for (rows, width), backward in itertools.product(SIZES[:4], (False, True)):
        print(f"{rows:5} x {width:<6} {'both' if backward else 'forward':8}", end="")
        print(f" plain {cost(plain, rows, width, backward):8.1f}", end="")
        for block in (1024, 2048, 4096, 8192, 16384):
            kernels.BLOCK = kernels.VJP_BLOCK = block
            print(f"   {block}: {cost(nll, rows, width, backward):7.1f}", end="", flush=True)
        kernels.BLOCK, kernels.VJP_BLOCK = blocks
        print(" µs")
    times = {"kernels": [cost_of_the_head(backward) for backward in (False, True)]}
    filled, nn_embedding.FILLED = nn_embedding.FILLED, 1
    times["kernels, tables not filled up"] = [cost_of_the_head(backward) for backward in (False, True)]
    nn_embedding.FILLED = filled
    without_kernels(setattr)
    times["twins"] = [cost_of_the_head(backward) for backward in (False, True)]
    for name, (forward, both) in times.items():
        print(f"embedding and softmax, {name}: forward {forward:.1f}, both {both:.1f} µs")


if __name__ == "__main__":
    _table()
