"""Kernels in tests: on a GPU where there is one, else on the CPU by Triton's interpreter."""

import os
import sys

import pytest
import torch

BACKENDS = ("naive", "triton")

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
