"""All RPCs of both services × all who may not call them: refused, and nothing has changed.

Real servers, real TLS, real engines. Requests are such that they change something where they are
let through, which the last test of each service proves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from coordinator.status import write_status
from coordinator.store import Store
from pserver.server import ShardServer
from psrpc.channel import CHANNEL_OPTIONS
from psrpc.identity import Role, server_name
from psrpc.permissions import PERMISSIONS
from psrpc.security import Security
from tests.coordinator.parts import make_run, serving
from tests.pserver.shards import engine_of
from tests.security.conftest import JOB, SEEN
from tests.security.forgery import Forgery, Pair, read_pair
from tests.security.rpcs import COORDINATOR, PLAN, SHARD, Rpc

DENIED = grpc.StatusCode.PERMISSION_DENIED
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED

REFUSED = {UNAVAILABLE: "—", UNAUTHENTICATED: "?", DENIED: "✗"}
"""As the report has it."""


@dataclass(frozen=True)
class Target:
    """A server that is attacked.

    Attributes:
        role: its own.
        rpcs: what it answers.
        digest: of all that calls can change.
    """

    address: str
    role: Role
    rpcs: list[Rpc]
    digest: Callable[[], str]


@pytest.fixture(scope="module")
def coordinator(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    run = make_run(tmp_path_factory.mktemp("run"))
    security = Security.from_options(Role.COORDINATOR, certs)
    with serving(run, security=security) as served:

        def digest() -> str:
            status = write_status(served.course).SerializeToString(deterministic=True)
            with Store(run.run_dir / "ledger.sqlite") as store:
                known = (store.incarnations("shard"), store.incarnations("worker"))
            return hashlib.sha256(status + repr(known).encode()).hexdigest()

        yield Target(served.address, Role.COORDINATOR, COORDINATOR, lambda: served.do(digest))


@pytest.fixture(scope="module")
def shard(certs: Path) -> Iterator[Target]:
    engine = engine_of(PLAN)
    security = Security.from_options(Role.SHARD, certs)
    with ShardServer(0, "127.0.0.1:0", security=security) as server:
        server.open(engine)

        def digest() -> str:
            found = repr((engine.report(), engine.applied().to_epochs()))
            return hashlib.sha256(found.encode()).hexdigest()

        yield Target(f"127.0.0.1:{server.port}", Role.SHARD, SHARD, digest)


@pytest.fixture(params=["coordinator", "shard"])
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(request.param)
    return found


def channel_to(target: Target, ca: bytes, pair: Pair | None) -> grpc.Channel:
    """One that expects the right server and shows any certificate, or none."""
    name = ("grpc.ssl_target_name_override", server_name(JOB, target.role))
    credentials = grpc.ssl_channel_credentials(ca, *(pair or (None, None)))
    return grpc.secure_channel(target.address, credentials, [*CHANNEL_OPTIONS, name])


def assert_refused(
    target: Target,
    who: str,
    channel: grpc.Channel,
    rpcs: list[Rpc],
    code: grpc.StatusCode,
    words: str = "",
) -> None:
    """Calls all of ``rpcs``, as ``who``."""
    before = target.digest()
    with channel:
        for rpc in rpcs:
            found, details = rpc.call(channel)
            assert (found, words in details) == (code, True), (str(rpc), found, details)
    assert target.digest() == before
    for rpc in rpcs:
        SEEN[rpc.name, who] = REFUSED[code]


def test_every_rpc_is_in_the_table_and_nothing_else() -> None:
    reflection = {name for name in PERMISSIONS if name.startswith("/grpc.reflection.")}
    assert {rpc.name for rpc in COORDINATOR + SHARD} | reflection == set(PERMISSIONS)


def test_plaintext_to_a_tls_port(target: Target) -> None:
    channel = grpc.insecure_channel(target.address, CHANNEL_OPTIONS)
    assert_refused(target, "plaintext", channel, target.rpcs, UNAVAILABLE)


def test_no_certificate(target: Target, certs: Path) -> None:
    channel = channel_to(target, (certs / "ca.crt").read_bytes(), None)
    assert_refused(target, "no certificate", channel, target.rpcs, UNAVAILABLE)


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("of_other_authority", UNAVAILABLE, ""),
        ("expired", UNAVAILABLE, ""),
        ("of_other_job", DENIED, "a worker of job huge calls"),
        ("of_nobody", UNAUTHENTICATED, "names no role of job tiny"),
    ],
)
def test_a_certificate_that_is_not_right(
    target: Target, certs: Path, forgery: Forgery, kind: str, code: grpc.StatusCode, words: str
) -> None:
    pair: Pair = getattr(forgery, kind)()
    channel = channel_to(target, (certs / "ca.crt").read_bytes(), pair)
    who = kind.replace("_", " ")
    assert_refused(target, who, channel, target.rpcs, code, words)


@pytest.mark.parametrize("role", Role)
def test_a_wrong_role(target: Target, certs: Path, role: Role) -> None:
    forbidden = [rpc for rpc in target.rpcs if role not in PERMISSIONS[rpc.name]]
    channel = channel_to(target, (certs / "ca.crt").read_bytes(), read_pair(certs, role))
    assert_refused(target, role, channel, forbidden, DENIED, f"a {role} may not call")


def test_the_right_roles_are_let_through(target: Target, certs: Path) -> None:
    """And what they ask for does change something: the digests above would have shown it."""
    before = target.digest()
    for role in Role:
        channel = channel_to(target, (certs / "ca.crt").read_bytes(), read_pair(certs, role))
        with channel:
            for rpc in target.rpcs:
                if role in PERMISSIONS[rpc.name]:
                    code, details = rpc.call(channel)
                    assert "may not call" not in details, (str(rpc), role)
                    assert code not in (DENIED, UNAUTHENTICATED), (str(rpc), role, details)
                    SEEN[rpc.name, role] = "✓" if code != UNIMPLEMENTED else "∅"
    assert target.digest() != before
