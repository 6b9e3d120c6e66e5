"""The audit log of a run: changes that authorised callers made, a line of JSON each, in
``audit.jsonl``.

It serves people only; nothing depends on it. A line that cannot be written is a warning, and the
job never waits for the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from psrpc.core.document import LARGEST
from psrpc.core.text import sanitize
from psrpc.files.storage import read_bounded
from psrpc.ops.logs import get_logger
from psrpc.security.peer_certificate import NO_CERTIFICATE, Peer

log = get_logger()

AUDIT = "audit.jsonl"
"""The name of the file. Load-bearing."""

MOST_BYTES = 4 << 20
"""Maximum size of one file; at that size it becomes ``audit.jsonl.1`` and a new file begins."""

KEPT = 4
"""Number of earlier files; the oldest is overwritten."""

QUEUE = 1024
"""Maximum of lines that wait for the disk. Further lines are lost, and the next written line says
how many."""

A_MINUTE = 20
"""Maximum of lines per minute of one kind by one caller; further ones are only counted. Otherwise a
caller could repeat one action until all other lines are gone from the files."""

CALLERS = 4096
"""Maximum of (kind, caller) pairs that are counted in a minute."""

TEXT_CHARS = 500

CLOSE_S = 2.0
"""How long the end of a run waits for unwritten lines."""


class Paces:
    """Limits the rate of lines and counts those left out. Pure, not thread-safe."""

    def __init__(self) -> None:
        self._minute = -1
        self._counts: dict[tuple[str, ...], int] = {}
        self._unwritten: dict[tuple[str, ...], int] = {}

    def admits(self, what: tuple[str, ...], now_s: float) -> int | None:
        """Returns the number of lines of this kind and caller left out before this one; None if
        this one is left out, too."""
        minute = int(now_s // 60)
        if minute != self._minute:
            self._minute, self._counts = minute, {}
        count = self._counts.get(what, 0) + 1
        if count > A_MINUTE or (count == 1 and len(self._counts) >= CALLERS):
            if what in self._unwritten or len(self._unwritten) < CALLERS:
                self._unwritten[what] = self._unwritten.get(what, 0) + 1
            return None
        self._counts[what] = count
        return self._unwritten.pop(what, 0)


class AuditLog:
    """Takes lines from any thread and writes them on a thread of its own, from ``start`` to
    ``stop``; as a context manager it starts and stops. Thread-safe, and no caller ever waits."""

    def __init__(self, path: Path, now: Callable[[], datetime]) -> None:
        """``now`` returns the time in UTC."""
        self._path = path
        self._now = now
        self._paces = Paces()
        self._lock = threading.Lock()
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUE)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="audit", daemon=True)

    def start(self) -> None:
        """Starts the writing thread."""
        self._thread.start()

    def stop(self) -> None:
        """Writes the queued lines, for :data:`CLOSE_S` at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def __enter__(self) -> AuditLog:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def note(
        self, what: str, peer: Peer = NO_CERTIFICATE, address: str = "", **details: object
    ) -> None:
        """Queues a line: ``peer`` did ``what``. ``address`` is that of the caller, in gRPC's
        form."""
        now = self._now()
        host = address.rpartition(":")[0]
        with self._lock:
            unwritten = self._paces.admits((what, peer.fingerprint, host), now.timestamp())
            if unwritten is None:
                return
            if unwritten:
                details["left_out_before"] = unwritten
            if self._lost:
                details["lost_before"] = self._lost
            try:
                self._lines.put_nowait(entry(now, what, peer, address, **details))
                self._lost = 0
            except queue.Full:
                self._lost += 1

    def _write(self) -> None:
        failed = ""
        while (line := self._lines.get()) is not None:
            try:
                append(self._path, line)
                failed = ""
            except OSError as error:
                why = error.strerror or str(error)
                if why != failed:
                    log.warning("the audit log cannot be written", file=str(self._path), why=why)
                failed = why


def entry(
    now: datetime, what: str, peer: Peer = NO_CERTIFICATE, address: str = "", **details: object
) -> dict[str, Any]:
    """Returns one line, as JSON types. Texts from callers are cut and sanitized."""
    who = {"name": peer.name, "role": str(peer.role or ""), "serial": peer.serial}
    fields = {
        "time": now.isoformat(timespec="milliseconds"),
        "what": what,
        **(who if peer.shown else {}),
        **({"fingerprint": peer.fingerprint} if peer.shown else {}),
        "address": address,
        **details,
    }
    return {key: _clean(value) for key, value in fields.items() if value not in ("", None)}


def append(path: Path, line: dict[str, Any]) -> None:
    """Appends a line to a file that only its owner may read; rotates the file before it becomes too
    large. Raises OSError."""
    data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size + len(data) > MOST_BYTES:
            for number in range(KEPT, 0, -1):
                before = path if number == 1 else _earlier(path, number - 1)
                with contextlib.suppress(FileNotFoundError):
                    before.replace(_earlier(path, number))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(path, flags, 0o600)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)


def read_audit(path: Path) -> Iterator[dict[str, Any]]:
    """Yields all lines of ``path`` and of the files before it, oldest first. A malformed line (a
    crash may have cut the last one) becomes ``{"unreadable": text}``. Raises OSError."""
    for file in [*(_earlier(path, number) for number in range(KEPT, 0, -1)), path]:
        try:
            data = read_bounded(file, max(LARGEST, 2 * MOST_BYTES))
        except FileNotFoundError:
            continue
        for text in data.decode(errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            yield line if isinstance(line, dict) else {"unreadable": text}


def _earlier(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _clean(value: object) -> object:
    if isinstance(value, str):
        return sanitize(value, TEXT_CHARS)
    if isinstance(value, list | tuple):
        return [_clean(one) for one in value[:64]]
    return value
