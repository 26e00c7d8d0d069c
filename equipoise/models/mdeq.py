"""MDEQ: several resolutions of an image driven to one joint equilibrium, for classification and segmentation.

A stem maps the image to features, which are injected into the layer f at the finest resolution (or at all of them); one
solver finds the joint equilibrium of all resolutions; a head reads it. The state is a tuple with one map per
resolution, which is never concatenated.

Reference: S. Bai, V. Koltun, J. Z. Kolter, Multiscale deep equilibrium models, NeurIPS 2020; the regularised variants
are of Stabilizing equilibrium models by Jacobian regularization, ICML 2021.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from equipoise._compat import autocast_dtype, reenter_autocast
from equipoise._errors import require_count, require_number, unknown_name
from equipoise._module import DEQ, Plan
from equipoise._scope import SolveScope
from equipoise._solution import Solution
from equipoise._stop import Stop
from equipoise.adjoints import Implicit
from equipoise.models._multiscale import MultiscaleCell, States
from equipoise.models._sequence import settings
from equipoise.models.outputs import VisionOutput
from equipoise.models.registry import register_model
from equipoise.models.vision_heads import ClassificationHead, Injections, SegmentationHead, Stem, initialise
from equipoise.solvers import Anderson, Broyden

TASKS = ("classification", "segmentation")
INJECTIONS = ("first", "all")
MOST_DOWNSAMPLINGS = 3


def published_plan(forward: int, backward: int, absolute: bool = False) -> Plan:
    """Broyden both ways, to a residual of 1e-3 or so many steps.

    Args:
        forward: Steps of the forward solve.
        backward: Steps of the adjoint solve. Its tolerance is relative in any case: gradients may be smaller than any
            absolute one, and the solve would end before it began.
        absolute: Whether the forward tolerance is absolute; the number of steps then decides.
    """
    rtol, atol = (0.0, 1e-3) if absolute else (1e-3, 0.0)
    adjoint = Implicit(solver=Broyden(), stop=Stop(rtol=1e-3, max_steps=backward))
    return Plan(Broyden(), adjoint, Stop(rtol=rtol, atol=atol, max_steps=forward))


@dataclass(frozen=True)
class MDEQConfig:
    """Settings of `MDEQ`.

    Attributes:
        task: "classification" or "segmentation": which head reads the equilibrium.
        num_classes: Classes of images, or of pixels.
        in_channels: Channels of images.
        channels: Channels of the state per resolution, the finest first; each has half the pixels of the one before.
        head_channels: Channels of the classification head's bottlenecks, one per resolution; segmentation has none.
        final_channels: Channels before the last layer of the head; for segmentation, all of the state's if None.
        details: Channels of a part of the segmentation head that looks at the image again, at half its size, and adds
            to the scores; 0 for none, as published.
        expansion: Hidden channels of f's residual blocks over their channels, rounded to a multiple of `groups`.
        downsamplings: Times the stem halves the image, 0 to 3.
        dropout: Probability of dropping a channel in f, one mask per solve.
        weight_norm: Weight normalisation in f's residual blocks and last mixing.
        groups: Groups of f's normalisation; half as many in its last one.
        post_affine: Scale and shift in f's last normalisation.
        inject: "first", the stem's map at the finest resolution; "all", at each of them, averaged and mixed.
        init_std: Standard deviation of initial weights of convolutions in stem, fusion and head. Those of f's blocks
            and last mixing are uniform within ±1/√fan-in.
        momentum: Of BatchNorm in stem and head; as published if None, 0.1 for classification, 0.01 for segmentation,
            which takes some hundred steps to forget its start.
        channels_last: Lay out images, states and weights with channels last, as convolutions in bf16 on a GPU like it.
        plan: How to solve and differentiate.
        eval_plan: The plan in eval mode; that of training if None.
    """

    task: str = "classification"
    num_classes: int = 10
    in_channels: int = 3
    channels: tuple[int, ...] = (24, 24)
    head_channels: tuple[int, ...] = (8, 16)
    final_channels: int | None = 200
    details: int = 0
    expansion: float = 5
    downsamplings: int = 0
    dropout: float = 0.0
    weight_norm: bool = True
    groups: int = 8
    post_affine: bool = False
    inject: str = "first"
    init_std: float = 0.01
    momentum: float | None = None
    channels_last: bool = False
    plan: Plan = published_plan(18, 20)
    eval_plan: Plan | None = None

    def __post_init__(self) -> None:
        for field in ("channels", "head_channels"):
            given = getattr(self, field)
            if not isinstance(given, tuple | list):
                raise TypeError(f"MDEQConfig: {field} must list a width for each resolution, (24, 24); got {given!r}.")
            object.__setattr__(self, field, tuple(given))
        if self.task not in TASKS:
            raise unknown_name("task of an MDEQ", self.task, TASKS)
        if self.inject not in INJECTIONS:
            raise unknown_name("injection of an MDEQ", self.inject, INJECTIONS)
        for field in ("num_classes", "in_channels", "groups"):
            require_count("MDEQConfig", field, getattr(self, field))
        for field in ("downsamplings", "details"):
            require_count("MDEQConfig", field, getattr(self, field), low=0)
        if self.downsamplings > MOST_DOWNSAMPLINGS:
            raise ValueError(
                f"MDEQConfig: downsamplings must be 0 to {MOST_DOWNSAMPLINGS}, got {self.downsamplings}; to shrink "
                "images further, use more resolutions."
            )
        require_number("MDEQConfig", "dropout", self.dropout, low=0.0, high=1.0)
        require_number("MDEQConfig", "expansion", self.expansion, low=0.0, open_low=True)
        require_number("MDEQConfig", "init_std", self.init_std, low=0.0, open_low=True)
        if self.momentum is not None:
            require_number("MDEQConfig", "momentum", self.momentum, low=0.0, high=1.0)
        self._check_widths()
        if not isinstance(self.plan, Plan):
            raise TypeError(f"MDEQConfig: plan must be a Plan(...), got {type(self.plan).__name__}.")

    def _check_widths(self) -> None:
        if not self.channels:
            raise ValueError("MDEQConfig: channels must name at least one resolution, got ().")
        for width in (*self.channels, *self.head_channels):
            require_count("MDEQConfig", "channels and head_channels", width)
        for width in self.channels:
            if width % self.groups:
                near = max(1, round(width / self.groups)) * self.groups
                raise ValueError(
                    f"MDEQConfig: channels must be multiples of groups={self.groups}; got {width}, nearest is {near}."
                )
        half = max(1, self.groups // 2)
        if len(self.channels) > 1 and any(width % half for width in self.channels):
            raise ValueError(
                f"MDEQConfig: after fusion there are half as many groups, {half}, of which channels must be multiples "
                f"too; got {self.channels} with groups={self.groups}. Use an even number of groups, e.g. "
                f"{self.groups - 1}."
            )
        if self.final_channels is not None:
            require_count("MDEQConfig", "final_channels", self.final_channels)
        if self.task == "segmentation":
            return
        if len(self.head_channels) != len(self.channels):
            raise ValueError(
                f"MDEQConfig: head_channels must have one entry per resolution, {len(self.channels)}; got "
                f"{self.head_channels}."
            )
        if self.final_channels is None:
            raise ValueError("MDEQConfig: final_channels must be given for classification, e.g. 200.")
        if self.details:
            raise ValueError(f"MDEQConfig: details are of the segmentation head, got {self.details}; use 0.")

    @property
    def norm_momentum(self) -> float:
        """Of BatchNorm, the published one if none was set."""
        published = 0.1 if self.task == "classification" else 0.01
        return published if self.momentum is None else self.momentum


class MDEQ(nn.Module):
    """An image model whose features are the joint equilibrium of several resolutions.

    Images may have any size. Their last rows and columns are repeated until every resolution has exactly half as many
    as the one before: a border that a model has not met in training spreads through all of an equilibrium. Scores of
    segmentation have the size of the images.

    Args:
        config: Settings.
    """

    def __init__(self, config: MDEQConfig) -> None:
        super().__init__()
        self.config = config
        channels, momentum = config.channels, config.norm_momentum
        # Small models overfit with one more layer in the stem.
        mix = config.downsamplings > 0 or len(channels) > 2
        self.stem = Stem(config.in_channels, channels[0], config.downsamplings, mix, momentum)
        self.injections = Injections(channels if config.inject == "all" else channels[:1], momentum)
        cell = MultiscaleCell(
            channels,
            expansion=config.expansion,
            groups=config.groups,
            dropout=config.dropout,
            weight_norm=config.weight_norm,
            post_affine=config.post_affine,
            init_std=config.init_std,
        )
        plan = config.plan
        self.deq = DEQ(cell, solver=plan.solver, adjoint=plan.adjoint, stop=plan.stop, eval_plan=config.eval_plan)
        initialise(self.stem, config.init_std)
        initialise(self.injections, config.init_std)
        self.head = _head(config)
        if config.channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def cell(self) -> MultiscaleCell:
        """The layer f."""
        return self.deq.cell  # type: ignore[return-value]

    def forward(self, images: Tensor, **options: Any) -> VisionOutput:
        """Scores of classes.

        Args:
            images: (N, in_channels, H, W).
            **options: Of the solve: `z0` (a tuple of states), `context`, `trace`, `collect`.
        """
        solution = self.deq(self.inject(images), **options)
        return self.answer(solution.value, images, solution)

    def inject(self, images: Tensor) -> States:
        """What f takes besides the state: the stem's map for the finest resolution, or for all of them."""
        expected = self.config.in_channels
        shaped = images.dim() == 4 and images.shape[1] == expected and min(images.shape[2:]) > 0
        if not shaped or not images.is_floating_point():
            raise ValueError(
                f"MDEQ: images must be floating point of shape (N, {expected}, H, W), got {images.dtype} of shape "
                f"{tuple(images.shape)}."
            )
        images = self._framed(images)
        if self.config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.injections(self.stem(images))

    def answer(self, states: States, images: Tensor, solution: Solution | None = None) -> VisionOutput:
        """The output from states, the equilibrium or others."""
        if self.config.task == "segmentation":
            scores = self.head(states, self._framed(images))[..., : images.shape[2], : images.shape[3]]
        else:
            scores = self.head(states, images)  # which are not looked at again
        return VisionOutput(scores, list(states), solution)

    def _framed(self, images: Tensor) -> Tensor:
        """Images with as many rows and columns more as all resolutions need to be halves of one another."""
        unit = 2 ** (self.config.downsamplings + len(self.config.channels) - 1)
        down, right = (-size % unit for size in images.shape[2:])
        return F.pad(images, (0, right, 0, down), mode="replicate") if down or right else images

    def explicit(self, depth: int, checkpoint: bool | int = False) -> "ExplicitMDEQ":
        """The weight-tied network of `depth` such layers from zero, with this model's parameters.

        Args:
            depth: Number of layers.
            checkpoint: Recompute activations in the backward pass, layer by layer (True) or so many layers at a time.
        """
        return ExplicitMDEQ(self, depth, checkpoint)

    @torch.no_grad()
    def transfer_from(self, other: "MDEQ") -> list[str]:
        """Take over stem and layer f of another MDEQ, trained for any task; the head stays as it is.

        Args:
            other: A model of the same channels, expansion, groups, weight norm and injection; its stem may halve images
                once where this one does twice.

        Returns:
            Names of the parameters and buffers taken, as in `state_dict`.
        """
        if not isinstance(other, MDEQ):
            raise TypeError(f"MDEQ.transfer_from takes an MDEQ, got {type(other).__name__}.")
        ours, theirs = ({k: v for k, v in m.state_dict().items() if not k.startswith("head.")} for m in (self, other))
        differences = [
            f"{name}: {_size(ours.get(name))} here, {_size(theirs.get(name))} there"
            for name in sorted(ours.keys() | theirs.keys())
            if _size(ours.get(name)) != _size(theirs.get(name))
        ]
        if differences:
            raise ValueError(
                f"MDEQ.transfer_from: {len(differences)} tensors of stem and f differ ({'; '.join(differences[:3])}, "
                f"...). Build this model with the settings of the other: {_differing(self.config, other.config)}."
            )
        if self.config.groups != other.config.groups:  # no tensor has it in its shape, yet it would be another f
            raise ValueError(
                f"MDEQ.transfer_from: f normalises {self.config.groups} groups here, {other.config.groups} there. "
                f"Build this model with groups={other.config.groups}."
            )
        for name, value in ours.items():
            value.copy_(theirs[name])
        return list(ours)


def _head(config: MDEQConfig) -> nn.Module:
    options = {"momentum": config.norm_momentum, "init_std": config.init_std}
    if config.task == "segmentation":
        final = config.final_channels or sum(config.channels)
        return SegmentationHead(
            config.channels,
            final,
            config.num_classes,
            in_channels=config.in_channels,
            details=config.details,
            **options,
        )
    assert config.final_channels is not None
    return ClassificationHead(
        config.channels, config.head_channels, config.final_channels, config.num_classes, **options
    )


def _size(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))


def _differing(ours: MDEQConfig, theirs: MDEQConfig) -> str:
    """The settings of another model that matter to stem and f and differ from ours."""
    names = ("in_channels", "channels", "expansion", "downsamplings", "weight_norm", "groups", "post_affine", "inject")
    return ", ".join(f"{n}={getattr(theirs, n)!r}" for n in names if getattr(ours, n) != getattr(theirs, n))


class ExplicitMDEQ(nn.Module):
    """A weight-tied network: the layer of an `MDEQ` iterated from zero, with ordinary backpropagation.

    Made by `MDEQ.explicit`; all parameters are those of `model`.
    """

    def __init__(self, model: MDEQ, depth: int, checkpoint: bool | int = False) -> None:
        super().__init__()
        require_count("explicit", "depth", depth)
        require_count("explicit", "checkpoint", int(checkpoint), low=0)
        self.model, self.depth, self.checkpoint = model, depth, int(checkpoint)

    def forward(self, images: Tensor) -> VisionOutput:
        """As `MDEQ.forward`; there is no solution."""
        model = self.model
        x = model.inject(images)
        scope, kind, autocast = SolveScope(), images.device.type, autocast_dtype(images.device.type)

        def advance(z: States, layers: int) -> States:
            # Entered here, so that layers recomputed in the backward pass see the same constants.
            with scope, reenter_autocast(kind, autocast):
                for _ in range(layers):
                    like = z
                    z = tuple(new.to(old.dtype) for new, old in zip(model.cell(z, x), like, strict=True))
            return z

        # The first layer makes the constants of the scope, which a recomputation must not do again.
        z = advance(model.cell.initial_state(x), 1)
        stride = self.checkpoint or self.depth
        for done in range(1, self.depth, stride):
            layers = min(stride, self.depth - done)
            if self.checkpoint and torch.is_grad_enabled():
                z = recompute(advance, z, layers, use_reentrant=False, preserve_rng_state=False)
            else:
                z = advance(z, layers)
        return model.answer(z, images)

    def extra_repr(self) -> str:
        return f"depth={self.depth}, checkpoint={self.checkpoint}"


# Presets


def _mdeq(defaults: dict[str, Any], overrides: dict[str, Any]) -> MDEQ:
    return MDEQ(settings(MDEQConfig, defaults, overrides))


_FOUR = {"channels": (32, 64, 128, 256), "head_channels": (14, 28, 56, 112), "final_channels": 1680}

_CIFAR_TINY = {"channels": (24, 24), "head_channels": (8, 16), "final_channels": 200, "dropout": 0.25}

_CIFAR_LARGE = {**_FOUR, "dropout": 0.3, "plan": published_plan(18, 20)}


@register_model
def mdeq_cifar_tiny(**overrides: Any) -> MDEQ:
    """CIFAR-10 without augmentation, two resolutions: 158.9 K parameters."""
    return _mdeq({**_CIFAR_TINY, "plan": published_plan(18, 20)}, overrides)


@register_model
def mdeq_cifar_large(**overrides: Any) -> MDEQ:
    """CIFAR-10, four resolutions: 11.10 M parameters."""
    return _mdeq(_CIFAR_LARGE, overrides)


@register_model
def mdeq_cifar_large_reg(**overrides: Any) -> MDEQ:
    """CIFAR-10 for training with a Jacobian penalty, few solver steps: 11.10 M parameters."""
    return _mdeq({**_CIFAR_LARGE, "dropout": 0.22, "plan": published_plan(8, 7)}, overrides)


def _imagenet(first: int, head: int, **changes: Any) -> dict[str, Any]:
    """Four resolutions, channels and head channels doubling from the finest on."""
    return {
        "num_classes": 1000,
        "channels": tuple(first << k for k in range(4)),
        "head_channels": tuple(head << k for k in range(4)),
        "final_channels": 2048,
        "downsamplings": 2,
        "post_affine": True,
        "plan": published_plan(26, 27, absolute=True),
        **changes,
    }


_REGULARISED = {"post_affine": False, "plan": published_plan(14, 14, absolute=True)}


@register_model
def mdeq_imagenet_small(**overrides: Any) -> MDEQ:
    """ImageNet: 16.81 M parameters."""
    return _mdeq(_imagenet(32, 24), overrides)


@register_model
def mdeq_imagenet_small_reg(**overrides: Any) -> MDEQ:
    """ImageNet, for training with a Jacobian penalty: 18.61 M parameters."""
    return _mdeq(_imagenet(32, 28, dropout=0.02, **_REGULARISED), overrides)


@register_model
def mdeq_imagenet_large(**overrides: Any) -> MDEQ:
    """ImageNet: 67.06 M parameters."""
    return _mdeq(_imagenet(80, 32), overrides)


@register_model
def mdeq_imagenet_large_reg(**overrides: Any) -> MDEQ:
    """ImageNet, for training with a Jacobian penalty: 67.06 M parameters."""
    return _mdeq(_imagenet(80, 32, **_REGULARISED), overrides)


@register_model
def mdeq_imagenet_xl(**overrides: Any) -> MDEQ:
    """ImageNet: 90.46 M parameters."""
    return _mdeq(_imagenet(88, 32, expansion=6), overrides)


@register_model
def mdeq_imagenet_xl_reg(**overrides: Any) -> MDEQ:
    """The XL model with the changes of the other regularised ones: 90.46 M parameters; not a published one."""
    return _mdeq(_imagenet(88, 32, expansion=6, **_REGULARISED), overrides)


def _cityscapes(first: int, dropout: float, **changes: Any) -> dict[str, Any]:
    return {
        "task": "segmentation",
        "num_classes": 19,
        "channels": tuple(first << k for k in range(4)),
        "head_channels": (),
        "final_channels": None,
        "downsamplings": 2,
        "dropout": dropout,
        "post_affine": True,
        "plan": published_plan(27, 30, absolute=True),
        **changes,
    }


@register_model
def mdeq_cityscapes_small(**overrides: Any) -> MDEQ:
    """Cityscapes, 19 classes: 8.97 M parameters; f is that of `mdeq_imagenet_small`."""
    return _mdeq(_cityscapes(32, 0.05), overrides)


@register_model
def mdeq_cityscapes_large(**overrides: Any) -> MDEQ:
    """Cityscapes, 19 classes: 55.96 M parameters; f is that of `mdeq_imagenet_large`."""
    return _mdeq(_cityscapes(80, 0.03), overrides)


@register_model
def mdeq_cityscapes_xl(**overrides: Any) -> MDEQ:
    """Cityscapes, 19 classes: 79.55 M parameters; f is that of `mdeq_imagenet_xl`."""
    return _mdeq(_cityscapes(88, 0.04, expansion=6), overrides)


def _quick_plan(steps: int) -> Plan:
    """Anderson both ways, to a relative residual of 1e-3."""
    stop = Stop(rtol=1e-3, max_steps=steps)
    return Plan(Anderson(), Implicit(solver=Anderson(), stop=stop), stop)


_CAMVID = {"expansion": 4, "plan": published_plan(18, 20)}


@register_model
def mdeq_camvid_small(**overrides: Any) -> MDEQ:
    """CamVid, 11 classes, 480 × 360: 7.4 M parameters."""
    return _mdeq(_cityscapes(32, 0.05, num_classes=11, momentum=0.1, **_CAMVID), overrides)


@register_model
def mdeq_tiny_imagenet_small(**overrides: Any) -> MDEQ:
    """Tiny-ImageNet, 200 classes, 64 × 64: a classifier whose stem and f `mdeq_camvid_small` can take over."""
    defaults = _imagenet(32, 24, num_classes=200, final_channels=1024, downsamplings=1, dropout=0.1, **_CAMVID)
    return _mdeq(defaults, overrides)


@register_model
def mdeq_digits(**overrides: Any) -> MDEQ:
    """Digits of 8 × 8 to 28 × 28 pixels, two resolutions, for a CPU: 33.9 K parameters."""
    defaults = {
        "in_channels": 1,
        "channels": (16, 16),
        "head_channels": (4, 8),
        "final_channels": 64,
        "expansion": 2,
        "groups": 4,
        "plan": _quick_plan(20),
    }
    return _mdeq(defaults, overrides)


@register_model
def mdeq_shapes(**overrides: Any) -> MDEQ:
    """Segmentation of small images, three resolutions, for a CPU: 58.8 K parameters."""
    defaults = {
        "task": "segmentation",
        "num_classes": 4,
        "channels": (16, 16, 24),
        "head_channels": (),
        "final_channels": 32,
        "expansion": 2,
        "groups": 4,
        "downsamplings": 1,
        "momentum": 0.1,
        "plan": _quick_plan(20),
    }
    return _mdeq(defaults, overrides)


@register_model
def single_stream_cifar_tiny(**overrides: Any) -> MDEQ:
    """One resolution with the parameters of `mdeq_cifar_tiny`, by a wider block: 159.6 K."""
    one = {"channels": (24,), "head_channels": (8,), "expansion": 13.6}
    return _mdeq({**_CIFAR_TINY, **one, "plan": published_plan(18, 20)}, overrides)


@register_model
def single_stream_cifar_large(**overrides: Any) -> MDEQ:
    """One resolution with the parameters of `mdeq_cifar_large`: 11.1 M. Every one of them acts on all pixels."""
    return _mdeq({**_CIFAR_LARGE, "channels": (256,), "head_channels": (112,), "expansion": 8}, overrides)


@register_model
def single_stream_digits(**overrides: Any) -> MDEQ:
    """One resolution with the parameters of `mdeq_digits`: 33.8 K."""
    defaults = {
        "in_channels": 1,
        "channels": (16,),
        "head_channels": (8,),
        "final_channels": 64,
        "expansion": 5.75,
        "groups": 4,
        "plan": _quick_plan(20),
    }
    return _mdeq(defaults, overrides)
