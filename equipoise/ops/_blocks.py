# mypy: disable-error-code="no-untyped-def"
"""Blocks of all leaves of a state in one launch, and sums over the blocks of a system without a launch of their own.

A launch is a program per block, the blocks of a system side by side and those of its leaves one after another. A
program finds its leaf by comparing, so that what it loads is addressed by arguments of the kernel, whose alignment is
known. The program of a system that stores its partial sums last adds them up, always in the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from equipoise._tree import Leaves

# Leaves in one launch: a kernel has the code of a block for each.
MOST_LEAVES = 4


@triton.jit
def arrives_last(arrived_ptr, row, num_blocks):
    """Whether the programs of all other blocks of a system have stored their sums; the count begins anew then."""
    tl.debug_barrier()  # one thread counts for all of a program
    last = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu") == num_blocks - 1
    if last:
        tl.store(arrived_ptr + row, 0)
    return last


@triton.jit
def copy_block(source_ptr, place_ptr, start, size, BLOCK: tl.constexpr):
    """Copy a block of a system's leaf of so many unknowns."""
    at = start + tl.arange(0, BLOCK)
    tl.store(place_ptr + at, tl.load(source_ptr + at, mask=at < size, other=0.0), mask=at < size)


@dataclass(frozen=True)
class Blocks:
    """How the leaves of a state are cut.

    Attributes:
        sizes: Unknowns of a system by leaf.
        firsts: The first block of each leaf, and the number of all.
        systems: How many.
    """

    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    systems: int

    @classmethod
    def of(cls, z: Leaves, block: int) -> "Blocks":
        """Blocks of so many unknowns for states like z."""
        sizes, firsts = tuple(leaf.shape[1] for leaf in z), [0]
        for size in sizes:
            firsts.append(firsts[-1] + triton.cdiv(size, block))
        return cls(sizes, tuple(firsts), z[0].shape[0])

    @property
    def total(self) -> int:
        return self.firsts[-1]

    def launches(self, **leaves: Sequence[Tensor]) -> Iterator[tuple[tuple[int], dict[str, Any]]]:
        """The grid and the arguments of each launch: one, if leaves are few.

        Args:
            **leaves: Tensors by leaf, (N, D_i) or rings (N, m, D_i); passed as `name_ptrs`, `name_rows` (strides of
                systems) and, of rings, `name_slots`.
        """
        for start in range(0, len(self.sizes), MOST_LEAVES):
            part = slice(start, start + MOST_LEAVES)
            firsts = self.firsts[start : start + MOST_LEAVES + 1]
            arguments: dict[str, Any] = {"sizes": self.sizes[part], "firsts": firsts, "num_rows": self.systems}
            for name, tensors in leaves.items():
                chosen = list(tensors)[part]
                arguments[f"{name}_ptrs"] = tuple(chosen)
                arguments[f"{name}_rows"] = tuple(tensor.stride(0) for tensor in chosen)
                if chosen[0].dim() == 3:
                    arguments[f"{name}_slots"] = tuple(tensor.stride(1) for tensor in chosen)
            yield (self.systems * (firsts[-1] - firsts[0]),), arguments
