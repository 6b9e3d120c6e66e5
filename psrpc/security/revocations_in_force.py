"""The revocations that a process applies: the later one of the list beside its certificates and
the list of its run, or the last usable list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from psrpc.core.errors import InvalidArgument
from psrpc.ops.logs import get_logger
from psrpc.security.certificates import CA_CERTIFICATE, Stamp, authorities_of, stamp_of_file
from psrpc.security.revocation import (
    CRL,
    NONE_REVOKED,
    RevocationList,
    RunList,
    Start,
    read_revocations,
)

log = get_logger()


class RevocationsInForce:
    """Reads lists when they are needed, and again when they have changed. Thread-safe.

    Attributes:
        last: the list that was in force when it was asked for last; None before that.
        on_revoked: called with the serial numbers of certificates that a list names which was read
            while this process ran; on any thread, and it must not block.
    """

    def __init__(self, directory: Path | None, now: Callable[[], datetime], start: Start) -> None:
        """Args:
        directory: of the certificates; None in plaintext, where none are revoked.
        now: UTC.
        start: has looks at the run directory done.
        """
        self.last: RevocationList | None = None
        self.on_revoked: Callable[[list[str]], object] = lambda _serials: None
        self._directory = directory
        self._now = now
        self._start = start
        self._lock = threading.Lock()
        self._stamp: Stamp = ()
        self._run_list: RunList | None = None

    def find(self) -> RevocationList:
        """Returns the current list, or the last usable one: a list that is missing, unreadable,
        not signed by the authority or older than the last changes nothing and is logged. After
        :meth:`share` it is the later one of this list and the run's.

        Raises:
            InvalidArgument: it never could.
        """
        directory = self._directory
        if directory is None:
            return NONE_REVOKED
        path = directory / CRL
        with self._lock:
            shared = NONE_REVOKED
            if self._run_list is not None:
                self._run_list.look_if_due(self._now(), self._start)
                shared = self._run_list.found
            stamp = (stamp_of_file(path), stamp_of_file(directory / CA_CERTIFICATE))
            last = self.last
            if last is not None and self._stamp == stamp and not last.older_than(shared):
                return last
            try:
                found = read_revocations(path, authorities_of(directory))
                if found.older_than(shared):
                    found = shared
                if last is not None and found.older_than(last):
                    raise InvalidArgument(
                        f"{path} is {found}; expected edition {last.number} or a later one",
                        code="PS317",
                    )
            except InvalidArgument as error:
                if last is None:
                    raise
                log.error(  # noqa: TRY400  # the reason is all that counts
                    "REVOCATIONS NOT READ: the last good list stays in force",
                    why=error.coded,
                    revoked=len(last.serials),
                )
                self._stamp = stamp
                return last
            if last is not None and found != last:
                new = sorted(found.serials - last.serials)
                log.warning("revocations read", edition=found.number, new=" ".join(new) or None)
                self.on_revoked(new)
            self._stamp, self.last = stamp, found
            return found

    def share(self, run_dir: Path, keeps: bool = False) -> None:
        """Applies the list in ``run_dir``, too, from now on, if it is later than the one beside
        the certificates; with ``keeps`` this process stores the later one there. So a process of
        the run that starts without the list, or with an old one, accepts no revoked certificate."""
        directory = self._directory
        if directory is None:
            return
        run_list = RunList(run_dir / CRL, directory / CRL, lambda: authorities_of(directory), keeps)
        run_list.look()
        with self._lock:
            self._run_list = run_list
        self.find()
