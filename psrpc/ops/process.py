"""Start and end of a process: environment, allocator, signals, parent, standard output."""

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
"""Environment variables that make glibc keep large buffers in the heap. Otherwise each buffer takes
fresh pages, and their page faults take as long as the copy (64 MB over gRPC: up to 57 ms instead of
30)."""

PARENT_PID = "PSRPC_PARENT_PID"
"""Environment variable with the parent's process id, for a child with --die-with-parent."""

_PR_SET_PDEATHSIG = 1
_PACKAGES = Path(__file__).resolve().parents[2]


def incarnation() -> int:
    """Returns a random positive 63-bit number that identifies one start of a process."""
    return secrets.randbits(62) + 1


def module_command(name: str, *arguments: str) -> list[str]:
    """Returns the command line of one of our modules, for a child with :func:`child_environment`.

    ``-P`` keeps a ``worker.py`` in the working directory from shadowing our package.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environment`` plus our packages and missing allocator settings, for a child."""
    found = {**MALLOC_SETTINGS, **environment}
    if str(_PACKAGES) not in site.getsitepackages():
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        if paths[0] != str(_PACKAGES):
            # Inserts the path only once, so that a child of a child has the same environment.
            paths.insert(0, str(_PACKAGES))
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return found


def apply_malloc_settings() -> None:
    """Re-executes this program with :data:`MALLOC_SETTINGS` unless they are set; keeps the pid.

    glibc reads them only at process start. Commands call this before they use threads or files.
    """
    if sys.platform != "linux" or all(key in os.environ for key in MALLOC_SETTINGS):
        return
    os.environ.update({**MALLOC_SETTINGS, **os.environ})
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def quiet_grpc() -> None:
    """Silences gRPC's own lines on ports and handshakes, unless the environment sets its verbosity.
    Must precede the import of grpc, which reads the variable."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def tensorflow_has_begun() -> bool:
    """Whether TensorFlow's runtime has started in this process, which the first operation or the
    first query of devices does. Until then devices and threads can be chosen, and the process may
    be forked."""
    context = sys.modules.get("tensorflow.python.eager.context")
    return getattr(context, "_context", None) is not None


_preloaded = {"here": False}


def mark_preloaded() -> None:
    """Records that this process is a fork in which TensorFlow is imported but has not started."""
    _preloaded["here"] = True


def may_choose_devices() -> bool:
    """Whether this process may hide devices from TensorFlow. It may if TensorFlow is not imported
    yet, or if this is a fork in which it was imported but has not started. Otherwise the user's
    code has imported it for its own use."""
    if "tensorflow" not in sys.modules:
        return True
    return _preloaded["here"] and not tensorflow_has_begun()


def resident_nbytes() -> int:
    """Returns the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_nbytes() -> int:
    """Returns the kernel's estimate of the memory available without swapping, in bytes;
    ``sys.maxsize`` if there is no estimate."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return sys.maxsize


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, however that happens.

    A parent that sets :data:`PARENT_PID` may even end before this request, while the child starts.
    """
    if sys.platform != "linux":
        return
    # Removes the variable, so that children of this process do not inherit it.
    parent = int(os.environ.pop(PARENT_PID, os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


READER_LEFT = 141
"""Exit status of a command whose output pipe is closed, as shells report SIGPIPE."""


def while_read(run: Callable[[], int]) -> int:
    """Returns ``run()``, or :data:`READER_LEFT` if the reader of its output closes the pipe."""
    try:
        status = run()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():
            raise
        return READER_LEFT
    return status


def _reader_left() -> bool:
    """Whether standard output is the broken pipe; if so, discards all further output."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True


def leave(status: int) -> NoReturn:
    """Flushes the output and ends this process at once; the caller has closed its resources.

    Tearing down an interpreter with TensorFlow costs one to three CPU seconds, during which the
    process still looks alive.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


EARLY_SIGNAL = signal.SIGUSR1
"""Tells a coordinator to end a job that trains as done, with what it has trained."""


class StopSignals:
    """Knows which signals stop the process, and ignores SIGHUP after any of them. Not thread-safe.

    SIGHUP, which a closed terminal sends, is a stop signal unless the process started with it
    ignored, as under ``nohup``. A second signal means "stop at once", and a SIGHUP never counts as
    the second: shell and kernel each send one, and a user may press Ctrl-C and close the terminal.
    """

    def __init__(self) -> None:
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self.numbers = (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,)))
        self._heard = False

    def says(self, number: int) -> bool:
        """Records a signal; returns whether the process must act on it."""
        new = number in self.numbers and not (self._heard and number == signal.SIGHUP)
        self._heard = self._heard or new
        return new


def on_stop_signals(stop: Callable[[int], object]) -> None:
    """Calls ``stop`` with each of :class:`StopSignals` in a new thread; for the main thread only.

    A Python signal handler cannot do this, for two reasons. It interrupts the main thread anywhere,
    even while that holds a lock: setting an event that the main thread is about to wait for would
    deadlock on the event's lock. And it runs only when the main thread executes bytecode: if the
    signal arrives just before a wait, or in another thread, the handler does not run during the
    wait.
    """
    heard, tell = socket.socketpair()
    tell.setblocking(False)
    signals = StopSignals()

    def listen() -> None:
        with heard:
            while data := heard.recv(1):
                if signals.says(data[0]):
                    threading.Thread(target=stop, args=(data[0],), name="stop", daemon=True).start()

    threading.Thread(target=listen, name="signals", daemon=True).start()
    # The interpreter owns the descriptor from now on, until the process ends.
    signal.set_wakeup_fd(tell.detach(), warn_on_full_buffer=False)
    for number in signals.numbers:
        # Python writes to the wakeup descriptor only for signals with a handler.
        signal.signal(number, lambda _number, _frame: None)
