"""The theorems as constructions: stacked equilibria, deep networks, chunked sequences, dense gradients."""

import pytest
import torch
from torch import nn

from equipoise import DEQ, Anderson, Broyden, Implicit, NewtonKrylov, Picard, Stop, fixed_point, spectral_radius
from equipoise.theory import DeepNetCell, StackedCell, dense_gradient, dense_jacobian, solve_in_chunks
from tests.gradients import EXACT, ROBUST, TIGHT, TanhCell, layer, normal, relative_error, tanh_system

# Dense gradients, which everything else is compared with


def test_dense_jacobian_of_a_tanh_map():
    system = tanh_system(n=5, batch=3)
    got = dense_jacobian(lambda z: layer(z, system.W, system.x), system.root)
    want = (1 - system.root.square())[:, :, None] * system.W
    assert got.shape == (3, 5, 5)
    assert relative_error(got, want) <= 1e-14


def test_dense_jacobian_of_states_with_more_axes():
    z = normal(2, 3, 4)
    got = dense_jacobian(lambda z: z.sin().flip(1), z)
    want = torch.func.vmap(torch.func.jacrev(lambda row: row.view(3, 4).sin().flip(0).reshape(-1)))(z.reshape(2, 12))
    assert relative_error(got, want) <= 1e-14


@pytest.mark.parametrize("radius", [0.5, 0.99, 2.0])
def test_dense_gradient_equals_the_formula_written_out(radius):
    system = tanh_system(radius=radius)
    got = dense_gradient(lambda z: layer(z, system.W, system.x), system.root, system.cotangent, (system.W, system.x))
    assert relative_error(got, system.truth()) <= 1e-11


def test_dense_gradient_equals_finite_differences():
    """Central differences of the root itself, found by Newton's method at each shifted parameter."""
    system = tanh_system(n=3, batch=2, radius=0.8)
    W, x = system.W.detach(), system.x.detach()

    def value(W, x):
        z = system.root
        for _ in range(8):
            J = (1 - layer(z, W, x).square())[:, :, None] * W
            g = layer(z, W, x) - z
            z = z + torch.linalg.solve(torch.eye(3, dtype=torch.float64) - J, g[:, :, None])[:, :, 0]
        return float((z * system.cotangent).sum())

    got = dense_gradient(lambda z: layer(z, system.W, system.x), system.root, system.cotangent, (system.W, system.x))
    h = 1e-5
    for gradient, which in zip(got, (0, 1), strict=True):
        numeric = torch.zeros_like(gradient)
        for i in range(gradient.numel()):
            shift = torch.zeros_like(gradient)
            shift.view(-1)[i] = h
            ends = [value(W + s * shift, x) if which == 0 else value(W, x + s * shift) for s in (1, -1)]
            numeric.view(-1)[i] = (ends[0] - ends[1]) / (2 * h)
        assert relative_error(gradient, numeric) <= 1e-8


def test_dense_gradient_of_a_tensor_that_is_not_used_is_zero():
    system, other = tanh_system(), torch.ones(2, dtype=torch.float64, requires_grad=True)
    got = dense_gradient(lambda z: layer(z, system.W, system.x), system.root, system.cotangent, (other,))
    assert torch.equal(got[0], torch.zeros(2, dtype=torch.float64))


# Theorem 2: two stacked equilibria are one


class Upper(nn.Module):
    """A cell of width 3 on top of a state of width 5."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(0.3 * torch.linalg.qr(normal(3, 3, seed=11))[0])
        self.U = nn.Parameter(0.5 * normal(3, 5, seed=12))

    def forward(self, upper, lower):
        return torch.sin(upper @ self.W.mT + lower @ self.U.mT)


@pytest.fixture
def stack():
    first, second = TanhCell(n=5, norm=0.8, seed=3), Upper()
    x = normal(4, 5, seed=4).requires_grad_()
    return first, second, x


def nested(first, second, x):
    lower = fixed_point(first, torch.zeros_like(x), x, adjoint=EXACT, stop=TIGHT).value
    return lower, fixed_point(second, x.new_zeros(4, 3), lower, adjoint=EXACT, stop=TIGHT).value


@pytest.mark.parametrize("solver", [Anderson(), Broyden(), Picard(), NewtonKrylov()], ids=repr)
def test_one_joint_equilibrium_equals_two_nested_ones(stack, solver):
    first, second, x = stack
    joint = DEQ(
        StackedCell(first, second),
        solver=solver,
        adjoint=EXACT,
        stop=Stop(rtol=1e-13, max_steps=400),
        initial_state=lambda x: (torch.zeros_like(x), x.new_zeros(len(x), 3)),
    )
    lower, upper = joint(x).value
    want_lower, want_upper = nested(first, second, x)
    assert relative_error((lower, upper), (want_lower, want_upper)) <= 1e-10
    a = normal(4, 3, seed=5)
    tensors = (first.W, second.W, second.U, x)
    got, want = torch.autograd.grad(upper, tensors, a), torch.autograd.grad(want_upper, tensors, a)
    for mine, true in zip(got, want, strict=True):
        assert relative_error(mine, true) <= 1e-9


def test_the_radius_of_the_joint_map_is_the_larger_of_the_two(stack):
    first, second, x = stack
    x = x.detach()
    lower, upper = (t.detach() for t in nested(first, second, x))
    cell = StackedCell(first, second)
    joint = torch.cat([lower, upper], dim=1)
    jacobian = dense_jacobian(lambda z: torch.cat(cell((z[:, :5], z[:, 5:]), x), dim=1), joint)
    parts = [dense_jacobian(lambda z: first(z, x), lower), dense_jacobian(lambda z: second(z, lower), upper)]
    radii = [torch.linalg.eigvals(J).abs().amax(dim=1) for J in parts]
    want = torch.maximum(*radii)
    assert relative_error(torch.linalg.eigvals(jacobian).abs().amax(dim=1), want) <= 1e-9
    assert torch.equal(jacobian[:, :5, 5:], torch.zeros(4, 5, 3, dtype=torch.float64))  # lower does not see upper
    problem = DEQ(cell, initial_state=lambda x: (torch.zeros_like(x), x.new_zeros(len(x), 3))).problem(x)
    estimate = spectral_radius(problem, (lower, upper), steps=800, window=600)
    assert float(((estimate - want) / want).abs().max()) <= 2e-2


# Theorem 3: a deep network is an equilibrium

WIDTHS = (7, 3, 6, 5, 2)


def deep_network():
    torch.manual_seed(0)
    activations = [nn.Tanh(), nn.ReLU(), nn.Sigmoid(), nn.SiLU(), nn.Identity()]
    pairs = zip((4, *WIDTHS[:-1]), WIDTHS, activations, strict=True)
    return [nn.Sequential(nn.Linear(a, b), activation).double() for a, b, activation in pairs]


def forward_pass(layers, x):
    outputs = []
    for each in layers:
        x = each(x)
        outputs.append(x)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_plain_steps_reproduce_the_network_from_any_start(seed):
    layers, x = deep_network(), normal(3, 4, seed=5)
    cell = DeepNetCell(layers, WIDTHS)
    assert cell.initial_state(x).shape == (3, 23)
    z0 = cell.initial_state(x) if seed is None else 10 * normal(3, 23, seed=seed)
    deq = DEQ(cell, solver=Picard(), stop=Stop(rtol=0, max_steps=len(WIDTHS), select="last"))
    with torch.no_grad():
        value = deq(x, z0=z0).value
        want = forward_pass(layers, x)
    assert relative_error(value, want) <= 1e-15
    assert relative_error(cell.output(value), nn.Sequential(*layers)(x)) <= 1e-15
    assert cell.output(value).shape == (3, 2)
    short = DEQ(cell, solver=Picard(), stop=Stop(rtol=0, max_steps=len(WIDTHS) - 1, select="last"))
    if seed is not None:
        assert relative_error(cell.output(short(x, z0=z0).value), cell.output(want)) > 1e-3


@pytest.mark.parametrize("solver", [Broyden(), NewtonKrylov(), Anderson(), Picard()], ids=repr)
def test_root_solvers_find_the_network_and_its_gradient(solver):
    layers, x = deep_network(), normal(3, 4, seed=5).requires_grad_()
    cell = DeepNetCell(layers, WIDTHS)
    adjoint = Implicit(solver=solver, stop=TIGHT, throw=True)
    solution = DEQ(cell, solver=solver, adjoint=adjoint, stop=TIGHT)(x)
    assert bool(solution.stats.ok.all())
    a = normal(3, 2, seed=6)
    want = nn.Sequential(*layers)(x)
    assert relative_error(cell.output(solution.value), want) <= 1e-12
    got = torch.autograd.grad(cell.output(solution.value), (*cell.parameters(), x), a)
    assert relative_error(got, torch.autograd.grad(want, (*cell.parameters(), x), a)) <= 1e-11


def test_the_jacobian_of_a_deep_network_is_nilpotent():
    cell, x = DeepNetCell(deep_network(), WIDTHS), normal(3, 4, seed=5)
    jacobian = dense_jacobian(lambda z: cell(z, x), normal(3, 23, seed=7))
    power = torch.linalg.matrix_power(jacobian, len(WIDTHS))
    assert torch.equal(power, torch.zeros_like(power))


@pytest.mark.parametrize(("layers", "widths"), [(2, (3,)), (0, ())])
def test_a_wrong_number_of_widths_is_refused(layers, widths):
    with pytest.raises(ValueError, match="give one width per layer"):
        DeepNetCell([nn.Linear(3, 3) for _ in range(layers)], widths)


# Long sequences in chunks


class Causal:
    """A causal map on (B, T, d): each position sees itself and everything before it."""

    def __init__(self, d=3):
        self.own = (0.4 * torch.linalg.qr(normal(d, d, seed=1))[0]).requires_grad_()
        self.past = (0.3 * torch.linalg.qr(normal(d, d, seed=2))[0]).requires_grad_()

    def __call__(self, z, x, history):
        whole = torch.cat([history, z], dim=1)  # (B, M + T, d)
        before = whole.cumsum(dim=1) - whole
        count = torch.arange(whole.shape[1], dtype=z.dtype).clamp_min(1)[:, None]
        mean = (before / count)[:, history.shape[1] :]
        return torch.tanh(z @ self.own.mT + mean @ self.past.mT + x)


@pytest.mark.parametrize("lengths", [(8,), (4, 4), (3, 1, 4), (1,) * 8], ids=str)
@pytest.mark.parametrize(
    "adjoint", [EXACT, Implicit(solver=ROBUST, stop=TIGHT, any_order=True)], ids=["implicit", "any_order"]
)
def test_chunks_equal_one_shot(lengths, adjoint):
    f, x, a = Causal(), normal(2, 8, 3, seed=4).requires_grad_(), normal(2, 8, 3, seed=5)
    none = x.new_zeros(2, 0, 3)
    tensors = (f.own, f.past, x)
    whole = fixed_point(f, torch.zeros_like(x), x, none, adjoint=adjoint, stop=TIGHT).value
    chunks = x.split(list(lengths), dim=1)
    solutions = solve_in_chunks(
        f,
        [torch.zeros_like(chunk) for chunk in chunks],
        [(chunk,) for chunk in chunks],
        history=none,
        carry=lambda history, z: torch.cat([history, z], dim=1),
        adjoint=adjoint,
        stop=TIGHT,
    )
    assert len(solutions) == len(lengths)
    value = torch.cat([solution.value for solution in solutions], dim=1)
    assert relative_error(value, whole) <= 1e-8
    got, want = torch.autograd.grad(value, tensors, a), torch.autograd.grad(whole, tensors, a)
    for mine, true in zip(got, want, strict=True):
        assert relative_error(mine, true) <= 1e-8
    assert all(bool(solution.backward.ok.all()) for solution in solutions)


def test_a_detached_history_loses_part_of_the_gradient():
    """The test above can fail: cutting the chain between chunks changes the gradient, not the value."""
    f, x, a = Causal(), normal(2, 8, 3, seed=4).requires_grad_(), normal(2, 8, 3, seed=5)
    results = []
    for cut in (False, True):
        chunks = x.split(4, dim=1)
        solutions = solve_in_chunks(
            f,
            [torch.zeros_like(chunk) for chunk in chunks],
            [(chunk,) for chunk in chunks],
            history=x.new_zeros(2, 0, 3),
            carry=lambda history, z, cut=cut: torch.cat([history, z.detach() if cut else z], dim=1),
            adjoint=EXACT,
            stop=TIGHT,
        )
        value = torch.cat([solution.value for solution in solutions], dim=1)
        results.append((value.detach(), torch.autograd.grad(value, x, a)[0]))
    assert relative_error(results[0][0], results[1][0]) <= 1e-12
    assert relative_error(results[0][1], results[1][1]) > 1e-3


def test_chunks_and_inputs_must_match():
    x = normal(2, 4, 3)
    for starts, inputs in (([x], []), ([], [])):
        with pytest.raises(ValueError, match="give one of each per chunk"):
            solve_in_chunks(Causal(), starts, inputs, history=None, carry=lambda history, z: history)
