"""Which of an operation's two implementations runs."""

import functools
import importlib.util
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from equipoise._compat import inside_a_transform
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


def use_differentiable_kernel(operation: str, backend: str, tensors: Iterable[Tensor]) -> bool:
    """As `use_kernel`, for an operation that autograd goes through.

    Forward mode and torch.func get the twin unless the kernel is asked for, and inside torch.compile it is traced.
    """
    if torch.compiler.is_compiling() or (backend == "auto" and inside_a_transform()):
        return False
    return use_kernel(operation, backend, tensors)


def apart(tensors: Iterable[Tensor | None]) -> list[Any]:
    """The same tensors as views: none is a function of another, so that derivatives by them are partial ones."""
    return [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]


def through_twin(
    outputs: Iterable[Tensor],
    grads: Iterable[Tensor | None],
    inputs: Iterable[Tensor | None],
    needed: Iterable[bool],
    create_graph: bool = True,
) -> tuple[Tensor | None, ...]:
    """The backward pass of a kernel by its plain twin, so that it can be differentiated again.

    Args:
        outputs: What the twin makes of the inputs.
        grads: Their cotangents; not all None.
        inputs: Those of the operation, taken `apart` before the twin saw them: one may be a function of another.
        needed: Which of them want a cotangent.
        create_graph: Whether the cotangents are functions of all they depend on.

    Returns:
        The cotangents of the inputs, None where none is wanted.
    """
    needed = tuple(needed)
    sources = [tensor for tensor, need in zip(inputs, needed, strict=True) if need and tensor is not None]
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    values, cotangents = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(values, sources, cotangents, create_graph=create_graph, allow_unused=True))
    return tuple(next(found) if need else None for need in needed)


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


def is_compiler_error(error: BaseException) -> bool:
    """Whether Triton could not compile a kernel, or the device lacks what it takes; Triton need not be there."""
    return any(base.__module__ == "triton.errors" for base in type(error).__mro__)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
