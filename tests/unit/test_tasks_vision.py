"""Classification and segmentation: losses, metrics and shares against plain references; whole runs, pictures."""

import json
import math

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

from equipoise._draws import Rows
from equipoise.data.augment import CentreCrop, CropFlip, ResizedCrop, ScaleCrop
from equipoise.data.images import IGNORE, ImageBatch
from equipoise.diagnostics.resolutions import leaf_residuals, resolution_curves
from equipoise.models import create_model
from equipoise.models.outputs import VisionOutput
from equipoise.tasks import TASKS, ClassificationTask, SegmentationTask
from equipoise.tasks.classification import ClassificationConfig
from equipoise.tasks.segmentation import SegmentationConfig, hard_pixels, soft_overlap
from equipoise.train.config import ConfigError
from equipoise.train.loop import evaluate, train
from equipoise.train.pareto import pareto_run
from tests.runs import COPY, recipe

SMALL = {"size": 8, "train_size": 24, "test_size": 10}
_SOLVE = {
    "stop": {"rtol": 1e-3, "max_steps": 4},
    "adjoint": {"name": "implicit", "stop": {"rtol": 0.0, "max_steps": 3}},
}
_TRAIN = {
    "steps": 3,
    "log_every": 1,
    "evaluate_every": 3,
    "save_every": 1,
    "threads": 1,
    "learning_rate": {"name": "constant"},
}
DIGITS = {
    "task": {"name": "classification", "data": "digits", "options": SMALL, "batch_size": 6, "eval_batch_size": 4},
    "model": {"name": "mdeq_digits", "channels": [8, 8], "head_channels": [2, 2], "final_channels": 8},
    **_SOLVE,
    "train": _TRAIN,
}
SHAPES = {
    "task": {"name": "segmentation", "data": "shapes", "options": SMALL, "batch_size": 6, "eval_batch_size": 4},
    "model": {"name": "mdeq_shapes", "channels": [8, 8, 8], "final_channels": 8},
    **_SOLVE,
    "train": _TRAIN,
}


class Fixed(torch.nn.Module):
    """A model that answers with given scores, by the number that an image shows."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, images):
        return VisionOutput(self.logits[images[:, 0, 0, 0].long()])


def batch(targets, shape=(1, 4, 4)):
    count = len(targets)
    images = torch.arange(count).float().view(-1, 1, 1, 1).expand(count, *shape)
    return ImageBatch(images, targets, torch.arange(count), 0, 1, Rows(0, count, count))


def scores(task, model, batches):
    """Metrics of batches, as the loop computes them."""
    splits = type("Splits", (), {"held_out": {"test": lambda: batches}})
    return evaluate(task, model, splits, "test")


# Classification


def classification(**settings):
    options = settings.pop("options", SMALL)
    return ClassificationTask(ClassificationConfig(options=options, **settings), {"name": "mdeq_digits"})


def test_scores_of_classes_are_those_of_a_plain_count():
    torch.manual_seed(0)
    logits, targets = torch.randn(20, 10), torch.randint(0, 10, (20,))
    found = scores(classification(), Fixed(logits), [batch(targets)])
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1)
    assert found["accuracy"] == pytest.approx(float((ranks == 0).double().mean()), abs=1e-6)
    assert found["top5"] == pytest.approx(float((ranks < 5).double().mean()), abs=1e-6)
    assert found["error"] == pytest.approx(1 - found["accuracy"], abs=1e-6)
    expected = -torch.log_softmax(logits.double(), 1).gather(1, targets[:, None]).mean()
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_mixed_classes_count_by_their_larger_part():
    """Training images, which may be mixed, are scored as well: learned solvers are fitted to them."""
    torch.manual_seed(0)
    logits, targets, others = torch.randn(20, 10), *torch.randint(0, 10, (2, 20))
    mixed = 0.6 * torch.eye(10)[targets] + 0.4 * torch.eye(10)[others]
    task, model = classification(cutmix=0.5), Fixed(logits)
    found, plain = (scores(task, model, [batch(given)]) for given in (mixed, targets))
    assert [found[name] for name in ("accuracy", "top5")] == [plain[name] for name in ("accuracy", "top5")]
    assert found["loss"] == pytest.approx(float(cross_entropy(logits, mixed)), rel=1e-5)
    losses, _ = task.training_step(model, batch(mixed), None, 0)
    assert float(losses["accuracy"]) == pytest.approx(plain["accuracy"])


def test_five_classes_have_no_top_five():
    task = ClassificationTask(
        ClassificationConfig(data="shapes", options={**SMALL, "labels": "classes"}), {"name": "mdeq_digits"}
    )
    assert set(task.metrics()) == {"loss", "accuracy"}
    assert task.model_defaults() == {"num_classes": 3, "in_channels": 3}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_may_be_smoothed(smoothing):
    logits, targets = torch.randn(6, 10), torch.arange(6)
    losses, carry = classification(label_smoothing=smoothing).training_step(Fixed(logits), batch(targets), None, 0)
    probabilities = torch.full((6, 10), smoothing / 10) + (1 - smoothing) * torch.eye(10)[:6]
    assert losses["loss"].item() == pytest.approx(-(probabilities * logits.log_softmax(1)).sum(1).mean().item())
    assert carry is None
    assert losses["accuracy"] == (logits.argmax(1) == targets).float().mean()


def test_settings_choose_the_augmentation():
    assert classification().augment(True) is None
    assert classification(augment="crop_flip", padding=2).augment(True) == CropFlip(2)
    assert classification(augment="crop_flip", erase=3).augment(True) == CropFlip(4, erase=3)
    with pytest.raises(ValueError, match="erase = 3 is part of augment = 'crop_flip'"):
        classification(erase=3)
    assert classification(augment="crop_flip").augment(False) is None
    resized = classification(augment="resized_crop", size=6)
    assert (resized.augment(True), resized.augment(False)) == (ResizedCrop(6), CentreCrop(6))
    resized = classification(augment="resized_crop", size=6, least_area=0.25)
    assert resized.augment(True) == ResizedCrop(6, area=(0.25, 1.0))
    with pytest.raises(ValueError, match="needs a size"):
        ClassificationConfig(augment="resized_crop")
    with pytest.raises(ValueError, match=r"least_area must be a number in \(0, 1\], got 0"):
        ClassificationConfig(least_area=0)


# Segmentation


def segmentation(**settings):
    options = settings.pop("options", SMALL)
    return SegmentationTask(SegmentationConfig(options=options, **settings), {"name": "mdeq_shapes"})


def masks(count=5, size=6, seed=0):
    torch.manual_seed(seed)
    targets = torch.randint(0, 4, (count, size, size))
    targets[torch.rand(targets.shape) < 0.2] = IGNORE
    return torch.randn(count, 4, size, size), targets


def test_scores_of_pixels_are_those_of_a_plain_count():
    logits, targets = masks()
    found = scores(segmentation(), Fixed(logits), [batch(targets)])
    guess, labelled = logits.argmax(1), targets != IGNORE
    named = dict(enumerate(segmentation().images.classes))
    ious = {}
    for k in range(4):
        one, two = (guess == k) & labelled, (targets == k) & labelled
        ious[f"iou_{named[k]}"] = float((one & two).sum() / (one | two).sum())
    assert {key: found[key] for key in ious} == pytest.approx(ious, abs=1e-6)
    assert found["miou"] == pytest.approx(numpy.mean(list(ious.values())), abs=1e-6)
    assert found["miou_error"] == pytest.approx(1 - found["miou"], abs=1e-9)
    assert found["pixel_accuracy"] == pytest.approx(float((guess == targets)[labelled].double().mean()), abs=1e-6)


def test_a_class_that_never_occurs_is_left_out_of_the_mean():
    logits = torch.zeros(1, 4, 2, 2)
    logits[0, 0] = 1.0  # all ground
    targets = torch.tensor([[[0, 0], [1, IGNORE]]])
    found = scores(segmentation(), Fixed(logits), [batch(targets)])
    assert found["miou"] == pytest.approx((2 / 3 + 0) / 2)
    assert set(found) == {"loss", "miou", "pixel_accuracy", "miou_error", "iou_ground", "iou_circle"}


def test_metrics_of_several_batches_are_those_of_their_pixels_together():
    logits, targets = masks(6)
    whole = scores(segmentation(), Fixed(logits), [batch(targets)])
    first, second = batch(targets[:2]), batch(targets[2:])
    second = ImageBatch(second.images + 2, targets[2:], second.indices, 0, 1, second.rows)
    assert scores(segmentation(), Fixed(logits), [first, second]) == pytest.approx(whole, rel=1e-6)


def test_the_loss_is_the_mean_over_images_of_weighted_pixels(monkeypatch):
    task = segmentation(class_weights="data")
    weights = (0.5, 1.0, 2.0, 3.0)
    monkeypatch.setitem(task.__dict__, "images", type(task.images)(**{**vars(task.images), "class_weights": weights}))
    logits, targets = masks()
    losses, _ = task.training_step(Fixed(logits), batch(targets), None, 0)
    rows = [
        cross_entropy(logits[k : k + 1], targets[k : k + 1], weight=torch.tensor(weights), ignore_index=IGNORE)
        for k in range(len(targets))
    ]
    assert losses["loss"].item() == pytest.approx(torch.stack(rows).mean().item(), rel=1e-5)


def test_an_image_without_labels_costs_nothing_and_breaks_nothing():
    logits, targets = masks(2)
    targets[0] = IGNORE
    model = Fixed(logits)
    losses, _ = segmentation().training_step(model, batch(targets), None, 0)
    assert losses["loss"].item() == pytest.approx(
        cross_entropy(logits[1:], targets[1:], ignore_index=IGNORE).item() / 2, rel=1e-5
    )
    losses["loss"].backward()
    assert (model.logits.grad[0] == 0).all()
    assert model.logits.grad[1].abs().sum() > 0


@pytest.mark.parametrize("size", [1, 3])
def test_an_image_without_labels_does_not_lower_the_loss_of_evaluation(size):
    logits, targets = masks(3)
    targets[0] = IGNORE
    parts = list(zip(logits.split(size), targets.split(size), strict=True))
    task = segmentation()
    metrics = task.metrics()
    for scored, truth in parts:
        task.evaluation_step(Fixed(scored), batch(truth), None, metrics)
    rows = [cross_entropy(logits[k : k + 1], targets[k : k + 1], ignore_index=IGNORE).item() for k in (1, 2)]
    assert metrics.compute()["loss"].item() == pytest.approx(sum(rows) / 2, rel=1e-5)


def test_hard_pixels_are_those_of_low_probability_and_at_least_so_many():
    logits, targets = masks(3)
    losses = cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    probability = torch.where(targets == IGNORE, 2.0, (-losses).exp())
    for row in range(3):
        labelled = probability[row][targets[row] != IGNORE].sort().values
        for threshold, keep in ((0.0, 4), (0.3, 1), (0.3, 30), (1.0 - 1e-6, 5), (0.0, 1000)):
            found = hard_pixels(losses, targets, threshold, keep)[row]
            expected = max(min(keep, len(labelled)), int((labelled <= threshold).sum()))
            assert int(found.sum()) == expected
            assert not found[targets[row] == IGNORE].any()
            assert probability[row][found].max() <= labelled[expected - 1]


def test_mining_takes_the_mean_over_hard_pixels():
    logits, targets = masks(3)
    losses = cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    found, _ = segmentation(mining=0.0, mining_keep=4).training_step(Fixed(logits), batch(targets), None, 0)
    expected = losses.flatten(1).topk(4).values.mean(1).mean()
    assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_overlap_is_the_intersection_over_union_of_probabilities():
    """Against counting by hand; classes that an image does not have, and pixels without a label, do not count."""
    logits, targets = masks(3)
    expected = []
    for scores, truth in zip(logits.softmax(1), targets, strict=True):
        labelled = truth != IGNORE
        shares = []
        for index in truth[labelled].unique():
            likely, true = scores[index][labelled], (truth[labelled] == index).float()
            both = (likely * true).sum()
            shares.append(both / (likely.sum() + true.sum() - both))
        expected.append(torch.stack(shares).mean())
    assert torch.allclose(soft_overlap(logits, targets), torch.stack(expected))
    plain, both = (
        segmentation(overlap=weight).training_step(Fixed(logits), batch(targets), None, 0)[0]["loss"].item()
        for weight in (0.0, 0.5)
    )
    assert both - plain == pytest.approx(0.5 * (1 - torch.stack(expected)).mean().item(), rel=1e-5)


def test_overlap_of_a_right_answer_is_one_and_of_an_image_without_labels_zero():
    targets = torch.tensor([[[0, 1], [2, IGNORE]], [[IGNORE] * 2] * 2])
    logits = 50.0 * torch.nn.functional.one_hot(torch.where(targets == IGNORE, 0, targets), 4).permute(0, 3, 1, 2)
    assert torch.allclose(soft_overlap(logits, targets), torch.tensor([1.0, 0.0]))


def test_scores_must_have_the_size_of_the_masks():
    with pytest.raises(
        ValueError, match=r"shape \(2, 4, 3, 3\) where \(2, 4, 6, 6\) are needed: .* the size of its mask"
    ):
        segmentation().training_step(Fixed(torch.zeros(2, 4, 3, 3)), batch(masks(2)[1]), None, 0)


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        (DIGITS, ["model.task=segmentation"], r"scores each image; choose a model .* model.task = \"classification\""),
        (
            DIGITS,
            ["model.num_classes=4"],
            r"shape \(4, 4\) where \(4, 10\).* data have 10 classes; leave model.num_classes",
        ),
        (
            SHAPES,
            ["model={name='resnet_cifar_tiny'}"],
            r"ResNet gives .* scores each pixel; .* model.task = \"segmentation",
        ),
        (SHAPES, ["model={name='unet_small', num_classes=2, levels=2}"], "data have 4 classes"),
    ],
)
def test_a_model_for_other_targets_is_refused(settings, changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(recipe(settings, *changes), tmp_path / "run")


def test_a_crop_keeps_the_size_of_what_is_evaluated():
    with pytest.raises(ConfigError, match="keeps the size of images, so size = 6 would be"):
        recipe(DIGITS, "task.augment=crop_flip", "task.size=6")


class Local(torch.nn.Module):
    """Scores that are linear in the pixel, and in how far to the left it is."""

    def forward(self, images):
        place = torch.linspace(-1, 1, images.shape[3]).expand_as(images[:, :1])
        return VisionOutput(torch.cat([images[:, :1], 2 * place, -images[:, :1], images[:, :1] ** 2], 1))


def test_a_crop_that_evaluation_cannot_make_is_refused_before_training():
    """Training enlarges what it cuts, so it would go on up to the first evaluation."""
    with pytest.raises(ValueError, match="images of 8 × 8 have no crop of 12; lower the size"):
        classification(augment="resized_crop", size=12, batch_size=4).data()
    classification(augment="resized_crop", size=8, batch_size=4).data()


def test_views_of_an_image_are_averaged_as_probabilities():
    images = torch.rand(2, 3, 6, 8)
    given = ImageBatch(images, torch.zeros(2, 6, 8, dtype=torch.long), torch.arange(2), 0, 1, Rows(0, 2, 2))
    model = Local()
    plain = segmentation().views(model, given)
    assert torch.equal(plain, model(images).logits)
    both = segmentation(eval_flip=True).views(model, given)
    want = (plain.softmax(1) + model(images.flip(3)).logits.flip(3).softmax(1)) / 2
    torch.testing.assert_close(both.exp(), want)
    even = ImageBatch(torch.full((2, 3, 6, 8), 0.3), given.targets, given.indices, 0, 1, given.rows)
    scaled = segmentation(eval_scales=(0.5, 1.0, 1.5), eval_flip=True).views(model, even)
    assert scaled.shape == plain.shape
    torch.testing.assert_close(scaled.exp().sum(1), torch.ones(2, 6, 8))
    torch.testing.assert_close(scaled, scaled.flip(3))  # what depends on the side cancels


def test_settings_of_segmentation_are_checked():
    for wrong in ((), (0.0,), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="eval_scales must"):
            segmentation(eval_scales=wrong)
    assert segmentation(augment="scale_crop", crop=(4, 6)).augment(True) == ScaleCrop((4, 6))
    assert segmentation(augment="scale_crop", crop=(4, 6)).augment(False) is None
    with pytest.raises(ValueError, match="has none of its own"):
        segmentation(class_weights="data").class_weights(torch.device("cpu"))
    with pytest.raises(ConfigError, match="crop needs augment"):
        recipe(SHAPES, "task.crop=[4, 4]")
    with pytest.raises(ConfigError, match="mining must be a number"):
        recipe(SHAPES, "task.mining=2.0")


# Data of a task


def test_classes_and_masks_are_not_mistaken_for_each_other():
    with pytest.raises(ValueError, match=r"have masks; use task\.name = 'segmentation'"):
        ClassificationTask(ClassificationConfig(data="shapes", options=SMALL), {}).data()
    with pytest.raises(ValueError, match=r"have classes; use task\.name = 'classification'"):
        SegmentationTask(SegmentationConfig(data="digits", options=SMALL), {}).data()


def test_images_set_aside_are_not_trained_on():
    task = classification(hold_out=7, train_size=12, batch_size=4)
    splits = task.data()
    trained = {int(i) for k in range(splits.epoch) for i in splits.train(k).indices}
    held = {int(i) for part in splits.held_out["valid"]() for i in part.indices}
    assert (len(trained), len(held)) == (12, 7)
    assert not trained & held
    assert splits.info["trained_on"] == 12
    assert not splits.info["valid_is_test"]
    with pytest.raises(ValueError, match="exceed the 24 training images"):
        classification(hold_out=20, train_size=5).data()


def test_a_set_without_validation_is_validated_on_its_test_split(monkeypatch):
    task = classification(batch_size=4)
    del task.images.splits["valid"]
    splits = task.data()
    assert splits.info["valid_is_test"]
    indices = [torch.cat([part.indices for part in splits.held_out[split]()]) for split in ("valid", "test")]
    assert torch.equal(*indices)
    del task.images.splits["test"]
    with pytest.raises(ValueError, match=r"set some aside with task\.hold_out"):
        task.data()


@pytest.mark.parametrize("values", [DIGITS, SHAPES], ids=["classification", "segmentation"])
def test_losses_of_shares_add_up_to_that_of_the_batch(values):
    """With a model that normalises by sample: BatchNorm sees the rows of a share only."""
    augment = {"augment": "crop_flip", "cutmix": 0.5}
    if values is SHAPES:
        augment |= {"augment": "scale_crop", "overlap": 0.5}
    task = recipe({**values, "task": {**values["task"], **augment}}).make_task()
    torch.manual_seed(0)
    model = task.model().eval()

    def loss(rank, world):
        share = task.share(rank, world).data().train(2).to("cpu")
        losses, _ = task.training_step(model, share, None, 0)
        return losses["loss"].item() * share.rows.weight

    assert sum(loss(k, 3) for k in range(3)) == pytest.approx(loss(0, 1), rel=1e-5)
    assert task.items(task.data().train(0).to("cpu")) == (6, "samples")


# Whole runs


@pytest.mark.parametrize(("values", "metric"), [(DIGITS, "accuracy"), (SHAPES, "miou")])
def test_what_is_drawn_against_time_is_higher_the_better_it_is(values, metric, tmp_path):
    train(recipe(values), tmp_path / "run")
    record = pareto_run(tmp_path / "run", ("anderson", "picard"), (1, 3), warmup=0, rounds=1, most=1)
    assert (record["metric"], record["better"]) == (metric, "higher")
    points = {(point["solver"], point["steps"]): point for point in record["points"]}
    assert len(points) == 4
    end, target = points["anderson", 3]["metric"], record["speedup"]["picard"]["target"]
    assert target == pytest.approx(0.995 * end)


@pytest.mark.parametrize("values", [DIGITS, SHAPES], ids=["classification", "segmentation"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(values, tmp_path):
    extra = [
        "warmup.steps=1",
        "warmup.layers=2",
        "penalty.weight=0.5",
        "penalty.share=0.5",
        f"task.augment={'crop_flip' if values is DIGITS else 'scale_crop'}",
        "task.cutmix=0.5",
    ]
    whole = train(recipe(values, *extra), tmp_path / "whole")
    train(recipe(values, *extra, "train.steps=2"), tmp_path / "parts")
    parts = train(recipe(values, *extra), tmp_path / "parts", resume=True)
    assert parts.metrics == whole.metrics
    score = TASKS.find(values["task"]["name"]).score
    assert math.isfinite(whole.metrics[score])
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    phases = [line["train"]["phase"] for line in lines if "train" in line]
    assert phases == ["warmup", "equilibrium", "equilibrium"]
    assert all("penalty" in line["train"] for line in lines[2:] if "train" in line)
    assert json.loads((tmp_path / "whole" / "classes.json").read_text())[0] in ("0", "ground")


@pytest.mark.slow
@pytest.mark.parametrize("values", [DIGITS, SHAPES], ids=["classification", "segmentation"])
def test_every_part_is_learned(values):
    """A few samples are learned by heart."""
    given = recipe(values, "task.train_size=6", "stop.max_steps=8", "adjoint.stop.max_steps=8")
    task = given.make_task()
    torch.manual_seed(0)
    model = task.model()
    given.schedule(model).at(0).apply(model)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    data, losses = task.data().train(0).to("cpu"), []
    for step in range(60):
        loss = task.training_step(model, data, None, step)[0]["loss"]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_segmentation_model_takes_over_stem_and_layer_of_a_classifier(tmp_path):
    layer = {"channels": [8, 8], "groups": 4, "expansion": 2, "downsamplings": 1}
    images = {"data": "shapes", "options": {**SMALL, "labels": "classes"}}
    source = {
        **DIGITS,
        "task": {**DIGITS["task"], **images},
        "model": {"name": "mdeq_digits", **layer, "head_channels": [2, 2], "final_channels": 8},
    }
    train(recipe(source, "train.steps=1"), tmp_path / "classifier")
    target = {**SHAPES, "model": {"name": "mdeq_shapes", **layer, "final_channels": 8}}
    given = recipe(target, f"task.transfer={tmp_path / 'classifier'}")
    from equipoise.train.load import load

    task, taken = given.make_task(), load(tmp_path / "classifier").state_dict()
    model = task.model()
    task.begin(model)
    found = model.state_dict()
    shared = [name for name in found if not name.startswith("head.")]
    assert len(shared) > 10
    assert all(torch.equal(found[name], taken[name]) for name in shared)
    assert math.isfinite(train(given, tmp_path / "run").metrics["miou"])
    # From then on the run has weights of its own.
    (tmp_path / "classifier").rename(tmp_path / "elsewhere")
    longer = recipe(target, f"task.transfer={tmp_path / 'classifier'}", f"train.steps={given.train.steps + 1}")
    assert train(longer, tmp_path / "run", resume=True).step == given.train.steps + 1


def test_what_cannot_be_transferred_is_refused(tmp_path):
    given = recipe(SHAPES, "task.transfer=nowhere", "model.name=unet_small")
    given.model.pop("channels")
    given.model.pop("final_channels")
    task = given.make_task()
    with pytest.raises(ValueError, match="cannot take over parts of another model"):
        task.begin(task.model())


# Residuals by resolution


def test_residuals_of_leaves_make_up_that_of_the_state():
    torch.manual_seed(0)
    model = create_model("mdeq_digits", channels=(8, 8), head_channels=(2, 2), final_channels=8).eval()
    with torch.no_grad():
        solution = model(torch.randn(3, 1, 8, 8), collect="iterates", trace=True).solution
    leaves = leaf_residuals(solution)
    assert len(leaves) == 2
    problem = solution.problem
    for k, iterate in enumerate(solution.collected["iterates"][:5]):
        z = problem.start(iterate)
        with torch.no_grad():
            fz = problem.evaluate(z)
        sizes = [leaf.norm(dim=1) for leaf in fz]
        whole = sum((leaves[i][:, k] * sizes[i]) ** 2 for i in range(2)).sqrt() / sum(s**2 for s in sizes).sqrt()
        assert whole == pytest.approx(solution.stats.trace[:, k], rel=1e-4)


def test_curves_are_named_by_resolution():
    torch.manual_seed(0)
    model = create_model("mdeq_digits", channels=(8, 8), head_channels=(2, 2), final_channels=8).eval()
    with torch.no_grad():
        solution = model(torch.randn(5, 1, 8, 8)).solution
    problem = solution.problem
    start = tuple(torch.zeros_like(leaf) for leaf in solution.value)
    curves = resolution_curves(problem, start, "anderson", 6)
    assert list(curves) == ["1: 8×8×8", "2: 8×4×4"]
    for curve in curves.values():
        assert len(curve["median"]) == len(curve["p95"]) == 6
        assert curve["median"][0] == pytest.approx(1.0)
        assert curve["median"][-1] < curve["median"][0]
    with pytest.raises(ValueError, match='collect="iterates"'):
        leaf_residuals(solution)


# Pictures


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segmented") / "run"
    train(recipe(SHAPES, "train.steps=1"), folder)
    return folder


@pytest.fixture
def copy_run_folder(tmp_path):
    train(recipe(COPY, "train.steps=1"), tmp_path / "copy")
    return tmp_path / "copy"


def test_pictures_show_image_truth_and_prediction(segmented):
    pytest.importorskip("matplotlib")
    from equipoise.plots import open_runs
    from equipoise.plots.pictures import Pictures, write_pictures

    files = write_pictures(segmented, count=3)
    assert [path.name for path in files] == ["pictures.npz", "masks.png", "masks.svg", "masks.csv"]
    (run,) = open_runs([segmented])
    found = Pictures.read(run, masks=True)
    data = recipe(SHAPES).make_task().images.splits["test"]
    assert found.numbers.tolist() == [0, 3, 6]
    chosen = torch.from_numpy(found.numbers)
    assert numpy.array_equal(found.images, data.images[chosen].permute(0, 2, 3, 1).numpy())
    assert numpy.array_equal(found.truth, data.targets[chosen].numpy())
    assert found.prediction.max() < 4
    table = files[-1].read_text().splitlines()
    assert table[0] == "run,split,sample,pixel_accuracy,miou"
    accuracy = float((found.truth[0] == found.prediction[0]).mean())
    assert float(table[1].split(",")[3]) == pytest.approx(accuracy)


def test_pictures_show_what_is_scored(segmented):
    """By the views of evaluation, where these are not the images as they are."""
    pytest.importorskip("matplotlib")
    from equipoise.plots.pictures import predict
    from equipoise.train.load import open_run

    opened = open_run(segmented, "test", changes=["task.eval_scales=[2.0]", "task.eval_flip=true"])
    batch = next(iter(opened.splits.held_out["test"]())).to(opened.device)
    with torch.no_grad():
        opened.model.head.classifier.weight.mul_(100)  # hardly trained, it would call all classes equally likely
        found = (opened.task.views(opened.model, batch), opened.task.scores(opened.model, batch))
    seen, as_they_are = (float(logits[0].softmax(0).max(0).values.mean()) for logits in found)
    probability = predict(opened, "test", 3).probability[0]
    assert probability == pytest.approx(seen, rel=1e-4)
    assert probability != pytest.approx(as_they_are, rel=1e-4)


def test_the_chart_of_classes_has_the_newest_test_scores_or_the_last_validation(segmented):
    pytest.importorskip("matplotlib")
    from equipoise.plots import LogError, make_chart

    logged = [json.loads(line) for line in (segmented / "metrics.jsonl").read_text().splitlines()]
    valid = next(line["valid"] for line in reversed(logged) if "valid" in line)
    rows = make_chart("iou", [segmented]).rows
    assert rows[0] == ("run", "valid", "mean", valid["miou"])
    assert {name: x for _, _, name, x in rows[1:]} == {
        key.removeprefix("iou_"): x for key, x in valid.items() if key.startswith("iou_")
    }
    (segmented / "eval").mkdir(exist_ok=True)
    (segmented / "eval" / "test-1.json").write_text(json.dumps({"results": [{"miou": 0.5, "iou_sky": 0.5}]}))
    (segmented / "eval" / "test-2.json").write_text(json.dumps({"results": [{"miou": 0.25, "iou_sky": 0.25}]}))
    assert make_chart("iou", [segmented]).rows[1] == ("run", "test", "sky", 0.25)
    others = [{"own_solver": False}, {"guard": True}, {"sweep": "solver.memory"}, {"changes": ["task.eval_flip=true"]}]
    for number, other in enumerate(others):  # newer ones, which are not of the model as it is
        scores = {"results": [{"miou": 0.75, "iou_sky": 0.75}], **other}
        (segmented / "eval" / f"test-2{number}.json").write_text(json.dumps(scores))
    assert make_chart("iou", [segmented]).rows[1] == ("run", "test", "sky", 0.25)
    for most in (12, None):  # as it is set, else with most steps
        budgets = [{"miou": (k or 20) / 100, "iou_sky": (k or 20) / 100, "steps": k} for k in (6, most, 3)]
        (segmented / "eval" / "test-29.json").write_text(json.dumps({"sweep": "stop.max_steps", "results": budgets}))
        assert make_chart("iou", [segmented]).rows[1] == ("run", "test", "sky", (most or 20) / 100)
    (segmented / "eval" / "test-3.json").write_text("{}")
    with pytest.raises(LogError, match=r"test-3\.json cannot be read"):
        make_chart("iou", [segmented])


def test_figures_of_masks_say_what_is_missing(tmp_path):
    pytest.importorskip("matplotlib")
    from equipoise.plots import LogError, make_chart

    train(recipe(DIGITS, "train.steps=1"), tmp_path / "digits")
    with pytest.raises(LogError, match=r"pictures\.npz is missing"):
        make_chart("masks", [tmp_path / "digits"])
    with pytest.raises(LogError, match="has no IoU"):
        make_chart("iou", [tmp_path / "digits"])


def test_pictures_of_classes_have_what_the_model_says(tmp_path):
    pytest.importorskip("matplotlib")
    from equipoise.plots import LogError, make_chart, open_runs
    from equipoise.plots.pictures import Pictures, write_pictures
    from equipoise.train.load import open_run

    train(recipe(DIGITS, "train.steps=1"), tmp_path / "run")
    opened = open_run(tmp_path / "run", "test")
    files = write_pictures(tmp_path / "run", count=5, opened=opened)
    assert [path.name for path in files] == ["pictures.npz", "predictions.png", "predictions.svg", "predictions.csv"]
    found = Pictures.read(open_runs([tmp_path / "run"])[0], masks=False)
    data = opened.task.images.splits["test"]
    assert found.numbers.tolist() == [0, 2, 4, 6, 8]
    assert found.truth.tolist() == data.targets[found.numbers].tolist()
    images = torch.cat([part.to("cpu").images for part in opened.splits.held_out["test"]()])[found.numbers]
    with torch.no_grad():
        probability, named = opened.model(images).logits.softmax(1).max(1)
    assert found.prediction.tolist() == named.tolist()
    assert found.probability == pytest.approx(probability.numpy(), rel=1e-3)
    rows = make_chart("predictions", [tmp_path / "run"]).rows
    assert [row[2:5] for row in rows] == [
        (int(n), str(t), str(p)) for n, t, p in zip(found.numbers, found.truth, found.prediction, strict=True)
    ]
    with pytest.raises(LogError, match="the figure 'predictions' shows them"):
        make_chart("masks", [tmp_path / "run"])


def test_pictures_are_of_images(copy_run_folder):
    pytest.importorskip("matplotlib")
    from equipoise.plots.pictures import write_pictures

    with pytest.raises(ValueError, match="this run is of 'copy_memory'"):
        write_pictures(copy_run_folder)


def test_curves_of_resolutions_are_drawn_from_the_inspection(tmp_path):
    pytest.importorskip("matplotlib")
    from equipoise.plots import make_chart

    curves = {"1: 8×4×4": {"median": [1.0, 0.5], "p95": [1.0, 0.75]}, "2: 8×2×2": {"median": [1.0], "p95": [2.0]}}
    (tmp_path / "inspect.json").write_text(json.dumps({"resolutions": curves}))
    chart = make_chart("resolutions", [tmp_path])
    assert [row[1:] for row in chart.rows] == [
        ("1: 8×4×4", 0, 1.0, 1.0),
        ("1: 8×4×4", 1, 0.5, 0.75),
        ("2: 8×2×2", 0, 1.0, 2.0),
    ]
    assert len(chart.render("png")) > 1000
