"""A worker that reaches the coordinator and not one shard, or not the worker that hosts it, in a
network that is really parted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import gethostname

import pytest

from coordinator.client.client import CoordinatorClient
from coordinator.client.patience import Patience
from psrpc.core.policy import ASYNC, Policy
from psrpc.security.credentials import Security
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse
from tests.chaos.roles import DESCRIPTION
from tests.chaos.witness import Options, description
from tests.e2e.cluster import LIMIT_S, ROOT, Process
from tests.e2e.namespaces import Network, why_impossible

pytestmark = pytest.mark.slow

PLACES = ("coordinator", "shard0", "shard1", "worker0", "worker1")
PORT = 5000

ENTRY = (
    "import sys; from tests.chaos.roles import ENTRIES; "
    "sys.exit(ENTRIES[sys.argv[1]](sys.argv[2:]))"
)

BATCHES = 192
"""With more, the witness's loss, which is the number of the batch, would count as diverging."""

PACE_MS = 150

STEPS = 4
"""That are made on either side of what is to be seen."""


class Job:
    """The witness job on two shards, or on one that a worker hosts, with two workers, each process
    in a namespace of its own. It does not end before its gate is opened."""

    def __init__(
        self, folder: Path, network: Network, stack: ExitStack, policy: Policy, hosted: bool
    ) -> None:
        self.network = network
        self.run_dir = folder / "run"
        self.gate = folder / "gate"
        self.longest_s = 0.0
        """Between two steps that were seen."""
        shards = 1 if hosted else 2
        options = Options(
            *(policy, shards, 2, "sgd", 1, BATCHES, 4),
            shm=False,
            checkpoint_every=BATCHES,
            pace_ms=PACE_MS,
            hosted=hosted,
        )
        described = folder / "description.json"
        described.write_text(json.dumps(description(options)))
        environment = {
            DESCRIPTION: str(described),
            "CHAOS_OPTIONS": options.to_json(),
            "CHAOS_GATE": str(self.gate),
        }
        address = f"{network.address('coordinator')}:{PORT}"
        there = ("--coordinator", address, "--insecure")
        job = ("--job", str(ROOT / "tests" / "chaos" / "keras_job.py"))
        arguments = {
            "coordinator": (
                *("serve", *job, "--shards", str(shards), "--run-dir", str(self.run_dir)),
                *("--bind", address, "--insecure"),
            ),
            "shard0": ("serve", "--shard", "0", *there),
            "shard1": ("serve", "--shard", "1", *there),
            "worker0": ("run", *there, "--no-shm"),
            "worker1": ("run", *there, "--no-shm"),
        }
        self.processes: dict[str, Process] = {}
        for place in PLACES:
            if hosted and place.startswith("shard"):
                continue
            role = place.rstrip("01")
            command = [sys.executable, "-c", ENTRY, role, *arguments[place]]
            line = network.command(place, [*command, "--die-with-parent"])
            process = Process(place, role, line=line, **environment)
            stack.callback(process.end)
            self.processes[place] = process
        self._client = stack.enter_context(CoordinatorClient(address, Security(insecure=True)))
        patience = Patience(self._client, LIMIT_S, lambda _line: None)
        patience.persist(self._client.get_job_status)
        self._step, self._at = 0, time.monotonic()

    @property
    def status(self) -> GetJobStatusResponse:
        """The job's; it is noted how long there was no step."""
        status = self._client.get_job_status()
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._at)
        if status.global_step != self._step:
            self._step, self._at = status.global_step, now
        return status

    def until(self, holds: Callable[[GetJobStatusResponse], bool]) -> GetJobStatusResponse:
        """The first status of which that holds."""
        deadline = time.monotonic() + LIMIT_S
        while not holds(status := self.status):
            assert status.phase != "failed", status.reason
            for place, process in self.processes.items():
                assert process.popen.poll() is None, f"{place} ended: {process.text()}"
            assert time.monotonic() < deadline, f"{status}"
            time.sleep(0.02)
        return status

    def steps(self, count: int = STEPS) -> GetJobStatusResponse:
        """So many more steps are made."""
        goal = self.status.global_step + count
        return self.until(lambda status: status.global_step >= goal)

    def finish(self) -> None:
        """Opens the gate and sees all processes end well."""
        self.gate.touch()
        for place, process in self.processes.items():
            assert process.wait() == 0, f"{place}: {process.text()}"


@contextmanager
def running(folder: Path, policy: Policy, hosted: bool) -> Iterator[Job]:
    with ExitStack() as stack:
        network = stack.enter_context(Network(PLACES))
        yield Job(folder, network, stack, policy, hosted)


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    why = why_impossible()
    if why:
        pytest.skip(why)


def batches(status: GetJobStatusResponse, host_pid: int) -> int:
    return sum(worker.batches for worker in status.workers if worker.pid == host_pid)


SYNC = Policy(mode="sync", replicas=2)


@pytest.mark.parametrize(("policy", "hosted"), [(SYNC, False), (ASYNC, False), (SYNC, True)])
def test_a_job_goes_on_without_a_worker_that_is_cut_off_from_a_shard(
    tmp_path: Path, policy: Policy, hosted: bool
) -> None:
    with running(tmp_path, policy, hosted) as job:
        begun = job.until(lambda status: len(status.workers) == 2 and status.global_step > 0)
        job.steps()
        job.longest_s = 0.0
        shard = len(begun.shards) - 1
        address = begun.shards[shard].address
        [place] = [
            place for place in job.processes if address.startswith(f"{job.network.address(place)}:")
        ]
        inside = f" in the worker with pid {job.processes[place].popen.pid} on {gethostname()},"
        assert place.startswith("worker" if hosted else "shard1")
        away = "worker0" if place != "worker0" else "worker1"
        job.network.cut(away, place)
        job.network.cut(place, away)
        stuck = job.until(lambda status: bool(status.stuck))
        [line] = stuck.stuck
        assert f"cannot reach shard {shard}{inside if hosted else ''} at {address} (for " in line
        [cut_off] = [worker for worker in stuck.workers if worker.unreachable]
        assert [one.shard for one in cut_off.unreachable] == [shard]
        before = batches(job.status, cut_off.pid)
        # Others do all of it, with the route still cut.
        after = job.steps()
        if not policy.rounds:
            # Shards refuse what it had; it is there again under another name, and waits.
            after = job.until(lambda status: any(w.unreachable for w in status.workers[2:]))
        assert batches(after, cut_off.pid) == before
        assert after.stuck
        print(f"{policy}: {job.longest_s:.1f} s without a step")  # noqa: T201
        job.network.mend(away, place)
        job.network.mend(place, away)
        job.until(lambda status: not status.stuck)
        job.until(lambda status: batches(status, cut_off.pid) > before)
        job.finish()
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert summary["phase"] == "done"


def test_a_network_left_by_a_killed_process_is_not_in_the_way() -> None:
    code = "import os; from tests.e2e.namespaces import Network; Network(['a']).__enter__()"
    killed = subprocess.run(
        [sys.executable, "-c", f"{code}; print(os.getpid(), flush=True); os._exit(9)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert killed.returncode == 9, killed.stderr
    left = f"psrpc-{killed.stdout.strip()}-0-a"
    assert left in namespaces()
    with Network(["a"]):
        assert left not in namespaces()


def namespaces() -> str:
    command = ["ip", "netns"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
