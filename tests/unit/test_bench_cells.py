"""What benchmarks are run on: solvable in both directions, compared with the truth, rivals that do the same work."""

import pytest
import torch

from equipoise import OneStep, Plan, Stop
from equipoise.bench import rivals, skewed, solver
from equipoise.bench.cells import SHAPES, Bench
from equipoise.bench.harness import Check, Row
from equipoise.bench.torchdeq import Counted, implicit_layer, solvers_by_evaluations
from equipoise.bench.train_step import STEPS, TRAINED, backward, gradients, judged, step
from equipoise.solvers import Anderson

CPU = torch.device("cpu")
# The published shapes with fewer systems, positions and, where it is huge, a narrower inner part.
REDUCED = {
    "copy": TRAINED["copy"].replace(batch=3, length=48),
    "small": TRAINED["small"].replace(batch=2, length=24, width=128, inner=512),
    "medium": TRAINED["medium"].replace(batch=2, length=20, width=208, inner=800),
    "wide": TRAINED["wide"].replace(batch=2, length=12, width=96, inner=6000),
}


@pytest.mark.parametrize("name", REDUCED)
def test_both_solves_reach_the_rounding_of_bfloat16_in_20_steps(name):
    bench = Bench(REDUCED[name], CPU)
    assert bench.shape.half
    truth = bench.truth()
    assert 0.4 < bench.radius(truth) < 0.85
    backward(bench, truth.value)
    exact = gradients(bench)
    solution = step(bench, "eager")()
    assert solution.stats.residual.max() < 5e-3
    assert solution.backward.residual.max() < 5e-3
    assert all(check.ok for check in judged(gradients(bench), exact, bench.shape))


def test_a_gradient_that_is_not_the_implicit_one_is_red():
    bench = Bench(REDUCED["small"], CPU)
    backward(bench, bench.truth().value)
    exact = gradients(bench)
    step(bench, "eager", OneStep())()
    assert judged(gradients(bench), exact, bench.shape)[0].error > 0.1  # the tolerance is 3e-2
    step(bench, "eager")()
    found = gradients(bench)
    smallest = min(range(len(found)), key=lambda i: float(found[i].norm()) or torch.inf)
    found[smallest] = torch.zeros_like(found[smallest])  # one tensor is missing
    _, each = judged(found, exact, bench.shape)
    assert not each.ok
    assert each.error == pytest.approx(1.0)


def test_a_solve_that_has_not_converged_is_red():
    bench = Bench(REDUCED["small"], CPU)
    with torch.no_grad():
        truth = bench.truth().value
        for steps, ok in ((2, False), (20, True)):
            with bench.planned(Plan(Anderson(), stop=Stop(rtol=0, max_steps=steps)), "eager") as deq, bench.autocast():
                value = deq(*bench.inputs).value
            row = Row("row", "step", "base")
            solver._judge(row, "anderson", bench, value, truth, steps)
            assert (row.wrong("anderson") is None) == ok


def test_torchdeq_does_the_same_work_in_the_same_precision():
    pytest.importorskip("torchdeq")
    bench = Bench(REDUCED["small"], CPU)
    dtypes = []
    hook = bench.deq.cell.feed_forward.widen.register_forward_hook(lambda m, i, out: dtypes.append(out.dtype))
    for name, solve in solvers_by_evaluations(8).items():
        counted = Counted(bench.f)
        with torch.no_grad():
            solve(counted, bench.start(), tol=1e-30, stop_mode="rel")
        assert counted.calls == 8, name
    counted = Counted(bench.f)
    layer = implicit_layer(STEPS)
    with bench.autocast():
        outputs, _ = layer(counted, bench.start())
    forward = counted.calls
    backward(bench, outputs[-1])
    hook.remove()
    assert (forward, counted.calls, counted.products) == (STEPS + 1, STEPS + 2, STEPS + 1)
    assert set(dtypes) == {torch.bfloat16}  # in its backward pass as well


def test_counted_maps_leave_values_and_gradients_alone():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    counted = Counted(torch.tanh)
    (grad,) = torch.autograd.grad(counted(x).sum(), x)
    torch.testing.assert_close(grad, 1 - torch.tanh(x).detach().square(), rtol=1e-14, atol=0)
    assert (counted.calls, counted.products) == (1, 1)


# A batch with a hard system


def test_live_systems_are_those_that_are_not_done():
    assert skewed.live(torch.tensor([1, 3, 0, 1])) == [4, 3, 1, 1]
    steps = torch.randint(0, 20, (50,))
    assert sum(skewed.live(steps)) == int((steps + 1).sum())  # every system is evaluated until it is done


def test_the_hard_system_is_hard_and_the_others_are_not():
    (row,) = skewed.skewed(["tiny"], CPU, 1)
    easy, hard = (int(word) for word in row.details["anderson, eager"]["steps"].split() if word.isdigit())
    assert hard > 2 * easy
    assert row.checks["anderson, captured"][-1].against.startswith("no solve left to the eager engine")


# Other libraries


def test_missing_libraries_are_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    (row,) = rivals.rivals(["tiny"], CPU, 1)
    assert row.skipped["optimistix"] == "not installed (pip install optimistix jax)"
    assert row.skipped["torchdiffeq"] == "not installed (pip install torchdiffeq)"
    assert {"anderson, eager", "broyden, captured"} <= row.values.keys()


def test_a_library_that_fails_does_not_stop_the_others(monkeypatch):
    def broken(*_):
        raise OSError("no such device")

    monkeypatch.setattr(rivals, "_add_scipy", broken)
    (row,) = rivals.rivals(["tiny"], CPU, 1)
    assert row.skipped["scipy"] == "failed: OSError('no such device')"
    assert row.ratio("broyden, eager") is not None


def test_failures_are_counted_system_by_system():
    problem = rivals._Problem.random(6, 16, CPU)
    row = Row("row", "solve", "base")
    z = torch.zeros(6, 16)
    for _ in range(400):
        z = problem.f(z)
    z[2] += 0.1
    z[4] = torch.nan
    rivals._judge(row, "some", problem, z, 400)
    assert row.details["some"]["failures"] == 2
    assert not row.checks["some"][0].ok
    assert row.checks["some"] == [Check(torch.inf, rivals.SLACK * rivals.RTOL, row.checks["some"][0].against)]


def test_shapes_with_goals_are_those_of_the_published_table():
    goals = {name: (dict(shape.overheads).get("anderson"), shape.forward, shape.step) for name, shape in SHAPES.items()}
    assert goals == {
        "copy": (1.25, 7, 10),
        "small": (1.3, 10, 10),
        "medium": (1.3, 9, 10),
        "wide": (1.08, 2.4, 2.5),
        "wide56": (1.05, 1.4, None),
        "tiny": (None, None, None),
    }
