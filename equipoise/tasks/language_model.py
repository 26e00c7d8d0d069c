"""Training language models on streams of text."""

import functools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from equipoise._errors import require_count, require_number
from equipoise.data.stream import Segment, TokenStream
from equipoise.data.text import TextCorpus, load_text
from equipoise.models.deq_trellisnet import activation_penalty
from equipoise.tasks.base import Splits, Task, mean_metrics, register_task

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

VOCABULARY = "vocabulary.json"
"""File of a run: what its tokens mean."""


@dataclass(frozen=True)
class LanguageModelConfig:
    """Settings of the task.

    Attributes:
        corpus: A known corpus, "embedded", or a folder of text.
        tokens: "word", "character", "byte" or "bpe".
        vocabulary_size: Most entries of the vocabulary; None for all.
        train_fraction: Leading share of the training text to use.
        batch_size: Streams read side by side, of all processes together.
        length: Tokens in a segment.
        eval_batch_size: Streams in evaluation; more than one cuts contexts and drops a tail.
        eval_length: Tokens in a segment of evaluation; that of training if None.
        rotate: Whether each pass begins at another token.
        activation: Weight of the mean square of the output features.
        smoothness: Weight of the mean square of their change from one position to the next.
    """

    corpus: str = "embedded"
    tokens: str = "word"
    vocabulary_size: int | None = None
    train_fraction: float = 1.0
    batch_size: int = 16
    length: int = 64
    eval_batch_size: int = 16
    eval_length: int | None = None
    rotate: bool = True
    activation: float = 0.0
    smoothness: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch_size", "length", "eval_batch_size"):
            require_count("task", name, getattr(self, name))
        if self.eval_length is not None:
            require_count("task", "eval_length", self.eval_length)
        for name in ("activation", "smoothness"):
            require_number("task", name, getattr(self, name), low=0.0)


@register_task("language_model")
class LanguageModelTask(Task):
    """Predict the next token; memory is carried from segment to segment."""

    name = "language_model"
    Config = LanguageModelConfig
    score: ClassVar[str] = "perplexity"
    config: LanguageModelConfig

    @cached_property
    def corpus(self) -> TextCorpus:
        """The text."""
        c = self.config
        return load_text(c.corpus, self.data_dir, c.tokens, size=c.vocabulary_size, train_fraction=c.train_fraction)

    def data(self) -> Splits:
        c = self.config
        train = self._stream(
            "train", batch_size=c.batch_size, length=c.length, rotate=c.rotate, seed=self.seed, drop_short=True
        )
        length = c.length if c.eval_length is None else c.eval_length
        streams = {
            split: self._stream(split, batch_size=c.eval_batch_size, length=length, uneven=True)
            for split in ("valid", "test")
            if len(getattr(self.corpus, split))
        }
        scored = {f"{split}_scored_tokens": stream.scored_tokens for split, stream in streams.items()}
        return Splits(
            train=train.segment,
            epoch=train.segments_per_epoch,
            held_out={split: functools.partial(s.segments, epochs=1) for split, s in streams.items()},
            info={**self.corpus.info, **scored},
        )

    def _stream(self, split: str, **options: Any) -> TokenStream:
        tokens = self.corpus.train if split == "train" else self.corpus.split(split)
        try:
            return TokenStream(tokens, rank=self.rank, world_size=self.world_size, **options)
        except ValueError as error:
            # A stream does not know which text it is, nor that its batch_size may be the task's eval_batch_size.
            columns = "batch_size" if split == "train" else "eval_batch_size"
            raise ValueError(f"the {split} text in task.{columns} columns: {error}") from error

    def model_defaults(self) -> dict[str, Any]:
        return {"vocab_size": len(self.corpus.vocabulary)}

    def artifacts(self) -> dict[str, Any]:
        return {VOCABULARY: self.corpus.vocabulary.state()}

    def items(self, batch: Segment) -> tuple[int, str]:
        return batch.inputs.numel(), "tokens"

    def metrics(self) -> "MetricCollection":
        return mean_metrics("loss")

    def training_step(self, model: nn.Module, batch: Segment, carry: Any, step: int) -> tuple[dict[str, Tensor], Any]:
        output = model(batch.inputs, targets=batch.targets, memory=None if batch.starts else carry)
        losses = {"loss": output.loss, "nats": output.loss.detach()}
        c = self.config
        if c.activation or c.smoothness:
            losses["loss"] = losses["loss"] + activation_penalty(output, c.activation, c.smoothness)
        return losses, output.memory

    def evaluation_step(self, model: nn.Module, batch: Segment, carry: Any, metrics: "MetricCollection") -> Any:
        output = model(batch.inputs, targets=batch.targets, memory=None if batch.starts else carry)
        metrics["loss"].update(output.losses.float())
        return output.memory

    def report(self, values: dict[str, float]) -> dict[str, float]:
        loss = values["loss"]
        return {**values, "perplexity": math.exp(min(loss, 700)), "bits_per_token": loss / math.log(2)}
