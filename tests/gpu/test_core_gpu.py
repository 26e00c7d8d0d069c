"""The core on a CUDA device: the lagged check, selection by `where`, and the backward thread differ from the CPU."""

import pytest
import torch
from torch import nn

import equipoise as eq
from tests.gpu.devices import waiting_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SOLVERS = [eq.Picard(), eq.Picard(0.5), eq.Anderson(), eq.Broyden(), eq.Broyden(memory=5), eq.Broyden(line_search=True)]
TIGHT = eq.Stop(rtol=1e-12, max_steps=200)


def tanh_problem(batch=9, n=24, dtype=torch.float64, norm=0.9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, n, generator=generator, dtype=torch.float64)
    w = w * (norm / torch.linalg.matrix_norm(w, 2))
    x = torch.randn(batch, n, generator=generator, dtype=torch.float64)
    return w.to(dtype), x.to(dtype)


def f(z, w, x):
    return torch.tanh(z @ w.T + x)


@pytest.mark.parametrize("solver", [*SOLVERS, eq.NewtonKrylov(), eq.Ladder()], ids=str)
def test_same_result_as_on_the_cpu(solver):
    w, x = tanh_problem()
    here = eq.fixed_point(f, torch.zeros_like(x), w, x, solver=solver, stop=TIGHT)
    there = eq.fixed_point(f, torch.zeros_like(x).cuda(), w.cuda(), x.cuda(), solver=solver, stop=TIGHT)
    assert (here.value - there.value.cpu()).norm() <= 1e-10 * here.value.norm()
    assert torch.equal(here.stats.status, there.stats.status.cpu())
    assert (here.stats.steps - there.stats.steps.cpu()).abs().max() <= 1


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("select", ["best", "last"])
def test_fixed_budget_never_waits_for_the_device(solver, select):
    w, x = (t.cuda() for t in tanh_problem(dtype=torch.float32))
    stop = eq.Stop(rtol=0, max_steps=8, select=select)
    z0 = torch.zeros_like(x)
    expected = eq.fixed_point(f, z0, w, x, solver=solver, stop=stop).value  # warm-up: lazy initialisation may wait
    with waiting_is_an_error(), torch.no_grad():
        value = eq.fixed_point(f, z0, w, x, solver=solver, stop=stop).value
    assert torch.equal(value, expected)


def test_batch_mates_do_not_matter():
    w, x = (t.cuda() for t in tanh_problem(batch=33))
    x[5] = torch.nan
    solution = eq.fixed_point(f, torch.zeros_like(x), w, x, stop=TIGHT)
    assert solution.stats.status[5] == eq.Status.NONFINITE
    assert torch.isfinite(solution.value[5]).all()
    for row in (0, 17, 32):
        alone = eq.fixed_point(f, torch.zeros_like(x[:1]), w, x[row : row + 1], stop=TIGHT)
        assert (alone.value - solution.value[row]).abs().max() <= 1e-12
        assert alone.stats.steps[0] == solution.stats.steps[row]


class Cell(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.mix = eq.nn.weight_norm(nn.Linear(n, n))
        self.drop = eq.nn.VariationalDropout(0.3)

    def forward(self, z, x):
        return torch.tanh(0.6 * self.drop(self.mix(z)) + x)


@pytest.mark.parametrize(
    "adjoint", [eq.Implicit(stop=TIGHT), eq.Implicit(stop=TIGHT, any_order=True)], ids=["kept", "any"]
)
def test_gradient_with_dropout_and_weight_norm(adjoint):
    torch.manual_seed(0)
    deq = eq.DEQ(Cell(16), adjoint=adjoint, stop=TIGHT).double().cuda()
    x = torch.randn(6, 16, dtype=torch.float64, device="cuda", requires_grad=True)
    solution = deq(x)
    (gx,) = torch.autograd.grad(solution.value.square().sum(), x, retain_graph=True)
    mask = solution.problem.scope.value(deq.cell.drop, x)
    weight = deq.cell.mix.weight.detach()
    z = solution.value.detach()
    masked = lambda state: torch.tanh(0.6 * mask * (state @ weight.T + deq.cell.mix.bias) + x)  # noqa: E731
    (truth,) = eq.theory.dense_gradient(masked, z, 2 * z, [x])
    assert (gx - truth).norm() <= 1e-9 * truth.norm()
    (again,) = torch.autograd.grad(solution.value.square().sum(), x)
    assert torch.equal(gx, again) or (gx - again).norm() <= 1e-12 * gx.norm()
    assert solution.backward is not None
    assert bool(solution.backward.ok.all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_and_autocast(dtype):
    w, x = (t.cuda() for t in tanh_problem(batch=8, n=64, dtype=torch.float32))
    truth = eq.fixed_point(f, torch.zeros_like(x), w, x).value
    half = eq.fixed_point(f, torch.zeros_like(x).to(dtype), w.to(dtype), x.to(dtype))
    assert half.value.dtype == dtype
    assert (half.value.float() - truth).norm() <= 0.03 * truth.norm()
    x.requires_grad_()
    with torch.autocast("cuda", dtype=dtype):
        solution = eq.fixed_point(f, torch.zeros_like(x), w, x)
    assert solution.value.dtype == torch.float32
    (g,) = torch.autograd.grad(solution.value.sum(), x)
    (exact,) = torch.autograd.grad(eq.fixed_point(f, torch.zeros_like(x), w, x).value.sum(), x)
    assert torch.nn.functional.cosine_similarity(g.flatten(), exact.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Broyden(memory=5)], ids=str)
def test_peak_memory_is_flat_in_the_step_budget(solver):
    torch.manual_seed(0)
    peaks = []
    deq = eq.DEQ(Cell(512), solver=solver).cuda()
    x = torch.randn(256, 512, device="cuda")
    for budget in (10, 10, 40, 100):
        stop = eq.Stop(rtol=0, max_steps=budget)
        with eq.override(deq, stop=stop, adjoint=eq.Implicit(solver=solver, stop=stop)):
            report = eq.memory_report(deq, x, lambda solution: solution.value.square().sum())
        peaks.append(report.peak)
    assert max(peaks[1:]) <= 1.01 * min(peaks[1:])


def test_compaction_on_the_device():
    sizes = []

    class Counting(nn.Module):
        def forward(self, z, x):
            sizes.append(len(z))
            return 0.9 * torch.tanh(z) * x + x

    x = torch.full((64, 8), 0.05, device="cuda")
    x[0] = 1.1
    deq = eq.DEQ(Counting(), solver=eq.Picard(), stop=eq.Stop(rtol=1e-6, max_steps=400)).eval()
    with torch.no_grad():
        solution = deq(x)
        alone = deq(x[:1])
    assert min(sizes[:-1]) < 64
    assert bool(solution.stats.ok.all())
    assert (solution.value[0] - alone.value[0]).abs().max() <= 1e-5
