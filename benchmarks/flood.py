"""Whether a run goes on as before while others flood it: steps per second and memory.

python -m benchmarks.flood
python -m benchmarks.flood --seconds 10 --only members --only garbage

One run of two shards and two workers, over TCP and TLS. Attacks come one at a time from another
process of the lowest priority (benchmarks/attacker.py), with a pause between two of them; a ratio
compares an attack with the pauses before and after it. The table shows the median of several turns,
and the least and the greatest.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.attacker import KINDS
from benchmarks.cluster import ROOT, Cluster, RunFailed
from benchmarks.report import add_arguments, write_json, write_section
from benchmarks.table import markdown
from benchmarks.workloads import JOBS
from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import PsError
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2 as pb

JOB = JOBS / "mnist_dnn.py"
SHARDS = WORKERS = 2
SECONDS = 25.0
"""Of each attack and each pause."""

TURNS = 3
"""Of each attack; the median counts, since other work of the machine shows in a single one."""

CONNECTIONS = 1000
TARGET = 0.8
"""Of the steps per second of the pauses."""

ROOM_MB = 256
"""What servers may grow by: a thousand connections with TLS, and threads."""

FIRST_STEP_S = 180.0
BEGIN_S = 240.0
TICK_S = 0.25

_DATA_PORT = re.compile(r"data_port=(\d+)")

NAMES = {
    "strangers": "calls that a role may not make",
    "members": "calls that it may",
    "tcp": "idle TCP connections",
    "grpc": "idle gRPC connections",
    "garbage": "random bytes",
}


@dataclass(frozen=True)
class Phase:
    """A while of the run.

    Attributes:
        attack: its kind; empty for a pause.
        rate: steps per second.
        shard_mb, coordinator_mb: resident memory, of the largest shard, at most.
        sent: as the attacker says it.
    """

    attack: str
    rate: float
    shard_mb: float
    coordinator_mb: float
    sent: str = ""


class Watch:
    """Looks at a run, once it trains."""

    def __init__(self, cluster: Cluster) -> None:
        """Raises RunFailed: it never does."""
        self._cluster = cluster
        address = cluster.address()
        self._client = CoordinatorClient(address, cluster.security(Role.OPERATOR))
        until = time.monotonic() + FIRST_STEP_S
        while not (step := self.step()):
            if time.monotonic() > until or not cluster.running:
                raise RunFailed("the job did not begin to train")
            time.sleep(TICK_S)
        self.first_step = step
        self.shards = cluster.processes("pserver")
        self.coordinators = cluster.processes("coordinator")
        found = self._client.get_cluster(pb.GetClusterRequest())
        self._servers = [f"{address}=coordinator", *(f"{s.address}=shard" for s in found.shards)]
        logs = (cluster.run_dir / "logs").glob("shard-*.log")
        ports = [port for log in logs for port in _DATA_PORT.findall(log.read_text())]
        self._data_ports = [f"127.0.0.1:{port}=shard" for port in ports]

    def targets(self, kind: str) -> list[str]:
        """Targets of an attack of ``kind``: data ports take no calls."""
        return self._servers + (self._data_ports if kind in ("tcp", "garbage") else [])

    def step(self) -> int:
        """The global step, or 0 before the first; the last one while the coordinator is away."""
        try:
            status = self._client.get_job_status()
        except PsError:
            return 0
        return int(status.global_step) if status.phase == "training" else 0

    def phase(self, seconds: float, attack: str = "") -> Phase:
        """Looks for so long.

        Raises:
            RunFailed: the job has ended.
        """
        began, first = time.monotonic(), self._asked()
        shard = coordinator = 0.0
        while time.monotonic() - began < seconds:
            now = self.memory_mb()
            shard, coordinator = max(shard, now[0]), max(coordinator, now[1])
            time.sleep(TICK_S)
        last = self._asked()
        rate = (last - first) / (time.monotonic() - began)
        return Phase(attack, rate, shard, coordinator)

    def memory_mb(self) -> tuple[float, float]:
        """Memory of the largest shard and of the coordinator now, in MB."""
        largest = [
            max(map(_resident_nbytes, pids), default=0) / 2**20
            for pids in (self.shards, self.coordinators)
        ]
        return largest[0], largest[1]

    def _asked(self) -> int:
        for _ in range(20):
            if step := self.step():
                return step
            if not self._cluster.running:
                break
        raise RunFailed("the job has ended, or its coordinator does not answer")

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()


@contextmanager
def attacked(
    kind: str, targets: Sequence[str], certs: Path, connections: int, *, idle: bool = True
) -> Iterator[list[str]]:
    """Another process attacks for the length of a block; afterwards the list has what it said.

    Args:
        idle: it has the lowest priority there is; on a machine that is busy with other things it
            may not come to anything.

    Raises:
        RunFailed: it has not begun in time.
    """
    command = [sys.executable, "-m", "benchmarks.attacker", kind, *targets]
    command += ["--certs", str(certs), "--connections", str(connections)]
    command += [] if idle else ["--usual-priority"]
    said: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != "attacking":
                raise RunFailed(f"the attacker ({kind}) has failed")
            yield said
        finally:
            rest, _ = process.communicate(timeout=BEGIN_S)
            said.append(rest.strip())


def _resident_nbytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096


def measure(kinds: Sequence[str], seconds: float, connections: int, turns: int) -> Iterator[Phase]:
    """A pause, and an attack and a pause for each of ``kinds``, the latter ``turns`` times over.

    Raises:
        RunFailed: there is no figure.
    """
    with (
        Cluster(
            JOB,
            shards=SHARDS,
            workers=WORKERS,
            transport="tcp",
            settings=("epochs=100000", "engine=numpy"),
        ) as cluster,
        closing(Watch(cluster)) as watch,
    ):
        watch.phase(seconds / 2)  # Buffers and threads are made.
        yield watch.phase(seconds)
        certs = cluster.run_dir / "certs"
        for kind in [*kinds] * turns:
            with attacked(kind, watch.targets(kind), certs, connections) as said:
                found = watch.phase(seconds, kind)
            yield Phase(**(asdict(found) | {"sent": said[0]}))
            yield watch.phase(seconds)


def ratios(phases: Sequence[Phase]) -> dict[str, list[float]]:
    """For each kind of attack, of its turns, the speed over that of the pauses around it."""
    found: dict[str, list[float]] = {}
    for before, attack, after in zip(phases[::2], phases[1::2], phases[2::2], strict=False):
        quiet = (before.rate + after.rate) / 2
        found.setdefault(attack.attack, []).append(attack.rate / quiet)
    return found


def table(phases: Sequence[Phase]) -> str:
    """Markdown: a row for each attack, and one for the pauses."""
    found = ratios(phases)
    rows = [["none", *_figures([p for p in phases if not p.attack], "")]]
    for kind, of in found.items():
        mine = [p for p in phases if p.attack == kind]
        ratio = f"{median(of):.2f}"
        if len(of) > 1:
            ratio += f" ({min(of):.2f} to {max(of):.2f})"
        rows.append([f"{NAMES[kind]}: {mine[-1].sent}", *_figures(mine, ratio)])
    return markdown(
        ["attack", "steps/s", "of those without", "largest shard, MB", "coordinator, MB"], rows
    )


def _figures(phases: Sequence[Phase], ratio: str) -> list[str]:
    return [
        f"{median(p.rate for p in phases):.0f}",
        ratio,
        f"{max(p.shard_mb for p in phases):.0f}",
        f"{max(p.coordinator_mb for p in phases):.0f}",
    ]


def met(phases: Sequence[Phase]) -> bool:
    """Whether every attack leaves :data:`TARGET` of the speed, and memory is bounded."""
    first = phases[0]
    return all(median(of) >= TARGET for of in ratios(phases).values()) and all(
        p.shard_mb - first.shard_mb < ROOM_MB and p.coordinator_mb - first.coordinator_mb < ROOM_MB
        for p in phases
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 if every attack left what it should leave, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flood",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default: %(default)s")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=TURNS, help="default: %(default)s")
    parser.add_argument("--only", action="append", choices=KINDS, metavar="KIND")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    phases = []
    try:
        for phase in measure(
            options.only or KINDS, options.seconds, options.connections, options.turns
        ):
            phases.append(phase)
            sys.stderr.write(f"{phase}\n")
    except RunFailed as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    text = table(phases)
    sys.stdout.write(text)
    if options.json:
        write_json(options.json, {"phases": [asdict(phase) for phase in phases]})
    if options.readme:
        write_section("flood", text)
    return 0 if met(phases) else 1


if __name__ == "__main__":
    sys.exit(main())
