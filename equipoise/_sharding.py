"""Cells whose parameters are sharded over ranks by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Ranks take different numbers of solver steps, so nothing may communicate inside a solve, forward or backward. FSDP2
communicates in hooks around each call of a module: they gather parameters before it, free them after it, gather them
again when a gradient reaches its output, and reduce their gradients when one has passed its input. Each vector-Jacobian
product of an adjoint solve would do so as well. Here a whole solve counts as one call of every sharded module of the
cell: the hooks run once around it, and evaluations of the cell inside do without. The gradients are those of one call,
and so is the communication: one gathering before the solve, one before the adjoint solve (if parameters were freed in
between), one reduction after it.

A model sharded above the DEQ, or at the DEQ itself, needs nothing of this; nor does DistributedDataParallel. A policy
of mixed precision for the cell alone should name an `output_dtype`, that of the state.

With `_compat` and `_tree` this is the only file that relies on private parts of torch: FSDP2 has no public way to say
where a module's forward begins and ends.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed
from torch import Tensor, nn

from equipoise._solution import Solution
from equipoise._tree import Tree, tree_map


def gathered(
    cell: nn.Module, solve: Callable[..., Solution], inputs: tuple[Any, ...], options: dict[str, Any]
) -> Solution:
    """`solve(*inputs, **options)`, with all parameters of the cell whole meanwhile, and no communication inside.

    Args:
        cell: The cell; itself or any part of it may be an FSDP2 module.
        solve: Runs the solve.
        inputs: Arguments through which gradients leave the solve.
        options: Keyword arguments; gradients may leave through them too.
    """
    modules = sharded_modules(cell)
    for module in modules:  # a module comes before its parts, as if it called them
        inputs, options = _begin(module, inputs, options)
    solution = solve(*inputs, **options)
    if modules or getattr(cell, "_is_fsdp_managed_module", False):
        # FSDP hooks are lost when a view is changed in place, so it warns of views, which values are.
        own = tree_map(_own, (solution.value, solution.collected))
        solution = dataclasses.replace(solution, value=own[0], collected=own[1])
    for module in reversed(modules):
        _end(module, (solution.value, solution.collected))
    return solution


def whole(cell: nn.Module, f: Callable[..., Tree]) -> Callable[..., Tree]:
    """f, which calls the cell, without the communication of the cell's hooks; f itself if there are none."""
    modules = sharded_modules(cell)
    return _Whole(modules, f) if modules else f


def sharded_modules(cell: nn.Module) -> list[Any]:
    """The modules of a cell that FSDP2 was applied to, one for each group of parameters.

    Raises:
        TypeError: If a part of the cell would communicate at each evaluation and cannot be kept from it.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing can be sharded
    alone = torch.distributed.get_world_size() == 1
    found: dict[int, Any] = {}
    for module in cell.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            found.setdefault(id(module._get_fsdp_state()), module)
        elif not alone:
            _refuse_wrapper(module, fsdp)
    return list(found.values())


def _refuse_wrapper(module: nn.Module, fsdp: Any) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        advice = "wrap the whole model, not the cell"
    elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        advice = "use fully_shard, or wrap the whole model, not the cell"
    elif isinstance(module, nn.SyncBatchNorm) and module.training:
        advice = "use a normalisation that does not couple samples, such as GroupNorm or LayerNorm"
    else:
        return
    raise TypeError(
        f"{type(module).__name__} inside the cell of a DEQ communicates at every evaluation of the cell, but ranks "
        f"take different numbers of solver steps and would wait for each other for ever; {advice}."
    )


class _Whole:
    """A callable that calls sharded modules as they are: no gathering, no freeing, no hooks in the graph."""

    def __init__(self, modules: list[Any], f: Callable[..., Tree]) -> None:
        self._modules = modules
        self.__wrapped__ = f

    def __call__(self, *arguments: Any) -> Tree:
        for module in self._modules:
            if not _is_whole(module._get_fsdp_state()):
                raise RuntimeError(
                    f"the parameters of the cell's {type(module).__name__} are sharded outside of a solve. To evaluate "
                    "the cell there (penalties, diagnostics), shard it with reshard_after_forward=False, call its "
                    "unshard() before and reshard() after, or apply fully_shard only to a module that does it all."
                )
        with _quiet(self._modules):
            return self.__wrapped__(*arguments)


def _is_whole(state: Any) -> bool:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions of torch have one at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return all(group.is_unsharded for group in groups)


@contextmanager
def _quiet(modules: list[Any]) -> Iterator[None]:
    """Make the hooks of sharded modules do nothing but cast.

    They are left to believe that a checkpointed forward is recomputed in the backward pass, when gathering and freeing
    are not theirs to do.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    states = [module._get_fsdp_state() for module in modules]
    before = [state._training_state for state in states]
    try:
        for state in states:
            state._training_state = TrainingState.PRE_BACKWARD
        yield
    finally:
        for state, training_state in zip(states, before, strict=True):
            state._training_state = training_state


@contextmanager
def _uncast(state: Any) -> Iterator[None]:
    """Leave dtypes alone: mixed precision concerns what the module computes, and is seen to at each evaluation."""
    policy = state._mp_policy
    state._mp_policy = dataclasses.replace(policy, cast_forward_inputs=False, output_dtype=None)
    try:
        yield
    finally:
        state._mp_policy = policy


def _begin(module: Any, inputs: Any, options: Any) -> tuple[Any, Any]:
    """Gather, and have gradients reduced once the backward pass has come through `inputs` and `options`."""
    state = module._get_fsdp_state()
    with _uncast(state):
        return state._pre_forward(module, inputs, options)


def _end(module: Any, outputs: Tree) -> None:
    """Free the parameters, if the module is to, and have them gathered when a gradient reaches `outputs`."""
    state = module._get_fsdp_state()
    with _uncast(state):
        state._post_forward(module, None, outputs)


def _own(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad and leaf._base is not None else leaf
