"""Whether the NetworkPolicies of a namespace let the pods of a cluster reach each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_NAMESPACE = "kubernetes.io/metadata.name"
"""A label that each namespace has."""


def closing(policies: Sequence[Any], labels: Mapping[str, str], port: int) -> list[str]:
    """Returns the names of the policies that forbid pods with ``labels`` to call ``port`` of each
    other; none if one of the policies allows it.

    Only the way out matters: policies add up, and the cluster's own one opens the way in. Addresses
    and expressions are taken as open, since only Kubernetes can tell.
    """
    found = []
    for each in policies:
        spec, metadata = each.get("spec") or {}, each["metadata"]
        rules = spec.get("egress") or ()
        # A policy without types is for the way out if it has rules for that.
        if "Egress" not in spec.get("policyTypes", ["Egress"] if rules else []):
            continue
        if not _selects(spec.get("podSelector"), labels, unsure=False):
            continue
        if any(_opens(rule, labels, port, metadata.get("namespace", "")) for rule in rules):
            return []
        found.append(str(metadata["name"]))
    return found


def _opens(rule: Any, labels: Mapping[str, str], port: int, namespace: str) -> bool:
    ports, peers = rule.get("ports") or (), rule.get("to") or ()
    through = not ports or any(_includes(each, port) for each in ports)
    return through and (
        not peers
        or any(
            "ipBlock" in peer
            or (
                _selects(peer.get("namespaceSelector"), {_NAMESPACE: namespace}, unsure=True)
                and _selects(peer.get("podSelector"), labels, unsure=True)
            )
            for peer in peers
        )
    )


def _includes(ports: Any, port: int) -> bool:
    first = ports.get("port")
    if ports.get("protocol", "TCP") != "TCP":
        return False
    return not isinstance(first, int) or first <= port <= ports.get("endPort", first)


def _selects(selector: Any, labels: Mapping[str, str], *, unsure: bool) -> bool:
    """Returns whether what has ``labels`` is selected; ``unsure`` if only Kubernetes can tell."""
    selector = selector or {}
    wanted = selector.get("matchLabels") or {}
    fits = all(labels.get(name) == value for name, value in wanted.items())
    return fits and (unsure or not selector.get("matchExpressions"))
