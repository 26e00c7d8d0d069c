"""What processes started by `tests.processes` do; imported once by the server they are forked from."""

import json
import os
import traceback
import warnings
from pathlib import Path

import accelerate
import safetensors.torch
import torch
import torchmetrics
import tqdm

from equipoise.tasks import CopyMemoryTask
from equipoise.train.loop import train
from equipoise.train.processes import Processes, part
from equipoise.train.recipe import Recipe

LOADED = (accelerate, safetensors, torchmetrics, tqdm)


def enter(function, rank, count, port, reports, arguments):
    """Become process `rank` of `count`, and do something; a failure is written down."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is in the parent: no port has to be guessed
        TORCHELASTIC_RESTART_COUNT="0",
        GLOO_SOCKET_IFNAME="lo",
        ACCELERATE_USE_CPU="true",
        CUDA_VISIBLE_DEVICES="",
    )
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Torchmetrics says it in the first process only, but takes the server, where it was imported, for that.
    warnings.filterwarnings("ignore", "The ``compute`` method of metric")
    try:
        function(rank, *arguments)
    except BaseException:
        (Path(reports) / f"{rank}.txt").write_text(traceback.format_exc())
        raise
    part()


def run_all(rank, jobs):
    """Train by several recipes, one after another; `jobs` are tuples (recipe, folder, whether to resume)."""
    for values, out, resume in jobs:
        outcome = train(Recipe.from_data(values, "the test"), out, resume=resume)
        record = {"step": outcome.step, "interrupted": outcome.interrupted, "metrics": outcome.metrics}
        Path(f"{out}.{rank}.json").write_text(json.dumps(record))


def average_statistics(rank, folder):
    """Average what BatchNorm keeps, different in every process, and write down what came of it."""
    processes = Processes(accelerate.Accelerator(cpu=True))
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.GroupNorm(1, 3), torch.nn.BatchNorm2d(2))
    for place, module in enumerate((model[0], model[2])):
        module.running_mean.fill_(10 * place + 2 * rank)
        module.running_var.fill_(10 * place + 1 + rank)
    model.register_buffer("constant", torch.tensor(float(rank)))
    processes.average_statistics(model)
    torch.save(model.state_dict(), Path(folder) / f"{rank}.pt")


def fail_at(rank, step, values, out):
    """Train, and raise in the second process at some step."""
    usual = CopyMemoryTask.training_step

    def training_step(self, model, batch, carry, number):
        if rank == 1 and number == step:
            raise RuntimeError("the second process breaks")
        return usual(self, model, batch, carry, number)

    CopyMemoryTask.training_step = training_step
    train(Recipe.from_data(values, "the test"), out)
