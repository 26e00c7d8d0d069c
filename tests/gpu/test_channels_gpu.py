"""`channels_follow` on a CUDA device: the twin's results at full size, in solves, and what a step costs.

    python -m tests.gpu.test_channels_gpu

prints microseconds per step beside those of `anderson_step`.
"""

import copy

import pytest
import torch

import equipoise as eq
from equipoise._problem import Problem, StateSpec
from equipoise.models import create_model
from equipoise.ops import AndersonMemory, ChannelsParts, Standing, anderson_step, channels_follow, picard_settle
from equipoise.solvers import HyperAnderson, hyper_solver_for
from tests.captured import recordings_of
from tests.gpu.devices import waiting_is_an_error
from tests.gpu.test_hyper_step_gpu import microseconds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FIXED = eq.Stop(rtol=0, max_steps=1000)
FORM = {"weights": "newest", "mixing": False, "rank": 1}
# Systems, and channels, height and width of each resolution.
SHAPES = {
    "tiny": (16, [(24, 32, 32), (24, 16, 16)]),
    "large": (16, [(32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4)]),
    "camvid": (4, [(32, 90, 120), (64, 45, 60), (128, 23, 30), (256, 12, 15)]),
    "odd": (3, [(5, 7, 3), (70, 3, 2)]),
}


class Solve:
    """Steps of a solver with matrices as after some fitting, towards the root of z ↦ x + sin(z)/2."""

    def __init__(self, name):
        torch.manual_seed(0)
        n, shapes = SHAPES[name]
        self.solver = HyperAnderson.for_images(tuple(shape[0] for shape in shapes), **FORM).cuda()
        for parameter in self.solver.requires_grad_(False).parameters():
            parameter.copy_(0.2 / len(parameter) ** 0.5 * torch.randn_like(parameter))
        state = tuple(
            torch.randn(n, *shape, device="cuda").contiguous(memory_format=torch.channels_last) for shape in shapes
        )
        self.spec = StateSpec.of(state)
        self.x = Problem(lambda z: z, self.spec).start(state)
        self.parts = ChannelsParts.of(self.solver, self.spec)

    def image(self, z, dtype):
        return [(x + 0.5 * torch.sin(leaf)).to(dtype) for x, leaf in zip(self.x, z, strict=True)]

    def run(self, backend, dtype, steps=6):
        z = before = older = [torch.zeros_like(leaf) for leaf in self.x]
        standing = Standing.start(z)
        for _ in range(steps):
            following = channels_follow(
                z, self.image(z, dtype), older, standing, self.parts, stop=FIXED, backend=backend
            )
            z, before, older = following, z, before
        picard_settle(before, older, standing, backend=backend)
        return z, standing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_kernel_and_twin(name, dtype):
    solve = Solve(name)
    (ours, here), (theirs, there) = solve.run("triton", dtype), solve.run("naive", dtype)
    for a, b in zip((*ours, *here.best), (*theirs, *there.best), strict=True):
        assert (a - b).norm() <= 2e-3 * b.norm()  # products in tf32; an image may round to the next bfloat16
    torch.testing.assert_close(here.residual, there.residual, rtol=5e-2, atol=1e-5)
    assert torch.equal(here.count, there.count)
    assert torch.equal(here.status, there.status)


@pytest.mark.parametrize("stop", [eq.Stop(rtol=0, max_steps=7, select="last"), eq.Stop(rtol=0, max_steps=40)])
def test_solves_of_an_mdeq(stop):
    """The captured engine and the eager one, with a learned start and learned steps; nothing is waited for."""
    torch.manual_seed(0)
    model = create_model("mdeq_cifar_tiny", channels_last=True).cuda().eval().requires_grad_(False)
    images = torch.randn(4, 3, 32, 32, device="cuda")
    x = model.inject(images)
    solver = hyper_solver_for(model.deq, x, base=model, budget=0.05, **FORM).requires_grad_(False)
    for parameter in solver.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    found = []
    for engine in ("captured", "eager"):
        deq = copy.deepcopy(model.deq)
        deq.engine, deq.plan = engine, deq.plan.replace(solver=solver, stop=stop)
        with torch.no_grad():
            deq(x)
            with waiting_is_an_error():
                found.append(deq(x))
    ours, theirs = found
    # f of an untrained model is no contraction, so rounding grows.
    for a, b in zip(ours.value, theirs.value, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()
    torch.testing.assert_close(ours.stats.residual, theirs.stats.residual, rtol=5e-2, atol=1e-3)


def test_the_recording_has_no_memory_beside_the_iterates():
    model = create_model("mdeq_cifar_tiny", channels_last=True).cuda().eval().requires_grad_(False)
    x = model.inject(torch.randn(4, 3, 32, 32, device="cuda"))
    deq = model.deq
    deq.engine = "captured"
    solver = hyper_solver_for(deq, x, base=model, **FORM).requires_grad_(False)
    deq.plan = deq.plan.replace(solver=solver, stop=eq.Stop(rtol=0, max_steps=5))
    with torch.no_grad():
        deq(x)
    assert all(recording.forward.loop.buffers.memory is None for recording in recordings_of(deq))


def main():
    for name in SHAPES:
        solve = Solve(name)
        z = [torch.zeros_like(leaf) for leaf in solve.x]
        fz, out = solve.image(z, torch.bfloat16), [torch.empty_like(leaf) for leaf in z]
        memory = AndersonMemory.empty(z, 6, torch.bfloat16, torch.bfloat16)
        standings = [Standing.start(z) for _ in range(2)]
        ours = microseconds(lambda: channels_follow(z, fz, z, standings[0], solve.parts, stop=FIXED))  # noqa: B023
        theirs = microseconds(lambda: anderson_step(z, fz, memory, standings[1], stop=FIXED, out=out))  # noqa: B023
        print(f"{name:8} channels_follow {ours:6.1f} us, anderson_step {theirs:6.1f} us")


if __name__ == "__main__":
    main()
