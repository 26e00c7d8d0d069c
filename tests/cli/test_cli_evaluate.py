"""`equipoise evaluate` and `generate`: what they print, what they write, how they end."""

import json
import re
import shutil

import pytest

from equipoise.train.tracking import read_metrics
from tests.cli.program import invoke, one_line

# Evaluation


def test_a_run_is_scored(copy_run):
    record = json.loads(invoke("evaluate", copy_run, "--json").stdout)
    logged = [r["valid"] for r in read_metrics(copy_run / "metrics.jsonl") if "valid" in r][-1]
    assert (record["run"], record["split"]) == (str(copy_run), "valid")
    assert record["results"][0]["loss"] == pytest.approx(logged["loss"], rel=1e-6)
    other = json.loads(invoke("evaluate", copy_run, "--split", "test", "--json").stdout)
    assert other["results"][0]["loss"] != record["results"][0]["loss"]


def test_scores_are_shown_as_a_table(copy_run):
    shown = invoke("evaluate", copy_run).stdout.splitlines()
    assert shown[0] == f"{copy_run / 'checkpoints' / 'step-000004'}, valid, solver Anderson"
    logged = [r["valid"] for r in read_metrics(copy_run / "metrics.jsonl") if "valid" in r][-1]
    row = dict(zip(re.split(r"\s{2,}", shown[1].strip()), shown[2].split(), strict=True))
    assert float(row["loss"]) == pytest.approx(logged["loss"], rel=1e-4)
    assert list(row)[-5:] == ["residual", "residual p95", "nfe", "failures", "seconds"]


def test_budgets_are_compared(copy_run):
    result = invoke("evaluate", copy_run, "--steps", 1, "--steps", 20, "--json")
    record = json.loads(result.stdout)
    assert [one["steps"] for one in record["results"]] == [1, 20]
    assert record["results"][0]["solve"]["steps_p95"] == 1
    assert f"warning: {record['warnings'][0]}\n" in result.stderr
    result = invoke("evaluate", copy_run, "--steps", 1, "--steps", 20)
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["steps", "1", "20"]
    assert "not an equilibrium's" in result.stderr


def test_a_sweep_with_another_solver(copy_run):
    options = ("--sweep", "stop.max_steps=1:7:3", "--solver", "broyden", "--which", "latest", "--json")
    record = json.loads(invoke("evaluate", copy_run, *options).stdout)
    assert [one["steps"] for one in record["results"]] == [1, 4, 7]
    assert (record["solver"], record["sweep"]) == ("Broyden", "stop.max_steps")
    lines = invoke("evaluate", copy_run, "--sweep", "stop.rtol=0.1,0.01").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["stop.rtol", "0.1", "0.01"]


def test_scores_are_kept(copy_run, tmp_path):
    out = shutil.copytree(copy_run, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    record = json.loads(invoke("evaluate", out, "--json").stdout)
    (path,) = (out / "eval").iterdir()
    assert re.fullmatch(r"valid-\d{8}T\d{6}Z\.json", path.name)
    assert record.pop("file") == str(path)
    assert json.loads(path.read_text()) == record
    assert f"written: {out / 'eval'}" in invoke("evaluate", out, "--split", "test").stdout
    assert len(list((out / "eval").glob("test-*.json"))) == 1


def test_scores_that_cannot_be_kept_are_shown(copy_run, tmp_path, run_main):
    out = shutil.copytree(copy_run, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    (out / "eval").write_text("in the way")
    code, shown, error = run_main("evaluate", out, "--json")
    assert code == 0
    record = json.loads(shown)
    assert record["file"] is None
    assert record["results"][0]["loss"] > 0
    assert error.startswith(f"warning: the results were not written to {out / 'eval'}: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--split", "tset"), "unknown split 'tset'"),
        (("--steps", "0"), "max_steps must be an integer of at least 1"),
        (("--sweep", "stop.max_steps"), "not of the form part.setting=values"),
        (("--sweep", "stop.max_step=1:3"), "did you mean 'max_steps'"),
        (("--steps", "1", "--sweep", "stop.rtol=1e-2"), "give either them or the sweep"),
        (("--solver", "andersn"), "did you mean 'anderson'"),
        (("--solver", "anderson,picard"), "--solver anderson,picard names several, which --pareto compares"),
        (("--pareto", "--sweep", "stop.rtol=1e-2"), "--sweep cannot be used here: --pareto scores after --steps"),
        (("--pareto", "--pictures", "2"), "--pictures cannot be used here"),
        (("--beside", "other"), "--beside cannot be used here: it is a point of --pareto"),
        (("--which", "lates"), "did you mean 'latest'"),
    ],
)
def test_a_wrong_evaluation_ends_with_one_line(copy_run, run_main, options, words):
    code, _, error = run_main("evaluate", copy_run, *options)
    assert code == 2
    assert words in one_line(error)


def test_what_is_no_run_is_refused(tmp_path, run_main):
    for command in ("evaluate", "generate", "inspect"):
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


def test_unreadable_settings_are_refused(copy_run, tmp_path, run_main):
    out = shutil.copytree(copy_run, tmp_path / "run")
    for path in out.rglob("config.json"):
        path.write_text("{")
    for command in ("evaluate", "inspect"):
        code, _, error = run_main(command, out)
        assert code == 2
        assert "config.json cannot be read as JSON" in one_line(error)


def test_data_that_are_gone_are_named(text_run, tmp_path, run_main):
    for command in ("evaluate", "inspect"):
        code, _, error = run_main(command, text_run, "--data-dir", tmp_path)
        assert code == 2
        assert "unknown corpus 'mine'" in one_line(error)
        assert str(tmp_path / "mine") in error


# Generation


def test_text_is_generated(text_run):
    text = invoke("generate", text_run, "--prompt", "a bad", "--length", 12, "--seed", 1).stdout
    assert text.startswith("a bad")
    assert len(text) == len("a bad") + 12 + 1
    assert text.endswith("\n")
    record = json.loads(invoke("generate", text_run, "--prompt", "a bad", "--length", 12, "--seed", 1, "--json").stdout)
    assert record == {"run": str(text_run), "prompt": "a bad", "text": text[:-1], "texts": [text[:-1]]}


def test_several_texts_are_generated(text_run):
    options = ("--prompt", "a", "--length", 9, "--samples", 3)
    texts = json.loads(invoke("generate", text_run, *options, "--json").stdout)["texts"]
    assert len(set(texts)) == 3
    assert all(len(text) == 10 for text in texts)
    assert invoke("generate", text_run, *options).stdout == "\n---\n".join(texts) + "\n"
    cut = invoke("generate", text_run, "--prompt", "a", "--length", 9, "--stop", texts[0][4]).stdout
    assert cut == texts[0][: texts[0].index(texts[0][4], 1)] + "\n"


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
        (("--solver", "picrad"), "did you mean 'picard'"),
        (("--solver", "hyper:nowhere"), "no learned solver at nowhere"),
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
