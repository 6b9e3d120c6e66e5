"""Which NetworkPolicies keep the pods of a cluster apart."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.launchers.kubernetes.policies import closing

LABELS = {"app": "ours", "run": "first"}
DENY: Any = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
DNS: Any = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53}]}
OURS: Any = {"podSelector": {"matchLabels": {"app": "ours"}}}


def closed(*specs: Any) -> list[str]:
    policies = [
        {"metadata": {"name": f"p{n}", "namespace": "lab"}, "spec": spec}
        for n, spec in enumerate(specs)
    ]
    return closing(policies, LABELS, 5000)


@pytest.mark.parametrize(
    "spec",
    [
        DENY,
        {**OURS, "egress": [DNS]},
        {**DENY, "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "dns"}}}]}]},
        {
            **DENY,
            "egress": [
                {
                    "to": [
                        {
                            **OURS,
                            "namespaceSelector": {
                                "matchLabels": {"kubernetes.io/metadata.name": "kube-system"}
                            },
                        }
                    ]
                }
            ],
        },
        {**DENY, "egress": [{"ports": [{"port": 5001, "endPort": 9000}]}]},
    ],
)
def test_what_forbids_the_way_out_is_named(spec: Any) -> None:
    assert closed(spec) == ["p0"]


@pytest.mark.parametrize(
    "spec",
    [
        {"podSelector": {}},
        {"podSelector": {}, "policyTypes": ["Ingress"]},
        {**DENY, "podSelector": {"matchLabels": {"app": "web"}}},
        {**DENY, "podSelector": {"matchExpressions": [{"key": "x", "operator": "Exists"}]}},
        {**DENY, "egress": [{}]},
        {**DENY, "egress": [DNS, {"to": [OURS]}]},
        {**DENY, "egress": [{"to": [{"namespaceSelector": {}}]}]},
        {**DENY, "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]},
        {**DENY, "egress": [{"ports": [{"port": 4000, "endPort": 5000}]}]},
        {**DENY, "egress": [{"ports": [{"protocol": "TCP"}]}]},
    ],
)
def test_what_leaves_it_open_is_not(spec: Any) -> None:
    assert closed(spec) == []


def test_policies_add_up() -> None:
    assert closed(DENY, {**OURS, "policyTypes": ["Egress"]}) == ["p0", "p1"]
    assert closed(DENY, {**OURS, "egress": [{"to": [OURS]}]}) == []
