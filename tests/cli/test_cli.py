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
from typer.testing import CliRunner

from equipoise.adjoints import ADJOINTS
from equipoise.cli import main as cli
from equipoise.models import MODELS
from equipoise.solvers import SOLVERS
from equipoise.tasks import CopyMemoryTask
from equipoise.train.checkpoint import load_checkpoint
from equipoise.train.tracking import read_metrics
from tests.runs import write_corpus

ROOT = Path(__file__).parents[2]

COPY = """
[task]
name = "copy_memory"
length = 5
train_size = 64
test_size = 16
batch_size = 8

[model]
name = "deq_transformer_copy_memory"
d_model = 16
heads = 2
d_inner = 24

[stop]
rtol = 1e-3
max_steps = 6

[adjoint]
name = "implicit"
stop = { rtol = 0.0, max_steps = 5 }

[train]
steps = 4
log_every = 2
evaluate_every = 4
save_every = 2
threads = 1
"""
TEXT = (
    COPY[COPY.index("[stop]") :]
    + """
[task]
name = "language_model"
corpus = "mine"
tokens = "character"
batch_size = 4
length = 8
eval_batch_size = 4

[model]
name = "deq_transformer_small"
d_model = 16
heads = 2
d_inner = 24
memory_length = 64
"""
)


@pytest.fixture
def copy_recipe(tmp_path):
    path = tmp_path / "copy.toml"
    path.write_text(COPY)
    return path


@pytest.fixture(scope="module")
def copy_run(tmp_path_factory):
    """A finished run; not to be changed."""
    return _train(tmp_path_factory.mktemp("copy"), COPY)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """A finished run of a language model; not to be changed."""
    folder = tmp_path_factory.mktemp("text")
    write_corpus(folder / "mine")
    return _train(folder, TEXT, "--data-dir", str(folder))


def _train(folder, text, *options):
    (folder / "recipe.toml").write_text(text)
    result = invoke("train", str(folder / "recipe.toml"), "--out", str(folder / "run"), *options)
    assert result.exit_code == 0, result.output
    return folder / "run"


def invoke(*arguments):
    """Run a command; what it raises is raised."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def run_main(monkeypatch, capsys):
    """A function that runs the program as a shell would: exit code, output, error output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["equipoise", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


def one_line(error):
    """The line that a refusal consists of."""
    assert error.startswith("equipoise: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


# Help


COMMANDS = {
    "train": ("RECIPE", "--out", "--set", "--resume", "--data-dir", "--json"),
    "evaluate": ("RUN", "--split", "--steps", "--data-dir", "--json"),
    "generate": ("RUN", "--prompt", "--length", "--temperature", "--top-k", "--top-p", "--seed", "--json"),
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


# Evaluation


def test_a_run_is_scored(copy_run):
    record = json.loads(invoke("evaluate", copy_run, "--json").stdout)
    logged = [r["valid"] for r in read_metrics(copy_run / "metrics.jsonl") if "valid" in r][-1]
    assert (record["run"], record["split"]) == (str(copy_run), "valid")
    assert record["results"][0]["loss"] == pytest.approx(logged["loss"], rel=1e-6)
    other = json.loads(invoke("evaluate", copy_run, "--split", "test", "--json").stdout)
    assert other["results"][0]["loss"] != record["results"][0]["loss"]


def test_budgets_are_compared(copy_run):
    results = json.loads(invoke("evaluate", copy_run, "--steps", 1, "--steps", 20, "--json").stdout)["results"]
    assert [result["steps"] for result in results] == [1, 20]
    assert results[0]["solve"]["steps_p95"] == 1
    shown = invoke("evaluate", copy_run, "--steps", 1, "--steps", 20).stdout
    assert shown.count("loss: ") == 2
    assert "steps: 1\n" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--split", "tset"), "unknown split 'tset'"), (("--steps", "0"), "max_steps must be an integer of at least 1")],
)
def test_a_wrong_evaluation_ends_with_one_line(copy_run, run_main, options, words):
    code, _, error = run_main("evaluate", copy_run, *options)
    assert code == 2
    assert words in one_line(error)


def test_what_is_no_run_is_refused(tmp_path, run_main):
    for command in ("evaluate", "generate"):
        code, _, error = run_main(command, tmp_path)
        assert code == 2
        assert "neither a checkpoint nor a run" in one_line(error)


def test_a_damaged_checkpoint_is_refused(copy_run, tmp_path, run_main):
    out = shutil.copytree(copy_run, tmp_path / "run")
    for path in out.rglob("model.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    code, _, error = run_main("evaluate", out)
    assert code == 2
    assert "cannot be read" in one_line(error)


# Generation


def test_text_is_generated(text_run):
    text = invoke("generate", text_run, "--prompt", "a bad", "--length", 12, "--seed", 1).stdout
    assert text.startswith("a bad")
    assert len(text) == len("a bad") + 12 + 1
    assert text.endswith("\n")
    record = json.loads(invoke("generate", text_run, "--prompt", "a bad", "--length", 12, "--seed", 1, "--json").stdout)
    assert record == {"run": str(text_run), "prompt": "a bad", "text": text[:-1]}


def test_text_is_shown_as_it_comes(text_run, monkeypatch):
    pieces = []
    monkeypatch.setattr("builtins.print", lambda *words, **options: pieces.append((words, options)))
    invoke("generate", text_run, "--prompt", "hi", "--length", 3)
    assert len(pieces) == 5  # the prompt, three characters, the end of the line
    assert pieces[0] == (("hi",), {"end": "", "flush": True})
    assert all(options["flush"] for _, options in pieces[:-1])


def test_options_of_sampling_are_used(text_run):
    def text(*options):
        return invoke("generate", text_run, "--prompt", "a", "--length", 20, *options).stdout

    greedy = text("--temperature", 0)
    assert greedy == text("--top-k", 1) == text("--top-p", 1e-6) == text("--temperature", 0, "--seed", 9)
    assert text("--seed", 1) != text("--seed", 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--temperature", "-1"), "temperature must be a number"),
        (("--top-k", "0"), "top_k must be an integer of at least 1"),
        (("--top-p", "1.5"), "top_p must be a number"),
        (("--length", "-1"), "length"),
        (("--prompt", "Z"), "'Z' is not among"),
    ],
)
def test_a_wrong_generation_ends_with_one_line(text_run, run_main, options, words):
    code, _, error = run_main("generate", text_run, *options)
    assert code == 2
    assert words in error
    if "Usage" not in error:
        one_line(error)


def test_only_language_models_generate(copy_run, run_main):
    code, _, error = run_main("generate", copy_run)
    assert code == 2
    assert "not the run of a language model" in one_line(error)


# Names


def test_everything_that_can_be_named_is_listed():
    record = json.loads(invoke("list", "--json").stdout)
    assert set(record) == {"models", "tasks", "solvers", "adjoints", "corpora"}
    assert record["models"] == sorted(MODELS)
    assert record["tasks"] == ["copy_memory", "language_model"]
    assert (record["solvers"], record["adjoints"]) == (sorted(SOLVERS), sorted(ADJOINTS))
    assert {"embedded", "ptb"} <= set(record["corpora"])


def test_one_kind_and_a_pattern(run_main):
    record = json.loads(invoke("list", "models", "deq_trellisnet*", "--json").stdout)
    assert record == {"models": [name for name in sorted(MODELS) if name.startswith("deq_trellisnet")]}
    code, out, _ = run_main("list", "tasks")
    assert code == 0
    assert out == "tasks:\n  copy_memory\n  language_model\n"
    code, _, error = run_main("list", "modles")
    assert code == 2
    assert "did you mean 'models'" in one_line(error)


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


def test_importing_the_command_does_not_import_training():
    """Help and completion must be quick: heavy packages are imported by the commands that need them."""
    text = Path(cli.__file__).read_text()
    head = text[: text.index("@app.command()")]
    assert not re.search(r"^(from|import) (equipoise|torch|accelerate)", head, re.MULTILINE)
