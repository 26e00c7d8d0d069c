"""Batches done in shares: the same losses, gradients and memory as in one piece."""

import dataclasses

import pytest
import torch

from equipoise._draws import Rows
from equipoise.tasks import CopyMemoryTask, language_model
from equipoise.train.checkpoint import CheckpointError
from equipoise.train.loop import train
from equipoise.train.shares import Share, joined, make_shares, part_of
from tests.runs import COPY, recipe, text_recipe
from tests.training import DROPOUT, OFTEN, PENALTY, PLAIN, TRELLIS, close, lines, saved, train_records, with_model

CPU = torch.device("cpu")


def cases(folder):
    """Recipes by name, every dropout and the penalty on."""
    settings = (*PLAIN, *PENALTY, *OFTEN)
    trellis = text_recipe(folder, *settings, "task.activation=1.0", "task.smoothness=1.0")
    return {
        "copy memory": recipe(COPY, *settings, *DROPOUT),
        "along the residual": recipe(COPY, *settings, *DROPOUT, "penalty.along=residual", "penalty.probes=1"),
        "transformer": text_recipe(folder, *settings, *DROPOUT),
        "trellisnet": with_model(trellis, **TRELLIS),
        "chunks": with_model(trellis, **TRELLIS, chunk_size=3),
        "warm-up": text_recipe(folder, *settings, *DROPOUT, "warmup.steps=2", "penalty.warmup_weight=0.1"),
    }


def assert_equal_runs(one, two, rel=1e-5):
    """Losses and gradient norms of every step, and the weights after the last."""
    a, b = train_records(one), train_records(two)
    assert a.keys() == b.keys()
    for step, record in a.items():
        for key in ("loss", "nats", "penalty", "grad_norm"):
            assert (key in b[step]) == (key in record)
            if key in record:
                assert b[step][key] == pytest.approx(record[key], rel=rel), (step, key)
    assert close(saved(one)["model"], saved(two)["model"]) == []


@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        ("copy memory", 2),
        ("along the residual", 4),
        ("transformer", 4),
        ("trellisnet", 2),
        ("chunks", 2),
        ("warm-up", 2),
    ],
)
def test_accumulation_changes_nothing_but_memory(tmp_path, name, accumulation):
    """Float32 sums in another order: to 1e-5."""
    given = cases(tmp_path / "text")[name]
    split = dataclasses.replace(given, train=dataclasses.replace(given.train, accumulation=accumulation))
    train(given, tmp_path / "one")
    train(split, tmp_path / "two")
    assert_equal_runs(tmp_path / "one", tmp_path / "two")
    assert lines(tmp_path / "two")[0]["accumulation"] == accumulation
    systems = [train_records(tmp_path / run)[1]["forward"]["systems"] for run in ("one", "two")]
    assert systems[0] == systems[1]


@pytest.mark.parametrize("sizes", [(3, 5), (7, 1), (0, 8), (8, 0)])
def test_losses_count_rows_not_shares(tmp_path, monkeypatch, sizes):
    """Shares of unequal size, also an empty one, weigh what they hold."""
    given = recipe(COPY, *PLAIN, *DROPOUT, *PENALTY, *OFTEN)
    train(given, tmp_path / "one")
    data = CopyMemoryTask.data
    bounds = [(0, sizes[0]), (sizes[0], 8)]

    def uneven(self):
        if self.world_size == 1:
            return data(self)
        whole = data(self.share(0, 1))
        start, stop = bounds[self.rank]

        def narrowed(position):
            batch = whole.train(position)
            parts = {name: getattr(batch, name)[start:stop] for name in ("inputs", "targets", "indices")}
            return dataclasses.replace(batch, **parts, rows=Rows(start, stop, 8))

        return dataclasses.replace(whole, train=narrowed)

    monkeypatch.setattr(CopyMemoryTask, "data", uneven)
    train(recipe(COPY, *PLAIN, *DROPOUT, *PENALTY, *OFTEN, "train.accumulation=2"), tmp_path / "two")
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(("first", "second"), [(1, 2), (4, 2)])
def test_memory_survives_another_split(tmp_path, first, second):
    """A run saved with one number of shares goes on with another as if it had been in one piece throughout."""
    settings = (*PLAIN, *DROPOUT, "train.log_every=1")
    short = text_recipe(tmp_path / "text", *settings, "train.steps=2", f"train.accumulation={first}")
    longer = text_recipe(tmp_path / "text", *settings, "train.steps=4", f"train.accumulation={second}")
    train(short, tmp_path / "run")
    train(longer, tmp_path / "run", resume=True)
    train(text_recipe(tmp_path / "text", *settings, "train.steps=4"), tmp_path / "whole")
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


def test_memory_of_another_batch_size_is_refused(tmp_path):
    train(text_recipe(tmp_path / "text", "train.steps=1"), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"memory of 4 streams, but batches have 2 rows now; .*batch_size=4"):
        train(text_recipe(tmp_path / "text", "train.steps=2", "task.batch_size=2"), tmp_path / "run", resume=True)


@pytest.mark.parametrize(("processes", "accumulation", "near"), [(3, 1, 9), (1, 16, 16), (2, 3, 6)])
def test_a_batch_that_cannot_be_split_is_refused(processes, accumulation, near):
    task = recipe(COPY).make_task(world_size=processes)
    shares = processes * accumulation
    with pytest.raises(ValueError, match=rf"task.batch_size=8 cannot be split into {shares} equal shares.*take {near}"):
        make_shares(task, accumulation)


def test_shares_are_the_rows_of_the_batch_and_load_the_corpus_once(tmp_path, monkeypatch):
    given = text_recipe(tmp_path / "text", "task.batch_size=4")
    whole = given.make_task().data().train(3)
    loaded, load = [], language_model.load_text
    monkeypatch.setattr(language_model, "load_text", lambda *a, **b: loaded.append(1) or load(*a, **b))
    shares = [share for rank in (0, 1) for share in make_shares(given.make_task(rank=rank, world_size=2), 2)]
    assert len(loaded) == 2  # once in each process
    batches = [share.splits.train(3) for share in shares]
    assert [batch.rows for batch in batches] == [Rows(k, k + 1, 4) for k in range(4)]
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), whole.inputs)


def test_a_carry_is_joined_and_parted_by_rows():
    tree = {"h": torch.arange(12.0).reshape(6, 2), "pair": (torch.arange(6), torch.tensor(5)), "length": 7}

    def part(start, stop):
        pair = (tree["pair"][0][start:stop], tree["pair"][1])
        return Rows(start, stop, 6), {"h": tree["h"][start:stop], "pair": pair, "length": 7}

    whole = joined([part(0, 2), (Rows(2, 2, 6), None), part(2, 6)])
    assert whole["rows"] == 6
    assert torch.equal(whole["value"]["h"], tree["h"])
    assert torch.equal(whole["value"]["pair"][0], tree["pair"][0])
    assert whole["value"]["length"] == 7
    for rows in (Rows(0, 3, 6), Rows(3, 6, 6), Rows(5, 6, 6)):
        taken = part_of(whole, rows, CPU)
        assert torch.equal(taken["h"], tree["h"][rows.start : rows.stop])
        assert torch.equal(taken["pair"][1], tree["pair"][1])
    assert part_of(whole, Rows(6, 6, 6), CPU) is None
    assert joined([(Rows(0, 6, 6), None)]) is None
    assert joined([(None, None)]) is None
    assert part_of(None, Rows(0, 6, 6), CPU) is None
    assert Share(None).carry is None
