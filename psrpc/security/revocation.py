"""The certificate revocation list of a job: ``crl.pem``, a standard X.509 CRL signed by the job's
authority, in the directory of the certificates. ``coordinator certs revoke`` writes it. The run
directory may have such a list, too; a process applies the later one of both."""

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
    """A parsed revocation list.

    Attributes:
        number: number of the edition; later editions of the same authority have higher numbers.
        serials: the serial numbers of the revoked certificates, in the form of
            :func:`psrpc.security.peer_certificate.serial_text`.
        authority: SHA-256 of the certificate of the authority that signed the list, hex; empty if
            there is no list.
    """

    number: int = 0
    serials: frozenset[str] = frozenset()
    authority: str = ""

    def __str__(self) -> str:
        return f"edition {self.number} of the list" if self.authority else "gone"

    def older_than(self, other: RevocationList) -> bool:
        """Returns whether ``other`` replaces this list, because it is a later edition of the same
        authority, or because this is no list."""
        same = self.authority in ("", other.authority)
        return same and self.number < other.number


NONE_REVOKED = RevocationList()
"""The list to use if there is no file."""


def read_revocations(path: Path, authorities: Sequence[Any]) -> RevocationList:
    """Reads a list signed by one of ``authorities``; :data:`NONE_REVOKED` if there is no file.

    Raises:
        InvalidArgument: the list cannot be read, or none of the authorities has signed it. Says
            which, and how to fix it.
    """
    # Not exists(): a dangling link is an error, not a missing list.
    if not os.path.lexists(path):
        return NONE_REVOKED
    return revocations_of(read_pem_file(path), path, authorities)


def revocations_of(pem: bytes, path: Path, authorities: Sequence[Any]) -> RevocationList:
    """Parses and checks ``pem``, the content of ``path``, like :func:`read_revocations`."""
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
    """Reads, and may write, the newest revocation list of a run, in the run directory, which
    coordinator and shards share. Thread-safe.

    Attributes:
        found: the list at the time of the last check.
    """

    def __init__(
        self, path: Path, own: Path, authorities: Callable[[], Sequence[Any]], keeps: bool
    ) -> None:
        """Args:
        path: the path of the run's list.
        own: the path of the list in the directory of the certificates.
        authorities: returns the certificates of the authorities that may sign a list.
        keeps: whether this process replaces the run's list if its own list is later.
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
        """Runs :meth:`look` through ``start``, at most once in :data:`LOOK`.

        Does not wait for the check, because a run directory may be on a network file system that
        hangs. While one check hangs, no other begins."""
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
            # RevocationsInForce reports this error, since it reads the same file.
            return
        try:
            shared = read_revocations(self._path, authorities)
        except InvalidArgument as error:
            # The list is damaged, or of another authority because certificates were made again. The
            # next list that a process stores here replaces it.
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
    """Parses a file with exactly one list in PEM form; returns an
    ``x509.CertificateRevocationList``. Raises InvalidArgument."""
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
    """Decides which revocation list applies. Reads lists when they are needed, and again when they
    have changed. Thread-safe.

    Attributes:
        last: the result of the last :meth:`find`; None before the first.
        on_revoked: called with the new serial numbers when a changed list is read while this
            process runs. May be called on any thread, and must not block.
    """

    def __init__(self, directory: Path | None, now: Callable[[], datetime], start: Start) -> None:
        """Args:
        directory: the directory of the certificates; None for plaintext, where none are revoked.
        now: returns the present time, UTC.
        start: runs a check of the run directory without waiting for it.
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
        """Returns the current list, or the last usable one. A list that is missing, unreadable, not
        signed by the authority or older than the last one is logged and not used. After
        :meth:`share`, returns the later one of this list and the run's.

        Raises:
            InvalidArgument: no list has been usable so far.
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
        """From now on also applies the list in ``run_dir``, if that is later than the list in the
        directory of the certificates. With ``keeps`` this process stores the later one in
        ``run_dir``. So even a process that starts without a list, or with an old one, accepts no
        revoked certificate."""
        directory = self._directory
        if directory is None:
            return
        run_list = RunList(run_dir / CRL, directory / CRL, lambda: authorities_of(directory), keeps)
        run_list.look()
        with self._lock:
            self._run_list = run_list
        self.find()
