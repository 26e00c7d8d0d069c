"""The DEQ module: plans, starts, overrides, compilation, copies."""

import copy
import pickle

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import (
    DEQ,
    Anderson,
    Broyden,
    EquilibriumWarning,
    Implicit,
    Ladder,
    OneStep,
    Picard,
    Plan,
    Problem,
    Solution,
    Status,
    Stop,
    Unroll,
    override,
)
from equipoise.nn import VariationalDropout, spectral_norm, weight_norm
from tests.gradients import EXACT, TIGHT, TanhCell, normal, relative_error

# torch.compile itself asks every input for its .grad, also those that are no leaves.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def forward_and_gradient(deq, *inputs, seed=0):
    torch.manual_seed(seed)
    value = deq(*inputs).value
    return (value, *torch.autograd.grad(value.square().sum(), deq.parameters()))


# Plans


def test_defaults_and_names():
    deq = DEQ(TanhCell())
    assert deq.plan == Plan(Anderson(), Implicit(), Stop())
    assert deq.eval_plan is None
    named = DEQ(TanhCell(), solver="broyden", adjoint="one_step")
    assert named.plan == Plan(Broyden(), OneStep(), Stop())
    assert Plan("picard", "unroll") == Plan(Picard(), Unroll())


def test_the_evaluation_plan_is_used_in_eval_mode_only():
    cell, x = TanhCell(), normal(3, 6)
    deq = DEQ(cell, stop=TIGHT, eval_plan=Plan(Picard(), stop=Stop(rtol=0, max_steps=2, select="last")))
    trained = deq(x)
    assert relative_error(cell(trained.value, x), trained.value) <= 1e-12
    evaluated = deq.eval()(x)
    assert torch.equal(evaluated.value, cell(cell(torch.zeros_like(x), x), x))
    assert evaluated.stats.steps.tolist() == [2, 2, 2]


def test_without_an_evaluation_plan_both_modes_agree():
    deq, x = DEQ(TanhCell()), normal(3, 6)
    assert torch.equal(deq.train()(x).value, deq.eval()(x).value)


def test_a_plan_can_be_replaced():
    deq, x = DEQ(TanhCell()), normal(3, 6)
    deq.plan = deq.plan.replace(stop=Stop(rtol=0, max_steps=3), solver="picard")
    assert deq.plan.adjoint == Implicit()
    assert deq(x).stats.steps.tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="unknown part of a plan 'stops'; did you mean 'stop'"):
        deq.plan.replace(stops=Stop())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DEQ(lambda z, x: z), "cell must be an nn.Module.*equipoise.fixed_point"),
        (lambda: DEQ(TanhCell(), stop=5), r"stop must be a Stop\(...\), got int"),
        (lambda: DEQ(TanhCell(), solver=3), "solver must be a Solver"),
        (lambda: DEQ(TanhCell(), solver=Anderson), r"pass an instance, Anderson\(\)"),
        (lambda: DEQ(TanhCell(), eval_plan=Anderson()), r"eval_plan must be a Plan\(...\), got Anderson"),
    ],
)
def test_wrong_parts_are_refused(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_an_unknown_name_is_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'anderson'"):
        DEQ(TanhCell(), solver="andersen")


def test_repr_tells_the_plan():
    text = repr(DEQ(TanhCell(), eval_plan=Plan("broyden")))
    assert "solver=Anderson(memory=6" in text
    assert "eval_plan=Plan(solver=Broyden(" in text
    assert "(cell): TanhCell" in text


# Overrides


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = DEQ(TanhCell(seed=1))
        self.rest = nn.ModuleList([DEQ(TanhCell(seed=2), solver="broyden", eval_plan=Plan("picard")), nn.Linear(6, 6)])

    def forward(self, x):
        return self.rest[0](self.first(x).value)


def test_override_changes_every_equilibrium_and_restores():
    model = Nested()
    plans = [(deq.plan, deq.eval_plan) for deq in (model.first, model.rest[0])]
    with override(model, stop=Stop(max_steps=3), adjoint="one_step") as same:
        assert same is model
        assert model.first.plan == Plan(Anderson(), OneStep(), Stop(max_steps=3))
        assert model.first.eval_plan is None
        assert model.rest[0].plan == Plan(Broyden(), OneStep(), Stop(max_steps=3))
        assert model.rest[0].eval_plan == Plan(Picard(), OneStep(), Stop(max_steps=3))
        with override(model.first, stop=Stop(max_steps=7)):
            assert model.first.plan.stop.max_steps == 7
            assert model.first.plan.adjoint == OneStep()
            assert model.rest[0].plan.stop.max_steps == 3
        assert model.first.plan.stop.max_steps == 3
        assert model(normal(2, 6)).stats.nfe == 3 + 1
    assert [(deq.plan, deq.eval_plan) for deq in (model.first, model.rest[0])] == plans


def test_override_restores_after_an_exception():
    model = Nested()
    before = model.first.plan
    with pytest.raises(ArithmeticError), override(model, stop=Stop(max_steps=3)):
        raise ArithmeticError
    assert model.first.plan is before
    assert model.rest[0].eval_plan == Plan("picard")


def test_override_refuses_what_it_does_not_know():
    model = Nested()
    before = model.first.plan
    with pytest.raises(ValueError, match="unknown part of a plan 'max_steps'"), override(model, max_steps=3):
        pass
    with pytest.raises(ValueError, match="did you mean 'picard'"), override(model, solver="pickard"):
        pass
    assert model.first.plan is before
    with pytest.raises(ValueError, match="Linear contains no DEQ"), override(nn.Linear(2, 2), stop=Stop()):
        pass


# Starts


def test_the_default_start_is_zeros_like_the_first_input():
    cell, x = TanhCell(), normal(3, 6)
    seen = []
    handle = cell.register_forward_hook(lambda module, args, out: seen.append(args[0].clone()))
    DEQ(cell)(x)
    handle.remove()
    assert torch.equal(seen[0], torch.zeros_like(x))


class StartingCell(TanhCell):
    def initial_state(self, x):
        return x.tanh()


class Widened(nn.Module):
    """A cell whose state is wider than its input, or whose first layer is."""

    def __init__(self, given, width=16):
        super().__init__()
        self.inner, self.outer = nn.Linear(given, width), nn.Linear(3, width)

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + self.outer(x))


@pytest.mark.parametrize(("given", "words"), [(3, r"f\(z\) has shape \(8, 16\)"), (16, "cannot be multiplied")])
def test_an_error_of_the_first_evaluation_tells_the_default_start(given, words):
    x, note = torch.randn(8, 3), "zeros like the first input, of shape (8, 3); give the cell an initial_state(*inputs)"
    with pytest.raises((ValueError, RuntimeError), match=words) as caught:
        DEQ(Widened(given))(x)
    assert [note in line for line in caught.value.__notes__] == [True]
    starts = {"z0": torch.zeros(8, 3)}
    with pytest.raises((ValueError, RuntimeError), match=words) as caught:
        DEQ(Widened(given))(x, **starts)
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises((ValueError, RuntimeError), match=words) as caught:
        DEQ(Widened(given), initial_state=torch.zeros_like)(x)
    assert not hasattr(caught.value, "__notes__")
    assert DEQ(Widened(16), initial_state=lambda x: x.new_zeros(len(x), 16))(x).value.shape == (8, 16)


def test_an_error_of_a_later_evaluation_is_left_as_it_is():
    class Late(nn.Module):
        calls = 0

        def forward(self, z, x):
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("late")
            return torch.tanh(0.5 * z + x)

    with pytest.raises(RuntimeError, match="late") as caught:
        DEQ(Late())(torch.randn(4, 3))
    assert not hasattr(caught.value, "__notes__")


def test_a_cell_may_bring_its_own_start_and_the_module_may_replace_it():
    x = normal(3, 6)
    for options, want in (({}, x.tanh()), ({"initial_state": lambda x: x + 1}, x + 1)):
        deq = DEQ(StartingCell(), **options)
        assert torch.equal(deq.start(x), want)
        iterates = deq(x, collect="iterates").collected["iterates"]
        assert torch.equal(iterates[0], want)


def test_a_start_may_be_passed():
    deq, x = DEQ(TanhCell(), stop=TIGHT), normal(3, 6)
    root = deq(x).value.detach()
    again = deq(x, z0=root)
    assert again.stats.steps.tolist() == [0, 0, 0]
    assert again.stats.status.tolist() == [Status.CONVERGED] * 3
    assert torch.equal(again.value, root)


def test_a_start_of_another_shape_than_the_input():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.U = TanhCell(n=4), nn.Parameter(normal(4, 6, seed=1))

        def forward(self, z, x):
            return self.inner(z, x @ self.U.mT)

    deq, x = DEQ(Narrow()), normal(3, 6)
    with pytest.raises(RuntimeError):  # zeros like the input do not fit
        deq(x)
    value = deq(x, z0=torch.zeros(3, 4, dtype=torch.float64)).value
    deq.initial_state = lambda x: x.new_zeros(len(x), 4)
    assert torch.equal(deq(x).value, value)


def test_a_tree_as_first_input_and_a_missing_start():
    class Pair(nn.Module):
        def forward(self, z, x):
            return {"a": z["b"] / 2 + x["a"], "b": z["a"] / 2 + x["b"]}

    x = {"a": normal(3, 2), "b": normal(3, 2, seed=1)}
    value = DEQ(Pair(), stop=TIGHT)(x).value
    want = {"a": (x["a"] + x["b"] / 2) / 0.75, "b": (x["b"] + x["a"] / 2) / 0.75}
    assert relative_error((value["a"], value["b"]), (want["a"], want["b"])) <= 1e-12

    class Halve(nn.Module):
        def forward(self, z, *inputs):
            return z / 2

    for inputs in ((), (3.0,)):
        with pytest.raises(ValueError, match=r"initial_state\(\*inputs\), or pass z0"):
            DEQ(Halve())(*inputs)
    assert DEQ(Halve())(z0=torch.zeros(2, 3)).value.tolist() == [[0.0] * 3] * 2


# Inputs


class Mixed(nn.Module):
    """One input per system, one shared by all, one with the systems in its second axis, and a number."""

    def initial_state(self, x, shift, gain, scale):
        return torch.zeros_like(x)

    def forward(self, z, x, shift, gain, scale):
        return scale * torch.tanh(gain[0][:, None] * z + x) + shift


def test_in_dims_say_which_axis_counts_systems():
    x, shift = normal(24, 3), normal(3, seed=1)
    gain = torch.full((1, 24), 0.3, dtype=torch.float64)
    gain[0, ::6] = 1.5
    inputs = (x, shift, gain, 0.6)
    sizes = []
    values = []
    for in_dims in ((0, None, 1, None), None):
        cell = Mixed()
        cell.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
        with torch.no_grad():
            values.append(DEQ(cell, in_dims=in_dims, stop=Stop(rtol=1e-12, max_steps=200))(*inputs).value)
    assert min(sizes) < 24
    assert relative_error(values[0], values[1]) <= 1e-11


@pytest.mark.parametrize(
    ("in_dims", "words"),
    [
        (0, r"input 1 has shape \(3,\).*axis 0 indexes the 24 systems.*None for an input all systems share"),
        ((0, None), "does not fit 4 inputs"),
        ((0, None, 0, None), r"input 2 has shape \(1, 24\)"),
        ((0, None, 1.5, None), r"in_dims\[2\] is 1.5; expected an axis number"),
    ],
)
def test_wrong_in_dims_are_refused(in_dims, words):
    inputs = (normal(24, 3), normal(3), torch.ones(1, 24, dtype=torch.float64), 0.6)
    with pytest.raises(ValueError, match=words):
        DEQ(Mixed(), in_dims=in_dims)(*inputs)


def test_context_trace_and_collect_are_passed_on():
    seen = []

    class Looking(Picard):
        def propose(self, problem, z, fz, state):
            seen.append(problem.context)
            return super().propose(problem, z, fz, state)

    deq, x = DEQ(TanhCell(), solver=Looking(), stop=Stop(rtol=0, max_steps=4)), normal(3, 6)
    solution = deq(x, context="words", trace=True, collect="iterates")
    assert seen == ["words"] * 4
    assert solution.stats.trace.shape == (3, 5)
    assert len(solution.collected["iterates"]) == 5


def test_problem():
    deq, x = DEQ(TanhCell()), normal(3, 6)
    problem = deq.problem(x)
    assert isinstance(problem, Problem)
    assert (problem.num_systems, problem.nfe) == (3, 0)
    z = normal(3, 6, seed=1)
    assert torch.equal(problem.evaluate([z])[0], deq.cell(z, x))
    assert problem.nfe == 1
    solution = deq(x)
    assert isinstance(solution, Solution)
    assert solution.problem.inputs == (x,)
    assert torch.equal(solution.problem.evaluate([z])[0], deq.cell(z, x))


def test_several_batch_axes():
    x = normal(2, 5, 6)
    deq = DEQ(TanhCell(), batch_dims=2)
    solution = deq(x)
    assert solution.stats.status.shape == (10,)
    assert solution.value.shape == (2, 5, 6)
    assert relative_error(solution.value.view(10, 6), DEQ(TanhCell(), batch_dims=1)(x.view(10, 6)).value) <= 1e-12


def test_moving_the_module_moves_the_solve():
    deq = DEQ(TanhCell()).float()
    solution = deq(normal(3, 6, dtype=torch.float32))
    assert solution.value.dtype == torch.float32
    assert deq.double()(normal(3, 6)).value.dtype == torch.float64


def test_a_solver_that_is_a_module_belongs_to_the_model():
    class Learned(eq.Solver, nn.Module):
        """A step length to be learnt."""

        def __init__(self):
            nn.Module.__init__(self)
            self.length = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))

        def propose(self, problem, z, fz, state):
            return [a + self.length * (b - a) for a, b in zip(z, fz, strict=True)], state

    solver = Learned()
    deq = DEQ(TanhCell(), solver=solver, adjoint=Unroll(), stop=Stop(rtol=0, max_steps=5, select="last"))
    assert any(parameter is solver.length for parameter in deq.parameters())
    deq(normal(3, 6)).value.sum().backward()
    z = torch.zeros(3, 6, dtype=torch.float64)
    length = solver.length.detach().clone().requires_grad_()
    for _ in range(5):
        z = z + length * (deq.cell(z, normal(3, 6)) - z)
    assert relative_error(solver.length.grad, torch.autograd.grad(z.sum(), length)) <= 1e-12
    deq.float()
    assert deq.plan.solver.length.dtype == torch.float32


def test_training_reduces_a_loss():
    torch.manual_seed(0)
    cell = TanhCell(n=8, norm=0.5)
    model = nn.Sequential(nn.Linear(4, 8).double(), DEQ(cell))
    head = nn.Linear(8, 1).double()
    x = normal(32, 4, seed=1)
    y = x[:, :1] * x[:, 1:2]
    optimiser = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for _ in range(40):
        loss = (head(model(x).value) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


# Compilation


class FullCell(nn.Module):
    """Everything that a solve holds constant, in one cell."""

    def __init__(self, n=6, p=0.3):
        super().__init__()
        torch.manual_seed(1)
        self.first = weight_norm(nn.Linear(n, n).double())
        self.second = spectral_norm(nn.Linear(n, n).double(), bound=0.5)
        self.drop = VariationalDropout(p)

    def forward(self, z, x):
        return 0.8 * torch.tanh(self.second(self.drop(torch.tanh(self.first(z)))) + x)


@compiles
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [TanhCell, FullCell])
def test_a_compiled_cell_equals_the_eager_one(make, backend):
    deq, x = DEQ(make(), adjoint=EXACT, stop=Stop(rtol=1e-12, max_steps=100)), normal(5, 6)
    deq.eval()
    want = forward_and_gradient(deq, x)
    deq.compile_cell(backend=backend)
    assert relative_error(forward_and_gradient(deq, x), want) <= 1e-11
    with torch.no_grad():
        assert relative_error(deq(x).value, want[0]) <= 1e-11


@compiles
def test_a_compiled_cell_in_training_mode_keeps_its_masks():
    deq, x = DEQ(FullCell(), adjoint=EXACT, stop=Stop(rtol=1e-12, max_steps=100)), normal(5, 6)
    deq.cell.second.eval()  # a power iteration per solve would change the weight between the two
    want = forward_and_gradient(deq, x, seed=4)
    other = forward_and_gradient(deq, x, seed=5)
    assert relative_error(other[0], want[0]) > 1e-3
    deq.compile_cell(backend="aot_eager")
    for seed, reference in ((4, want), (5, other)):
        assert relative_error(forward_and_gradient(deq, x, seed=seed), reference) <= 1e-11


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("make", [TanhCell, FullCell])
def test_a_cell_compiled_by_inductor_equals_the_eager_one(make):
    deq, x = DEQ(make(), adjoint=EXACT, stop=Stop(rtol=1e-12, max_steps=100)), normal(5, 6)
    deq.eval()
    want = forward_and_gradient(deq, x)
    deq.compile_cell()
    assert relative_error(forward_and_gradient(deq, x), want) <= 1e-10


@compiles
@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_compiled_model_can_be_copied(way):
    model, x = nn.Sequential(DEQ(TanhCell(), stop=TIGHT)), normal(3, 6)
    model[0].compile_cell(backend="eager")
    want = model(x).value
    twin = way(model)
    assert twin[0]._compiled is None
    assert model[0]._compiled is not None
    assert relative_error(twin(x).value, want) <= 1e-12
    assert set(model.state_dict()) == {"0.cell.W"}
    with torch.no_grad():
        twin[0].cell.W.zero_()
    assert relative_error(model(x).value, want) <= 1e-15


@compiles
def test_a_compiled_cell_serves_derivatives_of_any_order():
    deq, x = DEQ(TanhCell(), adjoint=Implicit(any_order=True, stop=TIGHT), stop=TIGHT), normal(3, 6).requires_grad_()
    results = []
    for compiled in (False, True):
        if compiled:
            deq.compile_cell(backend="aot_eager")
        slope = torch.autograd.grad(deq(x).value.square().sum(), x, create_graph=True)[0]
        results.append(torch.autograd.grad(slope.square().sum(), (deq.cell.W, x)))
    assert relative_error(results[0], results[1]) <= 1e-10


@compiles
def test_failed_backward_passes_of_two_compiled_models_both_warn():
    hard = Implicit(stop=Stop(rtol=1e-12, max_steps=3))
    for seed in (1, 2):
        deq = DEQ(TanhCell(norm=0.95, seed=seed), adjoint=hard)
        deq.compile_cell(backend="eager")
        value = deq(normal(3, 6)).value
        with pytest.warns(EquilibriumWarning, match="MAX_STEPS"):
            value.sum().backward()


@pytest.fixture
def fresh_compiler():
    """No compiled code from earlier tests, whose guards would count against the limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CAPTURED = [
    (Anderson(memory=3), "best"),
    (Broyden(), "best"),
    (Broyden(memory=3), "last"),
    (Picard(), "last"),
    (Picard(damping=0.5), "best"),
]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("solver", "select"), CAPTURED, ids=str)
def test_a_fixed_budget_solve_compiles_as_one_graph(solver, select):
    deq, x = DEQ(TanhCell(), solver=solver, stop=Stop(rtol=0, max_steps=5, select=select)).eval(), normal(3, 6)

    def both(x):
        solution = deq(x)
        return solution.value, solution.stats.residual

    with torch.no_grad():
        want = both(x)
        got = torch.compile(both, fullgraph=True, backend="eager")(x)
    assert relative_error(got[0], want[0]) <= 1e-12
    assert relative_error(got[1], want[1]) <= 1e-9


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("solver", [Anderson(), Broyden(), Picard()], ids=repr)
def test_a_fixed_budget_solve_compiles_by_inductor(solver):
    deq, x = DEQ(TanhCell(), solver=solver, stop=Stop(rtol=0, max_steps=4)).eval(), normal(3, 6)
    with torch.no_grad():
        want = deq(x)
        got = torch.compile(lambda x: deq(x).value, fullgraph=True)(x)
    assert relative_error(got, want.value) <= 1e-10


def test_ladder_in_a_module():
    deq, x = (
        DEQ(TanhCell(norm=0.99), solver=Ladder((Picard(), Broyden())), stop=Stop(rtol=1e-10, max_steps=30)),
        normal(4, 6),
    )
    solution = deq(x)
    assert bool(solution.stats.ok.all())
    assert relative_error(deq.cell(solution.value, x), solution.value) <= 1e-9
