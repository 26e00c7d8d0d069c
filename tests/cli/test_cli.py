"""The command: what it prints, what it writes, and how it ends."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from equipoise.cli import main as cli
from equipoise.tasks import CopyMemoryTask
from equipoise.train.checkpoint import load_checkpoint
from equipoise.train.tracking import read_metrics
from tests.cli.program import invoke, one_line

ROOT = Path(__file__).parents[2]

# Help


COMMANDS = {
    "train": ("RECIPE", "--out", "--set", "--resume", "--data-dir", "--json"),
    "evaluate": (
        "RUN",
        "--split",
        "--steps",
        "--sweep",
        "--solver",
        "--which",
        "--set",
        "--pareto",
        "--pictures",
        "--data-dir",
        "--json",
    ),
    "hyper": ("RUN", "--out", "--steps", "--unroll", "--finetune", "--set", "--seed", "--force", "--data-dir"),
    "generate": ("RUN", "--prompt", "--length", "--temperature", "--top-k", "--top-p", "--seed", "--samples", "--json"),
    "inspect": ("RUN", "--split", "--batches", "--depths", "--which", "--data-dir", "--json"),
    "benchmark": ("CASE", "--out", "--shape", "--device", "--rounds", "--json"),
    "plot": ("FIGURE", "RUN", "--out", "--json"),
    "report": ("RUN", "--out", "--json"),
    "export": ("RUN", "OUT", "--dtype", "--which", "--json"),
    "ablate": ("FILE", "--out", "--seeds", "--variant", "--jobs", "--minutes", "--set", "--data-dir", "--json"),
    "data": ("NAME", "--tokens", "--data-dir", "--json"),
    "list": ("KIND", "PATTERN", "--json"),
}


def test_help_names_every_command():
    shown = invoke("--help").output
    assert {command.name or command.callback.__name__ for command in cli.app.registered_commands} == set(COMMANDS)
    for command in COMMANDS:
        assert re.search(rf"^\s+{command}\s", shown, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_names_its_options(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    for option in COMMANDS[command]:
        assert option.lower() in result.output.lower()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_exit_codes(command):
    shown = invoke(command, "--help").output
    assert re.search(rf"^  Examples:\n    equipoise {command}\b", shown, re.MULTILINE)
    codes = re.findall(r"\b(0|1|2|130) [a-z]", shown[shown.index("Exit codes:") :])
    assert codes == ["0", "1", "2", "130"]


def test_examples_name_options_that_exist():
    for command in COMMANDS:
        shown = invoke(command, "--help").output
        examples = re.findall(r"^    equipoise (\S+)(.*)$", shown, re.MULTILINE)
        assert examples
        for named, arguments in examples:
            known = set(re.findall(r"--[a-z-]+", invoke(named, "--help").output))
            assert set(re.findall(r"--[a-z-]+", arguments)) <= known


def test_no_command_shows_help(run_main):
    code, out, error = run_main()
    assert code == 2  # as command lines do when something is missing
    assert "train" in out + error


# Training


def test_training_writes_a_run_and_says_how_it_ended(copy_run, copy_recipe, tmp_path):
    assert {path.name for path in copy_run.iterdir()} >= {"config.json", "env.json", "metrics.jsonl", "checkpoints"}
    result = invoke("train", copy_recipe, "--out", tmp_path / "run", "--set", "train.steps=2", "--json")
    record = json.loads(result.stdout)
    assert (record["step"], record["interrupted"], record["out"]) == (2, None, str(tmp_path / "run"))
    assert record["best"]["checkpoint"] == "step-000002"
    assert record["metrics"]["loss"] > 0


def test_training_in_words(copy_recipe, tmp_path):
    result = invoke("train", copy_recipe, "--out", tmp_path / "run", "--set", "train.steps=1")
    assert "step: 1\n" in result.stdout
    assert re.search(r"^  loss: \d\.\d+$", result.stdout, re.MULTILINE)
    assert "checkpoint: step-000001" in result.stdout


def test_settings_may_be_changed_again_and_again(copy_recipe, tmp_path):
    changes = ("--set", "train.steps=1", "--set", "model.d_inner=8", "--set", "train.steps=2")
    result = invoke("train", copy_recipe, "--out", tmp_path / "run", *changes, "--json")
    assert json.loads(result.stdout)["step"] == 2
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["model"]["d_inner"], config["train"]["steps"]) == (8, 2)


def test_a_run_is_resumed(copy_recipe, tmp_path, run_main):
    assert run_main("train", copy_recipe, "--out", tmp_path / "run", "--set", "train.steps=2")[0] == 0
    code, out, _ = run_main("train", copy_recipe, "--out", tmp_path / "run", "--resume", "--json")
    assert code == 0
    assert json.loads(out)["step"] == 4
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 2, 2, 4, 4]


@pytest.mark.filterwarnings("default::equipoise.EquilibriumWarning")
def test_a_run_that_is_no_equilibrium_says_so(copy_recipe, tmp_path, run_main):
    settings = ("--set", "train.steps=2", "--set", "warmup.steps=3")
    code, out, error = run_main("train", copy_recipe, "--out", tmp_path / "run", *settings)
    assert code == 0
    assert error == (
        "warning: warmup.steps = 3 leaves none of train.steps = 2 for the equilibrium: what is trained is a stack of "
        "2 layers, never a DEQ; give fewer warmup.steps, or more train.steps.\n"
    )
    assert "best: none: up to warmup.steps = 3 the model is a stack of layers" in out
    assert json.loads(run_main("train", copy_recipe, "--out", tmp_path / "b", *settings, "--json")[1])["best"] is None


def test_another_task_does_not_go_on_in_the_folder(copy_recipe, tmp_path, run_main):
    """Losses and scores of one folder would be of two tasks."""
    run = ("train", copy_recipe, "--out", tmp_path / "run")
    assert run_main(*run, "--set", "task.length=10", "--set", "train.steps=2")[0] == 0
    before = (tmp_path / "run" / "config.json").read_text()
    code, _, error = run_main(*run, "--resume")
    assert code == 2
    assert "trained with task.length = 10, this recipe says 5; repeat --set task.length=10, or" in one_line(error)
    assert (tmp_path / "run" / "config.json").read_text() == before
    code, _, error = run_main(*run, "--resume", "--set", "task.length=10")
    assert (code, error) == (0, "going on with train.steps = 4 instead of 2\n")


def test_a_signal_ends_with_130_after_saving(copy_recipe, tmp_path, run_main, monkeypatch):
    step = CopyMemoryTask.training_step

    def signalled(self, model, batch, carry, number):
        os.kill(os.getpid(), signal.SIGINT)
        return step(self, model, batch, carry, number)

    monkeypatch.setattr(CopyMemoryTask, "training_step", signalled)
    code, out, _ = run_main("train", copy_recipe, "--out", tmp_path / "run", "--json")
    assert code == 130
    assert json.loads(out)["interrupted"] == "SIGINT"
    assert (tmp_path / "run" / "checkpoints" / "step-000001" / "trainer.pt").is_file()


# Refusals: one line, exit code 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("trian.steps=1", "did you mean 'train'"),
        ("train.stepz=1", "did you mean 'steps'"),
        ("task.name=copy_memry", "did you mean 'copy_memory'"),
        ("task.lengt=3", "did you mean 'length'"),
        ("model.name=deq_transformer_copy", "did you mean 'deq_transformer_copy_memory'"),
        ("model.d_modell=3", "did you mean 'd_model'"),
        ("model.d_model=wide", "d_model"),
        ("solver.name=anderso", "did you mean 'anderson'"),
        ("train.steps=-1", "steps must be an integer of at least 1, got -1"),
        ("train.steps", "not of the form section.key=value"),
        ("train.threads=0", "threads"),
        ("jitter.low=-6", "at least 1 must remain"),
        ("task.batch_size=65", "exceeds train_size"),
    ],
)
def test_a_wrong_setting_ends_with_one_line(copy_recipe, tmp_path, run_main, change, words):
    code, out, error = run_main("train", copy_recipe, "--out", tmp_path / "run", "--set", change)
    assert (code, out) == (2, "")
    assert words in one_line(error)


def test_a_missing_recipe_is_suggested(copy_recipe, tmp_path, run_main):
    code, _, error = run_main("train", tmp_path / "copi.toml", "--out", tmp_path / "run")
    assert code == 2
    assert f"did you mean {copy_recipe}?" in one_line(error)
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_is_not_toml_is_refused(tmp_path, run_main):
    (tmp_path / "bad.toml").write_text("[task\n")
    code, _, error = run_main("train", tmp_path / "bad.toml", "--out", tmp_path / "run")
    assert code == 2
    assert "cannot be read as TOML" in one_line(error)


def test_missing_data_say_how_to_get_them(copy_recipe, tmp_path, run_main):
    changes = ("--set", 'task={name="language_model", corpus="ptb"}')
    code, _, error = run_main("train", copy_recipe, "--out", tmp_path / "run", *changes, "--data-dir", tmp_path)
    assert code == 2
    assert "ptb.train.txt" in one_line(error)


def test_a_folder_that_cannot_be_written_is_refused_at_once(copy_recipe, run_main, monkeypatch):
    monkeypatch.setattr(CopyMemoryTask, "data", lambda self: pytest.fail("no data should be loaded"))
    code, _, error = run_main("train", copy_recipe, "--out", copy_recipe / "run")
    assert code == 2
    assert "is a file, not a folder" in one_line(error)


def test_another_run_is_not_overwritten(copy_run, copy_recipe, run_main):
    code, _, error = run_main("train", copy_recipe, "--out", copy_run)
    assert code == 2
    assert "holds another run" in one_line(error)


def test_a_folder_without_a_checkpoint_is_not_resumed(copy_recipe, tmp_path, run_main):
    code, _, error = run_main("train", copy_recipe, "--out", tmp_path / "run", "--resume")
    assert code == 2
    assert "no checkpoint to resume from" in one_line(error)


def test_another_model_does_not_resume_a_run(copy_run, copy_recipe, tmp_path, run_main):
    out = shutil.copytree(copy_run, tmp_path / "run")
    code, _, error = run_main("train", copy_recipe, "--out", out, "--resume", "--set", "model.d_model=8")
    assert code == 2
    assert "step-000004" in one_line(error)


def test_a_run_that_dies_of_its_gradients_says_so_in_one_line(copy_recipe, tmp_path, run_main, monkeypatch):
    step = CopyMemoryTask.training_step

    def broken(self, *arguments):
        losses, carry = step(self, *arguments)
        return {"loss": losses["loss"] * math.nan}, carry

    monkeypatch.setattr(CopyMemoryTask, "training_step", broken)
    code, _, error = run_main("train", copy_recipe, "--out", tmp_path / "run", "--set", "train.clip.give_up=1")
    assert code != 0
    assert "Lower the learning rate" in one_line(error)


def test_a_bug_is_not_hidden_in_one_line(copy_recipe, tmp_path, monkeypatch):
    def broken(self):
        raise AssertionError("a bug")

    monkeypatch.setattr(CopyMemoryTask, "data", broken)
    monkeypatch.setattr(sys, "argv", ["equipoise", "train", str(copy_recipe), "--out", str(tmp_path / "run")])
    with pytest.raises(AssertionError, match="a bug"):
        cli.main()


@pytest.mark.parametrize(
    "arguments", [("train",), ("train", "x.toml"), ("evaluate",), ("nonsense",), ("list", "--what")]
)
def test_a_wrong_command_line_ends_with_2(run_main, arguments):
    code, out, error = run_main(*arguments)
    assert (code, out) == (2, "")
    assert "Usage" in error or "Error" in error


# As a program of its own


def shell(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "equipoise", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, **options)


def test_the_program_refuses_with_one_line(tmp_path):
    done = shell("train", ROOT / "recipes" / "copy_memory.toml", "--out", tmp_path, "--set", "train.stepz=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'steps'" in one_line(done.stderr)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_program_goes_on_from_there(copy_recipe, tmp_path):
    """Against a run that was left alone, bit for bit."""
    settings = ("--set", "train.steps=40", "--set", "train.log_every=1", "--set", "train.save_every=1000")
    settings = (*settings, "--set", "train.evaluate_every=40", "--set", "model.dropout=0.1", "--json")
    command = [
        sys.executable,
        "-m",
        "equipoise",
        "train",
        str(copy_recipe),
        "--out",
        str(tmp_path / "parts"),
        *settings,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "parts" / "metrics.jsonl"
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 4):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert 3 < json.loads(out)["step"] < 40
    assert shell("train", copy_recipe, "--out", tmp_path / "parts", "--resume", *settings).returncode == 0
    assert invoke("train", copy_recipe, "--out", tmp_path / "whole", *settings).exit_code == 0
    losses, weights = [], []
    for out in (tmp_path / "parts", tmp_path / "whole"):
        losses.append([r["train"]["loss"] for r in read_metrics(out / "metrics.jsonl") if "train" in r])
        weights.append(load_checkpoint(out / "checkpoints" / "step-000040").model)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 40
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] | weights[1])


@pytest.mark.slow
def test_the_program_runs_without_the_training_extra():
    """A person who has not installed it is told what to install."""
    code = "import sys; sys.modules['typer'] = None; sys.argv = ['equipoise']; import equipoise.__main__"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "the command needs the extra [train]: pip install 'equipoise[train]'\n"


@pytest.mark.slow
def test_importing_the_command_does_not_import_training():
    """Help must be quick: heavy packages are imported by the commands that need them."""
    heavy = ("accelerate", "torchmetrics", "matplotlib", "safetensors", "equipoise.train", "equipoise.models")
    code = f"import sys, equipoise.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_a_package_that_is_missing_is_named(copy_run, run_main, monkeypatch):
    def missing(*arguments, **options):
        raise ModuleNotFoundError("No module named 'torchmetrics'", name="torchmetrics")

    monkeypatch.setattr("equipoise.train.evaluate.score_run", missing)
    code, _, error = run_main("evaluate", copy_run)
    assert code == 2
    assert "needs the package torchmetrics: pip install 'equipoise[train]'" in one_line(error)


def test_a_package_that_a_model_needs_is_named(copy_recipe, tmp_path, run_main, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    settings = (
        'task={name="classification", data="digits", options={size=8, train_size=8, test_size=8}, batch_size=4}',
    )
    changes = [part for one in (*settings, 'model={name="timm_resnet50"}') for part in ("--set", one)]
    code, _, error = run_main("train", copy_recipe, "--out", tmp_path / "run", *changes)
    assert code == 2
    assert "'resnet50' needs timm, which is not installed: pip install timm" in one_line(error)


def test_ctrl_c_says_what_is_kept(copy_run, copy_recipe, tmp_path, run_main, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    run = shutil.copytree(copy_run, tmp_path / "run")
    work = ("train.evaluate.score_run", "train.inspection.inspect_run", "generate.sample_texts")
    for name in (*work, "tasks.CopyMemoryTask.training_step"):
        monkeypatch.setattr(f"equipoise.{name}", interrupted)
    cases = {
        ("evaluate", run): "interrupted: no scores were written\n",
        ("inspect", run): "interrupted: nothing was written\n",
        ("generate", run): "interrupted\n",
        ("train", copy_recipe, "--out", tmp_path / "new"): "interrupted: no checkpoint was written\n",
        ("train", copy_recipe, "--out", run, "--resume", "--set", "train.steps=6"): (
            "going on with train.steps = 6 instead of 4\ninterrupted: --resume goes on from the newest checkpoint\n"
        ),
    }
    for arguments, said in cases.items():
        code, _, error = run_main(*arguments)
        assert (code, error) == (130, said), arguments


def test_ctrl_c_keeps_what_was_measured(copy_run, tmp_path, run_main, monkeypatch):
    from equipoise.train.pareto import FILE, write_json

    calls, run = [], shutil.copytree(copy_run, tmp_path / "run")

    def interrupted(path, record):
        if len(calls) % 2:
            raise KeyboardInterrupt
        calls.append(path)
        write_json(path, record)

    monkeypatch.setattr("equipoise.train.pareto.write_json", interrupted)
    command = ("evaluate", run, "--pareto", "--solver", "anderson,picard", "--steps", 1, "--steps", 2)
    code, _, error = run_main(*command)
    assert code == 130
    assert error.endswith(f"interrupted: {run / FILE} has what was measured\n")
    code, _, error = run_main(*command)  # the file is an older one now
    assert code == 130
    assert error.endswith("interrupted: nothing was measured\n")


def test_ctrl_c_ends_with_130(copy_run, run_main, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("equipoise.train.evaluate.score_run", interrupted)
    assert run_main("evaluate", copy_run)[0] == 130


def test_errors_of_several_lines_become_one(copy_run, run_main, monkeypatch):
    def failed(*arguments, **options):
        raise ValueError("one\n  two")

    monkeypatch.setattr("equipoise.train.evaluate.score_run", failed)
    code, _, error = run_main("evaluate", copy_run)
    assert (code, error) == (2, "equipoise: one two\n")
