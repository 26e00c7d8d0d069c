"""Ablations on a device: steps of every variant are recorded, and several runs share one device."""

import dataclasses
from pathlib import Path

import pytest
import torch

from equipoise.train.ablation import Ablation, make_jobs, run_jobs
from equipoise.train.ablation_table import summarise
from tests.unit.test_train_captured import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FILE = Path(__file__).parents[2] / "recipes" / "ablations" / "mdeq_tiny.toml"
WHOLE = Ablation.read(FILE)
# A short warm-up, set before the variants' own settings; some of them have none.
SMALL = dataclasses.replace(
    WHOLE, settings=(*(s for s in WHOLE.settings if not s.startswith("warmup.steps")), "warmup.steps=5")
)
CHANGES = (
    "task.data=shapes",
    'task.options={size=32, train_size=128, test_size=32, labels="classes"}',
    "task.batch_size=16",
    "task.eval_batch_size=16",
    "train.steps=14",
    "train.evaluate_every=100",
    "train.save_every=100",
)


def jobs_of(out, variants, **options):
    return make_jobs(SMALL, FILE.parent, out, seeds=1, variants=variants, changes=CHANGES, **options)


@pytest.mark.parametrize("name", WHOLE.variants)
def test_steps_of_every_variant_are_recorded(name, tmp_path):
    """Of 14 steps, three of each kind are made before one is recorded; warm-up and equilibrium are two kinds."""
    (job,) = jobs_of(tmp_path, [name])
    run = fit(job.recipe, tmp_path / "run")
    assert not run.captured.fallbacks
    assert run.captured.replayed >= 6


def test_runs_share_a_device(tmp_path):
    jobs = jobs_of(tmp_path, ["two_resolutions", "resnet"])
    failed, reason = run_jobs(jobs, at_once=2)
    assert (failed, reason) == ({}, None)
    record = summarise(SMALL, jobs)
    assert record["missing"] == {}
    mean = record["variants"]["two_resolutions"]["mean"]
    assert 0 <= mean["accuracy"] <= 1
    assert mean["steps"] >= 1
    for job in jobs:
        assert "no step is recorded" not in job.folder.with_suffix(".log").read_text()
