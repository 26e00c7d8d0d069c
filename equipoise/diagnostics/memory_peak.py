"""The most memory that a training step takes on a CUDA device, recordings of the captured engine included."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a training step, measured by the allocator.

    Attributes:
        step: The peak of allocated memory during a step, over what was allocated before it: graph, solver history, and
            temporary tensors, those of the backward pass included.
        held: What stays allocated or set aside from step to step besides parameters, gradients and inputs: the
            buffers and the private memory of recordings, used at the moment or not.
        gradients: Gradients of the parameters.
        parameters: Parameters.
        reserved: The peak of what the allocator took from the device, everything included.
    """

    step: int
    held: int
    gradients: int
    parameters: int
    reserved: int

    @property
    def activations(self) -> int:
        """All that a step needs besides parameters and their gradients."""
        return self.step + self.held

    @property
    def trained(self) -> int:
        """The same with parameters and their gradients."""
        return self.activations + self.parameters + self.gradients


def peak_of_step(step: Callable[[], Any], parameters: Iterable[Tensor], device: torch.device) -> PeakMemory:
    """Measure a step that adds to the gradients of parameters; it is run three times.

    What earlier measurements left behind must be gone: delete what holds it before.

    Args:
        step: Forward and backward pass of a batch that exists already.
        parameters: Whose gradients it computes; these are made beforehand, and zero afterwards.
        device: A CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(f"peak_of_step: {device} has no counter of allocated memory; use memory_report there.")
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p)
    _use_libraries(device)
    before = _settled(device)
    for _ in range(2):  # the first one records what the second one replays
        step()
    after = _settled(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    measured = PeakMemory(
        step=torch.cuda.max_memory_allocated(device) - after[0],
        held=max(0, after[0] - before[0]) + max(0, after[1] - before[1]),
        gradients=sum(p.nbytes for p in trained),
        parameters=sum(p.nbytes for p in trained),
        reserved=torch.cuda.max_memory_reserved(device),
    )
    for p in trained:
        assert p.grad is not None
        p.grad.zero_()
    return measured


def _use_libraries(device: torch.device) -> None:
    """Have workspaces of libraries made: they come once per process, whoever is first."""
    square = torch.ones(64, 64, device=device)
    (square @ square).sum().item()


def _settled(device: torch.device) -> tuple[int, int]:
    """Bytes allocated, and bytes that private pools of graphs keep beyond that, once nothing is cached."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    idle = 0
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] == device.index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            idle += segment["total_size"] - segment["allocated_size"]
    return torch.cuda.memory_allocated(device), idle
