"""Certificates that ``coordinator certs`` does not make."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.certificates.members import revoke
from psrpc.security.identity import Role
from psrpc.security.peer_certificate import peer_of_pem

Pair = tuple[bytes, bytes]
"""Key and certificate, PEM."""


@dataclass(frozen=True)
class Forgery:
    """Attributes:
    certs: of the job.
    other: of a job of the same name, by another authority.
    past: a moment long ago.
    role: that the certificates claim.
    """

    certs: Path
    other: Path
    past: datetime
    role: Role

    def of_other_authority(self) -> Pair:
        """The right names, by the wrong authority."""
        return read_pair(self.other, self.role)

    def expired(self) -> Pair:
        """A certificate that expired a month ago."""
        return forge(self.certs, f"pserver://tiny/{self.role}", before=self.past, days=1)

    def of_other_job(self) -> Pair:
        """By the right authority, for another job."""
        return forge(self.certs, f"pserver://huge/{self.role}")

    def of_no_role(self) -> Pair:
        """By the right authority, for something that is no role."""
        return forge(self.certs, "pserver://tiny/janitor")

    def revoked(self) -> Pair:
        """Right in all, and on the list of those that count no more."""
        pair = forge(self.certs, f"pserver://tiny/{self.role}")
        revoke(self.certs, peer_of_pem(pair[1]).serial, datetime.now(UTC))
        return pair


def read_pair(directory: Path, role: Role) -> Pair:
    """The role's key and certificate in a directory."""
    return (directory / f"{role}.key").read_bytes(), (directory / f"{role}.crt").read_bytes()


def forge(
    certs: Path,
    *uris: str,
    dns: str = "",
    before: datetime | None = None,
    days: int = 10,
    name: str = "forged",
) -> Pair:
    """A certificate by the authority in ``certs`` with any names, for servers and clients."""
    start = before or datetime.now(UTC) - timedelta(hours=1)
    authority = x509.load_pem_x509_certificate((certs / "ca.crt").read_bytes())
    signer = load_pem_private_key((certs / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    if dns:
        names.append(x509.DNSName(dns))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
            ),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem, certificate.public_bytes(Encoding.PEM)
