"""Tasks: one per file, known by name through the registry."""

from equipoise.tasks.base import TASKS, Splits, Task, register_task
from equipoise.tasks.copy_memory import CopyMemoryTask
from equipoise.tasks.language_model import LanguageModelTask

__all__ = ["TASKS", "CopyMemoryTask", "LanguageModelTask", "Splits", "Task", "register_task"]
