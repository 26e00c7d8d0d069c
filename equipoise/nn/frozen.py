"""Models for inference alone: what depends on nothing but parameters is computed once, not at every call."""

import copy
from collections import Counter
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from equipoise._compat import autocast_dtype
from equipoise.nn.norm import remove_norm

Module = TypeVar("Module", bound=nn.Module)

_CONVOLUTIONS: dict[type[nn.Module], type[nn.Module]] = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d}


@torch.no_grad()
def frozen(model: Module) -> Module:
    """A copy of a model that does the same in eval mode with less work, and cannot be trained.

    Weights that weight or spectral norm makes are stored as they are, and BatchNorm that follows a convolution in an
    `nn.Sequential` becomes part of it. Under autocast weights of convolutions and linear maps are stored in its dtype,
    in which they would be rounded at every call; such a copy is for use under the same autocast. Results differ by the
    rounding of folded weights.

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
        if isinstance(module, nn.Sequential):
            _fold(module, places)
    parameter = next(twin.parameters(), None)
    dtype = None if parameter is None else autocast_dtype(parameter.device.type)
    if dtype is not None:
        _round(twin, dtype)
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
