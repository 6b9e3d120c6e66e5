"""Whether the pods of a submitted cluster start."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.launchers.kubernetes.kubectl import explained
from coordinator.launchers.kubernetes.starting import LOOK_S, seen, wait_started
from psrpc.core.errors import LaunchFailed


def pod(name: str, phase: str = "Running", **status: Any) -> Any:
    return {"metadata": {"name": name}, "status": {"phase": phase, **status}}


def waiting(reason: str, message: str) -> Any:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod("p", "Pending", containerStatuses=[{"image": "a/b:1", "state": state}])


def test_pods_that_wait_are_named_with_the_reason() -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    found = seen([pod("a"), pod("b", "Pending", conditions=[condition]), pod("c", "Pending")], 4)
    assert found.missing == [
        "pod b waits for a node: 0/3 nodes are available",
        "pod c waits",
        "1 pod not made yet",
    ]
    assert seen([pod("a"), pod("b", "Succeeded")], 2) == seen([], 0)


def test_the_wait_ends_with_the_last_pod_and_at_the_limit() -> None:
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    def look() -> list[Any]:
        return [pod("a", "Pending" if now[0] < 3 * LOOK_S else "Running")]

    assert wait_started(look, 1, lambda: now[0], pause, 60.0) == ""
    assert now == [3 * LOOK_S]
    now[0] = 0.0
    assert wait_started(look, 1, lambda: now[0], pause, 2 * LOOK_S) == "pod a waits"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            waiting("ImagePullBackOff", "no\nsuch"),
            "pod p: image 'a/b:1' cannot be had: no such; push",
        ),
        (waiting("CreateContainerConfigError", 'secret "s" not found'), "cannot be made: secret"),
    ],
)
def test_a_pod_that_never_starts_ends_the_wait_at_once(found: Any, said: str) -> None:
    with pytest.raises(LaunchFailed) as raised:
        wait_started(lambda: [found], 1, lambda: 0.0, lambda _: None, 60.0)
    assert said in str(raised.value)
    assert raised.value.code == "PS142"


def test_what_kubectl_says_becomes_one_line_with_the_fix() -> None:
    said = """E0312 10:00:00.1 1 memcache.go:265] "Unhandled Error"
Warning: metadata.finalizers: prefer a domain-qualified name
The connection to the server localhost:8080 was refused - did you specify the right host or port?
"""
    assert explained(said) == (
        "The connection to the server localhost:8080 was refused - did you specify the right host "
        "or port?; `kubectl config get-contexts` says which clusters there are: --context NAME"
    )
    assert explained("error: one\nerror: two\n") == "one; two"
    assert explained('namespaces "a\\b" not found').endswith(r"kubectl create namespace a\b")
    assert explained("") == "it fails without a word"
