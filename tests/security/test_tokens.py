"""Where a token stands for every role: all RPCs × all who have none, or send it wrongly.

Each is refused before its request is read, and nothing has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from psrpc.core.errors import InvalidArgument
from psrpc.net.channel import bind, make_server, open_channel
from psrpc.security.credentials import PLAINTEXT, TOKEN_KEY, Security
from psrpc.security.identity import Role
from tests.security.conftest import SEEN
from tests.security.forgery import read_pair
from tests.security.matrix import BEARERS, NO_CONNECTION, TOKEN, symbol, when_let_through
from tests.security.targets import (
    Target,
    assert_refused,
    coordinator_target,
    note,
    shard_target,
)
from tests.security.test_peers import status

SECRET = "0123456789abcdef0123456789abcdef"

SENT: dict[str, tuple[str, ...]] = {
    "plaintext": (),
    "the token in plaintext": (f"Bearer {SECRET}",),
    "no token": (),
    "a certificate, no token": (),
    "another token": (f"Bearer {SECRET[::-1]}",),
    "the token of another scheme": (f"Basic {SECRET}",),
    "the token twice": (f"Bearer {SECRET}", f"Bearer {SECRET}"),
    TOKEN: (f"Bearer {SECRET}",),
}
"""What each caller has in the metadata of a call."""


def secret(path: Path, text: str = SECRET) -> Path:
    path.touch(0o600)
    path.write_text(text + "\n")
    return path


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return secret(tmp_path / "token")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return secret(tmp_path_factory.mktemp("token") / "token")


@pytest.fixture(scope="module")
def coordinator(
    certs: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    security = Security.from_options(Role.COORDINATOR, certs, shared)
    with coordinator_target(security, tmp_path_factory.mktemp("run")) as target:
        yield target


@pytest.fixture(scope="module")
def shard(certs: Path, shared: Path) -> Iterator[Target]:
    with shard_target(Security.from_options(Role.SHARD, certs, shared)) as target:
        yield target


@dataclass(frozen=True)
class Caller:
    """Calls a server as one of :data:`SENT`."""

    target: Target
    who: str
    certs: Path

    def channel(self) -> grpc.Channel:
        if "plaintext" in self.who:
            return self.target.plaintext()
        pair = read_pair(self.certs, Role.WORKER) if "certificate" in self.who else None
        return self.target.channel((self.certs / "ca.crt").read_bytes(), pair)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        return [(TOKEN_KEY, value) for value in SENT[self.who]]


@pytest.fixture(params=["coordinator", "shard"])
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("who", BEARERS)
def test_callers_without_a_token_are_refused(target: Target, certs: Path, who: str) -> None:
    caller = Caller(target, who, certs)
    connected = BEARERS[who] != NO_CONNECTION
    code = grpc.StatusCode.UNAUTHENTICATED if connected else grpc.StatusCode.UNAVAILABLE
    words = f"was called with {'another' if SENT[who] else 'no'} token" if connected else ""
    assert_refused(
        target,
        who,
        caller.channel(),
        target.rpcs,
        code,
        SEEN.tokens,
        words,
        metadata=caller.metadata,
    )


def test_each_call_of_a_connection_is_judged_by_the_token_that_it_shows(
    target: Target, certs: Path
) -> None:
    def code(channel: grpc.Channel, *sent: str) -> grpc.StatusCode:
        return target.rpcs[0].call(channel, metadata=[(TOKEN_KEY, one) for one in sent]).code

    refused = grpc.StatusCode.UNAUTHENTICATED
    with Caller(target, TOKEN, certs).channel() as channel:
        assert code(channel) == refused
        assert code(channel, *SENT[TOKEN]) != refused
        assert code(channel) == refused
        assert code(channel, *SENT["another token"]) == refused
        assert code(channel, *SENT[TOKEN]) != refused


def test_a_token_that_was_replaced_ends_with_the_next_call(certs: Path, token: Path) -> None:
    security = Security.from_options(Role.SHARD, certs, token)
    authorities = (certs / "ca.crt").read_bytes()
    before, after = [(TOKEN_KEY, SENT[TOKEN][0])], [(TOKEN_KEY, SENT["another token"][0])]
    with shard_target(security) as target, target.channel(authorities, None) as channel:
        assert status(channel, metadata=before) == grpc.StatusCode.OK
        secret(token, SECRET[::-1])
        assert status(channel, metadata=before) == grpc.StatusCode.UNAUTHENTICATED
        assert status(channel, metadata=after) == grpc.StatusCode.OK


def test_the_token_stands_for_every_role(target: Target, certs: Path) -> None:
    """And what is asked for with it does change something."""
    caller = Caller(target, TOKEN, certs)
    before = target.digest()
    with caller.channel() as channel:
        for rpc in target.rpcs:
            answer = rpc.call(channel, metadata=caller.metadata)
            assert symbol(answer) == when_let_through(rpc.name), (str(rpc), answer)
            note(SEEN.tokens, rpc, TOKEN, answer)
    assert target.digest() != before


def test_a_token_alone_is_enough(certs: Path, token: Path) -> None:
    """As our own processes send it."""
    with (
        shard_target(Security.from_options(Role.SHARD, certs, token)) as target,
        open_channel(target.address, Security.from_options(Role.READER, certs, token)) as channel,
    ):
        assert status(channel) == grpc.StatusCode.OK


def test_a_server_without_a_token_file_takes_none(certs: Path, token: Path) -> None:
    with shard_target(Security.from_options(Role.SHARD, certs)) as target:
        client = Security.from_options(Role.WORKER, certs, token)
        with open_channel(target.address, client) as channel:
            assert status(channel) == grpc.StatusCode.UNAVAILABLE, "it showed no certificate"
        reader = target.channel((certs / "ca.crt").read_bytes(), read_pair(certs, Role.READER))
        with reader as channel:
            sent = [(TOKEN_KEY, f"Bearer {SECRET}")]
            assert status(channel, metadata=sent) == grpc.StatusCode.PERMISSION_DENIED


def test_only_the_authority_is_needed_beside_a_token(mine: Path, token: Path) -> None:
    for path in mine.iterdir():
        if path.name != "ca.crt":
            path.unlink()
    assert Security.from_options(Role.WORKER, mine, token).encrypted
    with pytest.raises(InvalidArgument, match=r"there is no .*shard\.crt"):
        Security.from_options(Role.SHARD, mine, token)


class Listener(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Remembers the metadata of all calls."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """See grpc.ServerInterceptor."""
        self.heard.append(handler_call_details.invocation_metadata)
        return continuation(handler_call_details)


def test_a_token_is_never_sent_in_plaintext(certs: Path, token: Path) -> None:
    listener = Listener()
    server = make_server(1, [listener])
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', PLAINTEXT)}"
    server.start()
    try:
        with open_channel(address, Security.from_options(Role.WORKER, certs, token)) as channel:
            assert status(channel) == grpc.StatusCode.UNAVAILABLE
        with open_channel(address) as channel:
            assert status(channel) == grpc.StatusCode.UNIMPLEMENTED
    finally:
        server.stop(0).wait()
    assert len(listener.heard) == 1, "only the call that was meant to be in plaintext"


def test_a_token_needs_an_authority(token: Path) -> None:
    with pytest.raises(InvalidArgument, match="never sent in plaintext"):
        Security.from_options(Role.WORKER, None, token)


@pytest.mark.parametrize("text", ["", "short", "with some words in it", "ünlauter-token-123"])
def test_a_token_that_is_none(certs: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument, match="holds no token"):
        Security.from_options(Role.WORKER, certs, secret(tmp_path / "t", text))


def test_a_token_that_is_missing(certs: Path, tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(InvalidArgument, match=f"^there is no {path}; .* -hex 32 > {path}") as error:
        Security.from_options(Role.WORKER, certs, path)
    assert error.value.code == "PS315"


def test_a_token_that_others_may_read(certs: Path, token: Path) -> None:
    token.chmod(0o644)
    with pytest.raises(InvalidArgument, match="run: chmod 600"):
        Security.from_options(Role.WORKER, certs, token)
