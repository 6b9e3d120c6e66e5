"""Makes, renews, revokes and lists certificates of single machines, beside those that all processes
of a role share. See docs/design/0019-leaving-the-circle.md."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.certificates.authority import (
    LEAF_DAYS,
    check_days,
    disk_errors,
    first_end,
    load_certificate,
    renew_certificates,
    signer_of,
    write_leaf,
    write_private,
)
from coordinator.certificates.issued import read_issued
from psrpc.core.errors import InvalidArgument
from psrpc.core.text import counted
from psrpc.security.certificates import (
    CA_CERTIFICATE,
    authorities_of,
    certificate_name,
    job_of,
    read_pem_file,
)
from psrpc.security.identity import Identity, Role
from psrpc.security.peer_certificate import Peer, peer_of_pem, serial_text
from psrpc.security.revocation import CRL, crl_number, load_crl, read_revocations

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SERIAL = re.compile(r"[0-9a-f]{1,40}")


def add_member(
    directory: Path,
    role: Role,
    name: str,
    now: datetime,
    days: int = LEAF_DAYS,
    *,
    host: bool = False,
) -> Path:
    """Makes the directory ``ROLE-NAME`` in ``directory``: exactly the files that the machine called
    ``name`` needs, to be copied there; as a ``host`` of parameters, a worker needs the certificate
    of a shard as well.

    Raises:
        InvalidArgument: it exists and was not revoked, the name is invalid, a ``host`` is no
            worker, or the authority's key is missing.
    """
    check_days(days)
    if host and role is not Role.WORKER:
        raise InvalidArgument(f"--host is for a worker, which hosts parameters, not for a {role}")
    if not _NAME.fullmatch(name) or name in set(Role):
        raise InvalidArgument(
            f"certificate name {name!r}; expected 1 to 63 lower-case letters, digits and hyphens, "
            f"no hyphen first or last, and none of {', '.join(Role)}, which are taken"
        )
    authority, key = signer_of(directory, now)
    target = directory / f"{role}-{name}"
    if target.exists():
        revoked = read_revocations(directory / CRL, [authority]).serials
        if _peer(target / certificate_name(role)).serial not in revoked:
            raise InvalidArgument(
                f"{target} is there already; `coordinator certs renew {directory}` makes new "
                f"certificates, `coordinator certs revoke {directory} {name}` ends this one",
                code="PS316",
            )
    with disk_errors(directory):
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=directory))
        try:
            for file in (CA_CERTIFICATE, CRL):
                if (directory / file).exists():
                    write_private(made / file, read_pem_file(directory / file))
            for own in (role, Role.SHARD) if host else (role,):
                identity = Identity(job_of(authority), own)
                write_leaf(made, identity, authority, key, now, days, name, directory)
            if target.exists():
                shutil.rmtree(target)
            made.rename(target)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return target


def member_of_run(directory: Path, role: Role, name: str, now: datetime, within: timedelta) -> Path:
    """Returns a directory with the certificate of one process of a run, see :func:`add_member`.
    Keeps the existing certificate if it was not revoked, renewing it if it expires ``within`` that
    time. The directory holds no key of another process. Raises InvalidArgument."""
    path = directory / f"{role}-{name}"
    certificate = path / certificate_name(role)
    if certificate.exists():
        revoked = read_revocations(directory / CRL, authorities_of(directory)).serials
        peer = _peer(certificate)
        assert peer.not_after is not None
        if peer.serial not in revoked:
            if peer.not_after < now + within:
                authority, key = signer_of(directory, now)
                identity = Identity(job_of(authority), role)
                with disk_errors(path):
                    write_leaf(path, identity, authority, key, now, LEAF_DAYS, name, directory)
            return path
    return add_member(directory, role, name, now)


def host_of_run(directory: Path, member: Path, now: datetime, within: timedelta) -> None:
    """Gives ``member``, the directory of a worker's own certificate in ``directory``, the
    certificate of a shard as well, if it has none that lasts longer than ``within``. Raises
    InvalidArgument."""
    certificate = member / certificate_name(Role.SHARD)
    if certificate.exists() and load_certificate(certificate).not_valid_after_utc >= now + within:
        return
    authority, key = signer_of(directory, now)
    name = _peer(member / certificate_name(Role.WORKER)).name
    identity = Identity(job_of(authority), Role.SHARD)
    with disk_errors(member):
        write_leaf(member, identity, authority, key, now, LEAF_DAYS, name, directory)


def renew_all(directory: Path, now: datetime, days: int = LEAF_DAYS) -> str:
    """Renews the certificates of all roles, and of all machines whose own was not revoked. Returns
    the job's name. Raises InvalidArgument, see
    :func:`coordinator.certificates.authority.renew_certificates`."""
    job = renew_certificates(directory, now, days)
    authority, key = signer_of(directory, now)
    revoked = read_revocations(directory / CRL, [authority]).serials
    with disk_errors(directory):
        for role, path in _members(directory):
            peer = _peer(path / certificate_name(role))
            if peer.serial not in revoked:
                identity = Identity(job, role)
                write_leaf(path, identity, authority, key, now, days, peer.name, directory)
    return job


def earliest_end(directory: Path) -> datetime:
    """Returns the earliest expiry of the certificates that :func:`renew_all` renews. Raises
    InvalidArgument."""
    revoked = read_revocations(directory / CRL, authorities_of(directory)).serials
    peers = (_peer(path / certificate_name(role)) for role, path in _members(directory))
    ends = [peer.not_after for peer in peers if peer.not_after and peer.serial not in revoked]
    return min([first_end(directory), *ends])


def revoke(directory: Path, which: str, now: datetime) -> list[str]:
    """Revokes all unexpired certificates of the name ``which``, or the one with that serial number.
    All processes that find the list beside their certificates refuse them from then on.

    Returns:
        The serial numbers that were added; none if all were in the list.

    Raises:
        InvalidArgument: there is no such certificate, or no list can be signed.
    """
    authority, key = signer_of(directory, now)
    path = directory / CRL
    known = read_revocations(path, [authority])
    serials = _named(directory, which, now) or _by_serial(directory, which)
    new = [serial for serial in serials if serial not in known.serials]
    if not new:
        return []
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now)
        # Operators copy the list after each revocation, not by a schedule.
        .next_update(authority.not_valid_after_utc)
    )
    number = 1
    if path.exists():
        before = load_crl(read_pem_file(path), path)
        number = crl_number(before) + 1
        for entry in before:
            builder = builder.add_revoked_certificate(entry)
    for serial in new:
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder()
            .serial_number(int(serial, 16))
            .revocation_date(now)
            .build()
        )
    builder = builder.add_extension(x509.CRLNumber(number), critical=False)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    with disk_errors(directory):
        write_private(path, pem)
        for _, member in _members(directory):
            write_private(member / CRL, pem)
    return new


def describe_certificates(directory: Path, now: datetime) -> str:
    """Returns two lines for the authority and each certificate: names and expiry; then name, serial
    number, fingerprint and revocation. Valid certificates that are no longer in any file come last.

    Raises:
        InvalidArgument: there is no authority, or a file cannot be read.
    """
    authorities = authorities_of(directory)
    revoked = read_revocations(directory / CRL, authorities).serials
    lines = [_line("ca", job_of(authority), authority, now) for authority in authorities]
    shown = set()
    shared = [(role, directory) for role in Role]
    for role, where in [*shared, *_members(directory)]:
        path = where / certificate_name(role)
        if path.exists():
            certificate = load_certificate(path)
            names = _names(certificate)
            identity = Identity.from_uri(names[0] if names else "")
            peer = _peer(path)
            shown.add(peer.serial)
            lines.append(_line(identity.role, identity.job, certificate, now))
            lines.append(_second_line(peer.name, peer.serial, peer.fingerprint, revoked))
    for one in read_issued(directory):
        if one.serial not in shown and one.end > now:
            lines.append(
                f"{one.role:<12}{'renewed since':<20} expires {one.end:%Y-%m-%d %H:%M} UTC"
            )
            lines.append(_second_line(one.name, one.serial, one.fingerprint, revoked))
    return "\n".join(lines)


def _members(directory: Path) -> Iterator[tuple[Role, Path]]:
    """Yields role and directory of each certificate of a single machine."""
    for role in Role:
        for path in sorted(directory.glob(f"{role}-*")):
            # A worker that hosts parameters has two.
            for own in (role, Role.SHARD) if role is Role.WORKER else (role,):
                if (path / certificate_name(own)).is_file():
                    yield own, path


def _named(directory: Path, name: str, now: datetime) -> list[str]:
    serials = [one.serial for one in read_issued(directory) if one.name == name and one.end > now]
    # Certificates that an earlier version made are in no register.
    for role, where in [*((role, directory) for role in Role), *_members(directory)]:
        path = where / certificate_name(role)
        if path.exists():
            peer = _peer(path)
            if peer.name == name and peer.serial not in serials:
                serials.append(peer.serial)
    return serials


def _by_serial(directory: Path, which: str) -> list[str]:
    digits = which.lower().replace(":", "")
    if not _SERIAL.fullmatch(digits) or not int(digits, 16):
        raise InvalidArgument(
            f"{directory} has no certificate called {which!r}, and that is no serial number (hex); "
            f"`coordinator certs show {directory}` lists both",
            code="PS318",
        )
    return [serial_text(int(digits, 16))]


def _peer(path: Path) -> Peer:
    load_certificate(path)
    return peer_of_pem(read_pem_file(path))


def _second_line(name: str, serial: str, fingerprint: str, revoked: frozenset[str]) -> str:
    ended = "  REVOKED" if serial in revoked else ""
    return f"{'':<12}name {name}  serial {serial}  sha256 {fingerprint}{ended}"


def _line(role: str, job: str, certificate: x509.Certificate, now: datetime) -> str:
    expires = certificate.not_valid_after_utc
    left = (expires - now).days
    when = f"in {counted(left, 'day')}" if expires > now else "EXPIRED"
    names = " ".join(_names(certificate))
    return f"{role:<12}{job:<20} expires {expires:%Y-%m-%d %H:%M} UTC ({when})  {names}"


def _names(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [
        *names.get_values_for_type(x509.UniformResourceIdentifier),
        *names.get_values_for_type(x509.DNSName),
    ]
