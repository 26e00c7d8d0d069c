"""`hyper_step` on a CUDA device: the twin's results at full size, steps that can be replayed, and what a step costs.

    python -m tests.gpu.test_hyper_step_gpu

prints microseconds per step beside those of `anderson_step`, and of other tiles.
"""

import copy
import itertools
import statistics

import pytest
import torch

import equipoise as eq
from equipoise._problem import StateSpec
from equipoise.ops import AndersonMemory, HyperMemory, HyperParts, Standing, anderson_step, hyper_step, picard_settle
from equipoise.solvers import HyperAnderson
from equipoise.solvers._hyper_config import HyperConfig
from tests.gpu.devices import waiting_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FIXED = eq.Stop(rtol=0, max_steps=1000)
TOLERANCE = eq.Stop(rtol=5e-2, max_steps=100)  # weights that do not add up to one end near a root, not at it
STEPS = 24
# batch, positions, features, inner sizes of the networks within 4 % of such a cell
SHAPES = {
    "12x70x1400": (12, 70, 1400, 64),
    "12x70x256": (12, 70, 256, 64),
    "32x420x32": (32, 420, 32, 4),
    "32x128x256": (32, 128, 256, 36),
    "15x150x416": (15, 150, 416, 64),
    "15x150x704": (15, 150, 704, 64),
    "56x150x704": (56, 150, 704, 64),
}
MAPS = [(32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4)]


def sequence(shape, **settings):
    n, positions, features, inner = shape
    config = HyperConfig("sequence", (features,), compressed=inner, width=inner, **settings)
    return Solve(config, [(n, positions, features)])


def images(n, maps=MAPS, memory_format=torch.contiguous_format, **settings):
    config = HyperConfig("images", tuple(size[0] for size in maps), **settings)
    return Solve(config, [(n, *size) for size in maps], memory_format)


class Solve:
    """Steps of a solver with weights as after some fitting, towards the root of z ↦ x + sin(z)/2."""

    def __init__(self, config, shapes, memory_format=torch.contiguous_format):
        torch.manual_seed(0)
        self.solver = HyperAnderson(config).cuda().requires_grad_(False)
        for name, parameter in self.solver.named_parameters():
            parameter.add_((0.003 if name.startswith("step.out") else 0.03) * torch.randn_like(parameter))
        self.state = tuple(torch.randn(shape, device="cuda").to(memory_format=memory_format) for shape in shapes)
        self.spec = StateSpec.of(self.state)
        self.x = [leaf.contiguous() for leaf in self.spec.flatten(self.state)]
        self.begin()

    def begin(self, residual_dtype=None, image_dtype=None):
        self.parts = HyperParts.of(self.solver, self.spec)
        self.z = [torch.zeros_like(leaf) for leaf in self.x]
        self.memory = HyperMemory.empty(self.z, self.parts, residual_dtype, image_dtype)
        self.standing = Standing.start(self.z)
        return self

    def image(self):
        return [x + 0.5 * torch.sin(z) for x, z in zip(self.x, self.z, strict=True)]

    def step(self, fz=None, backend="auto", stop=FIXED, out=None):
        fz = self.image() if fz is None else fz
        hyper_step(self.z, fz, self.memory, self.standing, self.parts, stop=stop, floor=1e-6, out=out, backend=backend)

    def copied(self):
        same = copy.copy(self)
        same.z = [leaf.clone() for leaf in self.z]
        same.memory, same.standing = copy.deepcopy(self.memory), copy.deepcopy(self.standing)
        return same

    def widened(self):
        """A copy in float64, for the twin."""
        wide = self.copied()
        wide.solver = copy.deepcopy(self.solver).double()
        wide.parts = HyperParts.of(wide.solver, self.spec)
        wide.z = [leaf.double() for leaf in self.z]
        for name in ("images", "residuals"):
            setattr(wide.memory, name, [ring.double() for ring in getattr(wide.memory, name)])
        for name in ("gram", "shares", "weights", "mixing"):
            setattr(wide.memory, name, getattr(wide.memory, name).double())
        wide.standing.best = [leaf.double() for leaf in wide.standing.best]
        for name in ("residual", "latest", "limit"):
            setattr(wide.standing, name, getattr(wide.standing, name).double())
        return wide


# Loops over remembered steps are unrolled, so kernels of many take long to compile: one case of each way through them
# has the memory that solvers have by default.
CASES = {
    "local": lambda: sequence((3, 150, 704, 64), local=True),
    "local, in turns": lambda: sequence((12, 70, 1400, 64), local=True),
    "local, odd": lambda: sequence((40, 40, 1001, 24), local=True, memory=3),
    "local, memory of one": lambda: sequence((3, 37, 260, 20), local=True, memory=1),
    "local, softmax": lambda: sequence((3, 37, 50, 20), local=True, weights="softmax", memory=3),
    "local, narrow": lambda: sequence((3, 420, 32, 4), local=True, memory=2),
    "local, leaves": lambda: Solve(
        HyperConfig("sequence", (400, 30), local=True, memory=2), [(3, 33, 400), (3, 33, 30)]
    ),
    "last": lambda: sequence((3, 150, 704, 64), weights="free", memory=3),
    "mean": lambda: sequence((3, 33, 101, 48), compression="mean", mixing=False, memory=2),
    "images": lambda: images(5),
    "channels last": lambda: images(5, memory_format=torch.channels_last, memory=2),
    "many images": lambda: images(128, [(24, 32, 32), (24, 16, 16)], compressed=20, width=20),
    "any": lambda: Solve(HyperConfig("any", (5003, 7), memory=2), [(3, 5003), (3, 7)]),
    "memory of one": lambda: images(5, memory=1),
}
LARGEST = {
    "local, wide network": lambda: sequence((2, 21, 100, 128), local=True, memory=8),
    "wide network": lambda: sequence((2, 21, 100, 128), memory=8),
    "local, narrow, six": lambda: sequence((3, 420, 32, 4), local=True),
    "channels last, six": lambda: images(5, memory_format=torch.channels_last),
}
ALL = CASES | LARGEST


def error(found, truth):
    found, truth = torch.cat(found, dim=1).double(), torch.cat(truth, dim=1)
    return float((found - truth).norm() / truth.norm().clamp_min(1e-30))  # the first best iterate is zero


def replayable(work):
    """A graph of `work`, which must not mind being done before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGEST)])
def test_each_step_is_that_of_the_twin_and_can_be_replayed(name):
    """In one test, so that only one process has to compile the kernels."""
    assert_steps_of_the_twin(ALL[name]())
    assert_replays(ALL[name], FIXED)


def assert_steps_of_the_twin(solve):
    """Against float64, from the kernels' own state, past the end of the ring; the same bits when done again."""
    for _ in range(solve.parts.memory + 2):
        twin, again = solve.widened(), solve.copied()
        fz = solve.image()
        solve.step(fz)
        again.step(fz)
        twin.step([leaf.double() for leaf in fz], "naive")
        assert error(solve.z, twin.z) < 3e-5
        assert error(solve.standing.best, twin.standing.best) < 1e-6
        torch.testing.assert_close(solve.memory.weights.double(), twin.memory.weights, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(solve.memory.mixing.double(), twin.memory.mixing, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(solve.standing.latest.double(), twin.standing.latest, rtol=1e-5, atol=0)
        assert all(torch.equal(a, b) for a, b in zip(solve.z, again.z, strict=True))
        assert int(solve.standing.count) == int(twin.standing.count)


@pytest.mark.parametrize("name", ["local, softmax", "last", "channels last"])
def test_narrow_images_and_residuals(name):
    """Both rounded to bfloat16: proposals differ by what rounding does to a residual, not by more."""
    solve, narrow = CASES[name](), CASES[name]().begin(torch.bfloat16)
    for _ in range(8):
        fz = [leaf.bfloat16() for leaf in solve.image()]
        for place, leaf in zip(narrow.z, solve.z, strict=True):
            place.copy_(leaf)
        narrow.step(fz)
        before = torch.cat([f.float() - z for f, z in zip(fz, solve.z, strict=True)], dim=1).norm()
        solve.step([leaf.float() for leaf in fz])
        difference = torch.cat([a - b for a, b in zip(narrow.z, solve.z, strict=True)], dim=1).norm()
        assert difference < 0.05 * before


@pytest.mark.parametrize("name", ["local, softmax", "channels last"])
def test_images_remembered_as_f_returns_them(name):
    """In bfloat16: nothing is lost, and half the bytes."""
    solve, narrow = CASES[name](), CASES[name]().begin(image_dtype=torch.bfloat16)
    assert narrow.memory.images[0].dtype == torch.bfloat16
    for _ in range(solve.parts.memory + 2):
        fz = [leaf.bfloat16() for leaf in solve.image()]
        for each in (solve, narrow):
            each.step(fz)
        assert all(torch.equal(a, b) for a, b in zip(solve.z, narrow.z, strict=True))


@pytest.mark.parametrize("name", ["local, in turns", "local, softmax", "many images"])
def test_two_buffers_in_turns_are_as_good_as_one(name):
    """Residuals that fall and rise: the same iterates, and after settling the same best ones."""
    solve, other = ALL[name](), ALL[name]()
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


@pytest.mark.parametrize("name", ["local, in turns", "many images"])
def test_the_same_bits_whoever_comes_last(name):
    """Programs arrive in any order, what they leave is added up in one: many steps from the same place are the same."""
    first = ALL[name]()
    for _ in range(first.parts.memory):
        first.step()
    fz = first.image()
    copies = [first.copied() for _ in range(20)]
    first.step(fz)
    for again in copies:
        again.step(fz)
        assert all(torch.equal(a, b) for a, b in zip(first.z, again.z, strict=True))
        assert torch.equal(first.memory.weights, again.memory.weights)
        assert torch.equal(first.standing.latest, again.standing.latest)
        assert not again.memory.arrived.any()
        assert not again.standing.arrived.any()


@pytest.mark.parametrize("name", ["local, softmax", "last", "channels last"])
def test_steps_to_a_tolerance_can_be_replayed(name):
    """Rules are the same whatever is weighed: one case for each way through the kernels, and one of several leaves."""
    assert_replays(CASES[name], TOLERANCE)


@pytest.mark.parametrize("name", ["local, softmax", "channels last"])
def test_a_solver_in_half_precision(name):
    """Kernels compute with its parameters in float32, the twin rounds in between."""
    solve = CASES[name]()
    solve.solver.bfloat16()
    solve.begin()
    for _ in range(solve.parts.memory + 2):
        twin, fz = solve.copied(), solve.image()
        solve.step(fz)
        twin.step(fz, "naive")
        assert error(solve.z, [leaf.double() for leaf in twin.z]) < 1e-3
        torch.testing.assert_close(solve.memory.weights, twin.memory.weights, rtol=0, atol=2e-3)


def assert_replays(make, stop):
    """One recorded step is every step; nothing waits for the device."""
    solve, recorded = make(), make()
    solve.step(stop=stop)
    solve.begin()
    graph = replayable(lambda: recorded.step(stop=stop))
    recorded.standing.restart([torch.zeros_like(leaf) for leaf in recorded.z])
    for leaf in recorded.z:
        leaf.zero_()
    steps = 2 * solve.parts.memory + 3
    with waiting_is_an_error():
        for _ in range(steps):
            solve.step(stop=stop)
            graph.replay()
    assert int(recorded.standing.count) == steps
    assert all(torch.equal(a, b) for a, b in zip(solve.z, recorded.z, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(solve.standing.best, recorded.standing.best, strict=True))
    assert torch.equal(solve.standing.status, recorded.standing.status)
    assert solve.standing.residual.max() < 0.1
    assert stop.fixed_budget or (solve.standing.status == int(eq.Status.CONVERGED)).any()


# What a step costs


def microseconds(step):
    """Of one step out of many in a graph, images not counted: median of 30 replays."""
    graph = replayable(lambda: [step() for _ in range(STEPS)])
    times = []
    for _ in range(33):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(1e3 * first.elapsed_time(last) / STEPS)
    return statistics.median(times[3:])


def cost(solve, residual_dtype=None):
    solve.begin(residual_dtype)
    turns = itertools.cycle([[torch.randn_like(leaf) for leaf in solve.z] for _ in range(4)])
    return microseconds(lambda: solve.step(next(turns)))


def cost_of_anderson(solve):
    z = [torch.zeros_like(leaf) for leaf in solve.z]
    memory, standing = AndersonMemory.empty(z, solve.parts.memory), Standing.start(z)
    turns = itertools.cycle([[torch.randn_like(leaf) for leaf in z] for _ in range(4)])
    return microseconds(lambda: anderson_step(z, next(turns), memory, standing, stop=FIXED))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_costs_less_than_one_of_anderson(shape):
    """With residuals remembered in bfloat16: rounding is relative to them."""
    solve = sequence(SHAPES[shape], local=True)
    assert cost(solve, torch.bfloat16) < cost_of_anderson(solve)


@pytest.mark.slow
def test_a_step_on_several_maps_costs_less_than_one_of_anderson():
    solve = images(64)
    assert cost(solve, torch.bfloat16) < cost_of_anderson(solve)


def _table():
    from equipoise.ops.hyper import triton as kernels

    cases = {f"{name}, local": sequence(shape, local=True) for name, shape in SHAPES.items()}
    cases |= {f"{name}, by sequence": sequence(shape) for name, shape in SHAPES.items()}
    cases |= {"four maps, 64 images": images(64), "four maps, 16 images": images(16)}
    defaults = {name: getattr(kernels, name) for name in ("POSITIONS", "FEATURES", "REGISTERS", "PROGRAMS", "WIDE")}
    others = [
        {"FEATURES": 32},
        {"FEATURES": 128},
        {"POSITIONS": 32},
        {"REGISTERS": 96},
        {"REGISTERS": 168},
        {"REGISTERS": 255},
        {"PROGRAMS": 264},
        {"PROGRAMS": 1056},
        {"WIDE": 64},
        {"WIDE": 256},
    ]
    for name, solve in cases.items():
        print(f"{name:28} anderson {cost_of_anderson(solve):7.2f}  float32 {cost(solve):7.2f}", end="")
        print(f"  bfloat16 residuals {cost(solve, torch.bfloat16):7.2f} µs")
        for settings in others if solve.parts.local else []:
            for key, value in {**defaults, **settings}.items():
                setattr(kernels, key, value)
            try:
                print(f"{'':28} {settings!s:20} float32 {cost(solve):7.2f}", flush=True)
            except Exception as problem:
                print(f"{'':28} {settings!s:20} {type(problem).__name__}: {str(problem)[:80]}")
        for key, value in defaults.items():
            setattr(kernels, key, value)


if __name__ == "__main__":
    _table()
