"""A store that cannot be used causes an error that names it, never silence."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

import pytest

from psrpc.core.errors import InvalidData, Unreachable
from psrpc.files import remote_calls
from psrpc.files.remote import find, read_ranges
from psrpc.files.remote_calls import NotThere, call, translated
from psrpc.ops.retry import RetryPolicy
from tests.stores.conftest import Bucket, forget_stores

URL = "s3://bucket/key"


class Ticking:
    """A clock on which every look takes two seconds."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 2.0
        return self._now


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Log lines about waits."""
    lines: list[dict[str, Any]] = []

    class Log:
        def info(self, event: str, **more: Any) -> None:
            lines.append({"event": event, **more})

    monkeypatch.setattr(remote_calls, "log", Log())
    monkeypatch.setattr(remote_calls, "MonotonicClock", Ticking)
    return lines


def patience(monkeypatch: pytest.MonkeyPatch, policy: RetryPolicy) -> None:
    monkeypatch.setitem(remote_calls._process, "patience", policy)


@pytest.fixture
def denying(endpoint: str, bucket: Bucket) -> Iterator[Bucket]:
    """A bucket of a server that has begun to ask who calls."""
    url = bucket.put("data.csv", b"a,y\n1,2\n")
    assert find(url)
    forget_stores()
    _requests_before_asking(endpoint, "0")
    yield bucket
    _requests_before_asking(endpoint, "inf")


def _requests_before_asking(endpoint: str, count: str) -> None:
    plain = {"Content-Type": "text/plain"}
    url = f"{endpoint}/moto-api/reset-auth"
    urlopen(Request(url, count.encode(), plain, method="POST")).close()


@pytest.mark.slow
def test_denied_access_is_an_error_at_once(denying: Bucket) -> None:
    with pytest.raises(InvalidData, match=r"data.csv: access is denied \(.*credentials") as raised:
        find(denying.url("data.csv"))
    assert raised.value.code == "PS109"


@pytest.mark.slow
def test_no_credentials_is_an_error_at_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket.put("data.csv", b"a,y\n1,2\n")
    forget_stores()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(InvalidData, match="access is denied"):
        find(url)


@dataclass(frozen=True)
class Reviving(RetryPolicy):
    """Starts the server after the second failure."""

    server: Any = None

    def pause_s(self, failures: int, chance: float) -> float:
        if failures == 2:
            self.server.start()
        return 0.0


@pytest.mark.slow
def test_a_server_that_comes_back_is_waited_for_and_one_that_does_not_is_named(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    first = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    first.start()
    host, port = first.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="outage")
    client.put_object(Bucket="outage", Key="x", Body=b"0123456789")
    client.close()
    [file] = find("s3://outage/x")
    first.stop()
    with pytest.raises(InvalidData, match=r"s3://outage/x cannot be reached: 1 tries") as no:
        read_ranges([(file, 0, 4)])
    assert no.value.code == "PS109"

    second = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    patience(monkeypatch, Reviving(server=second))
    try:
        assert read_ranges([(file, 4, 4), (file, 0, 0), (file, 0, 2)]) == [b"4567", b"", b"01"]
    finally:
        second.stop()


def test_no_answer_ends_at_the_deadline(
    said: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, RetryPolicy(budget_s=0.0))
    answer = threading.Event()
    with pytest.raises(InvalidData, match=f"{URL} cannot be reached: .*: no answer within 0 s"):
        call(URL, answer.wait, 0.0)
    answer.set()


def test_waits_are_announced(said: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, RetryPolicy(first_s=0.0, longest_s=0.0))
    failures = iter([OSError("reset"), TimeoutError("late"), ConnectionError("gone")])

    def answer() -> str:
        for error in failures:
            raise error
        return "found"

    assert call(URL, answer) == "found"
    assert {key: said[0][key] for key in ("event", "url")} == {"event": "waiting", "url": URL}
    assert [line["waiting_for"] for line in said] == ["TimeoutError: late", "ConnectionError: gone"]


class NoCredentialsError(Exception):
    """As botocore has it."""


class HttpError(Exception):
    """As gcsfs has it."""

    def __init__(self, code: int) -> None:
        super().__init__("no")
        self.code = code


class ClientResponseError(Exception):
    """As aiohttp has it."""

    def __init__(self, status: int) -> None:
        super().__init__("no")
        self.status = status


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("x"), NotThere),
        (PermissionError("x"), InvalidData),
        (NoCredentialsError("x"), InvalidData),
        (HttpError(403), InvalidData),
        (HttpError(404), InvalidData),
        (HttpError(503), Unreachable),
        (HttpError(429), Unreachable),
        (ClientResponseError(401), InvalidData),
        (ClientResponseError(404), InvalidData),
        (ClientResponseError(503), Unreachable),
        (OSError(22, "x"), InvalidData),
        (OSError(121, "x"), Unreachable),
        (ConnectionResetError(), Unreachable),
        (TimeoutError(), Unreachable),
        (ValueError("Protocol not known: s4"), InvalidData),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, expected: type[Exception]) -> None:
    assert type(translated(URL, error)) is expected


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InvalidData, match=r"pip install 'tf-pserver\[remote\]' gcsfs$") as no:
        find("gs://bucket/key")
    assert no.value.code == "PS135"


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(InvalidData, match=r"s4://bucket/key cannot be used: .*s4"):
        find("s4://bucket/key")
