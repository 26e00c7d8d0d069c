"""The captured engine with real CUDA graphs: results of the eager engine, no waiting, and no trace of a failure."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import _loop
from equipoise._tape import Graphs
from tests.captured import recordings_of
from tests.gpu.devices import losses_in_training, waiting_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SOLVERS = [eq.Picard(), eq.Picard(0.7), eq.Anderson(), eq.Anderson(memory=3, mixing=0.8), eq.Broyden()]
SOLVERS += [eq.Broyden(memory=5), eq.Broyden(step=0.8)]
LOOSE = eq.Stop(rtol=1e-4, max_steps=60)
FIXED = eq.Stop(rtol=0, max_steps=10)


class Cell(nn.Module):
    """Weight norm, spectral norm and dropout."""

    def __init__(self, n=48):
        super().__init__()
        self.mix, self.bound = eq.nn.weight_norm(nn.Linear(n, n)), eq.nn.spectral_norm(nn.Linear(n, n), bound=0.4)
        self.drop = eq.nn.VariationalDropout(0.3)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.drop(self.mix(z)) + self.bound(z) + x)


def deq_of(cell, solver=eq.Anderson(), stop=LOOSE, adjoint_stop=None, engine="captured"):
    adjoint = eq.Implicit(solver=solver, stop=adjoint_stop or stop)
    return eq.DEQ(cell, solver=solver, stop=stop, adjoint=adjoint, engine=engine).cuda()


def inputs_of(n=48, batch=9, seed=0):
    return torch.randn(batch, n, generator=torch.Generator().manual_seed(seed)).cuda()


def twins(cell, **options):
    """The same DEQ with each engine: eager, captured."""
    deq = deq_of(cell, **options)
    eager = copy.deepcopy(deq)
    eager.engine = "eager"
    return eager, deq


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def train(model, x, autocast=False, steps=3, rate=0.05):
    """Values, gradients and statistics of some steps of gradient descent."""
    results = []
    for k in range(steps):
        torch.manual_seed(k)
        given = (x * (1 + 0.1 * k)).requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            solution = model(given)
        model.zero_grad(set_to_none=True)
        (solution.value.float().sin() * torch.linspace(-1, 1, x.shape[-1], device="cuda")).sum().backward()
        grads = [given.grad, *(p.grad for p in model.parameters())]
        results.append((solution.value.detach(), grads, solution.stats, solution.backward))
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
    return results


def agree(ours, theirs, value, gradient, statistics=True):
    for (a, da, sa, ba), (b, db, sb, bb) in zip(ours, theirs, strict=True):
        assert relative(a, b) <= value
        for x, y in zip(da, db, strict=True):
            assert relative(x, y) <= gradient
        for x, y in ((sa, sb), (ba, bb)) if statistics else ():
            assert torch.equal(x.status, y.status)
            assert (x.steps - y.steps).abs().max() <= 1


# Results


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_training_to_a_tolerance(solver):
    """float32, a tolerance of 1e-4: values to 1e-3 and gradients to 1e-2 of their norms, step counts ± 1."""
    eager, captured = twins(Cell(), solver=solver)
    x = inputs_of()
    agree(train(captured, x), train(eager, x), 1e-3, 1e-2)
    assert captured.capture.recorded == 1
    assert captured.capture.replayed == 3


@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("solver", SOLVERS[::2], ids=str)
def test_training_by_a_fixed_budget(solver, select):
    """Ten steps of each solve: rounding is all that differs, and it is not amplified."""
    stop = eq.Stop(rtol=0, max_steps=10, select=select)
    eager, captured = twins(Cell(), solver=solver, stop=stop)
    x = inputs_of()
    agree(train(captured, x), train(eager, x), 1e-4, 1e-3)
    assert not captured.capture.fallbacks


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=str)
def test_training_in_bfloat16(solver):
    """Weights are cast inside the graphs: with casts of the first step, values would be off by more than rounding."""
    stop = eq.Stop(rtol=0, max_steps=40)
    eager, captured = twins(Cell(), solver=solver, stop=stop)
    x = inputs_of()
    ours, theirs = train(captured, x, autocast=True, rate=0.2), train(eager, x, autocast=True, rate=0.2)
    assert relative(theirs[0][0], theirs[2][0]) > 0.1  # the steps matter
    agree(ours, theirs, 2e-2, 6e-2, statistics=False)  # in bfloat16 a residual may become zero by chance
    assert captured.capture.replayed == 3


def test_inference_and_autocast_cache():
    eager, captured = twins(Cell().eval())
    x = inputs_of()
    for scale in (1.0, 0.5):
        with torch.no_grad():
            for model in (eager, captured):
                model.cell.mix.weight_g.mul_(scale)
        for context in (torch.no_grad, torch.inference_mode):
            with context(), torch.autocast("cuda", dtype=torch.bfloat16):
                assert relative(captured(x).value, eager(x).value) <= 1e-2
                outside = captured.cell.bound(x)  # no cast made inside a graph is left behind
                assert torch.equal(outside, eager.cell.bound(x))
    assert captured.capture.recorded == 1
    assert captured.capture.replayed == 4


def models():
    from equipoise.models.deq_transformer import DEQTransformer, DEQTransformerConfig
    from equipoise.models.deq_trellisnet import DEQTrellisNet, DEQTrellisNetConfig

    stop = eq.Stop(rtol=0, max_steps=6)
    plan = eq.Plan(eq.Anderson(memory=5), eq.Implicit(solver=eq.Broyden(), stop=stop), stop)
    transformer = {"vocab_size": 50, "d_model": 32, "heads": 2, "d_inner": 64, "dropout": 0.1, "memory_length": 8}
    transformer |= {"attention_dropout": 0.1, "plan": plan}
    trellis = {"vocab_size": 50, "embedding_size": 24, "hidden_size": 16, "dropout_hidden": 0.2, "dropconnect": 0.3}
    trellis |= {"init_std": 0.1, "plan": plan}
    return {
        "transformer": lambda: DEQTransformer(DEQTransformerConfig(**transformer)),
        "recomputed": lambda: DEQTransformer(DEQTransformerConfig(**transformer, ffn_chunks=2)),
        "trellis": lambda: DEQTrellisNet(DEQTrellisNetConfig(**trellis)),
        "trellis_full": lambda: DEQTrellisNet(DEQTrellisNetConfig(**trellis, form="full")),
    }


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["transformer", "recomputed", "trellis", "trellis_full"])
def test_training_of_language_models(name, autocast):
    """Three segments with memory and dropout, a step of AdamW after each: losses to 1e-3 (bfloat16: 3e-2)."""
    torch.manual_seed(0)
    model = models()[name]().cuda()
    twin = copy.deepcopy(model)
    tokens = torch.randint(50, (4, 3, 12), device="cuda")
    losses = []
    for trained, engine in ((twin, "eager"), (model, "captured")):
        trained.deq.engine = engine
        losses.append(losses_in_training(trained, tokens, autocast))
    assert relative(losses[1], losses[0]) <= (3e-2 if autocast else 1e-3)
    assert not model.deq.capture.fallbacks
    assert model.deq.capture.replayed == 3


# How it runs


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=str)
def test_a_replayed_fixed_budget_never_waits_for_the_device(solver):
    deq = deq_of(Cell(), solver=solver, stop=FIXED)
    x = inputs_of().requires_grad_()
    for _ in range(2):
        deq(x).value.square().sum().backward()
    with waiting_is_an_error():
        solution = deq(x)
        solution.value.square().sum().backward()
    assert deq.capture.replayed == 3
    assert solution.stats.steps.tolist() == [10] * 9


LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")


def called(work):
    """How often the functions of the CUDA runtime and driver were called, by name."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        work()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("cu")}


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=str)
def test_launches_outside_of_graphs(solver):
    """Of a solve: a small graph and one for the rest, copies of inputs and results. Training: a few launches more."""
    deq, x = deq_of(Plain(), solver=solver, stop=FIXED), inputs_of()

    def infer():
        with torch.no_grad():
            deq(x)

    def train():
        torch.autograd.grad(deq(x).value.sum(), list(deq.parameters()))

    for work, graphs, most in ((infer, 2, 15), (train, 6, 30)):
        for _ in range(3):
            work()
        names = called(work)
        assert 0 < names["cudaGraphLaunch"] <= graphs, names
        assert sum(names.get(name, 0) for name in (*LAUNCHES, *COPIES)) <= most, names
        assert not {"cudaStreamSynchronize", "cudaEventSynchronize"} & set(names), names


class Plain(nn.Module):
    """Nothing is held constant, so nothing is computed before a replay."""

    def __init__(self, n=48):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n))

    def forward(self, z, x):
        return torch.tanh(0.4 * self.layers(z) + x)


class Slow(nn.Module):
    """Systems whose convergence is as slow as their `a` is near 1; the same f in any batch."""

    def __init__(self, n=48):
        super().__init__()
        self.mix = eq.nn.weight_norm(nn.Linear(n, n))
        self.drop = eq.nn.VariationalDropout(0.2)
        with torch.no_grad():
            self.mix.weight_g.mul_(0.2)

    def forward(self, z, x, a):
        return torch.tanh(a * z + 0.1 * self.drop(self.mix(z)) + x)


def skewed(batch=64, hard=1):
    x, a = 0.1 * inputs_of(batch=batch), torch.full((batch, 1), 0.1)
    a[torch.randperm(batch, generator=torch.Generator().manual_seed(0))[:hard]] = 0.85
    return x, a.cuda()


def test_a_tolerance_is_asked_about_when_there_may_be_something_to_hear(monkeypatch):
    asked = []
    read = Graphs.read
    monkeypatch.setattr(Graphs, "read", lambda self, *args: asked.append(1) or read(self, *args))
    eager, captured = twins(Slow().eval(), solver=eq.Picard())
    x, a = inputs_of(batch=4), torch.full((4, 1), 0.6, device="cuda")
    with torch.no_grad():
        solutions = [captured(x, a) for _ in range(4)]
        truth = eager(x, a)
    assert len(asked) >= 3 + 3  # after each chunk of the first solve, once in the others
    for solution in solutions:
        assert relative(solution.value, truth.value) <= 1e-4
        assert torch.equal(solution.stats.status, truth.stats.status)
        assert (solution.stats.steps - truth.stats.steps).abs().max() <= 1
    first = len(asked)
    with torch.no_grad():
        captured(x, a)
    assert len(asked) == first + 1


@pytest.mark.parametrize(
    ("solver", "autocast"),
    [(eq.Picard(), False), (eq.Anderson(), False), (eq.Broyden(), False), (eq.Picard(), True)],
    ids=["picard", "anderson", "broyden", "bfloat16"],
)
def test_the_last_systems_are_solved_alone(solver, autocast):
    """63 easy systems and a hard one, in inference: the eager engine's results to the tolerance of the solves."""
    stop = eq.Stop(rtol=2e-2 if autocast else 1e-5, max_steps=100)
    eager, captured = twins(Slow().eval(), solver=solver, stop=stop)
    for seed in range(5):
        x, a = skewed()
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).cuda()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            ours, theirs = captured(x[order], a[order]), eager(x[order], a[order])
        assert relative(ours.value, theirs.value) <= (0.2 if autocast else 1e-3)
        assert bool(ours.stats.ok.all())
        if not autocast:
            assert torch.equal(ours.stats.status, theirs.stats.status)
            assert (ours.stats.steps - theirs.stats.steps).abs().max() <= 2
        assert ours.stats.nfe <= theirs.stats.nfe + 4 * _loop.CHUNK + 1
    assert 1 in recordings_of(captured)[0].forward.levels
    assert captured.capture.recorded == 1
    assert captured.capture.replayed == 5


def test_training_with_smaller_batches_and_masks():
    """Forward solves of a skewed batch; masks of dropout are those of the eager engine, system by system."""
    eager, captured = twins(Slow().train(), stop=eq.Stop(rtol=1e-5, max_steps=100))
    x, a = skewed(32, 2)
    for seed in range(4):
        grads = []
        for model in (eager, captured):
            torch.manual_seed(seed)
            value = model(x, a).value
            loss = (value.sin() * torch.linspace(-1, 1, 48, device="cuda")).sum()
            grads.append([value, *torch.autograd.grad(loss, list(model.parameters()))])
        for ours, theirs in zip(grads[1], grads[0], strict=True):
            assert relative(ours, theirs) <= 2e-3
    assert not captured.capture.fallbacks
    assert recordings_of(captured)[0].forward.levels


def test_a_cell_made_for_one_size_of_batch():
    class Fixed(Slow):
        def forward(self, z, x, a):
            return super().forward(z, x, a).view(64, 48)

    eager, captured = twins(Fixed().eval(), stop=eq.Stop(rtol=1e-5, max_steps=100))
    eager.in_dims = None  # that engine does not take the batch apart then
    x, a = skewed()
    with torch.no_grad():
        for _ in range(4):
            assert relative(captured(x, a).value, eager(x, a).value) <= 1e-3
    assert captured.capture.replayed == 4
    works()


def test_auto_records_what_comes_again():
    deq = deq_of(Cell(), engine="auto")
    x = inputs_of()
    for _ in range(3):
        deq(x)
    deq(inputs_of(batch=4))
    assert deq.capture.recorded == 1
    assert deq.capture.replayed == 2
    assert deq.capture.fallbacks == {"the shape is new": 2}


def test_two_leases_and_a_graph_that_is_alive_while_recording():
    """A live graph holds the parameters' gradient accumulators, on the default stream; recordings do not touch them."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(48, 48)

        def forward(self, z, x):
            return torch.tanh(0.5 * self.mix(z).sort(dim=1).values + x)  # its backward pass uses indices

    eager, captured = twins(Mixing(), stop=FIXED)
    alive = [model.cell(inputs_of(), inputs_of()).sum() for model in (eager, captured)]
    xs = [inputs_of(seed=seed).requires_grad_() for seed in range(2)]
    grads = []
    for model, loss in zip((eager, captured), alive, strict=True):
        losses = [model(x).value.sin().sum() for x in xs]
        for each in (*losses, loss):
            each.backward()
        grads.append([*(x.grad.clone() for x in xs), *(p.grad for p in model.parameters())])
        for x in xs:
            x.grad = None
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        assert relative(ours, theirs) <= 1e-3
    assert captured.capture.recorded == 2
    assert not captured.capture.fallbacks


def test_solves_on_several_streams():
    eager, captured = twins(Cell().eval(), stop=FIXED)
    xs = [inputs_of(seed=seed) for seed in range(6)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    with torch.no_grad():
        truth = [eager(x).value for x in xs]
        torch.cuda.synchronize()
        values = []
        for k, x in enumerate(xs):
            with torch.cuda.stream(streams[k % 3]):
                values.append(captured(x).value)
    torch.cuda.synchronize()
    for value, expected in zip(values, truth, strict=True):
        assert relative(value, expected) <= 1e-4
    assert captured.capture.recorded == 1


def test_random_numbers_inside_the_cell_are_new_in_every_replay():
    class Noisy(nn.Module):
        def forward(self, z, x):
            return 0.3 * nn.functional.dropout(z, 0.5) + x

    deq, x = deq_of(Noisy(), solver=eq.Picard(), stop=FIXED), inputs_of()
    with torch.no_grad():
        values = [deq(x).value for _ in range(3)]
    assert deq.capture.replayed == 3
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[1], values[2])


def test_memory_of_dropped_recordings_comes_back():
    deq, x = deq_of(Cell(256), stop=FIXED), inputs_of(256, batch=16384).requires_grad_()

    def used():
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() / 2**20

    deq.engine = "eager"
    deq(x).value.sum().backward()
    before = used()
    deq.engine = "captured"
    for _ in range(3):
        deq(x).value.sum().backward()
    recorded = used()
    assert recorded > before + 300  # two solves with twelve states of 16 MiB each
    for _ in range(20):
        deq(x).value.sum().backward()
    assert used() <= recorded
    deq._capture = None
    assert used() <= before + 100  # libraries keep their workspaces for the recording stream


# Failures


def works():
    """Random numbers, allocations, matrix products, gradients, the current stream and further recordings."""
    torch.manual_seed(0)
    first = torch.rand(1000, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(1000, device="cuda"))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    big = torch.ones(1 << 22, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total = big.sum()
    big.record_stream(stream)
    del big
    torch.cuda.current_stream().wait_stream(stream)
    assert float(total) == 1 << 22
    assert torch.cuda.get_sync_debug_mode() == 0
    eager, captured = twins(Cell(), stop=FIXED)
    agree(train(captured, inputs_of()), train(eager, inputs_of()), 1e-4, 1e-3)
    assert captured.capture.replayed == 3


class Reading(nn.Module):
    """Reads a value on the host: always, in the backward pass, or only where a rehearsal does not see it."""

    def __init__(self, when):
        super().__init__()
        self.when, self.mix = when, nn.Linear(48, 48)

    def forward(self, z, x):
        y = torch.tanh(0.3 * self.mix(z) + x)
        if self.when == "always" or (self.when == "recorded" and torch.cuda.is_current_stream_capturing()):
            y = y * min(1.0, y.abs().sum().item())
        if self.when == "backward" and y.requires_grad:
            y = _ReadInBackward.apply(y)
        return y


class _ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * min(1.0, 1.0 + grad.abs().sum().item())


@pytest.mark.parametrize("when", ["always", "backward", "recorded"])
def test_a_cell_that_reads_values(when):
    eager, captured = twins(Reading(when), stop=FIXED)
    x = inputs_of().requires_grad_()
    with pytest.warns(eq.EquilibriumWarning, match="the cell cannot be recorded"):
        value = captured(x).value
    assert relative(value, eager(x).value) <= 1e-5
    value.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(x)
    assert captured.capture.replayed == 0
    assert sum(captured.capture.fallbacks.values()) == 2
    works()


class Scaled(nn.Module):
    """A number on the host would be read once, when the solve is recorded."""

    def forward(self, z, x, scale):
        return scale * torch.tanh(z) + x


def test_reasons_of_fallbacks():
    x = inputs_of()
    with torch.no_grad():
        with pytest.warns(eq.EquilibriumWarning, match="no kernel for torch.float64"):
            deq_of(Cell().double())(x.double())
        with pytest.warns(eq.EquilibriumWarning, match="holds 16 steps, not 20"):
            deq_of(Cell(), solver=eq.Anderson(memory=20))(x)
        deq = eq.DEQ(Scaled(), solver=eq.Picard(), stop=FIXED, in_dims=None, engine="captured")
        with pytest.warns(eq.EquilibriumWarning, match="an input is on cpu"):
            deq(x, torch.tensor(0.5))
    works()


def test_a_recomputed_part_that_asks_for_constants():
    """Recomputation runs in a thread of autograd, where the scope of a recording is not open."""
    from torch.utils.checkpoint import checkpoint

    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.drop = nn.Linear(48, 48), eq.nn.VariationalDropout(0.4)

        def part(self, z):
            return self.drop(self.mix(z))

        def forward(self, z, x):
            part = checkpoint(self.part, z, use_reentrant=False) if torch.is_grad_enabled() else self.part(z)
            return torch.tanh(0.5 * part + x)

    deq = deq_of(Recomputing(), stop=FIXED)
    with pytest.warns(eq.EquilibriumWarning, match="a constant of the solve is asked for outside of it"):
        deq(inputs_of().requires_grad_()).value.sum().backward()
    works()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch, of what it traces
def test_compiled_cells():
    eager, captured = twins(Cell(), stop=FIXED)
    for model in (eager, captured):
        model.compile_cell(backend="aot_eager")  # what is compiled does not matter here, and this is quick
    x = inputs_of()
    agree(train(captured, x, steps=2), train(eager, x, steps=2), 1e-3, 1e-2)
    assert captured.capture.replayed == 2
