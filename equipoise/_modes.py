"""Modules in another mode for a while, and afterwards as they were."""

import contextlib
from collections.abc import Iterator

from torch import nn

from equipoise._module import deqs_in


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and afterwards as they were."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextlib.contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """All modules in training mode, but for some; afterwards as they were.

    Those with buffers would change these. Plain dropout in a cell differs from one evaluation of f to the next: there
    would be no equilibrium to find.
    """
    with evaluating(model):
        for module in model.modules():
            module.training = not any(buffer is not None for buffer in module._buffers.values())
        for module in (module for deq in deqs_in(model) for module in deq.cell.modules()):
            module.training = module.training and not isinstance(module, nn.modules.dropout._DropoutNd)
        yield


@contextlib.contextmanager
def held(model: nn.Module, apart_from: nn.Module) -> Iterator[None]:
    """Parameters of the model want no gradient meanwhile, so that graphs hold less.

    Those of another module, which may be a part of it, are left as they are; if none of them wants one, all do.
    """
    wanting = [parameter for parameter in apart_from.parameters() if parameter.requires_grad]
    own = {id(parameter) for parameter in wanting or apart_from.parameters()}
    parameters = {id(parameter): parameter for module in (model, apart_from) for parameter in module.parameters()}
    changed = [parameter for key, parameter in parameters.items() if parameter.requires_grad != (key in own)]
    try:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
