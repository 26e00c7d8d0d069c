"""One step with a matrix over channels in plain PyTorch: what the kernel computes."""

from typing import TYPE_CHECKING

from equipoise import _leaves
from equipoise._tree import Leaves
from equipoise.ops.picard import naive as picard
from equipoise.ops.standing import Rules, Standing

if TYPE_CHECKING:
    from equipoise.ops.channels import ChannelsParts


def follow(z: Leaves, fz: Leaves, before: Leaves, standing: Standing, parts: "ChannelsParts", rules: Rules) -> Leaves:
    """See `channels_follow`."""
    work = standing.residual.dtype
    iterates, images = ([leaf.to(work) for leaf in leaves] for leaves in (z, fz))
    picard.follow(iterates, images, before, standing, rules)
    proposal = []
    for g, image, matrix in zip(_leaves.subtract(images, iterates), images, parts.matrices, strict=True):
        added = g.unflatten(1, (-1, len(matrix))) @ matrix.to(work).mT
        proposal.append(image + added.flatten(1))
    return [leaf.to(like.dtype) for leaf, like in zip(proposal, z, strict=True)]
