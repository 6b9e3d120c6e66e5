"""The credentials of a process, and the check of its peers; made once when the process starts.

Without certificates all traffic is plaintext and stays on this machine, unless ``insecure`` allows
more. With certificates all traffic is TLS: a server shows its certificate, a client shows its own
or, with a token file, the token."""

from __future__ import annotations

import contextlib
import hmac
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import grpc

from psrpc.core.errors import AccessDenied, InvalidArgument
from psrpc.ops.logs import get_logger
from psrpc.security.certificates import (
    CA_CERTIFICATE,
    Certificates,
    Stamp,
    authorities_of,
    certificate_name,
    key_name,
    read_certificates,
    read_secret,
    stamp_of,
    stamp_of_file,
)
from psrpc.security.identity import Identity, Role
from psrpc.security.peer_certificate import Peer
from psrpc.security.revocation import (
    CRL,
    NONE_REVOKED,
    RevocationList,
    RunList,
    Start,
    on_thread,
    read_revocations,
)

log = get_logger()

TOKEN_KEY = "authorization"
"""Call metadata in which a token travels, as ``Bearer TOKEN``. Load-bearing."""

SHORTEST_TOKEN = 16

SOON = timedelta(days=7)
"""Certificates that expire within this time are warned of."""


@dataclass(frozen=True)
class CredentialOptions:
    """By which options, and from where, a process was told, in words."""

    certs: str = "--certs"
    token_file: str = "--token-file"
    insecure: str = "--insecure"


BY_OPTIONS = CredentialOptions()
"""All of it on the command line."""


class Security:
    """The security settings of a process. Thread-safe.

    Attributes:
        role: what the process is; None for plaintext without one.
        insecure: whether plaintext may leave this machine.
        directory: of the certificates; None for plaintext.
    """

    def __init__(
        self,
        role: Role | None = None,
        certs: Path | None = None,
        token_file: Path | None = None,
        insecure: bool = False,
        asked: CredentialOptions = BY_OPTIONS,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        start: Start = on_thread,
    ) -> None:
        """Nothing is read here; see :meth:`from_options`, which checks all. ``now`` is UTC;
        ``start`` has looks at the run directory done."""
        self.role = role
        self.insecure = insecure
        self.directory = certs
        self._token_file = token_file
        self._asked = asked
        self._now = now
        self._lock = threading.Lock()
        self._read: tuple[Stamp, Certificates] | None = None
        self._token: tuple[tuple[int, int, int], bytes] | None = None
        self._revoked: tuple[Stamp, RevocationList] | None = None
        self._run_list: RunList | None = None
        self._start = start
        self._on_revoked: Callable[[list[str]], object] = lambda _serials: None

    @classmethod
    def from_options(
        cls,
        role: Role,
        certs: Path | None = None,
        token_file: Path | None = None,
        insecure: bool = False,
        asked: CredentialOptions = BY_OPTIONS,
    ) -> Self:
        """Reads and checks what the options name.

        Args:
            role: of this process.
            certs: directory with ``ca.crt`` and the role's certificate and key.
            token_file: holds the secret that stands for every role.
            insecure: plaintext on any address.
            asked: what said so, for messages.

        Raises:
            InvalidArgument: options that contradict each other, or files that cannot be used; says
                which, and what to do.
        """
        if insecure and certs is not None:
            raise InvalidArgument(
                f"{asked.insecure} and {asked.certs} {certs} contradict each other; leave one of "
                "them out",
                code="PS322",
            )
        if token_file is not None and certs is None:
            raise InvalidArgument(
                f"{asked.token_file} {token_file} needs --certs DIR with the job's ca.crt: a token "
                "is never sent in plaintext",
                code="PS322",
            )
        security = cls(role, certs, token_file, insecure, asked)
        if certs is not None:
            security._certificates()
            if role.shows_metrics:
                security.revocations()
        if token_file is not None:
            security._secret()
        return security

    def of(self, role: Role) -> Security:
        """The same for another role, whose files are read when they are first used."""
        return Security(role, self.directory, self._token_file, self.insecure, self._asked)

    def at(self, directory: Path) -> Security:
        """The same with other files, which are read when they are first used."""
        return Security(self.role, directory, self._token_file, self.insecure, self._asked)

    def announce(self) -> None:
        """Logs warnings about the settings; called when the process starts."""
        if self.insecure:
            log.warning(
                "INSECURE: whoever reaches its ports can change the model",
                why=self._asked.insecure,
                fix="coordinator certs init DIR, and --certs DIR everywhere",
            )
        if self.directory is not None:
            expires = self._certificates().expires
            if expires - datetime.now(UTC) < SOON:
                log.warning(
                    "certificates expire soon",
                    expires=f"{expires:%Y-%m-%d %H:%M} UTC",
                    fix=f"coordinator certs renew {self.directory}",
                )
        if self._revoked is not None and self._revoked[1].number:
            found = self._revoked[1]
            log.info("revocations in force", edition=found.number, revoked=len(found.serials))

    @property
    def encrypted(self) -> bool:
        """Whether everything is TLS."""
        return self.directory is not None

    @property
    def by_token(self) -> bool:
        """Whether clients show a token instead of a certificate."""
        return self._token_file is not None

    @property
    def job(self) -> str:
        """The job that the certificates are for; empty in plaintext."""
        return self._certificates().job if self.encrypted else ""

    @property
    def identity(self) -> Identity | None:
        """The identity of this process; None in plaintext."""
        if self.directory is None or self.role is None:
            return None
        return Identity(self.job, self.role)

    def options(self) -> list[str]:
        """The options that give another process of this job the same."""
        options = []
        if self.directory is not None:
            options += ["--certs", str(self.directory)]
        if self._token_file is not None:
            options += ["--token-file", str(self._token_file)]
        return [*options, *(["--insecure"] if self.insecure else [])]

    def stamp(self) -> Stamp:
        """Another one when what clients use has been replaced."""
        stamp = () if self.directory is None else stamp_of(self.directory, self._needed())
        return stamp if self._token_file is None else (*stamp, stamp_of_file(self._token_file))

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client, from the files as they are; from those read before, where they cannot be
        used now. Only where :attr:`encrypted`."""
        found = self._certificates()
        if self.by_token:
            # gRPC sends call credentials over TLS and over nothing else.
            return grpc.composite_channel_credentials(
                grpc.ssl_channel_credentials(found.ca),
                grpc.access_token_call_credentials(self._secret().decode()),
            )
        assert found.own is not None
        return grpc.ssl_channel_credentials(found.ca, *found.own)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server; changed files are read at the next handshake."""
        served = self._certificates()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            found = self._certificates()
            if found is served:
                return None
            served = found
            return _configuration(found)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served),
            fetch,  # type: ignore[arg-type]  # the stubs forget that None means no change
            require_client_authentication=not self.by_token,
        )

    def https(self) -> Callable[[], ssl.SSLContext]:
        """For a server of HTTPS that asks for a certificate of the job: what the next handshake
        uses, from the files as they are. Only with a certificate of its own. Thread-safe."""
        lock = threading.Lock()
        served = self._certificates()
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

        def fetch() -> ssl.SSLContext:
            nonlocal served, context
            with lock:
                found = self._certificates()
                if found is not served:
                    try:
                        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
                        served = found
                    except OSError as error:
                        # Replaced once more meanwhile, perhaps by halves.
                        log.warning("new certificates cannot be used", why=str(error))
                return context

        return fetch

    def https_reader(self) -> ssl.SSLContext:
        """For a client of such a server. Only with a certificate of its own."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # A certificate names a role, not a machine; it is one of the job's all the same.
        context.check_hostname = False
        return self._loaded(context)

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        assert self.directory is not None
        assert self.role is not None
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.directory / CA_CERTIFICATE)
        context.load_cert_chain(
            self.directory / certificate_name(self.role), self.directory / key_name(self.role)
        )
        return context

    def knows_token(self, sent: bytes) -> bool:
        """Whether ``sent`` is the token, in a time that tells nothing about it."""
        return hmac.compare_digest(sent, self._secret())

    def objection(self, peer: Peer) -> AccessDenied | None:
        """Why the certificate that ``peer`` shows counts no more, though TLS took it once: it was
        revoked, or has expired since; None if it counts, or none was shown."""
        if not self.encrypted or not peer.shown:
            return None
        if peer.serial in self.revocations().serials:
            return AccessDenied(
                f"the certificate of {peer} was revoked; where the authority's key is, make "
                "another one and copy it here: `coordinator certs add` for a machine, `renew` for "
                "the one that all processes of a role share",
                code="PS304",
            )
        if peer.not_after is not None and peer.not_after < self._now():
            return AccessDenied(
                f"the certificate of {peer} expired on {peer.not_after:%Y-%m-%d %H:%M} UTC; make a "
                "new one where its authority's key is: `coordinator certs renew DIR`, and copy the "
                "files",
                code="PS313",
            )
        return None

    def revocations(self) -> RevocationList:
        """The list beside the certificates as it is now, or as it could last be used: one that is
        gone, cannot be read, was not signed by the authority or is older than the last changes
        nothing, and the log says so. After :meth:`share_revocations` it is the later one of this
        list and the run's.

        Raises:
            InvalidArgument: it never could.
        """
        assert self.directory is not None
        path = self.directory / CRL
        with self._lock:
            shared = NONE_REVOKED
            if self._run_list is not None:
                self._run_list.look_if_due(self._now(), self._start)
                shared = self._run_list.found
            stamp = (stamp_of_file(path), stamp_of_file(self.directory / CA_CERTIFICATE))
            known = self._revoked
            if known is not None and known[0] == stamp and not known[1].older_than(shared):
                return known[1]
            try:
                found = read_revocations(path, authorities_of(self.directory))
                if found.older_than(shared):
                    found = shared
                if known is not None and found.older_than(known[1]):
                    raise InvalidArgument(
                        f"{path} is {found}; expected edition {known[1].number} or a later one",
                        code="PS317",
                    )
            except InvalidArgument as error:
                if known is None:
                    raise
                log.error(  # noqa: TRY400  # the reason is all that counts
                    "REVOCATIONS NOT READ: the last good list stays in force",
                    why=error.coded,
                    revoked=len(known[1].serials),
                )
                self._revoked = (stamp, known[1])
                return known[1]
            if known is not None and found != known[1]:
                new = sorted(found.serials - known[1].serials)
                log.warning("revocations read", edition=found.number, new=" ".join(new) or None)
                self._on_revoked(new)
            self._revoked = (stamp, found)
            return found

    def share_revocations(self, run_dir: Path, keeps: bool = False) -> None:
        """From now on the list in ``run_dir`` counts, too, where it is later than the one beside
        the certificates; with ``keeps`` this process keeps the latest one there. So a process of
        the run that starts without its list, or with an old one, lets no revoked certificate in."""
        directory = self.directory
        if directory is None:
            return
        run_list = RunList(run_dir / CRL, directory / CRL, lambda: authorities_of(directory), keeps)
        run_list.look()
        with self._lock:
            self._run_list = run_list
        self.revocations()

    def on_revoked(self, told: Callable[[list[str]], object]) -> None:
        """Calls ``told`` with the serial numbers of certificates that a list names which was read
        while this process ran; on any thread, and it must not block."""
        self._on_revoked = told

    def _needed(self) -> Role | None:
        """Whose certificate is read; None where the authority's is enough."""
        shown = self.role is not None and (self.role.serves or not self.by_token)
        return self.role if shown else None

    def _certificates(self) -> Certificates:
        """Returns the certificates on disk, or the last ones that could be used.

        Raises:
            InvalidArgument: none could be used so far.
        """
        assert self.directory is not None
        with self._lock:
            stamp = stamp_of(self.directory, self._needed())
            known = self._read
            if known is not None and known[0] == stamp:
                return known[1]
            try:
                found = read_certificates(self.directory, self._needed(), datetime.now(UTC))
                if known is not None and found.job != known[1].job:
                    raise InvalidArgument(
                        f"{self.directory} now has certificates of job {found.job}; expected "
                        f"{known[1].job}",
                        code="PS314",
                    )
            except InvalidArgument as error:
                if known is None:
                    raise
                # Perhaps half of them are replaced; the rest changes the stamp again.
                log.warning("new certificates cannot be used", why=str(error))
                self._read = (stamp, known[1])
                return known[1]
            if known is not None:
                log.info("certificates replaced", expires=f"{found.expires:%Y-%m-%d %H:%M} UTC")
            self._read = (stamp, found)
            return found

    def _secret(self) -> bytes:
        """The token, as :meth:`_certificates` does it."""
        assert self._token_file is not None
        with self._lock:
            stamp = stamp_of_file(self._token_file)
            known = self._token
            if known is not None and known[0] == stamp:
                return known[1]
            try:
                found = _read_token(self._token_file)
            except InvalidArgument as error:
                if known is None:
                    raise
                log.warning("the new token cannot be used", why=str(error))
                found = known[1]
            self._token = (stamp, found)
            return found


PLAINTEXT = Security()
"""Without certificates: everything stays on this machine."""


def _read_token(path: Path) -> bytes:
    made = f"as this makes it: (umask 077; openssl rand -hex 32 > {path})"
    with contextlib.suppress(PermissionError):  # which read_secret tells of
        if not path.exists():
            raise InvalidArgument(
                f"there is no {path}; copy it from another machine of the job, or make the first "
                f"one, {made}",
                code="PS315",
            )
    token = read_secret(path).strip()
    # What may stand in call metadata.
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not all(32 < c < 127 for c in token):
        raise InvalidArgument(
            f"{path} holds no token; expected one line of at least {SHORTEST_TOKEN} letters and "
            f"digits, {made}",
            code="PS315",
        )
    return token


def _configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    assert found.own is not None
    return grpc.ssl_server_certificate_configuration([found.own], root_certificates=found.ca)
