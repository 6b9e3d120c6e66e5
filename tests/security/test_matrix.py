"""All RPCs of both services × all who may not call them: refused, and nothing has changed.

Real servers, real TLS, real engines. Requests are such that they change something where they are
let through, which the last test of each service proves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from psrpc.security.credentials import Security
from psrpc.security.identity import PERMISSIONS, Role
from tests.security.conftest import SEEN
from tests.security.forgery import Forgery, Pair, read_pair
from tests.security.matrix import document, expected, symbol, when_let_through
from tests.security.rpcs import COORDINATOR, SHARD
from tests.security.targets import (
    Target,
    assert_refused,
    coordinator_target,
    note,
    shard_target,
)

MATRIX = Path(__file__).resolve().parents[2] / "docs" / "matrix.md"

DENIED = grpc.StatusCode.PERMISSION_DENIED
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def coordinator(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    security = Security.from_options(Role.COORDINATOR, certs)
    with coordinator_target(security, tmp_path_factory.mktemp("run")) as target:
        yield target


@pytest.fixture(scope="module")
def shard(certs: Path) -> Iterator[Target]:
    with shard_target(Security.from_options(Role.SHARD, certs)) as target:
        yield target


@pytest.fixture(params=["coordinator", "shard"])
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(request.param)
    return found


def refused(
    target: Target, who: str, channel: grpc.Channel, code: grpc.StatusCode, words: str = ""
) -> None:
    """For every RPC."""
    assert_refused(target, who, channel, target.rpcs, code, SEEN.roles, words)


def test_every_rpc_is_in_the_table_and_nothing_else() -> None:
    assert {rpc.name for rpc in COORDINATOR + SHARD} == set(PERMISSIONS)


def test_the_document_says_what_the_table_of_permissions_says(
    request: pytest.FixtureRequest,
) -> None:
    """And the tests below, that servers answer so."""
    if request.config.getoption("--report"):
        pytest.skip("it is being written")
    written = document(*expected(rpc.name for rpc in COORDINATOR + SHARD))
    assert MATRIX.read_text() == written, "say `make matrix`"


def test_a_server_answers_no_service_that_is_not_here(target: Target, certs: Path) -> None:
    channel = target.channel((certs / "ca.crt").read_bytes(), read_pair(certs, Role.OPERATOR))
    with channel:
        answered = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert answered == {rpc.name.split("/")[1] for rpc in target.rpcs}


def test_plaintext_to_a_tls_port(target: Target) -> None:
    refused(target, "plaintext", target.plaintext(), UNAVAILABLE)


def test_no_certificate(target: Target, certs: Path) -> None:
    channel = target.channel((certs / "ca.crt").read_bytes(), None)
    refused(target, "no certificate", channel, UNAVAILABLE)


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("of_other_authority", UNAVAILABLE, ""),
        ("expired", UNAVAILABLE, ""),
        ("of_other_job", DENIED, "a worker of job huge calls"),
        ("of_no_role", UNAUTHENTICATED, "names no role of job tiny"),
        ("revoked", UNAUTHENTICATED, "was revoked"),
    ],
)
def test_a_certificate_that_is_not_right(
    target: Target, certs: Path, forgery: Forgery, kind: str, code: grpc.StatusCode, words: str
) -> None:
    pair: Pair = getattr(forgery, kind)()
    channel = target.channel((certs / "ca.crt").read_bytes(), pair)
    refused(target, kind.replace("_", " "), channel, code, words)


@pytest.mark.parametrize("role", Role)
def test_a_wrong_role(target: Target, certs: Path, role: Role) -> None:
    forbidden = [rpc for rpc in target.rpcs if role not in PERMISSIONS[rpc.name]]
    channel = target.channel((certs / "ca.crt").read_bytes(), read_pair(certs, role))
    words = f"{role.one} may not call"
    assert_refused(target, role, channel, forbidden, DENIED, SEEN.roles, words)


def test_the_right_roles_are_let_through(target: Target, certs: Path) -> None:
    """And what they ask for does change something: the digests above would have shown it."""
    before = target.digest()
    for role in Role:
        with target.channel((certs / "ca.crt").read_bytes(), read_pair(certs, role)) as channel:
            for rpc in target.rpcs:
                if role in PERMISSIONS[rpc.name]:
                    answer = rpc.call(channel)
                    assert symbol(answer) == when_let_through(rpc.name), (str(rpc), role, answer)
                    note(SEEN.roles, rpc, role, answer)
    assert target.digest() != before
