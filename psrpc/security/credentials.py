"""The security settings of a process: its credentials, and the check of its peers. Made once when
the process starts.

Without certificates all traffic is plaintext and stays on this machine, unless ``insecure`` allows
it to leave. With certificates all traffic is TLS: a server shows its certificate; a client shows
its certificate too or, with a token file, the token."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import grpc

from psrpc.core.errors import AccessDenied, InvalidArgument
from psrpc.ops.logs import get_logger
from psrpc.security.certificates import Certificates
from psrpc.security.credential_files import CredentialFiles
from psrpc.security.identity import Identity, Role
from psrpc.security.peer_certificate import Peer, peer_of_pem
from psrpc.security.revocation import RevocationsInForce, Start, on_thread

log = get_logger()

TOKEN_KEY = "authorization"
"""Call metadata in which a token travels, as ``Bearer TOKEN``. Load-bearing."""

SOON = timedelta(days=7)
"""Certificates that expire within this time cause a warning."""


@dataclass(frozen=True)
class CredentialOptions:
    """The name of the option that set each setting, for messages."""

    certs: str = "--certs"
    token_file: str = "--token-file"
    insecure: str = "--insecure"


BY_OPTIONS = CredentialOptions()
"""All settings come from the command line."""


class Security:
    """The security settings of a process. Thread-safe.

    Attributes:
        role: the role of the process; None if it has none, which only plaintext allows.
        insecure: whether plaintext may leave this machine.
        directory: the directory of the certificates; None for plaintext.
        files: the certificates and the token on disk.
        revocations: the revoked certificates of peers.
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
        """Reads no files and checks nothing; :meth:`from_options` does both. ``now`` returns the
        present time, UTC. ``start`` runs checks of the run directory."""
        self.role = role
        self.insecure = insecure
        self.directory = certs
        self._token_file = token_file
        self._asked = asked
        self._now = now
        self.files = CredentialFiles(role, certs, token_file, now)
        self.revocations = RevocationsInForce(certs, now, start)

    @classmethod
    def from_options(
        cls,
        role: Role,
        certs: Path | None = None,
        token_file: Path | None = None,
        insecure: bool = False,
        asked: CredentialOptions = BY_OPTIONS,
    ) -> Self:
        """Reads and checks the files and values of the options.

        Args:
            role: the role of this process.
            certs: directory with ``ca.crt`` and the role's certificate and key.
            token_file: contains the secret that all roles share.
            insecure: whether plaintext is allowed on any address.
            asked: the options that set these values, for messages.

        Raises:
            InvalidArgument: options contradict each other, or files cannot be used. Says which, and
                how to fix it.
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
            security.files.certificates()
            if role.shows_metrics:
                security.revocations.find()
        if token_file is not None:
            security.files.token()
        return security

    def of(self, role: Role) -> Security:
        """Returns the same settings for another role; its files are read at first use."""
        return Security(role, self.directory, self._token_file, self.insecure, self._asked)

    def at(self, directory: Path) -> Security:
        """Returns the same settings with other files, which are read at first use."""
        return Security(self.role, directory, self._token_file, self.insecure, self._asked)

    def announce(self) -> None:
        """Logs warnings about the settings. Called when the process starts."""
        if self.insecure:
            log.warning(
                "INSECURE: anyone who reaches its ports can change the model",
                why=self._asked.insecure,
                fix="coordinator certs init DIR, and --certs DIR everywhere",
            )
        if self.directory is not None:
            expires = self.files.certificates().expires
            if expires - datetime.now(UTC) < SOON:
                log.warning(
                    "certificates expire soon",
                    expires=f"{expires:%Y-%m-%d %H:%M} UTC",
                    fix=f"coordinator certs renew {self.directory}",
                )
        revoked = self.revocations.last
        if revoked is not None and revoked.number:
            log.info("revocations in force", edition=revoked.number, revoked=len(revoked.serials))

    @property
    def encrypted(self) -> bool:
        """Whether all traffic is TLS."""
        return self.directory is not None

    @property
    def by_token(self) -> bool:
        """Whether clients show a token instead of a certificate."""
        return self._token_file is not None

    @property
    def job(self) -> str:
        """The job that the certificates are for; empty in plaintext."""
        return self.files.certificates().job if self.encrypted else ""

    @property
    def identity(self) -> Identity | None:
        """The identity of this process; None in plaintext."""
        if self.directory is None or self.role is None:
            return None
        return Identity(self.job, self.role)

    @property
    def common_name(self) -> str:
        """The common name in this process's certificate, as servers see it in its calls; empty if
        it shows none."""
        if not self.encrypted or self.by_token:
            return ""
        own = self.files.certificates().own
        return peer_of_pem(own[1]).name if own is not None else ""

    def options(self) -> list[str]:
        """Returns the options that give another process of this job the same settings."""
        options = []
        if self.directory is not None:
            options += ["--certs", str(self.directory)]
        if self._token_file is not None:
            options += ["--token-file", str(self._token_file)]
        return [*options, *(["--insecure"] if self.insecure else [])]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Makes the credentials of a client from the current files, or from the last usable ones.
        Requires :attr:`encrypted`."""
        found = self.files.certificates()
        if self.by_token:
            # gRPC sends call credentials only over TLS.
            return grpc.composite_channel_credentials(
                grpc.ssl_channel_credentials(found.ca),
                grpc.access_token_call_credentials(self.files.token().decode()),
            )
        assert found.own is not None
        return grpc.ssl_channel_credentials(found.ca, *found.own)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Makes the credentials of a server; they use changed files from the next handshake on."""
        served = self.files.certificates()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            found = self.files.certificates()
            if found is served:
                return None
            served = found
            return _configuration(found)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served),
            fetch,  # type: ignore[arg-type]  # the stubs forget that None means no change
            require_client_authentication=not self.by_token,
        )

    def knows_token(self, sent: bytes) -> bool:
        """Returns whether ``sent`` is the token; takes constant time."""
        return hmac.compare_digest(sent, self.files.token())

    def objection(self, peer: Peer) -> AccessDenied | None:
        """Returns why the certificate of ``peer`` is no longer valid (revoked, or expired since
        TLS verified it); None if it is valid or absent."""
        if not self.encrypted or not peer.shown:
            return None
        if peer.serial in self.revocations.find().serials:
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


PLAINTEXT = Security()
"""No certificates: all traffic stays on this machine."""


def _configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    assert found.own is not None
    return grpc.ssl_server_certificate_configuration([found.own], root_certificates=found.ca)
