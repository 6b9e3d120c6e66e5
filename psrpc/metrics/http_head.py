"""Parses the head of an HTTP/1 request for a read-only server."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

HEALTH = "/healthz"
"""Path that returns the process's role without collecting figures."""

_LINE = re.compile(rb"([A-Z]{1,20}) (/[!-~]{0,2000}|\*) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(:[0-9]{1,5})?")


class BadRequest(Exception):
    """A request that the server rejects with the HTTP ``status``."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request: ``path`` without the query, ``host`` from the Host header (None in
    HTTP/1.0 without one), and ``accept`` from the Accept header (empty for none)."""

    method: str
    path: str
    host: str | None
    accept: str


def parse_head(data: bytes) -> Head:
    """Parses a complete head, including the empty line after it. Raises BadRequest."""
    first, *lines = data.removesuffix(b"\r\n\r\n").split(b"\r\n")
    start = _LINE.fullmatch(first)
    if start is None:
        raise BadRequest(400, "expected a request of HTTP/1")
    hosts, accept = [], ""
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise BadRequest(400, "expected header lines of the form NAME: VALUE")
        name, value = field[1].lower(), field[2].decode("latin-1").strip()
        if name == b"host":
            hosts.append(value)
        elif name == b"accept":
            accept = value
    # HTTP/1.0 may omit the header. That is safe: browsers, which a page of another site could
    # direct here, always send it.
    if len(hosts) > 1 or (not hosts and start[3] == b"1"):
        raise BadRequest(400, "expected one Host header")
    path = start[2].decode().partition("?")[0]
    return Head(start[1].decode(), path, hosts[0] if hosts else None, accept)


def known_host(header: str, names: Iterable[str]) -> bool:
    """Whether a Host header is one of ``names``, ``localhost`` or an IP address. Ignores the port,
    which a tunnel may change.

    Another site can point its own name here (DNS rebinding), and the browser would then take this
    server for that site. A site cannot do that with an IP address or another name.
    """
    match = _HOST.fullmatch(header)
    if match is None:
        return False
    host = match[1].removeprefix("[").removesuffix("]").rstrip(".").lower()
    if host in {"localhost", *(name.rstrip(".").lower() for name in names)}:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
