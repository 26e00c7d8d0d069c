"""Forward passes as CUDA graphs: values of ordinary calls, weights in place, kinds, refusals, little for the host."""

import gc
import time

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import CapturedForward
from equipoise._forward import CHANGED, NEW
from equipoise._tape import Reruns
from equipoise.data.stream import Segment, TokenStream
from equipoise.models import create_model
from equipoise.nn import frozen
from equipoise.solvers import hyper_solver_for
from equipoise.train import scoring
from equipoise.train.load import open_run
from equipoise.train.loop import evaluate
from equipoise.train.pareto import pareto_opened
from equipoise.train.scoring import Scoring
from tests.cli.program import COPY, train
from tests.gpu.devices import waiting_is_an_error
from tests.gpu.test_hyper_gpu import CASES, MEMORY, SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORDS = 500
FIXED = eq.Stop(rtol=0, max_steps=5, select="last")
SOLVERS = {"anderson": eq.Anderson(), "broyden": eq.Broyden(), "picard": eq.Picard()}
TOLERANCE = {False: 1e-4, True: 1e-2}
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")


def plan(solver):
    return eq.Plan(solver, eq.Implicit(), FIXED)


def language_model(name, solver):
    torch.manual_seed(0)
    if name == "transformer":
        sizes = {"d_model": 32, "heads": 2, "d_inner": 48, "memory_length": 8, "cutoffs": (100,), "div_val": 2}
        return create_model("deq_transformer_small", vocab_size=WORDS, **sizes, plan=plan(solver)).cuda().eval()
    sizes = {"embedding_size": 32, "hidden_size": 32}
    return create_model("deq_trellisnet_small", vocab_size=WORDS, **sizes, plan=plan(solver)).cuda().eval()


def image_model(solver):
    torch.manual_seed(0)
    return create_model("mdeq_cifar_tiny", plan=plan(solver)).cuda().eval()


def segments(batch=4, length=12, seed=0):
    tokens = torch.randint(WORDS, (batch * (8 * length + 6),), generator=torch.Generator().manual_seed(seed))
    return [segment.to("cuda") for segment in TokenStream(tokens, batch, length).segments(epochs=1)]


def close(ours, theirs, tolerance):
    """Relative to the size of each tensor."""
    for a, b in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


def pass_of(model):
    def run(batch, carry):
        output = model(batch.inputs, targets=batch.targets, memory=None if batch.starts else carry)
        return output.losses, output.memory, output.solution.stats

    return run


def hyper_for(model, x, **changes):
    """A learned solver with weights as after some fitting."""
    solver = hyper_solver_for(model.deq, *x, base=model, **{"memory": MEMORY, **SIZES, **changes}).cuda()
    with torch.no_grad():
        for parameter in solver.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return solver.requires_grad_(False)


# Values


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["transformer", "trellisnet"])
def test_language_models_over_a_stream(name, autocast, solver):
    """Ordinary calls are made by the captured engine, once it knows the shapes: it makes the same steps."""
    model = language_model(name, SOLVERS[solver])
    run, batches = pass_of(model), [*segments(), *segments(seed=1)]
    fast, carry = CapturedForward(model, run), None
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            for batch in batches:
                _, carry, _ = run(batch, carry)
        carry = None
        for batch in batches:
            with torch.no_grad():
                losses, after, stats = run(batch, carry)
            found, ours, ours_stats = fast(batch, carry)
            close((found, ours), (losses, after), TOLERANCE[autocast])
            assert torch.equal(ours_stats.steps, stats.steps)
            carry = after
    assert fast._read == {Segment: {"starts": None}}
    # In the midst of a pass, from the third segment on, and at the end of the second one.
    assert (fast.recorded, fast.replayed) == (2, 6 + 7 + 1)
    assert fast.fallbacks == {NEW: 4}
    kinds = [kind for kind in fast._kinds.values() if kind.replay is not None]
    assert all(isinstance(r.tape, Reruns) for kind in kinds for r in kind.recordings)
    assert all(kind.recordings for kind in kinds)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_images(autocast):
    model = image_model(eq.Anderson())
    fast = CapturedForward(model)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            for _ in range(3):  # until the captured engine makes the steps
                model(torch.randn(4, 3, 32, 32, device="cuda"))
        for seed in range(5):
            x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).cuda()
            with torch.no_grad():
                expected = model(x)
            found = fast(x)
            close((found.logits, found.states), (expected.logits, expected.states), 5 * TOLERANCE[autocast])
    assert found.solution.problem is None
    assert (fast.recorded, fast.replayed) == (1, 4)


def test_the_same_bits_for_the_same_kernels():
    """A weight-tied stack, whose ordinary calls make the launches that are recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).cuda().eval()

    def run(x):
        for _ in range(4):
            x = torch.tanh(model(x))
        return {"x": x, "norm": x.norm(dim=1), "top": x.topk(2).indices}

    fast = CapturedForward(model, run)
    for seed in range(4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).cuda()
        with torch.no_grad():
            expected = run(x)
        found = fast(x)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in found)
    assert fast.replayed == 3


def test_weights_change_in_place_and_are_replaced():
    model = image_model(eq.Picard())
    fast, x = CapturedForward(model), torch.randn(2, 3, 32, 32, device="cuda")
    for _ in range(3):
        fast(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.97)
        expected = model(x).logits
    close(fast(x).logits, expected, 2e-3)
    assert fast.recorded == 1
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.97
    gc.collect()
    torch.cuda.empty_cache()  # the old ones are kept by the recording: its last replay reads them, for nothing
    with torch.no_grad():
        expected = model(x).logits
    for _ in range(4):
        close(fast(x).logits, expected, 2e-3)
    assert fast.fallbacks == {NEW: 2, CHANGED: 1}
    assert fast.recorded == 2


# Frozen models


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["transformer", "trellisnet", "mdeq"])
def test_frozen_models_as_graphs(name, solver, autocast):
    """What the model gives in the ordinary way, with fewer launches."""
    model = image_model(SOLVERS[solver]) if name == "mdeq" else language_model(name, SOLVERS[solver])
    batches = [torch.randn(2, 3, 32, 32, device="cuda") for _ in range(4)] if name == "mdeq" else segments()[:6]
    found = []
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for each in (model, frozen(model)):
            run = (lambda batch, carry, each=each: (each(batch).logits, carry)) if name == "mdeq" else pass_of(each)
            fast, carry, values = CapturedForward(each, run), None, []
            for batch in batches:
                value, carry, *_ = fast(batch, carry)
                values.append(value.float().clone())
            found.append(values)
            assert fast.replayed > 0
    for mine, true in zip(*found, strict=True):
        close(mine, true, 5e-2 if autocast else 1e-3)


# Learned solvers


@pytest.mark.parametrize("name", ["transformer", "trellisnet", "mdeq"])
def test_one_recording_serves_the_weights_of_several_learned_solvers(name):
    if name == "mdeq":
        model, given = image_model(eq.Picard()), (torch.randn(2, 3, 32, 32, device="cuda"),)
        run = None
    else:
        model, batches = language_model(name, eq.Picard()), segments()
        run = pass_of(model)
        with torch.no_grad():
            given = batches[1], run(batches[0], None)[1]
    seen = []
    with torch.no_grad():
        hook = model.deq.register_forward_hook(lambda deq, inputs, solution: seen.append(inputs))
        (run or model)(*given)
        hook.remove()
    solvers = [hyper_for(model, seen[0]) for _ in range(3)]
    worn, fast = hyper_for(model, seen[0]), CapturedForward(model, run)
    for solver in solvers:
        worn.load_state_dict(solver.state_dict())
        with eq.override(model, solver=worn):
            for _ in range(3):
                found = fast(*given)
        with torch.no_grad(), eq.override(model, solver=solver):
            for _ in range(3):
                expected = (run or model)(*given)
        first, second = (found[0], expected[0]) if run else (found.logits, expected.logits)
        close(first, second, 2e-3)
    assert (fast.recorded, fast.replayed) == (1, 8)


@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_learned_solvers(name):
    torch.manual_seed(0)
    cell, shape, settings = CASES[name]
    deq = eq.DEQ(cell()).cuda().requires_grad_(False).eval()
    x = torch.randn(shape).cuda()
    solver = hyper_solver_for(deq, x, memory=MEMORY, **SIZES, **settings).cuda().requires_grad_(False)
    with eq.override(deq, solver=solver, stop=FIXED):
        fast = CapturedForward(deq)
        for seed in range(4):
            other = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()
            found = fast(other).value
            with torch.no_grad():
                close(found, deq(other).value, 5e-3 if name == "corrected" else 1e-3)
        assert (fast.recorded, fast.replayed) == (1, 3)


# The host


def test_replays_do_not_wait_and_launch_little():
    model = language_model("transformer", eq.Anderson())
    fast, batches, carry = CapturedForward(model, pass_of(model)), segments(), None
    for batch in [*batches, *batches]:
        _, carry, _ = fast(batch, carry)
    replayed = fast.replayed
    with waiting_is_an_error():
        for batch in batches[1:6]:
            _, carry, _ = fast(batch, carry)
    assert fast.replayed == replayed + 5
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        fast(batches[2], carry)
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["cudaGraphLaunch"] == 1
    assert sum(count for name, count in counts.items() if name.startswith(LAUNCHES)) <= 8


def test_the_host_is_done_long_before_the_model_would_be():
    """A replay of two steps and of twelve takes the host the same, a fraction of an ordinary call."""
    model = language_model("transformer", eq.Anderson())
    batches, run = segments(), pass_of(model)
    with torch.no_grad():
        carry = run(batches[0], None)[1]
    took = {}
    for steps in (2, 12):
        with eq.override(model, stop=eq.Stop(rtol=0, max_steps=steps, select="last")):
            fast = CapturedForward(model, run)
            for name, call in (("graph", fast), ("ordinary", torch.no_grad()(run))):
                samples = []
                for _ in range(30):
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    call(batches[1], carry)
                    samples.append(time.perf_counter() - started)
                took[name, steps] = sorted(samples)[len(samples) // 2]
    print({name: f"{1e6 * seconds:.0f} µs" for name, seconds in took.items()})
    assert took["graph", 12] < 0.5 * took["ordinary", 12]
    assert took["graph", 12] < 1e-3


# Kinds and refusals


def test_shapes_streams_and_inference_mode():
    model = image_model(eq.Picard())
    fast = CapturedForward(model)
    for batch in (2, 3, 2, 3, 2, 3):
        x = torch.randn(batch, 3, 32, 32, device="cuda")
        with torch.inference_mode():
            found = fast(x).logits
        with torch.no_grad():
            close(found.clone(), model(x).logits, 2e-3)
    assert (fast.recorded, fast.replayed) == (2, 4)
    other = torch.cuda.Stream()
    x = torch.randn(2, 3, 32, 32, device="cuda")
    with torch.no_grad():
        expected = model(x).logits
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        found = fast(x).logits
    torch.cuda.current_stream().wait_stream(other)
    close(found, expected, 2e-3)


class Reading(nn.Linear):
    def forward(self, x):
        return super().forward(x) if float(x.detach().sum()) != 1.5 else x


class Waiting(nn.Linear):
    """Is found out when it is recorded only."""

    def forward(self, x):
        torch.cuda.synchronize()
        return super().forward(x)


class Tossing(nn.Linear):
    """Draws on the host."""

    def forward(self, x):
        return super().forward(x) * (1.0 if torch.rand(()) < 2 else 0.5)


UNFIT = {Reading: "cannot be recorded", Waiting: "cannot be recorded", Tossing: "random numbers are drawn on the host"}


class Wrapped(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.deq = first, eq.DEQ(CASES["any"][0](), stop=FIXED)

    def forward(self, x):
        return self.deq(self.first(x)).value


@pytest.mark.parametrize("kind", UNFIT)
def test_what_cannot_be_recorded_is_called_as_before(kind):
    """And what comes after it in the same process can be recorded."""
    torch.manual_seed(0)
    model, x = Wrapped(kind(4, 4)).cuda().eval(), torch.randn(3, 4, device="cuda")
    fast = CapturedForward(model)
    with pytest.warns(eq.EquilibriumWarning, match=UNFIT[kind]):
        found = [fast(x) for _ in range(4)]
    with torch.no_grad():
        close(found[-1], model(x), 1e-4)
    assert (fast.recorded, fast.replayed) == (0, 0)
    model.first = nn.Linear(4, 4).cuda()
    fine = CapturedForward(model)
    for _ in range(3):
        found = fine(x)
    with torch.no_grad():
        close(found, model(x), 1e-4)
    assert fine.replayed == 2


def test_a_tolerance_and_tensors_of_the_host():
    model, x = Wrapped(nn.Linear(4, 4)).cuda().eval(), torch.randn(3, 4, device="cuda")
    fast = CapturedForward(model)
    with eq.override(model, stop=eq.Stop(rtol=1e-2)), pytest.warns(eq.EquilibriumWarning, match="end by a tolerance"):
        fast(x)
    moved = CapturedForward(model, lambda x: model(x.cuda()))
    with pytest.warns(eq.EquilibriumWarning, match="an argument is on cpu, the model on cuda:0"):
        moved(x.cpu())


def test_recordings_are_given_back():
    left = []
    for _ in range(3):
        model = image_model(eq.Anderson())
        fast = CapturedForward(model, most=2)
        for batch in (2, 3, 4):
            for _ in range(2):
                fast(torch.randn(batch, 3, 32, 32, device="cuda"))
        assert sum(kind.replay is not None for kind in fast._kinds.values()) == 2
        fast.release()
        del model, fast
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_allocated())
    assert left[2] <= left[1] + 2**20


# Where solvers are compared


def test_scoring_and_timing_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "WORTH_A_GRAPH", 2)
    run = train(tmp_path, COPY)
    opened = open_run(run, "valid", None, changes=["task.batch_size=1", "task.test_size=26"])
    score = Scoring(opened, "valid")
    with torch.no_grad(), eq.override(opened.model, stop=FIXED):
        truth = evaluate(opened.task, opened.model, opened.splits, "valid", opened.device)
        for _ in range(2):
            found = score(opened.model)
            assert found.keys() == truth.keys()
            assert found["loss"] == pytest.approx(truth["loss"], rel=1e-4)
            assert found["recall"] == pytest.approx(truth["recall"], abs=0.02)
    assert score.forward(opened.model).replayed == 10
    others = {"4 layers": opened.model.explicit(4)}
    solvers = {"anderson": "anderson", "broyden": "broyden", "picard": "picard"}
    record = pareto_opened(opened, solvers, (1, 4), warmup=2, rounds=5, others=others)
    assert {(p["engine"], p["no_graph"]) for p in record["points"]} == {("graph", None)}
