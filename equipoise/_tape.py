"""Tapes: work recorded once and done again.

On a CUDA device a recording is a CUDA graph: kernels with the addresses they were recorded with. Elsewhere it is run
again from Python, which is no faster than not recording, and a way to test.
"""

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise._compat import abandon_pool

Work = Callable[[], None]

# A launch for many tensors copies as many elements with one block as take longer than a launch. So tensors larger than
# this get a launch each, unless they are many, or large enough together to keep a device busy.
LARGE = 2**15
MANY = 8
AMPLE = 2**24

# One recording at a time in a process: memory and libraries are set up for a recording as a whole.
recording_now = threading.RLock()


class _Inline(threading.local):
    def __init__(self) -> None:
        self.used: list[Any] | None = None


_inline = _Inline()


@contextmanager
def solves_inline(used: list[Any]) -> Iterator[None]:
    """Meanwhile solves of this thread are part of something larger that is being recorded, or will be.

    A graph cannot be replayed inside another one. So recordings of solves are run from Python here, also on CUDA
    devices, on the buffers that were made for them before.

    Args:
        used: Takes the recordings that were used: a larger one refers to their buffers, so it must keep them alive.
    """
    before, _inline.used = _inline.used, used
    try:
        yield
    finally:
        _inline.used = before


def inline() -> bool:
    """Whether `solves_inline` is in effect."""
    return _inline.used is not None


def used_inline(recording: Any) -> None:
    """Say that a recording is used where `solves_inline` may be in effect."""
    if _inline.used is not None and all(recording is not known for known in _inline.used):
        _inline.used.append(recording)


def being_recorded() -> bool:
    """Whether what is launched here goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def copy_all(places: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors, with one launch for those of one dtype that are small; all must be dense for that."""
    large = [place.numel() > LARGE for place in places]
    alone = 0 < sum(large) <= MANY and sum(map(Tensor.numel, places)) < AMPLE
    by_dtype: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for place, source, is_large in zip(places, sources, large, strict=True):
        if is_large and alone:
            place.copy_(source)
            continue
        ours, theirs = by_dtype.setdefault((place.dtype, source.dtype), ([], []))
        ours.append(place)
        theirs.append(source)
    for ours, theirs in by_dtype.values():
        torch._foreach_copy_(ours, theirs)


@contextmanager
def own_casts(device_type: str) -> Iterator[None]:
    """Autocast off, and a cache of casts that begins and ends here.

    What turns autocast on inside shares the casts of weights until the end of this context. Casts made before, perhaps
    outside of a graph, are not used, and those made inside, perhaps in the memory of a graph, do not get out.
    """
    if not torch.amp.is_autocast_available(device_type):
        yield
        return
    with torch.autocast(device_type, enabled=False):
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()


class Reruns:
    """Recordings that are run again from Python: for devices without graphs, and inside of something larger."""

    runs_python = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def take_turn(self) -> None:
        """Nothing runs beside anything else."""

    def rehearse(self, run: Work) -> None:
        with own_casts(self.device.type):
            run()

    def together(self) -> AbstractContextManager[Any]:
        """Each recording makes its own casts."""
        return nullcontext()

    def record(self, run: Work) -> Work:
        def again() -> None:
            with own_casts(self.device.type):
                run()

        again()  # leaves behind what a graph would: tensors that later recordings refer to
        return again

    def host(self, like: Tensor) -> Tensor:
        """A tensor of this shape and dtype to read one on the device into."""
        return torch.empty_like(like, device="cpu")

    def read(self, source: Tensor, host: Tensor) -> None:
        """Copy to the host, and wait for that."""
        host.copy_(source)

    def tidy(self) -> None:
        """Nothing was set aside."""


@dataclass
class _Side:
    """The stream of a device on which everything is recorded.

    One for all recordings: libraries keep a workspace per stream, which recorded kernels go on using, so recordings
    must not run at the same time.
    """

    stream: torch.cuda.Stream
    last: torch.cuda.Stream | None = None  # where something recorded was run last


_sides: dict[torch.device, _Side] = {}
# The allocator may go on asking graphs whose recording failed: they stay.
_failed: list[Any] = []


class Graphs:
    """CUDA graphs that share memory, so they must be replayed one after another, as they were recorded."""

    runs_python = False

    def __init__(self, device: torch.device) -> None:
        if device not in _sides:
            _sides[device] = _Side(torch.cuda.Stream(device))
        self.device, self.side = device, _sides[device]
        self.pool = torch.cuda.graph_pool_handle()
        self.copied = torch.cuda.Event()

    def take_turn(self) -> None:
        """Let what was replayed on another stream end before anything is replayed, or copied into buffers, here."""
        current = torch.cuda.current_stream(self.device)
        if self.side.last is not None and self.side.last != current:
            current.wait_stream(self.side.last)
        self.side.last = current

    def rehearse(self, run: Work) -> None:
        """Run outside of recording: libraries set themselves up, kernels are compiled.

        The second time it is an error to wait for the device. A recording that fails leaves more behind than this does.
        """
        with self.aside():
            run()
            with self.no_waiting():
                run()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On the stream of recordings, with casts of their own; what comes before and after is waited for."""
        current, stream = torch.cuda.current_stream(self.device), self.side.stream
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), own_casts(self.device.type):
                yield
        finally:
            current.wait_stream(stream)

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Make it an error to wait for the device."""
        before = torch.cuda.get_sync_debug_mode()
        _set_sync_debug_mode("error")
        try:
            yield
        finally:
            _set_sync_debug_mode(before)

    def together(self) -> AbstractContextManager[Any]:
        """Recordings that share casts: the first one makes them, so it must be replayed first."""
        return own_casts(self.device.type)

    def record(self, run: Work) -> Work:
        # Not `torch.cuda.graph`: if recording fails it leaves its stream the current one, and it empties the cache of
        # the allocator each time. What threads that have nothing to do with this one do meanwhile is none of ours.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        collects = gc.isenabled()
        gc.disable()  # a graph that is collected meanwhile would be destroyed in the midst of a recording
        try:
            with torch.cuda.stream(self.side.stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException:
                    with suppress(RuntimeError):
                        self._end(graph)
                    raise
                self._end(graph)
        finally:
            if collects:
                gc.enable()
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:  # it failed before it told the allocator and the random generator
            _failed.append(graph)
            with suppress(RuntimeError):
                abandon_pool(self.device, self.pool)
            with suppress(RuntimeError):
                sound = torch.cuda.CUDAGraph()
                sound.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device=self.device)
                sound.capture_end()
            raise

    def host(self, like: Tensor) -> Tensor:
        """A tensor of this shape and dtype to read one on the device into, without a stop on the way."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def read(self, source: Tensor, host: Tensor) -> None:
        """Copy to the host, and wait for that and no more: other streams go on."""
        host.copy_(source, non_blocking=True)
        self.copied.record(torch.cuda.current_stream(self.device))
        self.copied.synchronize()

    def tidy(self) -> None:
        """Give back what rehearsals took: memory cached for one stream is of no use to others."""
        torch.cuda.empty_cache()


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)


def tape_for(device: torch.device) -> Graphs | Reruns:
    return Graphs(device) if device.type == "cuda" and not inline() else Reruns(device)
