"""Finds a Docker engine and a base image, or says why there is none."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A script that makes an engine usable where there is none, and prints the name of a base image
# last. Optional: an engine that reaches a registry needs no help.
HOOK = Path(os.environ.get("DOCKER_ENGINE", ROOT.parent / "shared" / "docker-engine"))
PID_FILE = Path("/var/run/docker.pid")
LIMIT_S = 1800


def run(command: Sequence[str | Path], limit_s: float = LIMIT_S, **environment: str) -> str:
    """Standard output of a command that must succeed; what it said is in the error."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, **environment},
        check=False,
    )
    line = " ".join(map(str, command))
    assert done.returncode == 0, f"{line}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def succeeds(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


@contextmanager
def base_image() -> Iterator[dict[str, str]]:
    """An engine that answers, and the build argument for the base image to use on it.

    An engine that was started for this is stopped again.
    """
    running = succeeds("docker", "info")
    # An environment variable reaches compose by itself.
    chosen: dict[str, str] = {}
    if HOOK.is_file() and not (running and "BASE_IMAGE" in os.environ):
        made = run([HOOK]).splitlines()[-1]
        chosen = {"BASE_IMAGE": os.environ.get("BASE_IMAGE", made)}
    if not succeeds("docker", "info"):
        pytest.fail(
            "make test-docker needs a Docker engine: `docker info` fails, and there is no script "
            f"at {HOOK} that makes one (DOCKER_ENGINE names another); start Docker and try again",
            pytrace=False,
        )
    try:
        yield chosen
    finally:
        if not running and PID_FILE.is_file():
            stop_engine(int(PID_FILE.read_text()))


def stop_engine(pid: int) -> None:
    """Ends the engine and waits for its end."""
    watched = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGTERM)
        assert select.select([watched], [], [], 60)[0], "the Docker engine does not stop"
    finally:
        os.close(watched)


def compose_command() -> list[str]:
    """Compose v2 where there is one, otherwise v1."""
    if succeeds("docker", "compose", "version"):
        return ["docker", "compose"]
    assert succeeds("docker-compose", "version"), "make test-docker needs Docker Compose, v1 or v2"
    return ["docker-compose"]
