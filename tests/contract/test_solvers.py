"""Every solver on every problem, and each method against a dense reference of its own."""

import copy
import dataclasses
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from equipoise import Status, Stop
from equipoise._history import GROWTH
from equipoise._problem import Problem, StateSpec
from equipoise.solvers import SOLVERS as REGISTRY
from equipoise.solvers.base import State, as_solver
from tests import problems
from tests.problems import counted, every_solver, graded_batch, linear_map, repelling_map, tanh_map

SOLVERS = every_solver()


@pytest.fixture(autouse=True)
def _no_grad():
    torch.set_grad_enabled(False)


def problem_of(case) -> tuple[Problem, list[torch.Tensor]]:
    """The case as solvers see it, and its start."""
    problem = Problem(case.f, StateSpec.of(case.z0), case.inputs, in_dims=case.in_dims)
    return problem, problem.start(case.z0)


def drive(solver, case, steps):
    """Iterates z_0 .. z_steps (N, D) and residuals f(z) − z, by calling `propose` by hand; and the state after each."""
    problem, z = problem_of(case)
    z, state = solver.init(problem, z)
    iterates, residuals, states = [z[0]], [], []
    for _ in range(steps):
        fz = problem.evaluate(z)
        residuals.append(fz[0] - z[0])
        z, state = solver.propose(problem, z, fz, state)
        iterates.append(z[0])
        states.append(copy.deepcopy(state))
    return iterates, residuals, states


# --- the same root from every solver ---------------------------------------------------------------------------------

CASES = {
    "tanh_10": (lambda dtype: tanh_map(n=10, batch=4, dtype=dtype), 2000),
    "tanh_120": (lambda dtype: tanh_map(n=120, batch=2, dtype=dtype), 2000),
    "linear": (lambda dtype: linear_map(n=10, batch=4, dtype=dtype), 2000),
    "rotation": (lambda dtype: problems.rotation_map(dtype=dtype), 2000),
    # 1 − 0.99 = 0.01: the plain iteration needs about a thousand steps per ten powers of e
    "ill_scaled": (lambda dtype: problems.ill_scaled_map(n=6, batch=2, high=0.99, dtype=dtype), 4000),
    "multiscale": (lambda dtype: problems.multiscale_map(dtype=dtype), 2000),
    "sequence": (lambda dtype: problems.sequence_map(dtype=dtype), 2000),
    "graded": (lambda dtype: graded_batch(batch=12, dtype=dtype), 2000),
}


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("case_name", CASES)
def test_every_solver_finds_the_root(name, case_name):
    make, max_steps = CASES[case_name]
    case = make(torch.float64)
    solution = case.solve(SOLVERS[name], stop=Stop(rtol=1e-11, max_steps=max_steps, plateau=None))
    assert bool((solution.stats.status == Status.CONVERGED).all()), solution.explain()
    # the error is at most the residual times ‖(I − J)⁻¹‖, which is 100 for the ill-scaled map and 20 elsewhere
    assert case.error(solution.value) < 1e-8


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("case_name", ["tanh_10", "linear", "rotation"])
def test_every_solver_finds_the_root_in_float32(name, case_name):
    make, max_steps = CASES[case_name]
    case = make(torch.float32)
    solution = case.solve(SOLVERS[name], stop=Stop(rtol=1e-6, max_steps=max_steps, plateau=None))
    assert bool(solution.stats.ok.all()), solution.explain()
    assert solution.value.dtype == torch.float32
    assert case.error(solution.value) < 1e-4


@pytest.mark.parametrize("name", ["anderson", "broyden", "broyden_short", "newton", "ladder"])
def test_the_full_span_of_the_ill_scaled_map(name):
    """1 − d from 0.001 to 0.999: too slow for plain iteration, not for methods that learn the Jacobian."""
    case = problems.ill_scaled_map()
    solution = case.solve(SOLVERS[name], stop=Stop(rtol=1e-11, max_steps=400, plateau=None))
    assert bool(solution.stats.ok.all()), solution.explain()
    assert case.error(solution.value) < 1e-7


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 12),
    batch=st.integers(1, 9),
    norm=st.floats(0.05, 0.9),
    name=st.sampled_from(sorted(SOLVERS)),
)
def test_random_contractions_are_solved(seed, n, batch, norm, name):
    case = tanh_map(n=n, batch=batch, norm=norm, seed=seed)
    with torch.no_grad():
        solution = case.solve(SOLVERS[name], stop=Stop(rtol=1e-10, max_steps=400, plateau=None))
    assert bool(solution.stats.ok.all()), solution.explain()
    assert case.error(solution.value) < 1e-10 / (1 - norm) * 10


# --- a root that repels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solver", "steps"),
    [
        # the second difference is exact for a multiple of the identity; the ridge costs Anderson one step more
        (eq.Anderson(), 3),
        (eq.Broyden(), 2),
        (eq.Broyden(memory=5), 2),
        (eq.Broyden(line_search=True), 3),
        (eq.NewtonKrylov(), 1),
        (eq.Ladder(), 3),
    ],
    ids=str,
)
def test_a_repelling_linear_root_is_found_in_a_few_steps(solver, steps):
    case = repelling_map()
    solution = case.solve(solver, stop=Stop(rtol=1e-12))
    assert solution.stats.status.tolist() == [Status.CONVERGED] * 3
    assert int(solution.stats.steps.max()) <= steps
    assert case.error(solution.value) < 1e-12


def test_the_plain_iteration_diverges_from_a_repelling_root():
    solution = repelling_map().solve("picard", stop=Stop(diverge=1e3))
    assert solution.stats.status.tolist() == [Status.DIVERGED] * 3


def test_damping_makes_a_repelling_root_attract():
    """(1 − τ) − 1.5 τ = −0.25 for τ = 1/2."""
    case = repelling_map()
    solution = case.solve(eq.Picard(damping=0.5), stop=Stop(rtol=1e-12))
    assert bool(solution.stats.ok.all())
    assert case.error(solution.value) < 1e-12


@pytest.mark.parametrize("name", ["anderson", "broyden", "broyden_memory", "broyden_short", "newton", "ladder"])
def test_a_repelling_nonlinear_root_is_found(name):
    case = problems.repelling_tanh_map()
    jacobians = problems.tanh_jacobian(case.root, case.W, case.x)
    assert float(torch.linalg.eigvals(jacobians).abs().amax(dim=1).min()) > 1
    solution = case.solve(SOLVERS[name], stop=Stop(rtol=1e-11, max_steps=200, plateau=None))
    assert bool(solution.stats.ok.all()), solution.explain()
    assert case.error(solution.value) < 1e-10


# --- Picard ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.3, 1.0, 1.2])
def test_picard_iterates(damping):
    case = tanh_map(n=5, batch=2)
    iterates, residuals, _ = drive(eq.Picard(damping=damping), case, 4)
    for z, g, following in zip(iterates, residuals, iterates[1:], strict=False):
        assert torch.allclose(following, (1 - damping) * z + damping * (z + g), rtol=0, atol=1e-15)


# --- Anderson --------------------------------------------------------------------------------------------------------


def anderson_reference(case, steps, memory, mixing, ridge):
    """α = argmin ‖Σ α_i g_i‖² + ridge·Σ α_i²‖g_i‖² with Σ α_i = 1, from its optimality conditions, per system."""
    z, iterates = case.z0, [case.z0]
    past_z, past_f = [], []
    for _ in range(steps):
        past_z, past_f = [*past_z, z][-memory:], [*past_f, case.f(z, *case.inputs)][-memory:]
        following = []
        for row in range(len(z)):
            G = torch.stack([f[row] - p[row] for p, f in zip(past_z, past_f, strict=True)])
            m = len(G)
            bordered = torch.zeros(m + 1, m + 1, dtype=torch.float64)
            gram = G @ G.T
            bordered[:m, :m] = gram + ridge * torch.diag(gram.diagonal())
            bordered[m, :m] = bordered[:m, m] = 1
            right = torch.zeros(m + 1, dtype=torch.float64)
            right[m] = 1
            # rows of different size: scale the system before it is solved
            scale = torch.cat([gram.diagonal().rsqrt(), torch.ones(1, dtype=torch.float64)])
            alpha = (scale * torch.linalg.solve(scale[:, None] * bordered * scale, scale * right))[:m]
            images = torch.stack([f[row] for f in past_f])
            points = torch.stack([p[row] for p in past_z])
            following.append(mixing * alpha @ images + (1 - mixing) * alpha @ points)
        z = torch.stack(following)
        iterates.append(z)
    return iterates


@pytest.mark.parametrize("mixing", [1.0, 0.6])
@pytest.mark.parametrize(("memory", "ridge"), [(1, 1e-8), (2, 1e-8), (3, 1e-10), (5, 1e-4), (8, 1e-2)])
def test_anderson_equals_constrained_least_squares(memory, ridge, mixing):
    case = tanh_map(n=12, batch=3, norm=0.95)
    got = drive(eq.Anderson(memory=memory, mixing=mixing, ridge=ridge), case, 8)[0]
    want = anderson_reference(case, 8, memory, mixing, ridge)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm().clamp_min(1)


def test_bounded_weights_settle_on_a_causal_map_where_unbounded_ones_do_not():
    """Each step of time depends on the one before it: the plain iteration ends after as many steps at most."""
    torch.manual_seed(0)
    x, mix = torch.randn(6, 30, 3, dtype=torch.float64), 2 * torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]

    def f(z):
        return torch.tanh(torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], dim=1) @ mix + x)

    def solved(**settings):
        stop = eq.Stop(rtol=1e-6, max_steps=60)
        return eq.fixed_point(f, torch.zeros_like(x), solver=eq.Anderson(memory=5, **settings), stop=stop).stats.ok

    assert int(solved(bound=1.0).sum()) == 6  # every step is plain
    assert int(solved(bound=2.0).sum()) > int(solved().sum())


def test_anderson_with_memory_one_is_the_plain_iteration():
    case = tanh_map(n=6, batch=3)
    got, want = (drive(solver, case, 5)[0] for solver in (eq.Anderson(memory=1), eq.Picard()))
    assert all(torch.allclose(a, b, rtol=1e-14) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_larger_memories_do_not_slow_anderson_down(dtype, seed):
    """‖W‖₂ = 0.95, n = 200, to 1e-6: at most 16 evaluations at memory 6, and no growth from memory 2 to 20."""
    case = tanh_map(n=200, batch=5, norm=0.95, dtype=dtype, seed=seed)
    evaluations = []
    for memory in (2, 3, 4, 6, 10, 20):
        solution = case.solve(eq.Anderson(memory=memory), stop=Stop(rtol=1e-6))
        assert bool((solution.stats.status == Status.CONVERGED).all())
        assert case.error(solution.value) < 1e-4
        evaluations.append(solution.stats.nfe)
    assert evaluations[3] <= 16
    assert all(later <= earlier for earlier, later in itertools.pairwise(evaluations)), evaluations


@pytest.mark.parametrize("memory", [10, 20])
def test_anderson_does_not_stall_when_residuals_are_small(memory):
    """An absolute ridge makes the weights uniform once ‖g‖² is below it, here at a residual of 1e-4."""
    case = problems.ill_scaled_map(n=10, high=0.99, low=0.01)
    solution = case.solve(eq.Anderson(memory=memory), stop=Stop(rtol=1e-12, max_steps=200, plateau=None))
    assert solution.stats.status.tolist() == [Status.CONVERGED] * 3
    assert float(solution.stats.residual.max()) <= 1e-12
    assert case.error(solution.value) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_anderson_survives_a_singular_gram_matrix(dtype):
    """In one dimension all residuals are parallel: the matrix has rank one from the second step on."""
    case = linear_map(n=1, batch=4, norm=0.5, dtype=dtype)
    solution = case.solve(eq.Anderson(memory=6), stop=Stop(rtol=0, max_steps=15))
    assert case.error(solution.value) < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_anderson_is_indifferent_to_the_scale_of_the_state(scale):
    case = linear_map(n=10, batch=3)
    plain = case.solve("anderson", stop=Stop(rtol=1e-9))
    W, x = case.inputs
    scaled = dataclasses.replace(case, inputs=(W, scale * x)).solve("anderson", stop=Stop(rtol=1e-9))
    assert scaled.stats.steps.tolist() == plain.stats.steps.tolist()
    assert torch.allclose(scaled.value / scale, plain.value, rtol=1e-7, atol=1e-10)


# --- Broyden ---------------------------------------------------------------------------------------------------------


def broyden_reference(case, steps, step):
    """Dense good Broyden on the inverse: B ← B + (Δz − BΔg)(ΔzᵀB) / (ΔzᵀBΔg), from B = −I, per system."""
    paths = []
    for row in range(len(case.z0)):
        one = case.rows([row])
        z = one.z0
        g = one.f(z, *one.inputs) - z
        B = -torch.eye(z.shape[1], dtype=torch.float64)
        path = [z[0]]
        for _ in range(steps):
            following = z - step * g @ B.T
            image = one.f(following, *one.inputs)
            dz, dg = (following - z)[0], (image - following - g)[0]
            B = B + torch.outer(dz - B @ dg, dz @ B) / (dz @ B @ dg)
            z, g = following, image - following
            path.append(z[0])
        paths.append(torch.stack(path))
    return torch.stack(paths, dim=1)  # (steps + 1, N, D)


@pytest.mark.parametrize("step", [1.0, 0.8, 1.2])
@pytest.mark.parametrize("make", [tanh_map, linear_map, problems.repelling_tanh_map], ids=lambda make: make.__name__)
def test_broyden_equals_the_dense_method(make, step):
    case = make(n=15, batch=3)
    got = torch.stack(drive(eq.Broyden(step=step), case, 12)[0])
    want = broyden_reference(case, 12, step)
    assert (got - want).abs().max() <= 1e-9


@pytest.mark.parametrize("step", [1.0, 0.8])
def test_broyden_meets_the_secant_equation(step):
    """H Δg = Δz for the newest complete update, and for each of them at the time it was made."""
    case = tanh_map(n=20, batch=3, norm=0.95)
    iterates, residuals, states = drive(eq.Broyden(step=step), case, 12)
    for k in range(2, 12):
        # after proposal k the update of the step from iterate k − 2 to k − 1 is complete
        dz, dg = iterates[k - 1] - iterates[k - 2], residuals[k - 1] - residuals[k - 2]
        error = (states[k].apply([dg])[0] - dz).norm(dim=1) / dz.norm(dim=1)
        assert float(error.max()) < 1e-10


def test_broyden_meets_the_secant_equation_after_shortened_steps():
    """Rejected trials leave no trace: the equation holds from one accepted point to the next."""
    z0 = torch.tensor([[3.0, 2.6, 3.3]], dtype=torch.float64)
    case = problems.Case(lambda z: z - 3 * torch.atan(z - 1), z0)
    iterates, _, states = drive(eq.Broyden(line_search=True), case, 14)
    points, checked = [iterates[0]], 0
    for z, state in zip(iterates[1:], states[1:], strict=False):
        if torch.equal(state.point[0], points[-1]):
            continue  # the trial was rejected
        assert torch.equal(state.point[0], z)
        points.append(z)
        if len(points) >= 3:
            # the step that led here completed the update of the step before
            dz = points[-2] - points[-3]
            dg = (case.f(points[-2]) - points[-2]) - (case.f(points[-3]) - points[-3])
            assert (state.apply([dg])[0] - dz).norm() <= 1e-10 * dz.norm() + 1e-15  # rounding of dg
            checked += 1
    assert checked >= 5
    assert len(points) < len(states)  # some trials were rejected, else this shows nothing


@pytest.mark.parametrize("solver", [eq.Broyden(), eq.Broyden(step=0.8), eq.Broyden(line_search=True)], ids=str)
def test_broyden_applied_transposed(solver):
    case = tanh_map(n=9, batch=2)
    state = drive(solver, case, 9)[2][-1]
    x, y = problems.gaussian(2, 9, seed=5), problems.gaussian(2, 9, seed=6)
    forward = (y * state.apply([x])[0]).sum(dim=1)
    backward = (state.apply([y], transposed=True)[0] * x).sum(dim=1)
    assert torch.allclose(forward, backward, rtol=1e-10)


@pytest.mark.parametrize("memory", [1, 2, 5])
def test_broyden_restarts_when_its_memory_is_full(memory):
    case = tanh_map(n=12, batch=3, norm=0.95)
    got = drive(eq.Broyden(memory=memory), case, 3 * (memory + 1))[0]
    want, start = [case.z0], case
    for _ in range(3):
        # a restart keeps the point and forgets the matrix: the dense method started there
        part = broyden_reference(start, memory + 1, 1.0)
        want.extend(part[1:])
        start = dataclasses.replace(case, z0=part[-1])
    assert (torch.stack(got) - torch.stack(want)).abs().max() <= 1e-9


def test_broyden_with_a_short_memory_converges_from_every_start():
    case = tanh_map(n=200, batch=24, norm=0.95, seed=3)
    x = case.x[:1].expand(24, -1).contiguous()
    case = dataclasses.replace(case, z0=2 * problems.gaussian(24, 200, seed=9), inputs=(case.W, x), x=x)
    solution = case.solve(eq.Broyden(memory=5), stop=Stop(rtol=1e-6))
    assert solution.stats.status.tolist() == [Status.CONVERGED] * 24
    root = problems.tanh_root(case.W, x[:1])
    assert float((solution.value - root).norm(dim=1).max()) < 1e-4 * float(root.norm())


def test_broyden_storage_follows_the_steps_taken():
    case = tanh_map(n=50, batch=4, norm=0.95)
    short = case.solve("broyden", stop=Stop(rtol=1e-3, max_steps=5000))
    long = case.solve("broyden", stop=Stop(rtol=1e-12, max_steps=5000))
    state = case.z0.nbytes
    assert short.stats.solver_bytes <= (GROWTH + 8) * state  # one block of steps, the point and the small matrices
    assert short.stats.solver_bytes < long.stats.solver_bytes <= 4 * GROWTH * state


def test_line_search_shortens_steps_that_do_not_help():
    """arctan-like steps: from a far start the full quasi-Newton step overshoots, the shortened one does not."""
    z0 = torch.full((1, 3), 3.0, dtype=torch.float64)
    f = lambda z: z - 3 * torch.atan(z - 1)  # noqa: E731
    stop = Stop(rtol=1e-10, max_steps=100, plateau=None)
    searched = eq.fixed_point(f, z0, solver=eq.Broyden(line_search=True), stop=stop, trace=True)
    assert searched.stats.status.tolist() == [Status.CONVERGED]
    assert (searched.value - 1).abs().max() < 1e-9


# --- Newton and GMRES ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_gmres_solves_a_linear_system(n):
    case = linear_map(n=n, batch=4, norm=0.9)
    problem, z = problem_of(case)
    g = [problems.gaussian(4, n, seed=3)]
    got = eq.GMRES(max_steps=n, rtol=1e-12).solve(problem, z, g)[0]
    expected = torch.linalg.solve(torch.eye(n, dtype=torch.float64) - case.W, g[0].T).T
    assert (got - expected).norm() <= 1e-9 * expected.norm()


def test_gmres_stops_at_its_tolerance():
    case = linear_map(n=40, batch=3, norm=0.9)
    problem, z = problem_of(case)
    g = [problems.gaussian(3, 40, seed=3)]
    used = []
    for rtol in (1e-1, 1e-4, 1e-8):
        before = problem.nfe
        p = eq.GMRES(max_steps=40, rtol=rtol).solve(problem, z, g)[0]
        used.append(problem.nfe - before)
        left = g[0] - (p - p @ case.W.T)
        assert bool((left.norm(dim=1) <= 1.001 * rtol * g[0].norm(dim=1)).all())
    assert used == sorted(used)
    assert used[0] < used[2] < 40


def test_gmres_breaks_down_luckily():
    """For a multiple of the identity the first Krylov vector is the solution; the others are zero, not NaN."""
    case = repelling_map(n=5, batch=3)
    problem, z = problem_of(case)
    g = [problems.gaussian(3, 5, seed=3)]
    g[0][1] = 0.0  # and a system that has nothing to solve
    p = eq.GMRES(max_steps=5, rtol=0.0).solve(problem, z, g)[0]
    assert torch.allclose(p, g[0] / 2.5, rtol=1e-12, atol=0)


def test_newton_converges_quadratically():
    case = tanh_map(n=12, batch=3, norm=0.9)
    solver = eq.NewtonKrylov(eq.GMRES(max_steps=12, rtol=1e-13))
    trace = case.solve(solver, stop=Stop(rtol=1e-14), trace=True).stats.trace
    checked = 0
    for row in trace:
        for before, after in itertools.pairwise(row):
            if before < 1e-1 and before**2 > 1e-14:
                assert after <= 10 * before**2
                checked += 1
    assert checked >= 6


def test_newton_backtracks_where_the_full_step_overshoots():
    """Newton's method on arctan diverges from 3 with full steps."""
    z0 = torch.full((2, 1), 3.0, dtype=torch.float64)
    z0[1] = 0.5
    solution = eq.fixed_point(
        lambda z: z - torch.atan(z), z0, solver="newton", stop=Stop(rtol=0, atol=1e-12, plateau=None)
    )
    assert solution.stats.status.tolist() == [Status.CONVERGED] * 2
    assert solution.value.abs().max() < 1e-11


def test_newton_works_where_f_has_no_forward_mode():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return 0.2 * z * z + 0.5

        @staticmethod
        def backward(ctx, grad):
            return 0.4 * ctx.saved_tensors[0] * grad

    z0 = torch.zeros(2, 3, dtype=torch.float64)
    solution = eq.fixed_point(Square.apply, z0, solver="newton", stop=Stop(rtol=1e-12))
    root = (1 - (1 - 4 * 0.2 * 0.5) ** 0.5) / 0.4
    assert solution.stats.status.tolist() == [Status.CONVERGED] * 2
    assert torch.allclose(solution.value, torch.full_like(z0, root), rtol=1e-11)


# --- Ladder ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Noting(eq.Solver):
    """Another solver, noting how many systems it is given at its start."""

    inner: eq.Solver
    sizes: list = dataclasses.field(compare=False)

    def run(self, problem, z, stop, **options):
        self.sizes.append(problem.num_systems)
        return self.inner.run(problem, z, stop, **options)

    def propose(self, problem, z, fz, state):
        raise NotImplementedError


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "shared"])
def test_a_ladder_sends_only_unsolved_systems_on(compact):
    case, counter = counted(graded_batch(batch=20, hard=3))
    sizes = []
    ladder = eq.Ladder((Noting(eq.Picard(), sizes), Noting(eq.Broyden(), sizes), Noting(eq.NewtonKrylov(), sizes)))
    solution = case.solve(ladder, compact=compact, stop=Stop(rtol=1e-10, max_steps=20))
    assert sizes == [20, 3]  # the second stage solves the rest
    assert bool(solution.stats.ok.all())
    assert case.error(solution.value) < 1e-8
    assert counter.calls == solution.stats.nfe
    if compact:
        assert counter.sizes[-1] <= 3
    plain = case.solve("picard", compact=compact, stop=Stop(rtol=1e-10, max_steps=20))
    hard = ~plain.stats.ok
    assert torch.equal(solution.value[~hard], plain.value[~hard])
    assert solution.stats.steps[~hard].tolist() == plain.stats.steps[~hard].tolist()
    assert bool((solution.stats.steps[hard] > 20).all())


def test_a_ladder_stops_at_the_first_stage_that_is_enough():
    sizes = []
    ladder = eq.Ladder((Noting(eq.Anderson(), sizes), Noting(eq.Broyden(), sizes)))
    tanh_map(batch=4).solve(ladder)
    assert sizes == [4]


def test_a_ladder_counts_products():
    case, counter = counted(problems.repelling_tanh_map(batch=3))
    ladder = eq.Ladder((eq.Picard(), eq.NewtonKrylov()))
    solution = case.solve(ladder, stop=Stop(rtol=1e-10, max_steps=10))
    assert bool(solution.stats.ok.all())
    assert counter.calls == solution.stats.nfe > 10 + int(solution.stats.steps.max()) - 10 + 3
    assert case.error(solution.value) < 1e-8


def test_a_ladder_reports_what_is_left_unsolved():
    ladder = eq.Ladder((eq.Picard(), eq.Picard(damping=0.9)))
    case = repelling_map()
    solution = case.solve(ladder, stop=Stop(diverge=10.0))
    assert solution.stats.status.tolist() == [Status.DIVERGED] * 3
    assert torch.equal(solution.value, case.z0)


def test_the_trace_of_a_ladder_goes_through_its_stages():
    case = graded_batch(batch=10, hard=2)
    stop = Stop(rtol=1e-10, max_steps=15)
    solution = case.solve(eq.Ladder((eq.Picard(), eq.Broyden())), stop=stop, trace=True)
    first = case.solve("picard", stop=stop, trace=True)
    hard = (~first.stats.ok).nonzero()[:, 0].tolist()
    assert len(hard) == 2
    for row in range(10):
        measured = solution.stats.trace[row][~solution.stats.trace[row].isnan()]
        before = first.stats.trace[row][~first.stats.trace[row].isnan()]
        assert torch.allclose(measured[: len(before)], before, rtol=1e-8, atol=1e-14)
        assert len(measured) > len(before) if row in hard else len(measured) == len(before)
        assert measured[-1] == solution.stats.residual[row]


def test_a_ladder_has_no_step_of_its_own():
    problem, z = problem_of(tanh_map())
    with pytest.raises(TypeError, match=r"solver\.run\(problem, z, stop\)"):
        eq.Ladder().propose(problem, z, z, State())


# --- registry and configuration --------------------------------------------------------------------------------------


def test_registered_names():
    assert set(REGISTRY) == {"anderson", "broyden", "ladder", "newton", "picard"}
    for name, cls in REGISTRY.items():
        assert as_solver(name) == cls()


def test_a_name_works_as_a_solver():
    case = tanh_map()
    for name in REGISTRY:
        assert torch.equal(case.solve(name).value, case.solve(REGISTRY[name]()).value)


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="'anderson' is already taken by Anderson"):
        eq.register_solver("anderson")(eq.Picard)
    assert REGISTRY["anderson"] is eq.Anderson


def test_a_new_solver_is_known_by_its_name():
    try:

        @eq.register_solver("half")
        @dataclasses.dataclass(frozen=True)
        class Half(eq.Solver):
            def propose(self, problem, z, fz, state):
                return [(a + b) / 2 for a, b in zip(z, fz, strict=True)], state

        case = tanh_map()
        expected = case.solve(eq.Picard(damping=0.5), stop=Stop(rtol=1e-9, max_steps=200)).value
        assert torch.allclose(case.solve("half", stop=Stop(rtol=1e-9, max_steps=200)).value, expected, rtol=1e-8)
    finally:
        REGISTRY.pop("half", None)


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_are_values(name):
    solver = SOLVERS[name]
    twin = every_solver()[name]
    assert solver == twin
    assert hash(solver) == hash(twin)
    assert len({solver, twin}) == 1
    assert pickle.loads(pickle.dumps(solver)) == solver
    assert copy.deepcopy(solver) == solver
    assert eval(repr(solver), vars(eq).copy()) == solver  # the repr is the configuration
    with pytest.raises(dataclasses.FrozenInstanceError):
        solver.memory = 3
    assert solver != eq.Picard(damping=0.123)


def test_solver_reprs():
    assert repr(eq.Anderson()) == "Anderson(memory=6, mixing=1.0, ridge=1e-08, bound=None)"
    assert repr(eq.Broyden(memory=5)) == "Broyden(memory=5, step=1.0, line_search=False)"
    assert repr(eq.Picard()) == "Picard(damping=1.0)"
    assert repr(eq.NewtonKrylov()) == "NewtonKrylov(linear=GMRES(max_steps=30, rtol=0.001))"


@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "ladder"])  # which keeps no state
def test_a_state_can_be_cut_by_rows(name):
    """The state of a subset goes on as the subset would have gone on by itself."""
    solver = SOLVERS[name]
    case = tanh_map(n=6, batch=5)
    index = torch.tensor([3, 1])
    whole, part = problem_of(case)[0], problem_of(case.rows(index))[0]
    z, state = solver.init(whole, whole.start(case.z0))
    for _ in range(4):
        z, state = solver.propose(whole, z, whole.evaluate(z), state)
    cut = [leaf.index_select(0, index) for leaf in z]
    some = copy.deepcopy(state).rows(index)
    assert some.nbytes <= state.nbytes
    for _ in range(4):
        z, state = solver.propose(whole, z, whole.evaluate(z), state)
        cut, some = solver.propose(part, cut, part.evaluate(cut), some)
        # Newton's inner solve ends by its own tolerance, so its directions agree to that only in the limit
        assert (cut[0] - z[0][index]).abs().max() <= (1e-3 if name == "newton" else 1e-12)
