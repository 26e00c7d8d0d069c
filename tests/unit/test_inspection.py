"""What `inspect` measures, against plain computations on the same model and data."""

import json
import math
import statistics
import warnings

import pytest
import torch

from equipoise import DEQ, Stop, override
from equipoise._solution import EquilibriumWarning
from equipoise.train import inspection
from equipoise.train.inspection import inspect_run, write_inspection
from equipoise.train.load import find_checkpoint, load, open_run
from equipoise.train.loop import train
from tests.runs import COPY, recipe, text_recipe

TINY = (
    "model={name='deq_trellisnet_small', embedding_size=6, hidden_size=6, init_std=0.3, dropout=0.2}",
    "task.eval_batch_size=2",
    "task.eval_length=6",
    "stop={rtol=1e-2, max_steps=12}",
    "adjoint={name='implicit', stop={rtol=1e-2, max_steps=12}}",
    "train.steps=1",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a model that has an equilibrium from the start; not to be changed."""
    folder = tmp_path_factory.mktemp("inspection")
    train(text_recipe(folder / "mine", *TINY), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def record(run):
    return inspect_run(run, batches=2, depths=(1, 4, 8, 16))


@pytest.fixture(scope="module")
def segments(run):
    """The first two held-out batches with the memory each begins with, and the model."""
    model, opened = load(run), open_run(run, "valid")
    found, memory = [], None
    for batch, _ in zip(opened.splits.held_out["valid"](), range(2), strict=False):
        found.append((batch, memory))
        with torch.no_grad():
            memory = model(batch.inputs, targets=batch.targets, memory=memory).memory
    return model, found


def outputs(segments, **plan):
    """What the model gives for the segments."""
    model, found = segments
    with override(model, **plan) if plan else torch.no_grad(), torch.no_grad():
        return [model(batch.inputs, targets=batch.targets, memory=memory) for batch, memory in found]


def test_the_record_says_what_was_looked_at(run, record):
    assert record["run"] == str(run)
    assert record["checkpoint"] == str(find_checkpoint(run))
    assert (record["split"], record["batches"], record["model"]) == ("valid", 2, "deq_trellisnet_small")
    assert record["parameters"] == sum(p.numel() for p in load(run).parameters())
    assert (record["precision"], record["notes"]) == ("no", [])
    assert record["environment"]["packages"]["torch"] == str(torch.__version__)


def test_spectral_radius_is_that_of_the_dense_jacobian(record, segments):
    """Eigenvalues of each system's block of the Jacobian, by autograd, to 2 %: growth rates converge slowly."""
    expected = []
    for output in outputs(segments):
        problem = output.solution.problem
        (z,) = problem.start(output.solution.value)  # (N, D)

        def f(x, problem=problem):
            return problem.evaluate([x])[0]

        jacobian = torch.autograd.functional.jacobian(f, z)  # (N, D, N, D)
        expected += [float(torch.linalg.eigvals(jacobian[i, :, i]).abs().max()) for i in range(len(z))]
    found = record["spectral_radius"]
    assert found["values"] == pytest.approx(expected, rel=0.02)
    assert (found["median"], found["max"]) == (statistics.median(found["values"]), max(found["values"]))


def test_spectral_radius_of_the_first_systems_only(run, record, monkeypatch):
    monkeypatch.setattr(inspection, "_SYSTEMS", 1)
    found = inspect_run(run, batches=2, depths=())["spectral_radius"]["values"]
    assert found == pytest.approx(record["spectral_radius"]["values"][::2], rel=1e-2)  # another random start


def test_residuals_of_the_plain_iteration(record, segments):
    residuals = []
    for output in outputs(segments):
        problem = output.solution.problem
        z, rows = problem.start(torch.zeros_like(output.solution.value))[0], []
        for _ in range(30):
            fz = problem.evaluate([z])[0]
            rows.append((fz - z).norm(dim=1) / fz.norm(dim=1))
            z = fz
        residuals.append(torch.stack(rows, dim=1))
    expected = torch.cat(residuals).quantile(0.5, dim=0, interpolation="nearest")
    found = record["convergence"]["picard"]["median"]
    assert len(found) == 30
    assert found[:10] == pytest.approx(expected[:10].tolist(), rel=1e-3)
    assert found[-1] < 1e-5


@pytest.mark.parametrize("solver", ["anderson", "broyden"])
def test_other_solvers_start_alike_and_converge(record, solver):
    plain, curves = record["convergence"]["picard"], record["convergence"][solver]
    assert curves["median"][:2] == pytest.approx(plain["median"][:2])
    assert curves["median"][-1] < 1e-5
    assert all(p95 >= median for median, p95 in zip(curves["median"], curves["p95"], strict=True))


def test_steps_and_statuses_are_those_of_the_models_own_solves(record, segments):
    stats = [output.solution.stats for output in outputs(segments)]
    steps = record["steps"]
    assert steps["values"] == [int(count) for one in stats for count in one.steps]
    assert steps["statuses"] == {"converged": 4}
    assert steps["sentences"] == {"converged": "converged to the tolerance"}
    assert (steps["rtol"], steps["max_steps"], steps["solver"]) == (1e-2, 12, "Anderson")
    assert steps["residual"]["max"] == pytest.approx(max(float(one.residual.max()) for one in stats))


def test_the_gradient_is_compared_with_a_deep_stack(record, run):
    """Backpropagation through 60 layers in float64 stands for the truth."""
    model, train_batch = load(run), open_run(run, "valid").splits.train
    memory = None
    for batch in (train_batch(0), train_batch(1)):  # after the second the memory is seen not to grow any more
        with torch.no_grad():
            memory = model(batch.inputs, targets=batch.targets, memory=memory).memory
    third = train_batch(2)

    def gradient(module):
        dtype = next(model.parameters()).dtype
        past = {name: part.to(dtype) if part.is_floating_point() else part for name, part in memory.items()}
        loss = module(third.inputs, targets=third.targets, memory=past).loss
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([g.reshape(-1) for g in grads]).double()

    for deq in (module for module in model.modules() if isinstance(module, DEQ)):
        deq.eval_plan = None
    own = gradient(model)
    truth = gradient(model.double().explicit(60).eval())
    audit = record["gradient"]
    assert audit["cosine"] == pytest.approx(float(torch.dot(own, truth) / own.norm() / truth.norm()), abs=1e-6)
    assert audit["relative_error"] == pytest.approx(float((own - truth).norm() / truth.norm()), rel=1e-2)
    assert audit["text"].startswith("gradient against a tight solve: cosine 0.99")
    assert audit["truth_residual"] <= 1e-6


def test_memory_of_twins_grows_with_depth_and_that_of_the_equilibrium_does_not(record):
    rows = {row["depth"]: row for row in record["memory"]}
    assert [row["name"] for row in record["memory"]] == ["DEQ", "1 layer", "4 layers", "8 layers", "16 layers"]
    assert {row["parameters"] for row in rows.values()} == {4 * record["parameters"]}
    assert {row["gradients"] for row in rows.values()} == {4 * record["parameters"]}
    assert rows[16]["graph"] - rows[8]["graph"] == 2 * (rows[8]["graph"] - rows[4]["graph"]) > 0
    assert rows[None]["history"] > 0
    assert all(rows[depth]["history"] == 0 for depth in (1, 4, 8, 16))
    assert rows[1]["graph"] < rows[None]["graph"] < rows[4]["graph"]


def test_time_has_the_rows_of_memory(record):
    assert [row["name"] for row in record["time"]] == [row["name"] for row in record["memory"]]
    assert all(row["forward"] > 0 and row["backward"] > 0 for row in record["time"])


def test_measuring_draws_nothing_from_the_callers_generator(run):
    before = torch.random.get_rng_state()
    said = []
    record = inspect_run(run, split="test", batches=1, depths=(), say=said.append)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (record["split"], record["batches"], len(record["memory"])) == ("test", 1, 1)
    assert len(record["steps"]["values"]) == 2
    assert "solving 1 batches of test" in said


def test_a_model_without_an_equilibrium(tmp_path):
    train(recipe(COPY, "model={name='lstm_copy_memory', widths=[8]}", "train.steps=1"), tmp_path)
    record = inspect_run(tmp_path)
    assert (record["spectral_radius"], record["gradient"], record["steps"]) == (None, None, None)
    assert record["convergence"] == {}
    assert [(row["name"], row["history"]) for row in record["memory"]] == [("lstm_copy_memory", 0)]
    assert record["memory"][0]["graph"] > 0
    assert record["time"][0]["depth"] is None
    assert "no equilibrium" in record["notes"][0]


def test_a_run_in_bfloat16_is_measured_in_it(tmp_path):
    """Residuals stay above those of float32, and less is kept for the backward pass than in float32."""
    settings = (*TINY, "train.precision=bf16")
    train(text_recipe(tmp_path / "mine", *settings), tmp_path / "run")
    record = inspect_run(tmp_path / "run", batches=1, depths=(16,))
    assert record["precision"] == "bf16"
    assert 1e-6 < record["convergence"]["anderson"]["median"][-1] < 1e-1


def test_a_twin_that_does_not_fit_is_left_out(run, monkeypatch):
    measure = inspection.memory_report

    def full(objective, *arguments):
        if getattr(objective.model, "depth", 0) == 8:
            raise torch.OutOfMemoryError("full")
        return measure(objective, *arguments)

    monkeypatch.setattr(inspection, "memory_report", full)
    record = inspect_run(run, batches=1, depths=(1, 8, 2))
    assert [row["depth"] for row in record["memory"]] == [row["depth"] for row in record["time"]] == [None, 1, 2]
    assert record["notes"] == ["A training step of 8 layers does not fit into the memory of the device."]


def test_solves_that_fail_are_noted_once(run, monkeypatch):
    """A truth that cannot be found, by a stop rule that nothing can meet."""
    monkeypatch.setattr(inspection, "_TRUTH", Stop(rtol=1e-6, max_steps=1))
    record = inspect_run(run, batches=1, depths=())
    assert len(record["notes"]) == len(set(record["notes"])) == 2
    assert any("the audit says little" in note for note in record["notes"])
    assert any("the backward solve left gradients inexact" in note for note in record["notes"])


def test_other_warnings_are_passed_on():
    notes = []

    def measure():
        with inspection._noted(notes):
            warnings.warn("something else", UserWarning, stacklevel=1)
            warnings.warn("a solve", EquilibriumWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="something else"):
        measure()
    assert notes == ["a solve"]


def test_the_file_is_written_whole_and_nothing_else_is_touched(run, tmp_path, monkeypatch):
    folder = tmp_path / "lonely"
    folder.mkdir()
    for path in find_checkpoint(run).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    record = inspect_run(folder, batches=1, depths=())
    path = write_inspection(folder, {**record, "odd": math.nan})
    assert path == folder / "inspect.json"
    assert json.loads(path.read_text())["odd"] == "nan"
    kept = path.read_bytes()
    with pytest.raises(TypeError, match="'run' is a object, which has no place"):
        write_inspection(folder, {"run": object()})
    assert path.read_bytes() == kept
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before | {"inspect.json": kept}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split": "vlaid"}, "unknown split 'vlaid'; did you mean 'valid'"),
        ({"batches": 0}, "batches must be an integer of at least 1, got 0"),
        ({"depths": (4, -1)}, "depths must be an integer of at least 1, got -1"),
        ({"which": "newest"}, "unknown checkpoint 'newest'"),
    ],
)
def test_wrong_settings_are_refused(run, settings, words):
    with pytest.raises(ValueError, match=words):
        inspect_run(run, **settings)
