"""Waits on a word of shared memory, by the futex calls of Linux."""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Word = npt.NDArray[np.uint32]
"""Shape ``[1]``, in shared memory."""

_NUMBERS = {"x86_64": 202}
"""Number of the futex system call, only for processors that keep the order of writes: this module
has no memory barriers."""

_WAIT, _WAKE = 0, 1

_NUMBER = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


def available() -> bool:
    """Whether this system supports mailboxes."""
    return _SYSCALL is not None


def wait(word: Word, expected: int, timeout_s: float) -> None:
    """Sleeps while ``word`` is ``expected``, until woken or timed out; spurious wake-ups are
    possible. Releases the interpreter lock meanwhile."""
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _futex(word, _WAIT, expected, ctypes.byref(timeout))


def wake(word: Word) -> None:
    """Wakes all waiters for ``word``, in any process."""
    _futex(word, _WAKE, _ALL_WAITERS, None)


_ALL_WAITERS = 2**31 - 1

_SYSCALL: Any = None if _NUMBER is None else ctypes.CDLL(None).syscall


def _futex(word: Word, operation: int, value: int, timeout: Any) -> None:
    assert _NUMBER is not None
    _SYSCALL(
        ctypes.c_long(_NUMBER),
        ctypes.c_void_p(word.ctypes.data),
        ctypes.c_int(operation),
        ctypes.c_uint32(value),
        timeout,
        None,
        0,
    )
