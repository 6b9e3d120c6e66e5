"""Exchanges messages between worker and shard in shared memory instead of the standing call; see
docs/design/0012-mailbox.md."""

from __future__ import annotations

import ctypes
import platform
import secrets
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidArgument

NDArray = npt.NDArray[Any]

HEAD_BYTES = 192
"""Size of the head before the message. Load-bearing, as are the indices below."""

_REQUESTS = 0
"""Index of the 32-bit request counter. Only the worker writes it."""

_ANSWERS = 16
"""Index of the answer counter, in a cache line of its own. Only the shard writes it."""

_LENGTH = 32
"""Index of the message's length in bytes; 0 if the message is sent by gRPC."""

_SESSION = 33
"""Index of the random number of a call. It tells calls apart, because a shard may still serve an
earlier call of the same worker."""

LOOK_S = 1.0
"""Longest sleep without checking whether the call has ended. The end of the call wakes sleeping
threads, but a thread may miss that if it is just about to sleep."""


class _Box:
    def __init__(self, memory: NDArray) -> None:
        """``memory``: uint8, aligned to 64 bytes, of more than :data:`HEAD_BYTES`."""
        self._words = memory[:HEAD_BYTES].view(np.uint32)
        self._room = memoryview(memory[HEAD_BYTES:])  # type: ignore[arg-type]

    def _put(self, message: bytes) -> None:
        # Does not copy with NumPy, which releases the interpreter lock: another thread would then
        # keep the lock for longer than the copy takes.
        self._room[: len(message)] = message
        self._words[_LENGTH] = len(message)

    def _take(self) -> bytes:
        """Returns a copy, since the other process can write there at any time."""
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
        wake_waiters(self._words[word : word + 1])

    def _await(self, word: int, seen: int, over: Callable[[], bool]) -> int | None:
        """Waits until the counter at ``word`` differs from ``seen`` and returns it; returns None
        when ``over`` returns True."""
        place = self._words[word : word + 1]
        while (count := int(place[0])) == seen:
            if over():
                return None
            wait_for_change(place, seen, LOOK_S)
        return count


class WorkerBox(_Box):
    """The worker's side. One thread uses it; any thread may call :meth:`wake`.

    Attributes:
        session: 32 random bits that identify the call.
    """

    def __init__(self, memory: NDArray) -> None:
        super().__init__(memory)
        self.session = secrets.randbits(32)

    def fits(self, message: bytes) -> bool:
        return 0 < len(message) <= self._room.nbytes

    def exchange(
        self, message: bytes, over: Callable[[], bool], sent: Callable[[], object] = lambda: None
    ) -> bytes | None:
        """Sends a message that fits and returns the answer; None if the call ends first. Calls
        ``sent`` when the message is sent.

        Raises:
            InvalidArgument: the length of the answer is impossible.
        """
        seen = int(self._words[_ANSWERS])
        self._put(message)
        self._send()
        sent()
        return None if self._await(_ANSWERS, seen, over) is None else self._take()

    def call_to_stream(self) -> None:
        """Tells the shard to read the next request from gRPC; the shard sends its answer there,
        too."""
        self._words[_LENGTH] = 0
        self._send()

    def wake(self) -> None:
        """Makes the waiting thread check whether the call is over. Any thread may call it."""
        self._wake(_ANSWERS)

    def _send(self) -> None:
        self._words[_SESSION] = self.session
        self._ring(_REQUESTS)


class ShardBox(_Box):
    """The shard's side. One thread uses it; any thread may call :meth:`wake`."""

    def __init__(self, memory: NDArray, session: int) -> None:
        super().__init__(memory)
        self._session = session
        self._seen = int(self._words[_REQUESTS])

    def receive(self, over: Callable[[], bool]) -> bytes | None:
        """Returns the next request; empty if the worker sends it by gRPC, None if the call is over.

        Raises:
            InvalidArgument: the length of the request is impossible.
        """
        while (count := self._await(_REQUESTS, self._seen, over)) is not None:
            self._seen = count
            if int(self._words[_SESSION]) == self._session:
                return self._take()
        return None

    def answer(self, message: bytes) -> None:
        """Sends an answer; raises InvalidArgument if it is too long."""
        if len(message) > self._room.nbytes:
            raise InvalidArgument(
                f"the answer has {len(message)} bytes, the mailbox room for {self._room.nbytes}"
            )
        self._put(message)
        self._ring(_ANSWERS)

    def wake(self) -> None:
        """Makes the waiting thread check whether the call is over. Any thread may call it."""
        self._wake(_REQUESTS)

    def close(self) -> None:
        """Releases the memory; no thread may wait any more."""
        self._words = np.zeros(HEAD_BYTES // 4, np.uint32)
        self._room = memoryview(b"")


Word = npt.NDArray[np.uint32]
"""``[1]``, in shared memory."""

_NUMBERS = {"x86_64": 202}
"""Processor -> number of the futex system call. Lists only processors that keep the order of
writes, since this module uses no memory barriers."""

_NUMBER = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
_SYSCALL: Any = None if _NUMBER is None else ctypes.CDLL(None).syscall
if _SYSCALL is not None:
    _SYSCALL.restype = ctypes.c_long

_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


def has_futex() -> bool:
    """Whether this system supports mailboxes."""
    return _SYSCALL is not None


def wait_for_change(word: Word, expected: int, timeout_s: float) -> None:
    """Sleeps until a wake-up or for ``timeout_s``; does not sleep if ``word`` is not ``expected``.
    May return early without a reason. Other Python threads run meanwhile."""
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _futex(word, _WAIT, expected, ctypes.byref(timeout))


def wake_waiters(word: Word) -> None:
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
