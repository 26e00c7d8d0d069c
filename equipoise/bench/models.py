"""The published models, at their full layer sizes, that memory and run time are measured on.

The vocabulary is cut, so that embedding and softmax, which all networks compared share, weigh nothing: published memory
is without them, too. Tokens are random, and what the layer remembers is that of one segment before.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._module import DEQ, Plan
from equipoise._stop import Stop
from equipoise.adjoints import Implicit
from equipoise.bench.cells import VALUES
from equipoise.bench.harness import TINY
from equipoise.models import create_model
from equipoise.solvers import Solver

VOCABULARY = 256
Budget = tuple[int, int]
"""Steps of the forward and of the adjoint solve."""


@dataclass(frozen=True)
class Subject:
    """A DEQ model, and the explicit networks it is compared with.

    Attributes:
        name: For people.
        model: Its name in the registry.
        settings: Changes to it.
        batch: Streams.
        length: Positions of a segment.
        depth: Layers of the tied network whose run time is compared.
        layers: Layers of the tied networks whose memory is compared, the one that bars are for last but one.
        checkpoints: Layers between checkpoints, by layers of the tied network.
        untied: An explicit network of as many parameters: what it is, its name in the registry, changes to it.
        published: Budget of the published runs.
        regularised: Budget of the models trained with a Jacobian penalty.
        ratios: Published run time over that of the tied network, of training and of inference.
        shares: Most memory aimed at, as a share of the tied network: activations with solver history, the same with
            parameters and gradients; and, of the first, as a share of the untied network.
        lean: Further changes to the model when memory is measured.
        budgets: Steps of both solves when memory is measured: usual, few, many.
    """

    name: str
    model: str
    settings: tuple[tuple[str, Any], ...]
    batch: int
    length: int
    depth: int
    layers: tuple[int, ...]
    checkpoints: tuple[tuple[int, int], ...]
    untied: tuple[str, str, tuple[tuple[str, Any], ...]]
    published: Budget
    regularised: Budget
    ratios: tuple[float, float]
    shares: tuple[float | None, float | None, float | None]
    lean: tuple[tuple[str, Any], ...] = (("weight_norm", False),)
    budgets: tuple[int, int, int] = (30, 10, 100)

    @property
    def bar(self) -> int:
        """Layers of the tied network that memory bars are for."""
        return self.layers[-2] if len(self.layers) > 1 else self.layers[0]


_LSTM = ("3-layer LSTM", "lstm_ptb", (("vocab_size", VOCABULARY),))
_XL = (
    "untied Transformer-XL",
    "transformer_xl_wt103",
    (
        ("vocab_size", VOCABULARY),
        ("embedding_size", 512),
        ("heads", 8),
        ("inner_size", 2624),
        ("layers", 18),
        ("dropout", 0.05),
    ),
)
_SMALL_WORDS = (("vocab_size", 32),)

PTB = Subject(
    "PTB TrellisNet 15x150",
    "deq_trellisnet_ptb",
    (("vocab_size", VOCABULARY),),
    batch=15,
    length=150,
    depth=70,
    layers=(1, 10, 30, 60, 70),
    checkpoints=((60, 8), (70, 9)),
    untied=_LSTM,
    published=(45, 45),
    regularised=(12, 13),
    ratios=(2.40, 1.64),
    shares=(0.12, 0.14, None),
)
WT103 = Subject(
    "WT103 Transformer 15x150",
    "deq_transformer_wt103",
    (("vocab_size", VOCABULARY), ("cutoffs", ()), ("div_val", 1)),
    batch=15,
    length=150,
    depth=18,
    layers=(1, 4, 18, 24),
    checkpoints=((18, 1),),
    untied=_XL,
    published=(30, 35),
    regularised=(12, 13),
    ratios=(2.82, 1.76),
    shares=(0.20, None, 0.41),
    lean=(("weight_norm", False), ("ffn_chunks", 16)),
)
_TINY_TRELLIS = Subject(
    "tiny TrellisNet",
    "deq_trellisnet_small",
    (*_SMALL_WORDS, ("embedding_size", 8), ("hidden_size", 12)),
    batch=3,
    length=8,
    depth=12,
    layers=(1, 16, 17),
    checkpoints=((16, 4),),
    untied=(
        "LSTM",
        "lstm_ptb_small",
        (*_SMALL_WORDS, ("widths", (16, 8)), ("embedding_size", 8)),
    ),
    published=(10, 10),
    regularised=(8, 8),
    ratios=(2.40, 1.64),
    shares=(None, None, None),
    budgets=(8, 4, 12),
)
_TINY_TRANSFORMER = Subject(
    "tiny Transformer",
    "deq_transformer_small",
    (*_SMALL_WORDS, ("d_model", 16), ("heads", 2), ("d_inner", 64), ("memory_length", 8)),
    batch=3,
    length=8,
    depth=10,
    layers=(1, 10, 11),
    checkpoints=((10, 1),),
    untied=(
        "untied Transformer-XL",
        "transformer_xl_ptb_small",
        (*_SMALL_WORDS, ("embedding_size", 16), ("heads", 2), ("inner_size", 16), ("layers", 3), ("memory_length", 8)),
    ),
    published=(12, 12),
    regularised=(10, 10),
    ratios=(2.82, 1.76),
    shares=(None, None, None),
    lean=(("weight_norm", False), ("ffn_chunks", 2)),
    budgets=(10, 5, 15),
)

SUBJECTS = {"ptb": (PTB,), "wt103": (WT103,), TINY: (_TINY_TRELLIS, _TINY_TRANSFORMER)}


class Trainer:
    """Networks of a subject on one batch.

    Args:
        subject: What to compare.
        device: Where.
        half: Whether to compute in bfloat16, by autocast.
        **settings: Further changes to the DEQ model.
    """

    def __init__(self, subject: Subject, device: torch.device, half: bool, **settings: Any) -> None:
        torch.manual_seed(0)
        self.subject, self.device, self.half = subject, device, half
        self.model: Any = create_model(subject.model, **dict(subject.settings), **settings).to(device)
        self.deq.engine = "eager"  # so are twins made of it
        _make_contractive(self.model)
        vocabulary = dict(subject.settings)["vocab_size"]
        tokens = torch.randint(vocabulary, (2, subject.batch, subject.length + 1))
        self.before, self.now = tokens.to(device)

    @property
    def deq(self) -> DEQ:
        return self.model.deq  # type: ignore[no-any-return]

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    def plan(self, forward: Solver, backward: Solver, budget: Budget) -> Plan:
        """So many steps of both solves, whatever the residuals."""
        stops = [Stop(rtol=0, max_steps=steps) for steps in budget]
        return Plan(forward, Implicit(backward, stops[1]), stops[0])

    def untied(self) -> nn.Module:
        """The explicit network with weights of its own in every layer."""
        _, name, changes = self.subject.untied
        return create_model(name, **dict(changes)).to(self.device)  # type: ignore[no-any-return]

    def batch(self, network: nn.Module) -> tuple[Any, ...]:
        """Tokens, targets, and what the network remembers of the segment before, read without dropout."""
        training = network.training
        network.eval()
        with torch.no_grad(), self.autocast():
            memory = network(self.before[:, :-1]).memory
        network.train(training)
        return self.now[:, :-1], self.now[:, 1:], memory

    def step(self, network: nn.Module, batch: tuple[Any, ...]) -> Callable[[], Any]:
        """Forward and backward pass, gradients added to what is there; returns what the network does."""

        def work() -> Any:
            with self.autocast():
                output = network(*batch)
                loss = output.losses.float().mean()
            loss.backward()
            return output

        return work

    def inference(self, network: nn.Module, batch: tuple[Any, ...]) -> Callable[[], Any]:
        """A forward pass without gradients."""

        def work() -> Any:
            with torch.no_grad(), self.autocast():
                return network(*batch)

        return work


def mean_loss(output: Any) -> Tensor:
    """The loss of a training step."""
    return output.losses.float().mean()  # type: ignore[no-any-return]


@torch.no_grad()
def _make_contractive(model: Any) -> None:
    """Give a DEQ-Transformer an equilibrium that solves reach, as in `cells`; a TrellisNet has one from the start."""
    if isinstance(model.injection, nn.Linear):
        values = model.injection.bias[2 * model.config.d_model :]
        values.copy_(VALUES * torch.randn(values.shape).to(values))
