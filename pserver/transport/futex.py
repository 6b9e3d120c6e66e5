"""Waiting until a word of shared memory changes (futex(2)), between processes of one host."""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Word = npt.NDArray[np.uint32]
"""``[1]``, in shared memory."""

_NUMBERS = {"x86_64": 202}
"""Of the system call. Only where processors keep the order of writes: nothing here makes them."""

_NUMBER = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None

_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _System(NamedTuple):
    call: Any
    number: int


def _system() -> _System | None:
    if _NUMBER is None:
        return None
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return _System(call, _NUMBER)


_SYSTEM = _system()


def available() -> bool:
    """Whether this system has it."""
    return _SYSTEM is not None


def wait(word: Word, expected: int, timeout_s: float) -> None:
    """Sleeps while ``word`` is ``expected``, until it is woken; or for less, for no reason. Other
    threads of Python go on meanwhile."""
    assert _SYSTEM is not None
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _SYSTEM.call(
        ctypes.c_long(_SYSTEM.number),
        ctypes.c_void_p(word.ctypes.data),
        ctypes.c_int(_WAIT),
        ctypes.c_uint32(expected),
        ctypes.byref(timeout),
        None,
        0,
    )


def wake(word: Word) -> None:
    """Wakes whoever waits for ``word``, in any process."""
    assert _SYSTEM is not None
    _SYSTEM.call(
        ctypes.c_long(_SYSTEM.number),
        ctypes.c_void_p(word.ctypes.data),
        ctypes.c_int(_WAKE),
        ctypes.c_int(_EVERYBODY),
        None,
        None,
        0,
    )
