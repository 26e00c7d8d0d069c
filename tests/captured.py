"""Cells, and comparisons of the captured engine with the eager one."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import equipoise as eq
from equipoise._tape import Reruns, own_casts

SOLVERS = {
    "picard": eq.Picard(),
    "picard_damped": eq.Picard(0.7),
    "anderson": eq.Anderson(),
    "anderson_mixed": eq.Anderson(memory=3, mixing=0.8),
    "broyden": eq.Broyden(),
    "broyden_memory": eq.Broyden(memory=5),
    "broyden_short": eq.Broyden(step=0.8),
}
TIGHT = eq.Stop(rtol=1e-10, max_steps=90)
FIXED = eq.Stop(rtol=0, max_steps=7)
# Two engines may round differently; with iterates that agree in float64 and a contraction the difference stays small.
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-4}


class Tanh(nn.Module):
    """tanh(W z + x), a contraction."""

    def __init__(self, n=6, scale=0.8, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(n)
        weight = torch.randn(n, n, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter((weight * (scale / torch.linalg.matrix_norm(weight, 2))).to(dtype))
        self.bias = nn.Parameter(torch.linspace(-0.3, 0.3, n, dtype=torch.float64).to(dtype))

    def forward(self, z, x):
        return torch.tanh(nn.functional.linear(z, self.weight, self.bias) + x)


class Scoped(nn.Module):
    """Weight norm, spectral norm and two kinds of dropout, all held constant in a solve."""

    def __init__(self, n=6):
        super().__init__()
        self.mix = eq.nn.weight_norm(nn.Linear(n, n))
        self.bound = eq.nn.spectral_norm(nn.Linear(n, n), bound=0.5)
        self.drop, self.rows = eq.nn.VariationalDropout(0.3), eq.nn.VariationalDropout(0.2, shared=0)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.rows(self.drop(self.mix(z))) + self.bound(z) + x)


def deq_of(cell, solver=eq.Picard(), stop=TIGHT, adjoint=None, engine="captured", **options):
    return eq.DEQ(cell, solver=solver, stop=stop, adjoint=adjoint or eq.Implicit(stop=TIGHT), engine=engine, **options)


def inputs_of(n=6, batch=5, dtype=torch.float64, seed=0):
    return torch.randn(batch, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def recordings_of(deq):
    """All that a DEQ keeps, the oldest first."""
    return [recording for shape in deq.capture._shapes.values() for recording in shape.recordings]


def loss_of(value):
    return sum(
        (leaf.double().sin() * torch.arange(leaf.numel()).view(leaf.shape).cos()).sum() for leaf in tensors(value)
    )


def step(deq, *inputs, seed=3, **options):
    """One forward and backward pass: the solution, and gradients of parameters and inputs."""
    torch.manual_seed(seed)
    leaves = [leaf for leaf in tensors(inputs) if leaf.requires_grad]
    solution = deq(*inputs, **options)
    wanted = [*deq.parameters(), *leaves]
    grads = torch.autograd.grad(loss_of(solution.value), [p for p in wanted if p.requires_grad], allow_unused=True)
    return solution, grads, torch.get_rng_state()


def assert_close(a, b, tolerance):
    for x, y in zip(tensors(a), tensors(b), strict=True):
        if x.is_floating_point():
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(x, y)


def same_statistics(ours, theirs, tolerance):
    assert torch.equal(ours.status, theirs.status)
    assert torch.equal(ours.steps, theirs.steps)
    assert ours.lagged == theirs.lagged
    # Residuals at the end are differences of nearly equal numbers.
    torch.testing.assert_close(ours.residual, theirs.residual, rtol=1e-3, atol=tolerance)


def assert_engines_agree(deq, *inputs, tolerance=1e-10, solves=2, **options):
    """Solves and gradients of both engines, with the same seeds."""
    for seed in range(solves):
        deq.engine = "eager"
        eager, expected, after = step(deq, *inputs, seed=seed, **options)
        deq.engine = "captured"
        captured, grads, after_captured = step(deq, *inputs, seed=seed, **options)
        assert_close(captured.value, eager.value, tolerance)
        assert [g is None for g in grads] == [g is None for g in expected]
        assert_close(grads, expected, tolerance)
        same_statistics(captured.stats, eager.stats, tolerance)
        same_statistics(captured.backward, eager.backward, tolerance)
        assert torch.equal(after, after_captured)
    assert deq.capture.replayed == solves
    assert not deq.capture.fallbacks
    return captured, eager


def assert_falls_back(deq, *inputs, reason, grad=True, **options):
    """The eager result, with a warning that says why."""
    deq.engine = "eager"
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad):
        expected = deq(*inputs, **options)
        after = torch.get_rng_state()
        deq.engine = "captured"
        torch.manual_seed(0)
        with pytest.warns(eq.EquilibriumWarning, match=reason):
            solution = deq(*inputs, **options)
        assert_close(solution.value, expected.value, 0)
        assert torch.equal(torch.get_rng_state(), after)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            deq(*inputs, **options)
    assert deq.capture.replayed == 0
    assert sum(deq.capture.fallbacks.values()) == 2
    return solution


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


class Emulated(Reruns):
    """A tape of operations on the tensors they were first done on: no Python, no new tensors, nothing read."""

    runs_python = False

    def __init__(self, device):
        super().__init__(device)
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


class Silent(Reruns):
    """Replays do nothing: what remains is what a solve does besides them."""

    runs_python = False

    def record(self, run):
        run()
        return lambda: None


class Launches(TorchDispatchMode):
    """Operations that would be launched on a device, by name: all but those that only look or allocate."""

    quiet = ("detach", "alias", "view", "reshape", "permute", "expand", "slice", "select", "unbind", "empty", "promote")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not name.lstrip("_").startswith(self.quiet):
            self.names.append(name)
        return func(*args, **(kwargs or {}))
