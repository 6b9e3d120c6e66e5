"""Reads and checks the files with a process's certificates and keys."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from psrpc.core.errors import InvalidArgument
from psrpc.files.storage import open_regular
from psrpc.security.identity import Identity, Role, job_of_ca

CA_CERTIFICATE = "ca.crt"
CA_KEY = "ca.key"

MOST_BYTES = 1 << 20
"""Maximum size of files with keys and certificates."""

Stamp = tuple[tuple[int, int, int], ...]
"""Time, size and inode of each file. Another value means that files were replaced."""


def certificate_name(role: Role) -> str:
    """The name of the file with the certificate of ``role``."""
    return f"{role}.crt"


def key_name(role: Role) -> str:
    """The name of the file with the key of ``role``."""
    return f"{role}.key"


@dataclass(frozen=True, slots=True)
class Certificates:
    """The certificates that a process shows and trusts. They were consistent and valid when read.

    Attributes:
        job: the job of the certificate authority.
        ca: the certificates of the trusted authorities, PEM.
        own: key and certificate of the process, PEM; None without one.
        expires: when the first of these certificates expires.
    """

    job: str
    ca: bytes
    own: tuple[bytes, bytes] | None = field(repr=False)
    expires: datetime


def stamp_of(directory: Path, role: Role | None) -> Stamp:
    """Returns the stamps of the files that :func:`read_certificates` reads; zeros for a missing
    file."""
    return tuple(stamp_of_file(directory / name) for name in _names(role))


def stamp_of_file(path: Path) -> tuple[int, int, int]:
    """Returns modification time, size and inode of a file; zeros if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def read_certificates(directory: Path, role: Role | None, now: datetime) -> Certificates:
    """Reads ``ca.crt`` and, if ``role`` is not None, the certificate and key of that role.

    Raises:
        InvalidArgument: a file is missing, unreadable, readable by others, expired or not of the
            role, or the files do not belong together. Says which file, and how to fix it.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    ca_path = directory / CA_CERTIFICATE
    ca_pem = read_pem_file(ca_path)
    authorities = _authorities(ca_path, ca_pem)
    job = job_of(authorities[0])
    # With several authorities, peers may use any of them, so only the newest must be valid.
    newest = max(authorities, key=lambda authority: authority.not_valid_after_utc)
    _check_time(newest, ca_path, now, f"coordinator certs init {directory}` in a new directory")
    if role is None:
        return Certificates(job, ca_pem, None, newest.not_valid_after_utc)

    path, key_path = directory / certificate_name(role), directory / key_name(role)
    others = [other for other in Role if (directory / certificate_name(other)).exists()]
    have = f": this takes the files of role {role}, and {directory} has those of "
    pem = read_pem_file(path, have + ", ".join(others) if others else "")
    key_pem = read_secret(key_path)
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise _not_one(path, "certificate") from None
    named = Identity.from_uri(_uri(certificate))
    if named != Identity(job, role):
        raise InvalidArgument(
            f"{path} is the certificate of {named}; expected one of {Identity(job, role)}",
            code="PS314",
        )
    _check_time(certificate, path, now, f"coordinator certs renew {directory}`")
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
            break
        except (ValueError, TypeError, InvalidSignature):
            continue
    else:
        raise InvalidArgument(
            f"{path} was not issued by the authority in {ca_path}; copy both from one directory",
            code="PS314",
        )
    if _public_bytes(_load_key(key_path, key_pem)) != _public_bytes(certificate):
        raise InvalidArgument(
            f"{key_path} is not the key of {path}; copy both from one directory", code="PS314"
        )
    expires = min(certificate.not_valid_after_utc, newest.not_valid_after_utc)
    return Certificates(job, ca_pem, (key_pem, pem), expires)


def authorities_of(directory: Path) -> list[Any]:
    """Parses the certificates in ``ca.crt``, which have to be of one job. Raises
    InvalidArgument."""
    path = directory / CA_CERTIFICATE
    return _authorities(path, read_pem_file(path))


def job_of(authority: Any) -> str:
    """Returns the job of a certificate authority; empty if it names none."""
    return job_of_ca(_uri(authority))


def _authorities(path: Path, pem: bytes) -> list[Any]:
    from cryptography import x509

    try:
        authorities = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise _not_one(path, "certificate") from None
    jobs = {job_of(authority) for authority in authorities}
    if len(jobs) != 1 or not all(jobs):
        raise InvalidArgument(
            f"{path} is not the certificate authority of one job; make one with `coordinator "
            f"certs init DIR`",
            code="PS314",
        )
    return authorities


def read_pem_file(path: Path, why: str = "") -> bytes:
    """Reads a small file. Raises InvalidArgument, which says how to fix the problem.

    Args:
        why: added to the message if the file does not exist.
    """
    try:
        with open_regular(path) as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        if (path.parent / CA_CERTIFICATE).exists():
            fix = (
                "copy it from where the job's certificates were made; a new `coordinator certs "
                "init` makes another authority, which the others do not trust"
            )
        else:
            fix = (
                "make it with `coordinator certs init DIR`, or, where the job has certificates, "
                "copy it from there"
            )
        raise InvalidArgument(f"there is no {path}{why}; {fix}", code="PS311") from None
    except OSError as error:
        raise InvalidArgument(
            f"cannot read {path}: {error.strerror}; it has to belong to the user of this process",
            code="PS311",
        ) from None
    if len(content) > MOST_BYTES:
        raise InvalidArgument(
            f"{path} has more than {MOST_BYTES} bytes; it cannot be a key", code="PS311"
        )
    return content


def read_secret(path: Path) -> bytes:
    """Reads a small file, and checks that only its owner may read it.

    If it belongs to root, its group may read it, too, as for a secret that an orchestrator mounts;
    PostgreSQL has the same rule for its keys.

    Raises:
        InvalidArgument: others may read the file; says which command fixes that.
    """
    content = read_pem_file(path)
    found = path.stat()
    allowed = stat.S_IRWXU | (stat.S_IRGRP if found.st_uid == 0 and os.geteuid() != 0 else 0)
    mode = stat.S_IMODE(found.st_mode)
    if mode & ~allowed:
        raise InvalidArgument(
            f"{path} may be read by others (mode {mode:04o}); run: chmod 600 {path}",
            code="PS312",
        )
    return content


def _names(role: Role | None) -> tuple[str, ...]:
    if role is None:
        return (CA_CERTIFICATE,)
    return (CA_CERTIFICATE, certificate_name(role), key_name(role))


def _not_one(path: Path, what: str) -> InvalidArgument:
    return InvalidArgument(f"{path} holds no {what} in PEM form; copy it anew", code="PS311")


def _load_key(path: Path, pem: bytes) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(pem, None)
    except (ValueError, TypeError):
        raise _not_one(path, "key without a password") from None


def _public_bytes(holder: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    written: bytes = holder.public_key().public_bytes(
        Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    )
    return written


def _uri(certificate: Any) -> str:
    """Returns the URI that a certificate names; empty if it names none or several."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ""
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return uris[0] if len(uris) == 1 else ""


def _check_time(certificate: Any, path: Path, now: datetime, command: str) -> None:
    if now > certificate.not_valid_after_utc:
        raise InvalidArgument(
            f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; make a new "
            f"one where its authority's key is: `{command}, and copy the files",
            code="PS313",
        )
    if now < certificate.not_valid_before_utc:
        raise InvalidArgument(
            f"{path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, "
            f"and here it is {now:%Y-%m-%d %H:%M}; set this machine's clock",
            code="PS313",
        )
