"""The learned solver's map of the newest residual: what it adds, what it sees, what it is worth, what it may not do."""

import copy
import dataclasses
import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import equipoise as eq
from equipoise import Anderson, HyperAnderson, Ladder, Picard, Stop
from equipoise._problem import Problem, StateSpec
from equipoise.solvers import HyperConfig, hyper_solver_for, load_solver, save_solver
from equipoise.solvers._hyper_nets import FlatCorrection, ImageCorrection, SequenceCorrection
from equipoise.tasks.hyper import FitSettings, HyperRecipe, Networks, find_targets, fit_hyper_solver, unrolled_losses
from equipoise.train.config import load_config
from equipoise.train.hyper_study import study_run
from tests.cli.program import COPY, train
from tests.problems import gaussian
from tests.unit.test_hyper_anderson import CELLS, Flat, Sequence, leaves, made, reference_step, same, shaken, solved
from tests.unit.test_hyper_capture import LAST, TOLERANCE, assert_agree, emulated, others, prepared  # noqa: F401
from tests.unit.test_hyper_fit import Cell, batch, mean_steps
from tests.unit.test_hyper_study import MEASURING, QUICK, RECIPES, SIZES

RANK = 3
MEMORYLESS = {"weights": "newest", "mixing": False, "rank": RANK}
FORMS = {"full": {"rank": RANK}, "memoryless": MEMORYLESS, "corrected": {"rank": RANK, "weights": "corrected"}}
FORMS["least_squares"] = {"rank": RANK, "weights": "least_squares", "mixing": False}
every_form = pytest.mark.parametrize("form", FORMS)
every_cell = pytest.mark.parametrize("name", ["sequence", "local", "images", "any"])


def filled(correction: nn.Module, seed: int = 0) -> nn.Module:
    """The map with numbers in place of the zeros that it begins with, in float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in correction.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return correction.double()


# What is added


@every_form
@every_cell
def test_unfitted_it_is_as_without(name, form):
    deq, x, solver = made(name, **FORMS[form])
    assert solver.correction is not None
    bare = HyperAnderson(dataclasses.replace(solver.config, rank=0))
    assert same(solved(deq, x, solver).value, solved(deq, x, bare).value, 1e-4 if form == "least_squares" else 0.0)
    if not solver.config.solves:  # else it begins as Anderson
        assert same(solved(deq, x, solver).value, solved(deq, x, Picard()).value)


def test_none_is_made_unless_asked_for():
    assert made("any")[2].correction is None
    learned = HyperAnderson.for_any(10, **MEMORYLESS)
    assert learned.step is None
    assert learned.compression is None
    assert learned.num_parameters == 2 * 10 * RANK


@pytest.mark.parametrize("form", ["full", "memoryless", "least_squares"])
def test_the_next_iterate(form):
    """Σ α_i z_i + β Σ α_i g_i + U V Σ α_i g_i, term by term."""
    deq, x, solver = made("any", source=None, **{"memory": 3, **FORMS[form]})
    shaken(solver)
    down, up = solver.correction.down.weight, solver.correction.up.weight
    problem = deq.problem(x)
    z, state = solver.init(problem, problem.start(deq.start(x)))
    zs, gs = [], []
    with torch.no_grad():
        for _ in range(6):
            fz = problem.evaluate(z)
            zs.append(z[0])
            gs.append(fz[0] - z[0])
            z, state = solver.propose(problem, z, fz, state)
            newest = zip(state.weights.T, gs[-state.weights.shape[1] :], strict=True)
            added = sum(weight[:, None] * g for weight, g in newest) @ down.T @ up.T
            assert added.abs().max() > 1e-3 * gs[-1].abs().max()
            without = fz[0] if form == "memoryless" else reference_step(solver, zs, gs, state.weights, state.mixing)
            assert torch.allclose(z[0], without + added, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reach", [1, 2, 3, 9])
@pytest.mark.parametrize("sizes", [(4,), (4, 1, 3)])
def test_of_a_sequence_it_is_a_sum_over_positions(reach, sizes):
    correction = filled(SequenceCorrection(sizes, RANK, reach))
    g = [gaussian(2, 6, size, seed=size) for size in sizes]
    down, ups = correction.down.weight, correction.up.weight.split(RANK, dim=1)
    whole = torch.cat(g, dim=2)
    expected = torch.zeros_like(whole)
    for t in range(6):
        for back in range(min(reach, t + 1)):
            expected[:, t] += whole[:, t - back] @ down.T @ ups[back].T
    found = correction(g)
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in g]
    assert torch.allclose(torch.cat(found, dim=2), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reach", [1, 2, 3])
def test_a_position_sees_itself_and_so_many_before_it(reach):
    correction = filled(SequenceCorrection((4,), RANK, reach))
    g = gaussian(2, 7, 4, seed=1)
    changed = g.clone()
    changed[:, 2] += 1.0
    differs = (correction([g])[0] != correction([changed])[0]).any(dim=2)
    assert differs.tolist() == [[2 <= t < 2 + reach for t in range(7)]] * 2


@pytest.mark.parametrize("shapes", [[(6,)], [(2, 3), (4,), (1, 2, 2)]])
def test_of_any_state_it_is_a_matrix(shapes):
    sizes = [torch.Size(shape).numel() for shape in shapes]
    correction = filled(FlatCorrection(sizes, RANK))
    g = [gaussian(5, *shape, seed=size) for shape, size in zip(shapes, sizes, strict=True)]
    matrix = correction.up.weight @ correction.down.weight
    assert torch.linalg.matrix_rank(matrix) == RANK
    expected = torch.cat([leaf.flatten(1) for leaf in g], dim=1) @ matrix.T
    found = correction(g)
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in g]
    assert torch.allclose(torch.cat([leaf.flatten(1) for leaf in found], dim=1), expected, rtol=1e-12, atol=1e-12)


def test_of_images_it_is_a_matrix_over_channels_at_each_resolution():
    correction = filled(ImageCorrection((3, 5)))
    g = [gaussian(2, 3, 6, 4, seed=1), gaussian(2, 5, 3, 2, seed=2)]
    for found, leaf, mapped in zip(correction(g), g, correction.maps, strict=True):
        expected = torch.einsum("oc,nchw->nohw", mapped.weight[:, :, 0, 0], leaf)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert HyperAnderson.for_images((3, 5), **MEMORYLESS).num_parameters == 3 * 3 + 5 * 5


@every_cell
def test_it_is_linear_in_the_residuals(name):
    deq, x, solver = made(name, rank=RANK)
    correction = filled(solver.correction)
    shapes = [leaf.shape for leaf in leaves(deq.start(x))]
    a, b = ([gaussian(*shape, seed=seed) for shape in shapes] for seed in (1, 2))
    mixed = correction([2 * x - 3 * y for x, y in zip(a, b, strict=True)])
    expected = [2 * x - 3 * y for x, y in zip(correction(a), correction(b), strict=True)]
    assert all(torch.allclose(x, y, rtol=1e-10, atol=1e-10) for x, y in zip(mixed, expected, strict=True))
    assert all(not leaf.any() for leaf in correction([torch.zeros_like(leaf) for leaf in a]))
    assert all(leaf.any() for leaf in mixed)


class TwoLeaves(nn.Module):
    """A sequence in two leaves, (N, T, 4) and (N, T, 2), that look at each other and back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Sequence(6)

    def initial_state(self, x: Tensor) -> dict[str, Tensor]:
        return {"wide": torch.zeros_like(x[..., :4]), "narrow": torch.zeros_like(x[..., 4:])}

    def forward(self, z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        wide, narrow = self.inner(torch.cat([z["wide"], z["narrow"]], dim=2), x).split([4, 2], dim=2)
        return {"wide": wide, "narrow": narrow}


@pytest.mark.parametrize("local", [True, False])
def test_several_leaves_are_one_state(local):
    """The same map of the same numbers, in one leaf or in two."""
    x = CELLS["sequence"][1]
    whole, parts = eq.DEQ(Sequence(6)), eq.DEQ(TwoLeaves())
    settings = {"compressed": 6, "width": 7, "rank": RANK, "local": local}
    one, two = HyperAnderson.for_sequence(6, **settings), HyperAnderson.for_sequence((4, 2), **settings)
    shaken(one)
    two.load_state_dict(one.state_dict())
    found = solved(parts, x, two).value
    joined = torch.cat([found["wide"], found["narrow"]], dim=2)
    assert torch.allclose(joined, solved(whole, x, one).value, rtol=1e-4, atol=1e-5)


class Grid(nn.Module):
    """(N, 2, 5) from 4 numbers: `Flat` in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = Flat()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.flat(z.flatten(1), x).view(len(z), 2, 5)


@every_form
def test_the_order_in_which_a_state_is_stored_does_not_matter(form):
    deq, x = eq.DEQ(Grid()), CELLS["any"][1]
    solver = shaken(HyperAnderson.for_any(10, **FORMS[form]), 0.05)
    start = 0.1 * gaussian(len(x), 2, 5, seed=3).float()
    stored = start.mT.contiguous().mT
    assert stored.stride() != start.stride()
    # Stretches of a sketch are those of what is stored; the correction is not.
    stop = Stop(rtol=0.0, max_steps=6, select="last")
    plain, other = (solved(deq, x, solver, stop, z0=z0).value for z0 in (start, stored))
    flat = solved(eq.DEQ(deq.cell.flat), x, solver, stop, z0=start.flatten(1)).value
    assert torch.allclose(plain, other, rtol=1e-4, atol=1e-5)
    assert torch.allclose(plain.flatten(1), flat, rtol=1e-4, atol=1e-5)


# What it may depend on


@pytest.mark.parametrize("form", ["full", "memoryless"])
@every_cell
def test_what_a_system_gets_does_not_depend_on_others(name, form):
    deq, x, solver = made(name, **FORMS[form])
    shaken(solver, 0.05)
    whole, part = solved(deq, x, solver).value, solved(deq, x[1:3], solver).value
    assert same([leaf[1:3] for leaf in leaves(whole)], part, 2e-6)


@every_cell
def test_finished_systems_are_dropped_without_a_trace(name):
    deq, x, solver = made(name, **MEMORYLESS)
    x = torch.cat([x * scale for scale in (0.1, 1.0, 30.0, 100.0)])
    shaken(solver, 0.03)
    stop = Stop(rtol=1e-4, max_steps=40)
    seen = []
    deq.cell.register_forward_hook(lambda module, inputs, output: seen.append(len(leaves(output)[0])))
    dropped = solved(deq, x, solver, stop)
    assert min(seen) < len(x)
    deq.in_dims = None  # nothing can be dropped then
    assert same(dropped.value, solved(deq, x, solver, stop).value, 1e-5)


@pytest.mark.parametrize("form", ["full", "memoryless"])
def test_positions_do_not_look_ahead(form):
    deq, x, solver = made("local", **FORMS[form])
    shaken(solver)
    changed = x.clone()
    changed[:, 4:] += 1.0
    before, after = (solved(deq, item, solver).value for item in (x, changed))
    assert (before[:, :4] - after[:, :4]).abs().max() < 1e-6
    assert (before[:, 4:] - after[:, 4:]).abs().max() > 1e-2


@pytest.mark.parametrize("length", [1, 2, 11])
def test_sequences_may_be_of_any_length(length):
    deq, _, solver = made("local", rank=RANK, reach=3)
    assert solved(deq, torch.randn(2, length, 6), shaken(solver)).value.shape == (2, length, 6)


@every_form
def test_half_precision_states_and_double_ones(form):
    deq, x, solver = made("sequence", **FORMS[form])
    shaken(solver, 0.05)
    expected = solved(deq, x, solver).value
    double = copy.deepcopy(deq).double()
    assert same(solved(double, x.double(), solver).value.float(), expected, 1e-4)
    half = copy.deepcopy(deq).bfloat16()
    assert same(solved(half, x.bfloat16(), solver).value.float(), expected, 0.1)


@pytest.mark.parametrize("kind", ["sequence", "any"])
def test_nothing_is_read_on_the_host(kind):
    """Tensors without values stand for a device: any look at one raises."""
    config = HyperConfig(kind, (6,) if kind == "sequence" else (30,), None, **MEMORYLESS)
    with torch.device("meta"):
        solver, x = HyperAnderson(config), torch.zeros(3, 5, 6)
        problem = Problem(lambda z, x: z + x, StateSpec.of(x), (x,), in_dims=0)
    with torch.no_grad():
        z, state = solver.init(problem, problem.start(x))
        for _ in range(3):
            z, state = solver.propose(problem, z, problem.evaluate(z), state)
    assert z[0].shape == (3, 30)


# Fitting


def gradient_sizes(solver: HyperAnderson, deq: eq.DEQ) -> dict[str, float]:
    settings = FitSettings(unroll=3)
    (target,), _ = find_targets(deq.eval(), batch(1), settings)
    losses = unrolled_losses(solver, target, settings)
    wanted = {"down": solver.correction.down.weight, "up": solver.correction.up.weight}
    grads = torch.autograd.grad(losses.convergence, list(wanted.values()))
    return {name: float(grad.abs().max()) for name, grad in zip(wanted, grads, strict=True)}


@pytest.mark.parametrize("form", ["full", "memoryless"])
def test_both_factors_learn_the_second_one_first(form):
    deq = eq.DEQ(Cell(), engine="eager")
    solver = hyper_solver_for(deq, batch(0), budget=None, hidden=6, compressed=4, width=5, **FORMS[form])
    unfitted = gradient_sizes(solver, deq)
    assert unfitted["up"] > 0
    assert unfitted["down"] == 0  # the other one is zero
    before = {name: value.clone() for name, value in solver.correction.named_parameters()}
    fit_hyper_solver(deq, batch, FitSettings(steps=3, unroll=3), solver=solver)
    assert all(gradient_sizes(solver, deq)[name] > 0 for name in ("down", "up"))
    assert all(not torch.equal(value, before[name]) for name, value in solver.correction.named_parameters())


def test_gradients_are_those_of_finite_differences():
    deq = eq.DEQ(Cell(), engine="eager").double().eval()
    solver = shaken(hyper_solver_for(deq, batch(0).double(), budget=None, hidden=6, **MEMORYLESS), 0.05).double()
    settings = FitSettings(unroll=4)
    (target,), _ = find_targets(deq, batch(1).double(), settings)
    for weight in solver.correction.parameters():
        (grad,) = torch.autograd.grad(unrolled_losses(solver, target, settings).convergence, weight)
        move, values = torch.randn_like(weight), []
        for sign in (1, -1):
            weight.data.add_(sign * 1e-5 * move)
            values.append(float(unrolled_losses(solver, target, settings).convergence.detach()))
            weight.data.sub_(sign * 1e-5 * move)
        assert float((grad * move).sum()) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


@functools.cache
def fitted(seed: int, **own) -> HyperAnderson:
    settings = FitSettings(steps=50, unroll=6, learning_rate=2e-2, seed=seed, pool=16)
    sizes = {"hidden": 16, "compressed": 8, "width": 16, "budget": None}
    return fit_hyper_solver(eq.DEQ(Cell(), engine="eager"), batch, settings, **sizes, **own).solver


@pytest.mark.parametrize(
    ("own", "seed"), [({}, 0), ({"weights": "newest", "mixing": False}, 0), ({"weights": "newest", "mixing": False}, 1)]
)
def test_with_it_fewer_steps_are_needed(own, seed):
    deq = eq.DEQ(Cell(), engine="eager")
    with_it, without = fitted(seed, rank=12, **own), fitted(seed, **own)
    for rtol in (1e-2, 1e-4):
        fewer = mean_steps(deq, with_it, rtol)
        assert fewer <= 0.8 * mean_steps(deq, without, rtol)
        assert fewer <= 0.8 * mean_steps(deq, Anderson(), rtol)


# Files and sizes


def test_saved_and_loaded(tmp_path):
    deq, x, solver = made("local", rank=RANK, reach=2)
    path = save_solver(shaken(solver), tmp_path / "solver.safetensors", deq)
    loaded = load_solver(path, deq)
    assert (loaded.config.rank, loaded.config.reach) == (RANK, 2)
    assert loaded.config == solver.config
    assert same(solved(deq, x, loaded).value, solved(deq, x, solver).value)


def test_files_from_before_there_was_one(tmp_path):
    deq, x, solver = made("local")
    path = save_solver(shaken(solver), tmp_path / "new.safetensors", deq)
    config = {name: value for name, value in dataclasses.asdict(solver.config).items() if name not in ("rank", "reach")}
    older = tmp_path / "older.safetensors"
    save_file(load_file(path), older, metadata={"config": json.dumps(config), "model": ""})
    loaded = load_solver(older, deq)
    assert loaded.config == solver.config
    assert same(solved(deq, x, loaded).value, solved(deq, x, solver).value)


@pytest.mark.parametrize("form", ["full", "memoryless"])
def test_the_budget_cuts_the_rank_that_was_asked_for(form):
    deq, x, base = eq.DEQ(Sequence(64)), torch.randn(2, 3, 64), nn.Linear(700, 700)
    most = 0.04 * sum(parameter.numel() for parameter in base.parameters())
    asked = {**FORMS[form], "rank": 256}
    solver = hyper_solver_for(deq, x, base=base, **asked)
    assert 4 < solver.config.rank < 256
    assert 0.5 * most < solver.num_parameters <= most
    assert hyper_solver_for(deq, x, base=base, budget=None, **asked).config.rank == 256
    assert hyper_solver_for(deq, x, base=base, budget=1.0, **{**asked, "rank": 5}).config.rank == 5
    assert hyper_solver_for(deq, x, budget=1e-9, **asked).config.rank == 4
    assert hyper_solver_for(deq, x, budget=1e-9).config.rank == 0


def test_going_on_with_a_rank_that_was_cut():
    asked = Networks(rank=64)
    asked.require_of(HyperAnderson.for_any(10, source=3, rank=64))
    asked.require_of(HyperAnderson.for_any(10, source=3, rank=27))
    for rank in (0, 65):
        with pytest.raises(ValueError, match=rf"solver\.rank = 64 cannot be had: .* has {rank}"):
            asked.require_of(HyperAnderson.for_any(10, source=3, rank=rank))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": -1}, "rank must be an integer of at least 0"),
        ({"rank": 1.5}, "rank must be an integer of at least 0"),
        ({"reach": 0}, "reach must be an integer of at least 1"),
    ],
)
def test_wrong_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        HyperConfig("sequence", (4,), **settings)
    with pytest.raises(ValueError, match=words):
        Networks(**settings)


def test_maps_may_be_taken_as_numbers():
    deq, x, _ = made("images")
    sizes = [leaf[0].numel() for leaf in leaves(deq.start(x))]
    flat = shaken(HyperAnderson.for_any(sizes, **MEMORYLESS), 0.01)
    z0 = tuple(leaf.to(memory_format=torch.channels_last) for leaf in deq.start(x))
    assert same(solved(deq, x, flat, z0=z0).value, solved(deq, x, flat).value, 1e-5)


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (HyperAnderson.for_any(30, **MEMORYLESS), r"so many numbers, 30 by leaf, .* of shape \(2, 5, 3\); fit one"),
        (HyperAnderson.for_any(30, rank=RANK, compressed=4, width=4), "systems of so many numbers, 30 by leaf"),
        (HyperAnderson.for_sequence(4, **MEMORYLESS), r"leaves \(N, T, features\), 4 by leaf"),
        (HyperAnderson.for_sequence((2, 1), **MEMORYLESS), r"leaves \(N, T, features\), 2, 1 by leaf"),
    ],
)
def test_states_of_another_size_are_refused(solver, words):
    """Where a solver without one would do: it has nothing that knows a size."""
    deq, x = eq.DEQ(Sequence(3)), torch.randn(2, 5, 3)
    with pytest.raises(ValueError, match=words):
        solved(deq, x, solver)


# The captured engine


@pytest.mark.parametrize("form", ["full", "memoryless"])
@every_cell
def test_the_captured_engine_gives_what_the_eager_one_gives(name, form):
    for stop in (LAST, TOLERANCE):
        deq, x, _ = prepared(name, stop, **FORMS[form])
        for inputs in (x, *others(x, 1)):
            assert_agree(deq, inputs, 1e-6)
        assert (deq.capture.recorded, deq.capture.replayed) == (1, 2)
        assert not deq.capture.fallbacks


@pytest.mark.parametrize(("name", "form"), [("local", "full"), ("local", "memoryless"), ("any", "memoryless")])
def test_as_a_graph_would_replay_it(emulated, name, form):  # noqa: F811
    """Pieces of 4, 4 and 3 steps; weights of cell and solver updated in place; nothing left of the solve before."""
    deq, x, _ = prepared(name, Stop(rtol=0, max_steps=11), **FORMS[form])
    broken = x.clone()
    broken[0] = torch.nan
    for inputs in (x, *others(x, 1), broken, x):
        assert_agree(deq, inputs, 1e-6)
        with torch.no_grad():
            for parameter in deq.parameters():  # those of the solver are among them
                parameter.add_(0.01 * torch.randn_like(parameter))
    assert (deq.capture.recorded, deq.capture.replayed) == (1, 4)


@pytest.mark.parametrize("form", ["full", "memoryless"])
def test_half_precision_of_the_cell_is_not_that_of_the_solver(form):
    deq, x, solver = prepared("local", **FORMS[form])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for inputs in (x, *others(x)):
            assert_agree(deq, inputs, 1e-6)
    assert (deq.capture.recorded, deq.capture.replayed) == (1, 3)
    assert all(parameter.dtype == torch.float32 for parameter in solver.parameters())


# Safety


def spoiled(form: str) -> tuple[eq.DEQ, Tensor, HyperAnderson]:
    """A problem that plain steps solve, and a solver whose correction throws iterates away."""
    deq, x, solver = made("any", **FORMS[form])
    torch.manual_seed(3)
    nn.init.normal_(solver.correction.up.weight, std=5.0)
    return deq, x, solver


@every_form
def test_the_best_iterate_stands_when_the_correction_is_bad(form):
    deq, x, solver = spoiled(form)
    solution = solved(deq, x, solver, Stop(rtol=1e-6, max_steps=8), trace=True)
    measured = solution.stats.trace.nan_to_num(torch.inf)
    assert not solution.stats.ok.any()
    assert torch.allclose(solution.stats.residual, measured.min(dim=1).values)
    assert (solution.stats.residual <= measured[:, 0]).all()
    z = solution.value
    relative = (deq.cell(z, x) - z).norm(dim=1) / deq.cell(z, x).norm(dim=1)
    assert torch.allclose(relative, solution.stats.residual, rtol=1e-4)


@pytest.mark.parametrize("form", ["full", "memoryless"])
def test_stalled_systems_are_handed_to_a_classic_solver(form):
    deq, x, solver = spoiled(form)
    stop = Stop(rtol=1e-4, max_steps=20)
    assert not solved(deq, x, solver, stop).stats.ok.any()
    guarded = solved(deq, x, Ladder((solver, Anderson())), stop)
    assert guarded.stats.ok.all()
    assert same(guarded.value, solved(deq, x, Anderson(), Stop(rtol=1e-6)).value, 1e-2)


def test_weights_of_least_squares_take_up_what_a_bad_map_leaves():
    """For ten unknowns a few steps of Anderson's undo it; plain ones on the same map do not converge."""
    deq, x, solver = spoiled("least_squares")
    assert solved(deq, x, solver, Stop(rtol=1e-4, max_steps=20)).stats.ok.all()
    assert not solved(deq, x, solver.plainly(), Stop(rtol=1e-4, max_steps=20)).stats.ok.any()


# Fitted by plain steps


def test_a_plain_fit_is_that_of_the_memoryless_solver():
    """The same networks, the same losses, the same gradients."""
    deq, x, solver = made("any", **FORMS["least_squares"])
    shaken(solver)
    memoryless = HyperAnderson(dataclasses.replace(solver.config, weights="newest"))
    memoryless.load_state_dict(solver.state_dict())
    (target,), _ = find_targets(deq, x, FitSettings(accept=1.0))
    found = {}
    for name, one, plain in (("plain", solver, True), ("memoryless", memoryless, False), ("in use", solver, False)):
        one.zero_grad()
        losses = unrolled_losses(one, target, FitSettings(unroll=4, plain=plain))
        losses.convergence.backward()
        found[name] = losses.convergence.item(), one.correction.up.weight.grad.clone()
    assert found["plain"][0] == found["memoryless"][0] != found["in use"][0]
    assert torch.equal(found["plain"][1], found["memoryless"][1])
    assert solver.config.weights == "least_squares"


def test_what_is_learned_cannot_be_left_out():
    deq, x, solver = made("any", **FORMS["full"])
    with pytest.raises(ValueError, match="weights='shift' with mixing=True are learned"):
        fit_hyper_solver(deq, [x], FitSettings(steps=1, plain=True, accept=1.0), solver=solver)


# Reports


def test_a_report_on_both_forms(tmp_path):
    """The memoryless one first, which is timed and followed: there is no network to make its steps."""
    run = train(tmp_path, COPY)
    chosen = {}
    for name in ("low_rank", "full_low_rank"):
        recipe = load_config(HyperRecipe, RECIPES[name])
        chosen[name] = dataclasses.replace(recipe, solver=dataclasses.replace(recipe.solver, **SIZES), fit=QUICK)
    record = study_run(run, chosen, tmp_path / "report", seeds=1, measuring=MEASURING)
    assert (list(record["variants"]), record["skipped"], record["reported"]) == (list(chosen), {}, "low_rank")
    solvers = {name: load_solver(run / "hyper" / name / "seed-0") for name in chosen}
    assert solvers["low_rank"].step is None
    assert solvers["full_low_rank"].step is not None
    for name, solver in solvers.items():
        assert 0 < solver.config.rank <= 64
        assert record["variants"][name]["fits"][0]["parameters"] == solver.num_parameters
    assert record["overhead"]["ms_per_step"].keys() == {"anderson", "hyper"}
    text = (tmp_path / "report" / "README.md").read_text(encoding="utf-8")
    assert "## Overhead" in text
    assert all((tmp_path / "report" / f"{name}.png").is_file() for name in ("pareto", "beyond", "ablations"))
