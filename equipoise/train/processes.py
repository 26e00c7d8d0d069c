"""The processes of a run, and what they tell each other.

Every process has the whole model, and does some shares of each batch. Nothing is exchanged inside a solve: solves of
different rows take different numbers of steps. All methods but the properties are to be called by all processes alike.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.train.statistics import running_statistics

if TYPE_CHECKING:
    from accelerate import Accelerator

BUCKET = 2**24  # numbers sent at once


class ProcessLostError(ConnectionError):
    """Another process of the run has ended."""


def part() -> None:
    """End the connection to the other processes, if there are any: left to the end of the program, it may abort it."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class Processes:
    """The processes that train together; often one.

    Args:
        accelerator: Has started them.
    """

    def __init__(self, accelerator: "Accelerator") -> None:
        self.accelerator = accelerator
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        kind = accelerator.distributed_type.name
        if launched > self.count or not (kind == "NO" or kind.startswith("MULTI_")):
            raise RuntimeError(
                f"{launched} processes were started, and {self.count} know each other (as {kind}); each trains a copy "
                "of the model, so start them with torchrun or accelerate launch without a plugin for sharding."
            )

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self.accelerator.process_index

    @property
    def count(self) -> int:
        """How many there are."""
        return self.accelerator.num_processes

    @property
    def main(self) -> bool:
        """Whether this is the first one, which writes files."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    def wait(self) -> None:
        """Go on when all are here."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process."""
        return flag if self.count == 1 else bool(self._add(torch.tensor([float(flag)], device=self.device)))

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in order; it travels by pickle, so tensors should be on the CPU."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with _reported():
            dist.all_gather_object(values, value)
        return values

    def add_gradients(self, model: nn.Module) -> None:
        """Give every parameter the sum of its gradients in all processes.

        A parameter that got none in this process takes part with zeros, one that got none anywhere keeps none: an
        optimiser would do something else with zeros.
        """
        if self.count == 1:
            return
        wanted = [p for p in model.parameters() if p.requires_grad]
        present = torch.tensor([float(p.grad is not None) for p in wanted], device=self.device)
        used = [p for p, count in zip(wanted, self._add(present).tolist(), strict=True) if count]
        for p in used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self._add_up([p.grad for p in used if p.grad is not None])

    @torch.no_grad()
    def average_statistics(self, model: nn.Module) -> None:
        """Give BatchNorm the mean of its running statistics in all processes, each of which saw rows of its own."""
        if self.count == 1:
            return
        self._add_up(list(running_statistics(model).values()), share=1 / self.count)

    def _add_up(self, tensors: list[Tensor], share: float = 1.0) -> None:
        """Give each tensor a share of its sum in all processes."""
        for bucket in _buckets(tensors):
            flat = self._add(torch.cat([tensor.flatten() for tensor in bucket])) * share
            for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def _add(self, tensor: Tensor) -> Tensor:
        with _reported():
            dist.all_reduce(tensor)
        return tensor


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in groups of one dtype and of a size that is worth a message."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or sum(t.numel() for t in bucket) + tensor.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what torch.distributed raises when a peer is gone
        raise ProcessLostError(f"another process of this run has ended; its own message says why ({error}).") from error
