"""Access to ``/metrics`` where others than this machine can reach it."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily

from coordinator.certificates.authority import make_certificates, renew_certificates
from coordinator.certificates.members import revoke
from psrpc.core.errors import InvalidArgument
from psrpc.metrics.exporter import Family, MetricsServer
from psrpc.security.certificates import certificate_name, key_name
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Identity, Role, may_read_metrics, server_name
from tests.security.conftest import JOB
from tests.security.test_certificates import NOW

EVERYWHERE = "0.0.0.0:0"
WAIT_S = 30.0
ASKED = b"GET /metrics HTTP/1.0\r\n\r\n"


def families() -> Iterator[Family]:
    yield GaugeMetricFamily("pserver_version", "Updates.", value=7)


def connected(server: MetricsServer) -> socket.socket:
    port = int(server.address.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), WAIT_S)


def read(connection: socket.socket) -> bytes:
    connection.sendall(ASKED)
    found = b""
    while more := connection.recv(1 << 16):
        found += more
    return found


def get(
    server: MetricsServer,
    certs: Path,
    of: Role,
    reader: Path | None,
    role: Role = Role.OPERATOR,
) -> bytes:
    """The answer of the role ``of`` to a reader with the certificate of ``role``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certs / "ca.crt")
    if reader is not None:
        name, key = certificate_name(role), key_name(role)
        context.load_cert_chain(reader / name, reader / key)
    with context.wrap_socket(connected(server), server_hostname=server_name(JOB, of)) as tls:
        return read(tls)


@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.SHARD, Role.WORKER])
def test_elsewhere_it_is_https_for_the_job(certs: Path, role: Role) -> None:
    with MetricsServer(EVERYWHERE, families, Security.from_options(role, certs)) as server:
        assert b"\npserver_version 7.0\n" in get(server, certs, role, certs)


@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.SHARD, Role.WORKER])
def test_which_roles_may_read_it(certs: Path, role: Role) -> None:
    """And a process may ask for its own: that is what `worker healthcheck` does."""
    with MetricsServer(EVERYWHERE, families, Security.from_options(role, certs)) as server:
        answers = {reader: get(server, certs, role, certs, reader) for reader in Role}
    read = {reader for reader, answer in answers.items() if b"pserver_version" in answer}
    assert read == {Role.OPERATOR, Role.READER, role}
    for reader in set(Role) - read:
        status, _, body = answers[reader].partition(b"\r\n")
        assert status.split()[1] == b"403"
        said = f"a {reader} of job {JOB} may not read the metrics of a {role} of job {JOB}"
        assert said.encode() in body


def test_a_certificate_without_a_role_and_one_of_another_job() -> None:
    shard = Identity(JOB, Role.SHARD)
    assert may_read_metrics(Identity(JOB, Role.READER), shard)
    assert not may_read_metrics(Identity("other", Role.READER), shard)
    assert not may_read_metrics(None, shard)


def test_a_revoked_reader_learns_nothing(mine: Path) -> None:
    with MetricsServer(EVERYWHERE, families, Security.from_options(Role.SHARD, mine)) as server:
        assert b"pserver_version" in get(server, mine, Role.SHARD, mine, Role.READER)
        revoke(mine, "reader", NOW)
        answer = get(server, mine, Role.SHARD, mine, Role.READER)
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"PS304: " in answer
        assert b"pserver_version" in get(server, mine, Role.SHARD, mine)


def test_others_learn_nothing(certs: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other", JOB, NOW)
    security = Security.from_options(Role.SHARD, certs)
    with MetricsServer(EVERYWHERE, families, security) as server:
        for reader in (None, tmp_path / "other"):
            # By an alert, or by hanging up.
            with contextlib.suppress(OSError):
                assert get(server, certs, Role.SHARD, reader) == b""
        with connected(server) as plain, contextlib.suppress(OSError):
            assert b"HTTP" not in read(plain)


def test_certificates_are_replaced_while_it_runs(certs: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(certs, tmp_path / "mine"))
    security = Security.from_options(Role.SHARD, mine)
    with MetricsServer(EVERYWHERE, families, security) as server:
        assert get(server, mine, Role.SHARD, mine)
        make_certificates(tmp_path / "new", JOB, NOW)
        shutil.copytree(tmp_path / "new", mine, dirs_exist_ok=True)
        assert b"pserver_version" in get(server, mine, Role.SHARD, mine)
        renew_certificates(mine, NOW)
        assert b"pserver_version" in get(server, mine, Role.SHARD, mine)


def test_it_says_until_when_the_certificate_is_valid(mine: Path) -> None:
    security = Security.from_options(Role.SHARD, mine)
    found = []
    with MetricsServer(EVERYWHERE, families, security) as server:
        for days in (20, 40):
            renew_certificates(mine, NOW, days=days)
            answer = get(server, mine, Role.SHARD, mine).decode()
            [expiry] = re.findall(
                r"^psrpc_certificate_expiry_timestamp_seconds (\S+)", answer, re.M
            )
            found.append(float(expiry) - NOW.timestamp())
    assert found == [pytest.approx(days * 86400, abs=1) for days in (20, 40)]


@pytest.mark.parametrize("address", [EVERYWHERE, ":0", "[::]:0", "192.0.2.1:0"])
def test_in_plaintext_it_stays_on_this_machine(address: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--metrics at .*--certs DIR .* or --insecure") as e:
        MetricsServer(address, families, PLAINTEXT).start()
    assert e.value.code == "PS321"


def test_unless_it_was_said_to_be_insecure() -> None:
    with (
        MetricsServer(EVERYWHERE, families, Security(insecure=True)) as server,
        connected(server) as plain,
    ):
        assert b"\npserver_version 7.0\n" in read(plain)


def test_on_loopback_it_is_plain_with_certificates_too(certs: Path) -> None:
    security = Security.from_options(Role.SHARD, certs)
    with MetricsServer("127.0.0.1:0", families, security) as server, connected(server) as plain:
        assert b"\npserver_version 7.0\n" in read(plain)


def test_a_token_is_for_grpc_alone(certs: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef" * 2)
    security = Security.from_options(Role.SHARD, certs, token)
    with pytest.raises(InvalidArgument, match="which --token-file does without") as e:
        MetricsServer(EVERYWHERE, families, security).start()
    assert e.value.code == "PS322"
    with MetricsServer("127.0.0.1:0", families, security) as server, connected(server) as plain:
        assert b"pserver_version" in read(plain)
