"""The certificate revocation list of a job: ``crl.pem``, a standard X.509 CRL signed by the job's
authority, beside the certificates. ``coordinator certs revoke`` writes it. A process applies the
later one of that list and the list of its run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from psrpc.core.errors import InvalidArgument
from psrpc.files.storage import replace_text
from psrpc.ops.logs import get_logger
from psrpc.security.certificates import (
    CA_CERTIFICATE,
    Stamp,
    authorities_of,
    read_pem_file,
    stamp_of_file,
)
from psrpc.security.peer_certificate import serial_text

log = get_logger()

CRL = "crl.pem"
"""The name of the file. Load-bearing: operators copy it."""

LOOK = timedelta(seconds=1)
"""Interval between checks of a run's list."""

Start = Callable[[Callable[[], None]], None]
"""Starts work without waiting for it."""


@dataclass(frozen=True, slots=True)
class RevocationList:
    """Attributes:
    number: of the edition; each later one of an authority has a higher number.
    serials: of the certificates that it names, as
    :func:`psrpc.security.peer_certificate.serial_text`.
    authority: SHA-256 of the certificate of the authority that signed it, hex; empty for none.
    """

    number: int = 0
    serials: frozenset[str] = frozenset()
    authority: str = ""

    def __str__(self) -> str:
        return f"edition {self.number} of the list" if self.authority else "gone"

    def older_than(self, other: RevocationList) -> bool:
        """Whether ``other`` replaces this list: it is a later edition of the same authority, or
        there is no list yet."""
        same = self.authority in ("", other.authority)
        return same and self.number < other.number


NONE_REVOKED = RevocationList()
"""The list where there is no file."""


def read_revocations(path: Path, authorities: Sequence[Any]) -> RevocationList:
    """Reads a list signed by one of ``authorities``; :data:`NONE_REVOKED` if there is no file.

    Raises:
        InvalidArgument: it cannot be read, or none of them has signed it; says which and what to
            do.
    """
    # Also where it is a link to nothing.
    if not os.path.lexists(path):
        return NONE_REVOKED
    return revocations_of(read_pem_file(path), path, authorities)


def revocations_of(pem: bytes, path: Path, authorities: Sequence[Any]) -> RevocationList:
    """The same for the content of ``path``."""
    from cryptography.hazmat.primitives.hashes import SHA256

    crl = load_crl(pem, path)
    signer = next((one for one in authorities if _signed_by(crl, one)), None)
    if signer is None:
        raise InvalidArgument(
            f"{path} was not signed by the authority in ca.crt beside it; expected the list of the "
            "same authority, so copy both from one directory",
            code="PS317",
        )
    serials = frozenset(serial_text(one.serial_number) for one in crl)
    return RevocationList(crl_number(crl), serials, signer.fingerprint(SHA256()).hex())


class RunList:
    """The newest revocation list of a run, in its directory, which coordinator and shards share.
    Thread-safe.

    Attributes:
        found: the list as it was when it was looked at last.
    """

    def __init__(
        self, path: Path, own: Path, authorities: Callable[[], Sequence[Any]], keeps: bool
    ) -> None:
        """Args:
        path: of the run's list.
        own: of the list beside the certificates.
        authorities: reads the certificates of those that may sign one.
        keeps: whether this process writes the run's list, where its own is later.
        """
        self.found = NONE_REVOKED
        self._path = path
        self._own = own
        self._authorities = authorities
        self._keeps = keeps
        self._stamp: Stamp = ()
        self._looked: datetime | None = None
        self._looking = threading.Lock()

    def look_if_due(self, now: datetime, start: Start) -> None:
        """Runs :meth:`look` through ``start`` once in :data:`LOOK`. A run directory may be on a
        network file system, and calls never wait for it: while one check hangs, no other begins."""
        if self._looked is not None and abs(now - self._looked) < LOOK:
            return
        self._looked = now
        if self._looking.acquire(blocking=False):
            start(self._look_and_release)

    def look(self) -> None:
        """Reads the run's list again if it, or the process's own list, has changed. Blocks."""
        stamp = (stamp_of_file(self._path), stamp_of_file(self._own))
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            authorities = self._authorities()
            own = read_revocations(self._own, authorities)
        except InvalidArgument:
            # Said where the process reads its own list.
            return
        try:
            shared = read_revocations(self._path, authorities)
        except InvalidArgument as error:
            # Of another authority, when certificates were made anew, or damaged: the next list that
            # is kept replaces it.
            log.warning("the list of the run is not used", why=error.coded)
            shared = NONE_REVOKED
        if own.older_than(shared):
            log.warning(
                "the list of the run is in force",
                why=f"{self._own} is {own}, {self._path} edition {shared.number}",
                fix="copy crl.pem anew from where `coordinator certs revoke` made it",
            )
        elif self._keeps and shared.older_than(own):
            self._keep()
        self.found = shared

    def _look_and_release(self) -> None:
        try:
            self.look()
        finally:
            self._looking.release()

    def _keep(self) -> None:
        try:
            replace_text(self._path, read_pem_file(self._own).decode("ascii"), private=True)
        except (OSError, ValueError, InvalidArgument) as error:
            log.warning("revocations cannot be kept for the next start", why=str(error))


def on_thread(work: Callable[[], None]) -> None:
    """Runs ``work`` on a daemon thread."""
    threading.Thread(target=work, name="revocations", daemon=True).start()


def load_crl(pem: bytes, path: Path) -> Any:
    """Parses the one list in PEM form; an ``x509.CertificateRevocationList``. Raises
    InvalidArgument."""
    from cryptography import x509

    lists = pem.count(b"-----BEGIN X509 CRL-----")
    try:
        if lists == 1:
            return x509.load_pem_x509_crl(pem)
    except ValueError:
        lists = 0
    raise InvalidArgument(
        f"{path} holds {lists or 'no'} revocation lists in PEM form; expected one: copy it anew "
        "from where `coordinator certs revoke` made it",
        code="PS317",
    )


def crl_number(crl: Any) -> int:
    """Returns the edition number of a list; 0 if it has none."""
    from cryptography import x509

    try:
        return int(crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number)
    except (x509.ExtensionNotFound, ValueError):
        return 0


def _signed_by(crl: Any, authority: Any) -> bool:
    return bool(crl.issuer == authority.subject and crl.is_signature_valid(authority.public_key()))


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
