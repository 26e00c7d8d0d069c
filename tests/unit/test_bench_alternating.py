"""What is made of the logs of training with and without a learned solver."""

import json
import sys

import pytest

from benchmarks.training import alternating_gpu
from benchmarks.training.alternating_gpu import main, saved, summary
from equipoise.train.loop import Outcome


def log(per_step, fit=0.0, evaluation=5.0, learned=True, every=100, evaluations=(1500, 2000)):
    """Lines of 2,000 steps: equal work to 1,200, a fit, evaluations at 1,500 and 2,000."""
    lines, seconds = [{"step": 0, "seconds": 0.5, "data": {}}], 10.0
    for step in range(100, 2100, 100):
        seconds += 100 * (0.01 if step <= 1200 else per_step)
        if step == 1300 and learned:
            seconds += fit
            lines.append({"step": 1250, "seconds": seconds - 1.0, "hyper": {"seconds": fit}})
        forward = {"steps_p50": 8.0, "residual_p50": 0.05, "residual_p95": 0.1}
        train = {"seconds_per_step": per_step, "forward": forward, "learned_solver": learned}
        if step % every == 0 or step == 2000:
            lines.append({"step": step, "seconds": seconds, "train": train})
        if step in evaluations:
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


def test_a_fit_that_came_to_nothing_is_not_the_first():
    lines = log(0.008, fit=2.0)
    nothing = {"step": 1250, "seconds": 30.0, "hyper": {"steps": 0, "not_fitted": "no equilibrium"}}
    assert summary([nothing, *lines])["first fit"] == 2.0
    assert summary([nothing, *log(0.01, learned=False)])["first fit"] is None


def test_evaluations_between_lines_of_the_log():
    """Lines at 300, 600, ... 1,800, and at the end; the evaluation at 1,500 comes with one, that at 1,600 does not."""
    row = summary(log(0.008, fit=2.0, every=300, evaluations=(100, 1500, 1600, 2000)))
    assert row["equal work"] == pytest.approx(9.0)  # from 300 to 1,200
    assert row["with evaluations"] == pytest.approx(9.0 + 800 * 0.008 + 2.0 + 15.0)  # that at 100 is before all this
    # With the second evaluation go the 100 steps since the line at 1,500, and the evaluation after that line.
    assert row["training"] == pytest.approx(9.0 + 800 * 0.008 + 2.0 - 0.8 - 5.0)


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


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The command, on runs that take no time; the names of those that were made."""
    made = []

    def trained(recipe, out, data_dir=None):
        learned = recipe.alternate.start is not None
        made.append(f"{'on' if learned else 'off'}_{recipe.train.seed}_{recipe.train.steps}")
        out.mkdir()
        lines = log(0.008 if learned else 0.01, learned=learned)
        (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return Outcome(recipe.train.steps, {}, None)

    def called(*arguments):
        made.clear()
        monkeypatch.setattr(sys, "argv", ["alternating_gpu", "--out", str(tmp_path), *arguments])
        main()
        return made

    monkeypatch.setattr(alternating_gpu, "train", trained)
    return called, made


ALL = ["on_0_160", "on_0_12400", "off_0_12400"]  # the first one compiles


def test_logs_of_the_same_settings_and_device_are_used_again(bench, tmp_path):
    called, _ = bench
    assert called("--seeds", "1") == ALL
    first = json.loads((tmp_path / "alternating.json").read_text(encoding="utf-8"))
    assert called("--seeds", "1") == []
    assert called("--seeds", "1", "--set", "train.steps=12400") == []  # the recipe says so too
    again = json.loads((tmp_path / "alternating.json").read_text(encoding="utf-8"))
    assert first["rows"] == again["rows"]
    (tmp_path / "off_0.jsonl").unlink()
    assert called("--seeds", "1") == [ALL[0], ALL[2]]
    files = {f"{side}_0.{kind}" for side in ("on", "off") for kind in ("json", "jsonl")}
    assert {path.name for path in tmp_path.iterdir()} == {"alternating.json", *files}


def test_logs_that_were_made_otherwise_are_refused(bench, tmp_path):
    called, made = bench
    called("--seeds", "1")
    before = (tmp_path / "alternating.json").read_bytes()
    words = r"on_0\.jsonl was made otherwise: alternate\.max_steps was 8, now 7; train\.steps was 12400, now 9300\. "
    with pytest.raises(SystemExit, match=words):
        called("--seeds", "2", "--set", "train.steps=9300", "--set", "alternate.max_steps=7")
    record = json.loads((tmp_path / "off_0.json").read_text(encoding="utf-8"))
    (tmp_path / "off_0.json").write_text(json.dumps({**record, "device": "NVIDIA H100"}), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"off_0\.jsonl was made otherwise: device was 'NVIDIA H100', now '.+'\. Give"):
        called("--seeds", "1")
    (tmp_path / "off_0.json").unlink()
    with pytest.raises(SystemExit, match=r"off_0\.jsonl .*no off_0\.json beside it"):
        called("--seeds", "1")
    assert made == []
    assert (tmp_path / "alternating.json").read_bytes() == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("train.log_every=150", r"evaluate_every=3100 is no multiple of train\.log_every=150.*give 3150"),
        ("train.evaluate_every=30", r"evaluate_every=30 is no multiple of train\.log_every=100.*give 100"),
        ("train.steps=100", r"train\.steps=100.*first line .* that of step 100.*more"),
        ("train.stepz=1", r"unknown key .*stepz"),
    ],
)
def test_settings_of_which_nothing_could_be_said_are_refused_before_training(bench, given, words):
    called, made = bench
    with pytest.raises(SystemExit, match=words):
        called("--set", given)
    assert made == []


def test_each_seed_has_its_own_seed(bench):
    called, _ = bench
    assert called("--seeds", "2", "--set", "train.seed=7") == [*ALL, "off_1_12400", "on_1_12400"]
