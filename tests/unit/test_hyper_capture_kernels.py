"""A recorded step of any learned solver: the rules by kernels and by their twins, and what the eager engine does."""

import pytest
import torch

import equipoise as eq
from equipoise.ops import Standing
from equipoise.solvers._hyper_step import LearnedMemory, learned_step
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter
from tests.unit.test_hyper_anderson import made, shaken

DEVICE = kernel_device()
pytestmark = quiet_interpreter

STOPS = {
    "fixed": eq.Stop(rtol=0, max_steps=8),
    "best": eq.Stop(rtol=3e-2, max_steps=8),
    "last": eq.Stop(rtol=3e-2, max_steps=8, select="last"),
}


def prepared(name, **settings):
    deq, x, solver = made(name, memory=3, source=None, **settings)
    deq, x, solver = deq.to(DEVICE), x.to(DEVICE), shaken(solver, 0.03).to(DEVICE)
    x = x * torch.linspace(0.1, 1.0, len(x), device=DEVICE).view(-1, *[1] * (x.dim() - 1))  # so that some end earlier
    problem = deq.problem(x)
    return deq, x, solver, problem, problem.start(deq.start(x))


@torch.no_grad()
def iterated(solver, problem, start, stop, backend):
    z = [leaf.clone() for leaf in start]
    memory, standing = LearnedMemory(solver, problem.spec, z), Standing.start(z)
    memory.begin()
    for k in range(stop.max_steps):
        if k % 2 == 0:  # pieces of two steps
            memory.resume(memory.phase(k))
        learned_step(z, problem.evaluate(z), memory, standing, stop=stop, backend=backend)
        if k % 2 == 1:
            memory.pause(ends=False)
    return z, standing


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks per system at test sizes."""
    from equipoise.ops.picard import triton as kernels

    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(kernels, "MOST_CHUNK", 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", ["local", "images", "any"])
def test_both_backends_follow_the_driver(small_blocks, name, stop, backend):
    deq, x, solver, problem, start = prepared(name)
    z, standing = iterated(solver, problem, start, STOPS[stop], backend)
    with torch.no_grad(), eq.override(deq, solver=solver, stop=STOPS[stop]):
        eager = deq(x)
    value = z if stop == "last" else standing.best
    for ours, theirs in zip(value, problem.start(eager.value), strict=True):
        assert (ours - theirs).abs().max() < 1e-5  # sums are made in another order
    if stop == "fixed":
        assert (standing.status < 0).all()
        return
    ended = standing.status >= 0
    assert torch.equal(ended, eager.stats.status == eq.Status.CONVERGED)
    assert ended.any()
    assert torch.equal(standing.steps[ended].long(), eager.stats.steps[ended])


@pytest.mark.parametrize("settings", [{}, {"weights": "corrected"}, {"weights": "newest"}, {"products": False}])
@pytest.mark.parametrize("name", ["local", "images", "any"])
def test_a_residual_that_is_given_is_the_one_that_is_found(name, settings):
    _, _, solver, problem, z = prepared(name, **settings)
    with torch.no_grad():
        given, found = solver.empty_state(z), solver.empty_state(z)
        for _ in range(5):
            fz = problem.evaluate(z)
            expected, given = solver.advance(problem.spec, z, fz, given, problem.residual(z, fz))
            z, found = solver.advance(problem.spec, z, fz, found)
            # One lies in a ring, the other does not: some processors round products otherwise for another alignment.
            for ours, theirs in zip(z, expected, strict=True):
                assert (ours - theirs).abs().max() <= 4 * torch.finfo(ours.dtype).eps * theirs.abs().max()
