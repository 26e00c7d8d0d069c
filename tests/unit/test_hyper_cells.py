"""Learned solvers for cells and models as users write them: other axes, starts, leaves, graphs and buffers."""

import pickle

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import DEQ, HyperAnderson, Ladder, Status, Stop
from equipoise.solvers import hyper_solver_for, load_solver, save_solver
from equipoise.tasks.hyper import FitSettings, Pool, find_targets, fit_hyper_solver, hyper_step
from equipoise.train.tracking import read_metrics

QUICK = FitSettings(steps=4, unroll=3)
WIDTH, GIVEN = 16, 3


class Cell(nn.Module):
    def __init__(self, gain: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(GIVEN, WIDTH)
        nn.init.normal_(self.inner.weight, std=gain / WIDTH**0.5)

    def initial_state(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], WIDTH)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + self.outer(x))


def stirred(solver: HyperAnderson, seed: int = 1, size: float = 0.1) -> HyperAnderson:
    """As if it were fitted: nothing of it is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in solver.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return solver


# Gradients


@pytest.mark.parametrize("settings", [{"weights": "corrected"}, {"weights": "least_squares", "rank": 2}, {}], ids=str)
def test_unrolled_steps_are_differentiated_as_they_ran(settings):
    deq = DEQ(Cell(), adjoint=eq.Unroll(), stop=Stop(rtol=0, max_steps=5, select="last")).double()
    solver = stirred(HyperAnderson.for_any((WIDTH,), GIVEN, **settings).double())
    x = torch.randn(3, GIVEN, dtype=torch.float64)

    def loss() -> Tensor:
        with eq.override(deq, solver=solver):
            return deq(x).value.square().sum()

    loss().backward()
    for parameter in solver.parameters():
        if parameter.grad is None or not parameter.grad.any():
            continue
        place = int(parameter.grad.abs().flatten().argmax())
        sides = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter.view(-1)[place] += step
                sides.append(float(loss()))
                parameter.view(-1)[place] -= step
        assert float(parameter.grad.view(-1)[place]) == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-7)


def test_a_fit_leaves_what_made_the_batch_alone():
    encoder, deq = nn.Linear(5, GIVEN), DEQ(Cell())
    fit = fit_hyper_solver(deq, lambda step: encoder(torch.randn(8, 5)), QUICK, budget=None)
    assert encoder.weight.grad is None
    features = encoder(torch.randn(8, 5))
    optimiser = torch.optim.Adam(fit.solver.parameters())
    hyper_step(deq, features, fit.solver, optimiser, settings=QUICK)
    assert encoder.weight.grad is None
    deq(features).value.sum().backward()  # the graph of training is whole
    assert encoder.weight.grad.any()
    x = torch.randn(8, GIVEN, requires_grad=True)
    fit_hyper_solver(deq, [x], FitSettings(steps=4, unroll=3, pool=1), budget=None)
    assert x.grad is None


def test_residuals_that_are_rounding_are_not_learned_from(tmp_path):
    """The derivative of a relative number is one over its size: some gradients were 1e5 and more."""
    torch.manual_seed(1)
    batches = [torch.randn(4, 8, GIVEN) for _ in range(40)]
    settings = FitSettings(steps=40, unroll=10, stop=Stop(rtol=1e-6, max_steps=40))
    sizes = {"width": 16, "compressed": 16, "hidden": 16, "budget": None}
    fit_hyper_solver(DEQ(Cell(gain=0.1)), batches, settings, log=tmp_path / "fit.jsonl", log_every=1, **sizes)
    assert max(record["fit"]["gradient"] for record in read_metrics(tmp_path / "fit.jsonl")) < 1e3


# Starts


class Starting(nn.Module):
    """A model that says itself where solves begin."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        cell = Cell()
        cell.initial_state = None
        self.deq, self.start = DEQ(cell), start

    def forward(self, x: Tensor) -> Tensor:
        return self.deq(x, z0=x.new_full((len(x), WIDTH), self.start)).value


@pytest.mark.parametrize("pool", [None, 2])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_a_model_that_gives_the_start(start, pool):
    settings = FitSettings(steps=4, unroll=3, pool=pool)
    fit = fit_hyper_solver(Starting(start), lambda step: torch.randn(8, GIVEN), settings, budget=None)
    assert fit.solver.config.state == (WIDTH,)
    assert fit.solver.config.source == GIVEN
    assert fit.solver.config.warm == "keep"  # what the model gives is a warm start


def test_starts_of_systems_that_cannot_be_taken_apart():
    """Where some have no equilibrium, the initialiser learns from the others all the same."""

    class Torn(Cell):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.where(x[:, :1] > 1e3, torch.where(z > 0, -1.0, 1.0), super().forward(z, x))

    torch.manual_seed(0)
    deq, x = DEQ(Torn(), in_dims=None), torch.randn(8, GIVEN)
    x[0] = 1e4
    started = {"weights": "least_squares", "mixing": False, "hidden": 8}
    fit = fit_hyper_solver(deq, [x], FitSettings(steps=20, unroll=2, learning_rate=1e-2), budget=None, **started)
    assert fit.record["last"]["initial"] < 0.9 * fit.record["first"]["initial"]
    assert fit.record["accepted"] == pytest.approx(7 / 8)


# Axes and leaves


@pytest.mark.parametrize("systems", [4, 5])
def test_systems_along_another_axis_stay_apart(systems):
    class Turned(Cell):
        def initial_state(self, x: Tensor) -> Tensor:
            return x.new_zeros(x.shape[1], x.shape[0], WIDTH)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return super().forward(z, x.transpose(0, 1))

    torch.manual_seed(0)
    deq, x = DEQ(Turned(), in_dims=1).eval(), torch.randn(5, systems, GIVEN)  # (T, N, features)
    solver = stirred(hyper_solver_for(deq, x, budget=None, hidden=8, width=8, compressed=8), size=0.02)
    assert (solver.config.kind, solver.config.source) == ("sequence", GIVEN)
    other = x.clone()
    other[:, 3] += 1.0
    with torch.no_grad(), eq.override(deq, solver=solver, stop=Stop(rtol=0, max_steps=3, select="last")):
        before, after = deq(x).value, deq(other).value
    changed = (before != after).flatten(1).any(1)
    assert changed.tolist() == [place == 3 for place in range(systems)]


class Uneven(nn.Module):
    """A sequence and a vector of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.whole, self.outer = nn.Linear(8, 8), nn.Linear(6, 6), nn.Linear(GIVEN, 8)

    def initial_state(self, x: Tensor) -> dict[str, Tensor]:
        return {"words": x.new_zeros(*x.shape[:2], 8), "whole": x.new_zeros(len(x), 1, 6)}

    def forward(self, z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        words = torch.tanh(0.3 * self.words(z["words"]) + self.outer(x))
        return {"words": words, "whole": torch.tanh(0.3 * self.whole(z["whole"]) + words[..., :6].mean(1, True))}


def test_leaves_of_different_lengths_are_taken_as_flat():
    torch.manual_seed(0)
    deq, x = DEQ(Uneven()).eval(), torch.randn(4, 5, GIVEN)
    solver = hyper_solver_for(deq, x, budget=None)
    assert (solver.config.kind, solver.config.state) == ("any", (40, 6))
    with torch.no_grad(), eq.override(deq, solver=stirred(solver, size=0.01), stop=Stop(rtol=1e-4)):
        assert deq(x).stats.ok.all()
    wrong = HyperAnderson.for_sequence((8, 6), GIVEN, local=True)
    said = "sequences of one length, but the leaves of this state have 1, 5 positions"
    with torch.no_grad(), eq.override(deq, solver=wrong), pytest.raises(ValueError, match=said):
        deq(x)


@pytest.mark.parametrize(
    ("solver", "x", "words"),
    [
        (HyperAnderson.for_sequence(WIDTH, GIVEN), torch.randn(4, 5, GIVEN), None),
        (HyperAnderson.for_sequence(WIDTH, 4), torch.randn(4, 5, GIVEN), "reads an input of 4 features"),
        (HyperAnderson.for_sequence(WIDTH, GIVEN), torch.randn(4, GIVEN), r"made for leaves \(N, T, features\)"),
        (HyperAnderson.for_sequence(WIDTH, weights="least_squares", mixing=False, local=True), torch.randn(4, GIVEN),
         r"made for leaves \(N, T, features\)"),
    ],
)  # fmt: skip
def test_inputs_of_another_form_are_named(solver, x, words):
    deq = DEQ(Cell()).eval()
    with torch.no_grad(), eq.override(deq, solver=solver):
        if words is None:
            assert deq(x).stats.ok.all()
            return
        with pytest.raises(ValueError, match=words):
            deq(x)


def test_an_input_of_another_length_than_the_state_is_named():
    class Pooled(Cell):
        def initial_state(self, x: Tensor) -> Tensor:
            return x.new_zeros(len(x), 5, WIDTH)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return super().forward(z, x.mean(1, keepdim=True))

    deq, solver = DEQ(Pooled()).eval(), HyperAnderson.for_sequence(WIDTH, GIVEN)
    said = r"has shape \(4, 5, 16\); the first input has \(4, 7, 3\)"
    with torch.no_grad(), eq.override(deq, solver=solver), pytest.raises(ValueError, match=said):
        deq(torch.randn(4, 7, GIVEN))


def test_a_context_may_have_parts_of_all_systems():
    """What has a row per system goes with the rows, when finished ones leave the batch; the rest stays."""

    class Told(Cell):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh((1 - 0.9 / x[:, :1].abs().clamp_min(1)) * self.inner(z) + self.outer(x))

    torch.manual_seed(0)
    x = torch.randn(32, GIVEN) * torch.logspace(0, 2, 32)[:, None]
    context = (torch.randn(32, 7), torch.tensor(0.5), torch.randn(9, 2))
    solver = stirred(HyperAnderson.for_any((WIDTH,), 7), size=0.02)
    cell = Told()
    with torch.no_grad():
        options = {"solver": solver, "stop": Stop(rtol=1e-6, max_steps=60), "in_dims": (0,), "context": context}
        together = eq.fixed_point(cell, torch.zeros(32, WIDTH), x, **options)
    assert together.stats.ok.all()
    assert len(together.stats.steps.unique()) > 1


# Models


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deq, self.mix = DEQ(Cell()), nn.Linear(8, 8)
        self.out = nn.Linear(WIDTH, 8)

    def initial_state(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 8)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.mix(z) + self.out(self.deq(x).value))


def test_solves_within_a_solve_are_parts_of_f():
    model = DEQ(Nested())
    targets, _ = find_targets(model, torch.randn(4, GIVEN), QUICK)
    assert [target.deq for target in targets] == [model]


def test_equilibria_of_different_forms_need_a_solver_each():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = DEQ(Cell()), DEQ(Slim())

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).value).value

    class Slim(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(WIDTH, 8)

        def initial_state(self, x: Tensor) -> Tensor:
            return x.new_zeros(len(x), 8)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(0.3 * self.inner(z) + self.outer(x))

    with pytest.raises(ValueError, match=r"Two solves for states of different forms, \(4, 16\) and \(4, 8\): fit a"):
        fit_hyper_solver(Two(), [torch.randn(4, GIVEN)], QUICK, budget=None)


def test_a_pool_is_of_the_buffers_too_and_keeps_no_graph():
    class Buffered(Cell):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return self.scale * super().forward(z, x)

    deq, batches = DEQ(Buffered()), [torch.randn(4, GIVEN) for _ in range(2)]
    pool = Pool(deq, batches, QUICK)
    fit_hyper_solver(deq, batches, QUICK, pool=pool, budget=None)
    assert all(target.problem._residual is None for place in range(2) for target in pool.at(place))
    deq.cell.scale.mul_(0.5)
    assert not pool.is_of(deq)
    with pytest.raises(ValueError, match="with other weights: find them anew"):
        fit_hyper_solver(deq, batches, QUICK, pool=pool, budget=None)


def test_a_solver_of_the_adjoint_moves_with_the_model():
    learned = HyperAnderson.for_any((WIDTH,))
    deq = DEQ(Cell(), adjoint=eq.Implicit(solver=learned)).double()
    assert all(parameter.dtype == torch.float64 for parameter in learned.parameters())
    assert not any("learned" in name for name in deq.state_dict())
    deq(torch.randn(2, GIVEN, dtype=torch.float64)).value.sum().backward()
    assert deq.cell.inner.weight.grad.isfinite().all()


# The rest


def test_signs_of_sketches_are_nobodys_own():
    solver = HyperAnderson.for_sequence(8, compression="sketch", local=False)
    before = len(pickle.dumps(solver))
    cell = nn.Linear(8, 8)
    for length in (1, 30, 100):
        eq.fixed_point(lambda z: torch.tanh(0.1 * cell(z)), torch.zeros(2, length, 8), solver=solver)
    assert len(pickle.dumps(solver)) == before


def test_a_ladder_of_one_says_that_it_began_at_the_equilibrium():
    learned = stirred(HyperAnderson.for_any((WIDTH,), GIVEN, weights="newest", mixing=False, rank=4), size=5.0)
    deq = DEQ(Cell()).eval()
    nn.init.zeros_(deq.cell.outer.bias)
    nn.init.zeros_(deq.cell.inner.bias)
    x = torch.zeros(2, GIVEN)
    x[1] = 1.0
    with torch.no_grad(), eq.override(deq, solver=Ladder((learned,)), stop=Stop(rtol=1e-6, atol=1e-9, max_steps=3)):
        solution = deq(x)
    assert solution.stats.status[0] == Status.CONVERGED
    assert not solution.value[0].any()


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match='"newest" remembers none'):
        HyperAnderson.for_any(4, weights="newest", plain_sum=True)
    with pytest.raises(ValueError, match="log_every"):
        fit_hyper_solver(DEQ(Cell()), [torch.randn(2, GIVEN)], QUICK, budget=None, log_every=0)


def test_a_solver_is_saved_into_a_folder_that_is_there(tmp_path):
    deq = DEQ(Cell())
    path = save_solver(HyperAnderson.for_any((WIDTH,), GIVEN), tmp_path, deq)
    assert path == tmp_path / "solver.safetensors"
    assert load_solver(tmp_path, deq).config.source == GIVEN
