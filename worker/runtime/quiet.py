"""TensorFlow without its chatter."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

STDOUT, STDERR = 1, 2


def import_tensorflow() -> None:
    """Imports TensorFlow. What it writes to stderr meanwhile, which no setting of its own turns
    off, is shown only if the import fails."""
    if "tensorflow" in sys.modules:
        return
    # Level 2 still complains of a missing GPU driver as an error. Python exceptions are not logs.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    collecting = gc.isenabled()
    with tempfile.TemporaryFile() as said:
        try:
            # Modules make many objects and no garbage; looking for it takes a quarter of the time.
            gc.disable()
            with redirected(STDERR, said.fileno()):
                import tensorflow  # noqa: F401
        except BaseException:
            said.seek(0)
            os.write(STDERR, said.read())
            raise
        finally:
            # What is there now will not be garbage later either.
            gc.freeze()
            if collecting:
                gc.enable()


@contextmanager
def redirected(descriptor: int, target: int) -> Iterator[int]:
    """What anybody in this process writes to ``descriptor``, C++ code too, goes to ``target``.

    Gives a descriptor of where it went before.
    """
    stream = {STDOUT: sys.stdout, STDERR: sys.stderr}[descriptor]
    stream.flush()
    kept = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield kept
    finally:
        stream.flush()
        os.dup2(kept, descriptor)
        os.close(kept)
