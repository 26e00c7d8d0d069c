"""Where the captured engine cannot solve it says why, once, and the eager one does, as if nothing had happened."""

import warnings

import pytest
import torch
from torch import nn

import equipoise as eq
from tests.captured import FIXED, Scoped, Tanh, assert_close, assert_falls_back, deq_of, inputs_of, loss_of

# What is left to the eager engine


class Counting(Tanh):
    calls = 0

    def forward(self, z, x):
        self.calls += 1
        return super().forward(z, x)


class Closure(nn.Module):
    """A tensor that wants a gradient and that nobody knows of."""

    def __init__(self):
        super().__init__()
        self.hidden = [torch.tensor(0.3, dtype=torch.float64, requires_grad=True)]

    def forward(self, z, x):
        return self.hidden[0] * torch.tanh(z) + x


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = deq_of(Scoped().double().eval(), engine="eager")

    def forward(self, z, x):
        return 0.2 * self.inner(0.1 * z).value + x


class WithGradients(nn.Module):
    """Draws something only when gradients are recorded."""

    def __init__(self):
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.tensor(0.3, dtype=torch.float64)), eq.nn.VariationalDropout(0.5)

    def forward(self, z, x):
        return self.weight * torch.tanh(self.drop(z) if torch.is_grad_enabled() else z) + x


def hooked():
    cell = Tanh()
    cell.register_forward_hook(lambda module, args, output: None)
    return cell


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: deq_of(Tanh(), eq.NewtonKrylov()), "NewtonKrylov has no recorded step"),
        (lambda: deq_of(Tanh(), type("Mine", (eq.Picard,), {})()), "Mine has no recorded step"),
        (lambda: deq_of(Tanh(), eq.Broyden(line_search=True)), "line search"),
        (lambda: deq_of(Tanh(), adjoint=eq.Implicit(solver=eq.NewtonKrylov())), "NewtonKrylov has no recorded step"),
        (lambda: deq_of(Tanh(), adjoint=eq.Implicit(any_order=True)), "only Implicit"),
        (lambda: deq_of(Tanh(), adjoint=eq.Phantom()), "only Implicit"),
        (lambda: deq_of(Counting()), "changes its own attributes"),
        (lambda: deq_of(hooked()), "hooks, which a replay would not call"),
        (lambda: deq_of(Closure()), "neither a parameter nor an input"),
        (lambda: deq_of(Nested()), "a solve inside the cell"),
        (lambda: deq_of(WithGradients()), "with gradients only"),
    ],
)
def test_fallbacks(make, reason):
    x = inputs_of().requires_grad_()
    solution = assert_falls_back(make(), x, reason=reason)
    assert torch.autograd.grad(loss_of(solution.value), x)[0].abs().max() > 0


@pytest.mark.parametrize("adjoint", [eq.Reversible(), eq.Shine()], ids=["reversible", "shine"])
def test_adjoints_that_solve_in_their_own_way(adjoint):
    deq = deq_of(Tanh(), eq.Broyden(), FIXED, adjoint)
    assert_falls_back(deq, inputs_of(), reason="solves in its own way", grad=False)


@pytest.mark.parametrize("adjoint", [eq.Phantom(), eq.Unroll(), eq.Neumann(), eq.Implicit(any_order=True)], ids=str)
def test_without_gradients_the_adjoint_does_not_matter(adjoint):
    deq, x = deq_of(Tanh(), eq.Anderson(), adjoint=adjoint), inputs_of()
    with torch.no_grad():
        value = deq(x).value
        deq.engine = "eager"
        assert_close(value, deq(x).value, 1e-12)
    assert deq.capture.replayed == 1


def test_no_systems():
    solution = assert_falls_back(deq_of(Tanh()), torch.zeros(0, 6, dtype=torch.float64), reason="nothing to solve for")
    assert solution.value.shape == (0, 6)


def test_an_object_as_input():
    class Holder:
        x = 0.5

    class Cell(nn.Module):
        def forward(self, z, x, holder):
            return holder.x * torch.tanh(z) + x

    assert_falls_back(
        deq_of(Cell()), inputs_of(), Holder(), reason="of type Holder, which can neither be copied nor compared"
    )


def test_surroundings():
    x = inputs_of().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        assert_falls_back(deq_of(Tanh()), x, reason="hooks on saved tensors")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection")
        with torch.autograd.set_detect_anomaly(True):
            assert_falls_back(deq_of(Tanh()), x, reason="anomaly detection")


def test_a_solve_inside_another_one():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deq_of(Tanh())

        def forward(self, z, x):
            return 0.3 * self.inner(0.1 * z).value + x

    deq = deq_of(Outer(), engine="eager")
    with pytest.warns(eq.EquilibriumWarning, match="the solve is inside another one"):
        deq(inputs_of())
    assert set(deq.cell.inner.capture.fallbacks) == {"the solve is inside another one"}


def test_functorch():
    deq, x = deq_of(Tanh(), adjoint=eq.Implicit(any_order=True)), inputs_of()
    with pytest.warns(eq.EquilibriumWarning, match=r"torch\.func transform"):
        grad = torch.func.grad(lambda x: loss_of(deq(x).value))(x)
    x = x.requires_grad_()
    deq.engine = "eager"
    assert_close(grad, torch.autograd.grad(loss_of(deq(x).value), x)[0], 1e-6)


@pytest.mark.slow
def test_a_compiled_region_around_the_solve():
    deq, x = deq_of(Tanh(), stop=FIXED), inputs_of()
    compiled = torch.compile(lambda x: deq(x).value, backend="eager")
    with torch.no_grad():
        value = [compiled(x) for _ in range(2)][-1]
        assert set(deq.capture.fallbacks) == {"a compiled region is around the solve"}
        deq.engine = "eager"
        assert_close(value, deq(x).value, 1e-12)


def test_auto_never_records_on_the_cpu():
    deq, x = deq_of(Tanh(), engine="auto"), inputs_of().requires_grad_()
    for _ in range(3):
        loss_of(deq(x).value).backward()
    assert deq._capture is None


def test_errors_of_the_cell_are_its_own():
    class Wrong(nn.Module):
        def forward(self, z, x):
            return z[:, :3]

    with pytest.raises(ValueError, match="shapes must be equal"):
        deq_of(Wrong())(inputs_of())

    class Broken(nn.Module):
        def forward(self, z, x):
            raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        deq_of(Broken())(inputs_of())
