"""Calls under way, ended when the caller's certificate counts no more: revoked, or expired.

A call is judged when it begins, and a conversation may stand for minutes. Ending the call ends what
depends on it, too: a data connection, a mailbox, a command stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from psrpc.core.errors import AccessDenied
from psrpc.ops.logs import get_logger
from psrpc.security.peer_certificate import Peer

log = get_logger()

LOOK_S = 1.0
"""Seconds between two checks of the callers of open calls."""


@dataclass(eq=False, slots=True)
class _Call:
    peer: Peer
    method: str
    end: Callable[[], object]
    ended: bool = False


class LiveCalls:
    """The calls of one server whose callers have shown certificates. Thread-safe.

    One timer looks, and only while there are calls.
    """

    def __init__(
        self, objection: Callable[[Peer], AccessDenied | None], look_s: float = LOOK_S
    ) -> None:
        """Args:
        objection: why a caller is not accepted now; None if it is.
        look_s: time between two looks.
        """
        self._objection = objection
        self._look_s = look_s
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._timer: threading.Timer | None = None

    @contextmanager
    def present(self, peer: Peer, method: str, end: Callable[[], object]) -> Iterator[None]:
        """A call of ``peer`` for the length of a block; ``end``, called once from any thread, ends
        it early."""
        if not peer.shown:
            yield
            return
        call = _Call(peer, method, end)
        with self._lock:
            self._calls.add(call)
            if self._timer is None:
                self._look_later()
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)

    def look(self) -> None:
        """Ends the calls of callers that are not accepted any more."""
        with self._lock:
            calls = [call for call in self._calls if not call.ended]
        refused = {peer: self._objection(peer) for peer in {call.peer for call in calls}}
        for call in calls:
            why = refused[call.peer]
            if why is not None:
                call.ended = True
                log.warning("call ended", method=call.method, peer=str(call.peer), why=why.coded)
                call.end()

    def _looked(self) -> None:
        try:
            self.look()
        finally:
            with self._lock:
                self._timer = None
                if self._calls:
                    self._look_later()

    def _look_later(self) -> None:
        self._timer = threading.Timer(self._look_s, self._looked)
        self._timer.daemon = True
        self._timer.start()
