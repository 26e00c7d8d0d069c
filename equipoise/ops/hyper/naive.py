"""One step of a learned solver in plain PyTorch: what the kernels compute."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from equipoise import _leaves
from equipoise._tree import Leaves
from equipoise.ops.standing import Rules, Standing, judge, postponed, settle
from equipoise.solvers._hyper_nets import TAPS
from equipoise.solvers.hyper_anderson import MOST_DECADES, NEWEST_LOGIT

if TYPE_CHECKING:
    from equipoise.ops.hyper import HyperMemory, HyperParts, Pool


def step(
    z: Leaves,
    fz: Leaves,
    memory: "HyperMemory",
    standing: Standing,
    parts: "HyperParts",
    rules: Rules,
    out: Leaves | None,
) -> None:
    """See `hyper_step`; everything is written in place."""
    work = standing.residual.dtype
    fz = [leaf.to(work) for leaf in fz]
    g = _leaves.subtract(fz, [leaf.to(work) for leaf in z])
    running = torch.ones_like(standing.status, dtype=torch.bool) if rules.fixed else standing.status < 0
    count = int(standing.count)
    filled = min(count + 1, parts.memory)
    window = [(count + 1 - filled + i) % parts.memory for i in range(filled)]  # slots, the newest last
    actions = judge(_leaves.norm(g), _leaves.norm(fz), standing, rules)
    rows = running.nonzero()[:, 0]
    for ring, leaf in zip((*memory.images, *memory.residuals), (*fz, *g), strict=True):
        ring[rows, window[-1]] = leaf[rows].to(ring.dtype)
    images, residuals = (
        [_by_position(ring[:, window].to(work), parts.positions) for ring in rings]
        for rings in (memory.images, memory.residuals)
    )
    _remember_products(memory.gram, residuals, window, rows)
    gram = memory.gram[:, :, window][:, :, :, window]  # (N, T, k, k)
    inverse = gram.diagonal(dim1=2, dim2=3).clamp_min(torch.finfo(work).tiny).rsqrt()
    unknowns = sum(leaf.shape[1] for leaf in z) // parts.positions
    few = _compressed(g, parts) * (inverse[:, :, -1:] * math.sqrt(unknowns)).to(parts.inner.dtype)
    shares = torch.einsum("ntc,pcw->ntpw", few, parts.taps[:, : parts.compressed])
    memory.shares[rows, :, window[-1]] = shares[rows]
    told = _products_and_sizes(gram, inverse, parts.memory).to(parts.inner.dtype)
    added = memory.shares[:, :, window] + torch.einsum("ntkf,pfw->ntkpw", told, parts.taps[:, parts.compressed :])
    hidden = (parts.bias + _taken(added)).relu()  # (N, T, k, w)
    said = parts.last + _taken(torch.einsum("ntkw,opw->ntkpo", hidden, parts.out.unflatten(1, (TAPS, -1))))
    alpha = _normalised(said[..., 0].to(work), parts.weights)
    lengthening = said[:, :, -1, 1].to(work) * float(parts.mixing)
    memory.weights[rows] = pad(alpha, (parts.memory - filled, 0))[rows]
    memory.mixing[rows] = 1.0 + lengthening[rows]
    proposal = [torch.einsum("ntk,nktd->ntd", alpha, ring) for ring in images]
    if parts.mixing:
        shares = alpha * lengthening[:, :, None]
        proposal = [
            p + torch.einsum("ntk,nktd->ntd", shares, ring) for p, ring in zip(proposal, residuals, strict=True)
        ]
    if out is not None:
        actions = postponed(actions, standing)
    settle(out or z, [leaf.flatten(1) for leaf in proposal], actions, standing)


def _by_position(leaf: Tensor, positions: int) -> Tensor:
    """(N, k, T, d) from (N, k, D)."""
    return leaf.unflatten(2, (positions, leaf.shape[2] // positions))


def _remember_products(gram: Tensor, residuals: Leaves, window: list[int], rows: Tensor) -> None:
    """The inner products of the newest residual, last in `residuals`, with all of them; as stored."""
    products = _leaves.sum_of([torch.einsum("nktd,ntd->nkt", ring, ring[:, -1]) for ring in residuals])
    for slot, product in zip(window, products[rows].unbind(1), strict=True):
        gram[rows, :, slot, window[-1]] = product
        gram[rows, :, window[-1], slot] = product


def _compressed(g: Leaves, parts: "HyperParts") -> Tensor:
    """(N, T, c) the newest residual in few numbers."""
    if parts.local:
        sums = [leaf.unflatten(1, (parts.positions, leaf.shape[1] // parts.positions)) for leaf in g]
    else:
        sums = [pooled(leaf, pool)[:, None] for leaf, pool in zip(g, parts.pools, strict=True)]
    return torch.cat(sums, dim=2).to(parts.inner.dtype) @ parts.compression.mT


def pooled(g: Tensor, pool: "Pool") -> Tensor:
    """(N, channels) the sums of a leaf (N, D)."""
    n, d = g.shape
    if pool.signed:
        upper = (torch.arange(d, device=g.device) * 40_503) % 65_536 < 32_768  # as in `Sketch`
        g = torch.where(upper, g, -g)
    g = pad(g, (0, max(0, pool.channels * pool.count - d)))
    terms = g.as_strided((n, pool.channels, pool.count), (g.stride(0), pool.stride, pool.pace), pool.offset)
    return terms.sum(2) * pool.scale


def _products_and_sizes(gram: Tensor, inverse: Tensor, memory: int) -> Tensor:
    """(N, T, k, memory + 1) what the network is told of each step besides its few numbers; all of it relative."""
    products = pad(gram * inverse[..., :, None] * inverse[..., None, :], (memory - gram.shape[3], 0))
    sizes = inverse.log10()
    sizes = (sizes[:, :, -1:] - sizes).clamp(-MOST_DECADES, MOST_DECADES)
    return torch.cat([products, sizes[..., None]], dim=3)


def _taken(steps: Tensor) -> Tensor:
    """(N, T, k, w) sums over taps of (N, T, k, 3, w): of the step before, the step itself, the next one."""
    k = steps.shape[2]
    padded = pad(steps, (0, 0, 0, 0, TAPS // 2, TAPS // 2))
    return _leaves.sum_of([padded[:, :, tap : tap + k, tap] for tap in range(TAPS)])


def _normalised(scores: Tensor, kind: str) -> Tensor:
    """Weights (N, T, k) of iterates, the newest last."""
    newest = scores.new_zeros(scores.shape[2])
    newest[-1] = 1.0
    if kind == "softmax":
        return (scores + NEWEST_LOGIT * newest).softmax(dim=2)
    return (scores if kind == "free" else scores - scores.mean(dim=2, keepdim=True)) + newest
