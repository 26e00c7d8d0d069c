"""What stays constant during a solve: masks and normalised weights, in forward, backward, nested, repeated solves."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import equipoise as eq
from equipoise import DEQ, Anderson, Broyden, Implicit, Ladder, Neumann, Phantom, Picard, Stop, Unroll, fixed_point
from equipoise._scope import SolveScope, SolveScoped, current_scope, solve_constant
from equipoise.nn import SequenceDropout, VariationalDropout, spectral_norm, weight_norm
from equipoise.theory import dense_gradient
from tests.gradients import EXACT, ROBUST, TIGHT, TanhCell, all_converged, normal, relative_error


class RecordingDropout(VariationalDropout):
    """Keeps every mask it draws."""

    def __init__(self, p, shared=()):
        super().__init__(p, shared)
        self.masks = []

    def begin_solve(self, x):
        self.masks.append(super().begin_solve(x))
        return self.masks[-1]


class CountingWeight(nn.Module):
    """A scoped module with a parameter: counts how often its value is computed."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.calls = 0

    def begin_solve(self, x):
        self.calls += 1
        return self.scale.square()

    def forward(self, x):
        return x * solve_constant(self, x)


class DropCell(nn.Module):
    def __init__(self, n=6, p=0.5, norm=0.8):
        super().__init__()
        self.inner, self.drop = TanhCell(n, norm), RecordingDropout(p)
        self.outputs = None

    def forward(self, z, x):
        out = self.drop(self.inner(z, x))
        if self.outputs is not None:
            self.outputs.append(out)
        return out


def explicit(cell, mask):
    """The same map with its mask written out."""
    return lambda z, x: mask * cell.inner(z, x)


def test_the_mask_is_drawn_once_per_solve_and_anew_in_the_next():
    cell, x = DropCell(), normal(3, 6)
    deq = DEQ(cell, stop=TIGHT)
    first, second = deq(x), deq(x)
    assert first.stats.nfe > 5
    assert len(cell.drop.masks) == 2
    assert not torch.equal(*cell.drop.masks)
    for solution, mask in zip((first, second), cell.drop.masks, strict=True):
        assert mask.unique().tolist() == [0.0, 2.0]
        assert relative_error(explicit(cell, mask)(solution.value, x), solution.value) <= 1e-12


def test_two_evaluations_in_one_solve_are_identical_in_training_mode():
    cell, x, z = DropCell(), normal(3, 6), normal(3, 6, seed=1)
    problem = DEQ(cell).problem(x)
    assert torch.equal(problem.evaluate([z])[0], problem.evaluate([z])[0])
    assert not torch.equal(problem.evaluate([z])[0], DEQ(cell).problem(x).evaluate([z])[0])


@pytest.mark.parametrize(
    "adjoint", [EXACT, Implicit(solver=ROBUST, stop=TIGHT, any_order=True)], ids=["implicit", "any_order"]
)
def test_the_backward_pass_sees_the_masks_of_its_solve(adjoint):
    cell, x, a = DropCell(), normal(3, 6).requires_grad_(), normal(3, 6, seed=1)
    solution = DEQ(cell, adjoint=adjoint, stop=TIGHT)(x)
    got = torch.autograd.grad(solution.value, (cell.inner.W, x), a)
    (mask,) = cell.drop.masks
    want = dense_gradient(lambda z: explicit(cell, mask)(z, x), solution.value.detach(), a, (cell.inner.W, x))
    assert relative_error(got, want) <= 1e-8


@pytest.mark.parametrize(
    "adjoint",
    [Phantom(3, 1.0), Neumann(3), Unroll(), Unroll(checkpoint=True), eq.Reversible(0.2), eq.OneStep()],
    ids=repr,
)
def test_every_adjoint_sees_the_masks_of_its_solve(adjoint):
    """The same solve on a cell without dropout but with the mask written out gives the same gradient."""
    cell, x, a = DropCell(), normal(3, 6).requires_grad_(), normal(3, 6, seed=1)
    options = {"solver": Picard(), "adjoint": adjoint, "stop": Stop(rtol=0, max_steps=12, select="last")}
    got = torch.autograd.grad(DEQ(cell, **options)(x).value, (cell.inner.W, x), a)
    (mask,) = cell.drop.masks
    twin = fixed_point(explicit(cell, mask), torch.zeros_like(x), x, **options)
    assert relative_error(got, torch.autograd.grad(twin.value, (cell.inner.W, x), a)) <= 1e-12


def test_two_forwards_before_one_backward_keep_their_own_masks():
    cell, xs, a = DropCell(), normal(2, 3, 6), normal(2, 3, 6, seed=1)
    deq = DEQ(cell, adjoint=EXACT, stop=TIGHT)
    values = [deq(x).value for x in xs]
    sum((v * g).sum() for v, g in zip(values, a, strict=True)).backward()
    assert len(cell.drop.masks) == 2
    want = 0
    for value, x, g, mask in zip(values, xs, a, list(cell.drop.masks), strict=True):
        want = (
            want + dense_gradient(lambda z, x=x, m=mask: explicit(cell, m)(z, x), value.detach(), g, (cell.inner.W,))[0]
        )
    assert relative_error(cell.inner.W.grad, want) <= 1e-8


def test_normalised_weights_are_computed_once_per_solve_and_keep_their_graph():
    scaled = CountingWeight()

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.scaled = scaled

        def forward(self, z, x):
            return torch.tanh(self.scaled(z) + x)

    x, a = normal(3, 4).requires_grad_(), normal(3, 4, seed=1)
    solution = DEQ(Cell(), adjoint=EXACT, stop=TIGHT)(x)
    got = torch.autograd.grad(solution.value, (scaled.scale, x), a)
    assert scaled.calls == 1
    want = dense_gradient(
        lambda z: torch.tanh(z * scaled.scale.square() + x), solution.value.detach(), a, (scaled.scale, x)
    )
    assert relative_error(got, want) <= 1e-10


def test_outside_of_a_solve_a_value_is_computed_at_each_call():
    drop, x = RecordingDropout(0.5), torch.ones(50, 20)
    assert current_scope() is None
    assert not torch.equal(drop(x), drop(x))
    assert len(drop.masks) == 2


def test_a_scoped_module_follows_a_protocol():
    assert isinstance(VariationalDropout(0.1), SolveScoped)
    assert isinstance(weight_norm(nn.Linear(2, 2)), SolveScoped)
    assert not isinstance(nn.Linear(2, 2), SolveScoped)


def test_scopes_belong_to_their_thread():
    seen = []
    with SolveScope():
        thread = threading.Thread(target=lambda: seen.append(current_scope()))
        thread.start()
        thread.join()
        assert current_scope() is not None
    assert seen == [None]
    assert current_scope() is None


def test_the_scope_is_closed_when_f_raises():
    def broken(z):
        raise ArithmeticError("broken")

    with pytest.raises(ArithmeticError):
        fixed_point(broken, torch.zeros(2, 3))
    assert current_scope() is None


def test_eval_mode_turns_dropout_off():
    cell, x = DropCell(), normal(3, 6)
    deq = DEQ(cell, stop=TIGHT).eval()
    value = deq(x).value
    assert cell.drop.masks == []
    assert relative_error(cell.inner(value, x), value) <= 1e-12
    deq.train()
    assert relative_error(deq(x).value, value) > 1e-2


@pytest.mark.parametrize(
    "adjoint", [Implicit(), Implicit(any_order=True), Unroll()], ids=["implicit", "any_order", "unroll"]
)
def test_one_seed_is_one_result(adjoint):
    cell, x = DropCell(), normal(3, 6)
    deq = DEQ(cell, adjoint=adjoint)
    values = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        values.append(deq(x).value)
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


# Subsets of systems


class MixedCell(nn.Module):
    """Some systems contract, others repel the plain iteration: the gain is an input."""

    def __init__(self, dropout, weight_normed=False):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(5, 5).double()
        with torch.no_grad():
            self.linear.weight.copy_(torch.linalg.qr(self.linear.weight)[0])
        if weight_normed:
            weight_norm(self.linear)
        self.drop = dropout

    def initial_state(self, gain, x):
        return torch.zeros_like(x)

    def forward(self, z, gain, x):
        return self.drop(torch.tanh(gain * self.linear(z) + x))


def mixed_inputs(batch=24):
    gain = torch.full((batch, 1), 0.3, dtype=torch.float64)
    gain[::5] = -1.3
    return gain, 0.3 * normal(batch, 5, seed=7)


def test_masks_are_sliced_with_the_rows():
    """A ladder hands its unsolved systems on; they must keep the masks they started with."""
    cell = MixedCell(RecordingDropout(0.3), weight_normed=True)
    gain, x = mixed_inputs()
    deq = DEQ(cell, stop=Stop(rtol=1e-12, max_steps=60), adjoint=EXACT)
    results = []
    for solver in (Ladder((Picard(), Broyden())), Broyden()):
        torch.manual_seed(4)
        with eq.override(deq, solver=solver):
            solution = deq(gain, x)
        assert all_converged(solution.stats)
        results.append((solution.value, *torch.autograd.grad(solution.value.square().sum(), cell.parameters())))
    assert len(cell.drop.masks) == 2
    assert torch.equal(*cell.drop.masks)
    assert relative_error(results[0], results[1]) <= 1e-9


def test_the_ladder_needs_its_second_stage_for_some_systems_only():
    cell = MixedCell(VariationalDropout(0.3))
    gain, x = mixed_inputs()
    torch.manual_seed(4)
    solution = DEQ(cell, solver=Picard(), stop=Stop(rtol=1e-12, max_steps=60))(gain, x)
    solved = int(solution.stats.ok.sum())
    assert 0 < solved < 24


def test_compaction_keeps_the_masks():
    cell = MixedCell(RecordingDropout(0.3))
    gain, x = mixed_inputs()
    values = []
    sizes = []
    for in_dims in (0, None):
        torch.manual_seed(4)
        handle = cell.linear.register_forward_hook(lambda m, args, out: sizes.append(len(out)))
        with torch.no_grad():
            values.append(DEQ(cell, in_dims=in_dims, stop=Stop(rtol=1e-12, max_steps=300))(gain, x).value)
        handle.remove()
    assert min(sizes) < 24  # systems did leave the batch
    assert relative_error(values[0], values[1]) <= 1e-11


def test_a_mask_shared_by_all_systems_is_not_sliced():
    cell = MixedCell(RecordingDropout(0.3, shared=0))
    gain, x = mixed_inputs()
    values = []
    for solver in (Ladder((Picard(), Broyden())), Broyden()):
        torch.manual_seed(4)
        values.append(DEQ(cell, solver=solver, stop=Stop(rtol=1e-12, max_steps=60))(gain, x).value)
    assert cell.drop.masks[0].shape == (1, 5)
    assert relative_error(values[0], values[1]) <= 1e-9


def test_a_draw_that_cannot_be_told_apart_by_system_is_left_whole():
    class Inner(nn.Module):
        """Draws one number per feature, first axis not the systems."""

        def begin_solve(self, x):
            return torch.rand(5, 1, dtype=x.dtype)

        def forward(self, x):
            return x * solve_constant(self, x)[:, 0]

    cell = MixedCell(Inner())
    gain, x = mixed_inputs()
    values = []
    for solver in (Ladder((Picard(), Broyden())), Broyden()):
        torch.manual_seed(4)
        values.append(DEQ(cell, solver=solver, stop=Stop(rtol=1e-12, max_steps=60))(gain, x).value)
    assert relative_error(values[0], values[1]) <= 1e-9


def test_scope_rows():
    scope, drop = SolveScope(), VariationalDropout(0.5)
    with scope:
        full = drop(torch.ones(6, 4))
    index = torch.tensor([4, 1])
    with scope.rows(index, 6):
        part = drop(torch.ones(2, 4))
    assert torch.equal(part, full[index])
    assert scope.rows(index, 7) is None  # six rows of draws do not belong to seven systems


# Nested solves


class InnerCell(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        torch.manual_seed(5)
        self.linear = weight_norm(nn.Linear(n, n).double())
        with torch.no_grad():
            self.linear.weight_g.mul_(0.4)
        self.drop = RecordingDropout(0.3)

    def forward(self, w, z):
        return self.drop(torch.tanh(self.linear(w) + z))


class OuterCell(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.inner = DEQ(InnerCell(n), adjoint=EXACT, stop=TIGHT)
        self.linear = spectral_norm(nn.Linear(n, n).double(), bound=0.5)
        self.drop = RecordingDropout(0.3)

    def forward(self, z, x):
        return self.drop(torch.sin(self.linear(self.inner(z).value) + x))


def test_an_equilibrium_inside_a_cell():
    cell = OuterCell()
    x, a = normal(3, 4, seed=1).requires_grad_(), normal(3, 4, seed=2)
    deq = DEQ(cell, adjoint=EXACT, stop=Stop(rtol=1e-13, max_steps=200))
    solution = deq(x)
    assert all_converged(solution.stats)
    inner, outer = cell.inner.cell.drop.masks, cell.drop.masks
    assert (len(inner), len(outer)) == (1, 1)  # one draw for the whole outer solve, whatever the inner solves
    parameters = (cell.inner.cell.linear.weight_g, cell.inner.cell.linear.weight_v, cell.linear.weight_v)
    got = torch.autograd.grad(solution.value, (*parameters, x), a)
    assert (len(inner), len(outer)) == (1, 1)

    cell.linear.eval()  # the estimate of the leading vectors as the solve left it
    W_outer = cell.linear.weight
    W_inner = cell.inner.cell.linear.weight

    def joint(state):
        z, w = state[:, :4], state[:, 4:]
        below = inner[0] * torch.tanh(nn.functional.linear(w, W_inner, cell.inner.cell.linear.bias) + z)
        above = outer[0] * torch.sin(nn.functional.linear(w, W_outer, cell.linear.bias) + x)
        return torch.cat([above, below], dim=1)

    state = torch.zeros(3, 8, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(300):
            state = joint(state)
    assert relative_error(solution.value, state[:, :4]) <= 1e-11
    cotangent = torch.cat([a, torch.zeros_like(a)], dim=1)
    want = dense_gradient(joint, state, cotangent, (*parameters, x))
    assert relative_error(got, want) <= 1e-8


def test_nested_solves_of_any_order():
    cell = OuterCell()
    anyway = Implicit(solver=ROBUST, stop=TIGHT, any_order=True)
    deq = DEQ(cell, stop=Stop(rtol=1e-13, max_steps=200))
    x, a = normal(3, 4, seed=1).requires_grad_(), normal(3, 4, seed=2)
    results = []
    for adjoint in (anyway, EXACT):
        torch.manual_seed(6)
        cell.linear.vectors.iterations = 30  # so that both solves use the converged estimate
        with eq.override(deq, adjoint=adjoint):
            solution = deq(x)
            results.append((solution.value, *torch.autograd.grad(solution.value, (*cell.parameters(), x), a)))
    assert relative_error(results[0], results[1]) <= 1e-8


# Copies


def normalised_model(kind):
    torch.manual_seed(2)

    linear = {"weight": weight_norm, "spectral": lambda m: spectral_norm(m, bound=0.5)}[kind](nn.Linear(6, 6).double())
    return nn.Sequential(DEQ(SequentialCell(linear, SequenceDropout(0.3))))


class SequentialCell(nn.Module):
    def __init__(self, linear, drop):
        super().__init__()
        self.linear, self.drop = linear, drop

    def forward(self, z, x):
        return 0.7 * torch.tanh(self.drop(self.linear(z)) + x)


def save_and_load(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_state_dict(model):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.fill_(0.1)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    missing = twin.load_state_dict(torch.load(buffer, weights_only=True))
    assert (missing.missing_keys, missing.unexpected_keys) == ([], [])
    return twin


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": save_and_load,
    "state_dict": through_state_dict,
}


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after_forward"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["weight", "spectral"])
def test_models_survive_copying(kind, way, used):
    model, x = normalised_model(kind), normal(3, 2, 6)
    if used:
        model(x).value.sum().backward()
    twin = WAYS[way](model)
    results = []
    for each in (model, twin):
        torch.manual_seed(9)
        value = each(x).value
        results.append((value, *torch.autograd.grad(value.square().sum(), each.parameters())))
    assert len(results[0]) == {"weight": 4, "spectral": 3}[kind]
    assert relative_error(results[1], results[0]) <= 1e-14
    with torch.no_grad():
        twin[0].cell.linear.weight_v.mul_(2)
    assert relative_error(twin[0].cell.linear.weight_v, model[0].cell.linear.weight_v) == 1.0  # nothing is shared


def test_state_dict_keys_are_parameters_and_buffers_only():
    assert set(normalised_model("weight").state_dict()) == {
        "0.cell.linear.bias",
        "0.cell.linear.weight_g",
        "0.cell.linear.weight_v",
    }
    assert set(normalised_model("spectral").state_dict()) == {
        "0.cell.linear.bias",
        "0.cell.linear.weight_v",
        "0.cell.linear.vectors.left",
        "0.cell.linear.vectors.right",
    }


def test_a_change_of_mode_between_forward_and_backward_does_no_harm():
    cell, x, a = DropCell(), normal(3, 6).requires_grad_(), normal(3, 6, seed=1)
    deq = DEQ(cell, adjoint=EXACT, stop=TIGHT)
    solution = deq(x)
    deq.eval()
    got = torch.autograd.grad(solution.value, (cell.inner.W, x), a)
    want = dense_gradient(
        lambda z: explicit(cell, cell.drop.masks[0])(z, x), solution.value.detach(), a, (cell.inner.W, x)
    )
    assert relative_error(got, want) <= 1e-8


@pytest.mark.parametrize("solver", [Anderson(), Broyden(), Picard()], ids=repr)
def test_dropout_inside_a_solve_converges(solver):
    """A mask that changed from step to step would keep the residual at the size of its noise."""
    solution = DEQ(DropCell(norm=0.6), solver=solver, stop=Stop(rtol=1e-10, max_steps=100))(normal(4, 6))
    assert all_converged(solution.stats)
    assert float(solution.stats.residual.max()) <= 1e-10


class Recomputing(nn.Module):
    """Part of f is evaluated again in the backward pass, or not."""

    def __init__(self, recompute):
        super().__init__()
        self.mix, self.drop = eq.nn.weight_norm(nn.Linear(6, 6)), eq.nn.VariationalDropout(0.4)
        self.recompute = recompute

    def part(self, z):
        return self.drop(self.mix(z))

    def forward(self, z, x):
        recompute = self.recompute and torch.is_grad_enabled()
        part = checkpoint(self.part, z, use_reentrant=False) if recompute else self.part(z)
        return torch.tanh(0.5 * part + x)


@pytest.mark.parametrize(
    "adjoint",
    [eq.Implicit(), eq.OneStep(), eq.Phantom(steps=3), eq.Neumann(terms=3)],
    ids=lambda adjoint: type(adjoint).__name__,
)
def test_what_is_recomputed_in_backward_finds_the_constants_of_its_solve(adjoint):
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        deq = eq.DEQ(Recomputing(recompute).double(), adjoint=adjoint, stop=eq.Stop(rtol=1e-8))
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        # Two solves before the backward pass, each with masks of its own.
        loss = deq(x).value.square().sum() + deq(2 * x).value.sum()
        grads.append(torch.autograd.grad(loss, [*deq.parameters(), x]))
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-10, atol=1e-12)
