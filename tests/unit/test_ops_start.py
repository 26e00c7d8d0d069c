"""`image_start`: the kernel against the network that it stands for, in a solver's first guess and on its own."""

from functools import partial

import pytest
import torch

from equipoise._problem import Problem, StateSpec
from equipoise.ops import image_start
from equipoise.solvers import HyperAnderson
from equipoise.solvers._hyper_nets import ImageInitialiser
from tests.kernels import BACKENDS, kernel_device, quiet_interpreter

DEVICE = kernel_device()
pytestmark = quiet_interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies the bits of bfloat16

# Channels of the input, features between, channels and size of each map; sizes fill no tile.
CASES = {
    "one map": (3, 5, [(4, 6, 7)]),
    "two maps": (5, 6, [(7, 10, 6), (9, 5, 3)]),
    "more than a tile": (20, 18, [(70, 9, 8), (130, 5, 4)]),
    "smaller than the input": (4, 8, [(6, 4, 4), (6, 2, 2), (8, 1, 1)]),
    "sizes that do not divide": (4, 3, [(5, 7, 5), (3, 3, 2)]),
}


def example(name, dtype=torch.float32, last=True, n=3):
    """A network as after some fitting, its input, and maps like those it is to make."""
    torch.manual_seed(0)
    source, hidden, maps = CASES[name]
    network = ImageInitialiser(source, hidden, [channels for channels, _, _ in maps])
    for parameter in network.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    size = (8, 8) if name == "smaller than the input" else maps[0][1:]
    memory = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(n, source, *size).to(DEVICE, dtype, memory_format=memory)
    like = [torch.zeros(n, *shape, device=DEVICE).to(memory_format=memory) for shape in maps]
    return network.to(DEVICE).requires_grad_(False), x, like


@torch.no_grad()
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("name", CASES)
def test_kernel_makes_what_the_network_makes(name, last):
    network, x, like = example(name, last=last)
    ours = image_start(network, x, like, backend="triton")
    theirs = image_start(network.double(), x.double(), like, backend="naive")
    for a, b, leaf in zip(ours, theirs, like, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-4)
        assert (a.dtype, a.stride()) == (leaf.dtype, leaf.stride())


@torch.no_grad()
@pytest.mark.parametrize("weights", [torch.float32, HALF])
def test_half_precision_is_that_of_products(weights):
    network, x, like = example("two maps", HALF)
    truth = network.double()(x.double(), like)
    ours = image_start(network.to(weights), x, like, backend="triton")
    for a, b in zip(ours, truth, strict=True):
        assert (a.double() - b).norm() < 0.02 * b.norm()
        assert a.dtype == torch.float32


@torch.no_grad()
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_systems_with_a_start_keep_it(backend, last):
    network, x, like = example("two maps", last=last, n=4)
    fresh = image_start(network, x, like, backend=backend)
    like[0][1] = 2.0
    like[1][2, -1, -1, -1] = torch.nan  # which is not zero
    made = image_start(network, x, like, keep=True, backend=backend)
    for ours, new, old in zip(made, fresh, like, strict=True):
        torch.testing.assert_close(ours[[0, 3]], new[[0, 3]])
        torch.testing.assert_close(ours[[1, 2]], old[[1, 2]], rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_nothing_of_a_batch_of_none():
    network, x, like = example("two maps", n=0)
    assert [leaf.shape[0] for leaf in image_start(network, x, like, keep=True, backend="triton")] == [0, 0]


def test_gradients_are_the_networks():
    network, x, like = example("two maps")
    network.requires_grad_(True)
    assert all(leaf.requires_grad for leaf in image_start(network, x, like))


@torch.no_grad()
def test_wide_inputs_get_the_network():
    network = ImageInitialiser(130, 4, [3]).to(DEVICE)
    x, like = torch.randn(1, 130, 4, 4, device=DEVICE), [torch.zeros(1, 3, 4, 4, device=DEVICE)]
    torch.testing.assert_close(image_start(network, x, like), network(x, like))


@torch.no_grad()
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_a_solver_begins_there(last, monkeypatch):
    network, x, like = example("two maps", last=last)
    solver = HyperAnderson.for_images((7, 9), 5, hidden=6).to(DEVICE)
    solver.initialiser.load_state_dict(network.state_dict())
    problem = Problem(lambda z, x: z, StateSpec.of(tuple(like)), (x,), in_dims=0)
    plain = solver.guess(problem, problem.start(tuple(like)))
    monkeypatch.setattr("equipoise.ops.start.image_start", partial(image_start, backend="triton"))
    ours = solver.guess(problem, problem.start(tuple(like)))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
