"""Adaptive embedding and softmax against plain full-vocabulary references in float64."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from equipoise.nn.embedding import AdaptiveEmbedding, AdaptiveSoftmax
from tests.gradients import normal, relative_error

VOCAB, WIDTH = 29, 12
KINDS = {
    "full": {},
    "full_projected": {"d_embed": 5},
    "clusters": {"cutoffs": (7, 15), "div_val": 2},
    "clusters_wide": {"cutoffs": (4, 9, 20), "div_val": 2, "d_embed": 16},
    "equal_clusters": {"cutoffs": (7, 15)},
    "equal_clusters_projected": {"cutoffs": (7, 15), "d_embed": 5},
}


def build(kind, **options):
    torch.manual_seed(3)
    embedding = AdaptiveEmbedding(VOCAB, WIDTH, **KINDS[kind]).double()
    softmax = AdaptiveSoftmax(embedding, **options).double()
    with torch.no_grad():
        for parameter in (*embedding.parameters(), *softmax.parameters()):
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return embedding, softmax


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def plain_vector(embedding, token):
    """The vector of one token, by the definition."""
    clusters = embedding.clusters if embedding.div_val > 1 else [(0, VOCAB)]
    i = next(i for i, (low, high) in enumerate(clusters) if low <= token < high)
    vector = embedding.tables[i][token - clusters[i][0]]
    if len(embedding.projections):
        vector = embedding.projections[i] @ vector
    return math.sqrt(WIDTH) * vector


def plain_log_probabilities(softmax, hidden):
    """All log-probabilities of rows (N, d), cluster by cluster, by the definition."""
    scores = []
    for i in range(len(softmax.clusters)):
        projection = softmax.projection(i)
        projected = hidden if projection is None else hidden @ projection
        if i == 0 and len(softmax.clusters) > 1:
            gates = projected @ softmax.cluster_weight.T + softmax.cluster_bias
        scores.append(projected @ softmax.table(i).T + softmax.biases[i])
    if len(scores) == 1:
        return scores[0] - torch.logsumexp(scores[0], dim=1, keepdim=True)
    normaliser = torch.logsumexp(torch.cat([scores[0], gates], dim=1), dim=1, keepdim=True)
    columns = [scores[0] - normaliser]
    for i, score in enumerate(scores[1:]):
        columns.append(gates[:, i : i + 1] - normaliser + score - torch.logsumexp(score, dim=1, keepdim=True))
    return torch.cat(columns, dim=1)


def test_embedding_equals_the_definition(kind):
    embedding, _ = build(kind)
    tokens = torch.arange(VOCAB)[torch.randperm(VOCAB)].repeat(2)[:52].view(4, 13)
    got = embedding(tokens)
    want = torch.stack([plain_vector(embedding, int(token)) for token in tokens.reshape(-1)]).view(4, 13, WIDTH)
    assert relative_error(got, want) <= 1e-14
    weights = normal(*got.shape, seed=5)
    parameters = list(embedding.parameters())
    mine = torch.autograd.grad(got, parameters, weights)
    true = torch.autograd.grad(want, parameters, weights)
    for one, other in zip(mine, true, strict=True):
        assert relative_error(one, other) <= 1e-13


@pytest.fixture(params=["selects", "never waits"])
def way(request, monkeypatch):
    """On a device the host does not ask how many targets a cluster has."""
    ahead = request.param == "never waits"
    monkeypatch.setattr("equipoise.nn.embedding._host_runs_ahead", lambda tensor: ahead)
    if ahead:
        monkeypatch.setattr(torch.Tensor, "nonzero", None, raising=False)


def test_losses_and_gradients_equal_the_full_softmax(kind, way):
    embedding, softmax = build(kind)
    hidden = normal(5, 7, WIDTH, seed=1).requires_grad_()
    targets = torch.randint(VOCAB, (5, 7), generator=torch.Generator().manual_seed(2))
    parameters = [hidden, *softmax.parameters(), *embedding.parameters()]
    table = plain_log_probabilities(softmax, hidden.reshape(-1, WIDTH))
    want = -table.gather(1, targets.reshape(-1, 1)).view(5, 7)
    got = softmax(hidden, targets)
    assert got.shape == (5, 7)
    assert relative_error(got, want) <= 1e-13
    weights = normal(5, 7, seed=4)  # a weight per token, so that a wrong order would be seen
    mine = torch.autograd.grad(got, parameters, weights, allow_unused=True, materialize_grads=True)
    true = torch.autograd.grad(want, parameters, weights, allow_unused=True, materialize_grads=True)
    for one, other in zip(mine, true, strict=True):
        assert float((one - other).norm()) <= 1e-12 * max(1.0, float(other.norm()))
    logs = softmax.log_probabilities(hidden)
    assert relative_error(logs, table.view(5, 7, VOCAB)) <= 1e-13
    assert float((logs.detach().exp().sum(-1) - 1).abs().max()) <= 1e-13


def test_without_cutoffs_it_is_a_plain_softmax():
    embedding, softmax = build("full")
    hidden, targets = normal(6, WIDTH), torch.arange(6)
    want = cross_entropy(hidden @ embedding.tables[0].T + softmax.biases[0], targets, reduction="none")
    assert relative_error(softmax(hidden, targets), want) <= 1e-14


def test_scores_of_a_cluster_are_computed_for_its_own_targets_only(monkeypatch):
    _, softmax = build("clusters")
    rows = []
    tail = AdaptiveSoftmax._tail
    monkeypatch.setattr(AdaptiveSoftmax, "_tail", lambda self, i, h: rows.append((i, len(h))) or tail(self, i, h))
    targets = torch.tensor([0, 20, 8, 3, 28, 15, 6])
    softmax(normal(7, WIDTH), targets)
    assert rows == [(1, 1), (2, 3)]


def test_not_so_many_scores_that_they_would_fill_a_device(monkeypatch):
    _, softmax = build("clusters")
    monkeypatch.setattr("equipoise.nn.embedding._host_runs_ahead", lambda tensor: True)
    hidden, targets = normal(7, WIDTH), torch.tensor([0, 20, 8, 3, 28, 15, 6])
    rows, tail = [], AdaptiveSoftmax._tail
    monkeypatch.setattr(AdaptiveSoftmax, "_tail", lambda self, i, h: rows.append((i, len(h))) or tail(self, i, h))
    sizes = [high - low for low, high in softmax.clusters[1:]]
    assert sizes[0] < sizes[1]
    monkeypatch.setattr("equipoise.nn.embedding.MOST_SCORES", 7 * sizes[0])
    softmax(hidden, targets)
    assert rows == [(1, 7), (2, 3)]


def test_a_cluster_without_targets_gets_zero_gradients(way):
    embedding, softmax = build("clusters")
    softmax(normal(3, WIDTH), torch.tensor([0, 1, 2])).sum().backward()
    for tensor in (embedding.tables[2], embedding.projections[2], softmax.biases[2]):
        assert tensor.grad is not None
        assert float(tensor.grad.abs().max()) == 0


def test_vectors_and_projections_are_one_parameter():
    embedding, softmax = build("clusters")
    for i in range(3):
        assert softmax.table(i) is embedding.tables[i]
    assert softmax.projection(0) is softmax.projections[0]  # that of the head is free
    assert softmax.projection(1) is embedding.projections[1]
    assert softmax.projection(2) is embedding.projections[2]
    model = nn.ModuleDict({"embedding": embedding, "softmax": softmax})
    tables = 7 * 12 + 8 * 6 + 14 * 3
    projections = 12 * (12 + 6 + 3) + 12 * 12
    assert sum(p.numel() for p in model.parameters()) == tables + projections + VOCAB + 2 * (12 + 1)
    assert sum(t.numel() for t in model.state_dict().values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "float"])
def test_ties_survive_copies_and_moves(how):
    model = nn.ModuleDict(dict(zip(("embedding", "softmax"), build("clusters"), strict=True)))
    moves = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        "float": lambda m: m.float(),
    }
    model = moves[how](model)
    hidden = normal(2, WIDTH, dtype=model.embedding.tables[0].dtype)
    before = model.softmax.log_probabilities(hidden)
    with torch.no_grad():
        model.embedding.tables[1].mul_(2)
    assert model.softmax.table(1) is model.embedding.tables[1]
    assert not torch.equal(before, model.softmax.log_probabilities(hidden))


def test_free_weights_and_projections_do_not_touch_the_embedding():
    embedding, softmax = build("clusters", tie_weights=False, tie_projections=False)
    softmax(normal(4, WIDTH), torch.tensor([0, 8, 20, 28])).sum().backward()
    assert all(parameter.grad is None for parameter in embedding.parameters())
    assert all(parameter.grad is not None for parameter in softmax.parameters())
    assert [tuple(softmax.table(i).shape) for i in range(3)] == [(7, 12), (8, 6), (14, 3)]


def test_a_projection_without_clusters_is_tied():
    embedding, softmax = build("full_projected")
    assert softmax.projection(0) is embedding.projections[0]
    assert len(softmax.projections) == 0


@pytest.mark.parametrize("kind_of_half", ["full", "clusters"])
def test_low_precision_gives_losses_in_float32(kind_of_half):
    embedding, softmax = build(kind_of_half)
    tokens, targets = torch.randint(VOCAB, (2, 9)), torch.randint(VOCAB, (2, 9))
    want = softmax(embedding(tokens), targets)
    embedding.float(), softmax.float()
    with torch.autocast("cpu", torch.bfloat16):
        losses = softmax(embedding(tokens), targets)
        logs = softmax.log_probabilities(embedding(tokens))
    assert losses.dtype == logs.dtype == torch.float32
    assert relative_error(losses, want) <= 3e-2  # a few roundings of 2^-8
    embedding.bfloat16(), softmax.bfloat16()
    losses = softmax(embedding(tokens), targets)
    assert losses.dtype == torch.float32
    assert relative_error(losses, want) <= 5e-2


def test_initial_values():
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(4000, 64, cutoffs=(1000,), div_val=2)
    softmax = AdaptiveSoftmax(embedding)
    for tensor in (*embedding.parameters(), *softmax.projections):
        assert float(tensor.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert all(float(bias.detach().abs().max()) == 0 for bias in softmax.biases)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_outside_the_vocabulary_are_refused(kind, token, way):
    embedding, softmax = build(kind)
    with pytest.raises(IndexError):
        embedding(torch.tensor([[0, token]]))
    with pytest.raises(RuntimeError, match="out of bounds"):
        softmax(normal(2, WIDTH), torch.tensor([0, token]))


@pytest.mark.parametrize("cutoffs", [(0,), (5, 5), (9, 4), (VOCAB,), (2.5,)])
def test_bad_cutoffs_are_refused(cutoffs):
    with pytest.raises(ValueError, match="cutoffs must rise strictly"):
        AdaptiveEmbedding(VOCAB, WIDTH, cutoffs=cutoffs)


def test_vanishing_widths_and_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="leaves no width for cluster 2"):
        AdaptiveEmbedding(VOCAB, WIDTH, cutoffs=(5, 9), div_val=4)
    _, softmax = build("clusters")
    with pytest.raises(ValueError, match="expected \\(2, 3\\)"):
        softmax(normal(2, 3, WIDTH), torch.zeros(3, 2, dtype=torch.long))
