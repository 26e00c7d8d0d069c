"""DEQ: a cell and a plan as a module."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._capture import ENGINES, CaptureEngine
from equipoise._compat import keep_backward_buffers
from equipoise._errors import unknown_name
from equipoise._fixed_point import solve
from equipoise._problem import Problem, StateSpec
from equipoise._sharding import gathered, whole
from equipoise._solution import Solution
from equipoise._stop import Stop
from equipoise._tree import Tree, tree_map, tree_tensors
from equipoise.adjoints import Adjoint, Implicit, as_adjoint
from equipoise.solvers import Anderson, Solver, as_solver

LEARNED = "learned_solvers"  # submodule that holds solvers with weights of their own


@dataclass(frozen=True)
class Plan:
    """How to solve and how to differentiate: replaced as a whole by schedules and sweeps."""

    solver: Solver = Anderson()
    adjoint: Adjoint = Implicit()
    stop: Stop = Stop()

    def __post_init__(self) -> None:
        object.__setattr__(self, "solver", as_solver(self.solver))
        object.__setattr__(self, "adjoint", as_adjoint(self.adjoint))
        if not isinstance(self.stop, Stop):
            raise TypeError(f"stop must be a Stop(...), got {type(self.stop).__name__}.")

    def replace(self, **changes: Any) -> "Plan":
        """A plan with some parts changed."""
        for name in changes:
            if name not in ("solver", "adjoint", "stop"):
                raise unknown_name("part of a plan", name, ("solver", "adjoint", "stop"))
        return dataclasses.replace(self, **changes)


class DEQ(nn.Module):
    """A layer whose output is the equilibrium z* = cell(z*, *inputs).

    Args:
        cell: Any module with `forward(z, *inputs) -> z`; it may have `initial_state(*inputs)`.
        solver: Forward solver, or its name.
        adjoint: How gradients flow, or its name.
        stop: When the forward solve ends.
        eval_plan: The plan in eval mode; that of training if None.
        batch_dims: Leading axes of the state that index independent systems.
        in_dims: Which axis of each input indexes systems; None for inputs that all systems share.
        initial_state: Start of the solve from the inputs; by default the cell's own, or zeros like the first input.
        engine: "eager", a Python loop; "captured", replays of steps recorded once per shape, wherever that is possible
            (`capture.fallbacks` says why it was not); "auto", captured on CUDA devices for shapes that come again.

    A solver that is itself a module becomes a submodule, but its weights are saved apart: `state_dict` is the model's
    own.
    """

    def __init__(
        self,
        cell: nn.Module,
        *,
        solver: Solver | str = Anderson(),
        adjoint: Adjoint | str = Implicit(),
        stop: Stop = Stop(),
        eval_plan: Plan | None = None,
        batch_dims: int = 1,
        in_dims: int | tuple[int | None, ...] | None = 0,
        initial_state: Callable[..., Tree] | None = None,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(cell, nn.Module):
            raise TypeError(
                f"cell must be an nn.Module, got {type(cell).__name__}; for a function use equipoise.fixed_point."
            )
        if eval_plan is not None and not isinstance(eval_plan, Plan):
            raise TypeError(f"eval_plan must be a Plan(...), got {type(eval_plan).__name__}.")
        self.cell = cell
        self._plans: tuple[Plan, Plan | None] = (Plan(solver, adjoint, stop), eval_plan)  # type: ignore[arg-type]
        self._adopt_solvers()
        self.register_state_dict_post_hook(_leave_out_solvers)
        self.register_load_state_dict_post_hook(_expect_no_solvers)
        self.batch_dims, self.in_dims = batch_dims, in_dims
        self.initial_state = initial_state
        self.engine = engine
        self._compiled: Callable[..., Tree] | None = None
        self._capture: CaptureEngine | None = None

    @property
    def engine(self) -> str:
        """Which engine solves: "auto", "eager" or "captured"."""
        return self._engine

    @engine.setter
    def engine(self, engine: str) -> None:
        if engine not in ENGINES:
            raise unknown_name("engine", engine, ENGINES)
        self._engine = engine

    @property
    def capture(self) -> CaptureEngine:
        """The captured engine's recordings, and why solves were left to the eager one."""
        if self._capture is None:
            self._capture = CaptureEngine()
        return self._capture

    @property
    def plan(self) -> Plan:
        """The plan in training mode, and in eval mode unless `eval_plan` is set."""
        return self._plans[0]

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plans = (_checked_plan("plan", plan), self._plans[1])
        self._adopt_solvers()

    @property
    def eval_plan(self) -> Plan | None:
        """The plan in eval mode, or None for that of training."""
        return self._plans[1]

    @eval_plan.setter
    def eval_plan(self, plan: Plan | None) -> None:
        self._plans = (self._plans[0], plan if plan is None else _checked_plan("eval_plan", plan))
        self._adopt_solvers()

    @property
    def current_plan(self) -> Plan:
        """The plan of the mode the module is in."""
        return self.plan if self.training or self.eval_plan is None else self.eval_plan

    def _adopt_solvers(self) -> None:
        """Make learned solvers submodules, so that they move and are trained with the model."""
        plans = [plan for plan in self._plans if plan is not None]
        solvers = [solver for plan in plans for solver in (plan.solver, getattr(plan.adjoint, "solver", None))]
        stages = [stage for solver in solvers for stage in getattr(solver, "stages", (solver,))]
        learned = {id(stage): stage for stage in stages if isinstance(stage, nn.Module)}
        self._modules.pop(LEARNED, None)
        if learned:
            self.add_module(LEARNED, nn.ModuleList(learned.values()))

    def forward(
        self,
        *inputs: Any,
        z0: Tree | None = None,
        context: Tree = None,
        trace: bool = False,
        collect: str | tuple[str, ...] | None = None,
    ) -> Solution:
        """Solve for the equilibrium of `inputs`, from `z0` if given."""
        plan = self.current_plan
        if torch.compiler.is_compiling() and not plan.stop.fixed_budget:
            return _uncompiled(self, inputs, {"z0": z0, "context": context, "trace": trace, "collect": collect})
        if self._may_capture(inputs) and context is None and not trace and not collect:
            solution = self.capture.solve(self, plan, inputs, z0)
            if solution is not None:
                return solution

        def run(*inputs: Any, z0: Tree, context: Tree) -> Solution:
            start = self.start(*inputs) if z0 is None else z0
            problem = self.problem(*inputs, z0=start, context=context)
            try:
                return solve(problem, start, plan.solver, plan.adjoint, plan.stop, trace=trace, collect=collect)
            except Exception as error:
                if problem.nfe == 1 and z0 is None and self._start_maker is None:
                    error.add_note(_of_start(start))
                raise

        return gathered(self.cell, run, inputs, {"z0": z0, "context": context})

    def _may_capture(self, inputs: tuple[Any, ...]) -> bool:
        if self.engine != "auto":
            return self.engine == "captured"
        # Most often the first input tells; looking into all of them takes longer.
        return any(isinstance(value, Tensor) and value.is_cuda for value in inputs) or any(
            tensor.is_cuda for tensor in tree_tensors(inputs)
        )

    def problem(self, *inputs: Any, z0: Tree | None = None, context: Tree = None) -> Problem:
        """The fixed-point problem of these inputs, for penalties and diagnostics."""
        spec = StateSpec.of(self.start(*inputs) if z0 is None else z0, self.batch_dims)
        plain = whole(self.cell, self.cell)
        cell = plain if self._compiled is None else whole(self.cell, self._compiled)
        return Problem(cell, spec, inputs, in_dims=self.in_dims, context=context, plain=plain)

    @property
    def _start_maker(self) -> Callable[..., Tree] | None:
        """What makes the start of a solve; None for zeros like the first input."""
        return self.initial_state or getattr(self.cell, "initial_state", None)

    def start(self, *inputs: Any) -> Tree:
        """The state a solve begins from."""
        make = self._start_maker
        if make is not None:
            return whole(self.cell, make)(*inputs)
        if not inputs or not tree_tensors(inputs[0]):
            raise ValueError("the start of the solve is unknown: give the cell an initial_state(*inputs), or pass z0.")
        return tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf, inputs[0])

    def compile_cell(self, **kwargs: Any) -> None:
        """Use a compiled twin of the cell in solves; the eager cell stays for penalties and state_dict.

        Args:
            **kwargs: Passed to `torch.compile`.
        """
        cell = self.cell

        # A function of our own: code of the cell compiled elsewhere, perhaps with other settings, is not mixed in.
        def evaluate(*arguments: Any) -> Tree:
            return cell(*arguments)

        compiled = torch.compile(evaluate, **kwargs)

        def call(*arguments: Any) -> Tree:
            with keep_backward_buffers():
                return compiled(*arguments)

        self._compiled = call

    def __getstate__(self) -> dict[str, Any]:
        # The compiled twin and recordings belong to this process; call compile_cell() again after loading.
        return {**self.__dict__, "_compiled": None, "_capture": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "DEQ":
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def extra_repr(self) -> str:
        evaluation = f", eval_plan={self.eval_plan}" if self.eval_plan else ""
        engine = "" if self.engine == "auto" else f", engine={self.engine!r}"
        return f"solver={self.plan.solver}, adjoint={self.plan.adjoint}, stop={self.plan.stop}{evaluation}{engine}"


def _of_start(start: Tree) -> str:
    """On an error of the first evaluation, for who did not think of a start."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tree_tensors(start))
    return (
        f"DEQ: the solve starts from zeros like the first input, of shape {shapes}; give the cell an "
        "initial_state(*inputs), or DEQ(initial_state=...), if its state has another shape."
    )


def _uncompiled(deq: DEQ, inputs: tuple[Any, ...], options: dict[str, Any]) -> Solution:
    """A solve that ends on the host's word, within a compiled model: not traced, as a break of the graph."""
    if torch.compiler.is_exporting():
        stop = deq.current_plan.stop
        raise ValueError(
            f"DEQ: a solve that ends by a tolerance (stop.rtol={stop.rtol:g}, atol={stop.atol:g}) cannot be exported; "
            f"set a budget of steps: Stop(rtol=0, max_steps={stop.max_steps})."
        )
    return _solve_eagerly(deq, inputs, options)


@torch.compiler.disable
def _solve_eagerly(deq: DEQ, inputs: tuple[Any, ...], options: dict[str, Any]) -> Solution:
    return deq.forward(*inputs, **options)  # hooks are those of the compiled call


def _checked_plan(name: str, plan: object) -> Plan:
    if not isinstance(plan, Plan):
        raise TypeError(
            f"DEQ: {name} must be a Plan(solver, adjoint, stop), got {type(plan).__name__}; to change one part: "
            f"deq.{name} = deq.{name}.replace(stop=...)."
        )
    return plan


def _leave_out_solvers(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}{LEARNED}.")]:
        del state[key]


def _expect_no_solvers(module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if f"{LEARNED}." not in key]


def own_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of a model without those of learned solvers in it."""
    return [parameter for name, parameter in model.named_parameters() if LEARNED not in name.split(".")]


def own_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Buffers of a model without those of learned solvers in it."""
    return [buffer for name, buffer in model.named_buffers() if LEARNED not in name.split(".")]


def deqs_in(model: nn.Module) -> list[DEQ]:
    """The DEQs of a model, itself included."""
    return [module for module in model.modules() if isinstance(module, DEQ)]


def outermost_deqs(model: nn.Module) -> list[DEQ]:
    """The DEQs of a model that are no part of another one's cell."""
    found = deqs_in(model)
    inner = {id(deq) for outer in found for deq in deqs_in(outer.cell)}
    return [deq for deq in found if id(deq) not in inner]


@contextmanager
def override(model: nn.Module, **changes: Any) -> Iterator[nn.Module]:
    """Change the solver, adjoint or stop rule of every DEQ in `model`, training and eval plans alike, for a while.

    Args:
        model: A DEQ or a module that contains some.
        **changes: `solver`, `adjoint` or `stop`.
    """
    deqs = deqs_in(model)
    if not deqs:
        raise ValueError(f"override: {type(model).__name__} contains no DEQ.")
    with planned(deqs, **changes):
        yield model


@contextmanager
def planned(deqs: Iterable[DEQ], **changes: Any) -> Iterator[None]:
    """Change the plans of some DEQs for a while; see `override`."""
    before = [(deq, deq.plan, deq.eval_plan) for deq in deqs]
    try:
        for deq, plan, eval_plan in before:
            deq.plan = plan.replace(**changes)
            deq.eval_plan = eval_plan and eval_plan.replace(**changes)
        yield
    finally:
        for deq, plan, eval_plan in before:
            deq.plan, deq.eval_plan = plan, eval_plan


@contextmanager
def solutions_of(model: nn.Module) -> Iterator[list[tuple[Solution, Plan]]]:
    """The solutions that the equilibria of a model find meanwhile, each with the plan it was found by."""
    found: list[tuple[Solution, Plan]] = []

    def note(module: nn.Module, inputs: Any, solution: Solution) -> None:
        assert isinstance(module, DEQ)
        found.append((solution, module.current_plan))

    hooks = [deq.register_forward_hook(note) for deq in deqs_in(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
