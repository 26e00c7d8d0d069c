"""Products on devices are exact while tests run: results are compared with those of a CPU, or of another engine."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _exact_products():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
