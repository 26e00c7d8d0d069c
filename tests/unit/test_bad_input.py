"""Every refusal says what was given, what was expected, and the nearest valid choice."""

import re

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import Stop
from equipoise._errors import require_count, require_number, unknown_name

Z = torch.zeros(3, 4)


def half(z, *inputs):
    return 0.5 * z


def says(*parts):
    """A pattern that finds the parts in this order."""
    return "(?s)" + ".*".join(re.escape(part) for part in parts)


# --- the helpers -----------------------------------------------------------------------------------------------------


def test_unknown_name():
    assert str(unknown_name("solver", "andersen", ["picard", "anderson"])) == (
        "unknown solver 'andersen'; did you mean 'anderson'? Known: anderson, picard."
    )
    assert (
        str(unknown_name("solver", "xyz", ["picard", "anderson"])) == "unknown solver 'xyz'. Known: anderson, picard."
    )


@pytest.mark.parametrize("value", [-0.1, 1.0, 2, "a", None, True, float("nan"), float("inf")])
def test_require_number(value):
    with pytest.raises(ValueError, match=says("Owner: size must be a number in [0, 1)", repr(value))):
        require_number("Owner", "size", value, low=0.0, high=1.0)


def test_require_number_with_an_open_end():
    require_number("Owner", "size", 0, low=0.0)
    with pytest.raises(ValueError, match=says("(0, inf)", "got 0")):
        require_number("Owner", "size", 0, low=0.0, open_low=True)


@pytest.mark.parametrize("value", [0, -1, 1.0, "3", None, True])
def test_require_count(value):
    with pytest.raises(ValueError, match=says("Owner: size must be an integer of at least 1", repr(value))):
        require_count("Owner", "size", value)


# --- Stop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"rtol": 1.0}, ("rtol", "[0, 1)", "1.0")),
        ({"rtol": -1e-3}, ("rtol", "[0, 1)", "-0.001")),
        ({"rtol": "1e-3"}, ("rtol", "[0, 1)", "'1e-3'")),
        ({"rtol": float("nan")}, ("rtol", "[0, 1)", "nan")),
        ({"atol": -1.0}, ("atol", "[0, inf)", "-1.0")),
        ({"atol": float("inf")}, ("atol", "[0, inf)", "inf")),
        ({"max_steps": 0}, ("max_steps", "at least 1", "0")),
        ({"max_steps": 2.5}, ("max_steps", "integer", "2.5")),
        ({"max_steps": True}, ("max_steps", "integer", "True")),
        ({"check_every": 0}, ("check_every", "at least 1", "0")),
        ({"check_every": 9, "max_steps": 5}, ("check_every=9", "max_steps=5", "rtol=0")),
        ({"plateau": 0}, ("plateau", "at least 1", "0")),
        ({"diverge": 1.0}, ("diverge", "above 1", "1.0")),
        ({"diverge": "big"}, ("diverge", "above 1", "'big'")),
        ({"norm": "rmse"}, ("norm", "'rmse'", "did you mean 'rms'?", "l2, rms")),
        ({"norm": torch.linalg.norm}, ("norm", "l2, rms")),
        ({"select": "lst"}, ("select", "'lst'", "did you mean 'last'?", "best, last")),
    ],
    ids=lambda item: str(item) if isinstance(item, dict) else "",
)
def test_stop(options, parts):
    with pytest.raises(ValueError, match=says(*parts)):
        Stop(**options)


# --- the state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 1.0, "1", None, True])
def test_batch_dims(value):
    with pytest.raises(ValueError, match=says("batch_dims", "non-negative integer", repr(value))):
        eq.fixed_point(half, Z, batch_dims=value)


@pytest.mark.parametrize("z0", [(), {}, []], ids=str)
def test_a_start_without_tensors(z0):
    with pytest.raises(ValueError, match=says("z0 holds no tensors", repr(z0), "tensor or a tuple, list or dict")):
        eq.fixed_point(half, z0)


def test_a_start_with_something_else_in_it():
    with pytest.raises(TypeError, match=says("leaf 1 is float (2.0)", "must be a tensor")):
        eq.fixed_point(half, (Z, 2.0))
    with pytest.raises(TypeError, match=says("leaf 0 is int (3)", "must be a tensor")):
        eq.fixed_point(half, 3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_start_that_is_not_real(dtype):
    with pytest.raises(TypeError, match=says("leaf 0", str(dtype), "real floating point")):
        eq.fixed_point(half, torch.zeros(3, 2, dtype=dtype))


def test_a_start_with_too_few_axes():
    with pytest.raises(ValueError, match=says("leaf 0 of shape (3, 4)", "batch_dims=3")):
        eq.fixed_point(half, Z, batch_dims=3)
    with pytest.raises(ValueError, match=says("leaf 0 of shape ()", "batch_dims=1")):
        eq.fixed_point(half, torch.tensor(1.0))


def test_a_start_with_different_batch_sizes():
    with pytest.raises(ValueError, match=says("leaf 1 has batch shape (5,)", "leaf 0 has (3,)")):
        eq.fixed_point(half, (Z, torch.zeros(5, 4)))


def test_a_start_on_two_devices():
    with pytest.raises(ValueError, match=says("leaf 1 is on meta", "leaf 0 on cpu", "one device")):
        eq.fixed_point(half, (Z, torch.zeros(3, 4, device="meta")))


# --- f ---------------------------------------------------------------------------------------------------------------


def test_f_must_be_callable():
    with pytest.raises(TypeError, match=says("callable as f(z, *inputs)", "Tensor")):
        eq.fixed_point(Z, Z)


@pytest.mark.parametrize(
    ("f", "error", "parts"),
    [
        (lambda z: (z,), ValueError, ("f(z) has structure", "the state z0 has")),
        (lambda z: z[:1], ValueError, ("f(z) has shape (1, 4)", "z0 has (3, 4)", "equal")),
        (lambda z: z[:, :1], ValueError, ("f(z) has shape (3, 1)", "z0 has (3, 4)", "equal")),
        (lambda z: z.sum(), ValueError, ("f(z) has shape ()", "z0 has (3, 4)")),
        (lambda z: z.T, ValueError, ("f(z) has shape (4, 3)", "z0 has (3, 4)")),
        (lambda z: z.double(), TypeError, ("f(z) has dtype torch.float64", "torch.float32", "cast")),
        (lambda z: z.long(), TypeError, ("f(z) has dtype torch.int64", "torch.float32")),
        (lambda z: z.to("meta"), ValueError, ("f(z) is on meta", "z0 is on cpu", "move")),
        (lambda z: 3.0, TypeError, ("f(z) is float", "tensor of shape (3, 4)")),
    ],
    ids=["structure", "broadcast_batch", "broadcast", "scalar", "transposed", "dtype", "integer", "device", "number"],
)
@pytest.mark.parametrize("solver", ["anderson", "newton"])
def test_f_must_map_a_state_to_its_like(f, error, parts, solver):
    with pytest.raises(error, match=says(*parts)):
        eq.fixed_point(f, Z, solver=solver)


def test_the_leaf_at_fault_is_named():
    with pytest.raises(ValueError, match=says("f(z), leaf 1, has shape (3, 2)", "z0 has (3, 4)")):
        eq.fixed_point(lambda z: (z[0], z[1][:, :2]), (Z, Z))


def test_f_returning_nothing():
    with pytest.raises((TypeError, ValueError), match=says("f(z)")):
        eq.fixed_point(lambda z: None, Z)


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_in_dims_of_the_wrong_length():
    with pytest.raises(ValueError, match=says("in_dims=(0,)", "2 inputs", "one of these per input")):
        eq.fixed_point(half, Z, Z, Z, in_dims=(0,))
    with pytest.raises(ValueError, match=says("in_dims='0'", "1 inputs")):
        eq.fixed_point(half, Z, Z, in_dims="0")


@pytest.mark.parametrize("dim", [0.5, "batch", True])
def test_in_dims_of_the_wrong_type(dim):
    with pytest.raises(ValueError, match=says("in_dims[0]", repr(dim), "axis number", "None")):
        eq.fixed_point(half, Z, Z, in_dims=(dim,))


@pytest.mark.parametrize(("shape", "dim"), [((5, 4), 0), ((3, 4), 1), ((3,), 1), ((), 0), ((3, 4), -3)])
def test_inputs_that_do_not_fit_the_systems(shape, dim):
    with pytest.raises(ValueError, match=says(f"input 0 has shape {shape}", f"axis {dim}", "3 systems", "None")):
        eq.fixed_point(half, Z, torch.zeros(shape), in_dims=dim)


# --- solver, adjoint, stop -------------------------------------------------------------------------------------------


def test_solver_names():
    with pytest.raises(
        ValueError, match=says("unknown solver 'andersen'; did you mean 'anderson'?", "broyden, ladder")
    ):
        eq.fixed_point(half, Z, solver="andersen")
    with pytest.raises(ValueError, match=says("unknown solver 'xyz'.", "Known: anderson")):
        eq.fixed_point(half, Z, solver="xyz")


def test_adjoint_names():
    with pytest.raises(ValueError, match=says("unknown adjoint 'implict'; did you mean 'implicit'?", "neumann")):
        eq.fixed_point(half, Z, adjoint="implict")


def test_classes_in_place_of_instances():
    with pytest.raises(TypeError, match=says("solver is the class Anderson", "pass an instance, Anderson()")):
        eq.fixed_point(half, Z, solver=eq.Anderson)
    with pytest.raises(TypeError, match=says("adjoint is the class OneStep", "pass an instance, OneStep()")):
        eq.fixed_point(half, Z, adjoint=eq.OneStep)


def test_objects_of_another_kind():
    with pytest.raises(TypeError, match=says("solver must be a Solver or one of anderson, broyden", "got Stop")):
        eq.fixed_point(half, Z, solver=Stop())
    with pytest.raises(TypeError, match=says("adjoint must be an Adjoint or one of implicit, neumann", "got Anderson")):
        eq.fixed_point(half, Z, adjoint=eq.Anderson())
    with pytest.raises(TypeError, match=says("stop must be a Stop(...)", "got float")):
        eq.fixed_point(half, Z, stop=1e-3)
    with pytest.raises(TypeError, match=says("stop must be a Stop(...)", "got type")):
        eq.fixed_point(half, Z, stop=Stop)


@pytest.mark.parametrize("collect", [3, ("iterates", 3), object()], ids=["int", "mixed", "object"])
def test_collect_of_another_kind(collect):
    with pytest.raises((TypeError, ValueError), match=says("collect")):
        eq.fixed_point(half, torch.ones(3, 4), collect=collect)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: eq.Picard(damping=0.0), ("Picard: damping", "(0, 2)", "0.0")),
        (lambda: eq.Picard(damping=2.0), ("Picard: damping", "(0, 2)", "2.0")),
        (lambda: eq.Picard("0.5"), ("Picard: damping", "(0, 2)", "'0.5'")),
        (lambda: eq.Anderson(memory=0), ("Anderson: memory", "at least 1", "0")),
        (lambda: eq.Anderson(memory=2.0), ("Anderson: memory", "integer", "2.0")),
        (lambda: eq.Anderson(mixing=0.0), ("Anderson: mixing", "(0, 2)", "0.0")),
        (lambda: eq.Anderson(ridge=-1.0), ("Anderson: ridge", "[0, inf)", "-1.0")),
        (lambda: eq.Broyden(memory=0), ("Broyden: memory", "at least 1", "0")),
        (lambda: eq.Broyden(step=-0.5), ("Broyden: step", "(0, 2)", "-0.5")),
        (lambda: eq.Broyden(line_search="armijo"), ("Broyden: line_search", "True or False", "'armijo'")),
        (lambda: eq.Broyden(line_search=1), ("Broyden: line_search", "True or False", "1")),
        (lambda: eq.GMRES(max_steps=0), ("GMRES: max_steps", "at least 1", "0")),
        (lambda: eq.GMRES(rtol=1.0), ("GMRES: rtol", "[0, 1)", "1.0")),
        (lambda: eq.Ladder(()), ("Ladder: stages", "non-empty tuple", "()")),
        (lambda: eq.Ladder([eq.Picard()]), ("Ladder: stages", "tuple of solvers", "[Picard")),
    ],
)
def test_solver_options(make, parts):
    with pytest.raises(ValueError, match=says(*parts)):
        make()


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: eq.NewtonKrylov(linear="gmres"), ("NewtonKrylov: linear", "GMRES(...)", "str")),
        (lambda: eq.NewtonKrylov(eq.GMRES), ("NewtonKrylov: linear", "GMRES(...)", "type")),
        (lambda: eq.Ladder(("anderson",)), ("Ladder: every stage must be a solver", "'anderson'")),
        (lambda: eq.Ladder((eq.Picard,)), ("Ladder: every stage must be a solver", "Picard")),
        (lambda: eq.Ladder((eq.Ladder(),)), ("Ladder: every stage", "no Ladder", "Ladder(")),
    ],
)
def test_solver_parts(make, parts):
    with pytest.raises(TypeError, match=says(*parts)):
        make()


def test_a_solver_without_a_step_cannot_be_made():
    class Nothing(eq.Solver):
        pass

    with pytest.raises(TypeError, match="propose"):
        Nothing()


# --- DEQ, Plan, override ---------------------------------------------------------------------------------------------


class Cell(nn.Module):
    def forward(self, z, x):
        return torch.tanh(0.5 * z + x)


def test_a_cell_must_be_a_module():
    with pytest.raises(TypeError, match=says("cell must be an nn.Module", "function", "equipoise.fixed_point")):
        eq.DEQ(half)


def test_an_eval_plan_must_be_a_plan():
    with pytest.raises(TypeError, match=says("eval_plan must be a Plan(...)", "Stop")):
        eq.DEQ(Cell(), eval_plan=Stop())


def test_plans_are_checked_when_made():
    with pytest.raises(ValueError, match="did you mean 'broyden'"):
        eq.DEQ(Cell(), solver="broiden")
    with pytest.raises(ValueError, match="did you mean 'phantom'"):
        eq.Plan(adjoint="fantom")
    with pytest.raises(TypeError, match=says("stop must be a Stop(...)", "int")):
        eq.Plan(stop=30)


def test_plans_take_names():
    plan = eq.Plan(solver="broyden", adjoint="one_step")
    assert plan == eq.Plan(eq.Broyden(), eq.OneStep())
    assert plan.replace(stop=Stop(max_steps=3)).stop.max_steps == 3


def test_a_part_no_plan_has():
    with pytest.raises(
        ValueError, match=says("part of a plan 'solvr'; did you mean 'solver'?", "adjoint, solver, stop")
    ):
        eq.Plan().replace(solvr="anderson")


def test_a_start_that_cannot_be_guessed():
    deq = eq.DEQ(Cell())
    for inputs in ((), ("text",)):
        with pytest.raises(ValueError, match=says("start of the solve is unknown", "initial_state", "z0")):
            deq(*inputs)


def test_inputs_of_another_batch_size():
    with pytest.raises(ValueError, match=says("input 1 has shape (2, 4)", "3 systems", "None")):
        eq.DEQ(Cell())(Z, torch.zeros(2, 4))


def test_override_needs_a_deq():
    with pytest.raises(ValueError, match=says("override: Linear contains no DEQ")), eq.override(nn.Linear(2, 2)):
        pass


def test_override_with_an_unknown_part_changes_nothing():
    model = nn.Sequential(eq.DEQ(Cell()), eq.DEQ(Cell(), eval_plan=eq.Plan("picard")))
    before = [(deq.plan, deq.eval_plan) for deq in model]
    with pytest.raises(ValueError, match="did you mean 'stop'"), eq.override(model, stp=Stop()):
        pass
    assert [(deq.plan, deq.eval_plan) for deq in model] == before


def test_override_changes_training_and_eval_plans_for_a_while():
    model = nn.Sequential(eq.DEQ(Cell()), eq.DEQ(Cell(), eval_plan=eq.Plan("picard")))
    before = [(deq.plan, deq.eval_plan) for deq in model]
    stop = Stop(rtol=0, max_steps=3)
    with eq.override(model, stop=stop) as same:
        assert same is model
        assert all(deq.plan.stop == stop for deq in model)
        assert model[1].eval_plan == eq.Plan("picard", stop=stop)
        assert model[0].eval()(Z).stats.steps.tolist() == [3] * 3
    assert [(deq.plan, deq.eval_plan) for deq in model] == before


# --- unsolved systems ------------------------------------------------------------------------------------------------


def test_throw_names_the_systems_and_the_remedy():
    factor = torch.tensor([[0.1], [-3.0], [0.2], [-3.0]])
    with pytest.raises(eq.EquilibriumError) as caught:
        eq.fixed_point(
            lambda z: factor * z + 1, torch.zeros(4, 2), solver="picard", stop=Stop(max_steps=10), throw=True
        )
    message = str(caught.value)
    assert "2 of 4 systems (rows 1, 3)" in message
    assert "MAX_STEPS, after 10 steps" in message
    assert "Stop(max_steps=...)" in message
    assert "throw=False" in message
