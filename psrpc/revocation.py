"""The list of certificates that count no more: ``crl.pem``, a standard X.509 CRL that the job's
authority has signed, beside the certificates. ``coordinator certs revoke`` writes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrpc.certificates import read_file
from psrpc.errors import InvalidArgument
from psrpc.peer_certificate import serial_text

CRL = "crl.pem"
"""The name of the file. Load-bearing: operators copy it."""


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
