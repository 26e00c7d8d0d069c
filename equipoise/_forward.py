"""Forward passes of a whole model as CUDA graphs.

Around a solve of a few steps, the host's work on embeddings, heads and losses takes longer than the device's on the
solve. Where every solve has a fixed budget a forward pass asks the host for nothing: it is recorded once for each kind
of call, and from then on the host copies the arguments, launches one graph, and copies the results out.

    a kind of call comes for the first time     it is made in the ordinary way: it may never come again
    for the second time                         rehearsed twice, once with waiting an error; recorded; replayed
    later                                       replayed

Whether the model is still what was recorded is looked at while the device works: a replay reads memory that is kept,
and writes to its own, so its results can be dropped if the model turns out to be another one.
"""

import random
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from equipoise._capture import remember
from equipoise._compat import autocast_dtype, inside_functorch_transform, reenter_autocast
from equipoise._errors import require_count
from equipoise._fingerprint import Watch
from equipoise._module import DEQ, LEARNED, deqs_in
from equipoise._recording import CannotCapture, Recording, Snapshot
from equipoise._scope import current_scope
from equipoise._solution import EquilibriumWarning
from equipoise._static import Arguments, Read, Results, reported
from equipoise._tape import Graphs, Work, being_recorded, copy_all, inline, recording_now, solves_inline

NEW = "a call of its kind is new"
CHANGED = "the model was changed after its forward pass was recorded"
RESTLESS = "the model changes its own attributes or buffers in a forward pass"


def forward_tape(device: torch.device) -> Any:
    """What records forward passes on a device; None where nothing can."""
    return Graphs(device) if device.type == "cuda" else None


# What a recording holds for


class _Parts:
    """Some modules, as a watch looks at them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules

    def modules(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(())


def _watched(model: nn.Module) -> list[nn.Module]:
    """All modules but DEQs and the lists of solvers they have, which change with their plans; these are in the key."""
    deqs = deqs_in(model)
    lists = [deq._modules[LEARNED] for deq in deqs if LEARNED in deq._modules]
    apart = {id(module) for module in (*deqs, *lists)}
    return [module for module in model.modules() if id(module) not in apart]


def _solves(deqs: list[DEQ]) -> tuple[Any, ...]:
    """What the DEQs of a model are set to; an error if one of them cannot be part of a graph."""
    found = []
    for deq in deqs:
        plan, stop = deq.current_plan, deq.current_plan.stop
        if not stop.fixed_budget:
            raise CannotCapture(
                f"solves end by a tolerance (stop.rtol={stop.rtol:g}, atol={stop.atol:g}), which the host asks for; "
                f"Stop(rtol=0, max_steps={stop.max_steps}) makes as many steps in every solve"
            )
        if deq._forward_hooks or deq._forward_pre_hooks:
            raise CannotCapture("a DEQ has hooks, which a replay would not call")
        in_dims = tuple(deq.in_dims) if isinstance(deq.in_dims, list) else deq.in_dims
        settings = deq.training, deq.batch_dims, in_dims, deq.initial_state
        found.append((deq, deq.cell, deq._compiled, plan, deq.engine, *settings))
    return tuple(found)


def _device_of(model: nn.Module) -> torch.device | None:
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), None)


def _check_surroundings() -> None:
    """Raise unless something can be recorded, or replayed, here and now."""
    if torch.compiler.is_compiling():
        raise CannotCapture("a compiled region is around the call")
    if inside_functorch_transform():
        raise CannotCapture("a torch.func transform is around the call")
    if current_scope() is not None:
        raise CannotCapture("the call is inside a solve")
    if inline() or being_recorded():
        raise CannotCapture("the call is part of something that is being recorded")


def _check_model(model: nn.Module) -> None:
    if model.training:
        raise CannotCapture(f"{type(model).__name__} is in training mode")
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise CannotCapture(f"{type(module).__name__} has hooks, which a replay would not call")
    if any(hasattr(tensor, "placements") for tensor in model.parameters()):
        raise CannotCapture("the model is sharded")


# Calls


@dataclass
class _Kind:
    """Calls that are alike, and the recording of one.

    Attributes:
        seen: How many there were.
        watch: Over the model as it was recorded, or refused.
        obstacle: Why they cannot be recorded.
        places: Buffers of the tensors among the arguments.
        results: Where a replay leaves what it made.
        kept: The tensors of the model, so that the memory a graph reads is there.
        recordings: Of solves, whose buffers the graph refers to.
        replay: Launches the graph.
    """

    seen: int = 0
    watch: Watch | None = None
    obstacle: str | None = None
    places: list[Tensor] = field(default_factory=list)
    results: Results | None = None
    kept: list[Tensor] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)
    replay: Work | None = None


class CapturedForward:
    """A model's forward pass, or any function around it, as one CUDA graph for each kind of call.

    A kind of call is what shapes, dtypes and plain values of the arguments, plans of the DEQs, autocast and precision
    settings make it. Tensors among the arguments are copied in, results are new tensors in the same tree. Weights may
    change in place, also those of a learned solver; if parameters, buffers, modules or their plain attributes are
    replaced, the next calls are ordinary ones, and there is a new recording. What cannot be recorded is called in the
    ordinary way: a solve with a tolerance, a function that waits for the device or draws on the host, a model in
    training mode or with hooks, tensors on a CPU. No gradients are recorded, neither way.

    What the function does besides computing its result is not done again by a replay, and what it depends on besides
    its arguments and the model is seen as it was. A `Solution` among the results has no `problem`.

    Args:
        model: Whose forward pass it is, in eval mode.
        function: Computes the result from the arguments of a call; the model itself by default.
        after: Calls of a kind that are made in the ordinary way before one is recorded.
        most: Kinds of calls that are remembered; the recordings of those used longest ago are given up.
        warn: Whether to warn, once for each reason, where calls cannot be recorded.

    Attributes:
        fallbacks: Calls made in the ordinary way, counted by reason.
        recorded: Recordings made.
        replayed: Calls made by replaying.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[..., Any] | None = None,
        *,
        after: int = 1,
        most: int = 16,
        warn: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"CapturedForward: model must be an nn.Module, got {type(model).__name__}.")
        require_count("CapturedForward", "after", after, low=0)
        require_count("CapturedForward", "most", most)
        self.model, self.function = model, model if function is None else function
        self.after, self.most, self.warn = after, most, warn
        self.fallbacks: Counter[str] = Counter()
        self.recorded = self.replayed = 0
        self._lock = threading.RLock()
        self.release()

    def release(self) -> None:
        """Give up all recordings and the memory they hold."""
        self._kinds: OrderedDict[Any, _Kind] = OrderedDict()
        self._read: dict[type, Read] = {}
        self._deqs = deqs_in(self.model)
        self._device: torch.device | None = None
        self._tape: Any = None

    @torch.no_grad()
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The function's result, without gradients."""
        try:
            with self._lock:
                return self._captured((arguments, named))
        except CannotCapture as reason:
            self._fall_back(str(reason))
        return self.function(*arguments, **named)

    def _fall_back(self, reason: str) -> None:
        if self._device is not None and self._device != _device_of(self.model):  # recordings are of no use there
            self.release()
        if self.warn and reason not in self.fallbacks and reason not in (NEW, CHANGED):
            message = f"CapturedForward: {reason}; such calls are made in the ordinary way."
            warnings.warn(message, EquilibriumWarning, stacklevel=4)
        self.fallbacks[reason] += 1

    def _captured(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        _check_surroundings()
        if self._tape is None:
            self._device, self._tape = self._begin()
        assert self._device is not None
        arguments = Arguments(self._device, self._read)
        key = self._key(arguments, given)
        kind = self._known(key)
        if kind is None or kind.replay is None:
            kind = self._studied(key, kind, arguments, given)
        self._tape.take_turn()
        copy_all(kind.places, arguments.tensors)
        assert kind.replay is not None
        assert kind.results is not None
        assert kind.watch is not None
        kind.replay()
        result = kind.results.take()
        if not kind.watch.unchanged():  # asked here, where the device is at work
            self.release()
            raise CannotCapture(CHANGED)
        self.replayed += 1
        return result

    def _begin(self) -> tuple[torch.device, Any]:
        """The device of the model, and what records there."""
        device = _device_of(self.model)
        if device is None:
            raise CannotCapture("the model has no tensors, so its device is unknown")
        tape = forward_tape(device)
        if tape is None:
            raise CannotCapture(f"there are no CUDA graphs on {device.type!r}")
        return device, tape

    def _key(self, arguments: Arguments, given: Any) -> Any:
        """What calls of one kind have in common, besides the values of tensors and the model."""
        settings = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        autocast = autocast_dtype(arguments.device.type)
        return arguments.look(given), _solves(self._deqs), self.model.training, autocast, settings

    def _known(self, key: Any) -> _Kind | None:
        try:
            if key not in self._kinds:
                return None
        except TypeError as error:
            raise CannotCapture(f"arguments or plans cannot be compared ({error})") from error
        self._kinds.move_to_end(key)
        return self._kinds[key]

    def _studied(self, key: Any, known: _Kind | None, arguments: Arguments, given: Any) -> _Kind:
        """A kind that can be replayed, recorded now if it is worth it."""
        kind = known or _Kind()
        if kind.obstacle is not None:
            if kind.watch is None or kind.watch.unchanged():
                raise CannotCapture(kind.obstacle)
            kind = _Kind()
        kind.seen += 1
        remember(self._kinds, key, kind, self.most)
        if kind.seen <= self.after:
            raise CannotCapture(NEW)
        _check_model(self.model)
        read = sum(map(len, self._read.values()))
        try:
            self._record(kind, arguments, given)
        except CannotCapture as reason:
            kind.obstacle, kind.places, kind.results, kind.recordings = str(reason), [], None, []
            raise
        if sum(map(len, self._read.values())) > read:  # no key will be equal to an older one
            self._kinds = OrderedDict({self._key(Arguments(arguments.device, self._read), given): kind})
        return kind

    # Recording

    def _record(self, kind: _Kind, arguments: Arguments, given: Any) -> None:
        places: list[Tensor] = []
        with _as_ever(), recording_now, reported("the forward pass"):
            static = arguments.static(given, places)
            copy_all(places, arguments.tensors)
            autocast = autocast_dtype(arguments.device.type)

            def run() -> Any:
                with reenter_autocast(arguments.device.type, autocast):
                    return self.function(*static[0], **static[1])

            def keep() -> None:
                kind.results = Results(run(), arguments.device)

            before = Snapshot(self.model, arguments.device)
            try:
                with self._tape.aside(), solves_inline(kind.recordings):
                    run()
                    self._rehearse(kind, keep)
                kind.results, kind.recordings = None, []
                self._tape.tidy()
                with solves_inline(kind.recordings), self._tape.together():
                    kind.replay = self._taped(keep)
            finally:
                before.restore()
        kind.places, kind.kept = places, [t.detach() for t in (*self.model.parameters(), *self.model.buffers())]
        self.recorded += 1

    def _taped(self, run: Work) -> Work:
        try:
            replay: Work = self._tape.record(run)
            return replay
        except BaseException:
            self._tape = None  # the memory of a failed recording is given up
            raise

    def _rehearse(self, kind: _Kind, run: Work) -> None:
        """Run with an eye on what a graph would not do again, or cannot do at all."""
        kind.watch = Watch(cast(nn.Module, _Parts(_watched(self.model))))
        buffers = [(buffer, buffer._version) for buffer in self.model.buffers() if not buffer.is_inference()]
        drawn = torch.get_rng_state(), random.getstate()
        with self._tape.no_waiting():
            run()
        if not torch.equal(drawn[0], torch.get_rng_state()) and self._device != torch.device("cpu"):
            raise CannotCapture("random numbers are drawn on the host")
        if drawn[1] != random.getstate():
            raise CannotCapture("random numbers are drawn on the host")
        if not kind.watch.unchanged() or any(buffer._version != version for buffer, version in buffers):
            kind.watch = None
            raise CannotCapture(RESTLESS)


@contextmanager
def _as_ever() -> Iterator[None]:
    """Tensors that outlive inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
