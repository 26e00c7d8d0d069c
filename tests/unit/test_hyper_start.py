"""The learned start: of sequences a causal convolution however it is computed, of images one that knows all of them."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import equipoise as eq
from equipoise._problem import Problem, StateSpec
from equipoise.solvers import HyperAnderson, load_solver, save_solver
from equipoise.solvers._hyper_nets import ImageInitialiser, SequenceInitialiser
from equipoise.tasks.hyper import FitSettings, fit_hyper_solver
from tests.captured import Launches

SOURCE, HIDDEN = 12, 5
VIEWS = {"t", "_unsafe_view", "transpose", "unsqueeze", "split", "split_with_sizes", "unfold", "diagonal", "as_strided"}


def made(*sizes, warm="keep"):
    """A solver with weights as after some fitting; states of 7 positions with so many features by leaf."""
    torch.manual_seed(0)
    solver = HyperAnderson.for_sequence(sizes, SOURCE, hidden=HIDDEN, weights="newest", mixing=False, warm=warm)
    for parameter in solver.parameters():
        nn.init.normal_(parameter, std=0.3)
    return solver


def problem_of(solver, x):
    z0 = tuple(torch.zeros(*x.shape[:2], size) for size in solver.config.state)
    return Problem(lambda z, x: z, StateSpec.of(z0), (x,), in_dims=0)


def convolved(net, x):
    """The definition."""
    few = net.few(x)
    mixed = net.conv(nn.functional.pad(few.mT, (2, 0))).relu().mT
    return net.out(torch.cat([few, mixed], dim=-1)).split(net.state, dim=-1)


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("sizes", [(4,), (4, 3)])
def test_it_is_a_causal_convolution(sizes, length):
    net, x = made(*sizes).initialiser.double(), torch.randn(3, length, SOURCE, dtype=torch.float64)
    assert isinstance(net, SequenceInitialiser)
    parameters = list(net.parameters())
    found, expected = net(x, []), convolved(net, x)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    weights = [torch.randn_like(leaf) for leaf in found]
    grads = [torch.autograd.grad(leaves, parameters, weights) for leaves in (found, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_position_sees_a_later_one_or_another_system(dtype):
    net, x = made(4).initialiser, torch.randn(3, 7, SOURCE).to(dtype)
    changed = x.clone()
    changed[1, 3] += 1.0
    differs = (net(x, [])[0] != net(changed, [])[0]).any(dim=2)
    assert differs[1].tolist() == [False, False, False, True, True, True, False]
    assert not differs[[0, 2]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_in_half_precision(dtype):
    """Products have the digits of the input; states and gradients those of the parameters."""
    solver, x = made(4), torch.randn(3, 7, SOURCE).to(dtype)
    net, problem = solver.initialiser, problem_of(solver, x)
    (guess,) = solver.guess(problem, problem.start(torch.zeros(3, 7, 4)))
    (expected,) = convolved(net, x.float())
    assert guess.dtype == torch.float32
    tolerance = 4 * torch.finfo(dtype).eps
    assert (guess.view_as(expected) - expected).norm() < tolerance * expected.norm()
    parameters = list(net.parameters())
    grads = [torch.autograd.grad(value.square().sum(), parameters) for value in (guess, expected)]
    for a, b in zip(*grads, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 3 * tolerance * b.norm()


def test_files_are_those_of_the_convolution(tmp_path):
    solver, x = made(4), torch.randn(3, 7, SOURCE)
    assert {name: tuple(value.shape) for name, value in solver.initialiser.state_dict().items()} == {
        "few.weight": (HIDDEN, SOURCE),
        "conv.weight": (HIDDEN, HIDDEN, 3),
        "conv.bias": (HIDDEN,),
        "out.weight": (4, 2 * HIDDEN),
        "out.bias": (4,),
    }
    loaded = load_solver(save_solver(solver, tmp_path / "solver.safetensors"))
    assert torch.equal(loaded.initialiser(x, [])[0], solver.initialiser(x, [])[0])


@pytest.mark.parametrize("change", ["fewer", "other"])
def test_files_of_other_networks_are_refused(tmp_path, change):
    path = save_solver(made(4), tmp_path / "solver.safetensors")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    state = load_file(path)
    if change == "fewer":
        del state["initialiser.few.weight"]
    else:
        state["initialiser.conv.weight"] = torch.zeros(HIDDEN, SOURCE, 3)
    save_file(state, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"was written by another version of equipoise.* fit it again"):
        load_solver(path)


@pytest.mark.parametrize("config", ['{"kind": "any", "state": [3], "novel": 1}', '{"kind": "else"', '{"kind": "else"}'])
def test_files_of_other_settings_are_refused_likewise(tmp_path, config):
    path = save_solver(made(4), tmp_path / "solver.safetensors")
    save_file(load_file(path), path, metadata={"format": "pt", "config": config, "model": ""})
    with pytest.raises(ValueError, match=r"was written by another version of equipoise.* fit it again"):
        load_solver(path)


# Which systems get it


@pytest.mark.parametrize("sizes", [(4,), (4, 3), (2, 3, 4)])
def test_systems_that_are_not_zero_keep_their_start(sizes):
    solver, x = made(*sizes), torch.randn(6, 7, SOURCE)
    z = [torch.zeros(6, 7 * size) for size in sizes]
    z[0][1, 0], z[-1][2, -1] = 1e-30, -1.0
    z[0][3, 2], z[-1][4, 0], z[-1][5] = torch.nan, torch.inf, -0.0
    problem = problem_of(solver, x)
    found, learned = solver.guess(problem, z), solver.initialiser(x, [])
    for got, given, new in zip(found, z, learned, strict=True):
        torch.testing.assert_close(got[1:5], given[1:5], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got[[0, 5]], new.flatten(1)[[0, 5]])
    assert all(new[[0, 5]].any() for new in learned)


@pytest.mark.parametrize(("warm", "leaves", "most"), [("keep", 1, 10), ("keep", 2, 15), ("replace", 1, 8)])
@torch.no_grad()
def test_it_takes_few_operations(warm, leaves, most):
    """A solve of few steps has little else. With several leaves, each is put in order by itself."""
    solver, x = made(*[4] * leaves, warm=warm), torch.randn(3, 7, SOURCE).bfloat16()
    problem = problem_of(solver, x)
    z = problem.start(tuple(torch.zeros(3, 7, 4) for _ in range(leaves)))
    solver.guess(problem, z)
    with Launches() as launches:
        solver.guess(problem, z)
    names = [name for name in launches.names if name not in VIEWS]
    assert "mm" in names
    assert len(names) <= most, names


# Images


def image_start(*channels, seed=0):
    """The network with weights as after some fitting."""
    torch.manual_seed(seed)
    net = ImageInitialiser(3, HIDDEN, channels)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    return net


def maps(channels, height=16, width=12):
    """Empty states of so many channels, each of half the size of the one before, rounded up."""
    return [torch.zeros(2, count, -(-height // 2**i), -(-width // 2**i)) for i, count in enumerate(channels)]


@pytest.mark.parametrize("channels", [(4,), (4, 2), (4, 2, 6)])
def test_of_images_it_is_what_is_said(channels):
    net, x, like = image_start(*channels), torch.randn(2, 3, 16, 12), maps(channels)
    features = None
    for i in reversed(range(len(channels))):
        source = nn.functional.avg_pool2d(x, 2**i)
        told = net.inner[i](source)
        if features is not None:
            told = told + net.coarser[i](features).repeat_interleave(2, 2).repeat_interleave(2, 3)
        features = told.relu()
        expected = net.out[i](features) + net.past[i](source)
        torch.testing.assert_close(net(x, like)[i], expected)


def test_every_pixel_knows_the_whole_image():
    """With one resolution it knows its neighbours alone."""
    x = torch.zeros(2, 3, 16, 12)
    changed = x.clone()
    changed[:, :, :3, :3] = 1.0
    for channels, far in (((4,), False), ((4, 2, 6), True)):
        net = image_start(*channels)
        before, after = (net(item, maps(channels))[0] for item in (x, changed))
        assert bool((before != after)[:, :, 6, 6].any()) == far


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (9, 4)])
def test_images_may_be_of_any_size(size):
    like = maps((4, 2, 6), *size)
    found = image_start(4, 2, 6)(torch.randn(2, 3, *size), like)
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in like]


# Fits


class Halved(nn.Module):
    """z_t = tanh(A z_t + x_t), the input in half precision."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)
        nn.init.orthogonal_(self.inner.weight, gain=0.9)

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + x.float())

    def initial_state(self, x):
        return torch.zeros(x.shape, dtype=torch.float32)


def test_it_is_fitted_to_inputs_in_half_precision():
    torch.manual_seed(0)
    deq, sizes = eq.DEQ(Halved(), engine="eager"), {"hidden": 16, "weights": "newest", "mixing": False, "budget": None}
    x = torch.randn(8, 5, 6).bfloat16()
    settings = FitSettings(steps=40, unroll=2, learning_rate=2e-2, pool=2)
    solver = fit_hyper_solver(deq, lambda step: x, settings, **sizes).solver
    with torch.no_grad(), eq.override(deq, stop=eq.Stop(rtol=1e-5)):
        root = deq(x).value
    guess = solver.initialiser(x, [])[0]
    assert guess.dtype == torch.float32
    assert (guess - root).norm() < 0.5 * root.norm()
