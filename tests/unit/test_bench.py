"""The benchmark harness: what it refuses, what it writes, that every case runs."""

import json
import math

import pytest
import torch

from equipoise.bench import CASES, FILE, SHAPES_OF, details, remarks, run_case, table
from equipoise.bench.harness import TINY, Check, Goal, Row, Sample, compared, compared_each, in_turns
from equipoise.bench.report import measure

CPU = torch.device("cpu")
RIVALS = ("torchdeq", "optimistix", "torchdiffeq")  # whose results may miss a tolerance: that is what is looked at


def timing(seconds):
    return Sample(seconds, seconds, seconds, 3)


def row_of(base="bare f", **seconds):
    return Row("shape", "step", base, {name.replace("_", " "): timing(value) for name, value in seconds.items()})


def test_a_wrong_candidate_gets_no_ratio():
    row = row_of(bare_f=2.0, fast=1.0, right=3.0)
    row.check("fast", Check(1e-9, 1e-3, "one thing"), Check(0.5, 1e-3, "the truth"))
    row.check("right", Check(1e-4, 1e-3, "the truth"))
    assert row.ratio("fast") is None
    assert row.ratio("right") == 1.5
    assert row.record()["ratios"] == {"bare f": 1.0, "fast": None, "right": 1.5}
    assert "wrong" in table([row])[1][2]
    assert remarks([row]) == ["shape: fast is wrong: 5.0e-01 > 0.001 against the truth"]


def test_a_speed_up_needs_both_sides_to_be_right():
    row = row_of("a", a=1.0, ours=2.0, rival=20.0)
    row.goals = [Goal("ours", "rival", 9, faster=True), Goal("ours", "missing", 2, faster=True)]
    goals = row.record()["goals"]
    assert (goals[0]["ratio"], goals[0]["met"]) == (10.0, True)
    assert (goals[1]["ratio"], goals[1]["met"]) == (None, None)
    assert remarks([row])[0] == "shape: ours is 10.00 times as fast as rival, goal ≥ 9: met"
    row.check("rival", Check(1.0, 0.1, "the truth"))
    assert row.outcome(row.goals[0]) is None
    assert "no ratio" in remarks([row])[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_wrong(value):
    for compare in (compared, compared_each):
        assert not compare([torch.tensor([value])], [torch.tensor([1.0])], 1.0, "the truth").ok


def test_a_small_tensor_that_is_wrong_is_seen_among_large_ones():
    truth = [torch.full((1000,), 1.0), torch.full((2,), 1e-3)]
    found = [truth[0], 2 * truth[1]]
    assert compared(found, truth, 1e-3, "the truth").ok
    each = compared_each(found, truth, 1e-3, "the truth")
    assert not each.ok
    assert each.error == pytest.approx(1.0)


def test_goals_stand_beside_ratios():
    row = row_of("a", a=1.0, b=1.2, c=1.4)
    row.goals = [Goal("b", "a", 1.3), Goal("c", "a", 1.3), Goal("c", "b", 1.1)]
    assert table([row])[1] == ["shape", "1 s", "1.20 (≤ 1.3)", "1.40 (> 1.3)"]
    assert remarks([row]) == ["shape: c is 1.167 of b, goal ≤ 1.1: missed"]


def test_units_and_details():
    assert [measure(x, "seconds") for x in (2.5, 2.5e-3, 2.5e-6, 2.5e-9)] == ["2.5 s", "2.5 ms", "2.5 µs", "0.0025 µs"]
    assert [measure(x, "bytes") for x in (3 * 2**30, 3 * 2**20, 3072, 3)] == ["3 GiB", "3 MiB", "3 KiB", "3 B"]
    row = row_of("a", a=1.0, b=1.2)
    row.details = {"b": {"residual": 0.00123, "evaluations": 20}}
    row.skipped = {"c": "not installed"}
    assert details([row]) == [
        ["shape", "candidate", "measured", "residual", "evaluations"],
        ["shape", "b", "1.2 s", "0.0012", "20"],
    ]
    assert remarks([row]) == ["shape: c skipped: not installed"]


def test_candidates_are_timed_in_turns():
    order = []
    works = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = in_turns(works, CPU, rounds=3, units=2)
    assert order == list("ababab")
    assert times["a"].rounds == 3
    assert 0 <= times["a"].low <= times["a"].median <= times["a"].high


def test_rounds_end_when_they_take_long():
    order = []
    times = in_turns({"a": lambda: order.append("a")}, CPU, rounds=50, most_seconds=0.0)
    assert len(order) == times["a"].rounds == 3


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_case_runs_and_finds_its_own_candidates_right(case, tmp_path):
    rows = run_case(case, tmp_path, shapes=[TINY], device="cpu", rounds=1)
    assert rows[0].checks
    for row in rows:
        for candidate in (name for name in row.values if not name.endswith(RIVALS)):
            assert row.wrong(candidate) is None, (row.name, candidate, row.checks[candidate])
    written = json.loads((tmp_path / FILE).read_text())
    assert written[case] == json.loads(json.dumps([row.record() for row in rows]))
    assert written["environment"]["threads"] == torch.get_num_threads()


def test_a_wrong_name_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="tiny"):
        run_case("solver", tmp_path, shapes=["tinny"])
    with pytest.raises(ValueError, match=r"unknown shape of 'memory' 'wide'.*Known: ptb, tiny, wt103"):
        run_case("memory", tmp_path, shapes=["wide"])
    with pytest.raises(ValueError, match="solver"):
        run_case("solvers", tmp_path, shapes=["tiny"])
    assert not (tmp_path / FILE).exists()
    assert all(shapes[-1] == TINY for shapes in SHAPES_OF.values())
