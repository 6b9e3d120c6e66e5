"""The head of a request of HTTP/1, as a server that only shows something understands it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(rb"([A-Z]{1,20}) (/[!-~]{0,2000}|\*) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(:[0-9]{1,5})?")


class BadRequest(Exception):
    """What a client sent is no request that is answered; ``status`` is HTTP's."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Head:
    """Attributes:
    path: without the query.
    host: the Host header; None in HTTP/1.0 without one.
    accept: the Accept header; empty for none.
    """

    method: str
    path: str
    host: str | None
    accept: str


def parse_head(data: bytes) -> Head:
    """Reads a head that is whole, with the empty line behind it.

    Raises:
        BadRequest: it is none.
    """
    first, *lines = data.removesuffix(b"\r\n\r\n").split(b"\r\n")
    found = _LINE.fullmatch(first)
    if found is None:
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
    # Browsers, which a foreign page can lead here, always send one.
    if len(hosts) > 1 or (not hosts and found[3] == b"1"):
        raise BadRequest(400, "expected one Host header")
    path = found[2].decode().partition("?")[0]
    return Head(found[1].decode(), path, hosts[0] if hosts else None, accept)


def known_host(header: str, names: Iterable[str]) -> bool:
    """Whether a Host header names us, at whatever port, which a tunnel may change.

    A page of another site can make its own name point here (DNS rebinding) and would then be taken
    for ours by the browser. It cannot do that with an IP address, nor with a name that is not its
    own.
    """
    found = _HOST.fullmatch(header)
    if found is None:
        return False
    host = found[1].removeprefix("[").removesuffix("]").rstrip(".").lower()
    if host in {"localhost", *(name.rstrip(".").lower() for name in names)}:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
