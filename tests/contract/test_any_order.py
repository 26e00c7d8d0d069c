"""`Implicit(any_order=True)`: higher derivatives, forward mode, torch.func; each against an unrolled float64 truth."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import equipoise as eq
from equipoise import DEQ, Anderson, Broyden, Implicit, Ladder, NewtonKrylov, Picard, Stop, fixed_point
from equipoise.nn import VariationalDropout, weight_norm
from tests.gradients import TIGHT, TanhCell, layer, normal, relative_error

ANY = Implicit(any_order=True, stop=TIGHT, throw=True)
STEPS = 120  # of the unrolled truth; its maps contract by 0.6 per step


def weight(n=3, norm=0.6, seed=0):
    W = normal(n, n, seed=seed)
    return W * (norm / torch.linalg.matrix_norm(W, 2))


def unrolled(f, z, *inputs):
    for _ in range(STEPS):
        z = f(z, *inputs)
    return z


def root(W, x, adjoint=ANY, **options):
    return fixed_point(layer, torch.zeros_like(x), W, x, adjoint=adjoint, stop=TIGHT, **options).value


def truth(W, x):
    return unrolled(layer, torch.zeros_like(x), W, x)


@pytest.fixture
def system():
    return weight(), normal(2, 3, seed=1), normal(2, 3, seed=2)


def loss_of(value, a):
    return (value * a).sum() + (value**3).sum()


# Higher derivatives by autograd


def test_gradgradcheck(system):
    W, x, _ = (t.requires_grad_() for t in system)
    assert torch.autograd.gradgradcheck(lambda W, x: root(W, x), (W, x))


def test_second_and_third_derivatives_equal_the_unrolled_ones(system):
    results = []
    for value in (root, truth):
        W, x, a = (t.detach().clone().requires_grad_() for t in system)
        first = torch.autograd.grad(loss_of(value(W, x), a), (W, x), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (W, x), create_graph=True)
        third = torch.autograd.grad(sum(g.sin().sum() for g in second), (W, x))
        results.append((first, second, third))
    for mine, true in zip(*results, strict=True):
        assert relative_error(mine, true) <= 1e-9


@pytest.mark.parametrize("solver", [Anderson(), Broyden(), NewtonKrylov(), Ladder(), Picard()], ids=repr)
def test_every_solver_serves_both_passes(system, solver):
    stop = Stop(rtol=1e-13, max_steps=300)
    adjoint = Implicit(solver=solver, stop=stop, any_order=True, throw=True)
    W, x, a = (t.requires_grad_() for t in system)
    results = []
    for value in (root(W, x, adjoint, solver=solver), truth(W, x)):
        first = torch.autograd.grad(loss_of(value, a), (W, x), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (W, x))
        results.append((*(g.detach() for g in first), *second))
    assert relative_error(results[0], results[1]) <= 1e-9


def test_a_gradient_penalty_trains_through_the_equilibrium():
    cell, x = TanhCell(n=4, norm=0.6), normal(3, 4, seed=1).requires_grad_()
    results = []
    for value in (DEQ(cell, adjoint=ANY, stop=TIGHT)(x).value, unrolled(cell, torch.zeros_like(x), x)):
        slope = torch.autograd.grad(value.sum(), x, create_graph=True)[0]
        results.append(torch.autograd.grad(slope.square().sum(), (cell.W, x)))
    assert relative_error(results[0], results[1]) <= 1e-9


def test_a_tree_of_states(system):
    W, x, a = (t.requires_grad_() for t in system)

    def f(state, W, x):
        return {"a": torch.tanh(state["b"] @ W.mT + x), "b": torch.sin(state["a"] @ W) / 2}

    z0 = {"a": torch.zeros_like(x), "b": torch.zeros_like(x)}
    results = []
    for state in (fixed_point(f, z0, W, x, adjoint=ANY, stop=TIGHT).value, unrolled(f, z0, W, x)):
        first = torch.autograd.grad(loss_of(state["a"] + state["b"], a), (W, x), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), (W, x)))
    assert relative_error(results[0], results[1]) <= 1e-9


# torch.func


def test_grad_jacrev_and_jacfwd(system):
    W, x, a = system
    for transform in (jacrev, jacfwd):
        assert relative_error(transform(root, argnums=(0, 1))(W, x), transform(truth, argnums=(0, 1))(W, x)) <= 1e-10
    got = grad(lambda W, x: loss_of(root(W, x), a), argnums=(0, 1))(W, x)
    want = grad(lambda W, x: loss_of(truth(W, x), a), argnums=(0, 1))(W, x)
    assert relative_error(got, want) <= 1e-10


def test_hessian_and_mixed_second_derivatives(system):
    W, x, a = system
    for transform in (hessian, lambda f: jacrev(jacfwd(f)), lambda f: jacfwd(jacrev(f)), lambda f: jacrev(jacrev(f))):
        got = transform(lambda x: loss_of(root(W, x), a))(x)
        want = transform(lambda x: loss_of(truth(W, x), a))(x)
        assert relative_error(got, want) <= 1e-9


def test_hessian_of_a_plain_sum(system):
    """Its cotangent is one number expanded, which must not be written to."""
    W, x, _ = system
    for transform in (hessian, lambda f: jacfwd(grad(f)), lambda f: jacrev(grad(f))):
        got, want = transform(lambda x: root(W, x).sum())(x), transform(lambda x: truth(W, x).sum())(x)
        assert relative_error(got, want) <= 1e-9


def test_jvp_and_vjp(system):
    W, x, a = system
    moves = (normal(3, 3, seed=5), normal(2, 3, seed=6))
    got, want = jvp(root, (W, x), moves), jvp(truth, (W, x), moves)
    assert relative_error(got, want) <= 1e-10
    assert relative_error(vjp(root, W, x)[1](a), vjp(truth, W, x)[1](a)) <= 1e-10


def test_forward_mode_without_torch_func(system):
    import torch.autograd.forward_ad as forward

    W, x, a = system
    results = []
    for value in (root, truth):
        with forward.dual_level():
            results.append(forward.unpack_dual(value(W, forward.make_dual(x, a))).tangent)
    assert relative_error(results[0], results[1]) <= 1e-10


def test_hessian_vector_product_forward_over_reverse(system):
    W, x, a = system
    results = [jvp(grad(lambda x, v=v: loss_of(v(W, x), a)), (x,), (a,))[1] for v in (root, truth)]
    assert relative_error(results[0], results[1]) <= 1e-9


@pytest.mark.parametrize("in_dims", [(0, 0), (None, 0), (0, None), (None, 1), (2, -1)], ids=str)
def test_vmap(in_dims):
    def batch(tensor, dim):
        if dim is None:
            return tensor
        copies = torch.stack([tensor * (1 - 0.1 * i) for i in range(4)])
        return copies.movedim(0, dim)

    W, x = batch(weight(), in_dims[0]), batch(normal(2, 3, seed=1), in_dims[1])
    assert relative_error(vmap(root, in_dims)(W, x), vmap(truth, in_dims)(W, x)) <= 1e-11
    got = vmap(grad(lambda W, x: root(W, x).sum(), argnums=(0, 1)), in_dims)(W, x)
    want = vmap(grad(lambda W, x: truth(W, x).sum(), argnums=(0, 1)), in_dims)(W, x)
    assert relative_error(got, want) <= 1e-10


def test_vmap_of_single_systems(system):
    """The state of one sample as one coupled system, batched by vmap alone."""
    W, x, _ = system

    def single(x):
        return fixed_point(
            lambda z: torch.tanh(W @ z + x), torch.zeros_like(x), adjoint=ANY, stop=TIGHT, batch_dims=0
        ).value

    assert relative_error(vmap(single)(x), truth(W, x)) <= 1e-11
    assert relative_error(vmap(jacrev(single))(x), vmap(jacrev(lambda x: truth(W, x[None])[0]))(x)) <= 1e-10
    assert (
        relative_error(vmap(hessian(lambda x: single(x).sum()))(x), vmap(hessian(lambda x: truth(W, x[None]).sum()))(x))
        <= 1e-9
    )


def test_nested_vmap(system):
    W, x, _ = system
    xs = torch.stack([x, 2 * x, -x])
    Ws = torch.stack([W, W / 2])
    got = vmap(lambda W: vmap(lambda x: root(W, x))(xs))(Ws)
    want = vmap(lambda W: vmap(lambda x: truth(W, x))(xs))(Ws)
    assert relative_error(got, want) <= 1e-11


def test_autograd_through_vmap(system):
    W, x, a = (t.requires_grad_() for t in system)
    xs, weights = torch.stack([x, x / 2, -x]), torch.stack([a, a, a])
    results = []
    for value in (root, truth):
        out = vmap(lambda x, v=value: v(W, x))(xs)
        results.append(torch.autograd.grad((out * weights).sum(), (W, x), retain_graph=True))
    assert relative_error(results[0], results[1]) <= 1e-10


def test_functional_call_on_a_module():
    deq = DEQ(TanhCell(n=4, norm=0.6), adjoint=ANY, stop=TIGHT)
    x, a = normal(3, 4, seed=1), normal(3, 4, seed=2)
    parameters = {name: 0.9 * p.detach() for name, p in deq.named_parameters()}

    def mine(parameters, x=x, a=a):
        return (functional_call(deq, parameters, (x,)).value * a).sum()

    def true(parameters, x=x, a=a):
        return (unrolled(layer, torch.zeros_like(x), parameters["cell.W"], x) * a).sum()

    assert relative_error(mine(parameters), true(parameters)) <= 1e-11
    assert relative_error(grad(mine)(parameters)["cell.W"], grad(true)(parameters)["cell.W"]) <= 1e-10
    got, want = hessian(mine)(parameters), hessian(true)(parameters)
    assert relative_error(got["cell.W"]["cell.W"], want["cell.W"]["cell.W"]) <= 1e-9
    assert deq.cell.W.grad is None


OTHERS = [Implicit(stop=TIGHT), ANY, eq.Reversible(0.1), eq.Unroll(), eq.Unroll(checkpoint=True)]


@pytest.mark.parametrize("adjoint", OTHERS, ids=["implicit", "any_order", "reversible", "unroll", "checkpoint"])
def test_a_backward_pass_after_functional_call_has_ended(adjoint):
    """The module has its own parameters back by then; the gradient still belongs to the ones it was called with."""
    cell, x, a = TanhCell(n=4, norm=0.6), normal(3, 4, seed=1), normal(3, 4, seed=2)
    W = (0.9 * cell.W.detach()).requires_grad_()
    fixed = Stop(rtol=0, max_steps=20, select="last")
    stop = TIGHT if isinstance(adjoint, Implicit) else fixed
    results = []
    for inside in (True, False):
        twin = TanhCell(n=4, norm=0.6)
        if inside:
            deq = DEQ(twin, solver=Picard(), adjoint=adjoint, stop=stop)
            value = functional_call(deq, {"cell.W": W}, (x,)).value
        else:
            with torch.no_grad():
                twin.W.copy_(W)
            value = DEQ(twin, solver=Picard(), adjoint=adjoint, stop=stop)(x).value
        got = torch.autograd.grad(value, (W, twin.W), a, allow_unused=True)
        assert got[1 if inside else 0] is None
        results.append((value, got[0 if inside else 1]))
    assert relative_error(results[0], results[1]) <= 1e-12


def test_gradients_per_sample():
    deq = DEQ(TanhCell(n=4, norm=0.6), adjoint=ANY, stop=TIGHT)
    x, parameters = normal(5, 4, seed=1), {name: p.detach() for name, p in deq.named_parameters()}

    def mine(parameters, x):
        return functional_call(deq, parameters, (x[None],)).value.square().sum()

    got = vmap(grad(mine), in_dims=(None, 0))(parameters, x)["cell.W"]
    assert got.shape == (5, 4, 4)
    for row, each in zip(x, got, strict=True):
        value = unrolled(deq.cell, torch.zeros(1, 4, dtype=torch.float64), row[None]).square().sum()
        assert relative_error(each, torch.autograd.grad(value, deq.cell.W)) <= 1e-10


def test_an_ensemble_of_models():
    """Stacked parameters, one batch: vmap of functional_call over weights."""
    deq = DEQ(TanhCell(n=4, norm=0.6), adjoint=ANY, stop=TIGHT)
    x = normal(3, 4, seed=1)
    Ws = torch.stack([weight(4, seed=seed) for seed in range(3)])
    got = vmap(lambda W: functional_call(deq, {"cell.W": W}, (x,)).value)(Ws)
    want = torch.stack([truth(W, x) for W in Ws])
    assert relative_error(got, want) <= 1e-11


# What f may close over


@pytest.mark.parametrize("twice", [False, True])
def test_closures_over_leaf_and_derived_tensors(system, twice):
    W, x, a = (t.requires_grad_() for t in system)
    results = []
    for solved in (True, False):
        scaled, shift = W * 0.9, x.sin()  # not leaves: their own graph must be reached through the solve
        view = scaled.mT

        def f(z, scaled=scaled, shift=shift, view=view):
            return torch.tanh(z @ view + shift + 0.1 * (z @ scaled))

        z0 = torch.zeros_like(x)
        value = fixed_point(f, z0, adjoint=ANY, stop=TIGHT).value if solved else unrolled(f, z0)
        first = torch.autograd.grad(loss_of(value, a), (W, x), create_graph=twice)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), (W, x)) if twice else first)
    assert relative_error(results[0], results[1]) <= 1e-9


def test_a_tensor_met_as_input_and_in_a_closure(system):
    W, x, a = (t.requires_grad_() for t in system)

    def f(z, x_again):
        return torch.tanh(z @ W.mT + 0.5 * x + 0.5 * x_again)

    value = fixed_point(f, torch.zeros_like(x), x, adjoint=ANY, stop=TIGHT).value
    want = torch.autograd.grad(loss_of(truth(W, x), a), (W, x))
    assert relative_error(torch.autograd.grad(loss_of(value, a), (W, x)), want) <= 1e-10


def test_torch_func_of_a_captured_tensor(system):
    W, x, a = system

    def loss(W):
        return loss_of(
            fixed_point(lambda z: torch.tanh(z @ W.mT + x), torch.zeros_like(x), adjoint=ANY, stop=TIGHT).value, a
        )

    want = grad(lambda W: loss_of(truth(W, x), a))(W)
    assert relative_error(grad(loss)(W), want) <= 1e-10


class Scale(torch.autograd.Function):
    """z·s with a hand-written derivative; calls to it cannot be intercepted."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z, s):
        return z * s

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        z, s = ctx.saved_tensors
        return g * s, (g * z).sum()

    @staticmethod
    def jvp(ctx, dz, ds):
        z, s = ctx.saved_tensors
        return dz * s + z * ds


def test_a_hidden_tensor_is_refused():
    s = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    x = normal(2, 3)
    with pytest.raises(RuntimeError, match=r"cannot be made explicit.*pass it to the solve as an input"):
        fixed_point(lambda z, x: Scale.apply(z, s) + x, torch.zeros_like(x), x, adjoint=ANY)


def test_the_default_adjoint_takes_what_any_order_refuses():
    s = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    x = normal(2, 3)
    value = fixed_point(
        lambda z, x: Scale.apply(z, s) + x, torch.zeros_like(x), x, adjoint=Implicit(stop=TIGHT), stop=TIGHT
    ).value
    assert relative_error(torch.autograd.grad(value.sum(), s), x.sum() / (1 - s) ** 2) <= 1e-10


def test_an_input_may_go_into_a_custom_function():
    """As the message for hidden tensors advises."""
    s = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    x = normal(2, 3)
    value = fixed_point(lambda z, s, x: Scale.apply(z, s) + x, torch.zeros_like(x), s, x, adjoint=ANY, stop=TIGHT).value
    first = torch.autograd.grad(value.sum(), s, create_graph=True)[0]
    assert relative_error(first, x.sum() / (1 - s) ** 2) <= 1e-10
    assert relative_error(torch.autograd.grad(first, s), 2 * x.sum() / (1 - s) ** 3) <= 1e-9


def test_integer_and_other_inputs_are_carried_along(system):
    W, x, a = (t.requires_grad_() for t in system)
    index = torch.tensor([2, 0, 1])

    def f(z, W, x, index, scale):
        return torch.tanh(z[:, index] @ W.mT * scale + x)

    solved = fixed_point(f, torch.zeros_like(x), W, x, index, 0.5, adjoint=ANY, stop=TIGHT).value
    results = []
    for value in (solved, unrolled(f, torch.zeros_like(x), W, x, index, 0.5)):
        first = torch.autograd.grad(loss_of(value, a), (W, x), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), (W, x)))
    assert relative_error(results[0], results[1]) <= 1e-9


class FullCell(nn.Module):
    """Weight norm, dropout and a bias: everything a solve holds constant."""

    def __init__(self, n=4):
        super().__init__()
        torch.manual_seed(3)
        self.linear = weight_norm(nn.Linear(n, n).double())
        with torch.no_grad():
            self.linear.weight_g.mul_(0.5)
        self.drop = VariationalDropout(0.4)
        self.masks = []

    def forward(self, z, x):
        return self.drop(torch.tanh(self.linear(z) + x))


def test_modules_with_solve_constants():
    cell, x = FullCell(), normal(3, 4, seed=1).requires_grad_()
    torch.manual_seed(0)
    solution = DEQ(cell, adjoint=ANY, stop=TIGHT)(x)
    torch.manual_seed(0)
    mask = (torch.rand(3, 4) >= 0.4).double() / 0.6
    parameters = tuple(cell.parameters())

    def plain(z, x):
        v, g = cell.linear.weight_v, cell.linear.weight_g
        W = g * v / v.norm(dim=1, keepdim=True)
        return mask * torch.tanh(nn.functional.linear(z, W, cell.linear.bias) + x)

    results = []
    for value in (solution.value, unrolled(plain, torch.zeros_like(x), x)):
        first = torch.autograd.grad(value.square().sum(), (*parameters, x), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (*parameters, x))
        results.append((first, second))
    for mine, true in zip(*results, strict=True):
        assert relative_error(mine, true) <= 1e-9


# Statistics and modes


def test_statistics_are_filled(system):
    W, x, a = (t.requires_grad_() for t in system)
    solution = fixed_point(layer, torch.zeros_like(x), W, x, adjoint=ANY)
    assert solution.stats.ok.tolist() == [True, True]
    assert bool((solution.stats.residual <= 1e-5).all())
    assert solution.stats.nfe >= int(solution.stats.steps.max()) + 1
    assert solution.backward is None
    torch.autograd.grad(loss_of(solution.value, a), W)
    assert solution.backward.ok.tolist() == [True, True]
    assert bool((solution.backward.residual <= 1e-10).all())
    assert solution.backward.nfe >= int(solution.backward.steps.max()) + 1


def test_forward_solve_equals_that_of_the_default(system):
    W, x, _ = system
    options = {"solver": Anderson(memory=4), "stop": Stop(rtol=1e-8)}
    plain = fixed_point(layer, torch.zeros_like(x), W.requires_grad_(), x, **options)
    lifted = fixed_point(layer, torch.zeros_like(x), W, x, adjoint=ANY, **options)
    assert relative_error(lifted.value, plain.value) <= 1e-14
    assert torch.equal(lifted.stats.steps, plain.stats.steps)
    assert lifted.stats.residual.shape == (2,)


def test_compaction_and_row_subsets(system):
    """Systems that finish early leave the batch, also when f has been lifted."""
    W = weight(3)
    x = torch.cat([normal(12, 3, seed=1) * 1e-6, normal(4, 3, seed=2)]).requires_grad_()
    W.requires_grad_()
    stop = Stop(rtol=1e-12, max_steps=200)
    adjoint = Implicit(solver=Ladder((Picard(), Anderson())), stop=stop, any_order=True)
    value = fixed_point(
        layer, torch.zeros_like(x), W, x, solver=Picard(), adjoint=adjoint, stop=stop, in_dims=(None, 0)
    ).value
    want = truth(W, x)
    assert relative_error(value, want) <= 1e-10
    a = normal(16, 3, seed=3)
    assert relative_error(torch.autograd.grad(value, (W, x), a), torch.autograd.grad(want, (W, x), a)) <= 1e-9


def test_unroll_is_of_any_order_too(system):
    W, x, a = system
    stop = Stop(rtol=0, max_steps=STEPS, select="last")

    def value(x):
        return loss_of(
            fixed_point(layer, torch.zeros_like(x), W, x, solver=Picard(), adjoint=eq.Unroll(), stop=stop).value, a
        )

    x = x.requires_grad_()
    first = torch.autograd.grad(value(x), x, create_graph=True)[0]
    true = torch.autograd.grad(loss_of(truth(W, x), a), x, create_graph=True)[0]
    assert (
        relative_error(torch.autograd.grad(first.square().sum(), x), torch.autograd.grad(true.square().sum(), x))
        <= 1e-12
    )


def test_no_grad_costs_no_lifting(system):
    W, x, _ = system
    with torch.no_grad():
        solution = fixed_point(layer, torch.zeros_like(x), W, x, adjoint=ANY)
        plain = fixed_point(layer, torch.zeros_like(x), W, x)
    assert torch.equal(solution.value, plain.value)
    assert solution.stats.nfe == plain.stats.nfe
