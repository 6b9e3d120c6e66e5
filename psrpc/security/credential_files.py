"""Reads a process's certificates and token from disk, and keeps their last usable content."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from psrpc.core.errors import InvalidArgument
from psrpc.ops.logs import get_logger
from psrpc.security.certificates import (
    Certificates,
    Stamp,
    read_certificates,
    read_secret,
    stamp_of,
    stamp_of_file,
)
from psrpc.security.identity import Role

log = get_logger()

SHORTEST_TOKEN = 16


class CredentialFiles:
    """Reads the files when they are needed, and again when they have changed. Thread-safe."""

    def __init__(
        self,
        role: Role | None,
        directory: Path | None,
        token_file: Path | None,
        now: Callable[[], datetime],
    ) -> None:
        """Args:
        role: the role of the process.
        directory: the directory of the certificates; None for plaintext.
        token_file: contains the token; None if the process shows a certificate instead.
        now: returns the present time, UTC.
        """
        self._role = role
        self._directory = directory
        self._token_file = token_file
        self._now = now
        self._lock = threading.Lock()
        self._certificates: tuple[Stamp, Certificates] | None = None
        self._token: tuple[tuple[int, int, int], bytes] | None = None

    def stamp(self) -> Stamp:
        """Returns a value that changes when the files that clients use are replaced."""
        stamp = () if self._directory is None else stamp_of(self._directory, self._needed())
        return stamp if self._token_file is None else (*stamp, stamp_of_file(self._token_file))

    def certificates(self) -> Certificates:
        """Returns the certificates on disk, or the last usable ones. Do not call it for plaintext.

        Raises:
            InvalidArgument: none could be used so far.
        """
        assert self._directory is not None
        with self._lock:
            stamp = stamp_of(self._directory, self._needed())
            known = self._certificates
            if known is not None and known[0] == stamp:
                return known[1]
            try:
                found = read_certificates(self._directory, self._needed(), self._now())
                if known is not None and found.job != known[1].job:
                    raise InvalidArgument(
                        f"{self._directory} now has certificates of job {found.job}; expected "
                        f"{known[1].job}",
                        code="PS314",
                    )
            except InvalidArgument as error:
                if known is None:
                    raise
                # Perhaps only some files have been replaced yet. The other ones will change the
                # stamp again.
                log.warning("new certificates cannot be used", why=str(error))
                self._certificates = (stamp, known[1])
                return known[1]
            if known is not None:
                log.info("certificates replaced", expires=f"{found.expires:%Y-%m-%d %H:%M} UTC")
            self._certificates = (stamp, found)
            return found

    def token(self) -> bytes:
        """Returns the token on disk, or the last usable one. Do not call it without a token file.

        Raises:
            InvalidArgument: no token has been usable so far.
        """
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

    def _needed(self) -> Role | None:
        """Returns the role whose certificate is needed; None if the authority's certificate is
        enough."""
        shown = self._role is not None and (self._role.serves or self._token_file is None)
        return self._role if shown else None


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
    # Only characters that call metadata may contain.
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not all(32 < c < 127 for c in token):
        raise InvalidArgument(
            f"{path} holds no token; expected one line of at least {SHORTEST_TOKEN} letters and "
            f"digits, {made}",
            code="PS315",
        )
    return token
