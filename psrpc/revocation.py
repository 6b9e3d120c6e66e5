"""The list of certificates that count no more: ``crl.pem``, a standard X.509 CRL that the job's
authority has signed, beside the certificates. ``coordinator certs revoke`` writes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from psrpc.certificates import read_file, stamp_of_file
from psrpc.errors import InvalidArgument
from psrpc.logs import get_logger
from psrpc.peer_certificate import serial_text
from psrpc.storage import replace_text

log = get_logger()

CRL = "crl.pem"
"""The name of the file. Load-bearing: operators copy it."""

LOOK = timedelta(seconds=1)
"""Between two looks at a run's list."""


@dataclass(frozen=True, slots=True)
class RevocationList:
    """Attributes:
    number: which edition it is; each later one of an authority has a higher number.
    serials: of the certificates that it names, as :func:`psrpc.peer_certificate.serial_text`.
    authority: SHA-256 of the certificate of the authority that signed it, hex; empty for none.
    """

    number: int = 0
    serials: frozenset[str] = frozenset()
    authority: str = ""

    def __str__(self) -> str:
        return f"edition {self.number} of the list" if self.authority else "gone"

    def older_than(self, other: RevocationList) -> bool:
        """Whether ``other`` knows more: it is a later edition by the same authority, or this one is
        no list at all."""
        same = self.authority in ("", other.authority)
        return same and self.number < other.number


NONE_REVOKED = RevocationList()
"""Where no list was ever made."""


def read_revocations(path: Path, authorities: Sequence[Any]) -> RevocationList:
    """Reads a list that one of ``authorities`` has signed; :data:`NONE_REVOKED` where there is no
    file.

    Raises:
        InvalidArgument: it cannot be read, or none of them has signed it; says which and what to
            do.
    """
    # Also where it is a link to nothing.
    if not os.path.lexists(path):
        return NONE_REVOKED
    return revocations_of(read_file(path), path, authorities)


def revocations_of(pem: bytes, path: Path, authorities: Sequence[Any]) -> RevocationList:
    """The same from the content of ``path``."""
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
    """The latest list of a run, in its directory, which coordinator and shards share. Not
    thread-safe."""

    def __init__(self, path: Path, keeps: bool) -> None:
        """``keeps`` means that this process writes it."""
        self._path = path
        self._keeps = keeps
        self._stamp = (0, 0, 0)
        self._looked: datetime | None = None

    def stamp(self, now: datetime) -> tuple[int, int, int]:
        """Another one when the list has been replaced, up to :data:`LOOK` ago: a run directory may
        be far away, and calls do not wait for it."""
        if self._looked is None or abs(now - self._looked) >= LOOK:
            self._looked, self._stamp = now, stamp_of_file(self._path)
        return self._stamp

    def later(self, own: RevocationList, path: Path, authorities: Sequence[Any]) -> RevocationList:
        """The later one of ``own``, which is that of ``path``, and the run's."""
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
                why=f"{path} is {own}, {self._path} edition {shared.number}",
                fix="copy crl.pem anew from where `coordinator certs revoke` made it",
            )
            return shared
        if self._keeps and shared.older_than(own):
            self._keep(path)
        return own

    def _keep(self, path: Path) -> None:
        try:
            replace_text(self._path, read_file(path).decode("ascii"), private=True)
        except (OSError, ValueError, InvalidArgument) as error:
            log.warning("revocations cannot be kept for the next start", why=str(error))


def load_crl(pem: bytes, path: Path) -> Any:
    """The one list in PEM form; an ``x509.CertificateRevocationList``. Raises InvalidArgument."""
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
    """Which edition a list is; 0 where it does not say."""
    from cryptography import x509

    try:
        return int(crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number)
    except (x509.ExtensionNotFound, ValueError):
        return 0


def _signed_by(crl: Any, authority: Any) -> bool:
    return bool(crl.issuer == authority.subject and crl.is_signature_valid(authority.public_key()))
