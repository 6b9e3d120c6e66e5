"""The command ``worker`` as a process of its own."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import ended


@pytest.mark.slow
def test_the_coordinators_port_may_be_left_out() -> None:
    where = ("--coordinator", "coordinator.invalid", "--connect-timeout", "0")
    done = ended("worker", "run", *where, "--insecure")
    assert done.returncode == 1, done.stderr
    assert "there is no machine called 'coordinator.invalid'" in done.stderr


@pytest.mark.slow
def test_an_address_that_is_none_is_one_line() -> None:
    done = ended("worker", "run", "--coordinator", "somehost:port")
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "error PS111: --coordinator: address 'somehost:port' has port 'port'; expected 0 to 65535\n"
    )
