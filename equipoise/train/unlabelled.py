"""Inputs that come up in use, without labels, as what a run's model is fed in training."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equipoise.data.augment import ScaleCrop
from equipoise.data.images import ImageStream
from equipoise.data.unlabelled import look_of, unlabelled_images, unlabelled_text
from equipoise.data.vocabulary import vocabulary_from_state
from equipoise.tasks import LanguageModelTask, Splits, Task
from equipoise.tasks._vision import VisionTask
from equipoise.tasks.language_model import VOCABULARY
from equipoise.train.checkpoint import CheckpointError


def unlabelled_splits(task: Task, inputs: Path, home: Path, config: Mapping[str, Any]) -> Splits:
    """Inputs as training batches, in the form of the run's own data, which are not read if that can be.

    Args:
        task: Of the run.
        inputs: A folder of pictures, or a text file.
        home: Where what belongs to the run lies, e.g. its vocabulary.
        config: Settings of the run.
    """
    info: dict[str, Any] = {"inputs": str(inputs)}
    if isinstance(task, VisionTask):
        c = task.config
        look = look_of(c.data, task.data_dir, c.options)
        task.images = unlabelled_images(inputs, look, config["model"]["num_classes"], task.masks)
        split, crop = task.images.splits["train"], getattr(c, "crop", None)
        _check_enough(len(split), "pictures", c.batch_size, inputs)
        # As evaluation shows them, but for crops, which training had for want of memory.
        augment = task.augment(False) if crop is None else ScaleCrop(crop, (1.0, 1.0), flip=False)
        stream = ImageStream(task.images, split, c.batch_size, shuffle=True, augment=augment, seed=task.seed)
        return Splits(stream.batch, stream.batches_per_epoch, {}, {**info, "pictures": len(split)})
    if isinstance(task, LanguageModelTask):
        path = home / VOCABULARY
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, which says what tokens the model knows; put it there.")
        vocabulary = vocabulary_from_state(json.loads(path.read_text(encoding="utf-8")))
        task.corpus = unlabelled_text(inputs, vocabulary, task.config.corpus)
        _check_enough(len(task.corpus.train) // (task.config.length + 1), "segments", task.config.batch_size, inputs)
        splits = task.data()
        return dataclasses.replace(splits, info={**info, **splits.info})
    raise ValueError(
        f"inputs: a model of the task {task.name!r} takes neither pictures nor text; leave {inputs} out, and it is run "
        "on the inputs of its training."
    )


def _check_enough(count: int, what: str, batch_size: int, inputs: Path) -> None:
    if not count:
        raise ValueError(f"inputs: {inputs} is shorter than one segment; give a longer text, or lower task.length.")
    if count < batch_size:
        raise ValueError(
            f"inputs: {inputs} has {count} {what}, fewer than a batch ({batch_size}); give more of them, or --set "
            f"task.batch_size={count}."
        )
