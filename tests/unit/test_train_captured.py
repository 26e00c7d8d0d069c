"""Training steps that are recorded as a whole, under a tape that is close to a CUDA graph.

Operations are noted when a step is recorded, which does not make it: all that it wrote is put back, and all that it
made is arbitrary until it is replayed. Reading a value on the host is an error.
"""

import dataclasses
import math
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import equipoise as eq
from equipoise import _capture, _leaves
from equipoise._static import Noted
from equipoise._tape import Reruns, inline, own_casts, solves_inline
from equipoise.models.deq_transformer import DEQTransformer
from equipoise.tasks import CopyMemoryTask
from equipoise.train import captured_step, loop, optim
from equipoise.train.captured_step import _Outputs, obstacle
from equipoise.train.optim import Clip, NonFiniteGradientError, Stepper
from tests.captured import FIXED, Scoped, assert_close, deq_of, inputs_of, loss_of, recordings_of, tensors
from tests.runs import COPY, TEXT, recipe, write_corpus
from tests.training import TRELLIS, lines, same, saved, train_records
from tests.unit.test_tasks_vision import DIGITS

HOST_READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)
# Plain iterations: those of other solvers read on the host where there is no CUDA device.
FIXED_BUDGETS = ("solver=picard", "adjoint.solver=picard", "stop.rtol=0.0", "stop.max_steps=4", "train.capture=true")
# Rates and weights that float32 holds exactly: a recording reads them from tensors.
EXACT = (
    "train.optimiser.lr=0.0078125",
    "train.learning_rate.warmup=0",
    "train.evaluate_every=100",
    "train.save_every=100",
)
EMA = 'train.averaging={kind="ema", decay=0.5}'


# As a CUDA graph would


class _NoReading(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in HOST_READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


class _Noting(_NoReading):
    """Notes operations, and keeps what tensors that were there before held before they were written."""

    def __init__(self):
        super().__init__()
        self.calls, self.made, self.kept = [], set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in [*zip(func._schema.arguments, args, strict=False), *_by_name(func, kwargs)]:
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or argument.name in ("running_mean", "running_var"):  # which is written and not said
                for tensor in tensors(value):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in self.made and storage.data_ptr() not in self.kept:
                        self.kept[storage.data_ptr()] = storage, storage.clone()
        known = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.made |= {t.untyped_storage().data_ptr() for t in tensors(result)} - known
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self):
        for _, _, _, result in self.calls:
            for tensor in tensors(result):
                if tensor.untyped_storage().data_ptr() in self.made and tensor.dtype != torch.bool:
                    tensor.data.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 2)
        for storage, before in self.kept.values():
            storage.copy_(before)

    def graph(self):
        """Does all of it again, on the same tensors."""
        bare = tree_map(lambda x: x.data if isinstance(x, torch.Tensor) else x, [call[1:3] for call in self.calls])
        calls = [(call[0], *given, tensors(call[3])) for call, given in zip(self.calls, bare, strict=True)]

        @torch.no_grad()
        def replay():
            for func, args, kwargs, results in calls:
                for old, new in zip(results, tensors(func(*args, **kwargs)), strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.data.copy_(new)

        return replay


def _by_name(func, kwargs):
    return [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]


class StepTape:
    """What `Graphs` is on a CUDA device."""

    def __init__(self, device):
        self.counts = Counter()

    def take_turn(self):
        self.counts["turns"] += 1

    def tidy(self):
        pass

    def together(self):
        return own_casts("cpu")

    aside = together

    def no_waiting(self):
        return _NoReading()

    def record(self, run):
        noting, drawn = _Noting(), torch.get_rng_state()
        with noting:
            run()
        noting.undo()
        torch.set_rng_state(drawn)
        return noting.graph()


@pytest.fixture
def emulated(monkeypatch):
    """Steps can be recorded on the CPU, optimisers are fused there, and the eager engine reads nothing."""
    monkeypatch.setattr(captured_step, "step_tape", StepTape)
    monkeypatch.setattr(optim, "_fused", lambda groups: True)
    monkeypatch.setattr(
        _leaves, "choose", lambda mask, a, b: [torch.where(mask[:, None], x, y) for x, y in zip(a, b, strict=True)]
    )


@pytest.fixture
def inline_solves(monkeypatch):
    """Solves of recorded steps are themselves recorded ones, as on a CUDA device."""
    monkeypatch.setattr(eq.DEQ, "_may_capture", lambda self, inputs: inline())


def copy_recipe(*overrides):
    return recipe(COPY, *EXACT, *FIXED_BUDGETS, "train.steps=8", "train.log_every=1", *overrides)


def text_recipe(folder, *overrides, **model):
    values = {**TEXT, "model": model or TEXT["model"]}
    corpus = f"task.corpus={write_corpus(folder)}"
    return recipe(values, corpus, *EXACT, *FIXED_BUDGETS, "train.steps=9", "train.log_every=1", *overrides)


def fit(given, out, resume=False):
    """Train, and return the run."""
    accelerator = loop.setup(given, out, resume)
    run = loop._Run(given, given.make_task(None), out, accelerator, resume)
    run.fit()
    return run


def ordinary(given):
    return recipe(given.to_data(), "train.capture=false")


def trained_the_same(given, folder, tolerance=0.0):
    """Train with and without recordings, and compare what is written; returns the run with recordings."""
    fit(ordinary(given), folder / "ordinary")
    run = fit(given, folder / "captured")
    a, b = (saved(folder / name) for name in ("ordinary", "captured"))
    assert a.pop("config")["train"].pop("capture") is False
    assert b.pop("config")["train"].pop("capture") is True
    if tolerance == 0:
        assert same(a, b)
        assert lines(folder / "ordinary") == lines(folder / "captured")
        return run
    assert_close(a["model"], b["model"], tolerance)
    assert_close(
        a["trainer"]["stepper"]["optimizer"]["state"], b["trainer"]["stepper"]["optimizer"]["state"], tolerance
    )
    for step, record in train_records(folder / "ordinary").items():
        captured = train_records(folder / "captured")[step]
        assert captured["loss"] == pytest.approx(record["loss"], rel=tolerance)
        assert captured["grad_norm"] == pytest.approx(record["grad_norm"], rel=10 * tolerance)
        assert captured["forward"]["steps_p50"] == record["forward"]["steps_p50"]
        assert captured["backward"]["systems"] == record["backward"]["systems"]
    return run


# The same training


MODELS = {
    "transformer": (None, ("model.dropout=0.2", "model.attention_dropout=0.1", "train.clip.max_norm=0.5", EMA)),
    "penalty": (
        None,
        ("penalty.weight=0.5", "penalty.growth=0.25", "penalty.every=2", 'train.optimiser.no_decay=["bias"]'),
    ),
    "trellisnet": (TRELLIS, ("task.activation=1.0", "task.smoothness=1.0", EMA)),
    "memory": ({}, ("train.optimiser=sgd", "train.optimiser.lr=0.125", "train.optimiser.momentum=0.5")),
    "uniform average": (None, ('train.averaging={kind="uniform", start=2}',)),
    "stack": (None, ("warmup.steps=100",)),
    "one step": (None, ('adjoint={name="one_step"}',)),
}


def given_for(case, folder):
    model, overrides = MODELS[case]
    return copy_recipe(*overrides) if model is None else text_recipe(folder / "text", *overrides, **model)


QUICK = ("transformer", "penalty", "trellisnet")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in MODELS]
)
@pytest.mark.filterwarnings("ignore:warmup.steps = 100 leaves none:equipoise.EquilibriumWarning")  # a stack is meant
def test_replayed_steps_are_ordinary_steps(emulated, tmp_path, case):
    """Losses, draws, weights, moments, averages, memory and statistics, bit for bit."""
    run = trained_the_same(given_for(case, tmp_path), tmp_path)
    assert run.captured.recorded == 1
    assert run.captured.replayed >= 2
    assert not run.captured.fallbacks


@pytest.mark.parametrize("case", QUICK)
def test_recorded_solves_inside_of_recorded_steps(emulated, inline_solves, tmp_path, case):
    run = trained_the_same(given_for(case, tmp_path), tmp_path, tolerance=2e-4)
    assert run.captured.recorded == 1
    deq = run.model.deq
    assert deq.capture.recorded == 1
    assert not deq.capture.fallbacks
    (kind,) = (kind for kind in run.captured._kinds.values() if kind.replay is not None)
    assert kind.recordings == recordings_of(deq)
    assert isinstance(kind.recordings[0].tape, Reruns)
    assert kind.recordings[0].adjoint.image == []  # no graph is kept between steps
    assert all(p.grad is None for p in run.model.parameters())


@pytest.mark.slow
def test_images_and_running_statistics(emulated, tmp_path):
    budgets = (*FIXED_BUDGETS, "stop.max_steps=2", "adjoint.stop={rtol=0.0, max_steps=2}")
    given = recipe(DIGITS, *EXACT, *budgets, "train.steps=6", 'task.augment="crop_flip"', "penalty.weight=0.0")
    fit(ordinary(given), tmp_path / "ordinary")
    assert fit(given, tmp_path / "captured").captured.replayed == 3
    a, b = (saved(tmp_path / name) for name in ("ordinary", "captured"))
    assert same(a["model"], b["model"])
    assert any(name.endswith("running_mean") for name in a["model"])


def test_half_precision(emulated, inline_solves, tmp_path):
    given = copy_recipe("train.precision=bf16", "model.dropout=0.2")
    assert trained_the_same(given, tmp_path, tolerance=2e-2).captured.replayed == 5


def test_rates_that_change(emulated, tmp_path):
    given = copy_recipe("train.learning_rate.warmup=4", 'train.learning_rate.name="cosine"', "train.optimiser.lr=0.01")
    run = trained_the_same(given, tmp_path, tolerance=1e-5)
    assert run.captured.replayed == 5
    rates = [record["lr"] for record in train_records(tmp_path / "captured").values()]
    assert rates == [record["lr"] for record in train_records(tmp_path / "ordinary").values()]
    assert len(set(rates)) == 7


# Kinds of steps


@pytest.mark.slow
def test_budgets_that_vary_are_kinds_of_their_own(emulated, tmp_path):
    jitter = ("jitter.low=-1", "jitter.high=1", "penalty.weight=0.5", "penalty.probability=0.5")
    run = trained_the_same(copy_recipe(*jitter, "train.steps=28", "task.batch_size=4", "train.log_every=7"), tmp_path)
    kinds = Counter((key[0][1].stop.max_steps, key[0][2]) for key in run.captured._kinds)
    assert len(run.captured._kinds) == len(kinds) == 6  # three budgets, with and without the penalty
    assert run.captured.recorded == sum(kind.seen > 3 for kind in run.captured._kinds.values()) >= 3
    assert run.captured.replayed == sum(max(0, kind.seen - 3) for kind in run.captured._kinds.values()) >= 8


@pytest.mark.slow
def test_kinds_are_forgotten_when_there_are_many(emulated, tmp_path, monkeypatch):
    monkeypatch.setattr(captured_step, "MOST_KINDS", 2)
    run = trained_the_same(copy_recipe("jitter.low=-1", "jitter.high=1", "train.steps=10"), tmp_path)
    assert len(run.captured._kinds) == 2


def test_from_the_stack_to_the_equilibrium(emulated, tmp_path):
    run = trained_the_same(copy_recipe("warmup.steps=5", "train.steps=10"), tmp_path)
    assert [key[0][0] for key in run.captured._kinds] == ["warmup", "equilibrium"]
    assert (run.captured.recorded, run.captured.replayed) == (2, 4)


def test_from_the_solver_of_the_opening_to_that_of_the_plan(emulated, tmp_path):
    run = trained_the_same(copy_recipe("opening.steps=5", "opening.solver.name=broyden", "train.steps=10"), tmp_path)
    assert (run.captured.recorded, run.captured.replayed) == (2, 4)


def test_steps_with_a_learned_solver_are_recorded_and_see_it_fitted_anew(emulated, tmp_path):
    learned = {"start": 2, "first": 2, "every": 7, "refresh": 2, "solver": {"hidden": 4, "width": 4}}
    given = recipe({**copy_recipe().to_data(), "alternate": {**learned, "fit": {"unroll": 3, "accept": 0.9}}})
    given = dataclasses.replace(given, train=dataclasses.replace(given.train, steps=12))
    run = trained_the_same(given, tmp_path, tolerance=1e-6)  # how long fits took differs
    assert (run.captured.recorded, run.captured.replayed) == (1, 7)
    assert not run.captured.fallbacks


def test_steps_that_a_learned_solver_gets_more_of_are_recorded_anew(emulated, tmp_path):
    learned = {"start": 2, "first": 2, "every": 50, "refresh": 2, "solver": {"hidden": 4, "width": 4}}
    learned |= {"max_steps": 2, "most_steps": 4, "limit": 1e-6, "fit": {"unroll": 3, "accept": 0.9}}
    given = recipe({**copy_recipe().to_data(), "alternate": learned})
    given = dataclasses.replace(given, train=dataclasses.replace(given.train, steps=15, log_every=5))
    run = trained_the_same(given, tmp_path, tolerance=1e-6)
    steps = [record["forward"]["steps_p50"] for record in train_records(tmp_path / "captured").values()]
    assert steps == [2.0, 3.0, 4.0]
    assert run.captured.recorded == 2  # three steps with the first number are too few to be


@pytest.mark.slow
def test_values_of_a_batch_that_a_task_reads_are_part_of_the_kind(emulated, tmp_path):
    """A pass over the text begins without memory."""
    given = text_recipe(tmp_path / "text", "task.length=48", "train.steps=17", "train.log_every=6", **TRELLIS)
    run = trained_the_same(given, tmp_path)
    assert list(run.captured._read) == ["starts"]
    starting = [kind for key, kind in run.captured._kinds.items() if ("starts", True) in key[4]]
    assert sum(kind.seen for kind in starting) >= 4
    assert run.captured.replayed >= 7


# Refusals


@pytest.fixture
def bad_batches(monkeypatch):
    """A function that makes the loss of some batches NaN, on the device."""

    def spoil(given, steps):
        task, original = given.make_task(None), CopyMemoryTask.training_step
        firsts = torch.tensor([int(task.data().train(step).indices[0]) for step in steps])

        def training_step(self, model, batch, carry, step):
            losses, carry = original(self, model, batch, carry, step)
            bad = (batch.indices[0] == firsts).any()
            return {"loss": losses["loss"] * torch.where(bad, math.nan, 1.0)}, carry

        monkeypatch.setattr(CopyMemoryTask, "training_step", training_step)

    return spoil


def test_bad_gradients_are_refused_and_counted(emulated, bad_batches, tmp_path):
    given = copy_recipe("train.log_every=4", "task.train_size=640")
    bad_batches(given, [1, 4, 5])  # one is rehearsed, two are replayed
    run = trained_the_same(given, tmp_path)
    assert run.captured.replayed == 5
    assert [record["skipped"] for record in train_records(tmp_path / "captured").values()] == [1, 3]
    assert run.state.stepper.guard.state_dict() == {"skipped": 3, "skipped_in_a_row": 0}


def test_a_run_of_bad_gradients_ends_without_a_log_line(emulated, bad_batches, tmp_path):
    given = copy_recipe("train.steps=30", "train.log_every=100", "train.clip.give_up=6", "task.train_size=640")
    bad_batches(given, range(5, 30))
    with pytest.raises(NonFiniteGradientError, match=r"6 steps in a row had non-finite gradients; 6 steps were"):
        fit(given, tmp_path)


def test_norms_are_read_when_they_are_asked_for(monkeypatch):
    guard, reads = Clip(give_up=3).start(), []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    for norm in (1.0, math.inf, 2.0):
        guard.note(torch.tensor(norm))
        guard.catch_up(beyond=3)
    assert not reads
    assert guard.metrics() == {"grad_norm": 2.0, "skipped": 1, "skipped_in_a_row": 0}
    assert len(reads) == 1


# Between replays


def test_a_run_is_evaluated_interrupted_and_resumed(emulated, tmp_path, interrupt):
    """With averaged weights in evaluation; the memory of streams and statistics are saved between replays."""
    given = text_recipe(
        tmp_path / "text", EMA, "train.evaluate_every=3", "train.save_every=4", "train.log_every=4", **TRELLIS
    )
    whole = trained_the_same(given, tmp_path)
    assert whole.captured.replayed == 5
    interrupt(7)
    part = fit(given, tmp_path / "parts")
    assert (part.state.step, part.captured.replayed) == (7, 3)
    interrupt.never()
    assert fit(given, tmp_path / "parts", resume=True).state.step == 9
    assert same(saved(tmp_path / "parts"), saved(tmp_path / "captured"))
    assert lines(tmp_path / "parts") == lines(tmp_path / "captured")


# What cannot be recorded


def test_without_graphs_training_goes_on(tmp_path):
    given = copy_recipe("train.steps=3")
    with pytest.warns(eq.EquilibriumWarning, match=r"train.capture: there are no CUDA graphs on 'cpu'; no step is"):
        run = fit(given, tmp_path / "a")
    assert run.captured is None
    fit(ordinary(given), tmp_path / "b")
    assert same(saved(tmp_path / "a")["trainer"], saved(tmp_path / "b")["trainer"])


def test_runs_whose_steps_cannot_be_recorded(emulated, monkeypatch):
    model, device = nn.Linear(2, 1), torch.device("cpu")
    groups = [{"params": model.parameters(), "initial_lr": 0.1}]
    fused = Stepper(torch.optim.SGD(groups, fused=True), Clip().start())
    scaled = Stepper(torch.optim.SGD(groups, fused=True), Clip().start(), torch.amp.GradScaler("cpu"))
    plain = Stepper(torch.optim.SGD(groups), Clip().start())
    assert obstacle(device, fused, [None], 1) is None
    assert obstacle(device, fused, [None], 2) == "2 processes add up their gradients"
    assert obstacle(device, fused, [None] * 3, 1) == "train.accumulation=3 makes a step of several passes"
    assert obstacle(device, scaled, [None], 1) == "the loss is scaled for float16, by what the host reads"
    assert "SGD is not a fused optimiser" in obstacle(device, plain, [None], 1)


@contextmanager
def told_once(reason):
    with pytest.warns(eq.EquilibriumWarning) as told:
        yield
    assert [warning.category for warning in told] == [eq.EquilibriumWarning]
    assert reason in str(told[0].message)
    assert "such steps are made in the ordinary way" in str(told[0].message)


def test_accumulation_is_not_recorded(emulated, tmp_path):
    given = copy_recipe("train.accumulation=2", "train.steps=2")
    with pytest.warns(eq.EquilibriumWarning, match=r"train.accumulation=2 makes a step of several passes"):
        assert fit(given, tmp_path).captured is None


@pytest.mark.parametrize("where", ["stop", "adjoint.stop"])
def test_a_tolerance_is_not_recorded(emulated, tmp_path, where):
    given = copy_recipe(f"{where}.rtol=0.5", "warmup.steps=5", "train.steps=8")
    with told_once(f"solves end by a tolerance ({where}.rtol=0.5, atol=0)"):
        run = trained_the_same(given, tmp_path)
    assert (run.captured.replayed, sum(run.captured.fallbacks.values())) == (2, 3)  # the stack was recorded


class Reading(nn.Module):
    def forward(self, x):
        return x if float(x.detach().sum()) != 1.5 else 2 * x


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        return x


class Moving(nn.Module):
    """Has a buffer that changes, and then reads on the host."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(), 0.5)
        return x + 0 * float(self.mean)


UNFIT = {
    Reading: "a step cannot be recorded (operation not permitted when stream is capturing)",
    Counting: "the model changes its own attributes in a step",
    Moving: "operation not permitted",
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_model_that_cannot_be_recorded_trains_as_before(emulated, tmp_path, monkeypatch, kind):
    """The step that failed has left nothing behind: no gradient, draw, change of a buffer or of the optimiser."""
    made = DEQTransformer.__init__

    def with_another(self, config):
        made(self, config)
        self.unfit = kind()
        self.embedding.register_forward_hook(lambda module, args, result: self.unfit(result))

    monkeypatch.setattr(DEQTransformer, "__init__", with_another)
    given = copy_recipe("model.dropout=0.2", "train.steps=6")
    with told_once(UNFIT[kind]):
        run = trained_the_same(given, tmp_path)
    assert (run.captured.recorded, sum(run.captured.fallbacks.values())) == (0, 4)
    assert not inline()


def test_a_failure_while_recording_leaves_nothing_behind(emulated, tmp_path, monkeypatch):
    recorded = StepTape.record

    def record(self, run):
        recorded(self, run)
        raise RuntimeError("the device has no graphs today")

    monkeypatch.setattr(StepTape, "record", record)
    with told_once("a step cannot be recorded (the device has no graphs today)"):
        run = trained_the_same(copy_recipe("model.dropout=0.2"), tmp_path)
    assert run.captured.recorded == run.captured.replayed == 0
    assert {group["capturable"] for group in run.state.stepper.optimizer.param_groups} == {False}
    assert run.state.stepper.optimizer.found_inf is None


def test_a_task_that_uses_the_number_of_the_step_is_not_recorded(emulated, tmp_path, monkeypatch):
    original = CopyMemoryTask.training_step

    def training_step(self, model, batch, carry, step):
        losses, carry = original(self, model, batch, carry, step)
        return {"loss": losses["loss"] / (1 + step)}, carry

    monkeypatch.setattr(CopyMemoryTask, "training_step", training_step)
    with told_once("the task uses the number of the step"):
        run = trained_the_same(copy_recipe("train.steps=4"), tmp_path)
    assert run.captured.replayed == 0


# Parts


def test_a_batch_notes_what_is_read_of_it():
    class Batch:
        tokens, number, far = torch.zeros(3), 3, torch.zeros(2, device="meta")
        odd = object()

        @property
        def even(self):
            return self.number % 2 == 0

    read = {}
    noted = Noted(Batch(), torch.device("cpu"), read)
    assert noted.tokens is Batch.tokens
    assert noted.even is False
    assert list(read) == ["even"]
    with pytest.raises(RuntimeError, match="'far' of a batch on the host"):
        noted.far  # noqa: B018
    with pytest.raises(RuntimeError, match="'odd' of a batch is of type object"):
        noted.odd  # noqa: B018
    with pytest.raises(AttributeError):
        noted.missing  # noqa: B018


def test_outputs_are_written_in_place_and_taken_out_as_copies():
    trees = [{"a": torch.full((2, 3), float(k)), "n": torch.tensor(k), "rule": FIXED, "none": None} for k in range(3)]
    outputs = _Outputs(trees[0])
    outputs.put(trees[1])
    first = outputs.take()
    outputs.put(trees[2])
    assert first["rule"] is FIXED
    assert first["none"] is None
    assert torch.equal(first["a"], trees[1]["a"])
    assert torch.equal(outputs.take()["n"], torch.tensor(2))
    with pytest.raises(RuntimeError, match="differ in what they return"):
        outputs.put({**trees[0], "n": torch.tensor(1.0)})


def test_solves_inside_of_a_larger_recording_have_recordings_of_their_own(monkeypatch):
    deq = deq_of(Scoped().double(), stop=FIXED, adjoint=eq.Implicit(solver=eq.Picard(), stop=FIXED), engine="auto")
    monkeypatch.setattr(deq, "_may_capture", lambda inputs: True)
    x = inputs_of().requires_grad_()
    used, values = [], []
    for inside in (True, True, False, False, True):
        torch.manual_seed(3)
        with solves_inline(used) if inside else own_casts("cpu"):
            solution = deq(x)
            values.append((solution.value, *torch.autograd.grad(loss_of(solution.value), [x, *deq.parameters()])))
    for other in values[1:]:
        assert_close(other, values[0], 1e-6)  # the bound of the spectral norm gets tighter from solve to solve
    assert len(used) == 1  # at once, and the same again
    assert deq.capture.recorded == 2
    assert deq.capture.fallbacks == {"the shape is new": 1}


def test_a_tolerance_is_left_to_the_eager_engine_inside_of_a_larger_recording():
    deq = deq_of(Scoped().double())
    with solves_inline([]), pytest.warns(eq.EquilibriumWarning, match="the host asks when a tolerance is met"):
        deq(inputs_of())


def test_nothing_is_prepared_while_a_larger_recording_is_made(monkeypatch):
    deq = deq_of(Scoped().double(), stop=FIXED, adjoint=eq.Implicit(stop=FIXED))
    monkeypatch.setattr(_capture, "being_recorded", lambda: True)
    with pytest.warns(eq.EquilibriumWarning, match="another recording is under way"):
        deq(inputs_of())
    with solves_inline([]), pytest.warns(eq.EquilibriumWarning, match="nothing was prepared for it"):
        deq(inputs_of())
    monkeypatch.undo()
    with solves_inline([]):
        deq(inputs_of())
    monkeypatch.setattr(_capture, "being_recorded", lambda: True)
    with solves_inline([]) as _:
        deq(inputs_of())
    assert deq.capture.replayed == 2
