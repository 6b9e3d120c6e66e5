"""Builds the image and trains MNIST on it: 2 shards, 1 coordinator, 2 workers, all containers.
Then once more, with a shard and a worker killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docker.engine import LIMIT_S, ROOT, base_image, compose_command, run

# Building the image downloads and unpacks TensorFlow.
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]

PROJECT = f"psrpc-test-{os.getpid()}"
IMAGE = "tf-pserver:test"
OF_PROJECT = f"label=com.docker.compose.project={PROJECT}"
SERVERS = ("coordinator", "shard-0", "shard-1")


class Compose:
    """``docker/compose.yml`` under a project name of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._command = [*compose_command(), "-p", PROJECT, "-f", str(ROOT / "docker/compose.yml")]
        self._environment = environment

    def __call__(self, *arguments: str) -> str:
        return run([*self._command, *arguments], **self._environment)

    def with_environment(self, **changes: str) -> Compose:
        return Compose({**self._environment, **changes})

    def containers(self) -> list[str]:
        return run(["docker", "ps", "-aq", "--filter", OF_PROJECT]).split()


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    with base_image() as build_arguments:
        found = Compose(
            {
                **build_arguments,
                "IMAGE": IMAGE,
                "JOB": "examples/mnist_softmax.py",
                "JOB_OPTIONS": "--mode sync --replicas 2 --set epochs=1 "
                "--set optimizer.learning_rate=0.1",
            }
        )
        try:
            found("build")
            yield found
        finally:
            found("down", "--volumes", "--remove-orphans")


def wait_until_healthy(services: tuple[str, ...], since: float) -> None:
    """Reads the engine's events, so there is nothing to poll."""
    command = ["docker", "events", "--since", f"{since:.0f}", "--filter", OF_PROJECT]
    command += ["--filter", "event=health_status", "--until", f"{since + 300:.0f}"]
    missing = set(services)
    with subprocess.Popen(
        [*command, "--format", "{{json .}}"], stdout=subprocess.PIPE, text=True
    ) as events:
        assert events.stdout is not None
        for line in events.stdout:
            event = json.loads(line)
            if event["Action"] == "health_status: healthy":
                missing.discard(event["Actor"]["Attributes"]["com.docker.compose.service"])
            if not missing:
                break
        events.terminate()
    assert not missing, f"not healthy within 300 s: {sorted(missing)}"


def test_the_image_runs_as_an_ordinary_user(compose: Compose) -> None:
    assert run(["docker", "run", "--rm", IMAGE, "id", "-u"]) == "10001"
    for command in ("coordinator", "pserver", "worker"):
        assert "usage" in run(["docker", "run", "--rm", IMAGE, command, "--help"])


def test_a_cluster_of_containers_trains_mnist(compose: Compose) -> None:
    since = time.time()
    compose("up", "-d", *SERVERS)
    wait_until_healthy(SERVERS, since)
    compose("up", "-d", "--scale", "worker=2", "--no-recreate")
    containers = compose.containers()
    assert len(containers) == 5
    statuses = run(["docker", "wait", *containers]).split()
    assert statuses == ["0"] * 5, compose("logs", "--no-color")
    summary = read_summary()
    assert summary["phase"] == "done"
    assert (summary["mode"], summary["shards"], summary["workers"]) == ("sync", 2, 2)
    assert summary["examples"] == 60000
    # 300 rounds of softmax regression; a plain loop gives 0.89 to 0.90.
    assert summary["eval"]["accuracy"] > 0.87
    compose("down", "--volumes", "--remove-orphans")
    assert compose.containers() == []


def test_what_is_killed_comes_back_and_every_example_counts_once(compose: Compose) -> None:
    options = "--mode sync --replicas 2 --set epochs=3 --set checkpoint_every=100"
    lossy = compose.with_environment(RUN="lossy", JOB_OPTIONS=options)
    lossy("up", "-d", "--scale", "worker=2")
    containers = lossy.containers()
    victims = [lossy("ps", "-q", service).split()[0] for service in ("worker", "shard-1")]
    for victim, step in zip(victims, (150, 400), strict=True):
        wait_for_step(lossy, step)
        kill(victim)
    statuses = run(["docker", "wait", *containers]).split()
    assert statuses == ["0"] * 5, lossy("logs", "--no-color")
    assert [restarts(container) for container in victims] == [1, 1]
    assert sum(map(restarts, containers)) == 2
    summary = read_summary()
    assert (summary["phase"], summary["examples"]) == ("done", 180000)
    assert summary["generation"] > 1
    lossy("down", "--volumes", "--remove-orphans")


WAIT_FOR_STEP = """
import sys, threading
from coordinator.client import CoordinatorClient
from psrpc.errors import PsError
with CoordinatorClient("localhost:5000") as client:
    for _ in range(15000):
        try:
            status = client.get_job_status()
        except PsError:
            status = None
        if status is not None and status.global_step >= int(sys.argv[1]):
            sys.exit(0)
        threading.Event().wait(0.1)
sys.exit("the job does not come to step " + sys.argv[1])
"""


def wait_for_step(compose: Compose, step: int) -> None:
    """Asks the coordinator, from within its container."""
    compose("exec", "-T", "coordinator", "python", "-c", WAIT_FOR_STEP, str(step))


def kill(container: str) -> None:
    """The process itself, from outside: the engine would not start again what it killed."""
    pid = run(["docker", "inspect", "-f", "{{.State.Pid}}", container])
    as_root = ["docker", "run", "--rm", "--pid=host", "--user=0", IMAGE]
    run([*as_root, "sh", "-c", f"kill -9 {pid}"])


def restarts(container: str) -> int:
    return int(run(["docker", "inspect", "-f", "{{.RestartCount}}", container]))


def read_summary() -> dict[str, Any]:
    """From the volume, which has outlived its containers' processes."""
    volume = ["-v", f"{PROJECT}_runs:/app/runs"]
    text = run(["docker", "run", "--rm", *volume, IMAGE, "sh", "-c", "cat runs/*/summary.json"])
    summary: dict[str, Any] = json.loads(text)
    return summary
