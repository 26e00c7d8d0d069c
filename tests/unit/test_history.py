"""The ring of past states against plain lists."""

import pytest
import torch

from equipoise import _leaves
from equipoise._history import GROWTH, History
from tests.problems import gaussian

SIZES = (5, 3)


def state(seed, systems=4):
    return [gaussian(systems, size, seed=10 * seed + i) for i, size in enumerate(SIZES)]


def flat(z):
    return torch.cat(z, dim=1)


def filled(capacity, pushes, differentiable=False):
    """A history, and the states its slots should hold, by slot."""
    history, slots = History(state(0), capacity, differentiable), {}
    for i in range(pushes):
        z = state(i)
        slot = history.push(z)
        assert slot == (i if capacity is None else i % capacity) == history.newest
        slots[slot] = z
    return history, [slots[slot] for slot in sorted(slots)]


CASES = [(None, 1), (None, GROWTH), (None, 2 * GROWTH + 3), (1, 3), (3, 2), (3, 3), (3, 7)]


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize(("capacity", "pushes"), CASES)
def test_dots_and_combine(capacity, pushes, differentiable):
    history, slots = filled(capacity, pushes, differentiable)
    assert len(history) == len(slots)
    stacked = torch.stack([flat(z) for z in slots], dim=1)  # (N, slots, D)
    one, two = state(91), state(92)
    expected = torch.stack([flat(one), flat(two)], dim=1) @ stacked.mT
    assert torch.allclose(history.dots(one, two), expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(history.dots(one), expected[:, :1], rtol=1e-12, atol=1e-12)
    weights = gaussian(4, len(slots), seed=93)
    combined = history.combine(weights)
    assert [leaf.shape for leaf in combined] == [(4, size) for size in SIZES]
    assert torch.allclose(flat(combined), (weights[:, None] @ stacked)[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize(("capacity", "pushes"), CASES)
def test_rows(capacity, pushes, differentiable):
    history, slots = filled(capacity, pushes, differentiable)
    index = torch.tensor([2, 0])
    part = history.rows(index)
    one = [leaf[index] for leaf in state(91)]
    assert torch.allclose(part.dots(one), history.dots(state(91))[index], rtol=1e-12)
    assert len(part) == len(history)
    # the two go on apart from each other
    part.push([leaf[index] for leaf in state(95)])
    assert len(history) == len(slots)
    assert torch.allclose(
        history.dots(state(91))[:, 0], torch.stack([_leaves.dot(state(91), z) for z in slots], dim=1), rtol=1e-12
    )


def test_pushed_states_are_copied_and_later_changes_do_not_show():
    history = History(state(0), 3)
    z = state(1)
    history.push(z)
    before = history.dots(state(2)).clone()
    z[0].add_(1.0)
    assert torch.equal(history.dots(state(2)), before)


@pytest.mark.parametrize("capacity", [None, 3])
@pytest.mark.parametrize("differentiable", [False, True])
def test_clear_forgets_states_and_keeps_storage(capacity, differentiable):
    history, _ = filled(capacity, 3, differentiable)
    held = history.nbytes
    history.clear()
    assert len(history) == 0
    assert all(
        bool((leaf == 0).all()) and leaf.shape == (4, size)
        for leaf, size in zip(history.combine(torch.zeros(4, 0, dtype=torch.float64)), SIZES, strict=True)
    )
    z = state(8)
    assert history.push(z) == 0
    assert torch.allclose(history.dots(z)[:, 0, 0], _leaves.dot(z, z), rtol=1e-12)
    if not differentiable:
        assert history.nbytes == held


def test_storage_is_leaf_by_leaf_and_follows_the_steps():
    ring, _ = filled(3, 2)
    per_state = 4 * sum(SIZES) * 8
    assert ring.nbytes == 3 * per_state
    growing, _ = filled(None, 1)
    assert growing.nbytes == GROWTH * per_state
    growing, _ = filled(None, GROWTH + 1)
    assert growing.nbytes == 2 * GROWTH * per_state
    assert [[block.shape[-1] for block in blocks] for blocks in growing._blocks] == [[size] * 2 for size in SIZES]


def test_gradients_flow_through_a_differentiable_history():
    history = History(state(0), 2, differentiable=True)
    states = [[leaf.requires_grad_() for leaf in state(i)] for i in range(3)]
    for z in states:
        history.push(z)
    weights = gaussian(4, 2, seed=5)
    total = sum(leaf.sum() for leaf in history.combine(weights))
    grads = torch.autograd.grad(total, [z[0] for z in states], allow_unused=True)
    assert grads[0] is None  # overwritten by the third
    assert torch.allclose(grads[2], weights[:, :1].expand(4, SIZES[0]))  # which sits in its slot 0
    assert torch.allclose(grads[1], weights[:, 1:].expand(4, SIZES[0]))


def test_the_algebra_of_leaves():
    a, b = state(1), state(2)
    fa, fb = flat(a), flat(b)
    scale = gaussian(4, seed=3)
    assert torch.allclose(flat(_leaves.axpy(a, 0.3, b)), fa + 0.3 * fb)
    assert torch.allclose(flat(_leaves.axpy(a, scale, b)), fa + scale[:, None] * fb)
    assert torch.allclose(_leaves.dot(a, b), (fa * fb).sum(dim=1))
    assert torch.allclose(_leaves.norm(a), fa.norm(dim=1))
    assert torch.allclose(_leaves.norm(a, "rms"), fa.square().mean(dim=1).sqrt())
    mask = torch.tensor([True, False, True, False])
    for some in (mask, mask | True, mask & False):
        assert torch.equal(flat(_leaves.choose(some, a, b)), torch.where(some[:, None], fa, fb))
    with_grad = [leaf.clone().requires_grad_() for leaf in a]
    assert torch.equal(flat(_leaves.choose(mask, with_grad, b)), torch.where(mask[:, None], fa, fb))
    b[1][2, 0] = torch.inf
    a[0][1, 1] = torch.nan
    assert _leaves.all_finite(b).tolist() == [True, True, False, True]
    assert _leaves.all_finite(a).tolist() == [True, False, True, True]
