"""Which of an operation's two implementations runs."""

import functools
import importlib.util
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from equipoise._errors import unknown_name

BACKENDS = ("auto", "naive", "triton")

# Kernels compute in float32; for a wider dtype the twin is the only right answer.
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def use_kernel(operation: str, backend: str, tensors: Iterable[Tensor]) -> bool:
    """Whether the kernel is to run on these tensors; an error if it was asked for and cannot.

    On the CPU it runs only if asked for, and only by Triton's interpreter, which is for tests.
    """
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    tensors = list(tensors)
    if backend == "naive" or (backend == "auto" and not all(tensor.is_cuda for tensor in tensors)):
        return False
    obstacle = _obstacle(tensors)
    if backend == "triton" and obstacle is not None:
        raise ValueError(f"{operation}: backend='triton' cannot run here: {obstacle}. Use backend='auto' or 'naive'.")
    return obstacle is None


def _obstacle(tensors: list[Tensor]) -> str | None:
    if not _has_triton():
        return "Triton is not installed"
    for tensor in tensors:
        if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            return f"a tensor is on {tensor.device} and TRITON_INTERPRET=1 is not set"
        if tensor.dtype not in KERNEL_DTYPES:
            return f"a tensor is {tensor.dtype}, kernels take float32, float16 and bfloat16"
        if tensor.dim() > 0 and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return "the last axis of a tensor is not contiguous"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
