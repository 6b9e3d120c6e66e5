"""The fork server: imports TensorFlow once, and forks the processes that need it.

``coordinator up`` starts it as ``python -m worker.cli.fork_server REQUESTS STATUS``, two inherited
descriptors; see :mod:`psrpc.ops.fork_server` for the requests. To STATUS it writes :data:`READY`,
or the reason why it cannot fork. It has no threads of its own and serves one request at a time, and
it ends when no client is left. It never runs user code.

    server ── intermediate, ends at once ── the process, or its keeper ── the attended process

The intermediate makes the process a child of the server's parent, a child subreaper. An attended
process is the child of a keeper instead, which reports its exit status.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import select
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from setproctitle import setproctitle

from psrpc.core.text import sanitize
from psrpc.ops.fork_server import GO, MESSAGE_BYTES, ForkRequest
from psrpc.ops.process import die_with_parent, quiet_grpc, tensorflow_has_begun
from worker.cli.forked import Imported, become, open_handles

READY = "ready"

DESCRIBING = ("worker.describe.describe", "worker.describe.tables", "worker.describe.model")
"""Modules that ``worker describe`` imports. They come first, because a cluster describes its job
before it starts the other processes."""

PRELOADED = (
    "pserver.process.shard",
    "pserver.updates.keras_engine",
    "worker.loop.performer",
    "worker.process.run",
    "worker.runtime.devices",
    "worker.step.keras_source",
)
"""Modules that the other commands import. They are given as names, because code of the worker must
not import that of a shard's process."""

_AT_IMPORT = re.compile(
    r"(ABSL|BLIS|CUDA|GLIBC|GOTO|GRPC|HDF5|JAX|KERAS|KMP|LC|LD|MALLOC|MKL|NPY|NUMPY|NVIDIA|OMP"
    r"|OPENBLAS|PROTOCOL_BUFFERS|TF|TF2|TPU|XLA)_.*|PYTHON.*|HOME|LANG|TZ"
)
"""Variables that libraries read when they are imported, and that the interpreter and the C library
read when the process starts."""

_LATER = {"CUDA_VISIBLE_DEVICES", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"}
"""Variables of :data:`_AT_IMPORT` that TensorFlow reads only when its runtime begins, in the
fork."""

_SHOWN_CHARS = 60
"""Most characters of a variable's value that a message shows."""

_ERROR_CHARS = 500

_GPU = re.compile(r"/dev/(nvidia(\d+|ctl|-uvm)|kfd|dri/\w+)")


def main() -> NoReturn:
    """Serves the descriptors of the command line."""
    requests, status = map(int, sys.argv[1:])
    die_with_parent()
    run_server(requests, status, load, PRELOADED)


def run_server(
    requests: int, status: int, imports: Callable[[], None], more: Sequence[str] = ()
) -> NoReturn:
    """Serves ``requests`` until no client is left, after ``imports`` has succeeded; imports the
    modules ``more`` while there is no request, and is ready after that."""
    own = dict(os.environ)
    # Set the title before the environment changes: the title takes its memory.
    setproctitle(" ".join(sys.orig_argv))
    server = ForkServer(socket.socket(fileno=requests), status, own)
    with open(status, "w", encoding="utf-8") as words:
        try:
            imports()
            why = why_unsafe()
            for name in more if not why else ():
                server.serve(wait=False)
                importlib.import_module(name)
                why = why or why_unsafe()
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
        words.write(why or READY)
    if not why:
        # A collection in a fork would write to the pages that it shares with the others.
        gc.freeze()
        server.serve()
    os._exit(1 if why else 0)


def load() -> None:
    """Imports TensorFlow, Keras and what describes a job; starts nothing."""
    from worker.runtime.quiet import import_tensorflow

    quiet_grpc()
    import_tensorflow()
    import keras

    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ImportError(f"Keras is set up for {backend}")
    for name in DESCRIBING:
        importlib.import_module(name)


def why_unsafe() -> str:
    """Returns the reason why this process must not be forked; empty if it may be. Threads and GPU
    contexts do not survive a fork."""
    if tensorflow_has_begun():
        return "the import has begun TensorFlow's runtime"
    for handle in open_handles():
        with contextlib.suppress(OSError):
            device = str(Path(f"/proc/self/fd/{handle}").readlink())
            if _GPU.fullmatch(device):
                return f"the import has opened {device}"
    return ""


def import_difference(own: Mapping[str, str], asked: Mapping[str, str]) -> str:
    """Describes the first variable that would make an import differ; empty if none does."""
    for name in sorted(own.keys() | asked.keys()):
        if own.get(name) != asked.get(name) and name not in _LATER and _AT_IMPORT.fullmatch(name):
            was, now = _shown(own.get(name)), _shown(asked.get(name))
            return f"{name} was {was} at the import and is {now}"
    return ""


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(sanitize(value, _SHOWN_CHARS))


class ForkServer:
    """Forks processes on request. Only for the main thread of a process without other threads."""

    def __init__(self, requests: socket.socket, status: int, own: Mapping[str, str]) -> None:
        """``own`` is the environment before the imports."""
        self._requests = requests
        self._status = status
        self._own = own

    def serve(self, *, wait: bool = True) -> None:
        """Serves until no client is left or, without ``wait``, as long as there are requests."""
        # The imports of a fresh process would open the same descriptors and set the same variables.
        inherited = open_handles() - {self._requests.fileno(), self._status}
        added = {name: value for name, value in os.environ.items() if self._own.get(name) != value}
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        while wait or poll.poll(0):
            said, handles, _, _ = socket.recv_fds(self._requests, 1, 4)
            if not said:
                os._exit(0)
            try:
                if len(handles) == 4:
                    self._serve_one(Imported(inherited, added), *handles)
            finally:
                for handle in handles:
                    os.close(handle)

    def _serve_one(
        self, imported: Imported, payload: int, control: int, stdout: int, stderr: int
    ) -> None:
        with socket.socket(fileno=os.dup(control)) as answers:
            # A client that does not read its answers must not hold up the others.
            answers.setblocking(False)
            try:
                size = os.fstat(payload).st_size
                request = ForkRequest.decode(os.pread(payload, size, 0))
                differs = import_difference(self._own, request.environment)
                if differs:
                    _answer(answers, error=differs)
                    return
                adopted, adopt = os.pipe()
                try:
                    self._fork(request, imported, answers, (stdout, stderr), (adopted, adopt))
                finally:
                    os.close(adopted)
                    os.close(adopt)
            except (OSError, ValueError, TypeError) as error:
                _refuse(answers, error)

    def _fork(
        self,
        request: ForkRequest,
        imported: Imported,
        answers: socket.socket,
        output: tuple[int, int],
        adoption: tuple[int, int],
    ) -> None:
        adopted, adopt = adoption
        intermediate = os.fork()
        if intermediate:
            _, status = os.waitpid(intermediate, 0)
            # From now on the process is a child of this one's parent.
            if not status:
                os.write(adopt, GO)
            return
        with _ending_process(answers):
            # If this fork kept the socket, requests would not fail after the server's end.
            self._requests.close()
            if os.fork():
                os._exit(0)
            os.setpgid(0, request.group)
            os.close(adopt)
            # The pipe is empty if the server was killed in between.
            if os.read(adopted, len(GO)) != GO:
                os._exit(1)
            if request.attended:
                _attend(answers)
            _wait_for_go(answers)
            # become() closes all descriptors. If this object closed its number later, that could be
            # another file.
            answers.detach()
            become(request, imported, *output)


def _attend(answers: socket.socket) -> None:
    """Forks the attended process and returns in it; this one stays behind as its keeper."""
    attended = os.fork()
    if attended:
        _, status = os.waitpid(attended, 0)
        _answer(answers, status=os.waitstatus_to_exitcode(status))
        os._exit(0)


def _wait_for_go(answers: socket.socket) -> None:
    """Introduces this process to the client; ends it if the client has given up."""
    _answer(answers, pid=os.getpid())
    answers.setblocking(True)
    try:
        said = answers.recv(MESSAGE_BYTES)
    except ConnectionError:
        said = b""
    if said != GO:
        os._exit(1)


def _answer(answers: socket.socket, **words: Any) -> None:
    # A client that gave up has closed its end.
    with contextlib.suppress(OSError):
        answers.send(json.dumps(words).encode())


def _refuse(answers: socket.socket, error: BaseException) -> None:
    _answer(answers, error=sanitize(f"the fork server cannot fork: {error}", _ERROR_CHARS))


@contextlib.contextmanager
def _ending_process(answers: socket.socket) -> Iterator[None]:
    """Ends this fork after the block or its error: it must not continue as a second server."""
    try:
        yield
    except BaseException as error:
        _refuse(answers, error)
    os._exit(1)


if __name__ == "__main__":
    main()
