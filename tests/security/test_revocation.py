"""Certificates that count no more: revoked or expired, at the next call and in calls under way."""

from __future__ import annotations

import asyncio
import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from coordinator.certificates.authority import make_certificates
from coordinator.certificates.members import add_member, earliest_end, renew_all, revoke
from coordinator.cli.__main__ import main
from psrpc.core.errors import AccessDenied, InvalidArgument
from psrpc.net import channel as channel_module
from psrpc.net.channel import bind, make_aio_server, make_server, open_channel
from psrpc.security.authorization import AioAuthorizationInterceptor, AuthorizationInterceptor
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.security.peer_certificate import LiveCalls, Peer, peer_of_pem
from psrpc.security.revocation import CRL, LOOK, read_revocations
from psrpc.wire.status import error_from_rpc
from tests.security.conftest import JOB
from tests.security.forgery import forge
from tests.security.test_certificates import NOW, put
from tests.security.test_peers import shard_of, status

LOOK_S = 0.01
WAIT_S = 30.0
SHARD_STREAM = "/psrpc.v1.ParameterServer/Exchange"
WATCH = "/psrpc.v1.Coordinator/Watch"


def peer_in(directory: Path, role: Role = Role.WORKER) -> Peer:
    return peer_of_pem((directory / f"{role}.crt").read_bytes())


def use(directory: Path, role: Role = Role.WORKER) -> Security:
    return Security.from_options(role, directory)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that look at their calls a hundred times a second."""
    for cls in (AuthorizationInterceptor, AioAuthorizationInterceptor):
        made = functools.partial(cls, look_s=LOOK_S)
        monkeypatch.setattr(channel_module, cls.__name__, made)


# -- certificates of one machine -----------------------------------------------------------------


def test_a_machine_gets_a_certificate_of_its_own(mine: Path) -> None:
    made = add_member(mine, Role.WORKER, "gpu-7", NOW)
    assert sorted(path.name for path in made.iterdir()) == ["ca.crt", "worker.crt", "worker.key"]
    peer = peer_in(made)
    assert (peer.name, peer.identity) == ("gpu-7", peer_in(mine).identity)
    assert peer_in(mine).name == "worker"
    with shard_of(use(mine, Role.SHARD)) as address, open_channel(address, use(made)) as channel:
        assert status(channel) == grpc.StatusCode.OK


def test_a_worker_that_hosts_parameters_has_two_that_end_together(mine: Path) -> None:
    made = add_member(mine, Role.WORKER, "gpu-7", NOW, days=9, host=True)
    names = ["ca.crt", "shard.crt", "shard.key", "worker.crt", "worker.key"]
    assert sorted(path.name for path in made.iterdir()) == names
    both = [peer_in(made, role) for role in (Role.WORKER, Role.SHARD)]
    assert [peer.name for peer in both] == ["gpu-7"] * 2
    renew_all(mine, NOW)
    assert earliest_end(mine) > NOW + timedelta(days=9)
    new = [peer_in(made, role) for role in (Role.WORKER, Role.SHARD)]
    assert set(revoke(mine, "gpu-7", NOW)) == {peer.serial for peer in both + new}
    with pytest.raises(InvalidArgument, match=r"--host is for a worker, .* not for a shard"):
        add_member(mine, Role.SHARD, "gpu-7", NOW, host=True)


@pytest.mark.parametrize("name", ["worker", "reader", "", "-a", "a/b", "../x", "A", "x" * 64])
def test_names_that_no_machine_may_have(mine: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="certificate name"):
        add_member(mine, Role.WORKER, name, NOW)


def test_it_is_renewed_with_the_others_unless_it_was_revoked(mine: Path) -> None:
    kept, ended = (add_member(mine, Role.WORKER, name, NOW, days=9) for name in ("a", "b"))
    assert earliest_end(mine) < NOW + timedelta(days=10)
    before = peer_in(kept), peer_in(ended)
    revoke(mine, "b", NOW)
    with pytest.raises(InvalidArgument, match="is there already"):
        add_member(mine, Role.WORKER, "a", NOW)
    renew_all(mine, NOW)
    assert peer_in(kept).name == "a"
    assert peer_in(kept) != before[0]
    assert peer_in(ended) == before[1]
    assert peer_in(add_member(mine, Role.WORKER, "b", NOW)) != before[1]


# -- the list ------------------------------------------------------------------------------------


def test_the_list_names_all_that_bear_a_name(mine: Path) -> None:
    """Renewed ones too: they are valid until they expire."""
    made = add_member(mine, Role.WORKER, "a", NOW)
    first = peer_in(made).serial
    renew_all(mine, NOW)
    second = peer_in(made).serial
    assert set(revoke(mine, "a", NOW)) == {first, second}
    assert revoke(mine, "a", NOW) == []
    shared = peer_in(mine).serial
    assert revoke(mine, shared, NOW) == [shared]
    found = read_revocations(mine / CRL, authorities(mine))
    assert found.number == 2
    assert found.serials == {first, second, shared}
    assert (made / CRL).read_bytes() == (mine / CRL).read_bytes()
    assert (mine / CRL).stat().st_mode & 0o777 == 0o600


def authorities(directory: Path) -> list[Any]:
    from psrpc.security.certificates import authorities_of

    return authorities_of(directory)


def test_certificates_of_an_earlier_version_are_in_no_register(mine: Path) -> None:
    (mine / "issued.jsonl").unlink()
    assert revoke(mine, "reader", NOW) == [peer_in(mine, Role.READER).serial]


@pytest.mark.parametrize("which", ["stranger", "xyz", "0", "-1", ""])
def test_certificates_that_cannot_be_revoked(mine: Path, which: str) -> None:
    with pytest.raises(InvalidArgument, match="has no certificate called") as caught:
        revoke(mine, which, NOW)
    assert caught.value.code == "PS318"
    assert not (mine / CRL).exists()


def test_a_list_that_cannot_be_read_loses_nothing_of_it(mine: Path) -> None:
    (mine / CRL).write_text("garbage")
    with pytest.raises(InvalidArgument, match="holds no revocation lists in PEM form"):
        revoke(mine, "worker", NOW)
    assert (mine / CRL).read_text() == "garbage"


def test_the_commands(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "add", str(mine), "worker", "gpu-7", "--days", "30"]) == 0
    assert "worker-gpu-7: a certificate for gpu-7 alone, for 30 days" in capsys.readouterr().out
    peer = peer_in(mine / "worker-gpu-7")
    line = f"name gpu-7  serial {peer.serial}  sha256 {peer.fingerprint}"
    assert main(["certs", "show", str(mine)]) == 0
    assert f"{line}\n" in capsys.readouterr().out + "\n"
    assert main(["certs", "renew", str(mine)]) == 0
    assert main(["certs", "revoke", str(mine), "gpu-7"]) == 0
    said = capsys.readouterr().out
    assert f"revoked: serial {peer.serial}" in said
    assert "copy " in said
    assert main(["certs", "show", str(mine)]) == 0
    shown = capsys.readouterr().out
    assert f"{line}  REVOKED" in shown
    assert "renewed since" in shown
    assert main(["certs", "revoke", str(mine), "gpu-7"]) == 0
    assert "gpu-7 was revoked before" in capsys.readouterr().out
    assert main(["certs", "revoke", str(mine), "gpu-8"]) == 2


# -- who reads it --------------------------------------------------------------------------------


def test_a_revoked_certificate_is_refused_and_all_others_are_not(mine: Path) -> None:
    bad, good = (add_member(mine, Role.WORKER, name, NOW) for name in ("bad", "good"))
    with (
        shard_of(use(mine, Role.SHARD)) as address,
        open_channel(address, use(bad)) as revoked,
        open_channel(address, use(good)) as other,
        open_channel(address, use(mine)) as shared,
    ):
        assert status(revoked) == grpc.StatusCode.OK
        revoke(mine, "bad", NOW)
        # Of a connection that stands, and without a restart.
        assert status(revoked) == grpc.StatusCode.UNAUTHENTICATED
        assert (status(other), status(shared)) == (grpc.StatusCode.OK, grpc.StatusCode.OK)


def test_the_error_of_a_revoked_caller(mine: Path) -> None:
    security = use(mine, Role.SHARD)
    peer = peer_in(mine)
    assert security.objection(peer) is None
    revoke(mine, "worker", NOW)
    objection = security.objection(peer)
    assert isinstance(objection, AccessDenied)
    assert objection.code == "PS304"
    assert f"worker (serial {peer.serial}) was revoked" in str(objection)


def lists(mine: Path, other: Path) -> dict[str, bytes | None]:
    """Files that no process may take in place of the list that it has."""
    make_certificates(other, JOB, NOW)
    revoke(other, "reader", NOW)
    empty = (mine / CRL).read_bytes()
    return {
        "garbage": b"garbage",
        "nothing": b"",
        "another authority's": (other / CRL).read_bytes(),
        "cut short": empty[:-80],
        "two": empty * 2,
        "gone": None,
    }


@pytest.mark.parametrize(
    "kind", ["garbage", "nothing", "another authority's", "cut short", "two", "gone", "older"]
)
def test_the_last_good_list_stays_in_force(
    mine: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    revoke(mine, "operator", NOW)
    older = (mine / CRL).read_bytes()
    revoke(mine, "worker", NOW)
    security, peer = use(mine, Role.SHARD), peer_in(mine)
    assert security.objection(peer)
    content = older if kind == "older" else lists(mine, tmp_path / "other")[kind]
    (mine / CRL).unlink()
    if content is not None:
        (mine / CRL).write_bytes(content)
    capsys.readouterr()
    assert security.objection(peer)
    assert "REVOCATIONS NOT READ" in "".join(capsys.readouterr())
    # And goes on with the next one that is good.
    (mine / CRL).unlink(missing_ok=True)
    (mine / CRL).write_bytes(older)
    for who in ("worker", "reader"):
        revoke(mine, who, NOW)
    assert security.objection(peer_in(mine, Role.READER))


# -- the list of the run -------------------------------------------------------------------------


def sharing(
    directory: Path, run_dir: Path, role: Role = Role.SHARD, keeps: bool = False
) -> Security:
    """A process that starts: it reads the list beside its certificates, then that of its run."""
    security = use(directory, role)
    security.revocations.share(run_dir, keeps)
    return security


@pytest.mark.parametrize("kind", ["gone", "older"])
@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.SHARD])
def test_a_process_that_starts_with_an_old_list_takes_the_runs(
    mine: Path, tmp_path: Path, kind: str, role: Role, capsys: pytest.CaptureFixture[str]
) -> None:
    revoke(mine, "operator", NOW)
    older, peer = (mine / CRL).read_bytes(), peer_in(mine)
    revoke(mine, "worker", NOW)
    sharing(mine, tmp_path, Role.COORDINATOR, keeps=True)
    assert (tmp_path / CRL).stat().st_mode & 0o777 == 0o600
    (mine / CRL).unlink()
    if kind == "older":
        (mine / CRL).write_bytes(older)
    assert use(mine, role).objection(peer) is None
    capsys.readouterr()
    assert sharing(mine, tmp_path, role).objection(peer)
    said = "".join(capsys.readouterr())
    assert "the list of the run is in force" in said
    assert f"crl.pem is {'gone' if kind == 'gone' else 'edition 1 of the list'}" in said


def test_shards_take_what_the_coordinator_has_read(mine: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "shard"
    shutil.copytree(mine, theirs)
    now = [datetime.now(UTC)]

    def process(role: Role, directory: Path) -> Security:
        found = Security(role, directory, now=lambda: now[0], start=lambda look: look())
        found.revocations.share(tmp_path, keeps=role is Role.COORDINATOR)
        return found

    coordinator, shard = process(Role.COORDINATOR, mine), process(Role.SHARD, theirs)
    revoke(mine, "worker", NOW)
    assert coordinator.objection(peer_in(mine))
    assert shard.objection(peer_in(mine)) is None
    now[0] += LOOK
    assert coordinator.objection(peer_in(mine))
    assert shard.objection(peer_in(mine))
    assert not (theirs / CRL).exists()


def test_calls_do_not_wait_for_a_run_directory_that_hangs(mine: Path, tmp_path: Path) -> None:
    now = [datetime.now(UTC)]
    begun: list[Callable[[], None]] = []
    shard = Security(Role.SHARD, mine, now=lambda: now[0], start=begun.append)
    shard.revocations.share(tmp_path)
    for _ in range(3):
        now[0] += LOOK
        assert shard.objection(peer_in(mine)) is None
    assert len(begun) == 1, "no other look begins while one hangs"
    begun.pop()()
    now[0] += LOOK
    assert shard.objection(peer_in(mine)) is None
    assert len(begun) == 1


@pytest.mark.parametrize("kind", ["garbage", "another authority's"])
def test_a_list_of_the_run_that_cannot_be_used_is_replaced(
    mine: Path, tmp_path: Path, kind: str
) -> None:
    revoke(mine, "worker", NOW)
    content = lists(mine, tmp_path / "other")[kind]
    assert content is not None
    (tmp_path / CRL).write_bytes(content)
    assert sharing(mine, tmp_path, keeps=True).objection(peer_in(mine))
    assert (tmp_path / CRL).read_bytes() == (mine / CRL).read_bytes()


@pytest.mark.parametrize("kind", ["garbage", "nothing", "another authority's", "cut short", "two"])
def test_no_server_starts_with_a_list_that_it_cannot_use(
    mine: Path, tmp_path: Path, kind: str
) -> None:
    revoke(mine, "worker", NOW)
    content = lists(mine, tmp_path / "other")[kind]
    assert content is not None
    (mine / CRL).write_bytes(content)
    for role in (Role.COORDINATOR, Role.SHARD, Role.WORKER):
        with pytest.raises(InvalidArgument) as caught:
            use(mine, role)
        assert caught.value.code == "PS317"
    use(mine, Role.OPERATOR)


def test_a_link_to_nothing_is_not_the_absence_of_a_list(mine: Path) -> None:
    (mine / CRL).symlink_to(mine / "elsewhere")
    with pytest.raises(InvalidArgument, match="there is no"):
        use(mine, Role.SHARD)


def test_a_new_authority_counts_from_one_again(mine: Path, tmp_path: Path) -> None:
    for who in ("operator", "worker"):
        revoke(mine, who, NOW)
    security = use(mine, Role.SHARD)
    make_certificates(tmp_path / "new", JOB, NOW)
    revoke(tmp_path / "new", "reader", NOW)
    shutil.copytree(tmp_path / "new", mine, dirs_exist_ok=True)
    assert security.objection(peer_in(mine, Role.READER))
    assert security.objection(peer_in(mine)) is None


# -- expiry --------------------------------------------------------------------------------------


def test_a_certificate_that_has_expired_since_is_refused(mine: Path) -> None:
    now = datetime.now(UTC)
    put(mine, Role.WORKER, *forge(mine, f"pserver://{JOB}/worker", days=1))
    security = Security(Role.SHARD, mine, now=lambda: now)
    with shard_of(security) as address, open_channel(address, use(mine)) as channel:
        assert status(channel) == grpc.StatusCode.OK
        now += timedelta(days=2)
        assert status(channel) == grpc.StatusCode.UNAUTHENTICATED
        objection = security.objection(peer_in(mine))
        assert objection is not None
        assert objection.code == "PS313"


# -- calls under way -----------------------------------------------------------------------------


@contextmanager
def streaming_shard(security: Security, method: str = SHARD_STREAM) -> Iterator[tuple[str, Any]]:
    """A server with threads whose stream stands until it is ended; and an event for that."""
    ended = threading.Event()

    def stand(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(ended.set)
        yield from requests

    server = make_server(2, (), security)
    service, _, name = method[1:].partition("/")
    handler = grpc.stream_stream_rpc_method_handler(stand)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: handler}),)
    )
    port = bind(server, "127.0.0.1:0", security)
    server.start()
    try:
        yield f"127.0.0.1:{port}", ended
    finally:
        server.stop(0).wait()


class Stream:
    """A client's side of a stream that stands."""

    def __init__(self, channel: grpc.Channel, method: str = SHARD_STREAM) -> None:
        untyped: Any = channel
        self._more: SimpleQueue[bytes | None] = SimpleQueue()
        self._more.put(b"begun")
        self._call = untyped.stream_stream(method)(iter(self._more.get, None), timeout=WAIT_S)
        assert next(self._call) == b"begun"

    def end(self) -> grpc.StatusCode:
        """Waits for the server to end it."""
        with pytest.raises(grpc.RpcError) as caught:
            next(self._call)
        self._more.put(None)
        assert error_from_rpc(caught.value, "shard").retryable, "a renewed one connects again"
        code: grpc.StatusCode = caught.value.code()
        return code

    def speaks(self) -> bool:
        self._more.put(b"more")
        return bool(next(self._call) == b"more")


@pytest.mark.usefixtures("fast")
def test_a_stream_of_a_revoked_certificate_is_ended(mine: Path) -> None:
    bad, good = (add_member(mine, Role.WORKER, name, NOW) for name in ("bad", "good"))
    with (
        streaming_shard(use(mine, Role.SHARD)) as (address, ended),
        open_channel(address, use(bad)) as revoked,
        open_channel(address, use(good)) as other,
    ):
        stands, falls = Stream(other), Stream(revoked)
        revoke(mine, "bad", NOW)
        assert falls.end() == grpc.StatusCode.CANCELLED
        assert ended.wait(WAIT_S)
        assert stands.speaks()


@pytest.mark.usefixtures("fast")
def test_a_stream_of_an_expired_certificate_is_ended(mine: Path) -> None:
    now = datetime.now(UTC)
    put(mine, Role.WORKER, *forge(mine, f"pserver://{JOB}/worker", days=1))
    security = Security(Role.SHARD, mine, now=lambda: now)
    with (
        streaming_shard(security) as (address, _),
        open_channel(address, use(mine)) as channel,
    ):
        stream = Stream(channel)
        # The files are renewed, the stream is not.
        renew_all(mine, NOW)
        later = Stream(channel)
        now += timedelta(days=2)
        assert stream.end() == grpc.StatusCode.CANCELLED
        assert later.speaks(), "the new certificate is good for a year"


@pytest.mark.usefixtures("fast")
def test_a_command_stream_of_a_revoked_certificate_is_ended(mine: Path) -> None:
    bad = add_member(mine, Role.SHARD, "bad", NOW)

    async def watch(_request: bytes, _context: Any) -> Any:
        yield b"begun"
        await asyncio.Event().wait()

    async def main() -> Any:
        security = use(mine, Role.COORDINATOR)
        server = make_aio_server((), security)
        service, _, name = WATCH[1:].partition("/")
        handler = grpc.unary_stream_rpc_method_handler(watch)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {name: handler}),)
        )
        port = bind(server, "127.0.0.1:0", security)
        await server.start()

        def call() -> grpc.RpcError:
            with open_channel(
                f"127.0.0.1:{port}", use(bad, Role.SHARD), Role.COORDINATOR
            ) as opened:
                untyped: Any = opened
                stream = untyped.unary_stream(WATCH)(b"", timeout=WAIT_S)
                assert next(stream) == b"begun"
                revoke(mine, "bad", NOW)
                with pytest.raises(grpc.RpcError) as caught:
                    next(stream)
                return caught.value

        try:
            return await asyncio.to_thread(call)
        finally:
            await server.stop(0)

    error = asyncio.run(main())
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "the certificate counts no more" in error.details()
    assert error_from_rpc(error, "coordinator").retryable


def test_calls_are_ended_once_and_only_those_of_the_caller() -> None:
    bad, good = Peer(name="bad", fingerprint="01"), Peer(name="good", fingerprint="02")
    ended: list[str] = []
    live = LiveCalls(lambda peer: AccessDenied("no") if peer is bad else None, look_s=WAIT_S)
    with (
        live.present(bad, "/a", lambda: ended.append("a")),
        live.present(good, "/b", lambda: ended.append("b")),
        live.present(Peer(), "/c", lambda: ended.append("c")),
    ):
        live.look()
        live.look()
    live.look()
    assert ended == ["a"]
