"""Messages between a worker and a shard in the memory that they share; the call they belong to goes
on beside. docs/design/0012-mailbox.md."""

from __future__ import annotations

import ctypes
import platform
import secrets
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pserver.transport import mailbox as futex
from psrpc.core.errors import InvalidArgument

Word = npt.NDArray[np.uint32]
"""``[1]``, in shared memory."""

_NUMBERS = {"x86_64": 202}
"""Of the system call. Only where processors keep the order of writes: nothing here makes them."""

_WAIT, _WAKE = 0, 1

_EVERYBODY = 2**31 - 1


NDArray = npt.NDArray[Any]

HEAD_BYTES = 192
"""Before the message. Load-bearing, as is all that follows here."""

_REQUESTS = 0
"""Index of the 32-bit word that counts requests. The worker writes it."""

_ANSWERS = 16
"""The same for answers, in a cache line of its own. The shard writes it."""

_LENGTH = 32
"""Bytes of the message that lies there; 0 if it comes by gRPC."""

_SESSION = 33
"""Whose request it is: a shard may still hold an earlier call of the same worker's."""

LOOK_S = 1.0
"""How long at most one sleeps without a look at whether the call has ended. Its end wakes whoever
sleeps; not if it comes in the moment before."""


class _Box:
    def __init__(self, memory: NDArray) -> None:
        """``memory``: uint8, aligned to 64 bytes, of more than :data:`HEAD_BYTES`."""
        self._words = memory[:HEAD_BYTES].view(np.uint32)
        self._room = memoryview(memory[HEAD_BYTES:])  # type: ignore[arg-type]

    def _put(self, message: bytes) -> None:
        # Not by NumPy: that lets other threads run, which then have the interpreter for longer than
        # the copy takes.
        self._room[: len(message)] = message
        self._words[_LENGTH] = len(message)

    def _take(self) -> bytes:
        """A copy, as the other process can write there at any time."""
        nbytes = int(self._words[_LENGTH])
        if nbytes > self._room.nbytes:
            raise InvalidArgument(
                f"a message of {nbytes} bytes in a mailbox; expected at most {self._room.nbytes}"
            )
        return self._room[:nbytes].tobytes()

    def _ring(self, word: int) -> None:
        self._words[word] = (int(self._words[word]) + 1) & 0xFFFFFFFF
        self._wake(word)

    def _wake(self, word: int) -> None:
        futex.wake(self._words[word : word + 1])

    def _await(self, word: int, seen: int, over: Callable[[], bool]) -> int | None:
        """What the word counts now, if that is not ``seen``; None if it is, and all is over."""
        place = self._words[word : word + 1]
        while (found := int(place[0])) == seen:
            if over():
                return None
            futex.wait(place, seen, LOOK_S)
        return found


class WorkerBox(_Box):
    """The worker's side. One thread uses it, but for :meth:`wake`.

    Attributes:
        session: names the call that it is used for, 32 random bits.
    """

    def __init__(self, memory: NDArray) -> None:
        super().__init__(memory)
        self.session = secrets.randbits(32)

    def fits(self, message: bytes) -> bool:
        return 0 < len(message) <= self._room.nbytes

    def exchange(
        self, message: bytes, over: Callable[[], bool], sent: Callable[[], object] = lambda: None
    ) -> bytes | None:
        """The answer to a message that fits; None if there was none and all is over. ``sent`` is
        called when it is the shard's turn.

        Raises:
            InvalidArgument: what is there cannot be an answer.
        """
        seen = int(self._words[_ANSWERS])
        self._put(message)
        self._send()
        sent()
        return None if self._await(_ANSWERS, seen, over) is None else self._take()

    def call_to_stream(self) -> None:
        """Has the shard read a request that comes by gRPC; it is answered there."""
        self._words[_LENGTH] = 0
        self._send()

    def wake(self) -> None:
        """Has whoever waits look whether all is over. Any thread."""
        self._wake(_ANSWERS)

    def _send(self) -> None:
        self._words[_SESSION] = self.session
        self._ring(_REQUESTS)


class ShardBox(_Box):
    """The shard's side. One thread uses it, but for :meth:`wake`."""

    def __init__(self, memory: NDArray, session: int) -> None:
        super().__init__(memory)
        self._session = session
        self._seen = int(self._words[_REQUESTS])

    def receive(self, over: Callable[[], bool]) -> bytes | None:
        """The next request, empty if it comes by gRPC; None if all is over.

        Raises:
            InvalidArgument: what is there cannot be a request.
        """
        while (found := self._await(_REQUESTS, self._seen, over)) is not None:
            self._seen = found
            if int(self._words[_SESSION]) == self._session:
                return self._take()
        return None

    def answer(self, message: bytes) -> None:
        """
        Raises:
            InvalidArgument: it is too long.
        """
        if len(message) > self._room.nbytes:
            raise InvalidArgument(
                f"the answer has {len(message)} bytes, the mailbox room for {self._room.nbytes}"
            )
        self._put(message)
        self._ring(_ANSWERS)

    def wake(self) -> None:
        """Has whoever waits look whether all is over. Any thread."""
        self._wake(_REQUESTS)

    def close(self) -> None:
        """Lets go of the memory; nobody may wait any more."""
        self._words = np.zeros(HEAD_BYTES // 4, np.uint32)
        self._room = memoryview(b"")


_NUMBER = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None


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
