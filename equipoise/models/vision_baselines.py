"""Explicit image models to compare with: residual networks, U-Net, Neural ODEs, and networks of timm.

All are called as `model(images)` and return a `VisionOutput`, whose states are their last features.
"""

import importlib
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise._errors import require_count, require_number
from equipoise.models._multiscale import conv
from equipoise.models._sequence import settings
from equipoise.models.outputs import VisionOutput
from equipoise.models.registry import register_model
from equipoise.models.vision_heads import SegmentationHead, normed
from equipoise.ops.norm.naive import enlarged


def _optional(module: str, purpose: str) -> Any:
    """A package that is not installed with ours."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs {module}, which is not installed: pip install {module}", name=module
        ) from error


def _check_images(owner: str, images: Tensor, channels: int) -> None:
    if images.dim() != 4 or images.shape[1] != channels:
        raise ValueError(f"{owner}: images must be (N, {channels}, H, W), got shape {tuple(images.shape)}.")


# Residual networks


@dataclass(frozen=True)
class ResNetConfig:
    """Settings of `ResNet`.

    Attributes:
        num_classes: Classes of images.
        in_channels: Channels of images.
        width: Channels of the first stage; every stage has twice those of the one before and a quarter of the pixels.
        blocks: Residual blocks of each stage.
    """

    num_classes: int = 10
    in_channels: int = 3
    width: int = 64
    blocks: tuple[int, ...] = (2, 2, 2, 2)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        for field in ("num_classes", "in_channels", "width"):
            require_count("ResNetConfig", field, getattr(self, field))
        if not self.blocks:
            raise ValueError("ResNetConfig: blocks must name at least one stage, got ().")
        for count in self.blocks:
            require_count("ResNetConfig", "blocks", count)


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = normed(conv(inputs, outputs, 3, stride), outputs, 0.1)
        self.body = nn.Sequential(*first, *normed(conv(outputs, outputs, 3), outputs, 0.1)[:-1])
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*normed(conv(inputs, outputs, 1, stride), outputs, 0.1)[:-1])
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 as it is used on small images: one 3×3 convolution in place of the large stem, and a width to choose.

    Args:
        config: Settings.

    Reference: K. He, X. Zhang, S. Ren, J. Sun, Deep residual learning for image recognition, CVPR 2016.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.stem = nn.Sequential(*normed(conv(config.in_channels, width, 3), width, 0.1))
        self.stages = nn.ModuleList()
        for stage, count in enumerate(config.blocks):
            outputs = config.width << stage
            strides = [2 if stage else 1, *[1] * (count - 1)]
            widths = [width, *[outputs] * (count - 1)]
            pairs = zip(widths, strides, strict=True)
            self.stages.append(nn.Sequential(*(_BasicBlock(inputs, outputs, stride) for inputs, stride in pairs)))
            width = outputs
        self.classifier = nn.Linear(width, config.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> VisionOutput:
        """Scores (N, classes), and the maps of all stages."""
        _check_images("ResNet", images, self.config.in_channels)
        x, states = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            states.append(x)
        return VisionOutput(self.classifier(x.mean(dim=(2, 3))), states)


@register_model
def resnet_cifar_tiny(**overrides: Any) -> ResNet:
    """ResNet-18 of width 8: 176.4 K parameters."""
    return ResNet(settings(ResNetConfig, {"width": 8}, overrides))


@register_model
def resnet_cifar_large(**overrides: Any) -> ResNet:
    """ResNet-18 of width 64, for CIFAR-10: 11.17 M parameters."""
    return ResNet(settings(ResNetConfig, {"width": 64}, overrides))


# U-Net


@dataclass(frozen=True)
class UNetConfig:
    """Settings of `UNet`.

    Attributes:
        num_classes: Classes of pixels.
        in_channels: Channels of images.
        width: Channels at full resolution; every coarser level has twice those of the one before.
        levels: Resolutions.
    """

    num_classes: int = 11
    in_channels: int = 3
    width: int = 32
    levels: int = 5

    def __post_init__(self) -> None:
        for field in ("num_classes", "in_channels", "width", "levels"):
            require_count("UNetConfig", field, getattr(self, field))


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *normed(conv(inputs, outputs, 3), outputs, 0.1), *normed(conv(outputs, outputs, 3), outputs, 0.1)
    )


class UNet(nn.Module):
    """Segmentation by an encoder, a decoder, and copies from one to the other. Images may have any size.

    Args:
        config: Settings.

    Reference: O. Ronneberger, P. Fischer, T. Brox, U-Net: convolutional networks for biomedical image segmentation,
    MICCAI 2015; here with BatchNorm, padded convolutions and nearest-neighbour up-sampling.
    """

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.width << level for level in range(config.levels)]
        self.encoder = nn.ModuleList(_double(a, b) for a, b in zip([config.in_channels, *widths], widths, strict=False))
        pairs = list(itertools.pairwise(widths))
        self.narrow = nn.ModuleList(conv(coarse, fine, 1, bias=True) for fine, coarse in pairs)
        self.decoder = nn.ModuleList(_double(2 * fine, fine) for fine, _ in pairs)
        self.classifier = conv(widths[0], config.num_classes, 1, bias=True)

    def forward(self, images: Tensor) -> VisionOutput:
        """Scores (N, classes, H, W), and the decoder's maps."""
        _check_images("UNet", images, self.config.in_channels)
        x, kept = images, []
        for level, layers in enumerate(self.encoder):
            x = layers(F.max_pool2d(x, 2, ceil_mode=True) if level else x)
            kept.append(x)
        states = [x]
        for level in reversed(range(len(self.decoder))):
            larger = enlarged(self.narrow[level](x), 2, kept[level].shape[2:])
            x = self.decoder[level](torch.cat([kept[level], larger], dim=1))
            states.append(x)
        return VisionOutput(self.classifier(x), states[::-1])


@register_model
def unet_small(**overrides: Any) -> UNet:
    """U-Net of width 32 with five levels: 7.24 M parameters."""
    return UNet(settings(UNetConfig, {}, overrides))


# Neural ODEs


@dataclass(frozen=True)
class NeuralODEConfig:
    """Settings of `NeuralODE`.

    Attributes:
        num_classes: Classes of images.
        in_channels: Channels of images.
        image_size: Height and width of images: the last layer sees all pixels.
        filters: Channels inside the vector field.
        augmented: Channels of zeros that are added to images; 0 for a plain Neural ODE.
        rtol: Relative tolerance of the integration.
        atol: Absolute tolerance of the integration.
        method: Of torchdiffeq.
    """

    num_classes: int = 10
    in_channels: int = 3
    image_size: int = 32
    filters: int = 124
    augmented: int = 0
    rtol: float = 1e-3
    atol: float = 1e-3
    method: str = "dopri5"

    def __post_init__(self) -> None:
        for field in ("num_classes", "in_channels", "image_size", "filters"):
            require_count("NeuralODEConfig", field, getattr(self, field))
        require_count("NeuralODEConfig", "augmented", self.augmented, low=0)
        require_number("NeuralODEConfig", "rtol", self.rtol, low=0.0, open_low=True)
        require_number("NeuralODEConfig", "atol", self.atol, low=0.0, open_low=True)


class VectorField(nn.Module):
    """dx/dt: 1×1, 3×3 and 1×1 convolutions, each of them told the time as one more channel.

    Attributes:
        nfe: Evaluations since it was last set to zero, those of the adjoint included.
    """

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.nfe = 0
        self.convs = nn.ModuleList(
            [
                conv(channels + 1, filters, 1, bias=True),
                conv(filters + 1, filters, 3, bias=True),
                conv(filters + 1, channels, 1, bias=True),
            ]
        )

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        self.nfe += 1
        for k, layer in enumerate(self.convs):
            x = F.relu(x) if k else x
            x = layer(torch.cat([x, t.to(x.dtype).expand(x.shape[0], 1, *x.shape[2:])], dim=1))
        return x


class NeuralODE(nn.Module):
    """An image as the start of an ordinary differential equation, its end read by a linear layer.

    Gradients are those of the adjoint equation, so memory does not grow with the number of steps. Needs torchdiffeq.

    Args:
        config: Settings.

    Reference: R. T. Q. Chen et al., Neural ordinary differential equations, NeurIPS 2018; E. Dupont, A. Doucet, Y. W.
    Teh, Augmented neural ODEs, NeurIPS 2019, for the vector field and the added channels.
    """

    def __init__(self, config: NeuralODEConfig) -> None:
        super().__init__()
        self._torchdiffeq()  # so that it is missed now, not in the first step
        self.config = config
        channels = config.in_channels + config.augmented
        self.field = VectorField(channels, config.filters)
        self.classifier = nn.Linear(channels * config.image_size**2, config.num_classes)

    @staticmethod
    def _torchdiffeq() -> Any:
        return _optional("torchdiffeq", "NeuralODE")

    def forward(self, images: Tensor) -> VisionOutput:
        """Scores (N, classes), and the end of the trajectory."""
        config, side = self.config, self.config.image_size
        _check_images("NeuralODE", images, config.in_channels)
        if images.shape[2:] != (side, side):
            raise ValueError(f"NeuralODE: images must be {side} × {side} (image_size), got {tuple(images.shape[2:])}.")
        start = F.pad(images, (0, 0, 0, 0, 0, config.augmented))
        times = torch.tensor([0.0, 1.0], device=images.device, dtype=torch.float32)
        end = self._torchdiffeq().odeint_adjoint(
            self.field, start, times.to(start.dtype), rtol=config.rtol, atol=config.atol, method=config.method
        )[-1]
        return VisionOutput(self.classifier(end.flatten(1)), [end])


@register_model
def neural_ode_cifar(**overrides: Any) -> NeuralODE:
    """A Neural ODE on the pixels: 171.4 K parameters. Needs torchdiffeq."""
    return NeuralODE(settings(NeuralODEConfig, {}, overrides))


@register_model
def augmented_neural_ode_cifar(**overrides: Any) -> NeuralODE:
    """A Neural ODE on pixels and ten added channels: 170.1 K parameters. Needs torchdiffeq."""
    return NeuralODE(settings(NeuralODEConfig, {"filters": 62, "augmented": 10}, overrides))


# Networks of timm


class TimmClassifier(nn.Module):
    """A classifier of timm.

    Args:
        architecture: Its name there.
        num_classes: Classes of images.
        in_channels: Channels of images.
        **options: Passed on to `timm.create_model`, e.g. `pretrained=True`.
    """

    def __init__(self, architecture: str, num_classes: int = 1000, in_channels: int = 3, **options: Any) -> None:
        super().__init__()
        timm = _optional("timm", f"the classifier {architecture!r}")
        self.in_channels = in_channels
        self.network = timm.create_model(architecture, num_classes=num_classes, in_chans=in_channels, **options)

    def forward(self, images: Tensor) -> VisionOutput:
        """Scores (N, classes), and the map they are read from."""
        _check_images("TimmClassifier", images, self.in_channels)
        features = self.network.forward_features(images)
        return VisionOutput(self.network.forward_head(features), [features])


class TimmSegmenter(nn.Module):
    """Segmentation by a network of timm, all of whose maps are read by the head of an MDEQ. Images may have any size.

    Args:
        architecture: Its name there.
        num_classes: Classes of pixels.
        in_channels: Channels of images.
        final_channels: Of the head, before its last layer; those of all maps together if None.
        **options: Passed on to `timm.create_model`, e.g. `pretrained=True`, or `out_indices` for some of the maps.
    """

    def __init__(
        self,
        architecture: str,
        num_classes: int = 11,
        in_channels: int = 3,
        final_channels: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for field, value in (("num_classes", num_classes), ("in_channels", in_channels)):
            require_count("TimmSegmenter", field, value)
        if final_channels is not None:
            require_count("TimmSegmenter", "final_channels", final_channels)
        timm = _optional("timm", f"the segmenter {architecture!r}")
        self.in_channels = in_channels
        self.network = timm.create_model(architecture, features_only=True, in_chans=in_channels, **options)
        maps = self.network.feature_info
        channels = maps.channels()
        self.head = SegmentationHead(channels, final_channels or sum(channels), num_classes, momentum=0.1)
        self.multiple = maps.reduction(-1)  # of the coarsest map there is, whether or not it is read

    def forward(self, images: Tensor) -> VisionOutput:
        """Scores (N, classes, H, W), and the maps they are read from, which reach beyond images of odd sizes."""
        _check_images("TimmSegmenter", images, self.in_channels)
        height, width = images.shape[2:]
        below, right = -height % self.multiple, -width % self.multiple
        if below or right:
            # HRNet adds its maps up, twice enlarged: sizes that cannot be halved all the way do not fit. The border is
            # repeated, since one of zeros would be an edge to be seen.
            images = F.pad(images, (0, right, 0, below), mode="replicate")
        states = self.network(images)
        return VisionOutput(self.head(states, images)[:, :, :height, :width], states)


_STAGES = (1, 2, 3, 4)
"""Maps of the four stages, a quarter of the image's size and less: not that of the stem, of half its size."""


@register_model
def timm_classifier(architecture: str = "resnet50", **overrides: Any) -> TimmClassifier:
    """Any classifier of timm, by its name there. Needs timm."""
    return TimmClassifier(architecture, **overrides)


@register_model
def timm_resnet50(**overrides: Any) -> TimmClassifier:
    """ResNet-50 of timm: 25.6 M parameters. Needs timm."""
    return TimmClassifier("resnet50", **overrides)


@register_model
def timm_hrnet_w18_small(**overrides: Any) -> TimmClassifier:
    """HRNet-W18-Small of timm: 13.2 M parameters. Needs timm."""
    return TimmClassifier("hrnet_w18_small", **overrides)


@register_model
def timm_resnet50_masks(**overrides: Any) -> TimmSegmenter:
    """ResNet-50 of timm, its four stages read for masks: 25.5 M parameters. Needs timm."""
    return TimmSegmenter("resnet50", **{"out_indices": _STAGES, "final_channels": 512, **overrides})


@register_model
def timm_hrnet_w18_small_masks(**overrides: Any) -> TimmSegmenter:
    """HRNet-W18-Small of timm, its last maps read for masks: 1.54 M parameters. Needs timm.

    They are read as they are, as in the reference: timm by default widens them by a part of the classifier.

    Reference: J. Wang et al., Deep high-resolution representation learning for visual recognition, TPAMI 2020.
    """
    return TimmSegmenter("hrnet_w18_small", **{"out_indices": _STAGES, "feature_location": "", **overrides})
