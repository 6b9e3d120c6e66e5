"""The address that a shard registers."""

from __future__ import annotations

import pytest

from pserver.process.config import ServeConfig, advertised_address
from psrpc.core.errors import CoordinatorUnreachable, InvalidArgument


@pytest.mark.parametrize(
    ("bind", "advertise", "expected"),
    [
        ("127.0.0.1:0", None, "127.0.0.1:41"),
        ("somehost:0", None, "somehost:41"),
        ("0.0.0.0:0", None, "127.0.0.1:41"),
        (":0", None, "127.0.0.1:41"),
        ("0.0.0.0:0", "public", "public:41"),
        ("0.0.0.0:0", "public:42", "public:42"),
    ],
)
def test_the_advertised_address(bind: str, advertise: str | None, expected: str) -> None:
    assert advertised_address(bind, 41, advertise, "127.0.0.1:5000") == expected


def test_a_name_that_is_not_known_yet_is_worth_another_try() -> None:
    with pytest.raises(CoordinatorUnreachable, match=r"coordinator\.invalid:5000"):
        advertised_address("0.0.0.0:0", 41, None, "coordinator.invalid:5000")


def test_the_coordinators_port_may_be_left_out() -> None:
    assert ServeConfig(0).coordinator == "localhost:5000"
    assert ServeConfig(0, "somehost").coordinator == "somehost:5000"
    assert ServeConfig(0, "somehost:6").coordinator == "somehost:6"


@pytest.mark.parametrize(
    ("coordinator", "advertise", "expected"),
    [
        ("localhost", None, "127.0.0.1:0"),
        ("127.0.0.1:6", None, "127.0.0.1:0"),
        ("[::1]:6", None, "127.0.0.1:0"),
        ("localhost", "somehost", "0.0.0.0:0"),
        ("somehost", None, "0.0.0.0:0"),
        ("10.0.0.1", None, "0.0.0.0:0"),
    ],
)
def test_a_shard_of_several_machines_is_reached_from_all_of_them(
    coordinator: str, advertise: str | None, expected: str
) -> None:
    assert ServeConfig(0, coordinator, advertise=advertise).bind == expected
    assert ServeConfig(0, coordinator, "1.2.3.4:5", advertise).bind == "1.2.3.4:5"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shard": -1}, "--shard is -1; expected 0 or more"),
        ({"connect_timeout_s": -1.0}, "--connect-timeout is -1.0"),
        ({"connect_timeout_s": float("nan")}, "--connect-timeout is nan"),
        ({"bind": "somehost"}, "has no port"),
        ({"coordinator": "somehost:x"}, "port 'x'"),
        ({"advertise": "somehost:99999"}, "99999"),
    ],
)
def test_settings_that_cannot_be_used(change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        ServeConfig(**({"shard": 0} | change))  # type: ignore[arg-type]
