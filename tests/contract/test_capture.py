"""The captured engine gives what the eager one gives. On the CPU a recording is run again from Python."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import equipoise as eq
from equipoise import _capture, _loop
from tests.captured import (
    CLOSE,
    FIXED,
    SOLVERS,
    Scoped,
    Tanh,
    assert_close,
    assert_engines_agree,
    deq_of,
    inputs_of,
    loss_of,
    recordings_of,
    same_statistics,
    step,
    tensors,
)

# Results


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_and_budget(name, select, dtype):
    """Forward and adjoint by the same solver, to a tolerance and by a fixed budget."""
    solver, x = SOLVERS[name], inputs_of(dtype=dtype).requires_grad_()
    for rtol, most in ((1e-5 if dtype == torch.float64 else 1e-3, 60), (0.0, 5)):
        stop = eq.Stop(rtol=rtol, max_steps=most, select=select)
        deq = deq_of(Tanh(dtype=dtype), solver, stop, eq.Implicit(solver=solver, stop=stop))
        assert_engines_agree(deq, x, tolerance=CLOSE[dtype])


@pytest.mark.filterwarnings("ignore:the backward solve:equipoise.EquilibriumWarning")
@pytest.mark.parametrize("name", SOLVERS)
def test_a_budget_that_ends_too_early(name):
    stop = eq.Stop(rtol=1e-8, max_steps=3)
    deq = deq_of(Tanh(), SOLVERS[name], stop, eq.Implicit(solver=SOLVERS[name], stop=stop))
    captured, _ = assert_engines_agree(deq, inputs_of().requires_grad_())
    assert captured.stats.status.tolist() == [int(eq.Status.MAX_STEPS)] * 5


@pytest.mark.parametrize(
    "stop",
    [
        eq.Stop(rtol=1e-30, max_steps=60, plateau=4),
        eq.Stop(rtol=1e-30, max_steps=60, plateau=None),
        eq.Stop(rtol=0, atol=1e-6, norm="rms", max_steps=60),
        eq.Stop(rtol=1e-8, max_steps=60, check_every=7),
        eq.Stop(rtol=0, max_steps=70),
        eq.Stop(rtol=1e-8, max_steps=1),
    ],
    ids=["plateau", "floor", "rms", "check_every", "long", "one"],
)
def test_stop_rules(stop):
    deq, x = deq_of(Tanh(), stop=stop), inputs_of()
    with torch.no_grad():
        deq.engine = "eager"
        eager = deq(x)
        deq.engine = "captured"
        captured = [deq(x) for _ in range(2)][-1]
    assert torch.equal(captured.value, eager.value)
    same_statistics(captured.stats, eager.stats, 1e-15)
    assert captured.stats.nfe <= eager.stats.nfe + _loop.CHUNK


def test_systems_of_different_kinds_in_one_batch():
    """Converged at the start, easy, diverging, and one where f is NaN: rows do not disturb each other."""

    class Mixed(nn.Module):
        def forward(self, z, a, x):
            return a * z + x

    a = torch.tensor([[0.2], [0.5], [-3.0], [0.5], [0.9]], dtype=torch.float64)
    x = inputs_of(batch=5)
    x[0] = 0
    x[3, 2] = torch.nan
    for select in ("best", "last"):
        deq = deq_of(Mixed(), stop=eq.Stop(rtol=1e-8, max_steps=60, select=select))
        with torch.no_grad():
            captured = [deq(a, x, z0=torch.zeros_like(x)) for _ in range(2)][-1]
            deq.engine = "eager"
            eager = deq(a, x, z0=torch.zeros_like(x))
        assert_close(captured.value, eager.value, 1e-12)
        assert torch.equal(captured.stats.status, eager.stats.status)
        assert torch.equal(captured.stats.steps, eager.stats.steps)
        assert len(set(captured.stats.status.tolist())) >= 3
        assert torch.isfinite(captured.value).all()


class Pair(nn.Module):
    """Leaves of different shapes; one of them is returned as it came, so that images are the iterates' own storage."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.eye(4, dtype=torch.float64))

    def forward(self, z, x):
        a, b = z["a"], z["b"]
        return {"a": torch.tanh(b @ self.weight + x), "b": a}


def test_trees_whose_leaves_are_exchanged():
    x = inputs_of(4).view(5, 4).requires_grad_()
    deq = deq_of(Pair(), initial_state=lambda x: {"a": torch.ones_like(x), "b": torch.zeros_like(x)})
    assert_engines_agree(deq, x)


def test_leaves_of_mixed_dtypes_and_a_constant_one():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(0.4 * torch.eye(3))

        def forward(self, z, x):
            a, b = z
            return torch.tanh(a @ self.weight + b.float() * 0.2 + x), torch.full_like(b, 0.25)

    stop = eq.Stop(rtol=1e-4, max_steps=40)
    deq = deq_of(Mixed(), stop=stop, adjoint=eq.Implicit(stop=stop), initial_state=lambda x: (x * 0, x.bfloat16() * 0))
    assert_engines_agree(deq, inputs_of(3, dtype=torch.float32).requires_grad_(), tolerance=1e-4)


@pytest.mark.parametrize("batch_dims", [0, 1, 2])
def test_batch_dims(batch_dims):
    x = inputs_of(20).view(5, 5, 4).requires_grad_()
    assert_engines_agree(deq_of(Tanh(4), eq.Anderson(), batch_dims=batch_dims), x)


def test_channels_last_images():
    conv = nn.Conv2d(3, 3, 1).double()

    class Image(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv

        def forward(self, z, x):
            return torch.tanh(0.5 * self.conv(z) + x)

    x = inputs_of(48, batch=2).view(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    assert_engines_agree(deq_of(Image()), x)


@pytest.mark.parametrize("train", [True, False])
def test_scope(train):
    """The same masks as the eager engine under the same seed, new ones at each solve, and the state of buffers."""
    torch.manual_seed(0)
    cell = Scoped().double().train(train)
    twin = copy.deepcopy(cell)
    x = inputs_of().requires_grad_()
    ours, theirs = deq_of(cell, eq.Anderson()), deq_of(twin, eq.Anderson(), engine="eager")
    ours.train(train), theirs.train(train)
    values = []
    for seed in (5, 6, 6):
        (a, da, after_a), (b, db, after_b) = step(ours, x, seed=seed), step(theirs, x, seed=seed)
        assert_close((a.value, da), (b.value, db), 1e-10)
        assert torch.equal(after_a, after_b)
        assert_close(list(cell.buffers()), list(twin.buffers()), 1e-12)
        assert_close(list(a.problem.scope._drawn.values()), list(b.problem.scope._drawn.values()), 1e-12)
        values.append(a.value)
    assert train != bool(torch.equal(values[0], values[1]))
    assert ours.capture.recorded == 1
    assert ours.capture.replayed == 3


def test_a_draw_that_depends_on_values_is_made_by_evaluating():
    class Scaled(nn.Module):
        def begin_solve(self, x):
            return x.abs().mean() + torch.rand(())

        def forward(self, z, x):
            return torch.tanh(0.3 * z * eq.solve_constant(self, x) + x)

    deq, x = deq_of(Scaled()), inputs_of()
    assert_engines_agree(deq, x.requires_grad_(), solves=3)


def test_no_grad_and_inference_mode_share_a_recording():
    deq, x = deq_of(Scoped().double().eval()).eval(), inputs_of()
    deq.engine = "eager"
    expected = deq(x).value.detach()
    deq.engine = "captured"
    with torch.inference_mode():
        assert_close(deq(x).value, expected, 1e-12)
        inside = inputs_of()
        assert_close(deq(inside).value, expected, 1e-12)
    with torch.no_grad():
        solution = deq(x)
        assert_close(solution.value, expected, 1e-12)
        assert solution.backward is None
        assert not solution.value.requires_grad
    with torch.inference_mode():
        assert_close(deq(x).value, expected, 1e-12)
    assert deq.capture.recorded == 1


def test_nothing_wants_a_gradient():
    cell = Tanh().requires_grad_(False)
    deq = deq_of(cell)
    solution = [deq(inputs_of()) for _ in range(3)][-1]
    assert not solution.value.requires_grad
    assert deq.capture.recorded == 1
    assert not deq.capture.fallbacks
    assert_engines_agree(deq_of(cell), inputs_of().requires_grad_())


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson()], ids=str)
def test_bf16_autocast(solver):
    """f in bfloat16, iterates in float32: as in the eager engine, but that Anderson remembers residuals in bfloat16."""
    x = inputs_of(16, dtype=torch.float32).requires_grad_()
    stop = eq.Stop(rtol=1e-2, max_steps=30)
    deq = deq_of(Tanh(16, 0.6, torch.float32), solver, stop, eq.Implicit(solver=solver, stop=stop))
    optimiser = torch.optim.SGD(deq.parameters(), 0.1)
    for _ in range(3):
        results = []
        for engine in ("eager", "captured"):
            deq.engine = engine
            with torch.autocast("cpu", dtype=torch.bfloat16):
                solution = deq(x)
                outside = torch.nn.functional.linear(x, deq.cell.weight)  # no cast of a recording is left behind
            assert solution.value.dtype == torch.float32
            results.append((solution.value, outside, torch.autograd.grad(loss_of(solution.value), deq.parameters())))
        assert_close(results[1], results[0], 1e-5 if isinstance(solver, eq.Picard) else 5e-3)
        for p, grad in zip(deq.parameters(), results[0][2], strict=True):
            p.grad = grad
        optimiser.step()
    assert deq.capture.replayed == 3
    assert not deq.capture.fallbacks


# Leases


def test_two_forwards_before_one_backward():
    deq = deq_of(Tanh())
    xs = [inputs_of(seed=seed).requires_grad_() for seed in range(3)]
    expected = []
    deq.engine = "eager"
    for x in xs:
        expected.append(torch.autograd.grad(loss_of(deq(x).value), x)[0])
    deq.engine = "captured"
    solutions = [deq(x) for x in xs[:2]]
    with pytest.warns(eq.EquilibriumWarning, match="2 solves of this shape wait for their backward pass"):
        solutions.append(deq(xs[2]))
    assert deq.capture.recorded == 2
    assert deq.capture.replayed == 2
    for solution, x, truth in reversed(list(zip(solutions, xs, expected, strict=True))):
        assert_close(torch.autograd.grad(loss_of(solution.value), x)[0], truth, 1e-10)
    deq(xs[0])
    assert deq.capture.replayed == 3


def test_dropping_a_solution_frees_its_recording():
    deq, x = deq_of(Tanh()), inputs_of().requires_grad_()
    for _ in range(4):
        solution = deq(x)
        del solution
    kept = deq(x).value
    deq(x)
    assert deq.capture.recorded == 2
    assert not deq.capture.fallbacks
    assert kept.requires_grad


def test_backward_more_than_once():
    deq, x = deq_of(Tanh()), inputs_of().requires_grad_()
    loss = loss_of(deq(x).value)
    grads = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)
    deq(x)
    with pytest.raises(RuntimeError, match=r'second backward pass.*engine="eager"'):
        torch.autograd.grad(loss, x)


def test_derivatives_of_derivatives_are_refused():
    deq, x = deq_of(Tanh()), inputs_of().requires_grad_()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*any_order=True"):
        torch.autograd.grad(loss_of(deq(x).value), x, create_graph=True)


def test_a_parameter_changed_before_the_backward_pass_is_an_error():
    deq, x = deq_of(Tanh()), inputs_of().requires_grad_()
    loss = loss_of(deq(x).value)
    with torch.no_grad():
        deq.cell.weight.mul_(0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_some_cotangents_are_missing_or_zero():
    x = inputs_of(4).requires_grad_()
    deq = deq_of(Pair(), initial_state=lambda x: {"a": torch.zeros_like(x), "b": torch.zeros_like(x)})
    results = []
    for engine in ("eager", "captured"):
        deq.engine = engine
        a = deq(x).value["a"]
        results.append(torch.autograd.grad(a[1].sum(), x))
        results.append(torch.autograd.grad((deq(x).value["b"] * 0).sum(), x))
    assert_close(results[2:], results[:2], 1e-10)
    assert results[2][0][1].abs().max() > 0
    assert torch.equal(results[3][0], torch.zeros_like(x))


def test_backward_statistics_warn_and_throw():
    slow = eq.Stop(rtol=1e-12, max_steps=2)
    x = inputs_of().requires_grad_()
    deq = deq_of(Tanh(), adjoint=eq.Implicit(solver=eq.Picard(), stop=slow))
    solution = deq(x)
    assert solution.backward is None
    with pytest.warns(eq.EquilibriumWarning, match="backward solve left gradients inexact"):
        loss_of(solution.value).backward()
    assert solution.backward.status.tolist() == [int(eq.Status.MAX_STEPS)] * 5
    assert solution.backward.nfe == 3
    deq = deq_of(Tanh(), adjoint=eq.Implicit(solver=eq.Picard(), stop=slow, throw=True))
    with pytest.raises(eq.EquilibriumError, match="gradients inexact"):
        loss_of(deq(x).value).backward()


def test_backward_in_another_thread():
    """There scope and autocast of the solve are not in effect until they are entered again."""
    cell = Recomputing()
    x = inputs_of(dtype=torch.float32).requires_grad_()
    deq = deq_of(cell, stop=eq.Stop(rtol=1e-2), adjoint=eq.Implicit(stop=eq.Stop(rtol=1e-2)))
    results = []
    for engine in ("eager", "captured"):
        deq.engine = engine
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(deq(x).value)
        x.grad = None
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        results.append(x.grad)
    assert_close(results[1], results[0], 1e-4)
    assert deq.capture.replayed == 1


class Recomputing(nn.Module):
    """Part of f is evaluated again in each vector-Jacobian product, with the constants of the solve."""

    def __init__(self):
        super().__init__()
        self.mix, self.drop = nn.Linear(6, 6), eq.nn.VariationalDropout(0.4)

    def part(self, z):
        return self.drop(self.mix(z))

    def forward(self, z, x):
        part = checkpoint(self.part, z, use_reentrant=False) if torch.is_grad_enabled() else self.part(z)
        return torch.tanh(0.7 * part + x)


@pytest.mark.parametrize("solves", [1, 3])
def test_what_is_recomputed_finds_the_constants_of_its_solve(solves):
    torch.manual_seed(0)
    deq, x = deq_of(Recomputing().double()), inputs_of().requires_grad_()
    for _ in range(solves):
        solution = deq(x)
        grads = torch.autograd.grad(loss_of(solution.value), [*deq.parameters(), x])
    mix, mask = deq.cell.mix, solution.problem.scope.value(deq.cell.drop, x)
    root = solution.value.detach().requires_grad_()
    (cotangent,) = torch.autograd.grad(loss_of(root), root)
    wanted = [mix.weight, mix.bias, x]
    truth = eq.theory.dense_gradient(lambda z: torch.tanh(0.7 * mask * mix(z) + x), root.detach(), cotangent, wanted)
    assert_close(grads, list(truth), 1e-8)
    assert deq.capture.replayed == solves


# Parameters, buffers, shapes


def test_parameters_updated_in_place_stay_valid():
    deq, x = deq_of(Tanh()), inputs_of().requires_grad_()
    twin = copy.deepcopy(deq)
    twin.engine = "eager"
    optimisers = [torch.optim.AdamW(model.parameters(), 0.05) for model in (deq, twin)]
    for _ in range(4):
        values = []
        for model, optimiser in zip((deq, twin), optimisers, strict=True):
            optimiser.zero_grad(set_to_none=True)
            values.append(model(x).value)
            loss_of(values[-1]).backward()
            optimiser.step()
        assert_close(values[0], values[1], 1e-10)
    deq.load_state_dict({name: value * 0.5 for name, value in twin.state_dict().items()})
    twin.load_state_dict(deq.state_dict())
    assert_close(deq(x).value, twin(x).value, 1e-10)
    assert deq.capture.recorded == 1


@pytest.mark.parametrize("grad", [False, True])
def test_another_cell_is_recorded_anew(grad):
    """Of the same shapes, and looked at only after the launch without gradients."""
    deq, x = deq_of(Tanh(), stop=FIXED), inputs_of()
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            deq(x)
        deq.cell = Tanh(scale=0.3)
        found, deq.engine = [deq(x).value.detach() for _ in range(3)], "eager"
        expected = deq(x).value.detach()
    for value in found:
        assert_close(value, expected, 1e-10)


def test_replaced_parameters_are_recorded_anew():
    deq, x = deq_of(Tanh()), inputs_of()

    def check(recorded):
        value = deq(x.to(deq.cell.weight.dtype)).value
        deq.engine = "eager"
        assert_close(value, deq(x.to(deq.cell.weight.dtype)).value, CLOSE[value.dtype])
        deq.engine = "captured"
        assert deq.capture.recorded == recorded

    check(1)
    deq.cell.weight.data = deq.cell.weight.data * 0.5
    check(2)
    deq.cell.bias = nn.Parameter(deq.cell.bias.detach() + 1)
    check(3)
    deq.to(torch.float32)
    check(4)
    deq.cell.bias.requires_grad_(False)
    check(5)
    deq.cell.bias.requires_grad_(True)
    check(5)


def test_attributes_and_modes_of_the_cell_belong_to_a_recording():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.act, self.drop = 0.5, torch.tanh, eq.nn.VariationalDropout(0.0)
            self.table = torch.ones(6, dtype=torch.float64)
            self.register_buffer("shift", torch.zeros(6, dtype=torch.float64))

        def forward(self, z, x):
            return self.scale * self.act(self.drop(z)) * self.table + x + self.shift

    deq, x = deq_of(Gated()), inputs_of()
    changes = [
        lambda cell: cell.shift.add_(1),
        lambda cell: setattr(cell, "scale", 0.25),
        lambda cell: setattr(cell, "act", torch.sin),
        lambda cell: setattr(cell.drop, "p", 0.5),
        lambda cell: cell.eval(),
        lambda cell: setattr(cell, "table", cell.table * 2),
        lambda cell: setattr(cell, "shift", cell.shift * 2),
    ]
    for change in [lambda cell: None, *changes]:
        change(deq.cell)
        values = []
        for engine in ("eager", "captured"):
            deq.engine = engine
            torch.manual_seed(1)
            with torch.no_grad():
                values.append(deq(x).value)
        assert_close(values[1], values[0], 1e-12)
    assert deq.capture.recorded == 1 + len(changes) - 1  # a buffer changed in place is read where it is


def test_shapes_are_bounded_and_leased_recordings_survive(monkeypatch):
    monkeypatch.setattr(_capture, "MOST_SHAPES", 2)
    monkeypatch.setattr(_capture, "MOST_REMEMBERED", 3)
    deq = deq_of(Tanh())
    first = inputs_of(batch=2).requires_grad_()
    loss = loss_of(deq(first).value)
    alive = [weakref.ref(recording) for recording in recordings_of(deq)]
    for batch in (3, 4, 5, 6):
        deq(inputs_of(batch=batch))
    assert len(deq.capture._shapes) == 2
    assert len(deq.capture._seen) == 3
    assert alive[0]() is not None
    (grad,) = torch.autograd.grad(loss, first)
    del loss
    assert alive[0]() is None
    deq.engine = "eager"
    assert_close(grad, torch.autograd.grad(loss_of(deq(first).value), first)[0], 1e-10)
    deq.engine = "captured"
    deq(inputs_of(batch=6))
    assert deq.capture.recorded == 5
    deq(inputs_of(batch=3))
    assert deq.capture.recorded == 6


def test_memory_does_not_grow():
    deq = deq_of(Scoped().double(), eq.Anderson(), FIXED, eq.Implicit(solver=eq.Anderson(), stop=FIXED))
    x = inputs_of().requires_grad_()
    gone = []
    gc.disable()
    try:
        for _ in range(50):
            solution = deq(x)
            gone += [weakref.ref(solution), weakref.ref(solution.problem), weakref.ref(tensors(solution.value)[0])]
            loss_of(solution.value).backward()
            del solution
        recordings = [weakref.ref(recording) for recording in recordings_of(deq)]
        assert not any(reference() is not None for reference in gone)
        assert len(recordings) == 1
        deq._capture = None
        assert recordings[0]() is None  # not a matter of the garbage collector, which would destroy graphs at any time
    finally:
        gc.enable()


# Inputs


def test_inputs_of_all_kinds():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.4, dtype=torch.float64))

        def forward(self, z, x, options, factor, name, table):
            assert name == "plain"
            shift = options["shift"] if options["use"] else 0
            return self.weight * torch.tanh(z) * factor + x + shift + table[options["index"]]

    x = inputs_of().requires_grad_()
    options = {"shift": x[:1].expand(5, 6), "use": True, "index": torch.tensor([0, 1, 0, 1, 1]), "none": None}
    table = inputs_of(batch=2, seed=4).requires_grad_()
    deq = deq_of(Many(), in_dims=None)
    assert_engines_agree(deq, x, options, 0.5, "plain", table)
    assert deq.capture.recorded == 1
    with torch.no_grad():
        value = deq(x, {**options, "use": False}, 0.5, "plain", table).value
        again = deq(x, {**options, "use": False}, 0.25, "plain", table).value
    assert not torch.equal(value, again)
    assert deq.capture.recorded == 3


def test_the_same_tensor_twice_and_views_of_it():
    class Twice(nn.Module):
        def forward(self, z, x, y):
            return 0.5 * torch.tanh(z * y) + x

    base = inputs_of().requires_grad_()
    assert_engines_agree(deq_of(Twice()), base, base)
    assert_engines_agree(deq_of(Twice()), base.flip(0), base.T.contiguous().T)


def test_a_start_that_is_given():
    x = inputs_of().requires_grad_()
    deq = deq_of(Tanh())
    root = deq(x).value.detach()
    deq.capture.replayed = 0
    captured, _ = assert_engines_agree(deq, x, z0=root, tolerance=1e-9)
    assert captured.stats.steps.tolist() == [0] * 5
    assert torch.equal(captured.value, root)


def test_one_system_and_a_map_that_ignores_its_state():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Parameter(torch.ones(6, dtype=torch.float64))
            self.unused = nn.Parameter(torch.ones(6, dtype=torch.float64))

        def forward(self, z, x):
            return self.used * x

    assert_engines_agree(deq_of(Constant()), inputs_of(batch=1).requires_grad_())
    assert_engines_agree(deq_of(Tanh(), eq.Anderson()), inputs_of(batch=1).requires_grad_())
