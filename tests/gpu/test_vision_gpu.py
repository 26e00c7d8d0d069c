"""Images on a CUDA device: kept there, augmented there as on the CPU, and trained on."""

import math

import pytest
import torch

from equipoise.data import ImageStream, load_images
from equipoise.data import images as module
from equipoise.data.augment import CropFlip, ResizedCrop, ScaleCrop
from equipoise.models.vision_heads import SegmentationHead
from equipoise.nn import frozen
from equipoise.train.loop import train
from tests.gradients import relative_error
from tests.runs import recipe
from tests.unit.test_tasks_vision import DIGITS, SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(
    ("labels", "augment", "tolerance"),
    [
        ("classes", None, 1e-6),
        ("classes", CropFlip(3), 1e-6),
        ("classes", ResizedCrop(12), 2e-3),
        ("masks", ScaleCrop((20, 24), (0.5, 2.0)), 2e-3),
    ],
)
def test_batches_on_the_device_are_those_of_the_cpu(labels, augment, tolerance, resident, monkeypatch):
    if not resident:
        monkeypatch.setattr(module, "_DEVICE_SHARE", 0.0)
    data = load_images("shapes", size=24, train_size=64, test_size=8, labels=labels)
    stream = ImageStream(data, data.splits["train"], 16, shuffle=True, augment=augment, seed=3)
    for position in (0, 5):
        here, there = stream.batch(position).to("cpu"), stream.batch(position).to("cuda")
        assert there.images.is_cuda
        assert there.images.cpu() == pytest.approx(here.images, abs=tolerance)
        # A place that rounding moves over the edge of a pixel may get the neighbour's label.
        assert (there.targets.cpu() != here.targets).double().mean() < 2e-3
    held = data.splits["train"]._copies
    assert list(held) == [torch.device("cpu"), torch.device("cuda", torch.cuda.current_device())]
    assert (held[torch.device("cuda", torch.cuda.current_device())] is not None) == resident


@pytest.mark.parametrize("details", [0, 8])
def test_a_frozen_head_in_half_precision_scores_as_before(details):
    """Interpolation and 1×1 convolutions as products of matrices, of eleven rows."""
    torch.manual_seed(0)
    settings = {"details": details, "init_std": 0.3}
    head = SegmentationHead((16, 24, 32), 40, 11, **settings).eval().to("cuda", memory_format=torch.channels_last)
    states = [torch.randn(2, c, 24 >> k, 32 >> k, device="cuda") for k, c in enumerate((16, 24, 32))]
    states = [state.contiguous(memory_format=torch.channels_last) for state in states]
    images = torch.randn(2, 3, 48, 64, device="cuda")
    with torch.no_grad():
        expected = head(states, images)
        with torch.autocast("cuda", torch.bfloat16):
            found = frozen(head)(states, images)
    assert relative_error(found.float(), expected) <= 2e-2


@pytest.mark.parametrize("values", [DIGITS, SHAPES], ids=["classification", "segmentation"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_run_on_the_device(values, precision, tmp_path):
    given = recipe(values, f"train.precision={precision}", "warmup.steps=1", "warmup.layers=2", "penalty.weight=0.1")
    outcome = train(given, tmp_path / "run")
    assert outcome.step == 3
    assert math.isfinite(outcome.metrics["loss"])
