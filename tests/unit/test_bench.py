"""The benchmark harness: what it refuses, what it writes, that every case runs."""

import json
import math

import pytest
import torch

from equipoise.bench import CASES, FILE, run_case, table
from equipoise.bench.harness import Check, Row, Timing, compared, in_turns

CPU = torch.device("cpu")


def timing(seconds):
    return Timing(seconds, seconds, seconds, 3)


def test_a_wrong_candidate_gets_no_ratio():
    row = Row("shape", "step", "bare f", {"bare f": timing(2.0), "fast": timing(1.0), "right": timing(3.0)})
    row.checks = {"fast": Check(0.5, 1e-3, "the truth"), "right": Check(1e-4, 1e-3, "the truth")}
    assert row.ratio("fast") is None
    assert row.ratio("right") == 1.5
    assert row.record()["ratios"] == {"bare f": 1.0, "fast": None, "right": 1.5}
    assert "wrong" in table([row])[1][2]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_wrong(value):
    assert not compared([torch.tensor([value])], [torch.tensor([1.0])], 1.0, "the truth").ok


def test_goals_stand_beside_ratios():
    row = Row("shape", "step", "a", {"a": timing(1.0), "b": timing(1.2), "c": timing(1.4)}, goals={"b": 1.3, "c": 1.3})
    assert table([row])[1][2:] == ["1.20 (≤ 1.3)", "1.40 (> 1.3)"]


def test_candidates_are_timed_in_turns():
    order = []
    works = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = in_turns(works, CPU, rounds=3, units=2)
    assert order == list("ababab")
    assert times["a"].rounds == 3
    assert 0 <= times["a"].low <= times["a"].median <= times["a"].high


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_case_runs_and_finds_the_engines_equal(case, tmp_path):
    rows = run_case(case, tmp_path, shapes=["tiny"], device="cpu", rounds=2)
    assert rows[0].checks
    assert all(check.ok for check in rows[0].checks.values())
    assert not rows[0].notes  # nothing was left to the eager engine
    written = json.loads((tmp_path / FILE).read_text())
    assert written[case][0]["ratios"] == rows[0].record()["ratios"]
    assert written["environment"]["threads"] == torch.get_num_threads()


def test_a_wrong_name_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="tiny"):
        run_case("solver", tmp_path, shapes=["tinny"])
    with pytest.raises(ValueError, match="solver"):
        run_case("solvers", tmp_path, shapes=["tiny"])
    assert not (tmp_path / FILE).exists()
