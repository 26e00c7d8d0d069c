"""Operations without Triton, and which implementation is picked."""

import subprocess
import sys

import pytest
import torch

from equipoise.ops import _backend


def test_operations_work_where_triton_is_not_installed():
    """In a process of its own, in which importing Triton fails."""
    script = """
import sys
sys.modules["triton"] = None
import torch
import equipoise as eq
from equipoise.ops import AndersonMemory, Standing, anderson_step, trellis_cell
z = [torch.zeros(2, 3)]
memory, standing = AndersonMemory.empty(z, 2), Standing.start(z)
for _ in range(8):
    anderson_step(z, [0.5 * z[0] + 1], memory, standing, stop=eq.Stop(rtol=1e-5))
assert torch.allclose(standing.best[0], torch.full((2, 3), 2.0)), standing
assert trellis_cell(torch.zeros(1, 2, 8), torch.zeros(1, 1, 2))[0].shape == (1, 2, 2)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_triton_the_twin_is_picked_and_the_kernel_refused(monkeypatch):
    monkeypatch.setattr(_backend, "_has_triton", lambda: False)
    assert not _backend.use_kernel("op", "auto", [torch.zeros(2)])
    with pytest.raises(ValueError, match="op: backend='triton' cannot run here: Triton is not installed"):
        _backend.use_kernel("op", "triton", [torch.zeros(2)])


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, dtype=torch.float64), "float64, kernels take"),
        (torch.zeros(4, 4).T, "not contiguous"),
    ],
)
def test_what_a_kernel_cannot_take_goes_to_the_twin(monkeypatch, tensor, reason):
    monkeypatch.setattr(_backend, "_has_triton", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not _backend.use_kernel("op", "auto", [tensor])
    with pytest.raises(ValueError, match=reason):
        _backend.use_kernel("op", "triton", [tensor])


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(_backend, "_has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="a tensor is on cpu and TRITON_INTERPRET=1 is not set"):
        _backend.use_kernel("op", "triton", [torch.zeros(2)])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert _backend.use_kernel("op", "triton", [torch.zeros(2)])
    assert not _backend.use_kernel("op", "auto", [torch.zeros(2)])  # it is for tests only
