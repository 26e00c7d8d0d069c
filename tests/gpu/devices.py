"""What several tests on CUDA devices use."""

import itertools
import warnings
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error():
    """Meanwhile it is an error to wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def losses_in_training(model, tokens, autocast):
    """Losses of segments with memory and dropout, a step of AdamW after each."""
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    torch.manual_seed(1)
    memory, seen = None, []
    for segment, targets in itertools.pairwise(tokens):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output = model(segment, targets, memory)
        memory = output.memory
        optimiser.zero_grad(set_to_none=True)
        output.losses.mean().backward()
        optimiser.step()
        seen.append(output.losses.detach())
    return torch.stack(seen)
