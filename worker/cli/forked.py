"""Turns a fork of the fork server into what a fresh process would be."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NoReturn

from setproctitle import setproctitle

from psrpc.ops.fork_server import ForkRequest
from psrpc.ops.process import mark_preloaded


@dataclass(frozen=True)
class Imported:
    """Traces of the imports, which a fresh process would have as well.

    Attributes:
        handles: the descriptors that they keep open, and those of the standard streams.
        environment: the variables that they have set.
    """

    handles: Set[int]
    environment: Mapping[str, str]


def become(request: ForkRequest, imported: Imported, stdout: int, stderr: int) -> NoReturn:
    """Turns this fork into the process of ``request``, and ends with it."""
    null = os.open(os.devnull, os.O_RDONLY)
    for handle, source in enumerate((null, stdout, stderr)):
        os.dup2(source, handle)
    for handle in open_handles() - imported.handles - {0, 1, 2}:
        with contextlib.suppress(OSError):
            os.close(handle)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    setproctitle(" ".join(request.command))
    os.environ.clear()
    os.environ.update({**imported.environment, **request.environment})
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # Python's own generator is seeded anew by itself.
        numpy.random.seed()
    mark_preloaded()
    sys.argv = ["", *request.arguments]
    _run(request)


def _run(request: ForkRequest) -> NoReturn:
    """Does what ``python -m`` does, and ends with the same exit status."""
    status: object = 0
    try:
        os.chdir(request.directory)
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = error.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        sys.stderr.write(status + "\n")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF if isinstance(status, int) else int(status is not None))


def open_handles() -> Set[int]:
    """Returns the open descriptors, without the one that lists them."""
    found = set(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    with contextlib.suppress(OSError):
        return {handle for handle in found if _is_open(handle)}
    return found


def _is_open(handle: int) -> bool:
    try:
        os.fstat(handle)
    except OSError:
        return False
    return True
