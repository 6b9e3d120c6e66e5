"""The certificate of a caller: identity, serial number and expiry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from psrpc.core.errors import AccessDenied
from psrpc.ops.logs import get_logger
from psrpc.security.identity import Identity, Role, identity_of

CACHED = 4096
"""Size of the cache of parsed certificates: one for each connection that a server accepts."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A caller, identified by its certificate. Without a certificate (plaintext, token) all fields
    are empty.

    Attributes:
        identity: job and role; None for a caller without a certificate, or whose certificate names
            no role of this project.
        name: the subject's common name. In a certificate that all processes of a role share it is
            the role; in that of one machine it is the name given to ``coordinator certs add``.
        fingerprint: SHA-256 of the certificate (DER), lower-case hex.
        serial: lower-case hex, without leading zeros.
        not_after: the moment at which the certificate stops being valid, UTC.
    """

    identity: Identity | None = None
    name: str = ""
    fingerprint: str = ""
    serial: str = ""
    not_after: datetime | None = None

    @property
    def role(self) -> Role | None:
        """The role of the caller; None if its certificate names none."""
        return self.identity.role if self.identity else None

    @property
    def shown(self) -> bool:
        """Whether the caller has shown a certificate."""
        return bool(self.fingerprint)

    def __str__(self) -> str:
        return f"{self.name} (serial {self.serial})" if self.shown else "a caller without one"


NO_CERTIFICATE = Peer()
"""A caller in plaintext, or with a token."""


def peer_of(context: Any) -> Peer:
    """Returns the caller of a gRPC call, for threaded and asyncio servers. Takes microseconds,
    since each certificate is parsed only once. Thread-safe."""
    found: Mapping[str, Sequence[bytes]] = context.auth_context() or {}
    pem = found.get("x509_pem_cert") or ()
    return peer_of_pem(bytes(pem[0])) if len(pem) == 1 else NO_CERTIFICATE


@lru_cache(maxsize=CACHED)
def peer_of_pem(pem: bytes) -> Peer:
    """Parses the certificate ``pem`` of a caller, which TLS has verified."""
    from cryptography import x509

    return _peer(x509.load_pem_x509_certificate(pem))


@lru_cache(maxsize=CACHED)
def peer_of_der(der: bytes) -> Peer:
    """Parses a verified certificate in DER form, as Python's ``ssl`` returns it."""
    from cryptography import x509

    return _peer(x509.load_der_x509_certificate(der))


def serial_text(number: int) -> str:
    """Formats a serial number in the form that operators read and type."""
    return f"{number:x}"


def _peer(certificate: Any) -> Peer:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import NameOID

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return Peer(
        identity=identity_of(uris[0].encode()) if len(uris) == 1 else None,
        name=str(common[0].value) if len(common) == 1 else "",
        fingerprint=certificate.fingerprint(SHA256()).hex(),
        serial=serial_text(certificate.serial_number),
        not_after=certificate.not_valid_after_utc,
    )


log = get_logger()

LOOK_S = 1.0
"""Seconds between two checks of the callers of open calls."""


@dataclass(eq=False, slots=True)
class _Call:
    peer: Peer
    method: str
    end: Callable[[], object]
    ended: bool = False


class LiveCalls:
    """Ends open calls of one server when the certificates of their callers are no longer accepted.
    Thread-safe. One timer checks all calls, and runs only while there are calls."""

    def __init__(
        self, objection: Callable[[Peer], AccessDenied | None], look_s: float = LOOK_S
    ) -> None:
        """Args:
        objection: returns why a caller is no longer accepted; None if it is accepted.
        look_s: time between two checks.
        """
        self._objection = objection
        self._look_s = look_s
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._timer: threading.Timer | None = None

    @contextmanager
    def present(self, peer: Peer, method: str, end: Callable[[], object]) -> Iterator[None]:
        """Registers a call of ``peer`` during a block. ``end`` must end the call early; it is
        called at most once, from any thread."""
        if not peer.shown:
            yield
            return
        call = _Call(peer, method, end)
        with self._lock:
            self._calls.add(call)
            if self._timer is None:
                self._look_later()
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)

    def look(self) -> None:
        """Ends the calls of callers that are no longer accepted."""
        with self._lock:
            calls = [call for call in self._calls if not call.ended]
        refused = {peer: self._objection(peer) for peer in {call.peer for call in calls}}
        for call in calls:
            why = refused[call.peer]
            if why is not None:
                call.ended = True
                log.warning("call ended", method=call.method, peer=str(call.peer), why=why.coded)
                call.end()

    def _looked(self) -> None:
        try:
            self.look()
        finally:
            with self._lock:
                self._timer = None
                if self._calls:
                    self._look_later()

    def _look_later(self) -> None:
        self._timer = threading.Timer(self._look_s, self._looked)
        self._timer.daemon = True
        self._timer.start()
