"""`equipoise inspect`: what it prints, what it writes, how it ends."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from equipoise.cli import main as cli
from equipoise.plots import draw
from equipoise.train.load import find_checkpoint
from equipoise.train.loop import train
from tests.runs import COPY, recipe, text_recipe

MODEL = "model={name='deq_trellisnet_small', embedding_size=6, hidden_size=6, init_std=0.3}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run whose model has an equilibrium from the start; not to be changed."""
    folder = tmp_path_factory.mktemp("inspect")
    settings = (MODEL, "task.eval_batch_size=2", "train.steps=1", "stop={rtol=1e-2, max_steps=12}")
    train(text_recipe(folder / "mine", *settings), folder / "run")
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def invoke(*arguments):
    result = CliRunner().invoke(cli.app, ["inspect", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_json_is_what_is_written(run):
    record = json.loads(invoke(run, "--depths", "1,4", "--batches", 1, "--split", "test", "--json"))
    assert json.loads((run / "inspect.json").read_text()) == record
    assert (record["run"], record["split"], record["batches"]) == (str(run), "test", 1)
    assert [row["depth"] for row in record["memory"]] == [row["depth"] for row in record["time"]] == [None, 1, 4]
    assert sum(record["steps"]["statuses"].values()) == len(record["steps"]["values"]) == 2
    assert set(record["convergence"]) == {"picard", "anderson", "broyden"}


def test_the_summary_is_readable(run):
    shown = invoke(run, "--depths", "1,16", "--batches", 1)
    assert shown.startswith(f"checkpoint: {find_checkpoint(run)}\nmodel: deq_trellisnet_small, ")
    for words in (
        r"^spectral radius: 0\.\d+ \(median\), 0\.\d+ \(largest\); the plain iteration is stable$",
        r"^gradient against a tight solve: cosine 0\.99",
        r"^solves on valid: 2 systems by Anderson, rtol 0\.01, at most 12 steps; needed \d+ \(median\)",
        r"^  converged +2  converged to the tolerance$",
        r"^  picard, median( +\d\.\de[+-]\d\d){6,}$",
        r"^  16 layers +\d+\.\d\d KiB +0 B ",
        r"^graph and solver history of the DEQ: \d+\.\d\d KiB, 0\.\d\d of those of 16 layers$",
        r"^  DEQ +[\d.]+ +[\d.]+$",
        rf"^written: {run / 'inspect.json'}$",
    ):
        assert re.search(words, shown, re.MULTILINE), words


def test_only_its_own_file_is_replaced(run):
    (run / "inspect.json").write_text("an older one")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    invoke(run, "--depths", "1", "--batches", 1)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert set(after) == set(before)
    assert [path.name for path in before if before[path] != after[path]] == ["inspect.json"]


def test_a_checkpoint_without_a_run(run, tmp_path):
    lonely = shutil.move(find_checkpoint(run), tmp_path / "lonely")
    record = json.loads(invoke(lonely, "--depths", "2", "--json"))
    assert record["checkpoint"] == str(lonely)
    assert json.loads((lonely / "inspect.json").read_text()) == record


def test_figures_are_drawn_from_the_file(run, tmp_path):
    invoke(run, "--depths", "1,2", "--batches", 1)
    for name in ("convergence", "steps", "memory", "time"):
        assert all(path.stat().st_size for path in draw(name, [run], tmp_path / "figures"))


def test_a_model_without_an_equilibrium_is_said_to_be_one(tmp_path):
    train(recipe(COPY, "model={name='gru_copy_memory', widths=[8]}", "train.steps=1"), tmp_path)
    shown = invoke(tmp_path)
    assert "note: The model has no equilibrium" in shown
    assert re.search(r"^  gru_copy_memory +\d", shown, re.MULTILINE)
    assert "spectral" not in shown


def test_another_solver_and_a_learned_one(run, tmp_path, run_main):
    record = json.loads(invoke(run, "--depths", "1", "--batches", 1, "--solver", "picard", "--json"))
    assert (record["solver"], record["steps"]["solver"]) == ("picard", "Picard")
    assert set(record["convergence"]) == {"picard", "anderson", "broyden"}
    quick = ("fit.unroll=3", "fit.accept=0.9", "solver.hidden=4", "solver.width=4")
    fit = ["hyper", run, "--steps", 2, *(word for one in quick for word in ("--set", one))]
    assert CliRunner().invoke(cli.app, list(map(str, fit)), catch_exceptions=False).exit_code == 0
    record = json.loads(invoke(run, "--depths", "1", "--batches", 1, "--solver", f"hyper:{run}", "--json"))
    assert (record["solver"], record["steps"]["solver"]) == (f"hyper:{run}", "HyperAnderson")
    curves = record["convergence"]
    assert list(curves) == ["picard", "anderson", "broyden", "hyper"]
    assert len(curves["hyper"]["median"]) == len(curves["anderson"]["median"])
    draw("convergence", [run], tmp_path / "figures")
    drawn = (tmp_path / "figures" / "convergence.csv").read_text().splitlines()
    assert any(",hyper," in line for line in drawn)
    other = tmp_path / "other"
    train(recipe(COPY, "train.steps=1"), other)
    code, _, error = run_main("inspect", other, "--solver", f"hyper:{run}")
    assert code == 2
    assert "was fitted to another model" in error
    assert not (other / "inspect.json").exists()


def test_without_an_equilibrium_there_is_no_solver_to_set(tmp_path, run_main):
    train(recipe(COPY, "model={name='gru_copy_memory', widths=[8]}", "train.steps=1"), tmp_path)
    code, _, error = run_main("inspect", tmp_path, "--solver", "anderson")
    assert code == 2
    assert "the model has no equilibrium, so there is no solver to set" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--solver", "andersn"), "did you mean 'anderson'"),
        (("--solver", "hyper:nowhere"), "no learned solver at nowhere"),
        (("--split", "vlaid"), "unknown split 'vlaid'; did you mean 'valid'"),
        (("--depths", "1,x"), "--depths must be whole numbers with commas between, e.g. 1,8,30; got '1,x'"),
        (("--depths", "0"), "depths must be an integer of at least 1, got 0"),
        (("--batches", "0"), "batches must be an integer of at least 1, got 0"),
        (("--which", "bets"), "unknown checkpoint 'bets'; did you mean 'best'"),
    ],
)
def test_a_wrong_option_ends_with_one_line(run, run_main, options, words):
    code, out, error = run_main("inspect", run, *options)
    assert (code, out) == (2, "")
    assert error.startswith("equipoise: ")
    assert error.count("\n") == 1
    assert words in error
    assert not (run / "inspect.json").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(run, run_main, monkeypatch):
    def full(folder, needed_bytes=0):
        raise OSError(30, "Read-only file system", str(folder))

    monkeypatch.setattr("equipoise.train.checkpoint.check_writable", full)
    monkeypatch.setattr("equipoise.train.inspection.open_run", lambda *_, **__: pytest.fail("nothing should be loaded"))
    code, _, error = run_main("inspect", run)
    assert (code, error) == (2, f"equipoise: {run}: Read-only file system\n")
