"""Second derivatives of fused operations where one argument is a function of another.

A DEQ-Transformer's scores by distance are one of the query. Derivatives through the twin must then be partial ones:
what comes by way of the other argument is added by whoever computed it.
"""

import pytest
import torch

from equipoise.ops import attend, gather_taps, group_norm, trellis_cell
from tests.kernels import kernel_device, quiet_interpreter

pytestmark = quiet_interpreter

MIX = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
CASES = {
    "attend": (
        lambda x, backend: attend(x, x.sin(), x.cos(), x @ MIX.to(x), scale=0.25, backend=backend),
        (1, 1, 3, 16),
    ),
    "trellis_cell": (lambda x, backend: trellis_cell(x, x[:, :1, :2].cos(), x.sin(), backend=backend)[0], (1, 4, 8)),
    "gather_taps": (lambda x, backend: gather_taps(x, x[:, :1].sin(), kernel_size=2, backend=backend), (2, 4, 8)),
    "group_norm": (lambda x, backend: group_norm(x, 2, plus=x.sin(), backend=backend), (2, 4, 3, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_arguments_may_depend_on_each_other(name):
    operation, shape = CASES[name]
    device = kernel_device()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    found = []
    for backend in ("naive", "triton"):
        (first,) = torch.autograd.grad(operation(x, backend).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4 * float(found[0].abs().max()))
