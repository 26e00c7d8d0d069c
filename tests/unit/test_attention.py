"""Relative attention against a plain reference that looks every distance up, in float64."""

import math

import pytest
import torch
from torch import nn

from equipoise import DEQ
from equipoise.nn.attention import RelativeAttention, initialised, sinusoids
from equipoise.ops.attention.naive import relative_shift
from tests.gradients import normal, relative_error

D, HEADS = 8, 2


def build(**options):
    torch.manual_seed(1)
    layer = RelativeAttention(D, HEADS, init_std=0.3, **options).double()
    with torch.no_grad():
        layer.content_bias.copy_(normal(HEADS, D // HEADS, seed=2))
        layer.position_bias.copy_(normal(HEADS, D // HEADS, seed=3))
        layer.output.bias.copy_(normal(D, seed=4))
    return layer


def plain_attention(layer, z, u, z0=None, u0=None):
    """The definition, one query, key and head at a time."""
    if z0 is None:
        z0, u0 = z[:, :0], u[:, :0]
    joint = torch.cat([z0, z], dim=1) @ layer.qkv.weight.T + torch.cat([u0, u], dim=1)
    q, k, v = joint.split(D, dim=-1)
    batch, length, past, size = z.shape[0], z.shape[1], z0.shape[1], D // HEADS
    rows = []
    for b in range(batch):
        for i in range(length):
            heads = []
            for h in range(HEADS):
                part = slice(h * size, (h + 1) * size)
                query = q[b, past + i, part]
                scores, values = [], []
                for j in range(past + length):
                    delta = past + i - j
                    if delta < 0 or (layer.local_size is not None and delta >= layer.local_size):
                        continue
                    angles = [delta * 10000 ** (-2 * m / D) for m in range(D // 2)]
                    wave = torch.tensor(
                        [math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64
                    )
                    encoded = (layer.position.weight @ wave)[part]
                    content = (query + layer.content_bias[h]) @ k[b, j, part]
                    distance = (query + layer.position_bias[h]) @ encoded
                    scores.append((content + distance) / math.sqrt(size))
                    values.append(v[b, j, part])
                heads.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
            rows.append(layer.output.weight @ torch.cat(heads) + layer.output.bias)
    return torch.stack(rows).view(batch, length, D)


@pytest.mark.parametrize(("length", "past"), [(1, 0), (5, 0), (1, 4), (4, 3), (3, 7)])
def test_shift_equals_lookup_by_distance(length, past):
    keys = past + length
    scores = normal(2, 3, length, keys + 1)
    got = relative_shift(scores)
    assert got.shape == (2, 3, length, keys)
    assert got.untyped_storage().data_ptr() == scores.untyped_storage().data_ptr()  # no copy
    for i in range(length):
        for j in range(past + i + 1):
            assert torch.equal(got[..., i, j], scores[..., i, keys - (past + i - j)])


@pytest.mark.parametrize("options", [{}, {"weight_norm": True}, {"local_size": 3}, {"local_size": 1}], ids=str)
@pytest.mark.parametrize(("length", "past"), [(1, 0), (5, 0), (1, 3), (4, 3)])
def test_values_and_gradients_equal_the_definition(options, length, past):
    layer = build(**options)
    z, u = normal(2, length, D, seed=5).requires_grad_(), normal(2, length, 3 * D, seed=6).requires_grad_()
    memory = (normal(2, past, D, seed=7), normal(2, past, 3 * D, seed=8)) if past else None
    kept = layer.past(*memory) if memory else None
    got = layer(z, u, layer.positions(length, past), kept)
    want = plain_attention(layer, z, u, *(memory or ()))
    assert relative_error(got, want) <= 1e-13
    tensors = [z, u, *layer.parameters()]
    weights = normal(*got.shape, seed=9)
    mine = torch.autograd.grad(got, tensors, weights)
    true = torch.autograd.grad(want, tensors, weights)
    for one, other in zip(mine, true, strict=True):
        assert float((one - other).norm()) <= 1e-12 * max(1.0, float(other.norm()))


def test_memory_equals_a_longer_segment():
    layer = build(local_size=5)
    z, u = normal(2, 9, D, seed=5), normal(2, 9, 3 * D, seed=6)
    whole = layer(z, u, layer.positions(9))
    part = layer(z[:, 6:], u[:, 6:], layer.positions(3, 6), layer.past(z[:, :6], u[:, :6]))
    assert relative_error(part, whole[:, 6:]) <= 1e-14


def test_later_and_distant_positions_are_not_seen():
    layer = build(local_size=3)
    z, u = normal(1, 8, D, seed=5).requires_grad_(), normal(1, 8, 3 * D, seed=6)
    out = layer(z, u, layer.positions(8))
    for i in range(8):
        seen = torch.autograd.grad(out[0, i].sum(), z, retain_graph=True)[0][0].abs().sum(dim=1)
        inside = (torch.arange(8) <= i) & (torch.arange(8) > i - 3)
        assert torch.equal(seen > 0, inside)


def test_second_derivatives_and_forward_mode_agree():
    layer = build()
    z, u, positions = normal(1, 3, D, seed=5), normal(1, 3, 3 * D, seed=6), layer.positions(3)
    assert torch.autograd.gradgradcheck(lambda z: layer(z, u, positions), z.requires_grad_())
    v = normal(1, 3, D, seed=7)
    forward = torch.func.jvp(lambda z: layer(z, u, positions), (z.detach(),), (v,))[1]
    out = layer(z, u, positions)
    dummy = torch.zeros_like(out).requires_grad_()
    pulled = torch.autograd.grad(out, z, dummy, create_graph=True)[0]
    assert relative_error(forward, torch.autograd.grad(pulled, dummy, v)[0]) <= 1e-13


@pytest.mark.parametrize("d", [2, 6, 64])
def test_sinusoids(d):
    distance = torch.tensor([0, 1, 7, 300])
    got = sinusoids(distance, d, torch.float64)
    for row, delta in zip(got, distance.tolist(), strict=True):
        angles = [delta * 10000 ** (-2 * k / d) for k in range(d // 2)]
        want = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert relative_error(row, torch.tensor(want, dtype=torch.float64)) <= 1e-13
    assert sinusoids(distance, d, torch.bfloat16).dtype == torch.bfloat16


def test_one_mask_on_the_distances_for_the_whole_batch():
    layer = build(position_dropout=0.5)
    full = build()
    kept = []
    for seed in range(2):
        torch.manual_seed(seed)
        distances, _ = layer.positions(4, 2)
        torch.manual_seed(seed)
        mask = (torch.rand(1, D) >= 0.5).double() / 0.5
        table = sinusoids(torch.arange(5, -1, -1), D, torch.float64) * mask
        want = (table @ full.position.weight.T).view(6, HEADS, D // HEADS).permute(1, 2, 0)
        assert relative_error(distances[..., 1:], want) <= 1e-14
        assert float(distances[..., 0].detach().abs().max()) == 0
        kept.append(distances)
    assert not torch.equal(*kept)
    layer.eval()
    assert torch.equal(layer.positions(4, 2)[0], full.positions(4, 2)[0])


class _Cell(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.seen = []

    def forward(self, z, u, positions):
        self.seen.append(self.attention(torch.zeros_like(z), u, positions).detach())
        return torch.tanh(0.1 * self.attention(z, u, positions))


def test_the_attention_mask_is_constant_during_a_solve():
    layer = build(dropout=0.5)
    u = normal(2, 4, 3 * D, seed=6)
    deq = DEQ(_Cell(layer), initial_state=lambda u, positions: u.new_zeros(2, 4, D), in_dims=(0, None))
    deq(u, layer.positions(4)).value.sum().backward()
    first = list(deq.cell.seen)
    assert len(first) > 2
    assert all(torch.equal(value, first[0]) for value in first)
    deq(u, layer.positions(4))
    assert not torch.equal(deq.cell.seen[-1], first[0])


def test_initial_weights_are_effective_under_weight_norm():
    torch.manual_seed(0)
    layer = RelativeAttention(256, 4, weight_norm=True, init_std=0.02)
    for linear in (layer.qkv, layer.position, layer.output):
        assert float(linear.weight.detach().std()) == pytest.approx(0.02, rel=0.03)
        assert torch.allclose(linear.weight_g.squeeze(1), linear.weight_v.norm(dim=1))
    wide = initialised(nn.Linear(10_000, 16), 0.05, False)
    assert float(wide.weight.detach().std()) == pytest.approx(0.01, rel=0.03)  # 1/√fan-in is smaller
    assert float(wide.bias.detach().abs().max()) == 0


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="multiple of heads, got d_model=10, heads=4; the next one up is 12"):
        RelativeAttention(10, 4)
    with pytest.raises(ValueError, match="local_size must be an integer of at least 1, got 0"):
        RelativeAttention(8, 2, local_size=0)
    with pytest.raises(ValueError, match="init_std must be a number"):
        RelativeAttention(8, 2, init_std=0.0)
