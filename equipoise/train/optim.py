"""Optimisers by name, gradient clipping that notices non-finite gradients, and averages of weights."""

import abc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from equipoise._errors import require_count, require_number, unknown_name
from equipoise._registry import Registry
from equipoise.train.config import register_family

Exempt = Literal["bias", "norm", "embedding"]

_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclass(frozen=True)
class Optimiser(abc.ABC):
    """Settings of an optimiser; `build` makes one for a model.

    Attributes:
        lr: Learning rate, before schedules.
        weight_decay: Strength of the decay.
        no_decay: Parameters that are not decayed: "bias", "norm" (gains and shifts of normalisation layers, gains of
            weight normalisation), "embedding" (tables of embedding layers, and lists of parameters called `tables`).
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    no_decay: tuple[Exempt, ...] = ()

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_number(name, "lr", self.lr, low=0.0, open_low=True)
        require_number(name, "weight_decay", self.weight_decay, low=0.0)
        for kind in self.no_decay:
            if kind not in get_args(Exempt):
                raise unknown_name("kind of parameter in no_decay", kind, get_args(Exempt))

    @abc.abstractmethod
    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """The torch optimiser of these parameter groups."""

    def build(self, model: nn.Module) -> Optimizer:
        """The optimiser of every parameter of `model` that wants a gradient, each tied one once."""
        return self.make(parameter_groups(model, self.lr, self.weight_decay, self.no_decay))


OPTIMISERS = Registry("optimiser")
register_family(Optimiser, OPTIMISERS)
register_optimiser = OPTIMISERS.register


@register_optimiser("adam")
@dataclass(frozen=True)
class Adam(Optimiser):
    """Adam; its weight decay is added to the gradient.

    Attributes:
        lr: Learning rate, before schedules.
        weight_decay: Strength of the decay.
        no_decay: Parameters that are not decayed.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        for beta in self.betas:
            require_number(type(self).__name__, "betas", beta, low=0.0, high=1.0)
        require_number(type(self).__name__, "eps", self.eps, low=0.0)

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.Adam(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=_fused(groups))


@register_optimiser("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay acts on the weights themselves, apart from the gradient; settings as in `Adam`."""

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=_fused(groups))


@register_optimiser("sgd")
@dataclass(frozen=True)
class SGD(Optimiser):
    """Gradient descent.

    Attributes:
        lr: Learning rate, before schedules.
        weight_decay: Strength of the decay.
        no_decay: Parameters that are not decayed.
        momentum: 0 for none.
        nesterov: Nesterov's form of momentum.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("SGD", "momentum", self.momentum, low=0.0, high=1.0)
        if self.nesterov and self.momentum == 0:
            raise ValueError("SGD: nesterov needs momentum > 0.")

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        options: dict[str, Any] = {"momentum": self.momentum, "nesterov": self.nesterov, "fused": _fused(groups)}
        optimizer = torch.optim.SGD(groups, lr=self.lr, **options)
        if options["fused"] and self.momentum > 0:
            # Else a refused first step would leave the momentum arbitrary; from zero the first step is the same.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer


def _fused(groups: list[dict[str, Any]]) -> bool | None:
    """One kernel for all parameters, which can leave out a step by itself, on a CUDA device; None elsewhere."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(p.is_cuda and p.is_floating_point() and not hasattr(p, "placements") for p in parameters) or None


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, no_decay: Iterable[Exempt] = ()
) -> list[dict[str, Any]]:
    """One or two groups: parameters that are decayed, and those that are exempt.

    Each group keeps the base learning rate as `initial_lr`, which schedules multiply.
    """
    exempt = _exempt_parameters(model, frozenset(no_decay))
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():  # a tied parameter comes once
        if parameter.requires_grad:
            (kept if id(parameter) in exempt else decayed).append(parameter)
    if not decayed and not kept:
        raise ValueError(f"{type(model).__name__} has no parameter that wants a gradient.")
    groups = [(decayed, weight_decay), (kept, 0.0)]
    return [{"params": params, "lr": lr, "initial_lr": lr, "weight_decay": decay} for params, decay in groups if params]


def _exempt_parameters(model: nn.Module, kinds: frozenset[str]) -> set[int]:
    """Ids of parameters that some owner exempts: an embedding tied to an output layer is still an embedding."""
    found: set[int] = set()
    for module in model.modules():
        for name, parameter in _own_parameters(module):
            is_kind = {
                "bias": name in ("bias", "biases") or name.endswith("_bias") or name.startswith("bias_"),
                "norm": isinstance(module, _NORMS) or name == "weight_g",
                "embedding": isinstance(module, nn.Embedding | nn.EmbeddingBag) or name == "tables",
            }
            if any(is_kind[kind] for kind in kinds):
                found.add(id(parameter))
    return found


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters a module has itself, those in a list under the name of the list."""
    if isinstance(module, nn.ParameterList):
        return
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if isinstance(child, nn.ParameterList):
            yield from ((name, parameter) for parameter in child)


def set_learning_rate(optimizer: Optimizer, factor: float) -> float:
    """Scale every group's base learning rate by `factor`; returns the rate of the first group."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return optimizer.param_groups[0]["lr"]


class NonFiniteGradientError(RuntimeError):
    """So many steps in a row had non-finite gradients that the run is dead."""


@dataclass(frozen=True)
class Clip:
    """What is done to gradients before a step.

    Attributes:
        max_norm: Gradients are scaled down to this total norm; None for no limit.
        give_up: Steps in a row with non-finite gradients after which the run ends with an error.
    """

    max_norm: float | None = None
    give_up: int = 50

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            require_number("Clip", "max_norm", self.max_norm, low=0.0, open_low=True)
        require_count("Clip", "give_up", self.give_up)

    def start(self) -> "GradientGuard":
        """The state of a run that begins."""
        return GradientGuard(self)


class GradientGuard:
    """Clips gradients, and refuses steps whose gradient is not finite.

    Norms may be read, and refusals counted, later than they were found: nothing has to wait for the device.

    Attributes:
        skipped: Steps refused so far, as far as they have been counted.
        skipped_in_a_row: Those since the last step that was made.
        norm: Total norm of the newest gradients that have been counted, before clipping.
    """

    def __init__(self, settings: Clip) -> None:
        self.settings = settings
        self.skipped = self.skipped_in_a_row = 0
        self.norm = math.nan
        self._unread: list[Tensor] = []

    def check(self, model: nn.Module) -> bool:
        """Clip the gradients of `model` in place; False if the step must not be made.

        Reads the norm on the host.

        Raises:
            NonFiniteGradientError: After `give_up` refusals in a row.
        """
        self.note(self.clip(model))
        self.catch_up(model)
        return self.skipped_in_a_row == 0

    def clip(self, model: nn.Module) -> Tensor:
        """Clip the gradients of `model` in place; returns their norm before, to be noted. Waits for nothing."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not gradients:
            raise RuntimeError(f"no parameter of {type(model).__name__} has a gradient; was backward() called?")
        total = _whole(nn.utils.get_total_norm(gradients))
        if self.settings.max_norm is not None:
            nn.utils.clip_grads_with_norm_(model.parameters(), self.settings.max_norm, total)
        return total

    def note(self, norm: Tensor) -> None:
        """Take in the norm of a step, to be counted by `catch_up`."""
        self._unread.append(norm)

    def catch_up(self, model: nn.Module | None = None, beyond: int = 0) -> None:
        """Count what has been noted.

        Args:
            model: Whose gradients an error may look at; None if they are gone.
            beyond: If no more than so many were noted, nothing is read.

        Raises:
            NonFiniteGradientError: After `give_up` refusals in a row.
        """
        if len(self._unread) <= beyond:
            return
        unread, self._unread = self._unread, []
        for norm in unread[0][None].tolist() if len(unread) == 1 else torch.stack(unread).tolist():
            self.norm = norm
            self.skipped_in_a_row = 0 if math.isfinite(norm) else self.skipped_in_a_row + 1
            self.skipped += self.skipped_in_a_row > 0
            if self.skipped_in_a_row >= self.settings.give_up:
                self._give_up(model)

    def _give_up(self, model: nn.Module | None) -> None:
        named = model.named_parameters() if model is not None else ()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        bad = [name for name, grad in gradients.items() if not _whole(grad.isfinite().all())]
        where = f"first in {', '.join(bad[:3])}" if bad else "each is finite, their norm overflows"
        found = f" ({where}; {len(bad)} of {len(gradients)} tensors)" if gradients else ""
        raise NonFiniteGradientError(
            f"{self.skipped_in_a_row} steps in a row had non-finite gradients{found}; {self.skipped} steps were "
            "skipped in all. Lower the learning rate, or look at the failures of the forward and backward solves in "
            "the log."
        )

    def metrics(self) -> dict[str, float | int]:
        """What belongs in the log of every run."""
        self.catch_up()
        return {"grad_norm": self.norm, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue."""
        self.catch_up()
        return {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.skipped, self.skipped_in_a_row = int(state["skipped"]), int(state["skipped_in_a_row"])


class Stepper:
    """An optimiser with its guards: loss scaling for float16, clipping, refusal of gradients that are not finite.

    A fused optimiser refuses on the device: nothing waits for it. Others are asked to step only after the norm of the
    gradients has been read.

    Attributes:
        optimizer: Makes the steps.
        guard: Looks at the gradients, unscaled, before them.
        scaler: Scales the loss; None without float16.
    """

    def __init__(self, optimizer: Optimizer, guard: GradientGuard, scaler: GradScaler | None = None) -> None:
        self.optimizer, self.guard, self.scaler = optimizer, guard, scaler

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss, scaled, to that of the parameters."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, model: nn.Module, factor: float) -> None:
        """Make a step with a learning rate times `factor`, unless it is refused; gradients are gone afterwards."""
        set_learning_rate(self.optimizer, factor)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            if self.guard.check(model):
                self.scaler.step(self.optimizer)
            self.scaler.update()  # after a refusal too: it lowers the scale
        elif self.refuses_by_itself:
            self.guard.catch_up(model)
            norm = self.guard.clip(model)
            self.guard.note(norm)
            self.apply(norm)
        elif self.guard.check(model):
            self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def refuses_by_itself(self) -> bool:
        """Whether a step is made or refused on the device: what a fused optimiser can do."""
        return self.scaler is None and getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def apply(self, norm: Tensor) -> None:
        """Make a step, or refuse it on the device if the norm of the gradients is not finite."""
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.found_inf = None  # type: ignore[attr-defined]

    @contextmanager
    def rates_in(self, rates: Sequence[Tensor], recorded: bool) -> Iterator[None]:
        """The optimiser reads its learning rates from tensors, for a while.

        Args:
            rates: One for each group, without axes.
            recorded: Whether steps made meanwhile go into a CUDA graph, which Adam has to be told.
        """
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            if recorded and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, settings in zip(groups, before, strict=True):
                group.update(settings)

    def metrics(self) -> dict[str, float | int]:
        """What belongs in the log."""
        scale = {} if self.scaler is None else {"loss_scale": self.scaler.get_scale()}
        return {"lr": self.optimizer.param_groups[0]["lr"], **self.guard.metrics(), **scale}

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "guard": self.guard.state_dict(), "scaler": scaler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.guard.load_state_dict(state["guard"])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])


def _whole(value: Any) -> Tensor:
    """A plain tensor: sharded parameters have sharded gradients and norms."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@dataclass(frozen=True)
class Averaging:
    """An average of the weights, used for evaluation.

    Attributes:
        kind: "ema" (exponential), or "uniform" (plain mean, as averaged gradient descent uses).
        decay: Of the exponential average: weight of the past in each update.
        start: First step that is averaged; None to wait for `WeightAverage.begin`, e.g. on a plateau.
        batches: Training batches from which BatchNorm, where there is any, gets the statistics of averaged weights.
    """

    kind: Literal["ema", "uniform"] = "ema"
    decay: float = 0.999
    start: int | None = 0
    batches: int = 30

    def __post_init__(self) -> None:
        require_number("Averaging", "decay", self.decay, low=0.0, high=1.0)
        require_count("Averaging", "batches", self.batches)
        if self.start is not None:
            require_count("Averaging", "start", self.start, low=0)


class WeightAverage:
    """The running average of a model's parameters, in float32 at least.

    Buffers are not averaged; statistics that go with averaged weights are taken anew (`equipoise.train.statistics`).
    """

    def __init__(self, settings: Averaging) -> None:
        self.settings = settings
        self.count = 0
        self._begun = False
        self._mean: dict[str, Tensor] = {}

    @property
    def active(self) -> bool:
        """Whether there is an average yet."""
        return self.count > 0

    def begin(self) -> None:
        """Start to average with the next update, whatever the settings say."""
        self._begun = True

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after step number `step`."""
        if not self._due(step):
            return
        self.count += 1
        if self.count == 1:
            self._mean = {name: p.detach().to(_wide(p), copy=True) for name, p in model.named_parameters()}
            return
        self.blend(model)

    def steady(self, step: int) -> bool:
        """Whether the update of this step is a `blend` by a share that stays as it is."""
        return self.settings.kind == "ema" and self.active and self._due(step)

    def _due(self, step: int) -> bool:
        return self._begun or (self.settings.start is not None and step >= self.settings.start)

    @torch.no_grad()
    def blend(self, model: nn.Module) -> None:
        """Mix the weights of a model into the average, which is there; they are not counted."""
        share = 1 - self.settings.decay if self.settings.kind == "ema" else 1 / self.count
        newest = {name: parameter.detach().to(_wide(parameter)) for name, parameter in model.named_parameters()}
        torch._foreach_lerp_([self._mean[name] for name in newest], list(newest.values()), share)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model with averaged weights, for a while; unchanged as long as there is no average."""
        if not self.active:
            yield model
            return
        live = {name: p.detach().clone() for name, p in model.named_parameters()}
        try:
            _copy_into(model, self._mean)
            yield model
        finally:
            _copy_into(model, live)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue."""
        return {"count": self.count, "begun": self._begun, "mean": dict(self._mean)}

    def load_state_dict(self, state: dict[str, Any], model: nn.Module) -> None:
        """Continue from a saved state, on the devices of the parameters of `model`."""
        places = {name: p.device for name, p in model.named_parameters()}
        mean = state["mean"]
        if mean and set(mean) != set(places):
            odd = sorted(set(mean) ^ set(places))
            raise ValueError(f"the saved average is of another model: {', '.join(odd[:3])} is in one of them only.")
        self.count, self._begun = int(state["count"]), bool(state["begun"])
        self._mean = {name: value.to(places[name], copy=True) for name, value in mean.items()}


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


@torch.no_grad()
def _copy_into(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
