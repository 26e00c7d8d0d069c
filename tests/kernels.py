"""Kernels in tests: on a GPU where there is one, else on the CPU by Triton's interpreter."""

import dataclasses
import os
import sys

import pytest
import torch

import equipoise as eq
from equipoise.ops import Standing

BACKENDS = ("naive", "triton")
FIXED = eq.Stop(rtol=0, max_steps=100)

# Sizes of residuals, one after another, that each of the driver's rules has something to say about.
SCRIPTS = {
    "plateau": (eq.Stop(rtol=1e-6, plateau=3), [1.0, 0.5, 0.6, 0.6, 0.6, 0.6]),
    "diverging plateau": (eq.Stop(rtol=1e-6, plateau=3), [1.0, 20.0, 30.0, 40.0, 40.0]),
    "diverged": (eq.Stop(rtol=1e-6, diverge=5.0), [1.0, 2.0, 9.0, 1.0]),
    "converged": (eq.Stop(rtol=1e-2, norm="rms"), [1.0, 0.5, 1e-3, 1.0]),
    "absolute": (eq.Stop(rtol=0, atol=1e-2, norm="rms"), [1.0, 0.5, 1e-3, 1.0]),
    "last": (eq.Stop(rtol=1e-2, select="last"), [1.0, 0.5, 1e-3, 1.0]),
    "floor": (eq.Stop(rtol=1e-30), [1.0, 1e-6, 2e-6, 2e-6, 2e-6, 2e-6, 2e-6, 2e-6]),
    "fixed": (FIXED, [1.0, torch.nan, 0.5, 0.7]),
}

# NumPy, under the interpreter, says what the kernels handle: 0/0 of a step that does not exist yet, NaN rows.
quiet_interpreter = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


def kernel_device() -> str:
    """The device to test kernels on; skips the calling module where there is none.

    Triton decides at its import whether it interprets, so the variable must be set before anything imports it.
    """
    if torch.cuda.is_available():
        pytest.importorskip("triton")
        return "cuda"
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    language = pytest.importorskip("triton.language")
    if type(language.sum).__name__ != "InterpretedFunction":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1", allow_module_level=True)
    return "cpu"


def assert_same_standing(ours, theirs):
    """Kernel and twin have come to the same view of every system."""
    for field in dataclasses.fields(Standing):
        pair = getattr(ours, field.name), getattr(theirs, field.name)
        torch.testing.assert_close(*pair, rtol=1e-6, atol=0, equal_nan=True, msg=field.name)


def contraction(n, d, dtype, device, norm):
    """z ↦ tanh(W z + x) with ‖W‖ = `norm`, the same every time."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(d, d, generator=generator, dtype=torch.float64)
    w *= norm / torch.linalg.matrix_norm(w, 2)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    w, x = w.to(device, dtype), x.to(device, dtype)
    return lambda z: torch.tanh(z @ w.T + x)
