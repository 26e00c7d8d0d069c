"""`take_last`: the kernel against its twin, and both where something is not finite."""

import pytest
import torch

from equipoise._solution import Status
from equipoise.ops import Standing, take_last
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter

DEVICE = kernel_device()
pytestmark = quiet_interpreter

# Unknowns of a system by leaf.
CASES = {"small": [5], "several blocks": [4099], "leaves": [7, 2048, 2049], "more than a launch": [3, 4, 5, 6, 7, 8]}


def example(name, dtype=torch.float32, n=4):
    torch.manual_seed(0)
    z = [torch.randn(n, size, device=DEVICE, dtype=dtype) for size in CASES[name]]
    standing = Standing.start([torch.randn_like(leaf) for leaf in z])
    standing.latest.copy_(torch.arange(n) + 1.0)
    standing.residual.copy_(torch.arange(n) + 11.0)
    return z, standing


def taken(z, standing, status, backend):
    value, residual = [torch.full_like(leaf, 7.0) for leaf in z], torch.full_like(standing.residual, 7.0)
    status = torch.tensor(status, device=DEVICE)
    take_last(z, value, residual, status, standing, backend=backend)
    return value, residual, status


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_finite_proposals_are_taken_and_best_iterates_elsewhere(name, backend):
    z, standing = example(name)
    z[-1][1, -1] = torch.nan
    z[0][2, 0] = -torch.inf
    ended = [int(Status.MAX_STEPS), int(Status.MAX_STEPS), int(Status.CONVERGED), int(Status.NONFINITE)]
    value, residual, status = taken(z, standing, ended, backend)
    for place, last, best in zip(value, z, standing.best, strict=True):
        assert torch.equal(place[0], last[0])
        assert torch.equal(place[1:], best[1:])
    assert residual.tolist() == [1.0, 12.0, 13.0, 14.0]
    assert status.tolist() == [int(Status.MAX_STEPS), *[int(Status.NONFINITE)] * 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_do_not_matter(dtype):
    z, standing = example("leaves", dtype)
    backend = "naive" if dtype == torch.float64 else "triton"
    value, _, status = taken(z, standing, [int(Status.MAX_STEPS)] * 4, backend)
    assert all(map(torch.equal, value, z))
    assert (status == int(Status.MAX_STEPS)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_no_system(backend):
    z, standing = example("small", n=0)
    value, _, _ = taken(z, standing, [], backend)
    assert value[0].shape == (0, 5)
