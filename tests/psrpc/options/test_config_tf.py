from __future__ import annotations

import json
from typing import Any

import pytest

from psrpc.core.errors import InvalidArgument
from psrpc.options.config_tf import values_of

CLUSTER = {"chief": ["chief:1"], "ps": ["ps-0:2", "ps-1:3"], "worker": ["w-0:4", "w-1:5"]}


def found(section: str, cluster: Any, task: Any) -> dict[str, str]:
    text = json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
    return {key: said.text for key, said in values_of(section, text).items()}


def test_every_process_of_a_tfjob_finds_its_place() -> None:
    assert found("coordinator", CLUSTER, {"type": "chief", "index": 0}) == {
        "bind": "0.0.0.0:1",
        "shards": "2",
    }
    assert found("pserver", CLUSTER, {"type": "ps", "index": 1}) == {
        "shard": "1",
        "bind": "0.0.0.0:3",
        "advertise": "ps-1:3",
        "coordinator": "chief:1",
    }
    for task in ({"type": "worker", "index": 1}, {"type": "chief"}, {"type": "evaluator"}):
        assert found("worker", CLUSTER, task) == {"coordinator": "chief:1"}


def test_a_master_is_a_chief() -> None:
    cluster = {"master": ["m:1"], "ps": ["p:2"]}
    assert found("coordinator", cluster, {"type": "master", "index": 0})["bind"] == "0.0.0.0:1"
    assert found("pserver", cluster, {"type": "ps", "index": "0"})["coordinator"] == "m:1"


def test_without_a_chief_the_first_worker_has_the_coordinator() -> None:
    cluster = {"ps": ["p:2"], "worker": ["w:4", "v:4"]}
    assert found("coordinator", cluster, {"type": "worker", "index": 0}) == {
        "bind": "0.0.0.0:4",
        "shards": "1",
    }
    assert found("worker", cluster, {"type": "worker", "index": 1}) == {"coordinator": "w:4"}


def test_one_that_names_no_cluster_says_nothing() -> None:
    assert values_of("pserver", "{}") == {}


@pytest.mark.parametrize(
    ("section", "text", "message"),
    [
        ("worker", "{", "TF_CONFIG is not JSON: Expecting"),
        ("worker", "[]", 'TF_CONFIG: expected an object with "cluster"'),
        ("worker", '{"cluster": []}', "cluster is []; expected an object of lists"),
        ("worker", '{"cluster": {"chief": "c:1"}}', "cluster.chief is 'c:1'; expected a list"),
        ("worker", '{"cluster": {"chief": ["c"]}, "task": {"type": "worker"}}',
         "cluster.chief[0] is 'c'; expected HOST:PORT"),
        ("coordinator", '{"cluster": {"ps": ["p:1"]}, "task": {"type": "ps"}}',
         "cluster has no chief, master or worker"),
        ("pserver", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}),
         "task is worker 1; expected ps for `pserver serve`; start what belongs to worker 1 here"),
        ("pserver", json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": 2}}),
         "task is ps 2; expected one of the 2 in cluster.ps"),
        ("pserver", json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": -1}}),
         "task.index is -1"),
        ("pserver", json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": True}}),
         "task is {'type': 'ps', 'index': True}; expected"),
        ("coordinator", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}}),
         "task is worker 0; expected chief 0 for `coordinator serve`"),
    ],
)  # fmt: skip
def test_impossible_values_are_named(section: str, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        values_of(section, text)
    assert message in str(caught.value)
