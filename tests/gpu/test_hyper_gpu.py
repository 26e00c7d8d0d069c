"""The learned solver on a CUDA device: the results of the CPU, no waiting, steps that can be recorded."""

import copy
import functools

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise._modes import held
from equipoise.solvers import hyper_solver_for
from equipoise.tasks import hyper
from equipoise.tasks._hyper_steps import Learner
from equipoise.tasks.hyper import FitSettings, Pool, fit_hyper_solver
from tests.captured import recordings_of
from tests.gpu.devices import waiting_is_an_error
from tests.unit.test_hyper_capture_fused import skewed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"hidden": 8, "compressed": 6, "width": 8, "budget": None}
MEMORY = 3  # loops over remembered steps are unrolled: six take several times as long to compile
# All with a fixed budget select the same, so that they share kernels.
FIXED = eq.Stop(rtol=0, max_steps=9, select="last")
LONG = eq.Stop(rtol=0, max_steps=40, select="last")  # more than one piece of a recording
TOLERANCE = eq.Stop(rtol=1e-3, max_steps=40)


class Sequence(nn.Module):
    """Causal, (N, T, d)."""

    def __init__(self, d=12):
        super().__init__()
        self.here, self.before = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, z, x):
        before = nn.functional.pad(z[:, :-1], (0, 0, 1, 0))
        return torch.tanh(self.here(z) + self.before(before) + x)


class Images(nn.Module):
    """Two resolutions."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 5, 2, stride=2), nn.ConvTranspose2d(5, 3, 2, stride=2)

    def initial_state(self, x):
        return torch.zeros_like(x), x.new_zeros(len(x), 5, x.shape[2] // 2, x.shape[3] // 2)

    def forward(self, z, x):
        return torch.tanh(x + 0.5 * self.up(z[1])), torch.tanh(self.down(z[0]))


class Flat(nn.Module):
    """(N, 16) from (N, 4)."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(4, 16)

    def initial_state(self, x):
        return x.new_zeros(len(x), 16)

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + self.outer(x))


CASES = {
    "sequence": (Sequence, (4, 7, 12), {"local": False}),
    "local": (Sequence, (4, 7, 12), {"local": True}),
    "corrected": (Sequence, (4, 7, 12), {"local": True, "weights": "corrected"}),
    "softmax": (Flat, (6, 4), {"weights": "softmax"}),
    "newest": (Flat, (6, 4), {"weights": "newest"}),
    "start": (Images, (3, 3, 8, 6), {"weights": "newest", "mixing": False}),
    "anderson": (Flat, (6, 4), {"weights": "least_squares", "mixing": False}),
    "images": (Images, (3, 3, 8, 6), {}),
    "channels": (Images, (3, 3, 8, 6), {"weights": "newest", "mixing": False, "rank": 1}),
    "any": (Flat, (6, 4), {}),
}
# Residuals of positions are nearly dependent, and least squares amplify rounding. On a CPU, inputs changed by one
# rounding error move iterates by up to 4e-6, ten times as much as with other solvers.
CLOSE, STEPS = {"corrected": 5e-3}, {"corrected": 2}


def made(name):
    """A DEQ, inputs, and a solver with weights as after some fitting, on the CPU."""
    torch.manual_seed(0)
    cell, shape, settings = CASES[name]
    deq, x = eq.DEQ(cell(), engine="eager").requires_grad_(False), torch.randn(shape)
    solver = hyper_solver_for(deq, x, memory=MEMORY, **SIZES, **settings).requires_grad_(False)
    for parameter in solver.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return deq, x, solver


def solved(deq, x, solver, stop=FIXED):
    with torch.no_grad(), eq.override(deq, solver=solver, stop=stop):
        return deq(x)


def leaves(tree):
    return torch.utils._pytree.tree_leaves(tree)


def close(a, b, tolerance=1e-4):
    return all((x.cpu() - y.cpu()).abs().max() <= tolerance for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_same_result_as_on_the_cpu_without_waiting(name):
    deq, x, solver = made(name)
    here = solved(deq, x, solver).value
    deq, x, solver = deq.cuda(), x.cuda(), solver.cuda()
    tolerance = CLOSE.get(name, 1e-4)
    assert close(solved(deq, x, solver).value, here, tolerance)  # also the warm-up: lazy initialisation may wait
    with waiting_is_an_error():
        there = solved(deq, x, solver).value
    assert close(there, here, tolerance)


@pytest.mark.parametrize("name", [name for name in CASES if name != "anderson"])
def test_steps_can_be_recorded(name):
    """The start and all steps in one graph, replayed on other inputs. Anderson's own are for the captured engine."""
    deq, x, solver = made(name)
    deq, x, solver = deq.cuda(), x.cuda(), solver.cuda()
    others = [torch.randn_like(x) for _ in range(2)]
    expected = [solved(deq, other, solver).value for other in others]
    place = x.clone()
    problem = deq.problem(place)
    zeros = problem.start(deq.start(place))

    def run():
        z, state = solver.init(problem, zeros)
        for _ in range(FIXED.max_steps):
            z, state = solver.propose(problem, z, problem.evaluate(z), state)
        return z

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
    for other, truth in zip(others, expected, strict=True):
        place.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        assert close(problem.spec.unflatten(found), truth, CLOSE.get(name, 1e-4))


def twins(name):
    """Eager and recorded, inputs, and the solver they share."""
    deq, x, solver = made(name)
    deq, x, solver = deq.cuda(), x.cuda(), solver.cuda()
    auto = copy.deepcopy(deq)
    auto.engine = "auto"
    return deq, auto, x, solver


def another(x, seed):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        *(pytest.param(name, FIXED, id=f"{name}-fixed") for name in CASES),
        *(pytest.param(name, LONG, id=f"{name}-long") for name in CASES),
        # One for each way through the kernels, and one for each kind of solver that has none of its own.
        *(
            pytest.param(name, TOLERANCE, id=f"{name}-tolerance")
            for name in ("local", "corrected", "newest", "start", "images", "any")
        ),
    ],
)
def test_the_automatic_engine_gives_the_results_of_the_eager_one(name, stop):
    deq, auto, x, solver = twins(name)
    for seed in range(4):  # a shape is recorded when it comes again
        other = another(x, seed)
        eager, captured = (solved(one, other, solver, stop) for one in (deq, auto))
        assert close(captured.value, eager.value, CLOSE.get(name, 1e-4 if stop.fixed_budget else 3e-3))
        if stop is not LONG:  # where a residual may become zero by chance
            assert torch.equal(captured.stats.status, eager.stats.status)
        assert (captured.stats.steps - eager.stats.steps).abs().max() <= STEPS.get(name, 1)
    assert (auto.capture.recorded, auto.capture.replayed) == (1, 3)
    assert dict(auto.capture.fallbacks) == {"the shape is new": 1}


@pytest.mark.parametrize("name", CASES)
def test_replays_wait_for_nothing_and_see_updates(name):
    """Weights of cell and solver are updated in place; a solve with NaN leaves nothing behind."""
    deq, auto, x, solver = twins(name)
    auto.engine = "captured"
    solved(auto, x, solver)
    broken = x.clone()
    broken[0] = torch.nan
    for seed in range(3):
        other = another(x, seed)
        with torch.no_grad():
            for one in (deq.cell, auto.cell, solver):
                generator = torch.Generator().manual_seed(seed)
                for parameter in one.parameters():
                    parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator).cuda())
        with waiting_is_an_error():
            solved(auto, broken, solver)
            captured = solved(auto, other, solver)
        assert close(captured.value, solved(deq, other, solver).value, CLOSE.get(name, 1e-4))
    assert (auto.capture.recorded, auto.capture.replayed) == (1, 7)


@pytest.mark.parametrize("local", [True, False])
def test_the_last_systems_are_solved_alone(local):
    """One hard system of 16 goes on in a batch of its own, with what is remembered of it."""
    deq, _, x, scale = skewed(local)
    deq, x, scale = deq.cuda().requires_grad_(False), x.cuda(), scale.cuda()
    with torch.no_grad():
        deq.engine = "eager"
        eager = deq(x, scale)
        deq.engine = "captured"
        for _ in range(4):
            captured = deq(x, scale)
            assert close(captured.value, eager.value)
            assert torch.equal(captured.stats.status, eager.stats.status)
            assert (captured.stats.steps - eager.stats.steps).abs().max() <= 2
    assert 1 in recordings_of(deq)[0].forward.levels
    assert (deq.capture.recorded, deq.capture.replayed) == (1, 4)


@pytest.mark.parametrize("name", ["local", "images", "any"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_training_with_a_learned_forward_solver(name, precision):
    """In bfloat16 two engines may round differently, 2⁻⁸ of a value, and the steps go on from there."""
    stop = eq.Stop(rtol=0, max_steps=12, select="last")
    deq, auto, x, solver = twins(name)
    results = []
    for one in (deq, auto):
        one.requires_grad_(True)
        one.engine = "eager" if one is deq else "captured"
        one.plan = eq.Plan(solver, eq.Implicit(solver=eq.Anderson(), stop=stop), stop)
        seen = []
        for seed in range(3):
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                value = one(another(x, seed)).value
            one.zero_grad(set_to_none=True)
            sum(leaf.float().square().sum() for leaf in leaves(value)).backward()
            seen += [leaf.detach().float() for leaf in leaves(value)] + [p.grad.clone() for p in one.cell.parameters()]
            with torch.no_grad():
                for parameter in one.cell.parameters():
                    parameter -= 0.01 * parameter.grad / parameter.grad.norm().clamp_min(1.0)
        results.append(seen)
    bound = 1e-3 if precision == "no" else 5e-2
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm().clamp_min(1e-3)
    assert (auto.capture.recorded, auto.capture.replayed) == (1, 3)
    assert not auto.capture.fallbacks
    assert all(parameter.grad is None for parameter in solver.parameters())


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_fit_on_the_device(precision):
    torch.manual_seed(0)
    deq = eq.DEQ(Sequence(), engine="auto").cuda()
    settings = FitSettings(steps=20, unroll=6, learning_rate=1e-2, accept=0.1)

    def batch(step):
        return torch.randn(16, 9, 12, generator=torch.Generator().manual_seed(step)).cuda()

    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        fit = fit_hyper_solver(deq, batch, settings, log_every=1, **SIZES)
    assert next(fit.solver.parameters()).is_cuda
    assert fit.record["last"]["initial"] < 0.95 * fit.record["first"]["initial"]
    assert fit.record["last"]["skipped"] == 0
    stop = eq.Stop(rtol=1e-2 if precision == "no" else 0.03, max_steps=40)
    steps = [float(solved(deq, batch(99), s, stop).stats.steps.float().mean()) for s in (fit.solver, eq.Picard())]
    assert steps[0] <= steps[1] + 0.5


class Dropped(Sequence):
    """With dropout that a solve holds constant."""

    def __init__(self, d=12):
        super().__init__(d)
        self.dropout = eq.nn.VariationalDropout(0.5)

    def forward(self, z, x):
        return super().forward(self.dropout(z), x)


def test_fits_in_training_mode_learn_from_the_draws_of_each_solve():
    """With equilibria of recorded solves, in recorded steps; these are the ordinary ones."""
    torch.manual_seed(0)
    deq = eq.DEQ(Dropped(), engine="captured").cuda()
    settings = FitSettings(steps=8, unroll=3, pool=8, training=True)
    batches = [torch.randn(4, 7, 12, device="cuda") for _ in range(8)]
    pool = Pool(deq, batches, settings)
    drawn = [next(iter(pool.at(i)[0].problem.scope._drawn.values())) for i in range(8)]
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:])
    made = [hyper_solver_for(deq, batches[0], memory=MEMORY, **SIZES) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    learners = [Learner(solver, settings, record=record) for solver, record in zip(made, (False, True), strict=True)]
    with settings.mode(deq), held(deq, apart_from=nn.ModuleList(made)):
        for i in range(8):
            values = [learner.step(pool.at(i), 0.1, 0.1) for learner in learners]
            ours, theirs = (float(value["convergence"]) for value in values)
            assert ours == pytest.approx(theirs, rel=1e-3)
    assert (learners[1].obstacle, learners[1].replayed) == (None, 6)


def test_a_follower_learns_from_the_model_as_it_is_now(monkeypatch):
    """One recording for a model that changes: its steps are the ordinary ones."""
    torch.manual_seed(0)
    deq, settings = eq.DEQ(Dropped(), engine="captured").cuda(), FitSettings(unroll=3, training=True)
    x = [torch.randn(4, 7, 12, device="cuda") for _ in range(8)]
    made = [hyper_solver_for(deq, x[0], memory=MEMORY, **SIZES) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    followers = []
    for solver, record in zip(made, (False, True), strict=True):
        monkeypatch.setattr(hyper, "Learner", functools.partial(Learner, record=record))
        followers.append(hyper.Follower(solver, settings))
    for step in range(8):
        for follower in followers:
            torch.manual_seed(step)  # the same draws
            assert follower.step(deq, x[step])
        with torch.no_grad():
            for parameter in deq.parameters():
                parameter.mul_(1.02)
    assert (followers[1]._learner.obstacle, followers[1]._learner.replayed) == (None, 6)
    for ours, theirs in zip(*(solver.parameters() for solver in made), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)
