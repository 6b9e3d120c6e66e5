"""What every process of a cluster does to itself when it starts."""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import select
import signal
import site
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""Keeps large buffers in the heap. Without it each is made of fresh pages, and the page faults
cost as much as the copy (64 MB over gRPC: 30 ms instead of up to 57)."""

PARENT_PID = "PSRPC_PARENT_PID"
"""In the environment of a child with --die-with-parent: the process id of its parent."""

_PR_SET_PDEATHSIG = 1
_PACKAGES = Path(__file__).resolve().parents[2]


def incarnation() -> int:
    """A random positive 63-bit number: which start of a process this is."""
    return secrets.randbits(62) + 1


def module_command(name: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules in a child with :func:`child_environment`.

    A ``worker.py`` in the working directory does not stand in for our package of that name.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` for a child: finds our packages where this process found them, and has the
    allocator settings that it does not set itself."""
    found = {**MALLOC_SETTINGS, **environment}
    if str(_PACKAGES) not in site.getsitepackages():
        paths = [str(_PACKAGES), environment.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return found


def apply_malloc_settings() -> None:
    """Starts this program again with :data:`MALLOC_SETTINGS`, unless they are set already.

    glibc reads them only when a process starts. The process id stays the same. Call it first
    thing in a command, before threads and files.
    """
    if sys.platform != "linux" or all(key in os.environ for key in MALLOC_SETTINGS):
        return
    os.environ.update({**MALLOC_SETTINGS, **os.environ})
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def quiet_grpc() -> None:
    """Without gRPC's own lines on ports and handshakes, which would come between ours. Call it
    before grpc is imported, which reads this; an environment that says otherwise is left alone."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def resident_nbytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_nbytes() -> int:
    """Memory of this machine that can be taken without swapping, as the kernel estimates it; more
    than any has where it does not."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return sys.maxsize


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, however that happens.

    A parent may end before the kernel has the request, while this process is still starting. One
    that says who it is in :data:`PARENT_PID` is missed even then.
    """
    if sys.platform != "linux":
        return
    # Not for the children of this process.
    parent = int(os.environ.pop(PARENT_PID, os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


READER_LEFT = 141
"""Exit status of a command whose output nobody reads any more: what a shell gives for SIGPIPE."""


def while_read(run: Callable[[], int]) -> int:
    """``run()``; :data:`READER_LEFT` if whoever reads what it prints leaves, as ``| head`` does."""
    try:
        status = run()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():
            raise
        return READER_LEFT
    return status


def _reader_left() -> bool:
    """Whether standard output is what has broken; what is printed from now on goes nowhere."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True


def leave(status: int) -> NoReturn:
    """Ends this process at once, with what it has written flushed.

    Taking down an interpreter that has imported TensorFlow costs one to three CPU seconds, during
    which the process looks alive to everyone; whatever has to be closed was closed before.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class StopSignals:
    """The signals that stop a process, and which of them say something new. Not thread-safe.

    SIGHUP, of a terminal that is closed, is one unless the process was started to ignore it, as
    ``nohup`` does. It is never the second word, which means "at once": shell and kernel each send
    one, and who has pressed Ctrl-C may close the terminal before all is saved.
    """

    def __init__(self) -> None:
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self.numbers = (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,)))
        self._heard = False

    def says(self, number: int) -> bool:
        """Takes in a signal; whether it asks for something."""
        new = number in self.numbers and not (self._heard and number == signal.SIGHUP)
        self._heard = self._heard or new
        return new


def on_stop_signals(stop: Callable[[int], object]) -> None:
    """Calls ``stop`` with the number of each of :class:`StopSignals`, in a thread of its own. Only
    from the main thread.

    Not in a handler of Python's, for two reasons. It interrupts the main thread wherever it is,
    inside a lock too: one that sets an event which the main thread is just about to wait for would
    wait for that lock for ever. And it runs only when the main thread comes to it: if the signal
    arrives just before that thread blocks, or in another thread, it does not while the wait lasts.
    """
    heard, tell = socket.socketpair()
    tell.setblocking(False)
    signals = StopSignals()

    def listen() -> None:
        with heard:
            while told := heard.recv(1):
                if signals.says(told[0]):
                    threading.Thread(target=stop, args=(told[0],), name="stop", daemon=True).start()

    threading.Thread(target=listen, name="signals", daemon=True).start()
    # The descriptor is the interpreter's from now on, for as long as the process lives.
    signal.set_wakeup_fd(tell.detach(), warn_on_full_buffer=False)
    for number in signals.numbers:
        # Only a signal that has a handler is told of.
        signal.signal(number, lambda _number, _frame: None)
