"""With channels last in memory an MDEQ computes the same, and stays in that layout."""

import pytest
import torch

from equipoise import Anderson, Implicit, Plan, Stop
from equipoise.models import create_model

FEW = Stop(rtol=0.0, max_steps=4)  # before training rounding grows with the number of steps


@pytest.mark.parametrize("name", ["mdeq_digits", "mdeq_shapes"])
def test_channels_last_changes_the_layout_alone(name):
    torch.manual_seed(0)
    plan = Plan(Anderson(), Implicit(solver=Anderson(), stop=FEW), FEW)
    first, last = (create_model(name, channels_last=layout, plan=plan).eval() for layout in (False, True))
    last.load_state_dict(first.state_dict())
    images = torch.randn(3, first.config.in_channels, 12, 9)
    outputs = [model(images) for model in (first, last)]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-4, atol=1e-5)
    assert all(state.is_contiguous(memory_format=torch.channels_last) for state in outputs[1].solution.value)
    assert last.deq.cell.blocks[0].narrow.weight.is_contiguous(memory_format=torch.channels_last)
    for output in outputs:
        output.logits.square().mean().backward()
    for ours, theirs in zip(last.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3 * float(theirs.grad.abs().max()))
