"""`image_start` on a CUDA device: the network's maps at full size, from a graph, and what it costs.

    python -m tests.gpu.test_start_gpu

prints microseconds of a first guess beside those of the network by single operations.
"""

import pytest
import torch

from equipoise.nn import frozen
from equipoise.ops import image_start
from equipoise.solvers._hyper_nets import ImageInitialiser
from tests.gpu.devices import waiting_is_an_error
from tests.gpu.test_hyper_step_gpu import microseconds, replayable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Systems, channels of the input, features between, channels of the maps, size of the largest.
CASES = {
    "tiny": (16, 24, 6, (24, 24), 32),
    "large": (16, 32, 100, (32, 64, 128, 256), 32),
    "tiny, many": (128, 24, 6, (24, 24), 32),
}


def example(name):
    """A network as after some fitting, an input in half precision, and maps like those it is to make."""
    torch.manual_seed(0)
    n, source, hidden, channels, size = CASES[name]
    network = ImageInitialiser(source, hidden, channels).cuda()
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(n, source, size, size, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last)
    like = [torch.zeros(n, c, size >> i, size >> i, device="cuda") for i, c in enumerate(channels)]
    return network, x, [leaf.to(memory_format=torch.channels_last) for leaf in like]


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_the_networks_maps_from_a_graph(name):
    network, x, like = example(name)
    image_start(network, x, like)  # compiles
    with waiting_is_an_error():
        made = image_start(network, x, like)
    truth = network.double()(x.double(), like)
    network.float()
    for ours, theirs, leaf in zip(made, truth, like, strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
        assert ours.stride() == leaf.stride()
    places = [torch.empty_like(leaf) for leaf in like]
    graph = replayable(lambda: [place.copy_(new) for place, new in zip(places, image_start(network, x, like))])  # noqa: B905
    x.mul_(-1)
    graph.replay()
    assert all(map(torch.equal, places, image_start(network, x, like)))


@torch.no_grad()
def _table():
    for name in CASES:
        network, x, like = example(name)
        with torch.autocast("cuda", torch.bfloat16):
            network = frozen(network)
            times = {way: microseconds(lambda: image_start(network, x, like, backend=way)) for way in ("naive", "auto")}  # noqa: B023
        print(f"{name:12s} µs: network {times['naive']:.1f}, kernel {times['auto']:.1f}", flush=True)


if __name__ == "__main__":
    _table()
