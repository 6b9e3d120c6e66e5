"""The metrics addresses of the processes of ``coordinator up``."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from coordinator.launch.commands import Cluster, Command

TARGETS = "metrics.json"
"""A file in the run directory, in the form of Prometheus's ``file_sd_configs``. Load-bearing."""


@contextmanager
def with_metrics(cluster: Cluster, job: str, run_dir: Path) -> Iterator[Cluster]:
    """Yields ``cluster`` with a metrics address for each process, which it keeps when it is started
    again. ``RUN_DIR/metrics.json`` lists them meanwhile.

    Args:
        job: the job's name.

    Raises:
        OSError: there is no port left, or the file cannot be written.
    """
    path = run_dir / TARGETS
    with ExitStack() as held:
        names = ["coordinator", *cluster.members]
        addresses = {name: held.enter_context(reserved_address()) for name in names}
        path.write_text(as_targets(job, addresses))
        held.callback(_remove, path)

        def with_address(name: str, command: Command) -> Command:
            return replace(command, arguments=[*command.arguments, "--metrics", addresses[name]])

        yield replace(
            cluster,
            coordinator=with_address("coordinator", cluster.coordinator),
            members={n: with_address(n, command) for n, command in cluster.members.items()},
        )


def as_targets(job: str, addresses: dict[str, str]) -> str:
    """Returns the file's text: one target per process, with the labels ``job`` and ``process``."""
    targets = [
        {"targets": [address], "labels": {"job": job, "process": name}}
        for name, address in addresses.items()
    ]
    return json.dumps(targets, indent=1) + "\n"


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@contextmanager
def reserved_address() -> Iterator[str]:
    """Yields an address of this host that a server can bind to each time it is started.

    The kernel never gives the port of a bound socket to a process that asks for any port, be it to
    listen or to connect from. A server that reuses addresses, as gRPC's do, can still bind to it
    while the socket does not listen.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
