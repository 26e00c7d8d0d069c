"""What touches torch's private modules, beside `_tree` and `_sharding`: one place to look after a torch upgrade."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def inside_functorch_transform() -> bool:
    """True inside torch.func.grad, vmap, jvp and their like."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_a_transform() -> bool:
    """True where a plain autograd function would not do: inside torch.func, or with dual numbers of forward mode."""
    return inside_functorch_transform() or torch.autograd.forward_ad._current_level >= 0


def keep_backward_buffers() -> AbstractContextManager[Any]:
    """Compile so that several VJPs may run on one graph.

    By default a compiled backward reuses ("donates") its saved buffers, and the second VJP of an adjoint solve raises.
    """
    import torch._functorch.config as config

    return config.patch(donated_buffer=False)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype autocast computes in on this device, or None when it is off."""
    # torch 2.11 cannot trace the first question, and compiled code is for devices that have autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    if available and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def reenter_autocast(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast as it was when `dtype` was read by `autocast_dtype`; a backward pass starts without it."""
    if autocast_dtype(device_type) == dtype:
        return nullcontext()
    if dtype is None:
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=dtype)


def leaves_reached(outputs: list[Tensor], except_for: list[Tensor]) -> Iterator[Tensor]:
    """The leaf tensors that a gradient of `outputs` would reach by a way that does not end at `except_for`."""
    for node in _nodes(outputs, {tensor.grad_fn for tensor in except_for}):
        if hasattr(node, "variable"):
            yield node.variable


def hides_leaves(outputs: list[Tensor]) -> bool:
    """Whether a re-entrant checkpoint is in the graph: tensors that it uses by themselves are no part of that."""
    return any(node.name() == "CheckpointFunctionBackward" for node in _nodes(outputs, set()))


def _nodes(outputs: list[Tensor], seen: set[Any]) -> Iterator[Any]:
    """The nodes of a graph, those apart that were seen."""
    stack = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions if following is not None)


def saves_tensors_elsewhere() -> bool:
    """Whether hooks such as `torch.autograd.graph.save_on_cpu` are in effect for what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def abandon_pool(device: torch.device, pool: Any) -> None:
    """Tell the allocator that a recording into this pool of memory is over, when it ended without telling."""
    torch._C._cuda_endAllocateToPool(device.index, pool)
    torch._C._cuda_releasePool(device.index, pool)


def backward_pass() -> int | None:
    """A number for the backward pass that this thread is working on; None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number
