"""Spectral radius, gradient audit and explanations."""

import copy
import math

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import (
    DEQ,
    Anderson,
    Implicit,
    Neumann,
    OneStep,
    Picard,
    Reversible,
    Stop,
    audit_gradient,
    fixed_point,
    spectral_radius,
)
from equipoise.nn import VariationalDropout
from equipoise.theory import DeepNetCell, dense_jacobian
from tests.gradients import TanhCell, layer, normal, relative_error, tanh_system

# Spectral radius


def test_a_scaled_rotation_has_a_complex_leading_pair():
    angle = 0.7
    R = 0.95 * torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64
    )
    solution = fixed_point(lambda z, b: z @ R.mT + b, torch.zeros(3, 2, dtype=torch.float64), normal(3, 2))
    radius = spectral_radius(solution)
    assert radius.shape == (3,)
    assert relative_error(radius, torch.full((3,), 0.95, dtype=torch.float64)) <= 1e-12


@pytest.mark.parametrize("radius", [0.5, 0.9, 1.5])
def test_tanh_maps_against_dense_eigenvalues(radius):
    system = tanh_system(n=8, batch=4, radius=radius, seed=2)
    problem = DEQ(Cell(system.W), in_dims=0).problem(system.x)
    got = spectral_radius(problem, system.root, steps=800, window=600)
    jacobian = dense_jacobian(lambda z: layer(z, system.W, system.x), system.root)
    want = torch.linalg.eigvals(jacobian).abs().amax(dim=1)
    assert float(want.max()) == pytest.approx(radius, rel=1e-10)
    assert float(((got - want) / want).abs().max()) <= 2e-2
    assert not got.requires_grad


class Cell(nn.Module):
    def __init__(self, W):
        super().__init__()
        self.W = nn.Parameter(W.detach().clone())

    def forward(self, z, x):
        return layer(z, self.W, x)


def test_the_default_number_of_products_is_enough_for_a_clear_leader():
    values = torch.tensor([0.9, 0.6, -0.3, 0.1], dtype=torch.float64)
    basis = normal(4, 4, seed=3)
    W = basis @ torch.diag(values) @ torch.linalg.inv(basis)
    solution = fixed_point(lambda z, b: z @ W.mT + b, torch.zeros(2, 4, dtype=torch.float64), normal(2, 4))
    assert relative_error(spectral_radius(solution), torch.full((2,), 0.9, dtype=torch.float64)) <= 1e-10


def test_systems_are_independent():
    gains = torch.tensor([[0.2], [0.5], [2.0]], dtype=torch.float64)
    solution = fixed_point(lambda z, g: g * z, torch.ones(3, 4, dtype=torch.float64), gains, stop=Stop(max_steps=2))
    assert relative_error(spectral_radius(solution), gains[:, 0]) <= 1e-12


def test_a_nilpotent_jacobian_has_radius_zero():
    torch.manual_seed(0)
    widths = [3, 4, 2]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in zip([5, 3, 4], widths, strict=True)]
    deq, x = DEQ(DeepNetCell(layers, widths)), normal(2, 5)
    assert spectral_radius(deq(x)).tolist() == [0.0, 0.0]


def test_a_map_that_does_not_depend_on_the_state_has_radius_zero():
    x = normal(2, 3)
    assert spectral_radius(fixed_point(lambda z, x: x.sin(), 0 * x, x)).tolist() == [0.0, 0.0]


def test_the_global_generator_is_left_alone():
    deq, x = DEQ(TanhCell()), normal(3, 6)
    solution = deq(x)
    before = torch.random.get_rng_state()
    first, second = spectral_radius(solution), spectral_radius(solution)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, second)


def test_masks_of_the_solve_are_used():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = VariationalDropout(0.5)

        def forward(self, z, x):
            return self.drop(0.4 * z) + x

    torch.manual_seed(0)
    solution = DEQ(Masked())(normal(4, 1))
    with solution.problem.active():
        mask = solution.problem.f.drop(torch.ones(4, 1, dtype=torch.float64))
    assert set(mask.flatten().tolist()) == {0.0, 2.0}
    assert relative_error(spectral_radius(solution), 0.4 * mask[:, 0]) <= 1e-12


def test_wrong_arguments_are_refused():
    deq, x = DEQ(TanhCell()), normal(3, 6)
    with pytest.raises(ValueError, match="pass the state z"):
        spectral_radius(deq.problem(x))
    with pytest.raises(TypeError, match="takes a Problem or a Solution"):
        spectral_radius(x)
    with pytest.raises(ValueError, match="steps must be an integer"):
        spectral_radius(deq(x), steps=0)


# Gradient audit


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.inject = nn.Linear(6, 6)
        self.deq = DEQ(TanhCell(dtype=torch.float32, norm=0.9), **options)
        self.drop = VariationalDropout(0.2)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.drop(self.deq(self.inject(x)).value))


BATCH = normal(5, 6, seed=1, dtype=torch.float32)


def test_the_exact_adjoint_is_near_the_truth_and_approximations_are_not():
    torch.manual_seed(3)
    exact = audit_gradient(Model(), BATCH)
    torch.manual_seed(3)
    one = audit_gradient(Model(adjoint=OneStep()), BATCH)
    torch.manual_seed(3)
    five = audit_gradient(Model(adjoint=Neumann(5)), BATCH)
    assert exact.cosine == pytest.approx(1, abs=1e-6)
    assert exact.relative_error <= 1e-3
    assert exact.norm_error <= 1e-3
    assert exact.residual <= 1e-5
    assert exact.truth_residual <= 1e-10
    assert one.cosine < exact.cosine
    assert exact.relative_error < five.relative_error < one.relative_error
    assert one.relative_error > 0.05


def test_the_audit_equals_a_comparison_by_hand():
    deq, x = DEQ(TanhCell(norm=0.7), adjoint=OneStep(), stop=Stop(rtol=1e-12)), normal(4, 6)
    audit = audit_gradient(deq, x, lambda solution: solution.value.square().sum())
    gradients = []
    for adjoint in (OneStep(), Implicit(stop=Stop(rtol=1e-12, max_steps=200))):
        with eq.override(deq, adjoint=adjoint):
            gradients.append(torch.autograd.grad(deq(x).value.square().sum(), deq.cell.W)[0].flatten())
    got, truth = gradients
    assert audit.cosine == pytest.approx(float(torch.dot(got, truth) / (got.norm() * truth.norm())), rel=1e-8)
    assert audit.relative_error == pytest.approx(float((got - truth).norm() / truth.norm()), rel=1e-8)
    assert audit.norm_error == pytest.approx(float((got.norm() - truth.norm()).abs() / truth.norm()), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = Model().train(training)
    model(BATCH).sum().backward()
    before = copy.deepcopy(model.state_dict())
    grads = [p.grad.clone() for p in model.parameters()]
    plan = model.deq.plan
    audit_gradient(model, BATCH)
    assert model.training is training
    assert all(module.training is training for module in model.modules())
    assert model.deq.plan is plan
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert not any(module._forward_hooks for module in model.modules())
    assert next(model.parameters()).dtype == torch.float32


def test_both_gradients_see_the_same_random_draws():
    """The masks are those of a forward pass at this point; the audit moves the generator on by one such pass."""
    model = Model()
    torch.manual_seed(7)
    model(BATCH)
    after = torch.random.get_rng_state()
    torch.manual_seed(7)
    audit = audit_gradient(model, BATCH)
    assert audit.cosine == pytest.approx(1, abs=1e-6)
    assert audit.relative_error <= 1e-3
    assert torch.equal(torch.random.get_rng_state(), after)


def test_a_loose_solve_shows_in_the_residual():
    audit = audit_gradient(Model(stop=Stop(rtol=1e-2)).eval(), BATCH)
    assert 1e-4 < audit.residual <= 1e-2
    assert audit.relative_error > 1e-4


def test_several_inputs_and_the_words():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.deq = DEQ(TanhCell())

        def forward(self, x, y):
            return self.deq(x + y).value

    audit = audit_gradient(Two(), (normal(2, 6), normal(2, 6, seed=1)))
    assert "cosine 1.000000" in str(audit)
    assert "truth at" in str(audit)


def test_models_that_cannot_be_audited_are_refused():
    with pytest.raises(ValueError, match="Linear contains no DEQ"):
        audit_gradient(nn.Linear(2, 2), torch.ones(1, 2))
    frozen = DEQ(TanhCell().requires_grad_(False))
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        audit_gradient(frozen, normal(2, 6))
    with pytest.raises(ValueError, match="carries no gradient"):
        audit_gradient(Detached(), normal(2, 6))


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.deq = DEQ(TanhCell())

    def forward(self, x):
        return self.deq(x).value.detach()


# Words


def test_explain_a_good_solve():
    system = tanh_system(radius=0.7)
    solution = fixed_point(layer, system.z0, system.W, system.x)
    text = solution.explain()
    assert "forward: 3 of 3 systems solved" in text
    assert f"{solution.stats.nfe} evaluations of f" in text
    assert "backward" not in text
    solution.value.sum().backward()
    text = solution.explain()
    assert text.count("\n") == 1
    assert "backward: 3 of 3 systems solved" in text
    assert f"{solution.backward.nfe} vector-Jacobian products" in text


def test_explain_names_failures_and_what_to_change():
    gains = torch.tensor([[0.5], [-3.0], [0.9]], dtype=torch.float64)
    x = torch.ones(3, 1, dtype=torch.float64)
    solution = fixed_point(lambda z, g, x: g * z + x, 0 * x, gains, x, solver=Picard(), stop=Stop(max_steps=30))
    text = solution.explain()
    assert "1 of 3 systems solved" in text
    assert "row 1" in text
    assert "DIVERGED" in text
    assert "Anderson() or Broyden()" in text
    assert "row 2" in text
    assert "raise Stop(max_steps=...)" in text


def test_explain_says_when_the_residual_is_the_predecessors():
    x = normal(2, 3)
    solution = fixed_point(lambda z, x: z / 2 + x, 0 * x, x, solver=Picard(), stop=Stop(select="last"))
    assert "the residual is that of the iterate before it" in solution.explain()


def test_explain_an_empty_batch_and_the_precision_floor():
    assert "no systems (empty batch)" in DEQ(TanhCell())(normal(0, 6)).explain()
    x = normal(2, 3, dtype=torch.float32)
    solution = fixed_point(lambda z, x: torch.tanh(z / 2 + x), 0 * x, x, solver=Anderson(), stop=Stop(rtol=1e-12))
    assert "2 of them reached the rounding level" in solution.explain()


def test_explain_a_reversible_backward_pass():
    system = tanh_system(radius=0.5)
    solution = fixed_point(layer, system.z0, system.W, system.x, adjoint=Reversible(0.2), stop=Stop(max_steps=10))
    solution.value.sum().backward()
    assert "backward: 3 of 3 systems solved in 10 steps" in solution.explain()
