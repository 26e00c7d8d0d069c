"""Streams: columns, segments, rotation, ranks, resumption, and scores that say what they counted."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.data._draws import keyed_bits, keyed_integer, keyed_order
from equipoise.data.stream import StreamScore, TokenStream, score_stream

N = torch.arange(103)


def plain(tokens, batch_size, length):
    """The usual recipe: fold, transpose nothing, cut."""
    width = len(tokens) // batch_size
    data = tokens[: width * batch_size].view(batch_size, width)
    cuts = range(0, width - 1, length)
    return [(data[:, i : min(i + length, width - 1)], data[:, i + 1 : min(i + length, width - 1) + 1]) for i in cuts]


@given(st.integers(2, 120), st.integers(1, 7), st.integers(1, 40))
def test_segments_equal_the_plain_recipe(count, batch_size, length):
    tokens = torch.arange(count) * 3
    if count // batch_size < 2:
        with pytest.raises(ValueError, match="lower batch_size"):
            TokenStream(tokens, batch_size, length)
        return
    stream = TokenStream(tokens, batch_size, length)
    found, expected = list(stream.segments(epochs=1)), plain(tokens, batch_size, length)
    assert len(found) == len(expected) == stream.segments_per_epoch
    for segment, (inputs, targets) in zip(found, expected, strict=True):
        assert torch.equal(segment.inputs, inputs)
        assert torch.equal(segment.targets, targets)
    assert stream.scored_tokens == sum(targets.numel() for _, targets in expected)
    assert stream.scored_tokens + stream.dropped_tokens == count


def test_one_column_scores_every_token_but_the_first():
    stream = TokenStream(N, 1, 10)
    targets = torch.cat([segment.targets for segment in stream.segments(epochs=1)], dim=1)
    assert torch.equal(targets[0], N[1:])
    assert (stream.scored_tokens, stream.dropped_tokens) == (102, 1)


def test_memory_is_void_only_where_streams_begin():
    stream = TokenStream(N, 4, 10)
    starts = [segment.starts for segment in stream.segments(epochs=2)]
    assert starts == [True, False, False] * 2
    assert [segment.epoch for segment in stream.segments(epochs=2)] == [0, 0, 0, 1, 1, 1]


def test_drop_short_keeps_one_shape():
    stream = TokenStream(N, 4, 10, drop_short=True)
    assert {segment.inputs.shape for segment in stream.segments(epochs=3)} == {(4, 10)}
    assert stream.segments_per_epoch == 2
    assert (stream.scored_tokens, stream.dropped_tokens) == (80, 23)
    with pytest.raises(ValueError, match="at least 31 are needed"):
        TokenStream(N, 4, 30, drop_short=True)


@pytest.mark.parametrize("rotate", [False, True])
def test_a_resumed_stream_goes_on_where_it_stopped(rotate):
    stream = TokenStream(N, 4, 10, rotate=rotate, seed=5)
    whole = list(stream.segments(epochs=3))
    for stop in (1, 3, 5):
        position = whole[stop - 1].position
        assert isinstance(position, int)
        rest = list(TokenStream(N, 4, 10, rotate=rotate, seed=5).segments(position, epochs=3))
        assert len(rest) == len(whole) - stop
        for left, right in zip(rest, whole[stop:], strict=True):
            assert torch.equal(left.inputs, right.inputs)
            assert torch.equal(left.targets, right.targets)
            assert (left.epoch, left.index, left.position) == (right.epoch, right.index, right.position)


def test_rotation_reads_the_ring_from_another_token_in_each_pass():
    stream = TokenStream(N, 4, 10, rotate=True, seed=1)
    offsets = [stream.offset(epoch) for epoch in range(20)]
    assert len(set(offsets)) > 10
    assert all(0 <= offset < len(N) for offset in offsets)
    assert offsets != [TokenStream(N, 4, 10, rotate=True, seed=2).offset(epoch) for epoch in range(20)]
    per_epoch = stream.segments_per_epoch
    for epoch in range(3):
        rolled = TokenStream(N.roll(-offsets[epoch]), 4, 10)
        for index in range(per_epoch):
            assert torch.equal(stream.segment(epoch * per_epoch + index).inputs, rolled.segment(index).inputs)


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_ranks_together_see_the_rows_of_one_process(world_size):
    whole = TokenStream(N, 6, 5, rotate=True, seed=3)
    parts = [TokenStream(N, 6, 5, rotate=True, seed=3, rank=r, world_size=world_size) for r in range(world_size)]
    assert [row for part in parts for row in part.rows] == list(range(6))
    for position in range(2 * whole.segments_per_epoch):
        joined = torch.cat([part.segment(position).inputs for part in parts])
        assert torch.equal(joined, whole.segment(position).inputs)


def test_segments_move_and_small_integers_become_indices():
    segment = TokenStream(N.to(torch.int16), 2, 5).segment(0)
    assert segment.inputs.dtype == segment.targets.dtype == torch.int64
    assert segment.inputs.is_contiguous()
    assert segment.targets.is_contiguous()
    moved = segment.to("meta")
    assert moved.inputs.device.type == moved.targets.device.type == "meta"
    assert moved.position == segment.position


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"length": 0}, "length must be an integer of at least 1"),
        ({"rank": 2, "world_size": 2}, "rank 2 does not exist among 2"),
        ({"batch_size": 5, "world_size": 2}, "not a multiple of world_size=2; take 4"),
        ({"batch_size": 60}, "leave 1 a column, but at least 2 are needed; lower batch_size to at most 51"),
        ({"tokens": N[:5], "drop_short": True}, "at least 11 are needed; give a longer text or lower length"),
        ({"tokens": N[:1], "batch_size": 1}, "at least 2 are needed; give a longer text\\."),
        ({"tokens": N[None]}, "tokens must be a vector of integers"),
        ({"tokens": N.float()}, "tokens must be a vector of integers"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TokenStream(**{"tokens": N, "batch_size": 4, "length": 10, **options})


def markov(inputs, targets, memory):
    """A predictor with memory: the loss of a token depends on the sum of all inputs of its row so far."""
    carried = torch.zeros(len(inputs), dtype=torch.float64) if memory is None else memory
    sums = carried[:, None] + inputs.double().cumsum(1)
    return (sums.sin() + 2) * (targets + 1).log(), sums[:, -1]


@pytest.mark.parametrize("length", [1, 7, 102, 500])
def test_score_does_not_depend_on_the_segment_length(length):
    score = score_stream(markov, N, length)
    losses, _ = markov(N[None, :-1], N[None, 1:], None)
    assert score.tokens == 102
    assert score.dropped == 1
    assert score.nats == pytest.approx(float(losses.sum()), rel=1e-12)


def test_score_of_columns_counts_what_it_drops_and_ranks_add_up():
    whole = score_stream(markov, N, 10, batch_size=4)
    width = 103 // 4
    losses, _ = markov(N[: 4 * width].view(4, width)[:, :-1], N[: 4 * width].view(4, width)[:, 1:], None)
    assert (whole.tokens, whole.dropped) == (4 * (width - 1), 103 - 4 * (width - 1))
    assert whole.nats == pytest.approx(float(losses.sum()), rel=1e-12)
    parts = [score_stream(markov, N, 10, batch_size=4, rank=rank, world_size=2) for rank in range(2)]
    total = parts[0] + parts[1]
    assert (total.tokens, total.dropped) == (whole.tokens, whole.dropped)
    assert total.nats == pytest.approx(whole.nats, rel=1e-12)


def test_score_can_stop_early_and_says_so():
    score = score_stream(markov, N, 10, max_segments=3)
    assert (score.tokens, score.dropped) == (30, 73)


def test_half_precision_losses_are_summed_in_float32():
    def constant(inputs, targets, memory):
        return torch.full(targets.shape, 0.1, dtype=torch.bfloat16), memory

    score = score_stream(constant, torch.zeros(10_001, dtype=torch.int64), 10_000)
    assert score.loss == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)), rel=1e-5)


def test_a_mean_loss_is_refused():
    with pytest.raises(ValueError, match="not their mean"):
        score_stream(lambda inputs, targets, memory: (torch.zeros(()), memory), N, 10)


def test_a_report_has_the_counts_beside_the_perplexity():
    score = StreamScore(nats=200.0, tokens=100, dropped=3)
    report = score.report({"corpus": "toy", "tokens": "word", "vocabulary": 10, "sources": {}})
    assert report == {
        "loss": 2.0,
        "perplexity": pytest.approx(math.exp(2)),
        "bits_per_token": pytest.approx(2 / math.log(2)),
        "scored_tokens": 100,
        "dropped_tokens": 3,
        "corpus": "toy",
        "tokens": "word",
        "vocabulary": 10,
    }
    assert StreamScore(1e6, 1).perplexity == math.inf
    with pytest.raises(ValueError, match="no token was scored"):
        StreamScore().report()


def split_mix(*keys):
    """The same mixing in Python's own integers."""
    mask, bits = (1 << 64) - 1, 0
    for key in keys:
        bits = ((bits ^ (key & mask)) + 0x9E3779B97F4A7C15) & mask
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        bits ^= bits >> 31
    return bits


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_keyed_bits_equal_integer_arithmetic(seed, index):
    found = int(keyed_bits(seed, torch.tensor([index, index + 1]))[0])
    assert found % 2**64 == split_mix(seed, index)


def test_keyed_draws_are_spread_and_keyed():
    draws = torch.tensor([keyed_integer(10, 0, "rotation", epoch) for epoch in range(2000)])
    counts = torch.bincount(draws, minlength=10)
    assert (counts - 200).abs().max() < 60  # 4.5 standard deviations
    order = keyed_order(500, 7, 0)
    assert torch.equal(order.sort().values, torch.arange(500))
    assert not torch.equal(order, keyed_order(500, 7, 1))
    assert torch.equal(order, keyed_order(500, 7, 0))
