"""`equipoise hyper`: what it prints, what it writes, how it ends."""

import json
import re
import shutil
import warnings

import pytest

import equipoise as eq
from equipoise import EquilibriumWarning
from equipoise.cli.hyper import _read
from equipoise.plots import draw
from equipoise.solvers import fingerprint, load_solver, save_solver
from equipoise.tasks.hyper import FitSettings, HyperRecipe
from equipoise.train import hyper_study
from equipoise.train.hyper_fit import fit_run
from equipoise.train.load import find_checkpoint, load
from equipoise.train.pareto import pareto_run
from equipoise.train.tracking import read_metrics
from tests.cli.program import invoke, one_line

QUICK = ("--set", "fit.unroll=3", "--set", "fit.accept=0.9", "--set", "solver.hidden=4", "--set", "solver.width=4")


@pytest.fixture
def run(copy_run, tmp_path):
    return shutil.copytree(copy_run, tmp_path / "run")


def fitted(run, *options):
    return json.loads(invoke("hyper", run, "--steps", 2, *QUICK, *options, "--json").stdout)


def test_a_solver_is_fitted_and_used(run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    record = fitted(run)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path.name for path in after.keys() - before.keys()} == {"solver.safetensors", "fit.jsonl"}
    assert all(after[path] == content for path, content in before.items())
    assert record["file"] == str(run / "hyper" / "solver.safetensors")
    assert record["recipe"]["fit"]["steps"] == 2
    model = load(run)
    solver = load_solver(run, model)
    assert solver.num_parameters == record["parameters"]
    assert (solver.config.hidden, solver.config.width, solver.config.local) == (4, 4, True)
    assert [line["step"] for line in read_metrics(run / "hyper" / "fit.jsonl")] == [0, 1]
    with eq.override(model, solver=solver):
        assert model.deq.plan.solver is solver


def test_the_summary_is_readable(run):
    result = invoke("hyper", run, "--steps", 2, *QUICK, "--out", run / "other")
    for words in (
        rf"^checkpoint: {find_checkpoint(run)}$",
        r"^solver: [\d,]+ parameters, \d+\.\d\d% of the model's$",
        r"^fitted in \d+\.\d s, to \d+% of the equilibria$",
        r"^  relative residual at the end +[\d.e-]+ +[\d.e-]+$",
        rf"^written: {run / 'other' / 'solver.safetensors'}$",
    ):
        assert re.search(words, result.stdout, re.MULTILINE), words
    assert re.search(r"^warning: the solver has \d+ parameters, \d+\.\d% of the model's", result.stderr)


@pytest.mark.parametrize(("budget", "warned"), [(0.01, True), (0.9, False)])
def test_a_share_of_parameters_is_warned_of_above_the_budget_that_was_set(run, budget, warned):
    result = invoke("hyper", run, "--steps", 1, *QUICK, "--set", f"solver.budget={budget}")
    assert (f"of the model's, more than solver.budget = {budget}:" in result.stderr) == warned


def test_going_on_with_it(run):
    first = fitted(run)
    again = fitted(run, "--finetune", run, "--out", run / "again", "--seed", 3)
    assert again["finetuned"] == str(run)
    assert again["parameters"] == first["parameters"]
    assert again["first"]["initial"] != first["first"]["initial"]
    assert again["first"]["loss"] == pytest.approx(first["first"]["loss"] - 1)  # that on residuals is over


def test_going_on_by_the_settings_that_it_was_fitted_by(run, tmp_path):
    """Those of its file; options count on top, another recipe instead."""
    first = fitted(run, "--recipe", "quick", "--set", "fit.learning_rate=2e-3")
    options = ("--finetune", run, "--set", "fit.pool=2", "--steps", 1)
    result = invoke("hyper", run, *options, "--out", run / "again", "--json")
    kept, own = json.loads(result.stdout)["recipe"]["fit"], first["recipe"]["fit"]
    assert own["plain"] is not HyperRecipe().fit.plain or own["stop"] != HyperRecipe().fit.stop
    assert kept == {**own, "pool": 2, "steps": 1}
    assert f"settings of the fit: those by which {run} was fitted; --recipe names others\n" in result.stderr
    shown = invoke("hyper", run, *options, "--unroll", 2, "--out", run / "third")
    assert shown.stdout.startswith(f"settings of the fit: those by which {run} was fitted")
    result = invoke("hyper", run, *options, *QUICK[:4], "--recipe", "full", "--out", run / "fourth", "--json")
    full = json.loads(result.stdout)["recipe"]["fit"]
    assert full["learning_rate"] == HyperRecipe().fit.learning_rate
    assert "settings of the fit" not in result.stderr


@pytest.mark.parametrize("notes", [{}, {"recipe": {"fit": {"of_another_version": 1}}}])
def test_going_on_with_one_that_does_not_say_how_it_was_fitted(run, notes):
    fitted(run, "--recipe", "quick")
    save_solver(load_solver(run), run / "bare" / "solver.safetensors", load(run), notes)
    options = ("--finetune", run / "bare", "--steps", 1, *QUICK[:4], "--out", run / "again", "--json")
    result = invoke("hyper", run, *options)
    assert f"settings of the fit: those of `full`, {run / 'bare'} has none that can be read" in result.stderr
    found = json.loads(result.stdout)["recipe"]["fit"]
    assert found["learning_rate"] == HyperRecipe().fit.learning_rate


def test_what_it_consists_of_is_kept(run, run_main):
    fitted(run)
    code, _, error = run_main("hyper", run, "--finetune", run, "--out", run / "again", "--set", "solver.width=8")
    assert code == 2
    assert "solver.width = 8 cannot be had: the solver that is gone on with has 4" in one_line(error)


def test_few_equilibria_and_steps_to_learn_from_are_warned_of(run, monkeypatch):
    def fit_run(*arguments, **options):
        ends = {"first": {"accepted": 0.0}, "last": {"accepted": 0.0}, "share": 0.01, "parameters": 9, "seconds": 1.0}
        return {"checkpoint": "c", "file": "f", "accepted": 0.25, "skipped": 3, "steps": 20, **ends}

    monkeypatch.setattr("equipoise.train.hyper_fit.fit_run", fit_run)
    result = invoke("hyper", run)
    assert "fitted in 1.0 s, to 25% of the equilibria, none of them in the first or the last step" in result.stdout
    assert (
        "warning: only 25% of the equilibria were found well enough to learn from (fit.accept = 0.05)" in result.stderr
    )
    assert "warning: 3 of 20 steps of the fit were left out" in result.stderr


def test_a_fit_that_ends_no_better_than_it_began_is_warned_of(run):
    result = invoke("hyper", run, "--steps", 3, *QUICK, "--set", "fit.learning_rate=1e9")
    assert re.search(
        r"warning: the last unrolled step ends at a residual of \S+, no lower than the \S+ of the first", result.stderr
    )
    assert "--set fit.learning_rate=1e+08" in result.stderr


@pytest.mark.parametrize(
    ("options", "called", "words"),
    [
        ((), "equipoise.train.hyper_fit.fit_run", "interrupted: no solver was written; --minutes or --steps"),
        (("--report", "out"), "equipoise.train.hyper_study.study_run", "interrupted: the same command goes on after"),
    ],
)
def test_an_interrupted_fit_says_what_there_is(run, monkeypatch, options, called, words):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(called, interrupted)
    result = invoke("hyper", run, *options)
    assert result.exit_code == 130
    assert words in result.stderr


def test_recipes_are_found_by_name_wherever_one_is(monkeypatch, tmp_path):
    (tmp_path / "quick").mkdir()  # a folder of one's own, e.g. of solvers
    monkeypatch.chdir(tmp_path)
    assert list(_read(["quick"], [])) == ["quick"]
    with pytest.raises(ValueError, match="holds no recipes"):
        _read(["./quick"], [])
    listed = json.loads(invoke("list", "hyper", "--json").stdout)["hyper"]
    assert {"full", "quick", "accelerated"} <= listed.keys()
    assert listed["softmax"].endswith(".")


def test_solvers_of_reports_are_pointed_to(run, tmp_path):
    place = run / "hyper" / "quick" / "seed-0"
    fitted(run, "--out", place)
    with pytest.raises(FileNotFoundError, match=re.escape(f"Those of reports are by themselves: hyper:{place}")):
        load_solver(run, load(run))


def test_settings_from_a_file(run, tmp_path):
    path = tmp_path / "hyper.toml"
    path.write_text(
        "[solver]\nweights = 'softmax'\ninitialiser = false\nlocal = false\n[fit]\nunroll = 2\nsolver = 'anderson'\n"
        "losses = { residual = 0.0 }\naccept = 0.9\n"
    )
    record = json.loads(invoke("hyper", run, "--recipe", path, "--steps", 1, "--json").stdout)
    solver = load_solver(run)
    assert (solver.config.weights, solver.config.source, solver.config.local) == ("softmax", None, False)
    assert record["recipe"]["fit"]["solver"]["name"] == "anderson"
    assert record["recipe"]["fit"]["losses"]["residual"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "fit.unrol=3"), "did you mean 'unroll'"),
        (("--set", "solver.weights=shft"), "did you mean 'shift'"),
        (("--minutes", "0"), "--minutes must be above 0, got 0."),
        (("--steps", "0"), "steps must be an integer of at least 1"),
        (("--finetune", "nowhere"), "no learned solver at nowhere"),
        (("--which", "bets"), "did you mean 'best'"),
        (("--recipe", "sofmax"), "unknown recipe 'sofmax'; did you mean 'softmax'?"),
        (("--recipe", "absent.toml"), "there is no file absent.toml"),
        (("--recipe", "full", "--recipe", "free"), "2 recipes (full, free) are fitted for a report; give --report DIR"),
        (("--most", "3"), "--most cannot be used here: this belongs to a report; give --report DIR"),
        (("--at", "3"), "--at cannot be used here: this belongs to a report; give --report DIR"),
        (("--seeds", "2"), "--seeds cannot be used here: this belongs to a report; give --report DIR"),
        (("--report", "out", "--out", "x", "--seed", "1"), "--out, --seed cannot be used here: a report has fits"),
        (("--report", "out", "--force"), "--force cannot be used here: a report has fits of its own"),
        (("--set", "task.lenght=3"), "did you mean 'length'"),
    ],
)
def test_a_wrong_option_ends_with_one_line(run, run_main, options, words):
    code, _, error = run_main("hyper", run, *options)
    assert code == 2
    assert words in one_line(error)
    assert not (run / "hyper" / "solver.safetensors").exists()


@pytest.mark.parametrize("options", [(), ("--report", "report")])
def test_a_folder_without_a_checkpoint(tmp_path, run_main, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    code, _, error = run_main("hyper", tmp_path, *options)
    assert code == 2
    assert "neither a checkpoint nor a run with checkpoints" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_by_name(run):
    assert fitted(run, "--recipe", "softmax")["recipe"]["solver"]["weights"] == "softmax"


def test_recipes_of_one_name_are_refused(run, run_main, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text("")
    paths = [str(tmp_path / folder / "mine.toml") for folder in ("one", "two")]
    code, _, error = run_main("hyper", run, "--recipe", paths[0], "--recipe", paths[1])
    assert code == 2
    assert "are both called 'mine': rename one of them" in one_line(error)
    assert list(_read([paths[0], paths[0]], [])) == ["mine"]


def test_what_is_cut_off_leaves_the_solver_and_its_log(run, monkeypatch):
    fitted(run)
    folder = run / "hyper"
    kept = {name: (folder / name).read_bytes() for name in ("solver.safetensors", "fit.jsonl")}

    def cut_off(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("equipoise.train.hyper_fit.save_solver", cut_off)
    with pytest.raises(KeyboardInterrupt):
        fit_run(run, HyperRecipe(fit=FitSettings(steps=2, unroll=2, accept=0.9)), force=True)
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    assert (folder / "fit.partial.jsonl").is_file()


def test_a_limit_of_time(run):
    record = json.loads(invoke("hyper", run, "--steps", 10**6, *QUICK, "--minutes", 1e-6, "--json").stdout)
    assert record["steps"] == 1


def test_recipes_come_as_they_were_given_and_none_is_added(tmp_path):
    """The first one is timed: of a folder that in full, if it has one."""
    for name, text in {"b": "[solver]\nmemory = 2\n", "a": "", "full": ""}.items():
        (tmp_path / f"{name}.toml").write_text(text)
    found = _read([str(tmp_path)], ["fit.steps=7"])
    assert list(found) == ["full", "a", "b"]
    assert {recipe.fit.steps for recipe in found.values()} == {7}
    assert (found["a"].solver.memory, found["b"].solver.memory) == (6, 2)
    (tmp_path / "full.toml").unlink()
    assert list(_read([str(tmp_path)], [])) == ["a", "b"]
    assert list(_read(["quick", str(tmp_path), "full", "quick"], [])) == ["quick", "a", "b", "full"]
    assert list(_read(["softmax", "full"], [])) == ["softmax", "full"]
    assert list(_read([], [])) == ["full"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no recipes"):
        _read([str(tmp_path / "empty")], [])


def test_a_report(run, tmp_path, monkeypatch):
    asked = {}

    def study(run, recipes, out, **options):
        asked.update(options, recipes=list(recipes), run=run)
        out.mkdir()
        (out / "README.md").write_text("# Found\n")
        return {"found": 1}

    monkeypatch.setattr(hyper_study, "study_run", study)
    options = ("--report", tmp_path / "a", "--seeds", 5, "--most", 2, "--minutes", 2, "--set", "task.eval_batch_size=3")
    result = invoke("hyper", run, *options, "--recipe", "full", "--recipe", "free")
    assert "# Found" in result.stdout
    assert f"written: {tmp_path / 'a'}" in result.stdout
    assert (asked["recipes"], asked["seeds"], asked["seconds"], asked["measuring"].most) == (
        ["full", "free"],
        5,
        120,
        2,
    )
    assert asked["changes"] == ["task.eval_batch_size=3"]
    assert (asked["measuring"].budgets, asked["measuring"].at) == (tuple(range(1, 13)), 12)
    result = invoke("hyper", run, "--report", tmp_path / "b", "--json", "--at", 9, "--at", 4, "--at", 9)
    assert json.loads(result.stdout) == {"found": 1}
    assert asked["recipes"] == ["full"]
    assert (asked["measuring"].budgets, asked["measuring"].at) == ((4, 9), 9)


def test_a_solver_that_is_there_is_not_overwritten(run, run_main):
    (run / "hyper").mkdir()
    (run / "hyper" / "solver.safetensors").write_text("mine")
    code, _, error = run_main("hyper", run, "--steps", 1)
    assert code == 2
    assert "is there already" in one_line(error)
    assert fitted(run, "--force")["parameters"] > 0


def test_metric_against_time(run, tmp_path):
    fitted(run)
    fitted(run, "--out", run / "second", "--seed", 1)
    solvers = ("anderson", f"hyper:{run}", f"hyper:{run / 'second'}")
    record = pareto_run(run, solvers, (1, 4), warmup=0, rounds=3, explicit=3, most=1)
    assert json.loads((run / "pareto.json").read_text())["points"][0]["ms"] > 0
    named = [(point["solver"], point["seed"], point["steps"]) for point in record["points"]]
    assert named[:3] == [("anderson", 0, 1), ("hyper", 0, 1), ("hyper", 1, 1)]
    assert named[-1] == ("3 layers", 0, None)
    assert (record["metric"], record["reference"]) == ("loss", "anderson")
    assert all(file.stat().st_size for file in draw("pareto", [run], tmp_path / "figures"))


def test_metric_against_time_beside_another_run(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    options = ("--solver", "anderson", "--set", "task.batch_size=4", "--beside", other)
    record = json.loads(invoke("evaluate", run, "--pareto", "--steps", 1, *options, "--json").stdout)
    assert [(point["solver"], point["steps"]) for point in record["points"]] == [("anderson", 1), ("other", None)]
    assert record["changes"] == ["task.batch_size=4"]


def test_a_learned_solver_does_not_vary(run, run_main):
    fitted(run)
    code, _, error = run_main("evaluate", run, "--solver", f"hyper:{run}", "--sweep", "solver.memory=2,3")
    assert code == 2
    assert "solver.memory cannot be varied: a HyperAnderson is fitted as it is" in one_line(error)


def test_text_is_generated_by_a_learned_solver(text_run, tmp_path, run_main):
    copied = shutil.copytree(text_run, tmp_path / "text")
    invoke("hyper", copied, "--steps", 1, *QUICK, "--data-dir", text_run.parent)
    options = ("--prompt", "a", "--length", 6, "--temperature", 0)
    code, text, _ = run_main("generate", copied, *options, "--solver", f"hyper:{copied}")
    assert code == 0
    assert text.startswith("a")
    assert len(text) == 8  # the prompt, six characters, the end of the line
    for path in (copied / "checkpoints").rglob("model.safetensors"):
        path.write_bytes(_other_weights(path))
    code, text, error = run_main("generate", copied, *options, "--solver", f"hyper:{copied}")
    assert (code, text) == (2, "")
    assert "was fitted to another model" in one_line(error)
    with warnings.catch_warnings():
        warnings.simplefilter("always", EquilibriumWarning)
        code, _, error = run_main("generate", copied, *options, "--solver", f"hyper:{copied}", "--force")
    assert code == 0
    assert re.match(r"warning: .* was fitted to another model .* Look at the residuals.$", error.strip())


def _other_weights(path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    return save({name: value + 1e-3 for name, value in load_file(path).items()}, metadata=metadata)


def test_a_solver_of_another_model_is_refused(run, text_run, tmp_path):
    fitted(run)
    other = shutil.copytree(text_run, tmp_path / "other")
    data = ("--data-dir", str(text_run.parent))
    record = json.loads(invoke("hyper", other, "--steps", 1, *QUICK, *data, "--json").stdout)
    assert record["parameters"] > 0
    assert fingerprint(load(other)) != fingerprint(load(run))
    with pytest.raises(ValueError, match="was fitted to another model"):
        pareto_run(run, ("anderson", f"hyper:{other}"), (1,))
