"""HTTPS with the certificates of a job: TLS contexts of servers and clients."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path

from psrpc.ops.logs import get_logger
from psrpc.security.certificates import CA_CERTIFICATE, certificate_name, key_name
from psrpc.security.credentials import Security
from psrpc.security.identity import Role

log = get_logger()


class ServerContext:
    """TLS context of a server that requires a certificate of the job from its clients. Thread-safe.
    The process must have a certificate of its own."""

    def __init__(self, security: Security) -> None:
        self._files = security.files
        self._where = _where(security)
        self._lock = threading.Lock()
        self._served = self._files.certificates()
        self._context = _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._where)

    def current(self) -> ssl.SSLContext:
        """Returns the TLS context for the next handshake, from the current files."""
        with self._lock:
            found = self._files.certificates()
            if found is not self._served:
                try:
                    self._context = _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._where)
                    self._served = found
                except OSError as error:
                    # The files were replaced once more meanwhile, perhaps only some of them yet.
                    log.warning("new certificates cannot be used", why=str(error))
            return self._context


def reader_context(security: Security) -> ssl.SSLContext:
    """Makes the TLS context of a client of a :class:`ServerContext`. The process must have a
    certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The job's authority is checked, but not the name, since a certificate names a role, not a
    # machine.
    context.check_hostname = False
    return _loaded(context, *_where(security))


def _where(security: Security) -> tuple[Path, Role]:
    assert security.directory is not None
    assert security.role is not None
    return security.directory, security.role


def _loaded(context: ssl.SSLContext, directory: Path, role: Role) -> ssl.SSLContext:
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(directory / CA_CERTIFICATE)
    context.load_cert_chain(directory / certificate_name(role), directory / key_name(role))
    return context
