"""Kills processes of containers while the job is seen to train, from one container beside them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.docker.engine import run

WAIT_S = 240
"""How long the job may take from one kill to the next."""

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from coordinator.client.client import CoordinatorClient
from coordinator.core.lifecycle import ENDED
from psrpc.core.errors import PsError
from psrpc.security.identity import Role
from psrpc.security.credentials import Security

def look():
    try:
        return client.get_job_status()
    except PsError as error:
        sys.exit(f"the coordinator does not answer any more: {error}")

def wait_for(step, ends):
    while True:
        seen = look()
        if seen.phase == "training" and seen.global_step >= step:
            return seen
        where = f"the job is {seen.phase} at step {seen.global_step} of {seen.total_steps}"
        if seen.phase in (*ENDED, "finishing", "stopping"):
            sys.exit(f"{where}: over before it was seen training at step {step}")
        if time.monotonic() > ends:
            sys.exit(f"{where}: too slow, {step} was awaited")
        time.sleep(0.02)

security = Security.from_options(Role.OPERATOR, Path("/app/certs"))
with CoordinatorClient("coordinator:5000", security) as client:
    look()
    print("watching", flush=True)
    for order in sys.stdin:
        pid, step = map(int, order.split())
        before = wait_for(step, time.monotonic() + float(sys.argv[1]))
        os.kill(pid, signal.SIGKILL)
        after = look()
        kill = {"phase": before.phase, "step": before.global_step, "total": before.total_steps}
        print(json.dumps({**kill, "step_after": after.global_step}), flush=True)
"""


@dataclass(frozen=True)
class Kill:
    """The coordinator's status right before a process was killed, and its step right after."""

    phase: str
    step: int
    total: int
    step_after: int


class Killer:
    """Takes orders, and carries them out one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def kill(self, container: str, step: int) -> None:
        """The container's process is to be killed once the job trains at ``step`` or later.

        The process itself, from outside: the engine would not start again what it killed.
        """
        pid = run(["docker", "inspect", "-f", "{{.State.Pid}}", container])
        assert int(pid) > 0, f"{container} does not run"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{pid} {step}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.finish()
            raise

    def finish(self) -> list[Kill]:
        """Returns the kills once all orders are carried out; fails at once if one cannot be."""
        # It ends by itself: no order waits longer than WAIT_S, no call longer than its deadline.
        said, _ = self._process.communicate()
        assert self._process.returncode == 0, said
        return [Kill(**json.loads(line)) for line in said.splitlines() if line.startswith("{")]


@contextmanager
def killer(image: str, project: str) -> Iterator[Killer]:
    """One that is already watching the coordinator of a compose project, as its operator."""
    command = ["docker", "run", "--rm", "-i", "--pid=host", "--network", f"{project}_default"]
    command += ["-v", f"{project}_operator-certs:/app/certs:ro", image]
    with subprocess.Popen(
        [*command, "python", "-c", PROGRAM, str(WAIT_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line == "watching\n":
                break
        else:
            raise AssertionError("".join(said))
        yield Killer(process)
