"""Whole training steps as CUDA graphs.

A step launches hundreds of kernels, and on a fast device the host is what a small model waits for. Where every solve
has a fixed budget a step asks the host for nothing: it is recorded once for each kind of step, and from then on the
host copies a batch, sets the seed and the rates, launches one graph, and takes out losses and statistics.

    seen        what is made of a step of that kind
    first       an ordinary step: the kind may never come again
    second      solves run as they will in the recording, with buffers made for them
    third       the same, and waiting for the device is an error
    fourth      recorded, which does not execute it, and replayed
    later       replayed

Each of them is a step of the run. Draws are those of an ordinary step with the same seed: kernels of a graph read seed
and offset of the generator from memory that is filled when it is replayed. docs/training.md says what is not recorded.
"""

import copy
import gc
import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise._capture import remember
from equipoise._draws import Rows
from equipoise._fingerprint import OF_EVERY_MODULE, PLAIN_VALUES
from equipoise._recording import CannotCapture, Recording, Snapshot
from equipoise._solution import EquilibriumWarning, Stats
from equipoise._static import Noted, buffer_like, comparable, reported
from equipoise._stop import Stop
from equipoise._tape import Graphs, Work, copy_all, recording_now, solves_inline
from equipoise._tree import tree_flatten, tree_map, tree_tensors, tree_unflatten
from equipoise.train.alternate import Alternation
from equipoise.train.optim import Stepper, WeightAverage, set_learning_rate
from equipoise.train.schedule import StepPlan

# Kinds of steps that are remembered, recorded or not; graphs share their memory.
MOST_KINDS = 64
# Steps of a kind that are made before one is recorded; waiting is an error in the last of them.
REHEARSED = 3


@dataclass
class Pass:
    """What a pass over a batch leaves behind, gradients apart.

    Attributes:
        losses: By name, detached.
        carry: What the next batch of the same streams needs.
        forward: Statistics of the solves, each with its stop rule.
        backward: Likewise of their backward solves; None where there was none.
    """

    losses: dict[str, Tensor]
    carry: Any
    forward: list[tuple[Stats, Stop]]
    backward: list[tuple[Stats | None, Stop | None]]


Run = Callable[[Any, Rows, Any, Any, Any], Pass]
"""Adds the gradient of a batch: `run(batch, rows, carry, penalty_weight, step)`."""


# What a recording must not depend on


def _refuse(*_: Any) -> Any:
    raise CannotCapture("the task uses the number of the step, which differs from replay to replay")


_USES = "bool int index float add radd sub rsub mul rmul truediv floordiv mod divmod pow eq ne lt le gt ge hash format"
_AnyStep = type("_AnyStep", (), {f"__{use}__": _refuse for use in _USES.split()})
"""In place of the number of a step."""


def _form(tensor: Tensor) -> Any:
    """A tensor as far as a recording depends on it: it is copied into a dense one."""
    return tensor.shape, tensor.dtype, tensor.device


def _forms(tree: Any, what: str) -> list[Any]:
    leaves, _ = tree_flatten(tree)
    return [_form(leaf) if isinstance(leaf, Tensor) else comparable(leaf, what) for leaf in leaves]


def _attributes(model: nn.Module) -> list[Any]:
    """Plain attributes and tensors of all modules: none of them may be another one after a step."""
    found: list[Any] = []
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        found += [id(tensor) for tensor in own]
        values = [(name, value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE]
        found += [(name, repr(value)) for name, value in values if type(value) in PLAIN_VALUES]
    return found


# Kinds of steps


class _Outputs:
    """Where a recording leaves a tree of small tensors: one vector per dtype, which each replay writes over."""

    def __init__(self, tree: Any) -> None:
        tensors = tree_tensors(tree)
        self.leaves: list[Any] = []
        self.tree: Any = None
        sizes: dict[torch.dtype, int] = {}
        self.forms, self.places = list(map(_form, tensors)), []
        for tensor in tensors:
            start = sizes.get(tensor.dtype, 0)
            sizes[tensor.dtype] = start + tensor.numel()
            self.places.append((tensor.dtype, slice(start, sizes[tensor.dtype]), tensor.shape))
        self.vectors = {dtype: tensors[0].new_empty(size, dtype=dtype) for dtype, size in sizes.items()}

    def put(self, tree: Any) -> None:
        """Write a tree of tensors like those it was made for."""
        tensors = [tensor.detach() for tensor in tree_tensors(tree)]
        if list(map(_form, tensors)) != self.forms:
            raise CannotCapture("two steps of one kind differ in what they return")
        leaves, self.tree = tree_flatten(tree)
        self.leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        copy_all(self._views(self.vectors), tensors)

    def take(self) -> Any:
        """What was written last, in tensors of its own."""
        views = iter(self._views({dtype: vector.clone() for dtype, vector in self.vectors.items()}))
        return tree_unflatten([next(views) if leaf is None else leaf[0] for leaf in self.leaves], self.tree)

    def _views(self, vectors: dict[torch.dtype, Tensor]) -> list[Tensor]:
        return [vectors[dtype][part].view(shape) for dtype, part, shape in self.places]


@dataclass
class _Kind:
    """Steps that are alike, and the recording of one.

    Attributes:
        blends: Whether the average of the weights is updated in it.
        rows: Which rows of the whole batch theirs holds.
        seen: How many there were.
        obstacle: Why they cannot be recorded.
        batch: One of them in buffers.
        places: The tensors among batch and carry, in the order of `_sources`.
        carry: What it begins with, in buffers.
        carried: What it leaves for the next, in buffers.
        outputs: Losses, statistics and the norm of the gradients.
        recordings: Of solves, whose buffers it refers to.
        replay: Makes a step.
    """

    blends: bool
    rows: Rows
    seen: int = 0
    obstacle: str | None = None
    batch: Any = None
    places: list[Tensor] = field(default_factory=list)
    carry: Any = None
    carried: Any = None
    outputs: _Outputs | None = None
    recordings: list[Recording] = field(default_factory=list)
    replay: Work | None = None

    def put(self, made: Pass, norm: Tensor, rehearsed: bool) -> None:
        """Write down what a pass made, where it is found after every replay."""
        results = made.losses, made.forward, made.backward, norm
        if rehearsed:  # what it is written to lies outside of the memory of graphs
            self.outputs, self.carried = _Outputs(results), tree_map(buffer_like, made.carry)
        assert self.outputs is not None
        if _forms(self.carried, "") != _forms(made.carry, "something carried on"):
            raise CannotCapture("two steps of one kind differ in what they carry on")
        self.outputs.put(results)
        copy_all(tree_tensors(self.carried), [tensor.detach() for tensor in tree_tensors(made.carry)])

    def take(self) -> tuple[Pass, Tensor]:
        """What the newest step made; what it carries on is written over by the next one."""
        assert self.outputs is not None
        losses, forward, backward, norm = self.outputs.take()
        return Pass(losses, self.carried, forward, backward), norm


def _sources(batch: Any, carry: Any, device: torch.device) -> list[Tensor]:
    """The tensors of a batch on the device, and those of a carry."""
    return [t for t in tree_tensors(vars(batch)) if t.device.type == device.type] + tree_tensors(carry)


# Steps


def step_tape(device: torch.device) -> Any:
    """What records steps on a device; None where nothing can."""
    return Graphs(device) if device.type == "cuda" else None


class CapturedSteps:
    """Training steps that are recorded and replayed, and what kept others from it.

    Args:
        run: The forward and the backward pass.
        model: What is trained.
        stepper: Its optimiser, one that refuses steps on the device.
        average: Of its weights, if one is kept.
        device: Where all of it is.

    Attributes:
        fallbacks: Steps left to the ordinary way, counted by reason.
        recorded: Recordings made.
        replayed: Steps made by replaying.
        peak_memory: The most memory that was in use when a step was recorded; later steps use the same.
    """

    def __init__(
        self, run: Run, model: nn.Module, stepper: Stepper, average: WeightAverage | None, device: torch.device
    ) -> None:
        self.run, self.model, self.stepper, self.average, self.device = run, model, stepper, average, device
        self.tape = step_tape(device)
        self.fallbacks: Counter[str] = Counter()
        self.recorded = self.replayed = self.peak_memory = 0
        self._kinds: OrderedDict[Any, _Kind] = OrderedDict()
        self._read: dict[str, None] = {}
        self._tensors = [*model.parameters(), *model.buffers()]
        # What changes from step to step and is not in the batch: the weight of the penalty, and a rate per group.
        numbers = torch.zeros(1 + len(stepper.optimizer.param_groups), device=device)
        self._weight, *self._rates = self._places = numbers.unbind()
        self._written = [math.nan] * len(self._places)

    def step(
        self,
        batch: Any,
        carry: Any,
        plan: StepPlan | None,
        *,
        factor: float,
        seed: int,
        step: int,
        learned: Alternation | None = None,
    ) -> Pass | None:
        """Make a step; None if it is to be made in the ordinary way, and `fallbacks` says why.

        Args:
            batch: On the device.
            carry: What the batch before left.
            plan: What the step does.
            factor: Of the learning rates.
            seed: Of its draws.
            step: Its number.
            learned: Stands in for the solver of the plan.
        """
        try:
            _check_plan(plan)
            blends = self.average is not None and self.average.steady(step)
            kind = self._kind(self._key(batch, carry, plan, blends, learned), blends, batch.rows)
            kind.seen += 1
            if kind.obstacle is not None:
                raise CannotCapture(kind.obstacle)
            if kind.seen == 1:
                return None
            read = len(self._read)
            made = self._make(kind, batch, carry, plan, factor, seed, step)
            if len(self._read) > read:  # no key will be equal to an older one
                self._kinds = OrderedDict([(self._key(batch, carry, plan, blends, learned), kind)])
            return made
        except CannotCapture as reason:
            if not self.fallbacks[str(reason)]:
                message = f"train.capture: {reason}; such steps are made in the ordinary way."
                warnings.warn(message, EquilibriumWarning, stacklevel=3)
            self.fallbacks[str(reason)] += 1
            return None

    def _key(self, batch: Any, carry: Any, plan: StepPlan | None, blends: bool, learned: Alternation | None) -> Any:
        """What steps of one kind have in common, besides the values of tensors, rates and weights."""
        if not hasattr(batch, "__dict__"):
            raise CannotCapture(f"a batch of type {type(batch).__name__} has no attributes to copy")
        return (
            plan and (plan.phase, plan.plan, plan.penalty_weight > 0, plan.penalty),
            blends,
            batch.rows,
            tuple(map(_form, _sources(batch, None, self.device))),
            tuple((name, getattr(batch, name)) for name in self._read),
            (*_forms(carry, "something carried on"), tree_flatten(carry)[1]),
            tuple(map(Tensor.data_ptr, self._tensors)),
            learned and _standing_in(learned),
        )

    def _kind(self, key: Any, blends: bool, rows: Rows) -> _Kind:
        """What is known of steps with a key."""
        kind = self._kinds.get(key) or _Kind(blends, rows)
        remember(self._kinds, key, kind, MOST_KINDS)
        return kind

    def _make(
        self, kind: _Kind, batch: Any, carry: Any, plan: StepPlan | None, factor: float, seed: int, step: int
    ) -> Pass:
        self._load(kind, batch, carry, plan, factor)
        if kind.replay is None:
            if plan is not None:
                plan.apply(self.model)
            self.model.train()
            try:
                if kind.seen <= REHEARSED:
                    self._rehearse(kind, seed, strict=kind.seen == REHEARSED)
                else:
                    self._record(kind)
            except CannotCapture as reason:
                kind.obstacle = str(reason)
                raise
        if kind.replay is not None:
            self._seed(seed)
            kind.replay()
            self.replayed += 1
        made, norm = kind.take()
        self.stepper.guard.note(norm)
        self.stepper.guard.catch_up(beyond=self.stepper.guard.settings.give_up - 1)
        if self.average is not None and kind.blends:
            self.average.count += 1
        elif self.average is not None:
            self.average.update(self.model, step)
        return made

    def _load(self, kind: _Kind, batch: Any, carry: Any, plan: StepPlan | None, factor: float) -> None:
        """Put batch, carry and numbers where a recording finds them."""
        self.tape.take_turn()
        sources = _sources(batch, carry, self.device)
        if kind.batch is None:
            static = copy.copy(batch)
            static.__dict__.update(tree_map(self._buffer, vars(batch)))
            kind.batch, kind.carry = Noted(static, self.device, self._read), tree_map(self._buffer, carry)
            kind.places = _sources(static, kind.carry, self.device)
        copy_all(kind.places, sources)
        set_learning_rate(self.stepper.optimizer, factor)
        numbers = [plan.penalty_weight if plan is not None else 0.0]
        numbers += [group["lr"] for group in self.stepper.optimizer.param_groups]
        for place, number, before in zip(self._places, numbers, self._written, strict=True):
            if number != before:
                place.fill_(number)
        self._written = numbers

    def _buffer(self, leaf: Any) -> Any:
        return leaf if isinstance(leaf, Tensor) and leaf.device.type != self.device.type else buffer_like(leaf)

    def _seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed) if self.device.type == "cuda" else torch.manual_seed(seed)

    def _rehearse(self, kind: _Kind, seed: int, strict: bool) -> None:
        """Make a step as it will be recorded; if it cannot be, nothing has happened.

        Args:
            kind: What it is like.
            seed: Of its draws.
            strict: Whether to look for what a graph would not do again.
        """
        before = Snapshot(self.model, self.device)
        torch.manual_seed(seed)
        try:
            with self.tape.aside(), self._ready(kind, recorded=False):
                with self._same_again() if strict else nullcontext():
                    norm = self._gradients(kind, rehearsed=True)
                self._finish(kind, norm)
        except CannotCapture:
            before.restore()
            raise

    @contextmanager
    def _same_again(self) -> Iterator[None]:
        """Look for what a graph would not do again, or cannot do at all."""
        attributes, drawn = _attributes(self.model), torch.get_rng_state()
        with self.tape.no_waiting():
            yield
        if self.device.type != "cpu" and not torch.equal(drawn, torch.get_rng_state()):
            raise CannotCapture("the step draws random numbers on the host")
        if attributes != _attributes(self.model):
            raise CannotCapture("the model changes its own attributes in a step")

    def _record(self, kind: _Kind) -> None:
        read, kind.recordings = set(self._read), []
        gc.collect()  # graphs of steps before would tie the gradients of parameters to another stream
        self.tape.tidy()

        def run() -> None:
            self._finish(kind, self._gradients(kind, rehearsed=False))

        try:
            with recording_now, reported("a step"), self._ready(kind, recorded=True), self.tape.together():
                replay = self.tape.record(run)
        except CannotCapture:
            self.tape = step_tape(self.device)  # the memory of a failed recording is given up
            raise
        if read != set(self._read):
            raise CannotCapture("two steps of one kind read different values of a batch")
        kind.replay = replay
        self.recorded += 1
        if self.device.type == "cuda":
            self.peak_memory = max(self.peak_memory, torch.cuda.max_memory_allocated(self.device))

    def _gradients(self, kind: _Kind, rehearsed: bool) -> Tensor:
        """Both passes, up to the clipping of the gradients; returns their norm before."""
        with reported("a step"):
            made = self.run(kind.batch, kind.rows, kind.carry, self._weight, _AnyStep())
            norm = self.stepper.guard.clip(self.model)
            kind.put(made, norm, rehearsed)
        return norm

    def _finish(self, kind: _Kind, norm: Tensor) -> None:
        """What changes the weights, and what follows from that."""
        self.stepper.apply(norm)
        if self.average is not None and kind.blends:
            self.average.blend(self.model)

    @contextmanager
    def _ready(self, kind: _Kind, recorded: bool) -> Iterator[None]:
        """Solves and the optimiser as a recording needs them; no gradient is left behind, and no graph."""
        try:
            with solves_inline(kind.recordings), self.stepper.rates_in(self._rates, recorded):
                yield
        finally:
            self.stepper.optimizer.zero_grad()
            for recording in kind.recordings:
                recording.let_go()


def _check_plan(plan: StepPlan | None) -> None:
    stops = (
        [] if plan is None else [("stop", plan.plan.stop), ("adjoint.stop", getattr(plan.plan.adjoint, "stop", None))]
    )
    for name, stop in stops:
        if stop is not None and not stop.fixed_budget:
            raise CannotCapture(
                f"solves end by a tolerance ({name}.rtol={stop.rtol:g}, atol={stop.atol:g}), which the host asks for; "
                f"set {name}.rtol = 0 for {stop.max_steps} steps in every solve"
            )


def _standing_in(learned: Alternation) -> tuple[Any, ...]:
    """What a recording keeps of a learned solver: which one it is, where its weights lie, and its number of steps."""
    assert learned.solver is not None
    return (learned.solver, learned.max_steps, *map(Tensor.data_ptr, learned.solver.parameters()))


def obstacle(device: torch.device, stepper: Stepper, shares: Sequence[Any], processes: int) -> str | None:
    """Why no step of a run can be recorded, if none can.

    Args:
        device: Where it computes.
        stepper: Its optimiser.
        shares: Of a batch, in this process.
        processes: How many there are.
    """
    if step_tape(device) is None:
        return f"there are no CUDA graphs on {device.type!r}"
    if processes > 1:
        return f"{processes} processes add up their gradients"
    if len(shares) > 1:
        return f"train.accumulation={len(shares)} makes a step of several passes"
    if stepper.scaler is not None:
        return "the loss is scaled for float16, by what the host reads"
    if not stepper.refuses_by_itself:
        return f"{type(stepper.optimizer).__name__} is not a fused optimiser, so the host has to refuse steps"
    return None
