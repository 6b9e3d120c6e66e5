"""Whether the pods of a submitted cluster start, and why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psrpc.core.errors import LaunchFailed
from psrpc.core.text import counted, sanitize

CODE = "PS142"

LOOK_S = 2.0
"""Between two looks."""

_IMAGE = (
    "image REF cannot be had: {}; push it where the cluster's nodes can pull it, or name another "
    "--image; --pull-secret names a Secret with the registry's password"
)
_FINAL = {
    "ErrImagePull": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "ErrImageNeverPull": _IMAGE,
    "InvalidImageName": _IMAGE,
    "CreateContainerConfigError": "its container cannot be made: {}",
    "CreateContainerError": "its container cannot be made: {}",
}
"""Reasons for which a container waits without end, each with its advice."""


@dataclass(frozen=True)
class Start:
    """What pods are seen to do.

    Attributes:
        missing: pods that do not run yet, each with the reason.
        hopeless: why one of them never will without help; empty if there is none.
    """

    missing: Sequence[str] = ()
    hopeless: str = ""


def seen(pods: Sequence[Any], expected: int) -> Start:
    """Returns what the documents of all pods of a cluster say of its start."""
    missing = []
    for pod in pods:
        name = pod["metadata"]["name"]
        status = pod.get("status", {})
        for each in status.get("containerStatuses", ()):
            waits = each["state"].get("waiting", {})
            if waits.get("reason") in _FINAL:
                why = _line(waits.get("message") or waits["reason"])
                advice = _FINAL[waits["reason"]].replace("REF", repr(each["image"]))
                return Start(hopeless=f"pod {name}: {advice.format(why)}")
        if status.get("phase", "Pending") == "Pending":
            missing.append(f"pod {name} waits{_unscheduled(status)}")
    if len(pods) < expected:
        missing.append(f"{counted(expected - len(pods), 'pod')} not made yet")
    return Start(missing)


def wait_started(
    look: Callable[[], Sequence[Any]],
    expected: int,
    clock: Callable[[], float],
    pause: Callable[[float], object],
    limit_s: float,
) -> str:
    """Waits until all pods run.

    Args:
        look: returns the documents of all pods of the cluster.
        clock: seconds, of any beginning.
        pause: waits that many seconds.

    Returns:
        What is missing after ``limit_s``; empty if all run.

    Raises:
        LaunchFailed: a pod cannot start without help; says which, and what to do.
    """
    end = clock() + limit_s
    while True:
        found = seen(look(), expected)
        if found.hopeless:
            raise LaunchFailed(found.hopeless, code=CODE)
        if not found.missing or clock() >= end:
            return "; ".join(found.missing)
        pause(LOOK_S)


def _unscheduled(status: Any) -> str:
    for each in status.get("conditions", ()):
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return f" for a node: {_line(each.get('message', ''))}"
    return ""


def _line(text: str) -> str:
    return sanitize(" ".join(text.split()))
