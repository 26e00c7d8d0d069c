"""The kernels of a whole forward pass of a frozen model, most time first, on one CUDA device.

    python -m benchmarks.kernels.forward_gpu pretrained/mdeq_camvid_small --data-dir DIR --solver anderson --steps 1

With few steps of the solver what is left is stem, head, first guess and loss: what no solver saves. `evaluate --pareto`
times such passes; there learned starts are frozen, too.
"""

import argparse

import torch

from benchmarks.kernels.steps_gpu import profiled, ranked
from equipoise import CapturedForward, Stop, override
from equipoise.nn import frozen
from equipoise.solvers import named_solver
from equipoise.tasks.base import forward_of
from equipoise.train.load import open_run

WARM_UP = 4  # calls, of which the second records
LISTED = 45


def kernels_of(options: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds of every kernel of a replayed pass over the first batch."""
    opened = open_run(options.run, options.split, options.data_dir, changes=options.set)
    forward, device = forward_of(opened.task, opened.device), opened.device
    batch = next(iter(opened.splits.held_out[options.split]())).to(device)
    stop = Stop(rtol=0.0, max_steps=options.steps, select="last")
    with opened.autocast(), torch.no_grad():
        model = frozen(opened.model)
        solver = named_solver(options.solver, opened.model)
        with override(model, solver=solver, stop=stop):
            run = CapturedForward(model, lambda *given: forward(model, *given))
            for _ in range(WARM_UP):
                run(batch, None)
            return profiled(lambda: run(batch, None), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("--data-dir")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--solver", default="anderson", help="as `evaluate` takes it")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="of the task, e.g. task.eval_batch_size=4")
    options = parser.parse_args()
    kernels = kernels_of(options)
    launches, us = sum(map(len, kernels.values())), sum(map(sum, kernels.values()))
    print(f"{options.solver}, {options.steps} steps: {launches} kernels, {us:.0f} us")
    for name, count, total in ranked(kernels, LISTED):
        print(f"{total:8.0f} us {count:4} × {total / count:7.1f}  {name[:150]}")


if __name__ == "__main__":
    main()
