"""`equipoise evaluate` and `generate`: what they print, what they write, how they end."""

import json
import re
import shutil

import pytest
import torch

from equipoise import Anderson, HyperAnderson, Ladder, override
from equipoise._module import solutions_of
from equipoise.bench.harness import Sample
from equipoise.cli.evaluate import _show_pareto
from equipoise.generate import Sampling, sample_text
from equipoise.solvers import save_solver
from equipoise.train.evaluate import score
from equipoise.train.load import load, open_run
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


def test_unsolved_systems_are_handed_to_anderson(copy_run):
    """Two plain steps solve nothing, so that Anderson takes as many again, from where they ended."""
    options = ("--solver", "picard", "--steps", 2, "--json")
    plain = json.loads(invoke("evaluate", copy_run, *options).stdout)
    record = json.loads(invoke("evaluate", copy_run, *options, "--guard").stdout)
    assert (plain["guard"], plain["solver"]) == (False, "Picard")
    assert (record["guard"], record["solver"]) == (True, "Ladder (Picard, Anderson)")
    (before,), (after,) = plain["results"], record["results"]
    assert after["solve"]["nfe"] == 2 * before["solve"]["nfe"]
    assert after["solve"]["residual_p95"] < before["solve"]["residual_p95"]
    opened = open_run(copy_run, "valid", device="cpu")
    with override(opened.model, solver=Ladder((Anderson(), Anderson()))):
        truth = score(opened, "valid")
    asked = json.loads(invoke("evaluate", copy_run, "--solver", "anderson", "--guard", "--json").stdout)
    assert asked["solver"] == "Ladder (Anderson, Anderson)"
    assert asked["results"][0]["loss"] == pytest.approx(truth["loss"], rel=1e-5)
    assert "--steps 2 --guard takes 4" in " ".join(invoke("evaluate", "--help").stdout.split())


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


def test_a_learned_solver_is_named_as_it_was_given(copy_run, tmp_path):
    run = shutil.copytree(copy_run, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    model = load(run)
    with solutions_of(model) as solutions:
        model(torch.zeros(2, 25, dtype=torch.long))
    solver = HyperAnderson.for_sequence(solutions[0][0].value.shape[-1], None)
    save_solver(solver, tmp_path / "mine" / "solver.safetensors", model)
    shown = invoke("evaluate", run, "--solver", f"hyper:{tmp_path / 'mine'}").stdout.splitlines()
    assert shown[0].endswith(f"valid, solver HyperAnderson (hyper:{tmp_path / 'mine'})")
    (file,) = (run / "eval").iterdir()
    assert json.loads(file.read_text())["asked"] == f"hyper:{tmp_path / 'mine'}"


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
        (("--pareto", "--solver", "anderson, ,picard"), "--solver 'anderson, ,picard' has an empty name; give names"),
        (("--pareto", "--solver", ""), "--solver '' has an empty name"),
        (("--pareto", "--pictures", "2"), "--pictures cannot be used here"),
        (("--pareto", "--guard"), "--guard cannot be used here: --pareto counts the steps of one solver"),
        (("--guard",), "guard: the model's own solver is Anderson already, and would hand on to itself; leave out"),
        (("--guard", "--solver", "ladder"), "a Ladder hands on what it leaves unsolved already"),
        (("--guard", "--sweep", "solver.memory=2,3"), "solver.memory cannot be varied with a guard"),
        (("--beside", "other"), "--beside cannot be used here: it is a point of --pareto"),
        (("--most", "2"), "--most cannot be used here: scores are of all batches; --pareto may do with fewer"),
        (("--which", "lates"), "did you mean 'latest'"),
    ],
)
def test_a_wrong_evaluation_ends_with_one_line(copy_run, run_main, options, words):
    code, _, error = run_main("evaluate", copy_run, *options)
    assert code == 2
    assert words in one_line(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", "0"), "max_steps must be an integer of at least 1, got 0"),
        (("--solver", "andersen"), "did you mean 'anderson'"),
        (("--solver", "hyper:"), "there is no path after hyper:; give the file or the folder of a run"),
        (("--solver", "hyper:nowhere"), "no learned solver at nowhere"),
        (("--pareto", "--solver", "anderson,hyper:"), "there is no path after hyper:"),
    ],
)
def test_what_can_be_refused_is_before_anything_is_read(tmp_path, run_main, monkeypatch, options, words):
    """Here there is not even a run. A learned solver in the working folder is not what `hyper:` means."""
    (tmp_path / "hyper").mkdir()
    (tmp_path / "hyper" / "solver.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    code, _, error = run_main("evaluate", "run", *options)
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


def test_metric_against_time_is_told_as_it_is_measured(copy_run, tmp_path):
    out = shutil.copytree(copy_run, tmp_path / "run")
    options = ("--pareto", "--solver", " anderson , picard", "--steps", 2, "--steps", 1)
    result = invoke("evaluate", out, *options)
    points = {(p["solver"], p["steps"]): p for p in json.loads((out / "pareto.json").read_text())["points"]}
    after = [", ".join(f"{name} {points[name, k]['metric']:.6g}" for name in ("anderson", "picard")) for k in (1, 2)]
    said = result.stderr.splitlines()
    assert said[:2] == [f"after 2 steps: {after[1]} (1 of 2)", f"after 1 step: {after[0]} (2 of 2)"]
    assert all(line.startswith("warning: times ") for line in said[2:])  # of a millisecond each
    rows = [line.split() for line in result.stdout.splitlines()[2:6]]
    assert [row[3] for row in rows] == [
        f"{points[name, k]['metric']:.6g}" for k in (1, 2) for name in ("anderson", "picard")
    ]
    few = invoke("evaluate", out, *options, "--most", 1, "--json")
    assert "after " not in few.stderr.splitlines()[:1]
    assert json.loads(few.stdout)["most"] == 1


@pytest.mark.parametrize(("times", "warned"), [((1e-3, 1e-3, 2e-3, 2e-3), True), ((1e-3, 1e-3, 1.1e-3), False)])
def test_times_that_vary_are_warned_of(copy_run, tmp_path, monkeypatch, times, warned):
    out, sample = shutil.copytree(copy_run, tmp_path / "run"), Sample.of(times)
    monkeypatch.setattr("equipoise.train.pareto.in_turns", lambda works, *_, **__: dict.fromkeys(works, sample))
    options = ("--pareto", "--solver", "anderson", "--steps", 1, "--most", 1)
    text = (
        "warning: times vary by 100 % from call to call (anderson after 1 step): other work probably ran on this "
        "machine; measure again when nothing else runs."
    )
    for form in ((), ("--json",)):
        said = [line for line in invoke("evaluate", out, *options, *form).stderr.splitlines() if "warning" in line]
        assert said == ([text] if warned else [])


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (None, "hyper: 2.21 times as fast as anderson at 0.865"),
        (
            "at least",
            "hyper: at least 2.21 times as fast as anderson at 0.865 (hyper has it after the fewest steps that were "
            "measured: give fewer --steps)",
        ),
        (
            "at most",
            "hyper: at most 2.21 times as fast as anderson at 0.865 (anderson has it after the fewest steps that were "
            "measured: give fewer --steps)",
        ),
        (
            "unknown",
            "hyper: how much faster than anderson at 0.865 is not known (both have it after the fewest steps that were "
            "measured: give fewer --steps)",
        ),
    ],
)
def test_a_speed_up_that_is_bounded_is_said_so(capsys, bound, words):
    found = {"target": 0.865, "values": [2.208], "mean": 2.208, "bound": bound}
    record = {"points": [], "reference": "anderson", "checkpoint": "c", "run": "r", "split": "valid"}
    _show_pareto({**record, "metric": "accuracy", "speedup": {"hyper": found}})
    assert capsys.readouterr().out.splitlines()[-2] == words


def test_a_solver_that_does_not_reach_the_metric_is_said_so(capsys):
    def point(solver, seed, steps):
        return {"solver": solver, "seed": seed, "steps": steps, "metric": 0.8, "ms": 1.0, "residual": 0.1}

    points = [point("anderson", 0, 12), point("picard", 0, 1), *(point("hyper", seed, 6) for seed in range(3))]
    missed = {"target": 0.865, "mean": None}
    record = {"points": points, "reference": "anderson", "at": 12, "metric": "accuracy", "split": "valid"}
    record |= {"checkpoint": "c", "run": "r", "speedup": {"anderson": {"target": 0.865, "values": [1.0], "mean": 1.0}}}
    record["speedup"] |= {"picard": {**missed, "values": [None]}, "hyper": {**missed, "values": [None, 2.0, None]}}
    _show_pareto(record)
    target = "reach accuracy 0.865 (anderson after 12 steps, within half a percent)"
    shown = capsys.readouterr().out.splitlines()
    assert shown[-3:-1] == [f"picard: does not {target} in 1 step", f"hyper: 2 of 3 seeds do not {target} in 6 steps"]


# Generation


def test_text_by_a_guarded_solver(text_run):
    def text(**options):
        return "".join(sample_text(text_run, "a", 6, Sampling(temperature=0), **options))

    assert len(text(solver="picard", guard=True)) == 7
    shown = invoke("generate", text_run, "--length", 7, "--seed", 1, "--solver", "picard", "--guard", "--json").stdout
    assert json.loads(shown)["texts"]
    with pytest.raises(ValueError, match="a Ladder hands on"):
        text(solver="ladder", guard=True)
    with pytest.raises(ValueError, match="is Anderson already"):
        text(guard=True)


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
