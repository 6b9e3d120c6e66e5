"""Where the metrics of the processes of ``coordinator up`` are, for as long as they run."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from coordinator.launch.commands import Cluster, Command

TARGETS = "metrics.json"
"""In the run directory, in the form of Prometheus's ``file_sd_configs``. Load-bearing."""


@contextmanager
def with_metrics(cluster: Cluster, job: str, run_dir: Path) -> Iterator[Cluster]:
    """``cluster`` with an address for the metrics of each process, which it has however often it is
    started again. ``RUN_DIR/metrics.json`` says them all.

    Args:
        job: its name.

    Raises:
        OSError: there is no port left, or the file cannot be written.
    """
    path = run_dir / TARGETS
    with ExitStack() as held:
        names = ["coordinator", *cluster.members]
        addresses = {name: held.enter_context(reserved_address()) for name in names}
        path.write_text(as_targets(job, addresses))
        held.callback(_remove, path)

        def told(name: str, command: Command) -> Command:
            return replace(command, arguments=[*command.arguments, "--metrics", addresses[name]])

        yield replace(
            cluster,
            coordinator=told("coordinator", cluster.coordinator),
            members={name: told(name, command) for name, command in cluster.members.items()},
        )


def as_targets(job: str, addresses: dict[str, str]) -> str:
    """The file's text: each process is a target with the labels ``job`` and ``process``."""
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
    """An address of this host that a server can have each time it is started.

    The kernel gives the port of a bound socket to nobody who asks for any port, be it to listen or
    to connect from. A server that allows addresses to be used again, as gRPC's do, can bind to it
    nevertheless while the socket does not listen.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
