"""What is made of the logs of training with and without a learned solver."""

import pytest

from benchmarks.training.alternating_gpu import saved, summary


def log(per_step, fit=0.0, evaluation=5.0, learned=True):
    """Lines of 2,000 steps: equal work to 1,200, a fit, evaluations at 1,500 and 2,000."""
    lines, seconds = [{"step": 0, "seconds": 0.5, "data": {}}], 10.0
    for step in range(100, 2100, 100):
        seconds += 100 * (0.01 if step <= 1200 else per_step)
        if step == 1300 and learned:
            seconds += fit
            lines.append({"step": 1250, "seconds": seconds - 1.0, "hyper": {"seconds": fit}})
        forward = {"steps_p50": 8.0, "residual_p50": 0.05, "residual_p95": 0.1}
        train = {"seconds_per_step": per_step, "forward": forward, "learned_solver": learned}
        lines.append({"step": step, "seconds": seconds, "train": train})
        if step in (1500, 2000):
            seconds += evaluation
            valid = {"perplexity": 80.0 + evaluation, "solve_residual_p95": 0.01}
            lines.append({"step": step, "seconds": seconds, "valid": valid, "valid_at": {"10": valid}})
    return lines


def test_time_of_training_has_fits_in_it_and_no_evaluations():
    row = summary(log(0.008, fit=2.0))
    assert row["equal work"] == pytest.approx(11.0)
    assert row["training"] == pytest.approx(11.0 + 800 * 0.008 + 2.0)
    assert row["with evaluations"] == pytest.approx(row["training"] + 10.0)
    assert row["ms per step"] == pytest.approx(8.0)
    assert (row["first fit"], row["learned to the end"]) == (2.0, True)
    assert row["fewer steps"] == {"10": row["perplexity"]}


def test_a_run_without_a_learned_solver_has_no_fit():
    row = summary(log(0.01, learned=False))
    assert (row["first fit"], row["learned to the end"]) == (None, False)


def test_what_is_saved_is_of_seeds_that_ran_both_ways():
    rows = {
        "on_0": summary(log(0.008)),
        "off_0": summary(log(0.01, learned=False)),
        "on_1": summary(log(0.006)),
        "off_1": summary(log(0.01, learned=False)),
        "on_2": summary(log(0.001)),
    }
    found = saved(rows)
    parts = [1.6 / 19, 3.2 / 19]
    assert list(found["training"]["seeds"].values()) == pytest.approx(parts)
    assert found["training"]["mean"] == pytest.approx(sum(parts) / 2)
    assert found["equal work"]["mean"] == pytest.approx(0.0)
    assert saved({"on_0": rows["on_0"]}) == {}
