"""States of every structure, dtype and memory format; what f receives; and that nothing of the caller's is touched."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import equipoise as eq
from equipoise import Status, Stop
from equipoise._problem import Problem, StateSpec
from tests import problems
from tests.problems import every_solver, image_map, multiscale_map, tanh_map

SOLVERS = every_solver()
TIGHT = Stop(rtol=1e-11, max_steps=300, plateau=None)
TREES = ["tensor", "tuple", "list", "dict", "nested"]


@pytest.fixture(autouse=True)
def _no_grad():
    torch.set_grad_enabled(False)


# --- structures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("tree", TREES)
def test_every_structure_comes_back_as_it_went_in(name, tree):
    case = multiscale_map(tree=tree)
    solution = case.solve(SOLVERS[name], stop=TIGHT)
    assert tree_flatten(solution.value)[1] == tree_flatten(case.z0)[1]
    for got, start in zip(tree_leaves(solution.value), tree_leaves(case.z0), strict=True):
        assert got.shape == start.shape
        assert got.dtype == start.dtype
    assert solution.stats.status.tolist() == [Status.CONVERGED] * 3
    assert case.error(solution.value) < 1e-9


@pytest.mark.parametrize("name", SOLVERS)
def test_a_state_in_pieces_is_solved_like_the_whole(name):
    """Norms and products go over all leaves of a system, so the pieces change nothing but rounding."""
    whole, pieces = (multiscale_map(tree=tree).solve(SOLVERS[name], stop=TIGHT) for tree in ("tensor", "nested"))
    assert pieces.stats.steps.tolist() == whole.stats.steps.tolist()
    flat = torch.cat([leaf.flatten(1) for leaf in problems._in_order(pieces.value, "nested")], dim=1)
    assert (flat - whole.value).abs().max() <= 1e-10


def test_f_receives_the_structure_and_shapes_of_the_start():
    case = multiscale_map(tree="nested")
    seen = []

    def f(z, W, x):
        seen.append((tree_flatten(z)[1], [leaf.shape for leaf in tree_leaves(z)]))
        return case.f(z, W, x)

    eq.fixed_point(f, case.z0, *case.inputs)
    expected = (tree_flatten(case.z0)[1], [leaf.shape for leaf in tree_leaves(case.z0)])
    assert len(seen) > 3
    assert all(item == expected for item in seen)


def test_an_empty_leaf_is_carried_along():
    z0 = {"a": torch.zeros(3, 2, dtype=torch.float64), "b": torch.zeros(3, 0, dtype=torch.float64)}
    solution = eq.fixed_point(lambda z: {"a": 0.5 * z["a"] + 1, "b": z["b"]}, z0, stop=TIGHT)
    assert solution.value["b"].shape == (3, 0)
    assert torch.allclose(solution.value["a"], torch.full_like(z0["a"], 2.0), rtol=1e-10)


# --- dtypes ----------------------------------------------------------------------------------------------------------

RESOLUTION = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", RESOLUTION, ids=str)
@pytest.mark.parametrize("name", SOLVERS)
def test_every_dtype(name, dtype):
    case = tanh_map(n=16, batch=4, norm=0.8, dtype=dtype)
    received = set()

    def f(z, W, x):
        received.add(z.dtype)
        return case.f(z, W, x)

    stop = Stop(rtol={torch.float64: 1e-11, torch.float32: 1e-6}.get(dtype, 1e-3), max_steps=300)
    solution = eq.fixed_point(f, case.z0, *case.inputs, solver=SOLVERS[name], stop=stop)
    assert received == {dtype}
    assert solution.value.dtype == dtype
    assert bool(solution.stats.ok.all()), solution.explain()
    assert case.error(solution.value) < RESOLUTION[dtype]
    # statistics of half-precision states are kept in float32
    assert solution.stats.residual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_residual_of_a_half_precision_value_is_its_own(dtype):
    """Up to the rounding of the returned value itself."""
    case = tanh_map(n=64, batch=4, norm=0.8, dtype=dtype)
    solution = case.solve("anderson", stop=Stop(rtol=1e-4, max_steps=100))
    value = solution.value
    fz = case.f(value, *case.inputs).float()
    residual = (fz - value.float()).norm(dim=1) / fz.norm(dim=1)
    assert (residual - solution.stats.residual).abs().max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("first", "second", "work"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", SOLVERS)
def test_leaves_of_different_dtypes(name, first, second, work):
    z0 = (torch.zeros(3, 4, dtype=first), torch.zeros(3, 2, 2, dtype=second))
    x = problems.gaussian(3, 4, seed=0)
    received = set()

    def f(z):
        a, b = z
        received.add((a.dtype, b.dtype))
        flat = b.flatten(1)
        new_a = torch.tanh(0.4 * a.double() + 0.2 * flat.double() + x)
        new_b = torch.tanh(0.3 * flat.double() - 0.3 * a.double() + 1)
        return new_a.to(first), new_b.to(second).reshape(b.shape)

    floor = max(eq._stop.precision_floor(dtype) for dtype in (first, second))
    solution = eq.fixed_point(f, z0, solver=SOLVERS[name], stop=Stop(rtol=floor, max_steps=300))
    assert received == {(first, second)}
    assert [leaf.dtype for leaf in solution.value] == [first, second]
    assert solution.stats.residual.dtype == work
    assert bool(solution.stats.ok.all()), solution.explain()

    a = b = torch.zeros(3, 4, dtype=torch.float64)
    for _ in range(200):
        a, b = torch.tanh(0.4 * a + 0.2 * b + x), torch.tanh(0.3 * b - 0.3 * a + 1)
    for got, want in zip(solution.value, (a, b), strict=True):
        assert (got.double().flatten(1) - want).norm() <= 4 * floor * want.norm()


# --- memory formats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "shared"])
def test_channels_last_is_kept(name, compact):
    case = image_map(batch=12)
    assert case.z0.is_contiguous(memory_format=torch.channels_last)
    assert not case.z0.is_contiguous()
    seen = []

    def f(z, W, x):
        seen.append(z.is_contiguous(memory_format=torch.channels_last) and not z.is_contiguous())
        return case.f(z, W, x)

    in_dims = case.in_dims if compact else None
    solution = eq.fixed_point(f, case.z0, *case.inputs, solver=SOLVERS[name], stop=TIGHT, in_dims=in_dims)
    assert all(seen)
    assert solution.value.is_contiguous(memory_format=torch.channels_last)
    assert not solution.value.is_contiguous()
    assert case.error(solution.value) < 1e-9


def test_channels_last_3d_is_kept():
    x = problems.gaussian(2, 3, 2, 2, 2, seed=0).to(memory_format=torch.channels_last_3d)
    seen = []

    def f(z):
        seen.append(z.is_contiguous(memory_format=torch.channels_last_3d) and not z.is_contiguous())
        return torch.tanh(0.5 * z + x)

    solution = eq.fixed_point(f, torch.zeros_like(x), stop=TIGHT)
    assert all(seen)
    assert solution.value.is_contiguous(memory_format=torch.channels_last_3d)
    assert (f(solution.value) - solution.value).norm() <= 1e-10 * x.norm()


@pytest.mark.parametrize("channels_last", [True, False])
def test_plain_iteration_copies_nothing(channels_last):
    """What f receives is the very memory of what it returned."""
    case = image_map()
    x = case.x if channels_last else case.x.contiguous()
    received, returned = [], []

    def f(z):
        received.append(z.data_ptr())
        out = torch.tanh(0.5 * z + x)
        returned.append((out.data_ptr(), out))  # kept alive, so that no address is used twice
        return out

    eq.fixed_point(f, torch.zeros_like(x), solver="picard", stop=Stop(rtol=0, max_steps=6))
    assert received[1:] == [pointer for pointer, _ in returned[:-1]]


def test_flatten_and_unflatten_are_inverse_views():
    for case in (multiscale_map(tree="nested"), image_map(), tanh_map(n=1)):
        spec = StateSpec.of(case.z0)
        tree = tree_map(lambda leaf: torch.randn_like(leaf), case.z0)
        flat = spec.flatten(tree)
        for leaf, matrix in zip(tree_leaves(tree), flat, strict=True):
            assert matrix.shape == (leaf.shape[0], leaf[0].numel())
            assert matrix.is_contiguous()
            assert matrix.data_ptr() == leaf.data_ptr()
        back = spec.unflatten(flat)
        for leaf, again in zip(tree_leaves(tree), tree_leaves(back), strict=True):
            assert torch.equal(leaf, again)
            assert leaf.stride() == again.stride()


@pytest.mark.parametrize("batch_dims", [0, 1, 2, 3])
def test_specs_of_every_number_of_batch_axes(batch_dims):
    z = torch.arange(24.0).reshape(2, 3, 4)
    spec = StateSpec.of(z, batch_dims)
    assert spec.num_systems == [1, 2, 6, 24][batch_dims]
    assert spec.flatten(z)[0].shape == (spec.num_systems, 24 // spec.num_systems)
    assert torch.equal(spec.unflatten(spec.flatten(z)), z)


def test_a_start_with_gaps_in_memory():
    """Slices, transposes and expanded tensors are states like any other."""
    x = problems.gaussian(4, 6, seed=0)
    expected = eq.fixed_point(lambda z: torch.tanh(0.5 * z + x), torch.zeros_like(x), stop=TIGHT).value
    for z0 in (
        torch.zeros(6, 4, dtype=torch.float64).T,
        torch.zeros(4, 12, dtype=torch.float64)[:, ::2],
        torch.zeros(1, 6, dtype=torch.float64).expand(4, 6),
    ):
        got = eq.fixed_point(lambda z: torch.tanh(0.5 * z + x), z0, stop=TIGHT).value
        assert torch.allclose(got, expected, rtol=1e-12)


def test_an_f_that_returns_a_transposed_result():
    x = problems.gaussian(4, 4, seed=0)
    solution = eq.fixed_point(lambda z: torch.tanh(0.5 * z.T + x.T).T, torch.zeros_like(x), stop=TIGHT)
    expected = eq.fixed_point(lambda z: torch.tanh(0.5 * z + x), torch.zeros_like(x), stop=TIGHT)
    assert torch.allclose(solution.value, expected.value, rtol=1e-12)


# --- nothing of the caller's is touched ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("grad", [False, True])
def test_start_inputs_and_context_are_never_changed(name, grad):
    case = multiscale_map(batch=12, tree="dict")
    z0 = tree_map(lambda leaf: leaf + 0.1, case.z0)
    context = {"note": torch.ones(12, 2)}
    before = copy.deepcopy((z0, case.inputs, context))
    versions = [leaf._version for leaf in tree_leaves((z0, case.inputs, context))]
    torch.set_grad_enabled(grad)
    eq.fixed_point(
        case.f, z0, *case.inputs, solver=SOLVERS[name], in_dims=case.in_dims, context=context, stop=TIGHT, trace=True
    )
    assert versions == [leaf._version for leaf in tree_leaves((z0, case.inputs, context))]
    for now, then in zip(tree_leaves((z0, case.inputs, context)), tree_leaves(before), strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("name", [name for name, solver in SOLVERS.items() if solver.capturable])
def test_images_are_never_changed_in_place(name):
    """f may return something it keeps, such as a cached tensor."""
    case = tanh_map(n=6, batch=5)
    kept = []

    def f(z, W, x):
        out = case.f(z, W, x)
        kept.append((out, out.clone(), z, z.clone()))
        return out

    eq.fixed_point(f, case.z0, *case.inputs, solver=SOLVERS[name], stop=TIGHT, in_dims=case.in_dims)
    for out, out_then, z, z_then in kept:
        assert torch.equal(out, out_then)
        assert torch.equal(z, z_then)


@pytest.mark.parametrize("stop", [Stop(rtol=1e-9), Stop(rtol=0, max_steps=1)], ids=["solved", "one_step"])
def test_the_value_is_no_alias_of_the_start(stop):
    """Writing into a solution must not write into the caller's start, also when the start solves."""
    case = problems.from_root(tanh_map())
    solution = case.solve("picard", stop=stop)
    assert torch.equal(solution.value, case.z0)
    solution.value.add_(1.0)
    assert case.error(case.z0) < 1e-14


class Shapes(TorchDispatchMode):
    """Notes the last axis of every tensor that comes into being."""

    def __init__(self):
        super().__init__()
        self.widths = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.widths.update(
            leaf.shape[-1] for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.dim()
        )
        return result


@pytest.mark.parametrize("name", SOLVERS)
def test_leaves_are_never_concatenated(name):
    """With leaves of 101 and 103 unknowns no tensor of 204 is ever made."""
    x = (problems.gaussian(3, 101, seed=0), problems.gaussian(3, 103, seed=1))
    z0 = tuple(torch.zeros_like(leaf) for leaf in x)

    def f(z):
        mean = 0.3 * (z[0].mean(dim=1, keepdim=True) + z[1].mean(dim=1, keepdim=True))
        return tuple(torch.tanh(0.4 * leaf + mean + shift) for leaf, shift in zip(z, x, strict=True))

    with Shapes() as shapes:
        solution = eq.fixed_point(f, z0, solver=SOLVERS[name], stop=TIGHT, trace=True)
    assert bool(solution.stats.ok.all())
    assert {101, 103} <= shapes.widths
    assert 204 not in shapes.widths


# --- the problem object ----------------------------------------------------------------------------------------------


def test_problem_products_are_those_of_the_dense_jacobian():
    case = tanh_map(n=6, batch=3)
    problem = Problem(case.f, StateSpec.of(case.z0), case.inputs)
    z, v, u = (problems.gaussian(3, 6, seed=seed) for seed in (1, 2, 3))
    dense = problems.tanh_jacobian(z, case.W, case.x)
    assert torch.allclose(problem.jvp([z], [v])[0], (dense @ v[:, :, None])[:, :, 0], rtol=1e-12)
    fz, pull = problem.vjp([z])
    assert torch.equal(fz[0], problem.evaluate([z])[0])
    assert torch.allclose(pull([u])[0], (u[:, None] @ dense)[:, 0], rtol=1e-12)
    assert problem.nfe == 4  # the product, f of the pullback, f, the pullback


def test_problem_products_on_a_tree_are_adjoint_to_each_other():
    case = multiscale_map(tree="nested")
    problem = Problem(case.f, StateSpec.of(case.z0), case.inputs)
    sizes = [leaf[0].numel() for leaf in tree_leaves(case.z0)]
    z, v, u = ([problems.gaussian(3, size, seed=seed + size) for size in sizes] for seed in (0, 100, 200))
    left = sum((a * b).sum() for a, b in zip(u, problem.jvp(z, v), strict=True))
    right = sum((a * b).sum() for a, b in zip(problem.vjp(z)[1](u), v, strict=True))
    assert torch.allclose(left, right, rtol=1e-12)


@pytest.mark.parametrize("in_dims", [(None, 0), None], ids=["slice", "embedding"])
def test_rows_of_a_problem_are_the_same_problem_on_fewer_systems(in_dims):
    case = tanh_map(n=5, batch=7)
    problem = Problem(case.f, StateSpec.of(case.z0), case.inputs, in_dims=in_dims)
    z, v = problems.gaussian(7, 5, seed=1), problems.gaussian(7, 5, seed=2)
    index = torch.tensor([6, 0, 3])
    part = problem.rows(index)
    assert part.num_systems == 3
    assert torch.allclose(part.evaluate([z[index]])[0], problem.evaluate([z])[0][index], rtol=1e-13)
    assert torch.allclose(part.jvp([z[index]], [v[index]])[0], problem.jvp([z], [v])[0][index], rtol=1e-13)
    again = part.rows(torch.tensor([2, 1]))
    chosen = torch.tensor([3, 0])
    assert torch.allclose(again.evaluate([z[chosen]])[0], problem.evaluate([z])[0][chosen], rtol=1e-13)
    assert part.nfe == again.nfe == problem.nfe == 6


def test_rows_of_two_batch_axes():
    x = problems.gaussian(2, 3, 4, seed=0)
    problem = Problem(lambda z: torch.tanh(0.5 * z + x), StateSpec.of(x, batch_dims=2))
    z = problems.gaussian(6, 4, seed=1)
    index = torch.tensor([5, 2])
    got = problem.rows(index).evaluate([z[index]])[0]
    assert torch.allclose(got, torch.tanh(0.5 * z + x.reshape(6, 4))[index], rtol=1e-13)


def test_autocast_is_part_of_the_problem():
    """f computes in bfloat16 under autocast, the state stays float32, and the floor is that of bfloat16."""
    W = problems.scaled_weight(16, 0.7, seed=0).float()
    x = problems.gaussian(4, 16, seed=1).float()
    dtypes = set()

    def f(z):
        out = torch.nn.functional.linear(z, W) + x
        dtypes.add(torch.nn.functional.linear(z, W).dtype)
        return torch.tanh(out)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = eq.fixed_point(f, torch.zeros_like(x), stop=Stop(rtol=1e-6, max_steps=200))
    assert dtypes == {torch.bfloat16}
    assert solution.value.dtype == torch.float32
    assert bool(solution.stats.ok.all()), solution.explain()
    assert int(solution.stats.steps.max()) < 60
    root = problems.tanh_root(W.double(), x.double())
    assert (solution.value - root).norm() <= 3e-2 * root.norm()


def test_systems_in_two_axes_stay_apart_whatever_the_layout():
    """A layout with channels last is one of the axes of a system; with two axes of systems it would mix them."""
    torch.manual_seed(0)
    x, rate = torch.randn(2, 3, 4, 5), torch.linspace(0.1, 0.95, 6).view(2, 3, 1, 1)
    starts = [torch.zeros_like(x), torch.zeros_like(x, memory_format=torch.channels_last)]
    found = [
        eq.fixed_point(lambda z: torch.tanh(rate * z + x), z0, solver=eq.Picard(), stop=Stop(rtol=1e-5), batch_dims=2)
        for z0 in starts
    ]
    assert torch.equal(found[0].stats.steps, found[1].stats.steps)
    torch.testing.assert_close(found[0].value, found[1].value)
