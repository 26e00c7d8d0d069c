"""The captured engine under a tape that is close to a CUDA graph, and in use: copies, diagnostics, whole models.

Operations on fixed tensors are noted once and repeated; reading a value on the host is an error.
"""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import _loop, _recording
from equipoise._compat import leaves_reached
from tests.captured import (
    FIXED,
    Emulated,
    Scoped,
    Tanh,
    assert_close,
    assert_engines_agree,
    deq_of,
    inputs_of,
    loss_of,
    recordings_of,
)

# As a CUDA graph would


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(_recording, "tape_for", Emulated)


@pytest.mark.parametrize("autocast", [False, True])
def test_replayed_operations_train_as_the_eager_engine_does(emulated, monkeypatch, autocast):
    """Weight norm, dropout, new inputs and parameters updated in place; pieces of 4, 4 and 2 steps."""
    monkeypatch.setattr(_loop, "LONGEST", 4)
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
    adjoint = recordings_of(deq)[0].adjoint
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


# Copies, penalties, diagnostics


def test_copies_begin_without_recordings():
    deq, x = deq_of(Scoped().double().eval()).eval(), inputs_of()
    expected = deq(x).value
    assert set(deq.state_dict()) == set(eq.DEQ(Scoped()).state_dict())
    for twin in (copy.deepcopy(deq), pickle.loads(pickle.dumps(deq))):
        assert twin.engine == "captured"
        assert twin._capture is None
        assert_close(twin(x).value, expected, 1e-12)
        assert twin.capture.recorded == 1


def test_penalties_and_diagnostics_of_captured_solutions():
    cell, x, results = Scoped().double(), inputs_of().requires_grad_(), []
    for engine in ("eager", "captured"):
        deq = deq_of(copy.deepcopy(cell), eq.Anderson(), engine=engine)
        torch.manual_seed(0)
        solution = deq(x)
        penalty = eq.jacobian_penalty(solution)
        grads = torch.autograd.grad(loss_of(solution.value) + penalty, [*deq.parameters(), x])
        torch.manual_seed(0)
        results.append((penalty, grads, eq.spectral_radius(solution)))
        audit = eq.audit_gradient(deq, x, lambda solution: loss_of(solution.value))
        assert audit.cosine > 1 - 1e-9
    assert_close(results[1], results[0], 1e-8)
    assert deq.capture.replayed == 1
    assert not deq.capture.fallbacks


@pytest.mark.filterwarnings("ignore:engine=.captured.* hooks on saved tensors:equipoise.EquilibriumWarning")
def test_memory_report():
    deq, x = deq_of(Tanh(), eq.Anderson()), inputs_of()
    report = eq.memory_report(deq, x, lambda solution: loss_of(solution.value))
    deq.engine = "eager"
    expected = eq.memory_report(deq, x, lambda solution: loss_of(solution.value))
    assert report.graph == expected.graph > 0


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
