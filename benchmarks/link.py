"""Two hosts on one machine: network namespaces, joined by a link of given rate and delay."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from benchmarks.cluster import ROOT, RunFailed
from psrpc.ops.process import child_environment

RATE = 1e9
"""Bits per second of each direction."""

DELAY_S = 0.0005
"""One way."""

HOSTS = {"near": "10.214.0.1", "far": "10.214.0.2"}
"""The hosts and their addresses."""

LIMIT_S = 240.0
"""How long processes may take."""

_PREFIX = "benchlink"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(?:near|far|probe)\b")


class Link:
    """The two hosts, for one ``with`` block. Needs root and ``ip``. One thread uses it.

    The kernel shapes the link where it has ``netem``, otherwise a process does.
    """

    def __init__(self) -> None:
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Link:
        """Raises CalledProcessError: the machine does not allow it."""
        remove_stale()
        try:
            for host in HOSTS:
                _ip("netns", "add", namespace(host))
                _ip("-n", namespace(host), "link", "set", "lo", "up")
            if has_netem():
                self._shape()
            else:
                self._start_relay()
            for host, address in HOSTS.items():
                _ip("-n", namespace(host), "addr", "add", f"{address}/24", "dev", _device(host))
                _ip("-n", namespace(host), "link", "set", _device(host), "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay is not None:
            assert self._relay.stdin is not None
            self._relay.stdin.close()
            self._relay.wait()
        for host in HOSTS:
            remove(namespace(host))

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs ``command`` on ``host``."""
        return ["ip", "netns", "exec", namespace(host), *command]

    def relay_cpu_s(self) -> float | None:
        """Returns the CPU seconds of the relay so far; None if the kernel shapes the link."""
        if self._relay is None:
            return None
        fields = Path(f"/proc/{self._relay.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _shape(self) -> None:
        near, far = namespace("near"), namespace("far")
        pair = ("type", "veth", "peer", "name", _device("far"), "netns", far)
        _ip("link", "add", _device("near"), "netns", near, *pair)
        shape = ("netem", "rate", f"{RATE:.0f}bit", "delay", f"{DELAY_S * 1e6:.0f}us")
        for host in HOSTS:
            where = ("-n", namespace(host), "qdisc", "add", "dev", _device(host), "root")
            _run("tc", *where, *shape, "limit", "2000")

    def _start_relay(self) -> None:
        command = [sys.executable, "-m", "benchmarks.relay", *map(_device, HOSTS)]
        command += ["--rate", str(RATE), "--delay-s", str(DELAY_S)]
        self._relay = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise subprocess.CalledProcessError(self._relay.wait(), command, stderr="see above")
        for host in HOSTS:
            _ip("link", "set", _device(host), "netns", namespace(host))


class Processes:
    """Processes on the hosts of a link, which end with its ``with`` block."""

    def __init__(self, link: Link, folder: Path) -> None:
        self._link = link
        self._folder = folder
        self._stack = ExitStack()
        self._outputs: dict[subprocess.Popen[bytes], IO[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._outputs:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        self._stack.close()

    def start(self, host: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts ``command`` on ``host``."""
        output = self._stack.enter_context((self._folder / f"{len(self._outputs)}.log").open("w+b"))
        process = subprocess.Popen(
            self._link.command(host, command),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment({**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}),
        )
        self._outputs[process] = output
        return process

    def wait(self, awaited: Sequence[subprocess.Popen[bytes]]) -> None:
        """Blocks until the ``awaited`` have ended.

        Raises:
            RunFailed: one of them failed, or another one did before, or it takes too long.
        """
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in awaited):
            failed = [process for process in self._outputs if process.poll()]
            if failed:
                raise RunFailed(self.said(failed[0]) or f"exit status {failed[0].returncode}")
            if time.monotonic() > deadline:
                raise RunFailed(f"not done after {LIMIT_S:.0f} s")
            time.sleep(0.1)

    def said(self, process: subprocess.Popen[bytes]) -> str:
        """Returns the last line that ``process`` wrote."""
        return (self.text(process).strip().splitlines() or [""])[-1]

    def text(self, process: subprocess.Popen[bytes]) -> str:
        """Returns all that ``process`` wrote."""
        return Path(self._outputs[process].name).read_text(errors="replace")


def why_no_hosts() -> str:
    """Returns why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "needs ip, on Debian: apt-get install iproute2"
    try:
        _ip("netns", "add", namespace("probe"))
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    remove(namespace("probe"))
    return ""


def has_netem() -> bool:
    """Whether the kernel can delay packets."""
    where = ("-n", namespace("near"), "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    try:
        _run("tc", *where)
        _run("tc", "-n", namespace("near"), "qdisc", "del", "dev", "lo", "root")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def namespace(host: str) -> str:
    """Returns the name of this process's namespace for ``host``."""
    return f"{_PREFIX}-{os.getpid()}-{host}"


def remove_stale() -> None:
    """Removes what processes that were killed have left."""
    for name in stale(_run("ip", "netns", "list"), lambda pid: Path(f"/proc/{pid}").exists()):
        remove(name)


def stale(listed: str, alive: Callable[[int], bool]) -> list[str]:
    """Returns those namespaces of :func:`namespace` in a list of all whose process is gone."""
    return [match[0] for match in _NAME.finditer(listed) if not alive(int(match[1]))]


def remove(name: str) -> None:
    """Removes a namespace with the processes in it; nothing happens if there is none."""
    found = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=False, timeout=30
    )
    for process in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=30)


def _device(host: str) -> str:
    return f"bl{os.getpid()}{host}"[:15]


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
