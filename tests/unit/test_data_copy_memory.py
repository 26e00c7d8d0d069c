"""The copy-memory task: both variants, place by place, and draws that ranks and resumed runs share."""

import dataclasses
import math

import pytest
import torch

from equipoise.data import load_data
from equipoise.data.copy_memory import CopyMemory, recall

SMALL = CopyMemory(length=12, train_size=40, valid_size=7, test_size=9)


@pytest.mark.parametrize("length", [1, 2, 12, 50])
@pytest.mark.parametrize("placeholders", [False, True])
def test_samples_place_by_place(length, placeholders):
    task = CopyMemory(length=length, placeholders=placeholders, train_size=5)
    inputs, targets = task.samples("train", torch.arange(5))
    assert inputs.shape == targets.shape == (5, length + 20)
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        at = dict(enumerate(x, start=1))  # places counted from 1, as in the definition
        digits = [at[place] for place in range(1, 11)]
        assert all(1 <= digit <= 8 for digit in digits)
        gap = [at[place] for place in range(11, length + 10)]
        assert gap == [0] * (length - 1)
        assert at[length + 10] == 9
        after = [at[place] for place in range(length + 11, length + 21)]
        assert after == ([9] * 10 if placeholders else [0] * 10)
        assert y == [0] * (length + 10) + digits


def test_a_sample_is_a_function_of_seed_split_and_number():
    inputs, _ = SMALL.samples("train", torch.arange(40))
    again, _ = SMALL.samples("train", torch.tensor([17, 3]))
    assert torch.equal(again, inputs[[17, 3]])
    longer, _ = dataclasses.replace(SMALL, length=30, train_size=100).samples("train", torch.arange(40))
    assert torch.equal(longer[:, :10], inputs[:, :10])  # a curriculum over lengths keeps the digits
    others = [
        dataclasses.replace(SMALL, seed=1).samples("train", torch.arange(7))[0],
        SMALL.samples("valid", torch.arange(7))[0],
        SMALL.samples("test", torch.arange(7))[0],
    ]
    for other in others:
        assert (other[:, :10] != inputs[:7, :10]).any(1).all()


def test_digits_are_uniform_and_independent():
    task = CopyMemory(length=1)
    digits = task.samples("train", torch.arange(20_000))[0][:, :10]
    counts = torch.stack([(digits == symbol).sum(0) for symbol in range(1, 9)])  # (8, 10)
    deviation = (counts - 2500).double().abs() / math.sqrt(20_000 * 7 / 64)
    assert deviation.max() < 4.5
    centred = digits.double() - digits.double().mean(0)
    correlation = torch.corrcoef(centred.T) - torch.eye(10, dtype=torch.float64)
    assert correlation.abs().max() < 4.5 / math.sqrt(20_000)


def test_the_memoryless_level():
    assert CopyMemory().memoryless_loss == pytest.approx(0.0495, abs=5e-5)
    # A predictor that is sure of every zero and knows nothing of the digits.
    inputs, targets = SMALL.samples("test", torch.arange(9))
    scores = torch.full((*inputs.shape, 10), -torch.inf, dtype=torch.float64)
    scores[:, :-10, 0] = 0
    scores[:, -10:, 1:9] = 0
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
    assert float(loss) == pytest.approx(SMALL.memoryless_loss, rel=1e-12)


def test_a_pass_visits_each_training_sample_once_in_a_new_order():
    passes = [torch.cat([b.indices for b in SMALL.batches(8, position=5 * e, epochs=e + 1)]) for e in range(2)]
    for order in passes:
        assert torch.equal(order.sort().values, torch.arange(40))
    assert not torch.equal(*passes)


def test_training_leaves_out_what_does_not_fill_a_batch_and_evaluation_does_not():
    assert [len(b.indices) for b in SMALL.batches(16, epochs=1)] == [16, 16]
    assert [b.indices.tolist() for b in SMALL.batches(4, "valid", epochs=1)] == [[0, 1, 2, 3], [4, 5, 6]]


def test_a_resumed_run_and_ranks_see_the_same():
    whole = list(SMALL.batches(8, epochs=2))
    rest = list(SMALL.batches(8, position=whole[6].position, epochs=2))
    assert [b.indices.tolist() for b in rest] == [b.indices.tolist() for b in whole[7:]]
    assert [b.epoch for b in whole] == [0] * 5 + [1] * 5
    for split, size in (("train", 8), ("valid", 4)):
        for position in range(2):
            parts = [SMALL.batch(position, size, split, rank=rank, world_size=2) for rank in range(2)]
            one = SMALL.batch(position, size, split)
            assert torch.equal(torch.cat([part.inputs for part in parts]), one.inputs)
            assert torch.equal(torch.cat([part.targets for part in parts]), one.targets)


def test_batches_move():
    batch = SMALL.batch(0, 8).to("meta")
    assert {t.device.type for t in (batch.inputs, batch.targets, batch.indices)} == {"meta"}


def test_recall_counts_digits_and_whole_samples():
    _, targets = SMALL.samples("test", torch.arange(3))
    scores = torch.nn.functional.one_hot(targets, 10).double()
    scores[:, 0] = torch.nn.functional.one_hot(torch.tensor(5), 10).double()  # a wrong zero does not count
    scores[1, -3:] = 0.0  # argmax 0 is never a digit
    digits, whole = recall(scores, targets)
    assert digits.tolist() == pytest.approx([1.0, 0.7, 1.0])
    assert whole.tolist() == [True, False, True]


def test_info_and_registry():
    task = load_data("copy_memory", length=30, placeholders=True)
    assert task == CopyMemory(length=30, placeholders=True)
    assert task.info["variant"] == "placeholders"
    assert (task.info["train_samples"], task.info["test_samples"]) == (20_000, 2_000)
    assert task.info["memoryless_loss"] == pytest.approx(10 * math.log(8) / 50)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: CopyMemory(length=0), "length must be an integer of at least 1"),
        (lambda: SMALL.size("dev"), "unknown split 'dev'"),
        (lambda: SMALL.samples("valid", torch.tensor([0, 7])), "has samples 0 to 6, got indices 0 to 7"),
        (lambda: SMALL.batch(0, 41), "batch_size=41 exceeds train_size=40"),
        (lambda: SMALL.batch(0, 9, world_size=2), "not a multiple of world_size=2; take 8"),
        (lambda: SMALL.batch(0, 8, rank=1), "rank 1 does not exist among 1"),
        (lambda: SMALL.batch(-1, 8), "position must be an integer of at least 0"),
    ],
)
def test_bad_settings_are_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()
