"""Benchmarks on a CUDA device: every case at its smallest shape, and the counters of memory."""

import pytest
import torch
from torch import nn

from equipoise.bench import CASES, run_case
from equipoise.bench.models import SUBJECTS, Trainer
from equipoise.diagnostics.memory_peak import peak_of_step
from equipoise.solvers import Anderson

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 2**20
RIVALS = ("torchdeq", "optimistix", "torchdiffeq", "scipy")


def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_case_runs_on_the_device(case, tmp_path):
    rows = run_case(case, tmp_path, shapes=["tiny"], device="cuda", rounds=2)
    for row in rows:
        ours = [name for name in row.values if not any(rival in name for rival in RIVALS)]
        assert ours
        for candidate in ours:
            assert row.wrong(candidate) is None, (row.name, candidate, row.checks[candidate])


def test_the_peak_of_a_step_is_what_it_allocates():
    net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).to(device())
    x = torch.randn(4096, 1024, device=device())  # 16 MiB, as is every activation
    net(x).sum().backward()  # the first products of a process take memory for good
    net.zero_grad()
    peak = peak_of_step(lambda: net(x).square().sum().backward(), net.parameters(), device())
    weights = 4 * 4 * MIB
    assert (peak.parameters, peak.gradients, peak.held) == (weights, weights, 0)
    assert 4 * 16 * MIB <= peak.step <= 9 * 16 * MIB  # four activations, and what the backward pass has at a time
    assert peak.trained == peak.step + 2 * weights
    assert peak.reserved >= peak.step
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


def test_recordings_are_held_and_given_back():
    (subject, _) = SUBJECTS["tiny"]
    trainer = Trainer(subject, device(), False)
    trainer.deq.plan = trainer.plan(Anderson(), Anderson(), (6, 6))
    step = trainer.step(trainer.model, trainer.batch(trainer.model))
    eager = peak_of_step(step, trainer.model.parameters(), device())
    trainer.deq.engine = "captured"
    captured = peak_of_step(step, trainer.model.parameters(), device())
    assert not trainer.deq.capture.fallbacks
    assert captured.held > eager.held
    trainer.deq._capture = None
    trainer.deq.engine = "eager"
    again = peak_of_step(step, trainer.model.parameters(), device())
    assert again.held <= eager.held + MIB
