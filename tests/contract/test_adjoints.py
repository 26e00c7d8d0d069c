"""Every adjoint against a dense float64 truth, and the conduct of gradients in a training program."""

import dataclasses
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import (
    DEQ,
    Anderson,
    Broyden,
    EquilibriumError,
    EquilibriumWarning,
    Implicit,
    Ladder,
    Neumann,
    NewtonKrylov,
    OneStep,
    Phantom,
    Picard,
    Reversible,
    Shine,
    Status,
    Stop,
    Unroll,
    fixed_point,
)
from equipoise.adjoints import ADJOINTS, as_adjoint
from equipoise.nn import VariationalDropout
from equipoise.theory import dense_gradient
from tests.gradients import (
    EXACT,
    ROBUST,
    TIGHT,
    TanhCell,
    all_converged,
    cosine,
    gradients,
    layer,
    normal,
    relative_error,
    tanh_system,
)

ANY_ORDER = dataclasses.replace(EXACT, any_order=True)
FIRST_ORDER = [Implicit(), OneStep(), Phantom(), Neumann(), Shine(), Reversible()]


def solve(system, z0=None, **options):
    return fixed_point(system.f, system.z0 if z0 is None else z0, system.W, system.x, **options)


def budget(steps):
    return Stop(rtol=0, max_steps=steps, select="last")


# Exactness


@pytest.mark.parametrize("radius", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("adjoint", [EXACT, ANY_ORDER], ids=["implicit", "any_order"])
def test_implicit_equals_the_dense_gradient(adjoint, radius):
    system = tanh_system(radius=radius)
    solution = solve(system, system.near(), solver=ROBUST, adjoint=adjoint, stop=TIGHT)
    assert relative_error(solution.value, system.root) <= 1e-11
    assert relative_error(gradients(solution, system), system.truth()) <= 1e-10


@pytest.mark.parametrize(("radius", "steps"), [(0.5, 80), (0.9, 400), (0.99, 3500)])
def test_unroll_of_many_steps_equals_the_dense_gradient(radius, steps):
    system = tanh_system(n=5, batch=2, radius=radius)
    solution = solve(system, system.near(), solver=Picard(), adjoint=Unroll(), stop=budget(steps))
    assert relative_error(gradients(solution, system), system.truth()) <= 1e-10


@pytest.mark.parametrize("solver", [Anderson(memory=8), Broyden()])
def test_unroll_of_an_accelerated_solver_equals_the_dense_gradient(solver):
    system = tanh_system(n=4, batch=2, radius=0.5)
    solution = solve(system, solver=solver, adjoint=Unroll(), stop=Stop(rtol=1e-15, max_steps=40, select="last"))
    assert relative_error(gradients(solution, system), system.truth()) <= 1e-6


def test_reversible_at_a_converged_budget_is_close_to_the_dense_gradient():
    # Its iteration loses about as many digits backwards as it gains forwards: 1e-4 is what float64 allows here.
    system = tanh_system(radius=0.4)
    solution = solve(system, adjoint=Reversible(beta=0.3), stop=budget(100))
    assert relative_error(gradients(solution, system), system.truth()) <= 1e-4


@pytest.mark.parametrize("radius", [1.5, 3.0])
@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("solver", [Broyden(), NewtonKrylov(), Ladder()], ids=["broyden", "newton", "ladder"])
def test_roots_that_repel_the_plain_iteration(solver, any_order, radius):
    system = tanh_system(radius=radius, seed=3)
    adjoint = Implicit(solver=solver, stop=TIGHT, any_order=any_order, throw=True)
    solution = solve(system, system.near(1e-3), solver=solver, adjoint=adjoint, stop=TIGHT)
    assert relative_error(solution.value, system.root) <= 1e-11
    assert relative_error(gradients(solution, system), system.truth()) <= 1e-10
    assert all_converged(solution.backward)


FORWARD = [
    Picard(),
    Picard(damping=0.7),
    Anderson(),
    Anderson(memory=3, mixing=0.8),
    Broyden(),
    Broyden(memory=5),
    Broyden(step=0.9),
    Broyden(line_search=True),
    NewtonKrylov(),
    Ladder(),
]


@pytest.mark.parametrize("solver", FORWARD, ids=repr)
def test_the_gradient_does_not_depend_on_the_forward_solver(solver):
    system = tanh_system(radius=0.8)
    solution = solve(system, system.near(0.1), solver=solver, adjoint=EXACT, stop=Stop(rtol=1e-13, max_steps=500))
    assert all_converged(solution.stats)
    assert relative_error(gradients(solution, system), system.truth()) <= 1e-10


@pytest.mark.parametrize("solver", FORWARD, ids=repr)
def test_the_gradient_does_not_depend_on_the_adjoint_solver(solver):
    system = tanh_system(radius=0.8)
    adjoint = Implicit(solver=solver, stop=Stop(rtol=1e-13, max_steps=500), throw=True)
    solution = solve(system, system.near(0.1), solver=ROBUST, adjoint=adjoint, stop=TIGHT)
    assert relative_error(gradients(solution, system), system.truth()) <= 1e-10


@pytest.mark.parametrize("seed", range(20))
def test_defaults_are_safe_in_float32(seed):
    """Solver, adjoint, stop rule and start as they come: gradients right to 1e-3 where ρ(J) = 0.9."""
    exact = tanh_system(n=30, batch=4, radius=0.9, seed=seed, size=0.3)
    system = exact.to(torch.float32).trainable()
    solution = solve(system)
    assert relative_error(solution.value, exact.root) <= 1e-3
    for mine, true in zip(gradients(solution, system), exact.truth(), strict=True):
        assert relative_error(mine, true) <= 1e-3


@pytest.mark.parametrize("adjoint", [EXACT, ANY_ORDER], ids=["implicit", "any_order"])
def test_agreement_with_a_long_unroll(adjoint):
    cell = TanhCell(n=10, norm=0.95)
    x = normal(4, 10, seed=1).requires_grad_()
    a = normal(4, 10, seed=2)
    z = torch.zeros_like(x)
    for _ in range(500):
        z = cell(z, x)
    want = torch.autograd.grad(z, (cell.W, x), a)
    solution = DEQ(cell, adjoint=adjoint, stop=TIGHT)(x)
    assert relative_error(torch.autograd.grad(solution.value, (cell.W, x), a), want) <= 1e-6


def test_a_tree_of_states_with_several_batch_axes():
    generator = torch.Generator().manual_seed(0)
    A = (0.2 * torch.randn((4, 4), dtype=torch.float64, generator=generator)).requires_grad_()
    B = (0.2 * torch.randn((3, 4), dtype=torch.float64, generator=generator)).requires_grad_()
    x = torch.randn((2, 5, 4), dtype=torch.float64, generator=generator).requires_grad_()

    def f(state, x):
        long, (short,) = state["long"], state["rest"]
        return {"long": torch.tanh(long @ A + short @ B + x), "rest": (torch.sin(long @ B.mT),)}

    def joint(z):
        long, (short,) = (out := f({"long": z[..., :4], "rest": (z[..., 4:],)}, x))["long"], out["rest"]
        return torch.cat([long, short], dim=-1)

    z0 = {"long": torch.zeros_like(x), "rest": (x.new_zeros(2, 5, 3),)}
    solution = fixed_point(f, z0, x, adjoint=EXACT, stop=TIGHT, batch_dims=2)
    assert solution.stats.status.shape == (10,)
    root = torch.cat([solution.value["long"], solution.value["rest"][0]], dim=-1)
    a = normal(2, 5, 7, seed=4)
    got = torch.autograd.grad(root, (A, B, x), a)
    want = dense_gradient(
        lambda z: joint(z.view(2, 5, 7)).view(10, 7), root.detach().view(10, 7), a.view(10, 7), (A, B, x)
    )
    assert relative_error(got, want) <= 1e-10


def test_one_coupled_system():
    A = normal(6, 6, seed=1)
    A = (A * (0.7 / torch.linalg.matrix_norm(A, 2))).requires_grad_()
    x = normal(6, 2, seed=2).requires_grad_()
    solution = fixed_point(
        lambda z: torch.tanh(A @ z + x), torch.zeros_like(x), batch_dims=0, adjoint=EXACT, stop=TIGHT
    )
    a = normal(6, 2, seed=3)
    got = torch.autograd.grad(solution.value, (A, x), a)
    flat = solution.value.detach().reshape(1, 12)
    want = dense_gradient(lambda z: torch.tanh(A @ z.view(6, 2) + x).view(1, 12), flat, a.reshape(1, 12), (A, x))
    assert relative_error(got, want) <= 1e-10


def test_gradcheck():
    system = tanh_system(n=4, batch=2, radius=0.7)
    for adjoint in (EXACT, ANY_ORDER):

        def value(W, x, adjoint=adjoint):
            return fixed_point(layer, system.z0, W, x, adjoint=adjoint, stop=TIGHT).value

        assert torch.autograd.gradcheck(value, (system.W, system.x))


# Approximate adjoints do what their names say


def test_exactness_is_declared():
    exact = {name: cls.exact for name, cls in ADJOINTS.items()}
    assert exact == {
        "implicit": True,
        "neumann": False,
        "one_step": False,
        "phantom": False,
        "reversible": True,
        "shine": False,
        "unroll": True,
    }


def test_one_step_is_the_gradient_of_one_evaluation_at_the_root():
    system = tanh_system(radius=0.7)
    solution = solve(system, adjoint=OneStep(), stop=TIGHT)
    want = torch.autograd.grad(system.f(system.root, system.W, system.x), (system.W, system.x), system.cotangent)
    got = gradients(solution, system)
    assert relative_error(got, want) <= 1e-11
    assert 0.5 < cosine(got, system.truth()) < 0.9999


@pytest.mark.parametrize("seed", range(5))
def test_one_step_is_a_descent_direction_on_a_contractive_map(seed):
    cell = TanhCell(n=10, norm=0.5, seed=seed)
    x, a = normal(3, 10, seed=seed + 100), normal(3, 10, seed=seed + 200)
    got = torch.autograd.grad(DEQ(cell, adjoint=OneStep(), stop=TIGHT)(x).value, cell.W, a)
    want = torch.autograd.grad(DEQ(cell, adjoint=EXACT, stop=TIGHT)(x).value, cell.W, a)
    assert cosine(got, want) > 0


@pytest.mark.parametrize("terms", [1, 2, 5, 20])
def test_neumann_is_the_truncated_series(terms):
    system = tanh_system(radius=0.8)
    solution = solve(system, adjoint=Neumann(terms), stop=TIGHT)
    jacobian = (1 - system.root.square())[:, :, None] * system.W.detach()
    u = term = system.cotangent[:, :, None]
    for _ in range(terms):
        term = jacobian.mT @ term
        u = u + term
    want = torch.autograd.grad(system.f(system.root, system.W, system.x), (system.W, system.x), u[:, :, 0])
    assert relative_error(gradients(solution, system), want) <= 1e-11
    assert solution.backward.steps.tolist() == [terms] * 3


@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (1, 0.5), (5, 0.5), (4, 1.0), (3, 1.3)])
def test_phantom_is_a_damped_unroll_from_the_root(steps, damping):
    system = tanh_system(radius=0.8)
    solution = solve(system, adjoint=Phantom(steps, damping), stop=TIGHT)
    z = system.root
    for _ in range(steps):
        z = (1 - damping) * z + damping * system.f(z, system.W, system.x)
    want = torch.autograd.grad(z, (system.W, system.x), system.cotangent)
    assert relative_error(gradients(solution, system), want) <= 1e-11


def test_approximate_adjoints_keep_the_value():
    system = tanh_system(radius=0.8)
    with torch.no_grad():
        value = solve(system, solver=Broyden()).value
    for adjoint in FIRST_ORDER[:-1]:
        assert torch.equal(solve(system, solver=Broyden(), adjoint=adjoint).value, value)


def test_shine_requires_broyden():
    with pytest.raises(ValueError, match=r"solver=Broyden\(\)"):
        solve(tanh_system(), adjoint=Shine())


def test_shine_improves_with_refinement():
    system = tanh_system(n=12, radius=0.9, seed=1)
    errors, angles = [], []
    for refine in (0, 5, 80):
        solution = solve(system, system.near(), solver=Broyden(), adjoint=Shine(refine=refine), stop=TIGHT)
        got = gradients(solution, system)
        errors.append(relative_error(got, system.truth()))
        angles.append(cosine(got, system.truth()))
        assert solution.backward.steps.tolist() == [refine] * 3
    one_step = gradients(solve(system, system.near(), adjoint=OneStep(), stop=TIGHT), system)
    assert errors[0] < relative_error(one_step, system.truth())
    assert errors[1] < errors[0]
    assert errors[2] <= 1e-6
    assert angles[0] > 0.5


def test_unroll_is_the_hand_written_loop():
    system = tanh_system(radius=0.9)
    solution = solve(system, solver=Picard(), adjoint=Unroll(), stop=budget(7))
    z = system.z0
    for _ in range(7):
        z = system.f(z, system.W, system.x)
    assert torch.equal(solution.value, z)
    assert (
        relative_error(gradients(solution, system), torch.autograd.grad(z, (system.W, system.x), system.cotangent))
        < 1e-15
    )
    assert solution.stats.nfe == 7


def test_unroll_carries_the_gradient_to_the_start():
    system = tanh_system(radius=0.9)
    z0 = system.near(0.5).requires_grad_()
    solution = solve(system, z0, solver=Picard(), adjoint=Unroll(), stop=budget(3))
    z = z0
    for _ in range(3):
        z = system.f(z, system.W, system.x)
    want = torch.autograd.grad(z, z0, system.cotangent)
    assert relative_error(torch.autograd.grad(solution.value, z0, system.cotangent), want) < 1e-14


def test_implicit_gives_the_start_no_gradient():
    system = tanh_system(radius=0.9)
    z0 = system.near(0.1).requires_grad_()
    for adjoint in (Implicit(), Implicit(any_order=True), OneStep(), Phantom(), Neumann(), Reversible(0.1)):
        solution = solve(system, z0, adjoint=adjoint, stop=Stop(max_steps=20))
        assert torch.autograd.grad(solution.value.sum(), z0, allow_unused=True) == (None,)


class DropoutCell(nn.Module):
    def __init__(self, n=6, p=0.4):
        super().__init__()
        self.inner, self.drop = TanhCell(n), VariationalDropout(p)

    def forward(self, z, x):
        return self.drop(self.inner(z, x))


@pytest.mark.parametrize("solver", [Picard(), Anderson()])
@pytest.mark.parametrize("make", [TanhCell, DropoutCell])
def test_checkpointed_unroll_equals_the_plain_one(make, solver):
    cell, x, a = make(), normal(3, 6, seed=1).requires_grad_(), normal(3, 6, seed=2)
    results = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        deq = DEQ(cell, solver=solver, adjoint=Unroll(checkpoint), stop=budget(6))
        solution = deq(x)
        results.append((solution.value, *torch.autograd.grad(solution.value, (*cell.parameters(), x), a)))
    assert torch.equal(results[0][0], results[1][0])
    assert relative_error(results[1][1:], results[0][1:]) <= 1e-14


def test_checkpointing_saves_memory():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 160), nn.Linear(160, 8)

        def forward(self, z, x):
            return 0.5 * torch.tanh(self.down(torch.tanh(self.up(z))) + x)

    x = normal(8, 8, dtype=torch.float32)
    graphs = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        deq = DEQ(Wide(), solver=Picard(), adjoint=Unroll(checkpoint), stop=budget(40))
        graphs.append(eq.memory_report(deq, x).graph)
    assert graphs[1] < 0.2 * graphs[0]


@pytest.mark.parametrize("beta", [0.2, 0.5])
def test_reversible_equals_autograd_through_its_recurrence(beta):
    system = tanh_system(radius=0.8)
    solution = solve(system, adjoint=Reversible(beta), stop=budget(12))
    before = now = system.z0
    for _ in range(12):
        before, now = now, (1 - beta) * before + beta * system.f(now, system.W, system.x)
    assert relative_error(solution.value, now) <= 1e-14
    want = torch.autograd.grad(now, (system.W, system.x), system.cotangent)
    assert relative_error(gradients(solution, system), want) <= 1e-10
    assert solution.backward.nfe == 24
    assert float(solution.backward.residual.max()) <= 1e-10


def test_reversible_warns_when_the_start_is_not_recovered():
    system = tanh_system(radius=0.8, dtype=torch.float32)
    solution = solve(system, adjoint=Reversible(0.9), stop=budget(60))
    with pytest.warns(EquilibriumWarning, match=r"lower beta=0.9 or max_steps=60"):
        gradients(solution, system)
    assert float(solution.backward.residual.max()) > 1e-3
    assert not bool((solution.backward.status == Status.CONVERGED).any())


@pytest.mark.parametrize("adjoint", [*FIRST_ORDER, Unroll(), Implicit(any_order=True)], ids=repr)
def test_value_is_the_same_with_and_without_gradients(adjoint):
    system = tanh_system(radius=0.8)
    options = {"solver": Broyden(), "adjoint": adjoint, "stop": Stop(max_steps=12)}
    value = solve(system, **options).value
    with torch.no_grad():
        plain = solve(system, **options).value
    assert value.requires_grad
    assert not plain.requires_grad
    # A solve that records a graph keeps its history in other tensors, and so rounds differently.
    assert relative_error(value, plain) <= (1e-10 if isinstance(adjoint, Unroll) else 0.0)


def test_value_is_the_same_in_train_and_eval_mode():
    deq, x = DEQ(TanhCell()), normal(5, 6)
    trained = deq.train()(x)
    with torch.no_grad():
        evaluated = deq.eval()(x)
    assert torch.equal(trained.value, evaluated.value)
    assert torch.equal(trained.stats.steps, evaluated.stats.steps)
    assert trained.stats.nfe == evaluated.stats.nfe + 1  # the evaluation that carries the gradient


@pytest.mark.parametrize("name", sorted(ADJOINTS))
def test_adjoints_are_known_by_name(name):
    assert as_adjoint(name) == ADJOINTS[name]()
    system = tanh_system(radius=0.5)
    by_name = solve(system, solver="broyden", adjoint=name, stop=Stop(max_steps=15))
    by_object = solve(system, solver=Broyden(), adjoint=ADJOINTS[name](), stop=Stop(max_steps=15))
    assert relative_error(gradients(by_name, system), gradients(by_object, system)) == 0


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("implict", ValueError, "did you mean 'implicit'"),
        (Implicit, TypeError, r"pass an instance, Implicit\(\)"),
        (3, TypeError, "int"),
    ],
)
def test_a_wrong_adjoint_is_refused(given, error, words):
    with pytest.raises(error, match=words):
        solve(tanh_system(), adjoint=given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Neumann(0),
        lambda: Phantom(0),
        lambda: Phantom(damping=0.0),
        lambda: Reversible(1.0),
        lambda: Reversible(0.0),
        lambda: Shine(-1),
        lambda: Shine(1.5),
    ],
)
def test_wrong_settings_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()


# Second derivatives that would be wrong are refused


@pytest.mark.parametrize("adjoint", FIRST_ORDER, ids=repr)
def test_create_graph_is_refused_and_the_option_named(adjoint):
    system = tanh_system(radius=0.5)
    solution = solve(system, solver=Broyden(), adjoint=adjoint, stop=Stop(max_steps=15))
    name = type(adjoint).__name__
    with pytest.raises(RuntimeError, match=rf"{name} adjoint.*Implicit\(any_order=True\)"):
        torch.autograd.grad(solution.value.sum(), system.W, create_graph=True)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_torch_func_with_the_default_adjoint_is_refused_and_the_option_named(transform):
    system = tanh_system(radius=0.5)
    with pytest.raises(RuntimeError, match=r"Implicit\(any_order=True\)"):
        transform(lambda x: fixed_point(layer, system.z0, system.W, x).value.sum())(system.x)
    with pytest.raises(RuntimeError, match=r"Implicit\(any_order=True\)"):
        torch.vmap(lambda x: fixed_point(layer, x[None], system.W, x[None]).value)(system.x)


# Conduct


def test_a_second_backward_on_a_kept_graph_gives_the_same_gradient():
    system = tanh_system()
    for adjoint in (EXACT, ANY_ORDER, Neumann(3), Phantom(), OneStep(), Unroll()):
        solution = solve(system, adjoint=adjoint, stop=Stop(max_steps=40))
        first = torch.autograd.grad(solution.value, (system.W, system.x), system.cotangent, retain_graph=True)
        second = torch.autograd.grad(solution.value, (system.W, system.x), system.cotangent, retain_graph=True)
        other = torch.autograd.grad(solution.value, (system.W, system.x), 2 * system.cotangent)
        assert relative_error(second, first) == 0
        assert relative_error([g / 2 for g in other], first) <= 1e-12


def test_a_second_reversible_backward_gives_the_same_gradient():
    system = tanh_system(radius=0.5)
    solution = solve(system, adjoint=Reversible(0.2), stop=budget(10))
    first = torch.autograd.grad(solution.value, (system.W, system.x), system.cotangent, retain_graph=True)
    assert relative_error(gradients(solution, system), first) == 0


@pytest.mark.parametrize("adjoint", [EXACT, ANY_ORDER], ids=["implicit", "any_order"])
def test_two_forwards_before_one_backward(adjoint):
    cell, deq_x, a = TanhCell(), normal(2, 3, 6, seed=1), normal(2, 3, 6, seed=2)
    deq = DEQ(cell, adjoint=adjoint, stop=TIGHT)
    apart = [torch.autograd.grad(deq(x).value, cell.W, g)[0] for x, g in zip(deq_x, a, strict=True)]
    values = [deq(x).value for x in deq_x]
    sum((v * g).sum() for v, g in zip(values, a, strict=True)).backward()
    assert relative_error(cell.W.grad, apart[0] + apart[1]) <= 1e-13


def test_gradients_accumulate_over_backward_calls():
    cell, xs = TanhCell(), normal(2, 3, 6, seed=1)
    deq = DEQ(cell, adjoint=EXACT, stop=TIGHT)
    apart = [torch.autograd.grad(deq(x).value.sum(), cell.W)[0] for x in xs]
    for x in xs:
        deq(x).value.sum().backward()
    assert relative_error(cell.W.grad, apart[0] + apart[1]) <= 1e-13


@pytest.mark.parametrize("adjoint", [EXACT, ANY_ORDER, Reversible(0.1)], ids=["implicit", "any_order", "reversible"])
@pytest.mark.parametrize("wanted", ["W", "x"])
def test_gradient_to_one_side_only(wanted, adjoint):
    system = tanh_system(radius=0.4)
    stop = budget(40) if isinstance(adjoint, Reversible) else TIGHT
    both = dict(zip(("W", "x"), gradients(solve(system, adjoint=adjoint, stop=stop), system), strict=True))
    fixed = {"W": "x", "x": "W"}[wanted]
    getattr(system, fixed).requires_grad_(False)
    value = solve(system, adjoint=adjoint, stop=stop).value
    (value * system.cotangent).sum().backward()
    assert getattr(system, fixed).grad is None
    assert relative_error(getattr(system, wanted).grad, both[wanted]) <= 1e-12


def test_nothing_to_differentiate():
    system = tanh_system(radius=0.5)
    W, x = system.W.detach(), system.x.detach()
    for adjoint in (Implicit(), Implicit(any_order=True), OneStep(), Phantom(), Neumann(), Reversible(0.1), Unroll()):
        value = fixed_point(layer, system.z0, W, x, adjoint=adjoint, stop=Stop(rtol=1e-9, max_steps=40)).value
        assert relative_error(value, system.root) <= (0.2 if isinstance(adjoint, Reversible) else 1e-7)
        if value.requires_grad:  # a gradient asked for elsewhere must not be disturbed
            other = torch.ones((), dtype=torch.float64, requires_grad=True)
            (value.sum() * other).backward()
            assert relative_error(other.grad, value.sum()) == 0


@pytest.mark.parametrize(
    "adjoint", [Implicit(), Implicit(any_order=True), Neumann(), OneStep(), Reversible(0.5), Unroll()], ids=repr
)
def test_a_map_that_does_not_depend_on_the_state(adjoint):
    x = normal(3, 4).requires_grad_()
    stop = budget(40) if isinstance(adjoint, Reversible) else Stop()
    solution = fixed_point(lambda z, x: torch.tanh(x), torch.zeros_like(x), x, adjoint=adjoint, stop=stop)
    tolerance = 1e-5 if isinstance(adjoint, Reversible) else 1e-15
    assert relative_error(solution.value, torch.tanh(x)) <= tolerance
    got = torch.autograd.grad(solution.value.sum(), x)
    assert relative_error(got, 1 - torch.tanh(x) ** 2) <= tolerance


def test_a_leaf_of_the_state_that_stays_as_it_is():
    """f((a, b)) = (a, g(b)): b has its gradient, and a, which has none, does not get in the way."""
    system = tanh_system(radius=0.8)
    constant = normal(3, 2, seed=5)

    def f(state, W, x):
        return state[0], layer(state[1], W, x)

    for adjoint in (EXACT, ANY_ORDER, Neumann(200)):
        solution = fixed_point(f, (constant, system.z0), system.W, system.x, adjoint=adjoint, stop=TIGHT)
        assert relative_error(solution.value[0], constant) <= 1e-13  # weights that sum to one up to rounding
        got = torch.autograd.grad(solution.value[1], (system.W, system.x), system.cotangent)
        assert relative_error(got, system.truth()) <= 1e-10


def test_a_leaf_of_the_state_that_is_constant():
    system = tanh_system(radius=0.8)

    def f(state, W, x):
        return x, layer(state[1], W, state[0])

    for adjoint in (EXACT, ANY_ORDER):
        solution = fixed_point(f, (system.z0, system.z0), system.W, system.x, adjoint=adjoint, stop=TIGHT)
        got = torch.autograd.grad(solution.value[1], (system.W, system.x), system.cotangent)
        assert relative_error(got, system.truth()) <= 1e-10


def test_leaves_that_change_places():
    """f((a, b)) = (b, a/2 + x) hands one leaf on untouched; its adjoint must not share memory with its argument."""
    x = normal(3, 4, seed=1).requires_grad_()
    a, b = normal(3, 4, seed=2), normal(3, 4, seed=3)
    for adjoint in (
        Implicit(stop=TIGHT),
        Implicit(stop=TIGHT, any_order=True),
        Implicit(solver=Broyden(), stop=TIGHT),
        Neumann(120),
    ):
        solution = fixed_point(lambda z, x: (z[1], z[0] / 2 + x), (0 * a, 0 * b), x, adjoint=adjoint, stop=TIGHT)
        assert relative_error(solution.value, (2 * x, 2 * x)) <= 1e-12
        assert relative_error(torch.autograd.grad(solution.value, x, (a, b)), 2 * (a + b)) <= 1e-10


def test_an_identity_leaf_with_a_cotangent_is_reported():
    """I − J is singular there: no adjoint exists, and that must be said."""
    x = normal(3, 4, seed=1).requires_grad_()
    solution = fixed_point(lambda z, x: (z[0], z[1] / 2 + x), (0 * x, 0 * x), x, stop=TIGHT)
    with pytest.warns(EquilibriumWarning, match="gradients inexact"):
        torch.autograd.grad((solution.value[0] + solution.value[1]).sum(), x)
    assert not bool(solution.backward.ok.any())


def test_rows_without_a_cotangent_are_done_at_once():
    system = tanh_system(radius=0.9)
    solution = solve(system, stop=TIGHT)
    torch.autograd.grad(solution.value[1].sum(), system.x)
    assert solution.backward.steps[0] == solution.backward.steps[2] == 0
    assert solution.backward.steps[1] > 0
    assert solution.backward.status.tolist() == [Status.CONVERGED] * 3


def test_a_second_equilibrium_in_the_graph():
    first, second = TanhCell(seed=1), TanhCell(seed=2)
    x, a = normal(3, 6, seed=3).requires_grad_(), normal(3, 6, seed=4)
    lower, upper = (DEQ(cell, adjoint=EXACT, stop=TIGHT) for cell in (first, second))
    value = upper(torch.sin(lower(x).value)).value
    got = torch.autograd.grad(value, (first.W, second.W, x), a)
    z, w = torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(200):
        z = first(z, x)
    for _ in range(200):
        w = second(w, torch.sin(z))
    assert relative_error(got, torch.autograd.grad(w, (first.W, second.W, x), a)) <= 1e-10


CYCLE_FREE = [*FIRST_ORDER, Implicit(any_order=True), Unroll(), Unroll(checkpoint=True)]


@pytest.mark.parametrize("adjoint", CYCLE_FREE, ids=repr)
@pytest.mark.parametrize("backward", [False, True])
def test_a_solution_leaves_no_reference_cycle(adjoint, backward):
    """Memory must come back when the last name goes, not when the collector happens to run."""
    solver = Picard() if isinstance(adjoint, Unroll) else Broyden()
    deq = DEQ(TanhCell(), solver=solver, adjoint=adjoint, stop=Stop(max_steps=15, rtol=1e-3))
    x = normal(3, 6)
    gc.collect()
    gc.disable()
    try:
        solution = deq(x)
        if backward:
            solution.value.sum().backward()
        watched = [weakref.ref(item) for item in (solution, solution.value, solution.problem)]
        del solution
        assert [reference() for reference in watched] == [None] * 3
    finally:
        gc.enable()


def test_backward_statistics():
    system = tanh_system(radius=0.8)
    solution = solve(system)
    assert solution.backward is None
    torch.autograd.grad(solution.value, system.W, system.cotangent)
    stats = solution.backward
    assert stats.status.tolist() == [Status.CONVERGED] * 3
    assert bool((stats.residual <= 1e-4).all())
    assert stats.nfe == int(stats.steps.max()) + 2  # the iterates measured, and the product that goes to W
    assert stats.solver_bytes > 0


@pytest.mark.parametrize("any_order", [False, True])
def test_any_failed_backward_warns_once_per_map(any_order):
    system = tanh_system(radius=0.95)
    hard = Implicit(stop=Stop(rtol=1e-12, max_steps=3), any_order=any_order)

    def first(z, W, x):
        return layer(z, W, x)

    def second(z, W, x):
        return layer(z, W, x)

    def run(f):
        solution = fixed_point(f, system.z0, system.W, system.x, adjoint=hard)
        gradients(solution, system)
        return solution

    with pytest.warns(EquilibriumWarning, match="MAX_STEPS") as caught:
        solution = run(first)
    assert len(caught) == 1
    assert "3 of 3 systems" in str(caught[0].message)
    assert solution.backward.status.tolist() == [Status.MAX_STEPS] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(first).backward.status.tolist() == [Status.MAX_STEPS] * 3
    with pytest.warns(EquilibriumWarning, match="MAX_STEPS"):
        run(second)


@pytest.mark.parametrize("any_order", [False, True])
def test_a_failed_backward_raises_on_request(any_order):
    system = tanh_system(radius=0.95)
    hard = Implicit(stop=Stop(rtol=1e-12, max_steps=3), any_order=any_order, throw=True)
    solution = solve(system, adjoint=hard)
    for _ in range(2):
        with pytest.raises(EquilibriumError, match=r"backward solve.*MAX_STEPS"):
            torch.autograd.grad(solution.value, system.W, system.cotangent, retain_graph=True)


def test_a_backward_pass_with_a_fixed_budget_does_not_warn():
    system = tanh_system(radius=0.5)
    solution = solve(system, adjoint=Implicit(stop=Stop(rtol=0, max_steps=60)), stop=TIGHT)
    assert relative_error(gradients(solution, system), system.truth()) <= 1e-10
    assert solution.backward.nfe == 61


def accumulated(value):
    """Every leaf in the graph of a tensor that would receive a gradient."""
    seen, stack, leaves = set(), [value.grad_fn], []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return leaves


@pytest.mark.parametrize("adjoint", [*FIRST_ORDER, Implicit(any_order=True)], ids=repr)
def test_no_gradient_lands_on_internal_tensors(adjoint):
    system = tanh_system(radius=0.5)
    solution = solve(system, solver=Broyden(), adjoint=adjoint, stop=Stop(max_steps=15))
    leaves = accumulated(solution.value)
    solution.value.sum().backward()
    own = {id(system.W), id(system.x)}
    assert own <= {id(leaf) for leaf in leaves}
    assert all(leaf.grad is None for leaf in leaves if id(leaf) not in own)


def test_no_grad_and_inference_mode():
    deq, x = DEQ(TanhCell()), normal(3, 6)
    reference = deq(x).value.detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            for adjoint in (*FIRST_ORDER[:-1], Unroll(), Implicit(any_order=True)):
                with eq.override(deq, adjoint=adjoint, solver=Broyden() if isinstance(adjoint, Shine) else Anderson()):
                    solution = deq(x)
                assert not solution.value.requires_grad
                assert solution.backward is None
                assert relative_error(solution.value, reference) <= 1e-4


@pytest.mark.parametrize("adjoint", [*FIRST_ORDER, Implicit(any_order=True), Unroll()], ids=repr)
def test_an_empty_batch(adjoint):
    deq = DEQ(TanhCell(), solver=Broyden(), adjoint=adjoint)
    x = normal(0, 6).requires_grad_()
    solution = deq(x)
    assert solution.value.shape == (0, 6)
    assert solution.stats.status.shape == (0,)
    solution.value.sum().backward()
    assert torch.equal(deq.cell.W.grad, torch.zeros(6, 6, dtype=torch.float64))
    assert x.grad.shape == (0, 6)


class LinearCell(nn.Module):
    def __init__(self, n=24):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(n, n)
        with torch.no_grad():
            self.linear.weight.mul_(0.7 / torch.linalg.matrix_norm(self.linear.weight, 2))

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


@pytest.mark.parametrize("any_order", [False, True])
def test_autocast(any_order):
    deq = DEQ(LinearCell(), adjoint=Implicit(any_order=any_order))
    x = normal(8, 24, dtype=torch.float32).requires_grad_()
    parameters = (*deq.parameters(), x)
    want = torch.autograd.grad(deq(x).value.square().sum(), parameters)
    dtypes = []
    handle = deq.cell.linear.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = deq(x)
        loss = solution.value.float().square().sum()
    got = torch.autograd.grad(loss, parameters)  # outside of autocast, as training loops do
    handle.remove()
    assert set(dtypes) == {torch.bfloat16}
    assert solution.value.dtype == torch.float32
    assert all_converged(solution.stats)
    assert all_converged(solution.backward)
    assert [g.dtype for g in got] == [torch.float32] * 3
    assert cosine(got, want) > 0.99
    assert relative_error(got, want) < 0.1


@pytest.mark.parametrize("any_order", [False, True])
def test_states_in_bfloat16(any_order):
    deq = DEQ(LinearCell(), adjoint=Implicit(any_order=any_order))
    x = normal(8, 24, dtype=torch.float32)
    want = torch.autograd.grad(deq(x).value.square().sum(), deq.parameters())
    deq = deq.to(torch.bfloat16)
    solution = deq(x.to(torch.bfloat16))
    assert solution.value.dtype == torch.bfloat16
    got = torch.autograd.grad(solution.value.float().square().sum(), deq.parameters())
    assert [g.dtype for g in got] == [torch.bfloat16] * 2
    assert cosine(got, want) > 0.99
    assert all_converged(solution.stats)
