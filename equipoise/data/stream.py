"""Token streams as batches of segments with carried memory, and their evaluation."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise._draws import Rows
from equipoise._errors import require_count
from equipoise.data._draws import keyed_integer


@dataclass(frozen=True)
class Segment:
    """One step of a batch of streams.

    Attributes:
        inputs: (rows, T) token ids; row i continues row i of the segment before.
        targets: (rows, T) the next token of each position.
        epoch: Number of passes finished before this one.
        index: Number of the segment in its pass; 0 means that memory carried from before is void.
        position: What to pass to `TokenStream.segments` to go on after this segment.
        rows: Which columns of the stream these are.
    """

    inputs: Tensor
    targets: Tensor
    epoch: int
    index: int
    position: int
    rows: Rows

    @property
    def starts(self) -> bool:
        """Whether the streams begin here, so that memory must be empty."""
        return self.index == 0

    def to(self, device: torch.device | str) -> "Segment":
        """The segment on a device."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("inputs", "targets")}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, eq=False)
class TokenStream:
    """A token stream cut into contiguous columns, read in segments.

    With N tokens and batch size B, column b holds tokens b·w .. (b+1)·w − 1, w = ⌊N/B⌋; the rest is dropped. Targets
    are inputs shifted by one inside a column, so a pass scores B·(w − 1) tokens. Any segment is a pure function of its
    position, an integer: a resumed run sees what an uninterrupted one would have seen.

    Attributes:
        tokens: (N,) token ids.
        batch_size: Number of columns B, of all ranks together.
        length: Tokens T in a segment; the last one of a pass may be shorter.
        rotate: Whether each pass begins at another token, drawn by (seed, epoch); the stream then closes to a ring.
        seed: Key of the rotation.
        drop_short: Whether to leave out a last segment shorter than `length`, so that all have one shape.
        rank: Which share of the columns to read.
        world_size: Number of shares; together they are the columns of one process.
        uneven: Whether shares may differ in size, or be empty; training wants them equal.
    """

    tokens: Tensor
    batch_size: int
    length: int
    rotate: bool = False
    seed: int = 0
    drop_short: bool = False
    rank: int = 0
    world_size: int = 1
    uneven: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "length", "world_size"):
            require_count("TokenStream", name, getattr(self, name))
        require_count("TokenStream", "rank", self.rank, low=0)
        if self.tokens.ndim != 1 or self.tokens.is_floating_point():
            raise ValueError(
                f"TokenStream: tokens must be a vector of integers, got shape {tuple(self.tokens.shape)} of "
                f"{self.tokens.dtype}."
            )
        if self.rank >= self.world_size:
            raise ValueError(f"TokenStream: rank {self.rank} does not exist among {self.world_size}; ranks begin at 0.")
        if self.batch_size % self.world_size and not self.uneven:
            raise ValueError(
                f"TokenStream: batch_size={self.batch_size} (of all ranks together) is not a multiple of "
                f"world_size={self.world_size}; take {self.world_size * max(1, self.batch_size // self.world_size)}."
            )
        if not self.segments_per_epoch:
            least = self.length + 1 if self.drop_short else 2
            most = len(self.tokens) // least
            shorter = " or lower length" if self.drop_short else ""
            remedy = f"lower batch_size to at most {most}" if most else f"give a longer text{shorter}"
            raise ValueError(
                f"TokenStream: {len(self.tokens):,} tokens in {self.batch_size} columns leave {self.width} a column, "
                f"but at least {least} are needed; {remedy}."
            )

    @property
    def width(self) -> int:
        """Tokens in a column."""
        return len(self.tokens) // self.batch_size

    @property
    def rows(self) -> range:
        """The columns this rank reads."""
        share = Rows.share(self.batch_size, self.rank, self.world_size)
        return range(share.start, share.stop)

    @property
    def segments_per_epoch(self) -> int:
        """Segments in a pass."""
        targets = max(self.width - 1, 0)
        return targets // self.length if self.drop_short else -(-targets // self.length)

    @property
    def scored_tokens(self) -> int:
        """Targets in a pass, of all ranks together."""
        targets = self.segments_per_epoch * self.length if self.drop_short else self.width - 1
        return self.batch_size * targets

    @property
    def dropped_tokens(self) -> int:
        """Tokens that are never a target in a pass: the first of each column, and the tail."""
        return len(self.tokens) - self.scored_tokens

    def offset(self, epoch: int) -> int:
        """The token at which a pass begins."""
        return keyed_integer(len(self.tokens), self.seed, "rotation", epoch) if self.rotate else 0

    def segment(self, position: int) -> Segment:
        """The segment at a position: passes follow one another, so position = epoch · segments_per_epoch + index."""
        require_count("TokenStream", "position", position, low=0)
        epoch, index = divmod(position, self.segments_per_epoch)
        start = index * self.length
        count = min(self.length, self.width - 1 - start) + 1
        rows = Rows.share(self.batch_size, self.rank, self.world_size)
        first = self.offset(epoch) + start + torch.arange(rows.start, rows.stop) * self.width
        places = (first[:, None] + torch.arange(count)) % len(self.tokens)
        block = self.tokens[places.to(self.tokens.device)].long()  # (rows, T + 1)
        # Both are contiguous: kernels and pinned copies want dense rows.
        return Segment(block[:, :-1].contiguous(), block[:, 1:].contiguous(), epoch, index, position + 1, rows)

    def segments(self, position: int = 0, epochs: int | None = None) -> Iterator[Segment]:
        """Segments from a position on.

        Args:
            position: Where to begin; `Segment.position` of the last segment seen.
            epochs: Stop when this many passes, counted from the very beginning, are finished; None goes on forever.
        """
        while epochs is None or position < epochs * self.segments_per_epoch:
            segment = self.segment(position)
            yield segment
            position = segment.position


@dataclass(frozen=True)
class StreamScore:
    """The likelihood of a stream; scores of ranks or splits can be added.

    Attributes:
        nats: Sum of the negative log-likelihood.
        tokens: Number of tokens scored.
        dropped: Number of tokens of the stream that were not.
    """

    nats: float = 0.0
    tokens: int = 0
    dropped: int = 0

    def __add__(self, other: "StreamScore") -> "StreamScore":
        return StreamScore(self.nats + other.nats, self.tokens + other.tokens, self.dropped + other.dropped)

    @property
    def loss(self) -> float:
        """Nats per token."""
        if not self.tokens:
            raise ValueError("StreamScore: no token was scored, so there is no mean loss.")
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the loss; infinite if that overflows."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bits(self) -> float:
        """Bits per token; per character for character tokens."""
        return self.loss / math.log(2)

    def report(self, info: dict[str, Any] | None = None) -> dict[str, Any]:
        """What to log with a perplexity.

        Args:
            info: Facts about the corpus, as in `TextCorpus.info`; corpus, tokens and vocabulary are taken from it.
        """
        facts = {key: value for key, value in (info or {}).items() if key in ("corpus", "tokens", "vocabulary")}
        numbers = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_token": self.bits}
        return {**numbers, "scored_tokens": self.tokens, "dropped_tokens": self.dropped, **facts}


Score = Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]]


@torch.no_grad()
def score_stream(
    score: Score,
    tokens: Tensor,
    length: int,
    *,
    batch_size: int = 1,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    max_segments: int | None = None,
) -> StreamScore:
    """Score a stream once, segment by segment, memory carried along.

    With one column every token but the first is scored; more columns are faster, but cut the context at each column and
    drop the tail, so the number depends on `batch_size`: it is given with the result.

    Args:
        score: `(inputs, targets, memory) -> (losses, memory)`, losses of shape (rows, T) in nats; memory is None at
            first.
        tokens: (N,) token ids.
        length: Tokens in a segment.
        batch_size: Number of columns, of all ranks together.
        device: Where the segments go.
        rank: Which share of the columns to score.
        world_size: Number of shares; add up the scores of all ranks.
        max_segments: Stop after this many segments; None scores all.

    Returns:
        The score of the columns of this rank.
    """
    stream = TokenStream(tokens, batch_size, length, rank=rank, world_size=world_size)
    sums, scored, memory = [], 0, None
    for segment in stream.segments(epochs=1):
        if max_segments is not None and segment.index >= max_segments:
            break
        segment = segment.to(device)
        losses, memory = score(segment.inputs, segment.targets, memory)
        if losses.shape != segment.targets.shape:
            raise ValueError(
                f"score_stream: losses must have the shape of the targets, {tuple(segment.targets.shape)}, got "
                f"{tuple(losses.shape)}; pass the loss of each token, not their mean."
            )
        wide = losses if losses.dtype in (torch.float32, torch.float64) else losses.float()
        sums.append(wide.sum())  # stays on the device: reading it here would make the host wait at each segment
        scored += losses.numel()
    nats = float(torch.stack(sums).cpu().double().sum()) if sums else 0.0
    tail = len(tokens) - batch_size * stream.width if rank == 0 else 0  # counted once, so that ranks add up
    return StreamScore(nats, scored, len(stream.rows) * stream.width + tail - scored)
