"""Several learned solvers for one run: what is fitted, measured, concluded and written, and what is not done twice."""

import dataclasses
import json
import math
import os
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise import Stop
from equipoise.solvers import fingerprint, load_solver
from equipoise.tasks.hyper import FitSettings, HyperRecipe, Networks, NotFittedError
from equipoise.train import hyper_report, hyper_study, scoring
from equipoise.train import pareto as pareto_module
from equipoise.train.checkpoint import CheckpointError
from equipoise.train.config import load_config
from equipoise.train.hyper_fit import fit_run
from equipoise.train.hyper_study import Measuring, study_run
from equipoise.train.hyper_summary import area, concluded, markdown, orderings, overhead, ranges, slope, variants
from equipoise.train.load import load, open_run
from equipoise.train.loop import evaluate
from equipoise.train.tracking import StatsWindow, read_metrics
from tests.cli.program import COPY, train
from tests.unit.test_forward import taped  # noqa: F401
from tests.unit.test_train_captured import emulated, inline_solves  # noqa: F401

FOLDER = Path(__file__).parents[2] / "recipes" / "hyper"
RECIPES = {path.stem: path for path in sorted(FOLDER.rglob("*.toml"))}
SIZES = {"hidden": 4, "width": 4, "compressed": 4}
QUICK = FitSettings(steps=3, unroll=3, accept=0.9, pool=2, stop=Stop(rtol=1e-2, max_steps=20))
CHOSEN = {
    "full": HyperRecipe(Networks(**SIZES), QUICK, "the best", better_than=("anderson",)),
    "softmax": HyperRecipe(Networks(**SIZES, weights="softmax"), QUICK, "behind", worse_than=("full", "absent")),
    "pixels": HyperRecipe(Networks(**SIZES, compression="lowest"), QUICK),
}
MEASURING = Measuring(budgets=(1, 2, 4), at=4, most=1, rounds=3, warmup=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"), COPY)


@pytest.fixture(scope="module")
def studied(trained, tmp_path_factory):
    """A run, the folder of its report, what it returned, what it said."""
    folder = tmp_path_factory.mktemp("studied")
    run, out, said = shutil.copytree(trained, folder / "run"), folder / "report", []
    record = study_run(run, CHOSEN, out, seeds=2, measuring=MEASURING, beside=[trained], say=said.append)
    return run, out, record, said


@pytest.fixture
def not_drawn(monkeypatch):
    monkeypatch.setattr(hyper_report, "_draw", lambda *_: [])


# The whole


def test_the_report_of_another_run_is_not_lost(studied, trained, tmp_path, not_drawn):
    other = shutil.copytree(trained, tmp_path / "other")
    _, out, _, _ = studied
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match=r"has the report of .*; give another folder, or remove that one"):
        study_run(other, CHOSEN, out, seeds=1, measuring=MEASURING)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_what_is_no_report_is_not_written_into(studied, tmp_path, not_drawn):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("mine")
    for place in (tmp_path / "notes", studied[0]):  # a run has a pareto.json of its own
        with pytest.raises(FileExistsError, match=r"is not empty, and has no report to go on with \(report.json\)"):
            study_run(studied[0], CHOSEN, place, seeds=1, measuring=MEASURING)
    assert (tmp_path / "notes" / "README.md").read_text() == "mine"


def test_what_is_no_part_of_a_report_goes_and_what_suits_no_recipe_is_left_out(studied, tmp_path):
    run, out = (shutil.copytree(studied[place], tmp_path / name) for place, name in ((0, "run"), (1, "report")))
    there = json.loads((out / "report.json").read_text())
    (out / "report.json").write_text(json.dumps({**there, "run": str(run), "complete": False}))
    assert (out / "ablations.png").is_file()
    nowhere = HyperRecipe(Networks(**SIZES), dataclasses.replace(QUICK, accept=1e-30))
    record = study_run(run, {"full": CHOSEN["full"], "nowhere": nowhere}, out, seeds=1, measuring=MEASURING)
    assert "has no equilibrium on these batches" in record["skipped"]["nowhere"]
    assert record["complete"]
    assert record["classic"]["broyden"] == there["classic"]["broyden"]  # more than is needed does
    assert not list(out.glob("ablations.*"))
    assert [path.name for path in (out / "fits").iterdir()] == ["full-0.jsonl"]
    assert (out / "pareto.json").is_file()


def test_a_complete_report_that_was_made_otherwise_is_put_aside(trained, tmp_path, not_drawn, monkeypatch):
    run, out, said = shutil.copytree(trained, tmp_path / "run"), tmp_path / "report", []
    options = {"seeds": 1, "measuring": MEASURING, "say": said.append}
    few = dataclasses.replace(MEASURING, budgets=(2, 4))

    def aside():
        return sorted(path.name for path in tmp_path.glob("report-*"))

    study_run(run, {"full": CHOSEN["full"]}, out, **options)
    os.utime(out / "report.json", (0, 0))
    first = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with monkeypatch.context() as change:
        change.chdir(out)
        with pytest.raises(FileExistsError, match="cannot be put aside, being the working folder"):
            study_run(run, {"full": CHOSEN["full"]}, ".", **options | {"measuring": few})
    study_run(run, {"full": CHOSEN["full"]}, out, **options)  # the same command measures again
    assert aside() == []
    os.utime(out / "report.json", (0, 0))
    again = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert again.keys() == first.keys()
    study_run(run, {"full": CHOSEN["full"]}, out, **options | {"measuring": few})
    assert aside() == ["report-19700101T000000Z"]
    older = tmp_path / "report-19700101T000000Z"
    assert {path.relative_to(older): path.read_bytes() for path in older.rglob("*") if path.is_file()} == again
    assert f"the report that was made otherwise stays in {older}" in said
    both = {name: CHOSEN[name] for name in ("full", "softmax")}
    for recipes, changed in (
        (both, {"measuring": few}),
        (dict(reversed(both.items())), {"measuring": few}),  # another one is timed
        (both, {"measuring": few, "beside": [trained.parent / "run"]}),
    ):
        before = len(aside())
        record = study_run(run, recipes, out, **options | changed)
        assert len(aside()) == before + 1
        assert record["reported"] == next(iter(recipes))
    kept = json.loads((out / "report.json").read_text())
    (out / "report.json").write_text(json.dumps({**kept, "complete": False}))
    before = aside()
    study_run(run, {"full": CHOSEN["full"]}, out, **options)
    assert aside() == before


def test_residuals_go_as_far_as_those_of_the_recipe_that_is_reported(studied, tmp_path):
    """Also where the first one that was given is left out."""
    run, said = shutil.copytree(studied[0], tmp_path / "run"), []
    nowhere = HyperRecipe(Networks(**SIZES), dataclasses.replace(QUICK, accept=1e-30, unroll=7))
    recipes = {"nowhere": nowhere, "short": HyperRecipe(Networks(**SIZES), dataclasses.replace(QUICK, unroll=2))}
    out = tmp_path / "out"
    record = study_run(run, recipes, out, seeds=1, measuring=MEASURING, say=said.append)
    assert (record["reported"], record["unroll"]) == ("short", 2)
    (curve,) = record["variants"]["short"]["curves"]
    assert len(curve["residual"]["mean"]) == hyper_study.FAR * 2 + 1
    assert len(record["classic"]["anderson"]["residual"]["mean"]) == hyper_study.FAR * 2 + 1
    # It is named wherever it is shown, and what is measured is told.
    text = (out / "README.md").read_text(encoding="utf-8")
    for words in (
        "timed and followed is `short`; seeds",
        "Times that the learned solver (`short`) is faster than Anderson at the",
        "|  | learned (`short`) | base |",
        "| step | learned (`short`) | Anderson |",
    ):
        assert words in text
    assert json.loads((out / "pareto.json").read_text())["recipe"] == "short"
    assert "learned (short)" in (out / "pareto.svg").read_text(encoding="utf-8")
    assert "learned (short)" in (out / "beyond.csv").read_text(encoding="utf-8")
    assert "metric against time, short" in said
    after = [line for line in said if line.startswith("after ")]
    assert [line.split(":")[0] for line in after] == ["after 4 steps", "after 1 step", "after 2 steps"]
    assert [line[-8:] for line in after] == ["(1 of 3)", "(2 of 3)", "(3 of 3)"]
    assert all(" anderson " in line and ", hyper " in line for line in after)


def test_metrics_of_other_classic_solvers_are_for_comparisons_of_variants(trained, tmp_path, not_drawn):
    run, out, said = shutil.copytree(trained, tmp_path / "run"), tmp_path / "out", []
    options = {"seeds": 1, "measuring": MEASURING, "say": said.append}
    alone = study_run(run, {"full": CHOSEN["full"]}, out, **options)["classic"]
    assert [point["steps"] for point in alone["anderson"]["points"]] == [0, 1, 2, 4]
    assert alone["broyden"]["points"] == []
    assert len(alone["broyden"]["residual"]["mean"]) == 3 * QUICK.unroll + 1
    both = study_run(run, {name: CHOSEN[name] for name in ("full", "softmax")}, out, **options)["classic"]
    assert [point["steps"] for point in both["broyden"]["points"]] == [0, 1, 2, 4]
    assert both["broyden"]["residual"] == alone["broyden"]["residual"]
    assert said.count("measuring classic, broyden") == 2
    assert said.count("measuring classic, anderson") == 1


def test_runs_of_one_name_are_not_put_beside(studied, trained, tmp_path):
    other = shutil.copytree(trained, tmp_path / trained.name)
    with pytest.raises(ValueError, match="are both called"):
        study_run(studied[0], CHOSEN, tmp_path / "out", measuring=MEASURING, beside=[trained, other])
    assert not (tmp_path / "out").exists()


def test_each_recipe_is_fitted_with_each_seed(studied, trained):
    run, _, record, said = studied
    assert list(record["variants"]) == ["full", "softmax"]
    model = load(run)
    assert fingerprint(model) == fingerprint(load(trained))
    for name in ("full", "softmax"):
        solvers = [load_solver(run / "hyper" / name / f"seed-{seed}", model) for seed in (0, 1)]
        assert not torch.equal(solvers[0].step.inner.weight, solvers[1].step.inner.weight)
        assert {solver.config.weights for solver in solvers} == {"shift" if name == "full" else "softmax"}
    assert "unknown compression of sequence 'lowest'" in record["skipped"]["pixels"]
    assert any(line.startswith("pixels: left out") for line in said)
    assert any(line.startswith("there is no GPU") for line in said) != torch.cuda.is_available()
    assert sum(line.startswith("equilibria of 2 batches") for line in said) == 1  # all fits share them


def test_a_seed_that_learned_nothing_is_named_and_the_others_go_on(studied, not_drawn, monkeypatch, tmp_path):
    run = shutil.copytree(studied[0], tmp_path / "run")
    fit_opened, said = hyper_study.fit_opened, []

    def unlucky(opened, recipe, folder, **options):
        if recipe.fit.seed == 1:
            raise NotFittedError("its gradient was never finite.")
        return fit_opened(opened, recipe, folder, **options)

    monkeypatch.setattr(hyper_study, "fit_opened", unlucky)
    one = {"one": dataclasses.replace(CHOSEN["full"], fit=dataclasses.replace(QUICK, steps=2))}
    record = study_run(run, one, tmp_path / "out", seeds=3, measuring=MEASURING, say=said.append)
    assert [fit["recipe"]["fit"]["seed"] for fit in record["variants"]["one"]["fits"]] == [0, 2]
    assert record["skipped"] == {"one, seed 1": "its gradient was never finite."}
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "seeds of each solver: 2," in text
    assert "Left out: one, seed 1: its gradient was never finite." in text


def test_as_many_equilibria_in_whichever_order_recipes_come(trained, not_drawn, monkeypatch, tmp_path):
    run, said, pool_of = shutil.copytree(trained, tmp_path / "run"), [], hyper_study.pool_of

    def counted(opened, settings, count, seconds):
        said.append(count)
        return pool_of(opened, settings, count, seconds)

    monkeypatch.setattr(hyper_study, "pool_of", counted)
    wide = dataclasses.replace(QUICK, pool=4)
    few, many = (dataclasses.replace(CHOSEN["full"], fit=dataclasses.replace(wide, steps=steps)) for steps in (1, 3))
    for place, recipes in enumerate(({"few": few, "many": many}, {"many": many, "few": few})):
        folder = shutil.copytree(run, tmp_path / f"run-{place}")
        study_run(folder, recipes, tmp_path / f"out-{place}", seeds=1, measuring=MEASURING)
    assert said == [3, 3]


def test_what_is_called_as_a_solver_beside_it_is_refused(studied, trained, tmp_path):
    with pytest.raises(ValueError, match="a recipe cannot be called 'anderson'"):
        study_run(studied[0], {"anderson": CHOSEN["full"]}, tmp_path / "out", measuring=MEASURING)
    beside = [shutil.copytree(trained, tmp_path / "hyper")]
    with pytest.raises(ValueError, match="a run beside this one cannot be called 'hyper'"):
        study_run(studied[0], CHOSEN, tmp_path / "out", measuring=MEASURING, beside=beside)
    assert not (tmp_path / "out").exists()


def test_other_data_are_fitted_and_measured_anew(studied, not_drawn, monkeypatch, tmp_path):
    run, said, digest = shutil.copytree(studied[0], tmp_path / "run"), [], hyper_study._digest
    monkeypatch.setattr(hyper_study, "_digest", lambda batches: digest(batches) + " of others")
    study_run(run, {"full": CHOSEN["full"]}, tmp_path / "out", seeds=1, measuring=MEASURING, say=said.append)
    assert any(line.startswith("full, seed 0") for line in said)
    assert {"measuring classic, anderson", "measuring full, seed-0"} <= set(said)


def test_data_are_told_apart_by_what_is_in_them(trained):
    held_out = open_run(trained, "valid").splits.held_out["valid"]
    batch = next(iter(held_out()))
    other = dataclasses.replace(batch, targets=batch.targets.roll(1, 0))
    assert hyper_study._digest([batch]) == hyper_study._digest(islice(held_out(), 1))
    assert hyper_study._digest([batch]) != hyper_study._digest([other])


def test_what_is_there_is_not_done_again(studied, not_drawn, monkeypatch, tmp_path):
    run, _, before, _ = studied
    for name in ("fit_opened", "pool_of"):
        monkeypatch.setattr(hyper_study, name, None)
    monkeypatch.setattr(hyper_study._Study, "curve", None)
    chosen = {name: CHOSEN[name] for name in ("full", "softmax")}
    again = study_run(run, chosen, tmp_path, seeds=2, measuring=MEASURING)
    assert again["variants"] == before["variants"]
    assert again["overhead"]["fit_seconds"] == before["overhead"]["fit_seconds"]


def test_fits_from_before_a_setting_existed_are_kept(studied, not_drawn, monkeypatch, tmp_path):
    run = shutil.copytree(studied[0], tmp_path / "run")
    for path in run.glob("hyper/full/seed-*/fit.json"):
        record = json.loads(path.read_text())
        del record["recipe"]["solver"]["rank"], record["recipe"]["solver"]["reach"]
        path.write_text(json.dumps(record))
    monkeypatch.setattr(hyper_study, "fit_opened", None)
    monkeypatch.setattr(hyper_study, "pool_of", None)
    again = study_run(run, {"full": CHOSEN["full"]}, tmp_path / "out", seeds=2, measuring=MEASURING)
    assert again["overhead"]["fit_seconds"] == studied[2]["overhead"]["fit_seconds"]


def test_a_file_that_was_cut_off_is_fitted_anew(studied, not_drawn, tmp_path):
    run = shutil.copytree(studied[0], tmp_path / "run")
    solver = run / "hyper" / "full" / "seed-0" / "solver.safetensors"
    whole = solver.stat().st_size
    solver.write_bytes(solver.read_bytes()[:100])
    said = []
    study_run(run, {"full": CHOSEN["full"]}, tmp_path / "out", seeds=1, measuring=MEASURING, say=said.append)
    assert any(line.startswith("full, seed 0") for line in said)
    assert solver.stat().st_size > whole // 2
    load_solver(solver, load(run))


def test_other_settings_are_fitted_anew(studied, not_drawn, tmp_path):
    run = shutil.copytree(studied[0], tmp_path / "run")
    other = HyperRecipe(Networks(**SIZES), FitSettings(**{**vars(QUICK), "steps": 2}))
    said = []
    study_run(run, {"full": other}, tmp_path / "out", seeds=1, measuring=MEASURING, say=said.append)
    assert any(line.startswith("full, seed 0") for line in said)
    kept = json.loads((run / "hyper" / "full" / "seed-0" / "fit.json").read_text())
    assert kept["recipe"]["fit"]["steps"] == kept["steps"] == 2
    (older,) = (run / "hyper" / "full").glob("seed-0-*")
    assert (older / "solver.safetensors").read_bytes() == (
        studied[0] / "hyper/full/seed-0/solver.safetensors"
    ).read_bytes()
    assert f"full, seed 0: the one that was fitted otherwise stays in {older}" in said


def test_curves_of_a_solver_whose_record_is_gone_are_measured_anew(studied, not_drawn, tmp_path):
    run, said = shutil.copytree(studied[0], tmp_path / "run"), []
    (run / "hyper" / "full" / "seed-0" / "fit.json").unlink()
    study_run(run, {"full": CHOSEN["full"]}, tmp_path / "out", seeds=1, measuring=MEASURING, say=said.append)
    assert any(line.startswith("full, seed 0") for line in said)
    assert "measuring full, seed-0" in said


def test_another_task_is_fitted_and_measured_anew(studied, not_drawn, tmp_path):
    run = shutil.copytree(studied[0], tmp_path / "run")
    said, changes = [], ["task.batch_size=4"]
    chosen = {"full": CHOSEN["full"]}
    study_run(run, chosen, tmp_path / "out", seeds=1, measuring=MEASURING, changes=changes, say=said.append)
    assert any(line.startswith("full, seed 0") for line in said)
    assert {"measuring classic, anderson", "measuring full, seed-0"} <= set(said)


def test_numbers_of_steps_beyond_those_that_were_unrolled(studied, tmp_path):
    """There is no mean over the unrolled steps then, and the report is written all the same."""
    run, _, _, _ = studied
    far = Measuring(budgets=(8,), at=8, most=1, rounds=3, warmup=0)
    record = study_run(run, {"full": CHOSEN["full"]}, tmp_path / "out", seeds=1, measuring=far)
    assert CHOSEN["full"].fit.unroll < 8
    assert all(math.isnan(float(row["area"]["mean"])) for row in record["table"])
    written = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "## Overhead" in written
    assert "nan" not in written
    json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))


def test_a_report_that_is_ended_has_what_was_measured(studied, tmp_path, monkeypatch):
    run, out = shutil.copytree(studied[0], tmp_path / "run"), tmp_path / "out"
    times, done = pareto_module._Bench._times, []

    def ended(self, model, entered):
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt
        return times(self, model, entered)

    monkeypatch.setattr(pareto_module._Bench, "_times", ended)
    with pytest.raises(KeyboardInterrupt):
        study_run(run, {"full": CHOSEN["full"]}, out, seeds=2, measuring=MEASURING)
    kept = json.loads((out / "pareto.json").read_text())
    assert kept["missing"] == [2]
    assert {point["steps"] for point in kept["points"]} == {1, 4}
    assert (out / "pareto.png").is_file()
    text = (out / "README.md").read_text(encoding="utf-8")
    drawn = len((out / "pareto.csv").read_text(encoding="utf-8").splitlines()) - 1
    assert ("drawn before the newest numbers" in text) == (drawn < len(kept["points"]))
    assert "Not measured yet: 2 steps." in text
    assert "## Overhead" in text
    assert "Residuals have not been followed yet." in text


def test_the_text_is_never_ahead_of_its_figures(studied, tmp_path, monkeypatch):
    """Wherever the work is ended: the text says whether figures may lack what the numbers have."""
    run, out = shutil.copytree(studied[0], tmp_path / "run"), tmp_path / "out"
    note, drawn, seen = "Figures were drawn before the newest numbers", [], []
    write = hyper_report.write_json

    def written(path, values):
        write(path, values)
        if path.parent == out and (out / "README.md").is_file():
            text = (out / "README.md").read_text(encoding="utf-8")
            seen.append(("![pareto]" in text, note in text))

    def draw(folder, record, say):
        drawn.append(json.loads((folder / "pareto.json").read_text())["missing"])
        return ["pareto"]

    monkeypatch.setattr(hyper_report, "write_json", written)
    monkeypatch.setattr(hyper_report, "_draw", draw)
    study_run(run, {"full": CHOSEN["full"]}, out, seeds=1, measuring=MEASURING)
    assert drawn[0] == [1, 2]
    assert drawn[-1] == []
    assert seen[0] == (False, False)  # there is no figure yet
    assert all(said for shown, said in seen if shown)
    assert any(shown for shown, _ in seen)
    text = (out / "README.md").read_text(encoding="utf-8")
    assert "![pareto]" in text
    assert note not in text


def test_metrics_that_were_timed_are_those_of_the_curves(studied):
    _, out, record, _ = studied
    points = json.loads((out / "pareto.json").read_text())["points"]
    for seed, curve in enumerate(record["variants"]["full"]["curves"]):
        own = {p["steps"]: p["metric"] for p in points if (p["solver"], p["seed"]) == ("hyper", seed)}
        assert {p["steps"]: p["metric"] for p in curve["points"] if p["steps"]} == own


def test_little_time_ends_fits(studied, not_drawn, tmp_path, monkeypatch):
    run = shutil.copytree(studied[0], tmp_path / "run")
    monkeypatch.setattr(hyper_study, "LEAST_SECONDS", 1e-6)
    long = HyperRecipe(Networks(**SIZES), FitSettings(**{**vars(QUICK), "steps": 10**6}))
    record = study_run(run, {"full": long}, tmp_path / "out", seeds=2, seconds=0.01, measuring=MEASURING)
    assert all(fit["steps"] < 10 for fit in record["variants"]["full"]["fits"])
    with pytest.raises(ValueError, match="seconds"):
        study_run(run, {"full": long}, tmp_path / "out", seconds=0.0)


def test_the_folder(studied):
    run, out, record, _ = studied
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    figures = {f"{name}.{kind}" for name in ("pareto", "beyond", "ablations") for kind in ("png", "svg", "csv")}
    logs = {f"fits/{name}-{seed}.jsonl" for name in ("full", "softmax") for seed in (0, 1)}
    assert names == {"README.md", "report.json", "pareto.json", *figures, *logs}
    assert set(record["files"]) == {str(out / name) for name in names}
    assert sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) < 2**20
    kept = json.loads((out / "report.json").read_text())
    assert kept == {key: value for key, value in record.items() if key != "files"}
    assert read_metrics(out / "fits" / "full-1.jsonl") == read_metrics(run / "hyper" / "full" / "seed-1" / "fit.jsonl")
    text = (out / "README.md").read_text(encoding="utf-8")
    for words in (
        "## Overhead",
        "## Ablations",
        "full better than softmax",
        "![beyond](beyond.png)",
        "Left out: pixels",
    ):
        assert words in text
    points = json.loads((out / "pareto.json").read_text())["points"]
    assert {(p["solver"], p["seed"]) for p in points} == {("anderson", 0), ("hyper", 0), ("hyper", 1), ("run", 0)}


def test_without_matplotlib_there_are_no_figures(studied, tmp_path, monkeypatch):
    import builtins

    imported = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "equipoise.plots":
            raise ImportError("figures need the extra [plots]: pip install 'equipoise[plots]'")
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    said = []
    assert hyper_report._draw(tmp_path, studied[2], said.append) == []
    assert "equipoise[plots]" in said[0]


# Measurements


def score(run, change):
    """The loss with something else in place of the equilibrium."""
    opened = open_run(run, "valid", None)

    def replace(deq, inputs, solution):
        return change(deq, inputs, solution)

    opened.model.deq.register_forward_hook(replace)
    with torch.no_grad():
        return evaluate(opened.task, opened.model, opened.splits, "valid", most=1)["loss"]


def replaced(solution, value):
    solution.value = value
    return solution


def test_no_step_is_the_start(studied):
    run, _, record, _ = studied
    zeros = score(run, lambda deq, inputs, solution: replaced(solution, torch.zeros_like(solution.value)))
    assert record["classic"]["anderson"]["points"][0] == {"steps": 0, "metric": zeros, "loss": zeros}
    solver = load_solver(run / "hyper" / "full" / "seed-0")

    def guess(deq, inputs, solution):
        return replaced(solution, solver.initialiser(inputs[0], [solution.value])[0])

    found = record["variants"]["full"]["curves"][0]["points"][0]["loss"]
    assert found == pytest.approx(score(run, guess), rel=1e-6)
    assert record["initialiser"]["zeros"] == zeros


def test_metrics_are_those_after_so_many_steps(studied):
    run, _, record, _ = studied

    def plain(deq, inputs, solution):  # the first step of Anderson is that of the plain iteration
        return replaced(solution, deq.cell(torch.zeros_like(solution.value), *inputs))

    point = record["classic"]["anderson"]["points"][1]
    assert point["steps"] == 1
    assert point["loss"] == pytest.approx(score(run, plain), rel=1e-6)


def test_residuals_are_followed_beyond_the_unrolled_steps(studied):
    run, _, record, _ = studied
    solver = load_solver(run / "hyper" / "softmax" / "seed-1")
    opened = open_run(run, "valid", None)
    batch = next(iter(opened.splits.held_out["valid"]()))
    traces = []
    opened.model.deq.register_forward_hook(
        lambda deq, inputs, solution: traces.append(deq.forward(*inputs, trace=True).stats.trace)
    )
    with torch.no_grad(), eq.override(opened.model, solver=solver, stop=Stop(rtol=0, max_steps=10)):
        opened.task.evaluation_step(opened.model, batch, None, _Nothing())
    found = record["variants"]["softmax"]["curves"][1]["residual"]
    assert len(found["mean"]) == 3 * 3 + 1
    trace = traces[0][:, :10].double()
    assert found["systems"] == len(trace) == 16
    assert found["mean"] == pytest.approx(trace.mean(0).tolist(), rel=1e-4)
    assert found["median"] == pytest.approx(trace.median(0).values.tolist(), rel=1e-4)
    assert found["std"] == pytest.approx(trace.std(0).tolist(), rel=1e-3, abs=1e-9)


class _Nothing(dict):
    def __missing__(self, name):
        return self

    def update(self, *values, **named):
        pass


def test_scores_of_graphs_are_those_of_an_evaluation(studied, taped, monkeypatch):  # noqa: F811
    """Metrics and residuals, with solves of a fixed budget that are part of a graph."""
    monkeypatch.setattr(scoring, "WORTH_A_GRAPH", 2)
    opened = open_run(studied[0], "valid", None, changes=["task.batch_size=1", "task.test_size=26"])
    score, window = scoring.Scoring(opened, "valid"), StatsWindow()
    with torch.no_grad(), eq.override(opened.model, solver=eq.Picard(), stop=Stop(rtol=0, max_steps=3)):
        truth = evaluate(opened.task, opened.model, opened.splits, "valid", window=window)
        with scoring.engine_of(opened.model, "eager"):
            found, solves = score.measured(opened.model)
            again = score(opened.model)
    assert opened.model.deq.engine == "auto"
    assert score.forward(opened.model).replayed >= 4 + 6
    assert found == pytest.approx(truth, rel=1e-5)
    assert again == pytest.approx(truth, rel=1e-5)
    expected = window.summary()
    assert solves.pop("failed") == expected.pop("failed") == {}
    assert solves == pytest.approx(expected, rel=1e-4)


# Conclusions


def curve(*losses, residuals=(1.0, 0.1, 0.01)):
    points = [{"steps": k, "loss": loss, "metric": 2 * loss} for k, loss in enumerate(losses)]
    return {"points": points, "residual": {"mean": list(residuals), "median": list(residuals), "systems": 4}}


def record_of(**variants):
    own = {name: {"published": name, "curves": curves, "fits": []} for name, curves in variants.items()}
    classic = {"anderson": curve(9.0, 3.0, 2.0)}
    return {
        "reported": next(iter(own)),
        "unroll": 2,
        "equilibrium": {"loss": 1.0, "metric": 2.0},
        "classic": classic,
        "variants": own,
    }


def test_a_slope_is_the_median_of_those_between_two_points():
    assert slope([(1, 3.0), (2, 5.0), (4, 9.0)]) == pytest.approx(2.0)
    assert slope([(1, 0.0), (2, 1.0), (3, 1.0)]) == pytest.approx(0.5)
    disturbed = [(k, 5 + 0.1 * k) for k in range(1, 13)]
    disturbed[0], disturbed[7] = (1, 9.0), (8, 50.0)
    assert slope(disturbed) == pytest.approx(0.1, rel=0.05)
    assert math.isnan(slope([(1, 1.0)]))
    assert math.isnan(slope([(1, 1.0), (2, math.nan)]))


def test_the_excess_of_the_loss():
    assert area(curve(9.0, 3.0, 2.0, 1.5), 1.0, 2) == pytest.approx(1.5)
    assert area(curve(9.0, 3.0, math.nan), 1.0, 2) == math.inf
    assert math.isnan(area({"points": [{"steps": 8, "loss": 1.0}]}, 1.0, 2))
    rows = variants(record_of(full=[curve(5.0, 1.5, 1.0), curve(5.0, 2.5, 1.0)], worse=[curve(9.0, math.inf, 1.0)]))
    assert [row["name"] for row in rows] == ["full", "anderson", "worse"]
    assert rows[0]["area"] == pytest.approx({"mean": 0.5, "std": 0.5 / math.sqrt(2)})
    assert rows[0]["metric"][1] == pytest.approx({"mean": 4.0, "std": math.sqrt(2)})
    assert rows[0]["residual_area"]["mean"] == pytest.approx(-1.5)


def test_a_metric_that_is_no_number_has_an_empty_cell():
    """That of a variant after a step, which is in the table all the same."""
    lost = curve(9.0, 3.0, 2.5)
    lost["points"][2]["metric"] = math.nan
    record = text_record(full=[curve(5.0, 1.5, 1.0)], lost=[lost])
    text = markdown(concluded(record, timed(("anderson", 2.0), ("hyper", 1.0)), None, {}), [])
    assert "| solver | excess loss | log10 residual | ppl at 1 | ppl at 2 | published |" in text
    assert "| lost | 1.75 | -1.5 | 6 | – | lost |" in text


def test_orderings():
    record = record_of(
        full=[curve(5.0, 1.5, 1.0), curve(5.0, 1.7, 1.0)],
        near=[curve(5.0, 1.55, 1.0), curve(5.0, 1.75, 1.0)],
        free=[curve(5.0, math.nan, 1.0)] * 2,
        odd=[curve(5.0, 1.1, 1.0), curve(5.0, 1.2, 1.0)],
    )
    recipes = {
        "full": HyperRecipe(better_than=("anderson",)),
        "near": HyperRecipe(worse_than=("full", "not fitted")),
        "free": HyperRecipe(worse_than=("full",), better_than=("anderson",)),
        "odd": HyperRecipe(worse_than=("full",)),
    }
    found = {(row["better"], row["worse"]): row["ours"] for row in orderings(record, recipes)}
    assert found == {
        ("full", "anderson"): "holds",
        ("full", "near"): "within the spread",
        ("full", "free"): "holds",
        ("free", "anderson"): "contradicted",
        ("full", "odd"): "contradicted",
    }
    same = record_of(full=[curve(5.0, 1.5, 1.0)], near=[curve(5.0, 1.5, 1.0)])
    assert [row["ours"] for row in orderings(same, {"near": recipes["near"]})] == ["within the spread"]  # a tie
    alone = record_of(full=[curve(5.0, 1.5, 1.0)], near=[curve(5.0, 1.55, 1.0)])
    (one, other) = orderings(alone, {name: recipes[name] for name in ("full", "near")})
    assert math.isnan(one["error"])  # of one seed each nothing is known
    assert other["ours"] == "holds"


def timed(*solvers):
    points = [
        {"solver": name, "seed": 0, "steps": k, "ms": 5 + each * k, "metric": 1.0, "engine": "eager"}
        for name, each in solvers
        for k in (1, 2, 3)
    ]
    speedup = {"hyper": {"target": 2.0, "values": [1.5, None], "mean": None, "over_budget": 2.5}}
    beside = {"ahead": {"hyper": [1, 2]}, "behind": {"hyper": 2e-4}, "ahead_in_time": {"hyper": [2, 3]}}
    return {"points": points, "speedup": speedup, **beside, "missing": []}


FIT = {
    "steps": 1000,
    "accepted": 0.975,
    "seconds": 3.0,
    "finding_seconds": 1.0,
    "parameters": 5,
    "model_parameters": 100,
    "share": 0.05,
}


def test_overhead():
    found = overhead([FIT, {**FIT, "seconds": 5.0}], timed(("anderson", 2.0), ("hyper", 1.5)), 500.0)
    assert found["time_share"] == pytest.approx((4.0 + 1.0) / 500.0)
    assert found["ms_per_step"] == pytest.approx({"anderson": 2.0, "hyper": 1.5})
    assert found["step_ratio"] == pytest.approx(0.75)
    assert overhead([FIT], timed(("anderson", 2.0), ("hyper", 1.5)), None)["time_share"] is None
    assert found["step_doubt"] is None


def test_times_that_do_not_grow_say_nothing_of_a_step():
    found = overhead([FIT], timed(("anderson", -0.25), ("hyper", 1.5)), None)
    assert found["ms_per_step"] == {"anderson": None, "hyper": pytest.approx(1.5)}
    assert found["step_ratio"] is None
    assert found["step_doubt"] == "times do not grow with the number of steps (anderson -0.25 ms a step)"
    single = timed(("anderson", 2.0), ("hyper", 1.5))
    single["points"] = [point for point in single["points"] if point["steps"] == 1]
    found = overhead([FIT], single, None)
    assert found["step_doubt"] == "times of two numbers of steps are needed"
    assert found["ms_per_step"] == {"anderson": None, "hyper": None}


def text_record(**variants):
    """With all that the text needs."""
    record = record_of(**variants)
    for variant in record["variants"].values():
        variant["fits"] = [FIT] * len(variant["curves"])
    facts = {"command": "", "checkpoint": "c", "model": "m", "split": "valid", "metric": "ppl", "at": 2, "skipped": {}}
    return {**record, **facts, "environment": {"devices": ["cpu"], "packages": {"torch": "2"}}}


def test_the_text_says_nothing_of_what_was_published_where_nothing_was():
    record = text_record(full=[curve(5.0, 1.5, 1.0)], other=[curve(5.0, 1.6, 1.0)])
    recipes = {"full": HyperRecipe(), "other": HyperRecipe(worse_than=("full",))}
    times = timed(("anderson", 2.0), ("hyper", 1.0))
    said = [markdown(concluded(record, times, None, known), []) for known in (recipes, {})]
    assert ["What was published, and the difference" in text for text in said] == [True, False]


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (None, "**1.50** (over Anderson's time for all of them: 2.50); by seed 1.50. No worse"),
        (
            "at least",
            "**at least 1.50** (over Anderson's time for all of them: at least 2.50); by seed at least 1.50. `full` "
            "has it after the fewest steps that were measured: give fewer steps (`--at`). No worse",
        ),
        (
            "at most",
            "**at most 1.50** (over Anderson's time for all of them: 2.50); by seed at most 1.50. Anderson has it",
        ),
        (
            "unknown",
            "**not known** (over Anderson's time for all of them: at least 2.50); by seed not known. Both have it",
        ),
    ],
)
def test_the_text_says_bounds_and_doubts(bound, words):
    record = text_record(full=[curve(5.0, 1.5, 1.0)])
    times = timed(("anderson", 2.0), ("hyper", 1.0))
    times["speedup"]["hyper"] |= {"values": [1.5], "mean": 1.5, "bound": bound}
    text = markdown(concluded(record, times, None, {}), [])
    assert words in text
    assert "machine" not in text
    noise = "times vary by 90 % from call to call (hyper after 1 step): other work probably ran on this machine"
    text = markdown(concluded(record, {**times, "noise": noise}, None, {}), [])
    assert f"\n\nT{noise[1:]}.\n\n## Overhead" in text


def test_the_text():
    record = text_record(full=[curve(5.0, 1.5, 1.0, residuals=(1.0, 0.2, 0.001))] * 2)
    text = markdown(concluded(record, timed(("anderson", 2.0), ("hyper", 1.0)), None, {}), ["pareto"])
    assert (
        "**not reached by all seeds** (over Anderson's time for all of them: 2.50); by seed 1.50, not reached" in text
    )
    assert "| ms per step, against Anderson | 1 | 2 | 50 % | less than 100 % |" in text
    assert "| parameters | 5 | 100 | 5.00 % |" in text
    assert "1,000 steps of the optimiser, to the 97.5 % of the systems whose equilibrium was found" in text
    assert "Engine of what is timed: anderson eager; hyper eager." in text
    mixed = timed(("anderson", -1.0), ("hyper", 1.0))
    for point in mixed["points"][:3]:
        point |= {"engine": "graph", "no_graph": None}
    for point in mixed["points"][3:]:
        point |= {"no_graph": "it waits"}
    other = markdown(concluded(record, mixed, None, {}), ["pareto"], behind=True)
    assert (
        "hyper eager (not the whole forward pass as one graph: it waits). Times of different engines are not" in other
    )
    assert "| ms per step, against Anderson | 1 | – | – | less than 100 % |" in other
    assert (
        "What a step costs is not known: times do not grow with the number of steps (anderson -1 ms a step)." in other
    )
    assert "Figures were drawn before" in other
    assert "Figures were drawn before" not in text
    assert "| seconds, fit and its equilibria against training | 3.0 + 1.0 | – | – |" in text
    assert "Below Anderson's at steps 2 of 1 to 2." in text
    assert "| the initialiser's state, no step | 10 |" in text
    assert "Ablations" not in text
    assert "No worse than Anderson after these numbers of steps: 1 to 2 (elsewhere at most 0.02 % worse)." in text
    assert "No worse than Anderson in the same time after these: 2 to 3." in text
    assert ranges([1, 2, 3, 5, 7, 8]) == "1 to 3, 5, 7 to 8"
    lost = timed(("anderson", 2.0), ("hyper", 1.0))
    lost["speedup"]["hyper"] = {"target": "inf", "values": [None, None], "mean": None, "over_budget": None}
    assert "within half a percent (inf): **not reached by all seeds**" in markdown(
        concluded(record, lost, None, {}), []
    )


def test_a_wrong_run_beside_is_refused_before_any_work(studied, tmp_path):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        study_run(studied[0], CHOSEN, tmp_path / "out", measuring=MEASURING, beside=[tmp_path / "absent"])
    assert not (tmp_path / "out").exists()


def test_wrong_measuring():
    with pytest.raises(ValueError, match="at=12 is not among the budgets 1, 2"):
        Measuring(budgets=(1, 2))


# Recipes


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_and_says_what_it_is(name):
    recipe = load_config(HyperRecipe, RECIPES[name])
    first = RECIPES[name].read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    assert len(first) <= 120
    assert set(recipe.worse_than) | set(recipe.better_than) <= {*RECIPES, "anderson"}
    published = RECIPES[name].parent == FOLDER
    assert bool(recipe.published) == published
    assert ("anderson" in recipe.better_than) == published
    others = [load_config(HyperRecipe, path) for stem, path in RECIPES.items() if stem != name]
    assert all((recipe.solver, recipe.fit) != (other.solver, other.fit) for other in others)


def test_the_recipe_in_full_is_the_default():
    recipe = load_config(HyperRecipe, RECIPES["full"])
    assert (recipe.solver, recipe.fit) == (HyperRecipe().solver, HyperRecipe().fit)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_fitted(name, trained, tmp_path):
    changes = (
        "fit.steps=1",
        "fit.accept=0.9",
        "fit.stop={rtol = 1e-1, max_steps = 6}",
        "fit.unroll=2",
        "solver.hidden=4",
    )
    record = fit_run(trained, load_config(HyperRecipe, RECIPES[name], changes), out=tmp_path)
    assert math.isfinite(record["last"]["loss"])
