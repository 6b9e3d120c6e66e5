"""``TF_CONFIG``, which Kubeflow's TFJob and others give to every process of a TensorFlow cluster.

    {"cluster": {"chief": ["host:2222"], "ps": ["host:2222", ...], "worker": [...]},
     "task": {"type": "ps", "index": 0}}

Every process listens on the address that the cluster has for it, and ``ps`` i is shard i. The
coordinator is the ``chief`` (``master`` in older clusters). If there is none, it is worker 0, which
TensorFlow then uses as the chief, too. Since our workers do not listen, the port of worker 0 is
free, and ``coordinator serve`` and ``worker run`` can both run there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from psrpc.core.errors import InvalidArgument
from psrpc.options.config_keys import variable

NAME = "TF_CONFIG"

TAKEN = {
    "coordinator": ("bind", "shards"),
    "pserver": ("advertise", "bind", "coordinator", "shard"),
    "worker": ("coordinator",),
}
"""The settings that each command takes from ``TF_CONFIG``, with the lowest precedence."""

_CHIEFS = ("chief", "master", "worker")
"""Task types that may be the coordinator; the first of them that the cluster has is the
coordinator."""


@dataclass(frozen=True)
class TfConfigValue:
    """The text of a setting and its place in ``TF_CONFIG``."""

    text: str
    where: str


def values_of(section: str, text: str) -> dict[str, TfConfigValue]:
    """Reads the values of ``TF_CONFIG`` for the command of ``section``; none if it names no
    cluster.

    Raises:
        InvalidArgument: ``TF_CONFIG`` cannot be read, or its task is that of another command.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{NAME} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise _wrong('expected an object with "cluster" and "task"')
    if "cluster" not in document:
        return {}
    cluster = _cluster(document["cluster"])
    task, index = _task(document.get("task", {}))
    if section == "worker":
        return _coordinator(cluster)
    return _shard(cluster, task, index) if section == "pserver" else _serve(cluster, task, index)


def _shard(cluster: dict[str, list[str]], task: str, index: int) -> dict[str, TfConfigValue]:
    addresses = cluster.get("ps", [])
    if task != "ps":
        raise _another(task, index, "pserver serve", "ps")
    if index >= len(addresses):
        raise _wrong(f"task is ps {index}; expected one of the {len(addresses)} in cluster.ps")
    own = addresses[index]
    where = f"cluster.ps[{index}]"
    return {
        "shard": TfConfigValue(str(index), "task.index"),
        "bind": TfConfigValue(f"0.0.0.0:{_port(own, where)}", where),
        "advertise": TfConfigValue(own, where),
        **_coordinator(cluster),
    }


def _serve(cluster: dict[str, list[str]], task: str, index: int) -> dict[str, TfConfigValue]:
    role, where = _chief(cluster)
    if (task, index) != (role, 0):
        raise _another(task, index, "coordinator serve", f"{role} 0")
    port = _port(cluster[role][0], where)
    found = {"bind": TfConfigValue(f"0.0.0.0:{port}", where)}
    if shards := cluster.get("ps"):
        found["shards"] = TfConfigValue(str(len(shards)), "cluster.ps")
    return found


def _coordinator(cluster: dict[str, list[str]]) -> dict[str, TfConfigValue]:
    if not any(map(cluster.get, _CHIEFS)):
        # The coordinator may be set elsewhere.
        return {}
    role, where = _chief(cluster)
    _port(cluster[role][0], where)
    return {"coordinator": TfConfigValue(cluster[role][0], where)}


def _chief(cluster: dict[str, list[str]]) -> tuple[str, str]:
    for role in _CHIEFS:
        if cluster.get(role):
            return role, f"cluster.{role}[0]"
    raise _wrong("cluster has no chief, master or worker; the coordinator would be the first")


def _cluster(found: Any) -> dict[str, list[str]]:
    if not isinstance(found, dict):
        raise _wrong(f"cluster is {found!r:.100}; expected an object of lists of HOST:PORT")
    cluster = {}
    for role, addresses in found.items():
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise _wrong(f"cluster.{role} is {addresses!r:.100}; expected a list of HOST:PORT")
        cluster[role] = addresses
    return cluster


def _task(found: Any) -> tuple[str, int]:
    task, index = (found.get("type"), found.get("index", 0)) if isinstance(found, dict) else (0, 0)
    # Some launchers write the index as a string.
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    if not isinstance(task, str) or isinstance(index, bool) or not isinstance(index, int):
        raise _wrong(f'task is {found!r:.100}; expected {{"type": "ps", "index": 0}}')
    if index < 0:
        raise _wrong(f"task.index is {index}; expected 0 or more")
    return task, index


def _port(address: str, where: str) -> int:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise _wrong(f"{where} is {address!r}; expected HOST:PORT")
    return int(port)


def _another(task: str, index: int, command: str, expected: str) -> InvalidArgument:
    section = command.split()[0]
    needed = ", ".join(variable(key) for key in TAKEN[section])
    return _wrong(
        f"task is {task} {index}; expected {expected} for `{command}`; start what belongs to "
        f"{task} {index} here, or unset {NAME}, or say all of {needed} or their options"
    )


def _wrong(what: str) -> InvalidArgument:
    return InvalidArgument(f"{NAME}: {what}")
