"""What tests of training look at: records and checkpoints, without what a clock says."""

import dataclasses

import torch
from torch import Tensor

from equipoise.train.checkpoint import latest_checkpoint, load_checkpoint
from equipoise.train.recipe import Recipe
from equipoise.train.tracking import read_metrics

LSTM = {"name": "lstm_copy_memory", "widths": [8]}
PLAIN = ("solver=picard", "adjoint.solver=picard", "stop.rtol=0.0", "train.optimiser=sgd", "train.optimiser.lr=0.1")
"""A fixed number of plain iterations, and no Adam: both would magnify rounding."""
DROPOUT = ("model.dropout=0.2", "model.attention_dropout=0.1")
PENALTY = ("penalty.weight=0.1", "penalty.probability=0.7", "jitter.low=-1", "jitter.high=1")
OFTEN = ("train.steps=3", "train.log_every=1", "train.evaluate_every=3", "train.save_every=3")
TRELLIS = {
    "name": "deq_trellisnet_small",
    "embedding_size": 6,
    "hidden_size": 8,
    "dropout": 0.2,
    "dropout_in": 0.2,
    "dropout_hidden": 0.2,
    "dropconnect": 0.2,
    "dropout_words": 0.1,
}
TIMED = ("seconds", "seconds_per_step", "tokens_per_second")


def with_model(given: Recipe, **model) -> Recipe:
    """A recipe with another model."""
    return dataclasses.replace(given, model=model)


def lines(out, timed=False):
    """The records of a run, without what a clock says unless it is wanted."""
    records = read_metrics(out / "metrics.jsonl")
    for record in records if not timed else ():
        for table in (record, record.get("train", {})):
            for key in TIMED:
                table.pop(key, None)
    return records


def train_records(out, timed=False):
    """The training records of a run by step."""
    return {record["step"]: record["train"] for record in lines(out, timed) if "train" in record}


def valid_records(out):
    """The records with evaluations by step."""
    return {record["step"]: record for record in lines(out) if "valid" in record}


def saved(out):
    """Everything in the newest checkpoint but the time."""
    checkpoint = load_checkpoint(latest_checkpoint(out / "checkpoints"))
    assert checkpoint.trainer.pop("seconds") >= 0
    return {"model": checkpoint.model, "trainer": checkpoint.trainer, "config": checkpoint.config}


def same(a, b):
    """Equality bit for bit, all the way down."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def close(a, b, rtol=1e-5, atol=1e-6):
    """Equality of two state dicts to a tolerance; returns the largest excess by name."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.allclose(a[name], b[name], rtol=rtol, atol=atol)]
