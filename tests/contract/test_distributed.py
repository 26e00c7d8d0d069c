"""Two ranks give the outputs and gradients of one process, although they take different numbers of solver steps.

The two processes are started once for the file, since starting takes longer than a case, and run one case after the
other; a case that hangs or fails ends them, and the next one starts new ones.
"""

import contextlib
import functools
import os
import re
import traceback
import warnings
from multiprocessing.connection import wait

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import equipoise as eq
from equipoise import Broyden, Implicit, Neumann, Phantom, Reversible, Shine, Stop, Unroll

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

RANKS, ROWS, FEATURES, WIDTH, CLASSES = 2, 6, 3, 7, 2  # 7: parameters do not divide evenly by ranks
PATIENCE = 60.0  # seconds for one case, of which starting the processes takes most

# Relative, in the largest entry of each tensor.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
TIGHT = {
    torch.float64: Stop(rtol=1e-14, max_steps=200),
    torch.float32: Stop(rtol=1e-7, max_steps=200),
}


# --------------------------------------------------------------------------------------------------------------- models


class Cell(nn.Module):
    """tanh(mix(z) + read(x)); with small x it contracts slowly, with large x fast."""

    def __init__(self):
        super().__init__()
        self.mix, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            nn.init.orthogonal_(self.mix.weight).mul_(0.9)
            self.mix.bias.zero_()

    def forward(self, z, x):
        return torch.tanh(self.mix(z) + self.read(x))


class WeightNormCell(Cell):
    def __init__(self):
        super().__init__()
        eq.nn.weight_norm(self.mix)
        eq.nn.weight_norm(self.read)


class SpectralNormCell(Cell):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.mix.weight.mul_(3.0)
        eq.nn.spectral_norm(self.mix, bound=0.9, iterations=2)


class DropoutCell(Cell):
    def __init__(self):
        super().__init__()
        self.drop = eq.nn.VariationalDropout(0.3)

    def forward(self, z, x):
        return self.drop(super().forward(z, x))


class LearnedStartCell(Cell):
    """Begins at a function of its parameters, calling one of its parts outside of forward."""

    def initial_state(self, x):
        return 0.1 * self.read(x) * self.mix.weight.diagonal()


class TwoLeafCell(Cell):
    """A state of two leaves of different shapes, coupled."""

    def initial_state(self, x):
        return x.new_zeros(x.shape), x.new_zeros(len(x), WIDTH, 1)

    def forward(self, z, x):
        first, second = z
        return super().forward(second[..., 0], x), 0.9 * super().forward(first, x)[..., None]


class NestedCell(Cell):
    """A cell that solves for an equilibrium itself."""

    def __init__(self):
        super().__init__()
        self.inner = eq.DEQ(Cell(), stop=TIGHT[torch.float64], adjoint=Implicit(stop=TIGHT[torch.float64]))
        with torch.no_grad():
            self.inner.cell.mix.weight.mul_(0.03)

    def forward(self, z, x):
        return torch.tanh(self.mix(z) + self.read(x) + 0.1 * self.inner(x + 0.1 * z).value)


class Model(nn.Module):
    """encoder -> DEQ -> head; the last solution is kept to be looked at."""

    def __init__(self, cell=Cell, dtype=torch.float64, encoder=True, twice=False, recompute=False, penalty=0.0, **plan):
        super().__init__()
        torch.manual_seed(7)
        self.encoder = nn.Linear(FEATURES, WIDTH, bias=False) if encoder else None
        plan = {"adjoint": Implicit(stop=TIGHT[dtype]), "stop": TIGHT[dtype], **plan}
        self.deq = eq.DEQ(cell(), **plan)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.twice, self.recompute, self.penalty = twice, recompute, penalty
        self.to(dtype)

    def solve(self, x):
        self.solution = self.deq(x)
        return self.solution.value

    def forward(self, u):
        x = self.encoder(u) if self.encoder is not None else u
        value = checkpoint(self.solve, x, use_reentrant=False) if self.recompute else self.solve(x)
        if self.twice:
            value = self.deq(0.5 * value).value + value
        if isinstance(value, tuple):
            value = value[0] + value[1][..., 0]
        out = self.head(value)
        if self.penalty:
            out = out + self.penalty * eq.jacobian_penalty(self.solution)
        return out


def data(dtype, encoder=True, steps=2):
    """Per training step and rank: rank 0 has the easy systems, rank 1 the hard ones."""
    generator = torch.Generator().manual_seed(11)
    scale = torch.tensor([50.0, 0.05], dtype=torch.float64).repeat_interleave(ROWS)[:, None]
    shape = (steps, RANKS * ROWS, FEATURES if encoder else WIDTH)
    u = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    target = torch.randn((steps, RANKS * ROWS, CLASSES), generator=generator, dtype=torch.float64)
    return list(zip(u.to(dtype), target.to(dtype), strict=True))


def train(model, batches, accumulate=1, seed=None, chunks=1):
    """Plain gradient descent; outputs and statistics of every step, gradients of the last.

    Both ranks, and the single process, run this same code. With `seed`, random draws are made anew for each of `chunks`
    parts of the batch, as each rank makes them for its own.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    communicate = communication(model) if accumulate > 1 else lambda last: contextlib.nullcontext()
    outputs, solutions = [], []
    inner = next(m for m in model.modules() if isinstance(m, Model))
    for i, (u, target) in enumerate(batches):
        last = (i + 1) % accumulate == 0
        for u_part, target_part in zip(u.chunk(chunks), target.chunk(chunks), strict=True):
            if seed is not None:
                torch.manual_seed(seed + i)
            with communicate(last):
                out = model(u_part)
                loss = (out - target_part).square().mean() / (chunks * accumulate)
                loss.backward()
            outputs.append(out.detach())
            solutions.append(inner.solution)
        if last and i + 1 < len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return {
        "outputs": [torch.cat(outputs[i : i + chunks]) for i in range(0, len(outputs), chunks)],
        "grads": {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()},
        "steps": [int(s.stats.steps.max()) for s in solutions],
        "backward_steps": [s.backward and int(s.backward.steps.max()) for s in solutions],
        "ok": all(bool(s.stats.ok.all()) for s in solutions),
    }


def communication(model):
    """A context for each step in which gradients are communicated, or only added up."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return lambda now: contextlib.nullcontext() if now else model.no_sync()

    def step(now):
        if isinstance(model, dist.fsdp.FSDPModule):
            model.set_requires_gradient_sync(now)
        return contextlib.nullcontext()

    return step


def whole(tensor):
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---------------------------------------------------------------------------------------------------------------- ranks


def wrap(model, how):
    """Distribute a model over the ranks, in one of several ways."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if how == "single":
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "ddp-static":
        return DistributedDataParallel(model, static_graph=True)
    if how == "ddp-unused":
        return DistributedDataParallel(model, find_unused_parameters=True)
    cell = model.deq.cell
    if how == "fsdp-deq":
        fully_shard(model.deq)
    elif how == "fsdp-cell":
        fully_shard(cell)
    elif how == "fsdp-cell-kept":
        fully_shard(cell, reshard_after_forward=False)
    elif how == "fsdp-parts":
        fully_shard(cell.mix)
        fully_shard(cell.read)
    elif how == "fsdp-all":
        for part in (cell.mix, cell.read, cell, model.deq, model.encoder, model.head):
            fully_shard(part)
    elif how != "fsdp-root":
        raise ValueError(how)
    return fully_shard(model)


def my_part(rank, batches):
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    return [(u[mine], target[mine]) for u, target in batches]


def train_on_rank(rank, how, config=None, steps=2, **options):
    model = Model(**(config or {}))
    dtype, encoder = model.head.weight.dtype, model.encoder is not None
    return train(wrap(model, how), my_part(rank, data(dtype, encoder, steps)), **options)


def serve(rank, store, pipe):
    """A rank: run what the parent asks for."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        while (job := pipe.recv()) is not None:
            function, arguments = job
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    pipe.send((True, function(rank, **arguments)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
    except EOFError:
        pass
    finally:
        dist.destroy_process_group()


class Ranks:
    """Two processes that run functions together."""

    def __init__(self, folder):
        self.folder, self.started, self.processes = folder, 0, []

    def start(self):
        context = torch.multiprocessing.get_context("spawn")
        self.started += 1
        store = self.folder / f"store{self.started}"
        self.pipes, ends = zip(*[context.Pipe() for _ in range(RANKS)], strict=True)
        self.processes = [
            context.Process(target=serve, args=(rank, str(store), ends[rank]), daemon=True) for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()
        for end in ends:
            end.close()

    def run(self, function, **arguments):
        """[function(rank, **arguments) of each rank]; fails if one of them raises, dies or takes too long."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results, waiting = {}, {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            ready = wait(list(waiting), timeout=PATIENCE)
            if not ready:
                self.stop()
                pytest.fail(f"ranks {sorted(waiting.values())} did not answer in {PATIENCE:.0f} s: they wait for ever")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, results[rank] = pipe.recv()
                except EOFError:
                    good, results[rank] = False, "the process died"
                if not good:
                    self.stop()
                    pytest.fail(f"rank {rank}: {results[rank]}")
        return [results[rank] for rank in range(RANKS)]

    def stop(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(timeout=10)
        self.processes = []

    def close(self):
        """End the processes in good order, or kill those that do not end."""
        for pipe in self.pipes if self.processes else ():
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(timeout=10)
        self.stop()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    group = Ranks(tmp_path_factory.mktemp("ranks"))
    yield group
    group.close()


# ---------------------------------------------------------------------------------------------------------------- tests


def assert_close(actual, expected, dtype, what):
    error = float((actual - expected).abs().max() / expected.abs().max())
    assert error <= TOLERANCE[dtype], f"{what}: relative error {error:.1e}"


def assert_same(results, expected, dtype=torch.float64):
    for step, whole_batch in enumerate(expected["outputs"]):
        both = torch.cat([result["outputs"][step] for result in results])
        assert_close(both, whole_batch, dtype, f"outputs of step {step}")
    assert all(result["ok"] for result in results) == expected["ok"]
    for rank, result in enumerate(results):
        assert result["grads"].keys() == expected["grads"].keys()
        for name, grad in expected["grads"].items():
            assert_close(result["grads"][name], grad, dtype, f"gradient of {name} on rank {rank}")


def assert_uneven(results, backward=True):
    """The ranks took very different numbers of steps, so a collective inside the solve would not have matched."""
    for name in ("steps", "backward_steps") if backward else ("steps",):
        easy, hard = (result[name] for result in results)
        assert all(few + 5 <= many for few, many in zip(easy, hard, strict=True)), (name, easy, hard)


@functools.cache
def one_process(steps=2, accumulate=1, seed=None, **config):
    """What one process finds on the whole batch."""
    batches = data(config.get("dtype", torch.float64), config.get("encoder", True), steps)
    return train(Model(**config), batches, accumulate, seed, chunks=1 if seed is None else RANKS)


def ways(*usual, slow=()):
    """Parameters for ways to distribute a model; `slow` ones are left to the long test run."""
    return pytest.mark.parametrize("how", [*usual, *(pytest.param(how, marks=pytest.mark.slow) for how in slow)])


OTHER_FSDP = ("fsdp-root", "fsdp-deq", "fsdp-parts")


@ways(
    *("ddp", "ddp-static", "ddp-unused"),
    *("fsdp-root", "fsdp-deq", "fsdp-cell", "fsdp-cell-kept", "fsdp-parts", "fsdp-all"),
)
def test_two_ranks_train_as_one_process(ranks, how):
    results = ranks.run(train_on_rank, how=how)
    assert_uneven(results)
    assert_same(results, one_process())


@ways("ddp", "fsdp-cell", slow=OTHER_FSDP)
def test_in_float32(ranks, how):
    results = ranks.run(train_on_rank, how=how, config={"dtype": torch.float32})
    assert_uneven(results)
    assert_same(results, one_process(dtype=torch.float32), torch.float32)


# Name, plan, whether the ranks take different numbers of steps (forward, backward).
ADJOINTS = [
    ("any-order", {"adjoint": Implicit(stop=TIGHT[torch.float64], any_order=True)}, True, True),
    ("unroll", {"adjoint": Unroll(), "stop": Stop(rtol=1e-6)}, True, False),
    ("unroll-checkpoint", {"adjoint": Unroll(checkpoint=True), "stop": Stop(rtol=1e-6)}, True, False),
    ("phantom", {"adjoint": Phantom()}, True, False),
    ("neumann", {"adjoint": Neumann()}, True, False),
    ("shine", {"adjoint": Shine(refine=2), "solver": Broyden(), "stop": Stop(rtol=1e-6)}, True, False),
    ("reversible", {"adjoint": Reversible(), "stop": Stop(max_steps=12)}, False, False),
]


@ways("ddp", "fsdp-cell", slow=OTHER_FSDP)
@pytest.mark.parametrize(("plan", "forward", "backward"), [c[1:] for c in ADJOINTS], ids=[c[0] for c in ADJOINTS])
def test_every_adjoint(ranks, how, plan, forward, backward):
    results = ranks.run(train_on_rank, how=how, config=plan)
    if forward:
        assert_uneven(results, backward)
    assert_same(results, one_process(**plan))


@ways("ddp", "fsdp-cell", slow=OTHER_FSDP)
@pytest.mark.parametrize(
    "cell", [WeightNormCell, SpectralNormCell, LearnedStartCell, TwoLeafCell], ids=lambda c: c.__name__
)
def test_kinds_of_cells(ranks, how, cell):
    results = ranks.run(train_on_rank, how=how, config={"cell": cell})
    assert_uneven(results)
    assert_same(results, one_process(cell=cell))


@ways("fsdp-cell", slow=("ddp", "fsdp-root", "fsdp-deq", "fsdp-parts", "fsdp-all"))
def test_nested_solves(ranks, how):
    results = ranks.run(train_on_rank, how=how, config={"cell": NestedCell}, steps=1)
    assert_uneven(results)
    assert_same(results, one_process(cell=NestedCell, steps=1))


@ways("ddp", "fsdp-cell", slow=OTHER_FSDP)
def test_dropout(ranks, how):
    results = ranks.run(train_on_rank, how=how, config={"cell": DropoutCell}, seed=5)
    assert_uneven(results)
    assert_same(results, one_process(cell=DropoutCell, seed=5))


@ways("ddp", "fsdp-cell", slow=OTHER_FSDP)
def test_gradient_accumulation(ranks, how):
    results = ranks.run(train_on_rank, how=how, steps=4, accumulate=2)
    assert_uneven(results)
    assert_same(results, one_process(steps=4, accumulate=2))


@ways("ddp", "fsdp-cell", slow=OTHER_FSDP)
def test_a_layer_used_twice(ranks, how):
    results = ranks.run(train_on_rank, how=how, config={"twice": True})
    assert_uneven(results)
    assert_same(results, one_process(twice=True))


@ways("fsdp-cell", slow=("ddp", *OTHER_FSDP))
def test_an_input_without_gradient(ranks, how):
    results = ranks.run(train_on_rank, how=how, config={"encoder": False})
    assert_uneven(results)
    assert_same(results, one_process(encoder=False))


@ways("fsdp-cell", slow=("ddp", "fsdp-root", "fsdp-parts"))
def test_a_layer_recomputed_in_the_backward_pass(ranks, how):
    results = ranks.run(train_on_rank, how=how, config={"recompute": True})
    assert_uneven(results, backward=False)
    assert_same(results, one_process())


@ways("fsdp-cell-kept", slow=("ddp", "fsdp-root"))
def test_jacobian_penalty(ranks, how):
    results = ranks.run(train_on_rank, how=how, config={"penalty": 0.5}, seed=5)
    assert_uneven(results)
    assert_same(results, one_process(penalty=0.5, seed=5))


class Collectives(TorchDispatchMode):
    """Counts collective operations, by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def count_communication(rank, how):
    """Collective operations forward, backward, and without gradient; evaluations of the cell forward and backward."""
    model = wrap(Model(), how)
    ((u, _),) = my_part(rank, data(torch.float64, steps=1))
    with Collectives() as forward:
        loss = model(u).square().mean()
    with Collectives() as backward:
        loss.backward()
    evaluations = (model.solution.stats.nfe, model.solution.backward.nfe)
    with Collectives() as inference, torch.no_grad():
        model.eval()(u)
    return (forward.counts, backward.counts, inference.counts), evaluations


@pytest.mark.parametrize(
    ("how", "forward", "backward"),
    [
        ("fsdp-root", 1, (0, 1)),
        ("fsdp-deq", 2, (1, 2)),
        ("fsdp-cell", 2, (1, 2)),
        ("fsdp-cell-kept", 2, (0, 2)),
        ("fsdp-parts", 3, (2, 3)),
    ],
)
def test_parameters_are_gathered_and_gradients_reduced_once_per_solve(ranks, how, forward, backward):
    """One gathering for each group of parameters forward, one backward for each that was freed, one reduction each."""
    (easy, few), (hard, many) = ranks.run(count_communication, how=how)
    assert few[0] + 5 <= many[0]
    assert few[1] + 5 <= many[1]
    names = ("_allgather_base_", "_reduce_scatter_base_")
    backward = {name: count for name, count in zip(names, backward, strict=True) if count}
    assert easy == hard == ({names[0]: forward}, backward, {names[0]: forward})


def solve_without_gradient(rank, how):
    model = wrap(Model(), how)
    outputs = []
    for u, _ in my_part(rank, data(torch.float64)):
        with torch.no_grad():
            outputs.append(model.eval()(u))
    return {"outputs": outputs}


@ways("ddp", "fsdp-cell", slow=OTHER_FSDP)
def test_inference(ranks, how):
    results = ranks.run(solve_without_gradient, how=how)
    with torch.no_grad():
        model = Model().eval()
        for step, (u, _) in enumerate(data(torch.float64)):
            both = torch.cat([result["outputs"][step] for result in results])
            assert_close(both, model(u), torch.float64, f"outputs of step {step}")


def message_of(rank, make):
    """The words with which a model refuses to run."""
    ((u, _),) = my_part(rank, data(torch.float64, steps=1))
    try:
        make()(u)
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def wrapped_cell():
    model = Model()
    model.deq.cell = nn.parallel.DistributedDataParallel(model.deq.cell)
    return model


def synchronised_norm():
    model = Model()
    model.deq.cell.add_module("norm", nn.SyncBatchNorm(WIDTH))
    return model


def penalty_on_a_sharded_cell():
    return wrap(Model(penalty=0.5), "fsdp-cell")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (wrapped_cell, "TypeError: DistributedDataParallel inside the cell of a DEQ .* wrap the whole model"),
        (synchronised_norm, "TypeError: SyncBatchNorm inside the cell of a DEQ .* GroupNorm"),
        (
            penalty_on_a_sharded_cell,
            "RuntimeError: the parameters of the cell's FSDPCell are sharded outside of a solve",
        ),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_would_hang_or_be_wrong_is_refused(ranks, make, words):
    for message in ranks.run(message_of, make=make):
        assert re.match(words, message), message


def warnings_of_failing_adjoints(rank):
    model = wrap(Model(adjoint=Implicit(stop=Stop(rtol=1e-14, max_steps=2))), "fsdp-cell")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for u, _ in my_part(rank, data(torch.float64)):
            model(u).sum().backward()
    return [w.category.__name__ for w in caught]


def test_a_failing_adjoint_of_a_sharded_cell_warns_once(ranks):
    assert ranks.run(warnings_of_failing_adjoints) == [["EquilibriumWarning"]] * RANKS


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_test_at_once(ranks):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1: .*only here"):
        ranks.run(fail_on_one_rank)
    assert not ranks.processes
    assert [result["ok"] for result in ranks.run(train_on_rank, how="ddp", steps=1)] == [True, True]


def fail_on_one_rank(rank):
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()
