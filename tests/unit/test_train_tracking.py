"""Metrics as JSON lines, environment, tensorboard mirror, statistics of solves."""

import json
import math
import resource
import subprocess
import sys
import types
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn

from equipoise import DEQ, Picard, Stats, Status, Stop
from equipoise.train import (
    MetricsWriter,
    Pace,
    StatsWindow,
    TensorboardMirror,
    Warmup,
    environment,
    read_metrics,
    summarise_stats,
    tracking,
)
from equipoise.train.tracking import headline


def lines(path):
    """What a strict reader sees."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_records_are_lines(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"loss": torch.tensor(0.5), "solve": {"nfe": 3}, "phase": "warmup", "ok": True, "none": None})
        assert lines(path) == [
            {"step": 1, "loss": 0.5, "solve": {"nfe": 3}, "phase": "warmup", "ok": True, "none": None}
        ]  # on the disk at once
        writer.write(2, {"sizes": (1, 2), "array": numpy.arange(2), "scalar": numpy.float32(0.25), "path": tmp_path})
    assert lines(path)[1] == {"step": 2, "sizes": [1, 2], "array": [0, 1], "scalar": 0.25, "path": str(tmp_path)}


def test_every_line_is_valid_json_whatever_the_numbers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"loss": math.nan, "deep": {"x": [math.inf, -math.inf]}, "t": torch.tensor(math.nan)})
    assert lines(path) == [{"step": 1, "loss": "nan", "deep": {"x": ["inf", "-inf"]}, "t": "nan"}]
    record = read_metrics(path)[0]
    assert math.isnan(record["loss"])
    assert record["deep"] == {"x": [math.inf, -math.inf]}


def test_bad_records_are_refused_and_leave_no_trace(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        with pytest.raises(TypeError, match=r"metric 'a\.b' is a object"):
            writer.write(1, {"a": {"b": object()}})
        with pytest.raises(ValueError, match="a record of step 1 has a field 'step' of its own: 2"):
            writer.write(1, {"step": 2})
    assert path.read_text() == ""


def test_a_resumed_run_continues_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (10, 20, 30, 40):
            writer.write(step, {"loss": step})
    with open(path, "ab") as file:
        file.write(b'{"step": 50, "lo')  # a crash in the middle of a line
    assert [record["step"] for record in read_metrics(path)] == [10, 20, 30, 40]
    with MetricsWriter(path, resume_step=20) as writer:
        writer.write(30, {"loss": -1})
    assert lines(path) == [{"step": 10, "loss": 10}, {"step": 20, "loss": 20}, {"step": 30, "loss": -1}]


def test_a_line_cut_short_is_removed_even_if_it_is_early_enough(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\n{"step": 2}')  # whole but for its line end: it may be half a number
    with MetricsWriter(path, resume_step=9) as writer:
        writer.write(3, {})
    assert lines(path) == [{"step": 1}, {"step": 3}]


def test_resume_without_a_file_starts_one(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl", resume_step=5) as writer:
        writer.write(6, {})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 6}]


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {})
    with pytest.raises(FileExistsError, match="holds the metrics of another run; resume it"):
        MetricsWriter(path)
    assert lines(path) == [{"step": 1}]


def test_a_crash_while_truncating_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {})
        writer.write(2, {})
    from equipoise.train import tracking

    def crash(*names):
        raise OSError("crash")

    monkeypatch.setattr(tracking.os, "replace", crash)
    with pytest.raises(OSError, match="crash"):
        MetricsWriter(path, resume_step=1)
    assert lines(path) == [{"step": 1}, {"step": 2}]


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_trace(tmp_path):
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(path) as writer:
        writer.write(1, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                writer.write(2, {"text": "x" * 200})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.write(3, {})
    assert lines(path) == [{"step": 1}, {"step": 3}]


class FakeWriter:
    """Stands in for tensorboard's writer, which the tests do not need installed."""

    made: ClassVar[list] = []

    def __init__(self, folder, purge_step=None):
        self.folder, self.purge_step, self.points, self.closed = folder, purge_step, [], False
        FakeWriter.made.append(self)

    def add_scalar(self, name, value, step):
        self.points.append((name, value, step))

    def close(self):
        self.closed = True


def test_tensorboard_mirror(tmp_path, monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(FakeWriter, "made", [])
    with MetricsWriter(tmp_path / "m.jsonl", mirrors=[TensorboardMirror(tmp_path / "tb", resume_step=4)]) as writer:
        writer.write(5, {"loss": 0.5, "forward": {"nfe": 3}, "phase": "x", "ok": True, "bad": math.inf})
    fake = FakeWriter.made[0]
    assert (fake.folder, fake.purge_step, fake.closed) == (str(tmp_path / "tb"), 5, True)
    assert fake.points == [("loss", 0.5, 5), ("forward/nfe", 3.0, 5), ("bad", math.inf, 5)]


def test_missing_tensorboard_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorboardMirror(tmp_path)


def make_stats(status, residual, steps, nfe=5):
    return Stats(torch.tensor(status), torch.tensor(residual, dtype=torch.float64), torch.tensor(steps), nfe=nfe)


def test_summary_of_one_solve():
    stats = make_stats([0, 5, 1, 4], [1e-6, 1e-7, 1e-2, math.nan], [3, 4, 20, 6])
    assert summarise_stats(stats) == {
        "solves": 1,
        "systems": 4,
        "nfe": 5.0,
        "steps_p50": 6.0,
        "steps_p95": 20.0,
        "residual_p50": 1e-2,  # of 1e-7, 1e-6, 1e-2 and "not a number", which counts as infinite
        "residual_p95": math.inf,
        "failures": 2,
        "failed": {"max_steps": 1, "nonfinite": 1},
    }


def test_window_over_several_solves_against_numpy():
    generator = torch.Generator().manual_seed(0)
    window, steps, residuals = StatsWindow(), [], []
    for nfe in (10, 20, 33):
        residual = torch.rand(41, generator=generator, dtype=torch.float64)
        count = torch.randint(1, 30, (41,), generator=generator)
        window.add(Stats(torch.zeros(41, dtype=torch.int64), residual, count, nfe=nfe))
        steps.append(count)
        residuals.append(residual)
    window.add(None)
    summary = window.summary()
    assert (summary["solves"], summary["systems"], summary["nfe"], summary["failures"]) == (3, 123, 21.0, 0)
    for name, values in (("steps", steps), ("residual", residuals)):
        for q in (50, 95):
            expected = numpy.quantile(torch.cat(values).numpy(), q / 100, method="nearest")
            assert summary[f"{name}_p{q}"] == expected
    assert window.summary() == {}  # starts anew


def test_using_up_a_fixed_budget_is_no_failure():
    class Cell(nn.Module):
        def forward(self, z, x):
            return 0.5 * z + x

    plan = Warmup(steps=1, layers=3).plan
    solution = DEQ(Cell(), solver=plan.solver, adjoint=plan.adjoint, stop=plan.stop)(torch.randn(4, 2))
    assert (solution.stats.status == Status.MAX_STEPS).all()
    assert summarise_stats(solution.stats)["failures"] == 4
    assert summarise_stats(solution.stats, plan.stop)["failures"] == 0
    hard = DEQ(Cell(), solver=Picard(), stop=Stop(max_steps=3))(torch.randn(4, 2))
    assert summarise_stats(hard.stats, Stop(max_steps=3))["failed"] == {"max_steps": 4}
    broken = make_stats([4], [math.inf], [3])
    assert summarise_stats(broken, plan.stop)["failures"] == 1


def test_summary_of_no_systems_and_of_half_precision():
    empty = Stats(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0, dtype=torch.int64), nfe=1)
    assert summarise_stats(empty) == {"solves": 1, "systems": 0, "nfe": 1.0, "failures": 0}
    half = Stats(torch.tensor([0]), torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor([300]))
    assert summarise_stats(half)["steps_p50"] == 300.0


def test_summaries_go_into_a_record(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(1, {"forward": summarise_stats(make_stats([4], [math.nan], [2]))})
    assert lines(tmp_path / "m.jsonl")[0]["forward"]["residual_p50"] == "inf"


def test_environment_says_what_numbers_depend_on():
    record = environment()
    json.dumps(record, allow_nan=False)
    assert record["packages"]["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(record["devices"]) >= 1
    if record.get("commit"):
        assert len(record["commit"]) == 40
        assert isinstance(record["modified"], bool)


def test_environment_without_git(monkeypatch):
    def missing(*arguments, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment().get("commit") is None


def test_a_progress_bar_shows_what_matters():
    forward = {"nfe": 7.4, "residual_p95": 0.00123}
    record = {"loss": 1.23456, "tokens_per_second": 12345.6, "lr": 1e-3, "forward": forward}
    shown = {"loss": "1.235", "tokens/s": "12,346", "nfe": "7", "residual": "1e-03"}
    assert headline(record) == shown
    assert headline({"loss": 1.0, "samples_per_second": 2.0, "forward": {}}) == {"loss": "1", "samples/s": "2"}


def test_a_pace_leaves_out_what_is_not_training(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: now[0])
    pace = Pace()
    for _ in range(4):
        now[0] += 2.0
        pace.steps += 1
        pace.add_items(10, "tokens")
    others = [(40, "tokens"), (0, "")]  # a second process, and one without rows
    assert pace.rates(lambda own: [own, *others]) == {"seconds_per_step": 2.0, "tokens_per_second": 10.0}
    now[0] += 100.0
    pace.restart()
    now[0] += 1.0
    pace.steps += 1
    assert pace.rates(lambda own: [own]) == {"seconds_per_step": 1.0}


def test_a_window_gathers_what_other_processes_have_seen():
    mine, theirs = StatsWindow(), StatsWindow()
    mine.add(make_stats([0, 1], [1e-3, 1e-1], [3, 9], nfe=9))
    theirs.add(make_stats([0], [1e-2], [5], nfe=5))
    other = []
    assert theirs.summary(lambda value: other.append(value) or [value])["systems"] == 1
    summary = mine.summary(lambda value: [value, *other])
    assert (summary["solves"], summary["systems"], summary["nfe"], summary["failures"]) == (2, 3, 7.0, 1)
    assert (summary["residual_p50"], summary["steps_p95"]) == (1e-2, 9.0)
    # A process that solved nothing still hears of the others.
    assert StatsWindow().summary(lambda value: [value, *other])["systems"] == 1
    assert StatsWindow().summary(lambda value: [value]) == {}
