"""The host on which commands of pages are run: what it promises to them, and what it notices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.host import Host, unsupported

pytestmark = pytest.mark.docs

LISTEN = """python -c "
import socket
with socket.create_server(('0.0.0.0', 5000)) as server:
    server.accept()[0].close()
"
"""
CONNECT = """python -c "
import socket, time
end = time.monotonic() + 30
while True:
    try:
        socket.create_connection(('host', 5000), 30).close()
        break
    except ConnectionRefusedError:
        if time.monotonic() > end:
            raise
"
"""
ENDLESS = """python -c "
import threading
print('begun', flush=True)
threading.Event().wait(600)
"
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if why := unsupported():
        pytest.skip(f"needs a network namespace: {why}")
    with Host(tmp_path_factory.mktemp("host")) as made:
        yield made


def test_it_has_the_repository_and_its_commands(host: Host) -> None:
    assert host.run("cat README.md").output == Path("README.md").read_text()
    ended = host.run(". .venv/bin/activate\ncoordinator --version")
    assert ended.status == 0, ended.output


def test_a_command_that_fails_is_noticed_wherever_it_stands(host: Host) -> None:
    assert host.run("false\ntrue").status != 0
    assert host.run("false | true").status != 0
    assert host.run("no-such-command").status == 127


def test_terminals_reach_each_other_by_the_name_of_the_host(host: Host) -> None:
    assert [ended.status for ended in host.run_together([LISTEN, CONNECT])] == [0, 0]


def test_nothing_leaves_it(host: Host) -> None:
    ended = host.run("getent hosts example.com")
    assert ended.status != 0


def test_ctrl_c_comes_after_what_it_waits_for(host: Host) -> None:
    ended = host.run_until("begun", ENDLESS)
    assert ended.status == 0
    assert "KeyboardInterrupt" in ended.output
    assert host.run_until("never printed", "echo begun").status != 0
    assert host.run_until("begun", "trap '' INT; echo begun; exit 3").status != 0
