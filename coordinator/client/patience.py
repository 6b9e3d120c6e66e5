"""Limits how long a caller waits for a silent coordinator, and announces the wait."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import TypeVar

from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import (
    CoordinatorUnreachable,
    NotConnected,
    NotReady,
    OutcomeUnknown,
    Preparing,
    PsError,
)
from psrpc.ops.retry import Announcer, GaveUp, RetryPolicy, retry

RETRY_S = 1.0
"""Longest pause between two tries to reach the coordinator."""

FIRST_RETRY_S = 0.05
"""First pause between two tries."""

ANNOUNCE_S = 3.0
"""Pause between two announcements that the client waits."""

Result = TypeVar("Result")


class Patience:
    """One caller's patience while the coordinator is unreachable or reads its job. Not thread-safe;
    threads that share a client each have their own."""

    def __init__(
        self,
        client: CoordinatorClient,
        connect_timeout_s: float,
        announce: Callable[[str], object],
        stopped: Event | None = None,
    ) -> None:
        """
        Args:
            connect_timeout_s: how long to try while the coordinator is silent.
            announce: gets a line now and then, with the reason for the wait.
            stopped: set from elsewhere to give up at once.
        """
        self._client = client
        self._connect_timeout_s = connect_timeout_s
        self._announce = announce
        self._stopped = stopped or client.threads.event()
        self._silence = Announcer(self._say, ANNOUNCE_S)
        self._reading = Announcer(
            lambda reason, _waited_s: announce(f"waiting: {reason}"), ANNOUNCE_S
        )
        self._cause: PsError | None = None
        """The obstacle on the way, as seen last."""
        self._last: PsError | None = None
        """The error of the last try."""

    def persist(self, call: Callable[[], Result], effect: str = "") -> Result:
        """Repeats ``call`` while the coordinator is unreachable or reads its job.

        Args:
            call: one of the client's methods with its arguments bound.
            effect: the outcome that a missing answer leaves open, if that matters to the caller.

        Raises:
            OutcomeUnknown: no answer in time, and ``effect`` may have happened.
            CoordinatorUnreachable: no answer in time; names the address and the fix.
            AccessDenied, InvalidArgument: see :meth:`CoordinatorClient.raise_if_hopeless`.
            PsError: any other error of ``call``.
        """

        def once() -> Result:
            try:
                return call()
            except PsError as error:
                self._last = error
                raise

        self._cause = self._last = None
        self._silence.over()
        self._reading.over()
        if not self._client.reached:
            self._cause = self._client.raise_if_hopeless()
            # Announced first: a call to a host that does not answer at all takes its whole
            # deadline.
            if self._cause is not None and not isinstance(self._cause, NotConnected):
                self._say("", 0.0)
        threads = self._client.threads
        return retry(
            once,
            RetryPolicy(FIRST_RETRY_S, RETRY_S, self._connect_timeout_s),
            lambda tries: self._given_up(tries, effect),
            stop=self._stopped,
            announce=self._failed,
            # NotReady comes from a running coordinator; the caller handles it.
            again=lambda error: (
                error.retryable
                and (isinstance(error, Preparing) or not isinstance(error, NotReady))
            ),
            alive=lambda error: isinstance(error, Preparing),
            now=threads.now,
            chance=threads.chance,
        )

    def _say(self, _reason: str, waited_s: float) -> None:
        """Announces the silence, with the obstacle."""
        client = self._client
        self._cause = client.why_unreachable()
        why = client.refusal or (self._cause.coded if self._cause else "")
        self._announce(
            f"waiting for the coordinator at {client.address} "
            f"({waited_s:.0f} of {self._connect_timeout_s:.0f} s)" + (f": {why}" if why else "")
        )

    def _failed(self, reason: str) -> None:
        """Notes a failed try."""
        if isinstance(self._last, Preparing):
            self._silence.over()
            self._reading.waiting(reason, self._client.threads.now())
            return
        if not self._client.reached:
            self._client.raise_if_hopeless()
        self._reading.over()
        self._silence.waiting(reason, self._client.threads.now())

    def _given_up(self, tries: GaveUp, effect: str) -> PsError:
        """Returns the error once the time is over."""
        client = self._client
        if effect and tries.sent:
            return OutcomeUnknown(
                f"the coordinator at {client.address} has not answered {effect}, so whether that "
                f"counts is not known; doing it again is safe ({tries})"
            )
        tried = f"(tried for {tries.spent_s:.0f} s)"
        if client.refusal:
            return CoordinatorUnreachable(
                f"no coordinator serves this run at {client.address} {tried}: {client.refusal}"
            )
        why = self._cause or client.why_unreachable()
        if why is not None:
            return CoordinatorUnreachable(
                f"no coordinator answers {tried}: {why}, or say another --coordinator",
                code=why.code,
            )
        return CoordinatorUnreachable(
            f"no coordinator answers at {client.address} {tried}; start `coordinator serve` "
            "there, or say another --coordinator"
        )
