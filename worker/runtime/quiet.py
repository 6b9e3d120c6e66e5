"""Silences TensorFlow."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

STDOUT, STDERR = 1, 2


def import_tensorflow() -> None:
    """Imports TensorFlow. Hides its output to stderr, which no TensorFlow setting turns off, unless
    the import fails."""
    if "tensorflow" in sys.modules:
        return
    # Level 2 still logs a missing GPU driver as an error. Python exceptions are not affected.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    collecting = gc.isenabled()
    with tempfile.TemporaryFile() as output:
        try:
            # The import makes no garbage, and collection takes a quarter of its time.
            gc.disable()
            with redirected(STDERR, output.fileno()):
                import tensorflow  # noqa: F401
        except BaseException:
            output.seek(0)
            os.write(STDERR, output.read())
            raise
        finally:
            # The imported objects never become garbage.
            gc.freeze()
            if collecting:
                gc.enable()


@contextmanager
def redirected(descriptor: int, target: int) -> Iterator[int]:
    """Sends all output of this process to ``descriptor``, also from C++, to ``target``.

    Yields a descriptor of the previous target.
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
