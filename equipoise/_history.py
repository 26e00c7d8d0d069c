"""A ring, or a growing list, of past states, with the two products that solvers need."""

import torch
from torch import Tensor

from equipoise._leaves import sum_of
from equipoise._tree import Leaves

# Slots allocated together when the history has no fixed capacity: storage follows the steps taken.
GROWTH = 16


class History:
    """Past states, leaf by leaf; nothing is concatenated across leaves.

    Slots are stored slot-major, (slots, N, D_i), so that a new state is one contiguous copy; products see them as
    (N, slots, D_i), which BLAS takes without copying.

    Args:
        like: A state that says shapes, dtype and device.
        capacity: Slots of the ring; None to grow without bound.
        differentiable: Keep the states themselves instead of copying them into buffers, so that autograd can go
            through a solve.
    """

    def __init__(self, like: Leaves, capacity: int | None, differentiable: bool = False) -> None:
        self.capacity = capacity
        self.count = 0  # states pushed since the last clear
        self._like = [leaf.detach()[:0] for leaf in like]
        self._num_systems = like[0].shape[0]
        self._kept: list[Leaves] | None = [] if differentiable else None
        self._blocks: list[list[Tensor]] = [[] for _ in like]  # [leaf][block]: (slots, N, D_i)

    def __len__(self) -> int:
        return self.count if self.capacity is None else min(self.count, self.capacity)

    @property
    def newest(self) -> int:
        """The slot of the state pushed last."""
        return (self.count - 1) if self.capacity is None else (self.count - 1) % self.capacity

    def push(self, z: Leaves) -> int:
        """Store a state in the next slot, over the oldest one when the ring is full; return the slot."""
        self.count += 1
        slot = self.newest
        if self._kept is not None:
            self._kept[slot : slot + 1] = [z]
            return slot
        for place, leaf in zip(self._places(slot, z), z, strict=True):
            place.copy_(leaf)
        return slot

    def push_difference(self, a: Leaves, b: Leaves) -> tuple[int, Leaves]:
        """Store a − b; return the slot and the state stored."""
        if self._kept is not None:
            difference = [x - y for x, y in zip(a, b, strict=True)]
            return self.push(difference), difference
        self.count += 1
        slot = self.newest
        places = self._places(slot, a)
        for place, x, y in zip(places, a, b, strict=True):
            torch.sub(x, y, out=place)
        return slot, places

    def clear(self) -> None:
        """Forget all states, keep the storage."""
        self.count = 0
        if self._kept is not None:
            self._kept = []

    def dots(self, *states: Leaves) -> Tensor:
        """Inner products with every slot, (N, len(states), len(self))."""
        parts = []
        for i in range(len(self._like)):
            rows = states[0][i].unsqueeze(1) if len(states) == 1 else _side_by_side([z[i] for z in states])
            # (N, k, D) @ (N, D, slots): about ten times faster on CPU than slots-times-vector
            products = [torch.bmm(rows, block.permute(1, 2, 0)) for block in self._slots(i)]
            parts.append(products[0] if len(products) == 1 else torch.cat(products, dim=2))
        return sum_of(parts)

    def combine(self, weights: Tensor, onto: Leaves | None = None, scale: float = 1.0) -> Leaves:
        """`scale` times the weighted sums of the slots, weights (N, len(self)), added to `onto` if given."""
        combined = []
        for i, leaf in enumerate(self._like):
            row, first = (weights if weights.dtype == leaf.dtype else weights.to(leaf.dtype)).unsqueeze(1), 0
            total = None if onto is None else onto[i][:, None]
            if self._kept:  # term by term: autograd then holds the states themselves, not copies of them side by side
                shares = (row if scale == 1.0 else scale * row).unbind(2)
                terms = [share * z[i] for share, z in zip(shares, self._kept, strict=True)]
                combined.append(sum_of(terms if total is None else [total[:, 0], *terms]))
                continue
            for block in self._slots(i):
                share = row if block.shape[0] == row.shape[2] else row[:, :, first : first + block.shape[0]]
                if total is None and scale == 1.0:
                    total = torch.bmm(share, block.transpose(0, 1))
                else:
                    total = leaf.new_zeros(()) if total is None else total
                    total = torch.baddbmm(total, share, block.transpose(0, 1), alpha=scale)
                first += block.shape[0]
            combined.append(total[:, 0] if total is not None else leaf.new_zeros(self._num_systems, leaf.shape[1]))
        return combined

    def rows(self, index: Tensor) -> "History":
        """The history of a subset of systems."""
        chosen = History.__new__(History)
        chosen.capacity, chosen.count, chosen._like = self.capacity, self.count, self._like
        chosen._num_systems = len(index)
        chosen._kept = self._kept and [[leaf.index_select(0, index) for leaf in z] for z in self._kept]
        chosen._blocks = [[block.index_select(1, index) for block in blocks] for blocks in self._blocks]
        return chosen

    @property
    def nbytes(self) -> int:
        kept = [leaf for z in self._kept or [] for leaf in z]
        return sum(t.nbytes for t in (*kept, *(block for blocks in self._blocks for block in blocks)))

    def _places(self, slot: int, like: Leaves) -> Leaves:
        """Where a slot is stored; storage is allocated as it is needed."""
        block, place = (0, slot) if self.capacity is not None else divmod(slot, GROWTH)
        for blocks, leaf in zip(self._blocks, like, strict=True):
            if block == len(blocks):
                blocks.append(leaf.new_empty((self.capacity or GROWTH, *leaf.shape)))
        return [blocks[block][place] for blocks in self._blocks]

    def _slots(self, leaf: int) -> list[Tensor]:
        """Filled slots of one leaf as a list of (slots, N, D_i)."""
        if self._kept is not None:
            return [torch.stack([z[leaf] for z in self._kept])] if self._kept else []
        remaining, filled = len(self), []
        for block in self._blocks[leaf]:
            if remaining <= 0:
                break
            filled.append(block if remaining >= block.shape[0] else block[:remaining])
            remaining -= block.shape[0]
        return filled


def _side_by_side(states: list[Tensor]) -> Tensor:
    """(N, k, D) from k states (N, D)."""
    if torch.is_grad_enabled():
        return torch.stack(states, dim=1)
    # Several times faster on the CPU than `stack`, which interleaves short pieces.
    rows = states[0].new_empty((states[0].shape[0], len(states), states[0].shape[1]))
    for i, state in enumerate(states):
        rows.select(1, i).copy_(state)
    return rows
