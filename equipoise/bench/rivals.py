"""One problem that every library can state, z = tanh(Wz + x) per system, solved by each to the same tolerance.

What a library takes for its tolerance differs, so what counts is the residual reached: measured in float64, system by
system. A library that leaves a system behind gets no ratio. scipy works on the host, on all systems as one vector.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._module import DEQ, Plan
from equipoise._stop import Stop
from equipoise.bench.harness import TINY, Check, Row, Work, in_turns, register_case, replayed, tidy
from equipoise.bench.torchdeq import SKIPPED, Counted, torchdeq_solvers
from equipoise.solvers import Anderson, Broyden, Solver

RTOL = 1e-4
SLACK = 3.0  # a library may measure its residual at the iterate before, or in another norm
MOST_STEPS = 200
FLOW_TIME = 60.0  # of dz/dt = f(z) − z: the slowest system needs about ln(1/RTOL) / (1 − 0.85)
SIZES = {"dense": (64, 512), TINY: (8, 16)}
BASE = "anderson, captured"
SOLVERS: dict[str, Solver] = {"anderson": Anderson(), "broyden": Broyden()}


class TanhCell(nn.Module):
    """f(z; x) = tanh(Wz + x)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(x, z, self.weight.t()))


@dataclass
class _Problem:
    """W (d, d) of spectral radius about 0.95, and x (N, d), weak in some systems and strong in others."""

    weight: Tensor
    x: Tensor

    @classmethod
    def random(cls, systems: int, size: int, device: torch.device) -> "_Problem":
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(size, size, generator=generator) * (0.95 / size**0.5)
        strength = torch.logspace(-0.5, 0.5, systems)[:, None]
        return cls(weight.to(device), (strength * torch.randn(systems, size, generator=generator)).to(device))

    def f(self, z: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(self.x, z, self.weight.t()))

    def residuals(self, z: Any) -> Tensor:
        """(N,) relative residuals in float64, whatever made z."""
        z = torch.as_tensor(z).double().cpu().view(self.x.shape)
        fz = torch.tanh(self.x.double().cpu() + z @ self.weight.double().cpu().t())
        return (fz - z).norm(dim=1) / fz.norm(dim=1)


@register_case("rivals", ["dense"])
def rivals(shapes: Sequence[str], device: torch.device, rounds: int) -> list[Row]:
    """One dense problem to one tolerance by equipoise, torchdeq, optimistix, torchdiffeq, scipy, where installed."""
    return [_row(*SIZES[shape], device, rounds) for shape in shapes]


@torch.no_grad()
def _row(systems: int, size: int, device: torch.device, rounds: int) -> Row:
    tidy(device)
    problem = _Problem.random(systems, size, device)
    row = Row(f"tanh(Wz + x), {systems}x{size}, fp32, rtol {RTOL:g}", "solve", BASE)
    works: dict[str, Work] = {}
    _add_ours(row, works, problem)
    others = {"torchdeq": _add_torchdeq, "optimistix": _add_optimistix, "torchdiffeq": _add_torchdiffeq}
    for library, add in {**others, "scipy": _add_scipy}.items():
        try:
            add(row, works, problem)
        except Exception as error:  # a library that is there but does not work must not stop the others
            row.skipped[library] = f"failed: {error!r}"
    row.values = in_turns(works, device, rounds)
    return row


def _judge(row: Row, candidate: str, problem: _Problem, z: Any, evaluations: int) -> None:
    residuals = problem.residuals(z)
    worst = float(residuals.max().nan_to_num(torch.inf))
    row.check(candidate, Check(worst, SLACK * RTOL, "the tolerance, in float64 and in every system"))
    row.details[candidate] = {
        "evaluations": evaluations,
        "worst residual": worst,
        "median residual": float(residuals.median()),
        "failures": int((~(residuals <= SLACK * RTOL)).sum()),
    }


def _add_ours(row: Row, works: dict[str, Work], problem: _Problem) -> None:
    deq = DEQ(TanhCell(problem.weight))
    for name, solver in SOLVERS.items():
        for engine in ("eager", "captured"):
            works[f"{name}, {engine}"] = work = _ours(deq, solver, engine, problem.x)
            work()  # records; after that it replays
            solution = work()
            _judge(row, f"{name}, {engine}", problem, solution.value, int(solution.stats.nfe))
        row.check(f"{name}, captured", replayed(deq))


def _ours(deq: DEQ, solver: Solver, engine: str, x: Tensor) -> Callable[[], Any]:
    plan = Plan(solver, stop=Stop(rtol=RTOL, max_steps=MOST_STEPS))
    if isinstance(solver, Broyden):
        plan = plan.replace(stop=Stop(rtol=RTOL, max_steps=MOST_STEPS // 2))  # one vector per step

    def work() -> Any:
        deq.plan, deq.engine = plan, engine
        return deq(x)

    return work


def _add_torchdeq(row: Row, works: dict[str, Work], problem: _Problem) -> None:
    known = torchdeq_solvers()
    if not known:
        row.skipped["torchdeq"] = SKIPPED
    for name in (name for name in SOLVERS if name in known):
        counted = Counted(problem.f)
        z = _torchdeq(known[name], problem, counted)()
        _judge(row, f"{name}, torchdeq", problem, z, counted.calls)
        works[f"{name}, torchdeq"] = _torchdeq(known[name], problem, problem.f)


def _torchdeq(solver: Callable[..., Any], problem: _Problem, f: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    z0 = torch.zeros_like(problem.x)
    return lambda: solver(f, z0, max_iter=MOST_STEPS, tol=RTOL, stop_mode="rel")[0]  # type: ignore[no-any-return]


def _missing(row: Row, package: str, *needed: str) -> bool:
    missing = [name for name in (package, *needed) if importlib.util.find_spec(name) is None]
    if missing:
        row.skipped[package] = f"not installed (pip install {' '.join(missing)})"
    return bool(missing)


def _add_optimistix(row: Row, works: dict[str, Work], problem: _Problem) -> None:
    """Its plain iteration, compiled, on jax's default device; all systems as one."""
    if _missing(row, "optimistix", "jax"):
        return
    import jax
    import jax.numpy as jnp
    import optimistix

    weight, x = (jnp.asarray(t.cpu().numpy()) for t in (problem.weight, problem.x))
    solver = optimistix.FixedPointIteration(rtol=RTOL, atol=RTOL)

    @jax.jit
    def solve(x: Any) -> Any:
        solution = optimistix.fixed_point(
            lambda z, _: jnp.tanh(z @ weight.T + x), solver, jnp.zeros_like(x), max_steps=MOST_STEPS, throw=False
        )
        return solution.value, solution.stats["num_steps"]

    def work() -> Any:
        return jax.block_until_ready(solve(x))

    z, steps = work()
    _judge(row, "plain, optimistix", problem, torch.tensor(z.tolist()), int(steps))
    works["plain, optimistix"] = work


def _add_torchdiffeq(row: Row, works: dict[str, Work], problem: _Problem) -> None:
    """The flow dz/dt = f(z) − z for a fixed time, long enough for the slowest system."""
    if _missing(row, "torchdiffeq"):
        return
    from torchdiffeq import odeint

    z0 = torch.zeros_like(problem.x)
    times = torch.tensor([0.0, FLOW_TIME], device=z0.device)
    counted = Counted(problem.f)

    def flow(f: Callable[[Tensor], Tensor]) -> Tensor:
        return odeint(lambda t, z: f(z) - z, z0, times, rtol=10 * RTOL, atol=10 * RTOL)[-1]  # type: ignore[no-any-return]

    _judge(row, "flow, torchdiffeq", problem, flow(counted), counted.calls)
    works["flow, torchdiffeq"] = lambda: flow(problem.f)


def _add_scipy(row: Row, works: dict[str, Work], problem: _Problem) -> None:
    """Its Anderson on the host; all systems as one vector, ended by the residual of the worst."""
    if _missing(row, "scipy"):
        return
    import numpy
    from scipy.optimize import NoConvergence, anderson

    weight, x = (t.double().cpu().numpy() for t in (problem.weight, problem.x))
    calls, sizes = [0], [numpy.ones(len(x))]

    def gap(z: Any) -> Any:
        fz = numpy.tanh(z @ weight.T + x)
        calls[0] += 1
        sizes[0] = numpy.linalg.norm(fz, axis=1)
        return fz - z

    def worst(gap: Any) -> Any:
        return (numpy.linalg.norm(gap.reshape(x.shape), axis=1) / sizes[0]).max()

    def work() -> Any:
        try:
            return anderson(
                gap,
                numpy.zeros_like(x),
                M=6,
                alpha=1.0,
                maxiter=MOST_STEPS,
                f_tol=RTOL,
                tol_norm=worst,
                line_search=None,
            )
        except NoConvergence as error:
            return error.args[0]

    z = work()
    _judge(row, "anderson, scipy", problem, z, calls[0])
    row.details["anderson, scipy"]["computed"] = "on the host, in float64"
    works["anderson, scipy"] = work
