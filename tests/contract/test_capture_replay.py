"""The captured engine under a tape that is close to a CUDA graph, and whole models.

Operations on fixed tensors are noted once and repeated; reading a value on the host is an error.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import equipoise as eq
from equipoise import _recording
from equipoise._compat import leaves_reached
from equipoise._tape import own_casts
from tests.captured import (
    FIXED,
    Scoped,
    Tanh,
    assert_close,
    assert_engines_agree,
    deq_of,
    inputs_of,
    loss_of,
    tensors,
)

# As a CUDA graph would


class _Noting(TorchDispatchMode):
    host_reads = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in self.host_reads:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class Emulated:
    """A tape of operations on the tensors they were first done on: no Python, no new tensors, nothing read."""

    def __init__(self, device):
        self.turns = 0

    def take_turn(self):
        self.turns += 1

    def rehearse(self, run):
        with own_casts("cpu"):
            run()

    def together(self):
        return own_casts("cpu")

    def tidy(self):
        pass

    def record(self, run):
        noting = _Noting()
        given = set()
        with noting:
            run()
        for _, args, kwargs, result in noting.calls:
            given |= {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))} - given
            for tensor in tensors(result):
                # A graph is not run when it is recorded: what it makes is arbitrary until then.
                if tensor.untyped_storage().data_ptr() not in given and tensor.dtype != torch.bool:
                    tensor.data.fill_(torch.nan if tensor.is_floating_point() else 2**30)

        def replay():
            for func, args, kwargs, result in noting.calls:
                bare = tree_map(lambda x: x.data if isinstance(x, torch.Tensor) else x, (args, kwargs))
                with torch.no_grad():
                    again = func(*bare[0], **bare[1])
                    for old, new in zip(tensors(result), tensors(again), strict=True):
                        if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                            old.data.copy_(new)

        return replay


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(_recording, "tape_for", Emulated)


@pytest.mark.parametrize("autocast", [False, True])
def test_replayed_operations_train_as_the_eager_engine_does(emulated, monkeypatch, autocast):
    """Weight norm, dropout, new inputs and parameters updated in place; pieces of 4, 4 and 2 steps."""
    monkeypatch.setattr(_recording, "LONGEST", 4)
    stop = eq.Stop(rtol=0, max_steps=10)
    torch.manual_seed(0)
    deq = deq_of(Scoped().float(), stop=stop, adjoint=eq.Implicit(solver=eq.Picard(0.9), stop=stop))
    twin = copy.deepcopy(deq)
    twin.engine = "eager"
    for k in range(3):
        results = []
        for model in (twin, deq):
            x = inputs_of(seed=k, dtype=torch.float32).requires_grad_()
            torch.manual_seed(k)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                solution = model(x)
                outside = model.cell.mix(x)
            model.zero_grad()
            loss_of(solution.value).backward()
            results.append((solution.value, outside, x.grad, *(p.grad for p in model.parameters())))
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad
        assert_close(results[1], results[0], 1e-6)
    assert deq.capture.recorded == 1
    assert deq.capture.replayed == 3
    assert not deq.capture.fallbacks


def test_replayed_operations_with_two_leases_and_saved_indices(emulated):
    class Picking(nn.Module):
        """Its backward pass uses indices found in the forward pass."""

        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 12).double()

        def forward(self, z, x):
            return torch.tanh(0.5 * self.mix(z).sort(dim=1).values[:, ::2] + x)

    deq = deq_of(Picking(), stop=FIXED, adjoint=eq.Implicit(solver=eq.Picard(), stop=FIXED))
    xs = [inputs_of(seed=seed).requires_grad_() for seed in range(2)]
    truth = []
    deq.engine = "eager"
    for x in xs:
        truth.append(torch.autograd.grad(loss_of(deq(x).value), [x, *deq.parameters()]))
    deq.engine = "captured"
    for _ in range(2):
        losses = [loss_of(deq(x).value) for x in xs]
        for loss, x, expected in zip(losses, xs, truth, strict=True):
            assert_close(torch.autograd.grad(loss, [x, *deq.parameters()]), expected, 1e-10)
    assert deq.capture.recorded == 2
    assert deq.capture.replayed == 4


def test_gradient_accumulators_of_others_are_left_alone(emulated):
    """A graph of the same parameters that is alive while another one is recorded, and hooks on parameters."""
    deq, x = deq_of(Tanh(), stop=FIXED, adjoint=eq.Implicit(solver=eq.Picard(), stop=FIXED)), inputs_of()
    kept = deq.cell(x, x)
    node = kept.grad_fn
    seen = []
    deq.cell.weight.register_hook(lambda grad: seen.append(grad))
    loss_of(deq(x).value).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], deq.cell.weight.grad)
    adjoint = next(iter(deq.capture._shapes.values()))[0].adjoint
    ends = list(leaves_reached(adjoint.image, []))
    assert not any(end is p for end in ends for p in deq.parameters())
    assert {end.data_ptr() for end in ends} >= {p.data_ptr() for p in deq.parameters()}
    assert node is kept.grad_fn


def test_a_cell_that_reads_values_keeps_its_error_on_the_cpu(emulated):
    class Reading(nn.Module):
        def forward(self, z, x):
            return torch.tanh(z) * min(0.5, z.abs().sum().item()) + x

    deq = deq_of(Reading(), stop=FIXED)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.no_grad():
        deq(inputs_of())


# Models


def language_models():
    from equipoise.models.deq_transformer import DEQTransformer, DEQTransformerConfig
    from equipoise.models.deq_trellisnet import DEQTrellisNet, DEQTrellisNetConfig

    stop = eq.Stop(rtol=0, max_steps=6)
    plan = eq.Plan(eq.Anderson(memory=5), eq.Implicit(solver=eq.Broyden(), stop=stop), stop)
    transformer = {
        "vocab_size": 23,
        "d_model": 8,
        "heads": 2,
        "d_inner": 12,
        "dropout": 0.2,
        "attention_dropout": 0.1,
        "memory_length": 4,
        "plan": plan,
    }
    trellis = {"vocab_size": 23, "embedding_size": 6, "hidden_size": 4, "dropout_hidden": 0.2, "dropconnect": 0.3}
    return {
        "transformer": lambda: DEQTransformer(DEQTransformerConfig(**transformer)),
        "transformer_chunked_ffn": lambda: DEQTransformer(DEQTransformerConfig(**transformer, ffn_chunks=3)),
        "trellis": lambda: DEQTrellisNet(DEQTrellisNetConfig(**trellis, init_std=0.3, plan=plan)),
        "trellis_full": lambda: DEQTrellisNet(DEQTrellisNetConfig(**trellis, init_std=0.3, form="full", plan=plan)),
    }


@pytest.mark.parametrize("name", ["transformer", "transformer_chunked_ffn", "trellis", "trellis_full"])
def test_training_steps_of_language_models(name):
    """Two segments, the second with the memory of the first: losses and gradients to 1e-6 of the eager ones."""
    torch.manual_seed(0)
    model = language_models()[name]().double()
    tokens = torch.randint(23, (3, 2, 7))
    results = []
    for engine in ("eager", "captured"):
        model.deq.engine = engine
        torch.manual_seed(7)
        memory, losses = None, []
        model.zero_grad()
        for segment, targets in itertools.pairwise(tokens):
            output = model(segment, targets, memory)
            memory = output.memory
            output.losses.mean().backward()
            losses.append(output.losses.detach())
        results.append((losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert_close(results[1], results[0], 1e-6)
    assert model.deq.capture.replayed == 2
    assert not model.deq.capture.fallbacks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch, of what it traces
def test_compiled_cells():
    deq = deq_of(Scoped().double().eval(), stop=FIXED, adjoint=eq.Implicit(stop=FIXED))
    deq.compile_cell(backend="aot_eager")
    assert_engines_agree(deq, inputs_of().requires_grad_())
