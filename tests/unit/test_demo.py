"""The demo: what it writes and says, what must hold, and what happens to folders and interrupted runs."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys

import pytest

from equipoise import Picard, Stop, Unroll
from equipoise.plots.report import Page
from equipoise.solvers import load_solver
from equipoise.train.evaluate import AGREEMENT, SOLVED
from equipoise.train.load import load
from equipoise.train.recipe import Recipe
from equipoise.train.tracking import read_metrics
from examples import demo

MIB = 2**20


def score(loss, residual):
    return {"loss": loss, "solve_residual_p95": residual}


def memory(deq, penalised, stack):
    rows = {"DEQ": deq, "DEQ, penalty": penalised, "8 layers": stack / 4, "30 layers": stack}
    return [{"name": name, "graph": 0.75 * kept, "history": 0.25 * kept} for name, kept in rows.items()]


LEARNED = {"steps": {"anderson": 9.0, "learned": 7.0}, "residual": 1e-2}
GOOD = {"scores": {"16": score(2.0, 1e-3), "40": score(2.001, 1e-4)}}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folder and the output of a quick run."""
    out = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr(demo, "say", lines.append)
        code = demo.main(["--quick", "--out", str(out)])
    return out, code, "\n".join(lines)


def test_a_quick_run_ends_well_and_says_what_holds(quick):
    out, code, said = quick
    assert code == 0, said
    assert said.count("\nholds: ") == 4
    assert "DOES NOT HOLD" not in said
    assert f"report: {out / 'report.html'}" in said
    assert sorted(path.name for path in out.iterdir()) == sorted([*demo.OURS, demo.MARK])


def test_the_memory_that_is_claimed_is_that_of_the_inspection(quick):
    out, _, said = quick
    rows = json.loads((out / "deq" / "inspect.json").read_text(encoding="utf-8"))["memory"]
    kept = {row["name"]: row["graph"] + row["history"] for row in rows}
    assert list(kept)[:2] == ["DEQ", "DEQ, penalty"]
    # A step with the penalty keeps a second evaluation and its derivative: more than one graph, less than five.
    assert kept["DEQ"] < kept["DEQ, penalty"] < 5 * kept["DEQ"]
    ratio = kept["30 layers"] / kept["DEQ, penalty"]
    assert ratio >= 5
    assert f"That is 1/{ratio:.1f} of it;" in said


def test_both_are_trained_from_one_start_on_the_same_batches(quick):
    out, _, _ = quick
    deq, twin = (
        [record["train"] for record in read_metrics(out / name / "metrics.jsonl") if "train" in record]
        for name in ("deq", "twin")
    )
    assert (deq[0]["phase"], deq[-1]["phase"]) == ("warmup", "equilibrium")
    assert deq[0]["nats"] == twin[0]["nats"]  # as stacks of two layers they are one model, bit for bit
    assert deq[0]["grad_norm"] == twin[0]["grad_norm"]
    assert deq[-1]["nats"] != twin[-1]["nats"]
    assert twin[-1]["forward"]["nfe"] == demo.DEPTH
    assert twin[-1]["backward"] == {}


def test_the_report_needs_no_other_file_and_has_the_numbers(quick):
    out, _, _ = quick
    text = (out / "report.html").read_text(encoding="utf-8")
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert re.findall(r'src="(?!data:image/svg)', text) == []
    assert "href=" not in text
    assert "@import" not in text
    assert text.count("<img ") == len(demo.FIGURES)
    assert 'name="viewport"' in text
    for model in results["models"].values():
        for found in model["scores"].values():
            assert f"{found['loss']:.3f}" in text
            assert f"{found['solve_residual_p95']:.1e}" in text
    assert text.count("<b>holds</b>") == 4
    for sample in results["texts"].values():
        assert sample.startswith(demo.PROMPT)
        assert len(sample) == len(demo.PROMPT) + demo.QUICK_CHARACTERS
    for command in ("--resume", "evaluate", "generate", "inspect", "plot", "hyper"):
        assert (command if command.startswith("-") else f"equipoise {command}") in text
    assert results["inspection"]["environment"]["packages"]["torch"] in text


def test_the_learned_solver_is_one_of_the_run(quick):
    out, _, said = quick
    learned = json.loads((out / "results.json").read_text(encoding="utf-8"))["learned"]
    assert learned["steps"]["learned"] < learned["steps"]["anderson"] <= 60
    solver = load_solver(out / "deq", load(out / "deq", which="latest"))
    assert solver.num_parameters == learned["parameters"]
    points = json.loads((out / "deq" / "pareto.json").read_text(encoding="utf-8"))["points"]
    assert {point["solver"] for point in points} == {"anderson", "hyper", f"{demo.DEPTH} layers"}
    assert f"The learned solver needs fewer steps on held-out text: {learned['steps']['learned']:.1f}" in said


def test_figures_are_files_too(quick):
    out, _, _ = quick
    kinds = ("png", "svg", "csv")
    assert {path.name for path in (out / "figures").iterdir()} == {f"{n}.{k}" for n in demo.FIGURES for k in kinds}


def test_its_commands_give_its_recipes(tmp_path):
    for part in demo.parts_of(tmp_path / "a b", 70, quick=False):
        words = shlex.split(part.command)
        assert words[:5] == ["equipoise", "train", "recipes/demo.toml", "--out", str(part.out)]
        changes = [change for flag, change in zip(words[5::2], words[6::2], strict=True) if flag == "--set"]
        assert Recipe.read(demo.RECIPE, changes) == part.recipe


def test_the_twin_is_the_stack_and_else_the_same(tmp_path):
    deq, twin = (part.recipe for part in demo.parts_of(tmp_path, None, quick=False))
    stop = Stop(rtol=0.0, max_steps=demo.DEPTH, select="last")
    assert (twin.solver, twin.adjoint, twin.stop, twin.evaluation.stop) == (Picard(), Unroll(), stop, stop)
    assert twin.penalty.weight == 0
    plan = {name: getattr(deq, name) for name in ("solver", "adjoint", "stop", "evaluation", "penalty")}
    assert dataclasses.replace(twin, **plan) == deq
    assert deq == Recipe.read(demo.RECIPE)


def test_counts_go_with_the_number_of_steps(tmp_path):
    planned = Recipe.read(demo.RECIPE)
    half, _ = demo.parts_of(tmp_path, planned.train.steps // 2, quick=False)
    recipe = half.recipe
    assert recipe.train.steps == planned.train.steps // 2
    assert recipe.warmup.steps == pytest.approx(planned.warmup.steps / 2, abs=1)
    assert recipe.train.evaluate_every == pytest.approx(planned.train.evaluate_every / 2, abs=1)


def test_what_holds():
    found = demo.verdicts(GOOD, memory(MIB, 2 * MIB, 10 * MIB), LEARNED)
    assert [holds for holds, _ in found] == [True, True, True, True]
    assert "takes 2.0 MiB (1.0 MiB without" in found[0][1]
    assert "That is 1/5.0 of it; at most 1/5 is wanted." in found[0][1]
    assert "1.0e-03 within 16 solver steps and 1.0e-04 within 40 solver steps" in found[1][1]
    assert "0.05 % apart" in found[2][1]
    assert "7.0 to a relative residual of 0.01 (the mean of sequences), Anderson 9.0. That is 78 % of" in found[3][1]


@pytest.mark.parametrize(
    ("scores", "penalised", "broken"),
    [
        (GOOD["scores"], 2.1 * MIB, 0),
        ({"16": score(2.0, 1.1 * SOLVED), "40": score(2.0, 1e-4)}, MIB, 1),
        ({"16": score(2.0, 1e-3), "40": score(2.0 * (1 + 1.1 * AGREEMENT), 1e-4)}, MIB, 2),
        ({"16": score(2.0, 1e-3), "40": score(2.0, float("nan"))}, MIB, 1),
        ({"16": score(float("nan"), 1e-3), "40": score(2.0, 1e-4)}, MIB, 2),
        ({"16": score(2.0, 1e-3), "40": score(float("nan"), 1e-4)}, MIB, 2),
    ],
)
def test_what_does_not_hold_is_said(scores, penalised, broken):
    found = demo.verdicts({"scores": scores}, memory(MIB, penalised, 10 * MIB), LEARNED)
    assert not found[broken][0]


@pytest.mark.parametrize("needed", [9.0, 7.3])
def test_a_learned_solver_that_is_hardly_faster_does_not_hold(needed):
    slow = {**LEARNED, "steps": {"anderson": 9.0, "learned": needed}}
    assert not demo.verdicts(GOOD, memory(MIB, MIB, 10 * MIB), slow)[3][0]


def test_what_does_not_hold_ends_with_code_1(quick, monkeypatch):
    out, _, _ = quick
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    results["verdicts"][1][0] = False
    lines = []
    monkeypatch.setattr(demo, "say", lines.append)
    assert demo._conclude(results, out / "report.html") == 1
    assert any(line.startswith("DOES NOT HOLD: The equilibrium") for line in lines)
    assert lines[-1].startswith("demo: 1 of 4 things that must hold do not")


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "deq").mkdir()
    (tmp_path / "deq" / "precious").write_text("kept")
    assert demo.main(["--quick", "--out", str(tmp_path)]) == 2
    assert "holds something else than a demo" in capsys.readouterr().out
    assert [path.name for path in tmp_path.rglob("*")] == ["deq", "precious"]


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert demo.main(["--quick", "--out", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().out


def test_an_earlier_demo_makes_room_and_nothing_else_does(tmp_path):
    demo.claim(tmp_path)
    (tmp_path / "deq" / "checkpoints").mkdir(parents=True)
    for name in ("report.html", "notes.txt"):
        (tmp_path / name).write_text("old")
    demo.claim(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [demo.MARK, "notes.txt"]


class FakeProcess:
    """A process that runs until it is told to end."""

    def __init__(self, command, **options):
        self.command, self.options, self.returncode, self.calls = command, options, None, []

    def poll(self):
        return self.returncode

    def terminate(self):
        self.calls.append("terminate")
        self.returncode = 130

    def wait(self):
        self.calls.append("wait")
        self.returncode = 0 if self.returncode is None else self.returncode
        return self.returncode


@pytest.fixture
def started(monkeypatch):
    """Processes that would have been started."""
    processes = []

    def popen(command, **options):
        processes.append(FakeProcess(command, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return processes


def test_the_twin_is_trained_by_the_command(tmp_path, started):
    _, twin = demo.parts_of(tmp_path, None, quick=True)
    with demo.fitting(twin):
        assert started[0].calls == []
    assert started[0].calls == ["wait"]
    command = started[0].command
    assert command[:4] == [sys.executable, "-m", "equipoise", "train"]
    assert Recipe.read(command[4], command[8::2]) == twin.recipe


@pytest.mark.parametrize("error", [demo.Interrupted("SIGINT"), KeyboardInterrupt()])
def test_an_interruption_ends_both_with_one_signal(tmp_path, started, monkeypatch, capsys, error):
    def interrupted(part):
        raise error

    monkeypatch.setattr(demo, "fit", interrupted)
    assert demo.main(["--quick", "--out", str(tmp_path / "out")]) == 130
    assert started[0].calls == ["terminate", "wait"]
    assert started[0].options["start_new_session"]
    assert "interrupted" in capsys.readouterr().out
    demo.claim(tmp_path / "out")  # the folder can be used again
    assert [path.name for path in (tmp_path / "out").iterdir()] == [demo.MARK]


def test_a_twin_that_fails_is_reported(tmp_path, started, monkeypatch, capsys):
    def broken(part):
        started[0].returncode = 2

    monkeypatch.setattr(demo, "fit", broken)
    assert demo.main(["--quick", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert "training of the 8-layer twin ended with exit code 2" in said
    assert "twin.log" in said


def test_a_page_takes_text_as_text(tmp_path):
    page = Page("a < b")
    page.text("`x & y` <script>")
    page.verdicts([(True, "one"), (False, "two")])
    page.table(["", "n"], [["a", "<1>"]])
    page.texts({"name": "  <kept>\n"})
    page.commands(["a 'b'", "c"])
    text = page.write(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h1>a &lt; b</h1>" in text
    assert "<p><code>x &amp; y</code> &lt;script&gt;</p>" in text
    assert "<b>holds</b>: one" in text
    assert "<li class=bad><b>does not hold</b>: two" in text
    assert "<td>&lt;1&gt;</td>" in text
    assert "<pre>  &lt;kept&gt;\n</pre>" in text
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        page.table([""], [["a", "b"]])
