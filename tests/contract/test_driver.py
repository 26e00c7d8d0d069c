"""The driver contract: what every solver gets from the loop, whatever it proposes."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import equipoise as eq
from equipoise import Status, Stop
from equipoise.solvers.base import State
from tests import problems
from tests.problems import counted, every_solver, graded_batch, mixed_batch, repelling_map, tanh_map

SOLVERS = every_solver()
CAPTURABLE = {name: solver for name, solver in SOLVERS.items() if solver.capturable}
# One f evaluation per driver step; Newton adds products, the ladder runs several drivers.
PLAIN = CAPTURABLE
TIGHT = Stop(rtol=1e-11, max_steps=200, plateau=None)


@pytest.fixture(autouse=True)
def _no_grad():
    """The driver is looked at alone: with gradients, one more evaluation is made."""
    torch.set_grad_enabled(False)


def residual_of(case, value):
    """‖f(z) − z‖ / ‖f(z)‖ of each system, recomputed from outside."""
    fz = case.f(value, *case.inputs)
    return (fz - value).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1)


class RowWise:
    """tanh(W z + x) by sums over rows only: a system's arithmetic does not depend on the batch, to the last bit."""

    def __call__(self, z, W, x):
        return torch.tanh((z[:, None, :] * W).sum(dim=2) + x)


def row_wise(case):
    return dataclasses.replace(case, f=RowWise())


class HostReads(TorchDispatchMode):
    """Counts the values that the host reads from tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class ScriptState(State):
    step: int = 0


@dataclasses.dataclass(frozen=True)
class Script(eq.Solver):
    """Proposes given iterates, (steps, N, D), one after the other."""

    iterates: torch.Tensor = dataclasses.field(compare=False)

    def init(self, problem, z):
        return z, ScriptState()

    def propose(self, problem, z, fz, state):
        return [self.iterates[state.step]], ScriptState(state.step + 1)


# --- one evaluation per step, and what is counted --------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_f_is_evaluated_once_per_step(name):
    case, counter = counted(tanh_map(n=8, batch=3))
    solution = case.solve(SOLVERS[name], stop=TIGHT)
    assert counter.calls == solution.stats.nfe == int(solution.stats.steps.max()) + 1


@pytest.mark.parametrize("name", SOLVERS)
def test_nfe_counts_every_call_of_f(name):
    """Jacobian-vector products evaluate f once each; all of them count."""
    case, counter = counted(tanh_map(n=8, batch=3))
    solution = case.solve(SOLVERS[name], stop=TIGHT)
    assert counter.calls == solution.stats.nfe


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("select", ["best", "last"])
def test_a_fixed_budget_is_spent_exactly(name, select):
    case, counter = counted(tanh_map(n=6, batch=2))
    solution = case.solve(SOLVERS[name], stop=Stop(rtol=0, max_steps=7, select=select))
    assert counter.calls == solution.stats.nfe == 7
    assert solution.stats.steps.tolist() == [7, 7]
    assert solution.stats.status.tolist() == [Status.MAX_STEPS] * 2


def test_the_gradient_costs_one_evaluation_more():
    case, counter = counted(tanh_map(n=6, batch=2))
    with torch.enable_grad():
        solution = case.solve("anderson", stop=TIGHT)
    assert counter.calls == solution.stats.nfe == int(solution.stats.steps.max()) + 2


# --- the residual and the value belong together ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("max_steps", [1, 2, 3, 6, 200])
def test_reported_residual_is_that_of_the_returned_value(name, max_steps):
    case = tanh_map(n=12, batch=4, norm=0.95)
    solution = case.solve(SOLVERS[name], stop=dataclasses.replace(TIGHT, max_steps=max_steps))
    expected = residual_of(case, solution.value)
    # z − f(z) cancels: its rounding error is of the order of eps, whatever its size
    assert torch.allclose(solution.stats.residual, expected, rtol=1e-9, atol=1e-14)


def test_steps_of_a_converged_system_is_the_index_of_the_iterate_returned():
    case = graded_batch(batch=6)
    solution = case.solve("picard", stop=TIGHT, collect="iterates")
    for row, steps in enumerate(solution.stats.steps.tolist()):
        assert torch.equal(solution.value[row], solution.collected["iterates"][steps][row])


def test_best_finite_iterate_of_each_system_wins():
    """f(z) = z/2 + 1 has root 2; the scripted errors are smallest at steps 3, 1 and 0."""
    errors = torch.tensor([[8.0, 8.0, 1.0], [4.0, 0.5, 2.0], [2.0, 4.0, 8.0], [1.0, 2.0, 4.0], [3.0, 1.0, 2.0]])
    path = (2 + errors).double()[:, :, None]
    solution = eq.fixed_point(
        lambda z: z / 2 + 1, path[0], solver=Script(path[1:]), stop=Stop(rtol=1e-9, max_steps=4, plateau=None)
    )
    assert solution.value[:, 0].tolist() == [3.0, 2.5, 3.0]
    value = solution.value[:, 0]
    assert torch.allclose(solution.stats.residual, (value / 2 - 1) / (value / 2 + 1), rtol=1e-14)
    assert solution.stats.status.tolist() == [Status.MAX_STEPS] * 3
    assert solution.stats.steps.tolist() == [4, 4, 4]


def test_best_is_judged_by_the_relative_residual():
    """The first iterate has the smaller ‖f(z) − z‖, the second the smaller share of ‖f(z)‖."""
    path = torch.tensor([[[1.5]], [[20.0]], [[1.0]]], dtype=torch.float64)
    f = lambda z: torch.where(z < 10, z + 1.0, z + 2.0)  # noqa: E731
    solution = eq.fixed_point(f, path[0], solver=Script(path[1:]), stop=Stop(rtol=1e-9, max_steps=2, plateau=None))
    assert solution.value.item() == 20.0
    assert solution.stats.residual.item() == pytest.approx(2 / 22)


def test_a_fixed_budget_returns_the_best_iterate_too():
    errors = torch.tensor([4.0, 1.0, 3.0, 5.0], dtype=torch.float64)
    path = (2 + errors)[:, None, None]
    solution = eq.fixed_point(
        lambda z: z / 2 + 1, path[0], solver=Script(path[1:]), stop=Stop(rtol=0, max_steps=3, select="best")
    )
    assert solution.value.item() == 3.0
    assert solution.stats.residual.item() == pytest.approx(0.5 / 2.5)


# --- a system's result is its own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "shared"])
@pytest.mark.parametrize("name", SOLVERS)
def test_result_does_not_depend_on_the_batch(name, compact):
    """Alone, in any batch, in any order: the same value (1e-12), steps and status."""
    case = row_wise(tanh_map(n=7, batch=20, norm=0.95))
    case.x[::3] *= 3.0  # saturated systems are easier, so systems finish at different times
    whole = case.solve(SOLVERS[name], compact=compact, stop=TIGHT)
    assert bool(whole.stats.ok.all())
    assert len(whole.stats.steps.unique()) > 1
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    for index in (torch.tensor([4]), torch.tensor([11]), torch.arange(3, 12), order):
        part = case.rows(index).solve(SOLVERS[name], compact=compact, stop=TIGHT)
        assert part.stats.steps.tolist() == whole.stats.steps[index].tolist()
        assert part.stats.status.tolist() == whole.stats.status[index].tolist()
        assert (part.value - whole.value[index]).abs().max() <= 1e-12
        assert (part.stats.residual - whole.stats.residual[index]).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["anderson", "broyden", "newton", "picard"])
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), batch=st.integers(2, 12), n=st.integers(1, 6), norm=st.floats(0.1, 0.9))
def test_permuted_batches_give_permuted_results(name, seed, batch, n, norm):
    case = row_wise(tanh_map(n=n, batch=batch, norm=norm, seed=seed))
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        plain, permuted = case.solve(name, stop=TIGHT), case.rows(order).solve(name, stop=TIGHT)
    assert permuted.stats.steps.tolist() == plain.stats.steps[order].tolist()
    assert (permuted.value - plain.value[order]).abs().max() <= 1e-12


def test_converged_systems_are_frozen():
    case = graded_batch(batch=6)
    solution = case.solve("anderson", stop=TIGHT, collect="iterates")
    iterates = solution.collected["iterates"]
    assert len(solution.stats.steps.unique()) > 1
    for row, steps in enumerate(solution.stats.steps.tolist()):
        assert all(torch.equal(z[row], iterates[steps][row]) for z in iterates[steps:])


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "shared"])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_divergent_system_does_not_change_the_others(name, compact):
    case = mixed_batch()
    easy = torch.tensor([0, 2, 3])
    alone = case.rows(easy).solve(SOLVERS[name], compact=compact, stop=TIGHT)
    together = case.solve(SOLVERS[name], compact=compact, stop=TIGHT)
    assert (together.value[easy] - alone.value).abs().max() <= 1e-12
    assert together.stats.steps[easy].tolist() == alone.stats.steps.tolist()
    assert together.stats.status[easy].tolist() == alone.stats.status.tolist()


def test_a_diverging_system_has_the_same_status_alone_and_in_a_batch():
    """z + z^0.9 grows without end while its relative residual falls: every step looks like progress."""

    def f(z, drift):
        return torch.where(drift, z + z.abs() ** 0.9, 0.3 * z + 1)

    z0 = torch.ones(2, 1, dtype=torch.float64)
    drift = torch.tensor([[True], [False]])
    stop = Stop(rtol=1e-10, max_steps=60, diverge=1e3)
    together = eq.fixed_point(f, z0, drift, solver="picard", stop=stop)
    alone = eq.fixed_point(f, z0[:1], drift[:1], solver="picard", stop=stop)
    assert together.stats.status.tolist() == [Status.DIVERGED, Status.CONVERGED]
    assert alone.stats.status.tolist() == [Status.DIVERGED]
    assert alone.stats.steps.tolist() == together.stats.steps[:1].tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_nonfinite_system_does_not_change_the_others(name, bad):
    case = row_wise(tanh_map(n=6, batch=5))
    clean = case.solve(SOLVERS[name], stop=TIGHT)
    broken = dataclasses.replace(case, f=_PoisonRow(case.f, row=2, value=bad))
    solution = broken.solve(SOLVERS[name], stop=TIGHT)
    others = torch.tensor([0, 1, 3, 4])
    assert (solution.value[others] - clean.value[others]).abs().max() <= 1e-12
    assert solution.stats.steps[others].tolist() == clean.stats.steps[others].tolist()
    assert solution.stats.status[others].tolist() == clean.stats.status[others].tolist()
    assert solution.stats.status[2] == Status.NONFINITE
    assert torch.equal(solution.value[2], case.z0[2])  # the only finite state this system ever had


class _PoisonRow:
    """f with one system's image replaced, told by its input so that a subset of systems is treated alike."""

    def __init__(self, f, row, value):
        self.f, self.row, self.value, self.mark = f, row, value, None

    def __call__(self, z, W, x):
        if self.mark is None:
            self.mark = x[self.row].clone()
        image = self.f(z, W, x)
        return torch.where((x == self.mark).all(dim=1, keepdim=True), self.value, image)


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
@pytest.mark.parametrize("name", PLAIN)
def test_nan_after_some_calls_returns_the_best_finite_iterate(name, calls):
    case = tanh_map(n=8, batch=3)
    reference = case.solve(SOLVERS[name], stop=dataclasses.replace(TIGHT, max_steps=calls))
    solution = problems.nan_after(case, calls).solve(SOLVERS[name], stop=TIGHT)
    assert solution.stats.status.tolist() == [Status.NONFINITE] * 3
    assert solution.stats.steps.tolist() == [calls] * 3
    assert torch.equal(solution.value, reference.value)
    assert torch.equal(solution.stats.residual, reference.stats.residual)
    with pytest.raises(eq.EquilibriumError, match=r"3 of 3 systems .*non-finite"):
        solution.require()


@pytest.mark.parametrize("select", ["best", "last"])
def test_nan_in_a_fixed_budget_returns_the_best_finite_iterate(select):
    case = tanh_map(n=8, batch=3)
    stop = Stop(rtol=0, max_steps=8, select=select)
    clean = case.solve("picard", stop=stop)
    solution = problems.nan_after(case, 4, rows=(1,)).solve("picard", compact=False, stop=stop)
    assert solution.stats.status.tolist() == [Status.MAX_STEPS, Status.NONFINITE, Status.MAX_STEPS]
    assert torch.equal(solution.value[[0, 2]], clean.value[[0, 2]])
    # f was sound at the first four iterates, and the plain iteration improves at each
    expected = case.solve("picard", stop=Stop(rtol=0, max_steps=4)).value[1]
    assert torch.equal(solution.value[1], expected)


@dataclasses.dataclass
class BrokenState(State):
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Broken(eq.Solver):
    """Picard, but the third proposal has a non-finite entry in one system."""

    row: int
    value: float

    def init(self, problem, z):
        return z, BrokenState()

    def propose(self, problem, z, fz, state):
        proposal = [leaf.clone() for leaf in fz]
        if state.count == 2:
            proposal[0][self.row, 0] = self.value
        return proposal, BrokenState(state.count + 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("select", ["best", "last"])
def test_a_nonfinite_proposal_is_refused_for_that_system_only(value, select):
    """tanh maps infinity to 1: refusal must look at the proposal, not only at its image."""
    case = row_wise(tanh_map(n=6, batch=4))
    stop = Stop(rtol=1e-11, max_steps=100, select=select)
    clean = case.solve("picard", stop=stop)
    solution = case.solve(Broken(row=1, value=value), compact=False, stop=stop)
    others = torch.tensor([0, 2, 3])
    assert torch.equal(solution.value[others], clean.value[others])
    assert solution.stats.steps[others].tolist() == clean.stats.steps[others].tolist()
    assert solution.stats.status[others].tolist() == [Status.CONVERGED] * 3
    # either the system is given up at its best finite iterate, or the proposal is replaced and it goes on
    best = case.solve("picard", stop=Stop(rtol=1e-11, max_steps=3)).value[1]
    given_up = bool(solution.stats.status[1] == Status.NONFINITE) and torch.equal(solution.value[1], best)
    recovered = bool(solution.stats.status[1] == Status.CONVERGED) and bool(
        (solution.value[1] - case.root[1]).norm() <= 1e-9 * case.root[1].norm()
    )
    assert given_up or recovered


# --- small and odd sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVERS)
def test_no_step_if_the_start_solves(name):
    case = problems.from_root(tanh_map(n=5, batch=3))
    solution = case.solve(SOLVERS[name], stop=Stop(rtol=1e-10))
    assert solution.stats.steps.tolist() == [0, 0, 0]
    assert solution.stats.status.tolist() == [Status.CONVERGED] * 3
    assert solution.stats.nfe == 1
    assert torch.equal(solution.value, case.z0)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_zero_root_found_at_the_start_is_no_division_by_zero(name):
    z0 = torch.zeros(2, 3, dtype=torch.float64)
    solution = eq.fixed_point(lambda z: 0.5 * z, z0, solver=SOLVERS[name])
    assert solution.stats.status.tolist() == [Status.CONVERGED] * 2
    assert solution.stats.residual.tolist() == [0.0, 0.0]
    assert torch.equal(solution.value, z0)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("stop", [Stop(), Stop(rtol=0, max_steps=3), Stop(select="last")], ids=str)
def test_an_empty_batch(name, stop):
    z0 = torch.zeros(0, 4, 2)
    solution = eq.fixed_point(lambda z, x: 0.5 * z + x, z0, z0, solver=SOLVERS[name], in_dims=0, stop=stop)
    assert solution.value.shape == (0, 4, 2)
    for item in (solution.stats.status, solution.stats.residual, solution.stats.steps):
        assert item.shape == (0,)
    assert solution.require() is solution


def test_an_empty_batch_has_an_empty_trace_and_checks_f():
    z0 = torch.zeros(0, 4)
    solution = eq.fixed_point(lambda z: 0.5 * z, z0, trace=True)
    assert solution.stats.trace.shape[0] == 0
    with pytest.raises(ValueError, match=r"\(0, 5\).*\(0, 4\)"):
        eq.fixed_point(lambda z: z.new_zeros(0, 5), z0)


@pytest.mark.parametrize("max_steps", [1, 2, 3])
@pytest.mark.parametrize("name", PLAIN)
def test_tiny_budgets(name, max_steps):
    case, counter = counted(tanh_map(n=6, batch=3))
    solution = case.solve(SOLVERS[name], stop=Stop(rtol=1e-10, max_steps=max_steps))
    assert counter.calls == solution.stats.nfe == max_steps
    assert solution.stats.steps.tolist() == [max_steps] * 3
    assert solution.stats.status.tolist() == [Status.MAX_STEPS] * 3
    if max_steps == 1:
        assert torch.equal(solution.value, case.z0)  # nothing else was measured
    assert bool((solution.stats.residual <= residual_of(case, case.z0)).all())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", SOLVERS)
def test_one_unknown_per_system(name, batch):
    case = tanh_map(n=1, batch=batch, norm=0.7)
    solution = case.solve(SOLVERS[name], stop=TIGHT)
    assert case.error(solution.value) < 1e-9
    flat = eq.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(batch, dtype=torch.float64), stop=TIGHT)
    assert flat.value.shape == (batch,)
    assert torch.allclose(flat.value, torch.full_like(flat.value, 2.0), rtol=1e-10)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 5), (3, 1)])
@pytest.mark.parametrize("name", SOLVERS)
def test_sequences_of_length_one_and_batches_of_one(name, batch, length):
    case = problems.sequence_map(batch=batch, length=length)
    solution = case.solve(SOLVERS[name], stop=TIGHT)
    assert solution.value.shape == (batch, length, 4)
    assert solution.stats.status.shape == (batch,)
    assert case.error(solution.value) < 1e-9


@pytest.mark.parametrize(("batch_dims", "systems"), [(0, 1), (1, 3), (2, 15)])
@pytest.mark.parametrize("name", SOLVERS)
def test_batch_dims(name, batch_dims, systems):
    """The same root, whichever axes index systems; with two, each position of a sequence is its own system."""
    x = problems.gaussian(3, 5, 4, seed=0)
    W = problems.scaled_weight(4, 0.8, seed=1)
    root = problems.tanh_root(W, x.reshape(15, 4)).reshape(3, 5, 4)
    solution = eq.fixed_point(
        lambda z: torch.tanh(z @ W.T + x), torch.zeros_like(x), solver=SOLVERS[name], stop=TIGHT, batch_dims=batch_dims
    )
    assert solution.stats.residual.shape == solution.stats.steps.shape == (systems,)
    assert bool(solution.stats.ok.all())
    assert (solution.value - root).norm() <= 1e-9 * root.norm()


# --- the host --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_a_fixed_budget_reads_nothing_on_the_host(name, select):
    case = tanh_map(n=6, batch=3)
    with HostReads() as reads:
        case.solve(SOLVERS[name], stop=Stop(rtol=0, max_steps=12, select=select))
    assert reads.count == 0


@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_a_fixed_budget_needs_no_values_at_all(name, select):
    """Tensors on the meta device have no values: whatever reads one, or a row count that depends on one, raises."""
    z0 = torch.zeros(3, 6, device="meta")
    solution = eq.fixed_point(
        lambda z, x: torch.tanh(0.5 * z + x),
        z0,
        z0,
        solver=SOLVERS[name],
        stop=Stop(rtol=0, max_steps=12, select=select),
    )
    assert solution.value.shape == (3, 6)
    assert solution.stats.nfe == 12


@pytest.mark.parametrize("every", [2, 5, 7])
@pytest.mark.parametrize("name", [*CAPTURABLE, "newton"])
def test_fewer_checks_change_no_result(name, every):
    case, counter = counted(row_wise(tanh_map(n=7, batch=12, norm=0.95)))
    case.x[::3] *= 3.0
    once = case.solve(SOLVERS[name], stop=TIGHT)
    first = counter.calls
    seldom = case.solve(SOLVERS[name], stop=dataclasses.replace(TIGHT, check_every=every))
    assert seldom.stats.steps.tolist() == once.stats.steps.tolist()
    assert seldom.stats.status.tolist() == once.stats.status.tolist()
    assert (seldom.value - once.value).abs().max() <= 1e-12
    assert (seldom.stats.residual - once.stats.residual).abs().max() <= 1e-12
    if name != "newton":  # at most every − 1 evaluations are made in vain
        assert first <= counter.calls - first < first + every


@pytest.mark.parametrize("name", CAPTURABLE)
def test_the_host_reads_one_flag_per_check(name):
    case = tanh_map(n=7, batch=3, norm=0.95)

    def reads(every):
        with HostReads() as counter:
            solution = case.solve(
                SOLVERS[name], compact=False, stop=dataclasses.replace(TIGHT, check_every=every, max_steps=200)
            )
        return counter.count, solution.stats.nfe

    for every in (1, 4):
        count, evaluations = reads(every)
        # a check that finds an irregular step reads twice: whether all went well, then how many systems are left
        assert evaluations // every <= count <= 2 * math.ceil(evaluations / every)


# --- traces and collected quantities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "shared"])
@pytest.mark.parametrize("name", SOLVERS)
def test_trace(name, compact):
    case = graded_batch(batch=20)
    solution = case.solve(SOLVERS[name], compact=compact, stop=TIGHT, trace=True)
    trace, steps = solution.stats.trace, solution.stats.steps
    assert trace.shape == (20, int(steps.max()) + 1)
    assert torch.allclose(trace[:, 0], residual_of(case, case.z0), rtol=1e-12)
    for row, last in enumerate(steps.tolist()):
        assert not bool(trace[row, : last + 1].isnan().any())
        assert bool(trace[row, last + 1 :].isnan().all())
        assert trace[row, last] == solution.stats.residual[row]
        assert bool((trace[row, :last] > TIGHT.rtol).all())


def test_trace_of_unfinished_systems():
    case = tanh_map(n=6, batch=2)
    trace = case.solve("picard", stop=Stop(rtol=1e-12, max_steps=4), trace=True).stats.trace
    assert trace.shape == (2, 5)
    assert trace.isnan().sum(dim=1).tolist() == [1, 1]  # four evaluations were made
    expected, z = [], case.z0
    for _ in range(4):
        expected.append(residual_of(case, z))
        z = case.f(z, *case.inputs)
    assert torch.allclose(trace[:, :4], torch.stack(expected, dim=1), rtol=1e-12)


def test_trace_of_a_fixed_budget_goes_on_after_convergence():
    case = mixed_batch().rows([0, 3])
    trace = case.solve("picard", stop=Stop(rtol=0, max_steps=30), trace=True).stats.trace
    assert trace.shape == (2, 31)
    assert trace[:, :30].isnan().sum() == 0
    assert bool(trace[:, 30].isnan().all())
    assert bool((trace[:, 29] < 1e-13).all())


def test_no_trace_unless_asked_for():
    assert tanh_map().solve().stats.trace is None


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_k_picard_evaluations_are_a_k_layer_network(depth):
    case = tanh_map(n=6, batch=3)
    solution = case.solve("picard", stop=Stop(rtol=0, max_steps=depth, select="last"))
    layers = [case.z0]
    for _ in range(depth):
        layers.append(case.f(layers[-1], *case.inputs))
    assert torch.equal(solution.value, layers[-1])
    assert solution.stats.lagged
    assert torch.allclose(solution.stats.residual, residual_of(case, layers[-2]), rtol=1e-12)


def test_best_is_not_lagged():
    assert not tanh_map().solve().stats.lagged


def test_last_with_a_tolerance_returns_the_proposal_after_the_converged_iterate():
    case = row_wise(tanh_map(n=6, batch=4))
    best = case.solve("picard", stop=TIGHT)
    last = case.solve("picard", stop=dataclasses.replace(TIGHT, select="last"))
    assert torch.equal(last.value, case.f(best.value, *case.inputs))
    assert torch.equal(last.stats.residual, best.stats.residual)
    assert last.stats.steps.tolist() == (best.stats.steps + 1).tolist()
    assert last.stats.status.tolist() == [Status.CONVERGED] * 4


@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Broyden(), eq.Picard()], ids=["anderson", "broyden", "picard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_proposal_stays_at_a_root_that_is_met_exactly(solver, dtype):
    """A constant map is solved after one step; the residuals that follow are exactly zero, and no method may trip."""
    constant = problems.gaussian(3, 5, seed=0).to(dtype)
    solution = eq.fixed_point(
        lambda z: constant.clone(),
        torch.zeros_like(constant),
        solver=solver,
        stop=Stop(rtol=0, max_steps=9, select="last"),
    )
    assert torch.allclose(solution.value, constant, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_collected_iterates():
    case = tanh_map(n=6, batch=3)
    solution = case.solve("picard", stop=Stop(rtol=1e-12, max_steps=5), collect="iterates")
    iterates = solution.collected["iterates"]
    assert torch.equal(iterates[0], case.z0)
    assert len(iterates) == 6  # the start and five proposals
    for before, after in itertools.pairwise(iterates):
        assert torch.equal(after, case.f(before, *case.inputs))


def test_collected_iterates_have_the_structure_of_the_state():
    case = problems.multiscale_map(tree="nested")
    solution = case.solve("anderson", collect=("iterates",))
    for iterate in solution.collected["iterates"]:
        assert iterate["fine"][0].shape == (3, 2, 4, 2)
        assert iterate["coarse"].shape == (3, 5)


def test_collected_weights_of_anderson():
    case = tanh_map(n=6, batch=3)
    solution = case.solve(eq.Anderson(memory=3), stop=Stop(rtol=0, max_steps=6), collect=("iterates", "weights"))
    weights = solution.collected["weights"]
    assert [w.shape for w in weights] == [(3, 1), (3, 2), (3, 3), (3, 3), (3, 3), (3, 3)]
    for w in weights:
        assert torch.allclose(w.sum(dim=1), torch.ones(3, dtype=w.dtype), atol=1e-12)
    # with unit mixing, iterate 3 is that combination of f(z_0), f(z_1), f(z_2)
    z = solution.collected["iterates"]
    images = torch.stack([case.f(z[i], *case.inputs) for i in range(3)], dim=1)
    assert torch.allclose(z[3], (weights[2][:, :, None] * images).sum(dim=1), rtol=1e-10)


def test_collected_matrices_are_those_of_their_own_step():
    """A solver may update its tensors in place; what was collected before must not change with them."""
    case = tanh_map(n=6, batch=3)
    solution = case.solve(eq.Anderson(memory=4), stop=Stop(rtol=0, max_steps=4), collect=("iterates", "gram"))
    z = solution.collected["iterates"]
    residuals = torch.stack([case.f(z[i], *case.inputs) - z[i] for i in range(4)], dim=1)
    for k, gram in enumerate(solution.collected["gram"], start=1):
        expected = torch.zeros(3, 4, 4, dtype=torch.float64)
        expected[:, :k, :k] = residuals[:, :k] @ residuals[:, :k].mT
        expected = expected * (1 + eq.Anderson().ridge * torch.eye(4, dtype=torch.float64))
        assert torch.allclose(gram.double(), expected, rtol=1e-10, atol=1e-14)


def test_an_unknown_quantity_raises_with_the_list():
    with pytest.raises(ValueError, match=r"unknown quantity to collect 'wieghts'; did you mean 'weights'\?.*iterates"):
        tanh_map().solve("anderson", collect="wieghts")
    with pytest.raises(ValueError, match=r"unknown quantity to collect 'weights'.*Known: iterates"):
        tanh_map().solve("picard", collect="weights")


def test_an_unknown_quantity_raises_even_if_no_step_is_taken():
    with pytest.raises(ValueError, match="unknown quantity to collect 'wieghts'"):
        problems.from_root(tanh_map()).solve("anderson", stop=Stop(rtol=1e-8), collect="wieghts")


def test_nothing_is_collected_unless_asked_for():
    assert tanh_map().solve().collected is None


# --- giving up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", [3, 20])
def test_plateau(patience):
    """The plain iteration on −z + b steps between 0 and b for ever; the start is the best it has."""
    b = problems.gaussian(2, 4, seed=0)
    case = problems.Case(lambda z, b: b - z, torch.zeros_like(b), (b,), in_dims=(0,))
    solution = case.solve("picard", stop=Stop(plateau=patience, max_steps=50))
    assert solution.stats.status.tolist() == [Status.PLATEAU] * 2
    assert solution.stats.steps.tolist() == [patience] * 2
    assert torch.equal(solution.value, case.z0)
    with pytest.raises(eq.EquilibriumError, match=r"no progress for Stop\.plateau steps"):
        solution.require()


def test_no_plateau_if_switched_off():
    b = problems.gaussian(2, 4, seed=0)
    solution = eq.fixed_point(
        lambda z: b - z, torch.zeros_like(b), solver="picard", stop=Stop(plateau=None, max_steps=40)
    )
    assert solution.stats.status.tolist() == [Status.MAX_STEPS] * 2


def test_divergence():
    """−1.5 z + b: ‖f(z) − z‖ grows by 1.5 per step, past a thousandfold at step 18."""
    case = repelling_map()
    solution = case.solve("picard", stop=Stop(diverge=1e3, max_steps=50))
    assert solution.stats.status.tolist() == [Status.DIVERGED] * 3
    assert solution.stats.steps.tolist() == [math.ceil(math.log(1e3, 1.5))] * 3
    assert torch.equal(solution.value, case.z0)  # the start is the best it has
    with pytest.raises(eq.EquilibriumError, match=r"3 of 3 systems .*diverged"):
        solution.require()


def test_divergence_with_the_default_growth():
    solution = repelling_map().solve("picard", stop=Stop(plateau=None, max_steps=60))
    assert solution.stats.status.tolist() == [Status.DIVERGED] * 3
    assert solution.stats.steps.tolist() == [math.ceil(math.log(1e6, 1.5))] * 3


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tolerance_below_the_resolution_ends_at_the_precision_floor(name, dtype):
    case = tanh_map(n=16, batch=4, norm=0.7, dtype=dtype)
    solution = case.solve(SOLVERS[name], compact=False, stop=Stop(rtol=1e-12, max_steps=500))
    assert bool(solution.stats.ok.all()), solution.explain()
    assert int(solution.stats.steps.max()) < 100
    limit = {torch.float32: 2e-6, torch.bfloat16: 4 * 2**-7, torch.float16: 4 * 2**-10}[dtype]
    assert bool((solution.stats.residual <= limit).all())
    assert case.error(solution.value) < limit / (1 - 0.7)


@pytest.mark.parametrize("name", ["anderson", "broyden"])
def test_the_precision_floor_has_a_status_of_its_own(name):
    solution = tanh_map(n=100, batch=4, dtype=torch.float32).solve(name, stop=Stop(rtol=1e-12, max_steps=500))
    assert solution.stats.status.tolist() == [Status.PRECISION_FLOOR] * 4
    assert solution.require() is solution  # as good as the dtype allows
    assert "rounding level" in solution.explain()


def test_float64_has_no_floor_above_its_own_resolution():
    solution = tanh_map(n=16, batch=4, norm=0.7).solve("anderson", stop=Stop(rtol=1e-14, max_steps=200))
    assert bool(solution.stats.ok.all())
    assert float(solution.stats.residual.max()) < 1e-14


def test_absolute_tolerance_and_norms():
    """Near a zero root only an absolute tolerance can be met; rms divides by the root of the number of unknowns."""
    z0 = torch.ones(1, 100, dtype=torch.float64)
    steps = {}
    for norm, size in (("l2", 10.0), ("rms", 1.0)):
        stop = Stop(rtol=0, atol=1e-3, norm=norm, max_steps=60, plateau=None)
        solution = eq.fixed_point(lambda z: 0.5 * z, z0, solver="picard", stop=stop)
        assert solution.stats.status.tolist() == [Status.CONVERGED]
        steps[norm] = solution.stats.steps.item()
        assert steps[norm] == math.ceil(math.log2(0.5 * size / 1e-3))
    assert steps["rms"] < steps["l2"]


# --- compaction and context ------------------------------------------------------------------------------------------


class GradedCell(nn.Module):
    """tanh(a·Wz + x) with a per system, noting the batch sizes it sees."""

    def __init__(self, W):
        super().__init__()
        self.register_buffer("W", W)
        self.sizes = []

    def forward(self, z, a, x):
        self.sizes.append(len(z))
        return torch.tanh(a * (z[:, None, :] * self.W).sum(dim=2) + x)

    def initial_state(self, a, x):
        return torch.zeros_like(x)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("batch", [9, 32, 50])
def test_finished_systems_are_dropped(name, batch):
    case = graded_batch(batch=batch)
    a, W, x = case.inputs
    runs = {}
    for in_dims in (0, None):
        cell = GradedCell(W)
        deq = eq.DEQ(cell, solver=SOLVERS[name], stop=TIGHT, in_dims=in_dims).eval()
        runs[in_dims] = deq(a, x), cell.sizes
    compact, sizes = runs[0]
    shared, full = runs[None]
    assert set(full) == {batch}
    assert sizes[0] == batch
    assert min(sizes) <= (batch + 1) // 2
    assert len(set(sizes)) <= 1 + math.ceil(math.log2(batch))  # few shapes, for compiled cells
    assert (compact.value - shared.value).abs().max() <= 1e-12
    assert compact.stats.steps.tolist() == shared.stats.steps.tolist()
    assert compact.stats.status.tolist() == shared.stats.status.tolist()
    assert compact.stats.nfe == len(sizes)
    assert case.error(compact.value) < 1e-9


def test_compaction_with_nan_and_unfinished_systems():
    case = graded_batch(batch=24)
    case.inputs[0][5] = torch.nan
    stop = Stop(rtol=1e-11, max_steps=12)
    compact, shared = (case.solve("picard", compact=flag, stop=stop, trace=True) for flag in (True, False))
    assert len(compact.stats.status.unique()) == 3  # converged, out of steps, non-finite
    assert compact.stats.status.tolist() == shared.stats.status.tolist()
    assert compact.stats.steps.tolist() == shared.stats.steps.tolist()
    assert torch.allclose(compact.value, shared.value, rtol=0, atol=1e-12)
    assert torch.allclose(compact.stats.trace, shared.stats.trace, rtol=1e-6, atol=1e-14, equal_nan=True)


def test_no_compaction_while_gradients_flow_through_the_loop():
    case, counter = counted(graded_batch(batch=32))
    with torch.enable_grad():
        case.solve("anderson", adjoint=eq.Unroll(), stop=TIGHT)
    assert set(counter.sizes) == {32}


def test_inputs_are_sliced_along_their_own_axis():
    case = graded_batch(batch=24)
    a, W, x = case.inputs
    f = problems.Counted(lambda z, a, W, tree: torch.tanh(a["a"].T * (z @ W.T) + tree[0]))
    solution = eq.fixed_point(f, case.z0, {"a": a.T}, W, (x, None), solver="picard", stop=TIGHT, in_dims=(1, None, 0))
    assert min(f.sizes) < 12
    assert case.error(solution.value) < 1e-9


@dataclasses.dataclass(frozen=True)
class Leaning(eq.Solver):
    """Picard that notes whether the context still belongs to the rows it is given."""

    seen: list = dataclasses.field(compare=False)

    def propose(self, problem, z, fz, state):
        a = problem.inputs[0]
        self.seen.append((len(z[0]), torch.equal(problem.context["a"], a), problem.num_systems))
        return fz, state


def test_context_is_sliced_with_the_rows():
    case = graded_batch(batch=32)
    seen = []
    case.solve(Leaning(seen), stop=TIGHT, context={"a": case.inputs[0], "note": "kept"})
    assert all(matches and rows == systems for rows, matches, systems in seen)
    assert min(rows for rows, _, _ in seen) < 16


@pytest.mark.parametrize("name", SOLVERS)
def test_dropout_masks_are_sliced_with_the_rows(name):
    """A mask drawn for the batch belongs to its systems also after others have been dropped."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout, self.sizes = eq.nn.VariationalDropout(0.4), []

        def forward(self, z, a, W, x):
            self.sizes.append(len(z))
            return torch.tanh(a * (self.dropout(z)[:, None, :] * W).sum(dim=2) + x)

    case = graded_batch(batch=32)
    a, W, x = case.inputs
    values = []
    for in_dims in ((0, None, 0), None):
        torch.manual_seed(3)
        cell = Cell()
        deq = eq.DEQ(
            cell, solver=SOLVERS[name], stop=TIGHT, in_dims=in_dims, initial_state=lambda a, W, x: torch.zeros_like(x)
        )
        values.append(deq(a, W, x).value)
        if name != "newton":  # whose systems may all finish at the same step
            assert (min(cell.sizes) < 16) == (in_dims is not None)
    assert (values[0] - values[1]).abs().max() <= 1e-12
