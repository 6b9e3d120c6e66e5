"""Servers' knowledge of the certificate that a caller shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from psrpc.net.channel import bind, make_server, open_channel
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import PERMISSIONS, Identity, Role
from psrpc.security.peer_certificate import NO_CERTIFICATE, Peer, peer_of, peer_of_der, peer_of_pem
from tests.security.conftest import JOB
from tests.security.forgery import forge

CHECK = "/grpc.health.v1.Health/Check"


@contextmanager
def asked(security: Security, client: Security) -> Iterator[Peer]:
    """The caller as a real server's handler sees it."""
    seen: list[Peer] = []

    def check(request: bytes, context: Any) -> bytes:
        seen.append(peer_of(context))
        return request

    assert CHECK in PERMISSIONS
    server = make_server(1, (), security)
    method = grpc.unary_unary_rpc_method_handler(check)
    service, _, name = CHECK[1:].partition("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: method}),)
    )
    port = bind(server, "127.0.0.1:0", security)
    server.start()
    try:
        with open_channel(f"127.0.0.1:{port}", client, Role.SHARD) as channel:
            untyped: Any = channel
            assert untyped.unary_unary(CHECK)(b"", timeout=20) == b""
        yield seen[0]
    finally:
        server.stop(0).wait()


def test_a_caller_is_known_by_its_certificate(certs: Path) -> None:
    pem = (certs / "worker.crt").read_bytes()
    certificate = x509.load_pem_x509_certificate(pem)
    expected = Peer(
        identity=Identity(JOB, Role.WORKER),
        name="worker",
        fingerprint=certificate.fingerprint(SHA256()).hex(),
        serial=f"{certificate.serial_number:x}",
        not_after=certificate.not_valid_after_utc,
    )
    shard = Security.from_options(Role.SHARD, certs)
    with asked(shard, Security.from_options(Role.WORKER, certs)) as peer:
        assert peer == expected
        assert (peer.role, peer.shown) == (Role.WORKER, True)


def test_a_caller_without_a_certificate_has_no_fingerprint(certs: Path, tmp_path: Path) -> None:
    with asked(PLAINTEXT, PLAINTEXT) as peer:
        assert peer == NO_CERTIFICATE
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef" * 2)
    by_token = Security.from_options(Role.SHARD, certs, token)
    with asked(by_token, Security.from_options(Role.WORKER, certs, token)) as peer:
        assert (peer.role, peer.fingerprint, peer.shown) == (None, "", False)


def test_it_is_parsed_once(certs: Path) -> None:
    pem = (certs / "reader.crt").read_bytes()
    assert peer_of_pem(pem) is peer_of_pem(bytes(bytearray(pem)))


def test_both_forms_say_the_same(certs: Path) -> None:
    import ssl

    pem = (certs / "reader.crt").read_bytes()
    assert peer_of_der(ssl.PEM_cert_to_DER_cert(pem.decode())) == peer_of_pem(pem)


def test_one_that_names_no_role(certs: Path) -> None:
    for uris in (
        (),
        ("pserver://tiny/janitor",),
        ("pserver://tiny/worker", "pserver://tiny/shard"),
    ):
        peer = peer_of_pem(forge(certs, *uris, dns="x.pserver")[1])
        assert (peer.identity, peer.shown) == (None, True)
