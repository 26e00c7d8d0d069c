"""A learned first guess for maps of several resolutions, one kernel launch for each of them."""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise._tree import Leaves
from equipoise.ops._backend import use_kernel

if TYPE_CHECKING:
    from equipoise.solvers._hyper_nets import ImageInitialiser

# What a program of the kernels holds of a pixel's input, and of the features between.
MOST_SOURCE = 128
MOST_HIDDEN = 128


def image_start(
    network: "ImageInitialiser", x: Tensor, like: Leaves, *, keep: bool = False, backend: str = "auto"
) -> Leaves:
    """The maps that an `ImageInitialiser` makes of an input: its twin is the network itself.

    The network is a handful of convolutions by level with sums and ReLU between them, some twenty launches of next to
    no work. The kernel does all of a level for a tile of its pixels; products are of the input's dtype, sums and what
    lies between two levels are in float32, whatever autocast says. For inference: nothing is differentiated.

    Args:
        network: Made for these sizes.
        x: (N, C, H, W) the input, in any memory format.
        like: Maps (N, C_i, H_i, W_i) from the highest resolution to the lowest, whose sizes, dtypes and memory formats
            the results have.
        keep: Whether systems whose maps in `like` are not all zero keep these.
        backend: "auto", "naive" or "triton"; the network itself where gradients are wanted.

    Returns:
        New tensors.
    """
    fits = network.source <= MOST_SOURCE and network.hidden <= MOST_HIDDEN and not torch.is_grad_enabled()
    empty = [tensor.new_empty(0) for tensor in (x, next(network.parameters()), *like)]  # memory formats do not matter
    if not torch.compiler.is_compiling() and (fits or backend != "auto") and use_kernel("image_start", backend, empty):
        from equipoise.ops.start import triton

        return triton.start(network, x.detach(), like, keep)
    starts = [start.to(leaf.dtype) for start, leaf in zip(network(x, like), like, strict=True)]
    return kept(like, starts) if keep else starts


def kept(z: Leaves, starts: Leaves) -> Leaves:
    """The states z of systems for which they are not zero, starts of others."""
    warm = functools.reduce(torch.logical_or, [leaf.flatten(1).any(dim=1) for leaf in z])  # NaN is not zero
    return [torch.where(warm.view(-1, *[1] * (old.dim() - 1)), old, new) for new, old in zip(starts, z, strict=True)]
