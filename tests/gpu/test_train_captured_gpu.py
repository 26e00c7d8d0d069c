"""Whole training steps as CUDA graphs: the training of ordinary steps, the same draws, refusals, and ways back."""

import gc
import math

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise._tape import Graphs, Reruns
from equipoise.models.deq_transformer import DEQTransformer
from equipoise.tasks import CopyMemoryTask
from equipoise.train.optim import NonFiniteGradientError
from tests.runs import COPY, TEXT, recipe, write_corpus
from tests.training import train_records
from tests.unit.test_train_captured import fit, ordinary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 20
COMMON = (
    "stop.rtol=0.0",
    "adjoint.stop.rtol=0.0",
    "train.capture=true",
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.evaluate_every=100",
    "train.save_every=100",
    "train.clip.max_norm=1.0",
)
TOLERANCE = {"no": 1e-4, "bf16": 2e-2}
TRELLIS = {
    "name": "deq_trellisnet_small",
    "embedding_size": 32,
    "hidden_size": 32,
    "dropout": 0.2,
    "dropout_in": 0.2,
    "dropout_hidden": 0.2,
    "dropconnect": 0.2,
    "dropout_words": 0.1,
}
TRANSFORMER = {"name": "deq_transformer_small", "d_model": 32, "heads": 2, "d_inner": 48, "memory_length": 8}
MDEQ = {
    "task": {
        "name": "classification",
        "data": "shapes",
        "options": {"size": 32, "train_size": 128, "test_size": 32, "labels": "classes"},
        "batch_size": 16,
        "eval_batch_size": 16,
    },
    "model": {"name": "mdeq_cifar_tiny"},
    # Few steps: before training f is not a contraction, and rounding grows with them.
    "stop": {"max_steps": 4},
    "adjoint": {"name": "implicit", "stop": {"max_steps": 4}},
    "train": {"learning_rate": {"name": "cosine", "warmup": 3}},
}
EMA = 'train.averaging={kind="ema", decay=0.9, start=3}'


def given_for(name, folder, *overrides):
    if name == "mdeq":
        return recipe(MDEQ, *COMMON, *overrides)
    if name == "copy":
        return recipe(COPY, *COMMON, "model.dropout=0.2", "task.train_size=640", *overrides)
    corpus = f"task.corpus={write_corpus(folder / 'text')}"
    if name == "trellisnet":
        return recipe(
            {**TEXT, "model": TRELLIS}, corpus, *COMMON, "task.activation=1.0", "task.smoothness=1.0", *overrides
        )
    dropout = ("model.dropout=0.2", "model.attention_dropout=0.1")
    return recipe({**TEXT, "model": TRANSFORMER}, corpus, *COMMON, *dropout, *overrides)


def losses(out):
    return [record["loss"] for record in train_records(out).values()]


def assert_same_training(given, folder, tolerance):
    """With and without recordings: losses, norms, statistics of solves; returns the run with recordings."""
    plain = fit(ordinary(given), folder / "ordinary")
    run = fit(given, folder / "captured")
    assert losses(folder / "captured") == pytest.approx(losses(folder / "ordinary"), rel=tolerance)
    ours, theirs = train_records(folder / "captured"), train_records(folder / "ordinary")
    for step, record in ours.items():
        assert record["lr"] == theirs[step]["lr"]
        assert record["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=30 * tolerance)
        for key in ("solves", "systems", "steps_p50"):
            assert record["forward"].get(key) == theirs[step]["forward"].get(key)
            assert record["backward"].get(key) == theirs[step]["backward"].get(key)
    assert plain.captured is None
    return run


# The same training


@pytest.mark.filterwarnings("ignore:.*the equilibrium is being lost")  # of an untrained MDEQ after few steps
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", ["trellisnet", "transformer", "mdeq"])
def test_replayed_steps_train_as_ordinary_ones(tmp_path, name, precision, monkeypatch):
    # Gradients of convolutions are else added up in any order, and solves of an untrained MDEQ make a lot of it.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    given = given_for(name, tmp_path, f"train.precision={precision}", EMA)
    run = assert_same_training(given, tmp_path, TOLERANCE[precision])
    assert not run.captured.fallbacks
    assert run.captured.replayed >= 8
    assert not run.model.deq.capture.fallbacks.keys() - {"the shape is new"}
    kinds = [kind for kind in run.captured._kinds.values() if kind.replay is not None]
    assert kinds
    assert all(isinstance(recording.tape, Reruns) for kind in kinds for recording in kind.recordings)
    assert all(kind.recordings for kind in kinds)
    assert all(p.grad is None for p in run.model.parameters())


@pytest.mark.parametrize(
    "overrides",
    [
        ("penalty.weight=0.3", "penalty.growth=0.1", "penalty.every=4"),
        ("warmup.steps=8",),
        ("jitter.low=-1", "jitter.high=0"),
        ("train.optimiser=sgd", "train.optimiser.lr=0.1", "train.optimiser.momentum=0.9"),
        ("train.optimiser=adam", 'train.averaging={kind="uniform", start=2}'),
        ("solver=broyden", "adjoint.solver=broyden"),
        ('adjoint={name="one_step"}', "solver=picard"),  # by the eager engine, whose Anderson uses other libraries
    ],
    ids=["penalty", "stack", "jitter", "sgd", "uniform", "broyden", "one step"],
)
def test_ways_to_train(tmp_path, overrides):
    if overrides[0].startswith("adjoint="):
        common = tuple(setting for setting in COMMON if not setting.startswith("adjoint"))
        given = recipe(COPY, *overrides, *common, "model.dropout=0.2", "task.train_size=640")
    else:
        given = given_for("copy", tmp_path, *overrides)
    run = assert_same_training(given, tmp_path, 3e-4)
    assert not run.captured.fallbacks
    assert run.captured.replayed >= 8


def test_draws_of_a_graph_follow_the_seed():
    """As of uncaptured kernels after the same seed, whatever was drawn before."""
    device = torch.device("cuda", torch.cuda.current_device())
    places = [torch.empty(1000, device=device) for _ in range(3)]

    def run():
        places[0].copy_(torch.rand(1000, device=device))
        places[1].copy_(torch.randn(1000, device=device))
        places[2].copy_(nn.functional.dropout(torch.ones(1000, device=device), 0.5))

    tape = Graphs(device)
    tape.rehearse(run)
    replay = tape.record(run)
    for seed in (3, 12_345_678_901, 3):
        torch.manual_seed(seed)
        run()
        expected = [place.clone() for place in places]
        torch.rand(77, device=device)
        torch.cuda.manual_seed(seed)
        replay()
        assert all(torch.equal(place, truth) for place, truth in zip(places, expected, strict=True))
        after = torch.rand(10, device=device)
        torch.manual_seed(seed)
        run()
        assert torch.equal(torch.rand(10, device=device), after)


def test_a_step_is_one_launch_and_some_copies(tmp_path):
    run = fit(given_for("trellisnet", tmp_path, "train.steps=10", "train.precision=bf16"), tmp_path / "run")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    replayed = run.captured.replayed
    with torch.profiler.profile(activities=activities) as profile:
        run._train_step()
        torch.cuda.synchronize()
    assert run.captured.replayed == replayed + 1
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["cudaGraphLaunch"] == 1
    others = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
    assert sum(count for name, count in counts.items() if name.startswith(others)) <= 30


def test_steps_do_not_wait_for_the_device(tmp_path):
    run = fit(given_for("trellisnet", tmp_path, "train.steps=10"), tmp_path / "run")
    with run.captured.tape.no_waiting():
        for _ in range(3):
            run._train_step()
            run.state.step += 1
    assert run.state.stepper.guard.metrics()["skipped"] == 0


# Refusals


@pytest.fixture
def bad_batches(monkeypatch):
    """A function that makes the loss of some batches NaN, on the device."""

    def spoil(given, steps):
        data, original = given.make_task(None).data(), CopyMemoryTask.training_step
        firsts = torch.tensor([int(data.train(step).indices[0]) for step in steps], device="cuda")

        def training_step(self, model, batch, carry, step):
            found, carry = original(self, model, batch, carry, step)
            bad = (batch.indices[0] == firsts).any()
            return {"loss": found["loss"] * torch.where(bad, math.nan, 1.0)}, carry

        monkeypatch.setattr(CopyMemoryTask, "training_step", training_step)

    return spoil


def test_bad_gradients_are_refused_and_counted(tmp_path, bad_batches):
    given = given_for("copy", tmp_path, "train.steps=10", "train.log_every=5", EMA)
    bad_batches(given, [2, 6, 7])
    runs = [fit(which, tmp_path / name) for name, which in (("a", ordinary(given)), ("b", given))]
    for run, name in zip(runs, "ab", strict=True):
        assert [record["skipped"] for record in train_records(tmp_path / name).values()] == [1, 3]
        assert run.state.stepper.guard.state_dict() == {"skipped": 3, "skipped_in_a_row": 0}
    assert runs[1].captured.replayed == 4  # the average begins at step 3, with steps of another kind
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-3)
    steps = [state["step"] for state in runs[1].state.stepper.optimizer.state.values()]
    assert {float(step) for step in steps} == {7.0}


def test_a_run_of_bad_gradients_ends(tmp_path, bad_batches):
    given = given_for("copy", tmp_path, "train.steps=40", "train.log_every=100", "train.clip.give_up=8")
    bad_batches(given, range(6, 40))
    with pytest.raises(NonFiniteGradientError, match="8 steps in a row had non-finite gradients"):
        fit(given, tmp_path / "run")


# Between replays


def test_a_run_is_evaluated_saved_and_resumed(tmp_path):
    """Weights are swapped for averaged ones where they are, and what streams carry is saved."""
    often = ("train.evaluate_every=6", "train.save_every=5", EMA)
    given = given_for("trellisnet", tmp_path, *often)
    whole = assert_same_training(given, tmp_path, 1e-4)
    addresses = [p.data_ptr() for p in whole.model.parameters()]
    first = fit(recipe(given.to_data(), "train.steps=11"), tmp_path / "parts")
    assert first.captured.replayed > 0
    resumed = fit(given, tmp_path / "parts", resume=True)
    assert resumed.captured.replayed > 0
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "captured"), rel=1e-4)
    assert resumed.state.average.count == whole.state.average.count
    whole.evaluate("valid")
    assert [p.data_ptr() for p in whole.model.parameters()] == addresses


# What cannot be recorded


class Reading(nn.Module):
    def forward(self, x):
        return x if float(x.detach().sum()) != 1.5 else 2 * x


class Waiting(nn.Module):
    """Is found out when it is recorded only."""

    def forward(self, x):
        torch.cuda.synchronize()
        return x


class Tossing(nn.Module):
    """Draws on the host."""

    def forward(self, x):
        return x * (1.0 if torch.rand(()) < 0.5 else 0.5)


UNFIT = {
    Reading: "a step cannot be recorded",
    Waiting: "a step cannot be recorded",
    Tossing: "the step draws random numbers on the host",
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_cannot_be_recorded_trains_as_before(tmp_path, monkeypatch, kind):
    """And what comes after it in the same process can be recorded."""
    with monkeypatch.context() as patched:
        made = DEQTransformer.__init__

        def with_another(self, config):
            made(self, config)
            self.unfit = kind()
            self.embedding.register_forward_hook(lambda module, args, result: self.unfit(result))

        patched.setattr(DEQTransformer, "__init__", with_another)
        given = given_for("copy", tmp_path, "train.steps=8")
        with pytest.warns(eq.EquilibriumWarning, match=UNFIT[kind]):
            run = assert_same_training(given, tmp_path, 1e-4)
        assert run.captured.recorded == run.captured.replayed == 0
        assert sum(run.captured.fallbacks.values()) >= 5
    again = tmp_path / "again"
    assert assert_same_training(given_for("copy", again, "train.steps=8"), again, 1e-4).captured.replayed == 5


def test_a_tolerance_is_left_to_ordinary_steps(tmp_path):
    given = given_for("copy", tmp_path, "stop.rtol=0.1", "train.steps=5")
    with pytest.warns(eq.EquilibriumWarning, match=r"solves end by a tolerance \(stop.rtol=0.1"):
        run = fit(given, tmp_path / "run")
    assert run.captured.replayed == 0
    assert run.model.deq.capture.replayed > 0  # solves are recorded as ever


@pytest.mark.parametrize(
    ("override", "reason"), [("train.accumulation=2", "several passes"), ("train.precision=fp16", "scaled for float16")]
)
def test_runs_without_recorded_steps(tmp_path, override, reason):
    with pytest.warns(eq.EquilibriumWarning, match=reason):
        assert fit(given_for("copy", tmp_path, override, "train.steps=3"), tmp_path / "run").captured is None


def test_recordings_leave_no_memory_behind(tmp_path):
    """Of several runs in one process; what each of them leaves is given back."""
    left = []
    for k in range(3):
        run = fit(given_for("trellisnet", tmp_path, "train.steps=8"), tmp_path / str(k))
        assert run.captured.replayed > 0
        assert run.captured.peak_memory > 0
        del run
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_allocated())
    assert left[2] <= left[1] + 2**20
