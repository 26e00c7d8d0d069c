"""What a run is about: data, model, losses and metrics. One file per task."""

import abc
import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise._errors import UnknownNameError
from equipoise._registry import Registry
from equipoise.models import create_model

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Forward = Callable[[nn.Module, Any, Any], Any]
"""Runs a model on a batch, given what the batch before left, and returns what the next one needs (or None)."""

TASKS = Registry("task")
register_task = TASKS.register


@dataclass(frozen=True)
class Splits:
    """The data of a run. A batch has `to(device)`, and `rows` (`Rows`): which rows of the whole batch it holds.

    Attributes:
        train: Training batch number `position`, a pure function of it, so that a resumed run sees what an uninterrupted
            one would have seen.
        epoch: Training batches in a pass.
        held_out: Passes over the batches of other splits, by name.
        info: Plain facts to log with every number.
    """

    train: Callable[[int], Any]
    epoch: int
    held_out: dict[str, Callable[[], Iterable[Any]]]
    info: dict[str, Any] = field(default_factory=dict)


class Task(abc.ABC):
    """A task; subclasses say what the data are and how a batch becomes a loss.

    Args:
        config: Settings, an instance of `Config`.
        model: Name of the model and overrides of its settings.
        data_dir: Where data files are.
        seed: Key of everything random in the data.
        rank: Which share of each batch this process takes.
        world_size: Number of shares.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    score: ClassVar[str]
    """The metric of the validation split by which models are compared; lower is better."""
    shown: ClassVar[str | None] = None
    """The metric that is drawn against time, higher being better; None for `score`."""

    def __init__(
        self,
        config: Any,
        model: dict[str, Any],
        *,
        data_dir: str | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.config, self.model_settings = config, dict(model)
        self.data_dir, self.seed, self.rank, self.world_size = data_dir, seed, rank, world_size

    @property
    def drawn(self) -> tuple[str, str]:
        """The metric that is drawn against time, and whether "higher" or "lower" is better."""
        return (self.score, "lower") if self.shown is None else (self.shown, "higher")

    @abc.abstractmethod
    def data(self) -> Splits:
        """Load or make the data."""

    def model_defaults(self) -> dict[str, Any]:
        """Settings of the model that follow from the data, e.g. the size of the vocabulary."""
        return {}

    def model(self) -> nn.Module:
        """Build the model."""
        settings = {**self.model_defaults(), **self.model_settings}
        name = settings.pop("name")
        try:
            return create_model(name, **settings)
        except UnknownNameError as error:
            if not error.kind.startswith("setting of"):
                raise
            # Most often the rest of a section that was written for another model.
            hint = f"In a recipe for another model, set the model as a whole: --set 'model={{name=\"{name}\"}}'."
            raise ValueError(f"{error} {hint}") from error

    def begin(self, model: nn.Module) -> None:  # noqa: B027 (nothing, for most)
        """Give the model of a new run what it begins with, e.g. parts of another one; a resumed run has its own."""

    def share(self, rank: int, world_size: int) -> "Task":
        """The same task on another share of each batch; what has been loaded is not loaded again."""
        twin = copy.copy(self)
        twin.rank, twin.world_size = rank, world_size
        return twin

    def items(self, batch: Any) -> tuple[int, str]:
        """How many things of what kind a batch holds, for rates: "tokens" makes `tokens_per_second`."""
        return batch.rows.count, "samples"

    def artifacts(self) -> dict[str, Any]:
        """Files, by name, that a trained model needs beside its weights, as plain values."""
        return {}

    @abc.abstractmethod
    def metrics(self) -> "MetricCollection":
        """Empty metrics, to be filled by `evaluation_step`."""

    @abc.abstractmethod
    def training_step(self, model: nn.Module, batch: Any, carry: Any, step: int) -> tuple[dict[str, Tensor], Any]:
        """Losses of a batch, "loss" among them, and what the next batch of the same streams needs."""

    @abc.abstractmethod
    def evaluation_step(self, model: nn.Module, batch: Any, carry: Any, metrics: "MetricCollection") -> Any:
        """Put a batch into the metrics; return what the next batch needs."""

    def report(self, values: dict[str, float]) -> dict[str, float]:
        """Metrics as they are shown, from their computed values."""
        return values


def mean_metrics(*names: str) -> "MetricCollection":
    """Running means by name, right also when evaluation is spread over processes."""
    from torchmetrics import MeanMetric, MetricCollection

    # A loss that is not a number must stay one: replaced by itself, since switching the check off also drops weights.
    return MetricCollection({name: MeanMetric(nan_strategy=math.nan) for name in names}, compute_groups=False)


# A model on a batch, for its equilibria alone


def call_model(model: nn.Module, batch: Any, carry: Any) -> None:
    """Run a model on a batch: a tuple or list are its arguments."""
    if isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


class _Unread(dict[str, Any]):
    """Metrics that nobody reads: a model is run for its equilibria alone."""

    def __missing__(self, name: str) -> "_Unread":
        return self

    def update(self, *values: Any, **named: Any) -> None:
        """Take nothing in."""


def forward_of(task: Task, device: torch.device) -> Forward:
    """How a model is run on a batch of its task."""

    def forward(model: nn.Module, batch: Any, carry: Any) -> Any:
        return task.evaluation_step(model, batch.to(device), carry, _Unread())  # type: ignore[arg-type]

    return forward
