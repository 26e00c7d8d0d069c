"""`equipoise export`: what it writes, and how it refuses."""

import json

import equipoise
from tests.cli.program import invoke, one_line


def test_a_run_is_exported_and_the_folder_is_scored(copy_run, tmp_path):
    record = json.loads(invoke("export", copy_run, tmp_path / "small", "--json").stdout)
    folder = tmp_path / "small"
    assert record["out"] == str(folder)
    assert record["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert {file.name for file in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert equipoise.load(folder).training is False
    assert "recall" in invoke("evaluate", folder, "--steps", 4).stdout
    assert (folder / "eval").is_dir()
    again = json.loads(invoke("export", copy_run, folder, "--force", "--json").stdout)
    assert again == record
    assert not (folder / "eval").exists()


def test_what_is_wrong_is_said_in_one_line(copy_run, tmp_path, run_main):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    invoke("export", copy_run, tmp_path / "there")
    wrong = {
        "there is there and not empty; give a new folder. force=True (--force) replaces": (
            copy_run,
            tmp_path / "there",
        ),
        "is not an exported model; give a new folder": (copy_run, tmp_path / "mine"),
        "unknown dtype (--dtype) 'bf61'; did you mean 'bf16'": (copy_run, tmp_path / "small", "--dtype", "bf61"),
        "neither a checkpoint nor a run": (tmp_path, tmp_path / "small"),
    }
    for words, arguments in wrong.items():
        code, _, error = run_main("export", *arguments)
        assert code == 2
        assert words in one_line(error)
