"""Commands of podman, with the settings and the network of the tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.cluster import wait_until_gone

_CONF = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
events_logger = "file"
[network]
network_backend = "netavark"
"""
"""runc, since crun wants one kind of cgroups; limits that need no privilege."""

LIMIT_S = 300.0

_NAME_SERVER = Path("/run/containers/networks/aardvark-dns/aardvark.pid")


def environment_of(folder: Path) -> dict[str, str]:
    """Returns the environment of podman's commands."""
    return {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}


def podman_log(folder: Path, container: str) -> bytes:
    """Returns what a container has printed."""
    words = ["podman", "logs", container]
    said = subprocess.run(words, env=environment_of(folder), capture_output=True, timeout=LIMIT_S)
    return said.stdout + said.stderr


def podman(folder: Path, *words: str) -> str:
    """Returns what a call prints last; it must succeed."""
    done = subprocess.run(
        ["podman", *words],
        env=environment_of(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_S * 3,
    )
    assert done.returncode == 0, f"podman {' '.join(words)}: {done.stderr}"
    return done.stdout.strip().rpartition("\n")[2]


@contextmanager
def podman_network(folder: Path, name: str) -> Iterator[None]:
    """Makes a network with DNS, and removes it with what is left in it."""
    (folder / "containers.conf").write_text(_CONF)
    before = _name_server()
    podman(folder, "network", "create", name)
    try:
        yield
    finally:
        podman(folder, "network", "rm", "-f", name)
        # It has no names to serve any more, and would stay.
        own = _name_server()
        if own is not None and own != before:
            os.kill(own, signal.SIGTERM)
            wait_until_gone([own])


def _name_server() -> int | None:
    """Returns the process of podman's name server, if there is one."""
    with suppress(OSError, ValueError):
        pid = int(_NAME_SERVER.read_text())
        if Path(f"/proc/{pid}/comm").read_text().strip() == "aardvark-dns":
            return pid
    return None
