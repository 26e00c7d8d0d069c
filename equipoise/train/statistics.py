"""Statistics of BatchNorm that belong to averaged weights.

Running statistics are those of the weights that training had. What averaged weights do to an image is something else:
where weights have turned, the mean of them is shorter than any, and so is what comes out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equipoise._modes import evaluating

RUNNING = ("running_mean", "running_var")
"""Names that normalisation layers have for them."""


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of a model, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in RUNNING}


@torch.no_grad()
def copy_statistics(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Give a model running statistics of another time."""
    for name, buffer in running_statistics(model).items():
        buffer.copy_(values[name])


@contextmanager
def restated(model: nn.Module, run: Callable[[], None]) -> Iterator[dict[str, Tensor]]:
    """The running statistics of the weights that a model has now; afterwards it has those it had.

    Args:
        model: Whose they are.
        run: Runs it on some batches, which count alike. Modules are in eval mode meanwhile, but for those that keep
            statistics.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    layers = [layer for layer in layers if layer.track_running_stats]
    kept = [(layer.momentum, {name: buffer.clone() for name, buffer in layer.named_buffers()}) for layer in layers]
    try:
        with evaluating(model), torch.no_grad():
            for layer in layers:
                layer.reset_running_stats()
                layer.momentum = None  # the mean of all batches
                layer.train()
            run()
        yield running_statistics(model)
    finally:
        with torch.no_grad():
            for layer, (momentum, buffers) in zip(layers, kept, strict=True):
                layer.momentum = momentum
                for name, buffer in layer.named_buffers():
                    buffer.copy_(buffers[name])
