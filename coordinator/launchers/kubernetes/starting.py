"""Finds out whether the pods of a submitted cluster start, and why one does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psrpc.core.errors import LaunchFailed
from psrpc.core.text import counted, sanitize

CODE = "PS142"

LOOK_S = 2.0
"""Pause between two looks at the pods."""

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
"""Reasons for which a container waits forever, each with a message that has the advice."""


@dataclass(frozen=True)
class Start:
    """How far the pods of a cluster have started.

    Attributes:
        missing: pods that do not run yet, each with the reason.
        hopeless: why one of these cannot start without help; empty if each can.
    """

    missing: Sequence[str] = ()
    hopeless: str = ""


def seen(pods: Sequence[Any], expected: int) -> Start:
    """Returns how far a cluster has started, from the documents of all its pods."""
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
        clock: returns seconds since any fixed moment.
        pause: waits that many seconds.

    Returns:
        The pods that are missing after ``limit_s``, with reasons; empty if all run.

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
