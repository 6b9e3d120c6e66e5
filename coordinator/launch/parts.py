"""Runs the parts of an ``evaluate`` or ``predict``: one process each, started again when killed."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.launch.children import Children, Exited
from coordinator.launch.conclusion import print_error
from coordinator.launch.warm_start import PART, ChildProcess, WarmStart
from psrpc.core.errors import JobFailed, PsError, disk_code, disk_reason, error_line
from psrpc.core.text import counted
from psrpc.ops.exit_status import DONE, FAILED, INTERRUPTED
from psrpc.ops.host_requests import PartsRequest
from psrpc.ops.process import module_command

RESTARTS = 3
"""How often a part that was killed is started again."""

STDIN = 0

_WAIT_S = 0.05


class Parts:
    """Runs the processes of one request. Use it once, in the main thread."""

    def __init__(
        self,
        request: PartsRequest,
        environment: Mapping[str, str],
        warm_start: WarmStart,
        module: str = PART,
    ) -> None:
        """``environment`` comes from :func:`coordinator.launch.commands.cluster_environment`;
        tests replace ``module``, the program of a part."""
        self._request = request
        self._folder = Path(request.folder)
        threads = max(1, (os.cpu_count() or 1) // request.count)
        # TensorFlow reads this variable if the caller sets no number of threads.
        self._environment = {"TF_NUM_INTRAOP_THREADS": str(threads), **environment}
        self._warm_start = warm_start
        self._module = module
        self._children = Children()
        self._starts: dict[str, int] = {}
        self._stopped = False

    def run(self) -> int:
        """Runs all parts to their end, and prints why they failed. Returns 0 when all are done, 1
        when one has failed, 130 after SIGINT, or when standard input has ended."""
        signal.signal(signal.SIGINT, lambda _number, _frame: self._stop())
        # Removes the wakeup descriptor of an earlier run of ``coordinator up``.
        signal.set_wakeup_fd(-1)
        input_ends = select.poll()
        input_ends.register(STDIN, select.POLLIN)
        waiting = {f"part-{index}": index for index in range(self._request.count)}
        try:
            with self._children:
                return self._run(waiting, input_ends)
        except OSError as error:
            cause = f"cannot start the parts in {self._folder}: {disk_reason(error)}"
            print_error(error_line(PsError(cause, code=disk_code(error))))
            return FAILED

    def _run(self, waiting: dict[str, int], input_ends: select.poll) -> int:
        while waiting or self._children.alive():
            # Without a child, `Children.wait` returns at once, and the loop waits for the fork
            # server; the pause is here then.
            pause_s = 0 if self._children.alive() else _WAIT_S
            if self._stopped or input_ends.poll(pause_s * 1000):
                return INTERRUPTED
            self._start(waiting)
            for exited in self._children.wait(_WAIT_S):
                if not exited.status:
                    continue
                if why := self._why_over(exited):
                    print_error(why)
                    return FAILED
                waiting[exited.name] = int(exited.name.rpartition("-")[2])
            self._warm_start.reap(self._children.pids())
        return DONE

    def _stop(self) -> None:
        self._stopped = True

    def _start(self, waiting: dict[str, int]) -> None:
        """Starts the parts that need not wait for the fork server; takes them from ``waiting``."""
        for name, index in list(waiting.items()):
            command = self._command(index)
            if self._warm_start.waits(command, self._folder):
                return
            del waiting[name]
            self._starts[name] = self._starts.get(name, 0) + 1
            log = self._folder.parent / "logs" / f"{name}.log"
            self._children.start(name, command, log, self._environment, self._launch)

    def _command(self, index: int) -> Sequence[str]:
        request = self._request
        return module_command(self._module, request.folder, str(index), str(request.count))

    def _launch(
        self, command: Sequence[str], environment: Mapping[str, str], output: int
    ) -> ChildProcess:
        note = sys.stdout.write
        return self._warm_start.start_process(command, environment, output, self._folder, note)

    def _why_over(self, exited: Exited) -> str:
        """Returns why a part that has failed is not started again; empty if it is."""
        words = [line for line in exited.words() if line.strip()]
        if exited.status > 0:
            said = [line for line in words if line.startswith("error ")]
            if said:
                return said[-1]
            last = f": {words[-1].strip()}" if words else ""
            ended = f"{exited.name} ended with {exited.how()}{last}; see {exited.log}"
            return error_line(JobFailed(ended))
        if self._starts[exited.name] <= RESTARTS:
            sys.stdout.write(f"{exited.name} ended with {exited.how()} and is started again\n")
            return ""
        times = counted(self._starts[exited.name], "time")
        killed = f"{exited.name} was killed {times}, {exited.how()}; see {exited.log}"
        return error_line(JobFailed(killed))
