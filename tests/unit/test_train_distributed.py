"""Several processes train as one, end as one, and leave checkpoints that any number of processes can go on from."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from equipoise.train.checkpoint import latest_checkpoint, load_checkpoint
from equipoise.train.loop import train
from tests import workers
from tests.processes import run_together, together
from tests.runs import COPY, evaluate_run, recipe, text_recipe
from tests.training import DROPOUT, OFTEN, PENALTY, PLAIN, TRELLIS, close, lines, same, saved, train_records, with_model


def cases(folder):
    """Recipes by name."""
    text = folder / "text"
    averages = ('train.averaging={kind="ema", decay=0.5}', "train.plateau={patience=1, gamma=0.5}")
    trellis = text_recipe(text, *PLAIN, *PENALTY, *OFTEN, "task.activation=1.0", "task.smoothness=1.0")
    return {
        # Eleven validation samples split unevenly; of one, nothing is left for the second process.
        "copy memory": recipe(COPY, *PLAIN, *DROPOUT, *PENALTY, *OFTEN, "task.test_size=11"),
        "one sample": recipe(COPY, *PLAIN, *OFTEN, "task.test_size=1"),
        "transformer": text_recipe(text, *PLAIN, *DROPOUT, *PENALTY, *OFTEN, "task.eval_batch_size=3", *averages),
        "trellisnet": with_model(trellis, **TRELLIS),
        "two by two": text_recipe(text, *PLAIN, *DROPOUT, *OFTEN, "train.accumulation=2"),
        "anderson, adam": text_recipe(text, *DROPOUT, *OFTEN),
    }


def images(*overrides):
    """A run of a model with BatchNorm in stem and head."""
    values = {
        "task": {"name": "classification", "data": "digits", "batch_size": 6, "eval_batch_size": 4},
        "model": {"name": "mdeq_digits", "channels": [8, 8], "head_channels": [2, 2], "final_channels": 8},
        "stop": {"rtol": 0.0, "max_steps": 3},
        "adjoint": {"name": "implicit", "stop": {"rtol": 0.0, "max_steps": 3}},
        "train": {
            "log_every": 1,
            "evaluate_every": 4,
            "save_every": 2,
            "threads": 1,
            "steps": 4,
            "learning_rate": "constant",
        },
    }
    return recipe(values, "task.options={size=8, train_size=24, test_size=10}", *overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two processes under `two`, of one under `one`."""
    root = tmp_path_factory.mktemp("runs")
    given = cases(root)
    short, long = (text_recipe(root / "text", *PLAIN, *DROPOUT, f"train.steps={steps}") for steps in (2, 4))
    train(short, root / "widened")
    jobs = [(values.to_data(), str(root / "two" / name), False) for name, values in given.items()]
    jobs += [(short.to_data(), str(root / "parts"), False), (long.to_data(), str(root / "parts"), True)]
    jobs += [(long.to_data(), str(root / "whole"), False), (short.to_data(), str(root / "narrowed"), False)]
    jobs += [(long.to_data(), str(root / "widened"), True)]
    jobs += [(images().to_data(), str(root / "images"), False)]
    jobs += [(images(*part).to_data(), str(root / "image parts"), not part) for part in (["train.steps=2"], [])]
    (root / "two").mkdir()
    run_together(workers.run_all, jobs)
    for name, values in given.items():
        train(values, root / "one" / name)
    train(long, root / "narrowed", resume=True)
    train(long, root / "alone")
    return root


@pytest.mark.parametrize("name", ["copy memory", "one sample", "transformer", "trellisnet", "two by two"])
def test_two_processes_train_as_one(runs, name):
    """Losses, gradients, weights, and the memory they carry; sums of float32 in another order, so to 1e-5."""
    one, two = runs / "one" / name, runs / "two" / name
    a, b = lines(one), lines(two)
    assert [record["step"] for record in b] == [record["step"] for record in a]
    assert b[0]["processes"] == 2
    for alone, shared in zip(a[1:], b[1:], strict=True):
        kind = "train" if "train" in alone else "valid"
        assert shared[kind].keys() == alone[kind].keys()
        for key in ("loss", "nats", "penalty", "grad_norm", "lr", "perplexity", "recall"):
            if key in alone[kind]:
                assert shared[kind][key] == pytest.approx(alone[kind][key], rel=1e-5), (alone["step"], key)
    assert close(saved(one)["model"], saved(two)["model"]) == []
    carries = [saved(out)["trainer"]["carry"] for out in (one, two)]
    if name in ("transformer", "two by two"):
        assert carries[0]["rows"] == carries[1]["rows"] == 4
        assert close(*(dict(enumerate(carry["value"])) for carry in carries)) == []


@pytest.mark.parametrize("name", ["copy memory", "transformer", "trellisnet"])
def test_statistics_are_those_of_all_processes(runs, name):
    one, two = train_records(runs / "one" / name), train_records(runs / "two" / name)
    for step, record in one.items():
        for kind in ("forward", "backward"):
            assert two[step][kind]["systems"] == record[kind]["systems"]
            assert two[step][kind]["solves"] == 2 * record[kind]["solves"]
            assert two[step][kind]["residual_p95"] == pytest.approx(record[kind]["residual_p95"], rel=1e-3)
    for a, b in zip(lines(runs / "one" / name), lines(runs / "two" / name), strict=True):
        if "valid" in a:
            assert b["valid"]["solve_systems"] == a["valid"]["solve_systems"]


def test_an_accelerated_solver_agrees_to_its_tolerance(runs):
    """Anderson and Adam magnify rounding: losses to 1e-3."""
    one, two = (train_records(runs / kind / "anderson, adam") for kind in ("one", "two"))
    for step, record in one.items():
        assert two[step]["loss"] == pytest.approx(record["loss"], rel=1e-3)


def test_a_resumed_run_of_two_processes_equals_an_uninterrupted_one(runs):
    assert same(saved(runs / "parts")["model"], saved(runs / "whole")["model"])
    assert same(saved(runs / "parts")["trainer"], saved(runs / "whole")["trainer"])
    assert lines(runs / "parts")[-2:] == lines(runs / "whole")[-2:]


@pytest.mark.parametrize("name", ["narrowed", "widened"])
def test_a_run_goes_on_with_another_number_of_processes(runs, name):
    """From two to one and from one to two, memory kept: as one process from the beginning, to 1e-5."""
    expected, found = saved(runs / "alone"), saved(runs / name)
    assert close(expected["model"], found["model"]) == []
    assert found["trainer"]["carry"]["rows"] == 4
    a, b = train_records(runs / "alone"), train_records(runs / name)
    assert b[4]["loss"] == pytest.approx(a[4]["loss"], rel=1e-5)


def test_running_statistics_are_averaged(tmp_path):
    """Those of BatchNorm, and nothing else that a model keeps."""
    run_together(workers.average_statistics, str(tmp_path))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for rank, state in enumerate(found):
        for place, name in enumerate(("0", "2")):
            assert torch.equal(
                state[f"{name}.running_mean"], torch.full_like(state[f"{name}.running_mean"], 10 * place + 1)
            )
            assert torch.equal(
                state[f"{name}.running_var"], torch.full_like(state[f"{name}.running_var"], 10 * place + 1.5)
            )
        assert state["constant"] == rank


def test_what_batch_norm_keeps_is_that_of_all_processes(runs):
    """Each saw rows of its own: evaluated, saved and gone on from is the mean of both, bit for bit."""
    whole, parts = saved(runs / "images"), saved(runs / "image parts")
    assert same(parts["model"], whole["model"])
    assert lines(runs / "image parts")[-1] == lines(runs / "images")[-1]
    valid = lines(runs / "images")[-1]["valid"]
    (again,) = evaluate_run(runs / "images", which="latest")
    assert {key: again[key] for key in ("loss", "accuracy")} == pytest.approx(
        {key: valid[key] for key in ("loss", "accuracy")}, rel=1e-5
    )


def test_a_signal_to_one_process_ends_all(tmp_path):
    """The second one is told; both save and end after the same step."""
    out = tmp_path / "run"
    given = recipe(COPY, *PLAIN, "train.steps=100000", "train.save_every=100000", "train.evaluate_every=100000")
    with together(workers.run_all, [(given.to_data(), str(out), False)]) as running:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or len(lines(out)) < 3:
            assert time.monotonic() < deadline
            assert all(process.is_alive() for process in running.processes)
            time.sleep(0.05)
        os.kill(running.processes[1].pid, signal.SIGTERM)
        codes, said = running.join(60)
    assert (codes, said) == ([0, 0], {})
    outcomes = [json.loads((tmp_path / f"run.{rank}.json").read_text()) for rank in (0, 1)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["interrupted"] == "SIGTERM"
    assert load_checkpoint(latest_checkpoint(out / "checkpoints")).trainer["step"] == outcomes[0]["step"] >= 4


def test_an_error_in_one_process_ends_all(tmp_path):
    given = recipe(COPY, *PLAIN, "train.save_every=2")
    with together(workers.fail_at, 3, given.to_data(), str(tmp_path / "run")) as running:
        codes, said = running.join(60)
    assert all(codes)
    assert "the second process breaks" in said["1"]
    assert "another process of this run has ended" in said["0"]
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step-000002"  # whole, though two were writing


@pytest.mark.slow
def test_torchrun_starts_the_command(tmp_path):
    """By the command line, without any setting for accelerate."""
    given = recipe(COPY, *PLAIN, *DROPOUT, "train.steps=2", "train.log_every=1")
    (tmp_path / "recipe.toml").write_text(_toml(given.to_data()))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "equipoise", "train"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "two")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    train(given, tmp_path / "one")
    one, two = train_records(tmp_path / "one"), train_records(tmp_path / "two")
    assert [record["loss"] for record in two.values()] == pytest.approx([r["loss"] for r in one.values()], rel=1e-5)


def _toml(values):
    """Plain settings as TOML: keys of one level as tables, the rest inline."""

    def inline(value):
        if isinstance(value, dict):
            pairs = (f"{key} = {inline(item)}" for key, item in value.items() if item is not None)
            return "{" + ", ".join(pairs) + "}"
        return json.dumps(value)

    return "\n".join(f"{key} = {inline(value)}" for key, value in values.items()) + "\n"
