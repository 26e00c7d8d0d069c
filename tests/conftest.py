"""Every test starts from the same place: one thread, one seed, the default dtype, no warning yet said."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Triton decides at its import, which torch may cause, whether kernels run on the CPU by its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from equipoise.adjoints import base as adjoint_base

# One thread per worker: the tensors are tiny, and threads of several workers get in each other's way.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, and no example store left behind in the checkout.
settings.register_profile(
    "equipoise",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("equipoise")


@pytest.fixture(autouse=True)
def _same_start():
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    torch.manual_seed(0)
    # A failed adjoint solve warns once per f; which test gets the warning must not depend on the order of tests.
    adjoint_base._warned.clear()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
