"""Diagnoses an unreachable peer: tries name, TCP and TLS one by one on a separate connection.

gRPC reports UNAVAILABLE alike for a closed port, dropped packets, a peer that wants TLS and an
untrusted certificate, but these need different fixes.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from psrpc.core.errors import AccessDenied, InvalidArgument, NotConnected, PsError, Unreachable
from psrpc.net.channel import parse_address
from psrpc.security.certificates import CA_CERTIFICATE, certificate_name, key_name
from psrpc.security.credentials import Security
from psrpc.security.identity import Role, server_name

TIMEOUT_S = 3.0
"""Time limit per step. Longer than TCP's first two retransmissions, in case a packet is lost."""

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes that an HTTP/2 client sends: preface and empty settings (RFC 9113, 3.4)."""

_FRAME_HEADER = 9
_SETTINGS = 4
_WRONG_ISSUER = {18, 19, 20, 21}
_NOT_YET_OR_EXPIRED = {9, 10}
_OTHER_NAME = {62}
"""Verify codes of OpenSSL (x509_vfy.h)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of connecting: its result, or an error that says how to fix the problem."""

    name: str
    found: str = ""
    error: PsError | None = None


def why_unreachable(
    address: str, security: Security, peer: Role, timeout_s: float = TIMEOUT_S
) -> PsError | None:
    """Returns the first error on the way to ``address`` (HOST:PORT), or None. ``peer`` is the role
    that the server's certificate must have; ``timeout_s`` bounds each step."""
    steps = reach(address, security, peer, timeout_s)
    return next((step.error for step in steps if step.error is not None), None)


def reach(
    address: str, security: Security, peer: Role, timeout_s: float = TIMEOUT_S
) -> Iterator[Step]:
    """Yields the steps of :func:`why_unreachable` up to a failed one; does not change the peer."""
    name = "name"
    try:
        host, port = parse_address(address)
        found = _resolve(host, port, timeout_s)
        yield Step(name, f"{host} is {found[0][4][0]}")
        name = "TCP"
        with _connect(address, found, timeout_s) as connection:
            yield Step(name, f"a server listens at {address}")
            name = "TLS"
            agreed = _greet(connection, address, found, security, peer, timeout_s)
        yield Step(name, agreed)
    except PsError as error:
        yield Step(name, error=error)


def _resolve(host: str, port: int, timeout_s: float) -> list[Any]:
    """Returns the addresses of ``host``. The system's resolver has no deadline, so a look-up that
    needs a name server runs in a thread, which is abandoned after ``timeout_s``."""
    answer: queue.SimpleQueue[list[Any] | OSError | UnicodeError] = queue.SimpleQueue()

    def look_up(flags: int = 0) -> list[Any]:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)

    def ask() -> None:
        try:
            answer.put(look_up())
        except (OSError, UnicodeError) as error:
            answer.put(error)

    with contextlib.suppress(OSError, UnicodeError):
        return look_up(socket.AI_NUMERICHOST)
    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        found = answer.get(timeout=timeout_s)
    except queue.Empty:
        raise Unreachable(
            f"the name {host!r} was not found within {timeout_s:g} s: the name server does not "
            "answer; check /etc/resolv.conf, or say an IP address",
            code="PS207",
        ) from None
    if not isinstance(found, list):
        why = getattr(found, "strerror", None) or found
        raise Unreachable(
            f"there is no machine called {host!r} ({why}); check its spelling, or say an IP "
            "address",
            code="PS207",
        )
    return found


def _connect(address: str, found: list[Any], timeout_s: float) -> socket.socket:
    """Connects to the first address that accepts."""
    last: OSError = OSError(errno.EHOSTUNREACH, "no address")
    for family, kind, proto, _, where in found:
        connection = socket.socket(family, kind, proto)
        connection.settimeout(timeout_s)
        try:
            connection.connect(where)
        except OSError as error:
            connection.close()
            # Prefers a refusal to other errors: it shows that the machine is there.
            refused = isinstance(last, ConnectionRefusedError)
            last = last if refused else error
        else:
            return connection
    if isinstance(last, ConnectionRefusedError):
        raise NotConnected(
            f"nothing listens at {address}; check the port, and that it was started there and "
            "bound to an address that this machine reaches (--bind)"
        )
    if isinstance(last, TimeoutError):
        raise Unreachable(
            f"{address} does not answer at all within {timeout_s:g} s: a firewall or a security "
            "group drops the packets, or the machine is off; let TCP through to that port",
            code="PS209",
        )
    raise Unreachable(
        f"there is no way to {address}: {last.strerror or last}; check the network and the address",
        code="PS209",
    )


def _greet(
    connection: socket.socket,
    address: str,
    found: list[Any],
    security: Security,
    peer: Role,
    timeout_s: float,
) -> str:
    """Starts to speak as a client; describes the protocol that both sides agree on."""
    if not security.encrypted:
        answer = _ask(connection, address, timeout_s)
        if _is_http2(answer):
            return "plaintext, as here"
        if _speaks_tls(address, found, timeout_s):
            raise AccessDenied(
                f"{address} wants TLS, and this process has no certificates; say --certs DIR with "
                "the job's directory",
                code="PS331",
            )
        raise _something_else(address, answer)
    try:
        return _handshake(connection, address, security, peer, timeout_s)
    except ssl.SSLCertVerificationError as error:
        raise _untrusted(address, security, peer, error) from None
    except TimeoutError:
        raise _no_word(address, timeout_s) from None
    except (ssl.SSLError, ConnectionError):
        with _connect(address, found, timeout_s) as again:
            answer = _ask(again, address, timeout_s)
        if _is_http2(answer):
            raise AccessDenied(
                f"{address} speaks plaintext, and this process wants TLS (--certs "
                f"{security.directory}); start the other with --certs, too",
                code="PS332",
            ) from None
        raise _something_else(address, answer) from None


def _handshake(
    connection: socket.socket, address: str, security: Security, peer: Role, timeout_s: float
) -> str:
    """Does a TLS handshake and reads the server's first frame, since a server rejects a client's
    certificate only after the handshake. Raises ssl.SSLError and OSError, too."""
    directory, role = security.directory, security.role
    assert directory is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(directory / CA_CERTIFICATE)
    if role is not None and not security.by_token:
        context.load_cert_chain(directory / certificate_name(role), directory / key_name(role))
    name = server_name(security.job, peer)
    with context.wrap_socket(connection, server_hostname=name) as encrypted:
        encrypted.settimeout(timeout_s)
        try:
            answer = encrypted.recv(_FRAME_HEADER)
        except (ssl.SSLEOFError, ConnectionError):
            answer = b""
        except ssl.SSLError as error:
            if isinstance(error, TimeoutError) or "ALERT" not in (error.reason or ""):
                raise
            answer = b""
        if not answer:
            raise _unaccepted(address, security)
        if not _is_http2(answer):
            raise _something_else(address, answer)
        return f"{encrypted.version()}, {address} is the {peer} of job {security.job}"


def _unaccepted(address: str, security: Security) -> AccessDenied:
    """Returns the error if the peer hangs up after it has seen the credentials of this process."""
    if security.by_token:
        return AccessDenied(
            f"{address} hangs up on this process, which shows a token and no certificate: its job "
            "may want certificates; leave --token-file out, and say --certs with those of the job",
            code="PS334",
        )
    return AccessDenied(
        f"{address} does not accept the certificate of this process ({security.directory}): it is "
        "of another authority or has expired; copy the files of the job, or `coordinator certs "
        "renew` them",
        code="PS334",
    )


def _untrusted(
    address: str, security: Security, peer: Role, error: ssl.SSLCertVerificationError
) -> AccessDenied:
    """Returns the error if this process rejects the certificate of the peer."""
    if error.verify_code in _NOT_YET_OR_EXPIRED:
        return AccessDenied(
            f"the certificate of {address} has expired, or is not valid yet; `coordinator certs "
            "renew` it there, and compare the clocks of both machines",
            code="PS335",
        )
    if error.verify_code in _OTHER_NAME:
        return AccessDenied(
            f"{address} is not the {peer} of job {security.job}: its certificate is of another "
            "role or job; check the address, and --certs",
            code="PS336",
        )
    why = f"cannot be trusted: {error.verify_message}"
    if error.verify_code in _WRONG_ISSUER:
        why = (
            f"was not issued by the authority in {security.directory}; give both the files that "
            "one `coordinator certs init` made"
        )
    return AccessDenied(f"the certificate of {address} {why}", code="PS333")


def _ask(connection: socket.socket, address: str, timeout_s: float) -> bytes:
    """Returns a server's first bytes to a plaintext HTTP/2 client; empty if it hangs up."""
    try:
        connection.sendall(_HELLO)
        return connection.recv(_FRAME_HEADER)
    except TimeoutError:
        raise _no_word(address, timeout_s) from None
    except OSError:
        return b""


def _speaks_tls(address: str, found: list[Any], timeout_s: float) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent
    try:
        with _connect(address, found, timeout_s) as connection, context.wrap_socket(connection):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # a peer that sends an alert speaks TLS
    except (OSError, PsError):
        return False


def _is_http2(answer: bytes) -> bool:
    """Whether ``answer`` begins with a settings frame, as every HTTP/2 server's does."""
    return len(answer) > 3 and answer[3] == _SETTINGS


def _something_else(address: str, answer: bytes) -> PsError:
    if not answer:  # such as a proxy whose server is down
        return Unreachable(
            f"{address} takes connections and hangs up: what is behind it may be away, or it is "
            "something else; look at its log, and check the port",
            code="PS213",
        )
    return InvalidArgument(
        f"what listens at {address} is not of this software (it says "
        f"{answer.decode(errors='replace')!r}); check the port",
        code="PS212",
    )


def _no_word(address: str, timeout_s: float) -> Unreachable:
    return Unreachable(
        f"{address} takes connections, but says nothing within {timeout_s:g} s: it is starting, "
        "stopped or overloaded, or it is something else; look at its log",
        code="PS213",
    )
