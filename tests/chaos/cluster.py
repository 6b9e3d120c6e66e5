"""The processes of one schedule: started, watched, and started again when they die."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from psrpc.ops.process import MALLOC_SETTINGS
from tests.chaos.launcher import Launcher
from tests.chaos.proxy import Link, Proxy
from tests.chaos.roles import DESCRIPTION, STACKS
from tests.chaos.witness import Options, description
from tests.e2e.cluster import ROOT

KERAS_JOB = Path(__file__).parent / "keras_job.py"
COMMANDS = {
    "coordinator": "coordinator.cli",
    "shard": "pserver.cli",
    "worker": "worker.cli",
}

CONNECT_S = 400.0
"""On a busy machine a coordinator whose job needs TensorFlow takes minutes to come back."""

RESTART_S = 0.05
"""Pause before a process that died is started again; longer each time unless it was killed."""

SHARDS_HOST = "127.0.0.2"
"""This machine, too. Links to shards are there, so that one can have the number of the shard's data
port."""

MAX_FAILURES = 6
"""Unordered ends of one process; more are a crash loop."""


@dataclass
class Process:
    """One start of a process.

    Attributes:
        name: of its place, e.g. ``shard-0``; the same for those that replace it.
        started: monotonic seconds; ``ended`` too.
        killed: it has been sent SIGKILL.
        ordered: it was told to end, or has a rival, on purpose; it may end how it likes.
        data_port: of a shard; None if it takes no data connections, or has not said so yet.
        link: through which others reach a shard.
        widened: the link is the way to its data port, too.
        late: it had to be told that the job is over, since the coordinator had gone before it
            could.
    """

    name: str
    pid: int
    log: Path
    started: float
    ended: float | None = None
    status: int | None = None
    killed: bool = False
    ordered: bool = False
    port: int | None = None
    data_port: int | None = None
    link: Link | None = None
    widened: bool = False
    late: bool = False

    def address(self) -> tuple[str, int] | None:
        """Where it listens; None before it has said so."""
        if self.port is None and self.log.exists():
            for line in self.log.read_text(errors="replace").splitlines():
                if '"listening"' in line:
                    said = json.loads(line)
                    self.port, self.data_port = int(said["port"]), said.get("data_port")
        return None if self.port is None else ("127.0.0.1", self.port)


@dataclass
class Folders:
    """Where one schedule keeps its files: ``run`` may be a small file system of its own."""

    root: Path
    run: Path = field(init=False)
    logs: Path = field(init=False)
    gate: Path = field(init=False)
    description: Path = field(init=False)

    def __post_init__(self) -> None:
        self.run = self.root / "run"
        self.logs = self.root / "logs"
        self.gate = self.root / "gate"
        self.description = self.root / "description.json"

    def open_gate(self, wanted: bool) -> None:
        """Opens the gate, or closes it again: the job may have to go on for a moment only."""
        if wanted:
            self.gate.touch()
        else:
            self.gate.unlink(missing_ok=True)


class Cluster:
    """Runs one job. One thread uses it, but for links' questions where a process is."""

    def __init__(
        self, options: Options, folders: Folders, launcher: Launcher, proxy: Proxy
    ) -> None:
        self.options = options
        self.folders = folders
        self.history: list[Process] = []
        self.links: dict[str, Link] = {}
        self.done = False
        """The coordinator has ended well, so no process is started again."""
        self.full_until = 0.0
        """When the disk has room again, in monotonic seconds; before, no coordinator can start."""
        self._launcher = launcher
        self._proxy = proxy
        self._living: dict[int, Process] = {}
        self._due: dict[str, float] = {}
        self._held_back: set[str] = set()

    def start(self) -> None:
        """Starts all processes at once; they wait for each other."""
        options, folders = self.options, self.folders
        folders.logs.mkdir()
        if not options.tensorflow:
            folders.description.write_text(json.dumps(description(options)))
        for name in ("observer", *options.shard_names, *options.worker_names):
            label = name if name == "observer" else f"coordinator/{name}"
            self.links[label] = self._proxy.link(self._coordinator_address)
        for name in self.names:
            self._start(name)

    @property
    def names(self) -> list[str]:
        """Of all places."""
        return ["coordinator", *self.options.shard_names, *self.options.worker_names]

    def living(self, name: str) -> list[Process]:
        """The processes of a place that have not ended and are not about to, the newest last."""
        return [p for p in self._living.values() if p.name == name and not p.killed]

    def everyone(self) -> list[Process]:
        """All that have not ended."""
        return list(self._living.values())

    def link(self, name: str) -> Link:
        """A link by its name; one to a shard is that to its newest process."""
        if name in self.links:
            return self.links[name]
        processes = self.living(name) or [p for p in self.history if p.name == name]
        link = processes[-1].link
        assert link is not None
        return link

    def poll(self, now: float) -> None:
        """Takes note of ends, and starts again who is due."""
        for ended in self._launcher.exits():
            process = self._living.pop(ended.pid)
            process.ended, process.status = now, ended.status
            process.ordered |= process.name == "coordinator" and now < self.full_until
            if process.name == "coordinator":
                self.done = ended.status == 0 or (process.killed and self._summary_says_done())
            # Who ends well was told that the job is over, which it may be before all know.
            if ended.status != 0 and not self.living(process.name):
                pause_s = RESTART_S * 2 ** self.failures(process.name)
                self._due.setdefault(process.name, now + pause_s)
        for process in self._living.values():
            self._widen(process)
        if self.done:
            self._due.clear()
        for name, at in list(self._due.items()):
            if now >= at and name not in self._held_back:
                del self._due[name]
                self._start(name)

    def _summary_says_done(self) -> bool:
        """A coordinator that is killed then is not started again, as ``coordinator up`` has it."""
        try:
            summary = json.loads((self.folders.run / "summary.json").read_text())
        except (OSError, ValueError):
            return False
        return bool(summary["phase"] == "done")

    def failures(self, name: str) -> int:
        """How often a process ended without an order."""
        return sum(p.name == name and p.status is not None and not p.ordered for p in self.history)

    def starts(self, name: str) -> int:
        """How often a process was started."""
        return sum(process.name == name for process in self.history)

    def signal(self, process: Process, number: int) -> bool:
        """Sends a signal; False when the process had ended."""
        process.killed |= number == signal.SIGKILL
        process.ordered |= number in (signal.SIGKILL, signal.SIGTERM)
        return self._launcher.signal(process.pid, number)

    def hold_back(self, name: str) -> None:
        """``name`` is not started again for now."""
        self._held_back.add(name)

    def let_go(self, name: str) -> None:
        """Undoes :meth:`hold_back`."""
        self._held_back.discard(name)

    def replace(self, name: str) -> Process:
        """Starts another process for a place whose holder still lives, or believes to hold it. They
        have to find out which of them keeps it."""
        rivals = [*self.living(name), self._start(name)]
        for process in rivals:
            process.ordered = True
        return rivals[-1]

    def send_away(self) -> None:
        """Ends those who came, or came back, too late for the job: they would look for its
        coordinator for minutes."""
        for process in self.everyone():
            if not process.late:
                process.late = process.ordered = True
                self._launcher.signal(process.pid, signal.SIGTERM)

    def write_stacks(self) -> None:
        """Has every process write down where its threads are."""
        for process in self.everyone():
            self._launcher.signal(process.pid, signal.SIGCONT)
            self._launcher.signal(process.pid, STACKS)

    def _widen(self, process: Process) -> None:
        """Leads data connections through a shard's link, once it has said where they come in."""
        if process.link is None or process.widened or process.address() is None:
            return
        process.widened = True
        if process.data_port is not None:
            self._proxy.widen(process.link, process.data_port)

    def _start(self, name: str) -> Process:
        log = self.folders.logs / f"{name}.{self.starts(name) + 1}.log"
        process = Process(name, 0, log, time.monotonic())
        if name.startswith("shard"):
            process.link = self._proxy.link(process.address, SHARDS_HOST)
        entry, arguments = name.split("-")[0], self._arguments(process)
        if self.options.tensorflow:
            entry, arguments = "command", [COMMANDS[entry], *arguments]
        process.pid = self._launcher.start(entry, arguments, log, self._environment())
        self.history.append(process)
        self._living[process.pid] = process
        return process

    def _arguments(self, process: Process) -> list[str]:
        common = ["--log-format", "json", "--die-with-parent"]
        options = self.options
        if process.name == "coordinator":
            return [
                *("serve", "--job", str(KERAS_JOB), "--shards", str(options.shards)),
                *("--run-dir", str(self.folders.run), "--bind", "127.0.0.1:0", *common),
            ]
        where = ["--coordinator", self.links[f"coordinator/{process.name}"].address, *common]
        if options.tensorflow:
            where += ["--connect-timeout", f"{CONNECT_S:g}"]
        if process.link is not None:
            index = process.name.removeprefix("shard-")
            bind = ["--bind", "127.0.0.1:0", "--advertise", process.link.address]
            data = [] if options.data else ["--data-connections", "off"]
            return ["serve", "--shard", index, *bind, *data, *where]
        shm = [] if options.shm else ["--no-shm"]
        gpu = ["--gpu", "none"] if options.tensorflow else []
        return ["run", *where, *shm, *gpu]

    def _environment(self) -> dict[str, str]:
        return {
            **MALLOC_SETTINGS,
            DESCRIPTION: str(self.folders.description),
            "CHAOS_OPTIONS": self.options.to_json(),
            "CHAOS_GATE": str(self.folders.gate),
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }

    def _coordinator_address(self) -> tuple[str, int] | None:
        try:
            host, port = (self.folders.run / "address").read_text().strip().split(":")
        except (OSError, ValueError):
            return None
        return host, int(port)


def is_stopped(pid: int, wait_s: float) -> bool:
    """Whether a process stands still within ``wait_s`` after it was sent SIGSTOP."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        if stat.rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.001)
    return False
