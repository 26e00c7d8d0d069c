"""What models return."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from equipoise._solution import Solution
from equipoise._tree import register_record


@dataclass
class LMOutput:
    """The output of a sequence model.

    Attributes:
        logits: (B, T, vocabulary) scores (log-probabilities are scores too), or None when the model was given targets.
        losses: (B, T) negative log-likelihood of each target in nats, in input order; None without targets.
        memory: What the next segment of the same streams needs, detached.
        hidden: (B, T, d) features before the output layer, dropout applied.
        solution: The equilibrium, or the iteration of a weight-tied stack, and its statistics; None for other models.
    """

    logits: Tensor | None = None
    losses: Tensor | None = None
    memory: Any = None
    hidden: Tensor | None = None
    solution: Solution | None = None

    @property
    def loss(self) -> Tensor:
        """Mean loss over all positions."""
        if self.losses is None:
            raise ValueError("LMOutput.loss: the model was called without targets.")
        return self.losses.mean()


register_record(LMOutput, ("logits", "losses", "memory", "hidden", "solution"), ())


@dataclass
class VisionOutput:
    """The output of an image model.

    Attributes:
        logits: (N, classes) scores of images, or (N, classes, H, W) scores of their pixels.
        states: The equilibrium, or the last features of other models, per resolution, the finest first, each
            (N, C_i, H_i, W_i).
        solution: The equilibrium and its statistics; None for other models.
    """

    logits: Tensor
    states: list[Tensor] = field(default_factory=list)
    solution: Solution | None = None


register_record(VisionOutput, ("logits", "states", "solution"), ())
