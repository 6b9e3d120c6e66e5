"""Costs servers what a stranger, or a member gone wrong, may cost them; from a process of its own.

python -m benchmarks.attacker KIND --certs DIR HOST:PORT=ROLE [...]

Prints ``attacking`` once it is under way and goes on until its standard input ends; then it prints
how many calls, connections or bytes it has sent. It has the lowest priority there is (``nice`` 19
and SCHED_IDLE): what is measured is what its traffic costs the servers, and not what its own work
takes of this machine. With ``--usual-priority`` it competes with them for that, too.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from psrpc.net.channel import open_channel, parse_address
from psrpc.ops.process import die_with_parent
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2 as coordinator
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types

CALLERS = 4
"""Threads that call, or send."""

CALL_S = 10.0
CONNECT_S = 120.0
GARBAGE_NBYTES = 64 << 10
AGAIN_S = 1.0
"""How often idle connections that were closed are made again."""


class Target(NamedTuple):
    """A server, and what it is."""

    address: str
    role: Role


class Attack:
    """Attributes:
    over: the attack should end.
    sent: calls, connections or bytes.
    """

    def __init__(self, targets: Sequence[Target], certs: Path, connections: int) -> None:
        self.over = threading.Event()
        self.sent = 0
        self._targets = targets
        self._certs = certs
        self._connections = connections
        self._lock = threading.Lock()
        self._ready = threading.Event()

    def strangers(self) -> None:
        """Calls of every kind by a reader, who may make none of them."""
        self._flood(Role.READER)

    def members(self) -> None:
        """The same by a worker, who may make nearly all."""
        self._flood(Role.WORKER)

    def tcp(self) -> None:
        """Connections on which nothing is ever sent."""
        held: dict[int, socket.socket] = {}
        try:
            while not self.over.is_set():
                for index in range(self._connections):
                    if index in held and _closed(held[index]):
                        held.pop(index).close()
                    if index not in held:
                        with suppress(OSError):
                            held[index] = self._connect(index)
                            held[index].setblocking(False)
                            self._count(1)
                self._begun()
                self.over.wait(AGAIN_S)
        finally:
            for connection in held.values():
                connection.close()

    def grpc(self) -> None:
        """Connections of a member that has shown its certificate and then calls nothing."""
        security = Security(Role.WORKER, self._certs)
        held = []
        for index in range(self._connections):
            target = self._targets[index % len(self._targets)]
            channel = open_channel(target.address, security, target.role)
            with suppress(grpc.RpcError):
                _call(channel, "/grpc.health.v1.Health/Check", b"", CONNECT_S)
                self._count(1)
            held.append(channel)
            if self.over.is_set():
                break
        self._begun()
        self.over.wait()
        for channel in held:
            channel.close()

    def garbage(self) -> None:
        """Random bytes, a connection after the other."""
        self._on_threads(self._send_garbage)

    def _flood(self, role: Role) -> None:
        self._on_threads(lambda index: self._call_all(index, Security(role, self._certs)))

    def _on_threads(self, work: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _call_all(self, index: int, security: Security) -> None:
        target = self._targets[index % len(self._targets)]
        with open_channel(target.address, security, target.role) as channel:
            while not self.over.is_set():
                for method, request in _REQUESTS[target.role]:
                    with suppress(grpc.RpcError):
                        _call(channel, method, request, CALL_S)
                    self._count(1)
                self._begun()

    def _send_garbage(self, index: int) -> None:
        rng = random.Random(index)
        while not self.over.is_set():
            with suppress(OSError), self._connect(index) as connection:
                data = rng.randbytes(rng.randrange(1, GARBAGE_NBYTES))
                connection.sendall(data)
                self._count(len(data))
                # Until the server has had enough of it.
                while connection.recv(4096):
                    pass
            self._begun()

    def _connect(self, index: int) -> socket.socket:
        target = self._targets[index % len(self._targets)]
        return socket.create_connection(parse_address(target.address), timeout=2.0)

    def _count(self, more: int) -> None:
        with self._lock:
            self.sent += more

    def _begun(self) -> None:
        if not self._ready.is_set():
            self._ready.set()
            _say("attacking")


KINDS = ("strangers", "members", "tcp", "grpc", "garbage")

_REQUESTS: dict[Role, tuple[tuple[str, bytes], ...]] = {
    Role.COORDINATOR: (
        ("/psrpc.v1.Coordinator/GetJob", coordinator.GetJobRequest().SerializeToString()),
        ("/psrpc.v1.Coordinator/GetCluster", b""),
        (
            "/psrpc.v1.Coordinator/HeartbeatWorker",
            coordinator.HeartbeatWorkerRequest(session=bytes(96)).SerializeToString(),
        ),
        ("/psrpc.v1.Coordinator/GetJobStatus", b""),
    ),
    Role.SHARD: (
        ("/psrpc.v1.ParameterServer/GetStatus", pb.GetStatusRequest().SerializeToString()),
        (
            "/psrpc.v1.ParameterServer/Pull",
            pb.PullRequest(fence=types.Fence(session=bytes(96))).SerializeToString(),
        ),
        (
            "/psrpc.v1.ParameterServer/PushGradients",
            pb.PushGradientsRequest(header=pb.PushHeader(examples=1)).SerializeToString(),
        ),
    ),
}


def _call(channel: grpc.Channel, method: str, request: bytes, timeout_s: float) -> None:
    """One call of a method of any kind, to its end."""
    untyped: Any = channel
    for _answer in untyped.stream_stream(method)(iter((request,)), timeout=timeout_s):
        pass


def _closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _targets(texts: Sequence[str]) -> Iterator[Target]:
    for text in texts:
        address, _, role = text.rpartition("=")
        yield Target(address, Role(role))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacker")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("targets", nargs="+", metavar="HOST:PORT=ROLE")
    parser.add_argument("--certs", type=Path, required=True)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--usual-priority", action="store_true")
    options = parser.parse_args(arguments)
    die_with_parent()
    if not options.usual_priority:
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    attack = Attack(list(_targets(options.targets)), options.certs, options.connections)
    thread = threading.Thread(target=getattr(attack, options.kind), daemon=True)
    began = time.monotonic()
    thread.start()
    sys.stdin.read()
    attack.over.set()
    thread.join(CALL_S + 2)
    _say(f"{attack.sent} in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
