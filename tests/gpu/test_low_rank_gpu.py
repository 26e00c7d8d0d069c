"""`low_rank_step` on a CUDA device: the twin's results at full size, steps that can be replayed, and what a step costs.

    python -m tests.gpu.test_low_rank_gpu

prints microseconds per step beside those of `anderson_step`, of a learned start, and of other tiles.
"""

import copy
import itertools

import pytest
import torch

import equipoise as eq
from equipoise._problem import Problem, StateSpec
from equipoise.ops import (
    AndersonMemory,
    LowRankMemory,
    LowRankParts,
    Standing,
    anderson_step,
    low_rank_step,
    picard_settle,
)
from equipoise.solvers import HyperAnderson, HyperConfig, hyper_solver_for
from tests.captured import recordings_of
from tests.gpu.devices import waiting_is_an_error
from tests.gpu.test_hyper_gpu import Sequence, close, solved
from tests.gpu.test_hyper_step_gpu import SHAPES, error, microseconds, replayable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FIXED = eq.Stop(rtol=0, max_steps=1000)
TOLERANCE = eq.Stop(rtol=1e-3, max_steps=100)
FORM = {"weights": "newest", "mixing": False}


class Solve:
    """Steps of a solver with weights as after some fitting, towards the root of z ↦ x + sin(z)/2."""

    def __init__(self, n, positions, features, rank, reach=3):
        torch.manual_seed(0)
        sizes = features if isinstance(features, tuple) else (features,)
        config = HyperConfig("sequence", sizes, **FORM, rank=rank, reach=reach)
        self.solver = HyperAnderson(config).cuda().requires_grad_(False)
        up = self.solver.correction.up.weight
        up.copy_(0.3 / reach / rank**0.5 * torch.randn_like(up))  # a map of norm below 1, so that solves converge
        self.state = tuple(torch.randn(n, positions, size, device="cuda") for size in sizes)
        self.spec = StateSpec.of(self.state)
        self.x = [leaf.contiguous() for leaf in self.spec.flatten(self.state)]
        self.begin()

    def begin(self):
        self.parts = LowRankParts.of(self.solver, self.spec)
        self.z = [torch.zeros_like(leaf) for leaf in self.x]
        self.memory = LowRankMemory.empty(self.z, self.parts)
        self.standing = Standing.start(self.z)
        return self

    def image(self):
        return [x + 0.5 * torch.sin(z) for x, z in zip(self.x, self.z, strict=True)]

    def step(self, fz=None, backend="auto", stop=FIXED, out=None):
        fz = self.image() if fz is None else fz
        options = {"stop": stop, "floor": 1e-6, "out": out, "backend": backend}
        low_rank_step(self.z, fz, self.memory, self.standing, self.parts, **options)

    def copied(self):
        same = copy.copy(self)
        same.z = [leaf.clone() for leaf in self.z]
        same.memory, same.standing = copy.deepcopy(self.memory), copy.deepcopy(self.standing)
        return same

    def widened(self):
        """A copy in float64, for the twin."""
        wide = self.copied()
        wide.solver = copy.deepcopy(self.solver).double()
        wide.parts = LowRankParts.of(wide.solver, self.spec)
        wide.z = [leaf.double() for leaf in self.z]
        wide.memory.few = wide.memory.few.double()
        wide.standing.best = [leaf.double() for leaf in wide.standing.best]
        for name in ("residual", "latest", "limit"):
            setattr(wide.standing, name, getattr(wide.standing, name).double())
        return wide


CASES = {
    "wide": lambda: Solve(12, 70, 1400, 64),
    "few tiles": lambda: Solve(12, 70, 256, 64),
    "odd": lambda: Solve(40, 40, 1001, 27),
    "narrow": lambda: Solve(3, 420, 32, 4, reach=1),
    "one position": lambda: Solve(5, 1, 50, 20),
    "leaves": lambda: Solve(3, 33, (400, 30), 20, reach=2),
    "largest": lambda: Solve(6, 90, 704, 128, reach=8),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_right_of_the_twin_and_can_be_replayed(name):
    """In one test, so that only one process has to compile the kernels."""
    assert_steps_of_the_twin(CASES[name]())
    assert_replays(CASES[name], FIXED)


def assert_steps_of_the_twin(solve):
    """Against float64, from the kernels' own state; the same bits when done again.

    What is added has the digits of tf32, a thousandth of itself; the rest of a step is exact.
    """
    for _ in range(4):
        twin, again = solve.widened(), solve.copied()
        fz = solve.image()
        solve.step(fz)
        again.step(fz)
        twin.step([leaf.double() for leaf in fz], "naive")
        added = [(z - leaf.double()) for z, leaf in zip(solve.z, fz, strict=True)]
        truth = [(z - leaf.double()) for z, leaf in zip(twin.z, fz, strict=True)]
        # Rounding of z itself to float32 is the floor of what can be told about a small addition.
        rounding = 1e-7 * torch.cat(solve.z, dim=1).norm() / torch.cat(truth, dim=1).norm()
        assert error(added, truth) < 2e-3 + float(rounding)
        assert error([solve.memory.few.flatten(1)], [twin.memory.few.flatten(1)]) < 2e-3
        assert error(solve.standing.best, twin.standing.best) < 1e-6
        torch.testing.assert_close(solve.standing.latest.double(), twin.standing.latest, rtol=1e-5, atol=0)
        assert all(torch.equal(a, b) for a, b in zip(solve.z, again.z, strict=True))
        assert not solve.memory.arrived.any()
        assert not solve.standing.arrived.any()
        assert int(solve.standing.count) == int(twin.standing.count)


def assert_replays(make, stop):
    """One recorded step is every step; nothing waits for the device."""
    solve, recorded = make(), make()
    solve.step(stop=stop)
    solve.begin()
    graph = replayable(lambda: recorded.step(stop=stop))
    recorded.standing.restart([torch.zeros_like(leaf) for leaf in recorded.z])
    for leaf in recorded.z:
        leaf.zero_()
    with waiting_is_an_error():
        for _ in range(15):
            solve.step(stop=stop)
            graph.replay()
    assert int(recorded.standing.count) == 15
    assert all(torch.equal(a, b) for a, b in zip(solve.z, recorded.z, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(solve.standing.best, recorded.standing.best, strict=True))
    assert torch.equal(solve.standing.status, recorded.standing.status)
    assert solve.standing.residual.max() < 1e-2
    assert stop.fixed_budget or (solve.standing.status == int(eq.Status.CONVERGED)).any()


@pytest.mark.parametrize("name", ["odd", "leaves"])
def test_steps_to_a_tolerance_can_be_replayed(name):
    assert_replays(CASES[name], TOLERANCE)


@pytest.mark.parametrize("name", ["few tiles", "odd"])
def test_images_in_half_precision(name):
    """The same bits as with these images in float32."""
    solve = CASES[name]()
    for _ in range(3):
        other, fz = solve.copied(), [leaf.bfloat16() for leaf in solve.image()]
        solve.step(fz)
        other.step([leaf.float() for leaf in fz])
        assert all(torch.equal(a, b) for a, b in zip(solve.z, other.z, strict=True))


@pytest.mark.parametrize("name", ["wide", "leaves"])
def test_two_buffers_in_turns_are_as_good_as_one(name):
    """Residuals that fall and rise: the same iterates, and after settling the same best ones."""
    solve, other = CASES[name](), CASES[name]()
    there, directions = [torch.full_like(leaf, torch.nan) for leaf in other.z], solve.x
    for size in (1.0, 0.3, 0.5, 0.4, 0.2, 0.6):
        fz = [z + size * direction for z, direction in zip(solve.z, directions, strict=True)]
        solve.step(fz)
        other.step(fz, out=there)
        other.z, there = there, other.z
        assert all(torch.equal(a, b) for a, b in zip(solve.z, other.z, strict=True))
    picard_settle(there, there, other.standing)
    assert all(torch.equal(a, b) for a, b in zip(solve.standing.best, other.standing.best, strict=True))
    assert not other.standing.owed.any()


def test_the_same_bits_whoever_comes_last():
    """Programs arrive in any order, what they leave is added up in one: many steps from the same place are the same."""
    first = CASES["wide"]()
    fz = first.image()
    copies = [first.copied() for _ in range(20)]
    first.step(fz)
    for again in copies:
        again.step(fz)
        assert all(torch.equal(a, b) for a, b in zip(first.z, again.z, strict=True))
        assert torch.equal(first.standing.latest, again.standing.latest)
        assert not again.memory.arrived.any()


# Solves


def made(reach):
    """A DEQ, inputs, and a solver with weights as after some fitting."""
    torch.manual_seed(0)
    deq, x = eq.DEQ(Sequence(), engine="eager").requires_grad_(False).cuda(), torch.randn(4, 7, 12).cuda()
    sizes = {"hidden": 8, "rank": 5, "reach": reach, "budget": None}
    solver = hyper_solver_for(deq, x, **sizes, **FORM).requires_grad_(False)
    for parameter in solver.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return deq, x, solver


@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("reach", [1, 3])
def test_captured_solves_are_the_eager_ones(reach, select):
    """With a fixed budget, in more than one piece; replays do not wait, and follow the weights of the solver."""
    stop = eq.Stop(rtol=0, max_steps=40, select=select)
    deq, x, solver = made(reach)
    deq.engine = "captured"
    solved(deq, x, solver, stop)
    for parameter in solver.parameters():
        parameter.mul_(0.9)
    with waiting_is_an_error():
        captured = solved(deq, x, solver, stop).value
    memories = [recording.forward.loop.buffers.memory for recording in recordings_of(deq)]
    assert memories
    assert all(isinstance(memory, LowRankMemory) for memory in memories)
    deq.engine = "eager"
    assert close(captured, solved(deq, x, solver, stop).value, 1e-4)


def test_few_steps_of_captured_solves_are_the_eager_ones():
    """Before they converge: the digits of tf32 in what is added."""
    stop = eq.Stop(rtol=0, max_steps=3, select="last")
    deq, x, solver = made(3)
    eager = solved(deq, x, solver, stop).value
    deq.engine = "captured"
    assert close(solved(deq, x, solver, stop).value, eager, 2e-3)


def test_captured_solves_to_a_tolerance():
    stop = eq.Stop(rtol=1e-3, max_steps=40)
    deq, x, solver = made(3)
    eager = solved(deq, x, solver, stop)
    deq.engine = "captured"
    captured = solved(deq, x, solver, stop)
    assert close(captured.value, eager.value, 5e-3)
    assert (captured.stats.status == eager.stats.status).all()
    assert (captured.stats.steps - eager.stats.steps).abs().max() <= 1


# What a step costs


def cost(solve, half=False):
    """From one iterate to another, as solves of a fixed budget do it."""
    solve.begin()
    dtype = torch.bfloat16 if half else torch.float32
    turns = itertools.cycle([[torch.randn_like(leaf).to(dtype) for leaf in solve.z] for _ in range(4)])
    there = [torch.empty_like(leaf) for leaf in solve.z]
    return microseconds(lambda: solve.step(next(turns), out=there))


def cost_of_anderson(solve, half=False):
    z = [torch.zeros_like(leaf) for leaf in solve.z]
    dtype = torch.bfloat16 if half else None
    memory, standing = AndersonMemory.empty(z, 6, dtype), Standing.start(z)
    turns = itertools.cycle([[torch.randn_like(leaf).to(dtype or leaf.dtype) for leaf in z] for _ in range(4)])
    there = [torch.empty_like(leaf) for leaf in z]
    return microseconds(lambda: anderson_step(z, next(turns), memory, standing, stop=FIXED, out=there))


def start_of(n, positions, features, dtype, hidden=64):
    """A learned start from four times as many features, as that of DEQ-TrellisNet; what calls it, and its truth."""
    torch.manual_seed(0)
    config = HyperConfig("sequence", (features,), 4 * features, hidden=hidden, **FORM)
    solver = HyperAnderson(config).cuda().requires_grad_(False)
    solver.initialiser.out.weight.normal_(std=0.1)
    x = torch.randn(n, positions, 4 * features, device="cuda", dtype=dtype)
    state = torch.zeros(n, positions, features, device="cuda")
    problem = Problem(lambda z, x: z, StateSpec.of(state), (x,), in_dims=0)
    z = problem.start(state)
    truth = copy.deepcopy(solver.initialiser).double()(x.double(), [])[0].flatten(1)
    return lambda: solver.guess(problem, z)[0], truth


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_a_start_from_inputs_of_any_dtype(dtype, most):
    guess, truth = start_of(12, 70, 140, dtype)
    found = guess()
    assert found.dtype == torch.float32
    assert error([found], [truth]) < most


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_costs_less_than_one_of_anderson(shape):
    solve = Solve(*SHAPES[shape])
    assert cost(solve) < cost_of_anderson(solve)


def _table():
    """Nearly all of its time is compilation: one variant of one kernel each."""
    from equipoise.ops.low_rank import triton as kernels

    shapes = {name: SHAPES[name] for name in ("12x70x1400", "12x70x256")} | {"12x150x1400": (12, 150, 1400, 64)}
    tried = [
        {"PROGRAMS": 400},
        {"PROGRAMS": 1400},
        {"FEATURES": 128},
        {"FEWEST": 200},
        {"FEWEST": 700},
        {"WIDE": 128},
        {"MOVE_WARPS": 4},
        {"STAGES": 2},
        {"STAGES": 4},
    ]
    for name, shape in shapes.items():
        solve = Solve(*shape)
        print(f"{name:12} anderson {cost_of_anderson(solve):7.2f}  here {cost(solve):7.2f} µs", end="")
        print(f"   images in bfloat16: {cost_of_anderson(solve, half=True):7.2f} {cost(solve, half=True):7.2f}", end="")
        starts = [microseconds(start_of(*shape[:3], dtype)[0]) for dtype in (torch.float32, torch.bfloat16)]
        print(f"   a learned start from float32 {starts[0]:7.2f}, bfloat16 {starts[1]:7.2f}")
        for changed in tried:
            before = {key: getattr(kernels, key) for key in changed}
            for key, value in changed.items():
                setattr(kernels, key, value)
            try:
                told = f"{cost(solve):7.2f}"
            except Exception as problem:
                told = f"{type(problem).__name__}: {str(problem)[:80]}"
            for key, value in before.items():
                setattr(kernels, key, value)
            print(f"{'':12} {', '.join(f'{key} = {value}' for key, value in changed.items()):24} {told}", flush=True)


if __name__ == "__main__":
    _table()
