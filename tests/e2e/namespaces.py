"""Processes in network namespaces of their own, joined by one that routes, and can stop routing.

Needs root and ``ip``; nothing else of the machine is changed but one interface, which goes with the
namespaces.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

NET = "10.213"
"""The first half of all addresses."""

_NAME = re.compile(r"psrpc-(\d+)-(\d)-\w+")
"""A namespace: the process that made it, which of its networks it is of, and its place."""

_COUNT = itertools.count()


def why_impossible() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "needs ip, on Debian: apt-get install iproute2"
    try:
        with Network([]):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.cmd}: {error.stderr.strip()}"


class Network:
    """A star: each place has a namespace and reaches the others through the hub's."""

    def __init__(self, places: Sequence[str]) -> None:
        """``places`` are at most nine."""
        self._pid, self._number = os.getpid(), next(_COUNT) % 10
        self._hub = self._namespace("hub")
        self._places = list(places)
        self._made: list[str] = []

    def __enter__(self) -> Network:
        remove_left_ones()
        try:
            self._make(self._hub)
            self._in(self._hub, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            # The caller itself is number 0, and routes nothing.
            self._link(0, None)
            _ip("route", "add", f"{NET}.0.0/16", "via", f"{NET}.0.1")
            for number, place in enumerate(self._places, 1):
                self._make(self._namespace(place))
                self._link(number, self._namespace(place))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove(_interface(self._pid, self._number, "n0"), self._made)

    def address(self, place: str) -> str:
        """The host that ``place`` is for the others."""
        return f"{NET}.{self._places.index(place) + 1}.2"

    def command(self, place: str, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` there."""
        return ["ip", "netns", "exec", self._namespace(place), *command]

    def cut(self, source: str, target: str) -> None:
        """Drops all packets of ``source`` to ``target`` from now on, without an error."""
        self._rule("add", source, target)

    def mend(self, source: str, target: str) -> None:
        """Undoes :meth:`cut`."""
        self._rule("del", source, target)

    def _rule(self, verb: str, source: str, target: str) -> None:
        where = ("from", self.address(source), "to", self.address(target))
        _ip("-n", self._hub, "rule", verb, "priority", "100", *where, "blackhole")

    def _namespace(self, place: str) -> str:
        return f"psrpc-{self._pid}-{self._number}-{place}"

    def _make(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")

    def _link(self, number: int, namespace: str | None) -> None:
        """A pair of interfaces, the hub's and that of ``namespace``, or of the caller's."""
        near, far = (_interface(self._pid, self._number, f"{end}{number}") for end in "hn")
        _ip("link", "add", near, "netns", self._hub, "type", "veth", "peer", "name", far)
        where: tuple[str, ...] = ()
        if namespace is not None:
            _ip("link", "set", far, "netns", namespace)
            where = ("-n", namespace)
        _ip("-n", self._hub, "addr", "add", f"{NET}.{number}.1/24", "dev", near)
        _ip("-n", self._hub, "link", "set", near, "up")
        _ip(*where, "addr", "add", f"{NET}.{number}.2/24", "dev", far)
        _ip(*where, "link", "set", far, "up")
        if namespace is not None:
            _ip(*where, "route", "add", "default", "via", f"{NET}.{number}.1")

    def _in(self, namespace: str, *command: str) -> None:
        _run("ip", "netns", "exec", namespace, *command)


def remove_left_ones() -> None:
    """Removes the networks of processes that were killed: all have the same addresses."""
    listed = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True, timeout=30)
    for found in _NAME.finditer(listed.stdout):
        pid, number = int(found[1]), int(found[2])
        if not Path(f"/proc/{pid}").exists():
            _remove(_interface(pid, number, "n0"), [found[0]])


def _interface(pid: int, number: int, end: str) -> str:
    # The kernel allows 15 characters.
    return f"ps{pid}{number}{end}"


def _remove(interface: str, namespaces: Sequence[str]) -> None:
    # A namespace is gone some time after it was deleted, and its interfaces with it.
    for made in (["link", "del", interface], *(["netns", "del", name] for name in namespaces)):
        subprocess.run(["ip", *made], check=False, capture_output=True, timeout=30)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
