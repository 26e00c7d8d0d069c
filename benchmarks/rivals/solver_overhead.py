"""What a solve costs beyond its evaluations of f, beside torchdeq, on one CPU thread.

    python -m benchmarks.rivals.solver_overhead --out benchmarks/results/<date>_solver_overhead

For each cell and solver, all with 30 steps in float32: the time of a solve per evaluation of f it makes, over the
time of a bare evaluation, both measured in turns in one run, so that a busy machine disturbs them alike. Overhead is
that ratio minus one. "contract" runs equipoise with a fixed budget; "tolerance" with a tolerance that is never met,
which adds per-system stopping, plateau and divergence tests. Operator calls and host reads per step are counted by a
dispatch mode.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import equipoise as eq
from equipoise.bench.rivals import torchdeq_solvers

STEPS = 30
CLOCK = time.perf_counter


class DenseCell(nn.Module):
    """tanh(W z + x) on (64, 512), W nearly orthogonal: 30 steps of any solver stay above the rounding level."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.99 * torch.linalg.qr(torch.randn(width, width))[0])

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(z, self.weight) + x)


class TransformerCell(nn.Module):
    """A post-norm attention and feed-forward block with input injection, on (8, 64, 256)."""

    def __init__(self, width: int = 256, heads: int = 4, inner: int = 1024) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        batch, length, width = z.shape
        q, k, v = (self.qkv(z).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        a = self.norm1(z + self.out(mixed.reshape(batch, length, width)) + x)
        return self.norm2(a + self.down(torch.relu(self.up(a))))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense tanh 64x512": (DenseCell, (64, 512)),
    "transformer-like 8x64x256": (TransformerCell, (8, 64, 256)),
}
SOLVERS = {"picard": eq.Picard(), "anderson": eq.Anderson(), "broyden": eq.Broyden()}
BARS = {
    "dense tanh 64x512": {"picard": 0.20, "anderson": 0.65, "broyden": 1.30},
    "transformer-like 8x64x256": {"picard": 0.05, "anderson": 0.15, "broyden": 0.30},
}
# A tolerance too small to be met, so that nothing stops early but everything is tested.
NEVER = eq.Stop(rtol=1e-30, max_steps=STEPS, plateau=None)
FIXED = eq.Stop(rtol=0, max_steps=STEPS)


class Counter(TorchDispatchMode):
    """Counts operator calls and host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def rivals() -> dict[str, Callable[..., Any]]:
    """torchdeq's solvers, or nothing if it is not installed."""
    found = torchdeq_solvers()
    if not found:
        print("torchdeq is not installed (pip install torchdeq==0.1.0): measuring equipoise alone")
    return found


def candidates(cell: nn.Module, x: Tensor) -> dict[str, Callable[[], Any]]:
    """Every solve to time, by name; each evaluates f through `cell`."""
    z0 = torch.zeros_like(x)
    found: dict[str, Callable[[], Any]] = {}
    for name, solver in SOLVERS.items():
        for label, stop in (("contract", FIXED), ("tolerance", NEVER)):
            found[f"equipoise {name} ({label})"] = lambda solver=solver, stop=stop: eq.fixed_point(
                cell, z0, x, solver=solver, stop=stop
            )
    for name, solve in rivals().items():
        found[f"torchdeq {name}"] = lambda solve=solve: solve(
            lambda z: cell(z, x), z0, max_iter=STEPS, tol=1e-30, stop_mode="rel"
        )
    return found


def measure(cell: nn.Module, x: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds per evaluation of every candidate and of the bare f, and counts per evaluation."""
    counted = [0]
    handle = cell.register_forward_hook(lambda *_: counted.__setitem__(0, counted[0] + 1))
    solves = candidates(cell, x)
    evaluations: dict[str, int] = {}
    counts: dict[str, Counter] = {}
    for name, solve in solves.items():
        counted[0] = 0
        with Counter() as counter:
            solve()
        evaluations[name], counts[name] = counted[0], counter
    handle.remove()
    with Counter() as counter:
        cell(torch.zeros_like(x), x)
    own = counter.calls
    z = torch.zeros_like(x)

    def bare() -> None:
        state = z
        for _ in range(STEPS):
            state = cell(state, x)

    samples: dict[str, list[float]] = {name: [] for name in solves}
    for _ in range(rounds):
        for name, solve in solves.items():
            before = timed(bare) / STEPS
            spent = timed(solve) / evaluations[name]
            after = timed(bare) / STEPS
            samples[name].append(spent / (0.5 * (before + after)) - 1)
    f_seconds = min(timed(bare) / STEPS for _ in range(5))
    return {
        name: {
            "overhead": statistics.median(values),
            "spread": statistics.quantiles(values, n=4)[2] - statistics.quantiles(values, n=4)[0],
            "f_milliseconds": 1e3 * f_seconds,
            "evaluations": evaluations[name],
            "operator_calls_per_step": counts[name].calls / evaluations[name] - own,
            "host_reads_per_step": counts[name].reads / evaluations[name],
        }
        for name, values in samples.items()
    }


def timed(run: Callable[[], Any]) -> float:
    start = CLOCK()
    run()
    return CLOCK() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for results.json and README.md")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds per candidate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    header = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, 1 thread, float32"
    command = "`python -m benchmarks.rivals.solver_overhead`"
    lines = [f"{command}, {header}, {STEPS} steps, median of {options.rounds} rounds.", ""]
    results: dict[str, Any] = {"header": header, "steps": STEPS, "rounds": options.rounds, "cases": {}}
    with torch.no_grad():
        for case, (make, shape) in CASES.items():
            table = measure(make().eval(), 0.1 * torch.randn(shape), options.rounds)
            results["cases"][case] = table
            f_ms = next(iter(table.values()))["f_milliseconds"]
            lines += [f"## {case} (f: {f_ms:.3f} ms)", ""]
            lines += ["| solve | overhead over f | bar | spread (quartiles) | operator calls/step | host reads/step |"]
            lines += ["|---|---|---|---|---|---|"]
            for name, row in table.items():
                bar = BARS[case][name.split()[1]] if name.startswith("equipoise") else None
                lines.append(
                    f"| {name} | {row['overhead']:.0%} | {f'{bar:.0%}' if bar else ''} | {row['spread']:.0%} "
                    f"| {row['operator_calls_per_step']:.1f} | {row['host_reads_per_step']:.2f} |"
                )
            lines.append("")
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
        (options.out / "README.md").write_text("# Solver overhead over the bare f\n\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
