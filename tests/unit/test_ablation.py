"""Ablations: what is trained, in what order, once; how numbers become tables and verdicts; the shipped files."""

import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from equipoise import Stop
from equipoise.models import create_model
from equipoise.train import ablation_run
from equipoise.train.ablation import JOB, RESULT, Ablation, Claim, Variant, make_jobs, run_jobs
from equipoise.train.ablation_table import claim_table, gap_of, markdown, measures, summarise, variant_table, verdict
from equipoise.train.config import ConfigError
from equipoise.train.tracking import read_metrics
from tests.runs import evaluate_run

FOLDER = Path(__file__).parents[2] / "recipes" / "ablations"
SHIPPED = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}

RECIPE = """
[task]
name = "copy_memory"
length = 4
train_size = 16
test_size = 8
batch_size = 4

[model]
name = "deq_transformer_copy_memory"
d_model = 8
heads = 2
d_inner = 8

[stop]
rtol = 1e-3
max_steps = 3

[adjoint]
name = "implicit"
stop = { rtol = 0.0, max_steps = 3 }

[train]
steps = 2
threads = 1
"""
COPY = Ablation(
    title="Copies",
    recipe="copy.toml",
    metric="loss",
    variants={
        "base": Variant("as it is", published=2.5),
        "wide": Variant("wider", settings=("model.d_inner=16",), budgets=(2,)),
        "lstm": Variant(settings=('model={name="lstm_copy_memory", widths=[8]}',)),
    },
    claims=(Claim("the wide one is worse", "wide", "base", of="steps", published="so they say"),),
    seeds=2,
    budgets=(3, 6),
    converge=Stop(rtol=1e-2, max_steps=8),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    (folder / "copy.toml").write_text(RECIPE)
    return folder


def jobs_of(place, out, **options):
    return make_jobs(COPY, place, out, **options)


def do(job):
    """The job in this process."""
    job.claim()
    return ablation_run.run_job(job.folder)


@pytest.fixture(scope="module")
def done(place):
    """All jobs, done in this process."""
    jobs = jobs_of(place, place / "done")
    for job in jobs:
        assert do(job) is not None
    return jobs


# Jobs


def test_the_first_seed_of_all_variants_comes_first(place, tmp_path):
    jobs = jobs_of(place, tmp_path)
    assert [(job.variant, job.seed) for job in jobs] == [(v, s) for s in (0, 1) for v in ("base", "wide", "lstm")]
    assert jobs[4].folder == tmp_path / "wide" / "seed-1"
    assert (jobs[4].recipe.train.seed, jobs[4].recipe.model["d_inner"]) == (1, 16)
    assert [job.scoring["budgets"] for job in jobs[:3]] == [[3, 6], [2], [3, 6]]


def test_options_of_all_variants(place, tmp_path):
    (job,) = jobs_of(place, tmp_path, seeds=1, variants=["wide"], changes=["model.d_inner=24"], minutes=2)
    assert (job.recipe.model["d_inner"], job.recipe.train.minutes) == (24, 2.0)
    with pytest.raises(ValueError, match="unknown variant 'wid'; did you mean 'wide'"):
        jobs_of(place, tmp_path, variants=["wid"])
    with pytest.raises(ConfigError, match=r"variant 'base': --set train\.stepz=1"):
        jobs_of(place, tmp_path, changes=["train.stepz=1"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variants": {}}, "variants must name at least one"),
        ({"variants": {"../x": Variant()}, "claims": ()}, "names a folder"),
        ({"claims": (Claim("?", "bass", "wide"),)}, "unknown variant 'bass'; did you mean 'base'"),
        ({"budgets": (0,)}, "budgets must be an integer of at least 1"),
        ({"seeds": 0}, "seeds must be an integer"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(COPY, **changes)
    with pytest.raises(ValueError, match="not both"):
        Claim("?", "base", "wide", by=1.0, within=1.0)


# A run


def test_a_result_has_the_scores_of_the_last_weights_at_every_budget(done):
    base, _, lstm = (job.result() for job in done[:3])
    folder = done[0].folder
    again = evaluate_run(folder, "test", [3, 6], which="latest")
    assert [score["steps"] for score in base["scores"]] == [3, 6]
    for score, expected in zip(base["scores"], again, strict=True):
        assert score["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert score["solve"]["residual_p95"] == pytest.approx(expected["solve"]["residual_p95"], rel=1e-5)
    assert base["converged"]["solve"]["steps_p95"] <= 8
    logged = read_metrics(folder / "metrics.jsonl")
    assert base["parameters"] == logged[0]["parameters"]
    assert base["minutes"] == pytest.approx(logged[-1]["seconds"] / 60)
    assert (base["step"], base["complete"]) == (2, True)
    assert (len(lstm["scores"]), lstm["scores"][0]["solve"], lstm["converged"]) == (1, {}, None)


def test_systems_that_do_not_converge_count_with_all_steps(place, tmp_path):
    strict = dataclasses.replace(COPY, converge=Stop(rtol=1e-12, max_steps=40, plateau=3))
    (job,) = make_jobs(strict, place, tmp_path, seeds=1, variants=["base"])
    solve = do(job)["converged"]["solve"]
    assert (solve["steps_p50"], solve["steps_p95"]) == (40, 40)
    assert solve["failures"] == solve["systems"] == 8


def test_a_time_limit_ends_a_run_and_a_longer_one_goes_on(place, tmp_path):
    options = {"seeds": 1, "variants": ["base"], "changes": ["train.steps=4", "train.evaluate_every=1"]}
    (short,) = jobs_of(place, tmp_path, **options, minutes=1e-9)
    assert not do(short)["complete"]
    assert short.result()["step"] < 4
    (longer,) = jobs_of(place, tmp_path, **options, minutes=10)
    assert longer.result() is None  # cut short by another limit
    assert do(longer)["complete"]
    assert (longer.result()["step"], short.result()["step"]) == (4, 4)


def test_other_scores_of_a_trained_model_need_no_training(place, tmp_path):
    (job,) = jobs_of(place, tmp_path, seeds=1, variants=["base"])
    before = do(job)
    other = dataclasses.replace(job, scoring={**job.scoring, "budgets": [5]})
    assert other.result() is None
    after = do(other)
    assert [score["steps"] for score in after["scores"]] == [5]
    assert after["minutes"] == before["minutes"]


def test_a_folder_with_another_run_is_refused(done, place):
    (job,) = jobs_of(place, place / "done", seeds=1, variants=["base"], changes=["model.d_inner=12"])
    with pytest.raises(ValueError, match=r"other settings \(model.d_inner differ\); give another folder"):
        job.claim()


# Several processes


def test_jobs_run_in_processes_and_one_that_fails_does_not_keep_others_from_theirs(place, tmp_path):
    broken = dataclasses.replace(COPY, variants={**COPY.variants, "base": Variant(settings=("model.heads=3",))})
    jobs, said = make_jobs(broken, place, tmp_path, seeds=1), []
    do(jobs[1])
    failed, reason = run_jobs(jobs, at_once=2, say=said.append)
    assert said[:3] == ["3 runs, 1 of them done", "begun: base, seed 0", "begun: lstm, seed 0"]
    assert "done: lstm, seed 0" in said
    assert jobs[2].result()["complete"]
    assert reason is None
    assert list(failed) == ["base, seed 0"]
    assert "heads" in failed["base, seed 0"]
    assert str(tmp_path / "base" / "seed-0.log") in failed["base, seed 0"]
    record = summarise(broken, jobs, failed)
    assert record["missing"] == failed
    assert f"- base, seed 0: {failed['base, seed 0']}" in markdown(record)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["input", "signal"])
def test_runs_save_and_end_when_they_are_asked_to(place, tmp_path, how):
    """By a signal to who started them, or by its end; they go on later."""
    changes = ["train.steps=100000", "train.save_every=100000", "train.evaluate_every=100000", "train.log_every=1"]
    (job,) = jobs_of(place, tmp_path, seeds=1, variants=["lstm"], changes=changes)
    job.claim()
    command = [sys.executable, "-m", "equipoise.train.ablation_run", str(job.folder)]
    if how == "signal":
        code = (
            "import sys; from tests.unit.test_ablation import jobs_of, run_jobs; "
            "jobs = jobs_of(*sys.argv[1:3], seeds=1, variants=['lstm'], changes=sys.argv[3:]); "
            "sys.exit(run_jobs(jobs)[1] != 'SIGTERM')"
        )
        command = [sys.executable, "-c", code, str(place), str(tmp_path), *changes]
    root = str(FOLDER.parents[1])
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": root})
    log, deadline = job.folder / "metrics.jsonl", time.monotonic() + 60
    while not log.exists() or len(log.read_bytes().splitlines()) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if how == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        process.stdin.close()
    assert process.wait(60) == (0 if how == "signal" else 130)
    process.stdin.close()
    assert len(list((job.folder / "checkpoints").glob("step-*"))) == 1
    assert not (job.folder / RESULT).exists()
    assert (job.folder / JOB).exists()


# Tables


def test_a_summary_has_means_spreads_and_published_numbers(done):
    record = summarise(COPY, done)
    losses = [job.result()["scores"][0]["loss"] for job in done if job.variant == "base"]
    base = record["variants"]["base"]
    assert base["mean"]["loss"] == pytest.approx(statistics.fmean(losses))
    assert base["spread"]["loss"] == pytest.approx(statistics.stdev(losses))
    assert base["mean"]["loss_second"] == pytest.approx(
        statistics.fmean(job.result()["scores"][1]["loss"] for job in done if job.variant == "base")
    )
    assert record["missing"] == {}
    columns, rows = variant_table(record)
    row = dict(zip(columns, rows[0], strict=True))
    assert (row["variant"], row["what"], row["published"], row["budgets"]) == ("base", "as it is", "2.5", "3, 6")
    assert row["loss"] == f"{base['mean']['loss']:.4g} ± {base['spread']['loss']:.2g}"
    assert dict(zip(columns, rows[2], strict=True))["steps"] == ""
    claims = claim_table(record)[1]
    assert claims[0][:3] == ["the wide one is worse", "so they say", "steps: wide − base"]
    text = markdown(record)
    assert text.startswith("# Copies\n")
    assert f"| {' | '.join(rows[0])} |" in text
    assert record["claims"][0]["verdict"] in text


def test_part_of_an_ablation_is_reported(done, place):
    record = summarise(COPY, [*done, *jobs_of(place, place / "done", seeds=3)[6:]])
    assert set(record["missing"]) == {f"{name}, seed 2" for name in COPY.variants}
    one = summarise(COPY, done[:1])
    assert list(one["variants"]) == ["base"]
    assert (one["claims"], one["variants"]["base"]["spread"]) == ([], {})
    with pytest.raises(ValueError, match="measure in the claim 'x' 'stepz'; did you mean 'steps'"):
        summarise(dataclasses.replace(COPY, claims=(Claim("x", "base", "wide", of="stepz"),)), done)
    with pytest.raises(ValueError, match="unknown metric 'los'; did you mean 'loss'"):
        measures(done[0].result(), "los")


@pytest.mark.parametrize(
    ("left", "right", "settings", "expected"),
    [
        ([5.0, 5.2], [1.0, 1.2], {}, "confirmed"),
        ([1.0, 1.2], [5.0, 5.2], {}, "contradicted"),
        ([1.0, 3.0], [1.1, 2.8], {}, "undecided"),
        ([5.0, 5.2], [1.0, 1.2], {"by": 10.0}, "contradicted"),
        ([1.0, 1.2], [1.5, 1.7], {"by": -1.0}, "confirmed"),
        ([1.0, 1.01], [1.02, 1.03], {"within": 0.5}, "confirmed"),
        ([1.0, 1.01], [9.0, 9.01], {"within": 0.5}, "contradicted"),
        ([5.0], [1.0], {}, "undecided"),  # one seed decides nothing
        ([60.0, 60.0], [60.0, 60.0], {}, "undecided"),
        ([], [1.0], {}, "undecided"),
    ],
)
def test_a_claim_is_decided_by_two_standard_errors(left, right, settings, expected):
    gap, error = gap_of(left, right)
    if len(left) > 1:
        assert gap == pytest.approx(sum(left) / 2 - sum(right) / 2)
        spread = [abs(a - b) / math.sqrt(2) for a, b in (left, right)]  # standard deviations of two numbers
        assert error == pytest.approx(math.sqrt(sum(s**2 / 2 for s in spread)))
    assert verdict(Claim("", "a", "b", **settings), gap, error) == expected


def test_percents_are_shown_times_a_hundred(done):
    record = summarise(dataclasses.replace(COPY, percent=True), done)
    columns, rows = variant_table(record)
    assert columns[5] == "loss, %"
    assert float(rows[0][5].split()[0]) == pytest.approx(100 * record["variants"]["base"]["mean"]["loss"], rel=1e-3)
    assert rows[0][-1] == "250"


def test_the_figure_shows_every_run(done, tmp_path):
    pytest.importorskip("matplotlib")
    from equipoise.plots import LogError, make_chart
    from equipoise.train.ablation_table import write_summary

    with pytest.raises(LogError, match=r"ablation\.json is missing; `equipoise ablate FILE"):
        make_chart("ablation", [tmp_path])
    write_summary(tmp_path, summarise(COPY, done))
    chart = make_chart("ablation", [tmp_path])
    assert [row[1:3] for row in chart.rows] == [(v, s) for v in ("base", "wide", "lstm") for s in (0, 1)]
    values = dict(zip(chart.columns, chart.rows[1], strict=True))
    result = done[3].result()
    assert values["value"] == result["scores"][0]["loss"]
    assert values["steps"] == result["converged"]["solve"]["steps_p50"]
    assert (values["second"], values["published"]) == (result["scores"][1]["loss"], 2.5)
    assert len(chart.figure.axes) == 2
    (tmp_path / "ablation.json").write_text(json.dumps({"variants": {"a": {"runs": []}}}))
    with pytest.raises(LogError, match="no runs that are done"):
        make_chart("ablation", [tmp_path])


# Shipped files


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_ablations_are_whole(name):
    """Every variant has valid settings and a model that can be built; those that are compared are of like size."""
    ablation = Ablation.read(SHIPPED[name])
    assert SHIPPED[name].read_text().startswith("# ")
    assert ablation.seeds >= 3
    assert len(ablation.budgets) == 2
    sizes = {}
    for job in make_jobs(ablation, FOLDER, "unused", seeds=1):
        settings = {
            **job.recipe.model,
            **({"vocab_size": 10_000} if job.recipe.task["name"] == "language_model" else {}),
        }
        model = create_model(settings.pop("name"), **settings)
        sizes[job.variant] = sum(p.numel() for p in model.parameters())
        schedule = job.recipe.schedule(model)
        if schedule is not None:
            plan = schedule.final().eval_plan
            assert job.scoring["budgets"][0] == plan.stop.max_steps or job.recipe.evaluation.stop is not None
        if "unrolled" in job.variant:
            assert schedule.at(0).plan.stop == Stop(rtol=0.0, max_steps=5, select="last")
        if job.recipe.train.capture and schedule is not None:
            adjoint = getattr(schedule.final().plan.adjoint, "stop", None)
            assert schedule.final().plan.stop.fixed_budget
            assert adjoint is None or adjoint.fixed_budget
    first = next(iter(sizes.values()))
    odd = {name for name, size in sizes.items() if abs(size / first - 1) > 0.03}
    assert odd <= {"resnet"}  # of another family, and larger
