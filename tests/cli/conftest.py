"""Fixtures of the tests of the command."""

import sys

import pytest

from equipoise.cli import main as cli
from tests.cli.program import COPY, TEXT, train
from tests.runs import write_corpus


@pytest.fixture
def copy_recipe(tmp_path):
    path = tmp_path / "copy.toml"
    path.write_text(COPY)
    return path


@pytest.fixture(scope="session")
def copy_run(tmp_path_factory):
    """A finished run; not to be changed."""
    return train(tmp_path_factory.mktemp("copy"), COPY)


@pytest.fixture(scope="session")
def text_run(tmp_path_factory):
    """A finished run of a language model; not to be changed."""
    folder = tmp_path_factory.mktemp("text")
    write_corpus(folder / "mine")
    return train(folder, TEXT, "--data-dir", str(folder))


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
