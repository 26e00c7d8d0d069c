"""Constants of distances that relative attention keeps, and what comes before the distances."""

import pytest
import torch

from equipoise.nn import attention
from equipoise.nn.attention import RelativeAttention, sinusoids
from equipoise.ops.attention.naive import out_of_sight
from tests.kernels import kernel_device

DEVICE = kernel_device()
SIZES = [(1, 0), (5, 0), (1, 4), (7, 9), (8, 8), (16, 16), (3, 30)]


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch):
    monkeypatch.setattr(attention, "_kept", {})


def build(**options):
    torch.manual_seed(1)
    return RelativeAttention(8, 2, init_std=0.3, **{"backend": "naive", **options}).to(DEVICE)


def assert_right(layer, length, past, dtype=torch.float32):
    """Made from what is kept, or anew: the same bits as by definition."""
    keys = length + past
    distances, blocked = layer.positions(length, past)
    assert torch.equal(blocked, out_of_sight(length, past, layer.local_size, blocked.device))
    table = sinusoids(torch.arange(keys - 1, -1, -1, device=DEVICE), 8, torch.float32).to(dtype)
    expected = table @ layer.position.weight.to(dtype).mT
    assert distances.dtype == dtype
    close = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(distances[..., -keys:].flatten(0, 1).mT, expected, rtol=close, atol=close)


@pytest.mark.parametrize("local_size", [None, 3])
def test_any_lengths_share_what_is_kept(local_size):
    layer = build(local_size=local_size)
    for length, past in SIZES:
        assert_right(layer, length, past)
    assert [key[0] for key in attention._kept] == [1, 8, 16, 32, 64]
    before = dict(attention._kept)
    for length, past in SIZES[1:]:
        assert_right(layer, length, past)
    assert attention._kept == before


def test_dtypes_have_tables_of_their_own():
    layer = build()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_right(layer, 4, 3, torch.bfloat16)
    assert_right(layer, 4, 3)
    assert layer.double().positions(4, 3)[0].dtype == torch.float64
    assert {key[3] for key in attention._kept} == {torch.bfloat16, torch.float32, torch.float64}


def test_long_ones_are_not_kept(monkeypatch):
    monkeypatch.setattr(attention, "MOST_KEPT", 8)
    layer = build()
    assert_right(layer, 5, 4)
    assert not attention._kept


def test_nothing_of_a_recording_or_a_transform_is_kept(monkeypatch):
    layer = build()
    torch.func.vmap(lambda x: x * layer.positions(5, 2)[0].sum())(torch.ones(2, device=DEVICE))
    torch.func.grad(lambda x: (x * layer.positions(5, 2)[0]).sum())(torch.ones((), device=DEVICE))
    with monkeypatch.context() as patch:
        patch.setattr(attention, "being_recorded", lambda: True)
        assert_right(layer, 5, 2)
        assert not attention._kept
    assert_right(layer, 5, 2)
    assert len(attention._kept) == 1
    monkeypatch.setattr(attention, "being_recorded", lambda: True)
    monkeypatch.setattr(attention, "sinusoids", None)  # what was kept before is used
    assert layer.positions(4, 2)[1].shape == (4, 6)


def test_what_inference_mode_makes_can_be_differentiated_with():
    layer = build()
    with torch.inference_mode():
        layer.positions(5, 2)
    assert len(attention._kept) == 1
    layer.positions(5, 2)[0].sum().backward()
    assert layer.position.weight.grad.any()


@pytest.mark.parametrize("past", [0, 2, 5])
@pytest.mark.parametrize("local_size", [None, 3])
def test_larger_distances_ahead_are_not_seen(past, local_size):
    """What kernels are given without gradients makes the same of any state, also where the map is written out."""
    layer, plain = build(local_size=local_size, backend="triton"), build(local_size=local_size)
    z, u = torch.randn(2, 6, 8, device=DEVICE), torch.randn(2, 6, 24, device=DEVICE)
    older = torch.randn(2, past, 8, device=DEVICE), torch.randn(2, past, 24, device=DEVICE)
    with torch.no_grad():
        remembered = plain.past(*older) if past else None
        expected = plain(z, u, plain.positions(6, past), remembered)
        positions = layer.positions(6, past)
        assert positions[0].shape[-1] % attention.ALIGNED == 0
        assert positions[0].is_contiguous()
        assert positions[0][..., 0].any()
        for each in (layer, plain):
            torch.testing.assert_close(each(z, u, positions, remembered), expected, rtol=1e-5, atol=1e-5)
    assert not layer.positions(6, past)[0][..., 0].any()  # with gradients there are zeros
