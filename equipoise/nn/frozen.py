"""Models for inference alone: what depends on nothing but parameters is computed once, not at every call."""

import copy
from collections import Counter
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.nn.utils.fusion import fuse_conv_bn_eval

from equipoise._compat import autocast_dtype
from equipoise.nn.norm import remove_norm

Module = TypeVar("Module", bound=nn.Module)

_CONVOLUTIONS: dict[type[nn.Module], type[nn.Module]] = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d}


@torch.no_grad()
def frozen(model: Module) -> Module:
    """A copy of a model that does the same in eval mode with less work, and cannot be trained.

    Weights that weight or spectral norm makes are stored as they are, and BatchNorm that follows a convolution in an
    `nn.Sequential` becomes part of it; 1×1 convolutions of maps with channels last are products of matrices. Under
    autocast weights of convolutions and linear maps are stored in its dtype, in which they would be rounded at every
    call; such a copy is for use under the same autocast. Results differ by the rounding of folded weights.

    Args:
        model: A model; it stays as it is.

    Returns:
        The copy, in eval mode, its parameters without gradients. They are not those of the model: it does not follow
        when that is trained further.
    """
    twin = copy.deepcopy(model).eval()
    places = Counter(module for _, module in twin.named_modules(remove_duplicate=False))
    for module in list(twin.modules()):
        remove_norm(module)
    for module in list(twin.modules()):
        # One with a forward of its own may use what is between its parts.
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            _fold(module, places)
    parameter = next(twin.parameters(), None)
    dtype = None if parameter is None else autocast_dtype(parameter.device.type)
    if dtype is not None:
        _round(twin, dtype)
    for module in twin.modules():
        if type(module) is nn.Conv2d and _is_pointwise(module):
            module.__class__ = _Pointwise
    return twin.requires_grad_(False)


def _fold(layers: nn.Sequential, places: Counter[nn.Module]) -> None:
    """Take BatchNorm into the convolution before it, unless one of the two is used elsewhere too."""
    for index in range(len(layers) - 1):
        first, norm = layers[index], layers[index + 1]
        # Exact types: what is derived from them may compute something else.
        if _CONVOLUTIONS.get(type(first)) is not type(norm) or places[first] + places[norm] > 2:
            continue
        if norm.running_var is not None:
            layers[index], layers[index + 1] = fuse_conv_bn_eval(first, norm), nn.Identity()  # type: ignore[type-var,arg-type]


def _round(model: nn.Module, dtype: torch.dtype) -> None:
    """Store weights of convolutions and linear maps in a dtype, those that nothing else has a share in."""
    kinds = (nn.Linear, *_CONVOLUTIONS)
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    for parameter, modules in owners.items():
        if all(type(module) in kinds for module in modules):
            parameter.data = parameter.data.to(dtype)


class _Pointwise(nn.Conv2d):
    """A 1×1 convolution; where the channels of a pixel lie side by side, a product of matrices, which adds the bias."""

    ROWS = 8  # of weights, of which there must be a multiple: other products are slow on a GPU

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last):
            return super().forward(x)
        weight, bias, more = self.weight.flatten(1), self.bias, -self.out_channels % self.ROWS
        if more:  # at every call, so that parameters keep their shapes
            weight, bias = pad(weight, (0, 0, 0, more)), None if bias is None else pad(bias, (0, more))
        pixels = linear(x.permute(0, 2, 3, 1), weight, bias)  # (N, H, W, channels)
        return pixels.narrow(3, 0, self.out_channels).permute(0, 3, 1, 2)


def _is_pointwise(layer: nn.Conv2d) -> bool:
    settings = layer.kernel_size, layer.stride, layer.groups
    return settings == ((1, 1), (1, 1), 1) and layer.padding in ((0, 0), "valid", "same")
