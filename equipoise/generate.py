"""Sampling text from a trained language model, token by token."""

import json
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._errors import require_count, require_number
from equipoise._module import override
from equipoise.data.vocabulary import UNKNOWN, Vocabulary, vocabulary_from_state
from equipoise.tasks.language_model import VOCABULARY
from equipoise.train.load import autocast_of, find_checkpoint, home_of, load, read_config, require_equilibrium
from equipoise.train.schedule import keyed_uniform

_SHOWN = 8  # words of a prompt that a warning names
INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are not a character yet


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its probabilities.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Choose among the k likeliest, of equally likely ones those of lower number; None for all.
        top_p: Choose among the likeliest tokens whose probabilities add up to this; None for all.
        seed: Key of the draws.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("Sampling", "temperature", self.temperature, low=0.0)
        if self.top_k is not None:
            require_count("Sampling", "top_k", self.top_k)
        if self.top_p is not None:
            require_number("Sampling", "top_p", self.top_p, low=0.0, high=1.0, open_low=True, closed_high=True)

    def draws(self, batch: int, position: int) -> Tensor:
        """Numbers in [0, 1), (batch,), for the token at a position: each depends on the seed, its row and the position.

        So a sample is the same alone and beside others, and on every device.
        """
        rows = [keyed_uniform(self.seed, f"sample {row}", position) for row in range(batch)]
        return torch.tensor(rows, dtype=torch.float64)

    def choose(self, logits: Tensor, draws: Tensor) -> Tensor:
        """Tokens (B,) from logits (B, vocabulary) and a number in [0, 1) for each, by inverting their distribution."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        wide = logits.double() / self.temperature
        ordered, places = wide.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered[..., : self.top_k].softmax(dim=-1)
        if self.top_p is not None:
            before = probabilities.cumsum(dim=-1) - probabilities  # the likeliest token has nothing before it: it stays
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        total = probabilities.cumsum(dim=-1)
        rank = torch.searchsorted(total, draws.to(total)[:, None] * total[:, -1:], right=True)
        rank = rank.minimum((probabilities > 0).sum(dim=-1, keepdim=True) - 1)  # a draw rounded up to the total
        return places.gather(-1, rank)[:, 0]


@torch.no_grad()
def sample(model: nn.Module, prompt: Tensor, length: int, sampling: Sampling = Sampling()) -> Iterator[Tensor]:
    """Tokens that go on from a prompt, one (B,) tensor at a time.

    Past positions are kept as the model's memory: for an equilibrium one layer's worth, whatever the number of solver
    steps. Each new token solves its own position only. Positions are relative and models causal, so this gives what
    reading the whole text again would, as far back as memory reaches. A `memory_length` that a model was trained with
    is kept to; one that was trained without memory sees the whole text. A model that returns no memory at all, and has
    no `memory_length`, reads the whole text again for every token.

    Args:
        model: A language model in eval mode.
        prompt: (B, T) tokens, T at least 1; the streams do not influence each other.
        length: Tokens to draw.
        sampling: How to draw.
    """
    require_count("sample", "length", length, low=0)
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(f"sample: prompt must be (B, T) with at least one token, got shape {tuple(prompt.shape)}.")
    reach, text, unread, memory = prompt.shape[1] + length, prompt, prompt, None
    for position in range(length):
        output = _read(model, unread if memory is not None else text, memory, reach)
        memory = output.memory
        token = sampling.choose(output.logits[:, -1], sampling.draws(len(text), position))
        unread = token[:, None]
        text = torch.cat([text, unread], dim=1)
        yield token


def _read(model: nn.Module, tokens: Tensor, memory: Any, reach: int) -> Any:
    """The model's output; one that is set to keep nothing keeps `reach` positions for this call."""
    forgets = getattr(model, "memory_length", None) == 0
    if forgets:
        model.memory_length = reach  # type: ignore[assignment]
    try:
        return model(tokens, memory=memory)
    finally:
        if forgets:
            model.memory_length = 0  # type: ignore[assignment]


class _Transcript:
    """The text of one sample as it grows."""

    def __init__(self, vocabulary: Vocabulary, prompt: list[int], stop: str | None) -> None:
        self.vocabulary, self.stop = vocabulary, stop
        self.tokens = list(prompt)
        self.shown = vocabulary.decode(prompt)
        self.begins, self.ended = len(self.shown), False

    def add(self, token: int) -> str:
        """The whole characters that a token adds; none once the sample has ended."""
        if self.ended:
            return ""
        self.tokens.append(token)
        # A character of several tokens is shown when it is whole.
        return self._show(self.vocabulary.decode(self.tokens).rstrip(INCOMPLETE))

    def finish(self) -> str:
        """What is left over."""
        return "" if self.ended else self._show(self.vocabulary.decode(self.tokens))

    def _show(self, text: str) -> str:
        if self.stop is not None and self.stop in text[self.begins :]:
            text, self.ended = text[: text.index(self.stop, self.begins)], True
        piece = text[len(self.shown) :]
        self.shown += piece
        return piece


def sample_texts(
    run: str | Path,
    prompt: str,
    length: int,
    sampling: Sampling = Sampling(),
    *,
    samples: int = 1,
    stop: str | None = None,
    device: torch.device | str = "cpu",
    solver: str | None = None,
    force: bool = False,
    guard: bool = False,
) -> Iterator[tuple[str, ...]]:
    """Texts that a trained model goes on with, side by side and piece by piece; the prompt first.

    Args:
        run: Folder of a run (with its vocabulary.json).
        prompt: Where to begin; empty for the start of a text.
        length: Tokens to draw for each.
        sampling: How to draw; the first sample is the same however many there are.
        samples: How many texts.
        stop: A text ends before this; what came of it with earlier tokens has been shown by then. None to draw all.
        device: Where to compute.
        solver: Name of a solver to use instead of the model's; `hyper:PATH` is a learned one.
        force: Take a learned solver of another model too.
        guard: Hand systems that the solver leaves unsolved to Anderson.
    """
    require_count("sample_texts", "samples", samples)
    require_count("sample_texts", "length", length, low=0)
    if stop == "":
        raise ValueError("sample_texts: stop must be some text, e.g. a line break; None to draw all tokens.")
    folder, vocabulary = find_checkpoint(run), _vocabulary(Path(run))
    model, precision = load(folder, device), autocast_of(read_config(folder), device)
    # Sought before anything is shown.
    by = _solving(model, folder, solver, force=force, guard=guard)
    given = vocabulary.encode(prompt).tolist()
    _warn_of_strange(vocabulary, prompt)
    texts = [_Transcript(vocabulary, given, stop) for _ in range(samples)]
    yield tuple(text.shown for text in texts)
    start = torch.tensor([given or [vocabulary.eos]], device=device).expand(samples, -1)
    tokens = sample(model, start, length, sampling)
    with by:  # the model is our own, so this reaches nobody else
        for _ in range(length):
            with precision:  # not around the yield, where it would reach the caller's own computations
                drawn = next(tokens).tolist()
            yield tuple(text.add(token) for text, token in zip(texts, drawn, strict=True))
            if all(text.ended for text in texts):
                break
    rest = tuple(text.finish() for text in texts)
    if any(rest):
        yield rest


def _warn_of_strange(vocabulary: Vocabulary, prompt: str) -> None:
    """Say what of the prompt the model cannot read."""
    strange, total = vocabulary.strange(prompt)
    if not strange:
        return
    lower = dict.fromkeys(token.lower() for token in strange)
    known = [token for token in lower if not vocabulary.strange(token)[0]]
    hint = f"; in lower case it has {', '.join(known[:_SHOWN])}" if known else ""
    listed = list(dict.fromkeys(strange))
    more = ", ..." if len(listed) > _SHOWN else ""
    warnings.warn(
        f"{len(strange)} of {total} {vocabulary.kind}s of the prompt are not in the vocabulary, and are read as "
        f"{UNKNOWN}: {', '.join(listed[:_SHOWN])}{more}{hint}.",
        stacklevel=3,
    )


def sample_text(
    run: str | Path,
    prompt: str,
    length: int,
    sampling: Sampling = Sampling(),
    *,
    stop: str | None = None,
    device: torch.device | str = "cpu",
    solver: str | None = None,
    force: bool = False,
    guard: bool = False,
) -> Iterator[str]:
    """A text that a trained model goes on with, piece by piece; the arguments are those of `sample_texts`."""
    options: dict[str, Any] = {"stop": stop, "device": device, "solver": solver, "force": force, "guard": guard}
    for (piece,) in sample_texts(run, prompt, length, sampling, **options):
        yield piece


def _solving(
    model: nn.Module, folder: Path, solver: str | None, *, force: bool, guard: bool
) -> AbstractContextManager[Any]:
    """A context in which a model solves by what was asked for."""
    if solver is None and not guard:
        return nullcontext()
    from equipoise.train.evaluate import chosen_solver

    require_equilibrium(model, folder, "so there is no solver to set")
    return override(model, solver=chosen_solver(model, solver, force=force, guard=guard))


def _vocabulary(run: Path) -> Vocabulary:
    path = run / VOCABULARY
    if not path.is_file():
        path = home_of(find_checkpoint(run)) / VOCABULARY
    if not path.is_file():
        raise FileNotFoundError(f"{run} has no {VOCABULARY}: it is not the run of a language model.")
    return vocabulary_from_state(json.loads(path.read_text(encoding="utf-8")))
