"""Memory and run time beside explicit networks: what is counted, what is shared, what turns red."""

import dataclasses

import pytest
import torch

from equipoise.bench import memory, models, runtime_ratio
from equipoise.bench.harness import TINY
from equipoise.bench.models import PTB, SUBJECTS, WT103, Trainer
from equipoise.diagnostics import memory_report
from equipoise.diagnostics.memory_peak import PeakMemory, peak_of_step
from equipoise.models import create_model
from equipoise.solvers import Anderson

CPU = torch.device("cpu")
TRELLIS, TRANSFORMER = SUBJECTS[TINY]


@pytest.fixture(scope="module")
def rows():
    return {row.name: row for row in memory.memory([TINY], CPU, 1)}


def test_what_is_kept_is_graph_and_history(rows):
    row = rows["tiny TrellisNet, kept"]
    trainer = Trainer(TRELLIS, CPU, False, **dict(TRELLIS.lean))
    trainer.deq.plan = trainer.plan(Anderson(), Anderson(), (8, 8))
    report = memory_report(trainer.model, trainer.batch(trainer.model), models.mean_loss)
    assert row.values["DEQ, eager"].median == report.graph + report.history
    parts = row.details["DEQ, eager"]
    assert (parts["graph"], parts["history"]) == (report.graph, report.history)
    state = TRELLIS.batch * TRELLIS.length * 20 * 4  # bytes of h
    assert 12 * state <= parts["history"] <= 12 * state + 4096  # Anderson holds twice its memory of 6


def test_parameters_and_gradients_are_added(rows):
    kept, whole = (rows[f"tiny Transformer, {name}"] for name in ("kept", "with parameters and gradients"))
    trained = sum(p.nbytes for p in Trainer(TRANSFORMER, CPU, False, **dict(TRANSFORMER.lean)).model.parameters())
    for name in ("DEQ, eager", "10 layers", "10 layers, checkpointed"):
        assert whole.values[name].median - kept.values[name].median == 2 * trained


@pytest.mark.parametrize("name", ["TrellisNet", "Transformer"])
def test_a_deq_is_flat_and_layers_are_not(rows, name):
    row = rows[f"tiny {name}, kept"]
    few, many = (candidate for candidate in row.values if "steps" in candidate)
    assert row.ratio(many, few) == pytest.approx(1.0, rel=1e-3)
    shallow, deep = (row.details[c]["graph"] for c in (row.base, f"{int(row.base.split()[0]) + 1} layers"))
    layer = deep - shallow
    assert row.details[row.base]["graph"] == pytest.approx(int(row.base.split()[0]) * layer, rel=0.15)
    checkpointed = row.details[f"{row.base}, checkpointed"]
    assert checkpointed["recomputed"] == layer * (4 if name == "TrellisNet" else 1)
    assert checkpointed["graph"] < 0.5 * row.details[row.base]["graph"]
    goals = {(goal.candidate, goal.over): row.outcome(goal) for goal in row.goals}
    assert goals["DEQ, eager", f"{row.base}, checkpointed"] < 1
    assert all(row.wrong(candidate) is None for candidate in row.checks)
    assert "autograd saves" in row.notes[-1]


def test_a_step_without_an_equilibrium_is_red(monkeypatch):
    monkeypatch.setitem(SUBJECTS, TINY, (dataclasses.replace(TRELLIS, budgets=(2, 1, 3)),))
    monkeypatch.setattr(memory, "CONVERGED", 1e-6)
    row = memory.memory([TINY], CPU, 1)[0]
    assert row.wrong("DEQ, eager") is not None
    assert row.ratio("DEQ, eager") is None


def test_peaks_need_a_counter_and_add_up():
    with pytest.raises(ValueError, match="cpu has no counter of allocated memory; use memory_report"):
        peak_of_step(lambda: None, [], CPU)
    peak = PeakMemory(step=5, held=3, gradients=2, parameters=1, reserved=100)
    assert (peak.activations, peak.trained) == (8, 11)


def test_full_sizes_are_the_published_ones():
    with torch.device("meta"):
        for subject, millions in ((PTB, 20.18), (WT103, 71.2)):
            model = create_model(subject.model, **dict(subject.settings))
            words = sum(p.numel() for name, p in model.named_parameters() if "embed" in name or "softmax" in name)
            assert (sum(p.numel() for p in model.parameters()) - words) / 1e6 == pytest.approx(millions, rel=1e-2)
        untied = create_model(WT103.untied[1], **dict(WT103.untied[2]))
    layers = sum(p.numel() for p in untied.layers.parameters())
    assert layers / 1e6 == pytest.approx(72, rel=2e-2)
    assert (PTB.bar, WT103.bar) == (60, 18)


def test_networks_share_parameters_and_gradients_in_place():
    trainer = Trainer(TRELLIS, CPU, False)
    twin = trainer.model.explicit(3)
    assert {id(p) for p in twin.parameters()} == {id(p) for p in trainer.model.parameters()}
    assert trainer.deq.engine == "eager"
    network_step = trainer.step(twin, trainer.batch(twin))
    network_step()
    first = {name: p.grad for name, p in twin.named_parameters()}
    network_step()
    assert all(p.grad is first[name] for name, p in twin.named_parameters())  # a recorded step relies on it


def test_ratios_are_over_the_tied_twin(monkeypatch):
    monkeypatch.setitem(SUBJECTS, TINY, (TRELLIS,))
    rows = runtime_ratio.runtime_ratio([TINY], CPU, 1)
    assert [row.name.split(", ", 1)[1] for row in rows] == [
        "training, published budget 10/10",
        "training, regularised budget 8/8",
        "inference, published budget 10",
        "inference, regularised budget 8",
    ]
    assert [len(row.goals) for row in rows] == [0, 1, 0, 1]
    assert [row.goals[0].bound for row in rows[1::2]] == [1.5, 1.0]
    assert rows[0].base == "12 tied layers"
    # One more each: f that carries the gradient, and the product for the parameters.
    assert [rows[0].details["DEQ, captured"][key] for key in ("evaluations", "products")] == [11, 11]
    assert rows[3].details["DEQ, eager"]["evaluations"] == 8
    assert "published ratio 2.4" in rows[0].notes


def test_engines_that_disagree_are_red(monkeypatch):
    monkeypatch.setitem(SUBJECTS, TINY, (TRELLIS,))
    monkeypatch.setattr(runtime_ratio, "AGREEMENT", {False: -1.0, True: -1.0})
    rows = runtime_ratio.runtime_ratio([TINY], CPU, 1)
    assert all(row.ratio("DEQ, captured") is None for row in rows)
    assert all(row.ratio("DEQ, eager") is not None for row in rows)
