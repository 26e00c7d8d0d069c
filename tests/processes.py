"""Processes that train together on this machine; none outlives its test."""

import multiprocessing
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from tests import workers

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.workers"])  # so that torch is imported once, not by every process


class Together:
    """Some processes, and what they said when they failed."""

    def __init__(self, processes, reports):
        self.processes, self.reports = processes, reports

    def join(self, timeout):
        """Wait for all; returns their exit codes and reports. Hanging is a failure."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        said = {path.stem: path.read_text() for path in sorted(self.reports.glob("*.txt"))}
        assert None not in codes, f"still running after {timeout} s: {codes}, {said}"
        return codes, said


@contextmanager
def together(function, *arguments, count=2):
    """Processes that each do `function(rank, *arguments)` of `tests.workers`, as torchrun would start them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as reports:
        processes = [
            _context.Process(
                target=workers.enter, args=(function, rank, count, store.port, reports, arguments), daemon=True
            )
            for rank in range(count)
        ]
        try:
            for process in processes:
                process.start()
            yield Together(processes, Path(reports))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def run_together(function, *arguments, count=2, timeout=120):
    """Do something in several processes; a failure of any is one of the test."""
    with together(function, *arguments, count=count) as running:
        codes, said = running.join(timeout)
    assert codes == [0] * count, "\n".join(said.values())
