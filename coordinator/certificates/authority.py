"""Makes the certificates of a job: one authority, and a certificate for each role."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
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

from coordinator.certificates.issued import note_issued
from psrpc.core.errors import InvalidArgument, disk_code
from psrpc.security.certificates import (
    CA_CERTIFICATE,
    CA_KEY,
    authorities_of,
    certificate_name,
    job_of,
    key_name,
    read_pem_file,
    read_secret,
)
from psrpc.security.identity import Identity, Role, ca_uri, check_job_name
from psrpc.security.peer_certificate import peer_of_pem

CA_DAYS = 3650
LEAF_DAYS = 365

MOST_DAYS = CA_DAYS
"""A certificate does not outlive its authority."""

RENEW_BEFORE = timedelta(days=1)
"""A resumed run renews its own certificates if they expire within this time."""

_SKEW = timedelta(hours=1)
"""How far behind another machine's clock may be when it first sees a new certificate."""


def make_certificates(directory: Path, job: str, now: datetime, days: int = LEAF_DAYS) -> None:
    """Makes ``directory`` with an authority for ``job`` and a certificate for each role.

    Raises:
        InvalidArgument: the directory exists and is not empty, or cannot be made; or ``job`` or
            ``days`` is invalid.
    """
    check_job_name(job)
    check_days(days)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidArgument(
            f"{directory} is there already, and nothing in it is written over; choose another "
            f"directory, or `coordinator certs renew {directory}` for new certificates of its "
            "authority",
            code="PS316",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _authority(job, key, now)
    with disk_errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place at the end, so that a failure leaves nothing behind.
        made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            write_private(made / CA_KEY, _pem(key))
            write_private(made / CA_CERTIFICATE, authority.public_bytes(Encoding.PEM))
            for role in Role:
                write_leaf(made, Identity(job, role), authority, key, now, days)
            made.rename(directory)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise


def renew_certificates(directory: Path, now: datetime, days: int = LEAF_DAYS) -> str:
    """Makes a new key and certificate for each role, signed by the existing authority. Running
    processes load them at their next connection.

    Returns:
        The job's name.

    Raises:
        InvalidArgument: the authority or its key is missing or unusable.
    """
    check_days(days)
    authority, key = signer_of(directory, now)
    job = job_of(authority)
    with disk_errors(directory):
        for role in Role:
            write_leaf(directory, Identity(job, role), authority, key, now, days)
    return job


def signer_of(
    directory: Path, now: datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Returns the authority in ``directory`` and its key.

    Raises:
        InvalidArgument: one of them is missing, unusable or expired.
    """
    authorities = authorities_of(directory)
    key = load_pem_private_key(read_secret(directory / CA_KEY), None)
    mine = [a for a in authorities if a.public_key() == key.public_key()]
    if not mine or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidArgument(
            f"{directory / CA_KEY} is not the key of {directory / CA_CERTIFICATE}; copy both from "
            "one directory",
            code="PS314",
        )
    if mine[0].not_valid_after_utc < now:
        raise InvalidArgument(
            f"the authority in {directory / CA_CERTIFICATE} expired on "
            f"{mine[0].not_valid_after_utc:%Y-%m-%d}; make another one: `coordinator certs init "
            f"NEW_DIR --job {job_of(mine[0])}`",
            code="PS313",
        )
    return mine[0], key


def certificates_of_run(directory: Path, job: str, now: datetime) -> None:
    """Makes the certificates of a run, or renews those that expire soon.

    Raises:
        InvalidArgument: existing certificates are unusable.
    """
    if not directory.exists():
        make_certificates(directory, job, now)
        return
    if first_end(directory) < now + RENEW_BEFORE:
        renew_certificates(directory, now)


def first_end(directory: Path) -> datetime:
    """Returns the earliest expiry of the roles' certificates.

    Raises:
        InvalidArgument: one is missing or unusable.
    """
    leaves = [load_certificate(directory / certificate_name(role)) for role in Role]
    return min(leaf.not_valid_after_utc for leaf in leaves)


def load_certificate(path: Path) -> x509.Certificate:
    """Reads the certificate in a file. Raises InvalidArgument."""
    try:
        return x509.load_pem_x509_certificate(read_pem_file(path))
    except ValueError:
        raise InvalidArgument(f"{path} holds no certificate in PEM form", code="PS311") from None


def _authority(job: str, key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{job} CA"[:64])])
    return (
        _builder(name, name, key.public_key(), now, CA_DAYS, [ca_uri(job)], [])
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def write_leaf(
    directory: Path,
    identity: Identity,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    now: datetime,
    days: int,
    name: str = "",
    register: Path | None = None,
) -> None:
    """Writes a new key and certificate into ``directory``.

    Args:
        name: the machine that the certificate is for; empty for one that the whole role shares.
        register: the authority's directory, if it is not ``directory``.

    Raises:
        OSError: the files cannot be written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    role = identity.role
    may = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role.shows_metrics:
        may.append(ExtendedKeyUsageOID.SERVER_AUTH)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name or role)])
    # Ends with the authority at the latest: a reader of this certificate alone sees the true end.
    left = (authority.not_valid_after_utc - now) // timedelta(days=1)
    certificate = (
        _builder(
            subject,
            authority.subject,
            key.public_key(),
            now,
            min(days, left),
            [identity.uri],
            [identity.server_name] if role.shows_metrics else [],
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(may), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    pem = certificate.public_bytes(Encoding.PEM)
    # Registered before it exists: a certificate outside the register cannot be revoked by name.
    note_issued(register or directory, peer_of_pem(pem))
    # A process that reads between the two writes sees a mismatch and keeps its present pair.
    write_private(directory / key_name(role), _pem(key))
    write_private(directory / certificate_name(role), pem)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    days: int,
    uris: list[str],
    dns: list[str],
) -> x509.CertificateBuilder:
    names = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, dns)]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_private(path: Path, content: bytes) -> None:
    """Writes a file atomically; only its owner may read it."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Converts an OSError of the block into an InvalidArgument that names ``directory``."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(
            f"cannot write certificates to {directory}: {error.strerror or error}; choose another "
            "directory",
            code=disk_code(error),
        ) from None


def check_days(days: int, option: str = "--days") -> None:
    """Raises InvalidArgument if no certificate can be valid for ``days``."""
    if not 1 <= days <= MOST_DAYS:
        raise InvalidArgument(f"{option} is {days}; expected 1 to {MOST_DAYS}")
