"""Tasks: one per file, known by name through the registry."""

from equipoise.tasks.base import TASKS, Splits, Task, register_task
from equipoise.tasks.classification import ClassificationTask
from equipoise.tasks.copy_memory import CopyMemoryTask
from equipoise.tasks.language_model import LanguageModelTask
from equipoise.tasks.segmentation import SegmentationTask

__all__ = [
    "TASKS",
    "ClassificationTask",
    "CopyMemoryTask",
    "LanguageModelTask",
    "SegmentationTask",
    "Splits",
    "Task",
    "register_task",
]
