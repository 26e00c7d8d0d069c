"""Jacobian penalty and fixed-point correction against their formulas."""

import math

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import DEQ, Picard, Stop, fixed_point, fixed_point_correction, jacobian_penalty
from equipoise.nn import VariationalDropout, weight_norm
from tests.gradients import EXACT, TIGHT, TanhCell, layer, normal, relative_error, tanh_system


def linear_problem(W, batch):
    """The solution of z = W z + x, whose Jacobian is W everywhere."""
    return fixed_point(lambda z, W: z @ W.mT, torch.zeros(batch, len(W), dtype=W.dtype), W)


def test_the_penalty_of_a_linear_map_estimates_its_frobenius_norm():
    n, draws = 6, 1000
    W = normal(n, n, seed=1).requires_grad_()
    torch.manual_seed(0)
    penalty = jacobian_penalty(linear_problem(W, batch=1), probes=draws)
    # v^T W W^T v of a normal v has mean tr(W W^T) and variance 2 ‖W W^T‖².
    mean = float(W.detach().square().sum()) / n
    deviation = math.sqrt(2) * float((W @ W.mT).detach().norm()) / n
    assert penalty.dim() == 0
    assert abs(penalty.item() - mean) <= 3 * deviation / math.sqrt(draws)


def test_draws_over_systems_count_like_probes():
    n, batch = 6, 1000
    W = normal(n, n, seed=1).requires_grad_()
    torch.manual_seed(0)
    penalty = jacobian_penalty(linear_problem(W, batch))
    mean = float(W.detach().square().sum()) / n
    deviation = math.sqrt(2) * float((W @ W.mT).detach().norm()) / n
    assert abs(penalty.item() - mean) <= 3 * deviation / math.sqrt(batch)


def test_the_gradient_of_a_linear_map_is_twice_its_weight_in_expectation():
    n, batch = 4, 20_000
    W = normal(n, n, seed=1).requires_grad_()
    torch.manual_seed(0)
    (got,) = torch.autograd.grad(jacobian_penalty(linear_problem(W, batch), probes=2), W)
    want = 2 * W.detach() / n
    # Its error is (S − I) W · 2/n with S the mean of 40,000 outer products.
    expected = math.sqrt((n + 1) / (2 * batch))
    assert relative_error(got, want) <= 3 * expected


def test_along_the_residual_it_is_the_growth_of_what_is_left():
    """Against the formula, gradient included."""
    W, x, z = normal(5, 5, seed=1).requires_grad_(), normal(3, 5, seed=2), normal(3, 5, seed=3)
    problem = fixed_point(lambda z, x: z @ W.mT + x, z, x, stop=Stop(max_steps=1), throw=False).problem
    penalty = jacobian_penalty(problem, z, along="residual")
    v = (z @ W.mT + x - z).detach()
    expected = ((v / v.norm(dim=1, keepdim=True)) @ W).square().sum() / 3
    assert relative_error(penalty, expected) <= 1e-12
    (got,), (want,) = (torch.autograd.grad(each, W) for each in (penalty, expected))
    assert relative_error(got, want) <= 1e-12


class Dropped(nn.Module):
    """A cell with a mask per system."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(normal(5, 5, seed=1))
        self.dropout = VariationalDropout(0.5, shared=())

    def initial_state(self, x):
        return torch.zeros_like(x)

    def forward(self, z, x):
        return torch.tanh(self.dropout(z) @ self.W.mT + x)


@pytest.mark.parametrize("along", ["random", "residual"])
def test_of_some_systems_it_is_that_of_a_smaller_batch(along):
    """With the masks of these systems, gradient included."""
    deq, x = DEQ(Dropped(), solver=Picard(), stop=Stop(rtol=0, max_steps=3)).train(), normal(6, 5, seed=2)
    torch.manual_seed(0)
    solution = deq(x)
    index = torch.arange(2)
    part, z = solution.problem.rows(index), solution.value[:2]
    found = []
    for given in ((solution, None, {"systems": 2}), (part, z, {})):
        torch.manual_seed(1)
        penalty = jacobian_penalty(given[0], given[1], along=along, **given[2])
        found.append((penalty, *torch.autograd.grad(penalty, deq.cell.W)))
    assert relative_error(found[0][0], found[1][0]) <= 1e-12
    assert relative_error(found[0][1], found[1][1]) <= 1e-12
    torch.manual_seed(1)
    whole = jacobian_penalty(solution, along=along)
    assert relative_error(found[0][0], whole) > 1e-3
    torch.manual_seed(1)
    assert torch.equal(jacobian_penalty(solution, along=along, systems=6), whole)


def test_systems_that_cannot_be_taken_apart_are_all_looked_at():
    """f has their inputs from elsewhere, and needs all of them."""
    W, x = normal(3, 3, seed=1).requires_grad_(), normal(4, 3, seed=2)
    solution = fixed_point(lambda z: 0.3 * z @ W.mT + x, torch.zeros_like(x))
    whole, some = (jacobian_penalty(solution, along="residual", systems=count) for count in (None, 1))
    assert torch.equal(some, whole)


def test_a_direction_that_does_not_contract_is_seen_along_the_residual():
    """One of 200 directions grows by 0.98: 1/200 of it is in the mean over all of them."""
    diagonal = torch.full((200,), 0.1, dtype=torch.float64)
    diagonal[7] = 0.98
    start = torch.zeros(4, 200, dtype=torch.float64)
    solution = fixed_point(lambda z: diagonal * z + 1, start, solver=Picard(), stop=Stop(rtol=0, max_steps=12))
    torch.manual_seed(0)
    assert jacobian_penalty(solution, probes=50).item() == pytest.approx(0.01 * 199 / 200 + 0.98**2 / 200, rel=0.1)
    assert jacobian_penalty(solution, along="residual").item() == pytest.approx(0.98**2, rel=1e-6)


def test_a_residual_that_is_zero_or_not_finite_adds_nothing():
    z = torch.tensor([[0.0, 0.0], [1.0, 1.0], [math.inf, 1.0]], dtype=torch.float64)
    problem = fixed_point(lambda z: 0.5 * z, z, stop=Stop(max_steps=1), throw=False).problem
    assert jacobian_penalty(problem, z, along="residual").item() == pytest.approx(0.25 / 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"along": "sideways"}, "direction of the penalty.*sideways"),
        ({"along": "residual", "probes": 2}, "one residual"),
    ],
)
def test_directions_that_do_not_exist_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        jacobian_penalty(linear_problem(normal(3, 3, seed=1), batch=2), **options)


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_the_penalty_is_per_unknown(batch):
    """For f = c z it is c² · mean(v²) over all draws, whatever the batch size."""
    c = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    solution = fixed_point(lambda z: c * z, torch.ones(batch, 5, dtype=torch.float64), stop=Stop(max_steps=2))
    torch.manual_seed(3)
    penalty = jacobian_penalty(solution, probes=2)
    torch.manual_seed(3)
    squares = torch.stack([torch.randn(batch, 5, dtype=torch.float64) for _ in range(2)]).square().mean()
    assert relative_error(penalty, 0.49 * squares) <= 1e-14
    assert relative_error(torch.autograd.grad(penalty, c), 1.4 * squares) <= 1e-14


def test_a_tree_of_states_counts_all_its_unknowns():
    c = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    start = (torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 2, 2, dtype=torch.float64))
    solution = fixed_point(lambda z: (c * z[0], 0 * z[1]), start, stop=Stop(max_steps=2))
    torch.manual_seed(3)
    penalty = jacobian_penalty(solution)
    torch.manual_seed(3)
    draw = torch.randn(3, 4, dtype=torch.float64)
    assert relative_error(penalty, 0.49 * draw.square().sum() / 24) <= 1e-14


def test_the_penalty_at_a_root_equals_its_formula_and_differentiates_twice():
    system = tanh_system(n=5, batch=2, radius=0.8)
    solution = fixed_point(layer, system.z0, system.W, system.x, adjoint=EXACT, stop=TIGHT)
    torch.manual_seed(1)
    penalty = jacobian_penalty(solution)
    torch.manual_seed(1)
    v = torch.randn(2, 5, dtype=torch.float64)
    slope = 1 - torch.tanh(system.root @ system.W.mT + system.x).square()  # the root is a constant here
    want = ((v * slope) @ system.W).square().sum() / 10
    assert relative_error(penalty, want) <= 1e-11
    got = torch.autograd.grad(penalty, (system.W, system.x))
    assert relative_error(got, torch.autograd.grad(want, (system.W, system.x))) <= 1e-10


def test_gradient_flows_to_parameters_and_not_to_the_state():
    deq, x = DEQ(TanhCell(), adjoint=EXACT), normal(3, 6)
    z = normal(3, 6, seed=2).requires_grad_()
    jacobian_penalty(deq.problem(x), z).backward()
    assert z.grad is None
    assert float(deq.cell.W.grad.norm()) > 0
    # and none passes the implicit adjoint: its backward never runs
    solution = deq(x)
    jacobian_penalty(solution).backward()
    assert solution.backward is None


def test_loss_and_penalty_in_one_backward_pass_add_up():
    deq, x = DEQ(TanhCell(), adjoint=EXACT, stop=TIGHT), normal(3, 6)
    apart = []
    for part in ("loss", "penalty"):
        solution = deq(x)
        torch.manual_seed(0)
        value = solution.value.square().sum() if part == "loss" else jacobian_penalty(solution)
        apart.append(torch.autograd.grad(value, deq.cell.W)[0])
    solution = deq(x)
    torch.manual_seed(0)
    (solution.value.square().sum() + jacobian_penalty(solution)).backward()
    assert relative_error(deq.cell.W.grad, apart[0] + apart[1]) <= 1e-12


def test_the_masks_of_the_solve_are_used():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.W, self.drop = nn.Parameter(0.1 * normal(6, 6, seed=1)), VariationalDropout(0.5)

        def forward(self, z, x):
            return self.drop(z @ self.W.mT + x)

    cell, x = Cell(), normal(3, 6)
    torch.manual_seed(5)
    mask = (torch.rand(3, 6) >= 0.5).double() * 2
    torch.manual_seed(5)
    solution = DEQ(cell, stop=TIGHT)(x)
    torch.manual_seed(6)
    penalty = jacobian_penalty(solution)
    torch.manual_seed(6)
    v = torch.randn(3, 6, dtype=torch.float64)
    assert relative_error(penalty, ((v * mask) @ cell.W).square().sum() / 18) <= 1e-13


def test_normalised_weights_receive_the_gradient():
    torch.manual_seed(0)

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = weight_norm(nn.Linear(4, 4, bias=False).double())

        def forward(self, z, x):
            return self.linear(z) + x

    cell = Cell()
    solution = DEQ(cell)(normal(2, 4))
    torch.manual_seed(1)
    penalty = jacobian_penalty(solution)
    got = torch.autograd.grad(penalty, (cell.linear.weight_g, cell.linear.weight_v))
    torch.manual_seed(1)
    v = torch.randn(2, 4, dtype=torch.float64)
    want = torch.autograd.grad(
        (v @ cell.linear.weight).square().sum() / 8, (cell.linear.weight_g, cell.linear.weight_v)
    )
    assert relative_error(got, want) <= 1e-13


# torch.compile itself asks every input for its .grad, also those that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_cell_is_penalised_by_its_eager_twin():
    deq, x = DEQ(TanhCell()), normal(3, 6)
    deq.compile_cell(backend="eager")
    solution = deq(x)
    torch.manual_seed(0)
    got = torch.autograd.grad(jacobian_penalty(solution), deq.cell.W)
    torch.manual_seed(0)
    want = torch.autograd.grad(jacobian_penalty(DEQ(deq.cell).problem(x), solution.value), deq.cell.W)
    assert relative_error(got, want) <= 1e-14


def test_the_penalty_works_without_a_gradient_to_record():
    deq, x = DEQ(TanhCell()), normal(3, 6)
    with torch.no_grad():
        solution = deq(x)
        torch.manual_seed(0)
        got = jacobian_penalty(solution)
    torch.manual_seed(0)
    assert relative_error(got, jacobian_penalty(deq(x))) <= 1e-13


def test_the_penalty_shrinks_a_map():
    W = nn.Parameter(normal(5, 5, seed=1))
    optimiser = torch.optim.SGD([W], lr=0.5)
    before = float(W.detach().norm())
    torch.manual_seed(0)
    for _ in range(60):
        optimiser.zero_grad()
        jacobian_penalty(linear_problem(W, 16)).backward()
        optimiser.step()
    assert float(W.detach().norm()) < 0.01 * before


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((None,), TypeError, "takes a Problem or a Solution, got NoneType"),
        ((lambda z: z,), TypeError, r"see DEQ.problem"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        jacobian_penalty(*arguments)


def test_a_problem_needs_a_state_and_probes_are_counted():
    deq, x = DEQ(TanhCell()), normal(3, 6)
    with pytest.raises(ValueError, match="pass the state z"):
        jacobian_penalty(deq.problem(x))
    with pytest.raises(ValueError, match="probes must be an integer of at least 1"):
        jacobian_penalty(deq(x), probes=0)


# Fixed-point correction


def test_correction_of_given_states_is_a_weighted_mean():
    states = [torch.full((2,), float(i), dtype=torch.float64, requires_grad=True) for i in range(1, 10)]
    value = fixed_point_correction(states, lambda z: z.square().sum(), states=3, decay=0.5)
    weights = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64) / 1.75
    chosen = [states[2], states[5], states[8]]  # spread evenly, the last one included
    want = sum(w * z.detach().square().sum() for w, z in zip(weights, chosen, strict=True))
    assert relative_error(value, want) <= 1e-15
    value.backward()
    for w, z in zip(weights, chosen, strict=True):
        assert relative_error(z.grad, 2 * w * z) <= 1e-15
    assert all(z.grad is None for i, z in enumerate(states) if i not in (2, 5, 8))


def test_correction_along_a_solve_gives_each_iterate_one_evaluation():
    cell, x, target = TanhCell(), normal(3, 6), normal(3, 6, seed=1)
    deq = DEQ(cell, solver=Picard(), stop=Stop(rtol=0, max_steps=9))
    solution = deq(x, collect="iterates")
    iterates = solution.collected["iterates"]
    value = fixed_point_correction(solution, lambda z: (z - target).square().sum(), states=3, decay=0.8)
    along = iterates[:-1]  # the end is the equilibrium, which has its own loss
    chosen = [along[round((i + 1) * len(along) / 3) - 1].detach() for i in range(3)]
    weights = [0.64, 0.8, 1.0]
    losses = [w * (cell(z, x) - target).square().sum() for w, z in zip(weights, chosen, strict=True)]
    want = sum(losses) / sum(weights)
    assert relative_error(value, want) <= 1e-14
    assert relative_error(torch.autograd.grad(value, cell.W), torch.autograd.grad(want, cell.W)) <= 1e-13
    assert solution.backward is None


def test_fewer_states_than_asked_for_are_all_taken():
    states = [torch.tensor(1.0), torch.tensor(3.0)]
    value = fixed_point_correction(states, lambda z: z, states=5, decay=0.5)
    assert float(value) == pytest.approx((0.5 * 1 + 3) / 1.5)
    one = fixed_point_correction(states[:1], lambda z: z, states=5)
    assert float(one) == 1.0


def test_corrections_that_cannot_be_made_are_refused():
    deq, x = DEQ(TanhCell()), normal(3, 6)
    with pytest.raises(ValueError, match=r'collect="iterates"'):
        fixed_point_correction(deq(x), lambda z: z.sum())
    with pytest.raises(ValueError, match="trajectory is empty"):
        fixed_point_correction([], lambda z: z.sum())
    with pytest.raises(ValueError, match="states must be an integer"):
        fixed_point_correction([x], lambda z: z.sum(), states=0)
    with pytest.raises(ValueError, match="decay must be a number"):
        fixed_point_correction([x], lambda z: z.sum(), decay=0.0)


def test_correction_uses_the_masks_of_the_solve():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.drop = TanhCell(), VariationalDropout(0.5)

        def forward(self, z, x):
            return self.drop(self.inner(z, x))

    cell, x = Cell(), normal(3, 6)
    torch.manual_seed(5)
    mask = (torch.rand(3, 6) >= 0.5).double() * 2
    torch.manual_seed(5)
    solution = DEQ(cell, solver=Picard(), stop=Stop(rtol=0, max_steps=4))(x, collect="iterates")
    seen = []
    fixed_point_correction(solution, lambda z: seen.append(z) or z.sum(), states=2)
    for state in seen:
        assert torch.equal(state == 0, mask == 0)
    assert len(seen) == 2


def test_public_names():
    assert eq.jacobian_penalty is jacobian_penalty
    assert eq.fixed_point_correction is fixed_point_correction
