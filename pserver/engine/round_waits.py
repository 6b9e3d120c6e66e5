"""Pulls that wait for a round."""

from __future__ import annotations

import threading

from pserver.core.requests import PullRequest
from pserver.engine.gate import Gate
from pserver.engine.parameters import Parameters
from psrpc.core.errors import InvalidArgument, RoundPassed


class RoundWaits:
    """``changed`` is notified of every round, and its lock, the shard's, is held by who calls."""

    def __init__(self, changed: threading.Condition, gate: Gate, held: Parameters) -> None:
        self._changed = changed
        self._gate = gate
        self._held = held
        self._closed = False

    def decided(self, request: PullRequest, decided: int, timeout_s: float) -> None:
        """Waits for the decisions before that of round ``decided``, which come by themselves.

        With backup workers several rounds may be decided by what is staged here already; otherwise
        a worker that brings a decision has brought the one before.
        """
        if self._gate.identity.settings.backups:
            self._await(request, decided, timeout_s)

    def reached(self, request: PullRequest, wanted: int, timeout_s: float) -> None:
        """Waits for round ``wanted``.

        Raises:
            InvalidArgument: there are no rounds.
            RoundPassed: the shard is at a later one.
            NotReady: the time is over.
        """
        gate = self._gate
        if not gate.identity.settings.rounds:
            raise InvalidArgument(
                f"round {wanted} was asked for and this job is async; ask for the newest values"
            )
        self._await(request, wanted, timeout_s)
        if self._held.version > wanted:
            raise RoundPassed(
                f"round {wanted} was asked for; shard {gate.identity.shard} is at round"
                f" {self._held.version}"
            )
        if self._held.version < wanted:
            raise gate.not_ready()

    def close(self) -> None:
        """Lets go of everybody who waits, and of who comes later."""
        self._closed = True
        self._changed.notify_all()

    def _await(self, request: PullRequest, wanted: int, timeout_s: float) -> None:
        def over() -> bool:
            self._gate.admit_worker(request)
            return self._held.version >= wanted or self._closed

        self._changed.wait_for(over, timeout_s)
