"""Where the memory of a training step goes, by named methods."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._module import solutions_of
from equipoise._tree import tree_tensors


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one training step.

    Attributes:
        graph: Tensors that autograd keeps between forward and backward, parameters not counted (saved-tensor hooks).
        history: What solvers hold while they run, the larger of forward and backward (their own count).
        parameters: Parameters and buffers.
        gradients: Gradients of parameters after the step.
        optimizer: State of the optimiser, if one was given.
        peak: Peak of allocated memory over the step (CUDA allocator); None on the CPU, which has no such counter.
        reserve: Memory the allocator keeps beyond the peak; None on the CPU.
    """

    graph: int
    history: int
    parameters: int
    gradients: int
    optimizer: int
    peak: int | None
    reserve: int | None

    @property
    def activations(self) -> int:
        """Graph and solver history: what depth would cost."""
        return self.graph + self.history

    def __str__(self) -> str:
        parts = [
            ("f graph", self.graph),
            ("solver history", self.history),
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimiser", self.optimizer),
            ("peak allocated", self.peak),
            ("reserve", self.reserve),
        ]
        return ", ".join(f"{name} {value / 2**20:.2f} MiB" for name, value in parts if value is not None)


def memory_report(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> MemoryReport:
    """Measure one training step (forward, loss, backward) of `model`; gradients are left as they were.

    Args:
        model: Any module; solver history is counted for the DEQs inside.
        batch: Its input, or a tuple of its inputs.
        loss: Scalar loss of the model's output; by default the sum of squares of all its tensors.
        optimizer: Whose state to count.
    """
    inputs = batch if isinstance(batch, tuple) else (batch,)
    parameters = list(model.parameters())
    device = next((t.device for t in (*parameters, *tree_tensors(inputs))), torch.device("cpu"))
    on_cuda = device.type == "cuda"
    own = {t.untyped_storage().data_ptr() for t in (*parameters, *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        if on_cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), solutions_of(model) as found:
            value = (loss or _sum_of_squares)(model(*inputs))
        value.backward()
        gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        stats = [s for solution, _ in found for s in (solution.stats, solution.backward) if s is not None]
        return MemoryReport(
            graph=sum(kept.values()),
            history=max((s.solver_bytes for s in stats), default=0),
            parameters=sum(t.nbytes for t in (*parameters, *model.buffers())),
            gradients=gradients,
            optimizer=_optimizer_bytes(optimizer),
            peak=torch.cuda.max_memory_allocated(device) if on_cuda else None,
            reserve=torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device) if on_cuda else None,
        )
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def _optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    return sum(t.nbytes for state in optimizer.state.values() for t in tree_tensors(dict(state)))


def _sum_of_squares(output: Any) -> Tensor:
    tensors = [t for t in tree_tensors(output) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise ValueError("memory_report: the model's output carries no gradient; pass a loss.")
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()
