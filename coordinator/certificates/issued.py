"""The register of certificates that an authority has issued: ``issued.jsonl`` beside its key, one
line each. With it, all certificates of a name can be revoked, also those that newer ones have
replaced."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from psrpc.core.errors import InvalidArgument
from psrpc.files.storage import cause_of, read_bounded
from psrpc.security.peer_certificate import Peer

ISSUED = "issued.jsonl"
"""The name of the file. Load-bearing."""

MOST_BYTES = 32 << 20
"""Maximum size of the file: some hundred thousand certificates."""


@dataclass(frozen=True, slots=True)
class Issued:
    """One issued certificate; see :class:`psrpc.security.peer_certificate.Peer`. ``not_after`` is
    ISO 8601."""

    name: str
    role: str
    serial: str
    fingerprint: str
    not_after: str

    @property
    def end(self) -> datetime:
        """The end of its validity."""
        return datetime.fromisoformat(self.not_after)


def note_issued(directory: Path, peer: Peer) -> None:
    """Adds the certificate of ``peer``, which must have one. Raises OSError."""
    assert peer.not_after is not None
    line = Issued(
        peer.name, str(peer.role or ""), peer.serial, peer.fingerprint, peer.not_after.isoformat()
    )
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(directory / ISSUED, flags, 0o600)
    try:
        os.write(handle, (json.dumps(asdict(line)) + "\n").encode())
    finally:
        os.close(handle)


def read_issued(directory: Path) -> list[Issued]:
    """Returns all entries, oldest first; empty if an earlier version made the certificates.

    Raises:
        InvalidArgument: the register cannot be read.
    """
    path = directory / ISSUED
    try:
        lines = read_bounded(path, MOST_BYTES).decode().splitlines()
        issued = [Issued(**json.loads(line)) for line in lines if line.strip()]
        for one in issued:
            datetime.fromisoformat(one.not_after)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {cause_of(error)}", code="PS311") from None
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            f"{path} is not a register of issued certificates: {error}; move it away, and revoke "
            "by serial number what it had",
            code="PS311",
        ) from None
    return issued
