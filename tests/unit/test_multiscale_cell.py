"""The multiscale layer f under autocast: dtypes, gradients, transforms."""

import pytest
import torch

from equipoise._scope import SolveScope
from equipoise.models._multiscale import MultiscaleCell
from tests.gradients import normal, relative_error

SHAPES = [(2, 8, 5, 6), (2, 4, 3, 3)]


def parts(channels=(8, 4)):
    torch.manual_seed(0)
    cell = MultiscaleCell(channels, expansion=2, groups=2, dropout=0.3, init_std=0.3)
    z = tuple(normal(*shape, seed=k, dtype=torch.float32).requires_grad_() for k, shape in enumerate(SHAPES))
    return cell, z[: len(channels)], (normal(*SHAPES[0], seed=9, dtype=torch.float32),)


def autocast(enabled=True):
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


@pytest.mark.parametrize("channels", [(8, 4), (8,)], ids=str)
def test_autocast_narrows_what_goes_to_convolutions_and_the_result(channels):
    """Convolutions get bfloat16, and so does who asks for f; values and products to 5 % of float32's."""
    cell, z, x = parts(channels)
    taken = []
    for module in cell.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lambda module, given: taken.append(given[0].dtype))
    cotangents = [normal(*leaf.shape, seed=20 + k, dtype=torch.float32) for k, leaf in enumerate(z)]
    found, scope = [], SolveScope()
    for narrow in (False, True):
        with scope, autocast(narrow):
            value = cell(z, x)
        dtype = torch.bfloat16 if narrow else torch.float32
        assert {leaf.dtype for leaf in value} == set(taken) == {dtype}
        taken.clear()
        pulled = torch.autograd.grad(value, z, [leaf.to(dtype) for leaf in cotangents])
        assert [leaf.dtype for leaf in pulled] == [torch.float32] * len(z)
        found.append([*value, *pulled])
    assert relative_error(found[1], found[0]) <= 5e-2


@pytest.mark.parametrize("narrow", [False, True])
def test_transforms_of_the_layer(narrow):
    """Forward mode against a difference quotient in float32; vmap against single calls, to what bfloat16 costs."""
    cell, z, x = parts()
    cell.eval()
    z = tuple(leaf.detach() for leaf in z)
    moves = tuple(normal(*leaf.shape, seed=30 + k, dtype=torch.float32) for k, leaf in enumerate(z))
    with SolveScope():
        ahead, behind = (cell(tuple(a + s * b for a, b in zip(z, moves, strict=True)), x) for s in (1e-3, -1e-3))
        quotient = [(a - b) / 2e-3 for a, b in zip(ahead, behind, strict=True)]
        with autocast(narrow):
            value, tangent = torch.func.jvp(lambda *leaves: cell(leaves, x), z, moves)
            several = torch.vmap(lambda *leaves: cell(leaves, x))(*(torch.stack([leaf, 2 * leaf]) for leaf in z))
            single = cell(tuple(2 * leaf for leaf in z), x)
    assert relative_error(tangent, quotient) <= (1e-1 if narrow else 1e-2)
    bar = 5e-2 if narrow else 1e-5
    assert relative_error([leaf[1] for leaf in several], single) <= bar
    assert relative_error([leaf[0] for leaf in several], value) <= bar
