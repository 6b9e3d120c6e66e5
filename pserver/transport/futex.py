"""Waits on a word of memory that processes of one host share: futex(2)."""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Word = npt.NDArray[np.uint32]
"""``[1]``, in shared memory."""

_NUMBERS = {"x86_64": 202}
"""Numbers of the system call, of processors that keep the order of writes: this module does not
enforce it."""

_NUMBER = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
_SYSCALL: Any = None if _NUMBER is None else ctypes.CDLL(None).syscall
if _SYSCALL is not None:
    _SYSCALL.restype = ctypes.c_long

_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


def available() -> bool:
    """Whether this system supports mailboxes."""
    return _SYSCALL is not None


def wait(word: Word, expected: int, timeout_s: float) -> None:
    """Sleeps while ``word`` is ``expected``, until a wake-up or ``timeout_s``; may return earlier.
    Other threads of Python run meanwhile."""
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _futex(word, _WAIT, expected, ctypes.byref(timeout))


def wake(word: Word) -> None:
    """Wakes all threads of all processes that wait on ``word``."""
    _futex(word, _WAKE, _ALL_WAITERS, None)


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
