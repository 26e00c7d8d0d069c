"""Uses of the core that are plausible, and once went wrong: in silence, or with an error that did not say why."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import equipoise as eq
from equipoise import (
    DEQ,
    GMRES,
    Anderson,
    Broyden,
    Implicit,
    Ladder,
    NewtonKrylov,
    Phantom,
    Picard,
    Reversible,
    Shine,
    Status,
    Stop,
    Unroll,
    fixed_point,
    jacobian_penalty,
    spectral_radius,
)


class Cell(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.inner = nn.Linear(d, d)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.inner(z) + x)


@pytest.fixture
def cell():
    torch.manual_seed(0)
    return Cell().double()


@pytest.fixture
def x():
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradient(value, of):
    return torch.autograd.grad(value.square().sum(), of)[0]


# Without gradients


def test_derivatives_in_inference_mode_are_refused_and_not_zero(cell, x):
    with torch.inference_mode():
        solution = DEQ(cell)(x)
        for wants_derivatives in (spectral_radius, jacobian_penalty):
            with pytest.raises(RuntimeError, match=r"needs gradients, which torch.inference_mode\(\) cannot give"):
                wants_derivatives(solution)
    with torch.no_grad():
        assert (spectral_radius(DEQ(cell)(x)) > 0.1).all()


def test_a_map_that_writes_into_its_state_is_refused():
    def careless(z):
        return z.mul_(0.5).add_(1.0)

    with torch.no_grad(), pytest.raises(ValueError, match="f has written into its state"):
        fixed_point(careless, torch.zeros(2, 3))
    with torch.no_grad():  # every state is a root of the identity, which returns what it is given
        assert (fixed_point(lambda z: z, torch.ones(2, 3)).stats.status == Status.CONVERGED).all()


# Modules


class Normalised(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.inner, self.norm = nn.Linear(d, d), nn.BatchNorm1d(d)

    def forward(self, z, x):
        return 0.5 * torch.tanh(self.norm(self.inner(z) + x))


def test_batch_normalisation_keeps_all_systems_in_the_batch():
    torch.manual_seed(2)
    cell, x = Normalised().double(), torch.randn(32, 6, dtype=torch.float64)
    solution = DEQ(cell)(x)
    again = cell(solution.value, x)
    error = (again - solution.value).norm(dim=1) / again.norm(dim=1)
    assert solution.stats.ok.all()
    assert error.max() < 1e-4  # dropping finished systems would change the statistics: 0.79
    cell.eval()
    assert DEQ(cell).problem(x).can_slice
    cell.norm = nn.BatchNorm1d(6, track_running_stats=False).double().eval()  # by its batch all the same
    assert not DEQ(cell).problem(x).can_slice


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which the compiler looks at
def test_a_compiled_cell_may_be_given(cell, x):
    x.requires_grad_()
    expected = DEQ(cell)(x).value
    for adjoint in (Implicit(), Unroll()):
        value = DEQ(torch.compile(cell, backend="eager"), adjoint=adjoint)(x).value
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient(value, x), gradient(expected, x), rtol=1e-3, atol=1e-3)
        expected = DEQ(cell)(x).value


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_model_with_a_tolerance_may_be_compiled_as_a_whole(cell, x):
    model = nn.Sequential(nn.Linear(6, 6).double(), DEQ(cell))
    solution = torch.compile(model, backend="eager")(x)
    torch.testing.assert_close(solution.value, model(x).value)


def test_a_tolerance_cannot_be_exported(cell, x):
    with pytest.raises(Exception, match=r"set a budget of steps: Stop\(rtol=0, max_steps=100\)"):
        torch.export.export(DEQ(cell), (x,), strict=True)


def test_a_budget_can_be_exported(cell, x):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.deq = DEQ(cell, stop=Stop(rtol=0, max_steps=6))

        def forward(self, x):
            return self.deq(x).value

    model = Head().eval().requires_grad_(False)
    with torch.no_grad():
        exported = torch.export.export(model, (x,), strict=True)
    torch.testing.assert_close(exported.module()(2 * x), model(2 * x))


@pytest.mark.parametrize("adjoint", [Implicit(), Implicit(any_order=True), Phantom(), Unroll(), Reversible(beta=0.5)])
def test_a_value_may_be_written_into(cell, x, adjoint):
    deq = DEQ(cell, adjoint=adjoint, solver=Picard(), stop=Stop(rtol=0, max_steps=12))
    x.requires_grad_()
    written, read = nn.ReLU(inplace=True)(deq(x).value), deq(x).value.relu()
    torch.testing.assert_close(gradient(written, x), gradient(read, x))
    with torch.no_grad():
        start = torch.zeros_like(x)
        deq(x, z0=start).value.add_(1.0)
    assert not start.any()


def test_a_plan_that_is_none_changes_nothing(cell, x):
    deq = DEQ(cell)
    for name in ("plan", "eval_plan"):
        with pytest.raises(TypeError, match=rf"{name} must be a Plan\(solver, adjoint, stop\), got Stop"):
            setattr(deq, name, Stop())
    assert deq(x).stats.ok.all()


def test_one_dropout_at_places_of_different_sizes_is_refused(x):
    class Twice(Cell):
        def __init__(self):
            super().__init__()
            self.drop = eq.nn.VariationalDropout(0.5)

        def forward(self, z, x):
            return super().forward(z, x) * self.drop(x.mean(dim=1, keepdim=True)) + 0 * self.drop(z)

    with pytest.raises(ValueError, match=r"has shape \(5, 1\), and the input has \(5, 6\)"):
        DEQ(Twice().double())(x)


# Derivatives


def test_forward_mode_with_parameters_that_learn(cell, x):
    tangent = torch.ones_like(x)
    deq = DEQ(cell, adjoint=Implicit(any_order=True), stop=Stop(rtol=1e-10))
    expected = torch.func.jvp(lambda x: deq(x).value, (x,), (tangent,))[1]
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(deq(forward_ad.make_dual(x, tangent)).value).tangent
    torch.testing.assert_close(found, expected)


def test_any_order_within_a_checkpoint(cell, x):
    x.requires_grad_()
    deq = DEQ(cell, adjoint=Implicit(any_order=True))
    value = checkpoint(lambda x: deq(x).value, x, use_reentrant=False)
    torch.testing.assert_close(gradient(value, x), gradient(deq(x).value, x))


@pytest.mark.parametrize("adjoint", [Unroll(), Unroll(checkpoint=True), Reversible(beta=0.5), Implicit()])
def test_normalised_weights_within_a_checkpoint_in_the_cell(x, adjoint):
    class Frugal(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = eq.nn.weight_norm(nn.Linear(6, 6))

        def forward(self, z, x):
            return checkpoint(self.plain, z, x, use_reentrant=False)

        def plain(self, z, x):
            return 0.3 * torch.tanh(self.inner(z) + x)

    torch.manual_seed(0)
    cell = Frugal().double()
    of = list(cell.parameters())
    stop = Stop(rtol=1e-12, max_steps=30)
    found = torch.autograd.grad(DEQ(cell, solver=Picard(), adjoint=adjoint, stop=stop)(x).value.square().sum(), of)
    cell.forward = cell.plain
    tight = Implicit(stop=Stop(rtol=1e-12))
    expected = torch.autograd.grad(DEQ(cell, adjoint=tight, stop=stop)(x).value.square().sum(), of)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("solver", [NewtonKrylov(), NewtonKrylov(linear=GMRES(max_steps=1)), Ladder((NewtonKrylov(),))])
def test_newton_is_not_unrolled(cell, x, solver):
    with pytest.raises(ValueError, match=r"NewtonKrylov cannot be unrolled.*Implicit\(\)"):
        DEQ(cell, solver=solver, adjoint=Unroll())(x)
    with torch.no_grad():
        assert DEQ(cell, solver=solver, adjoint=Unroll())(x).stats.ok.all()


def test_newton_where_f_turns_gradients_on_by_itself(cell, x):
    def f(z, x):
        with torch.enable_grad():
            return cell(z, x)

    assert fixed_point(f, torch.zeros_like(x), x, in_dims=0, solver=NewtonKrylov()).stats.ok.all()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # in the solve, it is so
@pytest.mark.parametrize("adjoint", [Implicit(), Phantom()])
def test_a_reentrant_checkpoint_in_the_cell_loses_no_gradient_in_silence(cell, x, adjoint):
    class Reentrant(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = cell

        def forward(self, z, x):
            return checkpoint(self.inner, z, x, use_reentrant=True)

    deq, head = DEQ(Reentrant(), adjoint=adjoint), nn.Linear(6, 1).double()
    if isinstance(adjoint, Implicit):
        with pytest.raises(RuntimeError, match="use_reentrant=True, which hides what wants a gradient"):
            deq(x)
        return
    head(deq(x).value).sum().backward()
    found, cell.inner.weight.grad = cell.inner.weight.grad, None
    head(DEQ(cell, adjoint=adjoint)(x).value).sum().backward()
    torch.testing.assert_close(found, cell.inner.weight.grad)


def test_shine_under_autocast_is_finite():
    torch.manual_seed(0)
    cell, x = Cell(), torch.randn(5, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        solution = DEQ(cell, solver=Broyden(), adjoint=Shine())(x)
    assert gradient(solution.value, x).isfinite().all()


def test_nothing_that_wants_a_gradient_gets_none(cell, x):
    cell.requires_grad_(False)
    for adjoint in (Implicit(), Unroll()):
        assert not DEQ(cell, adjoint=adjoint)(x).value.requires_grad


# Statistics


def test_a_ladder_reports_the_residual_of_what_it_returns():
    calls = iter(range(1000))

    def failing(z):
        return 0.5 * z + 1.0 if next(calls) < 4 else torch.full_like(z, torch.nan)

    solution = fixed_point(
        failing, torch.zeros(2, 3, dtype=torch.float64), solver=Ladder((Picard(), Anderson())), stop=Stop(rtol=1e-9)
    )
    value, expected = solution.value, (0.5 * solution.value + 1.0 - solution.value).norm(dim=1)
    torch.testing.assert_close(solution.stats.residual, expected / (0.5 * value + 1.0).norm(dim=1))
    assert (solution.stats.status == Status.NONFINITE).all()


@pytest.mark.parametrize("solver", [Anderson(), Anderson(memory=3), Picard()])
def test_unrolled_steps_down_to_rounding_have_the_gradient(solver):
    worst = 0.0
    for seed in range(6):
        torch.manual_seed(seed)
        cell, x = Cell(), torch.randn(5, 6)
        of = list(cell.parameters())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = DEQ(cell, solver=solver, adjoint=Unroll())(x).value
        found = torch.cat([part.flatten() for part in torch.autograd.grad(value.square().sum(), of)])
        value = DEQ(cell, adjoint=Implicit(stop=Stop(rtol=1e-6)), stop=Stop(rtol=1e-6))(x).value
        expected = torch.cat([part.flatten() for part in torch.autograd.grad(value.square().sum(), of)])
        worst = max(worst, float((found - expected).norm() / expected.norm()))
    assert worst < 0.05  # of residuals that are rounding weights had derivatives of up to 5e7
