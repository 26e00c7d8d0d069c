"""Metric against time: what is measured, what follows from it, and the figure."""

import json
import math
import os
import shutil

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import Anderson, HyperAnderson, Picard
from equipoise.bench.harness import Sample
from equipoise.plots import FIGURES, LogError, draw, make_chart
from equipoise.solvers import save_solver
from equipoise.train.hyper_study import Measuring
from equipoise.train.loop import train
from equipoise.train.pareto import by_kind, pareto, pareto_run
from equipoise.train.pareto_curves import (
    ahead_in_time,
    curves,
    mean_curve,
    most_behind,
    noise,
    speedups,
    steps_ahead,
    time_to_reach,
)
from tests.problems import scaled_weight
from tests.runs import COPY, recipe
from tests.unit.test_forward import taped  # noqa: F401
from tests.unit.test_train_captured import emulated, inline_solves  # noqa: F401


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(scaled_weight(6, 0.9, 1).float())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight.T + x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deq = eq.DEQ(Cell(), engine="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.deq(x).value


def measure(**options):
    torch.manual_seed(0)
    model, batches = Model(), [torch.randn(4, 6) for _ in range(3)]
    with torch.no_grad(), eq.override(model, stop=eq.Stop(rtol=1e-7)):
        roots = [model(x) for x in batches]

    def score(model, batches):
        pairs = zip(batches, roots, strict=True)
        return {"error": max(float((model(x) - root).abs().max()) for x, root in pairs), "calls": 1.0}

    solvers = {
        "picard": Picard(),
        "anderson": "anderson",
        "hyper": [HyperAnderson.for_any(6), HyperAnderson.for_any(6)],
    }
    settings = {"score": score, "metric": "error", "warmup": 1, "rounds": 3, **options}
    return model, pareto(model, batches, solvers, (1, 3, 6), **settings)


def test_points_of_every_solver_seed_and_number_of_steps():
    model, record = measure(others={"two layers": nn.Sequential(nn.Linear(6, 6), nn.Tanh())})
    points = record["points"]
    assert [(p["solver"], p["seed"], p["steps"]) for p in points[:4]] == [
        ("picard", 0, 1),
        ("anderson", 0, 1),
        ("hyper", 0, 1),
        ("hyper", 1, 1),
    ]
    assert len(points) == 3 * 4 + 1
    assert points[-1]["solver"] == "two layers"
    assert points[-1]["steps"] is None
    assert all(0 < p["ms_low"] <= p["ms"] <= p["ms_high"] for p in points)
    assert all(p["ms_low"] <= p["ms_mean"] <= p["ms_high"] for p in points)
    assert all(p["ms_alone"] == p["ms"] for p in points)  # a CPU is its own host
    found = {(p["solver"], p["seed"], p["steps"]): p for p in points}
    for steps in (1, 3, 6):  # an unfitted solver is the plain iteration
        assert found["hyper", 1, steps]["metric"] == found["picard", 0, steps]["metric"]
        assert found["hyper", 1, steps]["residual"] == found["picard", 0, steps]["residual"]
    assert found["anderson", 0, 6]["metric"] < found["anderson", 0, 3]["metric"] < found["anderson", 0, 1]["metric"]
    assert (record["reference"], record["at"], record["better"]) == ("picard", 6, "lower")
    assert 6 in record["ahead"]["anderson"]
    assert record["ahead"]["hyper"] == [1, 3, 6]
    assert record["behind"]["hyper"] == 0.0
    assert model.training
    assert model.deq.plan.solver == Anderson()
    json.dumps(record)


def test_the_mean_is_beside_the_median(monkeypatch):
    monkeypatch.setattr(
        "equipoise.train.pareto.in_turns", lambda works, *_, **__: dict.fromkeys(works, Sample.of(TIMES))
    )
    point = measure()[1]["points"][0]
    assert (point["ms"], point["ms_mean"]) == pytest.approx((2.0, 4.0))


TIMES = (1e-3, 2e-3, 9e-3)


def test_there_are_twenty_calls_before_the_timing(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "equipoise.train.pareto.in_turns", lambda works, *_, **__: dict.fromkeys(works, Sample.of(TIMES))
    )
    options = {"score": lambda model, batches: {"size": 1.0}, "metric": "size"}

    def forward(model, batch, carry):
        calls.append(batch)
        return model(batch)

    pareto(Model(), [torch.randn(4, 6)], {"anderson": "anderson"}, (1,), forward=forward, **options)
    assert len(calls) >= 20
    assert Measuring().warmup == 20


def test_seeds_of_one_form_share_a_recording_and_have_metrics_of_their_own():
    torch.manual_seed(0)
    model, batches = Model(), [torch.randn(4, 6) for _ in range(2)]
    model.deq.engine = "captured"
    seeds = [HyperAnderson.for_any(6), HyperAnderson.for_any(6), HyperAnderson.for_any(6, memory=2)]
    with torch.no_grad():
        for number, seed in enumerate(seeds):
            seed.step.out.bias.add_(0.1 * number)
    before = [[p.detach().clone() for p in seed.parameters()] for seed in seeds]

    def score(model, batches):
        return {"size": sum(float(model(x).norm()) for x in batches)}

    options = {"score": score, "metric": "size", "warmup": 0, "rounds": 3}
    record = pareto(model, batches, {"anderson": "anderson", "hyper": seeds}, (3,), **options)
    points = {(p["solver"], p["seed"]): p for p in record["points"]}
    assert model.deq.capture.recorded == 3  # Anderson, the first two, the third
    assert all(p["engine"] == "captured" for p in points.values())
    assert points["hyper", 0]["ms"] == points["hyper", 1]["ms"]
    model.deq.engine = "eager"
    for number, seed in enumerate(seeds):
        stop = eq.Stop(rtol=0, atol=0, max_steps=3, select="last")
        with torch.no_grad(), eq.override(model, solver=seed, stop=stop):
            assert points["hyper", number]["metric"] == pytest.approx(score(model.eval(), batches)["size"], rel=1e-5)
        assert all(map(torch.equal, seed.parameters(), before[number]))
    assert points["hyper", 0]["metric"] != points["hyper", 1]["metric"]


def test_the_whole_forward_pass_is_timed_as_one_graph(taped):  # noqa: F811
    """Where it can be, and else it is said why; Anderson's steps read on the host without a CUDA device."""
    torch.manual_seed(0)
    model, batches = Model(), [torch.randn(4, 6) for _ in range(2)]
    model.deq.engine = "auto"
    seeds = [HyperAnderson.for_any(6), HyperAnderson.for_any(6)]
    options = {"score": lambda model, batches: {"size": float(model(batches[0]).norm())}, "metric": "size"}
    solvers = {"picard": Picard(), "anderson": "anderson", "hyper": seeds}
    options |= {"warmup": 0, "rounds": 3, "others": {"a layer": nn.Linear(6, 6)}}
    record = pareto(model, batches, solvers, (2, 3), **options)
    engines = {(p["solver"], p["engine"], p["no_graph"]) for p in record["points"]}
    reason = "the forward pass cannot be recorded (operation not permitted when stream is capturing)"
    assert engines == {
        ("picard", "graph", None),
        ("anderson", "eager", reason),
        ("hyper", "graph", None),
        ("a layer", "graph", None),
    }
    json.dumps(record)


def test_without_graphs_it_is_said():
    _, record = measure()
    assert {p["no_graph"] for p in record["points"]} == {"there are no CUDA graphs on 'cpu'"}
    assert {p["engine"] for p in record["points"]} == {"eager"}


def test_what_is_known_so_far_is_told_after_each_number_of_steps():
    told = []
    _, record = measure(each=told.append, others={"a layer": nn.Linear(6, 6)})
    assert [part["missing"] for part in told] == [[1, 3], [3], []]
    assert [{p["steps"] for p in part["points"]} for part in told] == [{6, None}, {1, 6, None}, {1, 3, 6, None}]
    assert told[-1] == record
    json.dumps(told)


def test_the_iterate_after_exactly_so_many_evaluations_is_scored():
    _, record = measure()
    torch.manual_seed(0)
    model, batches = Model(), [torch.randn(4, 6) for _ in range(3)]
    with torch.no_grad():
        with eq.override(model, stop=eq.Stop(rtol=1e-7)):
            roots = [model(x) for x in batches]
        errors = []
        for x, root in zip(batches, roots, strict=True):
            z = torch.zeros_like(x)
            for _ in range(3):
                z = model.deq.cell(z, x)
            errors.append(float((z - root).abs().max()))
    assert next(p for p in record["points"] if p["steps"] == 3)["metric"] == pytest.approx(max(errors), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "eror"}, "did you mean 'error'"),
        ({"better": "larger"}, "unknown kind of metric"),
        ({"reference": "andersen"}, "did you mean 'anderson'"),
        ({"at": 4}, "at=4 is not among the budgets 1, 3, 6"),
        (
            {"others": {"anderson": nn.Linear(6, 6)}},
            "a run beside it is called 'anderson', as a solver that is measured",
        ),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ValueError, match=words):
        measure(**options)


def test_a_model_without_an_equilibrium():
    with pytest.raises(ValueError, match="contains no DEQ"):
        pareto(nn.Linear(2, 2), [], {"anderson": "anderson"}, (1,), score=lambda *_: {}, metric="loss")


# Of a run


def test_learned_solvers_of_equal_settings_are_seeds_of_one_kind():
    one, twin, other = HyperAnderson.for_any(6), HyperAnderson.for_any(6), HyperAnderson.for_any(6, memory=2)
    found = by_kind({"anderson": Anderson(), "hyper:runs/a": one, "hyper:runs/b": twin})
    assert found == {"anderson": [Anderson()], "hyper": [one, twin]}
    given = {"hyper:runs/a/hyper": one, "picard": Picard(), "hyper:runs/b/hyper": other, "hyper:runs/c/hyper": twin}
    assert by_kind(given) == {"hyper:a/hyper": [one, twin], "picard": [Picard()], "hyper:b/hyper": [other]}
    assert list(by_kind({"hyper:/runs/a": one, "hyper:b": other})) == ["hyper:a", "hyper:b"]
    assert list(by_kind({"hyper:a": one, "hyper:x/a": other})) == ["hyper:a", "hyper:x/a"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    train(recipe(COPY, "train.steps=1"), folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


QUICK = {"warmup": 0, "rounds": 1, "most": 1}


def test_kinds_of_learned_solvers_are_measured_by_themselves(run):
    for name, memory in (("first", 5), ("second", 5), ("third", 2)):
        (run / name).mkdir()
        save_solver(HyperAnderson.for_sequence(COPY["model"]["d_model"], None, memory=memory), run / name)
    lines, names = [], ["anderson", *(f"hyper:{run / name}" for name in ("first", "second", "third"))]
    record = pareto_run(run, names, (1, 2), say=lines.append, **QUICK)
    by_name = {name: len(seeds) for name, seeds in curves(record).items()}
    assert by_name == {"anderson": 1, "hyper:first": 2, "hyper:third": 1}
    assert set(record["speedup"]) == set(by_name)
    means = {name: mean_curve(seeds)[1]["metric"] for name, seeds in curves(record).items()}
    said = ", ".join(f"{name} {value:.6g}" for name, value in means.items())
    assert lines[0] == f"after 2 steps: {said} (1 of 2)"  # the one to be reached comes first
    assert lines[1].startswith("after 1 step: anderson ")
    assert lines[1].endswith(" (2 of 2)")


def test_an_older_measurement_by_other_settings_is_kept(run):
    def measured(*budgets, **options):
        lines = []
        pareto_run(run, ("anderson",), budgets, say=lines.append, **QUICK, **options)
        os.utime(run / "pareto.json", (0, 0))
        return [line for line in lines if "stays in" in line]

    def steps_in(name):
        return [point["steps"] for point in json.loads((run / name).read_text())["points"]]

    assert measured(1, 2) == measured(1, 2) == []
    first = run / "pareto-19700101T000000Z.json"
    assert measured(1) == [f"what was measured by other settings before stays in {first}"]
    assert (steps_in(first.name), steps_in("pareto.json")) == ([1, 2], [1])
    assert len(measured(1, split="test")) == 1  # of the same second
    (run / "pareto.json").write_text("cut off")
    assert len(measured(1)) == 1
    kept = {path.name for path in run.glob("pareto-*.json")}
    assert len(kept) == 3
    assert {first.name, "pareto-19700101T000000Z-2.json"} < kept
    assert (steps_in(first.name), steps_in("pareto-19700101T000000Z-2.json")) == ([1, 2], [1])


# What follows from points


def curve(*points, **extra):
    return [{"steps": k, "ms": ms, "metric": metric, **extra} for k, (ms, metric) in enumerate(points, start=1)]


@pytest.mark.parametrize(
    ("target", "expected"), [(9.0, 1.0), (8.0, 1.0), (6.0, 1.5), (4.0, 2.0), (3.0, 3.0), (2.0, 4.0), (1.9, None)]
)
def test_the_time_to_reach_a_metric(target, expected):
    points = curve((1.0, 8.0), (2.0, 4.0), (4.0, 2.0), (5.0, 3.0))
    assert time_to_reach(points, target) == expected
    mirrored = [{**point, "metric": -point["metric"]} for point in points]
    assert time_to_reach(mirrored, -target, "higher") == expected


def test_nothing_is_interpolated_from_what_is_not_finite():
    points = curve((1.0, float("nan")), (2.0, 4.0), (3.0, 2.0))
    assert time_to_reach(points, 4.0) == 2.0
    assert time_to_reach(points, 3.0) == 2.5
    other = curve((1.0, 9.0), (2.0, 3.0), (3.0, 2.0))
    own = [{**p, "solver": "a", "seed": 0} for p in points] + [{**p, "solver": "b", "seed": 0} for p in other]
    record = {"points": own, "better": "lower", "reference": "a", "at": 3}
    assert steps_ahead(record) == {"b": [1, 2, 3]}
    assert steps_ahead({**record, "reference": "b"}) == {"a": [3]}
    assert most_behind(record) == {"b": 0.0}
    assert most_behind({**record, "reference": "b"}) == {"a": math.inf}


def test_speedups_stop_where_numbers_of_steps_are_missing():
    slow = curve((1.0, 8.0), (2.0, 4.0), (3.0, 3.0), (4.0, 2.0), solver="anderson", seed=0)
    quick = curve((0.5, 4.0), (1.0, 2.0), (1.5, 1.5), (2.0, 1.0), solver="hyper", seed=0)
    record = {"points": [*slow, *quick], "better": "lower", "reference": "anderson", "at": 4, "missing": []}
    assert speedups(record)["hyper"]["mean"] == pytest.approx(3.99 / 0.9975)
    gap = {**record, "points": [p for p in record["points"] if p["steps"] != 3], "missing": [3]}
    said = speedups(gap)["hyper"]
    assert (said["values"], said["mean"]) == ([None], None)  # when the reference has it is not known
    assert said["over_budget"] == pytest.approx(4.0 / 0.9975)


@pytest.mark.parametrize("sign", [1, -1])
def test_speedups_at_an_equal_metric(sign):
    slow = curve((1.0, 8.0), (2.0, 4.0), (3.0, 2.0), solver="anderson", seed=0)
    quick = [curve((0.5, 4.0), (1.0, 2.0), (1.5, 1.0), solver="hyper", seed=s) for s in (0, 1)]
    never = curve((1.0, 8.0), (2.0, 4.0), (3.0, 3.0), solver="picard", seed=0)
    points = [{**p, "metric": sign * p["metric"]} for p in (*slow, *quick[0], *quick[1], *never)]
    other = {"solver": "explicit", "seed": 0, "steps": None, "ms": 1.0, "metric": sign * 1.0}
    better = "lower" if sign > 0 else "higher"
    record = {"points": [*points, other], "better": better, "reference": "anderson", "at": 3}
    assert set(curves(record)) == {"anderson", "hyper", "picard"}
    said = speedups(record)
    # The reference's metric is 2; within half a percent, 2.01, it has it at 2.995 ms, the quick one at 0.9975 ms.
    assert said["hyper"]["target"] == pytest.approx(sign * 2.01)
    assert said["hyper"]["values"] == pytest.approx([2.995 / 0.9975] * 2)
    assert said["hyper"]["mean"] == pytest.approx(3.0, rel=0.01)
    assert said["hyper"]["over_budget"] == pytest.approx(3.0, rel=0.01)
    assert said["anderson"]["mean"] == pytest.approx(1.0)
    assert said["picard"]["values"] == [None]
    assert said["picard"]["mean"] is None
    assert "alone" not in said["hyper"]
    apart = [{**p, "ms_alone": p["ms"] + 1.0} for p in record["points"]]  # the host adds a millisecond to all of them
    assert speedups({**record, "points": apart})["hyper"]["alone"] == pytest.approx(3.995 / 1.9975)
    assert steps_ahead(record) == {"hyper": [1, 2, 3], "picard": [1, 2]}
    assert most_behind(record) == {"hyper": 0.0, "picard": 0.5}  # 3 instead of 2 after the last step
    assert ahead_in_time(record) == {"hyper": [1, 2, 3], "picard": [1, 2]}


@pytest.mark.parametrize(
    ("first", "fast", "slow", "bound"),
    [
        (3, (4.0, 3.0, 1.0), (9.0, 4.0, 2.0), None),
        (3, (2.0, 1.5, 1.0), (9.0, 4.0, 2.0), "at least"),
        (3, (4.0, 3.0, 1.0), (2.005, 2.0, 2.0), "at most"),
        (3, (2.0, 1.5, 1.0), (2.005, 2.0, 2.0), "unknown"),
        (1, (2.0, 1.5, 1.0), (2.005, 2.0, 2.0), None),  # there is nothing before the first step
    ],
)
def test_a_metric_that_is_there_at_once_bounds_the_speed_up(first, fast, slow, bound):
    def points(name, metrics, seed=0):
        return [
            {"solver": name, "seed": seed, "steps": first + k, "ms": float(k + 1), "metric": metric}
            for k, metric in enumerate(metrics)
        ]

    own = [*points("anderson", slow), *points("hyper", fast), *points("hyper", (9.0, 4.0, 1.0), seed=1)]
    record = {"points": own, "better": "lower", "reference": "anderson", "at": first + 2}
    found = speedups(record)
    assert (found["hyper"]["bound"], found["anderson"]["bound"]) == (bound, None)
    assert found["hyper"]["mean"] is not None


def test_times_that_are_not_of_the_solvers_alone_are_told():
    def points(*times, name="anderson", low=0.9, high=1.1):
        return [
            {"solver": name, "seed": 0, "steps": k, "ms": ms, "metric": 1.0, "ms_low": low * ms, "ms_high": high * ms}
            for k, ms in enumerate(times, start=1)
        ]

    steady = points(1.0, 2.0, 1.98, 4.0)
    assert noise({"points": steady}) is None
    assert noise({"points": [{**point, "ms_low": 0.0} for point in steady]}) is None
    falling = [*steady, *points(1.0, 3.0, 2.5, 2.4, name="hyper")]
    assert noise({"points": falling}) == (
        "times fall by 20 % with more steps (hyper, after 2 and 4 steps): other work probably ran on this machine"
    )
    beside = {**points(1.0, low=0.5, high=1.0)[0], "solver": "16 layers", "steps": None}
    assert noise({"points": [*falling, beside]}).startswith(
        "times vary by 100 % from call to call (16 layers) and fall by 20 % with more steps"
    )


def test_what_the_reference_has_in_the_same_time():
    slow = curve((2.0, 8.0), (4.0, 4.0), (6.0, math.nan), (8.0, 3.0), solver="anderson", seed=0)
    quick = curve((1.0, 99.0), (3.0, 6.0), (3.5, 5.5), (5.0, 4.0), (9.0, 3.5), solver="hyper", seed=0)
    record = {"points": [*slow, *quick], "better": "lower", "reference": "anderson"}
    # Nothing at 1 ms; 6 at 3 ms and 5 at 3.5 ms, on the line; 4 at 5 ms, since what follows is no number; 3 in the end.
    assert ahead_in_time(record) == {"hyper": [1, 2, 4]}


def test_what_is_not_finite_is_ahead_nowhere():
    slow = curve((2.0, 8.0), (4.0, 4.0), solver="anderson", seed=0)
    nothing = curve((1.0, math.nan), (3.0, math.nan), solver="hyper", seed=0)
    record = {"points": [*slow, *nothing], "better": "lower", "reference": "anderson", "at": 2}
    assert ahead_in_time(record) == {"hyper": []}  # though before 2 ms Anderson has nothing, either
    unknown = {**record, "reference": "hyper"}
    assert speedups(unknown)["anderson"]["values"] == [None]
    assert math.isnan(speedups(unknown)["anderson"]["target"])


def test_times_of_seeds_count_by_their_mean_in_any_order():
    slow = curve((2.0, 8.0), (4.0, 4.0), (6.0, 2.0), solver="anderson", seed=0)
    seeds = [curve((1.0, 8.0), (2.0, 5.0)), curve((5.0, 6.0), (8.0, 1.0))]  # means (3, 7), (5, 3)
    for order in ((0, 1), (1, 0)):
        quick = [{**p, "solver": "hyper", "seed": seed} for seed, place in enumerate(order) for p in seeds[place]]
        record = {"points": [*slow, *quick], "better": "lower", "reference": "anderson"}
        assert ahead_in_time(record) == {"hyper": [2]}  # 6 after 3 ms, 3 after 5 ms
    assert mean_curve(seeds) == [{"steps": 1, "metric": 7.0, "ms": 3.0}, {"steps": 2, "metric": 3.0, "ms": 5.0}]


def test_a_reference_of_several_seeds_counts_by_its_mean():
    seeds = [
        curve((1.0, 8.0), (2.0, 4.0), solver="hyper", seed=0),
        curve((3.0, 6.0), (4.0, 2.0), solver="hyper", seed=1),
    ]
    other = curve((2.0, 7.0), (3.0, 3.0), solver="anderson", seed=0)
    record = {"points": [*seeds[0], *seeds[1], *other], "better": "lower", "reference": "hyper", "at": 2}
    assert speedups(record)["anderson"]["values"] == pytest.approx([1.0])  # the same curve as that mean
    assert steps_ahead(record) == {"anderson": [1, 2]}
    assert ahead_in_time(record) == {"anderson": [1, 2]}


# The figure


def test_the_figure(tmp_path):
    slow = curve((1.0, 80.0), (2.0, 4.0), (3.0, 2.0), solver="anderson", seed=0, residual=0.1)
    quick = [curve((0.5, 4.0), (1.0, 2.0), (1.5, 1.0), solver="hyper", seed=s, residual=0.1) for s in (0, 1)]
    other = {"solver": "16 layers", "seed": 0, "steps": None, "ms": 2.5, "metric": 2.0, "residual": None}
    record = {"metric": "perplexity", "better": "lower", "reference": "anderson", "at": 3}
    record["points"] = [*slow, *quick[0], *quick[1], other]
    record["speedup"] = speedups(record)
    run = tmp_path / "run"
    run.mkdir()
    (run / "pareto.json").write_text(json.dumps(record))
    assert "pareto" in FIGURES
    chart = make_chart("pareto", [run])
    assert chart.columns == ("run", "solver", "seed", "steps", "metric", "ms", "residual")
    assert len(chart.rows) == 10
    assert chart.rows[0] == ("run", "anderson", 0, 1, 80.0, 1.0, 0.1)
    assert named_in(chart) == ["anderson", "learned", "16 layers"]
    axes, below = chart.figure.axes
    assert axes.get_yscale() == below.get_yscale() == "log"
    said = "speed at equal perplexity, anderson = 1:\nlearned 3.00× (over its 3 steps 3.01×)"
    assert said in axes.get_title(loc="left")
    means = [line for line in axes.lines if list(line.get_ydata()) == [4.0, 2.0, 1.0]]
    assert len(means) == 3  # two seeds and their mean
    lacking = [list(line.get_ydata()) for line in below.lines]
    assert pytest.approx([7900.0, 300.0, 100.0]) in lacking
    assert lacking.count(pytest.approx([300.0, 100.0, 0.01])) == 3  # the best itself at the lower end
    assert [0.5, 0.5] in lacking  # what counts as equal
    assert "0.5 % worse: counts as equal" in [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert below.get_ylabel() == "% worse than the best,\n0.01 or less at the bottom"
    assert [file.name for file in draw("pareto", [run], tmp_path)] == ["pareto.png", "pareto.svg", "pareto.csv"]


def named_in(chart):
    """Solvers in the legend."""
    return [text.get_text() for text in chart.figure.legends[0].get_texts()][:3]


def charted(folder, points, **extra):
    record = {"metric": "perplexity", "better": "lower", "reference": "anderson", "at": 3, "points": points, **extra}
    folder.mkdir(exist_ok=True)
    (folder / "pareto.json").write_text(json.dumps({**record, "speedup": speedups(record)}))
    return make_chart("pareto", [folder])


def test_all_of_a_title_fits_into_the_figure(tmp_path):
    points = curve((1.0, 80.0), (2.0, 4.0), (3.0, 2.0), solver="anderson", seed=0)
    for name in ("hyper:first/hyper/solver.safetensors", "hyper:b/hyper/solver.safetensors", "picard", "broyden"):
        points += curve((0.5, 4.0), (1.0, 2.0), (1.5, 1.0), solver=name, seed=0)
    figure = charted(tmp_path / "report", points, run="runs/tiny").figure
    figure.draw_without_rendering()
    title = figure.axes[0]._left_title
    assert title.get_text().splitlines()[0] == "tiny"  # not the folder of the report
    assert {"picard 3.00× (over its 3 steps 3.01×)", "broyden 3.00× (over its 3 steps 3.01×)"} < {
        *title.get_text().splitlines()
    }
    assert title.get_window_extent().x1 <= figure.bbox.x1
    assert figure.axes[0].get_window_extent().height > 1.9 * figure.dpi


def test_a_speed_up_that_is_bounded_has_it_in_the_title(tmp_path):
    slow = curve((1.0, 80.0), (2.0, 4.0), (3.0, 2.0), solver="anderson", seed=0)
    quick = curve((0.5, 1.0), (1.0, 1.0), (1.5, 1.0), solver="hyper", seed=0)
    later = [{**point, "steps": point["steps"] + 3} for point in (*slow, *quick)]
    title = charted(tmp_path / "late", later, at=6).figure.axes[0].get_title(loc="left")
    assert "learned at least 5.99× (over its 6 steps at least\n6.00×)" in title
    both = [{**point, "metric": 2.0} for point in later]
    title = charted(tmp_path / "both", both, at=6).figure.axes[0].get_title(loc="left")
    assert "learned not known (over its 6 steps at least 6.00×)" in title


def test_learned_solvers_of_reports_are_called_by_their_recipe(tmp_path):
    points = curve((1.0, 4.0), (2.0, 2.0), (3.0, 2.0), solver="anderson", seed=0)
    points += curve((0.5, 4.0), (1.0, 2.0), (1.5, 1.0), solver="hyper", seed=0)
    chart = charted(tmp_path / "one", points, recipe="quick")
    assert named_in(chart)[:2] == ["anderson", "learned (quick)"]
    assert "learned (quick) 2.00×" in chart.figure.axes[0].get_title(loc="left")
    charted(tmp_path / "other", points, recipe="full")
    both = make_chart("pareto", [tmp_path / "one", tmp_path / "other"])
    assert named_in(both)[:2] == ["anderson", "learned"]
    titles = [axes.get_title(loc="left") for axes in both.figure.axes[::2]]
    assert ["learned (quick)" in titles[0], "learned (full)" in titles[1]] == [True, True]


def test_metrics_too_large_for_axes_are_not_drawn(tmp_path):
    """And matplotlib does not warn of an overflow."""
    few = curve((1.0, 1e304), (2.0, 4.0), (3.0, 2.0), solver="anderson", seed=0)
    chart = charted(tmp_path / "few", few)
    assert chart.figure.axes[0].get_xlabel() == "1 value not drawn: not finite"
    assert list(chart.figure.axes[0].lines[0].get_ydata()) == pytest.approx([math.nan, 4.0, 2.0], nan_ok=True)
    assert chart.rows[0][4] == 1e304
    none = [{**point, "metric": metric} for point, metric in zip(few, (1e304, -1e31, 1e305), strict=True)]
    assert charted(tmp_path / "none", none).figure.axes[0].get_xlabel() == "3 values not drawn: not finite"
    for name in ("few", "none"):
        assert len(draw("pareto", [tmp_path / name], tmp_path)) == 3


def test_the_figure_without_its_file(tmp_path):
    with pytest.raises(LogError, match="--pareto` writes it"):
        make_chart("pareto", [tmp_path])
    (tmp_path / "pareto.json").write_text("{}")
    with pytest.raises(LogError, match="has no points"):
        make_chart("pareto", [tmp_path])
