"""Places for the commands of a page: a copy of the repository, with a network of its own or not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tests.test_architecture import ROOT

LIMIT_S = 600.0
"""How long a block may take."""

ADDRESS = "10.99.0.1"

_ENTER = f"""
ip link set lo up
ip address add {ADDRESS}/32 dev lo
mount --bind "$0" /etc/hosts
echo ready
exec cat
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit status, and all that it printed."""

    command: str
    status: int
    output: str


class Shell:
    """Runs scripts as a user of this machine would, in a copy of the repository. A context manager;
    one thread uses it."""

    def __init__(self, folder: Path, given: Mapping[str, str] | None = None) -> None:
        """``given`` is the environment of all scripts, in place of this process's."""
        self.folder = folder / "repository"
        self._given = os.environ if given is None else given
        self._meanwhile: list[Terminal] = []

    def __enter__(self) -> Self:
        _copy_repository(self.folder)
        return self

    def __exit__(self, *exception: object) -> None:
        for terminal in self._meanwhile:
            terminal.interrupt()
            terminal.wait()

    def run(self, script: str) -> Ended:
        """Runs a script to its end."""
        return self._open(script).wait()

    def run_again_until(self, text: str, script: str) -> Ended:
        """Runs a script again and again until it prints ``text``, or what runs meanwhile has ended.
        The exit status is 0 if it came so far."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            over = [each for each in self._meanwhile if not each.alive]
            ended = self.run(script)
            if text in ended.output:
                return replace(ended, status=0)
            if over or time.monotonic() >= deadline:
                printed = [ended.output, *(each.wait().output for each in over)]
                return replace(ended, status=ended.status or 1, output="\n".join(printed))
            time.sleep(3.0)

    def run_meanwhile(self, script: str) -> None:
        """Runs a script in a terminal of its own, while others run."""
        self._meanwhile.append(self._open(script))

    def wait_for_all(self) -> list[Ended]:
        """Waits for the scripts that run meanwhile."""
        terminals, self._meanwhile = self._meanwhile, []
        return [terminal.wait() for terminal in terminals]

    def run_together(self, scripts: Sequence[str]) -> list[Ended]:
        """Runs scripts at the same time, each in a terminal of its own, to their ends."""
        terminals = [self._open(script) for script in scripts]
        return [terminal.wait() for terminal in terminals]

    def run_served(self, servers: Sequence[str], client: str) -> list[Ended]:
        """Runs servers, and meanwhile ``client`` again and again until it works or one of them has
        ended; then presses Ctrl-C in all servers."""
        terminals = [self._open(script) for script in servers]
        deadline = time.monotonic() + LIMIT_S
        while True:
            ended = self.run(client)
            over = time.monotonic() >= deadline or any(not each.alive for each in terminals)
            if ended.status == 0 or over:
                break
        for terminal in terminals:
            terminal.interrupt()
        return [*(terminal.wait() for terminal in terminals), ended]

    def run_until(self, text: str, script: str) -> Ended:
        """Runs a script until it has printed ``text``, and then presses Ctrl-C.

        The exit status is 0 if it came so far and ended by that.
        """
        return self._open(script, text).wait()

    def _open(self, script: str, awaited: str = "") -> Terminal:
        shell = ["bash", "-euo", "pipefail", "-c", f'cd "$0"\n{script}', str(self.folder)]
        return Terminal([*self._enter(), *shell], script, self._given, awaited)

    def _enter(self) -> list[str]:
        """The command that starts a shell where the scripts run; empty for this machine."""
        return []


class Host(Shell):
    """The host ``host``, as a context manager: every port of it is free and nothing leaves it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._hosts = folder / "hosts"
        self._holder: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self._hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} host\n")
        user = ["--map-root-user"] if os.geteuid() else []
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", *user, "bash", "-euc", _ENTER, self._hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._holder is not None
        super().__exit__(*exception)
        # Closes its input, at which it ends.
        self._holder.communicate(timeout=30)

    def _enter(self) -> list[str]:
        assert self._holder is not None
        user = ["--user", "--preserve-credentials"] if os.geteuid() else []
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--mount", *user]


class Terminal:
    """A command in a process group of its own, as in a terminal."""

    def __init__(
        self, line: list[str], command: str, given: Mapping[str, str], awaited: str = ""
    ) -> None:
        """Interrupts the command once it has printed ``awaited``, where given."""
        self._command = command
        self._awaited = awaited
        self._interrupted = False
        self._printed: list[str] = []
        path = f"{Path(sys.prefix) / 'bin'}:{given['PATH']}"
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **given, "PATH": path}
        self._process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> Ended:
        """Waits for its end, and kills it after :data:`LIMIT_S`."""
        limit = threading.Timer(LIMIT_S, self._signal, [signal.SIGKILL])
        limit.start()
        status = self._process.wait()
        limit.cancel()
        # What it has started in the background holds the output open.
        self._signal(signal.SIGKILL)
        self._reader.join(10)
        if self._awaited or self._interrupted:
            status = 0 if self._interrupted and status in (0, 130, -signal.SIGINT) else status or 1
        return Ended(self._command, status, "".join(self._printed))

    @property
    def alive(self) -> bool:
        """Whether the command runs."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Presses Ctrl-C."""
        self._interrupted = True
        self._signal(signal.SIGINT)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            for line in printed:
                self._printed.append(line)
                if self._awaited and self._awaited in line and not self._interrupted:
                    self.interrupt()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


def unsupported() -> str:
    """The reason why this machine cannot make a :class:`Host`, empty if it can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "git") if not shutil.which(name)]
    if missing:
        return f"no {', '.join(missing)} here"
    user = ["--map-root-user"] if os.geteuid() else []
    command = ["unshare", "--net", "--mount", *user, "true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return tried.stderr.strip()


def _copy_repository(to: Path) -> None:
    """Copies what git knows or would add, and links ``.venv`` to the present one."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / ".venv").symlink_to(sys.prefix)
