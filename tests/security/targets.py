"""Real servers with real engines that are called by those who may, and by those who may not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from coordinator.records.store import Store
from coordinator.rpc.status import write_status
from pserver.server.server import ShardServer
from psrpc.net.channel import CHANNEL_OPTIONS
from psrpc.security.credentials import Security
from psrpc.security.identity import Role, server_name
from tests.coordinator.builders import make_run, serving
from tests.pserver.shards import engine_of
from tests.security.conftest import JOB
from tests.security.forgery import Pair
from tests.security.matrix import Cell, symbol
from tests.security.rpcs import COORDINATOR, PLAN, SHARD, Answer, Rpc


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

    def channel(self, ca: bytes, pair: Pair | None) -> grpc.Channel:
        """One that expects the right server and shows any certificate, or none."""
        name = ("grpc.ssl_target_name_override", server_name(JOB, self.role))
        credentials = grpc.ssl_channel_credentials(ca, *(pair or (None, None)))
        return grpc.secure_channel(self.address, credentials, [*CHANNEL_OPTIONS, name])

    def plaintext(self) -> grpc.Channel:
        """One without TLS."""
        return grpc.insecure_channel(self.address, CHANNEL_OPTIONS)


@contextmanager
def coordinator_target(security: Security, run_dir: Path) -> Iterator[Target]:
    """A coordinator that serves the small job."""
    run = make_run(run_dir)
    with serving(run, security=security) as served:

        def digest() -> str:
            status = write_status(served.job_run).SerializeToString(deterministic=True)
            with Store(run.run_dir / "ledger.sqlite") as store:
                known = (store.incarnations("shard"), store.incarnations("worker"))
            return hashlib.sha256(status + repr(known).encode()).hexdigest()

        yield Target(served.address, Role.COORDINATOR, COORDINATOR, lambda: served.do(digest))


@contextmanager
def shard_target(security: Security) -> Iterator[Target]:
    """A shard without values."""
    engine = engine_of(PLAN)
    with ShardServer(0, "127.0.0.1:0", security=security) as server:
        server.open(engine)

        def digest() -> str:
            found = repr((engine.report(), engine.applied().to_epochs()))
            return hashlib.sha256(found.encode()).hexdigest()

        yield Target(f"127.0.0.1:{server.port}", Role.SHARD, SHARD, digest)


def assert_refused(
    target: Target,
    who: str,
    channel: grpc.Channel,
    rpcs: list[Rpc],
    code: grpc.StatusCode,
    seen: dict[Cell, str],
    words: str = "",
    **options: Any,
) -> None:
    """Calls all of ``rpcs`` as ``who``, and notes what was seen: nothing may come of it."""
    before = target.digest()
    with channel:
        for rpc in rpcs:
            answer = rpc.call(channel, **options)
            assert (answer.code, words in answer.details) == (code, True), (str(rpc), answer)
            assert answer.told == (code != grpc.StatusCode.UNAVAILABLE), (str(rpc), answer)
            note(seen, rpc, who, answer)
    assert target.digest() == before


def note(seen: dict[Cell, str], rpc: Rpc, who: str, answer: Answer) -> None:
    """Keeps what came of a call. What both servers answer, they answer alike."""
    assert seen.setdefault((rpc.name, who), symbol(answer)) == symbol(answer), (rpc.name, who)
