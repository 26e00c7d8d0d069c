"""Sampling text from a trained language model, token by token."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise._errors import require_count, require_number
from equipoise.data.vocabulary import vocabulary_from_state
from equipoise.train.load import find_checkpoint, load

INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are not a character yet


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its probabilities.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Choose among the k likeliest; None for all.
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
            require_number("Sampling", "top_p", self.top_p, low=0.0, high=1.0 + 1e-9, open_low=True)

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """(B,) tokens from logits (B, vocabulary)."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        scaled = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        if self.top_p is not None:
            ordered, places = scaled.softmax(dim=-1).sort(dim=-1, descending=True)
            beyond = ordered.cumsum(dim=-1) - ordered >= self.top_p  # the likeliest token always stays
            scaled = scaled.masked_fill(torch.zeros_like(beyond).scatter(-1, places, beyond), -torch.inf)
        return torch.multinomial(scaled.softmax(dim=-1), 1, generator=generator)[..., 0]


@torch.no_grad()
def sample(model: nn.Module, prompt: Tensor, length: int, sampling: Sampling = Sampling()) -> Iterator[Tensor]:
    """Tokens that go on from a prompt, one (B,) tensor at a time.

    Past positions are kept as the model's memory, one layer's worth whatever the number of solver steps; each new token
    solves its own position only.

    Args:
        model: A language model in eval mode whose memory reaches as far back as it should look.
        prompt: (B, T) tokens, T at least 1.
        length: Tokens to draw.
        sampling: How to draw.
    """
    require_count("sample", "length", length, low=0)
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(f"sample: prompt must be (B, T) with at least one token, got shape {tuple(prompt.shape)}.")
    generator = torch.Generator(device=prompt.device).manual_seed(sampling.seed)
    output = model(prompt)
    for _ in range(length):
        token = sampling.choose(output.logits[:, -1], generator)
        yield token
        output = model(token[:, None], memory=output.memory)


def sample_text(run: str | Path, prompt: str, length: int, sampling: Sampling = Sampling()) -> Iterator[str]:
    """Text that a trained model goes on with, piece by piece; the prompt first.

    Args:
        run: Folder of a run (with its vocabulary.json).
        prompt: Where to begin; empty for the start of a text.
        length: Tokens to draw.
        sampling: How to draw.
    """
    run = Path(run)
    path = run / "vocabulary.json"
    if not path.is_file():
        path = find_checkpoint(run).parent.parent / "vocabulary.json"
    if not path.is_file():
        raise FileNotFoundError(f"{run} has no vocabulary.json: it is not the run of a language model.")
    vocabulary = vocabulary_from_state(json.loads(path.read_text(encoding="utf-8")))
    model = load(run)
    given = vocabulary.encode(prompt)
    drawn = given.tolist() or [vocabulary.eos]
    hidden = 0 if len(given) else 1  # a start that nobody typed is not shown
    shown = ""
    for token in sample(model, torch.tensor([drawn]), length, sampling):
        # A character of several tokens is shown when it is whole.
        text = vocabulary.decode(drawn[hidden:]).rstrip(INCOMPLETE)
        yield text[len(shown) :]
        shown = text
        drawn.append(int(token))
    yield vocabulary.decode(drawn[hidden:])[len(shown) :]
