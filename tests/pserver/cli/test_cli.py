"""The command ``pserver`` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from pserver.client.client import ShardClient
from psrpc.core.errors import JobDone, RemoteFailure
from psrpc.net.channel import open_channel
from psrpc.v1 import coordinator_pb2 as pb
from tests.e2e.warm import fork_without_tensorflow
from tests.pserver.fake_coordinator import WAIT_S, FakeCoordinator, running
from tests.pserver.shards import INITIAL, fence_of, plan_of, whole

pytestmark = pytest.mark.slow

PLAN = plan_of()


class Forked:
    """The command as a fork of a process that has imported what it imports."""

    def __init__(self, *arguments: str) -> None:
        source, sink = os.pipe()
        self.stderr = open(source)  # noqa: PTH123, SIM115
        with open(sink, "wb") as errors, open(os.devnull, "wb") as null:  # noqa: PTH123
            outputs = (null.fileno(), errors.fileno())
            self._fork = fork_without_tensorflow(("pserver.cli", *arguments), *outputs, os.environ)
        self.pid, self.returncode = self._fork.pid, -1
        self.poll, self.send_signal = self._fork.poll, self._fork.send_signal

    def communicate(self, timeout: float) -> tuple[None, str]:
        """Reads the errors to their end, and waits for the process."""
        errors = self.stderr.read()
        self.returncode = self._fork.wait(timeout)
        return None, errors

    def end(self) -> None:
        """Kills it if the test has not seen its end."""
        self.send_signal(signal.SIGKILL)
        self._fork.wait(WAIT_S)
        self.stderr.close()


@contextmanager
def shard(*arguments: str) -> Iterator[Forked]:
    process = Forked("serve", "--shard", "0", *arguments)
    try:
        yield process
    finally:
        process.end()


@contextmanager
def fresh_shard(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = (sys.executable, "-m", "pserver.cli", "serve", "--shard", "0", *arguments)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with running(FakeCoordinator(tmp_path, PLAN)) as fake:
        yield fake


def ended(process: Forked | subprocess.Popen[str]) -> tuple[int, list[str]]:
    _, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, errors.splitlines()


def test_it_ends_with_its_job(coordinator: FakeCoordinator) -> None:
    arguments = ("--coordinator", coordinator.address, "--log-format", "json")
    with fresh_shard(*arguments, "--die-with-parent") as process:
        registered = coordinator.registered.get(timeout=WAIT_S)
        assert (registered.shard, registered.pid) == (0, process.pid)
        coordinator.ready.get(timeout=WAIT_S)
        coordinator.commands.put(pb.WatchResponse(shutdown=pb.Shutdown()))
        code, lines = ended(process)
    assert code == 0
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == [
        "listening",
        "registered, builds its update engine",
        "ready",
        "leaving",
    ]
    assert {event["role"] for event in events} == {"shard 0"}


def test_a_failed_job_gives_its_reason_in_one_line(coordinator: FakeCoordinator) -> None:
    coordinator.commands.put(
        pb.WatchResponse(shutdown=pb.Shutdown(failed=True, reason="loss diverged"))
    )
    with shard("--coordinator", coordinator.address) as process:
        code, lines = ended(process)
    assert (code, lines[-1]) == (1, "error PS601: job failed: loss diverged")


def test_a_job_that_was_stopped_is_no_success(coordinator: FakeCoordinator) -> None:
    coordinator.commands.put(pb.WatchResponse(shutdown=pb.Shutdown(reason="stopped by a signal")))
    with shard("--coordinator", coordinator.address) as process:
        code, lines = ended(process)
    assert code == 130
    assert any("the job was stopped by a signal" in line for line in lines)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_it_leaves_when_told_to(
    coordinator: FakeCoordinator, number: signal.Signals, status: int
) -> None:
    with shard("--coordinator", coordinator.address) as process:
        coordinator.ready.get(timeout=WAIT_S)
        process.send_signal(number)
        code, lines = ended(process)
    assert code == status
    # Not the last line for certain: a heartbeat may say just then what the shard waits for.
    assert any("leaving" in line for line in lines), lines
    assert not any("error" in line for line in lines), lines


def test_told_to_stop_it_stays_until_it_is_saved_or_told_again(
    coordinator: FakeCoordinator,
) -> None:
    for saved in (True, False):
        with shard("--coordinator", coordinator.address) as process:
            registered = coordinator.registered.get(timeout=WAIT_S)
            coordinator.ready.get(timeout=WAIT_S)
            with ShardClient(registered.address, registered.incarnation, PLAN, 0) as client:
                client.initialize(fence_of(client), whole(PLAN), INITIAL)
            process.send_signal(signal.SIGTERM)
            while not coordinator.heartbeats.get(timeout=WAIT_S).leaving:
                pass
            assert process.poll() is None
            if saved:
                coordinator.saved = True
            else:
                process.send_signal(signal.SIGTERM)
            code, lines = ended(process)
        coordinator.saved = False
        assert code == 75, lines
        assert any("told to stop: waiting for a checkpoint" in line for line in lines), lines


def test_it_leaves_while_it_waits_for_the_coordinator(tmp_path: Path) -> None:
    with running(FakeCoordinator(tmp_path, PLAN)) as fake:
        pass
    with shard("--coordinator", fake.address) as process:
        assert "listening" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        code, _ = ended(process)
    assert code == 75


def test_a_job_that_is_done_already_is_a_success(coordinator: FakeCoordinator) -> None:
    coordinator.failures.append(JobDone("the job of run directory runs/x is done"))
    with shard("--coordinator", coordinator.address) as process:
        code, lines = ended(process)
    assert code == 0
    assert any("the job of run directory runs/x is done" in line for line in lines)


def test_bad_input_is_one_line(coordinator: FakeCoordinator) -> None:
    coordinator.taken = True
    with shard("--coordinator", coordinator.address) as process:
        code, lines = ended(process)
    assert code == 2
    assert lines[-1] == "error PS120: shard 0 is held by another process"


def test_failures_at_the_coordinator_are_no_bad_input(coordinator: FakeCoordinator) -> None:
    """A shard that has nothing to lose leaves at once: it is worth another try, and gets one from
    who started it."""
    coordinator.failures.append(RemoteFailure("disk I/O error"))
    with shard("--coordinator", coordinator.address) as process:
        code, lines = ended(process)
    assert (code, lines[-1]) == (1, "error PS690: disk I/O error")


def test_it_can_be_looked_into(coordinator: FakeCoordinator) -> None:
    """Where its metrics are is the first thing that it says; they, and what its services look like,
    can be had from the beginning."""
    with shard("--coordinator", coordinator.address, "--log-format", "json") as process:
        listening = json.loads(process.stderr.readline())
        with urlopen(f"http://{listening['metrics']}/metrics", timeout=WAIT_S) as answer:
            assert b'pserver_ready{shard="0"} 0.0\n' in answer.read()
        with open_channel(f"127.0.0.1:{listening['port']}") as channel:
            services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert "psrpc.v1.ParameterServer" in services
        coordinator.ready.get(timeout=WAIT_S)
        with urlopen(f"http://{listening['metrics']}/metrics", timeout=WAIT_S) as answer:
            assert b'pserver_version{shard="0"} 0.0\n' in answer.read()
